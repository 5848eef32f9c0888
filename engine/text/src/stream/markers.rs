//! Markers in an answer: the tokens and texts between which reasoning and tool calls stand.
//!
//! A marker that the vocabulary has as one token is recognized by its id alone, so that the same
//! characters typed as text are text. Other markers are recognized by their characters.

/// Piece of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lexeme<'a> {
    Text(&'a str),
    /// Index of a marker in its table.
    Marker(usize),
}
