//! Formats in which calls are JSON objects with a name and arguments.
//!
//! * [`scanner`]: ends of JSON values in a growing text;
//! * [`arguments`]: the arguments of a call, as they are written;
//! * [`call_object`]: the object of one call;
//! * [`call_reader`]: the calls of an answer;
//! * `hermes`, `llama3`, `mistral`, `granite`, `phi4`, `unmarked`: where calls are, per format.

mod arguments;
mod call_object;
mod call_reader;
mod granite;
mod hermes;
mod llama3;
mod mistral;
mod phi4;
pub mod scanner;
mod unmarked;

pub use call_reader::JsonCallReader;
pub use granite::GRANITE;
pub use hermes::HERMES;
pub use llama3::LLAMA3;
pub use mistral::MISTRAL;
pub use phi4::PHI4;
pub use unmarked::UNMARKED;
