//! Text to token ids and back.

mod decode;

pub use decode::TokenDecoder;
