//! Verdicts, case by case and against a model that keeps the list of all that happened.

use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use strum::VariantArray;

use super::*;
use crate::resilience::attempt_reason::{ProtocolCode, StatusLabel};

const NEVER_GRANTED: (f64, u32) = (0.0, 0);
const ALWAYS_GRANTED: (f64, u32) = (0.0, u32::MAX);

/// Every reason with the class that the router gives it.
fn every_reason() -> Vec<(AttemptReason, RetryClass)> {
    let mut reasons = vec![
        (AttemptReason::Connect, RetryClass::Broken),
        (AttemptReason::Reset, RetryClass::Broken),
        (AttemptReason::Hung, RetryClass::Broken),
        (AttemptReason::Silent, RetryClass::Refused),
        (AttemptReason::Restarted, RetryClass::Leaving),
    ];
    let codes = ProtocolCode::VARIANTS.iter();
    reasons.extend(codes.map(|code| (AttemptReason::Code(*code), code.retry_class())));
    let statuses = [200, 400, 403, 404, 408, 418, 429, 500, 501, 502, 503, 504];
    reasons.extend(statuses.map(|status| {
        (
            AttemptReason::Status(StatusLabel::from_status(status)),
            RetryClass::of_status(status),
        )
    }));
    reasons
}

/// A failure of worker 1, of the first attempt, with another worker left.
fn failure(reason: AttemptReason, class: RetryClass) -> FailedAttempt {
    FailedAttempt {
        role: Role::Regular,
        worker: WorkerId(1),
        reason,
        class,
        worker_break: None,
        is_stale: false,
        is_worker_denial: false,
        retry_after_ms: None,
        held_ms: 0,
        has_other_worker: true,
        is_shutting_down: false,
    }
}

fn code(code: ProtocolCode) -> FailedAttempt {
    failure(AttemptReason::Code(code), code.retry_class())
}

fn loss(reason: AttemptReason) -> LostAnswer {
    LostAnswer {
        worker: WorkerId(1),
        reason,
        worker_break: None,
        held_ms: 0,
        has_progress: false,
        has_other_worker: true,
        is_shutting_down: false,
    }
}

/// Configuration, budget and random numbers of a decision.
struct Scene {
    config: RetryConfig,
    budget: RetryBudget,
    waits_for_workers: bool,
    rng: StdRng,
}

impl Scene {
    fn new((ratio, floor): (f64, u32)) -> Self {
        Self {
            config: RetryConfig::default(),
            budget: RetryBudget::new(ratio, floor, 30_000),
            waits_for_workers: true,
            rng: StdRng::seed_from_u64(7),
        }
    }

    fn decide(&mut self, history: &mut RetryHistory, failure: &FailedAttempt) -> RetryVerdict {
        let limits = RetryLimits {
            config: &self.config,
            budget: &mut self.budget,
            waits_for_workers: self.waits_for_workers,
            now_ms: 1_000,
        };
        history.decide_retry(failure, limits, &mut self.rng)
    }

    fn decide_first(&mut self, failure: &FailedAttempt) -> RetryVerdict {
        self.decide(&mut RetryHistory::default(), failure)
    }
}

fn is_retry(verdict: RetryVerdict) -> bool {
    matches!(verdict, RetryVerdict::Retry(_))
}

fn give_up(reason: GiveUpReason) -> RetryVerdict {
    RetryVerdict::GiveUp {
        reason,
        blames_worker: false,
    }
}

const AT_ANOTHER: RetryVerdict = RetryVerdict::Retry(RetryPlan {
    target: RetryTarget::OtherWorkers,
    backoff_ms: 0,
});

#[test]
fn first_failure_is_retried_by_its_class_for_every_reason() {
    for (reason, class) in every_reason() {
        let verdict = Scene::new(ALWAYS_GRANTED).decide_first(&failure(reason, class));
        match class {
            RetryClass::Refused => {
                assert_eq!(verdict, give_up(GiveUpReason::NotRetryable), "{reason}");
            }
            RetryClass::Unexplained | RetryClass::Broken | RetryClass::Leaving => {
                assert_eq!(verdict, AT_ANOTHER, "{reason}");
            }
            RetryClass::Overloaded => {
                let RetryVerdict::Retry(plan) = verdict else {
                    panic!("{reason}: {verdict:?}");
                };
                assert_eq!(plan.target, RetryTarget::OtherWorkers);
                assert!((40..=60).contains(&plan.backoff_ms), "{reason}: {plan:?}");
            }
        }
    }
}

#[test]
fn attempts_used_up_end_every_reason_but_a_refused_connection() {
    for (reason, class) in every_reason() {
        let mut scene = Scene::new(ALWAYS_GRANTED);
        scene.config.max_attempts = 1;
        let verdict = scene.decide_first(&failure(reason, class));
        let expected = match (reason, class) {
            (AttemptReason::Connect, _) => RetryVerdict::WaitForWorker,
            (_, RetryClass::Refused) => give_up(GiveUpReason::NotRetryable),
            (_, class) => RetryVerdict::GiveUp {
                reason: GiveUpReason::AttemptsUsed,
                blames_worker: class == RetryClass::Unexplained,
            },
        };
        assert_eq!(verdict, expected, "{reason}");
    }
}

#[test]
fn budget_used_up_paces_lost_workers_and_ends_the_rest() {
    for (reason, class) in every_reason() {
        for waits_for_workers in [false, true] {
            let mut scene = Scene::new(NEVER_GRANTED);
            scene.waits_for_workers = waits_for_workers;
            let verdict = scene.decide_first(&failure(reason, class));
            if class == RetryClass::Refused {
                assert_eq!(verdict, give_up(GiveUpReason::NotRetryable), "{reason}");
            } else if waits_for_workers && reason.is_worker_loss() {
                assert!(
                    matches!(verdict, RetryVerdict::RetryInTurn(_)),
                    "{reason}: {verdict:?}"
                );
            } else {
                let expected = RetryVerdict::GiveUp {
                    reason: GiveUpReason::BudgetUsed,
                    blames_worker: class == RetryClass::Unexplained,
                };
                assert_eq!(verdict, expected, "{reason}");
            }
        }
    }
}

#[test]
fn paced_request_needs_no_budget() {
    let mut scene = Scene::new(NEVER_GRANTED);
    let mut history = RetryHistory::default();
    let broken = failure(AttemptReason::Reset, RetryClass::Broken);
    assert!(matches!(
        scene.decide(&mut history, &broken),
        RetryVerdict::RetryInTurn(_)
    ));
    history.begin_pacing();
    assert!(history.is_paced() && !history.is_resuming());
    assert!(is_retry(scene.decide(&mut history, &broken)));
}

#[test]
fn shutdown_ends_everything_that_could_be_retried() {
    for (reason, class) in every_reason() {
        let mut ending = failure(reason, class);
        ending.is_shutting_down = true;
        let verdict = Scene::new(ALWAYS_GRANTED).decide_first(&ending);
        let expected = match class {
            RetryClass::Refused => give_up(GiveUpReason::NotRetryable),
            class => RetryVerdict::GiveUp {
                reason: GiveUpReason::ShuttingDown,
                blames_worker: class == RetryClass::Unexplained,
            },
        };
        assert_eq!(verdict, expected, "{reason}");
    }
}

#[test]
fn stale_attempt_goes_to_the_same_workers_at_once_and_costs_no_budget() {
    let mut stale = failure(AttemptReason::Restarted, RetryClass::Leaving);
    stale.is_stale = true;
    stale.has_other_worker = false;
    let mut history = RetryHistory::default();
    let verdict = Scene::new(NEVER_GRANTED).decide(&mut history, &stale);
    let expected = RetryPlan {
        target: RetryTarget::SameWorkers,
        backoff_ms: 0,
    };
    assert_eq!(verdict, RetryVerdict::Retry(expected));
    assert!(history.excluded_workers().is_empty());
}

#[test]
fn worker_that_failed_is_excluded_and_without_another_there_is_a_pause() {
    let mut alone = failure(AttemptReason::Reset, RetryClass::Broken);
    alone.has_other_worker = false;
    let mut scene = Scene::new(ALWAYS_GRANTED);
    let mut history = RetryHistory::default();
    for attempt in 1..5 {
        let RetryVerdict::Retry(plan) = scene.decide(&mut history, &alone) else {
            panic!("attempt {attempt}");
        };
        assert!(plan.backoff_ms >= 40, "attempt {attempt}: {plan:?}");
        assert_eq!(history.excluded_workers().len(), attempt);
    }
    assert_eq!(
        scene.decide(&mut history, &alone),
        give_up(GiveUpReason::AttemptsUsed)
    );
}

#[test]
fn denial_gets_one_second_opinion_if_it_is_the_workers_own_and_there_is_another() {
    let denial = FailedAttempt {
        is_worker_denial: true,
        ..code(ProtocolCode::NotFound)
    };
    let mut scene = Scene::new(ALWAYS_GRANTED);
    let mut history = RetryHistory::default();
    assert_eq!(scene.decide(&mut history, &denial), AT_ANOTHER);
    assert_eq!(
        scene.decide(&mut history, &denial),
        give_up(GiveUpReason::NotRetryable)
    );
    let without_another = FailedAttempt {
        has_other_worker: false,
        ..denial
    };
    let of_the_request = FailedAttempt {
        is_worker_denial: false,
        ..denial
    };
    for refused in [without_another, of_the_request] {
        assert_eq!(
            Scene::new(ALWAYS_GRANTED).decide_first(&refused),
            give_up(GiveUpReason::NotRetryable)
        );
    }
}

#[test]
fn denial_is_the_workers_if_another_one_answers() {
    let denial = FailedAttempt {
        is_worker_denial: true,
        ..code(ProtocolCode::NotFound)
    };
    let mut scene = Scene::new(ALWAYS_GRANTED);
    let mut history = RetryHistory::default();
    assert_eq!(history.take_refuted_worker(), None);
    assert_eq!(scene.decide(&mut history, &denial), AT_ANOTHER);
    let refuted = RefutedWorker {
        role: Role::Regular,
        worker: WorkerId(1),
        failure: DoubtfulFailure::Denial,
    };
    assert_eq!(history.take_refuted_worker(), Some(refuted));
    assert_eq!(history.take_refuted_worker(), None);
}

#[test]
fn unexplained_error_is_the_workers_if_another_one_answers() {
    let error = code(ProtocolCode::InternalError);
    let mut scene = Scene::new(ALWAYS_GRANTED);
    let mut history = RetryHistory::default();
    assert_eq!(scene.decide(&mut history, &error), AT_ANOTHER);
    let broken = failure(AttemptReason::Reset, RetryClass::Broken);
    assert!(is_retry(scene.decide(&mut history, &broken)));
    assert_eq!(
        history.take_refuted_worker(),
        Some(RefutedWorker {
            role: Role::Regular,
            worker: WorkerId(1),
            failure: DoubtfulFailure::Error,
        })
    );
    assert_eq!(history.take_refuted_worker(), None);
}

#[test]
fn second_unexplained_error_is_the_requests_own() {
    let error = code(ProtocolCode::NonfiniteLogits);
    let mut scene = Scene::new(ALWAYS_GRANTED);
    let mut history = RetryHistory::default();
    assert_eq!(scene.decide(&mut history, &error), AT_ANOTHER);
    assert_eq!(
        scene.decide(&mut history, &error),
        give_up(GiveUpReason::NotRetryable)
    );
}

#[test]
fn long_pause_of_the_only_worker_is_not_waited_for() {
    for (retry_after_ms, has_other_worker, may_retry) in [
        (Some(LONGEST_RETRY_AFTER_MS), false, true),
        (Some(LONGEST_RETRY_AFTER_MS + 1), false, false),
        (Some(LONGEST_RETRY_AFTER_MS + 1), true, true),
        (None, false, true),
    ] {
        let overloaded = FailedAttempt {
            retry_after_ms,
            has_other_worker,
            ..code(ProtocolCode::QueueFull)
        };
        let verdict = Scene::new(ALWAYS_GRANTED).decide_first(&overloaded);
        assert_eq!(is_retry(verdict), may_retry, "{overloaded:?}");
    }
}

#[test]
fn request_that_breaks_two_workers_alone_is_given_up() {
    let broken = FailedAttempt {
        worker_break: Some(WorkerBreak::Alone),
        ..failure(AttemptReason::Reset, RetryClass::Broken)
    };
    let mut scene = Scene::new(ALWAYS_GRANTED);
    let mut history = RetryHistory::default();
    assert_eq!(scene.decide(&mut history, &broken), AT_ANOTHER);
    assert_eq!(
        scene.decide(&mut history, &broken),
        give_up(GiveUpReason::PoisonRequest)
    );
}

#[test]
fn only_a_resuming_request_waits_for_workers_that_may_not_return() {
    let refusals = [
        (SelectionRefusal::NoWorker { may_return: true }, true, true),
        (
            SelectionRefusal::NoWorker { may_return: false },
            false,
            true,
        ),
        (SelectionRefusal::NoFit, false, true),
        (SelectionRefusal::Final, false, false),
    ];
    let new = RetryHistory::default();
    let mut in_turn = RetryHistory::default();
    in_turn.begin_pacing();
    let mut resuming = RetryHistory::default();
    resuming.decide_resume(&loss(AttemptReason::Reset), &RetryConfig::default());
    for (refusal, before, after) in refusals {
        for (history, waits) in [(&new, before), (&in_turn, before), (&resuming, after)] {
            assert_eq!(history.waits_for_worker(refusal), waits, "{refusal:?}");
        }
    }
}

#[test]
fn lost_answer_is_resumed_without_budget_and_in_turn() {
    let mut history = RetryHistory::default();
    let verdict = history.decide_resume(&loss(AttemptReason::Reset), &RetryConfig::default());
    assert_eq!(verdict, ResumeVerdict::Resume);
    assert!(history.is_paced() && history.is_resuming());
    assert_eq!(history.excluded_workers(), [WorkerId(1)]);
    history.begin_pacing();
    assert!(history.is_resuming(), "the answer stays accepted");
    let broken = failure(AttemptReason::Reset, RetryClass::Broken);
    assert!(is_retry(
        Scene::new(NEVER_GRANTED).decide(&mut history, &broken)
    ));
}

#[test]
fn silent_worker_without_another_is_not_waited_for_again() {
    for (reason, has_other_worker, expected) in [
        (
            AttemptReason::Silent,
            false,
            ResumeVerdict::GiveUp(GiveUpReason::NoOtherWorker),
        ),
        (AttemptReason::Silent, true, ResumeVerdict::Resume),
        (AttemptReason::Hung, false, ResumeVerdict::Resume),
    ] {
        let lost = LostAnswer {
            has_other_worker,
            ..loss(reason)
        };
        let verdict = RetryHistory::default().decide_resume(&lost, &RetryConfig::default());
        assert_eq!(verdict, expected, "{reason} {has_other_worker}");
    }
}

#[test]
fn progress_forgives_failures_breaks_and_workers() {
    let broken = LostAnswer {
        worker_break: Some(WorkerBreak::Alone),
        ..loss(AttemptReason::Reset)
    };
    let config = RetryConfig {
        max_attempts: 2,
        ..RetryConfig::default()
    };
    let mut history = RetryHistory::default();
    for worker in 0..20 {
        let with_progress = LostAnswer {
            has_progress: true,
            worker: WorkerId(worker),
            ..broken
        };
        assert_eq!(
            history.decide_resume(&with_progress, &config),
            ResumeVerdict::Resume
        );
        assert_eq!(history.excluded_workers(), [WorkerId(worker)]);
    }
    assert_eq!(
        history.decide_resume(&broken, &config),
        ResumeVerdict::GiveUp(GiveUpReason::AttemptsUsed)
    );
    assert_eq!(
        history.decide_resume(&broken, &config),
        ResumeVerdict::GiveUp(GiveUpReason::PoisonRequest)
    );
}

/// Something that happened to a request.
#[derive(Debug, Clone, Copy)]
enum Happening {
    Failed(FailedAttempt),
    Lost(LostAnswer),
    /// The request got a place in the queue.
    Paced,
}

/// A naive model: the list of all that happened, looked through for each verdict.
#[derive(Default)]
struct NaiveModel {
    happenings: Vec<Happening>,
    granted: u32,
}

impl NaiveModel {
    /// Events since the client last got a token, including the loss that followed it.
    fn since_progress(&self) -> &[Happening] {
        let last_progress = self
            .happenings
            .iter()
            .rposition(|one| matches!(one, Happening::Lost(loss) if loss.has_progress));
        &self.happenings[last_progress.unwrap_or(0)..]
    }

    /// Events since the last series of attempts began.
    fn series(&self) -> &[Happening] {
        let last_loss = self
            .happenings
            .iter()
            .rposition(|one| matches!(one, Happening::Lost(_)));
        &self.happenings[last_loss.map_or(0, |at| at + 1)..]
    }

    /// Attempts that count: a worker lost after five seconds is a quarter of one.
    fn attempts(&self) -> u32 {
        let ends = self.since_progress().iter().filter_map(|one| match one {
            Happening::Failed(failure) => Some((failure.held_ms, failure.reason)),
            Happening::Lost(loss) => Some((loss.held_ms, loss.reason)),
            Happening::Paced => None,
        });
        let (late, quick): (Vec<_>, Vec<_>) =
            ends.partition(|(held_ms, reason)| *held_ms >= 5_000 && reason.is_pair_loss());
        quick.len() as u32 + (late.len() as u32).div_ceil(4)
    }

    /// True if the request broke two workers alone, or three in all.
    fn is_poison(&self) -> bool {
        let breaks = self.since_progress().iter().filter_map(|one| match one {
            Happening::Failed(failure) => failure.worker_break,
            Happening::Lost(loss) if loss.has_progress => None,
            Happening::Lost(loss) => loss.worker_break,
            Happening::Paced => None,
        });
        let breaks: Vec<WorkerBreak> = breaks.collect();
        let alone = breaks
            .iter()
            .filter(|one| **one == WorkerBreak::Alone)
            .count();
        alone >= 2 || breaks.len() >= 3
    }

    fn is_resuming(&self) -> bool {
        self.happenings
            .iter()
            .any(|one| matches!(one, Happening::Lost(_)))
    }

    fn is_paced(&self) -> bool {
        let is_paced = |one: &Happening| matches!(one, Happening::Paced | Happening::Lost(_));
        self.happenings.iter().any(is_paced)
    }

    /// True if a failure of this series asked for a second opinion.
    fn has_second_opinion(&self) -> bool {
        self.series().iter().any(|one| match one {
            Happening::Failed(failure) => match failure.class {
                RetryClass::Unexplained => true,
                RetryClass::Refused => failure.is_worker_denial && failure.has_other_worker,
                _ => false,
            },
            Happening::Lost(_) | Happening::Paced => false,
        })
    }

    fn decide_retry(
        &mut self,
        failure: FailedAttempt,
        config: &RetryConfig,
        floor: u32,
        waits_for_workers: bool,
    ) -> Expected {
        let is_second = self.has_second_opinion();
        self.happenings.push(Happening::Failed(failure));
        let may_help = match failure.class {
            RetryClass::Broken | RetryClass::Leaving => true,
            RetryClass::Unexplained => !is_second,
            RetryClass::Refused => {
                !is_second && failure.is_worker_denial && failure.has_other_worker
            }
            RetryClass::Overloaded => {
                failure.has_other_worker || failure.retry_after_ms.is_none_or(|ms| ms <= 2_000)
            }
        };
        let has_attempts = self.attempts() < config.max_attempts;
        let is_poison = failure.worker_break.is_some() && self.is_poison();
        if !may_help || is_poison || failure.is_shutting_down {
            return Expected::GiveUp;
        }
        if !has_attempts {
            return match failure.reason {
                AttemptReason::Connect => Expected::Wait,
                _ => Expected::GiveUp,
            };
        }
        if failure.is_stale || self.is_paced() {
            return Expected::Retry;
        }
        if self.granted < floor {
            self.granted += 1;
            return Expected::Retry;
        }
        if waits_for_workers && failure.reason.is_worker_loss() {
            return Expected::RetryInTurn;
        }
        Expected::GiveUp
    }

    fn decide_resume(&mut self, loss: LostAnswer, config: &RetryConfig) -> bool {
        self.happenings.push(Happening::Lost(loss));
        let is_waited_for = loss.reason != AttemptReason::Silent || loss.has_other_worker;
        let has_attempts = self.attempts() < config.max_attempts;
        // A loss with progress is counted as an attempt, but not as a break.
        let is_poison = loss.worker_break.is_some() && !loss.has_progress && self.is_poison();
        !is_poison && is_waited_for && has_attempts && !loss.is_shutting_down
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Expected {
    Retry,
    RetryInTurn,
    Wait,
    GiveUp,
}

impl From<RetryVerdict> for Expected {
    fn from(verdict: RetryVerdict) -> Self {
        match verdict {
            RetryVerdict::Retry(_) => Expected::Retry,
            RetryVerdict::RetryInTurn(_) => Expected::RetryInTurn,
            RetryVerdict::WaitForWorker => Expected::Wait,
            RetryVerdict::GiveUp { .. } => Expected::GiveUp,
        }
    }
}

fn any_break(reason: AttemptReason) -> BoxedStrategy<Option<WorkerBreak>> {
    if !reason.is_break() {
        return Just(None).boxed();
    }
    let breaks = [WorkerBreak::Alone, WorkerBreak::InCompany];
    proptest::sample::select(breaks.to_vec())
        .prop_map(Some)
        .boxed()
}

fn any_failure() -> impl Strategy<Value = FailedAttempt> {
    let facts = (
        0u64..4,
        proptest::bool::weighted(0.1),
        any::<bool>(),
        proptest::option::of(0u64..4_000),
        proptest::sample::select(vec![0u64, 4_999, 5_000]),
        any::<bool>(),
        proptest::bool::weighted(0.05),
    );
    (proptest::sample::select(every_reason()), facts).prop_flat_map(|((reason, class), facts)| {
        let (
            worker,
            is_stale,
            is_worker_denial,
            retry_after_ms,
            held_ms,
            has_other_worker,
            is_shutting_down,
        ) = facts;
        any_break(reason).prop_map(move |worker_break| FailedAttempt {
            role: Role::Decode,
            worker: WorkerId(worker),
            reason,
            class,
            worker_break,
            is_stale,
            is_worker_denial,
            retry_after_ms,
            held_ms,
            has_other_worker,
            is_shutting_down,
        })
    })
}

fn any_loss() -> impl Strategy<Value = LostAnswer> {
    let reasons = [
        AttemptReason::Reset,
        AttemptReason::Silent,
        AttemptReason::Hung,
        AttemptReason::Code(ProtocolCode::EngineDead),
        AttemptReason::Code(ProtocolCode::Draining),
    ];
    (
        any_failure(),
        proptest::sample::select(reasons.to_vec()),
        any::<bool>(),
    )
        .prop_flat_map(|(facts, reason, has_progress)| {
            any_break(reason).prop_map(move |worker_break| LostAnswer {
                worker: facts.worker,
                reason,
                worker_break,
                held_ms: facts.held_ms,
                has_progress,
                has_other_worker: facts.has_other_worker,
                is_shutting_down: facts.is_shutting_down,
            })
        })
}

fn any_happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        8 => any_failure().prop_map(Happening::Failed),
        1 => any_loss().prop_map(Happening::Lost),
        1 => Just(Happening::Paced),
    ]
}

proptest! {
    #[test]
    fn verdicts_are_those_of_the_naive_model(
        happenings in proptest::collection::vec(any_happening(), 0..40),
        max_attempts in 1u32..7,
        floor in 0u32..6,
        waits_for_workers: bool,
    ) {
        let mut scene = Scene::new((0.0, floor));
        scene.config.max_attempts = max_attempts;
        scene.waits_for_workers = waits_for_workers;
        let mut history = RetryHistory::default();
        let mut model = NaiveModel::default();
        for happening in happenings {
            match happening {
                Happening::Paced => {
                    history.begin_pacing();
                    model.happenings.push(happening);
                }
                Happening::Failed(failure) => {
                    let excluded = history.excluded_workers().to_vec();
                    let is_first = !model.has_second_opinion();
                    let verdict = scene.decide(&mut history, &failure);
                    let expected =
                        model.decide_retry(failure, &scene.config, floor, waits_for_workers);
                    prop_assert_eq!(Expected::from(verdict), expected, "{:?}", failure);
                    match verdict {
                        RetryVerdict::Retry(plan) | RetryVerdict::RetryInTurn(plan) => {
                            let is_other = plan.target == RetryTarget::OtherWorkers;
                            prop_assert_eq!(is_other, !failure.is_stale);
                            let added = history.excluded_workers().len() - excluded.len();
                            prop_assert_eq!(added, usize::from(is_other));
                            prop_assert!(plan.backoff_ms <= scene.config.max_backoff_ms);
                            let has_pause = plan.backoff_ms > 0;
                            let needs_pause = is_other
                                && (failure.class == RetryClass::Overloaded
                                    || !failure.has_other_worker);
                            prop_assert_eq!(has_pause, needs_pause);
                        }
                        RetryVerdict::WaitForWorker => {
                            prop_assert_eq!(history.excluded_workers(), &excluded[..]);
                        }
                        RetryVerdict::GiveUp { blames_worker, .. } => {
                            let is_unexplained = failure.class == RetryClass::Unexplained;
                            prop_assert_eq!(blames_worker, is_unexplained && is_first);
                            prop_assert_eq!(history.excluded_workers(), &excluded[..]);
                        }
                    }
                }
                Happening::Lost(lost) => {
                    let verdict = history.decide_resume(&lost, &scene.config);
                    let resumes = model.decide_resume(lost, &scene.config);
                    prop_assert_eq!(verdict == ResumeVerdict::Resume, resumes, "{:?}", lost);
                    if resumes {
                        prop_assert!(history.excluded_workers().contains(&lost.worker));
                        prop_assert!(!lost.has_progress || history.excluded_workers().len() == 1);
                    } else {
                        // A stream that is given up gets no further attempt.
                        break;
                    }
                }
            }
            prop_assert_eq!(history.is_paced(), model.is_paced());
            prop_assert_eq!(history.is_resuming(), model.is_resuming());
        }
    }

    #[test]
    fn equal_arguments_give_equal_verdicts(failures in proptest::collection::vec(any_failure(), 1..20)) {
        let mut runs = [0, 1].map(|_| (Scene::new((0.0, 3)), RetryHistory::default()));
        for failure in failures {
            let [first, second] = &mut runs;
            let one = first.0.decide(&mut first.1, &failure);
            let other = second.0.decide(&mut second.1, &failure);
            prop_assert_eq!(one, other);
        }
    }
}
