//! Fleet of registered workers: their candidates (one per worker, or per DP rank), their load,
//! breakers and policies. Probes, discovery and cache events hold this, not the whole router.
//!
//! The life of a worker:
//!
//! 1. registered by a flag or `POST /workers`: `Starting`; its health task (health.rs) begins to
//!    probe;
//! 2. the first good probe brings its description (DP size, bootstrap port): `Ready`, its
//!    candidates enter the snapshot and the policies are notified;
//! 3. probes fail or a connection is refused: `Unhealthy`, its candidates leave and the policies
//!    forget them, because a restarted worker has an empty cache. A good probe makes it `Ready`
//!    again, with new candidates;
//! 4. another process answers under its address: `Starting`, its candidates and its description are
//!    dropped; the new process describes itself and gets candidates of its own: back to 2;
//! 5. it reports that it drains: `Draining`, its candidates leave; a good probe makes it `Ready`
//!    again;
//! 6. drained by this router: `Leaving`, its candidates leave, it is removed when the last request
//!    in flight has ended;
//! 7. removed: it leaves the snapshot at once; requests in flight hold their candidate and finish.
//!
//! Invariants: a candidate's load is the number of living [`LoadGuard`]s; ids are never used twice;
//! decisions of one role are made one after the other, each seeing the loads of those before.

/// Decisions.
mod decisions;
/// Explanations with the names of workers.
mod explanation;
/// Gauges of workers.
pub(crate) mod metrics;
/// Pairs of workers that fit together.
mod pairing;
/// Inputs of decisions.
pub(crate) mod selection;
/// First probes of new workers.
pub(crate) mod startup_gate;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use baton_text::dialect::prompt_limit::PromptLimit;
use http::{HeaderMap, HeaderValue, Method, Uri, header};
use parking_lot::{Mutex, RwLock};
use router_core::{
    BreakerState, CircuitBreaker, DoubtfulFailure, PairVerdicts, PolicyEvent, PolicySet,
    ProcessSign, RefutedWorker, RequestOutcome, Role, WorkerId,
};
use tokio::sync::{Notify, watch};

use self::startup_gate::StartupGate;
use crate::clock::now_ms;
use crate::config::{RouterConfig, WorkerSpec};
use crate::error::RouteError;
use crate::observability::fleet_feed::events::FleetEvents;
use crate::observability::metrics::RouterMetrics;
use crate::transport::tls_reload::WorkerTls;
use crate::transport::upstream::{ConnectionPool, RequestHead};
use crate::workers::kv_event_status::EventSubscription;
use crate::workers::load_guard::Candidate;
use crate::workers::load_report::{self, LoadReport};
use crate::workers::worker::{Worker, WorkerDescription, WorkerState};

/// Most workers registered at once: registration is open to the network.
const MAX_WORKERS: usize = 4096;

#[derive(Default)]
struct RoleTable {
    /// Held while deciding.
    decision_lock: Mutex<()>,
    candidates: RwLock<Arc<Vec<Arc<Candidate>>>>,
}

impl RoleTable {
    fn list(&self) -> Arc<Vec<Arc<Candidate>>> {
        self.candidates.read().clone()
    }

    /// The candidates that serve this model. Cost: a comparison per candidate, and a copy of the
    /// list if one does not.
    fn list_for(&self, model: Option<&str>) -> Arc<Vec<Arc<Candidate>>> {
        let list = self.list();
        let Some(model) = model else { return list };
        if list.iter().all(|c| c.worker.description().serves(model)) {
            return list;
        }
        Arc::new(
            list.iter()
                .filter(|c| c.worker.description().serves(model))
                .cloned()
                .collect(),
        )
    }
}

pub struct WorkerFleet {
    workers: RwLock<Vec<Arc<Worker>>>,
    pub policy_set: Arc<PolicySet>,
    /// By [`Role::index`].
    tables: [RoleTable; 3],
    /// True if every prefill worker can hand its pages to every decode worker; set under
    /// `changing`.
    all_fit: AtomicBool,
    /// Set once a request could be answered; set under `changing`.
    has_served: AtomicBool,
    changing: Mutex<()>,
    /// Pairs that proved unable to work together, by the ids of their workers.
    pub(super) verdicts: Mutex<PairVerdicts>,
    /// Workers whose tasks have not probed them yet.
    pub startup_gate: StartupGate,
    /// Notified when candidates come or go.
    pub changed: watch::Sender<()>,
    next_worker: AtomicU64,
    next_candidate: AtomicU64,
    next_ticket: AtomicU64,
    pub metrics: Arc<RouterMetrics>,
    /// For the web page.
    pub events: FleetEvents,
    pub config: Arc<RouterConfig>,
    /// Sources of workers that were read once.
    pub discovered: Mutex<BTreeSet<&'static str>>,
    /// For https:// workers.
    tls: Option<WorkerTls>,
    cut: watch::Receiver<bool>,
}

impl WorkerFleet {
    /// `tls`: for https:// workers. `cut` turns true when what still runs is cut.
    pub fn new(
        config: Arc<RouterConfig>,
        metrics: Arc<RouterMetrics>,
        policy_set: PolicySet,
        tls: Option<WorkerTls>,
        cut: watch::Receiver<bool>,
    ) -> Self {
        Self {
            metrics,
            events: FleetEvents::default(),
            next_ticket: AtomicU64::new(1),
            workers: RwLock::default(),
            policy_set: Arc::new(policy_set),
            tables: Default::default(),
            all_fit: AtomicBool::new(true),
            has_served: AtomicBool::new(false),
            changing: Mutex::default(),
            verdicts: Mutex::default(),
            startup_gate: StartupGate::default(),
            changed: watch::Sender::default(),
            next_worker: AtomicU64::new(1),
            next_candidate: AtomicU64::new(1),
            config,
            discovered: Mutex::default(),
            tls,
            cut,
        }
    }

    pub fn is_pd(&self) -> bool {
        self.config.workers.pd_disaggregation
    }

    /// Roles without which nothing can be answered.
    pub fn serving_roles(&self) -> &'static [Role] {
        self.config.workers.serving_roles()
    }

    /// Headers of the router's own requests to workers.
    pub fn worker_headers(&self) -> HeaderMap {
        let key = self.config.listen.api_key.iter();
        let values = key.flat_map(|key| HeaderValue::try_from(format!("Bearer {key}")));
        values.map(|value| (header::AUTHORIZATION, value)).collect()
    }

    /// Head of a request of the router's own.
    pub fn own_request(&self, method: Method, path: &'static str) -> RequestHead {
        RequestHead::new(method, Uri::from_static(path), self.worker_headers())
    }

    /// Register a worker; the caller starts its health task.
    pub fn add(&self, spec: WorkerSpec) -> Result<Arc<Worker>, RouteError> {
        if spec.url.is_tls && self.tls.is_none() {
            let url = &spec.url;
            let problem = format!("{url} asks for TLS; start the router with --ca-cert-paths");
            return Err(RouteError::InvalidValue {
                param: "url",
                problem,
            });
        }
        let mut workers = self.workers.write();
        let is_there =
            |w: &&Arc<Worker>| w.spec.url == spec.url && w.state() != WorkerState::Leaving;
        if let Some(known) = workers.iter().find(is_there) {
            let url = spec.url.to_string();
            let role = known.role();
            let id = known.id;
            return Err(RouteError::DuplicateWorker { url, role, id });
        }
        if workers.len() >= MAX_WORKERS {
            return Err(RouteError::TooManyWorkers { limit: MAX_WORKERS });
        }
        let worker = Arc::new(Worker {
            id: self.next_worker.fetch_add(1, Ordering::Relaxed),
            pool: ConnectionPool::new(spec.url.clone(), self.tls.clone(), self.cut.clone()),
            spec,
            suspect: Notify::new(),
            silent: Notify::new(),
            probe_after: self.config.silent_request_probe(),
            state: watch::Sender::new((WorkerState::Starting { reason: None }, Arc::default())),
            incarnation: Mutex::default(),
            is_replaced: AtomicBool::new(false),
            loads: Mutex::default(),
            activities: Mutex::default(),
            idle: Notify::new(),
            last_break_ms: AtomicU64::new(0),
            health_task: Mutex::default(),
        });
        workers.push(worker.clone());
        self.events
            .add("registered", worker.role(), &worker.url().to_string(), None);
        Ok(worker)
    }

    /// Take a worker out. Requests in flight finish.
    pub fn remove(&self, id: u64) -> Option<Arc<Worker>> {
        let mut workers = self.workers.write();
        let at = workers.iter().position(|w| w.id == id)?;
        let worker = workers.remove(at);
        worker.stop_probes();
        self.replace_candidates(&worker, Vec::new());
        self.events
            .add("removed", worker.role(), &worker.url().to_string(), None);
        Some(worker)
    }

    /// No new requests for this worker; it is removed when those in flight have ended.
    pub fn drain(self: &Arc<Self>, worker: &Arc<Worker>) {
        if !self.set_state(worker, WorkerState::Leaving, None) {
            return; // it leaves already, or was removed
        }
        worker.stop_probes();
        let fleet = Arc::downgrade(self);
        let worker = worker.clone();
        tokio::spawn(async move {
            worker.until_idle().await;
            if let Some(fleet) = fleet.upgrade()
                && fleet.remove(worker.id).is_some()
            {
                tracing::info!(url = %worker.url(), "worker drained and removed");
            }
        });
    }

    pub fn workers(&self) -> Vec<Arc<Worker>> {
        self.workers.read().clone()
    }

    /// Longest context of all workers [tokens]. `None`: there is no worker, or one does not tell.
    pub fn context_tokens(&self) -> Option<u64> {
        let workers = self.workers.read();
        let lengths = workers
            .iter()
            .map(|worker| worker.description().context_length);
        lengths.collect::<Option<Vec<u64>>>()?.into_iter().max()
    }

    /// Longest prompt that some worker of each of `roles` takes, among those that serve `model`
    /// (`None`: any). `None`: a worker that may take the request announces no limit, or has not
    /// described itself yet.
    pub fn prompt_limit(&self, roles: &[Role], model: Option<&str>) -> Option<PromptLimit> {
        let workers = self.workers.read();
        let of_role = |role: Role| {
            let eligible = workers.iter().filter(|worker| {
                let is_out = matches!(
                    worker.state(),
                    WorkerState::Rejected { .. } | WorkerState::Leaving
                );
                let serves = |model| worker.description().serves(model);
                worker.role() == role && !is_out && model.is_none_or(serves)
            });
            let limits = eligible.map(|worker| worker.description().prompt_limit());
            let limits: Option<Vec<PromptLimit>> = limits.collect();
            limits?.into_iter().reduce(PromptLimit::or)
        };
        let limits: Option<Vec<PromptLimit>> = roles.iter().map(|role| of_role(*role)).collect();
        limits?.into_iter().reduce(PromptLimit::and)
    }

    pub fn worker(&self, id: u64) -> Option<Arc<Worker>> {
        self.workers.read().iter().find(|w| w.id == id).cloned()
    }

    pub fn candidates(&self) -> Vec<Arc<Candidate>> {
        self.tables
            .iter()
            .flat_map(|table| table.list().to_vec())
            .collect()
    }

    /// A worker's candidates, by rank.
    pub fn candidates_at(&self, worker: &Worker) -> Vec<Arc<Candidate>> {
        let list = self.table(worker.role()).list();
        list.iter()
            .filter(|c| c.worker.id == worker.id)
            .cloned()
            .collect()
    }

    /// True if a worker of this role is registered that serves, or may serve again.
    pub fn may_return(&self, role: Role) -> bool {
        let workers = self.workers.read();
        let mut of_role = workers.iter().filter(|w| w.role() == role);
        of_role.any(|w| {
            !matches!(
                w.state(),
                WorkerState::Rejected { .. } | WorkerState::Leaving
            )
        })
    }

    /// True if this role has workers ready, and no registered one serves the model.
    pub fn lacks_model(&self, role: Role, model: &str) -> bool {
        let workers = self.workers.read();
        let of_role = || workers.iter().filter(|w| w.role() == role);
        let may_serve = |w: &Arc<Worker>| w.is_replaced() || w.description().serves(model);
        of_role().any(|w| w.is_ready()) && !of_role().any(may_serve)
    }

    /// (known, ready) workers of a role.
    pub fn count(&self, role: Role) -> (usize, usize) {
        let workers = self.workers.read();
        let known = workers.iter().filter(|w| w.role() == role);
        known.fold((0, 0), |(known, ready), w| {
            (known + 1, ready + usize::from(w.is_ready()))
        })
    }

    /// The only place where a worker changes state, or a ready one is described as another process.
    /// Candidates and policies follow. False: nothing changed.
    pub fn set_state(
        &self,
        worker: &Arc<Worker>,
        state: WorkerState,
        description: Option<WorkerDescription>,
    ) -> bool {
        // Holding the list keeps a removal from crossing with this: a removed worker stays out.
        let workers = self.workers.read();
        if !workers.iter().any(|w| w.id == worker.id) {
            return false;
        }
        let mut old_label = "";
        let mut is_other_process = false;
        let is_changed = worker.state.send_if_modified(|present| {
            if present.0 == WorkerState::Leaving {
                return false;
            }
            old_label = present.0.label();
            is_other_process = description
                .as_ref()
                .is_some_and(|new| !new.is_of_same_process(&present.1));
            if let Some(description) = description {
                present.1 = Arc::new(description);
            }
            let is_other_state = std::mem::replace(&mut present.0, state.clone()) != state;
            is_other_state || (is_other_process && state == WorkerState::Ready)
        });
        if !is_changed {
            return false;
        }
        if is_other_process || !state.reports_load() {
            worker.forget_activity();
        }
        let candidates = match &state {
            WorkerState::Ready => self.candidates_of(worker),
            _ => Vec::new(),
        };
        let role = worker.role();
        let url = worker.url();
        if old_label != state.label() {
            let detail = state.reason().map(str::to_owned);
            self.events
                .add(state.label(), role, &url.to_string(), detail);
        }
        match &state {
            WorkerState::Ready => {
                tracing::info!(%url, %role, ranks = candidates.len(), "worker is ready");
            }
            WorkerState::Draining => {
                tracing::info!(%url, %role, in_flight = worker.load(), "worker reports that it drains");
            }
            WorkerState::Leaving => {
                tracing::info!(%url, %role, in_flight = worker.load(), "worker drains and leaves");
            }
            WorkerState::Starting { reason } => {
                tracing::warn!(%url, %role, reason, "worker is not up yet; still trying");
            }
            _ => {
                let reason = state.reason().unwrap_or_default();
                tracing::warn!(%url, %role, state = state.label(), reason, "worker is out");
            }
        }
        self.replace_candidates(worker, candidates);
        true
    }

    /// DP ranks of a worker that reports its load; `None` stands for the whole worker where ranks
    /// are not distinguished.
    pub fn ranks_of(&self, worker: &Worker) -> Vec<Option<u32>> {
        if self.config.workers.is_dp_aware() {
            (0..worker.description().dp_size()).map(Some).collect()
        } else {
            vec![None]
        }
    }

    fn candidates_of(&self, worker: &Arc<Worker>) -> Vec<Arc<Candidate>> {
        let description = worker.description();
        let fingerprint = description.fingerprint();
        let candidate = |rank: Option<u32>| Candidate {
            id: WorkerId(self.next_candidate.fetch_add(1, Ordering::Relaxed)),
            name: match rank {
                Some(rank) => format!("{}@{rank}", worker.url()),
                None => worker.url().to_string(),
            },
            worker: worker.clone(),
            description: description.clone(),
            rank,
            fingerprint,
            host: worker.host_number(),
            load: worker.load_of(rank),
            breaker: self
                .config
                .breaker()
                .map(CircuitBreaker::new)
                .map(Mutex::new),
            penalty: Mutex::default(),
            activity: worker.activity_of(rank),
            feed: EventSubscription::default(),
        };
        self.ranks_of(worker)
            .into_iter()
            .map(|rank| Arc::new(candidate(rank)))
            .collect()
    }

    /// Put `new` in the place of all candidates of `worker`.
    fn replace_candidates(&self, worker: &Arc<Worker>, new: Vec<Arc<Candidate>>) {
        self.swap_candidates(worker, new);
        let _one = self.changing.lock();
        let [regular, p_list, d_list] = self.tables.each_ref().map(RoleTable::list);
        if !regular.is_empty() || self.has_pair() {
            self.has_served.store(true, Ordering::Relaxed);
        }
        let fits_all = |p: &Arc<Candidate>| {
            d_list
                .iter()
                .all(|d| p.fingerprint.is_compatible(&d.fingerprint))
        };
        self.all_fit
            .store(p_list.iter().all(fits_all), Ordering::Relaxed);
        self.changed.send_replace(());
    }

    fn swap_candidates(&self, worker: &Arc<Worker>, new: Vec<Arc<Candidate>>) {
        let role = worker.role();
        let table = self.table(role);
        let _lock = table.decision_lock.lock();
        let mut shared = table.candidates.write();
        let (gone, mut list): (Vec<_>, Vec<_>) = shared
            .iter()
            .cloned()
            .partition(|c| c.worker.id == worker.id);
        if !gone.is_empty() {
            // Another process may answer now, with other keys.
            self.verdicts.lock().forget_worker(worker.id);
        }
        for candidate in gone {
            candidate.feed.stop();
            self.policy_set.observe(
                role,
                &PolicyEvent::WorkerGone {
                    worker: candidate.id,
                },
            );
        }
        for candidate in &new {
            self.policy_set
                .add_worker(role, candidate.id, candidate.facts(), &candidate.name);
        }
        list.extend(new);
        // By address, so that round robin's order does not depend on who became ready first.
        list.sort_by_key(|c| (c.worker.id, c.rank));
        *shared = Arc::new(list);
    }

    /// Take in a worker's load reports, one per rank; returns whether any was used. A draining
    /// worker has no candidates: its reports are for the web page alone.
    pub fn loads_reported(&self, worker: &Worker, reports: &[LoadReport]) -> bool {
        let candidates = self.candidates_at(worker);
        let mut is_used = false;
        for rank in self.ranks_of(worker) {
            let report = match rank {
                Some(rank) => reports.iter().find(|report| report.rank == rank).copied(),
                None => load_report::sum(reports),
            };
            let Some(report) = report else { continue };
            match candidates.iter().find(|candidate| candidate.rank == rank) {
                Some(candidate) => candidate.take_report(report, &self.policy_set),
                None => worker.activity_of(rank).lock().reported(report, now_ms()),
            }
            is_used = true;
        }
        is_used
    }

    /// Policies forget all prompts: the workers' caches were flushed.
    pub fn forget_prompts(&self) {
        for role in Role::ALL {
            let table = self.table(role);
            let _lock = table.decision_lock.lock();
            for candidate in table.candidates.read().iter() {
                let worker = candidate.id;
                let facts = candidate.facts();
                self.policy_set
                    .observe(role, &PolicyEvent::WorkerGone { worker });
                self.policy_set
                    .add_worker(role, worker, facts, &candidate.name);
            }
        }
    }

    /// True from the first moment on at which ready workers could answer a request.
    pub fn has_served(&self) -> bool {
        self.has_served.load(Ordering::Relaxed)
    }

    fn table(&self, role: Role) -> &RoleTable {
        &self.tables[role.index()]
    }

    /// A doubtful failure was not the request's fault: another worker answered it.
    pub fn blame_refuted(&self, refuted: RefutedWorker) {
        match refuted.failure {
            DoubtfulFailure::Error => self.count_failure(refuted.role, refuted.worker),
            DoubtfulFailure::Denial => {
                let candidates = self.table(refuted.role).list();
                if let Some(denier) = candidates.iter().find(|c| c.id == refuted.worker) {
                    denier.penalty.lock().record_refuted_denial(now_ms());
                }
            }
        }
    }

    /// A failure of this worker was not the request's fault.
    pub fn count_failure(&self, role: Role, id: WorkerId) {
        if let Some(candidate) = self.table(role).list().iter().find(|c| c.id == id) {
            candidate.count(RequestOutcome::Failure);
        }
    }

    /// An answer of this worker contradicts its description.
    pub fn contradicted(&self, role: Role, id: WorkerId) {
        if let Some(candidate) = self.table(role).list().iter().find(|c| c.id == id) {
            candidate.worker.observe_process(ProcessSign::Contradicted);
        }
    }

    /// The worker denied a request. Returns whether that may be its own fault rather than the
    /// request's.
    pub fn judge_denial(&self, role: Role, id: WorkerId) -> bool {
        let candidates = self.table(role).list();
        let now_ms = now_ms();
        let others = candidates.iter().filter(|c| c.id != id);
        let others = others.map(|c| c.penalty.lock().denial_share(now_ms)).sum();
        let denier = candidates.iter().find(|c| c.id == id);
        denier.is_some_and(|c| c.penalty.lock().judge_denial(others, now_ms))
    }

    /// Candidates of this role whose circuit is open.
    pub fn open_circuits(&self, role: Role) -> usize {
        let candidates = self.table(role).list();
        let is_open = |c: &&Arc<Candidate>| c.circuit() == BreakerState::Open;
        candidates.iter().filter(is_open).count()
    }

    /// The worst circuit of a worker's candidates, and the longest time one of them is still passed
    /// over [ms].
    pub fn objections_to(&self, worker: &Worker) -> (BreakerState, u64) {
        let mut circuit = BreakerState::Closed;
        let mut left_ms = 0;
        for candidate in self.candidates_at(worker) {
            circuit = circuit.max(candidate.circuit());
            left_ms = left_ms.max(candidate.penalty.lock().left_ms(now_ms()));
        }
        (circuit, left_ms)
    }

    /// While one of these roles has no worker ready and a worker was not asked yet: wait for that,
    /// a second at most. Returns true if there was something to wait for.
    pub async fn wait_for_first_probes(&self, roles: &[Role]) -> bool {
        let is_settled = || roles.iter().all(|role| self.count(*role).1 > 0);
        self.startup_gate
            .wait_unless(is_settled, &self.changed)
            .await
    }
}
