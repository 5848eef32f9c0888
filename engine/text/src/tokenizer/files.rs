//! Tokenizer files of a Hugging Face directory: tokenizer.json or another file with a vocabulary,
//! the chat template, the tokens that other files add.
//!
//! Read once, at the start; every problem names the flag or the file and what to do. The
//! fingerprint tells whether two nodes tokenize the same way: engines report theirs in
//! /get_server_info (`tokenizer_fingerprint`).

use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::HfTokenizer;
use super::added_tokens::{
    AddedTokenPlan, Members, TokenizerMembers, TokenizerSettings, plan_added_tokens,
};
use super::text_model::{ModelSettings, VOCABULARY_FILES, VocabularyFile};
use crate::template::{TemplateCaps, UserTextGuard};

/// Reads a file, as `std::fs::read` does. `NotFound` means an absent file.
pub type FileReader<'a> = &'a dyn Fn(&Path) -> io::Result<Vec<u8>>;

/// An added token of the vocabulary's file.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub struct OwnToken {
    pub id: u32,
    pub content: String,
    #[serde(default)]
    pub special: bool,
}

#[derive(Deserialize)]
struct OwnTokens {
    #[serde(default)]
    added_tokens: Vec<OwnToken>,
}

/// Tokenizer and chat template, as the files of a directory define them.
#[derive(Debug)]
pub struct TokenizerFiles {
    dir: PathBuf,
    /// `None`: there is no such file.
    vocabulary: Option<VocabularyFile>,
    model_settings: ModelSettings,
    /// Control tokens of the vocabulary's file, which the texts of users do not contain.
    pub control_tokens: Vec<String>,
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
        let config = read_object(read, &dir.join("tokenizer_config.json"))?;
        let vocabulary = read_vocabulary(read, dir, &config)?;
        let own_tokens = vocabulary.as_ref().and_then(VocabularyFile::own_tokens);
        let tokenizer = match (&vocabulary, own_tokens) {
            (Some(_), Some(own_tokens)) => TokenizerMembers::with_tokens(own_tokens),
            (Some(json), None) => serde_json::from_slice(json.content()).map_err(|err| {
                format!("{} cannot be read: {err}", dir.join(json.name()).display())
            })?,
            (None, _) => TokenizerMembers::default(),
        };
        let mut settings = TokenizerSettings {
            tokenizer,
            config,
            special_tokens_map: read_object(read, &dir.join("special_tokens_map.json"))?,
            added_tokens: read_object(read, &dir.join("added_tokens.json"))?,
        };
        let mut added_tokens = plan_added_tokens(&settings)?;
        for (name, text) in vocabulary.iter().flat_map(VocabularyFile::named_tokens) {
            let named = &mut added_tokens.special_tokens;
            named.entry(name.to_owned()).or_insert(text);
        }
        let control_tokens = control_tokens(vocabulary.as_ref(), &mut settings)?;
        let is_json = matches!(vocabulary, None | Some(VocabularyFile::TokenizerJson(_)));
        let model_settings = if is_json {
            ModelSettings::default()
        } else {
            model_settings(&settings.config)?
        };
        let chat_template = match chat_template {
            Some(given) => Some(read_template(read, given)?),
            None => own_template(read, dir, &settings.config)?,
        };
        let response_template = member(&settings.config, "response_template")?;
        Ok(Self {
            dir: dir.to_owned(),
            vocabulary,
            model_settings,
            control_tokens,
            chat_template,
            added_tokens,
            has_response_template: response_template.is_some_and(|value| !value.is_null()),
        })
    }

    /// The tokenizer of these files. `Err`: a sentence that names the file.
    pub fn load_tokenizer(&self) -> Result<HfTokenizer, String> {
        let vocabulary = self.vocabulary()?;
        let load = || {
            let Some(model) = vocabulary.text_model(self.model_settings)? else {
                return HfTokenizer::load(vocabulary.content(), &self.added_tokens);
            };
            let own_tokens = vocabulary.own_tokens().unwrap_or_default();
            let json = model.tokenizer_json(own_tokens, false)?;
            let tokenizer = HfTokenizer::load(json.as_bytes(), &self.added_tokens)?;
            let guard = UserTextGuard::new(&self.control_tokens)?;
            Ok(tokenizer.with_text_model(model, guard))
        };
        load().map_err(|err| self.unreadable(vocabulary, &err))
    }

    /// Text of tokenizer.json, or of one with the same tokens. `Err`: a sentence that names the
    /// file.
    pub fn tokenizer_json(&self) -> Result<String, String> {
        let vocabulary = self.vocabulary()?;
        let write = || match vocabulary.text_model(self.model_settings)? {
            Some(model) => model.tokenizer_json(vocabulary.own_tokens().unwrap_or_default(), true),
            None => {
                let text = std::str::from_utf8(vocabulary.content());
                text.map(str::to_owned).map_err(|err| err.to_string())
            }
        };
        write().map_err(|err| self.unreadable(vocabulary, &err))
    }

    /// Added tokens of the vocabulary's file itself. `Err`: a sentence that names the file.
    pub fn own_tokens(&self) -> Result<Vec<OwnToken>, String> {
        let vocabulary = self.vocabulary()?;
        let read = || match vocabulary.own_tokens() {
            Some(tokens) => serde_json::from_value(Value::Array(tokens)),
            None => {
                let members: OwnTokens = serde_json::from_slice(vocabulary.content())?;
                Ok(members.added_tokens)
            }
        };
        read().map_err(|err| self.unreadable(vocabulary, &err.to_string()))
    }

    fn unreadable(&self, vocabulary: &VocabularyFile, problem: &str) -> String {
        let file = self.dir.join(vocabulary.name());
        format!("{} cannot be read: {problem}", file.display())
    }

    fn vocabulary(&self) -> Result<&VocabularyFile, String> {
        self.vocabulary.as_ref().ok_or_else(|| {
            let names = VOCABULARY_FILES.join(", ");
            let shown = self.dir.display();
            format!(
                "{shown} has none of {names}; convert the tokenizer with transformers or use \
                 --tokenizer-path"
            )
        })
    }

    /// Parts of a tokenizer's fingerprint that are not in the vocabulary's file.
    pub fn fingerprint_parts(&self) -> Vec<Vec<u8>> {
        let mut parts = self.added_tokens.fingerprint_parts();
        let vocabulary = self.vocabulary.as_ref();
        if let Some(own_tokens) = vocabulary.and_then(VocabularyFile::own_tokens) {
            parts.push(b"model_settings".to_vec());
            parts.push(self.model_settings.canonical().into_bytes());
            parts.extend(own_tokens.iter().map(|token| token.to_string().into()));
            parts.push(b"control_tokens".to_vec());
            parts.extend(self.control_tokens.iter().map(|text| text.clone().into()));
        }
        parts
    }

    /// SHA-256 over all that decides which ids a request gets. Each part is preceded by its length
    /// (8 bytes, little-endian); an absent template has no part. Empty without a vocabulary.
    /// `caps`: how messages are normalized for the template.
    pub fn fingerprint(&self, caps: &TemplateCaps) -> String {
        let Some(vocabulary) = &self.vocabulary else {
            return String::new();
        };
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(vocabulary.content());
        for (name, text) in &self.added_tokens.special_tokens {
            part(name.as_bytes());
            part(text.as_bytes());
        }
        for bytes in self.fingerprint_parts() {
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

/// The first of [`VOCABULARY_FILES`] that is there; `None`: there is none.
fn read_vocabulary(
    read: FileReader<'_>,
    dir: &Path,
    config: &Members,
) -> Result<Option<VocabularyFile>, String> {
    for name in VOCABULARY_FILES {
        let path = dir.join(name);
        let Some(content) = read_optional(read, &path)? else {
            continue;
        };
        let file = VocabularyFile::read(name, content, config);
        return file.map(Some).map_err(|err| {
            format!(
                "{} cannot be read: {err}; put the checkpoint's own file there, or a \
                 tokenizer.json",
                path.display()
            )
        });
    }
    Ok(None)
}

/// Control tokens of the vocabulary's file that no other file declares: tokens that they declare
/// are found in every text, as transformers finds them.
fn control_tokens(
    vocabulary: Option<&VocabularyFile>,
    settings: &mut TokenizerSettings,
) -> Result<Vec<String>, String> {
    let own_tokens = vocabulary.map_or_else(Vec::new, VocabularyFile::control_tokens);
    settings.tokenizer = TokenizerMembers::default();
    let declared = plan_added_tokens(settings)?.tokens;
    let contents = own_tokens
        .iter()
        .filter_map(|token| token["content"].as_str());
    let is_undeclared = |content: &&str| declared.iter().all(|token| token.content != **content);
    Ok(contents.filter(is_undeclared).map(str::to_owned).collect())
}

fn model_settings(config: &Members) -> Result<ModelSettings, String> {
    let flag = |name: &str| match member(config, name)? {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(is_set)) => Ok(Some(is_set)),
        Some(other) => Err(format!(
            "tokenizer_config.json: {name} = {other} is not supported; true or false is needed"
        )),
    };
    Ok(ModelSettings {
        add_bos_token: flag("add_bos_token")?,
        add_eos_token: flag("add_eos_token")?,
        legacy: flag("legacy")?,
        add_prefix_space: flag("add_prefix_space")?,
    })
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

/// The template of chat_template.jinja, else of chat_template.json, else of tokenizer_config.json
/// (a string, or a list with names).
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
