//! Scatter a step's new K and V into the pages of one layer.

use std::marker::PhantomData;

use crate::attention::codes::{KvScales, encode_row};
use crate::elem::{Bf16, Dtype, ElementType, F32};
use crate::isa;
use crate::simd::{Simd, SimdKernel, dispatch};

/// View of one layer of the KV pool `[page, layer, 2, slot, head, dim]`. Strides count elements.
#[derive(Clone, Copy, Debug)]
pub struct LayerPages {
    /// Type of a step's q, K, V and result, and of the pages without `scales`.
    pub dtype: Dtype,
    /// The pages hold FP8 codes of K and V over these scales; `None`: K and V themselves.
    pub scales: Option<KvScales>,
    /// K of slot 0 of page 0 of this layer.
    pub base: *mut u8,
    /// From a page to the next: layers * 2 * page_size * kv_heads * head_dim.
    pub page_stride: usize,
    pub page_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl LayerPages {
    /// Size of an element of the pages.
    pub fn element_bytes(&self) -> usize {
        match self.scales {
            Some(_) => 1,
            None => self.dtype.bytes(),
        }
    }

    /// Elements of one token's K.
    pub fn slot_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// From a slot's K to its V.
    pub fn value_offset(&self) -> usize {
        self.page_size * self.slot_len()
    }

    /// Element offset of the K of `slot` = page * page_size + place in the page.
    pub fn slot_offset(&self, slot: usize) -> usize {
        slot / self.page_size * self.page_stride + slot % self.page_size * self.slot_len()
    }
}

/// New K or V: `[tokens, kv_heads, head_dim]`, heads contiguous, tokens `stride` elements apart, of
/// `LayerPages::dtype`.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens {
    pub data: *const u8,
    pub stride: usize,
}

/// Write token t of `k` and `v` to slot `slots[t]`, encoded where the pages hold codes; a negative
/// slot skips the token (padding).
///
/// Cost: reads and writes 2 * tokens * slot_len elements once; one thread.
///
/// # Safety
/// `k`, `v` cover `slots.len()` tokens; every slot lies in the pages; no other thread reads or
/// writes those slots meanwhile.
pub unsafe fn kv_append(pages: &LayerPages, k: NewTokens, v: NewTokens, slots: &[i64]) {
    // SAFETY: passed on.
    unsafe {
        match (pages.scales, pages.dtype) {
            (None, _) => copy_tokens(pages, k, v, slots),
            (Some(scales), Dtype::F32) => {
                dispatch(
                    isa::current(),
                    EncodeTokens::<F32>::new(pages, scales, [k, v], slots),
                );
            }
            (Some(scales), Dtype::Bf16) => {
                dispatch(
                    isa::current(),
                    EncodeTokens::<Bf16>::new(pages, scales, [k, v], slots),
                );
            }
        }
    }
}

unsafe fn copy_tokens(pages: &LayerPages, k: NewTokens, v: NewTokens, slots: &[i64]) {
    let size = pages.dtype.bytes();
    let bytes = pages.slot_len() * size;
    for (t, &slot) in slots.iter().enumerate() {
        let Ok(slot) = usize::try_from(slot) else {
            continue;
        };
        let at = pages.slot_offset(slot) * size;
        // SAFETY: the caller vouches for both ends; a token and a slot are `bytes` long and do not
        // overlap.
        unsafe {
            let to = pages.base.add(at);
            std::ptr::copy_nonoverlapping(k.data.add(t * k.stride * size), to, bytes);
            std::ptr::copy_nonoverlapping(
                v.data.add(t * v.stride * size),
                to.add(pages.value_offset() * size),
                bytes,
            );
        }
    }
}

struct EncodeTokens<'a, E: ElementType> {
    pages: &'a LayerPages,
    scales: KvScales,
    /// K and V.
    new: [NewTokens; 2],
    slots: &'a [i64],
    elem: PhantomData<E>,
}

impl<'a, E: ElementType> EncodeTokens<'a, E> {
    fn new(
        pages: &'a LayerPages,
        scales: KvScales,
        new: [NewTokens; 2],
        slots: &'a [i64],
    ) -> EncodeTokens<'a, E> {
        EncodeTokens {
            pages,
            scales,
            new,
            slots,
            elem: PhantomData,
        }
    }
}

impl<E: ElementType> SimdKernel for EncodeTokens<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let count = self.pages.slot_len();
        let scales = [self.scales.key, self.scales.value];
        for (t, &slot) in self.slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else {
                continue;
            };
            let at = self.pages.slot_offset(slot);
            let places = [at, at + self.pages.value_offset()];
            for ((new, scale), place) in self.new.iter().zip(scales).zip(places) {
                // SAFETY: the caller of `kv_append` vouches for both ends.
                unsafe {
                    let from = new.data.cast::<E::T>().add(t * new.stride);
                    encode_row::<S, E>(from, count, scale, self.pages.base.add(place));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_land_in_their_slots_and_nowhere_else() {
        let layers = 2;
        let page_size = 4;
        let heads = 2;
        let dim = 3;
        let page_stride = layers * 2 * page_size * heads * dim;
        let mut memory = vec![-1.0_f32; 3 * page_stride];
        let layer = page_stride / layers;
        // SAFETY: one layer into the first page.
        let base = unsafe { memory.as_mut_ptr().add(layer) }.cast();
        let pages = LayerPages {
            dtype: Dtype::F32,
            scales: None,
            base,
            page_stride,
            page_size,
            kv_heads: heads,
            head_dim: dim,
        };
        // Tokens 8 elements apart of which 6 are theirs.
        let k: Vec<f32> = (0..24).map(|x| x as f32).collect();
        let v: Vec<f32> = (100..124).map(|x| x as f32).collect();
        let new = |data: &[f32]| NewTokens {
            data: data.as_ptr().cast(),
            stride: 8,
        };
        // SAFETY: three tokens of 8 elements; slots 9 and 3 exist in 12.
        unsafe { kv_append(&pages, new(&k), new(&v), &[9, -1, 3]) };
        let mut expected = vec![-1.0; 3 * page_stride];
        for (token, page, place) in [(0, 2, 1), (2, 0, 3)] {
            let at = page * page_stride + layer + place * 6;
            expected[at..at + 6].copy_from_slice(&k[token * 8..token * 8 + 6]);
            expected[at + 24..at + 30].copy_from_slice(&v[token * 8..token * 8 + 6]);
        }
        assert_eq!(memory, expected);
    }
}
