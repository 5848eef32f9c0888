//! Errors of the router on the paths of Anthropic's API.

use axum::body::Body;
use axum::response::Response;
use baton_text::dialect::write::anthropic_error_body;
use http::{HeaderName, HeaderValue};

use crate::error::ErrorBody;

/// Path that counts the tokens of a request to /v1/messages.
pub const COUNT_TOKENS_PATH: &str = "/v1/messages/count_tokens";
/// Anthropic's name of x-request-id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// Gives an error of the router Anthropic's form, and any response the header with the request's
/// id.
pub fn to_anthropic_form(response: &mut Response, request_id: &HeaderValue) {
    let id = String::from_utf8_lossy(request_id.as_bytes());
    if let Some(ErrorBody(error)) = response.extensions_mut().remove() {
        *response.body_mut() = Body::from(anthropic_error_body(&error, &id));
    }
    response
        .headers_mut()
        .insert(REQUEST_ID, request_id.clone());
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use axum::body::to_bytes;
    use axum::response::IntoResponse;
    use serde_json::{Value, json};

    use super::*;
    use crate::error::RouteError;

    #[tokio::test]
    async fn errors_have_anthropics_form() {
        for (err, status, kind, code) in [
            (
                RouteError::InvalidApiKey,
                401,
                "authentication_error",
                "invalid_api_key",
            ),
            (
                RouteError::PayloadTooLarge { limit_bytes: 1 },
                413,
                "request_too_large",
                "payload_too_large",
            ),
            (RouteError::Draining, 503, "overloaded_error", "draining"),
        ] {
            let mut response = err.into_response();
            to_anthropic_form(&mut response, &HeaderValue::from_static("r1"));
            assert_eq!(response.status(), status);
            assert_eq!(response.headers()["request-id"], "r1");
            let body = to_bytes(response.into_body(), 1 << 16).await.unwrap();
            let body: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["type"], "error");
            assert_eq!(body["error"]["type"], kind);
            assert_eq!(body["error"]["code"], code);
            assert_eq!(body["request_id"], json!("r1"));
        }
        let mut response = "answer".into_response();
        to_anthropic_form(&mut response, &HeaderValue::from_static("r1"));
        let body = to_bytes(response.into_body(), 1 << 16).await.unwrap();
        assert_eq!(&body[..], b"answer");
    }
}
