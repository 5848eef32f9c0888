//! The `tcp` transport: D asks for pages (READ), P answers with their bytes straight from its pool (DATA … DATA_END, or STALE), D reads
//! them straight into the granted pages.
//!
//! All data streams of a node live on one data thread, apart from the control thread, so that a megabyte on its way delays no
//! heartbeat. P answers for pages that the asking rank may read (`AnnouncedPages`), and closes streams that are silent. D keeps at most `WINDOW_BYTES` requested and unanswered per stream; nothing else is buffered here.
//!
//! A pull ends exactly once. After a cancel D reads the rest of the answer into a scratch buffer: the granted pages are not touched again.
//!
//! Pages on a device go through a buffer, an answer at a time, on each side that has them there. The data thread waits for the device
//! meanwhile: tcp is the last resort of such a pool, and slow with it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::copier::{check_sum, flip_and_rehash, land_on, panic_text};
use super::fault::Faults;
use super::tasks::PeerTasks;
use super::{Pull, PullEnd, PullError, copy};
use crate::code::Code;
use crate::machine::decode::PullPage;
use crate::pool::AnnouncedPages;
use crate::pool::{KvPool, SumKind};
use crate::protocol::wire::{Identity, LinkError, Opened, read_small_frame};
use crate::protocol::{
    Channel, HEADER_BYTES, MAX_READ_FRAME_BYTES, MAX_READ_PAGES, Msg, Opener, Sealer, frame_len,
};

/// Requested and not yet received, per stream: two answers of `READ_BYTES`, so that P never waits for the next question.
const WINDOW_BYTES: usize = 8 << 20;
const READ_BYTES: usize = 2 << 20;
/// Most bytes of one answer (a page at least): a peer of another build may ask for more than `READ_BYTES`.
const MAX_READ_BYTES: usize = 4 * READ_BYTES;
/// D shows this often that it still uses a stream; P waits several times as long (`data_idle_ms`).
const BEAT: Duration = Duration::from_secs(15);
/// A stream with an unanswered READ that brings no byte for this long is broken, or takes none of the answer.
const STALL: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
const KEEPALIVE: Duration = Duration::from_secs(15);
/// Streams of one peer, of which it uses one, and streams served at once. The oldest makes space for another one.
const STREAMS_PER_PEER: usize = 4;
const MAX_SERVED: usize = 4096;
/// Socket buffers we ask for, where the system allows them; otherwise the kernel's own tuning is better than its cap.
const SOCKET_BUFFER: usize = 4 << 20;
/// Bytes moved per visit of a stream, so that several streams share the thread.
const VISIT_BYTES: usize = 4 << 20;
const MAX_IOVECS: usize = 64;
const SCRATCH_BYTES: usize = 256 << 10;

pub type Report = Arc<dyn Fn(PullEnd) + Send + Sync>;

enum Command {
    Serve(std::net::TcpStream, Box<Opened>),
    Connect(
        SocketAddr,
        String,
        SumKind,
        mpsc::UnboundedReceiver<ClientCommand>,
    ),
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

/// Our side of a pair's data stream. When it is dropped, its pulls are cancelled and the stream is closed.
pub struct DataLink(mpsc::UnboundedSender<ClientCommand>);

impl DataLink {
    /// False when the stream is gone: the pull was not taken, and there will be no `PullEnd` for it.
    pub fn pull(&self, pull: Pull) -> bool {
        self.0.send(ClientCommand::Pull(pull)).is_ok()
    }

    pub fn cancel(&self, id: u64) {
        let _ = self.0.send(ClientCommand::Cancel(id)); // a stream that is gone has ended its pulls
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
    /// `dead` is told when the thread panics.
    pub fn start(
        context: DataContext,
        dead: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (commands, inbox) = mpsc::unbounded_channel();
        let thread = std::thread::Builder::new()
            .name("kv-data".into())
            .spawn(move || {
                let run = std::panic::AssertUnwindSafe(|| runtime.block_on(run(context, inbox)));
                if let Err(panic) = std::panic::catch_unwind(run) {
                    dead(panic_text(panic.as_ref()));
                }
            })?;
        Ok(Self {
            commands: Some(commands),
            thread: Some(thread),
        })
    }

    /// Answer the READs of a peer whose HELLO asked for a data stream.
    pub fn serve(&self, stream: std::net::TcpStream, opened: Opened) {
        self.send(Command::Serve(stream, Box::new(opened)));
    }

    /// Open a data stream to a peer; pulls may be given to it at once.
    pub fn connect(&self, addr: SocketAddr, inc: &str, sums: SumKind) -> DataLink {
        let (commands, inbox) = mpsc::unbounded_channel();
        self.send(Command::Connect(addr, inc.to_owned(), sums, inbox));
        DataLink(commands)
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
                    let task = tasks.spawn(serve(context.clone(), stream, *opened));
                    if served.add(inc, task) {
                        tracing::warn!(peer = %addr, "too many data streams: the oldest one is closed");
                    }
                }
                Some(Command::Connect(addr, inc, sums, inbox)) => { tasks.spawn(client(context.clone(), addr, inc, sums, inbox)); }
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
    let _ = stream.set_nodelay(true); // slower, not wrong, without it
    // A data stream has no heartbeats: this is how the answering side forgets a host that vanished.
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

// ---- P: answer READs -------------------------------------------------------------------------------------------------

async fn serve(context: DataContext, stream: std::net::TcpStream, opened: Opened) {
    let Opened {
        peer,
        mut sealer,
        mut opener,
    } = opened;
    let served = async {
        let mut stream = TcpStream::from_std(stream)
            .map_err(|err| LinkError::new(Code::TransportBroken, err.to_string()))?;
        tune(&stream);
        loop {
            let frame = read_small_frame(&mut stream, MAX_READ_FRAME_BYTES, context.idle).await?;
            match opener.open(&frame)? {
                Msg::Heartbeat { .. } => {}
                Msg::Read { ticket, ids, gens } => {
                    if let Some(ms) = context.faults.page_delay_ms() {
                        tokio::time::sleep(Duration::from_millis(ms)).await; // a test's slow link
                    }
                    let read = Read { ticket, ids, gens };
                    answer(&context, &stream, &mut sealer, &peer.inc, &read).await?;
                }
                other => {
                    return Err::<(), _>(LinkError::new(
                        Code::TransportBroken,
                        format!("{} on a data stream", other.name()),
                    ));
                }
            }
        }
    };
    if let Err(err) = served.await {
        let is_bad = matches!(err.code, Code::Auth | Code::TransportBroken);
        context
            .bad_frames
            .fetch_add(u64::from(is_bad), Ordering::Relaxed);
        tracing::debug!(peer = %peer.addr, %err, "a data stream to a decode rank ended");
    }
}

fn first_stale(pool: &KvPool, ids: &[u32], gens: &[u64]) -> Option<u32> {
    ids.iter()
        .zip(gens)
        .find(|&(&id, &generation)| {
            id as usize >= pool.num_pages() || pool.generation(id) != generation
        })
        .map(|(&id, _)| id)
}

/// A READ of the peer.
struct Read {
    ticket: u64,
    ids: Vec<u32>,
    gens: Vec<u64>,
}

async fn answer(
    context: &DataContext,
    stream: &TcpStream,
    sealer: &mut Sealer,
    inc: &str,
    read: &Read,
) -> Result<(), LinkError> {
    let pool = &context.pool;
    let (ticket, ids, gens) = (read.ticket, &read.ids[..], &read.gens[..]);
    let io = |err: io::Error| LinkError::new(Code::PeerDead, err.to_string());
    let bytes = ids.len() * pool.page_bytes();
    if ids.len() > 1 && bytes > MAX_READ_BYTES {
        let why = format!("a READ of {bytes} bytes, the limit is {MAX_READ_BYTES}");
        return Err(LinkError::new(Code::TransportBroken, why));
    }
    let refused = context.announced.first_refused(inc, ids, gens);
    if let Some(page) = refused.or_else(|| first_stale(pool, ids, gens)) {
        let code = refused.map(|_| Code::LeaseExpired);
        let stale = Msg::Stale { ticket, page, code };
        return write_all(stream, &sealer.seal(&stale)).await.map_err(io);
    }
    let head = sealer.seal(&Msg::Data {
        ticket,
        pages: ids.len() as u32,
        page_bytes: pool.page_bytes() as u64,
    });
    let staged = match pool.device() {
        None => None,
        Some(device) => {
            let mut bytes = vec![0; bytes];
            device
                .gather(ids, &mut bytes)
                .map_err(|err| LinkError::new(Code::TransportBroken, err.to_string()))?;
            Some(bytes)
        }
    };
    write_all(stream, &head).await.map_err(io)?;
    match staged {
        None => write_pages(stream, pool, ids).await.map_err(io)?,
        Some(bytes) => write_all(stream, &bytes).await.map_err(io)?,
    }
    if let Some(ms) = context.faults.copied_delay_ms() {
        tokio::time::sleep(Duration::from_millis(ms)).await; // time for a test's new owner
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst); // the bytes were read before this second look
    let stale = first_stale(pool, ids, gens);
    write_all(stream, &sealer.seal(&Msg::DataEnd { ticket, stale }))
        .await
        .map_err(io)
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        within_stall(stream.writable()).await?;
        match stream.try_write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => {}
            Err(err) => return Err(err),
        }
    }
    Ok(())
}

/// A peer that takes no byte for `STALL` is as good as gone.
async fn within_stall<T>(io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(STALL, io)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn write_pages(stream: &TcpStream, pool: &KvPool, ids: &[u32]) -> io::Result<()> {
    let page_bytes = pool.page_bytes();
    let total = ids.len() * page_bytes;
    let mut sent = 0;
    while sent < total {
        let n = within_stall(stream.async_io(Interest::WRITABLE, || {
            let mut iovecs = iovecs(ids.len(), page_bytes, sent, |i| pool.page_ptr(ids[i]));
            // SAFETY: an all-zero msghdr is a valid one without address, vectors and control data.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = iovecs.as_mut_ptr();
            message.msg_iovlen = iovecs.len() as _;
            // SAFETY: the ids are below num_pages, so every range lies in our mapping, which `pool` keeps alive; the kernel only
            // reads. The scheduler may write the pages meanwhile: the second look at the generations, or the checksum, finds out.
            check_len(unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
        }))
        .await?;
        sent += n;
    }
    Ok(())
}

fn check_len(n: isize) -> io::Result<usize> {
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// The rest of a run of pages from byte `done` on, as at most `MAX_IOVECS` vectors.
fn iovecs(
    pages: usize,
    page_bytes: usize,
    done: usize,
    ptr: impl Fn(usize) -> *mut u8,
) -> Vec<libc::iovec> {
    let first = done / page_bytes;
    (first..pages.min(first + MAX_IOVECS))
        .map(|i| {
            let skip = if i == first { done % page_bytes } else { 0 };
            libc::iovec {
                iov_base: ptr(i).wrapping_add(skip).cast(),
                iov_len: page_bytes - skip,
            }
        })
        .collect()
}

// ---- D: ask and read -------------------------------------------------------------------------------------------------

async fn client(
    context: DataContext,
    addr: SocketAddr,
    inc: String,
    sums: SumKind,
    mut inbox: mpsc::UnboundedReceiver<ClientCommand>,
) {
    let mut client = Client {
        context,
        sums,
        jobs: HashMap::new(),
        todo: VecDeque::new(),
        waiting: VecDeque::new(),
        waiting_bytes: 0,
        next_ticket: 0,
        out: Vec::new(),
    };
    let broken = match connect(&client.context, addr, &inc).await {
        Ok((stream, opened)) => client.talk(stream, opened, &mut inbox).await,
        Err(err) => Some(err),
    };
    // From here on nobody can give us another pull; those already in the channel are ended like those we had.
    inbox.close();
    while let Some(command) = inbox.recv().await {
        if let ClientCommand::Pull(pull) = command {
            client.jobs.insert(pull.id, Job::new(&pull));
        }
    }
    let why = match broken {
        None => PullError::Cancelled,
        Some(err) => {
            tracing::warn!(%addr, %err, "the data stream to a prefill rank broke");
            PullError::Broken(err.to_string())
        }
    };
    let ids: Vec<u64> = client.jobs.keys().copied().collect();
    for id in ids {
        client.end(id, Err(why.clone()));
    }
}

async fn connect(
    context: &DataContext,
    addr: SocketAddr,
    inc: &str,
) -> Result<(TcpStream, Opened), LinkError> {
    let unreachable = |why: String| LinkError::new(Code::Unreachable, why);
    let mut stream = match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(addr)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(err)) => return Err(unreachable(err.to_string())),
        Err(_) => {
            return Err(unreachable(format!(
                "no connection within {CONNECT_TIMEOUT:?}"
            )));
        }
    };
    tune(&stream);
    let opened = context
        .identity
        .ask(&mut stream, Channel::Data, Some(inc))
        .await?;
    Ok((stream, opened))
}

/// A pull being worked on.
struct Job {
    pages_left: usize,
    bytes: u64,
}

impl Job {
    fn new(pull: &Pull) -> Self {
        Self {
            pages_left: pull.pages.len(),
            bytes: 0,
        }
    }
}

/// Part of a pull: what one READ asks for.
struct Chunk {
    job: u64,
    ticket: u64,
    pages: Vec<PullPage>,
    sums: Vec<u64>,
    /// The answer's bytes, on their way to pages on a device.
    staged: Vec<u8>,
}

/// Where we are in the answer to the oldest READ.
enum Reading {
    Head { buffer: Vec<u8>, expect: usize },
    Pages { done: usize },
}

impl Reading {
    fn head() -> Self {
        Reading::Head {
            buffer: Vec::new(),
            expect: HEADER_BYTES,
        }
    }
}

struct Client {
    context: DataContext,
    jobs: HashMap<u64, Job>,
    todo: VecDeque<Chunk>,
    waiting: VecDeque<Chunk>,
    waiting_bytes: usize,
    next_ticket: u64,
    out: Vec<u8>,
    /// How the peer takes its checksums.
    sums: SumKind,
}

impl Client {
    /// Serve pulls until the inbox closes (`None`) or the stream breaks (the reason).
    async fn talk(
        &mut self,
        stream: TcpStream,
        opened: Opened,
        inbox: &mut mpsc::UnboundedReceiver<ClientCommand>,
    ) -> Option<LinkError> {
        let Opened {
            mut sealer,
            mut opener,
            ..
        } = opened;
        let mut reading = Reading::head();
        let mut scratch = vec![0u8; SCRATCH_BYTES];
        let mut stalled_at = Instant::now() + STALL;
        let mut beat = tokio::time::interval_at(Instant::now() + BEAT, BEAT);
        loop {
            self.ask_more(&mut sealer);
            let step = tokio::select! {
                command = inbox.recv() => match command {
                    Some(ClientCommand::Pull(pull)) => {
                        if self.waiting.is_empty() {
                            stalled_at = Instant::now() + STALL;
                        }
                        self.take(pull);
                        Ok(false)
                    }
                    Some(ClientCommand::Cancel(id)) => {
                        self.todo.retain(|chunk| chunk.job != id);
                        self.end(id, Err(PullError::Cancelled));
                        Ok(false)
                    }
                    None => return None,
                },
                ready = stream.readable() => ready.map_err(broken).and_then(|()| self.read(&stream, &mut opener, &mut reading, &mut scratch)),
                ready = stream.writable(), if !self.out.is_empty() => ready.map_err(broken).and_then(|()| self.write(&stream)).map(|()| false),
                _ = beat.tick() => {
                    self.out.extend(sealer.seal(&stream_beat()));
                    Ok(false)
                }
                () = tokio::time::sleep_until(stalled_at), if !self.waiting.is_empty() => {
                    Err(LinkError::new(Code::TransportBroken, format!("no byte for {STALL:?}")))
                }
            };
            match step {
                Ok(true) => stalled_at = Instant::now() + STALL,
                Ok(false) => {}
                Err(err) => return Some(err),
            }
        }
    }

    fn take(&mut self, pull: Pull) {
        self.jobs.insert(pull.id, Job::new(&pull));
        if pull.pages.is_empty() {
            return self.end(pull.id, Ok(()));
        }
        let per_read = (READ_BYTES / self.context.pool.page_bytes()).clamp(1, MAX_READ_PAGES);
        for pages in pull.pages.chunks(per_read) {
            self.todo.push_back(Chunk {
                job: pull.id,
                ticket: 0,
                pages: pages.to_vec(),
                sums: Vec::new(),
                staged: Vec::new(),
            });
        }
    }

    /// Fill the window with questions.
    fn ask_more(&mut self, sealer: &mut Sealer) {
        while self.waiting_bytes < WINDOW_BYTES
            && let Some(mut chunk) = self.todo.pop_front()
        {
            self.next_ticket += 1;
            chunk.ticket = self.next_ticket;
            let ids = chunk.pages.iter().map(|p| p.src.page).collect();
            let gens = chunk.pages.iter().map(|p| p.src.generation).collect();
            self.out.extend(sealer.seal(&Msg::Read {
                ticket: chunk.ticket,
                ids,
                gens,
            }));
            self.waiting_bytes += chunk.pages.len() * self.context.pool.page_bytes();
            self.waiting.push_back(chunk);
        }
    }

    fn write(&mut self, stream: &TcpStream) -> Result<(), LinkError> {
        match stream.try_write(&self.out) {
            Ok(n) => {
                self.out.drain(..n);
                Ok(())
            }
            Err(err) if err.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(err) => Err(broken(err)),
        }
    }

    /// Read what is there, up to `VISIT_BYTES`. True if anything came.
    fn read(
        &mut self,
        stream: &TcpStream,
        opener: &mut Opener,
        reading: &mut Reading,
        scratch: &mut [u8],
    ) -> Result<bool, LinkError> {
        let mut visited = 0;
        while visited < VISIT_BYTES {
            let got = match reading {
                Reading::Head { buffer, expect } => {
                    let start = buffer.len();
                    buffer.resize(*expect, 0);
                    let got = stream.try_read(&mut buffer[start..]);
                    buffer.truncate(start + got.as_ref().map_or(0, |n| *n));
                    got
                }
                Reading::Pages { done } => self.read_pages(stream, *done, scratch),
            };
            match got {
                Ok(0) => {
                    return Err(LinkError::new(
                        Code::PeerDead,
                        "the peer closed the data stream",
                    ));
                }
                Ok(n) => {
                    visited += n;
                    self.advance(opener, reading, n)?;
                }
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => break,
                Err(err) => return Err(broken(err)),
            }
        }
        Ok(visited > 0)
    }

    /// The next bytes of the oldest chunk: into its pages, or into the scratch buffer if its pull is over.
    fn read_pages(
        &mut self,
        stream: &TcpStream,
        done: usize,
        scratch: &mut [u8],
    ) -> io::Result<usize> {
        let Some(chunk) = self.waiting.front_mut() else {
            return Err(io::Error::other("pages without a question"));
        };
        let page_bytes = self.context.pool.page_bytes();
        if !self.jobs.contains_key(&chunk.job) {
            let left = chunk.pages.len() * page_bytes - done;
            let n = left.min(scratch.len());
            return stream.try_read(&mut scratch[..n]);
        }
        if self.context.pool.device().is_some() {
            chunk.staged.resize(chunk.pages.len() * page_bytes, 0);
            return stream.try_read(&mut chunk.staged[done..]);
        }
        // A page at a time, so that its checksum is taken while it is in the cache.
        let (page, offset) = (chunk.pages[done / page_bytes], done % page_bytes);
        stream.try_io(Interest::READABLE, || {
            let iovec = libc::iovec {
                iov_base: self
                    .context
                    .pool
                    .page_ptr(page.dst)
                    .wrapping_add(offset)
                    .cast(),
                iov_len: page_bytes - offset,
            };
            // SAFETY: dst is a page of our pool that the engine granted to this pull, which has not ended; nobody else uses it.
            check_len(unsafe { libc::readv(stream.as_raw_fd(), &iovec, 1) })
        })
    }

    /// `n` more bytes arrived.
    fn advance(
        &mut self,
        opener: &mut Opener,
        reading: &mut Reading,
        n: usize,
    ) -> Result<(), LinkError> {
        match reading {
            Reading::Head { buffer, expect } if buffer.len() < *expect => Ok(()),
            Reading::Head { buffer, expect } if *expect == HEADER_BYTES => {
                *expect += frame_len([buffer[0], buffer[1], buffer[2], buffer[3]])?;
                Ok(())
            }
            Reading::Head { buffer, .. } => {
                let msg = opener.open(&buffer[HEADER_BYTES..])?;
                *reading = self.hear(msg)?;
                Ok(())
            }
            Reading::Pages { done } => {
                let before = *done;
                *done += n;
                let after = *done;
                if self.page_arrived(before, after) {
                    *reading = Reading::head();
                }
                Ok(())
            }
        }
    }

    /// Take the checksum of a page that is complete; true after the chunk's last one.
    fn page_arrived(&mut self, before: usize, after: usize) -> bool {
        let page_bytes = self.context.pool.page_bytes();
        let Some(chunk) = self.waiting.front_mut() else {
            return true;
        };
        let is_done = after == chunk.pages.len() * page_bytes;
        if self.context.pool.device().is_some() {
            return is_done;
        }
        if self.jobs.contains_key(&chunk.job) && before / page_bytes != after / page_bytes {
            let dst = self
                .context
                .pool
                .page_ptr(chunk.pages[before / page_bytes].dst);
            // SAFETY: the page is granted to this pull, which has not ended; this thread alone uses it.
            let sum = unsafe {
                if self.context.faults.flip_page() {
                    flip_and_rehash(self.sums, dst, page_bytes)
                } else {
                    copy::hash_by(self.sums, dst, page_bytes)
                }
            };
            chunk.sums.push(sum);
        }
        is_done
    }

    /// A frame that belongs to the oldest question.
    fn hear(&mut self, msg: Msg) -> Result<Reading, LinkError> {
        let protocol = |why: String| LinkError::new(Code::TransportBroken, why);
        let page_bytes = self.context.pool.page_bytes();
        let Some(chunk) = self.waiting.front() else {
            return Err(protocol(format!("{} without a question", msg.name())));
        };
        match msg {
            Msg::Data {
                ticket,
                pages,
                page_bytes: theirs,
            } if ticket == chunk.ticket => {
                if pages as usize != chunk.pages.len() || theirs != page_bytes as u64 {
                    return Err(protocol(format!(
                        "{pages} pages of {theirs} bytes came, {} of {page_bytes} were asked for",
                        chunk.pages.len()
                    )));
                }
                Ok(Reading::Pages { done: 0 })
            }
            Msg::Stale {
                ticket,
                page,
                code: Some(code),
            } if ticket == chunk.ticket => {
                let why = format!("the prefill node leases page {page} to this node no more");
                self.answered(Err(PullError::Failed(code, why)));
                Ok(Reading::head())
            }
            Msg::Stale { ticket, page, .. }
            | Msg::DataEnd {
                ticket,
                stale: Some(page),
            } if ticket == chunk.ticket => {
                let why = format!("page {page} of the prefill node was given to another request");
                self.answered(Err(PullError::Failed(Code::StalePage, why)));
                Ok(Reading::head())
            }
            Msg::DataEnd {
                ticket,
                stale: None,
            } if ticket == chunk.ticket => {
                let checked = self.check_oldest();
                self.answered(checked);
                Ok(Reading::head())
            }
            other => Err(protocol(format!(
                "{} does not answer the oldest question",
                other.name()
            ))),
        }
    }

    /// The oldest question's pages are here: are they what was announced? Those of a device go there now, unless their pull is over.
    fn check_oldest(&mut self) -> Result<(), PullError> {
        let Some(chunk) = self.waiting.front_mut() else {
            return Ok(());
        };
        if !self.jobs.contains_key(&chunk.job) {
            return Ok(());
        }
        let context = &self.context;
        match context.pool.device() {
            Some(device) => land_on(
                device.as_ref(),
                &mut chunk.staged,
                &chunk.pages,
                self.sums,
                &context.faults,
            ),
            None => chunk
                .pages
                .iter()
                .zip(&chunk.sums)
                .try_for_each(|(page, &sum)| check_sum(page.src, sum)),
        }
    }

    /// The oldest question is answered; its pull ends with its last one or with an error.
    fn answered(&mut self, result: Result<(), PullError>) {
        let Some(chunk) = self.waiting.pop_front() else {
            return;
        };
        self.waiting_bytes -= chunk.pages.len() * self.context.pool.page_bytes();
        let Some(job) = self.jobs.get_mut(&chunk.job) else {
            return;
        };
        if result.is_err() {
            self.todo.retain(|later| later.job != chunk.job);
            return self.end(chunk.job, result);
        }
        job.pages_left -= chunk.pages.len();
        job.bytes += (chunk.pages.len() * self.context.pool.page_bytes()) as u64;
        if job.pages_left == 0 {
            self.end(chunk.job, Ok(()));
        }
    }

    /// From here on no page of this pull is written.
    fn end(&mut self, id: u64, result: Result<(), PullError>) {
        if let Some(job) = self.jobs.remove(&id) {
            (self.context.report)(PullEnd {
                id,
                bytes: job.bytes,
                result,
            });
        }
    }
}

/// Says nothing but that the stream is in use: rooms and load are for the control connection.
fn stream_beat() -> Msg {
    Msg::Heartbeat {
        inc: String::new(),
        seq: 0,
        rooms: Vec::new(),
        pull_backlog_bytes: 0,
        progress: 0,
        busy: false,
    }
}

fn broken(err: io::Error) -> LinkError {
    LinkError::new(Code::TransportBroken, err.to_string())
}
