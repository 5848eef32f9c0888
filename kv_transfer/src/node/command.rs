//! Calls of the engine, sent to the control loop.

use std::time::Duration;

use crate::reason_code::ReasonCode;
use crate::state_machine::decode::DecodeEvent;
use crate::state_machine::prefill::PrefillEvent;

/// P: a request accepted by the engine.
pub(super) struct OfferRequest {
    pub attempt: u32,
    pub prompt_hash: Vec<u8>,
    /// Milliseconds from now.
    pub deadline_ms: u64,
}

/// D: fetch the prompt of a room from the prefill rank behind a bootstrap address.
pub(super) struct OpenRequest {
    pub attempt: u32,
    pub host: String,
    pub port: u16,
    /// Negative: the room number modulo the prefill node's dp size.
    pub dp_rank: i64,
    pub prompt_hash: Vec<u8>,
    /// Milliseconds from now.
    pub deadline_ms: u64,
}

pub(super) enum EngineCommand {
    Offer(u64, OfferRequest),
    Open(u64, OpenRequest),
    /// Event of the engine for a room offered before.
    Prefill(u64, PrefillEvent),
    /// Event of the engine for a room opened before.
    Decode(u64, DecodeEvent),
    /// Abort a room on the side that has it.
    Abort(u64, ReasonCode),
    Register {
        host: String,
        port: u16,
        timeout: Duration,
        reply: std::sync::mpsc::Sender<Result<(), String>>,
    },
    Drain,
    Close,
    #[cfg(test)]
    Panic,
}
