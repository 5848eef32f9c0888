//! The workers with what their tasks need: probes, discovery and cache events hold this, not the
//! whole router.

use std::collections::BTreeSet;
use std::sync::Arc;

use http::{HeaderMap, HeaderValue, Method, Uri, header};
use parking_lot::Mutex;
use router_core::{PolicySet, Role};
use tokio::sync::watch;

use crate::config::RouterConfig;
use crate::observability::metrics::RouterMetrics;
use crate::transport::tls_reload::WorkerTls;
use crate::transport::upstream::RequestHead;
use crate::workers::registry::WorkerRegistry;
use crate::workers::worker::{Worker, WorkerState};

pub struct WorkerFleet {
    pub config: Arc<RouterConfig>,
    pub metrics: Arc<RouterMetrics>,
    pub registry: WorkerRegistry,
    /// Sources of workers that were read once.
    pub discovered: Mutex<BTreeSet<&'static str>>,
}

impl WorkerFleet {
    /// `tls`: for https:// workers. `cut` turns true when what still runs is cut.
    pub fn new(
        config: Arc<RouterConfig>,
        metrics: Arc<RouterMetrics>,
        deciders: PolicySet,
        tls: Option<WorkerTls>,
        cut: watch::Receiver<bool>,
    ) -> Self {
        Self {
            registry: WorkerRegistry::new(config.clone(), deciders, metrics.clone(), tls, cut),
            config,
            metrics,
            discovered: Mutex::default(),
        }
    }

    pub fn is_pd(&self) -> bool {
        self.config.workers.pd_disaggregation
    }

    /// Roles without which nothing can be answered.
    pub fn serving_roles(&self) -> &'static [Role] {
        self.config.workers.serving_roles()
    }

    /// Headers of the router's own requests to workers.
    pub fn worker_headers(&self) -> HeaderMap {
        let key = self.config.listen.api_key.iter();
        let values = key.flat_map(|key| HeaderValue::try_from(format!("Bearer {key}")));
        values.map(|value| (header::AUTHORIZATION, value)).collect()
    }

    /// Head of a request of the router's own.
    pub fn own_request(&self, method: Method, path: &'static str) -> RequestHead {
        RequestHead::new(method, Uri::from_static(path), self.worker_headers())
    }

    /// No new requests for this worker; it is removed when those in flight have ended.
    pub fn drain(self: &Arc<Self>, worker: &Arc<Worker>) {
        if !self.registry.set_state(worker, WorkerState::Leaving, None) {
            return; // it leaves already, or was removed
        }
        worker.stop_probes();
        let (fleet, worker) = (Arc::downgrade(self), worker.clone());
        tokio::spawn(async move {
            worker.until_idle().await;
            if let Some(fleet) = fleet.upgrade()
                && fleet.registry.remove(worker.id).is_some()
            {
                tracing::info!(url = %worker.url(), "worker drained and removed");
            }
        });
    }
}
