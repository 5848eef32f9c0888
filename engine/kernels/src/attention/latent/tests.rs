//! Attention over latents against a naive f64 reference, and the exactness the module promises.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;
use crate::attention::tests::{Stored, cuts, noise};

const LAYERS: usize = 2;

#[derive(Clone, Copy, Debug)]
struct Shape {
    dtype: Dtype,
    heads: usize,
    latent_dim: usize,
    key_dim: usize,
    page_size: usize,
}

impl Shape {
    fn row_dim(&self) -> usize {
        self.latent_dim + self.key_dim
    }

    fn scale(&self) -> f32 {
        // Larger than 1 / sqrt(d): the softmax has clear winners, so wrong masks cannot hide.
        3.0 / (self.row_dim() as f32).sqrt()
    }
}

/// A sequence's queries and slots, rounded to the storage type.
struct World {
    shape: Shape,
    /// [position, head, row_dim]
    q: Vec<f32>,
    /// [position, row_dim]
    slots: Vec<f32>,
    len: usize,
}

impl World {
    fn new(shape: Shape, len: usize, seed: u64) -> World {
        let make = |vectors: usize, salt: u64| {
            let values = noise(len * vectors * shape.row_dim(), seed ^ salt);
            Stored::new(shape.dtype, &values).values()
        };
        World {
            shape,
            q: make(shape.heads, 1),
            slots: make(1, 2),
            len,
        }
    }

    /// [len, heads, latent_dim]
    fn reference(&self) -> Vec<f64> {
        let d = self.shape.row_dim();
        let latent_dim = self.shape.latent_dim;
        let mut out = Vec::new();
        for (i, q) in self.q.chunks(d).enumerate() {
            let seen: Vec<&[f32]> = self
                .slots
                .chunks(d)
                .take(i / self.shape.heads + 1)
                .collect();
            let scores: Vec<f64> = seen
                .iter()
                .map(|slot| {
                    let products = q.iter().zip(*slot);
                    let dot: f64 = products.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                    dot * f64::from(self.shape.scale())
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for j in 0..latent_dim {
                let terms = weights.iter().zip(&seen);
                out.push(terms.map(|(w, slot)| w / total * f64::from(slot[j])).sum());
            }
        }
        out
    }

    /// Compute the sequence in chunks of the given sizes, each call beside a whole other sequence.
    fn run(&self, isa: Isa, chunks: &[usize], company: Option<&World>) -> Vec<u8> {
        let s = &self.shape;
        let size = s.dtype.bytes();
        let longest = self.len.max(company.map_or(0, |other| other.len));
        let pages_each = longest.div_ceil(s.page_size);
        let count = 2 * pages_each;
        let page_stride = LAYERS * s.page_size * s.row_dim();
        // Unwritten slots hold NaN, so that reading one shows.
        let mut memory = Stored::new(s.dtype, &vec![f32::NAN; count * page_stride]).1;
        // SAFETY: the last layer of the first page.
        let base = unsafe { memory.as_mut_ptr().add(page_stride / LAYERS * size) };
        let pages = LatentPages {
            dtype: s.dtype,
            base,
            page_stride,
            page_size: s.page_size,
            latent_dim: s.latent_dim,
            key_dim: s.key_dim,
        };
        // Scattered: pages of the two sequences in turn, in descending order.
        let page_of = |w: usize, i: usize| ((pages_each - 1 - i) * 2 + w) as i32;
        let mut out = Vec::new();
        let mut done = 0;
        for &n in chunks {
            let mut q = vec![];
            let mut new_slots = vec![];
            let mut slot_mapping = vec![];
            let mut qo_indptr = vec![0];
            let mut kv_lens = vec![];
            let mut page_indptr = vec![0];
            let mut page_indices = vec![];
            let other = company.map(|other| (1, other, 0, other.len));
            for (w, world, from, to) in other.into_iter().chain([(0, self, done, done + n)]) {
                let d = s.row_dim();
                q.extend(&world.q[from * s.heads * d..to * s.heads * d]);
                new_slots.extend(&world.slots[from * d..to * d]);
                slot_mapping.extend((from..to).map(|p| {
                    let page = i64::from(page_of(w, p / s.page_size));
                    page * s.page_size as i64 + (p % s.page_size) as i64
                }));
                qo_indptr.push(slot_mapping.len() as i32);
                kv_lens.push(to as i32);
                page_indices.extend((0..to.div_ceil(s.page_size)).map(|i| page_of(w, i)));
                page_indptr.push(page_indices.len() as i32);
            }
            let q = Stored::new(s.dtype, &q);
            let new_slots = Stored::new(s.dtype, &new_slots);
            let row_bytes = s.heads * s.latent_dim * size;
            let mut result = vec![0_u8; slot_mapping.len() * row_bytes];
            let rows = SequenceRows {
                qo_indptr: &qo_indptr,
                kv_lens: &kv_lens,
                page_indptr: &page_indptr,
                page_indices: &page_indices,
                slot_mapping: &slot_mapping,
            };
            rows.check(count, s.page_size).unwrap();
            let part = |offset: usize| NewTokens {
                data: new_slots.1[offset * size..].as_ptr(),
                stride: s.row_dim(),
            };
            let call = LatentAttention {
                pages,
                q: q.1.as_ptr(),
                out: result.as_mut_ptr(),
                heads: s.heads,
                rows,
                scale: s.scale(),
            };
            // SAFETY: all shapes are built above.
            unsafe {
                latent_append(&pages, part(0), part(s.latent_dim), &slot_mapping);
                latent_attention_on(isa, &call);
            }
            // This sequence is the last row.
            out.extend(&result[result.len() - n * row_bytes..]);
            done += n;
        }
        assert_eq!(done, self.len, "chunks cover the sequence");
        out
    }

    fn check(&self, isa: Isa) {
        let got = Stored(self.shape.dtype, self.run(isa, &[self.len], None)).values();
        let tolerance = if self.shape.dtype == Dtype::F32 {
            3e-6
        } else {
            8e-3
        };
        for (i, (a, b)) in got.iter().zip(self.reference()).enumerate() {
            assert!(
                (f64::from(*a) - b).abs() <= tolerance,
                "{isa:?} {:?} at {i}: {a} not {b}",
                self.shape
            );
        }
    }
}

fn shape(dtype: Dtype, heads: usize, dims: (usize, usize), page_size: usize) -> Shape {
    Shape {
        dtype,
        heads,
        latent_dim: dims.0,
        key_dim: dims.1,
        page_size,
    }
}

#[test]
fn equals_the_reference_for_every_size_and_level() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for dims in [(32, 8), (16, 2), (20, 6), (64, 64), (512, 64)] {
                for heads in [1, 3, 16] {
                    let len = if dims.0 == 512 { 66 } else { 131 };
                    World::new(shape(dtype, heads, dims, 16), len, heads as u64).check(isa);
                }
            }
        }
    }
}

#[test]
fn more_heads_than_an_item_takes_are_computed_in_parts() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        World::new(shape(dtype, 128, (32, 8), 16), 30, 4).check(Isa::best());
    }
}

#[test]
fn lengths_around_block_and_page_ends() {
    for isa in Isa::available() {
        for len in [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200] {
            for page_size in [1, 16, 64] {
                let dtype = if len % 2 == 0 {
                    Dtype::F32
                } else {
                    Dtype::Bf16
                };
                World::new(shape(dtype, 4, (32, 8), page_size), len, len as u64).check(isa);
            }
        }
    }
}

#[test]
fn levels_with_fma_agree_bit_for_bit() {
    let available = Isa::available().into_iter();
    let levels: Vec<Isa> = available.filter(|&isa| isa >= Isa::Avx2).collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let world = World::new(shape(dtype, 5, (64, 16), 16), 150, 9);
        let results = levels.iter().map(|&isa| world.run(isa, &[150], None));
        let results: Vec<Vec<u8>> = results.collect();
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{dtype:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn chunks_company_and_pages_do_not_change_a_bit(
        (len, cut) in (1_usize..180).prop_flat_map(|len| (Just(len), cuts(len))),
        other in 1_usize..100,
        bf16: bool,
        heads in 1_usize..=20,
        page_logs in (0_u32..7, 0_u32..7),
        seed: u64,
    ) {
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let s = shape(dtype, heads, (16, 4), 1 << page_logs.0);
        let world = World::new(s, len, seed);
        let company = World::new(s, other, seed ^ 77);
        let isa = Isa::best();
        let whole = world.run(isa, &[len], None);
        prop_assert_eq!(&world.run(isa, &cut, Some(&company)), &whole, "cut {:?}", cut);
        prop_assert_eq!(&world.run(isa, &vec![1; len], None), &whole, "token by token");
        let page_size = 1 << page_logs.1;
        let elsewhere = World::new(Shape { page_size, ..s }, len, seed);
        prop_assert_eq!(&elsewhere.run(isa, &cut, None), &whole, "pages of {}", page_size);
    }
}

#[test]
fn number_of_threads_does_not_change_a_bit() {
    for len in [1, 300] {
        let world = World::new(shape(Dtype::F32, 7, (64, 16), 16), len, 5);
        let alone = world.run(Isa::best(), &[len], None);
        crate::pool::tests::with_threads(3, || {
            for _ in 0..5 {
                assert_eq!(world.run(Isa::best(), &[len], None), alone);
            }
        });
    }
}

#[test]
fn tokens_without_a_slot_are_not_stored() {
    let mut memory = vec![-1.0_f32; 2 * 2 * 3];
    let pages = LatentPages {
        dtype: Dtype::F32,
        base: memory.as_mut_ptr().cast(),
        page_stride: 6,
        page_size: 2,
        latent_dim: 2,
        key_dim: 1,
    };
    let new = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let part = |offset: usize| NewTokens {
        data: new[offset..].as_ptr().cast(),
        stride: 3,
    };
    // SAFETY: two tokens of 3 elements; slot 2 exists in 4.
    unsafe { latent_append(&pages, part(0), part(2), &[-1, 2]) };
    let mut expected = vec![-1.0; 12];
    expected[6..9].copy_from_slice(&[4.0, 5.0, 6.0]);
    assert_eq!(memory, expected);
}
