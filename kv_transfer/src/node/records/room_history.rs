//! What happened to which room: a ring of transitions and the rooms that live now, for `/debug/rooms` and for leak checks.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use serde_json::json;

/// Transitions remembered over all rooms; about 100 bytes each.
const RING: usize = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Prefill,
    Decode,
}

/// A room's transition, or something else worth remembering of it.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    pub at_ms: u64,
    pub room: u64,
    pub side: Side,
    pub attempt: u32,
    pub state: &'static str,
    pub note: String,
}

#[derive(Debug, Clone, Serialize)]
struct Live {
    state: &'static str,
    attempt: u32,
    since_ms: u64,
    created_ms: u64,
}

/// Times are milliseconds since the node's start.
#[derive(Debug, Default)]
pub struct Ledger {
    ring: VecDeque<Entry>,
    live: BTreeMap<(Side, u64), Live>,
    recorded: u64,
}

impl Ledger {
    /// A room entered `entry.state`; `over` ends its life.
    pub fn enter(&mut self, entry: Entry, over: bool) {
        let key = (entry.side, entry.room);
        if over {
            self.live.remove(&key);
        } else {
            let live = self.live.entry(key).or_insert(Live {
                state: entry.state,
                attempt: entry.attempt,
                since_ms: entry.at_ms,
                created_ms: entry.at_ms,
            });
            live.state = entry.state;
            live.since_ms = entry.at_ms;
        }
        self.note(entry);
    }

    /// Something worth remembering that is no change of state.
    pub fn note(&mut self, entry: Entry) {
        if self.ring.len() == RING {
            self.ring.pop_front();
        }
        self.recorded += 1;
        self.ring.push_back(entry);
    }

    pub fn live(&self) -> usize {
        self.live.len()
    }

    pub fn live_by_state(&self) -> BTreeMap<&'static str, usize> {
        let mut states = BTreeMap::new();
        for live in self.live.values() {
            *states.entry(live.state).or_default() += 1;
        }
        states
    }

    /// One room's timeline, or all that is remembered.
    pub fn json(&self, room: Option<u64>, now_ms: u64) -> serde_json::Value {
        let wanted = |r: u64| room.is_none_or(|only| only == r);
        let live: Vec<_> = self
            .live
            .iter()
            .filter(|((_, r), _)| wanted(*r))
            .map(|((side, room), live)| json!({"room": room, "side": side, "state": live.state, "attempt": live.attempt, "since_ms": live.since_ms, "age_ms": now_ms.saturating_sub(live.created_ms)}))
            .collect();
        let timeline: Vec<_> = self
            .ring
            .iter()
            .filter(|entry| wanted(entry.room))
            .collect();
        json!({"now_ms": now_ms, "live": live, "timeline": timeline, "forgotten": self.recorded - self.ring.len() as u64})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_forgets_the_oldest_and_live_rooms_are_counted_by_state() {
        let mut ledger = Ledger::default();
        let entry = |room: u64, state| Entry {
            at_ms: room,
            room,
            side: Side::Prefill,
            attempt: 0,
            state,
            note: String::new(),
        };
        for room in 0..RING as u64 + 5 {
            ledger.enter(entry(room, "WAITING"), false);
            ledger.enter(entry(room, "ABORTED"), room != 7);
        }
        assert_eq!((ledger.live(), ledger.live_by_state()["ABORTED"]), (1, 1));
        let all = ledger.json(None, 9);
        assert_eq!(all["timeline"].as_array().map(Vec::len), Some(RING));
        assert_eq!(all["forgotten"], RING as u64 + 10);
        let one = ledger.json(Some(RING as u64), 9);
        assert_eq!(one["timeline"].as_array().map(Vec::len), Some(2));
    }
}
