//! P's side of a communicator.

use std::collections::{BTreeMap, VecDeque};

use super::{End, Limits, Phase, Ticket};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SourceEvent {
    /// Own thread: the unique id is made.
    Id(Vec<u8>),
    /// Own thread: both ranks are there.
    Opened,
    /// SLAB_READ came: (page, generation) each.
    Read {
        ticket: Ticket,
        pages: Vec<(u32, u64)>,
    },
    /// Own thread: the pages are in the slab, under the generations asked for; the send is being posted.
    Gathered {
        ticket: Ticket,
    },
    /// Own thread: this page is no longer what was announced; nothing is sent.
    Stale {
        ticket: Ticket,
        page: u32,
    },
    /// Own thread: the peer has it.
    Sent {
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
pub enum SourceAction {
    /// Own thread: make the unique id, tell it, join as rank 0.
    Host,
    /// Send COMM_ID.
    TellId(Vec<u8>),
    /// Own thread: gather into `slab` and post the next send.
    Send {
        ticket: Ticket,
        slab: usize,
        pages: Vec<(u32, u64)>,
    },
    /// Send SLAB_SEND.
    Announce { ticket: Ticket, seq: u64 },
    /// Send SLAB_STALE.
    TellStale { ticket: Ticket, page: u32 },
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
pub struct Source {
    phase: Phase,
    limits: Limits,
    free: Vec<usize>,
    /// Asked for while every slab is in use: D's slab came back to it before our send told us so.
    waiting: VecDeque<(Ticket, Vec<(u32, u64)>)>,
    busy: BTreeMap<Ticket, usize>,
    next_ticket: Ticket,
    next_seq: u64,
    due: Option<u64>,
    end: Option<End>,
}

impl Source {
    pub fn new(limits: Limits, now: u64) -> (Self, Vec<SourceAction>) {
        let source = Self {
            phase: Phase::Opening,
            limits,
            free: (0..limits.slabs).rev().collect(),
            waiting: VecDeque::new(),
            busy: BTreeMap::new(),
            next_ticket: 0,
            next_seq: 0,
            due: Some(now + limits.open_ms),
            end: None,
        };
        (source, vec![SourceAction::Host])
    }

    pub fn phase(&self) -> Phase {
        self.phase
    }

    pub fn next_due(&self) -> Option<u64> {
        self.due
    }

    /// Open, and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Open && self.busy.is_empty() && self.waiting.is_empty()
    }

    /// Why it ended, once it has.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    #[cfg(test)]
    pub(super) fn slabs(&self) -> (usize, usize) {
        (self.free.len(), self.busy.len())
    }

    pub fn step(&mut self, event: SourceEvent, now: u64) -> Vec<SourceAction> {
        let mut out = Vec::new();
        match event {
            SourceEvent::Id(id) if self.phase == Phase::Opening => {
                out.push(SourceAction::TellId(id));
            }
            SourceEvent::Id(_) => {}
            SourceEvent::Opened if self.phase == Phase::Opening => {
                self.phase = Phase::Open;
                self.due = None;
            }
            SourceEvent::Opened => {}
            SourceEvent::Read { ticket, pages } => self.read(ticket, pages, now, &mut out),
            SourceEvent::Gathered { ticket } if self.phase == Phase::Open => {
                let seq = self.next_seq;
                self.next_seq += 1;
                self.progress(now);
                out.push(SourceAction::Announce { ticket, seq });
            }
            SourceEvent::Gathered { .. } => {}
            SourceEvent::Stale { ticket, page } => {
                self.give_back(ticket, now);
                if self.phase == Phase::Open {
                    out.push(SourceAction::TellStale { ticket, page });
                }
            }
            SourceEvent::Sent { ticket } => self.give_back(ticket, now),
            SourceEvent::Broken(why) => self.fail(End::Failed(why), now, &mut out),
            SourceEvent::PeerEnded(why) => self.fail(End::ByPeer(why), now, &mut out),
            SourceEvent::Close => self.fail(End::Closed, now, &mut out),
            SourceEvent::ThreadEnded => {
                if matches!(self.phase, Phase::Aborting | Phase::Abandoned) {
                    self.free
                        .extend(std::mem::take(&mut self.busy).into_values());
                    self.phase = Phase::Over;
                    self.due = None;
                    out.push(SourceAction::Gone);
                }
            }
            SourceEvent::Tick => self.tick(now, &mut out),
        }
        self.send_more(now, &mut out);
        out
    }

    fn read(
        &mut self,
        ticket: Ticket,
        pages: Vec<(u32, u64)>,
        now: u64,
        out: &mut Vec<SourceAction>,
    ) {
        if !self.phase.is_usable() {
            return; // its end was told already
        }
        let wrong = if ticket != self.next_ticket {
            Some(format!(
                "SLAB_READ {ticket} came out of order: {} is next",
                self.next_ticket
            ))
        } else if pages.is_empty() || pages.len() > self.limits.pages_per_slab {
            Some(format!(
                "SLAB_READ for {} pages: a slab holds 1 to {}",
                pages.len(),
                self.limits.pages_per_slab
            ))
        } else if self.waiting.len() >= self.limits.slabs {
            Some(format!(
                "more SLAB_READs than the decode node's {} slabs",
                self.limits.slabs
            ))
        } else {
            None
        };
        if let Some(why) = wrong {
            return self.fail(End::Failed(why), now, out);
        }
        self.next_ticket += 1;
        self.waiting.push_back((ticket, pages));
    }

    /// Hand what is asked for to the thread, in order, as long as there are slabs.
    fn send_more(&mut self, now: u64, out: &mut Vec<SourceAction>) {
        while self.phase == Phase::Open
            && !self.free.is_empty()
            && let Some((ticket, pages)) = self.waiting.pop_front()
            && let Some(slab) = self.free.pop()
        {
            if self.busy.is_empty() {
                self.due = Some(now + self.limits.op_ms);
            }
            self.busy.insert(ticket, slab);
            out.push(SourceAction::Send {
                ticket,
                slab,
                pages,
            });
        }
    }

    fn give_back(&mut self, ticket: Ticket, now: u64) {
        if let Some(slab) = self.busy.remove(&ticket) {
            self.free.push(slab);
            self.progress(now);
        }
    }

    fn progress(&mut self, now: u64) {
        if self.phase == Phase::Open {
            self.due = (!self.busy.is_empty()).then_some(now + self.limits.op_ms);
        }
    }

    fn fail(&mut self, end: End, now: u64, out: &mut Vec<SourceAction>) {
        if !self.phase.is_usable() {
            return;
        }
        self.phase = Phase::Aborting;
        self.due = Some(now + self.limits.abort_ms);
        self.waiting.clear();
        if !matches!(end, End::ByPeer(_)) {
            out.push(SourceAction::TellEnd(end.clone()));
        }
        self.end = Some(end);
        out.push(SourceAction::Abort);
    }

    fn tick(&mut self, now: u64, out: &mut Vec<SourceAction>) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        match self.phase {
            Phase::Asking | Phase::Opening => {
                let why = format!(
                    "the communicator was not open within {} ms",
                    self.limits.open_ms
                );
                self.fail(End::Failed(why), now, out);
            }
            Phase::Open => {
                let why = format!(
                    "none of {} sends was received within {} ms",
                    self.busy.len(),
                    self.limits.op_ms
                );
                self.fail(End::Failed(why), now, out);
            }
            Phase::Aborting => {
                self.phase = Phase::Abandoned;
                self.due = None;
                out.push(SourceAction::Abandon);
            }
            Phase::Abandoned | Phase::Over => self.due = None,
        }
    }
}
