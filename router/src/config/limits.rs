//! Limits: what a client may take, how long it may take it, and how many at once.

use std::time::Duration;

use clap::Args;

/// The least that holds a request line and a few headers; hyper takes no less.
const MIN_HEADER_BYTES: usize = 8 << 10;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Limits")]
pub struct LimitFlags {
    /// Longest request body accepted [bytes]
    #[arg(long, default_value_t = 536_870_912, value_name = "BYTES")]
    pub max_payload_size: usize,
    /// Most memory of all request bodies, and of answers that are read whole, together; beyond it a
    /// request with a body is answered 503 [bytes]
    #[arg(long, default_value_t = 2_147_483_648, value_name = "BYTES")]
    pub max_total_body_bytes: usize,
    /// Longest head of a request accepted; a longer one is answered 431 [bytes]
    #[arg(long, default_value_t = 262_144, value_name = "BYTES")]
    pub max_header_bytes: usize,
    /// Most connections of clients at once; more wait in the kernel's queue
    #[arg(long, default_value_t = 65_536, value_name = "N")]
    pub max_connections: usize,
    /// Longest time from the first byte of a request's head to its last [s]
    #[arg(long, default_value_t = 30, value_name = "SECS")]
    pub header_read_timeout_secs: u64,
    /// Longest time that a client's connection may be idle; longer than that of load balancers in
    /// front (60 s) [s]
    #[arg(long, default_value_t = 90, value_name = "SECS")]
    pub idle_connection_timeout_secs: u64,
    /// Longest time from a request's head to the end of its body [s]
    #[arg(long, default_value_t = 300, value_name = "SECS")]
    pub body_read_timeout_secs: u64,
    /// A client that reads nothing of its answer for this long is disconnected, and its worker
    /// freed [s]
    #[arg(long, default_value_t = 300, value_name = "SECS")]
    pub stream_body_stall_timeout_secs: u64,
    /// Most requests at once on one HTTP/2 connection (h2 over TLS, prior knowledge without); 0
    /// turns HTTP/2 off
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub http2_max_streams: u32,
    /// A worker silent for this long fails the request [s]
    #[arg(long, default_value_t = 1800, value_name = "SECS")]
    pub request_timeout_secs: u64,
    /// Interval of comments in a stream that has not begun, so that proxies keep the connection; 0:
    /// none [s]
    #[arg(long, default_value_t = 15, value_name = "SECS")]
    pub sse_keepalive_secs: u64,
    /// Most generation requests running at once; -1: no limit
    #[arg(long, default_value_t = -1, value_name = "N", allow_negative_numbers = true)]
    pub max_concurrent_requests: i64,
    /// Admit this many requests per second beyond --max-concurrent-requests, which becomes the size
    /// of a token bucket: a request takes a token and returns it when it ends, and this many are
    /// added every second (as in SGLang's router)
    #[arg(long, value_name = "N")]
    pub rate_limit_tokens_per_second: Option<u32>,
    /// Most requests waiting for one of --max-concurrent-requests; more are answered 429
    #[arg(long, default_value_t = 100, value_name = "N")]
    pub queue_size: usize,
    /// Longest wait in that queue [s]
    #[arg(long, default_value_t = 60, value_name = "SECS")]
    pub queue_timeout_secs: u64,
    /// Refuse a request (503, Retry-After) when no worker is predicted to begin its answer within
    /// this time or the deadline the request names itself, and all have work; needs the policy cost
    /// [ms]
    #[arg(long, value_name = "MS")]
    pub max_ttft_ms: Option<u64>,
}

impl LimitFlags {
    /// `forecasts`: the policy predicts first tokens.
    pub fn validate(&self, forecasts: bool, errors: &mut Vec<String>) {
        let rate = self.rate_limit_tokens_per_second;
        let at_least_one = [
            ("--max-payload-size", self.max_payload_size as u64),
            ("--max-connections", self.max_connections as u64),
            ("--header-read-timeout-secs", self.header_read_timeout_secs),
            (
                "--idle-connection-timeout-secs",
                self.idle_connection_timeout_secs,
            ),
            ("--body-read-timeout-secs", self.body_read_timeout_secs),
            (
                "--stream-body-stall-timeout-secs",
                self.stream_body_stall_timeout_secs,
            ),
            ("--request-timeout-secs", self.request_timeout_secs),
            ("--rate-limit-tokens-per-second", rate.unwrap_or(1).into()),
            ("--max-ttft-ms", self.max_ttft_ms.unwrap_or(1)),
        ];
        let zeros = at_least_one.into_iter().filter(|(_, value)| *value == 0);
        errors.extend(zeros.map(|(flag, _)| format!("{flag} 0: must be at least 1")));
        let one = self.max_payload_size;
        let all = self.max_total_body_bytes;
        if all < one {
            errors.push(format!(
                "--max-total-body-bytes {all}: give at least --max-payload-size, which is {one}"
            ));
        }
        let head = self.max_header_bytes;
        if head < MIN_HEADER_BYTES {
            errors.push(format!(
                "--max-header-bytes {head}: give at least {MIN_HEADER_BYTES}"
            ));
        }
        let most = self.max_concurrent_requests;
        if most != -1 && most < 1 {
            errors.push(format!(
                "--max-concurrent-requests {most}: give at least 1, or -1 for no limit"
            ));
        }
        if rate.is_some() && most == -1 {
            errors.push(
                "--rate-limit-tokens-per-second needs --max-concurrent-requests, the size of its bucket"
                    .to_owned(),
            );
        }
        if self.max_ttft_ms.is_some() && !forecasts {
            errors.push(
                "--max-ttft-ms needs predictions, which only the policy cost makes; use it for prefill (or regular) workers"
                    .to_owned(),
            );
        }
    }

    pub fn header_read_timeout(&self) -> Duration {
        Duration::from_secs(self.header_read_timeout_secs)
    }

    pub fn idle_timeout(&self) -> Duration {
        Duration::from_secs(self.idle_connection_timeout_secs)
    }

    pub fn stall_timeout(&self) -> Duration {
        Duration::from_secs(self.stream_body_stall_timeout_secs)
    }
}
