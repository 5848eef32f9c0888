//! Explanation of `cost` for [`Policy::explain`](crate::Policy::explain), read off the estimates that decided.

use super::params::CostModel;
use super::state::{Estimate, Price, Size, State};
use crate::explain::{Basis, CostBasis, CostTerms, Explanation, Rule, Terms, Weighed};
use crate::types::{Choice, RequestView};

/// A decision and how it came about.
pub(super) struct Picked {
    pub(super) best: Estimate,
    pub(super) choice: Choice,
    pub(super) rule: Rule,
    pub(super) equals: usize,
    pub(super) hysteresis_ms: Option<f64>,
}

/// Inputs of `Cost::pick`. Nothing is computed before [`explain`] asks.
pub(super) struct Weighing<'a> {
    policy: &'a CostModel,
    state: &'a State,
    req: &'a RequestView<'a>,
    options: &'a [Estimate],
    deepest: usize,
}

impl<'a> Weighing<'a> {
    pub(super) fn of(
        policy: &'a CostModel,
        state: &'a State,
        req: &'a RequestView<'a>,
        options: &'a [Estimate],
        deepest: usize,
    ) -> Self {
        Self { policy, state, req, options, deepest }
    }
}

pub(super) fn explain(weighing: &Weighing<'_>, picked: &Picked) -> Explanation {
    let Weighing { policy, state, req, options, deepest } = *weighing;
    let Price { utilisation, beta, heat, price } = state.price(policy, req, deepest);
    let Size { tokens, tokens_per_block } = state.size_of(&req.prompt);
    let weighed = options.iter().map(|option| Weighed {
        id: option.id,
        load: option.load,
        terms: Terms::Cost(CostTerms {
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
        basis: Basis::Cost(CostBasis {
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
