//! Replicas and index against naive engines: per rank a multiset of stored token prefixes, page by
//! page.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::prelude::*;

use super::*;
use crate::prompt::TokenChain;
use crate::types::WorkerId;

/// Tokens of a router block.
const BLOCK: usize = 4;
const RANKS: usize = 3;
/// Pages that divide the router's block, equal it, are a multiple of it, and fit not at all.
const PAGES: [usize; 6] = [1, 2, 4, 8, 3, 6];

type Prefix = Vec<u32>;

#[derive(Debug, Clone)]
enum Op {
    /// The pages of a prompt that are not stored are stored.
    Store(Prefix),
    /// vLLM: the same content once more, in other pages.
    Again(Prefix),
    /// A leaf goes.
    Evict(usize),
    /// Any block goes, inner ones too.
    Remove(usize),
    /// SGLang splits a node: its pages leave and return in one batch.
    Split(usize),
    Clear,
    Restart,
    /// The worker left the router's list.
    Leave,
    /// The reader asks for everything.
    Snapshot,
}

/// Delivery of the batch of an op.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Arrives,
    Lost,
    Twice,
}

/// Reaction of a reader to a gap.
#[derive(Debug, Clone, Copy)]
enum Cure {
    Snapshot,
    Replay,
    Skip,
}

#[derive(Default)]
struct Engine {
    seed: u64,
    page: usize,
    copies: BTreeMap<Prefix, u32>,
    /// Numbered by place.
    log: Vec<Vec<KvEvent>>,
}

impl Engine {
    fn new(seed: u64, page: usize) -> Self {
        let log = vec![vec![KvEvent::Cleared]];
        Self {
            seed,
            page,
            log,
            ..Self::default()
        }
    }

    fn hash(&self, prefix: &[u32]) -> EngineHash {
        let mut hasher = DefaultHasher::new();
        (self.seed, prefix).hash(&mut hasher);
        hasher.finish()
    }

    fn stored(&self, prefix: &[u32], pages: usize) -> KvEvent {
        let first = prefix.len() - pages * self.page;
        let ends = (1..=pages).map(|i| first + i * self.page);
        KvEvent::Stored(StoredBlocks {
            hashes: ends.map(|end| self.hash(&prefix[..end])).collect(),
            parent: (first > 0).then(|| self.hash(&prefix[..first])),
            tokens: prefix[first..].to_vec(),
            block_tokens: self.page as u32,
            ..StoredBlocks::default()
        })
    }

    fn removed(&self, prefix: &[u32]) -> KvEvent {
        KvEvent::Removed(vec![self.hash(prefix)])
    }

    /// Stored and reachable: every page before it is stored too.
    fn is_held(&self, prefix: &[u32]) -> bool {
        let mut ends = (1..=prefix.len() / self.page).map(|i| i * self.page);
        ends.all(|end| self.copies.contains_key(&prefix[..end]))
    }

    fn held(&self) -> impl Iterator<Item = &Prefix> {
        self.copies.keys().filter(|prefix| self.is_held(prefix))
    }

    fn held_tokens(&self, prompt: &[u32]) -> usize {
        let ends = (0..=prompt.len() / self.page).map(|i| i * self.page);
        ends.take_while(|end| *end == 0 || self.copies.contains_key(&prompt[..*end]))
            .last()
            .unwrap_or(0)
    }

    fn pick(&self, at: usize, passes: impl Fn(&Prefix) -> bool) -> Option<Prefix> {
        let all: Vec<&Prefix> = self.copies.keys().filter(|prefix| passes(prefix)).collect();
        (!all.is_empty()).then(|| all[at % all.len()].clone())
    }

    fn has_longer(&self, prefix: &Prefix) -> bool {
        let mut others = self.copies.keys();
        others.any(|other| other.len() > prefix.len() && other.starts_with(prefix))
    }

    /// Do it and return what is announced.
    fn run(&mut self, op: &Op) -> Vec<KvEvent> {
        let whole = |tokens: &Prefix, page: usize| tokens[..tokens.len() / page * page].to_vec();
        match op {
            Op::Store(tokens) => {
                let prefix = whole(tokens, self.page);
                let held = self.held_tokens(&prefix);
                let pages = (prefix.len() - held) / self.page;
                for i in 1..=pages {
                    *self
                        .copies
                        .entry(prefix[..held + i * self.page].to_vec())
                        .or_default() += 1;
                }
                if pages == 0 {
                    vec![]
                } else {
                    vec![self.stored(&prefix, pages)]
                }
            }
            Op::Again(tokens) => {
                let prefix = whole(tokens, self.page);
                let held = self.held_tokens(&prefix);
                if held == 0 {
                    return vec![];
                }
                *self.copies.entry(prefix[..held].to_vec()).or_default() += 1;
                vec![self.stored(&prefix[..held], 1)]
            }
            Op::Evict(at) => {
                let found = self.pick(*at, |prefix| !self.has_longer(prefix));
                found.map_or(vec![], |prefix| self.take(&prefix))
            }
            Op::Remove(at) => {
                let found = self.pick(*at, |_| true);
                found.map_or(vec![], |prefix| self.take(&prefix))
            }
            Op::Split(at) => match self.pick(*at, |prefix| self.is_held(prefix)) {
                Some(prefix) => vec![self.removed(&prefix), self.stored(&prefix, 1)],
                None => vec![],
            },
            Op::Clear => {
                self.copies.clear();
                vec![KvEvent::Removed(vec![7]), KvEvent::Cleared]
            }
            Op::Restart | Op::Leave | Op::Snapshot => vec![],
        }
    }

    fn take(&mut self, prefix: &Prefix) -> Vec<KvEvent> {
        let copies = self.copies.get_mut(prefix).expect("it was picked");
        *copies -= 1;
        if *copies == 0 {
            self.copies.remove(prefix);
        }
        vec![self.removed(prefix)]
    }

    /// Everything stored, parents first. What lies behind a hole cannot be announced so: it is
    /// evicted before.
    fn snapshot(&mut self) -> Vec<KvEvent> {
        let held: BTreeSet<Prefix> = self.held().cloned().collect();
        let orphans = self.copies.keys().filter(|prefix| !held.contains(*prefix));
        let orphans: Vec<Prefix> = orphans.cloned().collect();
        let mut removed = Vec::new();
        for prefix in &orphans {
            while self.copies.contains_key(prefix) {
                removed.extend(self.take(prefix));
            }
        }
        self.log.push(removed);
        let copies = |prefix: &Prefix| self.copies[prefix] as usize;
        let stored = |prefix: &Prefix| vec![self.stored(prefix, 1); copies(prefix)];
        held.iter().flat_map(stored).collect()
    }
}

struct World {
    engines: Vec<Engine>,
    replicas: Vec<CacheReplica>,
    index: KvIndex,
}

impl World {
    fn new(pages: &[usize]) -> Self {
        let engines = pages.iter().enumerate();
        Self {
            engines: engines
                .map(|(at, page)| Engine::new(at as u64, *page))
                .collect(),
            replicas: pages.iter().map(|_| CacheReplica::new(BLOCK)).collect(),
            index: KvIndex::new(usize::MAX),
        }
    }

    fn deliver(&mut self, at: usize, number: usize) -> ApplyResult {
        let worker = WorkerId(at as u64);
        let events = self.engines[at].log[number].clone();
        let index = &mut self.index;
        self.replicas[at]
            .apply_batch(number as u64, &events, &mut |update| {
                index.apply_cache_update(worker, &update)
            })
            .expect("events of an engine that keeps the rules")
    }

    fn snapshot(&mut self, at: usize) {
        let worker = WorkerId(at as u64);
        let events = self.engines[at].snapshot();
        let next = self.engines[at].log.len();
        let index = &mut self.index;
        self.replicas[at]
            .apply_snapshot(next as u64, &events, &mut |update| {
                index.apply_cache_update(worker, &update)
            })
            .expect("a snapshot");
    }

    fn forget(&mut self, at: usize) {
        let worker = WorkerId(at as u64);
        let index = &mut self.index;
        self.replicas[at]
            .forget_copy(&mut |update| index.apply_cache_update(worker, &update))
            .expect("forgetting");
    }

    fn step(&mut self, at: usize, op: &Op, way: Way, cure: Cure) {
        match op {
            Op::Restart => {
                self.forget(at);
                self.engines[at] = Engine::new(self.engines[at].seed + 10, self.engines[at].page);
                assert_eq!(self.deliver(at, 0), ApplyResult::Applied);
                return;
            }
            Op::Leave => {
                self.forget(at);
                return;
            }
            Op::Snapshot => {
                self.snapshot(at);
                return;
            }
            _ => {}
        }
        let events = self.engines[at].run(op);
        let number = self.engines[at].log.len();
        self.engines[at].log.push(events);
        if way == Way::Lost {
            return;
        }
        let expected = self.replicas[at].next_batch();
        if let ApplyResult::Gap { first } = self.deliver(at, number) {
            assert_eq!(first, expected.unwrap_or(0));
            assert!(first < number as u64);
            self.cure(at, first as usize, number, cure);
        }
        if way == Way::Twice {
            assert_eq!(self.deliver(at, number), ApplyResult::Old);
        }
    }

    fn cure(&mut self, at: usize, first: usize, number: usize, cure: Cure) {
        match cure {
            Cure::Snapshot => self.snapshot(at),
            Cure::Replay => {
                for missing in first..=number {
                    assert_eq!(self.deliver(at, missing), ApplyResult::Applied);
                }
            }
            Cure::Skip => {
                let worker = WorkerId(at as u64);
                let index = &mut self.index;
                self.replicas[at]
                    .skip_to(number as u64, &mut |update| {
                        index.apply_cache_update(worker, &update)
                    })
                    .expect("skipping");
                assert_eq!(self.deliver(at, number), ApplyResult::Applied);
            }
        }
    }

    /// Blocks of the prompt that each rank holds.
    fn held_by(&mut self, prompt: &[u32]) -> Vec<usize> {
        let workers: Vec<WorkerId> = (0..RANKS as u64).map(WorkerId).collect();
        let mut held = vec![0; RANKS];
        let deepest = self.index.held_by(&chain(prompt), &workers, &mut held);
        assert_eq!(deepest, held.iter().copied().max().unwrap_or(0));
        held
    }

    fn check(&mut self, prompt: &[u32]) {
        let held = self.held_by(prompt);
        for (at, engine) in self.engines.iter().enumerate() {
            let rank = self.index.rank_entry(WorkerId(at as u64));
            let replica = &self.replicas[at];
            assert_eq!(rank.is_some_and(|rank| rank.is_exact), replica.is_exact());
            if !replica.is_exact() || replica.next_batch() != Some(engine.log.len() as u64) {
                continue; // it does not know yet what it lost
            }
            let claimed = rank.map_or(0, |rank| rank.cached_tokens(held[at], BLOCK, usize::MAX));
            let true_tokens = engine.held_tokens(prompt);
            assert!(
                claimed <= true_tokens,
                "rank {at}: {claimed} of {true_tokens}"
            );
            if engine.page.is_multiple_of(BLOCK) || BLOCK.is_multiple_of(engine.page) {
                assert_eq!(claimed, true_tokens / BLOCK * BLOCK, "rank {at}");
            }
            let blocks: BTreeSet<&[u32]> = engine
                .held()
                .flat_map(|prefix| (1..=prefix.len() / BLOCK).map(|i| &prefix[..i * BLOCK]))
                .collect();
            assert_eq!(rank.map(|rank| rank.blocks), Some(blocks.len()));
        }
    }
}

fn chain(prompt: &[u32]) -> Vec<u64> {
    let mut chain = TokenChain::new("");
    prompt
        .chunks_exact(BLOCK)
        .map(|block| chain.push_block(block))
        .collect()
}

fn tokens() -> impl Strategy<Value = Prefix> {
    // Runs of equal tokens, so that prompts share long prefixes and part anywhere.
    proptest::collection::vec((0u32..2, 1usize..7), 0..6).prop_map(|runs| {
        let runs = runs.into_iter();
        runs.flat_map(|(token, n)| std::iter::repeat_n(token, n))
            .collect()
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        10 => tokens().prop_map(Op::Store),
        2 => tokens().prop_map(Op::Again),
        4 => any::<usize>().prop_map(Op::Evict),
        2 => any::<usize>().prop_map(Op::Remove),
        2 => any::<usize>().prop_map(Op::Split),
        1 => Just(Op::Clear),
        1 => Just(Op::Restart),
        1 => Just(Op::Leave),
        1 => Just(Op::Snapshot),
    ]
}

fn step() -> impl Strategy<Value = (usize, Op, Way, Cure)> {
    let way = prop_oneof![8 => Just(Way::Arrives), 1 => Just(Way::Lost), 1 => Just(Way::Twice)];
    let cure = prop_oneof![Just(Cure::Snapshot), Just(Cure::Replay), Just(Cure::Skip)];
    (0..RANKS, op(), way, cure)
}

proptest! {
    #[test]
    fn exact_entries_are_what_the_engines_hold(
        pages in proptest::collection::vec(proptest::sample::select(PAGES.to_vec()), RANKS),
        steps in proptest::collection::vec((step(), tokens()), 1..60),
    ) {
        let mut world = World::new(&pages);
        for ((at, op, way, cure), prompt) in &steps {
            world.step(*at, op, *way, *cure);
            world.check(prompt);
            if let Some(stored) = world.engines[*at].copies.keys().next_back().cloned() {
                world.check(&stored);
            }
        }
        // Whatever went wrong before: a snapshot makes it right.
        for at in 0..RANKS {
            world.snapshot(at);
        }
        for (_, prompt) in &steps {
            world.check(prompt);
        }
        prop_assert!((0..RANKS).all(|at| world.replicas[at].is_exact()));
        // And nothing stays behind when all have left.
        for at in 0..RANKS {
            world.forget(at);
        }
        for _ in 0..80 {
            world.index.apply_cache_update(WorkerId(9), &CacheUpdate::Begin).expect("room");
            world.index.forget_worker(WorkerId(9));
        }
        prop_assert_eq!(world.index.entry_count(), 0);
        prop_assert!(world.held_by(&[0; 12]).iter().all(|held| *held == 0));
    }
}
