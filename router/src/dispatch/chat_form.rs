//! Requests of /v1/responses and /v1/messages as chat requests, for workers of other makes that
//! lack these paths.
//!
//! 1. An attempt has chosen its workers, which decide between the client's own request and a chat
//!    request, which is made once (`context`);
//! 2. the body and the head of each leg are those of that form;
//! 3. the answer of the leg that the client sees is translated back
//!    (`attempt::answer_translation`).

use std::sync::Arc;

use baton_text::dialect::Dialect;
use baton_text::dialect::body::BodyIndex;
use baton_text::dialect::translate::RequestFacts;
use baton_text::dialect::translate::chat_translation::{
    TRANSLATED, is_translatable, translate_body,
};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, Uri, header};

use crate::error::RouteError;
use crate::transport::upstream::RequestHead;
use crate::workers::worker::WorkerDescription;

/// Headers of Anthropic's clients that mean nothing to a server of OpenAI's API.
static ANTHROPIC_HEADERS: [HeaderName; 3] = [
    API_KEY,
    HeaderName::from_static("anthropic-version"),
    HeaderName::from_static("anthropic-beta"),
];
/// Header in which Anthropic's clients send their key.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

/// Form in which the workers of an attempt get a request.
#[derive(Debug, Clone)]
pub enum RequestForm {
    /// As the client sent it.
    Own,
    Chat(Arc<ChatForm>),
}

/// A client's request as a chat request.
#[derive(Debug)]
pub struct ChatForm {
    pub body: Bytes,
    pub scan: BodyIndex,
    /// Facts of the client's request, for the writer of its answer.
    pub facts: RequestFacts,
    /// Members of the client's body that have no effect.
    pub ignored: Vec<String>,
}

impl ChatForm {
    pub fn new(dialect: Dialect, body: &[u8], streams: bool) -> Result<Self, RouteError> {
        let Some(translated) = translate_body(dialect, body) else {
            let detail = format!("requests to {} are not translated", dialect.path());
            return Err(RouteError::Internal { detail });
        };
        let translated = translated?;
        let chat = Bytes::from(translated.to_foreign_chat(streams)?);
        let scan = BodyIndex::of(&chat, TRANSLATED)?;
        Ok(Self {
            body: chat,
            scan,
            facts: translated.facts,
            ignored: translated.ignored,
        })
    }
}

/// True if a worker gets chat requests in place of requests of this API.
pub fn needs_chat(dialect: Dialect, worker: &WorkerDescription) -> bool {
    is_translatable(dialect) && worker.lacks_api(dialect)
}

/// Makes the head of a client's request that of a chat request.
pub fn to_chat_head(head: &mut RequestHead) {
    head.uri = Uri::from_static(TRANSLATED.path());
    let headers = head.headers_mut();
    let key = headers.get(API_KEY).map(HeaderValue::as_bytes);
    let bearer = key.and_then(|key| HeaderValue::from_bytes(&[b"Bearer ", key].concat()).ok());
    if let Some(bearer) = bearer {
        headers.entry(header::AUTHORIZATION).or_insert(bearer);
    }
    for name in &ANTHROPIC_HEADERS {
        headers.remove(name);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use http::{HeaderMap, Method};

    use super::*;

    #[test]
    fn key_of_anthropics_clients_becomes_a_bearer_key() {
        let head_of = |names: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in names {
                headers.insert(*name, HeaderValue::from_static(value));
            }
            let uri = Uri::from_static("/v1/messages");
            let mut head = RequestHead::new(Method::POST, uri, headers);
            to_chat_head(&mut head);
            head
        };
        let head = head_of(&[("x-api-key", "k"), ("anthropic-version", "2023-06-01")]);
        assert_eq!(head.uri, "/v1/chat/completions");
        assert_eq!(head.headers()["authorization"], "Bearer k");
        assert_eq!(head.headers().len(), 1);
        let head = head_of(&[("x-api-key", "k"), ("authorization", "Bearer own")]);
        assert_eq!(head.headers()["authorization"], "Bearer own");
    }

    #[test]
    fn stream_is_asked_for_its_counts() {
        let body = br#"{"model":"m","input":"hi","stream":true,"tools":[{"type":"web_search"}]}"#;
        let form = ChatForm::new(Dialect::Responses, body, true).unwrap();
        let chat: serde_json::Value = serde_json::from_slice(&form.body).unwrap();
        assert_eq!(chat["messages"][0]["content"], "hi");
        assert_eq!(chat["stream_options"]["include_usage"], true);
        assert_eq!(form.ignored, ["tools.web_search"]);
        let refused = ChatForm::new(Dialect::Messages, b"{}", false).unwrap_err();
        assert_eq!(refused.code(), "missing_field");
        assert_eq!(refused.param(), Some("max_tokens"));
    }
}
