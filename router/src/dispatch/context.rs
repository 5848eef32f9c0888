//! A generation request, read and checked, and the body and headers that workers get of it.
//!
//! They are the same for each attempt, but for the time that is left and, after the answer broke
//! off, the tokens that the client has.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use baton_text::dialect::body::{
    BodyIndex, DEADLINE, ManagedField, RequestDeadlines, TTFT_DEADLINE,
};
use baton_text::dialect::resume;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use router_core::{PromptBlocks, RetryHistory, WorkerBreak, WorkerFingerprint, WorkerId};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::clock::{ms_since, now_ms};
use crate::dispatch::app::AppState;
use crate::dispatch::chat_form::{ChatForm, RequestForm};
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::request::admission::QueuePlace;
use crate::request::routing_prompt::routing_text;
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

/// Facts of a prompt before a worker is chosen.
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
    /// The request as a chat request, once a worker needs it so.
    pub chat_form: Option<Arc<ChatForm>>,
    /// Deadlines given in request headers. Deadlines from the body are in `scan`.
    pub header_deadlines: RequestDeadlines,
    pub routing: RoutingInputs,
    pub admission: AdmittedRequest,
    pub attempts: AttemptState,
    pub record: AccessLogEntry,
}

/// Facts by which a worker is chosen.
#[derive(Default)]
pub struct RoutingInputs {
    pub routing_key: Option<String>,
    pub session_key: Option<String>,
    pub prompt: KnownPrompt,
    /// True if a policy reads the prompt's text.
    pub needs_text: bool,
    /// True if the client wants to know which workers were weighed.
    pub explains: bool,
}

/// Times and places of the request in the router's own queue.
pub struct AdmittedRequest {
    /// When the body was complete.
    pub ready_at: Instant,
    /// Time that the request waited for a place.
    pub queued: Duration,
    /// Held while the request waits for a worker and has no answer.
    pub place: Option<QueuePlace>,
    pub permit: Option<OwnedSemaphorePermit>,
}

impl AdmittedRequest {
    pub fn new(permit: Option<OwnedSemaphorePermit>, queued: Duration) -> Self {
        Self {
            ready_at: Instant::now(),
            queued,
            place: None,
            permit,
        }
    }
}

/// Attempts so far, and how the next one differs from the client's request.
pub struct AttemptState {
    /// Attempts as far as they decide about the next one.
    pub retries: RetryHistory,
    /// Set when the answer broke off.
    pub resume_point: Option<ResumePoint>,
    /// When the last attempt began.
    pub began_at: Instant,
    /// Members that this attempt adds to the body or that replace the client's, without braces.
    pub body_overrides: String,
}

impl Default for AttemptState {
    fn default() -> Self {
        Self {
            retries: RetryHistory::default(),
            resume_point: None,
            began_at: Instant::now(),
            body_overrides: String::new(),
        }
    }
}

/// Beginning of an answer, which the client has.
#[derive(Debug, Clone)]
pub struct ResumePoint {
    /// Fingerprint of the worker that gave the answer.
    pub fingerprint: WorkerFingerprint,
    pub tokens: usize,
    /// Member of the body; empty: the client has no token of it.
    pub resume: String,
}

/// A body for one leg.
pub struct LegBody {
    pub segments: BodySegments,
    pub form: RequestForm,
}

impl RequestContext {
    pub fn wanted(&self) -> SelectionRequest<'_> {
        SelectionRequest {
            text: if self.routing.needs_text {
                routing_text(&self.scan, &self.body)
            } else {
                Cow::default()
            },
            blocks: self.routing.prompt.blocks.clone(),
            routing_key: self.routing.routing_key.as_deref(),
            session_key: self.routing.session_key.as_deref(),
            model: self.scan.model.as_deref(),
            streams: self.scan.stream,
            counts: self.scan.batch.is_none(),
            timeline: Some(self.record.timeline.clone()),
            explains: self.routing.explains,
            resumes_on: self
                .attempts
                .resume_point
                .as_ref()
                .map(|point| point.fingerprint),
        }
    }

    /// Form of the request for workers, of which one needs a chat request, or none. Refuses a
    /// request that cannot be a chat request.
    pub async fn choose_form(
        &mut self,
        app: &AppState,
        needs_chat: bool,
    ) -> Result<RequestForm, RouteError> {
        if !needs_chat {
            return Ok(RequestForm::Own);
        }
        if let Some(form) = &self.chat_form {
            return Ok(RequestForm::Chat(form.clone()));
        }
        let dialect = self.scan.dialect;
        let streams = self.scan.stream;
        let body = self.body.clone();
        let translating = move || ChatForm::new(dialect, &body, streams);
        let translated = app.body_threads.run(self.body.len(), translating).await?;
        let form = Arc::new(translated?);
        self.chat_form = Some(form.clone());
        app.metrics
            .translated
            .with_label_values(&[dialect.path()])
            .inc();
        Ok(RequestForm::Chat(form))
    }

    /// The body for a worker: the request in this form, without the client's members that belong to
    /// routers or to the groups in `replaced`, with `ids` and `fields`.
    pub fn body_for(
        &self,
        form: &RequestForm,
        replaced: &[ManagedField],
        ids: Option<&Bytes>,
        fields: &str,
    ) -> LegBody {
        let (scan, body) = match form {
            RequestForm::Own => (&*self.scan, &self.body),
            RequestForm::Chat(chat) => (&chat.scan, &chat.body),
        };
        LegBody {
            segments: self.spliced(scan, body, replaced, ids, fields),
            form: form.clone(),
        }
    }

    fn spliced(
        &self,
        scan: &BodyIndex,
        body: &Bytes,
        replaced: &[ManagedField],
        ids: Option<&Bytes>,
        fields: &str,
    ) -> BodySegments {
        if self.attempts.body_overrides.is_empty() {
            let is_unchanged = replaced.is_empty()
                && ids.is_none()
                && fields.is_empty()
                && !scan.has_router_fields();
            return if is_unchanged {
                BodySegments::from(body.clone())
            } else {
                scan.splice(body, replaced, ids, fields).collect()
            };
        }
        let replaced = [replaced, &[ManagedField::Deadlines]].concat();
        let members = if fields.is_empty() {
            self.attempts.body_overrides.clone()
        } else {
            format!("{fields},{}", self.attempts.body_overrides)
        };
        scan.splice(body, &replaced, ids, &members).collect()
    }

    /// True if another worker could resume the answer that `candidate` gives.
    pub fn is_resumable(&self, app: &AppState, candidate: &Candidate) -> bool {
        let scan = &self.scan;
        !app.config.retry.disable_failover
            && app.retry.max_attempts > 1
            && scan.stream
            && scan.batch.is_none()
            && !scan.wants_input_logprobs
            && scan.prompt_logprobs.is_none()
            && candidate.description.has_feature(resume::FEATURE)
    }

    /// True if the request may wait: a resuming stream always, another while there is a place in
    /// the queue.
    pub fn take_place(&mut self, app: &AppState) -> bool {
        if self.attempts.retries.is_resuming() || self.admission.place.is_some() {
            return true;
        }
        self.admission.place = app.admission.queue_place(&app.metrics);
        self.admission.place.is_some()
    }

    /// Report a worker that broke with this request to the list of bodies that break workers.
    /// `is_poison`: the request broke as many workers as one may.
    pub fn report_break(
        &self,
        app: &AppState,
        worker: WorkerId,
        worker_break: WorkerBreak,
        is_poison: bool,
    ) {
        if worker_break == WorkerBreak::InCompany && !is_poison {
            return;
        }
        let hash = body_hash(&self.body);
        let mut poison = app.poison.lock();
        match worker_break {
            WorkerBreak::Alone => poison.add_break(hash, worker, now_ms()),
            WorkerBreak::InCompany => poison.refuse_body(hash, now_ms()),
        }
    }

    /// Time since the last attempt began [ms].
    pub fn attempt_ms(&self) -> u64 {
        self.attempts.began_at.elapsed().as_millis() as u64
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

    /// Bytes that are kept to attempt the request again.
    pub fn held_bytes(&self) -> usize {
        let input_ids = self.routing.prompt.input_ids.as_ref();
        self.body.len() + input_ids.map_or(0, Bytes::len)
    }

    /// The least of the times the client gives for the first token or for all of the answer.
    pub fn deadline_ms(&self) -> Option<u64> {
        let in_body = self.scan.deadlines;
        let in_headers = self.header_deadlines;
        let deadlines = [
            in_headers.ttft,
            in_headers.whole,
            in_body.ttft,
            in_body.whole,
        ];
        deadlines.into_iter().flatten().min()
    }

    /// True if even the first worker must be sent a shorter deadline than the client's.
    pub fn is_deadline_shrunk(&self) -> bool {
        self.admission.queued >= MIN_QUEUE_DELAY && self.deadline_ms().is_some()
    }

    /// When the client's time for the whole answer is over.
    pub fn ends_at(&self) -> Option<Instant> {
        let deadlines = [self.header_deadlines.whole, self.scan.deadlines.whole];
        let deadline_ms = deadlines.into_iter().flatten().min()?;
        let deadline = Duration::from_millis(deadline_ms);
        self.record.started.checked_add(deadline)
    }

    /// Prepare another attempt, or a late first one: it has the rest of the client's time, and
    /// resumes at the resume point.
    pub fn prepare_retry(&mut self) -> Result<(), RouteError> {
        let waited_ms = ms_since(self.record.started);
        if self.ends_at().is_some_and(|end| end <= Instant::now()) {
            return Err(RouteError::DeadlineOver { waited_ms });
        }
        // With a resume point the first token has come, if only from another worker.
        let resume_field = self
            .attempts
            .resume_point
            .as_ref()
            .map(|point| point.resume.clone())
            .filter(|field| !field.is_empty());
        let has_first_token = resume_field.is_some();

        let in_body = remaining(self.scan.deadlines, waited_ms, has_first_token);
        let ttft_field = in_body.ttft.map(|ms| format!("\"{TTFT_DEADLINE}\":{ms}"));
        let whole_field = in_body.whole.map(|ms| format!("\"{DEADLINE}\":{ms}"));
        let fields = [resume_field, ttft_field, whole_field];
        self.attempts.body_overrides = fields.into_iter().flatten().collect::<Vec<_>>().join(",");

        let in_headers = remaining(self.header_deadlines, waited_ms, has_first_token);
        let headers = self.head.headers_mut();
        for name in TTFT_HEADERS.into_iter().chain([DEADLINE_HEADER]) {
            headers.remove(name);
        }
        let [ttft_header, _] = TTFT_HEADERS;
        if let Some(ttft_ms) = in_headers.ttft {
            headers.insert(ttft_header, HeaderValue::from(ttft_ms));
        }
        if let Some(deadline_ms) = in_headers.whole {
            headers.insert(DEADLINE_HEADER, HeaderValue::from(deadline_ms));
        }
        Ok(())
    }
}

/// Deadlines that are left after `waited_ms`, at least 1 ms each. With the first token there is
/// none for it any more.
fn remaining(
    deadlines: RequestDeadlines,
    waited_ms: u64,
    has_first_token: bool,
) -> RequestDeadlines {
    let subtract_wait = |deadline_ms: u64| deadline_ms.saturating_sub(waited_ms).max(1);
    RequestDeadlines {
        ttft: deadlines
            .ttft
            .filter(|_| !has_first_token)
            .map(subtract_wait),
        whole: deadlines.whole.map(subtract_wait),
    }
}

fn body_hash(body: &Bytes) -> u64 {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    hasher.finish()
}

/// Read the deadlines in the headers of a request.
pub fn read_header_deadlines(headers: &HeaderMap) -> RequestDeadlines {
    let read_ms = |name: HeaderName| headers.get(name)?.to_str().ok()?.parse().ok();
    RequestDeadlines {
        ttft: TTFT_HEADERS.into_iter().filter_map(read_ms).min(),
        whole: read_ms(DEADLINE_HEADER),
    }
}
