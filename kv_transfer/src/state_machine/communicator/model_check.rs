//! Both sides, both threads and the two directions between them, explored exhaustively: every order of events, with a budget of
//! faults. What is asserted in `Relay::check` and in `explore` holds in every state that can be reached.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::protocol::Sealed;
use crate::reason_code::Code;
use crate::state_machine::decode::PullPage;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Word {
    Open,
    Id,
    Read(Ticket, Vec<(u32, u64)>),
    Send(Ticket, u64),
    Stale(Ticket, u32),
    End,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum AtP {
    Host { told: bool },
    Gather(Ticket),
    Posted(Ticket),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum AtD {
    Join,
    Receive {
        ticket: Ticket,
        pages: Vec<PullPage>,
    },
    Got {
        ticket: Ticket,
        pages: Vec<PullPage>,
    },
    Writing {
        ticket: Ticket,
        pages: Vec<PullPage>,
    },
}

impl AtD {
    fn pages(&self) -> &[PullPage] {
        match self {
            AtD::Join => &[],
            AtD::Receive { pages, .. } | AtD::Got { pages, .. } | AtD::Writing { pages, .. } => {
                pages
            }
        }
    }

    fn ticket(&self) -> Option<Ticket> {
        match self {
            AtD::Join => None,
            AtD::Receive { ticket, .. } | AtD::Got { ticket, .. } | AtD::Writing { ticket, .. } => {
                Some(*ticket)
            }
        }
    }
}

/// How often each fault may happen on a path.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Budget {
    losses: u8,
    doubles: u8,
    swaps: u8,
    cancels: u8,
    stale: u8,
    corrupt: u8,
    kills: u8,
    breaks: u8,
    hangs: u8,
    closes: u8,
}

#[derive(Debug, Clone, Copy)]
enum Move {
    HearP,
    HearD,
    LoseP,
    LoseD,
    DoubleP,
    DoubleD,
    SwapP,
    SwapD,
    MakeId,
    Meet,
    Gather,
    GivenAway,
    Transfer,
    BeginWrite,
    Written { intact: bool },
    Skipped,
    Cancel(u64),
    Close,
    Kill,
    ConnectionLost,
    BreakP,
    BreakD,
    EndThreadP,
    EndThreadD,
    HangP,
    HangD,
    Tick,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Thread {
    Running,
    Aborted,
    Hung,
    Ended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Relay {
    now: u64,
    budget: Budget,
    sink: Sink,
    source: Option<Source>,
    p_alive: bool,
    to_p: VecDeque<Word>,
    to_d: VecDeque<Word>,
    p_jobs: VecDeque<AtP>,
    d_jobs: VecDeque<AtD>,
    p_thread: Thread,
    d_thread: Thread,
    wanted: BTreeMap<u64, Vec<u32>>,
    verified: Vec<u32>,
    ended: BTreeMap<u64, &'static str>,
}

const LIMITS: Limits = Limits {
    slabs: 2,
    pages_per_slab: 1,
    open_ms: 10,
    op_ms: 5,
    abort_ms: 7,
};

impl Relay {
    /// Pulls of so many pages each.
    fn new(pulls: &[u32], budget: Budget) -> Self {
        let (sink, actions) = Sink::new(LIMITS, 0);
        let mut relay = Self {
            now: 0,
            budget,
            sink,
            source: None,
            p_alive: true,
            to_p: VecDeque::new(),
            to_d: VecDeque::new(),
            p_jobs: VecDeque::new(),
            d_jobs: VecDeque::new(),
            p_thread: Thread::Running,
            d_thread: Thread::Running,
            wanted: BTreeMap::new(),
            verified: vec![],
            ended: BTreeMap::new(),
        };
        relay.act_d(actions);
        let mut next = 0;
        for (pull, &n) in pulls.iter().enumerate() {
            let pages: Vec<PullPage> = (next..next + n)
                .map(|page| PullPage {
                    src: Sealed {
                        page,
                        generation: 2,
                        sum: 0,
                    },
                    dst: page,
                })
                .collect();
            next += n;
            relay
                .wanted
                .insert(pull as u64, pages.iter().map(|p| p.dst).collect());
            relay.sink(SinkEvent::Pull {
                pull: pull as u64,
                pages,
            });
        }
        relay
    }

    fn sink(&mut self, event: SinkEvent) {
        let actions = self.sink.step(event, self.now);
        self.act_d(actions);
    }

    fn source(&mut self, event: SourceEvent) {
        if let Some(source) = &mut self.source {
            let actions = source.step(event, self.now);
            self.act_p(actions);
        }
    }

    fn act_d(&mut self, actions: Vec<SinkAction>) {
        let mut revoked = vec![]; // told after the other actions, as the shell does
        for action in actions {
            match action {
                SinkAction::Ask => self.to_p.push_back(Word::Open),
                SinkAction::Join(_) => self.d_jobs.push_back(AtD::Join),
                SinkAction::Read { ticket, pages } => self.to_p.push_back(Word::Read(
                    ticket,
                    pages
                        .iter()
                        .map(|p| (p.src.page, p.src.generation))
                        .collect(),
                )),
                SinkAction::Receive { ticket, pages, .. } => {
                    self.d_jobs.push_back(AtD::Receive { ticket, pages });
                }
                SinkAction::Revoke { ticket } if self.revoke(ticket) => revoked.push(ticket),
                SinkAction::Revoke { .. } => {}
                SinkAction::End {
                    pull,
                    pages,
                    outcome,
                } => self.pull_ended(pull, pages, &outcome),
                SinkAction::TellEnd(_) => self.to_p.push_back(Word::End),
                SinkAction::Abort => {
                    assert_eq!(self.d_thread, Thread::Running, "aborted twice");
                    self.d_thread = Thread::Aborted;
                    // What has not started never starts; a page being written is written to its end.
                    self.d_jobs.retain(|job| matches!(job, AtD::Writing { .. }));
                }
                SinkAction::Abandon => assert_ne!(self.d_thread, Thread::Ended),
                SinkAction::Gone => assert_eq!(self.d_thread, Thread::Ended),
            }
        }
        for ticket in revoked {
            self.sink(SinkEvent::Revoked { ticket });
        }
    }

    /// False: its pages are being written.
    fn revoke(&mut self, ticket: Ticket) -> bool {
        for job in &mut self.d_jobs {
            match job {
                AtD::Receive { ticket: t, pages } | AtD::Got { ticket: t, pages }
                    if *t == ticket =>
                {
                    pages.clear();
                    return true;
                }
                AtD::Writing { ticket: t, .. } if *t == ticket => return false,
                _ => {}
            }
        }
        panic!("ticket {ticket} is not on the thread");
    }

    fn pull_ended(&mut self, pull: u64, pages: usize, outcome: &Outcome) {
        let name = match outcome {
            Outcome::Done => "done",
            Outcome::Failed(Code::StalePage, _) => "stale",
            Outcome::Failed(..) => "checksum",
            Outcome::Cancelled => "cancelled",
            Outcome::Broken(_) => "broken",
        };
        assert_eq!(
            self.ended.insert(pull, name),
            None,
            "pull {pull} ended twice"
        );
        if *outcome == Outcome::Done {
            let wanted = &self.wanted[&pull];
            assert_eq!(pages, wanted.len());
            assert!(
                wanted.iter().all(|page| self.verified.contains(page)),
                "an unverified page was delivered"
            );
        }
    }

    fn act_p(&mut self, actions: Vec<SourceAction>) {
        for action in actions {
            match action {
                SourceAction::Host => self.p_jobs.push_back(AtP::Host { told: false }),
                SourceAction::TellId(_) => self.to_d.push_back(Word::Id),
                SourceAction::Send { ticket, .. } => self.p_jobs.push_back(AtP::Gather(ticket)),
                SourceAction::Announce { ticket, seq } => {
                    self.to_d.push_back(Word::Send(ticket, seq));
                }
                SourceAction::TellStale { ticket, page } => {
                    self.to_d.push_back(Word::Stale(ticket, page));
                }
                SourceAction::TellEnd(_) => self.to_d.push_back(Word::End),
                SourceAction::Abort => {
                    assert_eq!(self.p_thread, Thread::Running, "aborted twice");
                    self.p_thread = Thread::Aborted;
                    self.p_jobs.clear();
                }
                SourceAction::Abandon => assert_ne!(self.p_thread, Thread::Ended),
                SourceAction::Gone => assert_eq!(self.p_thread, Thread::Ended),
            }
        }
    }

    fn due(&self) -> Option<u64> {
        let p = self.source.as_ref().and_then(Source::next_due);
        [self.sink.next_due(), p].into_iter().flatten().min()
    }

    fn moves(&self) -> Vec<Move> {
        let mut moves = vec![];
        let b = &self.budget;
        let mut offer = |possible: bool, m: Move| {
            if possible {
                moves.push(m);
            }
        };
        let runs = |thread| thread == Thread::Running;
        offer(!self.to_p.is_empty(), Move::HearP);
        offer(!self.to_d.is_empty(), Move::HearD);
        let (p, d) = (self.p_jobs.front(), self.d_jobs.front());
        offer(matches!(p, Some(AtP::Host { told: false })), Move::MakeId);
        offer(
            matches!((p, d), (Some(AtP::Host { told: true }), Some(AtD::Join))),
            Move::Meet,
        );
        offer(matches!(p, Some(AtP::Gather(_))), Move::Gather);
        offer(
            matches!((p, d), (Some(AtP::Posted(_)), Some(AtD::Receive { .. }))),
            Move::Transfer,
        );
        if let Some(AtD::Got { pages, .. }) = d {
            offer(!pages.is_empty(), Move::BeginWrite);
            offer(pages.is_empty(), Move::Skipped);
        }
        offer(
            matches!(d, Some(AtD::Writing { .. })),
            Move::Written { intact: true },
        );
        offer(self.p_thread == Thread::Aborted, Move::EndThreadP);
        offer(
            self.d_thread == Thread::Aborted && self.d_jobs.is_empty(),
            Move::EndThreadD,
        );
        offer(
            !self.p_alive && self.to_d.is_empty() && self.sink.phase().is_usable(),
            Move::ConnectionLost,
        );
        let quiet = moves.is_empty();
        let mut offer = |possible: bool, m: Move| {
            if possible {
                moves.push(m);
            }
        };
        offer(quiet && self.due().is_some(), Move::Tick);
        offer(b.losses > 0 && !self.to_p.is_empty(), Move::LoseP);
        offer(b.losses > 0 && !self.to_d.is_empty(), Move::LoseD);
        offer(b.doubles > 0 && !self.to_p.is_empty(), Move::DoubleP);
        offer(b.doubles > 0 && !self.to_d.is_empty(), Move::DoubleD);
        offer(b.swaps > 0 && self.to_p.len() > 1, Move::SwapP);
        offer(b.swaps > 0 && self.to_d.len() > 1, Move::SwapD);
        offer(
            b.stale > 0 && matches!(p, Some(AtP::Gather(_))),
            Move::GivenAway,
        );
        offer(
            b.corrupt > 0 && matches!(d, Some(AtD::Writing { .. })),
            Move::Written { intact: false },
        );
        for &pull in self.wanted.keys() {
            offer(
                b.cancels > 0 && !self.ended.contains_key(&pull),
                Move::Cancel(pull),
            );
        }
        offer(b.closes > 0 && self.sink.is_idle(), Move::Close);
        offer(b.kills > 0 && self.p_alive, Move::Kill);
        offer(
            b.breaks > 0 && runs(self.p_thread) && p.is_some(),
            Move::BreakP,
        );
        offer(
            b.breaks > 0
                && runs(self.d_thread)
                && d.is_some_and(|job| !matches!(job, AtD::Writing { .. })),
            Move::BreakD,
        );
        offer(b.hangs > 0 && self.p_thread == Thread::Aborted, Move::HangP);
        offer(
            b.hangs > 0 && self.d_thread == Thread::Aborted && self.d_jobs.is_empty(),
            Move::HangD,
        );
        moves
    }

    fn make(&mut self, m: Move) {
        match m {
            Move::HearP => self.hear_p(),
            Move::HearD => self.hear_d(),
            Move::LoseP => self.lose(true),
            Move::LoseD => self.lose(false),
            Move::DoubleP => self.double(true),
            Move::DoubleD => self.double(false),
            Move::SwapP => {
                self.budget.swaps -= 1;
                self.to_p.swap(0, 1);
            }
            Move::SwapD => {
                self.budget.swaps -= 1;
                self.to_d.swap(0, 1);
            }
            Move::MakeId => {
                self.p_jobs[0] = AtP::Host { told: true };
                self.source(SourceEvent::Id(vec![1]));
            }
            Move::Meet => {
                self.p_jobs.pop_front();
                self.d_jobs.pop_front();
                self.source(SourceEvent::Opened);
                self.sink(SinkEvent::Opened);
            }
            Move::Gather => {
                if let Some(AtP::Gather(ticket)) = self.p_jobs.front().cloned() {
                    self.p_jobs[0] = AtP::Posted(ticket);
                    self.source(SourceEvent::Gathered { ticket });
                }
            }
            Move::GivenAway => {
                self.budget.stale -= 1;
                if let Some(AtP::Gather(ticket)) = self.p_jobs.pop_front() {
                    self.source(SourceEvent::Stale { ticket, page: 0 });
                }
            }
            Move::Transfer => self.transfer(),
            Move::BeginWrite => {
                if let Some(AtD::Got { ticket, pages }) = self.d_jobs.pop_front() {
                    self.d_jobs.push_front(AtD::Writing { ticket, pages });
                }
            }
            Move::Written { intact } => self.written(intact),
            Move::Skipped => {
                if let Some(ticket) = self.d_jobs.pop_front().and_then(|job| job.ticket()) {
                    let verdict = Ok(());
                    self.sink(SinkEvent::Received { ticket, verdict });
                }
            }
            Move::Cancel(pull) => {
                self.budget.cancels -= 1;
                self.sink(SinkEvent::Cancel { pull });
            }
            Move::Close => {
                self.budget.closes -= 1;
                self.sink(SinkEvent::Close);
            }
            Move::Kill => {
                self.budget.kills -= 1;
                self.p_alive = false;
                self.source = None;
                self.to_p.clear();
                self.p_jobs.clear();
                self.p_thread = Thread::Ended;
            }
            Move::ConnectionLost => self.sink(SinkEvent::PeerEnded("gone".into())),
            Move::BreakP => {
                self.budget.breaks -= 1;
                self.source(SourceEvent::Broken("broken".into()));
            }
            Move::BreakD => {
                self.budget.breaks -= 1;
                self.sink(SinkEvent::Broken("broken".into()));
            }
            Move::EndThreadP => {
                self.p_thread = Thread::Ended;
                self.source(SourceEvent::ThreadEnded);
            }
            Move::EndThreadD => {
                self.d_thread = Thread::Ended;
                self.sink(SinkEvent::ThreadEnded);
            }
            Move::HangP => {
                self.budget.hangs -= 1;
                self.p_thread = Thread::Hung;
            }
            Move::HangD => {
                self.budget.hangs -= 1;
                self.d_thread = Thread::Hung;
            }
            Move::Tick => {
                self.now = self.now.max(self.due().unwrap_or_default());
                self.sink(SinkEvent::Tick);
                self.source(SourceEvent::Tick);
            }
        }
        self.check();
    }

    fn lose(&mut self, p: bool) {
        self.budget.losses -= 1;
        if p { &mut self.to_p } else { &mut self.to_d }.pop_front();
    }

    fn double(&mut self, p: bool) {
        self.budget.doubles -= 1;
        let words = if p { &mut self.to_p } else { &mut self.to_d };
        let again = words[0].clone();
        words.push_front(again);
    }

    fn hear_p(&mut self) {
        match self.to_p.pop_front() {
            Some(Word::Open) if self.source.is_none() && self.p_alive => {
                let (source, actions) = Source::new(LIMITS, self.now);
                self.source = Some(source);
                self.act_p(actions);
            }
            Some(Word::Read(ticket, pages)) => self.source(SourceEvent::Read { ticket, pages }),
            Some(Word::End) => self.source(SourceEvent::PeerEnded("told".into())),
            _ => {}
        }
    }

    fn hear_d(&mut self) {
        match self.to_d.pop_front() {
            Some(Word::Id) => self.sink(SinkEvent::Id(vec![1])),
            Some(Word::Send(ticket, seq)) => self.sink(SinkEvent::Announced { ticket, seq }),
            Some(Word::Stale(ticket, page)) => {
                let code = None;
                self.sink(SinkEvent::Stale { ticket, page, code })
            }
            Some(Word::End) => self.sink(SinkEvent::PeerEnded("told".into())),
            _ => {}
        }
    }

    fn transfer(&mut self) {
        if let (Some(AtP::Posted(sent)), Some(AtD::Receive { ticket, pages })) =
            (self.p_jobs.pop_front(), self.d_jobs.pop_front())
        {
            assert_eq!(sent, ticket, "a send met another ticket's receive");
            self.d_jobs.push_front(AtD::Got { ticket, pages });
            self.source(SourceEvent::Sent { ticket });
        }
    }

    fn written(&mut self, intact: bool) {
        let Some(AtD::Writing { ticket, pages }) = self.d_jobs.pop_front() else {
            return;
        };
        let verdict = if intact {
            self.verified.extend(pages.iter().map(|p| p.dst));
            Ok(())
        } else {
            self.budget.corrupt -= 1;
            Err((Code::Checksum, "flipped".to_owned()))
        };
        self.sink(SinkEvent::Received { ticket, verdict });
    }

    fn check(&self) {
        let (free, held) = self.sink.slabs();
        assert_eq!(free + held, LIMITS.slabs, "D's slabs");
        if let Some(source) = &self.source {
            let (free, busy) = source.slabs();
            assert_eq!(free + busy, LIMITS.slabs, "P's slabs");
        }
        for job in &self.d_jobs {
            for page in job.pages() {
                let over = self.wanted.iter().any(|(pull, pages)| {
                    self.ended.contains_key(pull) && pages.contains(&page.dst)
                });
                assert!(
                    !over,
                    "page {} may be written after its pull ended",
                    page.dst
                );
            }
        }
    }

    /// Nothing moves any more.
    fn assert_at_rest(&self) {
        assert_eq!(
            self.ended.len(),
            self.wanted.len(),
            "a pull waits for ever: {self:?}"
        );
        let rests = |phase, idle| idle || matches!(phase, Phase::Over | Phase::Abandoned);
        assert!(rests(self.sink.phase(), self.sink.is_idle()), "{self:?}");
        if let Some(source) = &self.source {
            assert!(rests(source.phase(), source.is_idle()), "{self:?}");
        }
    }
}

struct Explored {
    states: usize,
    /// Outcome of each pull, and the phase D's communicator rests in.
    rests: HashSet<(Vec<&'static str>, Phase)>,
}

impl Explored {
    fn has(&self, outcomes: &[&'static str], phase: Phase) -> bool {
        self.rests.contains(&(outcomes.to_vec(), phase))
    }
}

fn explore(start: Relay) -> Explored {
    let fingerprint = |relay: &Relay| {
        let mut hasher = DefaultHasher::new();
        relay.hash(&mut hasher);
        hasher.finish()
    };
    let mut seen = HashSet::from([fingerprint(&start)]);
    let mut queue = VecDeque::from([start]);
    let mut rests = HashSet::new();
    while let Some(relay) = queue.pop_front() {
        let moves = relay.moves();
        if moves.is_empty() {
            relay.assert_at_rest();
            rests.insert((relay.ended.values().copied().collect(), relay.sink.phase()));
        }
        for m in moves {
            let mut next = relay.clone();
            next.make(m);
            if seen.insert(fingerprint(&next)) {
                queue.push_back(next);
            }
        }
    }
    Explored {
        states: seen.len(),
        rests,
    }
}

#[test]
fn without_faults_every_order_delivers_every_page() {
    let explored = explore(Relay::new(&[3, 1, 2], Budget::default()));
    assert_eq!(
        explored.rests,
        HashSet::from([(vec!["done", "done", "done"], Phase::Open)])
    );
    assert!(explored.states > 100, "{}", explored.states);
}

#[test]
fn lost_doubled_and_reordered_messages_end_every_pull() {
    for budget in [
        Budget {
            losses: 1,
            ..Budget::default()
        },
        Budget {
            doubles: 1,
            ..Budget::default()
        },
        Budget {
            swaps: 2,
            ..Budget::default()
        },
        Budget {
            losses: 1,
            doubles: 1,
            swaps: 1,
            hangs: 1,
            ..Budget::default()
        },
    ] {
        let explored = explore(Relay::new(&[2, 1], budget.clone()));
        assert!(explored.has(&["done", "done"], Phase::Open), "{budget:?}");
        assert!(
            explored
                .rests
                .iter()
                .any(|(ends, _)| ends.contains(&"broken")),
            "{budget:?}"
        );
    }
}

#[test]
fn cancels_stale_pages_and_flipped_bits_spoil_only_their_own_pull() {
    let budget = Budget {
        cancels: 1,
        stale: 1,
        corrupt: 1,
        ..Budget::default()
    };
    let explored = explore(Relay::new(&[2, 2], budget));
    assert!(
        explored
            .rests
            .iter()
            .all(|(ends, phase)| !ends.contains(&"broken") && *phase == Phase::Open)
    );
    for end in ["cancelled", "stale", "checksum"] {
        assert!(explored.has(&[end, "done"], Phase::Open), "{end}");
    }
}

#[test]
fn a_dead_peer_and_a_hanging_abort_leave_nobody_waiting() {
    let budget = Budget {
        kills: 1,
        hangs: 1,
        cancels: 1,
        ..Budget::default()
    };
    let explored = explore(Relay::new(&[2, 1], budget));
    assert!(explored.has(&["broken", "broken"], Phase::Over));
    assert!(explored.has(&["broken", "broken"], Phase::Abandoned));
    assert!(
        explored.has(&["done", "done"], Phase::Abandoned),
        "killed when all was done"
    );
}

#[test]
fn operations_that_fail_on_either_side_break_both() {
    let budget = Budget {
        breaks: 1,
        hangs: 1,
        losses: 1,
        closes: 1,
        ..Budget::default()
    };
    let explored = explore(Relay::new(&[2], budget));
    assert!(explored.has(&["broken"], Phase::Over));
    assert!(explored.has(&["broken"], Phase::Abandoned));
    assert!(explored.has(&["done"], Phase::Over), "closed when idle");
}

#[test]
fn a_send_out_of_order_ends_the_communicator_before_a_receive_is_posted() {
    let page = |page| PullPage {
        src: Sealed {
            page,
            generation: 2,
            sum: 0,
        },
        dst: page,
    };
    let (mut sink, _) = Sink::new(LIMITS, 0);
    let pages = vec![page(0), page(1)];
    sink.step(SinkEvent::Pull { pull: 0, pages }, 0);
    sink.step(SinkEvent::Id(vec![1]), 0);
    sink.step(SinkEvent::Opened, 0);
    let actions = sink.step(SinkEvent::Announced { ticket: 1, seq: 1 }, 0);
    assert_eq!(sink.phase(), Phase::Aborting);
    assert!(
        !actions
            .iter()
            .any(|a| matches!(a, SinkAction::Receive { .. }))
    );
    assert!(actions.contains(&SinkAction::Abort));
}

#[test]
fn the_breaker_doubles_its_pause_and_forgets_after_success() {
    let mut breaker = Breaker::default();
    assert!(breaker.allows(0));
    breaker.failed(1000);
    assert!(!breaker.allows(30_999) && breaker.allows(31_000));
    breaker.failed(31_000);
    assert!(!breaker.allows(90_999) && breaker.allows(91_000));
    breaker.full(0);
    assert!(!breaker.allows(90_999), "a full peer shortens nothing");
    breaker.worked();
    assert!(breaker.allows(0));
}
