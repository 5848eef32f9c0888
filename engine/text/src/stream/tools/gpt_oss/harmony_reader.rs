//! Messages of gpt-oss to reasoning, content and calls.
//!
//! 1. A message with a tool as recipient is a call, on any channel, once its object begins. Without
//!    arguments it is a call of `{}`.
//! 2. Other messages of channel `analysis` are reasoning.
//! 3. All other messages are content. A message with any other recipient is content with its
//!    header, for it is a call of an unknown tool.
//! 4. Text without a header is content.
//!
//! Markers have meaning in every place, also in a call's strings: the model cannot write them
//! otherwise. Several messages of one kind are lines of one text. A header that the answer's end
//! cuts off is dropped: it holds no text.

use std::mem;

use super::super::callable::{CallableTools, CalledTool};
use super::super::json::scanner::ValueScanner;
use super::super::reader::ToolReader;
use super::super::scan::held_lexemes::{
    HeldLexemes, PatternCursor, PatternMatch, PatternMismatch, match_object_begin, read_any,
};
use super::super::scan::line_tracker::LineTracker;
use super::super::scan::reader_step::ReaderStep;
use super::message_header::{
    CALL, CHANNEL, END, MESSAGE, MessageHeader, RETURN, START, read_message_header,
};
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

/// Kind of a message that is no call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BodyKind {
    Reasoning,
    Content,
    /// Content that shows its markers.
    UnknownCall,
}

#[derive(Debug)]
enum MessageState {
    /// Where a header may begin.
    Start,
    Body(BodyKind),
    Arguments(ValueScanner),
    /// Behind the object of a call.
    CallTail,
}

/// Meaning of a message, by its header and the beginning of its text.
enum MessageOpening {
    /// The tool, and true if its arguments are empty.
    Call(CalledTool, bool),
    Body(BodyKind),
}

/// Texts of the messages before this one, by kind.
#[derive(Debug, Default)]
struct WrittenMessages {
    has_reasoning: bool,
    has_content: bool,
    /// True until the current message has text.
    is_new: bool,
}

/// Reader of `gpt_oss`.
pub struct HarmonyReader {
    /// Texts that [`Lexeme::Marker`] counts by.
    markers: &'static [&'static str],
    tools: CallableTools,
    held: HeldLexemes,
    content: LineTracker,
    written: WrittenMessages,
    state: MessageState,
    is_ended: bool,
    /// The content is the message of the channel `final`, which follows a grammar; all text in
    /// front of it is reasoning, as the rank counts it.
    is_gated: bool,
}

impl HarmonyReader {
    pub fn new(markers: &'static [&'static str], tools: CallableTools) -> Self {
        Self {
            markers,
            tools,
            held: HeldLexemes::default(),
            content: LineTracker::default(),
            written: WrittenMessages::default(),
            state: MessageState::Start,
            is_ended: false,
            is_gated: false,
        }
    }

    fn read_held(&mut self, out: &mut AnswerParts) {
        loop {
            let step = match mem::replace(&mut self.state, MessageState::Start) {
                MessageState::Start => self.read_start(out),
                MessageState::Body(kind) => self.read_body(kind, out),
                MessageState::Arguments(scanner) => self.read_arguments(scanner, out),
                MessageState::CallTail => self.read_call_tail(out),
            };
            if !step.enter(&mut self.state) {
                return;
            }
        }
    }

    fn read_start(&mut self, out: &mut AnswerParts) -> ReaderStep<MessageState> {
        if self.held.text().is_empty() {
            return ReaderStep::Wait(MessageState::Start);
        }
        let mut cursor = self.held.cursor();
        let opening = self.read_opening(&mut cursor);
        let opening_bytes = cursor.matched_bytes();
        match opening {
            Ok(opening) => ReaderStep::Continue(self.open_message(opening, opening_bytes, out)),
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(MessageState::Start),
            Err(PatternMismatch::Different) => self.read_without_header(out),
        }
    }

    /// Reads the header, and as much of the text as decides what the message is.
    fn read_opening(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<MessageOpening> {
        let header = read_message_header(cursor)?;
        let behind_header = cursor.clone();
        if let Some(tool) = self.find_recipient(&header) {
            cursor.skip_space()?;
            let is_empty = read_any(
                cursor,
                &[
                    &|cursor| match_object_begin(cursor).map(|()| false),
                    &|cursor| match_message_end(cursor).map(|()| true),
                ],
            );
            if is_empty != Err(PatternMismatch::Different) {
                return Ok(MessageOpening::Call(tool, is_empty?));
            }
            *cursor = behind_header;
        }
        let kind = match (header.channel, header.recipient) {
            (channel, _) if self.is_gated && channel != Some("final") => BodyKind::Reasoning,
            (Some("final"), _) if self.is_gated => BodyKind::Content,
            (Some("analysis"), _) => BodyKind::Reasoning,
            (_, Some(_)) => BodyKind::UnknownCall,
            (_, None) => BodyKind::Content,
        };
        Ok(MessageOpening::Body(kind))
    }

    fn find_recipient(&self, header: &MessageHeader<'_>) -> Option<CalledTool> {
        let recipient = header.recipient?;
        let name = recipient.strip_prefix("functions.").unwrap_or(recipient);
        self.tools.find(name)
    }

    fn open_message(
        &mut self,
        opening: MessageOpening,
        opening_bytes: usize,
        out: &mut AnswerParts,
    ) -> MessageState {
        self.written.is_new = true;
        let state = match opening {
            MessageOpening::Call(tool, is_empty) => {
                self.content.begin_call(&tool.name, out);
                if is_empty {
                    out.push_arguments("{}");
                    out.end_call();
                    MessageState::CallTail
                } else {
                    MessageState::Arguments(ValueScanner::default())
                }
            }
            MessageOpening::Body(kind) => {
                if kind == BodyKind::UnknownCall {
                    let header = self.held.text()[..opening_bytes].to_owned();
                    self.push_body(kind, &header, out);
                }
                MessageState::Body(kind)
            }
        };
        self.held.consume(opening_bytes);
        state
    }

    /// Reads what stands where a header could begin, and is none.
    fn read_without_header(&mut self, out: &mut AnswerParts) -> ReaderStep<MessageState> {
        self.written.is_new = true;
        let front_marker = self.held.front_marker();
        let is_header_marker = matches!(front_marker, Some(START | CHANNEL | MESSAGE));
        if self.is_ended && is_header_marker {
            self.held.consume(self.held.text().len());
            return ReaderStep::Wait(MessageState::Start);
        }
        let kind = if self.is_gated {
            BodyKind::Reasoning
        } else {
            BodyKind::Content
        };
        if is_header_marker {
            self.push_front_marker(kind, out);
        }
        ReaderStep::Continue(MessageState::Body(kind))
    }

    fn read_body(&mut self, kind: BodyKind, out: &mut AnswerParts) -> ReaderStep<MessageState> {
        let plain = self.held.plain_text().to_owned();
        self.push_body(kind, &plain, out);
        self.held.consume(plain.len());
        match self.held.front_marker() {
            None => ReaderStep::Wait(MessageState::Body(kind)),
            Some(END | CALL | RETURN) => {
                if kind == BodyKind::UnknownCall {
                    self.push_front_marker(kind, out);
                } else {
                    self.held.consume(self.held.front_bytes());
                }
                ReaderStep::Continue(MessageState::Start)
            }
            Some(START | CHANNEL) => ReaderStep::Continue(MessageState::Start),
            Some(_) => {
                self.push_front_marker(kind, out);
                ReaderStep::Continue(MessageState::Body(kind))
            }
        }
    }

    fn push_front_marker(&mut self, kind: BodyKind, out: &mut AnswerParts) {
        let marker_bytes = self.held.front_bytes();
        let marker = self.held.text()[..marker_bytes].to_owned();
        self.push_body(kind, &marker, out);
        self.held.consume(marker_bytes);
    }

    fn push_body(&mut self, kind: BodyKind, text: &str, out: &mut AnswerParts) {
        if text.is_empty() {
            return;
        }
        let is_new = mem::replace(&mut self.written.is_new, false);
        if kind == BodyKind::Reasoning {
            if is_new && self.written.has_reasoning {
                out.push_reasoning("\n");
            }
            self.written.has_reasoning = true;
            out.push_reasoning(text);
            return;
        }
        if is_new && self.written.has_content {
            self.content.push_text("\n", out);
        }
        self.written.has_content = true;
        self.content.push_text(text, out);
    }

    fn read_arguments(
        &mut self,
        mut scanner: ValueScanner,
        out: &mut AnswerParts,
    ) -> ReaderStep<MessageState> {
        let plain = self.held.plain_text();
        let (data_bytes, is_end) = scanner.read_run(plain);
        out.push_arguments(&plain[..data_bytes]);
        self.held.consume(data_bytes);
        if is_end {
            out.end_call();
            return ReaderStep::Continue(MessageState::CallTail);
        }
        let Some(marker) = self.held.front_marker() else {
            return ReaderStep::Wait(MessageState::Arguments(scanner));
        };
        if is_message_end(marker) {
            out.end_call();
            return ReaderStep::Continue(MessageState::CallTail);
        }
        let marker_bytes = self.held.front_bytes();
        let marker_text = &self.held.text()[..marker_bytes];
        out.push_arguments(marker_text);
        scanner.read_run(marker_text);
        self.held.consume(marker_bytes);
        ReaderStep::Continue(MessageState::Arguments(scanner))
    }

    /// Reads up to the end of a call's message. Text behind its object is content.
    fn read_call_tail(&mut self, out: &mut AnswerParts) -> ReaderStep<MessageState> {
        let plain = self.held.plain_text().to_owned();
        self.content.push_text(&plain, out);
        self.held.consume(plain.len());
        match self.held.front_marker() {
            None => ReaderStep::Wait(MessageState::CallTail),
            Some(END | CALL | RETURN) => {
                self.held.consume(self.held.front_bytes());
                ReaderStep::Continue(MessageState::Start)
            }
            Some(START | CHANNEL) => ReaderStep::Continue(MessageState::Start),
            Some(_) => {
                self.push_front_marker(BodyKind::Content, out);
                ReaderStep::Continue(MessageState::CallTail)
            }
        }
    }
}

impl ToolReader for HarmonyReader {
    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        self.held.push(lexeme, self.markers);
        self.read_held(out);
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        self.is_ended = true;
        self.held.end();
        self.read_held(out);
    }

    fn expect_gated_content(&mut self) {
        self.is_gated = true;
    }

    fn is_reasoning(&self) -> bool {
        matches!(self.state, MessageState::Body(BodyKind::Reasoning))
    }
}

/// True for markers that end a message, or begin the next one.
fn is_message_end(marker: usize) -> bool {
    matches!(marker, END | CALL | RETURN | START | CHANNEL)
}

/// Matches the end of a message, which is not read. At the answer's end it may be a stop id, which
/// is no part of the answer.
fn match_message_end(cursor: &mut PatternCursor<'_>) -> PatternMatch<()> {
    let end = cursor.clone();
    match cursor.read_next_marker() {
        Ok(marker) if is_message_end(marker) => {}
        Ok(_) => return Err(PatternMismatch::Different),
        Err(_) => end.read_end()?,
    }
    *cursor = end;
    Ok(())
}
