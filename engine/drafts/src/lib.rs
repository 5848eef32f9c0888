//! Drafted tokens of speculative decoding that need no model: what may follow a text is read from
//! texts that went the same way before.
//!
//! * [`suffix_index`]: places of a text that follow the same tokens as its end;
//! * [`answer_store`]: recent answers, of each group by itself;
//! * [`ngram`]: the n-gram drafter, which chooses among the request's own text, the answer that its
//!   client predicts, and the stored answers.
//!
//! Deterministic: no I/O, no clock, no threads, no randomness. Equal calls give equal drafts.

pub mod answer_store;
pub mod ngram;
pub mod suffix_index;

#[cfg(test)]
mod tests;

pub use ngram::{DraftStart, DrafterError, NgramDrafter};
