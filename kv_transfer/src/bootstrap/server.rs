//! The HTTP server: one thread, a table behind a lock, answers in microseconds.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::auth::{AUTH_HEADER, SeenSignatures, sign_answer, unix_ms, verify_signature};
use super::registry::{RankPosition, RankRegistration, RouteTable, TableError};
use crate::protocol::ClusterKeys;
use crate::reason_code::ReasonCode;
use crate::transport::tasks::{PeerTasks, accept_all};
use crate::warnings::PeerWarnings;

const MAX_BODY_BYTES: usize = 16 << 10;
/// A request takes milliseconds. A new connection takes the place of the oldest, of its address or
/// of all.
const MAX_CONNECTIONS: usize = 1024;
const CONNECTIONS_PER_SOURCE: usize = 256;
/// For the request head, and again for the body.
const READ_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs until `stop` or drop.
pub struct BootstrapServer {
    addr: SocketAddr,
    state: Arc<State>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl BootstrapServer {
    /// Bind (`port` 0 = any free one) and serve on a thread of its own.
    pub fn start(host: &str, port: u16, cluster_keys: Option<ClusterKeys>) -> io::Result<Self> {
        let listener = TcpListener::bind((host, port))?;
        listener.set_nonblocking(true)?;
        let addr = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (stop, stopped) = oneshot::channel();
        let state = Arc::new(State {
            table: Mutex::default(),
            seen: Mutex::default(),
            cluster_keys,
            started: Instant::now(),
            refused: AtomicU64::default(),
            unsigned: AtomicU64::default(),
            unsigned_warnings: Mutex::default(),
        });
        let server_state = state.clone();
        let thread = std::thread::Builder::new().name("kv-bootstrap".into()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    err = serve_requests(listener, server_state) => tracing::error!(%err, "the bootstrap server stopped"),
                    _ = stopped => {}
                }
            });
        })?;
        Ok(Self {
            addr,
            state,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    /// Refused requests about routes (unauthenticated, malformed, or in conflict with the
    /// registered ranks), and connections closed to make space for others.
    pub fn refused_total(&self) -> u64 {
        self.state.refused.load(Ordering::Relaxed)
    }

    /// Those of the refused requests that were not signed with the cluster's key.
    pub fn refused_unsigned(&self) -> u64 {
        self.state.unsigned.load(Ordering::Relaxed)
    }

    /// True while its thread serves; part of the node's health.
    pub fn is_serving(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    pub fn stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(()); // the thread may have ended by itself
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the bootstrap server's thread had panicked");
        }
    }
}

impl Drop for BootstrapServer {
    fn drop(&mut self) {
        self.stop();
    }
}

struct State {
    table: Mutex<RouteTable>,
    seen: Mutex<SeenSignatures>,
    cluster_keys: Option<ClusterKeys>,
    started: Instant,
    refused: AtomicU64,
    unsigned: AtomicU64,
    /// By the address that they came from.
    unsigned_warnings: Mutex<PeerWarnings<Option<IpAddr>>>,
}

async fn serve_requests(listener: TcpListener, state: Arc<State>) -> io::Error {
    let by_source = PeerTasks::new(CONNECTIONS_PER_SOURCE, MAX_CONNECTIONS);
    let evicted = || {
        state.refused.fetch_add(1, Ordering::Relaxed);
    };
    accept_all(
        listener,
        by_source,
        |stream| serve_connection(stream, state.clone()),
        evicted,
    )
    .await
}

async fn serve_connection(stream: TcpStream, state: Arc<State>) {
    let from = stream.peer_addr().map(|addr| addr.ip().to_canonical()).ok();
    let service = service_fn(move |request| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(state.answer_request(request, from).await) }
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(READ_TIMEOUT);
    if let Err(err) = http.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!(%err, "a bootstrap connection ended badly");
    }
}

fn reply(status: StatusCode, body: &serde_json::Value) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
    *response.status_mut() = status;
    response.headers_mut().insert(
        http::header::CONTENT_TYPE,
        http::HeaderValue::from_static("application/json"),
    );
    response
}

fn refuse(status: StatusCode, message: impl Into<String>) -> Response<Full<Bytes>> {
    let kind = if status == StatusCode::UNAUTHORIZED {
        "authentication_error"
    } else {
        "invalid_request_error"
    };
    let code = match status {
        StatusCode::UNAUTHORIZED => "invalid_api_key",
        StatusCode::NOT_FOUND => "not_found",
        StatusCode::CONFLICT => "topology_conflict",
        StatusCode::METHOD_NOT_ALLOWED => "method_not_allowed",
        _ => "invalid_value",
    };
    reply(
        status,
        &json!({"error": {"message": message.into(), "type": kind, "param": null, "code": code}}),
    )
}

async fn sign_response(
    key: &str,
    request: &str,
    response: Response<Full<Bytes>>,
) -> Response<Full<Bytes>> {
    let (mut head, body) = response.into_parts();
    let body = body.collect().await.unwrap_or_default().to_bytes();
    let proof = sign_answer(key, request, head.status.as_u16(), &body);
    if let Ok(proof) = proof.parse() {
        head.headers.insert(AUTH_HEADER, proof);
    }
    Response::from_parts(head, Full::new(body))
}

impl State {
    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    async fn answer_request(
        &self,
        request: Request<Incoming>,
        from: Option<IpAddr>,
    ) -> Response<Full<Bytes>> {
        let signature = request.headers().get(AUTH_HEADER).cloned();
        let (key, response) = self.check_and_serve(request, from).await;
        if response.status().is_client_error() && response.status() != StatusCode::NOT_FOUND {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        let signature = signature.as_ref().and_then(|value| value.to_str().ok());
        match (key, signature) {
            (Some(key), Some(signature)) => sign_response(key, signature, response).await,
            _ => response,
        }
    }

    /// Response, and the key that signs it: the one of the request, or this server's own.
    async fn check_and_serve(
        &self,
        request: Request<Incoming>,
        from: Option<IpAddr>,
    ) -> (Option<&str>, Response<Full<Bytes>>) {
        let (head, body) = request.into_parts();
        let own = self.cluster_keys.as_ref().map(ClusterKeys::own_key);
        let path = head.uri.path();
        if path == "/health" {
            return (own, reply(StatusCode::OK, &json!({"status": "ok"})));
        }
        if path != "/route" {
            let reason = format!("no resource {path}; there are /route and /health");
            return (own, refuse(StatusCode::NOT_FOUND, reason));
        }
        let body =
            match tokio::time::timeout(READ_TIMEOUT, Limited::new(body, MAX_BODY_BYTES).collect())
                .await
            {
                Ok(Ok(body)) => body.to_bytes(),
                _ => {
                    let reason = format!(
                        "the body must arrive within {READ_TIMEOUT:?} and have at most \
                     {MAX_BODY_BYTES} bytes"
                    );
                    return (own, refuse(StatusCode::BAD_REQUEST, reason));
                }
            };
        match self.authenticate(&head, &body) {
            Ok(key) => (key, self.dispatch_request(&head, &body)),
            Err(reason) => {
                self.on_unsigned(from, &reason);
                (own, refuse(StatusCode::UNAUTHORIZED, reason))
            }
        }
    }

    fn on_unsigned(&self, from: Option<IpAddr>, reason: &str) {
        self.unsigned.fetch_add(1, Ordering::Relaxed);
        let due = self.unsigned_warnings.lock().record(from, self.now_ms());
        if let Some(times) = due {
            let code = ReasonCode::Auth.as_str();
            tracing::warn!(
                from = from.map(tracing::field::display),
                code,
                why = reason,
                times,
                "a request to the bootstrap server was refused"
            );
        }
    }

    /// Returns the accepted key that signed the request, none without cluster keys. `Err`: why it
    /// is refused.
    fn authenticate(&self, head: &Parts, body: &[u8]) -> Result<Option<&str>, String> {
        let Some(keys) = &self.cluster_keys else {
            return Ok(None);
        };
        let path = head.uri.path_and_query().map_or("", |p| p.as_str());
        let header = head.headers.get(AUTH_HEADER);
        let header = header.and_then(|value| value.to_str().ok());
        let now = unix_ms();
        let check = |key| verify_signature(key, head.method.as_str(), path, now, body, header);
        let (key, signed_at_ms) = match check(keys.own_key()) {
            Ok(signed_at_ms) => (keys.own_key(), signed_at_ms),
            Err(reason) => {
                let mut others = keys.accepted_keys().skip(1);
                let accepted_key = others.find_map(|key| Some((key, check(key).ok()?)));
                accepted_key.ok_or(reason)?
            }
        };
        if let Some(header) = header.filter(|_| head.method != Method::GET) {
            self.seen
                .lock()
                .accept_signature(signed_at_ms, header, now)?;
        }
        Ok(Some(key))
    }

    fn dispatch_request(&self, head: &Parts, body: &[u8]) -> Response<Full<Bytes>> {
        match head.method {
            Method::GET => return self.get_topology(head.uri.query().unwrap_or_default()),
            Method::PUT | Method::DELETE => {}
            _ => {
                let reason = "/route takes GET, PUT and DELETE";
                return refuse(StatusCode::METHOD_NOT_ALLOWED, reason);
            }
        }
        match serde_json::from_slice(body) {
            Ok(registration) if head.method == Method::PUT => self.put_registration(registration),
            Ok(registration) => self.delete_registration(&registration),
            Err(err) => refuse(
                StatusCode::BAD_REQUEST,
                format!("not a registration: {err}"),
            ),
        }
    }

    fn put_registration(&self, registration: RankRegistration) -> Response<Full<Bytes>> {
        let Err(err) = self.table.lock().put(registration, self.now_ms()) else {
            return reply(StatusCode::OK, &json!({"status": "ok"}));
        };
        let status = match err {
            TableError::Conflict { .. } => StatusCode::CONFLICT,
            TableError::Full => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::BAD_REQUEST,
        };
        refuse(status, err.to_string())
    }

    fn get_topology(&self, query: &str) -> Response<Full<Bytes>> {
        let param = |name: &str| {
            let value = query
                .split('&')
                .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
            value
                .and_then(|value| value.parse::<i64>().ok())
                .ok_or(format!("the query needs an integer {name}"))
        };
        let (tp, dp_group, pp) = match (
            param("engine_rank"),
            param("target_dp_group"),
            param("target_pp_rank"),
        ) {
            (Ok(tp), Ok(dp), Ok(pp)) => (tp, dp, pp),
            (Err(reason), ..) | (_, Err(reason), _) | (.., Err(reason)) => {
                return refuse(StatusCode::BAD_REQUEST, reason);
            }
        };
        let mut table = self.table.lock();
        table.drop_expired(self.now_ms());
        if (tp, dp_group, pp) == (-1, -1, -1) {
            return match table.topology() {
                Some(topology) => {
                    let mut body = json!(topology);
                    body["epoch"] = table.epoch.into();
                    reply(StatusCode::OK, &body)
                }
                None => refuse(StatusCode::NOT_FOUND, "no prefill rank has registered yet"),
            };
        }
        let rank = |value: i64| u32::try_from(value).unwrap_or(u32::MAX);
        match table.get(RankPosition {
            dp_group: rank(dp_group),
            tp: rank(tp),
            pp: rank(pp),
        }) {
            Some(registration) => reply(
                StatusCode::OK,
                &json!({"rank_ip": registration.rank_ip, "rank_port": registration.rank_port, "instance_id": registration.instance_id, "proto_ver": registration.proto_ver,
                        "transports": registration.transports, "layout_hash": registration.layout_hash, "pool_pages": registration.pool_pages, "epoch": table.epoch}),
            ),
            None => refuse(
                StatusCode::NOT_FOUND,
                format!("no prefill rank tp {tp}, dp group {dp_group}, pp {pp} is registered"),
            ),
        }
    }

    fn delete_registration(&self, registration: &RankRegistration) -> Response<Full<Bytes>> {
        if self.table.lock().remove(registration) {
            return reply(StatusCode::OK, &json!({"status": "ok"}));
        }
        let reason =
            "this incarnation of the rank is not registered, or not by the owner of this request";
        refuse(StatusCode::NOT_FOUND, reason)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
