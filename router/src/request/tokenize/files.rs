//! Tokenizer files of a Hugging Face directory: tokenizer.json, the chat template, the special
//! tokens.
//!
//! Read once, at the start, in the order of our engines (engine/baton/server/text/model_info.py);
//! every problem names the flag or the file and what to do. The fingerprint tells whether a worker
//! tokenizes the same way: engines report theirs in /get_server_info (`tokenizer_fingerprint`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use super::messages::TemplateCaps;
use crate::config::TokenizerFlags;

/// Names of the special tokens that templates read as variables.
const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

#[derive(Debug)]
pub struct TokenizerFiles {
    pub tokenizer_json: Vec<u8>,
    pub chat_template: Option<String>,
    pub special_tokens: BTreeMap<String, String>,
}

impl TokenizerFiles {
    /// `Ok(None)`: no flag names a directory, so the router counts characters.
    pub fn read(config: &TokenizerFlags) -> Result<Option<Self>, String> {
        let (flag, given) = match (&config.tokenizer_path, &config.model_path) {
            (Some(path), _) => ("--tokenizer-path", path),
            (None, Some(path)) => ("--model-path", path),
            (None, None) => return Ok(None),
        };
        let dir = PathBuf::from(given);
        if !dir.is_dir() {
            return Err(format!(
                "{flag} {given}: not a directory here; give the model's files (tokenizer.json is enough), or drop the flag: \
                 the router then counts characters"
            ));
        }
        let json = dir.join("tokenizer.json");
        let tokenizer_json = std::fs::read(&json).map_err(|err| {
            format!(
                "{flag} {given}: {} cannot be read ({err}); convert the tokenizer with transformers, or drop the flag",
                json.display()
            )
        })?;
        let settings = read_object(&dir.join("tokenizer_config.json"))?;
        let mut special = read_object(&dir.join("special_tokens_map.json"))?;
        special.extend(settings.clone());
        let special_tokens = SPECIAL_TOKENS.iter().filter_map(|name| {
            Some(((*name).to_owned(), content(special.get(*name)?)?.to_owned()))
        });
        let special_tokens = special_tokens.collect();
        let chat_template = chat_template(config, &dir, &settings)?;
        Ok(Some(Self {
            tokenizer_json,
            special_tokens,
            chat_template,
        }))
    }

    /// SHA-256 over all that decides which ids a request gets. Each part is preceded by its length
    /// (8 bytes, little-endian); an absent template has no part. `caps`: how messages are
    /// normalized for the template.
    pub fn fingerprint(&self, caps: Option<TemplateCaps>) -> String {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(&self.tokenizer_json);
        for (name, text) in &self.special_tokens {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        if let Some(template) = &self.chat_template {
            part(template.as_bytes());
            part(caps.unwrap_or_default().canonical().as_bytes());
        }
        hash.finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// A token in tokenizer_config.json is a string or an AddedToken object.
fn content(token: &Value) -> Option<&str> {
    token.get("content").unwrap_or(token).as_str()
}

/// A file that is not there is an empty object.
fn read_object(path: &Path) -> Result<Map<String, Value>, String> {
    let shown = path.display();
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(Map::new()),
        Err(err) => return Err(format!("{shown} cannot be read: {err}")),
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(format!("{shown} should hold a JSON object")),
        Err(err) => Err(format!("{shown} cannot be read: {err}")),
    }
}

/// --chat-template, else chat_template.jinja, chat_template.json, tokenizer_config.json (a string,
/// or a list with names).
fn chat_template(
    config: &TokenizerFlags,
    dir: &Path,
    settings: &Map<String, Value>,
) -> Result<Option<String>, String> {
    if let Some(given) = &config.chat_template {
        let text = std::fs::read_to_string(given);
        return text.map(Some).map_err(|err| {
            format!("--chat-template {given}: {err}; give a file with a Jinja template, as to the engines")
        });
    }
    let jinja = dir.join("chat_template.jinja");
    if jinja.is_file() {
        let text = std::fs::read_to_string(&jinja);
        return text
            .map(Some)
            .map_err(|err| format!("{}: {err}", jinja.display()));
    }
    let own = read_object(&dir.join("chat_template.json"))?;
    let value = own.get("chat_template").or(settings.get("chat_template"));
    let value = match value {
        Some(Value::Array(named)) => named
            .iter()
            .find(|one| one["name"] == "default")
            .map(|one| &one["template"]),
        other => other,
    };
    Ok(value.and_then(Value::as_str).map(str::to_owned))
}
