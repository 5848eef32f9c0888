//! P's side of a communicator.

use std::collections::{BTreeMap, VecDeque};

use super::{CommAction, CommEnd, CommEvent, CommLife, CommPhase, SlabLimits, SlabSend, Ticket};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SenderEvent {
    /// Own thread: the unique id is made.
    Id(Vec<u8>),
    /// SLAB_READ came: (page, generation) each.
    Read {
        ticket: Ticket,
        pages: Vec<(u32, u64)>,
    },
    /// Own thread: the pages are in the slab, under the generations asked for; the send is being
    /// posted.
    Gathered { ticket: Ticket },
    /// Own thread: this page is no longer what was announced; nothing is sent.
    Stale { ticket: Ticket, page: u32 },
    /// Own thread: the peer has it.
    Sent { ticket: Ticket },
    /// Event of either side.
    Comm(CommEvent),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum SenderAction {
    /// Own thread: make the unique id, tell it, join as rank 0.
    Host,
    /// Send COMM_ID.
    SendId(Vec<u8>),
    /// Own thread: gather into the slab and post the next send.
    Send(SlabSend),
    /// Send SLAB_SEND.
    Announce { ticket: Ticket, seq: u64 },
    /// Send SLAB_STALE.
    SendStale { ticket: Ticket, page: u32 },
    /// Action of either side.
    Comm(CommAction),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SlabSender {
    life: CommLife,
    free: Vec<usize>,
    /// Requests received while every slab is in use: D freed its slab before our send completed.
    waiting: VecDeque<(Ticket, Vec<(u32, u64)>)>,
    busy: BTreeMap<Ticket, usize>,
    next_ticket: Ticket,
    next_seq: u64,
}

impl SlabSender {
    pub fn new(limits: SlabLimits, now: u64) -> (Self, Vec<SenderAction>) {
        let sender = Self {
            life: CommLife::new(CommPhase::Opening, limits, now),
            free: (0..limits.slabs).rev().collect(),
            waiting: VecDeque::new(),
            busy: BTreeMap::new(),
            next_ticket: 0,
            next_seq: 0,
        };
        (sender, vec![SenderAction::Host])
    }

    pub fn life(&self) -> &CommLife {
        &self.life
    }

    /// Open, and nothing is under way.
    pub fn is_idle(&self) -> bool {
        self.life.is_open() && self.busy.is_empty() && self.waiting.is_empty()
    }

    #[cfg(test)]
    pub(super) fn slabs(&self) -> (usize, usize) {
        (self.free.len(), self.busy.len())
    }

    pub fn apply_event(&mut self, event: SenderEvent, now: u64) -> Vec<SenderAction> {
        let mut out = Vec::new();
        match event {
            SenderEvent::Id(id) if self.life.phase == CommPhase::Opening => {
                out.push(SenderAction::SendId(id));
            }
            SenderEvent::Id(_) => {}
            SenderEvent::Read { ticket, pages } => self.start_read(ticket, pages, now, &mut out),
            SenderEvent::Gathered { ticket } if self.life.is_open() => {
                let seq = self.next_seq;
                self.next_seq += 1;
                self.record_progress(now);
                out.push(SenderAction::Announce { ticket, seq });
            }
            SenderEvent::Gathered { .. } => {}
            SenderEvent::Stale { ticket, page } => {
                self.free_slab(ticket, now);
                if self.life.is_open() {
                    out.push(SenderAction::SendStale { ticket, page });
                }
            }
            SenderEvent::Sent { ticket } => self.free_slab(ticket, now),
            SenderEvent::Comm(CommEvent::Opened) => self.life.mark_open(),
            SenderEvent::Comm(CommEvent::End(end)) => self.fail_all(end, now, &mut out),
            SenderEvent::Comm(CommEvent::ThreadEnded) => {
                if self.life.thread_ended() {
                    self.free
                        .extend(std::mem::take(&mut self.busy).into_values());
                    out.push(SenderAction::Comm(CommAction::Forget));
                }
            }
            SenderEvent::Comm(CommEvent::Tick) => self.on_tick(now, &mut out),
        }
        self.send_more(now, &mut out);
        out
    }

    fn start_read(
        &mut self,
        ticket: Ticket,
        pages: Vec<(u32, u64)>,
        now: u64,
        out: &mut Vec<SenderAction>,
    ) {
        if !self.life.phase.is_usable() {
            return; // its end was sent already
        }
        let next = self.next_ticket;
        let n = pages.len();
        let SlabLimits {
            slabs,
            pages_per_slab,
            ..
        } = self.life.limits;
        let reason = if ticket != next {
            format!("SLAB_READ {ticket} came out of order: {next} is next")
        } else if n == 0 || n > pages_per_slab {
            format!("SLAB_READ for {n} pages: a slab holds 1 to {pages_per_slab}")
        } else if self.waiting.len() >= slabs {
            format!("more SLAB_READs than the decode node's {slabs} slabs")
        } else {
            self.next_ticket += 1;
            return self.waiting.push_back((ticket, pages));
        };
        self.fail_all(CommEnd::Failed(reason), now, out);
    }

    /// Submit requests to the thread, in order, while there are free slabs.
    fn send_more(&mut self, now: u64, out: &mut Vec<SenderAction>) {
        while self.life.is_open()
            && !self.free.is_empty()
            && let Some((ticket, pages)) = self.waiting.pop_front()
            && let Some(slab) = self.free.pop()
        {
            if self.busy.is_empty() {
                self.life.record_progress(true, now);
            }
            self.busy.insert(ticket, slab);
            out.push(SenderAction::Send(SlabSend {
                ticket,
                slab,
                pages,
            }));
        }
    }

    fn free_slab(&mut self, ticket: Ticket, now: u64) {
        if let Some(slab) = self.busy.remove(&ticket) {
            self.free.push(slab);
            self.record_progress(now);
        }
    }

    fn record_progress(&mut self, now: u64) {
        self.life.record_progress(!self.busy.is_empty(), now);
    }

    fn fail_all(&mut self, end: CommEnd, now: u64, out: &mut Vec<SenderAction>) {
        if self.life.end_with(end, now) {
            self.waiting.clear();
            let notice = self.life.end_notice().into_iter();
            out.extend(notice.chain([CommAction::Abort]).map(SenderAction::Comm));
        }
    }

    fn on_tick(&mut self, now: u64, out: &mut Vec<SenderAction>) {
        let SlabLimits { open_ms, op_ms, .. } = self.life.limits;
        let reason = match self.life.on_tick(now) {
            Ok(leak) => return out.extend(leak.map(SenderAction::Comm)),
            Err(CommPhase::Open) => {
                format!(
                    "none of {} sends was received within {op_ms} ms",
                    self.busy.len()
                )
            }
            Err(_) => format!("the communicator was not open within {open_ms} ms"),
        };
        self.fail_all(CommEnd::Failed(reason), now, out);
    }
}
