//! P's side of a communicator.

use std::collections::{BTreeMap, VecDeque};

use super::{CommEnd, CommPhase, SlabLimits, Ticket};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SenderEvent {
    /// Own thread: the unique id is made.
    Id(Vec<u8>),
    /// Own thread: both ranks have joined.
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
    /// Close the communicator: no pull needs it.
    Close,
    /// The abort has finished: the thread has ended.
    ThreadEnded,
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SenderAction {
    /// Own thread: make the unique id, tell it, join as rank 0.
    Host,
    /// Send COMM_ID.
    SendId(Vec<u8>),
    /// Own thread: gather into `slab` and post the next send.
    Send {
        ticket: Ticket,
        slab: usize,
        pages: Vec<(u32, u64)>,
    },
    /// Send SLAB_SEND.
    Announce { ticket: Ticket, seq: u64 },
    /// Send SLAB_STALE.
    SendStale { ticket: Ticket, page: u32 },
    /// Send COMM_END.
    SendEnd(CommEnd),
    /// Abort the communicator on a thread of its own, which reports `ThreadEnded`.
    Abort,
    /// The abort hangs too: count the communicator as leaked.
    Leak,
    /// Remove it.
    Forget,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlabSender {
    phase: CommPhase,
    limits: SlabLimits,
    free: Vec<usize>,
    /// Requests received while every slab is in use: D freed its slab before our send completed.
    waiting: VecDeque<(Ticket, Vec<(u32, u64)>)>,
    busy: BTreeMap<Ticket, usize>,
    next_ticket: Ticket,
    next_seq: u64,
    due: Option<u64>,
    end: Option<CommEnd>,
}

impl SlabSender {
    pub fn new(limits: SlabLimits, now: u64) -> (Self, Vec<SenderAction>) {
        let sender = Self {
            phase: CommPhase::Opening,
            limits,
            free: (0..limits.slabs).rev().collect(),
            waiting: VecDeque::new(),
            busy: BTreeMap::new(),
            next_ticket: 0,
            next_seq: 0,
            due: Some(now + limits.open_ms),
            end: None,
        };
        (sender, vec![SenderAction::Host])
    }

    pub fn phase(&self) -> CommPhase {
        self.phase
    }

    pub fn next_due(&self) -> Option<u64> {
        self.due
    }

    /// Open, and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.phase == CommPhase::Open && self.busy.is_empty() && self.waiting.is_empty()
    }

    /// Why it ended, once it has.
    pub fn end(&self) -> Option<&CommEnd> {
        self.end.as_ref()
    }

    #[cfg(test)]
    pub(super) fn slabs(&self) -> (usize, usize) {
        (self.free.len(), self.busy.len())
    }

    pub fn step(&mut self, event: SenderEvent, now: u64) -> Vec<SenderAction> {
        let mut out = Vec::new();
        match event {
            SenderEvent::Id(id) if self.phase == CommPhase::Opening => {
                out.push(SenderAction::SendId(id));
            }
            SenderEvent::Id(_) => {}
            SenderEvent::Opened if self.phase == CommPhase::Opening => {
                self.phase = CommPhase::Open;
                self.due = None;
            }
            SenderEvent::Opened => {}
            SenderEvent::Read { ticket, pages } => self.read(ticket, pages, now, &mut out),
            SenderEvent::Gathered { ticket } if self.phase == CommPhase::Open => {
                let seq = self.next_seq;
                self.next_seq += 1;
                self.progress(now);
                out.push(SenderAction::Announce { ticket, seq });
            }
            SenderEvent::Gathered { .. } => {}
            SenderEvent::Stale { ticket, page } => {
                self.free_slab(ticket, now);
                if self.phase == CommPhase::Open {
                    out.push(SenderAction::SendStale { ticket, page });
                }
            }
            SenderEvent::Sent { ticket } => self.free_slab(ticket, now),
            SenderEvent::Broken(why) => self.fail(CommEnd::Failed(why), now, &mut out),
            SenderEvent::PeerEnded(why) => self.fail(CommEnd::ByPeer(why), now, &mut out),
            SenderEvent::Close => self.fail(CommEnd::Closed, now, &mut out),
            SenderEvent::ThreadEnded => {
                if matches!(self.phase, CommPhase::Aborting | CommPhase::Leaked) {
                    self.free
                        .extend(std::mem::take(&mut self.busy).into_values());
                    self.phase = CommPhase::Over;
                    self.due = None;
                    out.push(SenderAction::Forget);
                }
            }
            SenderEvent::Tick => self.tick(now, &mut out),
        }
        self.send_more(now, &mut out);
        out
    }

    fn read(
        &mut self,
        ticket: Ticket,
        pages: Vec<(u32, u64)>,
        now: u64,
        out: &mut Vec<SenderAction>,
    ) {
        if !self.phase.is_usable() {
            return; // its end was sent already
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
            return self.fail(CommEnd::Failed(why), now, out);
        }
        self.next_ticket += 1;
        self.waiting.push_back((ticket, pages));
    }

    /// Submit requests to the thread, in order, while there are free slabs.
    fn send_more(&mut self, now: u64, out: &mut Vec<SenderAction>) {
        while self.phase == CommPhase::Open
            && !self.free.is_empty()
            && let Some((ticket, pages)) = self.waiting.pop_front()
            && let Some(slab) = self.free.pop()
        {
            if self.busy.is_empty() {
                self.due = Some(now + self.limits.op_ms);
            }
            self.busy.insert(ticket, slab);
            out.push(SenderAction::Send {
                ticket,
                slab,
                pages,
            });
        }
    }

    fn free_slab(&mut self, ticket: Ticket, now: u64) {
        if let Some(slab) = self.busy.remove(&ticket) {
            self.free.push(slab);
            self.progress(now);
        }
    }

    fn progress(&mut self, now: u64) {
        if self.phase == CommPhase::Open {
            self.due = (!self.busy.is_empty()).then_some(now + self.limits.op_ms);
        }
    }

    fn fail(&mut self, end: CommEnd, now: u64, out: &mut Vec<SenderAction>) {
        if !self.phase.is_usable() {
            return;
        }
        self.phase = CommPhase::Aborting;
        self.due = Some(now + self.limits.abort_ms);
        self.waiting.clear();
        if !matches!(end, CommEnd::ByPeer(_)) {
            out.push(SenderAction::SendEnd(end.clone()));
        }
        self.end = Some(end);
        out.push(SenderAction::Abort);
    }

    fn tick(&mut self, now: u64, out: &mut Vec<SenderAction>) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        match self.phase {
            CommPhase::Asking | CommPhase::Opening => {
                let why = format!(
                    "the communicator was not open within {} ms",
                    self.limits.open_ms
                );
                self.fail(CommEnd::Failed(why), now, out);
            }
            CommPhase::Open => {
                let why = format!(
                    "none of {} sends was received within {} ms",
                    self.busy.len(),
                    self.limits.op_ms
                );
                self.fail(CommEnd::Failed(why), now, out);
            }
            CommPhase::Aborting => {
                self.phase = CommPhase::Leaked;
                self.due = None;
                out.push(SenderAction::Leak);
            }
            CommPhase::Leaked | CommPhase::Over => self.due = None,
        }
    }
}
