//! Chat messages as a client sends them, normalized to the form that the model's chat template
//! takes.
//!
//! Clients write one wire format, templates expect several: content as a text, as a list of parts,
//! or either; the arguments of tool calls as an object or as JSON text; system messages anywhere or
//! only in front. [`TemplateCaps`] says what one template takes ([`super::template_probe`] finds
//! out), [`normalize_messages`] rewrites messages accordingly.
//!
//! Deterministic, no I/O. Our engines normalize in the same way
//! (engine/baton/server/text/messages.py); cases that both must satisfy are in
//! tests/contract/golden/messages/cases.json.

use std::collections::HashMap;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::python_text::json_text;

/// Nesting of tool-call arguments that templates get: below the depth at which JSON readers and
/// printers give up.
const MAX_ARGUMENTS_DEPTH: usize = 100;
/// Names under which templates read the reasoning of a message, the usual one first (matches
/// transformers 5.24).
const REASONING_NAMES: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// Between the texts of merged system messages.
const SYSTEM_SEPARATOR: &str = "\n\n";
/// From here on neighboring integers are one float: serde_json reads integers beyond 64 bits as
/// floats, the engines read them exactly.
const INEXACT_INTEGER: f64 = 9.2e18;

/// Form in which a template takes the content of messages of one role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[cfg_attr(test, derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum ContentFormat {
    /// A string; of a list it would print the syntax.
    Text,
    /// A list of parts; it would lose a string.
    Parts,
    /// A list of one part; it would lose the others.
    OnePart,
    /// A string or a list of parts.
    Both,
    /// Neither form reaches the prompt.
    Dropped,
    /// The template refuses messages of this role.
    Refused,
}

impl ContentFormat {
    pub fn is_rendered(self) -> bool {
        !matches!(self, Self::Dropped | Self::Refused)
    }
}

/// Form in which a template takes the arguments of tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[cfg_attr(test, derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum ArgumentsFormat {
    Object,
    JsonText,
}

/// Content of an assistant message that has tool calls and no text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[cfg_attr(test, derive(serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum EmptyContent {
    Text,
    Null,
}

/// Capabilities of a chat template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(test, derive(serde::Deserialize))]
pub struct TemplateCaps {
    pub system: ContentFormat,
    pub developer: ContentFormat,
    /// Also used for roles without a field of their own.
    pub user: ContentFormat,
    pub assistant: ContentFormat,
    pub tool: ContentFormat,
    pub arguments: ArgumentsFormat,
    pub empty_content: EmptyContent,
    /// System messages behind the first message reach the prompt.
    pub inline_system: bool,
}

/// Capabilities of a template that could not be probed.
impl Default for TemplateCaps {
    fn default() -> Self {
        Self {
            system: ContentFormat::Text,
            developer: ContentFormat::Text,
            user: ContentFormat::Text,
            assistant: ContentFormat::Text,
            tool: ContentFormat::Text,
            arguments: ArgumentsFormat::Object,
            empty_content: EmptyContent::Text,
            inline_system: true,
        }
    }
}

impl TemplateCaps {
    pub fn content_format(&self, role: &str) -> ContentFormat {
        match role {
            "system" => self.system,
            "developer" => self.developer,
            "assistant" => self.assistant,
            "tool" => self.tool,
            _ => self.user,
        }
    }

    /// `name=value` of each field, the same text in engine and router: part of the tokenizer's
    /// fingerprint.
    pub fn canonical(&self) -> String {
        format!(
            "system={} developer={} user={} assistant={} tool={} arguments={} empty_content={} inline_system={}",
            self.system.into_str(),
            self.developer.into_str(),
            self.user.into_str(),
            self.assistant.into_str(),
            self.tool.into_str(),
            self.arguments.into_str(),
            self.empty_content.into_str(),
            self.inline_system
        )
    }
}

/// The `messages` of a body in the form that the template takes.
///
/// `None`: an engine refuses these messages (malformed, other content than text, text that the
/// template drops), or they hold numbers that are not read exactly here.
pub fn normalize_messages(value: &Value, caps: &TemplateCaps) -> Option<Vec<Value>> {
    let is_list = value.kind() == ValueKind::Seq && value.len() != Some(0);
    let given = value.try_iter().ok().filter(|_| is_list)?;
    let mut messages: Vec<ChatMessage> = given
        .map(|message| ChatMessage::read(&message))
        .collect::<Option<_>>()?;
    add_tool_names(&mut messages);
    for message in &mut messages {
        message.fit(caps)?;
    }
    if !caps.inline_system {
        messages = merge_system_messages(messages, caps.system);
    }
    Some(messages.into_iter().map(ChatMessage::into_value).collect())
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

    /// `value`: the member `content`, if the message has one.
    fn read(value: Option<&Value>, role: &str) -> Option<Self> {
        let Some(value) = value.filter(|value| !value.is_none()) else {
            return (role == "assistant").then_some(Self::Null);
        };
        match value.kind() {
            ValueKind::String => Some(Self::Text(value.clone())),
            ValueKind::Seq => {
                let parts = value.try_iter().ok()?.map(|part| read_part(&part));
                parts.collect::<Option<_>>().map(Self::Parts)
            }
            _ => None,
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

fn read_part(part: &Value) -> Option<Value> {
    let mut members = JsonObject::read(part)?;
    let kind = members.get("type").cloned();
    let is_text = kind.is_none_or(|kind| kind.as_str() == Some("text"));
    let has_text = members
        .get("text")
        .is_some_and(|text| text.as_str().is_some());
    if !is_text || !has_text {
        return None;
    }
    members.set("type", Value::from("text"));
    Some(members.into_value())
}

fn member(of: &Value, name: &str) -> Value {
    of.get_attr(name).unwrap_or_default()
}

/// Members of an object in their order, without those that are null.
#[derive(Debug, Clone)]
struct JsonObject(Vec<(String, Value)>);

impl JsonObject {
    /// `None`: the value is no object.
    fn read(value: &Value) -> Option<Self> {
        Self::read_keeping(value, None)
    }

    /// `kept` keeps its place even if it is null.
    fn read_keeping(value: &Value, kept: Option<&str>) -> Option<Self> {
        let is_map = value.kind() == ValueKind::Map;
        let keys = value.try_iter().ok().filter(|_| is_map)?;
        let members = keys.map(|key| Some((key.as_str()?.to_owned(), value.get_item(&key).ok()?)));
        let mut members: Vec<(String, Value)> = members.collect::<Option<_>>()?;
        members.retain(|(name, value)| !value.is_none() || kept == Some(name));
        Some(Self(members))
    }

    fn get(&self, name: &str) -> Option<&Value> {
        let found = self.0.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(Value::as_str)
    }

    /// Replace a member in its place, or append it.
    fn set(&mut self, name: &str, value: Value) {
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

    fn into_value(self) -> Value {
        Value::from_pairs(self.0)
    }
}

struct ToolCall {
    members: JsonObject,
    /// `None`: the client wrote name and arguments into the call itself.
    function: Option<JsonObject>,
}

impl ToolCall {
    fn read(value: &Value) -> Option<Self> {
        let members = JsonObject::read(value)?;
        let function = members.get("function").and_then(JsonObject::read);
        Some(Self { members, function })
    }

    fn function(&self) -> &JsonObject {
        self.function.as_ref().unwrap_or(&self.members)
    }

    fn fit(&mut self, format: ArgumentsFormat) -> Option<()> {
        let arguments = fitted_arguments(self.function().get("arguments"), format)?;
        let function = self.function.as_mut().unwrap_or(&mut self.members);
        function.set("arguments", arguments);
        Some(())
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
    /// `None`: an engine refuses this message.
    fn read(value: &Value) -> Option<Self> {
        // Null stands for a content that is filled in.
        let mut members = JsonObject::read_keeping(value, Some("content"))?;
        let mut role = members.text("role")?.to_owned();
        if role == "function" {
            role = "tool".to_owned();
        } else if role == "tool" {
            members.text("tool_call_id")?;
        }
        let tool_calls = read_calls(&mut members)?;
        let reasoning = REASONING_NAMES.iter().find_map(|name| members.get(name));
        if let Some(reasoning) = reasoning.cloned() {
            for name in REASONING_NAMES {
                members.set_default(name, reasoning.clone());
            }
        }
        let content = MessageContent::read(members.get("content"), &role)?;
        Some(Self {
            role,
            members,
            content,
            tool_calls,
        })
    }

    /// Put role, arguments and content into the template's form. `None`: the template drops the
    /// text, or a number is not read exactly here.
    fn fit(&mut self, caps: &TemplateCaps) -> Option<()> {
        if self.role == "developer" && !caps.developer.is_rendered() {
            self.role = "system".to_owned();
        }
        for call in &mut self.tool_calls {
            call.fit(caps.arguments)?;
        }
        let content = std::mem::replace(&mut self.content, MessageContent::Null);
        let format = caps.content_format(&self.role);
        if format == ContentFormat::Dropped {
            let text = content.clone().into_text();
            if text.as_str().is_some_and(|text| !text.trim().is_empty()) {
                return None;
            }
        }
        let is_null = content.is_empty()
            && !self.tool_calls.is_empty()
            && caps.empty_content == EmptyContent::Null;
        self.content = if is_null {
            MessageContent::Null
        } else {
            content.fit(format)
        };
        Some(())
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

/// Calls of a message, those under the older name `function_call` too.
fn read_calls(members: &mut JsonObject) -> Option<Vec<ToolCall>> {
    let function_call = members.remove("function_call");
    let calls = match members.get("tool_calls") {
        None => Vec::new(),
        Some(calls) if calls.kind() == ValueKind::Seq => {
            let calls = calls.try_iter().ok()?.map(|call| ToolCall::read(&call));
            calls.collect::<Option<_>>()?
        }
        Some(_) => return None,
    };
    let predecessor = function_call.as_ref().and_then(JsonObject::read);
    match predecessor {
        Some(function) if calls.is_empty() => {
            let members = vec![
                ("type".to_owned(), Value::from("function")),
                ("function".to_owned(), Value::from(())),
            ];
            Some(vec![ToolCall {
                members: JsonObject(members),
                function: Some(function),
            }])
        }
        _ => Some(calls),
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
/// object. `None`: a number is not read exactly here.
fn fitted_arguments(given: Option<&Value>, format: ArgumentsFormat) -> Option<Value> {
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

fn arguments_text(given: Option<&Value>) -> Option<Value> {
    match given {
        None => Some(Value::from("{}")),
        Some(text) if text.as_str().is_some() => Some(text.clone()),
        Some(value) if holds_inexact_number(value) => None,
        Some(value) => json_text(value).ok().map(Value::from),
    }
}

/// Malformed arguments are an empty object: one such call must not end the conversation (matches
/// vLLM).
fn arguments_object(given: Option<&Value>) -> Option<Value> {
    let parsed = given.and_then(|value| match value.as_str() {
        Some(text) => serde_json::from_str::<Value>(text).ok(),
        None => Some(value.clone()),
    });
    let is_object = |value: &Value| value.kind() == ValueKind::Map;
    match parsed.filter(is_object) {
        Some(object) if holds_inexact_number(&object) => None,
        Some(object) if !is_deeper(&object, MAX_ARGUMENTS_DEPTH) => Some(object),
        _ => Some(object([])),
    }
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

/// An integer beyond 64 bits, or -0, which the engines read as integers.
fn holds_inexact_number(value: &Value) -> bool {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        let number = f64::try_from(value.clone()).unwrap_or(f64::INFINITY);
        let is_negative_zero = number == 0.0 && number.is_sign_negative();
        return is_negative_zero || number.abs() >= INEXACT_INTEGER;
    }
    children(value).iter().any(holds_inexact_number)
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

    use baton_text::dialect::Dialect;
    use serde::Deserialize;
    use serde_json::value::RawValue;

    use super::*;
    use crate::request::tokenize::TokenizeFallback;
    use crate::request::tokenize::prompt::texts_of;
    use crate::request::tokenize::template::ChatTemplate;

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
        #[serde(default)]
        continues: bool,
    }

    fn families() -> BTreeMap<String, TemplateFamily> {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let file = root.join("tests/contract/golden/messages/cases.json");
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
    }

    fn compile(source: &str) -> ChatTemplate {
        let special = BTreeMap::from([("eos_token".to_owned(), "</s>".to_owned())]);
        ChatTemplate::compile(source, special).unwrap()
    }

    #[test]
    fn probed_capabilities_are_the_templates() {
        for (name, family) in families() {
            assert_eq!(compile(&family.template).caps, family.caps, "{name}");
        }
    }

    #[test]
    fn normalized_messages_are_the_engines() {
        for (name, family) in families() {
            for case in &family.cases {
                let given: Value = serde_json::from_str(case.messages.get()).unwrap();
                let normalized = normalize_messages(&given, &family.caps);
                let normalized = normalized.map(|made| json_text(&Value::from(made)).unwrap());
                let expected = case.normalized.as_ref().map(|value| value.get().to_owned());
                assert_eq!(normalized, expected, "{name}: {}", case.messages);
            }
        }
    }

    #[test]
    fn prompts_are_transformers() {
        for (name, family) in families() {
            let template = compile(&family.template);
            for case in family.cases {
                let messages = &case.messages;
                let continues = case.continues;
                let body =
                    format!(r#"{{"messages":{messages},"continue_final_message":{continues}}}"#);
                let made = texts_of(body.as_bytes(), Dialect::Chat, Some(&template));
                let made = made.map(|made| made.texts.concat());
                let expected = case.text.ok_or(TokenizeFallback::Unread);
                assert_eq!(made, expected, "{name}: {}", case.messages);
            }
        }
    }

    #[test]
    fn numbers_that_are_not_read_exactly_are_left_to_the_engines() {
        let caps = TemplateCaps::default();
        for (number, is_read) in [
            ("18446744073709551615", true),
            ("18446744073709551616", false),
            ("-9223372036854775809", false),
            ("-0", false),
            ("1.5e3", true),
        ] {
            let message = serde_json::json!([{
                "role": "assistant",
                "tool_calls": [{"function": {"arguments": format!("{{\"a\": [{number}]}}")}}],
            }]);
            let message: Value = serde_json::from_str(&message.to_string()).unwrap();
            let normalized = normalize_messages(&message, &caps);
            assert_eq!(normalized.is_some(), is_read, "{number}");
        }
    }
}
