//! Responses: relaying, resuming and keeping streams open.

/// Buffer from which an interrupted stream resumes.
pub(crate) mod failover;
/// Comments that keep a stream open before its first event.
pub(crate) mod keepalive;
/// Log probabilities of resumed answers.
pub(crate) mod logprobs;
/// Response body sent to the client.
pub(crate) mod proxy_body;
/// Server-sent events.
pub(crate) mod sse;
/// Token usage reported by workers.
pub(crate) mod usage;
