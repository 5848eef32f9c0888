//! Python face of the span exporter: one encoder and one sender of OTLP for router and engines.

use std::collections::HashMap;
use std::time::Duration;

use baton_router::trace::{
    BackgroundExporter, KeyValue, Span, SpanKind, TraceService, failed_status, int_attribute,
    span_event, span_id_bytes, text_attribute, trace_id_bytes,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::logs_py::start_default_logs;

#[derive(FromPyObject)]
enum PyAttribute {
    Int(i64),
    Text(String),
}

type PyAttributes = Vec<(String, PyAttribute)>;

/// baton.server.observability.spans.Span
#[derive(FromPyObject)]
struct PySpan {
    trace: u128,
    id: u64,
    parent: Option<u64>,
    name: String,
    is_server: bool,
    start: u64,
    end: u64,
    attributes: PyAttributes,
    events: Vec<(u64, String, PyAttributes)>,
    error: Option<String>,
}

fn key_values(attributes: PyAttributes) -> Vec<KeyValue> {
    let pairs = attributes.into_iter();
    pairs
        .map(|(key, value)| match value {
            PyAttribute::Int(number) => int_attribute(key, number),
            PyAttribute::Text(text) => text_attribute(key, text),
        })
        .collect()
}

impl From<PySpan> for Span {
    fn from(span: PySpan) -> Self {
        let kind = if span.is_server {
            SpanKind::Server
        } else {
            SpanKind::Internal
        };
        let events = span.events.into_iter().map(|(at, name, attributes)| {
            let mut event = span_event(at, name);
            event.attributes = key_values(attributes);
            event
        });
        Self {
            trace_id: trace_id_bytes(span.trace),
            span_id: span_id_bytes(span.id),
            parent_span_id: span.parent.map_or_else(Vec::new, span_id_bytes),
            name: span.name,
            kind: kind.into(),
            start_time_unix_nano: span.start,
            end_time_unix_nano: span.end,
            attributes: key_values(span.attributes),
            events: events.collect(),
            status: span.error.map(failed_status),
            ..Default::default()
        }
    }
}

/// Sends spans to an OTLP collector from a thread of its own: `put` never waits, and what does not
/// fit into its queue, or cannot be delivered, is dropped and counted.
#[pyclass(module = "baton._native", frozen)]
struct SpanExporter {
    inner: BackgroundExporter,
}

#[pymethods]
impl SpanExporter {
    /// `endpoint` as --otlp-traces-endpoint has it; ValueError says what is wrong with it.
    /// `attributes` of the resource, beside service.name and service.version.
    #[new]
    fn new(endpoint: &str, service: String, attributes: Vec<(String, String)>) -> PyResult<Self> {
        start_default_logs();
        let service = TraceService {
            name: service,
            attributes,
        };
        let inner = BackgroundExporter::start(endpoint, service).map_err(PyValueError::new_err)?;
        Ok(Self { inner })
    }

    /// Hand over ended spans, objects with the fields of baton.server.observability.spans.Span.
    fn put(&self, spans: Vec<PySpan>) {
        self.inner.put(spans.into_iter().map(Span::from).collect());
    }

    /// Spans so far by result: exported, dropped (the queue was full), failed (the collector).
    fn counts(&self) -> HashMap<&'static str, u64> {
        self.inner.counts().into()
    }

    /// Wait until what was put has been sent, or could not be, for at most so many seconds.
    fn flush(&self, py: Python<'_>, timeout_secs: f64) -> PyResult<()> {
        let timeout = Duration::try_from_secs_f64(timeout_secs)
            .map_err(|err| PyValueError::new_err(err.to_string()))?;
        py.detach(|| self.inner.flush(timeout));
        Ok(())
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<SpanExporter>()
}
