//! Requests of /v1/messages and /v1/messages/count_tokens.
//!
//! * `turns`: system text and messages;
//! * `tools`: tools, those that turns add or refer to, and the choice among them.

mod tools;
mod turns;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use self::tools::ToolSet;
use super::members::{JsonMembers, array_text, invalid, unsupported};
use super::{ChatBody, ParamName, RequestFacts, TranslatedRequest};
use crate::refusal::TextRefusal;

/// Members that this module reads.
const HANDLED: [&str; 13] = [
    "messages",
    "system",
    "max_tokens",
    "stop_sequences",
    "tools",
    "tool_choice",
    "thinking",
    "output_config",
    "metadata",
    "mcp_servers",
    "betas",
    "stream_options",
    "thread",
];
/// Members of Anthropic's API that have no effect here.
const WITHOUT_EFFECT: [&str; 8] = [
    "cache_control",
    "context_management",
    "container",
    "betas",
    "inference_geo",
    "speed",
    "diagnostics",
    "mcp_servers",
];

/// A body of /v1/messages as one of /v1/chat/completions.
pub fn to_chat(body: &str) -> Result<TranslatedRequest, TextRefusal> {
    let request = JsonMembers::of_body(body)?;
    request.require("max_tokens")?;
    translate(&request)
}

/// A body of /v1/messages/count_tokens as one of /v1/chat/completions.
pub fn to_counted_chat(body: &str) -> Result<TranslatedRequest, TextRefusal> {
    translate(&JsonMembers::of_body(body)?)
}

fn translate(request: &JsonMembers<'_>) -> Result<TranslatedRequest, TextRefusal> {
    refuse_thread(request)?;
    let mut chat = ChatBody::default();
    let mut tools = ToolSet::read(request, &mut chat)?;
    let continues = turns::read_conversation(request, &mut tools, &mut chat)?;
    if continues {
        chat.members.push("continue_final_message", "true");
        chat.members.push("add_generation_prompt", "false");
    }
    tools.add_to(request, &mut chat)?;
    chat.rename(request, "max_tokens", "max_completion_tokens");
    if let Some(stops) = request.array("stop_sequences")?
        && !stops.is_empty()
    {
        chat.rename(request, "stop_sequences", "stop");
    }
    let hides_thinking = read_thinking(request, &mut chat)?;
    if let Some(metadata) = request.object("metadata")? {
        metadata.text("user_id")?;
        chat.rename(&metadata, "user_id", "user");
    }
    let servers = request.array("mcp_servers")?.unwrap_or_default();
    if !servers.is_empty() {
        let problem = "is not supported: this server connects to no MCP server; \
            offer their tools in tools";
        return Err(unsupported("mcp_servers", problem));
    }
    for name in WITHOUT_EFFECT {
        let is_empty = name == "mcp_servers";
        if request.get(name).is_some() && !is_empty {
            chat.ignore(name);
        }
    }
    chat.copy_others(request, &HANDLED, &WITHOUT_EFFECT);
    let facts = RequestFacts {
        hides_thinking,
        ..RequestFacts::default()
    };
    Ok(chat.finish(facts))
}

/// Refuses conversations that the server is to keep, before a turn without its history is read.
fn refuse_thread(request: &JsonMembers<'_>) -> Result<(), TextRefusal> {
    if request.object("thread")?.is_none() {
        return Ok(());
    }
    let problem = "is not supported: this server keeps no conversations; \
        send all messages of the conversation";
    Err(unsupported("thread", problem))
}

/// Reads `thinking` and `output_config`. Returns true if thinking blocks are to have no text.
fn read_thinking(request: &JsonMembers<'_>, chat: &mut ChatBody) -> Result<bool, TextRefusal> {
    let mut hides_thinking = false;
    let mut is_disabled = false;
    if let Some(thinking) = request.object("thinking")? {
        match thinking.require_text("type")?.as_str() {
            "disabled" => is_disabled = true,
            "enabled" => {
                thinking.require("budget_tokens")?;
                chat.rename(&thinking, "budget_tokens", "thinking_token_budget");
                chat.members.push("thinking", r#"{"type":"enabled"}"#);
            }
            "adaptive" => {}
            _ => {
                let problem = "must be enabled, adaptive or disabled";
                return Err(invalid(&thinking.path("type"), problem));
            }
        }
        match thinking.text("display")?.as_deref() {
            None | Some("summarized" | "full" | "updates") => {}
            Some("omitted") => hides_thinking = true,
            Some(_) => {
                let problem = "must be summarized, updates or omitted";
                return Err(invalid(&thinking.path("display"), problem));
            }
        }
    }
    let config = request.object("output_config")?;
    if is_disabled {
        chat.members.push_text("reasoning_effort", "none");
    } else if let Some(config) = &config {
        chat.rename(config, "effort", "reasoning_effort");
    }
    let Some(config) = config else {
        return Ok(hides_thinking);
    };
    if let Some(format) = config.object("format")? {
        chat.set_format(&format)?;
    }
    for (name, _) in config.iter() {
        if !matches!(name, "effort" | "format") {
            chat.ignore(config.path(name));
        }
    }
    Ok(hides_thinking)
}

impl ChatBody {
    /// Adds `tools` of the chat request, each with its place in the client's body.
    fn set_tools(&mut self, tools: &[(String, String)]) {
        if tools.is_empty() {
            return;
        }
        for (index, (_, place)) in tools.iter().enumerate() {
            self.name_tool(index, place);
            let chat = format!("tools[{index}].function.parameters");
            let client = format!("{place}.input_schema");
            self.names.push(ParamName::new(chat, client));
        }
        let functions: Vec<String> = tools.iter().map(|(tool, _)| tool.clone()).collect();
        self.members.push("tools", &array_text(&functions));
    }
}
