//! A causal convolution over the last few tokens, each channel by itself, and SiLU.
//!
//! The state of a sequence is its last `taps - 1` inputs, the oldest first; zeros stand in front of
//! the first token. Sums are chains from the oldest input to the newest. Rounding follows
//! transformers: the sum is rounded before SiLU, and its result again.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, CausalConv's pointers cover its shapes"
)]

use std::marker::PhantomData;

use crate::elem::{Bf16, Dtype, ElementType, F32, load_part, store_part};
use crate::elementwise::Activation;
use crate::isa::{self, Isa};
use crate::pool;
use crate::recurrent::StateRows;
use crate::simd::{Simd, SimdKernel, dispatch};

/// Most inputs that an output depends on.
pub const MAX_TAPS: usize = 8;
/// Channels of an item: a few us of work with one token, and enough items for all threads.
const CHANNELS: usize = 512;

/// Arguments of one layer's convolution; T tokens, C channels.
#[derive(Clone, Copy, Debug)]
pub struct CausalConv<'a> {
    pub dtype: Dtype,
    /// `[T, C]`, rows `x_stride` elements apart.
    pub x: *const u8,
    pub x_stride: usize,
    pub channels: usize,
    pub taps: usize,
    /// float32 `[taps, C]`; the last row is that of the newest input.
    pub weight: *const f32,
    /// In `dtype`: slot s has `[taps - 1, C]` from element `s * state_stride` on.
    pub state: *mut u8,
    pub state_stride: usize,
    /// Checked against the tokens and the states.
    pub rows: StateRows<'a>,
    /// `[T, C]`, contiguous.
    pub out: *mut u8,
}

// SAFETY: items have disjoint channels of `out` and of states; the caller of `causal_conv` vouches
// for the memory.
unsafe impl Sync for CausalConv<'_> {}

/// Cost: reads x and writes `out` once. Allocates nothing.
///
/// # Safety
/// Pointers cover the shapes; no other thread accesses `state` or `out`, or writes the rest,
/// meanwhile.
pub unsafe fn causal_conv(call: &CausalConv) {
    // SAFETY: passed on.
    unsafe { causal_conv_on(isa::current(), call) }
}

/// # Safety
/// As [`causal_conv`], and `isa.runs_here()`.
pub unsafe fn causal_conv_on(isa: Isa, call: &CausalConv) {
    assert!(
        (1..=MAX_TAPS).contains(&call.taps),
        "{} taps are not between 1 and {MAX_TAPS}",
        call.taps
    );
    let parts = call.channels.div_ceil(CHANNELS);
    pool::for_each(call.rows.len() * parts, &|i| {
        let row = i / parts;
        let first = i % parts * CHANNELS;
        // SAFETY: passed on.
        unsafe {
            match call.dtype {
                Dtype::F32 => dispatch(isa, Item::<F32>(call, row, first, PhantomData)),
                Dtype::Bf16 => dispatch(isa, Item::<Bf16>(call, row, first, PhantomData)),
            }
        }
    });
}

/// A row, and the first of its channels.
struct Item<'a, E>(&'a CausalConv<'a>, usize, usize, PhantomData<E>);

impl<E: ElementType> SimdKernel for Item<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Item(call, row, first, _) = self;
        let end = (first + CHANNELS).min(call.channels);
        for channel in (first..end).step_by(S::LANES) {
            pass_row::<S, E>(call, row, channel, end - channel);
        }
    }
}

/// All tokens of a row, in the `n` channels from `channel` on, as far as a vector goes.
#[inline(always)]
unsafe fn pass_row<S: Simd, E: ElementType>(
    call: &CausalConv,
    row: usize,
    channel: usize,
    n: usize,
) {
    let newest = call.taps - 1;
    let slot = call.rows.slots[row] as usize;
    let state = call.state.cast::<E::T>().add(slot * call.state_stride);
    // The inputs that the next output depends on, the oldest first.
    let mut inputs = [S::splat(0.0); MAX_TAPS];
    let mut weights = [S::splat(0.0); MAX_TAPS];
    for tap in 0..call.taps {
        let place = tap * call.channels + channel;
        weights[tap] = load_part::<S, F32>(call.weight.add(place), n);
        if tap < newest {
            inputs[tap] = load_part::<S, E>(state.add(place), n);
        }
    }
    for token in call.rows.tokens(row) {
        let x = call.x.cast::<E::T>().add(token * call.x_stride + channel);
        inputs[newest] = load_part::<S, E>(x, n);
        let mut sum = S::mul(inputs[0], weights[0]);
        for tap in 1..call.taps {
            sum = S::fma(inputs[tap], weights[tap], sum);
        }
        let rounded = E::round::<S>(sum);
        let passed = Activation::Silu.multiply::<S, E>(rounded, S::splat(1.0));
        let out = call.out.cast::<E::T>().add(token * call.channels + channel);
        store_part::<S, E>(out, passed, n);
        for tap in 0..newest {
            inputs[tap] = inputs[tap + 1];
        }
    }
    for (tap, input) in inputs.iter().enumerate().take(newest) {
        store_part::<S, E>(state.add(tap * call.channels + channel), *input, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::tests::{Stored, noise};

    const TAPS: usize = 4;
    const SLOTS: usize = 3;

    struct World {
        dtype: Dtype,
        channels: usize,
        x: Stored,
        weight: Vec<f32>,
    }

    impl World {
        /// Outputs of all tokens of one sequence that is cut into rows of these lengths.
        fn outputs(&self, isa: Isa, rows: &[usize]) -> Vec<u8> {
            let size = self.dtype.bytes();
            let tokens: usize = rows.iter().sum();
            let width = self.channels * size;
            // The other states are never read.
            let mut state = vec![0xff_u8; SLOTS * (TAPS - 1) * width];
            let slot = 1;
            let per_slot = (TAPS - 1) * width;
            state[slot * per_slot..(slot + 1) * per_slot].fill(0);
            let before = state.clone();
            let mut out = vec![0_u8; tokens * width];
            let mut first = 0;
            for &n in rows {
                let call = CausalConv {
                    dtype: self.dtype,
                    x: self.x.1[first * (width + size)..].as_ptr(),
                    x_stride: self.channels + 1,
                    channels: self.channels,
                    taps: TAPS,
                    weight: self.weight.as_ptr(),
                    state: state.as_mut_ptr(),
                    state_stride: (TAPS - 1) * self.channels,
                    rows: StateRows {
                        starts: &[0],
                        ends: &[n as i32],
                        slots: &[slot as i32],
                    },
                    out: out[first * width..].as_mut_ptr(),
                };
                // SAFETY: shapes as described.
                unsafe { causal_conv_on(isa, &call) };
                first += n;
            }
            assert_eq!(state[..per_slot], before[..per_slot]);
            assert_eq!(state[2 * per_slot..], before[2 * per_slot..]);
            out
        }
    }

    #[test]
    fn outputs_equal_the_reference_and_do_not_depend_on_the_cut() {
        let tokens = 11;
        for isa in Isa::available() {
            for (dtype, channels) in [(Dtype::F32, 600), (Dtype::Bf16, 37), (Dtype::F32, 5)] {
                let world = World {
                    dtype,
                    channels,
                    x: Stored::new(dtype, &noise(tokens * (channels + 1), 1)),
                    weight: noise(TAPS * channels, 2),
                };
                let whole = world.outputs(isa, &[tokens]);
                for cut in [&[1_usize; 11][..], &[4, 1, 6], &[2, 9]] {
                    assert_eq!(world.outputs(isa, cut), whole, "{isa:?} {dtype:?} {cut:?}");
                }
                let x = world.x.values();
                for (i, got) in Stored(dtype, whole).values().iter().enumerate() {
                    let token = i / channels;
                    let channel = i % channels;
                    let mut sum = 0.0_f64;
                    for tap in 0..TAPS {
                        let Some(from) = (token + tap + 1).checked_sub(TAPS) else {
                            continue;
                        };
                        let input = f64::from(x[from * (channels + 1) + channel]);
                        sum += input * f64::from(world.weight[tap * channels + channel]);
                    }
                    let want = sum / (1.0 + (-sum).exp());
                    let room = if dtype == Dtype::F32 { 2e-6 } else { 2e-2 };
                    assert!(
                        (f64::from(*got) - want).abs() <= room,
                        "{isa:?} {dtype:?} token {token} channel {channel}: {got}, not {want}"
                    );
                }
            }
        }
    }
}
