//! P's records of rooms it does not have: OPENs that arrived before the prefill request, and ended
//! rooms.
//!
//! Both tables are bounded and every entry has an end. A pending OPEN is answered by the offer, by
//! an abort or by its TTL. A finished room's number is kept for a while, so that a late OPEN is
//! refused at once instead of waiting until its TTL.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::ConnectionId;
use crate::protocol::GroupStart;
use crate::reason_code::ReasonCode;

/// An OPEN that waits for its offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PendingOpen {
    pub peer: ConnectionId,
    pub attempt: u32,
    pub prompt_hash: Vec<u8>,
    pub groups: Vec<GroupStart>,
    pub until: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub enum PendingOpenError {
    Full,
    /// This peer has reached its limit.
    PeerFull,
    /// Another OPEN of this room is pending already.
    Duplicate,
}

#[derive(Debug, Default)]
pub struct PendingOpens {
    limit: usize,
    per_peer: usize,
    by_peer: HashMap<ConnectionId, usize>,
    rooms: HashMap<u64, PendingOpen>,
    due: BTreeSet<(u64, u64)>, // (until, room)
}

impl PendingOpens {
    /// At most `limit` OPENs, `per_peer` of them of one peer.
    pub fn new(limit: usize, per_peer: usize) -> Self {
        Self {
            limit,
            per_peer,
            ..Self::default()
        }
    }

    pub fn len(&self) -> usize {
        self.rooms.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rooms.is_empty()
    }

    /// Keep an OPEN until its room is offered. The same peer asking again is not an error.
    pub fn add(&mut self, room: u64, open: PendingOpen) -> Result<(), PendingOpenError> {
        match self.rooms.get(&room) {
            Some(pending) if pending.peer == open.peer && pending.attempt == open.attempt => {
                return Ok(());
            }
            Some(_) => return Err(PendingOpenError::Duplicate),
            None if self.rooms.len() >= self.limit => return Err(PendingOpenError::Full),
            None => {}
        }
        let of_peer = self.by_peer.entry(open.peer).or_default();
        if *of_peer >= self.per_peer {
            return Err(PendingOpenError::PeerFull);
        }
        *of_peer += 1;
        self.due.insert((open.until, room));
        self.rooms.insert(room, open);
        Ok(())
    }

    pub fn take_open(&mut self, room: u64) -> Option<PendingOpen> {
        let open = self.rooms.remove(&room)?;
        if let Some(of_peer) = self.by_peer.get_mut(&open.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.by_peer.remove(&open.peer);
            }
        }
        self.due.remove(&(open.until, room));
        Some(open)
    }

    /// Remove the pending OPEN of `room`, if it is this peer's.
    pub fn take_of(&mut self, peer: ConnectionId, room: u64) -> Option<PendingOpen> {
        self.rooms.get(&room).filter(|open| open.peer == peer)?;
        self.take_open(room)
    }

    /// Remove the pending OPENs of a lost peer.
    pub fn drop_peer(&mut self, peer: ConnectionId) {
        let rooms: Vec<u64> = self.rooms.keys().copied().collect();
        for room in rooms {
            self.take_of(peer, room);
        }
    }

    pub fn next_due(&self) -> Option<u64> {
        self.due.first().map(|&(until, _)| until)
    }

    /// Remove and return the OPENs whose TTL is over.
    pub fn take_expired(&mut self, now: u64) -> Vec<(u64, PendingOpen)> {
        let due: Vec<u64> = self
            .due
            .range(..=(now, u64::MAX))
            .map(|&(_, room)| room)
            .collect();
        due.into_iter()
            .filter_map(|room| self.take_open(room).map(|open| (room, open)))
            .collect()
    }
}

/// Rooms that are over, newest last; at most `limit`.
#[derive(Debug)]
pub struct EndedRooms {
    limit: usize,
    rooms: HashMap<u64, EndedRoom>,
    order: VecDeque<(u64, u64)>, // (serial, room)
    serial: u64,
}

#[derive(Debug)]
struct EndedRoom {
    code: ReasonCode,
    attempt: u32,
    serial: u64,
}

/// Attempt number of a room that was aborted before any attempt was known: all attempts are over.
pub const EVERY_ATTEMPT: u32 = u32::MAX;

impl EndedRooms {
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            rooms: HashMap::new(),
            order: VecDeque::new(),
            serial: 0,
        }
    }

    pub fn add(&mut self, room: u64, attempt: u32, code: ReasonCode) {
        self.serial += 1;
        let serial = self.serial;
        self.rooms.insert(
            room,
            EndedRoom {
                code,
                attempt,
                serial,
            },
        );
        self.order.push_back((serial, room));
        while self.order.len() > self.limit {
            let Some((serial, room)) = self.order.pop_front() else {
                return;
            };
            if self
                .rooms
                .get(&room)
                .is_some_and(|ended| ended.serial == serial)
            {
                self.rooms.remove(&room);
            }
        }
    }

    /// Reason for which this attempt of the room ended; a later one may still come.
    pub fn get(&self, room: u64, attempt: u32) -> Option<ReasonCode> {
        let ended = self.rooms.get(&room)?;
        (attempt <= ended.attempt).then_some(ended.code)
    }

    /// Remove an ended room whose number the engine uses again.
    pub fn forget_room(&mut self, room: u64) {
        self.rooms.remove(&room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(peer: ConnectionId, until: u64) -> PendingOpen {
        PendingOpen {
            peer,
            attempt: 0,
            prompt_hash: vec![],
            groups: vec![],
            until,
        }
    }

    #[test]
    fn pending_opens_are_bounded_and_expire() {
        let mut pending_opens = PendingOpens::new(2, 2);
        assert_eq!(pending_opens.add(1, open(9, 50)), Ok(()));
        assert_eq!(
            pending_opens.add(1, open(9, 60)),
            Ok(()),
            "the same OPEN twice"
        );
        assert_eq!(
            pending_opens.add(1, open(8, 60)),
            Err(PendingOpenError::Duplicate)
        );
        assert_eq!(pending_opens.add(2, open(9, 40)), Ok(()));
        assert_eq!(
            pending_opens.add(3, open(9, 40)),
            Err(PendingOpenError::Full)
        );
        assert_eq!(pending_opens.next_due(), Some(40));
        assert_eq!(pending_opens.take_expired(39), vec![]);
        assert_eq!(pending_opens.take_expired(40), vec![(2, open(9, 40))]);
        pending_opens.drop_peer(7);
        assert_eq!(pending_opens.len(), 1);
        assert_eq!(pending_opens.take_of(7, 1), None, "another peer's");
        assert_eq!(pending_opens.len(), 1);
        pending_opens.drop_peer(9);
        assert!(pending_opens.is_empty());
        assert_eq!(pending_opens.next_due(), None);
    }

    #[test]
    fn one_peer_leaves_space_for_others() {
        let mut pending_opens = PendingOpens::new(3, 2);
        assert_eq!(pending_opens.add(1, open(9, 50)), Ok(()));
        assert_eq!(pending_opens.add(2, open(9, 50)), Ok(()));
        assert_eq!(
            pending_opens.add(3, open(9, 50)),
            Err(PendingOpenError::PeerFull)
        );
        assert_eq!(pending_opens.add(3, open(8, 50)), Ok(()));
        pending_opens.take_open(1);
        assert_eq!(pending_opens.add(4, open(9, 50)), Ok(()));
        pending_opens.drop_peer(9);
        pending_opens.drop_peer(8);
        assert!(pending_opens.by_peer.is_empty());
    }

    #[test]
    fn ended_rooms_are_bounded_and_a_reused_number_keeps_its_newer_end() {
        let mut ended = EndedRooms::new(2);
        ended.add(1, 0, ReasonCode::ClientGone);
        ended.forget_room(1);
        assert_eq!(ended.get(1, 0), None);
        ended.add(1, 3, ReasonCode::LeaseExpired);
        // pushes out the first entry of room 1, not its second
        ended.add(2, 0, ReasonCode::ClientGone);
        assert_eq!(ended.get(1, 3), Some(ReasonCode::LeaseExpired));
        assert_eq!(ended.get(1, 4), None, "a later attempt");
        ended.add(3, EVERY_ATTEMPT, ReasonCode::ClientGone);
        assert_eq!(ended.get(1, 0), None);
        assert_eq!(ended.get(3, 9), Some(ReasonCode::ClientGone));
    }
}
