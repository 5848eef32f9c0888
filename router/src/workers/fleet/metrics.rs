//! Gauges of workers, read from the fleet at each scrape.

use prometheus::GaugeVec;
use router_core::Role;

use crate::clock::now_ms;
use crate::observability::metrics::RouterMetrics;
use crate::workers::fleet::WorkerFleet;

/// Set the gauges of workers; of those that are gone nothing stays.
pub fn update(metrics: &RouterMetrics, fleet: &WorkerFleet) {
    for family in [
        &metrics.workers,
        &metrics.unpaired,
        &metrics.worker_load,
        &metrics.circuit,
        &metrics.backlog,
        &metrics.prefill_speed,
        &metrics.confidence,
        &metrics.index_blocks,
        &metrics.kv_ranks,
        &metrics.tree_chars,
    ] {
        family.reset();
    }
    for worker in fleet.workers() {
        let role = worker.role().into_str();
        metrics
            .workers
            .with_label_values(&[role, worker.state().label()])
            .inc();
        if fleet.incompatibility(&worker).is_some() {
            metrics.unpaired.with_label_values(&[role]).inc();
        }
    }
    let names: std::collections::HashMap<_, _> = fleet
        .candidates()
        .into_iter()
        .map(|c| {
            let role = c.worker.role().into_str();
            let labels = [role, c.name.as_str()];
            metrics
                .kv_ranks
                .with_label_values(&[role, c.feed.status().state.into_str()])
                .inc();
            metrics
                .worker_load
                .with_label_values(&labels)
                .set(c.load() as f64);
            metrics
                .circuit
                .with_label_values(&labels)
                .set(f64::from(c.circuit() as u8));
            (c.id, c)
        })
        .collect();
    for role in Role::ALL {
        let stats = fleet.policy_set.policy(role).stats(now_ms());
        let role = role.into_str();
        for (family, value) in [
            (&metrics.tree_bytes, stats.index_bytes as f64),
            (&metrics.tree_evicted, stats.evicted_total as f64),
            (&metrics.routing_keys, stats.keys as f64),
            (&metrics.utilization, stats.utilization),
        ] {
            family.with_label_values(&[role]).set(value);
        }
        let show = |family: &GaugeVec, worker, value| {
            if let Some(candidate) = names.get(&worker) {
                family
                    .with_label_values(&[role, candidate.name.as_str()])
                    .set(value);
            }
        };
        for (worker, chars) in stats.chars {
            show(&metrics.tree_chars, worker, chars as f64);
        }
        for rank in stats.ranks {
            show(&metrics.backlog, rank.worker, rank.backlog_ms / 1e3);
            show(
                &metrics.prefill_speed,
                rank.worker,
                rank.ms_per_kilotoken / 1e3,
            );
            show(&metrics.confidence, rank.worker, rank.confidence);
            show(&metrics.index_blocks, rank.worker, rank.index_blocks as f64);
        }
    }
}
