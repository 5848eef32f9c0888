//! The exporter for a program without a tokio of its own: an engine's front, in Python.

use std::time::Duration;

use opentelemetry_proto::tonic::trace::v1::Span;
use prometheus::{IntCounterVec, Opts};
use tokio::runtime::{Builder, Runtime};

use super::encode::TraceService;
use super::export::{RESULTS, SpanExporter};
use crate::config::TraceEndpoint;

/// An `SpanExporter` on one thread, which sleeps while there is nothing to send.
pub struct BackgroundExporter {
    exporter: SpanExporter,
    runtime: Runtime,
}

impl BackgroundExporter {
    /// Errors say what is wrong with `endpoint`, or why there can be no thread.
    pub fn start(endpoint: &str, service: TraceService) -> Result<Self, String> {
        let endpoint: TraceEndpoint = endpoint.parse()?;
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("otlp")
            .enable_all()
            .build()
            .map_err(|err| err.to_string())?;
        let counts = IntCounterVec::new(Opts::new("spans", "by what became of them"), &["result"])
            .map_err(|err| err.to_string())?;
        let exporter = {
            let _in_it = runtime.enter();
            SpanExporter::start(endpoint, service, counts)
        };
        Ok(Self { exporter, runtime })
    }

    /// Never waits.
    pub fn put(&self, spans: Vec<Span>) {
        self.exporter.put(spans);
    }

    /// Spans so far by what became of them.
    pub fn counts(&self) -> [(&'static str, u64); 3] {
        RESULTS.map(|result| {
            (
                result,
                self.exporter.counts.with_label_values(&[result]).get(),
            )
        })
    }

    /// Wait until what was put has been sent, or could not be, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        self.runtime.block_on(self.exporter.flush(limit));
    }
}
