//! A rank's numbered batches, in order: it finds gaps and repeats, and passes changes to the index.
//!
//! ```text
//!                 snapshot, batch 0, a batch with Cleared
//!   nothing known ───────────────────────────────────────▶ exact ◀── snapshot, Cleared ──┐
//!                └── skip (earlier ones are lost) ────▶ a guess ◀── gap skipped, Broken ──┘ (from exact)
//! ```

use serde::{Deserialize, Serialize};

use super::{BlockChange, BrokenTree, EngineBlockTree, KvEvent};

/// Most changes passed on at once: the index is locked meanwhile.
const PIECE: usize = 1024;

/// Update of the index from a replica.
pub type CacheUpdate<'a> = CacheUpdateRecord<&'a [BlockChange]>;

/// Update of the index from a replica, with its changes in one form or another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "news", rename_all = "snake_case")]
pub enum CacheUpdateRecord<C> {
    /// A new copy of the rank's cache follows; the one in use answers until it is served.
    Begin,
    /// Changes of the copy that was begun, or else of the one in use.
    Changed {
        #[serde(flatten)]
        changes: C,
        /// The rank's pages, of which it reuses whole ones only.
        page_tokens: u32,
        /// Memory of the mirror.
        bytes: usize,
    },
    /// The copy answers from now on.
    Serve { is_exact: bool },
    /// The copy in use is a guess from now on.
    #[serde(rename = "doubt")]
    MarkInexact,
    /// There is no copy.
    Forget,
}

impl<C> CacheUpdateRecord<C> {
    /// The same update with its changes in another form.
    pub fn map_changes<'a, D>(&'a self, form: impl FnOnce(&'a C) -> D) -> CacheUpdateRecord<D> {
        match self {
            Self::Begin => CacheUpdateRecord::Begin,
            Self::Changed {
                changes,
                page_tokens,
                bytes,
            } => CacheUpdateRecord::Changed {
                changes: form(changes),
                page_tokens: *page_tokens,
                bytes: *bytes,
            },
            Self::Serve { is_exact } => CacheUpdateRecord::Serve {
                is_exact: *is_exact,
            },
            Self::MarkInexact => CacheUpdateRecord::MarkInexact,
            Self::Forget => CacheUpdateRecord::Forget,
        }
    }
}

/// Reason why an update was not applied. The sender restarts, now or later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CacheUpdateError {
    #[error("this rank's entry was forgotten")]
    Forgotten,
    #[error(
        "the index of cached blocks needs more than its {max_bytes} bytes; raise --max-index-bytes"
    )]
    Full { max_bytes: usize },
}

/// Result of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApplyResult {
    /// Taken in.
    Applied,
    /// Known already.
    Old,
    /// Batches from `first` on are missing; this one was not taken in.
    Gap { first: u64 },
}

/// Reasons for which a replica needs a replay or a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ReplicaError {
    #[error(transparent)]
    Broken(#[from] BrokenTree),
    #[error(transparent)]
    Refused(#[from] CacheUpdateError),
}

/// Receiver of the changes, the index.
pub type UpdateSink<'a> = &'a mut dyn FnMut(CacheUpdate<'_>) -> Result<(), CacheUpdateError>;

/// See the module.
#[derive(Debug, Default)]
pub struct CacheReplica {
    mirror: EngineBlockTree,
    /// Number of the next batch; `None`: nothing is known yet.
    next: Option<u64>,
    is_exact: bool,
    /// A copy was served.
    is_serving: bool,
    changes: Vec<BlockChange>,
}

impl CacheReplica {
    /// `block_tokens`: of the router's blocks.
    pub fn new(block_tokens: usize) -> Self {
        Self {
            mirror: EngineBlockTree::new(block_tokens),
            ..Self::default()
        }
    }

    /// Number of the next batch to be taken in.
    pub fn next_batch(&self) -> Option<u64> {
        self.next
    }

    pub fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// Blocks of the engine that are known.
    pub fn block_count(&self) -> usize {
        self.mirror.block_count()
    }

    /// Everything cached, which stands for the batches before `next`.
    pub fn apply_snapshot(
        &mut self,
        next: u64,
        events: &[KvEvent],
        send_update: UpdateSink<'_>,
    ) -> Result<(), ReplicaError> {
        self.mirror.clear();
        send_update(CacheUpdate::Begin)?;
        for event in events {
            self.take_in(std::slice::from_ref(event), send_update)?;
        }
        self.next = Some(next);
        self.serve_copy(true, send_update)
    }

    /// A batch, in whatever order it came.
    pub fn apply_batch(
        &mut self,
        number: u64,
        events: &[KvEvent],
        send_update: UpdateSink<'_>,
    ) -> Result<ApplyResult, ReplicaError> {
        // What was before `Cleared` does not matter, be it known or lost.
        let cleared = events.iter().rposition(|event| *event == KvEvent::Cleared);
        let events = &events[cleared.unwrap_or(0)..];
        let is_fresh_start = cleared.is_some();
        match self.next {
            Some(next) if number < next => return Ok(ApplyResult::Old),
            Some(next) if number > next && !is_fresh_start => {
                return Ok(ApplyResult::Gap { first: next });
            }
            None if number > 0 && !is_fresh_start => return Ok(ApplyResult::Gap { first: 0 }),
            _ => {}
        }
        let is_first = self.next.is_none();
        if is_first && !is_fresh_start {
            // batch 0 of an engine that does not announce that it begins empty
            send_update(CacheUpdate::Begin)?;
        }
        self.take_in(events, send_update)?;
        self.next = Some(number + 1);
        if is_first || is_fresh_start {
            self.serve_copy(true, send_update)?;
        }
        Ok(ApplyResult::Applied)
    }

    /// Skip the batches before `number`, which are lost; the entry is a guess from then on.
    pub fn skip_to(
        &mut self,
        number: u64,
        send_update: UpdateSink<'_>,
    ) -> Result<(), ReplicaError> {
        if self.next.is_none() {
            send_update(CacheUpdate::Begin)?;
        }
        self.mirror.is_partial = true;
        self.next = Some(number);
        self.serve_copy(false, send_update)
    }

    /// Nothing more is heard, or something was wrong: the copy is a guess, and the next snapshot
    /// replaces it.
    pub fn mark_inexact(&mut self, send_update: UpdateSink<'_>) -> Result<(), ReplicaError> {
        if std::mem::replace(&mut self.is_exact, false) {
            send_update(CacheUpdate::MarkInexact)?;
        }
        Ok(())
    }

    /// All that was missed has come: what was doubted is exact again. False: it was not doubted, or
    /// is not complete.
    pub fn make_exact(&mut self, send_update: UpdateSink<'_>) -> Result<bool, ReplicaError> {
        let is_due = self.next.is_some() && !self.is_exact && !self.mirror.is_partial;
        if is_due {
            self.serve_copy(true, send_update)?;
        }
        Ok(is_due)
    }

    /// Another copy follows from number 0 on; the one in use stays a guess until that is served.
    pub fn restart(&mut self) {
        self.mirror.clear();
        self.next = None;
        self.is_exact = false;
    }

    /// The rank is another process now: numbers restart, and it holds nothing of what this knew.
    pub fn forget_copy(&mut self, send_update: UpdateSink<'_>) -> Result<(), ReplicaError> {
        self.restart();
        if std::mem::replace(&mut self.is_serving, false) {
            send_update(CacheUpdate::Forget)?;
        }
        Ok(())
    }

    fn serve_copy(
        &mut self,
        is_exact: bool,
        send_update: UpdateSink<'_>,
    ) -> Result<(), ReplicaError> {
        self.is_exact = is_exact;
        self.is_serving = true;
        send_update(CacheUpdate::Serve { is_exact })?;
        Ok(())
    }

    /// If the events restarted, what follows is passed on as a new copy.
    fn take_in(
        &mut self,
        events: &[KvEvent],
        send_update: UpdateSink<'_>,
    ) -> Result<(), ReplicaError> {
        self.changes.clear();
        if self.mirror.apply_events(events, &mut self.changes)? {
            send_update(CacheUpdate::Begin)?;
        }
        let page_tokens = self.mirror.page_tokens();
        let bytes = self.mirror.bytes();
        for changes in self.changes.chunks(PIECE) {
            send_update(CacheUpdate::Changed {
                changes,
                page_tokens,
                bytes,
            })?;
        }
        Ok(())
    }
}
