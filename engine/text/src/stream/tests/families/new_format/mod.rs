//! The format of CONTRIBUTING.md's example, with the row that the page has, and its fixtures.
//!
//! `row.json` is the row as the native extension exports it: tests of grammars read it.

use serde_json::Value;

use super::feeding::{OwnedLexeme, ReadPart, cut_lexemes, join_calls, lexemes_of, sample_tools};
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;
use crate::stream::tools::{PLAIN, ToolFormat, new_tool_reader, tool_formats};

tool_formats! {
    /// Jamba 1.5 and later.
    ///
    /// ```text
    /// <tool_calls>[{"name": "f", "arguments": {"a": "x"}}]</tool_calls>
    /// ```
    Jamba: ToolFormat {
        markers: &["<tool_calls>", "</tool_calls>"],
        template_mark: Some("<tool_calls>"),
        ..PLAIN
    },
}

fn read(lexemes: &[OwnedLexeme]) -> Vec<ReadPart> {
    let mut reader = new_tool_reader(ToolFamily::Jamba.format(), sample_tools().into());
    let mut parts = AnswerParts::default();
    for lexeme in lexemes {
        let lexeme = match lexeme {
            OwnedLexeme::Text(text) => Lexeme::Text(text),
            OwnedLexeme::Marker(marker) => Lexeme::Marker(*marker),
        };
        reader.read(lexeme, &mut parts);
    }
    reader.finish(&mut parts);
    join_calls(&parts)
}

fn expected_part(part: &Value) -> ReadPart {
    if let Some(content) = part["content"].as_str() {
        return ReadPart::Content(content.to_owned());
    }
    ReadPart::Call {
        name: part["call"][0].as_str().unwrap().to_owned(),
        arguments: part["call"][1].as_str().unwrap().to_owned(),
    }
}

#[test]
fn row_alone_reads_the_format() {
    let fixtures: Vec<Value> = serde_json::from_str(include_str!("jamba.json")).unwrap();
    for fixture in &fixtures {
        let text = fixture["text"].as_str().unwrap();
        let expected = fixture["parts"].as_array().unwrap().iter();
        let expected: Vec<ReadPart> = expected.map(expected_part).collect();
        let whole = lexemes_of(text, ToolFamily::Jamba.format().markers);
        assert_eq!(read(&whole), expected, "{text}");
        assert_eq!(read(&cut_lexemes(&whole, &[1])), expected, "{text}");
    }
}

#[test]
fn stored_row_is_the_exported_one() {
    let name: &str = ToolFamily::Jamba.into();
    assert_eq!(name, "jamba");
    let stored: Value = serde_json::from_str(include_str!("row.json")).unwrap();
    let exported = serde_json::to_value(ToolFamily::Jamba.format()).unwrap();
    assert_eq!(exported, stored);
}
