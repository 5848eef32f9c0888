//! The reader of each format.

use super::callable::CallableTools;
use super::formats::{CallSyntax, NamePlace, ToolFormat};
use super::gpt_oss::harmony_reader::HarmonyReader;
use super::headers::deepseek_v3::DeepseekHeaders;
use super::headers::header_reader::HeaderReader;
use super::headers::kimi_k2::KimiHeaders;
use super::headers::mistral_v13::MistralHeaders;
use super::json::JsonCallReader;
use super::pythonic::pythonic_reader::PythonicReader;
use super::reader::ToolReader;
use super::xml::deepseek_v32::DsmlTags;
use super::xml::glm::KeyValueTags;
use super::xml::qwen3_coder::FunctionTags;
use super::xml::tag_reader::TagReader;

/// Makes the reader of a format. `tools`: those that the model may call.
pub fn new_tool_reader(format: &'static ToolFormat, tools: CallableTools) -> Box<dyn ToolReader> {
    let markers = format.markers;
    match &format.syntax {
        CallSyntax::Json(calls) => Box::new(JsonCallReader::new(markers, calls, tools)),
        CallSyntax::Headers(calls) => match calls.name {
            NamePlace::BehindSeparator => {
                Box::new(HeaderReader::new(DeepseekHeaders::V3, markers, tools))
            }
            NamePlace::BeforeSeparator => {
                Box::new(HeaderReader::new(DeepseekHeaders::V31, markers, tools))
            }
            NamePlace::InId => Box::new(HeaderReader::new(KimiHeaders, markers, tools)),
            NamePlace::BehindBegin => Box::new(HeaderReader::new(MistralHeaders, markers, tools)),
        },
        CallSyntax::FunctionTags => Box::new(TagReader::new(FunctionTags, markers, tools)),
        CallSyntax::KeyValueTags { .. } => Box::new(TagReader::new(KeyValueTags, markers, tools)),
        CallSyntax::DsmlTags => Box::new(TagReader::new(DsmlTags, markers, tools)),
        CallSyntax::Pythonic => Box::new(PythonicReader::new(tools)),
        CallSyntax::Harmony => Box::new(HarmonyReader::new(markers, tools)),
    }
}
