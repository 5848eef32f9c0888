//! Clients: keys, limits, connections, and the fields and pages that the router refuses.

mod access;
mod browsers;
mod connections;
pub mod limits;
mod prompt_limit;
mod router_fields;
pub mod tls;
