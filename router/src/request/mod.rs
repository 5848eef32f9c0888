//! Requests: reading, checking, admitting and tokenizing.

/// Limit of requests in flight and their waiting queue.
pub(crate) mod admission;
/// Memory held by request bodies.
pub(crate) mod body_memory;
/// Threads that parse large bodies.
pub(crate) mod body_threads;
/// Fields that carry images, audio or video.
pub(crate) mod media;
/// Prompts as policies compare them.
pub(crate) mod routing_prompt;
/// Tokenization of prompts.
pub(crate) mod tokenize;
