//! Logprobs of the tokens of an answer, and of its prompt.

mod prompt;
mod tokens;

pub use prompt::{PromptForms, PromptRecords, PromptText};
pub use tokens::{
    ColumnRules, TokenLogprobs, TokenNames, place_token, push_chat_entries, push_chat_logprobs,
    push_chosen_triples, push_completion_logprobs, push_triples,
};
