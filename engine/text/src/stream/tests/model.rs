//! Naive model of a stream, without state: all ids decoded at once, stop strings found by a
//! reader of one character after the other.

use crate::stream::{TextRules, TextStream};
use crate::tokenizer::TokenDecoder;
use std::sync::Arc;

/// A whole answer.
#[derive(Debug, PartialEq, Eq)]
pub struct ReadAnswer {
    pub text: String,
    pub counted: usize,
    pub matched_stop: Option<usize>,
}

/// True if the bytes end with the beginning of a character that may still become one.
pub fn ends_within_character(bytes: &[u8]) -> bool {
    (1..=bytes.len().min(3)).any(|len| {
        let tail = &bytes[bytes.len() - len..];
        std::str::from_utf8(tail)
            .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
    })
}

/// The answer for texts: `final_texts[n]` is the text that is final with the first n tokens, the
/// last entry the text at the end, with what was held back.
pub fn read_answer(rules: &TextRules, final_texts: &[String]) -> ReadAnswer {
    let whole = final_texts.last().unwrap();
    let tokens = final_texts.len() - 2;
    let unread = (rules.min_tokens as usize).min(tokens);
    let is_searched = tokens > unread;
    let unread_len = final_texts[unread].len();
    let ends = whole
        .char_indices()
        .map(|(start, character)| start + character.len_utf8())
        .filter(|&end| is_searched && end > unread_len);
    for end in ends {
        let searched = &whole[..end];
        let found = (0..rules.stops.len())
            .filter(|&stop| !rules.stops[stop].is_empty() && searched.ends_with(&rules.stops[stop]))
            .max_by_key(|&stop| (rules.stops[stop].len(), std::cmp::Reverse(stop)));
        let Some(stop) = found else {
            continue;
        };
        let shown = if rules.include_stop {
            end
        } else {
            end - rules.stops[stop].len()
        };
        let counted = (0..=tokens)
            .find(|&count| final_texts[count].len() >= end)
            .unwrap_or(tokens);
        return ReadAnswer {
            text: whole[..shown].to_owned(),
            counted,
            matched_stop: Some(stop),
        };
    }
    ReadAnswer {
        text: whole.clone(),
        counted: tokens,
        matched_stop: None,
    }
}

/// Feeds `ids` in groups of the given sizes, in turn, and ends the answer as a caller does.
pub fn stream_answer(
    decoder: &dyn TokenDecoder,
    rules: &TextRules,
    prompt: &[u32],
    ids: &[u32],
    group_sizes: &[usize],
) -> (ReadAnswer, Vec<String>) {
    let mut stream = TextStream::new(Arc::new(rules.clone()), decoder, prompt);
    let mut text = String::new();
    let mut counted = 0;
    let mut pieces = Vec::new();
    let mut rest = ids;
    let mut sizes = group_sizes.iter().cycle();
    while !rest.is_empty() {
        let size = *sizes.next().unwrap();
        let (group, after) = rest.split_at(size.min(rest.len()));
        rest = after;
        let mut piece = String::new();
        let fed = stream.feed(decoder, group, &mut piece);
        text += &piece;
        pieces.push(piece);
        counted += fed.counted;
        if fed.matched_stop.is_some() {
            let answer = ReadAnswer {
                text,
                counted,
                matched_stop: fed.matched_stop,
            };
            return (answer, pieces);
        }
    }
    let mut piece = String::new();
    let matched_stop = stream.finish(decoder, &mut piece);
    text += &piece;
    pieces.push(piece);
    let answer = ReadAnswer {
        text,
        counted,
        matched_stop,
    };
    (answer, pieces)
}
