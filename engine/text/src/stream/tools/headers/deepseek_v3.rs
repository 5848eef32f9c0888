//! DeepSeek-V3, V3-0324 and R1, and V3.1.
//!
//! ````text
//! V3:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
//!       ```json
//!       {"a": "x"}
//!       ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
//! ````
//!
//! The outer markers may be missing.

use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, match_object_begin, read_any, read_repeated,
};
use super::header_reader::{HeaderSyntax, MAX_HEADER_BYTES};

/// Places in the markers of the row.
const CALLS_BEGIN: usize = 0;
const CALL_BEGIN: usize = 1;
const SEPARATOR: usize = 2;
const CALL_END: usize = 3;
const CALLS_END: usize = 4;

/// Headers of `deepseek_v3` and `deepseek_v31`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeepseekHeaders {
    /// The name follows the separator, the object stands in a fence.
    V3,
    /// The name precedes the separator.
    V31,
}

impl HeaderSyntax for DeepseekHeaders {
    fn read_header<'a>(&self, cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str> {
        let inner = |cursor: &mut PatternCursor<'a>| {
            read_repeated(cursor, &|cursor| cursor.read_marker(CALL_BEGIN))
        };
        let outer_and_inner = |cursor: &mut PatternCursor<'a>| {
            read_repeated(cursor, &|cursor| cursor.read_marker(CALLS_BEGIN))?;
            cursor.skip_space()?;
            inner(cursor)
        };
        read_any(cursor, &[&outer_and_inner, &inner])?;
        let before_separator = cursor.read_until(&['\n'], MAX_HEADER_BYTES)?;
        cursor.read_marker(SEPARATOR)?;
        let name = match self {
            Self::V31 => before_separator,
            Self::V3 => {
                let name = cursor.read_until(&['\n', '`', '{'], MAX_HEADER_BYTES)?;
                cursor.skip_space()?;
                read_any(
                    cursor,
                    &[&|cursor| cursor.read_text("```json"), &|cursor| {
                        match_bracket(cursor)
                    }],
                )?;
                name
            }
        };
        cursor.skip_space()?;
        match_object_begin(cursor)?;
        Ok(name.trim_ascii())
    }

    fn is_call_end(&self, marker: usize) -> bool {
        matches!(marker, CALL_END | CALL_BEGIN | CALLS_END)
    }

    fn read_closing(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        cursor.skip_space()?;
        read_any(
            cursor,
            &[
                &|cursor| cursor.read_marker(CALL_END),
                &|cursor| cursor.read_marker(CALLS_END),
                &read_fence_end,
            ],
        )
    }
}

/// Reads the end of the object's fence, behind which a marker or the answer's end stands.
fn read_fence_end(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    cursor.read_text("```")?;
    let fence_end = cursor.clone();
    cursor.skip_space()?;
    read_any(
        cursor,
        &[&|cursor| cursor.read_next_marker().map(|_| ()), &|cursor| {
            cursor.read_end()
        }],
    )?;
    *cursor = fence_end;
    Ok(())
}

/// Matches the bracket of an object outside a fence, which is not read.
fn match_bracket(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let start = cursor.clone();
    cursor.read_text("{")?;
    *cursor = start;
    Ok(())
}
