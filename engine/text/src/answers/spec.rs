//! How an answer is to be given, as the front states it (`AnswerSpec` of
//! engine/baton/server/response/answer_spec.py, as msgpack).

use serde::{Deserialize, Deserializer};

use crate::dialect::Dialect;
use crate::dialect::translate::RequestFacts;
use crate::dialect::write::ReasoningNames;

/// Answer to a request: the choices of all its prompts.
#[derive(Debug, Deserialize)]
pub struct AnswerSpec {
    /// API in which it is written.
    pub dialect: Dialect,
    /// The client's id of the request, if it states one: that of the response.
    pub rid: Option<String>,
    /// Id of the HTTP request.
    pub request_id: String,
    pub model: String,
    /// Unix seconds.
    pub created: u64,
    /// On the clock of the batches [seconds].
    pub arrived: f64,
    pub is_stream: bool,
    pub includes_usage: bool,
    pub has_continuous_usage: bool,
    pub returns_token_ids: bool,
    /// Alternatives per position; -1: no logprobs.
    pub logprobs: i32,
    pub is_batch: bool,
    pub stops: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    pub min_tokens: u32,
    /// The stream reports its tokens in comments, with this seed.
    pub comment_seed: Option<u64>,
    /// The front counts the tokens of each batch, for a rate limit.
    pub is_metered: bool,
    /// Nothing is generated: the answer ends at once.
    pub is_empty: bool,
    /// Tokens that the client has from another engine.
    pub resumed_ids: Vec<u32>,
    /// How the parts of the answer are read; `None`: it is one text.
    pub reading: Option<ReadingSpec>,
    /// Events in which they came, where events are numbered.
    #[serde(default)]
    pub resumed_events: Option<u64>,
    /// The context ends where the answer's limit is, before the limit that the client set.
    #[serde(default)]
    pub is_limited_by_context: bool,
    /// Facts of a translated request.
    #[serde(default, deserialize_with = "facts_of_json")]
    pub facts: RequestFacts,
    pub choices: Vec<ChoiceSpec>,
}

/// How the parts of an answer are read and sent: reasoning, content and tool calls.
#[derive(Debug, Deserialize)]
pub struct ReadingSpec {
    /// JSON: name and parameters of each tool that the answer may call.
    pub tools: String,
    /// Tool calls in the conversation before the answer.
    pub calls_before: usize,
    pub parallel_tool_calls: bool,
    pub separate_reasoning: bool,
    pub stream_reasoning: bool,
    pub include_reasoning: bool,
    pub reasoning_field: ReasoningNames,
}

/// Choice of an answer: the output of one item on a rank.
#[derive(Debug, Deserialize)]
pub struct ChoiceSpec {
    /// Number by which rows name the item.
    pub handle: u64,
    /// First choice of its prompt: the one that usage counts the prompt by.
    pub counts_prompt: bool,
    /// Length of the client's prompt.
    pub prompt_tokens: u64,
    /// Tokens that the text continues; empty for an answer that is a text of its own.
    pub left_context: Vec<u32>,
    /// End of the prompt, where its reasoning begins or ends; empty for an answer that is one text.
    pub prompt_end: Vec<u32>,
    pub stop_token_ids: Vec<u32>,
    /// Text of the prompt, in front of the answer.
    pub echo: String,
}

/// Facts pass through the front as JSON; an empty text stands for none.
fn facts_of_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RequestFacts, D::Error> {
    let json = String::deserialize(deserializer)?;
    if json.is_empty() {
        return Ok(RequestFacts::default());
    }
    serde_json::from_str(&json).map_err(serde::de::Error::custom)
}

/// No tools, and the whole text for the client.
impl Default for ReadingSpec {
    fn default() -> Self {
        Self {
            tools: "[]".to_owned(),
            calls_before: 0,
            parallel_tool_calls: true,
            separate_reasoning: true,
            stream_reasoning: true,
            include_reasoning: true,
            reasoning_field: ReasoningNames::default(),
        }
    }
}
