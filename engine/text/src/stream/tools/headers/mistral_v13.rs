//! Mistral from tokenizer version 11 on.
//!
//! ```text
//! v11: [TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": "x"}[TOOL_CALLS]g[CALL_ID]…
//! v13: [TOOL_CALLS]f[ARGS]{"a": "x"}[TOOL_CALLS]g[ARGS]{}
//! ```
//!
//! `[ARGS]` may be missing. The model's id is not read: ids are derived from the answer.

use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, PatternMismatch, match_object_begin, read_any, read_repeated,
};
use super::header_reader::{HeaderSyntax, MAX_HEADER_BYTES};

/// Places in the markers of the row.
const CALL_BEGIN: usize = 0;
const CALL_ID: usize = 1;
const ARGUMENTS_BEGIN: usize = 2;

/// Headers of `mistral_v13`.
pub struct MistralHeaders;

impl HeaderSyntax for MistralHeaders {
    fn read_header<'a>(&self, cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str> {
        read_repeated(cursor, &|cursor| cursor.read_marker(CALL_BEGIN))?;
        let name = cursor.read_until(&['{'], MAX_HEADER_BYTES)?;
        let with_id = |cursor: &mut PatternCursor<'a>| {
            cursor.read_marker(CALL_ID)?;
            cursor.read_until(&['{'], MAX_HEADER_BYTES)?;
            read_arguments_begin(cursor)
        };
        read_any(cursor, &[&with_id, &read_arguments_begin])?;
        Ok(name.trim_ascii())
    }

    fn is_call_end(&self, marker: usize) -> bool {
        marker == CALL_BEGIN
    }

    /// The next call begins with its own marker, and nothing closes the last one.
    fn read_closing(&self, _cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        Err(PatternMismatch::Different)
    }
}

/// Reads `[ARGS]`, which may be missing, and matches the beginning of the object.
fn read_arguments_begin(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let with_marker = |cursor: &mut PatternCursor<'_>| {
        cursor.read_marker(ARGUMENTS_BEGIN)?;
        cursor.skip_space()?;
        match_object_begin(cursor)
    };
    read_any(cursor, &[&with_marker, &match_object_begin])
}
