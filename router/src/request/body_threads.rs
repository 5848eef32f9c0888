//! Threads for work on large bodies: parsing, hashing and reading token ids of 20 MB take up to 50
//! ms, and while one of the event loop's threads does it, streams that it serves stand still.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::thread::available_parallelism;

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::error::RouteError;

/// Bodies up to this size are worked on where they are: at 0.3 (plain text) to 2 ns (escapes, token
/// ids) a byte that takes half a millisecond at most, about as long as a hop to another thread may
/// take on a busy machine [bytes].
const INLINE_BYTES: usize = 256 << 10;

/// Half of the machine's cores, at least one, work on large bodies at a time; the other requests'
/// work waits in the order in which it came. Its memory is bounded by --max-total-body-bytes.
pub struct BodyThreads {
    places: Arc<Semaphore>,
}

impl Default for BodyThreads {
    fn default() -> Self {
        let cores = available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            places: Arc::new(Semaphore::new((cores / 2).max(1))),
        }
    }
}

impl BodyThreads {
    /// Returns what `work` returns, which reads `bytes` bytes of a body. If the future is dropped
    /// while it runs, it runs to its end for nothing.
    pub async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RouteError> {
        if bytes <= INLINE_BYTES {
            return Ok(work());
        }
        let failed = |detail: String| RouteError::Internal { detail };
        let place = self.places.clone().acquire_owned().await;
        let place = place.map_err(|err| failed(err.to_string()))?;
        let working = spawn_blocking(move || {
            let _place = place; // returned with the thread, not with the future
            work()
        });
        working
            .await
            .map_err(|err| failed(format!("the work on a body of {bytes} bytes failed: {err}")))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod tests;
