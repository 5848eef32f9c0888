//! An answer as the client gets it: pieces queued for the client, and how far the stream got.
//!
//! Deterministic, no I/O. Where the worker reports the tokens behind the text
//! (`response::failover`), the answer knows which tokens the client has, across all workers that
//! gave parts of it.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_text::dialect::answer_end::{StreamEnd, StreamTail};
use baton_text::dialect::sse::DONE_AFTER_BREAK;
use bytes::Bytes;
use http::StatusCode;

use crate::error::RouteError;
use crate::request::body_memory::MemoryBudget;
use crate::response::failover::{BrokenStream, NotResumable, ResumeBuffer};
use crate::response::stream_error::StreamErrorForm;

pub struct ClientAnswer {
    pub status: StatusCode,
    queued: VecDeque<Bytes>,
    form: AnswerForm,
    error_form: StreamErrorForm,
}

enum AnswerForm {
    /// No stream: pieces pass as they are. The last one is kept for the usage in it.
    Whole { last_piece: Option<Bytes> },
    /// Events whose tokens are not reported.
    Stream { tail: StreamTail },
    /// Events whose tokens the worker reports.
    ReportedStream {
        tail: StreamTail,
        buffer: ResumeBuffer,
        /// Events that `buffer` let pass; empty between two pieces.
        passed: VecDeque<Bytes>,
    },
}

impl ClientAnswer {
    pub fn whole(status: StatusCode) -> Self {
        Self::new(status, AnswerForm::Whole { last_piece: None })
    }

    /// A stream whose tokens are not reported. `is_batch`: several answers in one.
    pub fn stream(status: StatusCode, is_batch: bool) -> Self {
        let tail = StreamTail::new(is_batch);
        Self::new(status, AnswerForm::Stream { tail })
    }

    /// A stream whose tokens are reported. `held_bytes`: of the request, which is kept for another
    /// worker.
    pub fn reported_stream(
        status: StatusCode,
        is_batch: bool,
        memory: &Arc<MemoryBudget>,
        held_bytes: usize,
    ) -> Self {
        let form = AnswerForm::ReportedStream {
            tail: StreamTail::new(is_batch),
            buffer: ResumeBuffer::new(memory, held_bytes),
            passed: VecDeque::new(),
        };
        Self::new(status, form)
    }

    fn new(status: StatusCode, form: AnswerForm) -> Self {
        Self {
            status,
            queued: VecDeque::with_capacity(2),
            form,
            error_form: StreamErrorForm::ErrorObject,
        }
    }

    /// Errors of the router have this form.
    pub fn with_error_form(mut self, form: StreamErrorForm) -> Self {
        self.error_form = form;
        self
    }

    pub fn is_stream(&self) -> bool {
        !matches!(self.form, AnswerForm::Whole { .. })
    }

    fn tail(&self) -> Option<&StreamTail> {
        match &self.form {
            AnswerForm::Whole { .. } => None,
            AnswerForm::Stream { tail } | AnswerForm::ReportedStream { tail, .. } => Some(tail),
        }
    }

    /// The next piece for the client.
    pub fn pop(&mut self) -> Option<Bytes> {
        self.queued.pop_front()
    }

    pub fn has_queued(&self) -> bool {
        !self.queued.is_empty()
    }

    pub fn queued_bytes(&self) -> u64 {
        self.queued.iter().map(|piece| piece.len() as u64).sum()
    }

    /// Queue a piece of an answer that is no stream, or a run of whole events. `Err`: the worker's
    /// last event is an error that another worker may mend; the event is not queued.
    pub fn push(&mut self, piece: Bytes) -> Result<(), BrokenStream> {
        match &mut self.form {
            AnswerForm::Whole { last_piece } => {
                *last_piece = Some(piece.clone());
                self.queued.push_back(piece);
                Ok(())
            }
            AnswerForm::Stream { tail } => {
                tail.forward_pieces([piece], &mut self.queued);
                Ok(())
            }
            AnswerForm::ReportedStream {
                tail,
                buffer,
                passed,
            } => {
                let result = buffer.forward_run(piece, passed);
                tail.forward_pieces(passed.drain(..), &mut self.queued);
                result
            }
        }
    }

    /// Queue a comment that is not part of the answer.
    pub fn push_comment(&mut self, comment: Bytes) {
        self.queued.push_back(comment);
    }

    /// Queue the end of a stream that its worker did not send.
    pub fn push_done(&mut self) {
        self.queued.push_back(Bytes::from_static(DONE_AFTER_BREAK));
    }

    /// End the stream with an error of the router.
    pub fn push_error(&mut self, err: &RouteError) {
        let events = self.tail().map_or(0, StreamTail::event_count);
        let end = self.error_form.stream_end(&err.body(), events);
        self.queued.push_back(end);
    }

    /// End the stream with the error event that its worker sent.
    pub fn push_error_event(&mut self, event: Bytes) {
        self.queued.push_back(event);
        self.push_done();
    }

    /// Queue events that wait for their tokens: the answer will not be resumed.
    pub fn release_waiting(&mut self) {
        if let AnswerForm::ReportedStream {
            tail,
            buffer,
            passed,
        } = &mut self.form
        {
            buffer.release_waiting(passed);
            tail.forward_pieces(passed.drain(..), &mut self.queued);
        }
    }

    /// How far the stream got; `None`: the answer is no stream.
    pub fn stream_end(&self) -> Option<StreamEnd> {
        self.tail().map(StreamTail::ending)
    }

    /// True if the client cannot tell that the answer is complete.
    pub fn is_open(&self) -> bool {
        matches!(self.stream_end(), None | Some(StreamEnd::Open))
    }

    /// True if the client has got the whole stream, `[DONE]` included.
    pub fn is_delivered(&self) -> bool {
        !self.has_queued() && self.stream_end() == Some(StreamEnd::Done)
    }

    /// True if a worker ended the stream with an error event.
    pub fn has_error(&self) -> bool {
        self.tail().is_some_and(StreamTail::has_error)
    }

    /// The last pieces, which may hold the usage.
    pub fn last_pieces(&self) -> Vec<&Bytes> {
        match &self.form {
            AnswerForm::Whole { last_piece } => last_piece.iter().collect(),
            AnswerForm::Stream { tail } | AnswerForm::ReportedStream { tail, .. } => {
                tail.recent.iter().collect()
            }
        }
    }

    /// Tokens and events that the client has, if another worker could send the rest of them.
    pub fn resumable(&mut self) -> Option<&mut ResumeBuffer> {
        match &mut self.form {
            AnswerForm::ReportedStream { buffer, .. } if buffer.can_resume() => Some(buffer),
            _ => None,
        }
    }

    /// Set once the stream can no longer be resumed.
    pub fn not_resumable(&self) -> Option<NotResumable> {
        match &self.form {
            AnswerForm::ReportedStream { buffer, .. } => buffer.lost(),
            AnswerForm::Whole { .. } | AnswerForm::Stream { .. } => None,
        }
    }

    /// No other worker is asked to resume this stream.
    pub fn disable_resume(&mut self, reason: NotResumable) {
        if let AnswerForm::ReportedStream { buffer, .. } = &mut self.form {
            buffer.disable(reason);
        }
    }

    /// From here on no worker reports tokens.
    pub fn end_reports(&mut self) {
        if let AnswerForm::ReportedStream { tail, .. } = &mut self.form {
            let tail = std::mem::take(tail);
            self.form = AnswerForm::Stream { tail };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"role\":1}\n\n\
        : baton {\"ids\":[5,6],\"seed\":7,\"created\":9}\ndata: {\"a\":1}\n\n\
        : baton {\"ids\":[8]}\ndata: {\"b\":1}\n\n\
        data: {\"finish_reason\":\"stop\"}\n\ndata: [DONE]\n\n";

    fn reported() -> ClientAnswer {
        ClientAnswer::reported_stream(StatusCode::OK, false, &MemoryBudget::new(1 << 20, None), 0)
    }

    fn popped(answer: &mut ClientAnswer) -> String {
        let pieces: Vec<u8> = std::iter::from_fn(|| answer.pop()).flatten().collect();
        String::from_utf8(pieces).unwrap()
    }

    /// The events of `STREAM`, each with its blank line.
    fn events() -> Vec<Bytes> {
        STREAM
            .split_inclusive("\n\n")
            .map(|event| Bytes::copy_from_slice(event.as_bytes()))
            .collect()
    }

    #[test]
    fn client_gets_the_same_text_wherever_the_first_worker_breaks() {
        let whole: String = STREAM
            .split_inclusive('\n')
            .filter(|line| !line.starts_with(": baton"))
            .collect();
        for cut in 0..events().len() - 2 {
            let mut answer = reported();
            for event in &events()[..cut] {
                answer.push(event.clone()).unwrap();
            }
            let mut text = popped(&mut answer);
            assert!(answer.is_open(), "{cut}");
            let buffer = answer.resumable().unwrap();
            let tokens = buffer.tokens();
            buffer.forget_unpassed();
            // The second worker sends the events whose tokens the client lacks.
            let rest = match tokens {
                0 => 0,
                2 => 2,
                _ => 3,
            };
            for event in &events()[rest..] {
                answer.push(event.clone()).unwrap();
            }
            text += &popped(&mut answer);
            assert_eq!(text, whole, "{cut}");
            assert!(answer.is_delivered(), "{cut}");
        }
    }

    #[test]
    fn stream_whose_reports_end_is_not_resumable_and_keeps_its_end() {
        let mut answer = reported();
        for event in events() {
            answer.push(event).unwrap();
        }
        assert!(answer.resumable().is_some());
        answer.end_reports();
        assert!(answer.resumable().is_none());
        assert_eq!(answer.stream_end(), Some(StreamEnd::Done));
        assert_eq!(answer.not_resumable(), None);
    }

    #[test]
    fn disabled_stream_names_its_reason() {
        let mut answer = reported();
        answer.disable_resume(NotResumable::UnknownWorker);
        assert_eq!(answer.not_resumable(), Some(NotResumable::UnknownWorker));
        assert!(answer.resumable().is_none());
    }

    #[test]
    fn waiting_events_are_released_when_no_worker_resumes() {
        let mut answer = reported();
        answer.push(events()[0].clone()).unwrap();
        assert!(!answer.has_queued(), "the role waits for its tokens");
        answer.release_waiting();
        assert_eq!(popped(&mut answer).as_bytes(), events()[0]);
    }

    #[test]
    fn answer_that_is_no_stream_passes_as_it_is() {
        let mut answer = ClientAnswer::whole(StatusCode::OK);
        answer.push(Bytes::from_static(b"{\"a\":")).unwrap();
        answer.push(Bytes::from_static(b"1}")).unwrap();
        assert_eq!(answer.queued_bytes(), 7);
        assert_eq!(answer.last_pieces(), [&Bytes::from_static(b"1}")]);
        assert!(!answer.is_stream() && answer.is_open() && !answer.is_delivered());
        assert_eq!(popped(&mut answer), "{\"a\":1}");
    }
}
