//! A running answer: its choices, and the bytes that it owes its client.

use std::sync::Arc;

use super::choice::{ChoiceReading, EndTokens, LogprobsRules, RunningChoice};
use super::spec::{AnswerSpec, ReadingSpec};
use crate::dialect::sse::DONE_EVENT;
use crate::dialect::write::{
    AnswerCounts, AnswerHead, AnswerWriter, CallIdForm, ChoiceOutput, Delta, PromptForms,
    PromptRecords, PromptText, ReasoningNames, ResumeComments, ResumedOutput, TokenNames,
    WriteContext, new_writer,
};
use crate::dialect::{PromptLogprobsForm, response_id};
use crate::stream::answer::{AnswerFormat, ReaderOptions};
use crate::stream::tools::{IdForm, ToolSignature};
use crate::stream::{TextOffsets, TextRules};
use crate::tokenizer::TokenDecoder;

/// See the module.
pub struct RunningAnswer {
    head: AnswerHead,
    /// Usage counts the tokens of the reasoning.
    reads_reasoning: bool,
    writer: Box<dyn AnswerWriter>,
    pub choices: Vec<RunningChoice>,
    /// Output of each of them.
    pub outputs: Vec<ChoiceOutput>,
    comments: Option<ResumeComments>,
    pub logprobs: LogprobsRules,
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
    pub fn new(mut spec: AnswerSpec, decoder: &dyn TokenDecoder, format: &AnswerFormat) -> Self {
        let rules = Arc::new(new_text_rules(&mut spec));
        let reads_parts = spec.dialect.fields().reads_parts;
        let reading = spec
            .reading
            .take()
            .or_else(|| reads_parts.then(ReadingSpec::default))
            .map(|reading| SharedReading::new(reading, format));
        let head = new_head(&mut spec, reading.as_ref());
        let mut writer = new_writer(spec.dialect, head.clone(), spec.choices.len());
        let prompts = SharedPrompts::new(&spec);
        let mut choices = Vec::with_capacity(spec.choices.len());
        let mut outputs = Vec::with_capacity(spec.choices.len());
        for (index, choice) in spec.choices.into_iter().enumerate() {
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
                    includes_reasoning: reading.as_ref().is_some_and(|r| r.includes),
                    is_named_choice: reading.as_ref().is_some_and(|r| r.is_named_choice),
                },
                EndTokens {
                    stop_ids: choice.stop_token_ids,
                    grammar_ids: choice.grammar_end_ids,
                },
            );
            let mut output = new_output(index, choice.prompt_tokens, choice.echo);
            output.has_parts = reading.is_some();
            if choice.has_prompt_logprobs {
                output.prompt_text =
                    Some(prompts.new_text(choice.prompt_ids.clone(), &head, decoder));
            }
            output.prompt_ids = choice.prompt_ids;
            if !spec.resumed_ids.is_empty() {
                let resumed = ResumedOutput {
                    output: running.resume(&spec.resumed_ids, decoder),
                    events: spec.resumed_events,
                };
                output.completion_tokens = spec.resumed_ids.len() as u64;
                writer.resume(&mut output, &resumed, decoder);
            }
            if spec.is_empty && choice.has_prompt_logprobs {
                running.is_silent = true;
            } else if spec.is_empty {
                running.end_empty(&mut output);
            }
            choices.push(running);
            outputs.push(output);
        }
        Self {
            head,
            reads_reasoning: reading.is_some() && format.reasoning().is_some(),
            writer,
            choices,
            outputs,
            comments: spec
                .comment_seed
                .map(|seed| ResumeComments::new(seed, spec.created)),
            logprobs: LogprobsRules {
                top: spec.logprobs,
                token_ids: spec.logprob_token_ids,
            },
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
            if self.reads_reasoning
                && let Some(tokens) = choice.reasoning_tokens()
            {
                *usage.reasoning_tokens.get_or_insert_default() += tokens;
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
        if !self.is_stream {
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
            if output.has_parts && !output.is_ready(&self.head, &*self.writer) {
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

/// Facts of the answer for its writer, moved out of the front's statement.
fn new_text_rules(spec: &mut AnswerSpec) -> TextRules {
    TextRules {
        stops: std::mem::take(&mut spec.stops),
        include_stop: spec.include_stop,
        skip_special_tokens: spec.skip_special_tokens,
        min_tokens: spec.min_tokens,
        follows_grammar: spec.follows_grammar,
    }
}

fn new_head(spec: &mut AnswerSpec, reading: Option<&SharedReading<'_>>) -> AnswerHead {
    AnswerHead {
        id: response_id(spec.dialect, spec.rid.take(), &spec.request_id),
        model: std::mem::take(&mut spec.model),
        created: spec.created,
        includes_usage: spec.includes_usage,
        has_continuous_usage: spec.has_continuous_usage,
        returns_token_ids: spec.returns_token_ids,
        returns_prompt_ids: spec.returns_prompt_ids,
        token_names: if spec.names_tokens_by_id {
            TokenNames::Ids
        } else {
            TokenNames::Texts
        },
        logprobs: spec.logprobs,
        is_batch: spec.is_batch,
        skips_special_tokens: spec.skip_special_tokens,
        reasoning_names: reading.map_or_else(Default::default, |r| r.names),
        gathers_reasoning: reading.is_some_and(|r| r.gathers),
        call_ids: reading
            .as_ref()
            .map_or_else(Default::default, |r| r.call_ids),
        is_function_call: reading.is_some_and(|r| r.is_function_call),
        arrived: spec.arrived,
        is_limited_by_context: spec.is_limited_by_context,
        facts: std::mem::take(&mut spec.facts),
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
        let top = usize::try_from(spec.logprobs).ok();
        let joined = top.filter(|_| wanted.joins_logprobs);
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
    fn new_text(&self, ids: Vec<u32>, head: &AnswerHead, decoder: &dyn TokenDecoder) -> PromptText {
        let skips_special_tokens = head.skips_special_tokens;
        let forms = self.forms.clone();
        PromptText::new(
            ids,
            self.start,
            forms,
            head.token_names,
            skips_special_tokens,
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
    format: &'a AnswerFormat,
    tools: Arc<[ToolSignature]>,
    parallel_tool_calls: bool,
    separate_reasoning: bool,
    names: ReasoningNames,
    gathers: bool,
    includes: bool,
    is_named_choice: bool,
    is_function_call: bool,
    is_gated: bool,
    call_ids: CallIdForm,
}

impl<'a> SharedReading<'a> {
    fn new(spec: ReadingSpec, format: &'a AnswerFormat) -> Self {
        // The front wrote them a moment ago.
        let tools: Vec<ToolSignature> = serde_json::from_str(&spec.tools).unwrap_or_default();
        let id_form = format.tools().map(|family| family.format().id_form);
        let call_ids = match id_form {
            Some(IdForm::NineLetters) => CallIdForm::NineLetters,
            Some(IdForm::Numbered) => CallIdForm::Numbered {
                before: spec.calls_before,
            },
            Some(IdForm::Usual) | None => CallIdForm::Usual,
        };
        Self {
            format,
            tools: tools.into(),
            parallel_tool_calls: spec.parallel_tool_calls,
            separate_reasoning: spec.separate_reasoning,
            names: spec.reasoning_field,
            gathers: !spec.stream_reasoning,
            includes: spec.include_reasoning,
            is_named_choice: spec.is_named_choice,
            is_function_call: spec.is_function_call,
            is_gated: spec.is_gated,
            call_ids,
        }
    }

    fn options(&self, prompt_end: &[u32], decoder: &dyn TokenDecoder) -> ReaderOptions {
        ReaderOptions {
            tools: self.tools.clone(),
            start: self.format.reasoning_start(prompt_end, decoder),
            separate_reasoning: self.separate_reasoning,
            parallel_tool_calls: self.parallel_tool_calls,
            is_gated: self.is_gated,
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
