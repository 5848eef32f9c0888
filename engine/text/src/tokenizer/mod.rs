//! Text to token ids and back.
//!
//! 1. [`TokenizerFiles::read`] reads the files of a directory: tokenizer.json or another file with
//!    a vocabulary, the chat template, the tokens that other files add ([`plan_added_tokens`]);
//! 2. [`HfTokenizer::load`] makes a tokenizer of them;
//! 3. [`TextTokenizer::encode`] turns text into ids, [`TokenDecoder`] ids into text. The router
//!    encodes through a [`PromptEncoder`], which remembers the ids of texts.
//!
//! * `added_tokens`: what the files beside tokenizer.json add to it, as transformers 5 has it;
//! * `cache`, `encoder`: ids of texts and of their segments, remembered;
//! * `decode`: what gives the text of tokens;
//! * `files`: the files of a directory, and their fingerprint;
//! * `four_byte`: tokenizer of simulated engines;
//! * `hf`: a loaded tokenizer.json;
//! * `text_model`: other files than tokenizer.json;
//! * `token_table`: the bytes of every token.

mod added_tokens;
mod cache;
mod decode;
mod encoder;
mod files;
mod four_byte;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub mod golden;
mod hf;
mod text_model;
mod token_table;

use std::sync::Arc;

use crate::template::UserTextGuard;

pub use added_tokens::{AddedTokenPlan, TokenizerSettings, plan_added_tokens};
pub use decode::TokenDecoder;
pub use encoder::{CacheLimits, CacheLookups, LookupCounts, PromptEncoder};
pub use files::{FileReader, OwnToken, TokenizerFiles};
pub use four_byte::FourByteTokenizer;
pub use hf::HfTokenizer;

/// Turns text into token ids and back.
pub trait TextTokenizer: TokenDecoder {
    /// Guards control tokens from the texts of users.
    fn guard(&self) -> &UserTextGuard {
        UserTextGuard::none()
    }

    /// Ids of a text, in which the guard has escaped what users wrote. `Err`: why the tokenizer
    /// fails on it.
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Arc<[u32]>, String>;

    /// All ids are below it. There may be fewer tokens: ids may be left out between them.
    fn vocab_size(&self) -> u32;

    /// A text has at least as many tokens as this goes into its length [characters]. Not where a
    /// tokenizer drops text: an unknown word, or spaces beside an added token with lstrip or
    /// rstrip.
    fn max_chars_per_token(&self) -> usize;

    /// Id of a token by its name in the vocabulary.
    fn id_of(&self, token: &str) -> Option<u32>;

    /// Id of an added token by its text: the text is this token wherever it stands in a prompt.
    fn added_id_of(&self, token: &str) -> Option<u32>;

    /// Name of a token in the vocabulary.
    fn name_of(&self, id: u32) -> Option<String>;

    /// Ids from `first_id` on that have a token, with its name. Ascending.
    fn tokens_from(&self, first_id: u32) -> Vec<(u32, String)>;
}
