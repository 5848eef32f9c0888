//! Spans to a collector: batches over OTLP/gRPC or OTLP/HTTP, from a task of its own.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prometheus::IntCounterVec;
use tokio::net::TcpStream;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::encode::{Service, Span, encode};

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

/// Where spans go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    pub protocol: Protocol,
    pub host: String,
    pub port: u16,
    /// Path of the POST.
    pub path: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// host:port, as SGLang's launchers take it.
    Grpc,
    /// http://host:port[/path], protobuf in the body.
    Http,
}

impl std::str::FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!("{why}; give host:port for OTLP/gRPC, or http://host:port for OTLP/HTTP")
        };
        if text.starts_with("https://") {
            return Err("TLS to a collector is not supported; run one beside the router, and let it forward".into());
        }
        let (protocol, rest) = match text.strip_prefix("http://") {
            Some(rest) => (Protocol::Http, rest),
            None => (Protocol::Grpc, text.strip_prefix("grpc://").unwrap_or(text)),
        };
        let (authority, path) = match rest.find('/') {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        let (host, port) = authority.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
        let port = port.parse().map_err(|_| wrong("the port is no number"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(wrong("no host"));
        }
        let path = match (protocol, path) {
            (Protocol::Grpc, "" | "/") => {
                "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            }
            (Protocol::Grpc, _) => return Err(wrong("gRPC takes no path")),
            (Protocol::Http, "" | "/") => "/v1/traces",
            (Protocol::Http, path) => path,
        };
        Ok(Self { protocol, host: host.to_owned(), port, path: path.to_owned() })
    }
}

/// What became of spans, as the metric's label has it.
pub const RESULTS: [&str; 3] = ["exported", "dropped", "failed"];

enum Job {
    Spans(Vec<Span>),
    /// Send what came before now; the other end hears when that has been tried.
    Flush(oneshot::Sender<()>),
}

/// The queue's end that requests see.
pub struct Exporter {
    queue: Sender<Job>,
    counts: IntCounterVec,
}

impl Exporter {
    /// Start the task that sends. `counts` is by result: exported, dropped (the queue was full), failed (the collector).
    pub fn start(endpoint: Endpoint, service: Service, counts: IntCounterVec) -> Self {
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

    /// Wait until what was put has been sent, or could not be, for at most `patience`.
    pub async fn flush(&self, patience: Duration) {
        let (done, heard) = oneshot::channel();
        let flushed = async {
            if self.queue.send(Job::Flush(done)).await.is_ok() {
                let _ = heard.await; // an error: the task is gone, and nothing more will be sent
            }
        };
        let _ = timeout(patience, flushed).await; // what a slow collector has not taken by then is lost
    }

    /// How many spans met this of `RESULTS` so far.
    pub fn count(&self, result: &str) -> u64 {
        self.counts.with_label_values(&[result]).get()
    }
}

async fn send_all(
    endpoint: Endpoint,
    service: Service,
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
            let sent = match timeout(DEADLINE, send(&endpoint, encode(&service, &batch))).await {
                Ok(sent) => sent,
                Err(_) => Err(format!("no answer for {DEADLINE:?}")),
            };
            let result = if sent.is_ok() { "exported" } else { "failed" };
            let number = batch.len() as u64;
            counts.with_label_values(&[result]).inc_by(number);
            match sent {
                Ok(()) => is_failing = false,
                Err(err) => {
                    let Endpoint { host, port, .. } = &endpoint;
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
        drop(flush); // whoever waits for it goes on
        next = jobs.recv().await;
    }
}

/// One batch over a connection of its own: there is one a second at most.
async fn send(endpoint: &Endpoint, message: Vec<u8>) -> Result<(), String> {
    let Endpoint { protocol, host, port, path } = endpoint;
    let stream = TcpStream::connect((host.as_str(), *port)).await;
    let io = TokioIo::new(stream.map_err(|err| err.to_string())?);
    match protocol {
        Protocol::Http => {
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
        Protocol::Grpc => {
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
    protocol: Protocol,
) -> Result<(), String> {
    let (head, body) = response.map_err(|err| err.to_string())?.into_parts();
    let body = Limited::new(body, MAX_ANSWER).collect().await;
    let body = body.map_err(|err| err.to_string())?;
    if head.status != StatusCode::OK {
        return Err(format!("it answered {}", head.status));
    }
    if protocol == Protocol::Grpc {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_name_their_protocol() {
        let read = |text: &str| text.parse::<Endpoint>();
        let grpc = read("localhost:4317").unwrap();
        assert_eq!(
            (grpc.protocol, grpc.host.as_str(), grpc.port),
            (Protocol::Grpc, "localhost", 4317)
        );
        assert_eq!(read("grpc://localhost:4317").unwrap(), grpc);
        let http = read("http://[::1]:4318").unwrap();
        assert_eq!(
            (http.protocol, http.host.as_str(), http.path.as_str()),
            (Protocol::Http, "::1", "/v1/traces")
        );
        assert_eq!(read("http://c:1/x/y").unwrap().path, "/x/y");
        for (wrong, part) in [
            ("localhost", "no port"),
            ("h:x", "no number"),
            (":4317", "no host"),
            ("h:1/x", "no path"),
            ("https://h:1", "TLS"),
        ] {
            assert!(read(wrong).unwrap_err().contains(part), "{wrong}");
        }
    }
}
