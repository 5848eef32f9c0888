//! A call that is written as a JSON object with a name and arguments.

use super::arguments::{ArgumentReader, ArgumentStep, StringDecoder};
use super::scanner::{ValueScanner, is_json_space};
use crate::stream::parts::AnswerParts;
use crate::stream::tools::CallableTools;

/// Text that is held back until a call is certain, at most [bytes]; beyond it, the text is content.
/// A model that writes the name last has its arguments held back.
pub const MAX_HELD_BYTES: usize = 64 << 10;

/// Keys in an object without a marker in front of it: with another one it is no call.
const UNMARKED_KEYS: [&str; 6] = ["name", "arguments", "parameters", "id", "type", "index"];

/// End of a call's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectEnd {
    /// The call is complete.
    Closed,
    /// The call is complete; behind its arguments is text that is not of the object, and content.
    Broken,
    /// The text is content.
    NotCall,
    /// The text is content: the object names a tool that does not exist. The object is not closed.
    UnknownTool,
}

/// Reads the object of a call, from its opening brace on.
///
/// The text is held back until the call is certain: its name is known, and its arguments begin with
/// `{"` or `{}`. A string of arguments is decoded once; null and an empty string are `{}`. From
/// then on the arguments are passed through as they are, JSON or not.
#[derive(Debug)]
pub struct CallObject {
    /// A marker announces the object.
    is_marked: bool,
    /// Before the call is certain: the text so far. Behind the arguments: the text behind them.
    held: String,
    /// Place of the opening brace in the text so far.
    object_start: usize,
    state: ObjectState,
    name: Option<String>,
    arguments: ArgumentProgress,
    /// Text of the arguments that was not sent.
    unsent: String,
    /// The call has begun.
    is_certain: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ArgumentProgress {
    Missing,
    /// Their first characters: they may be an object.
    Opening,
    Certain,
    Complete,
}

#[derive(Debug)]
enum ObjectState {
    FirstKey,
    NextKey,
    /// The literal so far.
    Key(String),
    Colon(MemberKind),
    Value(MemberKind),
    /// The literal so far.
    Name(String),
    Arguments(ArgumentReader),
    ArgumentString(StringDecoder, ArgumentReader),
    /// Letters of `null` that are there.
    NullArguments(usize),
    Other(ValueScanner),
    OtherScalar,
    BehindValue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemberKind {
    Name,
    Arguments,
    Other,
}

impl CallObject {
    /// `held`: the text since the marker, up to the opening brace and with it.
    pub fn new(held: String, is_marked: bool) -> Self {
        Self {
            is_marked,
            object_start: held.len() - 1,
            held,
            state: ObjectState::FirstKey,
            name: None,
            arguments: ArgumentProgress::Missing,
            unsent: String::new(),
            is_certain: false,
        }
    }

    /// True if the call has begun.
    pub fn is_certain(&self) -> bool {
        self.is_certain
    }

    /// True where a marker is data: within a string of a value other than the name.
    pub fn is_in_value_string(&self) -> bool {
        match &self.state {
            ObjectState::Arguments(reader) => reader.is_in_string(),
            ObjectState::ArgumentString(..) => true,
            ObjectState::Other(scanner) => scanner.is_in_string(),
            _ => false,
        }
    }

    /// Scanner of the rest of an object that is no call; `None`: all of it was read, or it is one.
    pub fn scan_rest(&self) -> Option<ValueScanner> {
        if self.is_certain {
            return None;
        }
        let mut scanner = ValueScanner::default();
        let (_, is_complete) = scanner.read_run(&self.held[self.object_start..]);
        (!is_complete).then_some(scanner)
    }

    /// Reads up to the end of the object. Returns the length read.
    pub fn read(
        &mut self,
        text: &str,
        tools: &CallableTools,
        out: &mut AnswerParts,
    ) -> (usize, Option<ObjectEnd>) {
        let mut read_len = 0;
        while let Some(character) = text[read_len..].chars().next() {
            let rest = &text[read_len..];
            let is_tail = self.arguments == ArgumentProgress::Complete;
            let (len, mut end) = self.read_step(rest, character, tools);
            read_len += len;
            if !self.is_certain || is_tail {
                self.held.push_str(&rest[..len]);
            }
            self.begin_certain_call(out);
            if end.is_none() && self.held.len() > MAX_HELD_BYTES {
                end = Some(self.broken_end());
            }
            if let Some(end) = end {
                self.end_call(end, out);
                return (read_len, Some(end));
            }
        }
        (read_len, None)
    }

    /// A marker follows that is not of the object, or the answer has ended: appends what was held
    /// back. `is_cut`: the answer has ended.
    pub fn finish(&mut self, is_cut: bool, out: &mut AnswerParts) {
        if !self.is_certain {
            out.push_content(&self.held);
            return;
        }
        if !is_cut || self.arguments == ArgumentProgress::Complete {
            out.end_call();
        }
    }

    fn end_call(&mut self, end: ObjectEnd, out: &mut AnswerParts) {
        match end {
            ObjectEnd::Closed => out.end_call(),
            ObjectEnd::Broken => {
                out.end_call();
                out.push_content(&self.held);
            }
            ObjectEnd::NotCall | ObjectEnd::UnknownTool => out.push_content(&self.held),
        }
    }

    /// Begins the call once it is certain, and sends arguments.
    fn begin_certain_call(&mut self, out: &mut AnswerParts) {
        if !self.is_certain {
            let has_arguments = matches!(
                self.arguments,
                ArgumentProgress::Certain | ArgumentProgress::Complete
            );
            let Some(name) = self.name.as_ref().filter(|_| has_arguments) else {
                return;
            };
            out.begin_call(name);
            self.is_certain = true;
            self.held.clear();
        }
        out.push_arguments(&self.unsent);
        self.unsent.clear();
    }

    fn broken_end(&self) -> ObjectEnd {
        if self.is_certain {
            ObjectEnd::Broken
        } else {
            ObjectEnd::NotCall
        }
    }

    /// Reads one character, or a run of arguments.
    fn read_step(
        &mut self,
        rest: &str,
        character: char,
        tools: &CallableTools,
    ) -> (usize, Option<ObjectEnd>) {
        let character_len = character.len_utf8();
        if let ObjectState::Arguments(reader) = &mut self.state {
            let (len, step) = reader.read_run(rest, &mut self.unsent);
            let is_certain = reader.is_certain();
            return (len, self.note_arguments(step, is_certain));
        }
        if matches!(self.state, ObjectState::OtherScalar)
            && (is_json_space(character) || matches!(character, ',' | '}'))
        {
            self.state = ObjectState::BehindValue;
        }
        let end = match &mut self.state {
            ObjectState::ArgumentString(..) => self.read_argument_string(character),
            ObjectState::NullArguments(len) => {
                let is_expected = "null"[*len..].starts_with(character);
                *len += 1;
                if !is_expected {
                    Some(self.broken_end())
                } else {
                    if *len == "null".len() {
                        self.complete_empty_arguments();
                    }
                    None
                }
            }
            ObjectState::Other(scanner) => {
                let (_, is_complete) = scanner.read_run(&rest[..character_len]);
                if is_complete {
                    self.state = ObjectState::BehindValue;
                }
                None
            }
            ObjectState::Key(literal) => {
                literal.push(character);
                if !is_whole_literal(literal) {
                    None
                } else {
                    self.read_key()
                }
            }
            ObjectState::Name(literal) => {
                literal.push(character);
                if !is_whole_literal(literal) {
                    None
                } else {
                    self.read_name(tools)
                }
            }
            _ if is_json_space(character) => None,
            _ => self.read_structure(character),
        };
        (character_len, end)
    }

    /// Reads a character between keys and values, or the first one of a value.
    fn read_structure(&mut self, character: char) -> Option<ObjectEnd> {
        let next = match (&self.state, character) {
            (ObjectState::FirstKey | ObjectState::NextKey, '"') => {
                ObjectState::Key("\"".to_owned())
            }
            (ObjectState::FirstKey | ObjectState::BehindValue, '}') => return self.close_object(),
            (ObjectState::BehindValue, ',') => ObjectState::NextKey,
            (ObjectState::Colon(kind), ':') => ObjectState::Value(*kind),
            (ObjectState::Value(kind), _) => match (*kind, character) {
                (MemberKind::Name, '"') => ObjectState::Name("\"".to_owned()),
                (MemberKind::Arguments, '{') => {
                    let mut reader = ArgumentReader::default();
                    reader.read_character(character, &mut self.unsent);
                    self.arguments = ArgumentProgress::Opening;
                    ObjectState::Arguments(reader)
                }
                (MemberKind::Arguments, '"') => {
                    self.arguments = ArgumentProgress::Opening;
                    ObjectState::ArgumentString(StringDecoder::default(), ArgumentReader::default())
                }
                (MemberKind::Arguments, 'n') => ObjectState::NullArguments(1),
                (MemberKind::Other, '{' | '[' | '"') => {
                    let mut scanner = ValueScanner::default();
                    scanner.read_byte(character as u8);
                    ObjectState::Other(scanner)
                }
                (MemberKind::Other, '-' | '0'..='9' | 'a'..='z') => ObjectState::OtherScalar,
                _ => return Some(self.broken_end()),
            },
            (ObjectState::OtherScalar, '-' | '+' | '.' | '0'..='9' | 'a'..='z' | 'E') => {
                ObjectState::OtherScalar
            }
            _ => return Some(self.broken_end()),
        };
        self.state = next;
        None
    }

    fn read_key(&mut self) -> Option<ObjectEnd> {
        let ObjectState::Key(literal) = &self.state else {
            return None;
        };
        let Ok(key) = serde_json::from_str::<String>(literal) else {
            return Some(self.broken_end());
        };
        if !self.is_marked && !UNMARKED_KEYS.contains(&key.as_str()) {
            return Some(self.broken_end());
        }
        let kind = match key.as_str() {
            "name" if self.name.is_none() => MemberKind::Name,
            "arguments" | "parameters" if self.arguments == ArgumentProgress::Missing => {
                MemberKind::Arguments
            }
            _ => MemberKind::Other,
        };
        self.state = ObjectState::Colon(kind);
        None
    }

    fn read_name(&mut self, tools: &CallableTools) -> Option<ObjectEnd> {
        let ObjectState::Name(literal) = &self.state else {
            return None;
        };
        let Ok(name) = serde_json::from_str::<String>(literal) else {
            return Some(self.broken_end());
        };
        if tools.find(&name).is_none() {
            return Some(ObjectEnd::UnknownTool);
        }
        self.name = Some(name);
        self.state = ObjectState::BehindValue;
        None
    }

    fn read_argument_string(&mut self, character: char) -> Option<ObjectEnd> {
        let ObjectState::ArgumentString(decoder, reader) = &mut self.state else {
            return None;
        };
        let mut step = ArgumentStep::Open;
        let unsent = &mut self.unsent;
        let is_closed = decoder.read_character(character, &mut |decoded| {
            if step != ArgumentStep::Invalid {
                step = reader.read_character(decoded, unsent);
            }
        });
        if step == ArgumentStep::Invalid {
            return Some(self.broken_end());
        }
        let is_certain = reader.is_certain();
        let is_blank = reader.is_blank();
        if is_certain && self.arguments == ArgumentProgress::Opening {
            self.arguments = ArgumentProgress::Certain;
        }
        if !is_closed {
            return None;
        }
        if is_blank {
            self.complete_empty_arguments();
        } else if is_certain {
            self.arguments = ArgumentProgress::Complete;
            self.state = ObjectState::BehindValue;
        } else {
            return Some(self.broken_end());
        }
        None
    }

    fn note_arguments(&mut self, step: ArgumentStep, is_certain: bool) -> Option<ObjectEnd> {
        match step {
            ArgumentStep::Invalid => return Some(self.broken_end()),
            ArgumentStep::Complete => {
                self.arguments = ArgumentProgress::Complete;
                self.state = ObjectState::BehindValue;
            }
            ArgumentStep::Open if is_certain => self.arguments = ArgumentProgress::Certain,
            ArgumentStep::Open => {}
        }
        None
    }

    fn complete_empty_arguments(&mut self) {
        self.unsent.push_str("{}");
        self.arguments = ArgumentProgress::Complete;
        self.state = ObjectState::BehindValue;
    }

    /// The object's closing brace.
    fn close_object(&mut self) -> Option<ObjectEnd> {
        let is_call_without_arguments =
            self.is_marked && self.name.is_some() && self.arguments == ArgumentProgress::Missing;
        if is_call_without_arguments {
            self.complete_empty_arguments();
        }
        let is_call = self.name.is_some() && self.arguments == ArgumentProgress::Complete;
        if is_call {
            Some(ObjectEnd::Closed)
        } else {
            Some(ObjectEnd::NotCall)
        }
    }
}

/// True if a literal that begins with a quote ends with its closing one.
fn is_whole_literal(literal: &str) -> bool {
    let body = &literal[1..];
    let Some(body) = body.strip_suffix('"') else {
        return false;
    };
    let backslashes = body.bytes().rev().take_while(|byte| *byte == b'\\').count();
    backslashes % 2 == 0
}
