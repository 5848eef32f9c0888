//! `tokenizer.model` of SentencePiece: unigram and BPE models, as SentencePiece 0.2 reads them.

use std::collections::HashMap;
use std::str;

use prost::Message;
use serde_json::{Value, json};

use super::merges::SymbolMerger;
use super::model_proto::{ModelKind, ModelProto, NormalizerSpec, PieceKind, TrainerSpec};
use super::normalizer::{BLANK, BlankRules, PieceNormalizer};
use super::piece_trie::PieceTrie;
use super::tokenizer_json::{added_token, merges_of, tokenizer_json};
use super::unigram::{PieceScore, UnigramModel};

/// See the module.
#[derive(Debug)]
pub struct SentencePieceModel {
    pieces: Vec<ModelPiece>,
    by_text: HashMap<String, u32>,
    bytes: Option<Box<[u32; 256]>>,
    unknown_id: u32,
    unknown_surface: String,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    normalizer: PieceNormalizer,
    adds_dummy_prefix: bool,
    blanks: BlankRules,
    segmentation: Segmentation,
}

#[derive(Debug)]
struct ModelPiece {
    text: String,
    score: f32,
    kind: PieceKind,
}

impl ModelPiece {
    /// Texts are made of it; an unused one only on the way to longer ones.
    fn is_segment(&self) -> bool {
        matches!(
            self.kind,
            PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused
        )
    }
}

#[derive(Debug)]
enum Segmentation {
    Unigram(UnigramModel),
    Bpe(BpeRanks),
}

/// Pieces of a BPE model by merge order.
#[derive(Debug)]
struct BpeRanks {
    /// By id: pieces of a higher score have a smaller rank, those of equal scores the same.
    ranks: Vec<u32>,
    longest: usize,
    has_unused: bool,
}

impl SentencePieceModel {
    /// `Err`: what is wrong with the file, or not supported.
    pub fn read(bytes: &[u8]) -> Result<Self, String> {
        let proto = ModelProto::decode(bytes)
            .map_err(|err| format!("it is no model of SentencePiece: {err}"))?;
        let trainer = proto.trainer_spec.unwrap_or_default();
        let normalizer = proto.normalizer_spec.unwrap_or_default();
        refuse_unsupported(&trainer, proto.denormalizer_spec.as_ref())?;
        let mut pieces = Vec::with_capacity(proto.pieces.len());
        let mut by_text = HashMap::with_capacity(proto.pieces.len());
        for (id, piece) in (0..).zip(proto.pieces) {
            let kind = piece.r#type();
            let score = piece.score();
            let text = piece.piece.unwrap_or_default();
            if text.is_empty() || by_text.insert(text.clone(), id).is_some() {
                return Err(format!("piece {id} ({text:?}) is empty or there twice"));
            }
            pieces.push(ModelPiece { text, score, kind });
        }
        let unknown = pieces.iter().zip(0..);
        let mut unknown = unknown.filter(|(piece, _)| piece.kind == PieceKind::Unknown);
        let (Some((_, unknown_id)), None) = (unknown.next(), unknown.next()) else {
            return Err("it has no unknown piece, or several".to_owned());
        };
        let blanks = BlankRules {
            remove_extra: normalizer.remove_extra_whitespaces(),
            escape: normalizer.escape_whitespaces(),
        };
        let control_id = |text: &str| {
            let id = by_text.get(text).copied();
            id.filter(|id| pieces[*id as usize].kind == PieceKind::Control)
        };
        Ok(Self {
            bytes: byte_ids(&by_text, trainer.byte_fallback())?,
            unknown_id,
            unknown_surface: trainer.unk_surface().to_owned(),
            bos_id: control_id(trainer.bos_piece()),
            eos_id: control_id(trainer.eos_piece()),
            normalizer: PieceNormalizer::new(
                normalizer.precompiled_charsmap(),
                user_defined(&pieces),
                blanks,
            )
            .map_err(|err| format!("precompiled_charsmap cannot be read: {err}"))?,
            adds_dummy_prefix: normalizer.add_dummy_prefix(),
            blanks,
            segmentation: match trainer.model_type() {
                ModelKind::Bpe => Segmentation::Bpe(BpeRanks::of(&pieces)),
                _ => Segmentation::Unigram(unigram_of(&pieces)),
            },
            pieces,
            by_text,
        })
    }

    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    pub fn unknown_id(&self) -> u32 {
        self.unknown_id
    }

    pub fn adds_dummy_prefix(&self) -> bool {
        self.adds_dummy_prefix
    }

    /// Text of a piece as the file has it.
    pub fn piece(&self, id: u32) -> &str {
        &self.pieces[id as usize].text
    }

    /// Pieces that no text contains, in the form of `added_tokens` of tokenizer.json.
    pub fn control_tokens(&self) -> Vec<Value> {
        let pieces = self.pieces.iter().zip(0..);
        let control = pieces.filter(|(piece, _)| piece.kind == PieceKind::Control);
        control
            .map(|(piece, id)| added_token(id, &piece.text, true))
            .collect()
    }

    /// Appends the ids of a text. `has_dummy_prefix`: a blank is put before it.
    pub fn encode(&self, text: &str, has_dummy_prefix: bool, ids: &mut Vec<u32>) {
        let normalized = self.normalizer.normalize(text, has_dummy_prefix);
        let mut is_behind_unknown = false;
        let mut emit = |piece: &str, id: Option<u32>| {
            let id = id.unwrap_or(self.unknown_id);
            let is_unknown = id == self.unknown_id;
            match &self.bytes {
                Some(bytes) if is_unknown => {
                    ids.extend(piece.bytes().map(|byte| bytes[usize::from(byte)]));
                }
                // Unknown pieces behind each other are one.
                _ if is_unknown && is_behind_unknown => {}
                _ => ids.push(id),
            }
            is_behind_unknown = is_unknown;
        };
        match &self.segmentation {
            Segmentation::Unigram(model) => model.segment(&normalized, emit),
            Segmentation::Bpe(ranks) => self.merge(ranks, &normalized, &mut emit),
        }
    }

    /// An empty text, to which pieces are appended.
    pub fn start_text(&self) -> PieceText<'_> {
        PieceText::new(self)
    }

    fn merge(&self, ranks: &BpeRanks, text: &str, emit: &mut impl FnMut(&str, Option<u32>)) {
        // Length of the left part of each unused piece: it is taken apart again.
        let mut unused: HashMap<&str, usize> = HashMap::new();
        let mut merger = SymbolMerger::new(|start, middle, end| {
            let piece = text
                .get(start..end)
                .filter(|one| one.len() <= ranks.longest)?;
            let id = *self.by_text.get(piece)?;
            let known = &self.pieces[id as usize];
            if !known.is_segment() {
                return None;
            }
            if known.kind == PieceKind::Unused {
                unused.insert(piece, middle - start);
            }
            Some(ranks.ranks[id as usize])
        });
        let mut start = 0;
        while let Some(character) = text[start..].chars().next() {
            let behind = &text.as_bytes()[start..];
            let fixed = self.normalizer.user_defined().longest_prefix(behind);
            let end = start + fixed.unwrap_or(character.len_utf8());
            merger.push(start, end, fixed.is_some());
            start = end;
        }
        let merged = merger.merge();
        let taken_apart = ranks.has_unused.then_some(&unused);
        for (start, end) in merged {
            self.emit_merged(&text[start..end], taken_apart, emit);
        }
    }

    fn emit_merged(
        &self,
        piece: &str,
        unused: Option<&HashMap<&str, usize>>,
        emit: &mut impl FnMut(&str, Option<u32>),
    ) {
        let id = self.by_text.get(piece).copied();
        let is_unused = |id: u32| self.pieces[id as usize].kind == PieceKind::Unused;
        let left = unused.filter(|_| id.is_some_and(is_unused));
        match left.and_then(|unused| unused.get(piece)) {
            Some(len) => {
                let (left, right) = piece.split_at(*len);
                self.emit_merged(left, unused, emit);
                self.emit_merged(right, unused, emit);
            }
            None => emit(piece, id),
        }
    }

    /// The same pieces as a tokenizer.json, of which the tokenizers library and llguidance read the
    /// vocabulary. `added_tokens`: its member of this name.
    pub fn tokenizer_json(&self, added_tokens: Vec<Value>, has_merges: bool) -> String {
        let texts = self.pieces.iter().map(|piece| &piece.text);
        let has_bytes = self.bytes.is_some();
        let unknown = self.piece(self.unknown_id);
        let model = match &self.segmentation {
            Segmentation::Unigram(_) => {
                let scores = self.pieces.iter().map(|piece| piece.score);
                let vocab: Vec<_> = texts.zip(scores).collect();
                json!({
                    "type": "Unigram", "unk_id": self.unknown_id, "vocab": vocab,
                    "byte_fallback": has_bytes,
                })
            }
            Segmentation::Bpe(ranks) => {
                let vocab: serde_json::Map<_, _> = texts
                    .zip(0..)
                    .map(|(text, id)| (text.clone(), Value::from(id)))
                    .collect();
                let merges = if has_merges {
                    self.merges(ranks)
                } else {
                    Vec::new()
                };
                json!({
                    "type": "BPE", "vocab": vocab, "merges": merges, "unk_token": unknown,
                    "fuse_unk": true, "byte_fallback": has_bytes,
                })
            }
        };
        let mut decoders = vec![json!(
            {"type": "Replace", "pattern": {"String": BLANK}, "content": " "}
        )];
        if has_bytes {
            decoders.push(json!({"type": "ByteFallback"}));
        }
        decoders.push(json!({"type": "Fuse"}));
        if self.adds_dummy_prefix {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        tokenizer_json(
            model,
            json!({"type": "Replace", "pattern": {"String": " "}, "content": BLANK}),
            Value::Null,
            json!({"type": "Sequence", "decoders": decoders}),
            added_tokens,
        )
    }

    fn merges(&self, ranks: &BpeRanks) -> Vec<(String, String)> {
        let segment = |text: &str| {
            let id = *self.by_text.get(text)?;
            let piece = &self.pieces[id as usize];
            piece.is_segment().then(|| ranks.ranks[id as usize])
        };
        let texts = self.pieces.iter().filter(|piece| piece.is_segment());
        merges_of(texts.map(|piece| piece.text.as_str()), segment)
    }
}

fn refuse_unsupported(
    trainer: &TrainerSpec,
    denormalizer: Option<&NormalizerSpec>,
) -> Result<(), String> {
    let kind = trainer.model_type();
    if !matches!(kind, ModelKind::Unigram | ModelKind::Bpe) {
        return Err(format!(
            "its model_type {kind:?} is not supported, only Unigram and Bpe are"
        ));
    }
    if trainer.treat_whitespace_as_suffix() {
        return Err("treat_whitespace_as_suffix is not supported".to_owned());
    }
    let denormalizes = denormalizer.is_some_and(|spec| !spec.precompiled_charsmap().is_empty());
    if denormalizes {
        return Err("a denormalizer_spec with replacements is not supported".to_owned());
    }
    Ok(())
}

/// Ids of the pieces that stand for bytes; `None`: unknown characters stay unknown.
fn byte_ids(
    by_text: &HashMap<String, u32>,
    byte_fallback: bool,
) -> Result<Option<Box<[u32; 256]>>, String> {
    if !byte_fallback {
        return Ok(None);
    }
    let mut ids = Box::new([0; 256]);
    for (byte, id) in ids.iter_mut().enumerate() {
        let piece = format!("<0x{byte:02X}>");
        let found = by_text.get(&piece).copied();
        *id = found.ok_or_else(|| format!("byte_fallback is set, but there is no {piece}"))?;
    }
    Ok(Some(ids))
}

fn user_defined(pieces: &[ModelPiece]) -> PieceTrie {
    let pieces = pieces.iter().zip(0..);
    let user_defined = pieces.filter(|(piece, _)| piece.kind == PieceKind::UserDefined);
    PieceTrie::new(user_defined.map(|(piece, id)| (piece.text.as_str(), id)))
}

fn unigram_of(pieces: &[ModelPiece]) -> UnigramModel {
    let pieces = pieces.iter().zip(0..).filter_map(|(piece, id)| {
        let score = match piece.kind {
            PieceKind::Normal => PieceScore::Normal(piece.score),
            PieceKind::UserDefined => PieceScore::UserDefined,
            _ => return None,
        };
        Some((id, piece.text.as_str(), score))
    });
    UnigramModel::new(&pieces.collect::<Vec<_>>())
}

impl BpeRanks {
    fn of(pieces: &[ModelPiece]) -> Self {
        let mut scores: Vec<f32> = pieces.iter().map(|piece| piece.score).collect();
        scores.sort_unstable_by(|one, other| other.total_cmp(one));
        scores.dedup();
        let rank_of =
            |piece: &ModelPiece| scores.partition_point(|score| *score > piece.score) as u32;
        let segments = pieces.iter().filter(|piece| piece.is_segment());
        Self {
            ranks: pieces.iter().map(rank_of).collect(),
            longest: segments.map(|piece| piece.text.len()).max().unwrap_or(0),
            has_unused: pieces.iter().any(|piece| piece.kind == PieceKind::Unused),
        }
    }
}

/// Text of pieces, appended in order.
pub struct PieceText<'a> {
    model: &'a SentencePieceModel,
    text: String,
    /// Bytes of byte pieces that stand behind each other.
    bytes: Vec<u8>,
    /// No text yet: the blank that a text begins with is dropped.
    is_at_start: bool,
    /// The blank was dropped.
    has_dropped_blank: bool,
}

impl<'a> PieceText<'a> {
    fn new(model: &'a SentencePieceModel) -> Self {
        Self {
            model,
            text: String::new(),
            bytes: Vec::new(),
            is_at_start: true,
            has_dropped_blank: false,
        }
    }

    /// Appends the text of a piece. Ids without one have no text.
    pub fn push_piece(&mut self, id: u32) {
        let Some(piece) = self.model.pieces.get(id as usize) else {
            return;
        };
        if let Some(bytes) = &self.model.bytes
            && piece.kind == PieceKind::Byte
            && let Some(byte) = bytes.iter().position(|other| *other == id)
        {
            self.bytes.push(byte as u8);
            return;
        }
        match piece.kind {
            PieceKind::Control => self.push_added(""),
            PieceKind::Unknown => self.push_added(&self.model.unknown_surface),
            _ => self.push_text(&piece.text),
        }
    }

    /// Appends a text as it is.
    pub fn push_added(&mut self, text: &str) {
        self.end_piece();
        self.text.push_str(text);
    }

    /// The next text begins: bytes of characters end here.
    fn end_piece(&mut self) {
        self.flush_bytes();
        if self.has_dropped_blank || !self.text.is_empty() {
            self.is_at_start = false;
        }
        self.has_dropped_blank = false;
    }

    fn push_text(&mut self, piece: &str) {
        self.end_piece();
        let mut piece = piece;
        let drops_blank = self.model.adds_dummy_prefix || self.model.blanks.remove_extra;
        if self.is_at_start && drops_blank {
            let behind = piece.strip_prefix(BLANK);
            // Where extra blanks are removed all blanks at the start are dropped.
            self.has_dropped_blank = behind.is_some() && !self.model.blanks.remove_extra;
            piece = behind.unwrap_or(piece);
        }
        self.text.push_str(&piece.replace(BLANK, " "));
    }

    /// Bytes that are no character become U+FFFD each.
    fn flush_bytes(&mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut rest = bytes.as_slice();
        while let Err(error) = str::from_utf8(rest) {
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            self.text
                .push_str(str::from_utf8(valid).unwrap_or_default());
            self.text.push(char::REPLACEMENT_CHARACTER);
            rest = &invalid[1..];
        }
        self.text.push_str(str::from_utf8(rest).unwrap_or_default());
    }

    pub fn finish(mut self) -> String {
        self.flush_bytes();
        self.text
    }
}
