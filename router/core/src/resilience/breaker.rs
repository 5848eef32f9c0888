//! Circuit breaker of one worker: stop sending to it while it fails, then try again with a few
//! requests.
//!
//! ```text
//!            failure_threshold failures in a row, all within window_ms
//!   Closed ─────────────────────────────────────────────────────────────▶ Open
//!     ▲                                                                    │ timeout_ms passed
//!     │ success_threshold successes                                        ▼
//!     └──────────────────────────────────────────────────────────────── HalfOpen ──any failure──▶ Open
//! ```
//!
//! Deterministic, no I/O: time comes in as `now_ms` (any monotonic milliseconds), the caller holds
//! the lock. The shell decides which outcomes count as failures; an answer that is the client's
//! fault (4xx) never does.

use std::collections::VecDeque;

use serde::Serialize;
use strum::{Display, IntoStaticStr};

/// When a breaker opens and closes. Defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failure_threshold: u32,
    /// Successes in a row that close a half-open one; also how many trials may be in flight at
    /// once.
    pub success_threshold: u32,
    /// How long it stays open before trials begin.
    pub timeout_ms: u64,
    /// Failures older than this no longer count.
    pub window_ms: u64,
}

impl Default for BreakerConfig {
    fn default() -> Self {
        Self {
            failure_threshold: 10,
            success_threshold: 3,
            timeout_ms: 60_000,
            window_ms: 120_000,
        }
    }
}

/// From the best to the worst; the number is the one shown in metrics.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Display, IntoStaticStr,
)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum BreakerState {
    Closed = 0,
    HalfOpen = 1,
    Open = 2,
}

/// End of a request, as evidence about its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestOutcome {
    Success,
    Failure,
    /// No evidence about the worker: the client left, or the other leg of the pair failed.
    Unknown,
}

#[derive(Debug, Clone)]
enum State {
    /// When the failures since the last success happened; at most `failure_threshold` of them.
    Closed { failures_ms: VecDeque<u64> },
    /// No requests until the pause is over.
    Open { since_ms: u64 },
    /// Trial requests decide.
    HalfOpen {
        successes: u32,
        trials: u32,
        last_trial_ms: u64,
    },
}

/// See the module. One per worker and DP rank.
#[derive(Debug, Clone)]
pub struct CircuitBreaker {
    config: BreakerConfig,
    state: State,
}

impl CircuitBreaker {
    /// A closed breaker.
    pub fn new(config: BreakerConfig) -> Self {
        Self {
            config,
            state: State::Closed {
                failures_ms: VecDeque::new(),
            },
        }
    }

    pub fn state(&self, now_ms: u64) -> BreakerState {
        match self.state {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { since_ms }
                if now_ms.saturating_sub(since_ms) < self.config.timeout_ms =>
            {
                BreakerState::Open
            }
            State::Open { .. } | State::HalfOpen { .. } => BreakerState::HalfOpen,
        }
    }

    /// True if the worker is a candidate. Changes nothing; a request that is then sent is announced
    /// by [`Self::on_sent`].
    pub fn allows_request(&self, now_ms: u64) -> bool {
        match self.state(now_ms) {
            BreakerState::Closed => true,
            BreakerState::Open => false,
            BreakerState::HalfOpen => {
                self.trials_in_flight(now_ms) < self.config.success_threshold.max(1)
            }
        }
    }

    /// A request goes out. Every call is followed by one [`Self::on_result`] (hold a guard).
    pub fn on_sent(&mut self, now_ms: u64) {
        if self.state(now_ms) == BreakerState::HalfOpen {
            let trials = self.trials_in_flight(now_ms) + 1;
            let successes = if let State::HalfOpen { successes, .. } = self.state {
                successes
            } else {
                0
            };
            self.state = State::HalfOpen {
                successes,
                trials,
                last_trial_ms: now_ms,
            };
        }
    }

    /// A request ended. Returns the new state if it changed.
    pub fn on_result(&mut self, outcome: RequestOutcome, now_ms: u64) -> Option<BreakerState> {
        let before = self.state(now_ms);
        if let State::HalfOpen { trials, .. } = &mut self.state {
            *trials = trials.saturating_sub(1);
        }
        match (&mut self.state, outcome) {
            (State::Closed { failures_ms }, RequestOutcome::Success) => failures_ms.clear(),
            (State::Closed { failures_ms }, RequestOutcome::Failure) => {
                let window_ms = self.config.window_ms;
                failures_ms.retain(|at_ms| now_ms.saturating_sub(*at_ms) <= window_ms);
                failures_ms.push_back(now_ms);
                if failures_ms.len() >= self.config.failure_threshold.max(1) as usize {
                    self.state = State::Open { since_ms: now_ms };
                }
            }
            (State::HalfOpen { successes, .. }, RequestOutcome::Success) => {
                *successes += 1;
                if *successes >= self.config.success_threshold {
                    self.state = State::Closed {
                        failures_ms: VecDeque::new(),
                    };
                }
            }
            (State::HalfOpen { .. }, RequestOutcome::Failure) => {
                self.state = State::Open { since_ms: now_ms };
            }
            // Requests sent before the circuit opened end too late to prove anything.
            (State::Open { .. }, _) | (_, RequestOutcome::Unknown) => {}
        }
        let after = self.state(now_ms);
        (after != before).then_some(after)
    }

    /// Trials without a result yet. After `timeout_ms` without a new one they are forgotten, so
    /// that a trial that never reports cannot keep the worker out for ever.
    fn trials_in_flight(&self, now_ms: u64) -> u32 {
        match self.state {
            State::HalfOpen {
                trials,
                last_trial_ms,
                ..
            } if now_ms.saturating_sub(last_trial_ms) < self.config.timeout_ms => trials,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::BreakerState::{Closed, HalfOpen, Open};
    use super::RequestOutcome::{Failure, Success, Unknown};
    use super::*;

    fn small() -> CircuitBreaker {
        let config = BreakerConfig {
            failure_threshold: 3,
            success_threshold: 2,
            timeout_ms: 100,
            window_ms: 1_000,
        };
        CircuitBreaker::new(config)
    }

    /// Finish a request at each time; returns the state after each.
    fn run(breaker: &mut CircuitBreaker, requests: &[(u64, RequestOutcome)]) -> Vec<BreakerState> {
        let mut after = Vec::new();
        for &(now_ms, outcome) in requests {
            breaker.on_sent(now_ms);
            let before = breaker.state(now_ms);
            let change = breaker.on_result(outcome, now_ms);
            after.push(breaker.state(now_ms));
            assert_eq!(
                change,
                (before != breaker.state(now_ms)).then(|| breaker.state(now_ms))
            );
        }
        after
    }

    #[test]
    fn transitions() {
        type Case = (
            &'static str,
            &'static [(u64, RequestOutcome)],
            &'static [BreakerState],
        );
        let cases: [Case; 9] = [
            (
                "opens at the threshold",
                &[(1, Failure), (2, Failure), (3, Failure)],
                &[Closed, Closed, Open],
            ),
            (
                "a success in between starts over",
                &[
                    (1, Failure),
                    (2, Failure),
                    (3, Success),
                    (4, Failure),
                    (5, Failure),
                ],
                &[Closed; 5],
            ),
            (
                "an unknown end neither counts nor starts over",
                &[
                    (1, Failure),
                    (2, Unknown),
                    (3, Failure),
                    (4, Unknown),
                    (5, Failure),
                ],
                &[Closed, Closed, Closed, Closed, Open],
            ),
            (
                "failures older than the window do not count",
                &[
                    (1, Failure),
                    (1_000, Failure),
                    (1_002, Failure),
                    (1_003, Failure),
                ],
                &[Closed, Closed, Closed, Open],
            ),
            (
                "while open results change nothing",
                &[
                    (1, Failure),
                    (1, Failure),
                    (1, Failure),
                    (50, Success),
                    (99, Failure),
                    (100, Success),
                ],
                &[Closed, Closed, Open, Open, Open, Open],
            ),
            (
                "successes after the timeout close it",
                &[
                    (1, Failure),
                    (1, Failure),
                    (1, Failure),
                    (101, Success),
                    (102, Success),
                ],
                &[Closed, Closed, Open, HalfOpen, Closed],
            ),
            (
                "a failure after the timeout opens it again, for a whole timeout",
                &[
                    (1, Failure),
                    (1, Failure),
                    (1, Failure),
                    (101, Success),
                    (102, Failure),
                    (201, Success),
                ],
                &[Closed, Closed, Open, HalfOpen, Open, Open],
            ),
            (
                "an unknown end leaves it half open",
                &[
                    (1, Failure),
                    (1, Failure),
                    (1, Failure),
                    (101, Unknown),
                    (102, Success),
                    (103, Success),
                ],
                &[Closed, Closed, Open, HalfOpen, HalfOpen, Closed],
            ),
            (
                "closed again it counts from zero",
                &[
                    (1, Failure),
                    (1, Failure),
                    (1, Failure),
                    (101, Success),
                    (102, Success),
                    (103, Failure),
                    (104, Failure),
                ],
                &[Closed, Closed, Open, HalfOpen, Closed, Closed, Closed],
            ),
        ];
        for (name, requests, expected) in cases {
            assert_eq!(run(&mut small(), requests), expected, "{name}");
        }
    }

    #[test]
    fn defaults_open_at_ten_failures_and_close_after_sixty_seconds_with_three_successes() {
        let mut breaker = CircuitBreaker::new(BreakerConfig::default());
        let states = run(&mut breaker, &[(0, Failure); 10]);
        assert_eq!(states.iter().filter(|&&state| state == Open).count(), 1);
        assert_eq!(
            [59_999, 60_000].map(|now_ms| breaker.state(now_ms)),
            [Open, HalfOpen]
        );
        assert_eq!(
            run(&mut breaker, &[(60_000, Success); 3]),
            [HalfOpen, HalfOpen, Closed]
        );
    }

    #[test]
    fn half_open_lets_few_through_at_a_time() {
        let mut breaker = small();
        run(&mut breaker, &[(1, Failure); 3]);
        assert_eq!(
            [1, 100, 101].map(|now_ms| breaker.allows_request(now_ms)),
            [false, false, true]
        );
        breaker.on_sent(101);
        assert!(breaker.allows_request(101));
        breaker.on_sent(102);
        assert!(!breaker.allows_request(102), "two trials are in flight");
        breaker.on_result(Unknown, 110);
        assert!(breaker.allows_request(110), "one ended");
    }

    #[test]
    fn trial_that_never_reports_does_not_bar_the_worker_for_ever() {
        let mut breaker = small();
        run(&mut breaker, &[(1, Failure); 3]);
        breaker.on_sent(101);
        breaker.on_sent(101);
        assert_eq!(
            [101, 200, 201].map(|now_ms| breaker.allows_request(now_ms)),
            [false, false, true]
        );
    }

    #[test]
    fn thresholds_of_zero_act_like_one() {
        let config = BreakerConfig {
            failure_threshold: 0,
            success_threshold: 0,
            timeout_ms: 10,
            window_ms: 0,
        };
        let mut breaker = CircuitBreaker::new(config);
        assert_eq!(
            run(&mut breaker, &[(1, Failure), (11, Success)]),
            [Open, Closed]
        );
    }
}
