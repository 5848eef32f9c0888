//! Tokenizers of the golden cases, for tests.

use std::path::{Path, PathBuf};

use super::{HfTokenizer, TokenizerFiles};

/// Tokenizers of the golden cases: the demo's, and those of tests/contract/golden/tokens.
pub const MODELS: [&str; 5] = ["demo", "chatml", "llama3", "mistral", "gemma"];

/// Files of one of [`MODELS`].
pub fn read(name: &str) -> TokenizerFiles {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let dir = if name == "demo" {
        root.join("engine/baton/models/demo")
    } else {
        root.join("tests/contract/golden/tokens").join(name)
    };
    let read = |path: &Path| std::fs::read(path);
    TokenizerFiles::read(&read, &dir, None).unwrap()
}

pub fn load(name: &str) -> HfTokenizer {
    read(name).load_tokenizer().unwrap()
}
