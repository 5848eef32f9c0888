//! Pairs of workers that proved unable to work together, though their reports agree: only a
//! connection shows a difference, such as that of cluster keys.
//!
//! 1. A decode worker reports that the pair cannot work: the pair is excluded for `FIRST_MS`, and
//!    for twice as long each time it fails again, up to `LONGEST_MS`;
//! 2. the exclusion ends: one request tries the pair, while others keep away from it for
//!    `TRIAL_MS`;
//! 3. a transfer that works, or a restart of one of the two, ends the verdict.
//!
//! Deterministic, no I/O. Invariant: at most `MAX_VERDICTS` pairs are remembered, and every
//! exclusion ends by time.

use std::collections::HashMap;

/// First exclusion [ms].
const FIRST_MS: u64 = 30_000;
/// Longest exclusion [ms].
const LONGEST_MS: u64 = 480_000;
/// How long a trial keeps other requests away: longer than a decode worker takes to refuse [ms].
const TRIAL_MS: u64 = 5_000;
/// Pairs remembered: what is beyond it is tried by each request.
const MAX_VERDICTS: usize = 4096;

/// Registration ids of a prefill and a decode worker.
pub type WorkerPair = (u64, u64);

#[derive(Debug, Clone, PartialEq, Eq)]
struct PairVerdict {
    reason: String,
    until_ms: u64,
    /// Failures without a success in between.
    in_row: u32,
}

/// See the module.
#[derive(Debug, Default)]
pub struct PairVerdicts(HashMap<WorkerPair, PairVerdict>);

impl PairVerdicts {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The pair failed for a reason of its own. Returns the length of the exclusion that begins
    /// [ms]; `None` if one is under way, as for requests that were sent together.
    pub fn record_failure(&mut self, pair: WorkerPair, reason: String, now_ms: u64) -> Option<u64> {
        let previous = self.0.get(&pair);
        let in_row = previous.map_or(0, |verdict| verdict.in_row);
        let is_trial = previous.is_some_and(|verdict| verdict.until_ms <= now_ms + TRIAL_MS);
        if previous.is_some() && !is_trial {
            return None;
        }
        if previous.is_none() && self.0.len() >= MAX_VERDICTS {
            return None;
        }
        let length_ms = (FIRST_MS << in_row.min(16)).min(LONGEST_MS);
        let verdict = PairVerdict {
            reason,
            until_ms: now_ms + length_ms,
            in_row: in_row + 1,
        };
        self.0.insert(pair, verdict);
        Some(length_ms)
    }

    /// Reason for which no request is sent to the pair now.
    pub fn exclusion_reason(&self, pair: WorkerPair, now_ms: u64) -> Option<&str> {
        let verdict = self.0.get(&pair)?;
        (now_ms < verdict.until_ms).then_some(verdict.reason.as_str())
    }

    /// Pairs that no request is sent to now.
    pub fn excluded_pairs(&self, now_ms: u64) -> impl Iterator<Item = WorkerPair> {
        let active = self
            .0
            .iter()
            .filter(move |(_, verdict)| now_ms < verdict.until_ms);
        active.map(|(pair, _)| *pair)
    }

    /// A request is sent to the pair: if its exclusion is over, other requests wait for the result.
    pub fn begin_trial(&mut self, pair: WorkerPair, now_ms: u64) {
        if let Some(verdict) = self.0.get_mut(&pair) {
            verdict.until_ms = verdict.until_ms.max(now_ms + TRIAL_MS);
        }
    }

    /// The pair works.
    pub fn record_success(&mut self, pair: WorkerPair) {
        self.0.remove(&pair);
    }

    /// A worker restarted, changed or left.
    pub fn forget_worker(&mut self, worker: u64) {
        self.0.retain(|(p, d), _| *p != worker && *d != worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: WorkerPair = (1, 2);

    #[test]
    fn exclusion_doubles_up_to_its_limit_and_ends_by_time() {
        let mut verdicts = PairVerdicts::default();
        let mut now_ms = 0;
        for length_ms in [30_000, 60_000, 120_000, 240_000, 480_000, 480_000] {
            assert_eq!(
                verdicts.record_failure(PAIR, "keys".into(), now_ms),
                Some(length_ms)
            );
            assert_eq!(
                verdicts.record_failure(PAIR, "keys".into(), now_ms),
                None,
                "sent together"
            );
            assert_eq!(
                verdicts.exclusion_reason(PAIR, now_ms + length_ms - 1),
                Some("keys")
            );
            now_ms += length_ms;
            assert_eq!(verdicts.exclusion_reason(PAIR, now_ms), None);
            verdicts.begin_trial(PAIR, now_ms);
            assert_eq!(
                verdicts.exclusion_reason(PAIR, now_ms + 1),
                Some("keys"),
                "one trial"
            );
            now_ms += 2;
        }
    }

    #[test]
    fn trial_without_a_result_ends_by_time() {
        let mut verdicts = PairVerdicts::default();
        verdicts.record_failure(PAIR, "keys".into(), 0);
        verdicts.begin_trial(PAIR, FIRST_MS);
        assert!(
            verdicts
                .exclusion_reason(PAIR, FIRST_MS + TRIAL_MS - 1)
                .is_some()
        );
        assert!(
            verdicts
                .exclusion_reason(PAIR, FIRST_MS + TRIAL_MS)
                .is_none()
        );
    }

    #[test]
    fn success_and_restart_end_the_verdict() {
        let mut verdicts = PairVerdicts::default();
        for pair in [(1, 2), (1, 3), (4, 2)] {
            verdicts.record_failure(pair, "keys".into(), 0);
        }
        verdicts.record_success((1, 2));
        assert!(verdicts.exclusion_reason((1, 2), 0).is_none());
        assert!(verdicts.exclusion_reason((1, 3), 0).is_some());
        let mut excluded: Vec<WorkerPair> = verdicts.excluded_pairs(0).collect();
        excluded.sort_unstable();
        assert_eq!(excluded, [(1, 3), (4, 2)]);
        assert_eq!(verdicts.excluded_pairs(FIRST_MS).count(), 0);
        verdicts.forget_worker(3);
        verdicts.forget_worker(4);
        assert!(verdicts.is_empty());
    }

    #[test]
    fn verdicts_are_bounded() {
        let mut verdicts = PairVerdicts::default();
        for worker in 0..MAX_VERDICTS as u64 {
            assert!(
                verdicts
                    .record_failure((worker, 0), String::new(), 0)
                    .is_some()
            );
        }
        assert_eq!(
            verdicts.record_failure((MAX_VERDICTS as u64, 0), String::new(), 0),
            None
        );
    }
}
