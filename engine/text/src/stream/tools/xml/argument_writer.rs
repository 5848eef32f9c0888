//! Raw values of parameters to the JSON text of arguments.

use std::mem;

use super::super::callable::CalledTool;
use super::super::scan::json_text::{push_string_body, quoted};
use super::super::scan::schema_types::ParameterTypes;
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
    Converted {
        types: ParameterTypes,
        raw: String,
    },
}

/// Writes the arguments of one call: `{"a": "x", "b": 1}`.
#[derive(Debug)]
pub struct ArgumentWriter {
    tool: CalledTool,
    parameter_count: usize,
    value: OpenValue,
}

impl ArgumentWriter {
    pub fn new(tool: CalledTool) -> Self {
        Self {
            tool,
            parameter_count: 0,
            value: OpenValue::None,
        }
    }

    pub fn begin_parameter(&mut self, name: &str, form: ValueForm, out: &mut AnswerParts) {
        let lead = if self.parameter_count == 0 { "{" } else { ", " };
        self.parameter_count += 1;
        out.push_arguments(&format!("{lead}{}: ", quoted(name)));
        let schema = &self.tool.parameters;
        let types = match form {
            ValueForm::BySchema => ParameterTypes::of_parameter(schema, name),
            ValueForm::Json => ParameterTypes::Unknown,
            ValueForm::Text => {
                self.begin_text(out);
                return;
            }
        };
        if types.is_text_only() {
            self.begin_text(out);
            return;
        }
        let raw = String::new();
        self.value = OpenValue::Converted { types, raw };
    }

    fn begin_text(&mut self, out: &mut AnswerParts) {
        out.push_arguments("\"");
        self.value = OpenValue::Text;
    }

    /// Appends raw text of the value.
    pub fn push_value(&mut self, text: &str, out: &mut AnswerParts) {
        match &mut self.value {
            OpenValue::None => {}
            OpenValue::Text => {
                let mut body = String::with_capacity(text.len());
                push_string_body(&mut body, text);
                out.push_arguments(&body);
            }
            OpenValue::Converted { raw, .. } => raw.push_str(text),
        }
    }

    pub fn end_parameter(&mut self, out: &mut AnswerParts) {
        match mem::replace(&mut self.value, OpenValue::None) {
            OpenValue::None => {}
            OpenValue::Text => out.push_arguments("\""),
            OpenValue::Converted { types, raw } => out.push_arguments(&types.to_json(&raw)),
        }
    }

    /// The call is complete.
    pub fn end_call(&mut self, out: &mut AnswerParts) {
        self.end_parameter(out);
        let end = if self.parameter_count == 0 { "{}" } else { "}" };
        out.push_arguments(end);
        out.end_call();
    }

    /// The answer ends within the call: appends a value that was held back, as it is.
    pub fn cut_call(&mut self, out: &mut AnswerParts) {
        if let OpenValue::Converted { raw, .. } = &self.value {
            out.push_arguments(raw);
        }
        self.value = OpenValue::None;
    }
}
