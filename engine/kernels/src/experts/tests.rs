//! A step against single products in order, and independence of rows, threads, rounds and levels.

use std::collections::BTreeSet;

use super::*;
use crate::attention::tests::{Stored, noise};
use crate::elementwise::{GatedProduct, multiply_gated_on};
use crate::linear::tests::{CODE_TYPES, Coded};
use crate::linear::{CodeType, LinearProduct, WeightShape, linear_on};

struct Case {
    experts: ExpertWeights,
    first_expert: usize,
    slots: usize,
    tokens: usize,
    x: Stored,
    chosen: Vec<i64>,
    weights: Vec<f32>,
}

/// Plain experts; None: packed matrices.
fn make_experts(
    dtype: Dtype,
    experts: usize,
    sizes: (usize, usize),
    code_type: Option<CodeType>,
) -> ExpertWeights {
    make_formed(dtype, experts, sizes, code_type, ExpertForm::plain())
}

fn make_formed(
    dtype: Dtype,
    experts: usize,
    (hidden, inner): (usize, usize),
    code_type: Option<CodeType>,
    form: ExpertForm,
) -> ExpertWeights {
    let make = |outputs, inputs, seed| {
        let shape = WeightShape {
            dtype,
            outputs,
            inputs,
        };
        if let Some(code_type) = code_type {
            let coded = Coded::new(code_type, shape, 3, code_type == CodeType::Int4);
            let coded = if seed % 2 == 0 {
                coded
            } else {
                coded.with_runs()
            };
            return ExpertMatrix::Quantized(Arc::new(coded.pack(shape)));
        }
        let weight = Stored::new(dtype, &noise(outputs * inputs, seed));
        // SAFETY: the matrix has the shape.
        ExpertMatrix::Packed(Arc::new(unsafe {
            PackedWeight::pack(shape, weight.1.as_ptr())
        }))
    };
    let seeds = 0..experts as u64;
    let gate_up = seeds.clone().map(|e| make(2 * inner, hidden, 10 + e));
    let down = seeds.map(|e| make(hidden, inner, 50 + e));
    ExpertWeights::new(gate_up.collect(), down.collect(), form).expect("shapes agree")
}

impl Case {
    /// Tokens choose among `num_experts`, of which the held ones begin at 1.
    fn new(experts: ExpertWeights, num_experts: usize, tokens: usize, slots: usize) -> Case {
        let dtype = experts.dtype;
        let chosen = (0..tokens * slots).map(|choice| {
            let token = choice / slots;
            let slot = choice % slots;
            ((token * token + slot * 5 + token) % num_experts) as i64
        });
        Case {
            first_expert: 1,
            slots,
            tokens,
            x: Stored::new(dtype, &noise(tokens * experts.hidden, 3)),
            chosen: chosen.collect(),
            weights: noise(tokens * slots, 4),
            experts,
        }
    }

    fn row_bytes(&self) -> usize {
        self.experts.hidden * self.experts.dtype.bytes()
    }

    /// Tokens [from, to) at level `isa`, and the bytes of weights that were read.
    fn run(&self, isa: Isa, from: usize, to: usize) -> (Vec<u8>, u64) {
        let mut y = vec![0xff; (to - from) * self.row_bytes()];
        let choices = from * self.slots..to * self.slots;
        let step = ExpertStep {
            experts: &self.experts,
            first_expert: self.first_expert,
            slots: self.slots,
            chosen: &self.chosen[choices.clone()],
            weights: &self.weights[choices],
            x: self.x.1[from * self.row_bytes()..].as_ptr(),
            x_stride: self.experts.hidden,
            y: y.as_mut_ptr(),
        };
        // SAFETY: sizes as described.
        let visited = unsafe { pass_experts_on(isa, &step) };
        (y, visited)
    }

    /// One choice after the other, by products of their own.
    fn expected(&self, isa: Isa) -> Vec<u8> {
        let experts = &self.experts;
        let mut rows = Vec::new();
        for token in 0..self.tokens {
            let mut total = vec![0.0_f32; experts.hidden];
            for choice in token * self.slots..(token + 1) * self.slots {
                let number = self.chosen[choice] as usize;
                let held = self.first_expert..self.first_expert + experts.down.len();
                if !held.contains(&number) {
                    continue;
                }
                let number = number - self.first_expert;
                let mut x = self.x.1[token * self.row_bytes()..][..self.row_bytes()].to_vec();
                let mut factor = self.weights[choice];
                if experts.form.weighs_inputs {
                    let weight = Stored::new(experts.dtype, &[factor]).values()[0];
                    let values = Stored(experts.dtype, x).values();
                    let weighed: Vec<f32> = values.iter().map(|value| value * weight).collect();
                    x = Stored::new(experts.dtype, &weighed).1;
                    factor = 1.0;
                }
                let result = Stored(experts.dtype, self.pass_one(isa, number, &x)).values();
                for (sum, value) in total.iter_mut().zip(result) {
                    *sum += value * factor;
                }
            }
            rows.extend(total);
        }
        Stored::new(experts.dtype, &rows).1
    }

    fn pass_one(&self, isa: Isa, number: usize, x: &[u8]) -> Vec<u8> {
        let form = &self.experts.form;
        let weight = self.experts.gate_up[number].weight();
        let gate_up = multiply(isa, weight, form.gate_up_biases.get(number), x);
        let size = self.experts.dtype.bytes();
        let mut inner = vec![0; self.experts.inner * size];
        let gated = GatedProduct {
            dtype: self.experts.dtype,
            activation: form.activation,
            gate_up: gate_up.as_ptr(),
            stride: 2 * self.experts.inner,
            rows: 1,
            len: self.experts.inner,
            out: inner.as_mut_ptr(),
        };
        // SAFETY: sizes as described.
        unsafe { multiply_gated_on(isa, &gated) };
        let weight = self.experts.down[number].weight();
        multiply(isa, weight, form.down_biases.get(number), &inner)
    }
}

fn multiply(isa: Isa, weight: Weight<'_>, bias: Option<&Vec<u8>>, x: &[u8]) -> Vec<u8> {
    let shape = weight.shape();
    let mut y = vec![0; shape.outputs * shape.dtype.bytes()];
    let product = LinearProduct {
        weight,
        x: x.as_ptr(),
        x_stride: shape.inputs,
        rows: 1,
        bias: bias.map_or(std::ptr::null(), |bias| bias.as_ptr()),
        y: y.as_mut_ptr(),
        y_stride: shape.outputs,
    };
    // SAFETY: sizes as described.
    unsafe { linear_on(isa, &product) };
    y
}

const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];
/// Hidden and inner sizes: whole panels, and columns of up that begin within one.
const SIZES: [(usize, usize); 4] = [(64, 128), (33, 7), (130, 200), (513, 321)];

#[test]
fn step_has_the_bits_of_single_products_summed_in_order() {
    for isa in Isa::available() {
        for dtype in DTYPES {
            for sizes in SIZES {
                let case = Case::new(make_experts(dtype, 3, sizes, None), 5, 17, 2);
                let (got, _) = case.run(isa, 0, case.tokens);
                assert!(got == case.expected(isa), "{isa:?} {dtype:?} {sizes:?}");
            }
        }
    }
}

#[test]
fn quantized_experts_have_the_bits_of_single_products_too() {
    for dtype in DTYPES {
        for code_type in CODE_TYPES {
            let experts = make_experts(dtype, 3, (130, 72), Some(code_type));
            let case = Case::new(experts, 4, 9, 3);
            let (got, _) = case.run(Isa::best(), 0, case.tokens);
            assert!(got == case.expected(Isa::best()), "{dtype:?} {code_type:?}");
        }
    }
}

/// Forms of gpt-oss and of Llama 4.
fn other_forms(dtype: Dtype, experts: usize, (hidden, inner): (usize, usize)) -> [ExpertForm; 2] {
    let biases = |columns, seed| {
        let of_expert = |e| Stored::new(dtype, &noise(columns, seed + e)).1;
        (0..experts as u64).map(of_expert).collect()
    };
    let clamped = ExpertForm {
        activation: Activation::ClampedSilu {
            gain: 1.702,
            limit: 0.5,
        },
        gate_up_biases: biases(2 * inner, 100),
        down_biases: biases(hidden, 200),
        ..ExpertForm::plain()
    };
    let weighing = ExpertForm {
        weighs_inputs: true,
        ..ExpertForm::plain()
    };
    [clamped, weighing]
}

#[test]
fn other_forms_have_the_bits_of_single_products_in_any_batch() {
    for dtype in DTYPES {
        for sizes in SIZES {
            for form in other_forms(dtype, 3, sizes) {
                let experts = make_formed(dtype, 3, sizes, None, form);
                let case = Case::new(experts, 5, 17, 2);
                for isa in Isa::available() {
                    let (all, _) = case.run(isa, 0, case.tokens);
                    assert!(all == case.expected(isa), "{isa:?} {dtype:?} {sizes:?}");
                    let (part, _) = case.run(isa, 7, 9);
                    let expected = &all[7 * case.row_bytes()..9 * case.row_bytes()];
                    assert!(part == expected, "{isa:?} {dtype:?} {sizes:?}");
                }
            }
        }
    }
}

#[test]
fn biases_of_other_sizes_are_refused() {
    let few = make_experts(Dtype::F32, 2, (16, 8), None);
    let form = ExpertForm {
        down_biases: vec![vec![0; 64], vec![0; 60]],
        ..ExpertForm::plain()
    };
    let error = ExpertWeights::new(few.gate_up, few.down, form).expect_err("60 is not 64");
    let text = error.to_string();
    assert_eq!(
        text,
        "2 biases, one of 60 bytes: 2 of 64 bytes are needed, or none"
    );
}

#[test]
fn token_has_the_same_bits_alone_and_in_any_batch_and_round() {
    for dtype in DTYPES {
        // More choices than a round takes, and more rows of an expert than an item.
        let tokens = MAX_CHOICES / 4 + 300;
        let case = Case::new(make_experts(dtype, 4, (24, 40), None), 5, tokens, 4);
        let (all, _) = case.run(Isa::best(), 0, tokens);
        for (from, to) in [
            (0, 1),
            (7, 8),
            (3, 9),
            (100, 131),
            (29, 900),
            (tokens - 1, tokens),
        ] {
            let (part, _) = case.run(Isa::best(), from, to);
            let expected = &all[from * case.row_bytes()..to * case.row_bytes()];
            assert!(part == expected, "{dtype:?} tokens {from}..{to}");
        }
    }
}

#[test]
fn levels_with_fma_and_thread_counts_agree_bit_for_bit() {
    let levels = Isa::available().into_iter().filter(|&isa| isa >= Isa::Avx2);
    for dtype in DTYPES {
        let case = Case::new(make_experts(dtype, 3, (192, 320), None), 4, 21, 2);
        let results: Vec<Vec<u8>> = levels.clone().map(|isa| case.run(isa, 0, 21).0).collect();
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{dtype:?}");
        crate::pool::tests::with_threads(3, || {
            assert_eq!(case.run(Isa::best(), 0, 21), case.run(Isa::best(), 0, 21));
            assert_eq!(case.run(Isa::best(), 0, 21).0, results[results.len() - 1]);
        });
    }
}

#[test]
fn only_weights_of_chosen_experts_are_read_each_once() {
    for code_type in [None, Some(CodeType::Int8), Some(CodeType::Int4)] {
        let experts = make_experts(Dtype::Bf16, 6, (256, 384), code_type);
        let case = Case {
            first_expert: 0,
            ..Case::new(experts, 6, 6, 2)
        };
        for token in 0..case.tokens {
            let chosen = &case.chosen[2 * token..2 * token + 2];
            let bytes = |expert: &i64| case.experts.expert_bytes(*expert as usize) as u64;
            assert_ne!(chosen[0], chosen[1]);
            let (_, visited) = case.run(Isa::best(), token, token + 1);
            assert_eq!(visited, chosen.iter().map(bytes).sum(), "{code_type:?}");
        }
        let (_, visited) = case.run(Isa::best(), 0, case.tokens);
        let chosen: BTreeSet<i64> = case.chosen.iter().copied().collect();
        assert!((3..6).contains(&chosen.len()), "some, more than a token's");
        let once = chosen
            .iter()
            .map(|&e| case.experts.expert_bytes(e as usize) as u64);
        assert_eq!(visited, once.sum(), "{code_type:?}");
    }
}

#[test]
fn experts_of_unequal_shapes_are_refused() {
    let mut few = make_experts(Dtype::F32, 2, (16, 8), None);
    let other = make_experts(Dtype::F32, 1, (16, 9), None);
    let gate_up = vec![few.gate_up[0].clone(), other.gate_up[0].clone()];
    let plain = ExpertForm::plain();
    let error = ExpertWeights::new(gate_up, few.down.clone(), plain).expect_err("18 is not 16");
    assert!(
        error
            .to_string()
            .starts_with("expert 1: gate_up is F32 [18, 16]")
    );
    few.down.pop();
    let plain = ExpertForm::plain();
    let error = ExpertWeights::new(few.gate_up, few.down, plain).expect_err("2 is not 1");
    assert!(
        error
            .to_string()
            .starts_with("2 gate_up and 1 down matrices")
    );
}

#[test]
fn choices_are_counted_and_unknown_ones_refused() {
    let mut counts = [10, 0, 0];
    count_choices(&[2, 0, 2, 1], 2, &mut counts).expect("all known");
    assert_eq!(counts, [11, 1, 2]);
    for bad in [3, -1] {
        let error = count_choices(&[0, 1, bad, 0], 2, &mut counts).expect_err("unknown");
        assert_eq!(
            error.to_string(),
            format!("token 1 chose expert {bad} of 3")
        );
    }
}
