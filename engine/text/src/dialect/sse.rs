//! Server-sent events: runs of whole events, errors among them, and the event that ends a stream.

use bytes::Bytes;
use memchr::{memchr, memrchr_iter};
use serde::Deserialize;
use serde_json::Value;

/// [`DONE_EVENT`] behind the line end of an event that broke off.
pub const DONE_AFTER_BREAK: &[u8] = b"\ndata: [DONE]\n\n";
/// Event that ends every stream.
pub const DONE_EVENT: &[u8] = DONE_AFTER_BREAK.split_at(1).1;
/// Line of [`DONE_EVENT`].
const DONE_LINE: &[u8] = DONE_EVENT.split_at(DONE_EVENT.len() - 2).0;
/// Data of [`DONE_EVENT`].
const DONE: &[u8] = DONE_LINE.split_at(b"data: ".len()).1;

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
    #[inline]
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
#[inline]
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
#[inline]
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
#[inline]
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

/// Data of a line, if it is a line of data.
#[inline]
pub fn line_data(line: &[u8]) -> Option<&[u8]> {
    line.strip_prefix(b"data:").map(<[u8]>::trim_ascii)
}

/// True if `line` is that of the event that ends every stream.
#[inline]
pub fn is_done_line(line: &[u8]) -> bool {
    line_data(line) == Some(DONE)
}

/// True if `event` ends the stream.
#[inline]
pub fn is_done(event: &[u8]) -> bool {
    event.starts_with(DONE_LINE)
}

/// Begins of the data of an error: that of OpenAI's older APIs, Anthropic's, and that of a response.
const ERROR_BEGINS: [&[u8]; 3] = [
    b"{\"error\"",
    b"{\"type\":\"error\"",
    b"{\"type\":\"response.failed\"",
];

/// True if the data of an event is an error.
#[inline]
pub fn is_error(data: &[u8]) -> bool {
    ERROR_BEGINS.iter().any(|begin| data.starts_with(begin))
}

/// End of a stream that broke: the event of an error and that of the end. `error`: its JSON, in one
/// line.
pub fn error_epilogue(error: &[u8]) -> Bytes {
    Bytes::from([b"\n", &error_end(error)[..]].concat())
}

/// The same behind a whole event.
pub fn error_end(error: &[u8]) -> Vec<u8> {
    [b"data: ", error, b"\n\n", DONE_EVENT].concat()
}

/// A stream of one event. Line ends in `json`, which JSON allows between values only, would end the
/// event's line and become spaces.
pub fn single_event_stream(json: &[u8]) -> Bytes {
    let line = json.iter().map(|b| match b {
        b'\n' | b'\r' => b' ',
        other => *other,
    });
    let start = b"data: ".iter().copied();
    let end = b"\n\n".iter().chain(DONE_EVENT).copied();
    start.chain(line).chain(end).collect()
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

/// An event without the line of its name.
fn without_name(event: &[u8]) -> &[u8] {
    if !event.starts_with(b"event:") {
        return event;
    }
    memchr(b'\n', event).map_or(event, |end| &event[end + 1..])
}

/// The JSON of an SSE error event, if `piece` begins with one.
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

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
        }
        assert!(error_event(b"event: ping\ndata: {\"type\":\"ping\"}\n\n").is_none());
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
    fn epilogue_is_one_error_event_and_the_end() {
        let added = error_epilogue(b"{\"error\":{\"code\":\"draining\"}}");
        let added = std::str::from_utf8(&added).unwrap();
        assert_eq!(added.matches("data: {\"error\"").count(), 1);
        assert!(added.ends_with("\n\ndata: [DONE]\n\n"));
    }

    #[test]
    fn end_of_a_stream_is_recognized_by_its_event_alone() {
        assert!(is_done(DONE_EVENT) && is_done_line(DONE_LINE));
        assert!(is_done_line(b"data:[DONE]\r"));
        for other in ["data: {\"text\":\"[DONE]\"}\n\n", ": [DONE]\n\n", "[DONE]"] {
            assert!(!is_done(other.as_bytes()), "{other}");
            assert!(!is_done_line(other.trim_end().as_bytes()), "{other}");
        }
    }

    #[test]
    fn body_in_several_lines_is_one_event() {
        let stream = single_event_stream(b"{\n \"a\": 1\r\n}");
        assert_eq!(&stream[..], b"data: {  \"a\": 1  }\n\ndata: [DONE]\n\n");
    }
}
