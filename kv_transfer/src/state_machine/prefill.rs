//! A room on the prefill side.
//!
//! ```text
//! WAITING ──publish──▶ PREFILLING ──finish──▶ LEASED ──DONE──▶ RELEASED
//!    │  any: own abort, peer's ABORT, peer lost, deadline        │ lease runs out
//!    └──────────────────────▶ ABORTED(code)                      └──▶ EXPIRED
//! ```
//!
//! P computes whether or not D has asked yet. D's OPEN binds the room to one reader, which then gets everything published so
//! far and everything after it; FINAL follows when the engine has finished and every page has its checksum. While LEASED the
//! pages stay locked in P's cache; D's heartbeats renew the lease as long as they name the room.
//!
//! A reader that dies or gives its place up takes only itself away: the request may come again with another one, which
//! reads the same pages without a second prefill. A lease without a reader is short (`REOPEN_MS`).

use super::{Illegal, Peer};
use crate::protocol::{Sealed, root_of};
use crate::reason_code::Code;

/// How long pages wait for another reader when theirs has gone [ms]: a router notices a dead node within milliseconds.
pub const REOPEN_MS: u64 = 3_000;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Phase {
    Waiting,
    Prefilling,
    Leased { until: u64 },
    Released,
    Aborted(Code),
    Expired,
}

impl Phase {
    pub const LIVE_NAMES: &'static [&'static str] = &["WAITING", "PREFILLING", "LEASED"];

    pub fn name(&self) -> &'static str {
        match self {
            Phase::Waiting => "WAITING",
            Phase::Prefilling => "PREFILLING",
            Phase::Leased { .. } => "LEASED",
            Phase::Released => "RELEASED",
            Phase::Aborted(_) => "ABORTED",
            Phase::Expired => "EXPIRED",
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self, Phase::Released | Phase::Aborted(_) | Phase::Expired)
    }
}

/// What the engine hands over at the end of prefill.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Finish {
    pub total_pages: u32,
    pub last_page_tokens: u32,
    pub payload: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reader {
    peer: Peer,
    start_page: u32,
    final_sent: bool,
}

/// One prompt page, by its index in the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Slot {
    Missing,
    Hashing { page: u32, generation: u64 },
    Ready(Sealed),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Room {
    pub phase: Phase,
    pub attempt: u32,
    prompt_hash: Vec<u8>,
    deadline: u64,
    lease_ms: u64,
    pages: Vec<Slot>,
    finish: Option<Finish>,
    reader: Option<Reader>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// Own engine: prompt pages [first, first + n) are final, as (page, generation).
    Publish {
        first: u32,
        pages: Vec<(u32, u64)>,
    },
    /// Own copy thread: checksums of pages published before, as (index in the prompt, page).
    Hashed(Vec<(u32, Sealed)>),
    /// Own engine: the forward passes are over.
    Finish(Finish),
    /// Own engine.
    Abort(Code),
    Open {
        peer: Peer,
        attempt: u32,
        prompt_hash: Vec<u8>,
        start_page: u32,
    },
    Done {
        peer: Peer,
        attempt: u32,
    },
    PeerAbort {
        peer: Peer,
        attempt: u32,
        code: Code,
    },
    PeerGone {
        peer: Peer,
        code: Code,
    },
    /// A heartbeat of the peer that names this room.
    Renew {
        peer: Peer,
    },
    Tick,
}

impl Event {
    fn name(&self) -> &'static str {
        match self {
            Event::Publish { .. } => "publish",
            Event::Hashed(_) => "hashed",
            Event::Finish(_) => "finish",
            Event::Abort(_) => "abort",
            Event::Open { .. } => "OPEN",
            Event::Done { .. } => "DONE",
            Event::PeerAbort { .. } => "ABORT",
            Event::PeerGone { .. } => "peer gone",
            Event::Renew { .. } => "renew",
            Event::Tick => "tick",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Action {
    /// Compute checksums of (index in the prompt, page, generation).
    Hash(Vec<(u32, u32, u64)>),
    Accept {
        peer: Peer,
    },
    Reject {
        peer: Peer,
        code: Code,
        why: String,
    },
    Progress {
        peer: Peer,
        first_page: u32,
        pages: Vec<Sealed>,
    },
    Final {
        peer: Peer,
        finish: Finish,
        root: u64,
    },
    SendAbort {
        peer: Peer,
        code: Code,
    },
    AckAbort {
        peer: Peer,
    },
    /// The reader is gone, the room waits for another.
    ReaderLeft {
        peer: Peer,
    },
    /// The room is over: the engine may unlock its pages. `None` means DONE.
    Released(Option<Code>),
}

/// Whether a reader that ends for this reason leaves good pages behind: nothing is wrong with them or with the request.
fn leaves_pages(code: Code) -> bool {
    matches!(
        code,
        Code::PeerDead | Code::PeerRestarted | Code::NoCapacity | Code::Draining
    )
}

impl Room {
    pub fn new(attempt: u32, prompt_hash: Vec<u8>, deadline: u64, lease_ms: u64) -> Self {
        Self {
            phase: Phase::Waiting,
            attempt,
            prompt_hash,
            deadline,
            lease_ms,
            pages: Vec::new(),
            finish: None,
            reader: None,
        }
    }

    /// The moment at which `Tick` changes something.
    pub fn next_due(&self) -> Option<u64> {
        match self.phase {
            Phase::Waiting | Phase::Prefilling => Some(self.deadline),
            Phase::Leased { until } => Some(until),
            _ => None,
        }
    }

    pub fn reader(&self) -> Option<Peer> {
        self.reader.as_ref().map(|reader| reader.peer)
    }

    /// (pages published, pages with a checksum), for the timeline.
    pub fn progress(&self) -> (usize, usize) {
        let ready = self
            .pages
            .iter()
            .filter(|slot| matches!(slot, Slot::Ready(_)))
            .count();
        (
            self.pages
                .iter()
                .filter(|slot| **slot != Slot::Missing)
                .count(),
            ready,
        )
    }

    /// The transition function: on `Err` the room is as it was.
    pub fn step(&mut self, event: Event, now: u64) -> Result<Vec<Action>, Illegal> {
        if self.phase.is_over() {
            return self.after_the_end(&event);
        }
        match event {
            Event::Publish { first, pages } => self.publish(first, &pages),
            Event::Hashed(sums) => Ok(self.hashed(&sums)),
            Event::Finish(finish) => self.finish(finish, now),
            Event::Abort(code) => Ok(self.end(Phase::Aborted(code), Some(code), true)),
            Event::Open {
                peer,
                attempt,
                prompt_hash,
                start_page,
            } => Ok(self.open(peer, attempt, &prompt_hash, start_page, now)),
            Event::Done { peer, attempt }
                if self.is_reader(peer) && attempt == self.attempt && self.final_sent() =>
            {
                Ok(self.end(Phase::Released, None, false))
            }
            Event::PeerAbort {
                peer,
                attempt,
                code,
            } if self.is_reader(peer) && attempt == self.attempt => {
                let mut actions = vec![Action::AckAbort { peer }];
                actions.extend(self.lose_reader(peer, code, now));
                Ok(actions)
            }
            Event::PeerGone { peer, code } if self.is_reader(peer) => {
                Ok(self.lose_reader(peer, code, now))
            }
            Event::Renew { peer } if self.is_reader(peer) => {
                self.renew(now);
                Ok(vec![])
            }
            Event::Tick => Ok(self.tick(now)),
            // Late or foreign words of a peer: not ours to act on.
            Event::Done { .. }
            | Event::PeerAbort { .. }
            | Event::PeerGone { .. }
            | Event::Renew { .. } => Ok(vec![]),
        }
    }

    fn lose_reader(&mut self, peer: Peer, code: Code, now: u64) -> Vec<Action> {
        if !leaves_pages(code) {
            return self.end(Phase::Aborted(code), Some(code), false);
        }
        self.reader = None;
        if let Phase::Leased { until } = &mut self.phase {
            *until = (*until).min(now + REOPEN_MS);
        }
        vec![Action::ReaderLeft { peer }]
    }

    fn is_reader(&self, peer: Peer) -> bool {
        self.reader() == Some(peer)
    }

    fn final_sent(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| reader.final_sent)
    }

    fn illegal(&self, event: &'static str, why: impl Into<String>) -> Illegal {
        Illegal {
            phase: self.phase.name(),
            event,
            why: why.into(),
        }
    }

    fn after_the_end(&self, event: &Event) -> Result<Vec<Action>, Illegal> {
        match event {
            Event::Publish { .. } | Event::Finish(_) | Event::Abort(_) => {
                Err(self.illegal(event.name(), "the room is over"))
            }
            Event::Open { peer, .. } => Ok(vec![Action::Reject {
                peer: *peer,
                code: self.code_after_the_end(),
                why: "the room is over".into(),
            }]),
            _ => Ok(vec![]),
        }
    }

    /// What a late OPEN of this room is told.
    pub fn code_after_the_end(&self) -> Code {
        match self.phase {
            Phase::Aborted(code) => code,
            Phase::Released => Code::DupRoom,
            _ => Code::LeaseExpired,
        }
    }

    fn publish(&mut self, first: u32, pages: &[(u32, u64)]) -> Result<Vec<Action>, Illegal> {
        if self.finish.is_some() {
            return Err(self.illegal("publish", "finish() came before"));
        }
        let mut fresh = Vec::new();
        for (index, &(page, generation)) in (first..).zip(pages) {
            match self.pages.get(index as usize) {
                None | Some(Slot::Missing) => fresh.push((index, page, generation)),
                Some(
                    Slot::Hashing {
                        page: p,
                        generation: g,
                    }
                    | Slot::Ready(Sealed {
                        page: p,
                        generation: g,
                        ..
                    }),
                ) => {
                    if (*p, *g) != (page, generation) {
                        return Err(self.illegal("publish", format!("prompt page {index} was published as page {p} generation {g}, now as page {page} generation {generation}")));
                    }
                }
            }
        }
        let end = first as usize + pages.len();
        if self.pages.len() < end {
            self.pages.resize(end, Slot::Missing);
        }
        for &(index, page, generation) in &fresh {
            self.pages[index as usize] = Slot::Hashing { page, generation };
        }
        self.phase = Phase::Prefilling;
        Ok(if fresh.is_empty() {
            vec![]
        } else {
            vec![Action::Hash(fresh)]
        })
    }

    fn hashed(&mut self, sums: &[(u32, Sealed)]) -> Vec<Action> {
        let mut ready: Vec<(u32, Sealed)> = Vec::with_capacity(sums.len());
        for &(index, sealed) in sums {
            // Compared with what was asked: the answer may belong to an earlier room of this number.
            let asked = Slot::Hashing {
                page: sealed.page,
                generation: sealed.generation,
            };
            if let Some(slot) = self.pages.get_mut(index as usize)
                && *slot == asked
            {
                *slot = Slot::Ready(sealed);
                ready.push((index, sealed));
            }
        }
        let Some(reader) = &self.reader else {
            return vec![];
        };
        ready.retain(|&(index, _)| index >= reader.start_page);
        let mut actions = progress_runs(reader.peer, &ready);
        actions.extend(self.try_final());
        actions
    }

    fn finish(&mut self, finish: Finish, now: u64) -> Result<Vec<Action>, Illegal> {
        if self.finish.is_some() {
            return Err(self.illegal("finish", "it was called before"));
        }
        let published = self
            .pages
            .iter()
            .take_while(|slot| **slot != Slot::Missing)
            .count();
        if published != finish.total_pages as usize || self.pages.len() != published {
            return Err(self.illegal(
                "finish",
                format!(
                    "{} pages in all, but pages [0, {published}) of {} are published",
                    finish.total_pages,
                    self.pages.len()
                ),
            ));
        }
        self.finish = Some(finish);
        self.phase = Phase::Leased {
            until: now + self.lease_ms,
        };
        Ok(self.try_final())
    }

    fn open(
        &mut self,
        peer: Peer,
        attempt: u32,
        prompt_hash: &[u8],
        start_page: u32,
        now: u64,
    ) -> Vec<Action> {
        let reject = |code, why: String| vec![Action::Reject { peer, code, why }];
        if attempt != self.attempt {
            return reject(
                Code::DupRoom,
                format!(
                    "the room is in use by attempt {}, not {attempt}",
                    self.attempt
                ),
            );
        }
        let before = self.reader.as_ref().map(|reader| reader.peer);
        match &self.reader {
            Some(reader) if reader.peer == peer && reader.start_page != start_page => {
                return reject(
                    Code::DupRoom,
                    "this decode rank reads the room already".into(),
                );
            }
            // The same OPEN again: tell everything again, nothing else changes.
            Some(reader) if reader.peer == peer => {}
            _ if prompt_hash != self.prompt_hash => {
                return reject(
                    Code::PromptMismatch,
                    "prefill and decode hashed different prompts; compare tokenizers and templates"
                        .into(),
                );
            }
            _ => {}
        }
        let mut actions = Vec::new();
        if let Some(before) = before.filter(|before| *before != peer) {
            // The router sent the request to another decode node: the one before is dead or given up, and we learn it late.
            actions.push(Action::SendAbort {
                peer: before,
                code: Code::DupRoom,
            });
            actions.push(Action::ReaderLeft { peer: before });
        }
        self.reader = Some(Reader {
            peer,
            start_page,
            final_sent: false,
        });
        self.renew(now);
        let ready: Vec<(u32, Sealed)> = (0u32..)
            .zip(&self.pages)
            .skip(start_page as usize)
            .filter_map(|(index, slot)| {
                if let Slot::Ready(sealed) = slot {
                    Some((index, *sealed))
                } else {
                    None
                }
            })
            .collect();
        actions.push(Action::Accept { peer });
        actions.extend(progress_runs(peer, &ready));
        actions.extend(self.try_final());
        actions
    }

    /// FINAL goes out once: when there is a reader, the engine has finished and all checksums are known.
    fn try_final(&mut self) -> Vec<Action> {
        let (Some(finish), Some(reader)) = (&self.finish, &mut self.reader) else {
            return vec![];
        };
        if reader.final_sent
            || self
                .pages
                .iter()
                .any(|slot| !matches!(slot, Slot::Ready(_)))
        {
            return vec![];
        }
        reader.final_sent = true;
        let sums = self
            .pages
            .iter()
            .skip(reader.start_page as usize)
            .filter_map(|slot| {
                if let Slot::Ready(sealed) = slot {
                    Some(sealed.sum)
                } else {
                    None
                }
            });
        vec![Action::Final {
            peer: reader.peer,
            finish: finish.clone(),
            root: root_of(sums),
        }]
    }

    fn renew(&mut self, now: u64) {
        if let Phase::Leased { until } = &mut self.phase {
            // A living reader may hold the pages until the request's own deadline, and one lease beyond it, not for ever.
            *until = (*until).max((now + self.lease_ms).min(self.deadline + self.lease_ms));
        }
    }

    fn tick(&mut self, now: u64) -> Vec<Action> {
        match self.phase {
            Phase::Leased { until } if now >= until => {
                self.end(Phase::Expired, Some(Code::LeaseExpired), true)
            }
            Phase::Waiting | Phase::Prefilling if now >= self.deadline => {
                self.end(Phase::Aborted(Code::Deadline), Some(Code::Deadline), true)
            }
            _ => vec![],
        }
    }

    fn end(&mut self, phase: Phase, code: Option<Code>, tell: bool) -> Vec<Action> {
        let mut actions = Vec::with_capacity(2);
        if let (true, Some(reader), Some(code)) = (tell, &self.reader, code) {
            actions.push(Action::SendAbort {
                peer: reader.peer,
                code,
            });
        }
        self.phase = phase;
        actions.push(Action::Released(code));
        actions
    }
}

/// PROGRESS speaks of consecutive pages: one action per run.
fn progress_runs(peer: Peer, ready: &[(u32, Sealed)]) -> Vec<Action> {
    ready
        .chunk_by(|a, b| a.0 + 1 == b.0)
        .flat_map(|run| run.chunks(crate::protocol::MAX_PROGRESS_PAGES))
        .map(|run| Action::Progress {
            peer,
            first_page: run[0].0,
            pages: run.iter().map(|&(_, sealed)| sealed).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: Peer = 7;

    fn room() -> Room {
        Room::new(1, vec![1, 2], 1000, 100)
    }

    fn sealed(page: u32) -> Sealed {
        Sealed {
            page,
            generation: 2,
            sum: u64::from(page) * 11,
        }
    }

    fn open(start_page: u32) -> Event {
        Event::Open {
            peer: D,
            attempt: 1,
            prompt_hash: vec![1, 2],
            start_page,
        }
    }

    fn finish(total_pages: u32) -> Event {
        Event::Finish(Finish {
            total_pages,
            last_page_tokens: 3,
            payload: vec![9],
        })
    }

    /// `room` with pages 10.. published and hashed.
    fn with_pages(mut room: Room, n: u32) -> Room {
        room.step(
            Event::Publish {
                first: 0,
                pages: (0..n).map(|i| (10 + i, 2)).collect(),
            },
            0,
        )
        .expect("publish is legal");
        room.step(
            Event::Hashed((0..n).map(|i| (i, sealed(10 + i))).collect()),
            0,
        )
        .expect("always legal");
        room
    }

    #[test]
    fn a_room_without_a_reader_tells_nobody_and_tells_everything_on_open() {
        let mut room = with_pages(room(), 2);
        assert_eq!(room.step(finish(2), 10), Ok(vec![]));
        assert_eq!(room.phase, Phase::Leased { until: 110 });
        let actions = room.step(open(1), 20).expect("legal");
        assert_eq!(actions[0], Action::Accept { peer: D });
        assert_eq!(
            actions[1],
            Action::Progress {
                peer: D,
                first_page: 1,
                pages: vec![sealed(11)]
            }
        );
        assert!(
            matches!(&actions[2], Action::Final { root, .. } if *root == root_of([sealed(11).sum].into_iter()))
        );
        assert_eq!(
            room.step(
                Event::Done {
                    peer: D,
                    attempt: 1
                },
                30
            ),
            Ok(vec![Action::Released(None)])
        );
        assert_eq!(room.phase, Phase::Released);
    }

    #[test]
    fn final_waits_for_the_last_checksum() {
        let mut room = room();
        room.step(open(0), 0).expect("legal");
        room.step(
            Event::Publish {
                first: 0,
                pages: vec![(10, 2)],
            },
            0,
        )
        .expect("legal");
        assert_eq!(room.step(finish(1), 0), Ok(vec![]));
        assert_eq!(
            room.step(
                Event::Done {
                    peer: D,
                    attempt: 1
                },
                0
            ),
            Ok(vec![]),
            "DONE before FINAL means nothing"
        );
        let actions = room
            .step(Event::Hashed(vec![(0, sealed(10))]), 0)
            .expect("legal");
        assert!(matches!(
            actions[..],
            [Action::Progress { .. }, Action::Final { .. }]
        ));
    }

    #[test]
    fn checksums_of_another_room_of_the_same_number_are_not_taken() {
        let mut room = room();
        room.step(open(0), 0).expect("legal");
        room.step(
            Event::Publish {
                first: 0,
                pages: vec![(10, 2)],
            },
            0,
        )
        .expect("legal");
        for foreign in [
            sealed(11),
            Sealed {
                generation: 4,
                ..sealed(10)
            },
        ] {
            assert_eq!(room.step(Event::Hashed(vec![(0, foreign)]), 0), Ok(vec![]));
        }
        assert_eq!(
            room.step(Event::Hashed(vec![(0, sealed(10))]), 0)
                .map(|a| a.len()),
            Ok(1)
        );
    }

    #[test]
    fn a_wrong_prompt_and_a_wrong_attempt_are_rejected_and_another_reader_takes_over() {
        let mut room = with_pages(room(), 1);
        let code = |actions: Vec<Action>| match &actions[..] {
            [Action::Reject { code, .. }] => *code,
            other => panic!("expected one rejection, got {other:?}"),
        };
        let wrong_prompt = Event::Open {
            peer: D,
            attempt: 1,
            prompt_hash: vec![3],
            start_page: 0,
        };
        assert_eq!(
            code(room.step(wrong_prompt, 0).expect("legal")),
            Code::PromptMismatch
        );
        let wrong_attempt = Event::Open {
            peer: D,
            attempt: 2,
            prompt_hash: vec![1, 2],
            start_page: 0,
        };
        assert_eq!(
            code(room.step(wrong_attempt, 0).expect("legal")),
            Code::DupRoom
        );
        room.step(open(0), 0).expect("legal");
        assert_eq!(
            room.step(open(0), 0).expect("legal")[0],
            Action::Accept { peer: D },
            "the same OPEN twice is answered twice"
        );
        let second = |prompt_hash| Event::Open {
            peer: 8,
            attempt: 1,
            prompt_hash,
            start_page: 0,
        };
        assert_eq!(
            code(room.step(second(vec![9]), 0).expect("legal")),
            Code::PromptMismatch
        );
        assert_eq!(room.reader(), Some(D));
        assert_eq!(
            room.step(second(vec![1, 2]), 0).expect("legal")[..3],
            [
                Action::SendAbort {
                    peer: D,
                    code: Code::DupRoom
                },
                Action::ReaderLeft { peer: D },
                Action::Accept { peer: 8 }
            ]
        );
        assert_eq!(room.reader(), Some(8));
    }

    #[test]
    fn a_lease_expires_is_renewed_by_its_reader_only_and_not_for_ever() {
        let mut room = with_pages(room(), 1);
        room.step(finish(1), 0).expect("legal");
        room.step(open(0), 0).expect("legal");
        room.step(Event::Renew { peer: 99 }, 50).expect("legal");
        assert_eq!(room.next_due(), Some(100));
        room.step(Event::Renew { peer: D }, 50).expect("legal");
        assert_eq!(room.next_due(), Some(150));
        room.step(Event::Renew { peer: D }, 100_000).expect("legal");
        assert_eq!(room.next_due(), Some(1100), "deadline plus one lease");
        assert_eq!(room.step(Event::Tick, 1099), Ok(vec![]));
        let end = room.step(Event::Tick, 1100).expect("legal");
        assert_eq!(
            end,
            vec![
                Action::SendAbort {
                    peer: D,
                    code: Code::LeaseExpired
                },
                Action::Released(Some(Code::LeaseExpired))
            ]
        );
        assert_eq!(room.phase, Phase::Expired);
    }

    #[test]
    fn only_the_reader_of_this_attempt_can_end_the_room_from_outside() {
        let mut room = with_pages(room(), 1);
        room.step(open(0), 0).expect("legal");
        room.step(finish(1), 0).expect("legal");
        let before = room.clone();
        for event in [
            Event::Done {
                peer: 99,
                attempt: 1,
            },
            Event::Done {
                peer: D,
                attempt: 0,
            },
            Event::PeerAbort {
                peer: 99,
                attempt: 1,
                code: Code::ClientGone,
            },
            Event::PeerAbort {
                peer: D,
                attempt: 2,
                code: Code::ClientGone,
            },
            Event::PeerGone {
                peer: 99,
                code: Code::PeerDead,
            },
        ] {
            assert_eq!(room.step(event, 0), Ok(vec![]));
        }
        assert_eq!(room, before);
        assert_eq!(
            room.step(
                Event::Done {
                    peer: D,
                    attempt: 1
                },
                0
            ),
            Ok(vec![Action::Released(None)])
        );
    }

    #[test]
    fn another_reader_gets_the_pages_of_one_that_died_while_prefill_goes_on() {
        const D2: Peer = 8;
        let mut room = with_pages(room(), 1);
        room.step(open(0), 0).expect("legal");
        let gone = Event::PeerGone {
            peer: D,
            code: Code::PeerDead,
        };
        assert_eq!(room.step(gone, 1), Ok(vec![Action::ReaderLeft { peer: D }]));
        let again = |peer| Event::Open {
            peer,
            attempt: 1,
            prompt_hash: vec![1, 2],
            start_page: 0,
        };
        let actions = room.step(again(D2), 2).expect("legal");
        assert_eq!(actions[0], Action::Accept { peer: D2 });
        assert!(matches!(actions[1], Action::Progress { peer: D2, .. }));
        // The first one's late words are not heard.
        let late = Event::Done {
            peer: D,
            attempt: 1,
        };
        assert_eq!(room.step(late, 3), Ok(vec![]));
        let actions = room.step(finish(1), 4).expect("legal");
        assert!(matches!(actions[..], [Action::Final { peer: D2, .. }]));
    }

    #[test]
    fn a_lease_whose_reader_left_is_short_until_another_opens() {
        let mut room = Room::new(1, vec![1, 2], 1_000_000, 60_000);
        room = with_pages(room, 1);
        room.step(open(0), 0).expect("legal");
        room.step(finish(1), 0).expect("legal");
        let refused = Event::PeerAbort {
            peer: D,
            attempt: 1,
            code: Code::NoCapacity,
        };
        assert_eq!(
            room.step(refused, 100),
            Ok(vec![
                Action::AckAbort { peer: D },
                Action::ReaderLeft { peer: D }
            ])
        );
        let mut expires = room.clone();
        let until = 100 + REOPEN_MS;
        assert_eq!(room.next_due(), Some(until));
        assert_eq!(
            expires.step(Event::Tick, until),
            Ok(vec![Action::Released(Some(Code::LeaseExpired))])
        );
        room.step(open(0), 200).expect("legal");
        assert_eq!(room.next_due(), Some(60_200));
    }

    #[test]
    fn every_way_to_end_releases_once() {
        let ends = [
            (Event::Abort(Code::ClientGone), Code::ClientGone),
            (
                Event::PeerAbort {
                    peer: D,
                    attempt: 1,
                    code: Code::Checksum,
                },
                Code::Checksum,
            ),
            (
                Event::PeerGone {
                    peer: D,
                    code: Code::TransportBroken,
                },
                Code::TransportBroken,
            ),
        ];
        for (event, code) in ends {
            let mut room = room();
            room.step(open(0), 0).expect("legal");
            let actions = room.step(event, 1).expect("legal");
            assert_eq!(
                actions
                    .iter()
                    .filter(|a| **a == Action::Released(Some(code)))
                    .count(),
                1
            );
            assert_eq!(room.phase, Phase::Aborted(code));
            for late in [
                Event::Tick,
                Event::PeerGone {
                    peer: D,
                    code: Code::PeerDead,
                },
                Event::Done {
                    peer: D,
                    attempt: 1,
                },
            ] {
                assert_eq!(room.step(late, 5000), Ok(vec![]));
            }
        }
    }

    #[test]
    fn illegal_pairs_are_typed_errors_and_change_nothing() {
        let publish = |page| Event::Publish {
            first: 0,
            pages: vec![(page, 2)],
        };
        let mut over = room();
        over.step(Event::Abort(Code::ClientGone), 0).expect("legal");
        let mut leased = with_pages(room(), 1);
        leased.step(finish(1), 0).expect("legal");
        let cases = [
            (over.clone(), publish(10), "the room is over"),
            (over.clone(), finish(0), "the room is over"),
            (over, Event::Abort(Code::ClientGone), "the room is over"),
            (leased.clone(), publish(10), "finish() came before"),
            (leased, finish(1), "called before"),
            (
                with_pages(room(), 1),
                publish(11),
                "was published as page 10",
            ),
            (with_pages(room(), 1), finish(2), "2 pages in all"),
        ];
        for (mut room, event, why) in cases {
            let before = room.clone();
            let err = room.step(event, 0).expect_err("illegal");
            assert!(err.why.contains(why), "{err}");
            assert_eq!(room, before);
        }
    }

    #[test]
    fn publishing_the_same_pages_again_is_harmless() {
        let mut room = with_pages(room(), 2);
        assert_eq!(
            room.step(
                Event::Publish {
                    first: 1,
                    pages: vec![(11, 2)]
                },
                0
            ),
            Ok(vec![])
        );
    }
}
