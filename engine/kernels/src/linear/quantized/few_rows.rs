//! Products of a few rows with codes that are decoded in registers, once for all of them.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the shape"
)]

use std::marker::PhantomData;

use super::{Bytes, CodeType, Codes, Fp4Nibbles, Fp8Bytes, Nibbles, QuantizedWeight};
use super::{ColumnRun, prefetch_codes};
use crate::elem::ElementType;
use crate::linear::{PANEL, X_STRIDE};
use crate::simd::{Simd, SimdKernel};

/// Rows of x, and the sums that a product with a panel adds to.
#[derive(Clone, Copy)]
pub(crate) struct RowProducts {
    /// Packed rows, `X_STRIDE` words apart, from the first unit of the product on.
    pub x: *const u32,
    pub rows: usize,
    /// `[rows, PANEL]` in f32, rows `out_stride` apart.
    pub out: *mut f32,
    pub out_stride: usize,
    /// Start from what `out` holds, else from zero.
    pub add: bool,
}

impl RowProducts {
    unsafe fn skip_rows(self, rows: usize) -> RowProducts {
        RowProducts {
            x: self.x.add(rows * X_STRIDE),
            rows: self.rows - rows,
            out: self.out.add(rows * self.out_stride),
            ..self
        }
    }
}

/// Rows that one pass over the codes takes of `rows` that are left: shapes below, in even shares.
const PASS_ROWS: [usize; 13] = [0, 1, 2, 3, 4, 3, 6, 4, 8, 6, 6, 8, 12];

/// Vectors of a panel that a pass takes: as many as have accumulators.
const fn pass_vectors<S: Simd>(rows: usize) -> usize {
    if rows * 4 <= S::TILE_ROWS * S::TILE_VECS {
        4
    } else {
        2
    }
}

const fn is_shape<S: Simd>(rows: usize, vectors: usize) -> bool {
    rows <= S::TALL_ROWS && vectors == pass_vectors::<S>(rows)
}

impl QuantizedWeight {
    /// Products of up to a tile's rows with units [from, from + units) of a panel, whose bits are
    /// those of decoding a tile first. Not for products by the dot product instruction.
    ///
    /// # Safety
    /// Sums of runs are multiplied by scales; `from` begins a tile, and the units end with one or
    /// with the row; `rows` is at most `S::TALL_ROWS`; pointers cover the rows.
    #[inline(always)]
    pub(crate) unsafe fn add_rows<S: Simd, E: ElementType>(
        &self,
        panel: usize,
        from: usize,
        units: usize,
        products: RowProducts,
    ) {
        let mut left = products;
        while left.rows > 0 {
            let rows = PASS_ROWS[left.rows].min(S::TALL_ROWS);
            let pass = Pass {
                weight: self,
                panel,
                from,
                units,
                vector: 0,
                products: left,
            };
            match self.code_type {
                CodeType::Int4 => pass.enter_shape::<S, E, Nibbles>(rows),
                CodeType::Int8 => pass.enter_shape::<S, E, Bytes>(rows),
                CodeType::Fp8 => pass.enter_shape::<S, E, Fp8Bytes>(rows),
                CodeType::Fp4 => pass.enter_shape::<S, E, Fp4Nibbles>(rows),
            }
            left = left.skip_rows(rows);
        }
    }
}

/// One reading of a panel's codes.
#[derive(Clone, Copy)]
struct Pass<'a> {
    weight: &'a QuantizedWeight,
    panel: usize,
    from: usize,
    units: usize,
    /// The first of its vectors in the panel.
    vector: usize,
    products: RowProducts,
}

impl Pass<'_> {
    #[inline(always)]
    unsafe fn enter_shape<S: Simd, E: ElementType, C: Codes>(self, rows: usize) {
        let vectors = pass_vectors::<S>(rows);
        for vector in (0..PANEL / S::LANES).step_by(vectors) {
            let pass = Pass { vector, ..self };
            // What cannot occur at level S is not compiled: the conditions are constants.
            macro_rules! shapes {
                ($($m:literal: $($n:literal)*;)*) => {
                    match (rows, vectors) {
                        $($(($m, $n) if const { is_shape::<S>($m, $n) } => {
                            S::enter(FewRows::<E, C, $m, $n>(pass, PhantomData))
                        })*)*
                        _ => unreachable!("{rows} x {vectors} is no pass of this level"),
                    }
                };
            }
            shapes! { 1: 2 4; 2: 2 4; 3: 2 4; 4: 2 4; 6: 2 4; 8: 2; 12: 2; }
        }
    }
}

struct FewRows<'a, E, C, const MR: usize, const NR: usize>(Pass<'a>, PhantomData<(E, C)>);

impl<E: ElementType, C: Codes, const MR: usize, const NR: usize> SimdKernel
    for FewRows<'_, E, C, MR, NR>
{
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let pass = self.0;
        let mut add = pass.products.add;
        for run in pass.weight.runs_within(pass.from, pass.units) {
            let mut sums = [[S::splat(0.0); NR]; MR];
            self.add_run::<S>(run, &mut sums);
            self.store::<S>(run, &sums, add);
            add = true;
        }
    }
}

impl<E: ElementType, C: Codes, const MR: usize, const NR: usize> FewRows<'_, E, C, MR, NR> {
    #[inline(always)]
    unsafe fn add_run<S: Simd>(&self, run: &ColumnRun, sums: &mut [[S::F; NR]; MR]) {
        let pass = &self.0;
        let lane = pass.vector * S::LANES;
        let mut zeros = [S::splat(0.0); NR];
        for (v, zero) in zeros.iter_mut().enumerate() {
            *zero = pass
                .weight
                .run_zeros::<S>(pass.panel, run, lane + v * S::LANES);
        }
        let columns = run.units * E::PER_UNIT;
        let mut codes = pass.weight.run_codes::<E, C>(pass.panel, run).add(lane);
        let first = (run.first - pass.from) * E::PER_UNIT;
        let mut x = pass.products.x.cast::<f32>().add(first);
        for _ in 0..columns / C::PER_WORD {
            if pass.vector == 0 {
                prefetch_codes::<S>(codes);
            }
            Self::add_word::<S>(codes, &zeros, x, sums);
            codes = codes.add(PANEL);
            x = x.add(C::PER_WORD);
        }
    }

    /// Add the products of a word's columns.
    #[inline(always)]
    unsafe fn add_word<S: Simd>(
        codes: *const u16,
        zeros: &[S::F; NR],
        x: *const f32,
        sums: &mut [[S::F; NR]; MR],
    ) {
        let mut words = [S::load_u16(codes); NR];
        for (v, slot) in words.iter_mut().enumerate().skip(1) {
            *slot = S::load_u16(codes.add(v * S::LANES));
        }
        for i in 0..C::PER_WORD {
            // The odd column of a unit of two first, as in a packed weight.
            let column = if E::PER_UNIT == 2 { i ^ 1 } else { i };
            let mut numbers = [S::splat(0.0); NR];
            for (v, number) in numbers.iter_mut().enumerate() {
                *number = C::number::<S>(words[v], column, zeros[v]);
            }
            for (m, row) in sums.iter_mut().enumerate() {
                let x = S::splat(x.add(m * X_STRIDE + column).read());
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = S::fma(x, numbers[v], *sum);
                }
            }
        }
    }

    /// Add sums of a run, times their scales, to those of the runs before it.
    #[inline(always)]
    unsafe fn store<S: Simd>(&self, run: &ColumnRun, sums: &[[S::F; NR]; MR], add: bool) {
        let Pass {
            weight,
            panel,
            vector,
            products,
            ..
        } = self.0;
        let place = (panel * weight.groups + run.group) * PANEL;
        for v in 0..NR {
            let lane = (vector + v) * S::LANES;
            let scale = C::scales::<S>(weight.scales.as_ptr(), place + lane);
            for (m, row) in sums.iter().enumerate() {
                let out = products.out.add(m * products.out_stride + lane);
                let before = if add { S::load(out) } else { S::splat(0.0) };
                S::store(out, S::fma(scale, row[v], before));
            }
        }
    }
}
