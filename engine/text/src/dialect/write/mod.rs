//! Answers as bytes: one writer per API, for streams and for whole answers.
//!
//! 1. The tokens of a choice become text; text, tokens and logprobs gather in its [`Delta`];
//! 2. [`AnswerWriter::write_event`] makes the stream's events of a delta,
//!    [`AnswerWriter::write_end`] what follows the last one;
//! 3. the deltas of an answer that is no stream go to [`AnswerWriter::gather`], and
//!    [`AnswerWriter::write_whole`] writes it.
//!
//! docs/protocol.md §6 has the rules of the streams.

mod call_ids;
mod chat;
mod completions;
mod failure;
mod generate;
mod json;
mod logprobs;
mod messages;
mod openai;
mod responses;
mod resume_comment;
mod spec;

pub use call_ids::{AnswerIds, CallIdForm};
use chat::ChatWriter;
use completions::CompletionWriter;
pub use failure::{ErrorObject, InterruptedStream, anthropic_error_body};
use generate::GenerateWriter;
pub use logprobs::{PromptForms, PromptRecords, PromptText, TokenLogprobs, TokenNames};
use messages::MessagesWriter;
use responses::ResponsesWriter;
pub use resume_comment::ResumeComments;
pub use spec::{AnswerSpec, ChoiceSpec, PromptLogprobsSpec, ReadingSpec};

use std::sync::Arc;

use serde::Deserialize;

use super::Dialect;
use super::sse::error_end;
use crate::stream::TextOffsets;
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::tokenizer::TokenDecoder;

/// Members of a chat answer that hold its reasoning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReasoningNames {
    /// `reasoning_content` (SGLang).
    #[default]
    ReasoningContent,
    /// `reasoning` (vLLM).
    Reasoning,
    Both,
}

impl ReasoningNames {
    pub fn members(self) -> &'static [&'static str] {
        match self {
            ReasoningNames::ReasoningContent => &["reasoning_content"],
            ReasoningNames::Reasoning => &["reasoning"],
            ReasoningNames::Both => &["reasoning_content", "reasoning"],
        }
    }
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    Stop,
    Length,
    /// The answer has complete calls of tools.
    ToolCalls,
    /// A filter of another server cut the answer off. Engines of Baton have none.
    ContentFilter,
}

impl FinishReason {
    /// True if the answer was cut off where it stood: a call that is open has no end.
    pub fn is_cut(self) -> bool {
        matches!(self, FinishReason::Length | FinishReason::ContentFilter)
    }

    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::ToolCalls => "tool_calls",
            FinishReason::ContentFilter => "content_filter",
        }
    }
}

/// Stop token or stop string that ended a choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchedStop {
    Token(u32),
    Text(String),
}

/// Output of a choice.
#[derive(Debug, Clone, Default)]
pub struct Delta {
    /// Text of an answer that is not read for its parts.
    pub text: String,
    /// Parts of an answer that is.
    pub parts: AnswerParts,
    pub tokens: Vec<u32>,
    pub logprobs: Option<TokenLogprobs>,
    pub finish: Option<FinishReason>,
}

impl Delta {
    fn append_to(&self, whole: &mut Delta) {
        whole.text.push_str(&self.text);
        whole.parts.extend(&self.parts);
        whole.tokens.extend_from_slice(&self.tokens);
        if let Some(rows) = &self.logprobs {
            whole.logprobs.get_or_insert_default().extend(rows);
        }
        whole.finish = whole.finish.or(self.finish);
    }

    fn clear(&mut self) {
        self.text.clear();
        self.parts.clear();
        self.tokens.clear();
        self.logprobs = None;
        self.finish = None;
    }
}

/// Choice of an answer, as writers see it.
#[derive(Debug)]
pub struct ChoiceOutput {
    pub index: usize,
    /// Length of the client's prompt.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    pub reasoning_tokens: u64,
    /// `None`: its rank reported none.
    pub drafts: Option<DraftCounts>,
    /// The answer is read for its parts.
    pub has_parts: bool,
    /// Tool calls in events so far.
    pub begun_calls: usize,
    pub matched_stop: Option<MatchedStop>,
    /// An event of this choice was sent.
    pub is_begun: bool,
    /// Completions with echo: text in front of the answer.
    pub echo: String,
    /// Ids of the client's prompt, if the answer has them.
    pub prompt_ids: Vec<u32>,
    /// Logprobs of the prompt, if they were asked for.
    pub prompt_text: Option<PromptText>,
    /// Output that no event has yet.
    pub delta: Delta,
    /// Output before `delta`, where the writer needs it.
    pub so_far: Delta,
    /// Places of tokens in the text, for completions with logprobs.
    pub offsets: TextOffsets,
}

impl ChoiceOutput {
    /// The delta has parts for the client, or the end.
    pub fn is_ready(&self, spec: &AnswerSpec, writer: &dyn AnswerWriter) -> bool {
        let delta = &self.delta;
        let gathers_reasoning = spec.gathers_reasoning();
        let shows = |part: &AnswerPart| {
            let is_gathered = gathers_reasoning && matches!(part, AnswerPart::Reasoning(_));
            !is_gathered && writer.shows_part(part)
        };
        delta.finish.is_some() || delta.parts.iter().any(shows)
    }

    /// Logprobs of the prompt were asked for, and not all of them are here.
    pub fn awaits_prompt_logprobs(&self) -> bool {
        self.prompt_text
            .as_ref()
            .is_some_and(PromptText::is_missing)
    }

    /// `delta` is part of `so_far` from now on.
    pub fn keep_delta(&mut self) {
        self.delta.append_to(&mut self.so_far);
        self.delta.clear();
    }

    /// `delta` is out.
    pub fn drop_delta(&mut self) {
        self.delta.clear();
    }
}

/// Output that a client has from another engine.
#[derive(Debug, Clone, Default)]
pub struct ResumedOutput {
    /// Text, parts and tokens.
    pub output: Delta,
    /// Events in which the output came, where they are numbered.
    pub events: Option<u64>,
}

/// Token counts of an answer: each prompt once, however many choices it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerCounts {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
    /// Tokens of the reasoning, up to its end marker; `None`: the model does not reason.
    pub reasoning_tokens: Option<u64>,
    /// `None`: no rank reported any.
    pub drafts: Option<DraftCounts>,
}

/// Drafted tokens that the model has checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// They are tokens of the answer.
    pub accepted: u64,
    /// They are not, and count nowhere else.
    pub rejected: u64,
}

/// Facts that a writer looks up while it writes.
pub struct WriteContext<'a> {
    pub decoder: &'a dyn TokenDecoder,
    pub usage: AnswerCounts,
    /// On the clock of [`AnswerSpec::arrived`] [seconds].
    pub now: f64,
}

/// The writer of the answers of the spec's dialect.
pub fn new_writer(spec: Arc<AnswerSpec>, ids: AnswerIds) -> Box<dyn AnswerWriter> {
    match spec.dialect {
        Dialect::Chat => Box::new(ChatWriter::new(spec, ids)),
        Dialect::Completions => Box::new(CompletionWriter::new(spec, ids)),
        Dialect::Generate => Box::new(GenerateWriter::new(spec, ids)),
        Dialect::Responses => Box::new(ResponsesWriter::new(spec, ids)),
        Dialect::Messages => Box::new(MessagesWriter::new(spec, ids)),
    }
}

/// Writes an answer as one API has it.
pub trait AnswerWriter: Send + Sync {
    /// Appends the events of the choice's delta to `out`; none where there is nothing to show yet.
    /// Returns the place in `out` at which the last of them begins. A delta with parts is called
    /// for once it [`is_ready`](ChoiceOutput::is_ready).
    fn write_event(
        &mut self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize>;

    /// True if an event shows this part. Tokens of other parts wait for the next event, which has
    /// their ids and logprobs.
    fn shows_part(&self, _part: &AnswerPart) -> bool {
        true
    }

    /// Appends the events that stand between the last delta and `[DONE]`.
    fn write_end(&mut self, context: &WriteContext<'_>, out: &mut Vec<u8>);

    /// Appends the answer of a request without `stream`. `choices`: all of them; their deltas were
    /// gathered.
    fn write_whole(
        &mut self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    );

    /// True if events need the output before them.
    fn keeps_output(&self) -> bool {
        false
    }

    /// Takes output that the client has already, from another engine.
    fn resume(
        &mut self,
        choice: &mut ChoiceOutput,
        resumed: &ResumedOutput,
        decoder: &dyn TokenDecoder,
    );

    /// Appends the end of a stream that breaks off, `[DONE]` included. `error`: its JSON
    /// (docs/protocol.md §5), in one line.
    fn write_failure(&mut self, error: &[u8], out: &mut Vec<u8>) {
        out.extend_from_slice(&error_end(error));
    }

    /// Takes the choice's delta of an answer that is no stream.
    fn gather(&mut self, choice: &mut ChoiceOutput, _context: &WriteContext<'_>) {
        choice.keep_delta();
    }

    /// Events so far, where they are numbered.
    fn event_count(&self) -> Option<u64> {
        None
    }

    /// Continues the numbers behind so many events.
    fn set_event_count(&mut self, _events: u64) {}
}
