//! Mistral up to tokenizer version 7.
//!
//! ```text
//! [TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}, "id": "abc123def"}, …]
//! ```

use super::call_reader::CallPlaces;

pub static MISTRAL: CallPlaces = CallPlaces {
    markers: &["[TOOL_CALLS]"],
    begin_markers: 1,
    end_marker: None,
    at_start: false,
    in_lists: true,
    separators: None,
};
