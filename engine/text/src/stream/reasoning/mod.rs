//! Reasoning in front of an answer.
//!
//! * [`family`]: the markers between which a model reasons;
//! * [`start`]: whether an answer begins within its reasoning, from the ids of its prompt;
//! * [`reader`]: the reasoning of an answer, as it arrives.

mod family;
mod reader;
mod start;

pub use family::{MessageMarks, ReasoningFamily};
pub use reader::ReasoningReader;
pub use start::{BlockText, ReasoningStart, find_start};
