//! Tool calls in an answer: one reader per format in which models write them.
//!
//! * [`formats`]: the table of the formats;
//! * [`reader`]: the interface of the readers;
//! * [`callable`]: the tools that an answer may call, and calls of others;
//! * [`scan`]: parts that several readers share;
//! * [`json`]: formats in which calls are JSON objects;
//! * [`headers`]: formats in which a call is a header between markers and a JSON object;
//! * [`xml`]: formats in which a call is a row of tags;
//! * [`pythonic`]: calls as Python writes them;
//! * [`gpt_oss`]: calls as messages to tools;
//! * [`new_reader`]: the reader of each format.

mod callable;
mod formats;
mod gpt_oss;
mod headers;
mod json;
mod new_reader;
mod pythonic;
mod reader;
mod scan;
mod xml;

pub use callable::{CallableTools, UnknownToolCalls};
pub use formats::{CallSyntax, IdForm, JsonCalls, ToolFamily, ToolFormat, named_formats};
#[cfg(test)]
pub(crate) use formats::{PLAIN, tool_formats};
pub use json::scanner::ValueScanner;
pub use new_reader::new_tool_reader;
pub use reader::{ToolReader, ToolSignature};
