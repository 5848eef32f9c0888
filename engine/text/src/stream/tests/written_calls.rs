//! Calls that are written in a format are read back.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::answers::make_format;
use super::fixtures::{json_formats, read_answer, reader_options, tools};
use crate::stream::TextRules;
use crate::stream::parts::AnswerParts;
use crate::stream::reasoning::ReasoningStart;
use crate::stream::tools::ToolFamily;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn written_calls_are_read_back(
        (format, are_tokens) in (select(json_formats()), any::<bool>()),
        calls in vec((0..5usize, any_arguments()), 1..4),
        style in any_style(),
        cut_places in vec(1..40usize, 1..4),
    ) {
        let family = format.0;
        let (format, mut tokens) = make_format(format, are_tokens);
        let tools = tools();
        let calls: Vec<(&str, String)> = calls
            .iter()
            .map(|(tool, arguments)| (tools[*tool].name.as_str(), style.write(arguments)))
            .collect();
        let written: Vec<String> = calls.iter().map(|(name, text)| style.write_call(name, text)).collect();
        let text = write_calls(family, &written);
        let ids = tokens.cut(&text, &|place| cut_places.iter().any(|len| place % len == 0));
        let options = reader_options(Some(ReasoningStart::Undecided));
        let parts = read_answer(&format, &options, &TextRules::default(), &tokens, &ids, 1);
        let mut expected = AnswerParts::default();
        for (name, arguments) in &calls {
            expected.begin_call(name);
            expected.push_arguments(arguments);
            expected.end_call();
        }
        prop_assert_eq!(parts, expected, "{}", text);
    }
}

/// Objects with names and values that look like other parts of an answer.
fn any_arguments() -> impl Strategy<Value = serde_json::Value> {
    let text = select(vec![
        "",
        "a",
        "é😀\u{7f}",
        "\"",
        "\\",
        "line\n\n",
        "</tool_call>",
        "<tool_call>{\"name\": \"f\"",
        "[TOOL_CALLS]",
        "<|/tool_call|>",
        "}]",
        "<think>",
        "[/THINK]",
        "functools",
        "; {",
    ]);
    let leaf = prop_oneof![
        4 => text.clone().prop_map(serde_json::Value::from),
        1 => any::<i64>().prop_map(serde_json::Value::from),
        1 => Just(serde_json::Value::Null),
        1 => any::<bool>().prop_map(serde_json::Value::from),
        1 => Just(serde_json::json!(-1.5e300)),
    ];
    let value = leaf.prop_recursive(3, 16, 4, move |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(serde_json::Value::from),
            vec(("[a-c\"\\\\]{0,2}", inner), 0..3)
                .prop_map(|members| { serde_json::Value::Object(members.into_iter().collect()) }),
        ]
    });
    vec((text.prop_map(str::to_owned), value), 0..4)
        .prop_map(|members| serde_json::Value::Object(members.into_iter().collect()))
}

/// How a model writes JSON.
#[derive(Debug, Clone, Copy)]
struct JsonStyle {
    is_pretty: bool,
    escapes_unicode: bool,
    key: &'static str,
    name_is_last: bool,
    are_strings: bool,
}

fn any_style() -> impl Strategy<Value = JsonStyle> {
    let keys = select(vec!["arguments", "parameters"]);
    (
        any::<bool>(),
        any::<bool>(),
        keys,
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(
            |(is_pretty, escapes_unicode, key, name_is_last, are_strings)| JsonStyle {
                is_pretty,
                escapes_unicode,
                key,
                name_is_last,
                are_strings,
            },
        )
}

impl JsonStyle {
    fn write(&self, value: &serde_json::Value) -> String {
        let text = if self.is_pretty {
            serde_json::to_string_pretty(value).unwrap()
        } else {
            value.to_string()
        };
        if self.escapes_unicode {
            escape_unicode(&text)
        } else {
            text
        }
    }

    fn write_call(&self, name: &str, arguments: &str) -> String {
        let name = self.write(&name.into());
        let arguments = if self.are_strings {
            self.write(&arguments.into())
        } else {
            arguments.to_owned()
        };
        let key = self.key;
        if self.name_is_last {
            format!("{{\"{key}\": {arguments}, \"name\": {name}}}")
        } else {
            format!("{{\"name\":{name} , \"{key}\":{arguments}\n}}")
        }
    }
}

fn escape_unicode(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        if character.is_ascii() {
            escaped.push(character);
            continue;
        }
        for unit in character.encode_utf16(&mut [0; 2]) {
            escaped += &format!("\\u{unit:04x}");
        }
    }
    escaped
}

fn write_calls(family: ToolFamily, calls: &[String]) -> String {
    let list = calls.join(", ");
    match family {
        ToolFamily::Hermes => {
            let tagged = calls
                .iter()
                .map(|call| format!("<tool_call>\n{call}\n</tool_call>"));
            tagged.collect::<Vec<_>>().join("\n")
        }
        ToolFamily::Llama3 => calls.join("; "),
        ToolFamily::Mistral => format!("[TOOL_CALLS] [{list}]"),
        ToolFamily::Granite => format!("<|tool_call|>[{list}]"),
        ToolFamily::Phi4 => format!("<|tool_call|>[{list}]<|/tool_call|>"),
        other => {
            let mut markers = other.format().markers.iter();
            let begin = markers.next().unwrap_or(&"");
            let end = markers.next_back().unwrap_or(&"");
            format!("{begin}[{list}]{end}")
        }
    }
}
