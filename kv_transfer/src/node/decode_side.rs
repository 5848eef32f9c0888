//! D's half of the control loop: rooms opened by the engine, the links to prefill ranks, and the pulls.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::command::OpenRequest;
use super::communicators::Communicators;
use super::config::Transport;
use super::connections::establish::{Established, LinkFailure, establish, unreachable};
use super::context::{Internal, LinkKey, NodeContext, Timer, mapped_by};
use super::records::events::{NodeEvent, PullStats};
use super::records::room_history::Side;
use crate::pool::RemotePool;
use crate::protocol::handshake::LinkError;
use crate::protocol::{Msg, Sealed};
use crate::reason_code::Code;
use crate::state_machine::Peer;
use crate::state_machine::communicator::Breaker;
use crate::state_machine::decode::{Action, Event, Final, Phase, PullLimits, PullPage, Room};
use crate::transport::copy_threads::Job;
use crate::transport::{Pull, PullEnd, PullError};

/// Bytes of one pull: large enough that its bookkeeping is lost in the copy, small enough that rooms share the copy thread.
const PULL_BYTES: usize = 16 << 20;
const PULLS_IN_FLIGHT: usize = 2;
/// Rooms opened in one turn of the control loop when their link comes up.
const OPENS_AT_ONCE: usize = 256;
/// Pause before the next attempt to reach a prefill rank: doubled from the first to the last.
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

enum LinkState {
    Connecting,
    Pausing,
    Up(Peer),
    /// Unreachable: rooms fail at once until then; the next one after it probes the rank.
    Broken {
        until: u64,
    },
}

/// Attempts in a row that nothing answered.
#[derive(Default)]
struct Outage {
    attempts: u32,
    since: u64,
}

impl Outage {
    /// An attempt begun at `started` has failed. True: give up.
    fn is_over_with(&mut self, is_silent: bool, started: u64, now: u64) -> bool {
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

/// The way to a prefill rank, and the rooms that wait for it. Exists as long as it is up or broken, or rooms wait.
struct Link {
    state: LinkState,
    waiting: BTreeSet<u64>,
    failures: u32,
    outage: Outage,
    /// Start of the last attempt.
    tried_at: u64,
    /// Times in a row that this link broke; from the second on, one attempt decides.
    breaks: u32,
    last_error: String,
    damage: Damage,
}

/// Rooms with damaged pages in a row, and how long further ones fail at once because of it: 30 s, and twice as long after each room
/// that fails then, up to 16 minutes. A new connection starts anew: a host that was repaired, or its rank, has restarted.
#[derive(Default)]
struct Damage {
    rooms: u32,
    /// When the last of them failed.
    last_at: Option<Instant>,
    quarantine: Breaker,
}

impl Damage {
    /// A room failed with CHECKSUM. True: the pair's quarantine begins. Rooms that were open when the last one failed do not count: they
    /// may share its pages, which the prefill node has now taken out of its cache.
    fn found(&mut self, opened: Instant, at: Instant, now: u64) -> bool {
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

impl Link {
    fn new(room: u64) -> Self {
        Self {
            state: LinkState::Connecting,
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

/// Where an unranked room asks for the dp size.
struct Unranked {
    host: String,
    port: u16,
    pause_ms: u64,
    outage: Outage,
    tried_at: u64,
}

struct DecodeEntry {
    room: Room,
    prompt_hash: Vec<u8>,
    unranked: Option<Unranked>,
    key: Option<LinkKey>,
    last_error: String,
    /// The peer's pool; kept here because it outlives the peer's connection.
    remote: Option<Arc<RemotePool>>,
    transport: &'static str,
    bytes: u64,
    opened: Instant,
    first_pull: Option<Instant>,
}

/// A pull handed to a transport.
struct PullJob {
    room: u64,
    ticket: u64,
    peer: Peer,
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
            room: Room::new(attempt, 0, now, now.saturating_add(deadline_ms), limits),
            prompt_hash,
            unranked: None,
            key: None,
            last_error: "nobody was asked yet".into(),
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
    links: HashMap<LinkKey, Link>,
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

    /// Pages of the pulls from this peer that have not ended.
    pub fn queued_pages(&self, peer: Peer) -> u64 {
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
        ctx.enter(
            ctx.entry(
                Side::Decode,
                room,
                entry.room.attempt,
                entry.room.phase.name(),
                format!("{host}:{port} rank {dp_rank}"),
            ),
            false,
        );
        ctx.timers.set(&Timer::Decode(room), entry.room.next_due());
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
            Some(dp_rank) => self.request_link(
                ctx,
                comms,
                room,
                LinkKey {
                    host,
                    port,
                    dp_rank,
                },
            ),
            None => self.ask_size(ctx, room),
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
        self.step(ctx, comms, room, Event::Grant { start_page, pages });
    }

    pub fn revoke(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, room: u64) {
        self.step(ctx, comms, room, Event::Revoke);
    }

    pub fn abort(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        code: Code,
    ) {
        self.step(ctx, comms, room, Event::Abort(code));
    }

    pub fn tick(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, room: u64) {
        let Some(entry) = self.rooms.get(&room) else {
            return;
        };
        // The reason why the prefill rank was not reached says more than the time that passed.
        let event = if entry.room.phase == Phase::Resolving {
            let link = entry.key.as_ref().and_then(|key| self.links.get(key));
            let why = link.map_or(&entry.last_error, |link| &link.last_error);
            Event::Unreachable {
                code: Code::Unreachable,
                why: format!(
                    "the prefill rank was not reached within {} ms; last: {why}",
                    ctx.config.wait_ms
                ),
            }
        } else {
            Event::Tick
        };
        self.step(ctx, comms, room, event);
    }

    // ---- links ----

    /// A room without a rank: the prefill node's dp size decides it.
    pub fn ask_size(&mut self, ctx: &mut NodeContext, room: u64) {
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
            let _ = internal.send(Internal::Sized { room, size }); // the node is closing
        });
    }

    pub fn on_sized(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        size: Result<u32, LinkFailure>,
    ) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        };
        match (size, &mut entry.unranked) {
            (Ok(size), Some(unranked)) => {
                let dp_rank = (room % u64::from(size.max(1))) as u32;
                let key = LinkKey {
                    host: unranked.host.clone(),
                    port: unranked.port,
                    dp_rank,
                };
                entry.unranked = None;
                self.request_link(ctx, comms, room, key);
            }
            (Err(failure), Some(unranked)) => {
                let LinkFailure { err, is_silent } = failure;
                let started = unranked.tried_at;
                let give_up = unranked.outage.is_over_with(is_silent, started, now);
                if give_up || is_final(err.code) {
                    let (code, why) = (err.code, err.why);
                    return self.step(ctx, comms, room, Event::Unreachable { code, why });
                }
                entry.last_error = err.why;
                ctx.timers
                    .set(&Timer::Size(room), Some(now + unranked.pause_ms));
                unranked.pause_ms = (unranked.pause_ms * 2).min(LAST_PAUSE_MS);
            }
            (_, None) => {}
        }
    }

    fn request_link(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        key: LinkKey,
    ) {
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.key = Some(key.clone());
        }
        let now = ctx.now();
        let Some(link) = self.links.get_mut(&key) else {
            self.links.insert(key.clone(), Link::new(room));
            return self.connect(ctx, key);
        };
        match link.state {
            LinkState::Up(_) if !link.damage.quarantine.allows(now) => {
                let (code, why) = (Code::Quarantined, QUARANTINED.into());
                self.step(ctx, comms, room, Event::Unreachable { code, why });
            }
            LinkState::Up(peer) => self.connected(ctx, comms, room, peer),
            LinkState::Connecting | LinkState::Pausing => drop(link.waiting.insert(room)),
            LinkState::Broken { until } if now < until => {
                let (code, why) = (Code::Unreachable, link.last_error.clone());
                self.step(ctx, comms, room, Event::Unreachable { code, why });
            }
            LinkState::Broken { .. } => {
                link.waiting.insert(room);
                self.connect(ctx, key);
            }
        }
    }

    fn connect(&mut self, ctx: &mut NodeContext, key: LinkKey) {
        let now = ctx.now();
        if let Some(link) = self.links.get_mut(&key) {
            (link.state, link.tried_at) = (LinkState::Connecting, now);
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
                Err(LinkError::new(Code::TransportBroken, why).into())
            });
            let _ = internal.send(Internal::Linked(key, Box::new(result))); // the node is closing
        });
    }

    pub fn on_linked(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: LinkKey,
        result: Result<Established, LinkFailure>,
    ) {
        match result {
            Ok(established) => self.link_up(ctx, comms, key, established),
            Err(failure) => self.link_failed(ctx, comms, key, failure),
        }
    }

    fn link_up(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: LinkKey,
        established: Established,
    ) {
        let Established {
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
        let peer = ctx.add_conn(
            stream,
            addr,
            opened,
            Some(key.clone()),
            remote,
            transport.as_str(),
        );
        let Some(link) = self.links.get_mut(&key) else {
            return;
        };
        link.state = LinkState::Up(peer);
        (link.failures, link.breaks, link.outage) = (0, 0, Outage::default());
        link.damage = Damage::default();
        self.open_waiting(ctx, comms, &key, peer);
    }

    /// Open the rooms that waited for this link, some at a time: heartbeats and other peers get their turn between.
    pub fn open_waiting(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: &LinkKey,
        peer: Peer,
    ) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if !matches!(link.state, LinkState::Up(up) if up == peer) {
            return; // lost meanwhile: the rooms wait for the next one
        }
        let rest = link.waiting.iter().nth(OPENS_AT_ONCE).copied();
        let rest = rest.map(|first| link.waiting.split_off(&first));
        let rooms = std::mem::replace(&mut link.waiting, rest.unwrap_or_default());
        if !link.waiting.is_empty() {
            let _ = ctx.internal.send(Internal::OpenWaiting(key.clone(), peer)); // the node is closing
        }
        for room in rooms {
            self.connected(ctx, comms, room, peer);
        }
    }

    fn link_failed(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        key: LinkKey,
        failure: LinkFailure,
    ) {
        let now = ctx.now();
        let LinkFailure { err, is_silent } = failure;
        let Some(link) = self.links.get_mut(&key) else {
            return;
        };
        tracing::debug!(host = %key.host, port = key.port, rank = key.dp_rank, code = %err.code, why = %err.why, "no link to the prefill rank");
        let give_up = link.outage.is_over_with(is_silent, link.tried_at, now);
        if is_final(err.code) {
            let waiting = std::mem::take(&mut link.waiting);
            self.links.remove(&key);
            return self.fail_waiting(ctx, comms, waiting, err.code, &err.why);
        }
        link.last_error = err.why;
        if give_up || (is_silent && link.breaks > 0) {
            let pause = (FIRST_BREAK_MS << link.breaks.min(10)).min(LAST_BREAK_MS);
            link.state = LinkState::Broken { until: now + pause };
            link.breaks += 1;
            link.outage = Outage::default();
            let (waiting, why) = (std::mem::take(&mut link.waiting), link.last_error.clone());
            // Forgotten when no room has probed it for some time.
            ctx.timers
                .set(&Timer::Link(key), Some(now + pause + LAST_BREAK_MS));
            return self.fail_waiting(ctx, comms, waiting, Code::Unreachable, &why);
        }
        link.state = LinkState::Pausing;
        let pause = (FIRST_PAUSE_MS << link.failures.min(10)).min(LAST_PAUSE_MS);
        link.failures += 1;
        ctx.timers.set(&Timer::Link(key), Some(now + pause));
    }

    fn fail_waiting(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        rooms: BTreeSet<u64>,
        code: Code,
        why: &str,
    ) {
        for room in rooms {
            let why = why.to_owned();
            self.step(ctx, comms, room, Event::Unreachable { code, why });
        }
    }

    pub fn retry_link(&mut self, ctx: &mut NodeContext, key: &LinkKey) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        match link.state {
            LinkState::Connecting | LinkState::Up(_) => {} // a probe came before
            LinkState::Pausing if !link.waiting.is_empty() => self.connect(ctx, key.clone()),
            LinkState::Pausing | LinkState::Broken { .. } => drop(self.links.remove(key)),
        }
    }

    /// The connection is gone: the next room, or those that wait still, ask the bootstrap server again.
    pub fn link_down(&mut self, ctx: &mut NodeContext, key: &LinkKey) {
        let Some(link) = self.links.get_mut(key) else {
            return;
        };
        if link.waiting.is_empty() {
            self.links.remove(key);
        } else {
            self.connect(ctx, key.clone());
        }
    }

    fn connected(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        peer: Peer,
    ) {
        let Some(conn) = ctx.conns.get(&peer) else {
            return;
        };
        let remote = conn.remote.clone();
        if let Some(entry) = self.rooms.get_mut(&room) {
            entry.remote = remote;
            ctx.tie(peer, Side::Decode, room);
            self.step(ctx, comms, room, Event::Connected { peer });
        }
    }

    // ---- the peer's words ----

    pub fn on_answer(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        peer: Peer,
        msg: Msg,
    ) {
        match msg {
            Msg::OpenOk { room, attempt, .. } => {
                self.step(ctx, comms, room, Event::Accepted { peer, attempt })
            }
            Msg::Parked { room, attempt, .. } => {
                self.step(ctx, comms, room, Event::Parked { peer, attempt })
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
                Event::Rejected {
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
                    Event::Final {
                        peer,
                        attempt,
                        fin: Final {
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
                let known = ctx.conns.get(&peer).map_or(0, |conn| conn.peer.num_pages);
                if let Some(id) = ids.iter().find(|&&id| u64::from(id) >= known) {
                    let err = LinkError::new(
                        Code::TransportBroken,
                        format!("PROGRESS names page {id} of a pool of {known}"),
                    );
                    return ctx.lose(peer, err);
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
                    .map(|((&page, generation), sum)| Sealed {
                        page,
                        generation,
                        sum,
                    })
                    .collect();
                self.step(
                    ctx,
                    comms,
                    room,
                    Event::Progress {
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
            ctx.note(ctx.entry(Side::Decode, room, attempt, entry.room.phase.name(), what));
        }
    }

    pub fn on_peer_abort(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        peer: Peer,
        room: u64,
        attempt: u32,
        code: Code,
    ) {
        self.step(
            ctx,
            comms,
            room,
            Event::PeerAbort {
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
        peer: Peer,
        room: u64,
        code: Code,
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
            Event::PeerGone {
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
        peer: Peer,
        room: u64,
        still_ms: u64,
    ) {
        let why = format!("the prefill rank's engine has made no progress for {still_ms} ms");
        self.step(ctx, comms, room, Event::PeerStalled { peer, why });
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
    fn mapped_for(&self, ctx: &NodeContext, room: u64, peer: Peer) -> Option<Transport> {
        let works = ctx.conns.get(&peer).is_none_or(|conn| conn.mapped_works);
        let remote = self.rooms.get(&room)?.remote.as_ref()?;
        works.then(|| mapped_by(remote))
    }

    /// Hand a pull to its transport, or end it at once if there is none.
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
                    ctx.copier.submit(Job::Pull {
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
                Event::PullFailed {
                    ticket,
                    code: Code::TransportBroken,
                    why: why.into(),
                },
            ),
        }
    }

    /// The peer is connected, and both sides may use tcp.
    fn has_tcp(&self, ctx: &NodeContext, peer: Peer) -> bool {
        let tcp = Transport::Tcp;
        let theirs = ctx.conns.get(&peer).map(|conn| &conn.peer.transports);
        ctx.may_use(tcp) && theirs.is_some_and(|theirs| theirs.iter().any(|t| t == tcp.as_str()))
    }

    fn pull_by_tcp(
        &mut self,
        ctx: &mut NodeContext,
        peer: Peer,
        pull: Pull,
    ) -> Result<(), &'static str> {
        let has_tcp = self.has_tcp(ctx, peer);
        let Some(conn) = ctx.conns.get_mut(&peer) else {
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
                && let Some(data) = ctx.conns.get(&job.peer).and_then(|conn| conn.data.as_ref())
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
            let is_damaged = matches!(end.result, Err(PullError::Failed(Code::Checksum, _)));
            pull.damaged += u64::from(is_damaged);
        }
        if let Some(entry) = self.rooms.get_mut(&job.room) {
            entry.bytes += end.bytes;
        }
        let (room, ticket) = (job.room, job.ticket);
        match end.result {
            Ok(()) => self.step(ctx, comms, room, Event::Pulled { ticket }),
            Err(PullError::Failed(Code::Checksum, why))
                if job.via != Transport::Tcp && self.has_tcp(ctx, job.peer) =>
            {
                self.pull_again(ctx, comms, job, &why);
            }
            Err(PullError::Failed(code, why)) => {
                self.step(ctx, comms, room, Event::PullFailed { ticket, code, why })
            }
            Err(PullError::Cancelled) => self.step(ctx, comms, room, Event::PullStopped { ticket }),
            Err(PullError::Broken(why)) if job.via != Transport::Tcp => {
                self.fall_back(ctx, comms, job, &why)
            }
            Err(PullError::Broken(why)) => self.step(
                ctx,
                comms,
                room,
                Event::PullFailed {
                    ticket,
                    code: Code::TransportBroken,
                    why,
                },
            ),
        }
    }

    /// The pull's transport stopped working: it goes on by the next one. A pair goes without the peer's memory until its connection is
    /// made anew, without its communicator as long as the breaker says (`communicators`).
    fn fall_back(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        job: PullJob,
        why: &str,
    ) {
        if job.via.is_mapped()
            && let Some(conn) = ctx.conns.get_mut(&job.peer)
            && conn.mapped_works
        {
            conn.mapped_works = false;
            comms.changed_transport(ctx, job.peer, job.via, why);
        }
        if job.cancel.load(Ordering::Relaxed) {
            return self.step(
                ctx,
                comms,
                job.room,
                Event::PullStopped { ticket: job.ticket },
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

    /// The pages arrived damaged, by the transport or at the prefill rank: tcp tells which, for it takes another way.
    fn pull_again(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        job: PullJob,
        why: &str,
    ) {
        tracing::warn!(room = job.room, via = job.via.as_str(), %why, "damaged pages: on_pulled again by tcp");
        if job.cancel.load(Ordering::Relaxed) {
            return self.step(
                ctx,
                comms,
                job.room,
                Event::PullStopped { ticket: job.ticket },
            );
        }
        let via = Transport::Tcp;
        self.dispatch(ctx, comms, PullJob { via, ..job });
    }

    /// A room ended with damaged pages.
    fn room_was_damaged(&mut self, ctx: &mut NodeContext, entry: &DecodeEntry) {
        let now = ctx.now();
        let Some((key, link)) = entry
            .key
            .as_ref()
            .and_then(|key| Some((key, self.links.get_mut(key)?)))
        else {
            return;
        };
        if link.damage.found(entry.opened, Instant::now(), now) {
            ctx.shared.stats.lock().quarantines += 1;
            tracing::error!(host = %key.host, port = key.port, rank = key.dp_rank, rooms = link.damage.rooms, "{QUARANTINED}");
        }
    }

    /// The thread is gone, and with it every tcp pull: it wrote its last byte before it died.
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
                Event::PullFailed {
                    ticket: job.ticket,
                    code: Code::TransportBroken,
                    why: "internal: the data thread is gone".into(),
                },
            );
        }
    }

    // ---- the state machine ----

    /// The only place where a decode room changes.
    fn step(&mut self, ctx: &mut NodeContext, comms: &mut Communicators, room: u64, event: Event) {
        let now = ctx.now();
        let Some(entry) = self.rooms.get_mut(&room) else {
            return;
        }; // over: late words and calls are expected
        let before = entry.room.phase.name();
        match entry.room.step(event, now) {
            Ok(actions) => {
                let (phase, attempt, due) = (
                    entry.room.phase.clone(),
                    entry.room.attempt,
                    entry.room.next_due(),
                );
                if phase.name() != before {
                    let note = if let Phase::Failed(code) = phase {
                        code.to_string()
                    } else {
                        String::new()
                    };
                    ctx.enter(
                        ctx.entry(Side::Decode, room, attempt, phase.name(), note),
                        phase.is_over(),
                    );
                }
                ctx.timers.set(&Timer::Decode(room), due);
                for action in actions {
                    self.act(ctx, comms, room, attempt, action);
                }
            }
            Err(illegal) => ctx.report_illegal(Side::Decode, room, &illegal),
        }
    }

    fn act(
        &mut self,
        ctx: &mut NodeContext,
        comms: &mut Communicators,
        room: u64,
        attempt: u32,
        action: Action,
    ) {
        match action {
            Action::Open { peer } => self.send_open(ctx, room, attempt, peer),
            Action::Pull { ticket, pages } => self.start_pull(ctx, comms, room, ticket, pages),
            Action::CancelPulls => self.cancel_pulls(ctx, comms, room),
            Action::Announced => ctx.push(NodeEvent::Announced { room }),
            Action::Revoked => ctx.push(NodeEvent::Revoked { room }),
            Action::Done { peer, root } => {
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
            Action::SendAbort { peer, code } => ctx.send(
                peer,
                Msg::Abort {
                    room,
                    attempt,
                    code,
                },
            ),
            Action::AckAbort { peer } => ctx.send(peer, Msg::AbortAck { room, attempt }),
            Action::Commit(fin) => self.committed(ctx, room, fin),
            Action::Fail { code, why } => {
                if let Some(entry) = self.forget(ctx, room) {
                    ctx.count_failure(code);
                    if code == Code::Checksum {
                        self.room_was_damaged(ctx, &entry);
                    }
                    ctx.push(NodeEvent::Failed {
                        room,
                        code,
                        message: why,
                    });
                }
            }
            Action::Aborted => {
                if self.forget(ctx, room).is_some() {
                    ctx.shared.stats.lock().aborted += 1;
                    ctx.push(NodeEvent::Aborted { room });
                }
            }
        }
    }

    fn send_open(&mut self, ctx: &mut NodeContext, room: u64, attempt: u32, peer: Peer) {
        let (Some(entry), Some(conn)) = (self.rooms.get(&room), ctx.conns.get(&peer)) else {
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

    fn committed(&mut self, ctx: &mut NodeContext, room: u64, fin: Final) {
        let Some(entry) = self.forget(ctx, room) else {
            return;
        };
        if entry.bytes > 0
            && let Some(link) = entry.key.as_ref().and_then(|key| self.links.get_mut(key))
        {
            link.damage = Damage::default();
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
        let Final {
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

    /// The room is over: nothing refers to it any more.
    fn forget(&mut self, ctx: &mut NodeContext, room: u64) -> Option<DecodeEntry> {
        let entry = self.rooms.remove(&room)?;
        ctx.timers.set(&Timer::Decode(room), None);
        ctx.timers.set(&Timer::Size(room), None);
        // The machine may have let go of its peer already; the tie is by link.
        if let Some(key) = &entry.key
            && let Some(link) = self.links.get_mut(key)
        {
            link.waiting.remove(&room);
            if let LinkState::Up(peer) = link.state {
                ctx.untie(Some(peer), Side::Decode, room);
            }
        }
        ctx.untie(entry.room.peer(), Side::Decode, room);
        Some(entry)
    }
}

/// The client's and the log's message.
const QUARANTINED: &str = "transfers from this prefill rank fail for a while, because several in a row brought damaged pages; check the \
    memory and the network of both hosts, then restart the prefill node";

/// Errors that no waiting cures.
fn is_final(code: Code) -> bool {
    matches!(code, Code::Auth | Code::LayoutMismatch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarantine_is_longer_each_time_and_begins_once() {
        let mut damage = Damage::default();
        let start = Instant::now();
        let mut found = |opened, now| {
            let at = |ms| start + std::time::Duration::from_millis(ms);
            let begins = damage.found(at(opened), at(now), now);
            (begins, damage.quarantine.clone())
        };
        assert!(!found(0, 1).0 && !found(2, 3).0);
        assert!(!found(2, 4).0, "it was open when the last one failed");
        let (begins, quarantine) = found(5, 6);
        assert!(begins && !quarantine.allows(30_005) && quarantine.allows(30_006));
        assert!(!found(7, 8).0, "the quarantine has begun");
        let (begins, quarantine) = found(40_000, 40_000);
        assert!(begins, "the first room after it");
        assert!(!quarantine.allows(99_999) && quarantine.allows(100_000));
    }
}
