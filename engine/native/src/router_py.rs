//! Python face of the router: `baton router …` passes argv through, so no flag is written twice. What
//! routers and engines have in common, and the router defines, is exported here.

use baton_text::dialect::body::router_fields::READY_PEERS_HEADER;
use baton_text::dialect::resume::EMIT_TOKENS_HEADER;
use kv_transfer::bootstrap::AUTH_HEADER;
use pyo3::prelude::*;

/// Run the router with `argv` (program name first) until it stops; returns the exit code.
#[pyfunction]
fn router_main(py: Python<'_>, argv: Vec<String>) -> i32 {
    py.detach(|| baton_router::run(argv))
}

/// Adds a module of names to `m`.
fn add_names(m: &Bound<'_, PyModule>, module: &str, names: &[(&str, &str)]) -> PyResult<()> {
    let group = PyModule::new(m.py(), module)?;
    for (name, text) in names {
        group.add(name, text)?;
    }
    m.add_submodule(&group)
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("CHANGING_PATHS", baton_router::CHANGING_PATHS)?;
    let of_requests = [
        ("AUTH", AUTH_HEADER),
        ("EMIT_TOKENS", EMIT_TOKENS_HEADER),
        ("READY_PEERS", READY_PEERS_HEADER),
    ];
    let headers = [&of_requests, baton_router::headers::ALL].concat();
    add_names(m, "headers", &headers)?;
    add_names(m, "load_keys", baton_router::load_keys::ALL)?;
    add_names(m, "stage_keys", baton_router::stage_keys::ALL)?;
    m.add_function(wrap_pyfunction!(router_main, m)?)
}
