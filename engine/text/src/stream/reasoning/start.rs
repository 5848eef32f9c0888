//! The state in which an answer begins, from the ids of its prompt.

use crate::stream::markers::{MarkerRole, MarkerTable};
use crate::tokenizer::TokenDecoder;

/// Text of a block of reasoning so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockText {
    /// Nothing, or white space.
    Blank,
    Begun,
}

impl BlockText {
    /// The block with `text` behind it.
    pub(super) fn followed_by(self, text: &str) -> Self {
        match self {
            Self::Blank if is_blank(text) => Self::Blank,
            _ => Self::Begun,
        }
    }
}

/// True for ASCII white space alone. The engine's ranks, which see bytes, use the same characters.
pub(super) fn is_blank(text: &str) -> bool {
    text.chars().all(is_blank_char)
}

/// White space of Python's `bytes.lstrip`.
pub(super) fn is_blank_char(character: char) -> bool {
    character.is_ascii_whitespace() || character == '\x0b'
}

/// State in which an answer begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ReasoningStart {
    /// The answer's first text decides.
    Undecided,
    /// Within a block of reasoning.
    Inside(BlockText),
    /// Behind a block of reasoning; of the content, only newlines are there.
    Behind,
    Content,
}

/// Finds the state in which the answer to a prompt begins.
///
/// The last marker of reasoning behind the header of the last message decides, so that messages
/// which are continued are read like answers. The header's end is the last special token, or a
/// token written `<|…|>` or `<｜…｜>`, that is no marker: some vocabularies do not mark the tokens
/// of headers as special. Markers that are text are looked for in the text behind the header.
///
/// Cost: a look at each token behind the header.
pub fn find_start(
    prompt: &[u32],
    table: &MarkerTable,
    decoder: &dyn TokenDecoder,
) -> ReasoningStart {
    let mut last_marker = None;
    let mut message_start = 0;
    for (index, &id) in prompt.iter().enumerate().rev() {
        match table.index_of(id).map(|marker| table.role_of(marker)) {
            Some(role @ (MarkerRole::ReasoningBegin | MarkerRole::ReasoningEnd)) => {
                last_marker = Some(role);
                message_start = index + 1;
                break;
            }
            Some(MarkerRole::CallBegin | MarkerRole::Call) => {}
            None if ends_header(id, decoder) => {
                message_start = index + 1;
                break;
            }
            None => {}
        }
    }
    let has_text_markers = table.markers().iter().any(|marker| {
        let is_reasoning = !matches!(marker.role, MarkerRole::CallBegin | MarkerRole::Call);
        is_reasoning && marker.id.is_none()
    });
    if last_marker.is_none() && !has_text_markers {
        return ReasoningStart::Undecided;
    }
    let text = decoder.decode(&prompt[message_start..], false);
    let (text_marker, text) = find_last_text_marker(&text, table);
    match text_marker.or(last_marker) {
        Some(MarkerRole::ReasoningBegin) => {
            ReasoningStart::Inside(BlockText::Blank.followed_by(text))
        }
        Some(_) if text.trim_matches(['\n', '\r']).is_empty() => ReasoningStart::Behind,
        Some(_) => ReasoningStart::Content,
        None => ReasoningStart::Undecided,
    }
}

/// Role of the last marker of reasoning in a text, and the text behind it.
fn find_last_text_marker<'a>(text: &'a str, table: &MarkerTable) -> (Option<MarkerRole>, &'a str) {
    let mut last: Option<(usize, MarkerRole)> = None;
    for marker in table.markers() {
        let is_call = matches!(marker.role, MarkerRole::CallBegin | MarkerRole::Call);
        if is_call || marker.id.is_some() {
            continue;
        }
        let Some(start) = text.rfind(marker.text) else {
            continue;
        };
        let end = start + marker.text.len();
        if last.is_none_or(|(last_end, _)| last_end < end) {
            last = Some((end, marker.role));
        }
    }
    match last {
        Some((end, role)) => (Some(role), &text[end..]),
        None => (None, text),
    }
}

fn ends_header(id: u32, decoder: &dyn TokenDecoder) -> bool {
    if decoder.is_special(id) {
        return true;
    }
    let bytes = decoder.token_bytes(id);
    let is_between = |begin: &str, end: &str| {
        bytes.len() > begin.len() + end.len()
            && bytes.starts_with(begin.as_bytes())
            && bytes.ends_with(end.as_bytes())
    };
    is_between("<|", "|>") || is_between("<｜", "｜>")
}
