//! Sockets, TLS and connections to workers.

/// Limit of file descriptors.
pub(crate) mod descriptors;
/// Kinds of files.
pub(crate) mod files;
/// Headers that belong to one connection.
pub(crate) mod headers;
/// Body of a request to a worker.
pub(crate) mod request_body;
/// Options of TCP sockets.
pub(crate) mod socket;
/// TLS configuration.
pub(crate) mod tls;
/// Certificates that are read again when their files change.
pub(crate) mod tls_reload;
/// Pooled connections to workers.
pub(crate) mod upstream;
/// Which certificates of workers are accepted.
pub(crate) mod worker_certificates;
