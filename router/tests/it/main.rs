//! The router against mock workers, over real sockets, in one process.

#![allow(clippy::unwrap_used)]

mod clients;
mod foreign;
mod operation;
mod requests;
mod resilience;
mod support;
mod workers;
