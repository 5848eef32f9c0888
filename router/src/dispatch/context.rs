//! A generation request, read and checked, and what of it goes to a worker: the same for each
//! attempt, but for the time that is left and, when its answer broke off, the part that the client
//! has.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use router_core::{
    AttemptReason, FailedAttempts, PromptBlocks, RequestBreaks, WorkerFingerprint, WorkerId,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::clock::{ms_since, now_ms};
use crate::dispatch::app::AppState;
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::request::admission::QueuePlace;
use crate::request::body::{BodyIndex, ManagedField, RequestDeadlines};
use crate::response::failover;
use crate::transport::request_body::BodySegments;
use crate::transport::upstream::RequestHead;
use crate::workers::fleet::selection::SelectionRequest;
use crate::workers::load_guard::Candidate;

/// The first token is of use within this [ms]; the engines' names (docs/protocol.md).
const TTFT_HEADERS: [HeaderName; 2] = [
    HeaderName::from_static("x-slo-ttft-ms"),
    HeaderName::from_static("x-llm-d-slo-ttft-ms"),
];
/// The whole answer is of use within this [ms].
const DEADLINE_HEADER: HeaderName = HeaderName::from_static("x-deadline-remaining-ms");
/// Queueing delays shorter than this do not rewrite the client's deadline fields.
const MIN_QUEUE_DELAY: Duration = Duration::from_millis(10);

/// Facts of a prompt before anybody is chosen.
#[derive(Default)]
pub struct KnownPrompt {
    /// The prompt's hashes, if a policy reads them.
    pub blocks: Option<Arc<PromptBlocks>>,
    /// If they were counted.
    pub tokens: Option<u32>,
    /// `,"input_ids":[…],"tokenizer_fingerprint":"…"` for workers that take it, with
    /// --forward-input-ids.
    pub input_ids: Option<Bytes>,
}

pub struct RequestContext {
    pub head: RequestHead,
    pub body: Bytes,
    pub scan: Arc<BodyIndex>,
    pub routing_key: Option<String>,
    pub prompt: KnownPrompt,
    /// True if a policy reads the prompt's text.
    pub needs_text: bool,
    /// True if the client wants to know what is weighed.
    pub explains: bool,
    /// When the body was complete.
    pub ready_at: Instant,
    /// How long it waited for a place.
    pub queued: Duration,
    /// Workers that failed it.
    pub avoid: Vec<WorkerId>,
    /// Set when its answer broke off.
    pub resume_point: Option<ResumePoint>,
    /// The answer has opened: the request is resumed, and only paced.
    pub is_accepted: bool,
    /// Attempts wait for their turn, and no retry budget applies to them.
    pub is_paced: bool,
    /// Failed attempts since the client last got a token.
    pub failed: FailedAttempts,
    /// When the last attempt began.
    pub attempted_at: Instant,
    /// Workers that broke under it since then.
    pub breaks: RequestBreaks,
    /// Held while it waits for a worker and has no answer.
    pub place: Option<QueuePlace>,
    /// Deadlines of its headers; the body's are in `scan`.
    pub header_deadlines: RequestDeadlines,
    /// Members that this attempt adds to the body or puts in the place of the client's, without
    /// braces.
    pub body_overrides: String,
    pub record: AccessLogEntry,
    pub permit: Option<OwnedSemaphorePermit>,
}

/// An answer whose beginning the client has.
#[derive(Debug, Clone)]
pub struct ResumePoint {
    /// Fingerprint of the worker that gave it.
    pub fingerprint: WorkerFingerprint,
    pub tokens: usize,
    /// Member of the body; empty: the client has nothing of it after all.
    pub resume: String,
}

impl RequestContext {
    pub fn wanted(&self) -> SelectionRequest<'_> {
        SelectionRequest {
            text: if self.needs_text {
                self.scan.routing_text(&self.body)
            } else {
                Cow::default()
            },
            blocks: self.prompt.blocks.clone(),
            routing_key: self.routing_key.as_deref(),
            model: self.scan.model.as_deref(),
            streams: self.scan.stream,
            counts: self.scan.batch.is_none(),
            timeline: Some(self.record.timeline.clone()),
            explains: self.explains,
            resumes_on: self.resume_point.as_ref().map(|point| point.fingerprint),
        }
    }

    /// The body for a worker: the client's without its own members of the groups in `replaced`,
    /// with `ids` and `fields`.
    pub fn body_for(
        &self,
        replaced: &[ManagedField],
        ids: Option<&Bytes>,
        fields: &str,
    ) -> BodySegments {
        if self.body_overrides.is_empty() {
            return match replaced.is_empty() && ids.is_none() && fields.is_empty() {
                true => BodySegments::from(self.body.clone()),
                false => self.scan.splice(&self.body, replaced, ids, fields),
            };
        }
        let replaced = [replaced, &[ManagedField::Deadlines, ManagedField::Resume]].concat();
        let members = [fields, &self.body_overrides]
            .into_iter()
            .filter(|m| !m.is_empty());
        let fields = members.collect::<Vec<_>>().join(",");
        self.scan.splice(&self.body, &replaced, ids, &fields)
    }

    /// True if another worker could resume its answer, if `candidate` gives it.
    pub fn is_resumable(&self, app: &AppState, candidate: &Candidate) -> bool {
        let (config, scan) = (&app.config.retry, &self.scan);
        !config.disable_failover
            && app.retry.max_attempts > 1
            && scan.stream
            && scan.batch.is_none()
            && !scan.wants_input_logprobs
            && !scan.has(ManagedField::Resume)
            && candidate.description.has_feature(failover::FEATURE)
    }

    /// True if it may wait: an accepted stream always, another while there is a place in the queue.
    pub fn take_place(&mut self, app: &AppState) -> bool {
        if self.is_accepted || self.place.is_some() {
            return true;
        }
        self.place = app.admission.queue_place(&app.metrics);
        self.place.is_some()
    }

    /// A worker broke under it, without a token since the last one did. True: it is not to be tried
    /// again.
    pub fn add_break(&mut self, app: &AppState, worker: WorkerId, is_alone: bool) -> bool {
        let is_over = self.breaks.add(is_alone);
        if is_alone || is_over {
            let hash = body_hash(&self.body);
            let mut poison = app.poison.lock();
            match is_alone {
                true => poison.add_break(hash, worker, now_ms()),
                false => poison.refuse(hash, now_ms()),
            }
        }
        is_over
    }

    /// Count the attempt that failed now.
    pub fn count_failure(&mut self, reason: AttemptReason) {
        let held_ms = self.attempted_at.elapsed().as_millis() as u64;
        self.failed.add(held_ms, reason.is_pair_loss());
    }

    /// Refuse the request if others with this body broke workers a moment ago.
    pub async fn check_poison(&self, app: &AppState) -> Result<(), RouteError> {
        if app.poison.lock().is_empty() {
            return Ok(());
        }
        let body = self.body.clone();
        let hash = app
            .body_threads
            .run(body.len(), move || body_hash(&body))
            .await?;
        let is_refused = app.poison.lock().is_refused(hash, now_ms());
        if is_refused {
            Err(RouteError::PoisonRequest)
        } else {
            Ok(())
        }
    }

    /// Bytes that are held to ask again.
    pub fn held_bytes(&self) -> usize {
        self.body.len() + self.prompt.input_ids.as_ref().map_or(0, Bytes::len)
    }

    /// The least of the times the client gives for the first token or for all of the answer.
    pub fn deadline_ms(&self) -> Option<u64> {
        let RequestDeadlines { ttft, whole } = self.scan.deadlines;
        let all = [
            self.header_deadlines.ttft,
            self.header_deadlines.whole,
            ttft,
            whole,
        ];
        all.into_iter().flatten().min()
    }

    /// True if even the first worker must be sent a shorter deadline than the client's.
    pub fn is_deadline_shrunk(&self) -> bool {
        self.queued >= MIN_QUEUE_DELAY && self.deadline_ms().is_some()
    }

    /// When the client's time for the whole answer is over.
    pub fn ends_at(&self) -> Option<Instant> {
        let whole = [self.header_deadlines.whole, self.scan.deadlines.whole];
        let ms = whole.into_iter().flatten().min()?;
        self.record.started.checked_add(Duration::from_millis(ms))
    }

    /// Get ready for another attempt, or a late first one: it has what is left of the client's
    /// time, and goes on with what was begun.
    pub fn prepare_retry(&mut self) -> Result<(), RouteError> {
        let waited_ms = ms_since(self.record.started);
        if self.ends_at().is_some_and(|end| end <= Instant::now()) {
            return Err(RouteError::DeadlineOver { waited_ms });
        }
        // The first token came, if only from another worker.
        let point = self
            .resume_point
            .as_ref()
            .filter(|point| !point.resume.is_empty());
        let left = |of: RequestDeadlines| {
            let left = |ms: u64| ms.saturating_sub(waited_ms).max(1);
            [of.ttft.filter(|_| point.is_none()), of.whole].map(|ms| ms.map(left))
        };
        let members = ["ttft_deadline_ms", "deadline_ms"].into_iter();
        let members = members
            .zip(left(self.scan.deadlines))
            .filter_map(|(name, ms)| Some(format!("\"{name}\":{}", ms?)));
        let resume = point.map(|point| point.resume.clone());
        self.body_overrides = resume
            .into_iter()
            .chain(members)
            .collect::<Vec<_>>()
            .join(",");
        let remaining = left(self.header_deadlines);
        let headers = self.head.headers_mut();
        for name in TTFT_HEADERS.into_iter().chain([DEADLINE_HEADER]) {
            headers.remove(name);
        }
        let [ttft, _] = TTFT_HEADERS;
        let names = [ttft, DEADLINE_HEADER].into_iter().zip(remaining);
        headers.extend(names.filter_map(|(name, ms)| Some((name, HeaderValue::from(ms?)))));
        Ok(())
    }
}

fn body_hash(body: &Bytes) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

/// Deadlines in the headers of a request.
pub fn header_deadlines(headers: &HeaderMap) -> RequestDeadlines {
    let ms = |name: HeaderName| headers.get(name)?.to_str().ok()?.parse().ok();
    let ttft = TTFT_HEADERS.into_iter().filter_map(ms).min();
    RequestDeadlines {
        ttft,
        whole: ms(DEADLINE_HEADER),
    }
}
