//! The arguments of a call, as the model writes them.

use super::scanner::{ValueScanner, is_json_space};

/// Outcome of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArgumentStep {
    Open,
    Complete,
    /// The text is not the beginning of an object: neither `{"` nor `{}`.
    Invalid,
}

/// Reads an object of arguments, and keeps its text for the caller.
#[derive(Debug, Default)]
pub struct ArgumentReader {
    start: ObjectStart,
    scanner: ValueScanner,
    is_complete: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum ObjectStart {
    #[default]
    Blank,
    Brace,
    /// `{"` or `{}` is there.
    Certain,
}

impl ArgumentReader {
    /// True once the text is the beginning of an object.
    pub fn is_certain(&self) -> bool {
        self.start == ObjectStart::Certain
    }

    /// True while there is nothing but white space.
    pub fn is_blank(&self) -> bool {
        self.start == ObjectStart::Blank
    }

    /// True within a string of the object.
    pub fn is_in_string(&self) -> bool {
        self.scanner.is_in_string()
    }

    /// Reads up to the end of the object, or one character of its beginning. Appends the text of
    /// the object to `out`. Returns the length read.
    pub fn read_run(&mut self, text: &str, out: &mut String) -> (usize, ArgumentStep) {
        if self.is_certain() && !self.is_complete {
            let (len, is_complete) = self.scanner.read_run(text);
            out.push_str(&text[..len]);
            self.is_complete = is_complete;
            return (len, self.step());
        }
        let Some(character) = text.chars().next() else {
            return (0, self.step());
        };
        let step = self.read_character(character, out);
        (character.len_utf8(), step)
    }

    /// Reads one character. White space around the object is left out; other text behind it is
    /// passed through.
    pub fn read_character(&mut self, character: char, out: &mut String) -> ArgumentStep {
        let is_space = is_json_space(character);
        let is_expected = match self.start {
            ObjectStart::Blank if is_space => return ArgumentStep::Open,
            ObjectStart::Blank => character == '{',
            ObjectStart::Brace => is_space || matches!(character, '"' | '}'),
            ObjectStart::Certain => true,
        };
        if !is_expected {
            return ArgumentStep::Invalid;
        }
        if self.is_complete {
            if !is_space {
                out.push(character);
            }
            return ArgumentStep::Complete;
        }
        out.push(character);
        self.start = match (self.start, character) {
            (ObjectStart::Blank, _) => ObjectStart::Brace,
            (ObjectStart::Brace, '"' | '}') => ObjectStart::Certain,
            (start, _) => start,
        };
        // Brackets and quotes are ASCII; bytes of other characters change nothing.
        let byte = u8::try_from(character).unwrap_or_default();
        self.is_complete = self.scanner.read_byte(byte);
        self.step()
    }

    fn step(&self) -> ArgumentStep {
        if self.is_complete {
            ArgumentStep::Complete
        } else {
            ArgumentStep::Open
        }
    }
}

/// Decodes a JSON string as its characters arrive.
#[derive(Debug, Default)]
pub struct StringDecoder {
    escape: EscapeState,
    /// First half of a character beyond the basic plane.
    high_surrogate: Option<u32>,
}

#[derive(Debug, Default)]
enum EscapeState {
    #[default]
    None,
    Backslash,
    Unicode {
        value: u32,
        digits: u8,
    },
}

impl StringDecoder {
    /// Calls `emit` with the characters that are complete. Returns true at the closing quote.
    ///
    /// Escapes that JSON does not have stand for themselves; half a character is U+FFFD.
    pub fn read_character(&mut self, character: char, emit: &mut dyn FnMut(char)) -> bool {
        match &mut self.escape {
            EscapeState::None => match character {
                '\\' => self.escape = EscapeState::Backslash,
                _ => {
                    self.flush(emit);
                    if character == '"' {
                        return true;
                    }
                    emit(character);
                }
            },
            EscapeState::Backslash => self.read_escape(character, emit),
            EscapeState::Unicode { value, digits } => {
                let Some(digit) = character.to_digit(16) else {
                    self.escape = EscapeState::None;
                    self.flush(emit);
                    emit(char::REPLACEMENT_CHARACTER);
                    return self.read_character(character, emit);
                };
                *value = 16 * *value + digit;
                *digits += 1;
                if *digits == 4 {
                    let unit = *value;
                    self.escape = EscapeState::None;
                    self.read_unit(unit, emit);
                }
            }
        }
        false
    }

    /// Calls `emit` for half a character.
    pub fn flush(&mut self, emit: &mut dyn FnMut(char)) {
        if self.high_surrogate.take().is_some() {
            emit(char::REPLACEMENT_CHARACTER);
        }
    }

    fn read_escape(&mut self, character: char, emit: &mut dyn FnMut(char)) {
        self.escape = EscapeState::None;
        if character == 'u' {
            self.escape = EscapeState::Unicode {
                value: 0,
                digits: 0,
            };
            return;
        }
        self.flush(emit);
        match character {
            'n' => emit('\n'),
            't' => emit('\t'),
            'r' => emit('\r'),
            'b' => emit('\u{8}'),
            'f' => emit('\u{c}'),
            '"' | '\\' | '/' => emit(character),
            _ => {
                emit('\\');
                emit(character);
            }
        }
    }

    /// Reads a UTF-16 code unit.
    fn read_unit(&mut self, unit: u32, emit: &mut dyn FnMut(char)) {
        if let Some(high) = self.high_surrogate
            && (0xdc00..0xe000).contains(&unit)
        {
            self.high_surrogate = None;
            let code = 0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00);
            emit(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            return;
        }
        self.flush(emit);
        if (0xd800..0xdc00).contains(&unit) {
            self.high_surrogate = Some(unit);
            return;
        }
        emit(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Decoded body of a literal, with its closing quote.
    fn decode(body: &str) -> (String, bool) {
        let mut decoder = StringDecoder::default();
        let mut text = String::new();
        let mut is_closed = false;
        for character in body.chars() {
            is_closed |= decoder.read_character(character, &mut |decoded| text.push(decoded));
        }
        (text, is_closed)
    }

    proptest! {
        #[test]
        fn literals_are_decoded_as_serde_decodes_them(text in "(\\PC|[\n\t\r\u{8}\u{c}\"\\\\/])*", escapes in any::<bool>()) {
            let mut literal = serde_json::to_string(&text).unwrap();
            if escapes {
                let units = literal.encode_utf16().map(|unit| match u8::try_from(unit) {
                    Ok(byte) if byte.is_ascii() => char::from(byte).to_string(),
                    _ => format!("\\u{unit:04X}"),
                });
                literal = units.collect();
            }
            let expected: String = serde_json::from_str(&literal).unwrap();
            prop_assert_eq!(decode(&literal[1..]), (expected, true));
        }
    }

    #[test]
    fn wrong_escapes_are_text() {
        let replacement = "\u{fffd}";
        for (body, expected) in [
            (r#"\x"#, "\\x"),
            (r#"\ud83da"#, &format!("{replacement}a")),
            (r#"\ud83d\n"#, &format!("{replacement}\n")),
            (r#"\ud83d\ud83d\ude00"#, &format!("{replacement}😀")),
            (r#"\ude00"#, replacement),
            (r#"\u12g"#, &format!("{replacement}g")),
        ] {
            assert_eq!(decode(body), (expected.to_owned(), false), "{body}");
            let closed = format!("{body}\"");
            assert_eq!(decode(&closed), (expected.to_owned(), true), "{body}");
        }
        assert_eq!(decode(r#"\ud83d""#), (replacement.to_owned(), true));
    }
}
