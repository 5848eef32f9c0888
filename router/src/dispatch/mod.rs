//! From a parsed request to an answer that can be committed to: choose, send, and try again where
//! that can help.
//!
//! The life of a request:
//!
//! 1. one attempt: a leg to one worker, or two to a pair (disaggregated);
//! 2. the attempt fails: router-core's `retry_verdict` decides whether another is made, by the
//!    class of the failure, the attempts so far and the fleet's budget;
//! 3. the leg opens: its answer is relayed (proxy_body), and a pair's prefill leg is kept until the
//!    answer ends.
//!
//! Invariants: nothing has reached the client before step 3, so every retry is invisible; a dropped
//! future (the client left) drops all legs.

/// State of the whole router.
pub(crate) mod app;
/// Attempt at a single worker.
pub(crate) mod attempt;
/// Outcomes of attempts.
mod attempt_result;
/// Requests of other APIs as chat requests.
mod chat_form;
/// A generation request and its attempts.
pub(crate) mod context;
/// Attempt at a pair of prefill and decode worker.
mod disaggregated;
/// Leg to a chosen worker, before it is sent.
mod leg_setup;
/// Prefill leg of a pair and its rooms.
mod prefill_leg;
/// Body of the answer, resumed by another worker when one dies.
mod proxy_body;
/// Turns of streams that resume after a worker died.
mod resume_pacing;
/// Attempts until an answer opens.
mod retry;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, header};

use crate::clock::now_ms;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::{AttemptError, ErrorReply, UpstreamResponse};
use crate::dispatch::attempt_result::AttemptFailure;
use crate::dispatch::context::RequestContext;
use crate::dispatch::prefill_leg::PrefillAttempt;
use crate::dispatch::proxy_body::ProxyBody;
use crate::dispatch::retry::send_with_retries;
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::response::keepalive::with_keepalive;
use crate::response::stream_error::StreamErrorForm;
use crate::response::stream_headers::sse_headers;
use crate::transport::headers::end_to_end;

/// Answer a generation request. Dropping the future drops everything the request holds.
pub async fn generate(app: Arc<AppState>, request: Box<RequestContext>) -> Response {
    let interval = Duration::from_secs(app.config.limits.sse_keepalive_secs);
    if request.scan.stream && !interval.is_zero() {
        let error_form = StreamErrorForm::of_request(&request.scan, &request.record.rid);
        with_keepalive(Box::pin(attempt_answer(app, request)), interval, error_form).await
    } else {
        attempt_answer(app, request).await
    }
}

async fn attempt_answer(app: Arc<AppState>, mut request: Box<RequestContext>) -> Response {
    if let Err(err) = request.check_poison(&app).await {
        return refuse(request.record, err);
    }
    app.retry_budget.lock().on_request(now_ms());
    let roles = app.fleet.serving_roles();
    let has_waited = app.fleet.wait_for_first_probes(roles).await;
    if has_waited {
        request.record.timeline.waited_for_worker();
    }
    match send_with_retries(&app, &mut request).await {
        Ok((opened, prefill)) => relay_answer(app, request, opened, prefill),
        // No worker is to blame for what the router cut.
        Err(_) if app.is_cut() => refuse(request.record, RouteError::Draining),
        Err(AttemptFailure::Refused(err)) => refuse(request.record, err),
        Err(AttemptFailure::Failed(failure)) => reply_with(request, failure),
    }
}

fn relay_answer(
    app: Arc<AppState>,
    request: Box<RequestContext>,
    opened: UpstreamResponse,
    prefill: Option<PrefillAttempt>,
) -> Response {
    let status = opened.answer.status;
    let mut headers = end_to_end(&opened.answer.headers);
    if opened.is_sse {
        sse_headers(&mut headers);
    }
    let body = ProxyBody::new(app, request, opened, prefill);
    response(status, headers, Body::new(body))
}

/// A response with these headers and no others.
pub fn response(status: StatusCode, headers: HeaderMap, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

/// Answer with an error. Workers that failed are named in the log only.
pub fn refuse(mut record: AccessLogEntry, err: RouteError) -> Response {
    if err.is_upstream() {
        tracing::warn!(rid = record.rid, %err, "no answer");
    }
    record.end(err.status(), err.code());
    err.into_response()
}

/// Answer with the failure of the last attempt: the worker's own error if there is one.
fn reply_with(mut request: Box<RequestContext>, failure: AttemptError) -> Response {
    match failure.reply {
        ErrorReply::Error(err) => refuse(request.record, err),
        ErrorReply::Answer {
            status,
            headers,
            body,
        } => {
            request.record.end(status, failure.reason.into_str());
            let mut headers = end_to_end(&headers);
            if matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
            ) {
                headers
                    .entry(header::RETRY_AFTER)
                    .or_insert(HeaderValue::from_static("1"));
            }
            response(status, headers, body.into())
        }
    }
}
