//! The one inner loop: a block of a matrix product held in registers.
//!
//! ```text
//! out[m][v] (+)= sum over k of x[m][k] * w[k][v]        m rows, v vectors of LANES columns, k
//! units
//! ```
//!
//! Every element of `out` is one chain of fused multiply-adds in the order of k, started from zero
//! or from its value in memory. So its bits depend on its row of x and its column of w alone: not
//! on the number of rows, the tile's shape, the vector width, or where a long reduction was cut.
//! All exactness claims of this crate rest on this.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the shapes given"
)]

use std::marker::PhantomData;

use crate::elem::ElementType;
use crate::simd::{Simd, SimdKernel};

/// Operands of a product; see the module's formula.
#[derive(Clone, Copy)]
pub struct TileOperands {
    /// Packed left rows, XS words apart.
    pub x: *const u32,
    /// Right units, `w_stride` words from one k to the next, each row padded to whole vectors.
    pub w: *const u32,
    pub w_stride: usize,
    /// Reduction length in units.
    pub units: usize,
    /// f32 sums, rows `out_stride` apart, padded to whole vectors.
    pub out: *mut f32,
    pub out_stride: usize,
    /// Start from what `out` holds, else from zero.
    pub add: bool,
    /// A factor in f32 for each column, padded to whole vectors: the chain starts from zero, and
    /// one more multiply-add adds it, times the factor, to what `add` says.
    pub scales: Option<*const f32>,
    /// `w` comes from memory in order: ask for what is ahead.
    pub stream: bool,
}

/// Words of `w` between use and prefetch: 4 KiB, what arrives in the 100 ns a line takes at 40
/// GB/s.
const AHEAD: usize = 1024;

struct Tile<E: ElementType, const MR: usize, const NR: usize, const XS: usize, const STREAM: bool>(
    TileOperands,
    PhantomData<E>,
);

impl<E: ElementType, const MR: usize, const NR: usize, const XS: usize, const STREAM: bool>
    SimdKernel for Tile<E, MR, NR, XS, STREAM>
{
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let o = self.0;
        let mut acc = [[S::splat(0.0); NR]; MR];
        if o.add && o.scales.is_none() {
            for (m, row) in acc.iter_mut().enumerate() {
                for (v, a) in row.iter_mut().enumerate() {
                    *a = S::load(o.out.add(m * o.out_stride + v * S::LANES));
                }
            }
        }
        let mut x = o.x;
        let mut w = o.w;
        for _ in 0..o.units {
            for phase in 0..E::PHASES {
                let mut wv = [E::prepare::<S>(S::load_u32(w), phase); NR];
                for (v, slot) in wv.iter_mut().enumerate().skip(1) {
                    *slot = E::prepare::<S>(S::load_u32(w.add(v * S::LANES)), phase);
                }
                for (m, row) in acc.iter_mut().enumerate() {
                    for (v, a) in row.iter_mut().enumerate() {
                        *a = E::step::<S>(*a, x.add(m * XS), wv[v], phase);
                    }
                }
            }
            if STREAM {
                for v in 0..NR {
                    S::prefetch(w.wrapping_add(AHEAD + v * S::LANES).cast());
                }
            }
            x = x.add(E::X_WORDS);
            w = w.add(o.w_stride);
        }
        if let Some(scales) = o.scales {
            for v in 0..NR {
                let scale = S::load(scales.add(v * S::LANES));
                for (m, row) in acc.iter_mut().enumerate() {
                    let before = if o.add {
                        S::load(o.out.add(m * o.out_stride + v * S::LANES))
                    } else {
                        S::splat(0.0)
                    };
                    row[v] = S::fma(scale, row[v], before);
                }
            }
        }
        for (m, row) in acc.iter().enumerate() {
            for (v, a) in row.iter().enumerate() {
                S::store(o.out.add(m * o.out_stride + v * S::LANES), *a);
            }
        }
    }
}

/// `rows` x `vecs` sums, in tiles that fit the registers. `STREAMS`: whether `o.stream` may be set.
///
/// # Safety
/// The CPU supports `S`; the pointers in `o` cover `rows` rows and `vecs` vectors.
#[inline(always)]
pub unsafe fn product<S: Simd, E: ElementType, const XS: usize, const STREAMS: bool>(
    rows: usize,
    vecs: usize,
    o: TileOperands,
) {
    // Few rows: wide tiles, which read w in order. Many: tall ones, which prepare each vector of w
    // for twice the rows; with two phases they win from 5 rows on (measured on Emerald Rapids, 6
    // rows: 268 against 342 us).
    let wide_rows = if E::PHASES == 1 {
        S::TILE_ROWS
    } else {
        S::TILE_ROWS.min(4)
    };
    let (tile_rows, tile_vecs) = if rows <= wide_rows {
        (S::TILE_ROWS, S::TILE_VECS)
    } else {
        (S::TALL_ROWS, S::TALL_VECS)
    };
    let groups = rows.div_ceil(tile_rows);
    let mut m = 0;
    for group in 0..groups {
        // Even shares: 7 rows are 4 + 3, not 6 + 1, which would leave the multipliers waiting.
        let mr = (rows - m).div_ceil(groups - group);
        let mut v = 0;
        while v < vecs {
            let nr = (vecs - v).min(tile_vecs);
            let w = o.w.add(v * S::LANES);
            let out = o.out.add(m * o.out_stride + v * S::LANES);
            let scales = o.scales.map(|scales| scales.add(v * S::LANES));
            one_tile::<S, E, XS, STREAMS>(
                mr,
                nr,
                TileOperands {
                    x: o.x.add(m * XS),
                    w,
                    out,
                    scales,
                    ..o
                },
            );
            v += nr;
        }
        m += mr;
    }
}

const fn is_shape<S: Simd>(rows: usize, vecs: usize) -> bool {
    rows <= S::TILE_ROWS && vecs <= S::TILE_VECS || rows <= S::TALL_ROWS && vecs <= S::TALL_VECS
}

#[allow(
    clippy::cognitive_complexity,
    reason = "the macro writes one arm per shape of a tile"
)]
#[inline(always)]
unsafe fn one_tile<S: Simd, E: ElementType, const XS: usize, const STREAMS: bool>(
    mr: usize,
    nr: usize,
    o: TileOperands,
) {
    // What cannot occur at level S is not compiled: the conditions are constants.
    macro_rules! shapes {
        ($($m:literal: $($n:literal)*;)*) => {
            match (mr, nr) {
                $($(($m, $n) if const { is_shape::<S>($m, $n) } => {
                    if STREAMS && o.stream {
                        S::enter(Tile::<E, $m, $n, XS, true>(o, PhantomData))
                    } else {
                        S::enter(Tile::<E, $m, $n, XS, false>(o, PhantomData))
                    }
                })*)*
                _ => unreachable!("{mr} x {nr} is no tile of this level"),
            }
        };
    }
    shapes! {
        1: 1 2 3 4; 2: 1 2 3 4; 3: 1 2 3 4; 4: 1 2 3 4; 5: 1 2 3 4; 6: 1 2 3 4;
        7: 1 2; 8: 1 2; 9: 1 2; 10: 1 2; 11: 1 2; 12: 1 2;
    }
}
