//! Llama 3.1 to 3.3: the answer is a call, or several; `<|python_tag|>` may be in front.
//!
//! ```text
//! {"name": "f", "parameters": {"a": "x"}}; {"name": "g", "parameters": {}}
//! ```
//!
//! A list of them is read, too, as vLLM and SGLang do.

use super::call_reader::CallPlaces;

pub static LLAMA3: CallPlaces = CallPlaces {
    markers: &["<|python_tag|>"],
    begin_markers: 1,
    end_marker: None,
    at_start: true,
    in_lists: true,
    separators: Some(";"),
};
