//! Capabilities of a chat template, found by rendering short conversations when the template is
//! loaded.
//!
//! Each probe puts words into one place of a conversation and looks whether they reach the prompt.
//! The order of the probes matters: later ones write the content of their other messages as the
//! earlier ones found. Rendering twenty conversations takes less than a millisecond.

use minijinja::Value;

use super::caps::{ArgumentsFormat, ContentFormat, EmptyContent, TemplateCaps};
use super::messages::{MessageContent, object};

/// Text of a conversation with these tools; `None`: the template raises an error.
type RenderWithTools<'a> = &'a dyn Fn(Vec<Value>, Option<Value>) -> Option<String>;
/// Text of a conversation without tools; `None`: the template raises an error.
type Render<'a> = &'a dyn Fn(Vec<Value>) -> Option<String>;

const WORD: &str = "batonprobea";
const TEXT_WORDS: [&str; 2] = [WORD, "batonprobeb"];
/// Member of content parts that is no text: in the prompt only where a template prints whole parts.
const SYNTAX_WORD: &str = "batonprobec";
/// Argument of a tool call, raw and in JSON. JSON, Python's repr and Rust's debug form each write
/// the control character differently, so that JSON differs from an object that the template printed
/// where it expected text.
const VALUE_FORMS: [&str; 2] = [
    "batonprobed\u{1}batonprobee",
    r"batonprobed\u0001batonprobee",
];
const VALUE_JSON: &str = r#"{"probe": "batonprobed\u0001batonprobee"}"#;
/// Nine letters and digits: Mistral's templates refuse others.
const CALL_ID: &str = "probe0id9";
const NEUTRAL_TEXT: &str = "ok";

/// Find out what a template takes. Equal templates give equal capabilities.
pub fn probe_template(render_with_tools: RenderWithTools<'_>) -> TemplateCaps {
    let render: Render<'_> = &|messages| render_with_tools(messages, None);
    let mut caps = TemplateCaps::default();
    caps.user = content_format(render, &caps, "user");
    caps.assistant = content_format(render, &caps, "assistant");
    caps.system = content_format(render, &caps, "system");
    caps.developer = content_format(render, &caps, "developer");
    caps = with_call_format(render, caps);
    caps.tool = content_format(render, &caps, "tool");
    caps.inline_system = is_inline_system_rendered(render, &caps);
    caps.renders_tools = are_tools_rendered(render_with_tools, &caps);
    caps
}

fn message(role: &str, content: Value) -> Value {
    object([("role", Value::from(role)), ("content", content)])
}

/// `text` in the form of a template.
fn content(text: &str, format: ContentFormat) -> Value {
    MessageContent::from_text(text).fit(format).into_value()
}

fn neutral_message(caps: &TemplateCaps, role: &str) -> Value {
    message(role, content(NEUTRAL_TEXT, caps.content_format(role)))
}

/// Form in which content of `role` reaches the prompt.
fn content_format(render: Render<'_>, caps: &TemplateCaps, role: &str) -> ContentFormat {
    let shown_words = |content: Value| -> Option<Vec<&str>> {
        let text = render(conversation_with(caps, role, content))?;
        let words = TEXT_WORDS.into_iter().chain([SYNTAX_WORD]);
        Some(words.filter(|word| text.contains(word)).collect())
    };
    let parts = TEXT_WORDS.map(|word| {
        object([
            ("type", Value::from("text")),
            ("text", Value::from(word)),
            (SYNTAX_WORD, Value::from(SYNTAX_WORD)),
        ])
    });
    let words_of_text = shown_words(Value::from(WORD));
    let takes_text = words_of_text.as_deref() == Some(&[WORD]);
    let words_of_parts = shown_words(Value::from(parts.to_vec()));
    if words_of_parts.as_deref() == Some(&TEXT_WORDS) {
        if takes_text {
            return ContentFormat::Both;
        }
        return ContentFormat::Parts;
    }
    if takes_text {
        return ContentFormat::Text;
    }
    let words_of_one_part = shown_words(Value::from(parts[..1].to_vec()));
    if words_of_one_part.as_deref() == Some(&[WORD]) {
        return ContentFormat::OnePart;
    }
    if words_of_text.is_none() {
        return ContentFormat::Refused;
    }
    ContentFormat::Dropped
}

/// Shortest ordinary conversation in which a message of `role` has `content`.
fn conversation_with(caps: &TemplateCaps, role: &str, content: Value) -> Vec<Value> {
    let user = neutral_message(caps, "user");
    match role {
        "system" | "developer" => vec![message(role, content), user],
        "assistant" => vec![user.clone(), message(role, content), user],
        "tool" => vec![user, calling_message(caps), tool_message(content)],
        _ => vec![message(role, content)],
    }
}

fn are_tools_rendered(render: RenderWithTools<'_>, caps: &TemplateCaps) -> bool {
    let argument = object([("type", Value::from("string"))]);
    let parameters = object([
        ("type", Value::from("object")),
        ("properties", object([("probe", argument)])),
        ("required", Value::from(vec!["probe"])),
    ]);
    let function = object([
        ("name", Value::from(WORD)),
        ("description", Value::from(NEUTRAL_TEXT)),
        ("parameters", parameters),
    ]);
    let tool = object([("type", Value::from("function")), ("function", function)]);
    let conversation = vec![neutral_message(caps, "user")];
    let text = render(conversation, Some(Value::from(vec![tool])));
    text.is_some_and(|text| text.contains(WORD))
}

fn calling_message(caps: &TemplateCaps) -> Value {
    let arguments = match caps.arguments {
        ArgumentsFormat::Object => object([("probe", Value::from(VALUE_FORMS[0]))]),
        ArgumentsFormat::JsonText => Value::from(VALUE_JSON),
    };
    let function = object([("name", Value::from("probe")), ("arguments", arguments)]);
    let call = object([
        ("id", Value::from(CALL_ID)),
        ("type", Value::from("function")),
        ("function", function),
    ]);
    let content = match caps.empty_content {
        EmptyContent::Text => content("", caps.assistant),
        EmptyContent::Null => Value::from(()),
    };
    object([
        ("role", Value::from("assistant")),
        ("content", content),
        ("tool_calls", Value::from(vec![call])),
    ])
}

fn tool_message(content: Value) -> Value {
    object([
        ("role", Value::from("tool")),
        ("content", content),
        ("tool_call_id", Value::from(CALL_ID)),
        ("name", Value::from("probe")),
    ])
}

/// Find the form in which arguments reach the prompt as JSON or value by value; an object if
/// several do.
fn with_call_format(render: Render<'_>, caps: TemplateCaps) -> TemplateCaps {
    let user = neutral_message(&caps, "user");
    let tool = tool_message(content(NEUTRAL_TEXT, caps.user));
    for arguments in [ArgumentsFormat::Object, ArgumentsFormat::JsonText] {
        for empty_content in [EmptyContent::Text, EmptyContent::Null] {
            let tried = TemplateCaps {
                arguments,
                empty_content,
                ..caps
            };
            let calling = calling_message(&tried);
            for conversation in [
                vec![user.clone(), calling.clone(), tool.clone()],
                vec![user.clone(), calling.clone()],
            ] {
                let text = render(conversation).unwrap_or_default();
                if VALUE_FORMS.iter().any(|form| text.contains(form)) {
                    return tried;
                }
            }
        }
    }
    caps
}

/// System messages behind the first message reach the prompt. True where none does: merging would
/// not help.
fn is_inline_system_rendered(render: Render<'_>, caps: &TemplateCaps) -> bool {
    if !caps.system.is_rendered() {
        return true;
    }
    let conversation = vec![
        neutral_message(caps, "system"),
        neutral_message(caps, "user"),
        neutral_message(caps, "assistant"),
        message("system", content(WORD, caps.system)),
        neutral_message(caps, "user"),
    ];
    render(conversation).is_some_and(|text| text.contains(WORD))
}
