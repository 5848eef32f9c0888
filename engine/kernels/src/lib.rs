//! CPU kernels that the engine needs and torch lacks or does slowly.
//!
//! | module | what it computes |
//! |---|---|
//! | [`linear`] | x * W^T + bias, any number of rows; weights packed at load, or quantized |
//! | [`experts`] | the experts of a mixture that a step's tokens chose, and their weighted sums |
//! | [`elementwise`] | RMS norm with or without residual, rotary embedding, gated activations |
//! | [`rows`] | nothing: checks the index vectors of a step |
//! | [`attention::append`] | new K and V of a step, scattered into the pages of the KV pool |
//! | [`attention`] | causal attention over the pages, decode and prefill rows in one call |
//! | [`attention::latent`] | the same over latents, which all heads share |
//! | [`recurrent`] | layers that keep a state of one size per sequence |
//!
//! A call: (1) the caller (baton.runtime, through `baton._native`) has checked shapes and passes
//! raw pointers; (2) the work is cut into items whose bounds do not depend on the number of
//! threads; (3) [`pool`] runs the items, each entered once through `simd::dispatch` at the level
//! [`isa`] found; (4) `tile` does nearly all arithmetic.
//!
//! # What is exact
//!
//! * Same inputs, same machine: same bits, for any number of threads.
//! * A row's result does not depend on the other rows of the call, nor on how a prompt was cut into
//!   chunks, nor on whether it was computed as prefill or as decode. This holds bit for bit: every
//!   sum is a chain in an order fixed by absolute positions (KV blocks of [`attention::BLOCK`]
//!   tokens from position 0), and what a mask hides adds exactly 0.
//! * f32 results are equal on the levels avx2 and avx512; bf16 results too, except where a bf16
//!   product or partial sum is subnormal on avx512_bf16 (the instruction flushes those to 0).
//!   `scalar` rounds each product on CPUs without FMA. Prefill and decode nodes with different
//!   levels agree to rounding only.
//!
//! Pointers are raw because the memory is torch's; each public function states what they must
//! cover.

pub mod attention;
mod elem;
pub mod elementwise;
pub mod experts;
pub mod isa;
pub mod linear;
mod math;
mod memory;
pub mod pool;
pub mod recurrent;
pub mod rows;
mod simd;
mod tile;

pub use elem::Dtype;
pub use isa::Isa;
