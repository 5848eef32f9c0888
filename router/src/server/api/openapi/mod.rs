//! Description of the API: `/openapi.json` and `/docs`.
//!
//! `python -m baton.server.http.openapi` writes both files, from the structs by which engines read
//! requests; tests compare them with that and with the routes.

use axum::response::{IntoResponse, Response};
use http::header;

const DOCUMENT: &str = include_str!("openapi.json");
const PAGE: &str = include_str!("docs.html");

/// The page has a style of its own and nothing else.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub async fn document() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT).into_response()
}

pub async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
    ];
    (headers, PAGE).into_response()
}
