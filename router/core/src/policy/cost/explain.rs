//! Explanation of `cost` for [`Policy::explain`](crate::Policy::explain), read off the estimates
//! that decided.

use super::state::{CandidateCost, CostState, PromptSize};
use crate::explain::{
    CostBasis, DecisionRule, Explanation, PolicyBasis, PolicyTerms, WeighedCandidate,
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

impl CostState {
    /// Explanation of `picked` among `options`, estimated for `req`, of which a worker holds
    /// `deepest` blocks.
    pub(super) fn explain_choice(
        &self,
        req: &RequestView<'_>,
        options: &[CandidateCost],
        deepest: usize,
        picked: &ScoredChoice,
    ) -> Explanation {
        let PromptSize {
            tokens,
            tokens_per_block,
        } = self.size_of(&req.prompt);
        let weighed = options.iter().map(|option| WeighedCandidate {
            id: option.id,
            load: option.load,
            terms: PolicyTerms::Cost(option.terms),
        });
        Explanation {
            policy: "cost",
            basis: PolicyBasis::Cost(CostBasis {
                prompt_tokens: tokens,
                tokens_per_block,
                known_blocks: deepest,
                price: self.recompute_price(req, deepest),
                rule: picked.rule,
                equals: picked.equals,
                hysteresis_ms: picked.hysteresis_ms,
                session_share: self.sessions.find(req).map(|session| session.found_share),
            }),
            candidates: weighed.collect(),
        }
    }
}
