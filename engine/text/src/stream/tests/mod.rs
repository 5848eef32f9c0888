//! Streams of text against a naive model: one decode of all ids, read character by character.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod decoders;
mod model;
mod stop_strings;
mod streams;
mod text_offsets;
