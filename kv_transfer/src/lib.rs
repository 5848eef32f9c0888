//! `kv_transfer`: the KV pages of a prompt travel from the prefill node (P) that computed them to the decode node (D) that goes on.
//!
//! Life of a transfer ("room")
//! 1. P's engine offers the room and publishes prompt pages as they become final; D's engine opens it. Either may be first.
//! 2. D finds P's rank through the bootstrap server, connects, says OPEN; P tells it every final page: id, generation, checksum.
//! 3. D's engine grants pages of its own pool; D pulls, page by page, and verifies generation and checksum of each.
//! 4. P's engine finishes: FINAL carries what decode needs beside the pages. P's pages stay locked under a lease.
//! 5. D commits when every page is verified, says DONE, and P's lease ends.
//!
//! Invariants
//! * Nobody writes a pool but its owner. For shared memory the kernel enforces it (`pool`).
//! * A page of D's pool is written for a room only between its grant and its terminal event.
//! * No room commits with a page that was not verified after it was copied.
//! * Every room ends exactly once on each side, within its deadline, whatever dies; every table has a limit.
//! * No call of the engine waits for the network (but `register` and `close`).
//!
//! | module | what |
//! |---|---|
//! | `pool` | the memory: sealed memfd, generations, read-only view of a peer's pool |
//! | `state_machine` | the two state machines of a room, pure; explored exhaustively by their tests |
//! | `protocol` | messages, frames, authentication, HELLO |
//! | `transport` | moving page bytes: `shm`, `tcp`; `fault` for tests |
//! | `bootstrap` | the HTTP server and client by which D finds P |
//! | `node` | the shell: threads, sockets, timers, and the engine's calls and events |
//! | `node::room_history` | what happened to which room |
//!
//! Deliberately unknown here: engines, routers, models, tensors. A page is bytes, FINAL's payload is opaque.

pub mod bootstrap;
pub mod node;
pub mod pool;
pub mod protocol;
pub mod reason_code;
pub mod state_machine;
pub mod transport;

pub use bootstrap::BootstrapServer;
pub use node::{NodeError, NodeEvent, TransferNode};
pub use pool::{KvPool, PoolError};
pub use reason_code::ReasonCode;
