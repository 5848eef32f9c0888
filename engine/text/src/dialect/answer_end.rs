//! End of an answer: how far it got, and the usage that its worker counted.
//!
//! Nothing is parsed while an answer passes. [`StreamTail`] remembers the last few pieces (they are
//! reference counted, not copied), and they are looked at when the answer ends. Engines write
//! `"prompt_tokens":12` and the like near the end: in OpenAI's `usage`, or in /generate's
//! `meta_info`. The names are looked for as bytes, last one first. Text that the model wrote cannot
//! be mistaken for them: inside a JSON string the quotes are escaped.

use std::collections::VecDeque;

use bytes::Bytes;
use memchr::memmem;
use serde::Deserialize;

use crate::dialect::sse::{event_data, events, has_error, is_done_line, line_event_name};

/// Pieces remembered: the one with finish_reason, a usage event and [DONE] may come apart.
const REMEMBERED: usize = 4;
/// How much of an answer's end is looked at [bytes]: a usage object is about 200, an event of
/// /generate about 400 and its text.
const LOOKED_AT: usize = 4096;

/// How far a stream had got when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEnd {
    /// `[DONE]` went out.
    Done,
    /// The finish_reason went out: the answer is whole.
    Finished,
    Open,
}

/// Last pieces of a stream.
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

    /// Forwards pieces to the client through `out` and remembers the last four: `ending` reads
    /// them.
    pub fn forward_pieces(
        &mut self,
        pieces: impl IntoIterator<Item = Bytes>,
        out: &mut VecDeque<Bytes>,
    ) {
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
        // CR LF ends one line more here, an empty one.
        let lines = || tail.split(|b| matches!(b, b'\n' | b'\r'));
        if lines().rev().any(is_done_line) {
            return StreamEnd::Done;
        }
        let is_whole = has_finish_reason(&tail)
            || lines().any(is_last_event_name)
            || has_last_event_type(&tail);
        if !self.many && is_whole {
            return StreamEnd::Finished;
        }
        StreamEnd::Open
    }

    /// Events that went out, where they are numbered.
    pub fn event_count(&self) -> u64 {
        let tail: Vec<u8> = self.recent.iter().flatten().copied().collect();
        number(&tail, b"\"sequence_number\":").map_or(0, |last| u64::from(last) + 1)
    }

    /// True if the worker itself ended the stream with an error event.
    pub fn has_error(&self) -> bool {
        self.recent.iter().any(|piece| has_error(piece))
    }
}

/// A finish_reason that says something: text in OpenAI's events, an object in /generate's. Some
/// servers write an empty text where others write null.
fn has_finish_reason(tail: &[u8]) -> bool {
    const NAME: &[u8] = b"\"finish_reason\"";
    memmem::find_iter(tail, NAME).any(|at| {
        let value = tail[at + NAME.len()..].trim_ascii_start();
        let value = value.strip_prefix(b":").unwrap_or(value).trim_ascii_start();
        let is_text = value.starts_with(b"\"") && !value.starts_with(b"\"\"");
        is_text || value.starts_with(b"{")
    })
}

/// Names of the last events of a response and of a message.
const LAST_EVENTS: [&str; 3] = ["response.completed", "response.incomplete", "message_stop"];

/// True for the line with the name of a last event.
fn is_last_event_name(line: &[u8]) -> bool {
    let name = line_event_name(line);
    name.is_some_and(|name| LAST_EVENTS.iter().any(|last| last.as_bytes() == name))
}

/// True if the last event has the type of a last event: `transformers serve` (5.24) writes no
/// names.
fn has_last_event_type(tail: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct EventJson<'a> {
        #[serde(borrow)]
        r#type: Option<&'a str>,
    }
    let Some(data) = events(tail).filter_map(event_data).last() else {
        return false;
    };
    let event = serde_json::from_slice::<EventJson>(&data);
    let name = event.ok().and_then(|event| event.r#type);
    name.is_some_and(|name| LAST_EVENTS.contains(&name))
}

/// Token counts that a worker reports. Those that it did not state are `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportedUsage {
    pub prompt_tokens: u32,
    pub cached_tokens: Option<u32>,
    pub completion_tokens: Option<u32>,
}

/// The usage in the last pieces of an answer, if any. Cost: one copy and a few scans of at most
/// `LOOKED_AT` bytes.
pub fn read_usage<'a>(pieces: impl DoubleEndedIterator<Item = &'a Bytes>) -> Option<ReportedUsage> {
    let mut last = Vec::new();
    let mut len = 0;
    for piece in pieces.rev() {
        let part = &piece[piece.len().saturating_sub(LOOKED_AT - len)..];
        len += part.len();
        last.push(part);
        if len >= LOOKED_AT {
            break;
        }
    }
    let tail: Vec<u8> = last.into_iter().rev().flatten().copied().collect();
    let Some(prompt_tokens) = number(&tail, b"\"prompt_tokens\":") else {
        return read_input_usage(&tail);
    };
    Some(ReportedUsage {
        prompt_tokens,
        cached_tokens: number(&tail, b"\"cached_tokens\":"),
        completion_tokens: number(&tail, b"\"completion_tokens\":"),
    })
}

/// Usage of a response or a message. The input tokens of a message are those that were not cached.
fn read_input_usage(tail: &[u8]) -> Option<ReportedUsage> {
    let input_tokens = number(tail, b"\"input_tokens\":")?;
    let completion_tokens = number(tail, b"\"output_tokens\":");
    let Some(read_tokens) = number(tail, b"\"cache_read_input_tokens\":") else {
        return Some(ReportedUsage {
            prompt_tokens: input_tokens,
            cached_tokens: number(tail, b"\"cached_tokens\":"),
            completion_tokens,
        });
    };
    Some(ReportedUsage {
        prompt_tokens: input_tokens.saturating_add(read_tokens),
        cached_tokens: Some(read_tokens),
        completion_tokens,
    })
}

/// The number behind the last `name` in `text`; `None` too if it is no whole number.
fn number(text: &[u8], name: &[u8]) -> Option<u32> {
    let at = (0..=text.len().checked_sub(name.len())?)
        .rev()
        .find(|at| text[*at] == b'"' && text[*at..].starts_with(name))?;
    let value = text[at + name.len()..].trim_ascii_start();
    let digits = value.iter().take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(&value[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dialect::sse::EventSplitter;

    fn passed(pieces: &[&str], many: bool) -> (String, StreamEnd) {
        let mut events = EventSplitter::default();
        let mut tail = StreamTail::new(many);
        let mut out = VecDeque::new();
        for piece in pieces {
            if let Some(run) = events.push(Bytes::copy_from_slice(piece.as_bytes())) {
                tail.forward_pieces([run], &mut out);
            }
        }
        let text: Vec<u8> = out.into_iter().flatten().collect();
        (String::from_utf8(text).unwrap(), tail.ending())
    }

    fn usage_of(pieces: &[&str]) -> Option<ReportedUsage> {
        let pieces: Vec<Bytes> = pieces
            .iter()
            .map(|piece| Bytes::copy_from_slice(piece.as_bytes()))
            .collect();
        read_usage(pieces.iter())
    }

    #[test]
    fn both_dialects_are_read() {
        let openai = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\": 70,\"completion_tokens\":5,\"total_tokens\":75,\
            \"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n";
        let usage = ReportedUsage {
            prompt_tokens: 70,
            cached_tokens: Some(64),
            completion_tokens: Some(5),
        };
        assert_eq!(usage_of(&[openai]), Some(usage));
        let (a, b) = openai.split_at(60); // a name cut in two
        assert_eq!(usage_of(&["data: {}\n\n", a, b]), Some(usage));
        let native = "{\"text\":\"x\",\"meta_info\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"cached_tokens\":0}}";
        let usage = usage_of(&[native]);
        assert_eq!(
            usage.map(|u| (u.prompt_tokens, u.cached_tokens)),
            Some((9, Some(0)))
        );
        assert_eq!(
            usage_of(&["{\"usage\":{\"prompt_tokens\":9}}"]).map(|u| u.cached_tokens),
            Some(None)
        );
    }

    #[test]
    fn usage_of_responses_and_messages_is_read() {
        let usage = ReportedUsage {
            prompt_tokens: 70,
            cached_tokens: Some(64),
            completion_tokens: Some(5),
        };
        let response = "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":70,\
            \"input_tokens_details\":{\"cached_tokens\":64,\"cache_write_tokens\":0},\"output_tokens\":5,\
            \"output_tokens_details\":{\"reasoning_tokens\":2},\"total_tokens\":75}}}\n\ndata: [DONE]\n\n";
        assert_eq!(usage_of(&[response]), Some(usage));
        let message = "event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"input_tokens\":6,\
            \"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":64,\"output_tokens\":5}}\n\n\
            event: message_stop\ndata: {\"type\":\"message_stop\"}\n\ndata: [DONE]\n\n";
        assert_eq!(usage_of(&[message]), Some(usage));
    }

    #[test]
    fn last_events_of_responses_and_messages_end_the_answer() {
        for (name, end) in [
            ("response.completed", StreamEnd::Finished),
            ("response.incomplete", StreamEnd::Finished),
            ("message_stop", StreamEnd::Finished),
            ("message_delta", StreamEnd::Open),
            ("response.output_item.done", StreamEnd::Open),
        ] {
            let event = format!("event: {name}\ndata: {{\"x\":\"event: message_stop\"}}\n\n");
            assert_eq!(passed(&[&event], false).1, end, "{name}");
            let unnamed = format!("data: {{\"response\":{{\"id\":1}},\"type\":\"{name}\"}}\n\n");
            assert_eq!(passed(&[&unnamed], false).1, end, "{name}");
        }
        let inside =
            "data: {\"tools\":[{\"type\":\"message_stop\"}],\"type\":\"response.created\"}\n\n";
        assert_eq!(passed(&[inside], false).1, StreamEnd::Open);
    }

    #[test]
    fn text_of_the_model_and_odd_values_are_not_taken_for_counts() {
        assert_eq!(
            usage_of(&["{\"content\":\"\\\"prompt_tokens\\\":5\"}"]),
            None
        );
        assert_eq!(usage_of(&["{\"usage\":{\"prompt_tokens\":null}}"]), None);
        assert_eq!(
            usage_of(&["{\"usage\":{\"prompt_tokens\":99999999999}}"]),
            None
        );
        assert_eq!(usage_of(&[""]), None);
        // The last one counts, and only the end is looked at.
        let far = format!("{{\"prompt_tokens\":1}}{}", " ".repeat(LOOKED_AT));
        assert_eq!(usage_of(&[&far]), None);
        let two = "{\"prompt_tokens\":1}{\"prompt_tokens\":2}";
        assert_eq!(usage_of(&[two]).map(|u| u.prompt_tokens), Some(2));
    }

    #[test]
    fn endings_are_distinguished() {
        let open = "data: {\"choices\":[{\"finish_reason\":null}]}\n\n";
        let finished = "data: {\"choices\":[{\"finish_reason\": \"stop\"}]}\n\n";
        let usage = "data: {\"choices\":[],\"usage\":{}}\n\n";
        let mut numbered = StreamTail::new(false);
        assert_eq!(numbered.event_count(), 0);
        let events = "data: {\"sequence_number\":6}\n\ndata: {\"sequence_number\":7,\"x\":1}\n\n";
        numbered.forward_pieces(
            [Bytes::from_static(events.as_bytes())],
            &mut VecDeque::new(),
        );
        assert_eq!(numbered.event_count(), 8);
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
        // Go's servers write an empty text while the answer goes on.
        let empty = "data: {\"choices\":[{\"finish_reason\":\"\"}]}\n\n";
        assert_eq!(passed(&[open, empty], false).1, StreamEnd::Open);
        for end in ["\r", "\r\n"] {
            let written = |text: &str| text.replace('\n', end);
            let finished = written(finished);
            assert_eq!(passed(&[&finished], false).1, StreamEnd::Finished);
            let done = written("data:[DONE]\n\n");
            assert_eq!(passed(&[&finished, &done], true).1, StreamEnd::Done);
            let unnamed =
                written("data: {\"response\":\ndata: {\"id\":1},\"type\":\"message_stop\"}\n\n");
            assert_eq!(passed(&[&unnamed], false).1, StreamEnd::Finished);
        }
        // the model may write the word itself
        assert_eq!(
            passed(&["data: {\"text\":\"data: [DONE]\"}\n\n"], false).1,
            StreamEnd::Open
        );
    }
}
