//! Policies: one file each, all behind [`Policy`].
//!
//! A policy decides on a read-only view ([`Policy::choose`]) and learns from events
//! ([`Policy::observe`]); it owns no thread, no timer and no clock. It returns a
//! [`WorkerId`](crate::WorkerId), not an index: indices go stale.
//!
//! Invariants: a chosen worker is one of the candidates passed in; `None` means there were none;
//! with the same events, view and rng state the choice is the same.

/// `cache_aware`.
mod cache_aware;
/// `cost`.
mod cost;
/// `manual`.
mod manual;
/// `power_of_two`.
mod power_of_two;
/// `random`.
mod random;
/// `round_robin`.
mod round_robin;
/// Choices among workers that are equally good.
mod tie_break;

#[cfg(test)]
pub(crate) mod testing;

use rand::RngCore;
use serde::Serialize;
use strum::{Display, IntoStaticStr, VariantArray};

use crate::explain::{Explanation, PolicyBasis, PolicyTerms};
use crate::kv::KvRank;
use crate::types::{
    PolicyEvent, RequestView, Role, TtftEstimate, WorkerChoice, WorkerId, WorkerView,
};

pub use cache_aware::{CacheAware, CacheAwareParams, MissPolicy};
pub use cost::{CostParams, CostPolicy};
pub use manual::{AssignmentMode, ManualParams, ManualPolicy};
pub use power_of_two::PowerOfTwo;
pub use random::RandomPolicy;
pub use round_robin::RoundRobin;

/// A choice, and what was weighed for it if that was asked for.
pub type ExplainedChoice = (WorkerChoice, Option<Explanation>);

/// All that a decision depends on, beside what its policy has learned.
pub struct PolicyInput<'a> {
    pub request: &'a RequestView<'a>,
    pub ready: &'a [WorkerView],
    pub rng: &'a mut dyn RngCore,
    /// True to tell what is weighed.
    pub explains: bool,
}

/// Chooses a worker for a request.
pub trait Policy: Send + Sync {
    /// The name of its [`PolicyKind`].
    fn name(&self) -> &'static str;

    /// True if it reads [`RequestView::text`]; if not, the shell need not extract it.
    fn needs_text(&self) -> bool {
        false
    }

    /// True if it reads [`RequestView::prompt`]; if not, the shell need not hash it.
    fn needs_blocks(&self) -> bool {
        false
    }

    /// For [`decide_pair`]: the one policy that can decide about two workers at once.
    fn as_cost(&self) -> Option<&CostPolicy> {
        None
    }

    /// Choose among the `ready` candidates; `None` when there are none. Decides and changes
    /// nothing.
    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice>;

    /// Explanation of the choice that was just made of `input`.
    fn explain(&self, input: &PolicyInput<'_>) -> Explanation {
        let terms = |_: &WorkerView| PolicyTerms::Load {};
        Explanation::for_candidates(self.name(), PolicyBasis::Nothing, input.ready, terms)
    }

    /// [`Policy::choose`], telling what was weighed if that is asked for. With the same input and
    /// state the choice is the same one: it is made by the same code.
    fn decide(&self, input: &mut PolicyInput<'_>) -> Option<ExplainedChoice> {
        let choice = self.choose(input)?;
        Some((choice, input.explains.then(|| self.explain(input))))
    }

    /// The candidate that would begin to answer first; `None` when there is none, or the policy
    /// does not predict.
    fn best_ttft(&self, _req: &RequestView<'_>, _ready: &[WorkerView]) -> Option<TtftEstimate> {
        None
    }

    /// Learn what happened. Locks inside are held briefly.
    fn observe(&self, _event: &PolicyEvent<'_>) {}

    /// Bring memory back under its limits, forget what was not used for long; returns the
    /// characters or keys dropped.
    fn evict(&self, _now_ms: u64) -> usize {
        0
    }

    /// Size of its memory, for metrics.
    fn stats(&self, _now_ms: u64) -> PolicyStats {
        PolicyStats::default()
    }
}

/// Memory of a policy. All empty or zero for policies that remember nothing.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PolicyStats {
    /// `cache_aware`: characters remembered per worker, ordered by id; a prefix shared by two
    /// counts for both.
    pub chars: Vec<(WorkerId, usize)>,
    /// `cost`: per worker, ordered by id.
    pub ranks: Vec<RankStats>,
    /// `cost`: tokens in a byte of text, as reported.
    pub tokens_per_unit: f64,
    /// `cost`: prefill work sent recently, of what the workers can do (rho).
    pub utilization: f64,
    /// `manual`: routing keys. `cost`: sessions.
    pub keys: usize,
    /// Estimated memory of the index [bytes].
    pub index_bytes: usize,
    /// Characters, blocks or keys dropped for a limit since the start.
    pub evicted_total: u64,
}

/// Estimates of `cost` for a worker.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RankStats {
    pub worker: WorkerId,
    pub index_blocks: usize,
    /// Index entry that it announced, if it does.
    pub announced: Option<KvRank>,
    /// Predicted time of the prompts sent there and not begun to be answered [ms].
    pub backlog_ms: f64,
    /// Share of the prefixes expected there that was found there.
    pub confidence: f64,
    /// Predicted prefill of a prompt of 1000 tokens [ms].
    pub ms_per_kilotoken: f64,
}

/// Test of who can be paired, in a fleet where not every prefill worker can hand its pages to every
/// decode worker.
pub type IsCompatible<'a> = dyn Fn(WorkerId, WorkerId) -> bool + 'a;

/// Decide about a prefill and a decode worker: together if both sides are `cost`, else one after
/// the other.
///
/// With `is_compatible` only about two that fit: the prefill policy decides among those that have a
/// partner; `cost` then decides again among the workers like that one, jointly. `None`: there is no
/// pair.
pub fn decide_pair(
    prefill: &dyn Policy,
    decode: &dyn Policy,
    request: &RequestView<'_>,
    ready: [&[WorkerView]; 2],
    is_compatible: Option<&IsCompatible<'_>>,
    rng: &mut dyn RngCore,
    explains: bool,
) -> Option<[ExplainedChoice; 2]> {
    let costs = prefill.as_cost().zip(decode.as_cost());
    let decide = |policy: &dyn Policy, ready: &[WorkerView], rng: &mut dyn RngCore| {
        policy.decide(&mut PolicyInput {
            request,
            ready,
            rng,
            explains,
        })
    };
    let Some(is_compatible) = is_compatible else {
        if let Some((p, d)) = costs {
            return p.decide_pair(d, request, ready, rng, explains);
        }
        let p = decide(prefill, ready[0], rng)?;
        return Some([p, decide(decode, ready[1], rng)?]);
    };
    let with_partner = filter_views(ready[0], |p| {
        ready[1].iter().any(|d| is_compatible(p, d.id))
    });
    let p = decide(prefill, &with_partner, rng)?;
    // The decode workers that it fits, and the prefill workers that fit all of these.
    let partners = filter_views(ready[1], |d| is_compatible(p.0.worker, d));
    let alike = filter_views(&with_partner, |p| {
        partners.iter().all(|d| is_compatible(p, d.id))
    });
    if let Some((both, other)) = costs {
        return both.decide_pair(other, request, [&alike, &partners], rng, explains);
    }
    Some([p, decide(decode, &partners, rng)?])
}

fn filter_views(views: &[WorkerView], passes: impl Fn(WorkerId) -> bool) -> Vec<WorkerView> {
    views
        .iter()
        .copied()
        .filter(|view| passes(view.id))
        .collect()
}

/// The policies an operator can name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum PolicyKind {
    Random,
    RoundRobin,
    PowerOfTwo,
    CacheAware,
    Manual,
    Cost,
}

named_choice!(PolicyKind: "policy");

/// `ALL` and `FromStr` of an enum whose variants an operator names; `$what` is it in an error.
macro_rules! named_choice {
    ($choice:ident: $what:literal) => {
        impl $choice {
            pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;
        }

        impl std::str::FromStr for $choice {
            type Err = $crate::policy::UnknownName;

            fn from_str(name: &str) -> Result<Self, Self::Err> {
                $crate::policy::UnknownName::find_by_name($what, name)
            }
        }
    };
}
use named_choice;

/// A name that is not in the list.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} '{name}'; use one of: {known}")]
pub struct UnknownName {
    pub what: &'static str,
    pub name: String,
    pub known: String,
}

impl UnknownName {
    /// The variant with this name.
    fn find_by_name<T>(what: &'static str, name: &str) -> Result<T, UnknownName>
    where
        T: Copy + VariantArray + Into<&'static str>,
    {
        let mut variants = T::VARIANTS
            .iter()
            .copied()
            .filter(|item| (*item).into() == name);
        variants.next().ok_or_else(|| {
            let names: Vec<&str> = T::VARIANTS.iter().map(|item| (*item).into()).collect();
            UnknownName {
                what,
                name: name.to_owned(),
                known: names.join(", "),
            }
        })
    }
}

/// Parameters of all policies.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyParams {
    pub cache_aware: CacheAwareParams,
    pub manual: ManualParams,
    pub cost: CostParams,
}

/// Make the policy `kind` for the workers of `role`.
pub fn build_policy(kind: PolicyKind, role: Role, params: &PolicyParams) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Random => Box::new(RandomPolicy),
        PolicyKind::RoundRobin => Box::new(RoundRobin::default()),
        PolicyKind::PowerOfTwo => Box::new(PowerOfTwo),
        PolicyKind::CacheAware => Box::new(CacheAware::new(params.cache_aware.clone())),
        PolicyKind::Manual => Box::new(ManualPolicy::new(params.manual.clone())),
        PolicyKind::Cost => Box::new(CostPolicy::new(params.cost.clone(), role)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::{TestSender, blocks, rng};
    use super::*;
    use crate::types::{RunningLoad, WorkerFacts};

    const ROLES: [Role; 3] = [Role::Regular, Role::Prefill, Role::Decode];

    #[test]
    fn names_are_parsed_and_a_wrong_one_is_answered_with_the_list() {
        for &kind in PolicyKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            let policy = build_policy(kind, Role::Regular, &PolicyParams::default());
            assert_eq!(policy.name(), kind.into_str());
        }
        for &miss in MissPolicy::ALL {
            assert_eq!(miss.to_string().parse(), Ok(miss));
        }
        let error = "cache-aware".parse::<PolicyKind>().expect_err("not a name");
        let names: Vec<&str> = PolicyKind::ALL.iter().map(|kind| kind.into_str()).collect();
        assert!(names.starts_with(&["random", "round_robin"]));
        assert_eq!(
            error.to_string(),
            format!(
                "unknown policy 'cache-aware'; use one of: {}",
                names.join(", ")
            )
        );
    }

    #[test]
    fn soonest_has_the_least_queue_and_prefill_together() {
        let ask = |policy: &dyn Policy, sender: &TestSender, ids: std::ops::Range<u64>| {
            let blocks = super::testing::blocks("bb");
            let request = RequestView {
                prompt: blocks.prompt_view(),
                now_ms: sender.now_ms,
                ..RequestView::default()
            };
            let ready: Vec<_> = ids.map(view).collect();
            policy.best_ttft(&request, &ready)
        };
        for role in ROLES {
            let policy = build_policy(PolicyKind::Cost, role, &PolicyParams::default());
            let mut sender = TestSender::default();
            for id in 0..2 {
                let worker = WorkerId(id);
                let facts = WorkerFacts::default();
                policy.observe(&PolicyEvent::WorkerAdded { worker, facts });
            }
            sender.routed(&*policy, 0, &"a".repeat(100));
            let asked = [0..0, 0..1, 0..2].map(|ids| ask(&*policy, &sender, ids));
            if role == Role::Decode {
                assert_eq!(asked, [None; 3], "no prompts are computed there");
                continue;
            }
            let [none, busy, either] = asked;
            let (Some(busy), Some(either)) = (busy, either) else {
                panic!("{asked:?}");
            };
            assert_eq!(none, None);
            assert!(busy.queue_ms > 100.0 && busy.prefill_ms > 0.0, "{busy:?}");
            assert_eq!((either.queue_ms, either.prefill_ms), (0.0, busy.prefill_ms));
        }
        let other = build_policy(
            PolicyKind::RoundRobin,
            Role::Regular,
            &PolicyParams::default(),
        );
        assert_eq!(ask(&*other, &TestSender::default(), 0..2), None);
    }

    fn view(id: u64) -> WorkerView {
        WorkerView {
            id: WorkerId(id),
            load: 0,
            host: 0,
        }
    }

    proptest! {
        /// A pair is found exactly when one fits, and it is one that fits.
        #[test]
        fn fitting_pairs_are_found(
            prefill in proptest::sample::select(PolicyKind::ALL.to_vec()),
            decode in proptest::sample::select(PolicyKind::ALL.to_vec()),
            table in proptest::collection::vec(proptest::bool::weighted(0.3), 16),
            (p, d) in (0u64..5, 0u64..5),
            seed in any::<u64>(),
        ) {
            let params = PolicyParams::default();
            let policies = (build_policy(prefill, Role::Prefill, &params), build_policy(decode, Role::Decode, &params));
            for id in 0..p {
                policies.0.observe(&PolicyEvent::WorkerAdded { worker: WorkerId(id), facts: WorkerFacts::default() });
            }
            for id in 10..10 + d {
                policies.1.observe(&PolicyEvent::WorkerAdded { worker: WorkerId(id), facts: WorkerFacts::default() });
            }
            let p_views: Vec<_> = (0..p).map(view).collect();
            let d_views: Vec<_> = (10..10 + d).map(view).collect();
            let is_compatible = |p: WorkerId, d: WorkerId| table[(p.0 * 4 + d.0 - 10) as usize % 16];
            let is_possible = (0..p).any(|p| (10..10 + d).any(|d| is_compatible(WorkerId(p), WorkerId(d))));
            let pair = decide_pair(
                &*policies.0, &*policies.1, &RequestView::default(), [&p_views, &d_views], Some(&is_compatible),
                &mut rng(seed), false,
            );
            prop_assert_eq!(pair.is_some(), is_possible);
            if let Some([(p, _), (d, _)]) = pair {
                prop_assert!(is_compatible(p.worker, d.worker));
            }
        }
    }

    proptest! {
        /// Whatever was routed, added or lost before: `None` without candidates, else one of them,
        /// and `Only` for one.
        #[test]
        fn only_candidates_are_chosen(
            kind in proptest::sample::select(PolicyKind::ALL.to_vec()),
            role in proptest::sample::select(ROLES.to_vec()),
            history in proptest::collection::vec((0u64..6, "[ab]{0,6}", 0u8..4), 0..30),
            text in "[ab]{0,6}",
            candidates in proptest::collection::btree_map(0u64..8, 0usize..200, 0..6),
            seed in any::<u64>(),
        ) {
            let mut params = PolicyParams::default();
            params.cache_aware.max_tree_size = 12;
            let policy = build_policy(kind, role, &params);
            for id in 0..5 {
                policy.observe(&PolicyEvent::WorkerAdded { worker: WorkerId(id), facts: WorkerFacts::default() });
            }
            let mut sender = TestSender::default();
            for (id, text, what) in &history {
                sender.now_ms += 7;
                let worker = WorkerId(*id);
                match what {
                    0 => policy.observe(&PolicyEvent::WorkerGone { worker }),
                    1 => policy.observe(&PolicyEvent::Reported { worker, queued_tokens: 5_000, running: Some(RunningLoad { requests: 9, pages_used: 7, pages: 8 }), age_ms: 30, now_ms: sender.now_ms }),
                    2 => {
                        let ticket = sender.routed(&*policy, *id, text);
                        sender.finished(&*policy, ticket, *id, text, text.len() % 2 == 0);
                    }
                    _ => {
                        sender.routed(&*policy, *id, text);
                    }
                }
            }
            let ready: Vec<WorkerView> =
                candidates.iter().map(|(&id, &load)| WorkerView { id: WorkerId(id), load, host: 0 }).collect();
            let choice = sender.choose(&*policy, &text, &ready, &mut rng(seed));
            let blocks = blocks(&text);
            let request = RequestView { text: &text, prompt: blocks.prompt_view(), now_ms: sender.now_ms, ..RequestView::default() };
            let mut input = PolicyInput { request: &request, ready: &ready, rng: &mut rng(seed), explains: true };
            let explained = policy.decide(&mut input);
            prop_assert_eq!(explained.as_ref().map(|(same, _)| *same), choice);
            let explanation = explained.map(|(_, explanation)| explanation.expect("it was asked for"));
            prop_assert_eq!(explanation.map_or(0, |explanation| explanation.candidates.len()), ready.len());
            prop_assert_eq!(choice.is_none(), ready.is_empty());
            if let Some(choice) = choice {
                prop_assert!(ready.iter().any(|worker| worker.id == choice.worker));
                prop_assert_eq!(choice.why == crate::SelectionReason::Only, ready.len() == 1);
            }
        }
    }
}
