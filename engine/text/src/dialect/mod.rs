//! How each HTTP API says it.
