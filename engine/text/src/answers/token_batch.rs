//! Message of a rank with the tokens of one step: msgpack, as
//! engine/baton/server/worker/messages.py (`TokenBatch`) encodes it.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::dialect::write::PromptRecords;

/// Begin of a token batch: a map of three, whose first member is its type.
const BEGIN: &[u8] = b"\x83\xa4type\xa6tokens";

/// A message that begins like a token batch and is none.
#[derive(Debug, thiserror::Error)]
#[error("a rank's token batch cannot be decoded: {0}")]
pub struct BatchError(#[from] rmp_serde::decode::Error);

#[derive(Deserialize)]
pub struct TokenBatch<'a> {
    pub dp_rank: u32,
    #[serde(borrow)]
    pub rows: Vec<TokenRow<'a>>,
}

impl<'a> TokenBatch<'a> {
    /// `Ok(None)`: a message of another type.
    pub fn decode(message: &'a [u8]) -> Result<Option<Self>, BatchError> {
        if message.starts_with(BEGIN) {
            Ok(Some(rmp_serde::from_slice(message)?))
        } else {
            Ok(None)
        }
    }
}

/// New output of an item: the fields of `EmittedTokens` (engine/baton/sched/types/events.py), in
/// order.
#[derive(Deserialize)]
pub struct TokenRow<'a> {
    pub handle: u64,
    pub tokens: Vec<u32>,
    pub finish: Option<RankFinish>,
    pub cached_tokens: u64,
    pub logprobs: Option<RowLogprobs>,
    #[serde(borrow)]
    pub error: Option<RowError<'a>>,
    pub retry_after_secs: Option<u64>,
    pub stages: Option<FirstTokenStages>,
    #[serde(borrow, default)]
    pub prompt_logprobs: Option<PromptRecords<'a>>,
    /// Drafted tokens so far: accepted, rejected.
    #[serde(default)]
    pub drafts: Option<(u64, u64)>,
}

/// Why a rank ended an item: `RowError` of engine/baton/sched/types/events.py, in order.
#[derive(Deserialize)]
pub struct RowError<'a> {
    #[serde(borrow)]
    pub code: Cow<'a, str>,
    #[serde(borrow)]
    pub message: Cow<'a, str>,
    /// Field of the request that is at fault.
    #[serde(borrow)]
    pub param: Option<Cow<'a, str>>,
}

/// `FinishReason` of engine/baton/sched/types/request.py.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u8")]
pub enum RankFinish {
    Stop,
    Length,
    Abort,
    Error,
}

impl TryFrom<u8> for RankFinish {
    type Error = String;

    fn try_from(value: u8) -> Result<Self, String> {
        match value {
            1 => Ok(Self::Stop),
            2 => Ok(Self::Length),
            3 => Ok(Self::Abort),
            4 => Ok(Self::Error),
            other => Err(format!("no finish reason is {other}")),
        }
    }
}

/// Logprobs of the row's token.
#[derive(Deserialize)]
pub struct RowLogprobs {
    pub chosen: f64,
    pub top_ids: Vec<u32>,
    pub top_logprobs: Vec<f64>,
    /// Logprobs of the ids that the request asked for.
    #[serde(default)]
    pub id_logprobs: Vec<f64>,
}

/// A request's way to its first token: passes through to the front.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct FirstTokenStages {
    pub queue_seconds: f64,
    pub pulled: Option<PulledPages>,
}

/// On a decode node: how the prompt's pages came.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
pub struct PulledPages {
    pub transport: String,
    pub pages: u64,
    pub bytes: u64,
    pub pull_seconds: f64,
    pub room_seconds: f64,
}
