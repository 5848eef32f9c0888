//! Events for the engine: a queue with an eventfd, and the set of live rooms.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::room_history::RoomSide;
use crate::protocol::GroupPages;
use crate::reason_code::ReasonCode;

/// Statistics of a committed room's pulls.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct PullStats {
    pub transport: &'static str,
    pub pages: u64,
    pub bytes: u64,
    /// From the first pull to the commit.
    pub pull_seconds: f64,
    /// From open() to the commit.
    pub room_seconds: f64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum NodeEvent {
    /// D: the prompt's pages are here.
    Committed {
        room: u64,
        payload: Vec<u8>,
        groups: Vec<GroupPages>,
        stats: PullStats,
    },
    /// D: the room failed; `message` is for the client.
    Failed {
        room: u64,
        code: ReasonCode,
        message: String,
    },
    /// D: the engine's abort is done.
    Aborted { room: u64 },
    /// D: P holds pages for a room without a grant, or a revocation came too late; the room
    /// continues.
    Announced { room: u64 },
    /// D: the granted pages are free again; the room continues.
    Revoked { room: u64 },
    /// `None` = DONE.
    Released { room: u64, code: Option<ReasonCode> },
}

impl NodeEvent {
    pub fn room(&self) -> u64 {
        match self {
            NodeEvent::Committed { room, .. }
            | NodeEvent::Failed { room, .. }
            | NodeEvent::Aborted { room }
            | NodeEvent::Announced { room }
            | NodeEvent::Revoked { room }
            | NodeEvent::Released { room, .. } => *room,
        }
    }

    /// True for the last event of a room.
    pub fn is_end(&self) -> bool {
        !matches!(
            self,
            NodeEvent::Announced { .. } | NodeEvent::Revoked { .. }
        )
    }

    fn side(&self) -> RoomSide {
        if matches!(self, NodeEvent::Released { .. }) {
            RoomSide::Prefill
        } else {
            RoomSide::Decode
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum ClaimError {
    Live,
    Full(usize),
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<NodeEvent>,
    live: HashSet<(RoomSide, u64)>,
}

/// Bounded: each live room puts in one end, one `Announced` and an answer to each revocation, and
/// `claim_room` limits live rooms plus undelivered events.
pub struct EventQueue {
    inner: Mutex<Inner>,
    fd: OwnedFd,
    limit: usize,
}

impl EventQueue {
    pub fn new(limit: usize) -> std::io::Result<Self> {
        Ok(Self {
            inner: Mutex::default(),
            fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            limit,
        })
    }

    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Reserve a room number and space for its events.
    pub fn claim_room(&self, side: RoomSide, room: u64) -> Result<(), ClaimError> {
        let mut inner = self.inner.lock();
        let used = inner.live.len() + inner.queue.len();
        if inner.live.contains(&(side, room)) {
            return Err(ClaimError::Live);
        }
        if used >= self.limit {
            return Err(ClaimError::Full(used));
        }
        inner.live.insert((side, room));
        Ok(())
    }

    /// Release a claim whose room was not started.
    pub fn release_claim(&self, side: RoomSide, room: u64) {
        self.inner.lock().live.remove(&(side, room));
    }

    pub fn live_rooms(&self) -> Vec<(RoomSide, u64)> {
        self.inner.lock().live.iter().copied().collect()
    }

    /// Queue an event. False if its room was not live: a second end of the same room is dropped.
    pub fn push_event(&self, event: NodeEvent) -> bool {
        let mut inner = self.inner.lock();
        let room = (event.side(), event.room());
        let is_live = if event.is_end() {
            inner.live.remove(&room)
        } else {
            inner.live.contains(&room)
        };
        if !is_live {
            return false;
        }
        inner.queue.push_back(event);
        self.wake_reader();
        true
    }

    /// Make the descriptor readable until the next `take_events`.
    pub fn wake_reader(&self) {
        // The counter cannot overflow: it is about the queue's length.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Up to `max` events; the eventfd stays readable as long as any are left.
    pub fn take_events(&self, max: usize) -> Vec<NodeEvent> {
        let mut inner = self.inner.lock();
        let n = max.min(inner.queue.len());
        let events = inner.queue.drain(..n).collect();
        if inner.queue.is_empty() {
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]); // EAGAIN when it was clear
        }
        events
    }

    /// Wait until there is an event; false after `timeout`.
    pub fn wait_for_event(&self, timeout: Duration) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        matches!(poll(&mut fds, Some(&timeout)), Ok(n) if n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_on_a_room_does_not_end_it() {
        let events = EventQueue::new(1).expect("eventfd");
        assert!(
            !events.push_event(NodeEvent::Announced { room: 1 }),
            "unknown"
        );
        events
            .claim_room(RoomSide::Decode, 1)
            .expect("room for one");
        assert!(events.push_event(NodeEvent::Announced { room: 1 }));
        assert!(events.push_event(NodeEvent::Revoked { room: 1 }));
        assert!(events.push_event(NodeEvent::Aborted { room: 1 }));
        assert!(!events.push_event(NodeEvent::Revoked { room: 1 }), "over");
        assert_eq!(events.take_events(9).len(), 3);
    }

    #[test]
    fn eventfd_is_readable_exactly_while_events_wait() {
        let events = EventQueue::new(3).expect("eventfd");
        let ready = || events.wait_for_event(Duration::ZERO);
        for room in 1..=3 {
            events
                .claim_room(RoomSide::Decode, room)
                .expect("room for three");
        }
        assert_eq!(
            events.claim_room(RoomSide::Decode, 1),
            Err(ClaimError::Live)
        );
        assert_eq!(
            events.claim_room(RoomSide::Decode, 4),
            Err(ClaimError::Full(3))
        );
        assert!(!ready());
        assert!(events.push_event(NodeEvent::Aborted { room: 1 }));
        assert!(
            !events.push_event(NodeEvent::Aborted { room: 1 }),
            "one end per room"
        );
        assert!(events.push_event(NodeEvent::Aborted { room: 2 }));
        assert_eq!(
            events.claim_room(RoomSide::Decode, 4),
            Err(ClaimError::Full(3)),
            "undelivered ends count"
        );
        assert_eq!(events.take_events(1).len(), 1);
        assert!(ready(), "one is left");
        assert_eq!(events.take_events(9), vec![NodeEvent::Aborted { room: 2 }]);
        assert!(!ready());
        events
            .claim_room(RoomSide::Decode, 1)
            .expect("the number may be used again");
    }
}
