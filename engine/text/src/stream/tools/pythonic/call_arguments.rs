//! Arguments of a Python call to JSON.

use serde_json::Value;

use super::super::scan::json_text::quoted;
use super::super::scan::python_literal::{python_dict_members, python_literal_to_json};
use super::super::scan::schema_types::{JsonType, ParameterTypes};
use super::expression_syntax::is_expression;

/// Name and value of an argument; no name if it is positional, no text if there is no argument, as
/// behind a trailing comma.
fn split_argument(text: &str) -> (Option<&str>, &str) {
    let trimmed = text.trim();
    let Some((name, value)) = trimmed.split_once('=') else {
        return (None, trimmed);
    };
    let name = name.trim_end();
    let is_keyword = is_argument_name(name) && !value.starts_with('=');
    if is_keyword {
        (Some(name), value.trim())
    } else {
        (None, trimmed)
    }
}

/// True for names of arguments.
fn is_argument_name(text: &str) -> bool {
    begins_name(text) && text.chars().all(is_argument_name_char)
}

fn begins_name(text: &str) -> bool {
    let first = text.chars().next();
    first.is_some_and(|first| first.is_alphabetic() || first == '_')
}

/// True for characters of names of arguments. Models also write hyphens of JSON Schema names.
pub fn is_argument_name_char(character: char) -> bool {
    character.is_alphanumeric() || matches!(character, '_' | '-')
}

/// True for a name without quotes, which models write for a string (smg reads it so, too).
fn is_bare_word(text: &str) -> bool {
    begins_name(text)
        && text
            .chars()
            .all(|letter| letter.is_alphanumeric() || letter == '_')
}

/// JSON of a value. `None`: the value is an expression, or has several meanings.
fn value_to_json(value: &str, types: &ParameterTypes) -> Option<String> {
    if let Some(json) = python_literal_to_json(value) {
        return Some(json);
    }
    if is_bare_word(value) {
        return types.allow(JsonType::String).then(|| quoted(value));
    }
    padded_number(value).filter(|_| takes_numbers_alone(types))
}

/// A number with zeros in front, without them (vLLM's parser of LFM2 reads it so).
fn padded_number(text: &str) -> Option<String> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let sign = &text[..text.len() - digits.len()];
    let unpadded = digits.trim_start_matches('0');
    let begins_with_digit = unpadded.starts_with(|first: char| first.is_ascii_digit());
    let zero = if begins_with_digit { "" } else { "0" };
    if unpadded.len() == digits.len() {
        return None;
    }
    python_literal_to_json(&format!("{sign}{zero}{unpadded}"))
}

/// True if a number is meant and no text: `007` has one meaning then.
fn takes_numbers_alone(types: &ParameterTypes) -> bool {
    let takes_numbers = types.allow(JsonType::Integer) || types.allow(JsonType::Number);
    takes_numbers && !types.allow(JsonType::String)
}

/// True if the argument of a call of any tool is one that Python reads, or a bare word.
/// `is_last`: the call ends behind it.
pub fn is_readable_argument(text: &str, is_last: bool) -> bool {
    let (keyword, value) = split_argument(text);
    if keyword.is_none() && value.is_empty() {
        return is_last;
    }
    if let Some(dict) = value.strip_prefix("**").filter(|_| keyword.is_none()) {
        return python_dict_members(dict).is_some();
    }
    value_to_json(value, &ParameterTypes::Unknown).is_some()
}

/// True if Python reads an expression in the argument, of whatever value.
pub fn is_python_argument(text: &str) -> bool {
    let (_, value) = split_argument(text);
    is_expression(value.trim_start_matches('*'))
}

/// Arguments of one call so far.
#[derive(Debug, Default)]
pub struct ArgumentList {
    /// JSON texts of names and values.
    members: Vec<(String, String)>,
    positional_count: usize,
    has_keyword: bool,
}

impl ArgumentList {
    /// Appends an argument, if the text holds one. A positional one has the name of the property in
    /// its place. `is_last`: the call ends behind it.
    ///
    /// `None`: the call has no meaning, or several. Its value is an expression, its name is given
    /// twice, it is positional behind a keyword or has no property, or it unpacks no dict.
    pub fn push_argument(&mut self, text: &str, schema: &Value, is_last: bool) -> Option<()> {
        let (keyword, value) = split_argument(text);
        if keyword.is_none() && value.is_empty() {
            return is_last.then_some(());
        }
        if let Some(dict) = value.strip_prefix("**").filter(|_| keyword.is_none()) {
            self.has_keyword = true;
            let members = python_dict_members(dict)?;
            return members
                .into_iter()
                .try_for_each(|(name, json)| self.push_member(name, json));
        }
        let name = match keyword {
            Some(name) => {
                self.has_keyword = true;
                name
            }
            None => self.take_positional_name(schema)?,
        };
        let types = ParameterTypes::of_parameter(schema, name);
        let json = value_to_json(value, &types)?;
        self.push_member(quoted(name), json)
    }

    /// `name`: its JSON text.
    fn push_member(&mut self, name: String, json: String) -> Option<()> {
        if self.members.iter().any(|(other, _)| *other == name) {
            return None;
        }
        self.members.push((name, json));
        Some(())
    }

    /// Name of the next positional argument.
    fn take_positional_name<'a>(&mut self, schema: &'a Value) -> Option<&'a str> {
        if self.has_keyword {
            return None;
        }
        let place = self.positional_count;
        self.positional_count += 1;
        let properties = schema.get("properties").and_then(Value::as_object);
        let property = properties.and_then(|properties| properties.keys().nth(place));
        property.map(String::as_str)
    }

    /// JSON text of the arguments of a call that is complete.
    pub fn to_json(&self) -> String {
        let mut json = self.to_open_json();
        if json.is_empty() {
            json.push('{');
        }
        json.push('}');
        json
    }

    /// JSON text of the arguments so far, without the closing brace; empty if there are none.
    pub fn to_open_json(&self) -> String {
        let mut json = String::new();
        for (name, value) in &self.members {
            let lead = if json.is_empty() { "{" } else { ", " };
            json.push_str(&format!("{lead}{name}: {value}"));
        }
        json
    }
}
