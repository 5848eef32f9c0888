//! Log of the native threads of an engine: `baton_router::engine_logs`.

use std::sync::Once;

use baton_router::engine_logs::{EngineLogFormat, start_engine_logs};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

static START: Once = Once::new();

/// Write log lines of native threads as "text" or "json", those of `process` (empty: the front)
/// named. Later calls, and calls after a default was chosen, change nothing.
#[pyfunction]
fn start_logs(level: &str, log_format: &str, process: &str) -> PyResult<()> {
    let format: EngineLogFormat = log_format.parse().map_err(PyValueError::new_err)?;
    START.call_once(|| start_engine_logs(level, format, process));
    Ok(())
}

/// Text at level info, where no program has called `start_logs`.
pub(crate) fn start_default_logs() {
    START.call_once(|| start_engine_logs("info", EngineLogFormat::Text, ""));
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(start_logs, m)?)
}
