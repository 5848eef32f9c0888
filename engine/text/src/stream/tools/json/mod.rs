//! Formats in which calls are JSON objects with a name and arguments.
//!
//! * [`scanner`]: ends of JSON values in a growing text;
//! * [`arguments`]: the arguments of a call, as they are written;
//! * [`call_object`]: the object of one call;
//! * [`call_reader`]: the calls of an answer.

mod arguments;
mod call_object;
mod call_reader;
pub mod scanner;

pub use call_reader::JsonCallReader;
