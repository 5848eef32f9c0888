//! How a worker comes: it is entered, and its probes begin.

use std::sync::Arc;

use crate::config::WorkerSpec;
use crate::error::RouteError;
use crate::workers::fleet::WorkerFleet;
use crate::workers::health;
use crate::workers::worker::Worker;

/// Register a worker and start probing it.
pub fn register(fleet: &Arc<WorkerFleet>, spec: WorkerSpec) -> Result<Arc<Worker>, RouteError> {
    let worker = fleet.registry.add(spec)?;
    tracing::info!(url = %worker.url(), role = %worker.role(), id = worker.id, "worker registered");
    health::start(fleet, &worker);
    Ok(worker)
}
