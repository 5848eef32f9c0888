//! Records of rooms and transfers for the engine and operators: `events` ends at the engine,
//! `metrics` at its counters, `room_history` at `/debug/rooms`.

pub mod events;
pub mod metrics;
pub mod room_history;
