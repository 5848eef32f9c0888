//! How a model writes reasoning and tool calls.

use std::sync::Arc;

use baton_text::stream::answer::{AnswerFormat, CheckpointFacts, ParserChoice, detect_format};
use baton_text::stream::reasoning::{BlockText, ReasoningFamily, ReasoningStart};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::tokenizer::PyTokenizer;

/// Formats of one model.
#[pyclass(frozen, name = "AnswerFormat", module = "baton._native")]
pub struct PyAnswerFormat(pub Arc<AnswerFormat>);

#[pymethods]
impl PyAnswerFormat {
    /// `template`: source of the chat template, if there is one. The parsers are names, `auto` or
    /// `none`. `model_type`: of config.json, for templates that name no format; `renders_tools`:
    /// tools reach the prompt. Raises ValueError for a name that there is not.
    #[new]
    #[pyo3(signature = (
        template, tokenizer, tool_parser, reasoning_parser, *, model_type="", renders_tools=false
    ))]
    fn new(
        template: Option<&str>,
        tokenizer: &PyTokenizer,
        tool_parser: &str,
        reasoning_parser: &str,
        model_type: &str,
        renders_tools: bool,
    ) -> PyResult<Self> {
        let choice = ParserChoice {
            tool_parser,
            reasoning_parser,
        };
        let checkpoint = CheckpointFacts {
            template,
            renders_tools,
            model_type,
        };
        let format = detect_format(choice, checkpoint, &*tokenizer.0);
        Ok(Self(Arc::new(format.map_err(PyValueError::new_err)?)))
    }

    /// Name of the format of tool calls; None: there is none.
    #[getter]
    fn tool_parser(&self) -> Option<&'static str> {
        self.0.tools().map(Into::into)
    }

    /// Name of the markers of the reasoning; None: there are none.
    #[getter]
    fn reasoning_parser(&self) -> Option<&'static str> {
        self.0.reasoning().map(Into::into)
    }

    /// Markers of the reasoning and of calls: text, role, and the id of the token that it is, if it
    /// is one.
    #[getter]
    fn markers(&self) -> Vec<(&'static str, &'static str, Option<u32>)> {
        let markers = self.0.table().markers().iter();
        markers
            .map(|marker| (marker.text, marker.role.into(), marker.id))
            .collect()
    }

    /// Text that ends a reasoning which is cut at its limit; None: there is no reasoning.
    #[getter]
    fn forced_reasoning_end(&self) -> Option<&'static str> {
        self.0.reasoning().map(ReasoningFamily::forced_end)
    }

    /// Newlines behind the reasoning that belong neither to it nor to the content, at most.
    #[getter]
    fn lead_newlines(&self) -> usize {
        self.0.reasoning().map_or(0, ReasoningFamily::lead_newlines)
    }

    /// Header and ends of a message of reasoning, where the reasoning is messages.
    #[getter]
    fn reasoning_message(&self) -> Option<(&'static str, Vec<&'static str>)> {
        let marks = self.0.reasoning()?.message_marks()?;
        Some((marks.header, marks.ends.to_vec()))
    }

    /// Header of the message with the content, where messages of reasoning stand in front of it.
    #[getter]
    fn content_header(&self) -> Option<&'static str> {
        self.0.reasoning()?.content_header()
    }

    /// State in which the answer to a prompt begins, and True within a line of its reasoning; None:
    /// the model's reasoning is not read between markers.
    fn reasoning_start(
        &self,
        tokenizer: &PyTokenizer,
        prompt: Vec<u32>,
    ) -> Option<(&'static str, bool)> {
        let start = self.0.reasoning_start(&prompt, &*tokenizer.0)?;
        let is_within_line = start == ReasoningStart::Inside(BlockText::PartialLine);
        Some((start.into(), is_within_line))
    }

    /// All that decides how answers are read.
    #[getter]
    fn canonical(&self) -> String {
        self.0.canonical()
    }
}
