//! A leg: one request to one worker, from the send until the answer opens, and its failures.
//!
//! A leg *opens* when its answer can be committed to: a stream at its first event (comments are
//! none; keepalive.rs keeps the client's connection alive), any other answer when it is complete
//! (or too long to hold). Before that every failure can still be retried elsewhere without the
//! client noticing.

/// Answers in the API of the client.
pub mod answer_translation;
/// Errors in answers whose status is a success.
mod stated_errors;

use std::time::Duration;

use baton_text::dialect::sse::{
    EventSplitter, comments_len, error_code, error_message, first_data_event, from_error,
    single_event_stream, stated_status, without_mark,
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use router_core::{
    AttemptReason, ProcessSign, ProtocolCode, RequestOutcome, RetryClass, Role, StatusLabel,
    WorkerBreak, WorkerId,
};
use tokio::time::timeout;

use self::answer_translation::AnswerTranslation;
use crate::clock::now_ms;
use crate::error::{RouteError, error_body};
use crate::observability::engine_stages::{self, EngineStages};
use crate::response::stream_headers::is_sse;
use crate::transport::request_body::BodySegments;
use crate::transport::upstream::{RequestHead, ResponseBody, SendError, with_source};
use crate::workers::load_guard::LoadGuard;
use crate::workers::load_report;

/// A complete answer is held back up to this size, so that a break in it can be retried [bytes].
const MAX_HELD: usize = 4 << 20;
/// Longest error body that is passed on [bytes].
const MAX_ERROR_BODY: usize = 1 << 20;

pub struct UpstreamAttempt {
    pub guard: LoadGuard,
    pub head: RequestHead,
    pub body: BodySegments,
    /// Longest silence of the worker.
    pub limit: Duration,
    /// True if the worker's stream has comments with the tokens (failover.rs).
    pub has_token_ids: bool,
    /// Set if the worker answers in another API than the client's.
    pub translation: Option<Box<AnswerTranslation>>,
}

/// Answer of a worker so far.
pub struct PartialAnswer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Pieces read so far; of a stream, runs of whole events.
    pub pieces: Vec<Bytes>,
    /// The beginning of a stream's next event.
    pub events: EventSplitter,
    /// Part of the answer that is still to come; `None` when it is complete.
    pub remaining: Option<ResponseBody>,
    /// True if another process answered than the one that was chosen: its description is unknown.
    pub is_of_other_process: bool,
}

/// Answer of a leg that has opened: the client gets this one.
pub struct UpstreamResponse {
    pub guard: LoadGuard,
    pub answer: PartialAnswer,
    pub is_sse: bool,
    /// See [`UpstreamAttempt::has_token_ids`].
    pub has_token_ids: bool,
    /// The engine's report of the stages up to its first token.
    pub stages: Option<EngineStages>,
    /// Set if the events of the stream are still to be translated.
    pub translation: Option<Box<AnswerTranslation>>,
    /// True if the answer was merged with that of another worker: it is no worker's own any more,
    /// and ends with a finish_reason alone.
    pub is_merged: bool,
}

/// Reply to the client if no other worker does better.
#[derive(Debug)]
pub enum ErrorReply {
    /// An error of the router.
    Error(RouteError),
    /// The worker's own words.
    Answer {
        status: StatusCode,
        headers: HeaderMap,
        body: Bytes,
    },
}

#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct AttemptError {
    pub role: Role,
    pub worker: WorkerId,
    pub reason: AttemptReason,
    pub class: RetryClass,
    /// Set if the worker broke with the request in hand.
    pub worker_break: Option<WorkerBreak>,
    /// True if no worker is to be avoided for this failure: a kept prefill was of no use any more,
    /// a room was in use, or another process refused than the one that was chosen.
    pub is_stale: bool,
    pub reply: ErrorReply,
}

/// Reason of a decode worker that can never work with its prefill worker.
pub const PAIR_INCOMPATIBLE: AttemptReason = AttemptReason::Code(ProtocolCode::PairIncompatible);

impl AttemptError {
    /// The worker's own words, if it had any.
    pub fn message(&self) -> Option<String> {
        let ErrorReply::Answer { body, .. } = &self.reply else {
            return None;
        };
        error_message(&stated_errors::error_data(body))
    }

    fn new(leg: &LoadGuard, reason: AttemptReason, class: RetryClass, reply: ErrorReply) -> Self {
        Self {
            role: leg.candidate.worker.role(),
            worker: leg.candidate.id,
            reason,
            class,
            worker_break: None,
            is_stale: false,
            reply,
        }
    }

    /// The worker, or the connection to it, was lost.
    fn broken(leg: &LoadGuard, reason: AttemptReason, problem: &str, detail: String) -> Self {
        let err = upstream_error(leg, problem, detail);
        Self::new(leg, reason, RetryClass::Broken, ErrorReply::Error(err))
    }

    fn send(leg: &LoadGuard, err: &SendError) -> Self {
        match err {
            SendError::Refused(_) | SendError::Connect(_) => Self::broken(
                leg,
                AttemptReason::Connect,
                "could not be reached",
                err.to_string(),
            ),
            SendError::Broken(_) => Self::broken(
                leg,
                AttemptReason::Reset,
                "broke the connection before its answer",
                err.to_string(),
            ),
            SendError::Exhausted(cause) => {
                let err = RouteError::Exhausted {
                    cause: cause.clone(),
                };
                let reason = AttemptReason::Code(ProtocolCode::ConnectionsExhausted);
                Self::new(leg, reason, RetryClass::Refused, ErrorReply::Error(err))
            }
        }
    }

    /// The worker answered with an error; `code`: the one in its body.
    fn answer(
        leg: &LoadGuard,
        code: Option<String>,
        status: StatusCode,
        headers: HeaderMap,
        body: Bytes,
    ) -> Self {
        let reply = ErrorReply::Answer {
            status,
            headers,
            body,
        };
        match code.as_deref().and_then(ProtocolCode::parse) {
            Some(code) => Self::new(leg, AttemptReason::Code(code), code.retry_class(), reply),
            None => {
                let label = StatusLabel::from_status(status.as_u16());
                let class = RetryClass::of_status(status.as_u16());
                Self::new(leg, AttemptReason::Status(label), class, reply)
            }
        }
    }

    /// The same refusal, if another process sent it than the one that was chosen: no worker is to
    /// be avoided for that.
    fn of_other_process(self) -> Self {
        Self {
            reason: AttemptReason::Restarted,
            class: RetryClass::Leaving,
            is_stale: true,
            ..self
        }
    }

    fn status(&self) -> Option<StatusCode> {
        let ErrorReply::Answer { status, .. } = &self.reply else {
            return None;
        };
        Some(*status)
    }

    /// True if the worker has too much to do or is leaving, and refuses at once.
    fn is_overload(&self) -> bool {
        match self.class {
            RetryClass::Overloaded | RetryClass::Leaving => true,
            RetryClass::Broken => self.status() == Some(StatusCode::SERVICE_UNAVAILABLE),
            RetryClass::Refused | RetryClass::Unexplained => false,
        }
    }

    /// True if the worker does not take the request: the path, the model or the key is missing at
    /// the worker, or in the request.
    pub fn is_denial(&self) -> bool {
        matches!(
            self.status().map(|status| status.as_u16()),
            Some(401 | 403..=405)
        )
    }

    /// Pause that the worker asks for.
    pub fn retry_after_ms(&self) -> Option<u64> {
        let ErrorReply::Answer { headers, .. } = &self.reply else {
            return None;
        };
        retry_after_ms(headers)
    }

    /// Evidence of this failure about the worker. The client's mistakes and overload are none; an
    /// unexplained error is judged when there is a second opinion (retry.rs).
    fn outcome(&self) -> RequestOutcome {
        let is_client_error = self.status().is_some_and(|status| status.is_client_error());
        let is_pair_fault = self.reason == PAIR_INCOMPATIBLE;
        let is_partner_fault =
            self.role == Role::Decode && (self.reason.blames_partner() || is_pair_fault);
        let is_worker_fault =
            self.class == RetryClass::Broken || self.reason == AttemptReason::Silent;
        if is_client_error || is_partner_fault || !is_worker_fault {
            RequestOutcome::Unknown
        } else {
            RequestOutcome::Failure
        }
    }
}

/// `Retry-After`: seconds, or an HTTP date.
fn retry_after_ms(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(secs) = text.parse::<u64>() {
        return Some(secs.saturating_mul(1000));
    }
    let date = jiff::fmt::rfc2822::parse(text).ok()?;
    let left_ms = date.timestamp().as_millisecond() - jiff::Timestamp::now().as_millisecond();
    Some(u64::try_from(left_ms).unwrap_or(0))
}

/// Metric label of a status: closed set.
pub fn status_label(status: StatusCode) -> &'static str {
    StatusLabel::from_status(status.as_u16()).into_str()
}

/// The leg's worker failed. `problem`: a predicate that clients see; `detail`: for logs.
pub fn upstream_error(leg: &LoadGuard, problem: &str, detail: String) -> RouteError {
    RouteError::Upstream {
        role: leg.candidate.worker.role(),
        worker: leg.candidate.name.clone(),
        problem: problem.to_owned(),
        detail,
    }
}

/// Gives a worker's own words the form of the client's API.
fn translate_reply(translation: &AnswerTranslation, reply: &mut ErrorReply) {
    if let ErrorReply::Answer {
        status,
        headers,
        body,
    } = reply
    {
        *body = translation.translate_error(*status, headers, body);
    }
}

/// Replacement of an error answer that is too long to be passed on: the class is its status's.
fn error_too_long(status: StatusCode) -> Bytes {
    let message = format!("the worker's error answer is longer than {MAX_ERROR_BODY} bytes");
    error_body(&message, "server_error", None, status_label(status))
}

/// The leg's worker sent nothing for `limit`.
pub fn silent_error(leg: &LoadGuard, limit: Duration) -> RouteError {
    RouteError::UpstreamSilent {
        role: leg.candidate.worker.role(),
        worker: leg.candidate.name.clone(),
        waited_ms: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
    }
}

impl UpstreamAttempt {
    /// Send and read until the answer can be committed to. Dropping the future closes the
    /// connection.
    pub async fn open(mut self) -> Result<UpstreamResponse, AttemptError> {
        let mut translation = self.translation.take();
        let mut opened = self.open_unless_hung(translation.is_some()).await;
        if let Ok(answer) = opened {
            opened = self
                .translate_whole(answer, translation.as_deref_mut())
                .map_err(|failure| *failure);
        }
        self.settle(&mut opened);
        if let (Err(failure), Some(translation)) = (&mut opened, &translation) {
            translate_reply(translation, &mut failure.reply);
        }
        let mut answer = opened?;
        let stages = self.take_stages(&mut answer.headers);
        let is_sse = is_sse(&answer.headers);
        if is_sse {
            self.guard.first_token();
        }
        if let Some(translation) = &translation {
            translation.add_headers(&mut answer.headers);
        }
        let translation = translation.filter(|_| is_sse);
        Ok(UpstreamResponse {
            guard: self.guard,
            answer,
            is_sse,
            has_token_ids: self.has_token_ids && is_sse,
            stages,
            translation,
            is_merged: false,
        })
    }

    /// Send, read the answer to its end and drop it, or keep up to `MAX_HELD` bytes when `keep`.
    /// For prefill legs, whose answer the client does not see.
    pub async fn drain(mut self, keep: bool) -> Result<Vec<Bytes>, AttemptError> {
        let mut drained = self.try_drain(keep).await;
        self.settle(&mut drained);
        drained
    }

    async fn try_drain(&mut self, keep: bool) -> Result<Vec<Bytes>, AttemptError> {
        let PartialAnswer {
            mut headers,
            pieces,
            mut events,
            mut remaining,
            ..
        } = self.open_unless_hung(false).await?;
        self.take_stages(&mut headers);
        self.guard.read_usage(pieces.iter());
        // A prefill worker's answer begins when the prompt is computed.
        self.guard.first_token();
        let is_stream = is_sse(&headers);
        let mut error = if is_stream {
            pieces.iter().find_map(from_error)
        } else {
            None
        };
        let mut find_error = |piece: Bytes| {
            if is_stream {
                from_error(&events.push(piece)?)
            } else {
                None
            }
        };
        let mut kept = if keep { pieces } else { Vec::new() };
        let mut kept_bytes: usize = kept.iter().map(Bytes::len).sum();
        while error.is_none()
            && let Some(body) = &mut remaining
        {
            let Some(piece) = self.next_piece(body).await? else {
                // The last event may lack the blank line that ends it.
                error = find_error(Bytes::from_static(b"\n\n"));
                break;
            };
            error = find_error(piece.clone());
            kept_bytes += piece.len();
            if keep && kept_bytes <= MAX_HELD {
                kept.push(piece);
            }
        }
        match error {
            Some(error) => Err(self
                .error_in_stream(headers, &error, events, remaining)
                .await),
            None => Ok(kept),
        }
    }

    fn take_stages(&self, headers: &mut HeaderMap) -> Option<EngineStages> {
        let stages = engine_stages::take(headers)?;
        self.guard.timeline.stages(&stages);
        Some(stages)
    }

    /// Attribute the end of the leg to its worker.
    fn settle<T>(&mut self, result: &mut Result<T, AttemptError>) {
        self.guard.settle(match result {
            Ok(_) => RequestOutcome::Success,
            Err(failure) => failure.outcome(),
        });
        let worker = &self.guard.candidate.worker;
        let penalty = &self.guard.candidate.penalty;
        let Err(failure) = result else {
            penalty.lock().record_answer(now_ms());
            return;
        };
        if failure.is_overload() {
            penalty
                .lock()
                .record_overload(failure.retry_after_ms(), now_ms());
        }
        if failure.reason.is_break() {
            failure.worker_break = Some(worker.note_break(now_ms()));
        }
        let is_connection_lost = matches!(
            failure.reason,
            AttemptReason::Connect | AttemptReason::Reset
        );
        // Another process may be there by now.
        if is_connection_lost {
            worker.observe_process(ProcessSign::Broken);
        }
        // The probe that follows finds out whether the worker drains, and for how long.
        if is_connection_lost || failure.reason == AttemptReason::Code(ProtocolCode::Draining) {
            worker.suspect.notify_one();
        }
    }

    /// `is_translated`: the client gets another answer that is made of the worker's.
    async fn open_unless_hung(&self, is_translated: bool) -> Result<PartialAnswer, AttemptError> {
        let worker = &self.guard.candidate.worker;
        match worker.unless_hung(self.try_open(is_translated)).await {
            Ok(opened) => opened,
            Err(health) => Err(AttemptError::broken(
                &self.guard,
                AttemptReason::Hung,
                "sent no answer and fails its health checks",
                health,
            )),
        }
    }

    async fn try_open(&self, is_translated: bool) -> Result<PartialAnswer, AttemptError> {
        let pool = &self.guard.candidate.worker.pool;
        let note_sent = || self.guard.timeline.sent();
        let sending = pool.send(&self.head, self.body.clone(), &note_sent);
        let sent = timeout(self.limit, sending)
            .await
            .map_err(|_| self.silent())?;
        let response = sent.map_err(|err| AttemptError::send(&self.guard, &err))?;
        let (mut head, mut body) = response.into_parts();
        let report = load_report::take(&mut head.headers);
        let is_of_other_process = report.is_some_and(|report| self.guard.load_reported(&report));
        if head.status.as_u16() >= 400 {
            let refusal = self.read_refusal(head.status, head.headers, body).await?;
            return Err(if is_of_other_process {
                refusal.of_other_process()
            } else {
                refusal
            });
        }
        let mut events = EventSplitter::default();
        let mut pieces = Vec::with_capacity(1);
        let remaining = if is_sse(&head.headers) {
            let run = self.read_first_events(&mut body, &mut events).await?;
            if let Some(begin) = stated_errors::error_place(&run, is_translated) {
                return Err(self
                    .error_in_stream(head.headers, &run[begin..], events, Some(body))
                    .await);
            }
            pieces.push(run);
            (!body.is_end()).then_some(body)
        } else {
            let is_complete = self.read_held(&mut body, &mut pieces).await?;
            if is_complete && let Some(error) = stated_errors::whole_error(&mut pieces) {
                return Err(self.error_in_whole(head.headers, error));
            }
            (!is_complete).then_some(body)
        };
        Ok(PartialAnswer {
            status: head.status,
            headers: head.headers,
            pieces,
            events,
            remaining,
            is_of_other_process,
        })
    }

    /// Read an answer whose status is an error.
    async fn read_refusal(
        &self,
        status: StatusCode,
        headers: HeaderMap,
        mut body: ResponseBody,
    ) -> Result<AttemptError, AttemptError> {
        let text = self.collect(Bytes::new(), &mut body).await?;
        let text = text.unwrap_or_else(|| error_too_long(status));
        let code = error_code(&text);
        Ok(AttemptError::answer(
            &self.guard,
            code,
            status,
            headers,
            text,
        ))
    }

    /// Read a stream up to the first run of events that has data: those without say that the worker
    /// lives, not that it has begun. Runs of comments in front of it are dropped, others are part
    /// of what is returned.
    async fn read_first_events(
        &self,
        body: &mut ResponseBody,
        events: &mut EventSplitter,
    ) -> Result<Bytes, AttemptError> {
        let mut held = Vec::new();
        loop {
            let run = match self.next_piece(body).await? {
                Some(piece) => events.push(piece),
                None => Some(events.finish().ok_or_else(|| {
                    let problem = "ended the stream before its first event";
                    AttemptError::broken(&self.guard, AttemptReason::Reset, problem, String::new())
                })?),
            };
            let Some(run) = run else {
                continue;
            };
            let has_begun = first_data_event(without_mark(&run)).is_some();
            if has_begun && held.is_empty() {
                return Ok(run);
            }
            if has_begun || comments_len(&run) < run.len() {
                held.extend_from_slice(&run);
            }
            if has_begun || held.len() > MAX_HELD {
                return Ok(Bytes::from(held));
            }
        }
    }

    /// Read an answer that is no stream to its end, or until it is too long to hold. Returns
    /// whether it is complete.
    async fn read_held(
        &self,
        body: &mut ResponseBody,
        pieces: &mut Vec<Bytes>,
    ) -> Result<bool, AttemptError> {
        let mut held_bytes = 0;
        while held_bytes <= MAX_HELD {
            let Some(piece) = self.next_piece(body).await? else {
                return Ok(true);
            };
            held_bytes += piece.len();
            pieces.push(piece);
        }
        Ok(false)
    }

    async fn next_piece(&self, answer: &mut ResponseBody) -> Result<Option<Bytes>, AttemptError> {
        let piece = timeout(self.limit, answer.piece())
            .await
            .map_err(|_| self.silent())?;
        piece.transpose().map_err(|err| {
            let detail = with_source(&err);
            AttemptError::broken(
                &self.guard,
                AttemptReason::Reset,
                "broke off its answer",
                detail,
            )
        })
    }

    /// The worker was silent for too long.
    fn silent(&self) -> AttemptError {
        let err = silent_error(&self.guard, self.limit);
        AttemptError::new(
            &self.guard,
            AttemptReason::Silent,
            RetryClass::Refused,
            ErrorReply::Error(err),
        )
    }

    /// A stream whose event is an error. If no other worker does better, the client gets the stream
    /// from `run` on, which begins with that event, as the worker sent it.
    async fn error_in_stream(
        &self,
        headers: HeaderMap,
        run: &[u8],
        mut events: EventSplitter,
        remaining: Option<ResponseBody>,
    ) -> AttemptError {
        let first = Bytes::from([run, &events.take_part()].concat());
        let json = stated_errors::error_data(&first);
        let collected = match remaining {
            Some(mut body) => self.collect(first.clone(), &mut body).await,
            None => Ok(Some(first.clone())),
        };
        let body = match collected {
            Ok(Some(body)) => body,
            // The event, without what follows it.
            Ok(None) => single_event_stream(&json),
            Err(failure) => return failure,
        };
        let failure = AttemptError::answer(
            &self.guard,
            error_code(&json),
            StatusCode::OK,
            headers,
            body,
        );
        failure.of_stated(stated_status(&json))
    }

    /// Read the rest of a short answer, after `first`; `None`: it is longer than `MAX_ERROR_BODY`.
    async fn collect(
        &self,
        first: Bytes,
        answer: &mut ResponseBody,
    ) -> Result<Option<Bytes>, AttemptError> {
        let mut body = Vec::from(first);
        while let Some(piece) = self.next_piece(answer).await? {
            body.extend_from_slice(&piece);
            if body.len() > MAX_ERROR_BODY {
                return Ok(None);
            }
        }
        Ok(Some(Bytes::from(body)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
