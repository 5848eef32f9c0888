//! `tiktoken.model` of Kimi and Moonlight: lines of base64 and rank. The pattern and the names of
//! special tokens stand in the code of the checkpoint, which is not executed: they are here.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use super::ranks::{RankModel, TextCuts};
use super::tokenizer_json::added_token;
use crate::tokenizer::added_tokens::Members;

/// Classes of the code that the file is read as, in `auto_map` of tokenizer_config.json.
const KNOWN_CLASSES: [&str; 2] = [
    "tokenization_kimi.TikTokenTokenizer",
    "tokenization_moonshot.TikTokenTokenizer",
];
/// How these classes split a text.
const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);
/// Where they cut texts before they split them [characters].
const CUTS: TextCuts = TextCuts {
    most: 400_000,
    longest_run: 25_000,
};
/// Ids behind those of the file.
const SPECIAL_TOKENS: u32 = 256;
/// Named tokens of a tokenizer_config.json that does not name them.
pub const NAMED_TOKENS: [(&str, &str); 2] = [("bos_token", "[BOS]"), ("eos_token", "[EOS]")];

/// A file's tokens, and the special ones that tokenizer_config.json names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KimiFile {
    /// Bytes by rank.
    tokens: Vec<Vec<u8>>,
    /// Id, text, and whether it is special, by id.
    special_tokens: Vec<(u32, String, bool)>,
}

impl KimiFile {
    /// `config`: tokenizer_config.json. `Err`: what is wrong with the file, or who it is from.
    pub fn read(content: &[u8], config: &Members) -> Result<Self, String> {
        refuse_unknown_class(config)?;
        let tokens = read_ranks(content)?;
        let declared: Value = config
            .get("added_tokens_decoder")
            .map_or(Ok(Value::Null), |raw| serde_json::from_str(raw.get()))
            .map_err(|err| format!("added_tokens_decoder of tokenizer_config.json: {err}"))?;
        let first_id = tokens.len() as u32;
        let special_tokens = (first_id..first_id + SPECIAL_TOKENS).map(|id| {
            let entry = &declared[id.to_string()];
            let text = entry["content"].as_str().map(str::to_owned);
            let is_special = entry["special"].as_bool().unwrap_or(false);
            let text = text.unwrap_or_else(|| format!("<|reserved_token_{id}|>"));
            (id, text, is_special)
        });
        let special_tokens = special_tokens.collect();
        Ok(Self {
            tokens,
            special_tokens,
        })
    }

    /// In the form of `added_tokens` of tokenizer.json.
    pub fn added_tokens(&self) -> Vec<Value> {
        let tokens = self.special_tokens.iter();
        tokens
            .map(|(id, text, is_special)| added_token(*id, text, *is_special))
            .collect()
    }

    /// `Err`: what is wrong with the tokens.
    pub fn rank_model(&self) -> Result<RankModel, String> {
        let model = RankModel::new(PATTERN, self.tokens.iter().cloned(), 0)?;
        Ok(model.with_cuts(CUTS))
    }
}

fn refuse_unknown_class(config: &Members) -> Result<(), String> {
    let read = |name: &str| -> Value {
        let raw = config.get(name).map(|raw| serde_json::from_str(raw.get()));
        raw.and_then(Result::ok).unwrap_or_default()
    };
    let class = match &read("auto_map")["AutoTokenizer"] {
        Value::Array(classes) => classes.first().cloned().unwrap_or_default(),
        class => class.clone(),
    };
    // A class of another repository stands behind its name and two hyphens.
    let class = class.as_str().unwrap_or_default();
    let class = class.rsplit("--").next().unwrap_or_default();
    if KNOWN_CLASSES.contains(&class) {
        return Ok(());
    }
    let shown = match (class, read("tokenizer_class").as_str()) {
        ("", None) => "none".to_owned(),
        ("", Some(named)) => format!("{named:?} without a file"),
        (class, _) => format!("{class:?}"),
    };
    let known = KNOWN_CLASSES.join(", ");
    Err(format!(
        "how its texts are split stands in the checkpoint's code, which is not executed: \
         auto_map of tokenizer_config.json must name one of {known}, but names {shown}"
    ))
}

/// Bytes by rank.
fn read_ranks(content: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let text = str::from_utf8(content).map_err(|err| err.to_string())?;
    let mut ranked = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        if line.is_empty() {
            continue;
        }
        let damaged = |why: &dyn std::fmt::Display| format!("line {number}: {why}");
        let (token, rank) = line
            .split_once(' ')
            .ok_or_else(|| damaged(&"base64 and a rank are needed"))?;
        let token = BASE64_STANDARD.decode(token).map_err(|err| damaged(&err))?;
        let rank: usize = rank.parse().map_err(|err| damaged(&err))?;
        ranked.push((rank, token));
    }
    ranked.sort_unstable();
    if let Some(missing) = (0..ranked.len()).find(|rank| ranked[*rank].0 != *rank) {
        return Err(format!("rank {missing} is missing, or there twice"));
    }
    Ok(ranked.into_iter().map(|(_, token)| token).collect())
}
