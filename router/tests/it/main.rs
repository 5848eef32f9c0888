//! The router against mock workers, over real sockets, in one process.

#![allow(clippy::unwrap_used)]

mod admin;
mod discovery;
mod docs;
mod loads;
mod pd;
mod policies;
mod process;
mod regular;
mod shutdown;
mod support;
mod tls;
