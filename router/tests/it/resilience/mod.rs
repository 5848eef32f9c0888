//! Failures: retries, and streams that other workers resume.

mod dialect_failover;
mod failover;
mod faults;
mod poison;
mod retries;
mod waiting;
