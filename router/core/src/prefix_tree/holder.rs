//! Workers that hold a node of the tree.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::WorkerId;

/// A `queued` value no stamp has.
pub(super) const NOT_QUEUED: u64 = 0;

/// A worker that was sent every path up to the end of a node.
#[derive(Debug)]
pub(super) struct Holder {
    pub worker: WorkerId,
    /// When it last was sent a path that passes through the whole node.
    pub stamp: AtomicU64,
    /// Under which key the node waits in the worker's `leaves`; [`NOT_QUEUED`] unless `below` is 0.
    /// This key may be older than `stamp`, which moves under the read lock; eviction detects that
    /// and queues the node again.
    pub queued: u64,
    /// Children of the node that the worker holds too.
    pub below: u32,
}

impl Holder {
    /// Not queued.
    pub fn new(worker: WorkerId, stamp: u64, below: u32) -> Self {
        Self {
            worker,
            stamp: AtomicU64::new(stamp),
            queued: NOT_QUEUED,
            below,
        }
    }

    pub fn stamp(&self) -> u64 {
        self.stamp.load(Ordering::Relaxed)
    }
}

/// Index of a worker in the list, or where it would be inserted.
pub(super) fn find_holder(holders: &[Holder], worker: WorkerId) -> Result<usize, usize> {
    holders.binary_search_by_key(&worker, |holder| holder.worker)
}
