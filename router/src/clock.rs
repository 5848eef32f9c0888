//! The one place that reads the clock for decisions: monotonic milliseconds since the first call.

use std::sync::OnceLock;

use tokio::time::Instant;

/// Milliseconds for the pure core's `now_ms`. Tokio's clock, so that tests can pause it.
pub fn now_ms() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Whole milliseconds since `then`.
pub fn ms_since(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}
