//! Models without markers: the answer is one call or a list of calls.
//!
//! ```text
//! {"name": "f", "arguments": {"a": "x"}}
//! ```

use super::call_reader::CallPlaces;

pub static UNMARKED: CallPlaces = CallPlaces {
    markers: &[],
    begin_markers: 0,
    end_marker: None,
    at_start: true,
    in_lists: true,
    separators: None,
};
