//! Pairs of prefill and decode workers that fit together: by their fingerprints, and by the
//! verdicts on pairs that proved unable to work together.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use router_core::{Role, WorkerPair};

use super::{RoleTable, WorkerFleet};
use crate::clock::now_ms;
use crate::workers::load_guard::Candidate;
use crate::workers::worker::{Worker, WorkerDescription};

/// Ready peers of a worker are counted up to this many: each probe asks for the number.
const MAX_PEERS: usize = 16;

/// The pair of `worker` and one of the other role.
fn pair_of(worker: &Worker, other: &Worker) -> WorkerPair {
    match worker.role() {
        Role::Prefill => (worker.id, other.id),
        Role::Decode | Role::Regular => (other.id, worker.id),
    }
}

impl WorkerFleet {
    /// Other ready workers that could take this one's requests: of its role, with its model, and
    /// with a partner that is ready. At most `MAX_PEERS`; 0: without this worker such requests
    /// would wait and fail.
    pub fn ready_peers(&self, worker: &Worker) -> usize {
        let description = worker.description();
        let model = description.served_model_name.as_deref();
        let is_same_model = |other: &Worker| {
            let serves = |model| other.description().serves(model);
            model.is_none_or(serves)
        };
        let workers = self.workers.read();
        let peers = workers.iter().filter(|other| {
            other.id != worker.id
                && other.role() == worker.role()
                && other.is_ready()
                && is_same_model(other)
                && self.has_ready_partner(other, &workers)
        });
        peers.take(MAX_PEERS).count()
    }

    /// True if a ready worker of the other role fits this one. Regular workers need none.
    fn has_ready_partner(&self, worker: &Worker, workers: &[Arc<Worker>]) -> bool {
        let other_role = match worker.role() {
            Role::Regular => return true,
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        };
        let fingerprint = worker.description().fingerprint();
        let verdicts = self.verdicts.lock();
        let now_ms = now_ms();
        let mut partners = workers
            .iter()
            .filter(|other| other.role() == other_role && other.is_ready());
        partners.any(|other| {
            let pair = pair_of(worker, other);
            fingerprint.is_compatible(&other.description().fingerprint())
                && verdicts.exclusion_reason(pair, now_ms).is_none()
        })
    }

    /// Have the ready workers of the other role probed: those that this one does not fit may have
    /// been replaced together with it.
    pub fn probe_partners(&self, worker: &Worker) {
        for other in self.workers.read().iter() {
            if other.role() != worker.role() && other.is_ready() {
                other.suspect.notify_one();
            }
        }
    }

    /// Reason why no worker of the other role can be paired with this ready one, though there are
    /// some.
    pub fn incompatibility(&self, worker: &Worker) -> Option<String> {
        let other_role = match worker.role() {
            Role::Regular => return None,
            Role::Prefill => Role::Decode,
            Role::Decode => Role::Prefill,
        };
        let all_fit = self.all_fit.load(Ordering::Relaxed) && self.verdicts.lock().is_empty();
        if all_fit || !worker.is_ready() {
            return None;
        }
        let description = worker.description();
        let fingerprint = description.fingerprint();
        let others = self.workers();
        let others = others
            .iter()
            .filter(|w| w.role() == other_role && w.is_ready());
        let fingerprint_of = |w: &Arc<Worker>| w.description().fingerprint();
        let mut fitting = others
            .clone()
            .filter(|w| fingerprint.is_compatible(&fingerprint_of(w)))
            .peekable();
        if fitting.peek().is_some() {
            return self.exclusion_from_all(worker, fitting);
        }
        let nearest =
            others.min_by_key(|w| fingerprint.differing_fields(&fingerprint_of(w)).count())?;
        let there = nearest.description();
        let differences = fingerprint
            .differing_fields(&there.fingerprint())
            .map(|aspect| {
                let value = |of: &WorkerDescription| of.aspect(aspect).unwrap_or_default();
                let here = value(&description);
                let there = value(&there);
                format!("its {aspect} is {here}, there it is {there}")
            });
        let differences: Vec<_> = differences.collect();
        Some(format!(
            "no {other_role} worker fits it; nearest is {}: {}",
            nearest.url(),
            differences.join(", ")
        ))
    }

    /// Reason why a worker is excluded from the pairs with all `others`, which fit it by what they
    /// report; `None` if it can be paired with one of them.
    fn exclusion_from_all<'a>(
        &self,
        worker: &Worker,
        others: impl Iterator<Item = &'a Arc<Worker>>,
    ) -> Option<String> {
        let verdicts = self.verdicts.lock();
        let now_ms = now_ms();
        let mut first = None;
        for other in others {
            let reason = verdicts.exclusion_reason(pair_of(worker, other), now_ms)?;
            first.get_or_insert_with(|| {
                format!("it cannot be paired with {}: {reason}", other.url())
            });
        }
        first
    }

    /// True if some prefill and some decode worker can work together.
    pub fn has_pair(&self) -> bool {
        let [_, p_list, d_list] = self.tables.each_ref().map(RoleTable::list);
        let verdicts = self.verdicts.lock();
        let now_ms = now_ms();
        let fits = |p: &Candidate, d: &Candidate| {
            let pair = (p.worker.id, d.worker.id);
            p.fingerprint.is_compatible(&d.fingerprint)
                && verdicts.exclusion_reason(pair, now_ms).is_none()
        };
        p_list.iter().any(|p| d_list.iter().any(|d| fits(p, d)))
    }

    /// A decode worker reports that it can never work with this prefill worker.
    pub fn exclude_pair(&self, prefill: &Worker, decode: &Worker, reason: String) {
        let pair = (prefill.id, decode.id);
        let begun = self
            .verdicts
            .lock()
            .record_failure(pair, reason.clone(), now_ms());
        if let Some(excluded_ms) = begun {
            let prefill = prefill.url();
            let decode = decode.url();
            tracing::warn!(%prefill, %decode, excluded_ms, reason, "a pair cannot work together and gets no requests for a while");
        }
    }

    /// A transfer of this pair worked.
    pub fn confirm_pair(&self, pair: WorkerPair) {
        let mut verdicts = self.verdicts.lock();
        if !verdicts.is_empty() {
            verdicts.record_success(pair);
        }
    }

    /// True if the pages that `prefill` has are of use to `decode`.
    pub fn can_pair(&self, prefill: &Candidate, decode: &Candidate) -> bool {
        let pair = (prefill.worker.id, decode.worker.id);
        prefill.fingerprint.is_compatible(&decode.fingerprint)
            && self
                .verdicts
                .lock()
                .exclusion_reason(pair, now_ms())
                .is_none()
    }
}
