//! A pool's pages on a device, moved by a Python object
//! (`baton.layers.cuda.device_pages.DevicePages`). Called from the transfer's own threads; each
//! call takes the GIL, which the Python side releases while it waits for the device.
//!
//! Page ids are int32, little endian. An exception is the reason why something failed.

use std::any::Any;
use std::sync::Arc;

use kv_transfer::pool::device::{DeviceError, DevicePages, DeviceSlabs, PeerPages};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// PyBUF_WRITE of CPython's headers, which pyo3 does not name.
const WRITABLE: std::ffi::c_int = 0x200;

pub struct PyDevicePages(pub Py<PyAny>);

fn failed(py: Python<'_>, err: &PyErr) -> DeviceError {
    let name = err
        .get_type(py)
        .name()
        .map_or_else(|_| "error".to_owned(), |name| name.to_string());
    DeviceError(format!("{name}: {}", err.value(py)))
}

/// Run `call`, an exception being the error.
fn attached<T>(call: impl for<'py> FnOnce(Python<'py>) -> PyResult<T>) -> Result<T, DeviceError> {
    Python::attach(|py| call(py).map_err(|err| failed(py, &err)))
}

fn ids<'py>(py: Python<'py>, pages: &[u32]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    PyBytes::new(py, &bytes)
}

/// uint64 each, little endian.
fn checksums(made: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let bytes: Vec<u8> = made.extract()?;
    let (sums, rest) = bytes.as_chunks::<8>();
    if rest.is_empty() {
        return Ok(sums.iter().map(|&sum| u64::from_le_bytes(sum)).collect());
    }
    let why = format!("checksums of {} bytes, no multiple of 8", bytes.len());
    Err(PyValueError::new_err(why))
}

/// A writable memoryview of `memory`, which must not be used after it.
fn view<'py>(py: Python<'py>, memory: &mut [u8]) -> PyResult<Bound<'py, PyAny>> {
    let start = memory.as_mut_ptr().cast();
    let len = memory.len() as isize;
    // SAFETY: the range is the caller's, and it releases the view before it gives the range up.
    unsafe {
        let view = pyo3::ffi::PyMemoryView_FromMemory(start, len, WRITABLE);
        Bound::from_owned_ptr_or_err(py, view)
    }
}

/// Call `method` with a view of `memory` that ends with the call.
fn with_view(
    py: Python<'_>,
    memory: &mut [u8],
    call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<()>,
) -> PyResult<()> {
    let view = view(py, memory)?;
    let done = call(&view);
    view.call_method0("release")?;
    done
}

impl DevicePages for PyDevicePages {
    fn gather(&self, pages: &[u32], to: &mut [u8]) -> Result<(), DeviceError> {
        attached(|py| {
            with_view(py, to, |to| {
                self.0
                    .bind(py)
                    .call_method1("gather", (ids(py, pages), to))
                    .map(drop)
            })
        })
    }

    fn scatter(&self, from: &mut [u8], pages: &[u32]) -> Result<(), DeviceError> {
        attached(|py| {
            with_view(py, from, |from| {
                self.0
                    .bind(py)
                    .call_method1("scatter", (from, ids(py, pages)))
                    .map(drop)
            })
        })
    }

    fn sums(&self, pages: &[u32]) -> Result<Vec<u64>, DeviceError> {
        attached(|py| checksums(&self.0.bind(py).call_method1("sums", (ids(py, pages),))?))
    }

    fn pin(&self, memory: &mut [u8]) -> Result<(), DeviceError> {
        attached(|py| {
            with_view(py, memory, |view| {
                self.0.bind(py).call_method1("pin", (view,)).map(drop)
            })
        })
    }

    fn unpin(&self, memory: &mut [u8]) -> Result<(), DeviceError> {
        attached(|py| {
            with_view(py, memory, |view| {
                self.0.bind(py).call_method1("unpin", (view,)).map(drop)
            })
        })
    }

    fn slabs(&self, slabs: usize, slab_bytes: usize) -> Result<Arc<dyn DeviceSlabs>, DeviceError> {
        attached(|py| {
            let slabs = self
                .0
                .bind(py)
                .call_method1("slabs", (slabs, slab_bytes))?
                .unbind();
            Ok(Arc::new(PySlabs(slabs)) as Arc<dyn DeviceSlabs>)
        })
    }

    fn handle(&self) -> Result<Vec<u8>, DeviceError> {
        attached(|py| self.0.bind(py).call_method0("handle")?.extract())
    }

    fn open(&self, handle: &[u8], num_pages: usize) -> Result<Arc<dyn PeerPages>, DeviceError> {
        attached(|py| {
            let args = (PyBytes::new(py, handle), num_pages);
            let opened = self.0.bind(py).call_method1("open", args)?.unbind();
            Ok(Arc::new(PyPeerPages(opened)) as Arc<dyn PeerPages>)
        })
    }
}

/// `baton.layers.cuda.device_pages.DeviceSlabs`.
pub struct PySlabs(Py<PyAny>);

impl PySlabs {
    /// The slabs' `tensors`, which a communicator sends from and receives into.
    pub fn tensors<'py>(
        py: Python<'py>,
        slabs: &Arc<dyn DeviceSlabs>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let any: &dyn Any = slabs.as_ref();
        match any.downcast_ref::<PySlabs>() {
            Some(slabs) => slabs.0.bind(py).getattr("tensors"),
            None => Err(PyValueError::new_err("slabs that Python did not make")),
        }
    }
}

impl DeviceSlabs for PySlabs {
    fn gather(&self, pages: &[u32], slab: usize) -> Result<(), DeviceError> {
        attached(|py| {
            self.0
                .bind(py)
                .call_method1("gather", (ids(py, pages), slab))
                .map(drop)
        })
    }

    fn scatter(&self, slab: usize, pages: &[u32]) -> Result<(), DeviceError> {
        attached(|py| {
            self.0
                .bind(py)
                .call_method1("scatter", (slab, ids(py, pages)))
                .map(drop)
        })
    }
}

/// `baton.layers.cuda.device_pages.PeerPages`.
struct PyPeerPages(Py<PyAny>);

impl PeerPages for PyPeerPages {
    fn copy(&self, src: &[u32], dst: &[u32]) -> Result<Vec<u64>, DeviceError> {
        attached(|py| {
            let args = (ids(py, src), ids(py, dst));
            checksums(&self.0.bind(py).call_method1("copy", args)?)
        })
    }

    fn close(&self) -> Result<(), DeviceError> {
        attached(|py| self.0.bind(py).call_method0("close").map(drop))
    }
}
