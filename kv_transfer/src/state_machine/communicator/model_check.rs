//! Both sides, both threads and the two directions between them, explored exhaustively: every order
//! of events, with a budget of faults. The assertions of `Relay::check` and `explore` hold in every
//! state that can be reached.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::protocol::{GroupId, PageDigest};
use crate::reason_code::ReasonCode;
use crate::state_machine::PullError;
use crate::state_machine::decode::PullPage;

const GROUP: GroupId = 4;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum WireMessage {
    Open,
    Id,
    Read(Ticket, Vec<(u32, u64)>),
    Send(Ticket, u64),
    Stale(Ticket, u32),
    CommEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum AtP {
    Host { is_announced: bool },
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
enum Transition {
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
    receiver: SlabReceiver,
    sender: Option<SlabSender>,
    p_alive: bool,
    to_p: VecDeque<WireMessage>,
    to_d: VecDeque<WireMessage>,
    p_jobs: VecDeque<AtP>,
    d_jobs: VecDeque<AtD>,
    p_thread: Thread,
    d_thread: Thread,
    wanted: BTreeMap<u64, Vec<u32>>,
    verified: Vec<u32>,
    ended: BTreeMap<u64, &'static str>,
}

const LIMITS: SlabLimits = SlabLimits {
    slabs: 2,
    pages_per_slab: 1,
    open_ms: 10,
    op_ms: 5,
    abort_ms: 7,
};

impl Relay {
    /// Pulls of so many pages each.
    fn new(pulls: &[u32], budget: Budget) -> Self {
        let (receiver, actions) = SlabReceiver::new(LIMITS, 0);
        let mut relay = Self {
            now: 0,
            budget,
            receiver,
            sender: None,
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
                    src: PageDigest {
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
            relay.receiver(ReceiverEvent::Pull {
                pull: pull as u64,
                group: GROUP,
                pages,
            });
        }
        relay
    }

    fn receiver(&mut self, event: ReceiverEvent) {
        let actions = self.receiver.apply_event(event, self.now);
        self.act_d(actions);
    }

    fn sender(&mut self, event: SenderEvent) {
        if let Some(sender) = &mut self.sender {
            let actions = sender.apply_event(event, self.now);
            self.act_p(actions);
        }
    }

    fn act_d(&mut self, actions: Vec<ReceiverAction>) {
        let mut revoked = vec![]; // reported after the other actions, as the I/O layer does
        for action in actions {
            match action {
                ReceiverAction::Ask => self.to_p.push_back(WireMessage::Open),
                ReceiverAction::Join(_) => self.d_jobs.push_back(AtD::Join),
                ReceiverAction::Read {
                    ticket,
                    group,
                    pages,
                } => {
                    assert_eq!(group, GROUP, "pages of the pull's group are asked for");
                    self.to_p.push_back(WireMessage::Read(
                        ticket,
                        pages
                            .iter()
                            .map(|p| (p.src.page, p.src.generation))
                            .collect(),
                    ));
                }
                ReceiverAction::Receive(SlabReceive { ticket, pages, .. }) => {
                    self.d_jobs.push_back(AtD::Receive { ticket, pages });
                }
                ReceiverAction::Revoke { ticket } if self.revoke(ticket) => revoked.push(ticket),
                ReceiverAction::Revoke { .. } => {}
                ReceiverAction::End {
                    pull,
                    pages,
                    result,
                } => self.pull_ended(pull, pages, &result),
                ReceiverAction::Comm(CommAction::SendEnd(_)) => {
                    self.to_p.push_back(WireMessage::CommEnd)
                }
                ReceiverAction::Comm(CommAction::Abort) => {
                    assert_eq!(self.d_thread, Thread::Running, "aborted twice");
                    self.d_thread = Thread::Aborted;
                    // What has not started never starts; a page being written is written to its
                    // end.
                    self.d_jobs.retain(|job| matches!(job, AtD::Writing { .. }));
                }
                ReceiverAction::Comm(CommAction::Leak) => assert_ne!(self.d_thread, Thread::Ended),
                ReceiverAction::Comm(CommAction::Forget) => {
                    assert_eq!(self.d_thread, Thread::Ended)
                }
            }
        }
        for ticket in revoked {
            self.receiver(ReceiverEvent::Revoked { ticket });
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

    fn pull_ended(&mut self, pull: u64, pages: usize, result: &Result<(), PullError>) {
        let name = match result {
            Ok(()) => "done",
            Err(PullError::Failed(ReasonCode::StalePage, _)) => "stale",
            Err(PullError::Failed(..)) => "checksum",
            Err(PullError::Cancelled) => "cancelled",
            Err(PullError::Broken(_)) => "broken",
        };
        assert_eq!(
            self.ended.insert(pull, name),
            None,
            "pull {pull} ended twice"
        );
        if result.is_ok() {
            let wanted = &self.wanted[&pull];
            assert_eq!(pages, wanted.len());
            assert!(
                wanted.iter().all(|page| self.verified.contains(page)),
                "an unverified page was delivered"
            );
        }
    }

    fn act_p(&mut self, actions: Vec<SenderAction>) {
        for action in actions {
            match action {
                SenderAction::Host => self.p_jobs.push_back(AtP::Host {
                    is_announced: false,
                }),
                SenderAction::SendId(_) => self.to_d.push_back(WireMessage::Id),
                SenderAction::Send(SlabSend { ticket, .. }) => {
                    self.p_jobs.push_back(AtP::Gather(ticket))
                }
                SenderAction::Announce { ticket, seq } => {
                    self.to_d.push_back(WireMessage::Send(ticket, seq));
                }
                SenderAction::SendStale { ticket, page } => {
                    self.to_d.push_back(WireMessage::Stale(ticket, page));
                }
                SenderAction::Comm(CommAction::SendEnd(_)) => {
                    self.to_d.push_back(WireMessage::CommEnd)
                }
                SenderAction::Comm(CommAction::Abort) => {
                    assert_eq!(self.p_thread, Thread::Running, "aborted twice");
                    self.p_thread = Thread::Aborted;
                    self.p_jobs.clear();
                }
                SenderAction::Comm(CommAction::Leak) => assert_ne!(self.p_thread, Thread::Ended),
                SenderAction::Comm(CommAction::Forget) => assert_eq!(self.p_thread, Thread::Ended),
            }
        }
    }

    fn due(&self) -> Option<u64> {
        let p = self
            .sender
            .as_ref()
            .and_then(|sender| sender.life().next_due());
        [self.receiver.life().next_due(), p]
            .into_iter()
            .flatten()
            .min()
    }

    fn transitions(&self) -> Vec<Transition> {
        let mut transitions = vec![];
        let b = &self.budget;
        let mut offer = |possible: bool, m: Transition| {
            if possible {
                transitions.push(m);
            }
        };
        let runs = |thread| thread == Thread::Running;
        offer(!self.to_p.is_empty(), Transition::HearP);
        offer(!self.to_d.is_empty(), Transition::HearD);
        let p = self.p_jobs.front();
        let d = self.d_jobs.front();
        offer(
            matches!(
                p,
                Some(AtP::Host {
                    is_announced: false
                })
            ),
            Transition::MakeId,
        );
        offer(
            matches!(
                (p, d),
                (Some(AtP::Host { is_announced: true }), Some(AtD::Join))
            ),
            Transition::Meet,
        );
        offer(matches!(p, Some(AtP::Gather(_))), Transition::Gather);
        offer(
            matches!((p, d), (Some(AtP::Posted(_)), Some(AtD::Receive { .. }))),
            Transition::Transfer,
        );
        if let Some(AtD::Got { pages, .. }) = d {
            offer(!pages.is_empty(), Transition::BeginWrite);
            offer(pages.is_empty(), Transition::Skipped);
        }
        offer(
            matches!(d, Some(AtD::Writing { .. })),
            Transition::Written { intact: true },
        );
        offer(self.p_thread == Thread::Aborted, Transition::EndThreadP);
        offer(
            self.d_thread == Thread::Aborted && self.d_jobs.is_empty(),
            Transition::EndThreadD,
        );
        offer(
            !self.p_alive && self.to_d.is_empty() && self.receiver.life().phase().is_usable(),
            Transition::ConnectionLost,
        );
        let quiet = transitions.is_empty();
        let mut offer = |possible: bool, m: Transition| {
            if possible {
                transitions.push(m);
            }
        };
        offer(quiet && self.due().is_some(), Transition::Tick);
        offer(b.losses > 0 && !self.to_p.is_empty(), Transition::LoseP);
        offer(b.losses > 0 && !self.to_d.is_empty(), Transition::LoseD);
        offer(b.doubles > 0 && !self.to_p.is_empty(), Transition::DoubleP);
        offer(b.doubles > 0 && !self.to_d.is_empty(), Transition::DoubleD);
        offer(b.swaps > 0 && self.to_p.len() > 1, Transition::SwapP);
        offer(b.swaps > 0 && self.to_d.len() > 1, Transition::SwapD);
        offer(
            b.stale > 0 && matches!(p, Some(AtP::Gather(_))),
            Transition::GivenAway,
        );
        offer(
            b.corrupt > 0 && matches!(d, Some(AtD::Writing { .. })),
            Transition::Written { intact: false },
        );
        for &pull in self.wanted.keys() {
            offer(
                b.cancels > 0 && !self.ended.contains_key(&pull),
                Transition::Cancel(pull),
            );
        }
        offer(b.closes > 0 && self.receiver.is_idle(), Transition::Close);
        offer(b.kills > 0 && self.p_alive, Transition::Kill);
        offer(
            b.breaks > 0 && runs(self.p_thread) && p.is_some(),
            Transition::BreakP,
        );
        offer(
            b.breaks > 0
                && runs(self.d_thread)
                && d.is_some_and(|job| !matches!(job, AtD::Writing { .. })),
            Transition::BreakD,
        );
        offer(
            b.hangs > 0 && self.p_thread == Thread::Aborted,
            Transition::HangP,
        );
        offer(
            b.hangs > 0 && self.d_thread == Thread::Aborted && self.d_jobs.is_empty(),
            Transition::HangD,
        );
        transitions
    }

    fn apply(&mut self, m: Transition) {
        match m {
            Transition::HearP => self.hear_p(),
            Transition::HearD => self.hear_d(),
            Transition::LoseP => self.lose(true),
            Transition::LoseD => self.lose(false),
            Transition::DoubleP => self.double(true),
            Transition::DoubleD => self.double(false),
            Transition::SwapP => {
                self.budget.swaps -= 1;
                self.to_p.swap(0, 1);
            }
            Transition::SwapD => {
                self.budget.swaps -= 1;
                self.to_d.swap(0, 1);
            }
            Transition::MakeId => {
                self.p_jobs[0] = AtP::Host { is_announced: true };
                self.sender(SenderEvent::Id(vec![1]));
            }
            Transition::Meet => {
                self.p_jobs.pop_front();
                self.d_jobs.pop_front();
                self.sender(SenderEvent::Comm(CommEvent::Opened));
                self.receiver(ReceiverEvent::Comm(CommEvent::Opened));
            }
            Transition::Gather => {
                if let Some(AtP::Gather(ticket)) = self.p_jobs.front().cloned() {
                    self.p_jobs[0] = AtP::Posted(ticket);
                    self.sender(SenderEvent::Gathered { ticket });
                }
            }
            Transition::GivenAway => {
                self.budget.stale -= 1;
                if let Some(AtP::Gather(ticket)) = self.p_jobs.pop_front() {
                    self.sender(SenderEvent::Stale { ticket, page: 0 });
                }
            }
            Transition::Transfer => self.transfer(),
            Transition::BeginWrite => {
                if let Some(AtD::Got { ticket, pages }) = self.d_jobs.pop_front() {
                    self.d_jobs.push_front(AtD::Writing { ticket, pages });
                }
            }
            Transition::Written { intact } => self.written(intact),
            Transition::Skipped => {
                if let Some(ticket) = self.d_jobs.pop_front().and_then(|job| job.ticket()) {
                    let verdict = Ok(());
                    self.receiver(ReceiverEvent::Received { ticket, verdict });
                }
            }
            Transition::Cancel(pull) => {
                self.budget.cancels -= 1;
                self.receiver(ReceiverEvent::Cancel { pull });
            }
            Transition::Close => {
                self.budget.closes -= 1;
                self.receiver(ReceiverEvent::Comm(CommEvent::End(CommEnd::Closed)));
            }
            Transition::Kill => {
                self.budget.kills -= 1;
                self.p_alive = false;
                self.sender = None;
                self.to_p.clear();
                self.p_jobs.clear();
                self.p_thread = Thread::Ended;
            }
            Transition::ConnectionLost => self.receiver(ReceiverEvent::Comm(CommEvent::End(
                CommEnd::ByPeer("gone".into()),
            ))),
            Transition::BreakP => {
                self.budget.breaks -= 1;
                self.sender(SenderEvent::Comm(CommEvent::End(CommEnd::Failed(
                    "broken".into(),
                ))));
            }
            Transition::BreakD => {
                self.budget.breaks -= 1;
                self.receiver(ReceiverEvent::Comm(CommEvent::End(CommEnd::Failed(
                    "broken".into(),
                ))));
            }
            Transition::EndThreadP => {
                self.p_thread = Thread::Ended;
                self.sender(SenderEvent::Comm(CommEvent::ThreadEnded));
            }
            Transition::EndThreadD => {
                self.d_thread = Thread::Ended;
                self.receiver(ReceiverEvent::Comm(CommEvent::ThreadEnded));
            }
            Transition::HangP => {
                self.budget.hangs -= 1;
                self.p_thread = Thread::Hung;
            }
            Transition::HangD => {
                self.budget.hangs -= 1;
                self.d_thread = Thread::Hung;
            }
            Transition::Tick => {
                self.now = self.now.max(self.due().unwrap_or_default());
                self.receiver(ReceiverEvent::Comm(CommEvent::Tick));
                self.sender(SenderEvent::Comm(CommEvent::Tick));
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
            Some(WireMessage::Open) if self.sender.is_none() && self.p_alive => {
                let (sender, actions) = SlabSender::new(LIMITS, self.now);
                self.sender = Some(sender);
                self.act_p(actions);
            }
            Some(WireMessage::Read(ticket, pages)) => {
                self.sender(SenderEvent::Read { ticket, pages })
            }
            Some(WireMessage::CommEnd) => self.sender(SenderEvent::Comm(CommEvent::End(
                CommEnd::ByPeer("ended by the peer".into()),
            ))),
            _ => {}
        }
    }

    fn hear_d(&mut self) {
        match self.to_d.pop_front() {
            Some(WireMessage::Id) => self.receiver(ReceiverEvent::Id(vec![1])),
            Some(WireMessage::Send(ticket, seq)) => {
                self.receiver(ReceiverEvent::Announced { ticket, seq })
            }
            Some(WireMessage::Stale(ticket, page)) => {
                let code = None;
                self.receiver(ReceiverEvent::Stale { ticket, page, code })
            }
            Some(WireMessage::CommEnd) => self.receiver(ReceiverEvent::Comm(CommEvent::End(
                CommEnd::ByPeer("ended by the peer".into()),
            ))),
            _ => {}
        }
    }

    fn transfer(&mut self) {
        if let (Some(AtP::Posted(sent)), Some(AtD::Receive { ticket, pages })) =
            (self.p_jobs.pop_front(), self.d_jobs.pop_front())
        {
            assert_eq!(sent, ticket, "a send met another ticket's receive");
            self.d_jobs.push_front(AtD::Got { ticket, pages });
            self.sender(SenderEvent::Sent { ticket });
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
            Err((ReasonCode::Checksum, "flipped".to_owned()))
        };
        self.receiver(ReceiverEvent::Received { ticket, verdict });
    }

    fn check(&self) {
        let (free, usage) = self.receiver.slabs();
        assert_eq!(free + usage, LIMITS.slabs, "D's slabs");
        if let Some(sender) = &self.sender {
            let (free, busy) = sender.slabs();
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
        let rests = |phase, idle| idle || matches!(phase, CommPhase::Over | CommPhase::Leaked);
        assert!(
            rests(self.receiver.life().phase(), self.receiver.is_idle()),
            "{self:?}"
        );
        if let Some(sender) = &self.sender {
            assert!(rests(sender.life().phase(), sender.is_idle()), "{self:?}");
        }
    }
}

struct Explored {
    states: usize,
    /// Outcome of each pull, and the phase D's communicator rests in.
    rests: HashSet<(Vec<&'static str>, CommPhase)>,
}

impl Explored {
    fn has(&self, outcomes: &[&'static str], phase: CommPhase) -> bool {
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
        let transitions = relay.transitions();
        if transitions.is_empty() {
            relay.assert_at_rest();
            rests.insert((
                relay.ended.values().copied().collect(),
                relay.receiver.life().phase(),
            ));
        }
        for m in transitions {
            let mut next = relay.clone();
            next.apply(m);
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
        HashSet::from([(vec!["done", "done", "done"], CommPhase::Open)])
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
        assert!(
            explored.has(&["done", "done"], CommPhase::Open),
            "{budget:?}"
        );
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
            .all(|(ends, phase)| !ends.contains(&"broken") && *phase == CommPhase::Open)
    );
    for end in ["cancelled", "stale", "checksum"] {
        assert!(explored.has(&[end, "done"], CommPhase::Open), "{end}");
    }
}

#[test]
fn dead_peer_and_hanging_abort_leave_no_pull_waiting() {
    let budget = Budget {
        kills: 1,
        hangs: 1,
        cancels: 1,
        ..Budget::default()
    };
    let explored = explore(Relay::new(&[2, 1], budget));
    assert!(explored.has(&["broken", "broken"], CommPhase::Over));
    assert!(explored.has(&["broken", "broken"], CommPhase::Leaked));
    assert!(
        explored.has(&["done", "done"], CommPhase::Leaked),
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
    assert!(explored.has(&["broken"], CommPhase::Over));
    assert!(explored.has(&["broken"], CommPhase::Leaked));
    assert!(explored.has(&["done"], CommPhase::Over), "closed when idle");
}

#[test]
fn send_out_of_order_ends_the_communicator_before_a_receive_is_posted() {
    let page = |page| PullPage {
        src: PageDigest {
            page,
            generation: 2,
            sum: 0,
        },
        dst: page,
    };
    let (mut receiver, _) = SlabReceiver::new(LIMITS, 0);
    let pages = vec![page(0), page(1)];
    receiver.apply_event(
        ReceiverEvent::Pull {
            pull: 0,
            group: GROUP,
            pages,
        },
        0,
    );
    receiver.apply_event(ReceiverEvent::Id(vec![1]), 0);
    receiver.apply_event(ReceiverEvent::Comm(CommEvent::Opened), 0);
    let actions = receiver.apply_event(ReceiverEvent::Announced { ticket: 1, seq: 1 }, 0);
    assert_eq!(receiver.life().phase(), CommPhase::Aborting);
    assert!(
        !actions
            .iter()
            .any(|a| matches!(a, ReceiverAction::Receive(SlabReceive { .. })))
    );
    assert!(actions.contains(&ReceiverAction::Comm(CommAction::Abort)));
}

#[test]
fn breaker_doubles_its_pause_and_forgets_after_success() {
    let mut breaker = TransportBreaker::default();
    assert!(breaker.allows_attempt(0));
    breaker.record_failure(1000);
    assert!(!breaker.allows_attempt(30_999) && breaker.allows_attempt(31_000));
    breaker.record_failure(31_000);
    assert!(!breaker.allows_attempt(90_999) && breaker.allows_attempt(91_000));
    breaker.record_full(0);
    assert!(
        !breaker.allows_attempt(90_999),
        "a full peer shortens nothing"
    );
    breaker.record_success();
    assert!(breaker.allows_attempt(0));
}
