//! `cache_aware`: SGLang's router's prefix affinity.
//!
//! 1. If loads are unbalanced (`max - min > balance_abs_threshold` and `max > balance_rel_threshold × min`): the least
//!    loaded candidate.
//! 2. Else the longest prefix of the routing text that a candidate holds. If it covers more than `cache_threshold` of the
//!    characters: a candidate that holds it.
//! 3. Else the miss rule: the candidate with the smallest tree (`smallest_tree`), or the least loaded (`least_load`).
//!
//! In all three cases the text is remembered for the chosen worker ([`Event::Routed`]), at most `max_tree_size`
//! characters per worker, least recently sent first out.
//!
//! Where it differs from SGLang's on purpose: a node of the tree keeps all its holders, so among several holders of the
//! longest prefix the least loaded is taken (theirs remembers the last one only); ties are broken at random (theirs: the
//! first); the size limit holds at each insert (theirs: at each eviction pass); a worker that is gone leaves nothing.
//!
//! What it does not see, kept for compatibility: with fewer than `balance_abs_threshold` requests in flight rule 1 never
//! acts, so one hot system prompt pins everything to one worker (test `hot_prompt_pins_one_worker`); characters are not
//! tokens; a failed request still counts as cached.
//!
//! Budget: choose + observe < 100 µs at 128 workers and 64 KB of text (`benches/choose.rs`).

use std::str::FromStr;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use rand::RngCore;
use serde::{Deserialize, Serialize};

use super::pick::{least_loaded, min_by_key_random_tie};
use super::{Policy, PolicyStats, UnknownName};
use crate::prefix_tree::PrefixTree;
use crate::types::{Choice, Event, RequestView, Why, WorkerId, WorkerView};

/// Nodes of a worker that is gone to forget under one hold of the lock: some tens of µs.
const RETIRE_BATCH: usize = 256;

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

impl Miss {
    pub const ALL: [Miss; 2] = [Miss::SmallestTree, Miss::LeastLoad];

    pub fn name(self) -> &'static str {
        match self {
            Miss::SmallestTree => "smallest_tree",
            Miss::LeastLoad => "least_load",
        }
    }
}

impl std::fmt::Display for Miss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Miss {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|miss| miss.name() == name)
            .ok_or_else(|| UnknownName {
                what: "miss rule",
                name: name.to_owned(),
                known: Self::ALL.map(Self::name).join(", "),
            })
    }
}

/// See the module.
#[derive(Debug)]
pub struct CacheAware {
    params: CacheAwareParams,
    /// Choosing and renewing take the read side, inserting the write side.
    tree: RwLock<PrefixTree>,
}

impl CacheAware {
    pub fn new(params: CacheAwareParams) -> Self {
        let tree = RwLock::new(PrefixTree::new(params.max_tree_size));
        Self { params, tree }
    }

    fn is_unbalanced(&self, ready: &[WorkerView]) -> bool {
        let loads = || ready.iter().map(|worker| worker.load);
        let (max, min) = (loads().max().unwrap_or(0), loads().min().unwrap_or(0));
        max - min > self.params.balance_abs_threshold
            && max as f32 > self.params.balance_rel_threshold * min as f32
    }

    fn choose_by_prefix(
        &self,
        text: &str,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let tree = self.read();
        let matched = tree.longest_match(text, ready);
        let total_chars = text.chars().count();
        // An empty text divides to NaN, which is above nothing.
        if matched.chars as f32 / total_chars as f32 > self.params.cache_threshold {
            let holders = ready
                .iter()
                .copied()
                .filter(|worker| matched.is_held_by(worker.id));
            let why = Why::PrefixHit {
                matched_chars: matched.chars,
                total_chars,
            };
            return least_loaded(holders, rng).map(|worker| Choice {
                worker: worker.id,
                why,
            });
        }
        match self.params.miss {
            Miss::SmallestTree => {
                let ids = ready.iter().map(|worker| worker.id);
                min_by_key_random_tie(ids, |id| tree.chars_of(id), rng).map(|worker| Choice {
                    worker,
                    why: Why::SmallestTree,
                })
            }
            Miss::LeastLoad => choose_least_loaded(ready, rng),
        }
    }

    fn remember(&self, worker: WorkerId, text: &str) {
        if !self.read().touch(worker, text) {
            self.write().insert(worker, text);
        }
    }

    fn forget(&self, worker: WorkerId) {
        while self.write().retire(worker, RETIRE_BATCH) {}
    }

    fn read(&self) -> RwLockReadGuard<'_, PrefixTree> {
        match self.tree.read() {
            Ok(tree) => tree,
            Err(_) => {
                drop(self.write()); // starts anew
                self.tree
                    .read()
                    .unwrap_or_else(|poisoned| poisoned.into_inner())
            }
        }
    }

    /// A panic while the tree was written may have left it half changed. It is only a hint about caches, so it starts anew
    /// with the same workers rather than taking every later request down.
    fn write(&self) -> RwLockWriteGuard<'_, PrefixTree> {
        self.tree.write().unwrap_or_else(|poisoned| {
            let mut tree = poisoned.into_inner();
            let workers: Vec<WorkerId> = tree.stats().tenants.iter().map(|t| t.worker).collect();
            *tree = PrefixTree::new(self.params.max_tree_size);
            workers.into_iter().for_each(|worker| tree.add(worker));
            self.tree.clear_poison();
            tree
        })
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
        req: &RequestView<'_>,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        match ready {
            [] => None,
            [only] => Some(Choice {
                worker: only.id,
                why: Why::Only,
            }),
            _ if self.is_unbalanced(ready) => choose_least_loaded(ready, rng),
            _ => self.choose_by_prefix(req.text, ready, rng),
        }
    }

    fn observe(&self, event: &Event<'_>) {
        match *event {
            Event::Routed { worker, text } => self.remember(worker, text),
            Event::WorkerAdded { worker } => self.write().add(worker),
            Event::WorkerGone { worker } => self.forget(worker),
            // As in SGLang, a prompt counts as cached from when it is sent, whatever becomes of it.
            Event::Finished { .. } => {}
        }
    }

    fn evict(&self) -> usize {
        self.write().evict()
    }

    fn stats(&self) -> PolicyStats {
        self.read().stats()
    }
}

fn choose_least_loaded(ready: &[WorkerView], rng: &mut dyn RngCore) -> Option<Choice> {
    least_loaded(ready.iter().copied(), rng).map(|worker| Choice {
        worker: worker.id,
        why: Why::LeastLoaded,
    })
}
