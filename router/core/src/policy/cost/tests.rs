//! The rule against itself written naively, and one test per sentence of the module.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::explain::{CostTerms, PolicyBasis, PolicyTerms, WeighedCandidate};
use crate::policy::testing::{TestSender, blocks, chosen, rng, views};
use crate::prompt::PromptBlocks;
use crate::types::{QueueOrder, RunningLoad, SendTicket, TokenUsage};

pub(super) fn cost(role: Role, workers: u64, params: CostParams) -> CostPolicy {
    let policy = CostPolicy::new(params, role);
    for id in 0..workers {
        policy.observe(&PolicyEvent::WorkerAdded {
            worker: WorkerId(id),
            facts: WorkerFacts::default(),
        });
    }
    policy
}

pub(super) fn prefill(workers: u64) -> CostPolicy {
    cost(Role::Prefill, workers, CostParams::default())
}

/// Teach every worker the speed of the prior, so that later observations find it right.
const MS_PER_BLOCK: f64 = 10.0;

#[test]
fn prefix_wins_until_its_holders_queue_is_longer_than_the_prompt() {
    let policy = prefill(2);
    let mut sender = TestSender::default();
    let long = "abcdefghij".repeat(10); // 10 000 tokens, a second
    let ticket = sender.routed(&policy, 0, &long);
    sender.now_ms = 1_005;
    sender.first_token(&policy, ticket, 0);
    let ready = views(&[0, 0]);
    let mut rng = rng(1);
    let hit = chosen_at(&sender, &policy, &long, &ready, &mut rng);
    assert_eq!(hit.worker, WorkerId(0));
    assert!(
        matches!(hit.why, SelectionReason::BestHolder(f) if f.cached_tokens == 10_000 && f.ttft_ms <= 6),
        "{hit:?}"
    );
    // Half a second queued there: still cheaper than computing a second of prefix again.
    sender.routed(&policy, 0, &"x".repeat(50));
    assert_eq!(
        chosen_at(&sender, &policy, &long, &ready, &mut rng).worker,
        WorkerId(0)
    );
    // Two seconds queued: not any more.
    sender.routed(&policy, 0, &"y".repeat(150));
    let spread = chosen_at(&sender, &policy, &long, &ready, &mut rng);
    assert_eq!(spread.worker, WorkerId(1));
    assert!(
        matches!(spread.why, SelectionReason::Cheaper(f) if f.cached_tokens == 0),
        "{spread:?}"
    );
}

fn chosen_at(
    sender: &TestSender,
    policy: &CostPolicy,
    text: &str,
    ready: &[WorkerView],
    rng: &mut rand::rngs::StdRng,
) -> WorkerChoice {
    sender.choose(policy, text, ready, rng).expect("candidates")
}

#[test]
fn prompt_in_flight_counts_as_cached_and_a_failed_one_does_not() {
    let policy = prefill(3);
    let mut sender = TestSender::default();
    let ticket = sender.routed(&policy, 1, "abcdefgh");
    let ready = views(&[0, 0, 0]);
    let next = chosen_at(&sender, &policy, "abcdefghij", &ready, &mut rng(1));
    assert_eq!(next.worker, WorkerId(1), "{next:?}");
    sender.finished(&policy, ticket, 1, "abcdefgh", false);
    let next = chosen_at(&sender, &policy, "abcdefghij", &ready, &mut rng(1));
    assert!(matches!(next.why, SelectionReason::NoPrefix(_)), "{next:?}");
    assert_eq!(policy.lock_state().tickets.len(), 0);
}

#[test]
fn prefix_that_a_failed_request_shared_with_others_stays() {
    let policy = prefill(2);
    let mut sender = TestSender::default();
    let first = sender.routed(&policy, 0, "abcd");
    let second = sender.routed(&policy, 0, "abxy");
    sender.finished(&policy, first, 0, "abcd", false);
    assert_eq!(policy.lock_state().locations.size_of(WorkerId(0)), 4); // a b x y
    sender.first_token(&policy, second, 0);
    sender.finished(&policy, second, 0, "abxy", false); // the client left while it streamed
    assert_eq!(policy.lock_state().locations.size_of(WorkerId(0)), 4);
}

#[test]
fn beta_makes_a_busy_fleet_keep_prefixes_together() {
    // 400 ms queued at the holder of a prefix of 300 ms: alone, computing again is quicker; in a
    // busy fleet it is dearer.
    let answer = |busy: bool| {
        let policy = prefill(2);
        let mut sender = TestSender::default();
        let shared = "s".repeat(30);
        let ticket = sender.routed(&policy, 0, &shared);
        sender.first_token(&policy, ticket, 0);
        if busy {
            for _ in 0..50 {
                let ticket = sender.routed(&policy, 1, &"z".repeat(100)); // 1 s each
                sender.first_token(&policy, ticket, 1);
                sender.finished(&policy, ticket, 1, "", true);
                policy.lock_state().work.sum += 1_000.0;
            }
        }
        sender.routed(&policy, 0, &"q".repeat(40));
        chosen_at(&sender, &policy, &shared, &views(&[0, 0]), &mut rng(1)).worker
    };
    assert_eq!((answer(false), answer(true)), (WorkerId(1), WorkerId(0)));
}

#[test]
fn hot_prefix_is_copied_early() {
    let answer = |arrivals: usize| {
        let policy = prefill(2);
        let mut sender = TestSender::default();
        let shared = "s".repeat(20); // 200 ms
        for _ in 0..arrivals {
            let ticket = sender.routed(&policy, 0, &shared);
            sender.first_token(&policy, ticket, 0);
        }
        sender.routed(&policy, 0, &"q".repeat(12)); // 120 ms
        chosen_at(&sender, &policy, &shared, &views(&[0, 0]), &mut rng(1)).worker
    };
    assert_eq!((answer(2), answer(40)), (WorkerId(0), WorkerId(1)));
}

#[test]
fn ties_go_to_the_smallest_index_then_to_chance() {
    let policy = prefill(3);
    let mut sender = TestSender::default();
    for worker in [0, 2] {
        let ticket = sender.routed(&policy, worker, &"a".repeat(3 + worker as usize));
        sender.first_token(&policy, ticket, worker);
    }
    let mut rng = rng(3);
    for _ in 0..20 {
        let to = chosen(&policy, "new", &views(&[0, 0, 0]), &mut rng).worker;
        assert_eq!(to, WorkerId(1));
    }
    let policy = prefill(3);
    let mut counts = [0; 3];
    for _ in 0..300 {
        counts[chosen(&policy, "new", &views(&[0, 0, 0]), &mut rng)
            .worker
            .0 as usize] += 1;
    }
    // 100 each, standard deviation 8; six of them.
    assert!(
        counts.iter().all(|n: &i32| (n - 100).abs() < 49),
        "{counts:?}"
    );
}

#[test]
fn small_advantage_does_not_move_a_prompt_from_its_prefix() {
    let policy = prefill(2);
    let mut sender = TestSender::default();
    let ticket = sender.routed(&policy, 0, "p");
    sender.first_token(&policy, ticket, 0);
    // The holder has 14 ms of queue (a miss costs 10 more than a hit, but no queue): within 5 ms.
    sender.routed(&policy, 0, "q");
    let stays = chosen_at(&sender, &policy, "p", &views(&[0, 0]), &mut rng(1));
    assert_eq!(stays.worker, WorkerId(0));
    let eager = cost(
        Role::Prefill,
        2,
        CostParams {
            hysteresis_ms: 0.0,
            hysteresis_fraction: 0.0,
            ..CostParams::default()
        },
    );
    let ticket = sender.routed(&eager, 0, "p");
    sender.first_token(&eager, ticket, 0);
    sender.routed(&eager, 0, "q");
    let moves = chosen_at(&sender, &eager, "p", &views(&[0, 0]), &mut rng(1));
    assert_eq!(moves.worker, WorkerId(1));
}

#[test]
fn stale_reports_mean_a_draw_among_the_four_cheapest() {
    let policy = prefill(6);
    let mut sender = TestSender::default();
    let report = |id: u64, queued_tokens, now_ms| {
        policy.observe(&PolicyEvent::Reported {
            worker: WorkerId(id),
            queued_tokens,
            running: None,
            age_ms: 0,
            now_ms,
        });
    };
    // 0 and 1 are busy with other routers' prompts.
    (0..6).for_each(|id| report(id, if id < 2 { 400_000 } else { 1_000 * id }, 0));
    let ready = views(&[0; 6]);
    let mut rng = rng(7);
    let fresh: BTreeSet<u64> = (0..50)
        .map(|_| {
            chosen_at(&sender, &policy, "new", &ready, &mut rng)
                .worker
                .0
        })
        .collect();
    assert_eq!(fresh, BTreeSet::from([2]));
    sender.now_ms = 20_001; // two intervals, and what was reported of 2 to 5 has run off
    let mut counts = [0; 6];
    for _ in 0..200 {
        let choice = chosen_at(&sender, &policy, "new", &ready, &mut rng);
        assert!(matches!(choice.why, SelectionReason::Sampled(_)));
        counts[choice.worker.0 as usize] += 1;
    }
    assert_eq!(counts[..2], [0, 0]);
    assert!(
        counts[2..].iter().filter(|n| **n > 0).count() >= 3,
        "{counts:?}"
    );
    report(3, 0, 20_002);
    assert!(!matches!(
        chosen_at(&sender, &policy, "new", &ready, &mut rng).why,
        SelectionReason::Sampled(_)
    ));
}

fn pair_of(
    p: &CostPolicy,
    d: &CostPolicy,
    request: &RequestView<'_>,
    ready: [&[WorkerView]; 2],
    seed: u64,
) -> Option<(WorkerChoice, WorkerChoice)> {
    let pair = p.decide_pair(d, request, ready, &mut rng(seed), false);
    pair.map(|[(p, _), (d, _)]| (p, d))
}

fn report_load(policy: &CostPolicy, id: u64, queued_tokens: u64, age_ms: u64, now_ms: u64) {
    policy.observe(&PolicyEvent::Reported {
        worker: WorkerId(id),
        queued_tokens,
        running: None,
        age_ms,
        now_ms,
    });
}

fn backlog_ms(policy: &CostPolicy, now_ms: u64) -> f64 {
    policy.stats(now_ms).ranks[0].backlog_ms
}

#[test]
fn report_counts_what_others_sent_before_it_was_made() {
    let policy = prefill(1);
    let mut sender = TestSender {
        now_ms: 1_000,
        ..TestSender::default()
    };
    sender.routed(&policy, 0, &"a".repeat(10)); // 1000 tokens, 105 ms with its fixed part
    let ours = backlog_ms(&policy, 1_000);
    // Made while ours was there: half of it is others'. A prompt sent after it was made is in
    // neither.
    sender.now_ms = 1_200;
    sender.routed(&policy, 0, &"b".repeat(10));
    report_load(&policy, 0, 2_000, 50, 1_200);
    let both = backlog_ms(&policy, 1_200);
    assert!((both - (ours + 100.0 - 50.0)).abs() < 6.0, "{both}");
    // Ours was finished after the report was made: the report's age has run it off.
    let policy = prefill(1);
    let mut sender = TestSender::default();
    let gone = sender.routed(&policy, 0, &"c".repeat(10));
    sender.now_ms = 105;
    sender.first_token(&policy, gone, 0);
    report_load(&policy, 0, 1_000, 105, 105);
    assert_eq!(backlog_ms(&policy, 105), 0.0);
    // An older report does not replace a newer one, one of nothing is as good as new.
    report_load(&policy, 0, 3_000, 10, 200);
    report_load(&policy, 0, 90_000, 500, 210);
    assert!((backlog_ms(&policy, 210) - 280.0).abs() < 1.0);
    report_load(&policy, 0, 0, 900_000, 220);
    assert_eq!(backlog_ms(&policy, 220), 0.0);
    let ready = views(&[0, 0, 0]);
    let why = chosen_at(&sender, &policy, "new", &ready, &mut rng(1)).why;
    assert!(!matches!(why, SelectionReason::Sampled(_)), "{why:?}");
}

/// Requests and pages of all routers at two decode workers of 1000 pages.
#[derive(Default)]
struct DecodeWorkers([(u64, u64); 2]);

impl DecodeWorkers {
    const PAGES: u64 = 1_000;

    /// `policy` sends a request of `pages` to one of `ready`; returns which.
    fn take(
        &mut self,
        policy: &CostPolicy,
        sender: &mut TestSender,
        ready: &[WorkerView],
        pages: u64,
    ) -> u64 {
        let choice = chosen_at(sender, policy, "new", ready, &mut rng(1));
        sender.routed(policy, choice.worker.0, "new");
        let (requests, used) = &mut self.0[choice.worker.0 as usize];
        *requests += 1;
        *used += pages;
        choice.worker.0
    }

    fn report(&self, policy: &CostPolicy, age_ms: u64, now_ms: u64) {
        for (id, &(requests, pages_used)) in (0..).zip(&self.0) {
            policy.observe(&PolicyEvent::Reported {
                worker: WorkerId(id),
                queued_tokens: 0,
                running: Some(RunningLoad {
                    requests,
                    pages_used,
                    pages: Self::PAGES,
                }),
                age_ms,
                now_ms,
            });
        }
    }
}

#[test]
fn routers_spread_over_decode_workers_by_what_these_report() {
    let [a, b] = [(); 2].map(|()| cost(Role::Decode, 2, CostParams::default()));
    let [mut of_a, mut of_b] = [(); 2].map(|()| TestSender::default());
    let mut workers = DecodeWorkers::default();
    // The second decode worker comes late: all that A has runs on the first.
    let alone = &views(&[0])[..];
    (0..12).for_each(|_| assert_eq!(workers.take(&a, &mut of_a, alone, 1), 0));
    for sent in 0..6 {
        for (router, sender, own) in [(&a, &mut of_a, 12), (&b, &mut of_b, 0)] {
            sender.now_ms += 1_000;
            workers.report(router, 0, sender.now_ms);
            let ready = views(&[own, sent]);
            assert_eq!(workers.take(router, sender, &ready, 1), 1);
        }
    }
    assert_eq!(workers.0, [(12, 12), (12, 12)]);
    // Equal requests, unequal KV.
    workers.0[0].1 = 900;
    of_b.now_ms += 1_000;
    workers.report(&b, 0, of_b.now_ms);
    assert_eq!(workers.take(&b, &mut of_b, &views(&[0, 6]), 1), 1);
}

#[test]
fn bookings_newer_than_a_report_add_to_it_and_older_ones_are_part_of_it() {
    let policy = cost(Role::Decode, 2, CostParams::default());
    let mut sender = TestSender::default();
    let mut workers = DecodeWorkers([(3, 500), (0, 0)]);
    let others = |now_ms: u64| {
        let others = policy.lock_state().ranks[&WorkerId(0)].others_load(now_ms as f64);
        (others.requests, others.kv_tokens)
    };
    let capacity = CostParams::default().default_capacity_tokens as f64;
    let own = 300.0 + 256.0; // prompt and expected answer
    sender.now_ms = 1_000;
    sender.routed(&policy, 0, "old");
    sender.now_ms = 3_000;
    let new = sender.routed(&policy, 0, "new");
    workers.report(&policy, 1_000, 3_000); // made between the two
    assert_eq!(others(3_000), (2, capacity / 2.0 - own));
    assert_eq!(policy.lock_state().ranks[&WorkerId(0)].kv_tokens, 2.0 * own);
    sender.finished(&policy, new, 0, "new", true);
    assert_eq!(policy.lock_state().ranks[&WorkerId(0)].kv_tokens, own);
    // An older report changes nothing, an impossible one is none, and each is forgotten.
    workers.0[0].0 = 9;
    workers.report(&policy, 2_000, 3_000);
    assert_eq!(others(3_000).0, 2);
    assert_eq!(others(2_000 + 30_001), (0, 0.0));
    workers.0[0].0 = u64::MAX;
    workers.report(&policy, 0, 4_000);
    assert_eq!(others(4_000), (0, 0.0));
}

#[test]
fn speed_is_learned_per_worker_and_shared_with_the_unobserved() {
    let policy = prefill(3);
    let mut sender = TestSender::default();
    for i in 0..40 {
        // Worker 0 takes 2 ms per block and 1 is ten times slower.
        for (worker, ms) in [(0, 2), (1, 20)] {
            let size = 5 + i % 11;
            let text = format!(
                "{}{}",
                char::from_u32(0x4e00 + i as u32).unwrap_or('x'),
                "w".repeat(size)
            );
            let ticket = sender.routed(&policy, worker, &text);
            sender.now_ms += ms * (size as u64 + 1);
            sender.first_token(&policy, ticket, worker);
            sender.finished(&policy, ticket, worker, &text, true);
            sender.now_ms += 100;
        }
    }
    let ms = |now_ms| -> Vec<f64> {
        let stats = policy.stats(now_ms);
        stats
            .ranks
            .iter()
            .map(|rank| rank.ms_per_kilotoken)
            .collect()
    };
    let now = ms(sender.now_ms);
    assert!((15.0..50.0).contains(&now[0]), "20 is true: {now:?}");
    assert!((120.0..210.0).contains(&now[1]), "200 is true: {now:?}");
    assert!(now[0] < now[2] && now[2] < now[1], "{now:?}");
    let later = ms(sender.now_ms + 1_000_000);
    assert!(
        later.iter().all(|ms| (ms / now[2] - 1.0).abs() < 0.01),
        "{later:?}"
    );
}

#[test]
fn text_is_counted_as_reported() {
    let policy = cost(Role::Regular, 1, CostParams::default());
    let text = "z".repeat(4_000);
    let mut last = 0.0;
    let mut rng = rng(1);
    for ticket in 0..300 {
        let blocks = crate::PromptBlocks::of_text(text.as_bytes(), None);
        let request = RequestView {
            prompt: blocks.prompt_view(),
            ..RequestView::default()
        };
        let ready = &views(&[0]);
        let rng = &mut rng;
        policy.choose(&mut PolicyInput {
            request: &request,
            ready,
            rng,
            explains: false,
        });
        let ticket = SendTicket(ticket);
        let worker = WorkerId(0);
        policy.observe(&PolicyEvent::Routed {
            ticket,
            worker,
            request: &request,
            reports_first_token: true,
        });
        last = policy.lock_state().size_of(&request.prompt).tokens;
        let usage = TokenUsage {
            prompt_tokens: 2_000,
            ..TokenUsage::default()
        };
        policy.observe(&PolicyEvent::Usage {
            ticket,
            worker,
            usage,
        });
        policy.observe(&PolicyEvent::Finished {
            ticket,
            worker,
            is_kept: true,
            hashes: &[],
            now_ms: 0,
        });
    }
    assert!((last - 2_000.0).abs() < 5.0, "{last}");
    assert_eq!(policy.lock_state().ranks[&WorkerId(0)].kv_tokens, 0.0);
}

#[test]
fn worker_that_forgets_is_believed_less() {
    let policy = prefill(2);
    let mut sender = TestSender::default();
    for _ in 0..30 {
        let ticket = sender.routed(&policy, 0, "abcdefgh");
        let usage = TokenUsage {
            prompt_tokens: 800,
            cached_tokens: Some(0),
            ..TokenUsage::default()
        };
        policy.observe(&PolicyEvent::Usage {
            ticket,
            worker: WorkerId(0),
            usage,
        });
        sender.first_token(&policy, ticket, 0);
        sender.finished(&policy, ticket, 0, "abcdefgh", true);
        sender.now_ms += 1_000;
    }
    let confidence = policy.stats(0).ranks[0].confidence;
    assert!(confidence < 0.1, "{confidence}");
    let Some(forecast) = chosen_at(&sender, &policy, "abcdefgh", &views(&[0, 0]), &mut rng(1))
        .why
        .forecast()
    else {
        panic!("two candidates are a decision");
    };
    assert!(forecast.cached_tokens < 80, "{forecast:?}");
}

#[test]
fn index_is_sized_by_what_the_worker_reports() {
    let policy = CostPolicy::new(
        CostParams {
            default_capacity_tokens: 700,
            ..CostParams::default()
        },
        Role::Prefill,
    );
    for (id, capacity_tokens) in [(0, Some(300)), (1, None)] {
        let facts = WorkerFacts {
            capacity_tokens,
            ..WorkerFacts::default()
        };
        policy.observe(&PolicyEvent::WorkerAdded {
            worker: WorkerId(id),
            facts,
        });
    }
    let mut sender = TestSender::default();
    for _ in 0..60 {
        for worker in [0, 1] {
            sender.routed(&policy, worker, "abcdefghijklmnop");
        }
    }
    let blocks: Vec<usize> = policy
        .stats(0)
        .ranks
        .iter()
        .map(|rank| rank.index_blocks)
        .collect();
    assert_eq!(blocks, [3, 7]);
}

#[test]
fn decode_workers_are_chosen_by_requests_memory_and_what_they_hold() {
    let policy = cost(Role::Decode, 3, CostParams::default());
    let mut sender = TestSender::default();
    let mut rng = rng(1);
    let by_load = chosen_at(&sender, &policy, "abcd", &views(&[4, 2, 3]), &mut rng);
    assert_eq!(by_load.worker, WorkerId(1));
    // 2 holds 40 000 tokens of the prompt: 1.7 s of network.
    let long = "k".repeat(400);
    let ticket = sender.routed(&policy, 2, &long);
    sender.finished(&policy, ticket, 2, &long, true);
    assert_eq!(
        chosen_at(&sender, &policy, &long, &views(&[0, 0, 9]), &mut rng).worker,
        WorkerId(2)
    );
    // Its cache is nearly full of running requests.
    for _ in 0..26 {
        sender.routed(&policy, 2, &long);
    }
    assert_eq!(
        chosen_at(&sender, &policy, &long, &views(&[0, 1, 0]), &mut rng).worker,
        WorkerId(0)
    );
}

#[test]
fn pairs_meet_on_one_machine_when_the_transfer_is_not_hidden() {
    let p = prefill(2);
    let d = cost(Role::Decode, 2, CostParams::default());
    let mut sender = TestSender::default();
    let at = |hosts: [u32; 2]| {
        [0, 1].map(|id| WorkerView {
            id: WorkerId(id),
            load: 0,
            host: hosts[id as usize],
        })
    };
    let p_ready = at([1, 2]);
    let d_ready = at([2, 1]);
    let long = "k".repeat(500); // 50 000 tokens; both prefill workers hold them
    for worker in [0, 1] {
        let ticket = sender.routed(&p, worker, &long);
        sender.first_token(&p, ticket, worker);
    }
    let blocks = blocks(&long);
    let request = RequestView {
        prompt: blocks.prompt_view(),
        ..RequestView::default()
    };
    let mut seen = BTreeSet::new();
    for seed in 0..40 {
        let (a, b) = pair_of(&p, &d, &request, [&p_ready, &d_ready], seed).expect("a pair");
        assert_ne!(a.worker, b.worker, "hosts are crossed");
        seen.insert(a.worker);
    }
    assert_eq!(seen.len(), 2);
    // Only one prefill worker is near the idle decode worker.
    let busy = [
        WorkerView {
            load: 300,
            ..d_ready[0]
        },
        d_ready[1],
    ];
    let (a, b) = pair_of(&p, &d, &request, [&p_ready, &busy], 1).expect("a pair");
    assert_eq!((a.worker, b.worker), (WorkerId(0), WorkerId(1)));
}

#[test]
fn pairs_stay_in_one_domain_while_the_price_is_not_higher() {
    let p = prefill(1);
    let d = cost(Role::Decode, 2, CostParams::default());
    let place = |policy: &CostPolicy, worker, domain| {
        let domain = Some(domain);
        let facts = WorkerFacts {
            domain,
            ..WorkerFacts::default()
        };
        let worker = WorkerId(worker);
        policy.observe(&PolicyEvent::WorkerAdded { worker, facts });
    };
    place(&p, 0, 7);
    place(&d, 0, 8);
    place(&d, 1, 7);
    let mut sender = TestSender::default();
    let long = "k".repeat(500); // held by the prefill worker, so nothing hides the transfer
    let ticket = sender.routed(&p, 0, &long);
    sender.first_token(&p, ticket, 0);
    let blocks = blocks(&long);
    let request = RequestView {
        prompt: blocks.prompt_view(),
        ..RequestView::default()
    };
    let at = |id, host, load| WorkerView {
        id: WorkerId(id),
        load,
        host,
    };
    let pair = |near_load, far_host| {
        let ready = [at(0, far_host, 0), at(1, 3, near_load)];
        let pair = p.decide_pair(&d, &request, [&[at(0, 1, 0)], &ready], &mut rng(1), true);
        let [_, (choice, explanation)] = pair.expect("a pair");
        let explanation = explanation.expect("asked for");
        let crossing = explanation
            .candidates
            .iter()
            .map(|weighed| match &weighed.terms {
                PolicyTerms::Cost(terms) => (weighed.id, terms.crossing_ms),
                other => panic!("{other:?}"),
            });
        (choice.worker, crossing.collect::<BTreeMap<_, _>>())
    };
    let (chosen, crossing) = pair(0, 2);
    assert_eq!(chosen, WorkerId(1));
    assert_eq!(crossing[&WorkerId(1)], 0.0);
    // 50 000 tokens at 0.13 - 0.043 ms, less what the prefill's base time hides.
    assert!(
        (4_000.0..=4_350.0).contains(&crossing[&WorkerId(0)]),
        "{crossing:?}"
    );
    assert_eq!(
        pair(600, 2).0,
        WorkerId(0),
        "6 s of queue are more than 4.35 s of transfer"
    );
    let (chosen, crossing) = pair(0, 1);
    assert_eq!(
        (chosen, crossing[&WorkerId(0)]),
        (WorkerId(0), 0.0),
        "one machine is one domain"
    );
}

proptest! {
    /// The pair is the best of all, whether searched whole or among the best of each side.
    #[test]
    fn pair_is_the_cheapest_of_the_product(
        sent in proptest::collection::vec((0u64..4, "[ab]{1,9}"), 0..12),
        loads in proptest::collection::vec(0usize..60, 3),
        hosts in proptest::collection::vec(0u32..2, 7),
        domains in proptest::collection::vec(0u32..2, 7),
        states in proptest::collection::vec(0u64..400, 7),
        text in "[ab]{1,30}",
    ) {
        let eager = CostParams { hysteresis_ms: 0.0, hysteresis_fraction: 0.0, ..CostParams::default() };
        let p = cost(Role::Prefill, 4, eager.clone());
        let d = cost(Role::Decode, 3, eager.clone());
        for (id, domain) in domains.iter().enumerate() {
            let (policy, own) = if id < 4 { (&p, id) } else { (&d, id - 4) };
            let facts =
                WorkerFacts { domain: Some(*domain), state_tokens: states[id], ..WorkerFacts::default() };
            policy.observe(&PolicyEvent::WorkerAdded { worker: WorkerId(own as u64), facts });
        }
        let mut sender = TestSender::default();
        for (worker, text) in &sent {
            sender.routed(&p, *worker, text);
            sender.routed(&d, *worker % 3, text);
        }
        let p_ready: Vec<_> =
            (0..4).map(|id| WorkerView { id: WorkerId(id), load: 0, host: hosts[id as usize] }).collect();
        let d_ready: Vec<_> = (0..3)
            .map(|id| WorkerView { id: WorkerId(id), load: loads[id as usize], host: hosts[4 + id as usize] })
            .collect();
        let blocks = blocks(&text);
        let request = RequestView { prompt: blocks.prompt_view(), ..RequestView::default() };
        let (a, b) = pair_of(&p, &d, &request, [&p_ready, &d_ready], 1).expect("a pair");
        let (is, _) = p.lock_state().estimate_costs(&request, &p_ready);
        let (ds, _) = d.lock_state().estimate_costs(&request, &d_ready);
        let total = |i: &CandidateCost, j: &CandidateCost| {
            let token_ms = match (i.host == j.host, i.domain == j.domain) {
                (true, _) => eager.pull_near_ms,
                (false, true) => eager.pull_far_ms,
                (false, false) => eager.pull_crossing_ms,
            };
            let lacking = blocks.prompt_view().units as f64 - j.terms.cached_tokens;
            let pull = (lacking + states[4 + j.id.0 as usize] as f64) * token_ms;
            i.terms.cost_ms + j.terms.cost_ms + (pull - i.terms.prefill_ms).max(0.0)
        };
        let of = |i: WorkerId, j: WorkerId| {
            let i = is.iter().find(|o| o.id == i);
            let j = ds.iter().find(|o| o.id == j);
            total(i.expect("an option"), j.expect("an option"))
        };
        let best = is.iter().flat_map(|i| ds.iter().map(move |j| total(i, j))).fold(f64::INFINITY, f64::min);
        prop_assert!(of(a.worker, b.worker) <= best + 2.0 * (TIE_MS.max(TIE_FRACTION * best)), "{} {best}", of(a.worker, b.worker));
    }

    /// cost() again, from lists: what was sent, what is outstanding.
    #[test]
    fn choice_is_the_one_the_naive_rule_makes(
        history in proptest::collection::vec((0u64..4, "[abc]{1,12}", any::<bool>(), 0u64..400), 0..25),
        text in "[abc]{1,12}",
        seed in any::<u64>(),
    ) {
        let eager = CostParams { hysteresis_ms: 0.0, hysteresis_fraction: 0.0, ..CostParams::default() };
        let policy = cost(Role::Prefill, 4, eager);
        let mut sender = TestSender::default();
        let common = |a: &str, b: &str| a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count();
        let time = |text: &str, held: usize| 5.0 + (text.len() - held) as f64 * MS_PER_BLOCK;
        let mut texts: Vec<Vec<String>> = vec![Vec::new(); 4];
        // (predicted, began): the head began when the one before it ended, or when it was sent.
        let mut queues: Vec<Vec<f64>> = vec![Vec::new(); 4];
        let mut since = [0.0f64; 4];
        let mut work = 0.0f64;
        let mut work_at = 0.0f64;
        let mut arrivals: Vec<(String, f64, f64)> = Vec::new();
        for (worker, text, is_done, wait) in &history {
            sender.now_ms += wait;
            let now = sender.now_ms as f64;
            let w = *worker as usize;
            let held = texts[w].iter().map(|t| common(t, text)).max().unwrap_or(0);
            let shared = texts.iter().flatten().map(|t| common(t, text)).max().unwrap_or(0);
            let predicted = time(text, held);
            work = work * ((work_at - now) / 30_000.0).exp() + predicted;
            work_at = now;
            if shared > 0 {
                arrivals.push((text[..shared].to_owned(), 1.0, now));
            }
            sender.tickets += 1;
            let blocks = blocks(text);
            let request = RequestView { prompt: blocks.prompt_view(), now_ms: sender.now_ms, ..RequestView::default() };
            let ticket = SendTicket(sender.tickets);
            policy.observe(&PolicyEvent::Routed {
                ticket, worker: WorkerId(*worker), request: &request, reports_first_token: !is_done,
            });
            texts[w].push(text.clone());
            if queues[w].is_empty() {
                since[w] = now;
            }
            queues[w].push(predicted);
            if *is_done {
                // The client left at once: it leaves no work, but its prompt was kept.
                policy.observe(&PolicyEvent::Finished {
                    ticket, worker: WorkerId(*worker), is_kept: true, hashes: &[], now_ms: sender.now_ms,
                });
                queues[w].pop();
                if queues[w].is_empty() {
                    since[w] = now;
                }
            }
        }
        let now = sender.now_ms as f64;
        let held: Vec<usize> =
            texts.iter().map(|list| list.iter().map(|t| common(t, &text)).max().unwrap_or(0)).collect();
        let deepest = *held.iter().max().unwrap_or(&0);
        let rho = work * ((work_at - now) / 30_000.0).exp() / 120_000.0;
        let beta = if rho < 8.0 / 9.0 { rho / (1.0 - rho) } else { 8.0 };
        let prefix = &text[..deepest];
        let hot: f64 = arrivals.iter()
            .filter(|(at, _, _)| deepest > 0 && at == prefix)
            .map(|(_, count, at)| count * ((at - now) / 10_000.0).exp())
            .sum();
        let times: Vec<f64> = held.iter().map(|&h| time(&text, h)).collect();
        let least = times.iter().copied().fold(f64::INFINITY, f64::min);
        let costs: Vec<f64> = (0..4).map(|w| {
            let queued: f64 = queues[w].iter().sum();
            let ran = queues[w].first().map_or(0.0, |head| (now - since[w]).clamp(0.0, *head));
            queued - ran + least + (1.0 + beta) * (times[w] - least) / (1.0 + 0.1 * hot)
        }).collect();
        let choice = chosen_at(&sender, &policy, &text, &views(&[0; 4]), &mut rng(seed));
        let best = costs.iter().copied().fold(f64::INFINITY, f64::min);
        // The speed is fitted with a prior: what it says is the prior's to a thousandth.
        prop_assert!(costs[choice.worker.0 as usize] <= best + TIE_MS.max(TIE_FRACTION * best) + 0.002 * best, "{choice:?} {costs:?}");
    }
}

#[test]
fn shortest_first_engines_hide_less_of_their_queue() {
    let policy = CostPolicy::new(CostParams::default(), Role::Prefill);
    for (id, order) in [(0, QueueOrder::Arrival), (1, QueueOrder::ShortestFirst)] {
        let facts = WorkerFacts {
            order,
            ..WorkerFacts::default()
        };
        policy.observe(&PolicyEvent::WorkerAdded {
            worker: WorkerId(id),
            facts,
        });
    }
    let mut sender = TestSender::default();
    sender.routed(&policy, 0, &"a".repeat(100));
    sender.routed(&policy, 1, &"b".repeat(150));
    // A short prompt waits a second at 0, and a quarter of 1.5 s is counted at 1, which would take
    // it first.
    let short = chosen_at(&sender, &policy, "c", &views(&[0, 0]), &mut rng(1));
    assert_eq!(short.worker, WorkerId(1));
    let long = chosen_at(
        &sender,
        &policy,
        &"d".repeat(300),
        &views(&[0, 0]),
        &mut rng(1),
    );
    assert_eq!(long.worker, WorkerId(0));
}

#[test]
fn panic_under_the_lock_costs_the_memory_not_the_service() {
    let policy = prefill(2);
    TestSender::default().routed(&policy, 0, "abc");
    let panicked = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let _state = policy.state.lock();
            panic!("on purpose, to poison the lock");
        });
        thread.join()
    });
    assert!(panicked.is_err() && policy.state.is_poisoned());
    let why = chosen(&policy, "abc", &views(&[0, 0]), &mut rng(1)).why;
    assert!(matches!(why, SelectionReason::NoPrefix(_)), "{why:?}");
    assert_eq!(policy.stats(0).ranks.len(), 2);
}

#[test]
fn choosing_changes_nothing_that_is_seen() {
    let policy = prefill(3);
    TestSender::default().routed(&policy, 0, "abc");
    let before = policy.stats(0);
    for seed in 0..20 {
        chosen(&policy, "abcdef", &views(&[0, 0, 0]), &mut rng(seed));
    }
    assert_eq!(policy.stats(0), before);
}

#[test]
fn terms_of_an_explanation_add_up_to_the_cost_that_decided() {
    let p = prefill(3);
    let d = cost(Role::Decode, 2, CostParams::default());
    let mut sender = TestSender::default();
    for (worker, text) in [(0, "abcdef"), (1, "abc"), (2, "xyz")] {
        sender.routed(&p, worker, text);
        sender.routed(&d, worker % 2, text);
    }
    let blocks = blocks("abcdefgh");
    let request = RequestView {
        prompt: blocks.prompt_view(),
        ..RequestView::default()
    };
    let p_ready = views(&[0, 4, 0]);
    let d_ready = views(&[2, 1]);
    let pair = || pair_of(&p, &d, &request, [&p_ready, &d_ready], 4);
    let explained = p.decide_pair(&d, &request, [&p_ready, &d_ready], &mut rng(4), true);
    let explained = explained
        .expect("a pair")
        .map(|(choice, why)| (choice, why.expect("asked for")));
    assert_eq!(pair(), Some((explained[0].0, explained[1].0)));
    for (side, (choice, explanation)) in explained.iter().enumerate() {
        let PolicyBasis::Cost(basis) = explanation.basis else {
            panic!("{explanation:?}");
        };
        let terms = |weighed: &WeighedCandidate| match weighed.terms {
            PolicyTerms::Cost(terms) => terms,
            other => panic!("{other:?}"),
        };
        let all: Vec<CostTerms> = explanation.candidates.iter().map(terms).collect();
        let least = all
            .iter()
            .map(|t| t.prefill_ms)
            .fold(f64::INFINITY, f64::min);
        for t in &all {
            let again = basis.price.price * (t.prefill_ms - least);
            let sum = t.backlog_ms + least + again + t.decode_ms + t.partner_ms;
            assert!((sum - t.cost_ms).abs() < 1e-9, "side {side}: {t:?}");
            assert_eq!(t.cached_tokens + t.uncached_tokens, basis.prompt_tokens);
        }
        let forecast = choice.why.forecast().expect("predicted");
        let chosen = explanation
            .candidates
            .iter()
            .find(|c| c.id == choice.worker);
        let chosen = terms(chosen.expect("a candidate"));
        assert_eq!(forecast.cached_tokens, chosen.cached_tokens.round() as u32);
    }
    assert_eq!(explained[0].1.candidates.len(), 3);
}

#[test]
fn prompts_with_images_teach_nothing_about_text() {
    let policy = cost(Role::Regular, 1, CostParams::default());
    let usual = policy.stats(0).tokens_per_unit;
    for (ticket, has_media) in [(1, true), (2, false)] {
        let text = PromptBlocks::of_text(&[b'x'; 4096], None);
        let text = if has_media { text.with_media() } else { text };
        let ticket = SendTicket(ticket);
        let worker = WorkerId(0);
        let request = RequestView {
            prompt: text.prompt_view(),
            ..RequestView::default()
        };
        policy.observe(&PolicyEvent::Routed {
            ticket,
            worker,
            request: &request,
            reports_first_token: false,
        });
        let usage = TokenUsage {
            prompt_tokens: 100,
            ..TokenUsage::default()
        };
        policy.observe(&PolicyEvent::Usage {
            ticket,
            worker,
            usage,
        });
        let learned = policy.stats(0).tokens_per_unit;
        assert_eq!(learned == usual, has_media, "{learned}");
    }
}

/// Requests that do not stream, one after the other, each answered after
/// `took_ms(prompt tokens, output tokens)`; returns the learned prefill time of 1000 tokens [ms].
fn learned_from_answers(took_ms: impl Fn(f64, f64) -> f64) -> f64 {
    let policy = cost(Role::Regular, 1, CostParams::default());
    let mut now_ms = 0;
    for turn in 0..60u32 {
        let blocks = blocks(&"x".repeat(10 + (turn as usize % 5) * 10));
        let output = turn * 37 % 300;
        let ticket = SendTicket(u64::from(turn));
        let worker = WorkerId(0);
        policy.observe(&PolicyEvent::Routed {
            ticket,
            worker,
            request: &RequestView {
                prompt: blocks.prompt_view(),
                now_ms,
                ..RequestView::default()
            },
            reports_first_token: false,
        });
        let tokens = blocks.prompt_view().units as u32;
        now_ms += took_ms(f64::from(tokens), f64::from(output)) as u64;
        let usage = TokenUsage {
            prompt_tokens: tokens,
            cached_tokens: Some(0),
            completion_tokens: Some(output),
        };
        policy.observe(&PolicyEvent::Usage {
            ticket,
            worker,
            usage,
        });
        policy.observe(&PolicyEvent::Finished {
            ticket,
            worker,
            is_kept: true,
            hashes: &[],
            now_ms,
        });
        now_ms += 10;
    }
    policy.stats(now_ms).ranks[0].ms_per_kilotoken
}

#[test]
fn answers_that_do_not_stream_teach_the_prefill_speed() {
    let near = |learned: f64, truth: f64| (learned - truth).abs() < 0.15 * truth;
    let slow = learned_from_answers(|tokens, _| tokens);
    assert!(near(slow, 1_000.0), "{slow}");
    // Most of the time is output: 20 ms a token.
    let usual = learned_from_answers(|tokens, output| 5.0 + 0.1 * tokens + 20.0 * output);
    assert!(near(usual, 105.0), "{usual}");
}

#[test]
fn worker_without_a_prefix_cache_is_believed_to_hold_nothing() {
    let policy = cost(Role::Decode, 1, CostParams::default());
    let worker = WorkerId(1);
    let facts = WorkerFacts {
        is_cacheless: true,
        ..WorkerFacts::default()
    };
    policy.observe(&PolicyEvent::WorkerAdded { worker, facts });
    let mut sender = TestSender::default();
    let text = "k".repeat(100);
    for worker in [0, 1] {
        let ticket = sender.routed(&policy, worker, &text);
        sender.finished(&policy, ticket, worker, &text, true);
    }
    let blocks = blocks(&text);
    let request = RequestView {
        prompt: blocks.prompt_view(),
        ..RequestView::default()
    };
    let (options, _) = policy
        .lock_state()
        .estimate_costs(&request, &views(&[0, 0]));
    let cached: Vec<f64> = options
        .iter()
        .map(|option| option.terms.cached_tokens)
        .collect();
    assert_eq!(cached, [10_000.0, 0.0]);
}
