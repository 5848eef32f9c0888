//! Sizes of bodies that are refused before they are parsed.

use baton_text::dialect::prompt_limit::{self, MAX_ENGINE_BODY_BYTES, PromptLimit};
use baton_text::prompt::{CUT_TEXT_CHARS, PromptCut, TruncationSide};
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

/// First token that stays of a prompt of `count`, and the one behind the last that does. `side`:
/// "left" or "right", where longer prompts lose tokens. Raises ValueError for another one.
#[pyfunction]
fn kept_tokens(count: usize, tokens: usize, side: &str) -> PyResult<(usize, usize)> {
    let side = match side {
        "left" => TruncationSide::Left,
        "right" => TruncationSide::Right,
        _ => {
            return Err(PyValueError::new_err(format!(
                "no side of a prompt: {side}"
            )));
        }
    };
    let kept = PromptCut { tokens, side }.kept(count);
    Ok((kept.start, kept.end))
}

pub fn register_limits(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("MAX_ENGINE_BODY_BYTES", MAX_ENGINE_BODY_BYTES)?;
    m.add("CUT_TEXT_CHARS", CUT_TEXT_CHARS)?;
    m.add_function(wrap_pyfunction!(kept_tokens, m)?)?;
    m.add_function(wrap_pyfunction!(oversized_body, m)?)
}
