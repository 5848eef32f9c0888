//! Record of one request: becomes one log line and its metrics when the answer's body ends, however
//! it ends.

use std::sync::Arc;

use http::{HeaderMap, StatusCode};
use router_core::{Role, SelectionReason};
use tokio::time::Instant;

use crate::clock::ms_since;
use crate::observability::metrics::RouterMetrics;
use crate::observability::otlp::{SpanExporter, TraceContext};
use crate::observability::request_timeline::{RequestHistory, RequestStage, RequestTimeline};

/// Where records go when they end.
#[derive(Clone)]
pub struct EntrySinks {
    pub metrics: Arc<RouterMetrics>,
    pub requests: Arc<RequestHistory>,
    /// With --enable-trace.
    pub tracer: Option<Arc<SpanExporter>>,
}

/// Dropped with the response body. [`AccessLogEntry::end`] was not called: the client left.
pub struct AccessLogEntry {
    sinks: EntrySinks,
    pub timeline: Arc<RequestTimeline>,
    pub rid: String,
    pub route: &'static str,
    method: &'static str,
    pub started: Instant,
    pub attempts: u32,
    pub prefill: Option<(String, SelectionReason)>,
    /// Decode or regular worker.
    pub worker: Option<(String, SelectionReason)>,
    pub room: Option<u64>,
    status: StatusCode,
    outcome: Option<&'static str>,
    ttft_ms: Option<u64>,
}

impl AccessLogEntry {
    pub fn new(
        sinks: &EntrySinks,
        route: &'static str,
        method: &'static str,
        headers: &HeaderMap,
        rid: String,
    ) -> Self {
        let trace = sinks.tracer.as_ref().map(|_| TraceContext::of(headers));
        Self {
            sinks: sinks.clone(),
            timeline: sinks.requests.begin(route, &rid, trace),
            rid,
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

    /// The first byte goes to the client.
    pub fn first_byte(&mut self, status: StatusCode) {
        if self.ttft_ms.is_none() {
            self.status = status;
            self.timeline.mark(RequestStage::FirstByte);
            self.ttft_ms = Some(ms_since(self.started));
            let ttft = self.sinks.metrics.ttft.with_label_values(&[self.route]);
            ttft.observe(self.started.elapsed().as_secs_f64());
        }
    }

    /// A worker failed after its answer had begun.
    pub fn upstream_error(&self, role: Role, reason: &'static str) {
        self.sinks
            .metrics
            .upstream_errors
            .with_label_values(&[role.into_str(), reason])
            .inc();
    }

    /// How it ended; the first call counts.
    pub fn end(&mut self, status: StatusCode, outcome: &'static str) {
        if self.outcome.is_none() {
            self.status = status;
            self.outcome = Some(outcome);
        }
    }
}

impl Drop for AccessLogEntry {
    fn drop(&mut self) {
        let outcome = self.outcome.unwrap_or("client_gone");
        // nginx's number for a client that left; it never goes over the wire.
        let status = if self.outcome.is_some() {
            self.status.as_u16()
        } else {
            499
        };
        let labels = [self.route, self.method, class(status), outcome];
        self.sinks.metrics.requests.with_label_values(&labels).inc();
        let duration = self.sinks.metrics.duration.with_label_values(&[self.route]);
        duration.observe(self.started.elapsed().as_secs_f64());
        self.sinks.requests.end(&self.timeline, status, outcome);
        if let Some(tracer) = &self.sinks.tracer
            && let Some(spans) = self.timeline.spans(self.method)
        {
            tracer.put(spans);
        }
        let stages = self.timeline.stages();
        self.sinks.metrics.stages(stages);
        let [
            read_ms,
            queue_ms,
            parse_ms,
            tokenize_ms,
            worker_wait_ms,
            decide_ms,
            connect_ms,
            first_token_ms,
        ] = stages.map(|seconds| Some((seconds? * 1e6).round() / 1e3));
        let usage = self.timeline.usage();
        let show = |chosen: &Option<(String, SelectionReason)>| {
            chosen
                .as_ref()
                .map_or("-".to_owned(), |(name, why)| format!("{name} ({why})"))
        };
        tracing::info!(
            target: "access",
            // With its Debug form in text logs: a client's id cannot look like further fields.
            rid = self.rid,
            trace_id = self.timeline.trace_id(),
            route = self.route,
            prefill = %show(&self.prefill),
            worker = %show(&self.worker),
            room = self.room,
            attempts = self.attempts,
            failovers = self.timeline.failovers(),
            status,
            outcome,
            read_ms, queue_ms, parse_ms, tokenize_ms, worker_wait_ms, decide_ms, connect_ms, first_token_ms,
            prompt_tokens = usage.map(|usage| usage.prompt_tokens),
            cached_tokens = usage.and_then(|usage| usage.cached_tokens),
            completion_tokens = usage.and_then(|usage| usage.completion_tokens),
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
