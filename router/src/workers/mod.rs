//! Workers: their states, their reports, and the choice among them.
//!
//! `fleet` holds them and decides: `discovery` finds workers, `health` registers and probes them,
//! `kv_events` follows their caches, `kv_event_status` is the progress of each reader. `load_guard`
//! counts requests in flight.

/// Token rates of a worker.
pub(crate) mod activity;
/// Workers from files and Kubernetes.
pub(crate) mod discovery;
/// The workers, and decisions between them.
pub(crate) mod fleet;
/// Probes of workers.
pub(crate) mod health;
/// Status of a subscription to cache events.
pub(crate) mod kv_event_status;
/// Cache events of workers.
pub(crate) mod kv_events;
/// Load counted while a request is in flight.
pub(crate) mod load_guard;
/// Load reported by workers.
pub(crate) mod load_report;
/// State of one worker.
pub(crate) mod worker;
