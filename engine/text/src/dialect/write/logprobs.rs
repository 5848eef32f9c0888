//! Logprobs of tokens, in the three forms of the APIs.

use std::fmt::Write as _;

use super::json::{push_array, push_float, push_joined, push_number, push_text};
use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

/// JSON has no -inf; OpenAI writes this for an impossible token.
const IMPOSSIBLE: f64 = -9999.0;

/// Logprobs of consecutive tokens, row by row.
#[derive(Debug, Clone, Default)]
pub struct TokenLogprobs {
    pub ids: Vec<u32>,
    pub chosen: Vec<f64>,
    /// The most likely tokens at each position.
    pub top: Vec<Vec<(u32, f64)>>,
}

impl TokenLogprobs {
    pub fn push(&mut self, id: u32, chosen: f64, top: Vec<(u32, f64)>) {
        self.ids.push(id);
        self.chosen.push(chosen);
        self.top.push(top);
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub fn extend(&mut self, other: &TokenLogprobs) {
        self.ids.extend_from_slice(&other.ids);
        self.chosen.extend_from_slice(&other.chosen);
        self.top.extend_from_slice(&other.top);
    }

    fn rows(&self) -> impl Iterator<Item = (u32, f64)> {
        self.ids.iter().copied().zip(self.chosen.iter().copied())
    }
}

/// Chat: one object per token.
pub fn push_chat_logprobs(out: &mut Vec<u8>, rows: &TokenLogprobs, decoder: &dyn TokenDecoder) {
    out.extend_from_slice(b"{\"content\":");
    out.push(b'[');
    push_chat_entries(out, rows, decoder);
    out.extend_from_slice(b"]}");
}

/// The objects of chat's logprobs, joined by commas.
pub fn push_chat_entries(out: &mut Vec<u8>, rows: &TokenLogprobs, decoder: &dyn TokenDecoder) {
    push_joined(
        out,
        rows.rows().zip(&rows.top),
        |out, ((id, chosen), top)| {
            push_chat_entry(out, id, chosen, decoder);
            out.extend_from_slice(b",\"top_logprobs\":");
            push_array(out, top, |out, (id, logprob)| {
                push_chat_entry(out, *id, *logprob, decoder);
                out.push(b'}');
            });
            out.push(b'}');
        },
    );
}

/// The object of a token, without its closing brace.
fn push_chat_entry(out: &mut Vec<u8>, id: u32, logprob: f64, decoder: &dyn TokenDecoder) {
    let raw = decoder.token_bytes(id);
    out.extend_from_slice(b"{\"token\":");
    push_text(out, &String::from_utf8_lossy(&raw));
    out.extend_from_slice(b",\"logprob\":");
    push_logprob(out, logprob);
    out.extend_from_slice(b",\"bytes\":");
    push_array(out, raw.iter(), |out, byte| {
        push_number(out, u64::from(*byte))
    });
}

/// Completions: columns. `offsets` counts on from the tokens of earlier events.
pub fn push_completion_logprobs(
    out: &mut Vec<u8>,
    rows: &TokenLogprobs,
    has_top: bool,
    skips_special_tokens: bool,
    offsets: &mut TextOffsets,
    decoder: &dyn TokenDecoder,
) {
    out.extend_from_slice(b"{\"tokens\":");
    push_array(out, &rows.ids, |out, id| push_token_text(out, *id, decoder));
    out.extend_from_slice(b",\"token_logprobs\":");
    push_array(out, &rows.chosen, |out, logprob| {
        push_logprob(out, *logprob)
    });
    out.extend_from_slice(b",\"top_logprobs\":");
    if has_top {
        push_array(out, &rows.top, |out, top| {
            push_top_by_text(out, top, decoder)
        });
    } else {
        out.extend_from_slice(b"null");
    }
    out.extend_from_slice(b",\"text_offset\":");
    push_array(out, &rows.ids, |out, id| {
        let place = place_token(offsets, *id, skips_special_tokens, decoder);
        push_number(out, place as u64);
    });
    out.push(b'}');
}

/// Place of the next token of a choice in its text [characters].
pub fn place_token(
    offsets: &mut TextOffsets,
    id: u32,
    skips_special_tokens: bool,
    decoder: &dyn TokenDecoder,
) -> usize {
    if skips_special_tokens && decoder.is_special(id) {
        offsets.place(b"")
    } else {
        offsets.place(&decoder.token_bytes(id))
    }
}

/// Logprobs of a position's alternatives by text, or by bytes where another has the text already.
fn push_top_by_text(out: &mut Vec<u8>, top: &[(u32, f64)], decoder: &dyn TokenDecoder) {
    let mut entries: Vec<(String, f64)> = Vec::with_capacity(top.len());
    let has = |entries: &[(String, f64)], key: &str| entries.iter().any(|(other, _)| other == key);
    for (id, logprob) in top {
        let raw = decoder.token_bytes(*id);
        let mut key = token_key(&raw);
        if has(&entries, &key) {
            key = bytes_key(&raw);
        }
        if !has(&entries, &key) {
            entries.push((key, *logprob));
        }
    }
    out.push(b'{');
    for (place, (key, logprob)) in entries.iter().enumerate() {
        if place > 0 {
            out.push(b',');
        }
        push_text(out, key);
        out.push(b':');
        push_logprob(out, *logprob);
    }
    out.push(b'}');
}

/// Key of a token in `top_logprobs`: its text, or its bytes where they are no text alone.
fn token_key(raw: &[u8]) -> String {
    match std::str::from_utf8(raw) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes_key(raw),
    }
}

/// OpenAI's spelling of a token that is part of a character: `bytes:\xf0\x9f`.
fn bytes_key(raw: &[u8]) -> String {
    let mut key = "bytes:".to_owned();
    for byte in raw {
        write!(key, "\\x{byte:02x}").expect("writing to a String cannot fail");
    }
    key
}

/// /generate: `[logprob, token id, text]` per token.
pub fn push_triples(
    out: &mut Vec<u8>,
    rows: impl IntoIterator<Item = (u32, f64)>,
    decoder: &dyn TokenDecoder,
) {
    push_array(out, rows, |out, (id, logprob)| {
        out.push(b'[');
        push_logprob(out, logprob);
        out.push(b',');
        push_number(out, u64::from(id));
        out.push(b',');
        push_token_text(out, id, decoder);
        out.push(b']');
    });
}

/// Triples of the chosen tokens.
pub fn push_chosen_triples(out: &mut Vec<u8>, rows: &TokenLogprobs, decoder: &dyn TokenDecoder) {
    push_triples(out, rows.rows(), decoder);
}

fn push_token_text(out: &mut Vec<u8>, id: u32, decoder: &dyn TokenDecoder) {
    push_text(out, &String::from_utf8_lossy(&decoder.token_bytes(id)));
}

fn push_logprob(out: &mut Vec<u8>, value: f64) {
    // A comparison that NaN fails: it stays, and is written as null.
    push_float(
        out,
        if value < IMPOSSIBLE {
            IMPOSSIBLE
        } else {
            value
        },
    );
}
