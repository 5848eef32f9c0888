//! The routed experts of a step: each token's weighted sum of the gated MLPs that its router chose.
//!
//! ```text
//! y[t] = sum over slots s of weight[t][s] * down(act(gate(x[t])) * up(x[t]))
//!        of expert chosen[t][s]
//! ```
//!
//! Products may have biases, and a weight may multiply x instead of the result ([`ExpertForm`]).
//!
//! 1. Choices (a token and a slot) are sorted by expert ([`groups`]): each becomes a row, and the
//!    rows of an expert lie side by side.
//! 2. x is packed, a token's row once for each of its choices.
//! 3. An item is some rows of one expert and some columns of its gate and up; it leaves their gated
//!    product packed, as the left operand of
//! 4. the items of down.
//! 5. A token's rows are multiplied by their weights, where x was not, and added.
//!
//! Steps 2 to 5 are one job of the pool each, over all experts: threads share the tiles of all of
//! them, and meet as often for one expert as for a hundred. Matrices of an expert that no token
//! chose are not read; [`pass_experts`] returns how many bytes of weights were.
//!
//! Exact: every row has the bits of three single products (`linear`, `elementwise::multiply_gated`,
//! `linear`), rounded in between as those are; x times its weight, both in the type, is rounded to
//! it. The sum is taken in f32 in the order of the slots, each product rounded, and rounded once
//! more to the type. So a token's result depends on the token alone.
#![allow(
    unsafe_op_in_unsafe_fn,
    reason = "one contract for the module: the CPU has level S, pointers of a step cover its shapes"
)]

pub mod choice;
mod groups;

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::elem::{Bf16, Bf16Dot, Dtype, ElementType, F32, load_part, store_part};
use crate::elementwise::{Activation, RowKernel, for_rows};
use crate::isa::{self, Isa};
use crate::linear::panels::{PACK_ROWS, PackedRows, PanelSums};
use crate::linear::{ALONE, ITEM_PANELS, PANEL, PackedWeight, QuantizedWeight, Weight};
use crate::memory::scratch::{padded, with_call_scratch, with_scratch};
use crate::pool;
use crate::simd::{Simd, SimdKernel, dispatch};
use groups::{ExpertGroups, RowCut};

/// Panels of gate in an item; those of up come on top.
const GATE_PANELS: usize = ITEM_PANELS / 2;
/// Up's columns may begin within a panel, and then reach into one more.
const GATE_UP_PANELS: usize = 2 * GATE_PANELS + 1;
/// Choices that are worked on at a time: bounds the memory between the steps (some 100 MB for a
/// hidden size of 2048), and still shares what is read of a weight among many rows.
const MAX_CHOICES: usize = 8192;

/// A matrix of an expert, in one of the forms that it may have in memory.
#[derive(Clone, Debug)]
pub enum ExpertMatrix {
    Packed(Arc<PackedWeight>),
    Quantized(Arc<QuantizedWeight>),
}

impl ExpertMatrix {
    fn weight(&self) -> Weight<'_> {
        match self {
            ExpertMatrix::Packed(weight) => Weight::Packed(weight),
            ExpertMatrix::Quantized(weight) => Weight::Quantized(weight),
        }
    }
}

/// What experts compute beside their products.
#[derive(Clone, Debug)]
pub struct ExpertForm {
    pub activation: Activation,
    /// Weights multiply what enters an expert, and not its result.
    pub weighs_inputs: bool,
    /// In the experts' type, by expert: `[2 * inner]` each, added to gate and up; empty: none.
    pub gate_up_biases: Vec<Vec<u8>>,
    /// `[hidden]` each, added to down; empty: none, or another process adds them.
    pub down_biases: Vec<Vec<u8>>,
}

impl ExpertForm {
    /// silu(gate) * up without biases; weights multiply results.
    pub fn plain() -> ExpertForm {
        ExpertForm {
            activation: Activation::Silu,
            weighs_inputs: false,
            gate_up_biases: Vec::new(),
            down_biases: Vec::new(),
        }
    }
}

/// A bias from an element on; null: none.
#[derive(Clone, Copy)]
struct BiasColumns(*const u8);

impl BiasColumns {
    fn new(biases: &[Vec<u8>], expert: usize) -> BiasColumns {
        BiasColumns(
            biases
                .get(expert)
                .map_or(std::ptr::null(), |bias| bias.as_ptr()),
        )
    }

    /// `sums` of up to LANES columns from `column` on, and their biases.
    #[inline(always)]
    unsafe fn add<S: Simd, E: ElementType>(self, sums: S::F, column: usize, left: usize) -> S::F {
        if self.0.is_null() {
            return sums;
        }
        S::add(
            sums,
            load_part::<S, E>(self.0.cast::<E::T>().add(column), left),
        )
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ExpertError {
    #[error("{0} gate_up and {1} down matrices: one of each per expert is needed")]
    UnequalCounts(usize, usize),
    #[error("{0} biases, one of {1} bytes: {2} of {3} bytes are needed, or none")]
    UnequalBiases(usize, usize, usize, usize),
    #[error(
        "expert {number}: gate_up is {gate_up} and down is {down}; with the others, {expected_gate_up} \
         and {expected_down} are needed"
    )]
    UnequalShapes {
        number: usize,
        gate_up: String,
        down: String,
        expected_gate_up: String,
        expected_down: String,
    },
    #[error("token {token} chose expert {expert} of {num_experts}")]
    UnknownExpert {
        token: usize,
        expert: i64,
        num_experts: usize,
    },
}

/// The experts of a layer that a process has: gated MLPs of one shape.
#[derive(Debug)]
pub struct ExpertWeights {
    /// `[2 * inner, hidden]`: gate's rows, then up's.
    gate_up: Vec<ExpertMatrix>,
    /// `[hidden, inner]`
    down: Vec<ExpertMatrix>,
    form: ExpertForm,
    dtype: Dtype,
    hidden: usize,
    inner: usize,
}

impl ExpertWeights {
    pub fn new(
        gate_up: Vec<ExpertMatrix>,
        down: Vec<ExpertMatrix>,
        form: ExpertForm,
    ) -> Result<ExpertWeights, ExpertError> {
        let (Some(first), true) = (down.first(), gate_up.len() == down.len()) else {
            return Err(ExpertError::UnequalCounts(gate_up.len(), down.len()));
        };
        let shape = first.weight().shape();
        let experts = ExpertWeights {
            dtype: shape.dtype,
            hidden: shape.outputs,
            inner: shape.inputs,
            gate_up,
            down,
            form,
        };
        let form = &experts.form;
        for (biases, columns) in [
            (&form.gate_up_biases, 2 * experts.inner),
            (&form.down_biases, experts.hidden),
        ] {
            let needed = columns * shape.dtype.bytes();
            let wrong = biases.iter().find(|bias| bias.len() != needed);
            let count = biases.len();
            if wrong.is_some() || ![0, experts.down.len()].contains(&count) {
                let size = wrong.map_or(needed, Vec::len);
                return Err(ExpertError::UnequalBiases(
                    count,
                    size,
                    experts.down.len(),
                    needed,
                ));
            }
        }
        let expected_gate_up = (shape.dtype, 2 * shape.inputs, shape.outputs);
        let expected_down = (shape.dtype, shape.outputs, shape.inputs);
        let of = |matrix: &ExpertMatrix| {
            let shape = matrix.weight().shape();
            (shape.dtype, shape.outputs, shape.inputs)
        };
        let text = |(dtype, outputs, inputs)| format!("{dtype:?} [{outputs}, {inputs}]");
        for (number, (gate_up, down)) in experts.gate_up.iter().zip(&experts.down).enumerate() {
            if of(gate_up) != expected_gate_up || of(down) != expected_down {
                return Err(ExpertError::UnequalShapes {
                    number,
                    gate_up: text(of(gate_up)),
                    down: text(of(down)),
                    expected_gate_up: text(expected_gate_up),
                    expected_down: text(expected_down),
                });
            }
        }
        Ok(experts)
    }

    /// Bytes of one expert's matrices as they are read.
    pub fn expert_bytes(&self, number: usize) -> usize {
        let bytes = |weight: Weight<'_>| weight.shape().panels() * weight.panel_bytes();
        bytes(self.gate_up[number].weight()) + bytes(self.down[number].weight())
    }
}

/// Count a step's choices by expert, in addition to what `counts` (`[experts]`) holds.
///
/// Errors: a choice is no expert; `counts` then holds the choices before it.
pub fn count_choices(chosen: &[i64], slots: usize, counts: &mut [i64]) -> Result<(), ExpertError> {
    let num_experts = counts.len();
    for (choice, &expert) in chosen.iter().enumerate() {
        let count = usize::try_from(expert).ok().and_then(|e| counts.get_mut(e));
        let Some(count) = count else {
            return Err(ExpertError::UnknownExpert {
                token: choice / slots,
                expert,
                num_experts,
            });
        };
        *count += 1;
    }
    Ok(())
}

/// Arguments of one call. x and y are in the experts' type.
#[derive(Clone, Copy, Debug)]
pub struct ExpertStep<'a> {
    pub experts: &'a ExpertWeights,
    /// Number of the first of them: a choice of another expert adds nothing here.
    pub first_expert: usize,
    /// Choices per token.
    pub slots: usize,
    /// `[tokens, slots]`: numbers of experts, none negative.
    pub chosen: &'a [i64],
    /// `[tokens, slots]`
    pub weights: &'a [f32],
    /// `[tokens, hidden]`, rows `x_stride` elements apart.
    pub x: *const u8,
    pub x_stride: usize,
    /// `[tokens, hidden]`, contiguous.
    pub y: *mut u8,
}

// SAFETY: items write disjoint parts of `y` and only read the rest; the caller of `pass_experts`
// vouches for it.
unsafe impl Sync for ExpertStep<'_> {}

/// Compute a step at the process's instruction level. Returns the bytes of weights that were read,
/// those read twice counted twice.
///
/// # Safety
/// Pointers cover the shapes; `y` overlaps nothing; no other thread writes the operands meanwhile.
pub unsafe fn pass_experts(step: &ExpertStep) -> u64 {
    // SAFETY: passed on.
    unsafe { pass_experts_on(isa::current(), step) }
}

/// Like [`pass_experts`], at level `isa`.
///
/// # Safety
/// As [`pass_experts`], and `isa.runs_here()`.
pub unsafe fn pass_experts_on(isa: Isa, step: &ExpertStep) -> u64 {
    let tokens = step.chosen.len() / step.slots;
    let round_tokens = (MAX_CHOICES / step.slots).max(1);
    let mut visited = 0;
    for first in (0..tokens).step_by(round_tokens) {
        let round = first..tokens.min(first + round_tokens);
        visited += match (step.experts.dtype, isa) {
            (Dtype::F32, _) => pass_round::<F32>(isa, step, round),
            (Dtype::Bf16, Isa::Avx512Bf16) => pass_round::<Bf16Dot>(isa, step, round),
            (Dtype::Bf16, _) => pass_round::<Bf16>(isa, step, round),
        };
    }
    visited
}

unsafe fn pass_round<E: ElementType>(isa: Isa, step: &ExpertStep, tokens: Range<usize>) -> u64 {
    let experts = step.experts;
    let choices = tokens.start * step.slots..tokens.end * step.slots;
    let held = step.first_expert..step.first_expert + experts.down.len();
    let group_words = ExpertGroups::words(choices.len(), held.len());
    let x_words = PackedRows::words::<E>(choices.len(), experts.hidden);
    let inner_words = PackedRows::words::<E>(choices.len(), experts.inner);
    let result_words = (choices.len() * experts.hidden * experts.dtype.bytes()).div_ceil(4);
    let words = [group_words, x_words, inner_words, result_words];
    with_call_scratch(words.map(padded).iter().sum(), |mut carver| {
        let chosen = &step.chosen[choices.clone()];
        let groups = ExpertGroups::sort(chosen, held, carver.take(group_words));
        let round = Round::<E> {
            step,
            groups,
            tokens,
            x: PackedRows::new(carver.take(x_words), choices.len()),
            inner: PackedRows::new(carver.take(inner_words), choices.len()),
            results: carver.take(result_words).cast(),
            visited: AtomicU64::new(0),
            elem: PhantomData,
        };
        round.run(isa);
        round.visited.into_inner()
    })
}

/// Some tokens of a step, and memory for what lies between x and y.
struct Round<'a, E: ElementType> {
    step: &'a ExpertStep<'a>,
    groups: ExpertGroups<'a>,
    tokens: Range<usize>,
    /// By row: x of its token.
    x: PackedRows,
    /// By row: the gated product.
    inner: PackedRows,
    /// By row: `[rows, hidden]`, the expert's result.
    results: *mut E::T,
    visited: AtomicU64,
    elem: PhantomData<E>,
}

// SAFETY: items write disjoint rows and columns of what lies between, and each job ends before the
// next one reads.
unsafe impl<E: ElementType> Sync for Round<'_, E> {}

impl<E: ElementType> Round<'_, E> {
    unsafe fn run(&self, isa: Isa) {
        let experts = self.step.experts;
        let rows = self.groups.rows();
        let is_alone = 3 * rows * experts.hidden * experts.inner < ALONE;
        let run_items = |items: usize, work: &(dyn Fn(usize) + Sync)| {
            if is_alone {
                (0..items).for_each(work);
            } else {
                pool::for_each(items, work);
            }
        };
        run_items(rows.div_ceil(PACK_ROWS), &|i| {
            let first = i * PACK_ROWS;
            // SAFETY: passed on; the rows are this item's.
            unsafe { dispatch(isa, PackTokens(self, first..rows.min(first + PACK_ROWS))) };
        });
        let cuts = self.groups.cuts();
        let gate_cuts = experts.inner.div_ceil(GATE_PANELS * PANEL);
        run_items(cuts.len() * gate_cuts, &|i| {
            let first = i % gate_cuts * GATE_PANELS * PANEL;
            let columns = first..experts.inner.min(first + GATE_PANELS * PANEL);
            // SAFETY: passed on; all rows are packed.
            unsafe { self.multiply_gate_up(isa, cuts[i / gate_cuts], columns) };
        });
        let down_cuts = experts.hidden.div_ceil(ITEM_PANELS * PANEL);
        run_items(cuts.len() * down_cuts, &|i| {
            let first = i % down_cuts * ITEM_PANELS * PANEL;
            let columns = first..experts.hidden.min(first + ITEM_PANELS * PANEL);
            // SAFETY: passed on; all gated products are there.
            unsafe { self.multiply_down(isa, cuts[i / down_cuts], columns) };
        });
        let row_len = self.step.slots * experts.hidden;
        for_rows(isa, experts.dtype, self.tokens.len(), row_len, self);
    }

    /// Leave the gated products of a cut's rows for some columns of inner.
    unsafe fn multiply_gate_up(&self, isa: Isa, cut: RowCut, columns: Range<usize>) {
        let experts = self.step.experts;
        let up = experts.inner + columns.start..experts.inner + columns.end;
        let gate_panels = panels_of(&columns);
        let finish = StoreGated {
            up_offset: gate_panels.len() * PANEL + up.start % PANEL,
            first_column: columns.start,
            columns: columns.len(),
            inner: self.inner,
            inner_size: experts.inner,
            activation: experts.form.activation,
            bias: BiasColumns::new(&experts.form.gate_up_biases, cut.expert()),
        };
        let mut panels = [0; GATE_UP_PANELS];
        let numbers = gate_panels.chain(panels_of(&up));
        let count = fill(&mut panels, numbers);
        let weight = experts.gate_up[cut.expert()].weight();
        self.multiply(isa, weight, self.x, cut, &panels[..count], finish);
    }

    /// Leave the results of a cut's rows for some columns of hidden.
    unsafe fn multiply_down(&self, isa: Isa, cut: RowCut, columns: Range<usize>) {
        let experts = self.step.experts;
        let finish = StoreResults {
            first_column: columns.start,
            columns: columns.len(),
            hidden: experts.hidden,
            results: self.results.cast(),
            bias: BiasColumns::new(&experts.form.down_biases, cut.expert()),
        };
        let mut panels = [0; ITEM_PANELS];
        let count = fill(&mut panels, panels_of(&columns));
        let weight = experts.down[cut.expert()].weight();
        self.multiply(isa, weight, self.inner, cut, &panels[..count], finish);
    }

    unsafe fn multiply<F: FinishSums>(
        &self,
        isa: Isa,
        weight: Weight<'_>,
        x: PackedRows,
        cut: RowCut,
        panels: &[usize],
        finish: F,
    ) {
        let sum_words = cut.rows() * panels.len() * PANEL;
        let tile_words = weight.tile_words();
        with_scratch(padded(sum_words) + padded(tile_words), |mut carver| {
            let sums = PanelSums {
                weight,
                x,
                first: cut.first(),
                rows: cut.rows(),
                panels,
                sums: carver.take(sum_words).cast(),
                tile: carver.take(tile_words),
                elem: PhantomData::<E>,
            };
            // SAFETY: passed on; the sums have room for the item.
            unsafe { dispatch(isa, Item(sums, finish)) };
        });
        let bytes = panels.len() * weight.panel_bytes();
        self.visited.fetch_add(bytes as u64, Relaxed);
    }
}

/// Panels that columns of a matrix lie in.
fn panels_of(columns: &Range<usize>) -> Range<usize> {
    columns.start / PANEL..columns.end.div_ceil(PANEL)
}

/// Write `numbers` to the front of `to`, and return how many they are.
fn fill(to: &mut [usize], numbers: impl Iterator<Item = usize>) -> usize {
    let mut count = 0;
    for number in numbers {
        to[count] = number;
        count += 1;
    }
    count
}

/// Packs x of the tokens of some rows.
struct PackTokens<'a, E: ElementType>(&'a Round<'a, E>, Range<usize>);

impl<E: ElementType> SimdKernel for PackTokens<'_, E> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let PackTokens(round, rows) = self;
        let step = round.step;
        for row in rows {
            let choice = round.tokens.start * step.slots + round.groups.choice_of(row);
            let from = step
                .x
                .cast::<E::T>()
                .add(choice / step.slots * step.x_stride);
            if !step.experts.form.weighs_inputs {
                round.x.pack::<S, E>(row, from, step.experts.hidden);
                continue;
            }
            let weight = E::round::<S>(S::splat(step.weights[choice]));
            for c in (0..step.experts.hidden).step_by(S::LANES) {
                // Lanes behind the last column become 0, as the packed order wants them.
                let x = load_part::<S, E>(from.add(c), step.experts.hidden - c);
                let weighed = E::round::<S>(S::mul(x, weight));
                round.x.store::<S, E>(row, c, weighed);
            }
        }
    }
}

/// What becomes of an item's sums.
trait FinishSums {
    /// # Safety
    /// The CPU supports `S`; `sums` are computed.
    unsafe fn finish<S: Simd, E: ElementType>(&self, sums: &PanelSums<'_, E>);
}

struct Item<'a, E: ElementType, F>(PanelSums<'a, E>, F);

impl<E: ElementType, F: FinishSums> SimdKernel for Item<'_, E, F> {
    const DOT: bool = E::DOT;

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let Item(sums, finish) = self;
        sums.compute::<S>();
        finish.finish::<S, E>(&sums);
    }
}

/// The gated product of sums of gate and up, for some columns of inner.
struct StoreGated {
    /// From a row's first sum to that of its first column of up; gate's come first.
    up_offset: usize,
    first_column: usize,
    columns: usize,
    inner: PackedRows,
    /// Columns of gate, behind which up's are.
    inner_size: usize,
    activation: Activation,
    /// Gate's, then up's.
    bias: BiasColumns,
}

impl FinishSums for StoreGated {
    #[inline(always)]
    unsafe fn finish<S: Simd, E: ElementType>(&self, sums: &PanelSums<'_, E>) {
        for row in 0..sums.rows {
            let gate = sums.row(row);
            let up = gate.add(self.up_offset);
            let mut c = 0;
            while c < self.columns {
                // Lanes behind the last column become 0, as the packed order wants them.
                let left = self.columns - c;
                let column = self.first_column + c;
                let g = load_part::<S, F32>(gate.add(c), left);
                let g = E::round::<S>(self.bias.add::<S, E>(g, column, left));
                let u = load_part::<S, F32>(up.add(c), left);
                let u = E::round::<S>(self.bias.add::<S, E>(u, self.inner_size + column, left));
                let gated = E::round::<S>(self.activation.multiply::<S, E>(g, u));
                self.inner.store::<S, E>(sums.first + row, column, gated);
                c += S::LANES;
            }
        }
    }
}

/// Results of rows, rounded, for some columns of hidden.
struct StoreResults {
    first_column: usize,
    columns: usize,
    hidden: usize,
    /// `[rows, hidden]`
    results: *mut u8,
    bias: BiasColumns,
}

impl FinishSums for StoreResults {
    #[inline(always)]
    unsafe fn finish<S: Simd, E: ElementType>(&self, sums: &PanelSums<'_, E>) {
        for row in 0..sums.rows {
            let at = (sums.first + row) * self.hidden + self.first_column;
            let to = self.results.cast::<E::T>().add(at);
            let mut c = 0;
            while c < self.columns {
                let left = self.columns - c;
                let sum = S::load(sums.row(row).add(c));
                let result = self.bias.add::<S, E>(sum, self.first_column + c, left);
                store_part::<S, E>(to.add(c), result, left);
                c += S::LANES;
            }
        }
    }
}

/// The weighted sums of a round's tokens.
impl<E: ElementType> RowKernel for Round<'_, E> {
    #[inline(always)]
    unsafe fn rows<S: Simd, T: ElementType>(&self, first: usize, end: usize) {
        let step = self.step;
        let hidden = step.experts.hidden;
        let results = self.results.cast::<T::T>();
        for token in first..end {
            let whole_token = self.tokens.start + token;
            let weights = &step.weights[whole_token * step.slots..][..step.slots];
            let to = step.y.cast::<T::T>().add(whole_token * hidden);
            let mut c = 0;
            while c < hidden {
                let mut total = S::splat(0.0);
                for (slot, &weight) in weights.iter().enumerate() {
                    // Another rank has the expert, and adds its result.
                    let Some(row) = self.groups.row_of(token * step.slots + slot) else {
                        continue;
                    };
                    let result = load_part::<S, T>(results.add(row * hidden + c), hidden - c);
                    let weighed = if step.experts.form.weighs_inputs {
                        result
                    } else {
                        S::mul(result, S::splat(weight))
                    };
                    total = S::add(total, weighed);
                }
                store_part::<S, T>(to.add(c), total, hidden - c);
                c += S::LANES;
            }
        }
    }
}

#[cfg(test)]
mod tests;
