//! From a parsed request to an answer that can be committed to: choose, send, and try again where that can help.
//!
//! The life of a request:
//!
//! 1. one attempt: a leg to one worker (`single`), or to a pair (pair.rs);
//! 2. it fails: by the failure's class (router-core's `retry`), the attempts and the fleet's budget another is made, after a
//!    pause if there is no untried worker or the worker asked for less;
//! 3. the leg opens: its answer is relayed, a pair's prefill leg goes along until the answer ends.
//!
//! Invariants: nothing has reached the client before step 3, so every retry is invisible; a dropped future (the client
//! left) drops all legs.

/// Attempt at a single worker.
pub(crate) mod attempt;
/// Attempt at a pair of prefill and decode worker.
pub(crate) mod disaggregated;
/// Release of prefilled pages that no decode worker will pull.
pub(crate) mod prefill_release;
/// Turns of streams that resume after a worker died.
pub(crate) mod resume_pacing;
/// vLLM's protocol between prefill and decode.
pub(crate) mod vllm;

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use router_core::{RetryClass, Role, WorkerId};
use tokio::time::Instant;

use crate::App;
use crate::clock::now_ms;
use crate::dispatch::attempt::{Failure, Leg, Opened, Told};
use crate::dispatch::disaggregated::PrefillLeg;
use crate::dispatch::resume_pacing::{ResumeTurn, WorkerWait, may_come};
use crate::error::RouteError;
use crate::observability::otlp::TRACEPARENT;
use crate::request::body::{Ours, Parts};
use crate::request::context::Inbound;
use crate::response::failover;
use crate::response::keepalive::{sse_headers, with_keepalive};
use crate::response::proxy_body::Relay;
use crate::server::api::remove_hop_by_hop;
use crate::workers::{Candidate, Chosen};

/// A client is not kept waiting for an overloaded worker that asks for more time than this [ms].
const LONGEST_RETRY_AFTER_MS: u64 = 2_000;

/// Attempt failed: by a worker, or because nobody could be chosen.
pub enum Stop {
    Failed(Failure),
    /// The prefill kept from an attempt before was of no use any more: no worker is to be avoided for that.
    Stale(Failure),
    Error(RouteError),
}

impl From<RouteError> for Stop {
    fn from(err: RouteError) -> Self {
        Stop::Error(err)
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

/// Answer a generation request. Dropping the future drops everything the request holds.
pub async fn generate(app: Arc<App>, request: Inbound) -> Response {
    let every = Duration::from_secs(app.config.limits.sse_keepalive_secs);
    if request.scan.stream && !every.is_zero() {
        with_keepalive(Box::pin(attempts(app, request)), every).await
    } else {
        attempts(app, request).await
    }
}

async fn attempts(app: Arc<App>, mut request: Inbound) -> Response {
    match request.is_poison(&app).await {
        Ok(false) => {}
        Ok(true) => return refuse(request, RouteError::PoisonRequest),
        Err(err) => return refuse(request, err),
    }
    app.retry_budget.lock().on_request(now_ms());
    app.registry.introductions(app.serving_roles()).await;
    match commit(&app, &mut request).await {
        Ok((opened, prefill)) => answer(app, request, opened, prefill),
        // No worker is to blame for what the router cut.
        Err(_) if app.is_cut() => refuse(request, RouteError::Draining),
        Err(Unanswered::Refused(err)) => refuse(request, err),
        Err(Unanswered::Failed(failure)) => tell(request, failure),
    }
}

/// No attempt brought an answer.
pub enum Unanswered {
    /// Nobody could be chosen, or its time is over.
    Refused(RouteError),
    /// The last one failed like this.
    Failed(Failure),
}

/// Attempts until an answer opens.
pub async fn commit(app: &Arc<App>, request: &mut Inbound) -> Result<Committed, Unanswered> {
    let committed = try_until_committed(app, request).await;
    request.place = None;
    committed
}

async fn try_until_committed(
    app: &Arc<App>,
    request: &mut Inbound,
) -> Result<Committed, Unanswered> {
    let mut had_second_opinion = false;
    // Failed for an unknown reason; to blame if another worker answers.
    let mut suspect: Option<(Role, WorkerId)> = None;
    let (mut kept, mut wait) = (None, None);
    loop {
        let turn = match request.is_paced {
            true => Some(ResumeTurn::wait(app).await),
            false => None,
        };
        if request.record.attempts > 0 || request.has_lost_time() {
            request.prepare_again().map_err(Unanswered::Refused)?;
        }
        request.record.attempts += 1;
        request.attempted_at = Instant::now();
        let attempt = if app.is_pd() {
            disaggregated::attempt(app, request, &mut kept).await
        } else {
            single(app, request).await
        };
        drop(turn);
        let (failure, is_stale) = match attempt {
            Ok(committed) => {
                if let Some((role, worker)) = suspect {
                    app.registry.count_failure(role, worker);
                }
                return Ok(committed);
            }
            Err(Stop::Error(err)) => {
                if let (RouteError::NoWorker { role, .. }, Some(model)) =
                    (&err, &request.scan.model)
                    && app.registry.lacks_model(*role, model)
                {
                    let (model, role) = (model.clone(), *role);
                    return Err(Unanswered::Refused(RouteError::ModelNotFound { model, role }));
                }
                if may_come(app, request, &err)
                    && WorkerWait::for_change(&mut wait, app, request).await
                {
                    request.record.attempts -= 1; // nothing was sent
                    continue;
                }
                return Err(Unanswered::Refused(err));
            }
            Err(Stop::Failed(failure)) => (failure, false),
            Err(Stop::Stale(failure)) => (failure, true),
        };
        request.record.story.failed(failure.role, failure.reason);
        let labels = [failure.role.label(), failure.reason];
        app.metrics.upstream_errors.with_label_values(&labels).inc();
        let mut avoid = request.avoid.clone();
        avoid.add(failure.role, failure.worker);
        let has_other = app.registry.has_other(failure.role, &request.wanted(), &avoid);
        let is_second = had_second_opinion;
        let may_retry = match failure.class {
            RetryClass::Refused => {
                let is_own =
                    failure.is_denial() && app.registry.judge_denial(failure.role, failure.worker);
                is_own && has_other && !std::mem::replace(&mut had_second_opinion, true)
            }
            RetryClass::Unexplained => !std::mem::replace(&mut had_second_opinion, true),
            RetryClass::Broken | RetryClass::Leaving => true,
            // No other worker is left to ask, and this one asks for more time than a client is kept waiting for.
            RetryClass::Overloaded => {
                has_other || failure.retry_after_ms().unwrap_or(0) <= LONGEST_RETRY_AFTER_MS
            }
        };
        request.count_failure(failure.reason);
        let is_poison =
            failure.broke_alone.is_some_and(|alone| request.add_break(app, failure.worker, alone));
        let may_retry = may_retry && !is_poison;
        let has_budget = |request: &mut Inbound| is_stale || has_budget(app, request, &failure);
        let is_tried_again = may_retry && has_tries(app, request) && has_budget(request);
        if failure.class == RetryClass::Unexplained && !is_second {
            match is_tried_again {
                true => suspect = Some((failure.role, failure.worker)),
                // There will be no second opinion.
                false => app.registry.count_failure(failure.role, failure.worker),
            }
        }
        if !is_tried_again {
            // Nothing reached the worker: trying it, or its successor, once more does no harm.
            let may_wait = may_retry && failure.reason == "connect";
            if may_wait && WorkerWait::for_change(&mut wait, app, request).await {
                continue;
            }
            return Err(Unanswered::Failed(failure));
        }
        tracing::debug!(
            rid = request.record.rid,
            attempt = request.record.attempts,
            reason = failure.reason,
            "trying again"
        );
        app.metrics.retries.with_label_values(&[failure.reason]).inc();
        if is_stale {
            continue;
        }
        request.avoid = avoid;
        if failure.class == RetryClass::Overloaded || !has_other {
            let pause_ms = app.retry.backoff_ms(request.failed.count(), &mut rand::rng());
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
    }
}

/// True if the request has another attempt.
pub fn has_tries(app: &App, request: &Inbound) -> bool {
    if app.is_cut() {
        return false;
    }
    let has_tries = app.retry.allows_another(request.failed);
    if !has_tries {
        let refused = &app.metrics.retries_refused;
        refused.with_label_values(&["attempts"]).inc();
    }
    has_tries
}

/// Takes a retry of the fleet's budget. When it is used up, a request that lost its worker is paced, if there is a place in
/// the queue: to the budget, the end of a busy worker looks like a storm of retries.
fn has_budget(app: &App, request: &mut Inbound, failure: &Failure) -> bool {
    if request.is_paced || app.retry_budget.lock().try_retry(now_ms()) {
        return true;
    }
    let may_wait = app.config.retry.worker_wait_timeout_secs > 0 && failure.lost_worker();
    request.is_paced = may_wait && request.take_place(app);
    if !request.is_paced {
        let refused = &app.metrics.retries_refused;
        refused.with_label_values(&["budget"]).inc();
    }
    request.is_paced
}

pub type Committed = (Opened, Option<PrefillLeg>);

async fn single(app: &Arc<App>, request: &mut Inbound) -> Result<Committed, Stop> {
    let registry = &app.registry;
    let chosen = registry.choose(Role::Regular, &request.wanted(), &request.avoid)?;
    let candidate = &chosen.guard.candidate;
    request.record.worker = Some((candidate.name.clone(), chosen.why));
    let ids = ids_for(app, request, candidate);
    let is_vllm = candidate.worker.is_vllm();
    let body = match candidate.rank.filter(|_| !is_vllm) {
        None => request.body_for(&[], ids, ""),
        Some(rank) => {
            let fields = format!("\"data_parallel_rank\":{rank},\"routed_dp_rank\":{rank}");
            request.body_for(&[Ours::Rank], ids, &fields)
        }
    };
    observe_overhead(app, request);
    let leg = match is_vllm {
        true => vllm::ranked(app, request, chosen, body),
        false => leg(app, request, chosen, body),
    };
    Ok((leg.open().await?, None))
}

/// The prompt's token ids as a member of the body, if this worker would have come to the same.
pub fn ids_for<'a>(app: &App, request: &'a Inbound, candidate: &Candidate) -> Option<&'a Bytes> {
    let ids = request.input_ids.as_ref()?;
    let worker = &candidate.worker;
    if !worker.takes_ids_of(&app.tokens.as_ref()?.fingerprint) {
        return None;
    }
    let labels = [worker.role().label()];
    app.metrics.ids_forwarded.with_label_values(&labels).inc();
    Some(ids)
}

pub fn leg(app: &App, request: &Inbound, chosen: Chosen, body: Parts) -> Leg {
    let mut head = request.head.clone();
    if let Some(traceparent) = chosen.guard.traceparent() {
        head.headers.insert(TRACEPARENT, traceparent);
    }
    let candidate = &chosen.guard.candidate;
    let tells_tokens =
        candidate.worker.role() != Role::Prefill && request.is_resumable(app, candidate);
    if tells_tokens {
        let yes = HeaderValue::from_static("1");
        head.headers.insert(failover::HEADER, yes);
    }
    Leg {
        guard: chosen.guard,
        head,
        body,
        limit: app.config.request_timeout(),
        probe_after: app.config.silent_request_probe(),
        counts: request.scan.batch.is_none(),
        tells_tokens,
    }
}

pub fn observe_overhead(app: &App, request: &Inbound) {
    if request.record.attempts == 1 {
        let labels = [request.record.route()];
        let overhead = app.metrics.overhead.with_label_values(&labels);
        overhead.observe(request.ready_at.elapsed().as_secs_f64());
    }
}

/// Headers of a worker's answer that belong to its connection, not to the answer.
pub fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = headers.clone();
    remove_hop_by_hop(&mut kept);
    kept.remove(header::CONTENT_LENGTH);
    kept
}

fn answer(
    app: Arc<App>,
    request: Inbound,
    opened: Opened,
    prefill: Option<PrefillLeg>,
) -> Response {
    let (status, mut headers) = (opened.status, end_to_end(&opened.headers));
    if opened.is_sse {
        sse_headers(&mut headers);
    }
    let relay = Relay::new(app, request, opened, prefill);
    let mut response = Response::new(axum::body::Body::new(relay));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

pub fn refuse(mut request: Inbound, err: RouteError) -> Response {
    request.record.end(err.status(), err.code());
    err.into_response()
}

/// The last attempt failed: the worker's own words if it had any.
fn tell(mut request: Inbound, failure: Failure) -> Response {
    match failure.told {
        Told::Error(err) => refuse(request, err),
        Told::Answer { status, headers, body } => {
            request.record.end(status, failure.reason);
            let mut response = Response::new(axum::body::Body::from(body));
            *response.status_mut() = status;
            *response.headers_mut() = end_to_end(&headers);
            if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
                let retry_after = response.headers_mut().entry(header::RETRY_AFTER);
                retry_after.or_insert(HeaderValue::from_static("1"));
            }
            response
        }
    }
}
