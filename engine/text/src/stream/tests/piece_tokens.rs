//! Tokenizer of the tests of answers: the caller cuts a text into tokens.

use std::borrow::Cow;
use std::sync::Arc;

use crate::tokenizer::{TextTokenizer, TokenDecoder};

/// Markers and other added tokens, then a token for every byte, then pieces of texts.
#[derive(Debug, Default, Clone)]
pub struct PieceTokens {
    added: Vec<&'static str>,
    /// Added tokens are special.
    is_special: bool,
    pieces: Vec<Vec<u8>>,
}

impl PieceTokens {
    pub fn new(added: &[&'static str], is_special: bool) -> Self {
        Self {
            added: added.to_vec(),
            is_special,
            pieces: Vec::new(),
        }
    }

    /// Ids of a text with a cut at every byte that `is_cut` returns true for, and beside every
    /// added token.
    pub fn cut(&mut self, text: &str, is_cut: &dyn Fn(usize) -> bool) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut piece: Vec<u8> = Vec::new();
        let mut start = 0;
        while start < text.len() {
            if let Some((id, len)) = self.added_at(text, start) {
                self.end_piece(&mut piece, &mut ids);
                ids.push(id);
                start += len;
                continue;
            }
            if is_cut(start) {
                self.end_piece(&mut piece, &mut ids);
            }
            piece.push(text.as_bytes()[start]);
            start += 1;
        }
        self.end_piece(&mut piece, &mut ids);
        ids
    }

    /// Id of a piece of text, in which no added token is recognized.
    pub fn text_id(&mut self, text: &str) -> u32 {
        let mut ids = Vec::new();
        self.end_piece(&mut text.as_bytes().to_vec(), &mut ids);
        ids[0]
    }

    fn added_at(&self, text: &str, start: usize) -> Option<(u32, usize)> {
        let rest = text.get(start..)?;
        let index = self
            .added
            .iter()
            .position(|added| rest.starts_with(added))?;
        Some((index as u32, self.added[index].len()))
    }

    fn end_piece(&mut self, piece: &mut Vec<u8>, ids: &mut Vec<u32>) {
        if piece.is_empty() {
            return;
        }
        let piece = std::mem::take(piece);
        if let [byte] = piece[..] {
            ids.push(self.byte_id(byte));
            return;
        }
        let found = self.pieces.iter().position(|other| *other == piece);
        let index = found.unwrap_or_else(|| {
            self.pieces.push(piece);
            self.pieces.len() - 1
        });
        ids.push((self.added.len() + 256 + index) as u32);
    }

    fn byte_id(&self, byte: u8) -> u32 {
        self.added.len() as u32 + u32::from(byte)
    }
}

impl TokenDecoder for PieceTokens {
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        let shown = ids
            .iter()
            .filter(|id| !(skip_special_tokens && self.is_special(**id)));
        let bytes: Vec<u8> = shown
            .flat_map(|id| self.token_bytes(*id).into_owned())
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        let id = id as usize;
        if let Some(added) = self.added.get(id) {
            return Cow::Borrowed(added.as_bytes());
        }
        let index = id - self.added.len();
        match u8::try_from(index) {
            Ok(byte) => Cow::Owned(vec![byte]),
            Err(_) => Cow::Borrowed(&self.pieces[index - 256]),
        }
    }

    fn is_special(&self, id: u32) -> bool {
        self.is_special && (id as usize) < self.added.len()
    }

    fn is_bytewise(&self) -> bool {
        true
    }
}

impl TextTokenizer for PieceTokens {
    fn encode(&self, text: &str, _add_special_tokens: bool) -> Result<Arc<[u32]>, String> {
        let mut tokens = self.clone();
        let ids = tokens.cut(text, &|_| true);
        Ok(ids.into())
    }

    fn vocab_size(&self) -> u32 {
        (self.added.len() + 256 + self.pieces.len()) as u32
    }

    fn max_chars_per_token(&self) -> usize {
        64
    }

    fn id_of(&self, token: &str) -> Option<u32> {
        self.added_id_of(token)
    }

    fn added_id_of(&self, token: &str) -> Option<u32> {
        let index = self.added.iter().position(|added| *added == token)?;
        Some(index as u32)
    }

    fn name_of(&self, id: u32) -> Option<String> {
        let bytes = self.token_bytes(id);
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn tokens_from(&self, _first_id: u32) -> Vec<(u32, String)> {
        Vec::new()
    }
}
