//! Answers as bytes: one writer per API, for streams and for whole answers.
//!
//! 1. The tokens of a choice become text; text, tokens and logprobs gather in its [`Delta`];
//! 2. [`AnswerWriter::write_event`] makes the stream's events of a delta, [`AnswerWriter::write_end`]
//!    what follows the last one;
//! 3. an answer that is no stream gathers in `so_far` and is written by
//!    [`AnswerWriter::write_whole`].
//!
//! docs/protocol.md §6 has the rules of the streams.

mod chat;
mod completions;
mod generate;
mod json;
mod logprobs;
mod openai;
mod resume_comment;

pub use chat::ChatWriter;
pub use completions::CompletionWriter;
pub use generate::GenerateWriter;
pub use logprobs::TokenLogprobs;
pub use resume_comment::ResumeComments;

use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

/// Facts that hold for the whole answer.
#[derive(Debug, Clone, Default)]
pub struct AnswerHead {
    /// Id of the response, with the API's prefix.
    pub id: String,
    /// Name under which the model is served.
    pub model: String,
    /// Unix seconds.
    pub created: u64,
    /// Usage comes in an event of its own at the end.
    pub includes_usage: bool,
    /// Every event has the usage so far.
    pub has_continuous_usage: bool,
    /// Token ids stand beside the text.
    pub returns_token_ids: bool,
    /// Alternatives per position; -1: no logprobs.
    pub logprobs: i32,
    /// /generate: the request asked for a list.
    pub is_batch: bool,
    /// Special tokens have no text.
    pub skips_special_tokens: bool,
    /// When the request came, on the clock of [`WriteContext::now`] [seconds].
    pub arrived: f64,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    Stop,
    Length,
}

impl FinishReason {
    pub fn name(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
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
    pub text: String,
    pub tokens: Vec<u32>,
    pub logprobs: Option<TokenLogprobs>,
    pub finish: Option<FinishReason>,
}

impl Delta {
    fn append_to(&self, whole: &mut Delta) {
        whole.text.push_str(&self.text);
        whole.tokens.extend_from_slice(&self.tokens);
        if let Some(rows) = &self.logprobs {
            whole.logprobs.get_or_insert_default().extend(rows);
        }
        whole.finish = whole.finish.or(self.finish);
    }

    fn clear(&mut self) {
        self.text.clear();
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
    pub matched_stop: Option<MatchedStop>,
    /// An event of this choice was sent.
    pub is_begun: bool,
    /// Completions with echo: text in front of the answer.
    pub echo: String,
    /// Output that no event has yet.
    pub delta: Delta,
    /// Output before `delta`, where the writer needs it.
    pub so_far: Delta,
    /// Places of tokens in the text, for completions with logprobs.
    pub offsets: TextOffsets,
}

impl ChoiceOutput {
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

/// Token counts of an answer: each prompt once, however many choices it has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AnswerCounts {
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub completion_tokens: u64,
}

/// Facts that a writer looks up while it writes.
pub struct WriteContext<'a> {
    pub decoder: &'a dyn TokenDecoder,
    pub usage: AnswerCounts,
    /// On the clock of [`AnswerHead::arrived`] [seconds].
    pub now: f64,
}

/// Writes an answer as one API has it.
pub trait AnswerWriter: Send {
    /// Appends the events of the choice's delta to `out`; none where there is nothing to show yet.
    /// Returns the place in `out` at which the last of them begins.
    fn write_event(
        &self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize>;

    /// Appends the events that stand between the last delta and `[DONE]`.
    fn write_end(&self, context: &WriteContext<'_>, out: &mut Vec<u8>);

    /// Appends the answer of a request without `stream`. `choices`: all of them, with their whole
    /// output in `so_far`.
    fn write_whole(
        &self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    );

    /// True if events need the output before them.
    fn keeps_output(&self) -> bool {
        false
    }

    /// Tokens that the client has already, from another engine.
    fn resume(
        &self,
        choice: &mut ChoiceOutput,
        ids: &[u32],
        text: &str,
        decoder: &dyn TokenDecoder,
    );
}
