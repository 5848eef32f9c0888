//! HTTP APIs that generate text, and how each of them says things.
//!
//! * [`body`]: fields of a request body that routing needs, and the body with other fields in it;
//! * [`prompt_limit`]: the longest prompt that an engine takes, measured in the body's JSON;
//! * [`sse`]: events of a stream, errors among them, and the event that ends it;
//! * [`answer_end`]: how far an answer got, and the usage in its last pieces;
//! * [`resume`]: comments with the tokens of a stream, and the field that asks for its rest;
//! * [`input_logprobs`]: answers to /generate that two workers give together;
//! * [`translate`]: requests of other APIs as chat requests;
//! * [`write`](mod@write): answers as bytes;
//! * [`chat_answer`]: chat answers of other servers as answers of other APIs.
//!
//! An API is a variant of [`Dialect`] with its [`DialectFields`] and a writer of its answers.

pub mod answer_end;
pub mod body;
pub mod chat_answer;
pub mod input_logprobs;
pub mod prompt_limit;
mod response_ids;
pub mod resume;
pub mod sse;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
pub mod translate;
pub mod write;

pub use response_ids::{derived_id, id_spellings, response_id};
use serde::Deserialize;

/// An API that generates text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dialect {
    /// OpenAI's chat completions.
    #[default]
    Chat,
    /// OpenAI's completions.
    Completions,
    /// SGLang's native API.
    Generate,
    /// OpenAI's responses.
    Responses,
    /// Anthropic's messages.
    Messages,
}

/// Differences between the requests of the APIs.
#[derive(Debug)]
pub struct DialectFields {
    pub path: &'static str,
    /// Prefix of the ids of answers, and of request ids that the router draws.
    pub id_prefix: &'static str,
    /// True if an engine puts the prefix in front of a request's id to make its response's id.
    pub prefixes_response_ids: bool,
    /// Fields that may hold the prompt. Of several that are present, the first one counts.
    pub prompt: &'static [&'static str],
    pub prompt_kind: PromptKind,
    pub answer_count: AnswerCountPlace,
    /// True if a request names its model.
    pub names_model: bool,
    /// How logprobs of prompts are asked for.
    pub prompt_logprobs: PromptLogprobsForm,
    pub session_key: SessionKeyField,
    /// True if writers see every answer as parts: reasoning, content and calls.
    pub reads_parts: bool,
    /// True if events, errors among them, have names.
    pub has_named_events: bool,
    /// True if errors have the form of Anthropic's API.
    pub has_anthropic_errors: bool,
    /// Members of a vLLM request for one token and no stream; `None`: its requests have no
    /// `kv_transfer_params`, so that no pair can meet by them (0.33).
    pub vllm_prefill: Option<&'static str>,
}

/// Members of [`DialectFields::vllm_prefill`] of OpenAI's older APIs.
const OPENAI_PREFILL: &str =
    "\"stream\":false,\"max_tokens\":1,\"max_completion_tokens\":1,\"min_tokens\":1";

/// Form of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptKind {
    /// A conversation, which a chat template makes a text of.
    Messages,
    /// A text or the token ids of one, or a list of either.
    Texts,
}

/// Ways to ask for logprobs of prompts, and forms of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptLogprobsForm {
    /// No field asks for them.
    Nothing,
    /// `prompt_logprobs`: an object for each token.
    Objects,
    /// The same, and `echo` with `logprobs`: columns in front of those of the answer.
    Columns,
    /// `logprob_start_len`: triples beside those of the answer.
    Triples,
}

/// Field that names the conversation, agent or user of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionKeyField {
    PromptCacheKey,
    /// `user_id` in the object `metadata`.
    MetadataUserId,
    Nowhere,
}

/// Place of the field `n`, the answers per prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerCountPlace {
    Body,
    /// In the object `sampling_params`.
    SamplingParams,
    /// Every request has one answer.
    Nowhere,
}

const CHAT: DialectFields = DialectFields {
    path: "/v1/chat/completions",
    id_prefix: "chatcmpl-",
    prefixes_response_ids: true,
    prompt: &["messages"],
    prompt_kind: PromptKind::Messages,
    answer_count: AnswerCountPlace::Body,
    names_model: true,
    prompt_logprobs: PromptLogprobsForm::Objects,
    session_key: SessionKeyField::PromptCacheKey,
    reads_parts: false,
    has_named_events: false,
    has_anthropic_errors: false,
    vllm_prefill: Some(OPENAI_PREFILL),
};

const COMPLETIONS: DialectFields = DialectFields {
    path: "/v1/completions",
    id_prefix: "cmpl-",
    prefixes_response_ids: true,
    prompt: &["prompt"],
    prompt_kind: PromptKind::Texts,
    answer_count: AnswerCountPlace::Body,
    names_model: true,
    prompt_logprobs: PromptLogprobsForm::Columns,
    session_key: SessionKeyField::PromptCacheKey,
    reads_parts: false,
    has_named_events: false,
    has_anthropic_errors: false,
    vllm_prefill: Some(OPENAI_PREFILL),
};

const GENERATE: DialectFields = DialectFields {
    path: "/generate",
    id_prefix: "gnt-",
    prefixes_response_ids: false,
    prompt: &["text", "input_ids"],
    prompt_kind: PromptKind::Texts,
    answer_count: AnswerCountPlace::SamplingParams,
    names_model: false,
    prompt_logprobs: PromptLogprobsForm::Triples,
    session_key: SessionKeyField::Nowhere,
    reads_parts: false,
    has_named_events: false,
    has_anthropic_errors: false,
    vllm_prefill: Some(OPENAI_PREFILL),
};

const RESPONSES: DialectFields = DialectFields {
    path: "/v1/responses",
    id_prefix: "resp_",
    prefixes_response_ids: true,
    prompt: &["input"],
    prompt_kind: PromptKind::Messages,
    answer_count: AnswerCountPlace::Nowhere,
    names_model: true,
    prompt_logprobs: PromptLogprobsForm::Nothing,
    session_key: SessionKeyField::PromptCacheKey,
    reads_parts: true,
    has_named_events: true,
    has_anthropic_errors: false,
    vllm_prefill: None,
};

const MESSAGES: DialectFields = DialectFields {
    path: "/v1/messages",
    id_prefix: "msg_",
    prefixes_response_ids: true,
    prompt: &["messages"],
    prompt_kind: PromptKind::Messages,
    answer_count: AnswerCountPlace::Nowhere,
    names_model: true,
    prompt_logprobs: PromptLogprobsForm::Nothing,
    session_key: SessionKeyField::MetadataUserId,
    reads_parts: true,
    has_named_events: true,
    has_anthropic_errors: true,
    vllm_prefill: Some("\"stream\":false,\"max_tokens\":1"),
};

impl Dialect {
    pub const ALL: [Self; 5] = [
        Self::Chat,
        Self::Completions,
        Self::Generate,
        Self::Responses,
        Self::Messages,
    ];

    pub const fn fields(self) -> &'static DialectFields {
        match self {
            Dialect::Chat => &CHAT,
            Dialect::Completions => &COMPLETIONS,
            Dialect::Generate => &GENERATE,
            Dialect::Responses => &RESPONSES,
            Dialect::Messages => &MESSAGES,
        }
    }

    /// API of a path that takes generation requests.
    #[inline]
    pub fn of_path(path: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dialect| dialect.path() == path)
    }

    /// True for the paths of Anthropic's API, those that this server does not have included:
    /// `/v1/messages` and all below it.
    pub fn is_anthropic_path(path: &str) -> bool {
        let below = path.strip_prefix(Self::Messages.path());
        below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    #[inline]
    pub const fn path(self) -> &'static str {
        self.fields().path
    }

    #[inline]
    pub const fn id_prefix(self) -> &'static str {
        self.fields().id_prefix
    }

    /// Returns `id` without the prefix of an API: engines answer `x-request-id: ID` with the body's
    /// `"id": "chatcmpl-ID"`, and both name the same request.
    pub fn without_prefix(id: &str) -> &str {
        Self::ALL
            .into_iter()
            .find_map(|dialect| id.strip_prefix(dialect.id_prefix()))
            .unwrap_or(id)
    }
}

#[cfg(test)]
mod path_tests {
    use super::*;

    #[test]
    fn paths_and_prefixes_lead_to_one_dialect() {
        for dialect in Dialect::ALL {
            assert_eq!(Dialect::of_path(dialect.path()), Some(dialect));
            let id = format!("{}abc", dialect.id_prefix());
            assert_eq!(Dialect::without_prefix(&id), "abc");
        }
        assert_eq!(Dialect::of_path("/v1/embeddings"), None);
        for (path, is_anthropic) in [
            ("/v1/messages", true),
            ("/v1/messages/", true),
            ("/v1/messages/count_tokens", true),
            ("/v1/messages/batches/x/results", true),
            ("/v1/messages2", false),
            ("/v1/models", false),
        ] {
            assert_eq!(Dialect::is_anthropic_path(path), is_anthropic, "{path}");
        }
        assert_eq!(Dialect::without_prefix("abc"), "abc");
    }
}
