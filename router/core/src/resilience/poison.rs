//! Requests that break workers: how much one request may break, and which bodies are refused for a
//! while afterwards.
//!
//! A worker that dies takes all its requests with it, and only one of them may be the cause. A
//! break of a worker that had no other request is strong evidence; of one that had others, weak.
//! Progress (a token that reached the client) clears it.
//!
//! Deterministic, no I/O: time comes in as `now_ms`.

use std::collections::HashMap;

use crate::types::WorkerId;

/// Workers that a request may break one after the other while it is the only one on them.
const MAX_LONE_BREAKS: u32 = 2;
/// The same, while other requests broke with it.
const MAX_BREAKS: u32 = 3;
/// Workers that one body breaks, over all requests with it, before it is refused.
const MAX_WORKERS: usize = 2;
/// A body is refused, and a break remembered, for this long.
const REFUSED_MS: u64 = 60_000;
/// Bodies remembered.
const MAX_BODIES: usize = 1024;

/// End of a worker, or of its connection, with a request in hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerBreak {
    /// The worker had no other request.
    Alone,
    /// Other requests broke with it.
    InCompany,
}

/// Workers that broke under one request since its last progress.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestBreaks {
    alone: u32,
    in_company: u32,
}

impl RequestBreaks {
    /// Count a break. True: the request is not to be tried again.
    pub fn add_break(&mut self, worker_break: WorkerBreak) -> bool {
        match worker_break {
            WorkerBreak::Alone => self.alone += 1,
            WorkerBreak::InCompany => self.in_company += 1,
        }
        self.alone >= MAX_LONE_BREAKS || self.alone + self.in_company >= MAX_BREAKS
    }
}

#[derive(Debug, Default)]
struct SuspectBody {
    workers: Vec<WorkerId>,
    is_refused: bool,
    until_ms: u64,
}

/// Bodies that broke workers, by their hashes.
///
/// Invariant: at most `MAX_BODIES`; each is forgotten `REFUSED_MS` after its last break.
#[derive(Debug, Default)]
pub struct PoisonList {
    bodies: HashMap<u64, SuspectBody>,
}

impl PoisonList {
    /// A request with this body broke a worker that had no other.
    pub fn add_break(&mut self, body: u64, worker: WorkerId, now_ms: u64) {
        let Some(suspect) = self.suspect_entry(body, now_ms) else {
            return;
        };
        if !suspect.workers.contains(&worker) {
            suspect.workers.push(worker);
        }
        suspect.is_refused |= suspect.workers.len() >= MAX_WORKERS;
    }

    /// A request with this body broke as many workers as one may.
    pub fn refuse_body(&mut self, body: u64, now_ms: u64) {
        if let Some(suspect) = self.suspect_entry(body, now_ms) {
            suspect.is_refused = true;
        }
    }

    pub fn is_refused(&self, body: u64, now_ms: u64) -> bool {
        let suspect = self.bodies.get(&body);
        suspect.is_some_and(|suspect| suspect.is_refused && now_ms < suspect.until_ms)
    }

    /// True if no body is remembered: then none needs to be hashed.
    pub fn is_empty(&self) -> bool {
        self.bodies.is_empty()
    }

    /// `None`: the list is full.
    fn suspect_entry(&mut self, body: u64, now_ms: u64) -> Option<&mut SuspectBody> {
        self.bodies.retain(|_, suspect| now_ms < suspect.until_ms);
        if self.bodies.len() >= MAX_BODIES && !self.bodies.contains_key(&body) {
            return None;
        }
        let suspect = self.bodies.entry(body).or_default();
        suspect.until_ms = now_ms + REFUSED_MS;
        Some(suspect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_breaks_two_workers_alone_or_three_in_company() {
        use WorkerBreak::{Alone, InCompany};
        for (breaks, is_over) in [
            (&[Alone][..], false),
            (&[Alone, Alone], true),
            (&[InCompany, InCompany], false),
            (&[InCompany, Alone], false),
            (&[InCompany, InCompany, InCompany], true),
            (&[Alone, InCompany, InCompany], true),
        ] {
            let mut seen = RequestBreaks::default();
            let last = breaks
                .iter()
                .map(|worker_break| seen.add_break(*worker_break))
                .last();
            assert_eq!(last, Some(is_over), "{breaks:?}");
        }
    }

    #[test]
    fn body_that_broke_two_workers_is_refused_for_a_minute() {
        let mut list = PoisonList::default();
        list.add_break(7, WorkerId(1), 1_000);
        list.add_break(7, WorkerId(1), 2_000);
        assert!(!list.is_refused(7, 2_000), "one worker");
        list.add_break(7, WorkerId(2), 3_000);
        assert!(list.is_refused(7, 62_999) && !list.is_refused(8, 3_000));
        assert!(!list.is_refused(7, 63_000));
        list.refuse_body(9, 70_000);
        assert!(list.is_refused(9, 70_000));
        assert_eq!(list.bodies.len(), 1, "the first is forgotten");
    }

    #[test]
    fn list_is_bounded() {
        let mut list = PoisonList::default();
        (0..2_000).for_each(|body| list.refuse_body(body, 0));
        assert_eq!(list.bodies.len(), MAX_BODIES);
        assert!(list.is_refused(5, 1));
    }
}
