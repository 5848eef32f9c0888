//! Flags of other routers that this one does not have: refused with what to do instead, never swallowed.

/// A flag name (without dashes) and the sentence printed when somebody gives it.
pub struct Refused {
    pub name: &'static str,
    pub instead: &'static str,
}

const fn refused(name: &'static str, instead: &'static str) -> Refused {
    Refused { name, instead }
}

const PARSERS: &str = "answers pass through untouched; give the parser to the engine";
const HISTORY: &str = "the router keeps no conversations; drop the flag";
const AUTH: &str = "there are only fixed keys; use --api-key and --control-plane-api-keys";

pub const REFUSED: &[Refused] = &[
    refused(
        "bucket-adjust-interval-secs",
        "there is no bucket policy; use --prefill-policy cost, which weighs prompts by their length",
    ),
    refused(
        "enable-igw",
        "one router serves one model; run one router per model",
    ),
    refused(
        "mini-lb",
        "use --pd-disaggregation with --policy round_robin",
    ),
    refused(
        "log-dir",
        "logs go to standard error; redirect it, or let journald or the container runtime keep it",
    ),
    refused(
        "prometheus-duration-buckets",
        "histograms share one fixed exponential family, see docs/metrics.md; drop the flag",
    ),
    refused(
        "upstream-http2",
        "workers are reached over HTTP/1.1, one connection per request in flight, so that no answer waits behind another; drop the flag",
    ),
    refused("reasoning-parser", PARSERS),
    refused("tool-call-parser", PARSERS),
    refused("mcp-config-path", "the router runs no tools; drop the flag"),
    refused(
        "backend",
        "workers speak SGLang's HTTP protocol; drop the flag",
    ),
    refused("history-backend", HISTORY),
    refused("oracle-wallet-path", HISTORY),
    refused("oracle-tns-alias", HISTORY),
    refused("oracle-connect-descriptor", HISTORY),
    refused("oracle-username", HISTORY),
    refused("oracle-password", HISTORY),
    refused("oracle-pool-min", HISTORY),
    refused("oracle-pool-max", HISTORY),
    refused("oracle-pool-timeout-secs", HISTORY),
    refused("postgres-db-url", HISTORY),
    refused("postgres-pool-max", HISTORY),
    refused("redis-url", HISTORY),
    refused("redis-pool-max", HISTORY),
    refused("redis-retention-days", HISTORY),
    refused(
        "control-plane-audit-enabled",
        "each use of a key of --control-plane-api-keys is logged anyway; drop the flag",
    ),
    refused("jwt-issuer", AUTH),
    refused("jwt-audience", AUTH),
    refused("jwt-jwks-uri", AUTH),
    refused("jwt-role-mapping", AUTH),
];

/// One sentence per refused flag found in `args`.
pub fn complaints(args: &[String]) -> Vec<String> {
    args.iter()
        .filter_map(|arg| {
            let name = arg.strip_prefix("--")?;
            let name = name.split_once('=').map_or(name, |(name, _)| name);
            let hit = REFUSED.iter().find(|r| r.name == name)?;
            Some(format!("--{name} is not supported: {}", hit.instead))
        })
        .collect()
}
