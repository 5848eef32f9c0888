//! Text layer of the router and of the front of an engine: what a model reads and writes, and the
//! HTTP dialects in which clients ask for it and get it.
//!
//! * [`template`]: chat messages to the text of a prompt;
//! * [`tokenizer`]: text to token ids and back;
//! * [`prompt`]: a request's prompt as token ids, no longer than the context;
//! * [`stream`]: tokens to text while they arrive, and stop strings in it;
//! * [`refusal`]: why a request's text is refused;
//! * [`dialect`]: one file per API: how an event, an end, an error, usage and a resume comment are
//!   written and recognized;
//! * [`answers`]: the running answers of a front: messages of ranks in, HTTP chunks out.
//!
//! Deterministic: no I/O, no clock, no threads of its own. Files come as bytes, times as arguments.

pub mod answers;
pub mod dialect;
pub mod prompt;
pub mod refusal;
pub mod stream;
pub mod template;
pub mod tokenizer;
