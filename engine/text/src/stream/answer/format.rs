//! How a model writes reasoning and tool calls.

use std::ops::Range;
use std::sync::Arc;

use crate::stream::markers::{MarkerRole, MarkerTable};
use crate::stream::reasoning::{ReasoningFamily, ReasoningStart, find_start};
use crate::stream::tools::{CallableTools, ToolFamily, ToolSignature, UnknownToolCalls};
use crate::tokenizer::{TextTokenizer, TokenDecoder};

/// How a model writes reasoning and tool calls. Made once per model.
#[derive(Debug, Clone)]
pub struct AnswerFormat {
    tools: Option<ToolFamily>,
    reasoning: Option<ReasoningFamily>,
    /// Markers of the reasoning, then those of the calls.
    table: Arc<MarkerTable>,
    reasoning_markers: usize,
    unknown_calls: UnknownToolCalls,
}

impl AnswerFormat {
    pub fn new(
        tools: Option<ToolFamily>,
        reasoning: Option<ReasoningFamily>,
        tokenizer: &dyn TextTokenizer,
    ) -> Self {
        let mut markers = Vec::new();
        if let Some(family) = reasoning {
            markers.extend_from_slice(family.markers());
        }
        let reasoning_markers = markers.len();
        if let Some(family) = tools.or(channel_tools(reasoning)) {
            let texts = family.format().markers.iter().enumerate();
            markers.extend(texts.map(|(place, &text)| (text, call_role(family, place))));
        }
        Self {
            tools,
            reasoning,
            table: Arc::new(MarkerTable::new(&markers, tokenizer)),
            reasoning_markers,
            unknown_calls: UnknownToolCalls::default(),
        }
    }

    pub fn with_unknown_calls(self, unknown_calls: UnknownToolCalls) -> Self {
        Self {
            unknown_calls,
            ..self
        }
    }

    pub fn tools(&self) -> Option<ToolFamily> {
        self.tools
    }

    pub fn reasoning(&self) -> Option<ReasoningFamily> {
        self.reasoning
    }

    pub fn table(&self) -> &Arc<MarkerTable> {
        &self.table
    }

    /// Format for fingerprints: equal formats read equal answers alike.
    pub fn canonical(&self) -> String {
        let tools: &str = self.tools.map_or("none", Into::into);
        let reasoning: &str = self.reasoning.map_or("none", Into::into);
        let mut format = format!("tool_parser={tools},reasoning_parser={reasoning}");
        // The default is not named: nodes of a version without the flag read answers so.
        if self.unknown_calls != UnknownToolCalls::default() {
            let unknown_calls: &str = self.unknown_calls.into();
            format.push_str(",unknown_tool_calls=");
            format.push_str(unknown_calls);
        }
        format
    }

    pub(super) fn callable_tools(&self, signatures: Arc<[ToolSignature]>) -> CallableTools {
        CallableTools::new(signatures, self.unknown_calls)
    }

    /// State in which the answer to a prompt begins; `None`: the model's reasoning is not read.
    pub fn reasoning_start(
        &self,
        prompt: &[u32],
        decoder: &dyn TokenDecoder,
    ) -> Option<ReasoningStart> {
        if self.reasoning_markers == 0 {
            return None;
        }
        Some(find_start(prompt, &self.table, decoder))
    }

    /// Family whose reader reads the calls. Channels are always read: they hold the content, too.
    pub(super) fn reader_family(&self, has_tools: bool) -> Option<ToolFamily> {
        let channels = self.tools.filter(|family| *family == ToolFamily::GptOss);
        let channels = channels.or(channel_tools(self.reasoning));
        channels.or(self.tools.filter(|_| has_tools))
    }

    pub(super) fn reasoning_markers(&self) -> Range<usize> {
        0..self.reasoning_markers
    }

    pub(super) fn call_markers(&self) -> Range<usize> {
        self.reasoning_markers..self.table.markers().len()
    }
}

/// Channels of gpt-oss are read by the reader of its calls.
fn channel_tools(reasoning: Option<ReasoningFamily>) -> Option<ToolFamily> {
    let is_channels = reasoning == Some(ReasoningFamily::GptOss);
    is_channels.then_some(ToolFamily::GptOss)
}

/// Role of a family's marker by its place.
fn call_role(family: ToolFamily, place: usize) -> MarkerRole {
    if place < family.format().reasoning_ends {
        MarkerRole::CallBegin
    } else {
        MarkerRole::Call
    }
}
