//! `cache_aware`: SGLang's router's prefix affinity.

use rand::RngCore;
use serde::{Deserialize, Serialize};

use super::{Policy, PolicyStats};
use crate::types::{Choice, Event, RequestView, WorkerView};

/// Parameters of `cache_aware`; names and defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheAwareParams {
    /// Least matched fraction of the routing text for which affinity wins over spreading.
    pub cache_threshold: f32,
    /// Loads count as unbalanced when max - min is above this …
    pub balance_abs_threshold: usize,
    /// … and max is above this times min.
    pub balance_rel_threshold: f32,
    /// Most characters remembered per worker.
    pub max_tree_size: usize,
    /// Who gets a request whose prefix nobody holds.
    pub miss: Miss,
}

impl Default for CacheAwareParams {
    fn default() -> Self {
        Self {
            cache_threshold: 0.3,
            balance_abs_threshold: 64,
            balance_rel_threshold: 1.5,
            max_tree_size: 1 << 26,
            miss: Miss::SmallestTree,
        }
    }
}

/// Who gets a request whose prefix nobody holds well enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Miss {
    /// The worker with the fewest characters in the tree (sglang-router).
    SmallestTree,
    /// The worker with the fewest requests in flight (smg).
    LeastLoad,
}

pub struct CacheAware {
    _params: CacheAwareParams,
}

impl CacheAware {
    pub fn new(params: CacheAwareParams) -> Self {
        Self { _params: params }
    }
}

impl Policy for CacheAware {
    fn name(&self) -> &'static str {
        "cache_aware"
    }

    fn needs_text(&self) -> bool {
        true
    }

    fn choose(
        &self,
        _req: &RequestView<'_>,
        _ready: &[WorkerView],
        _rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        unimplemented!("the prefix tree comes with the next commit")
    }

    fn observe(&self, _event: &Event<'_>) {}

    fn stats(&self) -> PolicyStats {
        PolicyStats::default()
    }
}
