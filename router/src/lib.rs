//! baton-router: HTTP router in front of prefill and decode nodes.
//!
//! Life of a request: `server::api` (routes, key, request id) → `server::api::generate` (`request`:
//! body, admission, tokens) → `dispatch` (`workers` chooses P and D, attempts go out over
//! `transport::upstream`, retries) → `dispatch::proxy_body`; `response::keepalive` keeps a stream's
//! connection open while dispatch works. `workers::kv_events` follows the workers' caches,
//! `workers::health` probes them, `observability::access_log` turns each request into one log line
//! and its metrics.
//!
//! Modules, lowest first; each uses only those before it: clock, error, config, observability,
//! transport, request, response, workers, dispatch, server.
//!
//! This crate decides nothing: policies, breakers, backoff and health verdicts are those of
//! `router-core`.

mod clock;
mod config;
mod dispatch;
mod error;
mod observability;
mod request;
mod response;
mod server;
mod transport;
mod workers;

pub use config::{ParseStop, RouterConfig, flags_markdown};
pub use error::RouteError;
pub use observability::engine_logs;
pub use observability::metrics::metrics_markdown;
pub use observability::otlp as trace;
pub use observability::worker_headers::{headers, load_keys, stage_keys};
pub use server::api::browsers::CHANGING_PATHS;
pub use server::api::route_access;
pub use server::{RunningServer, run};
pub use transport::files::read_regular_file;
