//! Requests: reading, checking, admitting and tokenizing.

/// Limit of requests in flight and their waiting queue.
pub(crate) mod admission;
/// Index of the request body's fields.
pub(crate) mod body;
/// Memory held by request bodies.
pub(crate) mod body_memory;
/// Threads that parse large bodies.
pub(crate) mod body_threads;
/// Fields that carry images, audio or video.
pub(crate) mod media;
/// Prompts longer than any worker accepts.
pub(crate) mod prompt_limit;
/// Tokenization of prompts.
pub(crate) mod tokenize;
