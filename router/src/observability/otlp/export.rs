//! Spans to a collector: batches over OTLP/gRPC or OTLP/HTTP, from a task of its own.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::trace::v1::Span;
use prometheus::IntCounterVec;
use tokio::net::TcpStream;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::encode::{TraceService, encode};
use crate::config::{TraceEndpoint, TraceProtocol};

/// Requests whose spans wait to be sent.
const QUEUE: usize = 4096;
/// Spans of one message, and how long the first of them waits for more.
const BATCH: usize = 1024;
const PAUSE: Duration = Duration::from_secs(1);
/// A collector that takes longer loses the batch.
const DEADLINE: Duration = Duration::from_secs(5);
/// After a failure the next batch waits: there is no use in knocking every second.
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// A collector's answer is a few bytes.
const MAX_ANSWER: usize = 64 << 10;

/// Results of spans, as the metric's label has them.
pub const RESULTS: [&str; 3] = ["exported", "dropped", "failed"];

enum Job {
    Spans(Vec<Span>),
    /// Send what came before now; the other end hears when that has been tried.
    Flush(oneshot::Sender<()>),
}

/// The queue's end that requests see.
pub struct SpanExporter {
    queue: Sender<Job>,
    counts: IntCounterVec,
}

impl SpanExporter {
    /// Start the task that sends. `counts` is by result: exported, dropped (the queue was full),
    /// failed (the collector).
    pub fn start(endpoint: TraceEndpoint, service: TraceService, counts: IntCounterVec) -> Self {
        let (queue, jobs) = channel(QUEUE);
        tokio::spawn(send_all(endpoint, service, jobs, counts.clone()));
        Self { queue, counts }
    }

    pub fn put(&self, spans: Vec<Span>) {
        let number = spans.len() as u64;
        if self.queue.try_send(Job::Spans(spans)).is_err() {
            self.counts.with_label_values(&["dropped"]).inc_by(number);
        }
    }

    /// Wait until what was put has been sent, or could not be, for at most `limit`.
    pub async fn flush(&self, limit: Duration) {
        let (done, heard) = oneshot::channel();
        let flushed = async {
            if self.queue.send(Job::Flush(done)).await.is_ok() {
                let _ = heard.await; // an error: the task is gone, and nothing more will be sent
            }
        };
        let _ = timeout(limit, flushed).await; // what a slow collector has not taken by then is lost
    }

    /// How many spans met this of `RESULTS` so far.
    pub fn count(&self, result: &str) -> u64 {
        self.counts.with_label_values(&[result]).get()
    }
}

async fn send_all(
    endpoint: TraceEndpoint,
    service: TraceService,
    mut jobs: Receiver<Job>,
    counts: IntCounterVec,
) {
    let mut is_failing = false;
    let mut next = jobs.recv().await;
    while next.is_some() {
        let until = Instant::now() + PAUSE;
        let mut batch = Vec::new();
        let mut flush = None;
        while let Some(job) = next {
            match job {
                Job::Spans(more) => batch.extend(more),
                Job::Flush(done) => flush = Some(done),
            }
            if batch.len() >= BATCH || flush.is_some() {
                break;
            }
            next = timeout_at(until, jobs.recv()).await.ok().flatten();
        }
        if !batch.is_empty() {
            let number = batch.len() as u64;
            let sent =
                match timeout(DEADLINE, send(&endpoint, encode(service.clone(), batch))).await {
                    Ok(sent) => sent,
                    Err(_) => Err(format!("no answer for {DEADLINE:?}")),
                };
            let result = if sent.is_ok() { "exported" } else { "failed" };
            counts.with_label_values(&[result]).inc_by(number);
            match sent {
                Ok(()) => is_failing = false,
                Err(err) => {
                    let TraceEndpoint { host, port, .. } = &endpoint;
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(
                            "cannot export traces to {host}:{port}: {err}; spans are dropped until it works again"
                        );
                    }
                    if flush.is_none() {
                        sleep(AFTER_FAILURE).await;
                    }
                }
            }
        }
        drop(flush); // wakes the waiting caller
        next = jobs.recv().await;
    }
}

/// Send a batch over a connection of its own: there is one a second at most.
async fn send(endpoint: &TraceEndpoint, message: Vec<u8>) -> Result<(), String> {
    let TraceEndpoint { protocol, host, port, path } = endpoint;
    let stream = TcpStream::connect((host.as_str(), *port)).await;
    let io = TokioIo::new(stream.map_err(|err| err.to_string())?);
    match protocol {
        TraceProtocol::Http => {
            let request = Request::post(path)
                .header(header::HOST, format!("{host}:{port}"))
                .header(header::CONTENT_TYPE, "application/x-protobuf")
                .body(Full::new(Bytes::from(message)))
                .map_err(|err| err.to_string())?;
            let (mut sender, connection) =
                hyper::client::conn::http1::handshake(io).await.map_err(|err| err.to_string())?;
            let _connection = Driven(tokio::spawn(connection).abort_handle());
            answered(sender.send_request(request).await, *protocol).await
        }
        TraceProtocol::Grpc => {
            // Not compressed, length, message.
            let mut framed = BytesMut::with_capacity(message.len() + 5);
            framed.put_u8(0);
            framed.put_u32(message.len() as u32);
            framed.put_slice(&message);
            let request = Request::post(format!("http://{host}:{port}{path}"))
                .header(header::CONTENT_TYPE, "application/grpc")
                .header(header::TE, "trailers")
                .body(Full::new(framed.freeze()))
                .map_err(|err| err.to_string())?;
            let (mut sender, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
                    .await
                    .map_err(|err| err.to_string())?;
            let _connection = Driven(tokio::spawn(connection).abort_handle());
            answered(sender.send_request(request).await, *protocol).await
        }
    }
}

/// A connection's task, ended with the sending, also when that is given up.
struct Driven(AbortHandle);

impl Drop for Driven {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn answered(
    response: hyper::Result<Response<Incoming>>,
    protocol: TraceProtocol,
) -> Result<(), String> {
    let (head, body) = response.map_err(|err| err.to_string())?.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    let body = body.map_err(|err| err.to_string())?;
    if head.status != StatusCode::OK {
        return Err(format!("it answered {}", head.status));
    }
    if protocol == TraceProtocol::Grpc {
        // An answer without a message has its status in the head.
        let status = body
            .trailers()
            .and_then(|trailers| trailers.get("grpc-status"))
            .or(head.headers.get("grpc-status"));
        match status.map(|status| status.as_bytes()) {
            Some(b"0") => {}
            status => {
                let status = status.map(String::from_utf8_lossy);
                return Err(format!("gRPC status {}", status.unwrap_or("missing".into())));
            }
        }
    }
    Ok(())
}
