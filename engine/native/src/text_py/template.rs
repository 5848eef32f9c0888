//! Chat templates.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_text::prompt::{ChatPrompt, ContextLimit, encode_chat};
use baton_text::refusal::TextRefusal;
use baton_text::template::{ChatTemplate, UserTextGuard, json_text};
use jiff::Zoned;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::tokenizer::PyTokenizer;
use super::{id_bytes, refused};

/// A compiled template; `source` None: the checkpoint has none, and every render is refused.
#[pyclass(frozen, name = "ChatTemplate", module = "baton._native")]
pub struct PyChatTemplate(pub Arc<ChatTemplate>);

#[pymethods]
impl PyChatTemplate {
    /// `special_tokens`: by name, as the template reads them. `control_tokens`: those that the
    /// texts of users do not contain.
    #[new]
    #[pyo3(signature = (source, special_tokens, control_tokens=Vec::new()))]
    fn new(
        source: Option<&str>,
        special_tokens: BTreeMap<String, String>,
        control_tokens: Vec<String>,
    ) -> PyResult<Self> {
        let guard = UserTextGuard::new(&control_tokens).map_err(PyValueError::new_err)?;
        let template = ChatTemplate::new(source, special_tokens, Zoned::now);
        Ok(Self(Arc::new(template.with_guard(guard))))
    }

    /// Form in which the template takes messages: `name=value` of each capability.
    #[getter]
    fn caps(&self) -> String {
        self.0.caps().canonical()
    }

    /// Tools reach the prompts that the template renders.
    #[getter]
    fn renders_tools(&self) -> bool {
        self.0.caps().renders_tools
    }

    /// Reason why no conversation can be rendered; None: it can.
    #[getter]
    fn defect(&self) -> Option<&str> {
        self.0.defect()
    }

    /// Reason why the template fails on a plain conversation, with the line; None: it does not.
    #[getter]
    fn warning(&self) -> Option<&str> {
        self.0.warning()
    }

    /// JSON of the `messages` of a chat body, in the form that the template takes. Raises
    /// TextRefusal.
    fn normalize<'py>(&self, py: Python<'py>, chat: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let normalized = py.detach(|| {
            let messages = ChatPrompt::read(chat)?.normalize(&self.0)?;
            json_text(&messages.into())
                .map_err(|err| TextRefusal::invalid("messages", err.to_string()))
        });
        Ok(PyBytes::new(py, normalized.map_err(refused)?.as_bytes()))
    }

    /// Refuse a chat body that `render` would refuse, but for the template's own refusals. Raises
    /// TextRefusal.
    fn check(&self, py: Python<'_>, chat: &[u8]) -> PyResult<()> {
        py.detach(|| ChatPrompt::read(chat)?.check(&self.0))
            .map_err(refused)
    }

    /// Text of a chat body's prompt. Raises TextRefusal.
    fn render(&self, py: Python<'_>, chat: &[u8]) -> PyResult<String> {
        let rendered = py.detach(|| ChatPrompt::read(chat)?.render(&self.0));
        let text = rendered.map_err(refused)?;
        Ok(self.0.guard().unescape(&text).into_owned())
    }

    /// Ids of the text that `render` makes, as Python's `array("i", …)` takes them. Raises
    /// TextRefusal. `is_bounded`: more ids than `context_length` are refused too.
    #[pyo3(signature = (tokenizer, chat, *, context_length, is_bounded))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        tokenizer: &PyTokenizer,
        chat: &[u8],
        context_length: usize,
        is_bounded: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let limit = ContextLimit {
            context_length,
            is_bounded,
        };
        let ids = py.detach(|| {
            let chat = ChatPrompt::read(chat)?;
            encode_chat(&self.0, &*tokenizer.0, &chat, limit)
        });
        id_bytes(py, &ids.map_err(refused)?)
    }
}
