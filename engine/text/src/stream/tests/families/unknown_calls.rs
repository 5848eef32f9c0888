//! Calls of tools that the request does not have: content, or calls like others.

use serde_json::{Map, Value, json};
use strum::IntoEnumIterator;

use super::super::fixtures::{read_answer, reader_options};
use super::super::piece_tokens::PieceTokens;
use super::feeding::{ReadPart, join_calls, markers_of};
use super::writers::{FormatPiece, WrittenCall, write_calls};
use crate::stream::answer::AnswerFormat;
use crate::stream::text_stream::TextRules;
use crate::stream::tools::{CallSyntax, ToolFamily, UnknownToolCalls};

const UNKNOWN: &str = "no_such_tool";

/// An answer with one call, as models of the family write it.
fn answer_text(family: ToolFamily, name: &str) -> String {
    let arguments = json!({"q": "x y", "n": 3});
    let marker = markers_of(family).first().copied().unwrap_or_default();
    let named = json!({"name": name, "arguments": arguments});
    match family {
        ToolFamily::Hermes => format!("{marker}\n{named}\n</tool_call>"),
        ToolFamily::Llama3 | ToolFamily::Json => named.to_string(),
        other if matches!(other.format().syntax, CallSyntax::Json(_)) => {
            format!("{marker}[{named}]")
        }
        other => {
            let arguments: Map<String, Value> = arguments.as_object().unwrap().clone();
            let call = WrittenCall {
                name: name.to_owned(),
                arguments,
            };
            let pieces = write_calls(other, &[call]).into_iter();
            let texts = pieces.map(|piece| match piece {
                FormatPiece::Format(text) | FormatPiece::Value(text) => text,
            });
            texts.collect()
        }
    }
}

/// Parts of the answer, which are those of all its cuts.
fn read(family: ToolFamily, text: &str, unknown_calls: UnknownToolCalls) -> Vec<ReadPart> {
    let mut tokens = PieceTokens::new(markers_of(family), true);
    let format = AnswerFormat::new(Some(family), None, &tokens).with_unknown_calls(unknown_calls);
    let rules = TextRules {
        skip_special_tokens: true,
        ..TextRules::default()
    };
    let options = reader_options(None);
    let mut read_cut = |is_cut: &dyn Fn(usize) -> bool| {
        let ids = tokens.cut(text, is_cut);
        join_calls(&read_answer(&format, &options, &rules, &tokens, &ids, 1))
    };
    let parts = read_cut(&|_| false);
    assert_eq!(read_cut(&|_| true), parts, "{text}");
    assert_eq!(read_cut(&|place| place % 3 == 0), parts, "{text}");
    parts
}

#[test]
fn unknown_call_is_content_unless_it_is_forwarded() {
    for family in ToolFamily::iter() {
        let text = answer_text(family, UNKNOWN);
        let shown = read(family, &text, UnknownToolCalls::Text);
        assert!(
            matches!(&shown[..], [ReadPart::Content(content)] if content.contains(UNKNOWN)),
            "{family:?} {shown:?}"
        );
        let forwarded = read(family, &text, UnknownToolCalls::Forward);
        let [ReadPart::Call { name, arguments }] = &forwarded[..] else {
            panic!("{family:?} {forwarded:?}");
        };
        assert_eq!(name, UNKNOWN, "{family:?}");
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(arguments, json!({"q": "x y", "n": 3}), "{family:?}");
    }
}

#[test]
fn known_call_is_the_same_with_either() {
    for family in ToolFamily::iter() {
        let text = answer_text(family, "f");
        let parts = read(family, &text, UnknownToolCalls::Text);
        assert!(
            matches!(&parts[..], [ReadPart::Call { name, .. }] if name == "f"),
            "{family:?} {parts:?}"
        );
        assert_eq!(read(family, &text, UnknownToolCalls::Forward), parts);
    }
}

#[test]
fn name_that_no_tool_can_have_is_content() {
    for name in ["two words", "naïve", "", &"x".repeat(129)] {
        let text = answer_text(ToolFamily::Hermes, name);
        let parts = read(ToolFamily::Hermes, &text, UnknownToolCalls::Forward);
        assert!(matches!(&parts[..], [ReadPart::Content(_)]), "{parts:?}");
    }
}

#[test]
fn only_forwarding_is_named_in_the_format() {
    let format = AnswerFormat::new(Some(ToolFamily::Hermes), None, &PieceTokens::default());
    let usual = "tool_parser=hermes,reasoning_parser=none";
    assert_eq!(format.canonical(), usual);
    let forwarding = format.with_unknown_calls(UnknownToolCalls::Forward);
    assert_eq!(
        forwarding.canonical(),
        format!("{usual},unknown_tool_calls=forward")
    );
}
