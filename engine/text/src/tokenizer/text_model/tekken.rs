//! `tekken.json` of Mistral: ranks, the pattern and the special tokens, which have the first ids.

use std::collections::HashSet;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

use super::ranks::RankModel;
use super::tokenizer_json::added_token;

pub const BOS_TOKEN: &str = "<s>";
pub const EOS_TOKEN: &str = "</s>";
/// Special tokens of files up to [`LAST_UNLISTED_VERSION`] that list none, in the order of their
/// ids (mistral-common 1.9).
const UNLISTED_SPECIAL_TOKENS: [&str; 20] = [
    "<unk>",
    BOS_TOKEN,
    EOS_TOKEN,
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];
const LAST_UNLISTED_VERSION: u32 = 7;

/// What the file says of its special tokens: all that is read until a tokenizer is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TekkenHeader {
    config: TekkenConfig,
    /// Texts by id.
    special_tokens: Vec<String>,
}

#[derive(Deserialize)]
struct TekkenFile {
    config: TekkenConfig,
    special_tokens: Option<Vec<SpecialToken>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct TekkenConfig {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
    version: String,
}

#[derive(Deserialize)]
struct SpecialToken {
    rank: usize,
    token_str: String,
}

#[derive(Deserialize)]
struct Vocabulary {
    vocab: Vec<RankedToken>,
}

#[derive(Deserialize)]
struct RankedToken {
    rank: usize,
    token_bytes: String,
}

impl TekkenHeader {
    /// `Err`: what is wrong with the file.
    pub fn read(json: &[u8]) -> Result<Self, String> {
        let file: TekkenFile = serde_json::from_slice(json).map_err(|err| err.to_string())?;
        let special_tokens = special_tokens(&file)?;
        if file.config.default_vocab_size <= special_tokens.len() {
            return Err(format!(
                "default_vocab_size = {} leaves no room beside {} special tokens",
                file.config.default_vocab_size,
                special_tokens.len()
            ));
        }
        Ok(Self {
            config: file.config,
            special_tokens,
        })
    }

    pub fn id_of(&self, special_token: &str) -> Option<u32> {
        let found = self.special_tokens.iter();
        let mut found = found.zip(0..).filter(|(text, _)| *text == special_token);
        found.next().map(|(_, id)| id)
    }

    /// In the form of `added_tokens` of tokenizer.json.
    pub fn added_tokens(&self) -> Vec<Value> {
        let tokens = self.special_tokens.iter().zip(0..);
        tokens
            .map(|(text, id)| added_token(id, text, true))
            .collect()
    }

    /// The model of the file that this is the header of. `Err`: what is wrong with it.
    pub fn rank_model(&self, json: &[u8]) -> Result<RankModel, String> {
        let file: Vocabulary = serde_json::from_slice(json).map_err(|err| err.to_string())?;
        let size = self.config.default_vocab_size - self.special_tokens.len();
        let Some(vocab) = file.vocab.get(..size) else {
            return Err(format!("it lists {} of {size} tokens", file.vocab.len()));
        };
        let mut tokens = Vec::with_capacity(size);
        for (rank, token) in vocab.iter().enumerate() {
            if token.rank != rank {
                return Err(format!("the token of rank {rank} says {}", token.rank));
            }
            let bytes = BASE64_STANDARD.decode(&token.token_bytes);
            tokens.push(bytes.map_err(|err| format!("the token of rank {rank}: {err}"))?);
        }
        let first_id = self.special_tokens.len() as u32;
        RankModel::new(&self.config.pattern, tokens.into_iter(), first_id)
    }
}

/// Texts of all special tokens by id, those that no entry names included.
fn special_tokens(file: &TekkenFile) -> Result<Vec<String>, String> {
    let mut texts: Vec<String> = match &file.special_tokens {
        Some(listed) => {
            for (rank, token) in listed.iter().enumerate() {
                if token.rank != rank {
                    return Err(format!("the special token {rank} says rank {}", token.rank));
                }
            }
            listed.iter().map(|token| token.token_str.clone()).collect()
        }
        None => {
            let version = file.config.version.strip_prefix('v');
            let version = version.and_then(|digits| digits.parse::<u32>().ok());
            if version.is_none_or(|version| version > LAST_UNLISTED_VERSION) {
                return Err(format!(
                    "it lists no special_tokens, and its version is {:?}",
                    file.config.version
                ));
            }
            UNLISTED_SPECIAL_TOKENS.map(str::to_owned).into()
        }
    };
    let count = file.config.default_num_special_tokens;
    if texts.len() > count {
        return Err(format!(
            "it lists {} special_tokens, but default_num_special_tokens = {count}",
            texts.len()
        ));
    }
    texts.extend((texts.len()..count).map(|id| format!("<SPECIAL_{id}>")));
    let distinct: HashSet<&String> = texts.iter().collect();
    if distinct.len() < texts.len() || distinct.iter().any(|text| text.is_empty()) {
        return Err("a special token is empty or there twice".to_owned());
    }
    Ok(texts)
}
