//! --max-concurrent-requests: places for running requests, and a bounded queue in front of them.
//!
//! With --rate-limit-tokens-per-second the places are tokens of a bucket, as in SGLang's router:
//! taken by a request, given back at its end, and added at that rate while the bucket is not full.
//! So --max-concurrent-requests bounds a burst, and a flow of that many per second passes however
//! long its answers take.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, interval, timeout};

use crate::clock::ms_since;
use crate::config::LimitFlags;
use crate::error::RouteError;
use crate::observability::metrics::RouterMetrics;

/// First come, first served. A place is a permit that lives in the response body.
pub struct AdmissionController {
    /// `None`: no limit.
    places: Option<Arc<Semaphore>>,
    running: usize,
    queue: Arc<Semaphore>,
    queue_size: usize,
    queue_timeout: Duration,
}

/// How often a bucket is filled.
const FILL_EVERY: Duration = Duration::from_millis(10);

impl AdmissionController {
    /// Fill the bucket, if there is one, as long as this router lives.
    pub fn keep_filling(&self, limits: &LimitFlags) {
        let (Some(rate), Some(places)) = (limits.rate_limit_tokens_per_second, &self.places) else {
            return;
        };
        let places = Arc::downgrade(places);
        let size = self.running;
        tokio::spawn(async move {
            let mut turn = interval(FILL_EVERY);
            let mut last = Instant::now();
            let mut owed = 0.0;
            loop {
                let now = turn.tick().await;
                // The router has ended; a strong reference would keep the task alive for ever.
                let Some(places) = places.upgrade() else {
                    return;
                };
                owed += f64::from(rate) * (now - last).as_secs_f64();
                last = now;
                let (add, forget) = balance_bucket(&mut owed, places.available_permits(), size);
                places.add_permits(add);
                places.forget_permits(forget);
            }
        });
    }

    pub fn new(limits: &LimitFlags) -> Self {
        let running = usize::try_from(limits.max_concurrent_requests).ok();
        let running = running.map(|n| n.min(Semaphore::MAX_PERMITS));
        let queue_size = limits.queue_size.min(Semaphore::MAX_PERMITS);
        Self {
            places: running.map(|n| Arc::new(Semaphore::new(n))),
            running: running.unwrap_or(0),
            queue: Arc::new(Semaphore::new(queue_size)),
            queue_size,
            queue_timeout: Duration::from_secs(limits.queue_timeout_secs),
        }
    }

    /// A place in the queue for a request that waits for a worker. `None`: --queue-size places are
    /// taken.
    pub fn queue_place(&self, metrics: &RouterMetrics) -> Option<QueuePlace> {
        let place = self.queue.clone().try_acquire_owned().ok()?;
        Some(QueuePlace {
            _place: place,
            _shown: GaugeGuard::new(&metrics.queued),
        })
    }

    /// Refuse a request that would find the queue full, before its body is read.
    pub fn check_queue(&self) -> Result<(), RouteError> {
        // Without --max-concurrent-requests nothing waits here.
        let Some(places) = &self.places else {
            return Ok(());
        };
        let has_room = places.available_permits() > 0 || self.queue.available_permits() > 0;
        has_room.then_some(()).ok_or_else(|| self.queue_full())
    }

    fn queue_full(&self) -> RouteError {
        RouteError::QueueFull {
            running: self.running,
            queued: self.queue_size,
        }
    }

    /// Wait for a place. Dropping the future leaves the queue, so that a client that leaves blocks
    /// none.
    pub async fn enter(
        &self,
        metrics: &RouterMetrics,
    ) -> Result<Option<OwnedSemaphorePermit>, RouteError> {
        let Some(places) = &self.places else {
            return Ok(None);
        };
        // The usual case takes no place in the queue, shows up in no gauge and reads no clock.
        if let Ok(place) = places.clone().try_acquire_owned() {
            return Ok(Some(place));
        }
        let _in_queue = self.queue.try_acquire().map_err(|_| self.queue_full())?;
        let _shown = GaugeGuard::new(&metrics.queued);
        let since = Instant::now();
        let place = timeout(self.queue_timeout, places.clone().acquire_owned()).await;
        metrics.queue.observe(since.elapsed().as_secs_f64());
        let waited_ms = ms_since(since);
        let running = self.running;
        let place = place.map_err(|_| RouteError::QueueTimeout { waited_ms, running })?;
        place.map(Some).map_err(|_closed| RouteError::Draining)
    }
}

/// Tokens to add to, and to take out of, a bucket with `available` of `size` tokens, when `owed`
/// have come in the meantime. Ended requests give theirs back to a bucket that may have been filled
/// since: above its size it would let larger bursts through.
fn balance_bucket(owed: &mut f64, available: usize, size: usize) -> (usize, usize) {
    let whole = owed.floor();
    *owed -= whole;
    let add = size.saturating_sub(available).min(whole as usize);
    (add, available.saturating_sub(size))
}

/// A place of --queue-size; free when dropped.
pub struct QueuePlace {
    _place: OwnedSemaphorePermit,
    _shown: GaugeGuard,
}

/// Counts in a gauge while it lives.
pub struct GaugeGuard(prometheus::Gauge);

impl GaugeGuard {
    pub fn new(gauge: &prometheus::Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::balance_bucket;

    #[test]
    fn bucket_takes_whole_tokens_up_to_its_size() {
        let mut owed = 2.75;
        assert_eq!(balance_bucket(&mut owed, 0, 8), (2, 0));
        owed += 0.25;
        assert_eq!(balance_bucket(&mut owed, 2, 8), (1, 0));
        owed += 100.0;
        assert_eq!(
            (balance_bucket(&mut owed, 7, 8), owed),
            ((1, 0), 0.0),
            "a full bucket overflows"
        );
        assert_eq!(balance_bucket(&mut owed, 11, 8), (0, 3));
    }
}
