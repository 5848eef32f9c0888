//! A worker's answer that passes through to the client, and the request behind it.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use std::vec;

use baton_text::dialect::answer_end::StreamEnd;
use baton_text::dialect::sse::{EventSplitter, done_place};
use bytes::Bytes;
use router_core::{AttemptReason, RequestOutcome};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::dispatch::app::AppState;
use crate::dispatch::attempt::answer_translation::AnswerTranslation;
use crate::dispatch::attempt::{UpstreamResponse, silent_error, upstream_error};
use crate::dispatch::context::RequestContext;
use crate::dispatch::prefill_leg::PrefillAttempt;
use crate::dispatch::proxy_body::client_answer::ClientAnswer;
use crate::dispatch::proxy_body::event::{BodyEvent, StreamFailure, TruncatedResponse, WorkerLoss};
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::response::failover::NotResumable;
use crate::transport::upstream::{ResponseBody, with_source};
use crate::workers::load_guard::LoadGuard;
use crate::workers::worker::WorkerState;

/// The state of a silent worker is looked up, and the worker probed, this often, if another could
/// resume the stream: its health checks may have failed.
const HEALTH_LOOKUP_INTERVAL: Duration = Duration::from_secs(2);

/// The request whose answer passes through.
#[expect(
    clippy::large_enum_variant,
    reason = "most answers have the large one, and need no allocation for it"
)]
pub enum RelayedRequest {
    /// The whole request: another worker can resume the stream.
    Resumable(Box<RequestContext>),
    /// Only what the end of the answer needs.
    Recorded {
        record: AccessLogEntry,
        _permit: Option<OwnedSemaphorePermit>,
    },
}

impl RelayedRequest {
    pub fn record(&mut self) -> &mut AccessLogEntry {
        match self {
            RelayedRequest::Resumable(request) => &mut request.record,
            RelayedRequest::Recorded { record, .. } => record,
        }
    }

    /// Release everything that another attempt would need.
    pub fn into_recorded(self) -> Self {
        match self {
            RelayedRequest::Resumable(request) => RelayedRequest::Recorded {
                record: request.record,
                _permit: request.admission.permit,
            },
            recorded @ RelayedRequest::Recorded { .. } => recorded,
        }
    }
}

/// A worker's answer on its way, and its request.
///
/// The order of fields is that of their drops: the record is written before the load is freed.
pub struct Relay {
    pub request: RelayedRequest,
    pub leg: RelayedLeg,
}

/// A leg whose answer has opened. Dropping it closes the connection and frees the load.
pub struct RelayedLeg {
    /// Pieces that were read when the answer opened.
    opened_pieces: vec::IntoIter<Bytes>,
    /// `None`: the worker has ended its answer.
    remaining: Option<ResponseBody>,
    events: EventSplitter,
    /// Set if the events are to be translated to the client's API.
    translation: Option<Box<AnswerTranslation>>,
    /// See [`UpstreamResponse::is_merged`].
    is_merged: bool,
    pub guard: LoadGuard,
    prefill: Option<PrefillAttempt>,
    silence: SilenceTimer,
}

/// An answer of which no more comes. It is held until the client has read the queued pieces. The
/// default holds nothing.
#[derive(Default)]
pub struct EndedAnswer {
    pub request: Option<RelayedRequest>,
    /// Load of the last worker.
    pub guard: Option<LoadGuard>,
    /// Set if the connection to the client is to be cut.
    pub truncation: Option<TruncatedResponse>,
}

impl Relay {
    pub fn new(
        request: RelayedRequest,
        opened: UpstreamResponse,
        prefill: Option<PrefillAttempt>,
        silence_limit: Duration,
    ) -> Self {
        let leg = RelayedLeg {
            opened_pieces: opened.answer.pieces.into_iter(),
            remaining: opened.answer.remaining,
            events: opened.answer.events,
            translation: opened.translation,
            is_merged: opened.is_merged,
            guard: opened.guard,
            prefill,
            silence: SilenceTimer::new(silence_limit),
        };
        Self { request, leg }
    }

    /// True if pieces or the end of the answer can be passed on without waiting for the worker.
    pub fn has_read(&self) -> bool {
        self.leg.opened_pieces.len() > 0 || self.leg.remaining.is_none()
    }

    /// Pass on one piece that was read already, or the end of the answer. `None`: a piece was
    /// queued for the client.
    pub fn forward_opened_piece(&mut self, answer: &mut ClientAnswer) -> Option<BodyEvent> {
        // The end of an answer goes before the loss of its resumption, which does not matter then.
        let event = self.leg.forward_opened_piece(answer);
        event.or_else(|| self.disabled_resume(answer))
    }

    /// Read from the worker. `None`: a piece was queued for the client, or is part of an event.
    pub fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
        app: &AppState,
        answer: &mut ClientAnswer,
    ) -> Poll<Option<BodyEvent>> {
        if self.has_read() {
            return Poll::Ready(self.forward_opened_piece(answer));
        }
        let event = ready!(self.leg.poll_event(cx, app, answer));
        Poll::Ready(event.or_else(|| self.disabled_resume(answer)))
    }

    /// Event that releases the request when the last piece has made a resumption impossible.
    fn disabled_resume(&self, answer: &ClientAnswer) -> Option<BodyEvent> {
        match self.request {
            RelayedRequest::Resumable(_) => answer.not_resumable().map(BodyEvent::ResumeDisabled),
            // The event has been sent: a second one would count the stream twice.
            RelayedRequest::Recorded { .. } => None,
        }
    }

    /// The worker ended its answer, and the client has all of it or will have.
    pub fn complete(mut self, answer: &ClientAnswer) -> EndedAnswer {
        let outcome = if answer.has_error() {
            "error_event"
        } else {
            "ok"
        };
        self.leg.guard.read_usage(answer.last_pieces().into_iter());
        self.request.record().end(answer.status, outcome);
        // The prefill leg is read to its end, so that its connection can serve the next request.
        if let Some(prefill) = self.leg.prefill {
            prefill.drain_in_background();
        }
        EndedAnswer {
            request: Some(self.request),
            guard: Some(self.leg.guard),
            truncation: None,
        }
    }

    /// The client left after the last event of a stream that its worker had not ended.
    pub fn complete_unread(mut self, answer: &ClientAnswer) {
        let remaining = self.leg.remaining.take();
        drop(self.complete(answer));
        // Dropped here, the connection could not serve another request.
        if let Some(remaining) = remaining {
            remaining.drain_in_background();
        }
    }

    /// The worker is lost, and no other one resumes its answer.
    pub fn end_after_loss(mut self, loss: WorkerLoss, answer: &mut ClientAnswer) -> EndedAnswer {
        answer.release_waiting();
        // The client has the finish_reason: the worker died behind its answer, which is complete.
        if !answer.is_open() {
            let is_unfinished = answer.stream_end() == Some(StreamEnd::Finished);
            let ended = self.complete(answer);
            // Clients read on until `[DONE]`.
            if is_unfinished {
                answer.push_done();
            }
            return ended;
        }
        self.leg.attribute_loss(&loss, self.request.record());
        let truncation = loss.failure.end_answer(self.request.record(), answer);
        EndedAnswer {
            request: Some(self.request),
            guard: Some(self.leg.guard),
            truncation,
        }
    }

    /// From here on no other worker could resume the stream.
    pub fn disable_resume(self, reason: NotResumable, app: &AppState) -> Self {
        app.metrics
            .unresumable
            .with_label_values(&[reason.into_str()])
            .inc();
        Self {
            request: self.request.into_recorded(),
            leg: self.leg,
        }
    }
}

impl RelayedLeg {
    fn forward_opened_piece(&mut self, answer: &mut ClientAnswer) -> Option<BodyEvent> {
        match self.opened_pieces.next() {
            Some(piece) => self.forward_piece(piece, answer),
            None => self.forward_end(answer),
        }
    }

    fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
        app: &AppState,
        answer: &mut ClientAnswer,
    ) -> Poll<Option<BodyEvent>> {
        let Some(remaining) = &mut self.remaining else {
            return Poll::Ready(self.forward_end(answer));
        };
        match remaining.poll_piece(cx) {
            Poll::Ready(Some(Ok(piece))) => {
                self.silence.restart();
                // A part of an event may not be queued: an error event or a comment would land
                // inside it.
                let run = if answer.is_stream() {
                    self.events.push(piece)
                } else {
                    Some(piece)
                };
                Poll::Ready(run.and_then(|run| self.forward_piece(run, answer)))
            }
            Poll::Ready(None) => {
                self.remaining = None;
                Poll::Ready(self.forward_end(answer))
            }
            Poll::Ready(Some(Err(err))) => {
                let detail = with_source(&err);
                Poll::Ready(Some(self.broken(
                    AttemptReason::Reset,
                    "broke off its answer",
                    detail,
                )))
            }
            // The timer is asked only now: a worker that sends is not silent.
            Poll::Pending => match self.poll_silence(cx, app, answer) {
                Some(event) => Poll::Ready(Some(event)),
                None => Poll::Pending,
            },
        }
    }

    /// Queue a piece for the client, in the client's API.
    fn forward_piece(&mut self, piece: Bytes, answer: &mut ClientAnswer) -> Option<BodyEvent> {
        match &mut self.translation {
            None if self.is_merged && answer.is_stream() => {
                self.forward_merged_piece(piece, answer)
            }
            None => queue_piece(piece, answer),
            Some(translation) => queue_piece(translation.translate_run(&piece)?, answer),
        }
    }

    /// Queue a piece of a merged stream. `[DONE]` alone does not finish it.
    fn forward_merged_piece(
        &mut self,
        piece: Bytes,
        answer: &mut ClientAnswer,
    ) -> Option<BodyEvent> {
        let Some(done_at) = done_place(&piece) else {
            return queue_piece(piece, answer);
        };
        // The events before `[DONE]` may hold the finish_reason that decides below.
        if done_at > 0
            && let Some(event) = queue_piece(piece.slice(..done_at), answer)
        {
            return Some(event);
        }
        // A relayed `[DONE]` would make an answer without a finish_reason look complete.
        if answer.is_open() && !answer.has_error() {
            let problem = "ended the stream without finishing it";
            return Some(self.broken(AttemptReason::Reset, problem, String::new()));
        }
        queue_piece(piece.slice(done_at..), answer)
    }

    /// The worker ended its answer; a stream must also have been finished.
    fn forward_end(&mut self, answer: &mut ClientAnswer) -> Option<BodyEvent> {
        // A last event without its empty line, as some servers end a stream.
        if let Some(last_event) = self.events.finish() {
            return self.forward_piece(last_event, answer);
        }
        let translation = self.translation.as_mut();
        if let Some(end) = translation.and_then(|translation| translation.finish_stream()) {
            return queue_piece(end, answer);
        }
        match answer.stream_end() {
            // The worker's own error event is the end: a second error would contradict it.
            Some(StreamEnd::Open) if answer.has_error() => answer.push_done(),
            Some(StreamEnd::Open) => {
                let problem = "ended the stream without finishing it";
                return Some(self.broken(AttemptReason::Reset, problem, String::new()));
            }
            // Clients read on until `[DONE]`, which some servers leave out.
            Some(StreamEnd::Finished) => answer.push_done(),
            Some(StreamEnd::Done) | None => {}
        }
        Some(BodyEvent::AnswerCompleted)
    }

    /// The loss of a worker that is silent for too long, or silent and unhealthy.
    fn poll_silence(
        &mut self,
        cx: &mut Context<'_>,
        app: &AppState,
        answer: &mut ClientAnswer,
    ) -> Option<BodyEvent> {
        let is_resumable = answer.resumable().is_some();
        loop {
            match self.silence.poll(cx, is_resumable)? {
                Silence::Limit => {
                    let err = silent_error(&self.guard, self.silence.limit);
                    return Some(worker_lost(AttemptReason::Silent, err));
                }
                Silence::Lookup => {
                    let worker = &self.guard.candidate.worker;
                    // A hung worker keeps its connection open: without this look-up the client
                    // would wait for all of --request-timeout-secs.
                    if let WorkerState::Unhealthy { reason, .. } = worker.state() {
                        let problem = "fell silent and fails its health checks";
                        return Some(self.broken(AttemptReason::Hung, problem, reason));
                    }
                    // The next health check may be seconds away; the probe finds a hung worker now.
                    if app.config.silent_request_probe().is_some() {
                        worker.silent.notify_one();
                    }
                }
            }
        }
    }

    fn broken(&self, reason: AttemptReason, problem: &str, detail: String) -> BodyEvent {
        worker_lost(reason, upstream_error(&self.guard, problem, detail))
    }

    /// Close the connection to the worker.
    pub fn close_connection(&mut self) {
        self.remaining = None;
    }

    /// Attribute the loss to the worker, if the worker is to blame.
    pub fn attribute_loss(&mut self, loss: &WorkerLoss, record: &AccessLogEntry) {
        // A shutdown or an error of the request says nothing about the worker's health.
        if !loss.failure.blames_worker() {
            self.guard.settle(RequestOutcome::Unknown);
            return;
        }
        self.guard.settle(RequestOutcome::Failure);
        let worker = &self.guard.candidate.worker;
        worker.suspect.notify_one();
        record.upstream_error(worker.role(), loss.reason);
    }
}

fn worker_lost(reason: AttemptReason, err: RouteError) -> BodyEvent {
    BodyEvent::WorkerLost(WorkerLoss {
        failure: StreamFailure::Router(err),
        reason,
    })
}

/// Queue a piece for the client.
fn queue_piece(piece: Bytes, answer: &mut ClientAnswer) -> Option<BodyEvent> {
    if let Err(broken) = answer.push(piece) {
        return Some(BodyEvent::WorkerLost(WorkerLoss {
            reason: AttemptReason::Code(broken.code),
            failure: StreamFailure::Worker(broken),
        }));
    }
    None
}

/// Timer of a worker's silence. It is armed while nothing comes and re-armed when it fires, so that
/// a piece costs no timer operation.
struct SilenceTimer {
    limit: Duration,
    last_piece_at: Instant,
    timer: Option<Pin<Box<Sleep>>>,
}

/// Length that a worker's silence has reached.
enum Silence {
    /// The state of the worker is to be looked up.
    Lookup,
    /// The worker is not waited for any longer.
    Limit,
}

impl SilenceTimer {
    fn new(limit: Duration) -> Self {
        Self {
            limit,
            last_piece_at: Instant::now(),
            timer: None,
        }
    }

    fn restart(&mut self) {
        self.last_piece_at = Instant::now();
    }

    /// `None`: pending. `has_lookups`: the state of the worker is looked up before the limit.
    fn poll(&mut self, cx: &mut Context<'_>, has_lookups: bool) -> Option<Silence> {
        let interval = if has_lookups {
            self.limit.min(HEALTH_LOOKUP_INTERVAL)
        } else {
            self.limit
        };
        let ends_at = self.last_piece_at + self.limit;
        let first_lookup_at = self.last_piece_at + interval;
        let timer = self
            .timer
            .get_or_insert_with(|| Box::pin(sleep_until(first_lookup_at)));
        while timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            // The limit goes before a look-up that fires in the same moment.
            if now >= ends_at {
                return Some(Silence::Limit);
            }
            if now >= first_lookup_at {
                timer.as_mut().reset((now + interval).min(ends_at));
                return Some(Silence::Lookup);
            }
            // The timer was armed before the last piece, which does not touch it.
            timer.as_mut().reset(first_lookup_at);
        }
        None
    }
}
