//! Spans to a collector: batches over OTLP/gRPC or OTLP/HTTP, from a task of its own.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::trace::v1::Span;
use prometheus::IntCounterVec;
use tokio::net::TcpStream;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
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

/// Why a batch was not taken, for the log.
type SendError = Box<dyn std::error::Error + Send + Sync>;

enum Job {
    Spans(Vec<Span>),
    /// Send the spans queued so far; the other end is notified after the attempt.
    Flush(oneshot::Sender<()>),
}

/// The queue's end that requests see.
pub struct SpanExporter {
    queue: Sender<Job>,
    /// Spans so far, by `RESULTS`.
    pub counts: IntCounterVec,
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
        // what a slow collector has not taken by then is lost
        let _ = timeout(limit, flushed).await;
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
            let sending = send(&endpoint, encode(service.clone(), batch));
            let late = |_| Err(format!("no answer for {DEADLINE:?}").into());
            let sent = timeout(DEADLINE, sending).await.unwrap_or_else(late);
            let result = if sent.is_ok() { "exported" } else { "failed" };
            counts.with_label_values(&[result]).inc_by(number);
            match sent {
                Ok(()) => is_failing = false,
                Err(err) => {
                    let TraceEndpoint { host, port, .. } = &endpoint;
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(
                            "cannot export traces to {host}:{port}: {err}; spans are dropped until \
                             it works again"
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
async fn send(endpoint: &TraceEndpoint, message: Vec<u8>) -> Result<(), SendError> {
    let TraceEndpoint {
        protocol,
        host,
        port,
        path,
    } = endpoint;
    let io = TokioIo::new(TcpStream::connect((host.as_str(), *port)).await?);
    // The connection's task ends with the sending, also when that is given up.
    let mut driver = JoinSet::new();
    match protocol {
        TraceProtocol::Http => {
            let request = Request::post(path)
                .header(header::HOST, format!("{host}:{port}"))
                .header(header::CONTENT_TYPE, "application/x-protobuf")
                .body(Full::new(Bytes::from(message)))?;
            let (mut sender, connection) = http1::handshake(io).await?;
            driver.spawn(connection);
            answered(sender.send_request(request).await?, *protocol).await
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
                .body(Full::new(framed.freeze()))?;
            let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
            driver.spawn(connection);
            answered(sender.send_request(request).await?, *protocol).await
        }
    }
}

async fn answered(response: Response<Incoming>, protocol: TraceProtocol) -> Result<(), SendError> {
    let (head, body) = response.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await?;
    if head.status != StatusCode::OK {
        return Err(format!("it answered {}", head.status).into());
    }
    if protocol == TraceProtocol::Grpc {
        // An answer without a message has its status in the head.
        let status = body
            .trailers()
            .and_then(|trailers| trailers.get("grpc-status"))
            .or(head.headers.get("grpc-status"));
        let status = status.map_or("missing".into(), |status| {
            String::from_utf8_lossy(status.as_bytes())
        });
        if status != "0" {
            return Err(format!("gRPC status {status}").into());
        }
    }
    Ok(())
}
