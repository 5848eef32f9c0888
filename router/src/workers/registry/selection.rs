//! Inputs and results of decisions.

use std::borrow::Cow;
use std::sync::Arc;

use rand::RngCore;
use router_core::{
    PromptBlocks, RequestView, Role, RoutingRequest, SelectionReason, WorkerFingerprint, WorkerId,
    WorkerView, least_objection,
};

use crate::observability::request_timeline::RequestTimeline;
use crate::workers::load_guard::{Candidate, LoadGuard};

/// A request as the registry takes it.
#[derive(Clone, Default)]
pub struct SelectionRequest<'a> {
    pub text: Cow<'a, str>,
    pub blocks: Option<Arc<PromptBlocks>>,
    pub routing_key: Option<&'a str>,
    /// Only workers that serve it are candidates.
    pub model: Option<&'a str>,
    /// The answer streams: a regular worker's first token will be seen.
    pub streams: bool,
    /// Timeline that records the decision.
    pub timeline: Option<Arc<RequestTimeline>>,
    /// With all that is weighed.
    pub explains: bool,
    /// Resumes the answer of a worker of this make (failover.rs).
    pub resumes_on: Option<WorkerFingerprint>,
}

impl SelectionRequest<'_> {
    pub(super) fn sending(&self, now_ms: u64) -> RoutingRequest<'_> {
        RoutingRequest {
            request: self.view(now_ms),
            // 53 bits: what every reader of JSON keeps exactly.
            seed: rand::rng().next_u64() >> 11,
            explains: self.explains,
            streams: self.streams,
        }
    }

    pub(super) fn view(&self, now_ms: u64) -> RequestView<'_> {
        RequestView {
            text: &self.text,
            prompt: self.blocks.as_deref().map(PromptBlocks::prompt).unwrap_or_default(),
            routing_key: self.routing_key,
            now_ms,
        }
    }
}

/// A candidate with its place taken.
pub struct Selection {
    pub guard: LoadGuard,
    pub why: SelectionReason,
}

/// Workers that failed a request before: taken again only when there is no other.
#[derive(Debug, Clone, Default)]
pub struct ExcludedWorkers {
    /// By [`Role::index`].
    by_role: [Vec<WorkerId>; 3],
}

impl ExcludedWorkers {
    pub fn add(&mut self, role: Role, worker: WorkerId) {
        self.by_role[role.index()].push(worker);
    }

    pub(super) fn of(&self, role: Role) -> &[WorkerId] {
        &self.by_role[role.index()]
    }
}

/// Candidates that could resume the answer, and of these the ones with the fewest objections.
pub(super) fn views(
    candidates: &[Arc<Candidate>],
    resumes_on: Option<WorkerFingerprint>,
    avoid: &[WorkerId],
    now_ms: u64,
) -> Vec<WorkerView> {
    let resumable = candidates.iter().filter(|c| c.can_resume(resumes_on));
    let judged: Vec<_> = resumable
        .map(|c| {
            let view = WorkerView { id: c.id, load: c.load(), host: c.host };
            (view, c.objection(avoid, now_ms))
        })
        .collect();
    least_objection(judged.into_iter())
}
