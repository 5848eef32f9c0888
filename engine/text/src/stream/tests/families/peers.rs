//! Answers with the parts that SGLang (tests/support/goldens/tool_call_goldens.py) and vLLM
//! (vllm_goldens.py) read in them.

use std::sync::Arc;

use serde_json::{Value, json};

use super::feeding::{ReadPart, cut_lexemes, join_calls, lexemes_of, markers_of, read_parts};
use crate::stream::TextRules;
use crate::stream::answer::{AnswerFormat, AnswerReader, ReaderOptions};
use crate::stream::parts::AnswerParts;
use crate::stream::reasoning::{BlockText, ReasoningFamily, ReasoningStart};
use crate::stream::tests::piece_tokens::PieceTokens;
use crate::stream::tools::{ToolFamily, ToolSignature};

#[derive(Debug, serde::Deserialize)]
struct PeerAnswer {
    family: String,
    answer: String,
    content: String,
    calls: Vec<(String, Value)>,
}

fn peer_tools() -> Arc<[ToolSignature]> {
    let parameters = json!({"type": "object", "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "options": {"type": "object"},
    }});
    let tools = ["f", "g", "get_weather"].map(|name| ToolSignature {
        name: name.to_owned(),
        parameters: parameters.clone(),
    });
    Arc::new(tools)
}

#[test]
fn answers_have_the_calls_that_sglang_reads() {
    let answers: Vec<PeerAnswer> = serde_json::from_str(include_str!("peer_calls.json")).unwrap();
    assert!(answers.len() > 120);
    for answer in &answers {
        let family: ToolFamily = answer.family.parse().unwrap();
        let lexemes = lexemes_of(&answer.answer, markers_of(family));
        for piece_len in [1, 4, usize::MAX] {
            let cut = cut_lexemes(&lexemes, &[piece_len]);
            let mut content = String::new();
            let mut calls = Vec::new();
            for part in join_calls(&read_parts(family, peer_tools(), &cut)) {
                match part {
                    ReadPart::Content(text) => content.push_str(&text),
                    ReadPart::Call { name, arguments } => {
                        calls.push((name, serde_json::from_str(&arguments).unwrap()));
                    }
                    other => panic!("{other:?} in {}", answer.answer),
                }
            }
            let expected = (&answer.content, &answer.calls);
            assert_eq!((&content, &calls), expected, "{}", answer.answer);
        }
    }
}

/// Answers of one model, and the parsers that read them.
#[derive(Debug, serde::Deserialize)]
struct VllmModel {
    tool_parser: Option<String>,
    reasoning_parser: Option<String>,
    /// vLLM's parsers of tool calls and of reasoning.
    vllm: (Option<String>, Option<String>),
    /// The prompt ends with the reasoning's begin marker.
    begins_inside: bool,
    added_tokens: Vec<String>,
    answers: Vec<VllmAnswer>,
}

/// Parts that were written, and where vLLM reads others.
#[derive(Debug, serde::Deserialize)]
struct VllmAnswer {
    answer: String,
    #[serde(flatten)]
    parts: AnswerTexts,
    #[serde(default)]
    differences: Vec<VllmDifference>,
}

#[derive(Debug, serde::Deserialize)]
struct VllmDifference {
    how: String,
    reason: String,
    #[serde(flatten)]
    parts: AnswerTexts,
}

#[derive(Debug, Default, PartialEq, serde::Deserialize)]
struct AnswerTexts {
    reasoning: String,
    content: String,
    calls: Vec<(String, Value)>,
}

fn vllm_models() -> Vec<VllmModel> {
    serde_json::from_str(include_str!("vllm_answers.json")).unwrap()
}

/// Reads an answer in pieces of `piece_bytes`.
fn read_texts(model: &VllmModel, answer: &str, piece_bytes: usize) -> AnswerTexts {
    let leaked = |text: &String| -> &'static str { text.clone().leak() };
    let added: Vec<&str> = model.added_tokens.iter().map(leaked).collect();
    let mut tokens = PieceTokens::new(&added, true);
    let tools = model.tool_parser.as_ref();
    let tools: Option<ToolFamily> = tools.map(|name| name.parse().unwrap());
    let reasoning = model.reasoning_parser.as_ref();
    let reasoning: Option<ReasoningFamily> = reasoning.map(|name| name.parse().unwrap());
    let format = AnswerFormat::new(tools, reasoning, &tokens);
    let start = if model.begins_inside {
        ReasoningStart::Inside(BlockText::Blank)
    } else {
        ReasoningStart::Undecided
    };
    let options = ReaderOptions {
        tools: peer_tools(),
        start: reasoning.map(|_| start),
        separate_reasoning: true,
        parallel_tool_calls: true,
        is_gated: false,
    };
    let rules = Arc::new(TextRules {
        skip_special_tokens: true,
        ..TextRules::default()
    });
    let ids = tokens.cut(answer, &|byte: usize| byte.is_multiple_of(piece_bytes));
    let mut reader = AnswerReader::new(&format, options, rules, &tokens, &[]);
    let mut parts = AnswerParts::default();
    for id in ids {
        reader.feed(&tokens, &[id], &mut parts);
    }
    reader.finish(&tokens, &mut parts);
    let mut texts = AnswerTexts::default();
    for part in join_calls(&parts) {
        match part {
            ReadPart::Reasoning(text) => texts.reasoning.push_str(&text),
            ReadPart::Content(text) => texts.content.push_str(&text),
            ReadPart::Call { name, arguments } => {
                let arguments = serde_json::from_str(&arguments).unwrap();
                texts.calls.push((name, arguments));
            }
            ReadPart::CutCall { .. } => panic!("a cut call in {answer}"),
        }
    }
    // Granite writes two newlines behind its begin marker, of which the reader drops one.
    texts.reasoning = texts.reasoning.trim_start_matches('\n').to_owned();
    texts
}

#[test]
fn answers_have_the_parts_that_vllm_reads_or_the_written_ones() {
    let models = vllm_models();
    let answers: usize = models.iter().map(|model| model.answers.len()).sum();
    assert!(answers > 300);
    for model in &models {
        for answer in &model.answers {
            for piece_bytes in [1, 4, usize::MAX] {
                let texts = read_texts(model, &answer.answer, piece_bytes);
                assert_eq!(texts, answer.parts, "{:?} of {}", model.vllm, answer.answer);
            }
        }
    }
}

#[test]
fn each_difference_from_vllm_has_a_reason() {
    for model in &vllm_models() {
        let mut read_whole = 0;
        for answer in &model.answers {
            for difference in &answer.differences {
                assert!(difference.reason.contains("ours"), "{difference:?}");
                assert_ne!(difference.parts, answer.parts);
            }
            let differs = |difference: &VllmDifference| difference.how == "whole";
            if !answer.differences.iter().any(differs) {
                read_whole += 1;
            }
        }
        assert!(
            read_whole > 0,
            "{:?} reads no answer as written",
            model.vllm
        );
    }
}
