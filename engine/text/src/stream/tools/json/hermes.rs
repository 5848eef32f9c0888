//! Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4.0.
//!
//! ```text
//! <tool_call>
//! {"name": "f", "arguments": {"a": "x"}}
//! </tool_call>
//! ```

use super::call_reader::CallPlaces;

pub static HERMES: CallPlaces = CallPlaces {
    markers: &["<tool_call>", "</tool_call>"],
    begin_markers: 1,
    end_marker: Some(1),
    at_start: false,
    in_lists: true,
    separators: Some(""),
};
