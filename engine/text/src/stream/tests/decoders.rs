//! Decoders of the tests: two that are written out, and those of `tokenizers`.

use std::borrow::Cow;
use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::tokenizer::TokenDecoder;

/// Parts of characters, whole ones, bytes that are no UTF-8, and texts with stop strings in them.
const TOKENS: [&[u8]; 20] = [
    b"a",
    b"b",
    b"<",
    b"ab",
    b"<<a",
    b" the",
    b"\n\n",
    "é".as_bytes(),
    "世界".as_bytes(),
    "\u{fffd}".as_bytes(),
    b"\xE4",
    b"\xB8",
    b"\x96",
    b"\xF0\x9F",
    b"\x98\x80",
    b"\x80b",
    b"a\xC3",
    b"\xA9<",
    b"\xFF",
    b"\xED\xA0",
];

/// Bytes of a token; one of three is of any bytes.
pub fn token_bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        2 => (0..TOKENS.len()).prop_map(|index| TOKENS[index].to_vec()),
        1 => vec(any::<u8>(), 0..6),
    ]
}

/// Tokens whose bytes, joined, are the text. Ids from its length on have no token.
#[derive(Debug)]
pub struct ByteTokens {
    pub tokens: Vec<Vec<u8>>,
    /// Ids below are special tokens.
    pub special: u32,
    /// False hides that no context is needed.
    pub is_bytewise: bool,
}

impl ByteTokens {
    pub fn join_bytes(&self, ids: &[u32], skip_special_tokens: bool) -> Vec<u8> {
        ids.iter()
            .filter(|&&id| !(skip_special_tokens && self.is_special(id)))
            .flat_map(|&id| self.token_bytes(id).into_owned())
            .collect()
    }
}

impl TokenDecoder for ByteTokens {
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        assert!(!self.is_bytewise, "bytewise decoding calls no decode");
        String::from_utf8_lossy(&self.join_bytes(ids, skip_special_tokens)).into_owned()
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        let token = self.tokens.get(id as usize);
        Cow::Borrowed(token.map_or(&[], Vec::as_slice))
    }

    fn is_special(&self, id: u32) -> bool {
        id < self.special
    }

    fn is_bytewise(&self) -> bool {
        self.is_bytewise
    }
}

/// Any tokens, of which up to two are special.
pub fn byte_tokens(is_bytewise: bool) -> impl Strategy<Value = ByteTokens> {
    (vec(token_bytes(), 2..24), 0..3u32).prop_map(move |(tokens, special)| ByteTokens {
        tokens,
        special,
        is_bytewise,
    })
}

/// A token of [`SpacedTokens`] and of [`llama_tokenizer`].
#[derive(Clone, Copy, Debug)]
pub enum SpacedToken {
    Special(&'static str),
    Word(&'static str),
    Byte(u8),
}

/// Words with ▁ for a space before them, then a token for every byte.
pub fn spaced_token(id: u32) -> Option<SpacedToken> {
    const WORDS: [SpacedToken; 12] = [
        SpacedToken::Special("<unk>"),
        SpacedToken::Special("<s>"),
        SpacedToken::Word("▁"),
        SpacedToken::Word("▁▁▁"),
        SpacedToken::Word("▁the"),
        SpacedToken::Word("▁baton"),
        SpacedToken::Word("▁a"),
        SpacedToken::Word("a"),
        SpacedToken::Word("b"),
        SpacedToken::Word("<"),
        SpacedToken::Word("é"),
        SpacedToken::Word("世"),
    ];
    let index = id as usize;
    match index.checked_sub(WORDS.len()) {
        None => Some(WORDS[index]),
        Some(byte) => u8::try_from(byte).ok().map(SpacedToken::Byte),
    }
}

/// Ids below have a token.
pub const SPACED_IDS: u32 = 12 + 256;

/// Id of a byte's token.
pub fn byte_id(byte: u8) -> u32 {
    12 + u32::from(byte)
}

/// Decoder like SentencePiece's: ▁ is a space, that of the first token is dropped, runs of byte
/// tokens are UTF-8 or one U+FFFD for each byte.
#[derive(Debug)]
pub struct SpacedTokens;

impl TokenDecoder for SpacedTokens {
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let mut text = String::new();
        let mut run = Vec::new();
        for &id in ids {
            let token = match spaced_token(id) {
                None => continue,
                Some(SpacedToken::Special(_)) if skip_special_tokens => continue,
                Some(SpacedToken::Byte(byte)) => {
                    run.push(byte);
                    continue;
                }
                Some(SpacedToken::Special(token) | SpacedToken::Word(token)) => token,
            };
            text += &decode_byte_run(&run);
            run.clear();
            text += &token.replace('▁', " ");
        }
        text += &decode_byte_run(&run);
        text.strip_prefix(' ').unwrap_or(&text).to_owned()
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        match spaced_token(id) {
            None => Cow::Borrowed(&[]),
            Some(SpacedToken::Byte(byte)) => Cow::Owned(vec![byte]),
            Some(SpacedToken::Special(token)) => Cow::Borrowed(token.as_bytes()),
            Some(SpacedToken::Word(token)) => Cow::Owned(token.replace('▁', " ").into_bytes()),
        }
    }

    fn is_special(&self, id: u32) -> bool {
        matches!(spaced_token(id), Some(SpacedToken::Special(_)))
    }

    fn is_bytewise(&self) -> bool {
        false
    }
}

pub fn decode_byte_run(run: &[u8]) -> String {
    String::from_utf8(run.to_vec()).unwrap_or_else(|_| "\u{fffd}".repeat(run.len()))
}

/// A tokenizer of `tokenizers`. `is_bytewise` is what the caller says of it.
#[derive(Debug)]
pub struct LoadedTokenizer {
    pub tokenizer: Tokenizer,
    pub is_bytewise: bool,
    byte_of: HashMap<char, u8>,
}

impl LoadedTokenizer {
    fn new(file: &Value, is_bytewise: bool) -> Self {
        Self {
            tokenizer: file.to_string().parse().unwrap(),
            is_bytewise,
            byte_of: byte_level_letters().into_iter().zip(0..=u8::MAX).collect(),
        }
    }
}

impl TokenDecoder for LoadedTokenizer {
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        self.tokenizer.decode(ids, skip_special_tokens).unwrap()
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        let Some(token) = self.tokenizer.id_to_token(id) else {
            return Cow::Borrowed(&[]);
        };
        if !self.is_bytewise {
            return Cow::Owned(token.into_bytes());
        }
        let letters = token.chars();
        Cow::Owned(letters.map(|letter| self.byte_of[&letter]).collect())
    }

    fn is_special(&self, id: u32) -> bool {
        let added = self.tokenizer.get_added_vocabulary();
        let token = self.tokenizer.id_to_token(id);
        token.is_some_and(|token| added.is_special_token(&token))
    }

    fn is_bytewise(&self) -> bool {
        self.is_bytewise
    }
}

/// Letters of byte-level BPE for the bytes 0 to 255 (Radford et al. 2019, GPT-2).
fn byte_level_letters() -> Vec<char> {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut replaced = 0;
    (0..=u8::MAX)
        .map(|byte| {
            if is_printable(byte) {
                return char::from(byte);
            }
            replaced += 1;
            char::from_u32(255 + replaced).unwrap()
        })
        .collect()
}

/// Byte-level BPE as GPT-2's: `<s>` is id 0, then the tokens of [`TOKENS`], then one for each byte.
pub fn byte_level_tokenizer(is_bytewise: bool) -> LoadedTokenizer {
    let letters = byte_level_letters();
    let spell = |bytes: &[u8]| -> String {
        bytes
            .iter()
            .map(|&byte| letters[usize::from(byte)])
            .collect()
    };
    let mut tokens: Vec<String> = vec!["<s>".to_owned()];
    tokens.extend(TOKENS.iter().map(|token| spell(token)));
    for byte in 0..=u8::MAX {
        let token = spell(&[byte]);
        if !tokens.contains(&token) {
            tokens.push(token);
        }
    }
    let file = tokenizer_file(
        json!({"type": "BPE", "vocab": number_tokens(&tokens), "merges": []}),
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
        &["<s>"],
    );
    LoadedTokenizer::new(&file, is_bytewise)
}

/// Llama 2's decoders with the tokens of [`spaced_token`].
pub fn llama_tokenizer() -> LoadedTokenizer {
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    spaced_tokenizer(decoder)
}

/// A Metaspace decoder behind byte fallback.
pub fn metaspace_tokenizer() -> LoadedTokenizer {
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "ByteFallback"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
    ]});
    spaced_tokenizer(decoder)
}

fn spaced_tokenizer(decoder: Value) -> LoadedTokenizer {
    let tokens: Vec<String> = (0..SPACED_IDS)
        .filter_map(spaced_token)
        .map(|token| match token {
            SpacedToken::Special(token) | SpacedToken::Word(token) => token.to_owned(),
            SpacedToken::Byte(byte) => format!("<0x{byte:02X}>"),
        })
        .collect();
    let model = json!({
        "type": "BPE", "vocab": number_tokens(&tokens), "merges": [],
        "unk_token": "<unk>", "byte_fallback": true,
    });
    LoadedTokenizer::new(&tokenizer_file(model, decoder, &["<unk>", "<s>"]), false)
}

/// BERT's: words are joined with spaces, parts with ## without, spaces before points are removed.
pub fn word_piece_tokenizer() -> LoadedTokenizer {
    let tokens = [
        "[UNK]", "[CLS]", "the", "baton", "##s", "##ing", "a", "b", "##<", ".", ",", "'", "世", "é",
    ];
    let model = json!({
        "type": "WordPiece", "vocab": number_tokens(&tokens), "unk_token": "[UNK]",
        "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
    });
    let decoder = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    LoadedTokenizer::new(&tokenizer_file(model, decoder, &["[UNK]", "[CLS]"]), false)
}

fn number_tokens(tokens: &[impl AsRef<str>]) -> Value {
    tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.as_ref().to_owned(), json!(id)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// A tokenizer.json; the special tokens have the first ids.
fn tokenizer_file(model: Value, decoder: Value, special_tokens: &[&str]) -> Value {
    let added: Vec<Value> = special_tokens
        .iter()
        .enumerate()
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false,
            })
        })
        .collect();
    let pre_tokenizer = if decoder["type"] == "ByteLevel" {
        decoder.clone()
    } else {
        Value::Null
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null,
        "decoder": decoder, "model": model,
    })
}
