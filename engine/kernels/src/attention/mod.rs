//! Causal attention over paged K and V: decode and prefill rows in one call, online softmax (as in
//! FlashAttention, arXiv 2205.14135), grouped queries, optional sliding window or chunks, soft
//! cap and attention sinks (arXiv 2309.17453, a learned score for each query head).
//!
//! A call becomes items: some tokens of a row with some KV heads, up to `ITEM_ROWS` query rows (a
//! query row is one head of one token). A prompt's items have one head, which packs each block for
//! as many tokens as possible; a decode row's have as many heads as leave work for every thread,
//! because heads are neighbors in memory and are read in its order. An item (1) packs its queries;
//! (2) walks the KV in blocks of `BLOCK` positions aligned to position 0; per block it packs K
//! transposed and V in units, once for all heads of the group, after it has made numbers of the
//! codes that FP8 pages hold; (3) per tile of query rows: scores,
//! running maximum, probabilities, weighted V; (4) divides by the sums.
//!
//! ```text
//! position      0 ........ 64 ....... 128 ...... 192
//! blocks        |--- 0 ----|--- 1 ----|--- 2 ----|       the same cuts for every chunking of the prompt
//! token at 130  |##########|##########|###       |       columns past the token get probability exactly 0
//! ```
//!
//! Exact: a token's result is a function of its q and of K, V at positions it sees, bit for bit;
//! see the crate's doc. Columns a tile does not need are left out, those it computes in vain for
//! one of its rows add 0 to a sum and 0 * v to an accumulator; a -0 that could become +0 that way
//! is always +0 in the output.
//!
//! Trust: K and V that a token of the call sees must be finite; all other slots may hold anything.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, Attention's pointers cover its shapes"
)]

/// New K and V of a step, into the pages of the pool.
pub mod append;
/// Pages of FP8 codes.
pub mod codes;
/// Attention over latents, which all heads share.
pub mod latent;

use std::marker::PhantomData;
use std::ops::Range;

use crate::attention::append::LayerPages;
use crate::attention::codes::decode_row;
use crate::elem::{Bf16, Bf16Dot, Dtype, ElementType, F32, store_part};
use crate::isa::{self, Isa};
use crate::math::{LOG2_E, exp2, tanh};
use crate::memory::scratch::{padded, with_scratch};
use crate::pool;
use crate::rows::SequenceRows;
use crate::simd::{SUM_LANES, Simd, SimdKernel, dispatch, tree_sum};
use crate::tile::{TileOperands, product};

/// KV positions per block, a multiple of every tile's width.
pub const BLOCK: usize = 64;
/// Largest head: Q's packed rows are that long.
pub const MAX_HEAD_DIM: usize = 256;
/// Query rows per item: packing a block costs about as much as 4 of them (measured on Emerald
/// Rapids).
const ITEM_ROWS: usize = 96;
/// Words from one packed query row to the next: no multiple of a page, so that rows fall into
/// different cache sets.
const X_STRIDE: usize = MAX_HEAD_DIM + 16;
const P_STRIDE: usize = BLOCK + 16;
/// Rows of a tile at any level.
const MAX_TILE_ROWS: usize = 6;

/// Arguments of one layer's attention; T tokens.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttention<'a> {
    pub pages: LayerPages,
    /// `[T, heads, head_dim]` of the pages' `dtype`, tokens `q_stride` elements apart.
    pub q: *const u8,
    pub q_stride: usize,
    /// `[T, heads * head_dim]`, contiguous, of the pages' `dtype`.
    pub out: *mut u8,
    /// A multiple of the pages' kv_heads.
    pub heads: usize,
    /// Checked against the pool.
    pub rows: SequenceRows<'a>,
    pub scale: f32,
    /// A token sees the last `window` positions, itself included; 0: all.
    pub window: usize,
    /// A token sees positions from the last multiple of `chunk` on; 0: all. Not beside a window.
    pub chunk: usize,
    /// c > 0 makes c * tanh(x / c) of each scaled score x, before the mask; 0 leaves it.
    pub soft_cap: f32,
    /// `[heads]`, or null: one more score of each query head, whose probability weighs no V.
    pub sinks: *const f32,
}

impl PagedAttention<'_> {
    /// First position that a token at `position` sees.
    fn first_seen(&self, position: usize) -> usize {
        if self.chunk > 0 {
            position - position % self.chunk
        } else if self.window > 0 {
            (position + 1).saturating_sub(self.window)
        } else {
            0
        }
    }
}

// SAFETY: items write disjoint parts of `out` and only read the rest; the caller of
// `paged_attention` vouches for it.
unsafe impl Sync for PagedAttention<'_> {}

impl PagedAttention<'_> {
    /// Factor of the products of queries and what the pages hold of K.
    fn score_factor(&self) -> f32 {
        self.scale * self.pages.scales.map_or(1.0, |scales| scales.key)
    }

    /// Factor of the weighted sums of what the pages hold of V.
    fn value_factor(&self) -> f32 {
        self.pages.scales.map_or(1.0, |scales| scales.value)
    }
}

/// Attend at the process's instruction level.
///
/// Cost: every item reads its KV once; 4 * head_dim flops per query head and visible position.
/// Allocates nothing once each thread's scratch has grown.
///
/// # Safety
/// Pointers cover the shapes; head_dim is even for bf16; `rows.check` holds for the pool; no other
/// thread writes q, K or V or accesses `out` meanwhile.
pub unsafe fn paged_attention(a: &PagedAttention) {
    // SAFETY: passed on.
    unsafe { paged_attention_on(isa::current(), a) }
}

/// Like [`paged_attention`], at level `isa`.
///
/// # Safety
/// As [`paged_attention`], and `isa.runs_here()`.
pub unsafe fn paged_attention_on(isa: Isa, a: &PagedAttention) {
    assert!(
        a.pages.head_dim <= MAX_HEAD_DIM,
        "head_dim {} exceeds {MAX_HEAD_DIM}",
        a.pages.head_dim
    );
    let kv_heads = a.pages.kv_heads;
    let rows = a.rows.kv_lens.len();
    let total = a.rows.qo_indptr[rows] as usize;
    let cuts = Cuts::new(a.heads / kv_heads, kv_heads, rows, pool::threads());
    // Decode-only calls, the usual case, need no table.
    if total == rows {
        let per_row = kv_heads.div_ceil(cuts.heads);
        return pool::for_each(rows * per_row, &|i| {
            let head = i % per_row * cuts.heads;
            let item = Item {
                row: i / per_row,
                head,
                heads: cuts.heads.min(kv_heads - head),
                first: 0,
                tokens: 1,
            };
            // SAFETY: passed on; `isa` runs here.
            unsafe { run_item(isa, a, item) };
        });
    }
    let mut items = Vec::with_capacity((total / cuts.tokens + rows) * kv_heads);
    for row in 0..rows {
        let n = (a.rows.qo_indptr[row + 1] - a.rows.qo_indptr[row]) as usize;
        let heads = if n == 1 { cuts.heads } else { 1 };
        for first in (0..n).step_by(cuts.tokens) {
            let tokens = cuts.tokens.min(n - first);
            items.extend((0..kv_heads).step_by(heads).map(|head| {
                let heads = heads.min(kv_heads - head);
                Item {
                    row,
                    head,
                    heads,
                    first,
                    tokens,
                }
            }));
        }
    }
    // The last items of a prompt see most and are dearest; starting with them evens out the
    // threads' ends.
    items.reverse();
    // SAFETY: passed on; `isa` runs here.
    pool::for_each(items.len(), &|i| unsafe { run_item(isa, a, items[i]) });
}

/// How a call is cut into items. Results do not depend on it.
#[derive(Clone, Copy, Debug)]
struct Cuts {
    /// Tokens of a prompt in one item.
    tokens: usize,
    /// KV heads of a decode row in one item.
    heads: usize,
}

impl Cuts {
    fn new(group: usize, kv_heads: usize, rows: usize, threads: usize) -> Cuts {
        let per_row = if threads == 1 {
            1
        } else {
            (2 * threads).div_ceil(rows).min(kv_heads)
        };
        let heads = kv_heads.div_ceil(per_row).min((ITEM_ROWS / group).max(1));
        Cuts {
            tokens: (ITEM_ROWS / group).max(1),
            heads,
        }
    }
}

/// Tokens [first, first + tokens) of a row, with the query heads of KV heads [head, head + heads).
#[derive(Clone, Copy, Debug)]
struct Item {
    row: usize,
    head: usize,
    heads: usize,
    first: usize,
    tokens: usize,
}

unsafe fn run_item(isa: Isa, a: &PagedAttention, item: Item) {
    match (a.pages.dtype, isa) {
        (Dtype::F32, _) => walk::<F32>(isa, a, item),
        (Dtype::Bf16, Isa::Avx512Bf16) => walk::<Bf16Dot>(isa, a, item),
        (Dtype::Bf16, _) => walk::<Bf16>(isa, a, item),
    }
}

unsafe fn walk<E: ElementType>(isa: Isa, a: &PagedAttention, item: Item) {
    let plan = Plan::new(a, item);
    let rows = plan.rows * item.heads;
    let units = plan.units::<E>();
    let sizes = [
        rows * X_STRIDE,
        rows * plan.padded_dim,
        units * BLOCK,
        BLOCK * plan.padded_dim / E::PER_UNIT,
    ];
    let decoded = if a.pages.scales.is_some() {
        BLOCK * plan.padded_dim / E::PER_UNIT
    } else {
        0
    };
    let tile = [
        MAX_TILE_ROWS * BLOCK,
        MAX_TILE_ROWS * P_STRIDE,
        rows,
        rows * SUM_LANES,
        decoded,
        decoded,
    ];
    let words = sizes.iter().chain(&tile).map(|&n| padded(n)).sum();
    with_scratch(words, |mut carver| {
        let state = State {
            q: carver.take(sizes[0]),
            acc: carver.take(sizes[1]).cast(),
            keys: carver.take(sizes[2]),
            values: carver.take(sizes[3]),
            scores: carver.take(tile[0]).cast(),
            probs: carver.take(tile[1]),
            max: carver.take(tile[2]).cast(),
            sums: carver.take(tile[3]).cast(),
            decoded_keys: carver.take(tile[4]),
            decoded_values: carver.take(tile[5]),
        };
        // SAFETY: the pieces have the sizes they need; the rest is passed on.
        unsafe {
            dispatch(
                isa,
                Walk::<E> {
                    a,
                    item,
                    plan,
                    state,
                    elem: PhantomData,
                },
            )
        }
    });
}

struct Walk<'a, E: ElementType> {
    a: &'a PagedAttention<'a>,
    item: Item,
    plan: Plan,
    state: State,
    elem: PhantomData<E>,
}

impl<E: ElementType> SimdKernel for Walk<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Walk {
            a,
            item,
            plan,
            state,
            ..
        } = self;
        for head in 0..item.heads {
            start::<S, E>(a, item, &plan, head, &state.of_head(&plan, head));
        }
        let mut rows = BlockRows::new();
        let mut decoded = BlockRows::new();
        let mut at = plan.begin - plan.begin % BLOCK;
        while at < plan.end {
            let n = BLOCK.min(plan.end - at);
            rows.find(a, item, at, n);
            for head in 0..item.heads {
                let state = state.of_head(&plan, head);
                let hidden = plan.begin.saturating_sub(at);
                let numbers = if a.pages.scales.is_some() {
                    decoded.decode::<S, E>(&plan, &rows, hidden..n, &state);
                    &mut decoded
                } else {
                    &mut rows
                };
                numbers.hide(hidden);
                pack_block::<S, E>(&plan, numbers, n, &state);
                attend_block::<S, E>(a, &plan, at, n, &state);
                rows.next_head(&plan, n, a.pages.element_bytes());
            }
            at += BLOCK;
        }
        for head in 0..item.heads {
            finish::<S, E>(a, item, &plan, head, &state.of_head(&plan, head));
        }
    }
}

/// Numbers of an item that do not change from block to block.
struct Plan {
    /// Query heads per KV head.
    group: usize,
    /// Query rows of one KV head: tokens * group, token by token.
    rows: usize,
    dim: usize,
    /// head_dim in whole vectors of any level.
    padded_dim: usize,
    /// Position of the item's first token.
    position: usize,
    /// KV positions some token sees: [begin, end).
    begin: usize,
    end: usize,
}

impl Plan {
    fn new(a: &PagedAttention, item: Item) -> Plan {
        let group = a.heads / a.pages.kv_heads;
        let n = (a.rows.qo_indptr[item.row + 1] - a.rows.qo_indptr[item.row]) as usize;
        let position = a.rows.kv_lens[item.row] as usize - n + item.first;
        Plan {
            group,
            rows: item.tokens * group,
            dim: a.pages.head_dim,
            padded_dim: a.pages.head_dim.next_multiple_of(SUM_LANES),
            position,
            begin: a.first_seen(position),
            end: position + item.tokens,
        }
    }

    /// Units of one head's K.
    fn units<E: ElementType>(&self) -> usize {
        self.dim.div_ceil(E::PER_UNIT)
    }

    fn position_of_row(&self, row: usize) -> usize {
        self.position + row / self.group
    }
}

/// Scratch of one item; the arrays with rows have those of each KV head in turn.
#[derive(Clone, Copy)]
struct State {
    /// [rows, X_STRIDE] packed queries
    q: *mut u32,
    /// [rows, padded_dim] weighted V so far
    acc: *mut f32,
    /// [units, BLOCK] this block's K, transposed
    keys: *mut u32,
    /// [BLOCK / PER_UNIT, padded_dim] this block's V
    values: *mut u32,
    /// [MAX_TILE_ROWS, BLOCK]
    scores: *mut f32,
    /// [MAX_TILE_ROWS, P_STRIDE] packed probabilities
    probs: *mut u32,
    /// [rows] running maximum of score * scale * log2(e)
    max: *mut f32,
    /// [rows, SUM_LANES] running sums of probabilities
    sums: *mut f32,
    /// [BLOCK, padded_dim] numbers of this block's K; empty where the pages hold no codes
    decoded_keys: *mut u32,
    /// The same of V
    decoded_values: *mut u32,
}

impl State {
    /// Scratch of the item's KV head number `head`.
    #[inline(always)]
    unsafe fn of_head(&self, plan: &Plan, head: usize) -> State {
        let row = head * plan.rows;
        State {
            q: self.q.add(row * X_STRIDE),
            acc: self.acc.add(row * plan.padded_dim),
            max: self.max.add(row),
            sums: self.sums.add(row * SUM_LANES),
            ..*self
        }
    }

    /// The softmax of query row `row`, which has the scores of row `tile_row` of a tile.
    #[inline(always)]
    unsafe fn softmax(&self, plan: &Plan, row: usize, tile_row: usize) -> RowSoftmax {
        RowSoftmax {
            scores: self.scores.add(tile_row * BLOCK),
            probs: self.probs.add(tile_row * P_STRIDE),
            max: self.max.add(row),
            sums: self.sums.add(row * SUM_LANES),
            acc: self.acc.add(row * plan.padded_dim),
            acc_len: plan.padded_dim,
        }
    }
}

/// Where the K and V of a block's positions are, for one KV head; positions without one point at
/// zeros.
struct BlockRows {
    keys: [*const u32; BLOCK],
    values: [*const u32; BLOCK],
}

static ZEROS: [u32; MAX_HEAD_DIM] = [0; MAX_HEAD_DIM];

impl BlockRows {
    fn new() -> BlockRows {
        BlockRows {
            keys: [ZEROS.as_ptr(); BLOCK],
            values: [ZEROS.as_ptr(); BLOCK],
        }
    }

    /// Look up the `n` positions from `at`, a multiple of BLOCK.
    #[inline(always)]
    unsafe fn find(&mut self, a: &PagedAttention, item: Item, at: usize, n: usize) {
        let element = a.pages.element_bytes();
        let slot_bytes = a.pages.slot_len() * element;
        let value_offset = a.pages.value_offset() * element;
        let mut j = 0;
        let head = item.head * a.pages.head_dim;
        let size = a.pages.page_size;
        a.rows.each_run(item.row, size, at, n, |slot, run| {
            let first = (a.pages.slot_offset(slot) + head) * element;
            let first = a.pages.base.add(first);
            for place in 0..run {
                let key = first.add(place * slot_bytes);
                self.keys[j] = key.cast();
                self.values[j] = key.add(value_offset).cast();
                j += 1;
            }
        });
        self.keys[n..].fill(ZEROS.as_ptr());
        self.values[n..].fill(ZEROS.as_ptr());
    }

    /// Let zeros take the place of the first `n` positions, which lie in front of the window: their
    /// pages may belong to another sequence by now, and 0 * NaN is NaN.
    #[inline(always)]
    fn hide(&mut self, n: usize) {
        self.keys[..n].fill(ZEROS.as_ptr());
        self.values[..n].fill(ZEROS.as_ptr());
    }

    /// On to the next KV head of the same `n` positions.
    #[inline(always)]
    fn next_head(&mut self, plan: &Plan, n: usize, element_bytes: usize) {
        for row in self.keys[..n].iter_mut().chain(&mut self.values[..n]) {
            *row = row.wrapping_byte_add(plan.dim * element_bytes);
        }
    }

    /// Make numbers of the codes of some positions, and point at them.
    #[inline(always)]
    unsafe fn decode<S: Simd, E: ElementType>(
        &mut self,
        plan: &Plan,
        codes: &BlockRows,
        positions: Range<usize>,
        state: &State,
    ) {
        let n = positions.end;
        for j in positions {
            let at = j * plan.padded_dim;
            let key = state.decoded_keys.cast::<E::T>().add(at);
            let value = state.decoded_values.cast::<E::T>().add(at);
            decode_row::<S, E>(codes.keys[j].cast(), plan.dim, key);
            decode_row::<S, E>(codes.values[j].cast(), plan.dim, value);
            self.keys[j] = key.cast();
            self.values[j] = value.cast();
        }
        self.keys[n..].fill(ZEROS.as_ptr());
        self.values[n..].fill(ZEROS.as_ptr());
    }
}

#[inline(always)]
unsafe fn start<S: Simd, E: ElementType>(
    a: &PagedAttention,
    item: Item,
    plan: &Plan,
    head: usize,
    state: &State,
) {
    let q = a.q.cast::<E::T>();
    let first_token = a.rows.qo_indptr[item.row] as usize + item.first;
    for row in 0..plan.rows {
        let token = first_token + row / plan.group;
        let head = (item.head + head) * plan.group + row % plan.group;
        E::pack_x::<S>(
            q.add(token * a.q_stride + head * plan.dim),
            plan.dim,
            state.q.add(row * X_STRIDE),
        );
        state.max.add(row).write(f32::NEG_INFINITY);
    }
    state.sums.write_bytes(0, plan.rows * SUM_LANES);
    if !a.sinks.is_null() {
        // The sink is the first score of every row: its probability relative to itself is 1.
        for row in 0..plan.rows {
            let head = (item.head + head) * plan.group + row % plan.group;
            state.max.add(row).write(a.sinks.add(head).read() * LOG2_E);
            state.sums.add(row * SUM_LANES).write(1.0);
        }
    }
    state.acc.write_bytes(0, plan.rows * plan.padded_dim);
}

#[inline(always)]
unsafe fn pack_block<S: Simd, E: ElementType>(
    plan: &Plan,
    rows: &BlockRows,
    n: usize,
    state: &State,
) {
    pack_keys::<S>(&rows.keys, plan.units::<E>(), n, state.keys);
    pack_values::<S, E>(&rows.values, plan.dim, n, state.values, plan.padded_dim);
}

/// Transpose the keys of a block's first `n` positions: `to` is [units, BLOCK].
#[inline(always)]
unsafe fn pack_keys<S: Simd>(keys: &[*const u32; BLOCK], units: usize, n: usize, to: *mut u32) {
    // Only vectors with a position in them; the tiles leave out the same ones.
    let mut column = 0;
    while column < n {
        let mut u = 0;
        while u < units {
            let cols = S::LANES.min(units - u);
            let rows = keys.as_ptr().add(column);
            S::transpose(rows, u, cols, to.add(u * BLOCK + column), BLOCK);
            u += S::LANES;
        }
        column += S::LANES;
    }
    // Whole tiles read the columns up to the next multiple of SUM_LANES.
    while column < n.next_multiple_of(SUM_LANES) {
        for u in 0..units {
            S::store_u32(to.add(u * BLOCK + column), S::splat_u32(0));
        }
        column += S::LANES;
    }
}

/// Pack the first `dim` elements of the values of a block's first `n` positions in units that span
/// positions: `to` is [BLOCK / PER_UNIT, padded_dim].
#[inline(always)]
unsafe fn pack_values<S: Simd, E: ElementType>(
    values: &[*const u32; BLOCK],
    dim: usize,
    n: usize,
    to: *mut u32,
    padded_dim: usize,
) {
    for j in 0..n.div_ceil(E::PER_UNIT) {
        let first = values[j * E::PER_UNIT].cast::<E::T>();
        let second = values[j * E::PER_UNIT + E::PER_UNIT - 1].cast::<E::T>();
        let to = to.add(j * padded_dim);
        let mut d = 0;
        while d + S::LANES <= dim {
            S::store_u32(to.add(d), E::pair_rows::<S>(first.add(d), second.add(d)));
            d += S::LANES;
        }
        while d < padded_dim {
            let unit = if d < dim {
                E::pair(first.add(d).read(), second.add(d).read())
            } else {
                0
            };
            to.add(d).write(unit);
            d += 1;
        }
    }
}

/// Positions [at, at + n) for all query rows, tile by tile.
#[inline(always)]
unsafe fn attend_block<S: Simd, E: ElementType>(
    a: &PagedAttention,
    plan: &Plan,
    at: usize,
    n: usize,
    state: &State,
) {
    let groups = plan.rows.div_ceil(S::TILE_ROWS);
    let mut row = 0;
    for g in 0..groups {
        let rows = (plan.rows - row).div_ceil(groups - g);
        // The tile's last row sees most; what it does not see, no row of the tile does.
        let visible = (plan.position_of_row(row + rows - 1) + 1)
            .saturating_sub(at)
            .min(n);
        if visible > 0 {
            attend_tile::<S, E>(a, plan, at, visible, row, rows, state);
        }
        row += rows;
    }
}

#[inline(always)]
unsafe fn attend_tile<S: Simd, E: ElementType>(
    a: &PagedAttention,
    plan: &Plan,
    at: usize,
    visible: usize,
    row: usize,
    rows: usize,
    state: &State,
) {
    let columns = visible.next_multiple_of(SUM_LANES);
    let scores = TileOperands {
        x: state.q.add(row * X_STRIDE),
        w: state.keys,
        w_stride: BLOCK,
        units: plan.units::<E>(),
        out: state.scores,
        out_stride: BLOCK,
        add: false,
        scales: None,
        stream: false,
    };
    product::<S, E, X_STRIDE, false>(rows, columns / S::LANES, scores);
    for r in 0..rows {
        softmax_row::<S, E>(a, plan, at, columns, row + r, r, state);
    }
    let weighted = TileOperands {
        x: state.probs,
        w: state.values,
        w_stride: plan.padded_dim,
        units: visible.div_ceil(E::PER_UNIT),
        out: state.acc.add(row * plan.padded_dim),
        out_stride: plan.padded_dim,
        add: true,
        scales: None,
        stream: false,
    };
    product::<S, E, P_STRIDE, false>(rows, plan.padded_dim / S::LANES, weighted);
}

/// Scores of one row become probabilities relative to the running maximum; what was summed before
/// is rescaled.
#[inline(always)]
unsafe fn softmax_row<S: Simd, E: ElementType>(
    a: &PagedAttention,
    plan: &Plan,
    at: usize,
    columns: usize,
    row: usize,
    tile_row: usize,
    state: &State,
) {
    let scores = state.scores.add(tile_row * BLOCK);
    let position = plan.position_of_row(row);
    let hi = (position + 1).saturating_sub(at).min(BLOCK) as i32;
    let lo = a.first_seen(position).saturating_sub(at).min(BLOCK) as i32;
    let scale = if a.soft_cap > 0.0 {
        cap_scores::<S>(scores, columns, a.score_factor(), a.soft_cap);
        S::splat(LOG2_E)
    } else {
        S::splat(a.score_factor() * LOG2_E)
    };
    state
        .softmax(plan, row, tile_row)
        .add_block::<S, E>(columns, lo, hi, scale);
}

/// The running softmax of one query row.
struct RowSoftmax {
    /// [columns] scores of a block
    scores: *mut f32,
    /// Packed probabilities of the block
    probs: *mut u32,
    /// Running maximum of score * scale
    max: *mut f32,
    /// [SUM_LANES] running sums of probabilities
    sums: *mut f32,
    /// [acc_len] weighted V so far, whole vectors
    acc: *mut f32,
    acc_len: usize,
}

impl RowSoftmax {
    /// Make probabilities of the block's scores, relative to the running maximum, and rescale what
    /// was summed before. The row sees columns [lo, hi).
    ///
    /// `scale` includes log2(e): base 2 saves a multiplication per probability.
    #[inline(always)]
    unsafe fn add_block<S: Simd, E: ElementType>(
        &self,
        columns: usize,
        lo: i32,
        hi: i32,
        scale: S::F,
    ) {
        let all_visible = lo == 0 && hi as usize >= columns;
        let mut top = S::splat(f32::NEG_INFINITY);
        let mut c = 0;
        while c < columns {
            let mut s = S::mul(S::load(self.scores.add(c)), scale);
            if !all_visible {
                s = S::keep_range(s, c as i32, lo, hi);
            }
            S::store(self.scores.add(c), s);
            top = S::max(top, s);
            c += S::LANES;
        }
        let before = self.max.read();
        let reduced = S::reduce_max(top);
        let after = if reduced > before { reduced } else { before };
        self.max.write(after);
        // Nothing visible yet (a window's first blocks): any finite stand-in makes all
        // probabilities 0.
        let shift = S::splat(if after == f32::NEG_INFINITY {
            0.0
        } else {
            after
        });
        if after != before {
            let factor = exp2::<S>(S::sub(S::splat(before), shift));
            rescale::<S>(self.sums, SUM_LANES, factor);
            rescale::<S>(self.acc, self.acc_len, factor);
        }
        let mut c = 0;
        while c < columns {
            let p = E::round::<S>(exp2::<S>(S::sub(S::load(self.scores.add(c)), shift)));
            E::store_x::<S>(self.probs, c, p);
            // Lane i of 16 sums columns i, i + 16, …, whatever the vector width.
            let lanes = self.sums.add(c % SUM_LANES);
            S::store(lanes, S::add(S::load(lanes), p));
            c += S::LANES;
        }
    }

    /// The row's result of `n` dimensions: `factor` times the weighted V, divided by the sum of
    /// probabilities.
    #[inline(always)]
    unsafe fn finish<S: Simd, E: ElementType>(&self, to: *mut E::T, n: usize, factor: f32) {
        let total = tree_sum(&self.sums.cast::<[f32; SUM_LANES]>().read());
        let inverse = S::splat(factor / total);
        let mut d = 0;
        while d < n {
            let v = S::mul(S::load(self.acc.add(d)), inverse);
            // + 0 turns -0 into +0.
            store_part::<S, E>(to.add(d), S::add(v, S::splat(0.0)), n - d);
            d += S::LANES;
        }
    }
}

/// Scores s become cap * tanh(s * scale / cap).
#[inline(always)]
unsafe fn cap_scores<S: Simd>(scores: *mut f32, columns: usize, scale: f32, cap: f32) {
    let inner = S::splat(scale / cap);
    let outer = S::splat(cap);
    let mut c = 0;
    while c < columns {
        let capped = tanh::<S>(S::mul(S::load(scores.add(c)), inner));
        S::store(scores.add(c), S::mul(capped, outer));
        c += S::LANES;
    }
}

#[inline(always)]
unsafe fn rescale<S: Simd>(values: *mut f32, n: usize, factor: S::F) {
    let mut i = 0;
    while i < n {
        S::store(values.add(i), S::mul(S::load(values.add(i)), factor));
        i += S::LANES;
    }
}

#[inline(always)]
unsafe fn finish<S: Simd, E: ElementType>(
    a: &PagedAttention,
    item: Item,
    plan: &Plan,
    head: usize,
    state: &State,
) {
    let out = a.out.cast::<E::T>();
    let first_token = a.rows.qo_indptr[item.row] as usize + item.first;
    for row in 0..plan.rows {
        let token = first_token + row / plan.group;
        let head = (item.head + head) * plan.group + row % plan.group;
        let to = out.add((token * a.heads + head) * plan.dim);
        let factor = a.value_factor();
        state
            .softmax(plan, row, 0)
            .finish::<S, E>(to, plan.dim, factor);
    }
}

#[cfg(test)]
pub(crate) mod tests;
