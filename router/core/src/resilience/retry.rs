//! Limits of retries: attempts of one request, pauses between them, and the budget of the fleet.
//! The decision after each failure is in `retry_verdict`.

use rand::{Rng, RngCore};

/// Attempts and waits. Defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryConfig {
    /// All attempts, the first included.
    pub max_attempts: u32,
    pub initial_backoff_ms: u64,
    pub max_backoff_ms: u64,
    /// Each wait is this times the one before.
    pub multiplier: f64,
    /// Each wait is scaled by a random factor in `[1 - jitter, 1 + jitter]`.
    pub jitter: f64,
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            max_attempts: 5,
            initial_backoff_ms: 50,
            max_backoff_ms: 30_000,
            multiplier: 1.5,
            jitter: 0.2,
        }
    }
}

/// A worker that is lost after it had a request for this long was not lost to a series of hasty
/// retries [ms].
const HELD_MS: u64 = 5_000;
/// This many such losses count as one attempt: a request that waits for minutes outlives several
/// workers.
const LOSSES_PER_ATTEMPT: u32 = 4;

/// Failed attempts of a request since its client last got a token.
#[derive(Debug, Clone, Copy, Default)]
pub struct FailedAttempts {
    quick: u32,
    losses: u32,
}

impl FailedAttempts {
    /// Count an attempt that failed `held_ms` after it was sent; `lost_worker`: because a worker
    /// went away.
    pub fn add_attempt(&mut self, held_ms: u64, lost_worker: bool) {
        // A request of minutes may outlive several workers; counted in full, their ends would fail
        // it.
        if lost_worker && held_ms >= HELD_MS {
            self.losses += 1;
        } else {
            self.quick += 1;
        }
    }

    /// As `--retry-max-retries` and the back-off count them.
    pub fn count(&self) -> u32 {
        self.quick + self.losses.div_ceil(LOSSES_PER_ATTEMPT)
    }
}

impl RetryConfig {
    /// True if another attempt is allowed after `failed` of them.
    pub fn allows_another(&self, failed: FailedAttempts) -> bool {
        failed.count() < self.max_attempts
    }

    /// Pause after `attempts` (1 = only the first) failed, never above `max_backoff_ms`.
    pub fn backoff_ms(&self, attempts: u32, rng: &mut dyn RngCore) -> u64 {
        let growth = self
            .multiplier
            .max(1.0)
            .powf(f64::from(attempts.saturating_sub(1)));
        let cap_ms = self.max_backoff_ms as f64;
        let base_ms = (self.initial_backoff_ms as f64 * growth).min(cap_ms);
        let jitter = self.jitter.clamp(0.0, 1.0);
        // An empty range has no random number.
        let factor = if jitter > 0.0 {
            rng.random_range(1.0 - jitter..=1.0 + jitter)
        } else {
            1.0
        };
        (base_ms * factor).min(cap_ms).round() as u64
    }
}

/// Slices of time in a budget's window.
const SLICES: usize = 16;

/// Requests and retries in one slice of the window.
#[derive(Debug, Clone, Copy, Default)]
struct BudgetSlice {
    requests: u64,
    retries: u64,
}

/// Requests and retries of the fleet in a sliding window: a dying worker must not bring the others
/// its whole load several times over.
///
/// Invariant: the retries granted in the window are at most `floor + ratio * requests` of it. The
/// window is kept in slices, so that it is between 15/16 and 16/16 of `window_ms` long. O(1)
/// memory; time that goes back counts as standing still.
#[derive(Debug)]
pub struct RetryBudget {
    /// Retries per request of the window.
    ratio: f64,
    /// Retries in the window that are always allowed: as many as one worker has requests in flight
    /// when it dies.
    floor: u32,
    window_ms: u64,
    slices: [BudgetSlice; SLICES],
    /// Number of the newest slice since the epoch of `now_ms`.
    newest: u64,
}

impl RetryBudget {
    pub fn new(ratio: f64, floor: u32, window_ms: u64) -> Self {
        Self {
            ratio,
            floor,
            window_ms,
            slices: [BudgetSlice::default(); SLICES],
            newest: 0,
        }
    }

    /// A request came in.
    pub fn on_request(&mut self, now_ms: u64) {
        self.advance_window(now_ms).requests += 1;
    }

    /// Take a retry out of the budget. False: the budget is used up.
    pub fn try_retry(&mut self, now_ms: u64) -> bool {
        self.advance_window(now_ms);
        let requests: u64 = self.slices.iter().map(|slice| slice.requests).sum();
        let retries: u64 = self.slices.iter().map(|slice| slice.retries).sum();
        let allowed = f64::from(self.floor) + self.ratio * requests as f64;
        let is_granted = (retries + 1) as f64 <= allowed;
        // Only granted retries count, or refused ones would keep the budget used up for ever.
        if is_granted {
            self.advance_window(now_ms).retries += 1;
        }
        is_granted
    }

    /// Forget slices that have left the window; returns the present one.
    fn advance_window(&mut self, now_ms: u64) -> &mut BudgetSlice {
        let slice_ms = (self.window_ms / SLICES as u64).max(1);
        let now = now_ms / slice_ms;
        let expired = now.saturating_sub(self.newest).min(SLICES as u64);
        self.newest = self.newest.max(now);
        for age in 0..expired {
            let index = (self.newest - age) % SLICES as u64;
            self.slices[index as usize] = BudgetSlice::default();
        }
        let index = self.newest % SLICES as u64;
        &mut self.slices[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn waits_grow_by_half_up_to_the_cap() {
        let config = RetryConfig {
            jitter: 0.0,
            ..RetryConfig::default()
        };
        let wait_ms = |attempts| config.backoff_ms(attempts, &mut StdRng::seed_from_u64(1));
        assert_eq!([1, 2, 3, 4, 5].map(wait_ms), [50, 75, 113, 169, 253]);
        assert_eq!(
            [16, 17, 1_000, u32::MAX].map(wait_ms),
            [21_895, 30_000, 30_000, 30_000]
        );
    }

    #[test]
    fn jitter_spreads_waits_over_its_whole_range_and_no_further() {
        let config = RetryConfig::default();
        let mut rng = StdRng::seed_from_u64(1);
        let waits: Vec<u64> = (0..2_000).map(|_| config.backoff_ms(1, &mut rng)).collect();
        assert_eq!(
            (waits.iter().min(), waits.iter().max()),
            (Some(&40), Some(&60))
        );
        let capped = (0..2_000).map(|_| config.backoff_ms(100, &mut rng)).max();
        assert_eq!(capped, Some(30_000));
    }

    #[test]
    fn five_attempts_in_all() {
        let config = RetryConfig::default();
        let after = |quick, losses| config.allows_another(FailedAttempts { quick, losses });
        let allowed: Vec<u32> = (0..8).filter(|&quick| after(quick, 0)).collect();
        assert_eq!(allowed, [0, 1, 2, 3, 4]);
        assert!(after(3, 4) && !after(4, 1) && after(0, 16) && !after(0, 17));
    }

    #[test]
    fn only_the_loss_of_a_worker_that_had_the_request_for_long_counts_less() {
        for (held_ms, lost_worker, counts) in [
            (HELD_MS, true, 1),
            (HELD_MS - 1, true, 4),
            (HELD_MS, false, 4),
        ] {
            let mut failed = FailedAttempts::default();
            (0..4).for_each(|_| failed.add_attempt(held_ms, lost_worker));
            assert_eq!(failed.count(), counts, "{held_ms} {lost_worker}");
        }
    }

    proptest! {
        /// Against a list of all that happened.
        #[test]
        fn retries_stay_within_floor_and_ratio_of_any_window(
            ratio in 0.0f64..1.0, floor in 0u32..5, window_ms in 1u64..5_000,
            steps in proptest::collection::vec((0u64..700, any::<bool>()), 0..400),
        ) {
            let mut budget = RetryBudget::new(ratio, floor, window_ms);
            let slice_ms = (window_ms / SLICES as u64).max(1);
            let mut now_ms = 0;
            let mut requests = Vec::new();
            let mut granted = Vec::new();
            for (wait_ms, is_retry) in steps {
                now_ms += wait_ms;
                let slice = now_ms / slice_ms;
                if !is_retry {
                    budget.on_request(now_ms);
                    requests.push(slice);
                    continue;
                }
                let since = |list: &[u64]| list.iter().filter(|at| **at + SLICES as u64 > slice).count();
                let allowed = f64::from(floor) + ratio * since(&requests) as f64;
                let expected = (since(&granted) + 1) as f64 <= allowed;
                prop_assert_eq!(budget.try_retry(now_ms), expected);
                if expected {
                    granted.push(slice);
                }
            }
        }
    }

    #[test]
    fn budget_used_up_comes_back_when_the_window_has_passed() {
        let mut budget = RetryBudget::new(0.1, 2, 1_600);
        (0..10).for_each(|_| budget.on_request(1_000));
        let granted =
            |budget: &mut RetryBudget, now_ms| (0..10).filter(|_| budget.try_retry(now_ms)).count();
        assert_eq!(granted(&mut budget, 1_000), 3);
        assert_eq!(granted(&mut budget, 2_499), 0);
        // Time that goes back brings nothing back.
        assert_eq!(granted(&mut budget, 0), 0);
        assert_eq!(granted(&mut budget, 2_600), 2);
    }
}
