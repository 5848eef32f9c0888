//! Answers to chat requests as answers of the API that the client speaks: for servers that have
//! chat requests alone.
//!
//! 1. The events of a stream, or a whole answer, are read in every form in which servers write them
//!    ([`answer_json`]) and become parts: reasoning, content and calls, one after the other
//!    ([`call_order`]);
//! 2. the API's own writer makes events or an answer of the parts, as it does for an engine;
//! 3. the end of the stream is written when the server's `[DONE]` comes, or, from a server that
//!    sends none, when its stream ends.
//!
//! Invariant: the client gets an end if and only if a `finish_reason` of a known meaning came.
//! Errors in any form, values that are not known and the absence of a reason are an error for the
//! client.
//!
//! Logprobs and the ids of calls are not taken over: the writer derives the ids.

mod answer_json;
mod call_order;
mod unreadable;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod foreign_forms;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::borrow::Cow;

use self::answer_json::{AnswerJson, ChoiceJson, MessageJson};
use self::call_order::AnswerBlocks;
pub use self::unreadable::UnreadableAnswer;
use crate::dialect::sse::{
    DONE_EVENT, event_data, event_name, events, is_done_data, lines, without_mark,
};
use crate::dialect::write::{
    AnswerCounts, AnswerIds, AnswerSpec, AnswerWriter, ChoiceOutput, Delta, ErrorObject,
    FinishReason, MatchedStop, WriteContext, new_writer,
};
use crate::dialect::{Dialect, response_id};
use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

/// How far a stream got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamProgress {
    /// Nothing came.
    New,
    Open,
    /// The `finish_reason` came.
    Finished(FinishReason),
    /// The client has the end, or an error.
    Ended,
}

/// Meaning of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EventMeaning {
    Nothing,
    Part,
    End,
}

/// Translates one answer.
pub struct ChatAnswerTranslator {
    writer: Box<dyn AnswerWriter>,
    choice: ChoiceOutput,
    /// Index of the choice that is translated: a request of these APIs has one answer.
    index: Option<u64>,
    counts: AnswerCounts,
    blocks: AnswerBlocks,
    progress: StreamProgress,
}

impl ChatAnswerTranslator {
    /// The spec's `arrived` is on the clock of the `now` of the calls that follow.
    pub fn new(spec: AnswerSpec) -> Self {
        let ids = AnswerIds {
            response: response_id(spec.dialect, None, &spec.request_id),
            ..AnswerIds::default()
        };
        Self {
            writer: new_writer(spec.into(), ids),
            choice: empty_choice(),
            index: None,
            counts: AnswerCounts::default(),
            blocks: AnswerBlocks::default(),
            progress: StreamProgress::New,
        }
    }

    /// Reason why a stream cannot be translated that begins with this event.
    pub fn check_first_event(event: &[u8]) -> Result<(), UnreadableAnswer> {
        let mut translator = Self::new(AnswerSpec {
            dialect: Dialect::Messages,
            ..AnswerSpec::default()
        });
        translator.take_event(event).map(|_| ())
    }

    /// Takes a run of whole events. Returns the client's events.
    pub fn translate_events(&mut self, run: &[u8], now: f64) -> Vec<u8> {
        let mut out = Vec::with_capacity(run.len());
        let mut run = run;
        if self.progress == StreamProgress::New {
            run = without_mark(run);
            self.progress = StreamProgress::Open;
        }
        for event in events(run) {
            if self.progress == StreamProgress::Ended {
                break;
            }
            for comment in lines(event).filter(|line| line.starts_with(b":")) {
                out.extend_from_slice(comment);
                out.extend_from_slice(b"\n\n");
            }
            self.translate_event(event, now, &mut out);
        }
        out
    }

    fn translate_event(&mut self, event: &[u8], now: f64, out: &mut Vec<u8>) {
        match self.take_event(event) {
            Ok(EventMeaning::Nothing) => {}
            Ok(EventMeaning::Part) => {
                let context = write_context(self.counts, now);
                self.writer.write_event(&mut self.choice, &context, out);
                self.choice.drop_delta();
            }
            Ok(EventMeaning::End) => self.write_end(now, out),
            Err(unreadable) => self.write_failure(&unreadable, out),
        }
    }

    /// Reads an event. Its parts come to the choice's delta.
    fn take_event(&mut self, event: &[u8]) -> Result<EventMeaning, UnreadableAnswer> {
        let Some(data) = event_data(event) else {
            return Ok(EventMeaning::Nothing);
        };
        if is_done_data(&data) {
            return self.take_end().map(|()| EventMeaning::End);
        }
        if event_name(event) == Some(b"error") {
            return Err(UnreadableAnswer::Failed(ErrorObject::of_answer(&data)));
        }
        self.take_answer(AnswerJson::read(&data)?)?;
        Ok(EventMeaning::Part)
    }

    /// The server's stream has ended. Returns the end of the client's stream, if the server
    /// finished its answer and sent no `[DONE]`.
    pub fn finish_stream(&mut self, now: f64) -> Vec<u8> {
        let mut out = Vec::new();
        if matches!(self.progress, StreamProgress::Finished(_)) {
            match self.take_end() {
                Ok(()) => self.write_end(now, &mut out),
                Err(unreadable) => self.write_failure(&unreadable, &mut out),
            }
        }
        out
    }

    /// An answer that is no stream.
    pub fn translate_whole(
        &mut self,
        answer: &[u8],
        now: f64,
    ) -> Result<Vec<u8>, UnreadableAnswer> {
        self.take_answer(AnswerJson::read(answer)?)?;
        self.take_end()?;
        let context = write_context(self.counts, now);
        self.writer.gather(&mut self.choice, &context);
        let mut out = Vec::with_capacity(answer.len());
        let choices = std::slice::from_mut(&mut self.choice);
        self.writer.write_whole(choices, &context, &mut out);
        Ok(out)
    }

    fn write_end(&mut self, now: f64, out: &mut Vec<u8>) {
        let context = write_context(self.counts, now);
        // The counts may have come behind the last part.
        self.writer.write_event(&mut self.choice, &context, out);
        self.writer.write_end(&context, out);
        out.extend_from_slice(DONE_EVENT);
        self.progress = StreamProgress::Ended;
    }

    fn write_failure(&mut self, unreadable: &UnreadableAnswer, out: &mut Vec<u8>) {
        let error = unreadable.to_error().to_json();
        self.writer.write_failure(&error, out);
        self.progress = StreamProgress::Ended;
    }

    /// The server says that its answer ends: without a reason it has broken off.
    fn take_end(&mut self) -> Result<(), UnreadableAnswer> {
        let StreamProgress::Finished(finish) = self.progress else {
            return Err(UnreadableAnswer::Unfinished);
        };
        // Blocks that came behind the reason.
        self.blocks
            .end(finish.is_cut(), &mut self.choice.delta.parts)
    }

    fn take_answer(&mut self, json: AnswerJson) -> Result<(), UnreadableAnswer> {
        if let Some(usage) = &json.usage {
            self.counts = usage.counts();
            self.choice.reasoning_tokens = self.counts.reasoning_tokens.unwrap_or(0);
        }
        for choice in json.choices.iter().flatten() {
            let index = choice.index.unwrap_or(0);
            if *self.index.get_or_insert(index) == index {
                self.take_choice(choice)?;
            }
        }
        Ok(())
    }

    fn take_choice(&mut self, choice: &ChoiceJson) -> Result<(), UnreadableAnswer> {
        let finish = choice.finish()?;
        match (&choice.delta, &choice.message) {
            // A message beside it repeats the text so far (Perplexity).
            (Some(delta), _) => self.take_message(delta, false)?,
            (None, Some(message)) => self.take_message(message, true)?,
            (None, None) => {}
        }
        let Some(finish) = finish else {
            return Ok(());
        };
        self.blocks
            .end(finish.is_cut(), &mut self.choice.delta.parts)?;
        self.choice.delta.finish = Some(finish);
        if finish == FinishReason::Stop {
            let stop = choice.stop_string();
            self.choice.matched_stop = stop.map(|text| MatchedStop::Text(text.to_owned()));
        }
        self.progress = StreamProgress::Finished(finish);
        Ok(())
    }

    /// `is_whole`: the message is that of an answer that is no stream.
    fn take_message(
        &mut self,
        message: &MessageJson,
        is_whole: bool,
    ) -> Result<(), UnreadableAnswer> {
        message.check_role()?;
        let parts = &mut self.choice.delta.parts;
        if let Some(text) = message.reasoning() {
            self.blocks.push_reasoning(text, parts);
        }
        self.blocks.push_content(&message.content(), parts);
        if let Some(text) = &message.refusal {
            self.blocks.push_content(text, parts);
        }
        for piece in message.calls()? {
            self.blocks.push_call(&piece, is_whole, parts)?;
        }
        Ok(())
    }
}

fn write_context(usage: AnswerCounts, now: f64) -> WriteContext<'static> {
    WriteContext {
        decoder: &NoTokens,
        usage,
        now,
    }
}

fn empty_choice() -> ChoiceOutput {
    ChoiceOutput {
        index: 0,
        prompt_tokens: 0,
        cached_tokens: 0,
        completion_tokens: 0,
        reasoning_tokens: 0,
        drafts: None,
        has_parts: true,
        begun_calls: 0,
        matched_stop: None,
        is_begun: false,
        echo: String::new(),
        prompt_ids: Vec::new(),
        prompt_text: None,
        delta: Delta::default(),
        so_far: Delta::default(),
        offsets: TextOffsets::new(0),
    }
}

/// Decoder of answers that come as text: there are no tokens to decode.
struct NoTokens;

impl TokenDecoder for NoTokens {
    fn decode(&self, _: &[u32], _: bool) -> String {
        String::new()
    }

    fn token_bytes(&self, _: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(&[])
    }

    fn is_special(&self, _: u32) -> bool {
        false
    }

    fn is_bytewise(&self) -> bool {
        true
    }
}
