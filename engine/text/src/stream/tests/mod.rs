//! Streams of text against a naive model: one decode of all ids, read character by character.

mod decoders;
mod model;
mod streams;
mod text_offsets;
