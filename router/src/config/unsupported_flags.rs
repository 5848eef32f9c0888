//! Flags of other routers that this one does not have: refused with a remedy, never ignored.

/// Flags (without dashes) of a line, and the sentence printed for each of them.
const FLAGS: &str = "\
bucket-adjust-interval-secs: there is no bucket policy; use --prefill-policy cost, which weighs prompts by their length
enable-igw model-id-from model-alias model kv-event-model: one router serves one model, under the name its workers tell; run one router per model
mini-lb: use --pd-disaggregation with --policy round_robin
log-dir: logs go to standard error; redirect it, or let journald or the container runtime keep it
log-json: use --log-format json
ssl-certfile ssl-keyfile ssl-keyfile-password ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh: use --tls-cert-path and --tls-key-path; the router reads their files again when they change
prometheus-duration-buckets: histograms share one fixed exponential family, see docs/metrics.md; drop the flag
upstream-http2: workers are reached over HTTP/1.1, one connection per request in flight, so that no answer waits behind another; drop the flag
upstream-pool-idle-timeout-secs: a kept connection that the worker has closed is noticed, and another taken; drop the flag
reasoning-parser tool-call-parser parser disable-tokenizer-autoload: answers pass through untouched; give the parser to the engine
mcp-config-path: the router runs no tools; drop the flag
enable-wasm storage-hook-wasm-path wasm-middleware wasm-middleware-sha256 wasm-middleware-route: the router runs no plugins; put a proxy in front that does
backend: workers speak SGLang's HTTP protocol; drop the flag
extra-generate-paths: the paths that go to a worker are fixed, docs/protocol.md lists them; call the worker for others
epd-disaggregation encode encode-policy encode-selector: there are no encode workers, prefill workers encode images themselves; use --pd-disaggregation
multimodal-tensor-transport multimodal-shm-min-bytes multimodal-max-inflight-bytes mm-per-request-image-limit mm-processing mm-pixel-cache-mb mm-pixel-rdma mm-allowed-media-domains mm-allow-private-media-hosts rdma-listen-ip rdma-slot-ttl-s log-mm-timing: images pass through untouched; drop the flag
history-backend oracle-wallet-path oracle-tns-alias oracle-connect-descriptor oracle-username oracle-password oracle-pool-min oracle-pool-max oracle-pool-timeout-secs oracle-external-auth postgres-db-url postgres-pool-max postgres-op-timeout-secs redis-url redis-pool-max redis-retention-days redis-op-timeout-secs history-memory-max-responses history-memory-max-items history-memory-retention-secs storage-context-headers schema-config max-background-responses: the router keeps no conversations; drop the flag
control-plane-audit-enabled: each use of a key of --control-plane-api-keys is logged anyway; drop the flag
jwt-issuer jwt-audience jwt-jwks-uri jwt-role-mapping tenant-api-key: there are only fixed keys; use --api-key and --control-plane-api-keys
rate-limit-rule tenant-rate-limit-enabled tenant-rate-limit-config trust-tenant-header tenant-header-name priority-scheduler-enabled priority-scheduler-default-max-class priority-scheduler-config priority-scheduler-tenant-metric-top-n: engines share their time among tenants and priorities (--tenant-config, header x-tenant-id, field priority); drop the flag
enable-mesh mesh-server-name mesh-host mesh-advertise-host mesh-port mesh-peer-urls mesh-tls-ca-cert mesh-tls-cert mesh-tls-key router-selector: routers know nothing of each other; drop the flag, and let --kv-events tell each of them the cached pages of workers
kv-connector: vLLM workers are asked as its NIXL connector wants it, one after the other with kv_transfer_params; drop the flag (mooncake and moriio have protocols of their own, which are not spoken)
kv-connector-annotation kv-engine-id-annotation: the workers agree on the transport of pages; drop the flag
vllm-discovery-address: workers do not announce themselves here; use --discovery-file, --service-discovery or POST /workers
discovery-provider discovery-check-interval-secs: use --discovery-file, which is read again when it changes, or --service-discovery
kv-event-source pd-kv-events: use --kv-events-endpoint, a template for all workers
kv-event-replay-source: use --kv-events-replay-endpoint, a template for all workers
kv-event-block-size: events tell the size of their blocks; drop the flag
kv-penalty-host kv-penalty-external kv-penalty-disk router-temperature kv-index overlap-decay selection-policy selection-temperature selection-accounting-ttl-ms: the policy cost weighs cached tokens against queued work, in seconds; drop the flag
enable-program-scheduling program-scheduling-config-json: requests are placed one by one; drop the flag
kv-aware-session-affinity-ttl-secs sticky-sessions sticky-key-idle-secs routing-key-override routing-key-headers: use --policy manual, which keeps requests of one x-smg-routing-key on one worker, and --max-idle-secs
cache-match-threshold cache-balance-weight cache-index cache-boundaries cache-ttl-secs spill-abs-threshold spill-rel-threshold: cache_aware has --cache-threshold, --balance-abs-threshold, --balance-rel-threshold and --max-tree-size; drop the flag
prefix-token-count prefix-hash-load-factor prefix-hash-balance-abs-threshold least-load-kv-pressure-weight least-load-default-throughput least-load-mean-prefill-tokens least-load-max-waiting-requests power-of-two-load-metric balance-token-usage-threshold overload-token-usage-threshold: this is a knob of another router's policy; drop the flag, and see --policy
dp-minimum-tokens-scheduler: use --dp-aware with the policy cost, which counts tokens
worker-overload-waiting-requests worker-overload-token-usage worker-overload-protection disable-worker-overload-protection worker-overload-shed prefill-max-inflight-requests-per-worker prefill-queue-size prefill-queue-timeout-secs pd-admission-wait-secs: workers queue and refuse by themselves, and the router tries their refusals elsewhere; use --max-ttft-ms, or --max-concurrent-requests and --queue-size
worker-stall-secs worker-wedge-secs worker-stale-secs worker-warmup-secs worker-warmup-share worker-warmup-blocks worker-warmup-thin-ratio worker-warmup-divert-every worker-startup-delay: probes and failed requests take a worker out and in again (--health-*, --cb-*); drop the flag
remove-unhealthy-workers no-remove-unhealthy-workers worker-auto-recovery no-worker-auto-recovery: an unhealthy worker stays registered, is probed, and comes back by itself; drop the flag
health-check-port: probes go to the port that serves; drop the flag
load-monitor-interval disable-load-monitoring job-queue-capacity job-queue-concurrency: there is nothing to tune: workers report their load with answers and probes; drop the flag
max-buffered-request-bytes: a body is held until its request ends; see --max-payload-size and --max-total-body-bytes
enable-rl rl-control-timeout-secs rl-fanout-concurrency: there is no control plane for training; call the workers for it
zmq-engine-count: workers are reached over HTTP; drop the flag
jemalloc-prof-dir: the allocator has no profiler; use perf or heaptrack, and drop the flag
";

/// Policies of other routers, and what comes nearest.
const POLICIES: &str = "\
bucket: cost, which weighs prompts by their length
consistent_hash consistent_hashing sticky_least_loaded sticky_round_robin: manual, which keeps requests of one x-smg-routing-key on one worker
kv_aware: cost with --kv-events on
least_load: power_of_two or cost
prefix_hash: cache_aware or cost
passthrough: round_robin
";

/// Names and sentences of the refused flags.
pub fn refused_flags() -> impl Iterator<Item = (Vec<&'static str>, &'static str)> {
    rows(FLAGS)
}

fn rows(table: &'static str) -> impl Iterator<Item = (Vec<&'static str>, &'static str)> {
    let rows = table.lines().filter_map(|line| line.split_once(": "));
    rows.map(|(names, sentence)| (names.split(' ').collect(), sentence))
}

fn find(table: &'static str, name: &str) -> Option<&'static str> {
    rows(table)
        .find(|(names, _)| names.contains(&name))
        .map(|(_, sentence)| sentence)
}

/// Sentences about refused flags and policies in `args`, one each.
pub fn validate(args: &[String]) -> Vec<String> {
    let mut bad = Vec::new();
    for (at, arg) in args.iter().enumerate() {
        let Some(flag) = arg.strip_prefix("--") else {
            continue;
        };
        let (name, value) = match flag.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (flag, args.get(at + 1).map(String::as_str)),
        };
        if let Some(hit) = find(FLAGS, name) {
            bad.push(format!("--{name} is not supported: {}", hit));
        }
        if matches!(name, "policy" | "prefill-policy" | "decode-policy")
            && let Some(value) = value
            && let Some(hit) = find(POLICIES, value)
        {
            bad.push(format!("--{name} {value} is not supported: use {}", hit));
        }
    }
    bad
}
