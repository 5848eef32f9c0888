//! The router against mock workers, over real sockets, in one process.

#![allow(clippy::unwrap_used)]

mod access;
mod admin;
mod browsers;
mod compat;
mod connections;
mod dialect_failover;
mod discovery;
mod docs;
mod draining;
mod explain;
mod failover;
mod faults;
mod file_kinds;
mod foreign_answers;
mod foreign_apis;
mod hung;
mod incarnations;
mod limits;
mod loads;
mod pair_attempts;
mod pairing;
mod pd;
mod poison;
mod policies;
mod process;
mod prompt_limit;
mod refusals;
mod regular;
mod retries;
mod router_fields;
mod shutdown;
mod support;
mod tls;
mod tokens;
mod trace;
mod ui;
mod verbs;
mod waiting;
