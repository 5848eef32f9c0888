//! `--enable-trace`: spans a collector gets, headers workers get, and no request waits for a
//! collector.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::TcpListener;

use crate::support::*;

const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// Field numbers and contents of a protobuf message: varints and 64 bits as 8 bytes, the rest as it
/// is.
fn fields(mut message: &[u8]) -> Vec<(u64, Vec<u8>)> {
    fn varint(message: &mut &[u8]) -> u64 {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let byte = message[0];
            *message = &message[1..];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        number
    }
    let mut found = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let len = match key & 7 {
            0 => {
                let number = varint(&mut message);
                found.push((key >> 3, number.to_le_bytes().to_vec()));
                continue;
            }
            1 => 8,
            2 => varint(&mut message) as usize,
            other => panic!("wire type {other}"),
        };
        found.push((key >> 3, message[..len].to_vec()));
        message = &message[len..];
    }
    found
}

fn all(message: &[u8], number: u64) -> Vec<Vec<u8>> {
    let fields = fields(message).into_iter();
    fields
        .filter(|(field, _)| *field == number)
        .map(|(_, bytes)| bytes)
        .collect()
}

#[derive(Debug, Clone)]
struct Got {
    trace: String,
    id: String,
    parent: String,
    name: String,
    attributes: String,
    nanos: u64,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn spans(request: &[u8]) -> Vec<Got> {
    let inside = |messages: Vec<Vec<u8>>, number| -> Vec<Vec<u8>> {
        messages
            .iter()
            .flat_map(|message| all(message, number))
            .collect()
    };
    let spans = inside(inside(all(request, 1), 2), 2);
    spans
        .iter()
        .map(|span| {
            let one = |number| all(span, number).pop().unwrap_or_default();
            let time = |number| u64::from_le_bytes(one(number).try_into().unwrap());
            let attributes = all(span, 9).concat();
            Got {
                trace: hex(&one(1)),
                id: hex(&one(2)),
                parent: hex(&one(4)),
                name: String::from_utf8(one(5)).unwrap(),
                attributes: String::from_utf8_lossy(&attributes).into_owned(),
                nanos: time(8) - time(7),
            }
        })
        .collect()
}

/// A collector that speaks HTTP/1.1 and HTTP/2, both forms of OTLP.
struct Collector {
    addr: SocketAddr,
    got: Arc<Mutex<Vec<Got>>>,
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let got: Arc<Mutex<Vec<Got>>> = Arc::default();
        let collected = got.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let collected = collected.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request| collect(request, collected.clone()));
                    let server = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = server.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { addr, got }
    }

    async fn until(&self, spans: usize) -> Vec<Got> {
        eventually("all spans came", || async {
            self.got.lock().len() >= spans
        })
        .await;
        self.got.lock().clone()
    }
}

type Answer =
    StreamBody<futures_util::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

async fn collect(
    request: Request<Incoming>,
    got: Arc<Mutex<Vec<Got>>>,
) -> Result<Response<Answer>, Infallible> {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let kind = head.headers["content-type"].to_str().unwrap().to_owned();
    let mut trailers = HeaderMap::new();
    let message = match (kind.as_str(), head.uri.path()) {
        ("application/x-protobuf", "/v1/traces") => body,
        ("application/grpc", "/opentelemetry.proto.collector.trace.v1.TraceService/Export") => {
            assert_eq!(head.headers["te"], "trailers");
            assert_eq!(
                u32::from_be_bytes(body[1..5].try_into().unwrap()) as usize,
                body.len() - 5
            );
            trailers.insert("grpc-status", "0".parse().unwrap());
            body.slice(5..)
        }
        other => panic!("{other:?}"),
    };
    got.lock().extend(spans(&message));
    let frames = match trailers.is_empty() {
        true => vec![],
        false => vec![
            Ok(Frame::data(Bytes::from_static(&[0; 5]))),
            Ok(Frame::trailers(trailers)),
        ],
    };
    let body = StreamBody::new(futures_util::stream::iter(frames));
    let answer = Response::builder().header("content-type", kind).body(body);
    Ok(answer.unwrap())
}

#[tokio::test]
async fn one_trace_goes_from_the_client_through_the_router_to_both_workers() {
    timed(async {
        let collector = Collector::start().await;
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        for endpoint in [
            collector.addr.to_string(),
            format!("http://{}", collector.addr),
        ] {
            collector.got.lock().clear();
            let flags = ["--enable-trace", "--otlp-traces-endpoint", &endpoint];
            let router = Router::pd(&[&p], &[&d], &flags).await;
            let headers = [("traceparent", PARENT), ("tracestate", "a=b")];
            let body = chat(true).to_string();
            let reply = router
                .send(Method::POST, "/v1/chat/completions", &headers, &body)
                .await;
            assert_eq!(reply.status, 200);
            let got = collector.until(4).await;
            assert_eq!(got.len(), 4, "{got:?}");
            assert!(got.iter().all(|span| span.trace == PARENT[3..35]));
            let named = |name: &str| got.iter().find(|span| span.name == name).unwrap();
            let request = named("POST /v1/chat/completions");
            assert_eq!(request.parent, PARENT[36..52]);
            for (name, worker) in [("prefill", &p), ("decode", &d)] {
                let leg = named(name);
                assert_eq!(leg.parent, request.id);
                assert!(leg.attributes.contains(&worker.url()), "{leg:?}");
                assert!(leg.nanos > 0 && leg.nanos <= request.nanos, "{got:?}");
                let seen = worker.seen().pop().unwrap();
                let sent = seen.headers["traceparent"].to_str().unwrap();
                assert_eq!(sent, format!("00-{}-{}-01", leg.trace, leg.id));
                assert_eq!(seen.headers["tracestate"], "a=b");
            }
            assert_eq!(named("decide").parent, request.id);
            assert_eq!(
                router
                    .metric("baton_router_trace_spans_total{result=\"exported\"}")
                    .await,
                4.0
            );
        }
        // Who did not sample does not want it.
        collector.got.lock().clear();
        let endpoint = collector.addr.to_string();
        let flags = ["--enable-trace", "--otlp-traces-endpoint", &endpoint];
        let router = Router::pd(&[&p], &[&d], &flags).await;
        let unsampled = PARENT.replace("-01", "-00");
        for header in [unsampled.as_str(), PARENT] {
            let headers = [("traceparent", header)];
            router
                .send(Method::POST, "/generate", &headers, "{\"text\":\"a\"}")
                .await;
        }
        assert_eq!(collector.until(4).await.len(), 4);
        let seen = &d.seen()[d.count() - 2];
        assert!(
            seen.headers["traceparent"]
                .to_str()
                .unwrap()
                .ends_with("-00")
        );
    })
    .await;
}

#[tokio::test]
async fn failed_attempt_is_a_failed_span_and_the_next_one_follows() {
    timed(async {
        let collector = Collector::start().await;
        let (a, b) = (Mock::start(&[Act::Drop]).await, Mock::start(&[]).await);
        let endpoint = collector.addr.to_string();
        let flags = ["--enable-trace", "--otlp-traces-endpoint", &endpoint];
        let router = Router::regular(&[&a, &b], &flags).await;
        for _ in 0..2 {
            assert_eq!(router.chat().await.status, 200);
        }
        // One of the two met the broken worker: two decisions, two legs.
        let got = collector.until(3 + 5).await;
        let count = |name: &str| got.iter().filter(|span| span.name == name).count();
        assert_eq!((count("regular"), count("decide")), (3, 3));
    })
    .await;
}

#[tokio::test]
async fn dead_or_silent_collector_costs_spans_and_no_request() {
    timed(async {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let dead = {
            let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
            gone.local_addr().unwrap()
        };
        let mock = Mock::start(&[]).await;
        for addr in [silent.local_addr().unwrap(), dead] {
            let endpoint = addr.to_string();
            let flags = ["--enable-trace", "--otlp-traces-endpoint", &endpoint];
            let router = Router::regular(&[&mock], &flags).await;
            for _ in 0..50 {
                assert_eq!(router.chat_stream().await.status, 200);
            }
            if addr == dead {
                eventually("the batch is given up", || async {
                    let failed = "baton_router_trace_spans_total{result=\"failed\"}";
                    router.metric(failed).await == 150.0
                })
                .await;
            }
        }
    })
    .await;
}
