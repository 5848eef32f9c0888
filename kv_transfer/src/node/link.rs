//! Getting from a bootstrap address to an open control connection, and the two tasks that serve one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::Transport;
use super::outbox::{Backlog, Outbox};
use crate::bootstrap::{Client, HttpError, resolve};
use crate::code::Code;
use crate::machine::Peer;
use crate::pool::device::DevicePages;
use crate::pool::{RemotePool, SumKind};
use crate::protocol::wire::{Identity, LinkError, Opened, read_frame};
use crate::protocol::{Channel, Hello, MIN_VERSION, Msg, Opener, Sealer, VERSION};
use crate::transport::shm;
use crate::transport::tcp::tune;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// A peer that takes no byte for this long is as good as dead (its heartbeats will be missing too).
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// A control connection to a prefill rank, ready for OPENs.
pub struct Established {
    pub stream: TcpStream,
    pub addr: SocketAddr,
    pub opened: Opened,
    /// The rank's pool, if it is on this host.
    pub remote: Option<Arc<RemotePool>>,
    /// Why there is none although both sides are on this host and know the transport.
    pub map_problem: Option<String>,
}

/// Why there is no connection to a prefill rank.
pub struct LinkFailure {
    pub err: LinkError,
    /// The address refuses connections or does not answer. Otherwise something is there that may know the rank soon.
    pub is_silent: bool,
}

impl From<LinkError> for LinkFailure {
    fn from(err: LinkError) -> Self {
        let is_silent = matches!(err.code, Code::PeerDead);
        Self { err, is_silent }
    }
}

fn silent(why: String) -> LinkFailure {
    LinkFailure {
        err: LinkError::new(Code::Unreachable, why),
        is_silent: true,
    }
}

/// Resolve, connect, say HELLO, and map the peer's pool if it is on this host. Every step is bounded to about a second.
pub async fn establish(
    bootstrap: &Client,
    dp_rank: u32,
    identity: &Identity,
    mapped: Option<Transport>,
    device: Option<Arc<dyn DevicePages>>,
) -> Result<Established, LinkFailure> {
    let route = bootstrap
        .route(dp_rank)
        .await
        .map_err(|err| unreachable(&err))?;
    if route.instance_id.is_empty() {
        return Err(LinkError::new(
            Code::LayoutMismatch,
            "the prefill rank is registered without instance_id: it does not speak this protocol",
        )
        .into());
    }
    if route.proto_ver != 0 && route.proto_ver < MIN_VERSION {
        return Err(LinkError::new(
            Code::LayoutMismatch,
            format!(
                "the prefill rank speaks protocol version {}, this node {MIN_VERSION} to {VERSION}",
                route.proto_ver
            ),
        )
        .into());
    }
    let target = (route.rank_ip.as_str(), route.rank_port);
    let connect = async {
        let addrs = resolve(target.0, target.1, bootstrap.loopback_only)
            .await
            .map_err(|err| unreachable(&err))?;
        TcpStream::connect(&addrs[..])
            .await
            .map_err(|err| silent(format!("{}:{}: {err}", target.0, target.1)))
    };
    let mut stream = match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(err)) => return Err(err),
        Err(_) => {
            return Err(silent(format!(
                "{}:{} did not accept within {CONNECT_TIMEOUT:?}",
                target.0, target.1
            )));
        }
    };
    tune(&stream);
    let addr = stream
        .peer_addr()
        .map_err(|err| LinkError::new(Code::Unreachable, err.to_string()))?;
    let opened = identity
        .ask(&mut stream, Channel::Control, Some(&route.instance_id))
        .await?;
    let peer = &opened.peer;
    if SumKind::parse(&peer.sums).is_none() {
        let why = format!(
            "the prefill rank takes {:?} checksums, which this node does not know: update it",
            peer.sums
        );
        return Err(LinkError::new(Code::LayoutMismatch, why).into());
    }
    let same_host = !peer.boot_id.is_empty() && peer.boot_id == identity.hello.boot_id;
    let (remote, map_problem) = if let Some(via) = mapped
        && same_host
        && peer.transports.iter().any(|t| t == via.as_str())
        && peer.page_bytes == identity.hello.page_bytes
    {
        match map_peer(peer, device).await {
            Ok(remote) => (Some(Arc::new(remote)), None),
            Err(why) => (None, Some(why)),
        }
    } else {
        (None, None)
    };
    Ok(Established {
        stream,
        addr,
        opened,
        remote,
        map_problem,
    })
}

pub fn unreachable(err: &HttpError) -> LinkFailure {
    let code = match err {
        HttpError::Untrusted(_) => Code::Auth,
        _ if err.status() == Some(http::StatusCode::UNAUTHORIZED) => Code::Auth,
        _ => Code::Unreachable,
    };
    LinkFailure {
        err: LinkError::new(code, err.to_string()),
        is_silent: err.status().is_none(),
    }
}

async fn map_peer(
    peer: &Hello,
    device: Option<Arc<dyn DevicePages>>,
) -> Result<RemotePool, String> {
    let (name, token) = (peer.shm_socket.clone(), peer.shm_token.clone());
    let (num_pages, page_bytes) = (peer.num_pages as usize, peer.page_bytes as usize);
    let mapped = tokio::task::spawn_blocking(move || {
        shm::fetch(&name, &token, num_pages, page_bytes, device.as_deref())
    })
    .await;
    mapped
        .map_err(|err| err.to_string())?
        .map_err(|err| err.to_string())
}

/// A message on its way out; `flip` is a test's damage.
pub struct Outgoing {
    pub msg: Msg,
    pub flip: bool,
}

/// What a connection's tasks tell the control loop.
pub enum Heard {
    Msg(Box<Msg>),
    Down(LinkError),
}

/// The two tasks of one connection. Dropping the outbox lets what is queued go out, then closes the sending half.
pub struct Running {
    pub outbox: Outbox,
    reader: AbortHandle,
    writer: AbortHandle,
}

impl Running {
    /// Cut: nothing more is sent or heard.
    pub fn cut(&self) {
        self.reader.abort();
        self.writer.abort();
    }

    /// Stop hearing; what is queued still goes out.
    pub fn stop_reading(&self) {
        self.reader.abort();
    }
}

/// Start serving an open connection; both tasks report to `heard`, at most one `Down` counts.
///
/// `holds_back`: read nothing while more than `outbox_bytes` wait for the peer. Only one side of a connection may, or both could wait
/// for each other.
pub fn run(
    peer: Peer,
    stream: TcpStream,
    (sealer, opener): (Sealer, Opener),
    heard: mpsc::Sender<(Peer, Heard)>,
    outbox_bytes: usize,
    holds_back: bool,
) -> Running {
    let (outbox, inbox) = Outbox::new(outbox_bytes);
    let (read_half, write_half) = stream.into_split();
    let held_back_by = holds_back.then(|| outbox.backlog.clone());
    let reader = supervised(
        peer,
        heard.clone(),
        read_loop(peer, read_half, opener, heard.clone(), held_back_by),
    );
    let written = outbox.backlog.clone();
    let writer = supervised(peer, heard, write_loop(write_half, sealer, inbox, written));
    Running {
        outbox,
        reader,
        writer,
    }
}

/// Run a task and report its end, also if it panics.
fn supervised(
    peer: Peer,
    heard: mpsc::Sender<(Peer, Heard)>,
    task: impl Future<Output = LinkError> + Send + 'static,
) -> AbortHandle {
    let task = tokio::spawn(task);
    let handle = task.abort_handle();
    tokio::spawn(async move {
        let err = match task.await {
            Ok(err) => err,
            Err(err) if err.is_panic() => LinkError::new(
                Code::TransportBroken,
                "internal: a connection's task panicked",
            ),
            Err(_) => return, // cut on purpose
        };
        let _ = heard.send((peer, Heard::Down(err))).await; // the node is closing
    });
    handle
}

async fn read_loop(
    peer: Peer,
    mut stream: impl tokio::io::AsyncRead + Unpin,
    mut opener: Opener,
    heard: mpsc::Sender<(Peer, Heard)>,
    held_back_by: Option<Arc<Backlog>>,
) -> LinkError {
    loop {
        if let Some(backlog) = &held_back_by {
            backlog.below_limit().await;
        }
        let msg = match read_frame(&mut stream).await {
            Ok(frame) => opener.open(&frame),
            Err(err) => return err,
        };
        match msg {
            Ok(msg) => {
                if heard.send((peer, Heard::Msg(Box::new(msg)))).await.is_err() {
                    return LinkError::new(Code::PeerDead, "this node is closing");
                }
            }
            Err(err) => return err.into(),
        }
    }
}

async fn write_loop(
    mut stream: tokio::net::tcp::OwnedWriteHalf,
    mut sealer: Sealer,
    mut inbox: mpsc::UnboundedReceiver<Outgoing>,
    backlog: Arc<Backlog>,
) -> LinkError {
    while let Some(out) = inbox.recv().await {
        let bytes = out.bytes();
        let Outgoing { msg, flip } = out;
        let mut frame = sealer.seal(&msg);
        if flip && let Some(last) = frame.last_mut() {
            *last ^= 1;
        }
        match tokio::time::timeout(WRITE_TIMEOUT, stream.write_all(&frame)).await {
            Ok(Ok(())) => backlog.written(bytes),
            Ok(Err(err)) => return LinkError::new(Code::PeerDead, err.to_string()),
            Err(_) => {
                return LinkError::new(
                    Code::PeerDead,
                    format!("the peer took no byte for {WRITE_TIMEOUT:?}"),
                );
            }
        }
    }
    let _ = stream.shutdown().await; // the peer may have closed first
    LinkError::new(Code::PeerDead, "closed by this node")
}
