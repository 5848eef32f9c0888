//! Options of an answer: the only definition. The validator of the front fills an [`AnswerSpec`]
//! from the request, and the writers of answers borrow it.
//!
//! `python -m tools.answer_spec` makes the front's structs of this file:
//! engine/baton/server/text/answer_spec.py. A field with `#[serde(default)]` may be left out
//! there.

use serde::{Deserialize, Deserializer};

use super::{ReasoningNames, TokenNames};
use crate::dialect::Dialect;
use crate::dialect::translate::RequestFacts;

/// Answer to a request: the choices of all its prompts.
#[derive(Debug, Default, Deserialize)]
pub struct AnswerSpec {
    /// API in which it is written. It is known once the answer begins, as are the ids, the model's
    /// name, the times and the choices.
    #[serde(default)]
    pub dialect: Dialect,
    /// The client's id of the request, if it states one: that of the response.
    #[serde(default)]
    pub rid: Option<String>,
    /// Id of the HTTP request.
    #[serde(default)]
    pub request_id: String,
    /// Name under which the model is served.
    #[serde(default)]
    pub model: String,
    /// Unix seconds.
    #[serde(default)]
    pub created: u64,
    /// Time at which the request came, on the clock of the batches [seconds].
    #[serde(default)]
    pub arrived: f64,
    #[serde(default)]
    pub stream: bool,
    /// Usage comes in an event of its own at the end.
    #[serde(default)]
    pub include_usage: bool,
    /// Every event has the usage so far.
    #[serde(default)]
    pub continuous_usage_stats: bool,
    /// Token ids stand beside the text.
    #[serde(default)]
    pub return_token_ids: bool,
    /// Ids of the prompt stand beside the answer.
    #[serde(default)]
    pub return_prompt_ids: bool,
    /// Alternatives per position; `None`: no logprobs.
    #[serde(default)]
    pub logprobs: Option<usize>,
    /// Ids whose logprobs stand beside the alternatives, or in their place.
    #[serde(default)]
    pub logprob_token_ids: Vec<u32>,
    /// Names of tokens in logprobs.
    #[serde(default)]
    pub token_names: TokenNames,
    /// Logprobs of the prompts; `None`: the answer has none.
    #[serde(default)]
    pub prompt_logprobs: Option<PromptLogprobsSpec>,
    /// /generate: the request asked for a list.
    #[serde(default)]
    pub is_batch: bool,
    /// Texts that end the answer.
    #[serde(default)]
    pub stops: Vec<String>,
    /// The text that ended the answer is part of it.
    #[serde(default)]
    pub include_stop: bool,
    /// Special tokens have no text.
    pub skip_special_tokens: bool,
    /// Number of tokens before which no stop text ends the answer.
    #[serde(default)]
    pub min_tokens: u32,
    /// A grammar counts the bytes of the answer's tokens.
    #[serde(default)]
    pub follows_grammar: bool,
    /// The stream reports its tokens in comments, with this seed (docs/protocol.md §2).
    #[serde(default)]
    pub comment_seed: Option<u64>,
    /// The front counts the tokens of each batch, for a rate limit.
    #[serde(default)]
    pub is_metered: bool,
    /// Nothing is generated: the answer ends at once, or with the logprobs of its prompts.
    #[serde(default)]
    pub is_empty: bool,
    /// Tokens that the client has from another engine.
    #[serde(default)]
    pub resumed_ids: Vec<u32>,
    /// Events in which they came, where events are numbered.
    #[serde(default)]
    pub resumed_events: Option<u64>,
    /// Reading of the answer's parts; `None`: the answer is one text.
    #[serde(default)]
    pub reading: Option<ReadingSpec>,
    /// The context ends where the answer's limit is, before the limit that the client set.
    #[serde(default)]
    pub is_limited_by_context: bool,
    /// Facts of a translated request: JSON, or empty.
    #[serde(default, deserialize_with = "facts_of_json")]
    pub facts: RequestFacts,
    #[serde(default)]
    pub choices: Vec<ChoiceSpec>,
}

impl AnswerSpec {
    /// Members of a chat answer that hold its reasoning.
    pub fn reasoning_field(&self) -> ReasoningNames {
        let reading = self.reading.as_ref();
        reading.map_or_else(Default::default, |reading| reading.reasoning_field)
    }

    /// Reasoning is sent once it is complete.
    pub fn gathers_reasoning(&self) -> bool {
        self.reading
            .as_ref()
            .is_some_and(|reading| !reading.stream_reasoning)
    }

    /// Chat: the call is `function_call` of the message, as in OpenAI's older API.
    pub fn is_function_call(&self) -> bool {
        self.reading
            .as_ref()
            .is_some_and(|reading| reading.is_function_call)
    }
}

/// Logprobs of the prompts in an answer.
#[derive(Debug, Clone, Deserialize)]
pub struct PromptLogprobsSpec {
    /// Position of the first token that is listed; it has no logprob.
    #[serde(default)]
    pub start: usize,
    /// They are part of the answer's own logprobs: completions with echo, and /generate.
    #[serde(default)]
    pub joins_logprobs: bool,
    /// Alternatives per position in `prompt_logprobs`; `None`: the answer has no such member.
    #[serde(default)]
    pub objects: Option<usize>,
    /// The answer has them once, whatever the number of its choices. Otherwise each choice has
    /// those of its prompt.
    #[serde(default)]
    pub is_once: bool,
}

impl PromptLogprobsSpec {
    /// True if this choice has logprobs of its prompt. The rank sends them with the prompt's first
    /// choice.
    pub fn are_in_choice(&self, choice: &ChoiceSpec) -> bool {
        choice.counts_prompt || !self.is_once
    }
}

/// How the parts of an answer are read and sent: reasoning, content and tool calls.
#[derive(Debug, Deserialize)]
pub struct ReadingSpec {
    /// Name and parameters of each tool that the answer may call: JSON.
    pub tools: String,
    /// A complete call ends the answer with `stop`, not with `tool_calls`: the client chose the
    /// tool by its name.
    #[serde(default)]
    pub is_named_choice: bool,
    /// Tool calls in the conversation before the answer.
    #[serde(default)]
    pub calls_before: usize,
    /// A rank looks for the end of the reasoning, behind which the grammar begins.
    #[serde(default)]
    pub is_gated: bool,
    /// False: the answer ends behind its first call.
    pub parallel_tool_calls: bool,
    /// The answer has its call as OpenAI's older API has it: the request has `functions`.
    #[serde(default)]
    pub is_function_call: bool,
    /// False: reasoning and its markers are content.
    pub separate_reasoning: bool,
    /// False: reasoning is sent when it is complete.
    pub stream_reasoning: bool,
    /// False: reasoning is generated and not sent.
    pub include_reasoning: bool,
    /// Member of chat answers that holds the reasoning.
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
    #[serde(default)]
    pub left_context: Vec<u32>,
    /// End of the prompt, where its reasoning begins or ends; empty for an answer that is one
    /// text.
    #[serde(default)]
    pub prompt_end: Vec<u32>,
    #[serde(default)]
    pub stop_token_ids: Vec<u32>,
    /// Tokens that end the answer's grammar, also before it has its least number of tokens.
    #[serde(default)]
    pub grammar_end_ids: Vec<u32>,
    /// Text of the prompt, in front of the answer.
    #[serde(default)]
    pub echo: String,
    /// Ids of the client's prompt, where the answer has them or their logprobs.
    #[serde(default)]
    pub prompt_ids: Vec<u32>,
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
