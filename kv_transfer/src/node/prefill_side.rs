//! P's half of the control loop: rooms offered by the engine, and the OPENs of decode ranks.

use std::collections::{HashMap, VecDeque};

use super::config::NodeLimits;
use super::context::{NodeContext, Timer};
use super::records::events::NodeEvent;
use super::records::room_history::Side;
use crate::protocol::{Msg, Sealed, clipped};
use crate::reason_code::Code;
use crate::state_machine::Peer;
use crate::state_machine::pending_opens::{
    EVERY_ATTEMPT, ParkError, Parked, ParkedOpen, Tombstones,
};
use crate::state_machine::prefill::{Action, Event, Finish, Phase, Room};
use crate::transport::copy_threads::Job;

/// Pages on_hashed in one job; a few milliseconds of a copy thread, so that pulls get their turn.
const HASH_BATCH: usize = 256;
/// Hint to a decode rank whose OPEN found the table full.
const RETRY_AFTER_MS: u64 = 1000;

struct PrefillEntry {
    room: Room,
    hashing: bool,
    to_hash: VecDeque<(u32, u32, u64)>,
}

impl PrefillEntry {
    /// The engine has not finished the prompt.
    fn is_computing(&self) -> bool {
        matches!(self.room.phase, Phase::Waiting | Phase::Prefilling)
    }
}

/// What an OPEN asks.
pub(super) struct Question {
    pub room: u64,
    pub attempt: u32,
    pub prompt_hash: Vec<u8>,
    pub start_page: u32,
    pub deadline_ms: u64,
}

/// P's rooms, and the OPENs that came before their requests.
pub(super) struct PrefillSide {
    rooms: HashMap<u64, PrefillEntry>,
    parked: Parked,
    tombstones: Tombstones,
    /// No OPEN of an unknown room is accepted any more.
    pub is_draining: bool,
}

impl PrefillSide {
    pub fn new(limits: &NodeLimits) -> Self {
        Self {
            rooms: HashMap::new(),
            parked: Parked::new(limits.parked_opens, limits.parked_opens_per_peer),
            tombstones: Tombstones::new(limits.ended_rooms),
            is_draining: false,
        }
    }

    pub fn has(&self, room: u64) -> bool {
        self.rooms.contains_key(&room)
    }

    pub fn num_parked(&self) -> usize {
        self.parked.len()
    }

    /// The engine has not finished the prompt of some room.
    pub fn is_computing(&self) -> bool {
        self.rooms.values().any(PrefillEntry::is_computing)
    }

    /// The connection of these OPENs is lost.
    pub fn forget_opens_of(&mut self, peer: Peer) {
        self.parked.drop_peer(peer, None);
    }

    pub fn offer(
        &mut self,
        ctx: &mut NodeContext,
        room: u64,
        attempt: u32,
        prompt_hash: Vec<u8>,
        deadline_ms: u64,
    ) {
        let deadline = ctx.now().saturating_add(deadline_ms);
        let machine = Room::new(attempt, prompt_hash, deadline, ctx.config.lease_ms);
        self.tombstones.revive(room);
        ctx.enter(
            ctx.entry(
                Side::Prefill,
                room,
                attempt,
                machine.phase.name(),
                "offered".into(),
            ),
            false,
        );
        ctx.timers.set(&Timer::Prefill(room), machine.next_due());
        self.rooms.insert(
            room,
            PrefillEntry {
                room: machine,
                hashing: false,
                to_hash: VecDeque::new(),
            },
        );
        if let Some(open) = self.parked.take(room) {
            self.set_parked_timer(ctx);
            let ParkedOpen {
                peer,
                attempt,
                prompt_hash,
                start_page,
                ..
            } = open;
            self.step(
                ctx,
                room,
                Event::Open {
                    peer,
                    attempt,
                    prompt_hash,
                    start_page,
                },
            );
        }
    }

    pub fn publish(
        &mut self,
        ctx: &mut NodeContext,
        room: u64,
        first: u32,
        pages: Vec<(u32, u64)>,
    ) {
        self.step(ctx, room, Event::Publish { first, pages });
    }

    pub fn finish(&mut self, ctx: &mut NodeContext, room: u64, finish: Finish) {
        self.step(ctx, room, Event::Finish(finish));
    }

    /// The engine gives a room up, perhaps before it offered it: then a waiting decode rank is told at once.
    pub fn abort(&mut self, ctx: &mut NodeContext, room: u64, code: Code) {
        if self.rooms.contains_key(&room) {
            return self.step(ctx, room, Event::Abort(code));
        }
        if let Some(open) = self.parked.take(room) {
            self.set_parked_timer(ctx);
            self.reject(
                ctx,
                open.peer,
                room,
                open.attempt,
                code,
                "the prefill node refused the request",
            );
        }
        if self.tombstones.get(room, 0).is_none() {
            self.tombstones.bury(room, EVERY_ATTEMPT, code);
        }
    }

    pub fn tick(&mut self, ctx: &mut NodeContext, room: u64) {
        self.step(ctx, room, Event::Tick);
    }

    pub fn on_hashed(&mut self, ctx: &mut NodeContext, room: u64, sums: Vec<(u32, Sealed)>) {
        ctx.shared.stats.lock().pages_hashed += sums.len() as u64;
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.hashing = false;
        }
        self.step(ctx, room, Event::Hashed(sums));
        self.hash_more(ctx, room);
    }

    fn hash_more(&mut self, ctx: &mut NodeContext, room: u64) {
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        if entry.hashing || entry.to_hash.is_empty() {
            return;
        }
        entry.hashing = true;
        let n = entry.to_hash.len().min(HASH_BATCH);
        let pages = entry.to_hash.drain(..n).collect();
        ctx.copier.submit(Job::Hash { room, pages });
    }

    pub fn on_open(
        &mut self,
        ctx: &mut NodeContext,
        peer: Peer,
        question: Question,
        inc_expected: &str,
        layout_hash: &str,
    ) {
        ctx.shared.stats.lock().opens_received += 1;
        let Question { room, attempt, .. } = question;
        let own = &ctx.identity.hello;
        if inc_expected != own.inc {
            let why = format!("this is incarnation {}", own.inc);
            return self.reject(ctx, peer, room, attempt, Code::PeerRestarted, &why);
        }
        if layout_hash != own.layout_hash {
            let why = format!(
                "page layout {layout_hash} of the decode node, {} here: model, dtype, page size and heads must agree",
                own.layout_hash
            );
            return self.reject(ctx, peer, room, attempt, Code::LayoutMismatch, &why);
        }
        if self.rooms.contains_key(&room) {
            let Question {
                prompt_hash,
                start_page,
                ..
            } = question;
            return self.step(
                ctx,
                room,
                Event::Open {
                    peer,
                    attempt,
                    prompt_hash,
                    start_page,
                },
            );
        }
        if let Some(code) = self.tombstones.get(room, attempt) {
            return self.reject(
                ctx,
                peer,
                room,
                attempt,
                code,
                "the room is over on the prefill node",
            );
        }
        if self.is_draining {
            return self.reject(
                ctx,
                peer,
                room,
                attempt,
                Code::Draining,
                "the prefill node takes no new requests",
            );
        }
        self.park(ctx, peer, question);
    }

    fn park(&mut self, ctx: &mut NodeContext, peer: Peer, question: Question) {
        let Question {
            room,
            attempt,
            prompt_hash,
            start_page,
            deadline_ms,
        } = question;
        let ttl_ms = ctx.config.park_ttl_ms.min(deadline_ms);
        let open = ParkedOpen {
            peer,
            attempt,
            prompt_hash,
            start_page,
            until: ctx.now() + ttl_ms,
        };
        match self.parked.park(room, open) {
            Ok(()) => {
                ctx.shared.stats.lock().opens_parked += 1;
                ctx.note(ctx.entry(
                    Side::Prefill,
                    room,
                    attempt,
                    "PARKED",
                    format!("OPEN before the request, kept {ttl_ms} ms"),
                ));
                self.set_parked_timer(ctx);
                ctx.send(
                    peer,
                    Msg::Parked {
                        room,
                        attempt,
                        ttl_ms,
                    },
                );
            }
            Err(ParkError::Full | ParkError::PeerFull) => self.reject(
                ctx,
                peer,
                room,
                attempt,
                Code::NoCapacity,
                "too many OPENs wait for their requests",
            ),
            Err(ParkError::Duplicate) => self.reject(
                ctx,
                peer,
                room,
                attempt,
                Code::DupRoom,
                "another decode rank waits for this room",
            ),
        }
    }

    pub fn expire_parked(&mut self, ctx: &mut NodeContext, now: u64) {
        for (room, open) in self.parked.expire(now) {
            self.reject(
                ctx,
                open.peer,
                room,
                open.attempt,
                Code::Unreachable,
                "the request did not arrive at the prefill node in time",
            );
        }
        self.set_parked_timer(ctx);
    }

    fn set_parked_timer(&mut self, ctx: &mut NodeContext) {
        ctx.timers.set(&Timer::Parked, self.parked.next_due());
    }

    fn reject(
        &mut self,
        ctx: &mut NodeContext,
        peer: Peer,
        room: u64,
        attempt: u32,
        code: Code,
        why: &str,
    ) {
        {
            let mut stats = ctx.shared.stats.lock();
            stats.opens_rejected += 1;
            *stats.rejects.entry(code.as_str()).or_default() += 1;
        }
        ctx.note(ctx.entry(
            Side::Prefill,
            room,
            attempt,
            "REJECT",
            format!("{code}: {why}"),
        ));
        let retry_after_ms = if code == Code::NoCapacity {
            RETRY_AFTER_MS
        } else {
            0
        };
        ctx.send(
            peer,
            Msg::Reject {
                room,
                attempt,
                code,
                message: clipped(why),
                retry_after_ms,
                connection: false,
            },
        );
    }

    pub fn on_done(&mut self, ctx: &mut NodeContext, peer: Peer, room: u64, attempt: u32) {
        self.step(ctx, room, Event::Done { peer, attempt });
    }

    pub fn on_peer_abort(
        &mut self,
        ctx: &mut NodeContext,
        peer: Peer,
        room: u64,
        attempt: u32,
        code: Code,
    ) {
        self.parked.drop_peer(peer, Some(room));
        self.set_parked_timer(ctx);
        self.step(
            ctx,
            room,
            Event::PeerAbort {
                peer,
                attempt,
                code,
            },
        );
    }

    pub fn on_peer_gone(&mut self, ctx: &mut NodeContext, peer: Peer, room: u64, code: Code) {
        self.step(ctx, room, Event::PeerGone { peer, code });
    }

    pub fn renew(&mut self, ctx: &mut NodeContext, peer: Peer, rooms: &[u64]) {
        for &room in rooms {
            self.step(ctx, room, Event::Renew { peer });
        }
    }

    /// The only place where a prefill room changes.
    fn step(&mut self, ctx: &mut NodeContext, room: u64, event: Event) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        }; // over: late words and calls are expected
        let before = entry.room.phase.name();
        let by_engine = matches!(event, Event::Publish { .. } | Event::Finish(_));
        match entry.room.step(event, now) {
            Ok(actions) => {
                let (phase, attempt, (published, _)) = (
                    entry.room.phase.clone(),
                    entry.room.attempt,
                    entry.room.progress(),
                );
                let due = entry.room.next_due();
                if phase.name() != before {
                    let note = match &phase {
                        Phase::Aborted(code) => code.to_string(),
                        Phase::Leased { .. } => format!("{published} pages"),
                        _ => String::new(),
                    };
                    ctx.enter(
                        ctx.entry(Side::Prefill, room, attempt, phase.name(), note),
                        phase.is_over(),
                    );
                }
                ctx.timers.set(&Timer::Prefill(room), due);
                for action in actions {
                    self.act(ctx, room, attempt, action);
                }
            }
            Err(illegal) => {
                ctx.report_illegal(Side::Prefill, room, &illegal);
                if by_engine {
                    // The room cannot be completed any more; both sides learn it now instead of at a deadline.
                    self.step(ctx, room, Event::Abort(Code::TransportBroken));
                }
            }
        }
    }

    fn act(&mut self, ctx: &mut NodeContext, room: u64, attempt: u32, action: Action) {
        match action {
            Action::Hash(pages) => {
                if let Some(entry) = self.rooms.get_mut(&room) {
                    entry.to_hash.extend(pages);
                }
                self.hash_more(ctx, room);
            }
            Action::Accept { peer } => {
                ctx.shared.announced.withdraw(room); // all pages are announced again
                ctx.tie(peer, Side::Prefill, room);
                let p_inc = ctx.identity.hello.inc.clone();
                ctx.send(
                    peer,
                    Msg::OpenOk {
                        room,
                        attempt,
                        p_inc,
                    },
                );
            }
            Action::Reject { peer, code, why } => self.reject(ctx, peer, room, attempt, code, &why),
            Action::Progress {
                peer,
                first_page,
                pages,
            } => {
                if let Some(conn) = ctx.conns.get(&peer) {
                    let pages = pages.iter().map(|p| (p.page, p.generation));
                    ctx.shared.announced.announce(room, &conn.peer.inc, pages);
                }
                let ids = pages.iter().map(|p| p.page).collect();
                let gens = pages.iter().map(|p| p.generation).collect();
                let sums = pages.iter().map(|p| p.sum).collect();
                ctx.send(
                    peer,
                    Msg::Progress {
                        room,
                        attempt,
                        first_page,
                        ids,
                        gens,
                        sums,
                    },
                );
            }
            Action::Final { peer, finish, root } => {
                let Finish {
                    total_pages,
                    last_page_tokens,
                    payload,
                } = finish;
                ctx.send(
                    peer,
                    Msg::Final {
                        room,
                        attempt,
                        total_pages,
                        last_page_tokens,
                        root,
                        payload,
                    },
                );
            }
            Action::SendAbort { peer, code } => ctx.send(
                peer,
                Msg::Abort {
                    room,
                    attempt,
                    code,
                },
            ),
            Action::AckAbort { peer } => ctx.send(peer, Msg::AbortAck { room, attempt }),
            Action::ReaderLeft { peer } => {
                ctx.shared.announced.withdraw(room);
                ctx.untie(Some(peer), Side::Prefill, room);
                let why = "waits for another decode rank".into();
                ctx.note(ctx.entry(Side::Prefill, room, attempt, "READER_LEFT", why));
            }
            Action::Released(code) => self.released(ctx, room, code),
        }
    }

    fn released(&mut self, ctx: &mut NodeContext, room: u64, code: Option<Code>) {
        let Some(entry) = self.rooms.remove(&room) else {
            return;
        };
        ctx.shared.announced.withdraw(room);
        ctx.timers.set(&Timer::Prefill(room), None);
        ctx.untie(entry.room.reader(), Side::Prefill, room);
        let code_for_late = entry.room.code_after_the_end();
        self.tombstones
            .bury(room, entry.room.attempt, code_for_late);
        match code {
            None => ctx.shared.stats.lock().released_done += 1,
            Some(code) => ctx.count_failure(code),
        }
        ctx.push(NodeEvent::Released { room, code });
    }
}
