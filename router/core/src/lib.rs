//! Decisions of the router without its I/O: policies, the prefix tree, breaker, health, retries,
//! rooms.
//!
//! The life of one decision:
//!
//! 1. The router (crate `baton-router`) keeps the registry of workers and counts requests in
//!    flight.
//! 2. For a request it builds a [`RequestView`] and the [`WorkerView`]s of the workers that may
//!    take it.
//! 3. [`Policy::choose`] returns a [`WorkerChoice`]: a worker and the reason. It changes nothing.
//!    For a prefill and a decode worker together it is [`decide_pair`].
//! 4. The router dispatches and reports events through [`Policy::observe`]: sent, first token,
//!    usage, end.
//! 5. Every eviction interval the router calls [`Policy::evict`]; nothing here owns a thread or a
//!    timer.
//!
//! Unknown to this crate: tokio, HTTP, URLs, the clock. Time comes in as `now_ms`,
//! randomness as `rng`, so the same code runs in the server, in unit tests and in the simulator,
//! and the same seed gives the same decisions.

pub mod decision_log;
pub mod explain;
pub mod kv;
pub mod pairing;
pub mod policy;
pub mod policy_set;
pub mod prefix_tree;
pub mod prompt;
pub mod resilience;
pub mod types;

pub use explain::Explanation;
pub use pairing::bootstrap_room::{LiveRooms, draw_room};
pub use pairing::fingerprint::{FINGERPRINT_FIELDS, WorkerFingerprint};
pub use pairing::local_prefill::{LocalPrefillReason, LocalPrefillRule, LocalView};
pub use pairing::verdicts::{PairVerdicts, WorkerPair};
pub use policy::{
    AssignmentMode, CacheAwareParams, CostParams, ExplainedChoice, ManualParams, MissPolicy,
    Policy, PolicyInput, PolicyKind, PolicyParams, PolicyStats, RankStats, UnknownName,
    build_policy, decide_pair,
};
pub use policy_set::replay::{DecisionCounts, DecisionReplay, PolicyEvaluation, ReplayReport};
pub use policy_set::{PairConstraints, PolicySet, SplitMix64};
pub use prompt::{
    HashedPrompt, PromptBlocks, PromptView, SizeUnit, TextScope, TokenChain, cache_namespace,
    token_blocks,
};
pub use resilience::attempt_reason::{AttemptReason, ProtocolCode, RetryClass, StatusLabel};
pub use resilience::breaker::{BreakerConfig, BreakerState, CircuitBreaker, RequestOutcome};
pub use resilience::health::HealthCounter;
pub use resilience::incarnation::{
    DescribedProcess, DescriptionTrust, IncarnationWatch, ProcessSign,
};
pub use resilience::poison::{PoisonList, RequestBreaks, WorkerBreak};
pub use resilience::resume_pacer::{PacerTicket, ResumePacer};
pub use resilience::retry::{FailedAttempts, RetryBudget, RetryConfig};
pub use resilience::retry_verdict::{
    DoubtfulFailure, FailedAttempt, GiveUpReason, LostAnswer, RefutedWorker, ResumeVerdict,
    RetryHistory, RetryLimits, RetryPlan, RetryTarget, RetryVerdict, SelectionRefusal,
};
pub use resilience::worker_penalty::{
    DenialShare, WorkerObjection, WorkerPenalty, least_objection,
};
pub use types::{
    PolicyEvent, PrefillForecast, QueueOrder, RequestView, Role, RoutingRequest, RunningLoad,
    SelectionReason, SendTicket, TokenUsage, TtftEstimate, WorkerChoice, WorkerFacts, WorkerId,
    WorkerView,
};
