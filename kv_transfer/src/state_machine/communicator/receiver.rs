//! D's side of a communicator.

use std::collections::{BTreeMap, VecDeque};

use super::{End, Limits, Phase, Ticket};
use crate::reason_code::Code;
use crate::state_machine::decode::PullPage;

/// How a pull ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome {
    Done,
    Failed(Code, String),
    Cancelled,
    /// The communicator does not work; another transport may.
    Broken(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SinkEvent {
    /// Fetch these pages. Answered by one `SinkAction::End`.
    Pull {
        pull: u64,
        pages: Vec<PullPage>,
    },
    Cancel {
        pull: u64,
    },
    /// COMM_ID came.
    Id(Vec<u8>),
    /// Own thread: both ranks are there.
    Opened,
    /// SLAB_SEND came: P's `seq`-th send is this ticket's.
    Announced {
        ticket: Ticket,
        seq: u64,
    },
    /// SLAB_STALE came: nothing is sent for this ticket.
    Stale {
        ticket: Ticket,
        page: u32,
        /// None: the page was given away.
        code: Option<Code>,
    },
    /// Own thread: the slab is received, and unless it was revoked before, scattered and compared with the announced checksums.
    Received {
        ticket: Ticket,
        verdict: Result<(), (Code, String)>,
    },
    /// Answer to `Revoke`: the thread had not begun to write and will not.
    Revoked {
        ticket: Ticket,
    },
    /// Own thread: an operation failed.
    Broken(String),
    /// COMM_END came, or the control connection is lost.
    PeerEnded(String),
    /// Nobody needs it any more.
    Close,
    /// The abort is through: the thread has ended.
    ThreadEnded,
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SinkAction {
    /// Send COMM_OPEN.
    Ask,
    /// Own thread: join as rank 1.
    Join(Vec<u8>),
    /// Send SLAB_READ.
    Read {
        ticket: Ticket,
        pages: Vec<PullPage>,
    },
    /// Own thread: post the next receive, `count` pages into `slab`; then scatter to `pages`, unless there are none or it is revoked.
    Receive {
        ticket: Ticket,
        slab: usize,
        count: usize,
        pages: Vec<PullPage>,
    },
    /// Forbid the thread to write this ticket's pages. `Revoked` follows if it had not begun, else its `Received` will.
    Revoke { ticket: Ticket },
    /// The pull is over; none of its pages is written from now on.
    End {
        pull: u64,
        pages: usize,
        outcome: Outcome,
    },
    /// Send COMM_END.
    TellEnd(End),
    /// Abort the communicator on a thread of its own, which reports `ThreadEnded`.
    Abort,
    /// The abort hangs too: count the communicator as lost.
    Abandon,
    /// Forget it.
    Gone,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PullState {
    chunks_left: usize,
    pages: usize,
    ending: Option<Outcome>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Held {
    Asked,
    /// On the thread, which may write the pages.
    Receiving,
    /// On the thread, or to be answered by P; its bytes are received, because the order demands it, and dropped.
    Dropped {
        receiving: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Chunk {
    pull: u64,
    slab: usize,
    pages: Vec<PullPage>,
    held: Held,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Sink {
    phase: Phase,
    limits: Limits,
    free: Vec<usize>,
    pulls: BTreeMap<u64, PullState>,
    todo: VecDeque<(u64, Vec<PullPage>)>,
    chunks: BTreeMap<Ticket, Chunk>,
    next_ticket: Ticket,
    next_seq: u64,
    due: Option<u64>,
    end: Option<End>,
}

impl Sink {
    pub fn new(limits: Limits, now: u64) -> (Self, Vec<SinkAction>) {
        let sink = Self {
            phase: Phase::Asking,
            limits,
            free: (0..limits.slabs).rev().collect(),
            pulls: BTreeMap::new(),
            todo: VecDeque::new(),
            chunks: BTreeMap::new(),
            next_ticket: 0,
            next_seq: 0,
            due: Some(now + limits.open_ms),
            end: None,
        };
        (sink, vec![SinkAction::Ask])
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn next_due(&self) -> Option<u64> {
        self.due
    }

    /// Open, and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Open && self.pulls.is_empty() && self.chunks.is_empty()
    }

    pub fn pulls(&self) -> usize {
        self.pulls.len()
    }

    /// Why it ended, once it has.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    #[cfg(test)]
    pub(super) fn slabs(&self) -> (usize, usize) {
        (self.free.len(), self.chunks.len())
    }

    pub fn step(&mut self, event: SinkEvent, now: u64) -> Vec<SinkAction> {
        let mut out = Vec::new();
        match event {
            SinkEvent::Pull { pull, pages } => self.take(pull, &pages, &mut out),
            SinkEvent::Cancel { pull } => self.finish(pull, Outcome::Cancelled, &mut out),
            SinkEvent::Id(id) if self.phase == Phase::Asking => {
                self.phase = Phase::Opening;
                out.push(SinkAction::Join(id));
            }
            SinkEvent::Id(_) => {} // said twice, or too late
            SinkEvent::Opened if self.phase == Phase::Opening => {
                self.phase = Phase::Open;
                self.due = None;
            }
            SinkEvent::Opened => {}
            SinkEvent::Announced { ticket, seq } => self.announced(ticket, seq, now, &mut out),
            SinkEvent::Stale { ticket, page, code } => {
                self.stale(ticket, page, code, now, &mut out);
            }
            SinkEvent::Received { ticket, verdict } => {
                self.received(ticket, verdict, now, &mut out);
            }
            SinkEvent::Revoked { ticket } => {
                if let Some(chunk) = self.chunks.get_mut(&ticket) {
                    chunk.held = Held::Dropped { receiving: true };
                    let pull = chunk.pull;
                    self.settle(pull, &mut out);
                }
            }
            SinkEvent::Broken(why) => self.fail(End::Failed(why), now, &mut out),
            SinkEvent::PeerEnded(why) => self.fail(End::ByPeer(why), now, &mut out),
            SinkEvent::Close => self.fail(End::Closed, now, &mut out),
            SinkEvent::ThreadEnded => self.thread_ended(&mut out),
            SinkEvent::Tick => self.tick(now, &mut out),
        }
        self.read_more(now, &mut out);
        out
    }

    fn take(&mut self, pull: u64, pages: &[PullPage], out: &mut Vec<SinkAction>) {
        let state = PullState {
            chunks_left: pages.len().div_ceil(self.limits.pages_per_slab),
            pages: 0,
            ending: None,
        };
        let empty = state.chunks_left == 0;
        self.pulls.insert(pull, state);
        if !self.phase.is_usable() {
            let why = "the communicator is ending".to_owned();
            return self.finish(pull, Outcome::Broken(why), out);
        }
        if empty {
            return self.finish(pull, Outcome::Done, out);
        }
        for part in pages.chunks(self.limits.pages_per_slab) {
            self.todo.push_back((pull, part.to_vec()));
        }
    }

    /// As many questions as there are slabs.
    fn read_more(&mut self, now: u64, out: &mut Vec<SinkAction>) {
        while self.phase == Phase::Open
            && !self.free.is_empty()
            && let Some((pull, pages)) = self.todo.pop_front()
            && let Some(slab) = self.free.pop()
        {
            if self.chunks.is_empty() {
                self.due = Some(now + self.limits.op_ms);
            }
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            out.push(SinkAction::Read {
                ticket,
                pages: pages.clone(),
            });
            let held = Held::Asked;
            self.chunks.insert(
                ticket,
                Chunk {
                    pull,
                    slab,
                    pages,
                    held,
                },
            );
        }
    }

    fn progress(&mut self, now: u64) {
        if self.phase == Phase::Open {
            self.due = (!self.chunks.is_empty()).then_some(now + self.limits.op_ms);
        }
    }

    fn announced(&mut self, ticket: Ticket, seq: u64, now: u64, out: &mut Vec<SinkAction>) {
        if self.phase != Phase::Open {
            return; // its end was told already
        }
        let next_seq = self.next_seq;
        let (chunk, pages) = match self.chunks.get_mut(&ticket) {
            Some(chunk) if seq == next_seq && chunk.held == Held::Asked => {
                chunk.held = Held::Receiving;
                let pages = chunk.pages.clone();
                (chunk, pages)
            }
            Some(chunk) if seq == next_seq && chunk.held == Held::Dropped { receiving: false } => {
                chunk.held = Held::Dropped { receiving: true };
                (chunk, vec![])
            }
            _ => {
                let why = format!(
                    "SLAB_SEND {seq} for ticket {ticket} came out of order: {next_seq} is next"
                );
                return self.fail(End::Failed(why), now, out);
            }
        };
        out.push(SinkAction::Receive {
            ticket,
            slab: chunk.slab,
            count: chunk.pages.len(),
            pages,
        });
        self.next_seq += 1;
        self.progress(now);
    }

    fn stale(
        &mut self,
        ticket: Ticket,
        page: u32,
        code: Option<Code>,
        now: u64,
        out: &mut Vec<SinkAction>,
    ) {
        if self.phase != Phase::Open {
            return;
        }
        let is_asked = self.chunks.get(&ticket).is_some_and(|chunk| {
            matches!(chunk.held, Held::Asked | Held::Dropped { receiving: false })
        });
        if !is_asked {
            let why = format!("SLAB_STALE for ticket {ticket}, which is not asked for");
            return self.fail(End::Failed(why), now, out);
        }
        let why = match code {
            Some(_) => format!("the prefill node leases page {page} to this node no more"),
            None => format!("page {page} of the prefill node was given to another request"),
        };
        let code = code.unwrap_or(Code::StalePage);
        self.give_back(ticket, Err((code, why)), now, out);
    }

    fn received(
        &mut self,
        ticket: Ticket,
        verdict: Result<(), (Code, String)>,
        now: u64,
        out: &mut Vec<SinkAction>,
    ) {
        if self.chunks.contains_key(&ticket) {
            self.give_back(ticket, verdict, now, out);
        }
    }

    /// A ticket is answered: its slab is free again.
    fn give_back(
        &mut self,
        ticket: Ticket,
        verdict: Result<(), (Code, String)>,
        now: u64,
        out: &mut Vec<SinkAction>,
    ) {
        let Some(chunk) = self.chunks.remove(&ticket) else {
            return;
        };
        self.free.push(chunk.slab);
        self.progress(now);
        let counts = !matches!(chunk.held, Held::Dropped { .. });
        match (self.pulls.get_mut(&chunk.pull), verdict) {
            (Some(pull), Ok(())) if counts => {
                pull.chunks_left -= 1;
                pull.pages += chunk.pages.len();
                if pull.chunks_left == 0 {
                    pull.ending.get_or_insert(Outcome::Done);
                }
            }
            (Some(_), Err((code, why))) => {
                self.finish(chunk.pull, Outcome::Failed(code, why), out);
            }
            _ => {}
        }
        self.settle(chunk.pull, out);
    }

    /// A pull is to end: nothing more is asked for it, what is under way is dropped.
    fn finish(&mut self, pull: u64, outcome: Outcome, out: &mut Vec<SinkAction>) {
        let Some(state) = self.pulls.get_mut(&pull) else {
            return;
        };
        state.ending.get_or_insert(outcome);
        self.todo.retain(|(of, _)| *of != pull);
        for (&ticket, chunk) in self.chunks.iter_mut().filter(|(_, c)| c.pull == pull) {
            match chunk.held {
                Held::Asked => chunk.held = Held::Dropped { receiving: false },
                Held::Receiving => out.push(SinkAction::Revoke { ticket }),
                Held::Dropped { .. } => {}
            }
        }
        self.settle(pull, out);
    }

    /// Tell the end of a pull once nothing can write its pages any more.
    fn settle(&mut self, pull: u64, out: &mut Vec<SinkAction>) {
        let may_write = self
            .chunks
            .values()
            .any(|chunk| chunk.pull == pull && chunk.held == Held::Receiving);
        if may_write {
            return;
        }
        if let Some(state) = self.pulls.get(&pull)
            && let Some(outcome) = state.ending.clone()
        {
            let pages = state.pages;
            self.pulls.remove(&pull);
            out.push(SinkAction::End {
                pull,
                pages,
                outcome,
            });
        }
    }

    fn fail(&mut self, end: End, now: u64, out: &mut Vec<SinkAction>) {
        if !self.phase.is_usable() {
            return;
        }
        self.phase = Phase::Aborting;
        self.due = Some(now + self.limits.abort_ms);
        let why = match &end {
            End::Closed => "the communicator was closed".to_owned(),
            End::Failed(why) | End::ByPeer(why) => why.clone(),
        };
        if !matches!(end, End::ByPeer(_)) {
            out.push(SinkAction::TellEnd(end.clone()));
        }
        self.end = Some(end);
        let pulls: Vec<u64> = self.pulls.keys().copied().collect();
        for pull in pulls {
            self.finish(pull, Outcome::Broken(why.clone()), out);
        }
        // P will not answer any more: what was only asked for needs no receive.
        let asked: Vec<Ticket> = self
            .chunks
            .iter()
            .filter(|(_, c)| c.held == Held::Dropped { receiving: false })
            .map(|(&ticket, _)| ticket)
            .collect();
        for ticket in asked {
            self.free
                .extend(self.chunks.remove(&ticket).map(|c| c.slab));
        }
        out.push(SinkAction::Abort);
    }

    /// Nothing runs on the thread any more, so nothing is written.
    fn thread_ended(&mut self, out: &mut Vec<SinkAction>) {
        if !matches!(self.phase, Phase::Aborting | Phase::Abandoned) {
            return;
        }
        self.free.extend(
            std::mem::take(&mut self.chunks)
                .into_values()
                .map(|c| c.slab),
        );
        let pulls: Vec<u64> = self.pulls.keys().copied().collect();
        for pull in pulls {
            self.settle(pull, out);
        }
        self.phase = Phase::Over;
        self.due = None;
        out.push(SinkAction::Gone);
    }

    fn tick(&mut self, now: u64, out: &mut Vec<SinkAction>) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        match self.phase {
            Phase::Asking => {
                let why = format!("no COMM_ID within {} ms", self.limits.open_ms);
                self.fail(End::Failed(why), now, out);
            }
            Phase::Opening => {
                let why = format!(
                    "the communicator was not open within {} ms",
                    self.limits.open_ms
                );
                self.fail(End::Failed(why), now, out);
            }
            Phase::Open => {
                let why = format!(
                    "no slab of {} asked for came within {} ms",
                    self.chunks.len(),
                    self.limits.op_ms
                );
                self.fail(End::Failed(why), now, out);
            }
            Phase::Aborting => {
                self.phase = Phase::Abandoned;
                self.due = None;
                out.push(SinkAction::Abandon);
            }
            Phase::Abandoned | Phase::Over => self.due = None,
        }
    }
}
