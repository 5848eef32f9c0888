//! Health of one worker from its probes: a few failures in a row make it unhealthy, a few successes healthy again.

use serde::{Deserialize, Serialize};

/// How many probes in a row change the verdict. Defaults are SGLang's router's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HealthConfig {
    pub failure_threshold: u32,
    pub success_threshold: u32,
}

impl Default for HealthConfig {
    fn default() -> Self {
        Self {
            failure_threshold: 3,
            success_threshold: 2,
        }
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
        Self {
            config,
            is_healthy,
            against: 0,
        }
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
        let needed = if probe_ok {
            self.config.success_threshold
        } else {
            self.config.failure_threshold
        };
        if self.against < needed {
            return None;
        }
        self.against = 0;
        self.is_healthy = probe_ok;
        Some(if probe_ok {
            HealthChange::BecameHealthy
        } else {
            HealthChange::BecameUnhealthy
        })
    }
}
