//! Tokenizers of the golden cases, for tests.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use super::{HfTokenizer, TokenizerFiles};

/// Tokenizers of the golden cases: the demo's, and those of tests/contract/golden/tokens.
pub const MODELS: [&str; 5] = ["demo", "chatml", "llama3", "mistral", "gemma"];

/// Vocabularies that are no tokenizer.json, of tests/contract/golden/vocabularies.
pub const VOCABULARIES: [&str; 4] = ["unigram", "bpe", "tekken", "kimi"];

/// What a vocabulary's own library makes of a text, and of its ids.
#[derive(Deserialize)]
pub struct VocabularyCase {
    pub text: String,
    pub ids: Vec<u32>,
    pub decoded: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Cases of one of [`VOCABULARIES`].
pub fn vocabulary_cases(name: &str) -> Vec<VocabularyCase> {
    let file = root().join("tests/contract/golden/vocabularies/cases.json");
    let mut cases: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    serde_json::from_value(cases[name].take()).unwrap()
}

/// Files of one of [`MODELS`] or [`VOCABULARIES`].
pub fn read(name: &str) -> TokenizerFiles {
    let root = root();
    let dir = if name == "demo" {
        root.join("engine/baton/models/demo")
    } else if VOCABULARIES.contains(&name) {
        root.join("tests/contract/golden/vocabularies").join(name)
    } else {
        root.join("tests/contract/golden/tokens").join(name)
    };
    let read = |path: &Path| std::fs::read(path);
    TokenizerFiles::read(&read, &dir, None).unwrap()
}

pub fn load(name: &str) -> HfTokenizer {
    read(name).load_tokenizer().unwrap()
}
