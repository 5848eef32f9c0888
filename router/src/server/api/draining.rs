//! Drain of a worker: POST /workers/{id}/drain, its opposite, and the remaining requests.
//!
//! The drain lives in the engine, so that all routers agree: this router passes the order on, and
//! every other one learns of it by its next probe or by the next refused request (health.rs). A
//! worker that has no such route, or cannot be reached, is drained by this router alone, and the
//! answer says so.

use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::admin::{find, with_url};
use crate::dispatch::app::AppState;
use crate::error::RouteError;
use crate::server::http_util::{HandlerResult, PathText, SharedApp, answer};
use crate::transport::upstream::SendError;
use crate::workers::health::register;
use crate::workers::worker::{Worker, WorkerState};

/// A worker takes an order within this.
const ORDER_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest answer of a worker to an order [bytes].
const MAX_ORDER_ANSWER: usize = 1 << 20;

/// Outcome of an order to a worker.
enum Ordered {
    /// The worker's report (docs/protocol.md §2).
    Done(Value),
    /// The worker refuses: status and error object.
    Refused(StatusCode, Value),
    /// The worker cannot be ordered so, and why.
    Unable(String),
}

/// No new requests for the worker from any router; here they end at once. Asking again changes
/// nothing.
pub async fn drain_worker(State(app): SharedApp, PathText(id): PathText) -> HandlerResult {
    let worker = find(&app, &id)?;
    if worker.state() == WorkerState::Leaving {
        return Ok(drained_here(&worker, "this router drains it already"));
    }
    let is_last = worker.is_ready() && app.fleet.ready_peers(&worker) == 0;
    let ordered = order(&app, &worker, Method::POST, "/drain").await?;
    let warning = if is_last {
        last_of_role(&app, &worker)
    } else {
        String::new()
    };
    match ordered {
        Ordered::Done(report) => {
            app.fleet.set_state(&worker, WorkerState::Draining, None);
            worker.suspect.notify_one(); // a probe that began before this order would bring it back
            let mut body = shown(&worker, "worker");
            body["is_drained"] = report["is_drained"].clone();
            body["left"] = report["left"].clone();
            body["ready_peers"] = app.fleet.ready_peers(&worker).into();
            body["message"] = format!(
                "the worker refuses new requests, of all routers; POST …/undrain returns \
                 it{warning}"
            )
            .into();
            Ok(answer(StatusCode::ACCEPTED, &body))
        }
        Ordered::Refused(status, error) => Ok(answer(status, &json!({"error": error}))),
        Ordered::Unable(why) => {
            app.fleet.drain(&worker);
            Ok(drained_here(&worker, &format!("{why}{warning}")))
        }
    }
}

/// Consequence of a drain that leaves no worker for its requests, as the end of a sentence.
fn last_of_role(app: &AppState, worker: &Worker) -> String {
    let outcome = match app.config.retry.worker_wait_timeout_secs {
        0 => "requests fail".to_owned(),
        wait_secs => format!("requests wait {wait_secs} s for another and fail"),
    };
    let role = worker.role();
    format!("; it was the last ready {role} worker: {outcome}")
}

/// Unfinished work of a worker: its own report, or where it has none, this router's requests to it.
pub async fn show_drain(State(app): SharedApp, PathText(id): PathText) -> HandlerResult {
    let worker = find(&app, &id)?;
    let state = worker.state();
    let ordered = match state {
        WorkerState::Leaving => None,
        _ => Some(order(&app, &worker, Method::GET, "/drain").await?),
    };
    let mut body = match ordered {
        Some(Ordered::Done(report)) => report,
        _ => json!({
            "state": state.label(),
            "is_drained": state == WorkerState::Leaving && worker.load() == 0,
            "left": {"requests": worker.load()},
        }),
    };
    body["drained_by"] = json!(state.drained_by());
    body["role"] = worker.role().into_str().into();
    body["ready_peers"] = app.fleet.ready_peers(&worker).into();
    Ok(answer(StatusCode::OK, &body))
}

/// New requests for the worker again. One that this router alone drained is registered again, with
/// a new id.
pub async fn undrain_worker(State(app): SharedApp, PathText(id): PathText) -> HandlerResult {
    let mut worker = find(&app, &id)?;
    let mut message = "it gets requests again once it is healthy";
    if worker.state() == WorkerState::Leaving {
        worker = match register(&app.fleet, worker.spec.clone()) {
            Ok(again) => again,
            Err(RouteError::DuplicateWorker { .. }) => {
                with_url(&app, worker.url()).ok_or(RouteError::UnknownWorker { id })?
            }
            Err(err) => return Err(err),
        };
        message = "registered again under a new id; it gets requests once it is healthy";
    }
    let mut state = Value::from(worker.state().label());
    match order(&app, &worker, Method::POST, "/undrain").await? {
        Ordered::Done(report) => {
            state = report["state"].clone();
            if app.config.health.disable_health_check {
                app.fleet.set_state(&worker, WorkerState::Ready, None);
            } else {
                worker.suspect.notify_one();
            }
        }
        Ordered::Refused(status, error) => return Ok(answer(status, &json!({"error": error}))),
        Ordered::Unable(why) => {
            tracing::info!(url = %worker.url(), why, "nothing to undrain at the worker")
        }
    }
    let mut body = shown(&worker, "worker");
    body["status"] = "accepted".into();
    body["state"] = state;
    body["drained_by"] = Value::Null;
    body["message"] = message.into();
    Ok(answer(StatusCode::ACCEPTED, &body))
}

fn shown(worker: &Worker, drained_by: &str) -> Value {
    json!({
        "status": "draining",
        "drained_by": drained_by,
        "worker_id": worker.id.to_string(),
        "url": worker.url().to_string(),
        "load": worker.load(),
        "location": format!("/workers/{}", worker.id),
    })
}

fn drained_here(worker: &Worker, why: &str) -> Response {
    let mut body = shown(worker, "router");
    body["reason"] = why.into();
    body["message"] =
        "no new requests from this router; other routers still send to it; it is removed when \
         those in flight have ended"
            .into();
    answer(StatusCode::ACCEPTED, &body)
}

/// Ask the worker with the router's own key.
async fn order(
    app: &AppState,
    worker: &Worker,
    method: Method,
    path: &'static str,
) -> Result<Ordered, RouteError> {
    let failed = |cause: String| RouteError::Unasked {
        detail: format!(
            "{} worker {}: {method} {path}: {cause}",
            worker.role(),
            worker.url()
        ),
    };
    let head = app.fleet.own_request(method.clone(), path);
    let asking = async {
        let response = worker.pool.send_alone(&head).await?;
        let status = response.status();
        let body = response.into_body().read_at_most(MAX_ORDER_ANSWER).await;
        Ok::<_, SendError>((
            status,
            body.map_err(|err| SendError::Broken(err.to_string()))?,
        ))
    };
    let (status, body) = match timeout(ORDER_TIMEOUT, asking).await {
        Err(_) => return Err(failed(format!("no answer for {ORDER_TIMEOUT:?}"))),
        Ok(Err(err @ (SendError::Refused(_) | SendError::Connect(_)))) => {
            return Ok(Ordered::Unable(format!("the worker is not there: {err}")));
        }
        Ok(Err(err)) => return Err(failed(err.to_string())),
        Ok(Ok(answer)) => answer,
    };
    let answer: Value = serde_json::from_slice(&body.unwrap_or_default()).unwrap_or_default();
    match status.as_u16() {
        200..300 if answer["state"].is_string() && answer["left"].is_object() => {
            Ok(Ordered::Done(answer))
        }
        200..300 | 404 | 405 | 501 => Ok(Ordered::Unable(format!(
            "the worker does not know {method} {path} (it answered {status})"
        ))),
        409 if answer["error"].is_object() => Ok(Ordered::Refused(status, answer["error"].clone())),
        _ => {
            let message = answer["error"]["message"]
                .as_str()
                .unwrap_or("no reason given");
            Err(failed(format!("{status}, {message}")))
        }
    }
}
