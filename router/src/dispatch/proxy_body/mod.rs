//! The body of an answer to a client: a worker's pieces pass through, and all that the request
//! holds is held here.
//!
//! 1. `ProxyBody::new` gets the request, the pieces that the leg has read, and the rest of the
//!    answer. The phase is `Relaying` ([`phase`]);
//! 2. hyper polls the body as fast as the client reads: a slow client slows the worker down, and no
//!    pieces pile up here;
//! 3. the worker completes its answer: the record is settled as ok, and the phase is `Ended`;
//! 4. the worker is lost, and it reported the tokens behind the text (failover.rs): other workers
//!    are asked to resume the stream, and the phase is `Resuming`. The client sees a pause, with
//!    comments that keep its connection alive. The request waits for its turn and for a worker
//!    (resume_pacing.rs), and is given up only after --retry-max-retries attempts without a token
//!    of progress. When another worker's answer opens, the phase is `Relaying` again;
//! 5. the worker is lost, and no other resumes its answer: a stream ends with one error event and
//!    [DONE], any other answer by a cut of the connection. The phase is `Ended`;
//! 6. the body is dropped before its end (the client left): the guards close the connections of
//!    both legs and free the load.

/// Pieces for the client, and how far the stream got.
mod client_answer;
/// Events of a body.
mod event;
/// Phases of a body and their transitions.
mod phase;
/// A worker's answer that passes through.
mod relay;
/// Resumption by another worker.
mod resume;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};

use self::client_answer::ClientAnswer;
use self::event::{BodyEvent, TruncatedResponse};
use self::phase::BodyPhase;
use self::relay::{EndedAnswer, Relay, RelayedRequest};
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::UpstreamResponse;
use crate::dispatch::context::RequestContext;
use crate::dispatch::prefill_leg::PrefillAttempt;
use crate::error::RouteError;
use crate::response::failover::NotResumable;
use crate::response::stream_error::StreamErrorForm;

/// Body of an answer to a client.
pub struct ProxyBody {
    app: Arc<AppState>,
    answer: ClientAnswer,
    phase: BodyPhase,
}

impl ProxyBody {
    pub fn new(
        app: Arc<AppState>,
        request: Box<RequestContext>,
        opened: UpstreamResponse,
        prefill: Option<PrefillAttempt>,
    ) -> Self {
        let status = opened.answer.status;
        let is_batch = request.scan.batch.is_some();
        let mut answer = if opened.has_token_ids {
            let held_bytes = request.held_bytes();
            ClientAnswer::reported_stream(status, is_batch, &app.failover_memory, held_bytes)
        } else if opened.is_sse {
            ClientAnswer::stream(status, is_batch)
        } else {
            ClientAnswer::whole(status)
        };
        // An answer that is no stream has no place for an error: its connection is cut instead.
        if opened.is_sse || opened.has_token_ids {
            let form = StreamErrorForm::of_request(&request.scan, &request.record.rid);
            answer = answer.with_error_form(form);
        }
        // The worker was restarted since it was described: its fingerprint is not known, and
        // another worker could sample other tokens.
        if opened.answer.is_of_other_process {
            answer.disable_resume(NotResumable::UnknownWorker);
        }
        let mut request_state = RelayedRequest::Resumable(request);
        // Nothing can be resumed, so the body of the request is freed now: it may be megabytes.
        if !opened.has_token_ids {
            request_state = request_state.into_recorded();
        }
        let silence_limit = app.config.request_timeout();
        let relay = Relay::new(request_state, opened, prefill, silence_limit);
        let mut body = Self {
            app,
            answer,
            phase: BodyPhase::Relaying(relay),
        };
        body.forward_opened_pieces();
        body
    }

    /// Pass on all that was read when the answer opened: hyper asks for the size of a complete
    /// answer before it polls the body.
    fn forward_opened_pieces(&mut self) {
        while let BodyPhase::Relaying(relay) = &mut self.phase
            && relay.has_read()
        {
            if let Some(event) = relay.forward_opened_piece(&mut self.answer) {
                self.handle(event);
            }
        }
    }

    fn handle(&mut self, event: BodyEvent) {
        let stepped = self.phase.step(event, &self.app, &mut self.answer);
        if let Err(illegal) = stepped {
            self.end_with_defect(illegal.to_string());
        }
    }

    /// End the body after an error in this program.
    fn end_with_defect(&mut self, detail: String) {
        tracing::error!(detail, "response body ends");
        let err = RouteError::Internal { detail };
        if let Some(record) = self.phase.record() {
            record.end(StatusCode::INTERNAL_SERVER_ERROR, err.code());
        }
        self.phase = BodyPhase::Ended(EndedAnswer {
            truncation: Some(TruncatedResponse(err)),
            ..EndedAnswer::default()
        });
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
            // Queued pieces go before the next read, so that a slow client slows the worker down
            // and no pieces pile up.
            if let Some(piece) = this.answer.pop() {
                if let Some(record) = this.phase.record() {
                    record.first_byte(this.answer.status);
                }
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
            let event = match &mut this.phase {
                BodyPhase::Relaying(relay) => {
                    ready!(relay.poll_event(cx, &this.app, &mut this.answer))
                }
                BodyPhase::Resuming(attempt) => ready!(attempt.poll_event(cx, &mut this.answer)),
                BodyPhase::Ended(ended) => return Poll::Ready(ended.truncation.take().map(Err)),
            };
            if let Some(event) = event {
                this.handle(event);
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.phase {
            BodyPhase::Relaying(_) | BodyPhase::Resuming(_) => false,
            BodyPhase::Ended(ended) => !self.answer.has_queued() && ended.truncation.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.phase {
            BodyPhase::Ended(_) if !self.answer.is_stream() => {
                SizeHint::with_exact(self.answer.queued_bytes())
            }
            _ => SizeHint::default(),
        }
    }
}

impl Drop for ProxyBody {
    /// Clients may leave at `[DONE]`, before the worker has ended its answer: they have all of it.
    fn drop(&mut self) {
        // Without this, openai-python's requests, which it closes at `[DONE]`, would be recorded as
        // 499 and their usage lost.
        if self.answer.is_delivered()
            && let BodyPhase::Relaying(relay) = std::mem::take(&mut self.phase)
        {
            relay.complete_unread(&self.answer);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
