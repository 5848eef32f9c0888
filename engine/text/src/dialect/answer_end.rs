//! Usage that a worker counted, read from the end of its answer without parsing it.
//!
//! Engines write `"prompt_tokens":12` and the like near the end: in OpenAI's `usage`, or in
//! /generate's `meta_info`. The names are looked for as bytes, last one first. Text that the model
//! wrote cannot be mistaken for them: inside a JSON string the quotes are escaped.

use bytes::Bytes;
use router_core::TokenUsage;

/// How much of an answer's end is looked at [bytes]: a usage object is about 200, an event of
/// /generate about 400 and its text.
const LOOKED_AT: usize = 4096;

/// The usage in the last pieces of an answer, if any. Cost: one copy and a few scans of at most
/// `LOOKED_AT` bytes.
pub fn usage_in<'a>(pieces: impl DoubleEndedIterator<Item = &'a Bytes>) -> Option<TokenUsage> {
    let mut last = Vec::new();
    let mut len = 0;
    for piece in pieces.rev() {
        let part = &piece[piece.len().saturating_sub(LOOKED_AT - len)..];
        len += part.len();
        last.push(part);
        if len >= LOOKED_AT {
            break;
        }
    }
    let tail: Vec<u8> = last.into_iter().rev().flatten().copied().collect();
    Some(TokenUsage {
        prompt_tokens: number(&tail, b"\"prompt_tokens\":")?,
        cached_tokens: number(&tail, b"\"cached_tokens\":"),
        completion_tokens: number(&tail, b"\"completion_tokens\":"),
    })
}

/// The number behind the last `name` in `text`; `None` too if it is no whole number.
fn number(text: &[u8], name: &[u8]) -> Option<u32> {
    let at = (0..=text.len().checked_sub(name.len())?)
        .rev()
        .find(|at| text[*at] == b'"' && text[*at..].starts_with(name))?;
    let value = text[at + name.len()..].trim_ascii_start();
    let digits = value.iter().take_while(|b| b.is_ascii_digit()).count();
    std::str::from_utf8(&value[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage_of(pieces: &[&str]) -> Option<TokenUsage> {
        let pieces: Vec<Bytes> = pieces
            .iter()
            .map(|piece| Bytes::copy_from_slice(piece.as_bytes()))
            .collect();
        usage_in(pieces.iter())
    }

    #[test]
    fn both_dialects_are_read() {
        let openai = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\": 70,\"completion_tokens\":5,\"total_tokens\":75,\
            \"prompt_tokens_details\":{\"cached_tokens\":64}}}\n\ndata: [DONE]\n\n";
        let usage = TokenUsage {
            prompt_tokens: 70,
            cached_tokens: Some(64),
            completion_tokens: Some(5),
        };
        assert_eq!(usage_of(&[openai]), Some(usage));
        let (a, b) = openai.split_at(60); // a name cut in two
        assert_eq!(usage_of(&["data: {}\n\n", a, b]), Some(usage));
        let native = "{\"text\":\"x\",\"meta_info\":{\"prompt_tokens\":9,\"completion_tokens\":1,\"cached_tokens\":0}}";
        let usage = usage_of(&[native]);
        assert_eq!(
            usage.map(|u| (u.prompt_tokens, u.cached_tokens)),
            Some((9, Some(0)))
        );
        assert_eq!(
            usage_of(&["{\"usage\":{\"prompt_tokens\":9}}"]).map(|u| u.cached_tokens),
            Some(None)
        );
    }

    #[test]
    fn text_of_the_model_and_odd_values_are_not_taken_for_counts() {
        assert_eq!(
            usage_of(&["{\"content\":\"\\\"prompt_tokens\\\":5\"}"]),
            None
        );
        assert_eq!(usage_of(&["{\"usage\":{\"prompt_tokens\":null}}"]), None);
        assert_eq!(
            usage_of(&["{\"usage\":{\"prompt_tokens\":99999999999}}"]),
            None
        );
        assert_eq!(usage_of(&[""]), None);
        // The last one counts, and only the end is looked at.
        let far = format!("{{\"prompt_tokens\":1}}{}", " ".repeat(LOOKED_AT));
        assert_eq!(usage_of(&[&far]), None);
        let two = "{\"prompt_tokens\":1}{\"prompt_tokens\":2}";
        assert_eq!(usage_of(&[two]).map(|u| u.prompt_tokens), Some(2));
    }
}
