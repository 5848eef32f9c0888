//! Granite 3.0 (`<|tool_call|>`) and 3.1 to 3.3 (`<tool_call>`): no end marker.
//!
//! ```text
//! <|tool_call|>[{"name": "f", "arguments": {"a": "x"}}, …]
//! ```

use super::call_reader::CallPlaces;

pub static GRANITE: CallPlaces = CallPlaces {
    markers: &["<|tool_call|>", "<tool_call>"],
    begin_markers: 2,
    end_marker: None,
    at_start: false,
    in_lists: true,
    separators: None,
};
