//! Types that all policies share: candidates, requests, choices and their reasons.

use std::fmt;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

use crate::prompt::PromptView;

/// Id of a registered (url, DP rank). Given out by the registry, never reused, so a stale id can
/// only miss.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Part of a request that a worker computes.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Display, IntoStaticStr,
)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Prefill and decode in one process.
    Regular,
    Prefill,
    Decode,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Regular, Role::Prefill, Role::Decode];

    /// Place in [`Role::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// A candidate. The shell passes only ready ones: healthy, breaker not open, not draining, right
/// role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerView {
    pub id: WorkerId,
    /// Requests in flight to it, as this router counts them.
    pub load: usize,
    /// Candidates with the same number are on one machine: KV pages travel between them through
    /// memory.
    pub host: u32,
}

/// In which order a worker's engine takes waiting prompts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueueOrder {
    /// First come, first served, or nearly so.
    #[default]
    Arrival,
    /// Shortest remaining prefill first with aging, re-decided at chunk boundaries.
    ShortestFirst,
}

/// Facts that a worker reported about itself; the default is what one that reports nothing gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WorkerFacts {
    /// Tokens its KV cache holds, of one rank.
    pub capacity_tokens: Option<u64>,
    pub order: QueueOrder,
    /// The worker keeps no prefixes: prompts sent there are not found again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_cacheless: bool,
    /// Topology domain (zone, rack); workers with the same number are in one. `None`: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<u32>,
    /// What a decode worker fetches of each prompt beside the pages of its tokens, as so many
    /// tokens: the states of recurrent layers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub state_tokens: u64,
}

/// Serde hands over a reference.
fn is_zero(tokens: &u64) -> bool {
    *tokens == 0
}

/// Id of one sending of one request to one worker. Given out by the shell, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SendTicket(pub u64);

/// Request as a policy sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestView<'a> {
    /// Routing text: what `cache_aware`'s tree indexes. May be empty when
    /// [`Policy::needs_text`](crate::Policy::needs_text) is false.
    pub text: &'a str,
    /// The prompt's block hashes. May be empty when
    /// [`Policy::needs_blocks`](crate::Policy::needs_blocks) is false.
    pub prompt: PromptView<'a>,
    /// The client's own affinity key (header), if it sent one.
    pub routing_key: Option<&'a str>,
    /// Name of the conversation, agent or user that the request belongs to, if it has one: a hint
    /// for `cost`, which may go another way.
    pub session_key: Option<&'a str>,
    pub now_ms: u64,
}

/// Expectation of `cost` for the worker it chose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillForecast {
    pub prompt_tokens: u32,
    /// Tokens of these that it holds already or is about to compute for another request.
    pub cached_tokens: u32,
    /// Until the first token: its queue and this prompt [ms].
    pub ttft_ms: u32,
    /// Best predictions among all candidates, for comparison with the chosen one.
    pub best_cached_tokens: u32,
    pub best_ttft_ms: u32,
}

/// When a worker would begin to answer.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TtftEstimate {
    /// Prompts it has to compute before [ms].
    pub queue_ms: f64,
    /// This prompt [ms].
    pub prefill_ms: f64,
}

impl TtftEstimate {
    pub fn ttft_ms(&self) -> u64 {
        (self.queue_ms + self.prefill_ms).round() as u64
    }

    /// How much later than `limit_ms` that is, as far as waiting can help; `None`: it is in time,
    /// or there is no queue. Without a queue the request is the one that teaches how long it takes:
    /// a prediction that was too high must not refuse all requests indefinitely.
    pub fn excess_ms(&self, limit_ms: u64) -> Option<u64> {
        let excess_ms = self.ttft_ms().checked_sub(limit_ms).filter(|ms| *ms > 0)?;
        let queue_ms = self.queue_ms.ceil() as u64;
        (queue_ms > 0).then_some(excess_ms.min(queue_ms))
    }
}

/// Why a worker was chosen. The name is a metric label, so dashboards explain decisions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum SelectionReason {
    /// Drawn at random.
    Random,
    /// The next in turn.
    RoundRobin,
    /// The less loaded of two drawn workers.
    LowerOfTwo,
    /// The longest matching prefix lies there: `matched_chars` of the `total_chars` of the routing
    /// text.
    PrefixHit {
        matched_chars: usize,
        total_chars: usize,
    },
    /// No prefix matched well: the worker with the smallest tree.
    SmallestTree,
    /// The least load.
    LeastLoaded,
    /// Least predicted cost, and no worker holds a longer prefix.
    BestHolder(PrefillForecast),
    /// Least predicted cost, though another holds a longer prefix.
    Cheaper(PrefillForecast),
    /// Least predicted cost; no worker holds any of it.
    NoPrefix(PrefillForecast),
    /// Least predicted cost; no worker is known to hold any of it, and the session used this one
    /// last.
    Session(PrefillForecast),
    /// Reports are stale: the cheaper of two drawn from the four cheapest.
    Sampled(PrefillForecast),
    /// The worker this routing key was given before.
    Sticky,
    /// First request with this routing key, or its workers are out: it was reassigned.
    NewKey,
    /// No routing key.
    NoKey,
    /// There was one candidate.
    Only,
}

impl SelectionReason {
    /// Prediction that the decision was made by, if it was.
    pub fn forecast(self) -> Option<PrefillForecast> {
        match self {
            SelectionReason::BestHolder(forecast)
            | SelectionReason::Cheaper(forecast)
            | SelectionReason::NoPrefix(forecast)
            | SelectionReason::Session(forecast)
            | SelectionReason::Sampled(forecast) => Some(forecast),
            _ => None,
        }
    }
}

impl fmt::Display for SelectionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.into_str())?;
        if let SelectionReason::PrefixHit {
            matched_chars,
            total_chars,
        } = self
        {
            write!(f, " {matched_chars}/{total_chars} chars")?;
        }
        if let Some(forecast) = self.forecast() {
            let PrefillForecast {
                cached_tokens,
                prompt_tokens,
                ttft_ms,
                ..
            } = forecast;
            write!(
                f,
                " {cached_tokens}/{prompt_tokens} tokens cached, {ttft_ms} ms"
            )?;
        }
        Ok(())
    }
}

/// A decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerChoice {
    pub worker: WorkerId,
    #[serde(flatten)]
    pub why: SelectionReason,
}

/// An event as a policy is given it.
pub type PolicyEvent<'a> = EventRecord<&'a RequestView<'a>, &'a [u64], WorkerFacts>;

/// Events in the order the shell saw them. The only way a policy learns. The type parameters
/// are the forms of the request, the prompt's hashes and the facts about a worker: borrowed here,
/// owned in the decision log.
///
/// `WorkerAdded` must come before the first `Routed` of that worker: a policy ignores workers that
/// were not added, so that a late `Routed` after `WorkerGone` cannot bring a dead worker's memory
/// back. Each `Routed` is followed by exactly one `Finished` of its ticket, with `FirstToken` and
/// `TokenUsage` in between if they were seen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EventRecord<R, H, F> {
    /// The request was sent to this worker. `reports_first_token`: a `FirstToken` will say when its
    /// prefill is over (the answer to a request that does not stream says it too late).
    #[serde(skip)]
    Routed {
        ticket: SendTicket,
        worker: WorkerId,
        request: R,
        reports_first_token: bool,
    },
    /// Prefill is over.
    FirstToken {
        ticket: SendTicket,
        worker: WorkerId,
        now_ms: u64,
    },
    /// Tokens that the worker counted.
    Usage {
        ticket: SendTicket,
        worker: WorkerId,
        #[serde(flatten)]
        usage: TokenUsage,
    },
    /// The request is over. `is_kept`: its prompt counts as cached, because the worker answered;
    /// `hashes` are the prompt's.
    Finished {
        ticket: SendTicket,
        worker: WorkerId,
        is_kept: bool,
        #[serde(rename = "has_hashes")]
        hashes: H,
        now_ms: u64,
    },
    /// The worker's report of its queue: prompt tokens sent to it, by any router, and not yet
    /// prefilled; and of its running batch, if it said so. It was true `age_ms` before it arrived.
    Reported {
        worker: WorkerId,
        queued_tokens: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        running: Option<RunningLoad>,
        age_ms: u64,
        now_ms: u64,
    },
    /// The worker may be chosen from now on.
    #[serde(rename = "added")]
    WorkerAdded {
        worker: WorkerId,
        #[serde(flatten)]
        facts: F,
    },
    /// The worker is not chosen any more.
    #[serde(rename = "gone")]
    WorkerGone { worker: WorkerId },
}

impl<R, H, F> EventRecord<R, H, F> {
    /// The same event with hashes and facts in another form; `None` for `Routed`, which is recorded
    /// with the decision.
    pub(crate) fn map_forms<Q, G, K>(
        &self,
        hashes_form: impl FnOnce(&H) -> G,
        facts_form: impl FnOnce(&F) -> K,
    ) -> Option<EventRecord<Q, G, K>> {
        use EventRecord as E;
        Some(match *self {
            Self::Routed { .. } => return None,
            Self::FirstToken {
                ticket,
                worker,
                now_ms,
            } => E::FirstToken {
                ticket,
                worker,
                now_ms,
            },
            Self::Usage {
                ticket,
                worker,
                usage,
            } => E::Usage {
                ticket,
                worker,
                usage,
            },
            Self::Finished {
                ticket,
                worker,
                is_kept,
                ref hashes,
                now_ms,
            } => E::Finished {
                ticket,
                worker,
                is_kept,
                hashes: hashes_form(hashes),
                now_ms,
            },
            Self::Reported {
                worker,
                queued_tokens,
                running,
                age_ms,
                now_ms,
            } => E::Reported {
                worker,
                queued_tokens,
                running,
                age_ms,
                now_ms,
            },
            Self::WorkerAdded { worker, ref facts } => E::WorkerAdded {
                worker,
                facts: facts_form(facts),
            },
            Self::WorkerGone { worker } => E::WorkerGone { worker },
        })
    }
}

/// Requests and KV pages at a worker, of all routers, as the worker reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningLoad {
    /// Running and waiting ones.
    pub requests: u64,
    /// Pages in use that cannot be evicted.
    pub pages_used: u64,
    pub pages: u64,
}

/// `usage` of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TokenUsage {
    pub prompt_tokens: u32,
    pub cached_tokens: Option<u32>,
    pub completion_tokens: Option<u32>,
}

/// A decision to make: the request is sent where it falls, so its tickets are given beforehand.
#[derive(Debug, Clone, Copy)]
pub struct RoutingRequest<'a> {
    pub request: RequestView<'a>,
    /// Draws all chance of this decision.
    pub seed: u64,
    /// True to tell what was weighed.
    pub explains: bool,
    /// A regular worker's answer will show its first token.
    pub streams: bool,
}

impl RoutingRequest<'_> {
    /// A prefill worker's answer begins when the prompt is computed, streamed or not.
    pub fn reports_first_token(&self, role: Role) -> bool {
        self.streams || role == Role::Prefill
    }
}

#[cfg(test)]
mod tests {
    use super::TtftEstimate;

    #[test]
    fn too_late_is_what_a_queue_makes_too_late() {
        let ahead = |queue_ms, prefill_ms| TtftEstimate {
            queue_ms,
            prefill_ms,
        };
        assert_eq!(ahead(900.0, 100.0).excess_ms(1000), None);
        assert_eq!(ahead(900.0, 101.0).excess_ms(1000), Some(1));
        assert_eq!(
            ahead(0.0, 5000.0).excess_ms(1000),
            None,
            "no queue, no wait"
        );
        assert_eq!(
            ahead(10.0, 5000.0).excess_ms(1000),
            Some(10),
            "waiting helps no more than the queue is long"
        );
    }
}
