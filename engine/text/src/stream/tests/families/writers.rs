//! Writers of the formats, as chat templates write the calls of earlier turns.

use serde_json::{Map, Value};

use crate::stream::tools::ToolFamily;

/// Call that is written.
#[derive(Debug, Clone, PartialEq)]
pub struct WrittenCall {
    pub name: String,
    pub arguments: Map<String, Value>,
}

/// Text of a format, and of values in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FormatPiece {
    Format(String),
    Value(String),
}

/// Builds a text.
#[derive(Debug, Default)]
struct FormatText(Vec<FormatPiece>);

impl FormatText {
    fn push(&mut self, text: &str) {
        self.0.push(FormatPiece::Format(text.to_owned()));
    }

    fn push_value(&mut self, text: String) {
        self.0.push(FormatPiece::Value(text));
    }
}

pub fn write_calls(family: ToolFamily, calls: &[WrittenCall]) -> Vec<FormatPiece> {
    let mut out = FormatText::default();
    match family {
        ToolFamily::Qwen3Coder => write_qwen3_coder(calls, &mut out),
        ToolFamily::Glm45 => write_glm(calls, "\n", &mut out),
        ToolFamily::Glm47 => write_glm(calls, "", &mut out),
        ToolFamily::DeepseekV32 => write_deepseek_v32(calls, &mut out),
        ToolFamily::DeepseekV3 => write_deepseek_v3(calls, &mut out),
        ToolFamily::DeepseekV31 => write_deepseek_v31(calls, &mut out),
        ToolFamily::KimiK2 => write_kimi_k2(calls, &mut out),
        ToolFamily::MistralV13 => write_mistral_v13(calls, &mut out),
        ToolFamily::Pythonic => write_pythonic(calls, &mut out),
        ToolFamily::GptOss => write_gpt_oss(calls, &mut out),
        other => panic!("{other:?} is tested elsewhere"),
    }
    out.0
}

/// Value of a parameter as raw text.
pub fn raw_text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn json_text(call: &WrittenCall) -> String {
    serde_json::to_string(&call.arguments).unwrap()
}

fn write_qwen3_coder(calls: &[WrittenCall], out: &mut FormatText) {
    for (index, call) in calls.iter().enumerate() {
        out.push(if index == 0 { "" } else { "\n" });
        out.push(&format!("<tool_call>\n<function={}>\n", call.name));
        for (name, value) in &call.arguments {
            out.push(&format!("<parameter={name}>\n"));
            out.push_value(raw_text(value));
            out.push("\n</parameter>\n");
        }
        out.push("</function>\n</tool_call>");
    }
}

fn write_glm(calls: &[WrittenCall], newline: &str, out: &mut FormatText) {
    for (index, call) in calls.iter().enumerate() {
        out.push(if index == 0 { "" } else { newline });
        out.push(&format!("<tool_call>{}{newline}", call.name));
        for (name, value) in &call.arguments {
            out.push(&format!("<arg_key>{name}</arg_key>{newline}<arg_value>"));
            out.push_value(raw_text(value));
            out.push(&format!("</arg_value>{newline}"));
        }
        out.push("</tool_call>");
    }
}

fn write_deepseek_v32(calls: &[WrittenCall], out: &mut FormatText) {
    out.push("\n\n<｜DSML｜function_calls>\n");
    for call in calls {
        out.push(&format!("<｜DSML｜invoke name=\"{}\">\n", call.name));
        for (name, value) in &call.arguments {
            let is_string = value.is_string();
            out.push(&format!(
                "<｜DSML｜parameter name=\"{name}\" string=\"{is_string}\">"
            ));
            out.push_value(raw_text(value));
            out.push("</｜DSML｜parameter>\n");
        }
        out.push("</｜DSML｜invoke>\n");
    }
    out.push("</｜DSML｜function_calls>");
}

fn write_deepseek_v3(calls: &[WrittenCall], out: &mut FormatText) {
    out.push("<｜tool▁calls▁begin｜>");
    for (index, call) in calls.iter().enumerate() {
        out.push(if index == 0 { "" } else { "\n" });
        let name = &call.name;
        out.push(&format!(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
        ));
        out.push_value(json_text(call));
        out.push("\n```<｜tool▁call▁end｜>");
    }
    out.push("<｜tool▁calls▁end｜>");
}

fn write_deepseek_v31(calls: &[WrittenCall], out: &mut FormatText) {
    out.push("<｜tool▁calls▁begin｜>");
    for call in calls {
        out.push(&format!("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", call.name));
        out.push_value(json_text(call));
        out.push("<｜tool▁call▁end｜>");
    }
    out.push("<｜tool▁calls▁end｜>");
}

fn write_kimi_k2(calls: &[WrittenCall], out: &mut FormatText) {
    out.push("<|tool_calls_section_begin|>");
    for (index, call) in calls.iter().enumerate() {
        let name = &call.name;
        out.push(&format!(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        ));
        out.push_value(json_text(call));
        out.push("<|tool_call_end|>");
    }
    out.push("<|tool_calls_section_end|>");
}

fn write_mistral_v13(calls: &[WrittenCall], out: &mut FormatText) {
    for (index, call) in calls.iter().enumerate() {
        let is_v11 = index % 2 == 1;
        let id = if is_v11 { "[CALL_ID]abc123def" } else { "" };
        out.push(&format!("[TOOL_CALLS]{}{id}[ARGS]", call.name));
        out.push_value(json_text(call));
    }
}

fn write_gpt_oss(calls: &[WrittenCall], out: &mut FormatText) {
    for (index, call) in calls.iter().enumerate() {
        out.push(if index == 0 { "" } else { "<|start|>assistant" });
        let recipient = format!("to=functions.{}", call.name);
        let header = match index % 3 {
            0 => format!("<|channel|>commentary {recipient} <|constrain|>json<|message|>"),
            1 => format!(" {recipient}<|channel|>commentary json<|message|>"),
            _ => format!("<|channel|>commentary {recipient}<|constrain|>json<|message|>"),
        };
        out.push(&header);
        out.push_value(json_text(call));
        out.push("<|call|>");
    }
}

fn write_pythonic(calls: &[WrittenCall], out: &mut FormatText) {
    out.push("[");
    for (index, call) in calls.iter().enumerate() {
        out.push(if index == 0 { "" } else { ", " });
        out.push(&format!("{}(", call.name));
        let arguments = call.arguments.iter().enumerate();
        for (place, (name, value)) in arguments {
            let lead = if place == 0 { "" } else { ", " };
            out.push(&format!("{lead}{name}="));
            let mut literal = String::new();
            push_python_literal(value, &mut literal);
            out.push_value(literal);
        }
        out.push(")");
    }
    out.push("]");
}

/// Appends what Python's `repr` prints.
fn push_python_literal(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Number(number) => out.push_str(&number.to_string()),
        Value::String(text) => push_python_string(text, out),
        Value::Array(items) => {
            out.push('[');
            for (place, item) in items.iter().enumerate() {
                out.push_str(if place == 0 { "" } else { ", " });
                push_python_literal(item, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            out.push('{');
            for (place, (name, member)) in members.iter().enumerate() {
                out.push_str(if place == 0 { "" } else { ", " });
                push_python_string(name, out);
                out.push_str(": ");
                push_python_literal(member, out);
            }
            out.push('}');
        }
    }
}

fn push_python_string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..'\u{20}' | '\u{7f}' => {
                out.push_str(&format!("\\x{:02x}", u32::from(character)));
            }
            _ if character == quote => {
                out.push('\\');
                out.push(character);
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}
