//! Flags of logs, metrics, traces and what is kept of requests.

use clap::Args;
use tracing_subscriber::filter::LevelFilter;

use crate::observability::otlp;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Logs and metrics")]
pub struct Observe {
    /// Least severe log line shown: trace, debug, info, warn (or warning), error (or critical), or a filter like
    /// 'info,baton_router=debug'
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
    /// Write every decision, and all it was made from, to this file as JSON lines; 'baton replay' decides them again
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
    pub otlp_traces_endpoint: otlp::Endpoint,
    /// Print docs/metrics.md and exit
    #[arg(long, hide = true)]
    pub print_metrics: bool,
    /// Print docs/flags.md and exit
    #[arg(long, hide = true)]
    pub print_flags: bool,
}

impl Observe {
    /// What --log-level comes to; SGLang's launcher says 'warning' and 'critical'.
    pub fn log_filter(&self) -> String {
        match self.log_level.as_str() {
            "warning" => "warn".to_owned(),
            "critical" => "error".to_owned(),
            level => level.to_owned(),
        }
    }

    /// A word that is no level would be read as a part of the program to show everything of.
    pub fn complaints(&self) -> Vec<String> {
        let filter = self.log_filter();
        let parts = filter.split(',').map(str::trim);
        let unknown = parts.filter(|part| {
            let is_level = part.parse::<LevelFilter>().is_ok();
            !is_level && !part.contains(['=', '['])
        });
        unknown
            .map(|part| {
                format!("--log-level {part}: give trace, debug, info, warn, error, off, or a filter like 'info,baton_router=debug'")
            })
            .collect()
    }
}
