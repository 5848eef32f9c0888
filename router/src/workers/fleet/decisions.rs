//! Decisions: which of the ready candidates a request goes to.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use router_core::{
    ExplainedChoice, PairConstraints, RequestOutcome, Role, RoutingRequest, SendTicket,
    TtftEstimate, WorkerId, WorkerObjection, WorkerView, least_objection,
};

use crate::clock::now_ms;
use crate::error::RouteError;
use crate::observability::explain::DryRun;
use crate::workers::fleet::WorkerFleet;
use crate::workers::fleet::explanation::{name_of, named};
use crate::workers::fleet::selection::SelectionRequest;
use crate::workers::load_guard::{Candidate, LoadGuard};

/// Candidates of a role that serve a request's model, and what its policy sees of those it may
/// choose.
struct Side {
    list: Arc<Vec<Arc<Candidate>>>,
    views: Vec<WorkerView>,
}

impl WorkerFleet {
    /// Let the role's policy choose among the ready candidates against which least speaks. Workers
    /// in `avoid` (they just failed this request) are taken only when there is no other. Budget:
    /// tens of microseconds; no await.
    pub fn choose(
        &self,
        role: Role,
        wanted: &SelectionRequest<'_>,
        avoid: &[WorkerId],
    ) -> Result<LoadGuard, RouteError> {
        let chosen = {
            let _lock = self.table(role).decision_lock.lock();
            let routing = wanted.routing_request(now_ms());
            let side = self.side(role, wanted, avoid, routing.request.now_ms);
            let ticket = self.ticket();
            let decided = self.policy_set.decide(role, &routing, &side.views, ticket);
            decided.and_then(|decided| self.take(&side.list, decided, ticket, wanted, &routing))
        };
        // Counted without the role's turn: remove() takes the worker list first and the turn
        // second.
        chosen.ok_or_else(|| self.no_worker_error(role, wanted))
    }

    /// A prefill and a decode worker; together where the policies can.
    pub fn choose_pair(
        &self,
        wanted: &SelectionRequest<'_>,
        avoid: &[WorkerId],
    ) -> Result<(LoadGuard, LoadGuard), RouteError> {
        let roles = [Role::Prefill, Role::Decode];
        let (pair, has_candidates) = {
            let _locks = roles.map(|role| self.table(role).decision_lock.lock());
            let routing = wanted.routing_request(now_ms());
            let now_ms = routing.request.now_ms;
            let [p, d] = &self.pairable_sides(wanted, avoid, now_ms);
            let tickets = [self.ticket(), self.ticket()];
            let constraints = self.constraints([p, d], now_ms);
            let ready = [&*p.views, &d.views];
            let decided =
                self.policy_set
                    .decide_pair(&routing, ready, constraints.as_ref(), tickets);
            let pair = decided.and_then(|[p_choice, d_choice]| {
                let p = self.take(&p.list, p_choice, tickets[0], wanted, &routing)?;
                Some((
                    p,
                    self.take(&d.list, d_choice, tickets[1], wanted, &routing)?,
                ))
            });
            if let Some((p, d)) = &pair {
                self.note_trial(p, d, now_ms);
            }
            (pair, [p, d].map(|side| !side.views.is_empty()))
        };
        pair.ok_or_else(|| self.no_pair_error(has_candidates, wanted))
    }

    fn note_trial(&self, prefill: &LoadGuard, decode: &LoadGuard, now_ms: u64) {
        let mut verdicts = self.verdicts.lock();
        if !verdicts.is_empty() {
            let [p, d] = [prefill, decode].map(|guard| guard.candidate.worker.id);
            verdicts.begin_trial((p, d), now_ms);
        }
    }

    /// The worker of this role that would begin to answer first, if its policy predicts that.
    pub fn least_ttft(&self, role: Role, wanted: &SelectionRequest<'_>) -> Option<TtftEstimate> {
        let now_ms = now_ms();
        let side = self.side(role, wanted, &[], now_ms);
        self.policy_set
            .policy(role)
            .best_ttft(&wanted.view(now_ms), &side.views)
    }

    /// Decide for each of these roles (prefill and decode are chosen together), and tell why.
    /// Nothing is sent.
    pub fn dry_run(
        &self,
        roles: &[Role],
        wanted: &SelectionRequest<'_>,
    ) -> Result<Vec<DryRun>, RouteError> {
        let locks: Vec<_> = roles
            .iter()
            .map(|role| self.table(*role).decision_lock.lock())
            .collect();
        let routing = RoutingRequest {
            explains: true,
            ..wanted.routing_request(now_ms())
        };
        let now_ms = routing.request.now_ms;
        let sides: Vec<Side> = match roles {
            [Role::Prefill, Role::Decode] => self.pairable_sides(wanted, &[], now_ms).into(),
            _ => {
                let sides = roles
                    .iter()
                    .map(|role| self.side(*role, wanted, &[], now_ms));
                sides.collect()
            }
        };
        let decide = |(role, side): (&Role, &Side)| {
            self.policy_set.select_worker(*role, &routing, &side.views)
        };
        let decided: Option<Vec<_>> = match sides.as_slice() {
            [p, d] => {
                let constraints = self.constraints([p, d], now_ms);
                let ready = [&*p.views, &d.views];
                self.policy_set
                    .select_pair(&routing, ready, constraints.as_ref())
                    .map(Vec::from)
            }
            _ => roles.iter().zip(&sides).map(decide).collect(),
        };
        drop(locks);
        let decided = decided.ok_or_else(|| match sides.as_slice() {
            [p, d] => self.no_pair_error([p, d].map(|side| !side.views.is_empty()), wanted),
            _ => self.no_worker_error(roles[0], wanted),
        })?;
        let runs = roles.iter().zip(sides).zip(decided);
        let runs = runs.map(|((role, side), (choice, explanation))| DryRun {
            role: *role,
            worker: name_of(&side.list, choice.worker).to_owned(),
            decision: choice.why,
            explanation: explanation.and_then(|full| named(&full, &side.list)),
        });
        Ok(runs.collect())
    }

    /// Candidates of a role for this request: those that could resume its answer, and of these the
    /// ones with the fewest objections, being in `avoid` among them.
    fn side(
        &self,
        role: Role,
        wanted: &SelectionRequest<'_>,
        avoid: &[WorkerId],
        now_ms: u64,
    ) -> Side {
        let list = self.table(role).list_for(wanted.model);
        let evaluated = list
            .iter()
            .filter(|c| !c.worker.is_replaced() && c.can_resume(wanted.resumes_on))
            .map(|c| (c.view(), c.objection(avoid, now_ms)));
        let views = least_objection(evaluated.collect::<Vec<_>>().into_iter());
        Side { list, views }
    }

    /// Candidates of both roles. Where the ones with the fewest objections fit none of each other,
    /// all candidates: a pair with objections is better than none.
    fn pairable_sides(
        &self,
        wanted: &SelectionRequest<'_>,
        avoid: &[WorkerId],
        now_ms: u64,
    ) -> [Side; 2] {
        let roles = [Role::Prefill, Role::Decode];
        let sides = roles.map(|role| self.side(role, wanted, avoid, now_ms));
        if self.has_possible_pair(&sides, now_ms) {
            return sides;
        }
        roles.map(|role| {
            let list = self.table(role).list_for(wanted.model);
            let able = list.iter().filter(|c| c.can_resume(wanted.resumes_on));
            let views = able.map(|c| c.view()).collect();
            Side { list, views }
        })
    }

    fn has_possible_pair(&self, sides: &[Side; 2], now_ms: u64) -> bool {
        let [p, d] = sides;
        let Some(constraints) = self.constraints([p, d], now_ms) else {
            return true;
        };
        let is_possible = constraints.compatibility_test([&p.views, &d.views]);
        let has_partner = |p: &WorkerView| d.views.iter().any(|d| is_possible(p.id, d.id));
        p.views.iter().any(has_partner)
    }

    /// Constraints on the pairs of both sides, where not all of them are possible.
    fn constraints(&self, sides: [&Side; 2], now_ms: u64) -> Option<PairConstraints> {
        let verdicts = self.verdicts.lock();
        if self.all_fit.load(Ordering::Relaxed) && verdicts.is_empty() {
            return None;
        }
        let candidates = sides.map(|side| {
            let candidate = |view: &WorkerView| side.list.iter().find(|c| c.id == view.id);
            side.views.iter().filter_map(candidate).collect::<Vec<_>>()
        });
        let [p_list, d_list] = &candidates;
        let mut excluded = Vec::new();
        for (p_worker, d_worker) in verdicts.excluded_pairs(now_ms) {
            for p in p_list.iter().filter(|c| c.worker.id == p_worker) {
                let partners = d_list.iter().filter(|c| c.worker.id == d_worker);
                excluded.extend(partners.map(|d| [p.id, d.id]));
            }
        }
        Some(PairConstraints {
            excluded,
            fingerprints: candidates
                .each_ref()
                .map(|list| list.iter().map(|c| c.fingerprint).collect()),
        })
    }

    fn ticket(&self) -> SendTicket {
        SendTicket(self.next_ticket.fetch_add(1, Ordering::Relaxed))
    }

    /// Error that a request would get that comes now; `None`: a worker or pair is ready.
    pub fn readiness_error(&self) -> Option<RouteError> {
        for &role in self.serving_roles() {
            let (known, ready) = self.count(role);
            if ready == 0 {
                return Some(RouteError::NoWorker { role, known, ready });
            }
        }
        let lacks_pair = self.is_pd() && !self.has_pair();
        lacks_pair.then(|| self.unmatched_error())
    }

    /// Ready workers are always candidates, but for the rest of an answer that they cannot resume.
    fn no_worker_error(&self, role: Role, wanted: &SelectionRequest<'_>) -> RouteError {
        let (known, ready) = self.count(role);
        match wanted.resumes_on {
            Some(_) if ready > 0 => RouteError::NoResumeWorker { role, ready },
            _ => RouteError::NoWorker { role, known, ready },
        }
    }

    /// `has_candidates`: of prefill and decode.
    fn no_pair_error(
        &self,
        has_candidates: [bool; 2],
        wanted: &SelectionRequest<'_>,
    ) -> RouteError {
        let [has_prefill, has_decode] = has_candidates;
        if !has_prefill {
            return self.no_worker_error(Role::Prefill, wanted);
        }
        if !has_decode {
            return self.no_worker_error(Role::Decode, wanted);
        }
        self.unmatched_error()
    }

    /// Error of workers that are ready but do not fit together. It counts ready workers, as
    /// GET /workers does, and not the candidates that are left of them.
    fn unmatched_error(&self) -> RouteError {
        let (_, prefill) = self.count(Role::Prefill);
        let (_, decode) = self.count(Role::Decode);
        RouteError::NoPair { prefill, decode }
    }

    /// The chosen candidate with its place taken. The policy knows already that the request goes
    /// there.
    fn take(
        &self,
        candidates: &[Arc<Candidate>],
        (choice, explanation): ExplainedChoice,
        ticket: SendTicket,
        wanted: &SelectionRequest<'_>,
        routing: &RoutingRequest<'_>,
    ) -> Option<LoadGuard> {
        let candidate = candidates.iter().find(|c| c.id == choice.worker)?.clone();
        let role = candidate.worker.role();
        let sent_ms = routing.request.now_ms;
        candidate.load.fetch_add(1, Ordering::Relaxed);
        if let Some(breaker) = &candidate.breaker {
            breaker.lock().on_sent(sent_ms);
        }
        let labels = [
            role.into_str(),
            self.policy_set.policy(role).name(),
            choice.why.into_str(),
        ];
        self.metrics.decisions.with_label_values(&labels).inc();
        let timeline = wanted.timeline.as_ref().map(|timeline| {
            let explanation = explanation.and_then(|full| named(&full, candidates));
            timeline.leg(role, &candidate.name, choice.why, explanation)
        });
        let (_, reads_blocks) = self.policy_set.prompt_needs(&[role]);
        let blocks = wanted.blocks.clone().filter(|_| reads_blocks);
        Some(LoadGuard {
            candidate,
            policy_set: self.policy_set.clone(),
            outcome: RequestOutcome::Unknown,
            ticket,
            counts: wanted.counts && blocks.is_some(),
            blocks,
            why: choice.why,
            sent_ms,
            is_first_token_known: !routing.reports_first_token(role),
            timeline: timeline.unwrap_or_default(),
            metrics: self.metrics.clone(),
        })
    }

    /// True if a candidate outside `avoid` could be chosen.
    pub fn has_other(&self, role: Role, wanted: &SelectionRequest<'_>, avoid: &[WorkerId]) -> bool {
        let candidates = self.table(role).list_for(wanted.model);
        let now_ms = now_ms();
        candidates.iter().any(|c| {
            !c.worker.is_replaced()
                && c.can_resume(wanted.resumes_on)
                && c.objection(avoid, now_ms) < WorkerObjection::Tried
        })
    }
}
