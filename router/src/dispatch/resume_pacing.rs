//! Waits of an attempt: for its turn among the interrupted streams, and for a worker while none can
//! be chosen.
//!
//! An accepted stream (its answer has opened) is never refused a turn, and no retry budget applies
//! to it. A request without an answer holds a place of --queue-size while it waits. Dropping the
//! future (the client left) gives turn and place back.

use std::time::Duration;

use router_core::{PacerTicket, Role};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};

use crate::dispatch::app::AppState;
use crate::dispatch::context::RequestContext;
use crate::error::RouteError;

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
        let limit = limit(app);
        let (ticket, due) = app.resume_pacer.lock().enter(waker, limit);
        let turn = Self { app, ticket };
        wake(app, due);
        let _ = is_due.await; // the sender is dropped only together with this place
        turn
    }
}

impl Drop for ResumeTurn<'_> {
    fn drop(&mut self) {
        let limit = limit(self.app);
        let due = self.app.resume_pacer.lock().leave(self.ticket, limit);
        wake(self.app, due);
    }
}

/// --failover-concurrency for each ready worker of the role that has the fewest.
fn limit(app: &AppState) -> usize {
    let ready = |role: &Role| app.fleet.count(*role).1;
    let workers = app
        .fleet
        .serving_roles()
        .iter()
        .map(ready)
        .min()
        .unwrap_or(0);
    workers.saturating_mul(app.config.retry.failover_concurrency)
}

fn wake(app: &AppState, due: Vec<oneshot::Sender<()>>) {
    let waiting = app.resume_pacer.lock().waiting();
    app.metrics.resumes_waiting.set(waiting as f64);
    for waker in due {
        let _ = waker.send(()); // its client left: dropping the turn passes it on
    }
}

/// A request's wait for a worker: from the first time that none could be chosen.
pub struct WorkerWait {
    until: Instant,
    changes: watch::Receiver<()>,
}

impl WorkerWait {
    /// Wait for a change of the fleet. False: there is nothing to wait for, or
    /// --worker-wait-timeout-secs have passed.
    pub async fn for_change(
        wait: &mut Option<Self>,
        app: &AppState,
        request: &mut RequestContext,
    ) -> bool {
        let limit = Duration::from_secs(app.config.retry.worker_wait_timeout_secs);
        if limit.is_zero() || app.is_cut() || !request.take_place(app) {
            return false;
        }
        let since = Instant::now();
        let Some(wait) = wait else {
            // The change may have come before this subscription: the caller looks once more.
            *wait = Some(Self {
                until: since + limit,
                changes: app.fleet.changed.subscribe(),
            });
            return true;
        };
        let mut cut = app.cut.clone();
        let is_over = since >= wait.until;
        tokio::select! {
            _ = cut.wait_for(|is_cut| *is_cut) => return false,
            _ = wait.changes.changed(), if !is_over => {}
            () = sleep_until(wait.until.min(since + RECHECK)) => {}
        }
        request.queued += since.elapsed();
        !is_over
    }
}

/// True if a worker may come for a request that was refused with `err`.
pub fn may_come(app: &AppState, request: &RequestContext, err: &RouteError) -> bool {
    match err {
        RouteError::NoWorker { role, .. } => request.is_accepted || app.fleet.may_return(*role),
        RouteError::NoPair { .. } | RouteError::NoResumeWorker { .. } => request.is_accepted,
        _ => false,
    }
}
