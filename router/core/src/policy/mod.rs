//! Policies: one file each, all behind [`Policy`].
//!
//! A policy decides on a read-only view ([`Policy::choose`]) and learns from events ([`Policy::observe`]); it owns no
//! thread, no timer and no clock. It returns a [`WorkerId`](crate::WorkerId), not an index: indices go stale.
//!
//! Invariants: a chosen worker is one of the candidates passed in; `None` means there were none; with the same events,
//! view and rng state the choice is the same.

mod cache_aware;
mod pick;
mod power_of_two;
mod random;
mod round_robin;
#[cfg(test)]
mod testing;

use std::fmt;
use std::str::FromStr;

use rand::RngCore;
use serde::{Deserialize, Serialize};

use crate::types::{Choice, Event, RequestView, WorkerId, WorkerView};

pub use cache_aware::{CacheAware, CacheAwareParams, Miss};
pub use power_of_two::PowerOfTwo;
pub use random::Random;
pub use round_robin::RoundRobin;

/// Chooses a worker for a request.
pub trait Policy: Send + Sync {
    /// The name of its [`PolicyKind`].
    fn name(&self) -> &'static str;

    /// Whether it reads [`RequestView::text`] and [`Event::Routed`]'s text; if not, the shell need not extract them.
    fn needs_text(&self) -> bool {
        false
    }

    /// Choose among the `ready` candidates; `None` when there are none. Decides and changes nothing.
    fn choose(
        &self,
        req: &RequestView<'_>,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<Choice>;

    /// Learn what happened. Locks inside are held briefly.
    fn observe(&self, _event: &Event<'_>) {}

    /// Bring memory back under its limits; returns the characters dropped.
    fn evict(&self) -> usize {
        0
    }

    /// What it remembers, for metrics.
    fn stats(&self) -> PolicyStats {
        PolicyStats::default()
    }
}

/// What a policy remembers. All zero for policies that remember nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PolicyStats {
    /// Per worker, ordered by id.
    pub tenants: Vec<TenantStats>,
    /// Nodes of the prefix tree.
    pub nodes: usize,
    /// Text stored in the tree; shared prefixes count once.
    pub text_bytes: usize,
    /// Estimated memory of the tree: text, nodes, and who holds them.
    pub tree_bytes: usize,
    /// Characters dropped for the size limit since the start, on insert and by [`Policy::evict`].
    pub evicted_chars_total: u64,
}

/// One worker's part of the prefix tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TenantStats {
    pub worker: WorkerId,
    /// Characters of all prefixes it holds; a prefix shared by two workers counts for both.
    pub chars: usize,
}

/// The policies an operator can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    Random,
    RoundRobin,
    PowerOfTwo,
    CacheAware,
}

impl PolicyKind {
    pub const ALL: [PolicyKind; 4] = [
        PolicyKind::Random,
        PolicyKind::RoundRobin,
        PolicyKind::PowerOfTwo,
        PolicyKind::CacheAware,
    ];

    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Random => "random",
            PolicyKind::RoundRobin => "round_robin",
            PolicyKind::PowerOfTwo => "power_of_two",
            PolicyKind::CacheAware => "cache_aware",
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownName {
                what: "policy",
                name: name.to_owned(),
                known: Self::ALL.map(Self::name).join(", "),
            })
    }
}

/// A name that is not in the list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{name}'; use one of: {known}")]
pub struct UnknownName {
    pub what: &'static str,
    pub name: String,
    pub known: String,
}

/// Make the policy `kind`; `params` matter to `cache_aware` only.
pub fn build(kind: PolicyKind, params: &CacheAwareParams) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Random => Box::new(Random),
        PolicyKind::RoundRobin => Box::new(RoundRobin::default()),
        PolicyKind::PowerOfTwo => Box::new(PowerOfTwo),
        PolicyKind::CacheAware => Box::new(CacheAware::new(params.clone())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::rng;
    use super::*;

    #[test]
    fn names_are_parsed_and_a_wrong_one_is_answered_with_the_list() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(
                build(kind, &CacheAwareParams::default()).name(),
                kind.name()
            );
        }
        for miss in Miss::ALL {
            assert_eq!(miss.to_string().parse(), Ok(miss));
        }
        let error = "cache-aware".parse::<PolicyKind>().expect_err("not a name");
        assert_eq!(
            error.to_string(),
            "unknown policy 'cache-aware'; use one of: random, round_robin, power_of_two, cache_aware"
        );
    }

    proptest! {
        /// Whatever was routed, added or lost before: `None` without candidates, else one of them, and `Only` for one.
        #[test]
        fn only_candidates_are_chosen(
            kind in proptest::sample::select(PolicyKind::ALL.to_vec()),
            history in proptest::collection::vec((0u64..6, "[ab]{0,6}", any::<bool>()), 0..30),
            text in "[ab]{0,6}",
            candidates in proptest::collection::btree_map(0u64..8, 0usize..200, 0..6),
            seed in any::<u64>(),
        ) {
            let policy = build(kind, &CacheAwareParams { max_tree_size: 12, ..CacheAwareParams::default() });
            (0..5).for_each(|id| policy.observe(&Event::WorkerAdded { worker: WorkerId(id) }));
            for (id, text, is_gone) in &history {
                let worker = WorkerId(*id);
                let event = if *is_gone { Event::WorkerGone { worker } } else { Event::Routed { worker, text } };
                policy.observe(&event);
            }
            let ready: Vec<WorkerView> =
                candidates.iter().map(|(&id, &load)| WorkerView { id: WorkerId(id), load }).collect();
            let request = RequestView { text: &text, routing_key: None };
            let choice = policy.choose(&request, &ready, &mut rng(seed));
            prop_assert_eq!(choice.is_none(), ready.is_empty());
            if let Some(choice) = choice {
                prop_assert!(ready.iter().any(|worker| worker.id == choice.worker));
                prop_assert_eq!(choice.why == crate::Why::Only, ready.len() == 1);
            }
        }
    }
}
