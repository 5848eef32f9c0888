//! Tokenizers of other files than tokenizer.json.
//!
//! 1. [`VocabularyFile::read`] reads the file of a directory that counts;
//! 2. [`VocabularyFile::own_tokens`] tells which added tokens it brings, for the plan of the
//!    others;
//! 3. [`VocabularyFile::text_model`] makes a [`TextModel`] of it, which gives the ids of the texts
//!    between added tokens, exactly as the library does for which the file was written;
//! 4. [`TextModel::tokenizer_json`] writes the same vocabulary as a tokenizer.json, so that names,
//!    bytes, added tokens and grammars are one case. It cannot say all that decides ids.
//!
//! * `sentencepiece`: tokenizer.model, with `model_proto` (its fields), `normalizer` and `unigram`;
//! * `ranks`: byte-pair encoding by rank, of `tekken` (tekken.json) and `kimi` (tiktoken.model);
//! * `merges`: the loop of both kinds of byte-pair encoding;
//! * `piece_trie`: finds pieces at the begin of a text;
//! * `tokenizer_json`: members of a tokenizer.json.

mod kimi;
mod merges;
mod model_proto;
mod normalizer;
mod piece_trie;
mod ranks;
mod sentencepiece;
mod tekken;
mod tokenizer_json;
mod unigram;

use std::sync::Arc;

use serde_json::Value;

use self::kimi::KimiFile;
use self::ranks::RankModel;
pub use self::sentencepiece::SentencePieceModel;
use self::tekken::TekkenHeader;
use super::added_tokens::Members;

/// Members of tokenizer_config.json that say how these models are used.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct ModelSettings {
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    /// True: a dummy prefix stands behind added tokens too, not only at the start of a text.
    pub legacy: Option<bool>,
    /// False: there is no dummy prefix.
    pub add_prefix_space: Option<bool>,
}

impl ModelSettings {
    /// For fingerprints.
    pub fn canonical(self) -> String {
        let Self {
            add_bos_token,
            add_eos_token,
            legacy,
            add_prefix_space,
        } = self;
        let members = [add_bos_token, add_eos_token, legacy, add_prefix_space];
        let shown = members.map(|member| match member {
            None => "-",
            Some(true) => "1",
            Some(false) => "0",
        });
        shown.concat()
    }
}

/// Where a blank is put before a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DummyPrefix {
    Nowhere,
    AtStart,
    BehindAddedTokens,
}

/// A file that holds a vocabulary, read.
#[derive(Debug)]
pub enum VocabularyFile {
    TokenizerJson(Vec<u8>),
    SentencePiece {
        content: Vec<u8>,
        model: Arc<SentencePieceModel>,
    },
    Tekken {
        content: Vec<u8>,
        header: TekkenHeader,
    },
    Kimi {
        content: Vec<u8>,
        file: KimiFile,
    },
}

/// Names of the files, the one that counts before the others first.
pub const VOCABULARY_FILES: [&str; 4] = [
    "tokenizer.json",
    "tekken.json",
    "tokenizer.model",
    "tiktoken.model",
];

impl VocabularyFile {
    /// `name`: one of [`VOCABULARY_FILES`]. `config`: tokenizer_config.json. `Err`: what is wrong
    /// with the content.
    pub fn read(name: &str, content: Vec<u8>, config: &Members) -> Result<Self, String> {
        Ok(match name {
            "tekken.json" => {
                let header = TekkenHeader::read(&content)?;
                Self::Tekken { content, header }
            }
            "tokenizer.model" => {
                let model = Arc::new(SentencePieceModel::read(&content)?);
                Self::SentencePiece { content, model }
            }
            "tiktoken.model" => {
                let file = KimiFile::read(&content, config)?;
                Self::Kimi { content, file }
            }
            _ => Self::TokenizerJson(content),
        })
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::TokenizerJson(_) => "tokenizer.json",
            Self::SentencePiece { .. } => "tokenizer.model",
            Self::Tekken { .. } => "tekken.json",
            Self::Kimi { .. } => "tiktoken.model",
        }
    }

    pub fn content(&self) -> &[u8] {
        match self {
            Self::TokenizerJson(content)
            | Self::SentencePiece { content, .. }
            | Self::Tekken { content, .. }
            | Self::Kimi { content, .. } => content,
        }
    }

    /// `added_tokens` of a tokenizer.json for this file; `None`: it is one.
    pub fn own_tokens(&self) -> Option<Vec<Value>> {
        match self {
            Self::TokenizerJson(_) => None,
            Self::SentencePiece { model, .. } => Some(model.control_tokens()),
            Self::Tekken { header, .. } => Some(header.added_tokens()),
            Self::Kimi { file, .. } => Some(file.added_tokens()),
        }
    }

    /// Own tokens that the texts of users do not contain, by the library of the file: not those of
    /// Kimi, whose tokenizer finds them everywhere.
    pub fn control_tokens(&self) -> Vec<Value> {
        match self {
            Self::TokenizerJson(_) | Self::Kimi { .. } => Vec::new(),
            Self::SentencePiece { .. } | Self::Tekken { .. } => {
                self.own_tokens().unwrap_or_default()
            }
        }
    }

    /// Names of tokens in the variables of chat templates, and their texts, where the file tells
    /// them.
    pub fn named_tokens(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::TokenizerJson(_) => Vec::new(),
            Self::SentencePiece { model, .. } => {
                let ids = [
                    ("bos_token", model.bos_id()),
                    ("eos_token", model.eos_id()),
                    ("unk_token", Some(model.unknown_id())),
                ];
                let known = ids.into_iter();
                known
                    .filter_map(|(name, id)| Some((name, model.piece(id?).to_owned())))
                    .collect()
            }
            Self::Tekken { header, .. } => {
                let names = [
                    ("bos_token", tekken::BOS_TOKEN),
                    ("eos_token", tekken::EOS_TOKEN),
                ];
                let known = names.into_iter();
                known
                    .filter(|(_, text)| header.id_of(text).is_some())
                    .map(|(name, text)| (name, text.to_owned()))
                    .collect()
            }
            Self::Kimi { .. } => kimi::NAMED_TOKENS
                .map(|(name, text)| (name, text.to_owned()))
                .into(),
        }
    }

    /// `Ok(None)`: the tokenizers library makes the ids. `Err`: what is wrong with the file.
    pub fn text_model(&self, settings: ModelSettings) -> Result<Option<TextModel>, String> {
        let has_bos = settings.add_bos_token.unwrap_or(true);
        let has_eos = settings.add_eos_token.unwrap_or(false);
        Ok(match self {
            Self::TokenizerJson(_) => None,
            Self::SentencePiece { model, .. } => Some(TextModel {
                bos_id: model.bos_id().filter(|_| has_bos),
                eos_id: model.eos_id().filter(|_| has_eos),
                segmenter: Segmenter::SentencePiece {
                    model: model.clone(),
                    dummy_prefix: dummy_prefix(model, settings),
                },
            }),
            Self::Tekken { content, header } => Some(TextModel {
                bos_id: header.id_of(tekken::BOS_TOKEN).filter(|_| has_bos),
                eos_id: header.id_of(tekken::EOS_TOKEN).filter(|_| has_eos),
                segmenter: Segmenter::Ranks(Box::new(header.rank_model(content)?)),
            }),
            // Kimi's tokenizer adds no token to a text.
            Self::Kimi { file, .. } => Some(TextModel {
                bos_id: None,
                eos_id: None,
                segmenter: Segmenter::Ranks(Box::new(file.rank_model()?)),
            }),
        })
    }
}

fn dummy_prefix(model: &SentencePieceModel, settings: ModelSettings) -> DummyPrefix {
    if !model.adds_dummy_prefix() || settings.add_prefix_space == Some(false) {
        DummyPrefix::Nowhere
    } else if settings.legacy == Some(true) {
        DummyPrefix::BehindAddedTokens
    } else {
        DummyPrefix::AtStart
    }
}

/// Makes the ids of texts between added tokens.
#[derive(Debug)]
pub struct TextModel {
    /// Put before a text if special tokens are added.
    pub bos_id: Option<u32>,
    /// Put behind it.
    pub eos_id: Option<u32>,
    segmenter: Segmenter,
}

#[derive(Debug)]
enum Segmenter {
    SentencePiece {
        model: Arc<SentencePieceModel>,
        dummy_prefix: DummyPrefix,
    },
    Ranks(Box<RankModel>),
}

impl TextModel {
    /// Text of a tokenizer.json with the same tokens. `added_tokens`: its member of this name.
    /// `has_merges`: with the merges of a BPE model, which only readers without [`TextModel`] need.
    /// `Err`: two tokens have one name.
    pub fn tokenizer_json(
        &self,
        added_tokens: Vec<Value>,
        has_merges: bool,
    ) -> Result<String, String> {
        match &self.segmenter {
            Segmenter::SentencePiece { model, .. } => {
                Ok(model.tokenizer_json(added_tokens, has_merges))
            }
            Segmenter::Ranks(model) => model.tokenizer_json(added_tokens, has_merges),
        }
    }

    /// Appends the ids of `text`, in which no added token is looked for. `is_start`: nothing stands
    /// before it.
    pub fn encode(&self, text: &str, is_start: bool, ids: &mut Vec<u32>) -> Result<(), String> {
        match &self.segmenter {
            Segmenter::SentencePiece {
                model,
                dummy_prefix,
            } => {
                let has_prefix = match dummy_prefix {
                    DummyPrefix::Nowhere => false,
                    DummyPrefix::AtStart => is_start,
                    DummyPrefix::BehindAddedTokens => true,
                };
                model.encode(text, has_prefix, ids);
                Ok(())
            }
            Segmenter::Ranks(model) => model.encode(text, ids),
        }
    }

    /// Ids of a text depend on whether it is the start of a longer one.
    pub fn is_start_special(&self) -> bool {
        match &self.segmenter {
            Segmenter::SentencePiece { dummy_prefix, .. } => *dummy_prefix == DummyPrefix::AtStart,
            Segmenter::Ranks(_) => false,
        }
    }

    /// The model of SentencePiece, which makes the text of ids too.
    pub fn pieces(&self) -> Option<&SentencePieceModel> {
        match &self.segmenter {
            Segmenter::SentencePiece { model, .. } => Some(model),
            Segmenter::Ranks(_) => None,
        }
    }
}
