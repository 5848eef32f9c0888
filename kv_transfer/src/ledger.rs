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

#[derive(Debug, Clone, Serialize)]
struct Entry {
    at_ms: u64,
    room: u64,
    side: Side,
    attempt: u32,
    state: &'static str,
    note: String,
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
    /// A room entered `state`; `over` ends its life.
    pub fn enter(
        &mut self,
        side: Side,
        room: u64,
        attempt: u32,
        state: &'static str,
        over: bool,
        note: String,
        at_ms: u64,
    ) {
        if over {
            self.live.remove(&(side, room));
        } else {
            let live = self.live.entry((side, room)).or_insert(Live {
                state,
                attempt,
                since_ms: at_ms,
                created_ms: at_ms,
            });
            live.state = state;
            live.since_ms = at_ms;
        }
        self.note(side, room, attempt, state, note, at_ms);
    }

    /// Something worth remembering that is no change of state.
    pub fn note(
        &mut self,
        side: Side,
        room: u64,
        attempt: u32,
        state: &'static str,
        note: String,
        at_ms: u64,
    ) {
        if self.ring.len() == RING {
            self.ring.pop_front();
        }
        self.recorded += 1;
        self.ring.push_back(Entry {
            at_ms,
            room,
            side,
            attempt,
            state,
            note,
        });
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
        for room in 0..RING as u64 + 5 {
            ledger.enter(
                Side::Prefill,
                room,
                0,
                "WAITING",
                false,
                String::new(),
                room,
            );
            ledger.enter(
                Side::Prefill,
                room,
                0,
                "ABORTED",
                room != 7,
                "CLIENT_GONE".into(),
                room,
            );
        }
        assert_eq!((ledger.live(), ledger.live_by_state()["ABORTED"]), (1, 1));
        let all = ledger.json(None, 9);
        assert_eq!(all["timeline"].as_array().map(Vec::len), Some(RING));
        assert_eq!(all["forgotten"], RING as u64 + 10);
        let one = ledger.json(Some(RING as u64), 9);
        assert_eq!(one["timeline"].as_array().map(Vec::len), Some(2));
    }
}
