//! KV pages from prefill to decode.

pub mod bootstrap;
pub mod code;
pub mod ledger;
pub mod machine;
pub mod node;
pub mod pool;
pub mod protocol;
pub mod transport;

pub use bootstrap::BootstrapServer;
pub use code::Code;
pub use node::{NodeError, NodeEvent, TransferNode};
pub use pool::{KvPool, PoolError};
