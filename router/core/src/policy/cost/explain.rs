//! Explanation of `cost` for [`Policy::explain`](crate::Policy::explain), read off the estimates
//! that decided.

use super::params::CostModel;
use super::state::{CandidateCost, CostState, PromptSize, RecomputePrice};
use crate::explain::{
    CostBasis, CostTerms, DecisionRule, Explanation, PolicyBasis, PolicyTerms, WeighedCandidate,
};
use crate::types::{RequestView, WorkerChoice};

/// A decision and how it came about.
pub(super) struct ScoredChoice {
    pub(super) best: CandidateCost,
    pub(super) choice: WorkerChoice,
    pub(super) rule: DecisionRule,
    pub(super) equals: usize,
    pub(super) hysteresis_ms: Option<f64>,
}

/// Inputs of `CostPolicy::pick`. Nothing is computed before [`explain`] asks.
pub(super) struct ScoringContext<'a> {
    policy: &'a CostModel,
    state: &'a CostState,
    req: &'a RequestView<'a>,
    options: &'a [CandidateCost],
    deepest: usize,
}

impl<'a> ScoringContext<'a> {
    pub(super) fn of(
        policy: &'a CostModel,
        state: &'a CostState,
        req: &'a RequestView<'a>,
        options: &'a [CandidateCost],
        deepest: usize,
    ) -> Self {
        Self { policy, state, req, options, deepest }
    }
}

pub(super) fn explain(weighing: &ScoringContext<'_>, picked: &ScoredChoice) -> Explanation {
    let ScoringContext { policy, state, req, options, deepest } = *weighing;
    let RecomputePrice { utilisation, beta, heat, price } = state.price(policy, req, deepest);
    let PromptSize { tokens, tokens_per_block } = state.size_of(&req.prompt);
    let weighed = options.iter().map(|option| WeighedCandidate {
        id: option.id,
        load: option.load,
        terms: PolicyTerms::Cost(CostTerms {
            cost_ms: option.cost_ms,
            held_blocks: option.held,
            cached_tokens: option.cached,
            uncached_tokens: tokens - option.cached,
            backlog_ms: option.backlog_ms,
            prefill_ms: option.prefill_ms,
            decode_ms: option.decode_ms,
            partner_ms: option.partner_ms,
            crossing_ms: option.crossing_ms,
            index_blocks: option.size,
            recent_ms: option.recent_ms,
        }),
    });
    Explanation {
        policy: "cost",
        basis: PolicyBasis::Cost(CostBasis {
            prompt_tokens: tokens,
            tokens_per_block,
            known_blocks: deepest,
            utilisation,
            beta,
            heat,
            price,
            rule: picked.rule,
            equals: picked.equals,
            hysteresis_ms: picked.hysteresis_ms,
        }),
        candidates: weighed.collect(),
    }
}
