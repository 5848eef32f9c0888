//! Arguments the parser accepts and refuses, and its messages.

use super::*;

/// The flags of SGLang's router launcher 0.3.2.
const KNOWN: &str = "host port worker-urls policy prefill-policy decode-policy cache-threshold balance-abs-threshold \
    balance-rel-threshold bucket-adjust-interval-secs eviction-interval-secs max-tree-size max-idle-secs assignment-mode \
    max-payload-size dp-aware enable-igw mini-lb pd-disaggregation prefill decode worker-startup-timeout-secs \
    worker-startup-check-interval log-dir log-level service-discovery selector service-discovery-port \
    service-discovery-namespace prefill-selector decode-selector prometheus-port prometheus-host \
    prometheus-duration-buckets request-id-headers request-timeout-secs shutdown-grace-period-secs cors-allowed-origins \
    max-concurrent-requests queue-size queue-timeout-secs rate-limit-tokens-per-second retry-max-retries \
    retry-initial-backoff-ms retry-max-backoff-ms retry-backoff-multiplier retry-jitter-factor disable-retries \
    cb-failure-threshold cb-success-threshold cb-timeout-duration-secs cb-window-duration-secs disable-circuit-breaker \
    health-failure-threshold health-success-threshold health-check-timeout-secs health-check-interval-secs \
    health-check-endpoint disable-health-check model-path tokenizer-path chat-template tokenizer-cache-enable-l0 \
    tokenizer-cache-l0-max-entries tokenizer-cache-enable-l1 tokenizer-cache-l1-max-memory reasoning-parser \
    tool-call-parser mcp-config-path backend history-backend oracle-wallet-path oracle-tns-alias \
    oracle-connect-descriptor oracle-username oracle-password oracle-pool-min oracle-pool-max oracle-pool-timeout-secs \
    postgres-db-url postgres-pool-max redis-url redis-pool-max redis-retention-days client-cert-path client-key-path \
    ca-cert-paths tls-cert-path tls-key-path enable-trace otlp-traces-endpoint api-key control-plane-api-keys \
    control-plane-audit-enabled jwt-issuer jwt-audience jwt-jwks-uri jwt-role-mapping";

/// Further flags of vllm-router 0.1.17 and of its main branch.
const VLLM_ROUTER: &str = "decode-data-parallel-size enable-program-scheduling extra-generate-paths intra-node-data-parallel-size \
    kv-aware-session-affinity-ttl-secs kv-connector kv-event-block-size kv-event-model \
    kv-event-replay-source kv-event-source kv-penalty-disk kv-penalty-external kv-penalty-host pd-kv-events \
    prefill-data-parallel-size program-scheduling-config-json router-temperature vllm-discovery-address \
    vllm-pd-disaggregation wasm-middleware wasm-middleware-route wasm-middleware-sha256";

/// Further flags of smg 1.13.0.
const SMG: &str = "balance-token-usage-threshold block-size cache-boundaries cache-index cache-match-threshold \
    cache-ttl-secs disable-load-monitoring disable-tokenizer-autoload disable-worker-overload-protection \
    discovery-check-interval-secs discovery-file discovery-provider dp-minimum-tokens-scheduler enable-mesh \
    enable-rl enable-wasm encode encode-policy encode-selector epd-disaggregation header-read-timeout-secs \
    health-check-port history-memory-max-items history-memory-max-responses history-memory-retention-secs \
    idle-connection-timeout-secs jemalloc-prof-dir job-queue-capacity job-queue-concurrency \
    kv-connector-annotation kv-engine-id-annotation kv-index least-load-default-throughput \
    least-load-kv-pressure-weight least-load-max-waiting-requests least-load-mean-prefill-tokens \
    load-monitor-interval log-json log-mm-timing max-background-responses max-buffered-request-bytes \
    mesh-advertise-host mesh-host mesh-peer-urls mesh-port mesh-server-name mesh-tls-ca-cert mesh-tls-cert \
    mesh-tls-key mm-allow-private-media-hosts mm-allowed-media-domains mm-per-request-image-limit \
    mm-pixel-cache-mb mm-pixel-rdma mm-processing model model-alias model-id-from \
    multimodal-max-inflight-bytes multimodal-shm-min-bytes multimodal-tensor-transport \
    no-remove-unhealthy-workers no-worker-auto-recovery oracle-external-auth overlap-decay \
    overload-token-usage-threshold parser pd-admission-wait-secs postgres-op-timeout-secs \
    power-of-two-load-metric prefill-max-inflight-requests-per-worker prefill-queue-size \
    prefill-queue-timeout-secs prefix-hash-balance-abs-threshold prefix-hash-load-factor prefix-token-count \
    priority-scheduler-config priority-scheduler-default-max-class priority-scheduler-enabled \
    priority-scheduler-tenant-metric-top-n rdma-listen-ip rdma-slot-ttl-s redis-op-timeout-secs \
    remove-unhealthy-workers rl-control-timeout-secs rl-fanout-concurrency router-selector \
    routing-key-headers routing-key-override schema-config selection-accounting-ttl-ms selection-policy \
    selection-temperature spill-abs-threshold spill-rel-threshold sse-keepalive-secs sticky-key-idle-secs \
    sticky-sessions storage-context-headers storage-hook-wasm-path stream-body-stall-timeout-secs \
    tenant-api-key tenant-header-name tenant-rate-limit-config tenant-rate-limit-enabled \
    tokenizer-cache-l0-max-memory trust-tenant-header upstream-http2 upstream-pool-idle-timeout-secs \
    worker-auto-recovery worker-overload-protection worker-overload-shed worker-overload-token-usage \
    worker-overload-waiting-requests worker-stale-secs worker-stall-secs worker-startup-delay \
    worker-warmup-blocks worker-warmup-divert-every worker-warmup-secs worker-warmup-share \
    worker-warmup-thin-ratio worker-wedge-secs zmq-engine-count";

/// Flags that SGLang's tests of unreleased branches give to its router.
const UNRELEASED: &str =
    "epd-disaggregation encode encode-policy rate-limit-rule cache-balance-weight";

fn parse(args: &[&str]) -> Result<RouterConfig, ParseStop> {
    let argv: Vec<String> = std::iter::once("baton-router")
        .chain(args.iter().copied())
        .map(str::to_owned)
        .collect();
    RouterConfig::parse(&argv)
}

fn complaint(args: &[&str]) -> String {
    match parse(args) {
        Err(ParseStop::Bad(text)) => text,
        other => panic!("{args:?} should be refused, got {other:?}"),
    }
}

#[test]
fn every_known_flag_is_implemented_or_refused_with_a_sentence() {
    let names: Vec<&str> = KNOWN.split_whitespace().collect();
    assert_eq!(names.len(), 98);
    let command = RouterConfig::command_with_env();
    for name in names {
        let implemented = command.get_arguments().any(|a| a.get_long() == Some(name));
        let refused = unsupported_flags::refused_flags().any(|(names, _)| names.contains(&name));
        assert!(
            implemented != refused,
            "--{name}: implemented {implemented}, refused {refused}"
        );
        if refused {
            let flag = format!("--{name}");
            assert!(complaint(&[&flag, "x"]).starts_with(&format!("{flag} is not supported: ")));
        }
    }
}

#[test]
fn flags_of_other_routers_are_known_too() {
    let command = RouterConfig::command_with_env();
    for name in [VLLM_ROUTER, SMG, UNRELEASED]
        .iter()
        .flat_map(|names| names.split_whitespace())
    {
        let implemented = command.get_arguments().any(|a| a.get_long() == Some(name));
        let text = format!("--{name} is not supported: ");
        let refused = unsupported_flags::validate(&[format!("--{name}")]).concat();
        let spelled = name == "vllm-pd-disaggregation";
        assert!(
            implemented != refused.starts_with(&text) || spelled,
            "--{name}: implemented {implemented}, {refused:?}"
        );
    }
}

#[test]
fn policies_of_other_routers_are_named_with_what_comes_nearest() {
    assert_eq!(
        complaint(&["--prefill-policy", "bucket", "--policy=kv_aware"]),
        "--prefill-policy bucket is not supported: use cost, which weighs prompts by their length\n\
         --policy kv_aware is not supported: use cost with --kv-events on"
    );
}

#[test]
fn vllm_pairs_have_one_flag_in_vllm_router() {
    let words = "--vllm-pd-disaggregation --prefill http://a:1 --decode http://b:2 --prefill-data-parallel-size 4";
    let config = parse(&words.split_whitespace().collect::<Vec<_>>()).unwrap();
    assert!(config.workers.pd_disaggregation && config.workers.is_dp_aware());
    assert_eq!(config.pairs.pd_protocol, PdProtocol::Vllm);
    let sizes = Role::ALL.map(|role| config.workers.dp_size(role));
    assert_eq!(sizes.into_iter().flatten().collect::<Vec<_>>(), [4]);
    let text = complaint(&["--decode-data-parallel-size", "0"]);
    assert!(
        text.contains("from 1 to 1024") && text.contains("needs --pd-disaggregation"),
        "{text}"
    );
}

#[test]
fn log_levels_are_words_or_filters() {
    for (given, filter) in [
        ("warning", "warn"),
        ("critical", "error"),
        ("info,baton_router=debug", "info,baton_router=debug"),
        ("off", "off"),
    ] {
        assert_eq!(
            parse(&["--log-level", given]).unwrap().observe.log_filter(),
            filter
        );
    }
    assert!(complaint(&["--log-level", "loud"]).starts_with("--log-level loud: give trace, "));
}

#[test]
fn labels_may_stand_in_one_argument() {
    for labels in [
        vec!["app=w", "env=prod"],
        vec!["app=w env=prod"],
        vec!["app=w,env=prod"],
    ] {
        let mut args = vec!["--service-discovery", "--selector"];
        args.extend(labels);
        let found = parse(&args).unwrap().discovery.selectors(false);
        assert_eq!(found, [(Role::Regular, "app=w,env=prod".to_owned())]);
    }
}

#[test]
fn prefill_takes_an_optional_port_and_repeats() {
    let config = parse(&[
        "--pd-disaggregation",
        "--prefill",
        "http://a:1",
        "8998",
        "--prefill",
        "b:2",
        "none",
        "--prefill",
        "http://c:3",
        "--decode",
        "http://d:4",
        "--decode",
        "http://e:5",
        "--eviction-interval",
        "7",
    ])
    .unwrap();
    let specs = config.worker_specs().unwrap();
    let shown: Vec<String> = specs
        .iter()
        .map(|s| format!("{} {} {:?}", s.role, s.url, s.bootstrap))
        .collect();
    assert_eq!(
        shown,
        [
            "prefill http://a:1 Port(8998)",
            "prefill http://b:2 Null",
            "prefill http://c:3 FromWorker",
            "decode http://d:4 FromWorker",
            "decode http://e:5 FromWorker",
        ]
    );
    assert_eq!(config.routing.eviction_interval_secs, 7);
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let text = complaint(&[
        "--cache-threshold",
        "2",
        "--decode",
        "ftp://x",
        "--max-concurrent-requests",
        "0",
        "--max-index-bytes",
        "5",
        "--max-idle-secs",
        "0",
    ]);
    for part in [
        "--cache-threshold 2",
        "--pd-disaggregation",
        "ftp://x",
        "--max-concurrent-requests 0",
        "--max-index-bytes 5",
        "--max-idle-secs 0",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn limits_that_need_another_flag_say_which() {
    for (flags, part) in [
        (
            &["--rate-limit-tokens-per-second", "5"][..],
            "needs --max-concurrent-requests",
        ),
        (
            &["--max-ttft-ms", "5", "--policy", "round_robin"],
            "the policy cost",
        ),
        (
            &[
                "--max-ttft-ms",
                "5",
                "--pd-disaggregation",
                "--prefill-policy",
                "random",
            ],
            "the policy cost",
        ),
        (&["--max-header-bytes", "100"], "--max-header-bytes 100"),
        (&["--max-connections", "0"], "--max-connections 0"),
        (
            &["--default-capacity-tokens", "0"],
            "--default-capacity-tokens 0",
        ),
        (
            &["--kv-pull-ms-per-kilotoken=-1"],
            "--kv-pull-ms-per-kilotoken -1",
        ),
        (&["--upstream-http2"], "HTTP/1.1"),
    ] {
        let text = complaint(flags);
        assert!(text.contains(part), "{part} not in {text}");
    }
}

#[test]
fn unknown_name_is_answered_with_the_known_ones() {
    for (flag, known) in [
        ("--policy", "cache_aware, manual, cost"),
        ("--prefill-policy", "cache_aware, manual, cost"),
        ("--assignment-mode", "random, min_load, min_group"),
        ("--cache-miss", "smallest_tree, least_load"),
    ] {
        assert!(complaint(&[flag, "nearest"]).contains(known), "{flag}");
    }
}

fn help(flag: &str) -> String {
    match parse(&[flag]) {
        Err(ParseStop::Help(text)) => text,
        other => panic!("{flag} gave {other:?}"),
    }
}

#[test]
fn short_help_has_the_essential_flags_and_full_help_all() {
    let command = RouterConfig::command_with_env();
    let visible: Vec<&str> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| arg.get_long())
        .collect();
    let explains = |text: &str, name: &str| {
        let flag = format!("--{name}");
        let mut lines = text.lines().map(str::trim_start);
        lines.any(|line| line.starts_with('-') && line.split([' ', ',', '[']).any(|w| w == flag))
    };
    let short = help("--help");
    assert_eq!(short, help("-h"));
    let full = help("--help-all");
    let helps = ["help", "help-all"];
    for name in &visible {
        let is_short = docs::ESSENTIALS.contains(name) || helps.contains(name);
        assert_eq!(explains(&short, name), is_short, "--{name}");
        assert!(explains(&full, name), "--{name}");
    }
    let others = visible.len() - docs::ESSENTIALS.len() - helps.len();
    let last = format!("--help-all shows {others} more flags.");
    assert_eq!(short.trim_end().lines().last(), Some(last.as_str()));
    assert!(full.contains("BATON_ROUTER_FLAG_QUEUE_SIZE"));
}

#[test]
fn flags_to_complete_are_those_of_help() {
    let text = flags_to_complete();
    let named: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split('\t').next())
        .collect();
    assert!(named.contains(&"--policy") && named.contains(&"--help-all"));
    assert!(text.contains("--log-format\ttext,json\t"), "{text}");
}

#[test]
fn defaults_are_the_fields() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.listen.port, 8000);
    assert_eq!(config.routing.policy, PolicyKind::Cost);
    assert_eq!(config.retry(), RetryConfig::default());
    assert_eq!(
        (
            config.retry.retry_budget_ratio,
            config.retry.retry_budget_floor
        ),
        (0.1, 64)
    );
    assert_eq!(config.breaker(), Some(BreakerConfig::default()));
    let health = &config.health;
    assert_eq!(
        (
            health.health_failure_threshold,
            health.health_success_threshold
        ),
        (3, 2)
    );
    assert_eq!(config.policy_params(), PolicyParams::default());
}

#[test]
fn capacity_and_pull_time_of_flags_reach_cost() {
    let crossing = "--kv-pull-crossing-ms-per-kilotoken=150";
    let capacity = "--default-capacity-tokens=5000";
    let config =
        parse(&[capacity, "--kv-pull-ms-per-kilotoken", "100", crossing]).expect("known flags");
    let cost = config.policy_params().cost;
    assert_eq!(cost.default_capacity_tokens, 5000);
    assert!((cost.pull_far_ms - 0.1).abs() < 1e-12);
    assert!((cost.pull_crossing_ms - 0.15).abs() < 1e-12);
    assert!((cost.pull_near_ms - 0.1 * 13.0 / 43.0).abs() < 1e-12);
}
