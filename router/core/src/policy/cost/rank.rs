//! Estimates of one worker (or DP rank): the prompts sent to it and not yet prefilled, and how fast
//! it is.
//!
//! The life of a prompt here:
//!
//! 1. sent: it joins the queue with its predicted time ([`RankEstimate::queue_prompt`]);
//! 2. its first token is seen: it leaves; the time since the engine turned to it is an observation
//!    of speed ([`RankEstimate::observe_first_token`]). Prompts were computed together if their
//!    first tokens come together, and are observed together. An engine that takes the shortest
//!    first works at several in turns: there a whole busy period is one observation;
//! 3. a request that does not stream shows no first token: its prompt leaves after the predicted
//!    time. Its end is an observation of prefill and output together, where no stream took part
//!    ([`RankEstimate::observe_answer`]);
//! 4. it fails or its client leaves: it leaves without an observation
//! ([`RankEstimate::end_request`]).
//!
//! The prompts run one after the other, as far as this knows; the head of the queue began when the
//! one before left.

use std::collections::{BTreeMap, VecDeque};

use super::decay::DecayingSum;
use super::speed::{ObservedPace, PrefillSpeed, PrefillWork};
use crate::types::{QueueOrder, RunningLoad, SendTicket, WorkerFacts};

/// First tokens closer than this came from one step [ms].
const ONE_STEP_MS: f64 = 2.0;
/// Prompts after which a busy period is observed though it goes on: what had begun before and what
/// is unfinished at its ends is small against them.
const BUSY_PERIOD: usize = 16;
/// Aging of engines that take the shortest prompt first: key = remaining - this × waited (the
/// engines' default).
const AGING: f64 = 0.05;
/// With such engines this part of the backlog counts as if it all ran before a new prompt: of
/// prompts not yet sent, some will overtake it. The rest is what would really run before. Found by
/// simulation (docs/routing.md).
const OVERTAKEN: f64 = 0.25;

/// A report that is not renewed is forgotten after this [ms].
const REPORT_LIFE_MS: f64 = 30_000.0;
/// No worker has more prompt tokens to compute than this: half an hour of work at 10 000 tokens a
/// second.
const MOST_QUEUED_TOKENS: u64 = 1 << 24;
/// No worker has more requests than this.
const MOST_REQUESTS: u64 = 1 << 16;

/// A worker's report of its load: see [`crate::types::Event::Reported`].
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct WorkerReport {
    pub(super) queued_tokens: u64,
    pub(super) running: Option<RunningLoad>,
    pub(super) age_ms: u64,
}

/// A prompt that was sent and shows no first token yet.
#[derive(Debug, Clone)]
pub struct PendingPrompt {
    pub ticket: SendTicket,
    pub uncached: f64,
    pub cached: f64,
    pub predicted_ms: f64,
    pub sent_ms: f64,
    /// True if a first token will be reported.
    pub reports_first_token: bool,
}

#[derive(Debug, Default)]
pub struct RankEstimate {
    pub facts: WorkerFacts,
    /// Tokens of KV that this router's requests use or will use: the sum of `in_flight`.
    pub kv_tokens: f64,
    /// This router's requests that decode here.
    in_flight: BTreeMap<SendTicket, InFlightWork>,
    /// How much of what the index says it holds is found there, 0 to 1, from what it reports.
    pub confidence: f64,
    pub report: Option<QueueReport>,
    /// Predicted work sent here.
    pub work: DecayingSum,
    queue: VecDeque<PendingPrompt>,
    /// Sum of the queue's predicted times.
    queued_ms: f64,
    /// When the head began to run.
    since_ms: f64,
    /// Silent prompts in the queue, and whether the present interval saw any other disturbance:
    /// such an interval teaches nothing about speed.
    silent: usize,
    is_disturbed: bool,
    /// First tokens of the last step (or busy period) and its time, not yet learned from: more of
    /// them may come.
    together: Option<GatheredWork>,
    /// Requests in flight that stream, and when one was last sent or ended.
    streams: usize,
    streamed_ms: f64,
    /// When the last answer that does not stream ended, and what is not yet learned from such
    /// answers.
    answered_ms: f64,
    answers: Option<GatheredWork>,
    /// Observed prefill times against what the fleet would have taken.
    pub pace: ObservedPace,
    /// True once its first prompts were observed: they met cold kernels and new connections, and
    /// say nothing of the next ones.
    is_warm: bool,
}

/// Work of several prompts, its time, and how many they are.
type GatheredWork = (PrefillWork, f64, usize);

/// A request of this router that decodes.
#[derive(Debug, Clone, Copy)]
struct InFlightWork {
    kv_tokens: f64,
    sent_ms: f64,
}

/// The worker's own report of its queue and its running batch.
#[derive(Debug, Clone, Copy)]
pub struct QueueReport {
    /// Work of other routers' prompts at that time [ms].
    pub others_ms: f64,
    /// Requests of other routers at that time, and the KV beyond what this router booked.
    others: OthersLoad,
    pub at_ms: f64,
}

/// Load of other routers at a worker that decodes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct OthersLoad {
    pub requests: usize,
    pub kv_tokens: f64,
}

impl RankEstimate {
    pub fn new(facts: WorkerFacts) -> Self {
        Self {
            facts,
            confidence: 1.0,
            ..Self::default()
        }
    }

    /// Prefill speed, given the fleet's.
    pub fn prefill_speed(&self, fleet: PrefillSpeed, now_ms: f64) -> PrefillSpeed {
        self.pace.worker_speed(fleet, now_ms)
    }

    /// The worker had `queued_tokens` to compute at `at_ms`; what this router did not send is
    /// others'. Of the report, what this router sent and the worker has finished since is taken for
    /// others' too, but then it has run off ([`RankEstimate::others_ms`]). An older report than the
    /// one known says nothing. A number that no worker can mean is no report: a worker that reports
    /// nonsense is not passed over for it.
    pub fn apply_report(
        &mut self,
        report: WorkerReport,
        capacity_tokens: f64,
        fleet: PrefillSpeed,
        now_ms: f64,
    ) {
        let at_ms = now_ms - report.age_ms as f64;
        if self.report.is_some_and(|newest| newest.at_ms > at_ms) {
            return;
        }
        self.settle_silent_prompts(now_ms);
        let requests = report.running.map_or(0, |running| running.requests);
        if report.queued_tokens > MOST_QUEUED_TOKENS || requests > MOST_REQUESTS {
            self.report = None;
            return;
        }
        let sent_prompts = self.queue.iter().filter(|pending| pending.sent_ms <= at_ms);
        let own: f64 = sent_prompts.map(|pending| pending.uncached).sum();
        let others = (report.queued_tokens as f64 - own).max(0.0);
        let speed = self.prefill_speed(fleet, now_ms);
        let others_ms = speed.duration_ms(PrefillWork::of_prompt(others, 0.0))
            - speed.duration_ms(PrefillWork::of_prompt(0.0, 0.0));
        let others = report.running.map(|running| {
            let used = running.pages_used as f64 / running.pages.max(1) as f64;
            self.not_booked(requests as usize, used.min(1.0) * capacity_tokens, at_ms)
        });
        self.report = Some(QueueReport {
            others_ms,
            others: others.unwrap_or_default(),
            at_ms,
        });
    }

    /// The part of a load at `at_ms` that this router's requests do not explain.
    fn not_booked(&self, requests: usize, kv_tokens: f64, at_ms: f64) -> OthersLoad {
        let own = || self.in_flight.values().filter(|own| own.sent_ms <= at_ms);
        let own_tokens: f64 = own().map(|own| own.kv_tokens).sum();
        let requests = requests.saturating_sub(own().count());
        let kv_tokens = kv_tokens - own_tokens;
        OthersLoad {
            requests,
            kv_tokens: kv_tokens.max(0.0),
        }
    }

    /// A request of this router will take `kv_tokens` here until it ends.
    pub fn book_kv(&mut self, ticket: SendTicket, kv_tokens: f64, sent_ms: f64) {
        self.in_flight
            .insert(ticket, InFlightWork { kv_tokens, sent_ms });
        self.kv_tokens += kv_tokens;
    }

    /// The last report, unless it is too old.
    fn current_report(&self, now_ms: f64) -> Option<QueueReport> {
        self.report
            .filter(|report| now_ms - report.at_ms <= REPORT_LIFE_MS)
    }

    /// Load of other routers beside this router's bookings, by the last report.
    pub fn others_load(&self, now_ms: f64) -> OthersLoad {
        self.current_report(now_ms)
            .map(|report| report.others)
            .unwrap_or_default()
    }

    pub fn queue_prompt(&mut self, pending: PendingPrompt) {
        self.settle_silent_prompts(pending.sent_ms);
        if self.queue.is_empty() {
            self.since_ms = pending.sent_ms;
            self.is_disturbed = false;
        }
        self.queued_ms += pending.predicted_ms;
        self.silent += usize::from(!pending.reports_first_token);
        self.queue.push_back(pending);
    }

    /// The worker counted the prompt: what is known better replaces what was predicted.
    pub fn correct_tokens(&mut self, ticket: SendTicket, uncached: f64, cached: f64) {
        if let Some(pending) = self.queue.iter_mut().find(|p| p.ticket == ticket) {
            pending.uncached = uncached;
            pending.cached = cached;
        }
    }

    /// Returns what was observed: work and its time.
    pub fn observe_first_token(
        &mut self,
        ticket: SendTicket,
        now_ms: f64,
    ) -> Option<(PrefillWork, f64)> {
        let observed = self.take_measured_work(ticket, now_ms)?;
        std::mem::replace(&mut self.is_warm, true).then_some(observed)
    }

    fn take_measured_work(
        &mut self,
        ticket: SendTicket,
        now_ms: f64,
    ) -> Option<(PrefillWork, f64)> {
        self.settle_silent_prompts(now_ms);
        let pending = self.remove_prompt(ticket)?;
        let took_ms = (now_ms - self.since_ms).max(0.0);
        self.since_ms = now_ms;
        if self.silent > 0 || std::mem::take(&mut self.is_disturbed) || !pending.reports_first_token
        {
            self.together = None;
            return None;
        }
        let work = PrefillWork::of_prompt(pending.uncached, pending.cached);
        match self.facts.order {
            QueueOrder::Arrival if took_ms >= ONE_STEP_MS => self
                .together
                .replace((work, took_ms, 1))
                .map(|(work, ms, _)| (work, ms)),
            QueueOrder::Arrival => {
                gather_work(&mut self.together, work, took_ms);
                None
            }
            QueueOrder::ShortestFirst => {
                let prompts = gather_work(&mut self.together, work, took_ms);
                let is_over = self.queue.is_empty() || prompts >= BUSY_PERIOD;
                self.together
                    .take_if(|_| is_over)
                    .map(|(work, ms, _)| (work, ms))
            }
        }
    }

    pub fn stream_began(&mut self, now_ms: f64) {
        self.streams += 1;
        self.streamed_ms = now_ms;
    }

    pub fn stream_ended(&mut self, now_ms: f64) {
        self.streams = self.streams.saturating_sub(1);
        self.streamed_ms = now_ms;
    }

    /// An answer that does not stream ended: all of `work`, its output included, since the one
    /// before ended.
    pub fn observe_answer(
        &mut self,
        work: PrefillWork,
        sent_ms: f64,
        now_ms: f64,
    ) -> Option<(PrefillWork, f64)> {
        let begin_ms = sent_ms.max(std::mem::replace(&mut self.answered_ms, now_ms));
        if self.streams > 0 || self.streamed_ms > begin_ms {
            self.answers = None;
            return None;
        }
        let took_ms = (now_ms - begin_ms).max(0.0);
        if took_ms < ONE_STEP_MS {
            gather_work(&mut self.answers, work, took_ms);
            return None;
        }
        let (work, ms, _) = self.answers.replace((work, took_ms, 1))?;
        std::mem::replace(&mut self.is_warm, true).then_some((work, ms))
    }

    /// The request is over, seen or not. Returns whether its first token had not been seen.
    pub fn end_request(&mut self, ticket: SendTicket, now_ms: f64) -> bool {
        if let Some(work) = self.in_flight.remove(&ticket) {
            self.kv_tokens -= work.kv_tokens;
        }
        if self.in_flight.is_empty() {
            self.kv_tokens = 0.0; // no rounding piles up
        }
        self.settle_silent_prompts(now_ms);
        let is_head = self.queue.front().is_some_and(|head| head.ticket == ticket);
        let Some(pending) = self.remove_prompt(ticket) else {
            return false;
        };
        if is_head {
            self.since_ms = now_ms;
        }
        self.is_disturbed = true;
        pending.reports_first_token
    }

    fn remove_prompt(&mut self, ticket: SendTicket) -> Option<PendingPrompt> {
        let index = self.queue.iter().position(|p| p.ticket == ticket)?;
        let pending = self.queue.remove(index)?;
        self.silent -= usize::from(!pending.reports_first_token);
        self.queued_ms -= pending.predicted_ms;
        if self.queue.is_empty() {
            self.queued_ms = 0.0; // no rounding piles up
        }
        Some(pending)
    }

    /// Silent prompts at the head whose predicted time is over leave.
    fn settle_silent_prompts(&mut self, now_ms: f64) {
        while let Some(head) = self.queue.front() {
            let end = self.since_ms + head.predicted_ms;
            if head.reports_first_token || end > now_ms {
                break;
            }
            let ticket = head.ticket;
            self.remove_prompt(ticket);
            self.since_ms = end;
            self.is_disturbed = true;
        }
    }

    /// Predicted time until a new prompt of `own_ms` would begin to run [ms].
    pub fn backlog_ms(&self, own_ms: f64, now_ms: f64) -> f64 {
        let all = self.queued_ms(now_ms);
        match self.facts.order {
            QueueOrder::Arrival => all,
            QueueOrder::ShortestFirst => {
                let before = self.before_ms(own_ms, now_ms).min(all);
                OVERTAKEN * all + (1.0 - OVERTAKEN) * before
            }
        }
    }

    /// All of it, this router's prompts and others'.
    pub fn queued_ms(&self, now_ms: f64) -> f64 {
        self.left_ms(now_ms) + self.others_ms(now_ms)
    }

    /// The queue's predicted time less what has run of it.
    fn left_ms(&self, now_ms: f64) -> f64 {
        let mut left = self.queued_ms;
        let mut start = self.since_ms;
        for head in &self.queue {
            let ran = (now_ms - start).clamp(0.0, head.predicted_ms);
            left -= ran;
            if head.reports_first_token || ran < head.predicted_ms {
                break;
            }
            start += head.predicted_ms;
        }
        left.max(0.0)
    }

    /// Part of the queue that has a smaller key than a new prompt of `own_ms`.
    fn before_ms(&self, own_ms: f64, now_ms: f64) -> f64 {
        let ran = (now_ms - self.since_ms).max(0.0);
        let mut before = 0.0;
        for (index, pending) in self.queue.iter().enumerate() {
            let ran = if index == 0 { ran } else { 0.0 };
            let remaining = (pending.predicted_ms - ran).max(0.0);
            if remaining - AGING * (now_ms - pending.sent_ms) <= own_ms {
                before += remaining;
            }
        }
        before
    }

    fn others_ms(&self, now_ms: f64) -> f64 {
        let left_ms = |report: QueueReport| report.others_ms - (now_ms - report.at_ms);
        self.current_report(now_ms)
            .map_or(0.0, |report| left_ms(report).max(0.0))
    }
}

/// Returns how many prompts are gathered now.
fn gather_work(together: &mut Option<GatheredWork>, work: PrefillWork, took_ms: f64) -> usize {
    let sum = together.get_or_insert_default();
    *sum = (sum.0.plus(work), sum.1 + took_ms, sum.2 + 1);
    sum.2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending(ticket: u64, predicted_ms: f64, sent_ms: f64, tells: bool) -> PendingPrompt {
        PendingPrompt {
            ticket: SendTicket(ticket),
            uncached: predicted_ms * 10.0,
            cached: 0.0,
            predicted_ms,
            sent_ms,
            reports_first_token: tells,
        }
    }

    fn rank(order: QueueOrder) -> RankEstimate {
        let facts = WorkerFacts {
            order,
            ..WorkerFacts::default()
        };
        RankEstimate {
            is_warm: true,
            ..RankEstimate::new(facts)
        }
    }

    #[test]
    fn first_observation_is_dropped() {
        let mut rank = RankEstimate::new(WorkerFacts::default());
        let seen: Vec<bool> = (1..=4)
            .map(|ticket| {
                let at_ms = 100.0 * ticket as f64;
                rank.queue_prompt(pending(ticket, 10.0, at_ms, true));
                rank.observe_first_token(SendTicket(ticket), at_ms + 10.0)
                    .is_some()
            })
            .collect();
        assert_eq!(seen, [false, false, true, true]); // each is seen with the next
    }

    #[test]
    fn backlog_is_what_was_sent_less_what_has_run_until_the_first_token_says() {
        let mut rank = rank(QueueOrder::Arrival);
        rank.queue_prompt(pending(1, 100.0, 1_000.0, true));
        rank.queue_prompt(pending(2, 50.0, 1_010.0, true));
        assert_eq!(rank.backlog_ms(0.0, 1_030.0), 120.0);
        // Slower than predicted: its own time is used up, the other's is not.
        assert_eq!(rank.backlog_ms(0.0, 1_500.0), 50.0);
        assert!(rank.observe_first_token(SendTicket(1), 1_500.0).is_none());
        assert_eq!(rank.backlog_ms(0.0, 1_520.0), 30.0);
        rank.observe_first_token(SendTicket(2), 1_540.0);
        assert_eq!(rank.backlog_ms(0.0, 1_540.0), 0.0);
    }

    #[test]
    fn request_without_a_first_token_leaves_when_its_time_is_over() {
        let mut rank = rank(QueueOrder::Arrival);
        rank.queue_prompt(pending(1, 100.0, 0.0, false));
        rank.queue_prompt(pending(2, 100.0, 0.0, true));
        assert_eq!(rank.backlog_ms(0.0, 130.0), 70.0);
        // Whatever silent prompts did to the interval teaches nothing.
        assert!(rank.observe_first_token(SendTicket(2), 200.0).is_none());
        rank.queue_prompt(pending(3, 10.0, 300.0, true));
        rank.observe_first_token(SendTicket(3), 330.0);
        rank.queue_prompt(pending(4, 10.0, 400.0, true));
        assert_eq!(
            rank.observe_first_token(SendTicket(4), 430.0),
            Some((PrefillWork::of_prompt(100.0, 0.0), 30.0))
        );
        assert!(!rank.end_request(SendTicket(1), 500.0) && !rank.end_request(SendTicket(4), 500.0));
    }

    #[test]
    fn prompts_of_one_step_are_observed_together_and_failed_ones_not_at_all() {
        let mut rank = rank(QueueOrder::Arrival);
        for ticket in 1..=3 {
            rank.queue_prompt(pending(ticket, 10.0, 0.0, true));
        }
        assert!(rank.observe_first_token(SendTicket(2), 60.0).is_none());
        assert!(rank.observe_first_token(SendTicket(1), 60.0).is_none());
        let two = PrefillWork::of_prompt(100.0, 0.0).plus(PrefillWork::of_prompt(100.0, 0.0));
        assert_eq!(
            rank.observe_first_token(SendTicket(3), 80.0),
            Some((two, 60.0))
        );
        rank.queue_prompt(pending(4, 10.0, 100.0, true));
        rank.queue_prompt(pending(5, 10.0, 100.0, true));
        assert!(
            rank.end_request(SendTicket(4), 130.0),
            "no first token was seen"
        );
        assert!(rank.observe_first_token(SendTicket(5), 140.0).is_none());
        assert_eq!(rank.backlog_ms(0.0, 140.0), 0.0);
    }

    #[test]
    fn shortest_first_engines_let_a_short_prompt_overtake() {
        let mut fifo = rank(QueueOrder::Arrival);
        let mut srpt = rank(QueueOrder::ShortestFirst);
        for rank in [&mut fifo, &mut srpt] {
            rank.queue_prompt(pending(1, 10_000.0, 0.0, true));
            rank.queue_prompt(pending(2, 20.0, 0.0, true));
        }
        assert_eq!(fifo.backlog_ms(50.0, 0.0), 10_020.0);
        assert_eq!(srpt.backlog_ms(50.0, 0.0), 0.25 * 10_020.0 + 0.75 * 20.0);
        assert_eq!(srpt.backlog_ms(20_000.0, 0.0), 10_020.0);
        // A prompt of 1000 ms that waited 19 s has the key of one of 50 ms.
        let mut srpt = rank(QueueOrder::ShortestFirst);
        srpt.queue_prompt(pending(1, 10.0, 0.0, true));
        srpt.queue_prompt(pending(2, 1_000.0, 0.0, true));
        assert_eq!(srpt.backlog_ms(49.0, 19_000.0), 0.25 * 1_000.0);
        assert_eq!(srpt.backlog_ms(51.0, 19_000.0), 1_000.0);
    }

    #[test]
    fn busy_period_of_a_shortest_first_engine_is_one_observation() {
        let mut rank = rank(QueueOrder::ShortestFirst);
        rank.queue_prompt(pending(1, 100.0, 0.0, true));
        rank.queue_prompt(pending(2, 10.0, 50.0, true)); // overtakes the first
        assert!(rank.observe_first_token(SendTicket(2), 70.0).is_none());
        let both = PrefillWork::of_prompt(100.0, 0.0).plus(PrefillWork::of_prompt(1_000.0, 0.0));
        assert_eq!(
            rank.observe_first_token(SendTicket(1), 120.0),
            Some((both, 120.0))
        );
        for ticket in 10..10 + BUSY_PERIOD as u64 {
            rank.queue_prompt(pending(ticket, 10.0, 200.0, true));
        }
        rank.queue_prompt(pending(99, 10.0, 200.0, true));
        let seen: Vec<bool> = (10..10 + BUSY_PERIOD as u64)
            .map(|ticket| {
                rank.observe_first_token(SendTicket(ticket), 200.0 + ticket as f64)
                    .is_some()
            })
            .collect();
        assert_eq!(seen.iter().position(|is| *is), Some(BUSY_PERIOD - 1));
    }

    #[test]
    fn work_of_other_routers_counts_and_runs_off() {
        let mut rank = rank(QueueOrder::Arrival);
        rank.report = Some(QueueReport {
            others_ms: 500.0,
            others: OthersLoad::default(),
            at_ms: 1_000.0,
        });
        assert_eq!(rank.backlog_ms(0.0, 1_200.0), 300.0);
        assert_eq!(rank.backlog_ms(0.0, 2_000.0), 0.0);
    }

    #[test]
    fn reports_are_believed_within_bounds_and_for_a_while() {
        let mut rank = rank(QueueOrder::Arrival);
        let backlog_ms = |rank: &mut RankEstimate, queued_tokens, now_ms| {
            let report = WorkerReport {
                queued_tokens,
                ..WorkerReport::default()
            };
            rank.apply_report(report, 1e6, PrefillSpeed::default(), now_ms);
            rank.backlog_ms(0.0, now_ms)
        };
        assert_eq!(backlog_ms(&mut rank, 10_000, 1_000.0), 1_000.0);
        assert_eq!(backlog_ms(&mut rank, u64::MAX, 2_000.0), 0.0);
        assert_eq!(backlog_ms(&mut rank, 1_000_000, 3_000.0), 100_000.0);
        assert_eq!(rank.backlog_ms(0.0, 3_000.0 + REPORT_LIFE_MS), 70_000.0);
        assert_eq!(
            rank.backlog_ms(0.0, 3_001.0 + REPORT_LIFE_MS),
            0.0,
            "it was not renewed"
        );
    }
}
