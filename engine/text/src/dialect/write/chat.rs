//! /v1/chat/completions.

use super::json::push_text;
use super::logprobs::push_chat_logprobs;
use super::openai::OpenAiHead;
use super::{AnswerHead, AnswerWriter, ChoiceOutput, WriteContext};
use crate::tokenizer::TokenDecoder;

pub struct ChatWriter(OpenAiHead);

impl ChatWriter {
    pub fn new(head: AnswerHead) -> Self {
        Self(OpenAiHead::new(
            head,
            "chat.completion.chunk",
            "chat.completion",
        ))
    }
}

impl AnswerWriter for ChatWriter {
    fn write_event(
        &self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let mut last_begin = None;
        if !choice.is_begun {
            choice.is_begun = true;
            last_begin = Some(out.len());
            self.0.begin_event(choice.index, out);
            out.extend_from_slice(
                b"\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null",
            );
            self.0.close_event(context, out);
        }
        let delta = &choice.delta;
        if !self.0.is_shown(delta) {
            return last_begin;
        }
        let begin = out.len();
        self.0.begin_event(choice.index, out);
        if delta.text.is_empty() && delta.finish.is_some() {
            out.extend_from_slice(b"\"delta\":{},\"logprobs\":");
        } else {
            out.extend_from_slice(b"\"delta\":{\"content\":");
            push_text(out, &delta.text);
            out.extend_from_slice(b"},\"logprobs\":");
        }
        match &delta.logprobs {
            Some(rows) => push_chat_logprobs(out, rows, context.decoder),
            None => out.extend_from_slice(b"null"),
        }
        self.0.end_event(choice, context, out);
        Some(begin)
    }

    fn write_end(&self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        self.0.write_end(context, out);
    }

    fn write_whole(
        &self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) {
        let write_message = |choice: &ChoiceOutput, out: &mut Vec<u8>| {
            out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"content\":");
            push_text(out, &choice.so_far.text);
            out.push(b'}');
        };
        let write_logprobs = |choice: &mut ChoiceOutput, out: &mut Vec<u8>| {
            let rows = choice.so_far.logprobs.as_ref();
            push_chat_logprobs(out, rows.unwrap_or(&Default::default()), context.decoder);
        };
        self.0
            .write_whole(choices, context, out, write_message, write_logprobs);
    }

    fn resume(&self, choice: &mut ChoiceOutput, _: &[u32], _: &str, _: &dyn TokenDecoder) {
        choice.is_begun = true;
    }
}
