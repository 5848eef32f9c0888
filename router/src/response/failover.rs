//! Tokens and events that the client has of a stream, so that another worker can resume it.
//!
//! 1. A header asks workers with the feature `resume` for a comment in front of the last event of
//!    each write: the tokens sent with the events so far (docs/protocol.md §2);
//! 2. [`ResumeBuffer`] takes these comments out of the stream and remembers the tokens of the
//!    events that passed;
//! 3. the worker breaks off: the same body with `baton_resume` goes to another worker
//!    (`dispatch::proxy_body`), and its stream passes the same buffer.
//!
//! Invariant: a token is remembered if and only if its event went to the client whole. Events with
//! tokens that are not known yet (those before the comment of their write, and a last write without
//! [DONE]) wait here.
//!
//! Memory: the request's body and 4 bytes per token and stream, of all streams together at most
//! --failover-max-bytes; a stream that does not fit passes, and cannot be resumed. Cost of an
//! event, the usual case: about 0.2 µs, no allocation.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use baton_text::dialect::resume::{CommentError, EMIT_TOKENS_HEADER, ResumeComment, ResumeRequest};
use baton_text::dialect::sse::{MAX_EVENT, error_code, error_event, event_len, is_done};
use bytes::Bytes;
use http::HeaderName;
use router_core::{ProtocolCode, RetryClass};

use crate::request::body_memory::{MemoryBudget, MemoryShare};

/// Asks a worker for the comments.
pub const HEADER: HeaderName = HeaderName::from_static(EMIT_TOKENS_HEADER);
/// Longest answer that is remembered [tokens].
const MAX_TOKENS: usize = 1 << 18;
/// Most of a stream that waits for its tokens [bytes].
const MAX_WAITING: usize = MAX_EVENT;

/// Reason why a stream can no longer be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum NotResumable {
    /// The stream has more than `MAX_TOKENS`, more than `MAX_WAITING` without a comment, or an
    /// event of more than `MAX_EVENT`.
    TooLong,
    /// --failover-max-bytes.
    Memory,
    /// The comments are not those of docs/protocol.md §2.
    Malformed,
    /// Another process answers than the one that was chosen, so that it is not known which workers
    /// could resume the answer.
    UnknownWorker,
}

/// The worker's own last event is an error that another worker may mend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenStream {
    pub code: ProtocolCode,
    /// The event.
    pub event: Bytes,
}

/// Tokens and events that a stream has sent.
#[derive(Debug)]
pub struct ResumeBuffer {
    ids: Vec<u32>,
    /// Count of `ids` whose event passed.
    passed: usize,
    /// True if an event passed that is no comment.
    has_ids: bool,
    seed: Option<u64>,
    created: Option<u64>,
    /// Events that passed, where they are numbered.
    events: Option<u64>,
    /// Whole events whose tokens are not known yet.
    waiting: Vec<Bytes>,
    waiting_len: usize,
    share: MemoryShare,
    lost: Option<NotResumable>,
}

impl ResumeBuffer {
    /// `memory`: of the resume buffers of all streams; `held`: bytes of the request that are kept
    /// to ask again.
    pub fn new(memory: &Arc<MemoryBudget>, held: usize) -> Self {
        let mut buffer = Self {
            ids: Vec::new(),
            passed: 0,
            has_ids: false,
            seed: None,
            created: None,
            events: None,
            waiting: Vec::new(),
            waiting_len: 0,
            share: memory.share(),
            lost: None,
        };
        // Streams may not fill the router's memory: beyond --failover-max-bytes they pass, and are
        // not resumed.
        if buffer.share.grow(held).is_err() {
            buffer.disable(NotResumable::Memory);
        }
        buffer
    }

    /// Take a run of whole events; what is for the client comes to `out`.
    pub fn forward_run(
        &mut self,
        run: Bytes,
        out: &mut VecDeque<Bytes>,
    ) -> Result<(), BrokenStream> {
        let mut from = 0;
        while let Some(len) = event_len(&run[from..]) {
            self.forward_event(&run, from..from + len, out)?;
            from += len;
        }
        // A worker that sends no comments any more would make the buffer grow without end.
        if from < run.len() || self.waiting_len > MAX_WAITING {
            self.disable(NotResumable::TooLong);
            self.release_waiting(out);
            // A part of an event that is too long.
            out.extend((from < run.len()).then(|| run.slice(from..)));
        }
        Ok(())
    }

    /// Find an event with the empty line behind it, where it lies in `text`.
    fn forward_event(
        &mut self,
        text: &Bytes,
        at: Range<usize>,
        out: &mut VecDeque<Bytes>,
    ) -> Result<(), BrokenStream> {
        let event = &text[at.clone()];
        if let Some(comment) = ResumeComment::leading(event) {
            if self.lost.is_none()
                && let Err(lost) = self.read_comment(comment)
            {
                self.disable(lost);
            }
            self.release_waiting(out);
            out.push_back(text.slice(at.start + comment.len..at.end));
            self.passed = self.ids.len();
            return Ok(());
        }
        // A comment has no tokens to wait for. Behind waiting events it waits, too, to keep the
        // order.
        let is_comment = event.starts_with(b":");
        if self.lost.is_some() || (is_comment && self.waiting.is_empty()) {
            out.push_back(text.slice(at));
            return Ok(());
        }
        let error = error_event(event);
        // The client may not see an error that another worker mends. If none can, it needs the
        // event.
        if let Some(code) = error.and_then(resumable_error)
            && self.can_resume()
        {
            return Err(BrokenStream {
                code,
                event: text.slice(at),
            });
        }
        let is_last = error.is_some() || is_done(event);
        self.waiting_len += event.len();
        self.waiting.push(text.slice(at));
        // No comment follows the last event: the events before it would wait for ever.
        if is_last {
            self.release_waiting(out);
        }
        Ok(())
    }

    fn read_comment(&mut self, comment: ResumeComment<'_>) -> Result<(), NotResumable> {
        let identity = comment
            .read(|id| self.push_id(id))
            .map_err(|err| match err {
                CommentError::Malformed => NotResumable::Malformed,
                CommentError::Refused(reason) => reason,
            })?;
        self.seed = self.seed.or(identity.seed);
        self.created = self.created.or(identity.created);
        self.events = identity.events.or(self.events);
        match self.seed.and(self.created) {
            Some(_) => Ok(()),
            None => Err(NotResumable::Malformed),
        }
    }

    fn push_id(&mut self, id: u32) -> Result<(), NotResumable> {
        if self.ids.len() == self.ids.capacity() {
            if self.ids.len() >= MAX_TOKENS {
                return Err(NotResumable::TooLong);
            }
            let more = self.ids.len().max(64);
            let grown = self.share.grow(more * size_of::<u32>());
            grown.map_err(|_| NotResumable::Memory)?;
            self.ids.reserve_exact(more);
        }
        self.ids.push(id);
        Ok(())
    }

    /// From here on no other worker is asked to resume this stream.
    pub fn disable(&mut self, reason: NotResumable) {
        self.lost.get_or_insert(reason);
        self.ids = Vec::new();
        self.share.free();
    }

    /// Pass the waiting events to the client.
    pub fn release_waiting(&mut self, out: &mut VecDeque<Bytes>) {
        self.has_ids = true;
        self.waiting_len = 0;
        out.extend(self.waiting.drain(..));
    }

    pub fn lost(&self) -> Option<NotResumable> {
        self.lost
    }

    /// Tokens the client has.
    pub fn tokens(&self) -> usize {
        self.passed
    }

    /// True if another worker could send the rest, or all of it if the client has seen nothing.
    pub fn can_resume(&self) -> bool {
        self.lost.is_none() && (self.passed > 0 || !self.has_ids)
    }

    /// Member of the body that asks for the rest of the stream; empty: for all of it. `fingerprint`
    /// is that of the worker that gave the tokens.
    pub fn to_json_field(&self, fingerprint: &BTreeMap<String, String>) -> String {
        let (Some(seed), Some(created), true) = (self.seed, self.created, self.passed > 0) else {
            return String::new();
        };
        let request = ResumeRequest {
            ids: &self.ids[..self.passed],
            seed,
            created,
            events: self.events,
            fingerprint,
        };
        request.to_member()
    }

    /// Forget tokens and events that the client does not have: the next worker sends them again.
    pub fn forget_unpassed(&mut self) {
        self.ids.truncate(self.passed);
        self.waiting.clear();
        self.waiting_len = 0;
        if self.passed == 0 {
            self.seed = None;
            self.created = None;
            self.events = None;
        }
    }
}

/// Code of an error after which another worker may resume the stream.
fn resumable_error(error: &[u8]) -> Option<ProtocolCode> {
    let code = ProtocolCode::parse(&error_code(error)?)?;
    matches!(code.retry_class(), RetryClass::Broken | RetryClass::Leaving).then_some(code)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use baton_text::dialect::sse::EventSplitter;
    use proptest::prelude::*;

    use super::*;

    /// The role and the first text come in one write, the last write has no comment.
    const STREAM: &str = ": waiting\n\n\
        data: {\"role\":1}\n\n: baton {\"ids\":[5,6],\"seed\":7,\"created\":9}\ndata: {\"a\":1}\n\n\
        : waiting\n\n: baton {\"ids\":[8]}\ndata: {\"b\":1}\n\n\
        data: {\"c\":1}\n\ndata: {\"usage\":1}\n\ndata: [DONE]\n\n";
    const SHOWN: &str = ": waiting\n\n\
        data: {\"role\":1}\n\ndata: {\"a\":1}\n\n: waiting\n\ndata: {\"b\":1}\n\n\
        data: {\"c\":1}\n\ndata: {\"usage\":1}\n\ndata: [DONE]\n\n";

    fn buffer() -> ResumeBuffer {
        ResumeBuffer::new(&MemoryBudget::new(1 << 20, None), 100)
    }

    /// `text`: the next piece of a worker's stream.
    fn forward_piece(
        events: &mut EventSplitter,
        buffer: &mut ResumeBuffer,
        text: &str,
    ) -> Result<String, BrokenStream> {
        let mut out = VecDeque::new();
        if let Some(run) = events.push(Bytes::copy_from_slice(text.as_bytes())) {
            buffer.forward_run(run, &mut out)?;
        }
        Ok(String::from_utf8(out.into_iter().flatten().collect()).unwrap())
    }

    fn forward_text(buffer: &mut ResumeBuffer, text: &str) -> Result<String, BrokenStream> {
        forward_piece(&mut EventSplitter::default(), buffer, text)
    }

    #[test]
    fn number_of_events_is_that_of_the_last_comment_that_passed() {
        let mut buffer = buffer();
        let stream = ": baton {\"ids\":[5],\"seed\":7,\"created\":9,\"events\":4}\ndata: 3\n\n\
            : baton {\"ids\":[],\"events\":5}\ndata: 4\n\ndata: 5\n\n";
        forward_text(&mut buffer, stream).unwrap();
        buffer.forget_unpassed();
        assert_eq!(
            buffer.to_json_field(&BTreeMap::new()),
            "\"baton_resume\":{\"ids\":[5],\"seed\":7,\"created\":9,\"events\":5}"
        );
    }

    proptest! {
        #[test]
        fn tokens_are_known_of_exactly_what_passed(cuts in proptest::collection::vec(0usize..400, 0..8)) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at % STREAM.len()).collect();
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut events = EventSplitter::default();
            let mut buffer = buffer();
            let mut shown = String::new();
            for pair in cuts.windows(2) {
                shown += &forward_piece(&mut events, &mut buffer, &STREAM[pair[0]..pair[1]]).unwrap();
                let expected = match (shown.contains("\"a\""), shown.contains("\"b\"")) {
                    (_, true) => 3,
                    (true, false) => 2,
                    (false, false) => 0,
                };
                prop_assert_eq!(buffer.tokens(), expected);
                prop_assert!(SHOWN.starts_with(&shown));
                prop_assert!(shown.is_empty() || shown.ends_with("\n\n"));
                // The role without its tokens, or the text without the end, would be said twice.
                prop_assert_eq!(shown.contains("role"), expected > 0);
                prop_assert_eq!(shown.contains("\"c\""), shown.contains("[DONE]"));
                prop_assert!(buffer.can_resume());
            }
            prop_assert_eq!(shown, SHOWN);
            prop_assert_eq!(buffer.to_json_field(&BTreeMap::new()), "\"baton_resume\":{\"ids\":[5,6,8],\"seed\":7,\"created\":9}");
        }

        #[test]
        fn comments_are_read_as_json_however_they_are_written(ids in proptest::collection::vec(any::<u32>(), 0..6), spaced: bool) {
            let list = serde_json::to_string(&ids).unwrap();
            let list = if spaced { list.replace(',', " , ") } else { list };
            let mut buffer = buffer();
            forward_text(&mut buffer, ": baton {\"ids\":[1],\"seed\":2,\"created\":3}\ndata: {}\n\n").unwrap();
            forward_text(&mut buffer, &format!(": baton {{\"ids\":{list}}}\ndata: {{}}\n\n")).unwrap();
            prop_assert_eq!(buffer.lost(), None);
            prop_assert_eq!(&buffer.ids[1..], &ids[..]);
        }
    }

    #[test]
    fn what_the_client_has_not_seen_is_forgotten() {
        let mut buffer = buffer();
        let cut = STREAM.find("data: {\"b\"").unwrap() + 8;
        forward_text(&mut buffer, &STREAM[..cut]).unwrap();
        buffer.forget_unpassed();
        assert_eq!(
            buffer.to_json_field(&BTreeMap::new()),
            "\"baton_resume\":{\"ids\":[5,6],\"seed\":7,\"created\":9}"
        );
        let fingerprint = BTreeMap::from([("model".to_owned(), "f00".to_owned())]);
        assert_eq!(
            buffer.to_json_field(&fingerprint),
            "\"baton_resume\":{\"ids\":[5,6],\"seed\":7,\"created\":9,\"fingerprint\":{\"model\":\"f00\"}}"
        );
        // The next worker tells seed and time again; the first ones stay.
        let next = ": baton {\"ids\":[8,9],\"seed\":1,\"created\":1}\ndata: {\"b\":2}\n\n";
        assert_eq!(
            forward_text(&mut buffer, next).unwrap(),
            "data: {\"b\":2}\n\n"
        );
        assert!(
            buffer
                .to_json_field(&BTreeMap::new())
                .contains("[5,6,8,9],\"seed\":7,\"created\":9")
        );
    }

    #[test]
    fn client_that_has_seen_nothing_gets_another_answer_whole() {
        let mut buffer = buffer();
        let cut = STREAM.find("data: {\"a\"").unwrap() + 8;
        assert_eq!(
            forward_text(&mut buffer, &STREAM[..cut]).unwrap(),
            ": waiting\n\n"
        );
        assert!(buffer.can_resume());
        assert_eq!(buffer.to_json_field(&BTreeMap::new()), "");
        buffer.forget_unpassed();
        forward_text(&mut buffer, STREAM).unwrap();
        assert!(
            buffer
                .to_json_field(&BTreeMap::new())
                .contains("[5,6,8],\"seed\":7")
        );
    }

    #[test]
    fn errors_that_another_worker_may_mend_end_it_and_others_pass() {
        let error = |code: &str| format!("data: {{\"error\":{{\"code\":\"{code}\"}}}}\n\n");
        let mut buffer = buffer();
        forward_text(&mut buffer, &STREAM[..STREAM.find("data: {\"c\"").unwrap()]).unwrap();
        for code in ["internal_error", "timeout", "queue_full", "unknown"] {
            assert_eq!(
                forward_text(&mut buffer, &error(code)).unwrap(),
                error(code)
            );
        }
        for code in ["engine_dead", "draining"] {
            assert_eq!(
                forward_text(&mut buffer, &error(code))
                    .unwrap_err()
                    .code
                    .into_str(),
                code
            );
        }
    }

    #[test]
    fn what_is_lost_passes_on_as_it_comes() {
        let mut buffer = buffer();
        let plain = "data: {\"a\":1}\n\n";
        assert_eq!(
            forward_text(&mut buffer, &format!(": baton what\n{plain}")).unwrap(),
            plain
        );
        assert_eq!(buffer.lost(), Some(NotResumable::Malformed));
        assert!(!buffer.can_resume());
        assert_eq!(forward_text(&mut buffer, plain).unwrap(), plain);
    }

    #[test]
    fn memory_is_bounded_over_all_streams_and_given_back() {
        let memory = MemoryBudget::new(1000, None);
        let first = ResumeBuffer::new(&memory, 600);
        assert_eq!(
            ResumeBuffer::new(&memory, 600).lost(),
            Some(NotResumable::Memory)
        );
        let mut second = ResumeBuffer::new(&memory, 300);
        let comment = ": baton {\"ids\":[1],\"seed\":2,\"created\":3}\ndata: {}\n\n";
        assert_eq!(forward_text(&mut second, comment).unwrap(), "data: {}\n\n");
        assert_eq!(second.lost(), Some(NotResumable::Memory));
        drop((first, second));
        assert_eq!(memory.check(1000), Ok(()));
        let mut alone = ResumeBuffer::new(&memory, 300);
        forward_text(&mut alone, comment).unwrap();
        assert!(alone.can_resume());
    }

    #[test]
    fn event_without_end_is_not_held_for_ever() {
        let mut buffer = buffer();
        let long = "x".repeat(MAX_WAITING + 1);
        assert_eq!(forward_text(&mut buffer, &long).unwrap(), long);
        assert_eq!(buffer.lost(), Some(NotResumable::TooLong));
    }
}
