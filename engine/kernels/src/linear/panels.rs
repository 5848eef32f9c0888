//! Rows of x in the order of a product's left operand, and their sums with panels of a weight.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers cover the shapes given"
)]

use std::marker::PhantomData;

use super::quantized::{MAX_PER_WORD, RowProducts};
use super::{BLOCK_WORDS, PANEL, QuantizedWeight, TILE_UNITS, Weight, X_STRIDE};
use crate::elem::ElementType;
use crate::simd::{Simd, SimdKernel};
use crate::tile::{TileOperands, product};

/// Rows that one item packs.
pub(crate) const PACK_ROWS: usize = 32;

/// Units of the reduction in a block.
const fn block_units<E: ElementType>() -> usize {
    BLOCK_WORDS / E::X_WORDS
}

/// Elements of the reduction in a block: a multiple of a vector's.
const fn block_elements<E: ElementType>() -> usize {
    block_units::<E>() * E::PER_UNIT
}

/// Left-hand rows in blocks of the reduction: `[block][row][X_STRIDE]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedRows {
    words: *mut u32,
    rows: usize,
}

// SAFETY: written by items for disjoint rows or columns, then only read.
unsafe impl Sync for PackedRows {}

/// # Safety
/// For all functions: the memory has `words(rows, inputs)` words, and rows and columns lie within.
impl PackedRows {
    /// 32-bit words for `rows` rows of `inputs` elements.
    pub fn words<E: ElementType>(rows: usize, inputs: usize) -> usize {
        inputs.div_ceil(block_elements::<E>()) * rows * X_STRIDE
    }

    pub fn new(words: *mut u32, rows: usize) -> PackedRows {
        PackedRows { words, rows }
    }

    #[inline(always)]
    unsafe fn block(self, block: usize, row: usize) -> *mut u32 {
        self.words.add((block * self.rows + row) * X_STRIDE)
    }

    /// Write a row of `inputs` elements at `from`.
    #[inline(always)]
    pub unsafe fn pack<S: Simd, E: ElementType>(
        self,
        row: usize,
        from: *const E::T,
        inputs: usize,
    ) {
        let mut column = 0;
        while column < inputs {
            let count = block_elements::<E>().min(inputs - column);
            let to = self.block(column / block_elements::<E>(), row);
            E::pack_x::<S>(from.add(column), count, to);
            // Columns behind the last one, which its word of a quantized weight has, multiply 0.
            let end = count.next_multiple_of(MAX_PER_WORD) / E::PER_UNIT * E::X_WORDS;
            for word in count.div_ceil(E::PER_UNIT) * E::X_WORDS..end {
                to.add(word).write(0);
            }
            column += count;
        }
    }

    /// Write LANES elements, already rounded to the type, from `column` on, a multiple of LANES.
    #[inline(always)]
    pub unsafe fn store<S: Simd, E: ElementType>(self, row: usize, column: usize, v: S::F) {
        let to = self.block(column / block_elements::<E>(), row);
        E::store_x::<S>(to, column % block_elements::<E>(), v);
    }
}

/// Sums in f32 of packed rows [first, first + rows) with some panels of a weight.
pub(crate) struct PanelSums<'a, E: ElementType> {
    pub weight: Weight<'a>,
    pub x: PackedRows,
    pub first: usize,
    pub rows: usize,
    /// Numbers of the panels whose sums lie side by side.
    pub panels: &'a [usize],
    /// `[rows, width]`
    pub sums: *mut f32,
    /// Decoded units of a panel, where the weight is quantized (`Weight::tile_words`).
    pub tile: *mut u32,
    pub elem: PhantomData<E>,
}

impl<E: ElementType> PanelSums<'_, E> {
    /// Sums of a row.
    pub fn width(&self) -> usize {
        self.panels.len() * PANEL
    }

    /// Where the sums of a row begin.
    ///
    /// # Safety
    /// `row` is below `rows`.
    #[inline(always)]
    pub unsafe fn row(&self, row: usize) -> *const f32 {
        self.sums.add(row * self.width())
    }

    /// # Safety
    /// The CPU supports `S`; x is packed; `sums` and `tile` have room.
    #[inline(always)]
    pub unsafe fn compute<S: Simd>(&self) {
        // A function of its own, which all users share.
        S::enter(ComputeSums(self));
    }

    #[inline(always)]
    unsafe fn add_blocks<S: Simd>(&self) {
        let blocks = self.weight.shape().units().div_ceil(block_units::<E>());
        // Few rows: W is read once, in memory order. Many: a block of x is used for every panel
        // before the next.
        if self.rows <= S::TALL_ROWS {
            for p in 0..self.panels.len() {
                for block in 0..blocks {
                    self.add_block::<S>(p, block, true);
                }
            }
        } else {
            for block in 0..blocks {
                for p in 0..self.panels.len() {
                    self.add_block::<S>(p, block, false);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_block<S: Simd>(&self, p: usize, block: usize, stream: bool) {
        let all_units = self.weight.shape().units();
        let from = block * block_units::<E>();
        let units = block_units::<E>().min(all_units - from);
        let panel = *self.panels.get_unchecked(p);
        let x = self.x.block(block, self.first);
        let operands = TileOperands {
            x,
            w: self.tile,
            w_stride: PANEL,
            units,
            out: self.sums.add(p * PANEL),
            out_stride: self.width(),
            add: block > 0,
            scales: None,
            stream: false,
        };
        match self.weight {
            Weight::Packed(weight) => {
                let w = weight.words.as_ptr();
                let w = w.add((panel * all_units + from) * PANEL);
                self.add_products::<S>(TileOperands {
                    w,
                    stream,
                    ..operands
                });
            }
            Weight::Quantized(weight) => {
                self.add_quantized::<S>(weight, panel, from, operands);
            }
        }
    }

    /// Add the products with a quantized weight's units [from, from + operands.units) of a panel.
    #[inline(always)]
    unsafe fn add_quantized<S: Simd>(
        &self,
        weight: &QuantizedWeight,
        panel: usize,
        from: usize,
        operands: TileOperands,
    ) {
        let products = RowProducts {
            x: operands.x,
            rows: self.rows,
            out: operands.out,
            out_stride: operands.out_stride,
            add: operands.add,
        };
        // Few rows do not pay for writing what is decoded to memory.
        if !E::DOT && weight.scales_sums() && self.rows <= S::TALL_ROWS {
            return weight.add_rows::<S, E>(panel, from, operands.units, products);
        }
        if !E::DOT && !weight.scales_sums() && self.rows == 1 {
            return weight.add_scaled_row::<S, E>(panel, from, operands.units, products);
        }
        let spare = self.tile.add(TILE_UNITS * PANEL).cast();
        for first in (0..operands.units).step_by(TILE_UNITS) {
            let count = TILE_UNITS.min(operands.units - first);
            weight.decode::<S, E>(panel, from + first, count, self.tile);
            for run in weight.runs_within(from + first, count) {
                let skipped = run.first - from;
                let scales = weight
                    .scales_sums()
                    .then(|| weight.run_scales::<S>(panel, run, spare));
                self.add_products::<S>(TileOperands {
                    x: operands.x.add(skipped * E::X_WORDS),
                    w: self.tile.add((skipped - first) * PANEL),
                    units: run.units,
                    add: operands.add || skipped > 0,
                    scales,
                    ..operands
                });
            }
        }
    }

    #[inline(always)]
    unsafe fn add_products<S: Simd>(&self, operands: TileOperands) {
        S::enter(AddProducts::<E>(self.rows, operands, PhantomData));
    }
}

struct ComputeSums<'a, 'b, E: ElementType>(&'a PanelSums<'b, E>);

impl<E: ElementType> SimdKernel for ComputeSums<'_, '_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        self.0.add_blocks::<S>();
    }
}

/// Some units of a panel times rows of x.
struct AddProducts<E: ElementType>(usize, TileOperands, PhantomData<E>);

impl<E: ElementType> SimdKernel for AddProducts<E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        product::<S, E, X_STRIDE, true>(self.0, PANEL / S::LANES, self.1);
    }
}
