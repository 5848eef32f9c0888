//! Resumption of a stream by another worker: the decision, the attempts, and their outcome.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use router_core::{AttemptReason, GiveUpReason, LostAnswer, ResumeVerdict, Role};
use tokio::time::{Instant, timeout_at};

use crate::clock::{ms_since, now_ms};
use crate::dispatch::app::AppState;
use crate::dispatch::attempt_result::{AttemptFailure, AttemptResult};
use crate::dispatch::context::{RequestContext, ResumePoint};
use crate::dispatch::proxy_body::client_answer::ClientAnswer;
use crate::dispatch::proxy_body::event::{
    BodyEvent, ResumeFailure, ResumedAnswer, StreamFailure, WorkerLoss,
};
use crate::dispatch::proxy_body::relay::{EndedAnswer, Relay, RelayedLeg, RelayedRequest};
use crate::dispatch::retry::{count_refused_retry, send_with_retries};
use crate::error::RouteError;
use crate::observability::metrics::RouterMetrics;
use crate::response::failover::{NotResumable, ResumeBuffer};
use crate::response::keepalive::KeepAlive;

/// Decide whether another worker is asked to resume the stream that `leg` lost, and prepare the
/// request for it.
pub fn decide_resume(
    app: &AppState,
    request: &mut RequestContext,
    leg: &RelayedLeg,
    loss: &WorkerLoss,
    buffer: &ResumeBuffer,
) -> ResumeVerdict {
    let candidate = &leg.guard.candidate;
    let role = candidate.worker.role();
    let tokens = buffer.tokens();
    let resumed_at = request
        .attempts
        .resume_point
        .as_ref()
        .map_or(0, |point| point.tokens);
    let has_progress = tokens > resumed_at;
    request.attempts.resume_point = (tokens > 0).then(|| ResumePoint {
        fingerprint: candidate.fingerprint,
        tokens,
        resume: buffer.to_json_field(&candidate.description.fingerprint),
    });
    // A worker that gave the client tokens has answered the request: others that failed it before
    // may be tried again.
    let excluded = if has_progress {
        vec![candidate.id]
    } else {
        request.attempts.retries.excluded_with(candidate.id)
    };
    // A silent worker or an error event is no break: only a broken worker may have been broken by
    // the request.
    let worker_break = if loss.reason.is_break() {
        Some(candidate.worker.note_break(now_ms()))
    } else {
        None
    };
    let facts = LostAnswer {
        worker: candidate.id,
        reason: loss.reason,
        worker_break,
        held_ms: request.attempt_ms(),
        has_progress,
        // Read for silent workers only, and the look-up visits every worker.
        has_other_worker: loss.reason != AttemptReason::Silent
            || app.fleet.has_other(role, &request.wanted(), &excluded),
        is_shutting_down: app.is_cut(),
    };
    let verdict = request.attempts.retries.decide_resume(&facts, &app.retry);
    let is_poison = verdict == ResumeVerdict::GiveUp(GiveUpReason::PoisonRequest);
    // A request whose stream moved did not break its worker.
    if !has_progress && let Some(worker_break) = worker_break {
        request.report_break(app, candidate.id, worker_break, is_poison);
    }
    if let ResumeVerdict::GiveUp(reason) = verdict
        && !is_poison
    {
        // A poisonous request has a metric of its own.
        count_refused_retry(app, reason);
        count_failover(&app.metrics, role, FailoverOutcome::Refused);
    }
    verdict
}

/// Outcome of a lost stream, as a label of the metric.
#[derive(Clone, Copy, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
enum FailoverOutcome {
    Resumed,
    Failed,
    ClientGone,
    Refused,
}

fn count_failover(metrics: &RouterMetrics, role: Role, outcome: FailoverOutcome) {
    metrics
        .failovers
        .with_label_values(&[role.into_str(), outcome.into_str()])
        .inc();
}

/// Counts the outcome of a resumption when it is dropped: that the client left, if no other was
/// set.
struct FailoverCount {
    role: Role,
    outcome: FailoverOutcome,
    metrics: Arc<RouterMetrics>,
}

impl Drop for FailoverCount {
    fn drop(&mut self) {
        count_failover(&self.metrics, self.role, self.outcome);
    }
}

type ResumeResult = (Box<RequestContext>, AttemptResult);

/// Attempts at other workers to resume a stream. The request comes back with their result.
pub struct ResumeAttempt {
    count: FailoverCount,
    attempts: Pin<Box<dyn Future<Output = ResumeResult> + Send>>,
    began_at: Instant,
    keepalive: KeepAlive,
    /// Error for the client if no worker resumes the stream.
    failure: StreamFailure,
}

impl ResumeAttempt {
    /// Ask other workers to resume the stream from where the client has it.
    pub fn start(
        app: &Arc<AppState>,
        mut request: Box<RequestContext>,
        mut leg: RelayedLeg,
        loss: WorkerLoss,
        buffer: &mut ResumeBuffer,
    ) -> Self {
        leg.attribute_loss(&loss, &request.record);
        buffer.forget_unpassed();
        let candidate = &leg.guard.candidate;
        let role = candidate.worker.role();
        let tokens = buffer.tokens();
        let reason = loss.reason;
        let record = &mut request.record;
        record.timeline.failed(role, reason, Some(tokens));
        tracing::warn!(
            rid = record.rid,
            %role,
            lost_worker = %candidate.name,
            %reason,
            tokens,
            "the worker of a stream was lost; another is asked to resume it"
        );
        let url = candidate.worker.url().to_string();
        let detail = format!("{reason} after {tokens} tokens");
        app.fleet
            .events
            .add_failover(role, &url, detail, &record.rid);
        let interval = Duration::from_secs(app.config.limits.sse_keepalive_secs);
        Self {
            count: FailoverCount {
                role,
                outcome: FailoverOutcome::ClientGone,
                metrics: app.metrics.clone(),
            },
            attempts: Box::pin(attempt_resume(app.clone(), request)),
            began_at: Instant::now(),
            keepalive: KeepAlive::new(interval),
            failure: loss.failure,
        }
    }

    /// Wait for the attempts. `None`: a comment was queued that keeps the client's connection
    /// alive.
    pub fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
        answer: &mut ClientAnswer,
    ) -> Poll<Option<BodyEvent>> {
        let Poll::Ready((request, result)) = self.attempts.as_mut().poll(cx) else {
            let comment = ready!(self.keepalive.poll(cx));
            answer.push_comment(comment);
            return Poll::Ready(None);
        };
        let event = match result {
            Ok((opened, prefill)) if opened.is_sse => {
                BodyEvent::ResumeOpened(Box::new(ResumedAnswer {
                    request,
                    opened,
                    prefill,
                }))
            }
            // Its bytes would land in the middle of the client's stream.
            Ok(_) => BodyEvent::ResumeFailed(request, ResumeFailure::NotAStream),
            Err(failure) => BodyEvent::ResumeFailed(request, ResumeFailure::Attempts(failure)),
        };
        Poll::Ready(Some(event))
    }

    /// Pass on the answer of the worker that resumes the stream.
    pub fn relay_resumed(
        mut self,
        resumed: ResumedAnswer,
        app: &AppState,
        answer: &mut ClientAnswer,
    ) -> Relay {
        self.count.outcome = FailoverOutcome::Resumed;
        let role = self.count.role;
        let pause = self.began_at.elapsed();
        app.metrics
            .failover_pause
            .with_label_values(&[role.into_str()])
            .observe(pause.as_secs_f64());
        let ResumedAnswer {
            request,
            opened,
            prefill,
        } = resumed;
        tracing::info!(
            rid = request.record.rid,
            %role,
            worker = %opened.guard.candidate.name,
            paused_ms = pause.as_millis() as u64,
            "a stream was resumed"
        );
        let mut relayed = RelayedRequest::Resumable(request);
        // The next loss could not be resumed: without the tokens of this part the client would get
        // some of them twice.
        if !opened.has_token_ids {
            answer.end_reports();
            relayed = relayed.into_recorded();
        }
        // The worker was restarted since it was described: its fingerprint is not known.
        if opened.answer.is_of_other_process {
            answer.disable_resume(NotResumable::UnknownWorker);
        }
        Relay::new(relayed, opened, prefill, app.config.request_timeout())
    }

    /// No other worker resumes the stream: it ends with the error of the worker that was lost.
    pub fn give_up(
        mut self,
        request: Box<RequestContext>,
        resume_failure: ResumeFailure,
        app: &AppState,
        answer: &mut ClientAnswer,
    ) -> EndedAnswer {
        self.count.outcome = FailoverOutcome::Failed;
        // The shutdown ended the attempts; the worker that was lost is not the reason.
        let failure = if app.is_cut() {
            StreamFailure::Router(RouteError::Draining)
        } else {
            merge_failures(self.failure, resume_failure)
        };
        let mut request = RelayedRequest::Resumable(request);
        let truncation = failure.end_answer(request.record(), answer);
        EndedAnswer {
            request: Some(request),
            guard: None,
            truncation,
        }
    }
}

/// Send the request with its resume point until an answer opens or the client's time is over.
async fn attempt_resume(app: Arc<AppState>, mut request: Box<RequestContext>) -> ResumeResult {
    let started = request.record.started;
    let ends_at = request.ends_at();
    let attempts = send_with_retries(&app, &mut request);
    let result = match ends_at {
        None => attempts.await,
        Some(ends_at) => match timeout_at(ends_at, attempts).await {
            Ok(result) => result,
            Err(_) => {
                let waited_ms = ms_since(started);
                Err(RouteError::DeadlineOver { waited_ms }.into())
            }
        },
    };
    (request, result)
}

/// The failure of the lost worker, with the reason why no other worker resumes its stream.
fn merge_failures(worker_failure: StreamFailure, resume_failure: ResumeFailure) -> StreamFailure {
    let explanation = match resume_failure {
        ResumeFailure::Attempts(AttemptFailure::Refused(err)) if err.code() == "timeout" => {
            // The client's own deadline: it explains more than the worker that was lost.
            return StreamFailure::Router(err);
        }
        ResumeFailure::Attempts(AttemptFailure::Refused(err)) => err.client_message(),
        ResumeFailure::Attempts(AttemptFailure::Failed(failure)) => {
            format!(
                "the last attempt, at a {} worker, failed: {}",
                failure.role, failure.reason
            )
        }
        ResumeFailure::NotAStream => "its answer was no stream".to_owned(),
    };
    match worker_failure {
        StreamFailure::Router(RouteError::Upstream {
            role,
            worker,
            problem,
            detail,
        }) => StreamFailure::Router(RouteError::Upstream {
            role,
            worker,
            problem: format!("{problem}, and no other worker resumed the answer ({explanation})"),
            detail,
        }),
        failure => failure,
    }
}
