//! baton-router: HTTP router in front of prefill and decode nodes.
//!
//! The life of a request: `server::api` (routes, key, request id) → `server::api::generate` (`request`: body, admission, tokenize) →
//! `dispatch` (`workers` chooses P and D, attempts go out over `transport::upstream`, retries) → `response::proxy_body`;
//! `response::keepalive` keeps a stream's connection open while dispatch works.
//! `workers::kv_events` follows what workers have cached, `workers::health` probes them, `observability::access_log` turns each
//! request into one log line and its metrics.
//!
//! What this crate does not do: decide. Policies, breakers, backoff and health verdicts are `router-core`'s.

mod clock;
mod config;
mod dispatch;
mod error;
mod observability;
mod request;
mod response;
mod server;
mod transport;
mod workers;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use router_core::{Deciders, LiveRooms, PoisonList, ResumePacer, RetryBudget, RetryConfig, Role};
use tokio::sync::{oneshot, watch};

pub use config::{ParseStop, RouterConfig, flags_markdown};
pub use error::{CODES, RouteError};
pub use observability::metrics::metrics_markdown;
pub use observability::otlp as trace;
pub use request::prompt_limit::{OversizedBody, PromptLimit, oversized_body};
pub use server::api::route_access;
pub use server::{Running, run};

/// Most bootstrap rooms in use at once, of all requests together: 16 MiB.
const MAX_ROOMS: usize = 1 << 20;

/// Everything the request path shares.
pub struct App {
    pub(crate) config: RouterConfig,
    pub(crate) registry: workers::Registry,
    pub(crate) metrics: Arc<observability::metrics::Metrics>,
    pub(crate) admission: request::admission::Admission,
    pub(crate) body_memory: Arc<request::body_memory::BodyMemory>,
    pub(crate) body_threads: request::body_threads::BodyThreads,
    pub(crate) retry: RetryConfig,
    pub(crate) retry_budget: Mutex<RetryBudget>,
    pub(crate) resume_pacer: Mutex<ResumePacer<oneshot::Sender<()>>>,
    /// Bodies that broke workers.
    pub(crate) poison: Mutex<PoisonList>,
    /// Bootstrap rooms of requests in flight.
    pub(crate) rooms: Arc<Mutex<LiveRooms>>,
    /// `None`: prompts are counted in characters.
    pub(crate) tokens: Option<Arc<request::tokenize::Tokens>>,
    pub(crate) requests: Arc<observability::request_timeline::Requests>,
    /// With --enable-trace.
    pub(crate) tracer: Option<Arc<observability::otlp::Exporter>>,
    /// What is held for failovers.
    pub(crate) failover_memory: Arc<response::failover::Memory>,
    pub(crate) releases: dispatch::prefill_release::Releases,
    /// KV traffic by pair, for the web page.
    pub(crate) pair_traffic: observability::pair_traffic::PairTraffic,
    /// Web pages that show the fleet.
    pub(crate) feed: Arc<server::ui::FeedHub>,
    /// Turns true when what still runs is cut.
    cut: watch::Receiver<bool>,
    /// Sources of workers that were read once.
    pub(crate) discovered: Mutex<BTreeSet<&'static str>>,
    draining: AtomicBool,
}

impl App {
    pub(crate) fn new(
        config: RouterConfig,
        metrics: Arc<observability::metrics::Metrics>,
        deciders: Deciders,
        tls: Option<transport::tls_reload::WorkerTls>,
        cut: watch::Receiver<bool>,
    ) -> Self {
        Self {
            registry: workers::Registry::new(&config, deciders, metrics.clone(), tls, cut.clone()),
            failover_memory: Arc::new(response::failover::Memory::new(
                config.retry.failover_max_bytes,
            )),
            releases: dispatch::prefill_release::Releases::default(),
            pair_traffic: observability::pair_traffic::PairTraffic::default(),
            feed: Arc::new(server::ui::FeedHub::new(
                metrics.feed_clients.clone(),
                metrics.feed_snapshots.clone(),
            )),
            cut,
            requests: Arc::new(observability::request_timeline::Requests::new(
                config.observe.request_history,
            )),
            body_memory: request::body_memory::BodyMemory::new(
                config.limits.max_total_body_bytes,
                metrics.body_bytes.clone(),
            ),
            body_threads: request::body_threads::BodyThreads::default(),
            metrics,
            admission: request::admission::Admission::new(&config.limits),
            retry: config.retry(),
            retry_budget: Mutex::new(RetryBudget::new(config.retry_budget())),
            resume_pacer: Mutex::default(),
            poison: Mutex::default(),
            rooms: Arc::new(Mutex::new(LiveRooms::new(MAX_ROOMS))),
            tokens: None,
            tracer: None,
            discovered: Mutex::default(),
            draining: AtomicBool::new(false),
            config,
        }
    }

    pub(crate) fn is_pd(&self) -> bool {
        self.config.workers.pd_disaggregation
    }

    /// Roles without which nothing can be answered.
    pub(crate) fn serving_roles(&self) -> &'static [Role] {
        if self.is_pd() { &[Role::Prefill, Role::Decode] } else { &[Role::Regular] }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub(crate) fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// The grace of a shutdown is over: nothing is begun any more.
    pub(crate) fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }

    /// Register a worker and start probing it.
    pub(crate) fn register(
        self: &Arc<Self>,
        spec: config::WorkerSpec,
    ) -> Result<Arc<workers::Worker>, RouteError> {
        let worker = self.registry.add(spec)?;
        tracing::info!(url = %worker.url(), role = %worker.role(), id = worker.id, "worker registered");
        workers::health::start(self, &worker);
        Ok(worker)
    }

    /// No new requests for this worker; it is removed when those in flight have ended.
    pub(crate) fn drain(self: &Arc<Self>, worker: &Arc<workers::Worker>) {
        if !self.registry.start_drain(worker) {
            return;
        }
        let (app, worker) = (Arc::downgrade(self), worker.clone());
        tokio::spawn(async move {
            worker.until_idle().await;
            if let Some(app) = app.upgrade()
                && app.registry.remove(worker.id).is_some()
            {
                tracing::info!(url = %worker.url(), "worker drained and removed");
            }
        });
    }
}
