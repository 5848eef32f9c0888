//! Streams and whole answers of /v1/responses and /v1/messages.
//!
//! * `golden`: requests, scripted answers and what clients get, also read by the clients' own
//!   libraries (tests/clients);
//! * `properties`: streams, whole answers and resumed streams of any answer agree.

mod golden;
mod properties;

use std::borrow::Cow;

use super::Dialect;
use super::sse::{DONE_EVENT, error_end};
use super::translate::RequestFacts;
use super::write::*;
use crate::stream::TextOffsets;
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::tokenizer::TokenDecoder;

/// Answers here have logprobs of token 0 alone.
struct OneTokenDecoder;

impl TokenDecoder for OneTokenDecoder {
    fn decode(&self, _: &[u32], _: bool) -> String {
        String::new()
    }

    fn token_bytes(&self, _: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(b"tok")
    }

    fn is_special(&self, _: u32) -> bool {
        false
    }

    fn is_bytewise(&self) -> bool {
        true
    }
}

/// Answer of a model: parts by the steps in which they come.
#[derive(Debug, Clone)]
pub struct Script {
    pub steps: Vec<Vec<AnswerPart>>,
    pub finish: FinishReason,
    pub matched_stop: Option<String>,
}

const USAGE: AnswerCounts = AnswerCounts {
    prompt_tokens: 12,
    cached_tokens: 8,
    completion_tokens: 5,
    reasoning_tokens: Some(2),
    drafts: None,
};

fn context() -> WriteContext<'static> {
    WriteContext {
        decoder: &OneTokenDecoder,
        usage: USAGE,
        now: 3.5,
    }
}

pub fn spec(dialect: Dialect, facts: RequestFacts) -> AnswerSpec {
    AnswerSpec {
        dialect,
        model: "m".to_owned(),
        created: 1_000,
        arrived: 1.0,
        facts,
        ..AnswerSpec::default()
    }
}

pub fn ids(dialect: Dialect) -> AnswerIds {
    AnswerIds {
        response: format!("{}7", dialect.id_prefix()),
        ..AnswerIds::default()
    }
}

fn choice() -> ChoiceOutput {
    ChoiceOutput {
        index: 0,
        prompt_tokens: USAGE.prompt_tokens,
        cached_tokens: USAGE.cached_tokens,
        completion_tokens: USAGE.completion_tokens,
        reasoning_tokens: 2,
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

pub fn parts_of(parts: &[AnswerPart]) -> AnswerParts {
    let mut all = AnswerParts::default();
    for part in parts {
        match part {
            AnswerPart::Reasoning(text) => all.push_reasoning(text),
            AnswerPart::Content(text) => all.push_content(text),
            AnswerPart::CallBegin(name) => all.begin_call(name),
            AnswerPart::Arguments(text) => all.push_arguments(text),
            AnswerPart::CallEnd => all.end_call(),
        }
    }
    all
}

/// A writer and its choice.
pub struct ScriptedAnswer {
    pub writer: Box<dyn AnswerWriter>,
    pub choice: ChoiceOutput,
}

impl ScriptedAnswer {
    pub fn new(dialect: Dialect, facts: RequestFacts) -> Self {
        Self {
            writer: new_writer(spec(dialect, facts).into(), ids(dialect)),
            choice: choice(),
        }
    }

    /// Bytes of one write.
    pub fn write(&mut self, parts: &[AnswerPart]) -> String {
        self.choice.delta.parts = parts_of(parts);
        let mut out = Vec::new();
        let last = self
            .writer
            .write_event(&mut self.choice, &context(), &mut out);
        if let Some(last) = last {
            assert!(out[last..].starts_with(b"event: "));
        }
        self.choice.drop_delta();
        String::from_utf8(out).unwrap()
    }

    /// Bytes of the last write.
    pub fn end(&mut self, script: &Script) -> String {
        self.choice.delta.finish = Some(script.finish);
        self.choice.matched_stop = script.matched_stop.clone().map(MatchedStop::Text);
        let mut out = self.write(&[]).into_bytes();
        self.writer.write_end(&context(), &mut out);
        out.extend_from_slice(DONE_EVENT);
        String::from_utf8(out).unwrap()
    }

    pub fn stream(&mut self, script: &Script) -> String {
        let mut stream = String::new();
        for step in &script.steps {
            stream += &self.write(step);
        }
        stream + &self.end(script)
    }

    pub fn whole(&mut self, script: &Script) -> String {
        for step in &script.steps {
            self.choice.delta.parts = parts_of(step);
            self.writer.gather(&mut self.choice, &context());
        }
        self.choice.delta.finish = Some(script.finish);
        self.choice.matched_stop = script.matched_stop.clone().map(MatchedStop::Text);
        self.writer.gather(&mut self.choice, &context());
        let mut out = Vec::new();
        let choices = std::slice::from_mut(&mut self.choice);
        self.writer.write_whole(choices, &context(), &mut out);
        String::from_utf8(out).unwrap()
    }
}

/// Name and data of each event of a stream that ends with `[DONE]`.
pub fn events_of(stream: &str) -> Vec<(String, serde_json::Value)> {
    let events = stream.strip_suffix("data: [DONE]\n\n").unwrap();
    let read = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        let data = data.strip_prefix("data: ").unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    };
    let events = events.split("\n\n").filter(|event| !event.is_empty());
    events.map(read).collect()
}
