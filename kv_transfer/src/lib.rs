//! `kv_transfer`: moves the KV pages of a prompt from the prefill node (P) that computed them to
//! the decode node (D).
//!
//! Life of a transfer ("room")
//! 1. P's engine offers the room and publishes prompt pages as they become final; D's engine opens
//!    it. Either may be first.
//! 2. D finds P's rank through the bootstrap server, connects and sends OPEN; P announces every
//!    final page: id, generation, checksum.
//! 3. D's engine grants pages of its own pool; D pulls, page by page, and verifies generation and
//!    checksum of each.
//! 4. P's engine finishes: FINAL carries the values that decode needs beside the pages. P's pages
//!    stay locked under a lease.
//! 5. D commits when every page is verified and sends DONE, which ends P's lease.
//!
//! Invariants
//! * Only its owner writes a pool. For shared memory the kernel enforces it (`pool`).
//! * A page of D's pool is written for a room only between its grant and its terminal event.
//! * No room commits with a page that was not verified after it was copied.
//! * Every room ends exactly once on each side, within its deadline, whichever process dies; every
//!   table has a limit.
//! * No call of the engine waits for the network (but `register_rank` and `close`).
//!
//! | module | subject |
//! |---|---|
//! | `pool` | the memory: sealed memfd, generations, read-only view of a peer's pool |
//! | `state_machine` | the two state machines of a room, pure; explored exhaustively by their tests |
//! | `protocol` | messages, frames, authentication, HELLO |
//! | `transport` | moving page bytes: `shm`, `tcp`, communicators; `fault_injection` for tests |
//! | `bootstrap` | the HTTP server and client by which D finds P |
//! | `node` | the I/O around the state machines: threads, sockets, timers, the engine's calls and events |
//! | `node::records` | events, metrics and the history of rooms |
//! | `warnings` | log lines about peers, at most one a minute about each |
//!
//! This crate knows no engines, routers, models or tensors. A page is bytes, whose coordinates are
//! compared and not interpreted (`protocol::GroupDescriptor`); FINAL's payload is opaque.

pub mod bootstrap;
pub mod node;
pub mod pool;
pub mod protocol;
pub mod reason_code;
pub mod state_machine;
pub mod transport;
mod warnings;

pub use bootstrap::BootstrapServer;
pub use node::{NodeError, NodeEvent, TransferNode};
pub use pool::{KvPool, PoolError};
pub use reason_code::ReasonCode;
