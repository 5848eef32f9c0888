//! Interface of the readers of tool calls.

use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

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
    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts);

    /// The answer has ended: appends what was held back.
    fn finish(&mut self, out: &mut AnswerParts);

    /// A grammar begins behind the reasoning of this answer. Called before the first lexeme, and
    /// for formats whose reader also reads the reasoning.
    fn expect_gated_content(&mut self) {}

    /// True while the next text is reasoning, in formats whose reader also reads the reasoning.
    fn is_reasoning(&self) -> bool {
        false
    }
}
