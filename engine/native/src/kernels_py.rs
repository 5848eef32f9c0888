//! Python face of the `kernels` crate: pointers as integers (`Tensor.data_ptr()`), sizes, flags.
//!
//! Nothing is checked here: `baton.layers.attention.cpu` and `baton.layers.ops_cpu` are the only
//! callers, check shapes, types and layout, and keep the tensors alive. Every function that
//! computes releases the GIL.

use kernels::attention::append::{LayerPages, NewTokens, kv_append};
use kernels::attention::codes::KvScales;
use kernels::attention::latent::{LatentAttention, LatentPages, latent_append, latent_attention};
use kernels::attention::{PagedAttention, paged_attention};
use kernels::elementwise::{
    self, Activation, GatedProduct, HeadVectors, RmsNorm, RotaryEmbedding, RotaryPairs, Sigmoid,
};
use kernels::experts::choice::{ChoiceRule, ExpertChoice, GroupRank, Scoring, choose_experts};
use kernels::experts::{self, ExpertForm, ExpertMatrix, ExpertStep};
use kernels::linear::{
    self, CodeType, CodedMatrix, HeadProducts, LinearProduct, Weight, WeightShape,
};
use kernels::rows::SequenceRows;
use kernels::{Dtype, isa, pool};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;

pub(crate) fn dtype(bf16: bool) -> Dtype {
    if bf16 { Dtype::Bf16 } else { Dtype::F32 }
}

/// The `len` numbers at address `at`.
///
/// # Safety
/// They exist, are aligned, and are not written while the slice lives.
pub(crate) unsafe fn slice<'a, T>(at: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(at as *const T, len) }
}

/// scalar, avx2, avx512 or avx512_bf16: the CPU's best level under the cap BATON_CPU_ISA. Raises
/// ValueError for an unknown name there.
#[pyfunction]
fn cpu_isa() -> PyResult<&'static str> {
    isa::try_current()
        .map(|isa| isa.name())
        .map_err(|err| PyValueError::new_err(err.to_string()))
}

/// Use `n` threads in every kernel from now on, the caller's included; workers park when there is
/// nothing to do.
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
    /// `base`: address of slot 0's K in page 0. `bf16`: type of a step, else float32. `scales`: of
    /// K and V, where the pages hold FP8 codes. `page_stride`: elements from page to page.
    #[new]
    fn new(
        base: usize,
        bf16: bool,
        scales: Option<(f32, f32)>,
        page_stride: usize,
        page_size: usize,
        kv_heads: usize,
        head_dim: usize,
    ) -> Self {
        KvLayer(LayerPages {
            dtype: dtype(bf16),
            scales: scales.map(|(key, value)| KvScales { key, value }),
            base: base as *mut u8,
            page_stride,
            page_size,
            kv_heads,
            head_dim,
        })
    }
}

/// The layer of a pool of latents that a step works on. Made once per layer.
#[pyclass(frozen, module = "baton._native")]
struct LatentLayer(LatentPages);

// SAFETY: as for `KvLayer`.
unsafe impl Send for LatentLayer {}
// SAFETY: as above.
unsafe impl Sync for LatentLayer {}

#[pymethods]
impl LatentLayer {
    /// `base`: address of slot 0 in page 0. `page_stride`: elements from page to page.
    #[new]
    fn new(
        base: usize,
        bf16: bool,
        page_stride: usize,
        page_size: usize,
        latent_dim: usize,
        key_dim: usize,
    ) -> Self {
        LatentLayer(LatentPages {
            dtype: dtype(bf16),
            base: base as *mut u8,
            page_stride,
            page_size,
            latent_dim,
            key_dim,
        })
    }
}

/// The rows of one step: its index tensors, checked. The tensors must outlive it and stay as they
/// are.
#[pyclass(frozen, module = "baton._native")]
struct KvRows(SequenceRows<'static>);

#[pymethods]
impl KvRows {
    /// Addresses of int32 qo_indptr [rows + 1], kv_lens [rows], page_indptr [rows + 1],
    /// page_indices [pages] and int64 slot_mapping [tokens]. Raises ValueError when an index leads
    /// out of a pool of num_pages pages of page_size slots.
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
            SequenceRows {
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

/// Write the step's k and v [tokens, kv_heads, head_dim] into the layer. Strides are elements from
/// token to token.
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

/// Attend with q [tokens, heads, head_dim] into out [tokens, heads * head_dim]. `window`: 0 sees
/// everything before, as `chunk` does. `soft_cap`: 0 leaves the scores. `sinks`: float32 [heads],
/// or 0.
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
    chunk: usize,
    soft_cap: f32,
    sinks: usize,
) {
    py.detach(|| {
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        unsafe {
            paged_attention(&PagedAttention {
                pages: layer.0,
                q: q as *const u8,
                q_stride,
                out: out as *mut u8,
                heads,
                rows: rows.0,
                scale,
                window,
                chunk,
                soft_cap,
                sinks: sinks as *const f32,
            });
        }
    });
}

/// Write the step's latents [tokens, latent_dim] and rotated keys [tokens, key_dim] into the layer.
/// Strides are elements from token to token.
#[pyfunction]
fn append_latents(
    py: Python<'_>,
    layer: &LatentLayer,
    rows: &KvRows,
    latents: usize,
    latent_stride: usize,
    keys: usize,
    key_stride: usize,
) {
    py.detach(|| {
        let new = |data: usize, stride| NewTokens {
            data: data as *const u8,
            stride,
        };
        let latents = new(latents, latent_stride);
        let keys = new(keys, key_stride);
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        unsafe { latent_append(&layer.0, latents, keys, rows.0.slot_mapping) };
    });
}

/// Attend with q [tokens, heads, latent_dim + key_dim] into out [tokens, heads, latent_dim].
#[pyfunction]
fn attend_latents(
    py: Python<'_>,
    layer: &LatentLayer,
    rows: &KvRows,
    q: usize,
    out: usize,
    heads: usize,
    scale: f32,
) {
    py.detach(|| {
        let call = LatentAttention {
            pages: layer.0,
            q: q as *const u8,
            out: out as *mut u8,
            heads,
            rows: rows.0,
            scale,
        };
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        unsafe { latent_attention(&call) };
    });
}

/// Vectors [outer, inner, len] at an address: (address, outer, inner, outer_stride, inner_stride,
/// len), in elements.
type Strided = (usize, usize, usize, usize, usize, usize);

fn vectors((data, outer, inner, outer_stride, inner_stride, len): Strided) -> HeadVectors {
    HeadVectors {
        data: data as *mut u8,
        outer,
        inner,
        outer_stride,
        inner_stride,
        len,
    }
}

/// out = x / rms(x) * weight; with residual != 0 first residual += x, and the norm is of that. out
/// may be x. The weight is float32 if `f32_weight`.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn rms_norm(
    py: Python<'_>,
    bf16: bool,
    x: Strided,
    residual: usize,
    weight: usize,
    f32_weight: bool,
    eps: f32,
    out: usize,
) {
    let norm = RmsNorm {
        dtype: dtype(bf16),
        x: vectors(x),
        residual: residual as *mut u8,
        weight: weight as *const u8,
        has_f32_weight: f32_weight,
        eps,
        out: out as *mut u8,
    };
    let norm = Shared(norm);
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    py.detach(|| unsafe { elementwise::rms_norm(norm.get()) });
}

/// Rotate q and k [tokens, heads, dim] in place: element i with i + dim / 2, or neighbors if
/// `interleaved`. positions: int64 [tokens] of q and k; cos, sin: float32 [table, dim / 2]. Raises
/// ValueError when a position has no row in the tables.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn rope(
    py: Python<'_>,
    bf16: bool,
    interleaved: bool,
    q: Strided,
    k: Strided,
    positions: usize,
    cos: usize,
    sin: usize,
    table: usize,
) -> PyResult<()> {
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    let positions = unsafe { slice::<i64>(positions, q.1) };
    if let Some(bad) = positions.iter().find(|&&p| p < 0 || p as usize >= table) {
        return Err(PyValueError::new_err(format!(
            "position {bad} is outside the rope table of {table} rows"
        )));
    }
    let pairs = if interleaved {
        RotaryPairs::Interleaved
    } else {
        RotaryPairs::Halves
    };
    let turn = |x| RotaryEmbedding {
        dtype: dtype(bf16),
        pairs,
        x: vectors(x),
        positions,
        cos: cos as *const f32,
        sin: sin as *const f32,
    };
    let both = Shared([turn(q), turn(k)]);
    py.detach(|| {
        for x in both.get() {
            // SAFETY: as above.
            unsafe { elementwise::rope(x) }
        }
    });
    Ok(())
}

/// out [rows, len] = activation(gate) * up of gate_up [rows, 2 * len], rows `stride` elements
/// apart. The activation is GELU in its tanh form if `gelu`, else SiLU.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn multiply_gated(
    py: Python<'_>,
    bf16: bool,
    gelu: bool,
    gate_up: usize,
    stride: usize,
    rows: usize,
    len: usize,
    out: usize,
) {
    let activation = if gelu {
        Activation::GeluTanh
    } else {
        Activation::Silu
    };
    multiply_activated(py, bf16, activation, gate_up, stride, rows, len, out);
}

/// As `multiply_gated`, with the clamped activation of gpt-oss.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn multiply_clamped(
    py: Python<'_>,
    bf16: bool,
    gain: f32,
    limit: f32,
    gate_up: usize,
    stride: usize,
    rows: usize,
    len: usize,
    out: usize,
) {
    let activation = Activation::ClampedSilu { gain, limit };
    multiply_activated(py, bf16, activation, gate_up, stride, rows, len, out);
}

#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn multiply_activated(
    py: Python<'_>,
    bf16: bool,
    activation: Activation,
    gate_up: usize,
    stride: usize,
    rows: usize,
    len: usize,
    out: usize,
) {
    let gated = Shared(GatedProduct {
        dtype: dtype(bf16),
        activation,
        gate_up: gate_up as *const u8,
        stride,
        rows,
        len,
        out: out as *mut u8,
    });
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    py.detach(|| unsafe { elementwise::multiply_gated(gated.get()) });
}

/// out = 1 / (1 + e^-x) for x [rows, len], both contiguous.
#[pyfunction]
fn sigmoid(py: Python<'_>, bf16: bool, x: usize, rows: usize, len: usize, out: usize) {
    let call = Shared(Sigmoid {
        dtype: dtype(bf16),
        x: x as *const u8,
        rows,
        len,
        out: out as *mut u8,
    });
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    py.detach(|| unsafe { elementwise::sigmoid(call.get()) });
}

/// A weight matrix [outputs, inputs] in the kernels' order; owns its memory.
#[pyclass(frozen, module = "baton._native")]
struct PackedWeight(Arc<linear::PackedWeight>);

#[pymethods]
impl PackedWeight {
    /// Copy the contiguous matrix at `weight`, which is not needed afterwards.
    #[new]
    fn new(py: Python<'_>, bf16: bool, outputs: usize, inputs: usize, weight: usize) -> Self {
        let shape = WeightShape {
            dtype: dtype(bf16),
            outputs,
            inputs,
        };
        // SAFETY: the Python side holds the tensor and has checked its shape.
        let packed =
            py.detach(|| unsafe { linear::PackedWeight::pack(shape, weight as *const u8) });
        PackedWeight(Arc::new(packed))
    }

    /// y [rows, outputs] = x [rows, inputs] * W^T + bias [outputs] (0: none); rows of x are
    /// `x_stride` elements apart.
    fn multiply(
        &self,
        py: Python<'_>,
        x: usize,
        x_stride: usize,
        rows: usize,
        bias: usize,
        y: usize,
    ) {
        let weight = Weight::Packed(&self.0);
        multiply(py, weight, x, x_stride, rows, bias, y);
    }

    /// Copy the original rows named by the `count` int64 at `ids` to `out`. Raises ValueError for
    /// an id out of range.
    fn rows(&self, py: Python<'_>, ids: usize, count: usize, out: usize) -> PyResult<()> {
        let ids = checked_ids(ids, count, self.0.shape().outputs)?;
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        py.detach(|| unsafe { self.0.rows(ids, out as *mut u8) });
        Ok(())
    }
}

/// Weights of heads, each [outputs, inputs], in the kernels' order; owns their memory.
#[pyclass(frozen, module = "baton._native")]
struct PackedHeads(Vec<linear::PackedWeight>);

#[pymethods]
impl PackedHeads {
    /// Copy the contiguous matrices [heads, outputs, inputs] at `weights`, which are not needed
    /// afterwards.
    #[new]
    fn new(
        py: Python<'_>,
        bf16: bool,
        heads: usize,
        outputs: usize,
        inputs: usize,
        weights: usize,
    ) -> Self {
        let shape = WeightShape {
            dtype: dtype(bf16),
            outputs,
            inputs,
        };
        let bytes = outputs * inputs * shape.dtype.bytes();
        let address_of = |head: usize| (weights + head * bytes) as *const u8;
        // SAFETY: the Python side holds the tensor and has checked its shape.
        let pack = |head| unsafe { linear::PackedWeight::pack(shape, address_of(head)) };
        PackedHeads(py.detach(|| (0..heads).map(pack).collect()))
    }

    /// y[t, h] = x[t, h] * W[h]^T. x and y: (address, tokens, heads, token stride, head stride,
    /// length of a vector), in elements.
    fn multiply(&self, py: Python<'_>, x: Strided, y: Strided) {
        let products = Shared(HeadProducts {
            weights: &self.0,
            tokens: x.1,
            x: x.0 as *const u8,
            x_token_stride: x.3,
            x_head_stride: x.4,
            y: y.0 as *mut u8,
            y_token_stride: y.3,
            y_head_stride: y.4,
        });
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        py.detach(|| unsafe { linear::multiply_heads(products.get()) });
    }
}

/// A weight that stays quantized in memory, for products in f32 or bf16.
#[pyclass(frozen, module = "baton._native")]
struct QuantizedWeight(Arc<linear::QuantizedWeight>);

#[pymethods]
impl QuantizedWeight {
    /// Copy codes (u8, a byte each) [outputs, inputs], scales and zeros (f32; 0: `zero` for all)
    /// [outputs, groups] and the group of each input (int32). `code_name`: int4, int8,
    /// fp8 or fp4, whose scales must be exact in bf16. Raises ValueError where a zero of integers
    /// is no whole number in [0, 256), or one of floats is not 0.
    #[new]
    #[allow(
        clippy::too_many_arguments,
        reason = "the arguments of one matrix, all needed"
    )]
    fn new(
        py: Python<'_>,
        bf16: bool,
        outputs: usize,
        inputs: usize,
        code_name: &str,
        codes: usize,
        groups: usize,
        scales: usize,
        zeros: usize,
        zero: f32,
        group_of: usize,
    ) -> PyResult<Self> {
        let code_type = match code_name {
            "int4" => CodeType::Int4,
            "int8" => CodeType::Int8,
            "fp8" => CodeType::Fp8,
            "fp4" => CodeType::Fp4,
            _ => {
                return Err(PyValueError::new_err(format!(
                    "codes of {code_name}: int4, int8, fp8 or fp4 are needed"
                )));
            }
        };
        // SAFETY: the Python side holds the tensor and has checked its shape.
        let groups_of_inputs = unsafe { slice::<u32>(group_of, inputs) };
        if let Some(bad) = groups_of_inputs.iter().find(|&&g| g as usize >= groups) {
            return Err(PyValueError::new_err(format!(
                "group {bad} is outside a matrix of {groups}"
            )));
        }
        let all_zeros = if zeros == 0 {
            std::slice::from_ref(&zero)
        } else {
            // SAFETY: as above.
            unsafe { slice::<f32>(zeros, outputs * groups) }
        };
        if let Some(bad) = all_zeros.iter().find(|&&zero| !code_type.takes_zero(zero)) {
            return Err(PyValueError::new_err(format!(
                "zero point {bad} of {code_name} codes: whole numbers in [0, 256) are needed, and \
                 0 for fp8 and fp4"
            )));
        }
        let shape = WeightShape {
            dtype: dtype(bf16),
            outputs,
            inputs,
        };
        let matrix = Shared(CodedMatrix {
            code_type,
            codes: codes as *const u8,
            groups,
            scales: scales as *const f32,
            zeros: zeros as *const f32,
            zero,
            group_of: group_of as *const u32,
        });
        // SAFETY: as above; the groups are checked.
        let packed = py.detach(|| unsafe { linear::QuantizedWeight::pack(shape, matrix.get()) });
        Ok(QuantizedWeight(Arc::new(packed)))
    }

    /// Size in memory.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }

    /// As `PackedWeight.multiply`.
    fn multiply(
        &self,
        py: Python<'_>,
        x: usize,
        x_stride: usize,
        rows: usize,
        bias: usize,
        y: usize,
    ) {
        let weight = Weight::Quantized(&self.0);
        multiply(py, weight, x, x_stride, rows, bias, y);
    }

    /// As `PackedWeight.rows`.
    fn rows(&self, py: Python<'_>, ids: usize, count: usize, out: usize) -> PyResult<()> {
        let ids = checked_ids(ids, count, self.0.shape().outputs)?;
        // SAFETY: the Python side holds the tensors and has checked their shapes.
        py.detach(|| unsafe { self.0.rows(ids, out as *mut u8) });
        Ok(())
    }
}

/// The routed experts of a layer that this process has. Shares the memory of the matrices.
#[pyclass(frozen, module = "baton._native")]
struct ExpertWeights(experts::ExpertWeights);

#[pymethods]
impl ExpertWeights {
    /// A PackedWeight or QuantizedWeight per expert: gate's rows then up's, and down. `clamp`: gain
    /// and limit of a clamped SiLU, None: SiLU. Biases, none or one per expert: addresses and sizes
    /// in bytes of contiguous vectors in the experts' type, which are copied. Raises ValueError
    /// where shapes differ.
    #[new]
    fn new(
        gate_up: Vec<Bound<'_, PyAny>>,
        down: Vec<Bound<'_, PyAny>>,
        clamp: Option<(f32, f32)>,
        weighs_inputs: bool,
        gate_up_biases: Vec<(usize, usize)>,
        down_biases: Vec<(usize, usize)>,
    ) -> PyResult<ExpertWeights> {
        let copies = |biases: Vec<(usize, usize)>| {
            // SAFETY: the Python side holds the tensors and has checked their types and sizes.
            let copy = |(at, size)| unsafe { slice::<u8>(at, size) }.to_vec();
            biases.into_iter().map(copy).collect()
        };
        let form = ExpertForm {
            activation: clamp.map_or(Activation::Silu, |(gain, limit)| Activation::ClampedSilu {
                gain,
                limit,
            }),
            weighs_inputs,
            gate_up_biases: copies(gate_up_biases),
            down_biases: copies(down_biases),
        };
        let of = |matrices: Vec<Bound<'_, PyAny>>| {
            let of_each = matrices.iter().map(expert_matrix);
            of_each.collect::<PyResult<Vec<ExpertMatrix>>>()
        };
        experts::ExpertWeights::new(of(gate_up)?, of(down)?, form)
            .map(ExpertWeights)
            .map_err(|err| PyValueError::new_err(err.to_string()))
    }

    /// Bytes of the matrices of the expert at place `number`, as they are read.
    fn expert_bytes(&self, number: usize) -> usize {
        self.0.expert_bytes(number)
    }

    /// y [tokens, hidden] = weighted sums of the experts that each token of x [tokens, hidden]
    /// chose; rows of x are `x_stride` elements apart. The first expert here has the number
    /// `first_expert`.
    ///
    /// Addresses of int64 chosen and float32 weights [tokens, slots], and of int64 counts
    /// [experts of all ranks], to which the choices are added. Returns the bytes of weights that
    /// were read. Raises ValueError for a choice that is no expert.
    #[expect(
        clippy::too_many_arguments,
        reason = "a record would cost more than the call"
    )]
    fn pass_tokens(
        &self,
        py: Python<'_>,
        first_expert: usize,
        tokens: usize,
        slots: usize,
        x: usize,
        x_stride: usize,
        chosen: usize,
        weights: usize,
        num_experts: usize,
        counts: usize,
        y: usize,
    ) -> PyResult<u64> {
        // SAFETY: the Python side holds the tensors and has checked their types and shapes.
        let (chosen, weights) = unsafe {
            (
                slice(chosen, tokens * slots),
                slice(weights, tokens * slots),
            )
        };
        // SAFETY: as above; nothing else reads or writes the counts during this call.
        let counts = unsafe { std::slice::from_raw_parts_mut(counts as *mut i64, num_experts) };
        experts::count_choices(chosen, slots, counts)
            .map_err(|err| PyValueError::new_err(err.to_string()))?;
        let step = Shared(ExpertStep {
            experts: &self.0,
            first_expert,
            slots,
            chosen,
            weights,
            x: x as *const u8,
            x_stride,
            y: y as *mut u8,
        });
        // SAFETY: as above.
        Ok(py.detach(|| unsafe { experts::pass_experts(step.get()) }))
    }
}

/// How experts and weights follow from a router's logits.
#[pyclass(frozen, module = "baton._native")]
struct ExpertRouter(ChoiceRule);

#[pymethods]
impl ExpertRouter {
    /// `groups`: their number, that of the kept ones, and whether the best score of one ranks it
    /// instead of the sum of two.
    #[new]
    fn new(
        experts: usize,
        chosen: usize,
        scoring: &str,
        least_sum: Option<f32>,
        factor: f32,
        rounds_weights: bool,
        groups: (usize, usize, bool),
    ) -> PyResult<Self> {
        let scoring = match scoring {
            "softmax" => Scoring::Softmax,
            "sigmoid" => Scoring::Sigmoid,
            "softmax_of_chosen" => Scoring::SoftmaxOfChosen,
            "sigmoid_of_chosen" => Scoring::SigmoidOfChosen,
            other => {
                let message = format!("experts cannot be chosen by {other} scores");
                return Err(PyValueError::new_err(message));
            }
        };
        let (groups, kept_groups, ranks_best) = groups;
        if !(1..=experts).contains(&chosen)
            || !(1..=groups).contains(&kept_groups)
            || !experts.is_multiple_of(groups)
        {
            let message = format!(
                "{chosen} of {experts} experts in {kept_groups} of {groups} groups cannot be chosen"
            );
            return Err(PyValueError::new_err(message));
        }
        Ok(ExpertRouter(ChoiceRule {
            experts,
            chosen,
            scoring,
            least_sum,
            factor,
            rounds_weights,
            groups,
            kept_groups,
            group_rank: if ranks_best {
                GroupRank::Best
            } else {
                GroupRank::TwoBest
            },
        }))
    }

    /// Choose for logits [tokens, experts], all tensors contiguous: i64 experts and f32 weights
    /// [tokens, chosen]. `bias`: f32 [experts], 0: none.
    #[expect(
        clippy::too_many_arguments,
        reason = "a record would cost more than the call"
    )]
    fn choose(
        &self,
        py: Python<'_>,
        bf16: bool,
        logits: usize,
        tokens: usize,
        bias: usize,
        experts: usize,
        weights: usize,
    ) {
        let biases = if bias == 0 { 0 } else { self.0.experts };
        let choice = Shared(ExpertChoice {
            rule: self.0,
            dtype: dtype(bf16),
            logits: logits as *const u8,
            tokens,
            // SAFETY: the Python side holds the tensors and has checked their types and shapes.
            bias: unsafe { slice(bias, biases) },
            experts: experts as *mut i64,
            weights: weights as *mut f32,
        });
        // SAFETY: as above.
        py.detach(|| unsafe { choose_experts(choice.get()) });
    }
}

fn expert_matrix(matrix: &Bound<'_, PyAny>) -> PyResult<ExpertMatrix> {
    if let Ok(packed) = matrix.cast::<PackedWeight>() {
        return Ok(ExpertMatrix::Packed(Arc::clone(&packed.get().0)));
    }
    let quantized = matrix.cast::<QuantizedWeight>()?;
    Ok(ExpertMatrix::Quantized(Arc::clone(&quantized.get().0)))
}

fn multiply(
    py: Python<'_>,
    weight: Weight<'_>,
    x: usize,
    x_stride: usize,
    rows: usize,
    bias: usize,
    y: usize,
) {
    let call = Shared(LinearProduct {
        weight,
        x: x as *const u8,
        x_stride,
        rows,
        bias: bias as *const u8,
        y: y as *mut u8,
        y_stride: weight.shape().outputs,
    });
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    py.detach(|| unsafe { linear::linear(call.get()) });
}

/// The `count` int64 at `ids`. Raises ValueError for one that is no row.
fn checked_ids<'a>(ids: usize, count: usize, outputs: usize) -> PyResult<&'a [i64]> {
    // SAFETY: the Python side holds the tensor and has checked its shape.
    let ids = unsafe { slice::<i64>(ids, count) };
    match ids.iter().find(|&&id| id < 0 || id as usize >= outputs) {
        Some(bad) => Err(PyValueError::new_err(format!(
            "row {bad} is outside a matrix of {outputs}"
        ))),
        None => Ok(ids),
    }
}

/// Plain data with pointers, handed to the closure that runs without the GIL.
pub(crate) struct Shared<T>(pub(crate) T);

impl<T> Shared<T> {
    pub(crate) fn get(&self) -> &T {
        &self.0
    }
}

// SAFETY: what the pointers lead to is vouched for where the record is made; the closure runs on
// the same thread.
unsafe impl<T> Sync for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Send for Shared<T> {}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<KvLayer>()?;
    m.add_class::<LatentLayer>()?;
    m.add_class::<KvRows>()?;
    m.add_class::<PackedWeight>()?;
    m.add_class::<PackedHeads>()?;
    m.add_class::<QuantizedWeight>()?;
    m.add_class::<ExpertRouter>()?;
    m.add_class::<ExpertWeights>()?;
    m.add_function(wrap_pyfunction!(cpu_isa, m)?)?;
    m.add_function(wrap_pyfunction!(set_threads, m)?)?;
    m.add_function(wrap_pyfunction!(threads, m)?)?;
    m.add_function(wrap_pyfunction!(append, m)?)?;
    m.add_function(wrap_pyfunction!(attend, m)?)?;
    m.add_function(wrap_pyfunction!(append_latents, m)?)?;
    m.add_function(wrap_pyfunction!(attend_latents, m)?)?;
    m.add_function(wrap_pyfunction!(rms_norm, m)?)?;
    m.add_function(wrap_pyfunction!(rope, m)?)?;
    m.add_function(wrap_pyfunction!(multiply_gated, m)?)?;
    m.add_function(wrap_pyfunction!(sigmoid, m)?)?;
    m.add_function(wrap_pyfunction!(multiply_clamped, m)?)
}
