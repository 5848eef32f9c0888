//! Every metric: one table with name, kind, labels and help; docs/metrics.md is printed from it.
//!
//! Counters and histograms are written where things happen; gauges about workers are read from the
//! fleet when /metrics is scraped, so they cannot drift.

use prometheus::core::Collector;
use prometheus::proto::MetricType;
use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    Opts, Registry as Exposed, TextEncoder,
};
use router_core::PrefillForecast;

use crate::observability::request_timeline::StageTimes;

/// Exponential buckets for everything measured in seconds: × 1.6 from 0.1 ms to about 870 s. Bounds
/// have four digits, since alerts name them.
fn seconds_buckets() -> Vec<f64> {
    (0..35)
        .map(|i| {
            let exact = 1e-4 * 1.6f64.powi(i);
            let digits = 3 - exact.log10().floor() as i32;
            (exact * 10f64.powi(digits)).round() / 10f64.powi(digits)
        })
        .collect()
}

/// A metric's name (without unit mistakes: it ends in one), labels and meaning.
pub struct MetricSpec {
    pub name: &'static str,
    pub kind: MetricType,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

/// Metrics of one name, by labels, or a single one.
trait MetricFamily: Sized {
    const KIND: MetricType;

    fn register(exposed: &Exposed, spec: &MetricSpec) -> prometheus::Result<Self>;
}

macro_rules! metric_family {
    ($family:ident, $single:ident, $kind:ident, |$spec:ident| $opts:expr) => {
        impl MetricFamily for $family {
            const KIND: MetricType = MetricType::$kind;

            fn register(exposed: &Exposed, $spec: &MetricSpec) -> prometheus::Result<Self> {
                let family = $family::new($opts, $spec.labels)?;
                exposed.register(Box::new(family.clone()))?;
                Ok(family)
            }
        }

        impl MetricFamily for $single {
            const KIND: MetricType = MetricType::$kind;

            fn register(exposed: &Exposed, spec: &MetricSpec) -> prometheus::Result<Self> {
                let no_labels: &[&str] = &[];
                Ok($family::register(exposed, spec)?.with_label_values(no_labels))
            }
        }
    };
}

metric_family!(IntCounterVec, IntCounter, COUNTER, |spec| Opts::new(
    spec.name, spec.help
));
metric_family!(GaugeVec, Gauge, GAUGE, |spec| Opts::new(
    spec.name, spec.help
));
metric_family!(HistogramVec, Histogram, HISTOGRAM, |spec| {
    HistogramOpts::new(spec.name, spec.help).buckets(seconds_buckets())
});

/// Histograms of the request stages, in the order of [`STAGE_NAMES`].
struct StageHistograms([Histogram; 8]);

const STAGE_NAMES: [&str; 8] = [
    "read",
    "queue",
    "parse",
    "tokenize",
    "worker_wait",
    "decide",
    "connect",
    "first_token",
];

impl MetricFamily for StageHistograms {
    const KIND: MetricType = MetricType::HISTOGRAM;

    fn register(exposed: &Exposed, spec: &MetricSpec) -> prometheus::Result<Self> {
        let family = HistogramVec::register(exposed, spec)?;
        Ok(Self(
            STAGE_NAMES.map(|stage| family.with_label_values(&[stage])),
        ))
    }
}

/// Makes of each line a field of [`RouterMetrics`] and a row of [`METRICS`].
macro_rules! router_metrics {
    ($($vis:vis $field:ident: $type:ident = $name:literal [$($label:literal),*] $help:literal;)*) => {
        /// Handles of everything in [`METRICS`].
        pub struct RouterMetrics {
            exposed: Exposed,
            /// Lock of a scrape: gauges are rebuilt for each.
            scrape: parking_lot::Mutex<()>,
            $($vis $field: $type,)*
        }

        /// All metrics, in the order of docs/metrics.md.
        pub const METRICS: &[MetricSpec] = &[
            $(MetricSpec { name: $name, kind: $type::KIND, labels: &[$($label),*], help: $help }),*
        ];

        impl RouterMetrics {
            fn register() -> prometheus::Result<Self> {
                let exposed = Exposed::new();
                let mut specs = METRICS.iter();
                $(let spec = specs.next().expect("each field has its row");
                let $field = $type::register(&exposed, spec)?;)*
                Ok(Self { exposed, scrape: parking_lot::Mutex::default(), $($field),* })
            }
        }
    };
}

router_metrics! {
    pub requests: IntCounterVec = "baton_router_requests_total" ["route", "method", "status", "outcome"]
        "Requests answered; outcome is ok (status 2xx or 3xx), client_gone or an error code \
         (docs/protocol.md)";
    pub duration: HistogramVec = "baton_router_request_duration_seconds" ["route"]
        "From the request's head to the last byte of the answer";
    pub ttft: HistogramVec = "baton_router_ttft_seconds" ["route"]
        "From the request's head to the first byte of a worker's answer";
    pub overhead: HistogramVec = "baton_router_overhead_seconds" ["route"]
        "The router's own time: from the complete request body to its dispatch";
    stages: StageHistograms = "baton_router_stage_seconds" ["stage"]
        "The first attempt by stage: read (the body), queue, parse, tokenize (count and hash the \
         prompt), worker_wait (for a first worker, of requests that waited), decide, connect \
         (build and send), first_token (the worker's)";
    pub queue: Histogram = "baton_router_queue_seconds" []
        "Wait for one of --max-concurrent-requests";
    pub queued: Gauge = "baton_router_queued_requests" []
        "Requests waiting for one of --max-concurrent-requests, or for a worker";
    pub body_bytes: Gauge = "baton_router_request_body_bytes" []
        "Memory of request bodies, of those being read and those kept for attempts, and of answers \
         read whole (--max-total-body-bytes)";
    pub connections: Gauge = "baton_router_client_connections" []
        "Open connections of clients";
    pub client_cuts: IntCounterVec = "baton_router_client_cuts_total" ["reason"]
        "Connections of clients that the router cut, by reason: too long over the TLS handshake \
         (handshake) or a request's head (head), an HTTP/2 stream not read (stalled), without a \
         request when another client needed its place (displaced), or refused because its address \
         has its share (share)";
    pub shed: IntCounterVec = "baton_router_shed_requests_total" ["role"]
        "Requests refused because their first token was predicted too late (--max-ttft-ms)";
    pub tokenize: HistogramVec = "baton_router_tokenize_seconds" ["route"]
        "Template and tokenizer of a prompt, the wait for a thread included";
    pub tokenize_fallbacks: IntCounterVec = "baton_router_tokenize_fallbacks_total" ["reason"]
        "Prompts counted in characters though there is a tokenizer; reason is too_long, busy, \
         unread, no_template, template or failed";
    pub tokenizer_lookups: IntCounterVec = "baton_router_tokenizer_cache_lookups_total" ["cache", "result"]
        "Texts (l0) and segments of texts (l1) looked up; result is hit or miss";
    pub tokenizer_cache_bytes: GaugeVec = "baton_router_tokenizer_cache_bytes" ["cache"]
        "Memory of that cache";
    pub ids_forwarded: IntCounterVec = "baton_router_input_ids_forwarded_total" ["role"]
        "Requests sent with their token ids (--forward-input-ids)";
    pub translated: IntCounterVec = "baton_router_translated_requests_total" ["route"]
        "Requests of /v1/responses and /v1/messages sent as chat requests to workers that lack the \
         path";
    pub token_counts: IntCounterVec = "baton_router_token_counts_total" ["role", "result"]
        "Prompts counted in tokens here and by the worker; result is equal or different";
    pub decisions: IntCounterVec = "baton_router_policy_decisions_total" ["role", "policy", "why"]
        "Workers chosen, by reason (docs/routing.md)";
    forecast: HistogramVec = "baton_router_forecast_ttft_seconds" ["role"]
        "First token as cost predicted it when it sent the request: queue and prefill";
    observed: HistogramVec = "baton_router_observed_ttft_seconds" ["role"]
        "The same requests' first token as it was seen, from their dispatch";
    forecast_error: HistogramVec = "baton_router_forecast_error_seconds" ["role", "sign"]
        "Difference of the two; sign is early (it came before the prediction) or late";
    regret: HistogramVec = "baton_router_ttft_regret_seconds" ["role"]
        "What was observed over the least that any candidate had promised; 0 where it was not more";
    counted_tokens: IntCounterVec = "baton_router_counted_prompt_tokens_total" ["role"]
        "Prompt tokens of requests whose worker reported what it counted";
    expected_cached: IntCounterVec = "baton_router_expected_cached_tokens_total" ["role"]
        "Of these, tokens that cost expected in the worker's cache";
    reported_cached: IntCounterVec = "baton_router_reported_cached_tokens_total" ["role"]
        "Of these, tokens that the worker found in its cache";
    passed_over: IntCounterVec = "baton_router_passed_over_cached_tokens_total" ["role"]
        "Of these, tokens that the chosen worker was not expected to have cached, but another \
         candidate was";
    pub retries: IntCounterVec = "baton_router_retries_total" ["reason"]
        "Attempts after the first, by what failed before";
    pub retries_refused: IntCounterVec = "baton_router_retries_refused_total" ["by"]
        "Failures that another worker could have mended, but for attempts (--retry-max-retries) or \
         budget (--retry-budget-ratio)";
    pub failovers: IntCounterVec = "baton_router_failovers_total" ["role", "outcome"]
        "Interrupted streams that could be resumed; outcome is resumed, failed, refused (attempts) \
         or client_gone";
    pub resumes_waiting: Gauge = "baton_router_resumes_waiting" []
        "Interrupted streams waiting for their turn to be resumed (--failover-concurrency)";
    pub failover_pause: HistogramVec = "baton_router_failover_pause_seconds" ["role"]
        "From the break of such a stream to the first event of the next worker";
    pub unresumable: IntCounterVec = "baton_router_unresumable_streams_total" ["reason"]
        "Streams that could no longer be resumed; reason is too_long, memory \
         (--failover-max-bytes), malformed (the worker's comments) or unknown_worker (another \
         process answered than the one chosen)";
    pub decode_retries: IntCounterVec = "baton_router_decode_retries_total" ["result"]
        "Attempts in which another decode worker was to fetch a prompt that was prefilled already; \
         result is opened or failed";
    pub releases: IntCounterVec = "baton_router_prefill_releases_total" ["result"]
        "Prompts, computed or being computed, that no decode worker will fetch, whose prefill \
         worker was to free their pages; result is sent, failed or skipped (too many at once)";
    pub local_prefills: IntCounterVec = "baton_router_local_prefills_total" ["why"]
        "Prompts that a decode worker was given to prefill itself: no_prefill, short, prefix_here, \
         prompt_logprobs or batch (docs/routing.md)";
    pub local_answers: IntCounter = "baton_router_local_answers_total" []
        "Requests that a prefill worker answered itself: logprobs of their prompts with at most \
         one token";
    pub upstream_errors: IntCounterVec = "baton_router_upstream_errors_total" ["role", "reason"]
        "Failures of workers, by reason";
    pub leg_aborts: IntCounterVec = "baton_router_leg_aborts_total" ["role", "reason"]
        "Legs of a pair dropped before their end, because the other leg failed or the client left";
    pub workers: GaugeVec = "baton_router_workers" ["role", "state"]
        "Registered workers";
    pub unpaired: GaugeVec = "baton_router_unpaired_workers" ["role"]
        "Ready workers whose fingerprint fits no worker of the other role; GET /workers says why";
    pub worker_load: GaugeVec = "baton_router_worker_load" ["role", "worker"]
        "Requests in flight, per worker and DP rank";
    pub circuit: GaugeVec = "baton_router_circuit_state" ["role", "worker"]
        "Circuit breaker: 0 closed, 1 half open, 2 open";
    pub probes: IntCounterVec = "baton_router_health_probes_total" ["role", "result"]
        "Health probes sent";
    pub discovery_updates: IntCounterVec = "baton_router_discovery_updates_total" ["source", "result"]
        "Answers of a source of workers (file, regular_pods, prefill_pods, decode_pods); result is \
         applied or failed";
    pub discovery_stale: GaugeVec = "baton_router_discovery_is_stale" ["source"]
        "1 while the source cannot be read, is silent or names no worker; the workers found before \
         stay";
    pub discovery_answered: GaugeVec = "baton_router_discovery_last_answer_timestamp_seconds" ["source"]
        "Unix time at which the source gave data last: bytes of an answer of the API server, or a \
         reading of the file; absent before the first";
    pub discovered: GaugeVec = "baton_router_discovered_workers" ["source", "state"]
        "Workers found: named now, or kept because no other worker of their role is ready";
    pub load_reports: IntCounterVec = "baton_router_load_reports_total" ["role", "source", "result"]
        "Load reports of workers; source is answer or poll, result taken, unused, malformed or \
         failed";
    pub backlog: GaugeVec = "baton_router_backlog_seconds" ["role", "worker"]
        "Predicted time of the prompts sent to a worker and not begun to be answered (cost)";
    pub utilization: GaugeVec = "baton_router_utilization_ratio" ["role"]
        "Predicted prefill work sent in the last 30 s over what the workers can do (cost); 1 is \
         all of it";
    pub prefill_speed: GaugeVec = "baton_router_prefill_seconds_per_kilotoken" ["role", "worker"]
        "Learned prefill time of a prompt of 1000 tokens (cost)";
    pub confidence: GaugeVec = "baton_router_index_confidence_ratio" ["role", "worker"]
        "Share of the prefixes expected in a worker's cache that it found there, recent mean \
         (cost)";
    pub index_blocks: GaugeVec = "baton_router_index_blocks" ["role", "worker"]
        "Blocks of prompts remembered for a worker: of --block-size tokens, or of 256 bytes (cost)";
    pub kv_ranks: GaugeVec = "baton_router_kv_event_ranks" ["role", "state"]
        "Workers (DP ranks) by what is known of their caches: off, connecting, exact, doubtful \
         (docs/routing.md)";
    pub kv_batches: IntCounterVec = "baton_router_kv_event_batches_total" ["role", "result"]
        "Batches of KV events: applied, known (a repetition), ahead (something before it is \
         missing)";
    pub kv_resyncs: IntCounterVec = "baton_router_kv_event_resyncs_total" ["role", "how"]
        "Caches known again: by snapshot, replay, cleared; or skipped, what was missed is lost";
    pub kv_failures: IntCounterVec = "baton_router_kv_event_failures_total" ["role", "reason"]
        "Streams of KV events that ended, by reason";
    pub kv_lag: HistogramVec = "baton_router_kv_event_lag_seconds" ["role"]
        "From a batch's time on the worker's clock until it is in the index";
    pub tree_chars: GaugeVec = "baton_router_tree_chars" ["role", "worker"]
        "Characters of prompts remembered for a worker (cache_aware)";
    pub tree_bytes: GaugeVec = "baton_router_tree_bytes" ["role"]
        "Estimated memory of the prefix index (cost, cache_aware)";
    pub tree_evicted: GaugeVec = "baton_router_tree_evicted" ["role"]
        "Characters (cache_aware), blocks and sessions (cost) or keys (manual) dropped for a limit \
         since the start";
    pub routing_keys: GaugeVec = "baton_router_routing_keys" ["role"]
        "Routing keys (manual) or sessions (cost) remembered";
    pub certificate_expiry: GaugeVec = "baton_router_certificate_expiry_timestamp_seconds" ["certificate"]
        "Unix time at which the chain that the router uses ends to be valid; certificate is server \
         (--tls-cert-path) or client (--client-cert-path)";
    pub certificate_reloads: IntCounterVec = "baton_router_certificate_reloads_total" ["result"]
        "Changes of the files of the TLS flags: applied to new connections, or failed, so that the \
         old ones stay in use";
    pub feed_clients: Gauge = "baton_router_feed_clients" []
        "Pages that listen to GET /ui/feed";
    pub feed_snapshots: IntCounter = "baton_router_feed_snapshots_total" []
        "Snapshots of the fleet rendered for them, each once for all";
    pub decision_log_lines: IntCounterVec = "baton_router_decision_log_lines_total" ["result"]
        "Lines of --decision-log: written, dropped (its queue was full) or failed (the disk)";
    pub trace_spans: IntCounterVec = "baton_router_trace_spans_total" ["result"]
        "Spans of --enable-trace: exported, dropped (the queue was full) or failed (the collector)";
    build_info: GaugeVec = "baton_router_build_info" ["version"]
        "Always 1";
}

impl RouterMetrics {
    pub fn new() -> prometheus::Result<Self> {
        let metrics = Self::register()?;
        metrics
            .build_info
            .with_label_values(&[env!("CARGO_PKG_VERSION")])
            .set(1.0);
        Ok(metrics)
    }

    /// How long the stages of a request took, those it came to.
    pub fn stages(&self, took: StageTimes) {
        for (histogram, seconds) in self.stages.0.iter().zip(took) {
            if let Some(seconds) = seconds {
                histogram.observe(seconds);
            }
        }
    }

    /// A first token that had been predicted was seen.
    pub fn first_token(&self, role: &str, forecast: PrefillForecast, took_ms: u64) {
        let predicted_ms = u64::from(forecast.ttft_ms);
        let sign = if took_ms < predicted_ms {
            "early"
        } else {
            "late"
        };
        let regret_ms = took_ms.saturating_sub(u64::from(forecast.best_ttft_ms));
        for (family, labels, ms) in [
            (&self.forecast, &[role][..], predicted_ms),
            (&self.observed, &[role], took_ms),
            (
                &self.forecast_error,
                &[role, sign],
                took_ms.abs_diff(predicted_ms),
            ),
            (&self.regret, &[role], regret_ms),
        ] {
            family.with_label_values(labels).observe(ms as f64 / 1e3);
        }
    }

    /// A worker reported what it counted of a prompt whose cached tokens had been predicted.
    pub fn counted(&self, role: &str, prompt_tokens: u32, forecast: PrefillForecast, cached: u32) {
        let expected = forecast.cached_tokens;
        let passed_over = forecast.best_cached_tokens.saturating_sub(expected);
        for (family, tokens) in [
            (&self.counted_tokens, prompt_tokens),
            (&self.expected_cached, expected),
            (&self.reported_cached, cached),
            (&self.passed_over, passed_over),
        ] {
            family.with_label_values(&[role]).inc_by(u64::from(tokens));
        }
    }

    /// Times to the first byte, over all routes since the start.
    pub fn ttft_counts(&self) -> BucketCounts {
        let mut counts = BucketCounts::default();
        for family in self.ttft.collect() {
            for metric in family.get_metric() {
                counts.add(metric.get_histogram());
            }
        }
        counts
    }

    /// Text exposition format. `update` sets the gauges that are read when they are asked for.
    pub fn render(&self, update: impl FnOnce(&Self)) -> prometheus::Result<Vec<u8>> {
        let _one = self.scrape.lock();
        update(self);
        let mut out = Vec::with_capacity(16 * 1024);
        TextEncoder::new().encode(&self.exposed.gather(), &mut out)?;
        Ok(out)
    }
}

/// Counts of a histogram.
#[derive(Debug, Clone, Default)]
pub struct BucketCounts {
    /// Upper bound and cumulative count of each bucket. The last bucket, without a bound, is left
    /// out.
    buckets: Vec<(f64, u64)>,
    count: u64,
}

impl BucketCounts {
    fn add(&mut self, histogram: &prometheus::proto::Histogram) {
        let buckets = histogram.get_bucket();
        self.buckets.resize(buckets.len(), (0.0, 0));
        for (sum, bucket) in self.buckets.iter_mut().zip(buckets) {
            sum.0 = bucket.upper_bound();
            sum.1 += bucket.cumulative_count();
        }
        self.count += histogram.get_sample_count();
    }

    /// Value that `share` of the observations after `before` did not exceed, interpolated within
    /// its bucket as Prometheus' `histogram_quantile` does; `None` without observations.
    pub fn quantile_since(&self, before: &Self, share: f64) -> Option<f64> {
        let count = self.count.saturating_sub(before.count);
        if count == 0 {
            return None;
        }
        let rank = share * count as f64;
        let mut lower = (0.0, 0);
        for (place, (bound, cumulative)) in self.buckets.iter().enumerate() {
            let known = before.buckets.get(place).map_or(0, |(_, count)| *count);
            let upper = (*bound, cumulative.saturating_sub(known));
            if upper.1 as f64 >= rank {
                let within = (rank - lower.1 as f64) / (upper.1 - lower.1).max(1) as f64;
                return Some(lower.0 + (upper.0 - lower.0) * within);
            }
            lower = upper;
        }
        Some(lower.0)
    }
}

/// docs/metrics.md's router part.
pub fn metrics_markdown() -> String {
    let buckets = seconds_buckets();
    let mut out = format!(
        "## Router\n\n`GET /metrics` of the router, and of `--prometheus-port` if given; \
         `baton-router --print-metrics`\nprints this section. Histograms share {} buckets, factor \
         1.6 from {} s to {:.0} s, rounded to four\ndigits.\n\n| metric | type | labels | meaning \
         |\n|---|---|---|---|\n",
        buckets.len(),
        buckets[0],
        buckets[buckets.len() - 1],
    );
    for spec in METRICS {
        let kind = format!("{:?}", spec.kind).to_lowercase();
        let labels: Vec<String> = spec.labels.iter().map(|l| format!("`{l}`")).collect();
        let labels = if labels.is_empty() {
            "-".to_owned()
        } else {
            labels.join(", ")
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
                spec.kind == MetricType::COUNTER,
                spec.name.ends_with("_total"),
                "{}",
                spec.name
            );
            // A gauge may be seconds too, a counter may not: it counts.
            let is_seconds = spec.name.ends_with("_seconds");
            match spec.kind {
                MetricType::HISTOGRAM => assert!(is_seconds, "{}", spec.name),
                MetricType::COUNTER => assert!(!is_seconds, "{}", spec.name),
                _ => {}
            }
        }
    }

    #[test]
    fn bucket_bounds_have_four_digits() {
        let bounds: Vec<String> = seconds_buckets().iter().map(f64::to_string).collect();
        assert!(bounds.contains(&"1.934".to_owned()), "{bounds:?}");
        assert!(bounds.iter().all(|bound| {
            let digits = bound.replace('.', "");
            digits.trim_start_matches('0').trim_end_matches('0').len() <= 4
        }));
    }

    #[test]
    fn all_of_the_table_registers() {
        let metrics = RouterMetrics::new().unwrap();
        metrics
            .requests
            .with_label_values(&["a", "b", "c", "d"])
            .inc();
        assert!(metrics.exposed.gather().len() > 1);
    }
}
