//! Tokens to the text that is final.

use super::incremental_utf8::{IncrementalUtf8, REPLACEMENT};
use crate::tokenizer::TokenDecoder;

/// Taken of a prompt's end as left context: decoders look back one token, more if it has no text.
const CONTEXT_TOKENS: usize = 8;
/// Longest left context, where the tokens before have no text.
const MAX_CONTEXT_TOKENS: usize = 64;
/// A character is at most four bytes, so at most four byte tokens; more held tokens are bytes that
/// never become one.
const MAX_HELD_TOKENS: usize = 4;
/// Held tokens after which their text is taken as final: endless garbage costs linear time, and its
/// last character may be wrong.
const MAX_GARBAGE_TOKENS: usize = 64;

/// Incremental decoding: every token is fed once, and text comes out when it is final.
#[derive(Debug)]
pub(super) enum Detokenizer {
    /// The bytes of tokens, joined, are the text: no context, no call of `decode`.
    Bytewise(BytewiseDetokenizer),
    /// Tokens are decoded together with those before them.
    Window(WindowDetokenizer),
}

impl Detokenizer {
    /// `prompt`: ids that the text continues.
    pub(super) fn new(
        decoder: &dyn TokenDecoder,
        skip_special_tokens: bool,
        prompt: &[u32],
    ) -> Self {
        if decoder.is_bytewise() {
            return Self::Bytewise(BytewiseDetokenizer::new(skip_special_tokens));
        }
        Self::Window(WindowDetokenizer::new(decoder, skip_special_tokens, prompt))
    }

    /// Appends the text that is final with `id`.
    ///
    /// `is_counted`: a grammar has counted the bytes of the token. They are its text then, also
    /// where a decoder drops the space that a text begins with.
    pub(super) fn feed(
        &mut self,
        decoder: &dyn TokenDecoder,
        id: u32,
        is_counted: bool,
        out: &mut String,
    ) {
        match self {
            Self::Bytewise(detokenizer) => detokenizer.feed(decoder, id, out),
            Self::Window(detokenizer) => detokenizer.feed(decoder, id, is_counted, out),
        }
    }

    /// Appends the rest, including bytes that never became a character.
    pub(super) fn flush(&mut self, decoder: &dyn TokenDecoder, out: &mut String) {
        match self {
            Self::Bytewise(detokenizer) => detokenizer.flush(out),
            Self::Window(detokenizer) => detokenizer.flush(decoder, out),
        }
    }
}

/// Decoding for decoders with [`TokenDecoder::is_bytewise`]. Half a character at the end of the
/// prompt is no part of the answer's first character.
#[derive(Debug)]
pub(super) struct BytewiseDetokenizer {
    skip_special_tokens: bool,
    utf8: IncrementalUtf8,
}

impl BytewiseDetokenizer {
    fn new(skip_special_tokens: bool) -> Self {
        Self {
            skip_special_tokens,
            utf8: IncrementalUtf8::default(),
        }
    }

    fn feed(&mut self, decoder: &dyn TokenDecoder, id: u32, out: &mut String) {
        if self.skip_special_tokens && decoder.is_special(id) {
            return;
        }
        let bytes = decoder.token_bytes(id);
        self.utf8.push(&bytes, &mut |text| out.push_str(text));
    }

    fn flush(&mut self, out: &mut String) {
        self.utf8.finish(&mut |text| out.push_str(text));
    }
}

/// Decoding with a window over the ids.
///
/// The window begins with tokens whose text is out and that serve as left context (decoders treat
/// the first token of a sequence specially: SentencePiece drops its space). The tokens behind them
/// are held: their text may change with the next token.
///
/// ```text
/// ids     context            | held
///         0                  context_len          ids.len()
/// text    context_text       | held_shown_len bytes are out, then the rest
/// ```
#[derive(Debug)]
pub(super) struct WindowDetokenizer {
    skip_special_tokens: bool,
    ids: Vec<u32>,
    context_len: usize,
    context_text: String,
    held_shown_len: usize,
}

impl WindowDetokenizer {
    fn new(decoder: &dyn TokenDecoder, skip_special_tokens: bool, prompt: &[u32]) -> Self {
        let (context, context_text) = find_left_context(decoder, skip_special_tokens, prompt);
        Self {
            skip_special_tokens,
            ids: context.to_vec(),
            context_len: context.len(),
            context_text,
            held_shown_len: 0,
        }
    }

    fn feed(&mut self, decoder: &dyn TokenDecoder, id: u32, is_counted: bool, out: &mut String) {
        let bytes = decoder.token_bytes(id);
        // The decoder leaves it out anyway; here it would count as a held token or as context.
        let is_skipped = self.skip_special_tokens && decoder.is_special(id);
        if is_skipped || bytes.is_empty() {
            return;
        }
        self.ids.push(id);
        let begins_text = self.context_text.is_empty() && self.held_shown_len == 0;
        if is_counted
            && begins_text
            && self.ids.len() == self.context_len + 1
            && let Ok(text) = std::str::from_utf8(&bytes)
        {
            out.push_str(text);
            let text = self.decode(decoder, &self.ids);
            self.take_held_as_context(decoder, text);
            return;
        }
        let text = self.decode_window(decoder);
        let held_text = &text[self.context_text.len()..];
        let held_tokens = self.ids.len() - self.context_len;
        if !held_text.ends_with(REPLACEMENT) || held_tokens > MAX_GARBAGE_TOKENS {
            out.push_str(text_from(held_text, self.held_shown_len));
            self.take_held_as_context(decoder, text);
            return;
        }
        // U+FFFD at the end may be the first bytes of a character.
        let final_text = if held_tokens > MAX_HELD_TOKENS {
            without_incomplete_end(held_text)
        } else {
            held_text.trim_end_matches(REPLACEMENT)
        };
        out.push_str(text_from(final_text, self.held_shown_len));
        self.held_shown_len = self.held_shown_len.max(final_text.len());
    }

    fn flush(&mut self, decoder: &dyn TokenDecoder, out: &mut String) {
        if self.ids.len() == self.context_len {
            return;
        }
        let text = self.decode_window(decoder);
        let held_text = &text[self.context_text.len()..];
        out.push_str(text_from(held_text, self.held_shown_len));
        self.held_shown_len = held_text.len();
    }

    /// Text of the window; it starts with `context_text`.
    ///
    /// A decoder that takes a context's text back gets none: byte-fallback decoders give up a whole
    /// run of bytes if one of them is wrong.
    fn decode_window(&mut self, decoder: &dyn TokenDecoder) -> String {
        let text = self.decode(decoder, &self.ids);
        if text.starts_with(&self.context_text) {
            return text;
        }
        self.ids.drain(..self.context_len);
        self.context_len = 0;
        self.context_text.clear();
        self.decode(decoder, &self.ids)
    }

    /// The text of the held tokens is out: they are the left context of the next ones. `text`: of
    /// the whole window.
    fn take_held_as_context(&mut self, decoder: &dyn TokenDecoder, text: String) {
        self.held_shown_len = 0;
        let held_alone = self.decode(decoder, &self.ids[self.context_len..]);
        if !held_alone.is_empty() {
            self.ids.drain(..self.context_len);
            self.context_text = held_alone;
        } else if self.ids.len() <= MAX_CONTEXT_TOKENS {
            // Tokens without text are no context: the next one would begin a text.
            self.context_text = text;
        } else {
            self.ids.truncate(MAX_CONTEXT_TOKENS / 2);
            self.context_text = self.decode(decoder, &self.ids);
        }
        self.context_len = self.ids.len();
    }

    fn decode(&self, decoder: &dyn TokenDecoder, ids: &[u32]) -> String {
        decoder.decode(ids, self.skip_special_tokens)
    }
}

/// Returns the shortest end of `prompt` that has text, in steps of `CONTEXT_TOKENS`, and that text.
///
/// An end that is half a character is no context: its other half belongs to the answer.
fn find_left_context<'a>(
    decoder: &dyn TokenDecoder,
    skip_special_tokens: bool,
    prompt: &'a [u32],
) -> (&'a [u32], String) {
    for len in (CONTEXT_TOKENS..=MAX_CONTEXT_TOKENS).step_by(CONTEXT_TOKENS) {
        let context = &prompt[prompt.len().saturating_sub(len)..];
        let text = decoder.decode(context, skip_special_tokens);
        let has_whole_characters = !text.ends_with(REPLACEMENT);
        let is_longest = context.len() == prompt.len() || len == MAX_CONTEXT_TOKENS;
        if has_whole_characters && (is_longest || !text.is_empty()) {
            return (context, text);
        }
        if is_longest {
            break;
        }
    }
    (&[], String::new())
}

/// `text` without the U+FFFD at its end that the bytes of an incomplete character may have become:
/// one for each byte, all but the last of the character.
fn without_incomplete_end(text: &str) -> &str {
    let mut rest = text;
    for _ in 1..MAX_HELD_TOKENS {
        rest = rest.strip_suffix(REPLACEMENT).unwrap_or(rest);
    }
    rest
}

/// `text` without its first `len` bytes; `len` is rounded up to a character's end.
fn text_from(text: &str, len: usize) -> &str {
    (len..text.len())
        .find_map(|start| text.get(start..))
        .unwrap_or_default()
}
