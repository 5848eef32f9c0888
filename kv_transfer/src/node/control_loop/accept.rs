//! Accepting peers. Connections in the middle of HELLO are bounded per source address and in all,
//! and accepting never stops: a new connection takes the place of the oldest silent one.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::node::context::LoopMessage;
use crate::protocol::handshake::Identity;
use crate::transport::tasks::{PeerTasks, accept_all};
use crate::transport::tcp;

/// Connections in the middle of HELLO: a peer needs two round trips, a silent one is closed after
/// `HELLO_TIMEOUT`.
const HANDSHAKES: usize = 512;
const HANDSHAKES_PER_SOURCE: usize = 128;

/// Runs until the listener cannot be used at all.
pub async fn accept_loop(
    listener: TcpListener,
    identity: Arc<Identity>,
    internal: mpsc::UnboundedSender<LoopMessage>,
) -> io::Error {
    let by_source = PeerTasks::new(HANDSHAKES_PER_SOURCE, HANDSHAKES);
    let serve = |stream| shake_hands(stream, identity.clone(), internal.clone());
    // an error: the node is closing
    let evicted = || drop(internal.send(LoopMessage::HelloEvicted));
    accept_all(listener, by_source, serve, evicted).await
}

async fn shake_hands(
    mut stream: TcpStream,
    identity: Arc<Identity>,
    internal: mpsc::UnboundedSender<LoopMessage>,
) {
    tcp::set_stream_options(&stream);
    let from = stream.peer_addr().map(|addr| addr.ip().to_canonical()).ok();
    let message = match identity.accept_connection(&mut stream).await {
        Ok(opened) => LoopMessage::Accepted(stream, Box::new(opened)),
        Err(err) => LoopMessage::HelloRefused { from, err },
    };
    let _ = internal.send(message); // the node is closing
}
