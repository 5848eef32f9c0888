//! Answers that an engine's front is giving: messages of ranks in, HTTP chunks out.
//!
//! 1. The front opens an answer with an [`AnswerSpec`] once its items are on their ranks;
//! 2. every message with the tokens of a step goes to [`AnswerTable::feed`] as it came; a
//!    [`FedBatch`] comes back: bytes for each connection, and what the front must know;
//! 3. an answer whose client reads slowly is held: its output gathers until it is released;
//! 4. the front closes it, after its end or before.
//!
//! Invariants: a choice ends once; after its end its rows are ignored; the events of a stream do
//! not depend on the steps in which its tokens came, apart from where one ends and the next begins.

mod answer;
mod choice;
mod gap_histogram;
mod table;
mod token_batch;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod held_token_tests;

pub use crate::dialect::write::AnswerCounts;
pub use crate::dialect::write::{AnswerSpec, ChoiceSpec};
pub use gap_histogram::GapHistogram;
pub use table::{AnswerError, AnswerPanic, AnswerTable, FailedAnswer, FedBatch, FirstToken};
pub use token_batch::{BatchError, FirstTokenStages, PulledPages};
