//! A worker's chat answer as an answer of the API that the client speaks.

use baton_text::dialect::Dialect;
use baton_text::dialect::chat_answer::{ChatAnswerTranslator, UnreadableAnswer};
use baton_text::dialect::sse::events;
use baton_text::dialect::write::{AnswerSpec, ErrorObject};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use tokio::time::Instant;

use crate::clock::unix_time;
use crate::dispatch::chat_form::ChatForm;
use crate::dispatch::context::RequestContext;
use crate::response::stream_error::StreamErrorForm;
use crate::response::stream_headers::is_sse;

/// Members of the body that had no effect.
const IGNORED_PARAMS: HeaderName = HeaderName::from_static("x-ignored-params");

/// Translates the answer of one leg.
pub struct AnswerTranslation {
    translator: ChatAnswerTranslator,
    dialect: Dialect,
    error_form: StreamErrorForm,
    request_id: String,
    started: Instant,
    ignored: Option<HeaderValue>,
}

impl AnswerTranslation {
    pub fn new(request: &RequestContext, form: &ChatForm) -> Self {
        let dialect = request.scan.dialect;
        let request_id = request.record.rid.clone();
        let spec = AnswerSpec {
            dialect,
            request_id: request_id.clone(),
            model: request.scan.model.clone().unwrap_or_default(),
            created: unix_time().as_secs(),
            facts: form.facts.clone(),
            ..AnswerSpec::default()
        };
        let ignored = form.ignored.join(",");
        Self {
            translator: ChatAnswerTranslator::new(spec),
            dialect,
            error_form: StreamErrorForm::of_request(&request.scan, &request_id),
            request_id,
            started: request.record.started,
            ignored: HeaderValue::try_from(ignored)
                .ok()
                .filter(|names| !names.is_empty()),
        }
    }

    /// Time since the client's request came [seconds].
    fn now(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Adds the header that names members without effect.
    pub fn add_headers(&self, headers: &mut HeaderMap) {
        if let Some(ignored) = &self.ignored {
            headers.insert(IGNORED_PARAMS, ignored.clone());
        }
    }

    /// A run of whole events; `None`: there is nothing to show yet.
    pub fn translate_run(&mut self, run: &[u8]) -> Option<Bytes> {
        let now = self.now();
        some_bytes(self.translator.translate_events(run, now))
    }

    /// End of the stream, if the worker finished its answer and sent no `[DONE]`.
    pub fn finish_stream(&mut self) -> Option<Bytes> {
        let now = self.now();
        some_bytes(self.translator.finish_stream(now))
    }

    /// An answer that is no stream.
    pub fn translate_whole(&mut self, pieces: &[Bytes]) -> Result<Bytes, UnreadableAnswer> {
        let now = self.now();
        let answer = self.translator.translate_whole(&pieces.concat(), now)?;
        Ok(Bytes::from(answer))
    }

    /// A worker's error in the form of the client's API: a body, or a stream that is an error
    /// event.
    pub fn translate_error(&self, status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Bytes {
        if is_sse(headers) {
            let error = match ChatAnswerTranslator::check_first_event(first_event(body)) {
                Err(unreadable) => unreadable.to_error(),
                Ok(()) => ErrorObject::of_answer(body),
            };
            return self
                .error_form
                .stream_of_body(StatusCode::BAD_GATEWAY, &error.to_json());
        }
        let error = ErrorObject::of_foreign_answer(status.as_u16(), body);
        Bytes::from(error.to_body(self.dialect, &self.request_id))
    }
}

fn first_event(run: &[u8]) -> &[u8] {
    events(run).next().unwrap_or_default()
}

fn some_bytes(bytes: Vec<u8>) -> Option<Bytes> {
    (!bytes.is_empty()).then(|| Bytes::from(bytes))
}
