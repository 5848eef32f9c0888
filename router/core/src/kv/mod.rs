//! Exact index of the blocks that engines announce, beside the estimated one of
//! [`crate::prefix_tree`].
//!
//! The life of a rank's events (one worker, or one DP rank of it):
//!
//! 1. The shell reads numbered batches of [`KvEvent`]s, or a snapshot, and gives them to the rank's
//!    [`CacheReplica`].
//! 2. The replica watches the numbers and keeps a [`EngineBlockTree`]: which blocks the rank holds,
//!    by the *engine's* names, and our name of each. An engine's hash may be SHA-256, Python's
//!    `hash` or anything else; ours is the chain hash of the tokens ([`crate::prompt`]), computed
//!    once, when the block is announced.
//! 3. Changes leave as [`CacheUpdate`] in our names, and a policy's [`KvIndex`] takes it in: from
//!    [`CacheUpdate::Serve`] on the rank's entry is its stored set, no more and no less.
//! 4. Batches were lost, or contradict each other: [`CacheUpdate::MarkInexact`]. The entry stays,
//!    as a guess, until a snapshot, a replay or an `AllBlocksCleared` makes it exact again.
//! 5. The rank is gone, or is another process with the same address (epoch): its entry is forgotten
//!    in O(1).
//!
//! The engine's block (a page) and the router's need not have the same length: a router block is
//! held when the pages that cover it are.
//!
//! Invariants (property tests in `model_test`): an exact entry equals a naive set of token
//! prefixes; the blocks of a rank are closed under prefixes, so that a match can be found by
//! bisection.

/// Tree of blocks that one engine holds.
mod block_tree;
/// Blocks held by workers.
mod index;
/// Copy of a worker's blocks, kept by its events.
mod replica;

#[cfg(test)]
mod model_test;

pub use block_tree::{BlockChange, BrokenTree, EngineBlockTree};
pub use index::{KvIndex, KvRank};
pub use replica::{
    ApplyResult, CacheReplica, CacheUpdate, CacheUpdateError, CacheUpdateRecord, ReplicaError,
    UpdateSink,
};

/// An engine's name for a block, reduced to 64 bits where it is longer. It covers everything before
/// the block.
pub type EngineHash = u64;

/// Events that vLLM's, SGLang's and our engines announce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    Stored(StoredBlocks),
    Removed(Vec<EngineHash>),
    /// There are no blocks.
    Cleared,
}

/// Blocks that follow each other, first one first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StoredBlocks {
    pub hashes: Vec<EngineHash>,
    /// `None`: they begin a prompt.
    pub parent: Option<EngineHash>,
    /// `block_tokens` for each hash.
    pub tokens: Vec<u32>,
    pub block_tokens: u32,
    /// Namespace whose prompts may share them, as the request named it ([`crate::prompt`]); read
    /// where they begin a prompt.
    pub namespace: String,
    /// Other things than tokens that tell blocks apart (images), by place in `hashes`. No prompt
    /// here matches them.
    pub salts: Vec<(usize, u64)>,
}
