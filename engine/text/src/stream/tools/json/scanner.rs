//! Ends of JSON values in a growing text.

/// Follows strings, escapes and brackets of a JSON value, byte by byte. Brackets of both kinds
/// count alike: a text that is no JSON is followed, too.
#[derive(Debug, Clone, Copy, Default)]
pub struct ValueScanner {
    depth: usize,
    is_in_string: bool,
    is_escaped: bool,
}

impl ValueScanner {
    pub fn is_in_string(&self) -> bool {
        self.is_in_string
    }

    /// Returns true if the value ends with this byte: an object, an array or a string.
    pub fn read_byte(&mut self, byte: u8) -> bool {
        if self.is_in_string {
            self.read_string_byte(byte);
            return !self.is_in_string && self.depth == 0;
        }
        match byte {
            b'"' => self.is_in_string = true,
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                return self.depth == 0;
            }
            _ => {}
        }
        false
    }

    fn read_string_byte(&mut self, byte: u8) {
        if self.is_escaped {
            self.is_escaped = false;
            return;
        }
        match byte {
            b'\\' => self.is_escaped = true,
            b'"' => self.is_in_string = false,
            _ => {}
        }
    }

    /// Reads up to the end of the value. Returns the length read, and true if the value ends there.
    pub fn read_run(&mut self, text: &str) -> (usize, bool) {
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            if self.read_byte(byte) {
                return (index + 1, true);
            }
        }
        (text.len(), false)
    }
}

/// True for the white space of JSON.
pub fn is_json_space(character: char) -> bool {
    matches!(character, ' ' | '\t' | '\n' | '\r')
}
