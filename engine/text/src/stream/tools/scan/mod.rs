//! Parts that readers of tool calls share.
//!
//! * [`held_lexemes`]: lexemes that are not yet read, and patterns at their start;
//! * [`line_tracker`]: content before, between and after calls;
//! * [`json_text`]: JSON texts that readers write themselves;
//! * [`python_literal`]: Python literals to JSON;
//! * [`schema_types`]: types that a tool's schema gives its parameters;
//! * [`reader_step`]: one step of a reader.

pub mod held_lexemes;
pub mod json_text;
pub mod line_tracker;
pub mod python_literal;
pub mod reader_step;
pub mod schema_types;
