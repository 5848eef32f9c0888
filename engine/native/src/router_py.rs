//! Python face of the router: `baton router …` passes argv through, so no flag is written twice. What
//! routers and engines have in common, and the router defines, is exported here.

use pyo3::prelude::*;

/// Run the router with `argv` (program name first) until it stops; returns the exit code.
#[pyfunction]
fn router_main(py: Python<'_>, argv: Vec<String>) -> i32 {
    py.detach(|| baton_router::run(argv))
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("CHANGING_PATHS", baton_router::CHANGING_PATHS)?;
    m.add_function(wrap_pyfunction!(router_main, m)?)
}
