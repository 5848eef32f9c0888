//! Responses: relaying, resuming and keeping streams open.

/// Buffer from which an interrupted stream resumes.
pub(crate) mod failover;
/// Comments that keep a stream open before its first event.
pub(crate) mod keepalive;
/// Server-sent events.
pub(crate) mod sse;
/// Token usage reported by workers.
pub(crate) mod usage;
