//! A room on the decode side.
//!
//! ```text
//! RESOLVING ─connected─▶ OPENING ─OPEN_OK─▶ ADMITTED ─grant + PROGRESS─▶ PULLING ─▶ VERIFYING ─▶ COMMITTED
//!     │  any: reject, pull error, peer lost, deadline → FAILED(code)      any: own abort → ABORTED
//! ```
//!
//! The grant (where the pages go) may come at any time, before the peer even answered. Pages are pulled as they are announced;
//! every pull is verified by generation and checksum when it completes. The room commits when FINAL is known, every page from
//! `start_page` on is verified, and the root over their checksums equals P's.
//!
//! A room that is announced while it has no grant is reported to the engine: P holds pages for it, and will finish it by itself. A
//! grant can be revoked until then, so that a full D can give the pages to a room whose pages P is holding already.
//!
//! A room that ends early first stops its pulls; the terminal action comes when none is in flight, so that the engine may give
//! the pages to somebody else the moment it hears of the end.

use std::collections::BTreeMap;

use super::{Illegal, Peer};
use crate::protocol::{Sealed, root_of};
use crate::reason_code::Code;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Phase {
    Resolving,
    Opening,
    Admitted,
    Pulling,
    Verifying,
    Committed,
    Failed(Code),
    Aborted,
}

impl Phase {
    pub const LIVE_NAMES: &'static [&'static str] =
        &["RESOLVING", "OPENING", "ADMITTED", "PULLING", "VERIFYING"];

    pub fn name(&self) -> &'static str {
        match self {
            Phase::Resolving => "RESOLVING",
            Phase::Opening => "OPENING",
            Phase::Admitted => "ADMITTED",
            Phase::Pulling => "PULLING",
            Phase::Verifying => "VERIFYING",
            Phase::Committed => "COMMITTED",
            Phase::Failed(_) => "FAILED",
            Phase::Aborted => "ABORTED",
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self, Phase::Committed | Phase::Failed(_) | Phase::Aborted)
    }
}

/// Limits of one room's pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PullLimits {
    pub pages_per_pull: usize,
    pub pulls_in_flight: usize,
    /// Prompt pages a peer may announce at most.
    pub max_pages: usize,
    /// The longest wait for the peer's answer, and for a pull while one is in flight.
    pub wait_ms: u64,
}

/// P's end of prefill, as FINAL tells it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Final {
    pub total_pages: u32,
    pub last_page_tokens: u32,
    pub root: u64,
    pub payload: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Slot {
    Unknown,
    Announced(Sealed),
    Pulling(Sealed),
    Verified(Sealed),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Ending {
    Fail(Code, String),
    Abort,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Room {
    pub phase: Phase,
    pub attempt: u32,
    pub start_page: u32,
    /// Every phase ends by then: the deadline of the request.
    deadline: u64,
    /// When the transfer itself last went on; see `next_due`.
    moved_at: u64,
    limits: PullLimits,
    peer: Option<Peer>,
    accepted: bool,
    held: usize, // prompt pages from start_page on that the grant says are here already
    grant: Option<Vec<u32>>,
    pages: Vec<Slot>, // by index in the prompt, minus start_page
    fin: Option<Final>,
    in_flight: BTreeMap<u64, Vec<usize>>, // ticket -> indices into `pages`
    next_ticket: u64,
    ending: Option<Ending>,
}

/// One page of a pull: from the peer's page to ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PullPage {
    pub src: Sealed,
    pub dst: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    Connected {
        peer: Peer,
    },
    /// The prefill rank cannot be found or refuses us before OPEN.
    Unreachable {
        code: Code,
        why: String,
    },
    Accepted {
        peer: Peer,
        attempt: u32,
    },
    Parked {
        peer: Peer,
        attempt: u32,
    },
    Rejected {
        peer: Peer,
        attempt: u32,
        code: Code,
        why: String,
    },
    Progress {
        peer: Peer,
        attempt: u32,
        first_page: u32,
        pages: Vec<Sealed>,
    },
    Final {
        peer: Peer,
        attempt: u32,
        fin: Final,
    },
    PeerAbort {
        peer: Peer,
        attempt: u32,
        code: Code,
    },
    /// `readable`: the peer's pool can still be read without it (shm).
    PeerGone {
        peer: Peer,
        code: Code,
        readable: bool,
    },
    /// The peer lives, but its engine stands still: what it has not announced will not come.
    PeerStalled {
        peer: Peer,
        why: String,
    },
    /// Own engine: it holds the prompt's pages before start_page; where the later ones go.
    Grant {
        start_page: u32,
        pages: Vec<u32>,
    },
    /// Own engine: it wants the granted pages back, unless some of them are being filled.
    Revoke,
    /// Own engine; the code is what the peer is told.
    Abort(Code),
    Pulled {
        ticket: u64,
    },
    PullFailed {
        ticket: u64,
        code: Code,
        why: String,
    },
    /// The pull was cancelled and writes no more.
    PullStopped {
        ticket: u64,
    },
    Tick,
}

impl Event {
    fn name(&self) -> &'static str {
        match self {
            Event::Connected { .. } => "connected",
            Event::Unreachable { .. } => "unreachable",
            Event::Accepted { .. } => "OPEN_OK",
            Event::Parked { .. } => "PARKED",
            Event::Rejected { .. } => "REJECT",
            Event::Progress { .. } => "PROGRESS",
            Event::Final { .. } => "FINAL",
            Event::PeerAbort { .. } => "ABORT",
            Event::PeerGone { .. } => "peer gone",
            Event::PeerStalled { .. } => "peer stalled",
            Event::Grant { .. } => "grant",
            Event::Revoke => "revoke",
            Event::Abort(_) => "abort",
            Event::Pulled { .. } => "pulled",
            Event::PullFailed { .. } => "pull failed",
            Event::PullStopped { .. } => "pull stopped",
            Event::Tick => "tick",
        }
    }

    /// The sender and attempt of a peer's words.
    fn sender(&self) -> Option<(Peer, Option<u32>)> {
        match self {
            Event::Accepted { peer, attempt }
            | Event::Parked { peer, attempt }
            | Event::Rejected { peer, attempt, .. }
            | Event::Progress { peer, attempt, .. }
            | Event::Final { peer, attempt, .. }
            | Event::PeerAbort { peer, attempt, .. } => Some((*peer, Some(*attempt))),
            Event::PeerGone { peer, .. } | Event::PeerStalled { peer, .. } => Some((*peer, None)),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    Open {
        peer: Peer,
    },
    Pull {
        ticket: u64,
        pages: Vec<PullPage>,
    },
    CancelPulls,
    /// The engine may learn that P holds pages for this room.
    Announced,
    /// The granted pages are the engine's again.
    Revoked,
    Done {
        peer: Peer,
        root: u64,
    },
    SendAbort {
        peer: Peer,
        code: Code,
    },
    AckAbort {
        peer: Peer,
    },
    Commit(Final),
    Fail {
        code: Code,
        why: String,
    },
    Aborted,
}

impl Room {
    pub fn new(attempt: u32, start_page: u32, now: u64, deadline: u64, limits: PullLimits) -> Self {
        Self {
            phase: Phase::Resolving,
            attempt,
            start_page,
            deadline,
            moved_at: now,
            limits,
            peer: None,
            accepted: false,
            held: 0,
            grant: None,
            pages: Vec::new(),
            fin: None,
            in_flight: BTreeMap::new(),
            next_ticket: 0,
            ending: None,
        }
    }

    /// The moment at which `Tick` ends the room.
    pub fn next_due(&self) -> Option<u64> {
        let due = if self.is_transferring() {
            self.deadline.min(self.moved_at + self.limits.wait_ms)
        } else {
            self.deadline
        };
        (!self.phase.is_over() && self.ending.is_none()).then_some(due)
    }

    /// P or a copy owes the next event. Otherwise the room waits for an engine (P's queue and its prefill, or pages here),
    /// which takes as long as the queues are; a P that has died or stands still is noticed on its connection.
    fn is_transferring(&self) -> bool {
        matches!(self.phase, Phase::Resolving | Phase::Opening) || !self.in_flight.is_empty()
    }

    pub fn peer(&self) -> Option<Peer> {
        self.peer
    }

    pub fn deadline(&self) -> u64 {
        self.deadline
    }

    pub fn pulls_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// (pages announced, pages verified), for the timeline.
    pub fn progress(&self) -> (usize, usize) {
        let known = self
            .pages
            .iter()
            .filter(|slot| **slot != Slot::Unknown)
            .count();
        (
            known,
            self.pages
                .iter()
                .filter(|slot| matches!(slot, Slot::Verified(_)))
                .count(),
        )
    }

    pub fn verified_pages(&self) -> usize {
        self.progress().1
    }

    /// The transition function: on `Err` the room is as it was.
    pub fn step(&mut self, event: Event, now: u64) -> Result<Vec<Action>, Illegal> {
        if self.phase.is_over() {
            return match event {
                Event::Grant { .. } | Event::Abort(_) | Event::Connected { .. } => {
                    Err(self.illegal(&event, "the room is over"))
                }
                _ => Ok(vec![]),
            };
        }
        if let Some((peer, attempt)) = event.sender()
            && (self.peer != Some(peer) || attempt.is_some_and(|a| a != self.attempt))
        {
            return Ok(vec![]); // a late word of an earlier attempt or of another connection
        }
        if self.ending.is_some() {
            return self.while_ending(event);
        }
        match event {
            Event::Connected { peer } => {
                if self.phase != Phase::Resolving {
                    return Err(self.illegal(&event, "the room has a peer"));
                }
                self.peer = Some(peer);
                self.phase = Phase::Opening;
                self.moved_at = now;
                return Ok(vec![Action::Open { peer }]);
            }
            Event::Grant {
                start_page,
                ref pages,
            } => {
                if self.grant.is_some() {
                    return Err(self.illegal(&event, "pages were granted before"));
                }
                self.held = start_page.saturating_sub(self.start_page) as usize;
                self.grant = Some(pages.clone());
            }
            Event::Revoke if self.grant.is_none() => {
                return Err(self.illegal(&event, "no pages are granted"));
            }
            Event::Revoke if self.is_announced() => return Ok(vec![Action::Announced]),
            Event::Revoke => {
                (self.grant, self.held) = (None, 0);
                return Ok(vec![Action::Revoked]);
            }
            Event::Pulled { ticket } => {
                self.moved_at = now;
                for index in self.in_flight.remove(&ticket).unwrap_or_default() {
                    if let Slot::Pulling(sealed) = self.pages[index] {
                        self.pages[index] = Slot::Verified(sealed);
                    }
                }
            }
            Event::PullFailed { ticket, code, why } => {
                self.in_flight.remove(&ticket);
                return Ok(self.end(Ending::Fail(code, why), Some(code)));
            }
            Event::PullStopped { ticket } => {
                self.in_flight.remove(&ticket);
                return Ok(self.end(
                    Ending::Fail(
                        Code::TransportBroken,
                        "a pull was stopped from outside".into(),
                    ),
                    Some(Code::TransportBroken),
                ));
            }
            Event::Accepted { .. } => self.admit(),
            Event::Parked { .. } => {}
            Event::Progress {
                first_page, pages, ..
            } => {
                self.admit();
                let is_news = self.grant.is_none() && !self.is_announced();
                if let Err(why) = self.announce(first_page, &pages) {
                    return Ok(self.end(
                        Ending::Fail(Code::TransportBroken, why),
                        Some(Code::TransportBroken),
                    ));
                }
                return Ok(self.advance_with(is_news, now));
            }
            Event::Final { fin, .. } => {
                self.admit();
                let is_news = self.grant.is_none() && !self.is_announced();
                self.fin.get_or_insert(fin);
                return Ok(self.advance_with(is_news, now));
            }
            Event::Unreachable { code, why } => return Ok(self.end(Ending::Fail(code, why), None)),
            Event::Rejected { code, why, .. } => {
                self.peer = None;
                return Ok(self.end(Ending::Fail(code, why), None));
            }
            Event::PeerAbort { peer, code, .. } => {
                let mut actions = vec![Action::AckAbort { peer }];
                self.peer = None;
                actions.extend(self.end(
                    Ending::Fail(code, "the prefill side gave the request up".into()),
                    None,
                ));
                return Ok(actions);
            }
            Event::PeerGone { code, readable, .. } => {
                self.peer = None;
                if !(readable && self.all_announced()) {
                    return Ok(
                        self.end(Ending::Fail(code, "the prefill rank is gone".into()), None)
                    );
                }
            }
            Event::PeerStalled { .. } if self.all_announced() => return Ok(vec![]),
            Event::PeerStalled { why, .. } => {
                let code = Code::PeerStalled;
                return Ok(self.end(Ending::Fail(code, why), Some(code)));
            }
            Event::Abort(code) => return Ok(self.end(Ending::Abort, Some(code))),
            Event::Tick if self.next_due().is_some_and(|due| now >= due) => {
                let (known, verified) = self.progress();
                let what = if now >= self.deadline {
                    "the request's deadline passed".into()
                } else {
                    format!("nothing came for {} ms", now - self.moved_at)
                };
                let why = format!(
                    "{what} in {} ({known} pages announced, {verified} verified)",
                    self.phase.name()
                );
                return Ok(self.end(Ending::Fail(Code::Deadline, why), Some(Code::Deadline)));
            }
            Event::Tick => return Ok(vec![]),
        }
        Ok(self.advance(now))
    }

    fn illegal(&self, event: &Event, why: &str) -> Illegal {
        Illegal {
            phase: self.phase.name(),
            event: event.name(),
            why: why.into(),
        }
    }

    /// The peer knows the room. Its answer may be overtaken by its PROGRESS, which says as much.
    fn admit(&mut self) {
        self.accepted = true;
        if self.phase == Phase::Opening {
            self.phase = Phase::Admitted;
        }
    }

    /// P holds pages for this room and needs nobody to finish it.
    fn is_announced(&self) -> bool {
        !self.pages.is_empty() || self.fin.is_some()
    }

    fn announce(&mut self, first_page: u32, pages: &[Sealed]) -> Result<(), String> {
        let end = (first_page as usize + pages.len()).saturating_sub(self.start_page as usize);
        if end > self.limits.max_pages {
            return Err(format!(
                "the peer announces prompt page {}, at most {} fit",
                first_page as usize + pages.len(),
                self.limits.max_pages
            ));
        }
        if self.pages.len() < end {
            self.pages.resize(end, Slot::Unknown);
        }
        for (index, &sealed) in (first_page..).zip(pages) {
            let Some(index) = index.checked_sub(self.start_page) else {
                continue;
            };
            let slot = &mut self.pages[index as usize];
            if *slot == Slot::Unknown {
                *slot = Slot::Announced(sealed);
            }
        }
        Ok(())
    }

    fn needed(&self) -> Option<usize> {
        self.fin
            .as_ref()
            .map(|fin| fin.total_pages.saturating_sub(self.start_page) as usize)
    }

    /// Everything that is needed from the peer's control connection is here.
    fn all_announced(&self) -> bool {
        self.needed().is_some_and(|n| {
            self.pages.len() >= n && self.pages[..n].iter().all(|slot| *slot != Slot::Unknown)
        })
    }

    /// Do whatever the present knowledge allows: pull more, or commit.
    fn advance(&mut self, now: u64) -> Vec<Action> {
        if let (Some(needed), Some(granted)) = (self.needed(), self.grant.as_ref().map(Vec::len))
            && granted + self.held != needed
        {
            let held = self.start_page as usize + self.held;
            let why = format!(
                "{granted} pages were granted beyond the {held} held, but prefill has {needed} from page {} on",
                self.start_page
            );
            return self.end(
                Ending::Fail(Code::PromptMismatch, why),
                Some(Code::PromptMismatch),
            );
        }
        if let Some(needed) = self.needed()
            && self.pages.len() > needed
        {
            let why = format!(
                "{} pages from page {} on were announced, but FINAL counts {needed}",
                self.pages.len(),
                self.start_page
            );
            return self.end(
                Ending::Fail(Code::TransportBroken, why),
                Some(Code::TransportBroken),
            );
        }
        let mut actions = self.start_pulls(now);
        if self.grant.is_some()
            && self.all_announced()
            && self
                .needed()
                .is_some_and(|n| self.verified_pages() + self.held == n)
        {
            self.phase = Phase::Verifying;
            actions.extend(self.commit());
        }
        actions
    }

    fn advance_with(&mut self, is_news: bool, now: u64) -> Vec<Action> {
        let mut actions = if is_news {
            vec![Action::Announced]
        } else {
            vec![]
        };
        actions.extend(self.advance(now));
        actions
    }

    fn start_pulls(&mut self, now: u64) -> Vec<Action> {
        let (Some(grant), true) = (&self.grant, self.accepted) else {
            return vec![];
        };
        let mut actions = Vec::new();
        let end = self.pages.len().min(self.held + grant.len());
        let mut ready = (self.held..end)
            .filter(|&i| matches!(self.pages[i], Slot::Announced(_)))
            .collect::<Vec<_>>()
            .into_iter();
        while self.in_flight.len() < self.limits.pulls_in_flight {
            let indices: Vec<usize> = ready.by_ref().take(self.limits.pages_per_pull).collect();
            if indices.is_empty() {
                break;
            }
            let mut pages = Vec::with_capacity(indices.len());
            for &i in &indices {
                if let Slot::Announced(src) = self.pages[i] {
                    pages.push(PullPage {
                        src,
                        dst: grant[i - self.held],
                    });
                    self.pages[i] = Slot::Pulling(src);
                }
            }
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            if self.in_flight.is_empty() {
                self.moved_at = now;
            }
            self.in_flight.insert(ticket, indices);
            self.phase = Phase::Pulling;
            actions.push(Action::Pull { ticket, pages });
        }
        actions
    }

    fn commit(&mut self) -> Vec<Action> {
        let Some(fin) = self.fin.clone() else {
            return vec![];
        };
        let sums = self.pages.iter().filter_map(|slot| match slot {
            Slot::Verified(sealed) | Slot::Announced(sealed) => Some(sealed.sum), // announced only: held here already
            _ => None,
        });
        let root = root_of(sums);
        if root != fin.root {
            return self.end(
                Ending::Fail(
                    Code::Checksum,
                    "the root over the page checksums differs from the prefill side's".into(),
                ),
                Some(Code::Checksum),
            );
        }
        self.phase = Phase::Committed;
        let done = self.peer.map(|peer| Action::Done { peer, root });
        done.into_iter().chain([Action::Commit(fin)]).collect()
    }

    /// Decide the end now; announce it when the last pull has stopped.
    fn end(&mut self, ending: Ending, tell: Option<Code>) -> Vec<Action> {
        let mut actions = Vec::with_capacity(3);
        if let (Some(peer), Some(code)) = (self.peer, tell) {
            actions.push(Action::SendAbort { peer, code });
        }
        self.ending = Some(ending);
        if self.in_flight.is_empty() {
            actions.extend(self.ended());
        } else {
            actions.push(Action::CancelPulls);
        }
        actions
    }

    fn ended(&mut self) -> Option<Action> {
        match self.ending.take()? {
            Ending::Fail(code, why) => {
                self.phase = Phase::Failed(code);
                Some(Action::Fail { code, why })
            }
            Ending::Abort => {
                self.phase = Phase::Aborted;
                Some(Action::Aborted)
            }
        }
    }

    fn while_ending(&mut self, event: Event) -> Result<Vec<Action>, Illegal> {
        match event {
            Event::Pulled { ticket }
            | Event::PullFailed { ticket, .. }
            | Event::PullStopped { ticket } => {
                self.in_flight.remove(&ticket);
                Ok(if self.in_flight.is_empty() {
                    self.ended().into_iter().collect()
                } else {
                    vec![]
                })
            }
            // The engine wants to hear "aborted", and its wish outranks a failure it has not heard of.
            Event::Abort(_) => {
                self.ending = Some(Ending::Abort);
                Ok(vec![])
            }
            Event::Connected { .. } => Err(self.illegal(&event, "the room is ending")),
            _ => Ok(vec![]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const P: Peer = 3;
    const LIMITS: PullLimits = PullLimits {
        pages_per_pull: 2,
        pulls_in_flight: 2,
        max_pages: 100,
        wait_ms: 300,
    };

    fn sealed(page: u32) -> Sealed {
        Sealed {
            page,
            generation: 2,
            sum: u64::from(page) * 11,
        }
    }

    fn connected(start_page: u32) -> Room {
        let mut room = Room::new(1, start_page, 0, 1000, LIMITS);
        assert_eq!(
            room.step(Event::Connected { peer: P }, 0),
            Ok(vec![Action::Open { peer: P }])
        );
        room
    }

    fn progress(first_page: u32, n: u32) -> Event {
        Event::Progress {
            peer: P,
            attempt: 1,
            first_page,
            pages: (first_page..first_page + n).map(sealed).collect(),
        }
    }

    fn fin(start: u32, total_pages: u32) -> Event {
        let root = root_of((start..total_pages).map(|p| sealed(p).sum));
        Event::Final {
            peer: P,
            attempt: 1,
            fin: Final {
                total_pages,
                last_page_tokens: 5,
                root,
                payload: vec![1],
            },
        }
    }

    fn pulls(actions: &[Action]) -> Vec<(u64, usize)> {
        actions
            .iter()
            .filter_map(|a| {
                if let Action::Pull { ticket, pages } = a {
                    Some((*ticket, pages.len()))
                } else {
                    None
                }
            })
            .collect()
    }

    fn grant_first(pages: u32) -> Event {
        Event::Grant {
            start_page: 0,
            pages: (0..pages).collect(),
        }
    }

    #[test]
    fn waiting_for_an_engine_is_not_a_transfer_that_hangs() {
        let mut room = connected(0);
        assert_eq!(room.next_due(), Some(300), "P owes an answer to OPEN");
        room.step(progress(0, 2), 200).expect("a legal event");
        assert_eq!(room.next_due(), Some(1000), "this side owes pages");
        assert_eq!(room.step(Event::Tick, 999), Ok(vec![]));
        room.step(grant_first(2), 600).expect("a legal event");
        assert_eq!(room.next_due(), Some(900), "a pull is in flight");
        room.step(Event::Pulled { ticket: 0 }, 700)
            .expect("a legal event");
        assert_eq!(
            room.next_due(),
            Some(1000),
            "P's engine owes the rest of the prompt"
        );
        assert!(matches!(
            room.step(Event::Tick, 1000).as_deref(),
            Ok([
                Action::SendAbort { .. },
                Action::Fail {
                    code: Code::Deadline,
                    ..
                }
            ])
        ));
    }

    #[test]
    fn a_pull_that_hangs_ends_the_room_before_its_deadline() {
        let mut room = connected(0);
        room.step(progress(0, 2), 200).expect("a legal event");
        room.step(grant_first(2), 210).expect("a legal event");
        assert_eq!(room.step(Event::Tick, 509), Ok(vec![]));
        let actions = room.step(Event::Tick, 510).expect("a legal event");
        assert!(
            matches!(actions[..], [Action::SendAbort { .. }, Action::CancelPulls]),
            "{actions:?}"
        );
    }

    #[test]
    fn pages_are_pulled_as_they_are_announced_and_committed_at_the_end() {
        let mut room = connected(0);
        assert_eq!(
            room.step(
                Event::Grant {
                    start_page: 0,
                    pages: vec![50, 51, 52]
                },
                0
            ),
            Ok(vec![]),
            "a grant before OPEN_OK"
        );
        let actions = room.step(progress(0, 1), 0).expect("legal");
        assert_eq!(
            actions,
            vec![Action::Pull {
                ticket: 0,
                pages: vec![PullPage {
                    src: sealed(0),
                    dst: 50
                }]
            }],
            "PROGRESS overtook OPEN_OK"
        );
        room.step(
            Event::Accepted {
                peer: P,
                attempt: 1,
            },
            0,
        )
        .expect("legal");
        assert_eq!(
            pulls(&room.step(progress(1, 2), 0).expect("legal")),
            vec![(1, 2)]
        );
        assert_eq!(room.step(fin(0, 3), 0), Ok(vec![]));
        assert_eq!(room.step(Event::Pulled { ticket: 1 }, 0), Ok(vec![]));
        let end = room.step(Event::Pulled { ticket: 0 }, 0).expect("legal");
        assert!(
            matches!(end[..], [Action::Done { peer: P, .. }, Action::Commit(_)]),
            "{end:?}"
        );
        assert_eq!(room.phase, Phase::Committed);
    }

    #[test]
    fn a_grant_can_be_revoked_until_the_peer_holds_pages_for_the_room() {
        let grant = |pages: &[u32]| Event::Grant {
            start_page: 0,
            pages: pages.to_vec(),
        };
        let mut room = connected(0);
        room.step(grant(&[50, 51]), 0).expect("legal");
        assert_eq!(room.step(Event::Revoke, 0), Ok(vec![Action::Revoked]));
        assert!(room.step(Event::Revoke, 0).is_err(), "nothing is granted");
        assert_eq!(
            room.step(progress(0, 1), 0),
            Ok(vec![Action::Announced]),
            "the engine hears once that this one is worth pages"
        );
        assert_eq!(room.step(progress(1, 1), 0), Ok(vec![]));
        assert_eq!(
            pulls(&room.step(grant(&[60, 61]), 0).expect("legal")),
            vec![(0, 2)]
        );
        assert_eq!(
            room.step(Event::Revoke, 0),
            Ok(vec![Action::Announced]),
            "too late: the pages are being filled"
        );
        assert_eq!(room.pulls_in_flight(), 1);
    }

    #[test]
    fn a_full_hit_commits_on_final_alone() {
        let mut room = connected(0);
        room.step(
            Event::Grant {
                start_page: 4,
                pages: vec![],
            },
            0,
        )
        .expect("legal");
        assert_eq!(room.step(progress(0, 4), 0), Ok(vec![]), "nothing to pull");
        let end = room.step(fin(0, 4), 0).expect("legal");
        assert!(
            matches!(end[..], [Action::Done { .. }, Action::Commit(_)]),
            "{end:?}"
        );
    }

    #[test]
    fn pages_before_start_page_are_not_pulled_and_pulls_are_windowed() {
        let mut room = connected(2);
        room.step(
            Event::Grant {
                start_page: 0,
                pages: (50..57).collect(),
            },
            0,
        )
        .expect("legal");
        let actions = room.step(progress(0, 9), 0).expect("legal");
        assert_eq!(
            pulls(&actions),
            vec![(0, 2), (1, 2)],
            "two pulls of two pages, the rest waits"
        );
        assert!(
            matches!(&actions[0], Action::Pull { pages, .. } if pages[0] == PullPage { src: sealed(2), dst: 50 })
        );
        assert_eq!(
            pulls(&room.step(Event::Pulled { ticket: 0 }, 0).expect("legal")),
            vec![(2, 2)]
        );
    }

    #[test]
    fn the_end_is_told_only_after_the_last_pull_stopped() {
        let mut room = connected(0);
        room.step(
            Event::Grant {
                start_page: 0,
                pages: vec![50, 51, 52, 53],
            },
            0,
        )
        .expect("legal");
        room.step(progress(0, 4), 0).expect("legal");
        let actions = room
            .step(
                Event::PullFailed {
                    ticket: 0,
                    code: Code::Checksum,
                    why: "x".into(),
                },
                0,
            )
            .expect("legal");
        assert_eq!(
            actions,
            vec![
                Action::SendAbort {
                    peer: P,
                    code: Code::Checksum
                },
                Action::CancelPulls
            ]
        );
        assert_eq!(room.step(Event::Tick, 5000), Ok(vec![]), "no second end");
        assert_eq!(
            room.step(progress(4, 1), 0),
            Ok(vec![]),
            "nothing new is started"
        );
        let end = room.step(Event::Pulled { ticket: 1 }, 0).expect("legal");
        assert_eq!(
            end,
            vec![Action::Fail {
                code: Code::Checksum,
                why: "x".into()
            }]
        );
    }

    #[test]
    fn an_abort_while_a_failure_waits_is_told_as_an_abort() {
        let mut room = connected(0);
        room.step(
            Event::Grant {
                start_page: 0,
                pages: vec![50],
            },
            0,
        )
        .expect("legal");
        room.step(progress(0, 1), 0).expect("legal");
        room.step(
            Event::PeerAbort {
                peer: P,
                attempt: 1,
                code: Code::ClientGone,
            },
            0,
        )
        .expect("legal");
        assert_eq!(room.step(Event::Abort(Code::ClientGone), 0), Ok(vec![]));
        assert_eq!(
            room.step(Event::PullStopped { ticket: 0 }, 0),
            Ok(vec![Action::Aborted])
        );
    }

    #[test]
    fn a_dead_peer_is_survived_only_if_nothing_more_is_needed_from_it() {
        let gone = |readable| Event::PeerGone {
            peer: P,
            code: Code::PeerDead,
            readable,
        };
        let ready = || {
            let mut room = connected(0);
            room.step(progress(0, 2), 0).expect("legal");
            room
        };
        let mut early = ready();
        assert!(
            matches!(
                early.step(gone(true), 0).expect("legal")[..],
                [Action::Fail {
                    code: Code::PeerDead,
                    ..
                }]
            ),
            "FINAL is missing"
        );
        let mut tcp = ready();
        tcp.step(fin(0, 2), 0).expect("legal");
        assert!(matches!(
            tcp.step(gone(false), 0).expect("legal")[..],
            [Action::Fail { .. }]
        ));
        let mut shm = ready();
        shm.step(fin(0, 2), 0).expect("legal");
        assert_eq!(shm.step(gone(true), 0), Ok(vec![]));
        assert_eq!(
            pulls(
                &shm.step(
                    Event::Grant {
                        start_page: 0,
                        pages: vec![50, 51]
                    },
                    0
                )
                .expect("legal")
            ),
            vec![(0, 2)]
        );
        assert!(
            matches!(
                shm.step(Event::Pulled { ticket: 0 }, 0).expect("legal")[..],
                [Action::Commit(_)]
            ),
            "and nobody is told DONE"
        );
    }

    #[test]
    fn a_grant_of_the_wrong_size_never_commits() {
        for granted in [0usize, 1, 3] {
            let mut room = connected(0);
            room.step(
                Event::Grant {
                    start_page: 0,
                    pages: (0..granted as u32).collect(),
                },
                0,
            )
            .expect("legal");
            let actions = room.step(fin(0, 2), 0).expect("legal");
            assert!(
                actions.iter().any(|a| matches!(
                    a,
                    Action::Fail {
                        code: Code::PromptMismatch,
                        ..
                    }
                )),
                "{actions:?}"
            );
        }
    }

    #[test]
    fn a_wrong_root_is_a_checksum_failure() {
        let mut room = connected(0);
        room.step(
            Event::Grant {
                start_page: 0,
                pages: vec![50],
            },
            0,
        )
        .expect("legal");
        room.step(progress(0, 1), 0).expect("legal");
        let lie = Event::Final {
            peer: P,
            attempt: 1,
            fin: Final {
                total_pages: 1,
                last_page_tokens: 1,
                root: 1,
                payload: vec![],
            },
        };
        room.step(lie, 0).expect("legal");
        let end = room.step(Event::Pulled { ticket: 0 }, 0).expect("legal");
        assert!(
            end.iter().any(|a| matches!(
                a,
                Action::Fail {
                    code: Code::Checksum,
                    ..
                }
            )),
            "{end:?}"
        );
    }

    #[test]
    fn words_of_other_peers_and_attempts_are_ignored() {
        let mut room = connected(0);
        let before = room.clone();
        for event in [
            Event::Accepted {
                peer: 99,
                attempt: 1,
            },
            Event::Rejected {
                peer: P,
                attempt: 0,
                code: Code::DupRoom,
                why: String::new(),
            },
            Event::PeerGone {
                peer: 99,
                code: Code::PeerDead,
                readable: false,
            },
            Event::PeerAbort {
                peer: P,
                attempt: 2,
                code: Code::ClientGone,
            },
        ] {
            assert_eq!(room.step(event, 0), Ok(vec![]));
        }
        assert_eq!(room, before);
    }

    #[test]
    fn illegal_pairs_are_typed_errors_and_change_nothing() {
        let mut over = connected(0);
        over.step(Event::Abort(Code::ClientGone), 0).expect("legal");
        let mut granted = connected(0);
        granted
            .step(
                Event::Grant {
                    start_page: 0,
                    pages: vec![1],
                },
                0,
            )
            .expect("legal");
        let cases = [
            (
                over.clone(),
                Event::Grant {
                    start_page: 0,
                    pages: vec![1],
                },
                "over",
            ),
            (over.clone(), Event::Abort(Code::ClientGone), "over"),
            (over, Event::Connected { peer: P }, "over"),
            (
                granted,
                Event::Grant {
                    start_page: 0,
                    pages: vec![2],
                },
                "granted before",
            ),
            (connected(0), Event::Connected { peer: 4 }, "has a peer"),
        ];
        for (mut room, event, why) in cases {
            let before = room.clone();
            let err = room.step(event, 0).expect_err("illegal");
            assert!(err.why.contains(why), "{err}");
            assert_eq!(room, before);
        }
    }

    #[test]
    fn a_peer_that_announces_without_end_is_cut_off() {
        let mut room = connected(0);
        let actions = room.step(progress(90, 20), 0).expect("legal");
        assert!(
            actions.iter().any(|a| matches!(
                a,
                Action::Fail {
                    code: Code::TransportBroken,
                    ..
                }
            )),
            "{actions:?}"
        );
    }
}
