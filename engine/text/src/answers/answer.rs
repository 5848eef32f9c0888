//! A running answer: its choices, and the bytes that it owes its client.

use std::sync::Arc;

use super::choice::RunningChoice;
use super::spec::AnswerSpec;
use crate::dialect::sse::DONE_EVENT;
use crate::dialect::write::{
    AnswerCounts, AnswerHead, AnswerWriter, ChatWriter, ChoiceOutput, CompletionWriter, Delta,
    GenerateWriter, ResumeComments, WriteContext,
};
use crate::dialect::{Dialect, response_id};
use crate::stream::{TextOffsets, TextRules};
use crate::tokenizer::TokenDecoder;

/// See the module.
pub struct RunningAnswer {
    writer: Box<dyn AnswerWriter>,
    pub choices: Vec<RunningChoice>,
    /// Output of each of them.
    pub outputs: Vec<ChoiceOutput>,
    comments: Option<ResumeComments>,
    pub max_logprobs: i32,
    pub is_metered: bool,
    is_stream: bool,
    /// Chunks have the framing of HTTP/1.1's chunked coding: the head of the response is out.
    pub is_framed: bool,
    /// The client reads slowly: output waits.
    pub is_held: bool,
    /// Set once the last bytes of the answer are in a chunk.
    pub is_finished: bool,
    /// Set while the answer has output from the batch that is being read.
    pub is_touched: bool,
    /// Tokens from that batch.
    pub fresh_tokens: u32,
}

impl RunningAnswer {
    pub fn new(spec: AnswerSpec, decoder: &dyn TokenDecoder) -> Self {
        let rules = Arc::new(TextRules {
            stops: spec.stops,
            include_stop: spec.include_stop,
            skip_special_tokens: spec.skip_special_tokens,
            min_tokens: spec.min_tokens,
        });
        let head = AnswerHead {
            id: response_id(spec.dialect, spec.rid, &spec.request_id),
            model: spec.model,
            created: spec.created,
            includes_usage: spec.includes_usage,
            has_continuous_usage: spec.has_continuous_usage,
            returns_token_ids: spec.returns_token_ids,
            logprobs: spec.logprobs,
            is_batch: spec.is_batch,
            skips_special_tokens: spec.skip_special_tokens,
            arrived: spec.arrived,
        };
        let writer: Box<dyn AnswerWriter> = match spec.dialect {
            Dialect::Chat => Box::new(ChatWriter::new(head)),
            Dialect::Completions => Box::new(CompletionWriter::new(head)),
            Dialect::Generate => Box::new(GenerateWriter::new(head, spec.choices.len())),
        };
        let mut choices = Vec::with_capacity(spec.choices.len());
        let mut outputs = Vec::with_capacity(spec.choices.len());
        for (index, choice) in spec.choices.into_iter().enumerate() {
            let mut running = RunningChoice::new(
                choice.handle,
                choice.counts_prompt,
                rules.clone(),
                decoder,
                &choice.left_context,
                choice.stop_token_ids,
            );
            let mut output = ChoiceOutput {
                index,
                prompt_tokens: choice.prompt_tokens,
                cached_tokens: 0,
                completion_tokens: 0,
                matched_stop: None,
                is_begun: false,
                offsets: TextOffsets::new(choice.echo.chars().count()),
                echo: choice.echo,
                delta: Delta::default(),
                so_far: Delta::default(),
            };
            if !spec.resumed_ids.is_empty() {
                let text = running.resume(&spec.resumed_ids, decoder);
                output.completion_tokens = spec.resumed_ids.len() as u64;
                writer.resume(&mut output, &spec.resumed_ids, &text, decoder);
            }
            if spec.is_empty {
                running.end_empty(&mut output);
            }
            choices.push(running);
            outputs.push(output);
        }
        Self {
            writer,
            choices,
            outputs,
            comments: spec
                .comment_seed
                .map(|seed| ResumeComments::new(seed, spec.created)),
            max_logprobs: spec.logprobs,
            is_metered: spec.is_metered,
            is_stream: spec.is_stream,
            is_framed: false,
            is_held: false,
            is_finished: false,
            is_touched: false,
            fresh_tokens: 0,
        }
    }

    pub fn counts(&self) -> AnswerCounts {
        let mut usage = AnswerCounts::default();
        for (choice, output) in self.choices.iter().zip(&self.outputs) {
            usage.completion_tokens += output.completion_tokens;
            if choice.counts_prompt {
                usage.prompt_tokens += output.prompt_tokens;
                usage.cached_tokens += output.cached_tokens;
            }
        }
        usage
    }

    fn is_done(&self) -> bool {
        self.choices.iter().all(|choice| choice.is_done)
    }

    /// Appends what the client can have now, unless it is held.
    pub fn write_output(&mut self, decoder: &dyn TokenDecoder, now: f64, out: &mut Vec<u8>) {
        if self.is_held || self.is_finished {
            return;
        }
        let context = WriteContext {
            decoder,
            usage: self.counts(),
            now,
        };
        let is_done = self.is_done();
        if !self.is_stream {
            for (choice, output) in self.choices.iter_mut().zip(&mut self.outputs) {
                if std::mem::take(&mut choice.has_delta) {
                    output.keep_delta();
                }
            }
            if is_done {
                self.writer.write_whole(&mut self.outputs, &context, out);
                self.is_finished = true;
            }
            return;
        }
        let begin = out.len();
        let mut last_event = None;
        for (choice, output) in self.choices.iter_mut().zip(&mut self.outputs) {
            if !std::mem::take(&mut choice.has_delta) {
                continue;
            }
            if let Some(comments) = &mut self.comments {
                comments.add(&output.delta.tokens);
            }
            last_event = self
                .writer
                .write_event(output, &context, out)
                .or(last_event);
            output.drop_delta();
        }
        if is_done {
            self.writer.write_end(&context, out);
            out.extend_from_slice(DONE_EVENT);
            self.is_finished = true;
        } else if let (Some(comments), Some(at)) = (&mut self.comments, last_event) {
            comments.write_before(at, out);
        }
        if self.is_framed && out.len() > begin {
            frame_chunk(begin, out);
        }
    }
}

/// Makes a chunk of HTTP/1.1's chunked coding (RFC 9112 §7.1) of what begins at `begin`.
fn frame_chunk(begin: usize, out: &mut Vec<u8>) {
    let mut size = [0; 18];
    let mut at = size.len() - 2;
    size[at..].copy_from_slice(b"\r\n");
    let mut rest = out.len() - begin;
    while rest > 0 {
        at -= 1;
        size[at] = b"0123456789abcdef"[rest & 15];
        rest >>= 4;
    }
    out.splice(begin..begin, size[at..].iter().copied());
    out.extend_from_slice(b"\r\n");
}
