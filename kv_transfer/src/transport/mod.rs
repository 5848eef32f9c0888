//! Moving page bytes into our own pool. Everything that touches raw page memory is here and in
//! `crate::pool`.
//!
//! Life of a pull: the node gives a `Pull` (pages with generation and checksum, and where they go)
//! to a transport; the transport answers with exactly one `PullEnd`, after which it writes none of
//! the pages again. `shm` and `cuda_ipc` copy on the copy threads from the peer's pool; `tcp` reads
//! from data streams on the data threads.

pub mod checksum_copy;
pub mod communicator;
pub mod copy_threads;
pub mod fault_injection;
pub mod shm;
pub mod tasks;
pub mod tcp;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::protocol::GroupId;
use crate::state_machine::PullError;
use crate::state_machine::decode::PullPage;

/// Batch of pages to fetch.
#[derive(Debug, Clone)]
pub struct Pull {
    /// Unique in this node; names the pull in `PullEnd` and in cancellation.
    pub id: u64,
    pub group: GroupId,
    pub pages: Vec<PullPage>,
    /// Set by the node to stop a pull of a copy thread at the next page. (tcp pulls are stopped by
    /// a command.)
    pub cancel: Arc<AtomicBool>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullEnd {
    pub id: u64,
    pub bytes: u64,
    pub result: Result<(), PullError>,
}
