//! Calls with a string whose quotes the model did not escape.
//!
//! ```text
//! [bash(command='sed -n '1,9p' notes')]
//! ```
//!
//! Python reads no call there. The string is closed at the only quote with which the rest of the
//! list is one of calls, and the quotes in front of it are text. With no such quote, or with
//! several, the text is no call. Source: the parser of LFM2 in vLLM 0.33.

use super::super::callable::{CallableTools, CalledTool};
use super::super::reader::ToolSignature;
use super::call_arguments::ArgumentList;
use super::call_list::{BLOCK_END, ListForm, PYTHON_END, markers};
use super::expression_scanner::ExpressionScanner;

/// Longest text that is repaired [bytes].
pub const MAX_REPAIRED_BYTES: usize = 64 << 10;
/// Most quotes at which a string is tried to end.
const MAX_CLOSING_QUOTES: usize = 64;

/// Complete call of a tool.
#[derive(Debug, Clone)]
pub struct CompleteCall {
    pub tool: CalledTool,
    /// JSON text.
    pub arguments: String,
}

/// Calls from the first name of `text` to the end of its list, behind which nothing may stand but a
/// marker. `None`: there is no reading, or there are several.
pub fn repair_calls(
    text: &str,
    form: ListForm,
    tools: &CallableTools,
) -> Option<Vec<CompleteCall>> {
    if text.len() > MAX_REPAIRED_BYTES {
        return None;
    }
    let open = find_broken_string(text)?;
    let quote = text[open..].chars().next()?;
    let is_plain = |letter: char| !letter.is_alphanumeric();
    let has_prefix = !text[..open].chars().next_back().is_none_or(is_plain);
    if has_prefix {
        return None;
    }
    let closing: Vec<usize> = unescaped_quotes(text, open + 1, quote)
        .filter(|&place| can_close(text, place))
        .take(MAX_CLOSING_QUOTES + 1)
        .collect();
    if closing.len() > MAX_CLOSING_QUOTES {
        return None;
    }
    let mut readings = closing.iter().filter_map(|&close| {
        let repaired = escape_inner_quotes(text, open, close);
        Some((close, read_calls(&repaired, form, tools)?))
    });
    let (close, calls) = readings.next()?;
    let is_only = readings.next().is_none();
    let is_one_string = !holds_call(&text[open + 1..close]);
    (is_only && is_one_string).then_some(calls)
}

/// Place of the first string whose first quote cannot close it.
pub fn find_broken_string(text: &str) -> Option<usize> {
    let mut start = 0;
    loop {
        let open = start + text[start..].find(['\'', '"'])?;
        let rest = &text[open..];
        let is_long = rest.starts_with("'''") || rest.starts_with(r#"""""#);
        if is_long {
            return None;
        }
        let quote = rest.chars().next()?;
        let close = unescaped_quotes(text, open + 1, quote).next()?;
        if !can_close(text, close) {
            return Some(open);
        }
        start = close + 1;
    }
}

/// Places of the quotes from `start` on that no backslash escapes.
fn unescaped_quotes(text: &str, start: usize, quote: char) -> impl Iterator<Item = usize> + '_ {
    let mut is_escaped = false;
    text[start..]
        .char_indices()
        .filter_map(move |(place, character)| {
            let was_escaped = is_escaped;
            is_escaped = !was_escaped && character == '\\';
            (!was_escaped && character == quote).then_some(start + place)
        })
}

/// True if a string may end with this quote: what follows can stand behind one, or nothing does
/// yet.
fn can_close(text: &str, quote_place: usize) -> bool {
    let behind = text[quote_place + 1..].trim_start();
    behind.is_empty() || behind.starts_with([',', ')', ']', '}', ':'])
}

fn escape_inner_quotes(text: &str, open: usize, close: usize) -> String {
    let mut repaired = text[..=open].to_owned();
    let quote = text[open..].chars().next().unwrap_or_default();
    let mut copied = open + 1;
    for place in unescaped_quotes(&text[..close], open + 1, quote) {
        repaired.push_str(&text[copied..place]);
        repaired.push('\\');
        copied = place;
    }
    repaired.push_str(&text[copied..]);
    repaired
}

/// True if a string seems to hold the end of a call and the beginning of the next one.
fn holds_call(text: &str) -> bool {
    let mut ends = text.split(')').skip(1);
    ends.any(|behind| {
        let Some(next) = behind.trim_start().strip_prefix(',') else {
            return false;
        };
        let next = next.trim_start();
        let is_name_char = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '.');
        let behind_name = next.trim_start_matches(is_name_char);
        behind_name.len() < next.len() && behind_name.trim_start().starts_with('(')
    })
}

/// Reads calls that Python reads, up to the end of their list.
fn read_calls(text: &str, form: ListForm, tools: &CallableTools) -> Option<Vec<CompleteCall>> {
    let mut calls = Vec::new();
    let mut rest = text;
    loop {
        let (name, arguments) = rest.split_once('(')?;
        let tool = tools.find(name.trim())?;
        let (arguments, behind) = read_arguments(arguments, &tool)?;
        calls.push(CompleteCall { tool, arguments });
        rest = behind.trim_start();
        let next = rest.strip_prefix(',').map(str::trim_start);
        if is_list_end(rest, form) || next.is_some_and(|next| is_list_end(next, form)) {
            return Some(calls);
        }
        rest = match next {
            Some(next) => next,
            None if form == ListForm::Bare => rest,
            None => return None,
        };
    }
}

/// Reads arguments up to the parenthesis behind them. Returns their JSON and what follows.
fn read_arguments<'a>(text: &'a str, tool: &ToolSignature) -> Option<(String, &'a str)> {
    let mut arguments = ArgumentList::default();
    let mut rest = text;
    loop {
        let end = ExpressionScanner::default().find_end(rest)?;
        let is_last = rest[end..].starts_with(')');
        arguments.push_argument(&rest[..end], &tool.parameters, is_last)?;
        rest = &rest[end + 1..];
        if is_last {
            return Some((arguments.to_json(), rest));
        }
    }
}

/// True if nothing but the end of the list is there.
fn is_list_end(text: &str, form: ListForm) -> bool {
    let text = text.trim();
    let behind = match form {
        ListForm::Bracketed => text.strip_prefix(']').map(str::trim_start),
        ListForm::Bare => Some(text),
    };
    let is_end_marker = |behind| {
        [PYTHON_END, BLOCK_END]
            .map(|end| markers()[end])
            .contains(&behind)
    };
    behind.is_some_and(|behind| behind.is_empty() || is_end_marker(behind))
}
