//! Helpers of several handlers: ids of requests, kinds of requests, JSON answers.

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderName, HeaderValue, Method, StatusCode, header};
use rand::Rng;
use rand::distr::Alphanumeric;
use serde_json::Value;

use crate::request::body::ApiKind;

pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Bodies of these requests are small [bytes].
pub const MAX_ADMIN_BODY: usize = 1 << 20;

pub fn answer(status: StatusCode, body: &Value) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}

pub fn is_generation(request: &Request) -> bool {
    let is_post = matches!(*request.method(), Method::POST | Method::PUT);
    is_post && api_of(request.uri().path()).is_some()
}

/// API of a path that takes generation requests.
pub fn api_of(path: &str) -> Option<ApiKind> {
    let mut apis = [ApiKind::Chat, ApiKind::Completions, ApiKind::Generate].into_iter();
    apis.find(|api| api.path() == path)
}

pub fn new_request_id(prefix: &str) -> HeaderValue {
    let mut id = String::with_capacity(prefix.len() + 24);
    id.push_str(prefix);
    id.extend(rand::rng().sample_iter(Alphanumeric).take(24).map(char::from));
    HeaderValue::try_from(id).unwrap_or(HeaderValue::from_static("req-unknown"))
}
