//! Answers to chat requests as answers of the API that the client speaks: for servers that have
//! chat requests alone.
//!
//! 1. The events of a stream, or a whole answer, are read as SGLang, vLLM and OpenAI write them
//!    ([`answer_json`]) and become parts: reasoning, content and calls;
//! 2. the API's own writer makes events or an answer of the parts, as it does for an engine;
//! 3. the end of the stream is written when the server's `[DONE]` comes, or, from a server that
//!    sends none, when its stream ends behind a `finish_reason`.
//!
//! Logprobs and the ids of calls are not taken over: the writer derives the ids.

mod answer_json;

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;

use std::borrow::Cow;

use self::answer_json::{AnswerJson, CallJson, ChoiceJson, MessageJson};
use crate::dialect::Dialect;
use crate::dialect::sse::{DONE_EVENT, event_len, is_done_line, is_error, line_data};
use crate::dialect::write::{
    AnswerCounts, AnswerHead, AnswerWriter, ChoiceOutput, Delta, ErrorObject, FinishReason,
    MatchedStop, WriteContext, new_writer,
};
use crate::stream::TextOffsets;
use crate::tokenizer::TokenDecoder;

/// Reason why a server's answer cannot be translated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnreadableAnswer {
    #[error("sent something that is no chat answer: {detail}")]
    NoChatAnswer { detail: String },
    #[error("ended its answer with finish_reason {reason}")]
    Aborted { reason: String },
}

/// How far a stream got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamProgress {
    Open,
    /// The `finish_reason` came.
    Finished,
    /// The client has the end, or an error.
    Ended,
}

/// Translates one answer.
pub struct ChatAnswerTranslator {
    writer: Box<dyn AnswerWriter>,
    choice: ChoiceOutput,
    counts: AnswerCounts,
    /// Index of the call that is open.
    open_call: Option<usize>,
    progress: StreamProgress,
}

impl ChatAnswerTranslator {
    /// `head.arrived` is on the clock of the `now` of the calls that follow.
    pub fn new(dialect: Dialect, head: AnswerHead) -> Self {
        Self {
            writer: new_writer(dialect, head, 1),
            choice: empty_choice(),
            counts: AnswerCounts::default(),
            open_call: None,
            progress: StreamProgress::Open,
        }
    }

    /// Takes a run of whole events. Returns the client's events.
    pub fn translate_events(&mut self, run: &[u8], now: f64) -> Vec<u8> {
        let mut out = Vec::with_capacity(run.len());
        let mut rest = run;
        while !rest.is_empty() && self.progress != StreamProgress::Ended {
            let (event, behind) = rest.split_at(event_len(rest).unwrap_or(rest.len()));
            self.translate_event(event, now, &mut out);
            rest = behind;
        }
        out
    }

    fn translate_event(&mut self, event: &[u8], now: f64, out: &mut Vec<u8>) {
        for line in event.split_inclusive(|byte| *byte == b'\n') {
            if line.starts_with(b":") {
                out.extend_from_slice(line);
                out.push(b'\n');
            } else if is_done_line(line) {
                self.write_end(now, out);
            } else if let Some(data) = line_data(line) {
                self.translate_data(data, now, out);
            }
        }
    }

    fn translate_data(&mut self, data: &[u8], now: f64, out: &mut Vec<u8>) {
        if is_error(data) {
            self.write_failure(data, out);
            return;
        }
        let taken = read_answer(data).and_then(|json| self.take_answer(json));
        match taken {
            Ok(()) => {
                let context = write_context(self.counts, now);
                self.writer.write_event(&mut self.choice, &context, out);
                self.choice.drop_delta();
            }
            Err(unreadable) => {
                let error = ErrorObject {
                    message: format!("the worker {unreadable}; send the request again"),
                    kind: "server_error".to_owned(),
                    code: "upstream_error".to_owned(),
                    param: None,
                };
                self.write_failure(&error.to_json(), out);
            }
        }
    }

    /// The server's stream has ended. Returns the end of the client's stream, if the server finished
    /// its answer and sent no `[DONE]`.
    pub fn finish_stream(&mut self, now: f64) -> Vec<u8> {
        let mut out = Vec::new();
        if self.progress == StreamProgress::Finished {
            self.write_end(now, &mut out);
        }
        out
    }

    /// An answer that is no stream.
    pub fn translate_whole(mut self, answer: &[u8], now: f64) -> Result<Vec<u8>, UnreadableAnswer> {
        self.take_answer(read_answer(answer)?)?;
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

    fn write_failure(&mut self, error: &[u8], out: &mut Vec<u8>) {
        self.writer.write_failure(error, out);
        self.progress = StreamProgress::Ended;
    }

    fn take_answer(&mut self, json: AnswerJson) -> Result<(), UnreadableAnswer> {
        if let Some(usage) = &json.usage {
            self.counts = usage.counts();
            self.choice.reasoning_tokens = self.counts.reasoning_tokens.unwrap_or(0);
        }
        // A request of these APIs has one answer.
        match json.choices.into_iter().next() {
            Some(choice) => self.take_choice(choice),
            None => Ok(()),
        }
    }

    fn take_choice(&mut self, choice: ChoiceJson) -> Result<(), UnreadableAnswer> {
        if let Some(message) = choice.delta.as_ref().or(choice.message.as_ref()) {
            self.take_message(message);
        }
        let Some(reason) = &choice.finish_reason else {
            return Ok(());
        };
        let finish = match reason.as_str() {
            "length" => FinishReason::Length,
            "tool_calls" | "function_call" => FinishReason::ToolCalls,
            "abort" | "error" => {
                let reason = reason.clone();
                return Err(UnreadableAnswer::Aborted { reason });
            }
            _ => FinishReason::Stop,
        };
        // A call that the limit cuts off has no end.
        if finish != FinishReason::Length {
            self.end_call();
        }
        self.choice.delta.finish = Some(finish);
        if finish == FinishReason::Stop {
            let stop = choice.stop_string();
            self.choice.matched_stop = stop.map(|text| MatchedStop::Text(text.to_owned()));
        }
        self.progress = StreamProgress::Finished;
        Ok(())
    }

    fn take_message(&mut self, message: &MessageJson) {
        if let Some(text) = message.reasoning().filter(|text| !text.is_empty()) {
            self.end_call();
            self.choice.delta.parts.push_reasoning(text);
        }
        for text in [&message.content, &message.refusal].into_iter().flatten() {
            if !text.is_empty() {
                self.end_call();
                self.choice.delta.parts.push_content(text);
            }
        }
        let calls = message.tool_calls.as_deref().unwrap_or_default();
        for (place, call) in calls.iter().enumerate() {
            self.take_call(place, call);
        }
    }

    /// Takes a call, or the continuation of one. Servers send calls one after the other.
    fn take_call(&mut self, place: usize, call: &CallJson) {
        let Some(function) = &call.function else {
            return;
        };
        let index = call.index.unwrap_or(place);
        if let Some(name) = &function.name
            && self.open_call != Some(index)
        {
            self.end_call();
            self.choice.delta.parts.begin_call(name);
            self.open_call = Some(index);
        }
        if let Some(arguments) = &function.arguments
            && self.open_call.is_some()
        {
            self.choice.delta.parts.push_arguments(arguments);
        }
    }

    fn end_call(&mut self) {
        if self.open_call.take().is_some() {
            self.choice.delta.parts.end_call();
        }
    }
}

fn read_answer(json: &[u8]) -> Result<AnswerJson, UnreadableAnswer> {
    serde_json::from_slice(json).map_err(|err| UnreadableAnswer::NoChatAnswer {
        detail: err.to_string(),
    })
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
