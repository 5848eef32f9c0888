//! A running choice: rows of its item become text and counts.

use std::sync::Arc;

use super::token_batch::{RankFinish, RowLogprobs, TokenRow};
use crate::dialect::write::{ChoiceOutput, Delta, DraftCounts, FinishReason, MatchedStop};
use crate::stream::answer::{AnswerFormat, AnswerReader, ReaderOptions};
use crate::stream::{FedTokens, TextRules, TextStream};
use crate::tokenizer::TokenDecoder;

/// Text of a choice on its way to its output.
enum ChoiceText {
    /// A single text.
    Plain(TextStream),
    /// Reasoning, content and tool calls.
    Parts {
        reader: Box<AnswerReader>,
        includes_reasoning: bool,
        /// A complete call is no reason of its own for the answer's end.
        is_named_choice: bool,
    },
}

impl ChoiceText {
    fn feed(&mut self, decoder: &dyn TokenDecoder, ids: &[u32], delta: &mut Delta) -> FedTokens {
        match self {
            Self::Plain(text) => text.feed(decoder, ids, &mut delta.text),
            Self::Parts {
                reader,
                includes_reasoning,
                ..
            } => {
                let fed = reader.feed(decoder, ids, &mut delta.parts);
                if !*includes_reasoning {
                    delta.parts.remove_reasoning();
                }
                fed
            }
        }
    }

    /// Returns the stop string that the flushed text completed.
    fn finish(&mut self, decoder: &dyn TokenDecoder, delta: &mut Delta) -> Option<usize> {
        match self {
            Self::Plain(text) => text.finish(decoder, &mut delta.text),
            Self::Parts {
                reader,
                includes_reasoning,
                ..
            } => {
                let matched_stop = reader.finish(decoder, &mut delta.parts);
                if !*includes_reasoning {
                    delta.parts.remove_reasoning();
                }
                matched_stop
            }
        }
    }

    /// True if the answer ends because of its calls.
    fn ends_with_calls(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Parts {
                reader,
                is_named_choice,
                ..
            } => !is_named_choice && reader.completed_calls() > 0,
        }
    }
}

/// Rules for reading the text of a choice.
pub struct ChoiceReading<'a> {
    pub format: &'a AnswerFormat,
    /// `None`: the answer is one text.
    pub options: Option<ReaderOptions>,
    pub includes_reasoning: bool,
    /// See [`ReadingSpec`](crate::dialect::write::ReadingSpec).
    pub is_named_choice: bool,
}

/// Tokens that end a choice and whose text is not shown.
pub struct EndTokens {
    /// They end it once the answer has as many tokens as it must.
    pub stop_ids: Vec<u32>,
    /// They end a grammar, which may be shorter.
    pub grammar_ids: Vec<u32>,
}

impl EndTokens {
    /// True if `id`, the last of `generated` tokens of a choice that its rank has ended, ended it.
    fn have_ended(&self, id: u32, generated: u64, min_tokens: u32) -> bool {
        let is_stop = self.stop_ids.contains(&id) && generated >= u64::from(min_tokens);
        is_stop || self.grammar_ids.contains(&id)
    }
}

/// Logprobs that an answer has.
pub struct LogprobsRules {
    /// Alternatives per position; `None`: no logprobs.
    pub top: Option<usize>,
    /// Ids whose logprobs are reported.
    pub token_ids: Vec<u32>,
}

impl LogprobsRules {
    /// Adds the logprobs of a token to the output, if the answer has any. `None`: the token does
    /// not count.
    fn keep(&self, found: &RowLogprobs, id: Option<&u32>, output: &mut ChoiceOutput) {
        let Some(most) = self.top else {
            return;
        };
        let rows = output.delta.logprobs.get_or_insert_default();
        let Some(id) = id else {
            return;
        };
        let top = found.top_ids.iter().copied();
        let top = top.zip(found.top_logprobs.iter().copied()).take(most);
        let of_ids = self.token_ids.iter().copied();
        let of_ids = of_ids.zip(found.id_logprobs.iter().copied());
        rows.push(*id, found.chosen, top.collect(), of_ids.collect());
    }
}

/// Progress of a choice beside its output.
pub struct RunningChoice {
    pub handle: u64,
    pub counts_prompt: bool,
    pub is_done: bool,
    /// The output has a delta that no event has.
    pub has_delta: bool,
    /// Nothing is generated for the client; its rank computes the prompt, and a token with it.
    pub is_silent: bool,
    rules: Arc<TextRules>,
    text: ChoiceText,
    end_tokens: EndTokens,
    last_token_at: Option<f64>,
}

/// Effects of a row on its choice.
#[derive(Debug, Default, PartialEq)]
pub struct RowEffect {
    /// Tokens that count: those up to a stop string.
    pub tokens: usize,
    /// These are the first ones of the choice.
    pub is_first: bool,
    /// Mean time per token since the tokens before [seconds].
    pub gap: Option<f64>,
    /// A stop string ended the choice, of which its rank does not know.
    pub is_stopped_by_text: bool,
}

impl RunningChoice {
    /// `left_context`: tokens that the text continues.
    pub fn new(
        handle: u64,
        counts_prompt: bool,
        rules: Arc<TextRules>,
        decoder: &dyn TokenDecoder,
        left_context: &[u32],
        reading: ChoiceReading<'_>,
        end_tokens: EndTokens,
    ) -> Self {
        let text = match reading.options {
            None => ChoiceText::Plain(TextStream::new(rules.clone(), decoder, left_context)),
            Some(options) => {
                let format = reading.format;
                let reader =
                    AnswerReader::new(format, options, rules.clone(), decoder, left_context);
                ChoiceText::Parts {
                    reader: Box::new(reader),
                    includes_reasoning: reading.includes_reasoning,
                    is_named_choice: reading.is_named_choice,
                }
            }
        };
        Self {
            handle,
            counts_prompt,
            is_done: false,
            has_delta: false,
            is_silent: false,
            text,
            rules,
            end_tokens,
            last_token_at: None,
        }
    }

    /// Output of tokens that the client has already.
    pub fn resume(&mut self, ids: &[u32], decoder: &dyn TokenDecoder) -> Delta {
        let mut delta = Delta {
            tokens: ids.to_vec(),
            ..Delta::default()
        };
        self.text.feed(decoder, ids, &mut delta);
        delta
    }

    /// Tokens of the reasoning; `None`: the text is not read for it.
    pub fn reasoning_tokens(&self) -> Option<u64> {
        match &self.text {
            ChoiceText::Plain(_) => None,
            ChoiceText::Parts { reader, .. } => Some(reader.reasoning_tokens()),
        }
    }

    /// Takes a row of a choice that runs.
    pub fn take_row(
        &mut self,
        row: &TokenRow<'_>,
        output: &mut ChoiceOutput,
        logprobs: &LogprobsRules,
        decoder: &dyn TokenDecoder,
        now: f64,
    ) -> RowEffect {
        output.cached_tokens = row.cached_tokens.min(output.prompt_tokens);
        if let Some((accepted, rejected)) = row.drafts {
            output.drafts = Some(DraftCounts { accepted, rejected });
        }
        self.has_delta = true;
        if self.is_silent {
            if row.finish.is_some() {
                self.end_empty(output);
            }
            return RowEffect::default();
        }
        let mut ids = &row.tokens[..];
        let mut finish = match row.finish {
            Some(RankFinish::Length) => Some(FinishReason::Length),
            Some(_) => Some(FinishReason::Stop),
            None => None,
        };
        let mut shown = ids;
        let generated = output.completion_tokens + ids.len() as u64;
        if row.finish == Some(RankFinish::Stop)
            && let Some((last, before)) = ids.split_last()
            && self
                .end_tokens
                .have_ended(*last, generated, self.rules.min_tokens)
        {
            output.matched_stop = Some(MatchedStop::Token(*last));
            if !self.rules.include_stop {
                shown = before; // the token that stopped it counts, its text does not show
            }
        }
        let fed = self.text.feed(decoder, shown, &mut output.delta);
        let mut matched_stop = fed.matched_stop;
        if fed.ends_here {
            ids = &ids[..fed.counted];
            finish = Some(FinishReason::Stop);
        } else if finish.is_some() {
            matched_stop = self.text.finish(decoder, &mut output.delta);
        }
        if let Some(stop) = matched_stop {
            output.matched_stop = Some(MatchedStop::Text(self.rules.stops[stop].clone()));
            finish = Some(FinishReason::Stop);
        }
        if finish == Some(FinishReason::Stop) && self.text.ends_with_calls() {
            finish = Some(FinishReason::ToolCalls);
        }
        output.reasoning_tokens = self.reasoning_tokens().unwrap_or_default();
        output.completion_tokens += ids.len() as u64;
        output.delta.tokens.extend_from_slice(ids);
        output.delta.finish = finish;
        if let Some(found) = &row.logprobs {
            logprobs.keep(found, ids.first(), output);
        }
        self.is_done = finish.is_some();
        let mut effect = RowEffect {
            tokens: ids.len(),
            is_stopped_by_text: self.is_done && row.finish.is_none(),
            ..RowEffect::default()
        };
        if !ids.is_empty() {
            match self.last_token_at.replace(now) {
                Some(last) => effect.gap = Some((now - last) / ids.len() as f64),
                None => effect.is_first = true,
            }
        }
        effect
    }

    /// Nothing was to be generated.
    pub fn end_empty(&mut self, output: &mut ChoiceOutput) {
        self.is_done = true;
        self.has_delta = true;
        output.delta.finish = Some(FinishReason::Length);
    }
}
