//! Tools of /v1/messages.
//!
//! 1. Tools with `defer_loading` are offered once a tool result refers to them;
//! 2. system messages add and remove tools while the conversation goes on;
//! 3. tools that run on Anthropic's servers, or that its models know without a description, are
//!    left out and reported.

use std::collections::HashSet;

use super::super::ChatBody;
use super::super::members::{JsonMembers, ObjectText, invalid, quote};
use crate::refusal::TextRefusal;

/// A tool of the client's own.
#[derive(Debug)]
struct KnownTool {
    name: String,
    /// The tool of the chat request.
    function: String,
    place: String,
    is_offered: bool,
}

/// Tools of a request, in the client's order.
#[derive(Debug, Default)]
pub struct ToolSet {
    tools: Vec<KnownTool>,
    /// Names of tools that were left out.
    left_out: HashSet<String>,
}

impl ToolSet {
    pub fn read(request: &JsonMembers<'_>, chat: &mut ChatBody) -> Result<Self, TextRefusal> {
        let mut tools = Self::default();
        for (value, place) in request.array("tools")?.unwrap_or_default() {
            tools.add(&JsonMembers::read(value, place)?, chat)?;
        }
        Ok(tools)
    }

    /// Adds a tool by its definition.
    pub fn add(&mut self, tool: &JsonMembers<'_>, chat: &mut ChatBody) -> Result<(), TextRefusal> {
        let kind = tool.text("type")?;
        if let Some(kind) = kind.filter(|kind| kind != "custom") {
            self.left_out.extend(tool.text("name")?);
            chat.ignore(format!("tools.{kind}"));
            return Ok(());
        }
        let name = tool.require_text("name")?;
        let mut function = ObjectText::default();
        function.push_text("name", &name);
        function.copy("description", tool);
        function.push("parameters", tool.require("input_schema")?.get());
        function.copy("strict", tool);
        let mut wrapper = ObjectText::default();
        wrapper.push_text("type", "function");
        wrapper.push("function", &function.finish());
        self.tools.push(KnownTool {
            name,
            function: wrapper.finish(),
            place: tool.place().to_owned(),
            is_offered: !tool.boolean("defer_loading")?.unwrap_or(false),
        });
        Ok(())
    }

    /// Offers a tool by its name, if there is one. Returns false if there is none.
    pub fn offer(&mut self, name: &str) -> bool {
        self.set_offered(name, true)
    }

    /// Offers a tool no longer. Returns false if there is none with this name.
    pub fn withdraw(&mut self, name: &str) -> bool {
        self.set_offered(name, false)
    }

    fn set_offered(&mut self, name: &str, is_offered: bool) -> bool {
        let mut is_known = self.left_out.contains(name);
        for tool in self.tools.iter_mut().filter(|tool| tool.name == name) {
            tool.is_offered = is_offered;
            is_known = true;
        }
        is_known
    }

    /// Adds `tools` and `tool_choice`.
    pub fn add_to(self, request: &JsonMembers<'_>, chat: &mut ChatBody) -> Result<(), TextRefusal> {
        let offered = self.tools.into_iter().filter(|tool| tool.is_offered);
        let offered: Vec<(String, String)> =
            offered.map(|tool| (tool.function, tool.place)).collect();
        chat.set_tools(&offered);
        let Some(choice) = request.object("tool_choice")? else {
            return Ok(());
        };
        let kind = choice.require_text("type")?;
        let choice_json = match kind.as_str() {
            "auto" | "none" if offered.is_empty() => None,
            "auto" => Some("\"auto\"".to_owned()),
            "none" => Some("\"none\"".to_owned()),
            "any" => Some("\"required\"".to_owned()),
            "tool" => {
                let name = quote(&choice.require_text("name")?);
                Some(format!(
                    "{{\"type\":\"function\",\"function\":{{\"name\":{name}}}}}"
                ))
            }
            _ => {
                let problem = "must be auto, any, tool or none";
                return Err(invalid(&choice.path("type"), problem));
            }
        };
        if let Some(json) = choice_json {
            chat.members.push("tool_choice", &json);
        }
        if choice.boolean("disable_parallel_tool_use")? == Some(true) {
            chat.members.push("parallel_tool_calls", "false");
        }
        Ok(())
    }
}
