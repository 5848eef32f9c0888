//! The process: parse, listen, accept, and the way down.
//!
//! Shutdown (SIGTERM, SIGINT):
//!
//! 1. /readyz says 503; for --shutdown-delay-ms new connections are still taken, so that load
//!    balancers can notice;
//! 2. the listener closes; idle connections close; requests in flight continue;
//! 3. after --shutdown-grace-period-secs the workers' connections are cut: streams get an error
//!    event and [DONE];
//! 4. exit 0. A second signal exits at once with 1.

/// HTTP routes and handlers.
pub(crate) mod api;
/// Places of client connections.
mod connections;
/// Answers to requests whose head cannot be parsed.
mod head_errors;
/// Timeout for reading request headers.
mod header_timeout;
/// Helpers of several handlers.
mod http_util;
/// Client connections: accepting, limits, stalled streams.
mod listener;
/// Web page of the fleet.
pub(crate) mod ui;

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::server::graceful::GracefulShutdown;
use rand::RngCore;
use router_core::PolicySet;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, sleep, timeout};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::clock::now_ms;
use crate::config::{ListenFlags, ParseStop, RouterConfig, flags_markdown, flags_to_complete};
use crate::dispatch::app::AppState;
use crate::observability::decision_log;
use crate::observability::metrics::{RouterMetrics, metrics_markdown};
use crate::observability::otlp::{SpanExporter, TraceService};
use crate::observability::replay;
use crate::request::tokenize::PromptTokenizer;
use crate::server::api::{health_router, metrics_router, router};
use crate::server::connections::PlaceLimits;
use crate::server::listener::{ConnectionConfig, accept};
use crate::transport::descriptors;
use crate::transport::files::refuse_unwritable_kinds;
use crate::transport::socket::tune_listener;
use crate::transport::tls_reload::{self, ClientTls, TlsFiles};
use crate::workers::discovery;
use crate::workers::health::register;
use crate::workers::kv_events;

/// After the cut streams still get their last event within this.
const AFTER_CUT: Duration = Duration::from_secs(2);
/// Connections of --health-port, or of --prometheus-port: probes and scrapers need a few.
const SIDE_CONNECTIONS: usize = 64;
/// A collector gets this long to take the spans of the last requests.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Parse `argv` (program name first), run the router until a signal stops it, return the exit code.
/// `replay` as the first argument decides a log again instead.
pub fn run(argv: Vec<String>) -> i32 {
    if argv.get(1).is_some_and(|word| word == "replay") {
        return match replay::run(&argv[2..]) {
            Ok((text, code)) => print(&text, code),
            Err(text) => fail("baton replay", &text, 2),
        };
    }
    let config = match RouterConfig::parse(&argv) {
        Ok(config) => config,
        Err(ParseStop::Help(text)) => return print(&text, 0),
        Err(ParseStop::Bad(text)) => {
            return fail(
                argv.first().map_or("baton-router", String::as_str),
                &text,
                2,
            );
        }
    };
    if config.observe.print_flags {
        return print(&flags_markdown(), 0);
    }
    if config.observe.print_completion {
        return print(&flags_to_complete(), 0);
    }
    if config.observe.print_metrics {
        return print(&metrics_markdown(), 0);
    }
    if let Err(text) = init_logs(&config) {
        return fail("baton-router", &text, 2);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("router")
        .build()
    {
        Ok(runtime) => runtime,
        Err(err) => return fail("baton-router", &format!("cannot start threads: {err}"), 1),
    };
    let code = runtime.block_on(until_signal(config));
    runtime.shutdown_timeout(Duration::from_millis(100));
    code
}

/// Text for standard output; a reader that closed the pipe is not an error.
fn print(text: &str, code: i32) -> i32 {
    let _ = writeln!(std::io::stdout(), "{}", text.trim_end());
    code
}

/// Text for standard error.
fn fail(program: &str, text: &str, code: i32) -> i32 {
    eprintln!("{program}: {text}");
    code
}

/// Text for standard error once the log has begun: a log line where lines are JSON.
fn report_failure(is_json: bool, text: &str, code: i32) -> i32 {
    if !is_json {
        return fail("baton-router", text, code);
    }
    tracing::error!("{text}");
    code
}

fn init_logs(config: &RouterConfig) -> Result<(), String> {
    let level = config.observe.log_filter();
    let filter = tracing_subscriber::EnvFilter::try_new(&level)
        .map_err(|err| format!("--log-level {level}: {err}"))?;
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    // An error means the process has a subscriber already (a test, an embedding program): it stays.
    let _ = if config.observe.is_json() {
        logs.json().flatten_event(true).try_init()
    } else {
        use std::io::IsTerminal;
        logs.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    Ok(())
}

async fn until_signal(config: RouterConfig) -> i32 {
    let is_json = config.observe.is_json();
    let signals = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    );
    let (Ok(mut term), Ok(mut int)) = signals else {
        return report_failure(is_json, "cannot listen for signals", 1);
    };
    let running = match RunningServer::start(config).await {
        Ok(running) => running,
        Err(text) => return report_failure(is_json, &text, 2),
    };
    print(&ready_line(&running, is_json), 0);
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
    tracing::info!("shutting down; send the signal again to stop at once");
    tokio::select! {
        () = running.stop() => 0,
        _ = term.recv() => 1,
        _ = int.recv() => 1,
    }
}

/// Line for the supervisor that started this process: where it listens, and the incarnation that
/// its `/livez` and `/readyz` state. What answers at the address alone may be another process.
fn ready_line(running: &RunningServer, is_json: bool) -> String {
    let mut facts = json!({
        "url": running.url(),
        "pid": std::process::id(),
        "incarnation": running.app.incarnation,
    });
    if let Some(addr) = running.health_addr {
        facts["health_port"] = addr.port().into();
    }
    if !is_json {
        return format!("READY {facts}");
    }
    let mut timestamp = String::new();
    // It fails only where the text cannot grow.
    let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
    facts["timestamp"] = timestamp.into();
    facts["level"] = "INFO".into();
    facts["message"] = "READY".into();
    facts["target"] = "baton_router".into();
    facts.to_string()
}

/// A router that accepts connections. Dropping it without `stop` leaves its tasks to the runtime.
pub struct RunningServer {
    scheme: &'static str,
    pub addr: SocketAddr,
    pub metrics_addr: Option<SocketAddr>,
    pub health_addr: Option<SocketAddr>,
    /// Held to the end: the last scrape may come late, and probes do not end with the clients.
    _side_listeners: Vec<oneshot::Sender<()>>,
    app: Arc<AppState>,
    log: Option<decision_log::LogWriter>,
    cut: watch::Sender<bool>,
    /// Sent to stop accepting.
    close: oneshot::Sender<()>,
    accepting: JoinHandle<GracefulShutdown>,
}

impl RunningServer {
    /// Bind, register the workers of the flags, begin to accept.
    pub async fn start(mut config: RouterConfig) -> Result<Self, String> {
        share_descriptors(&mut config);
        let specs = config.worker_specs().map_err(|bad| bad.join("\n"))?;
        let host = config.listen.host.clone();
        let port = config.listen.port;
        let (listener, addr) = bind(&host, port, "--port").await?;
        let side_listeners = SideListeners::bind(&config).await?;
        let tls_files = TlsFiles::open(&config.tls, config.limits.http2_max_streams > 0)?;
        let tls = tls_files.for_clients();
        let to_workers = tls_files.for_workers();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let (cut, cut_seen) = watch::channel(false);
        let metrics = Arc::new(RouterMetrics::new().map_err(|err| err.to_string())?);
        tls_files.show_expiries(&metrics);
        tls_reload::follow(tls_files, metrics.clone());
        let (policy_set, log) = build_policy_set(&config, &metrics)?;
        let observe = &config.observe;
        let tracer = observe.enable_trace.then(|| {
            let endpoint = observe.otlp_traces_endpoint.clone();
            let service = TraceService {
                name: "baton-router".to_owned(),
                attributes: Vec::new(),
            };
            Arc::new(SpanExporter::start(
                endpoint,
                service,
                metrics.trace_spans.clone(),
            ))
        });
        let mut app = AppState::new(config, metrics, policy_set, to_workers, cut_seen);
        app.sinks.tracer = tracer;
        app.tokens = PromptTokenizer::load(&app.config.tokens, app.metrics.clone())?.map(Arc::new);
        let app = Arc::new(app);
        for spec in specs {
            register(&app.fleet, spec).map_err(|err| err.to_string())?;
        }
        discovery::start(&app.fleet).await?;
        for role in app.fleet.serving_roles() {
            if app.fleet.count(*role).0 == 0 {
                tracing::warn!(%role, "no worker of this role yet; wait for discovery, or POST one to /workers");
            }
        }
        kv_events::announce(&app.fleet);
        evict_regularly(&app);
        ui::sample_regularly(&app);
        app.admission.keep_filling(&app.config.limits);
        let metrics_addr = side_listeners.metrics.as_ref().map(|(_, addr)| *addr);
        let health_addr = side_listeners.health.as_ref().map(|(_, addr)| *addr);
        let side_listeners = side_listeners.serve(&app);
        let (close, closed) = oneshot::channel();
        let terms = connection_config(&app, router(app.clone()), tls);
        let accepting = tokio::spawn(accept(listener, terms, closed));
        tracing::info!(%addr, pd = app.fleet.is_pd(), "listening on {scheme}://{addr}");
        if let Some(text) = exposure_warning(&app.config.listen, addr) {
            tracing::warn!("{text}");
        }
        Ok(Self {
            scheme,
            addr,
            metrics_addr,
            health_addr,
            _side_listeners: side_listeners,
            app,
            log,
            cut,
            close,
            accepting,
        })
    }

    /// Where processes of this machine reach it.
    fn url(&self) -> String {
        let mut addr = self.addr;
        if addr.ip().is_unspecified() {
            addr.set_ip(match addr.ip() {
                IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        format!("{}://{addr}", self.scheme)
    }

    /// The way down; returns when all requests are answered or the grace is over.
    pub async fn stop(mut self) {
        let log = self.log.take();
        let tracer = self.app.sinks.tracer.clone();
        self.finish_requests().await;
        if let Some(tracer) = tracer {
            tracer.flush(LAST_SPANS).await;
        }
        if let Some(log) = log {
            // It waits for a disk.
            // a panic there loses the end of the log
            let _ = tokio::task::spawn_blocking(|| log.stop()).await;
        }
    }

    async fn finish_requests(self) {
        let config = &self.app.config.listen;
        self.app.start_draining();
        sleep(Duration::from_millis(config.shutdown_delay_ms)).await;
        let _ = self.close.send(()); // an error: accepting ended already
        let Ok(connections) = self.accepting.await else {
            return; // it panicked, and the connections with it
        };
        let open = connections.count();
        let grace = Duration::from_secs(config.shutdown_grace_period_secs);
        tracing::info!(open, ?grace, "finishing requests");
        let finished = connections.shutdown();
        tokio::pin!(finished);
        if timeout(grace, &mut finished).await.is_err() {
            tracing::warn!("grace is over, cutting what still runs");
            self.cut.send_replace(true);
            // a client that does not read its last event is not waited for
            let _ = timeout(AFTER_CUT, finished).await;
        }
    }
}

/// A socket that listens, and its address.
type BoundListener = (TcpListener, SocketAddr);

/// Listeners beside the one for clients: of scrapers and of probes.
struct SideListeners {
    metrics: Option<BoundListener>,
    health: Option<BoundListener>,
}

impl SideListeners {
    async fn bind(config: &RouterConfig) -> Result<Self, String> {
        let host = &config.listen.host;
        let metrics = match config.observe.prometheus_port {
            None => None,
            Some(port) => {
                let host = config.observe.prometheus_host.as_ref().unwrap_or(host);
                Some(bind(host, port, "--prometheus-port").await?)
            }
        };
        let health = match config.listen.health_port {
            None => None,
            Some(port) => Some(bind(host, port, "--health-port").await?),
        };
        Ok(Self { metrics, health })
    }

    /// Accept connections of these listeners; each ends when its sender is dropped.
    fn serve(self, app: &Arc<AppState>) -> Vec<oneshot::Sender<()>> {
        let metrics = self
            .metrics
            .map(|bound| (bound, metrics_router(app.clone())));
        let health = self.health.map(|bound| (bound, health_router(app.clone())));
        let served = metrics.into_iter().chain(health);
        served
            .map(|((listener, _), routes)| {
                let (open, closed) = oneshot::channel();
                let terms = side_connection_config(app, routes);
                tokio::spawn(accept(listener, terms, closed));
                open
            })
            .collect()
    }
}

/// Make --max-connections fit the limit of open files.
fn share_descriptors(config: &mut RouterConfig) {
    let limit = descriptors::raise_limit();
    let legs = if config.workers.pd_disaggregation {
        2
    } else {
        1
    };
    let wanted = config.limits.max_connections;
    let given = descriptors::client_connections(limit, wanted, legs);
    if given < wanted {
        tracing::warn!(
            wanted,
            given,
            open_files = limit,
            "--max-connections is lowered, so that connections to workers fit the limit of open \
             files; raise the limit (ulimit -Hn)"
        );
        config.limits.max_connections = given;
    }
}

/// The policies, with the decision log if there is to be one.
pub fn build_policy_set(
    config: &RouterConfig,
    metrics: &RouterMetrics,
) -> Result<(PolicySet, Option<decision_log::LogWriter>), String> {
    let policy_set = PolicySet::new(|role| config.policy_for(role), &config.policy_params());
    let observe = &config.observe;
    let Some(path) = observe.decision_log.clone() else {
        return Ok((policy_set, None));
    };
    // A folder of this name would be renamed, and so would a device.
    refuse_unwritable_kinds(&path).map_err(|err| {
        let path = path.display();
        format!("--decision-log {path}: {err}; give a file in a folder this user may write to")
    })?;
    let max_bytes = observe.decision_log_max_bytes;
    let max_files = observe.decision_log_files;
    let place = decision_log::LogLocation {
        path,
        max_bytes,
        max_files,
    };
    let flags = config.routing.resolved.clone();
    let counts = metrics.decision_log_lines.clone();
    let (queue, writer) = decision_log::start(place, flags, counts)?;
    let policy_set = policy_set.with_journal(Box::new(queue), rand::rng().next_u64());
    Ok((policy_set, Some(writer)))
}

/// Warns of what other machines may do without a key of their own.
fn exposure_warning(listen: &ListenFlags, addr: SocketAddr) -> Option<String> {
    if addr.ip().to_canonical().is_loopback() {
        return None;
    }
    let has_control_keys = !listen.control_plane_api_keys.is_empty();
    match (&listen.api_key, has_control_keys) {
        (None, false) => Some(format!(
            "no key guards {addr}: anyone who reaches it may generate, abort requests, and register workers that then \
             receive prompts; set --api-key and --control-plane-api-keys, or listen on --host 127.0.0.1"
        )),
        (Some(_), false) => Some(format!(
            "the control plane of {addr} is open to every client with the --api-key, who may register workers and abort \
             requests of others; set --control-plane-api-keys"
        )),
        (None, true) => Some(format!(
            "anyone who reaches {addr} may generate; set --api-key, or listen on --host 127.0.0.1"
        )),
        (Some(_), true) => None,
    }
}

async fn bind(host: &str, port: u16, flag: &str) -> Result<BoundListener, String> {
    let bound = TcpListener::bind((host, port)).await;
    let bound = bound.and_then(|listener| {
        tune_listener(&listener)?;
        let addr = listener.local_addr()?;
        Ok((listener, addr))
    });
    bound.map_err(|err| match err.kind() {
        std::io::ErrorKind::AddrInUse => {
            format!(
                "{host}:{port} is in use already; stop what listens there or choose another {flag}"
            )
        }
        _ => format!("cannot listen on {host}:{port}: {err}"),
    })
}

fn connection_config(app: &AppState, routes: Router, tls: Option<ClientTls>) -> ConnectionConfig {
    let limits = app.config.limits.clone();
    let places = PlaceLimits::of(&limits);
    let metrics = app.metrics.clone();
    ConnectionConfig {
        routes,
        tls,
        limits,
        places,
        metrics,
    }
}

/// Configuration of the listeners for probes and for scrapers.
fn side_connection_config(app: &AppState, routes: Router) -> ConnectionConfig {
    let mut terms = connection_config(app, routes, None);
    terms.places = PlaceLimits {
        all: SIDE_CONNECTIONS,
        per_address: None,
        trusted_proxies: Vec::new(),
    };
    terms
}

fn evict_regularly(app: &Arc<AppState>) {
    let weak = Arc::downgrade(app);
    let pause = Duration::from_secs(app.config.routing.eviction_interval_secs);
    tokio::spawn(async move {
        let mut turn = interval(pause);
        turn.tick().await;
        loop {
            turn.tick().await;
            let Some(app) = weak.upgrade() else { return };
            let since = Instant::now();
            // A walk over the tree: not on a thread that serves requests.
            let evicting = move || app.fleet.policy_set.evict(now_ms());
            if let Ok(chars @ 1..) = tokio::task::spawn_blocking(evicting).await {
                tracing::info!(chars, took = ?since.elapsed(), "evicted prompts");
            }
        }
    });
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn open_listener_beyond_loopback_warns_with_a_remedy() {
        let warning = |addr: &str, flags: &[&str]| {
            let argv = [&["baton-router"], flags].concat();
            let argv: Vec<String> = argv.into_iter().map(str::to_owned).collect();
            let listen = RouterConfig::parse(&argv).unwrap().listen;
            exposure_warning(&listen, addr.parse().unwrap())
        };
        let key = ["--api-key", "k"];
        let control = ["--control-plane-api-keys", "a:b:admin:c"];
        let open = warning("0.0.0.0:8000", &[]).unwrap();
        assert!(
            open.contains("0.0.0.0:8000") && open.contains("--api-key and"),
            "{open}"
        );
        let control_open = warning("10.0.0.1:8000", &key).unwrap();
        assert!(
            control_open.contains("set --control-plane-api-keys"),
            "{control_open}"
        );
        let client_open = warning("[::]:8000", &control).unwrap();
        assert!(client_open.contains("set --api-key"), "{client_open}");
        assert_eq!(warning("0.0.0.0:8000", &[key, control].concat()), None);
        for addr in ["127.0.0.1:8000", "[::1]:8000", "[::ffff:127.0.0.1]:8000"] {
            assert_eq!(warning(addr, &[]), None, "{addr}");
        }
    }
}
