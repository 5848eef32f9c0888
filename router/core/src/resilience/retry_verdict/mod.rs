//! Decisions after a failed attempt: whether the request is attempted again, at which workers,
//! after which pause or event.
//!
//! 1. An attempt at a worker fails: [`RetryHistory::decide_retry`].
//! 2. No worker could be chosen: [`RetryHistory::waits_for_worker`].
//! 3. The answer had opened, and its worker is lost: [`RetryHistory::decide_resume`] begins a new
//!    series of attempts, to which step 1 and 2 apply again.
//!
//! The caller carries the verdict out: it sleeps, waits, sends, and counts metrics.
//!
//! Invariants: a request gets at most one second opinion in a series of attempts; a retry that the
//! budget does not grant is stale, or made in turn.
//!
//! Deterministic, no I/O: time comes in as `now_ms` and `held_ms`, randomness as `rng`. Equal
//! arguments and an equal history give an equal verdict.

use rand::RngCore;

use crate::resilience::attempt_reason::{AttemptReason, RetryClass};
use crate::resilience::poison::{RequestBreaks, WorkerBreak};
use crate::resilience::retry::{FailedAttempts, RetryBudget, RetryConfig};
use crate::types::{Role, WorkerId};

/// A client is not kept waiting for an overloaded worker that asks for more time than this [ms].
const LONGEST_RETRY_AFTER_MS: u64 = 2_000;

/// Failure of one attempt, and the facts around it that decide about the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailedAttempt {
    pub role: Role,
    pub worker: WorkerId,
    pub reason: AttemptReason,
    pub class: RetryClass,
    /// Set if the worker broke with the request in hand.
    pub worker_break: Option<WorkerBreak>,
    /// True if no worker is at fault: a kept prefill was of no use any more, a room was in use, or
    /// another process refused than the one that was chosen.
    pub is_stale: bool,
    /// True if the worker refused what other workers of its role accept (401, 403, 404, 405).
    pub is_worker_denial: bool,
    /// Pause that the worker asks for.
    pub retry_after_ms: Option<u64>,
    /// Time from the send to the failure.
    pub held_ms: u64,
    /// True if a worker could be chosen that has not failed this request.
    pub has_other_worker: bool,
    /// True if the router ends and begins nothing any more.
    pub is_shutting_down: bool,
}

/// An answer that broke off after it had opened, and the facts that decide about its resumption.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostAnswer {
    pub worker: WorkerId,
    pub reason: AttemptReason,
    /// Set if the worker broke with the request in hand.
    pub worker_break: Option<WorkerBreak>,
    /// Time from the send to the loss.
    pub held_ms: u64,
    /// True if the client got a token from this worker.
    pub has_progress: bool,
    /// As in [`FailedAttempt`]; read for silent workers only.
    pub has_other_worker: bool,
    pub is_shutting_down: bool,
}

/// Refusal to choose a worker for an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectionRefusal {
    /// No worker of a role is ready. `may_return`: one is registered that serves, or may serve
    /// again.
    NoWorker { may_return: bool },
    /// Workers are ready, but none that could resume this answer, or no two that fit together.
    NoFit,
    /// Nothing that another worker could change: a deadline, a limit.
    Final,
}

/// Limits that a retry is subject to.
#[derive(Debug)]
pub struct RetryLimits<'a> {
    pub config: &'a RetryConfig,
    /// Budget of the fleet; a granted retry is taken from it.
    pub budget: &'a mut RetryBudget,
    /// True if requests wait for a worker (--worker-wait-timeout-secs).
    pub waits_for_workers: bool,
    pub now_ms: u64,
}

/// Workers that the next attempt may choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryTarget {
    /// The same as before: the failure was no worker's fault.
    SameWorkers,
    /// Others, while there are any: the worker was added to the excluded ones.
    OtherWorkers,
}

/// The next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPlan {
    pub target: RetryTarget,
    /// Pause before it.
    pub backoff_ms: u64,
}

/// Reason why no other attempt is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GiveUpReason {
    /// Another attempt would fail in the same way.
    NotRetryable,
    /// The request broke as many workers as one request may.
    PoisonRequest,
    ShuttingDown,
    /// --retry-max-retries.
    AttemptsUsed,
    /// The retry budget of the fleet.
    BudgetUsed,
    /// The worker was silent, and another would be waited for as long.
    NoOtherWorker,
}

/// Decision after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryVerdict {
    Retry(RetryPlan),
    /// The budget is used up, and the worker was lost: attempt again in turn with the interrupted
    /// streams if the request gets a place in the queue ([`RetryHistory::begin_pacing`]), else give
    /// up.
    RetryInTurn(RetryPlan),
    /// Attempt again after a change of the fleet; give up when the time for that is over.
    WaitForWorker,
    /// `blames_worker`: the failure counts for the worker's circuit breaker, since no second
    /// opinion will follow.
    GiveUp {
        reason: GiveUpReason,
        blames_worker: bool,
    },
}

/// Decision after an answer broke off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumeVerdict {
    Resume,
    GiveUp(GiveUpReason),
}

/// How a request's attempts are paced and paid for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum RequestPacing {
    /// Attempts start at once; retries are taken from the budget.
    #[default]
    Budgeted,
    /// Attempts wait for their turn, and no budget applies to them.
    InTurn,
    /// As `InTurn`; the answer has opened, so that the request is never refused a turn or a wait.
    Resuming,
}

/// Failure of a worker that may be the request's own fault, until another worker answers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoubtfulFailure {
    /// The worker denied the request (401, 403, 404, 405).
    Denial,
    /// An unexplained error.
    Error,
}

/// Worker whose failure was its own fault, since another worker answered the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefutedWorker {
    pub role: Role,
    pub worker: WorkerId,
    pub failure: DoubtfulFailure,
}

/// State of the second opinion on a failure that may be the request's own fault.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum SecondOpinion {
    #[default]
    NotAsked,
    /// Another worker was asked; this one is to blame if the request is answered.
    Asked(RefutedWorker),
}

/// Attempts of one request, as far as they decide about the next one.
#[derive(Debug, Clone, Default)]
pub struct RetryHistory {
    /// Since the client last got a token.
    failed: FailedAttempts,
    /// Since the client last got a token.
    breaks: RequestBreaks,
    /// Workers that failed the request since the client last got a token.
    excluded: Vec<WorkerId>,
    second_opinion: SecondOpinion,
    pacing: RequestPacing,
}

impl RetryHistory {
    /// Workers that the next attempt avoids while there are others.
    pub fn excluded_workers(&self) -> &[WorkerId] {
        &self.excluded
    }

    /// The same with one more.
    pub fn excluded_with(&self, worker: WorkerId) -> Vec<WorkerId> {
        let mut excluded = self.excluded.clone();
        excluded.push(worker);
        excluded
    }

    /// True if attempts wait for their turn.
    pub fn is_paced(&self) -> bool {
        self.pacing != RequestPacing::Budgeted
    }

    /// True if the answer has opened.
    pub fn is_resuming(&self) -> bool {
        self.pacing == RequestPacing::Resuming
    }

    /// From here on attempts wait for their turn; the request has a place in the queue.
    pub fn begin_pacing(&mut self) {
        // A resuming request stays one: `InTurn` would let it be refused a turn.
        if self.pacing == RequestPacing::Budgeted {
            self.pacing = RequestPacing::InTurn;
        }
    }

    /// An attempt was answered. Returns the worker whose doubtful failure was its own fault.
    pub fn take_refuted_worker(&mut self) -> Option<RefutedWorker> {
        match std::mem::take(&mut self.second_opinion) {
            SecondOpinion::Asked(refuted) => Some(refuted),
            SecondOpinion::NotAsked => None,
        }
    }

    /// Decide what follows a failed attempt, and record it.
    pub fn decide_retry(
        &mut self,
        failure: &FailedAttempt,
        limits: RetryLimits<'_>,
        rng: &mut dyn RngCore,
    ) -> RetryVerdict {
        let is_first_opinion = self.second_opinion == SecondOpinion::NotAsked;
        let may_help = self.may_help(failure);
        if may_help {
            self.ask_second_opinion(failure);
        }
        self.failed
            .add_attempt(failure.held_ms, failure.reason.is_pair_loss());
        let is_poison = self.add_break(failure.worker_break);

        let give_up = |reason| RetryVerdict::GiveUp {
            reason,
            blames_worker: is_first_opinion && failure.class == RetryClass::Unexplained,
        };
        // First, so that the client gets its own error and not that of a limit.
        if !may_help {
            return give_up(GiveUpReason::NotRetryable);
        }
        // A body that crashes engines would take down one worker after the other.
        if is_poison {
            return give_up(GiveUpReason::PoisonRequest);
        }
        // The router ends before another worker could answer.
        if failure.is_shutting_down {
            return give_up(GiveUpReason::ShuttingDown);
        }
        if !limits.config.allows_another(self.failed) {
            // Nothing reached the worker, so that another attempt repeats no work. Workers of a
            // small fleet that restarts refuse connections for longer than the attempts last.
            return match failure.reason {
                AttemptReason::Connect => RetryVerdict::WaitForWorker,
                _ => give_up(GiveUpReason::AttemptsUsed),
            };
        }
        // A stale attempt cost no worker anything, and a paced one waits for its turn instead.
        let is_granted =
            failure.is_stale || self.is_paced() || limits.budget.try_retry(limits.now_ms);
        // The end of a busy worker brings all its requests at once, more than any budget. Each had
        // its place in the fleet, and would be lost; in turn they overload no other worker.
        let may_be_paced = limits.waits_for_workers && failure.reason.is_worker_loss();
        if !is_granted && !may_be_paced {
            return give_up(GiveUpReason::BudgetUsed);
        }
        let plan = self.plan_attempt(failure, limits.config, rng);
        if is_granted {
            RetryVerdict::Retry(plan)
        } else {
            RetryVerdict::RetryInTurn(plan)
        }
    }

    /// True if the request waits for a worker when none could be chosen for an attempt, rather than
    /// being refused.
    pub fn waits_for_worker(&self, refusal: SelectionRefusal) -> bool {
        match refusal {
            // A new request is refused at once where no worker may return. A client that has a part
            // of its answer loses more, and waits for a worker that may be registered.
            SelectionRefusal::NoWorker { may_return } => may_return || self.is_resuming(),
            // The ready workers do not fit each other, which time does not change for a new
            // request.
            SelectionRefusal::NoFit => self.is_resuming(),
            SelectionRefusal::Final => false,
        }
    }

    /// Decide whether another worker is asked to resume an answer that broke off, and record it.
    pub fn decide_resume(&mut self, loss: &LostAnswer, config: &RetryConfig) -> ResumeVerdict {
        // Tokens came from this worker: the request harms none, and earlier failures say nothing
        // about the rest of the answer.
        if loss.has_progress {
            self.failed = FailedAttempts::default();
            self.breaks = RequestBreaks::default();
            self.excluded.clear();
        } else if self.add_break(loss.worker_break) {
            return ResumeVerdict::GiveUp(GiveUpReason::PoisonRequest);
        }
        self.failed
            .add_attempt(loss.held_ms, loss.reason.is_pair_loss());
        self.excluded.push(loss.worker);
        self.second_opinion = SecondOpinion::NotAsked;
        self.pacing = RequestPacing::Resuming;

        // The same worker would be silent for --request-timeout-secs again.
        if loss.reason == AttemptReason::Silent && !loss.has_other_worker {
            return ResumeVerdict::GiveUp(GiveUpReason::NoOtherWorker);
        }
        // The router ends before another worker could answer.
        if loss.is_shutting_down {
            return ResumeVerdict::GiveUp(GiveUpReason::ShuttingDown);
        }
        if !config.allows_another(self.failed) {
            return ResumeVerdict::GiveUp(GiveUpReason::AttemptsUsed);
        }
        ResumeVerdict::Resume
    }

    /// True if another attempt may help. A failure that may be the request's own fault gets one
    /// second opinion.
    fn may_help(&self, failure: &FailedAttempt) -> bool {
        let is_first_opinion = self.second_opinion == SecondOpinion::NotAsked;
        match failure.class {
            RetryClass::Broken | RetryClass::Leaving => true,
            // Without another worker only this one can help, after its pause. A client gets the
            // error and its Retry-After rather than a longer wait.
            RetryClass::Overloaded => {
                let retry_after_ms = failure.retry_after_ms.unwrap_or(0);
                failure.has_other_worker || retry_after_ms <= LONGEST_RETRY_AFTER_MS
            }
            // Workers of one role that differ in keys or models: another one may take the request.
            // One second opinion, because the request itself may be wrong.
            RetryClass::Refused => {
                is_first_opinion && failure.is_worker_denial && failure.has_other_worker
            }
            // A second failure of this kind is the request's own: more attempts would only spread
            // it.
            RetryClass::Unexplained => is_first_opinion,
        }
    }

    /// Remember the worker of a failure that may be the request's own fault: the next attempt
    /// tells.
    fn ask_second_opinion(&mut self, failure: &FailedAttempt) {
        let doubt = match failure.class {
            RetryClass::Refused => DoubtfulFailure::Denial,
            RetryClass::Unexplained => DoubtfulFailure::Error,
            RetryClass::Broken | RetryClass::Leaving | RetryClass::Overloaded => return,
        };
        self.second_opinion = SecondOpinion::Asked(RefutedWorker {
            role: failure.role,
            worker: failure.worker,
            failure: doubt,
        });
    }

    /// Count a break. Returns whether the request broke as many workers as one request may.
    fn add_break(&mut self, worker_break: Option<WorkerBreak>) -> bool {
        worker_break.is_some_and(|worker_break| self.breaks.add_break(worker_break))
    }

    fn plan_attempt(
        &mut self,
        failure: &FailedAttempt,
        config: &RetryConfig,
        rng: &mut dyn RngCore,
    ) -> RetryPlan {
        // No worker was at fault, so none is excluded and none needs a pause.
        if failure.is_stale {
            return RetryPlan {
                target: RetryTarget::SameWorkers,
                backoff_ms: 0,
            };
        }
        self.excluded.push(failure.worker);
        // Sent at once, the same worker would fail in the same way; another one is ready now.
        let needs_pause = failure.class == RetryClass::Overloaded || !failure.has_other_worker;
        let backoff_ms = if needs_pause {
            config.backoff_ms(self.failed.count(), rng)
        } else {
            0
        };
        RetryPlan {
            target: RetryTarget::OtherWorkers,
            backoff_ms,
        }
    }
}

#[cfg(test)]
mod tests;
