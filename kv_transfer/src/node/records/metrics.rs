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

#[derive(Debug, Clone, Serialize)]
pub struct NodeStats {
    /// By transport, and none for prompts that needed no page.
    pub pull: BTreeMap<&'static str, TransportStats>,
    /// Rooms that ended otherwise than by commit or DONE, by reason code.
    pub failures: BTreeMap<&'static str, u64>,
    pub committed: u64,
    pub released_done: u64,
    pub aborted: u64,
    /// A room's first pull until its commit.
    pub pull_seconds: Histogram,
    /// open() until commit.
    pub room_seconds: Histogram,
    pub opens_received: u64,
    pub opens_parked: u64,
    pub opens_rejected: u64,
    pub pages_hashed: u64,
    /// Pairs that changed to a slower transport.
    pub fallbacks: u64,
    /// D: times that rooms of a pair began to fail at once because of damaged pages.
    pub quarantines: u64,
    /// Communicators that ended: closed to free their place, failed, or leaked because their abort hung.
    pub comms_ended: BTreeMap<&'static str, u64>,
    /// Connections on this host that could not be accepted, for lack of descriptors or memory.
    pub accept_errors: u64,
    pub links_up: u64,
    pub links_lost: u64,
    pub bad_frames: u64,
    /// Connections that were refused before a link existed, by reason code.
    pub hellos_refused: BTreeMap<&'static str, u64>,
    pub hellos_evicted: u64,
    /// OPENs that were refused, by reason code.
    pub rejects: BTreeMap<&'static str, u64>,
    /// Invalid transitions; each one is a bug on this side.
    pub illegal: u64,
}

pub const TRANSPORTS: [&str; 6] = ["shm", "cuda_ipc", "tcp", "gloo", "nccl", "none"];
pub const COMM_ENDS: [&str; 3] = ["closed", "failed", "abandoned"];

impl Default for NodeStats {
    /// Every label exists from the start, so that a rate over a counter's first increment is right.
    fn default() -> Self {
        Self {
            pull: TRANSPORTS
                .iter()
                .map(|&t| (t, TransportStats::default()))
                .collect(),
            failures: ReasonCode::ALL
                .iter()
                .map(|code| (code.as_str(), 0))
                .collect(),
            committed: 0,
            released_done: 0,
            aborted: 0,
            pull_seconds: Histogram::default(),
            room_seconds: Histogram::default(),
            opens_received: 0,
            opens_parked: 0,
            opens_rejected: 0,
            pages_hashed: 0,
            fallbacks: 0,
            quarantines: 0,
            comms_ended: COMM_ENDS.iter().map(|&end| (end, 0)).collect(),
            accept_errors: 0,
            links_up: 0,
            links_lost: 0,
            bad_frames: 0,
            hellos_refused: ReasonCode::ALL
                .iter()
                .map(|code| (code.as_str(), 0))
                .collect(),
            hellos_evicted: 0,
            rejects: ReasonCode::ALL
                .iter()
                .map(|code| (code.as_str(), 0))
                .collect(),
            illegal: 0,
        }
    }
}

impl NodeStats {
    /// Under the engine's metric names, labels included. `reads_refused` is counted by the data thread.
    pub fn counters(&self, reads_refused: u64) -> BTreeMap<String, f64> {
        let mut counters = BTreeMap::new();
        for (transport, pull) in &self.pull {
            for (name, value) in [
                ("kv_pulls", pull.rooms as f64),
                ("kv_pull_bytes", pull.bytes as f64),
                ("kv_pull_seconds", pull.room_seconds),
                ("kv_damaged_pulls", pull.damaged as f64),
            ] {
                counters.insert(format!("{name}_total{{transport=\"{transport}\"}}"), value);
            }
        }
        for (name, by_code) in [
            ("kv_transfer_failures", &self.failures),
            ("kv_hellos_refused", &self.hellos_refused),
            ("kv_rejects", &self.rejects),
        ] {
            for (code, &count) in by_code {
                counters.insert(format!("{name}_total{{code=\"{code}\"}}"), count as f64);
            }
        }
        for (name, count) in [
            ("kv_hellos_evicted_total", self.hellos_evicted),
            ("kv_links_lost_total", self.links_lost),
            ("kv_quarantines_total", self.quarantines),
            ("kv_bad_frames_total", self.bad_frames),
            ("kv_reads_refused_total", reads_refused),
        ] {
            counters.insert(name.into(), count as f64);
        }
        for (end, &count) in &self.comms_ended {
            counters.insert(
                format!("kv_communicators_ended_total{{end=\"{end}\"}}"),
                count as f64,
            );
        }
        counters.insert("kv_transport_fallbacks_total".into(), self.fallbacks as f64);
        counters.insert("kv_accept_errors_total".into(), self.accept_errors as f64);
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
    let mut gauges: BTreeMap<String, f64> = prefill::PrefillPhase::LIVE_NAMES
        .iter()
        .chain(decode::DecodePhase::LIVE_NAMES)
        .map(|state| {
            (
                format!("kv_rooms{{state=\"{}\"}}", state.to_lowercase()),
                count(state),
            )
        })
        .collect();
    gauges.insert("kv_leases".into(), count("LEASED"));
    gauges.insert("kv_peers".into(), peers as f64);
    gauges.insert("kv_outbox_bytes".into(), largest_backlog as f64);
    gauges.insert(
        "kv_transfer_healthy".into(),
        f64::from(u8::from(is_healthy)),
    );
    for state in communicator::CommPhase::NAMES {
        let count = comms.get(state).copied().unwrap_or(0);
        gauges.insert(
            format!("kv_communicators{{state=\"{state}\"}}"),
            count as f64,
        );
    }
    gauges
}
