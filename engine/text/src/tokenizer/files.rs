//! Tokenizer files of a Hugging Face directory: tokenizer.json, the chat template, the tokens that
//! other files add.
//!
//! Read once, at the start; every problem names the flag or the file and what to do. The fingerprint
//! tells whether two nodes tokenize the same way: engines report theirs in /get_server_info
//! (`tokenizer_fingerprint`).

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use super::HfTokenizer;
use super::added_tokens::{
    AddedTokenPlan, Members, TokenizerMembers, TokenizerSettings, plan_added_tokens,
};
use crate::template::TemplateCaps;

/// Reads a file, as `std::fs::read` does. `NotFound` means an absent file.
pub type FileReader<'a> = &'a dyn Fn(&Path) -> io::Result<Vec<u8>>;

/// Tokenizer and chat template, as the files of a directory define them.
#[derive(Debug)]
pub struct TokenizerFiles {
    dir: PathBuf,
    /// `None`: there is no such file.
    pub tokenizer_json: Option<Vec<u8>>,
    pub chat_template: Option<String>,
    pub added_tokens: AddedTokenPlan,
    /// tokenizer_config.json has a `response_template`: transformers' description of how answers
    /// are read, which is not used.
    pub has_response_template: bool,
}

impl TokenizerFiles {
    /// `chat_template`: file of --chat-template. `Err`: a sentence that names the file.
    pub fn read(
        read: FileReader<'_>,
        dir: &Path,
        chat_template: Option<&Path>,
    ) -> Result<Self, String> {
        let json = dir.join("tokenizer.json");
        let tokenizer_json = read_optional(read, &json)?;
        let tokenizer = match &tokenizer_json {
            Some(bytes) => serde_json::from_slice(bytes)
                .map_err(|err| format!("{} cannot be read: {err}", json.display()))?,
            None => TokenizerMembers::default(),
        };
        let settings = TokenizerSettings {
            tokenizer,
            config: read_object(read, &dir.join("tokenizer_config.json"))?,
            special_tokens_map: read_object(read, &dir.join("special_tokens_map.json"))?,
            added_tokens: read_object(read, &dir.join("added_tokens.json"))?,
        };
        let added_tokens = plan_added_tokens(&settings)?;
        let chat_template = match chat_template {
            Some(given) => Some(read_template(read, given)?),
            None => own_template(read, dir, &settings.config)?,
        };
        let response_template = member(&settings.config, "response_template")?;
        Ok(Self {
            dir: dir.to_owned(),
            tokenizer_json,
            chat_template,
            added_tokens,
            has_response_template: response_template.is_some_and(|value| !value.is_null()),
        })
    }

    /// The tokenizer of these files. `Err`: a sentence that names the file.
    pub fn load_tokenizer(&self) -> Result<HfTokenizer, String> {
        let shown = self.dir.display();
        let Some(json) = &self.tokenizer_json else {
            return Err(format!(
                "{shown} has no tokenizer.json; convert the tokenizer with transformers or use --tokenizer-path"
            ));
        };
        HfTokenizer::load(json, &self.added_tokens)
            .map_err(|err| format!("{shown}/tokenizer.json cannot be read: {err}"))
    }

    /// SHA-256 over all that decides which ids a request gets. Each part is preceded by its length
    /// (8 bytes, little-endian); an absent template has no part. Empty without a tokenizer.json.
    /// `caps`: how messages are normalized for the template.
    pub fn fingerprint(&self, caps: &TemplateCaps) -> String {
        let Some(tokenizer_json) = &self.tokenizer_json else {
            return String::new();
        };
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(tokenizer_json);
        for (name, text) in &self.added_tokens.special_tokens {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        for bytes in self.added_tokens.fingerprint_parts() {
            part(&bytes);
        }
        if let Some(template) = &self.chat_template {
            part(template.as_bytes());
            part(caps.canonical().as_bytes());
        }
        hash.finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

/// `None`: there is no such file.
fn read_optional(read: FileReader<'_>, path: &Path) -> Result<Option<Vec<u8>>, String> {
    match read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(err) => Err(format!("{} cannot be read: {err}", path.display())),
    }
}

/// A file that is not there is an empty object.
fn read_object(read: FileReader<'_>, path: &Path) -> Result<Members, String> {
    let Some(bytes) = read_optional(read, path)? else {
        return Ok(Members::new());
    };
    let shown = path.display();
    serde_json::from_slice(&bytes)
        .map_err(|err| format!("{shown} cannot be read as a JSON object: {err}"))
}

fn member(members: &Members, name: &str) -> Result<Option<Value>, String> {
    let value = members.get(name).map(|raw| serde_json::from_str(raw.get()));
    value
        .transpose()
        .map_err(|err| format!("{name} cannot be read: {err}"))
}

/// The template of --chat-template.
fn read_template(read: FileReader<'_>, given: &Path) -> Result<String, String> {
    let shown = given.display();
    let remedy = "give a file with a Jinja template";
    let bytes = read(given).map_err(|err| format!("--chat-template {shown}: {err}; {remedy}"))?;
    String::from_utf8(bytes).map_err(|err| format!("--chat-template {shown}: {err}; {remedy}"))
}

/// The template of chat_template.jinja, else of chat_template.json, else of tokenizer_config.json (a
/// string, or a list with names).
fn own_template(
    read: FileReader<'_>,
    dir: &Path,
    settings: &Members,
) -> Result<Option<String>, String> {
    let jinja = dir.join("chat_template.jinja");
    if let Some(bytes) = read_optional(read, &jinja)? {
        let text = String::from_utf8(bytes);
        return text
            .map(Some)
            .map_err(|err| format!("{} cannot be read: {err}", jinja.display()));
    }
    let own = read_object(read, &dir.join("chat_template.json"))?;
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
