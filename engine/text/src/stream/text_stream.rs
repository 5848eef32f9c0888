//! Text of one choice of an answer.

use std::sync::Arc;

use super::detokenizer::Detokenizer;
use super::stop_strings::StopMatcher;
use crate::tokenizer::TokenDecoder;

/// How tokens become the text that a client sees.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextRules {
    /// The text ends before the first of them. Empty strings match nothing.
    pub stops: Vec<String>,
    /// The text ends behind the stop string instead.
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    /// A stop string ends the text if its last character comes with a token after that many. It may
    /// begin before (matches vLLM 0.33).
    pub min_tokens: u32,
    /// The answer follows a grammar, which counts the bytes of its tokens: these are the text, also
    /// at the beginning, where SentencePiece's decoder drops a space.
    pub follows_grammar: bool,
}

/// Outcome of [`TextStream::feed`] and of `AnswerReader::feed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FedTokens {
    /// Tokens that count: those up to the end of a stop string.
    pub counted: usize,
    /// Index in [`TextRules::stops`] of the one that is complete.
    pub matched_stop: Option<usize>,
    /// Nothing behind these tokens is shown: a stop string or the only call is complete.
    pub ends_here: bool,
}

/// Text of one choice, as its tokens arrive. Deterministic, no I/O.
///
/// All calls for one stream get the same decoder. An answer that another engine began is fed the
/// tokens that the client has, first and in the same way: the text that comes out for them is what
/// the client has, and what is held back for the next token is the same.
#[derive(Debug)]
pub struct TextStream {
    rules: Arc<TextRules>,
    detokenizer: Detokenizer,
    stop_matcher: Option<StopMatcher>,
    /// Tokens fed, if stop strings are looked for.
    fed_tokens: u64,
    /// Text of one token on its way to the stop matcher.
    piece: String,
}

impl TextStream {
    /// `prompt`: the ids that the text continues; empty for an answer that is a text of its own.
    pub fn new(rules: Arc<TextRules>, decoder: &dyn TokenDecoder, prompt: &[u32]) -> Self {
        let detokenizer = Detokenizer::new(decoder, rules.skip_special_tokens, prompt);
        let stop_matcher = StopMatcher::new(&rules.stops, rules.include_stop);
        Self {
            rules,
            detokenizer,
            stop_matcher,
            fed_tokens: 0,
            piece: String::new(),
        }
    }

    /// Appends to `out` the text that is final with `ids`.
    ///
    /// A token that ended the answer and whose text is not shown is not among `ids`. Tokens after a
    /// stop string count for nothing.
    pub fn feed(&mut self, decoder: &dyn TokenDecoder, ids: &[u32], out: &mut String) -> FedTokens {
        let Some(stop_matcher) = &mut self.stop_matcher else {
            for &id in ids {
                let is_counted = self.rules.follows_grammar;
                self.detokenizer.feed(decoder, id, is_counted, out);
            }
            return FedTokens {
                counted: ids.len(),
                matched_stop: None,
                ends_here: false,
            };
        };
        for (index, &id) in ids.iter().enumerate() {
            if stop_matcher.matched().is_some() {
                return FedTokens {
                    counted: index,
                    matched_stop: stop_matcher.matched(),
                    ends_here: true,
                };
            }
            self.fed_tokens += 1;
            let may_end = self.fed_tokens > u64::from(self.rules.min_tokens);
            self.piece.clear();
            let is_counted = self.rules.follows_grammar;
            self.detokenizer
                .feed(decoder, id, is_counted, &mut self.piece);
            stop_matcher.feed(&self.piece, may_end, out);
        }
        FedTokens {
            counted: ids.len(),
            matched_stop: stop_matcher.matched(),
            ends_here: stop_matcher.matched().is_some(),
        }
    }

    /// The answer has ended: appends what was held back. Some: the flushed text completed a stop
    /// string.
    pub fn finish(&mut self, decoder: &dyn TokenDecoder, out: &mut String) -> Option<usize> {
        let Some(stop_matcher) = &mut self.stop_matcher else {
            self.detokenizer.flush(decoder, out);
            return None;
        };
        if stop_matcher.matched().is_some() {
            return None;
        }
        let may_end = self.fed_tokens > u64::from(self.rules.min_tokens);
        self.piece.clear();
        self.detokenizer.flush(decoder, &mut self.piece);
        let matched_stop = stop_matcher.feed(&self.piece, may_end, out);
        stop_matcher.flush(out);
        matched_stop
    }
}
