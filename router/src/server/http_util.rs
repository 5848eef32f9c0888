//! Helpers of several handlers: ids of requests, kinds of requests, JSON answers.

use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, Request, State};
use axum::response::{IntoResponse, Response};
use baton_text::dialect::Dialect;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::Value;

use crate::dispatch::app::AppState;
use crate::error::RouteError;

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Bodies of these requests are small [bytes].
pub const MAX_ADMIN_BODY: usize = 1 << 20;

pub fn answer(status: StatusCode, body: &Value) -> Response {
    (
        status,
        [(header::CONTENT_TYPE, "application/json")],
        body.to_string(),
    )
        .into_response()
}

/// Remove one slash at the end of a path, as the APIs that clients know accept it. `/ui/` is a path
/// of its own.
pub fn trim_trailing_slash(uri: &mut Uri) {
    let path = uri.path();
    if path == "/ui/" {
        return;
    }
    let Some(trimmed) = path.strip_suffix('/').filter(|trimmed| !trimmed.is_empty()) else {
        return;
    };
    let target = match uri.query() {
        Some(query) => format!("{trimmed}?{query}"),
        None => trimmed.to_owned(),
    };
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(target).ok();
    if let Ok(trimmed) = Uri::from_parts(parts) {
        *uri = trimmed;
    }
}

pub fn is_generation(request: &Request) -> bool {
    let is_post = matches!(*request.method(), Method::POST | Method::PUT);
    is_post && Dialect::of_path(request.uri().path()).is_some()
}

/// Argument and result of most handlers.
pub type SharedApp = State<Arc<AppState>>;
pub type HandlerResult = Result<Response, RouteError>;

/// The parameter of a path that has one.
pub struct PathText(pub String);

impl<S: Send + Sync> FromRequestParts<S> for PathText {
    type Rejection = RouteError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, RouteError> {
        let read = Path::from_request_parts(parts, state).await;
        let Path(text) = read.map_err(|err| RouteError::unreadable("path", err.body_text()))?;
        Ok(Self(text))
    }
}

pub fn new_request_id(prefix: &str) -> HeaderValue {
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
