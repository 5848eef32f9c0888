//! Tokens as text.

use std::borrow::Cow;

/// Gives the text of tokens.
pub trait TokenDecoder: Send + Sync {
    /// Text of a sequence. Bytes that are no UTF-8 become U+FFFD; ids without a token have no text.
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String;

    /// Bytes that a token stands for: it may be a part of a character. Empty for ids without a token.
    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]>;

    /// True for tokens that `decode` leaves out when it skips special tokens.
    fn is_special(&self, id: u32) -> bool;

    /// True where the text of every sequence is the bytes of its tokens, joined: decoding needs no
    /// context then.
    fn is_bytewise(&self) -> bool;
}
