//! Ids of tool calls, in the form that the model's chat template takes back.

use crate::dialect::derived_id;

/// Letters and digits of an id that Mistral's templates take.
const NINE: usize = 9;

/// How the ids of tool calls are made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallIdForm {
    /// The API's prefix and 24 letters and digits.
    #[default]
    Usual,
    /// Nine letters and digits: Mistral's templates refuse others.
    NineLetters,
    /// `functions.NAME:NUMBER`, counted over the whole conversation (Kimi K2).
    Numbered {
        /// Calls in the conversation before the answer.
        before: usize,
    },
}

impl CallIdForm {
    /// Id of a call. `index`: its place among the calls of its choice.
    pub fn call_id(
        self,
        prefix: &str,
        response_id: &str,
        choice: usize,
        index: usize,
        name: &str,
    ) -> String {
        let usual = || derived_id(prefix, response_id, choice, index);
        match self {
            Self::Usual => usual(),
            Self::NineLetters => usual()[prefix.len()..][..NINE].to_owned(),
            Self::Numbered { before } => format!("functions.{name}:{}", before + index),
        }
    }
}

/// Id of a response, from which those of its parts are derived.
#[derive(Debug, Clone, Default)]
pub struct AnswerIds {
    /// With the API's prefix.
    pub response: String,
    pub call_form: CallIdForm,
}

impl AnswerIds {
    /// Id of a call. `index`: its place among the calls of its choice.
    pub fn call_id(&self, prefix: &str, choice: usize, index: usize, name: &str) -> String {
        self.call_form
            .call_id(prefix, &self.response, choice, index, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_named_as_templates_take_them_back() {
        let of = |form: CallIdForm| form.call_id("call_", "a", 0, 1, "f");
        assert_eq!(of(CallIdForm::Usual), derived_id("call_", "a", 0, 1));
        let nine = of(CallIdForm::NineLetters);
        assert_eq!(nine.len(), 9);
        assert!(nine.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        let numbered = CallIdForm::Numbered { before: 2 };
        assert_eq!(of(numbered), "functions.f:3");
    }
}
