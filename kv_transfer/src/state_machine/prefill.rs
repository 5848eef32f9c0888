//! A room on the prefill side.
//!
//! ```text
//! WAITING ──publish──▶ PREFILLING ──finish──▶ LEASED ──DONE──▶ RELEASED
//!    │  any: own abort, peer's ABORT, peer lost, deadline        │ lease runs out
//!    └──────────────────────▶ ABORTED(code)                      └──▶ EXPIRED
//! ```
//!
//! P computes whether or not D has sent OPEN. D's OPEN binds the room to one reader, which then
//! gets everything published so far and everything after it; FINAL follows when the engine has
//! finished and every page has its checksum. While LEASED the pages stay locked in P's cache; D's
//! heartbeats renew the lease as long as they name the room.
//!
//! A reader that dies or gives up does not end the room: the request may come again with another
//! reader, which reads the same pages without a second prefill. A lease without a reader is short
//! (`REOPEN_MS`).

use super::{ConnectionId, InvalidTransition};
use crate::protocol::{GroupId, GroupPages, GroupStart, GroupTotal, PageDigest, root_of};
use crate::reason_code::ReasonCode;

/// Lease of a room whose reader has left [ms]: a router notices a dead node within milliseconds.
pub const REOPEN_MS: u64 = 3_000;

#[derive(Debug, Clone, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
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
        self.into()
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
    pub groups: Vec<GroupPages>,
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

impl PageState {
    fn digest(&self) -> Option<PageDigest> {
        match self {
            PageState::Ready(digest) => Some(*digest),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrefillRoom {
    pub phase: PrefillPhase,
    pub attempt: u32,
    prompt_hash: Vec<u8>,
    deadline: u64,
    lease_ms: u64,
    /// The page group of the pool.
    group: GroupId,
    pages: Vec<PageState>,
    finish: Option<(GroupPages, Vec<u8>)>,
    reader: Option<Reader>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")] // the names in `InvalidTransition`
pub enum PrefillEvent {
    /// Own engine: the group's prompt pages [first, first + n) are final, as (page, generation).
    Publish {
        group: GroupId,
        first: u32,
        pages: Vec<(u32, u64)>,
    },
    /// Own copy thread: checksums of pages published before, as (index in the prompt, page).
    Hashed(Vec<(u32, PageDigest)>),
    /// Own engine: the forward passes are over.
    Finish(PrefillOutput),
    /// Own engine.
    Abort(ReasonCode),
    /// A decode rank asks for the room.
    Open {
        peer: ConnectionId,
        attempt: u32,
        prompt_hash: Vec<u8>,
        groups: Vec<GroupStart>,
    },
    /// The reader has all pages.
    Done { peer: ConnectionId, attempt: u32 },
    /// The reader gave the room up.
    PeerAbort {
        peer: ConnectionId,
        attempt: u32,
        code: ReasonCode,
    },
    /// The reader's connection is lost.
    PeerGone {
        peer: ConnectionId,
        code: ReasonCode,
    },
    /// Heartbeat of the peer that lists this room.
    Renew { peer: ConnectionId },
    /// The time of `next_due` has come.
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum PrefillAction {
    /// Compute checksums of (index in the prompt, page, generation).
    Hash(Vec<(u32, u32, u64)>),
    /// Send OPEN_OK.
    Accept { peer: ConnectionId },
    /// Send REJECT.
    Reject {
        peer: ConnectionId,
        code: ReasonCode,
        reason: String,
    },
    /// Announce these pages.
    Progress {
        peer: ConnectionId,
        group: GroupId,
        first_page: u32,
        pages: Vec<PageDigest>,
    },
    /// Send FINAL; the root of a group covers the checksums of all its pages that the reader gets.
    Final {
        peer: ConnectionId,
        groups: Vec<GroupTotal>,
        payload: Vec<u8>,
    },
    /// Send ABORT.
    SendAbort {
        peer: ConnectionId,
        code: ReasonCode,
    },
    /// Answer the reader's ABORT.
    AckAbort { peer: ConnectionId },
    /// The reader has left; the room waits for another.
    ReaderLeft { peer: ConnectionId },
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
    pub fn new(
        attempt: u32,
        prompt_hash: Vec<u8>,
        deadline: u64,
        lease_ms: u64,
        group: GroupId,
    ) -> Self {
        Self {
            phase: PrefillPhase::Waiting,
            attempt,
            prompt_hash,
            deadline,
            lease_ms,
            group,
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
    pub fn page_counts(&self) -> (usize, usize) {
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
    pub fn apply_event(
        &mut self,
        event: PrefillEvent,
        now: u64,
    ) -> Result<Vec<PrefillAction>, InvalidTransition> {
        if self.phase.is_over() {
            return self.after_the_end(&event);
        }
        match event {
            PrefillEvent::Publish {
                group,
                first,
                pages,
            } => self.publish_pages(group, first, &pages),
            PrefillEvent::Hashed(sums) => Ok(self.record_digests(&sums)),
            PrefillEvent::Finish(finish) => self.finish_prompt(finish, now),
            PrefillEvent::Abort(code) => Ok(self.end_room(PrefillPhase::Aborted(code), true)),
            PrefillEvent::Open {
                peer,
                attempt,
                prompt_hash,
                groups,
            } => Ok(self.accept_reader(peer, attempt, &prompt_hash, &groups, now)),
            PrefillEvent::Done { peer, attempt }
                if self.is_reader(peer) && attempt == self.attempt && self.final_sent() =>
            {
                Ok(self.end_room(PrefillPhase::Released, false))
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
                self.renew_lease(now);
                Ok(vec![])
            }
            PrefillEvent::Tick => Ok(self.on_tick(now)),
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
            return self.end_room(PrefillPhase::Aborted(code), false);
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

    fn invalid_transition(
        &self,
        event: &'static str,
        reason: impl Into<String>,
    ) -> InvalidTransition {
        InvalidTransition {
            phase: self.phase.name(),
            event,
            reason: reason.into(),
        }
    }

    fn after_the_end(&self, event: &PrefillEvent) -> Result<Vec<PrefillAction>, InvalidTransition> {
        match event {
            PrefillEvent::Publish { .. } | PrefillEvent::Finish(_) | PrefillEvent::Abort(_) => {
                Err(self.invalid_transition(event.into(), "the room is over"))
            }
            PrefillEvent::Open { peer, .. } => Ok(vec![PrefillAction::Reject {
                peer: *peer,
                code: self.code_after_the_end(),
                reason: "the room is over".into(),
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

    fn publish_pages(
        &mut self,
        group: GroupId,
        first: u32,
        pages: &[(u32, u64)],
    ) -> Result<Vec<PrefillAction>, InvalidTransition> {
        if group != self.group {
            let own = self.group;
            let reason = format!("pages of group {group} in a room of group {own}");
            return Err(self.invalid_transition("publish", reason));
        }
        if self.finish.is_some() {
            return Err(self.invalid_transition("publish", "finish() came before"));
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
                        return Err(self.invalid_transition("publish", format!("prompt page {index} was published as page {p} generation {g}, now as page {page} generation {generation}")));
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

    fn record_digests(&mut self, sums: &[(u32, PageDigest)]) -> Vec<PrefillAction> {
        let mut ready: Vec<(u32, PageDigest)> = Vec::with_capacity(sums.len());
        for &(index, digest) in sums {
            // Compared with the request: the answer may belong to an earlier room of this number.
            let expected_state = PageState::Hashing {
                page: digest.page,
                generation: digest.generation,
            };
            if let Some(state) = self.pages.get_mut(index as usize)
                && *state == expected_state
            {
                *state = PageState::Ready(digest);
                ready.push((index, digest));
            }
        }
        let Some(reader) = &self.reader else {
            return vec![];
        };
        ready.retain(|&(index, _)| index >= reader.start_page);
        let mut actions = progress_runs(reader.peer, self.group, &ready);
        actions.extend(self.try_final());
        actions
    }

    fn finish_prompt(
        &mut self,
        finish: PrefillOutput,
        now: u64,
    ) -> Result<Vec<PrefillAction>, InvalidTransition> {
        if self.finish.is_some() {
            return Err(self.invalid_transition("finish", "it was called before"));
        }
        let PrefillOutput { groups, payload } = finish;
        let pages = match groups[..] {
            [pages] if pages.group == self.group => pages,
            _ => {
                let own = self.group;
                let named: Vec<GroupId> = groups.iter().map(|pages| pages.group).collect();
                let reason = format!("pages of groups {named:?} in a room of group {own}");
                return Err(self.invalid_transition("finish", reason));
            }
        };
        let published = self
            .pages
            .iter()
            .take_while(|state| **state != PageState::Missing)
            .count();
        if published != pages.total_pages as usize || self.pages.len() != published {
            let total = pages.total_pages;
            let page_count = self.pages.len();
            let reason = format!(
                "{total} pages in all, but pages [0, {published}) of {page_count} are published"
            );
            return Err(self.invalid_transition("finish", reason));
        }
        self.finish = Some((pages, payload));
        self.phase = PrefillPhase::Leased {
            until: now + self.lease_ms,
        };
        Ok(self.try_final())
    }

    fn accept_reader(
        &mut self,
        peer: ConnectionId,
        attempt: u32,
        prompt_hash: &[u8],
        groups: &[GroupStart],
        now: u64,
    ) -> Vec<PrefillAction> {
        let reject = |code, reason: &str| {
            vec![PrefillAction::Reject {
                peer,
                code,
                reason: reason.into(),
            }]
        };
        if attempt != self.attempt {
            let reason = format!(
                "the room is in use by attempt {}, not {attempt}",
                self.attempt
            );
            return reject(ReasonCode::DupRoom, &reason);
        }
        // Pages of other groups would never be announced: D would wait for them until its deadline.
        let start_page = match groups {
            [start] if start.group == self.group => start.start_page,
            _ => {
                let asked: Vec<GroupId> = groups.iter().map(|start| start.group).collect();
                let reason = format!(
                    "the decode node asks for page groups {asked:?}, the room has [{}]",
                    self.group
                );
                return reject(ReasonCode::LayoutMismatch, &reason);
            }
        };
        match &self.reader {
            Some(reader) if reader.peer == peer && reader.start_page != start_page => {
                return reject(
                    ReasonCode::DupRoom,
                    "this decode rank reads the room already",
                );
            }
            // The same OPEN again: everything is sent again, nothing else changes.
            Some(reader) if reader.peer == peer => {}
            _ if prompt_hash != self.prompt_hash => {
                let reason =
                    "prefill and decode hashed different prompts; compare tokenizers and templates";
                return reject(ReasonCode::PromptMismatch, reason);
            }
            _ => {}
        }
        let mut actions = Vec::new();
        if let Some(before) = self.reader().filter(|&before| before != peer) {
            // The router sent the request to another decode node: the previous one is dead or was
            // given up.
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
        self.renew_lease(now);
        let ready: Vec<(u32, PageDigest)> = (0u32..)
            .zip(&self.pages)
            .skip(start_page as usize)
            .filter_map(|(index, state)| Some((index, state.digest()?)))
            .collect();
        actions.push(PrefillAction::Accept { peer });
        actions.extend(progress_runs(peer, self.group, &ready));
        actions.extend(self.try_final());
        actions
    }

    /// Send FINAL once: when there is a reader, the engine has finished and all checksums are
    /// known.
    fn try_final(&mut self) -> Vec<PrefillAction> {
        let (Some((pages, payload)), Some(reader)) = (&self.finish, &mut self.reader) else {
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
            .filter_map(|state| Some(state.digest()?.sum));
        let total = GroupTotal {
            group: self.group,
            total_pages: pages.total_pages,
            last_page_tokens: pages.last_page_tokens,
            root: root_of(sums),
        };
        vec![PrefillAction::Final {
            peer: reader.peer,
            groups: vec![total],
            payload: payload.clone(),
        }]
    }

    fn renew_lease(&mut self, now: u64) {
        if let PrefillPhase::Leased { until } = &mut self.phase {
            // A live reader may hold the pages until the request's own deadline plus one lease.
            *until = (*until).max((now + self.lease_ms).min(self.deadline + self.lease_ms));
        }
    }

    fn on_tick(&mut self, now: u64) -> Vec<PrefillAction> {
        match self.phase {
            PrefillPhase::Leased { until } if now >= until => {
                self.end_room(PrefillPhase::Expired, true)
            }
            PrefillPhase::Waiting | PrefillPhase::Prefilling if now >= self.deadline => {
                self.end_room(PrefillPhase::Aborted(ReasonCode::Deadline), true)
            }
            _ => vec![],
        }
    }

    /// End in `phase`; `notify`: the reader does not know of it yet.
    fn end_room(&mut self, phase: PrefillPhase, notify: bool) -> Vec<PrefillAction> {
        self.phase = phase;
        let code = self.code_after_the_end();
        let reader = self.reader().filter(|_| notify);
        let abort = reader.map(|peer| PrefillAction::SendAbort { peer, code });
        let failed = self.phase != PrefillPhase::Released;
        abort
            .into_iter()
            .chain([PrefillAction::Released(failed.then_some(code))])
            .collect()
    }
}

/// PROGRESS speaks of consecutive pages: one action per run.
fn progress_runs(
    peer: ConnectionId,
    group: GroupId,
    ready: &[(u32, PageDigest)],
) -> Vec<PrefillAction> {
    ready
        .chunk_by(|a, b| a.0 + 1 == b.0)
        .flat_map(|run| run.chunks(crate::protocol::MAX_PROGRESS_PAGES))
        .map(|run| PrefillAction::Progress {
            peer,
            group,
            first_page: run[0].0,
            pages: run.iter().map(|&(_, digest)| digest).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests;
