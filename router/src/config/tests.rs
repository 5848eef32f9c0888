//! What the parser accepts, refuses and says.

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
        let refused = REFUSED.iter().any(|r| r.name == name);
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
        assert!(complaint(&[flag, "bucket"]).contains(known), "{flag}");
    }
}

#[test]
fn defaults_are_the_fields() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.listen.port, 8000);
    assert_eq!(config.routing.policy, PolicyKind::Cost);
    assert_eq!(config.retry(), RetryConfig::default());
    assert_eq!(config.retry_budget(), BudgetConfig::default());
    assert_eq!(config.breaker(), Some(BreakerConfig::default()));
    assert_eq!(config.health(), HealthConfig::default());
    assert_eq!(config.policy_params(), PolicyParams::default());
}
