//! Reader of calls that are a header between markers and a JSON object. [`HeaderSyntax`] says which
//! header.
//!
//! 1. In content, a marker that may begin a call is held back until the header is complete, names a
//!    tool and an object begins, or until it cannot any more; then the marker is content, and
//!    reading goes on behind it.
//! 2. The object is passed through as it is. It ends where its brackets end; markers in strings are
//!    data. An object that is broken ends at the marker that ends the call.
//! 3. Closing markers behind the object belong to the call.

use std::mem;

use super::super::callable::CallableTools;
use super::super::json::scanner::ValueScanner;
use super::super::reader::ToolReader;
use super::super::scan::held_lexemes::{HeldLexemes, PatternCursor, PatternMatch, PatternMismatch};
use super::super::scan::line_tracker::LineTracker;
use super::super::scan::reader_step::ReaderStep;
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

/// Longest part of a header between two markers [bytes].
pub const MAX_HEADER_BYTES: usize = 512;

/// Headers of a family. Reading functions leave the cursor behind a pattern.
pub trait HeaderSyntax: Send {
    /// Reads what begins a call, up to its object, and returns its name. Known names alone begin
    /// one.
    fn read_header<'a>(&self, cursor: &mut PatternCursor<'a>) -> PatternMatch<&'a str>;

    /// True if this marker, outside strings, ends an object that is broken.
    fn is_call_end(&self, marker: usize) -> bool;

    /// Reads one of the things that close a call.
    fn read_closing(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()>;
}

#[derive(Debug)]
enum HeaderState {
    Content,
    Arguments(ValueScanner),
    /// Behind the object of a call.
    Closing,
}

/// Reader of a family whose calls are a header and an object.
pub struct HeaderReader<S> {
    syntax: S,
    /// Texts that [`Lexeme::Marker`] counts by.
    markers: &'static [&'static str],
    tools: CallableTools,
    held: HeldLexemes,
    content: LineTracker,
    state: HeaderState,
}

impl<S: HeaderSyntax> HeaderReader<S> {
    pub fn new(syntax: S, markers: &'static [&'static str], tools: CallableTools) -> Self {
        Self {
            syntax,
            markers,
            tools,
            held: HeldLexemes::default(),
            content: LineTracker::default(),
            state: HeaderState::Content,
        }
    }

    fn read_held(&mut self, out: &mut AnswerParts) {
        loop {
            let step = match mem::replace(&mut self.state, HeaderState::Content) {
                HeaderState::Content => self.read_content(out),
                HeaderState::Arguments(scanner) => self.read_arguments(scanner, out),
                HeaderState::Closing => self.read_closing(),
            };
            if !step.enter(&mut self.state) {
                return;
            }
        }
    }

    fn read_content(&mut self, out: &mut AnswerParts) -> ReaderStep<HeaderState> {
        let plain = self.held.plain_text();
        let plain_bytes = plain.len();
        self.content.push_text(plain, out);
        self.held.consume(plain_bytes);
        if self.held.front_marker().is_none() {
            return ReaderStep::Wait(HeaderState::Content);
        }
        let mut cursor = self.held.cursor();
        let header = self
            .syntax
            .read_header(&mut cursor)
            .and_then(|name| self.tools.find(name).ok_or(PatternMismatch::Different));
        match header {
            Ok(tool) => {
                let header_bytes = cursor.matched_bytes();
                self.held.consume(header_bytes);
                self.content.begin_call(&tool.name, out);
                ReaderStep::Continue(HeaderState::Arguments(ValueScanner::default()))
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(HeaderState::Content),
            Err(PatternMismatch::Different) => {
                let marker_bytes = self.held.front_bytes();
                let marker = &self.held.text()[..marker_bytes];
                self.content.push_text(marker, out);
                self.held.consume(marker_bytes);
                ReaderStep::Continue(HeaderState::Content)
            }
        }
    }

    fn read_arguments(
        &mut self,
        mut scanner: ValueScanner,
        out: &mut AnswerParts,
    ) -> ReaderStep<HeaderState> {
        let plain = self.held.plain_text();
        let (data_bytes, is_end) = scanner.read_run(plain);
        out.push_arguments(&plain[..data_bytes]);
        self.held.consume(data_bytes);
        if is_end {
            out.end_call();
            return ReaderStep::Continue(HeaderState::Closing);
        }
        let Some(marker) = self.held.front_marker() else {
            return ReaderStep::Wait(HeaderState::Arguments(scanner));
        };
        let ends_call = self.syntax.is_call_end(marker) && !scanner.is_in_string();
        if ends_call {
            out.end_call();
            return ReaderStep::Continue(HeaderState::Closing);
        }
        let marker_bytes = self.held.front_bytes();
        let marker_text = &self.held.text()[..marker_bytes];
        out.push_arguments(marker_text);
        scanner.read_run(marker_text);
        self.held.consume(marker_bytes);
        ReaderStep::Continue(HeaderState::Arguments(scanner))
    }

    fn read_closing(&mut self) -> ReaderStep<HeaderState> {
        let mut cursor = self.held.cursor();
        match self.syntax.read_closing(&mut cursor) {
            Ok(()) => {
                let closing_bytes = cursor.matched_bytes();
                self.held.consume(closing_bytes);
                ReaderStep::Continue(HeaderState::Closing)
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(HeaderState::Closing),
            Err(PatternMismatch::Different) => ReaderStep::Continue(HeaderState::Content),
        }
    }
}

impl<S: HeaderSyntax> ToolReader for HeaderReader<S> {
    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        self.held.push(lexeme, self.markers);
        self.read_held(out);
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        self.held.end();
        self.read_held(out);
    }
}
