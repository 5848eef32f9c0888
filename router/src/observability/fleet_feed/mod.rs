//! The data of the web page that the router collects between two snapshots, and the feed that sends
//! the snapshots.

/// Recent events of the fleet.
pub(crate) mod events;
/// Load over the last ten minutes.
pub(crate) mod history;
/// Clients of the feed, and the snapshots they are sent.
pub(crate) mod hub;
/// KV traffic between workers.
pub(crate) mod pair_traffic;
