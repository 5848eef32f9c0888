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
        self.multiply(isa, Weight::Packed(weight), from, to)
    }

    fn multiply(&self, isa: Isa, weight: Weight<'_>, from: usize, to: usize) -> Vec<u8> {
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
            y_stride: self.shape.outputs,
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

/// A quantized matrix, and its numbers by the formula, element by element.
pub(crate) struct Coded {
    code_type: CodeType,
    groups: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
    zeros: Option<Vec<f32>>,
    group_of: Vec<u32>,
}

const ZERO: f32 = 8.0;

fn fp8_value(code: u8) -> f32 {
    let exponent = i32::from(code >> 3 & 15);
    let mantissa = f32::from(code & 7);
    let magnitude = if exponent == 0 {
        mantissa / 8.0 * 2.0_f32.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7)
    };
    if code >> 7 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

fn fp4_value(code: u8) -> f32 {
    let exponent = i32::from(code >> 1 & 3);
    let mantissa = f32::from(code & 1);
    let magnitude = if exponent == 0 {
        mantissa / 2.0
    } else {
        (1.0 + mantissa / 2.0) * 2.0_f32.powi(exponent - 1)
    };
    if code >> 3 == 1 {
        -magnitude
    } else {
        magnitude
    }
}

fn is_float(code_type: CodeType) -> bool {
    matches!(code_type, CodeType::Fp8 | CodeType::Fp4)
}

impl Coded {
    pub(crate) fn new(
        code_type: CodeType,
        shape: WeightShape,
        groups: usize,
        has_zeros: bool,
    ) -> Coded {
        let n = shape.outputs * shape.inputs;
        let places = shape.outputs * groups;
        let top = match code_type {
            CodeType::Int4 | CodeType::Fp4 => 16,
            CodeType::Int8 | CodeType::Fp8 => 256,
        };
        let codes = (0..n).map(|i| (i * 2_654_435_761 % 65_537 % top) as u8);
        // Codes 0x7f and 0xff of FP8 are no numbers.
        let codes = codes.map(|code| match code_type {
            CodeType::Fp8 if code & 0x7f == 0x7f => 0x7e,
            _ => code,
        });
        Coded {
            code_type,
            groups,
            codes: codes.collect(),
            scales: match code_type {
                // From 2^-127, below the normal numbers, to 2^0.
                CodeType::Fp4 => (0..places)
                    .map(|i| {
                        f32::from_bits(0x0040_0000 << (i % 2)) * 2.0_f32.powi((i % 127) as i32)
                    })
                    .collect(),
                _ => noise(places, 7).iter().map(|x| x * 0.01).collect(),
            },
            zeros: has_zeros.then(|| (0..places).map(|i| (i * 7 % top) as f32).collect()),
            // Neither in order nor evenly.
            group_of: (0..shape.inputs)
                .map(|k| (k * k % 97 % groups) as u32)
                .collect(),
        }
    }

    /// The same, with groups of 16 columns or more side by side: sums of runs are scaled.
    pub(crate) fn with_runs(mut self) -> Coded {
        let columns = self.group_of.len().div_ceil(self.groups);
        let size = columns.next_multiple_of(16);
        for (column, group) in self.group_of.iter_mut().enumerate() {
            *group = (column / size) as u32;
        }
        self
    }

    pub(crate) fn pack(&self, shape: WeightShape) -> QuantizedWeight {
        let zeros = self.zeros.as_ref();
        let matrix = CodedMatrix {
            code_type: self.code_type,
            codes: self.codes.as_ptr(),
            groups: self.groups,
            scales: self.scales.as_ptr(),
            zeros: zeros.map_or(std::ptr::null(), |zeros| zeros.as_ptr()),
            zero: self.zero(),
            group_of: self.group_of.as_ptr(),
        };
        // SAFETY: sizes as described.
        unsafe { QuantizedWeight::pack(shape, &matrix) }
    }

    fn zero(&self) -> f32 {
        if is_float(self.code_type) { 0.0 } else { ZERO }
    }

    /// Place of the scale of a number.
    fn place(&self, shape: WeightShape, row: usize, column: usize) -> usize {
        debug_assert!(row < shape.outputs && column < shape.inputs);
        row * self.groups + self.group_of[column] as usize
    }

    /// A code less its zero.
    fn difference(&self, shape: WeightShape, row: usize, column: usize) -> f32 {
        let code = self.codes[row * shape.inputs + column];
        let number = match self.code_type {
            CodeType::Fp8 => fp8_value(code),
            CodeType::Fp4 => fp4_value(code),
            _ => f32::from(code),
        };
        let zeros = self.zeros.as_ref();
        number - zeros.map_or(self.zero(), |zeros| zeros[self.place(shape, row, column)])
    }

    fn numbers(&self, shape: WeightShape) -> Stored {
        let values: Vec<f32> = (0..shape.outputs * shape.inputs)
            .map(|i| {
                let row = i / shape.inputs;
                let column = i % shape.inputs;
                let scale = self.scales[self.place(shape, row, column)];
                self.difference(shape, row, column) * scale
            })
            .collect();
        Stored::new(shape.dtype, &values)
    }

    /// A sum of runs as the module defines it, one operation after the other.
    fn sum_of_runs(&self, shape: WeightShape, row: usize, x: &[f32]) -> f32 {
        let pair = if shape.dtype == Dtype::Bf16 { 2 } else { 1 };
        let mut total = 0.0_f32;
        let mut start = 0;
        while start < shape.inputs {
            let tile_end = (start / (64 * pair) + 1) * 64 * pair;
            let end = (start..shape.inputs.min(tile_end))
                .find(|&column| self.group_of[column] != self.group_of[start])
                .unwrap_or(shape.inputs.min(tile_end));
            let mut sum = 0.0_f32;
            for unit in (start..end).step_by(pair) {
                for column in (unit..end.min(unit + pair)).rev() {
                    sum = x[column].mul_add(self.difference(shape, row, column), sum);
                }
            }
            total = self.scales[self.place(shape, row, start)].mul_add(sum, total);
            start = end;
        }
        total
    }

    /// The sum in f64, and the sum of the products' magnitudes.
    fn exact_sum(&self, shape: WeightShape, row: usize, x: &[f32]) -> (f64, f64) {
        let products = (0..shape.inputs).map(|column| {
            let scale = f64::from(self.scales[self.place(shape, row, column)]);
            f64::from(x[column]) * f64::from(self.difference(shape, row, column)) * scale
        });
        products.fold((0.0, 0.0), |(sum, size), product| {
            (sum + product, size + product.abs())
        })
    }
}

pub(crate) const CODE_TYPES: [CodeType; 4] =
    [CodeType::Int4, CodeType::Int8, CodeType::Fp8, CodeType::Fp4];

#[test]
fn weights_with_reordered_groups_multiply_like_their_numbers_to_the_bit() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (rows, inputs, outputs) in [(1, 34, 1), (3, 33, 65), (2, 514, 64), (60, 777, 130)] {
            let mut case = Case::new(dtype, rows, inputs, outputs, rows > 1);
            for code_type in CODE_TYPES {
                for (groups, has_zeros) in [(3, false), (5, !is_float(code_type))] {
                    let coded = Coded::new(code_type, case.shape, groups, has_zeros);
                    case.w = coded.numbers(case.shape);
                    let packed = case.packed();
                    let quantized = coded.pack(case.shape);
                    for isa in Isa::available() {
                        let got = case.multiply(isa, Weight::Quantized(&quantized), 0, rows);
                        assert!(
                            got == case.run(isa, &packed, 0, rows),
                            "{isa:?} {code_type:?} {:?}, {groups} groups",
                            case.shape
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_runs_are_scaled_in_the_order_of_the_definition_to_the_bit() {
    let levels = Isa::available();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        for (rows, inputs, outputs) in [(1, 1, 1), (3, 33, 65), (2, 514, 64), (14, 777, 130)] {
            let case = Case::new(dtype, rows, inputs, outputs, false);
            let x = case.x.values();
            for code_type in CODE_TYPES {
                for (groups, has_zeros) in [(1, false), (5, !is_float(code_type))] {
                    let coded = Coded::new(code_type, case.shape, groups, has_zeros).with_runs();
                    let sums = (0..rows * outputs).map(|i| {
                        let x = &x[i / outputs * inputs..][..inputs];
                        coded.sum_of_runs(case.shape, i % outputs, x)
                    });
                    let want = Stored::new(dtype, &sums.collect::<Vec<f32>>());
                    let packed = coded.pack(case.shape);
                    // Scalar code may round products.
                    for &isa in levels.iter().filter(|&&isa| isa >= Isa::Avx2) {
                        let got = case.multiply(isa, Weight::Quantized(&packed), 0, rows);
                        assert!(
                            got == want.1,
                            "{isa:?} {code_type:?} {:?}, {groups} groups",
                            case.shape
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_runs_are_within_their_bound_of_the_exact_ones() {
    // A chain of 128 columns, one of their sums, and on the scalar level a rounding of each
    // product.
    const CHAIN: f64 = 2.0 * (128.0 + 16.0);
    for (dtype, of_result) in [
        (Dtype::F32, 2.0_f64.powi(-24)),
        (Dtype::Bf16, 2.0_f64.powi(-8)),
    ] {
        let case = Case::new(dtype, 13, 1000, 70, false);
        let x = case.x.values();
        for code_type in CODE_TYPES {
            let coded = Coded::new(code_type, case.shape, 8, !is_float(code_type)).with_runs();
            let packed = coded.pack(case.shape);
            for isa in Isa::available() {
                let got = case.multiply(isa, Weight::Quantized(&packed), 0, case.rows);
                for (i, got) in Stored(dtype, got).values().into_iter().enumerate() {
                    let x = &x[i / 70 * 1000..][..1000];
                    let (want, size) = coded.exact_sum(case.shape, i % 70, x);
                    let room = size * CHAIN * 2.0_f64.powi(-24) + want.abs() * of_result;
                    assert!(
                        (f64::from(got) - want).abs() <= room,
                        "{isa:?} {dtype:?} {code_type:?} [{i}]: {got} not {want}"
                    );
                }
            }
        }
    }
}

#[test]
fn row_of_a_quantized_product_has_the_same_bits_alone_and_in_any_batch() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let case = Case::new(dtype, 230, 700, 333, true);
        let row_bytes = case.shape.outputs * dtype.bytes();
        for code_type in CODE_TYPES {
            let reordered = Coded::new(code_type, case.shape, 7, false);
            let with_runs = Coded::new(code_type, case.shape, 7, !is_float(code_type)).with_runs();
            for quantized in [reordered.pack(case.shape), with_runs.pack(case.shape)] {
                let run =
                    |isa, from, to| case.multiply(isa, Weight::Quantized(&quantized), from, to);
                for isa in Isa::available() {
                    // Counts of rows that are one pass over the codes, two, and tiles.
                    let all = run(isa, 0, 230);
                    let few = (1..=13).map(|count| (20, 20 + count));
                    for (from, to) in few.chain([(100, 131), (29, 230)]) {
                        assert!(
                            run(isa, from, to) == all[from * row_bytes..to * row_bytes],
                            "{isa:?} {dtype:?} {code_type:?} rows {from}..{to}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn quantized_rows_are_their_numbers() {
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let shape = WeightShape {
            dtype,
            outputs: 130,
            inputs: 77,
        };
        for code_type in CODE_TYPES {
            let coded = Coded::new(code_type, shape, 3, false);
            let row_bytes = 77 * dtype.bytes();
            let mut out = vec![0; 3 * row_bytes];
            // SAFETY: ids below 130, room for three rows.
            unsafe { coded.pack(shape).rows(&[129, 0, 64], out.as_mut_ptr()) };
            let numbers = coded.numbers(shape);
            for (got, id) in out.chunks(row_bytes).zip([129, 0, 64]) {
                let want = &numbers.1[id * row_bytes..][..row_bytes];
                assert_eq!(got, want, "{dtype:?} {code_type:?} row {id}");
            }
        }
    }
}

#[test]
fn quantized_weights_take_the_memory_of_their_codes() {
    let shape = WeightShape {
        dtype: Dtype::Bf16,
        outputs: 128,
        inputs: 256,
    };
    let size = |code_type| Coded::new(code_type, shape, 2, false).pack(shape).bytes();
    let scales = 128 * 2 * 4 + 256 * 4;
    assert_eq!(size(CodeType::Int4), 128 * 256 / 2 + scales);
    assert_eq!(size(CodeType::Int8), 128 * 256 + scales);
    assert_eq!(size(CodeType::Fp4), 128 * 256 / 2 + 128 * 2 * 2 + 256 * 4);
}

#[test]
fn heads_have_the_bits_of_products_of_their_own() {
    let heads = 3;
    let tokens = 200;
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let cases: Vec<Case> = (0..heads)
            .map(|head| {
                let mut case = Case::new(dtype, tokens, 24, 70, false);
                case.w = Stored::new(dtype, &noise(24 * 70, head));
                case.x = Stored::new(dtype, &noise(tokens * 24, 7 + head));
                case
            })
            .collect();
        let weights: Vec<PackedWeight> = cases.iter().map(Case::packed).collect();
        let size = dtype.bytes();
        // Vectors of a token stand side by side, with a gap behind each.
        let heads = heads as usize;
        let x_token = heads * 30;
        let y_token = heads * 72;
        let mut x = vec![0xff_u8; tokens * x_token * size];
        let mut y = vec![0xff_u8; tokens * y_token * size];
        for (head, case) in cases.iter().enumerate() {
            for t in 0..tokens {
                let at = (t * x_token + head * 30) * size;
                x[at..at + 24 * size].copy_from_slice(&case.x.1[t * 24 * size..][..24 * size]);
            }
        }
        let products = HeadProducts {
            weights: &weights,
            tokens,
            x: x.as_ptr(),
            x_token_stride: x_token,
            x_head_stride: 30,
            y: y.as_mut_ptr(),
            y_token_stride: y_token,
            y_head_stride: 72,
        };
        crate::pool::tests::with_threads(3, || {
            // SAFETY: sizes as described.
            unsafe { multiply_heads_on(Isa::best(), &products) };
        });
        for (head, case) in cases.iter().enumerate() {
            let want = case.run(Isa::best(), &weights[head], 0, tokens);
            for t in 0..tokens {
                let at = (t * y_token + head * 72) * size;
                let vector = &y[at..at + 70 * size];
                assert!(
                    vector == &want[t * 70 * size..][..70 * size],
                    "{dtype:?} token {t} head {head}"
                );
                assert!(
                    y[at + 70 * size..at + 72 * size].iter().all(|&b| b == 0xff),
                    "what lies between the heads was written"
                );
            }
        }
    }
}

#[test]
fn panels_are_cut_into_even_shares_for_all_threads() {
    for ((panels, row_cuts, threads), wanted) in [
        ((12, 1, 2), 4),
        ((15, 1, 2), 4),
        ((20, 1, 2), 6),
        ((20, 1, 1), 5),
        ((12, 3, 2), 3),
        ((16, 1, 64), 16),
        ((1, 1, 2), 1),
        ((0, 1, 2), 0),
    ] {
        let cuts = cut_panels(panels, row_cuts, threads);
        assert_eq!(cuts, wanted, "{panels} panels, {row_cuts}, {threads}");
        let ends: Vec<usize> = (0..=cuts).map(|cut| cut * panels / cuts.max(1)).collect();
        assert_eq!(ends.last(), Some(&panels));
        let shares = ends.windows(2).map(|pair| pair[1] - pair[0]);
        assert!(
            shares
                .clone()
                .all(|share| (1..=ITEM_PANELS).contains(&share))
        );
        assert!(shares.clone().max() <= shares.min().map(|least| least + 1));
    }
}
