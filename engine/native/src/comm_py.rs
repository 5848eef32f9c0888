//! Communicators of the staged transports, made by Python objects: torch's gloo, or libnccl. Called
//! from the communicators' own threads; each call takes the GIL, which the Python side releases
//! while it waits.
//!
//! A backend has `name: str`, `works_on_device: bool`, `unique_id() -> bytes` and
//! `open(unique_id: bytes, rank: int, slabs: list[memoryview], open_timeout_secs: float, op_timeout_secs: float)`
//! (or tensors, where the pages are on a device and the backend works there), which gives an object
//! with `send(slab: int, nbytes: int)`, `recv(slab: int, nbytes: int)` and `abort()`. An exception
//! ends the communicator; its text is the reason.

use std::sync::Arc;

use kv_transfer::transport::communicator::{
    CommBackend, CommError, CommRank, CommTimeouts, Communicator, SlabRing, Slabs,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::device_py::PySlabs;

pub struct PyBackend {
    name: &'static str,
    works_on_device: bool,
    object: Py<PyAny>,
}

impl PyBackend {
    pub fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let name: String = object.getattr("name")?.extract()?;
        let name = ["gloo", "nccl"]
            .into_iter()
            .find(|known| *known == name)
            .ok_or_else(|| PyValueError::new_err(format!("{name:?} is no staged transport")))?;
        Ok(Self {
            name,
            works_on_device: object.getattr("works_on_device")?.extract()?,
            object: object.clone().unbind(),
        })
    }
}

fn failed(py: Python<'_>, err: &PyErr) -> CommError {
    let name = err
        .get_type(py)
        .name()
        .map_or_else(|_| "error".to_owned(), |name| name.to_string());
    CommError(format!("{name}: {}", err.value(py)))
}

/// Keeps the slabs alive as long as Python refers to them.
#[pyclass(frozen)]
struct SlabOwner {
    _ring: Arc<SlabRing>,
}

/// Writable memoryviews of the slabs, in order.
fn views<'py>(py: Python<'py>, ring: &Arc<SlabRing>) -> PyResult<Bound<'py, PyList>> {
    let owner = Bound::new(
        py,
        SlabOwner {
            _ring: ring.clone(),
        },
    )?;
    let array_type = py
        .import("ctypes")?
        .getattr("c_ubyte")?
        .mul(ring.slab_bytes())?;
    let memoryview = py.import("builtins")?.getattr("memoryview")?;
    let views = PyList::empty(py);
    for slab in 0..ring.slabs() {
        let array = array_type.call_method1("from_address", (ring.ptr(slab) as usize,))?;
        array.setattr("_slabs", &owner)?;
        views.append(memoryview.call1((array,))?)?;
    }
    Ok(views)
}

impl CommBackend for PyBackend {
    fn name(&self) -> &'static str {
        self.name
    }

    fn works_on_device(&self) -> bool {
        self.works_on_device
    }

    fn unique_id(&self) -> Result<Vec<u8>, CommError> {
        Python::attach(|py| {
            self.object
                .bind(py)
                .call_method0("unique_id")
                .and_then(|id| id.extract())
                .map_err(|err| failed(py, &err))
        })
    }

    fn open(
        &self,
        unique_id: &[u8],
        rank: CommRank,
        slabs: &Slabs,
        timeouts: CommTimeouts,
    ) -> Result<Arc<dyn Communicator>, CommError> {
        Python::attach(|py| {
            let open = || {
                let slabs = match slabs {
                    Slabs::Host(ring) => views(py, ring)?.into_any(),
                    Slabs::Device(slabs) => PySlabs::tensors(py, slabs)?,
                };
                let args = (
                    PyBytes::new(py, unique_id),
                    rank.number(),
                    slabs,
                    timeouts.open.as_secs_f64(),
                    timeouts.op.as_secs_f64(),
                );
                self.object.bind(py).call_method1("open", args)
            };
            let object = open().map_err(|err| failed(py, &err))?.unbind();
            Ok(Arc::new(PyCommunicator { object }) as Arc<dyn Communicator>)
        })
    }
}

struct PyCommunicator {
    object: Py<PyAny>,
}

impl PyCommunicator {
    fn call(&self, method: &str, slab: usize, bytes: usize) -> Result<(), CommError> {
        Python::attach(|py| {
            self.object
                .bind(py)
                .call_method1(method, (slab, bytes))
                .map(|_| ())
                .map_err(|err| failed(py, &err))
        })
    }
}

impl Communicator for PyCommunicator {
    fn send(&self, slab: usize, bytes: usize) -> Result<(), CommError> {
        self.call("send", slab, bytes)
    }

    fn recv(&self, slab: usize, bytes: usize) -> Result<(), CommError> {
        self.call("recv", slab, bytes)
    }

    fn abort(&self) -> Result<(), CommError> {
        Python::attach(|py| {
            self.object
                .bind(py)
                .call_method0("abort")
                .map(|_| ())
                .map_err(|err| failed(py, &err))
        })
    }
}
