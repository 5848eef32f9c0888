//! `baton._native`: PyO3 bindings of the Rust crates. No logic lives here: each module converts
//! arguments, releases the GIL and calls its crate.

use pyo3::prelude::*;

/// Memory of Rust code, that of `baton router` above all: docs/decisions/0015. Python and torch keep
/// their own allocators.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

mod comm_py;
mod device_py;
mod drafts_py;
mod kernels_py;
mod logs_py;
mod recurrent_py;
mod router_py;
mod text_py;
mod trace_py;
mod transfer_py;

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    drafts_py::register(m)?;
    kernels_py::register(m)?;
    logs_py::register(m)?;
    recurrent_py::register(m)?;
    router_py::register(m)?;
    text_py::register(m)?;
    trace_py::register(m)?;
    transfer_py::register(m)?;
    Ok(())
}
