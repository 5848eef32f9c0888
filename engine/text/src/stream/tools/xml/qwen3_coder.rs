//! Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Granite 4.2.
//!
//! ```text
//! <tool_call>
//! <function=f>
//! <parameter=a>
//! x
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! `<tool_call>` may be missing if `<function=f>` stands at the start of a line: smaller models
//! forget it. The next tag ends a value or a call whose end tag is missing, if it stands where
//! the format has it. A tag in the middle of a value is data.

use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, PatternMismatch, read_any, read_repeated,
};
use super::argument_writer::ValueForm;
use super::tag_reader::{MAX_NAME_BYTES, ParameterTag, TagSyntax};

/// Places in the markers of the row.
const CALL_BEGIN: usize = 0;
const CALL_END: usize = 1;

/// Tags of `qwen3_coder`.
pub struct FunctionTags;

impl TagSyntax for FunctionTags {
    fn trims_newlines(&self) -> bool {
        true
    }

    fn read_call_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
        is_at_line_start: bool,
    ) -> PatternMatch<&'a str> {
        let at_line_start = |cursor: &mut PatternCursor<'a>| {
            if !is_at_line_start {
                return Err(PatternMismatch::Different);
            }
            read_named_tag(cursor, "<function=")
        };
        read_any(cursor, &[&read_marked_begin, &at_line_start])
    }

    fn read_parameter_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
    ) -> PatternMatch<ParameterTag<'a>> {
        let name = read_named_tag(cursor, "<parameter=")?;
        let form = ValueForm::BySchema;
        Ok(ParameterTag { name, form })
    }

    fn read_value_end(
        &self,
        cursor: &mut PatternCursor<'_>,
        is_at_line_start: bool,
    ) -> PatternMatch<()> {
        let next_parameter = |cursor: &mut PatternCursor<'_>| {
            if !is_at_line_start {
                return Err(PatternMismatch::Different);
            }
            let start = cursor.clone();
            read_named_tag(cursor, "<parameter=")?;
            *cursor = start;
            Ok(())
        };
        let function_end = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| {
                cursor.read_text("</function>")?;
                cursor.skip_space()?;
                read_any(cursor, &[&|cursor| cursor.read_marker(CALL_END), &read_end])
            })
        };
        let call_end = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| {
                cursor.read_marker(CALL_END)?;
                cursor.skip_space()?;
                let next_call =
                    |cursor: &mut PatternCursor<'_>| read_marked_begin(cursor).map(|_| ());
                read_any(cursor, &[&next_call, &read_end])
            })
        };
        read_any(
            cursor,
            &[
                &|cursor| cursor.read_text("</parameter>"),
                &next_parameter,
                &function_end,
                &call_end,
            ],
        )
    }

    fn read_call_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        let next_call = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| {
                read_any(
                    cursor,
                    &[
                        &|cursor| cursor.read_marker(CALL_BEGIN),
                        &|cursor| cursor.read_marker(CALL_END),
                        &|cursor| read_named_tag(cursor, "<function=").map(|_| ()),
                    ],
                )
            })
        };
        read_any(
            cursor,
            &[&|cursor| cursor.read_text("</function>"), &next_call],
        )
    }

    fn read_block_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        cursor.skip_space()?;
        cursor.read_marker(CALL_END)
    }
}

/// Reads `<tool_call>` and the tag behind it.
fn read_marked_begin<'a>(cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str> {
    read_repeated(cursor, &|cursor| cursor.read_marker(CALL_BEGIN))?;
    cursor.skip_space()?;
    read_named_tag(cursor, "<function=")
}

/// Reads `<tag=name>`.
fn read_named_tag<'a>(cursor: &mut PatternCursor<'a>, opening: &str) -> PatternMatch<&'a str> {
    cursor.read_text(opening)?;
    let name = cursor.read_until(&['>', '<', ' ', '\t', '\r', '\n'], MAX_NAME_BYTES)?;
    cursor.read_text(">")?;
    if name.is_empty() {
        return Err(PatternMismatch::Different);
    }
    Ok(name)
}

fn read_end(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    cursor.read_end()
}
