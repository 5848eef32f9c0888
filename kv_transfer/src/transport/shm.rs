//! Handing a pool to a peer on the same host: its fd, over an abstract unix socket, to whoever is the same user and knows the token
//! that HELLO carried over the control connection. The kernel's seals keep the receiver from writing. Behind the fd comes the handle
//! of the pages, if they are on a device (which nobody seals: we only ever read through it).

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{
    SocketAddr, UnixListener as StdUnixListener, UnixStream as StdUnixStream,
};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType, connect,
    recvmsg, sendmsg, socket, sockopt,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use crate::pool::device::DevicePages;
use crate::pool::{KvPool, RemoteData, RemotePool};

pub const TOKEN_BYTES: usize = 16;
/// Longest wait for a peer on the same host, in each step.
const STEP: Duration = Duration::from_secs(1);
/// Longest handle of pages on a device.
const MAX_HANDLE_BYTES: usize = 4096;

/// Identity of the running kernel: equal only on one host (and shared by its containers).
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

/// An abstract socket; it vanishes with the process.
pub fn listen(name: &str) -> io::Result<StdUnixListener> {
    let listener = StdUnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serve fds until the listener fails. Every exchange is bounded in time; a stranger gets nothing. `handle`: of the pages on a device.
pub async fn serve(
    listener: StdUnixListener,
    pool: Arc<KvPool>,
    token: [u8; TOKEN_BYTES],
    handle: Vec<u8>,
) -> io::Error {
    let listener = match UnixListener::from_std(listener) {
        Ok(listener) => listener,
        Err(err) => return err,
    };
    let fd = Arc::new(match read_only_fd(&pool) {
        Ok(fd) => fd,
        Err(err) => return err,
    });
    let handle: Arc<[u8]> = handle.into();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(err) => return err,
        };
        let (fd, handle) = (fd.clone(), handle.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(STEP, hand_over(stream, &fd, &token, &handle)).await {
                Ok(Ok(())) => {}
                Ok(Err(err)) => {
                    tracing::warn!(%err, "a peer asked for the KV pool and was refused")
                }
                Err(_) => tracing::warn!("a peer asked for the KV pool and then said nothing"),
            }
        });
    }
}

/// A description that can only read: the seals already forbid writing, this says it twice.
fn read_only_fd(pool: &KvPool) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", pool.fd().as_raw_fd());
    match rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(fd) => Ok(fd),
        Err(_) => pool.fd().try_clone_to_owned(), // no /proc here
    }
}

async fn hand_over(
    mut stream: UnixStream,
    fd: &OwnedFd,
    token: &[u8; TOKEN_BYTES],
    handle: &[u8],
) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    if peer.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("it runs as uid {}", peer.uid()),
        ));
    }
    let mut theirs = [0; TOKEN_BYTES];
    stream.read_exact(&mut theirs).await?;
    if !same_token(&theirs, token) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "its token is wrong",
        ));
    }
    stream.writable().await?;
    stream.try_io(tokio::io::Interest::WRITABLE, || {
        send_fd(stream.as_fd(), fd.as_fd())
    })?;
    stream.write_all(handle).await
}

/// Takes the same time wherever the difference is.
fn same_token(a: &[u8; TOKEN_BYTES], b: &[u8; TOKEN_BYTES]) -> bool {
    a.iter().zip(b).fold(0, |differ, (x, y)| differ | (x ^ y)) == 0
}

fn send_fd(socket: BorrowedFd<'_>, fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    if !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for the control message"));
    }
    sendmsg(
        socket,
        &[IoSlice::new(b"K")],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Fetch and map a peer's pool; `device` opens its pages, if they are on one. Blocks for at most a few `STEP`s, and as long as the device
/// takes: call it off the control thread.
pub fn fetch(
    name: &str,
    token: &[u8],
    num_pages: usize,
    page_bytes: usize,
    device: Option<&dyn DevicePages>,
) -> io::Result<RemotePool> {
    let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(STEP))?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(STEP))?;
    connect(
        &socket,
        &SocketAddrUnix::new_abstract_name(name.as_bytes())?,
    )?;
    let mut stream = StdUnixStream::from(socket);
    io::Write::write_all(&mut stream, token)?;
    let fd = receive_fd(stream.as_fd())?;
    let mut handle = Vec::new();
    stream
        .take(MAX_HANDLE_BYTES as u64)
        .read_to_end(&mut handle)?;
    let data = match device {
        None => RemoteData::Mapped,
        Some(device) => {
            RemoteData::Device(device.open(&handle, num_pages).map_err(io::Error::other)?)
        }
    };
    RemotePool::map(fd, num_pages, page_bytes, data).map_err(io::Error::other)
}

fn receive_fd(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0u8; 1];
    let got = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    if got.bytes == 0 || got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "the peer did not hand over its pool",
        ));
    }
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer's answer carries no fd",
            )
        })
}
