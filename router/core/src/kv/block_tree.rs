//! Cache of one rank as its events report it, and our names of its blocks.
//!
//! ```text
//!   engine's blocks:  ├─ a ─┼─ b ─┼─ c ─┤        page of 4 tokens, router block of 8: b completes one, c begins the next
//!   router's blocks:  ├──── h0 ───┼──── h1 …
//! ```
//!
//! A block *counts* when it is stored and its parent counts: blocks behind a hole cannot be used.
//! Engines remove inner blocks now and then (SGLang takes a node out and puts its halves back in
//! one batch; vLLM evicts by its own order), so a removed block stays as a ghost as long as blocks
//! behind it are stored, and they count again when it returns.
//!
//! Invariants: counts(block) = copies > 0 and (it begins a prompt or counts(parent)); the changes
//! handed out add up to the router blocks completed by blocks that count; a ghost has children.
//! Memory is bounded by the rank's cache, and passed on ([`EngineBlockTree::bytes`]).

use std::collections::HashMap;

use super::{EngineHash, KvEvent, StoredBlocks};
use crate::prompt::TokenChain;

/// Index into the arena.
type Slot = u32;
const NONE: Slot = u32::MAX;
/// `parent` of a slot that is not in use.
const FREE: Slot = u32::MAX - 1;

/// A router block that the rank holds now, or no longer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockChange {
    Hold(u64),
    Drop(u64),
}

/// Events that cannot be true of one cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BrokenTree {
    #[error("block {parent:016x} was never announced, and blocks behind it are")]
    UnknownParent { parent: EngineHash },
    #[error(
        "hash {hash:016x} names two different prefixes; this engine's hashes do not cover what is \
         before a block"
    )]
    NotAPrefixHash { hash: EngineHash },
    #[error("{hashes} blocks of {block_tokens} tokens came with {tokens} tokens")]
    WrongLength {
        hashes: usize,
        block_tokens: u32,
        tokens: usize,
    },
}

#[derive(Debug)]
struct Block {
    hash: EngineHash,
    /// Our hash of everything up to the last end of a router block at or before this block's end.
    chain: u64,
    parent: Slot,
    first_child: Slot,
    /// Siblings.
    next: Slot,
    prev: Slot,
    /// Stored less removed: vLLM may hold the same content twice. 0: a ghost.
    copies: u32,
    counts: bool,
    remainder: BlockRemainder,
}

/// Rest of a block: what it completes, and what it leaves for the next one.
#[derive(Debug)]
enum BlockRemainder {
    /// Completes one router block, `chain`, with its last token, and no sibling completes the same.
    Whole,
    /// A token in the middle of a router block: pages of 1 are SGLang's default.
    Token(u32),
    Other(Box<Other>),
}

#[derive(Debug)]
struct Other {
    /// Router blocks that end inside. Siblings which begin alike complete the same ones.
    completed: Box<[u64]>,
    /// Own tokens behind the last end of a router block.
    tail: Box<[u32]>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct EngineBlockTree {
    /// Tokens of a router block.
    block_tokens: usize,
    /// Blocks behind unknown ones are passed over instead of refused: it is known that
    /// announcements were missed.
    pub is_partial: bool,
    by_hash: HashMap<EngineHash, Slot>,
    blocks: Vec<Block>,
    free: Vec<Slot>,
    /// How many blocks that count complete a router block, for those that several may complete.
    shared: HashMap<u64, u32>,
    /// Blocks whose copies changed in this batch.
    touched: Vec<Slot>,
    /// Heap memory of `BlockRemainder::Other`.
    rest_bytes: usize,
    /// Tokens of a page, as last announced.
    page_tokens: u32,
}

impl EngineBlockTree {
    pub fn new(block_tokens: usize) -> Self {
        Self {
            block_tokens: block_tokens.max(1),
            ..Self::default()
        }
    }

    /// Blocks known, ghosts included.
    pub fn block_count(&self) -> usize {
        self.by_hash.len()
    }

    /// Tokens of the engine's blocks; 0 before the first one.
    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// Estimated memory.
    pub fn bytes(&self) -> usize {
        map_bytes(self.by_hash.capacity(), size_of::<(EngineHash, Slot)>())
            + map_bytes(self.shared.capacity(), size_of::<(u64, u32)>())
            + self.blocks.capacity() * size_of::<Block>()
            + self.free.capacity() * size_of::<Slot>()
            + self.rest_bytes
    }

    /// There are no blocks, and that is certain.
    pub fn clear(&mut self) {
        *self = Self {
            page_tokens: self.page_tokens,
            ..Self::new(self.block_tokens)
        };
    }

    /// Take in one batch. Appends to `changes` in the order they hold; returns whether the batch
    /// restarted the cache (`Cleared`), in which case `changes` has only what came after that. An
    /// error leaves the mirror unusable until it is cleared.
    pub fn apply_events(
        &mut self,
        events: &[KvEvent],
        changes: &mut Vec<BlockChange>,
    ) -> Result<bool, BrokenTree> {
        let mut is_cleared = false;
        for event in events {
            match event {
                KvEvent::Stored(stored) => self.store_blocks(stored)?,
                KvEvent::Removed(hashes) => hashes.iter().for_each(|hash| self.remove_block(*hash)),
                KvEvent::Cleared => {
                    self.clear();
                    is_cleared = true;
                }
            }
        }
        let mut touched = std::mem::take(&mut self.touched);
        for &slot in &touched {
            self.settle_counts(slot, changes);
        }
        for &slot in &touched {
            self.release_slot(slot);
        }
        touched.clear();
        self.touched = touched;
        Ok(is_cleared)
    }

    fn store_blocks(&mut self, stored: &StoredBlocks) -> Result<(), BrokenTree> {
        let hashes = stored.hashes.len();
        let tokens = stored.tokens.len();
        let block_tokens = stored.block_tokens;
        let width = stored.block_tokens as usize;
        if width == 0 || tokens != width * hashes {
            return Err(BrokenTree::WrongLength {
                hashes,
                block_tokens,
                tokens,
            });
        }
        self.page_tokens = block_tokens;
        let mut parent = NONE;
        let mut chain = TokenChain::new(&stored.namespace);
        let mut tail = Vec::new();
        if let Some(hash) = stored.parent {
            match self.by_hash.get(&hash) {
                Some(&slot) => {
                    parent = slot;
                    chain = TokenChain::from_hash(self.blocks[slot as usize].chain);
                    tail = self.tail_behind(slot);
                }
                None if self.is_partial => return Ok(()),
                None => return Err(BrokenTree::UnknownParent { parent: hash }),
            }
        }
        let pages = stored.tokens.chunks_exact(width);
        for (i, (&hash, page)) in stored.hashes.iter().zip(pages).enumerate() {
            if let Some((_, salt)) = stored.salts.iter().find(|(index, _)| *index == i) {
                chain.push_block(&[*salt as u32, (*salt >> 32) as u32]);
            }
            tail.extend_from_slice(page);
            let mut completed = Vec::new();
            let whole = tail.len() / self.block_tokens * self.block_tokens;
            for block in tail[..whole].chunks_exact(self.block_tokens) {
                completed.push(chain.push_block(block));
            }
            tail.drain(..whole);
            let own_tail = &tail[tail.len() - tail.len().min(width)..];
            parent = match self.by_hash.get(&hash) {
                Some(&slot) => {
                    let block = &mut self.blocks[slot as usize];
                    if block.chain != chain.hash() || block.parent != parent {
                        return Err(BrokenTree::NotAPrefixHash { hash });
                    }
                    block.copies += 1;
                    slot
                }
                None => {
                    let remainder =
                        BlockRemainder::new(&completed, own_tail, width <= self.block_tokens);
                    self.add_block(hash, chain.hash(), parent, remainder)
                }
            };
            self.touched.push(parent);
        }
        Ok(())
    }

    /// The tokens between the last end of a router block and the end of this block.
    fn tail_behind(&self, slot: Slot) -> Vec<u32> {
        let mut current = slot;
        let mut reversed = Vec::new();
        while current != NONE {
            let block = &self.blocks[current as usize];
            match &block.remainder {
                BlockRemainder::Whole => break,
                BlockRemainder::Token(token) => reversed.push(*token),
                BlockRemainder::Other(other) => {
                    reversed.extend(other.tail.iter().rev());
                    if !other.completed.is_empty() {
                        break;
                    }
                }
            }
            current = block.parent;
        }
        reversed.reverse();
        reversed
    }

    /// Remove a block. An unknown one was evicted before it was announced here, or lies behind what
    /// was missed.
    fn remove_block(&mut self, hash: EngineHash) {
        if let Some(&slot) = self.by_hash.get(&hash) {
            let block = &mut self.blocks[slot as usize];
            block.copies = block.copies.saturating_sub(1);
            self.touched.push(slot);
        }
    }

    /// Make `counts` true to the rule, here and behind.
    fn settle_counts(&mut self, slot: Slot, changes: &mut Vec<BlockChange>) {
        let block = &self.blocks[slot as usize];
        let parent_counts = block.parent == NONE || self.blocks[block.parent as usize].counts;
        let counts = block.copies > 0 && parent_counts;
        if counts == block.counts {
            return;
        }
        let mut stack = vec![slot];
        while let Some(current) = stack.pop() {
            self.blocks[current as usize].counts = counts;
            self.report_changes(current, counts, changes);
            let mut child = self.blocks[current as usize].first_child;
            while child != NONE {
                let behind = &self.blocks[child as usize];
                if behind.counts != counts && (behind.copies > 0 || !counts) {
                    stack.push(child);
                }
                child = behind.next;
            }
        }
    }

    fn report_changes(&mut self, slot: Slot, counts: bool, changes: &mut Vec<BlockChange>) {
        let block = &self.blocks[slot as usize];
        let completed = match &block.remainder {
            BlockRemainder::Token(_) => return,
            BlockRemainder::Whole => {
                changes.push(BlockChange::new(block.chain, counts));
                return;
            }
            BlockRemainder::Other(other) => &other.completed,
        };
        for &hash in completed {
            let users = self.shared.entry(hash).or_default();
            let before = *users;
            *users = if counts { before + 1 } else { before - 1 };
            let now = *users;
            if now == 0 {
                self.shared.remove(&hash);
            }
            if (before == 0) != (now == 0) {
                changes.push(BlockChange::new(hash, counts));
            }
        }
    }

    fn add_block(
        &mut self,
        hash: EngineHash,
        chain: u64,
        parent: Slot,
        remainder: BlockRemainder,
    ) -> Slot {
        self.rest_bytes += remainder.heap_bytes();
        let first_child = match parent {
            NONE => NONE,
            _ => self.blocks[parent as usize].first_child,
        };
        let block = Block {
            hash,
            chain,
            parent,
            first_child: NONE,
            next: first_child,
            prev: NONE,
            copies: 1,
            counts: false,
            remainder,
        };
        let slot = match self.free.pop() {
            Some(slot) => {
                self.blocks[slot as usize] = block;
                slot
            }
            None => {
                self.blocks.push(block);
                (self.blocks.len() - 1) as Slot
            }
        };
        if first_child != NONE {
            self.blocks[first_child as usize].prev = slot;
        }
        if parent != NONE {
            self.blocks[parent as usize].first_child = slot;
        }
        self.by_hash.insert(hash, slot);
        slot
    }

    /// Free a block without copies and children, and ghosts before it that are then without
    /// children.
    fn release_slot(&mut self, slot: Slot) {
        let mut current = slot;
        while current != NONE {
            let block = &self.blocks[current as usize];
            if block.parent == FREE || block.copies > 0 || block.first_child != NONE {
                return;
            }
            let parent = block.parent;
            let next = block.next;
            let prev = block.prev;
            self.rest_bytes -= block.remainder.heap_bytes();
            self.by_hash.remove(&block.hash);
            if next != NONE {
                self.blocks[next as usize].prev = prev;
            }
            match prev {
                NONE if parent != NONE => self.blocks[parent as usize].first_child = next,
                NONE => {}
                _ => self.blocks[prev as usize].next = next,
            }
            let block = &mut self.blocks[current as usize];
            block.parent = FREE;
            block.remainder = BlockRemainder::Whole;
            self.free.push(current);
            current = parent;
        }
    }
}

/// Memory of a hash map: a bucket has a control byte, and an eighth of them is empty.
pub(super) const fn map_bytes(capacity: usize, entry: usize) -> usize {
    capacity * (entry + 1) * 8 / 7
}

impl BlockChange {
    pub(crate) fn new(hash: u64, is_held: bool) -> Self {
        if is_held {
            BlockChange::Hold(hash)
        } else {
            BlockChange::Drop(hash)
        }
    }
}

impl BlockRemainder {
    /// `is_alone`: the block is no longer than a router block, so two that complete the same one
    /// are the same.
    fn new(completed: &[u64], tail: &[u32], is_alone: bool) -> Self {
        match (completed, tail) {
            ([_], []) if is_alone => BlockRemainder::Whole,
            ([], [token]) => BlockRemainder::Token(*token),
            _ => BlockRemainder::Other(Box::new(Other {
                completed: completed.into(),
                tail: tail.into(),
            })),
        }
    }

    fn heap_bytes(&self) -> usize {
        match self {
            BlockRemainder::Whole | BlockRemainder::Token(_) => 0,
            BlockRemainder::Other(other) => {
                size_of::<Other>() + size_of_val(&*other.completed) + size_of_val(&*other.tail)
            }
        }
    }
}
