//! Tools of /v1/responses.
//!
//! | client's tool | tool of the chat request | form of its calls |
//! |---|---|---|
//! | `function` | function | `function_call` |
//! | `namespace` with functions | a function `namespace.name` for each | `function_call` with `namespace` |
//! | `custom` | function with one text, `input` | `custom_tool_call` |
//! | a tool that runs on OpenAI's servers | none: reported as without effect | – |

use serde_json::value::RawValue;

use super::super::members::{
    JsonMembers, ObjectText, array_text, invalid, missing, quote, unsupported,
};
use super::super::{ChatBody, ClientTool};
use crate::refusal::TextRefusal;

/// Begins of the types of tools that run on OpenAI's servers, or that its models know without a
/// description.
const HOSTED: [&str; 11] = [
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
    "local_shell",
    "shell",
    "apply_patch",
    "computer",
    "programmatic_tool_calling",
];

/// Parameters of the function that stands for a custom tool.
const CUSTOM_PARAMETERS: &str = r#"{"type":"object","properties":{"input":{"type":"string"}},"required":["input"],"additionalProperties":false}"#;

/// Tools of a request.
#[derive(Debug, Default)]
pub struct OfferedTools {
    /// Tools of the chat request.
    functions: Vec<String>,
    /// Tools whose calls have a form of their own.
    pub renamed: Vec<ClientTool>,
    /// Tools as the response repeats them: JSON.
    pub echo: String,
}

pub fn read_tools(
    request: &JsonMembers<'_>,
    chat: &mut ChatBody,
) -> Result<OfferedTools, TextRefusal> {
    let mut tools = OfferedTools::default();
    let mut echoes = Vec::new();
    for (value, place) in request.array("tools")?.unwrap_or_default() {
        let tool = JsonMembers::read(value, place)?;
        let kind = tool.require_text("type")?;
        match kind.as_str() {
            "function" => {
                tools.add_function(&tool, None, chat)?;
                echoes.push(function_echo(&tool));
                continue;
            }
            "custom" => tools.add_custom(&tool, None, chat)?,
            "namespace" => tools.add_namespace(&tool, chat)?,
            _ if is_hosted(&kind) => chat.ignore(format!("tools.{kind}")),
            _ => {
                let problem = format!("is {kind:?}; use function, custom or namespace");
                return Err(unsupported(&tool.path("type"), &problem));
            }
        }
        echoes.push(value.get().to_owned());
    }
    tools.echo = array_text(&echoes);
    if !tools.functions.is_empty() {
        let functions = array_text(&tools.functions);
        chat.members.push("tools", &functions);
    }
    Ok(tools)
}

fn is_hosted(kind: &str) -> bool {
    HOSTED.iter().any(|hosted| kind.starts_with(hosted))
}

/// Name by which the model knows a tool.
pub fn flat_name(namespace: Option<&str>, name: &str) -> String {
    match namespace {
        Some(namespace) => format!("{namespace}.{name}"),
        None => name.to_owned(),
    }
}

/// Arguments of a call of a custom tool, as a JSON string. `input`: a JSON string.
pub fn custom_arguments(input: &RawValue) -> String {
    quote(&format!("{{\"input\": {}}}", input.get()))
}

impl OfferedTools {
    fn add_function(
        &mut self,
        tool: &JsonMembers<'_>,
        namespace: Option<&str>,
        chat: &mut ChatBody,
    ) -> Result<(), TextRefusal> {
        let name = tool.require_text("name")?;
        let mut function = ObjectText::default();
        function.push_text("name", &flat_name(namespace, &name));
        for member in ["description", "parameters", "strict"] {
            function.copy(member, tool);
        }
        self.push(tool, function, chat);
        if namespace.is_some() {
            self.rename(namespace, name, false);
        }
        Ok(())
    }

    fn add_custom(
        &mut self,
        tool: &JsonMembers<'_>,
        namespace: Option<&str>,
        chat: &mut ChatBody,
    ) -> Result<(), TextRefusal> {
        let name = tool.require_text("name")?;
        let mut description = tool.text("description")?.unwrap_or_default();
        if let Some(format) = tool.object("format")?
            && let Some(definition) = format.text("definition")?
        {
            // The model sees the grammar; its output is not held to it.
            let syntax = format.text("syntax")?.unwrap_or_default();
            description += &format!("\n\nThe input follows this {syntax} grammar:\n{definition}");
            chat.ignore(tool.path("format"));
        }
        let mut function = ObjectText::default();
        function.push_text("name", &flat_name(namespace, &name));
        if !description.is_empty() {
            function.push_text("description", description.trim_start());
        }
        function.push("parameters", CUSTOM_PARAMETERS);
        self.push(tool, function, chat);
        self.rename(namespace, name, true);
        Ok(())
    }

    fn add_namespace(
        &mut self,
        namespace: &JsonMembers<'_>,
        chat: &mut ChatBody,
    ) -> Result<(), TextRefusal> {
        let name = namespace.require_text("name")?;
        let Some(tools) = namespace.array("tools")? else {
            return Err(missing(&namespace.path("tools")));
        };
        for (value, place) in tools {
            let tool = JsonMembers::read(value, place)?;
            match tool.require_text("type")?.as_str() {
                "function" => self.add_function(&tool, Some(&name), chat)?,
                "custom" => self.add_custom(&tool, Some(&name), chat)?,
                kind => {
                    let problem = format!("is {kind:?}; a namespace holds function and custom");
                    return Err(unsupported(&tool.path("type"), &problem));
                }
            }
        }
        Ok(())
    }

    fn push(&mut self, tool: &JsonMembers<'_>, function: ObjectText, chat: &mut ChatBody) {
        let index = self.functions.len();
        chat.name_tool(index, tool.place());
        let mut wrapper = ObjectText::default();
        wrapper.push_text("type", "function");
        wrapper.push("function", &function.finish());
        self.functions.push(wrapper.finish());
    }

    fn rename(&mut self, namespace: Option<&str>, name: String, is_custom: bool) {
        self.renamed.push(ClientTool {
            flat_name: flat_name(namespace, &name),
            name,
            namespace: namespace.map(str::to_owned),
            is_custom,
        });
    }

    /// Adds `tool_choice`.
    pub fn add_choice(
        &self,
        request: &JsonMembers<'_>,
        chat: &mut ChatBody,
    ) -> Result<(), TextRefusal> {
        let Some(value) = request.get("tool_choice") else {
            return Ok(());
        };
        if matches!(value.get(), "\"auto\"" | "\"none\"" | "\"required\"") {
            let is_default = self.functions.is_empty() && value.get() != "\"required\"";
            if !is_default {
                chat.members.push("tool_choice", value.get());
            }
            return Ok(());
        }
        let Ok(choice) = JsonMembers::read(value, "tool_choice") else {
            let problem = "must be auto, none, required or an object with type";
            return Err(invalid("tool_choice", problem));
        };
        let kind = choice.require_text("type")?;
        if kind == "allowed_tools" {
            return add_allowed_tools(&choice, chat);
        }
        let Some(function) = chosen_function(&choice, &kind)? else {
            let problem = format!("forces {kind:?}, a tool that this server does not have");
            return Err(unsupported("tool_choice", &problem));
        };
        chat.members.push("tool_choice", &function);
        Ok(())
    }
}

/// Reference to a tool in the form of chat requests; `None`: it runs on OpenAI's servers.
fn chosen_function(choice: &JsonMembers<'_>, kind: &str) -> Result<Option<String>, TextRefusal> {
    if !matches!(kind, "function" | "custom") {
        if is_hosted(kind) {
            return Ok(None);
        }
        let problem = format!("is {kind:?}; use function, custom or allowed_tools");
        return Err(unsupported(&choice.path("type"), &problem));
    }
    let name = choice.require_text("name")?;
    let namespace = choice.text("namespace")?;
    let name = quote(&flat_name(namespace.as_deref(), &name));
    let function = format!("{{\"type\":\"function\",\"function\":{{\"name\":{name}}}}}");
    Ok(Some(function))
}

fn add_allowed_tools(choice: &JsonMembers<'_>, chat: &mut ChatBody) -> Result<(), TextRefusal> {
    let mut functions = Vec::new();
    let Some(tools) = choice.array("tools")? else {
        return Err(missing(&choice.path("tools")));
    };
    for (value, place) in tools {
        let tool = JsonMembers::read(value, place)?;
        let kind = tool.require_text("type")?;
        match chosen_function(&tool, &kind)? {
            Some(function) => functions.push(function),
            None => chat.ignore(format!("tool_choice.{kind}")),
        }
    }
    let mut allowed = ObjectText::default();
    allowed.copy("mode", choice);
    allowed.push("tools", &array_text(&functions));
    let mut wrapper = ObjectText::default();
    wrapper.push_text("type", "allowed_tools");
    wrapper.push("allowed_tools", &allowed.finish());
    chat.members.push("tool_choice", &wrapper.finish());
    Ok(())
}

/// A function as responses repeat it: with all members that OpenAI's clients require.
fn function_echo(tool: &JsonMembers<'_>) -> String {
    let mut echo = ObjectText::default();
    for (name, value) in tool.iter() {
        echo.push(name, value.get());
    }
    if tool.get("parameters").is_none() {
        echo.push("parameters", "null");
    }
    if tool.get("strict").is_none() {
        echo.push("strict", "false");
    }
    echo.finish()
}
