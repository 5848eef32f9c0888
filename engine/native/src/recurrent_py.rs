//! Python face of `kernels::recurrent`, as `kernels_py` is of the other kernels.

use kernels::recurrent::StateRows;
use kernels::recurrent::conv::{self, CausalConv};
use kernels::recurrent::delta::{self, DeltaSizes, GatedDelta};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::kernels_py::{Shared, dtype, slice};

/// Addresses of int32 starts, ends and slots [rows]; rows, tokens, slots in all.
type RowsAt = (usize, usize, usize, usize, usize, usize);

/// Raises ValueError when an index leads out of the tokens or the slots.
fn checked_rows(at: RowsAt) -> PyResult<StateRows<'static>> {
    let (starts, ends, slots, rows, tokens, num_slots) = at;
    // SAFETY: the Python side has checked types and lengths and holds the tensors.
    let rows = unsafe {
        StateRows {
            starts: slice(starts, rows),
            ends: slice(ends, rows),
            slots: slice(slots, rows),
        }
    };
    rows.check(tokens, num_slots)
        .map_err(|err| PyValueError::new_err(err.to_string()))?;
    Ok(rows)
}

/// out [tokens, channels] = silu of the convolution of x [tokens, channels], whose rows are
/// `x_stride` elements apart, with float32 weight [taps, channels]. States [taps - 1, channels] are
/// `state_stride` elements apart.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn causal_conv(
    py: Python<'_>,
    bf16: bool,
    taps: usize,
    channels: usize,
    x: usize,
    x_stride: usize,
    weight: usize,
    state: usize,
    state_stride: usize,
    rows: RowsAt,
    out: usize,
) -> PyResult<()> {
    let call = Shared(CausalConv {
        dtype: dtype(bf16),
        x: x as *const u8,
        x_stride,
        channels,
        taps,
        weight: weight as *const f32,
        state: state as *mut u8,
        state_stride,
        rows: checked_rows(rows)?,
        out: out as *mut u8,
    });
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    py.detach(|| unsafe { conv::causal_conv(call.get()) });
    Ok(())
}

/// out [tokens, value_heads, value_dim] of the gated delta rule. `sizes`: key heads, value heads,
/// elements of a key and of a value, decays of a head. `strengths`, `decays`: address and stride.
/// States are `state_stride` elements apart.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "a record would cost more than the call"
)]
fn gated_delta(
    py: Python<'_>,
    bf16: bool,
    sizes: (usize, usize, usize, usize, usize),
    qkv: usize,
    strengths: (usize, usize),
    decays: (usize, usize),
    rate: usize,
    bias: usize,
    state: usize,
    state_stride: usize,
    rows: RowsAt,
    out: usize,
) -> PyResult<()> {
    let (key_heads, value_heads, key_dim, value_dim, num_decays) = sizes;
    let call = Shared(GatedDelta {
        dtype: dtype(bf16),
        sizes: DeltaSizes {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            decays: num_decays,
        },
        qkv: qkv as *const u8,
        strengths: strengths.0 as *const u8,
        strength_stride: strengths.1,
        decays: decays.0 as *const u8,
        decay_stride: decays.1,
        rate: rate as *const f32,
        bias: bias as *const f32,
        state: state as *mut f32,
        state_stride,
        rows: checked_rows(rows)?,
        out: out as *mut u8,
    });
    // SAFETY: the Python side holds the tensors and has checked their shapes.
    py.detach(|| unsafe { delta::gated_delta(call.get()) });
    Ok(())
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(causal_conv, m)?)?;
    m.add_function(wrap_pyfunction!(gated_delta, m)?)
}
