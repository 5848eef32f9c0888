//! Explanations: the terms that a policy weighed, filled in on demand by the code that decides
//! ([`Policy::explain`](crate::Policy::explain)).

use serde::Serialize;

use crate::types::{WorkerId, WorkerView};

/// Decision of one policy about one role.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Explanation {
    pub policy: &'static str,
    /// Facts that held for all candidates alike.
    #[serde(flatten)]
    pub basis: PolicyBasis,
    /// In the order they were given; of a fleet with too many pairs only those that were weighed
    /// together.
    pub candidates: Vec<WeighedCandidate>,
}

/// A candidate and what spoke for or against it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WeighedCandidate {
    pub id: WorkerId,
    /// Requests in flight.
    pub load: usize,
    #[serde(flatten)]
    pub terms: PolicyTerms,
}

/// Numbers behind a decision that belong to no candidate.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PolicyBasis {
    #[default]
    Nothing,
    Cost(CostBasis),
    Prefix {
        total_chars: usize,
        /// Length of the longest prefix that a candidate holds.
        matched_chars: usize,
        cache_threshold: f32,
        /// Loads differ by more than both balance thresholds: the prefix was not asked for.
        is_unbalanced: bool,
    },
    Key {
        has_key: bool,
    },
}

/// See `policy/cost/mod.rs` for the rule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CostBasis {
    pub prompt_tokens: f64,
    pub tokens_per_block: f64,
    /// Blocks of the prompt that any worker holds, candidate or not.
    pub known_blocks: usize,
    #[serde(flatten)]
    pub price: RecomputePrice,
    pub rule: DecisionRule,
    /// Candidates equal in cost, index, load and recent work, of which chance took one.
    pub equals: usize,
    /// Margin by which a worker without the longest prefix had to be cheaper, if it came to that
    /// [ms].
    pub hysteresis_ms: Option<f64>,
    /// Share of the session's last prompt that is expected at its worker; `None`: the request has
    /// no session key, or a new one.
    pub session_share: Option<f64>,
}

/// Price of a millisecond of computing again, with its factors.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RecomputePrice {
    /// rho.
    pub utilization: f64,
    pub beta: f64,
    /// Recent arrivals on the deepest known block.
    pub heat: f64,
    /// (1 + beta) / (1 + 0.1 heat).
    pub price: f64,
}

/// Which rule of `cost` took the winner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DecisionRule {
    LeastCost,
    /// Not the least cost, but near enough: it holds the longest prefix.
    Hysteresis,
    /// Reports are stale: the cheaper of two drawn from the cheapest.
    Sampled,
}

/// Terms that a policy knows of a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum PolicyTerms {
    /// The load alone, or nothing.
    Load {},
    /// `power_of_two`.
    Drawn { is_drawn: bool },
    /// `cache_aware`: characters of the routing text that the worker's tree holds, and its size.
    Prefix {
        matched_chars: usize,
        tree_chars: usize,
    },
    /// `manual`: `keys` is the number of routing keys that the worker was given.
    Key { keys: usize, holds_key: bool },
    /// `cost`.
    Cost(CostTerms),
}

/// `cost_ms` is the sum: backlog_ms + least prefill + price × (prefill_ms - least) + decode_ms +
/// partner_ms.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct CostTerms {
    pub cost_ms: f64,
    pub held_blocks: usize,
    pub cached_tokens: f64,
    /// Tokens expected there beside the cached ones, because the request's session used it last.
    pub session_tokens: f64,
    /// Prefill time that these save; `prefill_ms` is without it.
    pub session_ms: f64,
    /// The rest of the prompt.
    pub uncached_tokens: f64,
    pub backlog_ms: f64,
    pub prefill_ms: f64,
    /// Price of its running requests and its KV cache; 0 for prefill workers.
    pub decode_ms: f64,
    /// Share of the other worker. Prefill: the least a decode worker adds for it. Decode: the part
    /// of the KV transfer that the prefill does not hide.
    pub partner_ms: f64,
    /// Part of `partner_ms` that the worker costs because the pair is not in one topology domain.
    pub crossing_ms: f64,
    /// Blocks in its index, and work sent to it recently: they decide between equal costs.
    pub index_blocks: usize,
    pub recent_ms: f64,
}

impl Explanation {
    /// For a policy that looks at each candidate alone.
    pub fn for_candidates(
        policy: &'static str,
        basis: PolicyBasis,
        ready: &[WorkerView],
        terms: impl Fn(&WorkerView) -> PolicyTerms,
    ) -> Self {
        let weighed = ready.iter().map(|worker| WeighedCandidate {
            id: worker.id,
            load: worker.load,
            terms: terms(worker),
        });
        Self {
            policy,
            basis,
            candidates: weighed.collect(),
        }
    }
}
