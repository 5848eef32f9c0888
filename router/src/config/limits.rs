//! Limits of clients: sizes, durations and counts.

use std::net::IpAddr;
use std::str::FromStr;
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
    /// Most connections of clients at once; a new one closes the one that has waited longest
    /// without a request, or waits in the kernel's queue while all have requests
    #[arg(long, default_value_t = 65_536, value_name = "N")]
    pub max_connections: usize,
    /// Most connections of one client address (of one /64 network with IPv6), by which it closes
    /// its own; more with requests are closed at once; 0: no limit [default: a quarter of
    /// --max-connections]
    #[arg(long, value_name = "N")]
    pub max_connections_per_address: Option<usize>,
    /// Addresses, or blocks like 10.0.0.0/8, of load balancers and gateways that connect for many
    /// clients: --max-connections-per-address is not for them
    #[arg(long, value_name = "ADDRESS", num_args = 1.., value_delimiter = ',')]
    pub trusted_proxies: Vec<AddressBlock>,
    /// Longest time from the first byte of a request's head to its last [s]
    #[arg(long, default_value_t = 10, value_name = "SECS")]
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
                "--rate-limit-tokens-per-second needs --max-concurrent-requests, the size of its \
                 bucket"
                    .to_owned(),
            );
        }
        if self.max_ttft_ms.is_some() && !forecasts {
            errors.push(
                "--max-ttft-ms needs predictions, which only the policy cost makes; use it for \
                 prefill (or regular) workers"
                    .to_owned(),
            );
        }
    }

    /// `None`: an address may have all connections.
    pub fn connections_per_address(&self) -> Option<usize> {
        match self.max_connections_per_address {
            Some(0) => None,
            Some(given) => Some(given),
            None => Some((self.max_connections / 4).max(1)),
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

/// The addresses that begin with the same bits: `10.0.0.0/8`, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressBlock {
    first: IpAddr,
    prefix_bits: u32,
}

impl AddressBlock {
    /// An IPv4 address is in an IPv4 block in either of its forms.
    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        let differing = left_aligned(self.first) ^ left_aligned(address);
        let is_same_family = self.first.is_ipv4() == address.is_ipv4();
        is_same_family && differing.leading_zeros() >= self.prefix_bits
    }
}

/// The bits of an address, the first one highest.
fn left_aligned(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()) << 96,
        IpAddr::V6(address) => address.to_bits(),
    }
}

impl FromStr for AddressBlock {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "give an address, or a block like 10.0.0.0/8";
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let first: IpAddr = address.parse().map_err(|_| FORM.to_owned())?;
        let width = if first.is_ipv4() { 32 } else { 128 };
        let prefix_bits = match prefix {
            None => width,
            Some(prefix) => prefix.parse().map_err(|_| FORM.to_owned())?,
        };
        if prefix_bits > width {
            return Err(format!(
                "/{prefix_bits}: an address has {width} bits; {FORM}"
            ));
        }
        let other_bits = left_aligned(first).checked_shl(prefix_bits);
        // 10.0.0.1/8 is a mistake more often than another name of 10.0.0.0/8.
        if other_bits.unwrap_or_default() != 0 {
            return Err(format!(
                "bits are set behind the first {prefix_bits}; {FORM}"
            ));
        }
        Ok(Self { first, prefix_bits })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn block_holds_addresses_with_its_first_bits() {
        let holds = |block: &str, address: &str| {
            let block: AddressBlock = block.parse().unwrap();
            block.contains(address.parse().unwrap())
        };
        for (block, address) in [
            ("10.0.0.0/8", "10.255.0.1"),
            ("10.0.0.0/8", "::ffff:10.1.1.1"),
            ("10.1.1.1", "10.1.1.1"),
            ("0.0.0.0/0", "192.0.2.1"),
            ("fd00::/8", "fdff::1"),
            ("::1", "::1"),
        ] {
            assert!(holds(block, address), "{block} {address}");
        }
        for (block, address) in [
            ("10.0.0.0/8", "11.0.0.1"),
            ("10.1.1.1", "10.1.1.0"),
            ("0.0.0.0/0", "::1"),
            ("::/0", "10.0.0.1"),
            ("fd00::/8", "fe00::1"),
        ] {
            assert!(!holds(block, address), "{block} {address}");
        }
        for wrong in [
            "",
            "router",
            "10.0.0.0/33",
            "10.0.0.1/8",
            "10.0.0.0/x",
            "::1/129",
        ] {
            assert!(wrong.parse::<AddressBlock>().is_err(), "{wrong}");
        }
    }
}
