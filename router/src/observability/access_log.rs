//! Record of one request: becomes one log line and its metrics when the answer's body ends, however
//! it ends.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderName, Request, StatusCode};
use router_core::{AttemptReason, Role, SelectionReason};
use tokio::time::Instant;

use crate::clock::ms_since;
use crate::observability::metrics::RouterMetrics;
use crate::observability::otlp::{SpanExporter, TraceContext};
use crate::observability::request_timeline::history::RequestHistory;
use crate::observability::request_timeline::{RequestStage, RequestTimeline};

/// Where records go when they end.
#[derive(Clone)]
pub struct EntrySinks {
    pub metrics: Arc<RouterMetrics>,
    pub requests: Arc<RequestHistory>,
    /// With --enable-trace.
    pub tracer: Option<Arc<SpanExporter>>,
}

/// Tenant of a request whose body names none (docs/protocol.md).
const TENANT_HEADER: HeaderName = HeaderName::from_static("x-tenant-id");
/// Longest name of a model or tenant that is logged; they come from the client [characters].
const MAX_NAME: usize = 128;

/// Address from which a request came: a client's, or that of the last proxy in front.
#[derive(Debug, Clone, Copy)]
pub struct ClientAddress(pub IpAddr);

/// Label of the key that a request was accepted with: the id of a control-plane key, or `api_key`.
/// No secret.
#[derive(Debug, Clone)]
pub struct KeyLabel(pub Cow<'static, str>);

/// Dropped with the response body. [`AccessLogEntry::end`] was not called: the client left.
pub struct AccessLogEntry {
    sinks: EntrySinks,
    pub timeline: Arc<RequestTimeline>,
    pub rid: String,
    pub route: &'static str,
    method: &'static str,
    client: Option<IpAddr>,
    key: Option<KeyLabel>,
    model: Option<String>,
    tenant: Option<String>,
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
    pub fn new<B>(
        sinks: &EntrySinks,
        route: &'static str,
        method: &'static str,
        request: &Request<B>,
        rid: String,
    ) -> Self {
        let headers = request.headers();
        let trace = sinks.tracer.as_ref().map(|_| TraceContext::of(headers));
        let extensions = request.extensions();
        let client = extensions.get().map(|ClientAddress(address)| *address);
        let tenant = headers.get(TENANT_HEADER);
        let tenant = tenant.and_then(|value| value.to_str().ok());
        Self {
            sinks: sinks.clone(),
            timeline: sinks.requests.begin(route, &rid, trace),
            rid,
            route,
            method,
            client,
            key: extensions.get().cloned(),
            model: None,
            tenant: tenant.map(beginning),
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

    /// Model and tenant as the body names them. A tenant in the body counts before the header's, as
    /// at the engine.
    pub fn named(&mut self, model: Option<&str>, tenant: Option<&str>) {
        self.model = model.map(beginning);
        self.tenant = tenant.map(beginning).or(self.tenant.take());
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
    pub fn upstream_error(&self, role: Role, reason: AttemptReason) {
        self.sinks
            .metrics
            .upstream_errors
            .with_label_values(&[role.into_str(), reason.into_str()])
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
            client = self.client.map(tracing::field::display),
            key = self.key.as_ref().map(|KeyLabel(label)| &**label),
            tenant = self.tenant,
            model = self.model,
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

fn beginning(name: &str) -> String {
    name.chars().take(MAX_NAME).collect()
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
