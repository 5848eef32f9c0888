//! A candidate, and the guard that holds one request's place at it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_text::dialect::answer_end::read_usage;
use baton_text::dialect::resume;
use bytes::Bytes;
use http::HeaderValue;
use parking_lot::Mutex;
use router_core::{
    BreakerState, CircuitBreaker, DescriptionTrust, PolicyEvent, PolicySet, ProcessSign,
    PromptBlocks, RequestOutcome, Role, SelectionReason, SendTicket, TokenUsage, WorkerFacts,
    WorkerFingerprint, WorkerId, WorkerObjection, WorkerPenalty, WorkerView,
};

use super::activity::WorkerActivity;
use super::worker::{Worker, WorkerDescription};
use crate::clock::now_ms;
use crate::observability::metrics::RouterMetrics;
use crate::observability::request_timeline::AttemptRecorder;
use crate::workers::kv_event_status::EventSubscription;
use crate::workers::load_report::{self, LoadReport, ReportStatus};

/// Candidate that a policy chooses: one process at a worker's address, or one DP rank of it. When
/// another process takes its place, it gets candidates of its own, and all that is kept here or
/// under the candidate's id is forgotten.
pub struct Candidate {
    pub id: WorkerId,
    /// Url, with `@rank` when DP-aware: for logs and metrics, never on the wire.
    pub name: String,
    pub worker: Arc<Worker>,
    /// Description of the process.
    pub description: Arc<WorkerDescription>,
    /// `Some` when DP-aware.
    pub rank: Option<u32>,
    pub fingerprint: WorkerFingerprint,
    pub(super) host: u32,
    pub(super) load: Arc<AtomicUsize>,
    pub(super) breaker: Option<Mutex<CircuitBreaker>>,
    pub penalty: Mutex<WorkerPenalty>,
    /// Last report of its work.
    pub activity: Arc<Mutex<WorkerActivity>>,
    /// Subscription to its cache events.
    pub feed: EventSubscription,
}

impl Candidate {
    pub fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// View of it for policies.
    pub(super) fn view(&self) -> WorkerView {
        WorkerView {
            id: self.id,
            load: self.load(),
            host: self.host,
        }
    }

    /// Strongest objection to sending it a request that failed at the workers in `tried`.
    pub(super) fn objection(&self, tried: &[WorkerId], now_ms: u64) -> WorkerObjection {
        let is_open = |breaker: &Mutex<CircuitBreaker>| !breaker.lock().allows_request(now_ms);
        if self.breaker.as_ref().is_some_and(is_open) {
            WorkerObjection::CircuitOpen
        } else if tried.contains(&self.id) {
            WorkerObjection::Tried
        } else if self.penalty.lock().left_ms(now_ms) > 0 {
            WorkerObjection::Penalized
        } else {
            WorkerObjection::Nothing
        }
    }

    /// Feed its circuit breaker.
    pub(super) fn count(&self, outcome: RequestOutcome) {
        if let Some(breaker) = &self.breaker
            && let Some(state) = breaker.lock().on_result(outcome, now_ms())
        {
            tracing::warn!(worker = %self.name, circuit = state.into_str(), "circuit breaker changed");
        }
    }

    /// True if it could resume an answer of a worker of this make; always true where there is none.
    pub(super) fn can_resume(&self, of: Option<WorkerFingerprint>) -> bool {
        let fits = |of: WorkerFingerprint| of.is_compatible(&self.fingerprint);
        of.is_none_or(|of| fits(of) && self.description.has_feature(resume::FEATURE))
    }

    /// Facts for policies.
    pub(super) fn facts(&self) -> WorkerFacts {
        let topology = self.worker.spec.topology.as_deref();
        self.description.facts(self.worker.role(), topology)
    }

    /// True if this rank of the worker is all that the candidate stands for.
    fn is_rank(&self, rank: u32) -> bool {
        self.rank
            .map_or_else(|| self.description.dp_size() == 1, |own| own == rank)
    }

    /// True if an answer that states this id is of another process than the one that the candidate
    /// stands for. Then the worker is to be described again.
    fn is_of_other_process(&self, stated: &str) -> bool {
        let known = self.description.incarnation.as_deref();
        if known == Some(stated) {
            return false;
        }
        let trust = self.worker.observe_process(ProcessSign::Stated(stated));
        trust == DescriptionTrust::Missing || known.is_some()
    }

    /// A report that has just arrived: for the web page, and for its policy.
    pub(super) fn take_report(&self, report: LoadReport, policy_set: &PolicySet) {
        let now_ms = now_ms();
        self.activity.lock().reported(report, now_ms);
        let (
            worker,
            LoadReport {
                queued_tokens,
                running,
                age_ms,
                ..
            },
        ) = (self.id, report);
        let event = PolicyEvent::Reported {
            worker,
            queued_tokens,
            running,
            age_ms,
            now_ms,
        };
        policy_set.observe(self.worker.role(), &event);
    }

    pub fn circuit(&self) -> BreakerState {
        self.breaker
            .as_ref()
            .map_or(BreakerState::Closed, |b| b.lock().state(now_ms()))
    }
}

/// Request in flight to a candidate. Its end frees the load and is reported to the
/// circuit breaker and the policy.
pub struct LoadGuard {
    pub candidate: Arc<Candidate>,
    pub(super) policy_set: Arc<PolicySet>,
    pub(super) outcome: RequestOutcome,
    pub(super) ticket: SendTicket,
    /// The prompt's hashes, if the policy reads them.
    pub(super) blocks: Option<Arc<PromptBlocks>>,
    /// Why the candidate was chosen.
    pub why: SelectionReason,
    /// True while the policy wants to know what the worker counts: looking for it costs
    /// microseconds.
    pub counts: bool,
    pub(super) sent_ms: u64,
    /// Nothing more is learned from first tokens: it was seen, or cannot be.
    pub(super) is_first_token_known: bool,
    pub timeline: AttemptRecorder,
    pub(super) metrics: Arc<RouterMetrics>,
}

impl LoadGuard {
    /// How the request ended, as far as the worker is concerned. Never called: the client left.
    pub fn settle(&mut self, outcome: RequestOutcome) {
        self.outcome = outcome;
    }

    fn role(&self) -> Role {
        self.candidate.worker.role()
    }

    fn observe(&self, event: &PolicyEvent<'_>) {
        self.policy_set.observe(self.role(), event);
    }

    /// Prefill is over.
    pub fn first_token(&mut self) {
        if std::mem::replace(&mut self.is_first_token_known, true) {
            return;
        }
        self.timeline.first_token();
        let ticket = self.ticket;
        let worker = self.candidate.id;
        let now_ms = now_ms();
        self.observe(&PolicyEvent::FirstToken {
            ticket,
            worker,
            now_ms,
        });
        if let Some(forecast) = self.why.forecast() {
            let took_ms = now_ms.saturating_sub(self.sent_ms);
            self.metrics
                .first_token(self.role().into_str(), forecast, took_ms);
        }
    }

    /// Take the load report of an answer. Returns true if another process than the chosen one gave
    /// the answer.
    pub fn load_reported(&self, header: &HeaderValue) -> bool {
        let candidate = &self.candidate;
        let header = load_report::of_header(header);
        let stated = header.as_ref().ok().and_then(|header| header.incarnation);
        let is_other = stated.is_some_and(|stated| candidate.is_of_other_process(stated));
        let report = header.map(|header| header.report.filter(|_| !is_other));
        let fate = match report {
            Ok(Some(report)) if candidate.is_rank(report.rank) => {
                candidate.take_report(report, &self.policy_set);
                ReportStatus::Taken
            }
            Ok(_) => ReportStatus::Unused,
            Err(err) => {
                tracing::debug!(worker = %candidate.name, %err, "cannot read {}", load_report::HEADER);
                ReportStatus::Malformed
            }
        };
        let labels = [self.role().into_str(), "answer", fate.into_str()];
        self.metrics.load_reports.with_label_values(&labels).inc();
        is_other
    }

    /// Take the tokens that the worker counted from the last `pieces` of its answer, once, if they
    /// are wanted.
    pub fn read_usage<'a>(&mut self, pieces: impl DoubleEndedIterator<Item = &'a Bytes>) {
        if !std::mem::take(&mut self.counts) {
            return;
        }
        let Some(counts) = read_usage(pieces) else {
            return;
        };
        let usage = TokenUsage {
            prompt_tokens: counts.prompt_tokens,
            cached_tokens: counts.cached_tokens,
            completion_tokens: counts.completion_tokens,
        };
        self.timeline.usage(usage);
        let ticket = self.ticket;
        let worker = self.candidate.id;
        self.observe(&PolicyEvent::Usage {
            ticket,
            worker,
            usage,
        });
        let role = self.role().into_str();
        if let (Some(forecast), Some(cached)) = (self.why.forecast(), usage.cached_tokens) {
            self.metrics
                .counted(role, usage.prompt_tokens, forecast, cached);
        }
        if let Some(tokens) = self
            .blocks
            .as_ref()
            .and_then(|blocks| blocks.prompt_view().tokens)
        {
            let result = if tokens == usage.prompt_tokens {
                "equal"
            } else {
                "different"
            };
            self.metrics
                .token_counts
                .with_label_values(&[role, result])
                .inc();
        }
    }
}

impl Drop for LoadGuard {
    fn drop(&mut self) {
        let candidate = &self.candidate;
        if candidate.load.fetch_sub(1, Ordering::Relaxed) == 1 {
            candidate.worker.idle.notify_waiters();
        }
        let now_ms = now_ms();
        candidate.count(self.outcome);
        self.timeline.ended(self.outcome);
        self.observe(&PolicyEvent::Finished {
            ticket: self.ticket,
            worker: candidate.id,
            is_kept: self.outcome == RequestOutcome::Success,
            hashes: self
                .blocks
                .as_ref()
                .map_or(&[], |blocks| blocks.prompt_view().hashes),
            now_ms,
        });
    }
}
