//! Tokenizer of simulated engines: four bytes of text are one token, whose id they are.
//!
//! Encoding copies bytes, lengths are exact (prompts of the benchmarks come in words of four
//! characters), and equal prefixes of text are equal prefixes of tokens. Text beyond ASCII can be
//! encoded, not decoded: the top bit of an id is lost.

use std::borrow::Cow;
use std::sync::Arc;

use super::{TextTokenizer, TokenDecoder};

/// Bytes of text in one token, at most.
const TOKEN_BYTES: usize = 4;
/// Ids are 31 bits, as the rows of no embedding reach further.
const ID_MASK: u32 = 0x7fff_ffff;

/// See the module.
#[derive(Debug, Default, Clone, Copy)]
pub struct FourByteTokenizer;

impl FourByteTokenizer {
    fn bytes_of(id: u32) -> Vec<u8> {
        let mut bytes = id.to_le_bytes().to_vec();
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        bytes
    }
}

impl TextTokenizer for FourByteTokenizer {
    fn encode(&self, text: &str, _add_special_tokens: bool) -> Result<Arc<[u32]>, String> {
        let tokens = text.as_bytes().chunks(TOKEN_BYTES);
        let ids = tokens.map(|token| {
            let mut bytes = [0; TOKEN_BYTES];
            bytes[..token.len()].copy_from_slice(token);
            u32::from_le_bytes(bytes) & ID_MASK
        });
        Ok(ids.collect())
    }

    fn vocab_size(&self) -> u32 {
        ID_MASK + 1
    }

    fn max_chars_per_token(&self) -> usize {
        TOKEN_BYTES
    }

    fn id_of(&self, token: &str) -> Option<u32> {
        match *self.encode(token, false).ok()? {
            [id] => Some(id),
            _ => None,
        }
    }

    /// None: every token is four bytes of text, whatever these are.
    fn added_id_of(&self, _token: &str) -> Option<u32> {
        None
    }

    fn name_of(&self, id: u32) -> Option<String> {
        Some(String::from_utf8_lossy(&Self::bytes_of(id)).into_owned())
    }

    /// None: every id is four bytes of text.
    fn tokens_from(&self, _first_id: u32) -> Vec<(u32, String)> {
        Vec::new()
    }
}

impl TokenDecoder for FourByteTokenizer {
    fn decode(&self, ids: &[u32], _skip_special_tokens: bool) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| Self::bytes_of(*id)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Owned(Self::bytes_of(id))
    }

    fn is_special(&self, _id: u32) -> bool {
        false
    }

    fn is_bytewise(&self) -> bool {
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn four_bytes_are_one_token() {
        let tokenizer = FourByteTokenizer;
        let ids = tokenizer.encode("word one", true).unwrap();
        assert_eq!(
            *ids,
            [u32::from_le_bytes(*b"word"), u32::from_le_bytes(*b" one")]
        );
        assert_eq!(tokenizer.decode(&ids, true), "word one");
        assert_eq!(&*tokenizer.token_bytes(ids[1]), b" one");
        let short = tokenizer.encode("words", true).unwrap();
        assert_eq!(tokenizer.decode(&short, true), "words");
        assert_eq!(tokenizer.id_of("s"), Some(short[1]));
        assert_eq!(tokenizer.id_of("words"), None);
        assert_eq!(tokenizer.encode("", true).unwrap().len(), 0);
        let ids = tokenizer.encode("é😀ü", true).unwrap();
        assert!(ids.iter().all(|id| *id < tokenizer.vocab_size()));
    }
}
