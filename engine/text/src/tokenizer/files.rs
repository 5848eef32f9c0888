//! Tokenizer files of a Hugging Face directory: tokenizer.json, the chat template, the tokens that
//! other files add.
//!
//! Read once, at the start, in the order of our engines (engine/baton/server/text/model_info.py);
//! every problem names the flag or the file and what to do. The fingerprint tells whether a worker
//! tokenizes the same way: engines report theirs in /get_server_info (`tokenizer_fingerprint`).

use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::added_tokens::{
    AddedTokenPlan, Members, TokenizerMembers, TokenizerSettings, plan_added_tokens,
};
use super::messages::TemplateCaps;
use crate::config::TokenizerFlags;

#[derive(Debug)]
pub struct TokenizerFiles {
    pub tokenizer_json: Vec<u8>,
    pub chat_template: Option<String>,
    pub added_tokens: AddedTokenPlan,
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
        let tokenizer: TokenizerMembers = serde_json::from_slice(&tokenizer_json)
            .map_err(|err| format!("{} cannot be read: {err}", json.display()))?;
        let settings = TokenizerSettings {
            tokenizer,
            config: read_object(&dir.join("tokenizer_config.json"))?,
            special_tokens_map: read_object(&dir.join("special_tokens_map.json"))?,
            added_tokens: read_object(&dir.join("added_tokens.json"))?,
        };
        let added_tokens =
            plan_added_tokens(&settings).map_err(|err| format!("{flag} {given}: {err}"))?;
        let chat_template = chat_template(config, &dir, &settings.config)?;
        Ok(Some(Self {
            tokenizer_json,
            added_tokens,
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
        for (name, text) in &self.added_tokens.special_tokens {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        for bytes in self.added_tokens.fingerprint_parts() {
            part(&bytes);
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

/// A file that is not there is an empty object.
fn read_object(path: &Path) -> Result<Members, String> {
    let shown = path.display();
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(err) if err.kind() == std::io::ErrorKind::NotFound => return Ok(Members::new()),
        Err(err) => return Err(format!("{shown} cannot be read: {err}")),
    };
    serde_json::from_slice(&bytes)
        .map_err(|err| format!("{shown} cannot be read as a JSON object: {err}"))
}

fn member(members: &Members, name: &str) -> Result<Option<Value>, String> {
    let value = members.get(name).map(|raw| serde_json::from_str(raw.get()));
    value
        .transpose()
        .map_err(|err| format!("{name} cannot be read: {err}"))
}

/// --chat-template, else chat_template.jinja, chat_template.json, tokenizer_config.json (a string,
/// or a list with names).
fn chat_template(
    config: &TokenizerFlags,
    dir: &Path,
    settings: &Members,
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
    let value = match member(&own, "chat_template")? {
        None => member(settings, "chat_template")?,
        found => found,
    };
    let value = match value {
        Some(Value::Array(named)) => named
            .into_iter()
            .find(|one| one["name"] == "default")
            .map(|one| one["template"].clone()),
        other => other,
    };
    Ok(value.as_ref().and_then(Value::as_str).map(str::to_owned))
}
