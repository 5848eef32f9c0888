//! The reader of each format.

use super::callable::CallableTools;
use super::gpt_oss::harmony_reader::HarmonyReader;
use super::headers::deepseek_v3::DeepseekHeaders;
use super::headers::header_reader::HeaderReader;
use super::headers::kimi_k2::KimiHeaders;
use super::headers::mistral_v13::MistralHeaders;
use super::json::{GRANITE, HERMES, JsonCallReader, LLAMA3, MISTRAL, PHI4, UNMARKED};
use super::pythonic::pythonic_reader::PythonicReader;
use super::reader::{ToolFamily, ToolReader};
use super::xml::deepseek_v32::DsmlTags;
use super::xml::glm::KeyValueTags;
use super::xml::qwen3_coder::FunctionTags;
use super::xml::tag_reader::TagReader;

/// Makes the reader of a format. `tools`: those that the model may call.
pub fn new_tool_reader(family: ToolFamily, tools: CallableTools) -> Box<dyn ToolReader> {
    match family {
        ToolFamily::Hermes => Box::new(JsonCallReader::new(&HERMES, tools)),
        ToolFamily::Llama3 => Box::new(JsonCallReader::new(&LLAMA3, tools)),
        ToolFamily::Mistral => Box::new(JsonCallReader::new(&MISTRAL, tools)),
        ToolFamily::Granite => Box::new(JsonCallReader::new(&GRANITE, tools)),
        ToolFamily::Phi4 => Box::new(JsonCallReader::new(&PHI4, tools)),
        ToolFamily::Json => Box::new(JsonCallReader::new(&UNMARKED, tools)),
        ToolFamily::Qwen3Coder => Box::new(TagReader::new(FunctionTags, tools)),
        ToolFamily::Glm45 | ToolFamily::Glm47 => Box::new(TagReader::new(KeyValueTags, tools)),
        ToolFamily::DeepseekV32 => Box::new(TagReader::new(DsmlTags, tools)),
        ToolFamily::DeepseekV3 => Box::new(HeaderReader::new(DeepseekHeaders::V3, tools)),
        ToolFamily::DeepseekV31 => Box::new(HeaderReader::new(DeepseekHeaders::V31, tools)),
        ToolFamily::KimiK2 => Box::new(HeaderReader::new(KimiHeaders, tools)),
        ToolFamily::MistralV13 => Box::new(HeaderReader::new(MistralHeaders, tools)),
        ToolFamily::Pythonic => Box::new(PythonicReader::new(tools)),
        ToolFamily::GptOss => Box::new(HarmonyReader::new(tools)),
    }
}
