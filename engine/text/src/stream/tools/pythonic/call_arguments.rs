//! Arguments of a Python call to JSON.

use serde_json::Value;

use super::super::scan::json_text::quoted;
use super::super::scan::python_literal::python_literal_to_json;
use crate::stream::parts::AnswerParts;

/// Name and value of an argument; no name if it is positional. `None` for the value of no
/// argument, as behind a trailing comma.
pub fn split_argument(text: &str) -> (Option<&str>, &str) {
    let trimmed = text.trim();
    let Some((name, value)) = trimmed.split_once('=') else {
        return (None, trimmed);
    };
    let name = name.trim_end();
    let is_keyword = is_identifier(name) && !value.starts_with('=');
    if is_keyword {
        (Some(name), value.trim())
    } else {
        (None, trimmed)
    }
}

/// True for names of arguments.
pub fn is_identifier(text: &str) -> bool {
    let has_letter_first = text
        .chars()
        .next()
        .is_some_and(|first| first.is_alphabetic() || first == '_');
    has_letter_first && text.chars().all(is_identifier_char)
}

/// True for characters of names of arguments. Models also write hyphens of JSON Schema names.
pub fn is_identifier_char(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '-')
}

/// Writes the arguments of one call, each when it is complete.
#[derive(Debug, Default)]
pub struct ArgumentList {
    count: usize,
    positional_count: usize,
}

impl ArgumentList {
    /// Appends an argument, if the text holds one. A positional one has the name of the property in
    /// its place. A value that is no literal is written as text.
    pub fn push_argument(&mut self, text: &str, schema: &Value, out: &mut AnswerParts) {
        let (keyword, value) = split_argument(text);
        let is_blank = keyword.is_none() && value.is_empty();
        if is_blank {
            return;
        }
        let name = match keyword {
            Some(name) => name.to_owned(),
            None => self.take_positional_name(schema),
        };
        let lead = if self.count == 0 { "{" } else { ", " };
        let json = python_literal_to_json(value).unwrap_or_else(|| quoted(value));
        out.push_arguments(&format!("{lead}{}: {json}", quoted(&name)));
        self.count += 1;
    }

    /// Name of the next positional argument; its place, if the schema has no such property.
    fn take_positional_name(&mut self, schema: &Value) -> String {
        let place = self.positional_count;
        self.positional_count += 1;
        let properties = schema.get("properties").and_then(Value::as_object);
        let property = properties.and_then(|properties| properties.keys().nth(place));
        property.cloned().unwrap_or_else(|| place.to_string())
    }

    /// The call is complete.
    pub fn end_call(&self, out: &mut AnswerParts) {
        let end = if self.count == 0 { "{}" } else { "}" };
        out.push_arguments(end);
        out.end_call();
    }
}
