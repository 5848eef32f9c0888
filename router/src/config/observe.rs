//! Flags of logs, metrics, traces and kept timelines of requests.

use clap::Args;
use tracing_subscriber::filter::LevelFilter;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs and metrics")]
pub struct ObservabilityFlags {
    /// Least severe log line shown: trace, debug, info, warn (or warning), error (or critical), or
    /// a filter like 'info,baton_router=debug'
    #[arg(long, default_value = "info", value_name = "LEVEL")]
    pub log_level: String,
    /// How log lines look
    #[arg(long, default_value = "text", value_parser = ["text", "json"])]
    pub log_format: String,
    /// Serve /metrics on this port too (it is always on the main port); 0 picks a free one
    #[arg(long, value_name = "PORT")]
    pub prometheus_port: Option<u16>,
    /// Address of that listener [default: --host]
    #[arg(long, value_name = "HOST")]
    pub prometheus_host: Option<String>,
    /// Ended requests that GET /v1/requests/{id} still knows, 16 MiB of them at most; 0: none
    #[arg(long, default_value_t = 4096, value_name = "N")]
    pub request_history: usize,
    /// Write every decision, and all it was made from, to this file as JSON lines; 'baton replay'
    /// decides them again
    #[arg(long, value_name = "PATH")]
    pub decision_log: Option<std::path::PathBuf>,
    /// A decision log of this size becomes PATH.1, and a new file begins [bytes]
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES")]
    pub decision_log_max_bytes: u64,
    /// Files of the decision log kept, the one being written included
    #[arg(long, default_value_t = 4, value_name = "N")]
    pub decision_log_files: u32,
    /// Export a trace of each request: spans for the request, its decisions and its legs
    #[arg(long)]
    pub enable_trace: bool,
    /// Where traces go: HOST:PORT for OTLP/gRPC, http://HOST:PORT[/PATH] for OTLP/HTTP
    #[arg(long, default_value = "localhost:4317", value_name = "ENDPOINT")]
    pub otlp_traces_endpoint: TraceEndpoint,
    /// Print docs/metrics.md and exit
    #[arg(long, hide = true)]
    pub print_metrics: bool,
    /// Print docs/flags.md and exit
    #[arg(long, hide = true)]
    pub print_flags: bool,
    /// Print the flags that shells complete, and exit
    #[arg(long, hide = true)]
    pub print_completion: bool,
}

impl ObservabilityFlags {
    /// Filter that --log-level means; SGLang's launcher says 'warning' and 'critical'.
    pub fn log_filter(&self) -> String {
        match self.log_level.as_str() {
            "warning" => "warn".to_owned(),
            "critical" => "error".to_owned(),
            level => level.to_owned(),
        }
    }

    /// True if log lines are JSON.
    pub fn is_json(&self) -> bool {
        self.log_format == "json"
    }

    /// A word that is no level would be read as a part of the program to show everything of.
    pub fn validate(&self) -> Vec<String> {
        let filter = self.log_filter();
        let is_unknown =
            |part: &&str| part.parse::<LevelFilter>().is_err() && !part.contains(['=', '[']);
        let unknown = filter.split(',').map(str::trim).filter(is_unknown);
        let complaint = |part| {
            format!(
                "--log-level {part}: give trace, debug, info, warn, error, off, or a filter like \
                 'info,baton_router=debug'"
            )
        };
        unknown.map(complaint).collect()
    }
}

/// Where spans go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceEndpoint {
    pub protocol: TraceProtocol,
    pub host: String,
    pub port: u16,
    /// Path of the POST.
    pub path: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TraceProtocol {
    /// host:port, as SGLang's launchers take it.
    Grpc,
    /// http://host:port[/path], protobuf in the body.
    Http,
}

impl std::str::FromStr for TraceEndpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| {
            format!("{why}; give host:port for OTLP/gRPC, or http://host:port for OTLP/HTTP")
        };
        if text.starts_with("https://") {
            return Err("TLS to a collector is not supported; run one beside the router, and let it forward".into());
        }
        let (protocol, rest) = match text.strip_prefix("http://") {
            Some(rest) => (TraceProtocol::Http, rest),
            None => (
                TraceProtocol::Grpc,
                text.strip_prefix("grpc://").unwrap_or(text),
            ),
        };
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = authority.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
        let port = port.parse().map_err(|_| wrong("the port is no number"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(wrong("no host"));
        }
        let path = match (protocol, path) {
            (TraceProtocol::Grpc, "" | "/") => {
                "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            }
            (TraceProtocol::Grpc, _) => return Err(wrong("gRPC takes no path")),
            (TraceProtocol::Http, "" | "/") => "/v1/traces",
            (TraceProtocol::Http, path) => path,
        };
        Ok(Self {
            protocol,
            host: host.to_owned(),
            port,
            path: path.to_owned(),
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_name_their_protocol() {
        let read = |text: &str| text.parse::<TraceEndpoint>();
        let grpc = read("localhost:4317").unwrap();
        assert_eq!(
            (grpc.protocol, grpc.host.as_str(), grpc.port),
            (TraceProtocol::Grpc, "localhost", 4317)
        );
        assert_eq!(read("grpc://localhost:4317").unwrap(), grpc);
        let http = read("http://[::1]:4318").unwrap();
        assert_eq!(
            (http.protocol, http.host.as_str(), http.path.as_str()),
            (TraceProtocol::Http, "::1", "/v1/traces")
        );
        assert_eq!(read("http://c:1/x/y").unwrap().path, "/x/y");
        for (wrong, part) in [
            ("localhost", "no port"),
            ("h:x", "no number"),
            (":4317", "no host"),
            ("h:1/x", "no path"),
            ("https://h:1", "TLS"),
        ] {
            assert!(read(wrong).unwrap_err().contains(part), "{wrong}");
        }
    }
}
