//! A worker: its state, its description, its running requests.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use baton_text::dialect::Dialect;
use baton_text::dialect::prompt_limit::PromptLimit;
use parking_lot::Mutex;
use router_core::{
    DescribedProcess, DescriptionTrust, IncarnationWatch, ProcessSign, QueueOrder, Role,
    WorkerBreak, WorkerFacts, WorkerFingerprint,
};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::clock::now_ms;
use crate::config::{BootstrapPort, MAX_DP_SIZE, WorkerSpec, WorkerUrl};
use crate::transport::upstream::ConnectionPool;
use crate::workers::activity::WorkerActivity;
use crate::workers::kv_event_status::{RankState, lenient};

/// Connections that break within this time have one cause: the worker's end.
const SAME_BREAK_MS: u64 = 1_000;

#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum WorkerState {
    /// The worker's process has not described itself: registered and never healthy yet, or
    /// restarted. `reason`: how its last probe failed.
    Starting { reason: Option<String> },
    /// Gets requests.
    Ready,
    /// Probes fail. `is_hung`: they get no answer at all, as requests will not either.
    Unhealthy { reason: String, is_hung: bool },
    /// Answers, but cannot do what it was registered for.
    Rejected { reason: String },
    /// The worker reports that it drains: no new requests until it reports that it is ready again.
    Draining,
    /// This router drains it: no new requests, removed when those in flight have ended. There is no
    /// way back.
    #[strum(serialize = "draining")]
    Leaving,
}

impl WorkerState {
    pub fn label(&self) -> &'static str {
        self.into()
    }

    /// A good probe makes it serve: it never has, or it is out for a reason that may have ended.
    pub fn awaits_admission(&self) -> bool {
        matches!(
            self,
            Self::Starting { .. } | Self::Rejected { .. } | Self::Draining
        )
    }

    /// True if it reports its load: it serves requests, or finishes those it has.
    pub fn reports_load(&self) -> bool {
        matches!(self, Self::Ready | Self::Draining | Self::Leaving)
    }

    /// Source of a drain, for GET /workers.
    pub fn drained_by(&self) -> Option<&'static str> {
        match self {
            Self::Draining => Some("worker"),
            Self::Leaving => Some("router"),
            _ => None,
        }
    }

    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Ready | Self::Draining | Self::Leaving => None,
            Self::Starting { reason } => reason.as_deref(),
            Self::Unhealthy { reason, .. } | Self::Rejected { reason } => Some(reason),
        }
    }
}

/// Description of a worker's process from /get_server_info. All of it is optional: SGLang and mocks
/// report less.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct WorkerDescription {
    /// "baton" for ours, which serve GET /v1/loads as docs/protocol.md has it; "vllm" is concluded
    /// (health.rs).
    pub engine: Option<String>,
    /// Id of the process, drawn at its start; only ours state one.
    #[serde(default, deserialize_with = "lenient")]
    pub incarnation: Option<String>,
    /// SGLang's, drawn at each start unless a flag gives it: another one is another process.
    #[serde(default, deserialize_with = "lenient")]
    pub random_seed: Option<i64>,
    pub dp_size: Option<u32>,
    pub disaggregation_mode: Option<String>,
    pub disaggregation_bootstrap_port: Option<u16>,
    pub page_size: Option<u64>,
    /// KV slots of one rank.
    pub max_total_num_tokens: Option<u64>,
    /// What travels with each prompt beside its tokens' pages, as so many tokens. Only our engines
    /// report it.
    #[serde(default, deserialize_with = "lenient")]
    pub state_tokens: Option<u64>,
    /// Longest prompt with its answer [tokens].
    #[serde(default, deserialize_with = "lenient")]
    pub context_length: Option<u64>,
    /// Longest text of a prompt, whatever its tokens [characters].
    #[serde(default, deserialize_with = "lenient")]
    pub max_prompt_chars: Option<u64>,
    /// Flag of the queue order; may be `auto`.
    pub schedule_policy: Option<String>,
    /// Queue order that the flag stands for on this worker. Only our engines report it.
    #[serde(default, deserialize_with = "lenient")]
    pub schedule_policy_resolved: Option<String>,
    pub disable_radix_cache: Option<bool>,
    /// SGLang's: its decode workers have no radix cache without it.
    pub disaggregation_decode_enable_radix_cache: Option<bool>,
    /// Fingerprint of its tokenizer and chat template (tokenize/files.rs).
    pub tokenizer_fingerprint: Option<String>,
    /// By rank.
    #[serde(default, deserialize_with = "lenient")]
    pub internal_states: Vec<RankState>,
    /// SGLang's flag.
    #[serde(default, deserialize_with = "lenient")]
    pub kv_events_config: Option<String>,
    pub served_model_name: Option<String>,
    pub model_path: Option<String>,
    /// All names under which ours take requests.
    pub served_model_names: Vec<String>,
    pub version: Option<String>,
    /// Ours tell what a partner must have in common with them; see
    /// `router_core::FINGERPRINT_FIELDS`.
    pub fingerprint: BTreeMap<String, String>,
    /// Features that a router may rely on; only ours report them (docs/protocol.md §2).
    pub baton_features: Vec<String>,
    /// APIs whose paths it does not have. Probed (health.rs), not reported.
    #[serde(skip)]
    pub missing_apis: Vec<Dialect>,
}

impl WorkerDescription {
    pub fn fingerprint(&self) -> WorkerFingerprint {
        WorkerFingerprint::from_values(|aspect| self.aspect(aspect))
    }

    /// True if it takes requests that ask for `model`; one that names no model takes any.
    /// `NAME:ADAPTER` asks SGLang for a LoRA adapter of the model NAME.
    pub fn serves(&self, model: &str) -> bool {
        let single = [&self.served_model_name, &self.model_path].into_iter();
        let mut names = self
            .served_model_names
            .iter()
            .chain(single.flatten())
            .peekable();
        let is_of = |name: &String| {
            let rest = model.strip_prefix(name.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
        };
        names.peek().is_none() || names.any(is_of)
    }

    /// True if nothing has changed but the names of its models, to which a running process may add
    /// LoRA adapters. Names of which none has stayed are another model's.
    pub fn is_of_same_process(&self, other: &Self) -> bool {
        let ours = &self.served_model_names;
        let theirs = &other.served_model_names;
        let shares_names =
            ours.is_empty() || theirs.is_empty() || ours.iter().any(|name| theirs.contains(name));
        let other_with_own_names = Self {
            served_model_names: ours.clone(),
            ..other.clone()
        };
        shares_names && *self == other_with_own_names
    }

    /// True for Baton's engines, which serve GET /v1/loads in our form: a worker of another make
    /// that has the path means something else by it.
    pub fn is_baton(&self) -> bool {
        self.engine.as_deref() == Some("baton")
    }

    pub fn is_vllm(&self) -> bool {
        self.engine.as_deref() == Some("vllm")
    }

    /// True if it does not have the path of this API.
    pub fn lacks_api(&self, dialect: Dialect) -> bool {
        self.missing_apis.contains(&dialect)
    }

    /// True if it can do something of docs/protocol.md §2.
    pub fn has_feature(&self, name: &str) -> bool {
        self.baton_features.iter().any(|feature| feature == name)
    }

    /// True if it takes token ids beside a body, and would have come to the same.
    pub fn takes_ids_of(&self, fingerprint: &str) -> bool {
        self.is_baton() && self.tokenizer_fingerprint.as_deref() == Some(fingerprint)
    }

    pub fn dp_size(&self) -> u32 {
        self.dp_size.unwrap_or(1).clamp(1, MAX_DP_SIZE)
    }

    /// Order in which the worker takes waiting prompts. Engines that report `auto` and no resolved
    /// order are earlier builds of ours, where `auto` is srpt-aging on a prefill node.
    fn queue_order(&self, role: Role) -> QueueOrder {
        let reported = self.schedule_policy_resolved.as_ref();
        let policy = reported.or(self.schedule_policy.as_ref());
        match (policy.map(String::as_str), role) {
            (Some("srpt-aging" | "short-first"), _) | (Some("auto"), Role::Prefill) => {
                QueueOrder::ShortestFirst
            }
            _ => QueueOrder::Arrival,
        }
    }

    /// Facts for policies of a worker of this role.
    pub(super) fn facts(&self, role: Role, topology: Option<&str>) -> WorkerFacts {
        let is_sglang_decode =
            self.engine.is_none() && self.disaggregation_mode.as_deref() == Some("decode");
        let has_decode_cache = self.disaggregation_decode_enable_radix_cache == Some(true);
        WorkerFacts {
            is_cacheless: self.disable_radix_cache == Some(true)
                || (is_sglang_decode && !has_decode_cache),
            capacity_tokens: self.max_total_num_tokens.filter(|tokens| *tokens > 0),
            order: self.queue_order(role),
            domain: topology.map(number_of),
            state_tokens: self.state_tokens.unwrap_or(0),
        }
    }

    /// Longest prompt that the worker takes, if it announces one.
    pub fn prompt_limit(&self) -> Option<PromptLimit> {
        PromptLimit::of(self.context_length, self.max_prompt_chars)
    }

    /// Value that it reports under `aspect`. SGLang's workers report their page size, if nothing
    /// else.
    pub fn aspect(&self, aspect: &str) -> Option<String> {
        let size = || self.page_size.map(|size| size.to_string());
        let reported = self.fingerprint.get(aspect).cloned();
        reported.or_else(|| (aspect == "page_size").then(size).flatten())
    }
}

pub struct Worker {
    /// Name in /workers.
    pub id: u64,
    pub spec: WorkerSpec,
    pub pool: Arc<ConnectionPool>,
    /// Notified when a request met a refused or broken connection: probe now.
    pub suspect: Notify,
    /// Notified when a request has waited for its answer for `--silent-request-probe-secs`, or a
    /// stream that could be resumed has paused (`dispatch::proxy_body`): probe soon.
    pub silent: Notify,
    /// Time without an answer after which it is probed; `None`: never.
    pub(super) probe_after: Option<Duration>,
    pub(super) state: watch::Sender<(WorkerState, Arc<WorkerDescription>)>,
    /// Trust in the description, and the process that it is of.
    pub(super) incarnation: Mutex<IncarnationWatch>,
    /// Set while another process answers than the one that described itself.
    pub(super) is_replaced: AtomicBool,
    /// Requests in flight by rank. Kept while the worker is out: what still runs on it counts when
    /// it returns.
    pub(super) loads: Mutex<BTreeMap<u32, Arc<AtomicUsize>>>,
    /// Last reports by rank. Kept while the worker drains, forgotten when it is out.
    pub(super) activities: Mutex<BTreeMap<u32, Arc<Mutex<WorkerActivity>>>>,
    /// Notified when the load of a rank falls to 0.
    pub(super) idle: Notify,
    /// When a request's connection last broke here; 0: never.
    pub(super) last_break_ms: AtomicU64,
    /// Ends with the worker.
    pub(super) health_task: Mutex<JoinSet<()>>,
}

impl Worker {
    pub fn url(&self) -> &WorkerUrl {
        &self.spec.url
    }

    pub fn role(&self) -> Role {
        self.spec.role
    }

    pub fn state(&self) -> WorkerState {
        self.state.borrow().0.clone()
    }

    pub fn description(&self) -> Arc<WorkerDescription> {
        self.state.borrow().1.clone()
    }

    /// True if it gets requests.
    pub fn is_ready(&self) -> bool {
        !self.is_replaced() && self.state.borrow().0 == WorkerState::Ready
    }

    /// Waits until health checks find the worker hung; returns what they found. Forever for a
    /// worker that is well.
    async fn until_hung(&self) -> String {
        let mut state = self.state.subscribe();
        let is_hung = |state: &(WorkerState, _)| {
            matches!(state.0, WorkerState::Unhealthy { is_hung: true, .. })
        };
        let hung = state
            .wait_for(is_hung)
            .await
            .expect("the sender lives as long as `self`");
        hung.0.reason().unwrap_or_default().to_owned()
    }

    /// `answering`, or the finding of the health checks if they find the worker hung before. While
    /// it takes long, a probe is asked for once in `probe_after`: a worker that is only slow
    /// answers it.
    pub async fn unless_hung<T>(&self, answering: impl Future<Output = T>) -> Result<T, String> {
        let asking_for_probes = async {
            let Some(pause) = self.probe_after else {
                return std::future::pending().await;
            };
            loop {
                sleep(pause).await;
                self.silent.notify_one();
            }
        };
        tokio::select! {
            biased;
            answer = answering => Ok(answer),
            cause = self.until_hung() => Err(cause),
            never = asking_for_probes => never,
        }
    }

    /// Take in a sign of the process that answers at the worker's address. When it is another one
    /// than the one that described itself, the worker gets no new requests until that one has, and
    /// is probed at once.
    pub fn observe_process(&self, sign: ProcessSign<'_>) -> DescriptionTrust {
        let mut watch = self.incarnation.lock();
        let had_trust = watch.trust() != DescriptionTrust::Missing;
        let trust = watch.observe(sign);
        if had_trust && trust == DescriptionTrust::Missing {
            self.is_replaced.store(true, Ordering::Relaxed);
            self.suspect.notify_one();
        }
        trust
    }

    /// The process that answers at its address has described itself.
    pub(super) fn process_described(&self, process: DescribedProcess) {
        let mut watch = self.incarnation.lock();
        watch.record_description(process, now_ms());
        self.is_replaced.store(false, Ordering::Relaxed);
    }

    /// True while another process answers than the one that described itself.
    pub fn is_replaced(&self) -> bool {
        self.is_replaced.load(Ordering::Relaxed)
    }

    /// True if it is to describe itself with its next good probe.
    pub(super) fn is_description_due(&self) -> bool {
        self.incarnation.lock().is_due(now_ms())
    }

    /// JSON `bootstrap_port` for requests prefilled by the process of this description; `None` for
    /// workers that prefill for no other, whatever they report.
    pub fn bootstrap_port(&self, description: &WorkerDescription) -> Option<u16> {
        match self.spec.bootstrap {
            _ if self.role() != Role::Prefill => None,
            BootstrapPort::Port(port) => Some(port),
            BootstrapPort::Null => None,
            BootstrapPort::FromWorker => description.disaggregation_bootstrap_port,
        }
    }

    /// Requests in flight to all its ranks.
    pub fn load(&self) -> usize {
        self.loads
            .lock()
            .values()
            .map(|load| load.load(Ordering::Relaxed))
            .sum()
    }

    /// Note that the worker broke with a request in hand. The request was alone if no other is in
    /// flight, or broke a moment before.
    pub fn note_break(&self, now_ms: u64) -> WorkerBreak {
        let before_ms = self.last_break_ms.swap(now_ms, Ordering::Relaxed);
        let is_first = before_ms == 0 || now_ms >= before_ms + SAME_BREAK_MS;
        if self.load() <= 1 && is_first {
            WorkerBreak::Alone
        } else {
            WorkerBreak::InCompany
        }
    }

    pub(super) fn stop_probes(&self) {
        self.health_task.lock().abort_all();
    }

    /// Wait until nothing is in flight.
    pub async fn until_idle(&self) {
        loop {
            // Made before looking: it is woken by what happens from here on.
            let is_idle = self.idle.notified();
            if self.load() == 0 {
                return;
            }
            is_idle.await;
        }
    }

    pub(super) fn load_of(&self, rank: Option<u32>) -> Arc<AtomicUsize> {
        self.loads
            .lock()
            .entry(rank.unwrap_or(0))
            .or_default()
            .clone()
    }

    /// Requests in flight to `rank`; to the whole worker where ranks are not distinguished.
    pub fn load_at(&self, rank: Option<u32>) -> usize {
        self.load_of(rank).load(Ordering::Relaxed)
    }

    /// Last report of `rank`; of the whole worker where ranks are not distinguished.
    pub fn activity_of(&self, rank: Option<u32>) -> Arc<Mutex<WorkerActivity>> {
        self.activities
            .lock()
            .entry(rank.unwrap_or(0))
            .or_default()
            .clone()
    }

    pub(super) fn forget_activity(&self) {
        self.activities.lock().clear();
    }

    /// Workers with the same number are on one machine, as far as their addresses tell.
    pub(super) fn host_number(&self) -> u32 {
        number_of(&self.spec.url.host)
    }
}

fn number_of(name: &str) -> u32 {
    BuildHasherDefault::<DefaultHasher>::default().hash_one(name) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(description: serde_json::Value, role: Role) -> WorkerFacts {
        let description: WorkerDescription =
            serde_json::from_value(description).expect("the keys are read leniently");
        description.facts(role, None)
    }

    fn order(description: serde_json::Value, role: Role) -> QueueOrder {
        facts(description, role).order
    }

    #[test]
    fn states_that_travel_are_counted_where_a_worker_reports_them() {
        let reported = |tokens| serde_json::json!({"state_tokens": tokens});
        let counted = |tokens| facts(reported(tokens), Role::Decode).state_tokens;
        assert_eq!(counted(serde_json::json!(3072)), 3072);
        assert_eq!(counted(serde_json::json!("many")), 0);
        assert_eq!(facts(serde_json::json!({}), Role::Decode).state_tokens, 0);
    }

    #[test]
    fn resolved_queue_order_wins_over_the_flag() {
        let decode = serde_json::json!({
            "schedule_policy": "auto", "schedule_policy_resolved": "srpt-aging",
        });
        assert_eq!(order(decode, Role::Decode), QueueOrder::ShortestFirst);
        let prefill = serde_json::json!({
            "schedule_policy": "auto", "schedule_policy_resolved": "fcfs",
        });
        assert_eq!(order(prefill, Role::Prefill), QueueOrder::Arrival);
    }

    #[test]
    fn auto_without_a_resolved_order_is_shortest_first_on_prefill_workers() {
        let auto = || serde_json::json!({"schedule_policy": "auto"});
        assert_eq!(order(auto(), Role::Prefill), QueueOrder::ShortestFirst);
        assert_eq!(order(auto(), Role::Decode), QueueOrder::Arrival);
        let unreadable = serde_json::json!({
            "schedule_policy": "auto", "schedule_policy_resolved": ["fcfs"],
        });
        assert_eq!(order(unreadable, Role::Prefill), QueueOrder::ShortestFirst);
    }

    #[test]
    fn workers_that_report_no_known_order_serve_by_arrival() {
        assert_eq!(
            order(serde_json::json!({}), Role::Prefill),
            QueueOrder::Arrival
        );
        let lpm = serde_json::json!({"schedule_policy": "lpm"});
        assert_eq!(order(lpm, Role::Prefill), QueueOrder::Arrival);
    }
}
