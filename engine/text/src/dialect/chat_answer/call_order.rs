//! Texts and calls of an answer in an order in which clients can read them: one after the other.
//!
//! 1. Pieces of calls come in any order ([`CallPiece`]); each belongs to the call of its id or of
//!    its index ([`AnswerBlocks::push_call`]);
//! 2. texts and calls are blocks in the order of their begins. The first block is written as it
//!    comes; those behind it wait until it is complete: a text when another block begins, a call
//!    when its arguments are a whole JSON value;
//! 3. the end of the answer ends every block ([`AnswerBlocks::end`]).

use std::collections::VecDeque;

use super::answer_json::CallPiece;
use super::unreadable::UnreadableAnswer;
use crate::stream::parts::AnswerParts;
use crate::stream::tools::ValueScanner;

/// Blocks that are not complete, and the calls of the answer so far.
#[derive(Debug, Default)]
pub struct AnswerBlocks {
    waiting: VecDeque<AnswerBlock>,
    calls: Vec<KnownCall>,
}

#[derive(Debug)]
enum AnswerBlock {
    Reasoning(String),
    Content(String),
    /// Place of the call.
    Call(usize),
}

/// How far the arguments of a call came.
#[derive(Debug)]
enum ArgumentsProgress {
    Absent,
    Open(ValueScanner),
    /// A JSON value came whole.
    Whole,
}

#[derive(Debug)]
struct KnownCall {
    index: Option<usize>,
    id: Option<String>,
    name: Option<String>,
    progress: ArgumentsProgress,
    /// Arguments that are not written.
    unwritten: String,
    is_begun: bool,
    is_ended: bool,
}

impl KnownCall {
    fn new(index: Option<usize>) -> Self {
        Self {
            index,
            id: None,
            name: None,
            progress: ArgumentsProgress::Absent,
            unwritten: String::new(),
            is_begun: false,
            is_ended: false,
        }
    }

    fn is_whole(&self) -> bool {
        matches!(self.progress, ArgumentsProgress::Whole)
    }

    /// True if a piece for the place of this call is the begin of another one.
    fn is_followed_by(&self, piece: &CallPiece<'_>) -> Result<bool, UnreadableAnswer> {
        let is_other_id = match (&self.id, piece.id) {
            (Some(own), Some(id)) if own == id => return Ok(false),
            (Some(_), Some(_)) => true,
            _ => false,
        };
        if is_other_id && (piece.name.is_some() || self.is_whole()) {
            return Ok(true);
        }
        let (Some(own), Some(name)) = (&self.name, piece.name) else {
            // Some servers draw an id for each piece (vLLM before 0.9).
            return Ok(false);
        };
        if self.is_whole() {
            return Ok(true);
        }
        // A name may be repeated while the arguments come.
        if own == name {
            return Ok(false);
        }
        // Without an index the name alone says so.
        if piece.index.is_none() || piece.id.is_some() {
            return Ok(true);
        }
        Err(UnreadableAnswer::MixedCalls {
            detail: format!("{name} within the arguments of {own}"),
        })
    }

    fn take_piece(&mut self, piece: &CallPiece<'_>) -> Result<(), UnreadableAnswer> {
        if self.id.is_none() {
            self.id = piece.id.map(str::to_owned);
        }
        if self.name.is_none() {
            self.name = piece.name.map(str::to_owned);
        }
        if self.is_ended {
            return if piece.arguments.trim().is_empty() {
                Ok(())
            } else {
                let name = self.name.as_deref().unwrap_or_default();
                Err(UnreadableAnswer::MixedCalls {
                    detail: format!("arguments of {name} behind its end"),
                })
            };
        }
        self.unwritten.push_str(&piece.arguments);
        if !piece.arguments.is_empty() && matches!(self.progress, ArgumentsProgress::Absent) {
            self.progress = ArgumentsProgress::Open(ValueScanner::default());
        }
        if let ArgumentsProgress::Open(scanner) = &mut self.progress
            && scanner.read_run(&piece.arguments).1
        {
            self.progress = ArgumentsProgress::Whole;
        }
        Ok(())
    }

    /// Writes what has come.
    fn write(&mut self, name: &str, parts: &mut AnswerParts) {
        if !self.is_begun {
            self.is_begun = true;
            parts.begin_call(name);
        }
        parts.push_arguments(&self.unwritten);
        self.unwritten.clear();
    }

    fn end(&mut self, parts: &mut AnswerParts) {
        self.is_ended = true;
        parts.end_call();
    }
}

impl AnswerBlocks {
    pub fn push_reasoning(&mut self, text: &str, parts: &mut AnswerParts) {
        match self.waiting.back_mut() {
            _ if text.is_empty() => return,
            Some(AnswerBlock::Reasoning(before)) => before.push_str(text),
            _ => self
                .waiting
                .push_back(AnswerBlock::Reasoning(text.to_owned())),
        }
        self.write_ready(parts);
    }

    pub fn push_content(&mut self, text: &str, parts: &mut AnswerParts) {
        match self.waiting.back_mut() {
            _ if text.is_empty() => return,
            Some(AnswerBlock::Content(before)) => before.push_str(text),
            _ => self
                .waiting
                .push_back(AnswerBlock::Content(text.to_owned())),
        }
        self.write_ready(parts);
    }

    /// Takes a piece of a call. `is_whole`: the piece is a call of a message that is no stream.
    pub fn push_call(
        &mut self,
        piece: &CallPiece<'_>,
        is_whole: bool,
        parts: &mut AnswerParts,
    ) -> Result<(), UnreadableAnswer> {
        let place = match self.place_of(piece) {
            Some(place) if !is_whole && !self.calls[place].is_followed_by(piece)? => place,
            _ => {
                self.calls.push(KnownCall::new(piece.index));
                let place = self.calls.len() - 1;
                self.waiting.push_back(AnswerBlock::Call(place));
                place
            }
        };
        self.calls[place].take_piece(piece)?;
        self.write_ready(parts);
        Ok(())
    }

    /// Place of the call that a piece may belong to: the last one of its index. A piece without an
    /// index belongs to the call of its id, else to the last one.
    fn place_of(&self, piece: &CallPiece<'_>) -> Option<usize> {
        if piece.index.is_some() {
            return self
                .calls
                .iter()
                .rposition(|call| call.index == piece.index);
        }
        let has_id = |call: &KnownCall| piece.id.is_some() && call.id.as_deref() == piece.id;
        let named = self.calls.iter().rposition(has_id);
        named.or(self.calls.len().checked_sub(1))
    }

    /// Writes the blocks that are complete, and what has come of the one behind them.
    fn write_ready(&mut self, parts: &mut AnswerParts) {
        while let Some(block) = self.waiting.front() {
            match block {
                AnswerBlock::Reasoning(text) => parts.push_reasoning(text),
                AnswerBlock::Content(text) => parts.push_content(text),
                AnswerBlock::Call(place) => {
                    let call = &mut self.calls[*place];
                    let Some(name) = call.name.clone() else {
                        return;
                    };
                    call.write(&name, parts);
                    // A server that goes on with text is done with a call without arguments.
                    let is_complete = match (self.waiting.get(1), &call.progress) {
                        (None, _) | (Some(_), ArgumentsProgress::Open(_)) => false,
                        (Some(_), ArgumentsProgress::Whole) => true,
                        (Some(next), ArgumentsProgress::Absent) => {
                            !matches!(next, AnswerBlock::Call(_))
                        }
                    };
                    if !is_complete {
                        return;
                    }
                    call.end(parts);
                }
            }
            self.waiting.pop_front();
        }
    }

    /// Writes all blocks. `is_cut`: a call that is last has no end.
    pub fn end(&mut self, is_cut: bool, parts: &mut AnswerParts) -> Result<(), UnreadableAnswer> {
        while let Some(block) = self.waiting.pop_front() {
            match block {
                AnswerBlock::Reasoning(text) => parts.push_reasoning(&text),
                AnswerBlock::Content(text) => parts.push_content(&text),
                AnswerBlock::Call(place) => {
                    let call = &mut self.calls[place];
                    let Some(name) = call.name.clone() else {
                        return Err(UnreadableAnswer::MixedCalls {
                            detail: "a call without a name".to_owned(),
                        });
                    };
                    call.write(&name, parts);
                    if !is_cut || !self.waiting.is_empty() {
                        call.end(parts);
                    }
                }
            }
        }
        Ok(())
    }
}
