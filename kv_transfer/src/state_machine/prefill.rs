//! A room on the prefill side.
//!
//! ```text
//! WAITING ──publish──▶ PREFILLING ──finish──▶ LEASED ──DONE──▶ RELEASED
//!    │  any: own abort, peer's ABORT, peer lost, deadline        │ lease runs out
//!    └──────────────────────▶ ABORTED(code)                      └──▶ EXPIRED
//! ```
//!
//! P computes whether or not D has sent OPEN. D's OPEN binds the room to one reader, which then gets everything published so
//! far and everything after it; FINAL follows when the engine has finished and every page has its checksum. While LEASED the
//! pages stay locked in P's cache; D's heartbeats renew the lease as long as they name the room.
//!
//! A reader that dies or gives up does not end the room: the request may come again with another reader, which
//! reads the same pages without a second prefill. A lease without a reader is short (`REOPEN_MS`).

use super::{ConnectionId, InvalidTransition};
use crate::protocol::{PageDigest, root_of};
use crate::reason_code::ReasonCode;

/// Lease of a room whose reader has left [ms]: a router notices a dead node within milliseconds.
pub const REOPEN_MS: u64 = 3_000;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PrefillPhase {
    Waiting,
    Prefilling,
    Leased { until: u64 },
    Released,
    Aborted(ReasonCode),
    Expired,
}

impl PrefillPhase {
    pub const LIVE_NAMES: &'static [&'static str] = &["WAITING", "PREFILLING", "LEASED"];

    pub fn name(&self) -> &'static str {
        match self {
            PrefillPhase::Waiting => "WAITING",
            PrefillPhase::Prefilling => "PREFILLING",
            PrefillPhase::Leased { .. } => "LEASED",
            PrefillPhase::Released => "RELEASED",
            PrefillPhase::Aborted(_) => "ABORTED",
            PrefillPhase::Expired => "EXPIRED",
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(
            self,
            PrefillPhase::Released | PrefillPhase::Aborted(_) | PrefillPhase::Expired
        )
    }
}

/// Result of prefill, from the engine.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrefillOutput {
    pub total_pages: u32,
    pub last_page_tokens: u32,
    pub payload: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Reader {
    peer: ConnectionId,
    start_page: u32,
    final_sent: bool,
}

/// State of a prompt page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PageState {
    Missing,
    Hashing { page: u32, generation: u64 },
    Ready(PageDigest),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrefillRoom {
    pub phase: PrefillPhase,
    pub attempt: u32,
    prompt_hash: Vec<u8>,
    deadline: u64,
    lease_ms: u64,
    pages: Vec<PageState>,
    finish: Option<PrefillOutput>,
    reader: Option<Reader>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PrefillEvent {
    /// Own engine: prompt pages [first, first + n) are final, as (page, generation).
    Publish {
        first: u32,
        pages: Vec<(u32, u64)>,
    },
    /// Own copy thread: checksums of pages published before, as (index in the prompt, page).
    Hashed(Vec<(u32, PageDigest)>),
    /// Own engine: the forward passes are over.
    Finish(PrefillOutput),
    /// Own engine.
    Abort(ReasonCode),
    Open {
        peer: ConnectionId,
        attempt: u32,
        prompt_hash: Vec<u8>,
        start_page: u32,
    },
    Done {
        peer: ConnectionId,
        attempt: u32,
    },
    PeerAbort {
        peer: ConnectionId,
        attempt: u32,
        code: ReasonCode,
    },
    PeerGone {
        peer: ConnectionId,
        code: ReasonCode,
    },
    /// Heartbeat of the peer that lists this room.
    Renew {
        peer: ConnectionId,
    },
    Tick,
}

impl PrefillEvent {
    fn name(&self) -> &'static str {
        match self {
            PrefillEvent::Publish { .. } => "publish",
            PrefillEvent::Hashed(_) => "hashed",
            PrefillEvent::Finish(_) => "finish",
            PrefillEvent::Abort(_) => "abort",
            PrefillEvent::Open { .. } => "OPEN",
            PrefillEvent::Done { .. } => "DONE",
            PrefillEvent::PeerAbort { .. } => "ABORT",
            PrefillEvent::PeerGone { .. } => "peer gone",
            PrefillEvent::Renew { .. } => "renew",
            PrefillEvent::Tick => "tick",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PrefillAction {
    /// Compute checksums of (index in the prompt, page, generation).
    Hash(Vec<(u32, u32, u64)>),
    Accept {
        peer: ConnectionId,
    },
    Reject {
        peer: ConnectionId,
        code: ReasonCode,
        why: String,
    },
    Progress {
        peer: ConnectionId,
        first_page: u32,
        pages: Vec<PageDigest>,
    },
    Final {
        peer: ConnectionId,
        finish: PrefillOutput,
        root: u64,
    },
    SendAbort {
        peer: ConnectionId,
        code: ReasonCode,
    },
    AckAbort {
        peer: ConnectionId,
    },
    /// The reader has left; the room waits for another.
    ReaderLeft {
        peer: ConnectionId,
    },
    /// The room is over: the engine may unlock its pages. `None` means DONE.
    Released(Option<ReasonCode>),
}

/// True if a reader that ends for this reason leaves good pages and a valid request behind.
fn leaves_pages(code: ReasonCode) -> bool {
    matches!(
        code,
        ReasonCode::PeerDead
            | ReasonCode::PeerRestarted
            | ReasonCode::NoCapacity
            | ReasonCode::Draining
    )
}

impl PrefillRoom {
    pub fn new(attempt: u32, prompt_hash: Vec<u8>, deadline: u64, lease_ms: u64) -> Self {
        Self {
            phase: PrefillPhase::Waiting,
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
            PrefillPhase::Waiting | PrefillPhase::Prefilling => Some(self.deadline),
            PrefillPhase::Leased { until } => Some(until),
            _ => None,
        }
    }

    pub fn reader(&self) -> Option<ConnectionId> {
        self.reader.as_ref().map(|reader| reader.peer)
    }

    /// (pages published, pages with a checksum), for the timeline.
    pub fn progress(&self) -> (usize, usize) {
        let ready = self
            .pages
            .iter()
            .filter(|state| matches!(state, PageState::Ready(_)))
            .count();
        (
            self.pages
                .iter()
                .filter(|state| **state != PageState::Missing)
                .count(),
            ready,
        )
    }

    /// The transition function: on `Err` the room is as it was.
    pub fn step(
        &mut self,
        event: PrefillEvent,
        now: u64,
    ) -> Result<Vec<PrefillAction>, InvalidTransition> {
        if self.phase.is_over() {
            return self.after_the_end(&event);
        }
        match event {
            PrefillEvent::Publish { first, pages } => self.publish(first, &pages),
            PrefillEvent::Hashed(sums) => Ok(self.hashed(&sums)),
            PrefillEvent::Finish(finish) => self.finish(finish, now),
            PrefillEvent::Abort(code) => {
                Ok(self.end(PrefillPhase::Aborted(code), Some(code), true))
            }
            PrefillEvent::Open {
                peer,
                attempt,
                prompt_hash,
                start_page,
            } => Ok(self.open(peer, attempt, &prompt_hash, start_page, now)),
            PrefillEvent::Done { peer, attempt }
                if self.is_reader(peer) && attempt == self.attempt && self.final_sent() =>
            {
                Ok(self.end(PrefillPhase::Released, None, false))
            }
            PrefillEvent::PeerAbort {
                peer,
                attempt,
                code,
            } if self.is_reader(peer) && attempt == self.attempt => {
                let mut actions = vec![PrefillAction::AckAbort { peer }];
                actions.extend(self.lose_reader(peer, code, now));
                Ok(actions)
            }
            PrefillEvent::PeerGone { peer, code } if self.is_reader(peer) => {
                Ok(self.lose_reader(peer, code, now))
            }
            PrefillEvent::Renew { peer } if self.is_reader(peer) => {
                self.renew(now);
                Ok(vec![])
            }
            PrefillEvent::Tick => Ok(self.tick(now)),
            // Late or foreign messages of a peer are ignored.
            PrefillEvent::Done { .. }
            | PrefillEvent::PeerAbort { .. }
            | PrefillEvent::PeerGone { .. }
            | PrefillEvent::Renew { .. } => Ok(vec![]),
        }
    }

    fn lose_reader(
        &mut self,
        peer: ConnectionId,
        code: ReasonCode,
        now: u64,
    ) -> Vec<PrefillAction> {
        if !leaves_pages(code) {
            return self.end(PrefillPhase::Aborted(code), Some(code), false);
        }
        self.reader = None;
        if let PrefillPhase::Leased { until } = &mut self.phase {
            *until = (*until).min(now + REOPEN_MS);
        }
        vec![PrefillAction::ReaderLeft { peer }]
    }

    fn is_reader(&self, peer: ConnectionId) -> bool {
        self.reader() == Some(peer)
    }

    fn final_sent(&self) -> bool {
        self.reader.as_ref().is_some_and(|reader| reader.final_sent)
    }

    fn invalid(&self, event: &'static str, why: impl Into<String>) -> InvalidTransition {
        InvalidTransition {
            phase: self.phase.name(),
            event,
            why: why.into(),
        }
    }

    fn after_the_end(&self, event: &PrefillEvent) -> Result<Vec<PrefillAction>, InvalidTransition> {
        match event {
            PrefillEvent::Publish { .. } | PrefillEvent::Finish(_) | PrefillEvent::Abort(_) => {
                Err(self.invalid(event.name(), "the room is over"))
            }
            PrefillEvent::Open { peer, .. } => Ok(vec![PrefillAction::Reject {
                peer: *peer,
                code: self.code_after_the_end(),
                why: "the room is over".into(),
            }]),
            _ => Ok(vec![]),
        }
    }

    /// Reason code for a late OPEN of this room.
    pub fn code_after_the_end(&self) -> ReasonCode {
        match self.phase {
            PrefillPhase::Aborted(code) => code,
            PrefillPhase::Released => ReasonCode::DupRoom,
            _ => ReasonCode::LeaseExpired,
        }
    }

    fn publish(
        &mut self,
        first: u32,
        pages: &[(u32, u64)],
    ) -> Result<Vec<PrefillAction>, InvalidTransition> {
        if self.finish.is_some() {
            return Err(self.invalid("publish", "finish() came before"));
        }
        let mut fresh = Vec::new();
        for (index, &(page, generation)) in (first..).zip(pages) {
            match self.pages.get(index as usize) {
                None | Some(PageState::Missing) => fresh.push((index, page, generation)),
                Some(
                    PageState::Hashing {
                        page: p,
                        generation: g,
                    }
                    | PageState::Ready(PageDigest {
                        page: p,
                        generation: g,
                        ..
                    }),
                ) => {
                    if (*p, *g) != (page, generation) {
                        return Err(self.invalid("publish", format!("prompt page {index} was published as page {p} generation {g}, now as page {page} generation {generation}")));
                    }
                }
            }
        }
        let end = first as usize + pages.len();
        if self.pages.len() < end {
            self.pages.resize(end, PageState::Missing);
        }
        for &(index, page, generation) in &fresh {
            self.pages[index as usize] = PageState::Hashing { page, generation };
        }
        self.phase = PrefillPhase::Prefilling;
        Ok(if fresh.is_empty() {
            vec![]
        } else {
            vec![PrefillAction::Hash(fresh)]
        })
    }

    fn hashed(&mut self, sums: &[(u32, PageDigest)]) -> Vec<PrefillAction> {
        let mut ready: Vec<(u32, PageDigest)> = Vec::with_capacity(sums.len());
        for &(index, digest) in sums {
            // Compared with the request: the answer may belong to an earlier room of this number.
            let asked = PageState::Hashing {
                page: digest.page,
                generation: digest.generation,
            };
            if let Some(state) = self.pages.get_mut(index as usize)
                && *state == asked
            {
                *state = PageState::Ready(digest);
                ready.push((index, digest));
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

    fn finish(
        &mut self,
        finish: PrefillOutput,
        now: u64,
    ) -> Result<Vec<PrefillAction>, InvalidTransition> {
        if self.finish.is_some() {
            return Err(self.invalid("finish", "it was called before"));
        }
        let published = self
            .pages
            .iter()
            .take_while(|state| **state != PageState::Missing)
            .count();
        if published != finish.total_pages as usize || self.pages.len() != published {
            return Err(self.invalid(
                "finish",
                format!(
                    "{} pages in all, but pages [0, {published}) of {} are published",
                    finish.total_pages,
                    self.pages.len()
                ),
            ));
        }
        self.finish = Some(finish);
        self.phase = PrefillPhase::Leased {
            until: now + self.lease_ms,
        };
        Ok(self.try_final())
    }

    fn open(
        &mut self,
        peer: ConnectionId,
        attempt: u32,
        prompt_hash: &[u8],
        start_page: u32,
        now: u64,
    ) -> Vec<PrefillAction> {
        let reject = |code, why: String| vec![PrefillAction::Reject { peer, code, why }];
        if attempt != self.attempt {
            return reject(
                ReasonCode::DupRoom,
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
                    ReasonCode::DupRoom,
                    "this decode rank reads the room already".into(),
                );
            }
            // The same OPEN again: everything is sent again, nothing else changes.
            Some(reader) if reader.peer == peer => {}
            _ if prompt_hash != self.prompt_hash => {
                return reject(
                    ReasonCode::PromptMismatch,
                    "prefill and decode hashed different prompts; compare tokenizers and templates"
                        .into(),
                );
            }
            _ => {}
        }
        let mut actions = Vec::new();
        if let Some(before) = before.filter(|before| *before != peer) {
            // The router sent the request to another decode node: the previous one is dead or was given up.
            actions.push(PrefillAction::SendAbort {
                peer: before,
                code: ReasonCode::DupRoom,
            });
            actions.push(PrefillAction::ReaderLeft { peer: before });
        }
        self.reader = Some(Reader {
            peer,
            start_page,
            final_sent: false,
        });
        self.renew(now);
        let ready: Vec<(u32, PageDigest)> = (0u32..)
            .zip(&self.pages)
            .skip(start_page as usize)
            .filter_map(|(index, state)| {
                if let PageState::Ready(digest) = state {
                    Some((index, *digest))
                } else {
                    None
                }
            })
            .collect();
        actions.push(PrefillAction::Accept { peer });
        actions.extend(progress_runs(peer, &ready));
        actions.extend(self.try_final());
        actions
    }

    /// Send FINAL once: when there is a reader, the engine has finished and all checksums are known.
    fn try_final(&mut self) -> Vec<PrefillAction> {
        let (Some(finish), Some(reader)) = (&self.finish, &mut self.reader) else {
            return vec![];
        };
        if reader.final_sent
            || self
                .pages
                .iter()
                .any(|state| !matches!(state, PageState::Ready(_)))
        {
            return vec![];
        }
        reader.final_sent = true;
        let sums = self
            .pages
            .iter()
            .skip(reader.start_page as usize)
            .filter_map(|state| {
                if let PageState::Ready(digest) = state {
                    Some(digest.sum)
                } else {
                    None
                }
            });
        vec![PrefillAction::Final {
            peer: reader.peer,
            finish: finish.clone(),
            root: root_of(sums),
        }]
    }

    fn renew(&mut self, now: u64) {
        if let PrefillPhase::Leased { until } = &mut self.phase {
            // A live reader may hold the pages until the request's own deadline plus one lease.
            *until = (*until).max((now + self.lease_ms).min(self.deadline + self.lease_ms));
        }
    }

    fn tick(&mut self, now: u64) -> Vec<PrefillAction> {
        match self.phase {
            PrefillPhase::Leased { until } if now >= until => {
                self.end(PrefillPhase::Expired, Some(ReasonCode::LeaseExpired), true)
            }
            PrefillPhase::Waiting | PrefillPhase::Prefilling if now >= self.deadline => self.end(
                PrefillPhase::Aborted(ReasonCode::Deadline),
                Some(ReasonCode::Deadline),
                true,
            ),
            _ => vec![],
        }
    }

    fn end(
        &mut self,
        phase: PrefillPhase,
        code: Option<ReasonCode>,
        notify: bool,
    ) -> Vec<PrefillAction> {
        let mut actions = Vec::with_capacity(2);
        if let (true, Some(reader), Some(code)) = (notify, &self.reader, code) {
            actions.push(PrefillAction::SendAbort {
                peer: reader.peer,
                code,
            });
        }
        self.phase = phase;
        actions.push(PrefillAction::Released(code));
        actions
    }
}

/// PROGRESS speaks of consecutive pages: one action per run.
fn progress_runs(peer: ConnectionId, ready: &[(u32, PageDigest)]) -> Vec<PrefillAction> {
    ready
        .chunk_by(|a, b| a.0 + 1 == b.0)
        .flat_map(|run| run.chunks(crate::protocol::MAX_PROGRESS_PAGES))
        .map(|run| PrefillAction::Progress {
            peer,
            first_page: run[0].0,
            pages: run.iter().map(|&(_, digest)| digest).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: ConnectionId = 7;

    fn room() -> PrefillRoom {
        PrefillRoom::new(1, vec![1, 2], 1000, 100)
    }

    fn digest(page: u32) -> PageDigest {
        PageDigest {
            page,
            generation: 2,
            sum: u64::from(page) * 11,
        }
    }

    fn open(start_page: u32) -> PrefillEvent {
        PrefillEvent::Open {
            peer: D,
            attempt: 1,
            prompt_hash: vec![1, 2],
            start_page,
        }
    }

    fn finish(total_pages: u32) -> PrefillEvent {
        PrefillEvent::Finish(PrefillOutput {
            total_pages,
            last_page_tokens: 3,
            payload: vec![9],
        })
    }

    /// `room` with pages 10.. published and hashed.
    fn with_pages(mut room: PrefillRoom, n: u32) -> PrefillRoom {
        room.step(
            PrefillEvent::Publish {
                first: 0,
                pages: (0..n).map(|i| (10 + i, 2)).collect(),
            },
            0,
        )
        .expect("publish is legal");
        room.step(
            PrefillEvent::Hashed((0..n).map(|i| (i, digest(10 + i))).collect()),
            0,
        )
        .expect("always legal");
        room
    }

    #[test]
    fn room_without_a_reader_sends_nothing_until_open() {
        let mut room = with_pages(room(), 2);
        assert_eq!(room.step(finish(2), 10), Ok(vec![]));
        assert_eq!(room.phase, PrefillPhase::Leased { until: 110 });
        let actions = room.step(open(1), 20).expect("legal");
        assert_eq!(actions[0], PrefillAction::Accept { peer: D });
        assert_eq!(
            actions[1],
            PrefillAction::Progress {
                peer: D,
                first_page: 1,
                pages: vec![digest(11)]
            }
        );
        assert!(
            matches!(&actions[2], PrefillAction::Final { root, .. } if *root == root_of([digest(11).sum].into_iter()))
        );
        assert_eq!(
            room.step(
                PrefillEvent::Done {
                    peer: D,
                    attempt: 1
                },
                30
            ),
            Ok(vec![PrefillAction::Released(None)])
        );
        assert_eq!(room.phase, PrefillPhase::Released);
    }

    #[test]
    fn final_waits_for_the_last_checksum() {
        let mut room = room();
        room.step(open(0), 0).expect("legal");
        room.step(
            PrefillEvent::Publish {
                first: 0,
                pages: vec![(10, 2)],
            },
            0,
        )
        .expect("legal");
        assert_eq!(room.step(finish(1), 0), Ok(vec![]));
        assert_eq!(
            room.step(
                PrefillEvent::Done {
                    peer: D,
                    attempt: 1
                },
                0
            ),
            Ok(vec![]),
            "DONE before FINAL means nothing"
        );
        let actions = room
            .step(PrefillEvent::Hashed(vec![(0, digest(10))]), 0)
            .expect("legal");
        assert!(matches!(
            actions[..],
            [PrefillAction::Progress { .. }, PrefillAction::Final { .. }]
        ));
    }

    #[test]
    fn checksums_of_another_room_of_the_same_number_are_not_taken() {
        let mut room = room();
        room.step(open(0), 0).expect("legal");
        room.step(
            PrefillEvent::Publish {
                first: 0,
                pages: vec![(10, 2)],
            },
            0,
        )
        .expect("legal");
        for foreign in [
            digest(11),
            PageDigest {
                generation: 4,
                ..digest(10)
            },
        ] {
            assert_eq!(
                room.step(PrefillEvent::Hashed(vec![(0, foreign)]), 0),
                Ok(vec![])
            );
        }
        assert_eq!(
            room.step(PrefillEvent::Hashed(vec![(0, digest(10))]), 0)
                .map(|a| a.len()),
            Ok(1)
        );
    }

    #[test]
    fn a_wrong_prompt_and_a_wrong_attempt_are_rejected_and_another_reader_takes_over() {
        let mut room = with_pages(room(), 1);
        let code = |actions: Vec<PrefillAction>| match &actions[..] {
            [PrefillAction::Reject { code, .. }] => *code,
            other => panic!("expected one rejection, got {other:?}"),
        };
        let wrong_prompt = PrefillEvent::Open {
            peer: D,
            attempt: 1,
            prompt_hash: vec![3],
            start_page: 0,
        };
        assert_eq!(
            code(room.step(wrong_prompt, 0).expect("legal")),
            ReasonCode::PromptMismatch
        );
        let wrong_attempt = PrefillEvent::Open {
            peer: D,
            attempt: 2,
            prompt_hash: vec![1, 2],
            start_page: 0,
        };
        assert_eq!(
            code(room.step(wrong_attempt, 0).expect("legal")),
            ReasonCode::DupRoom
        );
        room.step(open(0), 0).expect("legal");
        assert_eq!(
            room.step(open(0), 0).expect("legal")[0],
            PrefillAction::Accept { peer: D },
            "the same OPEN twice is answered twice"
        );
        let second = |prompt_hash| PrefillEvent::Open {
            peer: 8,
            attempt: 1,
            prompt_hash,
            start_page: 0,
        };
        assert_eq!(
            code(room.step(second(vec![9]), 0).expect("legal")),
            ReasonCode::PromptMismatch
        );
        assert_eq!(room.reader(), Some(D));
        assert_eq!(
            room.step(second(vec![1, 2]), 0).expect("legal")[..3],
            [
                PrefillAction::SendAbort {
                    peer: D,
                    code: ReasonCode::DupRoom
                },
                PrefillAction::ReaderLeft { peer: D },
                PrefillAction::Accept { peer: 8 }
            ]
        );
        assert_eq!(room.reader(), Some(8));
    }

    #[test]
    fn lease_is_renewed_by_its_reader_only_and_for_a_limited_time() {
        let mut room = with_pages(room(), 1);
        room.step(finish(1), 0).expect("legal");
        room.step(open(0), 0).expect("legal");
        room.step(PrefillEvent::Renew { peer: 99 }, 50)
            .expect("legal");
        assert_eq!(room.next_due(), Some(100));
        room.step(PrefillEvent::Renew { peer: D }, 50)
            .expect("legal");
        assert_eq!(room.next_due(), Some(150));
        room.step(PrefillEvent::Renew { peer: D }, 100_000)
            .expect("legal");
        assert_eq!(room.next_due(), Some(1100), "deadline plus one lease");
        assert_eq!(room.step(PrefillEvent::Tick, 1099), Ok(vec![]));
        let end = room.step(PrefillEvent::Tick, 1100).expect("legal");
        assert_eq!(
            end,
            vec![
                PrefillAction::SendAbort {
                    peer: D,
                    code: ReasonCode::LeaseExpired
                },
                PrefillAction::Released(Some(ReasonCode::LeaseExpired))
            ]
        );
        assert_eq!(room.phase, PrefillPhase::Expired);
    }

    #[test]
    fn only_the_reader_of_this_attempt_can_end_the_room_from_outside() {
        let mut room = with_pages(room(), 1);
        room.step(open(0), 0).expect("legal");
        room.step(finish(1), 0).expect("legal");
        let before = room.clone();
        for event in [
            PrefillEvent::Done {
                peer: 99,
                attempt: 1,
            },
            PrefillEvent::Done {
                peer: D,
                attempt: 0,
            },
            PrefillEvent::PeerAbort {
                peer: 99,
                attempt: 1,
                code: ReasonCode::ClientGone,
            },
            PrefillEvent::PeerAbort {
                peer: D,
                attempt: 2,
                code: ReasonCode::ClientGone,
            },
            PrefillEvent::PeerGone {
                peer: 99,
                code: ReasonCode::PeerDead,
            },
        ] {
            assert_eq!(room.step(event, 0), Ok(vec![]));
        }
        assert_eq!(room, before);
        assert_eq!(
            room.step(
                PrefillEvent::Done {
                    peer: D,
                    attempt: 1
                },
                0
            ),
            Ok(vec![PrefillAction::Released(None)])
        );
    }

    #[test]
    fn another_reader_gets_the_pages_of_one_that_died_during_prefill() {
        const D2: ConnectionId = 8;
        let mut room = with_pages(room(), 1);
        room.step(open(0), 0).expect("legal");
        let gone = PrefillEvent::PeerGone {
            peer: D,
            code: ReasonCode::PeerDead,
        };
        assert_eq!(
            room.step(gone, 1),
            Ok(vec![PrefillAction::ReaderLeft { peer: D }])
        );
        let again = |peer| PrefillEvent::Open {
            peer,
            attempt: 1,
            prompt_hash: vec![1, 2],
            start_page: 0,
        };
        let actions = room.step(again(D2), 2).expect("legal");
        assert_eq!(actions[0], PrefillAction::Accept { peer: D2 });
        assert!(matches!(
            actions[1],
            PrefillAction::Progress { peer: D2, .. }
        ));
        // Late messages of the first one are ignored.
        let late = PrefillEvent::Done {
            peer: D,
            attempt: 1,
        };
        assert_eq!(room.step(late, 3), Ok(vec![]));
        let actions = room.step(finish(1), 4).expect("legal");
        assert!(matches!(
            actions[..],
            [PrefillAction::Final { peer: D2, .. }]
        ));
    }

    #[test]
    fn a_lease_whose_reader_left_is_short_until_another_opens() {
        let mut room = PrefillRoom::new(1, vec![1, 2], 1_000_000, 60_000);
        room = with_pages(room, 1);
        room.step(open(0), 0).expect("legal");
        room.step(finish(1), 0).expect("legal");
        let refused = PrefillEvent::PeerAbort {
            peer: D,
            attempt: 1,
            code: ReasonCode::NoCapacity,
        };
        assert_eq!(
            room.step(refused, 100),
            Ok(vec![
                PrefillAction::AckAbort { peer: D },
                PrefillAction::ReaderLeft { peer: D }
            ])
        );
        let mut expires = room.clone();
        let until = 100 + REOPEN_MS;
        assert_eq!(room.next_due(), Some(until));
        assert_eq!(
            expires.step(PrefillEvent::Tick, until),
            Ok(vec![PrefillAction::Released(Some(
                ReasonCode::LeaseExpired
            ))])
        );
        room.step(open(0), 200).expect("legal");
        assert_eq!(room.next_due(), Some(60_200));
    }

    #[test]
    fn every_way_to_end_releases_once() {
        let ends = [
            (
                PrefillEvent::Abort(ReasonCode::ClientGone),
                ReasonCode::ClientGone,
            ),
            (
                PrefillEvent::PeerAbort {
                    peer: D,
                    attempt: 1,
                    code: ReasonCode::Checksum,
                },
                ReasonCode::Checksum,
            ),
            (
                PrefillEvent::PeerGone {
                    peer: D,
                    code: ReasonCode::TransportBroken,
                },
                ReasonCode::TransportBroken,
            ),
        ];
        for (event, code) in ends {
            let mut room = room();
            room.step(open(0), 0).expect("legal");
            let actions = room.step(event, 1).expect("legal");
            assert_eq!(
                actions
                    .iter()
                    .filter(|a| **a == PrefillAction::Released(Some(code)))
                    .count(),
                1
            );
            assert_eq!(room.phase, PrefillPhase::Aborted(code));
            for late in [
                PrefillEvent::Tick,
                PrefillEvent::PeerGone {
                    peer: D,
                    code: ReasonCode::PeerDead,
                },
                PrefillEvent::Done {
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
        let publish = |page| PrefillEvent::Publish {
            first: 0,
            pages: vec![(page, 2)],
        };
        let mut over = room();
        over.step(PrefillEvent::Abort(ReasonCode::ClientGone), 0)
            .expect("legal");
        let mut leased = with_pages(room(), 1);
        leased.step(finish(1), 0).expect("legal");
        let cases = [
            (over.clone(), publish(10), "the room is over"),
            (over.clone(), finish(0), "the room is over"),
            (
                over,
                PrefillEvent::Abort(ReasonCode::ClientGone),
                "the room is over",
            ),
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
                PrefillEvent::Publish {
                    first: 1,
                    pages: vec![(11, 2)]
                },
                0
            ),
            Ok(vec![])
        );
    }
}
