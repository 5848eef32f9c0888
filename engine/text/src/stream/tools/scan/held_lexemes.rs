//! Lexemes that are not yet read, and patterns at their start.
//!
//! A reader asks whether the held lexemes begin with a pattern. The answer "no" and the answer
//! "yes" hold however the text goes on, so that decisions do not depend on how it was cut.

use std::collections::VecDeque;
use std::ops::Range;

use crate::stream::markers::Lexeme;

/// Longest white space inside a pattern [bytes].
const MAX_SPACE_BYTES: usize = 256;

/// Reason why held lexemes do not begin with a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PatternMismatch {
    /// They end within the pattern and may go on as it does.
    Incomplete,
    /// They differ from the pattern, whatever comes next.
    Different,
}

/// Result of reading a pattern.
pub type PatternMatch<T> = Result<T, PatternMismatch>;

#[derive(Debug, Clone)]
struct MarkerSpan {
    bytes: Range<usize>,
    marker: usize,
}

/// Lexemes that are not yet read.
#[derive(Debug, Clone, Default)]
pub struct HeldLexemes {
    /// Text of the lexemes, that of markers included.
    text: String,
    /// Markers in `text`, in its order.
    spans: VecDeque<MarkerSpan>,
    /// Bytes of `text` that are read.
    read_bytes: usize,
    is_ended: bool,
}

impl HeldLexemes {
    /// Appends a lexeme; `markers` are the texts that [`Lexeme::Marker`] counts by.
    pub fn push(&mut self, lexeme: Lexeme<'_>, markers: &[&str]) {
        self.drop_read_text();
        match lexeme {
            Lexeme::Text(text) => self.text.push_str(text),
            Lexeme::Marker(marker) => {
                let start = self.text.len();
                self.text.push_str(markers[marker]);
                let bytes = start..self.text.len();
                self.spans.push_back(MarkerSpan { bytes, marker });
            }
        }
    }

    /// The answer has ended: no pattern is incomplete from now on.
    pub fn end(&mut self) {
        self.is_ended = true;
    }

    /// Text that is not yet read, that of markers included.
    pub fn text(&self) -> &str {
        &self.text[self.read_bytes..]
    }

    /// Text before the first marker.
    pub fn plain_text(&self) -> &str {
        let end = self
            .spans
            .front()
            .map_or(self.text.len(), |span| span.bytes.start);
        &self.text[self.read_bytes..end]
    }

    /// Marker with which the held lexemes begin.
    pub fn front_marker(&self) -> Option<usize> {
        let span = self.spans.front()?;
        (span.bytes.start == self.read_bytes).then_some(span.marker)
    }

    /// Bytes of the first marker, or of the first character if no marker is first. 0 if no lexeme
    /// is held.
    pub fn front_bytes(&self) -> usize {
        let front_span = self
            .spans
            .front()
            .filter(|span| span.bytes.start == self.read_bytes);
        let front_char = self.text().chars().next();
        match front_span {
            Some(span) => span.bytes.len(),
            None => front_char.map_or(0, char::len_utf8),
        }
    }

    /// Marks the first bytes as read. They end at the end of a character and of a marker.
    pub fn consume(&mut self, bytes: usize) {
        self.read_bytes += bytes;
        while let Some(span) = self.spans.front()
            && span.bytes.end <= self.read_bytes
        {
            self.spans.pop_front();
        }
    }

    pub fn cursor(&self) -> PatternCursor<'_> {
        PatternCursor {
            held: self,
            offset: self.read_bytes,
        }
    }

    fn drop_read_text(&mut self) {
        self.text.drain(..self.read_bytes);
        for span in &mut self.spans {
            span.bytes.start -= self.read_bytes;
            span.bytes.end -= self.read_bytes;
        }
        self.read_bytes = 0;
    }
}

/// Place in held lexemes up to which a pattern matches. Reading a part that does not match leaves
/// the place undefined.
#[derive(Debug, Clone)]
pub struct PatternCursor<'a> {
    held: &'a HeldLexemes,
    offset: usize,
}

impl<'a> PatternCursor<'a> {
    /// Bytes that the pattern matches so far.
    pub fn matched_bytes(&self) -> usize {
        self.offset - self.held.read_bytes
    }

    /// Matches what `pattern` reads, and stays in front of it.
    pub fn look_ahead<T>(
        &mut self,
        pattern: impl FnOnce(&mut Self) -> PatternMatch<T>,
    ) -> PatternMatch<()> {
        let start = self.clone();
        pattern(self)?;
        *self = start;
        Ok(())
    }

    /// `Ok` if the answer ends here.
    pub fn read_end(&self) -> PatternMatch<()> {
        if self.offset < self.held.text.len() {
            return Err(PatternMismatch::Different);
        }
        if self.held.is_ended {
            return Ok(());
        }
        Err(PatternMismatch::Incomplete)
    }

    pub fn read_marker(&mut self, marker: usize) -> PatternMatch<()> {
        if self.offset == self.held.text.len() {
            return Err(self.end_mismatch());
        }
        match self.span_here() {
            Some(span) if span.marker == marker => {
                self.offset = span.bytes.end;
                Ok(())
            }
            _ => Err(PatternMismatch::Different),
        }
    }

    /// Reads exactly this text, outside markers.
    pub fn read_text(&mut self, expected: &str) -> PatternMatch<()> {
        let plain = self.plain_text();
        if plain.starts_with(expected) {
            self.offset += expected.len();
            return Ok(());
        }
        let is_last = self.offset + plain.len() == self.held.text.len();
        if is_last && expected.starts_with(plain) {
            return Err(self.end_mismatch());
        }
        Err(PatternMismatch::Different)
    }

    /// Reads white space, if any.
    pub fn skip_space(&mut self) -> PatternMatch<()> {
        let plain = self.plain_text();
        let space = plain.len() - plain.trim_ascii_start().len();
        self.offset += space;
        if space > MAX_SPACE_BYTES {
            return Err(PatternMismatch::Different);
        }
        Ok(())
    }

    /// Reads the text up to the first of `ends` or up to a marker, which is not read itself. Longer
    /// texts than `max_bytes` do not match.
    pub fn read_until(&mut self, ends: &[char], max_bytes: usize) -> PatternMatch<&'a str> {
        self.read_while(|character| !ends.contains(&character), max_bytes)
    }

    /// Reads the text up to the first character that is no part of it, or up to a marker. Longer
    /// texts than `max_bytes` do not match.
    pub fn read_while(
        &mut self,
        is_part: impl Fn(char) -> bool,
        max_bytes: usize,
    ) -> PatternMatch<&'a str> {
        let plain = self.plain_text();
        let mut examined = plain
            .char_indices()
            .take_while(|&(start, _)| start <= max_bytes);
        let found = examined
            .find(|&(_, character)| !is_part(character))
            .map(|(start, _)| start);
        let bytes = found.unwrap_or(plain.len());
        if bytes > max_bytes {
            return Err(PatternMismatch::Different);
        }
        self.offset += bytes;
        if found.is_none() && self.offset == self.held.text.len() {
            return Err(self.end_mismatch());
        }
        Ok(&plain[..bytes])
    }

    /// Reads any marker.
    pub fn read_next_marker(&mut self) -> PatternMatch<usize> {
        if self.offset == self.held.text.len() {
            return Err(self.end_mismatch());
        }
        let span = self.span_here().ok_or(PatternMismatch::Different)?;
        self.offset = span.bytes.end;
        Ok(span.marker)
    }

    /// Next character, outside markers.
    pub fn peek_char(&self) -> PatternMatch<char> {
        match self.plain_text().chars().next() {
            Some(character) => Ok(character),
            None if self.offset == self.held.text.len() => Err(self.end_mismatch()),
            None => Err(PatternMismatch::Different),
        }
    }

    /// Text from here to the next marker.
    pub fn plain_text(&self) -> &'a str {
        let next_start = self
            .held
            .spans
            .iter()
            .map(|span| span.bytes.start)
            .find(|&start| start >= self.offset);
        &self.held.text[self.offset..next_start.unwrap_or(self.held.text.len())]
    }

    /// Mismatch of a pattern that goes on behind the text from here to the next marker.
    pub fn text_end_mismatch(&self) -> PatternMismatch {
        let text_end = self.offset + self.plain_text().len();
        if text_end == self.held.text.len() {
            self.end_mismatch()
        } else {
            PatternMismatch::Different
        }
    }

    /// Mismatch of a pattern that goes on behind the last lexeme.
    fn end_mismatch(&self) -> PatternMismatch {
        if self.held.is_ended {
            PatternMismatch::Different
        } else {
            PatternMismatch::Incomplete
        }
    }

    fn span_here(&self) -> Option<&'a MarkerSpan> {
        let spans = self.held.spans.iter();
        let mut spans = spans.skip_while(|span| span.bytes.start < self.offset);
        spans.next().filter(|span| span.bytes.start == self.offset)
    }
}

/// Function that reads a pattern.
pub type PatternReader<'f, 'a, T> = &'f dyn Fn(&mut PatternCursor<'a>) -> PatternMatch<T>;

/// Most times in sequence that a pattern is read as one.
const MAX_REPETITIONS: usize = 8;

/// Reads a pattern that may stand there several times in sequence: models repeat markers.
pub fn read_repeated<'a>(
    cursor: &mut PatternCursor<'a>,
    read_pattern: PatternReader<'_, 'a, ()>,
) -> PatternMatch<()> {
    read_pattern(cursor)?;
    for _ in 1..MAX_REPETITIONS {
        let mut attempt = cursor.clone();
        let again = attempt
            .skip_space()
            .and_then(|()| read_pattern(&mut attempt));
        match again {
            Ok(()) => *cursor = attempt,
            Err(PatternMismatch::Different) => break,
            Err(PatternMismatch::Incomplete) => return Err(PatternMismatch::Incomplete),
        }
    }
    Ok(())
}

/// Match of the first pattern that matches. Incomplete if one before it may still match.
pub fn read_any<'a, T>(
    cursor: &mut PatternCursor<'a>,
    patterns: &[PatternReader<'_, 'a, T>],
) -> PatternMatch<T> {
    for read_pattern in patterns {
        let mut attempt = cursor.clone();
        let found = read_pattern(&mut attempt);
        if found.is_ok() {
            *cursor = attempt;
        }
        let is_different = matches!(found, Err(PatternMismatch::Different));
        if !is_different {
            return found;
        }
    }
    Err(PatternMismatch::Different)
}

/// Matches the beginning of an object, which is not read: `{` and a key or `}`.
pub fn match_object_begin(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let start = cursor.clone();
    cursor.read_text("{")?;
    cursor.skip_space()?;
    let next = cursor.peek_char()?;
    if !matches!(next, '"' | '}') {
        return Err(PatternMismatch::Different);
    }
    *cursor = start;
    Ok(())
}
