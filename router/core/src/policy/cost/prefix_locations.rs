//! Prefixes that each rank holds of a prompt, from three sources.
//!
//! | rank | prompt | held |
//! |---|---|---|
//! | announces its blocks, and no event was missed | of token ids | *announced* ([`crate::kv`]) or *booked*: sent there and not announced yet |
//! | announces, but something was missed | of token ids | the most of announced, booked and remembered; half of it is believed |
//! | else | any | *remembered*: prompts sent there, least recently used out ([`crate::prefix_tree`]) |
//!
//! A booking ends when its request fails, shortly after its first token (the rank announces its
//! blocks then), or when it is too old. The bookings of a rank are one tree of paths; what no
//! booking that lasts was made after is dropped from it.

use std::collections::BTreeMap;

use crate::kv::{CacheUpdate, CacheUpdateError, KvIndex, KvRank};
use crate::prefix_tree::{AccessStamp, PrefixTree};
use crate::prompt::PromptView;
use crate::types::WorkerId;

/// How long after a first token the rank's announcement may take [ms]. It comes with the token, or
/// a step later.
const ANNOUNCED_MS: f64 = 2_000.0;
/// Longest booking [ms]: a request that does not stream shows no first token.
const IN_FLIGHT_MS: f64 = 60_000.0;
/// Confidence in a rank's entry when announcements were missed.
const INEXACT_DISCOUNT: f64 = 0.5;
/// Above this share of found prefixes announcements are taken at their word; below, the rank reuses
/// less than it stores.
const TRUSTED: f64 = 0.95;

/// Cached part of one prompt at one rank.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct HeldPrefix {
    pub blocks: usize,
    source: Source,
}

#[derive(Debug, Clone, Copy, Default)]
enum Source {
    #[default]
    Remembered,
    Announced(KvRank),
    Doubtful,
}

impl HeldPrefix {
    /// True if the rank announced what it holds, and nothing was missed.
    pub fn is_announced(self) -> bool {
        matches!(self.source, Source::Announced(_))
    }

    /// Tokens that need not be computed, of `tokens` in blocks of `tokens_per_block`.
    pub fn cached_tokens(self, tokens: f64, tokens_per_block: f64, confidence: f64) -> f64 {
        let believed = |share: f64| (self.blocks as f64 * tokens_per_block * share).min(tokens);
        match self.source {
            Source::Remembered => believed(confidence),
            Source::Doubtful => believed(confidence * INEXACT_DISCOUNT),
            Source::Announced(rank) => {
                let block_tokens = tokens_per_block.round() as usize;
                let cached = rank.cached_tokens(self.blocks, block_tokens, tokens as usize) as f64;
                if confidence >= TRUSTED {
                    cached
                } else {
                    cached * confidence
                }
            }
        }
    }
}

/// Note about one request.
#[derive(Debug, Clone, Copy)]
pub(super) enum InsertionReceipt {
    Remembered(AccessStamp),
    Booked(AccessStamp),
}

#[derive(Debug)]
pub(super) struct PrefixLocations {
    remembered: PrefixTree<[u64]>,
    announced: KvIndex,
    in_flight: PrefixTree<[u64]>,
    /// When each booking ends, in the order they were made.
    in_flight_ends: BTreeMap<WorkerId, BTreeMap<AccessStamp, f64>>,
    max_bytes: usize,
    /// Buffer of `held_by`.
    depths: Vec<usize>,
}

impl PrefixLocations {
    pub fn new(max_bytes: usize) -> Self {
        Self {
            remembered: PrefixTree::new(max_bytes),
            announced: KvIndex::new(max_bytes / 8 * 5),
            in_flight: PrefixTree::new(max_bytes / 8),
            in_flight_ends: BTreeMap::new(),
            max_bytes,
            depths: Vec::new(),
        }
    }

    pub fn add_worker(&mut self, worker: WorkerId) {
        self.remembered.add_worker(worker, usize::MAX);
        self.in_flight.add_worker(worker, usize::MAX);
    }

    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.announced.forget_worker(worker);
        self.in_flight_ends.remove(&worker);
        for tree in [&mut self.remembered, &mut self.in_flight] {
            while tree.retire_worker(worker, usize::MAX) {}
        }
    }

    /// Apply an update of a rank's replica.
    pub fn apply_cache_update(
        &mut self,
        worker: WorkerId,
        update: &CacheUpdate<'_>,
    ) -> Result<(), CacheUpdateError> {
        let result = self.announced.apply_cache_update(worker, update);
        // What is announced goes before what is remembered, up to its share.
        let left = self.max_bytes - self.max_bytes / 8;
        let left = left.saturating_sub(self.announced.bytes());
        self.remembered.limit_bytes(left.max(self.max_bytes / 4));
        result
    }

    /// The rank's announced entry, if it has one.
    pub fn announced_rank(&self, worker: WorkerId) -> Option<KvRank> {
        self.announced.rank_entry(worker)
    }

    /// Write into `held` what each of `workers` (sorted) holds of the prompt; returns how many
    /// blocks anybody holds.
    pub fn held_by(
        &mut self,
        prompt: &PromptView<'_>,
        workers: &[WorkerId],
        held: &mut Vec<HeldPrefix>,
        now_ms: f64,
    ) -> usize {
        self.expire_bookings(now_ms);
        let depths = &mut self.depths;
        depths.clear();
        depths.resize(workers.len(), 0);
        let mut deepest = self.remembered.held_by(prompt.hashes, workers, depths);
        held.clear();
        held.extend(depths.iter().map(|&blocks| HeldPrefix {
            blocks,
            source: Source::Remembered,
        }));
        if self.announced.is_idle() || !prompt.is_of_tokens() {
            return deepest;
        }
        deepest = deepest.max(self.announced.held_by(prompt.hashes, workers, depths));
        for ((worker, held), &announced) in workers.iter().zip(held.iter_mut()).zip(&*depths) {
            match self.announced.rank_entry(*worker) {
                Some(rank) if rank.is_exact => {
                    *held = HeldPrefix {
                        blocks: announced,
                        source: Source::Announced(rank),
                    };
                }
                Some(_) => {
                    let blocks = announced.max(held.blocks);
                    *held = HeldPrefix {
                        blocks,
                        source: Source::Doubtful,
                    };
                }
                None => {}
            }
        }
        if !self.in_flight_ends.is_empty() {
            deepest = deepest.max(self.in_flight.held_by(prompt.hashes, workers, depths));
            for (held, &in_flight) in held.iter_mut().zip(&*depths) {
                held.blocks = held.blocks.max(in_flight);
            }
        }
        deepest
    }

    /// Blocks in the rank's entry.
    pub fn size_of(&self, worker: WorkerId) -> usize {
        match self.announced.rank_entry(worker) {
            Some(rank) if rank.is_exact => rank.blocks,
            _ => self.remembered.units_of(worker),
        }
    }

    /// The prompt was sent there. `most`: blocks its cache has room for, if that is known.
    pub fn record_sent(
        &mut self,
        worker: WorkerId,
        prompt: &PromptView<'_>,
        max_blocks: Option<usize>,
        now_ms: f64,
    ) -> InsertionReceipt {
        let is_exact = self
            .announced
            .rank_entry(worker)
            .is_some_and(|rank| rank.is_exact);
        if is_exact && prompt.is_of_tokens() {
            let stamp = self.in_flight.insert(worker, prompt.hashes);
            self.in_flight_ends
                .entry(worker)
                .or_default()
                .insert(stamp, now_ms + IN_FLIGHT_MS);
            return InsertionReceipt::Booked(stamp);
        }
        if let Some(most) = max_blocks {
            self.remembered.add_worker(worker, most);
        }
        InsertionReceipt::Remembered(self.remembered.insert(worker, prompt.hashes))
    }

    /// Note that it was prefilled: the rank announces what it stored.
    pub fn record_prefilled(&mut self, worker: WorkerId, receipt: InsertionReceipt, now_ms: f64) {
        if let InsertionReceipt::Booked(stamp) = receipt
            && let Some(in_flight_ends) = self.in_flight_ends.get_mut(&worker)
            && let Some(end_ms) = in_flight_ends.get_mut(&stamp)
        {
            *end_ms = end_ms.min(now_ms + ANNOUNCED_MS);
        }
    }

    /// Note that it failed before it was prefilled: take back what it alone claimed beyond the
    /// first `keep` blocks.
    pub fn retract_failed(
        &mut self,
        worker: WorkerId,
        hashes: &[u64],
        receipt: InsertionReceipt,
        keep: usize,
    ) {
        match receipt {
            InsertionReceipt::Remembered(stamp) => {
                self.remembered.retract(worker, hashes, stamp, keep)
            }
            InsertionReceipt::Booked(stamp) => {
                self.in_flight.retract(worker, hashes, stamp, 0);
                if let Some(in_flight_ends) = self.in_flight_ends.get_mut(&worker) {
                    in_flight_ends.remove(&stamp);
                }
            }
        }
    }

    /// Drop the bookings that are over.
    fn expire_bookings(&mut self, now_ms: f64) {
        let in_flight = &mut self.in_flight;
        self.in_flight_ends.retain(|worker, in_flight_ends| {
            let before = in_flight_ends.len();
            while let Some(first) = in_flight_ends.first_entry()
                && *first.get() <= now_ms
            {
                first.remove();
            }
            if in_flight_ends.len() < before || in_flight_ends.is_empty() {
                in_flight.expire_older(
                    *worker,
                    in_flight_ends.first_key_value().map(|(stamp, _)| *stamp),
                );
            }
            !in_flight_ends.is_empty()
        });
    }

    /// Estimated memory.
    pub fn bytes(&self) -> usize {
        self.remembered.bytes() + self.in_flight.bytes() + self.announced.bytes()
    }

    /// Blocks dropped for a limit since the start.
    pub fn evicted_total(&self) -> u64 {
        self.remembered.evicted_units_total()
    }
}
