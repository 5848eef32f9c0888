//! Refusals and rare forms. Usual requests are golden:
//! tests/contract/golden/dialects/responses.json.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::refusal::RefusalCode;

fn chat_of(request: Value) -> Value {
    serde_json::from_str(&to_chat(&request.to_string()).unwrap().chat).unwrap()
}

/// Code and member of the refusal of a request with this input and these members.
fn refusal_of(input: Value, members: Value) -> (RefusalCode, String) {
    let mut request = json!({"model": "m", "input": input});
    for (name, value) in members.as_object().unwrap() {
        request[name] = value.clone();
    }
    let refusal = to_chat(&request.to_string()).unwrap_err();
    assert!(
        refusal.message.starts_with(&refusal.param),
        "{}",
        refusal.message
    );
    (refusal.code, refusal.param)
}

/// The AI SDK sends references unless the client sets `store: false`.
#[test]
fn reference_to_an_item_is_refused_with_the_way_out() {
    let input = json!([{"role": "user", "content": "x"}, {"type": "item_reference", "id": "fc_1"}]);
    let request = json!({"model": "m", "input": input});
    let refusal = to_chat(&request.to_string()).unwrap_err();
    assert_eq!(
        refusal.message,
        "input[1].type is \"item_reference\": this server keeps no responses to look the item up \
         in; send the items themselves, as clients do with \"store\": false"
    );
}

#[test]
fn items_are_refused_by_their_place() {
    use RefusalCode::{InvalidValue, MissingField, UnsupportedParameter};
    for (item, code, param) in [
        (json!(1), InvalidValue, "input[1]"),
        (json!({"text": "x"}), MissingField, "input[1].type"),
        (
            json!({"type": "item_reference", "id": "x"}),
            UnsupportedParameter,
            "input[1].type",
        ),
        (
            json!({"type": "web_search_call"}),
            UnsupportedParameter,
            "input[1].type",
        ),
        (
            json!({"role": "tool", "content": ""}),
            InvalidValue,
            "input[1].role",
        ),
        (json!({"role": "user"}), MissingField, "input[1].content"),
        (
            json!({"role": "user", "content": 1}),
            InvalidValue,
            "input[1].content",
        ),
        (
            json!({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
            UnsupportedParameter,
            "input[1].content[0].type",
        ),
        (
            json!({"role": "user", "content": [{"type": "input_text", "text": 1}]}),
            InvalidValue,
            "input[1].content[0].text",
        ),
        (
            json!({"type": "function_call", "name": "f"}),
            MissingField,
            "input[1].call_id",
        ),
        (
            json!({"type": "function_call", "name": "f", "call_id": "a", "arguments": {}}),
            InvalidValue,
            "input[1].arguments",
        ),
        (
            json!({"type": "function_call_output", "call_id": "a", "output": ""}),
            InvalidValue,
            "input[1].call_id",
        ),
        (
            json!({"type": "reasoning", "summary": 1}),
            InvalidValue,
            "input[1].summary",
        ),
    ] {
        let input = json!([{"role": "user", "content": "x"}, item]);
        assert_eq!(
            refusal_of(input.clone(), json!({})),
            (code, param.to_owned()),
            "{input}"
        );
    }
    assert_eq!(
        refusal_of(json!([]), json!({})),
        (InvalidValue, "input".to_owned())
    );
    assert_eq!(
        refusal_of(json!(null), json!({})),
        (MissingField, "input".to_owned())
    );
    let reasoning = json!([{"type": "reasoning", "summary": []}]);
    assert_eq!(
        refusal_of(reasoning, json!({})),
        (InvalidValue, "input".to_owned())
    );
}

#[test]
fn members_are_refused_by_name() {
    use RefusalCode::{InvalidValue, MissingField, UnsupportedParameter};
    for (members, code, param) in [
        (
            json!({"previous_response_id": "r"}),
            UnsupportedParameter,
            "previous_response_id",
        ),
        (
            json!({"conversation": {"id": "c"}}),
            UnsupportedParameter,
            "conversation",
        ),
        (
            json!({"background": true}),
            UnsupportedParameter,
            "background",
        ),
        (
            json!({"prompt": {"id": "p"}}),
            UnsupportedParameter,
            "prompt",
        ),
        (json!({"truncation": "never"}), InvalidValue, "truncation"),
        (
            json!({"text": {"format": {"type": "grammar"}}}),
            UnsupportedParameter,
            "text.format.type",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "name": "n"}}}),
            MissingField,
            "text.format.schema",
        ),
        (
            json!({"tools": [{"type": "function"}]}),
            MissingField,
            "tools[0].name",
        ),
        (
            json!({"tools": [{"type": "new_kind"}]}),
            UnsupportedParameter,
            "tools[0].type",
        ),
        (
            json!({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}]}),
            UnsupportedParameter,
            "tools[0].tools[0].type",
        ),
        (
            json!({"tool_choice": {"type": "web_search"}}),
            UnsupportedParameter,
            "tool_choice",
        ),
        (json!({"tool_choice": "some"}), InvalidValue, "tool_choice"),
        (json!({"include": [1]}), InvalidValue, "include[0]"),
    ] {
        assert_eq!(
            refusal_of(json!("x"), members.clone()),
            (code, param.to_owned()),
            "{members}"
        );
    }
    let broken = to_chat("{\"input\": ").unwrap_err();
    assert_eq!(broken.code, RefusalCode::InvalidJson);
}

#[test]
fn harmless_values_of_refused_members_are_accepted() {
    let request =
        json!({"input": "x", "background": false, "previous_response_id": null, "store": true});
    assert_eq!(
        chat_of(request),
        json!({"messages": [{"role": "user", "content": "x"}]})
    );
}

#[test]
fn reasoning_without_a_message_behind_it_is_reported() {
    let request = json!({"input": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        {"role": "user", "content": "x"},
    ]});
    let translated = to_chat(&request.to_string()).unwrap();
    assert_eq!(translated.ignored, ["input[0]"]);
}

#[test]
fn reasoning_between_calls_begins_a_message() {
    let call =
        |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
    let reasoning =
        json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]});
    let request = json!({"input": [call("a"), call("b"), reasoning, call("c")]});
    let chat = chat_of(request);
    let messages = chat["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 2);
    assert_eq!(messages[0]["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(messages[1]["reasoning_content"], "t");
}

#[test]
fn logprobs_are_asked_for_by_include() {
    let include = json!(["message.output_text.logprobs"]);
    let chat = chat_of(json!({"input": "x", "include": include, "top_logprobs": 2}));
    assert_eq!(
        (&chat["logprobs"], &chat["top_logprobs"]),
        (&json!(true), &json!(2))
    );
    let without = json!({"input": "x", "top_logprobs": 2});
    let translated = to_chat(&without.to_string()).unwrap();
    assert_eq!(translated.ignored, ["top_logprobs"]);
}

#[test]
fn members_of_chat_requests_alone_are_reported() {
    let request = json!({"input": "x", "messages": [], "max_tokens": 3, "min_p": 0.1, "stop": "a"});
    let translated = to_chat(&request.to_string()).unwrap();
    let chat: Value = serde_json::from_str(&translated.chat).unwrap();
    assert_eq!((&chat["min_p"], &chat["stop"]), (&json!(0.1), &json!("a")));
    assert_eq!(chat["messages"][0]["content"], "x");
    let mut ignored = translated.ignored;
    ignored.sort_unstable();
    assert_eq!(ignored, ["max_tokens", "messages"]);
}

#[test]
fn members_of_the_chat_request_have_the_clients_names() {
    let request = json!({
        "instructions": "i", "max_output_tokens": 4,
        "input": [{"role": "user", "content": "x"}],
        "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "high"},
    });
    let translated = to_chat(&request.to_string()).unwrap();
    for (chat, client) in [
        ("messages[0].content", "instructions.content"),
        ("messages[1].content", "input[0].content"),
        ("messages", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("tools[0].function.parameters", "tools[1].parameters"),
        ("response_format.json_schema.schema", "text.format.schema"),
        ("response_format.type", "text.format.type"),
        ("reasoning_effort", "reasoning.effort"),
        ("temperature", "temperature"),
    ] {
        assert_eq!(translated.client_param(chat), client);
    }
}

#[test]
fn echo_is_one_line_of_json() {
    let request =
        "{\"input\": \"x\",\n \"tools\": [\r\n{\"type\": \"function\",\n\"name\": \"f\"}]}";
    let echo = to_chat(request).unwrap().facts.echo;
    assert!(!echo.contains(['\n', '\r']));
    let echo: Value = serde_json::from_str(&format!("{{{echo}}}")).unwrap();
    assert_eq!(
        echo["tools"],
        json!([{"type": "function", "name": "f", "parameters": null, "strict": false}])
    );
    assert_eq!(echo["store"], false);
}

proptest! {
    /// Whatever a client sends is a chat request of well-formed JSON, or is refused.
    #[test]
    fn no_body_panics(
        names in proptest::sample::subsequence(
            vec!["input", "tools", "tool_choice", "text", "include", "reasoning", "instructions"],
            0..7,
        ),
        values in proptest::collection::vec(proptest::sample::select(vec![
            r#""a\n""#, "1", "null", "[]", "{}", r#"["x"]"#, r#"[{"type":"message","role":"user","content":"é"}]"#,
            r#"[{"type":"function","name":"f"}]"#, r#"[{"type":"custom","name":"f"}]"#,
            r#"[{"type":"reasoning","encrypted_content":"baton1:eA=="},{"type":"custom_tool_call","call_id":"1","name":"f","input":"\""}]"#,
            r#"{"type":"function","name":"f"}"#, r#"{"format":{"type":"json_object"}}"#, r#"{"effort":"low"}"#,
        ]), 7),
    ) {
        let members: Vec<String> = names
            .iter()
            .zip(&values)
            .map(|(name, value)| format!("\"{name}\":{value}"))
            .collect();
        let body = format!("{{{}}}", members.join(","));
        if let Ok(translated) = to_chat(&body) {
            let chat: Value = serde_json::from_str(&translated.chat).unwrap();
            prop_assert!(chat["messages"].is_array());
            let echo = format!("{{{}}}", translated.facts.echo);
            prop_assert!(serde_json::from_str::<Value>(&echo).is_ok());
        }
    }
}
