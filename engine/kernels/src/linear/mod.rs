//! y = x * W^T + bias for weights re-ordered once at load, for any number of rows.
//!
//! Packed W: panels of `PANEL` outputs; in a panel, for each unit of the reduction, the panel's
//! units side by side:
//!
//! ```text
//! W [N, K]      row n: u0 u1 u2 …            (a unit: one f32, or two bf16 neighbors)
//! packed        panel 0: u0 of rows 0..64 | u1 of rows 0..64 | …    panel 1: u0 of rows 64..128 | …
//! ```
//!
//! So one row of x streams W exactly in memory order with whole vectors and no sum across lanes,
//! and many rows use the same panel from cache. Rows past N are zero.
//!
//! A call: (1) packs x in blocks of the reduction; (2) cuts the outputs into items of some rows and
//! panels; (3) an item runs over reduction blocks, panels and row tiles, keeping its sums in f32;
//! (4) adds the bias and rounds once.
//!
//! Exact: y[m][n] is one chain of fused multiply-adds over k, whatever M, the threads and the cuts:
//! rows of a batch, chunks of a prompt and single tokens get the same bits.
//!
//! A weight may stay [`quantized`] in memory; its panels are decoded block by block. Products of
//! many small weights, one per head, are one call ([`by_head`]).
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, Linear's pointers cover its shapes"
)]

use std::marker::PhantomData;

use crate::elem::{Bf16, Bf16Dot, Dtype, ElementType, F32, load_part, store_part};
use crate::isa::{self, Isa};
use crate::memory::AlignedWords;
use crate::memory::scratch::{padded, with_call_scratch, with_scratch};
use crate::pool;
use crate::simd::{Simd, SimdKernel, dispatch};
use crate::tile::{TileOperands, product};

mod by_head;
mod quantized;

pub use by_head::{HeadProducts, multiply_heads, multiply_heads_on};
pub use quantized::{CodeType, CodedMatrix, QuantizedWeight};

/// Outputs side by side: a row of tiles at AVX-512.
pub const PANEL: usize = 64;
/// Packed words of x per row and reduction block: with a panel's share of W (64 KiB) it stays in
/// the second-level cache.
const BLOCK_WORDS: usize = 256;
/// Words between rows of a packed block: no power of two, so that rows fall into different cache
/// sets.
const X_STRIDE: usize = BLOCK_WORDS + 16;
/// Rows of an item: enough to pay for reading W from the last-level cache.
const ITEM_ROWS: usize = 192;
const ITEM_PANELS: usize = 4;
/// Multiply-adds below which another thread costs more than it gives (about 10 us).
const ALONE: usize = 1 << 20;

/// Shape and type of a weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct WeightShape {
    pub dtype: Dtype,
    pub outputs: usize,
    pub inputs: usize,
}

impl WeightShape {
    fn units(&self) -> usize {
        match self.dtype {
            Dtype::F32 => self.inputs,
            Dtype::Bf16 => self.inputs.div_ceil(2),
        }
    }

    fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }
}

/// A weight matrix in packed order. Owns its memory.
#[derive(Debug)]
pub struct PackedWeight {
    shape: WeightShape,
    words: AlignedWords,
}

impl PackedWeight {
    /// Re-order `weight` (`[outputs, inputs]`, contiguous).
    ///
    /// # Safety
    /// `weight` covers the shape.
    pub unsafe fn pack(shape: WeightShape, weight: *const u8) -> PackedWeight {
        let words = AlignedWords::new(shape.panels() * PANEL * shape.units());
        let ends = Ends {
            weight,
            packed: words.as_ptr(),
        };
        pool::for_each(shape.panels(), &|panel| {
            // SAFETY: passed on; the words have room for every panel; `current()` runs here.
            unsafe {
                dispatch(
                    isa::current(),
                    PackPanel {
                        shape,
                        panel,
                        ends: &ends,
                    },
                )
            };
        });
        PackedWeight { shape, words }
    }

    pub fn shape(&self) -> WeightShape {
        self.shape
    }

    /// Copy rows `ids` back to `out` (`[ids, inputs]`): the embedding, when it is also the output
    /// head.
    ///
    /// Cost: one cache line per unit, so some 32 times a plain row's; for tokens of a step, not for
    /// whole matrices.
    ///
    /// # Safety
    /// Each id is in [0, outputs); `out` covers the ids.
    pub unsafe fn rows(&self, ids: &[i64], out: *mut u8) {
        let units = self.shape.units();
        let row_bytes = self.shape.inputs * self.shape.dtype.bytes();
        for (t, &id) in ids.iter().enumerate() {
            let id = id as usize;
            let from = self
                .words
                .as_ptr()
                .add(id / PANEL * PANEL * units + id % PANEL);
            let to = out.add(t * row_bytes);
            for u in 0..units {
                let unit = from.add(u * PANEL).read();
                if 4 * u + 4 <= row_bytes {
                    to.add(4 * u).cast::<u32>().write_unaligned(unit);
                } else {
                    to.add(4 * u).cast::<u16>().write_unaligned(unit as u16);
                }
            }
        }
    }
}

struct Ends {
    weight: *const u8,
    packed: *mut u32,
}

// SAFETY: items read shared input and write disjoint panels.
unsafe impl Sync for Ends {}

struct PackPanel<'a> {
    shape: WeightShape,
    panel: usize,
    ends: &'a Ends,
}

impl SimdKernel for PackPanel<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        const ZEROS: [u32; 16] = [0; 16];
        let PackPanel { shape, panel, ends } = self;
        let units = shape.units();
        let row_bytes = shape.inputs * shape.dtype.bytes();
        let to = ends.packed.add(panel * PANEL * units);
        let row = |lane: usize| {
            ends.weight
                .wrapping_add((panel * PANEL + lane) * row_bytes)
                .cast::<u32>()
        };
        let present = PANEL.min(shape.outputs - panel * PANEL);
        let whole = row_bytes / 4;
        for u in (0..whole).step_by(S::LANES) {
            let cols = S::LANES.min(whole - u);
            for first in (0..PANEL).step_by(S::LANES) {
                let mut rows = [ZEROS.as_ptr(); 16];
                for (r, slot) in rows.iter_mut().enumerate().take(S::LANES) {
                    if first + r < present {
                        *slot = row(first + r).wrapping_add(u);
                    }
                }
                S::transpose(rows.as_ptr(), 0, cols, to.add(u * PANEL + first), PANEL);
            }
        }
        if whole < units {
            // An odd number of bf16: the last unit's second half is 0.
            for lane in 0..PANEL {
                let unit = if lane < present {
                    row(lane).add(whole).cast::<u16>().read_unaligned().into()
                } else {
                    0
                };
                to.add(whole * PANEL + lane).write(unit);
            }
        }
    }
}

/// The weight of a product, in one of the forms that it may have in memory.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    Packed(&'a PackedWeight),
    Quantized(&'a QuantizedWeight),
}

impl Weight<'_> {
    pub fn shape(self) -> WeightShape {
        match self {
            Weight::Packed(weight) => weight.shape,
            Weight::Quantized(weight) => weight.shape(),
        }
    }
}

/// Arguments of one product. x and y are in the weight's type.
#[derive(Clone, Copy, Debug)]
pub struct LinearProduct<'a> {
    pub weight: Weight<'a>,
    /// `[rows, inputs]`, rows `x_stride` elements apart.
    pub x: *const u8,
    pub x_stride: usize,
    pub rows: usize,
    /// `[outputs]` or null.
    pub bias: *const u8,
    /// `[rows, outputs]`, rows `y_stride` elements apart.
    pub y: *mut u8,
    pub y_stride: usize,
}

// SAFETY: items write disjoint parts of `y` and only read the rest; the caller of `linear` vouches
// for it.
unsafe impl Sync for LinearProduct<'_> {}

/// Multiply at the process's instruction level.
///
/// # Safety
/// Pointers cover the shapes; `y` overlaps nothing; no other thread writes the operands meanwhile.
pub unsafe fn linear(l: &LinearProduct) {
    // SAFETY: passed on.
    unsafe { linear_on(isa::current(), l) }
}

/// Like [`linear`], at level `isa`.
///
/// # Safety
/// As [`linear`], and `isa.runs_here()`.
pub unsafe fn linear_on(isa: Isa, l: &LinearProduct) {
    match (l.weight.shape().dtype, isa) {
        (Dtype::F32, _) => multiply::<F32>(isa, l),
        (Dtype::Bf16, Isa::Avx512Bf16) => multiply::<Bf16Dot>(isa, l),
        (Dtype::Bf16, _) => multiply::<Bf16>(isa, l),
    }
}

/// x in blocks `[block][row][X_STRIDE]`.
#[derive(Clone, Copy)]
struct PackedX(*mut u32);

impl PackedX {
    fn words(self) -> *mut u32 {
        self.0
    }
}

// SAFETY: written by items for disjoint rows, then only read.
unsafe impl Sync for PackedX {}

const fn block_units<E: ElementType>() -> usize {
    BLOCK_WORDS / E::X_WORDS
}

unsafe fn multiply<E: ElementType>(isa: Isa, l: &LinearProduct) {
    let blocks = l.weight.shape().units().div_ceil(block_units::<E>());
    with_call_scratch(padded(blocks * l.rows * X_STRIDE), |mut carver| {
        let x = PackedX(carver.take(blocks * l.rows * X_STRIDE));
        let pack = |first: usize, rows: usize| {
            // SAFETY: passed on; the rows are this item's.
            unsafe { dispatch(isa, PackX::<E>(l, x.words(), first, rows, PhantomData)) }
        };
        let row_cuts = l.rows.div_ceil(ITEM_ROWS).max(1);
        let panel_cuts = l.weight.shape().panels().div_ceil(ITEM_PANELS);
        let run = |i: usize| {
            let cut = i % row_cuts;
            let panel = i / row_cuts * ITEM_PANELS;
            let first = cut * l.rows / row_cuts;
            let end = (cut + 1) * l.rows / row_cuts;
            let count = ITEM_PANELS.min(l.weight.shape().panels() - panel);
            let sum_words = (end - first) * count * PANEL;
            let tile_words = match l.weight {
                Weight::Packed(_) => 0,
                Weight::Quantized(_) => block_units::<E>() * PANEL,
            };
            with_scratch(padded(sum_words) + padded(tile_words), |mut carver| {
                let sums = carver.take(sum_words).cast();
                let tile = carver.take(tile_words);
                let item = Item {
                    l,
                    x: x.words(),
                    first,
                    rows: end - first,
                    panel,
                    count,
                    sums,
                    tile,
                    elem: PhantomData::<E>,
                };
                // SAFETY: passed on; x is packed, the sums have room for the item.
                unsafe { dispatch(isa, item) }
            });
        };
        if l.rows * l.weight.shape().outputs * l.weight.shape().inputs < ALONE {
            pack(0, l.rows);
            (0..row_cuts * panel_cuts).for_each(run);
            return;
        }
        const PACK_ROWS: usize = 32;
        pool::for_each(l.rows.div_ceil(PACK_ROWS), &|i| {
            pack(i * PACK_ROWS, PACK_ROWS.min(l.rows - i * PACK_ROWS));
        });
        pool::for_each(row_cuts * panel_cuts, &run);
    });
}

struct PackX<'a, E: ElementType>(
    &'a LinearProduct<'a>,
    *mut u32,
    usize,
    usize,
    PhantomData<E>,
);

impl<E: ElementType> SimdKernel for PackX<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PackX(l, x, first, rows, _) = self;
        let per_block = block_units::<E>() * E::PER_UNIT;
        for row in first..first + rows {
            let from = l.x.cast::<E::T>().add(row * l.x_stride);
            let mut block = 0;
            while block * per_block < l.weight.shape().inputs {
                let n = per_block.min(l.weight.shape().inputs - block * per_block);
                E::pack_x::<S>(
                    from.add(block * per_block),
                    n,
                    x.add((block * l.rows + row) * X_STRIDE),
                );
                block += 1;
            }
        }
    }
}

/// Rows [first, first + rows) times panels [panel, panel + count).
struct Item<'a, E: ElementType> {
    l: &'a LinearProduct<'a>,
    x: *const u32,
    first: usize,
    rows: usize,
    panel: usize,
    count: usize,
    /// [rows, count * PANEL]
    sums: *mut f32,
    /// A block of a panel, where the weight is quantized.
    tile: *mut u32,
    elem: PhantomData<E>,
}

impl<E: ElementType> SimdKernel for Item<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // Few rows: W is read once, in memory order. Many: a block of x is used for every panel
        // before the next.
        if self.rows <= S::TALL_ROWS {
            for p in 0..self.count {
                for block in 0..self.blocks() {
                    self.block::<S>(p, block, true);
                }
            }
        } else {
            for block in 0..self.blocks() {
                for p in 0..self.count {
                    self.block::<S>(p, block, false);
                }
            }
        }
        self.finish::<S>();
    }
}

impl<E: ElementType> Item<'_, E> {
    fn blocks(&self) -> usize {
        self.l.weight.shape().units().div_ceil(block_units::<E>())
    }

    fn width(&self) -> usize {
        self.count * PANEL
    }

    #[inline(always)]
    unsafe fn block<S: Simd>(&self, p: usize, block: usize, stream: bool) {
        let all_units = self.l.weight.shape().units();
        let from = block * block_units::<E>();
        let units = block_units::<E>().min(all_units - from);
        let panel = self.panel + p;
        let (w, stream) = match self.l.weight {
            Weight::Packed(weight) => {
                let at = weight
                    .words
                    .as_ptr()
                    .add((panel * all_units + from) * PANEL);
                (at.cast_const(), stream)
            }
            Weight::Quantized(weight) => {
                weight.decode::<S, E>(panel, from, units, self.tile);
                (self.tile.cast_const(), false)
            }
        };
        let operands = TileOperands {
            x: self.x.add((block * self.l.rows + self.first) * X_STRIDE),
            w,
            w_stride: PANEL,
            units,
            out: self.sums.add(p * PANEL),
            out_stride: self.width(),
            add: block > 0,
            stream,
        };
        product::<S, E, X_STRIDE, true>(self.rows, PANEL / S::LANES, operands);
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self) {
        let l = self.l;
        let column = self.panel * PANEL;
        let columns = self.width().min(l.weight.shape().outputs - column);
        let bias = l.bias.cast::<E::T>();
        for row in 0..self.rows {
            let to =
                l.y.cast::<E::T>()
                    .add((self.first + row) * l.y_stride + column);
            let mut c = 0;
            while c < columns {
                let mut v = S::load(self.sums.add(row * self.width() + c));
                if !bias.is_null() {
                    v = S::add(v, load_part::<S, E>(bias.add(column + c), columns - c));
                }
                store_part::<S, E>(to.add(c), v, columns - c);
                c += S::LANES;
            }
        }
    }
}

#[cfg(test)]
mod tests;
