//! Byte-pair encoding by rank, as tiktoken does it: a text is split by a pattern, and each part
//! that is no token itself is merged from its bytes.

use std::collections::HashMap;

use fancy_regex::Regex;
use serde_json::{Value, json};

use super::merges::SymbolMerger;
use super::tokenizer_json::{merges_of, tokenizer_json};
use crate::template::is_python_space;
use crate::tokenizer::token_table::stand_in;

/// Where texts are cut before they are split, whatever the pattern says [characters].
#[derive(Debug, Clone, Copy)]
pub struct TextCuts {
    /// Longest text.
    pub most: usize,
    /// Most whitespace, or characters that are none, behind each other.
    pub longest_run: usize,
}

impl TextCuts {
    /// The parts of a text.
    fn parts_of(self, text: &str) -> Vec<&str> {
        let mut parts = Vec::new();
        let mut start = 0;
        let mut length = 0;
        let mut run = 0;
        let mut is_space_run = false;
        for (at, character) in text.char_indices() {
            let is_space = is_python_space(character);
            if length == self.most {
                parts.push(&text[start..at]);
                start = at;
                length = 0;
                run = 0;
            }
            if run > 0 && is_space != is_space_run {
                run = 0;
            }
            if run == self.longest_run {
                parts.push(&text[start..at]);
                start = at;
                run = 0;
            }
            is_space_run = is_space;
            length += 1;
            run += 1;
        }
        parts.push(&text[start..]);
        parts
    }
}

/// See the module.
#[derive(Debug)]
pub struct RankModel {
    pattern: Regex,
    ranks: HashMap<Box<[u8]>, u32>,
    longest: usize,
    /// Id of the token of rank 0.
    first_id: u32,
    cuts: Option<TextCuts>,
}

impl RankModel {
    /// `tokens`: bytes by rank. `Err`: what is wrong with them.
    pub fn new(
        pattern: &str,
        tokens: impl Iterator<Item = Vec<u8>>,
        first_id: u32,
    ) -> Result<Self, String> {
        let pattern = Regex::new(pattern).map_err(|err| format!("its pattern: {err}"))?;
        let mut ranks = HashMap::new();
        for (token, rank) in tokens.zip(0..) {
            let token = token.into_boxed_slice();
            if token.is_empty() || ranks.insert(token, rank).is_some() {
                return Err(format!("the token of rank {rank} is empty or there twice"));
            }
        }
        for byte in 0..=u8::MAX {
            if !ranks.contains_key([byte].as_slice()) {
                return Err(format!("it has no token for the byte {byte:#04x}"));
            }
        }
        let longest = ranks.keys().map(|token| token.len()).max().unwrap_or(0);
        Ok(Self {
            pattern,
            ranks,
            longest,
            first_id,
            cuts: None,
        })
    }

    /// The same model for texts that are cut.
    pub fn with_cuts(mut self, cuts: TextCuts) -> Self {
        self.cuts = Some(cuts);
        self
    }

    /// Appends the ids of a text. `Err`: the pattern fails on it.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        let parts = match self.cuts {
            Some(cuts) => cuts.parts_of(text),
            None => vec![text],
        };
        for found in parts.iter().flat_map(|part| self.pattern.find_iter(part)) {
            let found = found.map_err(|err| err.to_string())?;
            self.encode_part(found.as_str().as_bytes(), ids);
        }
        Ok(())
    }

    fn encode_part(&self, part: &[u8], ids: &mut Vec<u32>) {
        if let Some(rank) = self.ranks.get(part) {
            ids.push(self.first_id + rank);
            return;
        }
        let rank_of = |bytes: &[u8]| {
            // Hashing long texts would cost the square of their length.
            let is_short = bytes.len() <= self.longest;
            is_short.then(|| self.ranks.get(bytes).copied()).flatten()
        };
        let mut merger = SymbolMerger::new(|start, _, end| rank_of(&part[start..end]));
        for at in 0..part.len() {
            merger.push(at, at + 1, false);
        }
        let merged = merger.merge().into_iter();
        // Each single byte has a rank.
        let ranks = merged.filter_map(|(start, end)| rank_of(&part[start..end]));
        ids.extend(ranks.map(|rank| self.first_id + rank));
    }

    /// The same tokens as a tokenizer.json, in the alphabet of byte-level BPE. `added_tokens`: its
    /// member of this name; they are in the vocabulary too. `Err`: one of them has the name of
    /// another token.
    pub fn tokenizer_json(
        &self,
        added_tokens: Vec<Value>,
        has_merges: bool,
    ) -> Result<String, String> {
        let named = self.ranks.iter().map(|(token, rank)| {
            let name: String = token.iter().map(|byte| stand_in(*byte)).collect();
            (name, *rank)
        });
        let by_name: HashMap<String, u32> = named.collect();
        let ids = by_name
            .iter()
            .map(|(name, rank)| (name.clone(), Value::from(self.first_id + rank)));
        let mut vocab: serde_json::Map<_, _> = ids.collect();
        for token in &added_tokens {
            let content = token["content"].as_str().unwrap_or_default();
            if vocab
                .insert(content.to_owned(), token["id"].clone())
                .is_some()
            {
                return Err(format!(
                    "the special token {content:?} is another token too"
                ));
            }
        }
        let names = by_name.keys().map(String::as_str);
        let rank_of = |name: &str| by_name.get(name).copied();
        let merges = if has_merges {
            merges_of(names, rank_of)
        } else {
            Vec::new()
        };
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                "use_regex": use_regex,
            })
        };
        let split = json!({
            "type": "Split", "pattern": {"Regex": self.pattern.as_str()}, "behavior": "Isolated",
            "invert": false,
        });
        Ok(tokenizer_json(
            json!({
                "type": "BPE", "vocab": vocab, "merges": merges,
                "ignore_merges": true,
            }),
            Value::Null,
            json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]}),
            byte_level(true),
            added_tokens,
        ))
    }
}
