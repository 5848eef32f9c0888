//! Reader of the formats in which calls are JSON objects.

use super::call_object::{CallObject, MAX_HELD_BYTES, ObjectEnd};
use super::scanner::ValueScanner;
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;
use crate::stream::tools::{CallableTools, JsonCalls, ToolReader};

/// Reads calls that are JSON objects. Deterministic.
///
/// ```text
/// Start/Content → Opening → (Element →) Object → Behind → Object …
///                     │                    │         └→ Content
///                     └────────────────────┴→ Content
/// ```
///
/// Elements of a list that are no calls are content, and the calls behind them are read. A begin
/// marker that is repeated in front of a call belongs to it.
pub struct JsonCallReader {
    /// Texts that [`Lexeme::Marker`] counts by: those in front of calls, then one behind them.
    markers: &'static [&'static str],
    format: &'static JsonCalls,
    tools: CallableTools,
    state: ReaderState,
    /// Text since the last marker, call or content, of which nothing is shown yet.
    held: String,
    /// A marker is in front of the calls.
    is_marked: bool,
    is_in_list: bool,
    /// A call has begun since the last marker, or since the answer's start.
    has_call: bool,
}

#[derive(Debug)]
enum ReaderState {
    /// Nothing but white space so far.
    Start,
    Content,
    /// Behind a begin marker.
    Opening,
    /// In a list, in front of an element.
    Element,
    Object(CallObject),
    /// Behind an object.
    Behind,
    /// Behind a list.
    BehindList,
    /// In a value that is content, because it is no call of a tool. Others may follow.
    SkippedValue(ValueScanner),
    /// In a number or a word between the elements of a list, of which this is there. It is content.
    SkippedWord(String),
}

/// Longest element of a list that is neither an object, a list nor a string [bytes].
const MAX_WORD_BYTES: usize = 64;

impl JsonCallReader {
    pub fn new(
        markers: &'static [&'static str],
        format: &'static JsonCalls,
        tools: CallableTools,
    ) -> Self {
        let state = if format.at_start {
            ReaderState::Start
        } else {
            ReaderState::Content
        };
        Self {
            markers,
            format,
            tools,
            state,
            held: String::new(),
            is_marked: false,
            is_in_list: false,
            has_call: false,
        }
    }

    fn read_text(&mut self, text: &str, out: &mut AnswerParts) {
        let mut rest = text;
        while !rest.is_empty() {
            let len = self.read_some(rest, out);
            rest = &rest[len..];
        }
    }

    /// Reads a beginning of a text. Returns its length.
    fn read_some(&mut self, text: &str, out: &mut AnswerParts) -> usize {
        match &mut self.state {
            ReaderState::Content => {
                out.push_content(text);
                text.len()
            }
            ReaderState::Object(object) => {
                let (len, end) = object.read(text, &self.tools, out);
                self.has_call |= object.is_certain();
                if let Some(end) = end {
                    let rest = object.scan_rest();
                    self.leave_object(end, rest);
                }
                len
            }
            ReaderState::SkippedValue(scanner) => {
                let (len, is_complete) = scanner.read_run(text);
                out.push_content(&text[..len]);
                if is_complete {
                    self.state = ReaderState::Behind;
                }
                len
            }
            ReaderState::SkippedWord(_) => self.read_word(text, out),
            _ => self.read_between(text, out),
        }
    }

    /// Reads white space, or one character, in front of a call or behind it.
    fn read_between(&mut self, text: &str, out: &mut AnswerParts) -> usize {
        let space_len = text.len() - text.trim_start().len();
        if space_len > 0 {
            self.hold(&text[..space_len], out);
            return space_len;
        }
        let Some(character) = text.chars().next() else {
            return 0;
        };
        self.hold(&text[..character.len_utf8()], out);
        if self.held.is_empty() {
            self.state = ReaderState::Content;
            return character.len_utf8();
        }
        self.state = match (&self.state, character) {
            (ReaderState::Start | ReaderState::Opening | ReaderState::Element, '{') => {
                self.begin_object()
            }
            (ReaderState::Start | ReaderState::Opening, '[') => {
                self.is_in_list = true;
                ReaderState::Element
            }
            (ReaderState::Element | ReaderState::Behind, ']')
                if self.is_in_list && self.has_call =>
            {
                self.held.clear();
                self.is_in_list = false;
                ReaderState::BehindList
            }
            (ReaderState::Behind, ',') if self.is_in_list => ReaderState::Element,
            (ReaderState::Element, '[' | '"') => {
                self.show_held(out);
                let mut scanner = ValueScanner::default();
                scanner.read_byte(character as u8);
                ReaderState::SkippedValue(scanner)
            }
            (ReaderState::Element, _) if is_word_char(character) => {
                self.show_held(out);
                ReaderState::SkippedWord(character.to_string())
            }
            (ReaderState::Behind, '{') if self.may_follow() => self.begin_object(),
            (ReaderState::Behind, _) if self.is_separator(character) => ReaderState::Behind,
            _ => {
                self.show_held(out);
                ReaderState::Content
            }
        };
        character.len_utf8()
    }

    /// Reads a beginning of a text in an element that is a number or a word. Returns its length.
    fn read_word(&mut self, text: &str, out: &mut AnswerParts) -> usize {
        let end = text.find(|character: char| !is_word_char(character));
        let len = end.unwrap_or(text.len());
        out.push_content(&text[..len]);
        let ReaderState::SkippedWord(word) = &mut self.state else {
            return len;
        };
        word.push_str(&text[..len]);
        if word.len() > MAX_WORD_BYTES {
            self.state = ReaderState::Content;
        } else if end.is_some() {
            let is_json = serde_json::from_str::<serde::de::IgnoredAny>(word).is_ok();
            self.state = if is_json {
                ReaderState::Behind
            } else {
                ReaderState::Content
            };
        }
        len
    }

    fn begin_object(&mut self) -> ReaderState {
        let held = std::mem::take(&mut self.held);
        ReaderState::Object(CallObject::new(held, self.is_marked))
    }

    fn may_follow(&self) -> bool {
        !self.is_in_list && !self.format.separators.is_empty()
    }

    fn is_separator(&self, character: char) -> bool {
        let mut separators = self.format.separators.iter();
        !self.is_in_list && separators.any(|separator| separator.contains(character))
    }

    /// `rest`: scanner of the rest of an object that is no call.
    fn leave_object(&mut self, end: ObjectEnd, rest: Option<ValueScanner>) {
        let is_followed = match end {
            ObjectEnd::Closed => true,
            ObjectEnd::UnknownTool => self.is_in_list || !self.is_marked,
            ObjectEnd::NotCall => self.is_in_list,
            ObjectEnd::Broken => false,
        };
        self.state = match rest {
            _ if !is_followed => ReaderState::Content,
            Some(scanner) if end != ObjectEnd::Closed => ReaderState::SkippedValue(scanner),
            _ => ReaderState::Behind,
        };
    }

    /// Keeps text until it is clear whether it is content. Longer text is content.
    fn hold(&mut self, text: &str, out: &mut AnswerParts) {
        self.held.push_str(text);
        if self.held.len() > MAX_HELD_BYTES {
            self.show_held(out);
        }
    }

    fn show_held(&mut self, out: &mut AnswerParts) {
        out.push_content(&self.held);
        self.held.clear();
    }

    fn read_marker(&mut self, index: usize, out: &mut AnswerParts) {
        let text = self.markers[index];
        let is_data = match &self.state {
            ReaderState::Object(object) => object.is_in_value_string(),
            ReaderState::SkippedValue(scanner) => scanner.is_in_string(),
            _ => false,
        };
        if is_data {
            self.read_text(text, out);
            return;
        }
        if let ReaderState::Object(object) = &mut self.state {
            object.finish(false, out);
        }
        if index < self.format.begins.len() {
            let is_repeated = matches!(self.state, ReaderState::Opening);
            if !is_repeated {
                self.leave_calls(out);
            }
            self.hold(text, out);
            self.state = ReaderState::Opening;
            self.is_marked = true;
            return;
        }
        let is_expected = self.has_call && self.is_marked;
        self.leave_calls(out);
        if !is_expected {
            out.push_content(text);
        }
    }

    /// The calls behind a marker have ended. Separators behind a call are no content.
    fn leave_calls(&mut self, out: &mut AnswerParts) {
        if self.has_call {
            self.held.clear();
        }
        self.show_held(out);
        self.state = ReaderState::Content;
        self.is_marked = false;
        self.is_in_list = false;
        self.has_call = false;
    }
}

/// True for characters of JSON's numbers and words.
fn is_word_char(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '+' | '.')
}

impl ToolReader for JsonCallReader {
    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        match lexeme {
            Lexeme::Text(text) => self.read_text(text, out),
            Lexeme::Marker(index) => self.read_marker(index, out),
        }
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        if let ReaderState::Object(object) = &mut self.state {
            object.finish(true, out);
        }
        self.leave_calls(out);
    }
}
