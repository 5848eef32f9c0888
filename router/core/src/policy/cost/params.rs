//! Parameters of `cost`, and the costs that follow from them alone.

use super::rank::RankEstimate;
use crate::types::Role;

/// Parameters of `cost`.
#[derive(Debug, Clone, PartialEq)]
pub struct CostParams {
    /// Most memory of the index [bytes].
    pub max_bytes: usize,
    /// Tokens a worker's cache is taken to hold if it does not say. Too large costs some hits, too
    /// small costs more.
    pub default_capacity_tokens: u64,
    /// Highest price of computing twice; 8 is a fleet that is 8/9 busy.
    pub beta_max: f64,
    /// Memory of the utilization [s].
    pub utilization_secs: f64,
    /// Margins by which a worker without the longest prefix must be cheaper, both [ms, share of the
    /// holder's cost].
    pub hysteresis_ms: f64,
    pub hysteresis_fraction: f64,
    /// Cost of one more running request for those that run, and itself, on a worker that decodes
    /// [ms]. About 0.3 ms a token on a GPU, over a few dozen tokens: small against a long prefill,
    /// decisive between equals.
    pub request_ms: f64,
    /// Price of a full KV cache: this × k / (1 - k) [ms]. smg's kv barrier has the same form and
    /// size.
    pub kv_ms: f64,
    /// Time to fetch the KV of a token from the same machine, from another, and from another
    /// topology domain [ms]: 128 KiB (an 8 B model with grouped heads) at 10, 3 and 1 GB/s.
    pub pull_near_ms: f64,
    pub pull_far_ms: f64,
    pub pull_crossing_ms: f64,
    /// Pause between two reports of a worker; twice that is stale [ms].
    pub report_interval_ms: u64,
    /// Sessions remembered; about 100 bytes each.
    pub max_sessions: usize,
    /// A session not used for this long is forgotten: by then other prompts have taken its pages.
    /// The longest that providers keep a prompt cached (Anthropic's extended cache).
    pub session_idle_secs: u64,
}

impl Default for CostParams {
    fn default() -> Self {
        Self {
            max_bytes: 1 << 30,
            default_capacity_tokens: 1 << 20,
            beta_max: 8.0,
            utilization_secs: 30.0,
            hysteresis_ms: 5.0,
            hysteresis_fraction: 0.1,
            request_ms: 10.0,
            kv_ms: 150.0,
            pull_near_ms: 0.013,
            pull_far_ms: 0.043,
            pull_crossing_ms: 0.13,
            report_interval_ms: 10_000,
            max_sessions: 65_536,
            session_idle_secs: 3_600,
        }
    }
}

/// Share of a KV cache above which the price no longer grows.
const KV_FULL: f64 = 0.98;

/// The parameters for workers of one role.
#[derive(Debug, Clone)]
pub(super) struct CostModel {
    pub(super) role: Role,
    pub(super) params: CostParams,
}

impl CostModel {
    pub fn tau_ms(&self) -> f64 {
        self.params.utilization_secs * 1e3
    }

    pub fn capacity_tokens(&self, rank: &RankEstimate) -> f64 {
        rank.facts
            .capacity_tokens
            .unwrap_or(self.params.default_capacity_tokens)
            .max(1) as f64
    }

    /// Cost of running there, beside `load` requests, for a request that will take `tokens` of KV.
    pub fn decode_ms(&self, rank: &RankEstimate, load: usize, tokens: f64, now_ms: f64) -> f64 {
        let tokens = rank.kv_tokens + rank.others_load(now_ms).kv_tokens + tokens;
        let used = (tokens / self.capacity_tokens(rank)).min(KV_FULL);
        self.params.request_ms * load as f64 + self.params.kv_ms * used / (1.0 - used)
    }
}
