//! Fields of SentencePiece's model file that are used here, by their numbers in
//! sentencepiece_model.proto.

use prost::{Enumeration, Message};

#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pub pieces: Vec<Piece>,
    #[prost(message, optional, tag = "2")]
    pub trainer_spec: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    pub normalizer_spec: Option<NormalizerSpec>,
    #[prost(message, optional, tag = "5")]
    pub denormalizer_spec: Option<NormalizerSpec>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Piece {
    #[prost(string, optional, tag = "1")]
    pub piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub score: Option<f32>,
    #[prost(enumeration = "PieceKind", optional, tag = "3", default = "Normal")]
    pub r#type: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum PieceKind {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

#[derive(Clone, PartialEq, Message)]
pub struct TrainerSpec {
    #[prost(enumeration = "ModelKind", optional, tag = "3", default = "Unigram")]
    pub model_type: Option<i32>,
    #[prost(bool, optional, tag = "24")]
    pub treat_whitespace_as_suffix: Option<bool>,
    #[prost(bool, optional, tag = "35")]
    pub byte_fallback: Option<bool>,
    #[prost(string, optional, tag = "44", default = " \u{2047} ")]
    pub unk_surface: Option<String>,
    #[prost(string, optional, tag = "46", default = "<s>")]
    pub bos_piece: Option<String>,
    #[prost(string, optional, tag = "47", default = "</s>")]
    pub eos_piece: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Enumeration)]
#[repr(i32)]
pub enum ModelKind {
    Unigram = 1,
    Bpe = 2,
    Word = 3,
    Char = 4,
}

#[derive(Clone, PartialEq, Message)]
pub struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    pub precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3", default = "true")]
    pub add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4", default = "true")]
    pub remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5", default = "true")]
    pub escape_whitespaces: Option<bool>,
}
