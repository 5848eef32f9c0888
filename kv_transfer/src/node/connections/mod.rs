//! Control connections: `establish` opens those to prefill ranks and runs the two tasks of each
//! connection, `outbox` bounds the frames that wait for a peer. The control loop accepts those of
//! decode ranks.

pub mod establish;
pub mod outbox;
