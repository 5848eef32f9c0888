//! Raw values of parameters to the JSON text of arguments.
//!
//! A parameter that is written twice is a member once if both values are the same. If they differ,
//! the call has no one meaning, and what came first may have been sent: both are members of an
//! object that is never closed, which no client takes for the arguments of a command.

use std::mem;

use super::super::callable::CalledTool;
use super::super::scan::json_text::{push_string_body, quoted};
use super::super::scan::schema_types::{ParameterTypes, json_or_text};
use crate::stream::parts::AnswerParts;

/// Form of a value that its tag states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueForm {
    /// The tag states none: the tool's schema decides.
    BySchema,
    Text,
    Json,
}

#[derive(Debug)]
enum OpenValue {
    None,
    /// A string, written as it arrives.
    Text,
    /// A value that is converted when it is complete.
    Converted(RawValue),
    /// Value of a parameter that the call has already, written if it is another one.
    Repeated {
        /// Place of the parameter among those that were written.
        place: usize,
        raw: RawValue,
    },
}

/// How the raw text of a value becomes JSON.
#[derive(Debug)]
enum ValueReading {
    Text,
    Json,
    Typed(ParameterTypes),
}

#[derive(Debug)]
struct RawValue {
    reading: ValueReading,
    raw: String,
}

impl RawValue {
    fn to_json(&self) -> String {
        match &self.reading {
            ValueReading::Text => quoted(&self.raw),
            ValueReading::Json => json_or_text(&self.raw),
            ValueReading::Typed(types) => types.to_json(&self.raw),
        }
    }
}

/// Parameter that was written.
#[derive(Debug)]
struct WrittenParameter {
    name: String,
    /// JSON text.
    value: String,
}

/// Writes the arguments of one call: `{"a": "x", "b": 1}`.
#[derive(Debug)]
pub struct ArgumentWriter {
    tool: CalledTool,
    /// The last one may be incomplete.
    written: Vec<WrittenParameter>,
    value: OpenValue,
    /// A parameter has two values.
    is_ambiguous: bool,
}

impl ArgumentWriter {
    pub fn new(tool: CalledTool) -> Self {
        Self {
            tool,
            written: Vec::new(),
            value: OpenValue::None,
            is_ambiguous: false,
        }
    }

    pub fn begin_parameter(&mut self, name: &str, form: ValueForm, out: &mut AnswerParts) {
        let reading = match form {
            ValueForm::BySchema => {
                let types = ParameterTypes::of_parameter(&self.tool.parameters, name);
                if types.is_text_only() {
                    ValueReading::Text
                } else {
                    ValueReading::Typed(types)
                }
            }
            ValueForm::Json => ValueReading::Json,
            ValueForm::Text => ValueReading::Text,
        };
        let is_text = matches!(reading, ValueReading::Text);
        let raw = RawValue {
            reading,
            raw: String::new(),
        };
        let repeated = self.written.iter().position(|other| other.name == name);
        if let Some(place) = repeated {
            self.value = OpenValue::Repeated { place, raw };
            return;
        }
        self.begin_member(name, out);
        if is_text {
            self.push_json("\"", out);
            self.value = OpenValue::Text;
        } else {
            self.value = OpenValue::Converted(raw);
        }
    }

    fn begin_member(&mut self, name: &str, out: &mut AnswerParts) {
        let lead = if self.written.is_empty() { "{" } else { ", " };
        out.push_arguments(&format!("{lead}{}: ", quoted(name)));
        self.written.push(WrittenParameter {
            name: name.to_owned(),
            value: String::new(),
        });
    }

    /// Appends to the value of the last parameter.
    fn push_json(&mut self, json: &str, out: &mut AnswerParts) {
        out.push_arguments(json);
        if let Some(parameter) = self.written.last_mut() {
            parameter.value.push_str(json);
        }
    }

    /// Appends raw text of the value.
    pub fn push_value(&mut self, text: &str, out: &mut AnswerParts) {
        match &mut self.value {
            OpenValue::None => {}
            OpenValue::Text => {
                let mut body = String::with_capacity(text.len());
                push_string_body(&mut body, text);
                self.push_json(&body, out);
            }
            OpenValue::Converted(value) | OpenValue::Repeated { raw: value, .. } => {
                value.raw.push_str(text);
            }
        }
    }

    pub fn end_parameter(&mut self, out: &mut AnswerParts) {
        match mem::replace(&mut self.value, OpenValue::None) {
            OpenValue::None => {}
            OpenValue::Text => self.push_json("\"", out),
            OpenValue::Converted(value) => self.push_json(&value.to_json(), out),
            OpenValue::Repeated { place, raw } => self.repeat_parameter(place, &raw, out),
        }
    }

    /// The parameter at `place` has this value too.
    fn repeat_parameter(&mut self, place: usize, value: &RawValue, out: &mut AnswerParts) {
        let json = value.to_json();
        let earlier = &self.written[place];
        if earlier.value == json {
            return;
        }
        self.is_ambiguous = true;
        let name = earlier.name.clone();
        self.begin_member(&name, out);
        self.push_json(&json, out);
    }

    /// The call is complete.
    pub fn end_call(&mut self, out: &mut AnswerParts) {
        self.end_parameter(out);
        if self.written.is_empty() {
            out.push_arguments("{}");
        } else if !self.is_ambiguous {
            out.push_arguments("}");
        }
        out.end_call();
    }

    /// The answer ends within the call: appends a value that was held back, as it is.
    pub fn cut_call(&mut self, out: &mut AnswerParts) {
        match mem::replace(&mut self.value, OpenValue::None) {
            OpenValue::None | OpenValue::Text => {}
            OpenValue::Converted(value) => out.push_arguments(&value.raw),
            OpenValue::Repeated { place, raw } => {
                let name = self.written[place].name.clone();
                self.begin_member(&name, out);
                out.push_arguments(&raw.raw);
            }
        }
    }
}
