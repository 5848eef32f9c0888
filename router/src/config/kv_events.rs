//! Flags of the workers' KV events.

use std::str::FromStr;

use clap::{Args, ValueEnum};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvEventsMode {
    /// Read what workers announce, if prompts are tokenized here (--model-path or
    /// --tokenizer-path).
    Auto,
    /// Read it in any case: without a tokenizer only prompts given as token ids are matched with
    /// it.
    On,
    Off,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "KV events")]
pub struct KvEventFlags {
    /// cost: follow the KV events of workers: auto (if there is a tokenizer), on (prompts given as
    /// token ids need none), off
    #[arg(long, default_value_t = KvEventsMode::Auto, value_enum, hide_possible_values = true, value_name = "MODE")]
    pub kv_events: KvEventsMode,
    /// Endpoint of KV events for workers that do not report one (vLLM's --kv-events-config):
    /// 'tcp://{host}:5557', with the worker's host; DP rank r adds r to the port
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_endpoint: Option<KvEventEndpoint>,
    /// Endpoint that replays missed KV events; without it, a gap makes a worker's entry doubtful
    /// until its cache is cleared
    #[arg(long, value_name = "ENDPOINT")]
    pub kv_events_replay_endpoint: Option<KvEventEndpoint>,
}

impl KvEventFlags {
    pub fn validate(&self) -> Option<String> {
        let is_alone =
            self.kv_events_replay_endpoint.is_some() && self.kv_events_endpoint.is_none();
        is_alone.then(|| "--kv-events-replay-endpoint needs --kv-events-endpoint".to_owned())
    }
}

/// `tcp://HOST:PORT`, HOST `*` or `{host}` for the worker's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventEndpoint {
    /// `None`: the worker's.
    host: Option<String>,
    port: u16,
}

impl KvEventEndpoint {
    /// host:port of a DP rank; `None`: the port is beyond 65535.
    pub fn address(&self, worker_host: &str, rank: u32) -> Option<String> {
        let port = u16::try_from(u32::from(self.port).checked_add(rank)?).ok()?;
        Some(format!(
            "{}:{port}",
            self.host.as_deref().unwrap_or(worker_host)
        ))
    }
}

impl FromStr for KvEventEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "'{text}' is no tcp://HOST:PORT; write tcp://{{host}}:5557 for the worker's host \
                 (ipc:// is not read)"
            )
        };
        let (host, port) = text
            .strip_prefix("tcp://")
            .and_then(|rest| rest.rsplit_once(':'))
            .ok_or_else(bad)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(bad)?;
        let host = match host {
            "" => return Err(bad()),
            // What the worker binds to is not where it is reached.
            "*" | "{host}" | "0.0.0.0" | "[::]" => None,
            host if host.contains(['{', '}', '*', '/']) => return Err(bad()),
            host => Some(host.to_owned()),
        };
        Ok(Self { host, port })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::{ParseStop, RouterConfig};

    #[test]
    fn endpoints_name_the_workers_host_and_count_ranks_up() {
        let address =
            |text: &str, rank| text.parse::<KvEventEndpoint>().unwrap().address("w", rank);
        for own in [
            "tcp://{host}:5557",
            "tcp://*:5557",
            "tcp://0.0.0.0:5557",
            "tcp://[::]:5557",
        ] {
            assert_eq!(address(own, 3).as_deref(), Some("w:5560"), "{own}");
        }
        assert_eq!(
            address("tcp://10.0.0.1:65535", 0).as_deref(),
            Some("10.0.0.1:65535")
        );
        assert_eq!(address("tcp://10.0.0.1:65535", 1), None);
        assert_eq!(
            address("tcp://[fe80::1]:9", 0).as_deref(),
            Some("[fe80::1]:9")
        );
        for bad in [
            "tcp://x",
            "ipc://x:1",
            "tcp://:1",
            "tcp://x:0",
            "tcp://x:70000",
            "tcp://{h}:1",
            "x:1",
        ] {
            assert!(bad.parse::<KvEventEndpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn replay_alone_is_a_mistake() {
        let argv = [
            "baton-router",
            "--kv-events-replay-endpoint",
            "tcp://*:5657",
        ]
        .map(str::to_owned);
        assert!(
            matches!(RouterConfig::parse(&argv), Err(ParseStop::Bad(text)) if text.contains("needs --kv-events-endpoint"))
        );
    }
}
