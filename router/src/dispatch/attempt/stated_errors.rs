//! Errors in answers with a status of success, and answers that cannot be translated. Another
//! worker may do better, because the client has received nothing yet.

use std::borrow::Cow;

use baton_text::dialect::chat_answer::{ChatAnswerTranslator, UnreadableAnswer};
use baton_text::dialect::sse::{
    event_data, events, first_data_event, is_foreign_error, stated_error, stated_status,
    without_mark,
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use router_core::{AttemptReason, RequestOutcome, RetryClass, StatusLabel};

use super::answer_translation::AnswerTranslation;
use super::{
    AttemptError, ErrorReply, MAX_HELD, PartialAnswer, UpstreamAttempt, UpstreamResponse,
    error_code, is_sse, upstream_error,
};
use crate::workers::load_guard::LoadGuard;

/// Place of the first event with data in the first run of a stream, if it is an error.
/// `is_translated`: also if it has no translation.
pub fn error_place(run: &[u8], is_translated: bool) -> Option<usize> {
    let begin = without_mark(run);
    let place = first_data_event(begin)?;
    let event = events(&begin[place..]).next()?;
    let is_error = stated_error(event).is_some()
        || (is_translated && ChatAnswerTranslator::check_first_event(event).is_err());
    is_error.then_some(run.len() - begin.len() + place)
}

/// JSON of an error: the data of the event that `body` begins with, else `body`.
pub fn error_data(body: &[u8]) -> Cow<'_, [u8]> {
    let event = events(body).next();
    event.and_then(event_data).unwrap_or(Cow::Borrowed(body))
}

/// A complete answer that is no stream, if it is an error. Its pieces are one then.
pub fn whole_error(pieces: &mut Vec<Bytes>) -> Option<Bytes> {
    if pieces.len() > 1 {
        *pieces = vec![Bytes::from(pieces.concat())];
    }
    let answer = pieces.first()?;
    is_foreign_error(answer).then(|| answer.clone())
}

impl AttemptError {
    /// The same failure of an error in an answer whose status was a success. Without a code of ours
    /// its class is that of the status that it names.
    pub(super) fn of_stated(self, status: Option<u16>) -> Self {
        if matches!(self.reason, AttemptReason::Code(_)) {
            return self;
        }
        Self {
            class: RetryClass::of_status(status.unwrap_or(500)),
            ..self
        }
    }
}

impl UpstreamAttempt {
    /// Failure of a worker whose answer, with a status of success, is an error. The client gets the
    /// worker's own words with the status that they name, else 502.
    pub(super) fn error_in_whole(&self, headers: HeaderMap, error: Bytes) -> AttemptError {
        let stated = stated_status(&error);
        let status = stated.and_then(|status| StatusCode::from_u16(status).ok());
        let status = status.unwrap_or(StatusCode::BAD_GATEWAY);
        let code = error_code(&error);
        let failure = AttemptError::answer(&self.guard, code, status, headers, error);
        failure.of_stated(stated)
    }

    /// An answer that is no stream in the API of the client.
    pub(super) fn translate_whole(
        &self,
        mut answer: PartialAnswer,
        translation: Option<&mut AnswerTranslation>,
    ) -> Result<PartialAnswer, Box<AttemptError>> {
        let Some(translation) = translation.filter(|_| !is_sse(&answer.headers)) else {
            return Ok(answer);
        };
        if answer.remaining.is_some() {
            let problem = format!("sent an answer longer than {MAX_HELD} bytes");
            return Err(Box::new(unreadable(&self.guard, &problem)));
        }
        match translation.translate_whole(&answer.pieces) {
            Ok(whole) => answer.pieces = vec![whole],
            Err(UnreadableAnswer::Failed(_)) => {
                let error = Bytes::from(answer.pieces.concat());
                return Err(Box::new(self.error_in_whole(answer.headers, error)));
            }
            Err(problem) => {
                return Err(Box::new(unreadable(&self.guard, &problem.to_string())));
            }
        }
        Ok(answer)
    }
}

/// Failure of an answer that cannot be used. `problem`: a predicate that clients see.
fn unreadable(leg: &LoadGuard, problem: &str) -> AttemptError {
    let err = upstream_error(leg, problem, String::new());
    let label = StatusLabel::from_status(err.status().as_u16());
    let reason = AttemptReason::Status(label);
    AttemptError::new(leg, reason, RetryClass::Unexplained, ErrorReply::Error(err))
}

impl UpstreamResponse {
    /// Failure of a worker that ended its answer without saying why.
    pub fn unfinished(&mut self) -> AttemptError {
        self.guard.settle(RequestOutcome::Failure);
        unreadable(&self.guard, &UnreadableAnswer::Unfinished.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_of_an_error_is_that_of_the_first_event_with_data() {
        let error = "data: {\"object\":\"error\",\"message\":\"m\"}\n\n";
        let answer = "data: {\"choices\":[]}\n\n";
        for (before, behind) in [
            ("", ""),
            ("\u{feff}", answer),
            (": c\n\nretry: 3\n\n", error),
            ("id: 1\r\n\r\n: c\r\n", answer),
        ] {
            let run = format!("{before}{error}{behind}");
            assert_eq!(error_place(run.as_bytes(), false), Some(before.len()));
        }
        assert_eq!(
            error_place(format!("{answer}{error}").as_bytes(), true),
            None
        );
        for unreadable in ["data: {\"ok\":1}\n\n", "data: oops\n\n", "data: [DONE]\n\n"] {
            assert_eq!(error_place(unreadable.as_bytes(), true), Some(0));
            assert_eq!(error_place(unreadable.as_bytes(), false), None);
        }
        assert_eq!(error_data(b"data: {}\n\nx"), &b"{}"[..]);
        assert_eq!(error_data(b"{}"), &b"{}"[..]);
    }
}
