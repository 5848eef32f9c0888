//! Metrics, logs, traces and explanations.

/// Access log: a line per request.
pub(crate) mod access_log;
/// Log of routing decisions.
pub(crate) mod decision_log;
/// Stages that engines report.
pub(crate) mod engine_stages;
/// Reasons for a choice of worker.
pub(crate) mod explain;
/// Web pages that show the fleet, and what they are sent.
pub(crate) mod feed_hub;
/// Events of the fleet.
pub(crate) mod fleet_events;
/// Prometheus metrics.
pub(crate) mod metrics;
/// OpenTelemetry spans.
pub mod otlp;
/// KV traffic between workers.
pub(crate) mod pair_traffic;
/// Replay of a decision log.
pub(crate) mod replay;
/// Timeline of each request.
pub(crate) mod request_timeline;
