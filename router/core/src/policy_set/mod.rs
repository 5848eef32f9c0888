//! The policies of a router, one per role, and the only access to them: all questions and
//! observations pass here, and with a [`Journal`] is written down in the order in which it
//! happened, so that [`replay`](crate::policy_set::replay) can do it again.
//!
//! Without a journal this adds nothing to the policies but a match on `None`. With one, calls are
//! made one at a time: the order of the lines is the order in which the policies saw the events,
//! and replay repeats that order.

/// Decisions repeated from a log.
pub mod replay;

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use rand::RngCore;

use crate::decision_log::{ChangeRecord, DecisionInput, LogEntry, LogLine, LogSink, ObservedEvent};
use crate::kv::{CacheUpdate, CacheUpdateError};
use crate::pairing::fingerprint::WorkerFingerprint;
use crate::policy::{
    ExplainedChoice, IsCompatible, Policy, PolicyInput, PolicyKind, PolicyParams, build_policy,
    decide_pair,
};
use crate::types::{
    PolicyEvent, Role, RoutingRequest, SendTicket, WorkerChoice, WorkerFacts, WorkerId, WorkerView,
};

/// See the module.
pub struct PolicySet {
    /// By [`Role::index`].
    policies: [Arc<dyn Policy>; 3],
    journal: Option<Journal>,
}

/// Where it is written down.
struct Journal {
    sink: Box<dyn LogSink>,
    /// Number of the next line.
    turn: Mutex<u64>,
    /// Tells prompts and keys apart without showing them; drawn at random for each run.
    secret: u64,
}

impl PolicySet {
    pub fn new(kind: impl Fn(Role) -> PolicyKind, params: &PolicyParams) -> Self {
        let policies = Role::ALL.map(|role| Arc::from(build_policy(kind(role), role, params)));
        Self {
            policies,
            journal: None,
        }
    }

    /// Write down everything from here on: call it before anything happens.
    pub fn with_journal(mut self, sink: Box<dyn LogSink>, secret: u64) -> Self {
        self.journal = Some(Journal {
            sink,
            turn: Mutex::new(0),
            secret,
        });
        self
    }

    pub fn policy(&self, role: Role) -> &dyn Policy {
        &*self.policies[role.index()]
    }

    /// Answers whether anything reads the text, and the block hashes, of prompts sent to these
    /// roles. A journal holds hashes.
    pub fn prompt_needs(&self, roles: &[Role]) -> (bool, bool) {
        let policies = || roles.iter().map(|role| self.policy(*role));
        let needs_blocks = self.journal.is_some() || policies().any(Policy::needs_blocks);
        (policies().any(Policy::needs_text), needs_blocks)
    }

    /// Choose among `ready` and tell the policy that the request is sent there.
    pub fn decide(
        &self,
        role: Role,
        routing: &RoutingRequest<'_>,
        ready: &[WorkerView],
        ticket: SendTicket,
    ) -> Option<ExplainedChoice> {
        let input = self.decision_input(role, routing, [(ready, ticket)]);
        let decide = || {
            let decided = self.select_worker(role, routing, ready)?;
            self.observe_routed(role, routing, decided.0, ticket);
            Some(decided)
        };
        self.run_journaled(decide, |decided| {
            let choices = vec![decided.as_ref().map(|(choice, _)| *choice)];
            Some(LogEntry::Decided {
                asked: input?,
                choices,
            })
        })
    }

    /// A prefill and a decode worker; together where the policies can.
    pub fn decide_pair(
        &self,
        routing: &RoutingRequest<'_>,
        ready: [&[WorkerView]; 2],
        constraints: Option<&PairConstraints>,
        tickets: [SendTicket; 2],
    ) -> Option<[ExplainedChoice; 2]> {
        let sides = [(ready[0], tickets[0]), (ready[1], tickets[1])];
        let input =
            self.decision_input(Role::Prefill, routing, sides)
                .map(|input| match constraints.cloned() {
                    None => input,
                    Some(constraints) => DecisionInput {
                        fingerprints: Some(constraints.fingerprints),
                        excluded_pairs: constraints.excluded,
                        ..input
                    },
                });
        let decide = || {
            let pair = self.select_pair(routing, ready, constraints)?;
            self.observe_routed(Role::Prefill, routing, pair[0].0, tickets[0]);
            self.observe_routed(Role::Decode, routing, pair[1].0, tickets[1]);
            Some(pair)
        };
        self.run_journaled(decide, |decided| {
            let choices = match decided {
                Some(pair) => pair.iter().map(|(choice, _)| Some(*choice)).collect(),
                None => vec![None, None],
            };
            Some(LogEntry::Decided {
                asked: input?,
                choices,
            })
        })
    }

    /// Decide without effect: nothing is sent, learned or written down.
    pub fn select_worker(
        &self,
        role: Role,
        routing: &RoutingRequest<'_>,
        ready: &[WorkerView],
    ) -> Option<ExplainedChoice> {
        let RoutingRequest {
            request,
            seed,
            explains,
            ..
        } = routing;
        let explains = *explains;
        let rng = &mut SplitMix64(*seed);
        self.policy(role).decide(&mut PolicyInput {
            request,
            ready,
            rng,
            explains,
        })
    }

    /// The same for a pair.
    pub fn select_pair(
        &self,
        routing: &RoutingRequest<'_>,
        ready: [&[WorkerView]; 2],
        constraints: Option<&PairConstraints>,
    ) -> Option<[ExplainedChoice; 2]> {
        let [p, d] = [Role::Prefill, Role::Decode].map(|role| self.policy(role));
        let is_compatible = constraints.map(|constraints| constraints.compatibility_test(ready));
        let rng = &mut SplitMix64(routing.seed);
        let is_compatible = is_compatible.as_deref();
        decide_pair(
            p,
            d,
            &routing.request,
            ready,
            is_compatible,
            rng,
            routing.explains,
        )
    }

    /// A candidate is there; `name` is for readers of the log.
    pub fn add_worker(&self, role: Role, worker: WorkerId, facts: WorkerFacts, name: &str) {
        self.observe_named(
            role,
            &PolicyEvent::WorkerAdded { worker, facts },
            Some(name),
        );
    }

    /// Tell the role's policy what happened. Not for `Routed`, which [`PolicySet::decide`] tells
    /// itself.
    pub fn observe(&self, role: Role, event: &PolicyEvent<'_>) {
        self.observe_named(role, event, None);
    }

    /// A worker's replica tells what the worker has cached; only `cost` listens.
    pub fn apply_cache_update(
        &self,
        role: Role,
        worker: WorkerId,
        update: &CacheUpdate<'_>,
    ) -> Result<(), CacheUpdateError> {
        let cost = self
            .policy(role)
            .as_cost()
            .ok_or(CacheUpdateError::Forgotten)?;
        self.run_journaled(
            || cost.apply_cache_update(worker, update),
            |_| {
                let update = update.map_changes(|changes| ChangeRecord::from_changes(changes));
                Some(LogEntry::Cached {
                    role,
                    worker,
                    update,
                })
            },
        )
    }

    fn observe_named(&self, role: Role, event: &PolicyEvent<'_>, name: Option<&str>) {
        let observe = || self.policy(role).observe(event);
        self.run_journaled(observe, |()| {
            let observed = ObservedEvent::from_event(event, name)?;
            Some(LogEntry::Observed { role, observed })
        });
    }

    /// Bring the policies' memory under its limits; returns the characters or keys dropped.
    pub fn evict(&self, now_ms: u64) -> usize {
        let evict = |role: Role| {
            let evict = || self.policy(role).evict(now_ms);
            self.run_journaled(evict, |_| Some(LogEntry::Evict { role, now_ms }))
        };
        Role::ALL.into_iter().map(evict).sum()
    }

    fn observe_routed(
        &self,
        role: Role,
        routing: &RoutingRequest<'_>,
        choice: WorkerChoice,
        ticket: SendTicket,
    ) {
        self.policy(role).observe(&PolicyEvent::Routed {
            ticket,
            worker: choice.worker,
            request: &routing.request,
            reports_first_token: routing.reports_first_token(role),
        });
    }

    fn decision_input<const N: usize>(
        &self,
        role: Role,
        routing: &RoutingRequest<'_>,
        sides: [(&[WorkerView], SendTicket); N],
    ) -> Option<DecisionInput> {
        let secret = self.journal.as_ref()?.secret;
        let reads_text = Role::ALL.iter().any(|role| self.policy(*role).needs_text());
        Some(DecisionInput::from_request(
            role, routing, &sides, secret, reads_text,
        ))
    }

    /// Do one thing, and with a journal write the entry about it down in the same turn.
    fn run_journaled<T>(
        &self,
        act: impl FnOnce() -> T,
        entry: impl FnOnce(&T) -> Option<LogEntry>,
    ) -> T {
        let Some(journal) = &self.journal else {
            return act();
        };
        let mut turn = journal.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act();
        if let Some(entry) = entry(&result) {
            journal.sink.put_line(LogLine { n: *turn, entry });
            *turn += 1;
        }
        result
    }
}

/// Given where not every prefill candidate can be paired with every decode candidate.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PairConstraints {
    /// Makes of the candidates of both sides, in their order.
    pub fingerprints: [Vec<WorkerFingerprint>; 2],
    /// Pairs that fit by their makes and are excluded all the same ([`PairVerdicts`]).
    ///
    /// [`PairVerdicts`]: crate::PairVerdicts
    pub excluded: Vec<[WorkerId; 2]>,
}

impl PairConstraints {
    /// Test of which of the candidates in `ready` can be paired.
    pub fn compatibility_test<'a>(&'a self, ready: [&'a [WorkerView]; 2]) -> Box<IsCompatible<'a>> {
        let fingerprint = move |side: usize, id: WorkerId| {
            let index = ready[side].iter().position(|worker| worker.id == id);
            index
                .and_then(|index| self.fingerprints[side].get(index))
                .copied()
                .unwrap_or_default()
        };
        let excluded: HashSet<[WorkerId; 2]> = self.excluded.iter().copied().collect();
        Box::new(move |p, d| {
            fingerprint(0, p).is_compatible(&fingerprint(1, d)) && !excluded.contains(&[p, d])
        })
    }
}

/// The chance of one decision: SplitMix64 from its seed, the same on every machine and in every
/// version.
#[derive(Debug, Clone)]
pub struct SplitMix64(pub u64);

impl RngCore for SplitMix64 {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    fn fill_bytes(&mut self, dest: &mut [u8]) {
        for chunk in dest.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }
}
