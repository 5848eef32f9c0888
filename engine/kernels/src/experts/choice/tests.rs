//! Rules against a naive choice in f64, ties, and independence of rows and levels. Rules of families
//! are compared with transformers in tests/unit/models/test_moe.py.

use super::*;
use crate::attention::tests::{Stored, noise};

fn make_rule(scoring: Scoring, experts: usize, chosen: usize) -> ChoiceRule {
    ChoiceRule {
        experts,
        chosen,
        scoring,
        least_sum: Some(0.0),
        factor: 2.5,
        rounds_weights: false,
        groups: 1,
        kept_groups: 1,
        group_rank: GroupRank::TwoBest,
    }
}

fn rules() -> Vec<ChoiceRule> {
    let grouped = |group_rank| ChoiceRule {
        groups: 4,
        kept_groups: 2,
        group_rank,
        ..make_rule(Scoring::Sigmoid, 20, 6)
    };
    vec![
        make_rule(Scoring::Softmax, 7, 7),
        make_rule(Scoring::Softmax, 33, 4),
        make_rule(Scoring::Sigmoid, 256, 8),
        make_rule(Scoring::SoftmaxOfChosen, 32, 4),
        make_rule(Scoring::SigmoidOfChosen, 16, 1),
        grouped(GroupRank::TwoBest),
        grouped(GroupRank::Best),
    ]
}

fn choose(
    isa: Isa,
    rule: ChoiceRule,
    logits: &Stored,
    bias: &[f32],
    tokens: std::ops::Range<usize>,
) -> (Vec<i64>, Vec<f32>) {
    let row_bytes = rule.experts * logits.0.bytes();
    let mut experts = vec![-1; tokens.len() * rule.chosen];
    let mut weights = vec![f32::NAN; tokens.len() * rule.chosen];
    let choice = ExpertChoice {
        rule,
        dtype: logits.0,
        logits: logits.1[tokens.start * row_bytes..].as_ptr(),
        tokens: tokens.len(),
        bias,
        experts: experts.as_mut_ptr(),
        weights: weights.as_mut_ptr(),
    };
    // SAFETY: sizes as described.
    unsafe { choose_experts_on(isa, &choice) };
    (experts, weights)
}

/// One row in f64: the chosen experts and their weights.
fn choose_naively(rule: &ChoiceRule, logits: &[f32], bias: &[f32]) -> Vec<(i64, f64)> {
    let softmax = |x: &[f64]| -> Vec<f64> {
        let total: f64 = x.iter().map(|v| v.exp()).sum();
        x.iter().map(|v| v.exp() / total).collect()
    };
    let sigmoid = |x: &[f64]| -> Vec<f64> { x.iter().map(|v| 1.0 / (1.0 + (-v).exp())).collect() };
    let wide: Vec<f64> = logits.iter().map(|&v| v.into()).collect();
    let mut scores = match rule.scoring {
        Scoring::Softmax => softmax(&wide),
        Scoring::Sigmoid => sigmoid(&wide),
        _ => wide,
    };
    let mut ranking: Vec<f64> = scores.clone();
    for (rank, &b) in ranking.iter_mut().zip(bias) {
        *rank += f64::from(b);
    }
    let size = rule.experts / rule.groups;
    let mut groups: Vec<usize> = (0..rule.groups).collect();
    groups.sort_by(|&a, &b| {
        let best = |group: usize| {
            let mut own = ranking[group * size..][..size].to_vec();
            own.sort_by(|x, y| y.total_cmp(x));
            match rule.group_rank {
                GroupRank::TwoBest => own.iter().take(2).sum::<f64>(),
                GroupRank::Best => own[0],
            }
        };
        best(b).total_cmp(&best(a))
    });
    for group in groups.split_off(rule.kept_groups) {
        for expert in group * size..(group + 1) * size {
            ranking[expert] = f64::NEG_INFINITY;
            if rule.group_rank == GroupRank::Best {
                ranking[expert] = 0.0;
                scores[expert] = 0.0;
            }
        }
    }
    let mut order: Vec<usize> = (0..rule.experts).collect();
    order.sort_by(|&a, &b| ranking[b].total_cmp(&ranking[a]));
    order.truncate(rule.chosen);
    let chosen: Vec<f64> = order.iter().map(|&expert| scores[expert]).collect();
    let weights = match rule.scoring {
        Scoring::SoftmaxOfChosen => softmax(&chosen),
        Scoring::SigmoidOfChosen => sigmoid(&chosen),
        _ => {
            let total: f64 = chosen.iter().sum();
            chosen.iter().map(|w| w / total * 2.5).collect()
        }
    };
    let experts = order.iter().map(|&expert| expert as i64);
    experts.zip(weights).collect()
}

#[test]
fn choices_are_those_of_a_naive_router_at_each_level() {
    const TOKENS: usize = 37;
    for rule in rules() {
        let bias = match rule.group_rank {
            GroupRank::TwoBest if rule.groups > 1 => noise(rule.experts, 9),
            _ => Vec::new(),
        };
        let values: Vec<f32> = noise(TOKENS * rule.experts, 5)
            .iter()
            .map(|v| v * 3.0)
            .collect();
        let logits = Stored::new(Dtype::F32, &values);
        for isa in Isa::available() {
            let (experts, weights) = choose(isa, rule, &logits, &bias, 0..TOKENS);
            for (row, values) in values.chunks(rule.experts).enumerate() {
                let slots = row * rule.chosen..(row + 1) * rule.chosen;
                let wanted = choose_naively(&rule, values, &bias);
                let got = experts[slots.clone()].iter().zip(&weights[slots]);
                for ((&expert, &weight), (wanted_expert, wanted_weight)) in got.zip(wanted) {
                    assert_eq!(expert, wanted_expert, "{isa:?} {rule:?} row {row}");
                    let error = (f64::from(weight) - wanted_weight).abs();
                    assert!(
                        error <= 1e-6 * wanted_weight,
                        "{isa:?} {rule:?} row {row}: {weight}, not {wanted_weight}"
                    );
                }
            }
        }
    }
}

#[test]
fn row_has_the_same_bits_alone_and_weights_are_rounded() {
    const TOKENS: usize = 300;
    for rule in rules() {
        let rule = ChoiceRule {
            rounds_weights: true,
            ..rule
        };
        let logits = Stored::new(Dtype::Bf16, &noise(TOKENS * rule.experts, 6));
        for isa in Isa::available() {
            let (experts, weights) = choose(isa, rule, &logits, &[], 0..TOKENS);
            assert_eq!(Stored::new(Dtype::Bf16, &weights).values(), weights);
            for row in [0, 1, 17, TOKENS - 1] {
                let slots = row * rule.chosen..(row + 1) * rule.chosen;
                let (own_experts, own_weights) = choose(isa, rule, &logits, &[], row..row + 1);
                assert_eq!(own_experts, experts[slots.clone()]);
                assert_eq!(own_weights, weights[slots]);
            }
        }
    }
}

#[test]
fn lowest_number_wins_and_odd_logits_choose_different_experts() {
    let rule = make_rule(Scoring::SoftmaxOfChosen, 5, 3);
    let odd = [
        [0.0, -0.0, 2.0, 0.0, -1.0],
        [f32::NEG_INFINITY; 5],
        [1.0, f32::NAN, f32::INFINITY, f32::NAN, 0.0],
    ];
    let logits = Stored::new(Dtype::F32, odd.as_flattened());
    for isa in Isa::available() {
        let (experts, _) = choose(isa, rule, &logits, &[], 0..3);
        assert_eq!(experts, [2, 0, 1, 0, 1, 2, 1, 3, 2], "{isa:?}");
    }
}
