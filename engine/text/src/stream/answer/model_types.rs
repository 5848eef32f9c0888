//! The format of a checkpoint by its `model_type`, where its chat template names no format.
//!
//! A row is here only if all checkpoints of the `model_type` that have its token write that format.
//! Left out are types of makers who changed the format under one type and vocabulary:
//! `qwen3_moe` and `qwen3_next` (Qwen3 and Qwen3-Coder), `deepseek_v3` (V3, R1 and V3.1).

use crate::stream::reasoning::ReasoningFamily;
use crate::stream::tools::ToolFamily;
use crate::tokenizer::TextTokenizer;

/// `model_type`, added token that the vocabulary has, format. The first match counts.
type FormatRow<F> = (&'static str, &'static str, F);

const TOOL_ROWS: [FormatRow<ToolFamily>; 21] = [
    ("qwen2", "<tool_call>", ToolFamily::Hermes),
    ("qwen2_moe", "<tool_call>", ToolFamily::Hermes),
    ("qwen3", "<tool_call>", ToolFamily::Hermes),
    ("granitemoehybrid", "<tool_call>", ToolFamily::Hermes),
    ("llama", "<|python_tag|>", ToolFamily::Llama3),
    ("mllama", "<|python_tag|>", ToolFamily::Llama3),
    ("llama4", "<|python_start|>", ToolFamily::Pythonic),
    ("llama4_text", "<|python_start|>", ToolFamily::Pythonic),
    ("mistral", "[ARGS]", ToolFamily::MistralV13),
    ("mistral", "[TOOL_CALLS]", ToolFamily::Mistral),
    ("mistral3", "[ARGS]", ToolFamily::MistralV13),
    ("mistral3", "[TOOL_CALLS]", ToolFamily::Mistral),
    ("ministral3", "[ARGS]", ToolFamily::MistralV13),
    ("mixtral", "[TOOL_CALLS]", ToolFamily::Mistral),
    ("deepseek_v32", "｜DSML｜", ToolFamily::DeepseekV32),
    ("gpt_oss", "<|call|>", ToolFamily::GptOss),
    // GLM-4.7, of the same type, writes no newlines; one reader reads both.
    ("glm4_moe", "<arg_key>", ToolFamily::Glm45),
    ("glm_moe_dsa", "<arg_key>", ToolFamily::Glm47),
    ("kimi_k2", "<|tool_call_begin|>", ToolFamily::KimiK2),
    ("granite", "<|tool_call|>", ToolFamily::Granite),
    ("phi3", "<|/tool_call|>", ToolFamily::Phi4),
];

const REASONING_ROWS: [FormatRow<ReasoningFamily>; 14] = [
    ("qwen2", "<think>", ReasoningFamily::ThinkTags),
    ("qwen3", "<think>", ReasoningFamily::ThinkTags),
    ("qwen3_moe", "<think>", ReasoningFamily::ThinkTags),
    ("qwen3_next", "<think>", ReasoningFamily::ThinkTags),
    ("deepseek_v3", "<think>", ReasoningFamily::ThinkTags),
    ("deepseek_v32", "<think>", ReasoningFamily::ThinkTags),
    ("glm4_moe", "<think>", ReasoningFamily::ThinkTags),
    ("glm_moe_dsa", "<think>", ReasoningFamily::ThinkTags),
    ("kimi_k2", "<think>", ReasoningFamily::ThinkTags),
    ("minimax_m2", "<think>", ReasoningFamily::ThinkTags),
    ("mistral", "[THINK]", ReasoningFamily::Mistral),
    ("mistral3", "[THINK]", ReasoningFamily::Mistral),
    ("ministral3", "[THINK]", ReasoningFamily::Mistral),
    ("gpt_oss", "<|channel|>", ReasoningFamily::GptOss),
];

pub fn tools_of_model_type(model_type: &str, tokenizer: &dyn TextTokenizer) -> Option<ToolFamily> {
    find_row(&TOOL_ROWS, model_type, tokenizer)
}

pub fn reasoning_of_model_type(
    model_type: &str,
    tokenizer: &dyn TextTokenizer,
) -> Option<ReasoningFamily> {
    find_row(&REASONING_ROWS, model_type, tokenizer)
}

fn find_row<F: Copy>(
    rows: &[FormatRow<F>],
    model_type: &str,
    tokenizer: &dyn TextTokenizer,
) -> Option<F> {
    let row = rows.iter().find(|(row_type, token, _)| {
        *row_type == model_type && tokenizer.added_id_of(token).is_some()
    });
    row.map(|(_, _, family)| *family)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::tests::PieceTokens;

    #[test]
    fn model_type_and_vocabulary_decide_together() {
        for (model_type, added, expected) in [
            (
                "qwen3",
                ["<think>", "<tool_call>"],
                Some(ToolFamily::Hermes),
            ),
            ("qwen3", ["<think>", "</think>"], None),
            ("qwen3_moe", ["<think>", "<tool_call>"], None),
            ("qwen9", ["<think>", "<tool_call>"], None),
            ("", ["<think>", "<tool_call>"], None),
            (
                "llama",
                ["<|eom_id|>", "<|python_tag|>"],
                Some(ToolFamily::Llama3),
            ),
            ("llama", ["<tool_call>", "</tool_call>"], None),
            (
                "mistral",
                ["[TOOL_CALLS]", "[ARGS]"],
                Some(ToolFamily::MistralV13),
            ),
            (
                "mistral",
                ["[TOOL_CALLS]", "[INST]"],
                Some(ToolFamily::Mistral),
            ),
            (
                "deepseek_v32",
                ["<think>", "｜DSML｜"],
                Some(ToolFamily::DeepseekV32),
            ),
            ("deepseek_v32", ["<think>", "<｜tool▁sep｜>"], None),
        ] {
            let tokens = PieceTokens::new(&added, true);
            let found = tools_of_model_type(model_type, &tokens);
            assert_eq!(found, expected, "{model_type} with {added:?}");
        }
    }

    #[test]
    fn reasoning_of_a_model_type_needs_its_token() {
        for (model_type, added, expected) in [
            ("qwen3_moe", ["<think>"], Some(ReasoningFamily::ThinkTags)),
            ("qwen3_moe", ["<tool_call>"], None),
            ("mistral3", ["[THINK]"], Some(ReasoningFamily::Mistral)),
            ("gpt_oss", ["<|channel|>"], Some(ReasoningFamily::GptOss)),
            ("llama", ["<think>"], None),
        ] {
            let tokens = PieceTokens::new(&added, true);
            let found = reasoning_of_model_type(model_type, &tokens);
            assert_eq!(found, expected, "{model_type} with {added:?}");
        }
    }
}
