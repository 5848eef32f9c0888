//! Socket options: answers leave at once, and a peer that vanished without a word is noticed by the
//! kernel.
//!
//! A process that dies closes its sockets; a machine or a network that dies does not. Keep-alive
//! finds that out within half a minute without mistaking a busy process for a dead one, since the
//! peer's kernel answers.

use std::io;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpStream};

const IDLE: Duration = Duration::from_secs(15);
const INTERVAL: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;
/// Connections that wait to be accepted, if the kernel's limit (net.core.somaxconn) is not less;
/// tokio asks for 128. A client that finds the queue full tries again after a second.
const BACKLOG: i32 = 4096;

/// A listener for clients: its queue holds a burst of new connections.
pub fn tune_listener(listener: &TcpListener) -> io::Result<()> {
    SockRef::from(listener).listen(BACKLOG)
}

/// A connection to a worker.
pub fn tune_upstream(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let probing = TcpKeepalive::new()
        .with_time(IDLE)
        .with_interval(INTERVAL)
        .with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&probing)
}

/// A connection from a client. One that takes no byte of its answer for `stall` is cut by the
/// kernel.
pub fn tune_client(stream: &TcpStream, stall: Duration) -> io::Result<()> {
    tune_upstream(stream)?;
    #[cfg(target_os = "linux")]
    SockRef::from(stream).set_tcp_user_timeout(Some(stall))?;
    #[cfg(not(target_os = "linux"))]
    let _ = stall; // no such option there
    Ok(())
}
