//! Readings of the router's counters and of the workers' reports, one per
//! [`PERIOD`](history::PERIOD), for the charts of the web page. Reads the state of the router;
//! sends no worker a request.

use std::sync::Arc;

use router_core::Role;
use tokio::time::{MissedTickBehavior, interval};

use crate::clock::{now_ms, unix_time};
use crate::dispatch::app::AppState;
use crate::observability::fleet_feed::history::{self, FleetReading};

/// Take a reading per period until the router ends.
pub fn sample_regularly(app: &Arc<AppState>) {
    let weak = Arc::downgrade(app);
    tokio::spawn(async move {
        let mut turn = interval(history::PERIOD);
        turn.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            turn.tick().await;
            let Some(app) = weak.upgrade() else { return };
            let reading = take_reading(&app);
            app.history.lock().add(reading);
        }
    });
}

fn take_reading(app: &AppState) -> FleetReading {
    let now_ms = now_ms();
    let mut reading = FleetReading {
        at_ms: now_ms,
        at_unix_ms: unix_time().as_millis() as u64,
        requests: app.sinks.requests.totals(),
        ttft: app.metrics.ttft_counts(),
        ..FleetReading::default()
    };
    let mut prefill_pages = PageCount::default();
    let mut decode_pages = PageCount::default();
    for worker in app.fleet.workers() {
        if !worker.state().reports_load() {
            continue;
        }
        let is_prefill = worker.role() == Role::Prefill;
        let pages = if is_prefill {
            &mut prefill_pages
        } else {
            &mut decode_pages
        };
        for rank in app.fleet.ranks_of(&worker) {
            let activity = worker.activity_of(rank);
            let activity = activity.lock();
            let report = activity.last(now_ms).map(|(report, _)| report);
            if let Some(running) = report.and_then(|report| report.running) {
                pages.used += running.pages_used;
                pages.all += running.pages;
            }
            let rates = activity.rates.unwrap_or_default();
            reading.prefill_tokens_per_s += rates.prefill_tokens_per_s;
            if !is_prefill {
                reading.decode_tokens_per_s += rates.decode_tokens_per_s;
            }
        }
    }
    reading.prefill_kv_usage = prefill_pages.usage();
    reading.decode_kv_usage = decode_pages.usage();
    reading
}

#[derive(Default)]
struct PageCount {
    used: u64,
    all: u64,
}

impl PageCount {
    /// Share of the pages in use; `None` where no page was reported.
    fn usage(&self) -> Option<f64> {
        (self.all > 0).then(|| self.used as f64 / self.all as f64)
    }
}
