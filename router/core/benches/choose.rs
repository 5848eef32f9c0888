//! One request through a policy: hash the prompt if the policy wants that, choose, observe the
//! routing.
//!
//! Budget of cache_aware and cost: < 100 µs at the 99th percentile with 128 workers and a prompt of
//! 32 000 tokens (128 KB).
//!
//! Prompts share one of 16 system prompts (half their length) and end in text of their own, so each
//! one descends, splits or branches, and inserts. The index is at its limit: every insert also
//! evicts as much. `round_robin` is the floor. Criterion gives means and their spread; the
//! percentiles after them are of single decisions, timed one by one.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use router_core::{
    Policy, PolicyEvent, PolicyInput, PolicyKind, PolicyParams, PromptBlocks, RequestView, Role,
    SendTicket, WorkerFacts, WorkerId, WorkerView, build_policy, decide_pair,
};

const SYSTEM_PROMPTS: u32 = 16;
/// Prompts each worker was sent before; the index is sized for half of them.
const PROMPTS_PER_WORKER: usize = 40;
/// Decisions timed for the percentiles.
const SAMPLES: usize = 20_000;
/// Requests in flight in the fleet, the oldest ending first.
const IN_FLIGHT: u64 = 512;

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

/// A policy that knows its workers, and what the router does around a decision.
struct Setting {
    policy: Box<dyn Policy>,
    /// For decisions about pairs.
    decode: Option<Box<dyn Policy>>,
    ready: Vec<WorkerView>,
    prompts: Prompts,
    rng: StdRng,
    tickets: u64,
    chosen: Vec<WorkerId>,
}

impl Setting {
    fn new(kind: PolicyKind, workers: u64, bytes: usize, pairs: bool) -> Self {
        let mut params = PolicyParams::default();
        params.cache_aware.max_tree_size = PROMPTS_PER_WORKER / 2 * bytes;
        params.cost.default_capacity_tokens = (PROMPTS_PER_WORKER / 2 * bytes / 4) as u64;
        let made = |role| {
            let policy = build_policy(kind, role, &params);
            for id in 0..workers {
                policy.observe(&PolicyEvent::WorkerAdded {
                    worker: WorkerId(id),
                    facts: WorkerFacts::default(),
                });
            }
            policy
        };
        let mut setting = Self {
            policy: made(Role::Prefill),
            decode: pairs.then(|| made(Role::Decode)),
            ready: (0..workers)
                .map(|id| WorkerView {
                    id: WorkerId(id),
                    load: (id % 7) as usize,
                    host: (id % 16) as u32,
                })
                .collect(),
            prompts: Prompts::new(bytes),
            rng: StdRng::seed_from_u64(1),
            tickets: 0,
            chosen: Vec::new(),
        };
        for id in 0..workers {
            for _ in 0..PROMPTS_PER_WORKER {
                let text = setting.prompts.next();
                let blocks = PromptBlocks::of_text(text.as_bytes(), None);
                setting.route(&text, &blocks, WorkerId(id));
            }
        }
        setting
    }

    fn view<'a>(&self, text: &'a str, blocks: &'a PromptBlocks) -> RequestView<'a> {
        RequestView {
            text,
            prompt: blocks.prompt_view(),
            routing_key: None,
            session_key: None,
            now_ms: self.tickets,
        }
    }

    fn route(&mut self, text: &str, blocks: &PromptBlocks, worker: WorkerId) {
        let request = self.view(text, blocks);
        self.policy.observe(&PolicyEvent::Routed {
            ticket: SendTicket(self.tickets),
            worker,
            request: &request,
            reports_first_token: true,
        });
        self.chosen.push(worker);
        self.tickets += 1;
    }

    /// The timed part.
    fn decide(&mut self, text: &str) -> Option<WorkerId> {
        let blocks = match self.policy.needs_blocks() {
            true => PromptBlocks::of_text(text.as_bytes(), None),
            false => PromptBlocks::default(),
        };
        let (request, rng) = (self.view(text, &blocks), &mut self.rng);
        let choice = match &self.decode {
            None => {
                let (request, ready) = (&request, &*self.ready);
                self.policy.choose(&mut PolicyInput {
                    request,
                    ready,
                    rng,
                    explains: false,
                })?
            }
            Some(decode) => {
                let ready = [&*self.ready, &self.ready];
                decide_pair(&*self.policy, &**decode, &request, ready, None, rng, false)?[0].0
            }
        };
        self.route(text, &blocks, choice.worker);
        Some(choice.worker)
    }

    /// The oldest request ends. Not timed.
    fn settle(&mut self) {
        if let Some(oldest) = self.tickets.checked_sub(IN_FLIGHT) {
            let (ticket, worker) = (SendTicket(oldest), self.chosen[oldest as usize]);
            let now_ms = self.tickets;
            self.policy.observe(&PolicyEvent::FirstToken {
                ticket,
                worker,
                now_ms,
            });
            self.policy.observe(&PolicyEvent::Finished {
                ticket,
                worker,
                is_kept: true,
                hashes: &[],
                now_ms,
            });
        }
    }
}

const CASES: [(PolicyKind, u64, usize, bool); 9] = [
    (PolicyKind::RoundRobin, 128, 8 << 10, false),
    (PolicyKind::CacheAware, 8, 8 << 10, false),
    (PolicyKind::CacheAware, 128, 8 << 10, false),
    (PolicyKind::CacheAware, 8, 64 << 10, false),
    (PolicyKind::CacheAware, 128, 128 << 10, false),
    (PolicyKind::Cost, 8, 8 << 10, false),
    (PolicyKind::Cost, 128, 8 << 10, false),
    (PolicyKind::Cost, 128, 128 << 10, false),
    (PolicyKind::Cost, 128, 128 << 10, true),
];

fn name_of(workers: u64, bytes: usize, pairs: bool) -> String {
    let pairs = if pairs { "_pairs" } else { "" };
    format!("{workers}w_{}KB{pairs}", bytes >> 10)
}

fn choose_and_observe(c: &mut Criterion) {
    let mut group = c.benchmark_group("choose_and_observe");
    group
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    for (kind, workers, bytes, pairs) in CASES {
        let mut setting = Setting::new(kind, workers, bytes, pairs);
        let mut source = Prompts::new(bytes);
        source.made = setting.prompts.made;
        let id = BenchmarkId::new(kind.into_str(), name_of(workers, bytes, pairs));
        group.bench_function(id, |b| {
            b.iter_batched_ref(
                || source.next(),
                |text| {
                    setting.settle();
                    black_box(setting.decide(text))
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

/// Printed, not asserted: times are the machine's.
fn percentiles(_: &mut Criterion) {
    if !std::env::args().any(|arg| arg == "--bench") {
        return; // `cargo test --benches`
    }
    println!("\nsingle decisions, n = {SAMPLES} each [µs]");
    println!(
        "{:<32} {:>8} {:>8} {:>8} {:>8} {:>12}",
        "", "p50", "p90", "p99", "p99.9", "index [MiB]"
    );
    for (kind, workers, bytes, pairs) in CASES {
        let mut setting = Setting::new(kind, workers, bytes, pairs);
        let mut took: Vec<f64> = (0..SAMPLES)
            .map(|_| {
                setting.settle();
                let text = setting.prompts.next();
                let since = Instant::now();
                black_box(setting.decide(&text));
                since.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        took.sort_by(f64::total_cmp);
        let at = |share: f64| took[((SAMPLES - 1) as f64 * share) as usize];
        println!(
            "{:<32} {:>8.1} {:>8.1} {:>8.1} {:>8.1} {:>12.1}",
            format!("{kind} {}", name_of(workers, bytes, pairs)),
            at(0.5),
            at(0.9),
            at(0.99),
            at(0.999),
            setting.policy.stats(0).index_bytes as f64 / (1 << 20) as f64
        );
    }
}

criterion_group!(benches, choose_and_observe, percentiles);
criterion_main!(benches);
