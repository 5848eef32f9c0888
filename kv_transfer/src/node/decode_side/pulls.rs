//! D's pulls under way: submission to a transport, cancellation, and the choice of the next
//! transport after a failure.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::node::communicators::LoopContext;
use crate::node::config::Transport;
use crate::node::context::mapped_by;
use crate::pool::RemotePool;
use crate::protocol::GroupId;
use crate::reason_code::ReasonCode;
use crate::state_machine::decode::{DecodeEvent, PullPage};
use crate::state_machine::{ConnectionId, PullError};
use crate::transport::copy_threads::CopyJob;
use crate::transport::{Pull, PullEnd};

/// Pull submitted to a transport.
pub struct PullJob {
    pub room: u64,
    pub ticket: u64,
    pub peer: ConnectionId,
    pub group: GroupId,
    pub pages: Vec<PullPage>,
    pub via: Transport,
    /// The peer's pool, if it is mapped.
    pub remote: Option<Arc<RemotePool>>,
    pub cancel: Arc<AtomicBool>,
    pub started: Instant,
}

impl PullJob {
    /// A new pull, by the best transport that works.
    pub fn new(
        ctx: &mut LoopContext,
        (room, ticket): (u64, u64),
        peer: ConnectionId,
        (group, pages): (GroupId, Vec<PullPage>),
        remote: Option<Arc<RemotePool>>,
    ) -> Self {
        let mut job = Self {
            room,
            ticket,
            peer,
            group,
            pages,
            via: Transport::Tcp,
            remote,
            cancel: Arc::default(),
            started: Instant::now(),
        };
        let mapped = job.mapped_transport(ctx);
        job.via = mapped
            .or_else(|| ctx.transport_for(peer))
            .unwrap_or(Transport::Tcp);
        job
    }

    /// The transport that reads the peer's memory, if the room has it and it works.
    fn mapped_transport(&self, ctx: &LoopContext) -> Option<Transport> {
        let conn = ctx.connections.get(&self.peer);
        let remote = self.remote.as_deref().map(mapped_by);
        remote.filter(|_| conn.is_none_or(|conn| conn.mapped_works))
    }

    fn is_cancelled(&self) -> bool {
        self.cancel.load(Ordering::Relaxed)
    }

    /// Submit the pull again. The room of a cancelled one waits for the end of all writes to its
    /// pages, and gets that instead.
    fn resubmit_by(self, via: Transport) -> AfterPull {
        if self.is_cancelled() {
            return AfterPull::Step(self.stopped_event());
        }
        AfterPull::Resubmit(PullJob { via, ..self })
    }

    fn stopped_event(&self) -> DecodeEvent {
        DecodeEvent::PullStopped {
            ticket: self.ticket,
        }
    }

    fn failure_event(&self, reason: impl Into<String>) -> DecodeEvent {
        DecodeEvent::PullFailed {
            ticket: self.ticket,
            code: ReasonCode::TransportBroken,
            reason: reason.into(),
        }
    }
}

/// Next step after the end of a pull.
pub enum AfterPull {
    Step(DecodeEvent),
    /// Submit the same pull again, by another transport.
    Resubmit(PullJob),
}

#[derive(Default)]
pub struct PullJobs {
    jobs: HashMap<u64, PullJob>,
    /// (room, job): those of one room are found without a scan of all.
    by_room: BTreeSet<(u64, u64)>,
    next_job: u64,
}

impl PullJobs {
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Pages of unfinished pulls from this peer.
    pub fn queued_pages(&self, peer: ConnectionId) -> u64 {
        let of_peer = self.jobs.values().filter(|job| job.peer == peer);
        of_peer.map(|job| job.pages.len() as u64).sum()
    }

    /// Submit a pull to its transport. `Err`: there is none, and the room gets this event.
    pub fn submit_pull(&mut self, ctx: &mut LoopContext, job: PullJob) -> Result<(), DecodeEvent> {
        let id = self.next_job;
        self.next_job += 1;
        let pull = Pull {
            id,
            group: job.group,
            pages: job.pages.clone(),
            cancel: job.cancel.clone(),
        };
        let peer = job.peer;
        let via = job.via;
        if via.is_mapped() {
            let Some(from) = job.remote.clone() else {
                return Err(job.failure_event("the peer's pool is not mapped"));
            };
            ctx.copy_threads.submit_job(CopyJob::Pull { pull, from });
            self.add_job(id, job);
        } else if via.is_staged() {
            self.add_job(id, job); // its end may come at once
            ctx.start_staged_pull(peer, pull);
        } else {
            submit_to_tcp(ctx, peer, pull).map_err(|reason| job.failure_event(reason))?;
            self.add_job(id, job);
        }
        Ok(())
    }

    fn add_job(&mut self, id: u64, job: PullJob) {
        self.by_room.insert((job.room, id));
        self.jobs.insert(id, job);
    }

    pub fn cancel_room(&mut self, ctx: &mut LoopContext, room: u64) {
        let mut staged = Vec::new();
        for &(_, id) in self.by_room.range((room, 0)..=(room, u64::MAX)) {
            let Some(job) = self.jobs.get(&id) else {
                continue;
            };
            job.cancel.store(true, Ordering::Relaxed);
            if job.via.is_staged() {
                staged.push((job.peer, id));
            }
            if job.via == Transport::Tcp
                && let Some(conn) = ctx.connections.get(&job.peer)
            {
                conn.data.cancel_pull(id);
            }
        }
        for (peer, id) in staged {
            ctx.cancel_staged_pull(peer, id);
        }
    }

    /// Remove a pull that has ended. Returns its room, and what follows.
    pub fn on_end(&mut self, ctx: &mut LoopContext, end: PullEnd) -> Option<(u64, AfterPull)> {
        let job = self.jobs.remove(&end.id)?;
        self.by_room.remove(&(job.room, end.id));
        {
            let mut stats = ctx.shared.stats.lock();
            let pull = stats.pull.get_mut(job.via.as_str());
            pull.batches += 1;
            pull.bytes += end.bytes;
            pull.pages += end.bytes / ctx.pool.page_bytes() as u64;
            pull.batch_seconds += job.started.elapsed().as_secs_f64();
            let is_damaged = matches!(end.result, Err(PullError::Failed(ReasonCode::Checksum, _)));
            pull.damaged += u64::from(is_damaged);
        }
        let room = job.room;
        let ticket = job.ticket;
        let is_tcp = job.via == Transport::Tcp;
        let after = match end.result {
            Ok(()) => AfterPull::Step(DecodeEvent::Pulled { ticket }),
            Err(PullError::Failed(ReasonCode::Checksum, reason))
                if !is_tcp && has_tcp(ctx, job.peer) =>
            {
                // Another path shows whether the transport or the prefill rank damaged the pages.
                tracing::warn!(
                    room,
                    via = job.via.as_str(),
                    why = %reason,
                    "damaged pages: pulled again by tcp"
                );
                job.resubmit_by(Transport::Tcp)
            }
            Err(PullError::Failed(code, reason)) => AfterPull::Step(DecodeEvent::PullFailed {
                ticket,
                code,
                reason,
            }),
            Err(PullError::Cancelled) => AfterPull::Step(DecodeEvent::PullStopped { ticket }),
            Err(PullError::Broken(reason)) if is_tcp => AfterPull::Step(job.failure_event(reason)),
            Err(PullError::Broken(reason)) => fall_back(ctx, job, &reason),
        };
        Some((room, after))
    }

    /// Fail every tcp pull: the data threads have ended, and with them all writes to their pages.
    pub fn fail_tcp_pulls(&mut self) -> Vec<(u64, DecodeEvent)> {
        let tcp_jobs = self.jobs.extract_if(|_, job| job.via == Transport::Tcp);
        let failed = tcp_jobs.map(|(id, job)| {
            self.by_room.remove(&(job.room, id));
            (
                job.room,
                job.failure_event("internal: the data threads are gone"),
            )
        });
        failed.collect()
    }
}

/// Continue a pull whose transport stopped working by the next one. The peer's memory is not used
/// until the connection is established again, its communicator not until the breaker allows it
/// (`communicators`).
fn fall_back(ctx: &mut LoopContext, job: PullJob, reason: &str) -> AfterPull {
    record_mapped_failure(ctx, &job, reason);
    // Asked first, because choosing a transport may start a communicator.
    if job.is_cancelled() {
        return AfterPull::Step(job.stopped_event());
    }
    let via = next_transport(ctx, &job).unwrap_or(Transport::Tcp);
    AfterPull::Resubmit(PullJob { via, ..job })
}

/// Stop using the peer's memory after a failure. Its other pulls in flight fail, too: only the
/// first of them is a fallback.
fn record_mapped_failure(ctx: &mut LoopContext, job: &PullJob, reason: &str) {
    if job.via.is_mapped()
        && let Some(conn) = ctx.connections.get_mut(&job.peer)
        && conn.mapped_works
    {
        conn.mapped_works = false;
        ctx.record_fallback(job.peer, job.via, reason);
    }
}

/// The transport to try after `job.via` has failed; `None`: only tcp is left.
fn next_transport(ctx: &mut LoopContext, job: &PullJob) -> Option<Transport> {
    match job.via {
        Transport::Shm | Transport::CudaIpc => ctx.transport_for(job.peer),
        _ => job.mapped_transport(ctx),
    }
}

/// The peer is connected, and both sides may use tcp.
fn has_tcp(ctx: &LoopContext, peer: ConnectionId) -> bool {
    let tcp = Transport::Tcp;
    let theirs = ctx.connections.get(&peer).map(|conn| &conn.peer.transports);
    ctx.config.transports.contains(&tcp)
        && theirs.is_some_and(|theirs| theirs.iter().any(|t| t == tcp.as_str()))
}

fn submit_to_tcp(
    ctx: &mut LoopContext,
    peer: ConnectionId,
    pull: Pull,
) -> Result<(), &'static str> {
    let has_tcp = has_tcp(ctx, peer);
    let ctx = &mut **ctx;
    let Some(conn) = ctx.connections.get_mut(&peer) else {
        return Err("the prefill rank is gone");
    };
    if !has_tcp {
        return Err("no other transport of the pair works, and one side has no tcp");
    }
    conn.data
        .start_pull(&ctx.data, pull)
        .then_some(())
        .ok_or("the data threads are gone")
}
