//! Python face of the span exporter: one encoder and one sender of OTLP for router and engines.

use std::collections::HashMap;
use std::time::Duration;

use baton_router::trace::{
    AttributeValue, BackgroundExporter, SpanEvent, SpanKind, TraceService, TraceSpan,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::transfer_py::log_to_stderr;

#[derive(FromPyObject)]
enum PyAttribute {
    Int(i64),
    Text(String),
}

impl From<PyAttribute> for AttributeValue {
    fn from(value: PyAttribute) -> Self {
        match value {
            PyAttribute::Int(number) => AttributeValue::Int(number),
            PyAttribute::Text(text) => AttributeValue::Text(text),
        }
    }
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

fn owned(attributes: PyAttributes) -> Vec<(baton_router::trace::Name, AttributeValue)> {
    let named = attributes.into_iter();
    named.map(|(name, value)| (name.into(), value.into())).collect()
}

impl From<PySpan> for TraceSpan {
    fn from(span: PySpan) -> Self {
        let events = span.events.into_iter();
        TraceSpan {
            trace: span.trace,
            id: span.id,
            parent: span.parent,
            name: span.name,
            kind: match span.is_server {
                true => SpanKind::Server,
                false => SpanKind::Internal,
            },
            start: span.start,
            end: span.end,
            attributes: owned(span.attributes),
            events: events
                .map(|(at, name, attributes)| SpanEvent {
                    at,
                    name: name.into(),
                    attributes: owned(attributes),
                })
                .collect(),
            error: span.error,
        }
    }
}

/// Sends spans to an OTLP collector from a thread of its own: `put` never waits, and what does not fit into its queue,
/// or cannot be delivered, is dropped and counted.
#[pyclass(module = "baton._native", frozen)]
struct SpanExporter {
    inner: BackgroundExporter,
}

#[pymethods]
impl SpanExporter {
    /// `endpoint` as --otlp-traces-endpoint has it; ValueError says what is wrong with it. `attributes` of the resource,
    /// beside service.name and service.version.
    #[new]
    fn new(endpoint: &str, service: String, attributes: Vec<(String, String)>) -> PyResult<Self> {
        log_to_stderr();
        let service = TraceService { name: service, attributes };
        let inner = BackgroundExporter::start(endpoint, service).map_err(PyValueError::new_err)?;
        Ok(Self { inner })
    }

    /// Hand over ended spans, objects with the fields of baton.server.observability.spans.Span.
    fn put(&self, spans: Vec<PySpan>) {
        self.inner.put(spans.into_iter().map(TraceSpan::from).collect());
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
