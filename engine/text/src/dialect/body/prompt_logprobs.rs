//! Fields that ask for logprobs of the prompt, and for how long an answer: one worker computes
//! prompt and answer, so that megabytes of logprobs cross no connection between workers.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::dialect::{AnswerCountPlace, DialectFields, PromptLogprobsForm};

/// Logprobs of the prompt that a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptLogprobs {
    /// The answer has at most one token, which comes with the prompt.
    Alone,
    WithAnswer,
}

/// Members that decide it, as the body has them.
#[derive(Debug, Default)]
pub struct PromptLogprobsFields {
    /// /generate.
    pub return_logprob: bool,
    /// /generate: a position from which logprobs are listed.
    has_start: bool,
    /// Completions.
    echo: bool,
    /// Completions: `logprobs` is a number.
    has_logprobs: bool,
    /// `prompt_logprobs`, if it is a number.
    prompt_logprobs: Option<u64>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
}

/// Limits of the answer in `sampling_params` of /generate.
#[derive(Debug, Default, Deserialize)]
struct GenerateLimits {
    max_new_tokens: Option<u64>,
    max_tokens: Option<u64>,
}

impl PromptLogprobsFields {
    pub fn member(&mut self, name: &str, value: &RawValue) {
        let number = || value.get().parse::<u64>().ok();
        match name {
            "return_logprob" => self.return_logprob = value.get() == "true",
            "logprob_start_len" => self.has_start = number().is_some(),
            "echo" => self.echo = value.get() == "true",
            "logprobs" => self.has_logprobs = number().is_some(),
            "prompt_logprobs" => self.prompt_logprobs = number(),
            "max_tokens" => self.max_tokens = number(),
            "max_completion_tokens" => self.max_completion_tokens = number(),
            _ => {}
        }
    }

    /// `None`: the answer has no logprobs of its prompt.
    pub fn read(
        &self,
        dialect: &DialectFields,
        is_stream: bool,
        sampling_params: Option<&RawValue>,
    ) -> Option<PromptLogprobs> {
        // A stream has no `prompt_logprobs`: with it, 0 asks for nothing and more is refused.
        let has_objects = self.prompt_logprobs.is_some() && !is_stream;
        let is_wanted = match dialect.prompt_logprobs {
            PromptLogprobsForm::Nothing => false,
            PromptLogprobsForm::Objects => has_objects,
            PromptLogprobsForm::Columns => has_objects || (self.echo && self.has_logprobs),
            PromptLogprobsForm::Triples => self.return_logprob && self.has_start,
        };
        if !is_wanted {
            return None;
        }
        let limit = if dialect.answer_count == AnswerCountPlace::SamplingParams {
            sampling_params.and_then(limit_of_sampling_params)
        } else {
            self.max_tokens.or(self.max_completion_tokens)
        };
        Some(match limit {
            Some(0 | 1) => PromptLogprobs::Alone,
            _ => PromptLogprobs::WithAnswer,
        })
    }
}

fn limit_of_sampling_params(value: &RawValue) -> Option<u64> {
    let limits: GenerateLimits = serde_json::from_str(value.get()).ok()?;
    limits.max_new_tokens.or(limits.max_tokens)
}
