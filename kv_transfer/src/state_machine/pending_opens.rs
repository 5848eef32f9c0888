//! What P remembers about rooms it does not have: OPENs that came before the prefill request, and rooms that are over.
//!
//! Both tables are bounded and every entry has an end. A parked OPEN is answered by the offer, by an abort or by its TTL. A
//! finished room's number is kept for a while, so that a late OPEN is refused at once instead of being parked until its TTL.

use std::collections::{HashMap, VecDeque};

use super::Peer;
use crate::reason_code::Code;

/// An OPEN that waits for its offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedOpen {
    pub peer: Peer,
    pub attempt: u32,
    pub prompt_hash: Vec<u8>,
    pub start_page: u32,
    pub until: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub enum ParkError {
    Full,
    /// This peer has as many as one may have.
    PeerFull,
    /// Another OPEN of this room is parked already.
    Duplicate,
}

#[derive(Debug)]
pub struct Parked {
    limit: usize,
    per_peer: usize,
    by_peer: HashMap<Peer, usize>,
    rooms: HashMap<u64, ParkedOpen>,
    order: VecDeque<(u64, u64)>, // (until, room), oldest first; TTLs differ little, so expiry scans from the front
}

impl Parked {
    /// At most `limit` OPENs, `per_peer` of them of one peer.
    pub fn new(limit: usize, per_peer: usize) -> Self {
        Self {
            limit,
            per_peer,
            by_peer: HashMap::new(),
            rooms: HashMap::new(),
            order: VecDeque::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.rooms.len()
    }

    pub fn is_empty(&self) -> bool {
        self.rooms.is_empty()
    }

    /// Keep an OPEN until its room is offered. The same peer asking again is not an error.
    pub fn park(&mut self, room: u64, open: ParkedOpen) -> Result<(), ParkError> {
        match self.rooms.get(&room) {
            Some(known) if known.peer == open.peer && known.attempt == open.attempt => {
                return Ok(());
            }
            Some(_) => return Err(ParkError::Duplicate),
            None if self.rooms.len() >= self.limit => return Err(ParkError::Full),
            None => {}
        }
        let of_peer = self.by_peer.entry(open.peer).or_default();
        if *of_peer >= self.per_peer {
            return Err(ParkError::PeerFull);
        }
        *of_peer += 1;
        self.order.push_back((open.until, room));
        self.rooms.insert(room, open);
        Ok(())
    }

    pub fn take(&mut self, room: u64) -> Option<ParkedOpen> {
        let open = self.rooms.remove(&room)?;
        if let Some(of_peer) = self.by_peer.get_mut(&open.peer) {
            *of_peer -= 1;
            if *of_peer == 0 {
                self.by_peer.remove(&open.peer);
            }
        }
        self.order.retain(|&(_, r)| r != room);
        Some(open)
    }

    /// Forget what a lost peer, or one that gave up, had parked.
    pub fn drop_peer(&mut self, peer: Peer, room: Option<u64>) {
        let gone: Vec<u64> = self
            .rooms
            .iter()
            .filter(|(r, open)| open.peer == peer && room.is_none_or(|only| only == **r))
            .map(|(r, _)| *r)
            .collect();
        for room in gone {
            self.take(room);
        }
    }

    pub fn next_due(&self) -> Option<u64> {
        self.order.iter().map(|&(until, _)| until).min()
    }

    /// Remove and return the OPENs whose TTL is over.
    pub fn expire(&mut self, now: u64) -> Vec<(u64, ParkedOpen)> {
        let due: Vec<u64> = self
            .order
            .iter()
            .filter(|&&(until, _)| until <= now)
            .map(|&(_, room)| room)
            .collect();
        due.into_iter()
            .filter_map(|room| self.take(room).map(|open| (room, open)))
            .collect()
    }
}

/// Rooms that are over, newest last; at most `limit`.
#[derive(Debug)]
pub struct Tombstones {
    limit: usize,
    rooms: HashMap<u64, Tombstone>,
    order: VecDeque<(u64, u64)>, // (serial, room)
    serial: u64,
}

#[derive(Debug)]
struct Tombstone {
    code: Code,
    attempt: u32,
    serial: u64,
}

/// Attempt of a room that is given up before any attempt of it was known: all of them are over.
pub const EVERY_ATTEMPT: u32 = u32::MAX;

impl Tombstones {
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            rooms: HashMap::new(),
            order: VecDeque::new(),
            serial: 0,
        }
    }

    pub fn bury(&mut self, room: u64, attempt: u32, code: Code) {
        self.serial += 1;
        let serial = self.serial;
        self.rooms.insert(
            room,
            Tombstone {
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
                .is_some_and(|stone| stone.serial == serial)
            {
                self.rooms.remove(&room);
            }
        }
    }

    /// How this attempt of the room ended; a later one may still come.
    pub fn get(&self, room: u64, attempt: u32) -> Option<Code> {
        let stone = self.rooms.get(&room)?;
        (attempt <= stone.attempt).then_some(stone.code)
    }

    /// The number is used again on purpose.
    pub fn revive(&mut self, room: u64) {
        self.rooms.remove(&room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(peer: Peer, until: u64) -> ParkedOpen {
        ParkedOpen {
            peer,
            attempt: 0,
            prompt_hash: vec![],
            start_page: 0,
            until,
        }
    }

    #[test]
    fn parked_opens_are_bounded_and_expire() {
        let mut parked = Parked::new(2, 2);
        assert_eq!(parked.park(1, open(9, 50)), Ok(()));
        assert_eq!(parked.park(1, open(9, 60)), Ok(()), "the same OPEN twice");
        assert_eq!(parked.park(1, open(8, 60)), Err(ParkError::Duplicate));
        assert_eq!(parked.park(2, open(9, 40)), Ok(()));
        assert_eq!(parked.park(3, open(9, 40)), Err(ParkError::Full));
        assert_eq!(parked.next_due(), Some(40));
        assert_eq!(parked.expire(39), vec![]);
        assert_eq!(parked.expire(40), vec![(2, open(9, 40))]);
        parked.drop_peer(7, None);
        assert_eq!(parked.len(), 1);
        parked.drop_peer(9, Some(2));
        assert_eq!(parked.len(), 1);
        parked.drop_peer(9, None);
        assert!(parked.is_empty());
        assert_eq!(parked.next_due(), None);
    }

    #[test]
    fn one_peer_leaves_space_for_others() {
        let mut parked = Parked::new(3, 2);
        assert_eq!(parked.park(1, open(9, 50)), Ok(()));
        assert_eq!(parked.park(2, open(9, 50)), Ok(()));
        assert_eq!(parked.park(3, open(9, 50)), Err(ParkError::PeerFull));
        assert_eq!(parked.park(3, open(8, 50)), Ok(()));
        parked.take(1);
        assert_eq!(parked.park(4, open(9, 50)), Ok(()));
        parked.drop_peer(9, None);
        parked.drop_peer(8, None);
        assert!(parked.by_peer.is_empty());
    }

    #[test]
    fn tombstones_are_bounded_and_a_revived_room_keeps_its_newer_stone() {
        let mut stones = Tombstones::new(2);
        stones.bury(1, 0, Code::ClientGone);
        stones.revive(1);
        assert_eq!(stones.get(1, 0), None);
        stones.bury(1, 3, Code::LeaseExpired);
        stones.bury(2, 0, Code::ClientGone); // pushes out the first entry of room 1, not its second
        assert_eq!(stones.get(1, 3), Some(Code::LeaseExpired));
        assert_eq!(stones.get(1, 4), None, "a later attempt");
        stones.bury(3, EVERY_ATTEMPT, Code::ClientGone);
        assert_eq!(stones.get(1, 0), None);
        assert_eq!(stones.get(3, 9), Some(Code::ClientGone));
    }
}
