//! A staged relay between one decode rank (`SlabReceiver`) and one prefill rank (`SlabSender`),
//! over a two-rank communicator: NCCL, or gloo in its place. Pages are gathered into a slab at P,
//! sent, and scattered from a slab at D.
//!
//! ```text
//! D: Sink                                         P: Source
//!    ASKING ── COMM_OPEN ──────────────────────▶  OPENING: makes the unique id
//!    OPENING ◀───────────────────────── COMM_ID ── both join; a deadline bounds it
//!    OPEN                                         OPEN
//!    takes a slab ── SLAB_READ(ticket, pages) ─▶  gathers into a slab; a page reassigned meanwhile: SLAB_STALE
//!    posts receive k ◀── SLAB_SEND(ticket, k) ──  posts send k
//!    scatters, verifies, gives the slab back      the send is done: gives the slab back
//!        any failure, either side: COMM_END ─▶ ABORTING ─ the thread ended ─▶ over
//!                                                   └ the abort hangs too ─▶ LEAKED: never used again
//! ```
//!
//! A slab of D is the credit for one SLAB_READ, so P never posts a send for which D has no slab,
//! and D posts no receive before P announced its send. One thread per side posts in this order,
//! hence the k-th send meets the k-th receive; the number in SLAB_SEND proves it.
//!
//! Invariants: each pull ends exactly once, and none of its pages is written after that; a page
//! counts only with the verdict of a checksum taken after the copy; free and held slabs add up to
//! the ring; each wait has a deadline; a communicator that failed once is aborted and never used
//! again.

mod receiver;
mod sender;

#[cfg(test)]
mod model_check;

pub use receiver::{ReceiverAction, ReceiverEvent, SlabReceiver};
pub use sender::{SenderAction, SenderEvent, SlabSender};

use super::decode::PullPage;

/// Pages to gather into a slab and send: (page, generation) each.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlabSend {
    pub ticket: Ticket,
    pub slab: usize,
    pub pages: Vec<(u32, u64)>,
}

/// Receive of `count` pages into `slab`; then scatter to `pages`, unless there are none or it is
/// revoked.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlabReceive {
    pub ticket: Ticket,
    pub slab: usize,
    pub count: usize,
    pub pages: Vec<PullPage>,
}

/// Number of a SLAB_READ within its communicator; grows.
pub type Ticket = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlabLimits {
    /// Slabs in the ring of each side.
    pub slabs: usize,
    pub pages_per_slab: usize,
    /// From the request for a communicator until it can be used.
    pub open_ms: u64,
    /// Longest time without progress while something is under way.
    pub op_ms: u64,
    /// From the abort until the communicator's thread has ended; after that it is leaked.
    pub abort_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommPhase {
    /// D: COMM_OPEN is sent, no id yet.
    Asking,
    Opening,
    Open,
    Aborting,
    /// The abort did not end in time: its thread and its slabs are leaked.
    Leaked,
    Over,
}

impl CommPhase {
    pub const NAMES: [&'static str; 4] = ["opening", "open", "aborting", "abandoned"];

    pub fn name(self) -> &'static str {
        match self {
            CommPhase::Asking | CommPhase::Opening => "opening",
            CommPhase::Open => "open",
            CommPhase::Aborting => "aborting",
            CommPhase::Leaked | CommPhase::Over => "abandoned",
        }
    }

    /// Pages may be asked for and sent, now or when it is open.
    pub fn is_usable(self) -> bool {
        matches!(
            self,
            CommPhase::Asking | CommPhase::Opening | CommPhase::Open
        )
    }
}

/// Why a communicator ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CommEnd {
    /// Idle, and its place was needed, or the node closes.
    Closed,
    Failed(String),
    /// The other side ended it or is disconnected: no COMM_END is sent.
    ByPeer(String),
}

/// When a pair whose communicator failed may try the next one: 30 s later, doubled with each
/// failure in a row.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransportBreaker {
    failures: u32,
    open_until: u64,
}

impl TransportBreaker {
    const FIRST_MS: u64 = 30_000;
    const MOST_DOUBLINGS: u32 = 5;
    /// The other side had no place for a communicator; one may be free soon.
    const FULL_MS: u64 = 1000;

    pub fn allows_attempt(&self, now: u64) -> bool {
        now >= self.open_until
    }

    pub fn record_failure(&mut self, now: u64) {
        self.open_until = now + (Self::FIRST_MS << self.failures.min(Self::MOST_DOUBLINGS));
        self.failures += 1;
    }

    pub fn record_full(&mut self, now: u64) {
        self.open_until = self.open_until.max(now + Self::FULL_MS);
    }

    pub fn record_success(&mut self) {
        *self = Self::default();
    }
}

/// Event that both sides of a communicator handle alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CommEvent {
    /// Own thread: both ranks have joined.
    Opened,
    /// End the communicator: no pull needs it (`Closed`), an operation of the own thread failed
    /// (`Failed`), COMM_END came or the control connection is lost (`ByPeer`).
    End(CommEnd),
    /// The abort has finished: the thread has ended.
    ThreadEnded,
    Tick,
}

/// Action that both sides of a communicator have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum CommAction {
    /// Send COMM_END.
    SendEnd(CommEnd),
    /// Abort the communicator on a thread of its own, which reports `ThreadEnded`.
    Abort,
    /// The abort hangs too: count the communicator as leaked.
    Leak,
    /// Remove it.
    Forget,
}

/// Phase, deadline and end of one side of a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CommLife {
    phase: CommPhase,
    limits: SlabLimits,
    due: Option<u64>,
    end: Option<CommEnd>,
}

impl CommLife {
    fn new(phase: CommPhase, limits: SlabLimits, now: u64) -> Self {
        let due = Some(now + limits.open_ms);
        Self {
            phase,
            limits,
            due,
            end: None,
        }
    }

    pub fn phase(&self) -> CommPhase {
        self.phase
    }

    pub fn next_due(&self) -> Option<u64> {
        self.due
    }

    /// Why it ended, once it has.
    pub fn end(&self) -> Option<&CommEnd> {
        self.end.as_ref()
    }

    fn is_open(&self) -> bool {
        self.phase == CommPhase::Open
    }

    /// Both ranks have joined.
    fn mark_open(&mut self) {
        if self.phase == CommPhase::Opening {
            self.phase = CommPhase::Open;
            self.due = None;
        }
    }

    /// Restart the deadline of slabs in use.
    fn record_progress(&mut self, is_busy: bool, now: u64) {
        if self.is_open() {
            self.due = is_busy.then_some(now + self.limits.op_ms);
        }
    }

    /// Begin the abort. False: it has begun before.
    fn end_with(&mut self, end: CommEnd, now: u64) -> bool {
        if !self.phase.is_usable() {
            return false;
        }
        self.phase = CommPhase::Aborting;
        self.due = Some(now + self.limits.abort_ms);
        self.end = Some(end);
        true
    }

    /// COMM_END for the other side, unless it knows.
    fn end_notice(&self) -> Option<CommAction> {
        let end = self
            .end
            .clone()
            .filter(|end| !matches!(end, CommEnd::ByPeer(_)));
        end.map(CommAction::SendEnd)
    }

    /// The thread has ended. False: no abort was under way.
    fn thread_ended(&mut self) -> bool {
        let is_aborting = matches!(self.phase, CommPhase::Aborting | CommPhase::Leaked);
        if is_aborting {
            self.phase = CommPhase::Over;
            self.due = None;
        }
        is_aborting
    }

    /// An abort whose deadline has passed is leaked; `Err` is the phase in which another deadline
    /// passed.
    fn on_tick(&mut self, now: u64) -> Result<Option<CommAction>, CommPhase> {
        if self.due.is_none_or(|due| now < due) {
            return Ok(None);
        }
        if self.phase.is_usable() {
            return Err(self.phase);
        }
        self.due = None;
        let leaks = self.phase == CommPhase::Aborting;
        if leaks {
            self.phase = CommPhase::Leaked;
        }
        Ok(leaks.then_some(CommAction::Leak))
    }
}
