//! D's side of the control loop: rooms opened by the engine, connections to prefill ranks, and pulls.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::command::OpenRequest;
use super::communicators::Communicators;
use super::config::Transport;
use super::connections::establish::{
    ConnectFailure, EstablishedConnection, establish, unreachable,
};
use super::context::{LoopMessage, NodeContext, NodeTimer, RankAddress, mapped_by};
use super::records::events::{NodeEvent, PullStats};
use super::records::room_history::RoomSide;
use crate::pool::RemotePool;
use crate::protocol::handshake::ConnectionError;
use crate::protocol::{Msg, PageDigest};
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::state_machine::communicator::TransportBreaker;
use crate::state_machine::decode::{
    DecodeAction, DecodeEvent, DecodePhase, DecodeRoom, FinalMessage, PullLimits, PullPage,
};
use crate::transport::copy_threads::CopyJob;
use crate::transport::{Pull, PullEnd, PullError};

/// Bytes of one pull: large enough that its bookkeeping is lost in the copy, small enough that rooms share the copy thread.
const PULL_BYTES: usize = 16 << 20;
const PULLS_IN_FLIGHT: usize = 2;
/// Rooms opened in one turn of the control loop when their rank is connected.
const OPENS_AT_ONCE: usize = 256;
/// Pause before the next attempt to reach a prefill rank: doubled after each, up to `LAST_PAUSE_MS`.
const FIRST_PAUSE_MS: u64 = 50;
const LAST_PAUSE_MS: u64 = 1000;

/// Attempts without an answer after which a prefill rank counts as unreachable, and the time after which it does with fewer of
/// them: a refused connection is tried again at once, one that nothing answers has taken its second.
const SILENT_ATTEMPTS: u32 = 4;
const SILENT_MS: u64 = 900;
/// How long rooms for an unreachable prefill rank fail at once; doubled while a probe by the next room fails, too.
const FIRST_BREAK_MS: u64 = 250;
const LAST_BREAK_MS: u64 = 4000;
/// Rooms of a pair that fail with CHECKSUM, none between them committed, until the pair is quarantined.
const DAMAGED_ROOMS: u32 = 3;

enum RankState {
    Connecting,
    Pausing,
    Up(ConnectionId),
    /// Unreachable: rooms fail at once until then; the next one after it probes the rank.
    Broken {
        until: u64,
    },
}

/// Attempts in a row without an answer.
#[derive(Default)]
struct Outage {
    attempts: u32,
    since: u64,
}

impl Outage {
    /// Record a failed attempt begun at `started`. True: give up.
    fn record_failure(&mut self, is_silent: bool, started: u64, now: u64) -> bool {
        if !is_silent {
            *self = Self::default();
            return false;
        }
        if self.attempts == 0 {
            self.since = started;
        }
        self.attempts += 1;
        self.attempts >= SILENT_ATTEMPTS || now.saturating_sub(self.since) >= SILENT_MS
    }
}

/// State of the connection to a prefill rank, and the rooms that wait for it. Exists while it is up or broken, or rooms wait.
struct RankConnection {
    state: RankState,
    waiting: BTreeSet<u64>,
    failures: u32,
    outage: Outage,
    /// Start of the last attempt.
    tried_at: u64,
    /// Times in a row that this connection broke; from the second on, one attempt decides.
    breaks: u32,
    last_error: String,
    damage: Damage,
}

/// Rooms with damaged pages in a row, and how long further ones fail at once because of it: 30 s, and twice as long after each room
/// that fails then, up to 16 minutes. A new connection resets it: a repaired host or its rank has restarted.
#[derive(Default)]
struct Damage {
    rooms: u32,
    /// When the last of them failed.
    last_at: Option<Instant>,
    quarantine: TransportBreaker,
}

impl Damage {
    /// Record a room that failed with CHECKSUM. True: the pair's quarantine begins. Rooms that were open when the last one failed do not count: they
    /// may share its pages, which the prefill node has now taken out of its cache.
    fn record_room(&mut self, opened: Instant, at: Instant, now: u64) -> bool {
        if self.last_at.is_some_and(|last| opened <= last) {
            return false;
        }
        self.rooms += 1;
        self.last_at = Some(at);
        let begins = self.rooms >= DAMAGED_ROOMS && self.quarantine.allows(now);
        if begins {
            self.quarantine.failed(now);
        }
        begins
    }
}

impl RankConnection {
    fn new(room: u64) -> Self {
        Self {
            state: RankState::Connecting,
            waiting: BTreeSet::from([room]),
            failures: 0,
            outage: Outage::default(),
            tried_at: 0,
            breaks: 0,
            last_error: "no answer yet".into(),
            damage: Damage::default(),
        }
    }
}

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
    key: Option<RankAddress>,
    last_error: String,
    /// The peer's pool; held here because it outlives the peer's connection.
    remote: Option<Arc<RemotePool>>,
    transport: &'static str,
    bytes: u64,
    opened: Instant,
    first_pull: Option<Instant>,
}

/// Pull submitted to a transport.
struct PullJob {
    room: u64,
    ticket: u64,
    peer: ConnectionId,
    pages: Vec<PullPage>,
    via: Transport,
    cancel: Arc<AtomicBool>,
    started: Instant,
}

impl DecodeEntry {
    fn new(ctx: &NodeContext, attempt: u32, prompt_hash: Vec<u8>, deadline_ms: u64) -> Self {
        let limits = PullLimits {
            pages_per_pull: (PULL_BYTES / ctx.pool.page_bytes()).max(1),
            pulls_in_flight: PULLS_IN_FLIGHT,
            max_pages: ctx.pool.num_pages(),
            wait_ms: ctx.config.wait_ms,
        };
        let now = ctx.now();
        Self {
            room: DecodeRoom::new(attempt, 0, now, now.saturating_add(deadline_ms), limits),
            prompt_hash,
            unranked: None,
            key: None,
            last_error: "no request was sent yet".into(),
            remote: None,
            transport: "none",
            bytes: 0,
            opened: Instant::now(),
            first_pull: None,
        }
    }
}

/// D's rooms, its links to prefill ranks, and the pulls under way.
#[derive(Default)]
pub(super) struct DecodeSide {
    rooms: HashMap<u64, DecodeEntry>,
    ranks: HashMap<RankAddress, RankConnection>,
    jobs: HashMap<u64, PullJob>,
    next_job: u64,
}

impl DecodeSide {
    pub fn has(&self, room: u64) -> bool {
        self.rooms.contains_key(&room)
    }

    pub fn num_pulls(&self) -> usize {
        self.jobs.len()
    }

    /// Pages of unfinished pulls from this peer.
    pub fn queued_pages(&self, peer: ConnectionId) -> u64 {
        let of_peer = self.jobs.values().filter(|job| job.peer == peer);
        of_peer.map(|job| job.pages.len() as u64).sum()
    }

    // ---- the engine's calls ----

    pub fn open(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        request: OpenRequest,
    ) {
        let mut entry = DecodeEntry::new(
            ctx,
            request.attempt,
            request.prompt_hash,
            request.deadline_ms,
        );
        let (host, port, dp_rank) = (request.host, request.port, request.dp_rank);
        ctx.record(
            ctx.record_of(
                RoomSide::Decode,
                room,
                entry.room.attempt,
                entry.room.phase.name(),
                format!("{host}:{port} rank {dp_rank}"),
            ),
            false,
        );
        ctx.timers
            .set(&NodeTimer::Decode(room), entry.room.next_due());
        let rank = u32::try_from(dp_rank).ok();
        if rank.is_none() {
            entry.unranked = Some(Unranked {
                host: host.clone(),
                port,
                pause_ms: FIRST_PAUSE_MS,
                outage: Outage::default(),
                tried_at: 0,
            });
        }
        self.rooms.insert(room, entry);
        match rank {
            Some(dp_rank) => self.request_connection(
                ctx,
                comms,
                room,
                RankAddress {
                    host,
                    port,
                    dp_rank,
                },
            ),
            None => self.request_sizes(ctx, room),
        }
    }

    pub fn grant(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        start_page: u32,
        pages: Vec<u32>,
    ) {
        self.step(ctx, comms, room, DecodeEvent::Grant { start_page, pages });
    }

    pub fn revoke(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, room: u64) {
        self.step(ctx, comms, room, DecodeEvent::Revoke);
    }

    pub fn abort(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        code: ReasonCode,
    ) {
        self.step(ctx, comms, room, DecodeEvent::Abort(code));
    }

    pub fn tick(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, room: u64) {
        let Some(entry) = self.rooms.get(&room) else {
            return;
        };
        // Report why the prefill rank was not reached instead of the time that passed.
        let event = if entry.room.phase == DecodePhase::Resolving {
            let rank_conn = entry.key.as_ref().and_then(|key| self.ranks.get(key));
            let why = rank_conn.map_or(&entry.last_error, |rank_conn| &rank_conn.last_error);
            DecodeEvent::Unreachable {
                code: ReasonCode::Unreachable,
                why: format!(
                    "the prefill rank was not reached within {} ms; last: {why}",
                    ctx.config.wait_ms
                ),
            }
        } else {
            DecodeEvent::Tick
        };
        self.step(ctx, comms, room, event);
    }

    // ---- connections to prefill ranks ----

    /// Request the prefill node's dp size, which decides the rank of a room without one.
    pub fn request_sizes(&mut self, ctx: &mut NodeContext, room: u64) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        let Some(unranked) = &mut entry.unranked else {
            return;
        };
        unranked.tried_at = now;
        let (host, port) = (unranked.host.clone(), unranked.port);
        let client = ctx.bootstrap_client(host, port);
        let internal = ctx.internal.clone();
        tokio::spawn(async move {
            let size = client
                .sizes()
                .await
                .map(|sizes| sizes.prefill_dp_size)
                .map_err(|err| unreachable(&err));
            let _ = internal.send(LoopMessage::Sizes { room, size }); // the node is closing
        });
    }

    pub fn on_sizes(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        size: Result<u32, ConnectFailure>,
    ) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        match (size, &mut entry.unranked) {
            (Ok(size), Some(unranked)) => {
                let dp_rank = (room % u64::from(size.max(1))) as u32;
                let key = RankAddress {
                    host: unranked.host.clone(),
                    port: unranked.port,
                    dp_rank,
                };
                entry.unranked = None;
                self.request_connection(ctx, comms, room, key);
            }
            (Err(failure), Some(unranked)) => {
                let ConnectFailure { err, is_silent } = failure;
                let started = unranked.tried_at;
                let give_up = unranked.outage.record_failure(is_silent, started, now);
                if give_up || is_final(err.code) {
                    let (code, why) = (err.code, err.why);
                    return self.step(ctx, comms, room, DecodeEvent::Unreachable { code, why });
                }
                entry.last_error = err.why;
                ctx.timers
                    .set(&NodeTimer::Size(room), Some(now + unranked.pause_ms));
                unranked.pause_ms = (unranked.pause_ms * 2).min(LAST_PAUSE_MS);
            }
            (_, None) => {}
        }
    }

    fn request_connection(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        key: RankAddress,
    ) {
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.key = Some(key.clone());
        }
        let now = ctx.now();
        let Some(rank_conn) = self.ranks.get_mut(&key) else {
            self.ranks.insert(key.clone(), RankConnection::new(room));
            return self.connect(ctx, key);
        };
        match rank_conn.state {
            RankState::Up(_) if !rank_conn.damage.quarantine.allows(now) => {
                let (code, why) = (ReasonCode::Quarantined, QUARANTINED.into());
                self.step(ctx, comms, room, DecodeEvent::Unreachable { code, why });
            }
            RankState::Up(peer) => self.attach_to_peer(ctx, comms, room, peer),
            RankState::Connecting | RankState::Pausing => drop(rank_conn.waiting.insert(room)),
            RankState::Broken { until } if now < until => {
                let (code, why) = (ReasonCode::Unreachable, rank_conn.last_error.clone());
                self.step(ctx, comms, room, DecodeEvent::Unreachable { code, why });
            }
            RankState::Broken { .. } => {
                rank_conn.waiting.insert(room);
                self.connect(ctx, key);
            }
        }
    }

    fn connect(&mut self, ctx: &mut NodeContext, key: RankAddress) {
        let now = ctx.now();
        if let Some(rank_conn) = self.ranks.get_mut(&key) {
            (rank_conn.state, rank_conn.tried_at) = (RankState::Connecting, now);
        }
        let client = ctx.bootstrap_client(key.host.clone(), key.port);
        let (identity, internal) = (ctx.identity.clone(), ctx.internal.clone());
        let (mapped, device) = (ctx.config.mapped(), ctx.pool.device().cloned());
        tokio::spawn(async move {
            // In a task of its own, so that a panic becomes an answer too.
            let task = tokio::spawn({
                let key = key.clone();
                async move { establish(&client, key.dp_rank, &identity, mapped, device).await }
            });
            let result = task.await.unwrap_or_else(|err| {
                let why = format!("internal: {err}");
                Err(ConnectionError::new(ReasonCode::TransportBroken, why).into())
            });
            let _ = internal.send(LoopMessage::Connected(key, Box::new(result))); // the node is closing
        });
    }

    pub fn on_connect_result(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: RankAddress,
        result: Result<EstablishedConnection, ConnectFailure>,
    ) {
        match result {
            Ok(established) => self.connection_up(ctx, comms, key, established),
            Err(failure) => self.connect_failed(ctx, comms, key, failure),
        }
    }

    fn connection_up(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: RankAddress,
        established: EstablishedConnection,
    ) {
        let EstablishedConnection {
            stream,
            addr,
            opened,
            remote,
            map_problem,
        } = established;
        if let Some(why) = map_problem {
            tracing::warn!(peer = %opened.peer.addr, %why, "the peer is on this host, but its pool cannot be mapped: going without");
            ctx.shared.stats.lock().fallbacks += 1;
        }
        let transport = match &remote {
            Some(remote) => mapped_by(remote),
            None => comms
                .transport_with(ctx, &opened.peer)
                .unwrap_or(Transport::Tcp),
        };
        let peer = ctx.add_connection(
            stream,
            addr,
            opened,
            Some(key.clone()),
            remote,
            transport.as_str(),
        );
        let Some(rank_conn) = self.ranks.get_mut(&key) else {
            return;
        };
        rank_conn.state = RankState::Up(peer);
        (rank_conn.failures, rank_conn.breaks, rank_conn.outage) = (0, 0, Outage::default());
        rank_conn.damage = Damage::default();
        self.open_waiting(ctx, comms, &key, peer);
    }

    /// Open the rooms that waited for this rank, some at a time: heartbeats and other peers are served in between.
    pub fn open_waiting(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: &RankAddress,
        peer: ConnectionId,
    ) {
        let Some(rank_conn) = self.ranks.get_mut(key) else {
            return;
        };
        if !matches!(rank_conn.state, RankState::Up(up) if up == peer) {
            return; // lost meanwhile: the rooms wait for the next connection
        }
        let rest = rank_conn.waiting.iter().nth(OPENS_AT_ONCE).copied();
        let rest = rest.map(|first| rank_conn.waiting.split_off(&first));
        let rooms = std::mem::replace(&mut rank_conn.waiting, rest.unwrap_or_default());
        if !rank_conn.waiting.is_empty() {
            let _ = ctx
                .internal
                .send(LoopMessage::OpenWaiting(key.clone(), peer)); // the node is closing
        }
        for room in rooms {
            self.attach_to_peer(ctx, comms, room, peer);
        }
    }

    fn connect_failed(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: RankAddress,
        failure: ConnectFailure,
    ) {
        let now = ctx.now();
        let ConnectFailure { err, is_silent } = failure;
        let Some(rank_conn) = self.ranks.get_mut(&key) else {
            return;
        };
        tracing::debug!(host = %key.host, port = key.port, rank = key.dp_rank, code = %err.code, why = %err.why, "no link to the prefill rank");
        let give_up = rank_conn
            .outage
            .record_failure(is_silent, rank_conn.tried_at, now);
        if is_final(err.code) {
            let waiting = std::mem::take(&mut rank_conn.waiting);
            self.ranks.remove(&key);
            return self.fail_waiting(ctx, comms, waiting, err.code, &err.why);
        }
        rank_conn.last_error = err.why;
        if give_up || (is_silent && rank_conn.breaks > 0) {
            let pause = (FIRST_BREAK_MS << rank_conn.breaks.min(10)).min(LAST_BREAK_MS);
            rank_conn.state = RankState::Broken { until: now + pause };
            rank_conn.breaks += 1;
            rank_conn.outage = Outage::default();
            let (waiting, why) = (
                std::mem::take(&mut rank_conn.waiting),
                rank_conn.last_error.clone(),
            );
            // Removed when no room has probed it for some time.
            ctx.timers
                .set(&NodeTimer::Connect(key), Some(now + pause + LAST_BREAK_MS));
            return self.fail_waiting(ctx, comms, waiting, ReasonCode::Unreachable, &why);
        }
        rank_conn.state = RankState::Pausing;
        let pause = (FIRST_PAUSE_MS << rank_conn.failures.min(10)).min(LAST_PAUSE_MS);
        rank_conn.failures += 1;
        ctx.timers.set(&NodeTimer::Connect(key), Some(now + pause));
    }

    fn fail_waiting(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        rooms: BTreeSet<u64>,
        code: ReasonCode,
        why: &str,
    ) {
        for room in rooms {
            let why = why.to_owned();
            self.step(ctx, comms, room, DecodeEvent::Unreachable { code, why });
        }
    }

    pub fn retry_connection(&mut self, ctx: &mut NodeContext, key: &RankAddress) {
        let Some(rank_conn) = self.ranks.get_mut(key) else {
            return;
        };
        match rank_conn.state {
            RankState::Connecting | RankState::Up(_) => {} // a room's probe came first
            RankState::Pausing if !rank_conn.waiting.is_empty() => self.connect(ctx, key.clone()),
            RankState::Pausing | RankState::Broken { .. } => drop(self.ranks.remove(key)),
        }
    }

    /// Handle a lost connection: the next room, or those still waiting, ask the bootstrap server again.
    pub fn connection_down(&mut self, ctx: &mut NodeContext, key: &RankAddress) {
        let Some(rank_conn) = self.ranks.get_mut(key) else {
            return;
        };
        if rank_conn.waiting.is_empty() {
            self.ranks.remove(key);
        } else {
            self.connect(ctx, key.clone());
        }
    }

    fn attach_to_peer(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        peer: ConnectionId,
    ) {
        let Some(conn) = ctx.connections.get(&peer) else {
            return;
        };
        let remote = conn.remote.clone();
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.remote = remote;
            ctx.attach_room(peer, RoomSide::Decode, room);
            self.step(ctx, comms, room, DecodeEvent::Connected { peer });
        }
    }

    // ---- messages of the peer ----

    pub fn on_answer(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        peer: ConnectionId,
        msg: Msg,
    ) {
        match msg {
            Msg::OpenOk { room, attempt, .. } => {
                self.step(ctx, comms, room, DecodeEvent::Accepted { peer, attempt })
            }
            Msg::OpenPending { room, attempt, .. } => {
                self.step(ctx, comms, room, DecodeEvent::OpenPending { peer, attempt })
            }
            Msg::Reject {
                room,
                attempt,
                code,
                message,
                ..
            } => self.step(
                ctx,
                comms,
                room,
                DecodeEvent::Rejected {
                    peer,
                    attempt,
                    code,
                    why: message,
                },
            ),
            Msg::Final {
                room,
                attempt,
                total_pages,
                last_page_tokens,
                root,
                payload,
            } => {
                self.note_decode(ctx, room, attempt, format!("FINAL: {total_pages} pages"));
                self.step(
                    ctx,
                    comms,
                    room,
                    DecodeEvent::Final {
                        peer,
                        attempt,
                        fin: FinalMessage {
                            total_pages,
                            last_page_tokens,
                            root,
                            payload,
                        },
                    },
                );
            }
            Msg::Progress {
                room,
                attempt,
                first_page,
                ids,
                gens,
                sums,
            } => {
                let known = ctx
                    .connections
                    .get(&peer)
                    .map_or(0, |conn| conn.peer.num_pages);
                if let Some(id) = ids.iter().find(|&&id| u64::from(id) >= known) {
                    let err = ConnectionError::new(
                        ReasonCode::TransportBroken,
                        format!("PROGRESS names page {id} of a pool of {known}"),
                    );
                    return ctx.mark_lost(peer, err);
                }
                self.note_decode(
                    ctx,
                    room,
                    attempt,
                    format!(
                        "PROGRESS: pages {first_page}..{}",
                        first_page as usize + ids.len()
                    ),
                );
                let pages = ids
                    .iter()
                    .zip(gens)
                    .zip(sums)
                    .map(|((&page, generation), sum)| PageDigest {
                        page,
                        generation,
                        sum,
                    })
                    .collect();
                self.step(
                    ctx,
                    comms,
                    room,
                    DecodeEvent::Progress {
                        peer,
                        attempt,
                        first_page,
                        pages,
                    },
                );
            }
            _ => {}
        }
    }

    fn note_decode(&self, ctx: &NodeContext, room: u64, attempt: u32, what: String) {
        if let Some(entry) = self.rooms.get(&room) {
            ctx.note(ctx.record_of(
                RoomSide::Decode,
                room,
                attempt,
                entry.room.phase.name(),
                what,
            ));
        }
    }

    pub fn on_peer_abort(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        peer: ConnectionId,
        room: u64,
        attempt: u32,
        code: ReasonCode,
    ) {
        self.step(
            ctx,
            comms,
            room,
            DecodeEvent::PeerAbort {
                peer,
                attempt,
                code,
            },
        );
    }

    pub fn on_peer_gone(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        peer: ConnectionId,
        room: u64,
        code: ReasonCode,
    ) {
        let readable = self
            .rooms
            .get(&room)
            .and_then(|entry| entry.remote.as_ref())
            .is_some_and(|remote| remote.device().is_none());
        self.step(
            ctx,
            comms,
            room,
            DecodeEvent::PeerGone {
                peer,
                code,
                readable,
            },
        );
    }

    pub fn on_peer_stalled(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        peer: ConnectionId,
        room: u64,
        still_ms: u64,
    ) {
        let why = format!("the prefill rank's engine has made no progress for {still_ms} ms");
        self.step(ctx, comms, room, DecodeEvent::PeerStalled { peer, why });
    }

    // ---- pulls ----

    fn start_pull(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        ticket: u64,
        pages: Vec<PullPage>,
    ) {
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        entry.first_pull.get_or_insert_with(Instant::now);
        let peer = entry.room.peer().unwrap_or_default();
        let via = match self.mapped_for(ctx, room, peer) {
            Some(mapped) => mapped,
            None => comms.transport_for(ctx, peer).unwrap_or(Transport::Tcp),
        };
        let job = PullJob {
            room,
            ticket,
            peer,
            pages,
            via,
            cancel: Arc::default(),
            started: Instant::now(),
        };
        self.dispatch(ctx, comms, job);
    }

    /// The transport that reads the peer's memory, if the room has it and it works.
    fn mapped_for(&self, ctx: &NodeContext, room: u64, peer: ConnectionId) -> Option<Transport> {
        let works = ctx
            .connections
            .get(&peer)
            .is_none_or(|conn| conn.mapped_works);
        let remote = self.rooms.get(&room)?.remote.as_ref()?;
        works.then(|| mapped_by(remote))
    }

    /// Submit a pull to its transport, or end it at once if there is none.
    fn dispatch(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, job: PullJob) {
        let id = self.next_job;
        self.next_job += 1;
        let pull = Pull {
            id,
            pages: job.pages.clone(),
            cancel: job.cancel.clone(),
        };
        let taken = match job.via {
            Transport::Shm | Transport::CudaIpc => match self
                .rooms
                .get(&job.room)
                .and_then(|entry| entry.remote.clone())
            {
                Some(from) => {
                    ctx.copy_threads.submit(CopyJob::Pull {
                        pull: pull.clone(),
                        from,
                    });
                    Ok(())
                }
                None => Err("the peer's pool is not mapped"),
            },
            Transport::Tcp => self.pull_by_tcp(ctx, job.peer, pull.clone()),
            // Taken below: its end may come at once.
            Transport::Gloo | Transport::Nccl => Ok(()),
        };
        if let Some(entry) = self.rooms.get_mut(&job.room) {
            entry.transport = job.via.as_str();
        }
        let (room, ticket, peer, via) = (job.room, job.ticket, job.peer, job.via);
        match taken {
            Ok(()) => {
                self.jobs.insert(id, job);
                if via.is_staged() {
                    comms.pull(ctx, peer, pull);
                }
            }
            Err(why) => self.step(
                ctx,
                comms,
                room,
                DecodeEvent::PullFailed {
                    ticket,
                    code: ReasonCode::TransportBroken,
                    why: why.into(),
                },
            ),
        }
    }

    /// The peer is connected, and both sides may use tcp.
    fn has_tcp(&self, ctx: &NodeContext, peer: ConnectionId) -> bool {
        let tcp = Transport::Tcp;
        let theirs = ctx.connections.get(&peer).map(|conn| &conn.peer.transports);
        ctx.may_use(tcp) && theirs.is_some_and(|theirs| theirs.iter().any(|t| t == tcp.as_str()))
    }

    fn pull_by_tcp(
        &mut self,
        ctx: &mut NodeContext,
        peer: ConnectionId,
        pull: Pull,
    ) -> Result<(), &'static str> {
        let has_tcp = self.has_tcp(ctx, peer);
        let Some(conn) = ctx.connections.get_mut(&peer) else {
            return Err("the prefill rank is gone");
        };
        if !has_tcp {
            return Err("no other transport of the pair works, and one side has no tcp");
        }
        if let Some(data) = &conn.data
            && data.pull(pull.clone())
        {
            return Ok(());
        }
        // No stream yet, or the last one broke.
        let data = ctx.data.connect(conn.addr, &conn.peer.inc, conn.sums);
        let taken = data.pull(pull);
        conn.data = Some(data);
        if taken {
            Ok(())
        } else {
            Err("the data thread is gone")
        }
    }

    fn cancel_pulls(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, room: u64) {
        let mut staged = Vec::new();
        for (&id, job) in self.jobs.iter().filter(|(_, job)| job.room == room) {
            job.cancel.store(true, Ordering::Relaxed);
            if job.via.is_staged() {
                staged.push((job.peer, id));
            }
            if job.via == Transport::Tcp
                && let Some(data) = ctx
                    .connections
                    .get(&job.peer)
                    .and_then(|conn| conn.data.as_ref())
            {
                data.cancel(id);
            }
        }
        for (peer, id) in staged {
            comms.cancel(ctx, peer, id);
        }
    }

    pub fn on_pulled(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, end: PullEnd) {
        let Some(job) = self.jobs.remove(&end.id) else {
            return;
        };
        {
            let mut stats = ctx.shared.stats.lock();
            let pull = stats.pull.entry(job.via.as_str()).or_default();
            pull.batches += 1;
            pull.bytes += end.bytes;
            pull.pages += end.bytes / ctx.pool.page_bytes() as u64;
            pull.batch_seconds += job.started.elapsed().as_secs_f64();
            let is_damaged = matches!(end.result, Err(PullError::Failed(ReasonCode::Checksum, _)));
            pull.damaged += u64::from(is_damaged);
        }
        if let Some(entry) = self.rooms.get_mut(&job.room) {
            entry.bytes += end.bytes;
        }
        let (room, ticket) = (job.room, job.ticket);
        match end.result {
            Ok(()) => self.step(ctx, comms, room, DecodeEvent::Pulled { ticket }),
            Err(PullError::Failed(ReasonCode::Checksum, why))
                if job.via != Transport::Tcp && self.has_tcp(ctx, job.peer) =>
            {
                self.retry_by_tcp(ctx, comms, job, &why);
            }
            Err(PullError::Failed(code, why)) => self.step(
                ctx,
                comms,
                room,
                DecodeEvent::PullFailed { ticket, code, why },
            ),
            Err(PullError::Cancelled) => {
                self.step(ctx, comms, room, DecodeEvent::PullStopped { ticket })
            }
            Err(PullError::Broken(why)) if job.via != Transport::Tcp => {
                self.fall_back(ctx, comms, job, &why)
            }
            Err(PullError::Broken(why)) => self.step(
                ctx,
                comms,
                room,
                DecodeEvent::PullFailed {
                    ticket,
                    code: ReasonCode::TransportBroken,
                    why,
                },
            ),
        }
    }

    /// Continue a pull whose transport stopped working by the next one. The peer's memory is not used until the connection is
    /// established again, its communicator not until the breaker allows it (`communicators`).
    fn fall_back(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        job: PullJob,
        why: &str,
    ) {
        if job.via.is_mapped()
            && let Some(conn) = ctx.connections.get_mut(&job.peer)
            && conn.mapped_works
        {
            conn.mapped_works = false;
            comms.record_fallback(ctx, job.peer, job.via, why);
        }
        if job.cancel.load(Ordering::Relaxed) {
            return self.step(
                ctx,
                comms,
                job.room,
                DecodeEvent::PullStopped { ticket: job.ticket },
            );
        }
        let via = if job.via.is_mapped() {
            comms.transport_for(ctx, job.peer)
        } else {
            self.mapped_for(ctx, job.room, job.peer)
        };
        let via = via.unwrap_or(Transport::Tcp);
        self.dispatch(ctx, comms, PullJob { via, ..job });
    }

    /// Pull damaged pages again by tcp: another path shows whether the transport or the prefill rank damaged them.
    fn retry_by_tcp(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        job: PullJob,
        why: &str,
    ) {
        tracing::warn!(room = job.room, via = job.via.as_str(), %why, "damaged pages: pulled again by tcp");
        if job.cancel.load(Ordering::Relaxed) {
            return self.step(
                ctx,
                comms,
                job.room,
                DecodeEvent::PullStopped { ticket: job.ticket },
            );
        }
        let via = Transport::Tcp;
        self.dispatch(ctx, comms, PullJob { via, ..job });
    }

    /// Count a room that ended with damaged pages; it may quarantine the pair.
    fn record_damaged_room(&mut self, ctx: &mut NodeContext, entry: &DecodeEntry) {
        let now = ctx.now();
        let Some((key, rank_conn)) = entry
            .key
            .as_ref()
            .and_then(|key| Some((key, self.ranks.get_mut(key)?)))
        else {
            return;
        };
        if rank_conn
            .damage
            .record_room(entry.opened, Instant::now(), now)
        {
            ctx.shared.stats.lock().quarantines += 1;
            tracing::error!(host = %key.host, port = key.port, rank = key.dp_rank, rooms = rank_conn.damage.rooms, "{QUARANTINED}");
        }
    }

    /// Fail every tcp pull: the data thread has ended, and with it all writes to their pages.
    pub fn on_data_thread_died(&mut self, ctx: &mut NodeContext, comms: &mut Communicators) {
        let lost: HashMap<u64, PullJob> = self
            .jobs
            .extract_if(|_, job| job.via == Transport::Tcp)
            .collect();
        for job in lost.into_values() {
            self.step(
                ctx,
                comms,
                job.room,
                DecodeEvent::PullFailed {
                    ticket: job.ticket,
                    code: ReasonCode::TransportBroken,
                    why: "internal: the data thread is gone".into(),
                },
            );
        }
    }

    // ---- the state machine ----

    /// The only place where a decode room changes.
    fn step(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        event: DecodeEvent,
    ) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        }; // over: late messages and calls are expected
        let before = entry.room.phase.name();
        match entry.room.step(event, now) {
            Ok(actions) => {
                let (phase, attempt, due) = (
                    entry.room.phase.clone(),
                    entry.room.attempt,
                    entry.room.next_due(),
                );
                if phase.name() != before {
                    let note = if let DecodePhase::Failed(code) = phase {
                        code.to_string()
                    } else {
                        String::new()
                    };
                    ctx.record(
                        ctx.record_of(RoomSide::Decode, room, attempt, phase.name(), note),
                        phase.is_over(),
                    );
                }
                ctx.timers.set(&NodeTimer::Decode(room), due);
                for action in actions {
                    self.act(ctx, comms, room, attempt, action);
                }
            }
            Err(invalid) => ctx.report_invalid_transition(RoomSide::Decode, room, &invalid),
        }
    }

    fn act(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        attempt: u32,
        action: DecodeAction,
    ) {
        match action {
            DecodeAction::Open { peer } => self.send_open(ctx, room, attempt, peer),
            DecodeAction::Pull { ticket, pages } => {
                self.start_pull(ctx, comms, room, ticket, pages)
            }
            DecodeAction::CancelPulls => self.cancel_pulls(ctx, comms, room),
            DecodeAction::Announced => ctx.push(NodeEvent::Announced { room }),
            DecodeAction::Revoked => ctx.push(NodeEvent::Revoked { room }),
            DecodeAction::Done { peer, root } => {
                let bytes = self.rooms.get(&room).map_or(0, |entry| entry.bytes);
                ctx.send(
                    peer,
                    Msg::Done {
                        room,
                        attempt,
                        bytes,
                        root,
                    },
                );
            }
            DecodeAction::SendAbort { peer, code } => ctx.send(
                peer,
                Msg::Abort {
                    room,
                    attempt,
                    code,
                },
            ),
            DecodeAction::AckAbort { peer } => ctx.send(peer, Msg::AbortAck { room, attempt }),
            DecodeAction::Commit(fin) => self.committed(ctx, room, fin),
            DecodeAction::Fail { code, why } => {
                if let Some(entry) = self.forget(ctx, room) {
                    ctx.count_failure(code);
                    if code == ReasonCode::Checksum {
                        self.record_damaged_room(ctx, &entry);
                    }
                    ctx.push(NodeEvent::Failed {
                        room,
                        code,
                        message: why,
                    });
                }
            }
            DecodeAction::Aborted => {
                if self.forget(ctx, room).is_some() {
                    ctx.shared.stats.lock().aborted += 1;
                    ctx.push(NodeEvent::Aborted { room });
                }
            }
        }
    }

    fn send_open(&mut self, ctx: &mut NodeContext, room: u64, attempt: u32, peer: ConnectionId) {
        let (Some(entry), Some(conn)) = (self.rooms.get(&room), ctx.connections.get(&peer)) else {
            return;
        };
        let msg = Msg::Open {
            room,
            attempt,
            d_inc: ctx.identity.hello.inc.clone(),
            p_inc_expected: conn.peer.inc.clone(),
            layout_hash: ctx.identity.hello.layout_hash.clone(),
            prompt_hash: entry.prompt_hash.clone(),
            start_page: entry.room.start_page,
            deadline_ms: entry.room.deadline().saturating_sub(ctx.now()),
            prio: 0,
        };
        ctx.send(peer, msg);
    }

    fn committed(&mut self, ctx: &mut NodeContext, room: u64, fin: FinalMessage) {
        let Some(entry) = self.forget(ctx, room) else {
            return;
        };
        if entry.bytes > 0
            && let Some(rank_conn) = entry.key.as_ref().and_then(|key| self.ranks.get_mut(key))
        {
            rank_conn.damage = Damage::default();
        }
        let stats = PullStats {
            transport: entry.transport,
            pages: entry.room.verified_pages() as u64,
            bytes: entry.bytes,
            pull_seconds: entry
                .first_pull
                .map_or(0.0, |at| at.elapsed().as_secs_f64()),
            room_seconds: entry.opened.elapsed().as_secs_f64(),
        };
        {
            let mut all = ctx.shared.stats.lock();
            all.committed += 1;
            let pull = all.pull.entry(stats.transport).or_default();
            pull.rooms += 1;
            pull.room_seconds += stats.pull_seconds;
            all.pull_seconds.observe(stats.pull_seconds);
            all.room_seconds.observe(stats.room_seconds);
        }
        let FinalMessage {
            total_pages,
            last_page_tokens,
            payload,
            ..
        } = fin;
        ctx.push(NodeEvent::Committed {
            room,
            payload,
            total_pages,
            last_page_tokens,
            stats,
        });
    }

    /// Remove a room that is over, with its timers and attachments.
    fn forget(&mut self, ctx: &mut NodeContext, room: u64) -> Option<DecodeEntry> {
        let entry = self.rooms.remove(&room)?;
        ctx.timers.set(&NodeTimer::Decode(room), None);
        ctx.timers.set(&NodeTimer::Size(room), None);
        // The state machine may have cleared its peer already; the room is still attached to the rank's connection.
        if let Some(key) = &entry.key
            && let Some(rank_conn) = self.ranks.get_mut(key)
        {
            rank_conn.waiting.remove(&room);
            if let RankState::Up(peer) = rank_conn.state {
                ctx.detach_room(Some(peer), RoomSide::Decode, room);
            }
        }
        ctx.detach_room(entry.room.peer(), RoomSide::Decode, room);
        Some(entry)
    }
}

/// Message for client and log.
const QUARANTINED: &str = "transfers from this prefill rank fail for a while, because several in a row brought damaged pages; check the \
    memory and the network of both hosts, then restart the prefill node";

/// Errors that waiting does not cure.
fn is_final(code: ReasonCode) -> bool {
    matches!(code, ReasonCode::Auth | ReasonCode::LayoutMismatch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarantine_is_longer_each_time_and_begins_once() {
        let mut damage = Damage::default();
        let start = Instant::now();
        let mut record_room = |opened, now| {
            let at = |ms| start + std::time::Duration::from_millis(ms);
            let begins = damage.record_room(at(opened), at(now), now);
            (begins, damage.quarantine.clone())
        };
        assert!(!record_room(0, 1).0 && !record_room(2, 3).0);
        assert!(!record_room(2, 4).0, "it was open when the last one failed");
        let (begins, quarantine) = record_room(5, 6);
        assert!(begins && !quarantine.allows(30_005) && quarantine.allows(30_006));
        assert!(!record_room(7, 8).0, "the quarantine has begun");
        let (begins, quarantine) = record_room(40_000, 40_000);
        assert!(begins, "the first room after it");
        assert!(!quarantine.allows(99_999) && quarantine.allows(100_000));
    }
}
