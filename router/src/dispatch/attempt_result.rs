//! Outcomes of attempts.

use crate::dispatch::attempt::{AttemptError, UpstreamResponse};
use crate::dispatch::prefill_leg::PrefillAttempt;
use crate::error::RouteError;

/// Failure of one attempt, or of the last one of all.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub enum AttemptFailure {
    /// No worker could be chosen, or the request's time is over.
    Refused(#[from] RouteError),
    /// The attempt failed at a worker.
    Failed(#[from] AttemptError),
}

/// An answer that is committed to, with the prefill leg of a pair.
pub type AttemptResult = Result<(UpstreamResponse, Option<PrefillAttempt>), AttemptFailure>;
