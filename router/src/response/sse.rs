//! Watching a stream pass: whole lines only go out, and at its end we know whether it had been finished.
//!
//! Nothing is parsed while the stream runs. Pieces that end with a line (nearly all) pass as they are; the tail of any
//! other is held until its line is complete, so that a break never leaves half an event with the client. The last few
//! pieces are remembered (they are reference counted, not copied) and only looked at when the stream ends.

use std::collections::VecDeque;

use bytes::Bytes;
use http::{HeaderMap, header};
use router_core::TokenUsage;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::RouteError;
use crate::response::usage::usage_in;

/// Pieces remembered: the one with finish_reason, a usage event and [DONE] may come apart.
const REMEMBERED: usize = 4;
/// A line longer than this passes in parts [bytes].
const MAX_LINE: usize = 8 << 20;

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
    held: Vec<Bytes>,
    held_len: usize,
    recent: VecDeque<Bytes>,
    /// Several answers in one stream: one finish_reason says nothing about the others.
    many: bool,
}

impl StreamTail {
    pub fn new(many: bool) -> Self {
        Self { many, ..Self::default() }
    }

    /// Take a piece from the worker, put what may go to the client into `out`.
    pub fn pass(&mut self, piece: Bytes, out: &mut VecDeque<Bytes>) {
        if piece.ends_with(b"\n") && self.held.is_empty() {
            return self.emit(piece, out);
        }
        match piece.iter().rposition(|b| *b == b'\n') {
            Some(at) => {
                self.flush(out);
                self.emit(piece.slice(..=at), out);
                self.hold(piece.slice(at + 1..));
            }
            None => self.hold(piece),
        }
        if self.held_len > MAX_LINE {
            self.flush(out);
        }
    }

    fn hold(&mut self, piece: Bytes) {
        if !piece.is_empty() {
            self.held_len += piece.len();
            self.held.push(piece);
        }
    }

    fn flush(&mut self, out: &mut VecDeque<Bytes>) {
        self.held_len = 0;
        for piece in std::mem::take(&mut self.held) {
            self.emit(piece, out);
        }
    }

    fn emit(&mut self, piece: Bytes, out: &mut VecDeque<Bytes>) {
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back(piece.clone());
        out.push_back(piece);
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

    /// Tokens that the worker counted, if it said so at the end.
    pub fn usage(&self) -> Option<TokenUsage> {
        usage_in(self.recent.iter())
    }

    /// True if the worker itself ended the stream with an error event.
    pub fn has_error(&self) -> bool {
        let pieces = self.recent.iter();
        pieces
            .flat_map(|piece| piece.split(|b| *b == b'\n'))
            .any(|line| data_of(line).is_some_and(|data| data.starts_with(b"{\"error\"")))
    }
}

fn data_of(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(b"data:").map(<[u8]>::trim_ascii)
}

/// A finish_reason that is not null: text in OpenAI's events, an object in /generate's.
fn has_finish_reason(tail: &[u8]) -> bool {
    const NAME: &[u8] = b"\"finish_reason\"";
    let mut rest = tail;
    while let Some(at) = rest.windows(NAME.len()).position(|w| w == NAME) {
        rest = &rest[at + NAME.len()..];
        let value = rest.trim_ascii_start();
        let value = value.strip_prefix(b":").unwrap_or(value).trim_ascii_start();
        if value.starts_with(b"\"") || value.starts_with(b"{") {
            return true;
        }
    }
    false
}

/// End of a stream that broke: nothing, the missing `[DONE]`, or the error and `[DONE]`.
pub fn epilogue(ending: StreamEnd, err: &RouteError) -> Option<Bytes> {
    match ending {
        StreamEnd::Done => None,
        StreamEnd::Finished => Some(Bytes::from_static(b"\ndata: [DONE]\n\n")),
        StreamEnd::Open => {
            let mut event = Vec::from(b"\ndata: ");
            event.extend_from_slice(&err.body());
            event.extend_from_slice(b"\n\ndata: [DONE]\n\n");
            Some(Bytes::from(event))
        }
    }
}

/// `code` of `{"error":{"code":…}}`, if the body is that and the code is text.
pub fn code_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Envelope<'a> {
        #[serde(borrow)]
        error: &'a RawValue,
    }
    #[derive(Deserialize)]
    struct Inner {
        code: Option<String>,
    }
    let envelope: Envelope<'_> = serde_json::from_slice(body).ok()?;
    let inner: Inner = serde_json::from_str(envelope.error.get()).ok()?;
    inner.code
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
    use super::*;

    fn passed(pieces: &[&str], many: bool) -> (String, StreamEnd) {
        let mut tail = StreamTail::new(many);
        let mut out = VecDeque::new();
        for piece in pieces {
            tail.pass(Bytes::copy_from_slice(piece.as_bytes()), &mut out);
        }
        let text: Vec<u8> = out.into_iter().flatten().collect();
        (String::from_utf8(text).unwrap(), tail.ending())
    }

    #[test]
    fn only_whole_lines_pass() {
        assert_eq!(passed(&["data: a\n\n", "data: b"], false).0, "data: a\n\n");
        assert_eq!(passed(&["data: ", "b", "\n\nda"], false).0, "data: b\n\n");
        assert_eq!(passed(&["x", "\n"], false).0, "x\n");
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
        assert_eq!(passed(&[finished, usage, "data: [DO", "NE]\n\n"], true).1, StreamEnd::Done);
        assert_eq!(
            passed(&["data: {\"text\":\"\",\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}}}\n\n"], false).1,
            StreamEnd::Finished
        );
        // the model may write the word itself
        assert_eq!(passed(&["data: {\"text\":\"data: [DONE]\"}\n\n"], false).1, StreamEnd::Open);
    }

    #[test]
    fn epilogue_adds_what_is_missing() {
        let err = RouteError::Draining;
        assert_eq!(epilogue(StreamEnd::Done, &err), None);
        let added = epilogue(StreamEnd::Open, &err).unwrap();
        let added = std::str::from_utf8(&added).unwrap();
        assert_eq!(added.matches("data: {\"error\"").count(), 1);
        assert!(added.ends_with("\n\ndata: [DONE]\n\n"));
    }
}
