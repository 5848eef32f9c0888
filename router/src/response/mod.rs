//! Responses: relaying, resuming and keeping streams open.

/// Buffer from which an interrupted stream resumes.
pub(crate) mod failover;
/// Comments that keep a stream open before its first event.
pub(crate) mod keepalive;
/// Errors in streams.
pub(crate) mod stream_error;
/// Headers of streams.
pub(crate) mod stream_headers;
