//! The two lives of a room, as pure state machines: no socket, no thread, no clock.
//!
//! Time comes in as `now` (milliseconds of any monotonic clock), everything to be done comes out as actions. The shell
//! (`crate::node`) feeds them; the tests feed them against a model and exhaustively over a lossy channel.
//!
//! Invariants: a transition that returns `InvalidTransition` changed nothing; each machine gives exactly one terminal action (`Released`;
//! `Commit`, `Fail` or `Aborted`) in its life; the decode machine gives its terminal action only when no pull is in flight; it
//! commits only when every page of the prompt from `start_page` on is verified and the checksum root agrees.

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

/// A control connection, as the machines know it. A reconnect gets another number.
pub type ConnectionId = u64;

/// The caller broke the contract of a room's life: a bug in the shell or the engine, never the peer's doing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("room is {phase}: {event} is not legal ({why})")]
pub struct InvalidTransition {
    pub phase: &'static str,
    pub event: &'static str,
    pub why: String,
}
