//! A loaded tokenizer.json, or another file in this form, with the tokens that the files beside it
//! add.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tokenizers::{NormalizerWrapper, OffsetReferential, OffsetType, Tokenizer};

use super::added_tokens::AddedTokenPlan;
use super::text_model::{SentencePieceModel, TextModel};
use super::token_table::TokenTable;
use super::{TextTokenizer, TokenDecoder};
use crate::template::UserTextGuard;

/// Characters of which a normalizer makes one, at most: NFC composes up to four.
const NORMALIZER_SHRINKS: usize = 4;

/// Largest id of a token. Tables have an entry for each id; the largest vocabularies have 2^18.
const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// See the module. Thread-safe.
pub struct HfTokenizer {
    library: Tokenizer,
    table: TokenTable,
    vocab_size: u32,
    max_chars_per_token: usize,
    /// Makes the ids instead of the library.
    text_model: Option<TextModel>,
    guard: UserTextGuard,
}

impl HfTokenizer {
    /// `json`: bytes of tokenizer.json. `Err`: why they are no tokenizer. Cost: half a second for
    /// 10 MB.
    pub fn load(json: &[u8], added_tokens: &AddedTokenPlan) -> Result<Self, String> {
        let json = std::str::from_utf8(json).map_err(|err| err.to_string())?;
        // (Its `from_bytes` is generic, and would be compiled in this crate a second time.)
        let mut library: Tokenizer = json
            .parse()
            .map_err(|err: tokenizers::Error| err.to_string())?;
        library
            .add_tokens(added_tokens.tokens.iter().cloned())
            .map_err(|err| err.to_string())?;
        library.set_encode_special_tokens(added_tokens.split_special_tokens);
        // A checkpoint may come with them switched on; the prompt is the whole text and only it.
        library
            .with_truncation(None)
            .map_err(|err| err.to_string())?;
        library.with_padding(None);
        let vocabulary = library.get_vocab(true);
        let vocab_size = check_ids(&vocabulary)?;
        let longest = vocabulary.keys().map(|token| token.chars().count()).max();
        let shrinks = library.get_normalizer().map_or(1, |_| NORMALIZER_SHRINKS);
        let table = TokenTable::of(&library, vocab_size);
        Ok(Self {
            library,
            table,
            vocab_size,
            max_chars_per_token: longest.unwrap_or(1) * shrinks,
            text_model: None,
            guard: UserTextGuard::default(),
        })
    }

    /// The same tokens, with the ids of texts from `text_model`, and `guard` for the texts of
    /// users.
    pub fn with_text_model(mut self, text_model: TextModel, guard: UserTextGuard) -> Self {
        self.text_model = Some(text_model);
        self.guard = guard;
        self
    }

    pub(super) fn text_model(&self) -> Option<&TextModel> {
        self.text_model.as_ref()
    }

    /// The tokenizer of the tokenizers library.
    pub(super) fn library(&self) -> &Tokenizer {
        &self.library
    }
}

impl HfTokenizer {
    fn encode_with(
        &self,
        model: &TextModel,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Arc<[u32]>, String> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        ids.extend(model.bos_id.filter(|_| add_special_tokens));
        let added = self.library.get_added_vocabulary();
        let found = added.extract_and_normalize(None::<&NormalizerWrapper>, text);
        for (part, (start, _), tokens) in
            found.get_splits(OffsetReferential::Original, OffsetType::Byte)
        {
            match tokens {
                Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
                None => model.encode(&self.guard.unescape(part), start == 0, &mut ids)?,
            }
        }
        ids.extend(model.eos_id.filter(|_| add_special_tokens));
        Ok(ids.into())
    }

    /// Text of ids where the file's own library makes it of its pieces. Added tokens stand for
    /// their text.
    fn decode_pieces(
        &self,
        model: &SentencePieceModel,
        ids: &[u32],
        skips_special: bool,
    ) -> String {
        let added = self.library.get_added_tokens_decoder();
        let mut out = model.start_text();
        for id in ids {
            match added.get(id) {
                Some(_) if skips_special && self.is_special(*id) => out.push_added(""),
                Some(token) => out.push_added(&token.content),
                None => out.push_piece(*id),
            }
        }
        out.finish()
    }
}

/// Largest id plus one. `Err`: it is too large.
fn check_ids(vocabulary: &HashMap<String, u32>) -> Result<u32, String> {
    let last = vocabulary.iter().max_by_key(|(_, id)| **id);
    let Some((token, id)) = last else {
        return Ok(0);
    };
    if *id > MAX_TOKEN_ID {
        return Err(format!(
            "the token {token:?} has the id {id}; the largest that is taken is {MAX_TOKEN_ID}"
        ));
    }
    Ok(id + 1)
}

impl TextTokenizer for HfTokenizer {
    fn guard(&self) -> &UserTextGuard {
        &self.guard
    }

    /// Cost: about 1 µs for four characters.
    fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Arc<[u32]>, String> {
        let encode = AssertUnwindSafe(|| match &self.text_model {
            Some(model) => self.encode_with(model, text, add_special_tokens),
            None => {
                let encoding = self.library.encode_fast(text, add_special_tokens);
                let encoding = encoding.map_err(|err| err.to_string())?;
                Ok(Arc::from(encoding.get_ids()))
            }
        });
        // An assertion of the library must end one request, not a process.
        catch_unwind(encode).map_err(|_| "the library panicked".to_owned())?
    }

    fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    fn max_chars_per_token(&self) -> usize {
        self.max_chars_per_token
    }

    fn id_of(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }

    fn added_id_of(&self, token: &str) -> Option<u32> {
        let added = self.library.get_added_vocabulary().get_vocab();
        added.get(token).copied()
    }

    fn name_of(&self, id: u32) -> Option<String> {
        self.library.id_to_token(id)
    }

    fn tokens_from(&self, first_id: u32) -> Vec<(u32, String)> {
        if self.vocab_size <= first_id {
            return Vec::new();
        }
        let vocabulary = self.library.get_vocab(true);
        let found = vocabulary.into_iter().filter(|(_, id)| *id >= first_id);
        let by_id: BTreeMap<u32, String> = found.map(|(token, id)| (id, token)).collect();
        by_id.into_iter().collect()
    }
}

impl TokenDecoder for HfTokenizer {
    fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> String {
        if let Some(model) = self.text_model.as_ref().and_then(TextModel::pieces) {
            return self.decode_pieces(model, ids, skip_special_tokens);
        }
        if !self.is_bytewise() {
            let text = self.library.decode(ids, skip_special_tokens);
            return text.unwrap_or_default(); // no decoder of the library fails
        }
        let mut bytes = Vec::with_capacity(4 * ids.len());
        for id in ids {
            if !(skip_special_tokens && self.is_special(*id)) {
                bytes.extend_from_slice(self.table.bytes_of(*id));
            }
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(err) => String::from_utf8_lossy(err.as_bytes()).into_owned(),
        }
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.table.bytes_of(id))
    }

    fn is_special(&self, id: u32) -> bool {
        self.table.is_special(id)
    }

    fn is_bytewise(&self) -> bool {
        self.table.is_bytewise()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::super::golden::{MODELS, load};
    use super::*;

    /// A byte-level tokenizer of three words with these added tokens.
    fn byte_level(added_tokens: &str, normalizer: &str) -> HfTokenizer {
        let json = format!(
            r#"{{
                "version": "1.0", "truncation": null, "padding": null, "pre_tokenizer": null, "post_processor": null,
                "added_tokens": [{added_tokens}], "normalizer": {normalizer},
                "decoder": {{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}},
                "model": {{"type": "BPE", "vocab": {{"Ã": 0, "©": 1, "Ġa": 2}}, "merges": []}}
            }}"#
        );
        HfTokenizer::load(json.as_bytes(), &AddedTokenPlan::default()).unwrap()
    }

    fn added_token(id: u32, content: &str, is_normalized: bool) -> String {
        format!(
            r#"{{"id": {id}, "content": "{content}", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": {is_normalized}, "special": false}}"#
        )
    }

    #[test]
    fn byte_level_tokenizers_decode_bytewise() {
        for (name, is_bytewise) in [
            ("demo", true),
            ("chatml", true),
            ("llama3", true),
            ("mistral", false),
            ("gemma", false),
        ] {
            assert_eq!(load(name).is_bytewise(), is_bytewise, "{name}");
        }
        let plain = byte_level(&added_token(3, "<tool call>", false), "null");
        assert!(plain.is_bytewise());
        assert_eq!(&*plain.token_bytes(0), [0xc3]);
        assert_eq!(&*plain.token_bytes(2), b" a");
        assert_eq!(&*plain.token_bytes(3), b"<tool call>");
        assert_eq!(plain.decode(&[0, 1, 2, 9, 3], true), "é a<tool call>");
    }

    #[test]
    fn added_tokens_that_the_decoder_changes_are_not_joined_by_bytes() {
        // "é" is the stand-in of byte 0xE9 to the decoder.
        let stand_in = byte_level(&added_token(3, "é", false), "null");
        assert!(!stand_in.is_bytewise());
        assert_eq!(stand_in.decode(&[3], true), "\u{fffd}");
        assert_eq!(&*stand_in.token_bytes(3), "é".as_bytes());
        let lowercase = byte_level(&added_token(3, "<A>", true), r#"{"type": "Lowercase"}"#);
        assert_eq!(lowercase.decode(&[3], true), "<a>");
        assert!(!lowercase.is_bytewise());
    }

    #[test]
    fn id_for_which_a_table_would_be_huge_is_refused() {
        for id in [1_000_000_000, u32::MAX] {
            let json = r#"{"model": {"type": "WordLevel", "vocab": {"a": ID}, "unk_token": "a"}}"#;
            let json = json.replace("ID", &id.to_string());
            let loaded = HfTokenizer::load(json.as_bytes(), &AddedTokenPlan::default());
            let expected = format!(r#"the token "a" has the id {id}; the largest"#);
            assert!(loaded.err().unwrap().starts_with(&expected));
        }
    }

    #[test]
    fn sizes_and_names_are_the_vocabularys() {
        let tokenizer = byte_level(&added_token(3, "<tool>", false), "null");
        assert_eq!(tokenizer.vocab_size(), 4);
        assert_eq!(tokenizer.max_chars_per_token(), "<tool>".len());
        assert_eq!(tokenizer.id_of("<tool>"), Some(3));
        assert_eq!(tokenizer.id_of("none"), None);
        assert_eq!(tokenizer.added_id_of("<tool>"), Some(3));
        assert_eq!(tokenizer.id_of("Ġa"), Some(2));
        assert_eq!(tokenizer.name_of(2), Some("Ġa".to_owned()));
        assert_eq!(tokenizer.name_of(99), None);
        assert_eq!(tokenizer.added_id_of("Ġa"), None);
        assert_eq!(tokenizer.tokens_from(3), [(3, "<tool>".to_owned())]);
        assert_eq!(tokenizer.tokens_from(4), []);
        let composing = byte_level("", r#"{"type": "NFC"}"#);
        assert_eq!(composing.max_chars_per_token(), 2 * NORMALIZER_SHRINKS);
    }

    proptest! {
        #[test]
        fn texts_equal_those_of_the_library(
            ids in proptest::collection::vec(0u32..800, 0..24),
            skips in any::<bool>(),
        ) {
            thread_local! {
                static LOADED: Vec<HfTokenizer> = MODELS.map(load).into();
            }
            LOADED.with(|loaded| {
                for tokenizer in loaded {
                    let expected = tokenizer.library.decode(&ids, skips).unwrap();
                    prop_assert_eq!(tokenizer.decode(&ids, skips), expected);
                }
                Ok(())
            })?;
        }
    }
}
