//! Tokens that the files beside tokenizer.json add to it, and special tokens by name: as
//! transformers 5 has them.
//!
//! [`plan_added_tokens`] follows `_from_pretrained` and `TokenizersBackend.__init__` of
//! AutoTokenizer's classes:
//!
//! 1. `added_tokens_decoder` of tokenizer_config.json declares tokens with flags. Without it the
//!    older files count: special_tokens_map.json (before tokenizer_config.json), added_tokens.json,
//!    the flags in tokenizer.json;
//! 2. named tokens (`eos_token` …, any other `*_token`, the members of an `extra_special_tokens`
//!    object) and listed ones (`extra_special_tokens`, formerly `additional_special_tokens`) are
//!    added where neither tokenizer.json nor the declared tokens have them;
//! 3. a named token is special, whatever its flags say.
//!
//! Ids are not planned: the tokenizers library gives a new token the next free id, in the order of
//! the plan. Cases are in tests/contract/golden/tokens/added_tokens.json; a Python test holds the
//! tokenizer that follows the plan to AutoTokenizer's.

use std::collections::{BTreeMap, HashMap, HashSet};

use indexmap::IndexMap;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::AddedToken as LibraryToken;

const TOKENIZER_FILE: &str = "tokenizer.json";
const CONFIG_FILE: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP_FILE: &str = "special_tokens_map.json";
const ADDED_TOKENS_FILE: &str = "added_tokens.json";
const NAMED_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];
/// Characters of a refused value that an error shows.
const SHOWN_CHARS: usize = 80;

/// Members of a JSON object in the order of the file, which decides the ids of new tokens.
pub type Members = IndexMap<String, Box<RawValue>>;

/// A token with the flags of the tokenizers library; `None` for `normalized` is the opposite of
/// `special`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DeclaredToken {
    content: String,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: Option<bool>,
    special: bool,
}

impl DeclaredToken {
    fn resolved(&self) -> LibraryToken {
        LibraryToken {
            content: self.content.clone(),
            single_word: self.single_word,
            lstrip: self.lstrip,
            rstrip: self.rstrip,
            normalized: self.normalized.unwrap_or(!self.special),
            special: self.special,
        }
    }

    fn made_special(mut self) -> Self {
        self.special = true;
        self
    }
}

/// A token as a file has it: a text alone, or with flags.
#[derive(Debug, Clone)]
enum FileToken {
    Text(String),
    Declared(DeclaredToken),
}

impl FileToken {
    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Declared(token) => &token.content,
        }
    }

    /// Compares as the tokenizers library does; a text alone equals no object.
    fn is_equal(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Text(one), Self::Text(other)) => one == other,
            (Self::Declared(one), Self::Declared(other)) => one.resolved() == other.resolved(),
            _ => false,
        }
    }
}

/// A token under the id that a file gives it.
type NumberedToken = (u64, DeclaredToken);

/// JSON objects of a directory; an absent file is an empty one.
#[derive(Debug, Default, Deserialize)]
pub struct TokenizerSettings {
    pub tokenizer: TokenizerMembers,
    pub config: Members,
    pub special_tokens_map: Members,
    pub added_tokens: Members,
}

/// The members of tokenizer.json that are looked at here.
#[derive(Debug, Default, Deserialize)]
pub struct TokenizerMembers {
    #[serde(default)]
    added_tokens: Option<Vec<Value>>,
    #[serde(default)]
    padding: Option<Value>,
}

impl TokenizerMembers {
    /// `added_tokens`: as tokenizer.json would have them.
    pub fn with_tokens(added_tokens: Vec<Value>) -> Self {
        Self {
            added_tokens: Some(added_tokens),
            padding: None,
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct AddedTokenPlan {
    /// To be added to the tokenizer in this order: those that it lacks or has with other flags.
    pub tokens: Vec<LibraryToken>,
    /// By name, as chat templates read them.
    pub special_tokens: BTreeMap<String, String>,
    /// Special tokens in a text are encoded like any other characters.
    pub split_special_tokens: bool,
}

impl AddedTokenPlan {
    /// Each of the tokens, and its flags in the order of the library's fields, 1 for those that are
    /// set.
    pub fn contents_and_flags(&self) -> Vec<(String, String)> {
        let tokens = self.tokens.iter();
        tokens
            .map(|token| (token.content.clone(), flags_of(token)))
            .collect()
    }

    /// Parts of a tokenizer's fingerprint; none where tokenizer.json says it all.
    pub fn fingerprint_parts(&self) -> Vec<Vec<u8>> {
        if self.tokens.is_empty() && !self.split_special_tokens {
            return Vec::new();
        }
        let mode = if self.split_special_tokens {
            "split"
        } else {
            "whole"
        };
        let mut parts = vec![b"added_tokens".to_vec(), mode.into()];
        for (content, flags) in self.contents_and_flags() {
            parts.push(content.into_bytes());
            parts.push(flags.into_bytes());
        }
        parts
    }
}

/// The flags in the order of the library's fields, 1 for those that are set.
fn flags_of(token: &LibraryToken) -> String {
    let flags = [
        token.single_word,
        token.lstrip,
        token.rstrip,
        token.normalized,
        token.special,
    ];
    flags
        .iter()
        .map(|is_set| if *is_set { '1' } else { '0' })
        .collect()
}

/// Works out what the other files add to tokenizer.json. `Err`: a sentence about a value that is
/// no token.
pub fn plan_added_tokens(files: &TokenizerSettings) -> Result<AddedTokenPlan, String> {
    let own = own_tokens(files)?;
    let settings = MergedSettings::of(files)?;
    let declared = settings.declared_tokens(files, &own)?;
    let named = settings.named_tokens(&declared);
    let texts_of_named: HashSet<&str> = named.values().map(FileToken::text).collect();
    let by_id: BTreeMap<u64, &DeclaredToken> =
        declared.iter().map(|(id, token)| (*id, token)).collect();
    let mut planned: Vec<FileToken> = by_id
        .values()
        .map(|token| FileToken::Declared((*token).clone()))
        .collect();
    let known: HashSet<String> = own
        .iter()
        .map(|(_, token)| token.content.clone())
        .chain(planned.iter().map(|token| token.text().to_owned()))
        .collect();
    for token in named.values().chain(settings.listed()) {
        let is_planned = planned.iter().any(|other| other.is_equal(token));
        if !known.contains(token.text()) && !is_planned {
            planned.push(token.clone());
        }
    }
    let tokens = planned
        .iter()
        .map(|token| library_token(token, texts_of_named.contains(token.text())));
    let special_tokens = named
        .iter()
        .map(|(name, token)| (name.clone(), token.text().to_owned()));
    Ok(AddedTokenPlan {
        tokens: changes(tokens, &own),
        special_tokens: special_tokens.collect(),
        split_special_tokens: settings.split_special_tokens,
    })
}

/// Settings of tokenizer_config.json and, where it declares no tokens, of special_tokens_map.json.
#[derive(Default)]
struct MergedSettings {
    /// `added_tokens_decoder` of tokenizer_config.json.
    decoder: Option<Value>,
    named: HashMap<String, Option<FileToken>>,
    /// Tokens of names that only this tokenizer has, as tokenizer_config.json or an object of them
    /// declares.
    own_names: IndexMap<String, FileToken>,
    /// The same from special_tokens_map.json, and from objects: they come first, and give way.
    older_names: IndexMap<String, FileToken>,
    /// By name, the text that makes a token of added_tokens.json special; objects of
    /// tokenizer_config.json don't.
    special_texts: HashMap<String, Option<String>>,
    /// The same of listed tokens.
    special_listed: HashSet<String>,
    extra: Option<Vec<FileToken>>,
    additional: Option<Vec<FileToken>>,
    split_special_tokens: bool,
}

impl MergedSettings {
    fn of(files: &TokenizerSettings) -> Result<Self, String> {
        let mut settings = Self {
            decoder: member(CONFIG_FILE, &files.config, "added_tokens_decoder")?
                .filter(|value| !value.is_null()),
            ..Self::default()
        };
        settings.take_config(&files.config)?;
        if settings.decoder.is_none() {
            settings.take_special_tokens_map(&files.special_tokens_map)?;
        }
        if let Some(Value::Object(padding)) = &files.tokenizer.padding
            && !settings.named.contains_key("pad_token")
        {
            let pad = padding.get("pad_token").unwrap_or(&Value::Null);
            let pad = file_token(TOKENIZER_FILE, "padding", pad)?;
            settings.named.insert("pad_token".to_owned(), Some(pad));
        }
        Ok(settings)
    }

    fn listed(&self) -> &[FileToken] {
        let listed = self.extra.as_ref().or(self.additional.as_ref());
        listed.map_or(&[], Vec::as_slice)
    }

    fn take_config(&mut self, config: &Members) -> Result<(), String> {
        self.take_names(CONFIG_FILE, config)?;
        let extra = member(CONFIG_FILE, config, "extra_special_tokens")?;
        let additional = member(CONFIG_FILE, config, "additional_special_tokens")?;
        let is_renamed = extra.as_ref().is_none_or(is_empty) && additional.is_some();
        let (name, value) = if is_renamed {
            ("additional_special_tokens", additional.as_ref())
        } else {
            ("extra_special_tokens", extra.as_ref())
        };
        match value {
            None => {}
            Some(Value::Object(_)) => {
                self.take_own_names(CONFIG_FILE, config, name)?;
                if let Some(listed) = additional.as_ref().filter(|_| !is_renamed) {
                    let name = "additional_special_tokens";
                    self.additional = Some(token_list(CONFIG_FILE, name, listed)?);
                }
            }
            Some(listed) => {
                let listed = token_list(CONFIG_FILE, "extra_special_tokens", listed)?;
                let texts = listed.iter().filter_map(|token| match token {
                    FileToken::Text(text) => Some(text.clone()),
                    FileToken::Declared(_) => None,
                });
                self.special_listed = texts.collect();
                self.extra = Some(listed);
            }
        }
        Ok(())
    }

    fn take_special_tokens_map(&mut self, found: &Members) -> Result<(), String> {
        const FILE: &str = SPECIAL_TOKENS_MAP_FILE;
        self.take_names(FILE, found)?;
        if let Some(listed) = member(FILE, found, "additional_special_tokens")? {
            let listed = token_list(FILE, "additional_special_tokens", &listed)?;
            self.additional = Some(listed);
        }
        match member(FILE, found, "extra_special_tokens")? {
            None => {}
            Some(Value::Object(_)) => {
                self.extra = None;
                self.special_listed.clear();
                self.take_own_names(FILE, found, "extra_special_tokens")?;
            }
            Some(Value::Null) => {
                self.extra = Some(Vec::new());
                self.special_listed.clear();
            }
            Some(listed) => {
                let mut merged = self.extra.take().unwrap_or_default();
                for token in token_list(FILE, "extra_special_tokens", &listed)? {
                    let token = made_special(token);
                    self.special_listed.insert(token.text().to_owned());
                    if !merged.iter().any(|other| other.is_equal(&token)) {
                        merged.push(token);
                    }
                }
                self.extra = Some(merged);
            }
        }
        Ok(())
    }

    /// The members of an object of named tokens, in the order of the file.
    fn take_own_names(&mut self, file: &str, members: &Members, name: &str) -> Result<(), String> {
        let Some(raw) = members.get(name) else {
            return Ok(());
        };
        for (name, value) in parse::<Members>(file, name, raw)? {
            let value = parse(file, &name, &value)?;
            let token = file_token(file, &name, &value)?;
            self.own_names.insert(name, token);
        }
        Ok(())
    }

    fn take_names(&mut self, file: &str, members: &Members) -> Result<(), String> {
        let is_map = file == SPECIAL_TOKENS_MAP_FILE;
        for (name, raw) in members {
            let is_named = NAMED_TOKENS.contains(&name.as_str());
            if !is_named && !name.ends_with("_token") && name != "split_special_tokens" {
                continue;
            }
            let value: Value = parse(file, name, raw)?;
            if is_named {
                let token = match &value {
                    Value::Null => None,
                    value => Some(named_token(file, name, value)?),
                };
                let text = token
                    .as_ref()
                    .filter(|token| is_map || matches!(token, FileToken::Text(_)))
                    .map(|token| token.text().to_owned());
                self.special_texts.insert(name.clone(), text);
                self.named.insert(name.clone(), token);
            } else if name == "split_special_tokens" {
                self.split_special_tokens = flag(file, name, &value)?;
            } else if is_token(&value) {
                let token = named_token(file, name, &value)?;
                let is_own = !is_map && value.is_string();
                let names = if is_own {
                    &mut self.own_names
                } else {
                    &mut self.older_names
                };
                names.insert(name.clone(), token);
            } else if value.is_null() {
                self.older_names.shift_remove(name);
            }
        }
        Ok(())
    }

    /// `added_tokens_decoder`, or else added_tokens.json and tokenizer.json's `own`, which
    /// overrules by id.
    fn declared_tokens(
        &self,
        files: &TokenizerSettings,
        own: &[NumberedToken],
    ) -> Result<Vec<NumberedToken>, String> {
        if let Some(decoder) = &self.decoder {
            return decoder_tokens(decoder);
        }
        let mut declared = Vec::new();
        for (content, raw) in &files.added_tokens {
            let value: Value = parse(ADDED_TOKENS_FILE, content, raw)?;
            let Some(id) = value.as_u64() else {
                return Err(refusal(ADDED_TOKENS_FILE, content, &value, "a token id"));
            };
            let is_special = self.special_listed.contains(content)
                || self.special_texts.values().flatten().any(|t| t == content);
            let token = DeclaredToken {
                content: content.clone(),
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: Some(!is_special),
                special: is_special,
            };
            declared.push((id, token));
        }
        declared.extend_from_slice(own);
        Ok(declared)
    }

    /// Named tokens with the flags that are declared for their text: the well-known names first.
    fn named_tokens(&self, declared: &[NumberedToken]) -> IndexMap<String, FileToken> {
        let by_content: HashMap<&str, &DeclaredToken> = declared
            .iter()
            .map(|(_, token)| (token.content.as_str(), token))
            .collect();
        let mut found = IndexMap::new();
        for name in NAMED_TOKENS {
            let Some(Some(token)) = self.named.get(name) else {
                continue;
            };
            let token = match by_content.get(token.text()) {
                Some(declared) => FileToken::Declared((*declared).clone()),
                None => token.clone(),
            };
            found.insert(name.to_owned(), token);
        }
        for (name, token) in self.older_names.iter().chain(&self.own_names) {
            found.insert(name.clone(), token.clone());
        }
        found
    }
}

/// `added_tokens` of tokenizer.json.
fn own_tokens(files: &TokenizerSettings) -> Result<Vec<NumberedToken>, String> {
    let mut found = Vec::new();
    for value in files.tokenizer.added_tokens.iter().flatten() {
        let token = file_token(TOKENIZER_FILE, "added_tokens", value)?;
        let (FileToken::Declared(token), Some(id)) = (token, value["id"].as_u64()) else {
            let needed = "an object with id and content";
            return Err(refusal(TOKENIZER_FILE, "added_tokens", value, needed));
        };
        found.push((id, token));
    }
    Ok(found)
}

fn decoder_tokens(decoder: &Value) -> Result<Vec<NumberedToken>, String> {
    const FIELD: &str = "added_tokens_decoder";
    let Value::Object(entries) = decoder else {
        let needed = "an object from id to token";
        return Err(refusal(CONFIG_FILE, FIELD, decoder, needed));
    };
    // The order of the file does not matter: ids are unique but for leading zeros.
    let mut found = Vec::new();
    for (id, entry) in entries {
        let token = file_token(CONFIG_FILE, FIELD, entry)?;
        let digits = id.bytes().all(|byte| byte.is_ascii_digit());
        let (FileToken::Declared(token), true, Ok(number)) = (token, digits, id.parse()) else {
            let shown = serde_json::json!({ id: entry });
            let needed = "an id with a token's object";
            return Err(refusal(CONFIG_FILE, FIELD, &shown, needed));
        };
        found.push((number, token));
    }
    Ok(found)
}

/// Those of `tokens` that a tokenizer with its `own` lacks or has with other flags.
fn changes(tokens: impl Iterator<Item = LibraryToken>, own: &[NumberedToken]) -> Vec<LibraryToken> {
    let mut present: HashMap<String, LibraryToken> = own
        .iter()
        .map(|(_, token)| (token.content.clone(), token.resolved()))
        .collect();
    let mut changed = Vec::new();
    for token in tokens {
        if token.content.is_empty() || present.get(&token.content) == Some(&token) {
            continue;
        }
        present.insert(token.content.clone(), token.clone());
        changed.push(token);
    }
    changed
}

fn library_token(token: &FileToken, is_named: bool) -> LibraryToken {
    match token {
        FileToken::Text(text) => LibraryToken::from(text.clone(), true),
        FileToken::Declared(token) if is_named => token.clone().made_special().resolved(),
        FileToken::Declared(token) => token.resolved(),
    }
}

fn made_special(token: FileToken) -> FileToken {
    match token {
        FileToken::Text(text) => FileToken::Text(text),
        FileToken::Declared(token) => FileToken::Declared(token.made_special()),
    }
}

fn named_token(file: &str, name: &str, value: &Value) -> Result<FileToken, String> {
    let token = file_token(file, name, value)?;
    if file == SPECIAL_TOKENS_MAP_FILE {
        return Ok(made_special(token));
    }
    Ok(token)
}

fn is_token(value: &Value) -> bool {
    value.is_string() || value.get("content").is_some_and(Value::is_string)
}

/// Null, or empty: what counts as absent where one member stands for another.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(entries) => entries.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(is_set) => !is_set,
        Value::Number(number) => number.as_f64() == Some(0.0),
    }
}

fn file_token(file: &str, name: &str, value: &Value) -> Result<FileToken, String> {
    if let Value::String(text) = value {
        return Ok(FileToken::Text(text.clone()));
    }
    let Some(content) = value.get("content").and_then(Value::as_str) else {
        let needed = "a text, or an object with content,";
        return Err(refusal(file, name, value, needed));
    };
    let read = |flag_name: &str| -> Result<Option<bool>, String> {
        let found = value.get(flag_name);
        found
            .map(|found| flag(file, &format!("{name}.{flag_name}"), found))
            .transpose()
    };
    Ok(FileToken::Declared(DeclaredToken {
        content: content.to_owned(),
        single_word: read("single_word")?.unwrap_or(false),
        lstrip: read("lstrip")?.unwrap_or(false),
        rstrip: read("rstrip")?.unwrap_or(false),
        normalized: read("normalized")?,
        special: read("special")?.unwrap_or(false),
    }))
}

fn token_list(file: &str, name: &str, value: &Value) -> Result<Vec<FileToken>, String> {
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Array(entries) => entries
            .iter()
            .map(|entry| file_token(file, name, entry))
            .collect(),
        _ => Err(refusal(file, name, value, "a list of tokens")),
    }
}

fn flag(file: &str, name: &str, value: &Value) -> Result<bool, String> {
    value
        .as_bool()
        .ok_or_else(|| refusal(file, name, value, "true or false"))
}

fn member(file: &str, members: &Members, name: &str) -> Result<Option<Value>, String> {
    members
        .get(name)
        .map(|raw| parse(file, name, raw))
        .transpose()
}

fn parse<'a, T: Deserialize<'a>>(file: &str, name: &str, raw: &'a RawValue) -> Result<T, String> {
    serde_json::from_str(raw.get()).map_err(|err| format!("{file}: {name} cannot be read: {err}"))
}

fn refusal(file: &str, name: &str, value: &Value, needed: &str) -> String {
    let shown: String = value.to_string().chars().take(SHOWN_CHARS).collect();
    format!("{file}: {name} = {shown} is not supported; {needed} is needed")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Deserialize)]
    struct GoldenCase {
        #[serde(flatten)]
        files: serde_json::Map<String, Value>,
        plan: Option<GoldenPlan>,
        error: Option<String>,
    }

    #[derive(Deserialize)]
    struct GoldenPlan {
        tokens: Vec<(String, String)>,
        special_tokens: BTreeMap<String, String>,
        split_special_tokens: bool,
        fingerprint_parts: Vec<String>,
    }

    /// As the file has them, in its order of members.
    fn golden_files() -> IndexMap<String, TokenizerSettings> {
        serde_json::from_slice(&golden_bytes()).unwrap()
    }

    fn golden_bytes() -> Vec<u8> {
        let root = std::path::PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        std::fs::read(root.join("tests/contract/golden/tokens/added_tokens.json")).unwrap()
    }

    #[test]
    fn plans_are_golden() {
        let cases: IndexMap<String, GoldenCase> = serde_json::from_slice(&golden_bytes()).unwrap();
        assert!(cases.len() > 25);
        for (name, files) in golden_files() {
            let case = &cases[&name];
            assert!(case.files.contains_key("config"));
            match (plan_added_tokens(&files), &case.plan) {
                (Ok(plan), Some(expected)) => {
                    assert_eq!(plan.contents_and_flags(), expected.tokens, "{name}");
                    assert_eq!(plan.special_tokens, expected.special_tokens, "{name}");
                    let is_split = plan.split_special_tokens;
                    assert_eq!(is_split, expected.split_special_tokens, "{name}");
                    let parts = plan.fingerprint_parts().into_iter();
                    let parts: Vec<_> =
                        parts.map(|part| String::from_utf8(part).unwrap()).collect();
                    assert_eq!(parts, expected.fingerprint_parts, "{name}");
                }
                (Err(error), None) => assert_eq!(Some(error), case.error, "{name}"),
                (found, _) => panic!("{name}: {found:?}"),
            }
        }
    }
}
