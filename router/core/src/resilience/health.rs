//! Health of one worker from its probes: a few failures in a row make it unhealthy, a few successes
//! healthy again.

/// Counts probes that contradict the present verdict.
#[derive(Debug, Clone)]
pub struct HealthCounter {
    failure_threshold: u32,
    success_threshold: u32,
    is_healthy: bool,
    /// Probes in a row that contradict `is_healthy`.
    against: u32,
}

impl HealthCounter {
    /// Healthy. The thresholds say how many probes in a row change the verdict.
    pub fn new(failure_threshold: u32, success_threshold: u32) -> Self {
        Self {
            failure_threshold,
            success_threshold,
            is_healthy: true,
            against: 0,
        }
    }

    pub fn is_healthy(&self) -> bool {
        self.is_healthy
    }

    /// A probe ended. Returns the verdict if it turned: true, it is healthy now.
    pub fn record_probe(&mut self, probe_ok: bool) -> Option<bool> {
        if probe_ok == self.is_healthy {
            self.against = 0;
            return None;
        }
        self.against += 1;
        let needed = if probe_ok {
            self.success_threshold
        } else {
            self.failure_threshold
        };
        if self.against < needed {
            return None;
        }
        self.against = 0;
        self.is_healthy = probe_ok;
        Some(probe_ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probes as a string, + good and - bad; the answer has H or U where the verdict turned.
    fn run(is_healthy: bool, probes: &str) -> String {
        let mut counter = HealthCounter {
            is_healthy,
            ..HealthCounter::new(3, 2)
        };
        let verdict = |probe: char| match counter.record_probe(probe == '+') {
            Some(true) => 'H',
            Some(false) => 'U',
            None => '.',
        };
        probes.chars().map(verdict).collect()
    }

    #[test]
    fn probes_in_a_row_turn_the_verdict() {
        let cases = [
            (true, "---", "..U"),
            (true, "--+--+", "......"),
            (true, "----", "..U."),
            (true, "---+-++", "..U...H"),
            (false, "++", ".H"),
            (false, "+-+-++", ".....H"),
            (false, "++---++", ".H..U.H"),
        ];
        for (is_healthy, probes, expected) in cases {
            assert_eq!(run(is_healthy, probes), expected, "{is_healthy} {probes}");
        }
    }

    #[test]
    fn threshold_of_one_or_zero_turns_at_once() {
        for threshold in [0, 1] {
            let mut counter = HealthCounter::new(threshold, threshold);
            assert_eq!(counter.record_probe(false), Some(false));
            assert!(!counter.is_healthy());
            assert_eq!(counter.record_probe(true), Some(true));
        }
    }
}
