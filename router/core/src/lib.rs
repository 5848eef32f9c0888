//! What the router decides, without how it talks: policies, the prefix tree, breaker, health, retries, rooms.
//!
//! The life of one decision:
//!
//! 1. The shell (crate `baton-router`) keeps the registry of workers and counts requests in flight.
//! 2. For a request it builds a [`RequestView`] and the [`WorkerView`]s of the workers that may take it.
//! 3. [`Policy::choose`] returns a [`Choice`]: a worker and the reason. It changes nothing.
//!    For a prefill and a decode worker together it is [`choose_pair`].
//! 4. The shell dispatches and reports what happened through [`Policy::observe`]: sent, first token, usage, end.
//! 5. Every eviction interval the shell calls [`Policy::evict`]; nothing here owns a thread or a timer.
//!
//! What this crate does not know: tokio, HTTP, URLs, the clock. Time comes in as `now_ms`, randomness as `rng`, so the
//! same code runs in the server, in unit tests and in the simulator, and the same seed gives the same decisions.

pub mod breaker;
pub mod deciders;
pub mod explain;
pub mod fleet;
pub mod health;
pub mod journal;
pub mod kv;
pub mod local;
pub mod make;
pub mod pacer;
pub mod penalty;
pub mod poison;
pub mod policy;
pub mod prefix_tree;
pub mod prompt;
pub mod replay;
pub mod retry;
pub mod room;
pub mod types;

pub use breaker::{BreakerConfig, BreakerState, CircuitBreaker, Outcome};
pub use deciders::{Decided, Deciders, Seeded, Sending};
pub use explain::Explanation;
pub use health::{HealthChange, HealthConfig, HealthCounter};
pub use local::{LocalRule, LocalView, LocalWhy};
pub use make::{ASPECTS, Make};
pub use pacer::{PacerTicket, ResumePacer};
pub use penalty::{DenialShare, Objection, WorkerPenalty, least_objection};
pub use poison::{PoisonList, RequestBreaks};
pub use policy::{
    AssignmentMode, CacheAwareParams, CostParams, ManualParams, Miss, Policy, PolicyKind,
    PolicyParams, PolicyStats, RankStats, UnknownName, build, choose_fitting_pair, choose_pair,
    explain_pair,
};
pub use prompt::{Blocks, Prompt, TextScope, TokenChain, Unit, namespace, token_blocks};
pub use replay::Replay;
pub use retry::{BudgetConfig, FailedAttempts, RetryBudget, RetryClass, RetryConfig};
pub use room::{LiveRooms, draw_room};
pub use types::{
    Ahead, Choice, Event, Forecast, QueueOrder, RequestView, Role, RunningLoad, Ticket, Usage, Why,
    WorkerFacts, WorkerId, WorkerView,
};
