//! Capabilities of a chat template: the forms of messages that it takes.

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
    /// Tools reach the prompt.
    pub renders_tools: bool,
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
            renders_tools: false,
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

    /// `name=value` of each field: part of the tokenizer's fingerprint.
    pub fn canonical(&self) -> String {
        format!(
            "system={} developer={} user={} assistant={} tool={} arguments={} empty_content={} inline_system={} \
             renders_tools={}",
            self.system.into_str(),
            self.developer.into_str(),
            self.user.into_str(),
            self.assistant.into_str(),
            self.tool.into_str(),
            self.arguments.into_str(),
            self.empty_content.into_str(),
            self.inline_system,
            self.renders_tools
        )
    }
}
