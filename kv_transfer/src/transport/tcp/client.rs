//! D: one data stream to a prefill rank, and the pulls that go over it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{
    ClientCommand, DataContext, DividedPull, PullPart, STALL, check_len, pages_per_read,
    set_stream_options, unless_blocked,
};
use crate::pool::SumKind;
use crate::protocol::handshake::{ConnectionError, OpenedConnection};
use crate::protocol::{Channel, FrameOpener, FrameSealer, GroupId, HEADER_BYTES, Msg, frame_len};
use crate::reason_code::ReasonCode;
use crate::state_machine::PullError;
use crate::state_machine::decode::PullPage;
use crate::transport::checksum_copy;
use crate::transport::copy_threads::{check_sums, corrupt_for_test, scatter_to_device};

/// Bytes requested and not yet received, per stream: several answers of `READ_BYTES`, so that P
/// never waits for the next READ.
const WINDOW_BYTES: usize = 8 << 20;
/// Interval of D's heartbeats on a stream; P waits several times as long (`data_idle_ms`).
const BEAT: Duration = Duration::from_secs(15);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes moved per visit of a stream, so that several streams share the thread.
const VISIT_BYTES: usize = 4 << 20;
const SCRATCH_BYTES: usize = 256 << 10;

pub(super) async fn serve_pulls(
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
    let result = match connect_stream(&client.context, addr, &inc).await {
        Ok((stream, opened)) => client.exchange_frames(stream, opened, &mut inbox).await,
        Err(err) => Err(err),
    };
    // No further pull can be submitted; those already in the channel are ended like the others.
    inbox.close();
    while let Some(command) = inbox.recv().await {
        if let ClientCommand::Pull(part) = command {
            client.jobs.insert(part.id, Job::new(&part));
        }
    }
    let reason = match result {
        Ok(()) => PullError::Cancelled,
        Err(err) => {
            tracing::warn!(%addr, %err, "the data stream to a prefill rank broke");
            PullError::Broken(err.to_string())
        }
    };
    for id in client.jobs.keys().copied().collect::<Vec<_>>() {
        client.end_part(id, Err(reason.clone()));
    }
}

async fn connect_stream(
    context: &DataContext,
    addr: SocketAddr,
    inc: &str,
) -> Result<(TcpStream, OpenedConnection), ConnectionError> {
    let unreachable = |reason: String| ConnectionError::new(ReasonCode::Unreachable, reason);
    let timeout_error = |_| unreachable(format!("no connection within {CONNECT_TIMEOUT:?}"));
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(addr)).await;
    let mut stream = connected
        .map_err(timeout_error)?
        .map_err(|err| unreachable(err.to_string()))?;
    set_stream_options(&stream);
    let opened = context
        .identity
        .initiate_connection(&mut stream, Channel::Data, Some(inc))
        .await?;
    Ok((stream, opened))
}

/// Part of a pull in progress.
struct Job {
    pages_left: usize,
    bytes: u64,
    of: Arc<DividedPull>,
}

impl Job {
    fn new(part: &PullPart) -> Self {
        Self {
            pages_left: part.pages.len(),
            bytes: 0,
            of: part.of.clone(),
        }
    }
}

/// Part of a pull that one READ requests.
struct Chunk {
    job: u64,
    ticket: u64,
    group: GroupId,
    pages: Vec<PullPage>,
    sums: Vec<u64>,
    /// Bytes of the answer, staged for pages on a device.
    staged: Vec<u8>,
}

/// Position in the answer to the oldest READ.
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
    /// Kind of the peer's checksums.
    sums: SumKind,
}

impl Client {
    /// Serve pulls until the inbox closes; `Err`: why the stream broke.
    async fn exchange_frames(
        &mut self,
        stream: TcpStream,
        opened: OpenedConnection,
        inbox: &mut mpsc::UnboundedReceiver<ClientCommand>,
    ) -> Result<(), ConnectionError> {
        let OpenedConnection {
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
                    Some(ClientCommand::Pull(part)) => {
                        if self.waiting.is_empty() {
                            stalled_at = Instant::now() + STALL;
                        }
                        self.queue_part(&part);
                        Ok(false)
                    }
                    Some(ClientCommand::Cancel(id)) => {
                        self.todo.retain(|chunk| chunk.job != id);
                        self.end_part(id, Err(PullError::Cancelled));
                        Ok(false)
                    }
                    None => return Ok(()),
                },
                ready = stream.readable() => ready.map_err(broken_stream).and_then(|()| self.read_answers(&stream, &mut opener, &mut reading, &mut scratch)),
                ready = stream.writable(), if !self.out.is_empty() => ready.map_err(broken_stream).and_then(|()| self.write_frames(&stream)).map(|()| false),
                _ = beat.tick() => {
                    self.out.extend(sealer.seal(&stream_beat()));
                    Ok(false)
                }
                () = tokio::time::sleep_until(stalled_at), if !self.waiting.is_empty() => {
                    Err(ConnectionError::transport_broken(format!("no byte for {STALL:?}")))
                }
            };
            if step? {
                stalled_at = Instant::now() + STALL;
            }
        }
    }

    fn queue_part(&mut self, part: &PullPart) {
        self.jobs.insert(part.id, Job::new(part));
        if part.pages.is_empty() {
            return self.end_part(part.id, Ok(()));
        }
        for pages in part
            .pages
            .chunks(pages_per_read(self.context.pool.page_bytes()))
        {
            self.todo.push_back(Chunk {
                job: part.id,
                ticket: 0,
                group: part.group,
                pages: pages.to_vec(),
                sums: Vec::new(),
                staged: Vec::new(),
            });
        }
    }

    /// Fill the window with READs.
    fn ask_more(&mut self, sealer: &mut FrameSealer) {
        while self.waiting_bytes < WINDOW_BYTES
            && let Some(mut chunk) = self.todo.pop_front()
        {
            self.next_ticket += 1;
            chunk.ticket = self.next_ticket;
            let ids = chunk.pages.iter().map(|p| p.src.page).collect();
            let gens = chunk.pages.iter().map(|p| p.src.generation).collect();
            self.out.extend(sealer.seal(&Msg::Read {
                ticket: chunk.ticket,
                group: chunk.group,
                ids,
                gens,
            }));
            self.waiting_bytes += chunk.pages.len() * self.context.pool.page_bytes();
            self.waiting.push_back(chunk);
        }
    }

    fn write_frames(&mut self, stream: &TcpStream) -> Result<(), ConnectionError> {
        let written = unless_blocked(stream.try_write(&self.out)).map_err(broken_stream)?;
        self.out.drain(..written.unwrap_or(0));
        Ok(())
    }

    /// Read available bytes, up to `VISIT_BYTES`. True if any came.
    fn read_answers(
        &mut self,
        stream: &TcpStream,
        opener: &mut FrameOpener,
        reading: &mut Reading,
        scratch: &mut [u8],
    ) -> Result<bool, ConnectionError> {
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
            match unless_blocked(got).map_err(broken_stream)? {
                None => break,
                Some(0) => {
                    return Err(ConnectionError::peer_dead(
                        "the peer closed the data stream",
                    ));
                }
                Some(n) => {
                    visited += n;
                    self.consume_bytes(opener, reading, n)?;
                }
            }
        }
        Ok(visited > 0)
    }

    /// The next bytes of the oldest chunk: into its pages, or into the scratch buffer if its pull
    /// is over.
    fn read_pages(
        &mut self,
        stream: &TcpStream,
        done: usize,
        scratch: &mut [u8],
    ) -> io::Result<usize> {
        let Some(chunk) = self.waiting.front_mut() else {
            return Err(io::Error::other("pages without a READ"));
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
        let page = chunk.pages[done / page_bytes];
        let offset = done % page_bytes;
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
            // SAFETY: dst is a page of our pool that the engine granted to this pull, which has not
            // ended; no other thread uses it.
            check_len(unsafe { libc::readv(stream.as_raw_fd(), &iovec, 1) })
        })
    }

    /// Process `n` more bytes.
    fn consume_bytes(
        &mut self,
        opener: &mut FrameOpener,
        reading: &mut Reading,
        n: usize,
    ) -> Result<(), ConnectionError> {
        match reading {
            Reading::Head { buffer, expect } if buffer.len() < *expect => {}
            Reading::Head { buffer, expect } if *expect == HEADER_BYTES => {
                *expect += frame_len([buffer[0], buffer[1], buffer[2], buffer[3]])?;
            }
            Reading::Head { buffer, .. } => {
                let msg = opener.open(&buffer[HEADER_BYTES..])?;
                *reading = self.on_frame(msg)?;
            }
            Reading::Pages { done } => {
                let before = *done;
                let after = *done + n;
                *done = after;
                if self.page_arrived(before, after) {
                    *reading = Reading::head();
                }
            }
        }
        Ok(())
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
            // SAFETY: the page is granted to this pull, which has not ended; this thread alone uses
            // it.
            let sum = unsafe {
                if self.context.faults.flip_page() {
                    corrupt_for_test(self.sums, dst, page_bytes)
                } else {
                    checksum_copy::hash_by(self.sums, dst, page_bytes)
                }
            };
            chunk.sums.push(sum);
        }
        is_done
    }

    /// Handle a frame of the answer to the oldest READ.
    fn on_frame(&mut self, msg: Msg) -> Result<Reading, ConnectionError> {
        let page_bytes = self.context.pool.page_bytes();
        let Some(chunk) = self.waiting.front() else {
            return Err(ConnectionError::transport_broken(format!(
                "{} without a READ",
                msg.name()
            )));
        };
        match msg {
            Msg::Data {
                ticket,
                pages,
                page_bytes: theirs,
            } if ticket == chunk.ticket => {
                if pages as usize != chunk.pages.len() || theirs != page_bytes as u64 {
                    return Err(ConnectionError::transport_broken(format!(
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
                let reason = format!("the prefill node leases page {page} to this node no more");
                self.finish_read(Err(PullError::Failed(code, reason)));
                Ok(Reading::head())
            }
            Msg::Stale { ticket, page, .. }
            | Msg::DataEnd {
                ticket,
                stale: Some(page),
            } if ticket == chunk.ticket => {
                let reason =
                    format!("page {page} of the prefill node was given to another request");
                self.finish_read(Err(PullError::Failed(ReasonCode::StalePage, reason)));
                Ok(Reading::head())
            }
            Msg::DataEnd {
                ticket,
                stale: None,
            } if ticket == chunk.ticket => {
                let checked = self.check_oldest();
                self.finish_read(checked);
                Ok(Reading::head())
            }
            other => Err(ConnectionError::transport_broken(format!(
                "{} does not answer the oldest READ",
                other.name()
            ))),
        }
    }

    /// Verify the pages of the oldest READ. Pages on a device are scattered there now, unless their
    /// pull is over.
    fn check_oldest(&mut self) -> Result<(), PullError> {
        let Some(chunk) = self.waiting.front_mut() else {
            return Ok(());
        };
        if !self.jobs.contains_key(&chunk.job) {
            return Ok(());
        }
        let context = &self.context;
        match context.pool.device() {
            Some(device) => scatter_to_device(
                device.as_ref(),
                &mut chunk.staged,
                &chunk.pages,
                self.sums,
                &context.faults,
            ),
            None => check_sums(&chunk.pages, &chunk.sums),
        }
    }

    /// Remove the oldest READ; its pull ends with its last READ or with an error.
    fn finish_read(&mut self, result: Result<(), PullError>) {
        let Some(chunk) = self.waiting.pop_front() else {
            return;
        };
        self.waiting_bytes -= chunk.pages.len() * self.context.pool.page_bytes();
        let Some(job) = self.jobs.get_mut(&chunk.job) else {
            return;
        };
        if result.is_err() {
            self.todo.retain(|later| later.job != chunk.job);
            return self.end_part(chunk.job, result);
        }
        job.pages_left -= chunk.pages.len();
        job.bytes += (chunk.pages.len() * self.context.pool.page_bytes()) as u64;
        if job.pages_left == 0 {
            self.end_part(chunk.job, Ok(()));
        }
    }

    /// End a part of a pull: none of its pages is written from now on.
    fn end_part(&mut self, id: u64, result: Result<(), PullError>) {
        if let Some(job) = self.jobs.remove(&id)
            && let Some(end) = job.of.end_part(job.bytes, result)
        {
            (self.context.report)(end);
        }
    }
}

/// Heartbeat that only keeps the stream open: rooms and load are reported on the control
/// connection.
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

fn broken_stream(err: io::Error) -> ConnectionError {
    ConnectionError::transport_broken(err.to_string())
}
