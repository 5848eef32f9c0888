//! Requests of /v1/responses and /v1/messages as chat requests, and errors in Anthropic's form.

use baton_text::dialect::body::router_fields;
use baton_text::dialect::translate::chat_translation::{ChatTranslation, read_utf8};
use baton_text::dialect::translate::model_list::to_anthropic_models;
use baton_text::dialect::translate::{TranslatedRequest, messages, responses};
use baton_text::dialect::write;
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
    let translate: ChatTranslation = match form {
        "responses" => responses::to_chat,
        "messages" => messages::to_chat,
        "count_tokens" => messages::to_counted_chat,
        _ => {
            return Err(PyValueError::new_err(format!(
                "no request has the form {form}"
            )));
        }
    };
    let translated = py.detach(|| read_utf8(body).and_then(translate));
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

/// Models in Anthropic's form. `models`: a list of models in OpenAI's form, or one of them.
#[pyfunction]
fn anthropic_models<'py>(py: Python<'py>, models: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let models: serde_json::Value = serde_json::from_slice(models)
        .map_err(|err| PyValueError::new_err(format!("no JSON: {err}")))?;
    let body = to_anthropic_models(&models).to_string();
    Ok(PyBytes::new(py, body.as_bytes()))
}

/// True for a member of a body that only routers set: a client's reaches no worker through a router.
#[pyfunction]
fn is_router_field(name: &str) -> bool {
    router_fields::is_router_field(name)
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyTranslatedRequest>()?;
    m.add_function(wrap_pyfunction!(translate_request, m)?)?;
    m.add_function(wrap_pyfunction!(anthropic_error_body, m)?)?;
    m.add_function(wrap_pyfunction!(anthropic_models, m)?)?;
    m.add_function(wrap_pyfunction!(is_router_field, m)?)?;
    m.add("NO_STORED_RESPONSES", responses::NO_STORED_RESPONSES)
}
