//! Transfer node of a rank: threads, sockets and timers around the state machines.
//!
//! | file | subject |
//! |---|---|
//! | `command` | calls of the engine on their way to the control loop |
//! | `control_loop` | the loop, and the life of connections |
//! | `prefill_side`, `decode_side` | rooms of P and of D, and the actions of their state machines |
//! | `communicators` | staged transports (`gloo`, `nccl`) of both sides |
//! | `context` | state shared by both sides |
//! | `connections` | accepting, establishing and serving control connections |
//! | `records` | events for the engine, counters, history of rooms |
//! | `config`, `timers` | settings and derived limits; one deadline per timer key |
//!
//! Threads
//! 1. `kv-control`: all control connections, HTTP, timers and both sides' state machines
//!    (`control_loop`). Never copies a page, never blocks.
//! 2. `kv-copy-i`: checksums, and pulls by shm and cuda_ipc. 3. `kv-data-i`: tcp data streams. 4.
//!    `kv-comm`: one per communicator of a staged transport.
//!
//! The engine's thread sends commands through a bounded channel and receives events through a queue
//! with an eventfd; it never blocks (except in `register_rank` and `close`). A panic in any thread
//! marks the node unhealthy; a panic of the control thread ends every room.

mod command;
mod communicators;
mod config;
mod connections;
mod context;
mod control_loop;
mod decode_side;
mod prefill_side;
mod records;
mod timers;

use std::net::TcpListener;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::mpsc;

pub use config::{NodeConfig, Role, Transport};
pub use records::events::{NodeEvent, PullStats};
pub use records::metrics::{Histogram, NodeStats, TransportStats};

use crate::pool::{KvPool, PoolError};
use crate::protocol::handshake::Identity;
use crate::protocol::{
    Channel, GroupId, GroupPages, Hello, MAX_PAYLOAD_BYTES, MAX_PROMPT_HASH_BYTES, MIN_VERSION,
    VERSION, one_per_group, unknown_group,
};
use crate::reason_code::ReasonCode;
use crate::state_machine::decode::{DecodeEvent, GroupGrant};
use crate::state_machine::prefill::{PrefillEvent, PrefillOutput};
use crate::transport::communicator::CommBackend;
use crate::transport::copy_threads::panic_text;
use crate::transport::shm;
use command::{EngineCommand, OfferRequest, OpenRequest};
use context::{SharedState, random_uuid};
use control_loop::{ControlLoop, Listeners, PoolShare};
use records::events::{ClaimError, EventQueue};
use records::metrics;
use records::room_history::RoomSide;

/// Where the pages of one group go, as (group, start_page, dst_pages, tokens_at): those before
/// `start_page` are here or not needed, all others go to `dst_pages`. `tokens_at`: in a group of
/// states, how many tokens the state must have seen.
pub type PageGrant<'a> = (GroupId, u32, &'a [u8], Option<u32>);

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("{0}")]
    Config(String),
    #[error(transparent)]
    Pages(#[from] PoolError),
    #[error("room {0} is live on this node; every request needs a room number of its own")]
    DuplicateRoom(u64),
    #[error("{0} rooms are live or not yet polled, which is this node's limit (max_rooms)")]
    Full(usize),
    #[error("{0}: publish names a group of the pool's layout, finish and grant each one once")]
    Groups(String),
    #[error("{what} has {bytes} bytes, at most {limit} are accepted")]
    TooLarge {
        what: &'static str,
        bytes: usize,
        limit: usize,
    },
    #[error("{0:?} is no reason code; there are {all:?}", all = ReasonCode::ALL)]
    UnknownCode(String),
    #[error("the transfer runtime is closed or too many calls behind: {0}")]
    Unhealthy(String),
    #[error("registering with the bootstrap server failed: {0}")]
    Register(String),
    #[error("cannot start the transfer node ({what}): {source}")]
    Start {
        what: String,
        source: std::io::Error,
    },
}

/// Transfer node of one rank. `close` (or drop) ends every thread; after it no page of the pool is
/// written.
pub struct TransferNode {
    shared: Arc<SharedState>,
    pool: Arc<KvPool>,
    commands: mpsc::Sender<EngineCommand>,
    thread: Mutex<Option<JoinHandle<()>>>,
    port: u16,
    incarnation: String,
    /// The page groups of the pool.
    groups: Vec<GroupId>,
}

impl TransferNode {
    pub fn start(pool: Arc<KvPool>, config_json: &str) -> Result<Self, NodeError> {
        Self::start_with(pool, config_json, None)
    }

    /// `backend` makes the communicators of the staged transport in the configuration's list.
    pub fn start_with(
        pool: Arc<KvPool>,
        config_json: &str,
        backend: Option<Arc<dyn CommBackend>>,
    ) -> Result<Self, NodeError> {
        let mut config = NodeConfig::parse(config_json, &pool).map_err(NodeError::Config)?;
        let staged = config.staged_transport();
        let backend_name = backend.as_ref().map(|b| b.name());
        if staged.map(Transport::as_str) != backend_name {
            return Err(NodeError::Config(format!(
                "transfer config: the staged transport of the list is {staged:?}, the backend \
                 given makes {backend_name:?}"
            )));
        }
        if config.fault.is_some() {
            tracing::warn!("fault injection is on: this node breaks things on purpose");
        }
        let (listener, port) = bind_listener(&config)?;
        let incarnation = random_uuid();
        let shm_socket = format!("baton-kv-{incarnation}");
        let shm_token: [u8; shm::TOKEN_BYTES] = rand::random();
        let local = share_pool(&pool, &config, &shm_socket, shm_token).unwrap_or_else(|reason| {
            tracing::warn!(why = %reason, "KV pages of this node do not travel by the memory of its host");
            config.transports.retain(|t| !t.is_mapped());
            None
        });
        if config.transports.is_empty() {
            let reason = std::io::Error::other("it does not work here, see the log");
            return Err(cannot_start("the only transport allowed", reason));
        }
        let transports = config.transports.iter().map(|t| t.as_str().to_owned());
        let hello = Hello {
            ver: VERSION,
            min_ver: MIN_VERSION,
            channel: Channel::Control,
            nonce: vec![],
            inc: incarnation.clone(),
            expected_inc: None,
            addr: format!("{}:{port}", config.host),
            boot_id: shm::boot_id(),
            network_namespace: shm::network_namespace(),
            transports: transports.collect(),
            layout_hash: config.layout_hash(),
            layout: config.layout.clone(),
            num_pages: pool.num_pages() as u64,
            page_bytes: pool.page_bytes() as u64,
            sums: pool.sum_kind().as_str().to_owned(),
            shm_socket,
            shm_token: shm_token.to_vec(),
        };
        let identity = Arc::new(Identity {
            cluster_keys: config.cluster_keys(),
            hello,
        });
        let events = EventQueue::new(config.max_rooms);
        let shared = Arc::new(SharedState {
            events: events.map_err(|err| cannot_start("eventfd", err))?,
            stats: Mutex::default(),
            history: Mutex::default(),
            gauges: Mutex::default(),
            unhealthy: Mutex::default(),
            progress: AtomicU64::new(0),
            announced: Arc::default(),
            bad_stream_frames: Arc::default(),
            started: Instant::now(),
        });
        let (commands, inbox) = mpsc::channel(config.limits().commands);
        let listeners = Listeners {
            control: listener,
            local,
        };
        let parts = (shared.clone(), pool.clone());
        let groups = config.layout.group_ids();
        let thread = start_thread(config, parts, identity, (port, listeners), backend, inbox)?;
        Ok(Self {
            shared,
            pool,
            commands,
            thread: Mutex::new(Some(thread)),
            port,
            incarnation,
            groups,
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn incarnation(&self) -> &str {
        &self.incarnation
    }

    pub fn event_fd(&self) -> RawFd {
        self.shared.events.fd()
    }

    fn send_command(&self, command: EngineCommand) -> Result<(), NodeError> {
        self.commands.try_send(command).map_err(|_| {
            NodeError::Unhealthy(self.shared.unhealthy.lock().clone().unwrap_or_default())
        })
    }

    fn claim_room(
        &self,
        side: RoomSide,
        room: u64,
        command: EngineCommand,
    ) -> Result<(), NodeError> {
        self.shared
            .events
            .claim_room(side, room)
            .map_err(|err| match err {
                ClaimError::Live => NodeError::DuplicateRoom(room),
                ClaimError::Full(n) => NodeError::Full(n),
            })?;
        self.send_command(command)
            .inspect_err(|_| self.shared.events.release_claim(side, room))
    }

    /// P: PUT /route for this rank until it succeeds or `timeout` is over; afterwards it is
    /// repeated in the background. Blocks.
    pub fn register_rank(&self, host: &str, port: u16, timeout: Duration) -> Result<(), NodeError> {
        let (reply, answer) = std::sync::mpsc::channel();
        self.send_command(EngineCommand::Register {
            host: host.to_owned(),
            port,
            timeout,
            reply,
        })?;
        let margin = Duration::from_secs(10); // the task itself ends at `timeout`
        let answer = answer
            .recv_timeout(timeout + margin)
            .map_err(|_| NodeError::Register("the transfer runtime did not answer".into()))?;
        answer.map_err(NodeError::Register)
    }

    /// P: offer the room of an accepted request. `deadline_ms` counts from now.
    pub fn offer_room(
        &self,
        room: u64,
        attempt: u32,
        prompt_hash: &[u8],
        deadline_ms: u64,
    ) -> Result<(), NodeError> {
        check_size("prompt_hash", prompt_hash.len(), MAX_PROMPT_HASH_BYTES)?;
        let request = OfferRequest {
            attempt,
            prompt_hash: prompt_hash.to_vec(),
            deadline_ms,
        };
        self.claim_room(RoomSide::Prefill, room, EngineCommand::Offer(room, request))
    }

    /// P: the group's pages [first_page, first_page + n) of the prompt are final. Seals them now;
    /// checksums and PROGRESS follow on other threads. A group's first call may begin at any page,
    /// each later one continues it without a gap.
    pub fn publish_pages(
        &self,
        room: u64,
        group: GroupId,
        first_page: u32,
        pages: &[u8],
    ) -> Result<(), NodeError> {
        if !self.groups.contains(&group) {
            return Err(NodeError::Groups(unknown_group(group, &self.groups)));
        }
        let pages = self.pool.check_pages(pages)?;
        let generations = self.pool.seal_pages(&pages);
        let pages = pages.into_iter().zip(generations).collect();
        let first = first_page;
        self.send_command(EngineCommand::Prefill(
            room,
            PrefillEvent::Publish {
                group,
                first,
                pages,
            },
        ))
    }

    /// P: finish prefill, whose prompt has these pages in each group; the lease starts.
    pub fn finish_prompt(
        &self,
        room: u64,
        groups: Vec<GroupPages>,
        payload: Vec<u8>,
    ) -> Result<(), NodeError> {
        check_size("payload", payload.len(), MAX_PAYLOAD_BYTES)?;
        self.check_groups(&groups, |pages| pages.group)?;
        let output = PrefillOutput { groups, payload };
        self.send_command(EngineCommand::Prefill(room, PrefillEvent::Finish(output)))
    }

    /// D: fetch the prompt of `room` from the prefill rank behind this bootstrap address.
    /// `prefill_dp_rank` < 0: room mod its dp size.
    #[allow(
        clippy::too_many_arguments,
        reason = "one call of the engine's contract, mirrored in Python with names"
    )]
    pub fn open_room(
        &self,
        room: u64,
        attempt: u32,
        host: &str,
        port: u16,
        prefill_dp_rank: i64,
        prompt_hash: &[u8],
        deadline_ms: u64,
    ) -> Result<(), NodeError> {
        check_size("prompt_hash", prompt_hash.len(), MAX_PROMPT_HASH_BYTES)?;
        let request = OpenRequest {
            attempt,
            host: host.to_owned(),
            port,
            dp_rank: prefill_dp_rank,
            prompt_hash: prompt_hash.to_vec(),
            deadline_ms,
        };
        self.claim_room(RoomSide::Decode, room, EngineCommand::Open(room, request))
    }

    /// D: where the prompt's pages of each group go.
    pub fn grant_pages(&self, room: u64, groups: &[PageGrant<'_>]) -> Result<(), NodeError> {
        self.check_groups(groups, |&(group, ..)| group)?;
        let mut grants = Vec::with_capacity(groups.len());
        for &(group, start_page, dst_pages, tokens_at) in groups {
            grants.push(GroupGrant {
                group,
                start_page,
                pages: self.pool.check_pages(dst_pages)?,
                tokens_at,
            });
        }
        self.send_command(EngineCommand::Decode(room, DecodeEvent::Grant(grants)))
    }

    fn check_groups<T>(
        &self,
        named: &[T],
        group_of: impl Fn(&T) -> GroupId,
    ) -> Result<(), NodeError> {
        match one_per_group(&self.groups, named, group_of) {
            Ok(_) => Ok(()),
            Err(difference) => Err(NodeError::Groups(difference)),
        }
    }

    /// D: revoke the grant. `poll_events` answers with `Revoked`, or with `Announced`: then it
    /// stays, because P holds pages for the room.
    pub fn revoke_grant(&self, room: u64) -> Result<(), NodeError> {
        self.send_command(EngineCommand::Decode(room, DecodeEvent::Revoke))
    }

    /// Abort a room on either side; idempotent. The end is reported by `poll_events`.
    pub fn abort_room(&self, room: u64, code: &str) -> Result<(), NodeError> {
        let code = code
            .parse()
            .map_err(|_| NodeError::UnknownCode(code.to_owned()))?;
        self.send_command(EngineCommand::Abort(room, code))
    }

    /// Up to `max` events. Each call counts as progress of the engine, which HEARTBEAT reports to
    /// peers.
    pub fn poll_events(&self, max: usize) -> Vec<NodeEvent> {
        self.shared.progress.fetch_add(1, Ordering::Relaxed);
        self.shared.events.take_events(max)
    }

    /// Wait until `poll_events` has events; false after `timeout`.
    pub fn wait_for_event(&self, timeout: Duration) -> bool {
        self.shared.events.wait_for_event(timeout)
    }

    /// `gauges` and `counters` carry the engine's metric names; `detail` is for people and tests.
    pub fn stats_json(&self) -> String {
        let shared = &self.shared;
        let mut stats = shared.stats.lock().clone();
        stats.bad_frames += shared.bad_stream_frames.load(Ordering::Relaxed);
        let (live, states) = {
            let history = shared.history.lock();
            (history.live_count(), history.live_by_state())
        };
        let more = shared.gauges.lock().clone();
        let backlogs = more.peers.values().map(|peer| peer.backlog.bytes());
        let largest_backlog = backlogs.max().unwrap_or(0);
        let reason = shared.unhealthy.lock().clone();
        let mut detail = serde_json::to_value(&stats).unwrap_or_default();
        detail["rooms_live"] = json!(live);
        detail["rooms_by_state"] = json!(states);
        detail["opens_waiting"] = json!(more.pending_opens);
        detail["pulls_in_flight"] = json!(more.pulls_in_flight);
        detail["peers"] = json!(more.peers.values().collect::<Vec<_>>());
        detail["draining"] = json!(more.draining);
        detail["incarnation"] = json!(self.incarnation);
        detail["uptime_ms"] = json!(shared.now_ms());
        json!({
            "gauges": metrics::gauges(&states, more.peers.len(), largest_backlog, &more.comms, reason.is_none()),
            "counters": stats.counters(shared.announced.refused_total()),
            "detail": detail,
            "healthy": reason.is_none(),
            "unhealthy_reason": reason,
        })
        .to_string()
    }

    pub fn rooms_json(&self, room: Option<u64>) -> String {
        let now_ms = self.shared.now_ms();
        self.shared
            .history
            .lock()
            .timeline_json(room, now_ms)
            .to_string()
    }

    pub fn is_healthy(&self) -> bool {
        self.shared.unhealthy.lock().is_none()
    }

    /// Refuse OPENs of rooms this node does not know; live rooms continue.
    pub fn drain(&self) {
        let _ = self.send_command(EngineCommand::Drain); // a closed node accepts no OPENs either
    }

    /// Close every connection and thread. Live rooms get no further event. Idempotent; blocks until
    /// the threads have ended.
    pub fn close(&self) {
        let _ = self.commands.blocking_send(EngineCommand::Close); // an error: the thread has ended
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join(); // its panic was caught and reported
        }
    }

    #[cfg(test)]
    pub(crate) fn panic_for_test(&self) {
        self.send_command(EngineCommand::Panic)
            .expect("the thread is alive");
    }
}

impl Drop for TransferNode {
    fn drop(&mut self) {
        self.close();
    }
}

fn cannot_start(what: &str, source: std::io::Error) -> NodeError {
    let what = what.into();
    NodeError::Start { what, source }
}

fn bind_listener(config: &NodeConfig) -> Result<(TcpListener, u16), NodeError> {
    let host = config.host.as_str();
    let port = config.port;
    let listener = TcpListener::bind((host, port))
        .map_err(|err| cannot_start(&format!("listen on {host}:{port}"), err))?;
    let port = listener
        .set_nonblocking(true)
        .and_then(|()| listener.local_addr());
    let port = port.map_err(|err| cannot_start("listen", err))?.port();
    Ok((listener, port))
}

/// Start the control thread.
fn start_thread(
    config: NodeConfig,
    (shared, pool): (Arc<SharedState>, Arc<KvPool>),
    identity: Arc<Identity>,
    (port, listeners): (u16, Listeners),
    backend: Option<Arc<dyn CommBackend>>,
    inbox: mpsc::Receiver<EngineCommand>,
) -> Result<JoinHandle<()>, NodeError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|err| cannot_start("runtime", err))?;
    let control_loop = ControlLoop::new(config, shared.clone(), pool, identity, port, backend)
        .map_err(|err| cannot_start("threads", err))?;
    std::thread::Builder::new()
        .name("kv-control".into())
        .spawn(move || control_thread(&shared, runtime, control_loop, listeners, inbox))
        .map_err(|err| cannot_start("thread", err))
}

/// Listen for processes of this host that map the pool. `None`: no transport needs it.
fn share_pool(
    pool: &KvPool,
    config: &NodeConfig,
    socket: &str,
    token: [u8; shm::TOKEN_BYTES],
) -> Result<Option<PoolShare>, String> {
    if config.mapped_transport().is_none() {
        return Ok(None);
    }
    let handle = match pool.device() {
        None => Vec::new(),
        Some(device) => device.handle().map_err(|err| err.to_string())?,
    };
    let listener =
        shm::bind_socket(socket).map_err(|err| format!("no abstract unix sockets here: {err}"))?;
    Ok(Some(PoolShare {
        listener,
        token,
        handle,
    }))
}

fn check_size(what: &'static str, bytes: usize, limit: usize) -> Result<(), NodeError> {
    if bytes > limit {
        Err(NodeError::TooLarge { what, bytes, limit })
    } else {
        Ok(())
    }
}

fn control_thread(
    shared: &SharedState,
    runtime: tokio::runtime::Runtime,
    control_loop: ControlLoop,
    listeners: Listeners,
    inbox: mpsc::Receiver<EngineCommand>,
) {
    // The loop is dropped inside, also by a panic: its copy and data threads are joined before the
    // rooms' ends are reported.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| {
        runtime.block_on(control_loop.run(listeners, inbox))
    })) {
        let reason = panic_text(panic.as_ref());
        shared.mark_unhealthy(reason.clone());
        for (side, room) in shared.events.live_rooms() {
            let message = format!("internal: the transfer runtime has ended ({reason})");
            shared.events.push_event(match side {
                RoomSide::Prefill => NodeEvent::Released {
                    room,
                    code: Some(ReasonCode::TransportBroken),
                },
                RoomSide::Decode => NodeEvent::Failed {
                    room,
                    code: ReasonCode::TransportBroken,
                    message,
                },
            });
        }
    }
    // A name lookup that hangs must not delay the close.
    runtime.shutdown_timeout(Duration::from_millis(200));
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
