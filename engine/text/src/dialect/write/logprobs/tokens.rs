//! Logprobs of tokens, in the three forms of the APIs.

use std::fmt::Write as _;

use serde::Deserialize;

use super::super::json::{push_array, push_float, push_joined, push_number, push_text};
use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

/// JSON has no -inf; OpenAI writes this for an impossible token.
const IMPOSSIBLE: f64 = -9999.0;

/// Names of tokens in logprobs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TokenNames {
    /// By their texts.
    #[default]
    Texts,
    /// `token_id:123` (`return_tokens_as_token_ids`).
    Ids,
}

/// Logprobs of consecutive tokens, row by row.
#[derive(Debug, Clone, Default)]
pub struct TokenLogprobs {
    pub ids: Vec<u32>,
    pub chosen: Vec<f64>,
    /// The most likely tokens at each position.
    pub top: Vec<Vec<(u32, f64)>>,
    /// The tokens that were asked for, at each position.
    pub of_ids: Vec<Vec<(u32, f64)>>,
}

impl TokenLogprobs {
    pub fn push(&mut self, id: u32, chosen: f64, top: Vec<(u32, f64)>, of_ids: Vec<(u32, f64)>) {
        self.ids.push(id);
        self.chosen.push(chosen);
        self.top.push(top);
        self.of_ids.push(of_ids);
    }

    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    pub fn extend(&mut self, other: &TokenLogprobs) {
        self.ids.extend_from_slice(&other.ids);
        self.chosen.extend_from_slice(&other.chosen);
        self.top.extend_from_slice(&other.top);
        self.of_ids.extend_from_slice(&other.of_ids);
    }

    /// Tokens were asked for by id.
    pub fn has_ids(&self) -> bool {
        self.of_ids.iter().any(|row| !row.is_empty())
    }

    /// Alternatives of each position: the tokens that were asked for take the place of the most
    /// likely ones (matches vLLM 0.33).
    fn alternatives(&self) -> impl Iterator<Item = &Vec<(u32, f64)>> {
        let both = self.top.iter().zip(&self.of_ids);
        both.map(|(top, of_ids)| if of_ids.is_empty() { top } else { of_ids })
    }

    fn rows(&self) -> impl Iterator<Item = (u32, f64)> {
        self.ids.iter().copied().zip(self.chosen.iter().copied())
    }
}

/// Chat: one object per token.
pub fn push_chat_logprobs(
    out: &mut Vec<u8>,
    rows: &TokenLogprobs,
    names: TokenNames,
    decoder: &dyn TokenDecoder,
) {
    out.extend_from_slice(b"{\"content\":");
    out.push(b'[');
    push_chat_entries(out, rows, names, decoder);
    out.extend_from_slice(b"]}");
}

/// The objects of chat's logprobs, joined by commas.
pub fn push_chat_entries(
    out: &mut Vec<u8>,
    rows: &TokenLogprobs,
    names: TokenNames,
    decoder: &dyn TokenDecoder,
) {
    push_joined(
        out,
        rows.rows().zip(rows.alternatives()),
        |out, ((id, chosen), top)| {
            push_chat_entry(out, id, chosen, names, decoder);
            out.extend_from_slice(b",\"top_logprobs\":");
            push_array(out, top, |out, (id, logprob)| {
                push_chat_entry(out, *id, *logprob, names, decoder);
                out.push(b'}');
            });
            out.push(b'}');
        },
    );
}

/// The object of a token, without its closing brace.
fn push_chat_entry(
    out: &mut Vec<u8>,
    id: u32,
    logprob: f64,
    names: TokenNames,
    decoder: &dyn TokenDecoder,
) {
    let raw = decoder.token_bytes(id);
    out.extend_from_slice(b"{\"token\":");
    push_token_text(out, id, names, decoder);
    out.extend_from_slice(b",\"logprob\":");
    push_logprob(out, logprob);
    out.extend_from_slice(b",\"bytes\":");
    push_array(out, raw.iter(), |out, byte| {
        push_number(out, u64::from(*byte))
    });
}

/// Columns of completions for a prompt: the elements of four arrays, without their brackets.
#[derive(Debug, Default)]
pub struct PromptColumns {
    pub tokens: Vec<u8>,
    pub token_logprobs: Vec<u8>,
    pub top_logprobs: Vec<u8>,
    pub text_offset: Vec<u8>,
}

/// Rules for the columns of completions.
#[derive(Debug, Clone, Copy)]
pub struct ColumnRules {
    /// Alternatives stand beside the tokens.
    pub has_top: bool,
    pub skips_special_tokens: bool,
    pub names: TokenNames,
}

/// Completions: columns. `prompt`: what stands in front of `rows`. `offsets` counts on from the
/// tokens of earlier events.
pub fn push_completion_logprobs(
    out: &mut Vec<u8>,
    prompt: &PromptColumns,
    rows: &TokenLogprobs,
    rules: ColumnRules,
    offsets: &mut TextOffsets,
    decoder: &dyn TokenDecoder,
) {
    out.extend_from_slice(b"{\"tokens\":");
    push_longer_array(out, &prompt.tokens, &rows.ids, |out, id| {
        push_token_text(out, *id, rules.names, decoder);
    });
    out.extend_from_slice(b",\"token_logprobs\":");
    push_longer_array(out, &prompt.token_logprobs, &rows.chosen, |out, logprob| {
        push_logprob(out, *logprob);
    });
    out.extend_from_slice(b",\"top_logprobs\":");
    if rules.has_top {
        let top = rows.rows().zip(rows.alternatives());
        push_longer_array(out, &prompt.top_logprobs, top, |out, (chosen, top)| {
            push_top_by_text(out, top, chosen, rules.names, decoder);
        });
    } else {
        out.extend_from_slice(b"null");
    }
    out.extend_from_slice(b",\"text_offset\":");
    push_longer_array(out, &prompt.text_offset, &rows.ids, |out, id| {
        let place = place_token(offsets, *id, rules.skips_special_tokens, decoder);
        push_number(out, place as u64);
    });
    out.push(b'}');
}

/// An array of elements that are written already, and of `items` behind them.
fn push_longer_array<T>(
    out: &mut Vec<u8>,
    written: &[u8],
    items: impl IntoIterator<Item = T>,
    push: impl FnMut(&mut Vec<u8>, T),
) {
    let mut items = items.into_iter().peekable();
    out.push(b'[');
    out.extend_from_slice(written);
    if !written.is_empty() && items.peek().is_some() {
        out.push(b',');
    }
    push_joined(out, items, push);
    out.push(b']');
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

/// Logprobs of a position's alternatives and of its chosen token by text, or by bytes where another
/// has the text already.
///
/// They are added from the most likely one on and never replaced: readers compare the largest value
/// with the chosen token's (lm-eval).
pub fn push_top_by_text(
    out: &mut Vec<u8>,
    top: &[(u32, f64)],
    chosen: (u32, f64),
    names: TokenNames,
    decoder: &dyn TokenDecoder,
) {
    let mut entries: Vec<(String, f64)> = Vec::with_capacity(top.len() + 1);
    let has = |entries: &[(String, f64)], key: &str| entries.iter().any(|(other, _)| other == key);
    let is_listed = top.iter().any(|(id, _)| *id == chosen.0);
    let all = top.iter().chain((!is_listed).then_some(&chosen));
    for (id, logprob) in all {
        let raw = decoder.token_bytes(*id);
        let mut key = match names {
            TokenNames::Texts => token_key(&raw),
            TokenNames::Ids => id_name(*id),
        };
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
        push_triple(out, id, Some(logprob), decoder);
    });
}

/// `[logprob, token id, text]`; the first token of a prompt has no logprob.
pub fn push_triple(out: &mut Vec<u8>, id: u32, logprob: Option<f64>, decoder: &dyn TokenDecoder) {
    out.push(b'[');
    match logprob {
        Some(logprob) => push_logprob(out, logprob),
        None => out.extend_from_slice(b"null"),
    }
    out.push(b',');
    push_number(out, u64::from(id));
    out.push(b',');
    push_token_text(out, id, TokenNames::Texts, decoder);
    out.push(b']');
}

/// Triples of the chosen tokens.
pub fn push_chosen_triples(out: &mut Vec<u8>, rows: &TokenLogprobs, decoder: &dyn TokenDecoder) {
    push_triples(out, rows.rows(), decoder);
}

pub fn push_token_text(out: &mut Vec<u8>, id: u32, names: TokenNames, decoder: &dyn TokenDecoder) {
    match names {
        TokenNames::Texts => push_text(out, &String::from_utf8_lossy(&decoder.token_bytes(id))),
        TokenNames::Ids => push_text(out, &id_name(id)),
    }
}

fn id_name(id: u32) -> String {
    format!("token_id:{id}")
}

pub fn push_logprob(out: &mut Vec<u8>, value: f64) {
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
