//! Timelines that can be asked for: those of all requests in flight, and of the last ones that
//! ended.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;

use super::{RequestStage, RequestTimeline, TimelineRecords};
use crate::clock::unix_time;
use crate::observability::otlp::TraceContext;

/// True if the outcome of a request is an error code (docs/protocol.md).
fn is_error(outcome: &str) -> bool {
    !matches!(outcome, "ok" | "client_gone" | "dry_run")
}

fn short_rows(timelines: &[Arc<RequestTimeline>]) -> Vec<Value> {
    timelines
        .iter()
        .map(|timeline| timeline.short_json())
        .collect()
}

/// Most memory of ended timelines. Without explanations 4096 take 3 MB; one explanation of 256
/// candidates takes 60 KB.
const MAX_BYTES: usize = 16 << 20;

/// The timelines that can be asked for.
pub struct RequestHistory {
    /// Ended ones; 0: none.
    capacity: usize,
    next: AtomicU64,
    ended: AtomicU64,
    failed: AtomicU64,
    shelf: Mutex<Shelf>,
}

/// Ended requests since the router's start. Pages, probes and orders of the control plane have no
/// timeline and are not counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTotals {
    pub ended: u64,
    /// Those whose outcome is an error code.
    pub failed: u64,
}

#[derive(Default)]
struct Shelf {
    /// As many as there are requests in flight.
    running: HashMap<u64, Arc<RequestTimeline>>,
    ended: VecDeque<EndedTimeline>,
    bytes: usize,
}

/// Timeline of an ended request, with what lists of requests select and sort by.
struct EndedTimeline {
    timeline: Arc<RequestTimeline>,
    bytes: usize,
    is_failed: bool,
    wait_secs: f32,
}

impl RequestHistory {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            next: AtomicU64::new(0),
            ended: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            shelf: Mutex::default(),
        }
    }

    pub fn begin(
        &self,
        route: &'static str,
        rid: &str,
        trace: Option<TraceContext>,
    ) -> Arc<RequestTimeline> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let timeline = Arc::new(RequestTimeline {
            number,
            route,
            started: Instant::now(),
            received_unix_ns: unix_time().as_nanos() as u64,
            trace,
            records: Mutex::new(TimelineRecords {
                rid: rid.to_owned(),
                ..Default::default()
            }),
        });
        if self.capacity > 0 {
            self.shelf.lock().running.insert(number, timeline.clone());
        }
        timeline
    }

    pub fn end(&self, timeline: &Arc<RequestTimeline>, status: u16, outcome: &'static str) {
        timeline.mark(RequestStage::Ended);
        timeline.records.lock().end = Some((status, outcome));
        let is_failed = is_error(outcome);
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.failed
            .fetch_add(u64::from(is_failed), Ordering::Relaxed);
        if self.capacity == 0 {
            return;
        }
        let ended = EndedTimeline {
            timeline: timeline.clone(),
            bytes: timeline.bytes(),
            is_failed,
            wait_secs: timeline.wait_secs(),
        };
        let mut shelf = self.shelf.lock();
        shelf.running.remove(&timeline.number);
        shelf.bytes += ended.bytes;
        shelf.ended.push_back(ended);
        while shelf.ended.len() > self.capacity || shelf.bytes > MAX_BYTES {
            let Some(oldest) = shelf.ended.pop_front() else {
                break;
            };
            shelf.bytes -= oldest.bytes;
        }
    }

    pub fn totals(&self) -> RequestTotals {
        RequestTotals {
            ended: self.ended.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
        }
    }

    /// The youngest requests, running or ended, youngest first, without their legs.
    pub fn recent(&self, most: usize) -> Vec<Value> {
        let shelf = self.shelf.lock();
        let ended = shelf.ended.iter().rev().take(most);
        let mut timelines: Vec<_> = ended.map(|ended| ended.timeline.clone()).collect();
        timelines.extend(shelf.running.values().cloned());
        drop(shelf);
        timelines.sort_unstable_by_key(|timeline| std::cmp::Reverse(timeline.number));
        timelines.truncate(most);
        short_rows(&timelines)
    }

    /// The last requests that ended with an error, youngest first, without their legs.
    pub fn failed(&self, most: usize) -> Vec<Value> {
        let shelf = self.shelf.lock();
        let failed = shelf.ended.iter().rev().filter(|ended| ended.is_failed);
        let timelines: Vec<_> = failed
            .take(most)
            .map(|ended| ended.timeline.clone())
            .collect();
        drop(shelf);
        short_rows(&timelines)
    }

    /// The requests begun within `period` that waited longest for their first byte, longest first,
    /// without their legs. Those that still wait are among them.
    pub fn slowest(&self, most: usize, period: Duration) -> Vec<Value> {
        let shelf = self.shelf.lock();
        let ended = shelf
            .ended
            .iter()
            .map(|ended| (ended.wait_secs, &ended.timeline));
        let running = shelf
            .running
            .values()
            .map(|timeline| (timeline.wait_secs(), timeline));
        let mut waits: Vec<_> = ended
            .chain(running)
            .filter(|(_, timeline)| timeline.started.elapsed() <= period)
            .collect();
        waits.sort_unstable_by(|(one, _), (other, _)| other.total_cmp(one));
        let slowest = waits.iter().take(most);
        let timelines: Vec<_> = slowest.map(|(_, timeline)| Arc::clone(timeline)).collect();
        drop(shelf);
        short_rows(&timelines)
    }

    /// The youngest with this id: clients may give the same one twice. `asked` may be the id of the
    /// request or of its answer, which differ by what `plain` takes off; an equal id comes first.
    pub fn find(&self, asked: &str, plain: impl Fn(&str) -> &str) -> Option<Value> {
        let is_equal = |rid: &str| rid == asked;
        let is_alike = |rid: &str| plain(rid) == plain(asked);
        let shelf = self.shelf.lock();
        let found = shelf
            .youngest(is_equal)
            .or_else(|| shelf.youngest(is_alike));
        let timeline = found?.clone();
        drop(shelf);
        Some(timeline.json())
    }
}

impl Shelf {
    /// The youngest timeline with an id that `is_it`; a running one comes first.
    fn youngest(&self, is_it: impl Fn(&str) -> bool) -> Option<&Arc<RequestTimeline>> {
        let has_id = |timeline: &&Arc<RequestTimeline>| is_it(&timeline.records.lock().rid);
        let running = self.running.values().filter(has_id);
        let youngest = running.max_by_key(|timeline| timeline.number);
        let mut ended = self.ended.iter().rev().map(|ended| &ended.timeline);
        youngest.or_else(|| ended.find(has_id))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use baton_text::dialect::Dialect;
    use router_core::{Role, SelectionReason};
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn running_and_ended_requests_are_found_and_the_oldest_forgotten() {
        let requests = RequestHistory::new(2);
        let timelines: Vec<_> = ["a", "b", "c"]
            .map(|rid| requests.begin("/x", rid, None))
            .into();
        assert_eq!(
            requests.find("a", Dialect::without_prefix).unwrap()["state"],
            "waiting"
        );
        for timeline in &timelines {
            requests.end(timeline, 200, "ok");
        }
        assert!(requests.find("a", Dialect::without_prefix).is_none());
        let found = requests.find("c", Dialect::without_prefix).unwrap();
        assert_eq!(
            (&found["state"], &found["outcome"]),
            (&"ended".into(), &"ok".into())
        );
        let running = requests.begin("/x", "d", None);
        let recent = requests.recent(2);
        assert_eq!(
            (&recent[0]["id"], &recent[1]["id"]),
            (&"d".into(), &"c".into())
        );
        assert_eq!(
            (&recent[0]["outcome"], &recent[1]["outcome"]),
            (&serde_json::Value::Null, &"ok".into())
        );
        requests.end(&running, 200, "ok");
        let shelf = requests.shelf.lock();
        assert_eq!((shelf.running.len(), shelf.ended.len()), (0, 2));
    }

    #[test]
    fn failed_requests_and_the_longest_waits_are_listed() {
        let requests = RequestHistory::new(100);
        let ids = |rows: Vec<Value>| -> Vec<String> {
            let id = |row: &Value| row["id"].as_str().unwrap().to_owned();
            rows.iter().map(id).collect()
        };
        // Hours: longer than this test waits for anything.
        let ended = [
            ("refused", "queue_full", None, 9_000.0),
            ("quick", "ok", Some(4_000.0), 90_000.0),
            ("gone", "client_gone", Some(6_000.0), 7_000.0),
            ("broken", "error_event", Some(5_000.0), 8_000.0),
        ];
        for (rid, outcome, first_byte_secs, ended_secs) in ended {
            let timeline = requests.begin("/x", rid, None);
            let mut records = timeline.records.lock();
            records.stages[RequestStage::FirstByte as usize] = first_byte_secs;
            records.stages[RequestStage::Ended as usize] = Some(ended_secs);
            drop(records);
            requests.end(&timeline, 200, outcome);
        }
        let _waiting = requests.begin("/x", "waiting", None);
        assert_eq!(ids(requests.failed(9)), ["broken", "refused"]);
        assert_eq!(ids(requests.failed(1)), ["broken"]);
        // By the time to the first byte, not by the length of the answer.
        let slowest = requests.slowest(9, Duration::from_secs(600));
        assert_eq!(slowest[0]["ttft_ms"], Value::Null);
        assert_eq!(slowest[1]["ttft_ms"], 6_000_000.0);
        assert_eq!(
            ids(slowest),
            ["refused", "gone", "broken", "quick", "waiting"]
        );
        assert!(requests.slowest(9, Duration::ZERO).is_empty());
        let totals = RequestTotals {
            ended: 4,
            failed: 2,
        };
        assert_eq!(requests.totals(), totals);
    }

    #[test]
    fn bytes_bound_the_shelf_too() {
        let requests = RequestHistory::new(1000);
        let explanation = RawValue::from_string(format!("\"{}\"", "x".repeat(1 << 20))).unwrap();
        for _ in 0..40 {
            let timeline = requests.begin("/x", "same", None);
            timeline.leg(
                Role::Regular,
                "w",
                SelectionReason::Only,
                Some(explanation.clone()),
            );
            requests.end(&timeline, 200, "ok");
        }
        let shelf = requests.shelf.lock();
        assert!(
            shelf.bytes <= MAX_BYTES && shelf.ended.len() == 15,
            "{}",
            shelf.ended.len()
        );
    }

    #[test]
    fn with_no_history_nothing_is_held() {
        let requests = RequestHistory::new(0);
        let timeline = requests.begin("/x", "a", None);
        requests.end(&timeline, 200, "ok");
        assert_eq!(requests.totals().ended, 1);
        assert!(requests.find("a", Dialect::without_prefix).is_none());
        assert!(requests.shelf.lock().running.is_empty());
    }
}
