//! Answers in every format, with the parts that they have: tools/fixtures and reasoning/fixtures.

use std::sync::Arc;

use serde::Deserialize;
use strum::IntoEnumIterator;

use super::piece_tokens::PieceTokens;
use crate::stream::TextRules;
use crate::stream::answer::{AnswerFormat, AnswerReader, ReaderOptions};
use crate::stream::parts::AnswerParts;
use crate::stream::reasoning::{ReasoningFamily, ReasoningStart};
use crate::stream::tools::{CallSyntax, ToolFamily, ToolSignature};
use crate::tokenizer::TextTokenizer;

/// An answer and its parts.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AnswerFixture {
    name: String,
    text: String,
    /// The prompt's text behind the header of the assistant's message.
    #[serde(default)]
    prompt: String,
    /// The markers must be tokens of the vocabulary.
    #[serde(default)]
    needs_tokens: bool,
    /// The markers must be text.
    #[serde(default)]
    needs_text: bool,
    parts: Vec<FixturePart>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum FixturePart {
    Reasoning(String),
    Content(String),
    /// Name and arguments of a complete call.
    Call(String, String),
    /// Name and arguments of a call that the answer's end cuts off.
    CutCall(String, String),
}

impl AnswerFixture {
    fn expected_parts(&self) -> AnswerParts {
        let mut parts = AnswerParts::default();
        for part in &self.parts {
            match part {
                FixturePart::Reasoning(text) => parts.push_reasoning(text),
                FixturePart::Content(text) => parts.push_content(text),
                FixturePart::Call(name, arguments) => {
                    parts.begin_call(name);
                    parts.push_arguments(arguments);
                    parts.end_call();
                }
                FixturePart::CutCall(name, arguments) => {
                    parts.begin_call(name);
                    parts.push_arguments(arguments);
                }
            }
        }
        parts
    }
}

/// Formats in which calls are JSON objects, each beside a reasoning.
pub fn json_formats() -> Vec<(ToolFamily, ReasoningFamily)> {
    let is_json = |family: &ToolFamily| matches!(family.format().syntax, CallSyntax::Json(_));
    let families = ToolFamily::iter().filter(is_json);
    let formats = families.map(|family| match family {
        ToolFamily::Mistral | ToolFamily::Phi4 => (family, ReasoningFamily::Mistral),
        ToolFamily::Granite => (family, ReasoningFamily::Granite),
        _ => (family, ReasoningFamily::ThinkTags),
    });
    formats.collect()
}

/// Tools of all fixtures.
pub fn tools() -> Arc<[ToolSignature]> {
    let names = ["f", "g", "get.weather-1", "functions.f", "naïve \"ünï\"\n"];
    let tools = names.map(|name| ToolSignature {
        name: name.to_owned(),
        parameters: serde_json::json!({"type": "object", "properties": {}}),
    });
    Arc::new(tools)
}

pub fn reader_options(start: Option<ReasoningStart>) -> ReaderOptions {
    ReaderOptions {
        tools: tools(),
        start,
        separate_reasoning: true,
        parallel_tool_calls: true,
        is_gated: false,
    }
}

/// Feeds ids in groups of this size, and ends the answer.
pub fn read_answer(
    format: &AnswerFormat,
    options: &ReaderOptions,
    rules: &TextRules,
    tokens: &PieceTokens,
    ids: &[u32],
    group_size: usize,
) -> AnswerParts {
    let rules = Arc::new(rules.clone());
    let mut reader = AnswerReader::new(format, options.clone(), rules, tokens, &[]);
    let mut parts = AnswerParts::default();
    for group in ids.chunks(group_size) {
        if reader.feed(tokens, group, &mut parts).ends_here {
            return parts;
        }
    }
    reader.finish(tokens, &mut parts);
    parts
}

/// Reads an answer in all cuts and checks its parts.
fn check_fixture(
    fixture: &AnswerFixture,
    tools: Option<ToolFamily>,
    reasoning: Option<ReasoningFamily>,
    added: &[&'static str],
    is_special: bool,
) {
    let mut tokens = PieceTokens::new(added, is_special);
    let format = AnswerFormat::new(tools, reasoning, &tokens);
    let prompt = tokens.encode(&fixture.prompt, false).unwrap();
    let start = format.reasoning_start(&prompt, &tokens);
    let options = reader_options(start);
    let rules = TextRules {
        skip_special_tokens: true,
        ..TextRules::default()
    };
    let expected = fixture.expected_parts();
    let text = fixture.text.as_str();
    let mut cuttings = vec![tokens.cut(text, &|_| true), tokens.cut(text, &|_| false)];
    cuttings.extend((1..text.len()).map(|cut| tokens.cut(text, &|place| place == cut)));
    cuttings.extend((2..9).map(|len| tokens.cut(text, &|place| place % len == 0)));
    for ids in cuttings {
        for group_size in [1, ids.len().max(1)] {
            let parts = read_answer(&format, &options, &rules, &tokens, &ids, group_size);
            assert_eq!(parts, expected, "{} {added:?} {ids:?}", fixture.name);
        }
    }
}

fn check_fixtures(json: &str, tools: Option<ToolFamily>, reasoning: Option<ReasoningFamily>) {
    let fixtures: Vec<AnswerFixture> = serde_json::from_str(json).unwrap();
    let format = AnswerFormat::new(tools, reasoning, &PieceTokens::default());
    let markers = format.table().markers().iter();
    let texts: Vec<&str> = markers.map(|marker| marker.text).collect();
    for fixture in &fixtures {
        if !fixture.needs_text {
            check_fixture(fixture, tools, reasoning, &texts, true);
            check_fixture(fixture, tools, reasoning, &texts, false);
        }
        if !fixture.needs_tokens {
            check_fixture(fixture, tools, reasoning, &[], false);
        }
    }
}

fn tool_fixtures(name: &str) -> String {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/stream/tools/fixtures");
    std::fs::read_to_string(format!("{folder}/{name}.json")).unwrap()
}

#[test]
fn fixtures_of_json_formats_have_their_parts() {
    for (family, reasoning) in json_formats() {
        let reasoning = match family {
            ToolFamily::Phi4 => ReasoningFamily::ThinkTags,
            _ => reasoning,
        };
        let json = tool_fixtures(family.into());
        check_fixtures(&json, Some(family), Some(reasoning));
    }
}

#[test]
fn fixtures_of_reasoning_have_their_parts() {
    let json = include_str!("../reasoning/fixtures/mistral.json");
    let reasoning = ReasoningFamily::Mistral;
    check_fixtures(json, Some(ToolFamily::Mistral), Some(reasoning));
}
