//! Kimi K2: the name of a call stands in its id.
//!
//! ```text
//! <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "x"}
//! <|tool_call_end|><|tool_calls_section_end|>
//! ```
//!
//! The markers of the section may be missing.

use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, match_object_begin, read_any, read_repeated,
};
use super::header_reader::{HeaderSyntax, MAX_HEADER_BYTES};

/// Places in the markers of the row.
const SECTION_BEGIN: usize = 0;
const CALL_BEGIN: usize = 1;
const ARGUMENT_BEGIN: usize = 2;
const CALL_END: usize = 3;
const SECTION_END: usize = 4;

/// Headers of `kimi_k2`.
pub struct KimiHeaders;

impl HeaderSyntax for KimiHeaders {
    fn read_header<'a>(&self, cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str> {
        let inner = |cursor: &mut PatternCursor<'a>| {
            read_repeated(cursor, &|cursor| cursor.read_marker(CALL_BEGIN))
        };
        let outer_and_inner = |cursor: &mut PatternCursor<'a>| {
            read_repeated(cursor, &|cursor| cursor.read_marker(SECTION_BEGIN))?;
            cursor.skip_space()?;
            inner(cursor)
        };
        read_any(cursor, &[&outer_and_inner, &inner])?;
        let id = cursor.read_until(&[], MAX_HEADER_BYTES)?;
        cursor.read_marker(ARGUMENT_BEGIN)?;
        cursor.skip_space()?;
        match_object_begin(cursor)?;
        Ok(name_in_id(id.trim_ascii()))
    }

    fn is_call_end(&self, marker: usize) -> bool {
        matches!(marker, CALL_END | CALL_BEGIN | SECTION_END)
    }

    fn read_closing(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        cursor.skip_space()?;
        read_any(
            cursor,
            &[&|cursor| cursor.read_marker(CALL_END), &|cursor| {
                cursor.read_marker(SECTION_END)
            }],
        )
    }
}

/// Name in an id: `f` in `functions.f:0`.
fn name_in_id(id: &str) -> &str {
    let numbered = id.strip_prefix("functions.").unwrap_or(id);
    match numbered.rsplit_once(':') {
        Some((name, _)) => name,
        None => numbered,
    }
}
