//! Reasoning in front of an answer.

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
