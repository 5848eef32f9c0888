//! Control frames queued for one peer. Bounded in bytes by back-pressure: above the limit the
//! peer's own frames stay unread, so that a peer that asks faster than it reads waits for itself.
//! Only answers to frames read before, and frames that the rooms of this node produce by
//! themselves, come on top; a peer is disconnected when `CUT` times the limit is queued for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, mpsc};

use crate::protocol::Msg;

/// A peer is disconnected when this many times the limit is queued for it.
const CUT: usize = 16;
/// Bytes of a frame without its lists.
const FRAME_BYTES: usize = 256;

/// Message to send; `flip` damages the frame (fault injection).
pub struct OutgoingMessage {
    pub msg: Msg,
    pub flip: bool,
}

/// Queued bytes, shared by the sender, the writing task and the reading task.
#[derive(Debug)]
pub struct Backlog {
    bytes: AtomicUsize,
    limit: usize,
    shrunk: Notify,
}

impl Backlog {
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn is_full(&self) -> bool {
        self.bytes() >= self.limit
    }

    /// Wait until less than the limit is queued. One task at a time.
    pub async fn below_limit(&self) {
        while self.is_full() {
            self.shrunk.notified().await;
        }
    }

    /// Subtract a written frame.
    pub fn subtract_written(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if !self.is_full() {
            self.shrunk.notify_one();
        }
    }
}

#[derive(Clone)]
pub struct Outbox {
    frames: mpsc::UnboundedSender<OutgoingMessage>,
    pub backlog: Arc<Backlog>,
}

impl Outbox {
    pub fn new(limit: usize) -> (Self, mpsc::UnboundedReceiver<OutgoingMessage>) {
        let (frames, inbox) = mpsc::unbounded_channel();
        let backlog = Arc::new(Backlog {
            bytes: AtomicUsize::new(0),
            limit,
            shrunk: Notify::new(),
        });
        (Self { frames, backlog }, inbox)
    }

    /// False: the connection is closing, or the peer must be disconnected.
    pub fn put(&self, out: OutgoingMessage) -> bool {
        let before = self.backlog.bytes.fetch_add(out.bytes(), Ordering::Relaxed);
        before < CUT * self.backlog.limit && self.frames.send(out).is_ok()
    }
}

impl OutgoingMessage {
    /// Approximate size of the frame on the wire.
    pub fn bytes(&self) -> usize {
        FRAME_BYTES
            + match &self.msg {
                Msg::Progress { ids, .. } => 24 * ids.len(),
                Msg::Final { payload, .. } => payload.len(),
                Msg::Heartbeat { rooms, .. } => 9 * rooms.len(),
                _ => 0,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(payload: usize) -> OutgoingMessage {
        let msg = Msg::Final {
            room: 1,
            attempt: 0,
            groups: vec![],
            payload: vec![0; payload],
        };
        OutgoingMessage { msg, flip: false }
    }

    #[tokio::test]
    async fn full_outbox_takes_more_holds_the_reader_back_and_frees_it_when_written() {
        let (outbox, mut inbox) = Outbox::new(1000);
        for _ in 0..3 {
            assert!(outbox.put(frame(500)));
        }
        let backlog = outbox.backlog.clone();
        assert!(backlog.is_full());
        assert_eq!(backlog.bytes(), 3 * frame(500).bytes());
        let reader = tokio::spawn(async move { backlog.below_limit().await });
        while let Ok(out) = inbox.try_recv() {
            tokio::task::yield_now().await;
            outbox.backlog.subtract_written(out.bytes());
        }
        reader.await.expect("it was freed");
        assert!(!outbox.backlog.is_full());
    }

    #[test]
    fn peer_that_reads_nothing_is_cut_in_the_end() {
        let (outbox, _inbox) = Outbox::new(1000);
        let taken = (0..1000).take_while(|_| outbox.put(frame(500))).count();
        assert_eq!(taken, (CUT * 1000).div_ceil(756));
    }
}
