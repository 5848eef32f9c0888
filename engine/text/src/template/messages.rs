//! Chat messages as a client sends them, normalized to the form that the model's chat template
//! takes.
//!
//! Clients write one wire format, templates expect several: content as a text, as a list of parts,
//! or either; the arguments of tool calls as an object or as JSON text; system messages anywhere or
//! only in front. [`TemplateCaps`] says what one template takes ([`super::probe`] finds out),
//! [`normalize_messages`] rewrites messages accordingly. Cases written by hand, with prompts
//! rendered by transformers, are in tests/contract/golden/messages/cases.json.

use std::collections::HashMap;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::caps::{ArgumentsFormat, ContentFormat, EmptyContent, TemplateCaps};
use super::json_value::{members_of, read_json};
use super::python_text::{json_text, python_str, string_repr};
use crate::refusal::{RefusalCode, TextRefusal};

/// Nesting of tool-call arguments that templates get: below the depth at which JSON readers and
/// printers give up.
const MAX_ARGUMENTS_DEPTH: usize = 100;
/// Names under which templates read the reasoning of a message, the usual one first (matches
/// transformers 5.24).
const REASONING_NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Between the texts of merged system messages.
const SYSTEM_SEPARATOR: &str = "\n\n";
/// Characters of a part's type that a refusal shows.
const SHOWN_CHARS: usize = 50;
const PART_EXAMPLE: &str = "must hold parts like {'type': 'text', 'text': …}";

/// The `messages` of a body, checked, in the form that the template takes.
///
/// Refused are messages that are malformed, hold other content than text, or whose text the
/// template drops.
pub fn normalize_messages(value: &Value, caps: &TemplateCaps) -> Result<Vec<Value>, TextRefusal> {
    if value.is_none() || value.is_undefined() {
        let message = "messages is required".to_owned();
        return Err(TextRefusal::new(
            RefusalCode::MissingField,
            message,
            "messages",
        ));
    }
    let is_list = value.kind() == ValueKind::Seq && value.len() != Some(0);
    let given = value.try_iter().ok().filter(|_| is_list);
    let given =
        given.ok_or_else(|| invalid_field("messages".to_owned(), "must be a non-empty array"))?;
    let mut messages: Vec<ChatMessage> = given
        .enumerate()
        .map(|(index, message)| ChatMessage::read(&message, &place_of(index)))
        .collect::<Result<_, _>>()?;
    add_tool_names(&mut messages);
    for (index, message) in messages.iter_mut().enumerate() {
        message.fit(caps, &place_of(index))?;
    }
    if !caps.inline_system {
        messages = merge_system_messages(messages, caps.system);
    }
    Ok(messages.into_iter().map(ChatMessage::into_value).collect())
}

fn place_of(index: usize) -> String {
    format!("messages[{index}]")
}

/// `param` with a problem that a client can mend.
fn invalid_field(param: String, problem: &str) -> TextRefusal {
    let message = format!("{param} {problem}");
    TextRefusal::invalid(param, message)
}

fn missing_field(param: String, problem: &str) -> TextRefusal {
    let message = format!("{param} {problem}");
    TextRefusal::new(RefusalCode::MissingField, message, param)
}

fn unsupported_field(param: String, message: String) -> TextRefusal {
    TextRefusal::new(RefusalCode::UnsupportedParameter, message, param)
}

/// A string or a list of text parts.
#[derive(Debug, Clone)]
pub enum MessageContent {
    Null,
    Text(Value),
    Parts(Vec<Value>),
}

impl MessageContent {
    pub fn from_text(text: &str) -> Self {
        Self::Text(Value::from(text))
    }

    /// `value`: the member `content`, if the message has one. `place`: the message's.
    fn read(value: Option<&Value>, role: &str, place: &str) -> Result<Self, TextRefusal> {
        let param = format!("{place}.content");
        let value = value.filter(|value| !value.is_none());
        match value {
            None if role == "assistant" => Ok(Self::Null),
            Some(text) if text.kind() == ValueKind::String => Ok(Self::Text(text.clone())),
            Some(parts) if parts.kind() == ValueKind::Seq => {
                let parts = items_of(parts).map(|part| read_part(&part, &param));
                parts.collect::<Result<_, _>>().map(Self::Parts)
            }
            _ => Err(missing_field(
                param,
                "must be a string or an array of text parts",
            )),
        }
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Text(text) => text.as_str() == Some(""),
            Self::Parts(parts) => parts.is_empty(),
        }
    }

    /// Put the content into the form of a template. Parts are joined by newlines, as in vLLM.
    pub fn fit(self, format: ContentFormat) -> Self {
        let content = if self.is_empty() {
            Self::from_text("")
        } else {
            self
        };
        match (format, content) {
            (ContentFormat::Both | ContentFormat::Parts, Self::Parts(parts)) => Self::Parts(parts),
            (ContentFormat::Parts | ContentFormat::OnePart, content) => {
                let text = content.into_text();
                Self::Parts(vec![object([
                    ("type", Value::from("text")),
                    ("text", text),
                ])])
            }
            (_, content) => Self::Text(content.into_text()),
        }
    }

    fn into_text(self) -> Value {
        match self {
            Self::Null => Value::from(""),
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts: Vec<Value> = parts.iter().map(|part| member(part, "text")).collect();
                let texts: Vec<&str> = texts.iter().filter_map(Value::as_str).collect();
                Value::from(texts.join("\n"))
            }
        }
    }

    pub fn into_value(self) -> Value {
        match self {
            Self::Null => Value::from(()),
            Self::Text(text) => text,
            Self::Parts(parts) => Value::from(parts),
        }
    }
}

/// An object with these members in this order.
pub fn object<const N: usize>(members: [(&str, Value); N]) -> Value {
    Value::from_pairs(members)
}

/// Items of a list; none of anything else.
fn items_of(list: &Value) -> impl Iterator<Item = Value> {
    list.try_iter().into_iter().flatten()
}

/// `param`: the content's.
fn read_part(part: &Value, param: &str) -> Result<Value, TextRefusal> {
    let no_text = || invalid_field(param.to_owned(), PART_EXAMPLE);
    let mut members = JsonObject::read(part).ok_or_else(no_text)?;
    members.set_default("type", Value::from("text"));
    let kind = members.get("type").map(python_str).unwrap_or_default();
    if kind != "text" {
        let shown: String = kind.chars().take(SHOWN_CHARS).collect();
        let shown = string_repr(&shown);
        let message = format!("{param} has a part of type {shown}; only text is supported");
        return Err(unsupported_field(param.to_owned(), message));
    }
    if members.text("text").is_none() {
        return Err(no_text());
    }
    Ok(members.into_value())
}

fn member(of: &Value, name: &str) -> Value {
    of.get_attr(name).unwrap_or_default()
}

/// Members of an object in their order, without those that are null.
#[derive(Debug, Clone)]
pub struct JsonObject(Vec<(String, Value)>);

impl JsonObject {
    /// `None`: the value is no object.
    pub fn read(value: &Value) -> Option<Self> {
        Self::read_keeping(value, None)
    }

    /// `kept` keeps its place even if it is null.
    fn read_keeping(value: &Value, kept: Option<&str>) -> Option<Self> {
        let mut members = members_of(value)?;
        members.retain(|(name, value)| !value.is_none() || kept == Some(name));
        Some(Self(members))
    }

    fn get(&self, name: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value)
    }

    /// A member that is a string.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(Value::as_str)
    }

    /// Replace a member in its place, or append it.
    pub fn set(&mut self, name: &str, value: Value) {
        match self.0.iter_mut().find(|(key, _)| key == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_owned(), value)),
        }
    }

    fn set_default(&mut self, name: &str, value: Value) {
        if self.get(name).is_none() {
            self.set(name, value);
        }
    }

    fn remove(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(key, _)| key == name)?;
        Some(self.0.remove(at).1)
    }

    pub fn into_value(self) -> Value {
        Value::from_pairs(self.0)
    }
}

struct ToolCall {
    members: JsonObject,
    /// `None`: the client wrote name and arguments into the call itself.
    function: Option<JsonObject>,
}

impl ToolCall {
    /// `None`: the value is no object.
    fn read(value: &Value) -> Option<Self> {
        let members = JsonObject::read(value)?;
        let function = members.get("function").and_then(JsonObject::read);
        Some(Self { members, function })
    }

    fn function(&self) -> &JsonObject {
        self.function.as_ref().unwrap_or(&self.members)
    }

    fn fit(&mut self, format: ArgumentsFormat) {
        let arguments = fitted_arguments(self.function().get("arguments"), format);
        let function = self.function.as_mut().unwrap_or(&mut self.members);
        function.set("arguments", arguments);
    }

    fn into_value(mut self) -> Value {
        if let Some(function) = self.function {
            self.members.set("function", function.into_value());
        }
        self.members.into_value()
    }
}

struct ChatMessage {
    role: String,
    /// All members; those that have a field of their own are put back by `into_value`.
    members: JsonObject,
    content: MessageContent,
    tool_calls: Vec<ToolCall>,
}

impl ChatMessage {
    /// `place`: as refusals name the message.
    fn read(value: &Value, place: &str) -> Result<Self, TextRefusal> {
        // Null stands for a content that is filled in.
        let members = JsonObject::read_keeping(value, Some("content"));
        let mut members = members.ok_or_else(|| {
            invalid_field(place.to_owned(), "must be an object with role and content")
        })?;
        let role = read_role(&members, place)?;
        let tool_calls = read_calls(&mut members, place)?;
        let reasoning = REASONING_NAMES.iter().find_map(|name| members.get(name));
        if let Some(reasoning) = reasoning.cloned() {
            for name in REASONING_NAMES {
                members.set_default(name, reasoning.clone());
            }
        }
        let content = MessageContent::read(members.get("content"), &role, place)?;
        Ok(Self {
            role,
            members,
            content,
            tool_calls,
        })
    }

    /// Put role, arguments and content into the template's form.
    fn fit(&mut self, caps: &TemplateCaps, place: &str) -> Result<(), TextRefusal> {
        if self.role == "developer" && !caps.developer.is_rendered() {
            self.role = "system".to_owned();
        }
        for call in &mut self.tool_calls {
            call.fit(caps.arguments);
        }
        let content = std::mem::replace(&mut self.content, MessageContent::Null);
        let format = caps.content_format(&self.role);
        if format == ContentFormat::Dropped {
            self.refuse_dropped_text(&content, place)?;
        }
        let is_null = content.is_empty()
            && !self.tool_calls.is_empty()
            && caps.empty_content == EmptyContent::Null;
        self.content = if is_null {
            MessageContent::Null
        } else {
            content.fit(format)
        };
        Ok(())
    }

    fn refuse_dropped_text(
        &self,
        content: &MessageContent,
        place: &str,
    ) -> Result<(), TextRefusal> {
        let text = content.clone().into_text();
        if text.as_str().is_none_or(|text| text.trim().is_empty()) {
            return Ok(());
        }
        let role = &self.role;
        let message = format!(
            "the model's chat template drops the content of {role} messages; leave them out, or start the engine \
             with a --chat-template FILE that writes them"
        );
        Err(unsupported_field(format!("{place}.content"), message))
    }

    fn into_value(self) -> Value {
        let mut members = self.members;
        members.set("role", Value::from(self.role));
        if self.tool_calls.is_empty() {
            members.remove("tool_calls");
        } else {
            let calls: Vec<Value> = self
                .tool_calls
                .into_iter()
                .map(ToolCall::into_value)
                .collect();
            members.set("tool_calls", Value::from(calls));
        }
        members.set("content", self.content.into_value());
        members.into_value()
    }
}

/// Role of a message; `function` is the older name of `tool`.
fn read_role(members: &JsonObject, place: &str) -> Result<String, TextRefusal> {
    let role = members.text("role").ok_or_else(|| {
        missing_field(format!("{place}.role"), "is required and must be a string")
    })?;
    if role == "function" {
        return Ok("tool".to_owned());
    }
    if role == "tool" && members.text("tool_call_id").is_none() {
        let param = format!("{place}.tool_call_id");
        return Err(missing_field(
            param,
            "is required: the id of the call that was answered",
        ));
    }
    Ok(role.to_owned())
}

/// Calls of a message, those under the older name `function_call` too.
fn read_calls(members: &mut JsonObject, place: &str) -> Result<Vec<ToolCall>, TextRefusal> {
    let param = || format!("{place}.tool_calls");
    let function_call = members.remove("function_call");
    let calls: Vec<ToolCall> = match members.get("tool_calls") {
        None => Vec::new(),
        Some(calls) if calls.kind() == ValueKind::Seq => {
            let calls = items_of(calls).map(|call| ToolCall::read(&call));
            let calls: Option<_> = calls.collect();
            calls.ok_or_else(|| {
                invalid_field(param(), "must hold objects with id, type and function")
            })?
        }
        Some(_) => return Err(invalid_field(param(), "must be an array")),
    };
    let predecessor = function_call.as_ref().and_then(JsonObject::read);
    match predecessor {
        Some(function) if calls.is_empty() => {
            let members = vec![
                ("type".to_owned(), Value::from("function")),
                ("function".to_owned(), Value::from(())),
            ];
            Ok(vec![ToolCall {
                members: JsonObject(members),
                function: Some(function),
            }])
        }
        _ => Ok(calls),
    }
}

/// Name the function in each tool message that leaves it out, by the call that it answers.
fn add_tool_names(messages: &mut [ChatMessage]) {
    let mut names: HashMap<String, String> = HashMap::new();
    for message in messages {
        for call in &message.tool_calls {
            let id = call.members.text("id");
            let name = call.function().text("name");
            if let (Some(id), Some(name)) = (id, name) {
                names.insert(id.to_owned(), name.to_owned());
            }
        }
        let answered = message.members.text("tool_call_id");
        let name = answered.and_then(|id| names.get(id));
        if let Some(name) = name.filter(|_| message.role == "tool") {
            message
                .members
                .set_default("name", Value::from(name.as_str()));
        }
    }
}

/// Arguments of one call. On the wire they are JSON text; an empty one, and null, are an empty
/// object.
fn fitted_arguments(given: Option<&Value>, format: ArgumentsFormat) -> Value {
    let is_json_space = |c| matches!(c, ' ' | '\t' | '\r' | '\n');
    let given = given.filter(|value| {
        let text = value.as_str().map(|text| text.trim_matches(is_json_space));
        !matches!(text, Some("" | "null"))
    });
    match format {
        ArgumentsFormat::JsonText => arguments_text(given),
        ArgumentsFormat::Object => arguments_object(given),
    }
}

fn arguments_text(given: Option<&Value>) -> Value {
    match given {
        Some(text) if text.as_str().is_some() => text.clone(),
        Some(value) => json_text(value).map_or_else(|_| Value::from("{}"), Value::from),
        None => Value::from("{}"),
    }
}

/// Malformed arguments are an empty object: one such call must not end the conversation (matches
/// vLLM).
fn arguments_object(given: Option<&Value>) -> Value {
    let parsed = given.and_then(|value| match value.as_str() {
        Some(text) => read_json(text).ok(),
        None => Some(value.clone()),
    });
    let is_fit =
        |value: &Value| value.kind() == ValueKind::Map && !is_deeper(value, MAX_ARGUMENTS_DEPTH);
    parsed.filter(is_fit).unwrap_or_else(|| object([]))
}

/// Values of an object or a list; none of anything else.
fn children(value: &Value) -> Vec<Value> {
    let Ok(items) = value.try_iter() else {
        return Vec::new();
    };
    match value.kind() {
        ValueKind::Seq => items.collect(),
        ValueKind::Map => items.filter_map(|key| value.get_item(&key).ok()).collect(),
        _ => Vec::new(),
    }
}

/// Objects and arrays are nested more than `depth` deep.
fn is_deeper(value: &Value, depth: usize) -> bool {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return false;
    }
    depth == 0
        || children(value)
            .iter()
            .any(|child| is_deeper(child, depth - 1))
}

/// Move the texts of all system messages into one message in front.
fn merge_system_messages(messages: Vec<ChatMessage>, format: ContentFormat) -> Vec<ChatMessage> {
    let is_system = |message: &ChatMessage| message.role == "system";
    let (mut systems, others): (Vec<_>, Vec<_>) = messages.into_iter().partition(is_system);
    if systems.len() > 1 {
        let contents = systems.iter().map(|message| message.content.clone());
        let texts = contents.map(|content| content.into_text().to_string());
        let text = texts.collect::<Vec<_>>().join(SYSTEM_SEPARATOR);
        systems[0].content = MessageContent::from_text(&text).fit(format);
        systems.truncate(1);
    }
    systems.extend(others);
    systems
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::Zoned;
    use serde::Deserialize;
    use serde_json::value::RawValue;

    use super::super::chat_template::{ChatTemplate, RenderOptions};
    use super::*;

    /// Written by tests/support/goldens/message_goldens.py.
    #[derive(Deserialize)]
    struct TemplateFamily {
        template: String,
        caps: TemplateCaps,
        cases: Vec<MessageCase>,
    }

    #[derive(Deserialize)]
    struct MessageCase {
        messages: Box<RawValue>,
        /// As it is written: the order of members reaches the template.
        normalized: Option<Box<RawValue>>,
        text: Option<String>,
        /// Member that the refusal names.
        refused: Option<String>,
        #[serde(default)]
        continues: bool,
    }

    fn families() -> BTreeMap<String, TemplateFamily> {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let file = root.join("tests/contract/golden/messages/cases.json");
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    }

    fn compile(source: &str) -> ChatTemplate {
        let special = BTreeMap::from([("eos_token".to_owned(), "</s>".to_owned())]);
        ChatTemplate::new(Some(source), special, Zoned::default)
    }

    #[test]
    fn probed_capabilities_are_the_templates() {
        for (name, family) in families() {
            assert_eq!(*compile(&family.template).caps(), family.caps, "{name}");
        }
    }

    #[test]
    fn normalized_messages_are_golden() {
        for (name, family) in families() {
            for case in &family.cases {
                let given = read_json(case.messages.get()).unwrap();
                let normalized = normalize_messages(&given, &family.caps);
                let normalized = normalized
                    .map(|made| json_text(&Value::from(made)).unwrap())
                    .map_err(|refusal| refusal.param);
                let expected = case.normalized.as_ref().map(|value| value.get().to_owned());
                let expected = expected.ok_or_else(|| case.refused.clone().unwrap());
                assert_eq!(normalized, expected, "{name}: {}", case.messages);
            }
        }
    }

    #[test]
    fn prompts_are_transformers() {
        for (name, family) in families() {
            let template = compile(&family.template);
            for case in family.cases {
                let given = read_json(case.messages.get()).unwrap();
                let Ok(messages) = template.normalize(&given) else {
                    assert_eq!(case.text, None, "{name}: {}", case.messages);
                    continue;
                };
                let options = RenderOptions {
                    add_generation_prompt: !case.continues,
                    continue_final_message: case.continues,
                    ..RenderOptions::default()
                };
                let text = template.render(messages, options).ok();
                assert_eq!(text, case.text, "{name}: {}", case.messages);
            }
        }
    }

    fn refusal_of(messages: &str) -> TextRefusal {
        let given = read_json(messages).unwrap();
        normalize_messages(&given, &TemplateCaps::default()).unwrap_err()
    }

    #[test]
    fn refusals_name_the_member_and_the_remedy() {
        for (messages, message) in [
            ("null", "messages is required"),
            ("[]", "messages must be a non-empty array"),
            ("{}", "messages must be a non-empty array"),
            ("[1]", "messages[0] must be an object with role and content"),
            (
                r#"[{"content": ""}]"#,
                "messages[0].role is required and must be a string",
            ),
            (
                r#"[{"role": "user"}]"#,
                "messages[0].content must be a string or an array of text parts",
            ),
            (
                r#"[{"role": "user", "content": [{"type": "it's"}]}]"#,
                r#"messages[0].content has a part of type "it's"; only text is supported"#,
            ),
            (
                r#"[{"role": "user", "content": [{"type": 7}]}]"#,
                "messages[0].content has a part of type '7'; only text is supported",
            ),
            (
                r#"[{"role": "user", "content": [{"type": "text"}]}]"#,
                "messages[0].content must hold parts like {'type': 'text', 'text': …}",
            ),
            (
                r#"[{"role": "tool", "content": ""}]"#,
                "messages[0].tool_call_id is required: the id of the call that was answered",
            ),
            (
                r#"[{"role": "assistant", "tool_calls": {}}]"#,
                "messages[0].tool_calls must be an array",
            ),
            (
                r#"[{"role": "assistant", "tool_calls": [1]}]"#,
                "messages[0].tool_calls must hold objects with id, type and function",
            ),
        ] {
            assert_eq!(refusal_of(messages).message, message);
        }
        assert_eq!(refusal_of("null").code, RefusalCode::MissingField);
        assert_eq!(refusal_of("[]").code, RefusalCode::InvalidValue);
    }

    #[test]
    fn arguments_keep_the_digits_of_long_integers() {
        for number in [
            "18446744073709551616",
            "-9223372036854775809",
            "1234567890123456789012345678901234567890",
        ] {
            let json = format!(
                r#"[{{"role": "assistant", "tool_calls": [{{"function": {{"arguments": "{{\"a\": [{number}]}}"}}}}]}}]"#
            );
            let given = read_json(&json).unwrap();
            let normalized = normalize_messages(&given, &TemplateCaps::default()).unwrap();
            let text = json_text(&Value::from(normalized)).unwrap();
            assert!(text.contains(&format!(r#"{{"a": [{number}]}}"#)), "{text}");
        }
    }
}
