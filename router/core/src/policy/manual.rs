//! `manual`: the client's key decides. The first request with a key is assigned a worker, later
//! ones follow it.
//!
//! The life of a key (header `x-smg-routing-key`, smg's name):
//!
//! 1. first seen: a worker by `assignment_mode`, remembered when the request is sent
//!    ([`PolicyEvent::Routed`]);
//! 2. seen again: the first of its workers that is a candidate now. If none is, another is assigned
//!    and remembered too, at most two, the older one first out; when the first comes back as the
//!    same candidate, the key returns to it;
//! 3. not seen for `max_idle_secs`: forgotten by [`Policy::evict`]; with `max_keys` keys known, the
//!    one not seen longest makes room on insert.
//!
//! New workers take no keys away from others. A worker that was gone comes back as a new candidate
//! (its memory of the session is gone too), so keys do not return to it, unlike smg, which knows
//! workers by address. Requests without a key go to a random candidate. Keys are kept as 128 bit
//! hashes, so that a key's length costs nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rand::{Rng, RngCore};
use strum::{Display, IntoStaticStr, VariantArray};

use super::tie_break::{least_loaded, min_by_key_random_tie};
use super::{Policy, PolicyInput, PolicyStats, named_choice};
use crate::explain::{Explanation, PolicyBasis, PolicyTerms};
use crate::types::{PolicyEvent, RequestView, SelectionReason, WorkerChoice, WorkerId, WorkerView};

/// Workers remembered for a key: the assigned one and its stand-in.
const MAX_WORKERS: usize = 2;

/// Parameters of `manual`; names and defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManualParams {
    pub assignment_mode: AssignmentMode,
    /// A key not seen for this long is forgotten.
    pub max_idle_secs: u64,
    /// Most keys remembered; about 150 bytes each.
    pub max_keys: usize,
}

impl Default for ManualParams {
    fn default() -> Self {
        Self {
            assignment_mode: AssignmentMode::Random,
            max_idle_secs: 14_400,
            max_keys: 1_000_000,
        }
    }
}

/// Rule for a key that has no worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum AssignmentMode {
    Random,
    /// The worker with the fewest requests in flight.
    MinLoad,
    /// The worker with the fewest keys.
    MinGroup,
}

named_choice!(AssignmentMode: "assignment mode");

/// See the module.
#[derive(Debug)]
pub struct ManualPolicy {
    params: ManualParams,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    keys: HashMap<u128, Key>,
    /// By when they were last seen.
    idle: BTreeMap<u64, u128>,
    /// Keys per worker; only workers that were added.
    groups: HashMap<WorkerId, usize>,
    turn: u64,
    evicted_total: u64,
}

#[derive(Debug, Default)]
struct Key {
    /// Oldest first, at most `MAX_WORKERS`.
    workers: VecDeque<WorkerId>,
    seen_ms: u64,
    /// Place in `idle`.
    turn: u64,
}

impl ManualPolicy {
    pub fn new(params: ManualParams) -> Self {
        let state = Mutex::default();
        Self { params, state }
    }

    /// Each change is complete in itself: what a panic left is at worst one key with a place in no
    /// list.
    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn assign_worker(&self, ready: &[WorkerView], rng: &mut dyn RngCore) -> Option<WorkerId> {
        match self.params.assignment_mode {
            AssignmentMode::Random => random_worker(ready, rng),
            AssignmentMode::MinLoad => least_loaded(ready.iter().copied(), rng).map(|w| w.id),
            AssignmentMode::MinGroup => {
                let state = self.lock_state();
                let keys = |id: WorkerId| state.groups.get(&id).copied().unwrap_or(0);
                min_by_key_random_tie(ready.iter().map(|worker| worker.id), keys, rng)
            }
        }
    }
}

fn random_worker(ready: &[WorkerView], rng: &mut dyn RngCore) -> Option<WorkerId> {
    let index = (!ready.is_empty()).then(|| rng.random_range(0..ready.len()))?;
    Some(ready[index].id)
}

/// Hash of the request's key; an empty one counts as none.
fn key_of(request: &RequestView<'_>) -> Option<u128> {
    let key = request.routing_key.filter(|key| !key.is_empty())?;
    let half = |salt: u8| {
        let mut hasher = DefaultHasher::new();
        (salt, key).hash(&mut hasher);
        u128::from(hasher.finish())
    };
    Some(half(0) << 64 | half(1))
}

impl State {
    fn record_use(&mut self, key: u128, worker: WorkerId, now_ms: u64, max_keys: usize) {
        if !self.groups.contains_key(&worker) {
            return;
        }
        while self.keys.len() >= max_keys.max(1) && !self.keys.contains_key(&key) {
            let Some((_, oldest)) = self.idle.pop_first() else {
                break;
            };
            self.forget_key(oldest);
        }
        self.turn += 1;
        let entry = self.keys.entry(key).or_default();
        self.idle.remove(&entry.turn);
        entry.turn = self.turn;
        entry.seen_ms = now_ms;
        self.idle.insert(self.turn, key);
        if entry.workers.contains(&worker) {
            return;
        }
        entry.workers.push_back(worker);
        *self.groups.entry(worker).or_default() += 1;
        if entry.workers.len() > MAX_WORKERS
            && let Some(gone) = entry.workers.pop_front()
            && let Some(keys) = self.groups.get_mut(&gone)
        {
            *keys -= 1;
        }
    }

    fn forget_key(&mut self, key: u128) {
        let Some(entry) = self.keys.remove(&key) else {
            return;
        };
        self.idle.remove(&entry.turn);
        self.evicted_total += 1;
        for worker in entry.workers {
            if let Some(keys) = self.groups.get_mut(&worker) {
                *keys -= 1;
            }
        }
    }
}

impl Policy for ManualPolicy {
    fn name(&self) -> &'static str {
        "manual"
    }

    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        let is_ready = |id: &&WorkerId| input.ready.iter().any(|worker| worker.id == **id);
        let ready_holder = |key: u128| {
            self.lock_state()
                .keys
                .get(&key)?
                .workers
                .iter()
                .find(is_ready)
                .copied()
        };
        let (worker, why) = if let [only] = input.ready {
            (only.id, SelectionReason::Only)
        } else if let Some(key) = key_of(input.request) {
            match ready_holder(key) {
                Some(worker) => (worker, SelectionReason::Sticky),
                None => (
                    self.assign_worker(input.ready, input.rng)?,
                    SelectionReason::NewKey,
                ),
            }
        } else {
            (
                random_worker(input.ready, input.rng)?,
                SelectionReason::NoKey,
            )
        };
        Some(WorkerChoice { worker, why })
    }

    fn explain(&self, input: &PolicyInput<'_>) -> Explanation {
        let key = key_of(input.request);
        let state = self.lock_state();
        let key_entry = key.and_then(|key| state.keys.get(&key));
        let terms = |worker: &WorkerView| PolicyTerms::Key {
            keys: state.groups.get(&worker.id).copied().unwrap_or(0),
            holds_key: key_entry.is_some_and(|entry| entry.workers.contains(&worker.id)),
        };
        let basis = PolicyBasis::Key {
            has_key: key.is_some(),
        };
        Explanation::for_candidates(self.name(), basis, input.ready, terms)
    }

    fn observe(&self, event: &PolicyEvent<'_>) {
        match *event {
            PolicyEvent::Routed {
                worker, request, ..
            } => {
                if let Some(key) = key_of(request) {
                    self.lock_state()
                        .record_use(key, worker, request.now_ms, self.params.max_keys);
                }
            }
            PolicyEvent::WorkerAdded { worker, .. } => {
                self.lock_state().groups.entry(worker).or_default();
            }
            PolicyEvent::WorkerGone { worker } => {
                self.lock_state().groups.remove(&worker);
            }
            PolicyEvent::FirstToken { .. }
            | PolicyEvent::Usage { .. }
            | PolicyEvent::Finished { .. }
            | PolicyEvent::Reported { .. } => {}
        }
    }

    fn evict(&self, now_ms: u64) -> usize {
        let mut state = self.lock_state();
        let mut forgotten = 0;
        while let Some((_, &key)) = state.idle.first_key_value() {
            let seen_ms = state.keys.get(&key).map_or(0, |entry| entry.seen_ms);
            if now_ms.saturating_sub(seen_ms) / 1000 < self.params.max_idle_secs {
                break;
            }
            state.forget_key(key);
            forgotten += 1;
        }
        forgotten
    }

    fn stats(&self, _now_ms: u64) -> PolicyStats {
        let state = self.lock_state();
        let keys = state.keys.len();
        let evicted_total = state.evicted_total;
        PolicyStats {
            keys,
            evicted_total,
            ..PolicyStats::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::testing::{TestSender, rng, views};
    use crate::types::WorkerFacts;

    fn policy_for(workers: u64, params: ManualParams) -> ManualPolicy {
        let policy = ManualPolicy::new(params);
        for id in 0..workers {
            policy.observe(&PolicyEvent::WorkerAdded {
                worker: WorkerId(id),
                facts: WorkerFacts::default(),
            });
        }
        policy
    }

    #[test]
    fn key_stays_with_its_worker_and_returns_to_it() {
        let policy = policy_for(3, ManualParams::default());
        let mut sender = TestSender::default();
        let mut rng = rng(3);
        let all = views(&[0, 0, 0]);
        let first = sender.keyed(&policy, "session", &all, &mut rng);
        assert_eq!(first.why, SelectionReason::NewKey);
        for load in 0..20 {
            let again = sender.keyed(&policy, "session", &views(&[load, 9, 3]), &mut rng);
            assert_eq!(
                again,
                WorkerChoice {
                    worker: first.worker,
                    why: SelectionReason::Sticky
                }
            );
        }
        let others: Vec<_> = all
            .iter()
            .copied()
            .filter(|w| w.id != first.worker)
            .collect();
        let stand_in = sender.keyed(&policy, "session", &others, &mut rng);
        assert_eq!(stand_in.why, SelectionReason::NewKey);
        assert_eq!(
            sender.keyed(&policy, "session", &others, &mut rng).worker,
            stand_in.worker
        );
        assert_eq!(
            sender.keyed(&policy, "session", &all, &mut rng).worker,
            first.worker
        );
    }

    #[test]
    fn new_keys_go_where_the_mode_says_and_no_key_is_random() {
        let mut sender = TestSender::default();
        let mut rng = rng(5);
        for &mode in AssignmentMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
            let policy = policy_for(
                3,
                ManualParams {
                    assignment_mode: mode,
                    ..Default::default()
                },
            );
            let mut counts = [0usize; 3];
            for i in 0..300 {
                let loads = [counts[0], counts[1] + 50, counts[2]];
                let choice = sender.keyed(&policy, &format!("key {i}"), &views(&loads), &mut rng);
                counts[choice.worker.0 as usize] += 1;
            }
            match mode {
                AssignmentMode::Random => {
                    assert!(counts.iter().all(|n| (60..140).contains(n)), "{counts:?}")
                }
                AssignmentMode::MinLoad => assert!((65..=68).contains(&counts[1]), "{counts:?}"),
                AssignmentMode::MinGroup => assert_eq!(counts, [100, 100, 100]),
            }
            for key in ["", "unused"].map(|key| (!key.is_empty()).then_some(key)) {
                let request = RequestView {
                    routing_key: key,
                    ..Default::default()
                };
                let ready = &views(&[0, 0]);
                let rng = &mut rng;
                let mut input = PolicyInput {
                    request: &request,
                    ready,
                    rng,
                    explains: false,
                };
                let why = policy.choose(&mut input).map(|choice| choice.why);
                assert_eq!(
                    why,
                    Some(if key.is_none() {
                        SelectionReason::NoKey
                    } else {
                        SelectionReason::NewKey
                    })
                );
            }
        }
        assert!("least".parse::<AssignmentMode>().is_err());
    }

    #[test]
    fn idle_keys_are_forgotten() {
        let policy = policy_for(
            2,
            ManualParams {
                max_idle_secs: 10,
                ..Default::default()
            },
        );
        let mut sender = TestSender::default();
        let mut rng = rng(1);
        let all = views(&[0, 0]);
        sender.keyed(&policy, "a", &all, &mut rng);
        sender.now_ms = 6_000;
        sender.keyed(&policy, "b", &all, &mut rng);
        assert_eq!(
            (
                policy.evict(9_999),
                policy.evict(10_000),
                policy.stats(0).keys
            ),
            (0, 1, 1)
        );
        assert_eq!((policy.evict(16_000), policy.stats(0).keys), (1, 0));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Send { key: u8, ready: Vec<u64> },
        Gone(u64),
        Evict,
        Wait(u64),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            8 => (0u8..5, proptest::sample::subsequence(vec![0, 1, 2, 3], 1..=4))
                .prop_map(|(key, ready)| Op::Send { key, ready }),
            1 => (0u64..4).prop_map(Op::Gone),
            1 => Just(Op::Evict),
            2 => (0u64..8).prop_map(Op::Wait),
        ]
    }

    proptest! {
        /// Against a list of (key, workers, last seen), newest last.
        #[test]
        fn keys_follow_the_naive_model(ops in proptest::collection::vec(op(), 1..60), seed in any::<u64>()) {
            let params = ManualParams { max_idle_secs: 10, max_keys: 3, ..Default::default() };
            let policy = policy_for(4, params);
            let mut sender = TestSender::default();
            let mut rng = rng(seed);
            let mut model: Vec<(u8, Vec<u64>, u64)> = Vec::new();
            let mut alive = [true; 4];
            for op in ops {
                match op {
                    Op::Wait(secs) => sender.now_ms += secs * 1000,
                    Op::Gone(id) => {
                        policy.observe(&PolicyEvent::WorkerGone { worker: WorkerId(id) });
                        alive[id as usize] = false;
                    }
                    Op::Evict => {
                        policy.evict(sender.now_ms);
                        model.retain(|(_, _, seen)| sender.now_ms - seen < 10_000);
                    }
                    Op::Send { key, ready } => {
                        let ready: Vec<_> = ready.into_iter().filter(|&id| alive[id as usize]).collect();
                        let all = views(&[0; 4]);
                        let shown: Vec<_> = all.into_iter().filter(|w| ready.contains(&w.id.0)).collect();
                        if shown.is_empty() {
                            continue;
                        }
                        let choice = sender.keyed(&policy, &format!("k{key}"), &shown, &mut rng);
                        let at = model.iter().position(|(known, _, _)| *known == key);
                        let mut entry = match at {
                            Some(at) => model.remove(at),
                            None => {
                                if model.len() == 3 {
                                    model.remove(0);
                                }
                                (key, Vec::new(), 0)
                            }
                        };
                        let known = entry.1.iter().copied().find(|id| ready.contains(id));
                        if let Some(known) = known {
                            prop_assert_eq!(choice.worker.0, known);
                        } else {
                            entry.1.push(choice.worker.0);
                            if entry.1.len() > 2 {
                                entry.1.remove(0);
                            }
                        }
                        prop_assert_eq!(choice.why == SelectionReason::Sticky, known.is_some() && shown.len() > 1);
                        entry.2 = sender.now_ms;
                        model.push(entry);
                    }
                }
                prop_assert_eq!(policy.stats(0).keys, model.len());
                let state = policy.lock_state();
                for (worker, keys) in &state.groups {
                    let held = model.iter().filter(|(_, workers, _)| workers.contains(&worker.0)).count();
                    prop_assert_eq!(*keys, held);
                }
                prop_assert_eq!(state.idle.len(), state.keys.len());
            }
        }
    }
}
