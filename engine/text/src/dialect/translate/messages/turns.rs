//! System text and messages of /v1/messages as messages of a chat.

use serde_json::value::RawValue;

use super::super::ChatBody;
use super::super::conversation::{Conversation, TextContent};
use super::super::members::{
    JsonMembers, invalid, is_text, missing, quote, read_array, read_text, spaced_json, unsupported,
};
use super::super::reasoning_text::decode_reasoning;
use super::tools::ToolSet;
use crate::refusal::TextRefusal;

/// Begin of a system block with a hash that differs from request to request: no prefix of the
/// prompt would be found in a cache behind it.
const BILLING_HEADER: &str = "x-anthropic-billing-header";
/// Between the blocks of a system text.
const BLOCK_SEPARATOR: &str = "\n\n";
/// Begin of the result of a call that failed.
const ERROR_PREFIX: &str = "Error: ";

/// Adds `messages`. Returns true if the answer continues the last message.
pub fn read_conversation(
    request: &JsonMembers<'_>,
    tools: &mut ToolSet,
    chat: &mut ChatBody,
) -> Result<bool, TextRefusal> {
    let mut turns = TurnReader {
        conversation: Conversation::default(),
        tools,
        chat,
    };
    if let Some(system) = request.get("system") {
        let texts = turns.read_system_texts(system, "system")?;
        turns.add_system(texts, "system");
    }
    let Some(messages) = request.array("messages")? else {
        return Err(missing("messages"));
    };
    if messages.is_empty() {
        return Err(invalid("messages", "is empty; give at least one message"));
    }
    let messages: Vec<JsonMembers<'_>> = messages
        .into_iter()
        .map(|(message, place)| JsonMembers::read(message, place))
        .collect::<Result<_, _>>()?;
    let is_user = |message: &JsonMembers<'_>| {
        message
            .require_text("role")
            .is_ok_and(|role| role == "user")
    };
    let last_user = messages.iter().rposition(is_user);
    let mut last = TurnEnd::OtherRole;
    for (index, message) in messages.iter().enumerate() {
        let has_later_user = last_user.is_some_and(|last_user| index < last_user);
        last = turns.read_turn(message, has_later_user)?;
    }
    if let TurnEnd::ToolUse(place) = last {
        let problem = "ends with tool_use; give its tool_result in a message of the user";
        return Err(invalid(&place, problem));
    }
    let TurnReader {
        mut conversation, ..
    } = turns;
    let Some(messages) = conversation.finish(&mut chat.names) else {
        return Err(invalid("messages", "has no text; give at least one text"));
    };
    chat.members.push("messages", &messages);
    chat.ignored.append(&mut conversation.dropped_reasoning);
    Ok(matches!(last, TurnEnd::AssistantText))
}

/// End of a message.
enum TurnEnd {
    /// The message is not the assistant's.
    OtherRole,
    AssistantText,
    /// Place of the message.
    ToolUse(String),
}

struct TurnReader<'a> {
    conversation: Conversation,
    tools: &'a mut ToolSet,
    chat: &'a mut ChatBody,
}

impl TurnReader<'_> {
    /// `has_later_user`: a message of the user follows this one.
    fn read_turn(
        &mut self,
        message: &JsonMembers<'_>,
        has_later_user: bool,
    ) -> Result<TurnEnd, TextRefusal> {
        match message.require_text("role")?.as_str() {
            "user" => self.read_user(message.require("content")?, message.place())?,
            "assistant" => {
                let content = message.require("content")?;
                return self.read_assistant(content, message.place());
            }
            "system" => self.read_system_turn(message, has_later_user)?,
            _ => {
                let problem = "must be user, assistant or system";
                return Err(invalid(&message.path("role"), problem));
            }
        }
        Ok(TurnEnd::OtherRole)
    }

    fn read_system_turn(
        &mut self,
        message: &JsonMembers<'_>,
        has_later_user: bool,
    ) -> Result<(), TextRefusal> {
        if message.get("output_config").is_some() {
            self.chat.ignore(message.path("output_config"));
            if message.get("content").is_none() {
                return Ok(());
            }
        }
        let is_cleared = match message.text("clear_at")?.as_deref() {
            None | Some("never") => false,
            Some("next_user_message") => has_later_user,
            Some(_) => {
                let problem = "must be never or next_user_message";
                return Err(invalid(&message.path("clear_at"), problem));
            }
        };
        let texts =
            self.read_system_texts(message.require("content")?, &message.path("content"))?;
        if !is_cleared {
            self.add_system(texts, message.place());
        }
        Ok(())
    }

    /// Texts of system content; its other blocks change the tools.
    fn read_system_texts(
        &mut self,
        content: &RawValue,
        place: &str,
    ) -> Result<Vec<String>, TextRefusal> {
        if is_text(content) {
            return Ok(vec![read_text(content, place)?]);
        }
        let mut texts = Vec::new();
        for block in read_blocks(content, place)? {
            match block.require_text("type")?.as_str() {
                "text" => texts.push(block.require_text("text")?),
                "tool_addition" => self.add_tool(&block)?,
                "tool_removal" => self.remove_tool(&block)?,
                kind => return Err(unknown_block(&block, kind)),
            }
        }
        texts.retain(|text| !text.starts_with(BILLING_HEADER));
        Ok(texts)
    }

    fn add_system(&mut self, texts: Vec<String>, place: &str) {
        if !texts.is_empty() {
            let content = TextContent::of_text(&texts.join(BLOCK_SEPARATOR));
            self.conversation.add_message(place, "system", &content);
        }
    }

    /// A block that offers a tool from here on: one of `tools` by its name, or one that it defines.
    fn add_tool(&mut self, block: &JsonMembers<'_>) -> Result<(), TextRefusal> {
        let tool = require_object(block, "tool")?;
        if tool.require_text("type")? != "tool_definition" {
            return change_offer(&tool, |name| self.tools.offer(name));
        }
        let definition = require_object(&tool, "definition")?;
        self.tools.add(&definition, self.chat)
    }

    fn remove_tool(&mut self, block: &JsonMembers<'_>) -> Result<(), TextRefusal> {
        let tool = require_object(block, "tool")?;
        change_offer(&tool, |name| self.tools.withdraw(name))
    }

    /// Results of calls come before the user's text.
    fn read_user(&mut self, content: &RawValue, place: &str) -> Result<(), TextRefusal> {
        let mut text = TextContent::default();
        let mut has_results = false;
        if is_text(content) {
            text.push(content);
        } else {
            for block in read_blocks(content, &format!("{place}.content"))? {
                match block.require_text("type")?.as_str() {
                    "text" => text.push(text_of(&block)?),
                    "tool_result" => {
                        self.read_tool_result(&block)?;
                        has_results = true;
                    }
                    kind => return Err(unknown_block(&block, kind)),
                }
            }
        }
        if !text.is_empty() || !has_results {
            self.conversation.add_message(place, "user", &text);
        }
        Ok(())
    }

    fn read_tool_result(&mut self, block: &JsonMembers<'_>) -> Result<(), TextRefusal> {
        let id = block.require_text("tool_use_id")?;
        if !self.conversation.has_call(&id) {
            let problem = "names no tool_use in the messages before it";
            return Err(invalid(&block.path("tool_use_id"), problem));
        }
        let mut texts = Vec::new();
        match block.get("content") {
            None => {}
            Some(text) if is_text(text) => texts.push(read_text(text, &block.path("content"))?),
            Some(blocks) => {
                for part in read_blocks(blocks, &block.path("content"))? {
                    match part.require_text("type")?.as_str() {
                        "text" => texts.push(part.require_text("text")?),
                        "tool_reference" => {
                            let name = part.require_text("tool_name")?;
                            self.tools.offer(&name);
                            texts.push(name);
                        }
                        kind => return Err(unknown_block(&part, kind)),
                    }
                }
            }
        }
        let is_error = block.boolean("is_error")?.unwrap_or(false);
        let begins_so = texts
            .first()
            .is_some_and(|text| text.starts_with(ERROR_PREFIX));
        if is_error && !begins_so {
            match texts.first_mut() {
                Some(text) => text.insert_str(0, ERROR_PREFIX),
                None => texts.push(ERROR_PREFIX.trim_end().to_owned()),
            }
        }
        let mut content = TextContent::default();
        for text in &texts {
            content.push_text(text);
        }
        self.conversation
            .add_tool_result(block.place(), &id, &content);
        Ok(())
    }

    fn read_assistant(&mut self, content: &RawValue, place: &str) -> Result<TurnEnd, TextRefusal> {
        if is_text(content) {
            self.conversation.begin_assistant(place);
            self.conversation.assistant_content().push(content);
            return Ok(TurnEnd::AssistantText);
        }
        let blocks = read_blocks(content, &format!("{place}.content"))?;
        // The reasoning belongs to the message that is begun next.
        for block in &blocks {
            if block.require_text("type")? == "thinking"
                && let Some(text) = thinking_of(block)?
            {
                self.conversation.add_reasoning(place, &text);
            }
        }
        self.conversation.begin_assistant(place);
        let mut end = TurnEnd::AssistantText;
        for block in &blocks {
            match block.require_text("type")?.as_str() {
                "thinking" | "redacted_thinking" => {}
                "text" => {
                    let text = text_of(block)?;
                    self.conversation.assistant_content().push(text);
                    end = TurnEnd::AssistantText;
                }
                "tool_use" => {
                    self.read_tool_use(block)?;
                    end = TurnEnd::ToolUse(place.to_owned());
                }
                kind => return Err(unknown_block(block, kind)),
            }
        }
        Ok(end)
    }

    fn read_tool_use(&mut self, block: &JsonMembers<'_>) -> Result<(), TextRefusal> {
        let id = block.require_text("id")?;
        let name = block.require_text("name")?;
        let input = block.require("input")?;
        JsonMembers::read(input, block.path("input"))?;
        let arguments = quote(&spaced_json(input.get()));
        self.conversation
            .add_call(block.place(), &id, &name, &arguments);
        Ok(())
    }
}

fn read_blocks<'a>(
    content: &'a RawValue,
    place: &str,
) -> Result<Vec<JsonMembers<'a>>, TextRefusal> {
    let Ok(blocks) = read_array(content, place) else {
        return Err(invalid(place, "must be a string or an array of blocks"));
    };
    blocks
        .into_iter()
        .map(|(block, place)| JsonMembers::read(block, place))
        .collect()
}

fn text_of<'a>(block: &JsonMembers<'a>) -> Result<&'a RawValue, TextRefusal> {
    let text = block.require("text")?;
    read_text(text, &block.path("text"))?;
    Ok(text)
}

/// Text of a thinking block; where the block has none, that of its signature.
fn thinking_of(block: &JsonMembers<'_>) -> Result<Option<String>, TextRefusal> {
    let text = block.text("thinking")?.unwrap_or_default();
    if !text.is_empty() {
        return Ok(Some(text));
    }
    let signature = block.text("signature")?;
    Ok(signature.as_deref().and_then(decode_reasoning))
}

fn require_object<'a>(
    object: &JsonMembers<'a>,
    name: &str,
) -> Result<JsonMembers<'a>, TextRefusal> {
    JsonMembers::read(object.require(name)?, object.path(name))
}

/// Changes whether a tool is offered. `change` returns false for a name that no tool has.
fn change_offer(
    reference: &JsonMembers<'_>,
    change: impl FnOnce(&str) -> bool,
) -> Result<(), TextRefusal> {
    let kind = reference.require_text("type")?;
    if kind != "tool_reference" {
        let problem = format!("is {kind:?}; use tool_reference with the name of a tool");
        return Err(unsupported(&reference.path("type"), &problem));
    }
    let name = reference.require_text("name")?;
    if change(&name) {
        Ok(())
    } else {
        Err(invalid(&reference.path("name"), "names no tool of tools"))
    }
}

fn unknown_block(block: &JsonMembers<'_>, kind: &str) -> TextRefusal {
    let problem = format!("is {kind:?}, which is not supported here; send text");
    unsupported(&block.path("type"), &problem)
}
