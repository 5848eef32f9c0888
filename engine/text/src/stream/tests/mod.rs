//! Streams of text against a naive model: one decode of all ids, read character by character.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod answer_cases;
mod answers;
mod decoders;
mod families;
mod fixtures;
mod model;
mod piece_tokens;
mod stop_strings;
mod streams;
mod text_offsets;
mod vocabularies;
mod written_calls;

pub use piece_tokens::PieceTokens;
