//! Waits of an attempt: for its turn among the interrupted streams, and for a worker while none can
//! be chosen.
//!
//! A resuming stream (its answer has opened) is never refused a turn, and no retry budget applies
//! to it. A request without an answer holds a place of --queue-size while it waits. Dropping the
//! future (the client left) gives turn and place back.

use std::time::Duration;

use router_core::{PacerTicket, Role};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};

use crate::dispatch::app::AppState;
use crate::dispatch::context::RequestContext;

/// A circuit closes, and a refused connection is accepted again, without a change of the fleet:
/// look again after this.
const RECHECK: Duration = Duration::from_secs(1);

/// A turn to attempt an answer; the next stream gets it when this is dropped.
pub struct ResumeTurn<'a> {
    app: &'a AppState,
    ticket: PacerTicket,
}

impl<'a> ResumeTurn<'a> {
    pub async fn wait(app: &'a AppState) -> Self {
        let (waker, is_due) = oneshot::channel();
        let limit = turn_limit(app);
        let (ticket, due) = app.resume_pacer.lock().enter(waker, limit);
        let turn = Self { app, ticket };
        wake_streams(app, due);
        // The sender is dropped only together with this place: an error cannot come.
        let _ = is_due.await;
        turn
    }
}

impl Drop for ResumeTurn<'_> {
    fn drop(&mut self) {
        let limit = turn_limit(self.app);
        let due = self.app.resume_pacer.lock().leave(self.ticket, limit);
        wake_streams(self.app, due);
    }
}

/// --failover-concurrency for each ready worker of the role that has the fewest.
fn turn_limit(app: &AppState) -> usize {
    let ready_workers = |role: &Role| app.fleet.count(*role).1;
    let roles = app.fleet.serving_roles().iter();
    let fewest_workers = roles.map(ready_workers).min().unwrap_or(0);
    fewest_workers.saturating_mul(app.config.retry.failover_concurrency)
}

fn wake_streams(app: &AppState, due: Vec<oneshot::Sender<()>>) {
    let waiting = app.resume_pacer.lock().waiting_count();
    app.metrics.resumes_waiting.set(waiting as f64);
    for waker in due {
        // The client of a stream may have left: dropping its turn gives the turn to the next one.
        let _ = waker.send(());
    }
}

/// A request's wait for a worker.
#[derive(Default)]
pub enum WorkerWait {
    /// The request has not waited yet.
    #[default]
    NotBegun,
    /// The wait runs from the first time that no worker could be chosen.
    Begun {
        until: Instant,
        changes: watch::Receiver<()>,
    },
}

impl WorkerWait {
    /// Wait for a change of the fleet. False: the request may not wait, or
    /// --worker-wait-timeout-secs have passed.
    pub async fn wait_for_change(&mut self, app: &AppState, request: &mut RequestContext) -> bool {
        let limit = Duration::from_secs(app.config.retry.worker_wait_timeout_secs);
        // A router that ends gets no worker any more, and the requests that wait are bounded by
        // --queue-size.
        if limit.is_zero() || app.is_cut() || !request.take_place(app) {
            return false;
        }
        let waits_since = Instant::now();
        let (until, changes) = match self {
            WorkerWait::NotBegun => {
                // The change may have come before this subscription: the caller looks once more.
                *self = WorkerWait::Begun {
                    until: waits_since + limit,
                    changes: app.fleet.changed.subscribe(),
                };
                return true;
            }
            WorkerWait::Begun { until, changes } => (*until, changes),
        };
        let mut cut = app.cut.clone();
        let is_over = waits_since >= until;
        tokio::select! {
            // A shutdown does not wait for requests that no worker has.
            _ = cut.wait_for(|is_cut| *is_cut) => return false,
            _ = changes.changed(), if !is_over => {}
            () = sleep_until(until.min(waits_since + RECHECK)) => {}
        }
        request.admission.queued += waits_since.elapsed();
        !is_over
    }
}
