//! Prefill leg of a pair: read to its end in a task of its own, while the decode leg answers.

/// Release of prefilled pages that no decode worker will pull.
mod page_release;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use router_core::LiveRooms;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::dispatch::app::AppState;
use crate::dispatch::attempt::AttemptError;
use crate::dispatch::prefill_leg::page_release::release_pages;
use crate::error::RouteError;
use crate::workers::load_guard::Candidate;

/// A prefill leg that is still being read when the answer is complete gets this long; its KV has
/// arrived.
const PREFILL_LINGER: Duration = Duration::from_secs(5);

/// Rooms of one request; free again when it is dropped.
pub struct RoomLease {
    pub(super) rooms: Vec<u64>,
    live: Arc<Mutex<LiveRooms>>,
}

impl RoomLease {
    pub(super) fn take(
        app: &AppState,
        count: usize,
        prefill: &Candidate,
    ) -> Result<Self, RouteError> {
        // With a rank the room is drawn so that room % dp_size is that rank: unmodified SGLang
        // nodes place by it.
        let dp = prefill
            .rank
            .map(|rank| (u64::from(prefill.description.dp_size()), u64::from(rank)));
        let mut live = app.rooms.lock();
        let rooms = live.draw_rooms(count, &mut rand::rng(), dp);
        let rooms = rooms.ok_or_else(|| RouteError::TooManyRooms {
            live: live.live_count(),
        })?;
        Ok(Self {
            rooms,
            live: app.rooms.clone(),
        })
    }
}

impl Drop for RoomLease {
    fn drop(&mut self) {
        self.live.lock().free_rooms(&self.rooms);
    }
}

/// The prefill leg's task. Dropping it aborts the leg and has P free pages that no decode worker
/// will pull.
pub struct PrefillAttempt {
    pub(super) task: Option<JoinHandle<Result<Vec<Bytes>, AttemptError>>>,
    /// Answer when it has ended well, if it was to be kept.
    pub response: Option<Vec<Bytes>>,
    pub(super) app: Arc<AppState>,
    pub(super) prefill: Arc<Candidate>,
    pub(super) rooms: RoomLease,
    /// The decode worker has begun, so it has the pages.
    pub(super) pages_claimed: bool,
}

impl PrefillAttempt {
    /// Wait for the end of the leg; `None` when its task panicked or has ended before. Cancel safe.
    pub async fn ended(&mut self) -> Option<Result<(), AttemptError>> {
        let ended = self.task.as_mut()?.await.ok();
        self.task = None;
        Some(ended?.map(|response| self.response = Some(response)))
    }

    /// The answer is complete: read the rest so that the connection can be used again, but not for
    /// long.
    pub fn drain_in_background(mut self) {
        if let Some(task) = self.task.take().filter(|task| !task.is_finished()) {
            let abort = task.abort_handle();
            tokio::spawn(async move {
                if timeout(PREFILL_LINGER, task).await.is_err() {
                    abort.abort();
                }
            });
        }
    }
}

impl Drop for PrefillAttempt {
    fn drop(&mut self) {
        let task = self.task.take();
        if let Some(task) = task.as_ref().filter(|task| !task.is_finished()) {
            task.abort();
            self.app
                .metrics
                .leg_aborts
                .with_label_values(&["prefill", "dropped"])
                .inc();
        }
        // Also after an aborted leg: the prompt may be computed, and only the answer still in
        // transit.
        if !self.pages_claimed && (task.is_some() || self.response.is_some()) {
            release_pages(&self.app, &self.prefill.worker, &self.rooms.rooms);
        }
    }
}
