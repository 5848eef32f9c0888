//! Parts that both sides of the control loop share: the connections, timers, threads that copy, and records.
//!
//! Nothing here decides about a room. A step of a room may find out that a connection is lost or end a pull or a room; the loop
//! carries that out after the step (`lost`, `pulled`, `events`), so that no step begins inside another one.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::mem;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::config::{NodeConfig, Transport};
use super::connections::establish::{self, Established, Heard, HeardQueue, LinkFailure, Running};
use super::connections::outbox::{Backlog, Outgoing};
use super::records::events::{EventQueue, NodeEvent};
use super::records::metrics::Stats;
use super::records::room_history::{Entry, Ledger, Side};
use super::timers::Timers;
use crate::bootstrap::{Client, Registration};
use crate::pool::{AnnouncedPages, KvPool, RemotePool, SumKind};
use crate::protocol::handshake::{Identity, LinkError, Opened};
use crate::protocol::{Hello, Msg};
use crate::reason_code::Code;
use crate::state_machine::communicator::Breaker;
use crate::state_machine::{Illegal, Peer};
use crate::transport::PullEnd;
use crate::transport::communicator::CommReport;
use crate::transport::copy_threads::{Copier, Done};
use crate::transport::fault_injection::{Fault, Faults};
use crate::transport::tcp::{DataContext, DataLink, DataPlane};

/// Messages read from sockets and not yet handled, and the bytes of their frames; more stay in the sockets.
const HEARD: usize = 1024;
const HEARD_BYTES: usize = 64 << 20;
/// Attempt to reach the bootstrap server.
const HTTP_TIMEOUT: Duration = Duration::from_secs(1);

/// State shared by the engine's thread and the control thread.
pub(super) struct Shared {
    pub events: EventQueue,
    pub stats: Mutex<Stats>,
    pub ledger: Mutex<Ledger>,
    pub gauges: Mutex<Gauges>,
    pub unhealthy: Mutex<Option<String>>,
    /// Calls of `poll`: an engine that works makes one per turn, an idle one with live rooms at least one per second.
    pub progress: AtomicU64,
    pub announced: Arc<AnnouncedPages>,
    /// Data streams of decode ranks closed because of a bad message; counted by the data thread.
    pub bad_stream_frames: Arc<AtomicU64>,
    pub started: Instant,
}

#[derive(Debug, Clone, Default, serde::Serialize)]
pub(super) struct Gauges {
    pub peers: std::collections::BTreeMap<u64, PeerView>,
    pub parked: usize,
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

impl Shared {
    pub fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    pub fn sicken(&self, why: String) {
        tracing::error!(%why, "the transfer node is unhealthy");
        self.unhealthy.lock().get_or_insert(why);
        self.events.wake(); // an idle engine reports its health, too
    }
}

/// A prefill rank as requests name it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LinkKey {
    pub host: String,
    pub port: u16,
    pub dp_rank: u32,
}

/// The connection, and D's number of the communicator on it.
pub(super) type CommKey = (Peer, u64);

/// Messages to the control loop. The channel is unbounded; senders are bounded (one message per task or job).
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
    pub last_seen: u64,
    pub last_beat: u64,
    pub seq: u64,
    /// The last sign of life of the peer's engine (`Msg::Heartbeat`), and when it changed or the engine had nothing to do.
    pub progress: u64,
    pub progressed_at: u64,
}

/// Where the tasks and threads of a node report to its loop.
pub(super) struct Inboxes {
    pub internal: mpsc::UnboundedReceiver<Internal>,
    pub heard: mpsc::Receiver<(Peer, Heard)>,
}

/// Everything of the control loop that is neither P's nor D's.
pub(super) struct NodeContext {
    pub config: NodeConfig,
    pub shared: Arc<Shared>,
    pub pool: Arc<KvPool>,
    pub identity: Arc<Identity>,
    pub faults: Arc<Faults>,
    pub copier: Copier,
    pub data: DataPlane,
    pub internal: mpsc::UnboundedSender<Internal>,
    heard: HeardQueue,
    pub timers: Timers<Timer>,
    pub conns: HashMap<Peer, Conn>,
    next_conn: Peer,
    /// Connections found to be lost since the loop last looked.
    lost: Vec<(Peer, LinkError)>,
    /// Pulls that ended without a report of a thread.
    pulled: Vec<PullEnd>,
    /// For the engine, once everything it could look at is up to date.
    events: Vec<NodeEvent>,
}

impl NodeContext {
    /// Start the threads that move pages. They report to the inboxes.
    pub fn start(
        mut config: NodeConfig,
        shared: Arc<Shared>,
        pool: Arc<KvPool>,
        identity: Arc<Identity>,
    ) -> io::Result<(Self, Inboxes)> {
        let faults = Arc::new(config.fault.take().unwrap_or_default());
        let (internal, internal_inbox) = mpsc::unbounded_channel();
        let (heard, heard_inbox) = HeardQueue::new(HEARD, HEARD_BYTES);
        // Reports after the loop's end are dropped.
        let (copied, pulled, dead) = (internal.clone(), internal.clone(), internal.clone());
        let copier = Copier::start(
            &pool,
            config.copy_threads,
            &faults,
            Arc::new(move |done| drop(copied.send(Internal::Copied(done)))),
        )?;
        let data = DataContext {
            pool: pool.clone(),
            identity: identity.clone(),
            faults: faults.clone(),
            announced: shared.announced.clone(),
            bad_frames: shared.bad_stream_frames.clone(),
            idle: Duration::from_millis(config.data_idle_ms),
            report: Arc::new(move |end| drop(pulled.send(Internal::Pulled(end)))),
        };
        let data = DataPlane::start(data, move |why| {
            drop(dead.send(Internal::DataThreadDead(why)));
        })?;
        let context = Self {
            config,
            shared,
            pool,
            identity,
            faults,
            copier,
            data,
            internal,
            heard,
            timers: Timers::new(),
            conns: HashMap::new(),
            next_conn: 1,
            lost: Vec::new(),
            pulled: Vec::new(),
            events: Vec::new(),
        };
        let inboxes = Inboxes {
            internal: internal_inbox,
            heard: heard_inbox,
        };
        Ok((context, inboxes))
    }

    pub fn now(&self) -> u64 {
        self.shared.now_ms()
    }

    pub fn add_conn(
        &mut self,
        stream: TcpStream,
        addr: SocketAddr,
        opened: Opened,
        key: Option<LinkKey>,
        remote: Option<Arc<RemotePool>>,
        transport: &'static str,
    ) -> Peer {
        let Opened {
            peer: hello,
            sealer,
            opener,
        } = opened;
        let peer = self.next_conn;
        self.next_conn += 1;
        let now = self.now();
        // `establish` refused any other kind; of a decode node nothing is ever verified.
        let sums = SumKind::parse(&hello.sums).unwrap_or(SumKind::Xxh3);
        let running = establish::run(
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

    pub fn send(&mut self, peer: Peer, msg: Msg) {
        let Some(conn) = self.conns.get(&peer) else {
            return;
        }; // lost meanwhile: its rooms have been told
        let outbox = conn.running.outbox.clone();
        let plain = |msg| Outgoing { msg, flip: false };
        let sent = match self.faults.on_send(msg.name()) {
            None | Some(Fault::Break | Fault::Hold(_)) => outbox.put(plain(msg)),
            Some(Fault::Drop) => true,
            Some(Fault::Dup) => outbox.put(plain(msg.clone())) && outbox.put(plain(msg)),
            Some(Fault::Flip) => outbox.put(Outgoing { msg, flip: true }),
            Some(Fault::Kill) => {
                return self.lose(peer, LinkError::new(Code::PeerDead, "fault injection"));
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
            self.lose(peer, LinkError::new(Code::PeerDead, why));
        }
    }

    /// The loop ends the connection after this step.
    pub fn lose(&mut self, peer: Peer, err: LinkError) {
        self.lost.push((peer, err));
    }

    pub fn take_lost(&mut self) -> Vec<(Peer, LinkError)> {
        mem::take(&mut self.lost)
    }

    /// The control loop passes it to the decode side after this step.
    pub fn end_pull(&mut self, end: PullEnd) {
        self.pulled.push(end);
    }

    pub fn take_pulled(&mut self) -> Vec<PullEnd> {
        mem::take(&mut self.pulled)
    }

    pub fn bootstrap_client(&self, host: String, port: u16) -> Client {
        Client {
            host,
            port,
            cluster_keys: self.config.cluster_keys(),
            loopback_only: self.config.cluster_key.is_none() && !self.config.insecure,
            timeout: HTTP_TIMEOUT,
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

    pub fn count_refused_hello(&self, code: Code) {
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

    pub fn push(&mut self, event: NodeEvent) {
        self.events.push(event);
    }

    pub fn may_use(&self, transport: Transport) -> bool {
        self.config.transports.contains(&transport)
    }

    /// Hand the engine the events of the steps before.
    pub fn flush_events(&mut self) {
        for event in self.events.drain(..) {
            if !self.shared.events.push(event.clone()) {
                tracing::error!(?event, "a room ended twice; the second end is dropped");
            }
        }
    }
}

/// The transport that reads this pool.
pub(super) fn mapped_by(remote: &RemotePool) -> Transport {
    match remote.device() {
        Some(_) => Transport::CudaIpc,
        None => Transport::Shm,
    }
}

/// A random (version 4) uuid.
pub(super) fn uuid() -> String {
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
