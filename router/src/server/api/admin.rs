//! Everything but generation that the router answers itself: probes, workers, metrics.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Query, Request, State};
use axum::response::{IntoResponse, Response};
use baton_text::dialect::Dialect;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, StatusCode, header};
use router_core::Role;
use serde::Deserialize;
use serde_json::{Value, json};

use super::generate::{BodyLimit, read_at_most};
use super::proxy::{ask_all, error_object};
use crate::config::{WorkerSpec, WorkerUrl};
use crate::dispatch::app::AppState;
use crate::error::RouteError;
use crate::observability::metrics::RouterMetrics;
use crate::server::http_util::{HandlerResult, MAX_ADMIN_BODY, PathText, SharedApp, answer};
use crate::workers::fleet::metrics as gauges;
use crate::workers::health;
use crate::workers::worker::Worker;

const VERSION: &str = env!("CARGO_PKG_VERSION");

// ---- probes ----

/// States no incarnation: a router that another router has as its worker would be described by
/// it, and its `/get_server_info` is that of an engine.
pub async fn health() -> Response {
    answer(StatusCode::OK, &json!({"status": "ok"}))
}

pub async fn live(State(app): SharedApp) -> Response {
    let body = json!({"status": "ok", "incarnation": app.incarnation});
    answer(StatusCode::OK, &body)
}

/// Entry points, for those who open the router's address in a browser or with curl.
pub async fn index() -> Response {
    let body = json!({
        "name": "baton-router",
        "version": VERSION,
        "ui": "/ui/",
        "api": [
            Dialect::Chat.path(),
            Dialect::Completions.path(),
            Dialect::Responses.path(),
            Dialect::Messages.path(),
            "/v1/models",
            Dialect::Generate.path(),
        ],
        "health": ["/livez", "/readyz"],
        "metrics": "/metrics",
        "workers": "/workers",
    });
    answer(StatusCode::OK, &body)
}

/// The router's version, in vLLM's form.
pub async fn version() -> Response {
    answer(StatusCode::OK, &json!({"version": VERSION}))
}

pub async fn ready(State(app): SharedApp) -> Response {
    let refusal = not_ready_error(&app);
    let missing = app.fleet.readiness_error();
    let mut body = json!({
        "status": if refusal.is_none() { "ready" } else { "not_ready" },
        "serves": missing.is_none(),
        "incarnation": app.incarnation,
    });
    for role in Role::ALL {
        let (known, ready) = app.fleet.count(role);
        let open_circuits = app.fleet.open_circuits(role);
        body[role.into_str()] =
            json!({"known": known, "ready": ready, "open_circuits": open_circuits});
    }
    if let Some(reason) = refusal.as_ref().or(missing.as_ref()) {
        body["reason"] = reason.to_string().into();
    }
    match refusal {
        None => answer(StatusCode::OK, &body),
        Some(reason) => {
            body["error"] = error_object(&reason.body()).unwrap_or_default();
            answer(StatusCode::SERVICE_UNAVAILABLE, &body)
        }
    }
}

/// Error of a router that should get no requests, because it drains or does not know its workers
/// yet.
fn not_ready_error(app: &AppState) -> Option<RouteError> {
    if app.is_draining() {
        return Some(RouteError::Draining);
    }
    let sources = app.config.discovery.sources(app.fleet.is_pd());
    let synced = app.fleet.discovered.lock().len();
    if synced < sources {
        return Some(RouteError::Undiscovered { synced, sources });
    }
    let finds_workers = sources > 0 && !app.config.has_static_workers();
    // Once it has served, a lack of workers is no reason: a router that left its Service would turn
    // 503 with Retry-After into refused connections.
    if finds_workers || app.fleet.has_served() {
        None
    } else {
        app.fleet.readiness_error()
    }
}

/// Every ready worker is asked to generate something, which counts as one running request.
pub async fn health_generate(State(app): SharedApp) -> HandlerResult {
    if let Some(err) = not_ready_error(&app).or_else(|| app.fleet.readiness_error()) {
        return Err(err);
    }
    let _place = app.admission.enter(&app.metrics).await?;
    let head = app.fleet.own_request(Method::GET, "/health_generate");
    Ok(ask_all(&app, head, Bytes::new()).await)
}

pub async fn metrics(State(app): SharedApp) -> Response {
    let update = |metrics: &RouterMetrics| gauges::update(metrics, &app.fleet);
    app.feed.update_clients();
    match app.metrics.render(update) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(err) => RouteError::Internal {
            detail: err.to_string(),
        }
        .into_response(),
    }
}

// ---- workers ----

fn show(app: &AppState, worker: &Worker) -> Value {
    let state = worker.state();
    let description = worker.description();
    let (circuit, passed_over_ms) = app.fleet.objections_to(worker);
    let feeds = app.fleet.candidates_at(worker).into_iter();
    json!({
        "id": worker.id.to_string(),
        "url": worker.url().to_string(),
        "worker_type": worker.role().into_str(),
        "is_healthy": worker.is_ready(),
        "state": state.label(),
        "drained_by": state.drained_by(),
        "reason": state.reason().map(str::to_owned).or_else(|| app.fleet.incompatibility(worker)),
        "circuit": circuit.into_str(),
        "passed_over_ms": passed_over_ms,
        "ready_peers": app.fleet.ready_peers(worker),
        "load": worker.load(),
        "bootstrap_port": worker.bootstrap_port(&description),
        "topology": worker.spec.topology,
        "dp_size": description.dp_size(),
        "model_id": description.served_model_name,
        "version": description.version,
        "incarnation": description.incarnation,
        "page_size": description.page_size,
        "fingerprint": description.fingerprint,
        "kv_events": feeds.map(|c| c.feed.status()).collect::<Vec<_>>(),
    })
}

pub async fn list_workers(State(app): SharedApp) -> Response {
    let workers = app.fleet.workers();
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

/// By its id, or by its URL as older clients of SGLang's router have it.
pub fn find(app: &AppState, id: &str) -> Result<Arc<Worker>, RouteError> {
    let found = match id.parse() {
        Ok(number) => app.fleet.worker(number),
        Err(_) => WorkerUrl::parse(id)
            .ok()
            .and_then(|url| with_url(app, &url)),
    };
    found.ok_or_else(|| RouteError::UnknownWorker { id: id.to_owned() })
}

/// The newest: older ones with the same address are draining already.
pub fn with_url(app: &AppState, url: &WorkerUrl) -> Option<Arc<Worker>> {
    app.fleet
        .workers()
        .into_iter()
        .rev()
        .find(|w| w.url() == url)
}

pub async fn show_worker(State(app): SharedApp, PathText(id): PathText) -> HandlerResult {
    let worker = find(&app, &id)?;
    Ok(answer(StatusCode::OK, &show(&app, &worker)))
}

/// The timeline of a recent request, by the id it came or was answered with.
pub async fn show_request(State(app): SharedApp, PathText(id): PathText) -> HandlerResult {
    let timeline = app.sinks.requests.find(&id, Dialect::without_prefix);
    let timeline = timeline.ok_or(RouteError::UnknownTimeline { id })?;
    Ok(answer(StatusCode::OK, &timeline))
}

pub async fn remove_worker(State(app): SharedApp, PathText(id): PathText) -> HandlerResult {
    let worker = find(&app, &id)?;
    app.fleet.remove(worker.id);
    tracing::info!(url = %worker.url(), "worker removed");
    let body = json!({
        "status": "accepted",
        "worker_id": worker.id.to_string(),
        "url": worker.url().to_string(),
        "message": "no new requests; those in flight finish",
    });
    Ok(answer(StatusCode::ACCEPTED, &body))
}

#[derive(Deserialize)]
struct NewWorker {
    url: String,
    worker_type: Option<Role>,
    bootstrap_port: Option<u16>,
    topology: Option<String>,
}

pub async fn add_worker(State(app): SharedApp, request: Request) -> HandlerResult {
    let (parts, body) = request.into_parts();
    let body = read_at_most(&app, body, &parts.headers, BodyLimit::new(MAX_ADMIN_BODY)).await?;
    let asked: NewWorker =
        serde_json::from_slice(&body).map_err(|err| RouteError::InvalidJson {
            detail: format!(
                "{err}; expected \
                 {{\"url\", \"worker_type\": regular | prefill | decode, \"bootstrap_port\", \"topology\"}}"
            ),
        })?;
    let role = asked.worker_type.unwrap_or(Role::Regular);
    let port = asked.bootstrap_port.map(|port| port.to_string());
    let worker = register(&app, &asked.url, role, port.as_deref(), asked.topology)?;
    let id = worker.id.to_string();
    let url = worker.url().to_string();
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
    app: &Arc<AppState>,
    url: &str,
    role: Role,
    port: Option<&str>,
    topology: Option<String>,
) -> Result<Arc<Worker>, RouteError> {
    if !app.fleet.serving_roles().contains(&role) {
        let mode = if app.fleet.is_pd() { "with" } else { "without" };
        let problem = format!("{role} has no use here: the router runs {mode} --pd-disaggregation");
        return Err(RouteError::InvalidValue {
            param: "worker_type",
            problem,
        });
    }
    let spec = WorkerSpec::new(url, role, port).map_err(|problem| RouteError::InvalidValue {
        param: "url",
        problem,
    })?;
    health::register(&app.fleet, spec.in_topology(topology))
}

#[derive(Deserialize)]
pub struct LegacyQuery {
    url: Option<String>,
    worker_type: Option<Role>,
    bootstrap_port: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for LegacyQuery {
    type Rejection = RouteError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RouteError> {
        let read = Query::from_request_parts(parts, state).await;
        let Query(query) = read.map_err(|err| RouteError::unreadable("query", err.body_text()))?;
        Ok(query)
    }
}

impl LegacyQuery {
    fn url(&self) -> Result<&str, RouteError> {
        let hint = "give ?url=http://HOST:PORT";
        self.url
            .as_deref()
            .ok_or(RouteError::MissingField { param: "url", hint })
    }
}

pub async fn legacy_add(State(app): SharedApp, query: LegacyQuery) -> HandlerResult {
    let role = query.worker_type.unwrap_or(Role::Regular);
    let worker = register(
        &app,
        query.url()?,
        role,
        query.bootstrap_port.as_deref(),
        None,
    )?;
    let message = format!("Successfully added worker: {}", worker.url());
    Ok(answer(
        StatusCode::OK,
        &json!({"message": message, "id": worker.id.to_string()}),
    ))
}

pub async fn legacy_remove(State(app): SharedApp, query: LegacyQuery) -> HandlerResult {
    let given = query.url()?;
    let url = WorkerUrl::parse(given).map_err(|problem| RouteError::InvalidValue {
        param: "url",
        problem,
    })?;
    let worker = with_url(&app, &url).ok_or_else(|| RouteError::UnknownWorker {
        id: url.to_string(),
    })?;
    app.fleet.remove(worker.id);
    let message = format!("Successfully removed worker: {url}");
    Ok(answer(StatusCode::OK, &json!({"message": message})))
}

pub async fn legacy_list(State(app): SharedApp) -> Response {
    let workers = app.fleet.workers();
    let urls: Vec<String> = workers.iter().map(|w| w.url().to_string()).collect();
    answer(StatusCode::OK, &json!({"urls": urls}))
}

pub async fn loads(State(app): SharedApp) -> Response {
    let candidates = app.fleet.candidates();
    let loads = candidates.iter().map(
        |c| json!({"worker": c.name, "worker_type": c.worker.role().into_str(), "load": c.load()}),
    );
    answer(
        StatusCode::OK,
        &json!({"workers": loads.collect::<Vec<_>>()}),
    )
}
