//! Snapshot of the fleet, as the web page shows it. Reads the state of the router; sends no worker
//! a request.

use serde::Serialize;

use crate::clock::{now_ms, unix_time};
use crate::dispatch::app::AppState;
use crate::observability::fleet_feed::events::FleetEvent;
use crate::observability::fleet_feed::history::{HistoryColumns, SPAN};
use crate::observability::fleet_feed::pair_traffic::PairRecord;
use crate::workers::activity::TokenRates;
use crate::workers::worker::Worker;

/// Most workers shown: a page of more rows is of no use, and each costs about 400 bytes per second
/// and page.
const MAX_NODES: usize = 512;
/// Most pairs shown.
const MAX_PAIRS: usize = 1024;
/// Requests in each list.
const LISTED_REQUESTS: usize = 16;

#[derive(Serialize)]
pub struct FleetSnapshot {
    version: &'static str,
    /// Id of the router's process.
    incarnation: String,
    at_unix_ms: u64,
    /// Prefill and decode workers, rather than regular ones.
    is_disaggregated: bool,
    pub is_draining: bool,
    /// Waiting for a place of --max-concurrent-requests, or for a worker.
    queued_requests: u64,
    nodes: Vec<NodeView>,
    /// Workers beyond `MAX_NODES`.
    nodes_left_out: usize,
    pairs: Vec<PairView>,
    events: Vec<FleetEvent>,
    /// The youngest ones.
    requests: Vec<serde_json::Value>,
    /// The youngest ones that ended with an error.
    failed_requests: Vec<serde_json::Value>,
    /// Those of the history's span that waited longest for their first byte.
    slow_requests: Vec<serde_json::Value>,
    history: HistoryColumns,
}

#[derive(Serialize)]
struct NodeView {
    id: String,
    url: String,
    role: &'static str,
    state: &'static str,
    reason: Option<String>,
    circuit: &'static str,
    /// Other ready workers that could take its requests.
    ready_peers: usize,
    /// Requests in flight, as the router counts them.
    load: usize,
    model: Option<String>,
    version: Option<String>,
    ranks: Vec<RankView>,
}

/// DP rank, or the whole worker where the router does not tell ranks apart.
#[derive(Serialize)]
struct RankView {
    rank: Option<u32>,
    load: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    report: Option<ReportView>,
    #[serde(flatten)]
    rates: Option<TokenRates>,
}

/// Last report of the rank.
#[derive(Serialize)]
struct ReportView {
    age_ms: u64,
    /// Prompt tokens still to compute.
    queued_tokens: u64,
    queued_requests: Option<u64>,
    kv_pages: Option<u64>,
    kv_pages_used: Option<u64>,
    /// Those of them that windows, chunks and states take.
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_further_pages: Option<u64>,
}

#[derive(Serialize)]
struct PairView {
    prefill: String,
    decode: String,
    #[serde(flatten)]
    record: PairRecord,
    bytes_per_s: Option<f64>,
}

impl FleetSnapshot {
    pub fn of(app: &AppState) -> Self {
        let workers = app.fleet.workers();
        let now_ms = now_ms();
        let nodes = workers.iter().take(MAX_NODES);
        let is_registered = |id| workers.iter().any(|worker| worker.id == id);
        let pairs = app.pair_traffic.snapshot(is_registered).into_iter();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            incarnation: app.incarnation.clone(),
            at_unix_ms: unix_time().as_millis() as u64,
            is_disaggregated: app.fleet.is_pd(),
            is_draining: app.is_draining(),
            queued_requests: app.metrics.queued.get() as u64,
            nodes: nodes
                .map(|worker| NodeView::of(app, worker, now_ms))
                .collect(),
            nodes_left_out: workers.len().saturating_sub(MAX_NODES),
            pairs: pairs.take(MAX_PAIRS).map(PairView::of).collect(),
            events: app.fleet.events.recent(),
            requests: app.sinks.requests.recent(LISTED_REQUESTS),
            failed_requests: app.sinks.requests.failed(LISTED_REQUESTS),
            slow_requests: app.sinks.requests.slowest(LISTED_REQUESTS, SPAN),
            history: app.history.lock().columns(),
        }
    }
}

impl NodeView {
    fn of(app: &AppState, worker: &Worker, now_ms: u64) -> Self {
        let state = worker.state();
        let description = worker.description();
        let incompatibility = || app.fleet.incompatibility(worker);
        let ranks = if state.reports_load() {
            app.fleet.ranks_of(worker)
        } else {
            Vec::new()
        };
        Self {
            id: worker.id.to_string(),
            url: worker.url().to_string(),
            role: worker.role().into_str(),
            state: state.label(),
            reason: state.reason().map(str::to_owned).or_else(incompatibility),
            circuit: app.fleet.objections_to(worker).0.into_str(),
            ready_peers: app.fleet.ready_peers(worker),
            load: worker.load(),
            model: description.served_model_name.clone(),
            version: description.version.clone(),
            ranks: ranks
                .into_iter()
                .map(|rank| RankView::of(worker, rank, now_ms))
                .collect(),
        }
    }
}

impl RankView {
    fn of(worker: &Worker, rank: Option<u32>, now_ms: u64) -> Self {
        let activity = worker.activity_of(rank);
        let activity = activity.lock();
        let report = activity.last(now_ms).map(|(report, age_ms)| ReportView {
            age_ms,
            queued_tokens: report.queued_tokens,
            queued_requests: report.queued_requests,
            kv_pages: report.running.map(|running| running.pages),
            kv_pages_used: report.running.map(|running| running.pages_used),
            kv_further_pages: report.further_pages,
        });
        Self {
            rank,
            load: worker.load_at(rank),
            report,
            rates: activity.rates,
        }
    }
}

impl PairView {
    fn of(((prefill, decode), record): ((u64, u64), PairRecord)) -> Self {
        let prefill = prefill.to_string();
        let decode = decode.to_string();
        Self {
            prefill,
            decode,
            bytes_per_s: record.bytes_per_s(),
            record,
        }
    }
}
