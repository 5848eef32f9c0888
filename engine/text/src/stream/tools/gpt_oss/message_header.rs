//! Headers of harmony messages: their channel and their recipient.
//!
//! ```text
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>
//! <|start|>assistant to=functions.f<|channel|>commentary json<|message|>
//! <|channel|>final<|message|>
//! ```
//!
//! The prompt ends with the first message's `<|start|>assistant`. Models also leave out the blank
//! before `<|constrain|>`, `<|constrain|>` itself, and `<|start|>assistant` of later messages.

use super::super::scan::held_lexemes::{PatternCursor, PatternMatch, PatternMismatch, read_any};

/// Places in the markers of the row.
pub const CHANNEL: usize = 0;
pub const START: usize = 1;
pub const MESSAGE: usize = 2;
pub const CONSTRAIN: usize = 3;
pub const END: usize = 4;
pub const CALL: usize = 5;
pub const RETURN: usize = 6;

/// Longest part of a header between two markers [bytes].
const MAX_PART_BYTES: usize = 512;
/// Most markers in a header.
const MAX_MARKERS: usize = 6;

/// Header of a message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessageHeader<'a> {
    pub channel: Option<&'a str>,
    pub recipient: Option<&'a str>,
}

impl<'a> MessageHeader<'a> {
    fn read_role(&mut self, text: &'a str) {
        self.read_recipient(text);
    }

    fn read_channel(&mut self, text: &'a str) {
        let name = text.split_ascii_whitespace().next();
        self.channel = name.filter(|name| !name.starts_with("to="));
        self.read_recipient(text);
    }

    fn read_recipient(&mut self, text: &'a str) {
        let mut words = text.split_ascii_whitespace();
        let named = words.find_map(|word| word.strip_prefix("to="));
        self.recipient = named.or(self.recipient);
    }
}

/// Reads a header. Text in the place of one that does not name a recipient is no header.
pub fn read_message_header<'a>(cursor: &mut PatternCursor<'a>) -> PatternMatch<MessageHeader<'a>> {
    match_header_begin(cursor)?;
    let mut header = MessageHeader::default();
    let mut previous_marker = None;
    for _ in 0..MAX_MARKERS {
        let text = cursor.read_until(&[], MAX_PART_BYTES)?;
        match previous_marker {
            None | Some(START) => header.read_role(text),
            Some(CHANNEL) => header.read_channel(text),
            Some(_) => header.read_recipient(text),
        }
        let is_first = previous_marker.is_none();
        let marker = cursor.read_next_marker()?;
        match marker {
            MESSAGE => return Ok(header),
            CHANNEL | CONSTRAIN => {}
            START if is_first => {}
            _ => return Err(PatternMismatch::Different),
        }
        previous_marker = Some(marker);
    }
    Err(PatternMismatch::Different)
}

/// Matches the beginning of a header, which is not read.
fn match_header_begin(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let start = cursor.clone();
    let recipient = |cursor: &mut PatternCursor<'_>| {
        cursor.skip_space()?;
        cursor.read_text("to=")
    };
    read_any(
        cursor,
        &[
            &|cursor| cursor.read_marker(CHANNEL),
            &|cursor| cursor.read_marker(START),
            &|cursor| cursor.read_marker(MESSAGE),
            &recipient,
        ],
    )?;
    *cursor = start;
    Ok(())
}
