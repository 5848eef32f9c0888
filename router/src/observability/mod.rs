//! Metrics, logs, traces and explanations.

/// Access log: a line per request.
pub(crate) mod access_log;
/// Log of routing decisions.
pub(crate) mod decision_log;
/// Log of an engine's native threads.
pub mod engine_logs;
/// Stages that engines report.
pub(crate) mod engine_stages;
/// Reasons for a choice of worker.
pub(crate) mod explain;
/// State of the fleet for the web page.
pub(crate) mod fleet_feed;
/// Prometheus metrics.
pub(crate) mod metrics;
/// OpenTelemetry spans.
pub mod otlp;
/// Replay of a decision log.
pub(crate) mod replay;
/// Timeline of each request.
pub(crate) mod request_timeline;
/// Names of headers between engines and routers.
pub(crate) mod worker_headers;
