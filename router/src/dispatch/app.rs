//! State that the request path shares: one value, made at start, behind an `Arc`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use router_core::{LiveRooms, PoisonList, PolicySet, ResumePacer, RetryBudget, RetryConfig};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::config::RouterConfig;
use crate::observability::access_log::EntrySinks;
use crate::observability::fleet_feed::history::FleetHistory;
use crate::observability::fleet_feed::hub::FeedHub;
use crate::observability::fleet_feed::pair_traffic::PairTraffic;
use crate::observability::metrics::RouterMetrics;
use crate::observability::request_timeline::history::RequestHistory;
use crate::request::admission::AdmissionController;
use crate::request::body_memory::MemoryBudget;
use crate::request::body_threads::BodyThreads;
use crate::request::tokenize::PromptTokenizer;
use crate::transport::tls_reload::WorkerTls;
use crate::workers::fleet::WorkerFleet;

/// Releases of prefilled pages sent at once, at most.
const MAX_RELEASES: usize = 64;

/// Most bootstrap rooms in use at once, of all requests together: 16 MiB.
const MAX_ROOMS: usize = 1 << 20;

/// Everything the request path shares.
pub struct AppState {
    /// Id of this process, random: an address may belong to another process a moment later.
    pub incarnation: String,
    pub config: Arc<RouterConfig>,
    pub fleet: Arc<WorkerFleet>,
    pub metrics: Arc<RouterMetrics>,
    pub admission: AdmissionController,
    pub body_memory: Arc<MemoryBudget>,
    pub body_threads: BodyThreads,
    pub retry: RetryConfig,
    pub retry_budget: Mutex<RetryBudget>,
    pub resume_pacer: Mutex<ResumePacer<oneshot::Sender<()>>>,
    /// Bodies that broke workers.
    pub poison: Mutex<PoisonList>,
    /// Bootstrap rooms of requests in flight.
    pub rooms: Arc<Mutex<LiveRooms>>,
    /// `None`: prompts are counted in characters.
    pub tokens: Option<Arc<PromptTokenizer>>,
    /// Timelines of requests, and where records go.
    pub sinks: EntrySinks,
    /// Memory held for failovers.
    pub failover_memory: Arc<MemoryBudget>,
    /// Permits for releases of prefilled pages that are in flight.
    pub releases: Arc<Semaphore>,
    /// KV traffic by pair, for the web page.
    pub pair_traffic: PairTraffic,
    /// Load over the last ten minutes, for the web page.
    pub history: Mutex<FleetHistory>,
    /// Web pages that show the fleet.
    pub feed: Arc<FeedHub>,
    /// Turns true when the requests that still run are cut.
    pub cut: watch::Receiver<bool>,
    draining: AtomicBool,
}

impl AppState {
    pub fn new(
        config: RouterConfig,
        metrics: Arc<RouterMetrics>,
        policy_set: PolicySet,
        tls: Option<WorkerTls>,
        cut: watch::Receiver<bool>,
    ) -> Self {
        let config = Arc::new(config);
        let fleet = WorkerFleet::new(
            config.clone(),
            metrics.clone(),
            policy_set,
            tls,
            cut.clone(),
        );
        let feed = FeedHub::new(metrics.feed_clients.clone(), metrics.feed_snapshots.clone());
        let requests = Arc::new(RequestHistory::new(config.observe.request_history));
        let body_bytes = metrics.body_bytes.clone();
        Self {
            incarnation: format!("{:016x}", rand::random::<u64>()),
            fleet: Arc::new(fleet),
            failover_memory: MemoryBudget::new(config.retry.failover_max_bytes, None),
            releases: Arc::new(Semaphore::new(MAX_RELEASES)),
            pair_traffic: PairTraffic::default(),
            history: Mutex::default(),
            feed: Arc::new(feed),
            cut,
            sinks: EntrySinks {
                metrics: metrics.clone(),
                requests,
                tracer: None,
            },
            body_memory: MemoryBudget::new(config.limits.max_total_body_bytes, Some(body_bytes)),
            body_threads: BodyThreads::default(),
            metrics,
            admission: AdmissionController::new(&config.limits),
            retry: config.retry(),
            retry_budget: Mutex::new(config.retry_budget()),
            resume_pacer: Mutex::default(),
            poison: Mutex::default(),
            rooms: Arc::new(Mutex::new(LiveRooms::new(MAX_ROOMS))),
            tokens: None,
            draining: AtomicBool::new(false),
            config,
        }
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    pub fn start_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// True if the grace period of a shutdown is over: no request is begun any more.
    pub fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }
}
