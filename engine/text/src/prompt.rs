//! A request's prompt as token ids, no longer than the context.

use std::sync::Arc;

use crate::refusal::{RefusalCode, TextRefusal};
use crate::template::{ChatTemplate, RenderOptions, read_json};
use crate::tokenizer::TextTokenizer;

/// Member of the body with a conversation.
const MESSAGES: &str = "messages";

/// How a text becomes a prompt.
#[derive(Debug, Clone, Copy)]
pub struct PromptRules<'a> {
    pub add_special_tokens: bool,
    /// Longest prompt [tokens].
    pub context_length: usize,
    /// Refuse prompts of more tokens. Otherwise only texts are refused that have more, whatever
    /// their tokens.
    pub is_bounded: bool,
    /// Member of the body that refusals name.
    pub param: &'a str,
}

/// Ids of a text. A text that cannot fit is refused before it is tokenized.
pub fn encode_text(
    tokenizer: &dyn TextTokenizer,
    text: &str,
    rules: PromptRules<'_>,
) -> Result<Arc<[u32]>, TextRefusal> {
    refuse_long_text(tokenizer, text, rules)?;
    let ids = tokenizer.encode(text, rules.add_special_tokens);
    let ids = ids.map_err(|err| {
        let message = format!("the tokenizer fails on this text: {err}");
        TextRefusal::new(RefusalCode::InternalError, message, rules.param)
    })?;
    if rules.is_bounded && ids.len() > rules.context_length {
        return Err(too_long(&format!("has {}", ids.len()), rules));
    }
    Ok(ids)
}

/// Ids of the text that `template` makes of a body's `messages`, a JSON text.
pub fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &dyn TextTokenizer,
    messages: &str,
    options: RenderOptions,
    rules: PromptRules<'_>,
) -> Result<Arc<[u32]>, TextRefusal> {
    let text = render_chat(template, messages, options)?;
    encode_text(tokenizer, &text, rules)
}

/// The text that `template` makes of a body's `messages`, a JSON text.
pub fn render_chat(
    template: &ChatTemplate,
    messages: &str,
    options: RenderOptions,
) -> Result<String, TextRefusal> {
    let messages = read_json(messages).map_err(|err| {
        TextRefusal::invalid(MESSAGES, format!("{MESSAGES} cannot be read: {err}"))
    })?;
    template.render(template.normalize(&messages)?, options)
}

fn refuse_long_text(
    tokenizer: &dyn TextTokenizer,
    text: &str,
    rules: PromptRules<'_>,
) -> Result<(), TextRefusal> {
    let chars_per_token = tokenizer.max_chars_per_token();
    let most = rules.context_length.saturating_mul(chars_per_token);
    if text.len() <= most {
        return Ok(());
    }
    let chars = text.chars().count();
    if chars <= most {
        return Ok(());
    }
    let least = chars.div_ceil(chars_per_token);
    let size = format!("has {chars} characters, at least {least} tokens");
    Err(too_long(&size, rules))
}

fn too_long(size: &str, rules: PromptRules<'_>) -> TextRefusal {
    let limit = rules.context_length;
    // OpenAI's words first: litellm's fallbacks (seen in 1.106) know the error by them, not by its
    // code.
    let message = format!(
        "this model's maximum context length is {limit} tokens here, but the prompt {size}; shorten it, or start the \
         engine with a larger --context-length or --max-total-tokens"
    );
    TextRefusal::new(RefusalCode::ContextLengthExceeded, message, rules.param)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::Zoned;

    use super::*;
    use crate::tokenizer::FourByteTokenizer;

    fn rules(context_length: usize) -> PromptRules<'static> {
        PromptRules {
            add_special_tokens: false,
            context_length,
            is_bounded: true,
            param: "prompt",
        }
    }

    #[test]
    fn prompts_longer_than_the_context_are_refused_with_their_size() {
        let encode = |text: &str, context_length| {
            encode_text(&FourByteTokenizer, text, rules(context_length))
                .map(|ids| ids.len())
                .map_err(|refusal| refusal.message)
        };
        assert_eq!(encode("12345678", 2), Ok(2));
        let refused = encode("123456789", 2).unwrap_err();
        assert!(
            refused.contains(
                "length is 2 tokens here, but the prompt has 9 characters, at least 3 tokens;"
            ),
            "{refused}"
        );
        // Eight characters, three tokens.
        let refused = encode("1234567ü", 2).unwrap_err();
        assert!(refused.contains("but the prompt has 3;"), "{refused}");
        let unbounded = PromptRules {
            is_bounded: false,
            ..rules(2)
        };
        let ids = encode_text(&FourByteTokenizer, "1234567ü", unbounded);
        assert_eq!(ids.unwrap().len(), 3);
    }

    #[test]
    fn chat_is_rendered_and_encoded() {
        let source = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tail }}";
        let template = ChatTemplate::new(Some(source), BTreeMap::new(), Zoned::default);
        let options = RenderOptions {
            variables: vec![("tail".to_owned(), "!".into())],
            ..RenderOptions::default()
        };
        let encode = |messages: &str| {
            encode_chat(
                &template,
                &FourByteTokenizer,
                messages,
                options.clone(),
                rules(4),
            )
        };
        let ids = encode(r#"[{"role": "user", "content": [{"text": "word"}]}]"#).unwrap();
        assert_eq!(*ids, *FourByteTokenizer.encode("word!", false).unwrap());
        let refused = encode("[{]").unwrap_err();
        assert_eq!(
            (refused.code, refused.param.as_str()),
            (RefusalCode::InvalidValue, "messages")
        );
        let refused = encode("[]").unwrap_err();
        assert_eq!(refused.message, "messages must be a non-empty array");
    }
}
