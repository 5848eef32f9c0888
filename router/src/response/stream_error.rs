//! Errors that the router writes into streams, in the form of the request's API.

use baton_text::dialect::body::BodyIndex;
use baton_text::dialect::sse::{
    DONE_EVENT, error_epilogue, error_event, is_error, single_event_stream,
};
use baton_text::dialect::write::{ErrorObject, InterruptedStream};
use baton_text::dialect::{Dialect, response_id};
use bytes::Bytes;
use http::StatusCode;

use crate::clock::unix_time;

/// Form of the errors in a stream.
#[derive(Debug, Clone)]
pub enum StreamErrorForm {
    /// An event with the error object.
    ErrorObject,
    /// Events with names, whose data belongs to a response.
    NamedEvents {
        dialect: Dialect,
        response_id: String,
        model: String,
    },
}

impl StreamErrorForm {
    /// `request_id`: that of the HTTP request.
    pub fn of_request(scan: &BodyIndex, request_id: &str) -> Self {
        let dialect = scan.dialect;
        if !dialect.fields().has_named_events {
            return Self::ErrorObject;
        }
        Self::NamedEvents {
            dialect,
            response_id: response_id(dialect, None, request_id),
            model: scan.model.clone().unwrap_or_default(),
        }
    }

    /// End of a stream that broke, wherever it broke. `error`: its JSON, in one line. `events`:
    /// those that the client has, where they are numbered.
    pub fn stream_end(&self, error: &[u8], events: u64) -> Bytes {
        match self {
            Self::ErrorObject => error_epilogue(error),
            Self::NamedEvents { .. } => {
                let end = self.named_end(error, events);
                Bytes::from([b"\n", &end[..]].concat())
            }
        }
    }

    /// The stream of an answer that is a body. `status`: that of the answer; an error's body has
    /// any form.
    pub fn stream_of_body(&self, status: StatusCode, body: &[u8]) -> Bytes {
        let is_own = is_error(body);
        if !is_own && !status.is_client_error() && !status.is_server_error() {
            return single_event_stream(body);
        }
        let foreign;
        let error = if is_own {
            body
        } else {
            foreign = ErrorObject::of_foreign_answer(status.as_u16(), body).to_json();
            &foreign
        };
        if matches!(self, Self::ErrorObject) {
            return single_event_stream(error);
        }
        let event = [b"event: error\ndata: ", error, b"\n\n"].concat();
        let is_named = error.starts_with(b"{\"type\"");
        if is_named && error_event(&event).is_some() {
            return Bytes::from([&event, DONE_EVENT].concat());
        }
        Bytes::from(self.named_end(error, 0))
    }

    fn named_end(&self, error: &[u8], events: u64) -> Vec<u8> {
        let Self::NamedEvents {
            dialect,
            response_id,
            model,
        } = self
        else {
            return Vec::new();
        };
        let stream = InterruptedStream {
            dialect: *dialect,
            response_id,
            model,
            created: unix_time().as_secs(),
            events,
        };
        stream.end_with(error)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ERROR: &[u8] =
        br#"{"error":{"message":"m","type":"overloaded_error","param":null,"code":"no_worker"}}"#;

    const REFUSED: StatusCode = StatusCode::SERVICE_UNAVAILABLE;

    fn form_of(dialect: Dialect) -> StreamErrorForm {
        let scan = BodyIndex::of(br#"{"model":"m","stream":true}"#, dialect).unwrap();
        StreamErrorForm::of_request(&scan, "7")
    }

    fn text_of(bytes: Bytes) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[test]
    fn errors_have_the_form_of_the_api() {
        let chat = form_of(Dialect::Chat);
        assert_eq!(chat.stream_end(ERROR, 4), error_epilogue(ERROR));
        assert_eq!(
            chat.stream_of_body(REFUSED, ERROR),
            single_event_stream(ERROR)
        );
        let responses = form_of(Dialect::Responses);
        let end = text_of(responses.stream_end(ERROR, 4));
        assert!(end.starts_with("\nevent: response.failed\n"), "{end}");
        assert!(end.contains("\"sequence_number\":4,"), "{end}");
        assert!(end.contains("\"id\":\"resp_7\""), "{end}");
        let whole = text_of(responses.stream_of_body(REFUSED, ERROR));
        assert!(whole.starts_with("event: response.created\n"), "{whole}");
        let messages = form_of(Dialect::Messages);
        for end in [
            messages.stream_end(ERROR, 0),
            messages.stream_of_body(REFUSED, ERROR),
        ] {
            let end = text_of(end);
            assert!(
                end.contains("event: error\ndata: {\"type\":\"error\""),
                "{end}"
            );
            assert!(end.contains("overloaded_error"), "{end}");
            assert!(end.ends_with("data: [DONE]\n\n"), "{end}");
        }
    }

    #[test]
    fn error_of_another_server_is_an_error_event() {
        for body in [
            &br#"{"object":"error","message":"m","code":400}"#[..],
            br#"{"detail":"m"}"#,
            b"m",
        ] {
            let status = StatusCode::BAD_REQUEST;
            let chat = text_of(form_of(Dialect::Chat).stream_of_body(status, body));
            let error = r#"data: {"error":{"message":"m","type":"invalid_request_error""#;
            assert!(chat.starts_with(error), "{chat}");
            let named = text_of(form_of(Dialect::Messages).stream_of_body(status, body));
            assert!(named.starts_with("event: error\n"), "{named}");
            assert!(named.contains("\"message\":\"m\""), "{named}");
        }
    }

    #[test]
    fn body_in_the_form_of_the_api_is_one_event() {
        let own = br#"{"type":"error","error":{"type":"api_error","message":"m"}}"#;
        let stream = text_of(form_of(Dialect::Messages).stream_of_body(REFUSED, own));
        let own = std::str::from_utf8(own).unwrap();
        assert_eq!(
            stream,
            format!("event: error\ndata: {own}\n\ndata: [DONE]\n\n")
        );
        let whole = form_of(Dialect::Responses).stream_of_body(StatusCode::OK, b"{\"id\":1}");
        assert_eq!(text_of(whole), "data: {\"id\":1}\n\ndata: [DONE]\n\n");
    }
}
