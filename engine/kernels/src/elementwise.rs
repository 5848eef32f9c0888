//! The small layers between the products: RMS norm, rotary embedding, gated activations.
//! Memory-bound, so one pass each.
//!
//! Rounding follows transformers: a bf16 norm rounds the quotient before a bf16 weight, and not
//! before a float32 one; a bf16 gate rounds its activation before the product. Rows are
//! independent; a row's sum of squares is taken in 16 lanes and one fixed tree.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, the pointers of each record cover its shapes"
)]

use std::marker::PhantomData;

use crate::elem::{Bf16, Dtype, ElementType, F32, load_part, store_part};
use crate::isa::{self, Isa};
use crate::math::{LOG2_E, exp2};
use crate::pool;
use crate::simd::{SUM_LANES, Simd, SimdKernel, dispatch, tree_sum};

/// Elements a thread takes at a time, and below which one thread does all: about 5 us of work.
const SHARE: usize = 1 << 14;

/// Work on independent rows.
pub(crate) trait RowKernel: Sync {
    /// # Safety
    /// The CPU supports `S`; rows [first, end) exist and are this call's.
    unsafe fn rows<S: Simd, E: ElementType>(&self, first: usize, end: usize);
}

struct Span<'a, K, E>(&'a K, usize, usize, PhantomData<E>);

impl<K: RowKernel, E: ElementType> SimdKernel for Span<'_, K, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        self.0.rows::<S, E>(self.1, self.2);
    }
}

/// Run `kernel` over all rows, in shares that do not depend on the number of threads.
///
/// # Safety
/// `isa.runs_here()`, and the kernel's own requirements.
pub(crate) unsafe fn for_rows<K: RowKernel>(
    isa: Isa,
    dtype: Dtype,
    rows: usize,
    row_len: usize,
    kernel: &K,
) {
    let share = (SHARE / row_len.max(1)).max(1);
    pool::for_each(rows.div_ceil(share), &|i| {
        let first = i * share;
        let end = ((i + 1) * share).min(rows);
        // SAFETY: passed on.
        unsafe {
            match dtype {
                Dtype::F32 => dispatch(isa, Span(kernel, first, end, PhantomData::<F32>)),
                Dtype::Bf16 => dispatch(isa, Span(kernel, first, end, PhantomData::<Bf16>)),
            }
        }
    });
}

/// Vectors `[outer, inner, len]`: the last dimension contiguous, the others any number of elements
/// apart.
#[derive(Clone, Copy, Debug)]
pub struct HeadVectors {
    pub data: *mut u8,
    pub outer: usize,
    pub inner: usize,
    pub outer_stride: usize,
    pub inner_stride: usize,
    pub len: usize,
}

impl HeadVectors {
    fn rows(&self) -> usize {
        self.outer * self.inner
    }

    fn offset(&self, row: usize) -> usize {
        row / self.inner * self.outer_stride + row % self.inner * self.inner_stride
    }
}

/// out = x / rms(x) * weight. With `residual`, first residual += x (rounded), and the norm is of
/// that sum.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    pub dtype: Dtype,
    pub x: HeadVectors,
    /// Null, or like `x` but contiguous: overwritten with the sum.
    pub residual: *mut u8,
    /// `[len]`, in `dtype`, or in float32 if `has_f32_weight`.
    pub weight: *const u8,
    /// The result is then rounded once, after the product with the weight.
    pub has_f32_weight: bool,
    pub eps: f32,
    /// `[outer, inner, len]`, contiguous; may be `x` itself when that is contiguous.
    pub out: *mut u8,
}

// SAFETY: rows are disjoint; the caller of `rms_norm` vouches for the memory.
unsafe impl Sync for RmsNorm {}

/// # Safety
/// Pointers cover the shapes; no other thread accesses `residual` or `out`, or writes the rest,
/// meanwhile.
pub unsafe fn rms_norm(norm: &RmsNorm) {
    // SAFETY: passed on.
    unsafe { rms_norm_on(isa::current(), norm) }
}

/// # Safety
/// As [`rms_norm`], and `isa.runs_here()`.
pub unsafe fn rms_norm_on(isa: Isa, norm: &RmsNorm) {
    for_rows(isa, norm.dtype, norm.x.rows(), norm.x.len, norm);
}

impl RowKernel for RmsNorm {
    #[inline(always)]
    unsafe fn rows<S: Simd, E: ElementType>(&self, first: usize, end: usize) {
        let n = self.x.len;
        let weight = self.weight.cast::<E::T>();
        for row in first..end {
            let mut from = self
                .x
                .data
                .cast::<E::T>()
                .cast_const()
                .add(self.x.offset(row));
            let mut squares = [0.0_f32; SUM_LANES];
            let to = self.out.cast::<E::T>().add(row * n);
            if self.residual.is_null() {
                add_squares::<S, E>(from, n, &mut squares);
            } else {
                let total = self.residual.cast::<E::T>().add(row * n);
                add_and_squares::<S, E>(from, total, n, &mut squares);
                from = total;
            }
            let inverse = S::splat(1.0 / (tree_sum(&squares) / n as f32 + self.eps).sqrt());
            let mut i = 0;
            while i < n && self.has_f32_weight {
                let unit = S::mul(load_part::<S, E>(from.add(i), n - i), inverse);
                let weight = load_part::<S, F32>(self.weight.cast::<f32>().add(i), n - i);
                store_part::<S, E>(to.add(i), S::mul(weight, unit), n - i);
                i += S::LANES;
            }
            while i < n {
                let unit = E::round::<S>(S::mul(load_part::<S, E>(from.add(i), n - i), inverse));
                store_part::<S, E>(
                    to.add(i),
                    S::mul(load_part::<S, E>(weight.add(i), n - i), unit),
                    n - i,
                );
                i += S::LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn add_squares<S: Simd, E: ElementType>(
    x: *const E::T,
    n: usize,
    squares: &mut [f32; SUM_LANES],
) {
    let mut sums = [S::splat(0.0); 2];
    let mut i = 0;
    while i < n {
        let v = load_part::<S, E>(x.add(i), n - i);
        let lanes = &mut sums[i % SUM_LANES / S::LANES];
        *lanes = S::fma(v, v, *lanes);
        i += S::LANES;
    }
    store_sums::<S>(&sums, squares);
}

/// total += x, and the squares of the rounded total.
#[inline(always)]
unsafe fn add_and_squares<S: Simd, E: ElementType>(
    x: *const E::T,
    total: *mut E::T,
    n: usize,
    squares: &mut [f32; SUM_LANES],
) {
    let mut sums = [S::splat(0.0); 2];
    let mut i = 0;
    while i < n {
        let a = load_part::<S, E>(x.add(i), n - i);
        let b = load_part::<S, E>(total.add(i), n - i);
        let v = E::round::<S>(S::add(a, b));
        store_part::<S, E>(total.add(i), v, n - i);
        let lanes = &mut sums[i % SUM_LANES / S::LANES];
        *lanes = S::fma(v, v, *lanes);
        i += S::LANES;
    }
    store_sums::<S>(&sums, squares);
}

#[inline(always)]
unsafe fn store_sums<S: Simd>(sums: &[S::F; 2], lanes: &mut [f32; SUM_LANES]) {
    for (part, sum) in lanes.chunks_exact_mut(S::LANES).zip(sums) {
        S::store(part.as_mut_ptr(), *sum);
    }
}

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryPairs {
    /// i and i + head_dim / 2 ("neox" layout, as in most Hugging Face checkpoints).
    Halves,
    /// 2 i and 2 i + 1.
    Interleaved,
}

/// Rotate the pairs of each head, in place.
#[derive(Clone, Copy, Debug)]
pub struct RotaryEmbedding<'a> {
    pub dtype: Dtype,
    pub pairs: RotaryPairs,
    /// `[tokens, heads, head_dim]`
    pub x: HeadVectors,
    /// Positions of the tokens, each with a row in the tables.
    pub positions: &'a [i64],
    /// float32 `[positions, head_dim / 2]`, contiguous.
    pub cos: *const f32,
    pub sin: *const f32,
}

// SAFETY: rows are disjoint; the caller of `rope` vouches for the memory.
unsafe impl Sync for RotaryEmbedding<'_> {}

/// # Safety
/// Pointers cover the shapes and positions; no other thread accesses `x` meanwhile.
pub unsafe fn rope(rope: &RotaryEmbedding) {
    // SAFETY: passed on.
    unsafe { rope_on(isa::current(), rope) }
}

/// # Safety
/// As [`rope`], and `isa.runs_here()`.
pub unsafe fn rope_on(isa: Isa, rope: &RotaryEmbedding) {
    for_rows(isa, rope.dtype, rope.x.rows(), rope.x.len, rope);
}

impl RowKernel for RotaryEmbedding<'_> {
    #[inline(always)]
    unsafe fn rows<S: Simd, E: ElementType>(&self, first: usize, end: usize) {
        let half = self.x.len / 2;
        for row in first..end {
            let at = self.positions[row / self.x.inner] as usize * half;
            let low = self.x.data.cast::<E::T>().add(self.x.offset(row));
            if self.pairs == RotaryPairs::Interleaved {
                turn_neighbors::<E>(low, half, self.cos.add(at), self.sin.add(at));
                continue;
            }
            let high = low.add(half);
            let mut i = 0;
            while i < half {
                let left = half - i;
                let c = load_part::<S, F32>(self.cos.add(at + i), left);
                let s = load_part::<S, F32>(self.sin.add(at + i), left);
                let a = load_part::<S, E>(low.add(i), left);
                let b = load_part::<S, E>(high.add(i), left);
                // Products rounded one by one, as torch does: float32 results are equal to its
                // bits.
                store_part::<S, E>(low.add(i), S::sub(S::mul(a, c), S::mul(b, s)), left);
                store_part::<S, E>(high.add(i), S::add(S::mul(b, c), S::mul(a, s)), left);
                i += S::LANES;
            }
        }
    }
}

/// Rotate `pairs` pairs of neighbors, one by one: heads with such pairs are short.
#[inline(always)]
unsafe fn turn_neighbors<E: ElementType>(
    head: *mut E::T,
    pairs: usize,
    cos: *const f32,
    sin: *const f32,
) {
    for i in 0..pairs {
        let c = cos.add(i).read();
        let s = sin.add(i).read();
        let first = head.add(2 * i);
        let second = first.add(1);
        let a = E::to_f32(first.read());
        let b = E::to_f32(second.read());
        first.write(E::from_f32(a * c - b * s));
        second.write(E::from_f32(b * c + a * s));
    }
}

/// What a gate passes before it multiplies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    Silu,
    /// GELU in its tanh form.
    GeluTanh,
    /// x * sigmoid(gain * x) of a gate that `limit` bounds from above; `up`, which it bounds on
    /// both sides, grows by 1 (gpt-oss).
    ClampedSilu {
        gain: f32,
        limit: f32,
    },
}

/// out = activation(gate) * up.
#[derive(Clone, Copy, Debug)]
pub struct GatedProduct {
    pub dtype: Dtype,
    pub activation: Activation,
    /// `[rows, 2 * len]` = gate, then up; rows `stride` elements apart.
    pub gate_up: *const u8,
    pub stride: usize,
    pub rows: usize,
    pub len: usize,
    /// `[rows, len]`, contiguous.
    pub out: *mut u8,
}

// SAFETY: rows are disjoint; the caller of `multiply_gated` vouches for the memory.
unsafe impl Sync for GatedProduct {}

/// # Safety
/// Pointers cover the shapes; no other thread accesses `out` or writes `gate_up` meanwhile.
pub unsafe fn multiply_gated(gated: &GatedProduct) {
    // SAFETY: passed on.
    unsafe { multiply_gated_on(isa::current(), gated) }
}

/// # Safety
/// As [`multiply_gated`], and `isa.runs_here()`.
pub unsafe fn multiply_gated_on(isa: Isa, gated: &GatedProduct) {
    for_rows(isa, gated.dtype, gated.rows, 2 * gated.len, gated);
}

impl RowKernel for GatedProduct {
    #[inline(always)]
    unsafe fn rows<S: Simd, E: ElementType>(&self, first: usize, end: usize) {
        for row in first..end {
            let gate = self.gate_up.cast::<E::T>().add(row * self.stride);
            let up = gate.add(self.len);
            let to = self.out.cast::<E::T>().add(row * self.len);
            let mut i = 0;
            while i < self.len {
                let left = self.len - i;
                let g = load_part::<S, E>(gate.add(i), left);
                let u = load_part::<S, E>(up.add(i), left);
                let product = self.activation.multiply::<S, E>(g, u);
                store_part::<S, E>(to.add(i), product, left);
                i += S::LANES;
            }
        }
    }
}

/// out = 1 / (1 + e^-x), with the same bits wherever an element stands.
#[derive(Clone, Copy, Debug)]
pub struct Sigmoid {
    pub dtype: Dtype,
    /// `[rows, len]`, contiguous.
    pub x: *const u8,
    pub rows: usize,
    pub len: usize,
    /// As x.
    pub out: *mut u8,
}

// SAFETY: rows are disjoint; the caller of `sigmoid` vouches for the memory.
unsafe impl Sync for Sigmoid {}

/// # Safety
/// Pointers cover the shapes; no other thread accesses `out` or writes `x` meanwhile.
pub unsafe fn sigmoid(call: &Sigmoid) {
    // SAFETY: passed on.
    unsafe { sigmoid_on(isa::current(), call) }
}

/// # Safety
/// As [`sigmoid`], and `isa.runs_here()`.
pub unsafe fn sigmoid_on(isa: Isa, call: &Sigmoid) {
    for_rows(isa, call.dtype, call.rows, call.len, call);
}

impl RowKernel for Sigmoid {
    #[inline(always)]
    unsafe fn rows<S: Simd, E: ElementType>(&self, first: usize, end: usize) {
        for i in (first * self.len..end * self.len).step_by(S::LANES) {
            let left = end * self.len - i;
            let x = load_part::<S, E>(self.x.cast::<E::T>().add(i), left);
            store_part::<S, E>(self.out.cast::<E::T>().add(i), sigmoid_of::<S>(x), left);
        }
    }
}

/// 1 / (1 + e^-x), not rounded.
///
/// # Safety
/// The CPU supports `S`.
#[inline(always)]
pub(crate) unsafe fn sigmoid_of<S: Simd>(x: S::F) -> S::F {
    // Held below 2^126: the quotient is 0 to working precision long before.
    let power = S::max(S::splat(-126.0), S::mul(x, S::splat(LOG2_E)));
    let e = exp2::<S>(S::sub(S::splat(0.0), power));
    S::div(S::splat(1.0), S::add(S::splat(1.0), e))
}

const SQRT_2_OVER_PI: f32 = 0.797_884_6;

/// g / (1 + 2^-power).
#[inline(always)]
unsafe fn pass_gate<S: Simd>(g: S::F, power: S::F) -> S::F {
    // Held below 2^126: the quotient is 0 to working precision long before.
    let held = S::max(S::splat(-126.0), power);
    let e = exp2::<S>(S::sub(S::splat(0.0), held));
    S::div(g, S::add(S::splat(1.0), e))
}

impl Activation {
    /// The product of gates g and their values up, not rounded.
    ///
    /// # Safety
    /// The CPU supports `S`.
    #[inline(always)]
    pub(crate) unsafe fn multiply<S: Simd, E: ElementType>(self, g: S::F, up: S::F) -> S::F {
        match self {
            Activation::Silu => {
                let power = S::mul(g, S::splat(LOG2_E));
                S::mul(E::round::<S>(pass_gate::<S>(g, power)), up)
            }
            // x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
            Activation::GeluTanh => {
                let linear = S::splat(2.0 * SQRT_2_OVER_PI * LOG2_E);
                let cubic = S::splat(2.0 * SQRT_2_OVER_PI * LOG2_E * 0.044_715);
                let power = S::mul(g, S::fma(S::mul(g, g), cubic, linear));
                S::mul(E::round::<S>(pass_gate::<S>(g, power)), up)
            }
            Activation::ClampedSilu { gain, limit } => {
                let most = S::splat(limit);
                let g = S::select_lt(most, g, most, g);
                let up = S::select_lt(most, up, most, up);
                let up = S::add(S::max(S::splat(-limit), up), S::splat(1.0));
                let power = S::mul(g, S::splat(gain * LOG2_E));
                let passed = E::round::<S>(pass_gate::<S>(g, power));
                S::mul(passed, E::round::<S>(up))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::tests::{Stored, noise};

    const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];
    const PAIRS: [RotaryPairs; 2] = [RotaryPairs::Halves, RotaryPairs::Interleaved];

    fn assert_close(got: &Stored, want: &[f64], tolerance: f64, what: &str) {
        for (i, (a, b)) in got.values().iter().zip(want).enumerate() {
            let room = if got.0 == Dtype::F32 { tolerance } else { 8e-3 } * b.abs().max(1e-3);
            assert!(
                (f64::from(*a) - b).abs() <= room,
                "{what} {:?} [{i}]: {a} not {b}",
                got.0
            );
        }
    }

    #[test]
    fn rms_norm_of_strided_heads_equals_the_reference() {
        for (isa, dtype) in Isa::available()
            .into_iter()
            .flat_map(|isa| DTYPES.map(|d| (isa, d)))
        {
            for len in [1, 8, 16, 64, 100, 2049] {
                let outer = 3;
                let inner = 2;
                let gap = 5;
                let stride = inner * len + gap;
                let x = Stored::new(dtype, &noise(outer * stride, 1));
                let w = Stored::new(dtype, &noise(len, 2));
                let mut out = Stored::new(dtype, &vec![9.0; outer * inner * len]);
                let vectors = HeadVectors {
                    data: x.1.as_ptr().cast_mut(),
                    outer,
                    inner,
                    outer_stride: stride,
                    inner_stride: len,
                    len,
                };
                let residual = std::ptr::null_mut();
                let weight = w.1.as_ptr();
                let out_ptr = out.1.as_mut_ptr();
                let norm = RmsNorm {
                    dtype,
                    x: vectors,
                    residual,
                    weight,
                    has_f32_weight: false,
                    eps: 1e-6,
                    out: out_ptr,
                };
                // SAFETY: shapes as described.
                unsafe { rms_norm_on(isa, &norm) };
                let x = x.values();
                let w = w.values();
                let want: Vec<f64> = (0..outer * inner)
                    .flat_map(|row| {
                        let v = &x[row / inner * stride + row % inner * len..][..len];
                        let mean =
                            v.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>() / len as f64;
                        let r = 1.0 / (mean + 1e-6).sqrt();
                        v.iter()
                            .zip(&w)
                            .map(|(a, b)| f64::from(*a) * r * f64::from(*b))
                            .collect::<Vec<_>>()
                    })
                    .collect();
                assert_close(&out, &want, 2e-6, &format!("{isa:?} len {len}"));
            }
        }
    }

    #[test]
    fn add_rms_norm_leaves_the_sum_and_norms_it_even_in_place() {
        for (isa, dtype) in Isa::available()
            .into_iter()
            .flat_map(|isa| DTYPES.map(|d| (isa, d)))
        {
            let rows = 4;
            let len = 75;
            let mut x = Stored::new(dtype, &noise(rows * len, 1));
            let mut residual = Stored::new(dtype, &noise(rows * len, 2));
            let sums: Vec<f32> = x
                .values()
                .iter()
                .zip(residual.values())
                .map(|(a, b)| a + b)
                .collect();
            let total = Stored::new(dtype, &sums);
            let mut expected = Stored::new(dtype, &vec![0.0; rows * len]);
            let weight = Stored::new(dtype, &noise(len, 3));
            let call = |data: *mut u8, residual: *mut u8, out: *mut u8| {
                let x = HeadVectors {
                    data,
                    outer: rows,
                    inner: 1,
                    outer_stride: len,
                    inner_stride: len,
                    len,
                };
                let norm = RmsNorm {
                    dtype,
                    x,
                    residual,
                    weight: weight.1.as_ptr(),
                    has_f32_weight: false,
                    eps: 1e-5,
                    out,
                };
                // SAFETY: shapes as described.
                unsafe { rms_norm_on(isa, &norm) };
            };
            call(
                total.1.as_ptr().cast_mut(),
                std::ptr::null_mut(),
                expected.1.as_mut_ptr(),
            );
            let data = x.1.as_mut_ptr();
            call(data, residual.1.as_mut_ptr(), data);
            assert_eq!(residual, total, "{isa:?}");
            assert_eq!(x, expected, "{isa:?}");
        }
    }

    #[test]
    fn rope_turns_pairs_by_their_positions() {
        for (isa, dtype) in Isa::available()
            .into_iter()
            .flat_map(|isa| DTYPES.map(|d| (isa, d)))
        {
            for (dim, pairs) in [2, 16, 20, 64, 128]
                .into_iter()
                .flat_map(|dim| PAIRS.map(|pairs| (dim, pairs)))
            {
                let tokens = 3;
                let heads = 2;
                let half = dim / 2;
                let stride = heads * dim + 3;
                let mut x = Stored::new(dtype, &noise(tokens * stride, 1));
                let before = x.values();
                let angles: Vec<f32> = (0..7 * half).map(|i| i as f32 * 0.37).collect();
                let cos: Vec<f32> = angles.iter().map(|a| a.cos()).collect();
                let sin: Vec<f32> = angles.iter().map(|a| a.sin()).collect();
                let positions = [6, 0, 3];
                let vectors = HeadVectors {
                    data: x.1.as_mut_ptr(),
                    outer: tokens,
                    inner: heads,
                    outer_stride: stride,
                    inner_stride: dim,
                    len: dim,
                };
                let call = RotaryEmbedding {
                    dtype,
                    pairs,
                    x: vectors,
                    positions: &positions,
                    cos: cos.as_ptr(),
                    sin: sin.as_ptr(),
                };
                // SAFETY: shapes as described.
                unsafe { rope_on(isa, &call) };
                let mut want: Vec<f64> = before.iter().map(|&v| f64::from(v)).collect();
                for (t, position) in positions.iter().enumerate() {
                    for h in 0..heads {
                        for i in 0..half {
                            let head = t * stride + h * dim;
                            let (first, second) = match pairs {
                                RotaryPairs::Halves => (head + i, head + half + i),
                                RotaryPairs::Interleaved => (head + 2 * i, head + 2 * i + 1),
                            };
                            let a = f64::from(before[first]);
                            let b = f64::from(before[second]);
                            let angle = *position as usize * half + i;
                            let c = f64::from(cos[angle]);
                            let s = f64::from(sin[angle]);
                            want[first] = a * c - b * s;
                            want[second] = b * c + a * s;
                        }
                    }
                }
                for (i, (a, b)) in x.values().iter().zip(&want).enumerate() {
                    let room = if dtype == Dtype::F32 { 2e-7 } else { 6e-3 };
                    assert!(
                        (f64::from(*a) - b).abs() <= room,
                        "{isa:?} {dtype:?} dim {dim} {pairs:?} [{i}]: {a} not {b}"
                    );
                }
            }
        }
    }

    #[test]
    fn sigmoid_is_close_to_f64_and_does_not_depend_on_the_place() {
        let rows = 7;
        let len = 13;
        for (isa, dtype) in Isa::available()
            .into_iter()
            .flat_map(|isa| DTYPES.map(|d| (isa, d)))
        {
            let mut values: Vec<f32> = noise(rows * len, 3).iter().map(|x| x * 30.0).collect();
            values[..4].copy_from_slice(&[f32::MAX, f32::MIN, 0.0, -0.0]);
            let x = Stored::new(dtype, &values);
            let size = dtype.bytes();
            let run = |from: usize, rows: usize| {
                let mut out = vec![0xff_u8; rows * len * size];
                let call = Sigmoid {
                    dtype,
                    x: x.1[from * len * size..].as_ptr(),
                    rows,
                    len,
                    out: out.as_mut_ptr(),
                };
                // SAFETY: shapes as described.
                unsafe { sigmoid_on(isa, &call) };
                out
            };
            let whole = run(0, rows);
            for row in 0..rows {
                let bytes = row * len * size..(row + 1) * len * size;
                assert_eq!(run(row, 1), whole[bytes], "{isa:?} {dtype:?} row {row}");
            }
            let rounding = if dtype == Dtype::F32 { 4e-7 } else { 4e-3 };
            for (x, y) in x.values().iter().zip(Stored(dtype, whole).values()) {
                let want = 1.0 / (1.0 + (-f64::from(*x)).exp());
                // The exponent is rounded to 24 bits, so the power's error grows with it.
                let room = rounding + 6e-8 * f64::from(x.abs().min(100.0));
                assert!(
                    (f64::from(y) - want).abs() <= room * want.max(1e-30),
                    "{isa:?} {dtype:?}: sigmoid {x} = {y}, not {want}"
                );
            }
        }
    }

    #[test]
    fn float32_weight_is_multiplied_before_the_result_is_rounded() {
        for (isa, dtype) in Isa::available()
            .into_iter()
            .flat_map(|isa| DTYPES.map(|d| (isa, d)))
        {
            let rows = 3;
            let len = 75;
            let mut x = Stored::new(dtype, &noise(rows * len, 1));
            let weight = Stored::new(Dtype::F32, &noise(len, 2));
            let values = x.values();
            let data = x.1.as_mut_ptr();
            let norm = RmsNorm {
                dtype,
                x: HeadVectors {
                    data,
                    outer: rows,
                    inner: 1,
                    outer_stride: len,
                    inner_stride: len,
                    len,
                },
                residual: std::ptr::null_mut(),
                weight: weight.1.as_ptr(),
                has_f32_weight: true,
                eps: 1e-6,
                out: data,
            };
            // SAFETY: shapes as described.
            unsafe { rms_norm_on(isa, &norm) };
            let want: Vec<f64> = values
                .chunks(len)
                .flat_map(|row| {
                    let squares: f64 = row.iter().map(|a| f64::from(*a).powi(2)).sum();
                    let inverse = 1.0 / (squares / len as f64 + 1e-6).sqrt();
                    let products = row.iter().zip(weight.values());
                    products.map(move |(a, b)| f64::from(*a) * inverse * f64::from(b))
                })
                .collect();
            // One rounding: half a unit in the last of 8 bits, which two roundings exceed.
            for (i, (a, b)) in x.values().iter().zip(&want).enumerate() {
                let room = if dtype == Dtype::F32 { 2e-6 } else { 3.92e-3 };
                assert!(
                    (f64::from(*a) - b).abs() <= room * b.abs().max(1e-3),
                    "{isa:?} {dtype:?} [{i}]: {a} not {b}"
                );
            }
        }
    }

    #[test]
    fn gated_products_equal_the_reference_also_far_out() {
        let clamped = Activation::ClampedSilu {
            gain: 1.702,
            limit: 7.0,
        };
        for activation in [Activation::Silu, Activation::GeluTanh, clamped] {
            for (isa, dtype) in Isa::available()
                .into_iter()
                .flat_map(|isa| DTYPES.map(|d| (isa, d)))
            {
                let rows = 3;
                let len = 50;
                let mut values: Vec<f32> =
                    noise(rows * 2 * len, 4).iter().map(|v| v * 12.0).collect();
                values[..6].copy_from_slice(&[0.0, 200.0, -200.0, 88.0, -88.0, -30.0]);
                let gate_up = Stored::new(dtype, &values);
                let mut out = Stored::new(dtype, &vec![0.0; rows * len]);
                let product = GatedProduct {
                    dtype,
                    activation,
                    gate_up: gate_up.1.as_ptr(),
                    stride: 2 * len,
                    rows,
                    len,
                    out: out.1.as_mut_ptr(),
                };
                // SAFETY: shapes as described.
                unsafe { multiply_gated_on(isa, &product) };
                let v = gate_up.values();
                let want: Vec<f64> = (0..rows * len)
                    .map(|i| {
                        let at = i / len * 2 * len + i % len;
                        let g = f64::from(v[at]);
                        let u = f64::from(v[at + len]);
                        match activation {
                            Activation::Silu => g / (1.0 + (-g).exp()) * u,
                            Activation::GeluTanh => {
                                let inner = (2.0 / std::f64::consts::PI).sqrt()
                                    * (g + 0.044_715 * g.powi(3));
                                g / 2.0 * (1.0 + inner.tanh()) * u
                            }
                            Activation::ClampedSilu { gain, limit } => {
                                let limit = f64::from(limit);
                                let g = g.min(limit);
                                let u = u.clamp(-limit, limit);
                                g / (1.0 + (-g * f64::from(gain)).exp()) * (u + 1.0)
                            }
                        }
                    })
                    .collect();
                assert_close(&out, &want, 4e-6, &format!("{activation:?} {isa:?}"));
            }
        }
    }
}
