//! Tokens whose text waits: their ids and logprobs come with the event that releases them.

use std::sync::Arc;

use serde_json::{Value, json};

use super::AnswerTable;
use super::tests::{Row, events_of, feed, row, spec, text_of};
use crate::stream::answer::AnswerFormat;
use crate::stream::reasoning::ReasoningFamily;
use crate::stream::tests::PieceTokens;
use crate::stream::tools::ToolFamily;

const MARKERS: [&str; 4] = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
const TOOLS: &str = r#"[{"name": "f", "parameters": {}}, {"name": "g", "parameters": {}}]"#;

fn rows_of(handle: u64, ids: &[u32]) -> Vec<Row> {
    let rows = ids.iter().enumerate().map(|(place, &id)| {
        let is_last = place + 1 == ids.len();
        let mut row = row(handle, &[id], is_last.then_some(2));
        row.4 = Some((-(place as f64), Vec::new(), Vec::new()));
        row
    });
    rows.collect()
}

/// Choices of an answer, each fed with the same tokens: objects of events, or of the whole answer.
fn choices_of(tokens: &PieceTokens, ids: &[u32], stream: bool, more: &Value) -> Vec<Value> {
    let format = AnswerFormat::new(
        Some(ToolFamily::Hermes),
        Some(ReasoningFamily::ThinkTags),
        tokens,
    );
    let mut table = AnswerTable::new(Arc::new(tokens.clone()), Arc::new(format), vec![1.0]);
    let mut fields = json!({
        "stream": stream, "logprobs": 0, "return_token_ids": true, "stops": ["STOP"],
        "reading": {
            "tools": TOOLS, "calls_before": 0, "parallel_tool_calls": true,
            "separate_reasoning": true, "stream_reasoning": true, "include_reasoning": true,
            "reasoning_field": "reasoning_content",
        },
    });
    for (name, value) in more.as_object().unwrap() {
        fields["reading"][name] = value.clone();
    }
    table.open(spec("chat", &[1, 2], fields)).unwrap();
    let mut text = String::new();
    let rows = [rows_of(1, ids), rows_of(2, ids)];
    for (first, second) in rows[0].iter().zip(&rows[1]) {
        text += &text_of(&feed(&mut table, &[first.clone(), second.clone()], 1.0));
    }
    let objects = if stream {
        events_of(&text)
    } else {
        vec![serde_json::from_str(&text).unwrap()]
    };
    let choices = objects.iter().map(|object| &object["choices"]);
    choices
        .flat_map(|all| all.as_array().unwrap().clone())
        .collect()
}

/// Logprobs and ids of a choice, joined.
fn listed_tokens(choices: &[Value], index: usize) -> (Vec<f64>, Vec<u64>) {
    let mut logprobs = Vec::new();
    let mut ids = Vec::new();
    for choice in choices.iter().filter(|choice| choice["index"] == index) {
        let entries = choice["logprobs"]["content"].as_array();
        let entries = entries.into_iter().flatten();
        logprobs.extend(entries.map(|entry| entry["logprob"].as_f64().unwrap()));
        let listed = choice["token_ids"].as_array();
        ids.extend(listed.into_iter().flatten().map(|id| id.as_u64().unwrap()));
    }
    (logprobs, ids)
}

#[test]
fn stream_lists_every_token_of_an_answer() {
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x\"}}</tool_call>";
    let texts = [
        format!("<think>\nHm é</think>\n\nHi \n{call}"),
        format!("{call}\n{call} \n text STO"),
        format!("{call} and {}", call.replace("\"f\"", "\"zz\"")),
        "a ST\n<tool_call> <think>\n".to_owned(),
        format!("<think>a{}", &call[..30]),
    ];
    for text in texts {
        for more in [
            json!({}),
            json!({"stream_reasoning": false}),
            json!({"include_reasoning": false}),
        ] {
            let mut tokens = PieceTokens::new(&MARKERS, true);
            let ids = tokens.cut(&text, &|_| true);
            let expected: (Vec<f64>, Vec<u64>) = (
                (0..ids.len()).map(|place| -(place as f64)).collect(),
                ids.iter().map(|&id| u64::from(id)).collect(),
            );
            for stream in [false, true] {
                let choices = choices_of(&tokens, &ids, stream, &more);
                for index in 0..2 {
                    let listed = listed_tokens(&choices, index);
                    assert_eq!(listed, expected, "{text} stream: {stream} {more}");
                }
            }
        }
    }
}
