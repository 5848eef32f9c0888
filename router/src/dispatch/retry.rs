//! Attempts until an answer opens: which failures are tried again, how often, and after which
//! pause.

use std::sync::Arc;
use std::time::Duration;

use router_core::{AttemptReason, ProtocolCode, RetryClass, Role, WorkerId};
use tokio::time::Instant;

use crate::clock::now_ms;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::AttemptError;
use crate::dispatch::context::RequestContext;
use crate::dispatch::disaggregated::{self, PendingPrefill, vllm};
use crate::dispatch::resume_pacing::{ResumeTurn, WorkerWait, may_come};
use crate::dispatch::types::{AttemptFailure, AttemptResult, ids_for, leg};
use crate::error::RouteError;
use crate::request::body::ManagedField;

/// A client is not kept waiting for an overloaded worker that asks for more time than this [ms].
const LONGEST_RETRY_AFTER_MS: u64 = 2_000;

/// Attempts until an answer opens.
pub async fn send_with_retries(app: &Arc<AppState>, request: &mut RequestContext) -> AttemptResult {
    let mut had_second_opinion = false;
    // Failed for an unknown reason; to blame if another worker answers.
    let mut suspect: Option<(Role, WorkerId)> = None;
    let (mut reusable_prefill, mut wait) = (None, None);
    loop {
        let failure = match attempt_in_turn(app, request, &mut reusable_prefill).await {
            Ok(committed) => {
                if let Some((role, worker)) = suspect {
                    app.fleet.count_failure(role, worker);
                }
                request.place = None;
                return Ok(committed);
            }
            Err(AttemptFailure::Refused(err)) => {
                if let Some(err) = model_not_found(app, request, &err) {
                    return Err(err.into());
                }
                if may_come(app, request, &err) {
                    let may_look_again = WorkerWait::for_change(&mut wait, app, request).await;
                    request.record.timeline.waited_for_worker();
                    if may_look_again {
                        request.record.attempts -= 1; // nothing was sent
                        continue;
                    }
                }
                return Err(err.into());
            }
            Err(AttemptFailure::Failed(failure)) => failure,
        };
        request
            .record
            .timeline
            .failed(failure.role, failure.reason, None);
        request.record.upstream_error(failure.role, failure.reason);
        let mut avoid = request.avoid.clone();
        avoid.push(failure.worker);
        let has_other = app.fleet.has_other(failure.role, &request.wanted(), &avoid);
        let is_second = had_second_opinion;
        let may_retry = may_retry(app, &failure, has_other, &mut had_second_opinion);
        request.count_failure(failure.reason);
        let is_poison = failure
            .broke_alone
            .is_some_and(|alone| request.add_break(app, failure.worker, alone));
        let may_retry = may_retry && !is_poison;
        let is_tried_again =
            may_retry && has_tries(app, request) && has_budget(app, request, &failure);
        if failure.class == RetryClass::Unexplained && !is_second {
            match is_tried_again {
                true => suspect = Some((failure.role, failure.worker)),
                // There will be no second opinion.
                false => app.fleet.count_failure(failure.role, failure.worker),
            }
        }
        if !is_tried_again {
            // Nothing reached the worker: trying it, or its successor, once more does no harm.
            let may_wait = may_retry && failure.reason == AttemptReason::Connect;
            if may_wait && WorkerWait::for_change(&mut wait, app, request).await {
                continue;
            }
            return Err(failure.into());
        }
        report_retry(request, &failure);
        app.metrics
            .retries
            .with_label_values(&[failure.reason.into_str()])
            .inc();
        if failure.is_stale {
            continue;
        }
        request.avoid = avoid;
        if failure.class == RetryClass::Overloaded || !has_other {
            let pause_ms = app
                .retry
                .backoff_ms(request.failed.count(), &mut rand::rng());
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
    }
}

/// An attempt failed and another follows.
fn report_retry(request: &RequestContext, failure: &AttemptError) {
    let record = &request.record;
    let rid = &record.rid;
    let attempt = record.attempts;
    let is_lost = failure.reason.is_unreached() || failure.reason.is_break();
    let reason = failure.reason.into_str();
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

/// Attempt once, in its turn if the request is paced.
async fn attempt_in_turn(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    reusable_prefill: &mut Option<PendingPrefill>,
) -> AttemptResult {
    let _turn = if request.is_paced {
        Some(ResumeTurn::wait(app).await)
    } else {
        None
    };
    if request.record.attempts > 0 || request.is_deadline_shrunk() {
        request.prepare_retry()?;
    }
    request.record.attempts += 1;
    request.attempted_at = Instant::now();
    let result = match app.fleet.is_pd() {
        // Boxed: requests to regular workers need less than half of its size.
        true => Box::pin(disaggregated::attempt(app, request, reusable_prefill)).await,
        false => single(app, request).await,
    };
    result.map_err(|failure| without_refused_ids(app, request, failure))
}

/// A worker refused the token ids that this router added to the body, since its tokenizer is
/// another one than it described: it is to be described again, and the request is sent again with
/// the text alone.
fn without_refused_ids(
    app: &AppState,
    request: &mut RequestContext,
    failure: AttemptFailure,
) -> AttemptFailure {
    match failure {
        AttemptFailure::Failed(mut refusal)
            if refusal.reason == AttemptReason::Code(ProtocolCode::FingerprintMismatch)
                && request.prompt.input_ids.take().is_some() =>
        {
            app.fleet.contradicted(refusal.role, refusal.worker);
            refusal.class = RetryClass::Leaving;
            refusal.is_stale = true;
            refusal.into()
        }
        other => other,
    }
}

/// The error that says more than `err`: no registered worker serves the request's model.
fn model_not_found(
    app: &AppState,
    request: &RequestContext,
    err: &RouteError,
) -> Option<RouteError> {
    let RouteError::NoWorker { role, .. } = *err else {
        return None;
    };
    let model = request.scan.model.clone()?;
    let is_missing = app.fleet.lacks_model(role, &model);
    is_missing.then_some(RouteError::ModelNotFound { model, role })
}

/// True if another attempt may help. A failure that may be the request's own fault gets one second
/// opinion.
fn may_retry(
    app: &AppState,
    failure: &AttemptError,
    has_other: bool,
    had_second_opinion: &mut bool,
) -> bool {
    match failure.class {
        RetryClass::Refused => {
            let is_own =
                failure.is_denial() && app.fleet.judge_denial(failure.role, failure.worker);
            is_own && has_other && !std::mem::replace(had_second_opinion, true)
        }
        RetryClass::Unexplained => !std::mem::replace(had_second_opinion, true),
        RetryClass::Broken | RetryClass::Leaving => true,
        // No other worker is left to ask, and this one asks for more time than a client is kept
        // waiting for.
        RetryClass::Overloaded => {
            has_other || failure.retry_after_ms().unwrap_or(0) <= LONGEST_RETRY_AFTER_MS
        }
    }
}

/// True if the request has another attempt.
pub fn has_tries(app: &AppState, request: &RequestContext) -> bool {
    if app.is_cut() {
        return false;
    }
    let has_tries = app.retry.allows_another(request.failed);
    if !has_tries {
        app.metrics
            .retries_refused
            .with_label_values(&["attempts"])
            .inc();
    }
    has_tries
}

/// Takes a retry of the fleet's budget. When it is used up, a request that lost its worker is
/// paced, if there is a place in the queue: to the budget, the end of a busy worker looks like a
/// storm of retries. An attempt that was stale costs nothing.
fn has_budget(app: &AppState, request: &mut RequestContext, failure: &AttemptError) -> bool {
    if failure.is_stale || request.is_paced || app.retry_budget.lock().try_retry(now_ms()) {
        return true;
    }
    let may_wait = app.config.retry.worker_wait_timeout_secs > 0 && failure.reason.is_worker_loss();
    request.is_paced = may_wait && request.take_place(app);
    if !request.is_paced {
        app.metrics
            .retries_refused
            .with_label_values(&["budget"])
            .inc();
    }
    request.is_paced
}

async fn single(app: &Arc<AppState>, request: &mut RequestContext) -> AttemptResult {
    let chosen = app
        .fleet
        .choose(Role::Regular, &request.wanted(), &request.avoid)?;
    let candidate = &chosen.candidate;
    request.record.worker = Some((candidate.name.clone(), chosen.why));
    let ids = ids_for(app, request, candidate);
    let is_vllm = candidate.description.is_vllm();
    let body = match candidate.rank.filter(|_| !is_vllm) {
        None => request.body_for(&[], ids, ""),
        Some(rank) => {
            let fields = format!("\"data_parallel_rank\":{rank},\"routed_dp_rank\":{rank}");
            request.body_for(&[ManagedField::Rank], ids, &fields)
        }
    };
    let leg = if is_vllm { vllm::ranked } else { leg };
    Ok((leg(app, request, chosen, body).open().await?, None))
}
