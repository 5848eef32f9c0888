//! How a model writes reasoning and tool calls.

use std::sync::Arc;

use baton_text::stream::answer::{AnswerFormat, ParserChoice, detect_format};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::tokenizer::PyTokenizer;

/// Formats of one model.
#[pyclass(frozen, name = "AnswerFormat", module = "baton._native")]
pub struct PyAnswerFormat(pub Arc<AnswerFormat>);

#[pymethods]
impl PyAnswerFormat {
    /// `template`: source of the chat template, if there is one. The parsers are names, `auto` or
    /// `none`. Raises ValueError for a name that there is not.
    #[new]
    fn new(
        template: Option<&str>,
        tokenizer: &PyTokenizer,
        tool_parser: &str,
        reasoning_parser: &str,
    ) -> PyResult<Self> {
        let choice = ParserChoice {
            tool_parser,
            reasoning_parser,
        };
        let format = detect_format(choice, template, &*tokenizer.0);
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

    /// All that decides how answers are read.
    #[getter]
    fn canonical(&self) -> String {
        self.0.canonical()
    }
}
