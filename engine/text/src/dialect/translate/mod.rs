//! Requests of other APIs as bodies of /v1/chat/completions, and the facts that their answers need.
//!
//! * [`responses`] reads /v1/responses;
//! * [`messages`] reads /v1/messages and the requests that count its tokens;
//! * [`chat_translation`](mod@chat_translation) chooses between them;
//! * `foreign_chat` writes a chat request for servers of other makes;
//! * [`model_list`] has models in Anthropic's form;
//! * [`reasoning_text`] is the opaque text that carries reasoning through a client;
//! * `conversation`, `members` and `response_format` are parts that both use.
//!
//! A value that has the same meaning in both APIs is copied as the client wrote it, unknown members
//! too: the validation of chat requests reads or refuses them. A member that exists in chat
//! requests alone has no effect here and is reported.

pub mod chat_translation;
mod conversation;
mod foreign_chat;
mod members;
pub mod messages;
pub mod model_list;
pub mod reasoning_text;
mod response_format;
pub mod responses;

use serde::{Deserialize, Serialize};

use self::members::{JsonMembers, ObjectText};
use crate::refusal::TextRefusal;

/// A client's request as a chat request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranslatedRequest {
    /// Body of /v1/chat/completions.
    pub chat: String,
    pub facts: RequestFacts,
    /// Members of the client's body that have no effect.
    pub ignored: Vec<String>,
    /// Members of `chat` that have another name in the client's body.
    pub names: Vec<ParamName>,
}

impl TranslatedRequest {
    /// Body for a server of another make.
    pub fn to_foreign_chat(&self, streams: bool) -> Result<String, TextRefusal> {
        foreign_chat::to_foreign_chat(&self.chat, streams)
    }

    /// The client's name of a member of `chat`, or of a place within one.
    pub fn client_param(&self, chat: &str) -> String {
        let longest = self
            .names
            .iter()
            .filter_map(|name| {
                let rest = chat.strip_prefix(&name.chat)?;
                let is_whole = rest.is_empty() || rest.starts_with(['.', '[']);
                is_whole.then_some((name, rest))
            })
            .max_by_key(|(name, _)| name.chat.len());
        match longest {
            Some((name, rest)) => format!("{}{rest}", name.client),
            None => chat.to_owned(),
        }
    }
}

/// Name of a member in a chat request and in the client's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamName {
    pub chat: String,
    pub client: String,
}

impl ParamName {
    fn new(chat: impl Into<String>, client: impl Into<String>) -> Self {
        Self {
            chat: chat.into(),
            client: client.into(),
        }
    }
}

/// Facts of a request that the writer of its answer needs. They pass through the front as JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestFacts {
    /// Members of the response that repeat the request: JSON without braces.
    pub echo: String,
    /// Reasoning items have their text in `encrypted_content`, too.
    pub includes_encrypted_content: bool,
    /// Thinking blocks have no text; it is in their signature.
    pub hides_thinking: bool,
    /// Tools whose calls have another form than that of a function.
    pub tools: Vec<ClientTool>,
}

/// A tool as the client knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientTool {
    /// Name by which the model calls it.
    pub flat_name: String,
    pub name: String,
    pub namespace: Option<String>,
    /// True if the input of its calls is a text, not an object.
    pub is_custom: bool,
}

/// Members of chat requests that the two APIs have under another name or not at all.
const CHAT_ONLY: [&str; 18] = [
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "response_format",
    "reasoning_effort",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "functions",
    "function_call",
    "continue_final_message",
    "add_generation_prompt",
    "echo",
    "prompt",
    "separate_reasoning",
    "stream_reasoning",
    "include_reasoning",
];

/// A chat request that is being put together.
#[derive(Debug, Default)]
struct ChatBody {
    members: ObjectText,
    ignored: Vec<String>,
    names: Vec<ParamName>,
}

impl ChatBody {
    /// Copies the members of `request` that this API does not define itself: those in neither
    /// `handled`, which are read elsewhere, nor `unused`, which change nothing.
    fn copy_others(&mut self, request: &JsonMembers<'_>, handled: &[&str], unused: &[&str]) {
        for (name, value) in request.iter() {
            if handled.contains(&name) || unused.contains(&name) {
                continue;
            }
            if CHAT_ONLY.contains(&name) {
                self.ignored.push(name.to_owned());
            } else {
                self.members.push(name, value.get());
            }
        }
    }

    /// Copies a member under the name that it has in chat requests.
    fn rename(&mut self, request: &JsonMembers<'_>, client: &str, chat: &str) {
        if let Some(value) = request.get(client) {
            self.members.push(chat, value.get());
            self.names.push(ParamName::new(chat, request.path(client)));
        }
    }

    /// Names tool `index` of the chat request as the client does.
    fn name_tool(&mut self, index: usize, client: &str) {
        let chat = format!("tools[{index}]");
        let function = format!("{chat}.function");
        self.names.push(ParamName::new(chat, client));
        self.names.push(ParamName::new(function, client));
    }

    fn ignore(&mut self, name: impl Into<String>) {
        self.ignored.push(name.into());
    }

    fn finish(self, facts: RequestFacts) -> TranslatedRequest {
        TranslatedRequest {
            chat: self.members.finish(),
            facts,
            ignored: self.ignored,
            names: self.names,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_name_that_is_a_whole_path_counts() {
        let translated = TranslatedRequest {
            chat: String::new(),
            facts: RequestFacts::default(),
            ignored: Vec::new(),
            names: vec![
                ParamName::new("messages", "input"),
                ParamName::new("messages[1]", "input[4]"),
                ParamName::new("tools[0].function", "tools[2]"),
            ],
        };
        for (chat, client) in [
            ("messages", "input"),
            ("messages[1].content", "input[4].content"),
            ("messages[10]", "input[10]"),
            ("tools[0].function.parameters", "tools[2].parameters"),
            ("temperature", "temperature"),
            ("messages_x", "messages_x"),
        ] {
            assert_eq!(translated.client_param(chat), client);
        }
    }
}
