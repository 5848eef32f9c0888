//! How often prompts arrive at a prefix: exponentially decayed counts in a bounded map.

use std::collections::HashMap;

use super::decay::DecayingSum;

/// Arrivals fade with this time constant [ms].
const DECAY_MS: f64 = 10_000.0;
/// Prefixes remembered. At a thousand arrivals a second all that matter fit; 32 bytes each.
const MAX_PREFIXES: usize = 16_384;
/// A count below this makes no difference to any decision.
const COLD: f64 = 0.1;

/// Arrivals by the hash of a prefix's last block.
#[derive(Debug, Default)]
pub struct PrefixPopularity(HashMap<u64, DecayingSum>);

impl PrefixPopularity {
    /// Decayed arrivals at this prefix.
    pub fn arrivals_of(&self, hash: u64, now_ms: f64) -> f64 {
        self.0
            .get(&hash)
            .map_or(0.0, |arrivals| arrivals.value_at(now_ms, DECAY_MS))
    }

    pub fn record_arrival(&mut self, hash: u64, now_ms: f64) {
        if self.0.len() >= MAX_PREFIXES && !self.0.contains_key(&hash) {
            self.0
                .retain(|_, arrivals| arrivals.value_at(now_ms, DECAY_MS) > COLD);
            if self.0.len() >= MAX_PREFIXES {
                self.0.clear(); // sixteen thousand warm prefixes: none of them is hot
            }
        }
        self.0.entry(hash).or_default().add(1.0, now_ms, DECAY_MS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_add_up_and_fade() {
        let mut popularity = PrefixPopularity::default();
        assert_eq!(popularity.arrivals_of(1, 0.0), 0.0);
        (0..3).for_each(|_| popularity.record_arrival(1, 0.0));
        assert_eq!(popularity.arrivals_of(1, 0.0), 3.0);
        let later = popularity.arrivals_of(1, 10_000.0);
        assert!((later - 3.0 / std::f64::consts::E).abs() < 1e-9, "{later}");
        assert_eq!(popularity.arrivals_of(2, 0.0), 0.0);
    }

    #[test]
    fn map_is_bounded_and_hot_prefixes_outlive_cold_ones() {
        let mut popularity = PrefixPopularity::default();
        (0..MAX_PREFIXES as u64 - 1).for_each(|hash| popularity.record_arrival(hash, 0.0));
        (0..100).for_each(|_| popularity.record_arrival(u64::MAX, 30_000.0));
        popularity.record_arrival(u64::MAX - 1, 30_000.0);
        assert_eq!(
            (
                popularity.0.len(),
                popularity.arrivals_of(u64::MAX, 30_000.0)
            ),
            (2, 100.0)
        );
        (0..3 * MAX_PREFIXES as u64).for_each(|hash| popularity.record_arrival(hash, 30_000.0));
        assert!(popularity.0.len() <= MAX_PREFIXES);
    }
}
