//! D's side of a communicator.

use std::collections::{BTreeMap, VecDeque};

use super::{CommAction, CommEnd, CommEvent, CommLife, CommPhase, SlabLimits, SlabReceive, Ticket};
use crate::protocol::GroupId;
use crate::reason_code::ReasonCode;
use crate::state_machine::PullError;
use crate::state_machine::decode::PullPage;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ReceiverEvent {
    /// Fetch these pages. Answered by one `ReceiverAction::End`.
    Pull {
        pull: u64,
        group: GroupId,
        pages: Vec<PullPage>,
    },
    /// Stop this pull.
    Cancel { pull: u64 },
    /// COMM_ID came.
    Id(Vec<u8>),
    /// SLAB_SEND came: P's `seq`-th send is this ticket's.
    Announced { ticket: Ticket, seq: u64 },
    /// SLAB_STALE came: nothing is sent for this ticket.
    Stale {
        ticket: Ticket,
        page: u32,
        /// None: the page was reassigned.
        code: Option<ReasonCode>,
    },
    /// Own thread: the slab is received, and unless it was revoked before, scattered and compared
    /// with the announced checksums.
    Received {
        ticket: Ticket,
        verdict: Result<(), (ReasonCode, String)>,
    },
    /// Answer to `Revoke`: the thread had not begun to write and will not.
    Revoked { ticket: Ticket },
    /// Event of either side.
    Comm(CommEvent),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ReceiverAction {
    /// Send COMM_OPEN.
    Ask,
    /// Own thread: join as rank 1.
    Join(Vec<u8>),
    /// Send SLAB_READ.
    Read {
        ticket: Ticket,
        group: GroupId,
        pages: Vec<PullPage>,
    },
    /// Own thread: post the next receive.
    Receive(SlabReceive),
    /// Forbid the thread to write this ticket's pages. `Revoked` follows if it had not begun, else
    /// its `Received` will.
    Revoke { ticket: Ticket },
    /// The pull is over; none of its pages is written from now on.
    End {
        pull: u64,
        pages: usize,
        result: Result<(), PullError>,
    },
    /// Action of either side.
    Comm(CommAction),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PullProgress {
    chunks_left: usize,
    pages: usize,
    ending: Option<Result<(), PullError>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum SlabUse {
    /// P was asked to fill it.
    Asked,
    /// On the thread, which may write the pages.
    Receiving,
    /// On the thread, or to be answered by P; its bytes are received, because the order demands it,
    /// and dropped.
    Dropped { receiving: bool },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Chunk {
    pull: u64,
    slab: usize,
    pages: Vec<PullPage>,
    usage: SlabUse,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlabReceiver {
    life: CommLife,
    free: Vec<usize>,
    pulls: BTreeMap<u64, PullProgress>,
    /// Pages not asked for yet: their pull, their group.
    todo: VecDeque<(u64, GroupId, Vec<PullPage>)>,
    chunks: BTreeMap<Ticket, Chunk>,
    next_ticket: Ticket,
    next_seq: u64,
}

impl SlabReceiver {
    pub fn new(limits: SlabLimits, now: u64) -> (Self, Vec<ReceiverAction>) {
        let receiver = Self {
            life: CommLife::new(CommPhase::Asking, limits, now),
            free: (0..limits.slabs).rev().collect(),
            pulls: BTreeMap::new(),
            todo: VecDeque::new(),
            chunks: BTreeMap::new(),
            next_ticket: 0,
            next_seq: 0,
        };
        (receiver, vec![ReceiverAction::Ask])
    }

    pub fn life(&self) -> &CommLife {
        &self.life
    }

    /// Open, and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.life.is_open() && self.pulls.is_empty() && self.chunks.is_empty()
    }

    #[cfg(test)]
    pub(super) fn slabs(&self) -> (usize, usize) {
        (self.free.len(), self.chunks.len())
    }

    pub fn apply_event(&mut self, event: ReceiverEvent, now: u64) -> Vec<ReceiverAction> {
        let mut out = Vec::new();
        match event {
            ReceiverEvent::Pull { pull, group, pages } => {
                self.accept_pull(pull, group, &pages, &mut out)
            }
            ReceiverEvent::Cancel { pull } => {
                self.finish_pull(pull, Err(PullError::Cancelled), &mut out)
            }
            ReceiverEvent::Id(id) if self.life.phase == CommPhase::Asking => {
                self.life.phase = CommPhase::Opening;
                out.push(ReceiverAction::Join(id));
            }
            ReceiverEvent::Id(_) => {} // repeated, or too late
            ReceiverEvent::Announced { ticket, seq } => {
                self.on_slab_send(ticket, seq, now, &mut out)
            }
            ReceiverEvent::Stale { ticket, page, code } => {
                self.on_stale(ticket, page, code, now, &mut out);
            }
            ReceiverEvent::Received { ticket, verdict } => {
                self.free_slab(ticket, verdict, now, &mut out);
            }
            ReceiverEvent::Revoked { ticket } => {
                if let Some(chunk) = self.chunks.get_mut(&ticket) {
                    chunk.usage = SlabUse::Dropped { receiving: true };
                    let pull = chunk.pull;
                    self.end_pull_if_quiet(pull, &mut out);
                }
            }
            ReceiverEvent::Comm(CommEvent::Opened) => self.life.mark_open(),
            ReceiverEvent::Comm(CommEvent::End(end)) => self.fail_all(end, now, &mut out),
            ReceiverEvent::Comm(CommEvent::ThreadEnded) => self.thread_ended(&mut out),
            ReceiverEvent::Comm(CommEvent::Tick) => self.on_tick(now, &mut out),
        }
        self.read_more(now, &mut out);
        out
    }

    fn accept_pull(
        &mut self,
        pull: u64,
        group: GroupId,
        pages: &[PullPage],
        out: &mut Vec<ReceiverAction>,
    ) {
        let state = PullProgress {
            chunks_left: pages.len().div_ceil(self.life.limits.pages_per_slab),
            pages: 0,
            ending: None,
        };
        let empty = state.chunks_left == 0;
        self.pulls.insert(pull, state);
        if !self.life.phase.is_usable() {
            let reason = "the communicator is ending".to_owned();
            return self.finish_pull(pull, Err(PullError::Broken(reason)), out);
        }
        if empty {
            return self.finish_pull(pull, Ok(()), out);
        }
        for part in pages.chunks(self.life.limits.pages_per_slab) {
            self.todo.push_back((pull, group, part.to_vec()));
        }
    }

    /// Send one SLAB_READ per free slab.
    fn read_more(&mut self, now: u64, out: &mut Vec<ReceiverAction>) {
        while self.life.is_open()
            && !self.free.is_empty()
            && let Some((pull, group, pages)) = self.todo.pop_front()
            && let Some(slab) = self.free.pop()
        {
            if self.chunks.is_empty() {
                self.life.record_progress(true, now);
            }
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            out.push(ReceiverAction::Read {
                ticket,
                group,
                pages: pages.clone(),
            });
            let usage = SlabUse::Asked;
            self.chunks.insert(
                ticket,
                Chunk {
                    pull,
                    slab,
                    pages,
                    usage,
                },
            );
        }
    }

    fn record_progress(&mut self, now: u64) {
        self.life.record_progress(!self.chunks.is_empty(), now);
    }

    fn on_slab_send(&mut self, ticket: Ticket, seq: u64, now: u64, out: &mut Vec<ReceiverAction>) {
        if !self.life.is_open() {
            return; // its end was sent already
        }
        let next_seq = self.next_seq;
        let (chunk, pages) = match self.chunks.get_mut(&ticket) {
            Some(chunk) if seq == next_seq && chunk.usage == SlabUse::Asked => {
                chunk.usage = SlabUse::Receiving;
                let pages = chunk.pages.clone();
                (chunk, pages)
            }
            Some(chunk)
                if seq == next_seq && chunk.usage == SlabUse::Dropped { receiving: false } =>
            {
                chunk.usage = SlabUse::Dropped { receiving: true };
                (chunk, vec![])
            }
            _ => {
                let reason = format!(
                    "SLAB_SEND {seq} for ticket {ticket} came out of order: {next_seq} is next"
                );
                return self.fail_all(CommEnd::Failed(reason), now, out);
            }
        };
        out.push(ReceiverAction::Receive(SlabReceive {
            ticket,
            slab: chunk.slab,
            count: chunk.pages.len(),
            pages,
        }));
        self.next_seq += 1;
        self.record_progress(now);
    }

    fn on_stale(
        &mut self,
        ticket: Ticket,
        page: u32,
        code: Option<ReasonCode>,
        now: u64,
        out: &mut Vec<ReceiverAction>,
    ) {
        if !self.life.is_open() {
            return;
        }
        let is_asked = self.chunks.get(&ticket).is_some_and(|chunk| {
            matches!(
                chunk.usage,
                SlabUse::Asked | SlabUse::Dropped { receiving: false }
            )
        });
        if !is_asked {
            let reason = format!("SLAB_STALE for ticket {ticket}, which is not asked for");
            return self.fail_all(CommEnd::Failed(reason), now, out);
        }
        let reason = match code {
            Some(_) => format!("the prefill node leases page {page} to this node no more"),
            None => format!("page {page} of the prefill node was given to another request"),
        };
        let code = code.unwrap_or(ReasonCode::StalePage);
        self.free_slab(ticket, Err((code, reason)), now, out);
    }

    /// Free the slab of an answered ticket.
    fn free_slab(
        &mut self,
        ticket: Ticket,
        verdict: Result<(), (ReasonCode, String)>,
        now: u64,
        out: &mut Vec<ReceiverAction>,
    ) {
        let Some(chunk) = self.chunks.remove(&ticket) else {
            return;
        };
        self.free.push(chunk.slab);
        self.record_progress(now);
        let counts = !matches!(chunk.usage, SlabUse::Dropped { .. });
        match (self.pulls.get_mut(&chunk.pull), verdict) {
            (Some(pull), Ok(())) if counts => {
                pull.chunks_left -= 1;
                pull.pages += chunk.pages.len();
                if pull.chunks_left == 0 {
                    pull.ending.get_or_insert(Ok(()));
                }
            }
            (Some(_), Err((code, reason))) => {
                self.finish_pull(chunk.pull, Err(PullError::Failed(code, reason)), out);
            }
            _ => {}
        }
        self.end_pull_if_quiet(chunk.pull, out);
    }

    /// End a pull: request no more of its pages and drop those in flight.
    fn finish_pull(
        &mut self,
        pull: u64,
        result: Result<(), PullError>,
        out: &mut Vec<ReceiverAction>,
    ) {
        let Some(state) = self.pulls.get_mut(&pull) else {
            return;
        };
        state.ending.get_or_insert(result);
        self.todo.retain(|(of, ..)| *of != pull);
        for (&ticket, chunk) in self.chunks.iter_mut().filter(|(_, c)| c.pull == pull) {
            match chunk.usage {
                SlabUse::Asked => chunk.usage = SlabUse::Dropped { receiving: false },
                SlabUse::Receiving => out.push(ReceiverAction::Revoke { ticket }),
                SlabUse::Dropped { .. } => {}
            }
        }
        self.end_pull_if_quiet(pull, out);
    }

    /// Report the end of a pull once no thread can write its pages any more.
    fn end_pull_if_quiet(&mut self, pull: u64, out: &mut Vec<ReceiverAction>) {
        let mut chunks = self.chunks.values();
        if chunks.any(|chunk| chunk.pull == pull && chunk.usage == SlabUse::Receiving) {
            return;
        }
        if let Some(state) = self.pulls.get(&pull)
            && let Some(result) = state.ending.clone()
        {
            let pages = state.pages;
            self.pulls.remove(&pull);
            out.push(ReceiverAction::End {
                pull,
                pages,
                result,
            });
        }
    }

    fn fail_all(&mut self, end: CommEnd, now: u64, out: &mut Vec<ReceiverAction>) {
        if !self.life.end_with(end.clone(), now) {
            return;
        }
        out.extend(self.life.end_notice().map(ReceiverAction::Comm));
        let reason = match end {
            CommEnd::Closed => "the communicator was closed".to_owned(),
            CommEnd::Failed(reason) | CommEnd::ByPeer(reason) => reason,
        };
        let pulls: Vec<u64> = self.pulls.keys().copied().collect();
        for pull in pulls {
            self.finish_pull(pull, Err(PullError::Broken(reason.clone())), out);
        }
        // P will not answer any more: requested slabs need no receive.
        self.chunks.retain(|_, chunk| {
            let is_asked = chunk.usage == SlabUse::Dropped { receiving: false };
            self.free.extend(is_asked.then_some(chunk.slab));
            !is_asked
        });
        out.push(ReceiverAction::Comm(CommAction::Abort));
    }

    /// End all pulls: the thread has ended, so no page is written any more.
    fn thread_ended(&mut self, out: &mut Vec<ReceiverAction>) {
        if !self.life.thread_ended() {
            return;
        }
        self.free.extend(
            std::mem::take(&mut self.chunks)
                .into_values()
                .map(|c| c.slab),
        );
        let pulls: Vec<u64> = self.pulls.keys().copied().collect();
        for pull in pulls {
            self.end_pull_if_quiet(pull, out);
        }
        out.push(ReceiverAction::Comm(CommAction::Forget));
    }

    fn on_tick(&mut self, now: u64, out: &mut Vec<ReceiverAction>) {
        let SlabLimits { open_ms, op_ms, .. } = self.life.limits;
        let reason = match self.life.on_tick(now) {
            Ok(leak) => return out.extend(leak.map(ReceiverAction::Comm)),
            Err(CommPhase::Asking) => format!("no COMM_ID within {open_ms} ms"),
            Err(CommPhase::Opening) => format!("the communicator was not open within {open_ms} ms"),
            Err(_) => {
                format!(
                    "none of {} slabs requested came within {op_ms} ms",
                    self.chunks.len()
                )
            }
        };
        self.fail_all(CommEnd::Failed(reason), now, out);
    }
}
