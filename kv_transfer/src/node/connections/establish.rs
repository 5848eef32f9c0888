//! Establishing a control connection to a prefill rank, and the two tasks that serve each
//! connection.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::AbortHandle;

use super::outbox::{Backlog, Outbox, OutgoingMessage};
use crate::bootstrap::{BootstrapClient, HttpError, RankRoute, resolve};
use crate::node::config::Transport;
use crate::pool::device::DevicePages;
use crate::pool::{RemotePool, SumKind};
use crate::protocol::handshake::{
    ConnectionError, Identity, OpenedConnection, name_versions, read_frame,
};
use crate::protocol::{
    Channel, FrameOpener, FrameSealer, Hello, MAX_DECODE_FRAME_BYTES, MAX_FRAME_BYTES, MIN_VERSION,
    Msg, VERSION,
};
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::transport::shm;
use crate::transport::tcp::set_stream_options;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A peer that reads no byte for this long counts as dead (its heartbeats will be missing too).
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// A control connection to a prefill rank, ready for OPENs.
pub struct EstablishedConnection {
    pub stream: TcpStream,
    pub addr: SocketAddr,
    pub opened: OpenedConnection,
    /// The rank's pool, if it is on this host.
    pub remote: Option<Arc<RemotePool>>,
    /// Reason why there is none although both sides are on this host and support the transport.
    pub map_problem: Option<String>,
}

/// Failed attempt to connect to a prefill rank.
pub struct ConnectFailure {
    pub err: ConnectionError,
    /// The address refuses connections or does not answer. Otherwise a server is there that may
    /// know the rank soon.
    pub is_silent: bool,
}

impl From<ConnectionError> for ConnectFailure {
    fn from(err: ConnectionError) -> Self {
        let is_silent = matches!(err.code, ReasonCode::PeerDead);
        Self { err, is_silent }
    }
}

fn peer_silent(reason: String) -> ConnectFailure {
    ConnectFailure {
        err: ConnectionError::new(ReasonCode::Unreachable, reason),
        is_silent: true,
    }
}

/// Resolve, connect, exchange HELLO, and map the peer's pool if it is on this host. Every step is
/// bounded to about a second.
pub async fn establish_connection(
    bootstrap: &BootstrapClient,
    dp_rank: u32,
    identity: &Identity,
    mapped: Option<Transport>,
    device: Option<Arc<dyn DevicePages>>,
) -> Result<EstablishedConnection, ConnectFailure> {
    let route = find_rank(bootstrap, dp_rank).await?;
    let mismatch = |reason: String| ConnectionError::new(ReasonCode::LayoutMismatch, reason);
    if route.instance_id.is_empty() {
        let reason =
            "the prefill rank is registered without instance_id: it does not speak this protocol";
        return Err(mismatch(reason.into()).into());
    }
    if route.proto_ver != 0 && route.proto_ver < MIN_VERSION {
        let reason = format!(
            "the prefill rank speaks {}, this node {}: update the older one",
            name_versions(route.proto_ver, route.proto_ver),
            name_versions(MIN_VERSION, VERSION)
        );
        return Err(mismatch(reason).into());
    }
    let mut stream = connect_tcp(&route.rank_ip, route.rank_port, bootstrap.loopback_only).await?;
    set_stream_options(&stream);
    let addr = stream
        .peer_addr()
        .map_err(|err| ConnectionError::new(ReasonCode::Unreachable, err.to_string()))?;
    let opened = identity
        .initiate_connection(&mut stream, Channel::Control, Some(&route.instance_id))
        .await?;
    let peer = &opened.peer;
    if SumKind::parse(&peer.sums).is_none() {
        let reason = format!(
            "the prefill rank takes {:?} checksums, which this node does not know: update it",
            peer.sums
        );
        return Err(mismatch(reason).into());
    }
    let reach = socket_reach(&identity.hello, peer);
    if reach == SocketReach::OtherNamespace && mapped.is_some() {
        tracing::info!(
            peer = %peer.addr,
            "the peer is on this host in another network namespace: KV pages do not travel by its \
             memory"
        );
    }
    let (remote, map_problem) = if let Some(via) = mapped
        && reach == SocketReach::Same
        && peer.transports.iter().any(|t| t == via.as_str())
        && peer.page_bytes == identity.hello.page_bytes
    {
        match map_peer(peer, device).await {
            Ok(remote) => (Some(Arc::new(remote)), None),
            Err(reason) => (None, Some(reason)),
        }
    } else {
        (None, None)
    };
    Ok(EstablishedConnection {
        stream,
        addr,
        opened,
        remote,
        map_problem,
    })
}

/// Look up a rank. One that the server does not know is waited for, unless it can never come: it is
/// beyond the node's size, or all ranks of the node are there.
async fn find_rank(bootstrap: &BootstrapClient, dp_rank: u32) -> Result<RankRoute, ConnectFailure> {
    let missing = match bootstrap.rank_route(dp_rank).await {
        Ok(route) => return Ok(route),
        Err(err) if err.status() == Some(StatusCode::NOT_FOUND) => unreachable(&err),
        Err(err) => return Err(unreachable(&err)),
    };
    // No rank has registered yet, or the server has failed: the next attempt finds out.
    let Ok(topology) = bootstrap.topology().await else {
        return Err(missing);
    };
    let size = topology.sizes.prefill_dp_size;
    let reason = format!("the prefill node has no rank {dp_rank}: it has {size}, from 0 on");
    let unknown = ConnectFailure::from(ConnectionError::new(ReasonCode::RankUnknown, reason));
    if dp_rank >= size {
        return Err(unknown);
    }
    if !topology.is_complete() {
        return Err(missing);
    }
    // The rank may have come between the two answers.
    bootstrap
        .rank_route(dp_rank)
        .await
        .map_err(|err| match err.status() {
            Some(StatusCode::NOT_FOUND) => unknown,
            _ => unreachable(&err),
        })
}

async fn connect_tcp(
    host: &str,
    port: u16,
    loopback_only: bool,
) -> Result<TcpStream, ConnectFailure> {
    let attempt = async {
        let addrs = resolve(host, port, loopback_only).await;
        let addrs = addrs.map_err(|err| unreachable(&err))?;
        let stream = TcpStream::connect(&addrs[..]).await;
        stream.map_err(|err| peer_silent(format!("{host}:{port}: {err}")))
    };
    let timeout_error = |_| {
        Err(peer_silent(format!(
            "{host}:{port} did not accept within {CONNECT_TIMEOUT:?}"
        )))
    };
    let timeout = tokio::time::timeout(CONNECT_TIMEOUT, attempt);
    timeout.await.unwrap_or_else(timeout_error)
}

/// Place of the peer's abstract sockets, as seen from this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SocketReach {
    /// This node can connect to them.
    Same,
    /// On this host, but in another network namespace.
    OtherNamespace,
    OtherHost,
}

fn socket_reach(own: &Hello, peer: &Hello) -> SocketReach {
    // Two nodes that cannot read their boot id are on any two hosts.
    if peer.boot_id.is_empty() || peer.boot_id != own.boot_id {
        return SocketReach::OtherHost;
    }
    // A peer of an older version names no network namespace; connecting finds out.
    let is_same_namespace = peer.network_namespace.is_empty()
        || own.network_namespace.is_empty()
        || peer.network_namespace == own.network_namespace;
    if is_same_namespace {
        SocketReach::Same
    } else {
        SocketReach::OtherNamespace
    }
}

pub fn unreachable(err: &HttpError) -> ConnectFailure {
    let code = match err {
        HttpError::Untrusted(_) => ReasonCode::Auth,
        _ if err.status() == Some(StatusCode::UNAUTHORIZED) => ReasonCode::Auth,
        _ => ReasonCode::Unreachable,
    };
    ConnectFailure {
        err: ConnectionError::new(code, err.to_string()),
        is_silent: err.status().is_none(),
    }
}

async fn map_peer(
    peer: &Hello,
    device: Option<Arc<dyn DevicePages>>,
) -> Result<RemotePool, String> {
    let name = peer.shm_socket.clone();
    let token = peer.shm_token.clone();
    let num_pages = peer.num_pages as usize;
    let page_bytes = peer.page_bytes as usize;
    let mapped = tokio::task::spawn_blocking(move || {
        shm::fetch_pool(&name, &token, num_pages, page_bytes, device.as_deref())
    })
    .await;
    mapped
        .map_err(|err| err.to_string())?
        .map_err(|err| err.to_string())
}

/// Message of a connection's tasks to the control loop. It holds its frame's bytes of the queue
/// until it is handled.
pub enum PeerMessage {
    Msg(Box<Msg>, OwnedSemaphorePermit),
    Down(ConnectionError),
}

/// Queue of messages to the control loop, bounded in number and in bytes; more stay in the sockets.
#[derive(Clone)]
pub struct PeerInbox {
    messages: mpsc::Sender<(ConnectionId, PeerMessage)>,
    bytes: Arc<Semaphore>,
}

impl PeerInbox {
    /// `bytes`: at least one frame of the largest size.
    pub fn new(
        messages: usize,
        bytes: usize,
    ) -> (Self, mpsc::Receiver<(ConnectionId, PeerMessage)>) {
        let (messages, inbox) = mpsc::channel(messages);
        let bytes = Arc::new(Semaphore::new(bytes));
        (Self { messages, bytes }, inbox)
    }

    /// Waits for space. False: the node is closing.
    async fn put_message(&self, peer: ConnectionId, msg: Msg, frame_bytes: usize) -> bool {
        let Ok(space) = self
            .bytes
            .clone()
            .acquire_many_owned(frame_bytes as u32)
            .await
        else {
            return false;
        };
        let message = PeerMessage::Msg(Box::new(msg), space);
        self.messages.send((peer, message)).await.is_ok()
    }
}

/// The two tasks of one connection. After the outbox is dropped the queued frames are sent, then
/// the sending half is closed.
pub struct ConnectionTasks {
    pub outbox: Outbox,
    reader: AbortHandle,
    writer: AbortHandle,
}

impl ConnectionTasks {
    /// Stop both tasks: nothing more is sent or received.
    pub fn abort_tasks(&self) {
        self.reader.abort();
        self.writer.abort();
    }

    /// Stop receiving; queued frames are still sent.
    pub fn stop_reading(&self) {
        self.reader.abort();
    }
}

/// Start serving an open connection; both tasks report to `peer_inbox`, at most one `Down` counts.
///
/// `is_inbound`: the peer is a decode rank. Its frames are small, and nothing is read while more
/// than `outbox_bytes` wait for it: only one side of a connection may apply back-pressure, or both
/// could wait for each other.
pub fn start_tasks(
    peer: ConnectionId,
    stream: TcpStream,
    (sealer, opener): (FrameSealer, FrameOpener),
    peer_inbox: PeerInbox,
    outbox_bytes: usize,
    is_inbound: bool,
) -> ConnectionTasks {
    let (outbox, inbox) = Outbox::new(outbox_bytes);
    let (read_half, write_half) = stream.into_split();
    let held_back_by = is_inbound.then(|| outbox.backlog.clone());
    let reader = spawn_supervised(
        peer,
        peer_inbox.clone(),
        read_loop(peer, read_half, opener, peer_inbox.clone(), held_back_by),
    );
    let written = outbox.backlog.clone();
    let writer = spawn_supervised(
        peer,
        peer_inbox,
        write_loop(write_half, sealer, inbox, written),
    );
    ConnectionTasks {
        outbox,
        reader,
        writer,
    }
}

/// Run a task and report its end, also if it panics.
fn spawn_supervised(
    peer: ConnectionId,
    peer_inbox: PeerInbox,
    task: impl Future<Output = Result<(), ConnectionError>> + Send + 'static,
) -> AbortHandle {
    let task = tokio::spawn(task);
    let handle = task.abort_handle();
    tokio::spawn(async move {
        let err = match task.await {
            Ok(Ok(())) => ConnectionError::peer_dead("closed by this node"),
            Ok(Err(err)) => err,
            Err(err) if err.is_panic() => {
                ConnectionError::transport_broken("internal: a connection's task panicked")
            }
            Err(_) => return, // aborted by `abort_tasks` or `stop_reading`
        };
        let _ = peer_inbox
            .messages
            .send((peer, PeerMessage::Down(err)))
            .await; // the node is closing
    });
    handle
}

async fn read_loop(
    peer: ConnectionId,
    mut stream: impl tokio::io::AsyncRead + Unpin,
    mut opener: FrameOpener,
    peer_inbox: PeerInbox,
    held_back_by: Option<Arc<Backlog>>,
) -> Result<(), ConnectionError> {
    let max_frame = match held_back_by {
        Some(_) => MAX_DECODE_FRAME_BYTES,
        None => MAX_FRAME_BYTES,
    };
    loop {
        if let Some(backlog) = &held_back_by {
            backlog.below_limit().await;
        }
        let frame = read_frame(&mut stream, max_frame).await?;
        let msg = opener.open(&frame)?;
        if !peer_inbox.put_message(peer, msg, frame.len()).await {
            return Err(ConnectionError::peer_dead("this node is closing"));
        }
    }
}

async fn write_loop(
    mut stream: tokio::net::tcp::OwnedWriteHalf,
    mut sealer: FrameSealer,
    mut inbox: mpsc::UnboundedReceiver<OutgoingMessage>,
    backlog: Arc<Backlog>,
) -> Result<(), ConnectionError> {
    while let Some(out) = inbox.recv().await {
        let bytes = out.bytes();
        let OutgoingMessage { msg, flip } = out;
        let mut frame = sealer.seal(&msg);
        if flip && let Some(last) = frame.last_mut() {
            *last ^= 1;
        }
        let stuck =
            |_| ConnectionError::peer_dead(format!("the peer took no byte for {WRITE_TIMEOUT:?}"));
        tokio::time::timeout(WRITE_TIMEOUT, stream.write_all(&frame))
            .await
            .map_err(stuck)??;
        backlog.subtract_written(bytes);
    }
    let _ = stream.shutdown().await; // the peer may have closed first
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Handshake;

    /// A HELLO from this host and network namespace; `None`: of a version that does not name the
    /// latter.
    fn hello_of(boot_id: &str, network_namespace: Option<&str>) -> Hello {
        let mut hello = serde_json::json!({
            "ver": VERSION, "channel": "Control", "nonce": [], "inc": "p", "expected_inc": null, "addr": "p:1",
            "boot_id": boot_id, "transports": ["shm"], "layout_hash": "l", "num_pages": 1, "page_bytes": 1,
            "shm_socket": "s", "shm_token": [],
        });
        if let Some(name) = network_namespace {
            hello["network_namespace"] = name.into();
        }
        serde_json::from_value(hello).expect("a HELLO")
    }

    #[test]
    fn only_sockets_of_the_own_network_namespace_are_tried() {
        let own = hello_of("host", Some("net:[1]"));
        for (boot_id, namespace, reach) in [
            ("host", Some("net:[1]"), SocketReach::Same),
            ("host", None, SocketReach::Same),
            ("host", Some("net:[2]"), SocketReach::OtherNamespace),
            ("other host", Some("net:[1]"), SocketReach::OtherHost),
            ("", Some("net:[1]"), SocketReach::OtherHost),
        ] {
            let peer = hello_of(boot_id, namespace);
            assert_eq!(socket_reach(&own, &peer), reach, "{peer:?}");
        }
        assert!(shm::network_namespace().starts_with("net:["));
    }

    #[tokio::test]
    async fn inbox_is_bounded_in_bytes() {
        const PAYLOAD: usize = 1000;
        let keys = || Handshake::new(None).derive_session(true, b"d", b"p");
        let (mut sealer, _) = Handshake::new(None).derive_session(false, b"d", b"p");
        let (mut theirs, ours) = tokio::io::duplex(64 << 10);
        let (peer_inbox, mut inbox) = PeerInbox::new(100, 3 * (PAYLOAD + 200));
        let (_, opener) = keys();
        let reader = tokio::spawn(read_loop(1, ours, opener, peer_inbox, None));
        for room in 0..10 {
            let msg = Msg::Final {
                room,
                attempt: 0,
                groups: vec![],
                payload: vec![0; PAYLOAD],
            };
            theirs.write_all(&sealer.seal(&msg)).await.expect("open");
        }
        for _ in 0..100 {
            tokio::task::yield_now().await; // the reader takes what it may
        }
        assert_eq!(inbox.len(), 3);
        for expected in 0..10 {
            match inbox.recv().await {
                Some((1, PeerMessage::Msg(msg, _space))) => {
                    assert!(matches!(*msg, Msg::Final { room, .. } if room == expected));
                }
                _ => panic!("message {expected} is missing"),
            }
        }
        reader.abort();
    }
}
