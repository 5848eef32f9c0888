//! A running answer: its choices, and the bytes that it owes its client.

use std::sync::Arc;

use super::choice::{ChoiceReading, EndTokens, LogprobsRules, RunningChoice};
use crate::dialect::sse::DONE_EVENT;
use crate::dialect::write::{
    AnswerCounts, AnswerIds, AnswerSpec, AnswerWriter, CallIdForm, ChoiceOutput, Delta,
    PromptForms, PromptRecords, PromptText, ReadingSpec, ResumeComments, ResumedOutput,
    WriteContext, new_writer,
};
use crate::dialect::{PromptLogprobsForm, response_id};
use crate::stream::answer::{AnswerFormat, ReaderOptions};
use crate::stream::tools::{IdForm, ToolSignature};
use crate::stream::{TextOffsets, TextRules};
use crate::tokenizer::TokenDecoder;

/// See the module.
pub struct RunningAnswer {
    pub spec: Arc<AnswerSpec>,
    /// Usage counts the tokens of the reasoning.
    reads_reasoning: bool,
    writer: Box<dyn AnswerWriter>,
    pub choices: Vec<RunningChoice>,
    /// Output of each of them.
    pub outputs: Vec<ChoiceOutput>,
    comments: Option<ResumeComments>,
    pub logprobs: LogprobsRules,
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
    pub fn new(mut spec: AnswerSpec, decoder: &dyn TokenDecoder, format: &AnswerFormat) -> Self {
        let rules = Arc::new(new_text_rules(&spec));
        if spec.dialect.fields().reads_parts {
            spec.reading.get_or_insert_default();
        }
        let spec = Arc::new(spec);
        let reading = spec
            .reading
            .as_ref()
            .map(|reading| SharedReading::new(reading, format));
        let mut writer = new_writer(spec.clone(), new_ids(&spec, format));
        let prompts = SharedPrompts::new(&spec);
        let mut choices = Vec::with_capacity(spec.choices.len());
        let mut outputs = Vec::with_capacity(spec.choices.len());
        for (index, choice) in spec.choices.iter().enumerate() {
            let mut running = RunningChoice::new(
                choice.handle,
                choice.counts_prompt,
                rules.clone(),
                decoder,
                &choice.left_context,
                ChoiceReading {
                    format,
                    options: reading
                        .as_ref()
                        .map(|r| r.options(&choice.prompt_end, decoder)),
                    includes_reasoning: reading.as_ref().is_some_and(|r| r.spec.include_reasoning),
                    is_named_choice: reading.as_ref().is_some_and(|r| r.spec.is_named_choice),
                },
                EndTokens {
                    stop_ids: choice.stop_token_ids.clone(),
                    grammar_ids: choice.grammar_end_ids.clone(),
                },
            );
            let mut output = new_output(index, choice.prompt_tokens, choice.echo.clone());
            let has_prompt_logprobs = spec
                .prompt_logprobs
                .as_ref()
                .is_some_and(|wanted| wanted.are_in_choice(choice));
            output.has_parts = reading.is_some();
            if has_prompt_logprobs {
                let ids = choice.prompt_ids.clone();
                output.prompt_text = Some(prompts.new_text(ids, &spec, decoder));
            }
            output.prompt_ids.clone_from(&choice.prompt_ids);
            if !spec.resumed_ids.is_empty() {
                let resumed = ResumedOutput {
                    output: running.resume(&spec.resumed_ids, decoder),
                    events: spec.resumed_events,
                };
                output.completion_tokens = spec.resumed_ids.len() as u64;
                writer.resume(&mut output, &resumed, decoder);
            }
            if spec.is_empty && has_prompt_logprobs {
                running.is_silent = true;
            } else if spec.is_empty {
                running.end_empty(&mut output);
            }
            choices.push(running);
            outputs.push(output);
        }
        Self {
            reads_reasoning: reading.is_some() && format.reasoning().is_some(),
            writer,
            choices,
            outputs,
            comments: spec
                .comment_seed
                .map(|seed| ResumeComments::new(seed, spec.created)),
            logprobs: LogprobsRules {
                top: spec.logprobs,
                token_ids: spec.logprob_token_ids.clone(),
            },
            spec,
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
            if self.reads_reasoning
                && let Some(tokens) = choice.reasoning_tokens()
            {
                *usage.reasoning_tokens.get_or_insert_default() += tokens;
            }
            if let Some(drafts) = output.drafts {
                let sum = usage.drafts.get_or_insert_default();
                sum.accepted += drafts.accepted;
                sum.rejected += drafts.rejected;
            }
            if choice.counts_prompt {
                usage.prompt_tokens += output.prompt_tokens;
                usage.cached_tokens += output.cached_tokens;
            }
        }
        usage
    }

    /// Appends logprobs of a prompt to all choices of it. `place`: its first choice, with which the
    /// rank sends them.
    pub fn append_prompt_logprobs(
        &mut self,
        place: usize,
        records: &PromptRecords<'_>,
        decoder: &dyn TokenDecoder,
    ) {
        let others = self.choices[place + 1..]
            .iter()
            .take_while(|choice| !choice.counts_prompt)
            .count();
        for output in &mut self.outputs[place..=place + others] {
            if let Some(text) = &mut output.prompt_text {
                text.append(records, decoder);
            }
        }
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
        if !self.spec.stream {
            for (choice, output) in self.choices.iter_mut().zip(&mut self.outputs) {
                if std::mem::take(&mut choice.has_delta) {
                    self.writer.gather(output, &context);
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
            if output.awaits_prompt_logprobs() {
                choice.has_delta = true; // another choice brings them
                continue;
            }
            if output.has_parts && !output.is_ready(&self.spec, &*self.writer) {
                choice.has_delta = true; // its tokens count as sent once their parts are
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
            comments.write_before(at, self.writer.event_count(), out);
        }
        if self.is_framed && out.len() > begin {
            frame_chunk(begin, out);
        }
    }
}

impl RunningAnswer {
    /// The end of a stream that breaks off, without the framing of a chunk. `error`: its JSON.
    pub fn write_failure(&mut self, error: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        self.writer.write_failure(error, &mut out);
        out
    }
}

fn new_text_rules(spec: &AnswerSpec) -> TextRules {
    TextRules {
        stops: spec.stops.clone(),
        include_stop: spec.include_stop,
        skip_special_tokens: spec.skip_special_tokens,
        min_tokens: spec.min_tokens,
        follows_grammar: spec.follows_grammar,
    }
}

fn new_ids(spec: &AnswerSpec, format: &AnswerFormat) -> AnswerIds {
    let id_form = format.tools().map(|family| family.format().id_form);
    let call_form = match (&spec.reading, id_form) {
        (Some(_), Some(IdForm::NineLetters)) => CallIdForm::NineLetters,
        (Some(reading), Some(IdForm::Numbered)) => CallIdForm::Numbered {
            before: reading.calls_before,
        },
        _ => CallIdForm::Usual,
    };
    AnswerIds {
        response: response_id(spec.dialect, spec.rid.clone(), &spec.request_id),
        call_form,
    }
}

/// Rules for the logprobs of the prompts of an answer, made once.
#[derive(Default)]
struct SharedPrompts {
    /// Position of the first token that is listed.
    start: usize,
    forms: PromptForms,
}

impl SharedPrompts {
    fn new(spec: &AnswerSpec) -> Self {
        let Some(wanted) = &spec.prompt_logprobs else {
            return Self::default();
        };
        let joined = spec.logprobs.filter(|_| wanted.joins_logprobs);
        let form = spec.dialect.fields().prompt_logprobs;
        Self {
            start: wanted.start,
            forms: PromptForms {
                columns: joined.filter(|_| form == PromptLogprobsForm::Columns),
                triples: joined.filter(|_| form == PromptLogprobsForm::Triples),
                objects: wanted.objects,
                token_ids: spec.logprob_token_ids.clone(),
            },
        }
    }

    /// Logprobs of one prompt, none of which have come.
    fn new_text(&self, ids: Vec<u32>, spec: &AnswerSpec, decoder: &dyn TokenDecoder) -> PromptText {
        PromptText::new(
            ids,
            self.start,
            self.forms.clone(),
            spec.token_names,
            spec.skip_special_tokens,
            decoder,
        )
    }
}

/// Output of a choice that has none yet.
fn new_output(index: usize, prompt_tokens: u64, echo: String) -> ChoiceOutput {
    ChoiceOutput {
        index,
        prompt_tokens,
        cached_tokens: 0,
        completion_tokens: 0,
        reasoning_tokens: 0,
        drafts: None,
        has_parts: false,
        begun_calls: 0,
        matched_stop: None,
        is_begun: false,
        offsets: TextOffsets::new(echo.chars().count()),
        echo,
        prompt_ids: Vec::new(),
        prompt_text: None,
        delta: Delta::default(),
        so_far: Delta::default(),
    }
}

/// Reading rules of the choices of an answer, made once.
struct SharedReading<'a> {
    spec: &'a ReadingSpec,
    format: &'a AnswerFormat,
    tools: Arc<[ToolSignature]>,
}

impl<'a> SharedReading<'a> {
    fn new(spec: &'a ReadingSpec, format: &'a AnswerFormat) -> Self {
        // The front wrote them a moment ago.
        let tools: Vec<ToolSignature> = serde_json::from_str(&spec.tools).unwrap_or_default();
        Self {
            spec,
            format,
            tools: tools.into(),
        }
    }

    fn options(&self, prompt_end: &[u32], decoder: &dyn TokenDecoder) -> ReaderOptions {
        ReaderOptions {
            tools: self.tools.clone(),
            start: self.format.reasoning_start(prompt_end, decoder),
            separate_reasoning: self.spec.separate_reasoning,
            parallel_tool_calls: self.spec.parallel_tool_calls,
            is_gated: self.spec.is_gated,
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
