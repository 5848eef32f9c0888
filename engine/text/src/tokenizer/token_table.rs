//! Bytes of every token of a vocabulary, in one buffer.

use std::collections::HashMap;
use std::sync::LazyLock;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::{Model, Tokenizer};

/// Byte of each printable stand-in: the inverse of byte-level BPE's alphabet (Radford et al. 2019,
/// GPT-2).
static BYTE_OF: LazyLock<HashMap<char, u8>> = LazyLock::new(|| {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let printable = (0..=u8::MAX).filter(|byte| is_printable(*byte));
    let other = (0..=u8::MAX).filter(|byte| !is_printable(*byte));
    let printable = printable.map(|byte| (char::from(byte), byte));
    let other = (0x100_u32..).zip(other);
    let other = other.filter_map(|(code, byte)| Some((char::from_u32(code)?, byte)));
    printable.chain(other).collect()
});

/// Stand-in of each byte.
static STAND_INS: LazyLock<[char; 256]> = LazyLock::new(|| {
    let mut stand_ins = ['\0'; 256];
    for (stand_in, byte) in BYTE_OF.iter() {
        stand_ins[usize::from(*byte)] = *stand_in;
    }
    stand_ins
});

/// Stand-in of a byte in the names of byte-level BPE's tokens.
pub fn stand_in(byte: u8) -> char {
    STAND_INS[usize::from(byte)]
}

/// Bytes of the tokens with the ids from 0 on, and which of them are special.
#[derive(Debug, Default)]
pub struct TokenTable {
    bytes: Vec<u8>,
    /// End of each token's bytes.
    ends: Vec<u32>,
    special: Vec<bool>,
    is_bytewise: bool,
}

impl TokenTable {
    /// `size`: one more than the largest id. Cost: about 0.1 µs for each id.
    pub fn of(hf: &Tokenizer, size: u32) -> Self {
        let added = hf.get_added_vocabulary();
        let kind = DecoderKind::of(hf.get_decoder());
        let mut table = Self {
            is_bytewise: kind == DecoderKind::ByteLevel,
            ..Self::default()
        };
        for id in 0..size {
            let of_added = added.simple_id_to_token(id);
            let is_added = of_added.is_some();
            let name = of_added.or_else(|| hf.get_model().id_to_token(id));
            let name = name.unwrap_or_default();
            let bytes = if is_added {
                let given = added.get_added_tokens_decoder().get(&id);
                given.map_or(name.as_str(), |token| &token.content).into()
            } else {
                kind.bytes_of(&name)
            };
            // The decoder of byte-level BPE reads stand-ins in added tokens too.
            let decoded = byte_level_bytes(&name).unwrap_or_else(|| name.clone().into_bytes());
            table.is_bytewise &= decoded == bytes;
            table.bytes.extend_from_slice(&bytes);
            table.ends.push(table.bytes.len() as u32);
            table.special.push(added.is_special_token(&name));
        }
        table
    }

    /// Empty for ids without a token.
    pub fn bytes_of(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else {
            return &[];
        };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..*end as usize]
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// True where a sequence's text is the bytes of its tokens, joined.
    pub fn is_bytewise(&self) -> bool {
        self.is_bytewise
    }
}

/// How the names of tokens stand for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DecoderKind {
    /// The decoder of byte-level BPE, alone.
    ByteLevel,
    /// Byte-level BPE's among others.
    WithByteLevel,
    Other,
}

impl DecoderKind {
    fn of(decoder: Option<&DecoderWrapper>) -> Self {
        match decoder {
            Some(DecoderWrapper::ByteLevel(_)) => Self::ByteLevel,
            Some(DecoderWrapper::Sequence(sequence)) => {
                let decoders = sequence.get_decoders();
                let is_byte_level = |one: &_| matches!(one, DecoderWrapper::ByteLevel(_));
                match decoders {
                    [one] if is_byte_level(one) => Self::ByteLevel,
                    several if several.iter().any(is_byte_level) => Self::WithByteLevel,
                    _ => Self::Other,
                }
            }
            _ => Self::Other,
        }
    }

    fn bytes_of(self, name: &str) -> Vec<u8> {
        if self != Self::Other
            && let Some(bytes) = byte_level_bytes(name)
        {
            return bytes;
        }
        if self == Self::ByteLevel {
            return name.into();
        }
        if let Some(byte) = fallback_byte(name) {
            return vec![byte];
        }
        name.replace('\u{2581}', " ").into_bytes()
    }
}

/// Bytes of a name in byte-level BPE's alphabet; `None`: it has other characters.
fn byte_level_bytes(name: &str) -> Option<Vec<u8>> {
    name.chars().map(|c| BYTE_OF.get(&c).copied()).collect()
}

/// Byte of a byte-fallback token, `<0x0A>`.
fn fallback_byte(name: &str) -> Option<u8> {
    let digits = name.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    is_hex
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}
