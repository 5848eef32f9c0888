//! Chat requests for servers of other makes: members under the names that each of them knows.
//!
//! * The limit of the answer: `max_completion_tokens` (OpenAI, SGLang, vLLM) and `max_tokens`
//!   (Ollama, TGI, older servers of all makes), which would answer without a limit if they knew
//!   neither;
//! * the role `developer`: chat templates know `system`;
//! * reasoning of earlier answers: `reasoning_content` (SGLang) and `reasoning` (vLLM);
//! * counts in a stream, which other servers write only when asked to.

use serde_json::value::RawValue;

use super::members::{JsonMembers, ObjectText, array_text, is_text};
use crate::refusal::TextRefusal;

/// Counts that answers of these APIs have at their begin and at their end.
const STREAM_OPTIONS: &str = r#"{"include_usage":true,"continuous_usage_stats":true}"#;
/// Names of the answer's limit.
const LIMIT_NAMES: [&str; 2] = ["max_completion_tokens", "max_tokens"];
/// Names of an earlier answer's reasoning.
const REASONING_NAMES: [&str; 2] = ["reasoning_content", "reasoning"];

/// `chat`: a body that a translation made.
pub fn to_foreign_chat(chat: &str, streams: bool) -> Result<String, TextRefusal> {
    let request = JsonMembers::of_body(chat)?;
    let mut body = ObjectText::default();
    for (name, value) in request.iter() {
        match name {
            "messages" => body.push(name, &foreign_messages(&request)?),
            "max_completion_tokens" => {
                for name in LIMIT_NAMES {
                    body.push(name, value.get());
                }
            }
            _ => body.push(name, value.get()),
        }
    }
    if streams {
        body.push("stream_options", STREAM_OPTIONS);
    }
    Ok(body.finish())
}

fn foreign_messages(request: &JsonMembers<'_>) -> Result<String, TextRefusal> {
    let messages = request.array("messages")?.unwrap_or_default();
    let messages: Result<Vec<String>, TextRefusal> = messages
        .into_iter()
        .map(|(message, place)| foreign_message(message, place))
        .collect();
    Ok(array_text(&messages?))
}

fn foreign_message(message: &RawValue, place: String) -> Result<String, TextRefusal> {
    let members = JsonMembers::read(message, place)?;
    let mut foreign = ObjectText::default();
    for (name, value) in members.iter() {
        match name {
            "role" if is_text(value) && members.require_text(name)? == "developer" => {
                foreign.push_text(name, "system");
            }
            "reasoning_content" => {
                for name in REASONING_NAMES {
                    foreign.push(name, value.get());
                }
            }
            _ => foreign.push(name, value.get()),
        }
    }
    // Calls stand beside it: null says that there is no text, which some servers require.
    if members.get("content").is_none() {
        foreign.push("content", "null");
    }
    Ok(foreign.finish())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use crate::dialect::Dialect;
    use crate::dialect::translate::chat_translation::translate_body;

    fn foreign(dialect: Dialect, body: &Value, streams: bool) -> Value {
        let body = body.to_string();
        let translated = translate_body(dialect, body.as_bytes()).unwrap().unwrap();
        let chat = translated.to_foreign_chat(streams).unwrap();
        serde_json::from_str(&chat).unwrap()
    }

    #[test]
    fn limit_has_both_names() {
        let response = json!({"model": "m", "input": "hi", "max_output_tokens": 9});
        let message = json!({"model": "m", "max_tokens": 9, "messages": [
            {"role": "user", "content": "hi"},
        ]});
        for (dialect, body) in [(Dialect::Responses, response), (Dialect::Messages, message)] {
            let chat = foreign(dialect, &body, true);
            assert_eq!(chat["max_tokens"], 9);
            assert_eq!(chat["max_completion_tokens"], 9);
            assert_eq!(chat["stream_options"]["include_usage"], true);
            let chat = foreign(dialect, &body, false);
            assert!(chat.get("stream_options").is_none());
        }
        let unlimited = foreign(
            Dialect::Responses,
            &json!({"model": "m", "input": "hi"}),
            false,
        );
        assert!(unlimited.get("max_tokens").is_none());
    }

    #[test]
    fn roles_and_reasoning_have_names_that_templates_know() {
        let body = json!({"model": "m", "input": [
            {"role": "developer", "content": "Be terse."},
            {"role": "user", "content": "the role \"developer\""},
            {"type": "reasoning", "id": "rs_1", "summary": [],
                "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\": 1e0}"},
            {"type": "function_call_output", "call_id": "c", "output": "o"},
        ]});
        let chat = foreign(Dialect::Responses, &body, false);
        let messages = &chat["messages"];
        assert_eq!(
            messages[0],
            json!({"role": "system", "content": "Be terse."})
        );
        assert_eq!(messages[1]["content"], "the role \"developer\"");
        assert_eq!(messages[2]["reasoning_content"], "r");
        assert_eq!(messages[2]["reasoning"], "r");
        assert_eq!(messages[2]["content"], Value::Null);
        assert!(messages[2].as_object().unwrap().contains_key("content"));
        let arguments = &messages[2]["tool_calls"][0]["function"]["arguments"];
        assert_eq!(arguments, "{\"a\": 1e0}");
        assert_eq!(messages[3]["role"], "tool");
    }
}
