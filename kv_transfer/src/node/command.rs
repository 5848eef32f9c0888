//! Calls of the engine, sent to the control loop.

use std::time::Duration;

use crate::reason_code::ReasonCode;
use crate::state_machine::prefill::PrefillOutput;

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
    Offer {
        room: u64,
        attempt: u32,
        prompt_hash: Vec<u8>,
        deadline_ms: u64,
    },
    Publish {
        room: u64,
        first: u32,
        pages: Vec<(u32, u64)>,
    },
    Finish {
        room: u64,
        finish: PrefillOutput,
    },
    Open {
        room: u64,
        request: OpenRequest,
    },
    Grant {
        room: u64,
        start_page: u32,
        pages: Vec<u32>,
    },
    Revoke {
        room: u64,
    },
    Abort {
        room: u64,
        code: ReasonCode,
    },
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
