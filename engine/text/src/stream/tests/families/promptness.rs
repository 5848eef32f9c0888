//! Text that is certain is not held back.

use super::feeding::{CutAnswer, cut_lexemes, lexemes_of, markers_of, sample_tools};
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::stream::tools::ToolFamily;

/// Parts that are out once a text is read that goes on, written one behind the other.
fn written_parts(family: ToolFamily, text: &str) -> String {
    let mut answer = CutAnswer::new(family, sample_tools());
    let lexemes = cut_lexemes(&lexemes_of(text, markers_of(family)), &[1]);
    let mut parts = AnswerParts::default();
    for lexeme in &lexemes {
        parts.extend(&answer.feed(lexeme));
    }
    let written = parts.iter().map(|part| match part {
        AnswerPart::Reasoning(text) => format!("reasoning {text};"),
        AnswerPart::Content(text) => format!("content {text};"),
        AnswerPart::CallBegin(name) => format!("call {name};"),
        AnswerPart::Arguments(text) => text.clone(),
        AnswerPart::CallEnd => "end;".to_owned(),
    });
    written.collect()
}

fn check_written_parts(cases: &[(ToolFamily, &str, &str)]) {
    for &(family, text, expected) in cases {
        assert_eq!(written_parts(family, text), expected, "{family:?} {text}");
    }
}

#[test]
fn certain_parts_of_tags_are_written_at_once() {
    use ToolFamily::{DeepseekV32, Glm47, Qwen3Coder};
    check_written_parts(&[
        (Qwen3Coder, "One < two\n", "content One < two;"),
        (Qwen3Coder, "<tool_call>\n<function=f", ""),
        (Qwen3Coder, "<tool_call>\n<function=f>", "call f;"),
        (
            Qwen3Coder,
            "<tool_call>\n<function=f>\n<parameter=a>",
            "call f;{\"a\": \"",
        ),
        (
            Qwen3Coder,
            "<tool_call>\n<function=f>\n<parameter=a>\nx y",
            "call f;{\"a\": \"x y",
        ),
        (
            Qwen3Coder,
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</para",
            "call f;{\"a\": \"x",
        ),
        (
            Qwen3Coder,
            "<tool_call>\n<function=typed>\n<parameter=count>\n5\n</parameter>",
            "call typed;{\"count\": 5",
        ),
        (
            Qwen3Coder,
            "<tool_call>\n<function=g>\n</function>",
            "call g;{}end;",
        ),
        (Glm47, "<tool_call>f<arg_key>", "call f;"),
        (
            Glm47,
            "<tool_call>f<arg_key>a</arg_key><arg_value>x",
            "call f;{\"a\": \"x",
        ),
        (Glm47, "<tool_call>g</tool_call>", "call g;{}end;"),
        (
            DeepseekV32,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">",
            "call f;",
        ),
        (
            DeepseekV32,
            "<｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"a\" string=\"true\">x\n",
            "call f;{\"a\": \"x\\n",
        ),
    ]);
}

#[test]
fn certain_parts_of_other_formats_are_written_at_once() {
    use ToolFamily::{DeepseekV3, DeepseekV31, GptOss, KimiK2, MistralV13, Pythonic};
    check_written_parts(&[
        (
            DeepseekV3,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{",
            "",
        ),
        (
            DeepseekV3,
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"",
            "call f;{\"",
        ),
        (
            DeepseekV31,
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
            "call f;{}end;",
        ),
        (
            KimiK2,
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"x",
            "call f;{\"a\": \"x",
        ),
        (
            MistralV13,
            "[TOOL_CALLS]f[ARGS]{\"a\": [1",
            "call f;{\"a\": [1",
        ),
        (Pythonic, "a [x] b", "content a [x] b;"),
        (Pythonic, "[f(a", ""),
        // An argument behind it may make the call content.
        (Pythonic, "[f(a='x',", ""),
        (Pythonic, "[f(a='x')", "call f;{\"a\": \"x\"}end;"),
        (GptOss, "<|channel|>analysis<|message|>Hm", "reasoning Hm;"),
        (GptOss, "<|channel|>final<|message|>So", "content So;"),
        (
            GptOss,
            "<|channel|>commentary to=functions.f<|message|>{\"a",
            "call f;{\"a",
        ),
    ]);
}
