//! Messages of a chat, gathered from the items of another API.
//!
//! 1. Reasoning waits for the assistant's next message or call;
//! 2. calls join the assistant message directly before them;
//! 3. any other message closes the assistant's.

use std::collections::HashSet;

use serde_json::value::RawValue;

use super::ParamName;
use super::members::{ObjectText, array_text, quote};

/// Content of a message: JSON strings, each a part of it.
#[derive(Debug, Clone, Default)]
pub struct TextContent(Vec<String>);

impl TextContent {
    pub fn of_text(text: &str) -> Self {
        Self(vec![quote(text)])
    }

    /// `text`: a JSON string.
    pub fn push(&mut self, text: &RawValue) {
        self.0.push(text.get().to_owned());
    }

    pub fn push_text(&mut self, text: &str) {
        self.0.push(quote(text));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A string for one part, a list for several.
    fn to_json(&self) -> String {
        match &self.0[..] {
            [] => "\"\"".to_owned(),
            [text] => text.clone(),
            texts => {
                let parts = texts
                    .iter()
                    .map(|text| format!("{{\"type\":\"text\",\"text\":{text}}}"));
                array_text(&parts.collect::<Vec<_>>())
            }
        }
    }
}

#[derive(Debug, Default)]
struct AssistantMessage {
    place: String,
    reasoning: Option<String>,
    content: TextContent,
    calls: Vec<String>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Conversation {
    messages: Vec<String>,
    /// Places of the messages in the client's body.
    places: Vec<String>,
    assistant: Option<AssistantMessage>,
    /// Reasoning that waits, and its place in the client's body.
    reasoning: Option<(String, String)>,
    call_ids: HashSet<String>,
    /// Places of reasoning that no message of the assistant followed.
    pub dropped_reasoning: Vec<String>,
}

impl Conversation {
    /// A message of any role but the assistant's and a tool's.
    pub fn add_message(&mut self, place: &str, role: &str, content: &TextContent) {
        self.close_assistant();
        self.drop_reasoning();
        let mut message = ObjectText::default();
        message.push_text("role", role);
        message.push("content", &content.to_json());
        self.push(place, message);
    }

    /// Begins a message of the assistant.
    pub fn begin_assistant(&mut self, place: &str) {
        self.close_assistant();
        let reasoning = self.reasoning.take().map(|(text, _)| text);
        self.assistant = Some(AssistantMessage {
            place: place.to_owned(),
            reasoning,
            ..AssistantMessage::default()
        });
    }

    /// Content of the assistant's message that was begun.
    pub fn assistant_content(&mut self) -> &mut TextContent {
        &mut self.assistant.get_or_insert_default().content
    }

    /// `arguments`: their JSON as a JSON string.
    pub fn add_call(&mut self, place: &str, id: &str, name: &str, arguments: &str) {
        if self.assistant.is_none() || self.reasoning.is_some() {
            self.begin_assistant(place);
        }
        let mut function = ObjectText::default();
        function.push_text("name", name);
        function.push("arguments", arguments);
        let mut call = ObjectText::default();
        call.push_text("id", id);
        call.push_text("type", "function");
        call.push("function", &function.finish());
        self.call_ids.insert(id.to_owned());
        let assistant = self.assistant.get_or_insert_default();
        assistant.calls.push(call.finish());
    }

    pub fn has_call(&self, id: &str) -> bool {
        self.call_ids.contains(id)
    }

    pub fn add_tool_result(&mut self, place: &str, call_id: &str, content: &TextContent) {
        self.close_assistant();
        self.drop_reasoning();
        let mut message = ObjectText::default();
        message.push_text("role", "tool");
        message.push_text("tool_call_id", call_id);
        message.push("content", &content.to_json());
        self.push(place, message);
    }

    /// Reasoning of the assistant's next message or call.
    pub fn add_reasoning(&mut self, place: &str, text: &str) {
        match &mut self.reasoning {
            Some((before, _)) => {
                before.push('\n');
                before.push_str(text);
            }
            None => self.reasoning = Some((text.to_owned(), place.to_owned())),
        }
    }

    fn drop_reasoning(&mut self) {
        if let Some((_, place)) = self.reasoning.take() {
            self.dropped_reasoning.push(place);
        }
    }

    fn close_assistant(&mut self) {
        let Some(assistant) = self.assistant.take() else {
            return;
        };
        let mut message = ObjectText::default();
        message.push_text("role", "assistant");
        if assistant.content.is_empty() {
            message.push("content", "null");
        } else {
            message.push("content", &assistant.content.to_json());
        }
        if let Some(reasoning) = &assistant.reasoning {
            message.push_text("reasoning_content", reasoning);
        }
        if !assistant.calls.is_empty() {
            message.push("tool_calls", &array_text(&assistant.calls));
        }
        self.push(&assistant.place, message);
    }

    fn push(&mut self, place: &str, message: ObjectText) {
        self.places.push(place.to_owned());
        self.messages.push(message.finish());
    }

    /// The messages as JSON, and the names by which clients know them. Null: there are none.
    pub fn finish(&mut self, names: &mut Vec<ParamName>) -> Option<String> {
        self.close_assistant();
        self.drop_reasoning();
        for (index, place) in self.places.iter().enumerate() {
            names.push(ParamName::new(format!("messages[{index}]"), place));
        }
        (!self.messages.is_empty()).then(|| array_text(&self.messages))
    }
}
