//! Router configuration: one clap struct; flags, help, defaults and docs/flags.md all come from its
//! fields.
//!
//! 1. `parse` refuses known flags of other routers with a sentence, then lets clap read the rest;
//! 2. `check` finds every mistake between fields and reports them all at once;
//! 3. the result is frozen. No I/O happens here.
//!
//! Every flag can also come from the environment as `BATON_ROUTER_FLAG_<NAME>`. The prefix is odd
//! on purpose: in Kubernetes a Service called `baton-router` sets `BATON_ROUTER_PORT=tcp://…` in
//! every pod.

mod discovery;
mod docs;
mod keys;
mod kv_events;
mod limits;
mod observe;
mod tls;
mod tokens;
mod unsupported_flags;
mod workers;

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser};
use http::HeaderName;
use router_core::{
    AssignmentMode, BreakerConfig, CacheAwareParams, CostParams, ManualParams, MissPolicy,
    PolicyKind, PolicyParams, RetryBudget, RetryConfig, Role,
};

pub use docs::{flags_markdown, flags_to_complete};

pub use keys::{ControlKey, KeyRole};
pub use kv_events::{KvEventEndpoint, KvEventFlags, KvEventsMode};
pub use limits::{AddressBlock, LimitFlags};
pub use observe::{ObservabilityFlags, TraceEndpoint, TraceProtocol};
pub use tls::TlsFlags;
pub use tokens::TokenizerFlags;
pub use workers::{
    BootstrapPort, MAX_DP_SIZE, PairFlags, PdProtocol, WorkerFlags, WorkerSpec, WorkerUrl,
};

const ENV_PREFIX: &str = "BATON_ROUTER_FLAG_";

#[derive(Debug, Clone, Parser)]
#[command(
    name = "baton-router",
    version,
    about = "HTTP router in front of prefill and decode nodes",
    max_term_width = 120,
    disable_help_flag = true, // docs.rs has others
    args_override_self = true, // the last one counts, as with the peers' launchers
    after_help = "Every flag can be set as BATON_ROUTER_FLAG_<NAME>, e.g. BATON_ROUTER_FLAG_QUEUE_SIZE=200."
)]
pub struct RouterConfig {
    #[command(flatten)]
    pub listen: ListenFlags,
    #[command(flatten)]
    pub tls: TlsFlags,
    #[command(flatten)]
    pub workers: WorkerFlags,
    #[command(flatten)]
    pub discovery: discovery::DiscoveryFlags,
    #[command(flatten)]
    pub routing: RoutingFlags,
    #[command(flatten)]
    pub tokens: TokenizerFlags,
    #[command(flatten)]
    pub kv_events: KvEventFlags,
    #[command(flatten)]
    pub limits: LimitFlags,
    #[command(flatten)]
    pub retry: RetryFlags,
    #[command(flatten)]
    pub pairs: PairFlags,
    #[command(flatten)]
    pub breaker: BreakerFlags,
    #[command(flatten)]
    pub health: HealthFlags,
    #[command(flatten)]
    pub observe: ObservabilityFlags,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Listening")]
pub struct ListenFlags {
    /// Address the router listens on
    #[arg(long, default_value = "0.0.0.0")]
    pub host: String,
    /// Port the router listens on; 0 picks a free one, which the log names
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Answer the health paths on this port of --host too, over HTTP without TLS, so that clients
    /// cannot take the connections of probes; 0 picks a free one
    #[arg(long, value_name = "PORT")]
    pub health_port: Option<u16>,
    /// Require 'Authorization: Bearer KEY' on all but health paths and /metrics; also sent to
    /// workers by health checks
    #[arg(long, value_name = "KEY")]
    pub api_key: Option<String>,
    /// Keys that alone open the paths which show or change the fleet (/workers and its older names,
    /// /flush_cache, /get_loads, /engine_metrics, /health_generate, /ui/feed, profiles) or others'
    /// requests (/v1/requests, /abort_request), each ID:NAME:ROLE:KEY with role admin; user is
    /// answered 403
    #[arg(long, value_name = "ID:NAME:ROLE:KEY", num_args = 1.., hide_env_values = true)]
    pub control_plane_api_keys: Vec<ControlKey>,
    /// Origins a browser page may call from; '*' allows all
    #[arg(long, value_name = "ORIGIN", num_args = 0.., value_delimiter = ',')]
    pub cors_allowed_origins: Vec<String>,
    /// Without --api-key: names by which this router may be asked besides addresses, localhost and,
    /// beyond loopback, names without a dot; '*' allows all
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    pub allowed_hosts: Vec<String>,
    /// Headers that may carry the request id; the first one present is used [default: x-request-id
    /// x-correlation-id x-trace-id request-id]
    #[arg(long, value_name = "HEADER", num_args = 1.., value_delimiter = ',')]
    pub request_id_headers: Vec<HeaderName>,
    /// On SIGTERM keep accepting this long after /readyz says 503, so that load balancers notice
    /// [ms]
    #[arg(long, default_value_t = 500, value_name = "MS")]
    pub shutdown_delay_ms: u64,
    /// On SIGTERM wait this long for running requests [s]
    #[arg(long, default_value_t = 180, value_name = "SECS")]
    pub shutdown_grace_period_secs: u64,
}

impl ListenFlags {
    /// True if other machines cannot reach the router.
    pub fn is_on_loopback(&self) -> bool {
        let address = self.host.parse::<IpAddr>();
        self.host == "localhost"
            || address.is_ok_and(|address| address.to_canonical().is_loopback())
    }
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Routing")]
pub struct RoutingFlags {
    /// How a worker is chosen: random, round_robin, power_of_two, cache_aware, manual, cost
    /// (SGLang's router: cache_aware)
    #[arg(long, default_value_t = PolicyKind::Cost)]
    pub policy: PolicyKind,
    /// Policy for prefill workers [default: --policy]
    #[arg(long)]
    pub prefill_policy: Option<PolicyKind>,
    /// Policy for decode workers [default: --policy]
    #[arg(long)]
    pub decode_policy: Option<PolicyKind>,
    /// cache_aware: least matched fraction of the prompt for which affinity wins over spreading
    #[arg(long, default_value_t = 0.3, value_name = "FRACTION")]
    pub cache_threshold: f32,
    /// cache_aware: loads count as unbalanced when max - min exceeds this and the ratio does too
    /// [requests]
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub balance_abs_threshold: usize,
    /// cache_aware: loads count as unbalanced when max > this * min and the difference is exceeded
    /// too
    #[arg(long, default_value_t = 1.5, value_name = "RATIO")]
    pub balance_rel_threshold: f32,
    /// cache_aware: worker for a prompt without a match: smallest_tree (SGLang's router),
    /// least_load (smg)
    #[arg(long, default_value_t = MissPolicy::SmallestTree, value_name = "RULE")]
    pub cache_miss: MissPolicy,
    /// cache_aware, manual: pause between two evictions [s]
    #[arg(
        long,
        alias = "eviction-interval",
        default_value_t = 60,
        value_name = "SECS"
    )]
    pub eviction_interval_secs: u64,
    /// cache_aware: characters remembered per worker
    #[arg(long, default_value_t = 67_108_864, value_name = "CHARS")]
    pub max_tree_size: usize,
    /// cost, cache_aware: most memory of a role's prefix index; the oldest entries are dropped
    /// [bytes]
    #[arg(long, default_value_t = 1 << 30, value_name = "BYTES")]
    pub max_index_bytes: usize,
    /// cost: tokens that a worker's KV cache is taken to hold if the worker does not report it
    /// (vLLM's do not)
    #[arg(long, default_value_t = 1 << 20, value_name = "TOKENS")]
    pub default_capacity_tokens: u64,
    /// cost: time a decode worker takes to fetch the KV of 1000 tokens from another machine; from
    /// its own it is taken to be three tenths of that [ms]
    #[arg(long, default_value_t = 43.0, value_name = "MS")]
    pub kv_pull_ms_per_kilotoken: f64,
    /// cost: the same from another topology domain (docs/routing.md) [ms]
    #[arg(long, default_value_t = 130.0, value_name = "MS")]
    pub kv_pull_crossing_ms_per_kilotoken: f64,
    /// manual: worker for a new key (header x-smg-routing-key): random, min_load (fewest requests),
    /// min_group (fewest keys)
    #[arg(long, default_value_t = AssignmentMode::Random, value_name = "MODE")]
    pub assignment_mode: AssignmentMode,
    /// manual: a key not seen for this long is forgotten [s]
    #[arg(long, default_value_t = 14_400, value_name = "SECS")]
    pub max_idle_secs: u64,
    /// The values of all that decisions depend on, as flags: for the decision log.
    #[arg(skip)]
    pub resolved: Vec<String>,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Retries")]
pub struct RetryFlags {
    /// Most attempts per request, the first included; the loss of a worker that had the request for
    /// 5 s counts as a quarter
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub retry_max_retries: u32,
    /// Pause before the second attempt [ms]
    #[arg(long, default_value_t = 50, value_name = "MS")]
    pub retry_initial_backoff_ms: u64,
    /// Longest pause [ms]
    #[arg(long, default_value_t = 30_000, value_name = "MS")]
    pub retry_max_backoff_ms: u64,
    /// Each pause is this times the one before
    #[arg(long, default_value_t = 1.5, value_name = "FACTOR")]
    pub retry_backoff_multiplier: f64,
    /// Each pause is varied by up to this fraction
    #[arg(long, default_value_t = 0.2, value_name = "FRACTION")]
    pub retry_jitter_factor: f64,
    /// Make one attempt per request
    #[arg(long)]
    pub disable_retries: bool,
    /// Retries of the whole fleet in 30 s, per request of these 30 s; 0 leaves
    /// --retry-budget-floor. Interrupted streams need none: --failover-concurrency paces them
    #[arg(long, default_value_t = 0.1, value_name = "RATIO")]
    pub retry_budget_ratio: f64,
    /// Retries in 30 s that are allowed however few requests there are: as many as one worker has
    /// in flight
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub retry_budget_floor: u32,
    /// End a stream with an error event when its worker breaks off, instead of resuming it on
    /// another worker
    #[arg(long)]
    pub disable_failover: bool,
    /// Most memory for the requests of running streams and the tokens they have; streams beyond it
    /// pass, but end when their worker breaks off [bytes]
    #[arg(long, default_value_t = 1 << 30, value_name = "BYTES")]
    pub failover_max_bytes: usize,
    /// Interrupted streams that are resumed at once, per ready worker; the others wait
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub failover_concurrency: usize,
    /// Longest wait of an interrupted stream, or of a request in the queue, for a worker while none
    /// is ready; 0: fail at once [s]
    #[arg(long, default_value_t = 30, value_name = "SECS")]
    pub worker_wait_timeout_secs: u64,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Circuit breaker")]
pub struct BreakerFlags {
    /// Failures in a row that open the circuit of a worker
    #[arg(long, default_value_t = 10, value_name = "N")]
    pub cb_failure_threshold: u32,
    /// Successes in a row that close it again
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub cb_success_threshold: u32,
    /// How long the circuit stays open before a trial request [s]
    #[arg(long, default_value_t = 60, value_name = "SECS")]
    pub cb_timeout_duration_secs: u64,
    /// Failures older than this are forgotten [s]
    #[arg(long, default_value_t = 120, value_name = "SECS")]
    pub cb_window_duration_secs: u64,
    /// Never open the circuit of a worker
    #[arg(long)]
    pub disable_circuit_breaker: bool,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Health checks")]
pub struct HealthFlags {
    /// Failed probes in a row that make a worker unhealthy
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub health_failure_threshold: u32,
    /// Good probes in a row that make it healthy again
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub health_success_threshold: u32,
    /// A probe without an answer for this long has failed [s]
    #[arg(long, default_value_t = 5, value_name = "SECS")]
    pub health_check_timeout_secs: u64,
    /// Pause between two probes (SGLang's router: 60; shorter here because a probe is cheap and a
    /// dead worker is not) [s]
    #[arg(long, default_value_t = 5, value_name = "SECS")]
    pub health_check_interval_secs: u64,
    /// A worker whose request has had no answer for this long is probed at once, and is unhealthy
    /// if nothing comes from it for 0.5 s x --health-failure-threshold (4 times its slowest recent
    /// probe, if that is more); 0: never [s]
    #[arg(long, default_value_t = 2, value_name = "SECS")]
    pub silent_request_probe_secs: u64,
    /// Path that is probed
    #[arg(long, default_value = "/health", value_name = "PATH")]
    pub health_check_endpoint: String,
    /// Never probe; every registered worker counts as healthy
    #[arg(long)]
    pub disable_health_check: bool,
}

/// Why there is no config.
#[derive(Debug)]
pub enum ParseStop {
    /// --help or --version: text for standard output, exit 0.
    Help(String),
    /// Text for standard error, exit 2.
    Bad(String),
}

/// Less than a few hundred prompts' worth of index is a mistake.
const MIN_INDEX_BYTES: f64 = 1_048_576.0;

/// Smallest file: a line with the candidates of a large fleet has tens of kilobytes.
const MIN_LOG_BYTES: f64 = 1_048_576.0;

/// Window of --retry-budget-ratio and --retry-budget-floor.
const RETRY_WINDOW_MS: u64 = 30_000;
/// Headers searched for a request id when --request-id-headers is absent.
const REQUEST_ID_HEADERS: [HeaderName; 4] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("x-correlation-id"),
    HeaderName::from_static("x-trace-id"),
    HeaderName::from_static("request-id"),
];

/// vllm-router has one flag for pairs of vLLM workers, here it is two.
fn spelled_out(argv: &[String]) -> Vec<String> {
    let spelled = |arg: &String| match arg.as_str() {
        "--vllm-pd-disaggregation" => ["--pd-disaggregation", "--pd-protocol", "vllm"]
            .map(str::to_owned)
            .to_vec(),
        _ => vec![arg.clone()],
    };
    argv.iter().flat_map(spelled).collect()
}

/// The flags under Routing, and the one that says how old a report may be, with the values they
/// have. All of them take a value.
fn decisive_flags(matches: &clap::ArgMatches) -> Vec<String> {
    let command = RouterConfig::command();
    let is_decisive = |arg: &&clap::Arg| {
        arg.get_help_heading() == Some("Routing")
            || arg.get_long() == Some("health-check-interval-secs")
    };
    let mut flags = Vec::new();
    for arg in command.get_arguments().filter(is_decisive) {
        let Some(long) = arg.get_long() else { continue };
        for value in matches.get_raw(arg.get_id().as_str()).into_iter().flatten() {
            flags.extend([format!("--{long}"), value.to_string_lossy().into_owned()]);
        }
    }
    flags
}

impl RouterConfig {
    /// The clap command, each flag with its environment variable, and the flags for help.
    pub fn command_with_env() -> clap::Command {
        let command = RouterConfig::command().mut_args(|arg| {
            let Some(long) = arg.get_long() else {
                return arg;
            };
            let name = if long == "api-key" {
                "BATON_API_KEY".to_owned() // the engine's name for it
            } else {
                format!("{ENV_PREFIX}{}", long.to_uppercase().replace('-', "_"))
            };
            // Leaked once per process and flag: clap wants names that live as long as the command.
            arg.env(&*name.leak()).hide_env(true)
        });
        docs::with_help_flags(command)
    }

    /// Read `argv` (program name first) and the environment.
    pub fn parse(argv: &[String]) -> Result<RouterConfig, ParseStop> {
        let argv = spelled_out(argv);
        if argv.iter().any(|arg| arg == "--help-all") {
            let text = docs::full_help(RouterConfig::command_with_env());
            return Err(ParseStop::Help(text));
        }
        let mut errors = unsupported_flags::validate(argv.get(1..).unwrap_or_default());
        if !errors.is_empty() {
            return Err(ParseStop::Bad(errors.join("\n")));
        }
        let mut config = RouterConfig::command_with_env()
            .try_get_matches_from(&argv)
            .and_then(|matches| {
                let mut config = RouterConfig::from_arg_matches(&matches)?;
                config.routing.resolved = decisive_flags(&matches);
                Ok(config)
            })
            .map_err(|err| {
                if err.use_stderr() {
                    ParseStop::Bad(err.to_string().trim_end().to_owned())
                } else {
                    ParseStop::Help(err.to_string())
                }
            })?;
        if config.listen.request_id_headers.is_empty() {
            config.listen.request_id_headers = REQUEST_ID_HEADERS.to_vec();
        }
        config.check(&mut errors);
        if errors.is_empty() {
            Ok(config)
        } else {
            Err(ParseStop::Bad(errors.join("\n")))
        }
    }

    /// Every rule between fields and ranges; each message names the flag, the value and what to do.
    fn check(&self, errors: &mut Vec<String>) {
        for (field, value, range) in self.ranges() {
            if !range.contains(&value) {
                let flag = field.replace('_', "-");
                let (least, most) = range.into_inner();
                let most = if most == f64::MAX {
                    String::new()
                } else {
                    format!(", at most {most}")
                };
                // At f32's precision, which some flags have.
                let fraction = (value as f32).to_string();
                let given = if value.fract() == 0.0 {
                    value.to_string()
                } else {
                    fraction
                };
                errors.push(format!("--{flag} {given}: give at least {least}{most}"));
            }
        }
        let path = &self.health.health_check_endpoint;
        if !path.starts_with('/') {
            errors.push(format!(
                "--health-check-endpoint {path}: give a path that starts with '/'"
            ));
        }
        for origin in &self.listen.cors_allowed_origins {
            if http::HeaderValue::try_from(origin.as_str()).is_err() {
                errors.push(format!("--cors-allowed-origins {origin}: not an origin"));
            }
        }
        for name in &self.listen.allowed_hosts {
            if name.is_empty() || name.contains(['/', ':', '[']) {
                errors.push(format!(
                    "--allowed-hosts {name}: give names without scheme and port; addresses are \
                     allowed"
                ));
            }
        }
        errors.extend(self.between_groups().map(str::to_owned));
        self.discovery
            .validate(self.workers.pd_disaggregation, errors);
        self.workers.validate(errors);
        errors.extend(self.observe.validate());
        self.tls.validate(errors);
        self.limits.validate(self.forecasts(), errors);
        self.tokens.validate(errors);
        errors.extend(self.kv_events.validate());
        errors.extend(keys::validate(&self.listen.control_plane_api_keys));
        errors.extend(self.worker_specs().err().unwrap_or_default());
    }

    /// Numbers with bounds that their types do not have. `f64::MAX`: none but being finite.
    fn ranges(&self) -> [(&'static str, f64, RangeInclusive<f64>); 22] {
        const NATURAL: RangeInclusive<f64> = 0.0..=f64::MAX;
        const POSITIVE: RangeInclusive<f64> = 1.0..=f64::MAX;
        /// Each field's name, which is its flag's too, its value and its bounds.
        macro_rules! rows {
            ($($group:ident.$field:ident: $range:expr,)*) => {
                [$((stringify!($field), self.$group.$field as f64, $range)),*]
            };
        }
        rows! {
            routing.cache_threshold: 0.0..=1.0,
            routing.balance_rel_threshold: POSITIVE,
            routing.default_capacity_tokens: POSITIVE,
            routing.kv_pull_ms_per_kilotoken: NATURAL,
            routing.kv_pull_crossing_ms_per_kilotoken: self.routing.kv_pull_ms_per_kilotoken..=f64::MAX,
            routing.max_index_bytes: MIN_INDEX_BYTES..=f64::MAX,
            routing.eviction_interval_secs: POSITIVE,
            routing.max_idle_secs: POSITIVE,
            observe.decision_log_max_bytes: MIN_LOG_BYTES..=f64::MAX,
            observe.decision_log_files: 1.0..=1000.0,
            retry.retry_backoff_multiplier: POSITIVE,
            retry.retry_jitter_factor: 0.0..=1.0,
            retry.retry_budget_ratio: NATURAL,
            retry.retry_max_retries: POSITIVE,
            retry.failover_concurrency: POSITIVE,
            breaker.cb_failure_threshold: POSITIVE,
            breaker.cb_success_threshold: POSITIVE,
            health.health_failure_threshold: POSITIVE,
            health.health_success_threshold: POSITIVE,
            health.health_check_timeout_secs: POSITIVE,
            health.health_check_interval_secs: POSITIVE,
            workers.worker_startup_check_interval: POSITIVE,
        }
    }

    /// Rules between flags of different groups.
    fn between_groups(&self) -> impl Iterator<Item = &'static str> {
        let workers = &self.workers;
        let has_pairs = !workers.prefill.is_empty() || !workers.decode.is_empty();
        let rules = [
            (
                !workers.pd_disaggregation && has_pairs,
                "--prefill and --decode need --pd-disaggregation",
            ),
            (
                workers.pd_disaggregation && !workers.worker_urls.is_empty(),
                "--worker-urls lists regular workers, --pd-disaggregation has none; use --prefill \
                 and --decode",
            ),
            (
                workers.is_dp_aware() && self.health.disable_health_check,
                "--dp-aware learns the ranks from healthy workers; drop --disable-health-check",
            ),
            (
                self.discovery.is_tls() && self.tls.ca_cert_paths.is_empty(),
                "--service-discovery-scheme https needs --ca-cert-paths, the certificates that \
                 pods' must descend from",
            ),
        ];
        rules
            .into_iter()
            .filter(|(is_broken, _)| *is_broken)
            .map(|(_, text)| text)
    }

    pub fn has_static_workers(&self) -> bool {
        let flags = &self.workers;
        [&flags.worker_urls, &flags.prefill, &flags.decode]
            .iter()
            .any(|urls| !urls.is_empty())
    }

    /// The workers named by flags.
    pub fn worker_specs(&self) -> Result<Vec<WorkerSpec>, Vec<String>> {
        let mut specs = Vec::new();
        let mut errors = Vec::new();
        let mut collect = |made: Result<WorkerSpec, String>| match made {
            Ok(spec) if specs.iter().any(|s: &WorkerSpec| s.url == spec.url) => {
                errors.push(format!("worker {} is given twice; give it once", spec.url));
            }
            Ok(spec) => specs.push(spec),
            Err(text) => errors.push(text),
        };
        for url in &self.workers.worker_urls {
            collect(WorkerSpec::new(url, Role::Regular, None));
        }
        let mut prefill = self.workers.prefill.iter().peekable();
        while let Some(url) = prefill.next() {
            // An occurrence is URL or URL PORT; clap hands over the flat list, and no URL looks
            // like a port.
            let port = prefill.next_if(|next| workers::is_port_or_none(next));
            collect(WorkerSpec::new(
                url,
                Role::Prefill,
                port.map(String::as_str),
            ));
        }
        for url in &self.workers.decode {
            collect(WorkerSpec::new(url, Role::Decode, None));
        }
        if errors.is_empty() {
            Ok(specs)
        } else {
            Err(errors)
        }
    }

    pub fn policy_params(&self) -> PolicyParams {
        let given = &self.routing;
        let &RoutingFlags {
            assignment_mode,
            max_idle_secs,
            ..
        } = given;
        let probe_pause_ms = self.health.health_check_interval_secs.saturating_mul(1000);
        PolicyParams {
            cache_aware: CacheAwareParams {
                cache_threshold: given.cache_threshold,
                balance_abs_threshold: given.balance_abs_threshold,
                balance_rel_threshold: given.balance_rel_threshold,
                max_tree_size: given.max_tree_size,
                max_bytes: given.max_index_bytes,
                miss: given.cache_miss,
            },
            manual: ManualParams {
                assignment_mode,
                max_idle_secs,
                ..ManualParams::default()
            },
            cost: CostParams {
                max_bytes: given.max_index_bytes,
                // Without traffic, workers are asked what they have to do with each probe.
                report_interval_ms: CostParams::default().report_interval_ms.max(probe_pause_ms),
                default_capacity_tokens: given.default_capacity_tokens,
                // Shared memory carries 10 GB/s where the network carries 3.
                pull_near_ms: given.kv_pull_ms_per_kilotoken * 13.0 / 43.0 / 1e3,
                pull_far_ms: given.kv_pull_ms_per_kilotoken / 1e3,
                pull_crossing_ms: given.kv_pull_crossing_ms_per_kilotoken / 1e3,
                ..CostParams::default()
            },
        }
    }

    pub fn policy_for(&self, role: Role) -> PolicyKind {
        match role {
            Role::Regular => self.routing.policy,
            Role::Prefill => self.routing.prefill_policy.unwrap_or(self.routing.policy),
            Role::Decode => self.routing.decode_policy.unwrap_or(self.routing.policy),
        }
    }

    /// True if the policy of those who compute prompts predicts when their first token comes.
    fn forecasts(&self) -> bool {
        self.policy_for(self.workers.serving_roles()[0]) == PolicyKind::Cost
    }

    pub fn retry(&self) -> RetryConfig {
        RetryConfig {
            max_attempts: if self.retry.disable_retries {
                1
            } else {
                self.retry.retry_max_retries
            },
            initial_backoff_ms: self.retry.retry_initial_backoff_ms,
            max_backoff_ms: self.retry.retry_max_backoff_ms,
            multiplier: self.retry.retry_backoff_multiplier,
            jitter: self.retry.retry_jitter_factor,
        }
    }

    pub fn retry_budget(&self) -> RetryBudget {
        let ratio = self.retry.retry_budget_ratio;
        let floor = self.retry.retry_budget_floor;
        RetryBudget::new(ratio, floor, RETRY_WINDOW_MS)
    }

    /// `None` when breakers are off.
    pub fn breaker(&self) -> Option<BreakerConfig> {
        (!self.breaker.disable_circuit_breaker).then(|| BreakerConfig {
            failure_threshold: self.breaker.cb_failure_threshold,
            success_threshold: self.breaker.cb_success_threshold,
            timeout_ms: self.breaker.cb_timeout_duration_secs * 1000,
            window_ms: self.breaker.cb_window_duration_secs * 1000,
        })
    }

    /// `None`: requests without an answer ask for no probe.
    pub fn silent_request_probe(&self) -> Option<Duration> {
        let secs = self.health.silent_request_probe_secs;
        (secs > 0).then(|| Duration::from_secs(secs))
    }

    pub fn request_timeout(&self) -> Duration {
        Duration::from_secs(self.limits.request_timeout_secs)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
