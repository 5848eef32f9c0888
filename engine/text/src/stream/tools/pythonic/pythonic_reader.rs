//! Reader of calls that are written as Python calls. No expression is evaluated.
//!
//! 1. In content, text that may begin a list of calls is held back until it begins one with a
//!    known name and arguments, or cannot any more.
//! 2. Arguments are written one by one, each when it is complete.
//! 3. A call of an unknown tool is content; the calls beside it are read.

use std::mem;

use super::super::callable::{CallableTools, CalledTool};
use super::super::reader::ToolReader;
use super::super::scan::held_lexemes::{HeldLexemes, PatternCursor, PatternMatch, PatternMismatch};
use super::super::scan::line_tracker::LineTracker;
use super::call_arguments::ArgumentList;
use super::call_list::{
    BLOCK_END, ListForm, MARKERS, PYTHON_END, match_arguments_begin, read_end_marker,
    read_list_begin, read_list_end, read_next_name,
};
use super::expression_scanner::ExpressionScanner;
use crate::stream::markers::Lexeme;
use crate::stream::parts::AnswerParts;

/// List of calls that is being read.
#[derive(Debug, Clone, Copy)]
struct CallList {
    form: ListForm,
    has_call: bool,
}

/// Call whose arguments are being read.
#[derive(Debug)]
struct OpenCall {
    tool: CalledTool,
    arguments: ArgumentList,
    /// Argument that is not complete yet.
    raw: String,
    scanner: ExpressionScanner,
}

#[derive(Debug)]
enum PythonState {
    Content,
    Arguments(CallList, OpenCall),
    /// In the arguments of a call that is content.
    UnknownCall(CallList, ExpressionScanner),
    BetweenCalls(CallList),
    ListEnd,
}

enum PythonStep {
    Continue(PythonState),
    Wait(PythonState),
}

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
                PythonState::UnknownCall(list, scanner) => {
                    self.read_unknown_call(list, scanner, out)
                }
                PythonState::BetweenCalls(list) => self.read_between_calls(list, out),
                PythonState::ListEnd => self.read_list_end(),
            };
            match step {
                PythonStep::Continue(state) => self.state = state,
                PythonStep::Wait(state) => {
                    self.state = state;
                    return;
                }
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

    /// Tool that a call names. A call of a tool is certain once its arguments begin.
    fn find_target(&self, name: &str, cursor: &mut PatternCursor<'_>) -> PatternMatch<CallTarget> {
        let Some(tool) = self.tools.find(name) else {
            return Ok(CallTarget::Unknown);
        };
        match_arguments_begin(cursor)?;
        Ok(CallTarget::Tool(tool))
    }

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
                PythonState::UnknownCall(list, ExpressionScanner::default())
            }
            CallTarget::Tool(tool) => {
                self.held.consume(begin_bytes);
                self.content.begin_call(&tool.name, out);
                let list = CallList {
                    has_call: true,
                    ..list
                };
                let call = OpenCall {
                    tool,
                    arguments: ArgumentList::default(),
                    raw: String::new(),
                    scanner: ExpressionScanner::default(),
                };
                PythonState::Arguments(list, call)
            }
        }
    }

    fn push_held_content(&mut self, bytes: usize, out: &mut AnswerParts) {
        self.content.push_text(&self.held.text()[..bytes], out);
        self.held.consume(bytes);
    }

    fn read_arguments(
        &mut self,
        list: CallList,
        mut call: OpenCall,
        out: &mut AnswerParts,
    ) -> PythonStep {
        let plain = self.held.plain_text();
        let argument_end = call.scanner.find_end(plain);
        let data_bytes = argument_end.unwrap_or(plain.len());
        call.raw.push_str(&plain[..data_bytes]);
        let closes_call = plain[data_bytes..].starts_with(')');
        self.held.consume(data_bytes);
        if argument_end.is_none() {
            return self.read_marker_in_call(list, call, out);
        }
        let schema = &call.tool.parameters;
        call.arguments.push_argument(&call.raw, schema, out);
        call.raw.clear();
        self.held.consume(1);
        if closes_call {
            call.arguments.end_call(out);
            return PythonStep::Continue(PythonState::BetweenCalls(list));
        }
        call.scanner = ExpressionScanner::default();
        PythonStep::Continue(PythonState::Arguments(list, call))
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
        let ends_call = matches!(marker, PYTHON_END | BLOCK_END) && !call.scanner.is_in_string();
        if ends_call {
            let schema = &call.tool.parameters;
            call.arguments.push_argument(&call.raw, schema, out);
            call.arguments.end_call(out);
            return PythonStep::Continue(PythonState::ListEnd);
        }
        let marker_bytes = self.held.front_bytes();
        let marker_text = &self.held.text()[..marker_bytes];
        call.raw.push_str(marker_text);
        let _ = call.scanner.find_end(marker_text);
        self.held.consume(marker_bytes);
        PythonStep::Continue(PythonState::Arguments(list, call))
    }

    fn read_unknown_call(
        &mut self,
        list: CallList,
        mut scanner: ExpressionScanner,
        out: &mut AnswerParts,
    ) -> PythonStep {
        let plain = self.held.plain_text();
        let argument_end = scanner.find_end(plain);
        let closes_call = argument_end.is_some_and(|end| plain[end..].starts_with(')'));
        let shown_bytes = argument_end.map_or(plain.len(), |end| end + 1);
        self.push_held_content(shown_bytes, out);
        if closes_call {
            return PythonStep::Continue(PythonState::BetweenCalls(list));
        }
        if argument_end.is_some() {
            let scanner = ExpressionScanner::default();
            return PythonStep::Continue(PythonState::UnknownCall(list, scanner));
        }
        if self.held.front_marker().is_some() {
            return PythonStep::Continue(PythonState::Content);
        }
        PythonStep::Wait(PythonState::UnknownCall(list, scanner))
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
    fn markers(&self) -> &'static [&'static str] {
        MARKERS
    }

    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        self.held.push(lexeme, MARKERS);
        self.read_held(out);
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        self.held.end();
        self.read_held(out);
    }
}
