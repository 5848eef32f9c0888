//! Addresses of workers, checked once.

use std::fmt;
use std::num::NonZeroU16;

use router_core::Role;

/// `http://host:port` or `https://host:port` of a worker: no path, no rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerUrl {
    /// Name or address without brackets: what sockets and `bootstrap_host` want.
    pub host: String,
    pub port: u16,
    /// https
    pub is_tls: bool,
}

impl WorkerUrl {
    /// Accepts `http://host:port`, `https://host:port`, `host:port`, with or without a final slash.
    pub fn parse(text: &str) -> Result<Self, String> {
        let bad = |why: &str| format!("worker URL '{text}' {why}; give http://HOST:PORT");
        let (is_tls, default_port, rest) = match text.split_once("://") {
            Some(("http", rest)) => (false, 80, rest),
            Some(("https", rest)) => (true, 443, rest),
            Some(_) => return Err(bad("has an unknown scheme")),
            None => (false, 80, text),
        };
        let authority = rest.strip_suffix('/').unwrap_or(rest);
        if authority.contains(['/', '?', '#']) {
            return Err(bad("has a path"));
        }
        if authority.contains('@') {
            return Err(bad(
                "has an '@'; ranks are found by --dp-aware, never given",
            ));
        }
        let authority: http::uri::Authority =
            authority.parse().map_err(|_| bad("has no valid host"))?;
        let host = authority.host().trim_matches(['[', ']']).to_owned();
        let port = match authority.port_u16() {
            Some(0) => return Err(bad("has port 0")),
            Some(port) => port,
            None if authority.as_str() == authority.host() => default_port,
            None => return Err(bad("has no valid port")),
        };
        if host.is_empty() {
            return Err(bad("has no host"));
        }
        Ok(Self { host, port, is_tls })
    }

    /// `host:port`, with brackets around an IPv6 address: the Host header.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        }
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

/// Where `bootstrap_port` of a prefill worker comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BootstrapPort {
    Port(u16),
    /// JSON null on the wire: the worker was registered with 'none'.
    Null,
    /// The worker reports it in /get_server_info.
    FromWorker,
}

/// A worker as requested, by flag or by POST /workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerSpec {
    pub url: WorkerUrl,
    pub role: Role,
    pub bootstrap: BootstrapPort,
    /// Topology domain (zone, rack) as its source names it.
    pub topology: Option<String>,
}

/// True if a word after `--prefill URL` is its PORT.
pub fn is_port_or_none(word: &str) -> bool {
    word.eq_ignore_ascii_case("none")
        || (!word.is_empty() && word.bytes().all(|b| b.is_ascii_digit()))
}

impl WorkerSpec {
    pub fn new(url: &str, role: Role, port: Option<&str>) -> Result<Self, String> {
        let bootstrap = match port {
            None => BootstrapPort::FromWorker,
            Some(word) if word.eq_ignore_ascii_case("none") => BootstrapPort::Null,
            Some(word) => {
                let port = word.parse::<NonZeroU16>().map_err(|_| {
                    format!("bootstrap port '{word}' of {url}: give 1 to 65535 or none")
                })?;
                BootstrapPort::Port(port.get())
            }
        };
        Ok(Self {
            url: WorkerUrl::parse(url)?,
            role,
            bootstrap,
            topology: None,
        })
    }

    pub fn in_topology(self, topology: Option<String>) -> Self {
        let topology = topology.filter(|name| !name.is_empty());
        Self { topology, ..self }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_normalized() {
        for (given, shown) in [
            ("http://a:1", "http://a:1"),
            ("a:1/", "http://a:1"),
            ("http://10.0.0.1", "http://10.0.0.1:80"),
            ("http://[::1]:30000", "http://[::1]:30000"),
            ("https://a", "https://a:443"),
            ("https://a:1/", "https://a:1"),
        ] {
            assert_eq!(WorkerUrl::parse(given).unwrap().to_string(), shown);
        }
        assert_eq!(WorkerUrl::parse("http://[::1]:30000").unwrap().host, "::1");
    }

    #[test]
    fn paths_ranks_and_nonsense_are_refused() {
        for given in [
            "ftp://a",
            "http://a:1/v1",
            "http://a:1@3",
            "",
            "http://",
            "a:0",
            "a:99999",
            "a b",
        ] {
            assert!(WorkerUrl::parse(given).is_err(), "{given:?} was accepted");
        }
    }
}
