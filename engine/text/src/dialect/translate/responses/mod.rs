//! Requests of /v1/responses.
//!
//! * `input`: the items of a conversation;
//! * `tools`: tools and the choice among them.
//!
//! This server keeps no responses: the conversation is in `input`, `store` has no effect, and
//! members that name something stored are refused.

mod input;
mod tools;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use self::tools::{OfferedTools, read_tools};
use super::members::{JsonMembers, ObjectText, invalid, read_text, unsupported};
use super::{ChatBody, RequestFacts, TranslatedRequest};
use crate::refusal::TextRefusal;

/// Members that name a response or a prompt on the server, or ask for one that outlives its
/// request.
const STATEFUL: [&str; 4] = [
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
];
/// Refusal of everything that needs a response on the server.
pub const NO_STORED_RESPONSES: &str =
    "this server keeps no responses; send the conversation in input";

/// Members that this module reads.
const HANDLED: [&str; 18] = [
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "max_output_tokens",
    "text",
    "reasoning",
    "include",
    "truncation",
    "top_logprobs",
    "metadata",
    "store",
    "stream_options",
    "max_tool_calls",
    "context_management",
    "previous_response_id",
    "conversation",
    "background",
];
/// Members that change nothing in any server's answer to one request.
const UNUSED: [&str; 4] = [
    "client_metadata",
    "prompt",
    "prompt_cache_options",
    "prompt_cache_retention",
];

/// A body of /v1/responses as one of /v1/chat/completions.
pub fn to_chat(body: &str) -> Result<TranslatedRequest, TextRefusal> {
    let request = JsonMembers::of_body(body)?;
    refuse_state(&request)?;
    let mut chat = ChatBody::default();
    let tools = read_tools(&request, &mut chat)?;
    input::read_conversation(&request, &mut chat)?;
    tools.add_choice(&request, &mut chat)?;
    chat.rename(&request, "max_output_tokens", "max_completion_tokens");
    if let Some(text) = request.object("text")? {
        if let Some(format) = text.object("format")? {
            chat.set_format(&format)?;
        }
        ignore_others(&mut chat, &text, &["format"]);
    }
    if let Some(reasoning) = request.object("reasoning")? {
        chat.rename(&reasoning, "effort", "reasoning_effort");
        ignore_others(&mut chat, &reasoning, &["effort"]);
    }
    let includes = read_includes(&request, &mut chat)?;
    check_truncation(&request, &mut chat)?;
    for name in ["max_tool_calls", "context_management"] {
        if request.get(name).is_some() {
            chat.ignore(name);
        }
    }
    chat.copy_others(&request, &HANDLED, &UNUSED);
    let facts = RequestFacts {
        echo: echo_of(&request, &tools)?,
        includes_encrypted_content: includes.has_encrypted_content,
        tools: tools.renamed,
        ..RequestFacts::default()
    };
    Ok(chat.finish(facts))
}

fn refuse_state(request: &JsonMembers<'_>) -> Result<(), TextRefusal> {
    for name in STATEFUL {
        let is_harmless = |value: &str| name == "background" && value == "false";
        let value = request.get(name);
        if value.is_some_and(|value| !is_harmless(value.get())) {
            let problem = format!("is not supported: {NO_STORED_RESPONSES}");
            return Err(unsupported(name, &problem));
        }
    }
    Ok(())
}

/// Reports the members of `object` that have no effect.
fn ignore_others(chat: &mut ChatBody, object: &JsonMembers<'_>, used: &[&str]) {
    for (name, _) in object.iter() {
        if !used.contains(&name) {
            chat.ignore(object.path(name));
        }
    }
}

#[derive(Debug, Default)]
struct IncludedParts {
    has_encrypted_content: bool,
}

/// Reads `include`, and `top_logprobs`, which depends on it.
fn read_includes(
    request: &JsonMembers<'_>,
    chat: &mut ChatBody,
) -> Result<IncludedParts, TextRefusal> {
    let mut includes = IncludedParts::default();
    let mut has_logprobs = false;
    for (value, place) in request.array("include")?.unwrap_or_default() {
        let name = read_text(value, &place)?;
        match name.as_str() {
            "reasoning.encrypted_content" => includes.has_encrypted_content = true,
            "message.output_text.logprobs" => has_logprobs = true,
            _ => chat.ignore(format!("include.{name}")),
        }
    }
    if has_logprobs {
        chat.members.push("logprobs", "true");
        chat.members.copy("top_logprobs", request);
    } else if request.integer("top_logprobs")?.is_some_and(|top| top > 0) {
        chat.ignore("top_logprobs");
    }
    Ok(includes)
}

fn check_truncation(request: &JsonMembers<'_>, chat: &mut ChatBody) -> Result<(), TextRefusal> {
    match request.text("truncation")?.as_deref() {
        None | Some("disabled") => Ok(()),
        Some("auto") => {
            chat.ignore("truncation");
            Ok(())
        }
        Some(_) => Err(invalid("truncation", "must be auto or disabled")),
    }
}

/// Members of the response that repeat the request.
fn echo_of(request: &JsonMembers<'_>, tools: &OfferedTools) -> Result<String, TextRefusal> {
    let mut echo = ObjectText::default();
    let mut repeat = |name: &str, default: &str| {
        let value = request.get(name).map_or(default, |value| value.get());
        echo.push(name, value);
    };
    repeat("instructions", "null");
    repeat("max_output_tokens", "null");
    repeat("max_tool_calls", "null");
    repeat("metadata", "{}");
    repeat("parallel_tool_calls", "true");
    repeat("temperature", "1.0");
    repeat("tool_choice", "\"auto\"");
    repeat("top_logprobs", "0");
    repeat("top_p", "1.0");
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        echo.copy(name, request);
    }
    echo.push("tools", &tools.echo);
    echo.push("background", "false");
    echo.push("previous_response_id", "null");
    echo.push("store", "false");
    echo.push("truncation", "\"disabled\"");
    match request.text("service_tier")?.as_deref() {
        None | Some("auto") => echo.push_text("service_tier", "default"),
        Some(tier) => echo.push_text("service_tier", tier),
    }
    echo.push("reasoning", &reasoning_echo(request)?);
    echo.push("text", &text_echo(request)?);
    // Each event is one line; JSON allows line ends between values only.
    Ok(echo.into_members().replace(['\n', '\r'], " "))
}

fn reasoning_echo(request: &JsonMembers<'_>) -> Result<String, TextRefusal> {
    let mut echo = ObjectText::default();
    match request.object("reasoning")? {
        Some(reasoning) if reasoning.get("effort").is_some() => echo.copy("effort", &reasoning),
        _ => echo.push("effort", "null"),
    }
    echo.push("summary", "null");
    Ok(echo.finish())
}

fn text_echo(request: &JsonMembers<'_>) -> Result<String, TextRefusal> {
    let mut echo = ObjectText::default();
    match request.object("text")? {
        Some(text) if text.get("format").is_some() => echo.copy("format", &text),
        _ => echo.push("format", r#"{"type":"text"}"#),
    }
    Ok(echo.finish())
}
