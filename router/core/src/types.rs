//! The words every policy shares: who can be chosen, what is asked, what was decided and why.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One registered (url, DP rank). Given out by the registry, never reused, so a stale id can only miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What a worker does for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prefill and decode in one process.
    Regular,
    Prefill,
    Decode,
}

impl Role {
    pub fn label(self) -> &'static str {
        match self {
            Role::Regular => "regular",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

/// A candidate. The shell passes only ready ones: healthy, breaker not open, not draining, right role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerView {
    pub id: WorkerId,
    /// Requests in flight to it, as this router counts them.
    pub load: usize,
}

/// What a policy may know about a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestView<'a> {
    /// Routing text: what the prefix tree indexes. May be empty when [`Policy::needs_text`](crate::Policy::needs_text) is false.
    pub text: &'a str,
    /// The client's own affinity key (header), if it sent one.
    pub routing_key: Option<&'a str>,
}

/// Why a worker was chosen. [`Why::label`] is a metric label, so dashboards explain decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Why {
    Random,
    RoundRobin,
    LowerOfTwo,
    /// It holds the longest matching prefix: `matched_chars` of the `total_chars` of the routing text.
    PrefixHit {
        matched_chars: usize,
        total_chars: usize,
    },
    SmallestTree,
    LeastLoaded,
    /// There was one candidate.
    Only,
}

impl Why {
    pub fn label(self) -> &'static str {
        match self {
            Why::Random => "random",
            Why::RoundRobin => "round_robin",
            Why::LowerOfTwo => "lower_of_two",
            Why::PrefixHit { .. } => "prefix_hit",
            Why::SmallestTree => "smallest_tree",
            Why::LeastLoaded => "least_loaded",
            Why::Only => "only",
        }
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::PrefixHit {
                matched_chars,
                total_chars,
            } => {
                write!(f, "prefix_hit {matched_chars}/{total_chars} chars")
            }
            other => f.write_str(other.label()),
        }
    }
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Choice {
    pub worker: WorkerId,
    #[serde(flatten)]
    pub why: Why,
}

/// What happened, in the order the shell saw it. The only way a policy learns.
///
/// `WorkerAdded` must come before the first `Routed` of that worker: a policy ignores workers it was not told about, so
/// that a late `Routed` after `WorkerGone` cannot bring a dead worker's memory back.
#[derive(Debug, Clone, Copy)]
pub enum Event<'a> {
    /// The request with this routing text was sent to this worker.
    Routed {
        worker: WorkerId,
        text: &'a str,
    },
    Finished {
        worker: WorkerId,
        ok: bool,
    },
    WorkerAdded {
        worker: WorkerId,
    },
    WorkerGone {
        worker: WorkerId,
    },
}
