//! /v1/completions.

use super::json::push_text;
use super::logprobs::{place_token, push_completion_logprobs};
use super::openai::OpenAiHead;
use super::{AnswerHead, AnswerWriter, ChoiceOutput, Delta, ResumedOutput, WriteContext};
use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

pub struct CompletionWriter(OpenAiHead);

impl CompletionWriter {
    pub fn new(head: AnswerHead) -> Self {
        Self(OpenAiHead::new(head, "text_completion", "text_completion"))
    }

    fn push_logprobs(
        &self,
        out: &mut Vec<u8>,
        delta: &Delta,
        offsets: &mut TextOffsets,
        decoder: &dyn TokenDecoder,
    ) {
        let head = &self.0.head;
        match &delta.logprobs {
            Some(rows) => push_completion_logprobs(
                out,
                rows,
                head.logprobs > 0,
                head.skips_special_tokens,
                offsets,
                decoder,
            ),
            None => out.extend_from_slice(b"null"),
        }
    }
}

impl AnswerWriter for CompletionWriter {
    fn write_event(
        &mut self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let echo = if choice.is_begun { "" } else { &choice.echo };
        if echo.is_empty() && !self.0.is_shown(&choice.delta) {
            return None;
        }
        let begin = out.len();
        self.0.begin_event(choice.index, out);
        out.extend_from_slice(b"\"text\":");
        if echo.is_empty() {
            push_text(out, &choice.delta.text);
        } else {
            push_text(out, &[echo, &choice.delta.text].concat());
        }
        choice.is_begun = true;
        out.extend_from_slice(b",\"logprobs\":");
        self.push_logprobs(out, &choice.delta, &mut choice.offsets, context.decoder);
        self.0.end_event(choice, context, out);
        Some(begin)
    }

    fn write_end(&mut self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        self.0.write_end(context, out);
    }

    fn write_whole(
        &mut self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) {
        let write_message = |choice: &ChoiceOutput, out: &mut Vec<u8>| {
            out.extend_from_slice(b"\"text\":");
            push_text(out, &[&choice.echo[..], &choice.so_far.text].concat());
        };
        let write_logprobs = |choice: &mut ChoiceOutput, out: &mut Vec<u8>| {
            self.push_logprobs(out, &choice.so_far, &mut choice.offsets, context.decoder);
        };
        self.0
            .write_whole(choices, context, out, write_message, write_logprobs);
    }

    fn resume(
        &mut self,
        choice: &mut ChoiceOutput,
        resumed: &ResumedOutput,
        decoder: &dyn TokenDecoder,
    ) {
        choice.is_begun = true;
        for id in &resumed.output.tokens {
            place_token(
                &mut choice.offsets,
                *id,
                self.0.head.skips_special_tokens,
                decoder,
            );
        }
    }
}
