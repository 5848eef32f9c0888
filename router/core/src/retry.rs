//! Whether and when to try again. The budget, the sleeping and "no byte reached the client yet" are the shell's.

use rand::{Rng, RngCore};
use serde::{Deserialize, Serialize};

/// Attempts and waits. Defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
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

impl RetryConfig {
    /// Whether another attempt is allowed after `attempts` of them failed.
    pub fn allows_another(&self, attempts: u32) -> bool {
        attempts < self.max_attempts
    }

    /// How long to wait after `attempts` (1 = only the first) failed, never above `max_backoff_ms`.
    pub fn backoff_ms(&self, attempts: u32, rng: &mut dyn RngCore) -> u64 {
        let growth = self
            .multiplier
            .max(1.0)
            .powf(f64::from(attempts.saturating_sub(1)));
        let cap_ms = self.max_backoff_ms as f64;
        let base_ms = (self.initial_backoff_ms as f64 * growth).min(cap_ms);
        let jitter = self.jitter.clamp(0.0, 1.0);
        let factor = if jitter > 0.0 {
            rng.random_range(1.0 - jitter..=1.0 + jitter)
        } else {
            1.0
        };
        (base_ms * factor).min(cap_ms).round() as u64
    }
}

/// Statuses another worker, or a later moment, may answer better. A deterministic refusal (other 4xx) is not one.
pub fn is_retryable_status(status: u16) -> bool {
    matches!(status, 408 | 429 | 500 | 502 | 503 | 504)
}

#[cfg(test)]
mod tests {
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
        let (config, mut rng) = (RetryConfig::default(), StdRng::seed_from_u64(1));
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
        let allowed: Vec<u32> = (0..8).filter(|&done| config.allows_another(done)).collect();
        assert_eq!(allowed, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn retryable_statuses_are_exactly_these() {
        let retryable: Vec<u16> = (100..600)
            .filter(|&status| is_retryable_status(status))
            .collect();
        assert_eq!(retryable, [408, 429, 500, 502, 503, 504]);
    }
}
