//! Where decode ranks find prefill ranks: SGLang's bootstrap HTTP interface, and a small client for
//! it.
//!
//! Life of a route: a P rank PUTs `/route` when it starts (again every few seconds, so a restarted
//! server fills up by itself); a D rank GETs it when it opens its first room with that rank; the P
//! rank removes it (DELETE) when it leaves. The table is not queried per request.
//!
//! With a cluster key every request but `/health` carries
//! `x-baton-auth: <unix ms> <nonce> <HMAC-SHA256>`, at most five minutes old, and its answer is
//! signed too (`auth`); without it any process that reaches the port could direct decode nodes to
//! its own prefill rank.

mod auth;
mod client;
mod registry;
mod server;

pub use auth::AUTH_HEADER;
pub use client::{BootstrapClient, HttpError, RankRoute, resolve};
pub use registry::{RankRegistration, RegisteredTopology, RouteTable, TableError, TopologySizes};
pub use server::BootstrapServer;
