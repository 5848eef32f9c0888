//! Reader of calls that are written as tags. [`TagSyntax`] says which tags.
//!
//! 1. In content, text that may begin a call is held back until it begins one, with the name of a
//!    tool, or cannot any more; then its first character or marker is content, and reading goes on
//!    behind it.
//! 2. Between the parameters of a call, text other than tags is ignored.
//! 3. In a value all text is data, up to an end tag.

use std::mem;

use super::super::callable::CallableTools;
use super::super::reader::ToolReader;
use super::super::scan::held_lexemes::{HeldLexemes, PatternCursor, PatternMatch, PatternMismatch};
use super::super::scan::line_tracker::LineTracker;
use super::super::scan::reader_step::ReaderStep;
use super::argument_writer::{ArgumentWriter, ValueForm};
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

/// Longest name of a tool or a parameter [bytes].
pub const MAX_NAME_BYTES: usize = 256;

/// Begin tag of a parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParameterTag<'a> {
    pub name: &'a str,
    pub form: ValueForm,
}

/// Tags of a family. All begin with `<`. Reading functions leave the cursor behind a tag.
pub trait TagSyntax: Send {
    /// True if one newline at each end of a value belongs to the tags.
    fn trims_newlines(&self) -> bool;

    /// Reads what begins a call and returns its name. Known names alone begin one.
    fn read_call_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
        is_at_line_start: bool,
    ) -> PatternMatch<&'a str>;

    fn read_parameter_begin<'a>(
        &self,
        cursor: &mut PatternCursor<'a>,
    ) -> PatternMatch<ParameterTag<'a>>;

    /// Reads the end tag of a value. If it is missing, a tag that ends the value is matched and not
    /// read.
    fn read_value_end(
        &self,
        cursor: &mut PatternCursor<'_>,
        is_at_line_start: bool,
    ) -> PatternMatch<()>;

    /// Reads the end tag of a call. If it is missing, a tag that ends the call is matched and not
    /// read.
    fn read_call_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()>;

    /// Reads what may stand between the end tag of a call and the content behind it.
    fn read_block_end(&self, cursor: &mut PatternCursor<'_>) -> PatternMatch<()>;
}

/// Value of a parameter, without the newlines that belong to the tags.
#[derive(Debug)]
struct ValueTrim {
    trims_newlines: bool,
    is_at_start: bool,
    /// A newline was read that is no part of the value if the end tag follows.
    holds_newline: bool,
    is_at_line_start: bool,
}

impl ValueTrim {
    fn new(trims_newlines: bool) -> Self {
        Self {
            trims_newlines,
            is_at_start: true,
            holds_newline: false,
            is_at_line_start: true,
        }
    }

    fn push_text(&mut self, text: &str, call: &mut ArgumentWriter, out: &mut AnswerParts) {
        if text.is_empty() {
            return;
        }
        self.is_at_line_start = text.ends_with('\n');
        if !self.trims_newlines {
            call.push_value(text, out);
            return;
        }
        let mut shown = text;
        if self.holds_newline {
            call.push_value("\n", out);
            self.holds_newline = false;
        }
        if self.is_at_start {
            shown = shown.strip_prefix('\n').unwrap_or(shown);
            self.is_at_start = false;
        }
        if let Some(before) = shown.strip_suffix('\n') {
            shown = before;
            self.holds_newline = true;
        }
        call.push_value(shown, out);
    }
}

#[derive(Debug)]
enum TagState {
    Content,
    /// In a call, between parameters.
    Parameters(ArgumentWriter),
    Value(ArgumentWriter, ValueTrim),
    /// Directly behind a call.
    BlockEnd,
}

/// Reader of a family whose calls are tags.
pub struct TagReader<S> {
    syntax: S,
    /// Texts that [`Lexeme::Marker`] counts by.
    markers: &'static [&'static str],
    tools: CallableTools,
    held: HeldLexemes,
    content: LineTracker,
    state: TagState,
}

impl<S: TagSyntax> TagReader<S> {
    pub fn new(syntax: S, markers: &'static [&'static str], tools: CallableTools) -> Self {
        Self {
            syntax,
            markers,
            tools,
            held: HeldLexemes::default(),
            content: LineTracker::default(),
            state: TagState::Content,
        }
    }

    fn read_held(&mut self, out: &mut AnswerParts) {
        loop {
            let step = match mem::replace(&mut self.state, TagState::Content) {
                TagState::Content => self.read_content(out),
                TagState::Parameters(call) => self.read_parameters(call, out),
                TagState::Value(call, trim) => self.read_value(call, trim, out),
                TagState::BlockEnd => self.read_block_end(),
            };
            if !step.enter(&mut self.state) {
                return;
            }
        }
    }

    fn read_content(&mut self, out: &mut AnswerParts) -> ReaderStep<TagState> {
        let text = self.held.text();
        let plain_bytes = text.find('<').unwrap_or(text.len());
        self.content.push_text(&text[..plain_bytes], out);
        self.held.consume(plain_bytes);
        if self.held.text().is_empty() {
            return ReaderStep::Wait(TagState::Content);
        }
        let mut cursor = self.held.cursor();
        let begin = self
            .syntax
            .read_call_begin(&mut cursor, self.content.is_at_line_start())
            .and_then(|name| self.tools.find(name).ok_or(PatternMismatch::Different));
        match begin {
            Ok(tool) => {
                let begin_bytes = cursor.matched_bytes();
                self.held.consume(begin_bytes);
                self.content.begin_call(&tool.name, out);
                let call = ArgumentWriter::new(tool);
                ReaderStep::Continue(TagState::Parameters(call))
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(TagState::Content),
            Err(PatternMismatch::Different) => {
                let front_bytes = self.held.front_bytes();
                let front = &self.held.text()[..front_bytes];
                self.content.push_text(front, out);
                self.held.consume(front_bytes);
                ReaderStep::Continue(TagState::Content)
            }
        }
    }

    fn read_parameters(
        &mut self,
        mut call: ArgumentWriter,
        out: &mut AnswerParts,
    ) -> ReaderStep<TagState> {
        let text = self.held.text();
        let ignored_bytes = text.find('<').unwrap_or(text.len());
        self.held.consume(ignored_bytes);
        if self.held.text().is_empty() {
            return ReaderStep::Wait(TagState::Parameters(call));
        }
        let mut cursor = self.held.cursor();
        match self.syntax.read_parameter_begin(&mut cursor) {
            Ok(tag) => {
                let tag_bytes = cursor.matched_bytes();
                call.begin_parameter(tag.name, tag.form, out);
                self.held.consume(tag_bytes);
                let trim = ValueTrim::new(self.syntax.trims_newlines());
                ReaderStep::Continue(TagState::Value(call, trim))
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(TagState::Parameters(call)),
            Err(PatternMismatch::Different) => self.read_call_end(call, out),
        }
    }

    /// Reads the end tag of a call, or ignores what stands in its place.
    fn read_call_end(
        &mut self,
        mut call: ArgumentWriter,
        out: &mut AnswerParts,
    ) -> ReaderStep<TagState> {
        let mut cursor = self.held.cursor();
        match self.syntax.read_call_end(&mut cursor) {
            Ok(()) => {
                let end_bytes = cursor.matched_bytes();
                call.end_call(out);
                self.held.consume(end_bytes);
                ReaderStep::Continue(TagState::BlockEnd)
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(TagState::Parameters(call)),
            Err(PatternMismatch::Different) => {
                self.held.consume(self.held.front_bytes());
                ReaderStep::Continue(TagState::Parameters(call))
            }
        }
    }

    fn read_value(
        &mut self,
        mut call: ArgumentWriter,
        mut trim: ValueTrim,
        out: &mut AnswerParts,
    ) -> ReaderStep<TagState> {
        let text = self.held.text();
        let data_bytes = text.find('<').unwrap_or(text.len());
        trim.push_text(&text[..data_bytes], &mut call, out);
        self.held.consume(data_bytes);
        if self.held.text().is_empty() {
            return ReaderStep::Wait(TagState::Value(call, trim));
        }
        let mut cursor = self.held.cursor();
        let value_end = self
            .syntax
            .read_value_end(&mut cursor, trim.is_at_line_start);
        match value_end {
            Ok(()) => {
                let end_bytes = cursor.matched_bytes();
                call.end_parameter(out);
                self.held.consume(end_bytes);
                ReaderStep::Continue(TagState::Parameters(call))
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(TagState::Value(call, trim)),
            Err(PatternMismatch::Different) => {
                let front_bytes = self.held.front_bytes();
                let front = &self.held.text()[..front_bytes];
                trim.push_text(front, &mut call, out);
                self.held.consume(front_bytes);
                ReaderStep::Continue(TagState::Value(call, trim))
            }
        }
    }

    fn read_block_end(&mut self) -> ReaderStep<TagState> {
        let mut cursor = self.held.cursor();
        match self.syntax.read_block_end(&mut cursor) {
            Ok(()) => {
                let end_bytes = cursor.matched_bytes();
                self.held.consume(end_bytes);
                ReaderStep::Continue(TagState::Content)
            }
            Err(PatternMismatch::Incomplete) => ReaderStep::Wait(TagState::BlockEnd),
            Err(PatternMismatch::Different) => ReaderStep::Continue(TagState::Content),
        }
    }
}

impl<S: TagSyntax> ToolReader for TagReader<S> {
    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        self.held.push(lexeme, self.markers);
        self.read_held(out);
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        self.held.end();
        self.read_held(out);
        if let TagState::Parameters(call) | TagState::Value(call, _) = &mut self.state {
            call.cut_call(out);
        }
    }
}
