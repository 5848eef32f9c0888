//! Patterns of a list of calls.
//!
//! ```text
//! [f(a="x"), g()]
//! <|python_start|>[f(a="x")]<|python_end|>
//! <function_calls>
//! f(a="x")
//! g()
//! </function_calls>
//! ```

use super::super::formats::ToolFamily;
use super::super::scan::held_lexemes::{
    PatternCursor, PatternMatch, PatternMismatch, read_any, read_repeated,
};
use super::super::scan::python_literal::python_literal_to_json;
use super::call_arguments::is_argument_name_char;
use super::expression_scanner::ExpressionScanner;

/// Places in the markers of the row.
pub const PYTHON_START: usize = 0;
pub const PYTHON_END: usize = 1;
pub const BLOCK_BEGIN: usize = 2;
pub const BLOCK_END: usize = 3;

/// Longest name of a tool or an argument [bytes].
const MAX_NAME_BYTES: usize = 256;
/// Longest positional argument that may begin a call's arguments [bytes].
const MAX_FIRST_ARGUMENT_BYTES: usize = 4096;

/// Texts of the markers.
pub fn markers() -> &'static [&'static str] {
    ToolFamily::Pythonic.format().markers
}

/// Form of a list of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListForm {
    /// In brackets, with commas.
    Bracketed,
    /// Between markers alone, with commas or newlines.
    Bare,
}

/// Beginning of a list: its form, and the name of its first call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListBegin<'a> {
    pub form: ListForm,
    pub name: &'a str,
}

/// Reads what begins a list, up to the parenthesis of its first call. Without a marker a list
/// begins at the start of a line.
pub fn read_list_begin<'a>(
    cursor: &mut PatternCursor<'a>,
    is_at_line_start: bool,
) -> PatternMatch<ListBegin<'a>> {
    let with_marker = |cursor: &mut PatternCursor<'a>| {
        read_repeated(cursor, &read_begin_marker)?;
        cursor.skip_space()?;
        read_any(cursor, &[&read_bracketed_begin, &read_bare_begin])
    };
    let without_marker = |cursor: &mut PatternCursor<'a>| {
        if !is_at_line_start {
            return Err(PatternMismatch::Different);
        }
        read_bracketed_begin(cursor)
    };
    read_any(cursor, &[&with_marker, &without_marker])
}

fn read_begin_marker(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    read_any(
        cursor,
        &[&|cursor| cursor.read_marker(PYTHON_START), &|cursor| {
            cursor.read_marker(BLOCK_BEGIN)
        }],
    )
}

fn read_bracketed_begin<'a>(cursor: &mut PatternCursor<'a>) -> PatternMatch<ListBegin<'a>> {
    cursor.read_text("[")?;
    cursor.skip_space()?;
    let name = read_call_name(cursor)?;
    let form = ListForm::Bracketed;
    Ok(ListBegin { form, name })
}

fn read_bare_begin<'a>(cursor: &mut PatternCursor<'a>) -> PatternMatch<ListBegin<'a>> {
    let name = read_call_name(cursor)?;
    let form = ListForm::Bare;
    Ok(ListBegin { form, name })
}

/// Reads what stands between two calls of a list, and the next one up to its parenthesis.
pub fn read_next_name<'a>(cursor: &mut PatternCursor<'a>, form: ListForm) -> PatternMatch<&'a str> {
    cursor.skip_space()?;
    let behind_comma = |cursor: &mut PatternCursor<'a>| {
        cursor.read_text(",")?;
        cursor.skip_space()?;
        read_call_name(cursor)
    };
    let without_comma = |cursor: &mut PatternCursor<'a>| {
        if form == ListForm::Bracketed {
            return Err(PatternMismatch::Different);
        }
        read_call_name(cursor)
    };
    read_any(cursor, &[&behind_comma, &without_comma])
}

/// Reads what ends a list.
pub fn read_list_end(cursor: &mut PatternCursor<'_>, form: ListForm) -> PatternMatch<()> {
    let trailing_comma = |cursor: &mut PatternCursor<'_>| {
        cursor.skip_space()?;
        cursor.read_text(",")?;
        read_list_closing(cursor, form)
    };
    let closing = |cursor: &mut PatternCursor<'_>| read_list_closing(cursor, form);
    read_any(cursor, &[&closing, &trailing_comma])
}

fn read_list_closing(cursor: &mut PatternCursor<'_>, form: ListForm) -> PatternMatch<()> {
    cursor.skip_space()?;
    match form {
        ListForm::Bracketed => cursor.read_text("]"),
        ListForm::Bare => read_end_marker(cursor),
    }
}

/// Reads the marker that may follow a list in brackets.
pub fn read_end_marker(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    cursor.skip_space()?;
    read_any(
        cursor,
        &[&|cursor| cursor.read_marker(PYTHON_END), &|cursor| {
            cursor.read_marker(BLOCK_END)
        }],
    )
}

/// Reads the name of a call and its opening parenthesis.
fn read_call_name<'a>(cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str> {
    let is_name_char =
        |character: char| character.is_ascii_alphanumeric() || matches!(character, '_' | '-' | '.');
    let name = cursor.read_while(is_name_char, MAX_NAME_BYTES)?;
    cursor.skip_space()?;
    cursor.read_text("(")?;
    if name.is_empty() {
        return Err(PatternMismatch::Different);
    }
    Ok(name)
}

/// Matches the beginning of arguments, which is not read: `)`, a keyword, `**`, or one whole
/// literal.
pub fn match_arguments_begin(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let start = cursor.clone();
    cursor.skip_space()?;
    read_any(
        cursor,
        &[
            &|cursor| cursor.read_text(")"),
            &|cursor| cursor.read_text("**"),
            &read_keyword,
            &read_positional,
        ],
    )?;
    *cursor = start;
    Ok(())
}

fn read_keyword(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let name = cursor.read_while(is_argument_name_char, MAX_NAME_BYTES)?;
    cursor.skip_space()?;
    cursor.read_text("=")?;
    let next = cursor.peek_char();
    let is_comparison = next == Ok('=');
    if name.is_empty() || is_comparison {
        return Err(PatternMismatch::Different);
    }
    match next {
        Err(PatternMismatch::Incomplete) => Err(PatternMismatch::Incomplete),
        _ => Ok(()),
    }
}

fn read_positional(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let plain = cursor.plain_text();
    let examined_end = plain
        .char_indices()
        .map(|(start, _)| start)
        .find(|&start| start > MAX_FIRST_ARGUMENT_BYTES);
    let examined = &plain[..examined_end.unwrap_or(plain.len())];
    match ExpressionScanner::default().find_end(examined) {
        Some(end) if python_literal_to_json(&plain[..end]).is_some() => Ok(()),
        Some(_) => Err(PatternMismatch::Different),
        None if plain.len() > MAX_FIRST_ARGUMENT_BYTES => Err(PatternMismatch::Different),
        None => Err(cursor.text_end_mismatch()),
    }
}
