//! Hand-over of a pool to a peer on the same host: its fd, over an abstract unix socket, to
//! processes of the same user that know the token from HELLO. The kernel's seals keep the receiver
//! from writing. After the fd comes the handle of the pages, if they are on a device (which is not
//! sealed: peers only read through it).

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
use tokio::sync::Semaphore;

use crate::pool::device::DevicePages;
use crate::pool::{KvPool, RemoteData, RemotePool};

pub const TOKEN_BYTES: usize = 16;
/// Longest wait for a peer on the same host, in each step.
const STEP: Duration = Duration::from_secs(1);
/// Hand-overs at once; each takes one descriptor for at most `STEP`. Further peers wait in the
/// socket's backlog.
const HAND_OVERS: usize = 64;
/// Pause after a failed accept, which is out of descriptors or memory for now.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Longest handle of pages on a device.
const MAX_HANDLE_BYTES: usize = 4096;

/// Identity of the running kernel: equal only on one host (and shared by its containers).
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

/// Identity of this process's network namespace on the host. Abstract sockets are reachable within
/// one only.
pub fn network_namespace() -> String {
    std::fs::read_link("/proc/self/ns/net")
        .map(|link| link.to_string_lossy().into_owned())
        .unwrap_or_default()
}

/// An abstract socket; it vanishes with the process.
pub fn bind_socket(name: &str) -> io::Result<StdUnixListener> {
    let listener = StdUnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Hand out the pool's fd while the node lives; returns only if it cannot start. Every exchange is
/// bounded in time.
///
/// `handle`: of the pages on a device. `accept_failed` is called for each failed accept.
pub async fn serve_handles(
    listener: StdUnixListener,
    pool: Arc<KvPool>,
    token: [u8; TOKEN_BYTES],
    handle: Vec<u8>,
    accept_failed: impl Fn() + Send,
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
    let slots = Arc::new(Semaphore::new(HAND_OVERS));
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else {
            return io::Error::other("closed");
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(err) => {
                tracing::warn!(%err, "a peer on this host was not accepted");
                accept_failed();
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let fd = fd.clone();
        let handle = handle.clone();
        tokio::spawn(async move {
            match tokio::time::timeout(STEP, hand_over(stream, &fd, &token, &handle)).await {
                Ok(Ok(())) => {}
                Ok(Err(err)) => {
                    tracing::warn!(%err, "a peer asked for the KV pool and was refused")
                }
                Err(_) => tracing::warn!("a peer asked for the KV pool and sent no token"),
            }
            drop(slot);
        });
    }
}

/// Read-only file description, in addition to the seals that forbid writing.
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

/// Compare in constant time.
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

/// Fetch and map a peer's pool; `device` opens its pages, if they are on one. Blocks for at most a
/// few `STEP`s, and as long as the device takes: call it off the control thread.
pub fn fetch_pool(
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
    RemotePool::map_pool(fd, num_pages, page_bytes, data).map_err(io::Error::other)
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    #[test]
    fn listener_survives_a_lack_of_descriptors() {
        // In a process of its own: the limit is one of the process.
        let child = std::process::Command::new(std::env::current_exe().expect("a test binary"))
            .args([
                "--exact",
                "--ignored",
                "transport::shm::tests::child_without_descriptors",
            ])
            .output()
            .expect("started");
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{said}"
        );
    }

    #[test]
    #[ignore = "not a test: the process that the test above starts"]
    fn child_without_descriptors() {
        let name = format!("baton-kv-test-{}", std::process::id());
        let token = [7; TOKEN_BYTES];
        let pool = Arc::new(KvPool::create(2, 4096).expect("memfd"));
        let listener = bind_socket(&name).expect("abstract socket");
        let (failed, failures) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("runtime");
            runtime.block_on(serve_handles(listener, pool, token, vec![], move || {
                let _ = failed.send(());
            }))
        });
        fetch_pool(&name, &token, 2, 4096, None).expect("the listener works");
        let waiting = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("socket");
        let before = getrlimit(Resource::Nofile);
        let none = Rlimit {
            current: Some(0),
            ..before
        };
        setrlimit(Resource::Nofile, none).expect("lowered");
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("short");
        connect(&waiting, &address).expect("in the backlog");
        failures
            .recv_timeout(Duration::from_secs(30))
            .expect("accept fails");
        setrlimit(Resource::Nofile, before).expect("raised");
        let mut waiting = StdUnixStream::from(waiting);
        io::Write::write_all(&mut waiting, &token).expect("sent");
        receive_fd(waiting.as_fd()).expect("the peer that waited is served");
        fetch_pool(&name, &token, 2, 4096, None).expect("the listener works again");
    }
}
