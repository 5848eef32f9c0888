//! HTTP/1.1 connections to one worker: connect, send, reuse, and close at once when the answer is
//! no longer wanted.
//!
//! The life of a connection:
//!
//! 1. `ConnectionPool::send` takes an idle connection, or connects (TCP_NODELAY; TLS for https://)
//!    and spawns the task that drives it;
//! 2. the request goes out; the connection belongs to the answer ([`ResponseBody`]);
//! 3. read to its end, the answer puts the connection back; dropped before, it aborts the task,
//!    which closes the socket.
//!
//! Invariants: a connection carries one request at a time; an idle one older than `IDLE` is not
//! used (it is below the engines' keep-alive, 5 s for uvicorn); a request is resent, once and on a
//! new connection, only when a *reused* connection broke before any byte of the answer: the worker
//! had closed it while it was idle.

use std::io::ErrorKind;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, Uri, header};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout};

use crate::config::WorkerUrl;
use crate::transport::descriptors::is_exhausted;
use crate::transport::request_body::BodySegments;
use crate::transport::socket::tune_upstream;
use crate::transport::tls_reload::WorkerTls;

/// How long a connection may lie idle and still be used; the field's value (smg:
/// upstream-pool-idle-timeout-secs).
const IDLE: Duration = Duration::from_secs(3);
/// Idle connections kept per worker; more are closed.
const MAX_IDLE: usize = 512;
/// How long a connection may take to become ready for the next request.
const SETTLE: Duration = Duration::from_millis(5);
/// How long the rest of a complete answer is waited for, so that its connection can be kept.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// A machine of the same network that does not accept for this long is down.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Most headers of an answer: hyper would read 100, as many as a client may send.
const MAX_ANSWER_HEADERS: usize = 1_000;

/// Why there is no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Nothing listens there: the worker is dead, for certain.
    #[error("cannot connect: {0}")]
    Refused(String),
    /// Nothing reached the worker.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// This process has no descriptor or port left: it says nothing about the worker.
    #[error("cannot connect: {0}")]
    Exhausted(String),
    /// The connection broke before the head of the answer was complete.
    #[error("connection broke before the answer: {0}")]
    Broken(String),
}

/// Head of a request, without the body. Cheap to clone.
#[derive(Debug, Clone)]
pub struct RequestHead {
    pub method: Method,
    /// Path and query.
    pub uri: Uri,
    headers: Arc<HeaderMap>,
    /// Headers of this attempt alone.
    pub more: HeaderMap,
}

impl RequestHead {
    pub fn new(method: Method, uri: Uri, headers: HeaderMap) -> Self {
        Self {
            method,
            uri,
            headers: Arc::new(headers),
            more: HeaderMap::new(),
        }
    }

    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub fn headers_mut(&mut self) -> &mut HeaderMap {
        Arc::make_mut(&mut self.headers)
    }
}

/// See the module. One per worker.
pub struct ConnectionPool {
    url: WorkerUrl,
    host: HeaderValue,
    /// Given for https:// only.
    tls: Option<WorkerTls>,
    /// Those used last are at the end.
    idle: Mutex<Vec<Connection>>,
    /// Heads and pieces of answers received.
    heard: AtomicU64,
    /// Turns true when all connections are to be cut (the end of the shutdown grace).
    cut: watch::Receiver<bool>,
}

/// Dropping it closes the socket.
struct Connection {
    sender: SendRequest<BodySegments>,
    task: AbortHandle,
    /// When it was opened, or its last answer was read.
    used_at: Instant,
    /// True if it may be used again after its answer.
    is_kept: bool,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ConnectionPool {
    /// An https:// worker needs `tls`.
    pub fn new(url: WorkerUrl, tls: Option<WorkerTls>, cut: watch::Receiver<bool>) -> Arc<Self> {
        let tls = tls.filter(|_| url.is_tls);
        let host =
            HeaderValue::try_from(url.authority()).unwrap_or(HeaderValue::from_static("worker"));
        Arc::new(Self {
            url,
            host,
            tls,
            idle: Mutex::default(),
            heard: AtomicU64::new(0),
            cut,
        })
    }

    /// Heads and pieces of answers received so far: while it grows, the worker lives.
    pub fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// Send one request and wait for the head of the answer. No timeout: the caller bounds it and
    /// may drop the future. `on_sent` is called when a connection is there, and again if the
    /// request is sent once more on another.
    pub async fn send(
        self: &Arc<Self>,
        head: &RequestHead,
        body: BodySegments,
        on_sent: &(dyn Fn() + Sync),
    ) -> Result<Response<ResponseBody>, SendError> {
        if let Some(connection) = self.take_idle().await {
            on_sent();
            match self.exchange(connection, head, body.clone()).await {
                Ok(answer) => return Ok(answer),
                Err(err) => {
                    tracing::debug!(worker = %self.url, %err, "reused connection broke, sending again");
                }
            }
        }
        // Boxed: with TLS it takes 5 KB, which every future around it would hold and copy.
        let connection = Box::pin(self.connect()).await?;
        on_sent();
        self.exchange(connection, head, body).await
    }

    /// Like `send`, on a new connection that is not kept: a health probe must see whether the
    /// worker still accepts.
    pub async fn send_alone(
        self: &Arc<Self>,
        head: &RequestHead,
    ) -> Result<Response<ResponseBody>, SendError> {
        let mut connection = self.connect().await?;
        connection.is_kept = false;
        self.exchange(connection, head, BodySegments::default())
            .await
    }

    async fn connect(&self) -> Result<Connection, SendError> {
        let connecting = TcpStream::connect((self.url.host.as_str(), self.url.port));
        let connected = timeout(CONNECT_TIMEOUT, connecting).await.map_err(|_| {
            SendError::Connect(format!("no reply for {} ms", CONNECT_TIMEOUT.as_millis()))
        })?;
        let stream = connected.map_err(|err| match err.kind() {
            ErrorKind::ConnectionRefused => SendError::Refused(err.to_string()),
            _ if is_exhausted(&err) => SendError::Exhausted(err.to_string()),
            _ => SendError::Connect(err.to_string()),
        })?;
        tune_upstream(&stream).map_err(|err| SendError::Connect(err.to_string()))?;
        let Some(tls) = &self.tls else {
            return self.drive(stream).await;
        };
        let failed = |why: String| SendError::Connect(format!("TLS: {why}"));
        let shaken = timeout(CONNECT_TIMEOUT, tls.handshake(&self.url.host, stream)).await;
        let shaken = shaken.map_err(|_| failed(format!("no handshake for {CONNECT_TIMEOUT:?}")))?;
        self.drive(shaken.map_err(|err| failed(err.to_string()))?)
            .await
    }

    async fn drive<S>(&self, stream: S) -> Result<Connection, SendError>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let mut client = http1::Builder::new();
        client.max_headers(MAX_ANSWER_HEADERS);
        let shaken = client.handshake(TokioIo::new(stream)).await;
        let (sender, driver) = shaken.map_err(|err| SendError::Connect(err.to_string()))?;
        let mut cut = self.cut.clone();
        let task = tokio::spawn(async move {
            // An error of the driver also reaches the request that is on the connection, which
            // reports it.
            tokio::select! {
                _ = driver => {}
                _ = cut.wait_for(|is_cut| *is_cut) => {}
            }
        });
        let task = task.abort_handle();
        let used_at = Instant::now();
        Ok(Connection {
            sender,
            task,
            used_at,
            is_kept: true,
        })
    }

    async fn exchange(
        self: &Arc<Self>,
        mut connection: Connection,
        head: &RequestHead,
        body: BodySegments,
    ) -> Result<Response<ResponseBody>, SendError> {
        let mut request = Request::new(body);
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = head.uri.clone();
        let headers = request.headers_mut();
        *headers = (*head.headers).clone();
        headers.extend(head.more.clone());
        headers.insert(header::HOST, self.host.clone());
        let response = connection.sender.send_request(request).await;
        let response = response.map_err(|err| SendError::Broken(with_source(&err)))?;
        self.heard.fetch_add(1, Ordering::Relaxed);
        Ok(response.map(|incoming| {
            let connection = Some(connection);
            let mut answer = ResponseBody {
                incoming,
                connection,
                pool: self.clone(),
            };
            if answer.incoming.is_end_stream() {
                answer.release();
            }
            answer
        }))
    }

    async fn take_idle(&self) -> Option<Connection> {
        loop {
            let mut connection = self.idle.lock().pop()?;
            // Last in, first out: the others are older still.
            if connection.used_at.elapsed() >= IDLE {
                self.idle.lock().clear();
                return None;
            }
            if connection.sender.is_ready() {
                return Some(connection);
            }
            // Its answer was just read and its task has not taken note yet, or the worker is still
            // reading a request it answered early. Only the first is worth the wait.
            if let Ok(Ok(())) = timeout(SETTLE, connection.sender.ready()).await {
                return Some(connection);
            }
        }
    }

    fn put_idle(&self, mut connection: Connection) {
        if connection.sender.is_closed() {
            return;
        }
        let mut idle = self.idle.lock();
        let fresh_from = idle.partition_point(|kept| kept.used_at.elapsed() >= IDLE);
        idle.drain(..fresh_from);
        if idle.len() < MAX_IDLE {
            connection.used_at = Instant::now();
            idle.push(connection);
        }
    }
}

/// hyper's message alone ("connection error") says little; the cause says "reset by peer".
pub fn with_source(err: &dyn std::error::Error) -> String {
    match err.source() {
        Some(source) => format!("{err}: {source}"),
        None => err.to_string(),
    }
}

/// Body of a worker's answer. Dropping it before its end closes the connection.
pub struct ResponseBody {
    incoming: Incoming,
    /// Held while the answer is read.
    connection: Option<Connection>,
    pool: Arc<ConnectionPool>,
}

impl ResponseBody {
    /// Put the connection back, if it is to be kept.
    fn release(&mut self) {
        if let Some(connection) = self
            .connection
            .take()
            .filter(|connection| connection.is_kept)
        {
            self.pool.put_idle(connection);
        }
    }

    pub fn is_end(&self) -> bool {
        self.connection.is_none()
    }

    /// The next piece; `None` at the end. Trailers are dropped.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<hyper::Result<Bytes>>> {
        loop {
            match std::task::ready!(Pin::new(&mut self.incoming).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    self.pool.heard.fetch_add(1, Ordering::Relaxed);
                    if self.incoming.is_end_stream() {
                        self.release();
                    }
                    if let Ok(data) = frame.into_data() {
                        return Poll::Ready(Some(Ok(data)));
                    }
                }
                Some(Err(err)) => {
                    self.connection = None;
                    return Poll::Ready(Some(Err(err)));
                }
                None => {
                    self.release();
                    return Poll::Ready(None);
                }
            }
        }
    }

    pub async fn piece(&mut self) -> Option<hyper::Result<Bytes>> {
        std::future::poll_fn(|cx| self.poll_piece(cx)).await
    }

    /// The whole rest of the answer; `None` if it is longer than `limit_bytes`.
    pub async fn read_at_most(mut self, limit_bytes: usize) -> hyper::Result<Option<Vec<u8>>> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece().await {
            body.extend_from_slice(&piece?);
            if body.len() > limit_bytes {
                return Ok(None);
            }
        }
        Ok(Some(body))
    }

    /// Read the rest of a complete answer, so that the connection can be used again, but not for
    /// long.
    pub fn drain_in_background(mut self) {
        tokio::spawn(async move {
            let reading = async { while let Some(Ok(_)) = self.piece().await {} };
            let _ = timeout(DRAIN_TIMEOUT, reading).await; // else the connection is closed
        });
    }
}
