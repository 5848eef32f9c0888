//! --max-concurrent-requests: places for running requests, and a bounded queue in front of them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

use crate::clock::ms_since;
use crate::config::Limits;
use crate::error::RouteError;
use crate::metrics::Metrics;

/// First come, first served. A place is a permit that lives in the response body.
pub struct Admission {
    /// `None`: no limit.
    places: Option<Arc<Semaphore>>,
    running: usize,
    queue: Arc<Semaphore>,
    queue_size: usize,
    queue_timeout: Duration,
}

impl Admission {
    pub fn new(limits: &Limits) -> Self {
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

    /// Wait for a place. Dropping the future leaves the queue.
    pub async fn enter(
        &self,
        metrics: &Metrics,
    ) -> Result<Option<OwnedSemaphorePermit>, RouteError> {
        let Some(places) = &self.places else {
            return Ok(None);
        };
        if let Ok(place) = places.clone().try_acquire_owned() {
            return Ok(Some(place));
        }
        let _in_queue = self
            .queue
            .try_acquire()
            .map_err(|_| RouteError::QueueFull {
                running: self.running,
                queued: self.queue_size,
            })?;
        let _shown = Shown::new(&metrics.queued);
        let since = Instant::now();
        let place = timeout(self.queue_timeout, places.clone().acquire_owned()).await;
        metrics.queue.observe(since.elapsed().as_secs_f64());
        match place {
            Ok(Ok(place)) => Ok(Some(place)),
            Ok(Err(_closed)) => Err(RouteError::Draining),
            Err(_) => Err(RouteError::QueueTimeout {
                waited_ms: ms_since(since),
                running: self.running,
            }),
        }
    }
}

/// Counts a waiting request in the gauge while it waits.
struct Shown<'a>(&'a prometheus::Gauge);

impl<'a> Shown<'a> {
    fn new(gauge: &'a prometheus::Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}
