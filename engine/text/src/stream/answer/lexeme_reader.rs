//! Reasoning, content and calls, from text and markers.

use std::ops::Range;
use std::sync::Arc;

use super::format::AnswerFormat;
use crate::stream::markers::{Lexeme, MarkerLexer, MarkerTable};
use crate::stream::parts::{AnswerPart, AnswerParts};
use crate::stream::reasoning::{ReasoningFamily, ReasoningReader, ReasoningStart};
use crate::stream::tools::{ToolReader, ToolSignature, new_tool_reader};
use crate::tokenizer::TokenDecoder;

/// How a request wants its answer to be read.
#[derive(Debug, Clone)]
pub struct ReaderOptions {
    /// Tools that the model may call. Without tools calls are not read.
    pub tools: Arc<[ToolSignature]>,
    /// See [`AnswerFormat::reasoning_start`].
    pub start: Option<ReasoningStart>,
    /// False: reasoning and its markers stay in the content, as generated.
    pub separate_reasoning: bool,
    /// False: the answer ends behind its first complete call.
    pub parallel_tool_calls: bool,
    /// A rank looks for the end of the reasoning, behind which the answer's grammar begins.
    pub is_gated: bool,
}

/// Divides an answer's lexemes into parts: the reasoning, and the content and calls behind it.
pub struct LexemeReader {
    table: Arc<MarkerTable>,
    reasoning: Option<ReasoningReader>,
    calls: Option<CallReader>,
    /// Reasoning that the reader of calls reads stays in the content.
    joins_reasoning: bool,
    /// A grammar counts the bytes of the tokens behind the reasoning.
    follows_grammar: bool,
}

impl LexemeReader {
    /// `follows_grammar`: the answer follows a grammar, from its beginning or behind its reasoning.
    pub fn new(format: &AnswerFormat, options: ReaderOptions, follows_grammar: bool) -> Self {
        let tools = options.tools;
        let family = format.reader_family(!tools.is_empty());
        let mut calls = family.map(|family| CallReader {
            reader: new_tool_reader(family.format(), format.callable_tools(tools)),
            markers: format.call_markers(),
        });
        let mut reasoning = options
            .start
            .map(|start| ReasoningReader::new(start, options.separate_reasoning));
        if options.is_gated {
            let family = format.reasoning();
            let lead_newlines = family.map_or(0, ReasoningFamily::lead_newlines);
            if let Some(reasoning) = &mut reasoning {
                reasoning.count_lead_newlines(lead_newlines);
            }
            if let Some(calls) = &mut calls {
                calls.reader.expect_gated_content();
            }
        }
        Self {
            table: format.table().clone(),
            reasoning,
            calls,
            joins_reasoning: !options.separate_reasoning,
            follows_grammar,
        }
    }

    /// Markers of the table that are looked for.
    pub fn active_markers(&self, format: &AnswerFormat) -> Range<usize> {
        let reasoning = format.reasoning_markers();
        let calls = format.call_markers();
        let start = if self.reasoning.is_some() {
            reasoning.start
        } else {
            reasoning.end
        };
        let end = if self.calls.is_some() {
            calls.end
        } else {
            calls.start
        };
        start..end
    }

    /// True if calls are read.
    pub fn reads_calls(&self) -> bool {
        self.calls.is_some()
    }

    /// Reads a token. Returns true if it is reasoning: it is in front of the end of the reasoning,
    /// or has its end marker.
    pub fn read_token(
        &mut self,
        lexer: &mut MarkerLexer,
        decoder: &dyn TokenDecoder,
        id: u32,
        out: &mut AnswerParts,
    ) -> bool {
        let was_channel = self.is_in_reasoning_channel();
        let is_counted = self.follows_grammar && !self.is_in_reasoning();
        if let Some(reasoning) = &mut self.reasoning
            && reasoning.counts_newlines()
            && self.table.index_of(id).is_none()
        {
            reasoning.count_newlines(&decoder.token_bytes(id));
        }
        lexer.feed(decoder, id, is_counted, &mut |lexeme| {
            self.read(lexeme, out);
        });
        let is_block_end = self
            .reasoning
            .as_mut()
            .is_some_and(ReasoningReader::take_block_end);
        is_block_end || was_channel || self.is_in_reasoning()
    }

    fn is_in_reasoning(&self) -> bool {
        let is_block = self
            .reasoning
            .as_ref()
            .is_some_and(ReasoningReader::is_inside);
        is_block || self.is_in_reasoning_channel()
    }

    fn is_in_reasoning_channel(&self) -> bool {
        let calls = self.calls.as_ref();
        calls.is_some_and(|calls| calls.reader.is_reasoning())
    }

    fn read(&mut self, lexeme: Lexeme<'_>, out: &mut AnswerParts) {
        let table = &self.table;
        let calls = &mut self.calls;
        match &mut self.reasoning {
            Some(reasoning) => {
                let mut forward = |lexeme: Lexeme<'_>, out: &mut AnswerParts| {
                    read_behind_reasoning(calls, table, lexeme, out);
                };
                reasoning.read(lexeme, table, out, &mut forward);
            }
            None => read_behind_reasoning(calls, table, lexeme, out),
        }
        self.join_reasoning(out);
    }

    /// The answer has ended: appends what was held back.
    pub fn finish(
        &mut self,
        lexer: &mut MarkerLexer,
        decoder: &dyn TokenDecoder,
        out: &mut AnswerParts,
    ) {
        lexer.finish(decoder, &mut |lexeme| self.read(lexeme, out));
        let table = &self.table;
        let calls = &mut self.calls;
        if let Some(reasoning) = &mut self.reasoning {
            let mut forward = |lexeme: Lexeme<'_>, out: &mut AnswerParts| {
                read_behind_reasoning(calls, table, lexeme, out);
            };
            reasoning.finish(out, &mut forward);
        }
        if let Some(calls) = calls {
            calls.reader.finish(out);
        }
        self.join_reasoning(out);
    }

    fn join_reasoning(&self, out: &mut AnswerParts) {
        let has_reasoning = |part: &AnswerPart| matches!(part, AnswerPart::Reasoning(_));
        if !self.joins_reasoning || !out.iter().any(has_reasoning) {
            return;
        }
        let mut joined = AnswerParts::default();
        for part in out.iter() {
            match part {
                AnswerPart::Reasoning(text) => joined.push_content(text),
                _ => joined.push(part),
            }
        }
        *out = joined;
    }
}

/// Reader of calls, and the places of its markers in the table.
struct CallReader {
    reader: Box<dyn ToolReader>,
    markers: Range<usize>,
}

fn read_behind_reasoning(
    calls: &mut Option<CallReader>,
    table: &MarkerTable,
    lexeme: Lexeme<'_>,
    out: &mut AnswerParts,
) {
    let Some(calls) = calls else {
        out.push_content(match lexeme {
            Lexeme::Text(text) => text,
            Lexeme::Marker(index) => table.text_of(index),
        });
        return;
    };
    let lexeme = match lexeme {
        Lexeme::Marker(index) if calls.markers.contains(&index) => {
            Lexeme::Marker(index - calls.markers.start)
        }
        Lexeme::Marker(index) => Lexeme::Text(table.text_of(index)),
        text => text,
    };
    calls.reader.read(lexeme, out);
}
