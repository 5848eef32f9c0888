//! Errors that the router writes into streams, in the form of the request's API.

use baton_text::dialect::body::BodyIndex;
use baton_text::dialect::sse::{
    DONE_EVENT, error_epilogue, error_event, is_error, single_event_stream,
};
use baton_text::dialect::write::InterruptedStream;
use baton_text::dialect::{Dialect, response_id};
use bytes::Bytes;

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

    /// End of a stream that broke, wherever it broke. `error`: its JSON, in one line. `events`: those
    /// that the client has, where they are numbered.
    pub fn stream_end(&self, error: &[u8], events: u64) -> Bytes {
        match self {
            Self::ErrorObject => error_epilogue(error),
            Self::NamedEvents { .. } => {
                let end = self.named_end(error, events);
                Bytes::from([b"\n", &end[..]].concat())
            }
        }
    }

    /// The stream of an answer that is a JSON body, most likely an error.
    pub fn stream_of_body(&self, json: &[u8]) -> Bytes {
        if matches!(self, Self::ErrorObject) || !is_error(json) {
            return single_event_stream(json);
        }
        let event = [b"event: error\ndata: ", json, b"\n\n"].concat();
        let is_named = json.starts_with(b"{\"type\"");
        if is_named && error_event(&event).is_some() {
            return Bytes::from([&event, DONE_EVENT].concat());
        }
        Bytes::from(self.named_end(json, 0))
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
        assert_eq!(chat.stream_of_body(ERROR), single_event_stream(ERROR));
        let responses = form_of(Dialect::Responses);
        let end = text_of(responses.stream_end(ERROR, 4));
        assert!(end.starts_with("\nevent: response.failed\n"), "{end}");
        assert!(end.contains("\"sequence_number\":4,"), "{end}");
        assert!(end.contains("\"id\":\"resp_7\""), "{end}");
        let whole = text_of(responses.stream_of_body(ERROR));
        assert!(whole.starts_with("event: response.created\n"), "{whole}");
        let messages = form_of(Dialect::Messages);
        for end in [
            messages.stream_end(ERROR, 0),
            messages.stream_of_body(ERROR),
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
    fn body_in_the_form_of_the_api_is_one_event() {
        let own = br#"{"type":"error","error":{"type":"api_error","message":"m"}}"#;
        let stream = text_of(form_of(Dialect::Messages).stream_of_body(own));
        let own = std::str::from_utf8(own).unwrap();
        assert_eq!(
            stream,
            format!("event: error\ndata: {own}\n\ndata: [DONE]\n\n")
        );
        let whole = form_of(Dialect::Responses).stream_of_body(b"{\"id\":1}");
        assert_eq!(text_of(whole), "data: {\"id\":1}\n\ndata: [DONE]\n\n");
    }
}
