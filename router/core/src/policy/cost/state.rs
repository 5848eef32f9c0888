//! State of `cost` for one role: the index, the ranks, the requests in flight, and the estimates
//! learned from them.

use std::collections::{BTreeMap, HashMap};

use super::decay::DecayingSum;
use super::params::CostModel;
use super::popularity::PrefixPopularity;
use super::prefix_locations::{HeldPrefix, InsertionReceipt, PrefixLocations};
use super::rank::{PendingPrompt, RankEstimate, WorkerReport};
use super::sessions::{SessionReceipt, SessionRecord, SessionTable};
use super::speed::{PrefillSpeed, PrefillWork, SpeedFit};
use crate::explain::{CostTerms, RecomputePrice};
use crate::kv::{CacheUpdate, CacheUpdateError};
use crate::prompt::{PromptView, SizeUnit};
use crate::types::{RequestView, Role, SendTicket, TokenUsage, WorkerFacts, WorkerId, WorkerView};

/// Weight of what a worker just reported against what was believed of its index.
const CONFIDENCE_STEP: f64 = 0.1;

#[derive(Debug)]
pub(super) struct CostState {
    pub(super) model: CostModel,
    pub(super) locations: PrefixLocations,
    pub(super) ranks: BTreeMap<WorkerId, RankEstimate>,
    pub(super) tickets: HashMap<SendTicket, SentRequest>,
    popularity: PrefixPopularity,
    pub(super) sessions: SessionTable,
    fleet: SpeedFit,
    pub(super) speed: PrefillSpeed,
    /// Predicted work dispatched to all.
    pub(super) work: DecayingSum,
    /// Tokens and bytes of texts whose tokens were counted, decayed.
    pub(super) counted: (f64, f64),
    /// Mean tokens in a block; 0 before the first.
    block_tokens: f64,
    /// Mean length of an answer [tokens].
    answer_tokens: f64,
    /// Buffers of `choose`, kept so that it allocates nothing once they have grown.
    pub(super) scratch: ScratchBuffers,
}

#[derive(Debug, Default)]
pub(super) struct ScratchBuffers {
    ids: Vec<WorkerId>,
    held: Vec<HeldPrefix>,
    pub(super) options: Vec<CandidateCost>,
}

/// Note about a request when it was sent.
#[derive(Debug)]
pub(super) struct SentRequest {
    receipt: InsertionReceipt,
    /// Blocks the worker held before.
    held: usize,
    session: Option<SessionReceipt>,
    /// Units of a text whose tokens were estimated by them.
    estimated_units: Option<usize>,
    /// Tokens expected in its cache; `None` when that was nothing.
    expected_cached: Option<f64>,
    is_first_token_seen: bool,
    sent_ms: f64,
    /// Tokens that were expected to be cached, by the index or the session.
    cached: f64,
    /// The time of its first token will be reported.
    reports_first_token: bool,
    /// Work of an answer that does not stream, once the worker has counted it.
    answer: Option<PrefillWork>,
}

/// Estimated cost of a candidate.
#[derive(Debug, Clone, Copy)]
pub(super) struct CandidateCost {
    pub(super) id: WorkerId,
    pub(super) host: u32,
    pub(super) domain: Option<u32>,
    /// Fetched of each prompt beside the pages of its tokens.
    pub(super) state_tokens: f64,
    /// Requests in flight.
    pub(super) load: usize,
    /// The request's session used it last.
    pub(super) is_session_worker: bool,
    pub(super) terms: CostTerms,
}

impl CandidateCost {
    /// Add what the other worker of a pair costs.
    pub fn add_partner(&mut self, partner_ms: f64, crossing_ms: f64) {
        self.terms.partner_ms = partner_ms;
        self.terms.crossing_ms = crossing_ms;
        self.terms.cost_ms += partner_ms;
    }
}

/// Sizes of a prompt that do not depend on the candidate.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptSize {
    pub(super) tokens: f64,
    pub(super) tokens_per_block: f64,
}

/// Tokens of a prompt of `prompt_tokens` that a session's worker is expected to hold beside the
/// `cached` ones. None at a rank without a cache, or at one that announced all it holds.
fn expected_session_tokens(
    session: SessionRecord,
    rank: &RankEstimate,
    prefix: HeldPrefix,
    prompt_tokens: f64,
    cached: f64,
) -> f64 {
    if rank.facts.is_cacheless || prefix.is_announced() {
        return 0.0;
    }
    session.expected_tokens(prompt_tokens, cached)
}

/// Predict the prefill time from the tokens of the terms.
fn predict_prefill(terms: &mut CostTerms, speed: PrefillSpeed) {
    let session_tokens = terms.session_tokens;
    let held_tokens = terms.cached_tokens + session_tokens;
    let work = PrefillWork::of_prompt(terms.uncached_tokens, held_tokens);
    terms.prefill_ms = speed.duration_ms(work);
    if session_tokens > 0.0 {
        let all_uncached = terms.uncached_tokens + session_tokens;
        let work_without = PrefillWork::of_prompt(all_uncached, terms.cached_tokens);
        terms.session_ms = speed.duration_ms(work_without) - terms.prefill_ms;
    }
}

impl CostState {
    pub fn new(model: CostModel) -> Self {
        Self {
            locations: PrefixLocations::new(model.params.max_bytes),
            sessions: SessionTable::new(model.params.max_sessions, model.params.session_idle_secs),
            model,
            ranks: BTreeMap::new(),
            tickets: HashMap::new(),
            popularity: PrefixPopularity::default(),
            fleet: SpeedFit::default(),
            speed: PrefillSpeed::default(),
            work: DecayingSum::default(),
            // A quarter of a token per character, as if 4 KB had been counted.
            counted: (1024.0, 4096.0),
            block_tokens: 0.0,
            answer_tokens: 256.0,
            scratch: ScratchBuffers::default(),
        }
    }

    pub fn add_worker(&mut self, worker: WorkerId, facts: WorkerFacts) {
        self.locations.add_worker(worker);
        self.ranks.insert(worker, RankEstimate::new(facts));
    }

    pub fn size_of(&self, prompt: &PromptView<'_>) -> PromptSize {
        let ratio = self.counted.0 / self.counted.1;
        let tokens = match prompt.tokens {
            Some(tokens) => f64::from(tokens),
            None => prompt.units as f64 * ratio,
        };
        let blocks = prompt.units as f64 / prompt.block_units.max(1) as f64;
        PromptSize {
            tokens,
            tokens_per_block: if blocks > 0.0 { tokens / blocks } else { 0.0 },
        }
    }

    /// Candidates with their costs, in no order, and how many blocks of the prompt any worker
    /// holds. The list is the scratch's: give it back.
    pub fn estimate_costs(
        &mut self,
        req: &RequestView<'_>,
        ready: &[WorkerView],
    ) -> (Vec<CandidateCost>, usize) {
        let now_ms = req.now_ms as f64;
        let size = self.size_of(&req.prompt);
        let ScratchBuffers {
            mut ids,
            mut held,
            mut options,
        } = std::mem::take(&mut self.scratch);
        ids.clear();
        ids.extend(ready.iter().map(|worker| worker.id));
        ids.sort_unstable();
        let deepest = self.locations.held_by(&req.prompt, &ids, &mut held, now_ms);
        options.clear();
        let session = self.sessions.find(req);
        let unknown_rank = RankEstimate::new(WorkerFacts::default());
        for worker in ready {
            let rank = self.ranks.get(&worker.id).unwrap_or(&unknown_rank);
            let entry = ids.binary_search(&worker.id).map(|index| held[index]);
            let prefix = entry
                .ok()
                .filter(|_| !rank.facts.is_cacheless)
                .unwrap_or_default();
            let cached = prefix.cached_tokens(size.tokens, size.tokens_per_block, rank.confidence);
            let session_here = session.filter(|session| session.worker == worker.id);
            let session_tokens = session_here.map_or(0.0, |session| {
                expected_session_tokens(session, rank, prefix, size.tokens, cached)
            });
            let load = worker.load + rank.others_load(now_ms).requests;
            let mut terms = CostTerms {
                held_blocks: prefix.blocks,
                cached_tokens: cached,
                session_tokens,
                uncached_tokens: size.tokens - cached - session_tokens,
                index_blocks: self.locations.size_of(worker.id),
                recent_ms: rank.work.value_at(now_ms, self.model.tau_ms()),
                ..CostTerms::default()
            };
            if self.model.role != Role::Decode {
                let speed = rank.prefill_speed(self.speed, now_ms);
                predict_prefill(&mut terms, speed);
                terms.backlog_ms = rank.backlog_ms(terms.prefill_ms, now_ms);
            }
            if self.model.role != Role::Prefill {
                let kv_tokens = size.tokens + self.answer_tokens;
                terms.decode_ms = self.model.decode_ms(rank, load, kv_tokens, now_ms);
                terms.cost_ms = terms.decode_ms;
            }
            let id = worker.id;
            let host = worker.host;
            let WorkerFacts {
                domain,
                state_tokens,
                ..
            } = rank.facts;
            options.push(CandidateCost {
                id,
                host,
                domain,
                state_tokens: state_tokens as f64,
                load,
                is_session_worker: session_here.is_some(),
                terms,
            });
        }
        if self.model.role != Role::Decode {
            let price = self.recompute_price(req, deepest).price;
            let prefill_times = options.iter().map(|option| option.terms.prefill_ms);
            let least_ms = prefill_times.fold(f64::INFINITY, f64::min);
            for CandidateCost { terms, .. } in &mut options {
                terms.cost_ms +=
                    terms.backlog_ms + least_ms + price * (terms.prefill_ms - least_ms);
            }
        }
        self.scratch.ids = ids;
        self.scratch.held = held;
        (options, deepest)
    }

    /// Price of a millisecond of computing again, with its factors.
    pub fn recompute_price(&self, req: &RequestView<'_>, deepest: usize) -> RecomputePrice {
        let now_ms = req.now_ms as f64;
        let utilization = self.utilization(now_ms);
        let beta_max = self.model.params.beta_max;
        let is_below_max = utilization < beta_max / (1.0 + beta_max);
        let beta = if is_below_max {
            utilization / (1.0 - utilization)
        } else {
            beta_max
        };
        let shared = deepest
            .checked_sub(1)
            .map(|last_block| req.prompt.hashes[last_block]);
        let heat = shared.map_or(0.0, |hash| self.popularity.arrivals_of(hash, now_ms));
        RecomputePrice {
            utilization,
            beta,
            heat,
            price: (1.0 + beta) / (1.0 + 0.1 * heat),
        }
    }

    /// Prefill work dispatched per worker and second, 1 = as much as they can do.
    pub fn utilization(&self, now_ms: f64) -> f64 {
        let tau_ms = self.model.tau_ms();
        self.work.value_at(now_ms, tau_ms) / (tau_ms * self.ranks.len().max(1) as f64)
    }

    /// True if workers report their queues, and the reports are old; never for decode workers.
    pub fn is_stale(&self, now_ms: f64) -> bool {
        let reports = self.ranks.values().filter_map(|rank| rank.report);
        let newest = || reports.map(|report| report.at_ms).max_by(f64::total_cmp);
        let limit_ms = 2.0 * self.model.params.report_interval_ms as f64;
        self.model.role != Role::Decode && newest().is_some_and(|at_ms| now_ms - at_ms > limit_ms)
    }

    pub fn on_routed(
        &mut self,
        ticket: SendTicket,
        worker: WorkerId,
        req: &RequestView<'_>,
        reports_first_token: bool,
    ) {
        if !self.ranks.contains_key(&worker) {
            return;
        }
        let now_ms = req.now_ms as f64;
        let prompt = &req.prompt;
        if let (SizeUnit::Bytes, Some(tokens)) = (prompt.unit, prompt.tokens) {
            self.count_tokens(f64::from(tokens), prompt.units as f64);
        }
        let size = self.size_of(prompt);
        let mut list = std::mem::take(&mut self.scratch.held);
        let deepest = self.locations.held_by(prompt, &[worker], &mut list, now_ms);
        let prefix = list.first().copied().unwrap_or_default();
        self.scratch.held = list;
        if let Some(last_block) = deepest.checked_sub(1) {
            self.popularity
                .record_arrival(prompt.hashes[last_block], now_ms);
        }
        let kv_tokens = size.tokens + self.answer_tokens;
        let speed = self.speed;
        let Some(rank) = self.ranks.get_mut(&worker) else {
            return;
        };
        let cached = prefix.cached_tokens(size.tokens, size.tokens_per_block, rank.confidence);
        let session = self.sessions.find(req);
        let session_here = session.filter(|session| session.worker == worker);
        let session_tokens = session_here.map_or(0.0, |session| {
            expected_session_tokens(session, rank, prefix, size.tokens, cached)
        });
        let expected_cached = cached + session_tokens;
        let uncached = size.tokens - expected_cached;
        if self.model.role != Role::Prefill {
            rank.book_kv(ticket, kv_tokens, now_ms);
        }
        if self.model.role != Role::Decode {
            let predicted_ms = rank
                .prefill_speed(speed, now_ms)
                .duration_ms(PrefillWork::of_prompt(uncached, expected_cached));
            let sent_ms = now_ms;
            rank.queue_prompt(PendingPrompt {
                ticket,
                uncached,
                cached: expected_cached,
                predicted_ms,
                sent_ms,
                reports_first_token,
            });
            if reports_first_token {
                rank.stream_began(now_ms);
            }
            rank.work.add(predicted_ms, now_ms, self.model.tau_ms());
            self.work.add(predicted_ms, now_ms, self.model.tau_ms());
        }
        let capacity_tokens = self.model.capacity_tokens(rank);
        let max_blocks = self.blocks_of(capacity_tokens, size);
        let expected = prefix.cached_tokens(size.tokens, size.tokens_per_block, 1.0);
        let sent_request = SentRequest {
            receipt: self
                .locations
                .record_sent(worker, prompt, max_blocks, now_ms),
            held: prefix.blocks,
            session: self.sessions.record_sent(req, worker, size.tokens),
            estimated_units: (prompt.tokens.is_none() && !prompt.has_media).then_some(prompt.units),
            expected_cached: (expected > 0.0).then_some(expected),
            is_first_token_seen: false,
            sent_ms: now_ms,
            cached: expected_cached,
            reports_first_token,
            answer: None,
        };
        self.tickets.insert(ticket, sent_request);
    }

    /// Blocks in a cache of so many tokens. One limit for blocks of text and of token ids: by their
    /// mean, so that the rare kind evicts nothing of the other.
    fn blocks_of(&mut self, tokens: f64, size: PromptSize) -> Option<usize> {
        const KEEP: f64 = 0.99;
        if size.tokens_per_block <= 0.0 {
            return None;
        }
        self.block_tokens = match self.block_tokens {
            0.0 => size.tokens_per_block,
            mean => KEEP * mean + (1.0 - KEEP) * size.tokens_per_block,
        };
        Some((tokens / self.block_tokens) as usize)
    }

    /// A text of so many bytes has so many tokens.
    fn count_tokens(&mut self, tokens: f64, units: f64) {
        if units > 0.0 {
            const KEEP: f64 = 0.99;
            self.counted = (
                self.counted.0 * KEEP + tokens,
                self.counted.1 * KEEP + units,
            );
        }
    }

    pub fn on_first_token(&mut self, ticket: SendTicket, worker: WorkerId, now_ms: f64) {
        if let Some(sent) = self.tickets.get_mut(&ticket) {
            sent.is_first_token_seen = true;
            self.locations
                .record_prefilled(worker, sent.receipt, now_ms);
        }
        let Some(rank) = self.ranks.get_mut(&worker) else {
            return;
        };
        let measurement = rank.observe_first_token(ticket, now_ms);
        self.learn_speed(worker, measurement, now_ms);
    }

    fn learn_speed(
        &mut self,
        worker: WorkerId,
        measurement: Option<(PrefillWork, f64)>,
        now_ms: f64,
    ) {
        if let (Some((work, took_ms)), Some(rank)) = (measurement, self.ranks.get_mut(&worker)) {
            self.fleet.observe_duration(work, took_ms);
            self.speed = self.fleet.fit_speed(PrefillSpeed::default());
            rank.pace
                .observe_duration(self.speed.duration_ms(work), took_ms, now_ms);
        }
    }

    pub fn on_usage(&mut self, ticket: SendTicket, worker: WorkerId, usage: TokenUsage) {
        let role = self.model.role;
        let Some(sent) = self.tickets.get_mut(&ticket) else {
            return;
        };
        if let (Role::Regular, false, Some(output)) =
            (role, sent.reports_first_token, usage.completion_tokens)
        {
            let tokens = f64::from(usage.prompt_tokens);
            let cached = usage.cached_tokens.map_or(sent.cached, f64::from);
            let work = PrefillWork::of_prompt((tokens - cached).max(0.0), cached.min(tokens));
            sent.answer = Some(work.with_output(f64::from(output)));
        }
        let estimated_units = sent.estimated_units;
        let expected = sent.expected_cached;
        let session = sent.session;
        let prompt_tokens = f64::from(usage.prompt_tokens);
        if let Some(units) = estimated_units.filter(|_| usage.prompt_tokens > 0) {
            self.count_tokens(prompt_tokens, units as f64);
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
        rank.correct_tokens(ticket, prompt_tokens - cached, cached);
        if let Some(session) = session {
            self.sessions.learn(session, cached);
        }
        if let Some(expected) = expected {
            let found_share = (cached / expected).min(1.0);
            rank.confidence += CONFIDENCE_STEP * (found_share - rank.confidence);
        }
    }

    pub fn on_finished(
        &mut self,
        ticket: SendTicket,
        worker: WorkerId,
        is_kept: bool,
        hashes: &[u64],
        now_ms: f64,
    ) {
        let Some(sent) = self.tickets.remove(&ticket) else {
            return;
        };
        if let Some(rank) = self.ranks.get_mut(&worker) {
            rank.end_request(ticket, now_ms);
            if sent.reports_first_token {
                rank.stream_ended(now_ms);
            }
            let answer = sent.answer.filter(|_| is_kept);
            let measurement =
                answer.and_then(|work| rank.observe_answer(work, sent.sent_ms, now_ms));
            self.learn_speed(worker, measurement, now_ms);
        }
        if !is_kept && !sent.is_first_token_seen {
            self.locations
                .retract_failed(worker, hashes, sent.receipt, sent.held);
            if let Some(session) = sent.session {
                self.sessions.retract_failed(session, worker);
            }
        } else {
            self.locations
                .record_prefilled(worker, sent.receipt, now_ms);
        }
    }

    pub fn apply_cache_update(
        &mut self,
        worker: WorkerId,
        update: &CacheUpdate<'_>,
    ) -> Result<(), CacheUpdateError> {
        let rank = self
            .ranks
            .get_mut(&worker)
            .ok_or(CacheUpdateError::Forgotten)?;
        if *update == (CacheUpdate::Serve { is_exact: true }) {
            rank.confidence = 1.0; // what was learned of guesses does not hold for it
        }
        self.locations.apply_cache_update(worker, update)
    }

    pub fn on_report(&mut self, worker: WorkerId, mut report: WorkerReport, now_ms: f64) {
        let speed = self.speed;
        let Some(rank) = self.ranks.get_mut(&worker) else {
            return;
        };
        match self.model.role {
            Role::Prefill => report.running = None,
            Role::Decode if report.running.is_none() => return,
            Role::Decode => report.queued_tokens = 0, // not of prompts to compute
            Role::Regular => {}
        }
        // A rank with nothing to do does not repeat that, so its report is as good as new.
        if report.queued_tokens == 0 && report.running.is_none_or(|running| running.requests == 0) {
            report.age_ms = 0;
        }
        rank.apply_report(report, self.model.capacity_tokens(rank), speed, now_ms);
    }
}
