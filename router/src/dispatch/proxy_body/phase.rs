//! Phases of a response body, and the one function that changes them.
//!
//! ```text
//!                 WorkerLost, may be resumed
//!          ┌───────────────────────────────────────┐
//!          │                                       ▼
//!   ┌─ Relaying ◄───────────────────────────── Resuming
//!   │      │                ResumeOpened           │
//!   └──────┤                                       │ ResumeFailed
//!  Resume- │ AnswerCompleted,                      │
//!  Disabled│ WorkerLost                            │
//!          └───────────────► Ended ◄───────────────┘
//! ```
//!
//! Every other pair of phase and event is an [`IllegalTransition`], which leaves the phase as it
//! was.

use std::sync::Arc;

use router_core::ResumeVerdict;

use crate::dispatch::app::AppState;
use crate::dispatch::proxy_body::client_answer::ClientAnswer;
use crate::dispatch::proxy_body::event::{BodyEvent, StreamFailure, WorkerLoss};
use crate::dispatch::proxy_body::relay::{EndedAnswer, Relay, RelayedRequest};
use crate::dispatch::proxy_body::resume::{ResumeAttempt, decide_resume};
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;

/// Source of the pieces that are still to come.
#[derive(strum::IntoStaticStr)]
#[expect(
    clippy::large_enum_variant,
    reason = "most bodies are in the large one until their end, and need no allocation for it"
)]
pub enum BodyPhase {
    /// A worker's answer passes through.
    Relaying(Relay),
    /// The worker was lost, and others are asked to resume its stream.
    Resuming(ResumeAttempt),
    /// No more comes.
    Ended(EndedAnswer),
}

/// Event that cannot come in the phase of the body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("event {event} in phase {phase} of a response body")]
pub struct IllegalTransition {
    phase: &'static str,
    event: &'static str,
}

impl Default for BodyPhase {
    fn default() -> Self {
        BodyPhase::Ended(EndedAnswer::default())
    }
}

impl BodyPhase {
    /// The transition function: on `Err` the phase is as it was.
    pub fn step(
        &mut self,
        event: BodyEvent,
        app: &Arc<AppState>,
        answer: &mut ClientAnswer,
    ) -> Result<(), IllegalTransition> {
        *self = match (std::mem::take(self), event) {
            (BodyPhase::Relaying(relay), BodyEvent::AnswerCompleted) => {
                BodyPhase::Ended(relay.complete(answer))
            }
            (BodyPhase::Relaying(relay), BodyEvent::ResumeDisabled(reason)) => {
                BodyPhase::Relaying(relay.disable_resume(reason, app))
            }
            (BodyPhase::Relaying(relay), BodyEvent::WorkerLost(loss)) => {
                resume_or_end(relay, loss, app, answer)
            }
            (BodyPhase::Resuming(attempt), BodyEvent::ResumeOpened(resumed)) => {
                BodyPhase::Relaying(attempt.relay_resumed(*resumed, app, answer))
            }
            (BodyPhase::Resuming(attempt), BodyEvent::ResumeFailed(request, failure)) => {
                BodyPhase::Ended(attempt.give_up(request, failure, app, answer))
            }
            (phase, event) => {
                let illegal = IllegalTransition {
                    phase: (&phase).into(),
                    event: event.into(),
                };
                *self = phase;
                return Err(illegal);
            }
        };
        Ok(())
    }

    /// Record of the request; `None` while other workers are asked to resume the stream.
    pub fn record(&mut self) -> Option<&mut AccessLogEntry> {
        match self {
            BodyPhase::Relaying(relay) => Some(relay.request.record()),
            BodyPhase::Resuming(_) => None,
            BodyPhase::Ended(ended) => ended.request.as_mut().map(RelayedRequest::record),
        }
    }
}

/// The worker is lost: another resumes its stream, or the answer ends.
fn resume_or_end(
    relay: Relay,
    mut loss: WorkerLoss,
    app: &Arc<AppState>,
    answer: &mut ClientAnswer,
) -> BodyPhase {
    let Relay { request, mut leg } = relay;
    leg.close_connection();
    let is_open = answer.is_open();
    let request = match (request, answer.resumable()) {
        // A client that has the whole answer needs no other worker, and a router that ends has no
        // time for one.
        (RelayedRequest::Resumable(mut request), Some(buffer)) if is_open && !app.is_cut() => {
            let verdict = decide_resume(app, &mut request, &leg, &loss, buffer);
            if verdict == ResumeVerdict::Resume {
                let attempt = ResumeAttempt::start(app, request, leg, loss, buffer);
                return BodyPhase::Resuming(attempt);
            }
            RelayedRequest::Resumable(request)
        }
        (request, _) => request,
    };
    // The shutdown cut the answer off: blamed on the worker, it would open the worker's breaker.
    if is_open && app.is_cut() {
        loss.failure = StreamFailure::Router(RouteError::Draining);
    }
    BodyPhase::Ended(Relay { request, leg }.end_after_loss(loss, answer))
}
