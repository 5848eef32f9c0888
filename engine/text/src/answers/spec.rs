//! How an answer is to be given, as the front states it (`AnswerSpec` of
//! engine/baton/server/response/answer_spec.py, as msgpack).

use serde::Deserialize;

use crate::dialect::Dialect;

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
    pub choices: Vec<ChoiceSpec>,
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
    pub stop_token_ids: Vec<u32>,
    /// Text of the prompt, in front of the answer.
    pub echo: String,
}
