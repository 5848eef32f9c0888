//! All running answers of a front, found by the handles of their items.

use std::borrow::Cow;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::answer::RunningAnswer;
use super::gap_histogram::GapHistogram;
use super::token_batch::{
    BatchError, FirstTokenStages, RankFinish, RowError, TokenBatch, TokenRow,
};
use crate::dialect::write::AnswerCounts;
use crate::dialect::write::AnswerSpec;
use crate::stream::answer::AnswerFormat;
use crate::tokenizer::TokenDecoder;

/// Error of an item that its rank ended without saying why.
const NO_REASON: RowError<'static> = RowError {
    code: Cow::Borrowed("internal_error"),
    message: Cow::Borrowed("the rank gave no reason"),
    param: None,
};

/// Message of an answer that this layer could not write.
const PANICKED: &str = "internal error; the engine's log has the details";

/// An answer could not be written because the code for it panicked. Standard error has the place.
#[derive(Debug, thiserror::Error)]
#[error("the text layer panicked while it wrote an answer")]
pub struct AnswerPanic;

/// See the module.
pub struct AnswerTable {
    decoder: Arc<dyn TokenDecoder>,
    format: Arc<AnswerFormat>,
    answers: HashMap<u64, RunningAnswer>,
    /// Answer and place of its choice, by handle of an item that runs.
    items: HashMap<u64, (u64, usize)>,
    next_id: u64,
    pub gaps: GapHistogram,
    /// Answers with output from the batch that is being read.
    touched: Vec<u64>,
}

/// First tokens of a choice.
#[derive(Debug, PartialEq)]
pub struct FirstToken {
    pub answer: u64,
    /// Place of the choice.
    pub choice: usize,
    /// Stages that the rank measured, if its row has them.
    pub stages: Option<FirstTokenStages>,
}

/// Error with which an answer ends.
#[derive(Debug, PartialEq, Eq)]
pub struct AnswerError {
    pub code: String,
    pub message: String,
    /// Field of the request that is at fault.
    pub param: Option<String>,
}

impl From<RowError<'_>> for AnswerError {
    fn from(error: RowError<'_>) -> Self {
        Self {
            code: error.code.into_owned(),
            message: error.message.into_owned(),
            param: error.param.map(Cow::into_owned),
        }
    }
}

/// Answer that ends with an error: a rank ended an item without output, or it could not be written.
#[derive(Debug, PartialEq, Eq)]
pub struct FailedAnswer {
    pub answer: u64,
    /// None: aborted.
    pub error: Option<AnswerError>,
    pub retry_after_secs: Option<u64>,
}

/// Effects of a rank's message on the front.
#[derive(Debug, Default)]
pub struct FedBatch {
    pub dp_rank: u32,
    /// Bytes for clients by answer, each answer at most once.
    pub chunks: Vec<(u64, Vec<u8>)>,
    pub first_tokens: Vec<FirstToken>,
    /// Handles of items that their rank has ended, well or not.
    pub ended: Vec<u64>,
    /// Handles of items that a stop string has ended: their rank does not know.
    pub stopped: Vec<u64>,
    pub failed: Vec<FailedAnswer>,
    /// Tokens of answers that are metered, by answer.
    pub metered: Vec<(u64, u32)>,
    /// Answers whose last bytes are among `chunks`.
    pub finished: Vec<u64>,
    /// Some row was no failure.
    pub has_output: bool,
}

impl AnswerTable {
    /// `gap_bounds`: buckets of [`AnswerTable::gaps`].
    pub fn new(
        decoder: Arc<dyn TokenDecoder>,
        format: Arc<AnswerFormat>,
        gap_bounds: Vec<f64>,
    ) -> Self {
        Self {
            decoder,
            format,
            answers: HashMap::new(),
            items: HashMap::new(),
            next_id: 1,
            gaps: GapHistogram::new(gap_bounds),
            touched: Vec::new(),
        }
    }

    /// Returns the new answer's id.
    pub fn open(&mut self, spec: AnswerSpec) -> Result<u64, AnswerPanic> {
        let decoder = &*self.decoder;
        let format = &*self.format;
        let answer = catch_unwind(AssertUnwindSafe(|| {
            RunningAnswer::new(spec, decoder, format)
        }));
        let answer = answer.map_err(|_| AnswerPanic)?;
        let id = self.next_id;
        self.next_id += 1;
        for (place, choice) in answer.choices.iter().enumerate() {
            if !choice.is_done {
                self.items.insert(choice.handle, (id, place));
            }
        }
        self.answers.insert(id, answer);
        Ok(id)
    }

    /// Forgets an answer. `None`: there is none.
    pub fn close(&mut self, id: u64) -> Option<AnswerCounts> {
        let answer = self.answers.remove(&id)?;
        for choice in &answer.choices {
            self.items.remove(&choice.handle);
        }
        Some(answer.counts())
    }

    /// Takes a rank's message. `Ok(None)`: it has no tokens. `now`: the time [seconds].
    pub fn feed(&mut self, message: &[u8], now: f64) -> Result<Option<FedBatch>, BatchError> {
        let Some(batch) = TokenBatch::decode(message)? else {
            return Ok(None);
        };
        let mut fed = FedBatch {
            dp_rank: batch.dp_rank,
            ..FedBatch::default()
        };
        for row in batch.rows {
            // An answer that was closed while the message was on its way has no items here.
            if let Some(&(id, place)) = self.items.get(&row.handle) {
                self.guard(id, &mut fed, |table, fed| {
                    table.take_row(id, place, row, now, fed)
                });
            }
        }
        for id in std::mem::take(&mut self.touched) {
            self.guard(id, &mut fed, |table, fed| table.give_output(id, now, fed));
        }
        Ok(Some(fed))
    }

    /// Does a part of the work that concerns one answer. A panic, of a decoder for example, ends
    /// this answer and no other.
    fn guard(
        &mut self,
        answer: u64,
        fed: &mut FedBatch,
        work: impl FnOnce(&mut Self, &mut FedBatch),
    ) {
        // State that the panic left inconsistent is this answer's own, and the answer is removed.
        if catch_unwind(AssertUnwindSafe(|| work(self, fed))).is_ok() {
            return;
        }
        self.items.retain(|_, (of, _)| *of != answer);
        self.touched.retain(|touched| *touched != answer);
        fed.failed.push(FailedAnswer {
            answer,
            error: Some(AnswerError {
                code: "internal_error".to_owned(),
                message: PANICKED.to_owned(),
                param: None,
            }),
            retry_after_secs: None,
        });
    }

    fn take_row(&mut self, id: u64, place: usize, row: TokenRow<'_>, now: f64, fed: &mut FedBatch) {
        let Some(answer) = self.answers.get_mut(&id) else {
            return;
        };
        if row.finish.is_some() {
            fed.ended.push(row.handle);
            self.items.remove(&row.handle);
        }
        if matches!(row.finish, Some(RankFinish::Abort | RankFinish::Error)) {
            let error = row.error.or(match row.finish {
                Some(RankFinish::Error) => Some(NO_REASON),
                _ => None,
            });
            fed.failed.push(FailedAnswer {
                answer: id,
                error: error.map(AnswerError::from),
                retry_after_secs: row.retry_after_secs,
            });
            return;
        }
        fed.has_output = true;
        if let Some(records) = &row.prompt_logprobs {
            answer.append_prompt_logprobs(place, records, &*self.decoder);
        }
        let choice = &mut answer.choices[place];
        let output = &mut answer.outputs[place];
        let effect = choice.take_row(&row, output, &answer.logprobs, &*self.decoder, now);
        if effect.is_stopped_by_text {
            fed.stopped.push(row.handle);
            self.items.remove(&row.handle);
        }
        if effect.is_first {
            fed.first_tokens.push(FirstToken {
                answer: id,
                choice: place,
                stages: row.stages,
            });
        }
        if let Some(gap) = effect.gap {
            self.gaps.observe(gap);
        }
        answer.fresh_tokens += effect.tokens as u32;
        if !std::mem::replace(&mut answer.is_touched, true) {
            self.touched.push(id);
        }
    }

    fn give_output(&mut self, id: u64, now: f64, fed: &mut FedBatch) {
        let Some(answer) = self.answers.get_mut(&id) else {
            return;
        };
        answer.is_touched = false;
        let tokens = std::mem::take(&mut answer.fresh_tokens);
        if answer.spec.is_metered && tokens > 0 {
            fed.metered.push((id, tokens));
        }
        let mut chunk = Vec::with_capacity(512);
        answer.write_output(&*self.decoder, now, &mut chunk);
        if answer.is_finished {
            fed.finished.push(id);
        }
        if !chunk.is_empty() {
            fed.chunks.push((id, chunk));
        }
    }

    /// From here on chunks have HTTP/1.1's framing: the head of the response is out.
    pub fn begin_framing(&mut self, id: u64) {
        if let Some(answer) = self.answers.get_mut(&id) {
            answer.is_framed = true;
        }
    }

    /// Output gathers until `release`.
    pub fn hold(&mut self, id: u64) {
        if let Some(answer) = self.answers.get_mut(&id) {
            answer.is_held = true;
        }
    }

    /// The end of a stream that breaks off with an error, in its API's form; `None`: there is no
    /// such answer. `error`: the error's JSON. The answer is to be closed then.
    pub fn write_failure(&mut self, id: u64, error: &[u8]) -> Result<Option<Vec<u8>>, AnswerPanic> {
        let Some(answer) = self.answers.get_mut(&id) else {
            return Ok(None);
        };
        let work = AssertUnwindSafe(|| answer.write_failure(error));
        catch_unwind(work).map(Some).map_err(|_| AnswerPanic)
    }

    /// Output that has gathered; whether it is the last; empty if there is none.
    pub fn release(&mut self, id: u64, now: f64) -> Result<(Vec<u8>, bool), AnswerPanic> {
        let mut chunk = Vec::new();
        let Some(answer) = self.answers.get_mut(&id) else {
            return Ok((chunk, false));
        };
        answer.is_held = false;
        let decoder = &*self.decoder;
        let work = AssertUnwindSafe(|| answer.write_output(decoder, now, &mut chunk));
        catch_unwind(work).map_err(|_| AnswerPanic)?;
        Ok((chunk, answer.is_finished))
    }
}
