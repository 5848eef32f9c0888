//! /v1/chat/completions.

use std::sync::Arc;

use super::json::{push_number, push_text};
use super::logprobs::push_chat_logprobs;
use super::openai::OpenAiHead;
use super::{AnswerIds, AnswerSpec, AnswerWriter, ChoiceOutput, ResumedOutput, WriteContext};
use crate::stream::parts::AnswerPart;
use crate::tokenizer::TokenDecoder;

pub struct ChatWriter(OpenAiHead);

impl ChatWriter {
    pub fn new(spec: Arc<AnswerSpec>, ids: AnswerIds) -> Self {
        Self(OpenAiHead::new(
            spec,
            ids,
            "chat.completion.chunk",
            "chat.completion",
        ))
    }
}

/// Member of a delta or a message for one part of an answer.
enum PartMember<'a> {
    Reasoning(&'a str),
    Content(&'a str),
    CallBegin { index: usize, name: &'a str },
    Arguments { index: usize, text: &'a str },
}

impl ChatWriter {
    /// An event for each part; the last one also ends the choice.
    fn write_parts(
        &self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let parts = std::mem::take(&mut choice.delta.parts);
        let finish = choice.delta.finish.take();
        let mut last_begin = None;
        for part in parts.iter() {
            let member = match part {
                AnswerPart::Reasoning(text) => PartMember::Reasoning(text),
                AnswerPart::Content(text) => PartMember::Content(text),
                AnswerPart::CallBegin(name) => {
                    choice.begun_calls += 1;
                    let index = choice.begun_calls - 1;
                    PartMember::CallBegin { index, name }
                }
                AnswerPart::Arguments(text) => {
                    let index = choice.begun_calls.saturating_sub(1);
                    PartMember::Arguments { index, text }
                }
                AnswerPart::CallEnd => continue,
            };
            last_begin = Some(out.len());
            self.0.begin_event(choice.index, out);
            out.extend_from_slice(b"\"delta\":{");
            self.push_member(choice.index, member, out);
            self.end_part(choice, context, out);
        }
        if finish.is_some() {
            choice.delta.finish = finish;
            last_begin = Some(out.len());
            self.0.begin_event(choice.index, out);
            out.extend_from_slice(b"\"delta\":{");
            self.end_part(choice, context, out);
        }
        last_begin
    }

    /// Ends an event of a part: the first one of a delta has its logprobs and ids.
    fn end_part(&self, choice: &mut ChoiceOutput, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"},\"logprobs\":");
        match choice.delta.logprobs.take() {
            Some(rows) => {
                push_chat_logprobs(out, &rows, self.0.spec.token_names, context.decoder);
            }
            None => out.extend_from_slice(b"null"),
        }
        self.0.end_event(choice, context, out);
        choice.delta.tokens.clear();
    }

    fn push_member(&self, choice: usize, member: PartMember<'_>, out: &mut Vec<u8>) {
        match member {
            PartMember::Reasoning(text) => self.push_reasoning(text, out),
            PartMember::Content(text) => {
                out.extend_from_slice(b"\"content\":");
                push_text(out, text);
            }
            PartMember::CallBegin { name, .. } if self.0.spec.is_function_call() => {
                push_function_call(name, "", out);
            }
            PartMember::Arguments { text, .. } if self.0.spec.is_function_call() => {
                out.extend_from_slice(b"\"function_call\":{\"arguments\":");
                push_text(out, text);
                out.push(b'}');
            }
            PartMember::CallBegin { index, name } => {
                out.extend_from_slice(b"\"tool_calls\":[{\"index\":");
                push_number(out, index as u64);
                out.push(b',');
                self.push_call_begin(choice, index, name, out);
                out.extend_from_slice(b"\"\"}}]");
            }
            PartMember::Arguments { index, text } => {
                out.extend_from_slice(b"\"tool_calls\":[{\"index\":");
                push_number(out, index as u64);
                out.extend_from_slice(b",\"function\":{\"arguments\":");
                push_text(out, text);
                out.extend_from_slice(b"}}]");
            }
        }
    }

    fn push_reasoning(&self, text: &str, out: &mut Vec<u8>) {
        for (place, name) in self.0.spec.reasoning_field().members().iter().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            push_text(out, name);
            out.push(b':');
            push_text(out, text);
        }
    }

    /// Members of a call up to its arguments.
    fn push_call_begin(&self, choice: usize, index: usize, name: &str, out: &mut Vec<u8>) {
        out.extend_from_slice(b"\"id\":");
        let id = self.0.ids.call_id("call_", choice, index, name);
        push_text(out, &id);
        out.extend_from_slice(b",\"type\":\"function\",\"function\":{\"name\":");
        push_text(out, name);
        out.extend_from_slice(b",\"arguments\":");
    }

    /// Content of a whole message, and the members behind it.
    fn push_parts(&self, choice: &ChoiceOutput, out: &mut Vec<u8>) {
        let parts = &choice.so_far.parts;
        let content = parts.content();
        let reasoning = parts.reasoning();
        let has_calls = parts.begun_calls() > 0;
        if content.is_empty() && (has_calls || !reasoning.is_empty()) {
            out.extend_from_slice(b"null");
        } else {
            push_text(out, &content);
        }
        if !reasoning.is_empty() {
            out.push(b',');
            self.push_reasoning(&reasoning, out);
        }
        if has_calls {
            out.push(b',');
            self.push_calls(choice, out);
        }
    }

    /// Member with the calls of a whole message.
    fn push_calls(&self, choice: &ChoiceOutput, out: &mut Vec<u8>) {
        let mut calls: Vec<(&str, String)> = Vec::new();
        for part in choice.so_far.parts.iter() {
            match (part, calls.last_mut()) {
                (AnswerPart::CallBegin(name), _) => calls.push((name, String::new())),
                (AnswerPart::Arguments(text), Some((_, arguments))) => arguments.push_str(text),
                _ => {}
            }
        }
        // There is one: the answer ends behind it.
        if let Some((name, arguments)) = calls.first().filter(|_| self.0.spec.is_function_call()) {
            push_function_call(name, arguments, out);
            return;
        }
        out.extend_from_slice(b"\"tool_calls\":[");
        for (index, (name, arguments)) in calls.iter().enumerate() {
            if index > 0 {
                out.push(b',');
            }
            out.push(b'{');
            self.push_call_begin(choice.index, index, name, out);
            push_text(out, arguments);
            out.extend_from_slice(b"}}");
        }
        out.push(b']');
    }
}

/// The call of a message of OpenAI's older API, or its beginning in a stream.
fn push_function_call(name: &str, arguments: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b"\"function_call\":{\"name\":");
    push_text(out, name);
    out.extend_from_slice(b",\"arguments\":");
    push_text(out, arguments);
    out.push(b'}');
}

impl AnswerWriter for ChatWriter {
    fn write_event(
        &mut self,
        choice: &mut ChoiceOutput,
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) -> Option<usize> {
        let mut last_begin = None;
        if !choice.is_begun {
            choice.is_begun = true;
            last_begin = Some(out.len());
            self.0.begin_event(choice.index, out);
            out.extend_from_slice(
                b"\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null",
            );
            self.0.end_choice(context, out);
            if choice.index == 0 {
                self.0.push_prompt_ids(choice, out);
            }
            out.extend_from_slice(b"}\n\n");
        }
        if choice.has_parts {
            return self.write_parts(choice, context, out).or(last_begin);
        }
        let delta = &choice.delta;
        if !self.0.is_shown(delta) {
            return last_begin;
        }
        let begin = out.len();
        self.0.begin_event(choice.index, out);
        if delta.text.is_empty() && delta.finish.is_some() {
            out.extend_from_slice(b"\"delta\":{},\"logprobs\":");
        } else {
            out.extend_from_slice(b"\"delta\":{\"content\":");
            push_text(out, &delta.text);
            out.extend_from_slice(b"},\"logprobs\":");
        }
        match &delta.logprobs {
            Some(rows) => {
                push_chat_logprobs(out, rows, self.0.spec.token_names, context.decoder);
            }
            None => out.extend_from_slice(b"null"),
        }
        self.0.end_event(choice, context, out);
        Some(begin)
    }

    /// A chat's stream has no event for the end of a call.
    fn shows_part(&self, part: &AnswerPart) -> bool {
        !matches!(part, AnswerPart::CallEnd)
    }

    fn write_end(&mut self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        self.0.write_end(context, out);
    }

    fn write_whole(
        &mut self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
    ) {
        let write_message = |choice: &ChoiceOutput, out: &mut Vec<u8>| {
            out.extend_from_slice(b"\"message\":{\"role\":\"assistant\",\"content\":");
            if choice.has_parts {
                self.push_parts(choice, out);
            } else {
                push_text(out, &choice.so_far.text);
            }
            out.push(b'}');
        };
        let write_logprobs =
            |choice: &mut ChoiceOutput, out: &mut Vec<u8>| match &choice.so_far.logprobs {
                Some(rows) => {
                    push_chat_logprobs(out, rows, self.0.spec.token_names, context.decoder);
                }
                None => out.extend_from_slice(b"null"),
            };
        self.0
            .write_whole(choices, context, out, write_message, write_logprobs);
        if let Some(first) = choices.first() {
            self.0.push_prompt_members(first, out);
        }
        out.push(b'}');
    }

    fn resume(&mut self, choice: &mut ChoiceOutput, sent: &ResumedOutput, _: &dyn TokenDecoder) {
        choice.is_begun = true;
        choice.begun_calls = sent.output.parts.begun_calls();
    }
}
