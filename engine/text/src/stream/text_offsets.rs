//! Places of tokens in the text.

use super::incremental_utf8::IncrementalUtf8;

/// Places of consecutive tokens in the text that their bytes make, counted in characters.
///
/// All tokens that are parts of one character have its place. Bytes that become no character count
/// as the U+FFFD that the text has for them.
#[derive(Debug)]
pub struct TextOffsets {
    chars: usize,
    utf8: IncrementalUtf8,
}

impl TextOffsets {
    /// `start_chars`: characters before the first token.
    pub fn new(start_chars: usize) -> Self {
        Self {
            chars: start_chars,
            utf8: IncrementalUtf8::default(),
        }
    }

    /// Returns the place of the next token. `raw`: its bytes, empty if it has no text.
    pub fn place(&mut self, raw: &[u8]) -> usize {
        let mut chars = self.chars;
        let mut count_chars = |text: &str| chars += text.chars().count();
        if raw.first().is_some_and(|&byte| !is_continuation(byte)) {
            // The bytes before it are complete, or never will be.
            self.utf8.finish(&mut count_chars);
        }
        let place = chars;
        let mut count_chars = |text: &str| chars += text.chars().count();
        self.utf8.push(raw, &mut count_chars);
        self.chars = chars;
        place
    }
}

/// True if the byte continues a character of UTF-8 (RFC 3629: 10xxxxxx).
fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}
