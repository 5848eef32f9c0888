//! Refusals and rare forms. Usual requests are golden:
//! tests/contract/golden/dialects/messages.json.

use serde_json::{Value, json};

use super::*;
use crate::refusal::RefusalCode;

fn chat_of(request: Value) -> Value {
    serde_json::from_str(&to_chat(&request.to_string()).unwrap().chat).unwrap()
}

fn request(messages: Value, members: Value) -> Value {
    let mut request = json!({"model": "m", "max_tokens": 9, "messages": messages});
    for (name, value) in members.as_object().unwrap() {
        request[name] = value.clone();
    }
    request
}

fn refusal_of(messages: Value, members: Value) -> (RefusalCode, String) {
    let refusal = to_chat(&request(messages, members).to_string()).unwrap_err();
    assert!(
        refusal.message.starts_with(&refusal.param),
        "{}",
        refusal.message
    );
    (refusal.code, refusal.param)
}

#[test]
fn messages_are_refused_by_their_place() {
    use RefusalCode::{InvalidValue, MissingField, UnsupportedParameter};
    for (message, code, param) in [
        (json!(1), InvalidValue, "messages[1]"),
        (json!({"role": "user"}), MissingField, "messages[1].content"),
        (
            json!({"role": "tool", "content": ""}),
            InvalidValue,
            "messages[1].role",
        ),
        (
            json!({"role": "user", "content": 1}),
            InvalidValue,
            "messages[1].content",
        ),
        (
            json!({"role": "user", "content": [{"type": "image", "source": {}}]}),
            UnsupportedParameter,
            "messages[1].content[0].type",
        ),
        (
            json!({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}),
            InvalidValue,
            "messages[1].content[0].tool_use_id",
        ),
        (
            json!({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}]}),
            InvalidValue,
            "messages[1].content[0].input",
        ),
        (
            json!({"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}),
            InvalidValue,
            "messages[1]",
        ),
        (
            json!({"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}}]}),
            InvalidValue,
            "messages[1].content[0].tool.name",
        ),
        (
            json!({"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "mcp_toolset_reference"}}]}),
            UnsupportedParameter,
            "messages[1].content[0].tool.type",
        ),
        (
            json!({"role": "system", "clear_at": "later", "content": "x"}),
            InvalidValue,
            "messages[1].clear_at",
        ),
    ] {
        let messages = json!([{"role": "user", "content": "x"}, message]);
        assert_eq!(
            refusal_of(messages.clone(), json!({})),
            (code, param.to_owned()),
            "{messages}"
        );
    }
    assert_eq!(
        refusal_of(json!([]), json!({})),
        (InvalidValue, "messages".to_owned())
    );
    assert_eq!(
        refusal_of(json!(null), json!({})),
        (MissingField, "messages".to_owned())
    );
}

#[test]
fn members_are_refused_by_name() {
    use RefusalCode::{InvalidValue, MissingField, UnsupportedParameter};
    let messages = json!([{"role": "user", "content": "x"}]);
    for (members, code, param) in [
        (json!({"max_tokens": null}), MissingField, "max_tokens"),
        (
            json!({"mcp_servers": [{"url": "x"}]}),
            UnsupportedParameter,
            "mcp_servers",
        ),
        (
            json!({"thread": {"type": "create"}}),
            UnsupportedParameter,
            "thread",
        ),
        (
            json!({"thinking": {"type": "enabled"}}),
            MissingField,
            "thinking.budget_tokens",
        ),
        (
            json!({"thinking": {"type": "maybe"}}),
            InvalidValue,
            "thinking.type",
        ),
        (
            json!({"thinking": {"type": "adaptive", "display": "loud"}}),
            InvalidValue,
            "thinking.display",
        ),
        (
            json!({"tools": [{"name": "f"}]}),
            MissingField,
            "tools[0].input_schema",
        ),
        (
            json!({"tool_choice": {"type": "some"}}),
            InvalidValue,
            "tool_choice.type",
        ),
        (
            json!({"tool_choice": {"type": "tool"}}),
            MissingField,
            "tool_choice.name",
        ),
        (
            json!({"system": [{"type": "image"}]}),
            UnsupportedParameter,
            "system[0].type",
        ),
        (
            json!({"output_config": {"format": {"type": "xml"}}}),
            UnsupportedParameter,
            "output_config.format.type",
        ),
    ] {
        assert_eq!(
            refusal_of(messages.clone(), members.clone()),
            (code, param.to_owned()),
            "{members}"
        );
    }
}

#[test]
fn counted_requests_need_no_limit() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]}).to_string();
    assert_eq!(to_chat(&body).unwrap_err().param, "max_tokens");
    let chat: Value = serde_json::from_str(&to_counted_chat(&body).unwrap().chat).unwrap();
    assert_eq!(chat["messages"], json!([{"role": "user", "content": "x"}]));
}

#[test]
fn results_of_calls_come_before_the_users_text_and_name_their_failure() {
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1}},
            {"type": "tool_use", "id": "b", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "text", "text": "and?"},
            {"type": "tool_result", "tool_use_id": "a", "is_error": true},
            {"type": "tool_result", "tool_use_id": "b", "is_error": true, "content": "Error: gone"},
        ]},
    ]);
    let chat = chat_of(request(messages, json!({})));
    let expected = [
        json!({"role": "tool", "tool_call_id": "a", "content": "Error:"}),
        json!({"role": "tool", "tool_call_id": "b", "content": "Error: gone"}),
        json!({"role": "user", "content": "and?"}),
    ];
    assert_eq!(chat["messages"].as_array().unwrap()[2..], expected);
    assert_eq!(
        chat["messages"][1]["tool_calls"][0]["function"]["arguments"],
        "{\"n\": 1}"
    );
}

#[test]
fn system_messages_add_and_remove_tools() {
    let tool = |name: &str| json!({"name": name, "input_schema": {"type": "object"}});
    let mut deferred = tool("later");
    deferred["defer_loading"] = json!(true);
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "system", "content": [
            {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "later"}},
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool("inline")}},
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "first"}},
        ]},
    ]);
    let members = json!({"tools": [tool("first"), deferred, tool("second")]});
    let chat = chat_of(request(messages, members));
    let tools = chat["tools"].as_array().unwrap();
    let names: Vec<&str> = tools
        .iter()
        .map(|tool| tool["function"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["later", "second", "inline"]);
    assert_eq!(chat["messages"].as_array().unwrap().len(), 1);
}

#[test]
fn system_text_that_is_cleared_is_not_rendered() {
    let note = json!({"role": "system", "clear_at": "next_user_message", "content": "now"});
    let user = json!({"role": "user", "content": "x"});
    let both = json!([user.clone(), note.clone(), user.clone()]);
    let chat = chat_of(request(both, json!({})));
    assert_eq!(chat["messages"].as_array().unwrap().len(), 2);
    let last = json!([user, note]);
    let chat = chat_of(request(last, json!({})));
    assert_eq!(chat["messages"][1]["content"], "now");
}

#[test]
fn last_message_of_the_assistant_is_continued() {
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is"}]},
    ]);
    let chat = chat_of(request(messages, json!({})));
    assert_eq!(chat["continue_final_message"], true);
    assert_eq!(chat["add_generation_prompt"], false);
}

#[test]
fn members_of_the_chat_request_have_the_clients_names() {
    let members = json!({
        "system": "s", "stop_sequences": ["a"],
        "tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "f", "input_schema": {}}],
        "output_config": {"format": {"type": "json_schema", "schema": {}}},
        "thinking": {"type": "enabled", "budget_tokens": 5},
    });
    let body = request(json!([{"role": "user", "content": "x"}]), members).to_string();
    let translated = to_chat(&body).unwrap();
    for (chat, client) in [
        ("messages[0]", "system"),
        ("messages[1].content", "messages[0].content"),
        ("stop", "stop_sequences"),
        ("max_completion_tokens", "max_tokens"),
        ("tools[0].function.parameters", "tools[1].input_schema"),
        (
            "response_format.json_schema.schema",
            "output_config.format.schema",
        ),
        ("thinking_token_budget", "thinking.budget_tokens"),
    ] {
        assert_eq!(translated.client_param(chat), client);
    }
    assert_eq!(translated.ignored, ["tools.bash_20250124"]);
}
