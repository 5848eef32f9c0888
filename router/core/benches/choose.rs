//! One request through a policy: choose, then observe the routing. Budget of cache_aware: < 100 µs at 128 workers, 64 KB.
//!
//! Prompts share one of 16 system prompts (half their length) and end in text of their own, so each one descends, splits
//! or branches, and inserts. The tree is at its limit: every insert also evicts as much. `round_robin` is the floor.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use router_core::{CacheAwareParams, Event, PolicyKind, RequestView, WorkerId, WorkerView, build};

const SYSTEM_PROMPTS: u32 = 16;

fn letters(seed: u64, bytes: usize) -> String {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..bytes)
        .map(|_| char::from(b'a' + rng.random_range(0..26u8)))
        .collect()
}

struct Prompts {
    system: Vec<String>,
    own: String,
    made: u64,
}

impl Prompts {
    fn new(bytes: usize) -> Self {
        let system = (0..SYSTEM_PROMPTS)
            .map(|i| letters(u64::from(i), bytes / 2))
            .collect();
        Self {
            system,
            own: letters(99, bytes / 2 - 20),
            made: 0,
        }
    }

    fn next(&mut self) -> String {
        self.made += 1;
        let system = &self.system[(self.made % u64::from(SYSTEM_PROMPTS)) as usize];
        format!("{system}{:020}{}", self.made, self.own)
    }
}

fn choose_and_observe(c: &mut Criterion) {
    let mut group = c.benchmark_group("choose_and_observe");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for (kind, workers, bytes) in [
        (PolicyKind::RoundRobin, 128, 8 << 10),
        (PolicyKind::CacheAware, 8, 8 << 10),
        (PolicyKind::CacheAware, 128, 8 << 10),
        (PolicyKind::CacheAware, 8, 64 << 10),
        (PolicyKind::CacheAware, 128, 64 << 10),
    ] {
        let params = CacheAwareParams {
            max_tree_size: 20 * bytes,
            ..CacheAwareParams::default()
        };
        let policy = build(kind, &params);
        let mut prompts = Prompts::new(bytes);
        let mut rng = StdRng::seed_from_u64(1);
        let ready: Vec<WorkerView> = (0..workers)
            .map(|id| WorkerView {
                id: WorkerId(id),
                load: (id % 7) as usize,
            })
            .collect();
        for worker in ready.iter().map(|view| view.id) {
            policy.observe(&Event::WorkerAdded { worker });
            for _ in 0..40 {
                policy.observe(&Event::Routed {
                    worker,
                    text: &prompts.next(),
                });
            }
        }
        let id = BenchmarkId::new(kind.name(), format!("{workers}w_{}KB", bytes >> 10));
        group.bench_function(id, |b| {
            b.iter_batched_ref(
                || prompts.next(),
                |text| {
                    let request = RequestView {
                        text,
                        routing_key: None,
                    };
                    let choice = policy.choose(&request, &ready, &mut rng);
                    if let Some(choice) = choice {
                        policy.observe(&Event::Routed {
                            worker: choice.worker,
                            text,
                        });
                    }
                    black_box(choice)
                },
                BatchSize::SmallInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, choose_and_observe);
criterion_main!(benches);
