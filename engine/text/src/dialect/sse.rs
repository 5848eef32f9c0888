//! Streams of server-sent events, from a worker's pieces to what the client gets.
//!
//! 1. [`EventSplitter`] cuts what arrives into runs of whole events, so that a break never leaves
//!    half an event with the client. Nearly every piece is such a run and passes as it is;
//! 2. a leg looks for an error in the first run, or in all of them ([`from_error`]);
//! 3. failover.rs takes the comments for the router out;
//! 4. [`StreamTail`] remembers the last few pieces (they are reference counted, not copied) and
//!    looks at them when the stream ends, to know whether it had been finished. Nothing is parsed
//!    while it runs.

use std::collections::VecDeque;

use bytes::Bytes;
use http::{HeaderMap, header};
use memchr::{memchr, memmem, memrchr_iter};
use serde::Deserialize;

use crate::error::RouteError;

/// Pieces remembered: the one with finish_reason, a usage event and [DONE] may come apart.
const REMEMBERED: usize = 4;
/// An event longer than this passes in parts [bytes].
pub const MAX_EVENT: usize = 8 << 20;

/// Cuts a stream, however it comes, into runs of whole events.
#[derive(Debug, Default)]
pub struct EventSplitter {
    /// The beginning of an event.
    part: Vec<u8>,
}

impl EventSplitter {
    /// Take a piece; returns the events that are whole with it. An event longer than `MAX_EVENT`
    /// comes in parts.
    pub fn push(&mut self, piece: Bytes) -> Option<Bytes> {
        if self.part.is_empty() {
            let end = run_len(&piece, 0);
            self.part.extend_from_slice(&piece[end..]);
            return (end > 0).then(|| piece.slice(..end));
        }
        let seen = self.part.len();
        self.part.extend_from_slice(&piece);
        let end = run_len(&self.part, seen);
        (end > 0).then(|| {
            let next = self.part.split_off(end);
            Bytes::from(std::mem::replace(&mut self.part, next))
        })
    }

    /// Take the beginning of the next event.
    pub fn take_part(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.part)
    }

    /// The worker ended the stream properly: its last event, if only the blank line behind it is
    /// missing.
    pub fn finish(&mut self) -> Option<Bytes> {
        if self.part.ends_with(b"\n") {
            self.push(Bytes::from_static(b"\n"))
        } else {
            None
        }
    }
}

/// Length of the whole events in front, or of all if it is too long to wait. A search that saw the
/// first `seen` bytes found none there.
fn run_len(text: &[u8], seen: usize) -> usize {
    let is_blank = |at: &usize| {
        let before = text[..*at].strip_suffix(b"\r").unwrap_or(&text[..*at]);
        before.is_empty() || before.ends_with(b"\n")
    };
    let mut ends = memrchr_iter(b'\n', &text[seen..]).map(|at| seen + at);
    match ends.find(is_blank) {
        Some(at) => at + 1,
        None if text.len() > MAX_EVENT => text.len(),
        None => 0,
    }
}

/// Length of the first event with its blank line, if it is whole.
pub fn event_len(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let end = at + memchr(b'\n', &text[at..])?;
        if matches!(&text[at..end], b"" | b"\r") {
            return Some(end + 1);
        }
        at = end + 1;
    }
}

/// Length of the comments and blank lines in front.
pub fn comments_len(text: &[u8]) -> usize {
    let mut at = 0;
    while text[at..]
        .first()
        .is_some_and(|byte| matches!(byte, b':' | b'\n' | b'\r'))
    {
        at = memchr(b'\n', &text[at..]).map_or(text.len(), |end| at + end + 1);
    }
    at
}

/// The run from its first error event on.
pub fn from_error(run: &Bytes) -> Option<Bytes> {
    let mut at = 0;
    loop {
        at += comments_len(&run[at..]);
        if error_event(&run[at..]).is_some() {
            return Some(run.slice(at..));
        }
        at += event_len(&run[at..])?;
    }
}

/// How far a stream had got when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// `[DONE]` went out.
    Done,
    /// The finish_reason went out: the answer is whole.
    Finished,
    Open,
}

#[derive(Debug, Default)]
pub struct StreamTail {
    /// Last pieces that went out.
    pub recent: VecDeque<Bytes>,
    /// Several answers in one stream: one finish_reason says nothing about the others.
    many: bool,
}

impl StreamTail {
    pub fn new(many: bool) -> Self {
        Self {
            many,
            ..Self::default()
        }
    }

    /// Put pieces into `out`, for the client.
    pub fn pass(&mut self, pieces: impl IntoIterator<Item = Bytes>, out: &mut VecDeque<Bytes>) {
        for piece in pieces {
            if self.recent.len() == REMEMBERED {
                self.recent.pop_front();
            }
            self.recent.push_back(piece.clone());
            out.push_back(piece);
        }
    }

    /// How far the stream got, from the end of what went out.
    pub fn ending(&self) -> StreamEnd {
        let tail: Vec<u8> = self.recent.iter().flatten().copied().collect();
        let mut lines = tail.split(|b| *b == b'\n').rev();
        if lines.any(|line| data_of(line) == Some(b"[DONE]")) {
            return StreamEnd::Done;
        }
        if !self.many && has_finish_reason(&tail) {
            return StreamEnd::Finished;
        }
        StreamEnd::Open
    }

    /// True if the worker itself ended the stream with an error event.
    pub fn has_error(&self) -> bool {
        let mut lines = self
            .recent
            .iter()
            .flat_map(|piece| piece.split(|b| *b == b'\n'));
        lines.any(|line| data_of(line).is_some_and(|data| data.starts_with(b"{\"error\"")))
    }
}

fn data_of(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(b"data:").map(<[u8]>::trim_ascii)
}

/// A finish_reason that is not null: text in OpenAI's events, an object in /generate's.
fn has_finish_reason(tail: &[u8]) -> bool {
    const NAME: &[u8] = b"\"finish_reason\"";
    memmem::find_iter(tail, NAME).any(|at| {
        let value = tail[at + NAME.len()..].trim_ascii_start();
        let value = value.strip_prefix(b":").unwrap_or(value).trim_ascii_start();
        value.starts_with(b"\"") || value.starts_with(b"{")
    })
}

/// End of a stream that broke: the error and `[DONE]`.
pub fn error_epilogue(err: &RouteError) -> Bytes {
    Bytes::from([b"\ndata: ", &err.body()[..], b"\n\ndata: [DONE]\n\n"].concat())
}

/// `code` of `{"error":{"code":…}}`, if the body is that and the code is text.
pub fn code_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Envelope {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        code: Option<String>,
    }
    serde_json::from_slice::<Envelope>(body).ok()?.error.code
}

/// `message` of `{"error":{"message":…}}`, if the body is that and the message is text.
pub fn message_of(body: &[u8]) -> Option<String> {
    let body: serde_json::Value = serde_json::from_slice(body).ok()?;
    body["error"]["message"].as_str().map(str::to_owned)
}

/// The JSON of an SSE error event, if `piece` begins with one.
pub fn error_event(piece: &[u8]) -> Option<&[u8]> {
    let piece = piece.strip_prefix(b"event: error\n").unwrap_or(piece);
    let data = piece.strip_prefix(b"data:")?.trim_ascii_start();
    if !data.starts_with(b"{\"error\"") {
        return None;
    }
    data.split(|b| *b == b'\n').next()
}

pub fn is_sse(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn passed(pieces: &[&str], many: bool) -> (String, StreamEnd) {
        let mut events = EventSplitter::default();
        let mut tail = StreamTail::new(many);
        let mut out = VecDeque::new();
        for piece in pieces {
            if let Some(run) = events.push(Bytes::copy_from_slice(piece.as_bytes())) {
                tail.pass([run], &mut out);
            }
        }
        let text: Vec<u8> = out.into_iter().flatten().collect();
        (String::from_utf8(text).unwrap(), tail.ending())
    }

    fn pushed(events: &mut EventSplitter, piece: &str) -> String {
        let run = events.push(Bytes::copy_from_slice(piece.as_bytes()));
        String::from_utf8(run.unwrap_or_default().to_vec()).unwrap()
    }

    proptest! {
        #[test]
        fn runs_are_the_whole_events_however_the_stream_is_cut(
            events in proptest::collection::vec("(: x\r?\n){0,2}(data: [ab]{0,3}\r?\n){0,2}\r?\n", 0..5),
            part in "(data: [ab]{0,3}(\n)?)?",
            cuts in proptest::collection::vec(0usize..200, 0..6),
        ) {
            let whole = events.concat();
            let stream = format!("{whole}{part}");
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let mut splitter = EventSplitter::default();
            let mut seen = String::new();
            for cut in cuts.windows(2) {
                seen += &pushed(&mut splitter, &stream[cut[0]..cut[1]]);
                // All events that are whole so far, and nothing else.
                let mut expected = 0;
                while let Some(len) = event_len(&stream.as_bytes()[expected..cut[1]]) {
                    expected += len;
                }
                prop_assert_eq!(seen.len(), expected);
            }
            prop_assert_eq!(&seen, &whole);
            let rest = splitter.finish().map(|run| run.to_vec());
            prop_assert_eq!(rest, part.ends_with('\n').then(|| format!("{part}\n").into_bytes()));
        }
    }

    #[test]
    fn event_without_end_is_not_held_for_ever() {
        let mut events = EventSplitter::default();
        let half = "x".repeat(MAX_EVENT / 2);
        assert_eq!(pushed(&mut events, &half), "");
        assert_eq!(pushed(&mut events, &half), "");
        assert_eq!(pushed(&mut events, "y\n").len(), MAX_EVENT + 2);
        assert_eq!(pushed(&mut events, "\ndata: a\n\n"), "\ndata: a\n\n");
    }

    #[test]
    fn error_events_are_recognized_at_the_front() {
        let event = b"data: {\"error\":{\"code\":\"draining\"}}\n\ndata: [DONE]\n\n";
        assert_eq!(
            code_of(error_event(event).unwrap()).as_deref(),
            Some("draining")
        );
        assert!(error_event(b"event: error\ndata: {\"error\": {}}\n\n").is_some());
        assert!(error_event(b"data: {\"choices\":[\"error\"]}\n\n").is_none());
        assert!(error_event(b": keep-alive\n\n").is_none());
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
                        error_event(&found).and_then(code_of).as_deref(),
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

    #[test]
    fn comments_and_blank_lines_are_not_the_beginning_of_an_answer() {
        for comments in [
            "",
            ":\n\n",
            ": keep-alive\n\n\n: x\r\n\r\n",
            ": baton {\"ids\":[1]}\n",
        ] {
            assert_eq!(comments_len(comments.as_bytes()), comments.len());
            assert_eq!(
                comments_len(format!("{comments}data: {{}}\n\n").as_bytes()),
                comments.len()
            );
        }
    }

    #[test]
    fn endings_are_distinguished() {
        let open = "data: {\"choices\":[{\"finish_reason\":null}]}\n\n";
        let finished = "data: {\"choices\":[{\"finish_reason\": \"stop\"}]}\n\n";
        let usage = "data: {\"choices\":[],\"usage\":{}}\n\n";
        assert_eq!(passed(&[open], false).1, StreamEnd::Open);
        assert_eq!(passed(&[open, finished], false).1, StreamEnd::Finished);
        assert_eq!(passed(&[finished, usage], false).1, StreamEnd::Finished);
        assert_eq!(passed(&[finished], true).1, StreamEnd::Open);
        assert_eq!(
            passed(&[finished, usage, "data: [DO", "NE]\n\n"], true).1,
            StreamEnd::Done
        );
        assert_eq!(
            passed(&["data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}}}\n\n"], false).1,
            StreamEnd::Finished
        );
        // the model may write the word itself
        assert_eq!(
            passed(&["data: {\"text\":\"data: [DONE]\"}\n\n"], false).1,
            StreamEnd::Open
        );
    }

    #[test]
    fn epilogue_is_one_error_event_and_the_end() {
        let added = error_epilogue(&RouteError::Draining);
        let added = std::str::from_utf8(&added).unwrap();
        assert_eq!(added.matches("data: {\"error\"").count(), 1);
        assert!(added.ends_with("\n\ndata: [DONE]\n\n"));
    }
}
