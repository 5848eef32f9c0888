//! Sizes of bodies that are refused before they are parsed.

use baton_text::dialect::prompt_limit::{self, MAX_ENGINE_BODY_BYTES, PromptLimit};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Refusal of a JSON `body` that exceeds the limits, as code, message and member; None: it does
/// not. Raises ValueError for a body that is no JSON object. Releases the GIL.
#[pyfunction]
fn oversized_body(
    py: Python<'_>,
    path: &str,
    body: &[u8],
    max_tokens: u64,
    max_chars: u64,
) -> PyResult<Option<(&'static str, String, Option<&'static str>)>> {
    let Some(limit) = PromptLimit::of(Some(max_tokens), Some(max_chars)) else {
        return Ok(None);
    };
    let found = py.detach(|| prompt_limit::oversized_body(path, body, limit));
    let found = found.map_err(|err| PyValueError::new_err(err.to_string()))?;
    Ok(found.map(|err| (err.code(), err.to_string(), err.param())))
}

pub fn register_limits(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("MAX_ENGINE_BODY_BYTES", MAX_ENGINE_BODY_BYTES)?;
    m.add_function(wrap_pyfunction!(oversized_body, m)?)
}
