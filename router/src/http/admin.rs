//! Everything but generation: probes, workers, metrics, and what is passed on to one worker or to all.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use router_core::Role;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::generate::{forwarded, read_body};
use crate::App;
use crate::body::Parts;
use crate::config::{WorkerSpec, WorkerUrl};
use crate::error::RouteError;
use crate::leg::{Leg, Told};
use crate::registry::{ROLES, Wanted, Worker};
use crate::upstream::Head;

/// A worker asked by an operator or a probe answers within this.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
/// Bodies of these requests are small [bytes].
const MAX_ADMIN_BODY: usize = 1 << 20;
/// Longest part of each worker's answer that a fan-out repeats [bytes].
const MAX_REPEATED: usize = 1 << 16;

fn answer(status: StatusCode, body: &Value) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}

// ---- probes ----

pub async fn live() -> Response {
    answer(StatusCode::OK, &json!({"status": "ok"}))
}

pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let missing = not_ready_because(&app);
    let mut body = json!({
        "status": if missing.is_none() { "ready" } else { "not_ready" },
    });
    for role in ROLES {
        let (known, ready) = app.registry.count(role);
        body[role.label()] = json!({"known": known, "ready": ready});
    }
    match missing {
        None => answer(StatusCode::OK, &body),
        Some(reason) => {
            body["reason"] = reason.to_string().into();
            body["error"] = serde_json::from_slice::<Value>(&reason.body())
                .map(|body| body["error"].clone())
                .unwrap_or_default();
            answer(StatusCode::SERVICE_UNAVAILABLE, &body)
        }
    }
}

fn not_ready_because(app: &App) -> Option<RouteError> {
    if app.is_draining() {
        return Some(RouteError::Draining);
    }
    app.serving_roles().iter().find_map(|role| {
        let (known, ready) = app.registry.count(*role);
        let role = *role;
        (ready == 0).then_some(RouteError::NoWorker { role, known, ready })
    })
}

/// Every ready worker is asked to generate something.
pub async fn health_generate(State(app): State<Arc<App>>) -> Response {
    if let Some(err) = not_ready_because(&app) {
        return err.into_response();
    }
    let head = Head {
        method: Method::GET,
        uri: Uri::from_static("/health_generate"),
        headers: app.worker_headers(),
    };
    ask_all(&app, head, Bytes::new()).await.0
}

pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    match app.metrics.render(&app.registry) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(err) => RouteError::Internal {
            detail: err.to_string(),
        }
        .into_response(),
    }
}

// ---- workers ----

fn show(worker: &Worker) -> Value {
    let (state, told) = (worker.state(), worker.description());
    json!({
        "id": worker.id.to_string(),
        "url": worker.url().to_string(),
        "worker_type": worker.role().label(),
        "is_healthy": worker.is_ready(),
        "state": state.label(),
        "reason": state.reason(),
        "load": worker.load(),
        "bootstrap_port": worker.bootstrap_port(),
        "dp_size": worker.dp_size(),
        "model_id": told.served_model_name,
        "version": told.version,
        "page_size": told.page_size,
    })
}

pub async fn list_workers(State(app): State<Arc<App>>) -> Response {
    let workers = app.registry.workers();
    let count = |role| workers.iter().filter(|w| w.role() == role).count();
    let body = json!({
        "workers": workers.iter().map(|w| show(w)).collect::<Vec<_>>(),
        "total": workers.len(),
        "stats": {
            "regular_count": count(Role::Regular),
            "prefill_count": count(Role::Prefill),
            "decode_count": count(Role::Decode),
        },
    });
    answer(StatusCode::OK, &body)
}

fn find(app: &App, id: &str) -> Result<Arc<Worker>, RouteError> {
    let found = id.parse().ok().and_then(|id| app.registry.worker(id));
    found.ok_or_else(|| RouteError::UnknownWorker { id: id.to_owned() })
}

pub async fn show_worker(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, RouteError> {
    let worker = find(&app, &id)?;
    Ok(answer(StatusCode::OK, &show(&worker)))
}

pub async fn remove_worker(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, RouteError> {
    let worker = find(&app, &id)?;
    app.registry.remove(worker.id);
    tracing::info!(url = %worker.url(), "worker removed");
    let body = json!({
        "status": "accepted",
        "worker_id": id,
        "url": worker.url().to_string(),
        "message": "no new requests; those in flight finish",
    });
    Ok(answer(StatusCode::ACCEPTED, &body))
}

/// Like DELETE, but the worker stays visible until its requests have ended. Asking again changes nothing.
pub async fn drain_worker(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
) -> Result<Response, RouteError> {
    let worker = find(&app, &id)?;
    app.drain(&worker);
    let body = json!({
        "status": "draining",
        "worker_id": id,
        "url": worker.url().to_string(),
        "load": worker.load(),
        "location": format!("/workers/{id}"),
        "message": "no new requests; it is removed when those in flight have ended",
    });
    Ok(answer(StatusCode::ACCEPTED, &body))
}

#[derive(Deserialize)]
struct NewWorker {
    url: String,
    worker_type: Option<Role>,
    bootstrap_port: Option<u16>,
}

pub async fn add_worker(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let body = read_body(body, &parts.headers, MAX_ADMIN_BODY).await?;
    let asked: NewWorker =
        serde_json::from_slice(&body).map_err(|err| RouteError::InvalidJson {
            detail: format!(
                "{err}; expected {{\"url\", \"worker_type\": regular | prefill | decode, \"bootstrap_port\"}}"
            ),
        })?;
    let role = asked.worker_type.unwrap_or(Role::Regular);
    let port = asked.bootstrap_port.map(|port| port.to_string());
    let worker = register(&app, &asked.url, role, port.as_deref())?;
    let (id, url) = (worker.id.to_string(), worker.url().to_string());
    let body = json!({
        "status": "accepted",
        "id": id,
        "worker_id": id,
        "url": url,
        "location": format!("/workers/{id}"),
        "message": "registered; it gets requests once it is healthy",
    });
    let mut response = answer(StatusCode::ACCEPTED, &body);
    if let Ok(location) = HeaderValue::try_from(format!("/workers/{id}")) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    Ok(response)
}

fn register(
    app: &Arc<App>,
    url: &str,
    role: Role,
    port: Option<&str>,
) -> Result<Arc<Worker>, RouteError> {
    if !app.serving_roles().contains(&role) {
        let mode = if app.is_pd() { "with" } else { "without" };
        return Err(RouteError::InvalidValue {
            param: "worker_type",
            problem: format!("{role} has no use here: the router runs {mode} --pd-disaggregation"),
        });
    }
    let spec = WorkerSpec::new(url, role, port).map_err(|problem| RouteError::InvalidValue {
        param: "url",
        problem,
    })?;
    app.register(spec)
}

#[derive(Deserialize)]
pub struct LegacyQuery {
    url: Option<String>,
    worker_type: Option<Role>,
    bootstrap_port: Option<String>,
}

impl LegacyQuery {
    fn url(&self) -> Result<&str, RouteError> {
        self.url.as_deref().ok_or(RouteError::MissingField {
            param: "url",
            hint: "give ?url=http://HOST:PORT",
        })
    }
}

pub async fn legacy_add(
    State(app): State<Arc<App>>,
    Query(query): Query<LegacyQuery>,
) -> Result<Response, RouteError> {
    let role = query.worker_type.unwrap_or(Role::Regular);
    let worker = register(&app, query.url()?, role, query.bootstrap_port.as_deref())?;
    let message = format!("Successfully added worker: {}", worker.url());
    Ok(answer(
        StatusCode::OK,
        &json!({"message": message, "id": worker.id.to_string()}),
    ))
}

pub async fn legacy_remove(
    State(app): State<Arc<App>>,
    Query(query): Query<LegacyQuery>,
) -> Result<Response, RouteError> {
    let given = query.url()?;
    let url = WorkerUrl::parse(given).map_err(|problem| RouteError::InvalidValue {
        param: "url",
        problem,
    })?;
    let workers = app.registry.workers();
    // The newest: older ones with the same address are draining already.
    let worker = workers.iter().rev().find(|w| *w.url() == url);
    let worker = worker.ok_or_else(|| RouteError::UnknownWorker {
        id: url.to_string(),
    })?;
    app.registry.remove(worker.id);
    let message = format!("Successfully removed worker: {url}");
    Ok(answer(StatusCode::OK, &json!({"message": message})))
}

pub async fn legacy_list(State(app): State<Arc<App>>) -> Response {
    let workers = app.registry.workers();
    let urls: Vec<String> = workers.iter().map(|w| w.url().to_string()).collect();
    answer(StatusCode::OK, &json!({"urls": urls}))
}

pub async fn loads(State(app): State<Arc<App>>) -> Response {
    let candidates = app.registry.candidates();
    let loads: Vec<Value> = candidates
        .iter()
        .map(
            |c| json!({"worker": c.name, "worker_type": c.worker.role().label(), "load": c.load()}),
        )
        .collect();
    answer(StatusCode::OK, &json!({"workers": loads}))
}

// ---- passed on ----

/// One worker's answer is as good as another's: the first role that has one ready.
pub async fn forward(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let body = read_body(body, &parts.headers, app.config.limits.max_payload_size).await?;
    let uri = parts.uri.path_and_query().map(|pq| pq.as_str().to_owned());
    let head = Head {
        method: parts.method,
        uri: Uri::try_from(uri.unwrap_or_default()).map_err(|err| RouteError::Internal {
            detail: err.to_string(),
        })?,
        headers: forwarded(parts.headers),
    };
    let mut avoid = Vec::new();
    loop {
        // The prefill workers come last: tokenising on them delays prompts.
        let roles = app.serving_roles().iter().rev();
        let role = *roles
            .clone()
            .find(|role| app.registry.count(**role).1 > 0)
            .unwrap_or(&app.serving_roles()[0]);
        let chosen = app.registry.choose(role, &Wanted::default(), &avoid)?;
        let leg = Leg {
            guard: chosen.guard,
            head: head.clone(),
            body: Parts::from(body.clone()),
            limit: ASK_TIMEOUT,
            counts: false,
        };
        let failure = match leg.open().await {
            Ok(opened) => {
                let kind = opened.headers.get(header::CONTENT_TYPE).cloned();
                let rest = opened.rest.is_some();
                let body = opened.pieces.concat();
                if rest {
                    return Err(RouteError::Internal {
                        detail: format!("the worker's answer to {} is too long to hold", head.uri),
                    });
                }
                return Ok(passed_on(opened.status, kind, body.into()));
            }
            Err(failure) => failure,
        };
        let is_unreached = matches!(failure.reason, "connect" | "reset");
        if is_unreached && avoid.is_empty() {
            avoid.push(failure.worker);
            continue;
        }
        return match failure.told {
            Told::Error(err) => Err(err),
            Told::Answer {
                status,
                headers,
                body,
            } => Ok(passed_on(
                status,
                headers.get(header::CONTENT_TYPE).cloned(),
                body,
            )),
        };
    }
}

fn passed_on(status: StatusCode, kind: Option<HeaderValue>, body: Bytes) -> Response {
    let mut response = (status, body).into_response();
    match kind {
        Some(kind) => response.headers_mut().insert(header::CONTENT_TYPE, kind),
        None => response.headers_mut().remove(header::CONTENT_TYPE),
    };
    response
}

/// The same request to every ready worker.
pub async fn fan_out(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let body = read_body(body, &parts.headers, MAX_ADMIN_BODY).await?;
    let head = Head {
        method: parts.method,
        uri: parts.uri,
        headers: forwarded(parts.headers),
    };
    Ok(ask_all(&app, head, body).await.0)
}

/// Workers drop their caches, the policies what they believe of them.
pub async fn flush_cache(State(app): State<Arc<App>>) -> Response {
    let head = Head {
        method: Method::POST,
        uri: Uri::from_static("/flush_cache"),
        headers: app.worker_headers(),
    };
    let (response, _) = ask_all(&app, head, Bytes::new()).await;
    app.registry.forget_prompts();
    response
}

/// 200 when all of them agreed, else 502; the body tells each worker's answer.
async fn ask_all(app: &Arc<App>, head: Head, body: Bytes) -> (Response, bool) {
    let mut asked = JoinSet::new();
    for worker in app.registry.workers() {
        if worker.is_ready() {
            let (head, body) = (head.clone(), Parts::from(body.clone()));
            asked.spawn(async move {
                let url = worker.url().to_string();
                match timeout(ASK_TIMEOUT, ask(&worker, &head, body)).await {
                    Ok(Ok((status, text))) => (url, status.is_success(), text),
                    Ok(Err(cause)) => (url, false, cause),
                    Err(_) => (url, false, format!("no answer for {ASK_TIMEOUT:?}")),
                }
            });
        }
    }
    let (mut told, mut is_ok) = (serde_json::Map::new(), true);
    while let Some(joined) = asked.join_next().await {
        match joined {
            Ok((url, worker_ok, text)) => {
                is_ok &= worker_ok;
                told.insert(url, json!({"ok": worker_ok, "answer": text}));
            }
            Err(err) => {
                is_ok = false;
                tracing::error!(%err, "asking a worker panicked");
            }
        }
    }
    let status = if is_ok {
        StatusCode::OK
    } else {
        StatusCode::BAD_GATEWAY
    };
    let body = json!({"ok": is_ok, "workers": told});
    (answer(status, &body), is_ok)
}

async fn ask(worker: &Worker, head: &Head, body: Parts) -> Result<(StatusCode, String), String> {
    let sent = worker.pool.send(head, body).await;
    let response = sent.map_err(|err| err.to_string())?;
    let status = response.status();
    let mut from = response.into_body();
    let mut text = Vec::new();
    while let Some(piece) = from.piece().await {
        let piece = piece.map_err(|err| err.to_string())?;
        let room = MAX_REPEATED.saturating_sub(text.len());
        text.extend_from_slice(&piece[..piece.len().min(room)]);
    }
    Ok((status, String::from_utf8_lossy(&text).into_owned()))
}

impl App {
    /// Headers of the router's own requests to workers.
    pub fn worker_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(key) = &self.config.listen.api_key
            && let Ok(value) = HeaderValue::try_from(format!("Bearer {key}"))
        {
            headers.insert(header::AUTHORIZATION, value);
        }
        headers
    }
}
