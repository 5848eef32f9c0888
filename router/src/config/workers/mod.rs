//! Flags that name workers and their roles.

/// Flags of prefill and decode pairs.
mod disaggregation;
/// Worker URLs and their roles.
mod worker_url;

pub use self::disaggregation::{PairFlags, PdProtocol};
pub(super) use self::worker_url::is_port_or_none;
pub use self::worker_url::{BootstrapPort, WorkerSpec, WorkerUrl};
use clap::Args;
use router_core::Role;

/// Most DP ranks of one worker that are believed.
pub const MAX_DP_SIZE: u32 = 1024;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Workers")]
pub struct WorkerFlags {
    /// Regular workers (prefill and decode in one process)
    #[arg(long, value_name = "URL", num_args = 0.., value_delimiter = ',')]
    pub worker_urls: Vec<String>,
    /// Route every request to a prefill and a decode worker
    #[arg(long)]
    pub pd_disaggregation: bool,
    /// Prefill worker and its bootstrap port (or 'none'; default: the worker's report);
    /// repeatable
    #[arg(long, value_names = ["URL", "PORT"], num_args = 1..=2)]
    pub prefill: Vec<String>,
    /// Decode worker; repeatable
    #[arg(long, value_name = "URL", num_args = 1..)]
    pub decode: Vec<String>,
    /// Treat each data-parallel rank of a worker as a candidate of its own
    #[arg(long)]
    pub dp_aware: bool,
    /// Ranks of each worker, for workers that do not report them (vLLM); more than 1 turns
    /// --dp-aware on
    #[arg(long, value_name = "RANKS")]
    pub intra_node_data_parallel_size: Option<u32>,
    /// The same for prefill workers alone
    #[arg(long, value_name = "RANKS")]
    pub prefill_data_parallel_size: Option<u32>,
    /// The same for decode workers alone
    #[arg(long, value_name = "RANKS")]
    pub decode_data_parallel_size: Option<u32>,
    /// A worker not healthy this long after its registration is reported as an error (and still
    /// probed) [s]
    #[arg(long, default_value_t = 1800, value_name = "SECS")]
    pub worker_startup_timeout_secs: u64,
    /// Longest pause between two probes of a starting worker; the first pauses are 0.1 s and grow
    /// (SGLang's router: 30; shorter here because a probe is cheap and a worker that is ready but
    /// unknown is not) [s]
    #[arg(long, default_value_t = 1, value_name = "SECS")]
    pub worker_startup_check_interval: u64,
}

impl WorkerFlags {
    /// Roles without which nothing can be answered.
    pub fn serving_roles(&self) -> &'static [Role] {
        if self.pd_disaggregation {
            &[Role::Prefill, Role::Decode]
        } else {
            &[Role::Regular]
        }
    }

    /// The ranks that flags say each worker of this role has.
    pub fn dp_size(&self, role: Role) -> Option<u32> {
        let of_role = match role {
            Role::Regular => None,
            Role::Prefill => self.prefill_data_parallel_size,
            Role::Decode => self.decode_data_parallel_size,
        };
        of_role.or(self.intra_node_data_parallel_size)
    }

    pub fn is_dp_aware(&self) -> bool {
        let given = Role::ALL.map(|role| self.dp_size(role));
        self.dp_aware || given.into_iter().flatten().any(|ranks| ranks > 1)
    }

    pub fn validate(&self, errors: &mut Vec<String>) {
        for (flag, given, needs_pd) in [
            ("intra-node", self.intra_node_data_parallel_size, false),
            ("prefill", self.prefill_data_parallel_size, true),
            ("decode", self.decode_data_parallel_size, true),
        ] {
            let Some(ranks) = given else { continue };
            if !(1..=MAX_DP_SIZE).contains(&ranks) {
                errors.push(format!(
                    "--{flag}-data-parallel-size {ranks}: give a number from 1 to {MAX_DP_SIZE}"
                ));
            }
            if needs_pd && !self.pd_disaggregation {
                errors.push(format!(
                    "--{flag}-data-parallel-size {ranks}: needs --pd-disaggregation; use \
                     --intra-node-data-parallel-size"
                ));
            }
        }
    }
}
