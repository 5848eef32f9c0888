//! Inputs of decisions.

use std::borrow::Cow;
use std::sync::Arc;

use rand::RngCore;
use router_core::{PromptBlocks, RequestView, RoutingRequest, WorkerFingerprint};

use crate::observability::request_timeline::RequestTimeline;

/// A request as the fleet takes it.
#[derive(Clone, Default)]
pub struct SelectionRequest<'a> {
    pub text: Cow<'a, str>,
    pub blocks: Option<Arc<PromptBlocks>>,
    pub routing_key: Option<&'a str>,
    pub session_key: Option<&'a str>,
    /// Only workers that serve it are candidates.
    pub model: Option<&'a str>,
    /// The answer streams: a regular worker's first token will be seen.
    pub streams: bool,
    /// True for one answer to one prompt: what the worker counts is about them.
    pub counts: bool,
    /// Timeline that records the decision.
    pub timeline: Option<Arc<RequestTimeline>>,
    /// With all that is weighed.
    pub explains: bool,
    /// Resumes the answer of a worker of this make (failover.rs).
    pub resumes_on: Option<WorkerFingerprint>,
}

impl SelectionRequest<'_> {
    pub(super) fn routing_request(&self, now_ms: u64) -> RoutingRequest<'_> {
        RoutingRequest {
            request: self.view(now_ms),
            // 53 bits: what every reader of JSON keeps exactly.
            seed: rand::rng().next_u64() >> 11,
            explains: self.explains,
            streams: self.streams,
        }
    }

    pub(super) fn view(&self, now_ms: u64) -> RequestView<'_> {
        let prompt = self
            .blocks
            .as_deref()
            .map(PromptBlocks::prompt_view)
            .unwrap_or_default();
        RequestView {
            text: &self.text,
            prompt,
            routing_key: self.routing_key,
            session_key: self.session_key,
            now_ms,
        }
    }
}
