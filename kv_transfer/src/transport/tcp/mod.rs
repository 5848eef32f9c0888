//! The `tcp` transport: D asks for pages (READ), P answers with their bytes straight from its pool
//! (DATA … DATA_END, or STALE), D reads them straight into the granted pages.
//!
//! All data streams of a node live on one data thread, apart from the control thread, so that a
//! megabyte on its way delays no heartbeat. P answers for pages that the asking rank may read
//! (`AnnouncedPages`), and closes streams that are silent. D keeps at most `WINDOW_BYTES` requested
//! and unanswered per stream; nothing else is buffered here.
//!
//! A pull ends exactly once. After a cancel D reads the rest of the answer into a scratch buffer:
//! the granted pages are not touched again.
//!
//! Pages on a device go through a buffer, an answer at a time, on each side that has them there.
//! The data thread waits for the device meanwhile: tcp is the slow fallback of such a pool.
//!
//! `server` answers on P, `client` requests on D; this file has the thread and the shared parts.

mod client;
mod server;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::copy_threads::panic_text;
use super::fault_injection::Faults;
use super::tasks::PeerTasks;
use super::{Pull, PullEnd};
use crate::pool::AnnouncedPages;
use crate::pool::{KvPool, SumKind};
use crate::protocol::handshake::{Identity, OpenedConnection};

/// Bytes that one READ asks for, if its pages are smaller.
const READ_BYTES: usize = 2 << 20;
/// A stream with an unanswered READ that brings no byte for this long is broken, or takes none of
/// the answer.
const STALL: Duration = Duration::from_secs(5);
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Streams of one peer, of which it uses one, and streams served at once. The oldest makes space
/// for another one.
const STREAMS_PER_PEER: usize = 4;
const MAX_SERVED: usize = 4096;
/// Socket buffers we ask for, where the system allows them; otherwise the kernel's own tuning is
/// better than its cap.
const SOCKET_BUFFER: usize = 4 << 20;

pub type Report = Arc<dyn Fn(PullEnd) + Send + Sync>;

enum Command {
    Serve(std::net::TcpStream, Box<OpenedConnection>),
    Connect(SocketAddr, String, SumKind, mpsc::UnboundedReceiver<ClientCommand>),
}

enum ClientCommand {
    Pull(Pull),
    Cancel(u64),
}

/// The data thread. Joined when dropped; after that no page is written.
pub struct DataPlane {
    commands: Option<mpsc::UnboundedSender<Command>>,
    thread: Option<JoinHandle<()>>,
}

/// D's side of a data stream. When it is dropped, its pulls are cancelled and the stream is closed.
pub struct DataStream(mpsc::UnboundedSender<ClientCommand>);

impl DataStream {
    /// False when the stream has ended: the pull was not accepted, and there will be no `PullEnd`
    /// for it.
    pub fn pull(&self, pull: Pull) -> bool {
        self.0.send(ClientCommand::Pull(pull)).is_ok()
    }

    pub fn cancel(&self, id: u64) {
        let _ = self.0.send(ClientCommand::Cancel(id)); // an ended stream has ended its pulls
    }
}

/// State of the data thread.
#[derive(Clone)]
pub struct DataContext {
    pub pool: Arc<KvPool>,
    pub identity: Arc<Identity>,
    pub faults: Arc<Faults>,
    pub announced: Arc<AnnouncedPages>,
    pub bad_frames: Arc<AtomicU64>,
    /// A peer's stream is closed when it is silent for this long.
    pub idle: Duration,
    pub report: Report,
}

impl DataPlane {
    /// `dead` is called when the thread panics.
    pub fn start(
        context: DataContext,
        dead: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (commands, inbox) = mpsc::unbounded_channel();
        let thread = std::thread::Builder::new().name("kv-data".into()).spawn(move || {
            let run = std::panic::AssertUnwindSafe(|| runtime.block_on(run(context, inbox)));
            if let Err(panic) = std::panic::catch_unwind(run) {
                dead(panic_text(panic.as_ref()));
            }
        })?;
        Ok(Self { commands: Some(commands), thread: Some(thread) })
    }

    /// Answer the READs of a peer whose HELLO asked for a data stream.
    pub fn serve(&self, stream: std::net::TcpStream, opened: OpenedConnection) {
        self.send(Command::Serve(stream, Box::new(opened)));
    }

    /// Open a data stream to a peer; pulls may be given to it at once.
    pub fn connect(&self, addr: SocketAddr, inc: &str, sums: SumKind) -> DataStream {
        let (commands, inbox) = mpsc::unbounded_channel();
        self.send(Command::Connect(addr, inc.to_owned(), sums, inbox));
        DataStream(commands)
    }

    fn send(&self, command: Command) {
        if let Some(commands) = &self.commands {
            let _ = commands.send(command); // after a panic of the thread: the command's channel closes, which its owner notices
        }
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        self.commands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic was reported by the thread itself
        }
    }
}

async fn run(context: DataContext, mut inbox: mpsc::UnboundedReceiver<Command>) {
    let mut tasks = tokio::task::JoinSet::new();
    let mut served = PeerTasks::new(STREAMS_PER_PEER, MAX_SERVED);
    loop {
        tokio::select! {
            command = inbox.recv() => match command {
                Some(Command::Serve(stream, opened)) => {
                    let (inc, addr) = (opened.peer.inc.clone(), opened.peer.addr.clone());
                    let task = tasks.spawn(server::serve(context.clone(), stream, *opened));
                    if served.add(inc, task) {
                        tracing::warn!(peer = %addr, "too many data streams: the oldest one is closed");
                    }
                }
                Some(Command::Connect(addr, inc, sums, inbox)) => { tasks.spawn(client::run(context.clone(), addr, inc, sums, inbox)); }
                None => return, // the node is closing: dropping the tasks ends all streams
            },
            Some(ended) = tasks.join_next_with_id() => match ended {
                Ok((id, ())) => served.ended(id),
                Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
                Err(err) => served.ended(err.id()),
            },
        }
    }
}

/// TCP_NODELAY, and large buffers if the system grants them.
pub fn tune(stream: &TcpStream) {
    let _ = stream.set_nodelay(true); // only slower without it
    // A data stream has no heartbeats of its server: keepalive detects a host that vanished.
    let _ = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, KEEPALIVE))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 3))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, 3));
    let cap = |name: &str| {
        std::fs::read_to_string(format!("/proc/sys/net/core/{name}"))
            .ok()?
            .trim()
            .parse::<usize>()
            .ok()
    };
    if cap("rmem_max").is_some_and(|max| max >= SOCKET_BUFFER) {
        let _ = sockopt::set_socket_recv_buffer_size(stream, SOCKET_BUFFER);
    }
    if cap("wmem_max").is_some_and(|max| max >= SOCKET_BUFFER) {
        let _ = sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER);
    }
}

fn check_len(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}
