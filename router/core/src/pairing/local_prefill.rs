//! Local prefill: should a decode worker compute a prompt itself instead of fetching its pages from
//! a prefill worker?
//!
//! A transfer costs a round trip through another node's queue; a few tokens cost the decode worker
//! one step that its running requests hardly notice. A long prompt would hold them up, so it stays
//! here only if there is no other worker.

use serde::Serialize;

/// Facts of a request and its decode worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LocalView {
    /// Length of the prompt, counted or estimated.
    pub prompt_tokens: u32,
    /// Tokens of these that the decode worker is expected to hold.
    pub cached_tokens: u32,
    /// A prefill worker could be chosen.
    pub has_prefill: bool,
    /// The answer has logprobs of its prompt, which one worker computes with the answer.
    pub has_prompt_logprobs: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LocalPrefillRule {
    /// Most tokens to compute on a decode worker while a prefill worker is there; 0: none.
    pub max_tokens: u32,
    /// Without a prefill worker: compute any prompt on a decode worker, rather than refuse it.
    pub when_no_prefill: bool,
}

/// Why it computes the prompt itself. The name is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
#[serde(rename_all = "snake_case")]
pub enum LocalPrefillReason {
    NoPrefill,
    Short,
    PrefixHere,
    PromptLogprobs,
}

impl LocalPrefillRule {
    /// `None`: let a prefill worker do it.
    pub fn decide(&self, view: &LocalView) -> Option<LocalPrefillReason> {
        if view.has_prompt_logprobs {
            return Some(LocalPrefillReason::PromptLogprobs);
        }
        if !view.has_prefill {
            return self
                .when_no_prefill
                .then_some(LocalPrefillReason::NoPrefill);
        }
        let is_few = |tokens| tokens <= self.max_tokens && self.max_tokens > 0;
        if is_few(view.prompt_tokens) {
            return Some(LocalPrefillReason::Short);
        }
        let uncached = view.prompt_tokens.saturating_sub(view.cached_tokens);
        is_few(uncached).then_some(LocalPrefillReason::PrefixHere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tokens_to_compute_stay_and_without_prefill_all_do() {
        let rule = |max_tokens, when_no_prefill| LocalPrefillRule {
            max_tokens,
            when_no_prefill,
        };
        let view = |prompt_tokens, cached_tokens, has_prefill| LocalView {
            prompt_tokens,
            cached_tokens,
            has_prefill,
            has_prompt_logprobs: false,
        };
        let with_logprobs = LocalView {
            has_prompt_logprobs: true,
            ..view(100_000, 0, true)
        };
        for (rule, view, why) in [
            (
                rule(32, true),
                view(32, 0, true),
                Some(LocalPrefillReason::Short),
            ),
            (rule(32, true), view(33, 0, true), None),
            (
                rule(32, true),
                view(1_000, 968, true),
                Some(LocalPrefillReason::PrefixHere),
            ),
            (rule(32, true), view(1_000, 967, true), None),
            // An index may expect more than the prompt has.
            (
                rule(32, true),
                view(100, 4_000, true),
                Some(LocalPrefillReason::PrefixHere),
            ),
            (
                rule(32, true),
                view(100_000, 0, false),
                Some(LocalPrefillReason::NoPrefill),
            ),
            (rule(32, false), view(1, 0, false), None),
            (rule(0, true), view(0, 0, true), None),
            (rule(0, true), view(10, 10, true), None),
            (
                rule(0, true),
                view(10, 10, false),
                Some(LocalPrefillReason::NoPrefill),
            ),
            (
                rule(0, false),
                with_logprobs,
                Some(LocalPrefillReason::PromptLogprobs),
            ),
        ] {
            assert_eq!(rule.decide(&view), why, "{rule:?} {view:?}");
        }
    }
}
