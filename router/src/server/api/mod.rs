//! The HTTP face: routes, the API key, request ids, CORS, and errors for everything else.
//!
//! generate.rs receives generation requests, admin.rs answers operators and probes, proxy.rs passes
//! requests on.

/// Routes of the control plane.
mod admin;
/// Errors on the paths of Anthropic's API.
mod anthropic;
/// API keys and access levels.
mod auth;
/// Requests of web pages of other sites.
pub(crate) mod browsers;
/// Which client a request is from, for workers.
mod client_label;
/// Routes that drain workers.
mod draining;
/// Generation requests.
mod generate;
/// Metrics of workers and router in one exposition.
mod metrics_merge;
/// Description of the API.
mod openapi;
/// Requests passed through to workers.
mod proxy;
/// Description of a worker, for clients.
mod server_info;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, any, get, post};
use baton_text::dialect::Dialect;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};

use self::anthropic::{COUNT_TOKENS_PATH, to_anthropic_form};
use self::auth::{AccessLevel, OperatorRequest};
use self::generate::handler;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::status_label;
use crate::error::{ErrorCode, RouteError};
use crate::observability::access_log::class;
use crate::server::http_util::{REQUEST_ID, is_generation, new_request_id};
use crate::server::ui;

/// Path, the key it needs, and what answers it.
type Route = (&'static str, AccessLevel, MethodRouter<Arc<AppState>>);

/// Routes that need the same key.
struct RouteGroup {
    level: AccessLevel,
    routes: Vec<Route>,
}

impl RouteGroup {
    fn new(level: AccessLevel) -> Self {
        Self {
            level,
            routes: Vec::new(),
        }
    }

    fn add(&mut self, paths: &[&'static str], methods: MethodRouter<Arc<AppState>>) {
        let routes = paths
            .iter()
            .map(|path| (*path, self.level, methods.clone()));
        self.routes.extend(routes);
    }
}

fn all_routes() -> Vec<Route> {
    let groups = [
        client_routes(),
        health_routes(),
        open_routes(),
        control_routes(),
    ];
    groups.into_iter().flat_map(|group| group.routes).collect()
}

/// Routes of applications.
fn client_routes() -> RouteGroup {
    let mut group = RouteGroup::new(AccessLevel::Client);
    let posted = [
        Dialect::Chat,
        Dialect::Completions,
        Dialect::Responses,
        Dialect::Messages,
    ];
    for dialect in posted {
        group.add(&[dialect.path()], post(handler(dialect)));
    }
    let generate = handler(Dialect::Generate);
    let path = Dialect::Generate.path();
    group.add(&[path], post(generate.clone()).put(generate));
    group.add(&[COUNT_TOKENS_PATH], post(proxy::count_tokens));
    let stored = get(no_stored_responses).delete(no_stored_responses);
    group.add(&["/v1/responses/{id}"], stored);
    group.add(
        &["/v1/responses/{id}/input_items"],
        get(no_stored_responses),
    );
    let posted = ["/v1/responses/{id}/cancel", "/v1/responses/compact"];
    group.add(&posted, post(no_stored_responses));
    let tokens = ["/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"];
    group.add(&tokens, post(proxy::forward));
    group.add(&["/v1/models"], get(proxy::models));
    group.add(&["/v1/models/{id}"], get(proxy::model));
    group.add(&["/get_model_info", "/model_info"], get(proxy::forward));
    group.add(&auth::INFO_PATHS, get(server_info::server_info));
    group.add(&proxy::PROXIED_PATHS, post(proxy::forward_work));
    group
}

/// Routes of probes.
fn health_routes() -> RouteGroup {
    let mut group = RouteGroup::new(AccessLevel::Open);
    group.add(&["/health", "/ping"], get(admin::health));
    group.add(&["/livez", "/liveness"], get(admin::live));
    group.add(&["/readyz", "/readiness"], get(admin::ready));
    group
}

/// Routes of scrapers and of the web page.
fn open_routes() -> RouteGroup {
    let mut group = RouteGroup::new(AccessLevel::Open);
    group.add(&["/metrics"], get(admin::metrics));
    group.add(&["/"], get(admin::index));
    group.add(&["/version"], get(admin::version));
    group.add(&["/openapi.json"], get(openapi::document));
    group.add(&["/docs"], get(openapi::page));
    group.add(&["/ui"], get(ui::to_folder));
    group.add(&["/ui/"], get(ui::index));
    group.add(&["/ui/{file}"], get(ui::file));
    group
}

/// Routes of operators.
fn control_routes() -> RouteGroup {
    let mut group = RouteGroup::new(AccessLevel::Control);
    group.add(&["/ui/feed"], get(ui::feed));
    group.add(&["/health_generate"], get(admin::health_generate));
    let workers = get(admin::list_workers).post(admin::add_worker);
    group.add(&["/workers"], workers);
    let worker = get(admin::show_worker).delete(admin::remove_worker);
    group.add(&["/workers/{id}"], worker);
    let drain = get(draining::show_drain).post(draining::drain_worker);
    group.add(&["/workers/{id}/drain"], drain);
    group.add(&["/workers/{id}/undrain"], post(draining::undrain_worker));
    group.add(&["/add_worker"], post(admin::legacy_add));
    group.add(&["/remove_worker"], post(admin::legacy_remove));
    group.add(&["/list_workers"], get(admin::legacy_list));
    let flush = post(proxy::flush_cache).get(proxy::flush_cache);
    group.add(&["/flush_cache"], flush);
    group.add(&["/get_loads"], get(admin::loads));
    group.add(&["/engine_metrics"], get(proxy::engine_metrics));
    let all_workers = ["/abort_request", "/start_profile", "/stop_profile"];
    group.add(&all_workers, post(proxy::fan_out));
    group.add(&["/v1/requests/{id}"], get(admin::show_request));
    let verbs = ["/v1/requests/{id}/suspend", "/v1/requests/{id}/resume"];
    group.add(&verbs, post(proxy::about_request));
    group.add(&["/v1/requests/{id}/{*rest}"], any(no_request_path));
    group
}

/// Every path of the router with the key it needs: open, client or control.
pub fn route_access() -> Vec<(&'static str, &'static str)> {
    all_routes()
        .into_iter()
        .map(|(path, level, _)| (path, level.into_str()))
        .collect()
}

/// State of the middleware `edge`.
#[derive(Clone)]
struct EdgeState {
    app: Arc<AppState>,
    levels: Arc<HashMap<&'static str, AccessLevel>>,
    /// Paths of probes, which show and change nothing: they are asked by any name.
    probes: Arc<HashSet<&'static str>>,
}

pub fn router(app: Arc<AppState>) -> Router {
    let routes = all_routes();
    let levels = routes.iter().map(|(path, level, _)| (*path, *level));
    let state = EdgeState {
        app: app.clone(),
        levels: Arc::new(levels.collect()),
        probes: Arc::new(health_routes().routes.iter().map(|route| route.0).collect()),
    };
    let add = |all: Router<Arc<AppState>>, (path, _, methods): Route| all.route(path, methods);
    let all = routes.into_iter().fold(Router::new(), add);
    all.fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(state, edge))
        .with_state(app)
}

/// Only /metrics, for --prometheus-port.
pub fn metrics_router(app: Arc<AppState>) -> Router {
    Router::new()
        .route("/metrics", get(admin::metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(app)
}

/// Only the health paths, for --health-port.
pub fn health_router(app: Arc<AppState>) -> Router {
    let add = |all: Router<Arc<AppState>>, (path, _, methods): Route| all.route(path, methods);
    health_routes()
        .routes
        .into_iter()
        .fold(Router::new(), add)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(app)
}

async fn not_found(request: Request) -> RouteError {
    RouteError::NotFound {
        path: request.uri().path().to_owned(),
    }
}

async fn no_request_path(request: Request) -> RouteError {
    RouteError::NoRequestPath {
        path: request.uri().path().to_owned(),
    }
}

async fn no_stored_responses() -> RouteError {
    RouteError::NoStoredResponses
}

async fn method_not_allowed(request: Request) -> RouteError {
    let method = request.method().to_string();
    let path = request.uri().path().to_owned();
    RouteError::MethodNotAllowed { method, path }
}

/// Around every route: request id in and out, CORS, pages of other sites, API key.
///
/// Layers of tower-http cannot do this. `CorsLayer` answers every OPTIONS request with 200, also
/// those from other origins, which here meet the key and get 405. `SetRequestIdLayer` reads one
/// header and keeps a value of any length.
async fn edge(State(state): State<EdgeState>, mut request: Request, next: Next) -> Response {
    let app = &*state.app;
    let rid = request_id(app, &request);
    let origin = allowed_origin(app, request.headers());
    let is_anthropic = Dialect::is_anthropic_path(request.uri().path());
    let is_preflight = request.method() == Method::OPTIONS && origin.is_some();
    let path = request.extensions().get::<MatchedPath>().cloned();
    let level = path
        .as_ref()
        .and_then(|path| state.levels.get(path.as_str()));
    let level = level.copied().unwrap_or(AccessLevel::Client);
    let access = check_host(&request)
        .and_then(|()| check_page(&state, path.as_ref(), &request))
        .and_then(|()| auth::check(app, level, &request))
        .and_then(|label| browsers::check_media_type(level, &request).map(|()| label));
    let is_recorded = access.is_ok() && !is_preflight && keeps_record(&request);
    let unrecorded = (!is_recorded).then(|| (label(request.method()), path));
    let mut response = if is_preflight {
        preflight(request.headers())
    } else if let Err(refusal) = access {
        refusal.into_response()
    } else {
        if let Ok(Some(label)) = access {
            request.extensions_mut().insert(label);
        }
        if auth::hide_control_key(app, request.headers_mut()) {
            request.extensions_mut().insert(OperatorRequest);
        }
        request.headers_mut().insert(REQUEST_ID, rid.clone());
        next.run(request).await
    };
    if let Some((method, path)) = unrecorded {
        count(app, method, path.as_ref(), &response);
    }
    if is_anthropic {
        to_anthropic_form(&mut response, &rid);
    }
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, rid);
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from(REQUEST_ID),
        );
    }
    response
}

/// Requests with a record of their own (access_log.rs) when they get as far as their handler.
fn keeps_record(request: &Request) -> bool {
    let is_passed = || proxy::PROXIED_PATHS.contains(&request.uri().path());
    is_generation(request) || (request.method() == Method::POST && is_passed())
}

/// An HTTP/1.1 request has one `Host` (RFC 9112, 3.2).
fn check_host(request: &Request) -> Result<(), RouteError> {
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if request.version() == Version::HTTP_11 && hosts != 1 {
        let problem = "an HTTP/1.1 request needs one Host header";
        return Err(RouteError::MalformedHead { problem });
    }
    Ok(())
}

/// Requests of foreign pages, and by foreign names.
fn check_page(
    state: &EdgeState,
    path: Option<&MatchedPath>,
    request: &Request,
) -> Result<(), RouteError> {
    if path.is_some_and(|path| state.probes.contains(path.as_str())) {
        return Ok(());
    }
    browsers::check(&state.app.config.listen, request)
}

/// Metric label of a method: a closed set.
fn label(method: &Method) -> &'static str {
    let known = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"];
    known
        .into_iter()
        .find(|name| method == name)
        .unwrap_or("other")
}

fn count(app: &AppState, method: &'static str, path: Option<&MatchedPath>, response: &Response) {
    let path = path.map_or("unmatched", MatchedPath::as_str);
    let status = response.status();
    let outcome = match response.extensions().get::<ErrorCode>() {
        Some(ErrorCode(code)) => code,
        // A file that the browser holds already (304) and a redirect are good answers.
        None if status.is_success() || status.is_redirection() => "ok",
        None => status_label(status),
    };
    let labels = [path, method, class(status.as_u16()), outcome];
    app.metrics.requests.with_label_values(&labels).inc();
}

/// Id from the first header of the client that has one, else a new id whose prefix names the API.
fn request_id(app: &AppState, request: &Request) -> HeaderValue {
    let names = app.config.listen.request_id_headers.iter();
    let given = names
        .filter_map(|name| request.headers().get(name))
        .find(|value| !value.is_empty() && value.len() <= 256);
    let dialect = || Dialect::of_path(request.uri().path());
    given
        .cloned()
        .unwrap_or_else(|| new_request_id(dialect().map_or("req-", Dialect::id_prefix)))
}

fn allowed_origin(app: &AppState, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let allowed = &app.config.listen.cors_allowed_origins;
    let is_allowed = allowed
        .iter()
        .any(|a| a == "*" || a.as_bytes() == origin.as_bytes());
    is_allowed.then(|| origin.clone())
}

fn preflight(asked: &HeaderMap) -> Response {
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let usual = HeaderValue::from_static("content-type, authorization");
    let methods = HeaderValue::from_static("GET, POST, DELETE, OPTIONS");
    let headers = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, methods),
        (
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            wanted.unwrap_or(usual),
        ),
        (
            header::ACCESS_CONTROL_MAX_AGE,
            HeaderValue::from_static("3600"),
        ),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}
