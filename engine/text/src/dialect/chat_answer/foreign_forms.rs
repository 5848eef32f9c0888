//! Forms in which servers of other makes write ends, errors, calls and events.
//!
//! Right values: openai-python's reading of a chat stream (pieces of a call belong together by
//! index), Anthropic's and OpenAI's meanings of a stop reason and a status, and the grammar of
//! event streams (WHATWG HTML, 9.2.6).

use proptest::prelude::*;
use serde_json::{Value, json};

use super::tests::spec_of;
use super::*;

const APIS: [Dialect; 2] = [Dialect::Messages, Dialect::Responses];

fn chunk(delta: &Value) -> Value {
    json!({"id": "c1", "object": "chat.completion.chunk", "choices": [
        {"index": 0, "delta": delta, "finish_reason": null},
    ]})
}

fn finish(reason: &str) -> Value {
    json!({"id": "c1", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
}

fn calls(pieces: &Value) -> Value {
    chunk(&json!({"tool_calls": pieces}))
}

fn text(content: &str) -> Value {
    chunk(&json!({"role": "assistant", "content": content}))
}

/// Stream of these data, as most servers write it.
fn stream_of(data: &[Value]) -> String {
    let events = data.iter().map(|data| format!("data: {data}\n\n"));
    events.collect::<String>() + "data: [DONE]\n\n"
}

/// What a client reads in a stream.
#[derive(Debug, Default, PartialEq)]
struct ClientView {
    /// Texts and calls in their order; a call as its name and its arguments.
    blocks: Vec<(String, String)>,
    /// Stop reason of a message, or the reason why a response is incomplete.
    stop: Option<String>,
    /// Message of the error.
    error: Option<String>,
}

fn translated(api: Dialect, stream: &[u8]) -> String {
    let mut translator = ChatAnswerTranslator::new(spec_of(api));
    let mut out = translator.translate_events(stream, 0.0);
    out.extend(translator.finish_stream(0.0));
    String::from_utf8(out).unwrap()
}

fn seen(api: Dialect, stream: &[u8]) -> ClientView {
    let shown = translated(api, stream);
    let data = shown
        .lines()
        .filter_map(|line| line.strip_prefix("data: {"));
    let events: Vec<Value> = data
        .map(|data| serde_json::from_str(&format!("{{{data}")).unwrap())
        .collect();
    match api {
        Dialect::Messages => seen_message(&events),
        _ => seen_response(&events),
    }
}

fn owned(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn seen_message(events: &[Value]) -> ClientView {
    let mut view = ClientView::default();
    for event in events {
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                let block = &event["content_block"];
                view.blocks.push((owned(&block["name"]), String::new()));
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                let (_, shown) = view.blocks.last_mut().unwrap();
                for member in ["text", "thinking", "partial_json"] {
                    shown.push_str(delta[member].as_str().unwrap_or_default());
                }
            }
            "message_delta" => {
                view.stop = event["delta"]["stop_reason"].as_str().map(str::to_owned)
            }
            "error" => view.error = Some(owned(&event["error"]["message"])),
            _ => {}
        }
    }
    view
}

fn seen_response(events: &[Value]) -> ClientView {
    let mut view = ClientView::default();
    let last = events.last().unwrap();
    let response = &last["response"];
    for item in response["output"].as_array().unwrap() {
        view.blocks.push(match item["type"].as_str().unwrap() {
            "function_call" => (owned(&item["name"]), owned(&item["arguments"])),
            _ => (String::new(), owned(&item["content"][0]["text"])),
        });
    }
    view.stop = match last["type"].as_str().unwrap() {
        "response.completed" => Some("completed".to_owned()),
        "response.incomplete" => Some(owned(&response["incomplete_details"]["reason"])),
        _ => None,
    };
    view.error = response["error"]["message"].as_str().map(str::to_owned);
    view
}

/// What both APIs show of a stream.
fn blocks_of(stream: &[u8]) -> Vec<(String, String)> {
    let [message, response] = APIS.map(|api| seen(api, stream));
    assert_eq!(message.error, None);
    assert!(message.stop.is_some() && response.stop.is_some());
    assert_eq!(message.blocks, response.blocks);
    message.blocks
}

fn call(name: &str, arguments: &str) -> (String, String) {
    (name.to_owned(), arguments.to_owned())
}

/// Message of the error with which both APIs end the stream of these data.
fn error_of(stream: &[u8]) -> String {
    let [message, response] = APIS.map(|api| {
        let shown = translated(api, stream);
        assert!(shown.ends_with("data: [DONE]\n\n"), "{shown}");
        assert_eq!(shown.matches("[DONE]").count(), 1);
        seen(api, stream)
    });
    assert_eq!((&message.stop, &response.stop), (&None, &None));
    assert_eq!(message.error, response.error);
    message.error.unwrap()
}

#[test]
fn stream_without_a_reason_of_its_end_has_an_error() {
    let cut_call =
        calls(&json!([{"index": 0, "id": "c", "function": {"name": "rm", "arguments": "{\"a"}}]));
    let empty = finish("");
    for data in [
        vec![],
        vec![text("a")],
        vec![text("a"), cut_call],
        vec![text("a"), empty],
        vec![
            text("a"),
            json!({"choices": [], "usage": {"prompt_tokens": 3}}),
        ],
    ] {
        let error = error_of(stream_of(&data).as_bytes());
        assert!(error.contains("without a finish_reason"), "{error}");
    }
}

#[test]
fn error_in_any_form_ends_the_stream_with_its_message() {
    for error in [
        "data: {\"object\":\"error\",\"message\":\"oom\",\"type\":\"x\",\"code\":500}\n\n",
        "data: { \"error\" : {\"message\": \"oom\"}}\n\n",
        "data: {\"id\":\"c1\",\"choices\":[],\"error\":{\"message\":\"oom\",\"code\":502}}\n\n",
        "data: {\"error\":\"oom\"}\n\n",
        "data: {\"detail\":\"oom\"}\n\n",
        "data: {\"message\":\"oom\",\"status\":500}\n\n",
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"error\":{\"message\":\"oom\"}}]}\n\n",
        "event: error\ndata: oom\n\n",
        "event: error\r\ndata: {\"error\":\r\ndata: {\"message\":\"oom\"}}\r\n\r\n",
        "data: oom\n\n",
        "data: {\"choices\":3,\"text\":\"oom\"}\n\n",
        "data: \"oom\"\n\n",
    ] {
        for begin in [String::new(), format!("data: {}\n\n", text("a"))] {
            let stream = format!("{begin}{error}data: {}\n\ndata: [DONE]\n\n", finish("stop"));
            let message = error_of(stream.as_bytes());
            assert!(message.contains("oom"), "{error}: {message}");
        }
        let event = error.as_bytes();
        assert!(ChatAnswerTranslator::check_first_event(event).is_err());
    }
}

#[test]
fn whole_answer_that_is_none_is_an_error() {
    let whole = |answer: &Value| {
        let mut translator = ChatAnswerTranslator::new(spec_of(Dialect::Messages));
        translator.translate_whole(answer.to_string().as_bytes(), 0.0)
    };
    let choice =
        |finish: Value| json!({"index": 0, "message": {"content": "a"}, "finish_reason": finish});
    for (answer, message) in [
        (json!({"object": "error", "message": "oom"}), "oom"),
        (json!({"error": {"message": "oom"}}), "oom"),
        (
            json!({"choices": [choice(json!("stop"))], "error": {"message": "oom"}}),
            "oom",
        ),
        (json!({"detail": "oom"}), "oom"),
        (json!({"choices": []}), "without a finish_reason"),
        (json!({"usage": {}}), "without a finish_reason"),
        (json!({}), "no chat answer"),
        (
            json!({"choices": [choice(Value::Null)]}),
            "without a finish_reason",
        ),
        (
            json!({"choices": [choice(json!("error"))]}),
            "finish_reason error",
        ),
    ] {
        let unreadable = whole(&answer).unwrap_err();
        let error = unreadable.to_error().message;
        assert!(error.contains(message), "{answer}: {error}");
    }
    assert!(whole(&json!({"choices": [choice(json!("stop"))]})).is_ok());
}

/// Anthropic's stop_reason refusal and OpenAI's incomplete_details.reason content_filter are what
/// their clients know of an answer that a filter cut off.
#[test]
fn reasons_of_an_end_keep_their_meaning_and_unknown_ones_are_errors() {
    for (reason, message, response) in [
        ("stop", "end_turn", "completed"),
        ("eos_token", "end_turn", "completed"),
        ("length", "max_tokens", "max_output_tokens"),
        ("model_length", "max_tokens", "max_output_tokens"),
        ("content_filter", "refusal", "content_filter"),
        ("tool_calls", "end_turn", "completed"),
    ] {
        let stream = stream_of(&[text("a"), finish(reason)]);
        let stops = APIS.map(|api| seen(api, stream.as_bytes()).stop.unwrap());
        assert_eq!(stops, [message, response], "{reason}");
    }
    for reason in ["abort", "error", "insufficient_system_resource", "STOP"] {
        let error = error_of(stream_of(&[text("a"), finish(reason)]).as_bytes());
        assert!(
            error.contains(&format!("finish_reason {reason}")),
            "{error}"
        );
    }
}

#[test]
fn calls_are_distinguished_by_id_and_index() {
    let f = |index: Option<usize>, id: Option<&str>, name: Option<&str>, arguments: &str| {
        let mut function = json!({"arguments": arguments});
        if let Some(name) = name {
            function["name"] = json!(name);
        }
        json!({"index": index, "id": id, "type": "function", "function": function})
    };
    let one = Some("c1");
    let two = Some("c2");
    let a = "{\"a\": 1}";
    let b = "{\"b\": 2}";
    let forms = [
        // One after the other, each by its index.
        vec![
            json!([f(Some(0), one, Some("f"), "{\"a\": ")]),
            json!([f(Some(0), None, None, "1}")]),
            json!([f(Some(1), two, Some("g"), b)]),
        ],
        // The same index and ids of their own (Ollama 0.20), in one event too.
        vec![
            json!([f(Some(0), one, Some("f"), a)]),
            json!([f(Some(0), two, Some("g"), b)]),
        ],
        vec![json!([
            f(Some(0), one, Some("f"), a),
            f(Some(0), two, Some("g"), b)
        ])],
        // No ids: a name behind complete arguments.
        vec![
            json!([f(Some(0), None, Some("f"), a)]),
            json!([f(Some(0), None, Some("g"), b)]),
        ],
        // In turns.
        vec![
            json!([f(Some(0), one, Some("f"), "{\"a\": ")]),
            json!([f(Some(1), two, Some("g"), "{\"b\": ")]),
            json!([f(Some(0), None, None, "1}")]),
            json!([f(Some(1), None, None, "2}")]),
        ],
        vec![
            json!([
                f(Some(0), one, Some("f"), ""),
                f(Some(1), two, Some("g"), "")
            ]),
            json!([f(Some(1), None, None, b), f(Some(0), None, None, a)]),
        ],
        // No index.
        vec![
            json!([f(None, one, Some("f"), "{\"a\": ")]),
            json!([f(None, None, None, "1}")]),
            json!([f(None, two, Some("g"), b)]),
        ],
        vec![json!([
            f(None, None, Some("f"), a),
            f(None, None, Some("g"), b)
        ])],
        vec![
            json!([f(None, one, Some("f"), "{\"a\": ")]),
            json!([f(None, two, Some("g"), "{\"b\": ")]),
            json!([f(None, one, None, "1}")]),
            json!([f(None, two, None, "2}")]),
        ],
        // An id of its own with each piece (vLLM before 0.9), and a name that is repeated.
        vec![
            json!([f(Some(0), one, Some("f"), "{\"a\": ")]),
            json!([f(Some(0), Some("x"), None, "1")]),
            json!([f(Some(0), None, Some("f"), "}")]),
            json!([f(Some(1), Some("y"), Some("g"), b)]),
        ],
        // The name comes behind the id.
        vec![
            json!([{"index": 0, "id": "c1"}]),
            json!([f(Some(0), None, Some("f"), a)]),
            json!([f(Some(1), two, Some("g"), b)]),
        ],
    ];
    for form in forms {
        let mut data = vec![text("")];
        data.extend(form.iter().map(calls));
        data.push(finish("tool_calls"));
        let blocks = blocks_of(stream_of(&data).as_bytes());
        assert_eq!(blocks, [call("f", a), call("g", b)], "{form:?}");
    }
}

#[test]
fn calls_of_other_forms_are_read() {
    let a = "{\"a\": 1e0}";
    let object = "{\"choices\":[{\"delta\":{\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"a\": 1e0}}}]}}]}";
    let first_form = json!({"function_call": {"name": "f", "arguments": a}, "content": null});
    for stream in [
        format!("data: {object}\n\n"),
        format!("data: {}\n\n", chunk(&first_form)),
    ] {
        let stream = format!("{stream}data: {}\n\n", finish("tool_calls"));
        assert_eq!(blocks_of(stream.as_bytes()), [call("f", a)]);
    }
    let none = calls(&json!([
        {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
        {"index": 1, "id": "d", "function": {"name": "f", "arguments": null}},
    ]));
    let blocks = blocks_of(stream_of(&[none, finish("tool_calls")]).as_bytes());
    assert_eq!(blocks, [call("f", ""), call("f", "")]);
}

#[test]
fn text_and_calls_keep_their_order() {
    let call_of = |index: usize, name: &str, arguments: &str| {
        calls(&json!([{"index": index, "function": {"name": name, "arguments": arguments}}]))
    };
    let data = [
        text("a"),
        call_of(0, "f", "{\"x\":"),
        text("b"),
        calls(&json!([{"index": 0, "function": {"arguments": "1}"}}])),
        text("c"),
        call_of(1, "g", ""),
        text("d"),
        finish("stop"),
    ];
    let blocks = blocks_of(stream_of(&data).as_bytes());
    let expected = [
        call("", "a"),
        call("f", "{\"x\":1}"),
        call("", "bc"),
        call("g", ""),
        call("", "d"),
    ];
    assert_eq!(blocks, expected);
}

#[test]
fn pieces_that_cannot_be_ordered_are_an_error() {
    let piece = |index: usize, name: Option<&str>, arguments: &str| {
        calls(&json!([{"index": index, "function": {"name": name, "arguments": arguments}}]))
    };
    for data in [
        // Another name within arguments.
        vec![piece(0, Some("f"), "{\"a\":"), piece(0, Some("g"), "{}")],
        // Arguments behind their end.
        vec![
            piece(0, Some("f"), "{}"),
            piece(1, Some("g"), "{}"),
            piece(0, None, "{}"),
        ],
        // Arguments of no call.
        vec![piece(0, None, "{}"), finish("tool_calls")],
    ] {
        let error = error_of(stream_of(&data).as_bytes());
        assert!(error.contains("cannot be put in order"), "{error}");
    }
    let custom = calls(&json!([{"index": 0, "type": "custom", "custom": {"name": "f"}}]));
    let error = error_of(stream_of(&[custom]).as_bytes());
    assert!(error.contains("type custom"), "{error}");
}

#[test]
fn message_of_another_role_is_no_answer() {
    let error = error_of(stream_of(&[chunk(&json!({"role": "tool", "content": "a"}))]).as_bytes());
    assert!(error.contains("role tool"), "{error}");
}

#[test]
fn members_of_other_makes_are_read() {
    let parts = json!({"role": "", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "reasoning_content": "", "reasoning": "r"});
    let mut last = finish("stop");
    last["usage"] = json!({"prompt_tokens": 3, "completion_tokens": null, "total_tokens": -1});
    let other =
        json!({"choices": [{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]});
    let nothing = json!({"choices": null, "usage": {"prompt_tokens": 3}});
    let data = [chunk(&parts), other, nothing, last];
    let blocks = blocks_of(stream_of(&data).as_bytes());
    assert_eq!(blocks, [call("", "r"), call("", "ab")]);
}

proptest! {
    /// Whatever lines an event is cut into, and whatever stands beside its data, a client sees the
    /// same answer.
    #[test]
    fn events_of_the_standard_are_read_alike(
        line_end in proptest::sample::select(vec!["\n", "\r\n", "\r"]),
        has_mark: bool,
        space in proptest::sample::select(vec!["", " "]),
        besides in proptest::collection::vec(
            proptest::sample::select(vec!["id: 1", "retry: 3", "event: message", ": c", "data", "x"]),
            0..3,
        ),
        // JSON is cut behind a comma or a colon between members.
        cuts in proptest::collection::vec(any::<bool>(), 12),
    ) {
        let data = [text("Hel"), text("lo"), finish("stop")];
        let mut stream = String::from(if has_mark { "\u{feff}" } else { "" });
        for data in data.iter().map(Value::to_string).chain(["[DONE]".to_owned()]) {
            let mut cuts = cuts.iter();
            let mut lines = String::new();
            for member in data.split_inclusive("\",") {
                if lines.is_empty() || (*cuts.next().unwrap_or(&false)) {
                    lines += &format!("{}data:{space}", if lines.is_empty() { "" } else { line_end });
                }
                lines += member;
            }
            // A data line without a value is a line end in the data.
            let besides = besides.iter().filter(|line| **line != "data" || data != "[DONE]");
            let besides: String = besides.map(|line| format!("{line}{line_end}")).collect();
            stream += &format!("{besides}{lines}{line_end}{line_end}");
        }
        for api in APIS {
            let view = seen(api, stream.as_bytes());
            prop_assert_eq!(&view.blocks, &[call("", "Hello")], "{:?}", stream);
            prop_assert!(view.stop.is_some());
        }
    }
}
