//! KV pages from prefill to decode.

pub mod pool;

pub use pool::{KvPool, PoolError};
