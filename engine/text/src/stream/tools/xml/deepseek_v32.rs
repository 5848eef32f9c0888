//! DeepSeek-V3.2 and V4: tags that hold the token `｜DSML｜`.
//!
//! ```text
//! <｜DSML｜function_calls>
//! <｜DSML｜invoke name="f">
//! <｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>
//! </｜DSML｜invoke>
//! </｜DSML｜function_calls>
//! ```
//!
//! V4 writes `tool_calls` for `function_calls`. The value of `string="false"` is JSON.

use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, PatternMismatch, read_any, read_repeated,
};
use super::argument_writer::ValueForm;
use super::tag_reader::{MAX_NAME_BYTES, ParameterTag, TagSyntax};

/// Places in the markers of the row.
const DSML: usize = 0;

/// Tags of `deepseek_v32`.
pub struct DsmlTags;

impl TagSyntax for DsmlTags {
    fn trims_newlines(&self) -> bool {
        false
    }

    fn read_call_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
        _is_at_line_start: bool,
    ) -> PatternMatch<&'a str> {
        let in_block = |cursor: &mut PatternCursor<'a>| {
            read_repeated(cursor, &|cursor| read_block_tag(cursor, "<"))?;
            cursor.skip_space()?;
            read_invoke(cursor)
        };
        read_any(cursor, &[&in_block, &read_invoke])
    }

    fn read_parameter_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
    ) -> PatternMatch<ParameterTag<'a>> {
        read_opening(cursor, "<", "parameter name=\"")?;
        let name = cursor.read_until(&['"'], MAX_NAME_BYTES)?;
        let form = read_any(
            cursor,
            &[
                &|cursor| {
                    cursor.read_text("\" string=\"true\">")?;
                    Ok(ValueForm::Text)
                },
                &|cursor| {
                    cursor.read_text("\" string=\"false\">")?;
                    Ok(ValueForm::Json)
                },
                &|cursor| {
                    cursor.read_text("\">")?;
                    Ok(ValueForm::BySchema)
                },
            ],
        )?;
        Ok(ParameterTag { name, form })
    }

    fn read_value_end(
        &self,
        cursor: &mut PatternCursor<'_>,
        _is_at_line_start: bool,
    ) -> PatternMatch<()> {
        let next_parameter = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| self.read_parameter_begin(cursor))
        };
        let call_end = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| {
                read_opening(cursor, "</", "invoke>")?;
                cursor.skip_space()?;
                read_any(
                    cursor,
                    &[
                        &|cursor| read_block_tag(cursor, "</"),
                        &|cursor| read_invoke(cursor).map(|_| ()),
                        &|cursor| cursor.read_end(),
                    ],
                )
            })
        };
        read_any(
            cursor,
            &[
                &|cursor| read_opening(cursor, "</", "parameter>"),
                &next_parameter,
                &call_end,
            ],
        )
    }

    fn read_call_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        let next_call = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| {
                read_any(
                    cursor,
                    &[&|cursor| read_block_tag(cursor, "</"), &|cursor| {
                        read_invoke(cursor).map(|_| ())
                    }],
                )
            })
        };
        read_any(
            cursor,
            &[&|cursor| read_opening(cursor, "</", "invoke>"), &next_call],
        )
    }

    fn read_block_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        cursor.skip_space()?;
        read_block_tag(cursor, "</")
    }
}

/// Reads `<｜DSML｜` or `</｜DSML｜`, and what follows.
fn read_opening(cursor: &mut PatternCursor<'_>, bracket: &str, rest: &str) -> PatternMatch<()> {
    cursor.read_text(bracket)?;
    cursor.read_marker(DSML)?;
    cursor.read_text(rest)
}

fn read_block_tag(cursor: &mut PatternCursor<'_>, bracket: &str) -> PatternMatch<()> {
    read_any(
        cursor,
        &[
            &|cursor| read_opening(cursor, bracket, "function_calls>"),
            &|cursor| read_opening(cursor, bracket, "tool_calls>"),
        ],
    )
}

/// Reads the begin tag of a call and returns its name.
fn read_invoke<'a>(cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str> {
    read_opening(cursor, "<", "invoke name=\"")?;
    let name = cursor.read_until(&['"'], MAX_NAME_BYTES)?;
    cursor.read_text("\">")?;
    if name.is_empty() {
        return Err(PatternMismatch::Different);
    }
    Ok(name)
}
