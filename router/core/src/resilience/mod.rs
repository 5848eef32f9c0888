//! Failures of workers and requests: breakers, retries, penalties.

/// Reasons of failed attempts and their classes.
pub mod attempt_reason;
/// Circuit breakers.
pub mod breaker;
/// Health from probes.
pub mod health;
/// The process that a worker's description belongs to.
pub mod incarnation;
/// Requests that break workers.
pub mod poison;
/// Turns of streams that resume.
pub mod resume_pacer;
/// Limits, budget and backoff of retries.
pub mod retry;
/// Decisions after a failed attempt.
pub mod retry_verdict;
/// Workers that refuse requests.
pub mod worker_penalty;
