//! P: serve one data stream of a decode rank, answering its READs.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{Ordering, fence};

use tokio::io::Interest;
use tokio::net::TcpStream;

use super::{DataContext, READ_BYTES, STALL, check_len, set_stream_options, unless_blocked};
use crate::pool::KvPool;
use crate::protocol::handshake::{ConnectionError, OpenedConnection, read_small_frame};
use crate::protocol::{FrameSealer, MAX_READ_FRAME_BYTES, Msg};
use crate::reason_code::ReasonCode;

/// Largest answer in bytes (at least a page): a peer of another build may request more than
/// `READ_BYTES`.
const MAX_READ_BYTES: usize = 4 * READ_BYTES;
const MAX_IOVECS: usize = 64;

pub(super) async fn serve_reads(
    context: DataContext,
    stream: std::net::TcpStream,
    opened: OpenedConnection,
) {
    let OpenedConnection {
        peer,
        mut sealer,
        mut opener,
    } = opened;
    // Closed when this returns: a peer that finds it closed finds its bad frame counted.
    let mut stream = TcpStream::from_std(stream)
        .map_err(|err| ConnectionError::transport_broken(err.to_string()));
    let serving = async {
        let stream = stream.as_mut().map_err(|err| err.clone())?;
        set_stream_options(stream);
        loop {
            let frame = read_small_frame(stream, MAX_READ_FRAME_BYTES, context.idle).await?;
            match opener.open(&frame)? {
                Msg::Heartbeat { .. } => {}
                Msg::Read {
                    ticket,
                    group,
                    ids,
                    gens,
                } => {
                    context.identity.check_group("READ", group)?;
                    if let Some(delay) = context.faults.page_delay() {
                        tokio::time::sleep(delay).await; // a test's slow link
                    }
                    let pages: Vec<_> = ids.into_iter().zip(gens).collect();
                    answer_read(&context, stream, &mut sealer, &peer.inc, ticket, &pages).await?;
                }
                other => {
                    let reason = format!("{} on a data stream", other.name());
                    return Err::<(), _>(ConnectionError::transport_broken(reason));
                }
            }
        }
    };
    if let Err(err) = serving.await {
        let is_bad = matches!(err.code, ReasonCode::Auth | ReasonCode::TransportBroken);
        context
            .bad_frames
            .fetch_add(u64::from(is_bad), Ordering::Relaxed);
        tracing::debug!(peer = %peer.addr, %err, "a data stream to a decode rank ended");
    }
}

async fn answer_read(
    context: &DataContext,
    stream: &TcpStream,
    sealer: &mut FrameSealer,
    inc: &str,
    ticket: u64,
    pages: &[(u32, u64)],
) -> Result<(), ConnectionError> {
    let pool = &context.pool;
    let bytes = pages.len() * pool.page_bytes();
    if pages.len() > 1 && bytes > MAX_READ_BYTES {
        let reason = format!("a READ of {bytes} bytes, the limit is {MAX_READ_BYTES}");
        return Err(ConnectionError::transport_broken(reason));
    }
    let refused = context.announced.first_refused(inc, pages);
    if let Some(page) = refused.or_else(|| pool.first_stale(pages)) {
        let code = refused.map(|_| ReasonCode::LeaseExpired);
        let stale = Msg::Stale { ticket, page, code };
        return Ok(write_all(stream, &sealer.seal(&stale)).await?);
    }
    let head = sealer.seal(&Msg::Data {
        ticket,
        pages: pages.len() as u32,
        page_bytes: pool.page_bytes() as u64,
    });
    let ids: Vec<u32> = pages.iter().map(|&(id, _)| id).collect();
    let staged = match pool.device() {
        None => None,
        Some(device) => {
            let mut bytes = vec![0; bytes];
            let gathered = device.gather(&ids, &mut bytes);
            gathered.map_err(|err| ConnectionError::transport_broken(err.to_string()))?;
            Some(bytes)
        }
    };
    write_all(stream, &head).await?;
    match staged {
        None => write_pages(stream, pool, &ids).await?,
        Some(bytes) => write_all(stream, &bytes).await?,
    }
    if let Some(hold) = context.faults.hold_copied() {
        hold.wait_async().await;
    }
    fence(Ordering::SeqCst); // the bytes were read before the second check
    let stale = pool.first_stale(pages);
    Ok(write_all(stream, &sealer.seal(&Msg::DataEnd { ticket, stale })).await?)
}

async fn write_all(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        within_stall(stream.writable()).await?;
        let written = unless_blocked(stream.try_write(bytes))?;
        bytes = &bytes[written.unwrap_or(0)..];
    }
    Ok(())
}

/// Fail with a timeout if a peer takes no byte for `STALL`.
async fn within_stall<T>(io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(STALL, io)
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

async fn write_pages(stream: &TcpStream, pool: &KvPool, ids: &[u32]) -> io::Result<()> {
    let page_bytes = pool.page_bytes();
    let total = ids.len() * page_bytes;
    let mut sent_bytes = 0;
    while sent_bytes < total {
        let n = within_stall(stream.async_io(Interest::WRITABLE, || {
            let mut iovecs = iovecs(ids.len(), page_bytes, sent_bytes, |i| pool.page_ptr(ids[i]));
            // SAFETY: an all-zero msghdr is a valid one without address, vectors and control data.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = iovecs.as_mut_ptr();
            message.msg_iovlen = iovecs.len() as _;
            // SAFETY: the ids are below num_pages, so every range lies in our mapping, which `pool`
            // keeps alive; the kernel only reads. The scheduler may write the pages meanwhile: the
            // second generation check, or the checksum, detects that.
            check_len(unsafe { libc::sendmsg(stream.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })
        }))
        .await?;
        sent_bytes += n;
    }
    Ok(())
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
