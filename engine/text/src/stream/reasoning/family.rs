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
}
