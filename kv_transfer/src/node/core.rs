//! The control loop: takes commands, messages, ends of copies and timers, one at a time, and carries out what the state machines say.
//!
//! P's half is in `prefill`, D's in `decode`; here are the loop itself and the connections, which both halves share.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::accept::accept_loop;
use super::decode::{DecodeEntry, Link, LinkKey, PullJob};
use super::link::{self, Established, Heard, HeardQueue, LinkFailure, Outgoing, Running};
use super::prefill::PrefillEntry;
use super::staged::{CommKey, Staged};
use super::timers::Timers;
use super::{Command, NodeConfig, NodeEvent, PeerView, Shared, Transport};
use crate::bootstrap::{Client, HttpError, Registration};
use crate::code::Code;
use crate::ledger::{Entry, Side};
use crate::machine::parked::{Parked, Tombstones};
use crate::machine::slab::Breaker;
use crate::machine::{Illegal, Peer};
use crate::pool::{KvPool, RemotePool, SumKind};
use crate::protocol::wire::{Identity, LinkError, Opened};
use crate::protocol::{Channel, Hello, MAX_HEARTBEAT_ROOMS, Msg, clipped};
use crate::transport::PullEnd;
use crate::transport::comm::{CommBackend, CommReport};
use crate::transport::copier::{Copier, Done, Job};
use crate::transport::fault::{Fault, Faults};
use crate::transport::shm;
use crate::transport::tcp::{DataContext, DataLink, DataPlane};

/// Messages read from sockets and not yet handled, and the bytes of their frames; more stay in the sockets.
const HEARD: usize = 1024;
const HEARD_BYTES: usize = 64 << 20;
/// Control connections; a fleet has fewer ranks.
const MAX_CONNS: usize = 4096;
const MISSED_HEARTBEATS: u64 = 3;
/// One attempt to reach the bootstrap server.
const HTTP_TIMEOUT: Duration = Duration::from_secs(1);
const REGISTER_AGAIN: Duration = Duration::from_secs(5);
const FAREWELL: Duration = Duration::from_millis(500);

/// Where processes of this host get at the pool.
pub struct Local {
    pub listener: UnixListener,
    pub token: [u8; shm::TOKEN_BYTES],
    /// Of pages on a device.
    pub handle: Vec<u8>,
}

pub struct Listeners {
    pub control: TcpListener,
    pub local: Option<Local>,
}

/// What tasks and threads tell the loop. Unbounded, because every sender is: one message per task, or per job of a bounded number.
pub(super) enum Internal {
    Accepted(TcpStream, Box<Opened>),
    HelloRefused(Code),
    /// A connection that had not said HELLO made space for another one.
    HelloEvicted,
    Linked(LinkKey, Box<Result<Established, LinkFailure>>),
    /// More rooms wait for this link, which is up as this peer.
    OpenWaiting(LinkKey, Peer),
    Sized {
        room: u64,
        size: Result<u32, LinkFailure>,
    },
    Copied(Done),
    Pulled(PullEnd),
    Comm(CommKey, CommReport),
    Registered(Box<(Client, Registration)>),
    DataThreadDead(String),
    ListenerDead(String),
    AcceptFailed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Timer {
    Prefill(u64),
    Decode(u64),
    Parked,
    Heartbeat(Peer),
    Link(LinkKey),
    /// Ask again for the dp size, for a room opened without a rank.
    Size(u64),
    Comm(CommKey),
}

/// An established control connection.
pub(super) struct Conn {
    pub running: Running,
    pub peer: Hello,
    pub addr: SocketAddr,
    /// Set when we opened it.
    pub key: Option<LinkKey>,
    pub rooms: BTreeSet<(Side, u64)>,
    pub remote: Option<Arc<RemotePool>>,
    /// `remote` can be read: by shm, or by cuda_ipc.
    pub mapped_works: bool,
    /// How the peer takes its checksums.
    pub sums: SumKind,
    pub data: Option<DataLink>,
    /// D: the communicator in use with this peer, and when the next may be tried after a failure.
    pub comm: Option<CommKey>,
    pub breaker: Breaker,
    last_seen: u64,
    last_beat: u64,
    seq: u64,
    /// The last sign of life of the peer's engine (`Msg::Heartbeat`), and when it changed or the engine had nothing to do.
    progress: u64,
    progressed_at: u64,
}

pub(super) struct Core {
    pub config: NodeConfig,
    pub shared: Arc<Shared>,
    pub pool: Arc<KvPool>,
    pub identity: Arc<Identity>,
    port: u16,
    pub faults: Arc<Faults>,
    pub copier: Copier,
    pub data: DataPlane,
    pub staged: Option<Staged>,
    pub internal: mpsc::UnboundedSender<Internal>,
    internal_inbox: Option<mpsc::UnboundedReceiver<Internal>>,
    heard: HeardQueue,
    heard_inbox: Option<mpsc::Receiver<(Peer, Heard)>>,
    pub timers: Timers<Timer>,
    pub conns: HashMap<Peer, Conn>,
    next_conn: Peer,
    pub prefill: HashMap<u64, PrefillEntry>,
    pub parked: Parked,
    pub tombstones: Tombstones,
    pub decode: HashMap<u64, DecodeEntry>,
    pub links: HashMap<LinkKey, Link>,
    pub jobs: HashMap<u64, PullJob>,
    pub next_job: u64,
    pub draining: bool,
    registered: Option<(Client, Registration)>,
}

impl Core {
    pub fn new(
        mut config: NodeConfig,
        shared: Arc<Shared>,
        pool: Arc<KvPool>,
        identity: Arc<Identity>,
        port: u16,
        backend: Option<Arc<dyn CommBackend>>,
    ) -> io::Result<Self> {
        let faults = Arc::new(config.fault.take().unwrap_or_default());
        let limits = config.limits();
        let (internal, internal_inbox) = mpsc::unbounded_channel();
        let (heard, heard_inbox) = HeardQueue::new(HEARD, HEARD_BYTES);
        // Reports after the loop's end are dropped: nobody is left to tell.
        let tell = |wrap: fn(PullEnd) -> Internal| {
            let internal = internal.clone();
            Arc::new(move |end| drop(internal.send(wrap(end))))
        };
        let copied = internal.clone();
        let copier = Copier::start(
            &pool,
            config.copy_threads,
            &faults,
            Arc::new(move |done| drop(copied.send(Internal::Copied(done)))),
        )?;
        let dead = internal.clone();
        let dead = move |why| drop(dead.send(Internal::DataThreadDead(why)));
        let data = DataContext {
            pool: pool.clone(),
            identity: identity.clone(),
            faults: faults.clone(),
            announced: shared.announced.clone(),
            bad_frames: shared.bad_stream_frames.clone(),
            idle: Duration::from_millis(config.data_idle_ms),
            report: tell(Internal::Pulled),
        };
        let data = DataPlane::start(data, dead)?;
        let staged = config
            .staged()
            .zip(backend)
            .map(|(via, backend)| Staged::new(via, backend, &config, pool.page_bytes()));
        Ok(Self {
            staged,
            config,
            shared,
            pool,
            identity,
            port,
            faults,
            copier,
            data,
            internal,
            internal_inbox: Some(internal_inbox),
            heard,
            heard_inbox: Some(heard_inbox),
            timers: Timers::new(),
            conns: HashMap::new(),
            next_conn: 1,
            prefill: HashMap::new(),
            parked: Parked::new(limits.parked_opens, limits.parked_opens_per_peer),
            tombstones: Tombstones::new(limits.ended_rooms),
            decode: HashMap::new(),
            links: HashMap::new(),
            jobs: HashMap::new(),
            next_job: 0,
            draining: false,
            registered: None,
        })
    }

    pub async fn run(mut self, listeners: Listeners, mut commands: mpsc::Receiver<Command>) {
        self.listen(listeners);
        let (Some(mut internal), Some(mut heard)) =
            (self.internal_inbox.take(), self.heard_inbox.take())
        else {
            return;
        };
        loop {
            let now = self.now();
            while let Some(timer) = self.timers.pop_due(now) {
                self.on_timer(timer, now);
            }
            let next = self.timers.next();
            let wait = Duration::from_millis(next.map_or(0, |due| due.saturating_sub(self.now())));
            tokio::select! {
                command = commands.recv() => match command {
                    None | Some(Command::Close) => break,
                    Some(command) => self.on_command(command),
                },
                Some((peer, heard)) = heard.recv() => self.on_heard(peer, heard),
                Some(message) = internal.recv() => self.on_internal(message),
                () = tokio::time::sleep(wait), if next.is_some() => {}
            }
            self.publish_gauges();
        }
        self.farewell().await;
    }

    pub fn now(&self) -> u64 {
        self.shared.now_ms()
    }

    fn listen(&self, listeners: Listeners) {
        let (identity, internal) = (self.identity.clone(), self.internal.clone());
        tokio::spawn(async move {
            let err = accept_loop(listeners.control, identity, internal.clone()).await;
            let _ = internal.send(Internal::ListenerDead(err.to_string()));
        });
        if let Some(local) = listeners.local {
            let (pool, internal) = (self.pool.clone(), self.internal.clone());
            let failed = internal.clone();
            let failed = move || drop(failed.send(Internal::AcceptFailed));
            tokio::spawn(async move {
                let err = shm::serve(local.listener, pool, local.token, local.handle, failed).await;
                let _ = internal.send(Internal::ListenerDead(format!("shm: {err}")));
            });
        }
    }

    fn publish_gauges(&self) {
        let mut gauges = self.shared.gauges.lock();
        gauges.parked = self.parked.len();
        gauges.pulls_in_flight = self.jobs.len();
        gauges.draining = self.draining;
        gauges.comms = self
            .staged
            .as_ref()
            .map(Staged::by_state)
            .unwrap_or_default();
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Offer {
                room,
                attempt,
                prompt_hash,
                deadline_ms,
            } => self.offer(room, attempt, prompt_hash, deadline_ms),
            Command::Publish { room, first, pages } => self.publish(room, first, pages),
            Command::Finish { room, finish } => self.finish(room, finish),
            Command::Open {
                room,
                attempt,
                host,
                port,
                dp_rank,
                prompt_hash,
                deadline_ms,
            } => {
                let entry = DecodeEntry::new(self, attempt, prompt_hash, deadline_ms);
                self.open(room, entry, host, port, dp_rank);
            }
            Command::Grant {
                room,
                start_page,
                pages,
            } => self.grant(room, start_page, pages),
            Command::Revoke { room } => self.revoke(room),
            Command::Abort { room, code } => self.abort(room, code),
            Command::Register {
                host,
                port,
                timeout,
                reply,
            } => self.register(host, port, timeout, reply),
            Command::Drain => self.draining = true,
            Command::Close => {}
            #[cfg(test)]
            Command::Panic => panic!("asked to, by a test"),
        }
    }

    fn abort(&mut self, room: u64, code: Code) {
        if self.decode.contains_key(&room) {
            self.abort_decode(room, code);
        }
        self.abort_prefill(room, code);
    }

    fn on_internal(&mut self, message: Internal) {
        match message {
            Internal::Accepted(stream, opened) => self.accepted(stream, *opened),
            Internal::HelloRefused(code) => self.count_refused_hello(code),
            Internal::HelloEvicted => self.shared.stats.lock().hellos_evicted += 1,
            Internal::Linked(key, result) => self.linked(key, *result),
            Internal::OpenWaiting(key, peer) => self.open_waiting(&key, peer),
            Internal::Sized { room, size } => self.sized(room, size),
            Internal::Copied(Done::Hashed { room, sums }) => self.hashed(room, sums),
            Internal::Copied(Done::Pulled(end)) | Internal::Pulled(end) => self.pulled(end),
            Internal::Copied(Done::Closed) => {}
            Internal::Copied(Done::Broken { what, room }) => {
                self.shared.sicken(what);
                if let Some(room) = room {
                    self.abort_prefill(room, Code::TransportBroken);
                }
            }
            Internal::Comm(key, report) => self.comm_report(key, report),
            Internal::Registered(known) => self.registered = Some(*known),
            Internal::DataThreadDead(why) => {
                self.shared.sicken(format!("data thread: {why}"));
                self.data_thread_died();
            }
            Internal::AcceptFailed => self.shared.stats.lock().accept_errors += 1,
            Internal::ListenerDead(why) => self.shared.sicken(format!("listener: {why}")),
        }
    }

    fn on_timer(&mut self, timer: Timer, now: u64) {
        match timer {
            Timer::Prefill(room) => self.tick_prefill(room),
            Timer::Decode(room) => self.tick_decode(room),
            Timer::Parked => self.expire_parked(now),
            Timer::Heartbeat(peer) => self.heartbeat(peer, now),
            Timer::Link(key) => self.retry_link(&key),
            Timer::Size(room) => self.ask_size(room),
            Timer::Comm(key) => self.tick_comm(key),
        }
    }

    // ---- connections ----

    fn accepted(&mut self, stream: TcpStream, opened: Opened) {
        if opened.peer.channel == Channel::Data {
            let inc = &opened.peer.inc;
            if !self.conns.values().any(|conn| conn.peer.inc == *inc) {
                tracing::warn!(peer = %opened.peer.addr, "a data stream of a peer without a control connection is refused");
                return self.count_refused_hello(Code::TransportBroken);
            }
            match stream.into_std() {
                Ok(stream) => self.data.serve(stream, opened),
                Err(err) => {
                    tracing::warn!(%err, "a data stream could not be handed to the data thread")
                }
            }
            return;
        }
        if self.conns.len() >= MAX_CONNS {
            tracing::warn!("{MAX_CONNS} peers are connected: another one is turned away");
            return;
        }
        let Ok(addr) = stream.peer_addr() else { return }; // gone already
        self.add_conn(stream, addr, opened, None, None);
    }

    pub fn add_conn(
        &mut self,
        stream: TcpStream,
        addr: SocketAddr,
        opened: Opened,
        key: Option<LinkKey>,
        remote: Option<Arc<RemotePool>>,
    ) -> Peer {
        let Opened {
            peer: hello,
            sealer,
            opener,
        } = opened;
        let peer = self.next_conn;
        self.next_conn += 1;
        let now = self.now();
        let transport = match (&remote, &key) {
            (Some(remote), _) => mapped_by(remote).as_str(),
            (None, Some(_)) => self.staged_with(&hello).unwrap_or(Transport::Tcp).as_str(),
            (None, None) => "", // the other side chooses
        };
        // `establish` refused any other kind; of a decode node nothing is ever verified.
        let sums = SumKind::parse(&hello.sums).unwrap_or(SumKind::Xxh3);
        let running = link::run(
            peer,
            stream,
            (sealer, opener),
            self.heard.clone(),
            self.config.limits().outbox_bytes,
            key.is_none(),
        );
        let view = PeerView {
            addr: hello.addr.clone(),
            incarnation: hello.inc.clone(),
            transport,
            inbound: key.is_none(),
            rooms: 0,
            backlog: running.outbox.backlog.clone(),
        };
        tracing::info!(peer = %view.addr, incarnation = %view.incarnation, transport, inbound = view.inbound, "link up");
        self.shared.gauges.lock().peers.insert(peer, view);
        self.shared.stats.lock().links_up += 1;
        let conn = Conn {
            running,
            peer: hello,
            addr,
            key,
            rooms: BTreeSet::new(),
            mapped_works: remote.is_some(),
            remote,
            sums,
            data: None,
            comm: None,
            breaker: Breaker::default(),
            last_seen: now,
            last_beat: now,
            seq: 0,
            progress: 0,
            progressed_at: now,
        };
        self.conns.insert(peer, conn);
        self.timers.set(
            &Timer::Heartbeat(peer),
            Some(now + self.config.heartbeat_ms),
        );
        peer
    }

    /// A room is tied to a connection, so that its loss ends the room.
    pub fn tie(&mut self, peer: Peer, side: Side, room: u64) {
        if let Some(conn) = self.conns.get_mut(&peer) {
            conn.rooms.insert((side, room));
        }
        self.count_rooms(peer);
    }

    pub fn untie(&mut self, peer: Option<Peer>, side: Side, room: u64) {
        let Some(peer) = peer else { return };
        if let Some(conn) = self.conns.get_mut(&peer) {
            conn.rooms.remove(&(side, room));
        }
        self.count_rooms(peer);
    }

    fn count_rooms(&self, peer: Peer) {
        if let (Some(conn), Some(view)) = (
            self.conns.get(&peer),
            self.shared.gauges.lock().peers.get_mut(&peer),
        ) {
            view.rooms = conn.rooms.len();
        }
    }

    fn on_heard(&mut self, peer: Peer, heard: Heard) {
        match heard {
            Heard::Down(err) => self.conn_lost(peer, &err),
            Heard::Msg(msg, _space) => {
                let now = self.now();
                let Some(conn) = self.conns.get_mut(&peer) else {
                    return;
                }; // read before the cut
                conn.last_seen = now;
                self.on_msg(peer, *msg);
            }
        }
    }

    fn on_msg(&mut self, peer: Peer, msg: Msg) {
        match msg {
            Msg::Open {
                room,
                attempt,
                p_inc_expected,
                layout_hash,
                prompt_hash,
                start_page,
                deadline_ms,
                ..
            } => {
                let question = super::prefill::Question {
                    room,
                    attempt,
                    prompt_hash,
                    start_page,
                    deadline_ms,
                };
                self.on_open(peer, question, &p_inc_expected, &layout_hash);
            }
            Msg::Done { room, attempt, .. } => self.on_done(peer, room, attempt),
            Msg::Abort {
                room,
                attempt,
                code,
            } => {
                self.prefill_peer_abort(peer, room, attempt, code);
                self.decode_peer_abort(peer, room, attempt, code);
            }
            Msg::AbortAck { .. } => {} // aborts need no answer: nobody waits for it
            Msg::Heartbeat {
                rooms,
                progress,
                busy,
                ..
            } => {
                self.renew(peer, &rooms);
                self.watch_progress(peer, progress, busy);
            }
            Msg::Reject {
                code,
                message,
                connection: true,
                ..
            } => self.conn_lost(peer, &LinkError::new(code, message)),
            Msg::OpenOk { .. }
            | Msg::Parked { .. }
            | Msg::Reject { .. }
            | Msg::Progress { .. }
            | Msg::Final { .. } => self.on_answer(peer, msg),
            Msg::CommOpen { .. }
            | Msg::CommId { .. }
            | Msg::CommEnd { .. }
            | Msg::SlabRead { .. }
            | Msg::SlabSend { .. }
            | Msg::SlabStale { .. } => self.on_comm_msg(peer, msg),
            Msg::Challenge { .. }
            | Msg::Hello(_)
            | Msg::Read { .. }
            | Msg::Data { .. }
            | Msg::DataEnd { .. }
            | Msg::Stale { .. } => {
                let err = LinkError::new(
                    Code::TransportBroken,
                    format!("{} on a control connection", msg.name()),
                );
                self.conn_lost(peer, &err);
            }
        }
    }

    pub fn send(&mut self, peer: Peer, msg: Msg) {
        let Some(conn) = self.conns.get(&peer) else {
            return;
        }; // lost meanwhile: its rooms have been told
        let outbox = conn.running.outbox.clone();
        let plain = |msg| Outgoing { msg, flip: false };
        let sent = match self.faults.on_send(msg.name()) {
            None | Some(Fault::Break) => outbox.put(plain(msg)),
            Some(Fault::Drop) => true,
            Some(Fault::Dup) => outbox.put(plain(msg.clone())) && outbox.put(plain(msg)),
            Some(Fault::Flip) => outbox.put(Outgoing { msg, flip: true }),
            Some(Fault::Kill) => {
                return self.conn_lost(peer, &LinkError::new(Code::PeerDead, "fault injection"));
            }
            Some(Fault::DelayMs(ms)) => {
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    let _ = outbox.put(plain(msg)); // cut meanwhile
                });
                true
            }
        };
        if !sent {
            let why = "it is closing, or reads much less than it asks for";
            self.conn_lost(peer, &LinkError::new(Code::PeerDead, why));
        }
    }

    /// Every room of the connection learns it; the next room with this peer starts from GET /route.
    pub fn conn_lost(&mut self, peer: Peer, err: &LinkError) {
        let Some(conn) = self.conns.remove(&peer) else {
            return;
        };
        tracing::warn!(peer = %conn.peer.addr, incarnation = %conn.peer.inc, code = %err.code, why = %err.why, rooms = conn.rooms.len(), "link lost");
        if matches!(err.code, Code::Auth | Code::TransportBroken) {
            // Tell the other side why, after what is queued. It may be gone.
            let refusal = Msg::Reject {
                room: 0,
                attempt: 0,
                code: err.code,
                message: clipped(&err.why),
                retry_after_ms: 0,
                connection: true,
            };
            let _ = conn.running.outbox.put(Outgoing {
                msg: refusal,
                flip: false,
            });
            conn.running.stop_reading();
        } else {
            conn.running.cut();
        }
        {
            let mut stats = self.shared.stats.lock();
            stats.links_lost += 1;
            stats.bad_frames += u64::from(matches!(err.code, Code::Auth | Code::TransportBroken));
        }
        self.shared.gauges.lock().peers.remove(&peer);
        self.timers.set(&Timer::Heartbeat(peer), None);
        self.parked.drop_peer(peer, None);
        if let Some(key) = &conn.key {
            self.link_down(key);
        }
        for (side, room) in conn.rooms {
            match side {
                Side::Prefill => self.prefill_peer_gone(peer, room, err.code),
                Side::Decode => self.decode_peer_gone(peer, room, err.code),
            }
        }
        // After the rooms: they end because the peer is gone, not because of its communicator.
        self.comm_peer_gone(peer, &err.why);
        if let Some(remote) = conn.remote.filter(|remote| remote.device().is_some()) {
            self.copier.submit(Job::Close(remote));
        }
    }

    fn heartbeat(&mut self, peer: Peer, now: u64) {
        let every = self.config.heartbeat_ms;
        let Some(conn) = self.conns.get_mut(&peer) else {
            return;
        };
        if now.saturating_sub(conn.last_beat) > 2 * every {
            conn.last_seen = now; // we slept (a stopped process, a stalled host): the peer's beats may still be in the socket
        }
        conn.last_beat = now;
        if conn.key.is_none() && conn.running.outbox.backlog.is_full() {
            conn.last_seen = now; // its beats are not read now; the writing task cuts a peer that takes no byte
        }
        if now.saturating_sub(conn.last_seen) >= MISSED_HEARTBEATS * every {
            let why = format!(
                "no word for {} ms ({MISSED_HEARTBEATS} heartbeats)",
                now.saturating_sub(conn.last_seen)
            );
            return self.conn_lost(peer, &LinkError::new(Code::PeerDead, why));
        }
        conn.seq += 1;
        let rooms: Vec<u64> = conn.rooms.iter().map(|&(_, room)| room).collect();
        let seq = conn.seq;
        let backlog = self
            .jobs
            .values()
            .filter(|job| job.peer == peer)
            .map(|job| job.pages.len() as u64)
            .sum::<u64>()
            * self.pool.page_bytes() as u64;
        let progress = self.shared.progress.load(Ordering::Relaxed);
        let busy = self.prefill.values().any(|entry| entry.is_computing());
        self.timers.set(&Timer::Heartbeat(peer), Some(now + every));
        let mut lists = rooms.chunks(MAX_HEARTBEAT_ROOMS);
        let mut rooms = lists.next().unwrap_or_default().to_vec();
        loop {
            let beat = Msg::Heartbeat {
                inc: self.identity.hello.inc.clone(),
                seq,
                rooms,
                pull_backlog_bytes: backlog,
                progress,
                busy,
            };
            self.send(peer, beat);
            let Some(more) = lists.next() else { break };
            rooms = more.to_vec();
        }
    }

    /// D: fail the rooms of a prefill rank whose engine claims work and does none, although its transfer runtime lives.
    fn watch_progress(&mut self, peer: Peer, progress: u64, busy: bool) {
        let (now, limit) = (self.now(), self.config.stall_ms);
        let Some(conn) = self.conns.get_mut(&peer) else {
            return;
        };
        if !busy || progress != conn.progress {
            (conn.progress, conn.progressed_at) = (progress, now);
        }
        let still_ms = now.saturating_sub(conn.progressed_at);
        if still_ms < limit {
            return;
        }
        let rooms: Vec<u64> = conn
            .rooms
            .iter()
            .filter(|(side, _)| *side == Side::Decode)
            .map(|&(_, room)| room)
            .collect();
        tracing::warn!(peer = %conn.peer.addr, still_ms, rooms = rooms.len(), "the peer's engine stands still");
        for room in rooms {
            self.decode_peer_stalled(peer, room, still_ms);
        }
    }

    // ---- bootstrap ----

    pub fn bootstrap_client(&self, host: String, port: u16) -> Client {
        Client {
            host,
            port,
            cluster_keys: self.config.cluster_keys(),
            loopback_only: self.config.cluster_key.is_none() && !self.config.insecure,
            timeout: HTTP_TIMEOUT,
        }
    }

    fn registration(&self) -> Registration {
        let host = self
            .config
            .advertise_host
            .as_ref()
            .unwrap_or(&self.config.host);
        let unspecified = host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_unspecified());
        Registration {
            role: "Prefill".into(),
            attn_tp_size: 1,
            attn_tp_rank: 0,
            attn_dp_size: 1,
            attn_dp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            system_dp_size: self.config.dp_size,
            system_dp_rank: self.config.dp_rank,
            rank_ip: if unspecified {
                String::new()
            } else {
                host.clone()
            },
            rank_port: self.port,
            instance_id: self.identity.hello.inc.clone(),
            owner: super::uuid(),
            proto_ver: crate::protocol::VERSION,
            transports: self.identity.hello.transports.clone(),
            layout_hash: self.identity.hello.layout_hash.clone(),
            layout: serde_json::to_value(&self.config.layout).unwrap_or_default(),
            pool_pages: self.pool.num_pages() as u64,
        }
    }

    fn register(
        &mut self,
        host: String,
        port: u16,
        timeout: Duration,
        reply: std::sync::mpsc::Sender<Result<(), String>>,
    ) {
        let client = self.bootstrap_client(host, port);
        let registration = self.registration();
        let internal = self.internal.clone();
        tokio::spawn(async move {
            let answer = register_until(&client, &registration, timeout).await;
            let registered = answer.is_ok();
            let _ = reply.send(answer); // the caller gave up
            if !registered
                || internal
                    .send(Internal::Registered(Box::new((
                        client.clone(),
                        registration.clone(),
                    ))))
                    .is_err()
            {
                return;
            }
            let mut known = true;
            loop {
                tokio::time::sleep(REGISTER_AGAIN).await;
                let again = client.register(&registration).await;
                if known && let Err(err) = &again {
                    tracing::warn!(%err, "the bootstrap server forgot us or is down; trying on");
                }
                known = again.is_ok();
            }
        });
    }

    async fn farewell(&mut self) {
        if let Some((client, registration)) = self.registered.take() {
            let _ = tokio::time::timeout(FAREWELL, client.unregister(&registration)).await; // best effort
        }
    }

    // ---- records ----

    pub fn entry(
        &self,
        side: Side,
        room: u64,
        attempt: u32,
        state: &'static str,
        note: String,
    ) -> Entry {
        let at_ms = self.now();
        Entry {
            at_ms,
            room,
            side,
            attempt,
            state,
            note,
        }
    }

    /// A room changed its state.
    pub fn enter(&self, entry: Entry, over: bool) {
        self.shared.ledger.lock().enter(entry, over);
    }

    pub fn note(&self, entry: Entry) {
        self.shared.ledger.lock().note(entry);
    }

    fn count_refused_hello(&self, code: Code) {
        let mut stats = self.shared.stats.lock();
        *stats.hellos_refused.entry(code.as_str()).or_default() += 1;
    }

    pub fn count_failure(&self, code: Code) {
        *self
            .shared
            .stats
            .lock()
            .failures
            .entry(code.as_str())
            .or_default() += 1;
    }

    pub fn report_illegal(&self, side: Side, room: u64, illegal: &Illegal) {
        tracing::error!(room, ?side, %illegal, "a call the room's state does not allow");
        self.shared.stats.lock().illegal += 1;
        self.note(self.entry(side, room, 0, illegal.phase, illegal.to_string()));
    }

    /// The engine hears of it after everything it could look at is up to date.
    pub fn push(&self, event: NodeEvent) {
        self.publish_gauges();
        if !self.shared.events.push(event.clone()) {
            tracing::error!(?event, "a room ended twice; the second end is dropped");
        }
    }

    pub fn may_use(&self, transport: Transport) -> bool {
        self.config.transports.contains(&transport)
    }
}

/// The transport that reads this pool.
pub(super) fn mapped_by(remote: &RemotePool) -> Transport {
    match remote.device() {
        Some(_) => Transport::CudaIpc,
        None => Transport::Shm,
    }
}

async fn register_until(
    client: &Client,
    registration: &Registration,
    timeout: Duration,
) -> Result<(), String> {
    let deadline = tokio::time::Instant::now() + timeout;
    let mut pause = Duration::from_millis(50);
    loop {
        let err = match client.register(registration).await {
            Ok(()) => return Ok(()),
            Err(err) => err,
        };
        // A conflict may be with ranks that are gone, whose registration ends.
        let hopeless = matches!(err, HttpError::Untrusted(_))
            || err.status().is_some_and(|status| {
                status.is_client_error() && status != http::StatusCode::CONFLICT
            });
        if hopeless || tokio::time::Instant::now() + pause >= deadline {
            return Err(err.to_string());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}
