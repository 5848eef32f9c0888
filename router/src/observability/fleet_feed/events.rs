//! Recent events of the fleet for the web page: workers that come, go or change state, and answers
//! that were resumed.
//!
//! Bounded: the last `KEPT` events; each detail is cut at `MAX_DETAIL` bytes.

use std::collections::VecDeque;

use parking_lot::Mutex;
use router_core::Role;
use serde::Serialize;

use crate::clock::unix_time;

/// Events kept: what a page shows without scrolling for long.
const KEPT: usize = 64;
/// Longest detail: a cause with its numbers, not a page of a worker's error [bytes].
const MAX_DETAIL: usize = 300;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FleetEvent {
    /// Counts up from 1 since the router's start.
    pub number: u64,
    pub at_unix_ms: u64,
    /// A worker state's label, or registered, removed, failover.
    pub kind: &'static str,
    pub role: Role,
    pub worker: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Id of the request whose answer was interrupted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

#[derive(Debug, Default)]
pub struct FleetEvents {
    recent: Mutex<VecDeque<FleetEvent>>,
}

impl FleetEvents {
    pub fn add(&self, kind: &'static str, role: Role, worker: &str, detail: Option<String>) {
        self.push(kind, role, worker, detail, None);
    }

    /// Note that another worker is to resume the answer to `request`.
    pub fn add_failover(&self, role: Role, worker: &str, detail: String, request: &str) {
        let request = Some(request.to_owned());
        self.push("failover", role, worker, Some(detail), request);
    }

    fn push(
        &self,
        kind: &'static str,
        role: Role,
        worker: &str,
        detail: Option<String>,
        request: Option<String>,
    ) {
        let mut recent = self.recent.lock();
        let event = FleetEvent {
            number: recent.back().map_or(1, |last| last.number + 1),
            at_unix_ms: unix_time().as_millis() as u64,
            kind,
            role,
            worker: worker.to_owned(),
            detail: detail.map(|text| shortened(&text)),
            request,
        };
        if recent.len() == KEPT {
            recent.pop_front();
        }
        recent.push_back(event);
    }

    /// Copies of the kept events, oldest first.
    pub fn recent(&self) -> Vec<FleetEvent> {
        self.recent.lock().iter().cloned().collect()
    }
}

/// At most `MAX_DETAIL` bytes of `text`, cut between characters.
fn shortened(text: &str) -> String {
    let end = (0..=MAX_DETAIL.min(text.len())).rfind(|at| text.is_char_boundary(*at));
    match end {
        Some(end) if end < text.len() => format!("{}…", &text[..end]),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_events_are_kept_in_order_with_short_details() {
        let events = FleetEvents::default();
        for _ in 0..KEPT {
            events.add("ready", Role::Decode, "http://a", None);
        }
        events.add_failover(Role::Decode, "http://b", "é".repeat(400), "order-1");
        let recent = events.recent();
        assert_eq!((recent.len(), recent[0].number), (KEPT, 2));
        let last = &recent[KEPT - 1];
        assert_eq!((last.number, last.kind), (KEPT as u64 + 1, "failover"));
        assert_eq!(last.request.as_deref(), Some("order-1"));
        let detail = last.detail.as_deref().unwrap_or_default();
        assert_eq!(detail, format!("{}…", "é".repeat(MAX_DETAIL / 2)));
    }
}
