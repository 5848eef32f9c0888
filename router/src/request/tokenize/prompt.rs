//! A request's prompt as text or token ids: what our engines make of the same body
//! (engine/baton/server/request/validation.py, chat_template.py).
//!
//! Nothing is refused here. What an engine would refuse, or would read in its own way, is a
//! [`TokenizeFallback`]: the router goes by the text's bytes then, and the engine decides.

use baton_text::dialect::Dialect;
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::messages::normalize_messages;
use super::template::ChatTemplate;

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

/// Texts to be encoded, one per prompt.
#[derive(Debug, PartialEq, Eq)]
pub struct PromptTexts {
    pub texts: Vec<String>,
    pub add_special_tokens: bool,
    /// The body holds a list, even if of one.
    pub is_list: bool,
}

#[derive(Deserialize)]
struct Chat {
    messages: Value,
    chat_template_kwargs: Option<Value>,
    reasoning_effort: Option<String>,
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
    add_special_tokens: Option<bool>,
    tools: Option<Value>,
    documents: Option<Value>,
    chat_template: Option<IgnoredAny>,
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
    fn into_texts(self, add_special_tokens: bool) -> PromptTexts {
        let (texts, is_list) = match self {
            OneOrMany::One(text) => (vec![text], false),
            OneOrMany::Many(texts) => (texts, true),
        };
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
    template: Option<&ChatTemplate>,
) -> Result<PromptTexts, TokenizeFallback> {
    match api {
        Dialect::Chat => {
            let chat: Chat = read(body)?;
            Ok(PromptTexts {
                add_special_tokens: chat.add_special_tokens.unwrap_or(false),
                texts: vec![render(chat, template.ok_or(TokenizeFallback::NoTemplate)?)?],
                is_list: false,
            })
        }
        Dialect::Completions => {
            let completion: Completion = read(body)?;
            Ok(completion
                .prompt
                .into_texts(completion.add_special_tokens.unwrap_or(true)))
        }
        Dialect::Generate => {
            let generate: Generate = read(body)?;
            Ok(generate
                .text
                .or(generate.prompt)
                .ok_or(TokenizeFallback::Unread)?
                .into_texts(true))
        }
    }
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, TokenizeFallback> {
    serde_json::from_slice(body).map_err(|_| TokenizeFallback::Unread)
}

fn render(chat: Chat, template: &ChatTemplate) -> Result<String, TokenizeFallback> {
    if chat.chat_template.is_some() {
        return Err(TokenizeFallback::Unread);
    }
    let continues = chat.continue_final_message.unwrap_or(false);
    let opens = chat.add_generation_prompt.unwrap_or(!continues);
    let messages = normalize_messages(&chat.messages, &template.caps);
    let mut messages = messages.ok_or(TokenizeFallback::Unread)?;
    if continues && let Some(last) = messages.last_mut() {
        *last = with_mark(last).ok_or(TokenizeFallback::Unread)?;
    }
    let mut variables = vec![
        ("tools".to_owned(), chat.tools.unwrap_or(Value::from(()))),
        (
            "documents".to_owned(),
            chat.documents.unwrap_or(Value::from(())),
        ),
    ];
    if let Some(effort) = chat.reasoning_effort {
        variables.push(("reasoning_effort".to_owned(), effort.into()));
    }
    if let Some(given) = chat.chat_template_kwargs {
        variables.extend(pairs(&given).ok_or(TokenizeFallback::Unread)?);
    }
    variables.push(("messages".to_owned(), Value::from(messages)));
    variables.push(("add_generation_prompt".to_owned(), opens.into()));
    let rendered = template.render(variables).map_err(|err| {
        tracing::debug!(%err, "the chat template refuses a request");
        TokenizeFallback::Template
    })?;
    if continues {
        cut_at_mark(&rendered)
    } else {
        Ok(rendered)
    }
}

/// Members of an object, in its order; `None`: it is none.
fn pairs(value: &Value) -> Option<Vec<(String, Value)>> {
    let keys = value
        .try_iter()
        .ok()
        .filter(|_| value.kind() == ValueKind::Map)?;
    keys.map(|key| Some((key.as_str()?.to_owned(), value.get_item(&key).ok()?)))
        .collect()
}

/// `object` with another value of the member `name`, in its place.
fn with_member(object: &Value, name: &str, value: Value) -> Option<Value> {
    let mut members = pairs(object)?;
    let (_, old) = members.iter_mut().find(|(key, _)| key == name)?;
    *old = value;
    Some(Value::from_pairs(members))
}

/// Appended to the message to be continued, so that its end is found in the rendered text. A
/// template that trims its messages takes the space away, and so tells that it trims. Private-use
/// characters: no client text holds them by accident.
const MARK: &str = "\u{e000}baton-continues-here\u{e000}";

/// `message` with the mark behind its last text.
fn with_mark(message: &Value) -> Option<Value> {
    let content = message.get_attr("content").ok()?;
    if let Some(text) = content.as_str() {
        return with_member(message, "content", Value::from(format!("{text}{MARK} ")));
    }
    let mut parts: Vec<Value> = content.try_iter().ok()?.collect();
    let last = parts.last_mut()?;
    let text = last.get_attr("text").ok()?;
    *last = with_member(last, "text", Value::from(format!("{text}{MARK} ")))?;
    with_member(message, "content", Value::from(parts))
}

fn cut_at_mark(text: &str) -> Result<String, TokenizeFallback> {
    let at = text.rfind(MARK).ok_or(TokenizeFallback::Template)?;
    let kept = &text[..at];
    let kept = if text[at + MARK.len()..].starts_with(' ') {
        kept
    } else {
        kept.trim_end()
    };
    Ok(kept.to_owned())
}
