//! /v1/completions.

use std::sync::Arc;

use super::json::push_text;
use super::logprobs::{ColumnRules, place_token, push_completion_logprobs};
use super::openai::OpenAiHead;
use super::{
    AnswerIds, AnswerSpec, AnswerWriter, ChoiceOutput, ResumedOutput, TokenLogprobs, WriteContext,
};
use crate::tokenizer::TokenDecoder;

pub struct CompletionWriter(OpenAiHead);

impl CompletionWriter {
    pub fn new(spec: Arc<AnswerSpec>, ids: AnswerIds) -> Self {
        let object = "text_completion";
        Self(OpenAiHead::new(spec, ids, object, object))
    }

    /// Logprobs of an event or of a whole answer: those of the prompt once, then `rows`.
    fn push_logprobs(
        &self,
        out: &mut Vec<u8>,
        choice: &mut ChoiceOutput,
        rows: Option<TokenLogprobs>,
        decoder: &dyn TokenDecoder,
    ) {
        let prompt = choice
            .prompt_text
            .as_mut()
            .and_then(|text| text.take_columns());
        if rows.is_none() && prompt.is_none() {
            out.extend_from_slice(b"null");
            return;
        }
        let spec = &self.0.spec;
        let rows = rows.unwrap_or_default();
        let rules = ColumnRules {
            has_top: spec.logprobs > Some(0) || rows.has_ids(),
            skips_special_tokens: spec.skip_special_tokens,
            names: spec.token_names,
        };
        push_completion_logprobs(
            out,
            &prompt.unwrap_or_default(),
            &rows,
            rules,
            &mut choice.offsets,
            decoder,
        );
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
        let is_first = !choice.is_begun;
        choice.is_begun = true;
        out.extend_from_slice(b",\"logprobs\":");
        let rows = choice.delta.logprobs.take();
        self.push_logprobs(out, choice, rows, context.decoder);
        if is_first {
            self.0.push_prompt_ids(choice, out);
        }
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
            let rows = choice.so_far.logprobs.take();
            self.push_logprobs(out, choice, rows, context.decoder);
            self.0.push_prompt_members(choice, out);
        };
        self.0
            .write_whole(choices, context, out, write_message, write_logprobs);
        out.push(b'}');
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
                self.0.spec.skip_special_tokens,
                decoder,
            );
        }
    }
}
