//! /v1/responses.
//!
//! 1. The first event of a stream is preceded by `response.created` and `response.in_progress`;
//! 2. each run of parts of one kind is an item: added, its deltas, done. The JSON of an item that
//!    is done is kept, so that the final response holds the very items that were streamed;
//! 3. the last event has the whole response.
//!
//! An answer that is no stream takes the same way; its events are dropped.

use std::mem;
use std::sync::Arc;

use super::failure::ErrorObject;
use super::json::{push_joined, push_number, push_text, push_text_member};
use super::logprobs::{TokenNames, push_chat_entries};
use super::{
    AnswerCounts, AnswerIds, AnswerSpec, AnswerWriter, ChoiceOutput, FinishReason, ResumedOutput,
    TokenLogprobs, WriteContext,
};
use crate::dialect::derived_id;
use crate::dialect::sse::DONE_EVENT;
use crate::dialect::translate::ClientTool;
use crate::dialect::translate::reasoning_text::encode_reasoning;
use crate::stream::parts::AnswerPart;
use crate::tokenizer::TokenDecoder;

/// Members that every client requires, of a response whose request is not known.
const DEFAULT_ECHO: &str = r#""parallel_tool_calls":true,"tool_choice":"auto","tools":[]"#;

/// Status of an item or a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

/// Item that is not done.
#[derive(Debug)]
struct OpenItem {
    id: String,
    kind: ItemKind,
    /// Text of the reasoning, of the message, or of a call's arguments.
    text: String,
    /// Logprobs of the text: objects joined by commas.
    logprobs: Vec<u8>,
}

#[derive(Debug)]
enum ItemKind {
    Reasoning,
    Message,
    Call { call_id: String, tool: ClientTool },
}

/// See the module.
pub struct ResponsesWriter {
    spec: Arc<AnswerSpec>,
    ids: AnswerIds,
    /// Events so far: the number of the next one.
    events: u64,
    /// Place of the last event of the present write.
    last_event: Option<usize>,
    /// JSON of the items that are done.
    items: Vec<Vec<u8>>,
    open: Option<OpenItem>,
    calls: usize,
    finish: Option<FinishReason>,
    reasoning_tokens: u64,
    usage: AnswerCounts,
    /// Logprobs of tokens whose text is held back.
    pending_logprobs: TokenLogprobs,
}

impl ResponsesWriter {
    pub fn new(spec: Arc<AnswerSpec>, ids: AnswerIds) -> Self {
        Self {
            spec,
            ids,
            events: 0,
            last_event: None,
            items: Vec::new(),
            open: None,
            calls: 0,
            finish: None,
            reasoning_tokens: 0,
            usage: AnswerCounts::default(),
            pending_logprobs: TokenLogprobs::default(),
        }
    }

    // ---- events --------------------------------------------------------------------------------

    fn begin_event(&mut self, name: &str, out: &mut Vec<u8>) {
        self.last_event = Some(out.len());
        out.extend_from_slice(b"event: ");
        out.extend_from_slice(name.as_bytes());
        out.extend_from_slice(b"\ndata: {\"type\":");
        push_text(out, name);
        out.extend_from_slice(b",\"sequence_number\":");
        push_number(out, self.events);
        self.events += 1;
    }

    /// Begins an event about an item that is open.
    fn begin_item_event(&mut self, name: &str, item: &OpenItem, out: &mut Vec<u8>) {
        self.begin_event(name, out);
        out.extend_from_slice(b",\"item_id\":");
        push_text(out, &item.id);
        self.push_output_index(out);
        if !matches!(item.kind, ItemKind::Call { .. }) {
            out.extend_from_slice(b",\"content_index\":0");
        }
    }

    /// Index of the item that is open.
    fn push_output_index(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(b",\"output_index\":");
        push_number(out, self.items.len() as u64);
    }

    fn write_created(&mut self, out: &mut Vec<u8>) {
        for name in ["response.created", "response.in_progress"] {
            self.write_response_event(name, ItemStatus::InProgress, None, out);
        }
    }

    fn write_response_event(
        &mut self,
        name: &str,
        status: ItemStatus,
        error: Option<&ErrorObject>,
        out: &mut Vec<u8>,
    ) {
        self.begin_event(name, out);
        out.extend_from_slice(b",\"response\":");
        self.push_response(status, error, None, out);
        end_event(out);
    }

    fn write_part(&mut self, part: &AnswerPart, logprobs: &[u8], out: &mut Vec<u8>) {
        match part {
            AnswerPart::Reasoning(text) => {
                self.ensure_open(ItemKind::Reasoning, out);
                self.write_text_delta("response.reasoning_text.delta", text, None, out);
            }
            AnswerPart::Content(text) => {
                self.ensure_open(ItemKind::Message, out);
                self.write_text_delta("response.output_text.delta", text, Some(logprobs), out);
            }
            AnswerPart::CallBegin(name) => self.begin_call(name, out),
            AnswerPart::Arguments(text) => self.write_arguments(text, out),
            AnswerPart::CallEnd => self.close_item(ItemStatus::Completed, out),
        }
    }

    /// Opens an item for a text unless one of this kind is open.
    fn ensure_open(&mut self, kind: ItemKind, out: &mut Vec<u8>) {
        let is_same = |open: &OpenItem| mem::discriminant(&open.kind) == mem::discriminant(&kind);
        if self.open.as_ref().is_some_and(is_same) {
            return;
        }
        self.close_item(ItemStatus::Completed, out);
        let prefix = match kind {
            ItemKind::Reasoning => "rs_",
            _ => "msg_",
        };
        let item = self.open_item(prefix, kind, out);
        self.begin_item_event("response.content_part.added", &item, out);
        out.extend_from_slice(b",\"part\":");
        push_part(&item, out);
        end_event(out);
        self.open = Some(item);
    }

    fn begin_call(&mut self, name: &str, out: &mut Vec<u8>) {
        self.close_item(ItemStatus::Completed, out);
        let tools = &self.spec.facts.tools;
        let tool = tools.iter().find(|tool| tool.flat_name == name).cloned();
        let tool = tool.unwrap_or_else(|| ClientTool {
            flat_name: name.to_owned(),
            name: name.to_owned(),
            namespace: None,
            is_custom: false,
        });
        let call_id = self.ids.call_id("call_", 0, self.calls, name);
        self.calls += 1;
        let prefix = if tool.is_custom { "ctc_" } else { "fc_" };
        let item = self.open_item(prefix, ItemKind::Call { call_id, tool }, out);
        self.open = Some(item);
    }

    fn open_item(&mut self, prefix: &str, kind: ItemKind, out: &mut Vec<u8>) -> OpenItem {
        let item = OpenItem {
            id: derived_id(prefix, &self.ids.response, 0, self.items.len()),
            kind,
            text: String::new(),
            logprobs: Vec::new(),
        };
        self.begin_event("response.output_item.added", out);
        self.push_output_index(out);
        out.extend_from_slice(b",\"item\":");
        self.push_item(&item, ItemStatus::InProgress, out);
        end_event(out);
        item
    }

    /// `logprobs`: those of a message's text.
    fn write_text_delta(
        &mut self,
        name: &str,
        text: &str,
        logprobs: Option<&[u8]>,
        out: &mut Vec<u8>,
    ) {
        let Some(mut item) = self.open.take() else {
            return;
        };
        item.text.push_str(text);
        self.begin_item_event(name, &item, out);
        push_text_member(out, "delta", text);
        if let Some(logprobs) = logprobs {
            if !item.logprobs.is_empty() && !logprobs.is_empty() {
                item.logprobs.push(b',');
            }
            item.logprobs.extend_from_slice(logprobs);
            push_logprobs(logprobs, out);
        }
        end_event(out);
        self.open = Some(item);
    }

    /// The input of a custom tool is one delta, once its JSON is complete.
    fn write_arguments(&mut self, text: &str, out: &mut Vec<u8>) {
        let Some(mut item) = self.open.take() else {
            return;
        };
        item.text.push_str(text);
        if !item.is_custom_call() {
            self.begin_item_event("response.function_call_arguments.delta", &item, out);
            push_text_member(out, "delta", text);
            end_event(out);
        }
        self.open = Some(item);
    }

    /// Ends the item that is open, if there is one.
    fn close_item(&mut self, status: ItemStatus, out: &mut Vec<u8>) {
        let Some(item) = self.open.take() else {
            return;
        };
        match &item.kind {
            ItemKind::Reasoning => self.write_text_done("response.reasoning_text.done", &item, out),
            ItemKind::Message => self.write_text_done("response.output_text.done", &item, out),
            ItemKind::Call { .. } => self.write_call_done(&item, out),
        }
        let mut json = Vec::new();
        self.push_item(&item, status, &mut json);
        self.begin_event("response.output_item.done", out);
        self.push_output_index(out);
        out.extend_from_slice(b",\"item\":");
        out.extend_from_slice(&json);
        end_event(out);
        self.items.push(json);
    }

    fn write_text_done(&mut self, name: &str, item: &OpenItem, out: &mut Vec<u8>) {
        self.begin_item_event(name, item, out);
        push_text_member(out, "text", &item.text);
        if matches!(item.kind, ItemKind::Message) {
            push_logprobs(&item.logprobs, out);
        }
        end_event(out);
        self.begin_item_event("response.content_part.done", item, out);
        out.extend_from_slice(b",\"part\":");
        push_part(item, out);
        end_event(out);
    }

    fn write_call_done(&mut self, item: &OpenItem, out: &mut Vec<u8>) {
        let ItemKind::Call { tool, .. } = &item.kind else {
            return;
        };
        if !tool.is_custom {
            self.begin_item_event("response.function_call_arguments.done", item, out);
            push_text_member(out, "name", &tool.name);
            push_text_member(out, "arguments", &item.text);
            end_event(out);
            return;
        }
        let input = custom_input(&item.text);
        self.begin_item_event("response.custom_tool_call_input.delta", item, out);
        push_text_member(out, "delta", &input);
        end_event(out);
        self.begin_item_event("response.custom_tool_call_input.done", item, out);
        push_text_member(out, "input", &input);
        end_event(out);
    }

    // ---- objects -------------------------------------------------------------------------------

    fn push_item(&self, item: &OpenItem, status: ItemStatus, out: &mut Vec<u8>) {
        out.extend_from_slice(b"{\"id\":");
        push_text(out, &item.id);
        let is_begun = status != ItemStatus::InProgress;
        match &item.kind {
            ItemKind::Reasoning => {
                out.extend_from_slice(b",\"type\":\"reasoning\",\"summary\":[],\"content\":[");
                if is_begun {
                    push_part(item, out);
                }
                out.push(b']');
                if is_begun && self.spec.facts.includes_encrypted_content {
                    push_text_member(out, "encrypted_content", &encode_reasoning(&item.text));
                }
            }
            ItemKind::Message => {
                out.extend_from_slice(
                    b",\"type\":\"message\",\"role\":\"assistant\",\"content\":[",
                );
                if is_begun {
                    push_part(item, out);
                }
                out.push(b']');
            }
            ItemKind::Call { call_id, tool } => push_call(item, call_id, tool, out),
        }
        push_text_member(out, "status", status.into_str());
        out.push(b'}');
    }

    fn push_response(
        &self,
        status: ItemStatus,
        error: Option<&ErrorObject>,
        ended: Option<&WriteContext<'_>>,
        out: &mut Vec<u8>,
    ) {
        out.extend_from_slice(b"{\"id\":");
        push_text(out, &self.ids.response);
        out.extend_from_slice(b",\"object\":\"response\",\"created_at\":");
        push_number(out, self.spec.created);
        out.extend_from_slice(b",\"completed_at\":");
        match ended {
            Some(context) if status == ItemStatus::Completed => {
                let secs = (context.now - self.spec.arrived).max(0.0) as u64;
                push_number(out, self.spec.created + secs);
            }
            _ => out.extend_from_slice(b"null"),
        }
        push_text_member(out, "status", status.into_str());
        out.extend_from_slice(b",\"error\":");
        match error {
            Some(error) => error.push_response_error(out),
            None => out.extend_from_slice(b"null"),
        }
        out.extend_from_slice(match (status, self.finish) {
            (ItemStatus::Incomplete, Some(FinishReason::ContentFilter)) => {
                b",\"incomplete_details\":{\"reason\":\"content_filter\"}".as_slice()
            }
            (ItemStatus::Incomplete, _) => {
                b",\"incomplete_details\":{\"reason\":\"max_output_tokens\"}"
            }
            _ => b",\"incomplete_details\":null",
        });
        push_text_member(out, "model", &self.spec.model);
        out.push(b',');
        let echo = &self.spec.facts.echo;
        let echo = if echo.is_empty() { DEFAULT_ECHO } else { echo };
        out.extend_from_slice(echo.as_bytes());
        out.extend_from_slice(b",\"output\":[");
        push_joined(out, &self.items, |out, item| out.extend_from_slice(item));
        out.extend_from_slice(b"],\"usage\":");
        if status == ItemStatus::InProgress {
            out.extend_from_slice(b"null");
        } else {
            self.push_usage(out);
        }
        out.push(b'}');
    }

    fn push_usage(&self, out: &mut Vec<u8>) {
        let usage = self.usage;
        out.extend_from_slice(b"{\"input_tokens\":");
        push_number(out, usage.prompt_tokens);
        out.extend_from_slice(b",\"input_tokens_details\":{\"cached_tokens\":");
        push_number(out, usage.cached_tokens);
        out.extend_from_slice(b",\"cache_write_tokens\":0},\"output_tokens\":");
        push_number(out, usage.completion_tokens);
        out.extend_from_slice(b",\"output_tokens_details\":{\"reasoning_tokens\":");
        push_number(out, self.reasoning_tokens);
        out.extend_from_slice(b"},\"total_tokens\":");
        push_number(out, usage.prompt_tokens + usage.completion_tokens);
        out.push(b'}');
    }

    // ---- the answer ----------------------------------------------------------------------------

    /// Logprobs that go with the last text of the message in this delta.
    fn take_logprobs(&mut self, choice: &mut ChoiceOutput, decoder: &dyn TokenDecoder) -> Vec<u8> {
        let delta = &mut choice.delta;
        let mut entries = Vec::new();
        if let Some(rows) = delta.logprobs.take() {
            self.pending_logprobs.extend(&rows);
        }
        let is_content = |part: &AnswerPart| matches!(part, AnswerPart::Content(_));
        if delta.parts.iter().any(is_content) {
            let rows = &self.pending_logprobs;
            push_chat_entries(&mut entries, rows, TokenNames::Texts, decoder);
        }
        if !delta.parts.is_empty() {
            self.pending_logprobs = TokenLogprobs::default();
        }
        entries
    }

    fn take_delta(
        &mut self,
        choice: &mut ChoiceOutput,
        decoder: &dyn TokenDecoder,
        out: &mut Vec<u8>,
    ) {
        let logprobs = self.take_logprobs(choice, decoder);
        let parts = &choice.delta.parts;
        let last_content = parts
            .iter()
            .rposition(|part| matches!(part, AnswerPart::Content(_)));
        for (place, part) in parts.iter().enumerate() {
            let is_last_content = last_content == Some(place);
            let logprobs = if is_last_content { &logprobs[..] } else { &[] };
            self.write_part(part, logprobs, out);
        }
        self.finish = self.finish.or(choice.delta.finish);
        self.reasoning_tokens = choice.reasoning_tokens;
    }

    /// Status of the whole answer; the item that is open ends with it.
    fn end_items(&mut self, usage: AnswerCounts, out: &mut Vec<u8>) -> ItemStatus {
        self.usage = usage;
        let status = match self.finish {
            Some(finish) if finish.is_cut() => ItemStatus::Incomplete,
            _ => ItemStatus::Completed,
        };
        let is_cut_call = |item: &OpenItem| matches!(item.kind, ItemKind::Call { .. });
        if self.open.as_ref().is_some_and(is_cut_call) {
            self.close_item(ItemStatus::Incomplete, out);
        } else {
            self.close_item(status, out);
        }
        status
    }
}

impl AnswerWriter for ResponsesWriter {
    fn write_event(
        &mut self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        self.last_event = None;
        if !choice.is_begun {
            choice.is_begun = true;
            self.write_created(out);
        }
        self.usage = context.usage;
        self.take_delta(choice, context.decoder, out);
        self.last_event.take()
    }

    fn write_end(&mut self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        let status = self.end_items(context.usage, out);
        let name = match status {
            ItemStatus::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        self.begin_event(name, out);
        out.extend_from_slice(b",\"response\":");
        self.push_response(status, None, Some(context), out);
        end_event(out);
    }

    fn write_whole(
        &mut self,
        _choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) {
        let mut dropped = Vec::new();
        let status = self.end_items(context.usage, &mut dropped);
        self.push_response(status, None, Some(context), out);
    }

    fn gather(&mut self, choice: &mut ChoiceOutput, context: &WriteContext<'_>) {
        let mut dropped = Vec::new();
        self.take_delta(choice, context.decoder, &mut dropped);
        choice.drop_delta();
    }

    fn resume(
        &mut self,
        choice: &mut ChoiceOutput,
        resumed: &ResumedOutput,
        decoder: &dyn TokenDecoder,
    ) {
        let mut written = Vec::new();
        self.write_created(&mut written);
        choice.is_begun = true;
        let delta = mem::replace(&mut choice.delta, resumed.output.clone());
        self.take_delta(choice, decoder, &mut written);
        choice.delta = delta;
        if let Some(events) = resumed.events {
            self.events = events;
        }
    }

    fn write_failure(&mut self, error: &[u8], out: &mut Vec<u8>) {
        if self.events == 0 {
            self.write_created(out);
        }
        if let Some(item) = self.open.take() {
            let mut json = Vec::new();
            self.push_item(&item, ItemStatus::Incomplete, &mut json);
            self.items.push(json);
        }
        let error = ErrorObject::read(error);
        self.write_response_event("response.failed", ItemStatus::Failed, Some(&error), out);
        out.extend_from_slice(DONE_EVENT);
    }

    fn event_count(&self) -> Option<u64> {
        Some(self.events)
    }

    fn set_event_count(&mut self, events: u64) {
        self.events = events;
    }
}

impl OpenItem {
    fn is_custom_call(&self) -> bool {
        matches!(&self.kind, ItemKind::Call { tool, .. } if tool.is_custom)
    }
}

/// Input of a custom tool, of the arguments of the function that stands for it.
fn custom_input(arguments: &str) -> String {
    #[derive(serde::Deserialize)]
    struct CustomArguments {
        input: String,
    }
    match serde_json::from_str(arguments) {
        Ok(CustomArguments { input }) => input,
        // The model wrote something else; the client's tool sees it as it is.
        Err(_) => arguments.to_owned(),
    }
}

fn push_call(item: &OpenItem, call_id: &str, tool: &ClientTool, out: &mut Vec<u8>) {
    let kind = if tool.is_custom {
        "custom_tool_call"
    } else {
        "function_call"
    };
    push_text_member(out, "type", kind);
    push_text_member(out, "call_id", call_id);
    push_text_member(out, "name", &tool.name);
    if let Some(namespace) = &tool.namespace {
        push_text_member(out, "namespace", namespace);
    }
    if tool.is_custom {
        let is_begun = !item.text.is_empty();
        let input = if is_begun {
            custom_input(&item.text)
        } else {
            String::new()
        };
        push_text_member(out, "input", &input);
    } else {
        push_text_member(out, "arguments", &item.text);
    }
}

/// The content part of an item with its text so far.
fn push_part(item: &OpenItem, out: &mut Vec<u8>) {
    match item.kind {
        ItemKind::Reasoning => {
            out.extend_from_slice(b"{\"type\":\"reasoning_text\"");
            push_text_member(out, "text", &item.text);
        }
        _ => {
            out.extend_from_slice(b"{\"type\":\"output_text\"");
            push_text_member(out, "text", &item.text);
            out.extend_from_slice(b",\"annotations\":[]");
            push_logprobs(&item.logprobs, out);
        }
    }
    out.push(b'}');
}

fn push_logprobs(entries: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"logprobs\":[");
    out.extend_from_slice(entries);
    out.push(b']');
}

fn end_event(out: &mut Vec<u8>) {
    out.extend_from_slice(b"}\n\n");
}
