//! Text that a model reads and writes: chat templates, tokens, streams of text, and the HTTP dialects
//! in which clients hear of it. One layer for the router and for the front of an engine.
//!
//! * [`template`]: chat messages to the text of a prompt;
//! * [`tokenizer`]: text to token ids and back;
//! * [`prompt`]: a request's prompt as token ids, no longer than the context;
//! * [`stream`]: tokens to text while they arrive, and stop strings in it;
//! * [`refusal`]: why a request's text is refused;
//! * [`dialect`]: one file per API: how an event, an end, an error, usage and a resume comment are
//!   written and recognized.
//!
//! Deterministic: no I/O, no clock, no threads of its own. Files come as bytes, times as arguments.

pub mod dialect;
pub mod prompt;
pub mod refusal;
pub mod stream;
pub mod template;
pub mod tokenizer;
