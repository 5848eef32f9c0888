//! `cost`: the worker with the least predicted cost in seconds. No threshold, no mode switch.
//!
//! ```text
//! cost(w) = backlog(w) + T_min + (1 + beta) · (T(w) - T_min) / (1 + 0.1 · heat)
//!
//! T(w)     predicted prefill time of this prompt at w, given the blocks w holds or is about to compute (speed.rs)
//! T_min    the least T over the candidates
//! backlog  predicted time sent to w and not finished (no first token seen), less the elapsed part (rank.rs)
//! beta     rho / (1 - rho), at most 8; rho = work dispatched per worker-second, mean over the last 30 s
//! heat     recent arrivals that ended on the deepest shared block of this prompt, 10 s decay (`PrefixPopularity`)
//! ```
//!
//! The parts:
//! * time instead of counts: a prompt of 100 000 tokens is seconds of work, ten of 100 are nothing;
//! * beta: computing a prefix again delays everyone behind it and evicts other blocks: nearly free
//!   at low load, it keeps the cluster stable near saturation. The plain argmin of time to first
//!   token has beta = 0;
//! * in-flight blocks: a prefix counts from when its prompt is sent, so two turns close together
//!   meet;
//! * heat: a copy of a hot prefix pays back over its next users, so those are copied early.
//!
//! A request with a session key (a conversation, an agent, a user) is expected to find a share of
//! the session's last prompt at the worker that got it, beside the prefixes of the index
//! (`sessions.rs`). T of that worker is less by it, so the key is worth at most that prefix: a
//! queue that is longer than the time saved goes before it, and a worker that is no candidate has
//! no part in it.
//!
//! Costs that differ by less than a prediction is worth are ties: they go to the session's worker,
//! then to the smallest index, the fewest requests in flight, the least recent work, and to chance.
//! A worker without the longest prefix must be cheaper by `hysteresis_ms` and `hysteresis_fraction`
//! to win. When workers report their queues and the reports are old, other routers may see the same
//! best worker: the cheaper of two drawn from the four cheapest is taken.
//!
//! For decode workers there is no prompt to compute:
//!
//! ```text
//! cost(j) = request_ms · requests in flight + kv_ms · k / (1 - k) + max(0, pull(i, j) - T(i))
//! ```
//!
//! with k the share of j's KV cache in use or promised, and pull the time to fetch the pages j
//! lacks from i, and the states of recurrent layers, as far as i's prefill does not hide it. A token takes longer from another machine
//! than from the same, and longest from another topology domain (zone, rack), where both domains
//! are known. [`CostPolicy::decide_pair`] minimizes the sum over pairs. Regular workers have both
//! costs. Requests and k count the requests of this router, and those of other routers as far as j
//! reports them.
//!
//! Sizes are tokens. Where they were not counted they are text units times a ratio that starts at a
//! quarter (a token in four characters) and follows the workers' reports.
//!
//! Budget: choose + observe < 100 µs (p99) at 128 workers and a prompt of 32 000 tokens
//! (`benches/choose.rs`).

/// Sums that decay with time.
mod decay;
/// Explanation of a choice.
mod explain;
/// Parameters, and what one role makes of them.
mod params;
/// How often prefixes are asked for.
mod popularity;
/// Workers that hold a prefix.
mod prefix_locations;
/// Estimates of a data-parallel rank.
mod rank;
/// Sessions and their workers.
mod sessions;
/// Measured prefill speed.
mod speed;
/// Estimates of all ranks.
mod state;

use std::sync::{Mutex, MutexGuard};

use rand::{Rng, RngCore};

use self::explain::ScoredChoice;
use self::params::CostModel;
pub use self::params::CostParams;
use self::rank::WorkerReport;
use self::speed::PrefillWork;
use self::state::{CandidateCost, CostState, PromptSize};
use super::tie_break::draw_two;
use super::{ExplainedChoice, Policy, PolicyInput, PolicyStats, RankStats};
use crate::explain::DecisionRule;
use crate::kv::{CacheUpdate, CacheUpdateError};
use crate::types::{
    PolicyEvent, PrefillForecast, RequestView, Role, SelectionReason, TtftEstimate, WorkerChoice,
    WorkerFacts, WorkerId, WorkerView,
};

/// Costs closer than this to the least are equal: speeds are learned from noisy times, and a fixed
/// preference for the one that was measured a little faster would send every prompt of an idle
/// fleet there.
const TIE_MS: f64 = 1.0;
const TIE_FRACTION: f64 = 0.02;
/// A fleet of more pairs than this is searched among the best few of each side.
const MAX_PAIRS: usize = 4096;
const BEST_OF_SIDE: usize = 8;
/// Cheapest candidates of which two are drawn when reports are stale.
const STALE_TOP: usize = 4;
/// A KV transfer's share of the time to first token.
#[derive(Debug, Clone, Copy)]
struct ExposedPull {
    ms: f64,
    /// Part of it that another topology domain costs.
    crossing_ms: f64,
}

/// See the module.
#[derive(Debug)]
pub struct CostPolicy {
    state: Mutex<CostState>,
}

impl CostPolicy {
    pub fn new(params: CostParams, role: Role) -> Self {
        Self {
            state: Mutex::new(CostState::new(CostModel { role, params })),
        }
    }

    /// Decide about a prefill and a decode worker together, by the sum of their costs. `self` is
    /// the prefill side's policy.
    pub fn decide_pair(
        &self,
        decode: &CostPolicy,
        req: &RequestView<'_>,
        [prefill_ready, decode_ready]: [&[WorkerView]; 2],
        rng: &mut dyn RngCore,
        explains: bool,
    ) -> Option<[ExplainedChoice; 2]> {
        let mut ours = self.lock_state();
        let mut theirs = decode.lock_state();
        let (mut p, deepest) = ours.estimate_costs(req, prefill_ready);
        let (mut d, decode_deepest) = theirs.estimate_costs(req, decode_ready);
        if p.len() * d.len() > MAX_PAIRS {
            keep_cheapest(&mut p);
            keep_cheapest(&mut d);
        }
        let size = ours.size_of(&req.prompt);
        // What the best decode worker for i adds decides over i; then the best for the chosen one.
        for i in &mut p {
            let joint = d.iter().map(|j| {
                let pull = theirs.exposed_pull(i, j, size);
                (j.terms.cost_ms + pull.ms, pull.crossing_ms)
            });
            let least = joint.min_by(|a, b| a.0.total_cmp(&b.0));
            let (partner_ms, crossing_ms) = least.unwrap_or((f64::INFINITY, 0.0));
            i.add_partner(partner_ms, crossing_ms);
        }
        let is_stale = ours.is_stale(req.now_ms as f64);
        let first = ours.pick_candidate(&p, deepest, size, is_stale, rng);
        let pair = first.and_then(|first| {
            for j in &mut d {
                let pull = theirs.exposed_pull(&first.best, j, size);
                j.add_partner(pull.ms, pull.crossing_ms);
            }
            let second = theirs.pick_candidate(&d, usize::MAX, size, false, rng)?;
            let explanations = explains.then(|| {
                let prefill = ours.explain_choice(req, &p, deepest, &first);
                [
                    prefill,
                    theirs.explain_choice(req, &d, decode_deepest, &second),
                ]
            });
            let [p, d] = explanations.map_or([None, None], |why| why.map(Some));
            Some([(first.choice, p), (second.choice, d)])
        });
        ours.scratch.options = p;
        theirs.scratch.options = d;
        pair
    }

    /// A worker's replica tells what the worker has cached ([`crate::kv`]).
    pub fn apply_cache_update(
        &self,
        worker: WorkerId,
        update: &CacheUpdate<'_>,
    ) -> Result<(), CacheUpdateError> {
        self.lock_state().apply_cache_update(worker, update)
    }

    /// A panic inside may have left the state half changed. It only predicts, so it restarts with
    /// the same workers rather than taking every later request down.
    fn lock_state(&self) -> MutexGuard<'_, CostState> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            let workers: Vec<(WorkerId, WorkerFacts)> = state
                .ranks
                .iter()
                .map(|(&id, rank)| (id, rank.facts))
                .collect();
            *state = CostState::new(state.model.clone());
            workers
                .into_iter()
                .for_each(|(id, facts)| state.add_worker(id, facts));
            self.state.clear_poison();
            state
        })
    }
}

impl CostState {
    /// Time in which `j` fetches the pages it lacks from `i`, and the states if the model has some,
    /// as far as the prefill there does not hide it.
    fn exposed_pull(&self, i: &CandidateCost, j: &CandidateCost, size: PromptSize) -> ExposedPull {
        let held_tokens = j.terms.cached_tokens + j.terms.session_tokens;
        let to_pull = (size.tokens - held_tokens).max(0.0) + j.state_tokens;
        let exposed = |token_ms: f64| (to_pull * token_ms - i.terms.prefill_ms).max(0.0);
        let params = &self.model.params;
        let is_near = i.host == j.host;
        let inside_ms = exposed(if is_near {
            params.pull_near_ms
        } else {
            params.pull_far_ms
        });
        let is_crossing = !is_near && i.domain.zip(j.domain).is_some_and(|(a, b)| a != b);
        let ms = if is_crossing {
            exposed(params.pull_crossing_ms.max(params.pull_far_ms))
        } else {
            inside_ms
        };
        ExposedPull {
            ms,
            crossing_ms: ms - inside_ms,
        }
    }

    /// The cheapest, with the rules for ties, hysteresis and stale reports. `deepest`: blocks of
    /// the prompt that anybody holds; above any number for decode workers, which have no holder to
    /// stay with.
    fn pick_candidate(
        &self,
        options: &[CandidateCost],
        deepest: usize,
        size: PromptSize,
        is_stale: bool,
        rng: &mut dyn RngCore,
    ) -> Option<ScoredChoice> {
        let ttft_ms =
            |of: &CandidateCost| (of.terms.backlog_ms + of.terms.prefill_ms).round() as u32;
        let cached = |of: &CandidateCost| of.terms.cached_tokens.round() as u32;
        let picked =
            |(best, equals): (CandidateCost, usize),
             rule,
             kind: fn(PrefillForecast) -> SelectionReason| ScoredChoice {
                choice: WorkerChoice {
                    worker: best.id,
                    why: match options.len() {
                        1 => SelectionReason::Only,
                        _ => kind(PrefillForecast {
                            prompt_tokens: size.tokens.round() as u32,
                            cached_tokens: cached(&best),
                            ttft_ms: ttft_ms(&best),
                            best_cached_tokens: options.iter().map(cached).max().unwrap_or(0),
                            best_ttft_ms: options.iter().map(ttft_ms).min().unwrap_or(0),
                        }),
                    },
                },
                best,
                equals,
                rule,
                hysteresis_ms: None,
            };
        if is_stale && options.len() > 2 {
            let best = sample_cheapest(options, rng)?;
            return Some(picked(
                (best, 1),
                DecisionRule::Sampled,
                SelectionReason::Sampled,
            ));
        }
        let cheapest = find_cheapest(options, |_| true, rng)?;
        let most_held = options
            .iter()
            .map(|option| option.terms.held_blocks)
            .max()
            .unwrap_or(0);
        if most_held == 0 || deepest == 0 {
            let why = if cheapest.0.is_session_worker {
                SelectionReason::Session
            } else {
                SelectionReason::NoPrefix
            };
            return Some(picked(cheapest, DecisionRule::LeastCost, why));
        }
        if cheapest.0.terms.held_blocks == most_held {
            return Some(picked(
                cheapest,
                DecisionRule::LeastCost,
                SelectionReason::BestHolder,
            ));
        }
        let holder = find_cheapest(options, |option| option.terms.held_blocks == most_held, rng)?;
        let params = &self.model.params;
        let holder_ms = holder.0.terms.cost_ms;
        let margin = (params.hysteresis_fraction * holder_ms).max(params.hysteresis_ms);
        let hysteresis_ms = (self.model.role != Role::Decode).then_some(margin);
        let is_near = hysteresis_ms.is_some_and(|ms| holder_ms - cheapest.0.terms.cost_ms < ms);
        let mut picked = if is_near {
            picked(
                holder,
                DecisionRule::Hysteresis,
                SelectionReason::BestHolder,
            )
        } else {
            picked(cheapest, DecisionRule::LeastCost, SelectionReason::Cheaper)
        };
        picked.hysteresis_ms = hysteresis_ms;
        Some(picked)
    }
}

/// The option with the least cost among those that pass, and of how many equal ones; see the module
/// for ties.
fn find_cheapest(
    options: &[CandidateCost],
    passes: impl Fn(&CandidateCost) -> bool,
    rng: &mut dyn RngCore,
) -> Option<(CandidateCost, usize)> {
    let passing = || options.iter().filter(|option| passes(option));
    let least = passing()
        .map(|option| option.terms.cost_ms)
        .min_by(f64::total_cmp)?;
    let limit = least + TIE_MS.max(TIE_FRACTION * least);
    let rank = |a: &CandidateCost, b: &CandidateCost| {
        let session = b.is_session_worker.cmp(&a.is_session_worker);
        let counts = (a.terms.index_blocks, a.load).cmp(&(b.terms.index_blocks, b.load));
        session
            .then(counts)
            .then(a.terms.recent_ms.total_cmp(&b.terms.recent_ms))
    };
    let tied = || passing().filter(|option| option.terms.cost_ms <= limit);
    let first = tied().min_by(|a, b| rank(a, b))?;
    // Those that are equal in everything: one of them, each with the same chance.
    let equals = || tied().filter(|option| rank(option, first).is_eq());
    let tie_count = equals().count();
    let index = match tie_count {
        1 => 0,
        _ => rng.random_range(0..tie_count),
    };
    equals().nth(index).map(|option| (*option, tie_count))
}

/// The cheaper of two drawn from the cheapest few.
fn sample_cheapest(options: &[CandidateCost], rng: &mut dyn RngCore) -> Option<CandidateCost> {
    let cost_ms = |option: CandidateCost| option.terms.cost_ms;
    let mut top: [Option<CandidateCost>; STALE_TOP] = [None; STALE_TOP];
    for option in options {
        let mut insert = Some(*option);
        for place in &mut top {
            if place.is_none_or(|held| insert.is_some_and(|new| cost_ms(new) < cost_ms(held))) {
                std::mem::swap(place, &mut insert);
            }
        }
    }
    let (first, second) = draw_two(top.iter().flatten().count(), rng);
    top[first.min(second)]
}

fn keep_cheapest(options: &mut Vec<CandidateCost>) {
    if options.len() > BEST_OF_SIDE {
        let cost_ms = |option: &CandidateCost| option.terms.cost_ms;
        options.select_nth_unstable_by(BEST_OF_SIDE, |a, b| cost_ms(a).total_cmp(&cost_ms(b)));
        options.truncate(BEST_OF_SIDE);
    }
}

impl Policy for CostPolicy {
    fn name(&self) -> &'static str {
        "cost"
    }

    fn needs_blocks(&self) -> bool {
        true
    }

    fn as_cost(&self) -> Option<&CostPolicy> {
        Some(self)
    }

    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        self.decide(input).map(|(choice, _)| choice)
    }

    fn decide(&self, input: &mut PolicyInput<'_>) -> Option<ExplainedChoice> {
        let req = input.request;
        let mut state = self.lock_state();
        let (mut options, deepest) = state.estimate_costs(req, input.ready);
        let size = state.size_of(&req.prompt);
        if state.model.role == Role::Decode {
            // Where the pages come from is not known here: as if from another machine, hidden by no
            // prefill.
            for option in &mut options {
                let to_pull = option.terms.uncached_tokens + option.state_tokens;
                let pull_ms = to_pull * state.model.params.pull_far_ms;
                option.add_partner(pull_ms, 0.0);
            }
        }
        let is_stale = state.is_stale(req.now_ms as f64);
        let decided = state
            .pick_candidate(&options, deepest, size, is_stale, input.rng)
            .map(|picked| {
                let explain = || state.explain_choice(req, &options, deepest, &picked);
                (picked.choice, input.explains.then(explain))
            });
        state.scratch.options = options;
        decided
    }

    fn best_ttft(&self, req: &RequestView<'_>, ready: &[WorkerView]) -> Option<TtftEstimate> {
        let mut state = self.lock_state();
        if state.model.role == Role::Decode {
            return None; // it computes no prompts
        }
        let (options, _) = state.estimate_costs(req, ready);
        let sum_ms = |option: &CandidateCost| option.terms.backlog_ms + option.terms.prefill_ms;
        let best = options
            .iter()
            .min_by(|a, b| sum_ms(a).total_cmp(&sum_ms(b)));
        let best_ttft = best.map(|option| TtftEstimate {
            queue_ms: option.terms.backlog_ms,
            prefill_ms: option.terms.prefill_ms,
        });
        state.scratch.options = options;
        best_ttft
    }

    fn observe(&self, event: &PolicyEvent<'_>) {
        let mut state = self.lock_state();
        match *event {
            PolicyEvent::Routed {
                ticket,
                worker,
                request,
                reports_first_token,
            } => state.on_routed(ticket, worker, request, reports_first_token),
            PolicyEvent::FirstToken {
                ticket,
                worker,
                now_ms,
            } => state.on_first_token(ticket, worker, now_ms as f64),
            PolicyEvent::Usage {
                ticket,
                worker,
                usage,
            } => state.on_usage(ticket, worker, usage),
            PolicyEvent::Finished {
                ticket,
                worker,
                is_kept,
                hashes,
                now_ms,
            } => state.on_finished(ticket, worker, is_kept, hashes, now_ms as f64),
            PolicyEvent::Reported {
                worker,
                queued_tokens,
                running,
                age_ms,
                now_ms,
            } => {
                let report = WorkerReport {
                    queued_tokens,
                    running,
                    age_ms,
                };
                state.on_report(worker, report, now_ms as f64);
            }
            PolicyEvent::WorkerAdded { worker, facts } => state.add_worker(worker, facts),
            PolicyEvent::WorkerGone { worker } => {
                state.ranks.remove(&worker);
                state.locations.remove_worker(worker);
            }
        }
    }

    fn stats(&self, now_ms: u64) -> PolicyStats {
        let state = self.lock_state();
        let ranks = state.ranks.iter().map(|(&worker, rank)| RankStats {
            worker,
            index_blocks: state.locations.size_of(worker),
            announced: state.locations.announced_rank(worker),
            backlog_ms: rank.queued_ms(now_ms as f64),
            confidence: rank.confidence,
            ms_per_kilotoken: rank
                .prefill_speed(state.speed, now_ms as f64)
                .duration_ms(PrefillWork::of_prompt(1e3, 0.0)),
        });
        PolicyStats {
            ranks: ranks.collect(),
            tokens_per_unit: state.counted.0 / state.counted.1,
            utilization: state.utilization(now_ms as f64),
            index_bytes: state.locations.bytes(),
            evicted_total: state.locations.evicted_total() + state.sessions.evicted_total(),
            keys: state.sessions.len(),
            ..PolicyStats::default()
        }
    }
}

#[cfg(test)]
mod announced_tests;
#[cfg(test)]
mod tests;
