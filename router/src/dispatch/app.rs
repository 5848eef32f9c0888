//! State that the request path shares: one value, made at start, behind an `Arc`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use router_core::{Deciders, LiveRooms, PoisonList, ResumePacer, RetryBudget, RetryConfig};
use tokio::sync::{Semaphore, oneshot, watch};

use crate::config::RouterConfig;
use crate::observability::access_log::RecordSinks;
use crate::observability::feed_hub::FeedHub;
use crate::observability::metrics::Metrics;
use crate::observability::pair_traffic::PairTraffic;
use crate::observability::request_timeline::Requests;
use crate::request::admission::Admission;
use crate::request::body_memory::BodyMemory;
use crate::request::body_threads::BodyThreads;
use crate::request::tokenize::Tokens;
use crate::response::failover;
use crate::transport::tls_reload::WorkerTls;
use crate::workers::fleet::WorkerFleet;

const MOST: usize = 64;

/// Places for those that are told now.
pub struct Releases(pub Arc<Semaphore>);

impl Default for Releases {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST)))
    }
}

/// Most bootstrap rooms in use at once, of all requests together: 16 MiB.
const MAX_ROOMS: usize = 1 << 20;

/// Everything the request path shares.
pub struct App {
    pub config: Arc<RouterConfig>,
    pub fleet: Arc<WorkerFleet>,
    pub metrics: Arc<Metrics>,
    pub admission: Admission,
    pub body_memory: Arc<BodyMemory>,
    pub body_threads: BodyThreads,
    pub retry: RetryConfig,
    pub retry_budget: Mutex<RetryBudget>,
    pub resume_pacer: Mutex<ResumePacer<oneshot::Sender<()>>>,
    /// Bodies that broke workers.
    pub poison: Mutex<PoisonList>,
    /// Bootstrap rooms of requests in flight.
    pub rooms: Arc<Mutex<LiveRooms>>,
    /// `None`: prompts are counted in characters.
    pub tokens: Option<Arc<Tokens>>,
    /// Timelines of requests, and where records go.
    pub sinks: RecordSinks,
    /// Memory held for failovers.
    pub failover_memory: Arc<failover::Memory>,
    pub releases: Releases,
    /// KV traffic by pair, for the web page.
    pub pair_traffic: PairTraffic,
    /// Web pages that show the fleet.
    pub feed: Arc<FeedHub>,
    /// Turns true when what still runs is cut.
    pub cut: watch::Receiver<bool>,
    draining: AtomicBool,
}

impl App {
    pub fn new(
        config: RouterConfig,
        metrics: Arc<Metrics>,
        deciders: Deciders,
        tls: Option<WorkerTls>,
        cut: watch::Receiver<bool>,
    ) -> Self {
        let config = Arc::new(config);
        Self {
            fleet: Arc::new(WorkerFleet::new(
                config.clone(),
                metrics.clone(),
                deciders,
                tls,
                cut.clone(),
            )),
            failover_memory: Arc::new(failover::Memory::new(config.retry.failover_max_bytes)),
            releases: Releases::default(),
            pair_traffic: PairTraffic::default(),
            feed: Arc::new(FeedHub::new(
                metrics.feed_clients.clone(),
                metrics.feed_snapshots.clone(),
            )),
            cut,
            sinks: RecordSinks {
                metrics: metrics.clone(),
                requests: Arc::new(Requests::new(config.observe.request_history)),
                tracer: None,
            },
            body_memory: BodyMemory::new(
                config.limits.max_total_body_bytes,
                metrics.body_bytes.clone(),
            ),
            body_threads: BodyThreads::default(),
            metrics,
            admission: Admission::new(&config.limits),
            retry: config.retry(),
            retry_budget: Mutex::new(RetryBudget::new(config.retry_budget())),
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

    /// The grace of a shutdown is over: nothing is begun any more.
    pub fn is_cut(&self) -> bool {
        *self.cut.borrow()
    }
}
