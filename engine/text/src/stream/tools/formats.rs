//! Formats of tool calls: one row each, read by the readers of answers and, through the native
//! extension, by the grammars of forced and strict calls.
//!
//! A format whose calls are JSON objects is a row alone. The others have code of their own, in Rust
//! and in Python, that takes its markers from the row.

use serde::Serialize;
use strum::IntoEnumIterator;

/// How models write calls: a row of the table.
#[derive(Debug, Serialize)]
pub struct ToolFormat {
    /// Texts that [`crate::stream::markers::Lexeme::Marker`] counts by. The first ones begin a
    /// call.
    pub markers: &'static [&'static str],
    pub id_form: IdForm,
    pub syntax: CallSyntax,
    /// Markers, the first ones, that end a reasoning. Models of some formats forget its end in
    /// front of a call: vLLM and SGLang end it at these tokens, llama.cpp also at the one of a call
    /// of Kimi K2 without a section.
    #[serde(skip)]
    pub reasoning_ends: usize,
    /// Names that vLLM and SGLang have for the format.
    #[serde(skip)]
    pub aliases: &'static [&'static str],
    /// Text in chat templates of this format alone. `None`: a rule of detection tells it from
    /// others.
    #[serde(skip)]
    pub template_mark: Option<&'static str>,
}

/// Ids of calls that the model's template takes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum IdForm {
    /// Any text.
    Usual,
    /// Nine letters and digits.
    NineLetters,
    /// `functions.NAME:NUMBER`, counted over the conversation.
    Numbered,
}

/// Place of names and arguments.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum CallSyntax {
    Json(JsonCalls),
    Headers(HeaderCalls),
    FunctionTags,
    KeyValueTags {
        /// Text behind a name and behind each tag.
        newline: &'static str,
    },
    DsmlTags,
    Pythonic,
    Harmony,
}

/// Calls that are JSON objects: `{"name": "f", "arguments": {"a": "x"}}`.
#[derive(Debug, Serialize)]
pub struct JsonCalls {
    /// Kinds of the first markers, which stand in front of calls. A further marker stands behind
    /// calls.
    pub begins: &'static [JsonBegin],
    /// The answer's first text may be a call, without a marker.
    pub at_start: bool,
    /// Text that models write between a marker and calls.
    pub padding: &'static str,
    pub has_optional_padding: bool,
    /// Texts between two calls, each of which has its begin marker, unless calls stand at the
    /// start. Empty: several calls are elements of a list. Lists are read in all formats.
    pub separators: &'static [&'static str],
    pub arguments_key: &'static str,
}

/// Text in front of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum JsonBegin {
    Marker,
    /// A word that occurs in free text, too: models write a list's bracket directly behind it, and
    /// no marker behind the list.
    Word,
}

/// Calls that are a header between markers and a JSON object.
#[derive(Debug, Serialize)]
pub struct HeaderCalls {
    #[serde(skip)]
    pub name: NamePlace,
    /// A call as models write it: `{name}`, `{arguments}`, and `{id}` where it has a part of its
    /// id.
    pub call: &'static str,
    /// Marker in front of an id. With it an id is optional.
    pub id_begin: Option<&'static str>,
    /// Text between two calls of a block.
    pub separator: &'static str,
    /// Marker behind the calls of a block. `None`: the begin marker stands in front of each call.
    pub end: Option<&'static str>,
}

/// Place of a name in a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamePlace {
    /// Behind the separator; the object stands in a fence.
    BehindSeparator,
    BeforeSeparator,
    InId,
    BehindBegin,
}

/// JSON objects behind markers, as elements of a list, which most models write alike.
const JSON_LIST: JsonCalls = JsonCalls {
    begins: &[JsonBegin::Marker],
    at_start: false,
    padding: "",
    has_optional_padding: false,
    separators: &[],
    arguments_key: "arguments",
};

/// A format without markers, which rows change.
pub(crate) const PLAIN: ToolFormat = ToolFormat {
    markers: &[],
    id_form: IdForm::Usual,
    syntax: CallSyntax::Json(JSON_LIST),
    reasoning_ends: 0,
    aliases: &[],
    template_mark: None,
};

const DEEPSEEK_MARKERS: &[&str] = &[
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

const KEY_VALUE_MARKERS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
];

/// Defines `ToolFamily` and the row of each of its values.
macro_rules! tool_formats {
    ($($(#[$doc:meta])* $family:ident: $format:expr,)+) => {
        /// Format in which a model writes tool calls. The names are values of `--tool-parser`.
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, strum::EnumString, strum::IntoStaticStr,
            strum::EnumIter,
        )]
        #[strum(serialize_all = "snake_case")]
        pub enum ToolFamily {
            $($(#[$doc])* $family,)+
        }

        impl ToolFamily {
            /// Row of the table.
            pub fn format(self) -> &'static ToolFormat {
                match self {
                    $(Self::$family => const { &$format },)+
                }
            }
        }
    };
}

tool_formats! {
    /// Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4.0.
    ///
    /// ```text
    /// <tool_call>
    /// {"name": "f", "arguments": {"a": "x"}}
    /// </tool_call>
    /// ```
    Hermes: ToolFormat {
        markers: &["<tool_call>", "</tool_call>"],
        syntax: CallSyntax::Json(JsonCalls {
            padding: "\n",
            separators: &["\n"],
            ..JSON_LIST
        }),
        reasoning_ends: 1,
        aliases: &["qwen", "qwen25", "granite4"],
        ..PLAIN
    },
    Qwen3Coder: ToolFormat {
        markers: &["<tool_call>", "</tool_call>"],
        syntax: CallSyntax::FunctionTags,
        reasoning_ends: 1,
        aliases: &["qwen3_xml", "mimo", "step3p5"],
        ..PLAIN
    },
    /// Llama 3.1 to 3.3: the answer is a call, or several; `<|python_tag|>` may be in front.
    ///
    /// ```text
    /// {"name": "f", "parameters": {"a": "x"}}; {"name": "g", "parameters": {}}
    /// ```
    ///
    /// A list of them is read, too, as vLLM and SGLang do.
    Llama3: ToolFormat {
        markers: &["<|python_tag|>"],
        syntax: CallSyntax::Json(JsonCalls {
            at_start: true,
            separators: &["; ", "\n"],
            arguments_key: "parameters",
            ..JSON_LIST
        }),
        aliases: &["llama3_json", "llama4_json"],
        ..PLAIN
    },
    Pythonic: ToolFormat {
        markers: &[
            "<|python_start|>",
            "<|python_end|>",
            "<function_calls>",
            "</function_calls>",
        ],
        syntax: CallSyntax::Pythonic,
        aliases: &["llama4_pythonic", "olmo3"],
        ..PLAIN
    },
    /// Mistral up to tokenizer version 7.
    ///
    /// ```text
    /// [TOOL_CALLS][{"name": "f", "arguments": {"a": "x"}, "id": "abc123def"}, …]
    /// ```
    Mistral: ToolFormat {
        markers: &["[TOOL_CALLS]"],
        id_form: IdForm::NineLetters,
        syntax: CallSyntax::Json(JsonCalls {
            padding: " ",
            has_optional_padding: true,
            ..JSON_LIST
        }),
        ..PLAIN
    },
    /// Mistral from tokenizer version 11 on: a name and an object behind each marker.
    MistralV13: ToolFormat {
        markers: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        id_form: IdForm::NineLetters,
        syntax: CallSyntax::Headers(HeaderCalls {
            name: NamePlace::BehindBegin,
            call: "{name}{id}[ARGS]{arguments}",
            id_begin: Some("[CALL_ID]"),
            separator: "",
            end: None,
        }),
        ..PLAIN
    },
    DeepseekV3: ToolFormat {
        markers: DEEPSEEK_MARKERS,
        syntax: CallSyntax::Headers(HeaderCalls {
            name: NamePlace::BehindSeparator,
            call: "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```\
                   <｜tool▁call▁end｜>",
            id_begin: None,
            separator: "\n",
            end: Some("<｜tool▁calls▁end｜>"),
        }),
        aliases: &["deepseekv3"],
        ..PLAIN
    },
    DeepseekV31: ToolFormat {
        markers: DEEPSEEK_MARKERS,
        syntax: CallSyntax::Headers(HeaderCalls {
            name: NamePlace::BeforeSeparator,
            call: "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            id_begin: None,
            separator: "",
            end: Some("<｜tool▁calls▁end｜>"),
        }),
        aliases: &["deepseekv31"],
        ..PLAIN
    },
    DeepseekV32: ToolFormat {
        markers: &["｜DSML｜"],
        syntax: CallSyntax::DsmlTags,
        aliases: &["deepseekv32"],
        template_mark: Some("｜DSML｜"),
        ..PLAIN
    },
    GptOss: ToolFormat {
        markers: &[
            "<|channel|>",
            "<|start|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
        ],
        syntax: CallSyntax::Harmony,
        aliases: &["gpt-oss", "openai"],
        template_mark: Some("<|channel|>"),
        ..PLAIN
    },
    Glm45: ToolFormat {
        markers: KEY_VALUE_MARKERS,
        syntax: CallSyntax::KeyValueTags { newline: "\n" },
        reasoning_ends: 1,
        aliases: &["glm"],
        ..PLAIN
    },
    Glm47: ToolFormat {
        markers: KEY_VALUE_MARKERS,
        syntax: CallSyntax::KeyValueTags { newline: "" },
        reasoning_ends: 1,
        ..PLAIN
    },
    KimiK2: ToolFormat {
        markers: &[
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ],
        id_form: IdForm::Numbered,
        syntax: CallSyntax::Headers(HeaderCalls {
            name: NamePlace::InId,
            call: "<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}\
                   <|tool_call_end|>",
            id_begin: None,
            separator: "",
            end: Some("<|tool_calls_section_end|>"),
        }),
        reasoning_ends: 2,
        aliases: &["kimi"],
        ..PLAIN
    },
    /// Granite 3.0 (`<|tool_call|>`) and 3.1 to 3.3 (`<tool_call>`): no end marker.
    ///
    /// ```text
    /// <|tool_call|>[{"name": "f", "arguments": {"a": "x"}}, …]
    /// ```
    Granite: ToolFormat {
        markers: &["<|tool_call|>", "<tool_call>"],
        syntax: CallSyntax::Json(JsonCalls {
            begins: &[JsonBegin::Marker, JsonBegin::Marker],
            ..JSON_LIST
        }),
        ..PLAIN
    },
    /// Phi-4-mini: a list or an object between tags. vLLM's template has `functools` and a list
    /// instead.
    ///
    /// ```text
    /// <|tool_call|>[{"name": "f", "arguments": {"a": "x"}}]<|/tool_call|>
    /// functools[{"name": "f", "arguments": {"a": "x"}}]
    /// ```
    Phi4: ToolFormat {
        markers: &["<|tool_call|>", "functools", "<|/tool_call|>"],
        syntax: CallSyntax::Json(JsonCalls {
            begins: &[JsonBegin::Marker, JsonBegin::Word],
            ..JSON_LIST
        }),
        aliases: &["phi4_mini_json"],
        ..PLAIN
    },
    /// Models without markers: the answer is one call or a list of calls.
    ///
    /// ```text
    /// {"name": "f", "arguments": {"a": "x"}}
    /// ```
    Json: ToolFormat {
        syntax: CallSyntax::Json(JsonCalls {
            begins: &[],
            at_start: true,
            ..JSON_LIST
        }),
        ..PLAIN
    },
}

#[cfg(test)]
pub(crate) use tool_formats;

/// The table by the names of its rows, as grammars read it.
pub fn named_formats() -> impl Serialize {
    let rows = ToolFamily::iter().map(|family| (<&str>::from(family), family.format()));
    rows.collect::<Vec<_>>()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rows_name_their_markers_alone() {
        for family in ToolFamily::iter() {
            let format = family.format();
            assert!(format.reasoning_ends <= format.markers.len(), "{family:?}");
            match &format.syntax {
                CallSyntax::Json(calls) => {
                    let ends = format.markers.len() - calls.begins.len();
                    assert!(ends <= 1, "{family:?}");
                }
                CallSyntax::Headers(calls) => {
                    let call = calls.call.replace("{id}", calls.id_begin.unwrap_or(""));
                    let block = [format.markers[0], &call, calls.end.unwrap_or("")].concat();
                    let mut rest = block.as_str();
                    for marker in format.markers {
                        rest = rest.split_once(marker).unwrap().1;
                    }
                    assert_eq!(
                        rest,
                        if calls.end.is_some() {
                            ""
                        } else {
                            "{arguments}"
                        }
                    );
                }
                _ => assert!(!format.markers.is_empty(), "{family:?}"),
            }
        }
    }
}
