//! Server-sent events: runs of whole events, errors among them, and the event that ends a stream.
//!
//! * [`event`](mod@event): lines, fields and events of the standard;
//! * [`splitter`](mod@splitter): a stream that comes in pieces, as runs of whole events;
//! * [`error`](mod@error): errors of Baton and of other servers.

mod error;
mod event;
mod splitter;

use bytes::Bytes;

pub use self::error::{
    error_code, error_event, error_message, from_error, has_error, is_error, is_foreign_error,
    is_given, stated_error, stated_status,
};
pub use self::event::{
    comments_len, done_place, event_data, event_len, event_name, events, first_data_event, is_done,
    is_done_data, is_done_line, line_data, line_event_name, lines, whole_lines, without_mark,
};
pub use self::splitter::{EventSplitter, MAX_EVENT};

/// [`DONE_EVENT`] behind the line end of an event that broke off.
pub const DONE_AFTER_BREAK: &[u8] = b"\ndata: [DONE]\n\n";
/// Event that ends every stream.
pub const DONE_EVENT: &[u8] = DONE_AFTER_BREAK.split_at(1).1;
/// Line of [`DONE_EVENT`].
const DONE_LINE: &[u8] = DONE_EVENT.split_at(DONE_EVENT.len() - 2).0;
/// Data of [`DONE_EVENT`].
const DONE: &[u8] = DONE_LINE.split_at(b"data: ".len()).1;

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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn epilogue_is_one_error_event_and_the_end() {
        let added = error_epilogue(b"{\"error\":{\"code\":\"draining\"}}");
        let added = std::str::from_utf8(&added).unwrap();
        assert_eq!(added.matches("data: {\"error\"").count(), 1);
        assert!(added.ends_with("\n\ndata: [DONE]\n\n"));
    }

    #[test]
    fn body_in_several_lines_is_one_event() {
        let stream = single_event_stream(b"{\n \"a\": 1\r\n}");
        assert_eq!(&stream[..], b"data: {  \"a\": 1  }\n\ndata: [DONE]\n\n");
    }
}
