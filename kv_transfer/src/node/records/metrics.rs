//! Counters of one node, as in `stats_json`. Written by the control thread only.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::reason_code::ReasonCode;
use crate::state_machine::{communicator, decode, prefill};

/// Upper bounds [s]; an exponential family, 100 µs to 26 s.
const BUCKETS: usize = 19;
const FIRST_BUCKET_SECS: f64 = 0.0001;

#[derive(Debug, Clone, Serialize)]
pub struct Histogram {
    /// (upper bound in seconds, observations at or below it); cumulative, as Prometheus has it.
    pub buckets: Vec<(f64, u64)>,
    pub sum: f64,
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS)
                .map(|i| (FIRST_BUCKET_SECS * f64::from(1u32 << i), 0))
                .collect(),
            sum: 0.0,
            count: 0,
        }
    }
}

impl Histogram {
    pub fn observe(&mut self, secs: f64) {
        for (bound, count) in &mut self.buckets {
            *count += u64::from(secs <= *bound);
        }
        self.sum += secs;
        self.count += 1;
    }
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct TransportStats {
    /// Prompts committed, by the transport of their last pull.
    pub rooms: u64,
    /// From a room's first pull to its commit, added up.
    pub room_seconds: f64,
    pub batches: u64,
    pub pages: u64,
    pub bytes: u64,
    /// From handing a batch to the transport to its end, added up (batches overlap).
    pub batch_seconds: f64,
    /// Batches with a page that was not what had been announced.
    pub damaged: u64,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct NodeStats {
    /// By transport, and none for prompts that needed no page.
    pub pull: ByTransport,
    /// Rooms that ended otherwise than by commit or DONE, by reason code.
    pub failures: ByCode,
    pub committed: u64,
    pub released_done: u64,
    pub aborted: u64,
    /// A room's first pull until its commit.
    pub pull_seconds: Histogram,
    /// open() until commit.
    pub room_seconds: Histogram,
    pub opens_received: u64,
    pub opens_early: u64,
    pub opens_rejected: u64,
    pub pages_hashed: u64,
    /// Pairs that changed to a slower transport.
    pub fallbacks: u64,
    /// D: times that rooms of a pair began to fail at once because of damaged pages.
    pub quarantines: u64,
    /// Communicators that ended: closed to free their place, failed, or leaked because their abort
    /// hung.
    pub comms_ended: ByEnd,
    /// Connections on this host that could not be accepted, for lack of descriptors or memory.
    pub accept_errors: u64,
    pub links_up: u64,
    pub links_lost: u64,
    pub bad_frames: u64,
    /// Connections that were refused before a link existed, by reason code.
    pub hellos_refused: ByCode,
    pub hellos_evicted: u64,
    /// OPENs that were refused, by reason code.
    pub rejects: ByCode,
    /// Invalid transitions; each one is a bug on this side.
    pub illegal: u64,
}

pub const TRANSPORTS: [&str; 6] = ["shm", "cuda_ipc", "tcp", "gloo", "nccl", "none"];
pub const COMM_ENDS: [&str; 3] = ["closed", "failed", "abandoned"];

/// A map whose labels all exist from the start, so that a rate over a counter's first increment is
/// right.
macro_rules! labeled {
    ($name:ident, $value:ty, $labels:expr) => {
        #[derive(Debug, Clone, Serialize)]
        #[serde(transparent)]
        pub struct $name(BTreeMap<&'static str, $value>);

        impl Default for $name {
            fn default() -> Self {
                Self($labels.map(|label| (label, <$value>::default())).collect())
            }
        }

        impl $name {
            pub fn get_mut(&mut self, label: &'static str) -> &mut $value {
                self.0.entry(label).or_default()
            }
        }
    };
}

labeled!(ByTransport, TransportStats, TRANSPORTS.into_iter());
labeled!(
    ByCode,
    u64,
    ReasonCode::ALL.iter().map(|code| code.as_str())
);
labeled!(ByEnd, u64, COMM_ENDS.into_iter());

impl NodeStats {
    /// Under the engine's metric names, labels included. `reads_refused` is counted by the data
    /// thread.
    pub fn counters(&self, reads_refused: u64) -> BTreeMap<String, f64> {
        let mut counters = BTreeMap::new();
        let mut add = |name: &str, label: &str, value: f64| {
            counters.insert(format!("{name}_total{label}"), value);
        };
        for (transport, pull) in &self.pull.0 {
            let label = format!("{{transport=\"{transport}\"}}");
            add("kv_pulls", &label, pull.rooms as f64);
            add("kv_pull_bytes", &label, pull.bytes as f64);
            add("kv_pull_seconds", &label, pull.room_seconds);
            add("kv_damaged_pulls", &label, pull.damaged as f64);
        }
        for (name, label, counts) in [
            ("kv_transfer_failures", "code", &self.failures.0),
            ("kv_hellos_refused", "code", &self.hellos_refused.0),
            ("kv_rejects", "code", &self.rejects.0),
            ("kv_communicators_ended", "end", &self.comms_ended.0),
        ] {
            for (value, &count) in counts {
                add(name, &format!("{{{label}=\"{value}\"}}"), count as f64);
            }
        }
        for (name, count) in [
            ("kv_hellos_evicted", self.hellos_evicted),
            ("kv_links_lost", self.links_lost),
            ("kv_quarantines", self.quarantines),
            ("kv_bad_frames", self.bad_frames),
            ("kv_reads_refused", reads_refused),
            ("kv_transport_fallbacks", self.fallbacks),
            ("kv_accept_errors", self.accept_errors),
        ] {
            add(name, "", count as f64);
        }
        counters
    }
}

/// As `NodeStats::counters`; `states`: number of live rooms by state.
pub fn gauges(
    states: &BTreeMap<&'static str, usize>,
    peers: usize,
    largest_backlog: usize,
    comms: &BTreeMap<&'static str, usize>,
    is_healthy: bool,
) -> BTreeMap<String, f64> {
    let count = |state: &str| states.get(state).copied().unwrap_or(0) as f64;
    let mut gauges = BTreeMap::new();
    let rooms = prefill::PrefillPhase::LIVE_NAMES.iter();
    for state in rooms.chain(decode::DecodePhase::LIVE_NAMES) {
        let name = format!("kv_rooms{{state=\"{}\"}}", state.to_lowercase());
        gauges.insert(name, count(state));
    }
    gauges.insert("kv_leases".into(), count("LEASED"));
    gauges.insert("kv_peers".into(), peers as f64);
    gauges.insert("kv_outbox_bytes".into(), largest_backlog as f64);
    let healthy = if is_healthy { 1.0 } else { 0.0 };
    gauges.insert("kv_transfer_healthy".into(), healthy);
    for state in communicator::CommPhase::NAMES {
        let count = comms.get(state).copied().unwrap_or(0) as f64;
        gauges.insert(format!("kv_communicators{{state=\"{state}\"}}"), count);
    }
    gauges
}
