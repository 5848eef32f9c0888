//! Timeline of a request, written by the code that does the work: GET /v1/requests/{id}, the access
//! log and the stage metrics read it.
//!
//! The life of a timeline:
//!
//! 1. `RequestHistory::begin` when the head of a generation request is read; from then on it can be
//!    asked for;
//! 2. the code that does a step marks it: stages of the request, and a leg for each sending to a
//!    worker, with its decision, prediction and observation;
//! 3. `RequestHistory::end` when the answer's body is dropped: it joins the last --request-history
//!    ones, oldest out first, also when they take more than `history::MAX_BYTES`.
//!
//! No prompt is in it: lengths, and the hash of its last whole block, which names the prefix. Cost:
//! about a microsecond and half a kilobyte a request.

/// Timelines of recent requests.
pub mod history;
/// Timeline as spans.
mod spans;

use std::sync::Arc;

use http::HeaderValue;
use parking_lot::Mutex;
use router_core::{
    AttemptReason, PromptBlocks, PromptView, RequestOutcome, Role, SelectionReason, TokenUsage,
};
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use strum::VariantArray;
use tokio::time::Instant;

use crate::observability::engine_stages::EngineStages;
use crate::observability::otlp::{self, TraceContext};

/// Stages of a request, once each, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", suffix = "_ms", const_into_str)]
pub enum RequestStage {
    /// The body is complete.
    Read,
    /// A place among --max-concurrent-requests is taken.
    Admitted,
    /// The body was scanned for what routing needs.
    Parsed,
    /// The prompt was counted and hashed for the policies.
    Tokenized,
    /// Only where the request waited for its first worker: when the wait ended.
    WorkerReady,
    /// The first byte of an answer went to the client.
    FirstByte,
    /// The last byte, or the client left.
    Ended,
}

/// See the module.
pub struct RequestTimeline {
    number: u64,
    route: &'static str,
    started: Instant,
    received_unix_ns: u64,
    trace: Option<TraceContext>,
    records: Mutex<TimelineRecords>,
}

#[derive(Default)]
struct TimelineRecords {
    rid: String,
    /// Seconds since the start, by `RequestStage`.
    stages: [Option<f32>; RequestStage::VARIANTS.len()],
    body_bytes: usize,
    prompt: Option<PromptSize>,
    legs: Vec<AttemptTimeline>,
    failures: Vec<Failed>,
    /// (status, outcome)
    end: Option<(u16, &'static str)>,
}

/// State of a request, as far as its timeline shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
enum RequestState {
    /// No worker has it: it is read, queued or decided, or its worker failed. `role` of the worker
    /// that failed.
    Waiting {
        role: Option<Role>,
    },
    /// A worker has it.
    Running,
    Ended,
}

impl RequestState {
    fn label(self) -> &'static str {
        self.into()
    }

    fn waits_for(self) -> Option<Role> {
        match self {
            Self::Waiting { role } => role,
            Self::Running | Self::Ended => None,
        }
    }
}

impl TimelineRecords {
    fn state(&self) -> RequestState {
        if self.end.is_some() {
            return RequestState::Ended;
        }
        let last_attempt = self.legs.last().map(|leg| leg.attempt);
        let failed = self.failures.last();
        let is_with_a_worker = last_attempt
            .is_some_and(|attempt| failed.is_none_or(|failed| failed.attempt < attempt));
        if is_with_a_worker {
            return RequestState::Running;
        }
        RequestState::Waiting {
            role: failed.map(|failed| failed.role),
        }
    }
}

#[derive(Debug, Clone, Copy, Serialize)]
struct PromptSize {
    /// Bytes of text, or tokens: what blocks are counted in.
    units: usize,
    tokens: Option<u32>,
    blocks: usize,
}

/// Attempt at one worker. Times are milliseconds since the head of the request.
#[derive(Debug, Clone, Serialize)]
pub struct AttemptTimeline {
    attempt: u32,
    /// Id in the trace.
    #[serde(skip)]
    span: u64,
    role: Role,
    worker: String,
    #[serde(flatten)]
    why: SelectionReason,
    #[serde(skip_serializing_if = "Option::is_none")]
    room: Option<u64>,
    chosen_ms: f64,
    /// A connection was there and the request went out.
    sent_ms: Option<f64>,
    /// Predicted is `ttft_ms` of the decision, which counts from `chosen_ms`.
    first_token_ms: Option<f64>,
    ended_ms: Option<f64>,
    outcome: Option<&'static str>,
    /// As the worker counted them.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<TokenUsage>,
    /// As the engine reported them, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    stages: Option<EngineStages>,
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<Box<RawValue>>,
}

/// Why an attempt was given up.
#[derive(Debug, Clone, Serialize)]
struct Failed {
    attempt: u32,
    role: Role,
    reason: AttemptReason,
    at_ms: f64,
    /// Tokens after which its answer broke off; another worker was asked for the rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    failover_at_token: Option<usize>,
}

/// Place in the timeline for one leg's guard to write to. The default keeps nothing.
#[derive(Default)]
pub struct AttemptRecorder {
    timeline: Option<Arc<RequestTimeline>>,
    at: usize,
}

/// Seconds a request spent in each stage, as far as it came; by `metrics::STAGE_NAMES`.
pub type StageTimes = [Option<f64>; 8];

fn ms(since: Instant) -> f64 {
    // Microseconds are enough, and shorter to read.
    (since.elapsed().as_secs_f64() * 1e6).round() / 1e3
}

impl RequestTimeline {
    pub fn mark(&self, stage: RequestStage) {
        let at = self.started.elapsed().as_secs_f32();
        self.records.lock().stages[stage as usize].get_or_insert(at);
    }

    /// A wait for the request's first worker is over; another may follow.
    pub fn waited_for_worker(&self) {
        let at = self.started.elapsed().as_secs_f32();
        let mut records = self.records.lock();
        if records.legs.is_empty() {
            records.stages[RequestStage::WorkerReady as usize] = Some(at);
        }
    }

    pub fn body(&self, bytes: usize) {
        self.records.lock().body_bytes = bytes;
    }

    pub fn prompt(&self, blocks: &PromptBlocks) {
        let PromptView {
            hashes,
            units,
            tokens,
            ..
        } = blocks.prompt_view();
        self.records.lock().prompt = Some(PromptSize {
            units,
            tokens,
            blocks: hashes.len(),
        });
    }

    /// The request goes to this worker. `explanation`: what was weighed, as JSON.
    pub fn leg(
        self: &Arc<Self>,
        role: Role,
        worker: &str,
        why: SelectionReason,
        explanation: Option<Box<RawValue>>,
    ) -> AttemptRecorder {
        let mut records = self.records.lock();
        let attempt = records.failures.len() as u32 + 1;
        records.legs.push(AttemptTimeline {
            attempt,
            span: self.trace.map_or(0, |_| otlp::new_id()),
            role,
            worker: worker.to_owned(),
            why,
            room: None,
            chosen_ms: ms(self.started),
            sent_ms: None,
            first_token_ms: None,
            ended_ms: None,
            outcome: None,
            usage: None,
            stages: None,
            explanation,
        });
        AttemptRecorder {
            timeline: Some(self.clone()),
            at: records.legs.len() - 1,
        }
    }

    /// The pair that was chosen last meets in this room.
    pub fn room(&self, room: u64) {
        for leg in self.records.lock().legs.iter_mut().rev().take(2) {
            leg.room = Some(room);
        }
    }

    /// The attempt is given up; another may follow. `failover_at_token`: tokens that the client had
    /// when the answer broke off, if another worker is asked for the rest.
    pub fn failed(&self, role: Role, reason: AttemptReason, failover_at_token: Option<usize>) {
        let at_ms = ms(self.started);
        let mut records = self.records.lock();
        let attempt = records.failures.len() as u32 + 1;
        records.failures.push(Failed {
            attempt,
            role,
            reason,
            at_ms,
            failover_at_token,
        });
    }

    /// Number of attempts to resume the answer on another worker.
    pub fn failovers(&self) -> usize {
        self.records
            .lock()
            .failures
            .iter()
            .filter(|f| f.failover_at_token.is_some())
            .count()
    }

    /// Count of the last worker that answered.
    pub fn usage(&self) -> Option<TokenUsage> {
        self.records
            .lock()
            .legs
            .iter()
            .rev()
            .find_map(|leg| leg.usage)
    }

    /// How long each stage of the first attempt took.
    pub fn stages(&self) -> StageTimes {
        let records = self.records.lock();
        let at = |stage: RequestStage| records.stages[stage as usize].map(f64::from);
        let between = |from: Option<f64>, to: Option<f64>| Some((to? - from?).max(0.0));
        let first = records.legs.first();
        // The last leg of the first attempt is the one that answers the client.
        let answering = records
            .legs
            .iter()
            .take_while(|leg| leg.attempt == 1)
            .last();
        let seconds = |ms: Option<f64>| ms.map(|ms| ms / 1e3);
        let chosen = seconds(first.map(|leg| leg.chosen_ms));
        let sent = seconds(answering.and_then(|leg| leg.sent_ms));
        let first_token = seconds(answering.and_then(|leg| leg.first_token_ms));
        let worker_ready = at(RequestStage::WorkerReady);
        let decided_from = worker_ready.or(at(RequestStage::Tokenized));
        [
            at(RequestStage::Read),
            between(at(RequestStage::Read), at(RequestStage::Admitted)),
            between(at(RequestStage::Admitted), at(RequestStage::Parsed)),
            between(at(RequestStage::Parsed), at(RequestStage::Tokenized)),
            between(at(RequestStage::Tokenized), worker_ready),
            between(decided_from, chosen),
            between(chosen, sent),
            between(sent, first_token),
        ]
    }

    /// The legs of the last attempt without their candidates, for a header.
    pub fn summary(&self) -> String {
        let records = self.records.lock();
        let attempt = records.legs.last().map_or(0, |leg| leg.attempt);
        let legs = records.legs.iter().filter(|leg| leg.attempt == attempt);
        let legs = legs.map(
            |AttemptTimeline {
                 role, worker, why, ..
             }| { json!({ "role": role, "worker": worker, "decision": why }) },
        );
        json!({ "attempts": attempt, "legs": legs.collect::<Vec<_>>() }).to_string()
    }

    /// As GET /v1/requests/{id} shows it.
    fn json(&self) -> Value {
        let records = self.records.lock();
        let stages = RequestStage::VARIANTS.iter().zip(records.stages);
        let timeline: Map<String, Value> = stages
            .filter_map(|(stage, at)| Some((stage.into_str().to_owned(), rounded(at?).into())))
            .collect();
        json!({
            "id": records.rid,
            "route": self.route,
            "received_unix_ms": self.received_unix_ns / 1_000_000,
            "trace_id": self.trace_id(),
            "state": records.state().label(),
            "waits_for": records.state().waits_for(),
            "status": records.end.map(|(status, _)| status),
            "outcome": records.end.map(|(_, outcome)| outcome),
            "body_bytes": records.body_bytes,
            "prompt": records.prompt,
            "timeline": timeline,
            "legs": records.legs,
            "failed_attempts": records.failures,
        })
    }

    /// Line of a list of requests.
    fn short_json(&self) -> Value {
        let records = self.records.lock();
        let ended = records.stages[RequestStage::Ended as usize].map(rounded);
        let state = records.state();
        // A worker that was lost has nothing of a request that waits for the next one.
        let answering = records.legs.iter().rfind(|leg| leg.role != Role::Prefill);
        let answering = answering.filter(|_| !matches!(state, RequestState::Waiting { .. }));
        json!({
            "id": records.rid,
            "route": self.route,
            "received_unix_ms": self.received_unix_ns / 1_000_000,
            "state": state.label(),
            "waits_for": state.waits_for(),
            "outcome": records.end.map(|(_, outcome)| outcome),
            "ms": ended.unwrap_or_else(|| ms(self.started)),
            "ttft_ms": records.stages[RequestStage::FirstByte as usize].map(rounded),
            "attempts": records.legs.last().map_or(0, |leg| leg.attempt),
            "worker": answering.map(|leg| leg.worker.as_str()),
        })
    }

    /// Time to the first byte; of a request without one, to its end or until now [s].
    fn wait_secs(&self) -> f32 {
        let records = self.records.lock();
        let at = |stage: RequestStage| records.stages[stage as usize];
        at(RequestStage::FirstByte)
            .or_else(|| at(RequestStage::Ended))
            .unwrap_or_else(|| self.started.elapsed().as_secs_f32())
    }

    pub fn trace_id(&self) -> Option<String> {
        self.trace.map(|trace| format!("{:032x}", trace.trace))
    }

    /// About how much memory it takes.
    fn bytes(&self) -> usize {
        let records = self.records.lock();
        let legs = records.legs.iter().map(|leg| {
            let explained = leg.explanation.as_ref().map_or(0, |json| json.get().len());
            size_of::<AttemptTimeline>() + leg.worker.len() + explained
        });
        let failures = records.failures.len() * size_of::<Failed>();
        size_of::<Self>() + records.rid.len() + legs.sum::<usize>() + failures
    }
}

/// Seconds to milliseconds with three digits.
fn rounded(seconds: f32) -> f64 {
    (f64::from(seconds) * 1e6).round() / 1e3
}

impl AttemptRecorder {
    pub fn traceparent(&self) -> Option<HeaderValue> {
        let timeline = self.timeline.as_ref()?;
        let context = timeline.trace?;
        timeline
            .records
            .lock()
            .legs
            .get(self.at)
            .map(|leg| context.header(leg.span))
    }

    fn leg(&self, change: impl FnOnce(&mut AttemptTimeline, f64)) {
        let Some(timeline) = &self.timeline else {
            return;
        };
        let at_ms = ms(timeline.started);
        if let Some(leg) = timeline.records.lock().legs.get_mut(self.at) {
            change(leg, at_ms);
        }
    }

    /// Note that it goes out; called again when it is sent again on another connection.
    pub fn sent(&self) {
        self.leg(|leg, at_ms| leg.sent_ms = Some(at_ms));
    }

    pub fn first_token(&self) {
        self.leg(|leg, at_ms| leg.first_token_ms = Some(at_ms));
    }

    pub fn usage(&self, usage: TokenUsage) {
        self.leg(|leg, _| leg.usage = Some(usage));
    }

    pub fn stages(&self, stages: &EngineStages) {
        self.leg(|leg, _| leg.stages = Some(stages.clone()));
    }

    pub fn ended(&self, outcome: RequestOutcome) {
        self.leg(|leg, at_ms| {
            leg.ended_ms = Some(at_ms);
            leg.outcome = Some(match outcome {
                RequestOutcome::Success => "ok",
                RequestOutcome::Failure => "failed",
                RequestOutcome::Unknown => "left",
            });
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
