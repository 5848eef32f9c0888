//! Pairs of prefill and decode workers.

/// Drawing of bootstrap rooms.
pub mod bootstrap_room;
/// Compatibility of prefill and decode workers.
pub mod fingerprint;
/// Prefill on the decode worker itself.
pub mod local_prefill;
/// Pairs that proved unable to work together.
pub mod verdicts;
