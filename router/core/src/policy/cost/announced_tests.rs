//! Cached blocks that workers announce, as `cost` uses them.

use super::tests::{cost, prefill};
use super::*;
use crate::kv::{ApplyResult, CacheReplica, KvEvent, ReplicaError, StoredBlocks};
use crate::policy::testing::{TestSender, chosen, rng, views};
use crate::prompt::{TokenChain, token_blocks};
use crate::types::SendTicket;

/// `ids` as they would be cached: a snapshot, or what a batch adds.
fn announced(ids: &[u32], page: usize, parent: usize) -> KvEvent {
    let name = |end: usize| TokenChain::new("engine").push_block(&ids[..end]);
    KvEvent::Stored(StoredBlocks {
        hashes: (parent / page + 1..=ids.len() / page)
            .map(|i| name(i * page))
            .collect(),
        parent: (parent > 0).then(|| name(parent)),
        tokens: ids[parent..ids.len() / page * page].to_vec(),
        block_tokens: page as u32,
        ..StoredBlocks::default()
    })
}

struct Announcing {
    policy: CostPolicy,
    sender: TestSender,
    replica: CacheReplica,
}

impl Announcing {
    const PAGE: usize = 4;

    fn new() -> Self {
        Self {
            policy: prefill(2),
            sender: TestSender::default(),
            replica: CacheReplica::new(Self::PAGE),
        }
    }

    fn announce(&mut self, number: u64, events: &[KvEvent]) -> ApplyResult {
        let policy = &self.policy;
        let send_update =
            &mut |update: CacheUpdate<'_>| policy.apply_cache_update(WorkerId(0), &update);
        self.replica
            .apply_batch(number, events, send_update)
            .expect("good events")
    }

    /// Tokens that worker 0 is expected to find in its cache.
    fn expected(&self, ids: &[u32]) -> u32 {
        let blocks = token_blocks(ids, Self::PAGE, "");
        let request = RequestView {
            prompt: blocks.prompt_view(),
            now_ms: self.sender.now_ms,
            ..RequestView::default()
        };
        let ready = views(&[0, 0]);
        let mut state = self.policy.lock_state();
        let (options, _) = state.estimate_costs(&request, &ready);
        options[0].terms.cached_tokens as u32
    }

    fn routed(&mut self, ids: &[u32]) -> SendTicket {
        self.sender.tickets += 1;
        let blocks = token_blocks(ids, Self::PAGE, "");
        let request = RequestView {
            prompt: blocks.prompt_view(),
            now_ms: self.sender.now_ms,
            ..RequestView::default()
        };
        let ticket = SendTicket(self.sender.tickets);
        self.policy.observe(&PolicyEvent::Routed {
            ticket,
            worker: WorkerId(0),
            request: &request,
            reports_first_token: true,
        });
        ticket
    }

    fn finished(&mut self, ticket: SendTicket, ids: &[u32], is_kept: bool) {
        let blocks = token_blocks(ids, Self::PAGE, "");
        self.policy.observe(&PolicyEvent::Finished {
            ticket,
            worker: WorkerId(0),
            is_kept,
            hashes: blocks.prompt_view().hashes,
            now_ms: self.sender.now_ms,
        });
    }
}

#[test]
fn announced_prefixes_are_exact_and_bookings_fill_the_time_until_then() {
    let mut world = Announcing::new();
    let ids: Vec<u32> = (0..21).collect();
    assert_eq!(world.announce(0, &[KvEvent::Cleared]), ApplyResult::Applied);
    assert_eq!(world.expected(&ids), 0);
    let ticket = world.routed(&ids);
    assert_eq!(world.expected(&ids), 20, "it is about to be computed");
    assert_eq!(
        world.expected(&ids[..20]),
        16,
        "the last token is computed always"
    );
    world.finished(ticket, &ids, true);
    // It is announced in part; the booking lasts a little, and then only what is stored counts.
    assert_eq!(
        world.announce(1, &[announced(&ids[..12], 4, 0)]),
        ApplyResult::Applied
    );
    assert_eq!(world.expected(&ids), 20);
    world.sender.now_ms += 2_001;
    assert_eq!(world.expected(&ids), 12);
    // Evicted.
    let KvEvent::Stored(last) = announced(&ids[..12], 4, 8) else {
        unreachable!("it is made so")
    };
    assert_eq!(
        world.announce(2, &[KvEvent::Removed(last.hashes)]),
        ApplyResult::Applied
    );
    assert_eq!(world.expected(&ids), 8);
}

#[test]
fn failed_request_leaves_no_booking_and_a_silent_one_not_for_long() {
    let mut world = Announcing::new();
    let ids: Vec<u32> = (0..21).collect();
    world.announce(0, &[KvEvent::Cleared]);
    let ticket = world.routed(&ids);
    world.finished(ticket, &ids, false);
    assert_eq!(world.expected(&ids), 0);
    world.routed(&ids);
    assert_eq!(world.expected(&ids), 20);
    world.sender.now_ms += 60_001;
    assert_eq!(world.expected(&ids), 0);
}

#[test]
fn missed_batch_halves_what_is_believed_until_a_snapshot() {
    let mut world = Announcing::new();
    let ids: Vec<u32> = (0..33).collect();
    world.announce(0, &[KvEvent::Cleared, announced(&ids, 4, 0)]);
    assert_eq!(world.expected(&ids), 32);
    assert_eq!(world.announce(2, &[]), ApplyResult::Gap { first: 1 });
    let policy = &world.policy;
    let send_update =
        &mut |update: CacheUpdate<'_>| policy.apply_cache_update(WorkerId(0), &update);
    world.replica.mark_inexact(send_update).expect("taken in");
    assert_eq!(world.expected(&ids), 16);
    world
        .replica
        .apply_snapshot(3, &[announced(&ids[..8], 4, 0)], send_update)
        .expect("a snapshot");
    assert_eq!(world.expected(&ids), 8);
    // The worker leaves: nothing of it stays, and its replica has to restart.
    world.policy.observe(&PolicyEvent::WorkerGone {
        worker: WorkerId(0),
    });
    assert_eq!(world.expected(&ids), 0);
    let refused = world
        .replica
        .apply_batch(3, &[announced(&ids[..12], 4, 8)], send_update);
    assert_eq!(
        refused,
        Err(ReplicaError::Refused(CacheUpdateError::Forgotten))
    );
}

#[test]
fn announcements_beyond_the_memory_are_refused_and_texts_are_remembered_as_before() {
    let params = CostParams {
        max_bytes: 1 << 16,
        ..CostParams::default()
    };
    let mut world = Announcing {
        policy: cost(Role::Prefill, 2, params),
        ..Announcing::new()
    };
    world.announce(0, &[KvEvent::Cleared]);
    let ids: Vec<u32> = (0..20_000).collect();
    let policy = &world.policy;
    let send_update =
        &mut |update: CacheUpdate<'_>| policy.apply_cache_update(WorkerId(0), &update);
    let refused = world
        .replica
        .apply_batch(1, &[announced(&ids, 4, 0)], send_update);
    assert!(
        matches!(
            refused,
            Err(ReplicaError::Refused(CacheUpdateError::Full { .. }))
        ),
        "{refused:?}"
    );
    world.replica.forget_copy(send_update).expect("taken in");
    TestSender::default().routed(&world.policy, 0, "abcd");
    let why = chosen(&world.policy, "abcd", &views(&[0, 0]), &mut rng(1)).why;
    assert!(matches!(why, SelectionReason::BestHolder(_)), "{why:?}");
    assert!(world.policy.stats(0).index_bytes <= 1 << 16);
}
