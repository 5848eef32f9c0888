//! D's side of the control loop: rooms opened by the engine.
//!
//! `rank_connections` has the connections to prefill ranks and the rooms that wait for them,
//! `pulls` the pulls under way.

mod pulls;
mod rank_connections;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::command::OpenRequest;
use super::communicators::LoopContext;
use super::config::Transport;
use super::connections::establish::{ConnectFailure, EstablishedConnection, unreachable};
use super::context::{LoopMessage, NodeTimer, RankAddress, mapped_by};
use super::records::events::{NodeEvent, PullStats};
use super::records::room_history::RoomSide;
use crate::pool::RemotePool;
use crate::protocol::handshake::ConnectionError;
use crate::protocol::{GroupId, GroupStart, GroupTotal, Msg, OpenMessage, PageDigest};
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::state_machine::decode::{
    DecodeAction, DecodeEvent, DecodePhase, DecodeRoom, FinalMessage, PullLimits, PullPage,
};
use crate::transport::PullEnd;
use crate::transport::copy_threads::DEVICE_COPY_BYTES;
use crate::warnings::PeerWarnings;
use pulls::{AfterPull, PullJob, PullJobs};
use rank_connections::{
    FIRST_PAUSE_MS, LAST_PAUSE_MS, Outage, RankAnswer, RankConnections, UnreachableRooms, is_final,
};

/// Bytes of one pull: large enough that its bookkeeping is lost in the copy, small enough that
/// rooms share the copy thread.
const PULL_BYTES: usize = 16 << 20;
/// Bytes of one pull into pages on a device, where each copy waits for the device once: on an H200
/// a copy of one page takes 0.2 ms and a copy of 250 pages (437 MiB) 0.7 ms.
const DEVICE_PULL_BYTES: usize = DEVICE_COPY_BYTES;
const PULLS_IN_FLIGHT: usize = 2;

/// Bootstrap server that a room without a rank asks for the dp size.
struct Unranked {
    host: String,
    port: u16,
    pause_ms: u64,
    outage: Outage,
    tried_at: u64,
}

struct DecodeEntry {
    room: DecodeRoom,
    prompt_hash: Vec<u8>,
    unranked: Option<Unranked>,
    address: Option<RankAddress>,
    last_error: String,
    /// The peer's pool; held here because it outlives the peer's connection.
    remote: Option<Arc<RemotePool>>,
    transport: &'static str,
    bytes: u64,
    opened: Instant,
    first_pull: Option<Instant>,
}

/// D's rooms, its connections to prefill ranks, and the pulls under way.
#[derive(Default)]
pub(super) struct DecodeSide {
    rooms: HashMap<u64, DecodeEntry>,
    ranks: RankConnections,
    pulls: PullJobs,
    refusals: PeerWarnings<(String, u16, ReasonCode)>,
}

impl DecodeSide {
    pub fn has_room(&self, room: u64) -> bool {
        self.rooms.contains_key(&room)
    }

    pub fn num_pulls(&self) -> usize {
        self.pulls.len()
    }

    /// Pages of unfinished pulls from this peer.
    pub fn queued_pages(&self, peer: ConnectionId) -> u64 {
        self.pulls.queued_pages(peer)
    }

    pub fn open_room(&mut self, ctx: &mut LoopContext, room: u64, request: OpenRequest) {
        let OpenRequest {
            attempt,
            host,
            port,
            dp_rank,
            prompt_hash,
            deadline_ms,
        } = request;
        let pull_bytes = if ctx.pool.device().is_some() {
            DEVICE_PULL_BYTES
        } else {
            PULL_BYTES
        };
        let limits = PullLimits {
            pages_per_pull: (pull_bytes / ctx.pool.page_bytes()).max(1),
            pulls_in_flight: PULLS_IN_FLIGHT,
            max_pages: ctx.pool.num_pages(),
            wait_ms: ctx.config.wait_ms,
        };
        let now = ctx.now_ms();
        let note = format!("{host}:{port} rank {dp_rank}");
        let starts = ctx
            .config
            .layout
            .group_ids()
            .into_iter()
            .map(|group| GroupStart {
                group,
                start_page: 0,
            });
        let deadline = now.saturating_add(deadline_ms);
        let machine = DecodeRoom::new(attempt, starts.collect(), now, deadline, limits);
        let record = ctx.record_of(RoomSide::Decode, room, attempt, machine.phase.name(), note);
        ctx.record_state(record, false);
        ctx.timers.set(&NodeTimer::Decode(room), machine.next_due());
        let rank = u32::try_from(dp_rank).ok();
        let unranked = rank.is_none().then(|| Unranked {
            host: host.clone(),
            port,
            pause_ms: FIRST_PAUSE_MS,
            outage: Outage::default(),
            tried_at: 0,
        });
        let entry = DecodeEntry {
            room: machine,
            prompt_hash,
            unranked,
            address: None,
            last_error: "no request was sent yet".into(),
            remote: None,
            transport: "none",
            bytes: 0,
            opened: Instant::now(),
            first_pull: None,
        };
        self.rooms.insert(room, entry);
        match rank {
            Some(dp_rank) => {
                self.request_connection(
                    ctx,
                    room,
                    RankAddress {
                        host,
                        port,
                        dp_rank,
                    },
                );
            }
            None => self.request_sizes(ctx, room),
        }
    }

    pub fn on_tick(&mut self, ctx: &mut LoopContext, room: u64) {
        let Some(entry) = self.rooms.get(&room) else {
            return;
        };
        // Report why the prefill rank was not reached instead of the time that passed.
        let event = if entry.room.phase == DecodePhase::Resolving {
            let address = entry.address.as_ref();
            let last = address.and_then(|address| self.ranks.last_error(address));
            let wait_ms = ctx.config.wait_ms;
            let last = last.unwrap_or(&entry.last_error);
            let reason =
                format!("the prefill rank was not reached within {wait_ms} ms; last: {last}");
            let code = ReasonCode::Unreachable;
            DecodeEvent::Unreachable { code, reason }
        } else {
            DecodeEvent::Tick
        };
        self.apply_event(ctx, room, event);
    }

    // ---- connections to prefill ranks ----

    /// Request the prefill node's dp size, which decides the rank of a room without one.
    pub fn request_sizes(&mut self, ctx: &mut LoopContext, room: u64) {
        let now = ctx.now_ms();
        let entry = self.rooms.get_mut(&room);
        let Some(unranked) = entry.and_then(|entry| entry.unranked.as_mut()) else {
            return;
        };
        unranked.tried_at = now;
        let client = ctx.bootstrap_client(unranked.host.clone(), unranked.port);
        let internal = ctx.internal.clone();
        tokio::spawn(async move {
            let topology = client.topology().await;
            let size = topology.map(|topology| topology.sizes.prefill_dp_size);
            let size = size.map_err(|err| unreachable(&err));
            let _ = internal.send(LoopMessage::Sizes { room, size }); // the node is closing
        });
    }

    pub fn on_sizes(
        &mut self,
        ctx: &mut LoopContext,
        room: u64,
        size: Result<u32, ConnectFailure>,
    ) {
        let now = ctx.now_ms();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        match (size, &mut entry.unranked) {
            (Ok(size), Some(unranked)) => {
                let host = unranked.host.clone();
                let port = unranked.port;
                let dp_rank = (room % u64::from(size.max(1))) as u32;
                entry.unranked = None;
                self.request_connection(
                    ctx,
                    room,
                    RankAddress {
                        host,
                        port,
                        dp_rank,
                    },
                );
            }
            (Err(ConnectFailure { err, is_silent }), Some(unranked)) => {
                let started = unranked.tried_at;
                let give_up = unranked.outage.record_failure(is_silent, started, now);
                if give_up || is_final(err.code) {
                    let ConnectionError { code, reason } = err;
                    return self.apply_event(ctx, room, DecodeEvent::Unreachable { code, reason });
                }
                entry.last_error = err.reason;
                let retry_at = Some(now + unranked.pause_ms);
                ctx.timers.set(&NodeTimer::Size(room), retry_at);
                unranked.pause_ms = (unranked.pause_ms * 2).min(LAST_PAUSE_MS);
            }
            (_, None) => {}
        }
    }

    fn request_connection(&mut self, ctx: &mut LoopContext, room: u64, address: RankAddress) {
        let answer = self.ranks.request_connection(ctx, room, &address);
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.address = Some(address);
        }
        match answer {
            RankAnswer::Connected(peer) => self.attach_to_peer(ctx, room, peer),
            RankAnswer::Waiting => {}
            RankAnswer::Unreachable { code, reason } => {
                self.apply_event(ctx, room, DecodeEvent::Unreachable { code, reason });
            }
        }
    }

    pub fn on_connect_result(
        &mut self,
        ctx: &mut LoopContext,
        address: RankAddress,
        result: Result<EstablishedConnection, ConnectFailure>,
    ) {
        match result {
            Ok(established) => self.connection_up(ctx, address, established),
            Err(failure) => {
                let failed = self.ranks.on_failure(ctx, address, failure);
                let Some(UnreachableRooms {
                    rooms,
                    code,
                    reason,
                }) = failed
                else {
                    return;
                };
                for room in rooms {
                    let reason = reason.clone();
                    self.apply_event(ctx, room, DecodeEvent::Unreachable { code, reason });
                }
            }
        }
    }

    fn connection_up(
        &mut self,
        ctx: &mut LoopContext,
        address: RankAddress,
        established: EstablishedConnection,
    ) {
        let opened = &established.opened;
        if let Some(reason) = &established.map_problem {
            tracing::warn!(peer = %opened.peer.addr, why = %reason, "the peer is on this host, but its pool cannot be mapped: going without");
            ctx.shared.stats.lock().fallbacks += 1;
        }
        let mapped = established.remote.as_deref().map(mapped_by);
        let transport = mapped.or_else(|| ctx.transport_with(&opened.peer));
        let transport = transport.unwrap_or(Transport::Tcp).as_str();
        let EstablishedConnection {
            stream,
            addr,
            opened,
            remote,
            ..
        } = established;
        let key = Some(address.clone());
        let peer = ctx.add_connection(stream, addr, opened, key, remote, transport);
        self.ranks.set_up(&address, peer);
        self.open_waiting(ctx, &address, peer);
    }

    /// Open rooms that waited for this rank.
    pub fn open_waiting(
        &mut self,
        ctx: &mut LoopContext,
        address: &RankAddress,
        peer: ConnectionId,
    ) {
        for room in self.ranks.take_waiting(ctx, address, peer) {
            self.attach_to_peer(ctx, room, peer);
        }
    }

    pub fn retry_connection(&mut self, ctx: &LoopContext, address: &RankAddress) {
        self.ranks.retry_connection(ctx, address);
    }

    pub fn connection_down(&mut self, ctx: &LoopContext, address: &RankAddress) {
        self.ranks.on_lost(ctx, address);
    }

    fn attach_to_peer(&mut self, ctx: &mut LoopContext, room: u64, peer: ConnectionId) {
        let Some(conn) = ctx.connections.get(&peer) else {
            return;
        };
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.remote = conn.remote.clone();
            ctx.attach_room(peer, RoomSide::Decode, room);
            self.apply_event(ctx, room, DecodeEvent::Connected { peer });
        }
    }

    // ---- messages of the peer ----

    pub fn on_answer(&mut self, ctx: &mut LoopContext, peer: ConnectionId, msg: Msg) {
        let (room, event) = match msg {
            Msg::OpenOk { room, attempt, .. } => (room, DecodeEvent::Accepted { peer, attempt }),
            Msg::OpenPending { room, attempt, .. } => {
                (room, DecodeEvent::OpenPending { peer, attempt })
            }
            Msg::Reject {
                room,
                attempt,
                code,
                message: reason,
                ..
            } => (
                room,
                DecodeEvent::Rejected {
                    peer,
                    attempt,
                    code,
                    reason,
                },
            ),
            Msg::Final {
                room,
                attempt,
                groups,
                payload,
            } => {
                let note = format!("FINAL: {}", to_text(&groups));
                self.add_note(ctx, room, attempt, note);
                let fin = FinalMessage { groups, payload };
                (room, DecodeEvent::Final { peer, attempt, fin })
            }
            Msg::Progress {
                room,
                attempt,
                group,
                first_page,
                ids,
                gens,
                sums,
            } => {
                let conn = ctx.connections.get(&peer);
                let pool_pages = conn.map_or(0, |conn| conn.peer.num_pages);
                if let Some(id) = ids.iter().find(|&&id| u64::from(id) >= pool_pages) {
                    let reason = format!("PROGRESS names page {id} of a pool of {pool_pages}");
                    let err = ConnectionError::transport_broken(reason);
                    return ctx.mark_lost(peer, err);
                }
                let end = first_page as usize + ids.len();
                let note = format!("PROGRESS: pages {first_page}..{end} of group {group}");
                self.add_note(ctx, room, attempt, note);
                let pages = ids.into_iter().zip(gens).zip(sums);
                let pages = pages.map(|((page, generation), sum)| PageDigest {
                    page,
                    generation,
                    sum,
                });
                let pages = pages.collect();
                (
                    room,
                    DecodeEvent::Progress {
                        peer,
                        attempt,
                        group,
                        first_page,
                        pages,
                    },
                )
            }
            _ => return,
        };
        self.apply_event(ctx, room, event);
    }

    fn add_note(&self, ctx: &LoopContext, room: u64, attempt: u32, what: String) {
        if let Some(entry) = self.rooms.get(&room) {
            let state = entry.room.phase.name();
            ctx.add_note(ctx.record_of(RoomSide::Decode, room, attempt, state, what));
        }
    }

    pub fn on_peer_gone(
        &mut self,
        ctx: &mut LoopContext,
        peer: ConnectionId,
        room: u64,
        code: ReasonCode,
    ) {
        let remote = self
            .rooms
            .get(&room)
            .and_then(|entry| entry.remote.as_ref());
        let readable = remote.is_some_and(|remote| remote.device().is_none());
        self.apply_event(
            ctx,
            room,
            DecodeEvent::PeerGone {
                peer,
                code,
                readable,
            },
        );
    }

    // ---- pulls ----

    fn start_pull(
        &mut self,
        ctx: &mut LoopContext,
        (room, ticket): (u64, u64),
        group: GroupId,
        pages: Vec<PullPage>,
    ) {
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        entry.first_pull.get_or_insert_with(Instant::now);
        let peer = entry.room.peer().unwrap_or_default();
        let job = PullJob::new(
            ctx,
            (room, ticket),
            peer,
            (group, pages),
            entry.remote.clone(),
        );
        self.submit_pull(ctx, job);
    }

    fn submit_pull(&mut self, ctx: &mut LoopContext, job: PullJob) {
        let room = job.room;
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.transport = job.via.as_str();
        }
        if let Err(event) = self.pulls.submit_pull(ctx, job) {
            self.apply_event(ctx, room, event);
        }
    }

    pub fn on_pulled(&mut self, ctx: &mut LoopContext, end: PullEnd) {
        let bytes = end.bytes;
        let Some((room, after)) = self.pulls.on_end(ctx, end) else {
            return;
        };
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.bytes += bytes;
        }
        match after {
            AfterPull::Step(event) => self.apply_event(ctx, room, event),
            AfterPull::Resubmit(job) => self.submit_pull(ctx, job),
        }
    }

    /// Fail the rooms of all tcp pulls.
    pub fn on_data_thread_died(&mut self, ctx: &mut LoopContext) {
        for (room, event) in self.pulls.fail_tcp_pulls() {
            self.apply_event(ctx, room, event);
        }
    }

    // ---- the state machine ----

    /// The only place where a decode room changes. Calls and messages for a room that is over are
    /// ignored.
    pub fn apply_event(&mut self, ctx: &mut LoopContext, room: u64, event: DecodeEvent) {
        let now = ctx.now_ms();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        let before = entry.room.phase.name();
        let actions = match entry.room.apply_event(event, now) {
            Ok(actions) => actions,
            Err(invalid) => return ctx.report_invalid_transition(RoomSide::Decode, room, &invalid),
        };
        let phase = &entry.room.phase;
        let attempt = entry.room.attempt;
        if phase.name() != before {
            let note = match phase {
                DecodePhase::Failed(code) => code.to_string(),
                _ => String::new(),
            };
            let record = ctx.record_of(RoomSide::Decode, room, attempt, phase.name(), note);
            ctx.record_state(record, phase.is_over());
        }
        ctx.timers
            .set(&NodeTimer::Decode(room), entry.room.next_due());
        for action in actions {
            self.perform_action(ctx, room, attempt, action);
        }
    }

    fn perform_action(
        &mut self,
        ctx: &mut LoopContext,
        room: u64,
        attempt: u32,
        action: DecodeAction,
    ) {
        match action {
            DecodeAction::Open { peer } => self.send_open(ctx, room, attempt, peer),
            DecodeAction::Pull {
                ticket,
                group,
                pages,
            } => self.start_pull(ctx, (room, ticket), group, pages),
            DecodeAction::CancelPulls => self.pulls.cancel_room(ctx, room),
            DecodeAction::Announced => ctx.push_event(NodeEvent::Announced { room }),
            DecodeAction::Revoked => ctx.push_event(NodeEvent::Revoked { room }),
            DecodeAction::Done { peer, root } => {
                let bytes = self.rooms.get(&room).map_or(0, |entry| entry.bytes);
                ctx.send_to(
                    peer,
                    Msg::Done {
                        room,
                        attempt,
                        bytes,
                        root,
                    },
                );
            }
            DecodeAction::SendAbort { peer, code } => {
                ctx.send_to(
                    peer,
                    Msg::Abort {
                        room,
                        attempt,
                        code,
                    },
                );
            }
            DecodeAction::AckAbort { peer } => ctx.send_to(peer, Msg::AbortAck { room, attempt }),
            DecodeAction::Commit(fin) => self.report_commit(ctx, room, fin),
            DecodeAction::Fail { code, reason } => {
                let Some(entry) = self.remove_room(ctx, room) else {
                    return;
                };
                ctx.count_failure(code);
                if let (ReasonCode::Checksum, Some(address)) = (code, &entry.address) {
                    self.ranks.record_damaged_room(ctx, address, entry.opened);
                }
                self.warn_about_refusal(ctx, &entry, code, &reason);
                ctx.push_event(NodeEvent::Failed {
                    room,
                    code,
                    message: reason,
                });
            }
            DecodeAction::Aborted => {
                if self.remove_room(ctx, room).is_some() {
                    ctx.shared.stats.lock().aborted += 1;
                    ctx.push_event(NodeEvent::Aborted { room });
                }
            }
        }
    }

    /// Log which prefill node a room did not reach, and what it answered: engines tell their
    /// clients neither.
    fn warn_about_refusal(
        &mut self,
        ctx: &LoopContext,
        entry: &DecodeEntry,
        code: ReasonCode,
        reason: &str,
    ) {
        if !is_final(code) && code != ReasonCode::Unreachable {
            return;
        }
        let by_address = entry.address.as_ref().map(|it| (it.host.clone(), it.port));
        let by_server = entry.unranked.as_ref().map(|it| (it.host.clone(), it.port));
        let Some((host, port)) = by_address.or(by_server) else {
            return;
        };
        let due = self
            .refusals
            .record((host.clone(), port, code), ctx.now_ms());
        if let Some(rooms) = due {
            tracing::warn!(host, port, %code, why = reason, rooms, "no KV pages from this prefill node");
        }
    }

    fn send_open(&mut self, ctx: &mut LoopContext, room: u64, attempt: u32, peer: ConnectionId) {
        let (Some(entry), Some(conn)) = (self.rooms.get(&room), ctx.connections.get(&peer)) else {
            return;
        };
        let msg = Msg::Open(OpenMessage {
            room,
            attempt,
            d_inc: ctx.identity.hello.inc.clone(),
            p_inc_expected: conn.peer.inc.clone(),
            layout_hash: ctx.identity.hello.layout_hash.clone(),
            prompt_hash: entry.prompt_hash.clone(),
            groups: entry.room.starts(),
            deadline_ms: entry.room.deadline().saturating_sub(ctx.now_ms()),
            prio: 0,
        });
        ctx.send_to(peer, msg);
    }

    fn report_commit(&mut self, ctx: &mut LoopContext, room: u64, fin: FinalMessage) {
        let Some(entry) = self.remove_room(ctx, room) else {
            return;
        };
        if let Some(address) = entry.address.filter(|_| entry.bytes > 0) {
            self.ranks.record_good_room(&address);
        }
        let pull_time = entry.first_pull.map(|at| at.elapsed());
        let stats = PullStats {
            transport: entry.transport,
            pages: entry.room.verified_pages() as u64,
            bytes: entry.bytes,
            pull_seconds: pull_time.map_or(0.0, |time| time.as_secs_f64()),
            room_seconds: entry.opened.elapsed().as_secs_f64(),
        };
        {
            let mut all = ctx.shared.stats.lock();
            all.committed += 1;
            let pull = all.pull.get_mut(stats.transport);
            pull.rooms += 1;
            pull.room_seconds += stats.pull_seconds;
            all.pull_seconds.observe(stats.pull_seconds);
            all.room_seconds.observe(stats.room_seconds);
        }
        ctx.push_event(NodeEvent::Committed {
            room,
            payload: fin.payload,
            groups: fin.groups.iter().map(GroupTotal::pages).collect(),
            stats,
        });
    }

    /// Remove a room that is over, with its timers and attachments.
    fn remove_room(&mut self, ctx: &mut LoopContext, room: u64) -> Option<DecodeEntry> {
        let entry = self.rooms.remove(&room)?;
        ctx.timers.set(&NodeTimer::Decode(room), None);
        ctx.timers.set(&NodeTimer::Size(room), None);
        // The state machine may have cleared its peer already; the room is still attached to the
        // rank's connection.
        let address = entry.address.as_ref();
        let attached = address.and_then(|address| self.ranks.remove_room(address, room));
        ctx.detach_room(attached, RoomSide::Decode, room);
        ctx.detach_room(entry.room.peer(), RoomSide::Decode, room);
        Some(entry)
    }
}

/// Pages of a prompt by group, for the timeline.
fn to_text(groups: &[GroupTotal]) -> String {
    let texts = groups.iter().map(|total| {
        let first_page = total.first_page;
        let total_pages = total.total_pages;
        format!("pages {first_page}..{total_pages} of group {}", total.group)
    });
    texts.collect::<Vec<_>>().join(", ")
}
