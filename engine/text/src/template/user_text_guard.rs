//! Texts of users that hold the text of a control token.
//!
//! A tokenizer with a guard finds its control tokens in the text of the chat template, not in what
//! users write. Both reach it as one text, so the guard marks the control tokens in the users'
//! part: [`UserTextGuard::escape`] puts a character into each of them, which
//! [`UserTextGuard::unescape`] takes away once the tokenizer has looked for control tokens.

use std::borrow::Cow;
use std::sync::Arc;

use aho_corasick::AhoCorasick;
use minijinja::Value;
use minijinja::value::ValueKind;

use super::json_value::members_of;

/// Put into control tokens behind their first character; a user's own is doubled. A noncharacter of
/// Unicode: texts that are meant for interchange do not hold it.
const ESCAPE: char = '\u{fdd0}';

/// See the module. The default one guards nothing.
#[derive(Debug, Default, Clone)]
pub struct UserTextGuard {
    control_tokens: Option<Arc<AhoCorasick>>,
}

impl UserTextGuard {
    /// Guards nothing.
    pub fn none() -> &'static Self {
        static NONE: UserTextGuard = UserTextGuard {
            control_tokens: None,
        };
        &NONE
    }

    /// `control_tokens`: their texts. One of a single character is not guarded, because nothing can
    /// be put into it.
    pub fn new(control_tokens: &[String]) -> Result<Self, String> {
        let divisible = control_tokens.iter();
        let divisible: Vec<_> = divisible.filter(|text| text.chars().count() > 1).collect();
        if divisible.is_empty() {
            return Ok(Self::default());
        }
        let found = AhoCorasick::new(divisible).map_err(|err| err.to_string())?;
        Ok(Self {
            control_tokens: Some(Arc::new(found)),
        })
    }

    /// `text` of a user, without control tokens.
    pub fn escape<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let Some(control_tokens) = &self.control_tokens else {
            return Cow::Borrowed(text);
        };
        let is_start = |found: aho_corasick::Match| {
            let first = text[found.start()..].chars().next();
            found.start() + first.map_or(0, char::len_utf8)
        };
        let own = text.match_indices(ESCAPE).map(|(at, _)| at);
        let mut places: Vec<usize> = control_tokens
            .find_overlapping_iter(text)
            .map(is_start)
            .collect();
        places.sort_unstable();
        places.dedup();
        places.extend(own);
        if places.is_empty() {
            return Cow::Borrowed(text);
        }
        places.sort_unstable();
        let mut escaped = String::with_capacity(text.len() + places.len() * ESCAPE.len_utf8());
        let mut from = 0;
        for place in places {
            escaped.push_str(&text[from..place]);
            escaped.push(ESCAPE);
            from = place;
        }
        escaped.push_str(&text[from..]);
        Cow::Owned(escaped)
    }

    /// The text that `escape` was given.
    pub fn unescape<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.control_tokens.is_none() || !text.contains(ESCAPE) {
            return Cow::Borrowed(text);
        }
        let mut plain = String::with_capacity(text.len());
        let mut characters = text.chars();
        while let Some(character) = characters.next() {
            if character != ESCAPE {
                plain.push(character);
                continue;
            }
            plain.extend(characters.next());
        }
        Cow::Owned(plain)
    }

    /// `value` with all its texts escaped, keys of objects excepted.
    pub fn escape_value(&self, value: Value) -> Value {
        if self.control_tokens.is_none() {
            return value;
        }
        if let Some(text) = value.as_str() {
            return match self.escape(text) {
                Cow::Borrowed(_) => value,
                Cow::Owned(escaped) => Value::from(escaped),
            };
        }
        match value.kind() {
            ValueKind::Map => match members_of(&value) {
                Some(members) => {
                    let members = members.into_iter();
                    Value::from_pairs(
                        members.map(|(name, member)| (name, self.escape_value(member))),
                    )
                }
                None => value,
            },
            ValueKind::Seq => match value.try_iter() {
                Ok(items) => items.map(|item| self.escape_value(item)).collect(),
                Err(_) => value,
            },
            _ => value,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::super::messages::object;
    use super::*;

    fn guard() -> UserTextGuard {
        let tokens = ["<s>", "[INST]", "s><x", "é]"].map(str::to_owned);
        UserTextGuard::new(&tokens).unwrap()
    }

    #[test]
    fn texts_without_control_tokens_stay_as_they_are() {
        assert!(matches!(guard().escape("plain [INST"), Cow::Borrowed(_)));
        let none = UserTextGuard::default();
        assert!(matches!(none.escape("<s>"), Cow::Borrowed(_)));
    }

    #[test]
    fn texts_of_objects_and_lists_are_escaped() {
        let part = object([("text", Value::from("a<s>b"))]);
        let value = object([("content", Value::from(vec![part])), ("n", Value::from(3))]);
        let escaped = guard().escape_value(value).to_string();
        assert!(!escaped.contains("<s>"), "{escaped}");
        assert!(escaped.contains('3'), "{escaped}");
    }

    proptest! {
        #[test]
        fn escaped_texts_hold_no_control_token_and_come_back(
            parts in proptest::collection::vec(
                prop_oneof![
                    Just("<s>"), Just("[INST]"), Just("[INST"), Just("s><x"), Just("é]"), Just("<"),
                    Just("\u{fdd0}"), Just("a"), Just("]"),
                ],
                0..12,
            ),
        ) {
            let text = parts.concat();
            let escaped = guard().escape(&text).into_owned();
            for token in ["<s>", "[INST]", "s><x", "é]"] {
                prop_assert!(!escaped.contains(token), "{escaped:?}");
            }
            prop_assert_eq!(guard().unescape(&escaped), text);
        }
    }
}
