//! What the engine and operators learn about rooms and transfers: `events` ends at the engine, `metrics` at its counters,
//! `room_history` at `/debug/rooms`.

pub mod events;
pub mod metrics;
pub mod room_history;
