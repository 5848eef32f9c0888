//! /generate in SGLang's native form (matches SGLang 0.5.7): a stream's event carries the text so
//! far.

use std::sync::Arc;

use super::json::{push_array, push_float, push_ids, push_number, push_text};
use super::logprobs::{PromptText, push_chosen_triples, push_triples};
use super::openai::push_stop;
use super::{
    AnswerIds, AnswerSpec, AnswerWriter, ChoiceOutput, FinishReason, ResumedOutput, WriteContext,
};
use crate::tokenizer::TokenDecoder;

pub struct GenerateWriter {
    spec: Arc<AnswerSpec>,
    ids: AnswerIds,
}

impl GenerateWriter {
    pub fn new(spec: Arc<AnswerSpec>, ids: AnswerIds) -> Self {
        Self { spec, ids }
    }

    /// The object of a choice without its closing brace.
    fn push_item(&self, choice: &ChoiceOutput, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        let whole = &choice.so_far;
        out.extend_from_slice(b"{\"text\":");
        push_text(out, &whole.text);
        out.extend_from_slice(b",\"output_ids\":");
        push_ids(out, &whole.tokens);
        out.extend_from_slice(b",\"meta_info\":{\"id\":");
        if self.spec.choices.len() > 1 {
            push_text(out, &format!("{}-{}", self.ids.response, choice.index));
        } else {
            push_text(out, &self.ids.response);
        }
        out.extend_from_slice(b",\"finish_reason\":");
        push_finish(out, choice);
        out.extend_from_slice(b",\"prompt_tokens\":");
        push_number(out, choice.prompt_tokens);
        out.extend_from_slice(b",\"completion_tokens\":");
        push_number(out, choice.completion_tokens);
        out.extend_from_slice(b",\"cached_tokens\":");
        push_number(out, choice.cached_tokens);
        out.extend_from_slice(b",\"e2e_latency\":");
        push_float(out, ((context.now - self.spec.arrived) * 1e6).round() / 1e6);
        if self.spec.logprobs.is_some() {
            self.push_logprobs(choice, context, out);
        }
        out.push(b'}');
    }

    fn push_logprobs(&self, choice: &ChoiceOutput, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        let none = Default::default();
        let rows = choice.so_far.logprobs.as_ref().unwrap_or(&none);
        let prompt = choice.prompt_text.as_ref().and_then(PromptText::triples);
        let has_top = self.spec.logprobs > Some(0);
        let none = Default::default();
        let prompt = prompt.unwrap_or(&none);
        push_written_array(out, ",\"input_token_logprobs\":", &prompt.tokens);
        out.extend_from_slice(b",\"output_token_logprobs\":");
        push_chosen_triples(out, rows, context.decoder);
        if has_top {
            push_written_array(out, ",\"input_top_logprobs\":", &prompt.top);
            out.extend_from_slice(b",\"output_top_logprobs\":");
            push_array(out, &rows.top, |out, top| {
                push_triples(out, top.iter().copied(), context.decoder);
            });
        }
        if rows.has_ids() {
            push_written_array(out, ",\"input_token_ids_logprobs\":", &prompt.of_ids);
            out.extend_from_slice(b",\"output_token_ids_logprobs\":");
            push_array(out, &rows.of_ids, |out, of_ids| {
                push_triples(out, of_ids.iter().copied(), context.decoder);
            });
        }
    }
}

/// A member with an array whose elements are written already.
fn push_written_array(out: &mut Vec<u8>, name: &str, elements: &[u8]) {
    out.extend_from_slice(name.as_bytes());
    out.push(b'[');
    out.extend_from_slice(elements);
    out.push(b']');
}

fn push_finish(out: &mut Vec<u8>, choice: &ChoiceOutput) {
    match choice.so_far.finish {
        None => out.extend_from_slice(b"null"),
        Some(FinishReason::Length) => {
            out.extend_from_slice(b"{\"type\":\"length\",\"length\":");
            push_number(out, choice.completion_tokens);
            out.push(b'}');
        }
        Some(FinishReason::ContentFilter) => {
            out.extend_from_slice(b"{\"type\":\"content_filter\"}");
        }
        Some(FinishReason::Stop | FinishReason::ToolCalls) => {
            out.extend_from_slice(b"{\"type\":\"stop\",\"matched\":");
            push_stop(out, choice.matched_stop.as_ref());
            out.push(b'}');
        }
    }
}

impl AnswerWriter for GenerateWriter {
    fn write_event(
        &mut self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let delta = &choice.delta;
        let is_shown = !delta.text.is_empty() || delta.finish.is_some() || !delta.tokens.is_empty();
        choice.keep_delta();
        if !is_shown {
            return None;
        }
        let begin = out.len();
        out.extend_from_slice(b"data: ");
        self.push_item(choice, context, out);
        if self.spec.is_batch {
            out.extend_from_slice(b",\"index\":");
            push_number(out, choice.index as u64);
        }
        out.extend_from_slice(b"}\n\n");
        Some(begin)
    }

    fn write_end(&mut self, _: &WriteContext<'_>, _: &mut Vec<u8>) {}

    fn write_whole(
        &mut self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) {
        let push_object = |out: &mut Vec<u8>, choice: &ChoiceOutput| {
            self.push_item(choice, context, out);
            out.push(b'}');
        };
        if self.spec.is_batch {
            push_array(out, choices.iter(), push_object);
        } else if let Some(choice) = choices.first() {
            push_object(out, choice);
        }
    }

    fn keeps_output(&self) -> bool {
        true
    }

    fn resume(&mut self, choice: &mut ChoiceOutput, resumed: &ResumedOutput, _: &dyn TokenDecoder) {
        choice.is_begun = true;
        resumed.output.append_to(&mut choice.so_far);
    }
}
