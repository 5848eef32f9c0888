//! Control connections: `accept` takes those of decode ranks, `establish` opens those to prefill
//! ranks and runs the two tasks of each connection, `outbox` bounds the frames that wait for a
//! peer.

pub(super) mod accept;
pub mod establish;
pub mod outbox;
