//! How a model writes reasoning and tool calls.

use std::str::FromStr;
use std::sync::Arc;

use baton_text::stream::answer::{AnswerFormat, CheckpointFacts, ParserChoice, detect_format};
use baton_text::stream::reasoning::{BlockText, ReasoningFamily, ReasoningStart};
use baton_text::stream::tools::{UnknownToolCalls, named_formats};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::tokenizer::PyTokenizer;

/// Formats of one model.
#[pyclass(frozen, name = "AnswerFormat", module = "baton._native")]
pub struct PyAnswerFormat(pub Arc<AnswerFormat>);

#[pymethods]
impl PyAnswerFormat {
    /// `template`: source of the chat template, if there is one. The parsers are names, `auto` or
    /// `none`. `model_type`: of config.json, for templates that name no format; `renders_tools`:
    /// tools reach the prompt; `unknown_tool_calls`: text or forward. Raises ValueError for a name that there is not.
    #[new]
    #[pyo3(signature = (
        template, tokenizer, tool_parser, reasoning_parser, *, model_type="", renders_tools=false,
        unknown_tool_calls="text"
    ))]
    fn new(
        template: Option<&str>,
        tokenizer: &PyTokenizer,
        tool_parser: &str,
        reasoning_parser: &str,
        model_type: &str,
        renders_tools: bool,
        unknown_tool_calls: &str,
    ) -> PyResult<Self> {
        let unknown_calls = UnknownToolCalls::from_str(unknown_tool_calls)
            .map_err(|_| PyValueError::new_err(format!("{unknown_tool_calls}: text or forward")))?;
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
        let format = format.map_err(PyValueError::new_err)?;
        Ok(Self(Arc::new(format.with_unknown_calls(unknown_calls))))
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

    /// State in which the answer to a prompt begins, and True if its reasoning has text there; None:
    /// the model's reasoning is not read between markers.
    fn reasoning_start(
        &self,
        tokenizer: &PyTokenizer,
        prompt: Vec<u32>,
    ) -> Option<(&'static str, bool)> {
        let start = self.0.reasoning_start(&prompt, &*tokenizer.0)?;
        let has_text = start == ReasoningStart::Inside(BlockText::Begun);
        Some((start.into(), has_text))
    }

    /// All that decides how answers are read.
    #[getter]
    fn canonical(&self) -> String {
        self.0.canonical()
    }
}

/// The table of the formats of tool calls, by the names of --tool-parser, as JSON.
#[pyfunction]
pub fn tool_formats(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    let table = serde_json::to_vec(&named_formats());
    let table = table.map_err(|err| PyValueError::new_err(err.to_string()))?;
    Ok(PyBytes::new(py, &table))
}
