//! GLM-4.5 and later: a name, then keys and values.
//!
//! ```text
//! <tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>
//! ```
//!
//! GLM-4.5 and 4.6 write a newline behind the name and behind each tag, GLM-4.7 and 5 none. All
//! tags are markers, so that a value may hold any typed text. Of the markers in a value, those that
//! cannot end it where they stand are data.

use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, PatternMismatch, read_any, read_repeated,
};
use super::argument_writer::ValueForm;
use super::tag_reader::{MAX_NAME_BYTES, ParameterTag, TagSyntax};

/// Places in the markers of the row.
const CALL_BEGIN: usize = 0;
const CALL_END: usize = 1;
const KEY_BEGIN: usize = 2;
const KEY_END: usize = 3;
const VALUE_BEGIN: usize = 4;
const VALUE_END: usize = 5;

/// Tags of GLM-4.5 and later.
pub struct KeyValueTags;

impl TagSyntax for KeyValueTags {
    fn trims_newlines(&self) -> bool {
        false
    }

    fn read_call_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
        _is_at_line_start: bool,
    ) -> PatternMatch<&'a str> {
        read_repeated(cursor, &|cursor| cursor.read_marker(CALL_BEGIN))?;
        cursor.skip_space()?;
        let name = cursor.read_until(&['\r', '\n'], MAX_NAME_BYTES)?;
        cursor.skip_space()?;
        let start = cursor.clone();
        read_any(
            cursor,
            &[&|cursor| cursor.read_marker(KEY_BEGIN), &|cursor| {
                cursor.read_marker(CALL_END)
            }],
        )?;
        *cursor = start;
        let name = name.trim_ascii_end();
        if name.is_empty() {
            return Err(PatternMismatch::Different);
        }
        Ok(name)
    }

    fn read_parameter_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
    ) -> PatternMatch<ParameterTag<'a>> {
        cursor.read_marker(KEY_BEGIN)?;
        let name = cursor.read_until(&[], MAX_NAME_BYTES)?.trim_ascii();
        let both_tags = |cursor: &mut PatternCursor<'_>| {
            cursor.read_marker(KEY_END)?;
            cursor.skip_space()?;
            cursor.read_marker(VALUE_BEGIN)
        };
        read_any(
            cursor,
            &[&both_tags, &|cursor| cursor.read_marker(VALUE_BEGIN)],
        )?;
        if name.is_empty() {
            return Err(PatternMismatch::Different);
        }
        let form = ValueForm::BySchema;
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
                cursor.read_marker(CALL_END)?;
                cursor.skip_space()?;
                let end = |cursor: &mut PatternCursor<'_>| cursor.read_end();
                let next_call = |cursor: &mut PatternCursor<'_>| {
                    self.read_call_begin(cursor, false).map(|_| ())
                };
                read_any(cursor, &[&next_call, &end])
            })
        };
        read_any(
            cursor,
            &[
                &|cursor| cursor.read_marker(VALUE_END),
                &next_parameter,
                &call_end,
            ],
        )
    }

    fn read_call_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        let next_call = |cursor: &mut PatternCursor<'_>| {
            cursor.look_ahead(|cursor| cursor.read_marker(CALL_BEGIN))
        };
        read_any(
            cursor,
            &[&|cursor| cursor.read_marker(CALL_END), &next_call],
        )
    }

    fn read_block_end(&self, _cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
        Err(PatternMismatch::Different)
    }
}
