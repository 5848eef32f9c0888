//! Errors of an answer in the forms of the APIs.

use serde::Deserialize;

use super::json::push_text;
use super::{AnswerHead, new_writer};
use crate::dialect::Dialect;
use crate::dialect::sse::DONE_EVENT;

/// Error as all APIs of this server report it (docs/protocol.md §5).
#[derive(Debug, Clone, Deserialize)]
pub struct ErrorObject {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub code: String,
}

impl ErrorObject {
    /// Reads `{"error":{…}}`. A body of another form, which other servers send, is the message of an
    /// error of the server.
    pub fn read(body: &[u8]) -> Self {
        #[derive(Deserialize)]
        struct Envelope {
            error: ErrorObject,
        }
        match serde_json::from_slice(body) {
            Ok(Envelope { error }) => error,
            Err(_) => Self {
                message: String::from_utf8_lossy(body).into_owned(),
                kind: "server_error".to_owned(),
                code: "internal_error".to_owned(),
            },
        }
    }

    /// Type of the error in Anthropic's API.
    fn anthropic_type(&self) -> &'static str {
        match self.code.as_str() {
            "invalid_api_key" => "authentication_error",
            "forbidden" => "permission_error",
            "model_not_found" | "not_found" => "not_found_error",
            "payload_too_large" => "request_too_large",
            "rate_limit_exceeded" | "tenant_queue_full" => "rate_limit_error",
            "timeout" | "deadline" | "kv_transfer_timeout" => "timeout_error",
            "engine_dead" => "overloaded_error",
            _ => match self.kind.as_str() {
                "invalid_request_error" => "invalid_request_error",
                "overloaded_error" => "overloaded_error",
                _ => "api_error",
            },
        }
    }

    /// Code of a response that failed, of those that OpenAI's clients know.
    fn response_code(&self) -> &'static str {
        match self.code.as_str() {
            "rate_limit_exceeded" | "tenant_queue_full" => "rate_limit_exceeded",
            "context_length_exceeded" => "context_length_exceeded",
            _ => "server_error",
        }
    }

    /// Appends the `error` of a response: our own code is its type.
    pub fn push_response_error(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"code\":");
        push_text(out, self.response_code());
        out.extend_from_slice(b",\"message\":");
        push_text(out, &self.message);
        out.extend_from_slice(b",\"type\":");
        push_text(out, &self.code);
        out.push(b'}');
    }

    /// Appends Anthropic's error object, with our own code as another member.
    pub fn push_anthropic_error(&self, request_id: Option<&str>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"type\":\"error\",\"error\":{\"type\":");
        push_text(out, self.anthropic_type());
        out.extend_from_slice(b",\"message\":");
        push_text(out, &self.message);
        out.extend_from_slice(b",\"code\":");
        push_text(out, &self.code);
        out.extend_from_slice(b"},\"request_id\":");
        match request_id {
            Some(id) => push_text(out, id),
            None => out.extend_from_slice(b"null"),
        }
        out.push(b'}');
    }
}

/// Body of an error response to a request of Anthropic's API. `error`: the error's JSON.
pub fn anthropic_error_body(error: &[u8], request_id: &str) -> Vec<u8> {
    let mut out = Vec::new();
    ErrorObject::read(error).push_anthropic_error(Some(request_id), &mut out);
    out
}

/// Facts of a stream that another process than its writer ends with an error.
#[derive(Debug, Clone)]
pub struct InterruptedStream<'a> {
    pub dialect: Dialect,
    /// Id of the response, with the API's prefix.
    pub response_id: &'a str,
    pub model: &'a str,
    /// Unix seconds.
    pub created: u64,
    /// Events that the client has, where they are numbered.
    pub events: u64,
}

impl InterruptedStream<'_> {
    /// The end of the stream: an error event and `[DONE]`. `error`: its JSON, in one line.
    pub fn end_with(&self, error: &[u8]) -> Vec<u8> {
        let head = AnswerHead {
            id: self.response_id.to_owned(),
            model: self.model.to_owned(),
            created: self.created,
            logprobs: -1,
            ..AnswerHead::default()
        };
        let mut writer = new_writer(self.dialect, head, 1);
        writer.set_event_count(self.events);
        let mut out = Vec::new();
        writer.write_failure(error, &mut out);
        out
    }
}

/// Appends the event of an error and the end of the stream. `event`: its name.
pub fn push_named_end(event: &str, data: &[u8], out: &mut Vec<u8>) {
    push_named_event(event, data, out);
    out.extend_from_slice(DONE_EVENT);
}

/// Appends an event with a name.
pub fn push_named_event(event: &str, data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(event.as_bytes());
    out.extend_from_slice(b"\ndata: ");
    out.extend_from_slice(data);
    out.extend_from_slice(b"\n\n");
}
