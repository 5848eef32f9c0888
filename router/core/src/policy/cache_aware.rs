//! `cache_aware`: SGLang's router's prefix affinity.
//!
//! 1. If loads are unbalanced (`max - min > balance_abs_threshold` and
//!    `max > balance_rel_threshold × min`): the least loaded candidate.
//! 2. Else the longest prefix of the routing text that a candidate holds. If it covers more than
//!    `cache_threshold` of the characters: a candidate that holds it.
//! 3. Else the miss rule: the candidate with the smallest tree (`smallest_tree`), or the least
//!    loaded (`least_load`).
//!
//! In all three cases the text is remembered for the chosen worker ([`PolicyEvent::Routed`]), at
//! most `max_tree_size` characters per worker and `max_bytes` in all, least recently sent first
//! out.
//!
//! Where it differs from SGLang's on purpose: a node of the tree keeps all its holders, so among
//! several holders of the longest prefix the least loaded is taken (theirs remembers the last one
//! only); ties are broken at random (theirs: the first); the size limit holds at each insert
//! (theirs: at each eviction pass); a worker that is gone leaves nothing.
//!
//! Limits, kept for compatibility: with fewer than `balance_abs_threshold` requests
//! in flight rule 1 never acts, so one hot system prompt pins everything to one worker (test
//! `hot_prompt_pins_one_worker`); characters are not tokens; a failed request still counts as
//! cached.
//!
//! Budget: choose + observe < 100 µs at 128 workers and 64 KB of text (`benches/choose.rs`).

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rand::RngCore;
use strum::{Display, IntoStaticStr, VariantArray};

use super::tie_break::{least_loaded, min_by_key_random_tie};
use super::{Policy, PolicyInput, PolicyStats, named_choice};
use crate::explain::{Explanation, PolicyBasis, PolicyTerms};
use crate::prefix_tree::PrefixTree;
use crate::types::{PolicyEvent, SelectionReason, WorkerChoice, WorkerId, WorkerView};

/// Nodes of a worker that is gone to forget under one hold of the lock: some tens of µs.
const RETIRE_BATCH: usize = 256;

/// Parameters of `cache_aware`; names and defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheAwareParams {
    /// Least matched fraction of the routing text for which affinity wins over spreading.
    pub cache_threshold: f32,
    /// Loads count as unbalanced when max - min is above this …
    pub balance_abs_threshold: usize,
    /// … and max is above this times min.
    pub balance_rel_threshold: f32,
    /// Most characters remembered per worker.
    pub max_tree_size: usize,
    /// Most memory of the tree [bytes].
    pub max_bytes: usize,
    pub miss: MissPolicy,
}

impl Default for CacheAwareParams {
    fn default() -> Self {
        Self {
            cache_threshold: 0.3,
            balance_abs_threshold: 64,
            balance_rel_threshold: 1.5,
            max_tree_size: 1 << 26,
            max_bytes: 1 << 30,
            miss: MissPolicy::SmallestTree,
        }
    }
}

/// Rule for a request whose prefix no worker holds well enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum MissPolicy {
    /// The worker with the fewest characters in the tree (sglang-router).
    SmallestTree,
    /// The worker with the fewest requests in flight (smg).
    LeastLoad,
}

named_choice!(MissPolicy: "miss rule");

/// See the module.
#[derive(Debug)]
pub struct CacheAware {
    params: CacheAwareParams,
    /// Choosing and renewing take the read side, inserting the write side.
    tree: RwLock<PrefixTree<str>>,
}

impl CacheAware {
    pub fn new(params: CacheAwareParams) -> Self {
        let tree = RwLock::new(PrefixTree::new(params.max_bytes));
        Self { params, tree }
    }

    fn is_unbalanced(&self, ready: &[WorkerView]) -> bool {
        let loads = || ready.iter().map(|worker| worker.load);
        let max = loads().max().unwrap_or(0);
        let min = loads().min().unwrap_or(0);
        max - min > self.params.balance_abs_threshold
            && max as f32 > self.params.balance_rel_threshold * min as f32
    }

    fn choose_by_prefix(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        let text = input.request.text;
        let ready = input.ready;
        let rng = &mut *input.rng;
        let tree = self.read_tree();
        let matched = tree.longest_match(text, ready);
        let total_chars = text.chars().count();
        // An empty text divides to NaN, which is above nothing.
        if matched.units as f32 / total_chars as f32 > self.params.cache_threshold {
            let holders = ready
                .iter()
                .copied()
                .filter(|worker| matched.is_held_by(worker.id));
            let why = SelectionReason::PrefixHit {
                matched_chars: matched.units,
                total_chars,
            };
            let worker = least_loaded(holders, rng)?.id;
            return Some(WorkerChoice { worker, why });
        }
        match self.params.miss {
            MissPolicy::SmallestTree => {
                let ids = ready.iter().map(|worker| worker.id);
                let worker = min_by_key_random_tie(ids, |id| tree.units_of(id), rng)?;
                Some(WorkerChoice {
                    worker,
                    why: SelectionReason::SmallestTree,
                })
            }
            MissPolicy::LeastLoad => choose_least_loaded(ready, rng),
        }
    }

    fn read_tree(&self) -> RwLockReadGuard<'_, PrefixTree<str>> {
        if self.tree.is_poisoned() {
            drop(self.write_tree()); // resets it
        }
        self.tree.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// A panic while the tree was written may have left it half changed. It is only a hint about
    /// caches, so it restarts empty with the same workers rather than taking every later request
    /// down.
    fn write_tree(&self) -> RwLockWriteGuard<'_, PrefixTree<str>> {
        self.tree.write().unwrap_or_else(|poisoned| {
            let mut tree = poisoned.into_inner();
            let workers = tree.units_by_worker();
            *tree = PrefixTree::new(self.params.max_bytes);
            for (worker, _) in workers {
                tree.add_worker(worker, self.params.max_tree_size);
            }
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

    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        match input.ready {
            [] => None,
            [only] => Some(WorkerChoice {
                worker: only.id,
                why: SelectionReason::Only,
            }),
            ready if self.is_unbalanced(ready) => choose_least_loaded(ready, input.rng),
            _ => self.choose_by_prefix(input),
        }
    }

    fn explain(&self, input: &PolicyInput<'_>) -> Explanation {
        let text = input.request.text;
        let ready = input.ready;
        let mut ids: Vec<WorkerId> = ready.iter().map(|worker| worker.id).collect();
        ids.sort_unstable();
        let mut matched_units = vec![0; ids.len()];
        let tree = self.read_tree();
        tree.held_by(text, &ids, &mut matched_units);
        let basis = PolicyBasis::Prefix {
            total_chars: text.chars().count(),
            matched_chars: matched_units.iter().copied().max().unwrap_or(0),
            cache_threshold: self.params.cache_threshold,
            is_unbalanced: self.is_unbalanced(ready),
        };
        let terms = |worker: &WorkerView| PolicyTerms::Prefix {
            matched_chars: ids
                .binary_search(&worker.id)
                .map_or(0, |index| matched_units[index]),
            tree_chars: tree.units_of(worker.id),
        };
        Explanation::for_candidates(self.name(), basis, ready, terms)
    }

    fn observe(&self, event: &PolicyEvent<'_>) {
        match *event {
            PolicyEvent::Routed {
                worker, request, ..
            } => {
                if !self.read_tree().touch_path(worker, request.text) {
                    self.write_tree().insert(worker, request.text);
                }
            }
            PolicyEvent::WorkerAdded { worker, .. } => {
                self.write_tree()
                    .add_worker(worker, self.params.max_tree_size);
            }
            PolicyEvent::WorkerGone { worker } => {
                while self.write_tree().retire_worker(worker, RETIRE_BATCH) {}
            }
            // As in SGLang, a prompt counts as cached from when it is sent, whatever its outcome.
            PolicyEvent::FirstToken { .. }
            | PolicyEvent::Usage { .. }
            | PolicyEvent::Finished { .. }
            | PolicyEvent::Reported { .. } => {}
        }
    }

    fn evict(&self, _now_ms: u64) -> usize {
        self.write_tree().evict()
    }

    fn stats(&self, _now_ms: u64) -> PolicyStats {
        let tree = self.read_tree();
        let chars = tree.units_by_worker();
        let index_bytes = tree.bytes();
        let evicted_total = tree.evicted_units_total();
        PolicyStats {
            chars,
            index_bytes,
            evicted_total,
            ..PolicyStats::default()
        }
    }
}

fn choose_least_loaded(ready: &[WorkerView], rng: &mut dyn RngCore) -> Option<WorkerChoice> {
    let worker = least_loaded(ready.iter().copied(), rng)?.id;
    Some(WorkerChoice {
        worker,
        why: SelectionReason::LeastLoaded,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;
    use crate::policy::testing::{TestSender, chosen, rng, views};
    use crate::types::WorkerFacts;

    fn policy_for(workers: u64, params: CacheAwareParams) -> CacheAware {
        let policy = CacheAware::new(params);
        (0..workers).for_each(|id| {
            policy.observe(&PolicyEvent::WorkerAdded {
                worker: WorkerId(id),
                facts: WorkerFacts::default(),
            })
        });
        policy
    }

    fn routed(policy: &CacheAware, worker: u64, text: &str) {
        TestSender::default().routed(policy, worker, text);
    }

    #[test]
    fn prefix_above_the_threshold_wins_at_it_does_not() {
        let policy = policy_for(
            2,
            CacheAwareParams {
                cache_threshold: 0.5,
                ..Default::default()
            },
        );
        routed(&policy, 0, "0123456789");
        let ready = views(&[3, 0]);
        let hit = chosen(&policy, "01234567é🦀", &ready, &mut rng(1));
        assert_eq!(hit.worker, WorkerId(0));
        assert_eq!(
            hit.why,
            SelectionReason::PrefixHit {
                matched_chars: 8,
                total_chars: 10
            }
        );
        let at_threshold = chosen(&policy, "01234éèéèé", &ready, &mut rng(1));
        assert_eq!(
            at_threshold,
            WorkerChoice {
                worker: WorkerId(1),
                why: SelectionReason::SmallestTree
            }
        );
    }

    #[test]
    fn least_loaded_of_all_holders_gets_the_hit() {
        let policy = policy_for(4, CacheAwareParams::default());
        for worker in [0, 1, 3] {
            routed(&policy, worker, "shared prompt");
        }
        let taken = chosen(
            &policy,
            "shared prompt, more",
            &views(&[5, 2, 0, 4]),
            &mut rng(1),
        );
        assert_eq!(taken.worker, WorkerId(1));
    }

    #[test]
    fn longest_prefix_of_a_candidate_counts_when_its_best_holder_is_not_ready() {
        let policy = policy_for(3, CacheAwareParams::default());
        routed(&policy, 0, "abcdefgh");
        routed(&policy, 1, "abcdef__");
        let ready = views(&[0, 0, 0])[1..].to_vec();
        let taken = chosen(&policy, "abcdefgh", &ready, &mut rng(1));
        let why = SelectionReason::PrefixHit {
            matched_chars: 6,
            total_chars: 8,
        };
        assert_eq!(
            taken,
            WorkerChoice {
                worker: WorkerId(1),
                why
            }
        );
    }

    #[test]
    fn loads_are_unbalanced_only_above_both_thresholds() {
        let policy = policy_for(2, CacheAwareParams::default());
        let cases = [
            (64, 0, false),    // not above 64
            (65, 0, true),     // 65 > 64 and 65 > 0
            (200, 130, true),  // 70 > 64 and 200 > 195
            (195, 130, false), // 65 > 64 but 195 = 1.5 × 130
            (300, 230, false), // 70 > 64 but 300 < 345
        ];
        for (max, min, expected) in cases {
            assert_eq!(
                policy.is_unbalanced(&views(&[min, max])),
                expected,
                "{max} {min}"
            );
        }
    }

    #[test]
    fn when_unbalanced_the_least_loaded_is_taken_and_learns_the_text() {
        let policy = policy_for(2, CacheAwareParams::default());
        routed(&policy, 0, "hot prompt");
        let taken = chosen(&policy, "hot prompt", &views(&[65, 0]), &mut rng(1));
        assert_eq!(
            taken,
            WorkerChoice {
                worker: WorkerId(1),
                why: SelectionReason::LeastLoaded
            }
        );
        routed(&policy, 1, "hot prompt");
        let again = chosen(&policy, "hot prompt", &views(&[60, 0]), &mut rng(1));
        assert_eq!(again.worker, WorkerId(1));
    }

    #[test]
    fn miss_goes_to_the_smallest_tree_or_the_least_load() {
        for (miss, worker, why) in [
            (MissPolicy::SmallestTree, 1, SelectionReason::SmallestTree),
            (MissPolicy::LeastLoad, 0, SelectionReason::LeastLoaded),
        ] {
            let policy = policy_for(
                2,
                CacheAwareParams {
                    miss,
                    ..Default::default()
                },
            );
            routed(&policy, 0, "a longer text");
            routed(&policy, 1, "b text");
            let taken = chosen(&policy, "something new", &views(&[0, 3]), &mut rng(1));
            assert_eq!(
                taken,
                WorkerChoice {
                    worker: WorkerId(worker),
                    why
                }
            );
            let empty = chosen(&policy, "", &views(&[0, 3]), &mut rng(1));
            assert_eq!(empty.why, why);
        }
    }

    /// `requests` with one system prompt of 4900 characters and their own questions, `concurrency`
    /// of them in flight, the oldest ending first. Returns how many each of four workers got.
    fn hot_prompt(params: CacheAwareParams, requests: usize, concurrency: usize) -> [usize; 4] {
        let policy = policy_for(4, params);
        let system =
            "You are a careful assistant of the example company. ".repeat(95)[..4_900].to_owned();
        let mut loads = [0usize; 4];
        let mut counts = [0usize; 4];
        let mut rng = rng(17);
        let mut in_flight = VecDeque::new();
        for i in 0..requests {
            if in_flight.len() == concurrency {
                let worker: WorkerId = in_flight.pop_front().expect("concurrency is above zero");
                loads[worker.0 as usize] -= 1;
            }
            let text = format!("{system}Question {i}: what is {i} times {}?", i * 7);
            let worker = chosen(&policy, &text, &views(&loads), &mut rng).worker;
            routed(&policy, worker.0, &text);
            loads[worker.0 as usize] += 1;
            counts[worker.0 as usize] += 1;
            in_flight.push_back(worker);
        }
        counts
    }

    /// Behavior of this rule, and the reason there are better ones: sglang-router 0.3.2 with
    /// default flags sends 400 of 400 such requests to one worker at 16 and at 48 in flight,
    /// because the absolute threshold of 64 cannot be exceeded.
    #[test]
    fn hot_prompt_pins_one_worker() {
        for (concurrency, miss) in [
            (16, MissPolicy::SmallestTree),
            (48, MissPolicy::SmallestTree),
            (48, MissPolicy::LeastLoad),
        ] {
            let mut counts = hot_prompt(
                CacheAwareParams {
                    miss,
                    ..Default::default()
                },
                400,
                concurrency,
            );
            counts.sort_unstable();
            assert_eq!(counts, [0, 0, 0, 400], "{concurrency} in flight");
        }
    }

    #[test]
    fn hot_prompt_spreads_once_more_are_in_flight_than_the_threshold() {
        let counts = hot_prompt(CacheAwareParams::default(), 400, 128);
        assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
        let lower = CacheAwareParams {
            balance_abs_threshold: 4,
            ..Default::default()
        };
        let counts = hot_prompt(lower, 400, 48);
        assert!(counts.iter().all(|&count| count > 50), "{counts:?}");
    }

    proptest! {
        /// The rule again, naively, over a list of routed texts: the choice is one that rule
        /// allows.
        #[test]
        fn choice_is_one_the_naive_rule_allows(
            history in proptest::collection::vec((0u64..4, "[abé]{0,6}"), 0..12),
            text in "[abé]{0,6}",
            loads in proptest::collection::vec(0usize..6, 4),
            miss in proptest::sample::select(MissPolicy::ALL.to_vec()),
            seed in any::<u64>(),
        ) {
            let params = CacheAwareParams {
                balance_abs_threshold: 3, balance_rel_threshold: 2.0, miss, ..Default::default()
            };
            let policy = policy_for(4, params);
            history.iter().for_each(|(worker, text)| routed(&policy, *worker, text));
            let choice = chosen(&policy, &text, &views(&loads), &mut rng(seed));

            let common = |other: &str| text.chars().zip(other.chars()).take_while(|(a, b)| a == b).count();
            let sent_to = |worker: usize| history.iter().filter(move |(id, _)| *id == worker as u64);
            let matched: Vec<usize> =
                (0..4).map(|w| sent_to(w).map(|(_, text)| common(text)).max().unwrap_or(0)).collect();
            let tree_size = |worker: usize| {
                let prefixes = sent_to(worker)
                    .flat_map(|(_, text)| text.char_indices().map(|(at, c)| &text[..at + c.len_utf8()]));
                prefixes.collect::<std::collections::BTreeSet<_>>().len()
            };
            let least = |key: &dyn Fn(usize) -> usize, among: Vec<usize>| -> Vec<u64> {
                let least = among.iter().map(|&w| key(w)).min().unwrap_or(0);
                among.into_iter().filter(|&w| key(w) == least).map(|w| w as u64).collect()
            };
            let max = loads.iter().max().unwrap_or(&0);
            let min = loads.iter().min().unwrap_or(&0);
            let best = *matched.iter().max().unwrap_or(&0);
            let by_load = |worker: usize| loads[worker];
            let allowed = if max - min > 3 && *max > 2 * min {
                prop_assert_eq!(choice.why, SelectionReason::LeastLoaded);
                least(&by_load, (0..4).collect())
            } else if best * 10 > 3 * text.chars().count() {
                let why = SelectionReason::PrefixHit { matched_chars: best, total_chars: text.chars().count() };
                prop_assert_eq!(choice.why, why);
                least(&by_load, (0..4).filter(|&w| matched[w] == best).collect())
            } else if miss == MissPolicy::SmallestTree {
                prop_assert_eq!(choice.why, SelectionReason::SmallestTree);
                least(&tree_size, (0..4).collect())
            } else {
                prop_assert_eq!(choice.why, SelectionReason::LeastLoaded);
                least(&by_load, (0..4).collect())
            };
            prop_assert!(allowed.contains(&choice.worker.0), "{:?} not in {:?}", choice, allowed);
        }
    }

    #[test]
    fn choosing_changes_nothing() {
        let policy = policy_for(3, CacheAwareParams::default());
        routed(&policy, 0, "abc");
        let before = policy.stats(0);
        for seed in 0..20 {
            chosen(&policy, "abcdef", &views(&[0, 0, 0]), &mut rng(seed));
        }
        assert_eq!(policy.stats(0), before);
    }

    #[test]
    fn late_events_of_a_worker_that_is_gone_leave_nothing() {
        let policy = policy_for(2, CacheAwareParams::default());
        routed(&policy, 0, "abc");
        policy.observe(&PolicyEvent::WorkerGone {
            worker: WorkerId(0),
        });
        routed(&policy, 0, "abc");
        let stats = policy.stats(0);
        assert_eq!(
            (policy.read_tree().nodes_and_label_bytes().0, stats.chars),
            (0, vec![(WorkerId(1), 0)])
        );
    }

    #[test]
    fn threads_leave_a_tree_within_its_limits() {
        let policy = policy_for(
            4,
            CacheAwareParams {
                max_tree_size: 400,
                ..Default::default()
            },
        );
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let policy = &policy;
                scope.spawn(move || {
                    let mut rng = rng(thread);
                    for i in 0..2_000u64 {
                        let text = format!("common part {} tail {}", i % 7, (i * 31 + thread) % 90);
                        let worker = chosen(policy, &text, &views(&[1, 1, 1, 1]), &mut rng).worker;
                        routed(policy, worker.0, &text);
                    }
                });
            }
        });
        assert!(policy.stats(0).chars.iter().all(|&(_, chars)| chars <= 400));
        (0..4).for_each(|id| {
            policy.observe(&PolicyEvent::WorkerGone {
                worker: WorkerId(id),
            })
        });
        assert_eq!(policy.read_tree().nodes_and_label_bytes(), (0, 0));
    }

    #[test]
    fn panic_under_the_lock_costs_the_memory_not_the_service() {
        let policy = policy_for(2, CacheAwareParams::default());
        routed(&policy, 0, "abc");
        let panicked = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _tree = policy.tree.write();
                panic!("on purpose, to poison the lock");
            });
            thread.join()
        });
        assert!(panicked.is_err() && policy.tree.is_poisoned());
        assert_eq!(
            chosen(&policy, "abc", &views(&[0, 0]), &mut rng(1)).why,
            SelectionReason::SmallestTree
        );
        routed(&policy, 1, "abc");
        assert_eq!(
            chosen(&policy, "abc", &views(&[0, 0]), &mut rng(1)).worker,
            WorkerId(1)
        );
    }
}
