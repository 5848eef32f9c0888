//! A model fleet on a virtual clock: what a policy would do to the prompts of a trace.
//!
//! The policy is the real one, called as the router calls it; the workers are modeled:
//!
//! 1. an arrival is given to a worker by the policy and joins its queue;
//! 2. the worker takes one prompt at a time, in order of arrival or shortest first in chunks; what
//!    its own cache holds then need not be computed; a token takes `1 / tokens_per_sec`;
//! 3. the end of the prefill is the first token; the prompt's blocks enter the worker's cache,
//!    least recently used out;
//! 4. the answer goes on elsewhere for `ms_per_answer_token` a token: until then the request counts
//!    as load.
//!
//! The policy does not see the workers' caches, queues or speed: only events. Same arrivals, same
//! seed, same result.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};

use rand::RngCore;

use router_core::policy::{Policy, PolicyInput};
use router_core::prompt::PromptBlocks;
use router_core::types::{
    PolicyEvent, QueueOrder, RequestView, SendTicket, TokenUsage, WorkerFacts, WorkerId, WorkerView,
};

/// Request of the simulated fleet.
#[derive(Debug, Clone)]
pub struct RequestArrival {
    /// When it arrives [ms]; ignored in a closed loop.
    pub at_ms: f64,
    pub blocks: PromptBlocks,
    /// For policies that read text; a character per block will do.
    pub text: String,
    pub answer_tokens: u32,
}

#[derive(Debug, Clone)]
pub struct FleetConfig {
    pub workers: usize,
    /// Tokens each worker's cache holds; reported to the policy.
    pub capacity_tokens: u64,
    pub tokens_per_sec: f64,
    /// Fixed time of a prefill [ms].
    pub fixed_ms: f64,
    /// A worker's first prefill takes this much longer [ms].
    pub cold_ms: f64,
    pub order: QueueOrder,
    /// An engine that takes the shortest first decides again after so many tokens.
    pub chunk_tokens: f64,
    pub ms_per_answer_token: f64,
    /// `Some`: so many clients, each sending its next request when its answer is complete.
    pub closed_loop: Option<usize>,
    /// True for the bound: one queue and one cache for all, nothing to choose. Routing is measured
    /// against it.
    pub is_bound: bool,
}

impl Default for FleetConfig {
    fn default() -> Self {
        Self {
            workers: 8,
            capacity_tokens: 1 << 20,
            tokens_per_sec: 10_000.0,
            fixed_ms: 0.0,
            cold_ms: 0.0,
            order: QueueOrder::Arrival,
            chunk_tokens: 8_192.0,
            ms_per_answer_token: 13.0,
            closed_loop: None,
            is_bound: false,
        }
    }
}

/// Outcome of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct ServedRequest {
    pub worker: usize,
    pub ttft_ms: f64,
    pub tokens: f64,
    pub cached: f64,
    /// Time that the policy expected, if it said so [ms].
    pub forecast_ms: Option<u32>,
}

/// A cache of blocks, least recently used out, the end of a prefix before its start.
#[derive(Debug, Default)]
pub struct BlockCache {
    blocks: HashMap<u64, (u64, Reverse<usize>)>,
    by_use: BTreeMap<(u64, Reverse<usize>), u64>,
    uses: u64,
}

impl BlockCache {
    /// Leading blocks it holds.
    pub fn matched(&self, hashes: &[u64]) -> usize {
        let held = hashes
            .iter()
            .take_while(|hash| self.blocks.contains_key(hash));
        held.count()
    }

    /// These blocks were used; at most `capacity` stay.
    pub fn used(&mut self, hashes: &[u64], capacity: usize) {
        self.uses += 1;
        for (depth, hash) in hashes.iter().enumerate() {
            let place = (self.uses, Reverse(depth));
            if let Some(before) = self.blocks.insert(*hash, place) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(place, *hash);
        }
        while self.blocks.len() > capacity {
            let Some((_, hash)) = self.by_use.pop_first() else {
                break;
            };
            self.blocks.remove(&hash);
        }
    }
}

#[derive(Debug)]
struct Job {
    request: usize,
    arrived_ms: f64,
    /// `None` before it first ran.
    left_ms: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
enum Happens {
    /// A worker reached the end of a prefill or of a chunk.
    Ran(usize),
    AnswerDone(usize),
    Arrives(usize),
}

/// Events in order of time; equal times in the order they were planned.
#[derive(Debug, Default)]
struct Agenda(BinaryHeap<Reverse<(u64, u64, usize)>>, Vec<Happens>);

impl Agenda {
    fn plan(&mut self, at_ms: f64, what: Happens) {
        let number = self.1.len();
        self.1.push(what);
        // Times are not negative, and the bits of such floats sort as they do.
        self.0
            .push(Reverse((at_ms.max(0.0).to_bits(), number as u64, number)));
    }

    fn next(&mut self) -> Option<(f64, Happens)> {
        let Reverse((bits, _, at)) = self.0.pop()?;
        Some((f64::from_bits(bits), self.1[at]))
    }
}

struct Fleet<'a> {
    policy: &'a dyn Policy,
    config: &'a FleetConfig,
    arrivals: &'a [RequestArrival],
    queues: Vec<VecDeque<Job>>,
    running: Vec<Option<Job>>,
    caches: Vec<BlockCache>,
    loads: Vec<usize>,
    is_warm: Vec<bool>,
    served: Vec<ServedRequest>,
    agenda: Agenda,
    /// The next request of a closed loop.
    next: usize,
}

/// Serve all arrivals; results in their order.
pub fn serve(
    policy: &dyn Policy,
    config: &FleetConfig,
    arrivals: &[RequestArrival],
    rng: &mut dyn RngCore,
) -> Vec<ServedRequest> {
    let shared = if config.is_bound { 1 } else { config.workers };
    let mut fleet = Fleet {
        policy,
        config,
        arrivals,
        queues: (0..shared).map(|_| VecDeque::new()).collect(),
        running: (0..config.workers).map(|_| None).collect(),
        caches: (0..shared).map(|_| BlockCache::default()).collect(),
        loads: vec![0; config.workers],
        is_warm: vec![false; config.workers],
        served: vec![ServedRequest::default(); arrivals.len()],
        agenda: Agenda::default(),
        next: config.closed_loop.unwrap_or(0).min(arrivals.len()),
    };
    let facts = WorkerFacts {
        capacity_tokens: Some(config.capacity_tokens),
        order: config.order,
        ..WorkerFacts::default()
    };
    for id in 0..config.workers as u64 {
        let worker = WorkerId(id);
        policy.observe(&PolicyEvent::WorkerAdded { worker, facts });
    }
    match config.closed_loop {
        Some(_) => (0..fleet.next).for_each(|i| fleet.agenda.plan(0.0, Happens::Arrives(i))),
        None => {
            for (i, arrival) in arrivals.iter().enumerate() {
                fleet.agenda.plan(arrival.at_ms, Happens::Arrives(i));
            }
        }
    }
    while let Some((now_ms, what)) = fleet.agenda.next() {
        match what {
            Happens::Arrives(request) => fleet.arrives(request, now_ms, rng),
            Happens::Ran(worker) => fleet.ran(worker, now_ms),
            Happens::AnswerDone(request) => fleet.answer_done(request, now_ms),
        }
    }
    fleet.served
}

impl Fleet<'_> {
    fn arrives(&mut self, request: usize, now_ms: f64, rng: &mut dyn RngCore) {
        let arrival = &self.arrivals[request];
        let job = Job {
            request,
            arrived_ms: now_ms,
            left_ms: None,
        };
        if self.config.is_bound {
            self.queues[0].push_back(job);
            let idle = self.running.iter().position(Option::is_none);
            idle.into_iter()
                .for_each(|worker| self.start(worker, now_ms));
            return;
        }
        let view = RequestView {
            text: &arrival.text,
            prompt: arrival.blocks.prompt_view(),
            routing_key: None,
            session_key: None,
            now_ms: now_ms as u64,
        };
        let host = 0;
        let ready: Vec<WorkerView> = (0..)
            .map(WorkerId)
            .zip(&self.loads)
            .map(|(id, &load)| WorkerView { id, load, host })
            .collect();
        let mut input = PolicyInput {
            request: &view,
            ready: &ready,
            rng,
            explains: false,
        };
        let Some(choice) = self.policy.choose(&mut input) else {
            return;
        };
        self.policy.observe(&PolicyEvent::Routed {
            ticket: SendTicket(request as u64),
            worker: choice.worker,
            request: &view,
            reports_first_token: true,
        });
        let worker = choice.worker.0 as usize;
        self.loads[worker] += 1;
        self.served[request].worker = worker;
        self.served[request].forecast_ms = choice.why.forecast().map(|forecast| forecast.ttft_ms);
        self.queues[worker].push_back(job);
        if self.running[worker].is_none() {
            self.start(worker, now_ms);
        }
    }

    fn shared(&self, worker: usize) -> usize {
        worker.min(self.queues.len() - 1)
    }

    /// An idle worker takes its next prompt, if there is one.
    fn start(&mut self, worker: usize, now_ms: f64) {
        let shared = self.shared(worker);
        let Some(mut job) = self.take(shared, now_ms) else {
            return;
        };
        let left_ms = match job.left_ms {
            Some(left_ms) => left_ms,
            None => {
                let prompt = self.arrivals[job.request].blocks.prompt_view();
                let matched = self.caches[shared].matched(prompt.hashes) * prompt.block_units;
                let served = &mut self.served[job.request];
                served.tokens = prompt.units as f64;
                served.cached = (matched as f64).min(served.tokens);
                let is_warm = std::mem::replace(&mut self.is_warm[worker], true);
                let cold_ms = if is_warm { 0.0 } else { self.config.cold_ms };
                self.time_of(self.served[job.request]) + cold_ms
            }
        };
        let chunk_ms = self.config.chunk_tokens / self.config.tokens_per_sec * 1e3;
        let run_ms = match self.config.order {
            QueueOrder::Arrival => left_ms,
            QueueOrder::ShortestFirst => left_ms.min(chunk_ms),
        };
        job.left_ms = Some(left_ms - run_ms);
        self.running[worker] = Some(job);
        self.agenda.plan(now_ms + run_ms, Happens::Ran(worker));
    }

    fn time_of(&self, served: ServedRequest) -> f64 {
        self.config.fixed_ms + (served.tokens - served.cached) / self.config.tokens_per_sec * 1e3
    }

    fn take(&mut self, shared: usize, now_ms: f64) -> Option<Job> {
        if self.config.order == QueueOrder::Arrival {
            return self.queues[shared].pop_front();
        }
        let key = |job: &Job| {
            let left_ms = job.left_ms.unwrap_or_else(|| {
                let prompt = self.arrivals[job.request].blocks.prompt_view();
                let matched = self.caches[shared].matched(prompt.hashes) * prompt.block_units;
                let uncached = prompt.units.saturating_sub(matched);
                self.config.fixed_ms + uncached as f64 / self.config.tokens_per_sec * 1e3
            });
            left_ms - 0.05 * (now_ms - job.arrived_ms)
        };
        let keys = self.queues[shared].iter().map(key).enumerate();
        let (at, _) = keys.min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        self.queues[shared].remove(at)
    }

    fn ran(&mut self, worker: usize, now_ms: f64) {
        let Some(job) = self.running[worker].take() else {
            return;
        };
        if job.left_ms.is_some_and(|left_ms| left_ms > 1e-9) {
            let shared = self.shared(worker);
            self.queues[shared].push_front(job);
        } else {
            self.first_token(worker, &job, now_ms);
        }
        self.start(worker, now_ms);
    }

    fn first_token(&mut self, worker: usize, job: &Job, now_ms: f64) {
        let (arrival, shared) = (&self.arrivals[job.request], self.shared(worker));
        let prompt = arrival.blocks.prompt_view();
        let capacity = self.config.capacity_tokens as usize
            * if self.config.is_bound {
                self.config.workers
            } else {
                1
            };
        self.caches[shared].used(prompt.hashes, capacity / prompt.block_units.max(1));
        let served = &mut self.served[job.request];
        served.ttft_ms = now_ms - job.arrived_ms;
        if !self.config.is_bound {
            let (ticket, worker) = (SendTicket(job.request as u64), WorkerId(worker as u64));
            let usage = TokenUsage {
                prompt_tokens: served.tokens as u32,
                cached_tokens: Some(served.cached as u32),
                completion_tokens: None,
            };
            let now_ms = now_ms as u64;
            self.policy.observe(&PolicyEvent::Usage {
                ticket,
                worker,
                usage,
            });
            self.policy.observe(&PolicyEvent::FirstToken {
                ticket,
                worker,
                now_ms,
            });
        }
        let answer_ms = self.config.ms_per_answer_token * f64::from(arrival.answer_tokens);
        self.agenda
            .plan(now_ms + answer_ms, Happens::AnswerDone(job.request));
    }

    fn answer_done(&mut self, request: usize, now_ms: f64) {
        if !self.config.is_bound {
            let worker = self.served[request].worker;
            self.loads[worker] -= 1;
            self.policy.observe(&PolicyEvent::Finished {
                ticket: SendTicket(request as u64),
                worker: WorkerId(worker as u64),
                is_kept: true,
                hashes: self.arrivals[request].blocks.prompt_view().hashes,
                now_ms: now_ms as u64,
            });
        }
        if self.config.closed_loop.is_some() && self.next < self.arrivals.len() {
            self.agenda.plan(now_ms, Happens::Arrives(self.next));
            self.next += 1;
        }
    }
}

/// The prefill time of all arrivals if one cache of the whole fleet's size served them in order
/// [ms]: what a load is relative to, so that a policy which loses hits runs hotter.
pub fn shared_cache_work_ms(config: &FleetConfig, arrivals: &[RequestArrival]) -> f64 {
    let mut cache = BlockCache::default();
    let mut tokens = 0.0;
    for arrival in arrivals {
        let prompt = arrival.blocks.prompt_view();
        let matched = cache.matched(prompt.hashes) * prompt.block_units;
        tokens += prompt.units.saturating_sub(matched) as f64;
        let capacity = config.capacity_tokens as usize * config.workers;
        cache.used(prompt.hashes, capacity / prompt.block_units.max(1));
    }
    tokens / config.tokens_per_sec * 1e3 + config.fixed_ms * arrivals.len() as f64
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use router_core::policy::{PolicyKind, PolicyParams, build_policy};
    use router_core::types::Role;

    fn policy(kind: PolicyKind, role: Role) -> Box<dyn Policy> {
        build_policy(kind, role, &PolicyParams::default())
    }

    fn arrival(at_ms: f64, ids: &[u64], answer_tokens: u32) -> RequestArrival {
        RequestArrival {
            at_ms,
            blocks: PromptBlocks::of_ids(ids, 512, 512 * ids.len() as u32),
            text: ids
                .iter()
                .filter_map(|id| char::from_u32(0x4e00 + *id as u32))
                .collect(),
            answer_tokens,
        }
    }

    #[test]
    fn one_worker_serves_in_order_and_reuses_what_it_computed() {
        let config = FleetConfig {
            workers: 1,
            tokens_per_sec: 512_000.0, // a block per millisecond
            ..FleetConfig::default()
        };
        let arrivals = [
            arrival(0.0, &[1, 2, 3], 0),
            arrival(1.0, &[1, 2, 9], 0),
            arrival(50.0, &[7], 0),
        ];
        let served = serve(
            &*policy(PolicyKind::Random, Role::Prefill),
            &config,
            &arrivals,
            &mut StdRng::seed_from_u64(1),
        );
        let seen: Vec<(f64, f64)> = served.iter().map(|s| (s.ttft_ms, s.cached)).collect();
        assert_eq!(seen, [(3.0, 0.0), (3.0, 1024.0), (1.0, 0.0)]);
        assert_eq!(shared_cache_work_ms(&config, &arrivals), 5.0);
    }

    #[test]
    fn shortest_first_lets_a_short_prompt_pass_at_a_chunk_boundary() {
        let config = FleetConfig {
            workers: 1,
            tokens_per_sec: 512_000.0,
            chunk_tokens: 1_024.0,
            order: QueueOrder::ShortestFirst,
            ..FleetConfig::default()
        };
        let long: Vec<u64> = (0..20).collect();
        let arrivals = [arrival(0.0, &long, 0), arrival(1.0, &[99], 0)];
        let served = serve(
            &*policy(PolicyKind::Random, Role::Prefill),
            &config,
            &arrivals,
            &mut StdRng::seed_from_u64(1),
        );
        assert_eq!([served[0].ttft_ms, served[1].ttft_ms], [21.0, 2.0]);
    }

    #[test]
    fn cache_forgets_the_oldest_end_first() {
        let mut cache = BlockCache::default();
        cache.used(&[1, 2, 3], 4);
        cache.used(&[7, 8], 4);
        assert_eq!([cache.matched(&[1, 2, 3]), cache.matched(&[7, 8])], [2, 2]);
    }

    /// 400 requests behind one system prompt of 4900 characters, four workers, a closed loop: the
    /// case in which sglang-router 0.3.2 sends all of them to one worker at 16 and at 48 in flight.
    #[test]
    fn hot_system_prompt_is_spread_evenly_with_nearly_all_the_hits() {
        let system = "You are a careful assistant of the example company. ".repeat(95);
        let arrivals: Vec<RequestArrival> = (0..400)
            .map(|i| {
                let text = format!(
                    "{}Question {i}: what is {i} times {}?",
                    &system[..4_900],
                    i * 7
                );
                RequestArrival {
                    at_ms: 0.0,
                    blocks: PromptBlocks::of_text(text.as_bytes(), None),
                    text,
                    answer_tokens: 20 + (i * 37) % 60,
                }
            })
            .collect();
        for role in [Role::Prefill, Role::Regular] {
            for concurrency in [16, 48, 128] {
                let config = FleetConfig {
                    workers: 4,
                    // Text is counted in bytes here, and so is the speed: 10 000 tokens of four
                    // bytes.
                    tokens_per_sec: 40_000.0,
                    fixed_ms: 5.0,
                    cold_ms: 200.0,
                    closed_loop: Some(concurrency),
                    ..FleetConfig::default()
                };
                for seed in 0..5 {
                    let mut rng = StdRng::seed_from_u64(seed);
                    let served = serve(
                        &*policy(PolicyKind::Cost, role),
                        &config,
                        &arrivals,
                        &mut rng,
                    );
                    let mut counts = [0usize; 4];
                    served.iter().for_each(|s| counts[s.worker] += 1);
                    let max = *counts.iter().max().unwrap_or(&0);
                    assert!(
                        max <= 110,
                        "{role} {concurrency} in flight, seed {seed}: {counts:?}"
                    );
                    // The best there is: every prompt but the first finds the 19 whole blocks of
                    // the system prompt.
                    let cached: f64 = served.iter().map(|s| s.cached).sum();
                    let best = 399.0 * 19.0 * 256.0;
                    assert!(
                        cached >= 0.95 * best,
                        "{role} {concurrency} in flight: {}",
                        cached / best
                    );
                }
            }
        }
    }

    /// A long first prefill must not make a worker look slow for good: at low load nothing would
    /// correct that.
    #[test]
    fn slow_start_excludes_no_worker() {
        for (order, fixed_ms) in [(QueueOrder::Arrival, 5.0), (QueueOrder::ShortestFirst, 1.0)] {
            let config = FleetConfig {
                workers: 3,
                fixed_ms,
                cold_ms: 2_000.0,
                order,
                ..FleetConfig::default()
            };
            let arrivals: Vec<RequestArrival> = (0..300)
                .map(|i| arrival(500.0 * i as f64, &[2 * i, 2 * i + 1], 10))
                .collect();
            let policy = policy(PolicyKind::Cost, Role::Prefill);
            let served = serve(&*policy, &config, &arrivals, &mut StdRng::seed_from_u64(5));
            let mut counts = [0usize; 3];
            served.iter().for_each(|s| counts[s.worker] += 1);
            assert!(counts.iter().all(|&n| n >= 60), "{order:?}: {counts:?}");
        }
    }

    /// Conversations of several turns with a common opening, Poisson-like arrivals at 80 % of a
    /// fleet of eight.
    #[test]
    fn predicted_cost_beats_the_other_policies_on_conversations() {
        let mut arrivals = Vec::new();
        let mut rng = StdRng::seed_from_u64(11);
        let mut next = || f64::from(rng.next_u32()) / f64::from(u32::MAX);
        for conversation in 0..250u64 {
            let (mut ids, mut at_ms) = (vec![0, 1 + conversation % 5], 600_000.0 * next());
            for turn in 0..2 + (6.0 * next()) as u64 {
                let grown = 1 + (30.0 * next().powi(3)) as u64;
                ids.extend((0..grown).map(|i| 100 + (conversation * 20 + turn) * 64 + i));
                arrivals.push(arrival(at_ms, &ids, 200));
                at_ms += 5_000.0 + 40_000.0 * next();
            }
        }
        arrivals.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
        let config = FleetConfig {
            capacity_tokens: 200_000,
            ..FleetConfig::default()
        };
        let span = arrivals.last().map_or(0.0, |last| last.at_ms);
        let work = shared_cache_work_ms(&config, &arrivals) / config.workers as f64;
        arrivals
            .iter_mut()
            .for_each(|arrival| arrival.at_ms *= work / 0.8 / span);
        let mean = |kind: PolicyKind| {
            let mut rng = StdRng::seed_from_u64(3);
            let served = serve(&*policy(kind, Role::Prefill), &config, &arrivals, &mut rng);
            served.iter().map(|s| s.ttft_ms).sum::<f64>() / served.len() as f64
        };
        let cost = mean(PolicyKind::Cost);
        for (other, ratio) in [
            (PolicyKind::CacheAware, 1.1),
            (PolicyKind::PowerOfTwo, 1.5),
            (PolicyKind::Random, 2.0),
        ] {
            let mean = mean(other);
            assert!(mean > ratio * cost, "{other}: {mean} ms, cost: {cost} ms");
        }
    }
}
