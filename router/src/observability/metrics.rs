//! Every metric: one table with name, kind, labels and help; docs/metrics.md is printed from it.
//!
//! Counters and histograms are written where things happen; gauges about workers are read from the registry when
//! /metrics is scraped, so they cannot drift.

use prometheus::{
    Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec,
    Opts, Registry as Exposed, TextEncoder,
};
use router_core::{PrefillForecast, Role};

use crate::observability::request_timeline::StageTimes;

/// Exponential buckets for everything measured in seconds: × 1.6 from 0.1 ms to about 870 s. Bounds have four digits,
/// since alerts name them.
fn seconds_buckets() -> Vec<f64> {
    (0..35)
        .map(|i| {
            let exact = 1e-4 * 1.6f64.powi(i);
            let digits = 3 - exact.log10().floor() as i32;
            (exact * 10f64.powi(digits)).round() / 10f64.powi(digits)
        })
        .collect()
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// A metric's name (without unit mistakes: it ends in one), labels and meaning.
pub struct MetricSpec {
    pub name: &'static str,
    pub kind: MetricKind,
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

macro_rules! specs {
    ($($konst:ident = $kind:ident $name:literal [$($label:literal),*] $help:literal;)*) => {
        $(const $konst: MetricSpec = MetricSpec { name: $name, kind: MetricKind::$kind, labels: &[$($label),*], help: $help };)*
        /// All metrics, in the order of docs/metrics.md.
        pub const METRICS: &[&MetricSpec] = &[$(&$konst),*];
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
    STAGES = Histogram "baton_router_stage_seconds" ["stage"]
        "The first attempt by stage: read (the body), queue, parse, tokenise (count and hash the prompt), decide, connect (build and send), first_token (the worker's)";
    QUEUE = Histogram "baton_router_queue_seconds" []
        "Wait for one of --max-concurrent-requests";
    QUEUED = Gauge "baton_router_queued_requests" []
        "Requests waiting for one of --max-concurrent-requests, or for a worker";
    BODY_BYTES = Gauge "baton_router_request_body_bytes" []
        "Memory of request bodies, of those being read and those kept for attempts (--max-total-body-bytes)";
    CONNECTIONS = Gauge "baton_router_client_connections" []
        "Open connections of clients";
    CLIENT_CUTS = Counter "baton_router_client_cuts_total" ["reason"]
        "Clients cut for taking too long; reason is handshake (TLS), head (of a request) or stalled (an HTTP/2 stream not read)";
    SHED = Counter "baton_router_shed_requests_total" ["role"]
        "Requests refused because their first token was predicted too late (--max-ttft-ms)";
    TOKENIZE = Histogram "baton_router_tokenize_seconds" ["route"]
        "Template and tokenizer of a prompt, the wait for a thread included";
    TOKENIZE_FALLBACKS = Counter "baton_router_tokenize_fallbacks_total" ["reason"]
        "Prompts counted in characters though there is a tokenizer; reason is too_long, busy, unread, no_template, template or failed";
    TOKENIZER_LOOKUPS = Counter "baton_router_tokenizer_cache_lookups_total" ["cache", "result"]
        "Texts (l0) and segments of texts (l1) looked up; result is hit or miss";
    TOKENIZER_CACHE_BYTES = Gauge "baton_router_tokenizer_cache_bytes" ["cache"]
        "Memory of that cache";
    IDS_FORWARDED = Counter "baton_router_input_ids_forwarded_total" ["role"]
        "Requests sent with their token ids (--forward-input-ids)";
    TOKEN_COUNTS = Counter "baton_router_token_counts_total" ["role", "result"]
        "Prompts counted in tokens here and by the worker; result is equal or different";
    DECISIONS = Counter "baton_router_policy_decisions_total" ["role", "policy", "why"]
        "Workers chosen, by reason (docs/routing.md)";
    FORECAST = Histogram "baton_router_forecast_ttft_seconds" ["role"]
        "First token as cost predicted it when it sent the request: queue and prefill";
    OBSERVED = Histogram "baton_router_observed_ttft_seconds" ["role"]
        "The same requests' first token as it was seen, from their dispatch";
    FORECAST_ERROR = Histogram "baton_router_forecast_error_seconds" ["role", "sign"]
        "Difference of the two; sign is early (it came before the prediction) or late";
    REGRET = Histogram "baton_router_ttft_regret_seconds" ["role"]
        "What was observed over the least that any candidate had promised; 0 where it was not more";
    COUNTED_TOKENS = Counter "baton_router_counted_prompt_tokens_total" ["role"]
        "Prompt tokens of requests whose worker reported what it counted";
    EXPECTED_CACHED = Counter "baton_router_expected_cached_tokens_total" ["role"]
        "Of these, tokens that cost expected in the worker's cache";
    REPORTED_CACHED = Counter "baton_router_reported_cached_tokens_total" ["role"]
        "Of these, tokens that the worker found in its cache";
    PASSED_OVER = Counter "baton_router_passed_over_cached_tokens_total" ["role"]
        "Of these, tokens that the chosen worker was not expected to have cached, but another candidate was";
    RETRIES = Counter "baton_router_retries_total" ["reason"]
        "Attempts after the first, by what failed before";
    RETRIES_REFUSED = Counter "baton_router_retries_refused_total" ["by"]
        "Failures that another worker could have mended, but for attempts (--retry-max-retries) or budget (--retry-budget-ratio)";
    FAILOVERS = Counter "baton_router_failovers_total" ["role", "outcome"]
        "Interrupted streams that could be resumed; outcome is resumed, failed, refused (attempts) or client_gone";
    RESUMES_WAITING = Gauge "baton_router_resumes_waiting" []
        "Interrupted streams waiting for their turn to be resumed (--failover-concurrency)";
    FAILOVER_PAUSE = Histogram "baton_router_failover_pause_seconds" ["role"]
        "From the break of such a stream to the first event of the next worker";
    UNRESUMABLE = Counter "baton_router_unresumable_streams_total" ["reason"]
        "Streams that could no longer be resumed; reason is too_long, memory (--failover-max-bytes) or malformed (the worker's comments)";
    DECODE_RETRIES = Counter "baton_router_decode_retries_total" ["result"]
        "Attempts in which another decode worker was to fetch a prompt that was prefilled already; result is opened or failed";
    RELEASES = Counter "baton_router_prefill_releases_total" ["result"]
        "Prompts, computed or being computed, that no decode worker will fetch, whose prefill worker was to free their pages; result is sent, failed or skipped (too many at once)";
    LOCAL_PREFILLS = Counter "baton_router_local_prefills_total" ["why"]
        "Prompts that a decode worker was given to prefill itself: no_prefill, short, prefix_here or batch (docs/routing.md)";
    UPSTREAM_ERRORS = Counter "baton_router_upstream_errors_total" ["role", "reason"]
        "Failures of workers, by reason";
    LEG_ABORTS = Counter "baton_router_leg_aborts_total" ["role", "reason"]
        "Legs of a pair dropped before their end, because the other leg failed or the client left";
    WORKERS = Gauge "baton_router_workers" ["role", "state"]
        "Registered workers";
    UNPAIRED = Gauge "baton_router_unpaired_workers" ["role"]
        "Ready workers whose fingerprint fits no worker of the other role; GET /workers says why";
    WORKER_LOAD = Gauge "baton_router_worker_load" ["role", "worker"]
        "Requests in flight, per worker and DP rank";
    CIRCUIT = Gauge "baton_router_circuit_state" ["role", "worker"]
        "Circuit breaker: 0 closed, 1 half open, 2 open";
    PROBES = Counter "baton_router_health_probes_total" ["role", "result"]
        "Health probes sent";
    DISCOVERY_UPDATES = Counter "baton_router_discovery_updates_total" ["source", "result"]
        "Answers of a source of workers (file, regular_pods, prefill_pods, decode_pods); result is applied or failed";
    DISCOVERY_STALE = Gauge "baton_router_discovery_is_stale" ["source"]
        "1 while the source cannot be read, is silent or names no worker; the workers found before stay";
    DISCOVERY_ANSWERED = Gauge "baton_router_discovery_last_answer_timestamp_seconds" ["source"]
        "Unix time at which the source gave data last: bytes of an answer of the API server, or a reading of the file; absent before the first";
    DISCOVERED = Gauge "baton_router_discovered_workers" ["source", "state"]
        "Workers found: named now, or kept because no other worker of their role is ready";
    LOAD_REPORTS = Counter "baton_router_load_reports_total" ["role", "source", "result"]
        "Load reports of workers; source is answer or poll, result taken, unused, malformed or failed";
    BACKLOG = Gauge "baton_router_backlog_seconds" ["role", "worker"]
        "Predicted time of the prompts sent to a worker and not begun to be answered (cost)";
    UTILISATION = Gauge "baton_router_utilisation_ratio" ["role"]
        "Predicted prefill work sent in the last 30 s over what the workers can do (cost); 1 is all of it";
    PREFILL_SPEED = Gauge "baton_router_prefill_seconds_per_kilotoken" ["role", "worker"]
        "Learned prefill time of a prompt of 1000 tokens (cost)";
    CONFIDENCE = Gauge "baton_router_index_confidence_ratio" ["role", "worker"]
        "Share of the prefixes expected in a worker's cache that it found there, recent mean (cost)";
    INDEX_BLOCKS = Gauge "baton_router_index_blocks" ["role", "worker"]
        "Blocks of prompts remembered for a worker: of --block-size tokens, or of 256 bytes (cost)";
    KV_RANKS = Gauge "baton_router_kv_event_ranks" ["role", "state"]
        "Workers (DP ranks) by what is known of their caches: off, connecting, exact, doubtful (docs/routing.md)";
    KV_BATCHES = Counter "baton_router_kv_event_batches_total" ["role", "result"]
        "Batches of KV events: applied, known (a repetition), ahead (something before it is missing)";
    KV_RESYNCS = Counter "baton_router_kv_event_resyncs_total" ["role", "how"]
        "Caches known again: by snapshot, replay, cleared; or skipped, what was missed is lost";
    KV_FAILURES = Counter "baton_router_kv_event_failures_total" ["role", "reason"]
        "Streams of KV events that ended, by reason";
    KV_LAG = Histogram "baton_router_kv_event_lag_seconds" ["role"]
        "From a batch's time on the worker's clock until it is in the index";
    TREE_CHARS = Gauge "baton_router_tree_chars" ["role", "worker"]
        "Characters of prompts remembered for a worker (cache_aware)";
    TREE_BYTES = Gauge "baton_router_tree_bytes" ["role"]
        "Estimated memory of the prefix index (cost, cache_aware)";
    TREE_EVICTED = Gauge "baton_router_tree_evicted" ["role"]
        "Characters (cache_aware), blocks (cost) or keys (manual) dropped for a limit since the start";
    ROUTING_KEYS = Gauge "baton_router_routing_keys" ["role"]
        "Routing keys remembered (manual)";
    CERTIFICATE_EXPIRY = Gauge "baton_router_certificate_expiry_timestamp_seconds" ["certificate"]
        "Unix time at which the chain that the router uses ends to be valid; certificate is server (--tls-cert-path) or client (--client-cert-path)";
    CERTIFICATE_RELOADS = Counter "baton_router_certificate_reloads_total" ["result"]
        "Changes of the files of the TLS flags: applied to new connections, or failed, so that the old ones stay in use";
    FEED_CLIENTS = Gauge "baton_router_feed_clients" []
        "Pages that listen to GET /ui/feed";
    FEED_SNAPSHOTS = Counter "baton_router_feed_snapshots_total" []
        "Snapshots of the fleet rendered for them, each once for all";
    DECISION_LOG = Counter "baton_router_decision_log_lines_total" ["result"]
        "Lines of --decision-log: written, dropped (its queue was full) or failed (the disk)";
    TRACE_SPANS = Counter "baton_router_trace_spans_total" ["result"]
        "Spans of --enable-trace: exported, dropped (the queue was full) or failed (the collector)";
    BUILD = Gauge "baton_router_build_info" ["version"]
        "Always 1";
}

/// Label values of [`STAGES`], as `RouterMetrics::stages` has them.
const STAGE_NAMES: [&str; 7] =
    ["read", "queue", "parse", "tokenise", "decide", "connect", "first_token"];

/// Handles of everything in [`METRICS`].
pub struct RouterMetrics {
    exposed: Exposed,
    /// Lock of a scrape: gauges are rebuilt for each.
    scrape: parking_lot::Mutex<()>,
    pub requests: IntCounterVec,
    pub duration: HistogramVec,
    pub ttft: HistogramVec,
    pub overhead: HistogramVec,
    stages: [Histogram; 7],
    pub queue: Histogram,
    pub queued: Gauge,
    pub body_bytes: Gauge,
    pub connections: Gauge,
    pub client_cuts: IntCounterVec,
    pub shed: IntCounterVec,
    pub tokenize: HistogramVec,
    pub tokenize_fallbacks: IntCounterVec,
    pub tokenizer_lookups: IntCounterVec,
    pub tokenizer_cache_bytes: GaugeVec,
    pub ids_forwarded: IntCounterVec,
    pub token_counts: IntCounterVec,
    pub decisions: IntCounterVec,
    forecast: HistogramVec,
    observed: HistogramVec,
    forecast_error: HistogramVec,
    regret: HistogramVec,
    counted_tokens: IntCounterVec,
    passed_over: IntCounterVec,
    expected_cached: IntCounterVec,
    reported_cached: IntCounterVec,
    pub feed_clients: Gauge,
    pub feed_snapshots: IntCounter,
    pub decision_log_lines: IntCounterVec,
    pub trace_spans: IntCounterVec,
    pub retries: IntCounterVec,
    pub retries_refused: IntCounterVec,
    pub failovers: IntCounterVec,
    pub resumes_waiting: Gauge,
    pub failover_pause: HistogramVec,
    pub unresumable: IntCounterVec,
    pub decode_retries: IntCounterVec,
    pub releases: IntCounterVec,
    pub local_prefills: IntCounterVec,
    pub upstream_errors: IntCounterVec,
    pub leg_aborts: IntCounterVec,
    pub probes: IntCounterVec,
    pub discovery_updates: IntCounterVec,
    pub discovery_stale: GaugeVec,
    pub discovery_answered: GaugeVec,
    pub discovered: GaugeVec,
    pub certificate_expiry: GaugeVec,
    pub certificate_reloads: IntCounterVec,
    load_reports: IntCounterVec,
    pub workers: GaugeVec,
    pub unpaired: GaugeVec,
    pub worker_load: GaugeVec,
    pub circuit: GaugeVec,
    pub backlog: GaugeVec,
    pub utilisation: GaugeVec,
    pub prefill_speed: GaugeVec,
    pub confidence: GaugeVec,
    pub index_blocks: GaugeVec,
    pub kv_ranks: GaugeVec,
    kv_batches: IntCounterVec,
    kv_resyncs: IntCounterVec,
    kv_failures: IntCounterVec,
    kv_lag: HistogramVec,
    pub tree_chars: GaugeVec,
    pub tree_bytes: GaugeVec,
    pub tree_evicted: GaugeVec,
    pub routing_keys: GaugeVec,
}

fn opts(spec: &MetricSpec) -> Opts {
    Opts::new(spec.name, spec.help)
}

fn counters(exposed: &Exposed, spec: &MetricSpec) -> prometheus::Result<IntCounterVec> {
    let made = IntCounterVec::new(opts(spec), spec.labels)?;
    exposed.register(Box::new(made.clone()))?;
    Ok(made)
}

fn gauges(exposed: &Exposed, spec: &MetricSpec) -> prometheus::Result<GaugeVec> {
    let made = GaugeVec::new(opts(spec), spec.labels)?;
    exposed.register(Box::new(made.clone()))?;
    Ok(made)
}

fn histograms(exposed: &Exposed, spec: &MetricSpec) -> prometheus::Result<HistogramVec> {
    let buckets = HistogramOpts::from(opts(spec)).buckets(seconds_buckets());
    let made = HistogramVec::new(buckets, spec.labels)?;
    exposed.register(Box::new(made.clone()))?;
    Ok(made)
}

impl RouterMetrics {
    pub fn new() -> prometheus::Result<Self> {
        let exposed = Exposed::new();
        gauges(&exposed, &BUILD)?.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        let no_labels: &[&str] = &[];
        let stages = histograms(&exposed, &STAGES)?;
        Ok(Self {
            requests: counters(&exposed, &REQUESTS)?,
            duration: histograms(&exposed, &DURATION)?,
            ttft: histograms(&exposed, &TTFT)?,
            overhead: histograms(&exposed, &OVERHEAD)?,
            stages: STAGE_NAMES.map(|stage| stages.with_label_values(&[stage])),
            queue: histograms(&exposed, &QUEUE)?.with_label_values(no_labels),
            queued: gauges(&exposed, &QUEUED)?.with_label_values(no_labels),
            body_bytes: gauges(&exposed, &BODY_BYTES)?.with_label_values(no_labels),
            connections: gauges(&exposed, &CONNECTIONS)?.with_label_values(no_labels),
            client_cuts: counters(&exposed, &CLIENT_CUTS)?,
            shed: counters(&exposed, &SHED)?,
            tokenize: histograms(&exposed, &TOKENIZE)?,
            tokenize_fallbacks: counters(&exposed, &TOKENIZE_FALLBACKS)?,
            tokenizer_lookups: counters(&exposed, &TOKENIZER_LOOKUPS)?,
            tokenizer_cache_bytes: gauges(&exposed, &TOKENIZER_CACHE_BYTES)?,
            ids_forwarded: counters(&exposed, &IDS_FORWARDED)?,
            token_counts: counters(&exposed, &TOKEN_COUNTS)?,
            decisions: counters(&exposed, &DECISIONS)?,
            forecast: histograms(&exposed, &FORECAST)?,
            observed: histograms(&exposed, &OBSERVED)?,
            forecast_error: histograms(&exposed, &FORECAST_ERROR)?,
            regret: histograms(&exposed, &REGRET)?,
            passed_over: counters(&exposed, &PASSED_OVER)?,
            counted_tokens: counters(&exposed, &COUNTED_TOKENS)?,
            expected_cached: counters(&exposed, &EXPECTED_CACHED)?,
            reported_cached: counters(&exposed, &REPORTED_CACHED)?,
            feed_clients: gauges(&exposed, &FEED_CLIENTS)?.with_label_values(no_labels),
            feed_snapshots: counters(&exposed, &FEED_SNAPSHOTS)?.with_label_values(no_labels),
            decision_log_lines: counters(&exposed, &DECISION_LOG)?,
            trace_spans: counters(&exposed, &TRACE_SPANS)?,
            retries: counters(&exposed, &RETRIES)?,
            retries_refused: counters(&exposed, &RETRIES_REFUSED)?,
            failovers: counters(&exposed, &FAILOVERS)?,
            resumes_waiting: gauges(&exposed, &RESUMES_WAITING)?.with_label_values(no_labels),
            failover_pause: histograms(&exposed, &FAILOVER_PAUSE)?,
            unresumable: counters(&exposed, &UNRESUMABLE)?,
            decode_retries: counters(&exposed, &DECODE_RETRIES)?,
            releases: counters(&exposed, &RELEASES)?,
            local_prefills: counters(&exposed, &LOCAL_PREFILLS)?,
            upstream_errors: counters(&exposed, &UPSTREAM_ERRORS)?,
            leg_aborts: counters(&exposed, &LEG_ABORTS)?,
            probes: counters(&exposed, &PROBES)?,
            discovery_updates: counters(&exposed, &DISCOVERY_UPDATES)?,
            discovery_stale: gauges(&exposed, &DISCOVERY_STALE)?,
            discovery_answered: gauges(&exposed, &DISCOVERY_ANSWERED)?,
            discovered: gauges(&exposed, &DISCOVERED)?,
            certificate_expiry: gauges(&exposed, &CERTIFICATE_EXPIRY)?,
            certificate_reloads: counters(&exposed, &CERTIFICATE_RELOADS)?,
            load_reports: counters(&exposed, &LOAD_REPORTS)?,
            workers: gauges(&exposed, &WORKERS)?,
            unpaired: gauges(&exposed, &UNPAIRED)?,
            worker_load: gauges(&exposed, &WORKER_LOAD)?,
            circuit: gauges(&exposed, &CIRCUIT)?,
            backlog: gauges(&exposed, &BACKLOG)?,
            utilisation: gauges(&exposed, &UTILISATION)?,
            prefill_speed: gauges(&exposed, &PREFILL_SPEED)?,
            confidence: gauges(&exposed, &CONFIDENCE)?,
            index_blocks: gauges(&exposed, &INDEX_BLOCKS)?,
            kv_ranks: gauges(&exposed, &KV_RANKS)?,
            kv_batches: counters(&exposed, &KV_BATCHES)?,
            kv_resyncs: counters(&exposed, &KV_RESYNCS)?,
            kv_failures: counters(&exposed, &KV_FAILURES)?,
            kv_lag: histograms(&exposed, &KV_LAG)?,
            tree_chars: gauges(&exposed, &TREE_CHARS)?,
            tree_bytes: gauges(&exposed, &TREE_BYTES)?,
            tree_evicted: gauges(&exposed, &TREE_EVICTED)?,
            routing_keys: gauges(&exposed, &ROUTING_KEYS)?,
            exposed,
            scrape: parking_lot::Mutex::default(),
        })
    }

    /// How long the stages of a request took, those it came to.
    pub fn stages(&self, took: &StageTimes) {
        let seconds = [
            took.read,
            took.queue,
            took.parse,
            took.tokenise,
            took.decide,
            took.connect,
            took.first_token,
        ];
        for (histogram, seconds) in self.stages.iter().zip(seconds) {
            if let Some(seconds) = seconds {
                histogram.observe(seconds);
            }
        }
    }

    /// A first token that had been predicted was seen.
    pub fn first_token(&self, role: &str, forecast: PrefillForecast, took_ms: u64) {
        let predicted_ms = u64::from(forecast.ttft_ms);
        let seconds = |ms: u64| ms as f64 / 1e3;
        let role_only = [role];
        let observe = |family: &HistogramVec, ms| {
            family.with_label_values(&role_only).observe(seconds(ms));
        };
        observe(&self.forecast, predicted_ms);
        observe(&self.observed, took_ms);
        let sign = if took_ms < predicted_ms { "early" } else { "late" };
        let best_ms = u64::from(forecast.best_ttft_ms);
        observe(&self.regret, took_ms.saturating_sub(best_ms));
        let error = self.forecast_error.with_label_values(&[role, sign]);
        error.observe(seconds(took_ms.abs_diff(predicted_ms)));
    }

    /// A worker reported its queue.
    pub fn load_report(&self, role: Role, source: &str, result: &str) {
        let labels = [role.into_str(), source, result];
        self.load_reports.with_label_values(&labels).inc();
    }

    pub fn kv_batch(&self, role: Role, result: &str) {
        self.kv_batches.with_label_values(&[role.into_str(), result]).inc();
    }

    pub fn kv_resync(&self, role: Role, how: &str) {
        self.kv_resyncs.with_label_values(&[role.into_str(), how]).inc();
    }

    pub fn kv_failure(&self, role: Role, reason: &str) {
        self.kv_failures.with_label_values(&[role.into_str(), reason]).inc();
    }

    pub fn kv_lag(&self, role: Role, seconds: f64) {
        self.kv_lag.with_label_values(&[role.into_str()]).observe(seconds);
    }

    /// A worker reported what it counted of a prompt whose cached tokens had been predicted.
    pub fn counted(
        &self,
        role: &str,
        prompt_tokens: u32,
        forecast: PrefillForecast,
        reported: u32,
    ) {
        let expected = forecast.cached_tokens;
        let passed_over = forecast.best_cached_tokens.saturating_sub(expected);
        for (family, tokens) in [
            (&self.counted_tokens, prompt_tokens),
            (&self.expected_cached, expected),
            (&self.reported_cached, reported),
            (&self.passed_over, passed_over),
        ] {
            family.with_label_values(&[role]).inc_by(u64::from(tokens));
        }
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

/// docs/metrics.md's router part.
pub fn metrics_markdown() -> String {
    let buckets = seconds_buckets();
    let mut out = format!(
        "## Router\n\n`GET /metrics` of the router, and of `--prometheus-port` if given; `baton-router --print-metrics`\nprints this section. Histograms share {} buckets, factor 1.6 from {} s to {:.0} s, rounded to four\ndigits.\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n",
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
                spec.kind == MetricKind::Counter,
                spec.name.ends_with("_total"),
                "{}",
                spec.name
            );
            // A gauge may be seconds too, a counter may not: it counts.
            let is_seconds = spec.name.ends_with("_seconds");
            match spec.kind {
                MetricKind::Histogram => assert!(is_seconds, "{}", spec.name),
                MetricKind::Counter => assert!(!is_seconds, "{}", spec.name),
                MetricKind::Gauge => {}
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
        metrics.requests.with_label_values(&["a", "b", "c", "d"]).inc();
        assert!(metrics.exposed.gather().len() > 1);
    }
}
