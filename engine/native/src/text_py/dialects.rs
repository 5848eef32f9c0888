//! Requests of /v1/responses and /v1/messages as chat requests, and errors in Anthropic's form.

use baton_text::dialect::translate::{TranslatedRequest, messages, responses};
use baton_text::dialect::write;
use baton_text::refusal::{RefusalCode, TextRefusal};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::refused;

/// A client's request as a chat request.
#[pyclass(frozen, name = "TranslatedRequest", module = "baton._native")]
struct PyTranslatedRequest(TranslatedRequest);

#[pymethods]
impl PyTranslatedRequest {
    /// Body of /v1/chat/completions.
    #[getter]
    fn chat<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.chat.as_bytes())
    }

    /// Facts that the answer's writer needs, as AnswerSpec takes them.
    #[getter]
    fn facts(&self) -> PyResult<String> {
        serde_json::to_string(&self.0.facts).map_err(|err| PyValueError::new_err(err.to_string()))
    }

    /// Members of the client's body that have no effect.
    #[getter]
    fn ignored(&self) -> Vec<String> {
        self.0.ignored.clone()
    }

    /// The client's name of a member of `chat`, or of a place within one.
    fn client_param(&self, chat: &str) -> String {
        self.0.client_param(chat)
    }
}

/// A client's body as a chat request. `form`: responses, messages, or count_tokens for a request that
/// counts the tokens of a message. Raises TextRefusal and ValueError. Releases the GIL.
#[pyfunction]
fn translate_request(py: Python<'_>, form: &str, body: &[u8]) -> PyResult<PyTranslatedRequest> {
    let translate: fn(&str) -> Result<TranslatedRequest, TextRefusal> = match form {
        "responses" => responses::to_chat,
        "messages" => messages::to_chat,
        "count_tokens" => messages::to_counted_chat,
        _ => {
            return Err(PyValueError::new_err(format!(
                "no request has the form {form}"
            )));
        }
    };
    let translated = py.detach(|| {
        let text = std::str::from_utf8(body).map_err(|err| {
            let message = format!("the body is not UTF-8: {err}");
            TextRefusal::new(RefusalCode::InvalidJson, message, "")
        })?;
        translate(text)
    });
    translated.map(PyTranslatedRequest).map_err(refused)
}

/// Body of an error response in Anthropic's form. `error`: `{"error":{…}}`.
#[pyfunction]
fn anthropic_error_body<'py>(
    py: Python<'py>,
    error: &[u8],
    request_id: &str,
) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &write::anthropic_error_body(error, request_id))
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyTranslatedRequest>()?;
    m.add_function(wrap_pyfunction!(translate_request, m)?)?;
    m.add_function(wrap_pyfunction!(anthropic_error_body, m)?)
}
