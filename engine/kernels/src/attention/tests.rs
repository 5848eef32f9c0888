//! Attention against a naive f64 reference, and the exactness the module promises.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

use super::*;
use crate::attention::append::{LayerPages, NewTokens, kv_append};
use crate::attention::codes::{KvScales, decode, encode};
use crate::elem::{from_bf16, to_bf16};

/// Deterministic noise in [-1, 1).
pub(crate) fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

#[derive(Clone, Debug)]
struct Shape {
    dtype: Dtype,
    kv_heads: usize,
    group: usize,
    dim: usize,
    page_size: usize,
    window: usize,
    chunk: usize,
    soft_cap: f32,
    /// Factor of the noise that is the heads' sinks; 0: there are none.
    sinks: f32,
    scales: Option<KvScales>,
}

/// A sequence in every head's full K and V, and paged calls on any part of it.
struct World {
    shape: Shape,
    /// [position, head, dim] in f32, already rounded to the type of a step
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    len: usize,
}

const LAYERS: usize = 2;

/// Numbers in the storage type.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Stored(pub Dtype, pub Vec<u8>);

impl Stored {
    pub(crate) fn new(dtype: Dtype, values: &[f32]) -> Stored {
        let bytes = match dtype {
            Dtype::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
            Dtype::Bf16 => values
                .iter()
                .flat_map(|&x| to_bf16(x).to_ne_bytes())
                .collect(),
        };
        Stored(dtype, bytes)
    }

    pub(crate) fn values(&self) -> Vec<f32> {
        match self.0 {
            Dtype::F32 => self
                .1
                .chunks(4)
                .map(|b| f32::from_ne_bytes(b.try_into().unwrap()))
                .collect(),
            Dtype::Bf16 => self
                .1
                .chunks(2)
                .map(|b| from_bf16(u16::from_ne_bytes(b.try_into().unwrap())))
                .collect(),
        }
    }
}

fn in_storage(dtype: Dtype, values: Vec<f32>) -> Vec<f32> {
    Stored::new(dtype, &values).values()
}

impl World {
    fn new(shape: Shape, len: usize, seed: u64) -> World {
        let width = shape.kv_heads * shape.dim;
        let make = |heads: usize, salt: u64| {
            in_storage(shape.dtype, noise(len * heads * shape.dim, seed ^ salt))
        };
        let q = make(shape.kv_heads * shape.group, 1);
        let k = make(shape.kv_heads, 2);
        let v = make(shape.kv_heads, 3);
        assert_eq!(k.len(), len * width);
        World {
            shape,
            q,
            k,
            v,
            len,
        }
    }

    fn scale(&self) -> f32 {
        // Larger than 1 / sqrt(d): the softmax has clear winners, so wrong masks cannot hide.
        3.0 / (self.shape.dim as f32).sqrt()
    }

    fn heads(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }

    /// One for each query head, or none.
    fn sinks(&self) -> Vec<f32> {
        if self.shape.sinks == 0.0 {
            return Vec::new();
        }
        let drawn = noise(self.heads(), 4);
        drawn.iter().map(|x| x * self.shape.sinks).collect()
    }

    /// K and V as the pages keep them.
    fn kept(&self) -> [Vec<f64>; 2] {
        let Some(scales) = self.shape.scales else {
            return [&self.k, &self.v].map(|x| x.iter().map(|&x| f64::from(x)).collect());
        };
        [(&self.k, scales.key), (&self.v, scales.value)].map(|(numbers, scale)| {
            let codes = numbers.iter().map(|x| encode(x / scale));
            codes
                .map(|code| f64::from(decode(code)) * f64::from(scale))
                .collect()
        })
    }

    /// [len, heads * dim]
    fn reference(&self) -> Vec<f64> {
        let [keys, values] = self.kept();
        let h = self.heads();
        let d = self.shape.dim;
        let mut out = vec![0.0; self.len * h * d];
        for t in 0..self.len {
            let first = match (self.shape.window, self.shape.chunk) {
                (0, 0) => 0,
                (0, chunk) => t / chunk * chunk,
                (window, _) => (t + 1).saturating_sub(window),
            };
            for head in 0..h {
                let kv_head = head / self.shape.group;
                let at = |p: usize| (p * self.shape.kv_heads + kv_head) * d;
                let q = &self.q[(t * h + head) * d..][..d];
                let dot = |p: usize| -> f64 {
                    q.iter()
                        .zip(&keys[at(p)..][..d])
                        .map(|(a, b)| f64::from(*a) * b)
                        .sum()
                };
                let cap = f64::from(self.shape.soft_cap);
                let scores: Vec<f64> = (first..=t)
                    .map(|p| dot(p) * f64::from(self.scale()))
                    .map(|s| if cap > 0.0 { cap * (s / cap).tanh() } else { s })
                    .collect();
                let sinks = self.sinks();
                let sink = sinks.get(head).map_or(f64::NEG_INFINITY, |&s| f64::from(s));
                let top = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total = weights.iter().sum::<f64>() + (sink - top).exp();
                for (p, w) in (first..=t).zip(&weights) {
                    for i in 0..d {
                        out[(t * h + head) * d + i] += w / total * values[at(p) + i];
                    }
                }
            }
        }
        out
    }

    /// Compute the sequence in chunks of the given sizes, each call together with rows of other
    /// sequences.
    fn run(&self, isa: Isa, chunks: &[usize], company: &[&World]) -> Vec<u8> {
        let s = &self.shape;
        let everyone: Vec<&World> = std::iter::once(self)
            .chain(company.iter().copied())
            .collect();
        let pages_each = self
            .len
            .max(company.iter().map(|w| w.len).max().unwrap_or(0))
            .div_ceil(s.page_size);
        let count = everyone.len() * pages_each;
        let page_stride = LAYERS * 2 * s.page_size * s.kv_heads * s.dim;
        let mut pages = LayerPages {
            dtype: s.dtype,
            scales: s.scales,
            base: std::ptr::null_mut(),
            page_stride,
            page_size: s.page_size,
            kv_heads: s.kv_heads,
            head_dim: s.dim,
        };
        // Unwritten slots hold NaN, so that reading one shows.
        let unwritten = vec![f32::NAN; count * page_stride];
        let mut memory = match s.scales {
            Some(_) => unwritten.into_iter().map(encode).collect(),
            None => Stored::new(s.dtype, &unwritten).1,
        };
        let layer_offset = page_stride / LAYERS * pages.element_bytes();
        // SAFETY: the last layer of the first page.
        pages.base = unsafe { memory.as_mut_ptr().add(layer_offset) };
        // Scattered: sequence w's page i, in descending order and interleaved.
        let page_of = |w: usize, i: usize| ((pages_each - 1 - i) * everyone.len() + w) as i32;
        let sinks = self.sinks();
        let mut out = Vec::new();
        let mut done = 0;
        for &n in chunks {
            let mut q = vec![];
            let mut k = vec![];
            let mut v = vec![];
            let mut slots = vec![];
            let mut qo = vec![0];
            let mut kv_lens = vec![];
            let mut indptr = vec![0];
            let mut indices = vec![];
            for (w, world) in everyone.iter().enumerate().rev() {
                // Company is always computed whole, after this sequence's chunk or before, as its
                // place falls.
                let (from, to) = if w == 0 {
                    (done, done + n)
                } else {
                    (0, world.len)
                };
                let qw = world.heads() * s.dim;
                let kw = s.kv_heads * s.dim;
                q.extend(&world.q[from * qw..to * qw]);
                k.extend(&world.k[from * kw..to * kw]);
                v.extend(&world.v[from * kw..to * kw]);
                slots.extend((from..to).map(|p| {
                    i64::from(page_of(w, p / s.page_size)) * s.page_size as i64
                        + (p % s.page_size) as i64
                }));
                qo.push(slots.len() as i32);
                kv_lens.push(to as i32);
                indices.extend((0..to.div_ceil(s.page_size)).map(|i| page_of(w, i)));
                indptr.push(indices.len() as i32);
            }
            let q = Stored::new(s.dtype, &q);
            let k = Stored::new(s.dtype, &k);
            let v = Stored::new(s.dtype, &v);
            let width = self.heads() * s.dim;
            let mut result = vec![0_u8; slots.len() * width * s.dtype.bytes()];
            let stride = s.kv_heads * s.dim;
            let rows = SequenceRows {
                qo_indptr: &qo,
                kv_lens: &kv_lens,
                page_indptr: &indptr,
                page_indices: &indices,
                slot_mapping: &slots,
            };
            rows.check(count, s.page_size).unwrap();
            let call = PagedAttention {
                pages,
                q: q.1.as_ptr(),
                q_stride: width,
                out: result.as_mut_ptr(),
                heads: self.heads(),
                rows,
                scale: self.scale(),
                window: s.window,
                chunk: s.chunk,
                soft_cap: s.soft_cap,
                sinks: if sinks.is_empty() {
                    std::ptr::null()
                } else {
                    sinks.as_ptr()
                },
            };
            // SAFETY: all shapes are built above.
            unsafe {
                let new = |x: &Stored| NewTokens {
                    data: x.1.as_ptr(),
                    stride,
                };
                kv_append(&pages, new(&k), new(&v), &slots);
                paged_attention_on(isa, &call);
            }
            // This sequence is the last row.
            out.extend(&result[result.len() - n * width * s.dtype.bytes()..]);
            done += n;
        }
        assert_eq!(done, self.len, "chunks cover the sequence");
        out
    }

    fn check(&self, isa: Isa) {
        let got = Stored(self.shape.dtype, self.run(isa, &[self.len], &[])).values();
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

fn shape(
    dtype: Dtype,
    kv_heads: usize,
    group: usize,
    dim: usize,
    page_size: usize,
    window: usize,
) -> Shape {
    Shape {
        dtype,
        kv_heads,
        group,
        dim,
        page_size,
        window,
        chunk: 0,
        soft_cap: 0.0,
        sinks: 0.0,
        scales: None,
    }
}

fn capped(soft_cap: f32, shape: Shape) -> Shape {
    Shape { soft_cap, ..shape }
}

fn coded(key: f32, value: f32, shape: Shape) -> Shape {
    let scales = Some(KvScales { key, value });
    Shape { scales, ..shape }
}

#[test]
fn pages_of_codes_equal_the_reference_of_what_they_hold() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (i, dim) in [8, 20, 32, 64, 80, 256].into_iter().enumerate() {
                let plain = shape(dtype, 2, 3, dim, [1, 4, 16][i % 3], [0, 70][i % 2]);
                let coded = coded(0.01, [0.004, 1.5][i % 2], plain);
                World::new(capped([0.0, 0.7][i % 2], coded), 131, i as u64).check(isa);
            }
        }
    }
}

#[test]
fn soft_cap_bends_scores_before_the_mask() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (i, window) in [0, 5, 64].into_iter().enumerate() {
                let plain = shape(dtype, 2, 3, 32, 16, window);
                World::new(capped(0.7, plain), 150, i as u64).check(isa);
            }
        }
    }
}

#[test]
fn sinks_take_their_share_of_the_probability() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            // 40: the sink is far above or below every score.
            for (i, (sinks, window)) in [(2.0, 0), (2.0, 5), (40.0, 64)].into_iter().enumerate() {
                let plain = shape(dtype, 2, 3, 32, 16, window);
                World::new(Shape { sinks, ..plain }, 150, i as u64).check(isa);
            }
        }
    }
}

#[test]
fn tokens_see_their_own_chunk_alone() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for chunk in [1, 7, 64, 100, 150] {
                let plain = shape(dtype, 2, 3, 32, 16, 0);
                World::new(Shape { chunk, ..plain }, 150, chunk as u64).check(isa);
            }
        }
    }
}

#[test]
fn equals_the_reference_for_every_head_size_and_level() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for dim in [8, 16, 20, 32, 64, 80, 96, 128, 256] {
                World::new(shape(dtype, 2, 3, dim, 16, 0), 70, dim as u64).check(isa);
            }
        }
    }
}

#[test]
fn equals_the_reference_for_every_group_page_size_and_window() {
    for isa in Isa::available() {
        for (i, (page_size, window)) in [
            (1, 0),
            (4, 0),
            (16, 5),
            (64, 0),
            (16, 64),
            (128, 100),
            (4, 1),
        ]
        .iter()
        .enumerate()
        {
            for group in [1, 2, 4, 5, 7, 8] {
                let dtype = if (i + group) % 2 == 0 {
                    Dtype::F32
                } else {
                    Dtype::Bf16
                };
                World::new(
                    shape(dtype, 1 + group % 2, group, 32, *page_size, *window),
                    131,
                    i as u64,
                )
                .check(isa);
            }
        }
    }
}

#[test]
fn lengths_around_block_and_page_ends() {
    for isa in Isa::available() {
        for len in [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200] {
            World::new(shape(Dtype::F32, 1, 2, 16, 16, 0), len, len as u64).check(isa);
            World::new(shape(Dtype::Bf16, 1, 2, 16, 16, 0), len, len as u64).check(isa);
        }
    }
}

#[test]
fn levels_with_fma_agree_bit_for_bit() {
    let levels: Vec<Isa> = Isa::available()
        .into_iter()
        .filter(|&isa| isa >= Isa::Avx2)
        .collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for dim in [16, 64, 80] {
            let world = World::new(shape(dtype, 2, 3, dim, 16, 0), 150, 9);
            let results: Vec<Vec<u8>> = levels
                .iter()
                .map(|&isa| world.run(isa, &[150], &[]))
                .collect();
            assert!(
                results.windows(2).all(|w| w[0] == w[1]),
                "{dtype:?} dim {dim}"
            );
        }
    }
}

/// Ways to cut `len` tokens: whole, all decode, and a mixture.
pub(crate) fn cuts(len: usize) -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(1..=len.min(70), 1..=len).prop_map(move |sizes| {
        let mut left = len;
        let mut cut = Vec::new();
        for n in sizes {
            let n = n.min(left);
            if n > 0 {
                cut.push(n);
            }
            left -= n;
        }
        cut.extend((left > 0).then_some(left));
        cut
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn chunks_and_company_do_not_change_a_bit(
        (len, cut) in (1_usize..180).prop_flat_map(|len| (Just(len), cuts(len))),
        other in 1_usize..100,
        bf16: bool,
        group in 1_usize..=8,
        page_log in 0_u32..7,
        window in prop_oneof![Just(0_usize), 1_usize..150],
        chunk in prop_oneof![Just(0_usize), 1_usize..150],
        soft_cap in prop_oneof![Just(0.0_f32), Just(1.5)],
        sinks in prop_oneof![Just(0.0_f32), Just(3.0)],
        has_codes: bool,
        seed: u64,
    ) {
        let dtype = if bf16 { Dtype::Bf16 } else { Dtype::F32 };
        let plain = shape(dtype, 2, group, 16, 1 << page_log, window);
        let chunk = if window == 0 { chunk } else { 0 };
        let plain = Shape { chunk, sinks, ..capped(soft_cap, plain) };
        let s = if has_codes { coded(0.01, 0.3, plain) } else { plain };
        let world = World::new(s.clone(), len, seed);
        let company = World::new(s, other, seed ^ 77);
        let isa = Isa::best();
        let whole = world.run(isa, &[len], &[]);
        prop_assert_eq!(&world.run(isa, &cut, &[&company]), &whole, "cut {:?}", cut);
        prop_assert_eq!(&world.run(isa, &vec![1; len], &[]), &whole, "token by token");
    }
}

#[test]
fn number_of_threads_does_not_change_a_bit() {
    let world = World::new(shape(Dtype::F32, 2, 7, 64, 16, 0), 300, 5);
    let alone = world.run(Isa::best(), &[300], &[]);
    crate::pool::tests::with_threads(3, || {
        for _ in 0..5 {
            assert_eq!(world.run(Isa::best(), &[300], &[]), alone);
        }
    });
}
