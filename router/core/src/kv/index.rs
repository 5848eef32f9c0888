//! Which rank holds which block, as announced: chain hash → holders.
//!
//! The life of a rank's entry:
//!
//! 1. [`CacheUpdate::Begin`] opens a *set*, [`CacheUpdate::Changed`] fills it,
//!    [`CacheUpdate::Serve`] puts it in the place of the rank's set in use. A resync builds the new
//!    set beside the old one, which answers until then.
//! 2. A match looks for the longest prefix of a prompt in every set in use at once
//!    ([`KvIndex::held_by`]): since sets are closed under prefixes, the holders only get fewer
//!    along the path, and where they do is found by bisection.
//! 3. A replaced or dropped set answers nothing from then on; its blocks are swept out a shard at a
//!    time, with the changes that come after it. Its number is used again when all shards are
//!    swept.
//!
//! The hash map is cut into shards so that neither growing nor sweeping touches more than a small
//! part of it at once. Memory, with that of the mirrors behind the sets, is bounded by `max_bytes`:
//! updates that do not fit are refused.

use std::collections::{BTreeMap, HashMap, hash_map::Entry};
use std::hash::{BuildHasherDefault, Hasher};

use serde::Serialize;

use super::block_tree::map_bytes;
use super::{BlockChange, CacheUpdate, CacheUpdateError};
use crate::types::WorkerId;

const SHARDS: usize = 64;
/// Shards swept with each update while dead sets are about.
const SWEEP: usize = 2;
const WORD: usize = 64;

/// Chain hashes are spread evenly already.
#[derive(Debug, Default, Clone, Copy)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }
    fn write_u64(&mut self, hash: u64) {
        // The top bits chose the shard, and are what hash maps compare first: move others there.
        self.0 = hash.rotate_left(32);
    }
}

type Shard = HashMap<u64, Holders, BuildHasherDefault<AsIs>>;

/// Numbers of sets. Most blocks have one holder.
#[derive(Debug)]
enum Holders {
    One(u32),
    Many(Box<[u64]>),
}

impl Holders {
    fn has(&self, set: u32) -> bool {
        self.holder_word(set as usize / WORD) >> (set as usize % WORD) & 1 == 1
    }

    fn heap_bytes(&self) -> usize {
        match self {
            Holders::One(_) => 0,
            Holders::Many(words) => size_of_val(&**words),
        }
    }

    /// False: it was there.
    fn insert(&mut self, set: u32) -> bool {
        if self.has(set) {
            return false;
        }
        let words = match std::mem::replace(self, Holders::One(set)) {
            Holders::One(first) => with_bit(with_bit(Vec::new(), first.max(set)), first.min(set)),
            Holders::Many(words) => with_bit(words.into_vec(), set),
        };
        *self = Holders::Many(words.into());
        true
    }

    /// Returns whether no holder is left.
    fn remove(&mut self, set: u32) -> bool {
        match self {
            Holders::One(only) => *only == set,
            Holders::Many(words) => {
                if let Some(word) = words.get_mut(set as usize / WORD) {
                    *word &= !(1 << (set as usize % WORD));
                }
                words.iter().all(|word| *word == 0)
            }
        }
    }

    fn holder_word(&self, at: usize) -> u64 {
        match self {
            Holders::One(only) if *only as usize / WORD == at => 1 << (*only as usize % WORD),
            Holders::One(_) => 0,
            Holders::Many(words) => words.get(at).copied().unwrap_or(0),
        }
    }
}

fn with_bit(mut words: Vec<u64>, set: u32) -> Vec<u64> {
    let len = words.len().max(set as usize / WORD + 1);
    words.resize(len, 0);
    words[set as usize / WORD] |= 1 << (set as usize % WORD);
    words
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    /// Unused: its number may be given out.
    Free,
    /// Holds the blocks of a rank.
    Used { blocks: usize },
    /// So many shards may still name it.
    Dead { shards: usize },
}

#[derive(Debug, Default)]
struct Rank {
    /// The set that answers.
    in_use: Option<u32>,
    /// The set being filled beside it.
    loading: Option<u32>,
    is_exact: bool,
    page_tokens: u32,
    /// Size of its mirror.
    mirror_bytes: usize,
}

/// Knowledge of a rank's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct KvRank {
    /// True if it is the stored set; else it is a guess.
    pub is_exact: bool,
    pub blocks: usize,
    /// Tokens of the rank's pages, 0 if it reported none: it reuses whole pages only.
    pub page_tokens: u32,
}

impl KvRank {
    /// Tokens of a prompt that `held` router blocks save. Engines compute the last token always,
    /// and reuse whole pages only.
    pub fn cached_tokens(&self, held: usize, block_tokens: usize, prompt_tokens: usize) -> usize {
        let tokens = (held * block_tokens).min(prompt_tokens.saturating_sub(1));
        let page = match self.page_tokens {
            0 => block_tokens.max(1),
            page => page as usize,
        };
        tokens / page * page
    }
}

/// See the module.
#[derive(Debug, Default)]
pub struct KvIndex {
    shards: Vec<Shard>,
    sets: Vec<Set>,
    /// Sets that may be given out.
    free: Vec<u32>,
    dead: usize,
    /// The next shard to sweep.
    sweep_at: usize,
    ranks: BTreeMap<WorkerId, Rank>,
    max_bytes: usize,
    heap_bytes: usize,
    mirror_bytes: usize,
    active: Vec<u64>,
    depths: Vec<usize>,
}

impl KvIndex {
    pub fn new(max_bytes: usize) -> Self {
        let shards = (0..SHARDS).map(|_| Shard::default()).collect();
        Self {
            shards,
            max_bytes,
            ..Self::default()
        }
    }

    /// The rank's entry that answers, if there is one.
    pub fn rank_entry(&self, worker: WorkerId) -> Option<KvRank> {
        let &Rank {
            in_use,
            is_exact,
            page_tokens,
            ..
        } = self.ranks.get(&worker)?;
        Some(KvRank {
            is_exact,
            blocks: self.blocks_of(in_use?),
            page_tokens,
        })
    }

    /// True if no rank has an entry: there is nothing to look for.
    pub fn is_idle(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Estimated memory, the mirrors' included.
    pub fn bytes(&self) -> usize {
        let entry = size_of::<(u64, Holders)>();
        let shards: usize = self
            .shards
            .iter()
            .map(|shard| map_bytes(shard.capacity(), entry))
            .sum();
        shards + self.heap_bytes + self.mirror_bytes + self.sets.capacity() * size_of::<Set>()
    }

    /// Blocks in memory, those of dead sets included.
    #[cfg(test)]
    pub fn entry_count(&self) -> usize {
        self.shards.iter().map(Shard::len).sum()
    }

    /// Take in what a rank's replica tells.
    pub fn apply_cache_update(
        &mut self,
        worker: WorkerId,
        update: &CacheUpdate<'_>,
    ) -> Result<(), CacheUpdateError> {
        self.sweep_dead_sets();
        match *update {
            CacheUpdate::Begin => {
                let set = self.open_set();
                let rank = self.ranks.entry(worker).or_default();
                if let Some(before) = rank.loading.replace(set) {
                    self.close_set(before);
                }
            }
            CacheUpdate::Changed {
                changes,
                page_tokens,
                bytes,
            } => {
                let rank = self
                    .ranks
                    .get_mut(&worker)
                    .ok_or(CacheUpdateError::Forgotten)?;
                rank.page_tokens = page_tokens;
                self.mirror_bytes = self.mirror_bytes - rank.mirror_bytes + bytes;
                rank.mirror_bytes = bytes;
                let set = rank
                    .loading
                    .or(rank.in_use)
                    .ok_or(CacheUpdateError::Forgotten)?;
                for change in changes {
                    match *change {
                        BlockChange::Hold(hash) => self.hold_block(set, hash),
                        BlockChange::Drop(hash) => self.drop_block(set, hash),
                    }
                }
                if self.bytes() > self.max_bytes {
                    return Err(CacheUpdateError::Full {
                        max_bytes: self.max_bytes,
                    });
                }
            }
            CacheUpdate::Serve { is_exact } => {
                let rank = self
                    .ranks
                    .get_mut(&worker)
                    .ok_or(CacheUpdateError::Forgotten)?;
                rank.is_exact = is_exact;
                if let Some(new) = rank.loading.take()
                    && let Some(before) = rank.in_use.replace(new)
                {
                    self.close_set(before);
                }
            }
            CacheUpdate::MarkInexact => {
                if let Some(rank) = self.ranks.get_mut(&worker) {
                    rank.is_exact = false;
                }
            }
            CacheUpdate::Forget => self.forget_worker(worker),
        }
        Ok(())
    }

    /// The rank is gone. O(1); its memory follows.
    pub fn forget_worker(&mut self, worker: WorkerId) {
        if let Some(rank) = self.ranks.remove(&worker) {
            self.mirror_bytes -= rank.mirror_bytes;
            [rank.in_use, rank.loading]
                .into_iter()
                .flatten()
                .for_each(|set| self.close_set(set));
        }
    }

    /// How many blocks of `path` each of `workers` (sorted) holds, into `held`; returns how many
    /// anybody holds. Sets that are guesses answer too. Cost: one look-up for each doubling of the
    /// path, and as many again for each length at which holders get fewer.
    pub fn held_by(&mut self, path: &[u64], workers: &[WorkerId], held: &mut [usize]) -> usize {
        debug_assert!(workers.is_sorted() && workers.len() == held.len());
        held.fill(0);
        let deepest = self.measure_depths(path);
        if deepest > 0 {
            for (worker, depth) in workers.iter().zip(held) {
                let set = self.ranks.get(worker).and_then(|rank| rank.in_use);
                *depth = set.map_or(0, |set| self.depths[set as usize]);
            }
        }
        deepest
    }

    /// Fill `depths`: blocks of `path` held by each set in use.
    fn measure_depths(&mut self, path: &[u64]) -> usize {
        let mut active = std::mem::take(&mut self.active);
        let mut depths = std::mem::take(&mut self.depths);
        depths.clear();
        depths.resize(self.sets.len(), 0);
        active.clear();
        active.resize(self.sets.len().div_ceil(WORD), 0);
        for set in self.ranks.values().filter_map(|rank| rank.in_use) {
            active[set as usize / WORD] |= 1 << (set as usize % WORD);
        }
        // All of `active` hold path[..at].
        let mut depth = 0;
        while active.iter().any(|word| *word != 0) {
            depth = self.common_end(path, depth, &active);
            let next = path.get(depth).and_then(|hash| self.holders_of(*hash));
            for (word, bits) in active.iter_mut().enumerate() {
                let stay = next.map_or(0, |holders| holders.holder_word(word));
                let mut leaving = *bits & !stay;
                *bits &= stay;
                while leaving != 0 {
                    depths[word * WORD + leaving.trailing_zeros() as usize] = depth;
                    leaving &= leaving - 1;
                }
            }
            depth += 1;
        }
        let deepest = depths.iter().copied().max().unwrap_or(0);
        self.active = active;
        self.depths = depths;
        deepest
    }

    /// The longest path[..end] that all of `active` hold; they hold path[..at].
    fn common_end(&self, path: &[u64], start: usize, active: &[u64]) -> usize {
        let all_hold = |end: usize| {
            let mut words = active.iter().enumerate();
            let holders = self.holders_of(path[end - 1]);
            holders
                .is_some_and(|holders| words.all(|(at, word)| word & !holders.holder_word(at) == 0))
        };
        let mut low = start;
        let mut step = 1;
        while low + step <= path.len() && all_hold(low + step) {
            low += step;
            step *= 2;
        }
        let mut high = (low + step).min(path.len() + 1); // not all hold path[..high]
        while high - low > 1 {
            let middle = (low + high) / 2;
            if all_hold(middle) {
                low = middle;
            } else {
                high = middle;
            }
        }
        low
    }

    fn holders_of(&self, hash: u64) -> Option<&Holders> {
        self.shards[shard_of(hash)].get(&hash)
    }

    fn blocks_of(&self, set: u32) -> usize {
        match self.sets[set as usize] {
            Set::Used { blocks } => blocks,
            Set::Free | Set::Dead { .. } => 0,
        }
    }

    // --- sets

    fn open_set(&mut self) -> u32 {
        let set = self.free.pop().unwrap_or_else(|| {
            self.sets.push(Set::Free);
            (self.sets.len() - 1) as u32
        });
        self.sets[set as usize] = Set::Used { blocks: 0 };
        set
    }

    fn close_set(&mut self, set: u32) {
        if self.blocks_of(set) == 0 {
            self.sets[set as usize] = Set::Free;
            self.free.push(set);
        } else {
            self.sets[set as usize] = Set::Dead { shards: SHARDS };
            self.dead += 1;
        }
    }

    fn hold_block(&mut self, set: u32, hash: u64) {
        let shard = &mut self.shards[shard_of(hash)];
        let is_new = match shard.entry(hash) {
            Entry::Vacant(place) => {
                place.insert(Holders::One(set));
                true
            }
            Entry::Occupied(mut place) => {
                let holders = place.get_mut();
                let before = holders.heap_bytes();
                let is_new = holders.insert(set);
                self.heap_bytes = self.heap_bytes - before + holders.heap_bytes();
                is_new
            }
        };
        if is_new && let Set::Used { blocks } = &mut self.sets[set as usize] {
            *blocks += 1;
        }
    }

    fn drop_block(&mut self, set: u32, hash: u64) {
        let shard = &mut self.shards[shard_of(hash)];
        let Some(holders) = shard.get_mut(&hash).filter(|holders| holders.has(set)) else {
            return;
        };
        let bytes = holders.heap_bytes();
        if holders.remove(set) {
            self.heap_bytes -= bytes;
            shard.remove(&hash);
        }
        if let Set::Used { blocks } = &mut self.sets[set as usize] {
            *blocks -= 1;
        }
    }

    /// Take dead sets out of the next few shards.
    fn sweep_dead_sets(&mut self) {
        for _ in 0..SWEEP {
            if self.dead == 0 {
                return;
            }
            let is_dead = |set: &Set| matches!(set, Set::Dead { .. });
            let dead: Vec<u32> = (0..self.sets.len() as u32)
                .filter(|set| is_dead(&self.sets[*set as usize]))
                .collect();
            let heap_bytes = &mut self.heap_bytes;
            let shard = &mut self.shards[self.sweep_at];
            shard.retain(|_, holders| {
                let bytes = holders.heap_bytes();
                let is_left = !dead
                    .iter()
                    .any(|set| holders.has(*set) && holders.remove(*set));
                *heap_bytes -= if is_left { 0 } else { bytes };
                is_left
            });
            if shard.len() < shard.capacity() / 4 {
                shard.shrink_to(shard.len() * 2);
            }
            self.sweep_at = (self.sweep_at + 1) % SHARDS;
            for set in dead {
                let place = &mut self.sets[set as usize];
                match place {
                    Set::Dead { shards: 1 } => {
                        *place = Set::Free;
                        self.free.push(set);
                        self.dead -= 1;
                    }
                    Set::Dead { shards } => *shards -= 1,
                    Set::Free | Set::Used { .. } => {}
                }
            }
        }
    }
}

fn shard_of(hash: u64) -> usize {
    (hash >> 58) as usize
}
