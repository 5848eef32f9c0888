//! Connections from clients: their number, their version of HTTP, and the time limit of each phase.
//!
//! The life of a connection:
//!
//! 1. accepted, and given a place (connections.rs): a full listener closes a connection without a
//!    request for it, or lets it wait while all have requests;
//! 2. TLS, if the router speaks it. TLS agrees on HTTP/2, or the first bytes state it (prior
//!    knowledge);
//! 3. HTTP/1: `HeaderReadTimeout` bounds idleness and heads, the kernel cuts a client that takes
//!    nothing of its answer;
//! 4. HTTP/2: one task looks after its streams, since a client may stop taking one of them while
//!    the connection is well;
//! 5. the router stops: idle connections close, others after their requests.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::Request;
use http_body::{Body as _, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::clock::now_ms;
use crate::config::LimitFlags;
use crate::observability::access_log::ClientAddress;
use crate::observability::metrics::RouterMetrics;
use crate::request::admission::GaugeGuard;
use crate::server::connections::{Place, PlaceLimits, PlaceTable};
use crate::server::head_errors::{HeadErrors, MAX_HEADERS};
use crate::server::header_timeout::HeaderReadTimeout;
use crate::server::http_util::trim_trailing_slash;
use crate::transport::socket::tune_client;
use crate::transport::tls::HTTP_2;
use crate::transport::tls_reload::ClientTls;

/// Read beyond --max-header-bytes: closing with bytes unread would reset the connection under its
/// 431 [bytes].
const HEAD_SLACK: usize = 8 << 10;
/// How long a client may take over its TLS handshake (nginx: 60 s, which no client needs).
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Out of file descriptors: wait for some to be closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Pause between two warnings that connections cannot be accepted, which is tried 20 times a
/// second.
const ACCEPT_WARNING_PAUSE: Duration = Duration::from_secs(1);
/// Pause between two warnings that all places, or those of an address, are taken: a full router
/// takes a new client whenever one leaves.
const FULL_WARNING_PAUSE: Duration = Duration::from_secs(60);
/// HTTP/2 by prior knowledge begins with these bytes; no HTTP/1 method does.
const PREFACE: &[u8] = b"PRI ";
/// Pauses between two looks at first bytes that came one by one.
const PEEK_BACKOFF_MIN: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);
/// An HTTP/2 client that does not answer a ping for this long is gone.
const PING: Duration = Duration::from_secs(20);
/// Most of one HTTP/2 stream's answer that waits here for its client [bytes].
const SEND_BUFFER: usize = 64 << 10;
/// How often an HTTP/2 connection's streams are looked after.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Configuration of every connection of a listener.
#[derive(Clone)]
pub struct ConnectionConfig {
    pub routes: Router,
    pub tls: Option<ClientTls>,
    pub limits: LimitFlags,
    pub places: PlaceLimits,
    pub metrics: Arc<RouterMetrics>,
}

impl ConnectionConfig {
    fn cut(&self, reason: &str) {
        tracing::debug!(reason, "a client's connection was cut");
        self.metrics.client_cuts.with_label_values(&[reason]).inc();
    }
}

/// Accept until the shutdown signal; returns the connections that are still open.
pub async fn accept(
    listener: TcpListener,
    terms: ConnectionConfig,
    mut closed: oneshot::Receiver<()>,
) -> GracefulShutdown {
    let connections = GracefulShutdown::new();
    let mut acceptor = Acceptor {
        places: PlaceTable::new(terms.places.clone()),
        listener,
        full: ThrottledWarning::new(FULL_WARNING_PAUSE),
        share: ThrottledWarning::new(FULL_WARNING_PAUSE),
    };
    let mut failures = ThrottledWarning::new(ACCEPT_WARNING_PAUSE);
    // Dropped when accepting ends: idle connections close.
    let (_closing, closing) = watch::channel(());
    loop {
        let accepted = tokio::select! {
            _ = &mut closed => return connections,
            accepted = acceptor.accept_one(&terms) => accepted,
        };
        let (stream, client, place) = match accepted {
            Ok(Some(accepted)) => accepted,
            Ok(None) => continue,
            Err(err) => {
                if let Some(failures) = failures.count(Instant::now()) {
                    tracing::warn!(%err, failures, "cannot accept a connection");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Err(err) = tune_client(&stream, terms.limits.stall_timeout()) {
            tracing::debug!(%err, "client left at once");
            continue;
        }
        let terms = terms.clone();
        let closing = closing.clone();
        let watcher = connections.watcher();
        let gauge = GaugeGuard::new(&terms.metrics.connections);
        tokio::spawn(async move {
            let _gauge = gauge;
            // Dropped after the stream: until then the place is in use.
            let place = Arc::new(place);
            run(stream, client, terms, closing, watcher, &place).await;
        });
    }
}

/// A listener with the places of its connections.
struct Acceptor {
    listener: TcpListener,
    places: Arc<PlaceTable>,
    full: ThrottledWarning,
    share: ThrottledWarning,
}

impl Acceptor {
    /// `None`: the client's address has its share.
    async fn accept_one(
        &mut self,
        terms: &ConnectionConfig,
    ) -> std::io::Result<Option<(TcpStream, ClientAddress, Place)>> {
        let (stream, address) = self.listener.accept().await?;
        let client = address.ip().to_canonical();
        let limit = terms.places.all;
        let on_full = || {
            if self.full.count(Instant::now()).is_some() {
                tracing::warn!(
                    limit,
                    "all --max-connections are in use; new clients take the places of connections \
                     without a request, or wait until one ends"
                );
            }
        };
        let Some(place) = self.places.take(client, on_full).await else {
            terms.cut("share");
            if self.share.count(Instant::now()).is_some() {
                let limit = terms.places.per_address;
                tracing::warn!(
                    %client,
                    limit,
                    "a client has as many connections with requests as one address may have; \
                     raise --max-connections-per-address, or name a load balancer in --trusted-proxies"
                );
            }
            return Ok(None);
        };
        Ok(Some((stream, ClientAddress(client), place)))
    }
}

/// A warning given at most once in `pause`.
struct ThrottledWarning {
    pause: Duration,
    warned: Option<Instant>,
    /// Occasions since the last warning.
    count: u64,
}

impl ThrottledWarning {
    fn new(pause: Duration) -> Self {
        Self {
            pause,
            warned: None,
            count: 0,
        }
    }

    /// Adds an occasion; returns how many a warning that is due now is about.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.count += 1;
        if self.warned.is_some_and(|last| now - last < self.pause) {
            return None;
        }
        self.warned = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}

/// `closing` fails when the router stops.
async fn run(
    stream: TcpStream,
    client: ClientAddress,
    mut terms: ConnectionConfig,
    mut closing: watch::Receiver<()>,
    watcher: Watcher,
    place: &Arc<Place>,
) {
    if let Some(tls) = terms.tls.take() {
        let tls = tls.borrow().clone();
        let handshake = tokio::select! {
            biased;
            handshake = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)) => handshake,
            () = place.until_claimed() => return terms.cut("displaced"),
            _ = closing.changed() => return,
        };
        match handshake {
            Ok(Ok(stream)) if stream.get_ref().1.alpn_protocol() == Some(HTTP_2) => {
                serve_h2(stream, client, terms, closing, watcher, place).await;
            }
            Ok(Ok(stream)) => serve_h1(stream, client, terms, watcher, place).await,
            Ok(Err(err)) => tracing::debug!(%err, "no TLS with a client"),
            Err(_) => terms.cut("handshake"),
        }
        return;
    }
    // HTTP/2 is off: peeking would only delay the first request.
    if terms.limits.http2_max_streams == 0 {
        return serve_h1(stream, client, terms, watcher, place).await;
    }
    let is_h2 = tokio::select! {
        biased;
        is_h2 = speaks_h2(&stream, &terms) => is_h2,
        () = place.until_claimed() => return terms.cut("displaced"),
        _ = closing.changed() => return,
    };
    match is_h2 {
        Some(true) => serve_h2(stream, client, terms, closing, watcher, place).await,
        Some(false) => serve_h1(stream, client, terms, watcher, place).await,
        None => {}
    }
}

/// Peek at the first bytes; they stay in the socket. `None`: the client left, or is cut for its
/// silence.
async fn speaks_h2(stream: &TcpStream, terms: &ConnectionConfig) -> Option<bool> {
    let mut first = [0; PREFACE.len()];
    let mut len = timeout(terms.limits.idle_timeout(), stream.peek(&mut first))
        .await
        .ok()?
        .ok()?;
    let until = Instant::now() + terms.limits.header_read_timeout();
    let mut pause = PEEK_BACKOFF_MIN;
    // A peek with some bytes there returns at once, so it cannot wait for more of them.
    while len < PREFACE.len() && PREFACE.starts_with(&first[..len]) {
        // The client closed its side behind the first bytes.
        if len == 0 {
            return None;
        }
        // A client could hold its place with one byte of the preface.
        if Instant::now() >= until {
            terms.cut("head");
            return None;
        }
        sleep(pause).await;
        pause = (2 * pause).min(LAST_LOOK);
        len = stream.peek(&mut first).await.ok()?;
    }
    Some(first == *PREFACE)
}

async fn serve_h1<S>(
    stream: S,
    client: ClientAddress,
    terms: ConnectionConfig,
    watcher: Watcher,
    place: &Arc<Place>,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let limits = &terms.limits;
    let idle_timeout = limits.idle_timeout();
    let header_timeout =
        HeaderReadTimeout::new(idle_timeout, limits.header_read_timeout(), place.clone());
    let routes = TowerToHyperService::new(terms.routes.clone());
    let service = service_fn(|mut request: Request<Incoming>| {
        place.begin_request();
        request.extensions_mut().insert(client);
        trim_trailing_slash(request.uri_mut());
        routes.call(request)
    });
    let metrics = terms.metrics.clone();
    let stream = HeadErrors::new(
        stream,
        limits.max_header_bytes,
        metrics,
        header_timeout.clone(),
    );
    let connection = http1::Builder::new()
        .timer(header_timeout.clone())
        .header_read_timeout(idle_timeout)
        .max_buf_size(limits.max_header_bytes.saturating_add(HEAD_SLACK))
        .max_header_size(limits.max_header_bytes)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    let ended = tokio::select! {
        // First: what a client has sent already may be a request, which keeps the place.
        biased;
        ended = watcher.watch(connection) => ended,
        () = place.until_claimed() => return terms.cut("displaced"),
    };
    // The client left, or sent no HTTP: its request's record says so where there was one.
    if let Err(err) = ended {
        tracing::debug!(%err, "connection ended");
        // A timeout between requests is the usual end of an idle connection, and counts as no cut.
        if err.is_timeout() && header_timeout.head_started() {
            terms.cut("head");
        }
    }
}

/// `_watcher` is held: the router waits for this connection as long as it lives.
async fn serve_h2<S>(
    stream: S,
    client: ClientAddress,
    terms: ConnectionConfig,
    mut closing: watch::Receiver<()>,
    _watcher: Watcher,
    place: &Place,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let limits = &terms.limits;
    let streams = Arc::new(Streams::default());
    let routes = TowerToHyperService::new(terms.routes.clone());
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(client);
        trim_trailing_slash(request.uri_mut());
        place.begin_request();
        let stream = streams.register_stream();
        let answering = routes.call(request);
        async move { Ok::<_, Infallible>(answering.await?.map(|body| stream.watch(body))) }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(limits.http2_max_streams)
        .max_header_list_size(u32::try_from(limits.max_header_bytes).unwrap_or(u32::MAX))
        .max_send_buf_size(SEND_BUFFER)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let mut is_closing = false;
    let mut busy_at = Instant::now();
    loop {
        tokio::select! {
            // First: what a client has sent already may be a request, which keeps the place.
            biased;
            ended = &mut connection => {
                if let Err(err) = ended {
                    tracing::debug!(%err, "connection ended");
                }
                return;
            }
            () = place.until_claimed() => {
                connection.as_mut().graceful_shutdown();
                // Once: the client learns why if its socket takes the frame.
                let _ = timeout(Duration::ZERO, connection).await;
                return terms.cut("displaced");
            }
            // The channel stays closed: without the condition this arm would be ready in every
            // round.
            _ = closing.changed(), if !is_closing => {
                is_closing = true;
                connection.as_mut().graceful_shutdown();
            }
            () = sleep(SWEEP_INTERVAL) => {
                let (open, stalled) = streams.sweep_stalled(limits.stall_timeout());
                (0..stalled).for_each(|_| terms.cut("stalled"));
                if open == 0 {
                    // A round ago at most the last answer ended: it has left by now.
                    place.await_request();
                }
                if open > 0 {
                    busy_at = Instant::now();
                } else if is_closing {
                    return; // the client had a round's time to take note
                } else if busy_at.elapsed() >= limits.idle_timeout() {
                    is_closing = true;
                    connection.as_mut().graceful_shutdown();
                }
            }
        }
    }
}

/// The open streams of an HTTP/2 connection.
#[derive(Default)]
struct Streams(Mutex<Vec<Weak<Stream>>>);

/// Stream of one request, from its head to the end of its answer.
#[derive(Default)]
struct Stream {
    body: Mutex<Option<Body>>,
    /// When the client was handed a piece and has not asked for the next; 0: it waits for us.
    handed_ms: AtomicU64,
}

impl Streams {
    fn register_stream(&self) -> Arc<Stream> {
        let stream = Arc::new(Stream::default());
        let mut streams = self.0.lock();
        // Full, perhaps of ended streams, which `sweep_stalled` removes once a round: without a
        // sweep here a busy connection would grow the list far beyond --http2-max-streams.
        if streams.len() == streams.capacity() {
            streams.retain(|stream| stream.strong_count() > 0);
        }
        streams.push(Arc::downgrade(&stream));
        stream
    }

    /// Give up streams whose client takes nothing. Returns the numbers of open ones and of those.
    fn sweep_stalled(&self, stall: Duration) -> (usize, usize) {
        let mut open = 0;
        let mut stalled = 0;
        let now_ms = now_ms();
        self.0.lock().retain(|stream| {
            let Some(stream) = stream.upgrade() else {
                return false;
            };
            open += 1;
            let handed_ms = stream.handed_ms.load(Ordering::Relaxed);
            let is_stalled =
                handed_ms > 0 && now_ms - handed_ms.min(now_ms) >= stall.as_millis() as u64;
            // Dropping the body frees its worker; the client sees a reset if it ever looks again.
            if is_stalled && stream.body.lock().take().is_some() {
                stalled += 1;
            }
            true
        });
        (open, stalled)
    }
}

impl Stream {
    fn watch(self: Arc<Self>, body: Body) -> Body {
        if body.is_end_stream() {
            return body;
        }
        *self.body.lock() = Some(body);
        Body::new(Watched(self))
    }
}

struct Watched(Arc<Stream>);

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let stream = &self.0;
        stream.handed_ms.store(0, Ordering::Relaxed);
        let mut body = stream.body.lock();
        let Some(body) = body.as_mut() else {
            let stalled = axum::Error::new("the client took nothing of its answer for too long");
            return Poll::Ready(Some(Err(stalled)));
        };
        let polled = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(_))) = &polled {
            stream.handed_ms.store(now_ms().max(1), Ordering::Relaxed);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0
            .body
            .lock()
            .as_ref()
            .is_some_and(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0
            .body
            .lock()
            .as_ref()
            .map(http_body::Body::size_hint)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_router_warns_once_a_minute_and_not_per_connection() {
        let start = Instant::now();
        let mut warning = ThrottledWarning::new(FULL_WARNING_PAUSE);
        let due = [0, 1, 59, 60, 61, 119, 120].map(|secs| {
            let now = start + Duration::from_secs(secs);
            warning.count(now).is_some()
        });
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }

    #[test]
    fn accept_failures_are_logged_once_a_second_with_their_count() {
        let start = Instant::now();
        let mut failures = ThrottledWarning::new(ACCEPT_WARNING_PAUSE);
        let logged = [0, 50, 950, 1000, 1050, 2500].map(|ms| {
            let now = start + Duration::from_millis(ms);
            failures.count(now)
        });
        assert_eq!(logged, [Some(1), None, None, Some(3), None, Some(2)]);
    }
}
