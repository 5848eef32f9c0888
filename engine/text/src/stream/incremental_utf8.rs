//! Characters from bytes that arrive in parts.

use std::str;

/// Text of bytes that are no UTF-8.
pub(super) const REPLACEMENT: &str = "\u{fffd}";

/// UTF-8 decoder that keeps an incomplete character for the next bytes. Bytes that are no UTF-8
/// become U+FFFD where `String::from_utf8_lossy` has it for the bytes joined.
#[derive(Debug, Default)]
pub(super) struct IncrementalUtf8 {
    /// The first `pending_len` bytes begin a character.
    pending: [u8; 4],
    pending_len: usize,
}

impl IncrementalUtf8 {
    /// Calls `emit` with the text that is complete with `bytes`, in order.
    pub(super) fn push(&mut self, bytes: &[u8], emit: &mut impl FnMut(&str)) {
        let mut rest = self.complete_pending(bytes, emit);
        loop {
            let error = match str::from_utf8(rest) {
                Ok(text) => {
                    emit_text(text, emit);
                    return;
                }
                Err(error) => error,
            };
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            emit_text(str::from_utf8(valid).unwrap_or_default(), emit);
            match error.error_len() {
                Some(invalid_len) => {
                    emit(REPLACEMENT);
                    rest = &invalid[invalid_len..];
                }
                None => {
                    self.pending[..invalid.len()].copy_from_slice(invalid);
                    self.pending_len = invalid.len();
                    return;
                }
            }
        }
    }

    /// Calls `emit` with U+FFFD if the bytes so far end within a character.
    pub(super) fn finish(&mut self, emit: &mut impl FnMut(&str)) {
        if self.pending_len > 0 {
            self.pending_len = 0;
            emit(REPLACEMENT);
        }
    }

    /// Adds `bytes` to the pending ones until these are a character or cannot become one. Returns
    /// the bytes that were not used; while bytes are pending there are none.
    fn complete_pending<'a>(&mut self, bytes: &'a [u8], emit: &mut impl FnMut(&str)) -> &'a [u8] {
        let mut rest = bytes;
        while self.pending_len > 0 {
            let Some((&byte, after)) = rest.split_first() else {
                return rest;
            };
            self.pending[self.pending_len] = byte;
            match str::from_utf8(&self.pending[..=self.pending_len]) {
                Ok(character) => {
                    emit(character);
                    self.pending_len = 0;
                    rest = after;
                }
                Err(error) if error.error_len().is_none() => {
                    self.pending_len += 1;
                    rest = after;
                }
                Err(_) => {
                    // The pending bytes end here; `byte` begins something else.
                    emit(REPLACEMENT);
                    self.pending_len = 0;
                }
            }
        }
        rest
    }
}

fn emit_text(text: &str, emit: &mut impl FnMut(&str)) {
    if !text.is_empty() {
        emit(text);
    }
}
