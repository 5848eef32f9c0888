//! Python face of the `kernels` crate: pointers as integers (`Tensor.data_ptr()`), sizes, flags.
//!
//! Nothing is checked here: `baton.runtime.attention.cpu` and `baton.runtime.ops_cpu` are the only callers, check shapes,
//! types and layout, and keep the tensors alive. Every function that computes releases the GIL.

use kernels::append::{LayerPages, NewTokens, kv_append};
use kernels::attention::{Attention, paged_attention};
use kernels::rows::Rows;
use kernels::{Dtype, isa, pool};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

fn dtype(bf16: bool) -> Dtype {
    if bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

/// The `len` numbers at address `at`.
///
/// # Safety
/// They exist, are aligned, and nobody writes them while the slice lives.
unsafe fn slice<'a, T>(at: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at as *const T, len) }
}

/// scalar, avx2, avx512 or avx512_bf16: the CPU's best level under the cap BATON_CPU_ISA. Raises ValueError for an unknown name there.
#[pyfunction]
fn cpu_isa() -> PyResult<&'static str> {
    isa::try_current()
        .map(|isa| isa.name())
        .map_err(|err| PyValueError::new_err(err.to_string()))
}

/// Use `n` threads in every kernel from now on, the caller's included; workers park when there is nothing to do.
#[pyfunction]
fn set_threads(py: Python<'_>, n: usize) -> PyResult<()> {
    py.detach(|| pool::set_threads(n))
        .map_err(|err| PyOSError::new_err(format!("cannot start {n} threads: {err}")))
}

#[pyfunction]
fn threads() -> usize {
    pool::threads()
}

/// The layer of a KV pool that a step works on: where it is and its shape. Made once per layer.
#[pyclass(frozen, module = "baton._native")]
struct KvLayer(LayerPages);

// SAFETY: a description of memory; what is done through the pointer is vouched for at each call.
unsafe impl Send for KvLayer {}
// SAFETY: as above, and it never changes.
unsafe impl Sync for KvLayer {}

#[pymethods]
impl KvLayer {
    /// `base`: address of slot 0's K in page 0. `page_stride`: elements from page to page.
    #[new]
    fn new(
        base: usize,
        bf16: bool,
        page_stride: usize,
        page_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Self {
        KvLayer(LayerPages {
            dtype: dtype(bf16),
            base: base as *mut u8,
            page_stride,
            page_size,
            kv_heads,
            head_dim,
        })
    }
}

/// The rows of one step: its index tensors, checked. The tensors must outlive it and stay as they are.
#[pyclass(frozen, module = "baton._native")]
struct KvRows(Rows<'static>);

#[pymethods]
impl KvRows {
    /// Addresses of int32 qo_indptr [rows + 1], kv_lens [rows], page_indptr [rows + 1], page_indices [pages] and int64
    /// slot_mapping [tokens]. Raises ValueError when an index leads out of a pool of num_pages pages of page_size slots.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "a flat record")]
    fn new(
        num_pages: usize,
        page_size: usize,
        rows: usize,
        tokens: usize,
        pages: usize,
        qo_indptr: usize,
        kv_lens: usize,
        page_indptr: usize,
        page_indices: usize,
        slot_mapping: usize,
    ) -> PyResult<Self> {
        // SAFETY: the Python side has checked types and lengths and keeps the tensors.
        let rows = unsafe {
            Rows {
                qo_indptr: slice(qo_indptr, rows + 1),
                kv_lens: slice(kv_lens, rows),
                page_indptr: slice(page_indptr, rows + 1),
                page_indices: slice(page_indices, pages),
                slot_mapping: slice(slot_mapping, tokens),
            }
        };
        rows.check(num_pages, page_size)
            .map_err(|err| PyValueError::new_err(err.to_string()))?;
        Ok(KvRows(rows))
    }
}

/// Write the step's k and v [tokens, kv_heads, head_dim] into the layer. Strides are elements from token to token.
#[pyfunction]
fn append(
    py: Python<'_>,
    layer: &KvLayer,
    rows: &KvRows,
    k: usize,
    k_stride: usize,
    v: usize,
    v_stride: usize,
) {
    py.detach(|| {
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        unsafe {
            let new = |data: usize, stride| NewTokens {
                data: data as *const u8,
                stride,
            };
            kv_append(
                &layer.0,
                new(k, k_stride),
                new(v, v_stride),
                rows.0.slot_mapping,
            );
        }
    });
}

/// Attend with q [tokens, heads, head_dim] into out [tokens, heads * head_dim]. `window`: 0 sees everything before.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn attend(
    py: Python<'_>,
    layer: &KvLayer,
    rows: &KvRows,
    q: usize,
    q_stride: usize,
    out: usize,
    heads: usize,
    scale: f32,
    window: usize,
) {
    py.detach(|| {
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        unsafe {
            paged_attention(&Attention {
                pages: layer.0,
                q: q as *const u8,
                q_stride,
                out: out as *mut u8,
                heads,
                rows: rows.0,
                scale,
                window,
            });
        }
    });
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<KvLayer>()?;
    m.add_class::<KvRows>()?;
    m.add_function(wrap_pyfunction!(cpu_isa, m)?)?;
    m.add_function(wrap_pyfunction!(set_threads, m)?)?;
    m.add_function(wrap_pyfunction!(threads, m)?)?;
    m.add_function(wrap_pyfunction!(append, m)?)?;
    m.add_function(wrap_pyfunction!(attend, m)?)
}
