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
//! A weight may stay [`quantized`] in memory; its panels are decoded some units at a time. Products
//! of many small weights, one per head, are one call ([`by_head`]).
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

mod by_head;
pub(crate) mod panels;
mod quantized;

pub use by_head::{HeadProducts, multiply_heads, multiply_heads_on};
use panels::{PACK_ROWS, PackedRows, PanelSums};
pub use quantized::{CodeType, CodedMatrix, QuantizedWeight};

/// Outputs side by side: a row of tiles at AVX-512.
pub const PANEL: usize = 64;
/// Packed words of x per row and reduction block: with a panel's share of W (64 KiB) it stays in
/// the second-level cache.
const BLOCK_WORDS: usize = 256;
/// Words between rows of a packed block: no power of two, so that rows fall into different cache
/// sets.
const X_STRIDE: usize = BLOCK_WORDS + 16;
/// Units of a panel that are decoded at a time: 16 KiB, which stay in the first-level cache until
/// they are multiplied. A multiple of the units in a word of codes.
const TILE_UNITS: usize = 64;
/// Rows of an item: enough to pay for reading W from the last-level cache.
pub(crate) const ITEM_ROWS: usize = 192;
pub(crate) const ITEM_PANELS: usize = 4;
/// Multiply-adds below which another thread costs more than it gives (about 10 us).
pub(crate) const ALONE: usize = 1 << 20;

/// Shape and type of a weight matrix.
#[derive(Clone, Copy, Debug)]
pub struct WeightShape {
    pub dtype: Dtype,
    pub outputs: usize,
    pub inputs: usize,
}

impl WeightShape {
    fn units(&self) -> usize {
        self.inputs.div_ceil(self.dtype.per_unit())
    }

    pub(crate) fn panels(&self) -> usize {
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

    /// Bytes that are read of memory for one panel.
    pub(crate) fn panel_bytes(self) -> usize {
        match self {
            Weight::Packed(weight) => weight.shape.units() * PANEL * 4,
            Weight::Quantized(weight) => weight.panel_bytes(),
        }
    }

    /// Scratch words for decoded units of a panel and the scales of a run, where the weight is
    /// quantized.
    pub(crate) fn tile_words(self) -> usize {
        match self {
            Weight::Packed(_) => 0,
            Weight::Quantized(_) => (TILE_UNITS + 1) * PANEL,
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

unsafe fn multiply<E: ElementType>(isa: Isa, l: &LinearProduct) {
    let shape = l.weight.shape();
    let x_words = PackedRows::words::<E>(l.rows, shape.inputs);
    with_call_scratch(padded(x_words), |mut carver| {
        let x = PackedRows::new(carver.take(x_words), l.rows);
        let pack = |first: usize, rows: usize| {
            // SAFETY: passed on; the rows are this item's.
            unsafe { dispatch(isa, PackX::<E>(l, x, first, rows, PhantomData)) }
        };
        let row_cuts = l.rows.div_ceil(ITEM_ROWS).max(1);
        let panel_cuts = cut_panels(shape.panels(), row_cuts, pool::threads());
        let run = |i: usize| {
            let cut = i % row_cuts;
            let first = cut * l.rows / row_cuts;
            let end = (cut + 1) * l.rows / row_cuts;
            let panel_cut = i / row_cuts;
            let panel = panel_cut * shape.panels() / panel_cuts;
            let count = (panel_cut + 1) * shape.panels() / panel_cuts - panel;
            let panels: [usize; ITEM_PANELS] = std::array::from_fn(|p| panel + p);
            let sum_words = (end - first) * count * PANEL;
            let tile_words = l.weight.tile_words();
            with_scratch(padded(sum_words) + padded(tile_words), |mut carver| {
                let sums = PanelSums {
                    weight: l.weight,
                    x,
                    first,
                    rows: end - first,
                    panels: &panels[..count],
                    sums: carver.take(sum_words).cast(),
                    tile: carver.take(tile_words),
                    elem: PhantomData::<E>,
                };
                // SAFETY: passed on; x is packed, the sums have room for the item.
                unsafe { dispatch(isa, Item(l, sums)) }
            });
        };
        if l.rows * shape.outputs * shape.inputs < ALONE {
            pack(0, l.rows);
            (0..row_cuts * panel_cuts).for_each(run);
            return;
        }
        pool::for_each(l.rows.div_ceil(PACK_ROWS), &|i| {
            pack(i * PACK_ROWS, PACK_ROWS.min(l.rows - i * PACK_ROWS));
        });
        pool::for_each(row_cuts * panel_cuts, &run);
    });
}

/// Number of even shares of the panels, each an item with one of `row_cuts` shares of the rows.
/// Where those are fewer than the threads, no thread is to wait for another's last item: 12 panels
/// are 4 times 3 for two threads, and not 3 times 4.
fn cut_panels(panels: usize, row_cuts: usize, threads: usize) -> usize {
    let cuts = panels.div_ceil(ITEM_PANELS);
    cuts.next_multiple_of(threads.div_ceil(row_cuts))
        .min(panels)
}

struct PackX<'a, E: ElementType>(
    &'a LinearProduct<'a>,
    PackedRows,
    usize,
    usize,
    PhantomData<E>,
);

impl<E: ElementType> SimdKernel for PackX<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PackX(l, x, first, rows, _) = self;
        for row in first..first + rows {
            let from = l.x.cast::<E::T>().add(row * l.x_stride);
            x.pack::<S, E>(row, from, l.weight.shape().inputs);
        }
    }
}

/// Some rows of a product, for some panels side by side.
struct Item<'a, E: ElementType>(&'a LinearProduct<'a>, PanelSums<'a, E>);

impl<E: ElementType> SimdKernel for Item<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Item(l, sums) = self;
        sums.compute::<S>();
        let outputs = l.weight.shape().outputs;
        let column = sums.panels[0] * PANEL;
        let columns = sums.width().min(outputs - column);
        let bias = l.bias.cast::<E::T>();
        for row in 0..sums.rows {
            let to =
                l.y.cast::<E::T>()
                    .add((sums.first + row) * l.y_stride + column);
            let mut c = 0;
            while c < columns {
                let mut v = S::load(sums.row(row).add(c));
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
pub(crate) mod tests;
