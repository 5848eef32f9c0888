//! Text layer of the router and of the front of an engine: what a model reads and writes, and the
//! HTTP dialects in which clients ask for it and get it.
//!
//! * [`template`]: chat messages to the text of a prompt;
//! * [`tokenizer`]: text to token ids and back;
//! * [`stream`]: tokens to text while they arrive, and stop strings in it;
//! * [`dialect`]: one file per API: how an event, an end, an error, usage and a resume comment are
//!   written and recognized.
//!
//! Deterministic: no I/O, no clock, no threads of its own. Files come as bytes, times as arguments.

pub mod dialect;
pub mod stream;
pub mod template;
pub mod tokenizer;
