//! The web page: static files in the binary, and the feed of the fleet's state that they show.
//!
//! `assets` serves the files of router/ui, without a key, because they hold no data. `feed` sends
//! one shared `snapshot` per second to all pages, which needs the key of the control plane, and
//! only while a page listens. `sampling` keeps the load of the last ten minutes for it, whether a
//! page listens or not.

/// Files of the page.
mod assets;
/// Live events of the fleet.
mod feed;
/// Readings for the history of the fleet.
mod sampling;
/// State of the fleet at one moment.
mod snapshot;

pub use assets::{file, index, to_folder};
pub use feed::feed;
pub use sampling::sample_regularly;
