//! Properties of the streams of any answer.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::dialect::translate::ClientTool;

const DIALECTS: [Dialect; 2] = [Dialect::Responses, Dialect::Messages];

fn text() -> impl Strategy<Value = String> {
    "[a-c \"\\\\\né😀]{1,6}"
}

/// Parts of one kind of item; the last call of an answer may be cut off.
fn item() -> impl Strategy<Value = Vec<AnswerPart>> {
    let texts = || proptest::collection::vec(text(), 1..4);
    prop_oneof![
        texts().prop_map(|texts| texts.into_iter().map(AnswerPart::Reasoning).collect()),
        texts().prop_map(|texts| texts.into_iter().map(AnswerPart::Content).collect()),
        call(),
    ]
}

fn call() -> impl Strategy<Value = Vec<AnswerPart>> {
    let names = proptest::sample::select(vec!["f", "ns.g", "patch"]);
    let input = proptest::option::of(text());
    (names, input, 0usize..20).prop_map(|(name, input, cut)| {
        let arguments = match input {
            Some(input) => json!({"input": input}).to_string(),
            None => "{}".to_owned(),
        };
        let cut = arguments.char_indices().nth(cut).map_or(0, |(at, _)| at);
        let (first, second) = arguments.split_at(cut);
        let mut parts = vec![AnswerPart::CallBegin(name.to_owned())];
        let pieces = [first, second].into_iter().filter(|text| !text.is_empty());
        parts.extend(pieces.map(|text| AnswerPart::Arguments(text.to_owned())));
        parts.push(AnswerPart::CallEnd);
        parts
    })
}

/// Parts of an answer, one by one.
fn answer() -> impl Strategy<Value = Vec<AnswerPart>> {
    let items = proptest::collection::vec(item(), 0..5);
    (items, any::<bool>()).prop_map(|(items, is_cut)| {
        let mut parts: Vec<AnswerPart> = items.concat();
        if is_cut && parts.last() == Some(&AnswerPart::CallEnd) {
            parts.pop();
        }
        parts
    })
}

fn facts() -> impl Strategy<Value = RequestFacts> {
    (any::<bool>(), any::<bool>()).prop_map(|(includes_encrypted_content, hides_thinking)| {
        let tool = |flat_name: &str, name: &str, namespace: Option<&str>, is_custom| ClientTool {
            flat_name: flat_name.to_owned(),
            name: name.to_owned(),
            namespace: namespace.map(str::to_owned),
            is_custom,
        };
        RequestFacts {
            echo: String::new(),
            includes_encrypted_content,
            hides_thinking,
            tools: vec![
                tool("ns.g", "g", Some("ns"), false),
                tool("patch", "patch", None, true),
            ],
        }
    })
}

fn finish() -> impl Strategy<Value = FinishReason> {
    proptest::sample::select(vec![
        FinishReason::Stop,
        FinishReason::Length,
        FinishReason::ToolCalls,
        FinishReason::ContentFilter,
    ])
}

/// Cuts parts into steps of these lengths.
fn grouped(parts: &[AnswerPart], lengths: &[usize]) -> Vec<Vec<AnswerPart>> {
    let mut rest = parts;
    let mut steps = Vec::new();
    for length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (step, behind) = rest.split_at((*length).min(rest.len()));
        steps.push(step.to_vec());
        rest = behind;
    }
    steps
}

/// Output of a response, put together from its events as a simple client does it.
fn joined_output(events: &[(String, Value)]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    let mut texts: Vec<String> = Vec::new();
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
        let index = data["output_index"].as_u64().map(|index| index as usize);
        match (name.as_str(), index) {
            ("response.output_item.added", Some(index)) => {
                assert_eq!(index, items.len());
                items.push(data["item"].clone());
                texts.push(String::new());
            }
            (_, Some(index)) if data["delta"].is_string() => {
                assert_eq!(data["item_id"], items[index]["id"]);
                texts[index] += data["delta"].as_str().unwrap();
            }
            ("response.output_item.done", Some(index)) => {
                let item = &data["item"];
                for member in ["id", "call_id", "name", "namespace", "type"] {
                    assert_eq!(item[member], items[index][member]);
                }
                let text = match item["type"].as_str().unwrap() {
                    "function_call" => &item["arguments"],
                    "custom_tool_call" => &item["input"],
                    _ => &item["content"][0]["text"],
                };
                assert_eq!(text, &Value::from(texts[index].as_str()));
                items[index] = item.clone();
            }
            _ => {}
        }
    }
    items
}

/// Content of a message, put together from its events.
fn joined_content(events: &[(String, Value)]) -> Vec<Value> {
    let mut blocks: Vec<Value> = Vec::new();
    let mut inputs: Vec<String> = Vec::new();
    for (name, data) in events {
        let index = data["index"].as_u64().map(|index| index as usize);
        let delta = &data["delta"];
        match (name.as_str(), index) {
            ("content_block_start", Some(index)) => {
                assert_eq!(index, blocks.len());
                blocks.push(data["content_block"].clone());
                inputs.push(String::new());
            }
            ("content_block_delta", Some(index)) => {
                assert_eq!(index + 1, blocks.len());
                match delta["type"].as_str().unwrap() {
                    "input_json_delta" => inputs[index] += delta["partial_json"].as_str().unwrap(),
                    kind => {
                        let member = kind.strip_suffix("_delta").unwrap();
                        let before = blocks[index][member].as_str().unwrap();
                        let text = format!("{before}{}", delta[member].as_str().unwrap());
                        blocks[index][member] = Value::from(text);
                    }
                }
            }
            ("content_block_stop", Some(index)) => {
                let input = &inputs[index];
                if !input.is_empty() {
                    let read = serde_json::from_str(input).ok().filter(Value::is_object);
                    blocks[index]["input"] = read.unwrap_or(json!({"INVALID_JSON": input}));
                }
            }
            _ => {}
        }
    }
    blocks
}

proptest! {
    #[test]
    fn events_joined_are_the_whole_answer(
        parts in answer(),
        facts in facts(),
        finish in finish(),
        lengths in proptest::collection::vec(1usize..4, 1..5),
    ) {
        let script = Script { steps: grouped(&parts, &lengths), finish, matched_stop: None };
        for dialect in DIALECTS {
            let stream = ScriptedAnswer::new(dialect, facts.clone()).stream(&script);
            let whole = ScriptedAnswer::new(dialect, facts.clone()).whole(&script);
            let whole: Value = serde_json::from_str(&whole).unwrap();
            let events = events_of(&stream);
            let last = &events.last().unwrap().1;
            if dialect == Dialect::Responses {
                prop_assert_eq!(&Value::from(joined_output(&events)), &whole["output"]);
                prop_assert_eq!(&last["response"], &whole);
            } else {
                prop_assert_eq!(&Value::from(joined_content(&events)), &whole["content"]);
                let delta = &events[events.len() - 2].1;
                prop_assert_eq!(&delta["delta"]["stop_reason"], &whole["stop_reason"]);
                prop_assert_eq!(&delta["usage"], &whole["usage"]);
                prop_assert!(!whole["stop_reason"].is_null());
                prop_assert_eq!(&last["type"], "message_stop");
            }
        }
    }

    #[test]
    fn grouping_of_parts_does_not_change_the_answer(
        parts in answer(),
        facts in facts(),
        finish in finish(),
        lengths in proptest::collection::vec(1usize..4, 1..5),
    ) {
        for dialect in DIALECTS {
            let answer_of = |steps| {
                let script = Script { steps, finish, matched_stop: None };
                ScriptedAnswer::new(dialect, facts.clone()).whole(&script)
            };
            let whole = answer_of(vec![parts.clone()]);
            prop_assert_eq!(&answer_of(grouped(&parts, &lengths)), &whole);
            prop_assert_eq!(&answer_of(grouped(&parts, &[1])), &whole);
        }
    }

    #[test]
    fn resumed_stream_continues_with_the_same_bytes(
        parts in answer(),
        facts in facts(),
        finish in finish(),
        lengths in proptest::collection::vec(1usize..4, 1..5),
        cut in 1usize..20,
    ) {
        let steps = grouped(&parts, &lengths);
        prop_assume!(!steps.is_empty());
        let cut = 1 + cut % steps.len();
        let script = Script { steps, finish, matched_stop: None };
        for dialect in DIALECTS {
            let whole = ScriptedAnswer::new(dialect, facts.clone()).stream(&script);
            let mut first = ScriptedAnswer::new(dialect, facts.clone());
            let mut stream = String::new();
            for step in &script.steps[..cut] {
                stream += &first.write(step);
            }
            let mut second = ScriptedAnswer::new(dialect, facts.clone());
            let resumed = ResumedOutput {
                output: Delta {
                    parts: parts_of(&script.steps[..cut].concat()),
                    ..Delta::default()
                },
                events: first.writer.event_count(),
            };
            second.writer.resume(&mut second.choice, &resumed, &OneTokenDecoder);
            for step in &script.steps[cut..] {
                stream += &second.write(step);
            }
            stream += &second.end(&script);
            prop_assert_eq!(&stream, &whole);
        }
    }

    #[test]
    fn failure_at_any_place_ends_the_stream_once(
        parts in answer(),
        facts in facts(),
        cut in 0usize..20,
    ) {
        let error = br#"{"error":{"message":"m","type":"overloaded_error","param":null,"code":"draining"}}"#;
        let steps = grouped(&parts, &[1]);
        for dialect in DIALECTS {
            let mut answer = ScriptedAnswer::new(dialect, facts.clone());
            let mut stream = String::new();
            for step in &steps[..cut.min(steps.len())] {
                stream += &answer.write(step);
            }
            let mut end = Vec::new();
            answer.writer.write_failure(error, &mut end);
            let end = String::from_utf8(end).unwrap();
            let run = bytes::Bytes::from(end.clone());
            let found = crate::dialect::sse::from_error(&run).unwrap();
            let json = crate::dialect::sse::error_event(&found).unwrap();
            let code = crate::dialect::sse::error_code(json);
            prop_assert_eq!(code.as_deref(), Some("draining"));
            let events = events_of(&(stream + &end));
            if dialect == Dialect::Responses {
                let output = events.last().unwrap().1["response"]["output"].clone();
                let done = joined_output(&events);
                prop_assert_eq!(output.as_array().unwrap().len(), done.len());
            }
        }
    }
}

#[test]
fn other_processes_end_a_stream_in_its_form() {
    let error =
        br#"{"error":{"message":"m","type":"server_error","param":null,"code":"upstream_error"}}"#;
    let broken = |dialect, events| InterruptedStream {
        dialect,
        response_id: "resp_7",
        model: "m",
        created: 5,
        events,
    };
    let end = broken(Dialect::Responses, 9).end_with(error);
    let end = String::from_utf8(end).unwrap();
    let events = events_of(&end);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].1["sequence_number"], 9);
    assert_eq!(events[0].1["response"]["status"], "failed");
    assert_eq!(events[0].1["response"]["error"]["code"], "server_error");
    let early = broken(Dialect::Responses, 0).end_with(error);
    let early = events_of(std::str::from_utf8(&early).unwrap());
    let names: Vec<&str> = early.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.failed"
        ]
    );
    let end = broken(Dialect::Messages, 0).end_with(error);
    let events = events_of(std::str::from_utf8(&end).unwrap());
    assert_eq!(events[0].1["error"]["type"], "api_error");
    let chat = broken(Dialect::Chat, 0).end_with(error);
    assert_eq!(chat, error_end(error));
}

#[test]
fn logprobs_of_held_back_tokens_come_with_the_text_that_releases_them() {
    let mut request_spec = spec(Dialect::Responses, RequestFacts::default());
    request_spec.logprobs = Some(0);
    let mut answer = ScriptedAnswer {
        writer: new_writer(request_spec.into(), ids(Dialect::Responses)),
        choice: choice(),
    };
    let rows = |count| {
        let mut rows = TokenLogprobs::default();
        for _ in 0..count {
            rows.push(0, -0.5, Vec::new(), Vec::new());
        }
        Some(rows)
    };
    answer.choice.delta.logprobs = rows(1);
    let mut stream = answer.write(&[]);
    answer.choice.delta.logprobs = rows(1);
    stream += &answer.write(&[AnswerPart::Content("ab".to_owned())]);
    answer.choice.delta.logprobs = rows(1);
    stream += &answer.write(&[AnswerPart::Content("c".to_owned())]);
    let script = Script {
        steps: Vec::new(),
        finish: FinishReason::Stop,
        matched_stop: None,
    };
    stream += &answer.end(&script);
    let events = events_of(&stream);
    let deltas = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta");
    let counts: Vec<usize> = deltas
        .map(|(_, data)| data["logprobs"].as_array().unwrap().len())
        .collect();
    assert_eq!(counts, [2, 1]);
    let last = &events.last().unwrap().1["response"]["output"][0]["content"][0];
    assert_eq!(last["logprobs"].as_array().unwrap().len(), 3);
    assert_eq!(last["logprobs"][0]["token"], "tok");
}
