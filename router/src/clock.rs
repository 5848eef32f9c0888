//! The one place that reads the clock for decisions: monotonic milliseconds since the first call;
//! and the wall clock, for logs and metrics.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Milliseconds for the pure core's `now_ms`. Tokio's clock, so that tests can pause it.
pub fn now_ms() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    ms_since(*START.get_or_init(Instant::now))
}

/// Time since 1970 by the wall clock; zero on a host whose clock is not set.
pub fn unix_time() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

/// Whole milliseconds since `then`.
pub fn ms_since(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}
