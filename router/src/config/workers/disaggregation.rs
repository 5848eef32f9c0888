//! How a pair's request is sent.

use clap::{Args, ValueEnum};
use router_core::LocalPrefillRule;

/// Protocol by which prefill and decode workers find each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PdProtocol {
    /// vLLM's for workers that answer GET /version and have no server info, else SGLang's.
    Auto,
    /// Both at once, with bootstrap fields.
    Sglang,
    /// Prefill, then decode, with kv_transfer_params.
    Vllm,
}

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Pairs")]
pub struct PairFlags {
    /// Prefill and decode at once with bootstrap fields (sglang: also Baton's), or one after the
    /// other with kv_transfer_params (vllm; --vllm-pd-disaggregation is --pd-disaggregation with
    /// this)
    #[arg(long, value_enum, default_value_t = PdProtocol::Auto, value_name = "PROTOCOL")]
    pub pd_protocol: PdProtocol,
    /// Prompts of which a decode worker would compute at most this much are not sent to a prefill
    /// worker; 0: all are [tokens]
    #[arg(long, default_value_t = 0, value_name = "TOKENS")]
    pub local_prefill_max_tokens: u32,
    /// Answer 503 while no prefill worker is ready, rather than let decode workers compute prompts
    #[arg(long)]
    pub disable_local_prefill: bool,
}

impl PairFlags {
    pub fn local_rule(&self) -> LocalPrefillRule {
        let max_tokens = if self.disable_local_prefill {
            0
        } else {
            self.local_prefill_max_tokens
        };
        LocalPrefillRule {
            max_tokens,
            when_no_prefill: !self.disable_local_prefill,
        }
    }
}
