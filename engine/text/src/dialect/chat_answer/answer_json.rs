//! Members of a chat answer, or of an event of its stream, as SGLang, vLLM, OpenAI and gateways
//! write them.
//!
//! A member whose value means nothing here is read as any JSON: what one server writes as a number
//! is null or absent at another.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::unreadable::UnreadableAnswer;
use crate::dialect::sse::{is_foreign_error, is_given};
use crate::dialect::write::{AnswerCounts, ErrorObject, FinishReason};

/// Longest part of a worker's text in an error [characters].
const EXCERPT: usize = 200;

/// A whole answer or the data of one event.
#[derive(Debug, Deserialize)]
pub struct AnswerJson {
    pub choices: Option<Vec<ChoiceJson>>,
    pub usage: Option<UsageJson>,
}

impl AnswerJson {
    /// Reads an answer that is no error. An object without choices or usage is neither.
    pub fn read(json: &[u8]) -> Result<Self, UnreadableAnswer> {
        if is_foreign_error(json) {
            return Err(UnreadableAnswer::Failed(ErrorObject::of_answer(json)));
        }
        let answer: Self = serde_json::from_slice(json).map_err(|err| no_answer(json, &err))?;
        if answer.choices.is_none() && answer.usage.is_none() {
            return Err(no_answer(json, &"it has no choices"));
        }
        Ok(answer)
    }
}

fn no_answer(json: &[u8], problem: &dyn std::fmt::Display) -> UnreadableAnswer {
    let text = String::from_utf8_lossy(json);
    let excerpt: String = text.trim().chars().take(EXCERPT).collect();
    UnreadableAnswer::NoChatAnswer {
        detail: format!("{problem}: {excerpt}"),
    }
}

#[derive(Debug, Deserialize)]
pub struct ChoiceJson {
    pub index: Option<u64>,
    /// The message of a whole answer.
    pub message: Option<MessageJson>,
    /// Part of the message in an event.
    pub delta: Option<MessageJson>,
    finish_reason: Option<String>,
    /// Error of one choice: that of a gateway whose server failed.
    #[serde(default)]
    error: Value,
    /// Stop string or token that ended the answer: SGLang's name.
    matched_stop: Option<Value>,
    /// vLLM's name of it.
    stop_reason: Option<Value>,
}

impl ChoiceJson {
    /// Stop string that ended the answer.
    pub fn stop_string(&self) -> Option<&str> {
        let stop = self.matched_stop.as_ref().or(self.stop_reason.as_ref());
        stop.and_then(Value::as_str)
    }

    /// Why the answer ended; `None`: it goes on. Some servers write an empty text for null.
    ///
    /// A reason that is not known is an error: to a client it would look like an end that it knows.
    pub fn finish(&self) -> Result<Option<FinishReason>, UnreadableAnswer> {
        if is_given(&self.error) {
            let error = serde_json::json!({"error": self.error});
            let error = ErrorObject::of_answer(error.to_string().as_bytes());
            return Err(UnreadableAnswer::Failed(error));
        }
        let reason = self.finish_reason.as_deref().unwrap_or_default();
        Ok(Some(match reason {
            "" => return Ok(None),
            // The last two are those of TGI.
            "stop" | "eos_token" | "stop_sequence" => FinishReason::Stop,
            // Mistral's server names the context's end so.
            "length" | "model_length" => FinishReason::Length,
            "tool_calls" | "function_call" => FinishReason::ToolCalls,
            "content_filter" => FinishReason::ContentFilter,
            _ => {
                let reason = reason.to_owned();
                return Err(UnreadableAnswer::Aborted { reason });
            }
        }))
    }
}

#[derive(Debug, Default, Deserialize)]
pub struct MessageJson {
    role: Option<String>,
    content: Option<ContentJson>,
    pub refusal: Option<String>,
    reasoning_content: Option<String>,
    /// vLLM's name.
    reasoning: Option<String>,
    tool_calls: Option<Vec<CallJson>>,
    /// The one call of OpenAI's first form.
    function_call: Option<FunctionJson>,
}

/// A text, or a list of parts as in requests.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum ContentJson {
    Text(String),
    Parts(Vec<TextPart>),
}

#[derive(Debug, Deserialize)]
struct TextPart {
    text: String,
}

impl MessageJson {
    /// A message of another role is none of the model's.
    pub fn check_role(&self) -> Result<(), UnreadableAnswer> {
        match self.role.as_deref() {
            None | Some("" | "assistant") => Ok(()),
            Some(role) => Err(UnreadableAnswer::ForeignRole {
                role: role.to_owned(),
            }),
        }
    }

    pub fn reasoning(&self) -> Option<&str> {
        let names = [&self.reasoning_content, &self.reasoning];
        let mut texts = names.into_iter().flatten();
        texts.find(|text| !text.is_empty()).map(String::as_str)
    }

    pub fn content(&self) -> Cow<'_, str> {
        match &self.content {
            None => Cow::Borrowed(""),
            Some(ContentJson::Text(text)) => Cow::Borrowed(text),
            Some(ContentJson::Parts(parts)) => {
                Cow::Owned(parts.iter().map(|part| part.text.as_str()).collect())
            }
        }
    }

    /// Calls, or pieces of calls.
    pub fn calls(&self) -> Result<Vec<CallPiece<'_>>, UnreadableAnswer> {
        let calls = self.tool_calls.as_deref().unwrap_or_default();
        let has_several = calls.len() > 1;
        let listed = calls.iter().enumerate().map(|(place, call)| {
            let place = has_several.then_some(place);
            call.piece(call.index.or(place))
        });
        let first_form = self.function_call.iter().map(|function| {
            let index = Some(0);
            function.piece(index, None)
        });
        let pieces: Result<Vec<_>, _> = listed.chain(first_form).collect();
        Ok(pieces?.into_iter().filter(CallPiece::is_given).collect())
    }
}

#[derive(Debug, Deserialize)]
struct CallJson {
    index: Option<usize>,
    id: Option<String>,
    r#type: Option<String>,
    function: Option<FunctionJson>,
}

#[derive(Debug, Deserialize)]
struct FunctionJson {
    name: Option<String>,
    arguments: Option<Box<RawValue>>,
}

/// A call, or a piece of one.
#[derive(Debug, Default)]
pub struct CallPiece<'a> {
    /// Index of the call, if the server says it.
    pub index: Option<usize>,
    pub id: Option<&'a str>,
    pub name: Option<&'a str>,
    /// JSON text.
    pub arguments: Cow<'a, str>,
}

impl CallPiece<'_> {
    fn is_given(&self) -> bool {
        self.id.is_some() || self.name.is_some() || !self.arguments.is_empty()
    }
}

impl CallJson {
    fn piece(&self, index: Option<usize>) -> Result<CallPiece<'_>, UnreadableAnswer> {
        let id = self.id.as_deref().filter(|id| !id.is_empty());
        if let Some(function) = &self.function {
            return function.piece(index, id);
        }
        match self.r#type.as_deref() {
            None | Some("" | "function") => Ok(CallPiece {
                index,
                id,
                ..CallPiece::default()
            }),
            Some(kind) => Err(UnreadableAnswer::NoChatAnswer {
                detail: format!("a tool call of the type {kind}"),
            }),
        }
    }
}

impl FunctionJson {
    fn piece<'a>(
        &'a self,
        index: Option<usize>,
        id: Option<&'a str>,
    ) -> Result<CallPiece<'a>, UnreadableAnswer> {
        Ok(CallPiece {
            index,
            id,
            name: self.name.as_deref().filter(|name| !name.is_empty()),
            arguments: self.arguments_text()?,
        })
    }

    /// Arguments as JSON text: servers send it in a string, Ollama's first form the object itself.
    fn arguments_text(&self) -> Result<Cow<'_, str>, UnreadableAnswer> {
        match self.arguments.as_deref().map(RawValue::get) {
            None | Some("null") => Ok(Cow::Borrowed("")),
            Some(text) if text.starts_with('"') => {
                let text = serde_json::from_str(text);
                text.map(Cow::Owned)
                    .map_err(|err| no_answer(b"tool call", &err))
            }
            Some(json) => Ok(Cow::Borrowed(json)),
        }
    }
}

/// Counts as any JSON: a server that does not count writes null or -1.
#[derive(Debug, Deserialize)]
pub struct UsageJson {
    #[serde(default)]
    prompt_tokens: Value,
    #[serde(default)]
    completion_tokens: Value,
    prompt_tokens_details: Option<TokenDetails>,
    completion_tokens_details: Option<TokenDetails>,
    /// SGLang's.
    #[serde(default)]
    reasoning_tokens: Value,
}

#[derive(Debug, Deserialize)]
struct TokenDetails {
    #[serde(default)]
    cached_tokens: Value,
    #[serde(default)]
    reasoning_tokens: Value,
}

impl UsageJson {
    pub fn counts(&self) -> AnswerCounts {
        let of_prompt = self.prompt_tokens_details.as_ref();
        let of_answer = self.completion_tokens_details.as_ref();
        let cached_tokens = of_prompt.and_then(|details| details.cached_tokens.as_u64());
        let reasoning_tokens = of_answer.and_then(|details| details.reasoning_tokens.as_u64());
        AnswerCounts {
            prompt_tokens: self.prompt_tokens.as_u64().unwrap_or(0),
            cached_tokens: cached_tokens.unwrap_or(0),
            completion_tokens: self.completion_tokens.as_u64().unwrap_or(0),
            reasoning_tokens: reasoning_tokens.or(self.reasoning_tokens.as_u64()),
            drafts: None, // No API that is written from foreign answers shows them.
        }
    }
}
