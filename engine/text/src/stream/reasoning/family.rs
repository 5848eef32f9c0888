//! Markers between which models reason.

use crate::stream::markers::MarkerRole;

/// Markers between which a model reasons. The names are values of `--reasoning-parser`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::EnumIter,
)]
#[strum(serialize_all = "snake_case")]
pub enum ReasoningFamily {
    /// `<think>` and `</think>`.
    ThinkTags,
    /// `[THINK]` and `[/THINK]`.
    Mistral,
    /// "Here is my thought process:" and "Here is my response:".
    Granite,
    /// Channels of gpt-oss, which the reader of its calls reads.
    GptOss,
}

/// Texts between which the text of a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageMarks {
    pub header: &'static str,
    /// Models leave out the first one: the next message's header ends a message, too.
    pub ends: &'static [&'static str],
}

impl ReasoningFamily {
    pub fn markers(self) -> &'static [(&'static str, MarkerRole)] {
        use MarkerRole::{ReasoningBegin, ReasoningEnd};
        match self {
            Self::ThinkTags => &[("<think>", ReasoningBegin), ("</think>", ReasoningEnd)],
            Self::Mistral => &[("[THINK]", ReasoningBegin), ("[/THINK]", ReasoningEnd)],
            Self::Granite => &[
                ("Here is my thought process:", ReasoningBegin),
                ("Here's my thought process:", ReasoningBegin),
                ("Here is my response:", ReasoningEnd),
                ("Here's my response:", ReasoningEnd),
            ],
            Self::GptOss => &[],
        }
    }

    /// Newlines behind the reasoning that belong neither to it nor to the content, at most: models
    /// write one or two.
    pub fn lead_newlines(self) -> usize {
        match self {
            Self::ThinkTags | Self::Mistral | Self::Granite => 2,
            Self::GptOss => 0,
        }
    }

    /// Text that ends a reasoning which is cut at its limit, as templates write it.
    pub fn forced_end(self) -> &'static str {
        match self {
            Self::ThinkTags => "\n</think>\n\n",
            Self::Mistral => "[/THINK]",
            Self::Granite => "\n\nHere is my response:\n\n",
            Self::GptOss => "<|end|><|start|>assistant<|channel|>final<|message|>",
        }
    }

    /// Marks of a message of reasoning, where the reasoning is messages.
    pub fn message_marks(self) -> Option<MessageMarks> {
        match self {
            Self::GptOss => Some(MessageMarks {
                header: "<|channel|>analysis<|message|>",
                ends: &["<|end|>", "<|start|>", "<|channel|>"],
            }),
            Self::ThinkTags | Self::Mistral | Self::Granite => None,
        }
    }

    /// Header of the message with the content, where messages of reasoning stand in front of it.
    pub fn content_header(self) -> Option<&'static str> {
        match self {
            Self::GptOss => Some("<|channel|>final<|message|>"),
            Self::ThinkTags | Self::Mistral | Self::Granite => None,
        }
    }
}
