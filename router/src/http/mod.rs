//! The HTTP face: routes, the API key, request ids, CORS, and errors for everything else.
//!
//! generate.rs takes generation requests in, admin.rs is what an operator or a probe asks the router, passing.rs what
//! it only passes on.

mod access;
mod admin;
mod exposition;
mod generate;
mod passing;

use std::sync::Arc;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use rand::Rng;
use rand::distr::Alphanumeric;

use crate::App;
use crate::body::Api;
use crate::error::{Code, RouteError};
use crate::leg::status_label;
use crate::record::class;

/// Headers that belong to one connection.
pub const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

pub const REQUEST_ID: &str = "x-request-id";

pub fn router(app: Arc<App>) -> Router {
    let passed = passing::PASSED.iter().fold(Router::new(), |routes, path| {
        routes.route(path, post(passing::forward_work))
    });
    passed
        .route(Api::Chat.path(), post(generate::chat))
        .route(Api::Completions.path(), post(generate::completions))
        .route(
            Api::Generate.path(),
            post(generate::generate).put(generate::generate),
        )
        .route("/tokenize", post(passing::forward))
        .route("/v1/tokenize", post(passing::forward))
        .route("/detokenize", post(passing::forward))
        .route("/v1/detokenize", post(passing::forward))
        .route("/v1/models", get(passing::models))
        .route("/v1/models/{id}", get(passing::forward))
        .route("/get_model_info", get(passing::forward))
        .route("/model_info", get(passing::forward))
        .route("/get_server_info", get(passing::forward))
        .route("/server_info", get(passing::forward))
        .route("/health", get(admin::live))
        .route("/ping", get(admin::live))
        .route("/livez", get(admin::live))
        .route("/liveness", get(admin::live))
        .route("/readyz", get(admin::ready))
        .route("/readiness", get(admin::ready))
        .route("/health_generate", get(admin::health_generate))
        .route("/workers", get(admin::list_workers).post(admin::add_worker))
        .route(
            "/workers/{id}",
            get(admin::show_worker).delete(admin::remove_worker),
        )
        .route("/workers/{id}/drain", post(admin::drain_worker))
        .route("/add_worker", post(admin::legacy_add))
        .route("/remove_worker", post(admin::legacy_remove))
        .route("/list_workers", get(admin::legacy_list))
        .route(
            "/flush_cache",
            post(passing::flush_cache).get(passing::flush_cache),
        )
        .route("/get_loads", get(admin::loads))
        .route("/engine_metrics", get(passing::engine_metrics))
        .route("/v1/requests/{id}", get(admin::show_request))
        .route("/abort_request", post(passing::fan_out))
        .route("/start_profile", post(passing::fan_out))
        .route("/stop_profile", post(passing::fan_out))
        .route("/v1/requests/{rid}/{verb}", post(passing::about_request))
        .route("/metrics", get(admin::metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(app.clone(), edge))
        .with_state(app)
}

/// Only /metrics, for --prometheus-port.
pub fn metrics_router(app: Arc<App>) -> Router {
    Router::new()
        .route("/metrics", get(admin::metrics))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(app)
}

async fn not_found(request: Request) -> RouteError {
    RouteError::NotFound {
        path: request.uri().path().to_owned(),
    }
}

async fn method_not_allowed(request: Request) -> RouteError {
    RouteError::MethodNotAllowed {
        method: request.method().to_string(),
        path: request.uri().path().to_owned(),
    }
}

/// Around every route: request id in and out, CORS, API key.
async fn edge(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let rid = request_id(&app, &request);
    let origin = allowed_origin(&app, request.headers());
    let is_preflight = request.method() == Method::OPTIONS && origin.is_some();
    let access = access::check(&app, &request);
    let is_recorded = access.is_ok() && !is_preflight && is_generation(&request);
    let path = request.extensions().get::<MatchedPath>().cloned();
    let unrecorded = (!is_recorded).then(|| (label(request.method()), path));
    let mut response = if is_preflight {
        preflight(request.headers())
    } else if let Err(refusal) = access {
        refusal.into_response()
    } else {
        request.headers_mut().insert(REQUEST_ID, rid.clone());
        next.run(request).await
    };
    if let Some((method, path)) = unrecorded {
        count(&app, method, path.as_ref(), &response);
    }
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, rid);
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        headers.insert(
            header::ACCESS_CONTROL_EXPOSE_HEADERS,
            HeaderValue::from_static(REQUEST_ID),
        );
    }
    response
}

/// Requests that keep a record of their own (record.rs) when they get as far as their handler.
fn is_generation(request: &Request) -> bool {
    let is_post = matches!(*request.method(), Method::POST | Method::PUT);
    let mut apis = [Api::Chat, Api::Completions, Api::Generate].into_iter();
    is_post && apis.any(|api| api.path() == request.uri().path())
}

/// Metric label of a method: a closed set.
fn label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

fn count(app: &App, method: &'static str, path: Option<&MatchedPath>, response: &Response) {
    let path = path.map_or("unmatched", MatchedPath::as_str);
    let status = response.status();
    let outcome = match response.extensions().get::<Code>() {
        Some(Code(code)) => code,
        None if status.is_success() => "ok",
        None => status_label(status),
    };
    let labels = [path, method, class(status.as_u16()), outcome];
    app.metrics.requests.with_label_values(&labels).inc();
}

/// The client's id from the first header that has one, else a new one that tells the API by its prefix.
fn request_id(app: &App, request: &Request) -> HeaderValue {
    let names = app.config.listen.request_id_headers.iter();
    let given = names
        .filter_map(|name| request.headers().get(name))
        .find(|value| !value.is_empty() && value.len() <= 256);
    if let Some(given) = given {
        return given.clone();
    }
    let prefix = match request.uri().path() {
        "/v1/chat/completions" => Api::Chat.id_prefix(),
        "/v1/completions" => Api::Completions.id_prefix(),
        "/generate" => Api::Generate.id_prefix(),
        _ => "req-",
    };
    let mut id = String::with_capacity(prefix.len() + 24);
    id.push_str(prefix);
    id.extend(
        rand::rng()
            .sample_iter(Alphanumeric)
            .take(24)
            .map(char::from),
    );
    HeaderValue::try_from(id).unwrap_or(HeaderValue::from_static("req-unknown"))
}

fn allowed_origin(app: &App, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    let allowed = &app.config.listen.cors_allowed_origins;
    let is_allowed = allowed
        .iter()
        .any(|a| a == "*" || a.as_bytes() == origin.as_bytes());
    is_allowed.then(|| origin.clone())
}

fn preflight(asked: &HeaderMap) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("GET, POST, DELETE, OPTIONS"),
    );
    let wanted = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS);
    let wanted = wanted.cloned();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_HEADERS,
        wanted.unwrap_or(HeaderValue::from_static("content-type, authorization")),
    );
    headers.insert(
        header::ACCESS_CONTROL_MAX_AGE,
        HeaderValue::from_static("3600"),
    );
    response
}
