//! Members of a chat answer, or of an event of its stream, as SGLang, vLLM and OpenAI write them.

use serde::Deserialize;
use serde_json::Value;

use crate::dialect::write::AnswerCounts;

/// A whole answer or the data of one event.
#[derive(Debug, Deserialize)]
pub struct AnswerJson {
    #[serde(default)]
    pub choices: Vec<ChoiceJson>,
    pub usage: Option<UsageJson>,
}

#[derive(Debug, Deserialize)]
pub struct ChoiceJson {
    /// The message of a whole answer.
    pub message: Option<MessageJson>,
    /// Part of the message in an event.
    pub delta: Option<MessageJson>,
    pub finish_reason: Option<String>,
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
}

#[derive(Debug, Default, Deserialize)]
pub struct MessageJson {
    pub content: Option<String>,
    pub refusal: Option<String>,
    reasoning_content: Option<String>,
    /// vLLM's name.
    reasoning: Option<String>,
    pub tool_calls: Option<Vec<CallJson>>,
}

impl MessageJson {
    pub fn reasoning(&self) -> Option<&str> {
        let named = self.reasoning_content.as_ref().or(self.reasoning.as_ref());
        named.map(String::as_str)
    }
}

#[derive(Debug, Deserialize)]
pub struct CallJson {
    pub index: Option<usize>,
    pub function: Option<FunctionJson>,
}

#[derive(Debug, Deserialize)]
pub struct FunctionJson {
    pub name: Option<String>,
    pub arguments: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct UsageJson {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
    prompt_tokens_details: Option<TokenDetails>,
    completion_tokens_details: Option<TokenDetails>,
    /// SGLang's.
    reasoning_tokens: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct TokenDetails {
    cached_tokens: Option<u64>,
    reasoning_tokens: Option<u64>,
}

impl UsageJson {
    pub fn counts(&self) -> AnswerCounts {
        let of_prompt = self.prompt_tokens_details.as_ref();
        let of_answer = self.completion_tokens_details.as_ref();
        let reasoning_tokens = of_answer.and_then(|details| details.reasoning_tokens);
        AnswerCounts {
            prompt_tokens: self.prompt_tokens,
            cached_tokens: of_prompt
                .and_then(|details| details.cached_tokens)
                .unwrap_or(0),
            completion_tokens: self.completion_tokens,
            reasoning_tokens: reasoning_tokens.or(self.reasoning_tokens),
        }
    }
}
