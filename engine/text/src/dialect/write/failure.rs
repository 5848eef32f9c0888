//! Errors of an answer in the forms of the APIs.

use serde::Deserialize;
use serde_json::Value;

use super::json::push_text;
use super::{AnswerIds, AnswerSpec, new_writer};
use crate::dialect::Dialect;
use crate::dialect::sse::{DONE_EVENT, stated_status};

/// Member of an error upon which anthropic-python sends the whole conversation instead.
const THREAD_DETAILS: &[u8] =
    br#","details":{"error_code":"thread_unsupported_request","unsupported":["thread"]}"#;

/// Error as all APIs of this server report it (docs/protocol.md §5).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ErrorObject {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub code: String,
    /// Member of the request that is at fault.
    #[serde(default)]
    pub param: Option<String>,
}

/// Words by which servers of all makes say that a prompt does not fit.
const TOO_LONG: &str = "maximum context length";
/// Words by which Claude Code (2.1) knows that it has to compact the conversation.
const ANTHROPIC_TOO_LONG: &str = "prompt is too long";

impl ErrorObject {
    /// Error in the answer of a server of another make: its message, with the code and the type
    /// that belong to the status.
    pub fn of_foreign_answer(status: u16, body: &[u8]) -> Self {
        let message = foreign_message(body);
        let (kind, code) = match status {
            401 => ("authentication_error", "invalid_api_key"),
            403 => ("permission_error", "forbidden"),
            404 => ("invalid_request_error", "not_found"),
            413 => ("invalid_request_error", "payload_too_large"),
            429 => ("overloaded_error", "rate_limit_exceeded"),
            503 => ("overloaded_error", "upstream_error"),
            504 => ("server_error", "timeout"),
            400..=499 if message.contains(TOO_LONG) => {
                ("invalid_request_error", "context_length_exceeded")
            }
            400..=499 => ("invalid_request_error", "invalid_value"),
            _ => ("server_error", "upstream_error"),
        };
        Self {
            message,
            kind: kind.to_owned(),
            code: code.to_owned(),
            param: None,
        }
    }

    /// Error in an answer whose status is a success: its own code, if it has one, else that of the
    /// status that it names.
    pub fn of_answer(data: &[u8]) -> Self {
        match Self::read_own(data) {
            Some(error) => error,
            None => Self::of_foreign_answer(stated_status(data).unwrap_or(502), data),
        }
    }

    /// `{"error":{…}}`.
    pub fn to_json(&self) -> Vec<u8> {
        let object = serde_json::json!({
            "error": {"message": self.message, "type": self.kind, "param": null, "code": self.code}
        });
        object.to_string().into_bytes()
    }

    /// Body of an error response of `dialect`.
    pub fn to_body(&self, dialect: Dialect, request_id: &str) -> Vec<u8> {
        if !dialect.fields().has_anthropic_errors {
            return self.to_json();
        }
        let mut error = self.clone();
        if error.code == "context_length_exceeded" && !error.message.contains(ANTHROPIC_TOO_LONG) {
            error.message.insert_str(0, ": ");
            error.message.insert_str(0, ANTHROPIC_TOO_LONG);
        }
        let mut out = Vec::new();
        error.push_anthropic_error(Some(request_id), &mut out);
        out
    }

    /// Reads `{"error":{…}}`. A body of another form, which other servers send, is an error of the
    /// server.
    pub fn read(body: &[u8]) -> Self {
        Self::read_own(body).unwrap_or_else(|| Self {
            message: foreign_message(body),
            kind: "server_error".to_owned(),
            code: "internal_error".to_owned(),
            param: None,
        })
    }

    fn read_own(body: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Envelope {
            error: ErrorObject,
        }
        let envelope: Envelope = serde_json::from_slice(body).ok()?;
        Some(envelope.error)
    }

    /// True for the member by which Anthropic's server keeps a conversation.
    fn refuses_thread(&self) -> bool {
        self.code == "unsupported_parameter" && self.param.as_deref() == Some("thread")
    }

    /// Type of the error in Anthropic's API.
    fn anthropic_type(&self) -> &'static str {
        match self.code.as_str() {
            "invalid_api_key" => "authentication_error",
            "forbidden" | "foreign_origin" | "host_not_allowed" => "permission_error",
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
        if self.refuses_thread() {
            out.extend_from_slice(THREAD_DETAILS);
        }
        out.extend_from_slice(b"},\"request_id\":");
        match request_id {
            Some(id) => push_text(out, id),
            None => out.extend_from_slice(b"null"),
        }
        out.push(b'}');
    }
}

/// Members that hold the message of an error, or the error itself: of OpenAI and vLLM
/// (`error.message`), of a failed response, of SGLang (`message`), of web frameworks (`detail`,
/// `msg` in a list).
const MESSAGE_PLACES: [&str; 6] = ["response", "error", "errors", "message", "detail", "msg"];
/// Errors are not nested deeper than this where one is looked for.
const MESSAGE_DEPTH: usize = 4;

/// Message in an error of any make; the body as it is, where there is none.
fn foreign_message(body: &[u8]) -> String {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    match message_in(&json, MESSAGE_DEPTH) {
        Some(message) => message.to_owned(),
        None => String::from_utf8_lossy(body).into_owned(),
    }
}

fn message_in(json: &Value, depth: usize) -> Option<&str> {
    match json {
        Value::String(text) => Some(text.as_str()).filter(|text| !text.is_empty()),
        Value::Array(items) if depth > 0 => message_in(items.first()?, depth - 1),
        Value::Object(members) if depth > 0 => {
            let places = MESSAGE_PLACES.iter().filter_map(|name| members.get(*name));
            places
                .into_iter()
                .find_map(|place| message_in(place, depth - 1))
        }
        _ => None,
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
        let spec = AnswerSpec {
            dialect: self.dialect,
            model: self.model.to_owned(),
            created: self.created,
            ..AnswerSpec::default()
        };
        let ids = AnswerIds {
            response: self.response_id.to_owned(),
            ..AnswerIds::default()
        };
        let mut writer = new_writer(spec.into(), ids);
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn refusal_of_a_thread_says_that_the_conversation_can_be_sent_without_one() {
        for (param, details) in [
            ("thread", json!("thread_unsupported_request")),
            ("mcp_servers", Value::Null),
        ] {
            let error = json!({"error": {
                "message": "no", "type": "invalid_request_error",
                "code": "unsupported_parameter", "param": param,
            }});
            let body = anthropic_error_body(error.to_string().as_bytes(), "msg_1");
            let body: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error"]["details"]["error_code"], details);
        }
    }

    #[test]
    fn errors_in_answers_keep_their_message() {
        for (body, message, code) in [
            (
                r#"{"error":{"message":"m","type":"overloaded_error","code":"draining"}}"#,
                "m",
                "draining",
            ),
            (
                r#"{"object":"error","message":"m","type":"BadRequest","code":400}"#,
                "m",
                "invalid_value",
            ),
            (
                r#"{"choices":[],"error":{"code":429,"message":"m"}}"#,
                "m",
                "rate_limit_exceeded",
            ),
            (
                r#"{"detail":[{"loc":["body"],"msg":"m","type":"missing"}]}"#,
                "m",
                "upstream_error",
            ),
            (
                r#"{"error":{"error":{"message":"m"}}}"#,
                "m",
                "upstream_error",
            ),
            (
                r#"{"type":"response.failed","response":{"error":{"code":"x","message":"m"}}}"#,
                "m",
                "upstream_error",
            ),
            (
                r#"{"error":{"code":7}}"#,
                r#"{"error":{"code":7}}"#,
                "upstream_error",
            ),
            ("out of memory", "out of memory", "upstream_error"),
        ] {
            let error = ErrorObject::of_answer(body.as_bytes());
            assert_eq!(
                (error.message.as_str(), error.code.as_str()),
                (message, code)
            );
        }
    }

    #[test]
    fn errors_of_other_servers_keep_their_message_and_have_our_codes() {
        let long = "This model's maximum context length is 8 tokens";
        for (status, body, message, code, kind) in [
            (
                400,
                r#"{"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}"#,
                "m",
                "invalid_value",
                "invalid_request_error",
            ),
            (
                429,
                r#"{"object":"error","message":"m","code":429}"#,
                "m",
                "rate_limit_exceeded",
                "rate_limit_error",
            ),
            (
                404,
                r#"{"detail":"Not Found"}"#,
                "Not Found",
                "not_found",
                "not_found_error",
            ),
            (502, "<html>", "<html>", "upstream_error", "api_error"),
            (
                503,
                r#"{"error":"the worker died"}"#,
                "the worker died",
                "upstream_error",
                "overloaded_error",
            ),
            (
                400,
                r#"{"message":"This model's maximum context length is 8 tokens"}"#,
                long,
                "context_length_exceeded",
                "invalid_request_error",
            ),
        ] {
            let error = ErrorObject::of_foreign_answer(status, body.as_bytes());
            assert_eq!(
                (error.message.as_str(), error.code.as_str()),
                (message, code)
            );
            let openai = error.to_body(Dialect::Responses, "r");
            assert_eq!(ErrorObject::read(&openai), error);
            let anthropic = error.to_body(Dialect::Messages, "r");
            let anthropic: Value = serde_json::from_slice(&anthropic).unwrap();
            assert_eq!(anthropic["error"]["type"], kind);
            assert_eq!(anthropic["request_id"], "r");
        }
        let error = ErrorObject::of_foreign_answer(400, long.as_bytes());
        let body = String::from_utf8(error.to_body(Dialect::Messages, "r")).unwrap();
        assert!(body.contains("prompt is too long: This"), "{body}");
    }
}
