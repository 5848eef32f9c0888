//! A request's prompt as token ids, no longer than the context.
//!
//! * [`chat`]: the members of a chat body that decide its prompt;
//! * [`cut`]: prompts that are cut to a number of tokens.

mod chat;
mod cut;

use std::sync::Arc;

pub use chat::{ChatPrompt, REASONING_EFFORTS, chat_member_names};
pub use cut::{CUT_TEXT_CHARS, PromptCut, PromptTruncation, TruncationSide};

use crate::refusal::{RefusalCode, TextRefusal};
use crate::template::ChatTemplate;
use crate::tokenizer::TextTokenizer;

/// Member of the body with a conversation.
const MESSAGES: &str = "messages";

/// Longest prompt.
#[derive(Debug, Clone, Copy)]
pub struct ContextLimit {
    /// Tokens that fit.
    pub context_length: usize,
    /// Refuse prompts of more tokens. Otherwise only texts are refused that have more, whatever
    /// their tokens.
    pub is_bounded: bool,
}

/// How a text becomes a prompt.
#[derive(Debug, Clone, Copy)]
pub struct PromptRules<'a> {
    pub add_special_tokens: bool,
    pub limit: ContextLimit,
    /// Member of the body that refusals name.
    pub param: &'a str,
}

/// Ids of a user's text. A text that cannot fit is refused before it is tokenized.
pub fn encode_text(
    tokenizer: &dyn TextTokenizer,
    text: &str,
    rules: PromptRules<'_>,
) -> Result<Arc<[u32]>, TextRefusal> {
    encode_escaped(tokenizer, &tokenizer.guard().escape(text), rules)
}

/// `text`: as the guard of the tokenizer has escaped it.
fn encode_escaped(
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
    if rules.limit.is_bounded && ids.len() > rules.limit.context_length {
        return Err(too_long(&format!("has {}", ids.len()), rules));
    }
    Ok(ids)
}

/// Ids of the text that `template` makes of a chat.
pub fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &dyn TextTokenizer,
    chat: &ChatPrompt<'_>,
    limit: ContextLimit,
) -> Result<Arc<[u32]>, TextRefusal> {
    let text = chat.render(template)?;
    let rules = PromptRules {
        add_special_tokens: chat.add_special_tokens(),
        limit,
        param: MESSAGES,
    };
    encode_escaped(tokenizer, &text, rules)
}

fn refuse_long_text(
    tokenizer: &dyn TextTokenizer,
    text: &str,
    rules: PromptRules<'_>,
) -> Result<(), TextRefusal> {
    let chars_per_token = tokenizer.max_chars_per_token();
    let most = rules.limit.context_length.saturating_mul(chars_per_token);
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
    let limit = rules.limit.context_length;
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
            limit: ContextLimit {
                context_length,
                is_bounded: true,
            },
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
        let mut unbounded = rules(2);
        unbounded.limit.is_bounded = false;
        let ids = encode_text(&FourByteTokenizer, "1234567ü", unbounded);
        assert_eq!(ids.unwrap().len(), 3);
    }

    #[test]
    fn chat_is_rendered_and_encoded() {
        let source = "{% for message in messages %}{{ message.content }}{% endfor %}{{ tail }}";
        let template = ChatTemplate::new(Some(source), BTreeMap::new(), Zoned::default);
        let encode = |messages: &str| {
            let body =
                format!(r#"{{"messages": {messages}, "chat_template_kwargs": {{"tail": "!"}}}}"#);
            let chat = ChatPrompt::read(body.as_bytes())?;
            encode_chat(&template, &FourByteTokenizer, &chat, rules(4).limit)
        };
        let ids = encode(r#"[{"role": "user", "content": [{"text": "word"}]}]"#).unwrap();
        assert_eq!(*ids, *FourByteTokenizer.encode("word!", false).unwrap());
        let refused = encode("[{]").unwrap_err();
        assert_eq!(refused.code, RefusalCode::InvalidValue);
        let refused = encode("[]").unwrap_err();
        assert_eq!(refused.message, "messages must be a non-empty array");
    }
}
