//! Health of one worker from its probes: a few failures in a row make it unhealthy, a few successes
//! healthy again.

/// How many probes in a row change the verdict. Defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthConfig {
    pub failure_threshold: u32,
    pub success_threshold: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self { failure_threshold: 3, success_threshold: 2 }
    }
}

/// A verdict that just changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthChange {
    BecameHealthy,
    BecameUnhealthy,
}

/// Counts probes that contradict the present verdict.
#[derive(Debug, Clone)]
pub struct HealthCounter {
    config: HealthConfig,
    is_healthy: bool,
    /// Probes in a row that contradict `is_healthy`.
    against: u32,
}

impl HealthCounter {
    pub fn new(config: HealthConfig, is_healthy: bool) -> Self {
        Self { config, is_healthy, against: 0 }
    }

    pub fn is_healthy(&self) -> bool {
        self.is_healthy
    }

    /// A probe ended. Returns the change if it turned the verdict.
    pub fn record(&mut self, probe_ok: bool) -> Option<HealthChange> {
        if probe_ok == self.is_healthy {
            self.against = 0;
            return None;
        }
        self.against += 1;
        let needed =
            if probe_ok { self.config.success_threshold } else { self.config.failure_threshold };
        if self.against < needed {
            return None;
        }
        self.against = 0;
        self.is_healthy = probe_ok;
        Some(if probe_ok { HealthChange::BecameHealthy } else { HealthChange::BecameUnhealthy })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probes as a string, + good and - bad; the answer has H or U where the verdict turned.
    fn run(is_healthy: bool, probes: &str) -> String {
        let mut counter = HealthCounter::new(HealthConfig::default(), is_healthy);
        let verdict = |probe: char| match counter.record(probe == '+') {
            Some(HealthChange::BecameHealthy) => 'H',
            Some(HealthChange::BecameUnhealthy) => 'U',
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
            let config =
                HealthConfig { failure_threshold: threshold, success_threshold: threshold };
            let mut counter = HealthCounter::new(config, true);
            assert_eq!(counter.record(false), Some(HealthChange::BecameUnhealthy));
            assert!(!counter.is_healthy());
            assert_eq!(counter.record(true), Some(HealthChange::BecameHealthy));
        }
    }
}
