//! Phi-4-mini: a list or an object between tags. vLLM's template has `functools` and a list instead.
//!
//! ```text
//! <|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]<|/tool_call|>
//! functools[{"name": "f", "arguments": {"a": "x"}}]
//! ```

use super::call_reader::CallPlaces;

pub static PHI4: CallPlaces = CallPlaces {
    markers: &["<|tool_call|>", "functools", "<|/tool_call|>"],
    begin_markers: 2,
    end_marker: Some(2),
    at_start: false,
    in_lists: true,
    separators: None,
};
