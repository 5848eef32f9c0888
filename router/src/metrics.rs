//! Every metric: one table with name, kind, labels and help; docs/metrics.md is printed from it.
//!
//! Counters and histograms are written where things happen; gauges about workers are read from the registry when
//! somebody scrapes, so they cannot drift.

use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounterVec, Opts,
    Registry as Exposed, TextEncoder,
};

use crate::registry::Registry;

/// One exponential family for everything measured in seconds: × 1.6 from 0.1 ms to about 870 s.
fn seconds_buckets() -> Vec<f64> {
    (0..35).map(|i| 1e-4 * 1.6f64.powi(i)).collect()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A metric's name (without unit mistakes: it ends in one), labels and meaning.
pub struct Spec {
    pub name: &'static str,
    pub kind: Kind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

macro_rules! specs {
    ($($konst:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $konst: Spec = Spec { name: $name, kind: Kind::$kind, labels: &[$($label),*], help: $help };)*
        /// All metrics, in the order of docs/metrics.md.
        pub const METRICS: &[&Spec] = &[$(&$konst),*];
    };
}

specs! {
    REQUESTS = Counter "baton_router_requests_total" ["route", "method", "status", "outcome"]
        "Requests answered; outcome is ok, client_gone or an error code (docs/protocol.md)";
    DURATION = Histogram "baton_router_request_duration_seconds" ["route"]
        "From the request's head to the last byte of the answer";
    TTFT = Histogram "baton_router_ttft_seconds" ["route"]
        "From the request's head to the first byte of a worker's answer";
    OVERHEAD = Histogram "baton_router_overhead_seconds" ["route"]
        "The router's own time: from the complete request body to its dispatch";
    QUEUE = Histogram "baton_router_queue_seconds" []
        "Wait for one of --max-concurrent-requests";
    QUEUED = Gauge "baton_router_queued_requests" []
        "Requests waiting for one of --max-concurrent-requests";
    DECISIONS = Counter "baton_router_policy_decisions_total" ["role", "policy", "why"]
        "Workers chosen, by reason";
    RETRIES = Counter "baton_router_retries_total" ["reason"]
        "Attempts after the first, by what failed before";
    UPSTREAM_ERRORS = Counter "baton_router_upstream_errors_total" ["role", "reason"]
        "Failures of workers, by reason";
    LEG_ABORTS = Counter "baton_router_leg_aborts_total" ["role", "reason"]
        "Legs of a pair dropped before their end, because the other leg failed or the client left";
    WORKERS = Gauge "baton_router_workers" ["role", "state"]
        "Registered workers";
    WORKER_LOAD = Gauge "baton_router_worker_load" ["role", "worker"]
        "Requests in flight, per worker and DP rank";
    CIRCUIT = Gauge "baton_router_circuit_state" ["role", "worker"]
        "Circuit breaker: 0 closed, 1 half open, 2 open";
    PROBES = Counter "baton_router_health_probes_total" ["role", "result"]
        "Health probes sent";
    TREE_CHARS = Gauge "baton_router_tree_chars" ["role", "worker"]
        "Characters of prompts remembered for a worker by cache_aware";
    TREE_BYTES = Gauge "baton_router_tree_bytes" ["role"]
        "Estimated memory of the prefix tree";
    TREE_EVICTED = Gauge "baton_router_tree_evicted_chars" ["role"]
        "Characters dropped from the prefix tree since the start";
    BUILD = Gauge "baton_router_build_info" ["version"]
        "Always 1";
}

/// Handles of everything in [`METRICS`].
pub struct Metrics {
    exposed: Exposed,
    /// One scrape at a time: gauges are rebuilt for each.
    scrape: parking_lot::Mutex<()>,
    pub requests: IntCounterVec,
    pub duration: HistogramVec,
    pub ttft: HistogramVec,
    pub overhead: HistogramVec,
    pub queue: Histogram,
    pub queued: Gauge,
    pub decisions: IntCounterVec,
    pub retries: IntCounterVec,
    pub upstream_errors: IntCounterVec,
    pub leg_aborts: IntCounterVec,
    pub probes: IntCounterVec,
    workers: GaugeVec,
    worker_load: GaugeVec,
    circuit: GaugeVec,
    tree_chars: GaugeVec,
    tree_bytes: GaugeVec,
    tree_evicted: GaugeVec,
}

fn opts(spec: &Spec) -> Opts {
    Opts::new(spec.name, spec.help)
}

fn counters(exposed: &Exposed, spec: &Spec) -> prometheus::Result<IntCounterVec> {
    let made = IntCounterVec::new(opts(spec), spec.labels)?;
    exposed.register(Box::new(made.clone()))?;
    Ok(made)
}

fn gauges(exposed: &Exposed, spec: &Spec) -> prometheus::Result<GaugeVec> {
    let made = GaugeVec::new(opts(spec), spec.labels)?;
    exposed.register(Box::new(made.clone()))?;
    Ok(made)
}

fn histograms(exposed: &Exposed, spec: &Spec) -> prometheus::Result<HistogramVec> {
    let buckets = HistogramOpts::from(opts(spec)).buckets(seconds_buckets());
    let made = HistogramVec::new(buckets, spec.labels)?;
    exposed.register(Box::new(made.clone()))?;
    Ok(made)
}

impl Metrics {
    pub fn new() -> prometheus::Result<Self> {
        let exposed = Exposed::new();
        gauges(&exposed, &BUILD)?
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1.0);
        let no_labels: &[&str] = &[];
        Ok(Self {
            requests: counters(&exposed, &REQUESTS)?,
            duration: histograms(&exposed, &DURATION)?,
            ttft: histograms(&exposed, &TTFT)?,
            overhead: histograms(&exposed, &OVERHEAD)?,
            queue: histograms(&exposed, &QUEUE)?.with_label_values(no_labels),
            queued: gauges(&exposed, &QUEUED)?.with_label_values(no_labels),
            decisions: counters(&exposed, &DECISIONS)?,
            retries: counters(&exposed, &RETRIES)?,
            upstream_errors: counters(&exposed, &UPSTREAM_ERRORS)?,
            leg_aborts: counters(&exposed, &LEG_ABORTS)?,
            probes: counters(&exposed, &PROBES)?,
            workers: gauges(&exposed, &WORKERS)?,
            worker_load: gauges(&exposed, &WORKER_LOAD)?,
            circuit: gauges(&exposed, &CIRCUIT)?,
            tree_chars: gauges(&exposed, &TREE_CHARS)?,
            tree_bytes: gauges(&exposed, &TREE_BYTES)?,
            tree_evicted: gauges(&exposed, &TREE_EVICTED)?,
            exposed,
            scrape: parking_lot::Mutex::default(),
        })
    }

    /// Text exposition format.
    pub fn render(&self, registry: &Registry) -> prometheus::Result<Vec<u8>> {
        let _one = self.scrape.lock();
        self.read_registry(registry);
        let mut out = Vec::with_capacity(16 * 1024);
        TextEncoder::new().encode(&self.exposed.gather(), &mut out)?;
        Ok(out)
    }

    fn read_registry(&self, registry: &Registry) {
        // Gone workers must not stay on the page.
        for family in [
            &self.workers,
            &self.worker_load,
            &self.circuit,
            &self.tree_chars,
        ] {
            family.reset();
        }
        for worker in registry.workers() {
            self.workers
                .with_label_values(&[worker.role().label(), worker.state().label()])
                .inc();
        }
        let names: std::collections::HashMap<_, _> = registry
            .candidates()
            .into_iter()
            .map(|c| {
                let role = c.worker.role().label();
                let labels = [role, c.name.as_str()];
                self.worker_load
                    .with_label_values(&labels)
                    .set(c.load() as f64);
                self.circuit
                    .with_label_values(&labels)
                    .set(c.circuit_state());
                (c.id, c)
            })
            .collect();
        for (role, stats) in registry.policy_stats() {
            let role = role.label();
            self.tree_bytes
                .with_label_values(&[role])
                .set(stats.tree_bytes as f64);
            self.tree_evicted
                .with_label_values(&[role])
                .set(stats.evicted_chars_total as f64);
            for tenant in stats.tenants {
                if let Some(candidate) = names.get(&tenant.worker) {
                    self.tree_chars
                        .with_label_values(&[role, candidate.name.as_str()])
                        .set(tenant.chars as f64);
                }
            }
        }
    }
}

/// docs/metrics.md's router part.
pub fn metrics_markdown() -> String {
    let buckets = seconds_buckets();
    let mut out = format!(
        "## Router\n\n`GET /metrics` of the router, and of `--prometheus-port` if given; `baton-router --print-metrics` prints this section. Histograms\nshare {} buckets, factor 1.6 from {} s to {:.0} s.\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n",
        buckets.len(),
        buckets[0],
        buckets[buckets.len() - 1],
    );
    for spec in METRICS {
        let kind = format!("{:?}", spec.kind).to_lowercase();
        let labels: Vec<String> = spec.labels.iter().map(|l| format!("`{l}`")).collect();
        let labels = match labels.is_empty() {
            true => "-".to_owned(),
            false => labels.join(", "),
        };
        out += &format!("| `{}` | {kind} | {labels} | {} |\n", spec.name, spec.help);
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_prefix_and_unit() {
        for spec in METRICS {
            assert!(spec.name.starts_with("baton_router_"), "{}", spec.name);
            assert_eq!(
                spec.kind == Kind::Counter,
                spec.name.ends_with("_total"),
                "{}",
                spec.name
            );
            assert_eq!(
                spec.kind == Kind::Histogram,
                spec.name.ends_with("_seconds"),
                "{}",
                spec.name
            );
        }
    }

    #[test]
    fn all_of_the_table_registers() {
        let metrics = Metrics::new().unwrap();
        metrics
            .requests
            .with_label_values(&["a", "b", "c", "d"])
            .inc();
        assert!(metrics.exposed.gather().len() > 1);
    }
}
