//! Items of `input` as messages of a chat.

use serde_json::value::RawValue;

use super::super::conversation::{Conversation, TextContent};
use super::super::members::{JsonMembers, invalid, is_text, missing, read_text, unsupported};
use super::super::reasoning_text::decode_reasoning;
use super::super::{ChatBody, ParamName};
use super::tools::{custom_arguments, flat_name};
use crate::refusal::TextRefusal;

/// Adds `messages`.
pub fn read_conversation(
    request: &JsonMembers<'_>,
    chat: &mut ChatBody,
) -> Result<(), TextRefusal> {
    let mut conversation = Conversation::default();
    if let Some(text) = request.text("instructions")? {
        let content = TextContent::of_text(&text);
        conversation.add_message("instructions", "system", &content);
    }
    let input = request.require("input")?;
    if is_text(input) {
        let mut content = TextContent::default();
        content.push(input);
        conversation.add_message("input", "user", &content);
    } else {
        let Some(items) = request.array("input").ok().flatten() else {
            return Err(invalid("input", "must be a string or an array of items"));
        };
        if items.is_empty() {
            return Err(invalid("input", "is empty; give at least one item"));
        }
        for (item, place) in items {
            let item = JsonMembers::read(item, place)?;
            read_item(&item, &mut conversation)?;
        }
    }
    chat.names.push(ParamName::new("messages", "input"));
    let messages = conversation.finish(&mut chat.names);
    let Some(messages) = messages else {
        let problem = "has no message; give at least one beside the reasoning";
        return Err(invalid("input", problem));
    };
    chat.members.push("messages", &messages);
    chat.ignored.append(&mut conversation.dropped_reasoning);
    Ok(())
}

fn read_item(item: &JsonMembers<'_>, conversation: &mut Conversation) -> Result<(), TextRefusal> {
    let place = item.place();
    match item.text("type")?.as_deref() {
        None if item.get("role").is_some() => read_message(item, conversation),
        None => Err(missing(&item.path("type"))),
        Some("message") => read_message(item, conversation),
        Some("reasoning") => {
            if let Some(text) = reasoning_of(item)? {
                conversation.add_reasoning(place, &text);
            }
            Ok(())
        }
        Some("function_call") => {
            let id = item.require_text("call_id")?;
            let namespace = item.text("namespace")?;
            let name = flat_name(namespace.as_deref(), &item.require_text("name")?);
            let arguments = item.require("arguments")?;
            read_text(arguments, &item.path("arguments"))?;
            conversation.add_call(place, &id, &name, arguments.get());
            Ok(())
        }
        Some("custom_tool_call") => {
            let id = item.require_text("call_id")?;
            let namespace = item.text("namespace")?;
            let name = flat_name(namespace.as_deref(), &item.require_text("name")?);
            let input = item.require("input")?;
            read_text(input, &item.path("input"))?;
            let arguments = custom_arguments(input);
            conversation.add_call(place, &id, &name, &arguments);
            Ok(())
        }
        Some("function_call_output" | "custom_tool_call_output") => {
            let id = item.require_text("call_id")?;
            if !conversation.has_call(&id) {
                let problem = "names no call in the items before it; send the call, too";
                return Err(invalid(&item.path("call_id"), problem));
            }
            let content = read_content(item, "output")?;
            conversation.add_tool_result(place, &id, &content);
            Ok(())
        }
        Some("item_reference") => {
            let problem = "is \"item_reference\": this server keeps no responses to look the item up \
                           in; send the items themselves, as clients do with \"store\": false";
            Err(unsupported(&item.path("type"), problem))
        }
        Some(kind) => {
            let problem = format!(
                "is {kind:?}; use message, reasoning, function_call, function_call_output, \
                 custom_tool_call or custom_tool_call_output"
            );
            Err(unsupported(&item.path("type"), &problem))
        }
    }
}

fn read_message(
    item: &JsonMembers<'_>,
    conversation: &mut Conversation,
) -> Result<(), TextRefusal> {
    let role = item.require_text("role")?;
    let content = read_content(item, "content")?;
    match role.as_str() {
        "assistant" => {
            conversation.begin_assistant(item.place());
            *conversation.assistant_content() = content;
        }
        "user" | "system" | "developer" => {
            conversation.add_message(item.place(), &role, &content);
        }
        _ => {
            let problem = "must be user, assistant, system or developer";
            return Err(invalid(&item.path("role"), problem));
        }
    }
    Ok(())
}

/// A member that is a text or a list of text parts.
fn read_content(item: &JsonMembers<'_>, name: &str) -> Result<TextContent, TextRefusal> {
    let value = item.require(name)?;
    let mut content = TextContent::default();
    if is_text(value) {
        content.push(value);
        return Ok(content);
    }
    let Some(parts) = item.array(name).ok().flatten() else {
        let problem = "must be a string or an array of text parts";
        return Err(invalid(&item.path(name), problem));
    };
    for (part, place) in parts {
        let part = JsonMembers::read(part, place)?;
        content.push(text_of_part(&part)?);
    }
    Ok(content)
}

fn text_of_part<'a>(part: &JsonMembers<'a>) -> Result<&'a RawValue, TextRefusal> {
    let kind = part.require_text("type")?;
    let name = match kind.as_str() {
        "input_text" | "output_text" | "text" => "text",
        "refusal" => "refusal",
        _ => {
            let problem = format!("is {kind:?}; only text is supported");
            return Err(unsupported(&part.path("type"), &problem));
        }
    };
    let text = part.require(name)?;
    read_text(text, &part.path(name))?;
    Ok(text)
}

/// Text of a reasoning item: its own, else that of its `encrypted_content`, else its summary.
fn reasoning_of(item: &JsonMembers<'_>) -> Result<Option<String>, TextRefusal> {
    if let Some(text) = texts_of_parts(item, "content")? {
        return Ok(Some(text));
    }
    let opaque = item.text("encrypted_content")?;
    if let Some(text) = opaque.as_deref().and_then(decode_reasoning) {
        return Ok(Some(text));
    }
    texts_of_parts(item, "summary")
}

fn texts_of_parts(item: &JsonMembers<'_>, name: &str) -> Result<Option<String>, TextRefusal> {
    let mut texts = Vec::new();
    for (part, place) in item.array(name)?.unwrap_or_default() {
        texts.push(JsonMembers::read(part, place)?.require_text("text")?);
    }
    let text = texts.join("\n");
    Ok((!text.is_empty()).then_some(text))
}
