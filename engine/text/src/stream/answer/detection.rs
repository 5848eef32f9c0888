//! The format of a checkpoint, from its template and vocabulary, else from its `model_type`.

use strum::IntoEnumIterator;

use super::format::AnswerFormat;
use super::model_types::{reasoning_of_model_type, tools_of_model_type};
use crate::stream::reasoning::ReasoningFamily;
use crate::stream::tools::ToolFamily;
use crate::tokenizer::TextTokenizer;

/// Values of `--tool-parser` and `--reasoning-parser`: the name of a format, `auto` or `none`.
#[derive(Debug, Clone, Copy)]
pub struct ParserChoice<'a> {
    pub tool_parser: &'a str,
    pub reasoning_parser: &'a str,
}

/// Parts of a checkpoint that decide its format, beside the vocabulary.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckpointFacts<'a> {
    /// Source of the chat template; without one no format is detected.
    pub template: Option<&'a str>,
    /// Tools reach the prompts that the template renders.
    pub renders_tools: bool,
    /// Member of config.json; empty where it has none.
    pub model_type: &'a str,
}

impl CheckpointFacts<'_> {
    fn find_tools(&self, tokenizer: &dyn TextTokenizer) -> Option<ToolFamily> {
        let found = detect_tools(self.template?, tokenizer);
        if found.is_none() && self.renders_tools {
            return tools_of_model_type(self.model_type, tokenizer);
        }
        found
    }

    fn find_reasoning(&self, tokenizer: &dyn TextTokenizer) -> Option<ReasoningFamily> {
        let found = detect_reasoning(self.template?);
        found.or_else(|| reasoning_of_model_type(self.model_type, tokenizer))
    }
}

/// Finds the format of a model's answers. `Err`: what to choose instead.
pub fn detect_format(
    choice: ParserChoice<'_>,
    checkpoint: CheckpointFacts<'_>,
    tokenizer: &dyn TextTokenizer,
) -> Result<AnswerFormat, String> {
    let tools = match choice.tool_parser {
        "auto" => checkpoint.find_tools(tokenizer),
        name => read_name("--tool-parser", name, |name| {
            ToolFamily::iter().find(|family| family.format().aliases.contains(&name))
        })?,
    };
    let reasoning = match choice.reasoning_parser {
        "auto" => checkpoint.find_reasoning(tokenizer),
        name => read_name("--reasoning-parser", name, |name| {
            let alias = REASONING_ALIASES.iter().find(|(alias, _)| *alias == name);
            alias.map(|(_, family)| *family)
        })?,
    };
    Ok(AnswerFormat::new(tools, reasoning, tokenizer))
}

/// Names that vLLM and SGLang have for formats of reasoning. SGLang's `kimi` (`◁think▷`, of models
/// that Baton does not serve) is absent: an alias of `<think>` would find no reasoning.
const REASONING_ALIASES: [(&str, ReasoningFamily); 21] = [
    ("qwen3", ReasoningFamily::ThinkTags),
    ("qwen3-thinking", ReasoningFamily::ThinkTags),
    ("interns1", ReasoningFamily::ThinkTags),
    ("mimo", ReasoningFamily::ThinkTags),
    ("holo2", ReasoningFamily::ThinkTags),
    ("nemotron_3", ReasoningFamily::ThinkTags),
    ("nemotron_v3", ReasoningFamily::ThinkTags),
    ("olmo3", ReasoningFamily::ThinkTags),
    ("step3", ReasoningFamily::ThinkTags),
    ("step3p5", ReasoningFamily::ThinkTags),
    ("deepseek_r1", ReasoningFamily::ThinkTags),
    ("deepseek-r1", ReasoningFamily::ThinkTags),
    ("deepseek_v3", ReasoningFamily::ThinkTags),
    ("deepseek-v3", ReasoningFamily::ThinkTags),
    ("glm45", ReasoningFamily::ThinkTags),
    ("glm47", ReasoningFamily::ThinkTags),
    ("kimi_k2", ReasoningFamily::ThinkTags),
    ("minimax", ReasoningFamily::ThinkTags),
    ("minimax_m2", ReasoningFamily::ThinkTags),
    ("gpt-oss", ReasoningFamily::GptOss),
    ("openai_gptoss", ReasoningFamily::GptOss),
];

/// Format of a name. `find_alias`: the format that other engines name so.
fn read_name<F>(
    flag: &str,
    name: &str,
    find_alias: impl FnOnce(&str) -> Option<F>,
) -> Result<Option<F>, String>
where
    F: Copy + std::str::FromStr + IntoEnumIterator + Into<&'static str>,
{
    if name == "none" {
        return Ok(None);
    }
    if let Some(family) = find_alias(name) {
        return Ok(Some(family));
    }
    name.parse().map(Some).map_err(|_| {
        let names: Vec<&str> = F::iter().map(Into::into).collect();
        format!(
            "{flag} {name} does not exist; choose auto, none or one of {}",
            names.join(", ")
        )
    })
}

/// The format of which a template has the mark, else the first match, as in SGLang's detection by
/// templates.
fn detect_tools(template: &str, tokenizer: &dyn TextTokenizer) -> Option<ToolFamily> {
    let has = |text: &str| template.contains(text);
    let has_mark = |family: &ToolFamily| family.format().template_mark.is_some_and(has);
    if let Some(family) = ToolFamily::iter().find(has_mark) {
        return Some(family);
    }
    let is_token = |text: &str| tokenizer.added_id_of(text).is_some();
    // The template of Phi-4-mini has the tag of its tools only, its vocabulary those of calls.
    let has_phi4_tags = has("<|tool_call|>") && has("<|/tool_call|>")
        || has("<|tool|>") && is_token("<|/tool_call|>");
    // Granite 4 closes the tag.
    let is_granite =
        has("<|tool_call|>") || has("<tool_call>") && has("Granite") && !has("</tool_call>");
    let family = if is_token("<|tool_calls_section_begin|>") {
        ToolFamily::KimiK2
    } else if has("<｜tool▁calls▁begin｜>") {
        detect_deepseek(template)
    } else if has("[TOOL_CALLS]") && is_token("[ARGS]") {
        ToolFamily::MistralV13
    } else if has("[TOOL_CALLS]") {
        ToolFamily::Mistral
    } else if has("<arg_key>") {
        detect_glm(template)
    } else if has("<tool_call>") && has("<function=") && has("<parameter=") {
        ToolFamily::Qwen3Coder
    } else if has_phi4_tags || has("functools[") {
        ToolFamily::Phi4
    } else if is_granite {
        ToolFamily::Granite
    } else if has("<tool_call>") {
        ToolFamily::Hermes
    } else if has("<|python_start|>") {
        ToolFamily::Pythonic
    } else if has("<|python_tag|>") || has("\"parameters\":") {
        ToolFamily::Llama3
    } else {
        return None;
    };
    Some(family)
}

/// V3 writes the kind of a tool behind the begin marker, V3.1 its name.
fn detect_deepseek(template: &str) -> ToolFamily {
    let mut calls = template.split("<｜tool▁call▁begin｜>").skip(1);
    let writes_kind = calls.any(|call| {
        let head = call.split("<｜tool▁sep｜>").next().unwrap_or_default();
        !head.contains("name")
    });
    if writes_kind {
        ToolFamily::DeepseekV3
    } else {
        ToolFamily::DeepseekV31
    }
}

/// GLM-4.5 writes newlines between the tags, GLM-4.7 none.
fn detect_glm(template: &str) -> ToolFamily {
    if template.contains("</arg_key><arg_value>") {
        ToolFamily::Glm47
    } else {
        ToolFamily::Glm45
    }
}

fn detect_reasoning(template: &str) -> Option<ReasoningFamily> {
    let has = |text: &str| template.contains(text);
    if has("<|channel|>") {
        Some(ReasoningFamily::GptOss)
    } else if has("[THINK]") {
        Some(ReasoningFamily::Mistral)
    } else if has("Here is my thought process:") {
        Some(ReasoningFamily::Granite)
    } else if has("<think>") || has("</think>") {
        Some(ReasoningFamily::ThinkTags)
    } else {
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::stream::tests::PieceTokens;

    /// Lines of templates that decide, and the added tokens of their vocabularies.
    const TOOL_TEMPLATES: [(&str, &[&str], Option<ToolFamily>); 20] = [
        (
            "{%- if tools %}<tool_call>\\n{\"name\": …}\\n</tool_call>",
            &[],
            Some(ToolFamily::Hermes),
        ),
        (
            "{{ \"<tool_call>\\n<function=example>\\n<parameter=a>\\n</tool_call>\" }}",
            &[],
            Some(ToolFamily::Qwen3Coder),
        ),
        ("<seed:tool_call>\\n<function=f>\\n<parameter=a>", &[], None),
        (
            "{{ \"<|python_tag|>\" + tool_call.name }}",
            &[],
            Some(ToolFamily::Llama3),
        ),
        (
            "respond with {\"name\": name, \"parameters\": dict}",
            &[],
            Some(ToolFamily::Llama3),
        ),
        (
            "<|python_start|>[func(a=1)]<|python_end|>",
            &[],
            Some(ToolFamily::Pythonic),
        ),
        (
            "{{ '[TOOL_CALLS][' }}",
            &["[TOOL_CALLS]"],
            Some(ToolFamily::Mistral),
        ),
        (
            "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}",
            &["[TOOL_CALLS]", "[ARGS]"],
            Some(ToolFamily::MistralV13),
        ),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + \
             tool['function']['name']",
            &[],
            Some(ToolFamily::DeepseekV3),
        ),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + tool.function.name",
            &[],
            Some(ToolFamily::DeepseekV3),
        ),
        (
            "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",
            &[],
            Some(ToolFamily::DeepseekV31),
        ),
        (
            "<｜DSML｜function_calls>",
            &[],
            Some(ToolFamily::DeepseekV32),
        ),
        (
            "<|start|>assistant<|channel|>analysis",
            &[],
            Some(ToolFamily::GptOss),
        ),
        (
            "<tool_call>{function-name}\n<arg_key>{k}</arg_key>\n<arg_value>",
            &[],
            Some(ToolFamily::Glm45),
        ),
        (
            "<tool_call>{function-name}<arg_key>{k}</arg_key><arg_value>",
            &[],
            Some(ToolFamily::Glm47),
        ),
        (
            "<|im_assistant|>assistant<|im_middle|>",
            &["<|tool_calls_section_begin|>"],
            Some(ToolFamily::KimiK2),
        ),
        (
            "respond with <|tool_call|> and a list",
            &["<|tool_call|>"],
            Some(ToolFamily::Granite),
        ),
        (
            "You are Granite. Respond with <tool_call> and a list",
            &[],
            Some(ToolFamily::Granite),
        ),
        (
            "'<|tool|>' + tools + '<|/tool|>'",
            &["<|/tool_call|>"],
            Some(ToolFamily::Phi4),
        ),
        ("{{ messages[0].content }}", &["<tool_call>"], None),
    ];

    #[test]
    fn tool_format_follows_from_template_and_vocabulary() {
        for (template, added, expected) in TOOL_TEMPLATES {
            let tokens = PieceTokens::new(added, true);
            assert_eq!(detect_tools(template, &tokens), expected, "{template}");
        }
    }

    #[test]
    fn reasoning_format_follows_from_template() {
        for (template, expected) in [
            (
                "{% if '</think>' in content %}",
                Some(ReasoningFamily::ThinkTags),
            ),
            ("<|channel|>analysis <think>", Some(ReasoningFamily::GptOss)),
            (
                "draft in [THINK] and [/THINK]",
                Some(ReasoningFamily::Mistral),
            ),
            (
                "after 'Here is my thought process:'",
                Some(ReasoningFamily::Granite),
            ),
            ("{{ content }}", None),
        ] {
            assert_eq!(detect_reasoning(template), expected, "{template}");
        }
    }

    fn detect(tool_parser: &str, reasoning_parser: &str) -> Result<String, String> {
        let choice = ParserChoice {
            tool_parser,
            reasoning_parser,
        };
        let checkpoint = CheckpointFacts {
            template: Some("<think> <tool_call> </tool_call>"),
            ..CheckpointFacts::default()
        };
        let format = detect_format(choice, checkpoint, &PieceTokens::default())?;
        Ok(format.canonical())
    }

    #[test]
    fn names_override_what_is_detected() {
        let canonical = |tools: &str, reasoning: &str| {
            Ok(format!("tool_parser={tools},reasoning_parser={reasoning}"))
        };
        assert_eq!(detect("auto", "auto"), canonical("hermes", "think_tags"));
        assert_eq!(detect("none", "none"), canonical("none", "none"));
        assert_eq!(detect("json", "mistral"), canonical("json", "mistral"));
        assert_eq!(
            detect("qwen25", "deepseek-r1"),
            canonical("hermes", "think_tags")
        );
    }

    /// Names of parsers of SGLang 0.5 and vLLM 0.33 for our formats, and our names.
    const PEER_TOOL_PARSERS: [(&str, &str); 30] = [
        ("qwen", "hermes"),
        ("qwen25", "hermes"),
        ("hermes", "hermes"),
        ("granite4", "hermes"),
        ("qwen3_coder", "qwen3_coder"),
        ("qwen3_xml", "qwen3_coder"),
        ("mimo", "qwen3_coder"),
        ("step3p5", "qwen3_coder"),
        ("llama3", "llama3"),
        ("llama3_json", "llama3"),
        ("llama4_json", "llama3"),
        ("pythonic", "pythonic"),
        ("llama4_pythonic", "pythonic"),
        ("olmo3", "pythonic"),
        ("mistral", "mistral"),
        ("deepseekv3", "deepseek_v3"),
        ("deepseek_v3", "deepseek_v3"),
        ("deepseekv31", "deepseek_v31"),
        ("deepseek_v31", "deepseek_v31"),
        ("deepseekv32", "deepseek_v32"),
        ("deepseek_v32", "deepseek_v32"),
        ("gpt-oss", "gpt_oss"),
        ("openai", "gpt_oss"),
        ("glm", "glm45"),
        ("glm45", "glm45"),
        ("glm47", "glm47"),
        ("kimi", "kimi_k2"),
        ("kimi_k2", "kimi_k2"),
        ("granite", "granite"),
        ("phi4_mini_json", "phi4"),
    ];

    const PEER_REASONING_PARSERS: [(&str, &str); 23] = [
        ("deepseek-r1", "think_tags"),
        ("deepseek_r1", "think_tags"),
        ("deepseek-v3", "think_tags"),
        ("deepseek_v3", "think_tags"),
        ("glm45", "think_tags"),
        ("glm47", "think_tags"),
        ("holo2", "think_tags"),
        ("interns1", "think_tags"),
        ("kimi_k2", "think_tags"),
        ("mimo", "think_tags"),
        ("minimax", "think_tags"),
        ("minimax_m2", "think_tags"),
        ("nemotron_3", "think_tags"),
        ("nemotron_v3", "think_tags"),
        ("olmo3", "think_tags"),
        ("qwen3", "think_tags"),
        ("qwen3-thinking", "think_tags"),
        ("step3", "think_tags"),
        ("step3p5", "think_tags"),
        ("gpt-oss", "gpt_oss"),
        ("openai_gptoss", "gpt_oss"),
        ("granite", "granite"),
        ("mistral", "mistral"),
    ];

    #[test]
    fn names_of_peers_are_taken() {
        for (name, expected) in PEER_TOOL_PARSERS {
            let canonical = format!("tool_parser={expected},reasoning_parser=none");
            assert_eq!(detect(name, "none"), Ok(canonical), "{name}");
        }
        for (name, expected) in PEER_REASONING_PARSERS {
            let canonical = format!("tool_parser=none,reasoning_parser={expected}");
            assert_eq!(detect("none", name), Ok(canonical), "{name}");
        }
        // SGLang 0.5 reads `◁think▷` under this name, as no family here does.
        assert!(detect("none", "kimi").is_err());
        let is_listed = |name: &str, names: &[(&str, &str)]| names.iter().any(|row| row.0 == name);
        let mut tool_names = ToolFamily::iter().flat_map(|family| family.format().aliases);
        assert!(tool_names.all(|name| is_listed(name, &PEER_TOOL_PARSERS)));
        let mut reasoning_names = REASONING_ALIASES.iter().map(|(name, _)| name);
        assert!(reasoning_names.all(|name| is_listed(name, &PEER_REASONING_PARSERS)));
    }

    #[test]
    fn model_type_decides_where_the_template_names_no_format() {
        let choice = ParserChoice {
            tool_parser: "auto",
            reasoning_parser: "auto",
        };
        let tokens = PieceTokens::new(&["<think>", "<tool_call>"], true);
        let silent = Some("{{ tools | tojson }}");
        let speaking = Some("{{ tools | tojson }}[TOOL_CALLS] [THINK]");
        for (template, renders_tools, tools, reasoning) in [
            (silent, true, "hermes", "think_tags"),
            (silent, false, "none", "think_tags"),
            (speaking, true, "mistral", "mistral"),
            (None, true, "none", "none"),
        ] {
            let checkpoint = CheckpointFacts {
                template,
                renders_tools,
                model_type: "qwen3",
            };
            let format = detect_format(choice, checkpoint, &tokens).unwrap();
            let expected = format!("tool_parser={tools},reasoning_parser={reasoning}");
            assert_eq!(format.canonical(), expected, "{checkpoint:?}");
        }
    }

    #[test]
    fn unknown_name_is_refused_with_the_list() {
        let message = detect("hermess", "auto").unwrap_err();
        assert_eq!(
            message,
            "--tool-parser hermess does not exist; choose auto, none or one of hermes, qwen3_coder, \
             llama3, pythonic, mistral, mistral_v13, deepseek_v3, deepseek_v31, deepseek_v32, \
             gpt_oss, glm45, glm47, kimi_k2, granite, phi4, json"
        );
        let message = detect("auto", "think").unwrap_err();
        assert_eq!(
            message,
            "--reasoning-parser think does not exist; choose auto, none or one of think_tags, \
             mistral, granite, gpt_oss"
        );
    }
}
