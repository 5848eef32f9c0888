//! Golden answers (tests/contract/golden/dialects), sent by servers of other makes as chat chunks:
//! the client sees the same bytes as from an engine.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::*;
use crate::dialect::translate::RequestFacts;
use crate::dialect::translate::chat_translation::translate_body;

#[derive(Deserialize)]
struct GoldenCase {
    name: String,
    request: Box<RawValue>,
    steps: Vec<Vec<Part>>,
    finish: String,
    matched_stop: Option<String>,
    error: Option<Value>,
    expected: Expected,
}

#[derive(Deserialize)]
struct Expected {
    stream: Vec<String>,
    whole: Option<String>,
}

#[derive(Deserialize, Clone)]
#[serde(rename_all = "snake_case")]
enum Part {
    Reasoning(String),
    Content(String),
    Call(String),
    Arguments(String),
    End,
}

/// The make of a server.
#[derive(Clone, Copy)]
enum Make {
    Sglang,
    Vllm,
}

impl Make {
    fn reasoning(self) -> &'static str {
        match self {
            Make::Sglang => "reasoning_content",
            Make::Vllm => "reasoning",
        }
    }

    fn stop(self) -> &'static str {
        match self {
            Make::Sglang => "matched_stop",
            Make::Vllm => "stop_reason",
        }
    }
}

fn usage() -> Value {
    json!({
        "prompt_tokens": 12, "completion_tokens": 5, "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {"reasoning_tokens": 2},
    })
}

fn chunk(delta: &Value) -> Value {
    json!({
        "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "usage": usage(),
        "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}],
    })
}

/// An answer of this API without options.
pub fn spec_of(dialect: Dialect) -> AnswerSpec {
    AnswerSpec {
        dialect,
        ..AnswerSpec::default()
    }
}

impl GoldenCase {
    fn spec(&self, dialect: Dialect) -> AnswerSpec {
        let translated = translate_body(dialect, self.request.get().as_bytes());
        let facts: RequestFacts = translated.unwrap().unwrap().facts;
        AnswerSpec {
            dialect,
            request_id: format!("{}7", dialect.id_prefix()),
            model: "m".to_owned(),
            created: 1_000,
            arrived: 1.0,
            facts,
            ..AnswerSpec::default()
        }
    }

    fn end(&self, make: Make) -> Value {
        let mut last = chunk(&json!({"content": ""}));
        last["choices"][0]["finish_reason"] = json!(self.finish);
        last["choices"][0][make.stop()] = json!(self.matched_stop);
        last
    }

    /// Data of the events of a chat stream.
    fn chunks(&self, make: Make) -> Vec<Value> {
        let mut chunks = vec![chunk(&json!({"role": "assistant", "content": ""}))];
        let mut calls = 0;
        for part in self.steps.iter().flatten() {
            let delta = match part {
                Part::Reasoning(text) => json!({make.reasoning(): text}),
                Part::Content(text) => json!({"content": text, "tool_calls": null}),
                Part::Call(name) => {
                    calls += 1;
                    let function = json!({"name": name, "arguments": ""});
                    let id = format!("call_{calls}");
                    json!({"tool_calls": [
                        {"index": calls - 1, "id": id, "type": "function", "function": function},
                    ]})
                }
                Part::Arguments(text) => json!({"tool_calls": [
                    {"index": calls - 1, "function": {"name": null, "arguments": text}},
                ]}),
                Part::End => continue,
            };
            chunks.push(chunk(&delta));
        }
        match &self.error {
            Some(error) => chunks.push(error.clone()),
            None => chunks.push(self.end(make)),
        }
        chunks
    }

    /// The whole answer; `None`: its parts are not in the order that a message implies.
    fn whole(&self, make: Make) -> Option<Value> {
        let mut message = json!({"role": "assistant", "content": null, "tool_calls": []});
        let mut last_kind = 0;
        for part in self.steps.iter().flatten() {
            let (kind, member, text) = match part {
                Part::Reasoning(text) => (1, make.reasoning(), text),
                Part::Content(text) => (2, "content", text),
                Part::Call(name) => {
                    let call = json!({"function": {"name": name, "arguments": ""}});
                    message["tool_calls"].as_array_mut()?.push(call);
                    last_kind = 3;
                    continue;
                }
                Part::Arguments(text) => {
                    let call = message["tool_calls"].as_array_mut()?.last_mut()?;
                    let before = call["function"]["arguments"].as_str()?.to_owned();
                    call["function"]["arguments"] = json!(before + text);
                    continue;
                }
                Part::End => continue,
            };
            if kind < last_kind {
                return None;
            }
            last_kind = kind;
            let before = message[member].as_str().unwrap_or_default().to_owned();
            message[member] = json!(before + text);
        }
        let mut choice = json!({"index": 0, "message": message, "finish_reason": self.finish});
        choice[make.stop()] = json!(self.matched_stop);
        Some(json!({"object": "chat.completion", "choices": [choice], "usage": usage()}))
    }
}

fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

fn cases(file: &str) -> Vec<GoldenCase> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join("tests/contract/golden/dialects").join(file);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn all_cases() -> Vec<(Dialect, GoldenCase)> {
    let named = |dialect, file| cases(file).into_iter().map(move |case| (dialect, case));
    let responses = named(Dialect::Responses, "responses.json");
    let messages = named(Dialect::Messages, "messages.json");
    responses.chain(messages).collect()
}

#[test]
fn streams_are_those_of_engines() {
    for (dialect, case) in all_cases() {
        for make in [Make::Sglang, Make::Vllm] {
            for has_done in [true, false] {
                let mut translator = ChatAnswerTranslator::new(case.spec(dialect));
                let mut stream = Vec::new();
                for data in case.chunks(make) {
                    stream.extend(translator.translate_events(event(&data).as_bytes(), 3.5));
                }
                if has_done {
                    stream.extend(translator.translate_events(DONE_EVENT, 3.5));
                }
                stream.extend(translator.finish_stream(3.5));
                let stream = String::from_utf8(stream).unwrap();
                let lines: Vec<&str> = stream.lines().collect();
                assert_eq!(lines, case.expected.stream, "{}", case.name);
            }
        }
    }
}

#[test]
fn whole_answers_are_those_of_engines() {
    let mut compared = 0;
    for (dialect, case) in all_cases() {
        for make in [Make::Sglang, Make::Vllm] {
            let Some(answer) = case.whole(make).filter(|_| case.error.is_none()) else {
                continue;
            };
            let mut translator = ChatAnswerTranslator::new(case.spec(dialect));
            let whole = translator.translate_whole(answer.to_string().as_bytes(), 3.5);
            let whole = String::from_utf8(whole.unwrap()).unwrap();
            assert_eq!(Some(whole), case.expected.whole, "{}", case.name);
            compared += 1;
        }
    }
    assert!(compared >= 20, "{compared}");
}

#[test]
fn stream_that_breaks_off_or_cannot_be_read_has_no_end_but_an_error() {
    let translator = || ChatAnswerTranslator::new(spec_of(Dialect::Messages));
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let mut broken = translator();
    let begun = event(&chunk(&json!({"content": "a"})));
    assert!(text(broken.translate_events(begun.as_bytes(), 0.0)).contains("message_start"));
    assert_eq!(text(broken.finish_stream(0.0)), "");
    let mut aborted = chunk(&json!({"content": "b"}));
    aborted["choices"][0]["finish_reason"] = json!("abort");
    for bad in [event(&aborted), "data: {\"choices\":3}\n\n".to_owned()] {
        let mut stream = translator();
        let run = [begun.as_bytes(), bad.as_bytes(), begun.as_bytes()].concat();
        let shown = text(stream.translate_events(&run, 0.0));
        assert!(shown.contains("event: error\n"), "{shown}");
        assert!(shown.ends_with("data: [DONE]\n\n"), "{shown}");
        assert_eq!(shown.matches("[DONE]").count(), 1);
    }
    assert!(translator().translate_whole(b"[]", 0.0).is_err());
}

#[test]
fn comments_pass_and_write_nothing_else() {
    let mut stream = ChatAnswerTranslator::new(spec_of(Dialect::Responses));
    let shown = stream.translate_events(b": keep-alive\n\n", 0.0);
    assert_eq!(shown, b": keep-alive\n\n");
}
