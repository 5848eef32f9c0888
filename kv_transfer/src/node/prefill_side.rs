//! P's side of the control loop: rooms offered by the engine, and the OPENs of decode ranks.

use std::collections::{HashMap, VecDeque};

use super::config::NodeLimits;
use super::context::{NodeContext, NodeTimer};
use super::records::events::NodeEvent;
use super::records::room_history::RoomSide;
use crate::protocol::{Msg, PageDigest, clipped};
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::state_machine::pending_opens::{
    EVERY_ATTEMPT, EndedRooms, PendingOpen, PendingOpenError, PendingOpens,
};
use crate::state_machine::prefill::{
    PrefillAction, PrefillEvent, PrefillOutput, PrefillPhase, PrefillRoom,
};
use crate::transport::copy_threads::CopyJob;

/// Pages hashed in one job: a few milliseconds of a copy thread, so that pulls are not delayed.
const HASH_BATCH: usize = 256;
/// Hint to a decode rank whose OPEN found the table full.
const RETRY_AFTER_MS: u64 = 1000;

struct PrefillEntry {
    room: PrefillRoom,
    hashing: bool,
    to_hash: VecDeque<(u32, u32, u64)>,
}

impl PrefillEntry {
    /// The engine has not finished the prompt.
    fn is_computing(&self) -> bool {
        matches!(
            self.room.phase,
            PrefillPhase::Waiting | PrefillPhase::Prefilling
        )
    }
}

/// Fields of an OPEN.
pub(super) struct OpenMessage {
    pub room: u64,
    pub attempt: u32,
    pub prompt_hash: Vec<u8>,
    pub start_page: u32,
    pub deadline_ms: u64,
}

/// P's rooms, and the OPENs that arrived before their requests.
pub(super) struct PrefillSide {
    rooms: HashMap<u64, PrefillEntry>,
    pending_opens: PendingOpens,
    ended_rooms: EndedRooms,
    /// No OPEN of an unknown room is accepted any more.
    pub is_draining: bool,
}

impl PrefillSide {
    pub fn new(limits: &NodeLimits) -> Self {
        Self {
            rooms: HashMap::new(),
            pending_opens: PendingOpens::new(limits.pending_opens, limits.pending_opens_per_peer),
            ended_rooms: EndedRooms::new(limits.ended_rooms),
            is_draining: false,
        }
    }

    pub fn has(&self, room: u64) -> bool {
        self.rooms.contains_key(&room)
    }

    pub fn num_pending_opens(&self) -> usize {
        self.pending_opens.len()
    }

    /// The engine has not finished the prompt of some room.
    pub fn is_computing(&self) -> bool {
        self.rooms.values().any(PrefillEntry::is_computing)
    }

    /// The connection of these OPENs is lost.
    pub fn forget_opens_of(&mut self, peer: ConnectionId) {
        self.pending_opens.drop_peer(peer, None);
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
        let machine = PrefillRoom::new(attempt, prompt_hash, deadline, ctx.config.lease_ms);
        self.ended_rooms.forget(room);
        ctx.record(
            ctx.record_of(
                RoomSide::Prefill,
                room,
                attempt,
                machine.phase.name(),
                "offered".into(),
            ),
            false,
        );
        ctx.timers
            .set(&NodeTimer::Prefill(room), machine.next_due());
        self.rooms.insert(
            room,
            PrefillEntry {
                room: machine,
                hashing: false,
                to_hash: VecDeque::new(),
            },
        );
        if let Some(open) = self.pending_opens.take(room) {
            self.set_pending_timer(ctx);
            let PendingOpen {
                peer,
                attempt,
                prompt_hash,
                start_page,
                ..
            } = open;
            self.step(
                ctx,
                room,
                PrefillEvent::Open {
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
        self.step(ctx, room, PrefillEvent::Publish { first, pages });
    }

    pub fn finish(&mut self, ctx: &mut NodeContext, room: u64, finish: PrefillOutput) {
        self.step(ctx, room, PrefillEvent::Finish(finish));
    }

    /// Abort a room, perhaps before its offer: then a waiting decode rank is refused at once.
    pub fn abort(&mut self, ctx: &mut NodeContext, room: u64, code: ReasonCode) {
        if self.rooms.contains_key(&room) {
            return self.step(ctx, room, PrefillEvent::Abort(code));
        }
        if let Some(open) = self.pending_opens.take(room) {
            self.set_pending_timer(ctx);
            self.reject(
                ctx,
                open.peer,
                room,
                open.attempt,
                code,
                "the prefill node refused the request",
            );
        }
        if self.ended_rooms.get(room, 0).is_none() {
            self.ended_rooms.add(room, EVERY_ATTEMPT, code);
        }
    }

    pub fn tick(&mut self, ctx: &mut NodeContext, room: u64) {
        self.step(ctx, room, PrefillEvent::Tick);
    }

    pub fn on_hashed(&mut self, ctx: &mut NodeContext, room: u64, sums: Vec<(u32, PageDigest)>) {
        ctx.shared.stats.lock().pages_hashed += sums.len() as u64;
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.hashing = false;
        }
        self.step(ctx, room, PrefillEvent::Hashed(sums));
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
        ctx.copy_threads.submit(CopyJob::Hash { room, pages });
    }

    pub fn on_open(
        &mut self,
        ctx: &mut NodeContext,
        peer: ConnectionId,
        open: OpenMessage,
        inc_expected: &str,
        layout_hash: &str,
    ) {
        ctx.shared.stats.lock().opens_received += 1;
        let OpenMessage { room, attempt, .. } = open;
        let own = &ctx.identity.hello;
        if inc_expected != own.inc {
            let why = format!("this is incarnation {}", own.inc);
            return self.reject(ctx, peer, room, attempt, ReasonCode::PeerRestarted, &why);
        }
        if layout_hash != own.layout_hash {
            let why = format!(
                "page layout {layout_hash} of the decode node, {} here: model, dtype, page size and heads must agree",
                own.layout_hash
            );
            return self.reject(ctx, peer, room, attempt, ReasonCode::LayoutMismatch, &why);
        }
        if self.rooms.contains_key(&room) {
            let OpenMessage {
                prompt_hash,
                start_page,
                ..
            } = open;
            return self.step(
                ctx,
                room,
                PrefillEvent::Open {
                    peer,
                    attempt,
                    prompt_hash,
                    start_page,
                },
            );
        }
        if let Some(code) = self.ended_rooms.get(room, attempt) {
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
                ReasonCode::Draining,
                "the prefill node takes no new requests",
            );
        }
        self.keep_pending(ctx, peer, open);
    }

    fn keep_pending(&mut self, ctx: &mut NodeContext, peer: ConnectionId, open: OpenMessage) {
        let OpenMessage {
            room,
            attempt,
            prompt_hash,
            start_page,
            deadline_ms,
        } = open;
        let ttl_ms = ctx.config.park_ttl_ms.min(deadline_ms);
        let open = PendingOpen {
            peer,
            attempt,
            prompt_hash,
            start_page,
            until: ctx.now() + ttl_ms,
        };
        match self.pending_opens.add(room, open) {
            Ok(()) => {
                ctx.shared.stats.lock().opens_parked += 1;
                ctx.note(ctx.record_of(
                    RoomSide::Prefill,
                    room,
                    attempt,
                    "PARKED",
                    format!("OPEN before the request, kept {ttl_ms} ms"),
                ));
                self.set_pending_timer(ctx);
                ctx.send(
                    peer,
                    Msg::OpenPending {
                        room,
                        attempt,
                        ttl_ms,
                    },
                );
            }
            Err(PendingOpenError::Full | PendingOpenError::PeerFull) => self.reject(
                ctx,
                peer,
                room,
                attempt,
                ReasonCode::NoCapacity,
                "too many OPENs wait for their requests",
            ),
            Err(PendingOpenError::Duplicate) => self.reject(
                ctx,
                peer,
                room,
                attempt,
                ReasonCode::DupRoom,
                "another decode rank waits for this room",
            ),
        }
    }

    pub fn expire_pending_opens(&mut self, ctx: &mut NodeContext, now: u64) {
        for (room, open) in self.pending_opens.expire(now) {
            self.reject(
                ctx,
                open.peer,
                room,
                open.attempt,
                ReasonCode::Unreachable,
                "the request did not arrive at the prefill node in time",
            );
        }
        self.set_pending_timer(ctx);
    }

    fn set_pending_timer(&mut self, ctx: &mut NodeContext) {
        ctx.timers
            .set(&NodeTimer::PendingOpens, self.pending_opens.next_due());
    }

    fn reject(
        &mut self,
        ctx: &mut NodeContext,
        peer: ConnectionId,
        room: u64,
        attempt: u32,
        code: ReasonCode,
        why: &str,
    ) {
        {
            let mut stats = ctx.shared.stats.lock();
            stats.opens_rejected += 1;
            *stats.rejects.entry(code.as_str()).or_default() += 1;
        }
        ctx.note(ctx.record_of(
            RoomSide::Prefill,
            room,
            attempt,
            "REJECT",
            format!("{code}: {why}"),
        ));
        let retry_after_ms = if code == ReasonCode::NoCapacity {
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

    pub fn on_done(&mut self, ctx: &mut NodeContext, peer: ConnectionId, room: u64, attempt: u32) {
        self.step(ctx, room, PrefillEvent::Done { peer, attempt });
    }

    pub fn on_peer_abort(
        &mut self,
        ctx: &mut NodeContext,
        peer: ConnectionId,
        room: u64,
        attempt: u32,
        code: ReasonCode,
    ) {
        self.pending_opens.drop_peer(peer, Some(room));
        self.set_pending_timer(ctx);
        self.step(
            ctx,
            room,
            PrefillEvent::PeerAbort {
                peer,
                attempt,
                code,
            },
        );
    }

    pub fn on_peer_gone(
        &mut self,
        ctx: &mut NodeContext,
        peer: ConnectionId,
        room: u64,
        code: ReasonCode,
    ) {
        self.step(ctx, room, PrefillEvent::PeerGone { peer, code });
    }

    pub fn renew(&mut self, ctx: &mut NodeContext, peer: ConnectionId, rooms: &[u64]) {
        for &room in rooms {
            self.step(ctx, room, PrefillEvent::Renew { peer });
        }
    }

    /// The only place where a prefill room changes.
    fn step(&mut self, ctx: &mut NodeContext, room: u64, event: PrefillEvent) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        }; // over: late messages and calls are expected
        let before = entry.room.phase.name();
        let by_engine = matches!(
            event,
            PrefillEvent::Publish { .. } | PrefillEvent::Finish(_)
        );
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
                        PrefillPhase::Aborted(code) => code.to_string(),
                        PrefillPhase::Leased { .. } => format!("{published} pages"),
                        _ => String::new(),
                    };
                    ctx.record(
                        ctx.record_of(RoomSide::Prefill, room, attempt, phase.name(), note),
                        phase.is_over(),
                    );
                }
                ctx.timers.set(&NodeTimer::Prefill(room), due);
                for action in actions {
                    self.act(ctx, room, attempt, action);
                }
            }
            Err(invalid) => {
                ctx.report_invalid_transition(RoomSide::Prefill, room, &invalid);
                if by_engine {
                    // The room cannot be completed any more: end it on both sides now instead of at its deadline.
                    self.step(ctx, room, PrefillEvent::Abort(ReasonCode::TransportBroken));
                }
            }
        }
    }

    fn act(&mut self, ctx: &mut NodeContext, room: u64, attempt: u32, action: PrefillAction) {
        match action {
            PrefillAction::Hash(pages) => {
                if let Some(entry) = self.rooms.get_mut(&room) {
                    entry.to_hash.extend(pages);
                }
                self.hash_more(ctx, room);
            }
            PrefillAction::Accept { peer } => {
                ctx.shared.announced.withdraw(room); // all pages are announced again
                ctx.attach_room(peer, RoomSide::Prefill, room);
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
            PrefillAction::Reject { peer, code, why } => {
                self.reject(ctx, peer, room, attempt, code, &why)
            }
            PrefillAction::Progress {
                peer,
                first_page,
                pages,
            } => {
                if let Some(conn) = ctx.connections.get(&peer) {
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
            PrefillAction::Final { peer, finish, root } => {
                let PrefillOutput {
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
            PrefillAction::SendAbort { peer, code } => ctx.send(
                peer,
                Msg::Abort {
                    room,
                    attempt,
                    code,
                },
            ),
            PrefillAction::AckAbort { peer } => ctx.send(peer, Msg::AbortAck { room, attempt }),
            PrefillAction::ReaderLeft { peer } => {
                ctx.shared.announced.withdraw(room);
                ctx.detach_room(Some(peer), RoomSide::Prefill, room);
                let why = "waits for another decode rank".into();
                ctx.note(ctx.record_of(RoomSide::Prefill, room, attempt, "READER_LEFT", why));
            }
            PrefillAction::Released(code) => self.released(ctx, room, code),
        }
    }

    fn released(&mut self, ctx: &mut NodeContext, room: u64, code: Option<ReasonCode>) {
        let Some(entry) = self.rooms.remove(&room) else {
            return;
        };
        ctx.shared.announced.withdraw(room);
        ctx.timers.set(&NodeTimer::Prefill(room), None);
        ctx.detach_room(entry.room.reader(), RoomSide::Prefill, room);
        let code_for_late = entry.room.code_after_the_end();
        self.ended_rooms
            .add(room, entry.room.attempt, code_for_late);
        match code {
            None => ctx.shared.stats.lock().released_done += 1,
            Some(code) => ctx.count_failure(code),
        }
        ctx.push(NodeEvent::Released { room, code });
    }
}
