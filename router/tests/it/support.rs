//! Mock workers, a router in this process, and a client: what every test here is made of.
//!
//! Waits are on conditions with a deadline (`eventually`); each test runs under `timed`.

mod client;
pub mod counting;
pub mod peers;

use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use baton_router::{RouterConfig, RunningServer};
use baton_text::dialect::Dialect;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::{JoinHandle, JoinSet};

pub use self::client::{Answering, Client, Reply};

/// Far above what any test needs: reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(60);

pub async fn timed<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, test)
        .await
        .expect("the test hangs")
}

/// Wait until `is_true`, asking every few milliseconds.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut is_true: impl FnMut() -> F) {
    let asking = async {
        while !is_true().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let in_time = tokio::time::timeout(Duration::from_secs(10), asking).await;
    assert!(in_time.is_ok(), "never came true: {what}");
}

// ---- mock worker ----

/// Answer of a mock to a generation request.
#[derive(Clone, Debug)]
pub enum Act {
    /// A whole answer: SSE when `stream` is true, else JSON.
    Answer,
    Json(Value),
    Status(u16, &'static str),
    /// 429 with `Retry-After` so many seconds.
    Busy(u64),
    /// The same after `Mock::release`.
    Gated(u16, &'static str),
    /// Close the connection without a word.
    Drop,
    /// Accept and stay silent.
    Hang,
    /// This text as SSE with a content-length, so that its end is known with the last byte.
    Whole(&'static str),
    /// These pieces as SSE, then …
    Stream(Vec<&'static str>, End),
    /// Count (support/counting.rs).
    Count,
    /// Count after `Mock::release`.
    GatedCount,
    /// Count for so many writes, then so many bytes of the next (less than all), then …
    CountTo(usize, usize, End),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum End {
    Clean,
    Break,
    Hang,
    /// Go on for ever, 64 KiB at a time.
    Flood,
    /// Wait for `Mock::release`, then end with finish_reason and [DONE].
    Gate,
}

pub const TOKEN: &str =
    "data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n";
pub const FINISH: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
pub const DONE: &str = "data: [DONE]\n\n";

pub struct Seen {
    pub path: String,
    pub headers: HeaderMap,
    pub raw: Bytes,
    pub body: Value,
}

#[derive(Default)]
struct Inner {
    /// Taken one by one; the last one stays.
    acts: Mutex<VecDeque<Act>>,
    seen: Mutex<Vec<Arc<Seen>>>,
    cancelled: AtomicUsize,
    info: Mutex<Value>,
    is_info_hidden: std::sync::atomic::AtomicBool,
    /// The header x-baton-load of all answers.
    load: Mutex<Option<String>>,
    /// The header x-baton-stages of generated answers.
    stages: Mutex<Option<&'static str>>,
    /// Answer of /v1/loads.
    loads: Mutex<Value>,
    /// Version that /version returns, as vLLM's does; then there is no server info.
    version: Mutex<Option<&'static str>>,
    polls: AtomicUsize,
    /// Answers of other paths: status and body.
    answers: Mutex<HashMap<&'static str, (u16, String)>>,
    unhealthy: std::sync::atomic::AtomicBool,
    /// True while it drains; `None`: it has no POST /drain.
    drains: Mutex<Option<bool>>,
    /// Keys of POST /drain and POST /undrain.
    orders: Mutex<Vec<String>>,
    /// Header x-baton-ready-peers of the last probe.
    ready_peers: Mutex<Option<String>>,
    frozen: std::sync::atomic::AtomicBool,
    gate: tokio::sync::Notify,
    /// Bodies of the release requests it got.
    released: Mutex<Vec<Value>>,
    flooded: AtomicUsize,
}

impl Inner {
    /// Incarnation that its answers state.
    fn incarnation(&self) -> Option<String> {
        let info = self.info.lock();
        info["incarnation"].as_str().map(str::to_owned)
    }
}

pub struct Mock {
    pub addr: SocketAddr,
    inner: Arc<Inner>,
    task: Option<JoinHandle<()>>,
}

impl Mock {
    pub async fn start(acts: &[Act]) -> Mock {
        Mock::at("127.0.0.1:0".parse().expect("an address"), acts).await
    }

    pub async fn at(addr: SocketAddr, acts: &[Act]) -> Mock {
        let listener = TcpListener::bind(addr).await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let inner = Arc::new(Inner::default());
        *inner.info.lock() = json!({});
        let mut mock = Mock {
            addr,
            inner: inner.clone(),
            task: None,
        };
        mock.acts(acts);
        mock.task = Some(tokio::spawn(accept(listener, inner)));
        mock
    }

    pub fn with_info(self, info: Value) -> Mock {
        *self.inner.info.lock() = info;
        self
    }

    /// Another process takes its place at the address: from now on it describes itself so. Its
    /// answers state the `incarnation` of the description, if there is one.
    pub fn replace(&self, info: Value) {
        *self.inner.info.lock() = info;
    }

    /// While set, its description cannot be read.
    pub fn hide_info(&self, is: bool) {
        self.inner.is_info_hidden.store(is, Ordering::SeqCst);
    }

    pub fn with_load(self, header: &'static str) -> Mock {
        self.set_load(header);
        self
    }

    pub fn set_load(&self, header: &str) {
        *self.inner.load.lock() = Some(header.to_owned());
    }

    /// Sets the stages header of its answers: times up to the first token.
    pub fn stages(&self, header: &'static str) {
        *self.inner.stages.lock() = Some(header);
    }

    /// A worker that looks like vLLM.
    pub fn with_version(self, version: &'static str) -> Mock {
        *self.inner.version.lock() = Some(version);
        self
    }

    /// A worker with POST /drain and POST /undrain, as an engine of Baton.
    pub fn with_drain(self) -> Mock {
        self.set_draining(false);
        self
    }

    /// Begin or end a drain, as another router or an operator would.
    pub fn set_draining(&self, is: bool) {
        *self.inner.drains.lock() = Some(is);
    }

    pub fn is_draining(&self) -> bool {
        *self.inner.drains.lock() == Some(true)
    }

    /// The key with which each order to drain or undrain came; empty without one.
    pub fn orders(&self) -> Vec<String> {
        self.inner.orders.lock().clone()
    }

    /// Number of ready peers that the last probe carried.
    pub fn ready_peers(&self) -> Option<String> {
        self.inner.ready_peers.lock().clone()
    }

    pub fn set_loads(&self, loads: Value) {
        *self.inner.loads.lock() = loads;
    }

    pub fn with_loads(self, loads: Value) -> Mock {
        self.set_loads(loads);
        self
    }

    /// Sets its answer on a path that generates nothing.
    pub fn answers(&self, path: &'static str, status: u16, body: Value) {
        self.inner
            .answers
            .lock()
            .insert(path, (status, body.to_string()));
    }

    /// Answer the paths of these APIs with 404.
    pub fn lacks(self, apis: &[Dialect]) -> Mock {
        for api in apis {
            self.answers(api.path(), 404, json!({"detail": "Not Found"}));
        }
        self
    }

    pub fn answers_text(&self, path: &'static str, text: String) {
        self.inner.answers.lock().insert(path, (200, text));
    }

    /// How often /v1/loads was asked for.
    pub fn polls(&self) -> usize {
        self.inner.polls.load(Ordering::SeqCst)
    }

    pub fn acts(&mut self, acts: &[Act]) {
        *self.inner.acts.lock() = acts.iter().cloned().collect();
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Generation requests so far.
    pub fn seen(&self) -> Vec<Arc<Seen>> {
        self.inner.seen.lock().clone()
    }

    pub fn count(&self) -> usize {
        self.inner.seen.lock().len()
    }

    /// Requests whose connection was closed before the answer was complete.
    pub fn cancelled(&self) -> usize {
        self.inner.cancelled.load(Ordering::SeqCst)
    }

    /// Bytes handed out by `End::Flood`.
    pub fn flooded(&self) -> usize {
        self.inner.flooded.load(Ordering::SeqCst)
    }

    /// Bodies of the requests to release rooms that will not be fetched.
    pub fn released(&self) -> Vec<Value> {
        self.inner.released.lock().clone()
    }

    pub fn release(&self) {
        self.inner.gate.notify_one();
    }

    pub fn set_unhealthy(&self, is: bool) {
        self.inner.unhealthy.store(is, Ordering::SeqCst);
    }

    /// Accept connections and answer nothing, as a stopped process does.
    pub fn freeze(&self) {
        self.inner.frozen.store(true, Ordering::SeqCst);
    }

    /// Die: the listener and all connections are closed.
    pub async fn stop(mut self) -> SocketAddr {
        let task = self.task.take().expect("it runs");
        task.abort();
        let _ = task.await;
        self.addr
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

async fn accept(listener: TcpListener, inner: Arc<Inner>) {
    let mut connections = JoinSet::new(); // dropped with this task, and the connections with it
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, _) = accepted.expect("a connection");
                let inner = inner.clone();
                connections.spawn(async move {
                    let serve = service_fn(move |request| loaded(inner.clone(), request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), serve)
                        .await;
                });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Counts a request that ends before it was answered.
struct Unfinished {
    inner: Arc<Inner>,
    is_finished: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_finished {
            self.inner.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

type MockBody = http_body_util::combinators::BoxBody<Bytes, std::io::Error>;

fn full(text: impl Into<Bytes>) -> MockBody {
    Full::new(text.into())
        .map_err(|e: Infallible| match e {})
        .boxed()
}

fn reset() -> std::io::Error {
    std::io::Error::other("scripted break")
}

async fn loaded(
    inner: Arc<Inner>,
    request: Request<Incoming>,
) -> Result<Response<MockBody>, std::io::Error> {
    let load = inner.load.lock().clone();
    let stated = inner
        .incarnation()
        .map(|incarnation| format!("inc={incarnation}"));
    let parts: Vec<String> = stated.into_iter().chain(load).collect();
    let load = (!parts.is_empty()).then(|| parts.join(";"));
    let is_generation = request.uri().path() != "/health";
    let stages = inner.stages.lock().filter(|_| is_generation);
    let mut response = serve(inner, request).await?;
    if let Some(load) = load {
        let load = http::HeaderValue::try_from(load).map_err(|_| reset())?;
        response.headers_mut().insert("x-baton-load", load);
    }
    if let Some(stages) = stages {
        let stages = http::HeaderValue::from_static(stages);
        response.headers_mut().insert("x-baton-stages", stages);
    }
    Ok(response)
}

async fn serve(
    inner: Arc<Inner>,
    request: Request<Incoming>,
) -> Result<Response<MockBody>, std::io::Error> {
    if inner.frozen.load(Ordering::SeqCst) {
        return std::future::pending().await;
    }
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let raw = body.collect().await.map_err(|_| reset())?.to_bytes();
    let drains = *inner.drains.lock();
    if path == "/health" {
        let header = parts.headers.get("x-baton-ready-peers");
        let peers = header.map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        *inner.ready_peers.lock() = peers;
    }
    if path == "/health" && drains == Some(true) {
        return Ok(error_response(503, "draining"));
    }
    if path == "/health" {
        let mut response = match inner.incarnation() {
            Some(incarnation) => json_response(200, &json!({"incarnation": incarnation})),
            None => Response::new(full("ok")),
        };
        if inner.unhealthy.load(Ordering::SeqCst) {
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
        }
        return Ok(response);
    }
    if path.ends_with("server_info") && inner.version.lock().is_some() {
        return Ok(error_response(404, "not_found"));
    }
    if path.ends_with("server_info") && inner.is_info_hidden.load(Ordering::SeqCst) {
        return Ok(error_response(503, "not_ready"));
    }
    if path == "/get_server_info" {
        return Ok(Response::new(full(inner.info.lock().to_string())));
    }
    if path == "/version" {
        let version = *inner.version.lock();
        return Ok(match version {
            Some(version) => json_response(200, &json!({"version": version})),
            None => error_response(404, "not_found"),
        });
    }
    if path == "/v1/loads" {
        inner.polls.fetch_add(1, Ordering::SeqCst);
        let mut loads = inner.loads.lock().clone();
        if let (Some(incarnation), Value::Object(loads)) = (inner.incarnation(), &mut loads) {
            loads.insert("incarnation".to_owned(), incarnation.into());
        }
        return Ok(Response::new(full(loads.to_string())));
    }
    if let Some((status, text)) = inner.answers.lock().get(path.as_str()) {
        let mut response = Response::new(full(text.clone()));
        *response.status_mut() = StatusCode::from_u16(*status).map_err(|_| reset())?;
        return Ok(response);
    }
    // Generation paths take POST alone.
    if parts.method == Method::GET && Dialect::of_path(&path).is_some() {
        return Ok(error_response(405, "method_not_allowed"));
    }
    if matches!(path.as_str(), "/drain" | "/undrain") {
        let key = parts.headers.get(http::header::AUTHORIZATION);
        let key = key.map(|key| String::from_utf8_lossy(key.as_bytes()).into_owned());
        if parts.method == Method::POST {
            inner.orders.lock().push(key.unwrap_or_default());
        }
        let Some(drains) = &mut *inner.drains.lock() else {
            return Ok(error_response(404, "not_found"));
        };
        if parts.method == Method::POST {
            *drains = path == "/drain";
        }
        let state = if *drains { "draining" } else { "ready" };
        let left = json!({"requests": 1, "streams": 1, "leases": 0});
        let report = json!({"state": state, "is_drained": false, "left": left});
        return Ok(json_response(200, &report));
    }
    if path == "/v1/models" && inner.version.lock().is_some() {
        return Ok(error_response(404, "not_found"));
    }
    let value: Value = serde_json::from_slice(&raw).unwrap_or_default();
    if path == "/abort_request" && !value["bootstrap_room"].is_null() {
        inner.released.lock().push(value["bootstrap_room"].clone());
        return Ok(json_response(200, &json!({"success": true})));
    }
    let act = {
        let mut acts = inner.acts.lock();
        if acts.len() > 1 {
            acts.pop_front()
        } else {
            acts.front().cloned()
        }
    };
    let stream = value["stream"] == true;
    let counted = match &act {
        Some(Act::Count | Act::GatedCount | Act::CountTo(..)) => {
            let is_asked = parts.headers.contains_key("x-baton-emit-tokens");
            let api = Dialect::of_path(&path).expect("a generation path");
            counting::writes(api, &value, is_asked)
        }
        _ => Vec::new(),
    };
    if drains == Some(true) {
        return Ok(error_response(503, "draining"));
    }
    inner.seen.lock().push(Arc::new(Seen {
        path,
        headers: parts.headers,
        raw,
        body: value,
    }));
    let mut unfinished = Unfinished {
        inner: inner.clone(),
        is_finished: false,
    };
    let sse = |steps: Vec<Bytes>, end: End, unfinished: Unfinished| {
        let steps = steps.into();
        let script = Script {
            steps,
            end,
            unfinished,
            gate: None,
        };
        Response::builder()
            .header("content-type", "text/event-stream")
            .body(script.boxed())
            .map_err(|_| reset())
    };
    match act.unwrap_or(Act::Answer) {
        Act::Answer if stream => {
            let pieces = [TOKEN, TOKEN, FINISH, DONE].map(Bytes::from);
            sse(pieces.into(), End::Clean, unfinished)
        }
        Act::Answer => {
            unfinished.is_finished = true;
            Ok(json_response(200, &json!({"ok": true})))
        }
        Act::Json(value) => {
            unfinished.is_finished = true;
            Ok(json_response(200, &value))
        }
        Act::Status(status, code) => {
            unfinished.is_finished = true;
            Ok(error_response(status, code))
        }
        Act::Busy(secs) => {
            unfinished.is_finished = true;
            let mut response = error_response(429, "busy");
            let headers = response.headers_mut();
            headers.insert("retry-after", http::HeaderValue::from(secs));
            Ok(response)
        }
        Act::Gated(status, code) => {
            inner.gate.notified().await;
            unfinished.is_finished = true;
            // A success with an error inside would be a failure.
            if status == 200 {
                return Ok(json_response(200, &json!({"id": code})));
            }
            Ok(error_response(status, code))
        }
        Act::Drop => {
            unfinished.is_finished = true;
            Err(reset())
        }
        Act::Hang => std::future::pending().await,
        Act::Whole(text) => {
            unfinished.is_finished = true;
            Response::builder()
                .header("content-type", "text/event-stream")
                .body(full(text))
                .map_err(|_| reset())
        }
        Act::Stream(pieces, end) => {
            let pieces = pieces.into_iter().map(Bytes::from).collect();
            sse(pieces, end, unfinished)
        }
        act @ (Act::Count | Act::GatedCount) => {
            if matches!(act, Act::GatedCount) {
                inner.gate.notified().await;
            }
            let writes = counted.into_iter().map(Bytes::from).collect();
            sse(writes, End::Clean, unfinished)
        }
        Act::CountTo(writes, bytes, end) => {
            let part = counted
                .get(writes)
                .map(|write| &write[..bytes.min(write.len() - 1)]);
            let part = part.filter(|part| !part.is_empty()).map(str::to_owned);
            let steps = counted.iter().take(writes).cloned().chain(part);
            sse(steps.map(Bytes::from).collect(), end, unfinished)
        }
    }
}

fn error_response(status: u16, code: &str) -> Response<MockBody> {
    let error = json!({"message": "scripted", "type": "t", "param": null, "code": code});
    json_response(status, &json!({"error": error}))
}

fn json_response(status: u16, body: &Value) -> Response<MockBody> {
    Response::builder()
        .status(status)
        .header("content-type", "application/json")
        .header("x-mock", "yes")
        .body(full(body.to_string()))
        .expect("a response")
}

struct Script {
    steps: VecDeque<Bytes>,
    end: End,
    unfinished: Unfinished,
    gate: Option<Pin<Box<dyn Future<Output = ()> + Send + Sync>>>,
}

impl Body for Script {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        if let Some(piece) = self.steps.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        match self.end {
            End::Clean => {
                self.unfinished.is_finished = true;
                Poll::Ready(None)
            }
            End::Break => {
                // One turn for hyper to write out the pieces, which an error would throw away.
                if !std::mem::replace(&mut self.unfinished.is_finished, true) {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(Some(Err(reset())))
            }
            End::Hang => Poll::Pending,
            End::Flood => {
                let line = format!("data: {}\n\n", "x".repeat(64 << 10));
                let sent = &self.unfinished.inner.flooded;
                sent.fetch_add(line.len(), Ordering::SeqCst);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from(line)))))
            }
            End::Gate => {
                let inner = self.unfinished.inner.clone();
                let gate = self
                    .gate
                    .get_or_insert_with(|| Box::pin(async move { inner.gate.notified().await }));
                std::task::ready!(gate.as_mut().poll(cx));
                self.steps = [FINISH, DONE].map(Bytes::from).into();
                self.end = End::Clean;
                self.poll_frame(cx)
            }
        }
    }
}

// ---- router ----

pub struct Router {
    pub running: RunningServer,
}

/// Flags that make tests quick and quiet.
const BASE: &str = "baton-router --host 127.0.0.1 --port 0 --policy round_robin --retry-initial-backoff-ms 1 \
    --retry-max-backoff-ms 5 --shutdown-delay-ms 0";

impl Router {
    pub async fn start(flags: &[&str]) -> Router {
        // Most tests look at what follows when no worker comes.
        const WAIT: &str = "--worker-wait-timeout-secs";
        let no_wait: &[&str] = match flags.contains(&WAIT) {
            true => &[],
            false => &[WAIT, "0"],
        };
        let argv: Vec<String> = BASE
            .split_whitespace()
            .chain(flags.iter().chain(no_wait).copied())
            .map(str::to_owned)
            .collect();
        let config = RouterConfig::parse(&argv).expect("good flags");
        let running = RunningServer::start(config).await.expect("it starts");
        Router { running }
    }

    /// Regular workers, all ready.
    pub async fn regular(mocks: &[&Mock], flags: &[&str]) -> Router {
        let urls: Vec<String> = mocks.iter().map(|m| m.url()).collect();
        let mut all = vec!["--worker-urls"];
        all.extend(urls.iter().map(String::as_str));
        all.extend(flags);
        let router = Router::start(&all).await;
        router.all_ready(mocks.len()).await;
        router
    }

    /// Prefill and decode workers, all ready; bootstrap port 8998.
    pub async fn pd(prefill: &[&Mock], decode: &[&Mock], flags: &[&str]) -> Router {
        let (p, d): (Vec<_>, Vec<_>) = (
            prefill.iter().map(|m| m.url()).collect(),
            decode.iter().map(|m| m.url()).collect(),
        );
        let mut all = vec!["--pd-disaggregation"];
        for url in &p {
            all.extend(["--prefill", url.as_str(), "8998"]);
        }
        for url in &d {
            all.extend(["--decode", url.as_str()]);
        }
        all.extend(flags);
        let router = Router::start(&all).await;
        router.all_ready(p.len() + d.len()).await;
        router
    }

    pub async fn all_ready(&self, wanted: usize) {
        eventually("all workers are ready", || async {
            let list = self.get("/workers").await.json();
            let workers = list["workers"].as_array().cloned().unwrap_or_default();
            workers.iter().filter(|w| w["state"] == "ready").count() == wanted
        })
        .await;
    }

    pub async fn no_load(&self) {
        eventually("no load is left", || async {
            let loads = self.get("/get_loads").await.json();
            let loads = loads["workers"].as_array().cloned().unwrap_or_default();
            loads.iter().all(|w| w["load"] == 0)
        })
        .await;
    }

    pub async fn metric(&self, line_start: &str) -> f64 {
        let text = self.get("/metrics").await.text();
        let line = text.lines().find(|line| line.starts_with(line_start));
        let value = line.and_then(|line| line.rsplit(' ').next());
        value.and_then(|value| value.parse().ok()).unwrap_or(0.0)
    }

    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Reply {
        Client::connect(self.running.addr)
            .await
            .send(method, path, headers, body)
            .await
            .read()
            .await
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, &[], "").await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        let headers = [("content-type", "application/json")];
        self.send(Method::POST, path, &headers, &body.to_string())
            .await
    }

    pub async fn chat(&self) -> Reply {
        self.post("/v1/chat/completions", &chat(false)).await
    }

    pub async fn chat_stream(&self) -> Reply {
        self.post("/v1/chat/completions", &chat(true)).await
    }
}

pub fn chat(stream: bool) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream})
}

/// A file of its own, removed at the end.
pub struct TempFile(std::path::PathBuf);

impl TempFile {
    pub fn new(text: &str) -> TempFile {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("baton-router-{}-{number}", std::process::id());
        let file = TempFile(std::env::temp_dir().join(name));
        file.write(text);
        file
    }

    pub fn write(&self, text: &str) {
        std::fs::write(&self.0, text).expect("a file");
    }

    pub fn path(&self) -> &str {
        self.0.to_str().expect("a file")
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // a test may have removed it
    }
}

/// The text with which these flags end the start.
pub async fn refused_start(flags: &[&str]) -> String {
    let argv = ["baton-router", "--host", "127.0.0.1", "--port", "0"];
    let argv: Vec<String> = argv.iter().chain(flags).map(|f| (*f).to_owned()).collect();
    let config = RouterConfig::parse(&argv).expect("good flags");
    match RunningServer::start(config).await {
        Ok(_) => panic!("{flags:?} should be refused"),
        Err(text) => text,
    }
}
