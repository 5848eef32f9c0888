//! `/get_server_info` of a worker, for clients: its full answer shows paths of files, processes,
//! flags and hosts, which are the operator's.

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use http::header;
use serde_json::{Map, Value};

use super::auth::{INFO_PATHS, OperatorRequest, has_control_keys};
use super::proxy;
use crate::error::RouteError;
use crate::server::http_util::{HandlerResult, SharedApp};

/// Longest answer that is read to be shortened [bytes].
const MAX_INFO: usize = 4 << 20;
/// Members that clients are shown: the model, its limits, and what tells one worker from another.
const CLIENT_MEMBERS: [&str; 24] = [
    "baton_features",
    "chat_template_caps",
    "context_length",
    "disaggregation_mode",
    "dp_size",
    "dtype",
    "engine",
    "fingerprint",
    "incarnation",
    "load_progress",
    "max_prompt_chars",
    "max_running_requests",
    "max_total_num_tokens",
    "page_size",
    "priority_order",
    "reasoning_parser",
    "served_model_name",
    "served_model_names",
    "state",
    "status",
    "tokenizer_fingerprint",
    "tool_parser",
    "tp_size",
    "version",
];

/// With keys of the control plane, the full answer is for these alone.
pub async fn server_info(app: SharedApp, request: Request) -> HandlerResult {
    let State(state) = &app;
    let is_operator = request.extensions().get::<OperatorRequest>().is_some();
    let shows_all = is_operator || !has_control_keys(state);
    let response = proxy::forward(app, request).await?;
    if shows_all || !response.status().is_success() {
        return Ok(response);
    }
    let (mut head, body) = response.into_parts();
    let body = to_bytes(body, MAX_INFO).await.unwrap_or_default();
    let Some(shown) = client_members(&body) else {
        return Err(RouteError::NotFound {
            path: INFO_PATHS[0].to_owned(),
        });
    };
    head.headers.remove(header::CONTENT_LENGTH);
    Ok(Response::from_parts(head, shown.into()))
}

/// `None`: the answer is no JSON object.
fn client_members(body: &Bytes) -> Option<String> {
    let all: Map<String, Value> = serde_json::from_slice(body).ok()?;
    let is_shown = |(name, _): &(String, Value)| CLIENT_MEMBERS.contains(&name.as_str());
    let shown: Map<String, Value> = all.into_iter().filter(is_shown).collect();
    Some(Value::Object(shown).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_see_no_paths_processes_or_flags() {
        let body = r#"{"model_path": "/home/x", "pids": [1], "context_length": 9, "host": "h"}"#;
        let shown = client_members(&Bytes::from_static(body.as_bytes()));
        assert_eq!(shown.as_deref(), Some(r#"{"context_length":9}"#));
        assert_eq!(client_members(&Bytes::from_static(b"ok")), None);
    }
}
