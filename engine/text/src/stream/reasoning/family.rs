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

    /// Text that ends a reasoning which is cut at its limit, as templates write it. `None`: such a
    /// reasoning is not cut.
    pub fn forced_end(self) -> Option<&'static str> {
        match self {
            Self::ThinkTags => Some("\n</think>\n\n"),
            Self::Mistral => Some("[/THINK]"),
            Self::Granite => Some("\n\nHere is my response:\n\n"),
            Self::GptOss => None,
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
