//! Model of both state machines, the channel between them and their environment as one value,
//! explored by the exhaustive and random tests.
//!
//! The channel may lose, double and reorder messages within budgets; either engine may abort; P may
//! reassign a page under the lease; the connection may be cut, and each side notices it at its own
//! time; time may jump to any timer. The true content of D's pages is recorded beside the machines,
//! naively, and every terminal action is checked against it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{ConnectionId, PromptPage, decode, prefill};
use crate::protocol::{GroupId, GroupPages, GroupStart, GroupTotal, PageDigest};
use crate::reason_code::ReasonCode;

const P: ConnectionId = 1; // P, as D knows it
const D: ConnectionId = 2; // D, as P knows it
pub const P_DEADLINE: u64 = 1000;
pub const D_DEADLINE: u64 = 900;
const LEASE: u64 = 50;
const HASH: [u8; 1] = [7];
/// Pages of the pools that belong to one group: page i of group g has id g × this + i at P, and
/// `DST` more at D.
const GROUP_PAGES: u32 = 50;
const DST: u32 = 1000;

/// Pages of one group of the prompt: those with the numbers [first, total) exist, D holds or does
/// not need those before `start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelGroup {
    pub first: u32,
    pub total: u32,
    pub start: u32,
    /// Tokens that the state has seen which P sends, and those that D needs; `None`: the group has
    /// no states.
    pub tokens_at: [Option<u32>; 2],
}

impl ModelGroup {
    pub const fn new(first: u32, total: u32, start: u32) -> Self {
        Self {
            first,
            total,
            start,
            tokens_at: [None; 2],
        }
    }
}

/// Id of the group at this position.
fn id_of(position: usize) -> GroupId {
    4 + 3 * position as GroupId
}

/// P's page of a place in the prompt.
fn page_of(place: PromptPage) -> u32 {
    (place.group - 4) / 3 * GROUP_PAGES + place.index
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ToP {
    Open,
    Done,
    Abort(ReasonCode),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ToD {
    Accepted,
    Rejected(ReasonCode),
    Progress {
        group: GroupId,
        first: u32,
        pages: Vec<(u32, u64, u64)>,
    },
    Final(Vec<GroupTotal>),
    Abort(ReasonCode),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Budget {
    pub losses: u8,
    pub doubles: u8,
    pub stale: u8,
    pub p_aborts: u8,
    pub d_aborts: u8,
    pub revokes: u8,
    pub cuts: u8,
    pub ticks: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Model {
    pub p: prefill::PrefillRoom,
    pub d: decode::DecodeRoom,
    to_p: Vec<ToP>,
    to_d: Vec<ToD>,
    hashing: Vec<(PromptPage, u32, u64)>,
    pulls: BTreeMap<u64, Vec<decode::PullPage>>,
    cancelled: bool,
    groups: Vec<ModelGroup>,
    /// Number of the next page to publish, by group.
    next: Vec<u32>,
    finished: bool,
    connected: bool,
    granted: bool,
    p_knows_cut: bool,
    d_knows_cut: bool,
    cut: bool,
    reassigned: BTreeSet<u32>, // P's pages whose generation moved on
    /// D's pages that truly hold what P announced.
    good: BTreeSet<u32>,
    written: BTreeSet<u32>,
    pub budget: Budget,
    pub p_end: Option<Option<ReasonCode>>,
    pub d_end: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Transition {
    /// P's engine publishes the next page of the group at this position.
    Publish(usize),
    Finish,
    PAbort,
    DConnect,
    DGrant,
    DRevoke,
    DAbort,
    Hash,
    ToP(usize),
    ToD(usize),
    LoseToP(usize),
    LoseToD(usize),
    DoubleToP(usize),
    DoubleToD(usize),
    /// A pull ends as the page's state has it (cancelled ones may also stop).
    Pull(u64),
    StopPull(u64),
    Reassign(u32),
    Cut,
    PNoticesCut,
    DNoticesCut,
    TickP,
    TickD,
}

fn places_of(position: usize, indices: Range<u32>) -> impl Iterator<Item = PromptPage> {
    let group = id_of(position);
    indices.map(move |index| PromptPage { group, index })
}

/// OPEN for all pages of these groups.
fn whole(groups: &[ModelGroup]) -> Vec<GroupStart> {
    let positions = 0..groups.len();
    positions
        .map(|position| GroupStart {
            group: id_of(position),
            start_page: 0,
        })
        .collect()
}

impl Model {
    /// A prompt with these pages; OPEN asks for all of them.
    pub fn new(groups: &[ModelGroup], limits: decode::PullLimits, budget: Budget) -> Self {
        let ids: Vec<GroupId> = (0..groups.len()).map(id_of).collect();
        Self {
            p: prefill::PrefillRoom::new(0, HASH.to_vec(), P_DEADLINE, LEASE, &ids),
            d: decode::DecodeRoom::new(0, whole(groups), 0, D_DEADLINE, limits),
            to_p: vec![],
            to_d: vec![],
            hashing: vec![],
            pulls: BTreeMap::new(),
            cancelled: false,
            groups: groups.to_vec(),
            next: groups.iter().map(|group| group.first).collect(),
            finished: false,
            connected: false,
            granted: false,
            p_knows_cut: false,
            d_knows_cut: false,
            cut: false,
            reassigned: BTreeSet::new(),
            good: BTreeSet::new(),
            written: BTreeSet::new(),
            budget,
            p_end: None,
            d_end: None,
        }
    }

    /// P's pages that D must have pulled when it commits.
    fn wanted_pages(&self) -> BTreeSet<u32> {
        let groups = self.groups.iter().enumerate();
        groups
            .flat_map(|(position, group)| places_of(position, group.start..group.total))
            .map(page_of)
            .collect()
    }

    fn published_pages(&self) -> Vec<u32> {
        let groups = self.groups.iter().zip(&self.next).enumerate();
        groups
            .flat_map(|(position, (group, &next))| places_of(position, group.first..next))
            .map(page_of)
            .collect()
    }

    pub fn is_over(&self) -> bool {
        self.p_end.is_some() && self.d_end.is_some()
    }

    /// Everything that can happen now.
    pub fn transitions(&self) -> Vec<Transition> {
        let mut transitions = vec![];
        let mut may = |condition: bool, m: Transition| {
            if condition {
                transitions.push(m);
            }
        };
        let p_live = self.p_end.is_none();
        let d_live = self.d_end.is_none();
        let mut is_published = true;
        for (position, group) in self.groups.iter().enumerate() {
            let has_next = self.next[position] < group.total;
            is_published &= !has_next;
            may(p_live && has_next, Transition::Publish(position));
        }
        may(p_live && is_published && !self.finished, Transition::Finish);
        may(p_live && self.budget.p_aborts > 0, Transition::PAbort);
        may(d_live && !self.connected && !self.cut, Transition::DConnect);
        may(d_live && !self.granted, Transition::DGrant);
        may(
            d_live && self.granted && self.budget.revokes > 0,
            Transition::DRevoke,
        );
        may(d_live && self.budget.d_aborts > 0, Transition::DAbort);
        may(!self.hashing.is_empty(), Transition::Hash);
        for i in 0..self.to_p.len() {
            may(true, Transition::ToP(i));
            may(self.budget.losses > 0, Transition::LoseToP(i));
            may(self.budget.doubles > 0, Transition::DoubleToP(i));
        }
        for i in 0..self.to_d.len() {
            may(true, Transition::ToD(i));
            may(self.budget.losses > 0, Transition::LoseToD(i));
            may(self.budget.doubles > 0, Transition::DoubleToD(i));
        }
        for &ticket in self.pulls.keys() {
            may(true, Transition::Pull(ticket));
            may(self.cancelled, Transition::StopPull(ticket));
        }
        for page in self.published_pages() {
            may(
                self.budget.stale > 0 && !self.reassigned.contains(&page),
                Transition::Reassign(page),
            );
        }
        may(
            self.connected && !self.cut && self.budget.cuts > 0,
            Transition::Cut,
        );
        may(self.cut && !self.p_knows_cut, Transition::PNoticesCut);
        may(self.cut && !self.d_knows_cut, Transition::DNoticesCut);
        may(p_live && self.budget.ticks > 0, Transition::TickP);
        may(
            d_live && self.budget.ticks > 0 && self.d.next_due().is_some(),
            Transition::TickD,
        );
        transitions
    }

    pub fn apply(&mut self, m: &Transition) {
        match *m {
            Transition::Publish(position) => {
                let place = PromptPage {
                    group: id_of(position),
                    index: self.next[position],
                };
                self.next[position] += 1;
                let event = prefill::PrefillEvent::Publish {
                    group: place.group,
                    first: place.index,
                    pages: vec![(page_of(place), 2)],
                };
                self.step_p(event, 0);
            }
            Transition::Finish => {
                self.finished = true;
                let groups = self.groups.iter().enumerate();
                let groups = groups.map(|(position, group)| GroupPages {
                    group: id_of(position),
                    first_page: group.first,
                    total_pages: group.total,
                    last_page_tokens: 1,
                    tokens_at: group.tokens_at[0],
                });
                let output = prefill::PrefillOutput {
                    groups: groups.collect(),
                    payload: vec![],
                };
                self.step_p(prefill::PrefillEvent::Finish(output), 0);
            }
            Transition::PAbort => {
                self.budget.p_aborts -= 1;
                self.step_p(prefill::PrefillEvent::Abort(ReasonCode::ClientGone), 0);
            }
            Transition::DConnect => {
                self.connected = true;
                self.step_d(decode::DecodeEvent::Connected { peer: P }, 0);
            }
            Transition::DGrant => {
                self.granted = true;
                let groups = self.groups.iter().enumerate();
                let grants = groups.map(|(position, group)| decode::GroupGrant {
                    group: id_of(position),
                    start_page: group.start,
                    pages: places_of(position, group.start..group.total)
                        .map(|place| DST + page_of(place))
                        .collect(),
                    tokens_at: group.tokens_at[1],
                });
                let event = decode::DecodeEvent::Grant(grants.collect());
                self.step_d(event, 0);
            }
            Transition::DRevoke => {
                self.budget.revokes -= 1;
                self.step_d(decode::DecodeEvent::Revoke, 0);
            }
            Transition::DAbort => {
                self.budget.d_aborts -= 1;
                self.step_d(decode::DecodeEvent::Abort(ReasonCode::ClientGone), 0);
            }
            Transition::Hash => {
                let sums = std::mem::take(&mut self.hashing);
                let sums = sums
                    .into_iter()
                    .map(|(place, page, generation)| {
                        (
                            place,
                            PageDigest {
                                page,
                                generation,
                                sum: u64::from(page) + 50,
                            },
                        )
                    })
                    .collect();
                self.step_p(prefill::PrefillEvent::Hashed(sums), 0);
            }
            Transition::ToP(i) => {
                let msg = self.to_p.remove(i);
                self.deliver_to_p(msg);
            }
            Transition::ToD(i) => {
                let msg = self.to_d.remove(i);
                self.deliver_to_d(msg);
            }
            Transition::LoseToP(i) => {
                self.budget.losses -= 1;
                self.to_p.remove(i);
            }
            Transition::LoseToD(i) => {
                self.budget.losses -= 1;
                self.to_d.remove(i);
            }
            Transition::DoubleToP(i) => {
                self.budget.doubles -= 1;
                let msg = self.to_p[i].clone();
                self.send_p(msg);
            }
            Transition::DoubleToD(i) => {
                self.budget.doubles -= 1;
                let msg = self.to_d[i].clone();
                self.send_d(msg);
            }
            Transition::Pull(ticket) => self.end_pull(ticket),
            Transition::StopPull(ticket) => {
                self.pulls.remove(&ticket);
                self.step_d(decode::DecodeEvent::PullStopped { ticket }, 0);
            }
            Transition::Reassign(page) => {
                self.budget.stale -= 1;
                self.reassigned.insert(page);
            }
            Transition::Cut => {
                self.budget.cuts -= 1;
                self.cut = true;
                self.to_p.clear();
                self.to_d.clear();
            }
            Transition::PNoticesCut => {
                self.p_knows_cut = true;
                self.step_p(
                    prefill::PrefillEvent::PeerGone {
                        peer: D,
                        code: ReasonCode::PeerDead,
                    },
                    0,
                );
            }
            Transition::DNoticesCut => {
                self.d_knows_cut = true;
                self.step_d(
                    decode::DecodeEvent::PeerGone {
                        peer: P,
                        code: ReasonCode::PeerDead,
                        readable: true,
                    },
                    0,
                );
            }
            Transition::TickP => {
                self.budget.ticks -= 1;
                let due = self
                    .p
                    .next_due()
                    .expect("a live prefill room always waits for something");
                self.step_p(prefill::PrefillEvent::Tick, due);
            }
            Transition::TickD => {
                self.budget.ticks -= 1;
                let due = self
                    .d
                    .next_due()
                    .expect("offered only when something is due");
                self.step_d(decode::DecodeEvent::Tick, due);
            }
        }
    }

    /// Advance time only: from any state both rooms must end without any further message.
    pub fn run_out(&mut self) {
        for _ in 0..20 {
            for ticket in self.pulls.keys().copied().collect::<Vec<_>>() {
                self.apply(&Transition::Pull(ticket));
            }
            if let (None, Some(due)) = (self.d_end, self.d.next_due()) {
                self.step_d(decode::DecodeEvent::Tick, due);
            }
            if self.p_end.is_none() {
                let due = self
                    .p
                    .next_due()
                    .expect("a live prefill room always waits for something");
                self.step_p(prefill::PrefillEvent::Tick, due);
            }
            if self.is_over() {
                return;
            }
        }
        panic!("a room never ends: {self:?}");
    }

    fn end_pull(&mut self, ticket: u64) {
        let pages = self.pulls.remove(&ticket).expect("moves name live pulls");
        for page in &pages {
            let index = page.dst - DST;
            self.written.insert(index);
            // A page that P reassigned does not verify.
            if self.reassigned.contains(&page.src.page) {
                return self.step_d(
                    decode::DecodeEvent::PullFailed {
                        ticket,
                        code: ReasonCode::StalePage,
                        reason: String::new(),
                    },
                    0,
                );
            }
            self.good.insert(index);
        }
        self.step_d(decode::DecodeEvent::Pulled { ticket }, 0);
    }

    fn send_p(&mut self, msg: ToP) {
        if !self.cut {
            self.to_p.push(msg);
            self.to_p.sort();
        }
    }

    fn send_d(&mut self, msg: ToD) {
        if !self.cut {
            self.to_d.push(msg);
            self.to_d.sort();
        }
    }

    fn deliver_to_p(&mut self, msg: ToP) {
        let event = match msg {
            ToP::Open => prefill::PrefillEvent::Open {
                peer: D,
                attempt: 0,
                prompt_hash: HASH.to_vec(),
                groups: whole(&self.groups),
            },
            ToP::Done => prefill::PrefillEvent::Done {
                peer: D,
                attempt: 0,
            },
            ToP::Abort(code) => prefill::PrefillEvent::PeerAbort {
                peer: D,
                attempt: 0,
                code,
            },
        };
        self.step_p(event, 0);
    }

    fn deliver_to_d(&mut self, msg: ToD) {
        let event = match msg {
            ToD::Accepted => decode::DecodeEvent::Accepted {
                peer: P,
                attempt: 0,
            },
            ToD::Rejected(code) => decode::DecodeEvent::Rejected {
                peer: P,
                attempt: 0,
                code,
                reason: String::new(),
            },
            ToD::Progress {
                group,
                first,
                pages,
            } => {
                let pages = pages
                    .into_iter()
                    .map(|(page, generation, sum)| PageDigest {
                        page,
                        generation,
                        sum,
                    })
                    .collect();
                decode::DecodeEvent::Progress {
                    peer: P,
                    attempt: 0,
                    group,
                    first_page: first,
                    pages,
                }
            }
            ToD::Final(groups) => decode::DecodeEvent::Final {
                peer: P,
                attempt: 0,
                fin: decode::FinalMessage {
                    groups,
                    payload: vec![],
                },
            },
            ToD::Abort(code) => decode::DecodeEvent::PeerAbort {
                peer: P,
                attempt: 0,
                code,
            },
        };
        self.step_d(event, 0);
    }

    fn step_p(&mut self, event: prefill::PrefillEvent, now: u64) {
        let actions = self
            .p
            .apply_event(event, now)
            .expect("the model keeps the engine's contract");
        for action in actions {
            match action {
                prefill::PrefillAction::Hash(pages) => self.hashing.extend(pages),
                prefill::PrefillAction::Accept { .. } => self.send_d(ToD::Accepted),
                prefill::PrefillAction::Reject { code, .. } => self.send_d(ToD::Rejected(code)),
                prefill::PrefillAction::Progress {
                    group,
                    first_page,
                    pages,
                    ..
                } => {
                    let pages = pages
                        .into_iter()
                        .map(|s| (s.page, s.generation, s.sum))
                        .collect();
                    self.send_d(ToD::Progress {
                        group,
                        first: first_page,
                        pages,
                    });
                }
                prefill::PrefillAction::Final { groups, .. } => {
                    self.send_d(ToD::Final(groups));
                }
                prefill::PrefillAction::SendAbort { code, .. } => self.send_d(ToD::Abort(code)),
                prefill::PrefillAction::AckAbort { .. }
                | prefill::PrefillAction::ReaderLeft { .. } => {}
                prefill::PrefillAction::Released(code) => {
                    assert_eq!(self.p_end, None, "released twice");
                    self.p_end = Some(code);
                }
            }
        }
        assert_eq!(
            self.p.phase.is_over(),
            self.p_end.is_some(),
            "the pages are locked exactly as long as the room lives"
        );
    }

    fn step_d(&mut self, event: decode::DecodeEvent, now: u64) {
        let actions = self
            .d
            .apply_event(event, now)
            .expect("the model keeps the engine's contract");
        for action in actions {
            assert_eq!(self.d_end, None, "{action:?} after the end");
            match action {
                decode::DecodeAction::Open { .. } => self.send_p(ToP::Open),
                decode::DecodeAction::Pull {
                    ticket,
                    group,
                    pages,
                } => {
                    for page in &pages {
                        let index = page.dst - DST;
                        assert!(
                            self.wanted_pages().contains(&index)
                                && page.src.page == index
                                && id_of((index / GROUP_PAGES) as usize) == group,
                            "page {page:?} is pulled to the wrong place"
                        );
                        assert!(
                            !self.written.contains(&index),
                            "page {index} is written twice"
                        );
                    }
                    assert!(!self.cancelled, "a pull is started after the cancel");
                    self.pulls.insert(ticket, pages);
                }
                decode::DecodeAction::CancelPulls => self.cancelled = true,
                decode::DecodeAction::Done { .. } => self.send_p(ToP::Done),
                decode::DecodeAction::SendAbort { code, .. } => self.send_p(ToP::Abort(code)),
                decode::DecodeAction::AckAbort { .. } => {}
                decode::DecodeAction::Commit(_) => {
                    assert_eq!(
                        self.good,
                        self.wanted_pages(),
                        "committed without all pages"
                    );
                    self.end_d("committed");
                }
                decode::DecodeAction::Announced => {}
                decode::DecodeAction::Revoked => {
                    assert!(
                        self.pulls.is_empty() && self.written.is_empty(),
                        "pages that are being filled were given back"
                    );
                    self.granted = false;
                }
                decode::DecodeAction::Fail { .. } => self.end_d("failed"),
                decode::DecodeAction::Aborted => self.end_d("aborted"),
            }
        }
        assert_eq!(self.d.phase.is_over(), self.d_end.is_some());
        assert_eq!(self.d.pulls_in_flight(), self.pulls.len());
    }

    fn end_d(&mut self, how: &'static str) {
        assert!(self.pulls.is_empty(), "{how} while pulls still write pages");
        self.d_end = Some(how);
    }
}
