//! Grammar of an event stream (WHATWG HTML, 9.2.6): lines, fields and events.
//!
//! A line ends with LF, CR LF or CR; an empty line ends an event; the data of an event is that of
//! its data lines, joined by LF. A byte order mark may stand in front of the stream.

use std::borrow::Cow;
use std::iter;

use memchr::memchr2;

use super::{DONE, DONE_LINE};

/// Byte order mark in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The first line's length without its end, and with it.
#[inline]
fn line_len(text: &[u8]) -> Option<(usize, usize)> {
    let end = memchr2(b'\n', b'\r', text)?;
    let is_pair = text[end..].starts_with(b"\r\n");
    Some((end, end + 1 + usize::from(is_pair)))
}

/// Length of the first event with its empty line, if it is whole.
#[inline]
pub fn event_len(text: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let (content, line) = line_len(&text[at..])?;
        at += line;
        if content == 0 {
            return Some(at);
        }
    }
}

/// True if the line that ends at `at`, with LF or CR, is empty.
#[inline]
pub fn ends_empty_line(text: &[u8], at: usize) -> bool {
    let mut before = &text[..at];
    if text[at] == b'\n' {
        before = before.strip_suffix(b"\r").unwrap_or(before);
    }
    matches!(before.last(), None | Some(b'\n' | b'\r'))
}

/// Length of the comments and empty lines in front.
#[inline]
pub fn comments_len(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(b':' | b'\n' | b'\r') = text.get(at) {
        at += line_len(&text[at..]).map_or(text.len() - at, |(_, line)| line);
    }
    at
}

/// Lines without their ends.
pub fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    whole_lines(text).map(|(line, _)| line)
}

/// Lines, each with its end beside it.
pub fn whole_lines(text: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let mut rest = text;
    iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (content, len) = line_len(rest).unwrap_or((rest.len(), rest.len()));
        let (line, behind) = rest.split_at(len);
        rest = behind;
        Some(line.split_at(content))
    })
}

/// Events of a run; the last one may lack its empty line.
pub fn events(run: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut rest = run;
    iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (event, behind) = rest.split_at(event_len(rest).unwrap_or(rest.len()));
        rest = behind;
        Some(event)
    })
}

/// Value of a line that is a field with this name. A line without a colon is a field without a
/// value.
#[inline]
fn field_value<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    match line.strip_prefix(name)?.split_first() {
        None => Some(b""),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}

/// Data of a line, if it is a line of data.
#[inline]
pub fn line_data(line: &[u8]) -> Option<&[u8]> {
    field_value(line, b"data")
}

/// Name in a line, if it is the line of an event's name.
#[inline]
pub fn line_event_name(line: &[u8]) -> Option<&[u8]> {
    field_value(line, b"event")
}

/// Data of an event; `None`: it has none, so that no client sees the event.
pub fn event_data(event: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut values = lines(event).filter_map(line_data);
    let mut data = Cow::Borrowed(values.next()?);
    for value in values {
        let joined = data.to_mut();
        joined.push(b'\n');
        joined.extend_from_slice(value);
    }
    (!data.is_empty()).then_some(data)
}

/// Name of an event: its last one, if there are several.
pub fn event_name(event: &[u8]) -> Option<&[u8]> {
    lines(event).filter_map(line_event_name).last()
}

/// Length of what stands in front of the first event with data; `None`: no event has data.
/// `run`: whole events.
pub fn first_data_event(run: &[u8]) -> Option<usize> {
    let mut at = 0;
    for event in events(run) {
        if event_data(event).is_some() {
            return Some(at + comments_len(event));
        }
        at += event.len();
    }
    None
}

/// The beginning of a stream without its byte order mark.
pub fn without_mark(begin: &[u8]) -> &[u8] {
    begin.strip_prefix(BYTE_ORDER_MARK).unwrap_or(begin)
}

/// True if data are those of the event that ends every stream.
#[inline]
pub fn is_done_data(data: &[u8]) -> bool {
    data.trim_ascii() == DONE
}

/// True if `line` is that of the event that ends every stream.
#[inline]
pub fn is_done_line(line: &[u8]) -> bool {
    line_data(line).is_some_and(is_done_data)
}

/// True if `event` ends a stream of an engine of Baton, which writes it in one way.
#[inline]
pub fn is_done(event: &[u8]) -> bool {
    event.starts_with(DONE_LINE)
}

/// Place in a run at which the event begins that ends every stream, written in any way.
pub fn done_place(run: &[u8]) -> Option<usize> {
    let mut at = 0;
    for event in events(run) {
        if event_data(event).is_some_and(|data| is_done_data(&data)) {
            return Some(at);
        }
        at += event.len();
    }
    None
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::dialect::sse::DONE_EVENT;

    /// The examples of the standard, and its other rules.
    #[test]
    fn data_of_events_are_those_of_the_standard() {
        for (event, data) in [
            ("data: YHOO\ndata: +2\ndata: 10\n\n", Some("YHOO\n+2\n10")),
            ("data:test\n\n", Some("test")),
            ("data: test\n\n", Some("test")),
            ("data:  test\n\n", Some(" test")),
            ("data\n\n", None),
            ("data\ndata\n\n", Some("\n")),
            ("data:\n\n", None),
            (": test stream\n\n", None),
            ("id: 1\nretry: 10\n\n", None),
            ("data: first event\nid: 1\n\n", Some("first event")),
            ("data: a\rdata: b\r\ndata: c\n\n", Some("a\nb\nc")),
            ("datax: a\nDATA: b\n data: c\n\n", None),
            ("event: add\ndata: 7\n\n", Some("7")),
        ] {
            let read = event_data(event.as_bytes());
            let read = read.map(|data| String::from_utf8(data.into_owned()).unwrap());
            assert_eq!(read.as_deref(), data, "{event:?}");
        }
        assert_eq!(event_name(b"event: a\nevent: b\n\n"), Some(&b"b"[..]));
    }

    #[test]
    fn line_ends_of_the_standard_end_events() {
        for end in ["\n", "\r\n", "\r"] {
            let event = format!("data: a{end}{end}");
            let run = format!("{event}: c{end}{event}");
            assert_eq!(event_len(run.as_bytes()), Some(event.len()), "{end:?}");
            assert_eq!(event_len(format!("data: a{end}").as_bytes()), None);
            let comments = format!(": c{end}{end}{end}: d{end}");
            assert_eq!(comments_len(comments.as_bytes()), comments.len());
            let lines: Vec<&[u8]> = lines(run.as_bytes()).collect();
            assert_eq!(lines, [&b"data: a"[..], b"", b": c", b"data: a", b""]);
        }
        assert_eq!(event_len(b"data: a\r\n\r"), Some(10));
        assert_eq!(event_len(b"data: a\n\r\nb"), Some(10));
    }

    #[test]
    fn first_event_with_data_is_found_behind_all_others() {
        for before in [
            "",
            ": keep-alive\n\n",
            "retry: 3000\n\nid: 4\n\n",
            "\r\n: x\r\r",
        ] {
            let run = format!("{before}: c\ndata: 1\n\n");
            let event = before.len() + ": c\n".len();
            assert_eq!(first_data_event(run.as_bytes()), Some(event), "{before:?}");
        }
        assert_eq!(first_data_event(b": c\n\nevent: ping\n\n"), None);
        assert_eq!(without_mark(b"\xef\xbb\xbfdata: 1\n\n"), b"data: 1\n\n");
    }

    #[test]
    fn end_of_a_stream_is_recognized_by_its_event_alone() {
        assert!(is_done(DONE_EVENT) && is_done_line(DONE_LINE));
        assert!(is_done_line(b"data:[DONE]"));
        for other in ["data: {\"text\":\"[DONE]\"}\n\n", ": [DONE]\n\n", "[DONE]"] {
            assert!(!is_done(other.as_bytes()), "{other}");
            assert!(!is_done_line(other.trim_end().as_bytes()), "{other}");
            assert_eq!(done_place(other.as_bytes()), None);
        }
        let run = "data: 1\r\rid: 1\rdata:[DONE]\r\r";
        assert_eq!(done_place(run.as_bytes()), Some(9));
    }
}
