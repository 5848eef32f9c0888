//! Answers with the calls that SGLang reads in them (tests/support/goldens/tool_call_goldens.py).

use std::sync::Arc;

use serde_json::{Value, json};

use super::feeding::{ReadPart, cut_lexemes, join_calls, lexemes_of, markers_of, read_parts};
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
