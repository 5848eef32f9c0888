//! KV traffic of each pair of prefill and decode worker, as decode workers report it: for the web
//! page.
//!
//! 1. a decode leg opens: its pull is added to the pair's sums (disaggregated);
//! 2. an attempt fails for a reason that is the transfer's or P's: it is counted with its reason;
//! 3. a snapshot for the page drops pairs of which a worker is no longer registered.
//!
//! Bounded: `MAX_PAIRS`; a new pair then replaces the one without traffic for longest.

use std::collections::HashMap;

use parking_lot::Mutex;
use router_core::AttemptReason;
use serde::Serialize;

use crate::observability::engine_stages::{EngineStages, PagePull};

/// Pairs remembered: 64 prefill and 64 decode workers that all meet.
const MAX_PAIRS: usize = 4096;
/// A pull counts half as much in the pair's speed after this time.
const HALF_LIFE_MS: f64 = 30_000.0;

/// Prefill and decode worker, by their ids in `/workers`.
pub type PairId = (u64, u64);

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PairRecord {
    /// Requests whose answer began.
    pub requests: u64,
    pub bytes: u64,
    /// Transport of the last pull.
    pub transport: Option<String>,
    pub failures: u64,
    /// Reason of the last failure.
    pub last_failure: Option<&'static str>,
    #[serde(skip)]
    recent_bytes: f64,
    #[serde(skip)]
    recent_ms: f64,
    #[serde(skip)]
    used_ms: u64,
}

impl PairRecord {
    /// Speed of recent pulls, while they ran [bytes/s].
    pub fn bytes_per_s(&self) -> Option<f64> {
        (self.recent_ms > 0.0).then(|| self.recent_bytes / self.recent_ms * 1e3)
    }

    fn take(&mut self, pull: &PagePull, now_ms: u64) {
        let age_ms = now_ms.saturating_sub(self.used_ms) as f64;
        let weight = 0.5_f64.powf(age_ms / HALF_LIFE_MS);
        self.recent_bytes = self.recent_bytes * weight + pull.bytes as f64;
        self.recent_ms = self.recent_ms * weight + pull.pull_ms;
        self.bytes += pull.bytes;
        self.transport = Some(pull.transport.clone());
    }
}

#[derive(Debug, Default)]
pub struct PairTraffic {
    pairs: Mutex<HashMap<PairId, PairRecord>>,
}

impl PairTraffic {
    /// An answer of this pair began.
    pub fn opened(&self, pair: PairId, stages: Option<&EngineStages>, now_ms: u64) {
        // Without bytes all pages were there: nothing was moved.
        let pull = stages
            .and_then(|stages| stages.pull.as_ref())
            .filter(|pull| pull.bytes > 0);
        self.change(pair, now_ms, |record| {
            record.requests += 1;
            if let Some(pull) = pull {
                record.take(pull, now_ms);
            }
        });
    }

    /// An attempt of this pair failed; the decode worker blames the transfer or the prefill worker.
    pub fn failed(&self, pair: PairId, reason: AttemptReason, now_ms: u64) {
        self.change(pair, now_ms, |record| {
            record.failures += 1;
            record.last_failure = Some(reason.into_str());
        });
    }

    fn change(&self, pair: PairId, now_ms: u64, change: impl FnOnce(&mut PairRecord)) {
        let mut pairs = self.pairs.lock();
        if pairs.len() >= MAX_PAIRS && !pairs.contains_key(&pair) {
            let idle = pairs.iter().min_by_key(|(_, record)| record.used_ms);
            if let Some(idle) = idle.map(|(pair, _)| *pair) {
                pairs.remove(&idle);
            }
        }
        let record = pairs.entry(pair).or_default();
        change(record);
        record.used_ms = now_ms;
    }

    /// Copies of the records of registered workers, in order; drops the others.
    pub fn snapshot(&self, is_registered: impl Fn(u64) -> bool) -> Vec<(PairId, PairRecord)> {
        let mut pairs = self.pairs.lock();
        pairs.retain(|(prefill, decode), _| is_registered(*prefill) && is_registered(*decode));
        let mut all: Vec<_> = pairs
            .iter()
            .map(|(pair, record)| (*pair, record.clone()))
            .collect();
        drop(pairs);
        all.sort_unstable_by_key(|(pair, _)| *pair);
        all
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use router_core::ProtocolCode;

    use super::*;

    fn pulled(bytes: u64, pull_ms: f64) -> EngineStages {
        let pull = PagePull {
            transport: "shm".into(),
            pages: 1,
            bytes,
            pull_ms,
        };
        EngineStages {
            queue_ms: None,
            pull: Some(pull),
        }
    }

    #[test]
    fn speed_follows_recent_pulls_and_empty_ones_do_not_count() {
        let traffic = PairTraffic::default();
        traffic.opened((1, 2), Some(&pulled(1_000, 1.0)), 0);
        traffic.opened((1, 2), Some(&pulled(0, 0.0)), 0);
        traffic.opened((1, 2), None, 0);
        let reason = AttemptReason::Code(ProtocolCode::KvTransferFailed);
        traffic.failed((1, 2), reason, 0);
        let record = traffic.snapshot(|_| true).remove(0).1;
        assert_eq!(
            (record.requests, record.bytes, record.failures),
            (3, 1_000, 1)
        );
        assert_eq!(record.bytes_per_s(), Some(1e6));
        assert_eq!(record.last_failure, Some("kv_transfer_failed"));
        // An hour later the old speed has no weight.
        traffic.opened((1, 2), Some(&pulled(1_000, 10.0)), 3_600_000);
        let record = traffic.snapshot(|_| true).remove(0).1;
        assert!((record.bytes_per_s().unwrap() - 1e5).abs() < 1.0);
    }

    #[test]
    fn pairs_of_removed_workers_and_the_idlest_beyond_the_limit_are_dropped() {
        let traffic = PairTraffic::default();
        for decode in 0..=MAX_PAIRS as u64 {
            traffic.opened((0, decode), None, decode);
        }
        let all = traffic.snapshot(|_| true);
        assert_eq!((all.len(), all[0].0), (MAX_PAIRS, (0, 1)));
        let left = traffic.snapshot(|id| id <= 2);
        assert_eq!(
            left.iter().map(|(pair, _)| *pair).collect::<Vec<_>>(),
            [(0, 1), (0, 2)]
        );
        assert_eq!(traffic.snapshot(|_| true).len(), 2);
    }
}
