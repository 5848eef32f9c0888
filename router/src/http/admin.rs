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

use super::exposition;
use super::generate::{forwarded, read_at_most, read_body};
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
/// Longest part of each worker's answer that a fan-out repeats [characters].
const MAX_REPEATED: usize = 1 << 16;
/// Longest answer of a worker that is asked along with all others [bytes].
const MAX_ASKED: usize = 4 << 20;

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
    app.serving_roles()
        .iter()
        .find_map(|role| {
            let (known, ready) = app.registry.count(*role);
            let role = *role;
            (ready == 0).then_some(RouteError::NoWorker { role, known, ready })
        })
        .or_else(|| {
            let [prefill, decode] =
                [Role::Prefill, Role::Decode].map(|role| app.registry.count(role).1);
            let lacks_pair = app.is_pd() && !app.registry.has_pair();
            lacks_pair.then_some(RouteError::NoPair { prefill, decode })
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

fn show(app: &App, worker: &Worker) -> Value {
    let (state, told) = (worker.state(), worker.description());
    json!({
        "id": worker.id.to_string(),
        "url": worker.url().to_string(),
        "worker_type": worker.role().label(),
        "is_healthy": worker.is_ready(),
        "state": state.label(),
        "reason": state.reason().map(str::to_owned).or_else(|| app.registry.misfit(worker)),
        "load": worker.load(),
        "bootstrap_port": worker.bootstrap_port(),
        "dp_size": worker.dp_size(),
        "model_id": told.served_model_name,
        "version": told.version,
        "page_size": told.page_size,
        "fingerprint": told.fingerprint,
    })
}

pub async fn list_workers(State(app): State<Arc<App>>) -> Response {
    let workers = app.registry.workers();
    let count = |role| workers.iter().filter(|w| w.role() == role).count();
    let body = json!({
        "workers": workers.iter().map(|w| show(&app, w)).collect::<Vec<_>>(),
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
    Ok(answer(StatusCode::OK, &show(&app, &worker)))
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
    let body = read_at_most(body, &parts.headers, MAX_ADMIN_BODY, &app.config.limits).await?;
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
    let body = read_body(body, &parts.headers, &app.config.limits).await?;
    let head = head_of(parts)?;
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

/// Every worker's list of models, as one. Those that do not answer are left out.
pub async fn models(State(app): State<Arc<App>>, request: Request) -> Result<Response, RouteError> {
    if let Some(err) = no_worker(&app) {
        return Err(err);
    }
    let head = Head {
        method: Method::GET,
        uri: Uri::from_static("/v1/models"),
        headers: forwarded(request.into_parts().0.headers),
    };
    let told = ask_each(&app, &head, &Bytes::new()).await;
    let mut merged: Vec<Value> = Vec::new();
    for asked in told.iter().filter(|told| told.is_success()) {
        let Ok(mut list) = serde_json::from_str::<Value>(&asked.text) else {
            continue;
        };
        for model in list["data"].as_array_mut().into_iter().flatten() {
            if merged.iter().all(|known| known["id"] != model["id"]) {
                merged.push(model.take());
            }
        }
    }
    if merged.is_empty()
        && let Some(asked) = told.into_iter().next()
    {
        return Ok(asked.passed_on());
    }
    let body = json!({"object": "list", "data": merged});
    Ok(answer(StatusCode::OK, &body))
}

/// The metrics of all ready workers on one page, each line with the label `worker`.
pub async fn engine_metrics(State(app): State<Arc<App>>) -> Response {
    let head = Head {
        method: Method::GET,
        uri: Uri::from_static("/metrics"),
        headers: app.worker_headers(),
    };
    let told = ask_each(&app, &head, &Bytes::new()).await;
    let pages = told.iter().filter(|told| told.is_success());
    let text = exposition::merge(pages.map(|told| (told.url.as_str(), told.text.as_str())));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// A verb about one request, which only the workers that run it know: all are asked, since it may have come through
/// another router. 404 when nobody knows it.
pub async fn about_request(
    State(app): State<Arc<App>>,
    Path((rid, _)): Path<(String, String)>,
    request: Request,
) -> Result<Response, RouteError> {
    if let Some(err) = no_worker(&app) {
        return Err(err);
    }
    let (parts, body) = request.into_parts();
    let body = read_at_most(body, &parts.headers, MAX_ADMIN_BODY, &app.config.limits).await?;
    let head = head_of(parts)?;
    let mut told = ask_each(&app, &head, &body).await;
    told.retain(|told| told.status != Some(StatusCode::NOT_FOUND));
    if told.is_empty() {
        return Err(RouteError::UnknownRequest { rid });
    }
    // A worker that runs it and refuses speaks before one that did as told, and that before one that could not be asked.
    told.sort_by_key(|told| match told.status {
        Some(status) if !status.is_success() => 0,
        Some(_) => 1,
        None => 2,
    });
    Ok(told.swap_remove(0).passed_on())
}

fn no_worker(app: &App) -> Option<RouteError> {
    let counts = ROLES.map(|role| app.registry.count(role));
    let known = counts.iter().map(|count| count.0).sum();
    let role = app.serving_roles()[0];
    let none = counts.iter().all(|count| count.1 == 0);
    none.then_some(RouteError::NoWorker {
        role,
        known,
        ready: 0,
    })
}

/// What goes to workers of a client's request: the path without what belongs to the client's connection.
fn head_of(parts: http::request::Parts) -> Result<Head, RouteError> {
    let uri = parts.uri.path_and_query().map(|pq| pq.as_str().to_owned());
    Ok(Head {
        method: parts.method,
        uri: Uri::try_from(uri.unwrap_or_default()).map_err(|err| RouteError::Internal {
            detail: err.to_string(),
        })?,
        headers: forwarded(parts.headers),
    })
}

/// The same request to every ready worker.
pub async fn fan_out(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let body = read_at_most(body, &parts.headers, MAX_ADMIN_BODY, &app.config.limits).await?;
    let head = head_of(parts)?;
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
    let (mut told, mut is_ok) = (serde_json::Map::new(), true);
    for worker in ask_each(app, &head, &body).await {
        is_ok &= worker.is_success();
        let text: String = worker.text.chars().take(MAX_REPEATED).collect();
        told.insert(
            worker.url.clone(),
            json!({"ok": worker.is_success(), "answer": text}),
        );
    }
    let status = if is_ok {
        StatusCode::OK
    } else {
        StatusCode::BAD_GATEWAY
    };
    let body = json!({"ok": is_ok, "workers": told});
    (answer(status, &body), is_ok)
}

/// What a worker said when all were asked.
struct Asked {
    url: String,
    /// `None`: it could not be asked, and `text` says why.
    status: Option<StatusCode>,
    kind: Option<HeaderValue>,
    text: String,
}

impl Asked {
    fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.is_success())
    }

    fn passed_on(self) -> Response {
        match self.status {
            Some(status) => passed_on(status, self.kind, self.text.into()),
            None => {
                let detail = format!("worker {}: {}", self.url, self.text);
                RouteError::Unasked { detail }.into_response()
            }
        }
    }
}

/// Ask every ready worker the same, at once; ordered by address.
async fn ask_each(app: &Arc<App>, head: &Head, body: &Bytes) -> Vec<Asked> {
    let mut asked = JoinSet::new();
    for worker in app.registry.workers() {
        if worker.is_ready() {
            let (head, body) = (head.clone(), Parts::from(body.clone()));
            asked.spawn(async move {
                let (status, kind, text) =
                    match timeout(ASK_TIMEOUT, ask(&worker, &head, body)).await {
                        Ok(Ok((status, kind, text))) => (Some(status), kind, text),
                        Ok(Err(cause)) => (None, None, cause),
                        Err(_) => (None, None, format!("no answer for {ASK_TIMEOUT:?}")),
                    };
                let url = worker.url().to_string();
                Asked {
                    url,
                    status,
                    kind,
                    text,
                }
            });
        }
    }
    let mut told = Vec::new();
    while let Some(joined) = asked.join_next().await {
        match joined {
            Ok(one) => told.push(one),
            Err(err) => tracing::error!(%err, "asking a worker panicked"),
        }
    }
    told.sort_by(|a, b| a.url.cmp(&b.url));
    told
}

async fn ask(
    worker: &Worker,
    head: &Head,
    body: Parts,
) -> Result<(StatusCode, Option<HeaderValue>, String), String> {
    let sent = worker.pool.send(head, body).await;
    let response = sent.map_err(|err| err.to_string())?;
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE).cloned();
    let mut from = response.into_body();
    let mut text = Vec::new();
    while let Some(piece) = from.piece().await {
        let piece = piece.map_err(|err| err.to_string())?;
        text.extend_from_slice(&piece);
        if text.len() > MAX_ASKED {
            return Err(format!("its answer is longer than {MAX_ASKED} bytes"));
        }
    }
    Ok((status, kind, String::from_utf8_lossy(&text).into_owned()))
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
