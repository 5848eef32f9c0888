//! Interface of the readers of tool calls.

use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

/// Format in which a model writes tool calls. The names are values of `--tool-parser`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr, strum::EnumIter,
)]
#[strum(serialize_all = "snake_case")]
pub enum ToolFamily {
    Hermes,
    Qwen3Coder,
    Llama3,
    Pythonic,
    /// Mistral up to tokenizer version 7: a list of objects.
    Mistral,
    /// Mistral from tokenizer version 11 on: a name and an object behind each marker.
    MistralV13,
    DeepseekV3,
    DeepseekV31,
    DeepseekV32,
    GptOss,
    Glm45,
    Glm47,
    KimiK2,
    Granite,
    Phi4,
    Json,
}

/// A tool that the client offers.
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
pub struct ToolSignature {
    pub name: String,
    /// JSON Schema of its arguments, members in the client's order.
    pub parameters: serde_json::Value,
}

/// Reads the calls in the text behind the reasoning. Deterministic: the joined parts depend on the
/// joined lexemes alone.
pub trait ToolReader: Send {
    /// Texts of the markers that [`Lexeme::Marker`] counts by. The first ones begin a call.
    fn markers(&self) -> &'static [&'static str];

    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts);

    /// The answer has ended: appends what was held back.
    fn finish(&mut self, out: &mut AnswerParts);

    /// A grammar begins behind the reasoning of this answer. Called before the first lexeme, and for
    /// formats whose reader also reads the reasoning.
    fn expect_gated_content(&mut self) {}

    /// True while the next text is reasoning, in formats whose reader also reads the reasoning.
    fn is_reasoning(&self) -> bool {
        false
    }
}
