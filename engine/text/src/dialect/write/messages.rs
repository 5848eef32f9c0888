//! /v1/messages.
//!
//! 1. The first event of a stream is preceded by `message_start`, with the real counts of the
//!    prompt, and `ping`;
//! 2. each run of parts of one kind is a content block: start, its deltas, stop. The JSON of a
//!    block that is complete is kept for the whole message;
//! 3. `message_delta` has the stop reason and the usage, `message_stop` is last.
//!
//! An answer that is no stream takes the same way; its events are dropped.

use std::mem;
use std::sync::Arc;

use super::failure::{ErrorObject, push_named_end, push_named_event};
use super::json::{push_joined, push_number, push_text, push_text_member};
use super::{
    AnswerCounts, AnswerIds, AnswerSpec, AnswerWriter, ChoiceOutput, FinishReason, MatchedStop,
    ResumedOutput, WriteContext,
};
use crate::dialect::translate::reasoning_text::{PREFIX, encode_reasoning};
use crate::stream::parts::AnswerPart;
use crate::tokenizer::TokenDecoder;

/// Member of the input of a call whose arguments are no JSON object (matches Anthropic's
/// documentation of fine-grained tool streaming).
const INVALID_JSON: &str = "INVALID_JSON";

/// Content block that is not complete.
#[derive(Debug)]
struct OpenBlock {
    kind: BlockKind,
    /// Thinking, text, or JSON of a call's input.
    text: String,
}

#[derive(Debug)]
enum BlockKind {
    Thinking,
    Text,
    ToolUse { id: String, name: String },
}

/// See the module.
pub struct MessagesWriter {
    spec: Arc<AnswerSpec>,
    ids: AnswerIds,
    /// JSON of the blocks that are complete.
    blocks: Vec<Vec<u8>>,
    open: Option<OpenBlock>,
    calls: usize,
    completed_calls: usize,
    finish: Option<FinishReason>,
    matched_stop: Option<MatchedStop>,
    /// Place of the last event of the present write.
    last_event: Option<usize>,
}

impl MessagesWriter {
    pub fn new(spec: Arc<AnswerSpec>, ids: AnswerIds) -> Self {
        Self {
            spec,
            ids,
            blocks: Vec::new(),
            open: None,
            calls: 0,
            completed_calls: 0,
            finish: None,
            matched_stop: None,
            last_event: None,
        }
    }

    // ---- events --------------------------------------------------------------------------------

    fn write_named(&mut self, event: &str, data: &[u8], out: &mut Vec<u8>) {
        self.last_event = Some(out.len());
        push_named_event(event, data, out);
    }

    fn write_start(&mut self, usage: AnswerCounts, out: &mut Vec<u8>) {
        let mut data = b"{\"type\":\"message_start\",\"message\":".to_vec();
        let at_start = AnswerCounts {
            completion_tokens: 0,
            ..usage
        };
        self.push_message(at_start, &mut data);
        data.push(b'}');
        self.write_named("message_start", &data, out);
        self.write_named("ping", b"{\"type\":\"ping\"}", out);
    }

    /// Begins the data of an event about the block that is open.
    fn begin_block_data(&self, event: &str) -> Vec<u8> {
        let mut data = b"{\"type\":".to_vec();
        push_text(&mut data, event);
        data.extend_from_slice(b",\"index\":");
        push_number(&mut data, self.blocks.len() as u64);
        data
    }

    fn write_delta(&mut self, kind: &str, member: &str, text: &str, out: &mut Vec<u8>) {
        let mut data = self.begin_block_data("content_block_delta");
        data.extend_from_slice(b",\"delta\":{\"type\":");
        push_text(&mut data, kind);
        push_text_member(&mut data, member, text);
        data.extend_from_slice(b"}}");
        self.write_named("content_block_delta", &data, out);
    }

    fn write_part(&mut self, part: &AnswerPart, out: &mut Vec<u8>) {
        match part {
            AnswerPart::Reasoning(text) => {
                self.ensure_open(BlockKind::Thinking, out);
                self.append(text);
                if !self.spec.facts.hides_thinking {
                    self.write_delta("thinking_delta", "thinking", text, out);
                }
            }
            AnswerPart::Content(text) => {
                self.ensure_open(BlockKind::Text, out);
                self.append(text);
                self.write_delta("text_delta", "text", text, out);
            }
            AnswerPart::CallBegin(name) => {
                self.close_block(out);
                let id = self.ids.call_id("toolu_", 0, self.calls, name);
                self.calls += 1;
                let name = name.clone();
                self.open_block(BlockKind::ToolUse { id, name }, out);
            }
            AnswerPart::Arguments(text) => {
                self.append(text);
                self.write_delta("input_json_delta", "partial_json", text, out);
            }
            AnswerPart::CallEnd => {
                self.completed_calls += 1;
                self.close_block(out);
            }
        }
    }

    fn append(&mut self, text: &str) {
        if let Some(block) = &mut self.open {
            block.text.push_str(text);
        }
    }

    fn ensure_open(&mut self, kind: BlockKind, out: &mut Vec<u8>) {
        let is_same = |open: &OpenBlock| mem::discriminant(&open.kind) == mem::discriminant(&kind);
        if !self.open.as_ref().is_some_and(is_same) {
            self.close_block(out);
            self.open_block(kind, out);
        }
    }

    fn open_block(&mut self, kind: BlockKind, out: &mut Vec<u8>) {
        let mut data = self.begin_block_data("content_block_start");
        data.extend_from_slice(b",\"content_block\":");
        match &kind {
            BlockKind::Thinking => data
                .extend_from_slice(b"{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}"),
            BlockKind::Text => data.extend_from_slice(b"{\"type\":\"text\",\"text\":\"\"}"),
            BlockKind::ToolUse { id, name } => push_tool_use(id, name, b"{}", &mut data),
        }
        data.push(b'}');
        self.write_named("content_block_start", &data, out);
        self.open = Some(OpenBlock {
            kind,
            text: String::new(),
        });
    }

    /// Ends the block that is open, if there is one.
    fn close_block(&mut self, out: &mut Vec<u8>) {
        let Some(block) = self.open.take() else {
            return;
        };
        let mut json = Vec::new();
        match &block.kind {
            BlockKind::Thinking => {
                let signature = self.sign_thinking(&block.text);
                self.write_delta("signature_delta", "signature", &signature, out);
                let shown = if self.spec.facts.hides_thinking {
                    ""
                } else {
                    &block.text
                };
                json.extend_from_slice(b"{\"type\":\"thinking\"");
                push_text_member(&mut json, "thinking", shown);
                push_text_member(&mut json, "signature", &signature);
                json.push(b'}');
            }
            BlockKind::Text => {
                json.extend_from_slice(b"{\"type\":\"text\"");
                push_text_member(&mut json, "text", &block.text);
                json.push(b'}');
            }
            BlockKind::ToolUse { id, name } => {
                push_tool_use(id, name, &input_of(&block.text), &mut json);
            }
        }
        let mut data = self.begin_block_data("content_block_stop");
        data.push(b'}');
        self.write_named("content_block_stop", &data, out);
        self.blocks.push(json);
    }

    /// Signature of a thinking block: its text where the block does not show it.
    fn sign_thinking(&self, text: &str) -> String {
        if self.spec.facts.hides_thinking {
            encode_reasoning(text)
        } else {
            PREFIX.to_owned()
        }
    }

    // ---- the answer ----------------------------------------------------------------------------

    fn take_delta(&mut self, choice: &mut ChoiceOutput, out: &mut Vec<u8>) {
        for part in choice.delta.parts.iter() {
            self.write_part(part, out);
        }
        self.finish = self.finish.or(choice.delta.finish);
        if self.matched_stop.is_none() {
            self.matched_stop.clone_from(&choice.matched_stop);
        }
    }

    fn stop_sequence(&self) -> Option<&str> {
        match &self.matched_stop {
            Some(MatchedStop::Text(text)) => Some(text),
            _ => None,
        }
    }

    fn stop_reason(&self) -> Option<&'static str> {
        Some(match self.finish? {
            FinishReason::Length if self.spec.is_limited_by_context => {
                "model_context_window_exceeded"
            }
            FinishReason::Length => "max_tokens",
            FinishReason::ContentFilter => "refusal",
            _ if self.completed_calls > 0 => "tool_use",
            _ if self.stop_sequence().is_some() => "stop_sequence",
            _ => "end_turn",
        })
    }

    /// `"stop_reason":…,"stop_sequence":…`
    fn push_stop(&self, out: &mut Vec<u8>) {
        let reason = self.stop_reason();
        out.extend_from_slice(b"\"stop_reason\":");
        push_optional(out, reason);
        out.extend_from_slice(b",\"stop_sequence\":");
        let is_shown = reason == Some("stop_sequence");
        push_optional(out, self.stop_sequence().filter(|_| is_shown));
    }

    fn push_message(&self, usage: AnswerCounts, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"id\":");
        push_text(out, &self.ids.response);
        out.extend_from_slice(b",\"type\":\"message\",\"role\":\"assistant\"");
        push_text_member(out, "model", &self.spec.model);
        out.extend_from_slice(b",\"content\":[");
        push_joined(out, &self.blocks, |out, block| {
            out.extend_from_slice(block);
        });
        out.extend_from_slice(b"],");
        self.push_stop(out);
        push_usage(usage, out);
        out.push(b'}');
    }
}

impl AnswerWriter for MessagesWriter {
    fn write_event(
        &mut self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        self.last_event = None;
        if !choice.is_begun {
            choice.is_begun = true;
            self.write_start(context.usage, out);
        }
        self.take_delta(choice, out);
        self.last_event.take()
    }

    fn write_end(&mut self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        self.close_block(out);
        let mut data = b"{\"type\":\"message_delta\",\"delta\":{".to_vec();
        self.push_stop(&mut data);
        data.push(b'}');
        push_usage(context.usage, &mut data);
        data.push(b'}');
        self.write_named("message_delta", &data, out);
        self.write_named("message_stop", b"{\"type\":\"message_stop\"}", out);
    }

    fn write_whole(
        &mut self,
        _choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) {
        self.close_block(&mut Vec::new());
        self.push_message(context.usage, out);
    }

    fn gather(&mut self, choice: &mut ChoiceOutput, _: &WriteContext<'_>) {
        self.take_delta(choice, &mut Vec::new());
        choice.drop_delta();
    }

    fn resume(&mut self, choice: &mut ChoiceOutput, resumed: &ResumedOutput, _: &dyn TokenDecoder) {
        choice.is_begun = true;
        let delta = mem::replace(&mut choice.delta, resumed.output.clone());
        self.take_delta(choice, &mut Vec::new());
        choice.delta = delta;
    }

    fn write_failure(&mut self, error: &[u8], out: &mut Vec<u8>) {
        let mut data = Vec::new();
        ErrorObject::read(error).push_anthropic_error(None, &mut data);
        push_named_end("error", &data, out);
    }
}

/// `input`: a JSON object.
fn push_tool_use(id: &str, name: &str, input: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"type\":\"tool_use\"");
    push_text_member(out, "id", id);
    push_text_member(out, "name", name);
    out.extend_from_slice(b",\"input\":");
    out.extend_from_slice(input);
    out.push(b'}');
}

/// Input of a call as a JSON object. Arguments that are no object, of a call that was cut off for
/// example, are the text of one member.
fn input_of(arguments: &str) -> Vec<u8> {
    use serde::de::IgnoredAny;
    use std::collections::HashMap;
    if arguments.trim().is_empty() {
        return b"{}".to_vec();
    }
    match serde_json::from_str::<HashMap<String, IgnoredAny>>(arguments) {
        Ok(_) => without_line_ends(arguments),
        Err(_) => {
            let mut object = b"{".to_vec();
            push_text(&mut object, INVALID_JSON);
            object.push(b':');
            push_text(&mut object, arguments);
            object.push(b'}');
            object
        }
    }
}

/// Line ends between the values of a JSON text become spaces: an event's data is one line.
fn without_line_ends(json: &str) -> Vec<u8> {
    let bytes = json.bytes();
    bytes
        .map(|byte| match byte {
            b'\n' | b'\r' => b' ',
            other => other,
        })
        .collect()
}

fn push_optional(out: &mut Vec<u8>, text: Option<&str>) {
    match text {
        Some(text) => push_text(out, text),
        None => out.extend_from_slice(b"null"),
    }
}

/// Usage: a client adds up the three counts of the prompt.
fn push_usage(usage: AnswerCounts, out: &mut Vec<u8>) {
    let computed = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
    out.extend_from_slice(b",\"usage\":{\"input_tokens\":");
    push_number(out, computed);
    out.extend_from_slice(b",\"cache_creation_input_tokens\":0,\"cache_read_input_tokens\":");
    push_number(out, usage.cached_tokens);
    out.extend_from_slice(b",\"output_tokens\":");
    push_number(out, usage.completion_tokens);
    out.push(b'}');
}
