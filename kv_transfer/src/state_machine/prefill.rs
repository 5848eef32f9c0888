//! A room on the prefill side.
//!
//! ```text
//! WAITING ──publish──▶ PREFILLING ──finish──▶ LEASED ──DONE──▶ RELEASED
//!    │  any: own abort, peer's ABORT, peer lost, deadline        │ lease runs out
//!    └──────────────────────▶ ABORTED(code)                      └──▶ EXPIRED
//! ```
//!
//! The pages of a prompt lie in one or several page groups. Those of a group are numbered; the
//! engine publishes them from the first one that D needs on, without a gap, groups in any order.
//!
//! P computes whether or not D has sent OPEN. D's OPEN binds the room to one reader, which then
//! gets everything published so far and everything after it; FINAL follows when the engine has
//! finished and every page has its checksum. While LEASED the pages stay locked in P's cache; D's
//! heartbeats renew the lease as long as they name the room.
//!
//! A reader that dies or gives up does not end the room: the request may come again with another
//! reader, which reads the same pages without a second prefill. A lease without a reader is short
//! (`REOPEN_MS`).

use super::{ConnectionId, InvalidTransition, PromptPage};
use crate::protocol::{
    GroupId, GroupPages, GroupStart, GroupTotal, PageDigest, one_per_group, root_of, unknown_group,
};
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
    /// In the order of the room's groups.
    start_pages: Vec<u32>,
    final_sent: bool,
}

/// State of a published page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PageState {
    Hashing { page: u32, generation: u64 },
    Ready(PageDigest),
}

impl PageState {
    fn digest(&self) -> Option<PageDigest> {
        match self {
            PageState::Ready(digest) => Some(*digest),
            PageState::Hashing { .. } => None,
        }
    }

    fn page_and_generation(&self) -> (u32, u64) {
        match *self {
            PageState::Hashing { page, generation } => (page, generation),
            PageState::Ready(digest) => (digest.page, digest.generation),
        }
    }
}

/// Published pages of one group: those with the numbers [first, end).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PublishedPages {
    group: GroupId,
    first: u32,
    pages: Vec<PageState>,
}

impl PublishedPages {
    fn new(group: GroupId) -> Self {
        Self {
            group,
            first: 0,
            pages: Vec::new(),
        }
    }

    fn end(&self) -> u32 {
        self.first + self.pages.len() as u32
    }

    fn get_mut(&mut self, index: u32) -> Option<&mut PageState> {
        let i = index.checked_sub(self.first)?;
        self.pages.get_mut(i as usize)
    }

    /// The number of new pages in front of which `pages`, from number `first` on, repeat published
    /// ones. `Err`: they do not continue what is published.
    fn repeated_pages(&self, first: u32, pages: &[(u32, u64)]) -> Result<usize, String> {
        let group = self.group;
        if first as usize + pages.len() > i32::MAX as usize {
            let n = pages.len();
            return Err(format!(
                "{n} pages from {first} on exceed the numbers of messages"
            ));
        }
        if self.pages.is_empty() {
            return Ok(0);
        }
        // D would wait for pages of a gap, and has begun behind earlier ones.
        if first < self.first || first > self.end() {
            let published = self.first;
            let end = self.end();
            return Err(format!(
                "pages [{published}, {end}) of group {group} are published, page {first} does not \
                 continue them"
            ));
        }
        let published = self.pages[(first - self.first) as usize..].iter();
        for ((index, state), now) in (first..).zip(published.clone()).zip(pages) {
            let before = state.page_and_generation();
            if before != *now {
                return Err(format!(
                    "page {index} of group {group} was published as page {} generation {}, now as \
                     page {} generation {}",
                    before.0, before.1, now.0, now.1
                ));
            }
        }
        Ok(published.len().min(pages.len()))
    }

    /// Why these are not the pages that were published.
    fn difference_from(&self, pages: &GroupPages) -> Option<String> {
        let is_equal = if self.pages.is_empty() {
            pages.first_page == pages.total_pages
        } else {
            (self.first, self.end()) == (pages.first_page, pages.total_pages)
        };
        (!is_equal).then(|| {
            format!(
                "prefill has pages [{}, {}) of group {}, but [{}, {}) are published",
                pages.first_page,
                pages.total_pages,
                self.group,
                self.first,
                self.end()
            )
        })
    }

    /// The pages from number `start_page` on.
    fn pages_from(&self, start_page: u32) -> &[PageState] {
        let skipped = start_page.saturating_sub(self.first) as usize;
        &self.pages[skipped.min(self.pages.len())..]
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrefillRoom {
    pub phase: PrefillPhase,
    pub attempt: u32,
    prompt_hash: Vec<u8>,
    deadline: u64,
    lease_ms: u64,
    /// By the page groups of the pool, in the order of the layout.
    published: Vec<PublishedPages>,
    /// Its groups are in the order of `published`.
    finish: Option<PrefillOutput>,
    reader: Option<Reader>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")] // the names in `InvalidTransition`
pub enum PrefillEvent {
    /// Own engine: the group's pages [first, first + n) are final, as (page, generation).
    Publish {
        group: GroupId,
        first: u32,
        pages: Vec<(u32, u64)>,
    },
    /// Own copy thread: checksums of pages published before.
    Hashed(Vec<(PromptPage, PageDigest)>),
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
    /// Compute checksums of (place in the prompt, page, generation).
    Hash(Vec<(PromptPage, u32, u64)>),
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
        groups: &[GroupId],
    ) -> Self {
        Self {
            phase: PrefillPhase::Waiting,
            attempt,
            prompt_hash,
            deadline,
            lease_ms,
            published: groups.iter().copied().map(PublishedPages::new).collect(),
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
        let states = || self.published.iter().flat_map(|group| &group.pages);
        let ready = states().filter(|state| state.digest().is_some());
        (states().count(), ready.count())
    }

    fn groups(&self) -> Vec<GroupId> {
        self.published.iter().map(|group| group.group).collect()
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
        if self.finish.is_some() {
            return Err(self.invalid_transition("publish", "finish() came before"));
        }
        let Some(published) = self.published.iter_mut().find(|it| it.group == group) else {
            let reason = unknown_group(group, &self.groups());
            return Err(self.invalid_transition("publish", reason));
        };
        let repeated = match published.repeated_pages(first, pages) {
            Ok(repeated) => repeated,
            Err(reason) => return Err(self.invalid_transition("publish", reason)),
        };
        if published.pages.is_empty() {
            published.first = first;
        }
        let mut fresh = Vec::with_capacity(pages.len() - repeated);
        for &(page, generation) in &pages[repeated..] {
            let index = published.end();
            fresh.push((PromptPage { group, index }, page, generation));
            let state = PageState::Hashing { page, generation };
            published.pages.push(state);
        }
        self.phase = PrefillPhase::Prefilling;
        Ok(if fresh.is_empty() {
            vec![]
        } else {
            vec![PrefillAction::Hash(fresh)]
        })
    }

    fn record_digests(&mut self, sums: &[(PromptPage, PageDigest)]) -> Vec<PrefillAction> {
        let mut ready: Vec<(PromptPage, PageDigest)> = Vec::with_capacity(sums.len());
        let start_pages = self.reader.as_ref().map(|reader| &reader.start_pages[..]);
        for &(place, digest) in sums {
            let position = self.published.iter().position(|it| it.group == place.group);
            let Some(group) = position else {
                continue;
            };
            // Compared with the request: the answer may belong to an earlier room of this number.
            let expected_state = PageState::Hashing {
                page: digest.page,
                generation: digest.generation,
            };
            if let Some(state) = self.published[group].get_mut(place.index)
                && *state == expected_state
            {
                *state = PageState::Ready(digest);
                // D holds the pages before its start page.
                if start_pages.is_some_and(|start_pages| place.index >= start_pages[group]) {
                    ready.push((place, digest));
                }
            }
        }
        let Some(peer) = self.reader() else {
            return vec![];
        };
        let mut actions = progress_runs(peer, &ready);
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
        let groups: Vec<GroupPages> =
            match one_per_group(&self.groups(), &groups, |pages| pages.group) {
                Ok(ordered) => ordered.into_iter().copied().collect(),
                Err(reason) => return Err(self.invalid_transition("finish", reason)),
            };
        let mut compared = self.published.iter().zip(&groups);
        if let Some(reason) = compared.find_map(|(own, pages)| own.difference_from(pages)) {
            return Err(self.invalid_transition("finish", reason));
        }
        self.finish = Some(PrefillOutput { groups, payload });
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
        let start_pages: Vec<u32> = match one_per_group(&self.groups(), groups, |it| it.group) {
            Ok(ordered) => ordered.into_iter().map(|start| start.start_page).collect(),
            Err(difference) => {
                let reason = format!(
                    "the decode node does not ask for the page groups of the room: {difference}"
                );
                return reject(ReasonCode::LayoutMismatch, &reason);
            }
        };
        match &self.reader {
            Some(reader) if reader.peer == peer && reader.start_pages != start_pages => {
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
        let mut ready: Vec<(PromptPage, PageDigest)> = Vec::new();
        for (published, &start_page) in self.published.iter().zip(&start_pages) {
            let group = published.group;
            let states = (start_page.max(published.first)..).zip(published.pages_from(start_page));
            ready.extend(states.filter_map(|(index, state)| {
                let digest = state.digest()?;
                Some((PromptPage { group, index }, digest))
            }));
        }
        self.reader = Some(Reader {
            peer,
            start_pages,
            final_sent: false,
        });
        self.renew_lease(now);
        actions.push(PrefillAction::Accept { peer });
        actions.extend(progress_runs(peer, &ready));
        actions.extend(self.try_final());
        actions
    }

    /// Send FINAL once: when there is a reader, the engine has finished and all checksums are
    /// known.
    fn try_final(&mut self) -> Vec<PrefillAction> {
        let (Some(output), Some(reader)) = (&self.finish, &mut self.reader) else {
            return vec![];
        };
        let mut states = self.published.iter().flat_map(|group| &group.pages);
        if reader.final_sent || states.any(|state| state.digest().is_none()) {
            return vec![];
        }
        reader.final_sent = true;
        let starts = output.groups.iter().zip(&reader.start_pages);
        let totals = self.published.iter().zip(starts);
        let totals = totals.map(|(published, (pages, &start_page))| {
            let states = published.pages_from(start_page).iter();
            let sums = states.filter_map(|state| Some(state.digest()?.sum));
            GroupTotal {
                group: pages.group,
                first_page: pages.first_page,
                total_pages: pages.total_pages,
                last_page_tokens: pages.last_page_tokens,
                tokens_at: pages.tokens_at,
                root: root_of(sums),
            }
        });
        vec![PrefillAction::Final {
            peer: reader.peer,
            groups: totals.collect(),
            payload: output.payload.clone(),
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

/// PROGRESS speaks of consecutive pages of a group: one action per run.
fn progress_runs(peer: ConnectionId, ready: &[(PromptPage, PageDigest)]) -> Vec<PrefillAction> {
    ready
        .chunk_by(|(a, _), (b, _)| a.group == b.group && a.index + 1 == b.index)
        .flat_map(|run| run.chunks(crate::protocol::MAX_PROGRESS_PAGES))
        .map(|run| PrefillAction::Progress {
            peer,
            group: run[0].0.group,
            first_page: run[0].0.index,
            pages: run.iter().map(|&(_, digest)| digest).collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests;
