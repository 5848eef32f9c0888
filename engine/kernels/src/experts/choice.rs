//! A step's choice of experts, from the router's logits.
//!
//! ```text
//! score      by expert: softmax or sigmoid of its logit, or the logit itself
//! ranking    score + bias; experts outside the kept groups behind all others
//! choice     the highest of the ranking, of equal ones the lowest number
//! weight     the chosen scores; or softmax or sigmoid of the chosen logits alone
//! ```
//!
//! Rows are independent. Their sums over all experts are taken in 16 lanes and one fixed tree, those
//! over the chosen ones in the order of the slots.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers of a call cover its shapes"
)]

use std::marker::PhantomData;

use crate::elem::{Bf16, Dtype, ElementType, F32, load_part};
use crate::elementwise::sigmoid_of;
use crate::isa::{self, Isa};
use crate::math::exp;
use crate::memory::scratch::{padded, with_scratch};
use crate::pool;
use crate::simd::{SUM_LANES, Simd, SimdKernel, dispatch, tree_sum};

/// Comparisons that a thread makes at a time: about 10 us of work.
const SHARE: usize = 1 << 15;
/// Key of an expert that has been chosen: below those of all numbers.
const TAKEN: i32 = i32::MIN;

/// Where a score comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    Softmax,
    Sigmoid,
    /// Experts rank by their logits; weights are a softmax of the chosen ones.
    SoftmaxOfChosen,
    /// Likewise, a sigmoid of each.
    SigmoidOfChosen,
}

/// What ranks a group of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupRank {
    /// The sum of its two best; experts of other groups rank behind all.
    TwoBest,
    /// Its best one; scores of other groups are 0.
    Best,
}

/// How experts and weights follow from logits. Numbers fit together: groups divide the experts, and
/// none is 0.
#[derive(Clone, Copy, Debug)]
pub struct ChoiceRule {
    pub experts: usize,
    /// Experts per token.
    pub chosen: usize,
    pub scoring: Scoring,
    /// Weights are divided by their sum and this number. For scores of all experts; None: they are
    /// not.
    pub least_sum: Option<f32>,
    /// Multiplies weights that come from scores of all experts.
    pub factor: f32,
    /// Weights that come from scores of all experts are rounded to the logits' type; those of the
    /// chosen logits always are.
    pub rounds_weights: bool,
    pub groups: usize,
    pub kept_groups: usize,
    pub group_rank: GroupRank,
}

impl ChoiceRule {
    fn scores_chosen(&self) -> bool {
        matches!(
            self.scoring,
            Scoring::SoftmaxOfChosen | Scoring::SigmoidOfChosen
        )
    }
}

/// Arguments of a call; T tokens.
#[derive(Clone, Copy, Debug)]
pub struct ExpertChoice<'a> {
    pub rule: ChoiceRule,
    pub dtype: Dtype,
    /// `[T, experts]`, contiguous.
    pub logits: *const u8,
    pub tokens: usize,
    /// `[experts]`, added to the scores for the ranking alone; empty: none.
    pub bias: &'a [f32],
    /// `[T, chosen]`, the highest ranked first.
    pub experts: *mut i64,
    /// `[T, chosen]`
    pub weights: *mut f32,
}

// SAFETY: items write disjoint rows and only read the rest; the caller of `choose_experts` vouches
// for the memory.
unsafe impl Sync for ExpertChoice<'_> {}

/// Choose at the process's instruction level.
///
/// # Safety
/// Pointers cover the shapes; no other thread accesses the results, or writes the rest, meanwhile.
pub unsafe fn choose_experts(choice: &ExpertChoice) {
    // SAFETY: passed on.
    unsafe { choose_experts_on(isa::current(), choice) }
}

/// Like [`choose_experts`], at level `isa`.
///
/// # Safety
/// As [`choose_experts`], and `isa.runs_here()`.
pub unsafe fn choose_experts_on(isa: Isa, choice: &ExpertChoice) {
    let rule = choice.rule;
    let row_scores = rule.experts.next_multiple_of(SUM_LANES);
    let row_weights = rule.chosen.next_multiple_of(SUM_LANES);
    let words = [row_scores, row_scores, row_scores, row_weights];
    let share = (SHARE / (rule.experts * (rule.chosen + 4))).max(1);
    pool::for_each(choice.tokens.div_ceil(share), &|i| {
        let rows = i * share..choice.tokens.min((i + 1) * share);
        with_scratch(words.map(padded).iter().sum(), |mut carver| {
            let memory = RowMemory {
                scores: carver.take(row_scores).cast(),
                ranking: carver.take(row_scores).cast(),
                keys: carver.take(row_scores).cast(),
                weights: carver.take(row_weights).cast(),
            };
            for row in rows {
                // SAFETY: passed on; the pieces have room for a row.
                unsafe {
                    match choice.dtype {
                        Dtype::F32 => {
                            dispatch(isa, ChooseRow::<F32>(choice, memory, row, PhantomData));
                        }
                        Dtype::Bf16 => {
                            dispatch(isa, ChooseRow::<Bf16>(choice, memory, row, PhantomData));
                        }
                    }
                }
            }
        });
    });
}

/// Memory for the numbers of a row, each piece in whole vectors of any level.
#[derive(Clone, Copy)]
struct RowMemory {
    /// By expert.
    scores: *mut f32,
    /// By expert.
    ranking: *mut f32,
    /// By expert, or by group.
    keys: *mut i32,
    /// By slot.
    weights: *mut f32,
}

struct ChooseRow<'a, E: ElementType>(&'a ExpertChoice<'a>, RowMemory, usize, PhantomData<E>);

impl<E: ElementType> SimdKernel for ChooseRow<'_, E> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let ChooseRow(choice, memory, row, _) = self;
        let rule = choice.rule;
        let logits = choice.logits.cast::<E::T>().add(row * rule.experts);
        for i in (0..rule.experts).step_by(S::LANES) {
            S::store(
                memory.scores.add(i),
                load_part::<S, E>(logits.add(i), rule.experts - i),
            );
        }
        match rule.scoring {
            Scoring::Softmax => softmax::<S>(memory.scores, rule.experts),
            Scoring::Sigmoid => sigmoid::<S>(memory.scores, rule.experts),
            Scoring::SoftmaxOfChosen | Scoring::SigmoidOfChosen => (),
        }
        let scores = std::slice::from_raw_parts_mut(memory.scores, rule.experts);
        let ranking = std::slice::from_raw_parts_mut(memory.ranking, rule.experts);
        let keys = std::slice::from_raw_parts_mut(memory.keys, rule.experts);
        ranking.copy_from_slice(scores);
        for (rank, bias) in ranking.iter_mut().zip(choice.bias) {
            *rank += bias;
        }
        if rule.kept_groups < rule.groups {
            drop_groups(&rule, scores, ranking, keys);
        }
        for (key, &rank) in keys.iter_mut().zip(&*ranking) {
            *key = key_of(rank);
        }
        let experts = choice.experts.add(row * rule.chosen);
        for slot in 0..rule.chosen {
            let expert = take_highest(keys);
            experts.add(slot).write(expert as i64);
            memory.weights.add(slot).write(scores[expert]);
        }
        match rule.scoring {
            Scoring::SoftmaxOfChosen => softmax::<S>(memory.weights, rule.chosen),
            Scoring::SigmoidOfChosen => sigmoid::<S>(memory.weights, rule.chosen),
            Scoring::Softmax | Scoring::Sigmoid => (),
        }
        let weights = std::slice::from_raw_parts_mut(memory.weights, rule.chosen);
        if !rule.scores_chosen() {
            weigh(&rule, weights);
        }
        if rule.rounds_weights || rule.scores_chosen() {
            for weight in &mut *weights {
                *weight = E::to_f32(E::from_f32(*weight));
            }
        }
        let to = choice.weights.add(row * rule.chosen);
        to.copy_from_nonoverlapping(memory.weights, rule.chosen);
    }
}

/// The softmax of `len` numbers, in place; numbers behind them, to whole vectors, become 0.
#[inline(always)]
unsafe fn softmax<S: Simd>(x: *mut f32, len: usize) {
    let whole = len.next_multiple_of(SUM_LANES);
    for i in len..whole {
        x.add(i).write(f32::NEG_INFINITY);
    }
    let mut highest = S::splat(f32::NEG_INFINITY);
    for i in (0..whole).step_by(S::LANES) {
        highest = S::max(highest, S::load(x.add(i)));
    }
    let highest = S::splat(S::reduce_max(highest));
    let mut lanes = [0.0_f32; SUM_LANES];
    for i in (0..whole).step_by(S::LANES) {
        let power = exp::<S>(S::sub(S::load(x.add(i)), highest));
        S::store(x.add(i), power);
        let lane = lanes.as_mut_ptr().add(i % SUM_LANES);
        S::store(lane, S::add(S::load(lane), power));
    }
    let total = S::splat(tree_sum(&lanes));
    for i in (0..whole).step_by(S::LANES) {
        S::store(x.add(i), S::div(S::load(x.add(i)), total));
    }
}

/// The sigmoid of each of `len` numbers, in place.
#[inline(always)]
unsafe fn sigmoid<S: Simd>(x: *mut f32, len: usize) {
    for i in (0..len).step_by(S::LANES) {
        S::store(x.add(i), sigmoid_of::<S>(S::load(x.add(i))));
    }
}

/// Divide by the sum and multiply by the factor, where the rule says so.
#[inline(always)]
fn weigh(rule: &ChoiceRule, weights: &mut [f32]) {
    if let Some(least_sum) = rule.least_sum {
        let mut total = 0.0;
        for &weight in &*weights {
            total += weight;
        }
        for weight in &mut *weights {
            *weight /= total + least_sum;
        }
    }
    for weight in weights {
        *weight *= rule.factor;
    }
}

/// Keep experts of the highest ranked groups alone. `keys` has room for one per group.
#[inline(always)]
fn drop_groups(rule: &ChoiceRule, scores: &mut [f32], ranking: &mut [f32], keys: &mut [i32]) {
    let size = rule.experts / rule.groups;
    let keys = &mut keys[..rule.groups];
    for (key, group) in keys.iter_mut().zip(ranking.chunks_exact(size)) {
        *key = key_of(rank_group(rule.group_rank, group));
    }
    for _ in 0..rule.kept_groups {
        take_highest(keys);
    }
    for (group, _) in keys.iter().enumerate().filter(|(_, key)| **key != TAKEN) {
        let experts = group * size..(group + 1) * size;
        match rule.group_rank {
            GroupRank::TwoBest => ranking[experts].fill(f32::NEG_INFINITY),
            GroupRank::Best => {
                scores[experts.clone()].fill(0.0);
                ranking[experts].fill(0.0);
            }
        }
    }
}

#[inline(always)]
fn rank_group(rank: GroupRank, group: &[f32]) -> f32 {
    let mut best = f32::NEG_INFINITY;
    let mut second = f32::NEG_INFINITY;
    for &value in group {
        if value > best {
            second = best;
            best = value;
        } else if value > second {
            second = value;
        }
    }
    if rank == GroupRank::Best || group.len() == 1 {
        best
    } else {
        best + second
    }
}

/// A whole number that orders as the number does, above `TAKEN`; NaN is the highest.
#[inline(always)]
fn key_of(number: f32) -> i32 {
    if number.is_nan() {
        return i32::MAX;
    }
    // -0 equals 0.
    let bits = (number + 0.0).to_bits() as i32;
    bits ^ (((bits >> 31) as u32) >> 1) as i32
}

/// The first place of the highest key, which becomes `TAKEN`.
#[inline(always)]
fn take_highest(keys: &mut [i32]) -> usize {
    let highest = keys.iter().fold(TAKEN, |most, &key| most.max(key));
    let place = keys.iter().position(|&key| key == highest);
    let place = place.expect("the highest key is among them");
    keys[place] = TAKEN;
    place
}

#[cfg(test)]
mod tests;
