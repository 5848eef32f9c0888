//! A room on the decode side.
//!
//! ```text
//! RESOLVING ─connected─▶ OPENING ─OPEN_OK─▶ ADMITTED ─grant + PROGRESS─▶ PULLING ─▶ VERIFYING ─▶ COMMITTED
//!     │  any: reject, pull error, peer lost, deadline → FAILED(code)      any: own abort → ABORTED
//! ```
//!
//! The grant (where the pages go) may come at any time, before the peer even answered. Pages are
//! pulled as they are announced; every pull is verified by generation and checksum when it
//! completes. The room commits when FINAL is known, every page from `start_page` on is verified,
//! and the root over their checksums equals P's.
//!
//! A room that is announced while it has no grant is reported to the engine: P holds pages for it
//! and will finish it. A grant can be revoked until then, so that a full D can give its pages to a
//! room for which P already holds pages.
//!
//! A room that ends early first stops its pulls; the terminal action comes when none is in flight,
//! so that the engine may reuse the pages as soon as the end is reported.

use std::collections::BTreeMap;

use super::{ConnectionId, InvalidTransition};
use crate::protocol::{GroupId, GroupStart, GroupTotal, PageDigest, root_of};
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
    /// Prompt pages a peer may announce at most.
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

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum RoomEnd {
    Fail(ReasonCode, String),
    Abort,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DecodeRoom {
    pub phase: DecodePhase,
    pub attempt: u32,
    /// The page group of the pool, and the first page that is asked for.
    pub start: GroupStart,
    /// Every phase ends by then: the deadline of the request.
    deadline: u64,
    /// Time of the transfer's last progress; see `next_due`.
    moved_at: u64,
    limits: PullLimits,
    peer: Option<ConnectionId>,
    accepted: bool,
    held: usize, // prompt pages from start_page on that are here already, by the grant
    grant: Option<Vec<u32>>,
    pages: Vec<PageState>, // by index in the prompt, minus start_page
    fin: Option<(GroupTotal, FinalMessage)>,
    in_flight: BTreeMap<u64, Vec<usize>>, // ticket -> indices into `pages`
    next_ticket: u64,
    ending: Option<RoomEnd>,
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
    /// P announced pages of a group from prompt page `first_page` on.
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
    /// Own engine: the group's pages of the prompt before start_page are here; `pages` are for the
    /// later ones.
    Grant {
        group: GroupId,
        start_page: u32,
        pages: Vec<u32>,
    },
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
    pub fn new(
        attempt: u32,
        start: GroupStart,
        now: u64,
        deadline: u64,
        limits: PullLimits,
    ) -> Self {
        Self {
            phase: DecodePhase::Resolving,
            attempt,
            start,
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

    /// (pages announced, pages verified), for the timeline.
    pub fn page_counts(&self) -> (usize, usize) {
        let announced = self
            .pages
            .iter()
            .filter(|state| **state != PageState::Unknown)
            .count();
        (
            announced,
            self.pages
                .iter()
                .filter(|state| matches!(state, PageState::Verified(_)))
                .count(),
        )
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
                DecodeEvent::Grant { .. }
                | DecodeEvent::Abort(_)
                | DecodeEvent::Connected { .. } => {
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
            DecodeEvent::Grant { group, .. } if group != self.start.group => {
                return Err(self.invalid_transition(&event, "the room has no such page group"));
            }
            DecodeEvent::Grant {
                start_page,
                ref pages,
                ..
            } => {
                if self.grant.is_some() {
                    return Err(self.invalid_transition(&event, "pages were granted before"));
                }
                self.held = start_page.saturating_sub(self.start.start_page) as usize;
                self.grant = Some(pages.clone());
            }
            DecodeEvent::Revoke if self.grant.is_none() => {
                return Err(self.invalid_transition(&event, "no pages are granted"));
            }
            DecodeEvent::Revoke if self.is_announced() => return Ok(vec![DecodeAction::Announced]),
            DecodeEvent::Revoke => {
                self.grant = None;
                self.held = 0;
                return Ok(vec![DecodeAction::Revoked]);
            }
            DecodeEvent::Pulled { ticket } => {
                self.moved_at = now;
                for index in self.in_flight.remove(&ticket).unwrap_or_default() {
                    if let PageState::Pulling(digest) = self.pages[index] {
                        self.pages[index] = PageState::Verified(digest);
                    }
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
        !self.pages.is_empty() || self.fin.is_some()
    }

    fn check_group(&self, message: &str, group: GroupId) -> Result<(), String> {
        let own = self.start.group;
        if group == own {
            return Ok(());
        }
        Err(format!(
            "{message} names page group {group} in a room of group {own}"
        ))
    }

    fn record_announced(
        &mut self,
        group: GroupId,
        first_page: u32,
        pages: &[PageDigest],
    ) -> Result<(), String> {
        self.check_group("PROGRESS", group)?;
        let end =
            (first_page as usize + pages.len()).saturating_sub(self.start.start_page as usize);
        if end > self.limits.max_pages {
            return Err(format!(
                "the peer announces prompt page {}, at most {} fit",
                first_page as usize + pages.len(),
                self.limits.max_pages
            ));
        }
        if self.pages.len() < end {
            self.pages.resize(end, PageState::Unknown);
        }
        for (index, &digest) in (first_page..).zip(pages) {
            let Some(index) = index.checked_sub(self.start.start_page) else {
                continue;
            };
            let state = &mut self.pages[index as usize];
            if *state == PageState::Unknown {
                *state = PageState::Announced(digest);
            }
        }
        Ok(())
    }

    fn record_final(&mut self, fin: FinalMessage) -> Result<(), String> {
        let [total] = fin.groups[..] else {
            let number = fin.groups.len();
            return Err(format!(
                "FINAL counts the pages of {number} groups, not of one"
            ));
        };
        self.check_group("FINAL", total.group)?;
        self.fin.get_or_insert((total, fin));
        Ok(())
    }

    fn needed_pages(&self) -> Option<usize> {
        let (total, _) = self.fin.as_ref()?;
        Some(total.total_pages.saturating_sub(self.start.start_page) as usize)
    }

    /// Everything that is needed from the peer's control connection is here.
    fn all_announced(&self) -> bool {
        self.needed_pages().is_some_and(|n| {
            self.pages.len() >= n
                && self.pages[..n]
                    .iter()
                    .all(|state| *state != PageState::Unknown)
        })
    }

    /// Start pulls that are possible now, or commit.
    fn pull_or_commit(&mut self, now: u64) -> Vec<DecodeAction> {
        if let (Some(needed), Some(granted)) =
            (self.needed_pages(), self.grant.as_ref().map(Vec::len))
            && granted + self.held != needed
        {
            let held_pages = self.start.start_page as usize + self.held;
            let reason = format!(
                "{granted} pages were granted beyond the {held_pages} held, but prefill has \
                 {needed} from page {} on",
                self.start.start_page
            );
            return self.fail_room(ReasonCode::PromptMismatch, reason);
        }
        if let Some(needed) = self.needed_pages()
            && self.pages.len() > needed
        {
            let reason = format!(
                "{} pages from page {} on were announced, but FINAL counts {needed}",
                self.pages.len(),
                self.start.start_page
            );
            return self.fail_room(ReasonCode::TransportBroken, reason);
        }
        let mut actions = self.start_pulls(now);
        if self.grant.is_some()
            && self.in_flight.is_empty()
            && self.all_announced()
            && self
                .needed_pages()
                .is_some_and(|n| self.verified_pages() + self.held == n)
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
        let (Some(grant), true) = (&self.grant, self.accepted) else {
            return vec![];
        };
        let mut actions = Vec::new();
        let end = self.pages.len().min(self.held + grant.len());
        let mut ready = (self.held..end)
            .filter(|&i| matches!(self.pages[i], PageState::Announced(_)))
            .collect::<Vec<_>>()
            .into_iter();
        while self.in_flight.len() < self.limits.pulls_in_flight {
            let indices: Vec<usize> = ready.by_ref().take(self.limits.pages_per_pull).collect();
            if indices.is_empty() {
                break;
            }
            let mut pages = Vec::with_capacity(indices.len());
            for &i in &indices {
                if let PageState::Announced(src) = self.pages[i] {
                    pages.push(PullPage {
                        src,
                        dst: grant[i - self.held],
                    });
                    self.pages[i] = PageState::Pulling(src);
                }
            }
            let ticket = self.next_ticket;
            self.next_ticket += 1;
            if self.in_flight.is_empty() {
                self.moved_at = now;
            }
            self.in_flight.insert(ticket, indices);
            self.phase = DecodePhase::Pulling;
            actions.push(DecodeAction::Pull {
                ticket,
                group: self.start.group,
                pages,
            });
        }
        actions
    }

    fn commit_room(&mut self) -> Vec<DecodeAction> {
        let Some((total, fin)) = self.fin.clone() else {
            return vec![];
        };
        let sums = self.pages.iter().filter_map(|state| match state {
            // announced only: held here already
            PageState::Verified(digest) | PageState::Announced(digest) => Some(digest.sum),
            _ => None,
        });
        let root = root_of(sums);
        if root != total.root {
            let reason = "the root over the page checksums differs from the prefill side's";
            return self.fail_room(ReasonCode::Checksum, reason);
        }
        self.phase = DecodePhase::Committed;
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

#[cfg(test)]
mod tests;
