//! What is known about one request: becomes one log line and its metrics when the answer's body ends, however it ends.

use std::sync::Arc;

use http::StatusCode;
use router_core::{Role, Why};
use tokio::time::Instant;

use crate::clock::ms_since;
use crate::metrics::Metrics;

/// Dropped with the response body. Nobody called [`Record::end`]: the client left.
pub struct Record {
    metrics: Arc<Metrics>,
    pub rid: String,
    route: &'static str,
    method: &'static str,
    pub started: Instant,
    pub attempts: u32,
    pub prefill: Option<(String, Why)>,
    /// Decode or regular worker.
    pub worker: Option<(String, Why)>,
    pub room: Option<u64>,
    status: StatusCode,
    outcome: Option<&'static str>,
    ttft_ms: Option<u64>,
}

impl Record {
    pub fn new(metrics: Arc<Metrics>, route: &'static str, method: &'static str) -> Self {
        Self {
            metrics,
            rid: String::new(),
            route,
            method,
            started: Instant::now(),
            attempts: 0,
            prefill: None,
            worker: None,
            room: None,
            status: StatusCode::OK,
            outcome: None,
            ttft_ms: None,
        }
    }

    pub fn route(&self) -> &'static str {
        self.route
    }

    /// The first byte goes to the client.
    pub fn first_byte(&mut self, status: StatusCode) {
        if self.ttft_ms.is_none() {
            self.status = status;
            self.ttft_ms = Some(ms_since(self.started));
            let ttft = self.metrics.ttft.with_label_values(&[self.route]);
            ttft.observe(self.started.elapsed().as_secs_f64());
        }
    }

    /// A worker failed after its answer had begun.
    pub fn upstream_error(&self, role: Role, reason: &'static str) {
        let labels = [role.label(), reason];
        let errors = &self.metrics.upstream_errors;
        errors.with_label_values(&labels).inc();
    }

    /// How it ended; the first call counts.
    pub fn end(&mut self, status: StatusCode, outcome: &'static str) {
        if self.outcome.is_none() {
            self.status = status;
            self.outcome = Some(outcome);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let outcome = self.outcome.unwrap_or("client_gone");
        // nginx's number for a client that left; it never goes over the wire.
        let status = match &self.outcome {
            Some(_) => self.status.as_u16(),
            None => 499,
        };
        let labels = [self.route, self.method, class(status), outcome];
        self.metrics.requests.with_label_values(&labels).inc();
        let duration = self.metrics.duration.with_label_values(&[self.route]);
        duration.observe(self.started.elapsed().as_secs_f64());
        let show = |chosen: &Option<(String, Why)>| match chosen {
            Some((name, why)) => format!("{name} ({why})"),
            None => "-".to_owned(),
        };
        tracing::info!(
            target: "access",
            rid = %self.rid,
            route = self.route,
            prefill = %show(&self.prefill),
            worker = %show(&self.worker),
            room = self.room,
            attempts = self.attempts,
            status,
            outcome,
            ttft_ms = self.ttft_ms,
            total_ms = ms_since(self.started),
            "request"
        );
    }
}

/// Metric label of a status.
pub fn class(status: u16) -> &'static str {
    match status / 100 {
        2 => "2xx",
        3 => "3xx",
        4 => "4xx",
        _ => "5xx",
    }
}
