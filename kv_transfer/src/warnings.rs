//! Warnings about peers, one per subject and minute, because a fault between two nodes repeats with
//! each of their rooms.
//!
//! Deterministic, no I/O: the caller passes the time and writes the line.

use std::collections::HashMap;
use std::hash::Hash;

/// Pause between two warnings about one subject [ms].
const PAUSE_MS: u64 = 60_000;
/// Most subjects with a time of their own: a fleet's peers. Beyond it nothing is reported.
const MAX_SUBJECTS: usize = 1024;

/// Last warning about a subject.
#[derive(Debug)]
struct LastWarning {
    at_ms: u64,
    /// Occasions since then.
    suppressed: u64,
}

/// Subjects that were warned about within a minute.
#[derive(Debug)]
pub struct PeerWarnings<K>(HashMap<K, LastWarning>);

impl<K> Default for PeerWarnings<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> PeerWarnings<K> {
    /// Record an occasion. Returns how many occasions a warning that is due now is about; `None`
    /// while the last one about `subject` is younger than a minute.
    pub fn record(&mut self, subject: K, now_ms: u64) -> Option<u64> {
        if let Some(last) = self.0.get_mut(&subject) {
            last.suppressed += 1;
            if now_ms.saturating_sub(last.at_ms) < PAUSE_MS {
                return None;
            }
            last.at_ms = now_ms;
            return Some(std::mem::take(&mut last.suppressed));
        }
        if self.0.len() >= MAX_SUBJECTS {
            self.0
                .retain(|_, last| now_ms.saturating_sub(last.at_ms) < PAUSE_MS);
        }
        if self.0.len() >= MAX_SUBJECTS {
            return None;
        }
        let last = LastWarning {
            at_ms: now_ms,
            suppressed: 0,
        };
        self.0.insert(subject, last);
        Some(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_subject_is_warned_about_once_a_minute() {
        let mut warnings = PeerWarnings::default();
        assert_eq!(warnings.record("a", 0), Some(1));
        assert_eq!(warnings.record("a", 1), None);
        assert_eq!(warnings.record("b", 1), Some(1));
        assert_eq!(warnings.record("a", PAUSE_MS - 1), None);
        assert_eq!(warnings.record("a", PAUSE_MS), Some(3));
        assert_eq!(warnings.record("a", PAUSE_MS + 1), None);
    }

    #[test]
    fn subjects_are_bounded_and_forgotten_after_a_minute() {
        let mut warnings = PeerWarnings::default();
        for subject in 0..MAX_SUBJECTS {
            assert_eq!(warnings.record(subject, 0), Some(1));
        }
        assert_eq!(warnings.record(MAX_SUBJECTS, 1), None);
        assert_eq!(warnings.record(MAX_SUBJECTS, PAUSE_MS), Some(1));
        assert_eq!(warnings.0.len(), 1);
    }
}
