//! Sums that decay with time.

/// A sum that fades.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DecayingSum {
    pub(super) sum: f64,
    at_ms: f64,
}

impl DecayingSum {
    pub(super) fn value_at(self, now_ms: f64, tau_ms: f64) -> f64 {
        self.sum * ((self.at_ms - now_ms) / tau_ms).exp()
    }

    pub(super) fn add(&mut self, more: f64, now_ms: f64, tau_ms: f64) {
        let sum = self.value_at(now_ms, tau_ms) + more;
        *self = Self { sum, at_ms: now_ms };
    }
}
