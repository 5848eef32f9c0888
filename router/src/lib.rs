//! baton-router: HTTP router in front of prefill and decode nodes.
//!
//! The life of a request: `http` (routes, key, request id) → `http::generate` (body, `body::Scan`, `admission`, `tokens`) →
//! `dispatch` and `pair` (`registry` chooses P and D, `leg`s go out over `upstream`, retries) → `relay` (the answer's body); `late`
//! keeps a stream's client company while dispatch works.
//! `ui` serves the web page. `kv_events` follows what workers have cached, `health` keeps the registry true, `record` turns each request into one log line and its metrics.
//!
//! What this crate does not do: decide. Policies, breakers, backoff and health verdicts are `router-core`'s.

mod admission;
mod body;
mod body_memory;
mod body_threads;
mod clock;
mod config;
mod connections;
mod decision_log;
mod descriptors;
mod discovery;
mod dispatch;
mod error;
mod explain;
mod fleet_events;
mod head_errors;
mod health;
mod http;
mod inbound;
mod kv_events;
mod late;
mod leg;
mod load;
mod logprobs;
mod media;
mod metrics;
mod pacing;
mod pair;
mod pair_traffic;
mod patience;
mod prompt_limit;
mod record;
mod registry;
mod relay;
mod release;
mod replay;
mod resume;
mod serve;
mod sse;
mod stages;
mod story;
mod tcp;
mod tls;
mod tls_reload;
mod tokens;
pub mod trace;
mod ui;
mod upstream;
mod usage;
mod vllm;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use router_core::{Deciders, LiveRooms, PoisonList, ResumePacer, RetryBudget, RetryConfig, Role};
use tokio::sync::{oneshot, watch};

pub use config::{ParseStop, RouterConfig, flags_markdown};
pub use error::{CODES, RouteError};
pub use http::route_access;
pub use metrics::metrics_markdown;
pub use prompt_limit::{OversizedBody, PromptLimit, oversized_body};
pub use serve::{Running, run};

/// Most bootstrap rooms in use at once, of all requests together: 16 MiB.
const MAX_ROOMS: usize = 1 << 20;

/// Everything the request path shares.
pub struct App {
    pub(crate) config: RouterConfig,
    pub(crate) registry: registry::Registry,
    pub(crate) metrics: Arc<metrics::Metrics>,
    pub(crate) admission: admission::Admission,
    pub(crate) body_memory: Arc<body_memory::BodyMemory>,
    pub(crate) body_threads: body_threads::BodyThreads,
    pub(crate) retry: RetryConfig,
    pub(crate) retry_budget: Mutex<RetryBudget>,
    pub(crate) resume_pacer: Mutex<ResumePacer<oneshot::Sender<()>>>,
    /// Bodies that broke workers.
    pub(crate) poison: Mutex<PoisonList>,
    /// Bootstrap rooms of requests in flight.
    pub(crate) rooms: Arc<Mutex<LiveRooms>>,
    /// `None`: prompts are counted in characters.
    pub(crate) tokens: Option<Arc<tokens::Tokens>>,
    pub(crate) requests: Arc<story::Requests>,
    /// With --enable-trace.
    pub(crate) tracer: Option<Arc<trace::Exporter>>,
    /// What is held for failovers.
    pub(crate) failover_memory: Arc<resume::Memory>,
    pub(crate) releases: release::Releases,
    /// KV traffic by pair, for the web page.
    pub(crate) pair_traffic: pair_traffic::PairTraffic,
    /// Web pages that show the fleet.
    pub(crate) feed: Arc<ui::FeedHub>,
    /// Turns true when what still runs is cut.
    cut: watch::Receiver<bool>,
    /// Sources of workers that were read once.
    pub(crate) discovered: Mutex<BTreeSet<&'static str>>,
    draining: AtomicBool,
}

impl App {
    pub(crate) fn new(
        config: RouterConfig,
        metrics: Arc<metrics::Metrics>,
        deciders: Deciders,
        tls: Option<tls_reload::WorkerTls>,
        cut: watch::Receiver<bool>,
    ) -> Self {
        Self {
            registry: registry::Registry::new(&config, deciders, metrics.clone(), tls, cut.clone()),
            failover_memory: Arc::new(resume::Memory::new(config.retry.failover_max_bytes)),
            releases: release::Releases::default(),
            pair_traffic: pair_traffic::PairTraffic::default(),
            feed: Arc::new(ui::FeedHub::new(
                metrics.feed_clients.clone(),
                metrics.feed_snapshots.clone(),
            )),
            cut,
            requests: Arc::new(story::Requests::new(config.observe.request_history)),
            body_memory: body_memory::BodyMemory::new(
                config.limits.max_total_body_bytes,
                metrics.body_bytes.clone(),
            ),
            body_threads: body_threads::BodyThreads::default(),
            metrics,
            admission: admission::Admission::new(&config.limits),
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
        if self.is_pd() {
            &[Role::Prefill, Role::Decode]
        } else {
            &[Role::Regular]
        }
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
    ) -> Result<Arc<registry::Worker>, RouteError> {
        let worker = self.registry.add(spec)?;
        tracing::info!(url = %worker.url(), role = %worker.role(), id = worker.id, "worker registered");
        health::start(self, &worker);
        Ok(worker)
    }

    /// No new requests for this worker; it is removed when those in flight have ended.
    pub(crate) fn drain(self: &Arc<Self>, worker: &Arc<registry::Worker>) {
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
