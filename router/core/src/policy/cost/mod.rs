//! `cost`: the worker with the least predicted cost in seconds. No threshold, no mode switch.
//!
//! ```text
//! cost(w) = backlog(w) + T_min + (1 + beta) · (T(w) - T_min) / (1 + 0.1 · heat)
//!
//! T(w)     predicted prefill time of this prompt at w, given the blocks w holds or is about to compute (speed.rs)
//! T_min    the least T over the candidates
//! backlog  predicted time sent to w and not finished (no first token seen), less the elapsed part (rank.rs)
//! beta     rho / (1 - rho), at most 8; rho = work dispatched per worker-second, mean over the last 30 s
//! heat     recent arrivals that ended on the deepest shared block of this prompt, 10 s decay (heat.rs)
//! ```
//!
//! What each part is for:
//! * time instead of counts: a prompt of 100 000 tokens is seconds of work, ten of 100 are nothing;
//! * beta: computing a prefix again delays everyone behind it and evicts somebody's blocks: nearly free at low load, what
//!   keeps the cluster stable near saturation. The plain argmin of time to first token has beta = 0;
//! * in-flight blocks: a prefix counts from when its prompt is sent, so two turns close together meet;
//! * heat: a copy of a hot prefix pays back over its next users, so those are copied early.
//!
//! Costs that differ by less than a prediction is worth are ties: they go to the smallest index, then to the fewest requests
//! in flight, the least work of late, and to chance. A worker without the longest prefix must be cheaper by `hysteresis_ms`
//! and `hysteresis_fraction` to win. When workers report their queues and the reports are old, other routers may see the
//! same best worker: the cheaper of two drawn from the four cheapest is taken.
//!
//! For decode workers there is no prompt to compute:
//!
//! ```text
//! cost(j) = request_ms · requests in flight + kv_ms · k / (1 - k) + max(0, pull(i, j) - T(i))
//! ```
//!
//! with k the share of j's KV cache in use or promised, and pull the time to fetch the pages j lacks from i, as far as i's
//! prefill does not hide it. [`Cost::choose_pair`] minimises the sum over pairs. Regular workers have both costs.
//!
//! Sizes are tokens. Where nobody counted them they are text units times a ratio that starts at a quarter (a token in four
//! characters) and follows what workers report.
//!
//! Budget: choose + observe < 100 µs (p99) at 128 workers and a prompt of 32 000 tokens (`benches/choose.rs`).

mod heat;
mod rank;
mod speed;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use rand::{Rng, RngCore};
use serde::{Deserialize, Serialize};

use self::heat::Heat;
use self::rank::{Pending, Rank};
use self::speed::{Fit, Speed, Work};
use super::{Policy, PolicyStats, RankStats};
use crate::prefix_tree::{PrefixTree, Stamp};
use crate::prompt::Prompt;
use crate::types::{
    Choice, Event, Forecast, RequestView, Role, Ticket, Usage, Why, WorkerFacts, WorkerId,
    WorkerView,
};

/// Parameters of `cost`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CostParams {
    /// Most memory of the index [bytes].
    pub max_bytes: usize,
    /// Tokens a worker's cache is taken to hold if it does not say. Too large costs some hits, too small costs more.
    pub default_capacity_tokens: u64,
    /// Highest price of computing twice; 8 is a fleet that is 8/9 busy.
    pub beta_max: f64,
    /// Memory of the utilisation [s].
    pub utilisation_secs: f64,
    /// What a worker without the longest prefix must be cheaper by, both [ms, share of the holder's cost].
    pub hysteresis_ms: f64,
    pub hysteresis_fraction: f64,
    /// What one more running request costs those that run, and itself, on a worker that decodes [ms]. About 0.3 ms a
    /// token on a GPU, over a few dozen tokens: small against a long prefill, decisive between equals.
    pub request_ms: f64,
    /// Price of a full KV cache: this × k / (1 - k) [ms]. smg's kv barrier has the same form and size.
    pub kv_ms: f64,
    /// Time to fetch the KV of a token from the same machine, and from another [ms]: 128 KiB (an 8 B model with grouped
    /// heads) at 10 and 3 GB/s.
    pub pull_near_ms: f64,
    pub pull_far_ms: f64,
    /// Pause between two reports of a worker; twice that is stale [ms].
    pub report_interval_ms: u64,
}

impl Default for CostParams {
    fn default() -> Self {
        Self {
            max_bytes: 1 << 30,
            default_capacity_tokens: 1 << 20,
            beta_max: 8.0,
            utilisation_secs: 30.0,
            hysteresis_ms: 5.0,
            hysteresis_fraction: 0.1,
            request_ms: 10.0,
            kv_ms: 150.0,
            pull_near_ms: 0.013,
            pull_far_ms: 0.043,
            report_interval_ms: 10_000,
        }
    }
}

/// Costs closer than this to the least are equal: speeds are learned from noisy times, and a fixed preference for whoever
/// was measured a little faster would send every prompt of an idle fleet there.
const TIE_MS: f64 = 1.0;
const TIE_FRACTION: f64 = 0.02;
/// A fleet of more pairs than this is searched among the best few of each side.
const MAX_PAIRS: usize = 4096;
const BEST_OF_SIDE: usize = 8;
/// Of this many cheapest, two are drawn when reports are stale.
const STALE_TOP: usize = 4;
/// Weight of what a worker just reported against what was believed of its index.
const CONFIDENCE_STEP: f64 = 0.1;
/// Share of a KV cache above which the price no longer grows.
const KV_FULL: f64 = 0.98;

/// See the module.
#[derive(Debug)]
pub struct Cost {
    role: Role,
    params: CostParams,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    tree: PrefixTree<[u64]>,
    ranks: BTreeMap<WorkerId, Rank>,
    tickets: HashMap<Ticket, Sent>,
    heat: Heat,
    fleet: Fit,
    speed: Speed,
    /// Predicted work dispatched to all.
    work: Decayed,
    /// Tokens and units of prompts whose tokens were counted, decayed.
    counted: (f64, f64),
    /// Mean length of an answer [tokens].
    answer_tokens: f64,
    /// Buffers of `choose`, kept so that it allocates nothing once they have grown.
    scratch: Scratch,
}

#[derive(Debug, Default)]
struct Scratch {
    ids: Vec<WorkerId>,
    held: Vec<usize>,
    options: Vec<Estimate>,
}

/// A sum that fades.
#[derive(Debug, Clone, Copy, Default)]
struct Decayed {
    sum: f64,
    at_ms: f64,
}

impl Decayed {
    fn at(self, now_ms: f64, tau_ms: f64) -> f64 {
        self.sum * ((self.at_ms - now_ms) / tau_ms).exp()
    }

    fn add(&mut self, more: f64, now_ms: f64, tau_ms: f64) {
        let sum = self.at(now_ms, tau_ms) + more;
        *self = Self { sum, at_ms: now_ms };
    }
}

/// What was noted of a request when it was sent.
#[derive(Debug)]
struct Sent {
    stamp: Stamp,
    /// Blocks the worker held before.
    held: usize,
    units: usize,
    is_estimated: bool,
    /// Tokens expected in its cache; `None` when that was nothing.
    expected_cached: Option<f64>,
    kv_tokens: f64,
    is_first_token_seen: bool,
}

/// What a candidate would cost.
#[derive(Debug, Clone, Copy)]
struct Estimate {
    id: WorkerId,
    host: u32,
    /// Blocks of this prompt it holds.
    held: usize,
    cached: f64,
    backlog_ms: f64,
    prefill_ms: f64,
    /// All of it.
    cost_ms: f64,
    /// Blocks in its index.
    size: usize,
    load: usize,
    /// Work sent to it of late [ms].
    recent_ms: f64,
}

/// Sizes of a prompt that do not depend on the candidate.
#[derive(Debug, Clone, Copy)]
struct Size {
    tokens: f64,
    tokens_per_block: f64,
}

impl Cost {
    pub fn new(params: CostParams, role: Role) -> Self {
        Self {
            state: Mutex::new(State::new(&params)),
            params,
            role,
        }
    }

    /// Choose a prefill and a decode worker together, by the sum of their costs. `self` is the prefill side's policy.
    pub fn choose_pair(
        &self,
        decode: &Cost,
        req: &RequestView<'_>,
        prefill_ready: &[WorkerView],
        decode_ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<(Choice, Choice)> {
        let (mut ours, mut theirs) = (self.lock(), decode.lock());
        let (mut p, deepest) = ours.estimate(self, req, prefill_ready);
        let (mut d, _) = theirs.estimate(decode, req, decode_ready);
        if p.len() * d.len() > MAX_PAIRS {
            keep_cheapest(&mut p);
            keep_cheapest(&mut d);
        }
        let size = ours.size_of(&req.prompt);
        let to_pull = |j: &Estimate| (size.tokens - j.cached).max(0.0);
        let joint = |i: &Estimate, j: &Estimate| {
            let pull_ms = to_pull(j) * decode.pull_ms(i.host == j.host);
            j.cost_ms + (pull_ms - i.prefill_ms).max(0.0)
        };
        // What the best decode worker for i adds decides over i; then the best for the chosen one.
        for i in &mut p {
            i.cost_ms += d.iter().map(|j| joint(i, j)).fold(f64::INFINITY, f64::min);
        }
        let is_stale = ours.is_stale(&self.params, req.now_ms as f64);
        let chosen = self.pick(&p, deepest, size, is_stale, rng);
        let other = chosen.and_then(|(i, _)| {
            d.iter_mut().for_each(|j| j.cost_ms = joint(&i, j));
            decode.pick(&d, usize::MAX, size, false, rng)
        });
        ours.scratch.options = p;
        theirs.scratch.options = d;
        Some((chosen?.1, other?.1))
    }

    fn tau_ms(&self) -> f64 {
        self.params.utilisation_secs * 1e3
    }

    fn pull_ms(&self, is_near: bool) -> f64 {
        match is_near {
            true => self.params.pull_near_ms,
            false => self.params.pull_far_ms,
        }
    }

    /// The cheapest, with the rules for ties, hysteresis and stale reports. `deepest`: blocks of the prompt that anybody
    /// holds; above any number for decode workers, which have no holder to stay with.
    fn pick(
        &self,
        options: &[Estimate],
        deepest: usize,
        size: Size,
        is_stale: bool,
        rng: &mut dyn RngCore,
    ) -> Option<(Estimate, Choice)> {
        let why = |best: &Estimate, kind: fn(Forecast) -> Why| Choice {
            worker: best.id,
            why: match options.len() {
                1 => Why::Only,
                _ => kind(Forecast {
                    prompt_tokens: size.tokens.round() as u32,
                    cached_tokens: best.cached.round() as u32,
                    ttft_ms: (best.backlog_ms + best.prefill_ms).round() as u32,
                }),
            },
        };
        if is_stale && options.len() > 2 {
            let best = sampled(options, rng)?;
            return Some((best, why(&best, Why::Sampled)));
        }
        let cheapest = cheapest(options, |_| true, rng)?;
        let most = options.iter().map(|option| option.held).max().unwrap_or(0);
        if most == 0 || deepest == 0 {
            return Some((cheapest, why(&cheapest, Why::NoPrefix)));
        }
        if cheapest.held == most {
            return Some((cheapest, why(&cheapest, Why::BestHolder)));
        }
        let holder = self::cheapest(options, |option| option.held == most, rng)?;
        let margin =
            (self.params.hysteresis_fraction * holder.cost_ms).max(self.params.hysteresis_ms);
        if self.role != Role::Decode && holder.cost_ms - cheapest.cost_ms < margin {
            return Some((holder, why(&holder, Why::BestHolder)));
        }
        Some((cheapest, why(&cheapest, Why::Cheaper)))
    }

    /// A panic inside may have left the state half changed. It only predicts, so it starts anew with the same workers
    /// rather than taking every later request down.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            let workers: Vec<(WorkerId, WorkerFacts)> = state
                .ranks
                .iter()
                .map(|(&id, rank)| (id, rank.facts))
                .collect();
            *state = State::new(&self.params);
            workers
                .into_iter()
                .for_each(|(id, facts)| state.add(id, facts));
            self.state.clear_poison();
            state
        })
    }
}

/// The option with the least cost among those that pass; see the module for ties.
fn cheapest(
    options: &[Estimate],
    passes: impl Fn(&Estimate) -> bool,
    rng: &mut dyn RngCore,
) -> Option<Estimate> {
    let passing = || options.iter().filter(|option| passes(option));
    let least = passing()
        .map(|option| option.cost_ms)
        .min_by(f64::total_cmp)?;
    let limit = least + TIE_MS.max(TIE_FRACTION * least);
    let rank = |a: &Estimate, b: &Estimate| {
        let counts = (a.size, a.load).cmp(&(b.size, b.load));
        counts.then(a.recent_ms.total_cmp(&b.recent_ms))
    };
    let tied = || passing().filter(|option| option.cost_ms <= limit);
    let first = tied().min_by(|a, b| rank(a, b))?;
    // Those that are equal in everything: one of them, each with the same chance.
    let equals = || tied().filter(|option| rank(option, first).is_eq());
    let at = match equals().count() {
        1 => 0,
        many => rng.random_range(0..many),
    };
    equals().nth(at).copied()
}

/// The cheaper of two drawn from the cheapest few.
fn sampled(options: &[Estimate], rng: &mut dyn RngCore) -> Option<Estimate> {
    let mut top: [Option<Estimate>; STALE_TOP] = [None; STALE_TOP];
    for option in options {
        let mut insert = Some(*option);
        for place in &mut top {
            if place.is_none_or(|held| insert.is_some_and(|new| new.cost_ms < held.cost_ms)) {
                std::mem::swap(place, &mut insert);
            }
        }
    }
    let known = top.iter().flatten().count();
    let first = rng.random_range(0..known);
    let other = rng.random_range(0..known - 1);
    top[first.min(if other >= first { other + 1 } else { other })]
}

fn keep_cheapest(options: &mut Vec<Estimate>) {
    if options.len() > BEST_OF_SIDE {
        options.select_nth_unstable_by(BEST_OF_SIDE, |a, b| a.cost_ms.total_cmp(&b.cost_ms));
        options.truncate(BEST_OF_SIDE);
    }
}

impl State {
    fn new(params: &CostParams) -> Self {
        Self {
            tree: PrefixTree::new(params.max_bytes),
            ranks: BTreeMap::new(),
            tickets: HashMap::new(),
            heat: Heat::default(),
            fleet: Fit::default(),
            speed: Speed::default(),
            work: Decayed::default(),
            // A quarter of a token per character, as if 4 KB had been counted.
            counted: (1024.0, 4096.0),
            answer_tokens: 256.0,
            scratch: Scratch::default(),
        }
    }

    fn add(&mut self, worker: WorkerId, facts: WorkerFacts) {
        self.tree.add(worker, usize::MAX);
        self.ranks.insert(worker, Rank::new(facts));
    }

    fn size_of(&self, prompt: &Prompt<'_>) -> Size {
        let ratio = self.counted.0 / self.counted.1;
        let tokens = match prompt.tokens {
            Some(tokens) => f64::from(tokens),
            None => prompt.units as f64 * ratio,
        };
        let blocks = prompt.units as f64 / prompt.block_units.max(1) as f64;
        Size {
            tokens,
            tokens_per_block: if blocks > 0.0 { tokens / blocks } else { 0.0 },
        }
    }

    /// Candidates with their costs, in no order, and how many blocks of the prompt anybody holds. The list is the
    /// scratch's: give it back.
    fn estimate(
        &mut self,
        policy: &Cost,
        req: &RequestView<'_>,
        ready: &[WorkerView],
    ) -> (Vec<Estimate>, usize) {
        let (now_ms, size) = (req.now_ms as f64, self.size_of(&req.prompt));
        let mut options = std::mem::take(&mut self.scratch.options);
        let (mut ids, mut held) = (
            std::mem::take(&mut self.scratch.ids),
            std::mem::take(&mut self.scratch.held),
        );
        ids.clear();
        ids.extend(ready.iter().map(|worker| worker.id));
        ids.sort_unstable();
        held.clear();
        held.resize(ids.len(), 0);
        let deepest = self.tree.held_by(req.prompt.hashes, &ids, &mut held);
        options.clear();
        let stranger = Rank::new(WorkerFacts::default());
        for worker in ready {
            let rank = self.ranks.get(&worker.id).unwrap_or(&stranger);
            let held = ids.binary_search(&worker.id).map_or(0, |at| held[at]);
            let mut option = Estimate {
                id: worker.id,
                host: worker.host,
                held,
                cached: (held as f64 * size.tokens_per_block * rank.confidence).min(size.tokens),
                backlog_ms: 0.0,
                prefill_ms: 0.0,
                cost_ms: 0.0,
                size: self.tree.units_of(worker.id),
                load: worker.load,
                recent_ms: rank.work.at(now_ms, policy.tau_ms()),
            };
            if policy.role != Role::Decode {
                option.prefill_ms = rank
                    .speed(self.speed, now_ms)
                    .ms(Work::of(size.tokens - option.cached, option.cached));
                option.backlog_ms = rank.backlog_ms(option.prefill_ms, now_ms);
            }
            if policy.role != Role::Prefill {
                option.cost_ms =
                    policy.decode_ms(rank, worker.load, size.tokens + self.answer_tokens);
            }
            options.push(option);
        }
        if policy.role != Role::Decode {
            let price = self.price(policy, req, deepest, now_ms);
            let least = options.iter().map(|option| option.prefill_ms);
            let least = least.fold(f64::INFINITY, f64::min);
            for option in &mut options {
                option.cost_ms += option.backlog_ms + least + price * (option.prefill_ms - least);
            }
        }
        (self.scratch.ids, self.scratch.held) = (ids, held);
        (options, deepest)
    }

    /// (1 + beta) / (1 + 0.1 heat): what a millisecond of computing again costs.
    fn price(&self, policy: &Cost, req: &RequestView<'_>, deepest: usize, now_ms: f64) -> f64 {
        let rho = self.utilisation(policy, now_ms);
        let beta_max = policy.params.beta_max;
        let beta = if rho < beta_max / (1.0 + beta_max) {
            rho / (1.0 - rho)
        } else {
            beta_max
        };
        let shared = deepest.checked_sub(1).map(|at| req.prompt.hashes[at]);
        let heat = shared.map_or(0.0, |hash| self.heat.of(hash, now_ms));
        (1.0 + beta) / (1.0 + 0.1 * heat)
    }

    /// Prefill work dispatched per worker and second, 1 = as much as they can do.
    fn utilisation(&self, policy: &Cost, now_ms: f64) -> f64 {
        let tau_ms = policy.tau_ms();
        self.work.at(now_ms, tau_ms) / (tau_ms * self.ranks.len().max(1) as f64)
    }

    fn is_stale(&self, params: &CostParams, now_ms: f64) -> bool {
        let newest = self.ranks.values().filter_map(|rank| rank.report);
        let newest = newest.map(|report| report.at_ms).max_by(f64::total_cmp);
        newest.is_some_and(|at_ms| now_ms - at_ms > 2.0 * params.report_interval_ms as f64)
    }

    fn routed(
        &mut self,
        policy: &Cost,
        ticket: Ticket,
        worker: WorkerId,
        req: &RequestView<'_>,
        tells: bool,
    ) {
        if !self.ranks.contains_key(&worker) {
            return;
        }
        let (now_ms, prompt) = (req.now_ms as f64, &req.prompt);
        if let Some(tokens) = prompt.tokens {
            self.count(f64::from(tokens), prompt.units as f64);
        }
        let size = self.size_of(prompt);
        let mut held = [0];
        let deepest = self.tree.held_by(prompt.hashes, &[worker], &mut held);
        let held = held[0];
        if let Some(at) = deepest.checked_sub(1) {
            self.heat.arrived(prompt.hashes[at], now_ms);
        }
        let kv_tokens = match policy.role {
            Role::Prefill => 0.0,
            Role::Regular | Role::Decode => size.tokens + self.answer_tokens,
        };
        let speed = self.speed;
        let Some(rank) = self.ranks.get_mut(&worker) else {
            return;
        };
        let cached = (held as f64 * size.tokens_per_block * rank.confidence).min(size.tokens);
        let uncached = size.tokens - cached;
        rank.kv_tokens += kv_tokens;
        if policy.role != Role::Decode {
            let predicted_ms = rank.speed(speed, now_ms).ms(Work::of(uncached, cached));
            rank.sent(Pending {
                ticket,
                uncached,
                cached,
                predicted_ms,
                sent_ms: now_ms,
                tells,
            });
            rank.work.add(predicted_ms, now_ms, policy.tau_ms());
            self.work.add(predicted_ms, now_ms, policy.tau_ms());
        }
        let capacity = rank.facts.capacity_tokens;
        let capacity = capacity.unwrap_or(policy.params.default_capacity_tokens) as f64;
        if size.tokens_per_block > 0.0 {
            self.tree
                .add(worker, (capacity / size.tokens_per_block) as usize);
        }
        let sent = Sent {
            stamp: self.tree.insert(worker, prompt.hashes),
            held,
            units: prompt.units,
            is_estimated: prompt.tokens.is_none(),
            expected_cached: (held > 0).then_some(held as f64 * size.tokens_per_block),
            kv_tokens,
            is_first_token_seen: false,
        };
        self.tickets.insert(ticket, sent);
    }

    /// A prompt of so many units has so many tokens.
    fn count(&mut self, tokens: f64, units: f64) {
        if units > 0.0 {
            const KEEP: f64 = 0.99;
            self.counted = (
                self.counted.0 * KEEP + tokens,
                self.counted.1 * KEEP + units,
            );
        }
    }

    fn first_token(&mut self, ticket: Ticket, worker: WorkerId, now_ms: f64) {
        if let Some(sent) = self.tickets.get_mut(&ticket) {
            sent.is_first_token_seen = true;
        }
        let Some(rank) = self.ranks.get_mut(&worker) else {
            return;
        };
        if let Some(learned) = rank.first_token(ticket, now_ms) {
            self.fleet.observe(learned.0, learned.1);
            self.speed = self.fleet.solve(Speed::default());
            rank.learn(learned, self.speed, now_ms);
        }
    }

    fn usage(&mut self, role: Role, ticket: Ticket, worker: WorkerId, usage: Usage) {
        let Some(sent) = self.tickets.get(&ticket) else {
            return;
        };
        let (units, is_estimated, expected) = (sent.units, sent.is_estimated, sent.expected_cached);
        let prompt_tokens = f64::from(usage.prompt_tokens);
        if is_estimated && usage.prompt_tokens > 0 {
            self.count(prompt_tokens, units as f64);
        }
        if let Some(tokens) = usage.completion_tokens.filter(|_| role != Role::Prefill) {
            self.answer_tokens += 0.02 * (f64::from(tokens) - self.answer_tokens);
        }
        let (Some(cached), Some(rank)) = (usage.cached_tokens, self.ranks.get_mut(&worker)) else {
            return;
        };
        if role == Role::Decode {
            return; // what it reports is its prefill worker's
        }
        let cached = f64::from(cached.min(usage.prompt_tokens));
        rank.counted(ticket, prompt_tokens - cached, cached);
        if let Some(expected) = expected {
            let found = (cached / expected).min(1.0);
            rank.confidence += CONFIDENCE_STEP * (found - rank.confidence);
        }
    }

    fn finished(
        &mut self,
        ticket: Ticket,
        worker: WorkerId,
        is_kept: bool,
        hashes: &[u64],
        now_ms: f64,
    ) {
        let Some(sent) = self.tickets.remove(&ticket) else {
            return;
        };
        if let Some(rank) = self.ranks.get_mut(&worker) {
            rank.kv_tokens = (rank.kv_tokens - sent.kv_tokens).max(0.0);
            rank.ended(ticket, now_ms);
        }
        if !is_kept && !sent.is_first_token_seen {
            self.tree.retract(worker, hashes, sent.stamp, sent.held);
        }
    }

    fn reported(&mut self, worker: WorkerId, queued_tokens: u64, age_ms: u64, now_ms: f64) {
        let speed = self.speed;
        // A rank with nothing to do does not repeat that, so its report is as good as new.
        let age_ms = if queued_tokens == 0 { 0 } else { age_ms };
        if let Some(rank) = self.ranks.get_mut(&worker) {
            rank.reported(queued_tokens as f64, now_ms - age_ms as f64, speed, now_ms);
        }
    }
}

impl Cost {
    /// What running there costs a request that will take `tokens` of KV.
    fn decode_ms(&self, rank: &Rank, load: usize, tokens: f64) -> f64 {
        let capacity = rank.facts.capacity_tokens;
        let capacity = capacity.unwrap_or(self.params.default_capacity_tokens);
        let used = ((rank.kv_tokens + tokens) / capacity.max(1) as f64).min(KV_FULL);
        self.params.request_ms * load as f64 + self.params.kv_ms * used / (1.0 - used)
    }
}

impl Policy for Cost {
    fn name(&self) -> &'static str {
        "cost"
    }

    fn needs_blocks(&self) -> bool {
        true
    }

    fn as_cost(&self) -> Option<&Cost> {
        Some(self)
    }

    fn choose(
        &self,
        req: &RequestView<'_>,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        let mut state = self.lock();
        let (mut options, deepest) = state.estimate(self, req, ready);
        let size = state.size_of(&req.prompt);
        if self.role == Role::Decode {
            // Nobody knows here where the pages come from: as if from another machine, hidden by no prefill.
            for option in &mut options {
                option.cost_ms += (size.tokens - option.cached) * self.params.pull_far_ms;
            }
        }
        let is_stale = self.role != Role::Decode && state.is_stale(&self.params, req.now_ms as f64);
        let chosen = self.pick(&options, deepest, size, is_stale, rng);
        state.scratch.options = options;
        chosen.map(|(_, choice)| choice)
    }

    fn observe(&self, event: &Event<'_>) {
        let mut state = self.lock();
        match *event {
            Event::Routed {
                ticket,
                worker,
                request,
                tells_first_token,
            } => state.routed(self, ticket, worker, request, tells_first_token),
            Event::FirstToken {
                ticket,
                worker,
                now_ms,
            } => state.first_token(ticket, worker, now_ms as f64),
            Event::Usage {
                ticket,
                worker,
                usage,
            } => state.usage(self.role, ticket, worker, usage),
            Event::Finished {
                ticket,
                worker,
                is_kept,
                hashes,
                now_ms,
            } => state.finished(ticket, worker, is_kept, hashes, now_ms as f64),
            // A decode worker's queue is not of prompts to compute.
            Event::Reported { .. } if self.role == Role::Decode => {}
            Event::Reported {
                worker,
                queued_tokens,
                age_ms,
                now_ms,
            } => state.reported(worker, queued_tokens, age_ms, now_ms as f64),
            Event::WorkerAdded { worker, facts } => state.add(worker, facts),
            Event::WorkerGone { worker } => {
                state.ranks.remove(&worker);
                while state.tree.retire(worker, usize::MAX) {}
            }
        }
    }

    fn stats(&self, now_ms: u64) -> PolicyStats {
        let state = self.lock();
        let tree = state.tree.stats();
        let ratio = state.counted.0 / state.counted.1;
        let ranks = tree.tenants.iter().filter_map(|&(worker, blocks)| {
            let rank = state.ranks.get(&worker)?;
            Some(RankStats {
                worker,
                index_blocks: blocks,
                backlog_ms: rank.queued_ms(now_ms as f64),
                confidence: rank.confidence,
                ms_per_kilotoken: rank
                    .speed(state.speed, now_ms as f64)
                    .ms(Work::of(1e3, 0.0)),
            })
        });
        PolicyStats {
            ranks: ranks.collect(),
            tokens_per_unit: ratio,
            utilisation: state.utilisation(self, now_ms as f64),
            index_bytes: tree.bytes,
            evicted_total: tree.evicted_units_total,
            ..PolicyStats::default()
        }
    }
}

#[cfg(test)]
mod tests;
