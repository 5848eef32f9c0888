//! Chat templates.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_text::prompt::{PromptRules, encode_chat, render_chat};
use baton_text::refusal::TextRefusal;
use baton_text::template::{ChatTemplate, RenderOptions, json_text, members_of, read_json};
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
    /// `special_tokens`: by name, as the template reads them.
    #[new]
    fn new(source: Option<&str>, special_tokens: BTreeMap<String, String>) -> Self {
        Self(Arc::new(ChatTemplate::new(
            source,
            special_tokens,
            Zoned::now,
        )))
    }

    /// Form in which the template takes messages: `name=value` of each capability.
    #[getter]
    fn caps(&self) -> String {
        self.0.caps().canonical()
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

    /// JSON of a body's `messages`, checked, in the form that the template takes. Raises
    /// TextRefusal.
    fn normalize<'py>(&self, py: Python<'py>, messages: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let messages = json_of(messages)?;
        let normalized = py.detach(|| {
            let messages = read_json(messages).map_err(unreadable)?;
            let messages = self.0.normalize(&messages)?;
            json_text(&messages.into()).map_err(|err| unreadable(err.to_string()))
        });
        Ok(PyBytes::new(py, normalized.map_err(refused)?.as_bytes()))
    }

    /// Text of a body's `messages`, with the JSON object `variables`. Raises TextRefusal.
    #[pyo3(signature = (messages, variables, *, add_generation_prompt, continue_final_message))]
    fn render(
        &self,
        py: Python<'_>,
        messages: &[u8],
        variables: &[u8],
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> PyResult<String> {
        let messages = json_of(messages)?;
        let variables = json_of(variables)?;
        py.detach(|| {
            let options = RenderOptions {
                add_generation_prompt,
                continue_final_message,
                variables: read_variables(variables)?,
            };
            render_chat(&self.0, messages, options)
        })
        .map_err(refused)
    }

    /// Ids of the text that `render` makes, as Python's `array("i", …)` takes them. Raises
    /// TextRefusal. `is_bounded`: more ids than `context_length` are refused too.
    #[pyo3(signature = (
        tokenizer, messages, variables, *, add_generation_prompt, continue_final_message, add_special_tokens,
        context_length, is_bounded
    ))]
    #[allow(clippy::too_many_arguments)] // keywords in Python
    fn encode<'py>(
        &self,
        py: Python<'py>,
        tokenizer: &PyTokenizer,
        messages: &[u8],
        variables: &[u8],
        add_generation_prompt: bool,
        continue_final_message: bool,
        add_special_tokens: bool,
        context_length: usize,
        is_bounded: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let messages = json_of(messages)?;
        let variables = json_of(variables)?;
        let rules = PromptRules {
            add_special_tokens,
            context_length,
            is_bounded,
            param: "messages",
        };
        let ids = py.detach(|| {
            let options = RenderOptions {
                add_generation_prompt,
                continue_final_message,
                variables: read_variables(variables)?,
            };
            encode_chat(&self.0, &*tokenizer.0, messages, options, rules)
        });
        id_bytes(py, &ids.map_err(refused)?)
    }
}

fn json_of(bytes: &[u8]) -> PyResult<&str> {
    std::str::from_utf8(bytes).map_err(|err| PyValueError::new_err(err.to_string()))
}

fn unreadable(err: String) -> TextRefusal {
    TextRefusal::invalid("messages", format!("messages cannot be read: {err}"))
}

fn read_variables(json: &str) -> Result<Vec<(String, minijinja::Value)>, TextRefusal> {
    let refusal = |problem: &str| {
        let param = "chat_template_kwargs";
        TextRefusal::invalid(param, format!("{param} {problem}"))
    };
    let value = read_json(json).map_err(|err| refusal(&format!("cannot be read: {err}")))?;
    members_of(&value).ok_or_else(|| refusal("must be an object"))
}
