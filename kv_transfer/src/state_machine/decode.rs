//! A room on the decode side.
//!
//! ```text
//! RESOLVING ─connected─▶ OPENING ─OPEN_OK─▶ ADMITTED ─grant + PROGRESS─▶ PULLING ─▶ VERIFYING ─▶ COMMITTED
//!     │  any: reject, pull error, peer lost, deadline → FAILED(code)      any: own abort → ABORTED
//! ```
//!
//! The grant (where the pages go) may come at any time, before the peer even answered. Pages are
//! pulled as they are announced; every pull is verified by generation and checksum when it
//! completes. The room commits when FINAL is known and, in every page group, all pages from
//! `start_page` on are verified and the root over their checksums equals P's.
//!
//! A grant has pages for every group or is refused, and all of it is revoked: a prompt is here only
//! when it is in all groups.
//!
//! A room that is announced while it has no grant is reported to the engine: P holds pages for it
//! and will finish it. A grant can be revoked until then, so that a full D can give its pages to a
//! room for which P already holds pages.
//!
//! A room that ends early first stops its pulls; the terminal action comes when none is in flight,
//! so that the engine may reuse the pages as soon as the end is reported.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use super::{ConnectionId, InvalidTransition};
use crate::protocol::{
    GroupId, GroupStart, GroupTotal, PageDigest, one_per_group, root_of, unknown_group,
};
use crate::reason_code::ReasonCode;

#[derive(Debug, Clone, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
pub enum DecodePhase {
    Resolving,
    Opening,
    Admitted,
    Pulling,
    Verifying,
    Committed,
    Failed(ReasonCode),
    Aborted,
}

impl DecodePhase {
    pub const LIVE_NAMES: &'static [&'static str] =
        &["RESOLVING", "OPENING", "ADMITTED", "PULLING", "VERIFYING"];

    pub fn name(&self) -> &'static str {
        self.into()
    }

    pub fn is_over(&self) -> bool {
        matches!(
            self,
            DecodePhase::Committed | DecodePhase::Failed(_) | DecodePhase::Aborted
        )
    }
}

/// Limits of one room's pulls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PullLimits {
    pub pages_per_pull: usize,
    pub pulls_in_flight: usize,
    /// Prompt pages of all groups a peer may announce at most.
    pub max_pages: usize,
    /// The longest wait for the peer's answer, and for a pull while one is in flight.
    pub wait_ms: u64,
}

/// P's end of prefill, from FINAL.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct FinalMessage {
    pub groups: Vec<GroupTotal>,
    pub payload: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PageState {
    Unknown,
    Announced(PageDigest),
    Pulling(PageDigest),
    Verified(PageDigest),
}

impl PageState {
    fn digest(&self) -> Option<PageDigest> {
        match *self {
            PageState::Unknown => None,
            PageState::Announced(digest)
            | PageState::Pulling(digest)
            | PageState::Verified(digest) => Some(digest),
        }
    }
}

/// Where the pages of one group go: those before `start_page` are here or not needed, the others
/// are written into `pages`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupGrant {
    pub group: GroupId,
    pub start_page: u32,
    pub pages: Vec<u32>,
    /// In a group of states: how many tokens the state must have seen.
    pub tokens_at: Option<u32>,
}

impl GroupGrant {
    /// Numbers of the granted pages.
    fn range(&self) -> Range<u32> {
        self.start_page..self.start_page.saturating_add(self.pages.len() as u32)
    }
}

/// What P has announced of one group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AnnouncedPages {
    /// The pages that OPEN asks for.
    start: GroupStart,
    /// Number of the first of `pages`.
    first: u32,
    pages: VecDeque<PageState>,
}

impl AnnouncedPages {
    fn new(start: GroupStart) -> Self {
        Self {
            start,
            first: start.start_page,
            pages: VecDeque::new(),
        }
    }

    /// Numbers of the pages from the first to the last one announced.
    fn range(&self) -> Range<u32> {
        self.first..self.first + self.pages.len() as u32
    }

    /// `range` when these pages are announced, too.
    fn range_with(&self, announced: &Range<u32>) -> Range<u32> {
        // Pages that OPEN did not ask for may come with the others.
        let from = announced.start.max(self.start.start_page);
        if from >= announced.end {
            return self.range();
        }
        if self.pages.is_empty() {
            return from..announced.end;
        }
        let own = self.range();
        own.start.min(from)..own.end.max(announced.end)
    }

    fn record(&mut self, first_page: u32, pages: &[PageDigest]) {
        let end = first_page + pages.len() as u32;
        let range = self.range_with(&(first_page..end));
        if self.pages.is_empty() {
            self.first = range.start;
        }
        while self.first > range.start {
            self.pages.push_front(PageState::Unknown);
            self.first -= 1;
        }
        self.pages.resize(range.len(), PageState::Unknown);
        for (index, &digest) in (first_page..end).zip(pages) {
            if let Some(state @ PageState::Unknown) = self.get_mut(index) {
                *state = PageState::Announced(digest);
            }
        }
    }

    fn get_mut(&mut self, index: u32) -> Option<&mut PageState> {
        let i = index.checked_sub(self.first)?;
        self.pages.get_mut(i as usize)
    }

    /// The states of the pages with these numbers; fewer where not all were announced.
    fn states(&self, range: &Range<u32>) -> impl Iterator<Item = (u32, &PageState)> {
        let own = self.range();
        let from = range.start.clamp(own.start, own.end);
        let to = range.end.clamp(from, own.end);
        let skipped = (from - own.start) as usize;
        let states = self.pages.range(skipped..skipped + (to - from) as usize);
        (from..to).zip(states)
    }

    /// Numbers of the pages that P announces in all: those that exist and that OPEN asks for.
    fn needed(&self, total: &GroupTotal) -> Range<u32> {
        let from = total.first_page.max(self.start.start_page);
        from..total.total_pages.max(from)
    }

    fn are_all(&self, range: &Range<u32>, is_wanted: impl Fn(&PageState) -> bool) -> bool {
        let mut states = self.states(range).map(|(_, state)| state);
        let mut found = 0;
        states.all(|state| {
            found += 1;
            is_wanted(state)
        }) && found == range.len()
    }

    /// Root over the checksums of all pages that P announces.
    fn root(&self, total: &GroupTotal) -> u64 {
        let needed = self.needed(total);
        root_of(
            self.states(&needed)
                .filter_map(|(_, state)| Some(state.digest()?.sum)),
        )
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum RoomEnd {
    Fail(ReasonCode, String),
    Abort,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DecodeRoom {
    pub phase: DecodePhase,
    pub attempt: u32,
    /// By the page groups of the pool, in the order of the layout.
    announced: Vec<AnnouncedPages>,
    /// Every phase ends by then: the deadline of the request.
    deadline: u64,
    /// Time of the transfer's last progress; see `next_due`.
    moved_at: u64,
    limits: PullLimits,
    peer: Option<ConnectionId>,
    accepted: bool,
    /// In the order of `announced`, as the groups of `fin`.
    grant: Option<Vec<GroupGrant>>,
    fin: Option<FinalMessage>,
    in_flight: BTreeMap<u64, PulledPages>, // by ticket
    next_ticket: u64,
    ending: Option<RoomEnd>,
}

/// Pages of a pull in flight, by their numbers in one group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PulledPages {
    /// Position of the group among those of the room.
    group: usize,
    indices: Vec<u32>,
}

/// Page of a pull: from the peer's page to ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PullPage {
    pub src: PageDigest,
    pub dst: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")] // the names in `InvalidTransition`
pub enum DecodeEvent {
    /// A connection to the prefill rank is up.
    Connected { peer: ConnectionId },
    /// The prefill rank cannot be found or refuses us before OPEN.
    Unreachable { code: ReasonCode, reason: String },
    /// OPEN_OK came.
    Accepted { peer: ConnectionId, attempt: u32 },
    /// P keeps our OPEN until its request arrives.
    OpenPending { peer: ConnectionId, attempt: u32 },
    /// REJECT came.
    Rejected {
        peer: ConnectionId,
        attempt: u32,
        code: ReasonCode,
        reason: String,
    },
    /// P announced pages of a group from number `first_page` on.
    Progress {
        peer: ConnectionId,
        attempt: u32,
        group: GroupId,
        first_page: u32,
        pages: Vec<PageDigest>,
    },
    /// P's engine has finished the prompt.
    Final {
        peer: ConnectionId,
        attempt: u32,
        fin: FinalMessage,
    },
    /// P gave the room up.
    PeerAbort {
        peer: ConnectionId,
        attempt: u32,
        code: ReasonCode,
    },
    /// `readable`: the peer's pool can still be read without it (shm).
    PeerGone {
        peer: ConnectionId,
        code: ReasonCode,
        readable: bool,
    },
    /// The peer's process lives, but its engine makes no progress: unannounced pages will not come.
    PeerStalled { peer: ConnectionId, reason: String },
    /// Own engine: where the pages of every group go.
    Grant(Vec<GroupGrant>),
    /// Own engine: take the granted pages back, unless they are being filled.
    Revoke,
    /// Own engine; the code is sent to the peer.
    Abort(ReasonCode),
    /// The pages of this pull are copied and verified.
    Pulled { ticket: u64 },
    /// The pull has ended without its pages.
    PullFailed {
        ticket: u64,
        code: ReasonCode,
        reason: String,
    },
    /// The pull was cancelled and writes no more pages.
    PullStopped { ticket: u64 },
    /// The time of `next_due` has come.
    Tick,
}

impl DecodeEvent {
    /// Sender and attempt of a peer's message.
    fn message_sender(&self) -> Option<(ConnectionId, Option<u32>)> {
        match self {
            DecodeEvent::Accepted { peer, attempt }
            | DecodeEvent::OpenPending { peer, attempt }
            | DecodeEvent::Rejected { peer, attempt, .. }
            | DecodeEvent::Progress { peer, attempt, .. }
            | DecodeEvent::Final { peer, attempt, .. }
            | DecodeEvent::PeerAbort { peer, attempt, .. } => Some((*peer, Some(*attempt))),
            DecodeEvent::PeerGone { peer, .. } | DecodeEvent::PeerStalled { peer, .. } => {
                Some((*peer, None))
            }
            _ => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum DecodeAction {
    /// Send OPEN.
    Open { peer: ConnectionId },
    /// Copy these pages of a group; one event with this ticket answers.
    Pull {
        ticket: u64,
        group: GroupId,
        pages: Vec<PullPage>,
    },
    /// Stop all pulls of the room.
    CancelPulls,
    /// Report to the engine that P holds pages for this room.
    Announced,
    /// The granted pages are the engine's again.
    Revoked,
    /// Send DONE: P may release its pages.
    Done { peer: ConnectionId, root: u64 },
    /// Send ABORT.
    SendAbort {
        peer: ConnectionId,
        code: ReasonCode,
    },
    /// Answer P's ABORT.
    AckAbort { peer: ConnectionId },
    /// Report to the engine that the prompt is here; the room is over.
    Commit(FinalMessage),
    /// Report the failure to the engine; the room is over.
    Fail { code: ReasonCode, reason: String },
    /// Report to the engine that its abort is done; the room is over.
    Aborted,
}

impl DecodeRoom {
    /// `starts`: the pages to ask for in each group of the pool.
    pub fn new(
        attempt: u32,
        starts: Vec<GroupStart>,
        now: u64,
        deadline: u64,
        limits: PullLimits,
    ) -> Self {
        Self {
            phase: DecodePhase::Resolving,
            attempt,
            announced: starts.into_iter().map(AnnouncedPages::new).collect(),
            deadline,
            moved_at: now,
            limits,
            peer: None,
            accepted: false,
            grant: None,
            fin: None,
            in_flight: BTreeMap::new(),
            next_ticket: 0,
            ending: None,
        }
    }

    /// Time at which `Tick` ends the room.
    pub fn next_due(&self) -> Option<u64> {
        let due = if self.is_transferring() {
            self.deadline.min(self.moved_at + self.limits.wait_ms)
        } else {
            self.deadline
        };
        (!self.phase.is_over() && self.ending.is_none()).then_some(due)
    }

    /// P or a copy owes the next event. Otherwise the room waits for an engine (P's queue and its
    /// prefill, or pages here), which takes as long as the queues are; a P that has died or stands
    /// still is noticed on its connection.
    fn is_transferring(&self) -> bool {
        matches!(self.phase, DecodePhase::Resolving | DecodePhase::Opening)
            || !self.in_flight.is_empty()
    }

    pub fn peer(&self) -> Option<ConnectionId> {
        self.peer
    }

    pub fn deadline(&self) -> u64 {
        self.deadline
    }

    pub fn pulls_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The pages that OPEN asks for.
    pub fn starts(&self) -> Vec<GroupStart> {
        self.announced.iter().map(|group| group.start).collect()
    }

    fn groups(&self) -> Vec<GroupId> {
        let groups = self.announced.iter();
        groups.map(|group| group.start.group).collect()
    }

    /// (pages announced, pages verified), for the timeline.
    pub fn page_counts(&self) -> (usize, usize) {
        let states = || self.announced.iter().flat_map(|group| &group.pages);
        let announced = states().filter(|state| **state != PageState::Unknown);
        let verified = states().filter(|state| matches!(state, PageState::Verified(_)));
        (announced.count(), verified.count())
    }

    pub fn verified_pages(&self) -> usize {
        self.page_counts().1
    }

    /// The transition function: on `Err` the room is as it was.
    pub fn apply_event(
        &mut self,
        event: DecodeEvent,
        now: u64,
    ) -> Result<Vec<DecodeAction>, InvalidTransition> {
        if self.phase.is_over() {
            return match event {
                DecodeEvent::Grant(_) | DecodeEvent::Abort(_) | DecodeEvent::Connected { .. } => {
                    Err(self.invalid_transition(&event, "the room is over"))
                }
                _ => Ok(vec![]),
            };
        }
        if let Some((peer, attempt)) = event.message_sender()
            && (self.peer != Some(peer) || attempt.is_some_and(|a| a != self.attempt))
        {
            return Ok(vec![]); // stale message: earlier attempt, or a replaced connection
        }
        if self.ending.is_some() {
            return self.while_ending(event);
        }
        match event {
            DecodeEvent::Connected { peer } => {
                if self.phase != DecodePhase::Resolving {
                    return Err(self.invalid_transition(&event, "the room has a peer"));
                }
                self.peer = Some(peer);
                self.phase = DecodePhase::Opening;
                self.moved_at = now;
                return Ok(vec![DecodeAction::Open { peer }]);
            }
            DecodeEvent::Grant(ref grants) => match self.check_grant(grants) {
                Ok(grant) => self.grant = Some(grant),
                Err(reason) => return Err(self.invalid_transition(&event, &reason)),
            },
            DecodeEvent::Revoke if self.grant.is_none() => {
                return Err(self.invalid_transition(&event, "no pages are granted"));
            }
            DecodeEvent::Revoke if self.is_announced() => return Ok(vec![DecodeAction::Announced]),
            DecodeEvent::Revoke => {
                self.grant = None;
                return Ok(vec![DecodeAction::Revoked]);
            }
            DecodeEvent::Pulled { ticket } => {
                self.moved_at = now;
                if let Some(PulledPages { group, indices }) = self.in_flight.remove(&ticket) {
                    self.mark_verified(group, &indices);
                }
            }
            DecodeEvent::PullFailed {
                ticket,
                code,
                reason,
            } => {
                self.in_flight.remove(&ticket);
                return Ok(self.fail_room(code, reason));
            }
            DecodeEvent::PullStopped { ticket } => {
                self.in_flight.remove(&ticket);
                let reason = "a pull was stopped from outside";
                return Ok(self.fail_room(ReasonCode::TransportBroken, reason));
            }
            DecodeEvent::Accepted { .. } => self.mark_accepted(),
            DecodeEvent::OpenPending { .. } => {}
            DecodeEvent::Progress {
                group,
                first_page,
                pages,
                ..
            } => {
                let record = |room: &mut Self| room.record_announced(group, first_page, &pages);
                return Ok(self.take_report(record, now));
            }
            DecodeEvent::Final { fin, .. } => {
                return Ok(self.take_report(|room| room.record_final(fin), now));
            }
            DecodeEvent::Unreachable { code, reason }
            | DecodeEvent::Rejected { code, reason, .. } => {
                self.peer = None;
                return Ok(self.fail_room(code, reason));
            }
            DecodeEvent::PeerAbort { peer, code, .. } => {
                self.peer = None;
                let mut actions = vec![DecodeAction::AckAbort { peer }];
                actions.extend(self.fail_room(code, "the prefill side gave the request up"));
                return Ok(actions);
            }
            DecodeEvent::PeerGone { code, readable, .. } => {
                self.peer = None;
                if !(readable && self.all_announced()) {
                    return Ok(self.fail_room(code, "the prefill rank is gone"));
                }
            }
            DecodeEvent::PeerStalled { .. } if self.all_announced() => return Ok(vec![]),
            DecodeEvent::PeerStalled { reason, .. } => {
                return Ok(self.fail_room(ReasonCode::PeerStalled, reason));
            }
            DecodeEvent::Abort(code) => return Ok(self.end_room(RoomEnd::Abort, code)),
            DecodeEvent::Tick if self.next_due().is_some_and(|due| now >= due) => {
                let (announced, verified) = self.page_counts();
                let cause = if now >= self.deadline {
                    "the request's deadline passed".into()
                } else {
                    format!("nothing came for {} ms", now - self.moved_at)
                };
                let reason = format!(
                    "{cause} in {} ({announced} pages announced, {verified} verified)",
                    self.phase.name()
                );
                return Ok(self.fail_room(ReasonCode::Deadline, reason));
            }
            DecodeEvent::Tick => return Ok(vec![]),
        }
        Ok(self.pull_or_commit(now))
    }

    fn invalid_transition(&self, event: &DecodeEvent, reason: &str) -> InvalidTransition {
        InvalidTransition {
            phase: self.phase.name(),
            event: event.into(),
            reason: reason.into(),
        }
    }

    /// Note that the peer accepted the room, by OPEN_OK or by a PROGRESS that overtook it.
    fn mark_accepted(&mut self) {
        self.accepted = true;
        if self.phase == DecodePhase::Opening {
            self.phase = DecodePhase::Admitted;
        }
    }

    /// P holds pages for this room and will finish it.
    fn is_announced(&self) -> bool {
        let mut groups = self.announced.iter();
        groups.any(|group| !group.pages.is_empty()) || self.fin.is_some()
    }

    /// The grant in the order of the room's groups.
    fn check_grant(&self, grants: &[GroupGrant]) -> Result<Vec<GroupGrant>, String> {
        if self.grant.is_some() {
            return Err("pages were granted before".into());
        }
        let ordered = one_per_group(&self.groups(), grants, |grant| grant.group)?;
        for (grant, announced) in ordered.iter().zip(&self.announced) {
            let asked = announced.start.start_page;
            // P never announces the pages in between: the room would wait until its deadline.
            if grant.start_page < asked {
                return Err(format!(
                    "pages of group {} are granted from {} on, but OPEN asks for those from \
                     {asked} on",
                    grant.group, grant.start_page
                ));
            }
        }
        Ok(ordered.into_iter().cloned().collect())
    }

    fn mark_verified(&mut self, group: usize, indices: &[u32]) {
        for &index in indices {
            let state = self.announced[group].get_mut(index);
            if let Some(state) = state
                && let PageState::Pulling(digest) = *state
            {
                *state = PageState::Verified(digest);
            }
        }
    }

    fn record_announced(
        &mut self,
        group: GroupId,
        first_page: u32,
        pages: &[PageDigest],
    ) -> Result<(), String> {
        let position = self.announced.iter().position(|it| it.start.group == group);
        let Some(position) = position else {
            let reason = unknown_group(group, &self.groups());
            return Err(format!("PROGRESS names {reason}"));
        };
        // The protocol bounds the sum.
        let end = first_page + pages.len() as u32;
        let spans = self.announced.iter().enumerate().map(|(i, it)| {
            let range = if i == position {
                it.range_with(&(first_page..end))
            } else {
                it.range()
            };
            range.len()
        });
        let pages_in_all: usize = spans.sum();
        if pages_in_all > self.limits.max_pages {
            return Err(format!(
                "the peer announces {pages_in_all} prompt pages, up to page {end} of group \
                 {group}; at most {} fit",
                self.limits.max_pages
            ));
        }
        self.announced[position].record(first_page, pages);
        Ok(())
    }

    fn record_final(&mut self, fin: FinalMessage) -> Result<(), String> {
        let ordered = one_per_group(&self.groups(), &fin.groups, |total| total.group);
        let groups = ordered.map_err(|difference| format!("FINAL: {difference}"))?;
        let groups = groups.into_iter().copied().collect();
        let payload = fin.payload;
        self.fin.get_or_insert(FinalMessage { groups, payload });
        Ok(())
    }

    /// What P has announced of each group, and what FINAL says of it; `None` before FINAL.
    fn totals(&self) -> Option<impl Iterator<Item = (&AnnouncedPages, &GroupTotal)>> {
        let fin = self.fin.as_ref()?;
        Some(self.announced.iter().zip(&fin.groups))
    }

    /// Everything that is needed from the peer's control connection is here.
    fn all_announced(&self) -> bool {
        self.totals().is_some_and(|mut totals| {
            totals.all(|(announced, total)| {
                let needed = announced.needed(total);
                announced.are_all(&needed, |state| *state != PageState::Unknown)
            })
        })
    }

    /// Every page that the grant has a place for is here.
    fn all_verified(&self) -> bool {
        self.grant.as_ref().is_some_and(|grant| {
            self.announced.iter().zip(grant).all(|(announced, grant)| {
                let is_verified = |state: &PageState| matches!(state, PageState::Verified(_));
                announced.are_all(&grant.range(), is_verified)
            })
        })
    }

    /// Why the pages that P has, those it announced and those granted cannot be one prompt.
    fn find_mismatch(&self) -> Option<(ReasonCode, String)> {
        let granted = self.grant.iter().flatten().zip(self.totals()?);
        for (grant, (announced, total)) in granted {
            let Range { start, end } = grant.range();
            let prefilled = announced.needed(total);
            let group = total.group;
            if start < prefilled.start {
                let reason = format!(
                    "prefill has the pages of group {group} from {} on, but those from {start} on \
                     are needed here",
                    prefilled.start
                );
                return Some((ReasonCode::PromptMismatch, reason));
            }
            if end != total.total_pages {
                let reason = format!(
                    "pages [{start}, {end}) of group {group} were granted, but prefill has \
                     [{}, {})",
                    total.first_page, total.total_pages
                );
                return Some((ReasonCode::PromptMismatch, reason));
            }
            // A state is advanced from where it stands: a token would be missed, or seen twice.
            if grant.tokens_at != total.tokens_at {
                let reason = format!(
                    "the state in group {group} has seen {}, one that has seen {} is needed here",
                    count_tokens(total.tokens_at),
                    count_tokens(grant.tokens_at)
                );
                return Some((ReasonCode::PromptMismatch, reason));
            }
        }
        for (announced, total) in self.totals()? {
            let range = announced.range();
            let needed = announced.needed(total);
            let is_within = needed.start <= range.start && range.end <= needed.end;
            if !range.is_empty() && !is_within {
                let reason = format!(
                    "pages [{}, {}) of group {} were announced, but FINAL counts [{}, {})",
                    range.start, range.end, total.group, needed.start, needed.end
                );
                return Some((ReasonCode::TransportBroken, reason));
            }
        }
        None
    }

    /// Start pulls that are possible now, or commit.
    fn pull_or_commit(&mut self, now: u64) -> Vec<DecodeAction> {
        if let Some((code, reason)) = self.find_mismatch() {
            return self.fail_room(code, reason);
        }
        let mut actions = self.start_pulls(now);
        if self.grant.is_some()
            && self.in_flight.is_empty()
            && self.all_announced()
            && self.all_verified()
        {
            self.phase = DecodePhase::Verifying;
            actions.extend(self.commit_room());
        }
        actions
    }

    /// Record what P reports of its pages, and continue. A report that cannot be recorded ends the
    /// room: it could never be complete.
    fn take_report(
        &mut self,
        record: impl FnOnce(&mut Self) -> Result<(), String>,
        now: u64,
    ) -> Vec<DecodeAction> {
        self.mark_accepted();
        let is_first_report = self.grant.is_none() && !self.is_announced();
        if let Err(reason) = record(self) {
            return self.fail_room(ReasonCode::TransportBroken, reason);
        }
        let mut actions = if is_first_report {
            vec![DecodeAction::Announced]
        } else {
            vec![]
        };
        actions.extend(self.pull_or_commit(now));
        actions
    }

    fn start_pulls(&mut self, now: u64) -> Vec<DecodeAction> {
        let (Some(grants), true) = (&self.grant, self.accepted) else {
            return vec![];
        };
        let mut actions = Vec::new();
        for (group, grant) in grants.iter().enumerate() {
            let announced = &mut self.announced[group];
            let mut ready = grant.range();
            while self.in_flight.len() < self.limits.pulls_in_flight {
                let states = announced.states(&ready);
                let startable =
                    states.filter(|(_, state)| matches!(state, PageState::Announced(_)));
                let indices = startable.map(|(index, _)| index);
                let indices: Vec<u32> = indices.take(self.limits.pages_per_pull).collect();
                let Some(last) = indices.last() else {
                    break;
                };
                ready.start = last + 1;
                let mut pages = Vec::with_capacity(indices.len());
                for &index in &indices {
                    if let Some(state) = announced.get_mut(index)
                        && let PageState::Announced(src) = *state
                    {
                        let dst = grant.pages[(index - grant.start_page) as usize];
                        pages.push(PullPage { src, dst });
                        *state = PageState::Pulling(src);
                    }
                }
                let ticket = self.next_ticket;
                self.next_ticket += 1;
                if self.in_flight.is_empty() {
                    self.moved_at = now;
                }
                self.in_flight
                    .insert(ticket, PulledPages { group, indices });
                self.phase = DecodePhase::Pulling;
                actions.push(DecodeAction::Pull {
                    ticket,
                    group: grant.group,
                    pages,
                });
            }
        }
        actions
    }

    fn commit_room(&mut self) -> Vec<DecodeAction> {
        let Some(fin) = self.fin.clone() else {
            return vec![];
        };
        let mut roots = Vec::with_capacity(fin.groups.len());
        for (announced, total) in self.announced.iter().zip(&fin.groups) {
            let root = announced.root(total);
            if root != total.root {
                let reason = format!(
                    "the root over the page checksums of group {} differs from the prefill side's",
                    total.group
                );
                return self.fail_room(ReasonCode::Checksum, reason);
            }
            roots.push(root);
        }
        self.phase = DecodePhase::Committed;
        let root = root_of(roots.into_iter());
        let done_action = self.peer.map(|peer| DecodeAction::Done { peer, root });
        done_action
            .into_iter()
            .chain([DecodeAction::Commit(fin)])
            .collect()
    }

    /// Fail with `code`, which is sent to the peer, if there is one still.
    fn fail_room(&mut self, code: ReasonCode, reason: impl Into<String>) -> Vec<DecodeAction> {
        self.end_room(RoomEnd::Fail(code, reason.into()), code)
    }

    /// Decide the end now; report it when the last pull has stopped.
    fn end_room(&mut self, ending: RoomEnd, code: ReasonCode) -> Vec<DecodeAction> {
        let abort = self.peer.map(|peer| DecodeAction::SendAbort { peer, code });
        self.ending = Some(ending);
        let ended = self.report_end().unwrap_or(DecodeAction::CancelPulls);
        abort.into_iter().chain([ended]).collect()
    }

    /// The terminal action, once no pull is in flight.
    fn report_end(&mut self) -> Option<DecodeAction> {
        if !self.in_flight.is_empty() {
            return None;
        }
        let (phase, action) = match self.ending.take()? {
            RoomEnd::Fail(code, reason) => (
                DecodePhase::Failed(code),
                DecodeAction::Fail { code, reason },
            ),
            RoomEnd::Abort => (DecodePhase::Aborted, DecodeAction::Aborted),
        };
        self.phase = phase;
        Some(action)
    }

    fn while_ending(&mut self, event: DecodeEvent) -> Result<Vec<DecodeAction>, InvalidTransition> {
        match event {
            DecodeEvent::Pulled { ticket }
            | DecodeEvent::PullFailed { ticket, .. }
            | DecodeEvent::PullStopped { ticket } => {
                self.in_flight.remove(&ticket);
                Ok(self.report_end().into_iter().collect())
            }
            // The engine's abort replaces a failure that was not reported yet.
            DecodeEvent::Abort(_) => {
                self.ending = Some(RoomEnd::Abort);
                Ok(vec![])
            }
            DecodeEvent::Connected { .. } => {
                Err(self.invalid_transition(&event, "the room is ending"))
            }
            _ => Ok(vec![]),
        }
    }
}

/// How far a group's state has seen a prompt, for people.
fn count_tokens(tokens_at: Option<u32>) -> String {
    tokens_at.map_or("no stated tokens".to_owned(), |count| {
        format!("{count} tokens")
    })
}

#[cfg(test)]
mod tests;
