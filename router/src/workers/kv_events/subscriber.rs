//! Reader of one rank: its replica, the policy that it informs, and its counters.

use std::sync::Arc;

use parking_lot::Mutex;
use router_core::kv::{
    ApplyResult, CacheReplica, CacheUpdate, CacheUpdateError, KvEvent, ReplicaError, UpdateSink,
};
use router_core::{PolicySet, Role, WorkerId};

use super::zmtp::ZmtpError;
use crate::clock::unix_time;
use crate::observability::metrics::RouterMetrics;
use crate::workers::fleet::WorkerFleet;
use crate::workers::kv_event_status::{SubscriptionStatus, SyncState};
use crate::workers::load_guard::Candidate;

/// Why a stream ended.
#[derive(Debug, thiserror::Error)]
pub enum SubscriptionEnd {
    #[error("{0}")]
    Connect(String),
    #[error("{0}")]
    Refused(String),
    #[error("the stream ended")]
    Closed,
    #[error("no sign of life for {secs} s")]
    Silent { secs: u64 },
    #[error("cannot read it: {0}")]
    Malformed(String),
    #[error(transparent)]
    Replica(#[from] ReplicaError),
    #[error(transparent)]
    Zmtp(#[from] ZmtpError),
}

impl SubscriptionEnd {
    /// A metric label.
    pub fn label(&self) -> &'static str {
        match self {
            SubscriptionEnd::Connect(_) | SubscriptionEnd::Zmtp(ZmtpError::Connect(_)) => "connect",
            SubscriptionEnd::Refused(_) => "refused",
            SubscriptionEnd::Closed | SubscriptionEnd::Zmtp(ZmtpError::Io(_)) => "closed",
            SubscriptionEnd::Silent { .. } => "silent",
            SubscriptionEnd::Malformed(_) | SubscriptionEnd::Zmtp(_) => "malformed",
            SubscriptionEnd::Replica(ReplicaError::Broken(_)) => "contradiction",
            SubscriptionEnd::Replica(ReplicaError::Refused(CacheUpdateError::Full { .. })) => {
                "full"
            }
            SubscriptionEnd::Replica(ReplicaError::Refused(CacheUpdateError::Forgotten)) => {
                "forgotten"
            }
        }
    }

    /// Trying again soon would end the same way.
    pub fn is_lasting(&self) -> bool {
        matches!(
            self.label(),
            "refused" | "malformed" | "contradiction" | "full"
        )
    }
}

pub struct EventReader {
    pub name: String,
    role: Role,
    id: WorkerId,
    policy_set: Arc<PolicySet>,
    metrics: Arc<RouterMetrics>,
    status: Arc<Mutex<SubscriptionStatus>>,
    replica: CacheReplica,
}

impl EventReader {
    pub fn new(fleet: &WorkerFleet, candidate: &Candidate) -> Self {
        Self {
            name: candidate.name.clone(),
            role: candidate.worker.role(),
            id: candidate.id,
            policy_set: fleet.policy_set.clone(),
            metrics: fleet.metrics.clone(),
            status: candidate.feed.status.clone(),
            replica: CacheReplica::new(fleet.config.tokens.block_size),
        }
    }

    /// Let the replica tell the worker's policy.
    fn with<T>(
        &mut self,
        act: impl FnOnce(&mut CacheReplica, UpdateSink<'_>) -> Result<T, ReplicaError>,
    ) -> Result<T, SubscriptionEnd> {
        let policy_set = &self.policy_set;
        let role = self.role;
        let id = self.id;
        let mut send_update =
            |update: CacheUpdate<'_>| policy_set.apply_cache_update(role, id, &update);
        Ok(act(&mut self.replica, &mut send_update)?)
    }

    /// Everything the rank has.
    pub fn snapshot(&mut self, next: u64, events: &[KvEvent]) -> Result<(), SubscriptionEnd> {
        self.with(|replica, send_update| replica.apply_snapshot(next, events, send_update))?;
        self.resynced("snapshot");
        Ok(())
    }

    /// A batch; `ts` is the Unix time at which it was made, if it has just been.
    pub fn batch(
        &mut self,
        number: u64,
        events: &[KvEvent],
        ts: Option<f64>,
    ) -> Result<ApplyResult, SubscriptionEnd> {
        let was_exact = self.replica.is_exact();
        let took =
            self.with(|replica, send_update| replica.apply_batch(number, events, send_update))?;
        let result = match took {
            ApplyResult::Applied => "applied",
            ApplyResult::Old => "known",
            ApplyResult::Gap { .. } => "ahead",
        };
        self.metrics
            .kv_batches
            .with_label_values(&[self.role.into_str(), result])
            .inc();
        if let (Some(ts), ApplyResult::Applied) = (ts, took) {
            let lag = self
                .metrics
                .kv_lag
                .with_label_values(&[self.role.into_str()]);
            lag.observe((unix_time().as_secs_f64() - ts).max(0.0));
        }
        if let ApplyResult::Gap { first } = took
            && was_exact
        {
            self.show(|status| status.gaps += 1);
            self.mark_inexact(&format!("batches {first} to {} are missing", number - 1))?;
        }
        if self.replica.is_exact() && !was_exact {
            self.resynced("cleared");
        }
        self.show(|_| {});
        Ok(took)
    }

    /// Skip the batches before `number`, which cannot be had.
    pub fn skip_to(&mut self, number: u64) -> Result<(), SubscriptionEnd> {
        self.with(|replica, send_update| replica.skip_to(number, send_update))?;
        self.metrics
            .kv_resyncs
            .with_label_values(&[self.role.into_str(), "skipped"])
            .inc();
        let reason =
            format!("batches before {number} were missed; exact again when the cache is cleared");
        self.show(|status| status.reason = Some(reason));
        Ok(())
    }

    /// The batches that were missed came after all, or none was.
    pub fn resume(&mut self) -> Result<(), SubscriptionEnd> {
        if self.with(CacheReplica::make_exact)? {
            self.resynced("replay");
        }
        Ok(())
    }

    /// The numbers restart: what is known stays a guess until the new copy is served.
    pub fn restart(&mut self) {
        self.replica.restart();
    }

    fn resynced(&mut self, how: &str) {
        self.metrics
            .kv_resyncs
            .with_label_values(&[self.role.into_str(), how])
            .inc();
        tracing::info!(worker = %self.name, how, blocks = self.replica.block_count(), "its cache is known exactly");
        self.show(|status| {
            status.resyncs += 1;
            status.reason = None;
        });
    }

    fn mark_inexact(&mut self, why: &str) -> Result<(), SubscriptionEnd> {
        if self.replica.is_exact() {
            tracing::warn!(worker = %self.name, why, "its cache is guessed");
        }
        self.with(CacheReplica::mark_inexact)?;
        self.show(|status| status.reason = Some(why.to_owned()));
        Ok(())
    }

    /// The stream ended. What was known is a guess now; or nothing, if it cannot be true or kept.
    pub fn ended(&mut self, end: &SubscriptionEnd) {
        self.metrics
            .kv_failures
            .with_label_values(&[self.role.into_str(), end.label()])
            .inc();
        let outcome = match end {
            SubscriptionEnd::Replica(_) => {
                tracing::warn!(worker = %self.name, why = %end, "its cache is not known");
                self.with(CacheReplica::forget_copy)
            }
            _ => self.mark_inexact(&end.to_string()),
        };
        // The policy has no entry for this rank any more: nothing is left to be doubted.
        let _: Result<(), SubscriptionEnd> = outcome;
        self.show(|status| status.reason = Some(end.to_string()));
    }

    fn show(&self, change: impl FnOnce(&mut SubscriptionStatus)) {
        let mut status = self.status.lock();
        change(&mut status);
        status.state = match (self.replica.next_batch(), self.replica.is_exact()) {
            (_, true) => SyncState::Exact,
            (None, false) => SyncState::Connecting,
            (Some(_), false) => SyncState::Doubtful,
        };
        status.blocks = self.replica.block_count();
        status.next_seq = self.replica.next_batch();
    }
}
