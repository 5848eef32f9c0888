//! The packed product against a naive f64 one, and independence of rows, threads and levels.

use super::*;
use crate::attention::tests::{Stored, noise};

struct Case {
    shape: WeightShape,
    rows: usize,
    x: Stored,
    w: Stored,
    bias: Option<Stored>,
}

impl Case {
    fn new(dtype: Dtype, rows: usize, inputs: usize, outputs: usize, with_bias: bool) -> Case {
        let stored = |n: usize, seed: u64| Stored::new(dtype, &noise(n, seed));
        Case {
            shape: WeightShape {
                dtype,
                outputs,
                inputs,
            },
            rows,
            x: stored(rows * inputs, 1),
            w: stored(outputs * inputs, 2),
            bias: with_bias.then(|| stored(outputs, 3)),
        }
    }

    fn packed(&self) -> PackedWeight {
        // SAFETY: `w` has the shape.
        unsafe { PackedWeight::pack(self.shape, self.w.1.as_ptr()) }
    }

    /// Rows [from, to) at level `isa`.
    fn run(&self, isa: Isa, weight: &PackedWeight, from: usize, to: usize) -> Vec<u8> {
        let size = self.shape.dtype.bytes();
        let mut y = vec![0xff; (to - from) * self.shape.outputs * size];
        let call = LinearProduct {
            weight,
            x: self.x.1[from * self.shape.inputs * size..].as_ptr(),
            x_stride: self.shape.inputs,
            rows: to - from,
            bias: self
                .bias
                .as_ref()
                .map_or(std::ptr::null(), |b| b.1.as_ptr()),
            y: y.as_mut_ptr(),
        };
        // SAFETY: sizes as described.
        unsafe { linear_on(isa, &call) };
        y
    }

    fn check(&self, isa: Isa) {
        let x = self.x.values();
        let w = self.w.values();
        let bias = self.bias.as_ref().map(Stored::values);
        let k = self.shape.inputs;
        let n = self.shape.outputs;
        let got = Stored(
            self.shape.dtype,
            self.run(isa, &self.packed(), 0, self.rows),
        )
        .values();
        let tolerance = if self.shape.dtype == Dtype::F32 {
            2e-6
        } else {
            8e-3
        };
        for m in 0..self.rows {
            for j in 0..n {
                let products = || x[m * k..][..k].iter().zip(&w[j * k..][..k]);
                let sum: f64 = products().map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                let want = sum + bias.as_ref().map_or(0.0, |b| f64::from(b[j]));
                let got = f64::from(got[m * n + j]);
                let room = tolerance * (1.0 + (k as f64).sqrt());
                assert!(
                    (got - want).abs() <= room,
                    "{isa:?} {:?} [{m}, {j}]: {got} not {want}",
                    self.shape
                );
            }
        }
    }
}

#[test]
fn equals_the_reference_at_odd_sizes() {
    for isa in Isa::available() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            for (rows, inputs, outputs) in [
                (1, 1, 1),
                (1, 64, 64),
                (2, 33, 65),
                (5, 128, 63),
                (7, 255, 200),
                (13, 513, 130),
                (200, 300, 70),
            ] {
                Case::new(dtype, rows, inputs, outputs, rows % 2 == 1).check(isa);
            }
        }
    }
}

#[test]
fn row_has_the_same_bits_alone_and_in_any_batch() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let case = Case::new(dtype, 230, 700, 333, true);
        let packed = case.packed();
        let row_bytes = case.shape.outputs * dtype.bytes();
        let all = case.run(Isa::best(), &packed, 0, case.rows);
        for (from, to) in [(0, 1), (17, 18), (3, 9), (100, 131), (29, 230)] {
            let part = case.run(Isa::best(), &packed, from, to);
            assert!(
                part == all[from * row_bytes..to * row_bytes],
                "{dtype:?} rows {from}..{to}"
            );
        }
    }
}

#[test]
fn levels_with_fma_and_thread_counts_agree_bit_for_bit() {
    let levels: Vec<Isa> = Isa::available()
        .into_iter()
        .filter(|&isa| isa >= Isa::Avx2)
        .collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let case = Case::new(dtype, 40, 513, 700, true);
        let packed = case.packed();
        let results: Vec<Vec<u8>> = levels
            .iter()
            .map(|&isa| case.run(isa, &packed, 0, 40))
            .collect();
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{dtype:?}");
        crate::pool::tests::with_threads(3, || {
            assert_eq!(case.run(levels[0], &case.packed(), 0, 40), results[0]);
        });
    }
}

#[test]
fn unpacked_rows_are_the_original_ones() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let case = Case::new(dtype, 1, 77, 130, false);
        let row_bytes = 77 * dtype.bytes();
        let mut out = vec![0; 3 * row_bytes];
        // SAFETY: ids below 130, room for three rows.
        unsafe { case.packed().rows(&[129, 0, 64], out.as_mut_ptr()) };
        for (got, id) in out.chunks(row_bytes).zip([129, 0, 64]) {
            assert_eq!(
                got,
                &case.w.1[id * row_bytes..][..row_bytes],
                "{dtype:?} row {id}"
            );
        }
    }
}
