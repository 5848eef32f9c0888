//! Texts of a request's prompts, as our engines read the same body
//! (engine/baton/server/request/prompt/reader.py).
//!
//! Nothing is refused here. A body that an engine would refuse, or read in its own way, is a
//! [`TokenizeFallback`]: the router goes by the text's bytes then, and the engine decides.

use baton_text::dialect::Dialect;
use baton_text::dialect::translate::chat_translation::translate_body;
use baton_text::prompt::ChatPrompt;
use baton_text::template::{ChatTemplate, UserTextGuard};
use serde::Deserialize;

/// Why a prompt was not tokenized. The name is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum TokenizeFallback {
    /// More text than the router tokenizes.
    TooLong,
    /// All tokenizing threads are busy and enough requests wait for one.
    Busy,
    /// The body says something that the router does not read: images, a template of its own, a
    /// wrong type.
    Unread,
    /// The model has no chat template, or one that cannot be used here.
    NoTemplate,
    /// The template refuses these messages, or fails on them.
    Template,
    /// The tokenizer failed.
    Failed,
}

/// Texts to be encoded, one per prompt, as the guard of the template has escaped them.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptTexts {
    pub texts: Vec<String>,
    pub add_special_tokens: bool,
    /// The body holds a list, even if of one.
    pub is_list: bool,
}

#[derive(Deserialize)]
struct Completion {
    prompt: OneOrMany,
    add_special_tokens: Option<bool>,
}

#[derive(Deserialize)]
struct Generate {
    text: Option<OneOrMany>,
    prompt: Option<OneOrMany>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    fn into_texts(self, add_special_tokens: bool, guard: &UserTextGuard) -> PromptTexts {
        let (texts, is_list) = match self {
            OneOrMany::One(text) => (vec![text], false),
            OneOrMany::Many(texts) => (texts, true),
        };
        let texts = texts.iter().map(|text| guard.escape(text).into_owned());
        let texts = texts.collect();
        PromptTexts {
            texts,
            add_special_tokens,
            is_list,
        }
    }
}

/// The texts of a body whose prompt is no list of ids.
pub fn texts_of(
    body: &[u8],
    api: Dialect,
    template: &ChatTemplate,
) -> Result<PromptTexts, TokenizeFallback> {
    match api {
        Dialect::Chat => chat_text(body, template),
        Dialect::Completions => {
            let completion: Completion = read(body)?;
            Ok(completion.prompt.into_texts(
                completion.add_special_tokens.unwrap_or(true),
                template.guard(),
            ))
        }
        Dialect::Responses | Dialect::Messages => {
            let translated = translate_body(api, body).and_then(Result::ok);
            let translated = translated.ok_or(TokenizeFallback::Unread)?;
            chat_text(translated.chat.as_bytes(), template)
        }
        Dialect::Generate => {
            let generate: Generate = read(body)?;
            Ok(generate
                .text
                .or(generate.prompt)
                .ok_or(TokenizeFallback::Unread)?
                .into_texts(true, template.guard()))
        }
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, TokenizeFallback> {
    serde_json::from_slice(body).map_err(|_| TokenizeFallback::Unread)
}

/// The text that the template makes of a chat request.
fn chat_text(body: &[u8], template: &ChatTemplate) -> Result<PromptTexts, TokenizeFallback> {
    let chat = ChatPrompt::read(body).map_err(|_| TokenizeFallback::Unread)?;
    Ok(PromptTexts {
        add_special_tokens: chat.add_special_tokens(),
        texts: vec![render(&chat, template)?],
        is_list: false,
    })
}

fn render(chat: &ChatPrompt<'_>, template: &ChatTemplate) -> Result<String, TokenizeFallback> {
    if template.defect().is_some() {
        return Err(TokenizeFallback::NoTemplate);
    }
    if chat.has_template() || chat.check(template).is_err() {
        return Err(TokenizeFallback::Unread);
    }
    chat.render(template).map_err(|refusal| {
        tracing::debug!(%refusal, "the chat template refuses a request");
        TokenizeFallback::Template
    })
}
