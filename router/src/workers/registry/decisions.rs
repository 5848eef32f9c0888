//! Decisions: which of the ready candidates a request goes to.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use router_core::{
    ExplainedChoice, RequestOutcome, Role, RoutingRequest, SendTicket, TtftEstimate,
    WorkerFingerprint, WorkerObjection, WorkerView,
};

use crate::clock::now_ms;
use crate::error::RouteError;
use crate::observability::explain::DryRun;
use crate::workers::load_guard::{Candidate, LoadGuard, SentRequest};
use crate::workers::registry::WorkerRegistry;
use crate::workers::registry::explanation::{name_of, named};
use crate::workers::registry::selection::{ExcludedWorkers, Selection, SelectionRequest, views};

impl WorkerRegistry {
    /// Let the role's policy choose among the ready candidates against which least speaks. Workers in `avoid` (they just
    /// failed this request) are taken only when there is no other. Budget: tens of microseconds; no await.
    pub fn choose(
        &self,
        role: Role,
        wanted: &SelectionRequest<'_>,
        avoid: &ExcludedWorkers,
    ) -> Result<Selection, RouteError> {
        let chosen = {
            let table = self.table(role);
            let _turn = table.turn.lock();
            let sending = wanted.sending(now_ms());
            let list = table.list_for(wanted.model);
            let now_ms = sending.request.now_ms;
            let views = views(&list, wanted.resumes_on, avoid.of(role), now_ms);
            let ticket = self.ticket();
            let decided = self.deciders.decide(role, &sending, &views, ticket);
            decided.and_then(|decided| self.take(&list, decided, ticket, wanted, &sending))
        };
        // Counted without the role's turn: remove() takes the worker list first and the turn second.
        chosen.ok_or_else(|| self.no_worker_error(role, wanted))
    }

    /// A prefill and a decode worker; together where the policies can.
    pub fn choose_pair(
        &self,
        wanted: &SelectionRequest<'_>,
        avoid: &ExcludedWorkers,
    ) -> Result<(Selection, Selection), RouteError> {
        let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| self.table(role));
        let pair = {
            let (_p_turn, _d_turn) = (prefill.turn.lock(), decode.turn.lock());
            let sending = wanted.sending(now_ms());
            let now_ms = sending.request.now_ms;
            let (p_list, d_list) = (prefill.list_for(wanted.model), decode.list_for(wanted.model));
            let p_views = views(&p_list, wanted.resumes_on, &avoid.prefill, now_ms);
            let d_views = views(&d_list, wanted.resumes_on, &avoid.worker, now_ms);
            let tickets = [self.ticket(), self.ticket()];
            let sides = [(p_list.as_slice(), p_views.as_slice()), (&d_list, &d_views)];
            let makes = self.makes(sides);
            let makes = makes.as_ref().map(|[p, d]| [p.as_slice(), d]);
            let ready = [p_views.as_slice(), &d_views];
            let decided = self.deciders.decide_pair(&sending, ready, makes, tickets);
            let taken = decided.and_then(|[p, d]| {
                let p = self.take(&p_list, p, tickets[0], wanted, &sending)?;
                Some((p, self.take(&d_list, d, tickets[1], wanted, &sending)?))
            });
            taken.ok_or(match (p_views.len(), d_views.len()) {
                (0, _) => Err(Role::Prefill),
                (_, 0) => Err(Role::Decode),
                (prefill, decode) => Ok(RouteError::NoPair { prefill, decode }),
            })
        };
        pair.map_err(|why| why.unwrap_or_else(|role| self.no_worker_error(role, wanted)))
    }

    /// The worker of this role that would begin to answer first, if its policy predicts that.
    pub fn least_ttft(&self, role: Role, wanted: &SelectionRequest<'_>) -> Option<TtftEstimate> {
        let now_ms = now_ms();
        let views = views(&self.table(role).list_for(wanted.model), None, &[], now_ms);
        let policy = self.deciders.policy(role);
        policy.soonest(&wanted.view(now_ms), &views)
    }

    /// Decide for each of these roles (prefill and decode are chosen together), and tell why. Nothing is sent.
    pub fn dry_run(
        &self,
        roles: &[Role],
        wanted: &SelectionRequest<'_>,
    ) -> Result<Vec<DryRun>, RouteError> {
        let turns: Vec<_> = roles.iter().map(|role| self.table(*role).turn.lock()).collect();
        let sending = wanted.sending(now_ms());
        let (request, seed) = (&sending.request, sending.seed);
        let sides: Vec<_> = roles
            .iter()
            .map(|role| {
                let list = self.table(*role).list_for(wanted.model);
                let views = views(&list, None, &[], request.now_ms);
                (list, views)
            })
            .collect();
        let decided: Option<Vec<_>> = match sides.as_slice() {
            [(p_list, p), (d_list, d)] => {
                let makes = self.makes([(p_list.as_slice(), p.as_slice()), (d_list, d)]);
                let makes = makes.as_ref().map(|[p, d]| [p.as_slice(), d]);
                let pair = self.deciders.dry_run_pair(request, [p, d], makes, seed);
                pair.map(Vec::from)
            }
            one => roles
                .iter()
                .zip(one)
                .map(|(role, (_, ready))| self.deciders.dry_run(*role, request, ready, seed))
                .collect(),
        };
        drop(turns);
        let Some(decided) = decided else {
            return Err(match sides.iter().position(|(_, views)| views.is_empty()) {
                Some(at) => self.no_worker_error(roles[at], wanted),
                None => RouteError::NoPair {
                    prefill: sides[0].1.len(),
                    decode: sides[sides.len() - 1].1.len(),
                },
            });
        };
        let runs = roles.iter().zip(sides).zip(decided);
        let runs = runs.map(|((role, (list, _)), (choice, explanation))| DryRun {
            role: *role,
            worker: name_of(&list, choice.worker).to_owned(),
            decision: choice.why,
            explanation: explanation.and_then(|full| named(&full, &list)),
        });
        Ok(runs.collect())
    }

    /// Fingerprints of the candidates of both sides, where not all of them can be paired.
    fn makes(
        &self,
        sides: [(&[Arc<Candidate>], &[WorkerView]); 2],
    ) -> Option<[Vec<WorkerFingerprint>; 2]> {
        (!self.all_fit.load(Ordering::Relaxed)).then(|| {
            sides.map(|(list, views)| {
                let make = |view: &WorkerView| {
                    let found = list.iter().find(|c| c.id == view.id);
                    found.map(|c| c.make).unwrap_or_default()
                };
                views.iter().map(make).collect()
            })
        })
    }

    fn ticket(&self) -> SendTicket {
        SendTicket(self.next_ticket.fetch_add(1, Ordering::Relaxed))
    }

    /// Ready workers are always candidates, but for the rest of an answer that they cannot resume.
    fn no_worker_error(&self, role: Role, wanted: &SelectionRequest<'_>) -> RouteError {
        let (known, ready) = self.count(role);
        match wanted.resumes_on {
            Some(_) if ready > 0 => RouteError::NoResumeWorker { role, ready },
            _ => RouteError::NoWorker { role, known, ready },
        }
    }

    /// The chosen candidate with its place taken. The policy knows already that the request goes there.
    fn take(
        &self,
        candidates: &[Arc<Candidate>],
        (choice, explanation): ExplainedChoice,
        ticket: SendTicket,
        wanted: &SelectionRequest<'_>,
        sending: &RoutingRequest<'_>,
    ) -> Option<Selection> {
        let found = candidates.iter().find(|c| c.id == choice.worker);
        let candidate = found?.clone();
        let role = candidate.worker.role();
        let sent_ms = sending.request.now_ms;
        candidate.load.fetch_add(1, Ordering::Relaxed);
        if let Some(breaker) = &candidate.breaker {
            breaker.lock().on_sent(sent_ms);
        }
        let policy = self.deciders.policy(role).name();
        let labels = [role.into_str(), policy, choice.why.into_str()];
        self.metrics.decisions.with_label_values(&labels).inc();
        let timeline = wanted.timeline.as_ref().map(|timeline| {
            let explanation = explanation.and_then(|full| named(&full, candidates));
            timeline.leg(role, &candidate.name, choice.why, explanation)
        });
        let (_, reads_blocks) = self.deciders.needs(&[role]);
        Some(Selection {
            guard: LoadGuard {
                candidate,
                deciders: self.deciders.clone(),
                outcome: RequestOutcome::Unknown,
                sent: SentRequest {
                    ticket,
                    blocks: wanted.blocks.clone().filter(|_| reads_blocks),
                    forecast: choice.why.forecast(),
                    at_ms: sent_ms,
                    is_first_token_known: !sending.tells_first_token(role),
                },
                timeline,
                metrics: self.metrics.clone(),
            },
            why: choice.why,
        })
    }

    /// True if a candidate outside `avoid` could be chosen.
    pub fn has_other(
        &self,
        role: Role,
        wanted: &SelectionRequest<'_>,
        avoid: &ExcludedWorkers,
    ) -> bool {
        let candidates = self.table(role).list_for(wanted.model);
        let now_ms = now_ms();
        let avoid = avoid.of(role);
        candidates.iter().any(|c| {
            c.can_resume(wanted.resumes_on) && c.objection(avoid, now_ms) < WorkerObjection::Tried
        })
    }
}
