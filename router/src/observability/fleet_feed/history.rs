//! Load of the fleet over the last ten minutes, for the charts of the web page.
//!
//! 1. every `PERIOD` the server takes a [`FleetReading`]: counters since the router's start, and
//!    the last reports of the workers;
//! 2. [`FleetHistory::add`] makes one sample of it and of the reading before;
//! 3. each snapshot for the page holds all samples, a column per quantity.
//!
//! Deterministic, no I/O. Bounded: `MAX_SAMPLES` samples of 48 bytes.

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

use crate::observability::metrics::BucketCounts;
use crate::observability::request_timeline::history::RequestTotals;

/// Time between two readings.
pub const PERIOD: Duration = Duration::from_secs(5);
/// Time that the samples cover.
pub const SPAN: Duration = Duration::from_secs(600);
/// Samples kept.
const MAX_SAMPLES: usize = (SPAN.as_secs() / PERIOD.as_secs()) as usize;

/// State of the counters and of the fleet at one moment.
#[derive(Debug, Clone, Default)]
pub struct FleetReading {
    /// On the router's monotonic clock.
    pub at_ms: u64,
    pub at_unix_ms: u64,
    pub requests: RequestTotals,
    /// Times to the first byte, since the start.
    pub ttft: BucketCounts,
    /// Sum over all workers, as last reported.
    pub prefill_tokens_per_s: f64,
    /// Sum over decode and regular workers; the first tokens, which prefill workers compute, are
    /// left out.
    pub decode_tokens_per_s: f64,
    /// Share of the KV pages of all prefill workers in use; `None`: no worker reports it.
    pub prefill_kv_usage: Option<f64>,
    /// The same of decode and regular workers.
    pub decode_kv_usage: Option<f64>,
}

/// Mean values between two readings. Numbers have three digits: the page draws them.
#[derive(Debug, Clone, Copy, PartialEq)]
struct FleetSample {
    requests_per_s: f32,
    errors_per_s: f32,
    ttft_p50_ms: Option<f32>,
    ttft_p95_ms: Option<f32>,
    prefill_tokens_per_s: f32,
    decode_tokens_per_s: f32,
    prefill_kv_usage: Option<f32>,
    decode_kv_usage: Option<f32>,
}

/// Columns of the samples, oldest first.
#[derive(Debug, Default, Serialize)]
pub struct HistoryColumns {
    period_ms: u64,
    /// Most samples in a column.
    max_samples: usize,
    /// Time of the last reading.
    ended_unix_ms: u64,
    requests_per_s: Vec<f32>,
    errors_per_s: Vec<f32>,
    ttft_p50_ms: Vec<Option<f32>>,
    ttft_p95_ms: Vec<Option<f32>>,
    prefill_tokens_per_s: Vec<f32>,
    decode_tokens_per_s: Vec<f32>,
    prefill_kv_usage: Vec<Option<f32>>,
    decode_kv_usage: Vec<Option<f32>>,
}

#[derive(Debug, Default)]
pub struct FleetHistory {
    last: Option<FleetReading>,
    samples: VecDeque<FleetSample>,
}

impl FleetHistory {
    /// Add the sample between the reading before and this one.
    pub fn add(&mut self, reading: FleetReading) {
        if let Some(last) = &self.last
            && reading.at_ms > last.at_ms
        {
            if self.samples.len() == MAX_SAMPLES {
                self.samples.pop_front();
            }
            self.samples.push_back(sample_between(last, &reading));
        }
        self.last = Some(reading);
    }

    pub fn columns(&self) -> HistoryColumns {
        HistoryColumns {
            period_ms: PERIOD.as_millis() as u64,
            max_samples: MAX_SAMPLES,
            ended_unix_ms: self.last.as_ref().map_or(0, |last| last.at_unix_ms),
            requests_per_s: self.column(|sample| sample.requests_per_s),
            errors_per_s: self.column(|sample| sample.errors_per_s),
            ttft_p50_ms: self.column(|sample| sample.ttft_p50_ms),
            ttft_p95_ms: self.column(|sample| sample.ttft_p95_ms),
            prefill_tokens_per_s: self.column(|sample| sample.prefill_tokens_per_s),
            decode_tokens_per_s: self.column(|sample| sample.decode_tokens_per_s),
            prefill_kv_usage: self.column(|sample| sample.prefill_kv_usage),
            decode_kv_usage: self.column(|sample| sample.decode_kv_usage),
        }
    }

    fn column<T>(&self, read: impl Fn(&FleetSample) -> T) -> Vec<T> {
        self.samples.iter().map(read).collect()
    }
}

fn sample_between(before: &FleetReading, now: &FleetReading) -> FleetSample {
    let seconds = (now.at_ms - before.at_ms) as f64 / 1e3;
    let per_s = |now: u64, before: u64| rounded(now.saturating_sub(before) as f64 / seconds);
    let quantile_ms = |share| {
        let seconds = now.ttft.quantile_since(&before.ttft, share)?;
        Some(rounded(1e3 * seconds))
    };
    FleetSample {
        requests_per_s: per_s(now.requests.ended, before.requests.ended),
        errors_per_s: per_s(now.requests.failed, before.requests.failed),
        ttft_p50_ms: quantile_ms(0.5),
        ttft_p95_ms: quantile_ms(0.95),
        prefill_tokens_per_s: rounded(now.prefill_tokens_per_s),
        decode_tokens_per_s: rounded(now.decode_tokens_per_s),
        prefill_kv_usage: now.prefill_kv_usage.map(rounded),
        decode_kv_usage: now.decode_kv_usage.map(rounded),
    }
}

/// Three significant digits.
fn rounded(value: f64) -> f32 {
    if value == 0.0 {
        return 0.0;
    }
    let scale = 10f64.powi(2 - value.abs().log10().floor() as i32);
    ((value * scale).round() / scale) as f32
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::observability::metrics::RouterMetrics;

    fn reading(at_s: u64, metrics: &RouterMetrics, requests: RequestTotals) -> FleetReading {
        FleetReading {
            at_ms: at_s * 1000,
            at_unix_ms: 1_000_000 + at_s * 1000,
            requests,
            ttft: metrics.ttft_counts(),
            decode_kv_usage: Some(1.0 / 3.0),
            ..FleetReading::default()
        }
    }

    #[test]
    fn sample_holds_what_happened_between_two_readings() {
        let metrics = RouterMetrics::new().unwrap();
        let observe_ttft = |route: &str, seconds: f64| {
            let ttft = metrics.ttft.with_label_values(&[route]);
            ttft.observe(seconds);
        };
        let totals = |ended, failed| RequestTotals { ended, failed };
        let mut history = FleetHistory::default();
        observe_ttft("/generate", 60.0);
        history.add(reading(0, &metrics, totals(1, 1)));
        assert!(history.columns().requests_per_s.is_empty());
        // 100 first tokens: 1 ms to 100 ms, over two routes.
        for ms in 1..=100 {
            let route = if ms % 2 == 0 {
                "/generate"
            } else {
                "/v1/completions"
            };
            observe_ttft(route, f64::from(ms) / 1e3);
        }
        history.add(reading(5, &metrics, totals(101, 11)));
        history.add(reading(10, &metrics, totals(101, 11)));
        let columns = history.columns();
        assert_eq!(columns.requests_per_s, [20.0, 0.0]);
        assert_eq!(columns.errors_per_s, [2.0, 0.0]);
        assert_eq!(columns.decode_kv_usage, [Some(0.333), Some(0.333)]);
        assert_eq!(columns.prefill_kv_usage, [None, None]);
        assert_eq!(columns.ended_unix_ms, 1_010_000);
        // True quantiles are 50 ms and 95 ms; buckets grow by a factor of 1.6.
        let p50 = columns.ttft_p50_ms[0].unwrap();
        let p95 = columns.ttft_p95_ms[0].unwrap();
        assert!((50.0 / 1.6..50.0 * 1.6).contains(&p50), "{p50}");
        assert!((95.0 / 1.6..95.0 * 1.6).contains(&p95), "{p95}");
        assert_eq!(
            columns.ttft_p50_ms[1], None,
            "no first token in this period"
        );
    }

    #[test]
    fn last_ten_minutes_are_kept() {
        let metrics = RouterMetrics::new().unwrap();
        let mut history = FleetHistory::default();
        for number in 0..500 {
            let at_s = number * PERIOD.as_secs();
            let mut reading = reading(at_s, &metrics, RequestTotals::default());
            reading.decode_tokens_per_s = number as f64;
            history.add(reading);
        }
        let columns = history.columns();
        assert_eq!(columns.decode_tokens_per_s.len(), 120);
        assert_eq!(columns.decode_tokens_per_s[119], 499.0);
        assert_eq!(columns.decode_tokens_per_s[0], 380.0);
        assert!(size_of::<FleetSample>() <= 48);
    }

    #[test]
    fn numbers_have_three_digits() {
        let texts = [0.0, 1.0 / 3.0, 1234.5, 99.96, 0.000_123_45]
            .map(|value| serde_json::to_string(&rounded(value)).unwrap());
        assert_eq!(texts, ["0.0", "0.333", "1230.0", "100.0", "0.000123"]);
    }
}
