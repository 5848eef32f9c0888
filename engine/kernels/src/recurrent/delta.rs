//! The gated delta rule (arXiv 2412.06464): a matrix per head that is read with a query, and
//! corrected towards a value where it is read with a key.
//!
//! Per token and value head, with keys and queries of length 1 and queries divided by
//! sqrt(key_dim):
//!
//! ```text
//! S <- S * exp(-exp(rate) * softplus(a + bias))
//! S <- S + k (v - S^T k) * sigmoid(b)              S [key_dim, value_dim], float32
//! o  = S^T q
//! ```
//!
//! A head has one `a` for all of S, or one for each of its rows (Kimi delta attention, arXiv
//! 2510.26692).
//!
//! Columns of S do not depend on each other, so an item has some columns of one head of one row,
//! and all tokens of it: they stay in the first-level cache. Each column's sums are chains in the
//! order of key elements.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, GatedDelta's pointers cover its shapes"
)]

use std::marker::PhantomData;

use crate::elem::{Bf16, Dtype, ElementType, F32, load_part, store_part};
use crate::isa::{self, Isa};
use crate::math::{LOG2_E, exp2, softplus};
use crate::memory::scratch::{padded, with_scratch};
use crate::pool;
use crate::recurrent::StateRows;
use crate::simd::{SUM_LANES, Simd, SimdKernel, dispatch, tree_sum};

/// Columns of an item: 32 KiB of S with keys of 128 elements.
const COLUMNS: usize = 64;
/// Vectors of an item's columns at the level with the fewest lanes.
const MOST_VECTORS: usize = COLUMNS / 8;
/// Added to the square of a length before the root.
const LENGTH_EPS: f32 = 1e-6;

/// Each key head serves `value_heads / key_heads` value heads that follow each other.
#[derive(Clone, Copy, Debug)]
pub struct DeltaSizes {
    pub key_heads: usize,
    pub value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// Of a value head: 1, or `key_dim`, one for each row of S.
    pub decays: usize,
}

/// Arguments of one layer's rule; T tokens.
#[derive(Clone, Copy, Debug)]
pub struct GatedDelta<'a> {
    pub dtype: Dtype,
    pub sizes: DeltaSizes,
    /// Per token the queries and the keys of key heads, then the values of value heads; contiguous.
    pub qkv: *const u8,
    /// b: `[T, value_heads]`, rows `strength_stride` elements apart.
    pub strengths: *const u8,
    pub strength_stride: usize,
    /// a: `[T, value_heads * decays]`, rows `decay_stride` elements apart.
    pub decays: *const u8,
    pub decay_stride: usize,
    /// float32 `[value_heads]`: logarithms.
    pub rate: *const f32,
    /// float32 `[value_heads * decays]`
    pub bias: *const f32,
    /// Slot s has `[value_heads, key_dim, value_dim]` from element `s * state_stride` on.
    pub state: *mut f32,
    pub state_stride: usize,
    /// Checked against the tokens and the states.
    pub rows: StateRows<'a>,
    /// `[T, value_heads, value_dim]`, contiguous.
    pub out: *mut u8,
}

// SAFETY: items have disjoint columns of `out` and of states; the caller of `gated_delta` vouches
// for the memory.
unsafe impl Sync for GatedDelta<'_> {}

/// Cost: reads and writes each row's state once; 6 flops per token and element of it. Allocates
/// nothing once each thread's scratch has grown.
///
/// # Safety
/// Pointers cover the shapes; no other thread accesses `state` or `out`, or writes the rest,
/// meanwhile.
pub unsafe fn gated_delta(call: &GatedDelta) {
    // SAFETY: passed on.
    unsafe { gated_delta_on(isa::current(), call) }
}

/// # Safety
/// As [`gated_delta`], and `isa.runs_here()`.
pub unsafe fn gated_delta_on(isa: Isa, call: &GatedDelta) {
    let parts = call.sizes.value_dim.div_ceil(COLUMNS);
    let heads = call.sizes.value_heads;
    let key_dim = call.sizes.key_dim;
    let words = padded(key_dim * COLUMNS) + 4 * padded(key_dim);
    pool::for_each(call.rows.len() * heads * parts, &|i| {
        // In front of `dispatch`: a closure inside would not be compiled for the level.
        with_scratch(words, |mut scratch| {
            let item = Item {
                call,
                row: i / parts / heads,
                head: i / parts % heads,
                first_column: i % parts * COLUMNS,
                columns: scratch.take(key_dim * COLUMNS).cast(),
                query: scratch.take(key_dim).cast(),
                key: scratch.take(key_dim).cast(),
                decays: scratch.take(key_dim).cast(),
                decayed_key: scratch.take(key_dim).cast(),
            };
            // SAFETY: passed on; the pieces have the sizes they need.
            unsafe {
                match call.dtype {
                    Dtype::F32 => dispatch(isa, TypedItem::<F32>(item, PhantomData)),
                    Dtype::Bf16 => dispatch(isa, TypedItem::<Bf16>(item, PhantomData)),
                }
            }
        });
    });
}

/// Columns of one head's state of one row, and all tokens of the row.
#[derive(Clone, Copy)]
struct Item<'a> {
    call: &'a GatedDelta<'a>,
    row: usize,
    head: usize,
    first_column: usize,
    /// `[key_dim, COLUMNS]`
    columns: *mut f32,
    /// Of a token, `[key_dim]` as what follows.
    query: *mut f32,
    key: *mut f32,
    /// What multiplies each row of S before the token, where rows decay by themselves.
    decays: *mut f32,
    /// Reads of S what the key reads of the decayed one.
    decayed_key: *mut f32,
}

struct TypedItem<'a, E>(Item<'a>, PhantomData<E>);

impl<E: ElementType> SimdKernel for TypedItem<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        if self.0.call.sizes.decays == 1 {
            self.0.pass_tokens::<S, E, false>();
        } else {
            self.0.pass_tokens::<S, E, true>();
        }
    }
}

impl Item<'_> {
    /// Args: `BY_ROW`: each row of S decays by itself.
    #[inline(always)]
    unsafe fn pass_tokens<S: Simd, E: ElementType, const BY_ROW: bool>(&self) {
        let call = self.call;
        let columns = self.columns;
        let sizes = call.sizes;
        let key_dim = sizes.key_dim;
        let key_size = sizes.key_heads * key_dim;
        let value_size = sizes.value_heads * sizes.value_dim;
        let key_head = self.head / (sizes.value_heads / sizes.key_heads);
        let own_values = self.head * sizes.value_dim + self.first_column;
        let query_factor = 1.0 / (key_dim as f32).sqrt();
        self.load_columns::<S>();
        for token in call.rows.tokens(self.row) {
            let qkv = call
                .qkv
                .cast::<E::T>()
                .add(token * (2 * key_size + value_size));
            let head_query = qkv.add(key_head * key_dim);
            set_length::<S, E>(head_query, key_dim, query_factor, self.query);
            set_length::<S, E>(head_query.add(key_size), key_dim, 1.0, self.key);
            let (reader, head_decay) = if BY_ROW {
                self.set_decays::<S, E>(token);
                (self.decayed_key, S::splat(1.0))
            } else {
                (self.key, S::splat(self.decay_of_head::<E>(token)))
            };
            let value = qkv.add(2 * key_size + own_values);
            let strength = S::splat(self.strength::<E>(token));

            let vectors = COLUMNS / S::LANES;
            let mut correction = [S::splat(0.0); MOST_VECTORS];
            for d in 0..key_dim {
                let k = S::splat(reader.add(d).read());
                let row = columns.add(d * COLUMNS);
                for (v, sum) in correction.iter_mut().enumerate().take(vectors) {
                    *sum = S::fma(S::load(row.add(v * S::LANES)), k, *sum);
                }
            }
            for (v, sum) in correction.iter_mut().enumerate().take(vectors) {
                let at = v * S::LANES;
                let want = load_part::<S, E>(value.add(at), self.columns_from(at));
                *sum = S::mul(S::sub(want, S::mul(head_decay, *sum)), strength);
            }
            let mut result = [S::splat(0.0); MOST_VECTORS];
            for d in 0..key_dim {
                let k = S::splat(self.key.add(d).read());
                let q = S::splat(self.query.add(d).read());
                let decay = if BY_ROW {
                    S::splat(self.decays.add(d).read())
                } else {
                    head_decay
                };
                let row = columns.add(d * COLUMNS);
                for (v, sum) in result.iter_mut().enumerate().take(vectors) {
                    let at = row.add(v * S::LANES);
                    let kept = S::mul(S::load(at), decay);
                    let element = S::fma(k, correction[v], kept);
                    S::store(at, element);
                    *sum = S::fma(element, q, *sum);
                }
            }
            let out = call.out.cast::<E::T>().add(token * value_size + own_values);
            for (v, sum) in result.iter().enumerate().take(vectors) {
                let at = v * S::LANES;
                store_part::<S, E>(out.add(at), *sum, self.columns_from(at));
            }
        }
        self.store_columns::<S>();
    }

    /// Columns of the item from its column `at` on.
    #[inline(always)]
    fn columns_from(&self, at: usize) -> usize {
        (self.call.sizes.value_dim - self.first_column)
            .min(COLUMNS)
            .saturating_sub(at)
    }

    /// Element 0 of the item's first column.
    #[inline(always)]
    unsafe fn matrix(&self) -> *mut f32 {
        let sizes = self.call.sizes;
        let slot = self.call.rows.slots[self.row] as usize;
        self.call.state.add(
            slot * self.call.state_stride
                + self.head * sizes.key_dim * sizes.value_dim
                + self.first_column,
        )
    }

    /// Copy the item's columns, and zeros behind them.
    #[inline(always)]
    unsafe fn load_columns<S: Simd>(&self) {
        let matrix = self.matrix();
        for d in 0..self.call.sizes.key_dim {
            let row = matrix.add(d * self.call.sizes.value_dim);
            for at in (0..COLUMNS).step_by(S::LANES) {
                let part = load_part::<S, F32>(row.add(at), self.columns_from(at));
                S::store(self.columns.add(d * COLUMNS + at), part);
            }
        }
    }

    #[inline(always)]
    unsafe fn store_columns<S: Simd>(&self) {
        let matrix = self.matrix();
        for d in 0..self.call.sizes.key_dim {
            let row = matrix.add(d * self.call.sizes.value_dim);
            for at in (0..COLUMNS).step_by(S::LANES) {
                let part = S::load(self.columns.add(d * COLUMNS + at));
                store_part::<S, F32>(row.add(at), part, self.columns_from(at));
            }
        }
    }

    /// What multiplies the correction of a token.
    #[inline(always)]
    unsafe fn strength<E: ElementType>(&self, token: usize) -> f32 {
        let strengths = self.call.strengths.cast::<E::T>();
        let b = strengths
            .add(token * self.call.strength_stride + self.head)
            .read();
        E::to_f32(E::from_f32(1.0 / (1.0 + (-E::to_f32(b)).exp())))
    }

    /// What multiplies all of S before the token.
    #[inline(always)]
    unsafe fn decay_of_head<E: ElementType>(&self, token: usize) -> f32 {
        let a = self.call.decays.cast::<E::T>();
        let a = E::to_f32(a.add(token * self.call.decay_stride + self.head).read());
        let x = a + self.call.bias.add(self.head).read();
        // ln(1 + e^x) is x itself above 20, where the difference is below its last bit.
        let step = if x > 20.0 { x } else { x.exp().ln_1p() };
        let rate = self.call.rate.add(self.head).read().exp();
        (-rate * step).exp()
    }

    /// Write the decays of rows, and the key times them.
    #[inline(always)]
    unsafe fn set_decays<S: Simd, E: ElementType>(&self, token: usize) {
        let key_dim = self.call.sizes.key_dim;
        let first = self.head * key_dim;
        let a = self.call.decays.cast::<E::T>();
        let a = a.add(token * self.call.decay_stride + first);
        let bias = self.call.bias.add(first);
        let rate = S::splat(-LOG2_E * self.call.rate.add(self.head).read().exp());
        for i in (0..key_dim).step_by(S::LANES) {
            let left = key_dim - i;
            let x = S::add(
                load_part::<S, E>(a.add(i), left),
                load_part::<S, F32>(bias.add(i), left),
            );
            let decay = exp2::<S>(S::mul(rate, softplus::<S>(x)));
            let key = load_part::<S, F32>(self.key.add(i), left);
            store_part::<S, F32>(self.decays.add(i), decay, left);
            store_part::<S, F32>(self.decayed_key.add(i), S::mul(key, decay), left);
        }
    }
}

/// Write x `[n]` with the length `length`.
#[inline(always)]
unsafe fn set_length<S: Simd, E: ElementType>(
    x: *const E::T,
    n: usize,
    length: f32,
    out: *mut f32,
) {
    let mut sums = [S::splat(0.0); 2];
    for i in (0..n).step_by(S::LANES) {
        let part = load_part::<S, E>(x.add(i), n - i);
        let lanes = &mut sums[i % SUM_LANES / S::LANES];
        *lanes = S::fma(part, part, *lanes);
    }
    let mut squares = [0.0_f32; SUM_LANES];
    for (lanes, sum) in squares.chunks_exact_mut(S::LANES).zip(sums) {
        S::store(lanes.as_mut_ptr(), sum);
    }
    let factor = S::splat(length / (tree_sum(&squares) + LENGTH_EPS).sqrt());
    for i in (0..n).step_by(S::LANES) {
        let part = load_part::<S, E>(x.add(i), n - i);
        store_part::<S, F32>(out.add(i), S::mul(part, factor), n - i);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::tests::{Stored, noise};

    const SLOTS: usize = 4;

    struct World {
        dtype: Dtype,
        sizes: DeltaSizes,
        qkv: Stored,
        strengths: Stored,
        decays: Stored,
        rate: Vec<f32>,
        bias: Vec<f32>,
    }

    impl World {
        fn new(dtype: Dtype, sizes: DeltaSizes, tokens: usize) -> World {
            let width = sizes.key_heads * sizes.key_dim * 2 + sizes.value_heads * sizes.value_dim;
            let all_decays = sizes.value_heads * sizes.decays;
            let mut decays = noise(tokens * all_decays, 2);
            // From next to none to nothing left.
            decays[..3].copy_from_slice(&[25.0, -25.0, 300.0]);
            World {
                dtype,
                sizes,
                qkv: Stored::new(dtype, &noise(tokens * width, 1)),
                strengths: Stored::new(dtype, &noise(tokens * sizes.value_heads, 5)),
                decays: Stored::new(dtype, &decays),
                rate: noise(sizes.value_heads, 3),
                bias: noise(all_decays, 4),
            }
        }

        fn state_size(&self) -> usize {
            self.sizes.value_heads * self.sizes.key_dim * self.sizes.value_dim
        }

        /// Compute tokens [first, first + n) as rows of these lengths, each in a slot of its own.
        fn pass(
            &self,
            isa: Isa,
            first: usize,
            rows: &[(usize, i32)],
            state: &mut [f32],
        ) -> Vec<u8> {
            let size = self.dtype.bytes();
            let heads = self.sizes.value_heads;
            let width = heads * self.sizes.value_dim;
            let tokens: usize = rows.iter().map(|row| row.0).sum();
            let ends: Vec<i32> = rows
                .iter()
                .scan(0, |end, row| {
                    *end += row.0 as i32;
                    Some(*end)
                })
                .collect();
            let starts: Vec<i32> = rows
                .iter()
                .zip(&ends)
                .map(|(row, end)| end - row.0 as i32)
                .collect();
            let slots: Vec<i32> = rows.iter().map(|row| row.1).collect();
            let mut out = vec![0_u8; tokens * width * size];
            let inputs = 2 * self.sizes.key_heads * self.sizes.key_dim + width;
            let call = GatedDelta {
                dtype: self.dtype,
                sizes: self.sizes,
                qkv: self.qkv.1[first * inputs * size..].as_ptr(),
                strengths: self.strengths.1[first * heads * size..].as_ptr(),
                strength_stride: heads,
                decays: self.decays.1[first * heads * self.sizes.decays * size..].as_ptr(),
                decay_stride: heads * self.sizes.decays,
                rate: self.rate.as_ptr(),
                bias: self.bias.as_ptr(),
                state: state.as_mut_ptr(),
                state_stride: self.state_size(),
                rows: StateRows {
                    starts: &starts,
                    ends: &ends,
                    slots: &slots,
                },
                out: out.as_mut_ptr(),
            };
            call.rows.check(tokens, SLOTS).expect("rows are good");
            // SAFETY: shapes as described.
            unsafe { gated_delta_on(isa, &call) };
            out
        }

        /// The rule in f64, one sequence.
        fn want(&self, tokens: usize) -> Vec<f64> {
            let s = self.sizes;
            let qkv: Vec<f64> = self.qkv.values().into_iter().map(f64::from).collect();
            let strengths = self.strengths.values();
            let decays = self.decays.values();
            let key_size = s.key_heads * s.key_dim;
            let width = 2 * key_size + s.value_heads * s.value_dim;
            let mut out = vec![0.0; tokens * s.value_heads * s.value_dim];
            for head in 0..s.value_heads {
                let mut state = vec![0.0; s.key_dim * s.value_dim];
                for token in 0..tokens {
                    let inputs = &qkv[token * width..][..width];
                    let place = head * s.key_heads / s.value_heads * s.key_dim;
                    let unit = |x: &[f64]| -> Vec<f64> {
                        let squares: f64 = x.iter().map(|v| v * v).sum();
                        x.iter().map(|v| v / (squares + 1e-6).sqrt()).collect()
                    };
                    let q = unit(&inputs[place..][..s.key_dim]);
                    let k = unit(&inputs[key_size + place..][..s.key_dim]);
                    let v = &inputs[2 * key_size + head * s.value_dim..][..s.value_dim];
                    let b = f64::from(strengths[token * s.value_heads + head]);
                    let strength = 1.0 / (1.0 + (-b).exp());
                    for (d, row) in state.chunks_exact_mut(s.value_dim).enumerate() {
                        let place = head * s.decays + if s.decays == 1 { 0 } else { d };
                        let given = decays[token * s.value_heads * s.decays + place];
                        let a = f64::from(given) + f64::from(self.bias[place]);
                        let rate = f64::from(self.rate[head]).exp();
                        let decay = (-rate * a.exp().ln_1p()).exp();
                        row.iter_mut().for_each(|x| *x *= decay);
                    }
                    for c in 0..s.value_dim {
                        let read: f64 = (0..s.key_dim)
                            .map(|d| state[d * s.value_dim + c] * k[d])
                            .sum();
                        let correction = (v[c] - read) * strength;
                        let mut result = 0.0;
                        for d in 0..s.key_dim {
                            let element = &mut state[d * s.value_dim + c];
                            *element += k[d] * correction;
                            result += *element * q[d] / (s.key_dim as f64).sqrt();
                        }
                        out[(token * s.value_heads + head) * s.value_dim + c] = result;
                    }
                }
            }
            out
        }
    }

    #[test]
    fn results_equal_the_reference_and_do_not_depend_on_rows_or_their_cuts() {
        let small = DeltaSizes {
            key_heads: 2,
            value_heads: 4,
            key_dim: 12,
            value_dim: 20,
            decays: 1,
        };
        let wide = DeltaSizes {
            key_heads: 1,
            value_heads: 3,
            key_dim: 32,
            value_dim: 72,
            decays: 32,
        };
        let small_with_many = DeltaSizes {
            decays: 12,
            ..small
        };
        let tokens = 9;
        for isa in Isa::available() {
            for (dtype, sizes) in [
                (Dtype::F32, small),
                (Dtype::F32, small_with_many),
                (Dtype::F32, wide),
                (Dtype::Bf16, small),
                (Dtype::Bf16, wide),
            ] {
                let world = World::new(dtype, sizes, tokens);
                let size = world.state_size();
                let mut state = vec![0.0; SLOTS * size];
                let whole = world.pass(isa, 0, &[(tokens, 1)], &mut state);
                // In pieces, in another slot.
                let mut pieces = Vec::new();
                let mut first = 0;
                for n in [1, 1, 5, 2] {
                    pieces.extend(world.pass(isa, first, &[(n, 3)], &mut state));
                    first += n;
                }
                assert!(pieces == whole, "{isa:?} {dtype:?}");
                assert!(
                    state[size..2 * size] == state[3 * size..],
                    "{isa:?} {dtype:?}"
                );
                assert!(state[2 * size..3 * size].iter().all(|&x| x == 0.0));
                // Tokens 0 and 1 as two sequences: the first goes as before.
                let mut others = vec![0.0; SLOTS * size];
                let both = world.pass(isa, 0, &[(1, 2), (1, 0)], &mut others);
                let token = both.len() / 2;
                assert!(both[..token] == whole[..token], "{isa:?} {dtype:?}");

                let want = world.want(tokens);
                let room = if dtype == Dtype::F32 { 3e-6 } else { 4e-3 };
                for (i, got) in Stored(dtype, whole).values().iter().enumerate() {
                    assert!(
                        (f64::from(*got) - want[i]).abs() <= room,
                        "{isa:?} {dtype:?} [{i}]: {got}, not {}",
                        want[i]
                    );
                }
            }
        }
    }
}
