//! The parts of one choice of an answer.

use std::sync::Arc;

use super::content_stage::ContentStage;
use super::format::AnswerFormat;
use super::lexeme_reader::{LexemeReader, ReaderOptions};
use crate::stream::markers::MarkerLexer;
use crate::stream::parts::AnswerParts;
use crate::stream::text_stream::{FedTokens, TextRules};
use crate::tokenizer::TokenDecoder;

/// Parts of one choice, as its tokens arrive. Deterministic, no I/O.
///
/// Invariants: the joined parts depend on the ids alone, not on how these are grouped into calls;
/// parts that were appended are never taken back. An answer that another engine began is fed the
/// tokens that the client has first: the parts that come out for them are those that the client
/// has.
pub struct AnswerReader {
    rules: Arc<TextRules>,
    lexer: MarkerLexer,
    reader: LexemeReader,
    stage: ContentStage,
    /// Parts of one token.
    parts: AnswerParts,
    fed_tokens: u64,
    reasoning_tokens: u64,
}

impl AnswerReader {
    /// `prompt`: the ids that the text continues; empty for an answer that is a text of its own.
    pub fn new(
        format: &AnswerFormat,
        options: ReaderOptions,
        rules: Arc<TextRules>,
        decoder: &dyn TokenDecoder,
        prompt: &[u32],
    ) -> Self {
        let parallel_tool_calls = options.parallel_tool_calls;
        let reader = LexemeReader::new(format, options, rules.follows_grammar);
        let lexer = MarkerLexer::new(
            format.table().clone(),
            reader.active_markers(format),
            decoder,
            rules.skip_special_tokens,
            prompt,
        );
        let stage = ContentStage::new(
            &rules.stops,
            rules.include_stop,
            reader.reads_calls(),
            !parallel_tool_calls,
        );
        Self {
            rules,
            lexer,
            reader,
            stage,
            parts: AnswerParts::default(),
            fed_tokens: 0,
            reasoning_tokens: 0,
        }
    }

    /// Tokens up to the end of the reasoning.
    pub fn reasoning_tokens(&self) -> u64 {
        self.reasoning_tokens
    }

    /// Calls that are complete.
    pub fn completed_calls(&self) -> usize {
        self.stage.completed_calls()
    }

    /// Appends to `out` the parts that are final with `ids`.
    ///
    /// A token that ended the answer and whose text is not shown is not among `ids`. Tokens behind
    /// a stop string, and behind the only call, count for nothing.
    pub fn feed(
        &mut self,
        decoder: &dyn TokenDecoder,
        ids: &[u32],
        out: &mut AnswerParts,
    ) -> FedTokens {
        let mut counted = 0;
        for &id in ids {
            if self.stage.has_ended() {
                break;
            }
            counted += 1;
            self.feed_token(decoder, id, out);
        }
        FedTokens {
            counted,
            matched_stop: self.stage.matched_stop(),
            ends_here: self.stage.has_ended(),
        }
    }

    /// The answer has ended: appends what was held back. Some: the flushed text completed a stop
    /// string.
    pub fn finish(&mut self, decoder: &dyn TokenDecoder, out: &mut AnswerParts) -> Option<usize> {
        if self.stage.has_ended() {
            return None;
        }
        self.reader
            .finish(&mut self.lexer, decoder, &mut self.parts);
        self.push_parts(out);
        let matched_stop = self.stage.matched_stop();
        self.stage.finish(out);
        matched_stop
    }

    fn feed_token(&mut self, decoder: &dyn TokenDecoder, id: u32, out: &mut AnswerParts) {
        self.fed_tokens += 1;
        let is_transparent = self.stage.is_transparent();
        let parts = if is_transparent {
            &mut *out
        } else {
            &mut self.parts
        };
        let is_reasoning = self.reader.read_token(&mut self.lexer, decoder, id, parts);
        if is_reasoning {
            self.reasoning_tokens = self.fed_tokens;
        }
        if !is_transparent {
            self.push_parts(out);
        }
    }

    fn push_parts(&mut self, out: &mut AnswerParts) {
        let may_end = self.fed_tokens > u64::from(self.rules.min_tokens);
        self.stage.push_parts(&self.parts, may_end, out);
        self.parts.clear();
    }
}
