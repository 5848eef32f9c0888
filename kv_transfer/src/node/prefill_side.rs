//! P's side of the control loop: rooms offered by the engine, and the OPENs of decode ranks.

use std::collections::{HashMap, VecDeque};

use super::command::OfferRequest;
use super::config::NodeLimits;
use super::context::{NodeContext, NodeTimer};
use super::records::events::NodeEvent;
use super::records::room_history::RoomSide;
use crate::protocol::{GroupId, Msg, OpenMessage, PageDigest, clip_text};
use crate::reason_code::ReasonCode;
use crate::state_machine::pending_opens::{
    EVERY_ATTEMPT, EndedRooms, PendingOpen, PendingOpenError, PendingOpens,
};
use crate::state_machine::prefill::{PrefillAction, PrefillEvent, PrefillPhase, PrefillRoom};
use crate::state_machine::{ConnectionId, PromptPage};
use crate::transport::copy_threads::CopyJob;

/// Pages hashed in one job: a few milliseconds of a copy thread, so that pulls are not delayed.
const HASH_BATCH: usize = 256;
/// Hint to a decode rank whose OPEN found the table full.
const RETRY_AFTER_MS: u64 = 1000;

struct PrefillEntry {
    room: PrefillRoom,
    hashing: bool,
    to_hash: VecDeque<(PromptPage, u32, u64)>,
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

/// Room and attempt of a decode rank.
#[derive(Clone, Copy)]
struct RoomOf {
    peer: ConnectionId,
    room: u64,
    attempt: u32,
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

    pub fn has_room(&self, room: u64) -> bool {
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
        self.pending_opens.drop_peer(peer);
    }

    pub fn offer_room(&mut self, ctx: &mut NodeContext, room: u64, request: OfferRequest) {
        let OfferRequest {
            attempt,
            prompt_hash,
            deadline_ms,
        } = request;
        let deadline = ctx.now_ms().saturating_add(deadline_ms);
        let machine = PrefillRoom::new(
            attempt,
            prompt_hash,
            deadline,
            ctx.config.lease_ms,
            &ctx.config.layout.group_ids(),
        );
        self.ended_rooms.forget_room(room);
        let state = machine.phase.name();
        let record = ctx.record_of(RoomSide::Prefill, room, attempt, state, "offered".into());
        ctx.record_state(record, false);
        ctx.timers
            .set(&NodeTimer::Prefill(room), machine.next_due());
        let entry = PrefillEntry {
            room: machine,
            hashing: false,
            to_hash: VecDeque::new(),
        };
        self.rooms.insert(room, entry);
        if let Some(open) = self.pending_opens.take_open(room) {
            self.set_pending_timer(ctx);
            let PendingOpen {
                peer,
                attempt,
                prompt_hash,
                groups,
                ..
            } = open;
            let event = PrefillEvent::Open {
                peer,
                attempt,
                prompt_hash,
                groups,
            };
            self.apply_event(ctx, room, event);
        }
    }

    /// Abort a room, perhaps before its offer: then a waiting decode rank is refused at once.
    pub fn abort_room(&mut self, ctx: &mut NodeContext, room: u64, code: ReasonCode) {
        if self.rooms.contains_key(&room) {
            return self.apply_event(ctx, room, PrefillEvent::Abort(code));
        }
        if let Some(PendingOpen { peer, attempt, .. }) = self.pending_opens.take_open(room) {
            self.set_pending_timer(ctx);
            let reason = "the prefill node refused the request";
            reject_open(
                ctx,
                RoomOf {
                    peer,
                    room,
                    attempt,
                },
                code,
                reason,
            );
        }
        if self.ended_rooms.get(room, 0).is_none() {
            self.ended_rooms.add(room, EVERY_ATTEMPT, code);
        }
    }

    pub fn on_hashed(
        &mut self,
        ctx: &mut NodeContext,
        room: u64,
        sums: Vec<(PromptPage, PageDigest)>,
    ) {
        ctx.shared.stats.lock().pages_hashed += sums.len() as u64;
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.hashing = false;
        }
        self.apply_event(ctx, room, PrefillEvent::Hashed(sums));
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
        ctx.copy_threads.submit_job(CopyJob::Hash { room, pages });
    }

    pub fn on_open(&mut self, ctx: &mut NodeContext, peer: ConnectionId, open: OpenMessage) {
        ctx.shared.stats.lock().opens_received += 1;
        let room = open.room;
        let attempt = open.attempt;
        let own = &ctx.identity.hello;
        let (code, reason) = if open.p_inc_expected != own.inc {
            let reason = format!("this is incarnation {}", own.inc);
            (ReasonCode::PeerRestarted, reason)
        } else if open.layout_hash != own.layout_hash {
            let theirs = ctx.connections.get(&peer).map(|conn| &conn.peer.layout);
            let difference = theirs.and_then(|theirs| theirs.first_difference(&own.layout));
            let reason = format!(
                "the decode and the prefill node hold different pages: {}; start both with the same \
                 checkpoint, --dtype, --kv-cache-dtype, --page-size and --tp-size",
                difference.unwrap_or_else(|| "another layout was named in HELLO".into())
            );
            (ReasonCode::LayoutMismatch, reason)
        } else if self.rooms.contains_key(&room) {
            let OpenMessage {
                prompt_hash,
                groups,
                ..
            } = open;
            let event = PrefillEvent::Open {
                peer,
                attempt,
                prompt_hash,
                groups,
            };
            return self.apply_event(ctx, room, event);
        } else if let Some(code) = self.ended_rooms.get(room, attempt) {
            (code, "the room is over on the prefill node".into())
        } else if self.is_draining {
            (
                ReasonCode::Draining,
                "the prefill node takes no new requests".into(),
            )
        } else {
            return self.keep_pending(ctx, peer, open);
        };
        reject_open(
            ctx,
            RoomOf {
                peer,
                room,
                attempt,
            },
            code,
            &reason,
        );
    }

    fn keep_pending(&mut self, ctx: &mut NodeContext, peer: ConnectionId, open: OpenMessage) {
        let room = open.room;
        let attempt = open.attempt;
        let ttl_ms = ctx.config.park_ttl_ms.min(open.deadline_ms);
        let open = PendingOpen {
            peer,
            attempt,
            prompt_hash: open.prompt_hash,
            groups: open.groups,
            until: ctx.now_ms() + ttl_ms,
        };
        let (code, reason) = match self.pending_opens.add(room, open) {
            Ok(()) => {
                ctx.shared.stats.lock().opens_early += 1;
                let note = format!("OPEN before the request, kept {ttl_ms} ms");
                ctx.add_note(ctx.record_of(RoomSide::Prefill, room, attempt, "PARKED", note));
                self.set_pending_timer(ctx);
                return ctx.send_to(
                    peer,
                    Msg::OpenPending {
                        room,
                        attempt,
                        ttl_ms,
                    },
                );
            }
            Err(PendingOpenError::Full | PendingOpenError::PeerFull) => (
                ReasonCode::NoCapacity,
                "too many OPENs wait for their requests",
            ),
            Err(PendingOpenError::Duplicate) => (
                ReasonCode::DupRoom,
                "another decode rank waits for this room",
            ),
        };
        reject_open(
            ctx,
            RoomOf {
                peer,
                room,
                attempt,
            },
            code,
            reason,
        );
    }

    pub fn expire_pending_opens(&mut self, ctx: &mut NodeContext, now: u64) {
        for (room, PendingOpen { peer, attempt, .. }) in self.pending_opens.take_expired(now) {
            let reason = "the request did not arrive at the prefill node in time";
            let code = ReasonCode::Unreachable;
            reject_open(
                ctx,
                RoomOf {
                    peer,
                    room,
                    attempt,
                },
                code,
                reason,
            );
        }
        self.set_pending_timer(ctx);
    }

    fn set_pending_timer(&mut self, ctx: &mut NodeContext) {
        let due = self.pending_opens.next_due();
        ctx.timers.set(&NodeTimer::PendingOpens, due);
    }

    pub fn on_peer_abort(
        &mut self,
        ctx: &mut NodeContext,
        (peer, room, attempt): (ConnectionId, u64, u32),
        code: ReasonCode,
    ) {
        self.pending_opens.take_of(peer, room);
        self.set_pending_timer(ctx);
        self.apply_event(
            ctx,
            room,
            PrefillEvent::PeerAbort {
                peer,
                attempt,
                code,
            },
        );
    }

    pub fn renew_leases(&mut self, ctx: &mut NodeContext, peer: ConnectionId, rooms: &[u64]) {
        for &room in rooms {
            self.apply_event(ctx, room, PrefillEvent::Renew { peer });
        }
    }

    /// The only place where a prefill room changes. Calls and messages for a room that is over are
    /// ignored.
    pub fn apply_event(&mut self, ctx: &mut NodeContext, room: u64, event: PrefillEvent) {
        let now = ctx.now_ms();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        let before = entry.room.phase.name();
        let by_engine = matches!(
            event,
            PrefillEvent::Publish { .. } | PrefillEvent::Finish(_)
        );
        let actions = match entry.room.apply_event(event, now) {
            Ok(actions) => actions,
            Err(invalid) => {
                ctx.report_invalid_transition(RoomSide::Prefill, room, &invalid);
                if by_engine {
                    // The room cannot be completed any more: end it on both sides now instead of at
                    // its deadline.
                    self.apply_event(ctx, room, PrefillEvent::Abort(ReasonCode::TransportBroken));
                }
                return;
            }
        };
        let phase = &entry.room.phase;
        let attempt = entry.room.attempt;
        if phase.name() != before {
            let note = match phase {
                PrefillPhase::Aborted(code) => code.to_string(),
                PrefillPhase::Leased { .. } => format!("{} pages", entry.room.page_counts().0),
                _ => String::new(),
            };
            let record = ctx.record_of(RoomSide::Prefill, room, attempt, phase.name(), note);
            ctx.record_state(record, phase.is_over());
        }
        ctx.timers
            .set(&NodeTimer::Prefill(room), entry.room.next_due());
        for action in actions {
            self.perform_action(ctx, room, attempt, action);
        }
    }

    fn perform_action(
        &mut self,
        ctx: &mut NodeContext,
        room: u64,
        attempt: u32,
        action: PrefillAction,
    ) {
        let of = |peer| RoomOf {
            peer,
            room,
            attempt,
        };
        match action {
            PrefillAction::Hash(pages) => {
                if let Some(entry) = self.rooms.get_mut(&room) {
                    entry.to_hash.extend(pages);
                }
                self.hash_more(ctx, room);
            }
            PrefillAction::Accept { peer } => {
                ctx.shared.announced.withdraw_room(room); // all pages are announced again
                ctx.attach_room(peer, RoomSide::Prefill, room);
                let p_inc = ctx.identity.hello.inc.clone();
                ctx.send_to(
                    peer,
                    Msg::OpenOk {
                        room,
                        attempt,
                        p_inc,
                    },
                );
            }
            PrefillAction::Reject { peer, code, reason } => {
                reject_open(ctx, of(peer), code, &reason);
            }
            PrefillAction::Progress {
                peer,
                group,
                first_page,
                pages,
            } => {
                send_progress(ctx, of(peer), (group, first_page), &pages);
            }
            PrefillAction::Final {
                peer,
                groups,
                payload,
            } => {
                let fin = Msg::Final {
                    room,
                    attempt,
                    groups,
                    payload,
                };
                ctx.send_to(peer, fin);
            }
            PrefillAction::SendAbort { peer, code } => {
                ctx.send_to(
                    peer,
                    Msg::Abort {
                        room,
                        attempt,
                        code,
                    },
                );
            }
            PrefillAction::AckAbort { peer } => ctx.send_to(peer, Msg::AbortAck { room, attempt }),
            PrefillAction::ReaderLeft { peer } => {
                ctx.shared.announced.withdraw_room(room);
                ctx.detach_room(Some(peer), RoomSide::Prefill, room);
                let reason = "waits for another decode rank".into();
                let record = ctx.record_of(RoomSide::Prefill, room, attempt, "READER_LEFT", reason);
                ctx.add_note(record);
            }
            PrefillAction::Released(code) => self.report_release(ctx, room, code),
        }
    }

    fn report_release(&mut self, ctx: &mut NodeContext, room: u64, code: Option<ReasonCode>) {
        let Some(PrefillEntry { room: machine, .. }) = self.rooms.remove(&room) else {
            return;
        };
        ctx.shared.announced.withdraw_room(room);
        ctx.timers.set(&NodeTimer::Prefill(room), None);
        ctx.detach_room(machine.reader(), RoomSide::Prefill, room);
        self.ended_rooms
            .add(room, machine.attempt, machine.code_after_the_end());
        match code {
            None => ctx.shared.stats.lock().released_done += 1,
            Some(code) => ctx.count_failure(code),
        }
        ctx.push_event(NodeEvent::Released { room, code });
    }
}

/// Allow the reader to read these pages, and announce them.
fn send_progress(
    ctx: &mut NodeContext,
    of: RoomOf,
    (group, first_page): (GroupId, u32),
    pages: &[PageDigest],
) {
    let RoomOf {
        peer,
        room,
        attempt,
    } = of;
    if let Some(conn) = ctx.connections.get(&peer) {
        let pages = pages.iter().map(|p| (p.page, p.generation));
        ctx.shared
            .announced
            .announce_pages(room, &conn.peer.inc, pages);
    }
    let progress = Msg::Progress {
        room,
        attempt,
        group,
        first_page,
        ids: pages.iter().map(|p| p.page).collect(),
        gens: pages.iter().map(|p| p.generation).collect(),
        sums: pages.iter().map(|p| p.sum).collect(),
    };
    ctx.send_to(peer, progress);
}

fn reject_open(ctx: &mut NodeContext, of: RoomOf, code: ReasonCode, reason: &str) {
    let RoomOf {
        peer,
        room,
        attempt,
    } = of;
    {
        let mut stats = ctx.shared.stats.lock();
        stats.opens_rejected += 1;
        *stats.rejects.get_mut(code.as_str()) += 1;
    }
    let note = format!("{code}: {reason}");
    ctx.add_note(ctx.record_of(RoomSide::Prefill, room, attempt, "REJECT", note));
    let is_full = code == ReasonCode::NoCapacity;
    let refusal = Msg::Reject {
        room,
        attempt,
        code,
        message: clip_text(reason),
        retry_after_ms: if is_full { RETRY_AFTER_MS } else { 0 },
        connection: false,
    };
    ctx.send_to(peer, refusal);
}
