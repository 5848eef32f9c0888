//! Tokens to text while they arrive, stop strings in that text, and the parts of an answer.
//!
//! * [`text_stream`]: text of one choice of an answer; the other modules are its parts;
//! * [`detokenizer`]: tokens to the text that is final;
//! * [`stop_strings`]: the first stop string in that text;
//! * [`incremental_utf8`]: characters from bytes that arrive in parts;
//! * [`text_offsets`]: places of tokens in the text, for logprobs;
//! * [`answer`]: reasoning, content and tool calls of one choice; `markers`, `parts`, `reasoning`
//!   and `tools` are its parts.
//!
//! Life of a choice's text:
//! 1. [`TextStream::new`] takes the prompt's ids if the answer continues the prompt's text. Such an
//!    answer (completions, /generate, a chat's continued message) is decoded with the end of the
//!    prompt as left context, so that prompt + answer is the text of both. Any other answer of a
//!    chat is decoded alone, as users of transformers do: templates end with the assistant's
//!    header, behind which no space belongs. What a grammar constrains is neither: its text is the
//!    bytes of its tokens, because the grammar has counted those.
//! 2. [`TextStream::feed`] appends the text that is final: a character with incomplete bytes is
//!    held back, and so is a tail that could begin a stop string.
//! 3. [`TextStream::finish`] appends what was held back.
//!
//! Invariants: the pieces joined equal one decode of all ids, cut at the first stop string; text
//! that was appended is never taken back; text and counts do not depend on how the ids are grouped
//! into calls.
//!
//! Exemption from the first invariant: decoders of byte-fallback tokens (`<0x0A>`) write one
//! U+FFFD of every byte in a run of byte tokens if the run as a whole is no UTF-8, also of
//! characters that were complete, and shown, before the first wrong byte arrived. Here those
//! characters stay, and the bytes after them are decoded as a run of their own.

pub mod answer;
mod detokenizer;
mod incremental_utf8;
pub mod markers;
pub mod parts;
pub mod reasoning;
mod stop_strings;
mod text_offsets;
mod text_stream;
pub mod tools;

#[cfg(test)]
pub(crate) mod tests;

pub use text_offsets::TextOffsets;
pub use text_stream::{FedTokens, TextRules, TextStream};
