//! The body of an answer to a client: a worker's pieces pass through, and everything the request
//! holds hangs on it.
//!
//! 1. `ProxyBody::new` with the request and what the leg already read, and the rest of the answer;
//! 2. hyper polls it as fast as the client reads: a slow client slows the worker down, nothing
//!    piles up here;
//! 3. the end: a clean one settles the record as ok; a break or silence ends a stream with one
//!    error event and [DONE];
//! 4. or, where the worker reports the tokens behind the text (failover.rs), another one is asked
//!    to go on: the client sees a pause, with comments that keep its connection alive. It waits for
//!    its turn and for a worker (resume_pacing.rs), and is given up only after --retry-max-retries
//!    attempts without a token of progress;
//! 5. dropped before that (the client left): the guards close both legs' connections and free the
//!    load.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use router_core::{AttemptReason, GiveUpReason, LostAnswer, RequestOutcome, ResumeVerdict, Role};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};

use crate::clock::{ms_since, now_ms};
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::{UpstreamResponse, silent_error, upstream_error};
use crate::dispatch::context::{RequestContext, ResumePoint};
use crate::dispatch::disaggregated::prefill_leg::PrefillAttempt;
use crate::dispatch::retry::{count_refused_retry, send_with_retries};
use crate::dispatch::types::{AttemptFailure, AttemptResult};
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::observability::metrics::RouterMetrics;
use crate::response::failover::{BrokenStream, NotResumable, ResumeBuffer};
use crate::response::keepalive::KeepAlive;
use crate::response::sse::{EventSplitter, StreamEnd, StreamTail, error_epilogue};
use crate::transport::upstream::{ResponseBody, with_source};
use crate::workers::load_guard::LoadGuard;
use crate::workers::worker::WorkerState;

const DONE: &[u8] = b"\ndata: [DONE]\n\n";
/// A silent worker of a stream that another could resume is looked up, and probed, this often: its
/// health checks may have failed.
const LOOK_UP: Duration = Duration::from_secs(2);

/// The answer broke and cannot be mended by an event: the connection to the client is cut, so that
/// it sees the break.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TruncatedResponse(RouteError);

/// The request while its answer runs.
#[expect(
    clippy::large_enum_variant,
    reason = "most answers have the large one, and need no allocation for it"
)]
enum RequestState {
    /// Whole request of a stream that another worker can resume.
    Resumable(Box<RequestContext>),
    /// Record of a request that is not resumed.
    Recorded {
        record: AccessLogEntry,
        _permit: Option<OwnedSemaphorePermit>,
    },
    /// With `Resuming`.
    Detached,
}

impl RequestState {
    fn record(&mut self) -> Option<&mut AccessLogEntry> {
        match self {
            RequestState::Resumable(request) => Some(&mut request.record),
            RequestState::Recorded { record, .. } => Some(record),
            RequestState::Detached => None,
        }
    }

    fn recorded(request: Box<RequestContext>) -> Self {
        RequestState::Recorded {
            record: request.record,
            _permit: request.permit,
        }
    }

    /// Release what is needed to ask again.
    fn drop_resume_state(&mut self) {
        *self = match std::mem::replace(self, RequestState::Detached) {
            RequestState::Resumable(request) => RequestState::recorded(request),
            other => other,
        };
    }
}

/// Another worker is asked to go on; the request comes back with its answer.
struct Resuming {
    asking: Pin<Box<dyn Future<Output = Resumed> + Send>>,
    since: Instant,
    keepalive: KeepAlive,
    role: Role,
    /// Error for the client if no worker can.
    failure: Option<StreamFailure>,
    /// Label of the metric; the client leaves unless another is set.
    outcome: &'static str,
    metrics: Arc<RouterMetrics>,
}

type Resumed = (Box<RequestContext>, AttemptResult);

impl Drop for Resuming {
    fn drop(&mut self) {
        self.metrics
            .failovers
            .with_label_values(&[self.role.into_str(), self.outcome])
            .inc();
    }
}

/// How a stream ends that broke.
enum StreamFailure {
    Router(RouteError),
    /// The worker's own error event.
    Worker(BrokenStream),
}

impl StreamFailure {
    fn outcome(&self) -> &'static str {
        match self {
            StreamFailure::Router(err) => err.code(),
            StreamFailure::Worker(_) => "error_event",
        }
    }

    /// True if the worker is to blame.
    fn blames_worker(&self) -> bool {
        match self {
            StreamFailure::Router(err) => *err != RouteError::Draining,
            StreamFailure::Worker(broken) => broken.code.class().blames_worker(),
        }
    }
}

pub struct ProxyBody {
    app: Arc<AppState>,
    state: RequestState,
    out: VecDeque<Bytes>,
    rest: Option<ResponseBody>,
    events: EventSplitter,
    /// `Some` for streams.
    tail: Option<StreamTail>,
    /// `Some` for streams that tell their tokens.
    resume_buffer: Option<ResumeBuffer>,
    /// Events that `buffer` let pass; empty between two pieces.
    passed: VecDeque<Bytes>,
    resuming: Option<Resuming>,
    status: StatusCode,
    limit: Duration,
    last_piece: Instant,
    /// Armed while nothing comes; re-armed lazily, so that a piece costs no timer operation.
    silence: Option<Pin<Box<Sleep>>>,
    /// `None` while another worker is asked to go on.
    guard: Option<LoadGuard>,
    /// Last piece of a JSON answer.
    last: Option<Bytes>,
    prefill: Option<PrefillAttempt>,
}

impl ProxyBody {
    pub fn new(
        app: Arc<AppState>,
        request: Box<RequestContext>,
        opened: UpstreamResponse,
        prefill: Option<PrefillAttempt>,
    ) -> Self {
        let many = request.scan.batch.is_some();
        let held = request.held_bytes();
        let has_token_ids = opened.has_token_ids;
        let mut body = Self {
            out: VecDeque::with_capacity(opened.answer.pieces.len().max(2)),
            tail: opened.is_sse.then(|| StreamTail::new(many)),
            resume_buffer: has_token_ids.then(|| ResumeBuffer::new(&app.failover_memory, held)),
            passed: VecDeque::new(),
            state: match has_token_ids {
                true => RequestState::Resumable(request),
                false => RequestState::recorded(request),
            },
            resuming: None,
            status: opened.answer.status,
            limit: app.config.request_timeout(),
            last_piece: Instant::now(),
            silence: None,
            rest: None,
            events: EventSplitter::default(),
            guard: None,
            last: None,
            prefill: None,
            app,
        };
        body.follow(opened, prefill);
        body
    }

    /// Pass this leg's answer on.
    fn follow(&mut self, opened: UpstreamResponse, prefill: Option<PrefillAttempt>) {
        self.last_piece = Instant::now();
        self.silence = None;
        if opened.answer.is_of_other_process
            && let Some(buffer) = &mut self.resume_buffer
        {
            buffer.disable(NotResumable::UnknownWorker);
        }
        self.rest = opened.answer.remaining;
        self.events = opened.answer.events;
        self.guard = Some(opened.guard);
        self.prefill = prefill;
        for piece in opened.answer.pieces {
            if !self.pass(piece) {
                return;
            }
        }
        if self.rest.is_none() {
            self.ended();
        }
    }

    /// A piece of a JSON answer, or whole events. False: the worker ended its stream there with an
    /// error that another could mend, and that is handled.
    fn pass(&mut self, piece: Bytes) -> bool {
        let Some(tail) = &mut self.tail else {
            if self.guard.as_ref().is_some_and(|guard| guard.counts) {
                self.last = Some(piece.clone());
            }
            self.out.push_back(piece);
            return true;
        };
        let Some(buffer) = &mut self.resume_buffer else {
            tail.pass([piece], &mut self.out);
            return true;
        };
        let result = buffer.pass(piece, &mut self.passed);
        tail.pass(self.passed.drain(..), &mut self.out);
        if let (Some(lost), RequestState::Resumable(_)) = (buffer.lost(), &self.state) {
            self.app
                .metrics
                .unresumable
                .with_label_values(&[lost.into_str()])
                .inc();
            self.state.drop_resume_state();
        }
        if let Err(broken) = result {
            let reason = AttemptReason::Code(broken.code);
            self.fail(StreamFailure::Worker(broken), reason);
            return false;
        }
        true
    }

    fn ending(&self) -> Option<StreamEnd> {
        self.tail.as_ref().map(StreamTail::ending)
    }

    /// The worker ended its answer properly; a stream must also have been finished.
    fn ended(&mut self) {
        self.rest = None;
        if let Some(last) = self.events.finish()
            && !self.pass(last)
        {
            return;
        }
        match self.ending() {
            Some(StreamEnd::Open) => {
                self.broke("ended the stream without finishing it".into());
                return;
            }
            // A client may wait for it.
            Some(StreamEnd::Finished) => self.out.push_back(Bytes::from_static(DONE)),
            Some(StreamEnd::Done) | None => {}
        }
        self.finish();
    }

    /// The answer is complete.
    fn finish(&mut self) {
        let has_error = self.tail.as_ref().is_some_and(StreamTail::has_error);
        let outcome = if has_error { "error_event" } else { "ok" };
        match (&mut self.guard, &self.tail) {
            (Some(guard), Some(tail)) => guard.read_usage(tail.recent.iter()),
            (Some(guard), None) => guard.read_usage(self.last.iter()),
            (None, _) => {}
        }
        self.end(outcome);
        if let Some(prefill) = self.prefill.take() {
            prefill.drain_in_background();
        }
    }

    fn end(&mut self, outcome: &'static str) {
        if let Some(record) = self.state.record() {
            record.end(self.status, outcome);
        }
    }

    /// The worker broke off.
    fn broke(&mut self, cause: String) -> Option<TruncatedResponse> {
        let err = upstream_error(self.guard.as_ref()?, cause);
        self.fail(StreamFailure::Router(err), AttemptReason::Reset)
    }

    /// Handle the end of this worker's answer before its last event. Returns the error if the
    /// client can learn of it only by a cut connection.
    fn fail(
        &mut self,
        mut failure: StreamFailure,
        reason: AttemptReason,
    ) -> Option<TruncatedResponse> {
        self.rest = None;
        let mut ending = self.ending().unwrap_or(StreamEnd::Open);
        if ending == StreamEnd::Open {
            match self.fail_over(failure, reason) {
                Ok(()) => return None,
                Err(why) => failure = why,
            }
        }
        if let (Some(buffer), Some(tail)) = (&mut self.resume_buffer, &mut self.tail) {
            buffer.release(&mut self.passed);
            tail.pass(self.passed.drain(..), &mut self.out);
            ending = tail.ending();
        }
        if ending != StreamEnd::Open {
            self.finish();
            let missing = (ending == StreamEnd::Finished).then_some(Bytes::from_static(DONE));
            self.out.extend(missing);
            return None;
        }
        self.attribute_failure(&failure, reason);
        self.prefill = None;
        self.finish_with_error(failure)
    }

    /// Attribute the worker's break.
    fn attribute_failure(&mut self, failure: &StreamFailure, reason: AttemptReason) {
        let Some(guard) = &mut self.guard else { return };
        if !failure.blames_worker() {
            guard.settle(RequestOutcome::Unknown);
            return;
        }
        guard.settle(RequestOutcome::Failure);
        let worker = &guard.candidate.worker;
        worker.suspect.notify_one();
        if let Some(record) = self.state.record() {
            record.upstream_error(worker.role(), reason);
        }
    }

    /// The end of an answer that broke.
    fn finish_with_error(&mut self, failure: StreamFailure) -> Option<TruncatedResponse> {
        self.end(failure.outcome());
        if let (Some(record), StreamFailure::Router(err)) = (self.state.record(), &failure) {
            tracing::warn!(rid = record.rid, %err, "answer broke off");
        }
        match (failure, &self.tail) {
            (StreamFailure::Router(err), None) => return Some(TruncatedResponse(err)),
            (StreamFailure::Router(err), Some(_)) => self.out.push_back(error_epilogue(&err)),
            (StreamFailure::Worker(broken), _) => {
                self.out.extend([broken.event, Bytes::from_static(DONE)]);
            }
        }
        None
    }

    /// True if another worker is to be asked to resume the answer.
    fn may_fail_over(&mut self, reason: AttemptReason) -> bool {
        let (Some(buffer), Some(guard), RequestState::Resumable(request)) =
            (&self.resume_buffer, &self.guard, &mut self.state)
        else {
            return false;
        };
        if !buffer.can_resume() {
            return false;
        }
        let (app, candidate) = (&self.app, &guard.candidate);
        let role = candidate.worker.role();
        let worker_break = reason
            .is_break()
            .then(|| candidate.worker.note_break(now_ms()));
        let resumed_at = request
            .resume_point
            .as_ref()
            .map_or(0, |point| point.tokens);
        let has_progress = buffer.tokens() > resumed_at;
        request.resume_point = (buffer.tokens() > 0).then(|| ResumePoint {
            fingerprint: candidate.fingerprint,
            tokens: buffer.tokens(),
            resume: buffer.to_json_field(&candidate.description.fingerprint),
        });
        let excluded = if has_progress {
            vec![candidate.id]
        } else {
            request.retries.excluded_with(candidate.id)
        };
        let loss = LostAnswer {
            worker: candidate.id,
            reason,
            worker_break,
            held_ms: request.attempt_ms(),
            has_progress,
            has_other_worker: reason != AttemptReason::Silent
                || app.fleet.has_other(role, &request.wanted(), &excluded),
            is_shutting_down: app.is_cut(),
        };
        let verdict = request.retries.decide_resume(&loss, &app.retry);
        let is_poison = verdict == ResumeVerdict::GiveUp(GiveUpReason::PoisonRequest);
        if let (Some(worker_break), false) = (worker_break, has_progress) {
            request.report_break(app, candidate.id, worker_break, is_poison);
        }
        let ResumeVerdict::GiveUp(reason) = verdict else {
            return true;
        };
        count_refused_retry(app, reason);
        if !is_poison {
            app.metrics
                .failovers
                .with_label_values(&[role.into_str(), "refused"])
                .inc();
        }
        false
    }

    /// Have another worker resume the answer. `Err`: no worker is asked, and the stream ends so.
    fn fail_over(
        &mut self,
        failure: StreamFailure,
        reason: AttemptReason,
    ) -> Result<(), StreamFailure> {
        if self.app.is_cut() {
            return Err(StreamFailure::Router(RouteError::Draining));
        }
        if !self.may_fail_over(reason) {
            return Err(failure);
        }
        self.attribute_failure(&failure, reason);
        let state = std::mem::replace(&mut self.state, RequestState::Detached);
        let (RequestState::Resumable(mut request), Some(guard), Some(buffer)) =
            (state, self.guard.take(), &mut self.resume_buffer)
        else {
            return Err(failure); // may_fail_over has seen them
        };
        buffer.cut();
        let (role, tokens) = (guard.candidate.worker.role(), buffer.tokens());
        request.record.timeline.failed(role, reason, Some(tokens));
        tracing::warn!(
            rid = request.record.rid,
            %role,
            lost_worker = %guard.candidate.name,
            %reason,
            tokens,
            "the worker of a stream was lost; another is asked to resume it"
        );
        let detail = format!("{reason} after {tokens} tokens");
        let url = guard.candidate.worker.url().to_string();
        let events = &self.app.fleet.events;
        events.add_failover(role, &url, detail, &request.record.rid);
        (self.prefill, self.silence) = (None, None);
        let app = self.app.clone();
        let metrics = app.metrics.clone();
        let every = Duration::from_secs(app.config.limits.sse_keepalive_secs);
        self.resuming = Some(Resuming {
            asking: Box::pin(async move {
                let (started, end) = (request.record.started, request.ends_at());
                let asking = send_with_retries(&app, &mut request);
                let rest = match end {
                    None => asking.await,
                    Some(end) => match timeout_at(end, asking).await {
                        Ok(rest) => rest,
                        Err(_) => Err(RouteError::DeadlineOver {
                            waited_ms: ms_since(started),
                        }
                        .into()),
                    },
                };
                (request, rest)
            }),
            since: Instant::now(),
            keepalive: KeepAlive::new(every),
            role,
            failure: Some(failure),
            outcome: "client_gone",
            metrics,
        });
        Ok(())
    }

    /// Another worker was asked, this came of it.
    fn resumed(&mut self, mut resuming: Resuming, (request, rest): Resumed) {
        self.state = RequestState::Resumable(request);
        let why = match rest {
            Ok((opened, prefill)) if opened.is_sse => {
                resuming.outcome = "resumed";
                let pause = &self.app.metrics.failover_pause;
                let pause = pause.with_label_values(&[resuming.role.into_str()]);
                let paused = resuming.since.elapsed();
                pause.observe(paused.as_secs_f64());
                if let RequestState::Resumable(request) = &self.state {
                    tracing::info!(
                        rid = request.record.rid,
                        role = %resuming.role,
                        worker = %opened.guard.candidate.name,
                        paused_ms = paused.as_millis() as u64,
                        "a stream was resumed"
                    );
                }
                if !opened.has_token_ids {
                    self.resume_buffer = None;
                    self.state.drop_resume_state();
                }
                return self.follow(opened, prefill);
            }
            Ok(_) => "the rest came as something else than a stream".to_owned(),
            Err(AttemptFailure::Refused(err)) if err.code() == "timeout" => {
                resuming.failure = Some(StreamFailure::Router(err));
                String::new()
            }
            Err(AttemptFailure::Refused(err)) => err.to_string(),
            Err(AttemptFailure::Failed(failure)) => {
                format!(
                    "the last one asked, a {} worker: {}",
                    failure.role, failure.reason
                )
            }
        };
        resuming.outcome = "failed";
        if let Some(mut failure) = resuming.failure.take() {
            if self.app.is_cut() {
                failure = StreamFailure::Router(RouteError::Draining);
            } else if let StreamFailure::Router(RouteError::Upstream { cause, .. }) = &mut failure {
                cause.push_str("; no other worker went on with it: ");
                cause.push_str(&why);
            }
            self.finish_with_error(failure);
        }
    }

    /// Why the worker is not waited for any longer, if so, and the reason's label.
    fn too_silent(&mut self, cx: &mut Context<'_>) -> Option<(RouteError, AttemptReason)> {
        let guard = self.guard.as_ref()?;
        let can_resume = self
            .resume_buffer
            .as_ref()
            .is_some_and(ResumeBuffer::can_resume);
        let pause = if can_resume {
            self.limit.min(LOOK_UP)
        } else {
            self.limit
        };
        let (limit, next) = (self.last_piece + self.limit, self.last_piece + pause);
        let timer = self
            .silence
            .get_or_insert_with(|| Box::pin(sleep_until(next)));
        while timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            if now >= limit {
                return Some((silent_error(guard, self.limit), AttemptReason::Silent));
            }
            let worker = &guard.candidate.worker;
            if now >= next
                && let WorkerState::Unhealthy { reason, .. } = worker.state()
            {
                let cause = format!("fell silent and fails its health checks: {reason}");
                return Some((upstream_error(guard, cause), AttemptReason::Hung));
            }
            if now >= next && self.app.config.silent_request_probe().is_some() {
                worker.silent.notify_one();
            }
            let again = if now >= next { now + pause } else { next };
            timer.as_mut().reset(again.min(limit));
        }
        None
    }
}

impl Body for ProxyBody {
    type Data = Bytes;
    type Error = TruncatedResponse;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TruncatedResponse>>> {
        let this = &mut *self;
        loop {
            if let Some(piece) = this.out.pop_front() {
                if let Some(record) = this.state.record() {
                    record.first_byte(this.status);
                }
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            if let Some(resuming) = &mut this.resuming {
                match resuming.asking.as_mut().poll(cx) {
                    Poll::Ready(resumed) => {
                        if let Some(resuming) = this.resuming.take() {
                            this.resumed(resuming, resumed);
                        }
                    }
                    Poll::Pending => this.out.push_back(ready!(resuming.keepalive.poll(cx))),
                }
                continue;
            }
            let Some(rest) = &mut this.rest else {
                return Poll::Ready(None);
            };
            let mut cut = None;
            match rest.poll_piece(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    this.last_piece = Instant::now();
                    let whole = match &this.tail {
                        Some(_) => this.events.push(piece),
                        None => Some(piece),
                    };
                    if let Some(whole) = whole {
                        this.pass(whole);
                    }
                }
                Poll::Ready(None) => this.ended(),
                Poll::Ready(Some(Err(err))) => {
                    cut = this.broke(format!("answer broke off: {}", with_source(&err)));
                }
                Poll::Pending => match this.too_silent(cx) {
                    None => return Poll::Pending,
                    Some((err, reason)) => cut = this.fail(StreamFailure::Router(err), reason),
                },
            }
            if let Some(cut) = cut {
                return Poll::Ready(Some(Err(cut)));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_none() && self.out.is_empty() && self.resuming.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_some() || self.tail.is_some() {
            return SizeHint::default();
        }
        SizeHint::with_exact(self.out.iter().map(|piece| piece.len() as u64).sum())
    }
}

impl Drop for ProxyBody {
    /// Clients may leave at `[DONE]`, before the worker has ended its answer: they have all of it.
    fn drop(&mut self) {
        if self.out.is_empty()
            && self.ending() == Some(StreamEnd::Done)
            && let Some(rest) = self.rest.take()
        {
            self.finish();
            rest.drain_in_background();
        }
    }
}
