//! The state machines of a room on both sides: deterministic, no I/O, no clock.
//!
//! Time is an argument, `now` (milliseconds of any monotonic clock); everything to be done is
//! returned as actions. The I/O layer (`crate::node`) drives them; the tests drive them against a
//! model, exhaustively over a lossy channel.
//!
//! Invariants: a transition that returns `InvalidTransition` changed nothing; each machine gives
//! exactly one terminal action (`Released`; `Commit`, `Fail` or `Aborted`) in its life; the decode
//! machine gives its terminal action only when no pull is in flight; it commits only when, in every
//! page group, all pages of the prompt from `start_page` on are verified and the checksum root
//! agrees.

pub mod communicator;
pub mod decode;
pub mod pending_opens;
pub mod prefill;

#[cfg(test)]
mod model;
#[cfg(test)]
mod model_check;
#[cfg(test)]
mod properties;

use crate::protocol::GroupId;
use crate::reason_code::ReasonCode;

/// Place of a page in a prompt: its number in the sequence of the group's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PromptPage {
    pub group: GroupId,
    pub index: u32,
}

/// Number of a control connection. A reconnect gets another number.
pub type ConnectionId = u64;

/// Why a pull ended without its pages.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PullError {
    /// The pull fails, and its room with this code.
    Failed(ReasonCode, String),
    /// The transport does not work; another one may.
    Broken(String),
    /// Stopped on request.
    Cancelled,
}

/// Event that the room's state does not allow: a bug of the I/O layer or the engine, never caused
/// by the peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room is {phase}: {event} is not allowed ({reason})")]
pub struct InvalidTransition {
    pub phase: &'static str,
    pub event: &'static str,
    pub reason: String,
}
