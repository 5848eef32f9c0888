//! How an answer is to be given, as the front states it (`AnswerSpec` of
//! engine/baton/server/response/answer_spec.py, as msgpack).

use serde::{Deserialize, Deserializer};

use crate::dialect::Dialect;
use crate::dialect::translate::RequestFacts;
use crate::dialect::write::ReasoningNames;

/// Answer to a request: the choices of all its prompts.
#[derive(Debug, Deserialize)]
pub struct AnswerSpec {
    /// API in which it is written.
    pub dialect: Dialect,
    /// The client's id of the request, if it states one: that of the response.
    pub rid: Option<String>,
    /// Id of the HTTP request.
    pub request_id: String,
    pub model: String,
    /// Unix seconds.
    pub created: u64,
    /// On the clock of the batches [seconds].
    pub arrived: f64,
    pub is_stream: bool,
    pub includes_usage: bool,
    pub has_continuous_usage: bool,
    pub returns_token_ids: bool,
    /// Alternatives per position; -1: no logprobs.
    pub logprobs: i32,
    /// Ids whose logprobs stand beside the alternatives, or in their place.
    #[serde(default)]
    pub logprob_token_ids: Vec<u32>,
    /// Logprobs name their tokens by id.
    #[serde(default)]
    pub names_tokens_by_id: bool,
    /// Logprobs of the prompts; `None`: the answer has none.
    #[serde(default)]
    pub prompt_logprobs: Option<PromptLogprobsSpec>,
    /// The answer has the ids of its prompts.
    #[serde(default)]
    pub returns_prompt_ids: bool,
    pub is_batch: bool,
    pub stops: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    pub min_tokens: u32,
    /// A grammar counts the bytes of the answer's tokens.
    #[serde(default)]
    pub follows_grammar: bool,
    /// The stream reports its tokens in comments, with this seed.
    pub comment_seed: Option<u64>,
    /// The front counts the tokens of each batch, for a rate limit.
    pub is_metered: bool,
    /// Nothing is generated: the answer ends at once, or with the logprobs of its prompts.
    pub is_empty: bool,
    /// Tokens that the client has from another engine.
    pub resumed_ids: Vec<u32>,
    /// How the parts of the answer are read; `None`: it is one text.
    pub reading: Option<ReadingSpec>,
    /// Events in which they came, where events are numbered.
    #[serde(default)]
    pub resumed_events: Option<u64>,
    /// The context ends where the answer's limit is, before the limit that the client set.
    #[serde(default)]
    pub is_limited_by_context: bool,
    /// Facts of a translated request.
    #[serde(default, deserialize_with = "facts_of_json")]
    pub facts: RequestFacts,
    pub choices: Vec<ChoiceSpec>,
}

/// Logprobs of the prompts in an answer.
#[derive(Debug, Clone, Deserialize)]
pub struct PromptLogprobsSpec {
    /// Position of the first token that is listed; it has no logprob.
    pub start: usize,
    /// They are part of the answer's own logprobs: completions with echo, and /generate.
    pub joins_logprobs: bool,
    /// Alternatives per position in `prompt_logprobs`; `None`: the answer has no such member.
    pub objects: Option<usize>,
}

/// How the parts of an answer are read and sent: reasoning, content and tool calls.
#[derive(Debug, Deserialize)]
pub struct ReadingSpec {
    /// JSON: name and parameters of each tool that the answer may call.
    pub tools: String,
    /// A complete call ends the answer with `stop`, not with `tool_calls`: the client chose the tool
    /// by its name.
    #[serde(default)]
    pub is_named_choice: bool,
    /// Tool calls in the conversation before the answer.
    pub calls_before: usize,
    /// A rank looks for the end of the reasoning, behind which the grammar begins.
    #[serde(default)]
    pub is_gated: bool,
    pub parallel_tool_calls: bool,
    /// The answer has its call as OpenAI's older API has it: the request has `functions`.
    #[serde(default)]
    pub is_function_call: bool,
    pub separate_reasoning: bool,
    pub stream_reasoning: bool,
    pub include_reasoning: bool,
    pub reasoning_field: ReasoningNames,
}

/// Choice of an answer: the output of one item on a rank.
#[derive(Debug, Deserialize)]
pub struct ChoiceSpec {
    /// Number by which rows name the item.
    pub handle: u64,
    /// First choice of its prompt: the one that usage counts the prompt by.
    pub counts_prompt: bool,
    /// Length of the client's prompt.
    pub prompt_tokens: u64,
    /// Tokens that the text continues; empty for an answer that is a text of its own.
    pub left_context: Vec<u32>,
    /// End of the prompt, where its reasoning begins or ends; empty for an answer that is one text.
    pub prompt_end: Vec<u32>,
    pub stop_token_ids: Vec<u32>,
    /// Tokens that end the answer's grammar, also before it has its least number of tokens.
    #[serde(default)]
    pub grammar_end_ids: Vec<u32>,
    /// Text of the prompt, in front of the answer.
    pub echo: String,
    /// Ids of the client's prompt, where the answer has them or their logprobs.
    #[serde(default)]
    pub prompt_ids: Vec<u32>,
    /// The choice has logprobs of its prompt. The rank sends them with the prompt's first choice.
    #[serde(default)]
    pub has_prompt_logprobs: bool,
}

/// Facts pass through the front as JSON; an empty text stands for none.
fn facts_of_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<RequestFacts, D::Error> {
    let json = String::deserialize(deserializer)?;
    if json.is_empty() {
        return Ok(RequestFacts::default());
    }
    serde_json::from_str(&json).map_err(serde::de::Error::custom)
}

/// No tools, and the whole text for the client.
impl Default for ReadingSpec {
    fn default() -> Self {
        Self {
            tools: "[]".to_owned(),
            is_named_choice: false,
            calls_before: 0,
            is_gated: false,
            parallel_tool_calls: true,
            is_function_call: false,
            separate_reasoning: true,
            stream_reasoning: true,
            include_reasoning: true,
            reasoning_field: ReasoningNames::default(),
        }
    }
}
