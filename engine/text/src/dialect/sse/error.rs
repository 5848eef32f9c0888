//! Errors in streams and in answers: in the forms that Baton writes, and in those of other servers.

use std::borrow::Cow;

use bytes::Bytes;
use memchr::memmem;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::event::{comments_len, event_data, event_len, event_name, events};

/// Begins of the data of an error: that of OpenAI's older APIs, Anthropic's, and that of a
/// response.
const ERROR_BEGINS: [&[u8]; 3] = [
    b"{\"error\"",
    b"{\"type\":\"error\"",
    b"{\"type\":\"response.failed\"",
];

/// Member of errors, and value of `object` or `type` in others.
const ERROR: &[u8] = b"\"error\"";
/// Type of the last event of a response that failed.
const FAILED_RESPONSE: &str = "response.failed";
/// Member of the errors of web frameworks.
const DETAIL: &[u8] = b"\"detail\"";

/// True if the data of an event is an error as Baton writes it. Costs one look at its beginning.
#[inline]
pub fn is_error(data: &[u8]) -> bool {
    ERROR_BEGINS.iter().any(|begin| data.starts_with(begin))
}

/// An event without the line of its name.
fn without_name(event: &[u8]) -> &[u8] {
    if !event.starts_with(b"event:") {
        return event;
    }
    memchr::memchr(b'\n', event).map_or(event, |end| &event[end + 1..])
}

/// The JSON of an error event as Baton writes it, if `piece` begins with one.
#[inline]
pub fn error_event(piece: &[u8]) -> Option<&[u8]> {
    let data = without_name(piece)
        .strip_prefix(b"data:")?
        .trim_ascii_start();
    if !is_error(data) {
        return None;
    }
    data.split(|b| *b == b'\n').next()
}

/// Members of an answer that decide whether it is an error.
#[derive(Deserialize)]
struct AnswerMembers {
    #[serde(default)]
    error: Value,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    r#type: Value,
    #[serde(default)]
    detail: Value,
    id: Option<IgnoredAny>,
    choices: Option<IgnoredAny>,
}

/// True for a value that means something. openai-python raises an error upon a member `error` that
/// is true in Python's sense.
pub fn is_given(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::Bool(true) => true,
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(members) => !members.is_empty(),
    }
}

/// True if the data of an event, or an answer that is no stream, is an error in a form that servers
/// write: a member `error` that says something, beside others too (OpenAI, gateways); `"object":
/// "error"` (SGLang, older vLLM); `"type": "error"` (Anthropic); `detail` alone (web frameworks). A
/// response whose `error` is set is an answer of that API. Costs a scan of `json`, and nothing more
/// where no such word is in it.
pub fn is_foreign_error(json: &[u8]) -> bool {
    if is_error(json) {
        return true;
    }
    let is_candidate = memmem::find_iter(json, ERROR).any(|at| !is_null_member(&json[at..]))
        || memmem::find(json, DETAIL).is_some();
    if !is_candidate {
        return false;
    }
    let Ok(members) = serde_json::from_slice::<AnswerMembers>(json) else {
        return false;
    };
    let is_detail = is_given(&members.detail) && members.id.is_none() && members.choices.is_none();
    let is_response = members.object == "response";
    is_given(&members.error) && !is_response
        || members.object == "error"
        || members.r#type == "error"
        || members.r#type == FAILED_RESPONSE
        || is_detail
}

/// True if the name at the begin of `text` has the value null.
fn is_null_member(text: &[u8]) -> bool {
    let value = text[ERROR.len()..].trim_ascii_start();
    let value = value.strip_prefix(b":").map(<[u8]>::trim_ascii_start);
    value.is_some_and(|value| value.starts_with(b"null"))
}

/// Data of an event that is an error in any form: by its name, or by its data.
pub fn stated_error(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let data = event_data(event)?;
    let is_named = event_name(event) == Some(b"error");
    (is_named || is_foreign_error(&data)).then_some(data)
}

/// The run from its first error event on.
#[inline]
pub fn from_error(run: &Bytes) -> Option<Bytes> {
    let mut at = 0;
    loop {
        at += comments_len(&run[at..]);
        let len = event_len(&run[at..])?;
        if stated_error(&run[at..at + len]).is_some() {
            return Some(run.slice(at..));
        }
        at += len;
    }
}

/// Status that an error names, in the members that servers have for it.
pub fn stated_status(json: &[u8]) -> Option<u16> {
    let json: Value = serde_json::from_slice(json).ok()?;
    let places = [&json["error"], &json];
    let names = ["code", "status_code", "status", "http_status"];
    let values = places
        .iter()
        .flat_map(|place| names.iter().map(move |name| &place[*name]));
    let is_error_status = |status: &u16| (400..600).contains(status);
    values
        .filter_map(|value| u16::try_from(value.as_u64()?).ok())
        .find(is_error_status)
}

/// Errors by the names of their members. Those of other servers have values of any type.
#[derive(Deserialize)]
struct ErrorEnvelope {
    error: Option<ErrorMembers>,
    response: Option<FailedResponse>,
}

#[derive(Deserialize)]
struct FailedResponse {
    error: ErrorMembers,
}

#[derive(Deserialize)]
struct ErrorMembers {
    #[serde(default)]
    code: Value,
    #[serde(default)]
    r#type: Value,
    #[serde(default)]
    message: Value,
}

/// Our code of an error, if the body is one and the code is text: `error.code`, or the type of the
/// error of a response, whose code is one of OpenAI's.
pub fn error_code(body: &[u8]) -> Option<String> {
    let envelope: ErrorEnvelope = serde_json::from_slice(body).ok()?;
    let code = match envelope.response {
        Some(response) => response.error.r#type,
        None => envelope.error?.code,
    };
    code.as_str().map(str::to_owned)
}

/// Message of an error, if the body is one and the message is text.
pub fn error_message(body: &[u8]) -> Option<String> {
    let envelope: ErrorEnvelope = serde_json::from_slice(body).ok()?;
    let response = envelope.response.map(|response| response.error);
    let message = response.or(envelope.error)?.message;
    message.as_str().map(str::to_owned)
}

/// True if one of the events of `run` is an error in any form. Costs three scans where no word of
/// an error is in it.
pub fn has_error(run: &[u8]) -> bool {
    let words = [&b"error"[..], FAILED_RESPONSE.as_bytes(), DETAIL];
    let may_have = words.iter().any(|word| memmem::find(run, word).is_some());
    may_have && events(run).any(|event| stated_error(event).is_some())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dialect::sse::EventSplitter;

    #[test]
    fn error_events_are_recognized_at_the_front() {
        let event = b"data: {\"error\":{\"code\":\"draining\"}}\n\ndata: [DONE]\n\n";
        assert_eq!(
            error_code(error_event(event).unwrap()).as_deref(),
            Some("draining")
        );
        assert!(error_event(b"event: error\ndata: {\"error\": {}}\n\n").is_some());
        let message: &[u8] = b"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"code\":\"draining\",\"message\":\"m\"}}\n\n";
        let response: &[u8] = b"event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\",\"type\":\"draining\",\"message\":\"m\"}}}\n\n";
        for event in [message, response] {
            let json = error_event(event).unwrap();
            assert_eq!(error_code(json).as_deref(), Some("draining"));
            assert_eq!(error_message(json).as_deref(), Some("m"));
            assert_eq!(stated_error(event).as_deref(), Some(json));
        }
        assert!(error_event(b"event: ping\ndata: {\"type\":\"ping\"}\n\n").is_none());
        assert!(error_event(b"data: {\"choices\":[\"error\"]}\n\n").is_none());
        assert!(error_event(b": keep-alive\n\n").is_none());
    }

    /// Forms that servers of other makes were seen to write.
    #[test]
    fn errors_of_other_servers_are_errors() {
        for error in [
            r#"{"object":"error","message":"m","type":"InternalServerError","param":null,"code":500}"#,
            r#"{ "error" : {"message":"m"}}"#,
            r#"{"error":"m"}"#,
            r#"{"id":"c1","choices":[],"error":{"message":"m","code":502}}"#,
            r#"{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"error"}],"error":{"code":"m"}}"#,
            r#"{"detail":"Internal Server Error"}"#,
            r#"{"detail":[{"loc":["body"],"msg":"m","type":"missing"}]}"#,
            r#"{"message":"m","type":"error"}"#,
            r#"{"sequence_number":4,"type":"response.failed","response":{"error":{"message":"m"}}}"#,
        ] {
            assert!(is_foreign_error(error.as_bytes()), "{error}");
            let event = format!("id: 1\r\ndata: {error}\r\n\r\n");
            assert_eq!(stated_error(event.as_bytes()).unwrap(), error.as_bytes());
        }
        assert!(stated_error(b"event: error\ndata: out of memory\n\n").is_some());
    }

    #[test]
    fn answers_that_name_errors_are_none() {
        for answer in [
            r#"{"choices":[],"error":null}"#,
            r#"{"choices":[],"error":{}}"#,
            r#"{"choices":[{"message":{"content":"{\"error\":\"m\"}"}}],"error":""}"#,
            r#"{"object":"response","status":"failed","error":{"message":"m"}}"#,
            r#"{"object":"response","status":"completed","error":null,"output":[]}"#,
            r#"{"id":"c","choices":[],"detail":"m"}"#,
            r#"{"type":"response.created","response":{"error":null}}"#,
            r#"["error"]"#,
            "[DONE]",
            "error",
        ] {
            assert!(!is_foreign_error(answer.as_bytes()), "{answer}");
        }
        assert!(stated_error(b"event: error\n\n").is_none());
    }

    #[test]
    fn status_in_an_error_is_read_where_servers_write_it() {
        for (error, status) in [
            (r#"{"error":{"code":400,"message":"m"}}"#, Some(400)),
            (r#"{"object":"error","code":503}"#, Some(503)),
            (r#"{"status_code":429}"#, Some(429)),
            (r#"{"error":{"code":"draining"}}"#, None),
            (r#"{"error":{"code":7}}"#, None),
            (r#"{"error":"m"}"#, None),
            ("oops", None),
        ] {
            assert_eq!(stated_status(error.as_bytes()), status, "{error}");
        }
    }

    #[test]
    fn error_behind_other_events_is_found_however_the_stream_is_cut() {
        let error = "data: {\"error\":{\"code\":\"draining\"}}\n\ndata: [DONE]\n\n";
        let behind = [
            "",
            "data: {\"text\":\"data: {\\\"error\\\"\"}\n\n",
            ": keep-alive\n\ndata: {\"a\":1}\r\n\r\n: x\n\n",
            ": in front of it\n",
        ];
        for before in behind {
            for error in [error.to_owned(), format!("event: error\n{error}")] {
                let text = Bytes::from(format!("{before}{error}"));
                for cut in 0..text.len() {
                    let mut events = EventSplitter::default();
                    let runs =
                        [text.slice(..cut), text.slice(cut..)].map(|piece| events.push(piece));
                    let found = runs.iter().flatten().find_map(from_error).unwrap();
                    assert!(text[before.len()..].starts_with(&found), "{cut}");
                    assert_eq!(
                        error_event(&found).and_then(error_code).as_deref(),
                        Some("draining")
                    );
                }
            }
            assert_eq!(
                from_error(&Bytes::from(format!("{before}data: [DONE]\n\n"))),
                None
            );
        }
    }
}
