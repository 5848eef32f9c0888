//! Logprobs of a prompt in the forms of the APIs: text that grows as a rank sends them.
//!
//! A prompt of 128 k tokens with 20 alternatives each has 100 MB of text, so it is written part by
//! part, beside the events of other streams. The first token of a prompt has no logprob: `null`.

use serde::Deserialize;

use super::super::json::{push_number, push_text};
use super::tokens::{
    PromptColumns, TokenNames, place_token, push_logprob, push_token_text, push_top_by_text,
    push_triple, push_triples,
};
use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

/// Bytes of a number in a record.
const NUMBER: usize = 4;
/// Logprob and rank, in front of each record.
const FIXED_NUMBERS: usize = 2;

/// Logprobs of consecutive prompt tokens as a rank sends them (`PromptLogprobs` of
/// engine/baton/sched/types/plan.py, which has the form of a record).
#[derive(Debug, Deserialize)]
pub struct PromptRecords<'a> {
    /// Position of the first token.
    pub position: usize,
    /// Tokens described.
    pub count: usize,
    /// Alternatives in each record.
    pub top: usize,
    #[serde(borrow)]
    pub records: &'a [u8],
}

/// Logprob of a prompt token, and the most likely tokens at its position.
struct PromptToken {
    id: u32,
    logprob: f64,
    /// 1: it is the most likely one.
    rank: u32,
    top: Vec<(u32, f64)>,
    /// Logprobs of the ids that were asked for.
    of_ids: Vec<f64>,
}

impl PromptRecords<'_> {
    /// The tokens described; `ids`: those of the prompt from the first position on.
    fn tokens<'b>(&'b self, ids: &'b [u32]) -> impl Iterator<Item = PromptToken> + 'b {
        let width = (self.records.len() / self.count.max(1)).max(FIXED_NUMBERS * NUMBER);
        let records = self.records.chunks_exact(width);
        records.zip(ids).map(|(record, id)| {
            let mut numbers = record
                .chunks_exact(NUMBER)
                .map(|number| number.try_into().unwrap_or_default());
            let mut next = || numbers.next().unwrap_or_default();
            let logprob = f64::from(f32::from_le_bytes(next()));
            let rank = u32::from_le_bytes(next());
            let top_ids: Vec<u32> = (0..self.top).map(|_| u32::from_le_bytes(next())).collect();
            let top = top_ids
                .into_iter()
                .map(|id| (id, f64::from(f32::from_le_bytes(next()))))
                .collect();
            let of_ids = numbers.map(|number| f64::from(f32::from_le_bytes(number)));
            PromptToken {
                id: *id,
                logprob,
                rank,
                top,
                of_ids: of_ids.collect(),
            }
        })
    }
}

/// Forms in which an answer has the logprobs of its prompts; the numbers are alternatives per
/// token.
#[derive(Debug, Clone, Default)]
pub struct PromptForms {
    /// Completions with echo: columns in front of those of the answer.
    pub columns: Option<usize>,
    /// `prompt_logprobs` (vLLM): an object for each token.
    pub objects: Option<usize>,
    /// `input_token_logprobs` (SGLang).
    pub triples: Option<usize>,
    /// Ids whose logprobs stand beside the triples.
    pub token_ids: Vec<u32>,
}

/// Arrays of /generate, without their brackets.
#[derive(Debug, Default)]
pub struct PromptTriples {
    pub tokens: Vec<u8>,
    pub top: Vec<u8>,
    pub of_ids: Vec<u8>,
}

/// Logprobs of the prompt of one choice.
#[derive(Debug)]
pub struct PromptText {
    ids: Vec<u32>,
    forms: PromptForms,
    /// Position of the token that comes next.
    position: usize,
    skips_special_tokens: bool,
    names: TokenNames,
    offsets: TextOffsets,
    columns: PromptColumns,
    objects: Vec<u8>,
    triples: PromptTriples,
}

impl PromptText {
    /// `start`: position of the first token that is listed, without a logprob.
    pub fn new(
        ids: Vec<u32>,
        start: usize,
        forms: PromptForms,
        names: TokenNames,
        skips_special_tokens: bool,
        decoder: &dyn TokenDecoder,
    ) -> Self {
        let mut text = Self {
            ids,
            forms,
            position: start,
            skips_special_tokens,
            names,
            offsets: TextOffsets::new(0),
            columns: PromptColumns::default(),
            objects: Vec::new(),
            triples: PromptTriples::default(),
        };
        text.begin(decoder);
        text
    }

    /// Logprobs are still to come.
    pub fn is_missing(&self) -> bool {
        self.position < self.ids.len()
    }

    fn begin(&mut self, decoder: &dyn TokenDecoder) {
        const NULL: &[u8] = b"null";
        let Some(&id) = self.ids.get(self.position) else {
            return;
        };
        self.position += 1;
        if self.forms.columns.is_some() {
            push_token_text(&mut self.columns.tokens, id, self.names, decoder);
            self.columns.token_logprobs.extend_from_slice(NULL);
            self.columns.top_logprobs.extend_from_slice(NULL);
            self.push_offset(id, decoder);
        }
        if self.forms.objects.is_some() {
            self.objects.extend_from_slice(NULL);
        }
        if self.forms.triples.is_some() {
            push_triple(&mut self.triples.tokens, id, None, decoder);
            self.triples.top.extend_from_slice(NULL);
            self.triples.of_ids.extend_from_slice(NULL);
        }
    }

    /// Appends what a rank sent. Tokens that do not come next are left out.
    pub fn append(&mut self, records: &PromptRecords<'_>, decoder: &dyn TokenDecoder) {
        if records.position != self.position {
            return;
        }
        let ids = self.ids.split_off(self.position);
        for token in records.tokens(&ids) {
            self.position += 1;
            self.push_columns(&token, decoder);
            self.push_object(&token, decoder);
            self.push_input_triples(&token, decoder);
        }
        self.ids.extend(ids);
    }

    fn push_columns(&mut self, token: &PromptToken, decoder: &dyn TokenDecoder) {
        let Some(most) = self.forms.columns else {
            return;
        };
        let columns = &mut self.columns;
        for column in [
            &mut columns.tokens,
            &mut columns.token_logprobs,
            &mut columns.top_logprobs,
        ] {
            column.push(b',');
        }
        push_token_text(&mut columns.tokens, token.id, self.names, decoder);
        push_logprob(&mut columns.token_logprobs, token.logprob);
        let chosen = (token.id, token.logprob);
        let top = &token.top[..most.min(token.top.len())];
        push_top_by_text(&mut columns.top_logprobs, top, chosen, self.names, decoder);
        columns.text_offset.push(b',');
        self.push_offset(token.id, decoder);
    }

    fn push_offset(&mut self, id: u32, decoder: &dyn TokenDecoder) {
        let place = place_token(&mut self.offsets, id, self.skips_special_tokens, decoder);
        push_number(&mut self.columns.text_offset, place as u64);
    }

    fn push_object(&mut self, token: &PromptToken, decoder: &dyn TokenDecoder) {
        let Some(most) = self.forms.objects else {
            return;
        };
        let out = &mut self.objects;
        out.extend_from_slice(b",{");
        push_ranked(out, token.id, token.logprob, token.rank, decoder);
        for (place, (id, logprob)) in token.top.iter().take(most).enumerate() {
            if *id != token.id {
                out.push(b',');
                push_ranked(out, *id, *logprob, place as u32 + 1, decoder);
            }
        }
        out.push(b'}');
    }

    fn push_input_triples(&mut self, token: &PromptToken, decoder: &dyn TokenDecoder) {
        let Some(most) = self.forms.triples else {
            return;
        };
        let triples = &mut self.triples;
        for array in [&mut triples.tokens, &mut triples.top, &mut triples.of_ids] {
            array.push(b',');
        }
        push_triple(&mut triples.tokens, token.id, Some(token.logprob), decoder);
        let top = token.top.iter().copied().take(most);
        push_triples(&mut triples.top, top, decoder);
        let ids = self.forms.token_ids.iter().copied();
        push_triples(
            &mut triples.of_ids,
            ids.zip(token.of_ids.iter().copied()),
            decoder,
        );
    }

    /// The columns in front of those of the answer, once: the first event has them.
    pub fn take_columns(&mut self) -> Option<PromptColumns> {
        self.forms
            .columns
            .take()
            .map(|_| std::mem::take(&mut self.columns))
    }

    /// Elements of `prompt_logprobs`, if they were asked for.
    pub fn objects(&self) -> Option<&[u8]> {
        self.forms.objects.map(|_| &self.objects[..])
    }

    /// Elements of /generate's arrays, if they were asked for.
    pub fn triples(&self) -> Option<&PromptTriples> {
        self.forms.triples.map(|_| &self.triples)
    }
}

/// `"ID":{"logprob":…,"rank":…,"decoded_token":…}`
fn push_ranked(out: &mut Vec<u8>, id: u32, logprob: f64, rank: u32, decoder: &dyn TokenDecoder) {
    out.push(b'"');
    push_number(out, u64::from(id));
    out.extend_from_slice(b"\":{\"logprob\":");
    push_logprob(out, logprob);
    out.extend_from_slice(b",\"rank\":");
    push_number(out, u64::from(rank));
    out.extend_from_slice(b",\"decoded_token\":");
    push_text(out, &String::from_utf8_lossy(&decoder.token_bytes(id)));
    out.push(b'}');
}
