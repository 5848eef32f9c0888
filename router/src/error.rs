//! Every error the router answers with: one variant, one stable code, one HTTP status.
//!
//! The body is OpenAI's nested object `{"error":{"message","type","param","code"}}`; codes are the
//! engine's where both sides have the error (`engine/baton/errors.py`), and docs/protocol.md lists
//! them. `Display` is for logs and operators; the message of the body is
//! [`RouteError::client_message`], which names no worker.

use axum::response::{IntoResponse, Response};
use baton_text::dialect::body::BodyError;
use baton_text::dialect::prompt_limit::OversizedBody;
use baton_text::dialect::translate::responses::NO_STORED_RESPONSES;
use baton_text::refusal::TextRefusal;
use bytes::Bytes;
use http::{HeaderValue, StatusCode, header};
use router_core::Role;

/// Why a request could not be answered by a worker's own words.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RouteError {
    #[error("the body is not a JSON object: {detail}")]
    InvalidJson { detail: String },
    #[error("{param} {problem}")]
    InvalidValue {
        param: &'static str,
        problem: String,
    },
    #[error("query parameter or field {param} is missing: {hint}")]
    MissingField {
        param: &'static str,
        hint: &'static str,
    },
    #[error("missing or wrong API key; send 'Authorization: Bearer KEY' with the key of --api-key")]
    InvalidApiKey,
    #[error(
        "missing or wrong key; this path takes 'Authorization: Bearer KEY' with a key of \
         --control-plane-api-keys"
    )]
    InvalidControlKey,
    #[error("key {id} has the role user; this path needs the role admin")]
    Forbidden { id: String },
    #[error(
        "a page of {origin} may not send {method} {path}; name its origin in \
         --cors-allowed-origins if it may"
    )]
    ForeignOrigin {
        origin: String,
        method: String,
        path: String,
    },
    #[error(
        "this router has no --api-key and is not known as {host}; ask it by its address, or start \
         it with --allowed-hosts NAME or a key"
    )]
    HostNotAllowed { host: String },
    #[error("no such path: {path}; GET /openapi.json lists the paths")]
    NotFound { path: String },
    #[error(
        "no such path: {path}; of a request there are GET /v1/requests/ID, POST \
         /v1/requests/ID/suspend and POST /v1/requests/ID/resume"
    )]
    NoRequestPath { path: String },
    #[error("no worker {id}; GET /workers lists them")]
    UnknownWorker { id: String },
    #[error(
        "no request {id} is known; it was never here, or more than --request-history others ended \
         since"
    )]
    UnknownTimeline { id: String },
    #[error("{method} is not allowed on {path}")]
    MethodNotAllowed { method: String, path: String },
    #[error("worker {url} is registered already as {role} (id {id}); DELETE /workers/{id} first")]
    DuplicateWorker { url: String, role: Role, id: u64 },
    #[error(
        "the registry is full: {limit} workers; remove some, or run a second router for the rest"
    )]
    TooManyWorkers { limit: usize },
    #[error(
        "{limit} pages listen to the feed already, which is the limit; close one, or ask GET \
         /workers and GET /metrics"
    )]
    FeedFull { limit: usize },
    #[error("the body is larger than {limit_bytes} bytes; shorten it or raise --max-payload-size")]
    PayloadTooLarge { limit_bytes: usize },
    #[error(
        "this model's maximum context length is {limit_tokens} tokens here, but the body is larger \
         than the {limit_bytes} bytes that the longest request needs; shorten it"
    )]
    BodyBeyondPrompt {
        limit_bytes: usize,
        limit_tokens: u64,
    },
    #[error(
        "the body is larger than {limit_bytes} bytes, and engines read no longer ones; shorten it \
         or split the batch"
    )]
    BodyBeyondEngines { limit_bytes: usize },
    #[error(
        "bodies of requests and answers hold {held_bytes} of {limit_bytes} bytes, too many for \
         this one; try again later, or raise --max-total-body-bytes"
    )]
    BodyMemoryFull {
        held_bytes: usize,
        limit_bytes: usize,
    },
    #[error("malformed request head: {problem}")]
    MalformedHead { problem: &'static str },
    #[error("the request's target (path and query) is longer than {limit_bytes} bytes; shorten it")]
    TargetTooLong { limit_bytes: usize },
    #[error(
        "the head has more than {limit_headers} headers or {limit_bytes} bytes; shorten it or \
         raise --max-header-bytes"
    )]
    HeadTooLarge {
        limit_bytes: usize,
        limit_headers: usize,
    },
    #[error("{problem}")]
    UnsupportedMediaType { problem: String },
    #[error("the body ended early: {detail}")]
    BodyBroken { detail: String },
    #[error("nothing more of the body came for {waited_ms} ms")]
    BodySilent { waited_ms: u64 },
    #[error(
        "the body did not end within {limit_secs} s, {got_bytes} bytes came; send it faster or \
         raise --body-read-timeout-secs"
    )]
    BodySlow { limit_secs: u64, got_bytes: usize },
    #[error(
        "the first token is predicted in {predicted_ms} ms at the best {role} worker, the limit is \
         {limit_ms} ms (--max-ttft-ms or the request's own); try again later, or add workers"
    )]
    TooLate {
        role: Role,
        predicted_ms: u64,
        limit_ms: u64,
        excess_ms: u64,
    },
    #[error(
        "{prefill} prefill and {decode} decode workers are ready, but no two of them can work \
         together; the operator finds the reason in GET /workers"
    )]
    NoPair { prefill: usize, decode: usize },
    #[error("no worker runs a request {rid}; it has ended, or went to workers that are not ready")]
    UnknownRequest { rid: String },
    #[error(
        "{running} requests are running and {queued} wait, which is the limit; try again later, or \
         raise --max-concurrent-requests or --queue-size"
    )]
    QueueFull { running: usize, queued: usize },
    #[error(
        "the request waited {waited_ms} ms for one of {running} places; try again later, or raise \
         --max-concurrent-requests"
    )]
    QueueTimeout { waited_ms: u64, running: usize },
    #[error("the router is shutting down; send the request to another one")]
    Draining,
    #[error(
        "{live} bootstrap rooms are in use, too many to give this request its own; try again later"
    )]
    TooManyRooms { live: usize },
    #[error(
        "{synced} of {sources} sources of workers have named any; see the log, and \
         baton_router_discovery_is_stale"
    )]
    Undiscovered { synced: usize, sources: usize },
    #[error("no {role} worker is ready: {known} known, {ready} ready; see GET /workers")]
    NoWorker {
        role: Role,
        known: usize,
        ready: usize,
    },
    #[error(
        "none of the {ready} ready {role} workers can resume the answer: it needs the feature \
         resume and an equal fingerprint; see GET /workers"
    )]
    NoResumeWorker { role: Role, ready: usize },
    #[error(
        "the router cannot open another connection to a worker: {cause}; raise its limit of open \
         files (ulimit -n), or lower --max-connections or --http2-max-streams"
    )]
    Exhausted { cause: String },
    #[error("{role} worker {worker} {problem}{}", as_suffix(detail))]
    Upstream {
        role: Role,
        worker: String,
        /// Failure of the worker, as a predicate. Clients see it: it names no worker.
        problem: String,
        /// Cause, for logs: it may hold addresses. May be empty.
        detail: String,
    },
    #[error(
        "{role} worker {worker} sent no byte for {waited_ms} ms; see its queue, or raise \
         --request-timeout-secs"
    )]
    UpstreamSilent {
        role: Role,
        worker: String,
        waited_ms: u64,
    },
    #[error(
        "the request's own deadline passed, {waited_ms} ms after it came; give it more, or add \
         workers"
    )]
    DeadlineOver { waited_ms: u64 },
    #[error(
        "requests with this body broke the workers they were sent to, so it is refused for a \
         minute; see the workers' logs, or change the request"
    )]
    PoisonRequest,
    #[error(
        "model {model:?} is not served here: no {role} worker that is registered serves it; GET \
         /v1/models lists what is"
    )]
    ModelNotFound { model: String, role: Role },
    #[error(transparent)]
    Oversized(#[from] OversizedBody),
    /// A request that cannot be translated to one that its worker takes.
    #[error(transparent)]
    Untranslatable(#[from] TextRefusal),
    #[error("{}", NO_STORED_RESPONSES)]
    NoStoredResponses,
    #[error(
        "the model is served by another server, which counts no tokens; read usage.input_tokens of \
         its answers"
    )]
    NoTokenCount,
    #[error("{detail}")]
    Unasked { detail: String },
    #[error("internal error: {detail}; please report it")]
    Internal { detail: String },
}

impl RouteError {
    /// axum cannot read the path or the query.
    pub fn unreadable(param: &'static str, why: String) -> Self {
        RouteError::InvalidValue {
            param,
            problem: format!("cannot be read: {why}"),
        }
    }

    /// Stable code and HTTP status.
    fn code_and_status(&self) -> (&'static str, u16) {
        use RouteError::*;
        match self {
            Untranslatable(refusal) => (refusal.code.into_str(), refusal.code.status()),
            NoStoredResponses => ("unsupported_parameter", 400),
            InvalidJson { .. } | BodyBroken { .. } => ("invalid_json", 400),
            InvalidValue { .. } => ("invalid_value", 400),
            MissingField { .. } => ("missing_field", 400),
            MalformedHead { .. } => ("malformed_head", 400),
            Oversized(OversizedBody::Prompt { .. }) | BodyBeyondPrompt { .. } => {
                ("context_length_exceeded", 400)
            }
            InvalidApiKey | InvalidControlKey => ("invalid_api_key", 401),
            Forbidden { .. } => ("forbidden", 403),
            ForeignOrigin { .. } => ("foreign_origin", 403),
            HostNotAllowed { .. } => ("host_not_allowed", 403),
            NotFound { .. }
            | NoRequestPath { .. }
            | NoTokenCount
            | UnknownWorker { .. }
            | UnknownRequest { .. }
            | UnknownTimeline { .. } => ("not_found", 404),
            ModelNotFound { .. } => ("model_not_found", 404),
            MethodNotAllowed { .. } => ("method_not_allowed", 405),
            BodySilent { .. } | BodySlow { .. } => ("request_timeout", 408),
            DuplicateWorker { .. } => ("duplicate_worker", 409),
            PayloadTooLarge { .. }
            | BodyBeyondEngines { .. }
            | Oversized(OversizedBody::Rest { .. }) => ("payload_too_large", 413),
            TargetTooLong { .. } => ("target_too_long", 414),
            UnsupportedMediaType { .. } => ("unsupported_media_type", 415),
            PoisonRequest => ("poison_request", 422),
            QueueFull { .. } => ("rate_limit_exceeded", 429),
            HeadTooLarge { .. } => ("head_too_large", 431),
            Internal { .. } => ("internal_error", 500),
            Upstream { .. } | Unasked { .. } => ("upstream_error", 502),
            TooManyWorkers { .. } => ("too_many_workers", 503),
            FeedFull { .. } => ("feed_full", 503),
            BodyMemoryFull { .. } => ("body_memory_full", 503),
            TooLate { .. } => ("ttft_too_late", 503),
            NoPair { .. } => ("no_pair", 503),
            QueueTimeout { .. } => ("queue_timeout", 503),
            Draining => ("draining", 503),
            TooManyRooms { .. } => ("queue_full", 503),
            NoWorker { .. } | NoResumeWorker { .. } | Undiscovered { .. } => ("no_worker", 503),
            Exhausted { .. } => ("connections_exhausted", 503),
            UpstreamSilent { .. } | DeadlineOver { .. } => ("timeout", 504),
        }
    }

    /// Stable, machine-readable name; also a metric label value.
    pub fn code(&self) -> &'static str {
        self.code_and_status().0
    }

    pub fn status(&self) -> StatusCode {
        let (_, status) = self.code_and_status();
        StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    /// OpenAI's error type, from the status.
    fn kind(&self) -> &'static str {
        match self.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            429 | 503 => "overloaded_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// Member or query parameter that the error is about.
    pub fn param(&self) -> Option<&str> {
        match self {
            RouteError::Untranslatable(refusal) => {
                Some(refusal.param.as_str()).filter(|param| !param.is_empty())
            }
            RouteError::InvalidValue { param, .. } | RouteError::MissingField { param, .. } => {
                Some(param)
            }
            RouteError::Oversized(oversized) => oversized.param(),
            RouteError::ModelNotFound { .. } => Some("model"),
            _ => None,
        }
    }

    /// When it may be worth trying again. One second is about a worker's restart or a queue's turn.
    fn retry_after_secs(&self) -> Option<u64> {
        match self {
            RouteError::TooLate { excess_ms, .. } => Some(excess_ms.div_ceil(1000).max(1)),
            _ => matches!(self.status().as_u16(), 429 | 502 | 503).then_some(1),
        }
    }

    /// True if a worker failed: the log has more about it than the client.
    pub fn is_upstream(&self) -> bool {
        matches!(
            self,
            RouteError::Upstream { .. } | RouteError::UpstreamSilent { .. }
        )
    }

    /// Message for the client: what happened and what to do. It names no worker.
    pub fn client_message(&self) -> String {
        match self {
            RouteError::Upstream { role, problem, .. } => format!(
                "a {role} worker {problem}; send the request again, or look for its x-request-id \
                 in the router's log"
            ),
            RouteError::UpstreamSilent {
                role, waited_ms, ..
            } => format!(
                "a {role} worker sent no byte for {waited_ms} ms; send the request again later, or \
                 raise the router's --request-timeout-secs"
            ),
            other => other.to_string(),
        }
    }

    /// The OpenAI error object, exactly as it goes over the wire.
    pub fn body(&self) -> Bytes {
        error_body(
            &self.client_message(),
            self.kind(),
            self.param(),
            self.code(),
        )
    }
}

impl From<BodyError> for RouteError {
    fn from(err: BodyError) -> Self {
        match err {
            BodyError::InvalidJson { detail } => RouteError::InvalidJson { detail },
            BodyError::InvalidValue { param, problem } => {
                RouteError::InvalidValue { param, problem }
            }
        }
    }
}

/// `detail` behind a colon, if there is any.
fn as_suffix(detail: &str) -> String {
    if detail.is_empty() {
        String::new()
    } else {
        format!(": {detail}")
    }
}

/// The nested error object of every answer that is not a worker's own.
pub fn error_body(message: &str, kind: &str, param: Option<&str>, code: &str) -> Bytes {
    let object = serde_json::json!({
        "error": {"message": message, "type": kind, "param": param, "code": code}
    });
    Bytes::from(object.to_string())
}

/// Extension of error responses, read by the metrics of paths that keep no record.
#[derive(Clone, Copy)]
pub struct ErrorCode(pub &'static str);

/// Extension of error responses: the body, for paths whose errors have another form.
#[derive(Clone)]
pub struct ErrorBody(pub Bytes);

impl IntoResponse for RouteError {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = self.body();
        let mut response = (
            status,
            [(header::CONTENT_TYPE, "application/json")],
            body.clone(),
        )
            .into_response();
        response.extensions_mut().insert(ErrorBody(body));
        if let Some(secs) = self.retry_after_secs() {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(secs));
        }
        response.extensions_mut().insert(ErrorCode(self.code()));
        response
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn body_is_the_nested_object_with_a_string_code() {
        let err = RouteError::InvalidValue {
            param: "n",
            problem: "must be at least 1".into(),
        };
        let body: serde_json::Value = serde_json::from_slice(&err.body()).unwrap();
        assert_eq!(body["error"]["code"], "invalid_value");
        assert_eq!(body["error"]["param"], "n");
        assert_eq!(body["error"]["type"], "invalid_request_error");
    }

    #[test]
    fn worker_address_is_in_the_log_and_not_in_the_body() {
        const WORKER: &str = "http://10.1.2.3:30000@1";
        let errors = [
            RouteError::Upstream {
                role: Role::Decode,
                worker: WORKER.into(),
                problem: "could not be reached".into(),
                detail: "certificate not valid for name \"10.1.2.3\"".into(),
            },
            RouteError::UpstreamSilent {
                role: Role::Decode,
                worker: WORKER.into(),
                waited_ms: 1000,
            },
        ];
        for err in errors {
            assert!(err.is_upstream());
            assert!(err.to_string().contains(WORKER), "{err}");
            let body = String::from_utf8(err.body().to_vec()).unwrap();
            assert!(!body.contains("10.1.2.3"), "{body}");
            assert!(body.contains("a decode worker "), "{body}");
            assert!(body.contains("; send the request again"), "{body}");
        }
    }

    #[test]
    fn refusals_of_the_text_layer_keep_their_code_and_message() {
        let param = "prompt";
        let oversized = [
            OversizedBody::Prompt {
                param,
                size: "has 9".into(),
                limit_tokens: 8,
            },
            OversizedBody::Rest {
                bytes: 9,
                limit_bytes: 8,
            },
        ];
        for refusal in oversized {
            let err = RouteError::from(refusal.clone());
            assert_eq!(err.code(), refusal.code());
            assert_eq!(err.to_string(), refusal.to_string());
        }
        let invalid = [
            BodyError::InvalidJson {
                detail: "of it".into(),
            },
            BodyError::InvalidValue {
                param,
                problem: "is odd".into(),
            },
        ];
        for refusal in invalid {
            assert_eq!(
                RouteError::from(refusal.clone()).to_string(),
                refusal.to_string()
            );
        }
    }

    #[test]
    fn overload_answers_carry_retry_after() {
        let late = |excess_ms| RouteError::TooLate {
            role: Role::Prefill,
            predicted_ms: 9000,
            limit_ms: 2000,
            excess_ms,
        };
        for (err, secs) in [
            (RouteError::Draining, "1"),
            (late(1), "1"),
            (late(6001), "7"),
        ] {
            let response = err.into_response();
            assert_eq!(response.status(), 503);
            assert_eq!(response.headers()[header::RETRY_AFTER], secs);
        }
    }
}
