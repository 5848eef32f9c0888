//! Accepting peers. Connections in the middle of HELLO are bounded per source address and in all, and accepting never stops: a new
//! connection takes the place of the oldest silent one.

use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::node::context::LoopMessage;
use crate::protocol::handshake::Identity;
use crate::transport::tasks::PeerTasks;
use crate::transport::tcp;

/// Connections in the middle of HELLO: a peer needs two round trips, a silent one is closed after `HELLO_TIMEOUT`.
const HANDSHAKES: usize = 256;
const HANDSHAKES_PER_SOURCE: usize = 64;
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Runs until the listener cannot be used at all.
pub async fn accept_loop(
    listener: TcpListener,
    identity: Arc<Identity>,
    internal: mpsc::UnboundedSender<LoopMessage>,
) -> io::Error {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(err) => return err,
    };
    let mut handshakes = JoinSet::new();
    let mut by_source = PeerTasks::new(HANDSHAKES_PER_SOURCE, HANDSHAKES);
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let task = handshakes.spawn(handshake(stream, identity.clone(), internal.clone()));
                    if by_source.add(from.ip().to_canonical(), task) {
                        let _ = internal.send(LoopMessage::HelloEvicted); // the node is closing
                    }
                }
                Err(err) => {
                    tracing::warn!(%err, "accept failed"); // out of descriptors, or the peer closed at once
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            },
            Some(ended) = handshakes.join_next_with_id() => {
                by_source.ended(ended.map_or_else(|err| err.id(), |(id, ())| id));
            }
        }
    }
}

async fn handshake(
    mut stream: TcpStream,
    identity: Arc<Identity>,
    internal: mpsc::UnboundedSender<LoopMessage>,
) {
    tcp::tune(&stream);
    let message = match identity.respond(&mut stream).await {
        Ok(opened) => LoopMessage::Accepted(stream, Box::new(opened)),
        Err(err) => {
            tracing::warn!(code = %err.code, why = %err.why, "a peer's HELLO was refused");
            LoopMessage::HelloRefused(err.code)
        }
    };
    let _ = internal.send(message); // the node is closing
}
