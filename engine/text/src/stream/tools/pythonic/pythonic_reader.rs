//! Reader of calls that are written as Python calls. No expression is evaluated.
//!
//! 1. In content, text that may begin a list of calls is held back until it begins one with a
//!    known name and arguments, or cannot any more.
//! 2. A call is held back until it is complete: an argument that Python does not read, at any
//!    place, makes it content, and so is the text behind it. If an argument has quotes, the text is
//!    held up to the end of the list, where [`repair_calls`] looks for the one reading that it has.
//! 3. A call of an unknown tool is content; the calls beside it are read.

use std::mem;

use super::super::callable::{CallableTools, CalledTool};
use super::super::reader::ToolReader;
use super::super::scan::held_lexemes::{HeldLexemes, PatternCursor, PatternMatch, PatternMismatch};
use super::super::scan::line_tracker::LineTracker;
use super::super::scan::reader_step::ReaderStep;
use super::call_arguments::{ArgumentList, is_python_argument, is_readable_argument};
use super::call_list::{
    BLOCK_BEGIN, BLOCK_END, ListForm, PYTHON_END, PYTHON_START, markers, match_arguments_begin,
    read_end_marker, read_list_begin, read_list_end, read_next_name,
};
use super::expression_scanner::ExpressionScanner;
use super::quote_repair::{CompleteCall, MAX_REPAIRED_BYTES, find_broken_string, repair_calls};
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

/// List of calls that is being read.
#[derive(Debug, Clone, Copy)]
struct CallList {
    form: ListForm,
    has_call: bool,
}

/// Argument that is not complete yet.
#[derive(Debug, Default)]
struct OpenArgument {
    raw: String,
    scanner: ExpressionScanner,
}

/// Text of a call of which nothing is shown yet.
#[derive(Debug)]
struct CallText {
    text: String,
    /// Place of the call's name; in front of it is the beginning of the list, or a comma.
    name_start: usize,
}

/// Call whose arguments are being read.
#[derive(Debug)]
struct OpenCall {
    tool: CalledTool,
    text: CallText,
    arguments: ArgumentList,
    argument: OpenArgument,
}

#[derive(Debug)]
enum PythonState {
    Content,
    Arguments(CallList, OpenCall),
    /// In the arguments of a call that is content.
    UnknownCall(CallList, OpenArgument),
    /// In a call that Python does not read, but that may be repaired.
    Broken(ListForm, CallText),
    BetweenCalls(CallList),
    ListEnd,
    /// Behind a call that cannot be read. A list begins at a marker only: other text may be of the
    /// call's strings.
    Unreadable,
}

type PythonStep = ReaderStep<PythonState>;

/// Call that begins: of a tool, or of none that is known.
enum CallTarget {
    Tool(CalledTool),
    Unknown,
}

/// Reader of `pythonic`.
pub struct PythonicReader {
    tools: CallableTools,
    held: HeldLexemes,
    content: LineTracker,
    state: PythonState,
}

impl PythonicReader {
    pub fn new(tools: CallableTools) -> Self {
        Self {
            tools,
            held: HeldLexemes::default(),
            content: LineTracker::default(),
            state: PythonState::Content,
        }
    }

    fn read_held(&mut self, out: &mut AnswerParts) {
        loop {
            let step = match mem::replace(&mut self.state, PythonState::Content) {
                PythonState::Content => self.read_content(out),
                PythonState::Arguments(list, call) => self.read_arguments(list, call, out),
                PythonState::UnknownCall(list, argument) => {
                    self.read_unknown_call(list, argument, out)
                }
                PythonState::Broken(form, call) => self.read_broken(form, call, out),
                PythonState::BetweenCalls(list) => self.read_between_calls(list, out),
                PythonState::ListEnd => self.read_list_end(),
                PythonState::Unreadable => self.read_unreadable(out),
            };
            if !step.enter(&mut self.state) {
                return;
            }
        }
    }

    fn read_content(&mut self, out: &mut AnswerParts) -> PythonStep {
        let plain = self.held.plain_text();
        let plain_bytes = plain.find('[').unwrap_or(plain.len());
        self.content.push_text(&plain[..plain_bytes], out);
        self.held.consume(plain_bytes);
        if self.held.text().is_empty() {
            return PythonStep::Wait(PythonState::Content);
        }
        let mut cursor = self.held.cursor();
        let begin = read_list_begin(&mut cursor, self.content.is_at_line_start())
            .and_then(|begin| Ok((begin.form, self.find_target(begin.name, &mut cursor)?)));
        let begin_bytes = cursor.matched_bytes();
        match begin {
            Ok((form, target)) => {
                let list = CallList {
                    form,
                    has_call: false,
                };
                PythonStep::Continue(self.begin_call(list, target, begin_bytes, out))
            }
            Err(PatternMismatch::Incomplete) => PythonStep::Wait(PythonState::Content),
            Err(PatternMismatch::Different) => {
                self.push_held_content(self.held.front_bytes(), out);
                PythonStep::Continue(PythonState::Content)
            }
        }
    }

    /// Tool that a call names. A call of a tool may be one once its arguments begin.
    fn find_target(&self, name: &str, cursor: &mut PatternCursor<'_>) -> PatternMatch<CallTarget> {
        let Some(tool) = self.tools.find(name) else {
            return Ok(CallTarget::Unknown);
        };
        match_arguments_begin(cursor)?;
        Ok(CallTarget::Tool(tool))
    }

    /// `begin_bytes`: what stands in front of the first argument.
    fn begin_call(
        &mut self,
        list: CallList,
        target: CallTarget,
        begin_bytes: usize,
        out: &mut AnswerParts,
    ) -> PythonState {
        match target {
            CallTarget::Unknown => {
                self.push_held_content(begin_bytes, out);
                PythonState::UnknownCall(list, OpenArgument::default())
            }
            CallTarget::Tool(tool) => {
                let text = self.held.text()[..begin_bytes].to_owned();
                self.held.consume(begin_bytes);
                let behind_name = text.trim_end_matches('(').trim_end().len();
                let name_start = behind_name - tool.name.len();
                let call = OpenCall {
                    tool,
                    text: CallText { text, name_start },
                    arguments: ArgumentList::default(),
                    argument: OpenArgument::default(),
                };
                PythonState::Arguments(list, call)
            }
        }
    }

    fn push_held_content(&mut self, bytes: usize, out: &mut AnswerParts) {
        self.content.push_text(&self.held.text()[..bytes], out);
        self.held.consume(bytes);
    }

    fn push_call(&mut self, call: &CompleteCall, out: &mut AnswerParts) {
        self.content.begin_call(&call.tool.name, out);
        out.push_arguments(&call.arguments);
        out.end_call();
    }

    fn read_arguments(
        &mut self,
        list: CallList,
        mut call: OpenCall,
        out: &mut AnswerParts,
    ) -> PythonStep {
        let plain = self.held.plain_text();
        let argument_end = call.argument.scanner.find_end(plain);
        let data_bytes = argument_end.unwrap_or(plain.len());
        call.argument.raw.push_str(&plain[..data_bytes]);
        let read_bytes = argument_end.map_or(data_bytes, |end| end + 1);
        call.text.text.push_str(&plain[..read_bytes]);
        let is_last = plain[data_bytes..].starts_with(')');
        self.held.consume(read_bytes);
        if argument_end.is_none() {
            return self.read_marker_in_call(list, call, out);
        }
        if !take_argument(&mut call, is_last) {
            return self.break_call(list.form, call, out);
        }
        if !is_last {
            return PythonStep::Continue(PythonState::Arguments(list, call));
        }
        self.end_call(&call, out);
        let list = CallList {
            has_call: true,
            ..list
        };
        PythonStep::Continue(PythonState::BetweenCalls(list))
    }

    fn end_call(&mut self, call: &OpenCall, out: &mut AnswerParts) {
        let complete = CompleteCall {
            tool: call.tool.clone(),
            arguments: call.arguments.to_json(),
        };
        self.push_call(&complete, out);
    }

    /// Reads on in a call that has no meaning with its last argument.
    fn break_call(&mut self, form: ListForm, call: OpenCall, out: &mut AnswerParts) -> PythonStep {
        let argument = &call.argument.raw;
        let has_quote = argument.contains(['\'', '"']);
        // Python reads `'a' + 'b'`: its quotes are no text.
        let may_be_repaired = has_quote && !is_python_argument(argument);
        if may_be_repaired {
            return PythonStep::Continue(PythonState::Broken(form, call.text));
        }
        self.content.push_text(&call.text.text, out);
        PythonStep::Continue(PythonState::Unreadable)
    }

    /// Reads a marker in a call's arguments. It is data, or ends a call that is broken.
    fn read_marker_in_call(
        &mut self,
        list: CallList,
        mut call: OpenCall,
        out: &mut AnswerParts,
    ) -> PythonStep {
        let Some(marker) = self.held.front_marker() else {
            return PythonStep::Wait(PythonState::Arguments(list, call));
        };
        let is_end = matches!(marker, PYTHON_END | BLOCK_END);
        let ends_call = is_end && !call.argument.scanner.is_in_string();
        if ends_call {
            if !take_argument(&mut call, true) {
                return self.break_call(list.form, call, out);
            }
            self.end_call(&call, out);
            return PythonStep::Continue(PythonState::ListEnd);
        }
        let marker_bytes = self.held.front_bytes();
        let marker_text = &self.held.text()[..marker_bytes];
        call.argument.raw.push_str(marker_text);
        call.text.text.push_str(marker_text);
        let _ = call.argument.scanner.find_end(marker_text);
        self.held.consume(marker_bytes);
        PythonStep::Continue(PythonState::Arguments(list, call))
    }

    /// Holds a broken call up to the end of its list.
    fn read_broken(
        &mut self,
        form: ListForm,
        mut call: CallText,
        out: &mut AnswerParts,
    ) -> PythonStep {
        let plain = self.held.plain_text();
        let plain_bytes = plain.len();
        call.text.push_str(plain);
        self.held.consume(plain_bytes);
        let is_too_long = call.text.len() > MAX_REPAIRED_BYTES;
        let is_answer_end = self.held.cursor().read_end().is_ok();
        let marker = self.held.front_marker();
        let is_list_end = matches!(marker, Some(PYTHON_END | BLOCK_END));
        if is_too_long || is_answer_end || is_list_end {
            return PythonStep::Continue(self.end_broken(form, &call, out));
        }
        if marker.is_none() {
            return PythonStep::Wait(PythonState::Broken(form, call));
        }
        let marker_bytes = self.held.front_bytes();
        call.text.push_str(&self.held.text()[..marker_bytes]);
        self.held.consume(marker_bytes);
        PythonStep::Continue(PythonState::Broken(form, call))
    }

    fn end_broken(
        &mut self,
        form: ListForm,
        call: &CallText,
        out: &mut AnswerParts,
    ) -> PythonState {
        let Some(calls) = repair_calls(&call.text[call.name_start..], form, &self.tools) else {
            self.content.push_text(&call.text, out);
            return PythonState::Unreadable;
        };
        for call in &calls {
            self.push_call(call, out);
        }
        PythonState::ListEnd
    }

    fn read_unknown_call(
        &mut self,
        list: CallList,
        mut argument: OpenArgument,
        out: &mut AnswerParts,
    ) -> PythonStep {
        let plain = self.held.plain_text();
        let argument_end = argument.scanner.find_end(plain);
        argument
            .raw
            .push_str(&plain[..argument_end.unwrap_or(plain.len())]);
        let is_last = argument_end.is_some_and(|end| plain[end..].starts_with(')'));
        let shown_bytes = argument_end.map_or(plain.len(), |end| end + 1);
        self.push_held_content(shown_bytes, out);
        if argument_end.is_some() {
            let next = if !is_readable_argument(&argument.raw, is_last) {
                PythonState::Unreadable
            } else if is_last {
                PythonState::BetweenCalls(list)
            } else {
                PythonState::UnknownCall(list, OpenArgument::default())
            };
            return PythonStep::Continue(next);
        }
        if self.held.front_marker().is_some() {
            return PythonStep::Continue(PythonState::Content);
        }
        PythonStep::Wait(PythonState::UnknownCall(list, argument))
    }

    fn read_unreadable(&mut self, out: &mut AnswerParts) -> PythonStep {
        let plain_bytes = self.held.plain_text().len();
        self.push_held_content(plain_bytes, out);
        match self.held.front_marker() {
            None => PythonStep::Wait(PythonState::Unreadable),
            Some(PYTHON_START | BLOCK_BEGIN) => PythonStep::Continue(PythonState::Content),
            Some(_) => {
                self.push_held_content(self.held.front_bytes(), out);
                PythonStep::Continue(PythonState::Unreadable)
            }
        }
    }

    /// The answer ends within a call.
    fn cut_call(&mut self, form: ListForm, call: &OpenCall, out: &mut AnswerParts) {
        let text = &call.text.text[call.text.name_start..];
        if let Some(calls) = repair_calls(text, form, &self.tools) {
            for call in &calls {
                self.push_call(call, out);
            }
            return;
        }
        if find_broken_string(text).is_some() {
            self.content.push_text(&call.text.text, out);
            return;
        }
        self.content.begin_call(&call.tool.name, out);
        out.push_arguments(&call.arguments.to_open_json());
    }

    fn read_between_calls(&mut self, list: CallList, out: &mut AnswerParts) -> PythonStep {
        let mut cursor = self.held.cursor();
        let next = read_next_name(&mut cursor, list.form)
            .and_then(|name| self.find_target(name, &mut cursor));
        let next_bytes = cursor.matched_bytes();
        match next {
            Ok(target) => {
                return PythonStep::Continue(self.begin_call(list, target, next_bytes, out));
            }
            Err(PatternMismatch::Incomplete) => {
                return PythonStep::Wait(PythonState::BetweenCalls(list));
            }
            Err(PatternMismatch::Different) => {}
        }
        if !list.has_call {
            return PythonStep::Continue(PythonState::Content);
        }
        let mut cursor = self.held.cursor();
        match read_list_end(&mut cursor, list.form) {
            Ok(()) => {
                let end_bytes = cursor.matched_bytes();
                self.held.consume(end_bytes);
                PythonStep::Continue(PythonState::ListEnd)
            }
            Err(PatternMismatch::Incomplete) => PythonStep::Wait(PythonState::BetweenCalls(list)),
            Err(PatternMismatch::Different) => PythonStep::Continue(PythonState::Content),
        }
    }

    fn read_list_end(&mut self) -> PythonStep {
        let mut cursor = self.held.cursor();
        match read_end_marker(&mut cursor) {
            Ok(()) => {
                let end_bytes = cursor.matched_bytes();
                self.held.consume(end_bytes);
                PythonStep::Continue(PythonState::Content)
            }
            Err(PatternMismatch::Incomplete) => PythonStep::Wait(PythonState::ListEnd),
            Err(PatternMismatch::Different) => PythonStep::Continue(PythonState::Content),
        }
    }
}

impl ToolReader for PythonicReader {
    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        self.held.push(lexeme, markers());
        self.read_held(out);
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        self.held.end();
        self.read_held(out);
        if let PythonState::Arguments(list, call) =
            mem::replace(&mut self.state, PythonState::Content)
        {
            self.cut_call(list.form, &call, out);
        }
    }
}

/// Returns false if the call has no meaning with the argument that is complete.
fn take_argument(call: &mut OpenCall, is_last: bool) -> bool {
    let schema = &call.tool.parameters;
    let raw = &call.argument.raw;
    if call.arguments.push_argument(raw, schema, is_last).is_none() {
        return false;
    }
    call.argument = OpenArgument::default();
    true
}
