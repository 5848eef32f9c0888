//! Workers that refuse requests: how long each is passed over, and whether a refusal is the
//! worker's fault.
//!
//! 1. An overloaded worker (429, 503) is passed over for as long as it asks (`Retry-After`), else
//!    for 1 s, 2 s, 4 s …
//! 2. A request that a worker denies (401, 403, 404, 405) while the others of its role deny fewer
//!    gets a second opinion ([`WorkerPenalty::judge_denial`]). A worker is passed over likewise
//!    when another one then answers the request ([`WorkerPenalty::record_refuted_denial`]), and not
//!    before: a wrong key or an unknown model is the client's fault, whichever worker it is sent
//!    to.
//! 3. Passed over is no candidate for any policy while another is ([`least_objection`]). Every
//!    penalty ends by time, and the first answer afterwards that is no refusal ends the doubling.
//!
//! Deterministic, no I/O. Without it a worker that refuses fast attracts traffic: it is never busy.

/// First penalty of a row; each further one is twice as long [ms].
pub const FIRST_PENALTY_MS: u64 = 1_000;
/// Longest penalty, whatever a worker asks for [ms].
pub const MAX_PENALTY_MS: u64 = 30_000;
/// Answers that count of a worker's share of denials, and how long [ms].
const MEMORY: f64 = 20.0;
const MEMORY_MS: f64 = 60_000.0;
/// A worker's share of denials above this many times the others' is its own fault.
const EXCESS: f64 = 2.0;

/// Denials among recent answers.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct DenialShare {
    denied: f64,
    answered: f64,
}

impl DenialShare {
    /// 0 without answers.
    fn ratio(self) -> f64 {
        if self.answered > 0.0 {
            self.denied / self.answered
        } else {
            0.0
        }
    }
}

impl std::iter::Sum for DenialShare {
    fn sum<I: Iterator<Item = Self>>(shares: I) -> Self {
        shares.fold(Self::default(), |sum, share| Self {
            denied: sum.denied + share.denied,
            answered: sum.answered + share.answered,
        })
    }
}

/// Penalty of a worker for its refusals. One per candidate.
#[derive(Debug, Clone, Default)]
pub struct WorkerPenalty {
    until_ms: u64,
    /// Penalties since the last answer that was no refusal.
    in_row: u32,
    share: DenialShare,
    share_at_ms: u64,
}

impl WorkerPenalty {
    /// How much longer the worker is passed over; 0: it is not.
    pub fn left_ms(&self, now_ms: u64) -> u64 {
        self.until_ms.saturating_sub(now_ms)
    }

    /// The worker has too much to do, or is leaving.
    pub fn record_overload(&mut self, retry_after_ms: Option<u64>, now_ms: u64) {
        if let Some(asked_ms) = retry_after_ms {
            let until_ms = now_ms + asked_ms.min(MAX_PENALTY_MS);
            self.until_ms = self.until_ms.max(until_ms);
        } else {
            self.penalize(now_ms);
        }
    }

    /// The worker answered, other than by a refusal.
    pub fn record_answer(&mut self, now_ms: u64) {
        self.count_answer(0.0, now_ms);
        if self.left_ms(now_ms) == 0 {
            self.in_row = 0;
        }
    }

    /// The worker denied a request (401, 403, 404, 405); `others`: the sum of the shares of the
    /// other workers of the role. Returns whether another worker's opinion may differ: not when all
    /// deny alike, since then the request is at fault.
    pub fn judge_denial(&mut self, others: DenialShare, now_ms: u64) -> bool {
        self.count_answer(1.0, now_ms);
        self.share.ratio() > EXCESS * others.ratio()
    }

    /// Another worker answered a request that this one denied: the denial was the worker's own
    /// fault. One that denies most requests is passed over; one that lacks a single model is not.
    pub fn record_refuted_denial(&mut self, now_ms: u64) {
        if self.share.ratio() > 0.5 {
            self.penalize(now_ms);
        }
    }

    /// Denials among its recent answers.
    pub fn denial_share(&self, now_ms: u64) -> DenialShare {
        let age_ms = now_ms.saturating_sub(self.share_at_ms) as f64;
        let keep = (-age_ms / MEMORY_MS).exp();
        DenialShare {
            denied: self.share.denied * keep,
            answered: self.share.answered * keep,
        }
    }

    fn count_answer(&mut self, denied: f64, now_ms: u64) {
        let keep = 1.0 - 1.0 / MEMORY;
        let share = self.denial_share(now_ms);
        self.share = DenialShare {
            denied: share.denied * keep + denied,
            answered: share.answered * keep + 1.0,
        };
        self.share_at_ms = now_ms;
    }

    /// Penalize the worker, once for all requests that were in flight together.
    fn penalize(&mut self, now_ms: u64) {
        if self.left_ms(now_ms) == 0 {
            let doubled = FIRST_PENALTY_MS << self.in_row.min(16);
            self.until_ms = now_ms + doubled.min(MAX_PENALTY_MS);
            self.in_row += 1;
        }
    }
}

/// Objection to a candidate now, from the least to the most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerObjection {
    Nothing,
    /// The candidate refused requests: [`WorkerPenalty`].
    Penalized,
    /// The candidate failed this request before.
    Tried,
    CircuitOpen,
}

/// The candidates with the least objection: some, if there are any at all. So no number of
/// refusals, failures or open circuits leaves a role without candidates (Envoy's panic threshold,
/// at zero).
pub fn least_objection<T>(
    candidates: impl Iterator<Item = (T, WorkerObjection)> + Clone,
) -> Vec<T> {
    let least = candidates.clone().map(|(_, objection)| objection).min();
    candidates
        .filter(|(_, objection)| Some(*objection) == least)
        .map(|(candidate, _)| candidate)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{rng, views};
    use crate::types::{PolicyEvent, RequestView, Role, SendTicket, WorkerFacts, WorkerId};
    use crate::{PolicyInput, PolicyKind, PolicyParams, build_policy};

    #[test]
    fn penalties_double_up_to_the_limit_and_an_answer_ends_the_row() {
        let mut penalty = WorkerPenalty::default();
        let mut now_ms = 0;
        let mut next = |penalty: &mut WorkerPenalty| {
            penalty.record_overload(None, now_ms);
            penalty.record_overload(None, now_ms); // in flight together
            let left_ms = penalty.left_ms(now_ms);
            now_ms += left_ms;
            assert_eq!(penalty.left_ms(now_ms), 0, "it ends by time");
            (left_ms, now_ms)
        };
        let row: Vec<u64> = (0..7).map(|_| next(&mut penalty).0).collect();
        assert_eq!(row, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]);
        let (_, now_ms) = next(&mut penalty);
        penalty.record_answer(now_ms);
        assert_eq!(next(&mut penalty).0, 1_000);
    }

    #[test]
    fn worker_is_passed_over_for_as_long_as_it_asks_within_the_limit() {
        let left_ms = |asked_ms| {
            let mut penalty = WorkerPenalty::default();
            penalty.record_overload(Some(asked_ms), 5_000);
            penalty.left_ms(5_000)
        };
        assert_eq!(
            [0, 7_000, u64::MAX].map(left_ms),
            [0, 7_000, MAX_PENALTY_MS]
        );
    }

    #[test]
    fn denials_that_all_give_are_the_request_and_earn_no_second_opinion() {
        let mut fleet = vec![WorkerPenalty::default(); 3];
        for now_ms in 0..60 {
            fleet
                .iter_mut()
                .for_each(|worker| worker.record_answer(now_ms));
        }
        let mut opinions = 0;
        for turn in 0..60 {
            let others = |fleet: &[WorkerPenalty], at: usize| {
                let others = fleet.iter().enumerate().filter(|(other, _)| *other != at);
                others.map(|(_, worker)| worker.denial_share(100)).sum()
            };
            let first = turn % 3;
            let other_shares = others(&fleet, first);
            if fleet[first].judge_denial(other_shares, 100) {
                opinions += 1;
                let second = (first + 1) % 3;
                let other_shares = others(&fleet, second);
                fleet[second].judge_denial(other_shares, 100);
            }
        }
        assert!(opinions <= 2, "{opinions}");
        assert!(fleet.iter().all(|worker| worker.left_ms(100) == 0));
    }

    #[test]
    fn denials_that_no_other_worker_refutes_penalize_none() {
        let mut worker = WorkerPenalty::default();
        let others = DenialShare::default();
        for now_ms in 0..100 {
            assert!(worker.judge_denial(others, now_ms));
            assert_eq!(worker.left_ms(now_ms), 0);
        }
        worker.record_refuted_denial(100);
        assert_eq!(worker.left_ms(100), FIRST_PENALTY_MS);
    }

    #[test]
    fn open_circuits_count_only_while_others_are_left() {
        use WorkerObjection::{CircuitOpen, Nothing, Penalized, Tried};
        let left = |objections: &[WorkerObjection]| {
            least_objection(objections.iter().copied().enumerate())
        };
        assert_eq!(left(&[Nothing, Penalized, Nothing]), [0, 2]);
        assert_eq!(left(&[Tried, Penalized, CircuitOpen]), [1]);
        assert_eq!(left(&[Penalized, Penalized]), [0, 1]);
        assert_eq!(left(&[CircuitOpen, Tried]), [1]);
        assert_eq!(left(&[CircuitOpen, CircuitOpen]), [0, 1]);
        assert!(left(&[]).is_empty());
    }

    /// Requests every 20 ms for a minute, to a worker that answers in 300 ms and one that refuses
    /// at once.
    fn refusals_met(kind: PolicyKind, role: Role, is_denial: bool) -> usize {
        let policy = build_policy(kind, role, &PolicyParams::default());
        let mut rng = rng(7);
        let mut fleet = vec![WorkerPenalty::default(); 2];
        for id in 0..2 {
            policy.observe(&PolicyEvent::WorkerAdded {
                worker: WorkerId(id),
                facts: WorkerFacts::default(),
            });
        }
        let mut running: Vec<(u64, SendTicket)> = Vec::new();
        let mut met = 0;
        for turn in 0..3_000 {
            let now_ms = turn * 20;
            let finished = |ticket, worker, is_kept| {
                policy.observe(&PolicyEvent::Finished {
                    ticket,
                    worker: WorkerId(worker),
                    is_kept,
                    hashes: &[],
                    now_ms,
                });
            };
            while let Some(at) = running.iter().position(|(end_ms, _)| *end_ms <= now_ms) {
                finished(running.remove(at).1, 1, true);
                fleet[1].record_answer(now_ms);
            }
            let ready = views(&[0, running.len()]);
            let evaluated = ready.iter().map(|view| {
                let left_ms = fleet[view.id.0 as usize].left_ms(now_ms);
                let objection = match left_ms {
                    0 => WorkerObjection::Nothing,
                    _ => WorkerObjection::Penalized,
                };
                (*view, objection)
            });
            let ready = least_objection(evaluated);
            let request = RequestView {
                text: "all say the same",
                now_ms,
                ..RequestView::default()
            };
            let mut input = PolicyInput {
                request: &request,
                ready: &ready,
                rng: &mut rng,
                explains: false,
            };
            let choice = policy.choose(&mut input);
            let worker = choice.expect("a candidate").worker;
            let ticket = SendTicket(turn);
            policy.observe(&PolicyEvent::Routed {
                ticket,
                worker,
                request: &request,
                reports_first_token: false,
            });
            if worker == WorkerId(1) {
                running.push((now_ms + 300, ticket));
                continue;
            }
            met += 1;
            finished(ticket, 0, false);
            if is_denial {
                let others = fleet[1].denial_share(now_ms);
                assert!(
                    fleet[0].judge_denial(others, now_ms),
                    "a second opinion helps"
                );
                fleet[0].record_refuted_denial(now_ms);
            } else {
                fleet[0].record_overload(None, now_ms);
            }
        }
        met
    }

    #[test]
    fn worker_that_refuses_at_once_attracts_no_traffic_under_any_policy() {
        for &kind in PolicyKind::ALL {
            for role in Role::ALL {
                for is_denial in [true, false] {
                    // 1 + 2 + 4 + 8 + 16 + 30 s are more than the minute.
                    let met = refusals_met(kind, role, is_denial);
                    assert!(met <= 6, "{kind} {role} denial={is_denial}: {met}");
                }
            }
        }
    }
}
