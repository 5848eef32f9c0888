//! The parts of an answer, as its tokens arrive.
//!
//! * [`format`]: how a model writes reasoning and tool calls;
//! * [`detection`]: the format of a checkpoint, from its template and vocabulary;
//! * [`model_types`]: the same from its `model_type`, where the template names none;
//! * [`lexeme_reader`]: reasoning, content and calls, from text and markers;
//! * [`content_stage`]: stop strings in the content, and white space around calls;
//! * [`answer_reader`]: all of it, for one choice of an answer.

mod answer_reader;
mod content_stage;
mod detection;
mod format;
mod lexeme_reader;
mod model_types;

pub use answer_reader::AnswerReader;
pub use detection::{CheckpointFacts, ParserChoice, detect_format};
pub use format::AnswerFormat;
pub use lexeme_reader::ReaderOptions;
