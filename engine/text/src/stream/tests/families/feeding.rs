//! Texts to lexemes, and lexemes to parts.

use std::sync::Arc;

use serde_json::json;

use crate::stream::TextRules;
use crate::stream::answer::{AnswerFormat, AnswerReader, ReaderOptions};
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::stream::tests::piece_tokens::PieceTokens;
use crate::stream::tools::{ToolFamily, ToolSignature};

/// Families whose readers are tested here.
pub const FAMILIES: &[ToolFamily] = &[
    ToolFamily::Qwen3Coder,
    ToolFamily::Glm45,
    ToolFamily::Glm47,
    ToolFamily::DeepseekV32,
    ToolFamily::DeepseekV3,
    ToolFamily::DeepseekV31,
    ToolFamily::KimiK2,
    ToolFamily::MistralV13,
    ToolFamily::Pythonic,
    ToolFamily::GptOss,
];

/// Texts of a family's markers.
pub fn markers_of(family: ToolFamily) -> &'static [&'static str] {
    family.format().markers
}

/// Tools that fixtures and random texts call.
pub fn sample_tools() -> Arc<[ToolSignature]> {
    let tool = |name: &str, properties: serde_json::Value| ToolSignature {
        name: name.to_owned(),
        parameters: json!({"type": "object", "properties": properties}),
    };
    let typed = json!({
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "options": {"type": "object"},
        "note": {"type": ["string", "null"]},
        "any": {},
    });
    Arc::new([
        tool(
            "f",
            json!({"a": {"type": "string"}, "b": {"type": "string"}}),
        ),
        tool("g", json!({})),
        tool("typed", typed),
        tool("ns.get-data", json!({"q": {"type": "string"}})),
    ])
}

/// Lexeme that owns its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnedLexeme {
    Text(String),
    Marker(usize),
}

/// Lexemes of a text in which every text of a marker is that marker.
pub fn lexemes_of(text: &str, markers: &[&str]) -> Vec<OwnedLexeme> {
    let mut lexemes = Vec::new();
    let mut rest = text;
    loop {
        let next = (0..markers.len())
            .filter_map(|marker| Some((rest.find(markers[marker])?, marker)))
            .min_by_key(|&(start, marker)| (start, std::cmp::Reverse(markers[marker].len())));
        let Some((start, marker)) = next else {
            break;
        };
        push_text(&mut lexemes, &rest[..start]);
        lexemes.push(OwnedLexeme::Marker(marker));
        rest = &rest[start + markers[marker].len()..];
    }
    push_text(&mut lexemes, rest);
    lexemes
}

pub fn push_text(lexemes: &mut Vec<OwnedLexeme>, text: &str) {
    if !text.is_empty() {
        lexemes.push(OwnedLexeme::Text(text.to_owned()));
    }
}

/// The same lexemes, with each text cut into pieces of these numbers of characters, in turn.
pub fn cut_lexemes(lexemes: &[OwnedLexeme], piece_lens: &[usize]) -> Vec<OwnedLexeme> {
    let mut lens = piece_lens.iter().cycle();
    let mut cut = Vec::new();
    for lexeme in lexemes {
        let OwnedLexeme::Text(text) = lexeme else {
            cut.push(lexeme.clone());
            continue;
        };
        let characters: Vec<char> = text.chars().collect();
        let mut rest = characters.as_slice();
        while !rest.is_empty() {
            let len = *lens.next().unwrap();
            let (piece, after) = rest.split_at(len.clamp(1, rest.len()));
            cut.push(OwnedLexeme::Text(piece.iter().collect()));
            rest = after;
        }
    }
    cut
}

/// Every way to cut one text of the lexemes in two.
pub fn cut_once(lexemes: &[OwnedLexeme]) -> Vec<Vec<OwnedLexeme>> {
    let mut all = Vec::new();
    for (index, lexeme) in lexemes.iter().enumerate() {
        let OwnedLexeme::Text(text) = lexeme else {
            continue;
        };
        for (place, _) in text.char_indices().skip(1) {
            let halves = [&text[..place], &text[place..]];
            let mut cut = lexemes[..index].to_vec();
            cut.extend(halves.map(|half| OwnedLexeme::Text(half.to_owned())));
            cut.extend_from_slice(&lexemes[index + 1..]);
            all.push(cut);
        }
    }
    all
}

/// Parts of a whole answer, joined from those of each lexeme. Each lexeme is a token.
pub fn read_parts(
    family: ToolFamily,
    tools: Arc<[ToolSignature]>,
    lexemes: &[OwnedLexeme],
) -> AnswerParts {
    let mut answer = CutAnswer::new(family, tools);
    let mut joined = AnswerParts::default();
    for lexeme in lexemes {
        let parts = answer.feed(lexeme);
        joined.extend(&parts);
    }
    let mut parts = AnswerParts::default();
    answer.reader.finish(&answer.tokens, &mut parts);
    joined.extend(&parts);
    joined
}

/// Answer in a format whose markers are special tokens.
pub struct CutAnswer {
    tokens: PieceTokens,
    reader: AnswerReader,
}

impl CutAnswer {
    pub fn new(family: ToolFamily, tools: Arc<[ToolSignature]>) -> Self {
        let tokens = PieceTokens::new(markers_of(family), true);
        let format = AnswerFormat::new(Some(family), None, &tokens);
        let options = ReaderOptions {
            tools,
            start: None,
            separate_reasoning: true,
            parallel_tool_calls: true,
            is_gated: false,
        };
        let rules = Arc::new(TextRules {
            skip_special_tokens: true,
            ..TextRules::default()
        });
        let reader = AnswerReader::new(&format, options, rules, &tokens, &[]);
        Self { tokens, reader }
    }

    pub fn feed(&mut self, lexeme: &OwnedLexeme) -> AnswerParts {
        let id = match lexeme {
            OwnedLexeme::Text(text) => self.tokens.text_id(text),
            OwnedLexeme::Marker(marker) => *marker as u32,
        };
        let mut parts = AnswerParts::default();
        self.reader.feed(&self.tokens, &[id], &mut parts);
        parts
    }
}

/// Part of an answer, with each call and its arguments in one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadPart {
    Reasoning(String),
    Content(String),
    Call {
        name: String,
        arguments: String,
    },
    /// A call without its end.
    CutCall {
        name: String,
        arguments: String,
    },
}

/// Joins the parts of calls. Panics where the parts are in an order that no answer has.
pub fn join_calls(parts: &AnswerParts) -> Vec<ReadPart> {
    let mut joined = Vec::new();
    let mut open: Option<(String, String)> = None;
    for part in parts.iter() {
        match (part, &mut open) {
            (AnswerPart::CallBegin(name), None) => open = Some((name.clone(), String::new())),
            (AnswerPart::Arguments(text), Some((_, arguments))) => arguments.push_str(text),
            (AnswerPart::CallEnd, Some(_)) => {
                let (name, arguments) = open.take().unwrap();
                joined.push(ReadPart::Call { name, arguments });
            }
            (AnswerPart::Reasoning(text), None) => joined.push(ReadPart::Reasoning(text.clone())),
            (AnswerPart::Content(text), None) => joined.push(ReadPart::Content(text.clone())),
            _ => panic!("{part:?} within {open:?}"),
        }
    }
    if let Some((name, arguments)) = open {
        joined.push(ReadPart::CutCall { name, arguments });
    }
    joined
}
