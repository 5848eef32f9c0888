//! History of rooms: a ring of transitions and the live rooms, for `/debug/rooms` and for leak
//! checks.

use std::collections::{BTreeMap, VecDeque};

use serde::Serialize;
use serde_json::json;

/// Transitions kept over all rooms; about 100 bytes each.
const RING: usize = 8192;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RoomSide {
    Prefill,
    Decode,
}

/// Transition of a room, or a note about it.
#[derive(Debug, Clone, Serialize)]
pub struct RoomRecord {
    pub at_ms: u64,
    pub room: u64,
    pub side: RoomSide,
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
pub struct RoomHistory {
    ring: VecDeque<RoomRecord>,
    live: BTreeMap<(RoomSide, u64), Live>,
    recorded: u64,
}

impl RoomHistory {
    /// Record that a room entered `record.state`; `over` removes it from the live rooms.
    pub fn record_state(&mut self, record: RoomRecord, over: bool) {
        let key = (record.side, record.room);
        if over {
            self.live.remove(&key);
        } else {
            let live = self.live.entry(key).or_insert(Live {
                state: record.state,
                attempt: record.attempt,
                since_ms: record.at_ms,
                created_ms: record.at_ms,
            });
            live.state = record.state;
            live.since_ms = record.at_ms;
        }
        self.add_note(record);
    }

    /// Add a note without a change of state.
    pub fn add_note(&mut self, record: RoomRecord) {
        if self.ring.len() == RING {
            self.ring.pop_front();
        }
        self.recorded += 1;
        self.ring.push_back(record);
    }

    pub fn live_count(&self) -> usize {
        self.live.len()
    }

    pub fn live_by_state(&self) -> BTreeMap<&'static str, usize> {
        let mut states = BTreeMap::new();
        for live in self.live.values() {
            *states.entry(live.state).or_default() += 1;
        }
        states
    }

    /// Timeline of one room, or of all.
    pub fn timeline_json(&self, room: Option<u64>, now_ms: u64) -> serde_json::Value {
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
            .filter(|record| wanted(record.room))
            .collect();
        json!({"now_ms": now_ms, "live": live, "timeline": timeline, "forgotten": self.recorded - self.ring.len() as u64})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_forgets_the_oldest_and_live_rooms_are_counted_by_state() {
        let mut history = RoomHistory::default();
        let at = |room: u64, state| RoomRecord {
            at_ms: room,
            room,
            side: RoomSide::Prefill,
            attempt: 0,
            state,
            note: String::new(),
        };
        for room in 0..RING as u64 + 5 {
            history.record_state(at(room, "WAITING"), false);
            history.record_state(at(room, "ABORTED"), room != 7);
        }
        assert_eq!(
            (history.live_count(), history.live_by_state()["ABORTED"]),
            (1, 1)
        );
        let all = history.timeline_json(None, 9);
        assert_eq!(all["timeline"].as_array().map(Vec::len), Some(RING));
        assert_eq!(all["forgotten"], RING as u64 + 10);
        let one = history.timeline_json(Some(RING as u64), 9);
        assert_eq!(one["timeline"].as_array().map(Vec::len), Some(2));
    }
}
