//! Both machines, the channel between them and everything around them, as one value: what the exhaustive and the random tests explore.
//!
//! The channel may lose, double and reorder messages within budgets; either engine may abort; P may give a page away under the
//! lease; the link may be cut, and each side learns it at its own time; time may jump to any pending moment. What really happened to
//! D's pages is recorded beside the machines, naively, and every terminal action is held against it.

use std::collections::{BTreeMap, BTreeSet};

use super::{Peer, decode, prefill};
use crate::protocol::Sealed;
use crate::reason_code::Code;

const P: Peer = 1; // P, as D knows it
const D: Peer = 2; // D, as P knows it
pub const P_DEADLINE: u64 = 1000;
pub const D_DEADLINE: u64 = 900;
const LEASE: u64 = 50;
const HASH: [u8; 1] = [7];

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ToP {
    Open,
    Done,
    Abort(Code),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ToD {
    Accepted,
    Rejected(Code),
    Progress {
        first: u32,
        pages: Vec<(u32, u64, u64)>,
    },
    Final {
        total: u32,
        root: u64,
    },
    Abort(Code),
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
pub struct World {
    pub p: prefill::Room,
    pub d: decode::Room,
    to_p: Vec<ToP>,
    to_d: Vec<ToD>,
    hashing: Vec<(u32, u32, u64)>,
    pulls: BTreeMap<u64, Vec<decode::PullPage>>,
    cancelled: bool,
    p_step: u32, // pages published; one more after finish
    total: u32,
    start: u32,
    connected: bool,
    granted: bool,
    p_told_gone: bool,
    d_told_gone: bool,
    cut: bool,
    given_away: BTreeSet<u32>, // P's pages whose generation moved on
    /// D's pages that truly hold what P announced.
    good: BTreeSet<u32>,
    written: BTreeSet<u32>,
    pub budget: Budget,
    pub p_end: Option<Option<Code>>,
    pub d_end: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Move {
    PEngine,
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
    GiveAway(u32),
    Cut,
    PLearnsCut,
    DLearnsCut,
    TickP,
    TickD,
}

impl World {
    /// A prompt of `total` pages of which D holds `start`.
    pub fn new(total: u32, start: u32, limits: decode::PullLimits, budget: Budget) -> Self {
        Self {
            p: prefill::Room::new(0, HASH.to_vec(), P_DEADLINE, LEASE),
            d: decode::Room::new(0, 0, 0, D_DEADLINE, limits),
            to_p: vec![],
            to_d: vec![],
            hashing: vec![],
            pulls: BTreeMap::new(),
            cancelled: false,
            p_step: 0,
            total,
            start,
            connected: false,
            granted: false,
            p_told_gone: false,
            d_told_gone: false,
            cut: false,
            given_away: BTreeSet::new(),
            good: BTreeSet::new(),
            written: BTreeSet::new(),
            budget,
            p_end: None,
            d_end: None,
        }
    }

    pub fn is_over(&self) -> bool {
        self.p_end.is_some() && self.d_end.is_some()
    }

    /// Everything that can happen now.
    pub fn moves(&self) -> Vec<Move> {
        let mut moves = vec![];
        let mut may = |condition: bool, m: Move| {
            if condition {
                moves.push(m);
            }
        };
        let p_live = self.p_end.is_none();
        let d_live = self.d_end.is_none();
        may(p_live && self.p_step <= self.total, Move::PEngine);
        may(p_live && self.budget.p_aborts > 0, Move::PAbort);
        may(d_live && !self.connected && !self.cut, Move::DConnect);
        may(d_live && !self.granted, Move::DGrant);
        may(
            d_live && self.granted && self.budget.revokes > 0,
            Move::DRevoke,
        );
        may(d_live && self.budget.d_aborts > 0, Move::DAbort);
        may(!self.hashing.is_empty(), Move::Hash);
        for i in 0..self.to_p.len() {
            may(true, Move::ToP(i));
            may(self.budget.losses > 0, Move::LoseToP(i));
            may(self.budget.doubles > 0, Move::DoubleToP(i));
        }
        for i in 0..self.to_d.len() {
            may(true, Move::ToD(i));
            may(self.budget.losses > 0, Move::LoseToD(i));
            may(self.budget.doubles > 0, Move::DoubleToD(i));
        }
        for &ticket in self.pulls.keys() {
            may(true, Move::Pull(ticket));
            may(self.cancelled, Move::StopPull(ticket));
        }
        for page in 0..self.p_step.min(self.total) {
            may(
                self.budget.stale > 0 && !self.given_away.contains(&page),
                Move::GiveAway(page),
            );
        }
        may(
            self.connected && !self.cut && self.budget.cuts > 0,
            Move::Cut,
        );
        may(self.cut && !self.p_told_gone, Move::PLearnsCut);
        may(self.cut && !self.d_told_gone, Move::DLearnsCut);
        may(p_live && self.budget.ticks > 0, Move::TickP);
        may(
            d_live && self.budget.ticks > 0 && self.d.next_due().is_some(),
            Move::TickD,
        );
        moves
    }

    pub fn make(&mut self, m: &Move) {
        match *m {
            Move::PEngine => {
                let event = if self.p_step < self.total {
                    prefill::Event::Publish {
                        first: self.p_step,
                        pages: vec![(self.p_step, 2)],
                    }
                } else {
                    prefill::Event::Finish(prefill::Finish {
                        total_pages: self.total,
                        last_page_tokens: 1,
                        payload: vec![],
                    })
                };
                self.p_step += 1;
                self.step_p(event, 0);
            }
            Move::PAbort => {
                self.budget.p_aborts -= 1;
                self.step_p(prefill::Event::Abort(Code::ClientGone), 0);
            }
            Move::DConnect => {
                self.connected = true;
                self.step_d(decode::Event::Connected { peer: P }, 0);
            }
            Move::DGrant => {
                self.granted = true;
                let pages = (self.start..self.total).map(|i| 100 + i).collect();
                self.step_d(
                    decode::Event::Grant {
                        start_page: self.start,
                        pages,
                    },
                    0,
                );
            }
            Move::DRevoke => {
                self.budget.revokes -= 1;
                self.step_d(decode::Event::Revoke, 0);
            }
            Move::DAbort => {
                self.budget.d_aborts -= 1;
                self.step_d(decode::Event::Abort(Code::ClientGone), 0);
            }
            Move::Hash => {
                let sums = std::mem::take(&mut self.hashing);
                let sums = sums
                    .into_iter()
                    .map(|(index, page, generation)| {
                        (
                            index,
                            Sealed {
                                page,
                                generation,
                                sum: u64::from(page) + 50,
                            },
                        )
                    })
                    .collect();
                self.step_p(prefill::Event::Hashed(sums), 0);
            }
            Move::ToP(i) => {
                let msg = self.to_p.remove(i);
                self.hear_p(msg);
            }
            Move::ToD(i) => {
                let msg = self.to_d.remove(i);
                self.hear_d(msg);
            }
            Move::LoseToP(i) => {
                self.budget.losses -= 1;
                self.to_p.remove(i);
            }
            Move::LoseToD(i) => {
                self.budget.losses -= 1;
                self.to_d.remove(i);
            }
            Move::DoubleToP(i) => {
                self.budget.doubles -= 1;
                let msg = self.to_p[i].clone();
                self.send_p(msg);
            }
            Move::DoubleToD(i) => {
                self.budget.doubles -= 1;
                let msg = self.to_d[i].clone();
                self.send_d(msg);
            }
            Move::Pull(ticket) => self.end_pull(ticket),
            Move::StopPull(ticket) => {
                self.pulls.remove(&ticket);
                self.step_d(decode::Event::PullStopped { ticket }, 0);
            }
            Move::GiveAway(page) => {
                self.budget.stale -= 1;
                self.given_away.insert(page);
            }
            Move::Cut => {
                self.budget.cuts -= 1;
                self.cut = true;
                self.to_p.clear();
                self.to_d.clear();
            }
            Move::PLearnsCut => {
                self.p_told_gone = true;
                self.step_p(
                    prefill::Event::PeerGone {
                        peer: D,
                        code: Code::PeerDead,
                    },
                    0,
                );
            }
            Move::DLearnsCut => {
                self.d_told_gone = true;
                self.step_d(
                    decode::Event::PeerGone {
                        peer: P,
                        code: Code::PeerDead,
                        readable: true,
                    },
                    0,
                );
            }
            Move::TickP => {
                self.budget.ticks -= 1;
                let due = self
                    .p
                    .next_due()
                    .expect("a live prefill room always waits for something");
                self.step_p(prefill::Event::Tick, due);
            }
            Move::TickD => {
                self.budget.ticks -= 1;
                let due = self
                    .d
                    .next_due()
                    .expect("offered only when something is due");
                self.step_d(decode::Event::Tick, due);
            }
        }
    }

    /// Let time do its work: from any state both rooms must end without any further message.
    pub fn run_out(&mut self) {
        for _ in 0..20 {
            for ticket in self.pulls.keys().copied().collect::<Vec<_>>() {
                self.make(&Move::Pull(ticket));
            }
            if let (None, Some(due)) = (self.d_end, self.d.next_due()) {
                self.step_d(decode::Event::Tick, due);
            }
            if self.p_end.is_none() {
                let due = self
                    .p
                    .next_due()
                    .expect("a live prefill room always waits for something");
                self.step_p(prefill::Event::Tick, due);
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
            let index = page.dst - 100;
            self.written.insert(index);
            // The copier's verdict, from the naive truth: a page that P gave away does not verify.
            if self.given_away.contains(&page.src.page) {
                return self.step_d(
                    decode::Event::PullFailed {
                        ticket,
                        code: Code::StalePage,
                        why: String::new(),
                    },
                    0,
                );
            }
            self.good.insert(index);
        }
        self.step_d(decode::Event::Pulled { ticket }, 0);
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

    fn hear_p(&mut self, msg: ToP) {
        let event = match msg {
            ToP::Open => prefill::Event::Open {
                peer: D,
                attempt: 0,
                prompt_hash: HASH.to_vec(),
                start_page: 0,
            },
            ToP::Done => prefill::Event::Done {
                peer: D,
                attempt: 0,
            },
            ToP::Abort(code) => prefill::Event::PeerAbort {
                peer: D,
                attempt: 0,
                code,
            },
        };
        self.step_p(event, 0);
    }

    fn hear_d(&mut self, msg: ToD) {
        let event = match msg {
            ToD::Accepted => decode::Event::Accepted {
                peer: P,
                attempt: 0,
            },
            ToD::Rejected(code) => decode::Event::Rejected {
                peer: P,
                attempt: 0,
                code,
                why: String::new(),
            },
            ToD::Progress { first, pages } => {
                let pages = pages
                    .into_iter()
                    .map(|(page, generation, sum)| Sealed {
                        page,
                        generation,
                        sum,
                    })
                    .collect();
                decode::Event::Progress {
                    peer: P,
                    attempt: 0,
                    first_page: first,
                    pages,
                }
            }
            ToD::Final { total, root } => decode::Event::Final {
                peer: P,
                attempt: 0,
                fin: decode::Final {
                    total_pages: total,
                    last_page_tokens: 1,
                    root,
                    payload: vec![],
                },
            },
            ToD::Abort(code) => decode::Event::PeerAbort {
                peer: P,
                attempt: 0,
                code,
            },
        };
        self.step_d(event, 0);
    }

    fn step_p(&mut self, event: prefill::Event, now: u64) {
        let actions = self
            .p
            .step(event, now)
            .expect("the world keeps the engine's contract");
        for action in actions {
            match action {
                prefill::Action::Hash(pages) => self.hashing.extend(pages),
                prefill::Action::Accept { .. } => self.send_d(ToD::Accepted),
                prefill::Action::Reject { code, .. } => self.send_d(ToD::Rejected(code)),
                prefill::Action::Progress {
                    first_page, pages, ..
                } => {
                    let pages = pages
                        .into_iter()
                        .map(|s| (s.page, s.generation, s.sum))
                        .collect();
                    self.send_d(ToD::Progress {
                        first: first_page,
                        pages,
                    });
                }
                prefill::Action::Final { finish, root, .. } => self.send_d(ToD::Final {
                    total: finish.total_pages,
                    root,
                }),
                prefill::Action::SendAbort { code, .. } => self.send_d(ToD::Abort(code)),
                prefill::Action::AckAbort { .. } | prefill::Action::ReaderLeft { .. } => {}
                prefill::Action::Released(code) => {
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

    fn step_d(&mut self, event: decode::Event, now: u64) {
        let actions = self
            .d
            .step(event, now)
            .expect("the world keeps the engine's contract");
        for action in actions {
            assert_eq!(self.d_end, None, "{action:?} after the end");
            match action {
                decode::Action::Open { .. } => self.send_p(ToP::Open),
                decode::Action::Pull { ticket, pages } => {
                    for page in &pages {
                        let index = page.dst - 100;
                        assert!(
                            index >= self.start && page.src.page == index,
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
                decode::Action::CancelPulls => self.cancelled = true,
                decode::Action::Done { .. } => self.send_p(ToP::Done),
                decode::Action::SendAbort { code, .. } => self.send_p(ToP::Abort(code)),
                decode::Action::AckAbort { .. } => {}
                decode::Action::Commit(_) => {
                    assert!(
                        self.good.iter().copied().eq(self.start..self.total),
                        "committed with {:?} of {}..{}",
                        self.good,
                        self.start,
                        self.total
                    );
                    self.end_d("committed");
                }
                decode::Action::Announced => {}
                decode::Action::Revoked => {
                    assert!(
                        self.pulls.is_empty() && self.written.is_empty(),
                        "pages that are being filled were given back"
                    );
                    self.granted = false;
                }
                decode::Action::Fail { .. } => self.end_d("failed"),
                decode::Action::Aborted => self.end_d("aborted"),
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
