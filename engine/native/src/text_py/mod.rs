//! Python face of the text layer (`baton_text`): chat templates and tokenizers. Every function that
//! works on a text releases the GIL.
//!
//! * `answers`: the running answers of a front, [`answers::PyAnswerTable`];
//! * `dialects`: requests of /v1/responses and /v1/messages as chat requests;
//! * `files`: tokenizer and template, as the files of a directory define them;
//! * `format`: how a model writes reasoning and tool calls, [`format::PyAnswerFormat`];
//! * `prompt_limit`: sizes of bodies that are refused before they are parsed, and prompts that are
//!   cut;
//! * `template`: [`template::PyChatTemplate`];
//! * `tokenizer`: [`tokenizer::PyTokenizer`].

mod answers;
mod dialects;
mod files;
mod format;
mod prompt_limit;
mod template;
mod tokenizer;

use baton_text::refusal::TextRefusal as Refusal;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

create_exception!(
    baton._native,
    TextRefusal,
    PyException,
    "Refusal of a request's text: code, message and the body's member."
);

fn refused(refusal: Refusal) -> PyErr {
    let code: &str = refusal.code.into_str();
    TextRefusal::new_err((code, refusal.message, refusal.param))
}

/// Ids as Python's `array("i", …)` takes them.
fn id_bytes<'py>(py: Python<'py>, ids: &[u32]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, size_of_val(ids), |out| {
        for (place, id) in out.chunks_exact_mut(size_of::<u32>()).zip(ids) {
            place.copy_from_slice(&id.to_ne_bytes());
        }
        Ok(())
    })
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("TextRefusal", m.py().get_type::<TextRefusal>())?;
    m.add_class::<files::PyTokenizerFiles>()?;
    m.add_class::<format::PyAnswerFormat>()?;
    m.add_function(wrap_pyfunction!(format::tool_formats, m)?)?;
    m.add_class::<template::PyChatTemplate>()?;
    m.add(
        "CHAT_FIELDS",
        baton_text::prompt::chat_member_names().to_vec(),
    )?;
    m.add_class::<tokenizer::PyTokenizer>()?;
    answers::register(m)?;
    dialects::register(m)?;
    prompt_limit::register_limits(m)
}
