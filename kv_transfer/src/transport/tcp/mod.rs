//! The `tcp` transport: D asks for pages (READ), P answers with their bytes straight from its pool
//! (DATA … DATA_END, or STALE), D reads them straight into the granted pages.
//!
//! Data streams live on the data threads, apart from the control thread, so that a megabyte on its
//! way delays no heartbeat. D has one stream per data thread to each prefill rank, and deals every
//! pull out to them. P answers for pages that the asking rank may read (`AnnouncedPages`), and
//! closes streams that are silent. D keeps at most `WINDOW_BYTES` requested and unanswered per
//! stream; nothing else is buffered here.
//!
//! A pull ends exactly once, with the last of its parts. After a cancel D reads the rest of the
//! answer into a scratch buffer: the granted pages are not touched again.
//!
//! Pages on a device go through a buffer, an answer at a time, on each side that has them there.
//! A data thread waits for the device meanwhile: tcp is the slow fallback of such a pool.
//!
//! `server` answers on P, `client` requests on D; this file has the threads and the shared parts.

mod client;
mod server;

use std::io;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::sockopt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::copy_threads::panic_text;
use super::fault_injection::Faults;
use super::tasks::PeerTasks;
use super::{Pull, PullEnd};
use crate::pool::{AnnouncedPages, KvPool, SumKind};
use crate::protocol::handshake::{Identity, OpenedConnection};
use crate::protocol::{GroupId, MAX_READ_PAGES};
use crate::state_machine::PullError;
use crate::state_machine::decode::PullPage;

/// Bytes that one READ asks for, if its pages are smaller.
const READ_BYTES: usize = 2 << 20;
/// A stream with an unanswered READ that brings no byte for this long is broken, or takes none of
/// the answer.
const STALL: Duration = Duration::from_secs(5);
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Data threads of a node, and so streams of a pair.
pub const MAX_STREAMS: usize = 8;
/// Streams that a data thread serves for one peer: those it uses, and as many that broke unnoticed.
/// The oldest makes space for another one.
const STREAMS_PER_PEER: usize = 2 * MAX_STREAMS;
/// Streams served at once by all data threads.
const MAX_SERVED: usize = 4096;
/// Socket buffers we ask for, where the system allows them; otherwise the kernel's own tuning is
/// better than its cap.
const SOCKET_BUFFER: usize = 4 << 20;

pub type Report = Arc<dyn Fn(PullEnd) + Send + Sync>;

enum Command {
    Serve(std::net::TcpStream, Box<OpenedConnection>),
    Connect(
        SocketAddr,
        String,
        SumKind,
        mpsc::UnboundedReceiver<ClientCommand>,
    ),
}

enum ClientCommand {
    Pull(PullPart),
    Cancel(u64),
}

/// Pages of a pull that one stream fetches.
struct PullPart {
    id: u64,
    group: GroupId,
    pages: Vec<PullPage>,
    of: Arc<DividedPull>,
}

/// Pull whose parts are under way: how many, their bytes, and the error that says most.
struct DividedPull(Mutex<(usize, PullEnd)>);

impl DividedPull {
    /// Record the end of a part; returns the end of the pull with its last one.
    fn end_part(&self, bytes: u64, result: Result<(), PullError>) -> Option<PullEnd> {
        let (parts, end) = &mut *self.0.lock();
        *parts -= 1;
        end.bytes += bytes;
        let is_known = matches!(end.result, Err(PullError::Failed(..)));
        if result.is_err() && !is_known {
            end.result = result;
        }
        (*parts == 0).then(|| end.clone())
    }
}

/// The data threads. Joined when stopped or dropped; after that no page is written.
pub struct DataPlane {
    threads: Vec<(mpsc::UnboundedSender<Command>, JoinHandle<()>)>,
    page_bytes: usize,
    /// Number of streams that were served.
    served: usize,
}

/// D's data streams to a prefill rank, one per data thread, opened when first used. When they are
/// dropped, their pulls are cancelled and they are closed.
pub struct DataStreams {
    addr: SocketAddr,
    incarnation: String,
    sums: SumKind,
    streams: Vec<mpsc::UnboundedSender<ClientCommand>>,
    /// Stream of the next part.
    next: usize,
}

impl DataStreams {
    pub fn new(addr: SocketAddr, incarnation: String, sums: SumKind) -> Self {
        Self {
            addr,
            incarnation,
            sums,
            streams: Vec::new(),
            next: 0,
        }
    }

    /// Deal a pull out to the streams, in parts of a READ or more, one per stream at most; a stream
    /// that has ended is opened again. False when the data threads have stopped: there will be no
    /// `PullEnd`.
    pub fn start_pull(&mut self, plane: &DataPlane, pull: Pull) -> bool {
        let streams = plane.threads.len();
        if streams == 0 {
            return false;
        }
        let reads = pull.pages.len().div_ceil(pages_per_read(plane.page_bytes));
        let per_part = pull.pages.len().div_ceil(reads.clamp(1, streams)).max(1);
        let parts = pull.pages.len().div_ceil(per_part).max(1);
        let end = PullEnd {
            id: pull.id,
            bytes: 0,
            result: Ok(()),
        };
        let of = Arc::new(DividedPull(Mutex::new((parts, end))));
        for i in 0..parts {
            let pages = pull
                .pages
                .iter()
                .skip(i * per_part)
                .take(per_part)
                .copied()
                .collect();
            let part = PullPart {
                id: pull.id,
                group: pull.group,
                pages,
                of: of.clone(),
            };
            self.send_command(plane, self.next, ClientCommand::Pull(part));
            self.next = (self.next + 1) % streams;
        }
        true
    }

    fn send_command(&mut self, plane: &DataPlane, at: usize, command: ClientCommand) {
        while self.streams.len() <= at {
            self.streams
                .push(self.connect_stream(plane, self.streams.len()));
        }
        if let Err(mpsc::error::SendError(command)) = self.streams[at].send(command) {
            self.streams[at] = self.connect_stream(plane, at);
            let _ = self.streams[at].send(command); // its thread is dead, which ends all tcp pulls
        }
    }

    fn connect_stream(&self, plane: &DataPlane, at: usize) -> mpsc::UnboundedSender<ClientCommand> {
        let (commands, inbox) = mpsc::unbounded_channel();
        // the first streams of all peers are spread
        let thread_index = at + usize::from(self.addr.port());
        plane.send_command(
            thread_index,
            Command::Connect(self.addr, self.incarnation.clone(), self.sums, inbox),
        );
        commands
    }

    pub fn cancel_pull(&self, id: u64) {
        for stream in &self.streams {
            let _ = stream.send(ClientCommand::Cancel(id)); // an ended stream has ended its pulls
        }
    }
}

/// State of a data thread.
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
    /// Start so many data threads. `dead` is called when one panics.
    pub fn start(
        context: &DataContext,
        threads: usize,
        dead: impl Fn(String) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let page_bytes = context.pool.page_bytes();
        let mut plane = Self {
            threads: Vec::new(),
            page_bytes,
            served: 0,
        };
        for i in 0..threads {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let (commands, inbox) = mpsc::unbounded_channel();
            let context = context.clone();
            let dead = dead.clone();
            let peer_tasks = PeerTasks::new(STREAMS_PER_PEER, MAX_SERVED / threads);
            let work = move || {
                let run = || runtime.block_on(run_thread(context, peer_tasks, inbox));
                if let Err(panic) = catch_unwind(AssertUnwindSafe(run)) {
                    dead(panic_text(panic.as_ref()));
                }
            };
            let thread = std::thread::Builder::new()
                .name(format!("kv-data-{i}"))
                .spawn(work)?;
            plane.threads.push((commands, thread));
        }
        Ok(plane)
    }

    /// Answer the READs of a peer whose HELLO asked for a data stream.
    pub fn serve_stream(&mut self, stream: std::net::TcpStream, opened: OpenedConnection) {
        self.served += 1;
        self.send_command(self.served, Command::Serve(stream, Box::new(opened)));
    }

    fn send_command(&self, at: usize, command: Command) {
        if !self.threads.is_empty() {
            let (commands, _) = &self.threads[at % self.threads.len()];
            // after a panic of the thread: the command's channel closes, which its owner notices
            let _ = commands.send(command);
        }
    }

    /// End all streams and threads.
    pub fn stop(&mut self) {
        let (commands, threads): (Vec<_>, Vec<_>) = self.threads.drain(..).unzip();
        drop(commands);
        for thread in threads {
            let _ = thread.join(); // a panic was reported by the thread itself
        }
    }
}

impl Drop for DataPlane {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn run_thread(
    context: DataContext,
    mut served: PeerTasks<String>,
    mut inbox: mpsc::UnboundedReceiver<Command>,
) {
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            command = inbox.recv() => match command {
                Some(Command::Serve(stream, opened)) => {
                    let inc = opened.peer.inc.clone();
                    let addr = opened.peer.addr.clone();
                    let task = tasks.spawn(server::serve_reads(context.clone(), stream, *opened));
                    if served.add(inc, task) {
                        tracing::warn!(peer = %addr, "too many data streams: the oldest one is closed");
                    }
                }
                Some(Command::Connect(addr, inc, sums, inbox)) => { tasks.spawn(client::serve_pulls(context.clone(), addr, inc, sums, inbox)); }
                None => return, // the node is closing: dropping the tasks ends all streams
            },
            Some(ended) = tasks.join_next_with_id() => match ended {
                Ok((id, ())) => served.remove_ended(id),
                Err(err) if err.is_panic() => std::panic::resume_unwind(err.into_panic()),
                Err(err) => served.remove_ended(err.id()),
            },
        }
    }
}

/// TCP_NODELAY, and large buffers if the system grants them.
pub fn set_stream_options(stream: &TcpStream) {
    let _ = stream.set_nodelay(true); // only slower without it
    // A data stream has no heartbeats of its server: keepalive detects a host that vanished.
    let _ = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, KEEPALIVE))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 3))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, 3));
    let is_granted = |limit: &str| {
        let cap = std::fs::read_to_string(format!("/proc/sys/net/core/{limit}"));
        cap.is_ok_and(|cap| {
            cap.trim()
                .parse()
                .is_ok_and(|cap: usize| cap >= SOCKET_BUFFER)
        })
    };
    if is_granted("rmem_max") {
        let _ = sockopt::set_socket_recv_buffer_size(stream, SOCKET_BUFFER);
    }
    if is_granted("wmem_max") {
        let _ = sockopt::set_socket_send_buffer_size(stream, SOCKET_BUFFER);
    }
}

/// Pages that one READ asks for.
fn pages_per_read(page_bytes: usize) -> usize {
    (READ_BYTES / page_bytes).clamp(1, MAX_READ_PAGES)
}

/// `None` if the socket is not ready after all.
fn unless_blocked<T>(io: io::Result<T>) -> io::Result<Option<T>> {
    match io {
        Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(None),
        done => done.map(Some),
    }
}

fn check_len(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Msg;
    use crate::protocol::tests::hello;
    use crate::reason_code::ReasonCode;

    #[test]
    fn dead_data_thread_is_reported_and_stop_ends_the_others() {
        let Msg::Hello(hello) = hello(b"") else {
            unreachable!("it makes a HELLO")
        };
        let context = DataContext {
            pool: Arc::new(KvPool::create(4, 4096).expect("memory")),
            identity: Arc::new(Identity {
                cluster_keys: None,
                hello,
            }),
            faults: Arc::default(),
            announced: Arc::default(),
            bad_frames: Arc::default(),
            idle: KEEPALIVE,
            report: Arc::new(|_| panic!("asked to, by a test")),
        };
        let (died, deaths) = std::sync::mpsc::channel();
        let dead = move |reason| died.send(reason).expect("the test waits for it");
        let mut plane = DataPlane::start(&context, 2, dead).expect("threads");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let refusing = listener.local_addr().expect("bound");
        drop(listener);
        let mut streams = DataStreams::new(refusing, "p".into(), SumKind::Xxh3);
        let pull = || Pull {
            id: 1,
            group: 0,
            pages: Vec::new(),
            cancel: Arc::default(),
        };
        assert!(streams.start_pull(&plane, pull()));
        let reason = deaths
            .recv_timeout(Duration::from_secs(30))
            .expect("its end is reported");
        assert_eq!(reason, "a thread panicked: asked to, by a test");
        let alive = plane
            .threads
            .iter()
            .filter(|(commands, _)| !commands.is_closed());
        assert_eq!(alive.count(), 1, "the other thread still writes pages");
        plane.stop();
        assert!(!streams.start_pull(&plane, pull()), "no thread is left");
    }

    #[test]
    fn divided_pull_ends_with_its_last_part_and_a_damaged_page_outranks_a_broken_stream() {
        let end = PullEnd {
            id: 7,
            bytes: 0,
            result: Ok(()),
        };
        let pull = DividedPull(Mutex::new((4, end.clone())));
        let broken = || Err(PullError::Broken("reset".into()));
        let damaged = Err(PullError::Failed(ReasonCode::Checksum, "page 3".into()));
        assert_eq!(pull.end_part(10, broken()), None);
        assert_eq!(pull.end_part(20, damaged.clone()), None);
        assert_eq!(pull.end_part(0, broken()), None);
        let whole = PullEnd {
            bytes: 35,
            result: damaged,
            ..end
        };
        assert_eq!(pull.end_part(5, Ok(())), Some(whole));
    }
}
