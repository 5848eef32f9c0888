//! Calls that are written in a family's format and read again.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, Value, json};

use super::feeding::{
    FAMILIES, OwnedLexeme, ReadPart, cut_lexemes, join_calls, lexemes_of, markers_of, push_text,
    read_parts,
};
use super::writers::{FormatPiece, WrittenCall, raw_text, write_calls};
use crate::stream::tools::{ToolFamily, ToolSignature};

/// Texts that end something in one of the formats.
const FORMAT_TEXTS: &[&str] = &[
    "</tool_call>",
    "<tool_call>",
    "<function=f>",
    "</function>",
    "</parameter>",
    "<parameter=a>",
    "\n<parameter=",
    "</arg_value>",
    "<arg_key>",
    "</arg_key>",
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
    "｜DSML｜",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "\n```",
    "<|tool_call_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|call|>",
    "<|end|>",
    "<|python_end|>",
    ")]",
    "\", ",
    "'",
    "}",
    "\\",
    "\n",
    "\"",
];

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => "[a-zé😀 ]{0,4}",
        1 => "\\PC{0,4}",
        3 => select(FORMAT_TEXTS).prop_map(str::to_owned),
    ];
    vec(piece, 0..5).prop_map(|pieces| pieces.concat())
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-1e9..1e9f64).prop_map(Value::from),
        select(&["007", "null", "true", "  x  ", "", "\n"][..]).prop_map(Value::from),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::from),
            vec((text(), inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

fn call() -> impl Strategy<Value = WrittenCall> {
    let name = select(&["f", "ns.get-data", "a_b", "x.y.z"][..]);
    let arguments = vec(("[a-z_][a-z0-9_]{0,4}", value()), 0..4);
    (name, arguments).prop_map(|(name, arguments)| WrittenCall {
        name: name.to_owned(),
        arguments: arguments.into_iter().collect::<Map<_, _>>(),
    })
}

/// Tools with these calls' names, whose schemas give each parameter the type of its value. Calls of
/// one name share a schema.
fn tools_of(calls: &[WrittenCall]) -> Arc<[ToolSignature]> {
    let tools = calls.iter().map(|call| {
        let properties: Map<String, Value> = call
            .arguments
            .iter()
            .map(|(name, value)| (name.clone(), json!({"type": type_name(value)})))
            .collect();
        ToolSignature {
            name: call.name.clone(),
            parameters: json!({"type": "object", "properties": properties}),
        }
    });
    tools.collect()
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// True for values that a format cannot hold, for it has no escapes: an end tag of a value, or
/// tags that end a call where the format has them. `is_lexed`: texts of markers are markers.
fn is_unwritable(family: ToolFamily, value: &str, is_lexed: bool) -> bool {
    let has_pair = |first: &str, second: &str| {
        let mut parts = value.split(first);
        parts.next();
        parts.any(|rest| rest.trim_ascii_start().starts_with(second))
    };
    match family {
        ToolFamily::Qwen3Coder => {
            let mut lines = value.split('\n');
            value.contains("</parameter>")
                || lines.any(|line| line.starts_with("<parameter="))
                || has_pair("</function>", "</tool_call>")
                || has_pair("<tool_call>", "<function=")
        }
        ToolFamily::Glm45 | ToolFamily::Glm47 if is_lexed => {
            value.contains("</arg_value>")
                || value.contains("<arg_key>")
                || has_pair("</tool_call>", "<tool_call>")
        }
        ToolFamily::DeepseekV32 if is_lexed => ["</｜DSML｜parameter>", "</｜DSML｜invoke>"]
            .iter()
            .any(|tag| value.contains(tag)),
        ToolFamily::GptOss if is_lexed => {
            let markers = markers_of(family);
            markers.iter().any(|marker| value.contains(marker))
        }
        _ => false,
    }
}

fn lexemes_of_pieces(pieces: &[FormatPiece], markers: &[&str], is_lexed: bool) -> Vec<OwnedLexeme> {
    let mut lexemes = Vec::new();
    for piece in pieces {
        match piece {
            FormatPiece::Value(text) if !is_lexed => push_text(&mut lexemes, text),
            FormatPiece::Format(text) | FormatPiece::Value(text) => {
                lexemes.extend(lexemes_of(text, markers));
            }
        }
    }
    lexemes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn written_calls_are_read(
        family in select(FAMILIES),
        calls in vec(call(), 1..4),
        before in "[a-z]{0,3}[ \n]{0,3}",
        after in "[ \n]{0,3}[a-z]{0,3}",
        is_lexed: bool,
        piece_lens in vec(1..7usize, 1..4),
    ) {
        let mut calls = calls;
        let mut seen = Vec::new();
        calls.retain(|call| {
            let is_first = !seen.contains(&call.name);
            seen.push(call.name.clone());
            is_first
        });
        for call in &mut calls {
            let whole = json!(call.arguments).to_string();
            let is_json = !matches!(
                family,
                ToolFamily::Qwen3Coder | ToolFamily::Glm45 | ToolFamily::Glm47 | ToolFamily::DeepseekV32
            );
            let is_whole_unwritable = is_json && is_unwritable(family, &whole, is_lexed);
            call.arguments.retain(|_, value| {
                !is_whole_unwritable && !is_unwritable(family, &raw_text(value), is_lexed)
            });
        }
        let has_content = family != ToolFamily::GptOss;
        // A list in brackets begins at the start of a line.
        let line_end = if family == ToolFamily::Pythonic { "\n" } else { "" };
        let before = format!("{before}{line_end}");
        let markers = markers_of(family);
        let mut pieces = write_calls(family, &calls);
        if has_content {
            pieces.insert(0, FormatPiece::Format(before.clone()));
            pieces.push(FormatPiece::Format(after.clone()));
        }
        let lexemes = cut_lexemes(&lexemes_of_pieces(&pieces, markers, is_lexed), &piece_lens);
        let parts = join_calls(&read_parts(family, tools_of(&calls), &lexemes));

        let mut expected = Vec::new();
        if has_content && !before.trim_end().is_empty() {
            expected.push(ReadPart::Content(before.trim_end().to_owned()));
        }
        let read_value = |text: &str| -> Value { serde_json::from_str(text).unwrap() };
        for call in &calls {
            let arguments = read_value(&serde_json::to_string(&call.arguments).unwrap()).to_string();
            expected.push(ReadPart::Call { name: call.name.clone(), arguments });
        }
        if has_content && !after.trim().is_empty() {
            expected.push(ReadPart::Content(after));
        }
        let read: Vec<ReadPart> = parts
            .into_iter()
            .map(|part| match part {
                ReadPart::Call { name, arguments } => {
                    let arguments = read_value(&arguments).to_string();
                    ReadPart::Call { name, arguments }
                }
                other => other,
            })
            .collect();
        prop_assert_eq!(read, expected, "{:?}", lexemes);
    }
}
