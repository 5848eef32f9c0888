//! Products of vectors of heads, each with the weight of its head, in one call.

use super::{ALONE, ITEM_ROWS, LinearProduct, PackedWeight, Weight, linear_on};
use crate::isa::{self, Isa};
use crate::pool;

/// y[t, h] = x[t, h] * W[h]^T for every token t and head h. x and y are in the weights' type, their
/// vectors contiguous; strides count elements.
#[derive(Clone, Copy, Debug)]
pub struct HeadProducts<'a> {
    /// One per head, all of one shape.
    pub weights: &'a [PackedWeight],
    pub tokens: usize,
    /// `[tokens, heads, inputs]`
    pub x: *const u8,
    pub x_token_stride: usize,
    pub x_head_stride: usize,
    /// `[tokens, heads, outputs]`
    pub y: *mut u8,
    pub y_token_stride: usize,
    pub y_head_stride: usize,
}

// SAFETY: items write disjoint parts of `y` and only read the rest; the caller of `multiply_heads`
// vouches for it.
unsafe impl Sync for HeadProducts<'_> {}

/// Multiply at the process's instruction level. Exact as [`super::linear`] is.
///
/// # Safety
/// Pointers cover the shapes; `y` overlaps nothing; no other thread writes the operands meanwhile.
pub unsafe fn multiply_heads(products: &HeadProducts) {
    // SAFETY: passed on.
    unsafe { multiply_heads_on(isa::current(), products) }
}

/// Like [`multiply_heads`], at level `isa`.
///
/// # Safety
/// As [`multiply_heads`], and `isa.runs_here()`.
pub unsafe fn multiply_heads_on(isa: Isa, products: &HeadProducts) {
    let p = products;
    let Some(first_weight) = p.weights.first() else {
        return;
    };
    let shape = first_weight.shape();
    let size = shape.dtype.bytes();
    let cuts = p.tokens.div_ceil(ITEM_ROWS);
    let run = |i: usize| {
        let head = i / cuts;
        let first = i % cuts * ITEM_ROWS;
        let x_offset = first * p.x_token_stride + head * p.x_head_stride;
        let y_offset = first * p.y_token_stride + head * p.y_head_stride;
        // SAFETY: the caller's pointers cover every head and token.
        unsafe {
            let product = LinearProduct {
                weight: Weight::Packed(&p.weights[head]),
                x: p.x.add(x_offset * size),
                x_stride: p.x_token_stride,
                rows: ITEM_ROWS.min(p.tokens - first),
                bias: std::ptr::null(),
                y: p.y.add(y_offset * size),
                y_stride: p.y_token_stride,
            };
            linear_on(isa, &product);
        }
    };
    let items = cuts * p.weights.len();
    if p.tokens * p.weights.len() * shape.outputs * shape.inputs < ALONE {
        (0..items).for_each(run);
    } else {
        // A product within an item does not ask for threads again: the pool is taken.
        pool::for_each(items, &run);
    }
}
