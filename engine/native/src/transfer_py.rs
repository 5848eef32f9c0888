//! Python face of the `kv_transfer` crate: converts arguments, releases the GIL, calls the crate.

use std::sync::Arc;

use kv_transfer::pool::{KvPool, PoolError};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

fn pool_error(err: PoolError) -> PyErr {
    match err {
        PoolError::Create { .. } | PoolError::Sealing { .. } => PyOSError::new_err(err.to_string()),
        _ => PyValueError::new_err(err.to_string()),
    }
}

/// Memory of one rank's KV pages: page `p` is the bytes `[p * page_bytes, (p + 1) * page_bytes)`.
///
/// A sealed memfd: this process is the only one that can ever write it. `torch.frombuffer(pool.buffer(),
/// dtype=torch.uint8)` is zero-copy and writable, and the tensor keeps the pool alive. (The buffer protocol itself is not
/// part of the stable ABI of Python 3.10, hence `buffer()`; it returns a memoryview over a ctypes array over this memory.)
#[pyclass(frozen, name = "KvPool", module = "baton._native")]
pub struct PyKvPool {
    pool: Arc<KvPool>,
}

#[pymethods]
impl PyKvPool {
    /// `page_bytes` is a multiple of 8, at least 64. Raises ValueError for the shape, OSError when the kernel refuses.
    #[new]
    fn new(py: Python<'_>, num_pages: usize, page_bytes: usize) -> PyResult<Self> {
        let pool = py.detach(|| KvPool::create(num_pages, page_bytes)).map_err(pool_error)?;
        Ok(Self { pool: Arc::new(pool) })
    }

    #[getter]
    fn data_ptr(&self) -> usize {
        self.pool.data_ptr() as usize
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.pool.nbytes()
    }

    #[getter]
    fn num_pages(&self) -> usize {
        self.pool.num_pages()
    }

    #[getter]
    fn page_bytes(&self) -> usize {
        self.pool.page_bytes()
    }

    /// Writable memoryview of `nbytes` bytes; it (and everything made from it) keeps the pool alive.
    fn buffer<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let pool = &slf.get().pool;
        let array_type = py.import("ctypes")?.getattr("c_ubyte")?.mul(pool.nbytes())?;
        let array = array_type.call_method1("from_address", (pool.data_ptr() as usize,))?;
        array.setattr("_pool", slf)?;
        py.import("builtins")?.getattr("memoryview")?.call1((array,))
    }

    /// The pages (int32 little endian ids) get a new owner: their generation becomes the next odd number.
    fn begin_write(&self, pages: &[u8]) -> PyResult<()> {
        let pages = self.pool.check_pages(pages).map_err(pool_error)?;
        self.pool.begin_write(&pages);
        Ok(())
    }

    /// The pages' content is final: their generation becomes even. Idempotent.
    fn seal(&self, pages: &[u8]) -> PyResult<()> {
        let pages = self.pool.check_pages(pages).map_err(pool_error)?;
        self.pool.seal(&pages);
        Ok(())
    }

    /// The page's generation (even = final), for tests and for the ledger.
    fn generation(&self, page: u32) -> PyResult<u64> {
        let pages = self.pool.check_pages(&page.to_le_bytes()).map_err(pool_error)?;
        Ok(self.pool.generation(pages[0]))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.pool)
    }
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<PyKvPool>()
}
