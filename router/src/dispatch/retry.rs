//! Attempts until an answer opens.
//!
//! 1. [`attempt_in_turn`] attempts once;
//! 2. no worker could be chosen: wait for one, or give up;
//! 3. the attempt failed at a worker: `router_core::resilience::retry_verdict` decides, and this
//!    module sleeps, waits for a worker, or gives up.

use std::sync::Arc;
use std::time::Duration;

use router_core::{
    AttemptReason, FailedAttempt, GiveUpReason, ProtocolCode, RetryClass, RetryLimits, RetryPlan,
    RetryVerdict, Role, SelectionRefusal,
};
use tokio::time::{Instant, sleep};

use crate::clock::now_ms;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::AttemptError;
use crate::dispatch::attempt_result::{AttemptFailure, AttemptResult};
use crate::dispatch::chat_form::needs_chat;
use crate::dispatch::context::RequestContext;
use crate::dispatch::disaggregated::{self, PendingPrefill, vllm};
use crate::dispatch::leg_setup::{build_leg, forwarded_ids};
use crate::dispatch::resume_pacing::{ResumeTurn, WorkerWait};
use crate::error::RouteError;

/// Send the request until an answer opens, or no other attempt is to be made.
pub async fn send_with_retries(app: &Arc<AppState>, request: &mut RequestContext) -> AttemptResult {
    let mut reusable_prefill = None;
    let mut worker_wait = WorkerWait::default();
    loop {
        let failure = match attempt_in_turn(app, request, &mut reusable_prefill).await {
            Ok(answer) => {
                // Another worker answered, so that the first one's error was its own fault. Without
                // this a worker that fails every request would keep its good name.
                if let Some(refuted) = request.attempts.retries.take_refuted_worker() {
                    app.fleet.blame_refuted(refuted);
                }
                // The place is for waiting requests: kept by an open answer, it would refuse
                // others.
                request.admission.place = None;
                return Ok(answer);
            }
            Err(AttemptFailure::Refused(err)) => {
                let refusal = selection_refusal(app, &err);
                // No change of the fleet could help, and the client would wait for nothing.
                if !request.attempts.retries.waits_for_worker(refusal) {
                    return Err(err.into());
                }
                let may_attempt = worker_wait.wait_for_change(app, request).await;
                request.record.timeline.waited_for_worker();
                if !may_attempt {
                    return Err(err.into());
                }
                // Nothing was sent: the access log counts attempts at workers.
                request.record.attempts -= 1;
                continue;
            }
            Err(AttemptFailure::Failed(failure)) => failure,
        };
        match decide_retry(app, request, &failure) {
            RetryVerdict::Retry(plan) => pause_before_retry(app, request, &failure, plan).await,
            RetryVerdict::RetryInTurn(plan) => {
                // Waiting requests are bounded by --queue-size, or a dead fleet would gather them
                // without end.
                if !request.take_place(app) {
                    count_refused_retry(app, GiveUpReason::BudgetUsed);
                    return Err(failure.into());
                }
                request.attempts.retries.begin_pacing();
                pause_before_retry(app, request, &failure, plan).await;
            }
            RetryVerdict::WaitForWorker => {
                if !worker_wait.wait_for_change(app, request).await {
                    return Err(failure.into());
                }
            }
            RetryVerdict::GiveUp { .. } => return Err(failure.into()),
        }
    }
}

/// Attempt once, in turn if the request is paced.
async fn attempt_in_turn(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    reusable_prefill: &mut Option<PendingPrefill>,
) -> AttemptResult {
    // When a busy worker dies, all of its requests come at once: in turn they do not overload the
    // others.
    let _turn = if request.attempts.retries.is_paced() {
        Some(ResumeTurn::wait(app).await)
    } else {
        None
    };
    // A first attempt sends the client's body unchanged; a later one has less time left, and may
    // resume.
    if request.record.attempts > 0 || request.is_deadline_shrunk() {
        request.prepare_retry()?;
    }
    request.record.attempts += 1;
    request.attempts.began_at = Instant::now();
    let result = if app.fleet.is_pd() {
        // Boxed: requests to regular workers need less than half of its size.
        Box::pin(disaggregated::attempt_pair(app, request, reusable_prefill)).await
    } else {
        attempt_single(app, request).await
    };
    result.map_err(|failure| match failure {
        AttemptFailure::Refused(err) => explain_missing_model(app, request, err).into(),
        AttemptFailure::Failed(failure) => withdraw_refused_ids(app, request, failure).into(),
    })
}

/// Attempt at one worker that does prefill and decode.
async fn attempt_single(app: &Arc<AppState>, request: &mut RequestContext) -> AttemptResult {
    let chosen = app.fleet.choose(
        Role::Regular,
        &request.wanted(),
        request.attempts.retries.excluded_workers(),
    )?;
    let candidate = &chosen.candidate;
    request.record.worker = Some((candidate.name.clone(), chosen.why));
    let needs_chat = needs_chat(request.scan.dialect, &candidate.description);
    let form = request.choose_form(app, needs_chat).await?;
    let input_ids = forwarded_ids(app, request, candidate);
    let is_vllm = candidate.description.is_vllm();
    let body = match candidate.rank {
        // vLLM takes the rank as a header.
        Some(rank) if !is_vllm => {
            let fields = format!("\"data_parallel_rank\":{rank},\"routed_dp_rank\":{rank}");
            request.body_for(&form, &[], input_ids, &fields)
        }
        _ => request.body_for(&form, &[], input_ids, ""),
    };
    let leg = if is_vllm {
        vllm::build_ranked_leg(app, request, chosen, body)
    } else {
        build_leg(app, request, chosen, body)
    };
    Ok((leg.open().await?, None))
}

/// A worker refused the token ids that this router added to the body, since its tokenizer differs
/// from its description: the worker is described again, and the request is sent again with the text
/// alone.
fn withdraw_refused_ids(
    app: &AppState,
    request: &mut RequestContext,
    mut refusal: AttemptError,
) -> AttemptError {
    let is_mismatch = refusal.reason == AttemptReason::Code(ProtocolCode::FingerprintMismatch);
    // Without ids of this router the mismatch is the client's own, and sending it again cannot
    // help.
    if is_mismatch && request.routing.prompt.input_ids.take().is_some() {
        app.fleet.contradicted(refusal.role, refusal.worker);
        refusal.class = RetryClass::Leaving;
        refusal.is_stale = true;
    }
    refusal
}

/// The more specific error, if no registered worker serves the request's model.
fn explain_missing_model(app: &AppState, request: &RequestContext, err: RouteError) -> RouteError {
    match (&err, &request.scan.model) {
        (RouteError::NoWorker { role, .. }, Some(model)) if app.fleet.lacks_model(*role, model) => {
            RouteError::ModelNotFound {
                model: model.clone(),
                role: *role,
            }
        }
        _ => err,
    }
}

/// Refusal to choose a worker, as far as it decides about a wait.
fn selection_refusal(app: &AppState, err: &RouteError) -> SelectionRefusal {
    match err {
        RouteError::NoWorker { role, .. } => SelectionRefusal::NoWorker {
            may_return: app.fleet.may_return(*role),
        },
        RouteError::NoPair { .. } | RouteError::NoResumeWorker { .. } => SelectionRefusal::NoFit,
        _ => SelectionRefusal::Final,
    }
}

/// Decide what follows an attempt that failed at a worker, and report both.
fn decide_retry(
    app: &AppState,
    request: &mut RequestContext,
    failure: &AttemptError,
) -> RetryVerdict {
    let record = &request.record;
    record.timeline.failed(failure.role, failure.reason, None);
    record.upstream_error(failure.role, failure.reason);

    let facts = failure_facts(app, request, failure);
    let mut budget = app.retry_budget.lock();
    let limits = RetryLimits {
        config: &app.retry,
        budget: &mut budget,
        waits_for_workers: app.config.retry.worker_wait_timeout_secs > 0,
        now_ms: now_ms(),
    };
    let verdict = request
        .attempts
        .retries
        .decide_retry(&facts, limits, &mut rand::rng());
    drop(budget);

    let mut is_poison = false;
    match verdict {
        RetryVerdict::WaitForWorker => count_refused_retry(app, GiveUpReason::AttemptsUsed),
        RetryVerdict::GiveUp {
            reason,
            blames_worker,
        } => {
            is_poison = reason == GiveUpReason::PoisonRequest;
            count_refused_retry(app, reason);
            if blames_worker {
                app.fleet.count_failure(failure.role, failure.worker);
            }
        }
        RetryVerdict::Retry(_) | RetryVerdict::RetryInTurn(_) => {}
    }
    // Breaks of one request at several workers mark it as poisonous for all of them.
    if let Some(worker_break) = failure.worker_break {
        request.report_break(app, failure.worker, worker_break, is_poison);
    }
    verdict
}

fn failure_facts(
    app: &AppState,
    request: &RequestContext,
    failure: &AttemptError,
) -> FailedAttempt {
    let excluded = request.attempts.retries.excluded_with(failure.worker);
    let is_denial = failure.class == RetryClass::Refused && failure.is_denial();
    FailedAttempt {
        role: failure.role,
        worker: failure.worker,
        reason: failure.reason,
        class: failure.class,
        worker_break: failure.worker_break,
        is_stale: failure.is_stale,
        is_worker_denial: is_denial && app.fleet.judge_denial(failure.role, failure.worker),
        retry_after_ms: failure.retry_after_ms(),
        held_ms: request.attempt_ms(),
        has_other_worker: app
            .fleet
            .has_other(failure.role, &request.wanted(), &excluded),
        is_shutting_down: app.is_cut(),
    }
}

/// Count a retry that one of the limits refused.
pub fn count_refused_retry(app: &AppState, reason: GiveUpReason) {
    let limit = match reason {
        GiveUpReason::AttemptsUsed => "attempts",
        GiveUpReason::BudgetUsed => "budget",
        GiveUpReason::NotRetryable
        | GiveUpReason::PoisonRequest
        | GiveUpReason::ShuttingDown
        | GiveUpReason::NoOtherWorker => return,
    };
    app.metrics
        .retries_refused
        .with_label_values(&[limit])
        .inc();
}

/// Report that another attempt follows, and wait as long as the plan asks for.
async fn pause_before_retry(
    app: &AppState,
    request: &RequestContext,
    failure: &AttemptError,
    plan: RetryPlan,
) {
    log_retry(request, failure);
    app.metrics
        .retries
        .with_label_values(&[failure.reason.into_str()])
        .inc();
    // Without a pause no timer is started: another worker is ready now.
    if plan.backoff_ms > 0 {
        sleep(Duration::from_millis(plan.backoff_ms)).await;
    }
}

fn log_retry(request: &RequestContext, failure: &AttemptError) {
    let record = &request.record;
    let rid = &record.rid;
    let attempt = record.attempts;
    let reason = failure.reason.into_str();
    let is_lost = failure.reason.is_unreached() || failure.reason.is_break();
    if !is_lost {
        tracing::debug!(rid, attempt, reason, "trying again");
        return;
    }
    let sent_to = match failure.role {
        Role::Prefill => &record.prefill,
        Role::Decode | Role::Regular => &record.worker,
    };
    let lost_worker = sent_to.as_ref().map(|(name, _)| name);
    let role = failure.role.into_str();
    tracing::warn!(
        rid,
        attempt,
        role,
        lost_worker,
        reason,
        "the worker of a request was lost; trying again"
    );
}
