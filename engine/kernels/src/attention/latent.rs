//! Causal attention over paged latents, which all query heads share: the absorbed form of
//! multi-head latent attention (arXiv 2405.04434 §2.1), for decode and prefill rows alike.
//!
//! A slot of the pool is one row: the normed latent, then the rotated key. A query has the same
//! two parts, its first one already multiplied by the head's share of the key projection. A row is
//! the key of its position, and its latent is the value:
//!
//! ```text
//! slot     | latent ................................ | rotated key |
//! query    | query times key projection ............ | rotated     |   score = query . slot
//! result   | sum of probability times latent ....... |
//! ```
//!
//! A call becomes items as in the parent module, with one difference: heads do not have K and V of
//! their own, so an item has some heads of some tokens, and packs each block once for all of them.
//! Sums, masks and the promise of exactness are those of the parent module.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, LatentAttention's pointers cover \
              its shapes"
)]

use std::marker::PhantomData;

use super::{BLOCK, ITEM_ROWS, P_STRIDE, RowSoftmax, pack_keys, pack_values};
use crate::attention::append::NewTokens;
use crate::elem::{Bf16, Bf16Dot, Dtype, ElementType, F32};
use crate::isa::{self, Isa};
use crate::math::LOG2_E;
use crate::memory::scratch::{padded, with_scratch};
use crate::pool;
use crate::rows::SequenceRows;
use crate::simd::{SUM_LANES, Simd, SimdKernel, dispatch};
use crate::tile::{TileOperands, product};

/// Largest row, latent and key together: 512 + 64 in the published models.
pub const MAX_ROW_DIM: usize = 576;
/// Words from one packed query row to the next: no multiple of a page, so that rows fall into
/// different cache sets.
const X_STRIDE: usize = MAX_ROW_DIM + 16;
/// Rows of a tile at any level. Tiles are tall, because an item has many rows of long vectors.
const MAX_TALL_ROWS: usize = 12;

/// View of one layer of the KV pool `[page, layer, slot, latent | key]`. Strides count elements.
#[derive(Clone, Copy, Debug)]
pub struct LatentPages {
    pub dtype: Dtype,
    /// Slot 0 of page 0 of this layer.
    pub base: *mut u8,
    /// From a page to the next: layers * page_size * row_dim.
    pub page_stride: usize,
    pub page_size: usize,
    pub latent_dim: usize,
    pub key_dim: usize,
}

impl LatentPages {
    /// Elements of one token.
    pub fn row_dim(&self) -> usize {
        self.latent_dim + self.key_dim
    }

    /// Element offset of `slot` = page * page_size + place in the page.
    fn slot_offset(&self, slot: usize) -> usize {
        slot / self.page_size * self.page_stride + slot % self.page_size * self.row_dim()
    }
}

/// Copy token t of `latents` [tokens, latent_dim] and `keys` [tokens, key_dim] to slot `slots[t]`;
/// a negative slot skips the token (padding).
///
/// Cost: reads and writes tokens * row_dim elements once; one thread.
///
/// # Safety
/// `latents` and `keys` cover `slots.len()` tokens; every slot lies in the pages; no other thread
/// reads or writes those slots meanwhile.
pub unsafe fn latent_append(
    pages: &LatentPages,
    latents: NewTokens,
    keys: NewTokens,
    slots: &[i64],
) {
    let size = pages.dtype.bytes();
    for (t, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let to = pages.base.add(pages.slot_offset(slot) * size);
        let latent = latents.data.add(t * latents.stride * size);
        let key = keys.data.add(t * keys.stride * size);
        let latent_bytes = pages.latent_dim * size;
        std::ptr::copy_nonoverlapping(latent, to, latent_bytes);
        std::ptr::copy_nonoverlapping(key, to.add(latent_bytes), pages.key_dim * size);
    }
}

/// Arguments of one layer's attention; T tokens.
#[derive(Clone, Copy, Debug)]
pub struct LatentAttention<'a> {
    pub pages: LatentPages,
    /// `[T, heads, row_dim]` in the pages' type, contiguous.
    pub q: *const u8,
    /// `[T, heads, latent_dim]`, contiguous, in the pages' type.
    pub out: *mut u8,
    pub heads: usize,
    /// Checked against the pool.
    pub rows: SequenceRows<'a>,
    pub scale: f32,
}

// SAFETY: items write disjoint parts of `out` and only read the rest; the caller of
// `latent_attention` vouches for it.
unsafe impl Sync for LatentAttention<'_> {}

/// Attend at the process's instruction level.
///
/// Cost: every item reads its row's slots once; 2 * (row_dim + latent_dim) flops per query head
/// and visible position. Allocates nothing once each thread's scratch has grown.
///
/// # Safety
/// Pointers cover the shapes; for bf16 both dims are even; `rows.check` holds for the pool; no
/// other thread writes q or the pages or accesses `out` meanwhile.
pub unsafe fn latent_attention(a: &LatentAttention) {
    // SAFETY: passed on.
    unsafe { latent_attention_on(isa::current(), a) }
}

/// Like [`latent_attention`], at level `isa`.
///
/// # Safety
/// As [`latent_attention`], and `isa.runs_here()`.
pub unsafe fn latent_attention_on(isa: Isa, a: &LatentAttention) {
    let row_dim = a.pages.row_dim();
    assert!(
        row_dim <= MAX_ROW_DIM,
        "a latent and its key have {row_dim} elements, more than {MAX_ROW_DIM}"
    );
    let mut items = cut_items(a, pool::threads());
    // The last items of a prompt see most and are dearest; starting with them evens out the
    // threads' ends.
    items.reverse();
    // SAFETY: passed on; `isa` runs here.
    pool::for_each(items.len(), &|i| unsafe { run_item(isa, a, items[i]) });
}

/// Heads [head, head + heads) of tokens [first, first + tokens) of a row.
#[derive(Clone, Copy, Debug)]
struct Item {
    row: usize,
    head: usize,
    heads: usize,
    first: usize,
    tokens: usize,
}

/// The items of a call. Results do not depend on the cuts.
fn cut_items(a: &LatentAttention, threads: usize) -> Vec<Item> {
    let rows = a.rows.kv_lens.len();
    let total = a.rows.qo_indptr[rows] as usize;
    // Several parts of the heads pack the same blocks, which only pays where threads would be
    // without work.
    let whole_items = total * a.heads / ITEM_ROWS + rows;
    let parts = threads.div_ceil(whole_items);
    let heads = a.heads.div_ceil(parts).min(ITEM_ROWS);
    let tokens = (ITEM_ROWS / heads).max(1);
    let mut items = Vec::with_capacity((total / tokens + rows) * a.heads.div_ceil(heads));
    for row in 0..rows {
        let n = (a.rows.qo_indptr[row + 1] - a.rows.qo_indptr[row]) as usize;
        for first in (0..n).step_by(tokens) {
            items.extend((0..a.heads).step_by(heads).map(|head| Item {
                row,
                head,
                heads: heads.min(a.heads - head),
                first,
                tokens: tokens.min(n - first),
            }));
        }
    }
    items
}

unsafe fn run_item(isa: Isa, a: &LatentAttention, item: Item) {
    match (a.pages.dtype, isa) {
        (Dtype::F32, _) => walk::<F32>(isa, a, item),
        (Dtype::Bf16, Isa::Avx512Bf16) => walk::<Bf16Dot>(isa, a, item),
        (Dtype::Bf16, _) => walk::<Bf16>(isa, a, item),
    }
}

unsafe fn walk<E: ElementType>(isa: Isa, a: &LatentAttention, item: Item) {
    let plan = Plan::new(a, item);
    let units = a.pages.row_dim().div_ceil(E::PER_UNIT);
    let sizes = [
        plan.rows * X_STRIDE,
        plan.rows * plan.padded_latent,
        units * BLOCK,
        BLOCK * plan.padded_latent / E::PER_UNIT,
        MAX_TALL_ROWS * BLOCK,
        MAX_TALL_ROWS * P_STRIDE,
        plan.rows,
        plan.rows * SUM_LANES,
    ];
    with_scratch(sizes.iter().map(|&n| padded(n)).sum(), |mut carver| {
        let state = State {
            q: carver.take(sizes[0]),
            acc: carver.take(sizes[1]).cast(),
            keys: carver.take(sizes[2]),
            values: carver.take(sizes[3]),
            scores: carver.take(sizes[4]).cast(),
            probs: carver.take(sizes[5]),
            max: carver.take(sizes[6]).cast(),
            sums: carver.take(sizes[7]).cast(),
        };
        let walk = Walk::<E> {
            a,
            item,
            plan,
            units,
            state,
            elem: PhantomData,
        };
        // SAFETY: the pieces have the sizes they need; the rest is passed on.
        unsafe { dispatch(isa, walk) }
    });
}

/// Numbers of an item that do not change from block to block.
struct Plan {
    /// Query rows: tokens * heads, token by token.
    rows: usize,
    heads: usize,
    /// latent_dim in whole vectors of any level.
    padded_latent: usize,
    /// Position of the item's first token.
    position: usize,
    /// Positions that the item's last token sees: [0, end).
    end: usize,
}

impl Plan {
    fn new(a: &LatentAttention, item: Item) -> Plan {
        let n = (a.rows.qo_indptr[item.row + 1] - a.rows.qo_indptr[item.row]) as usize;
        let position = a.rows.kv_lens[item.row] as usize - n + item.first;
        Plan {
            rows: item.tokens * item.heads,
            heads: item.heads,
            padded_latent: a.pages.latent_dim.next_multiple_of(SUM_LANES),
            position,
            end: position + item.tokens,
        }
    }

    fn position_of_row(&self, row: usize) -> usize {
        self.position + row / self.heads
    }
}

/// Scratch of one item.
struct State {
    /// [rows, X_STRIDE] packed queries
    q: *mut u32,
    /// [rows, padded_latent] weighted latents so far
    acc: *mut f32,
    /// [units, BLOCK] this block's slots, transposed
    keys: *mut u32,
    /// [BLOCK / PER_UNIT, padded_latent] this block's latents
    values: *mut u32,
    /// [MAX_TALL_ROWS, BLOCK]
    scores: *mut f32,
    /// [MAX_TALL_ROWS, P_STRIDE] packed probabilities
    probs: *mut u32,
    /// [rows] running maximum of score * scale * log2(e)
    max: *mut f32,
    /// [rows, SUM_LANES] running sums of probabilities
    sums: *mut f32,
}

struct Walk<'a, E: ElementType> {
    a: &'a LatentAttention<'a>,
    item: Item,
    plan: Plan,
    /// Units of a slot.
    units: usize,
    state: State,
    elem: PhantomData<E>,
}

static ZEROS: [u32; MAX_ROW_DIM] = [0; MAX_ROW_DIM];

impl<E: ElementType> SimdKernel for Walk<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        self.start::<S>();
        let mut slots = [ZEROS.as_ptr(); BLOCK];
        let latent_dim = self.a.pages.latent_dim;
        for at in (0..self.plan.end).step_by(BLOCK) {
            let n = BLOCK.min(self.plan.end - at);
            self.find_slots(at, n, &mut slots);
            pack_keys::<S>(&slots, self.units, n, self.state.keys);
            let padded_latent = self.plan.padded_latent;
            pack_values::<S, E>(&slots, latent_dim, n, self.state.values, padded_latent);
            self.attend_block::<S>(at, n);
        }
        self.finish::<S>();
    }
}

impl<E: ElementType> Walk<'_, E> {
    /// Index into tokens and heads of a query row.
    #[inline(always)]
    fn place_of(&self, row: usize) -> usize {
        let first_token = self.a.rows.qo_indptr[self.item.row] as usize + self.item.first;
        let token = first_token + row / self.plan.heads;
        token * self.a.heads + self.item.head + row % self.plan.heads
    }

    #[inline(always)]
    unsafe fn start<S: Simd>(&self) {
        let row_dim = self.a.pages.row_dim();
        let q = self.a.q.cast::<E::T>();
        for row in 0..self.plan.rows {
            let from = q.add(self.place_of(row) * row_dim);
            E::pack_x::<S>(from, row_dim, self.state.q.add(row * X_STRIDE));
            self.state.max.add(row).write(f32::NEG_INFINITY);
        }
        self.state.sums.write_bytes(0, self.plan.rows * SUM_LANES);
        let acc_len = self.plan.rows * self.plan.padded_latent;
        self.state.acc.write_bytes(0, acc_len);
    }

    /// Look up the `n` positions from `at`; places without a position point at zeros.
    #[inline(always)]
    unsafe fn find_slots(&self, at: usize, n: usize, slots: &mut [*const u32; BLOCK]) {
        let pages = &self.a.pages;
        let base = pages.base.cast::<E::T>();
        let mut found = 0;
        let rows = &self.a.rows;
        rows.each_run(self.item.row, pages.page_size, at, n, |slot, run| {
            let first = base.add(pages.slot_offset(slot));
            for place in 0..run {
                slots[found] = first.add(place * pages.row_dim()).cast();
                found += 1;
            }
        });
        slots[n..].fill(ZEROS.as_ptr());
    }

    /// Positions [at, at + n) for all query rows, tile by tile.
    #[inline(always)]
    unsafe fn attend_block<S: Simd>(&self, at: usize, n: usize) {
        let groups = self.plan.rows.div_ceil(S::TALL_ROWS);
        let mut row = 0;
        for group in 0..groups {
            let rows = (self.plan.rows - row).div_ceil(groups - group);
            // The tile's last row sees most; what it does not see, no row of the tile does.
            let visible = (self.plan.position_of_row(row + rows - 1) + 1)
                .saturating_sub(at)
                .min(n);
            if visible > 0 {
                self.attend_tile::<S>(at, visible, row, rows);
            }
            row += rows;
        }
    }

    #[inline(always)]
    unsafe fn attend_tile<S: Simd>(&self, at: usize, visible: usize, row: usize, rows: usize) {
        let state = &self.state;
        let padded_latent = self.plan.padded_latent;
        let columns = visible.next_multiple_of(SUM_LANES);
        let scores = TileOperands {
            x: state.q.add(row * X_STRIDE),
            w: state.keys,
            w_stride: BLOCK,
            units: self.units,
            out: state.scores,
            out_stride: BLOCK,
            add: false,
            scales: None,
            stream: false,
        };
        product::<S, E, X_STRIDE, false>(rows, columns / S::LANES, scores);
        for r in 0..rows {
            let position = self.plan.position_of_row(row + r);
            let seen = (position + 1).saturating_sub(at).min(BLOCK) as i32;
            let scale = S::splat(self.a.scale * LOG2_E);
            self.softmax(row + r, r)
                .add_block::<S, E>(columns, 0, seen, scale);
        }
        let weighted = TileOperands {
            x: state.probs,
            w: state.values,
            w_stride: padded_latent,
            units: visible.div_ceil(E::PER_UNIT),
            out: state.acc.add(row * padded_latent),
            out_stride: padded_latent,
            add: true,
            scales: None,
            stream: false,
        };
        product::<S, E, P_STRIDE, false>(rows, padded_latent / S::LANES, weighted);
    }

    /// The softmax of query row `row`, which has the scores of row `tile_row` of a tile.
    #[inline(always)]
    unsafe fn softmax(&self, row: usize, tile_row: usize) -> RowSoftmax {
        let acc_len = self.plan.padded_latent;
        RowSoftmax {
            scores: self.state.scores.add(tile_row * BLOCK),
            probs: self.state.probs.add(tile_row * P_STRIDE),
            max: self.state.max.add(row),
            sums: self.state.sums.add(row * SUM_LANES),
            acc: self.state.acc.add(row * acc_len),
            acc_len,
        }
    }

    #[inline(always)]
    unsafe fn finish<S: Simd>(&self) {
        let latent_dim = self.a.pages.latent_dim;
        let out = self.a.out.cast::<E::T>();
        for row in 0..self.plan.rows {
            let to = out.add(self.place_of(row) * latent_dim);
            self.softmax(row, 0).finish::<S, E>(to, latent_dim, 1.0);
        }
    }
}

#[cfg(test)]
mod tests;
