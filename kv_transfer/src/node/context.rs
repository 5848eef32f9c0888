//! Shared parts of both sides of the control loop: connections, timers, copy threads and records.
//!
//! Nothing here decides about a room. A step of a room may find out that a connection is lost or
//! end a pull or a room; the loop carries that out after the step (`lost`, `pulled`, `events`), so
//! that no step begins inside another one.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::config::{NodeConfig, Transport};
use super::connections::establish::{
    self, ConnectFailure, ConnectionTasks, EstablishedConnection, PeerInbox, PeerMessage,
};
use super::connections::outbox::{Backlog, OutgoingMessage};
use super::records::events::{EventQueue, NodeEvent};
use super::records::metrics::NodeStats;
use super::records::room_history::{RoomHistory, RoomRecord, RoomSide};
use super::timers::Timers;
use crate::bootstrap::{BootstrapClient, RankRegistration};
use crate::pool::{AnnouncedPages, KvPool, RemotePool, SumKind};
use crate::protocol::handshake::{ConnectionError, Identity, OpenedConnection};
use crate::protocol::{Hello, Msg};
use crate::reason_code::ReasonCode;
use crate::state_machine::communicator::TransportBreaker;
use crate::state_machine::{ConnectionId, InvalidTransition};
use crate::transport::PullEnd;
use crate::transport::communicator::CommReport;
use crate::transport::copy_threads::{CopyReport, CopyThreads};
use crate::transport::fault_injection::{Fault, Faults};
use crate::transport::tcp::{DataContext, DataPlane, DataStreams};

/// Messages read from sockets and not yet handled; more stay in the sockets.
const INBOX_MESSAGES: usize = 1024;
const INBOX_BYTES: usize = 64 << 20;
/// Timeout of a request to the bootstrap server.
const HTTP_TIMEOUT: Duration = Duration::from_secs(1);

/// State shared by the engine's thread and the control thread.
pub(super) struct SharedState {
    pub events: EventQueue,
    pub stats: Mutex<NodeStats>,
    pub history: Mutex<RoomHistory>,
    pub gauges: Mutex<NodeGauges>,
    pub unhealthy: Mutex<Option<String>>,
    /// Number of `poll_events` calls: a working engine makes one per turn, an idle one with live
    /// rooms at least one per second.
    pub progress: AtomicU64,
    pub announced: Arc<AnnouncedPages>,
    /// Data streams of decode ranks closed because of a bad message; counted by the data threads.
    pub bad_stream_frames: Arc<AtomicU64>,
    pub started: Instant,
}

#[derive(Debug, Clone, Default, serde::Serialize)]
pub(super) struct NodeGauges {
    pub peers: std::collections::BTreeMap<u64, PeerView>,
    pub pending_opens: usize,
    pub pulls_in_flight: usize,
    pub draining: bool,
    pub comms: std::collections::BTreeMap<&'static str, usize>,
}

#[derive(Debug, Clone, serde::Serialize)]
pub(super) struct PeerView {
    pub addr: String,
    pub incarnation: String,
    pub transport: &'static str,
    pub inbound: bool,
    pub rooms: usize,
    #[serde(skip)]
    pub backlog: Arc<Backlog>,
}

impl SharedState {
    pub fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    pub fn mark_unhealthy(&self, reason: String) {
        tracing::error!(why = %reason, "the transfer node is unhealthy");
        self.unhealthy.lock().get_or_insert(reason);
        self.events.wake_reader(); // an idle engine reports its health too
    }
}

/// Address of a prefill rank, as in requests.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct RankAddress {
    pub host: String,
    pub port: u16,
    pub dp_rank: u32,
}

/// Connection, and D's number of the communicator on it.
pub(super) type CommKey = (ConnectionId, u64);

/// Messages to the control loop. The channel is unbounded; senders are bounded (one message per
/// task or job).
pub(super) enum LoopMessage {
    /// A peer has connected and said HELLO.
    Accepted(TcpStream, Box<OpenedConnection>),
    /// A peer's HELLO was refused.
    HelloRefused {
        from: Option<IpAddr>,
        err: ConnectionError,
    },
    /// A connection without a finished HELLO was closed to make space for another one.
    HelloEvicted,
    /// An attempt to reach a prefill rank has ended.
    Connected(
        RankAddress,
        Box<Result<EstablishedConnection, ConnectFailure>>,
    ),
    /// More rooms wait for this rank, which is connected as this peer.
    OpenWaiting(RankAddress, ConnectionId),
    /// Answer of the bootstrap server to a room without a rank.
    Sizes {
        room: u64,
        size: Result<u32, ConnectFailure>,
    },
    /// Report of a copy thread.
    Copied(CopyReport),
    /// A pull by tcp has ended.
    Pulled(PullEnd),
    /// Report of a communicator's thread.
    Comm(CommKey, CommReport),
    /// P: this rank is registered and will be removed at the end.
    Registered(Box<(BootstrapClient, RankRegistration)>),
    /// A data thread has panicked, which ends all tcp pulls.
    DataThreadDead(String),
    /// No more peers are accepted.
    ListenerDead(String),
    /// A peer on this host could not be accepted.
    AcceptFailed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum NodeTimer {
    Prefill(u64),
    Decode(u64),
    PendingOpens,
    Heartbeat(ConnectionId),
    Connect(RankAddress),
    /// Request the dp size again, for a room opened without a rank.
    Size(u64),
    Comm(CommKey),
}

/// An established control connection.
pub(super) struct PeerConnection {
    pub tasks: ConnectionTasks,
    pub peer: Hello,
    /// Set when we opened it.
    pub key: Option<RankAddress>,
    pub rooms: BTreeSet<(RoomSide, u64)>,
    pub remote: Option<Arc<RemotePool>>,
    /// `remote` is readable by shm or cuda_ipc.
    pub mapped_works: bool,
    /// Kind of the peer's checksums.
    pub sums: SumKind,
    pub data: DataStreams,
    /// D: the communicator in use with this peer, and when the next may be tried after a failure.
    pub comm: Option<CommKey>,
    pub breaker: TransportBreaker,
    pub last_seen: u64,
    pub last_beat: u64,
    pub seq: u64,
    /// Last progress counter of the peer's engine (`Msg::Heartbeat`).
    pub progress: u64,
    pub progressed_at: u64,
}

/// Channels by which tasks and threads report to the control loop.
pub(super) struct LoopInboxes {
    pub internal: mpsc::UnboundedReceiver<LoopMessage>,
    pub peer_inbox: mpsc::Receiver<(ConnectionId, PeerMessage)>,
}

/// State of the control loop that belongs to neither P's nor D's side.
pub(super) struct NodeContext {
    pub config: NodeConfig,
    pub shared: Arc<SharedState>,
    pub pool: Arc<KvPool>,
    pub identity: Arc<Identity>,
    pub faults: Arc<Faults>,
    pub copy_threads: CopyThreads,
    pub data: DataPlane,
    pub internal: mpsc::UnboundedSender<LoopMessage>,
    peer_inbox: PeerInbox,
    pub timers: Timers<NodeTimer>,
    pub connections: HashMap<ConnectionId, PeerConnection>,
    next_conn: ConnectionId,
    /// Connections found to be lost since the loop last looked.
    pub lost: Vec<(ConnectionId, ConnectionError)>,
    /// Pulls that ended without a report of a thread.
    pub pulled: Vec<PullEnd>,
    /// Events for the engine, delivered at the end of the step.
    events: Vec<NodeEvent>,
}

impl NodeContext {
    /// Start the threads that move pages. They report to the inboxes.
    pub fn start(
        mut config: NodeConfig,
        shared: Arc<SharedState>,
        pool: Arc<KvPool>,
        identity: Arc<Identity>,
    ) -> io::Result<(Self, LoopInboxes)> {
        let faults = Arc::new(config.fault.take().unwrap_or_default());
        let (internal, internal_inbox) = mpsc::unbounded_channel();
        let (peer_inbox, peer_messages) = PeerInbox::new(INBOX_MESSAGES, INBOX_BYTES);
        // Reports after the loop's end are dropped.
        let copied = internal.clone();
        let pulled = internal.clone();
        let dead = internal.clone();
        let copy_threads = CopyThreads::start(
            &pool,
            config.copy_threads,
            &faults,
            Arc::new(move |done| drop(copied.send(LoopMessage::Copied(done)))),
        )?;
        let data = DataContext {
            pool: pool.clone(),
            identity: identity.clone(),
            faults: faults.clone(),
            announced: shared.announced.clone(),
            bad_frames: shared.bad_stream_frames.clone(),
            idle: Duration::from_millis(config.data_idle_ms),
            report: Arc::new(move |end| drop(pulled.send(LoopMessage::Pulled(end)))),
        };
        let data = DataPlane::start(&data, config.tcp_streams, move |reason| {
            drop(dead.send(LoopMessage::DataThreadDead(reason)));
        })?;
        let context = Self {
            config,
            shared,
            pool,
            identity,
            faults,
            copy_threads,
            data,
            internal,
            peer_inbox,
            timers: Timers::new(),
            connections: HashMap::new(),
            next_conn: 1,
            lost: Vec::new(),
            pulled: Vec::new(),
            events: Vec::new(),
        };
        let inboxes = LoopInboxes {
            internal: internal_inbox,
            peer_inbox: peer_messages,
        };
        Ok((context, inboxes))
    }

    pub fn now_ms(&self) -> u64 {
        self.shared.now_ms()
    }

    pub fn add_connection(
        &mut self,
        stream: TcpStream,
        addr: SocketAddr,
        opened: OpenedConnection,
        key: Option<RankAddress>,
        remote: Option<Arc<RemotePool>>,
        transport: &'static str,
    ) -> ConnectionId {
        let OpenedConnection {
            peer: hello,
            sealer,
            opener,
        } = opened;
        let peer = self.next_conn;
        self.next_conn += 1;
        let now = self.now_ms();
        // `establish_connection` refused any other kind; pages of a decode node are never verified.
        let sums = SumKind::parse(&hello.sums).unwrap_or(SumKind::Xxh3);
        let data = DataStreams::new(addr, hello.inc.clone(), sums);
        let tasks = establish::start_tasks(
            peer,
            stream,
            (sealer, opener),
            self.peer_inbox.clone(),
            self.config.limits().outbox_bytes,
            key.is_none(),
        );
        let view = PeerView {
            addr: hello.addr.clone(),
            incarnation: hello.inc.clone(),
            transport,
            inbound: key.is_none(),
            rooms: 0,
            backlog: tasks.outbox.backlog.clone(),
        };
        tracing::info!(peer = %view.addr, incarnation = %view.incarnation, transport, inbound = view.inbound, "link up");
        self.shared.gauges.lock().peers.insert(peer, view);
        self.shared.stats.lock().links_up += 1;
        let conn = PeerConnection {
            tasks,
            peer: hello,
            key,
            rooms: BTreeSet::new(),
            mapped_works: remote.is_some(),
            remote,
            sums,
            data,
            comm: None,
            breaker: TransportBreaker::default(),
            last_seen: now,
            last_beat: now,
            seq: 0,
            progress: 0,
            progressed_at: now,
        };
        self.connections.insert(peer, conn);
        self.timers.set(
            &NodeTimer::Heartbeat(peer),
            Some(now + self.config.heartbeat_ms),
        );
        peer
    }

    /// Attach a room to a connection, whose loss then ends the room.
    pub fn attach_room(&mut self, peer: ConnectionId, side: RoomSide, room: u64) {
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.rooms.insert((side, room));
        }
        self.count_rooms(peer);
    }

    pub fn detach_room(&mut self, peer: Option<ConnectionId>, side: RoomSide, room: u64) {
        let Some(peer) = peer else { return };
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.rooms.remove(&(side, room));
        }
        self.count_rooms(peer);
    }

    fn count_rooms(&self, peer: ConnectionId) {
        if let (Some(conn), Some(view)) = (
            self.connections.get(&peer),
            self.shared.gauges.lock().peers.get_mut(&peer),
        ) {
            view.rooms = conn.rooms.len();
        }
    }

    pub fn send_to(&mut self, peer: ConnectionId, msg: Msg) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        }; // lost meanwhile: its rooms have ended
        let outbox = conn.tasks.outbox.clone();
        let plain = |msg| OutgoingMessage { msg, flip: false };
        let is_sent = match self.faults.on_send(msg.name()) {
            None | Some(Fault::Break | Fault::Hold(_)) => outbox.put(plain(msg)),
            Some(Fault::Drop) => true,
            Some(Fault::Dup) => outbox.put(plain(msg.clone())) && outbox.put(plain(msg)),
            Some(Fault::Flip) => outbox.put(OutgoingMessage { msg, flip: true }),
            Some(Fault::Kill) => {
                return self.mark_lost(peer, ConnectionError::peer_dead("fault injection"));
            }
            Some(Fault::DelayMs(ms)) => {
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    let _ = outbox.put(plain(msg)); // the connection is closed
                });
                true
            }
        };
        if !is_sent {
            let reason = "it is closing, or reads much less than it asks for";
            self.mark_lost(peer, ConnectionError::peer_dead(reason));
        }
    }

    /// End the connection after this step.
    pub fn mark_lost(&mut self, peer: ConnectionId, err: ConnectionError) {
        self.lost.push((peer, err));
    }

    /// Report the end of a pull to the decode side after this step.
    pub fn end_pull(&mut self, end: PullEnd) {
        self.pulled.push(end);
    }

    pub fn bootstrap_client(&self, host: String, port: u16) -> BootstrapClient {
        BootstrapClient {
            host,
            port,
            cluster_keys: self.config.cluster_keys(),
            loopback_only: self.config.cluster_key.is_none() && !self.config.insecure,
            timeout: HTTP_TIMEOUT,
        }
    }

    // ---- records ----

    pub fn record_of(
        &self,
        side: RoomSide,
        room: u64,
        attempt: u32,
        state: &'static str,
        note: String,
    ) -> RoomRecord {
        let at_ms = self.now_ms();
        RoomRecord {
            at_ms,
            room,
            side,
            attempt,
            state,
            note,
        }
    }

    /// Record a state change of a room.
    pub fn record_state(&self, record: RoomRecord, over: bool) {
        self.shared.history.lock().record_state(record, over);
    }

    pub fn add_note(&self, record: RoomRecord) {
        self.shared.history.lock().add_note(record);
    }

    pub fn count_refused_hello(&self, code: ReasonCode) {
        let mut stats = self.shared.stats.lock();
        *stats.hellos_refused.get_mut(code.as_str()) += 1;
    }

    pub fn count_failure(&self, code: ReasonCode) {
        *self.shared.stats.lock().failures.get_mut(code.as_str()) += 1;
    }

    pub fn report_invalid_transition(
        &self,
        side: RoomSide,
        room: u64,
        invalid: &InvalidTransition,
    ) {
        tracing::error!(room, ?side, %invalid, "a call the room's state does not allow");
        self.shared.stats.lock().illegal += 1;
        self.add_note(self.record_of(side, room, 0, invalid.phase, invalid.to_string()));
    }

    pub fn push_event(&mut self, event: NodeEvent) {
        self.events.push(event);
    }

    /// Deliver the events of the previous steps to the engine.
    pub fn flush_events(&mut self) {
        for event in self.events.drain(..) {
            if !self.shared.events.push_event(event.clone()) {
                tracing::error!(?event, "a room ended twice; the second end is dropped");
            }
        }
    }
}

/// Transport that reads this pool.
pub(super) fn mapped_by(remote: &RemotePool) -> Transport {
    match remote.device() {
        Some(_) => Transport::CudaIpc,
        None => Transport::Shm,
    }
}

/// A random (version 4) uuid.
pub(super) fn random_uuid() -> String {
    let bits = (rand::random::<u128>() & !(0xF << 76) & !(0x3 << 62)) | (4 << 76) | (2 << 62);
    let hex = format!("{bits:032x}");
    format!(
        "{}-{}-{}-{}-{}",
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..]
    )
}
