//! Text to token ids, with the checkpoint's tokenizer.json and the tokens that its other files add,
//! as the `tokenizers` wheel does it for the engines.
//!
//! Two caches, named as in SGLang's router:
//!
//! * L0 remembers whole texts;
//! * L1 remembers *segments*: a text is cut behind its special tokens (`<|im_end|>`), where
//!   encoding restarts, so the ids of the pieces are the ids of the whole. The turns of a
//!   conversation and its system prompt are found again wherever they stand, and only what is new
//!   is encoded.
//!
//! A tokenizer that treats the first word of a text in its own way (`prepend_scheme: first`) cannot
//! be cut: no L1 then.

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use parking_lot::Mutex;
use prometheus::IntCounterVec;
use tokenizers::{AddedToken, Tokenizer};

use super::added_tokens::AddedTokenPlan;
use super::cache::TextCache;
use crate::config::TokenizerFlags;

/// Segments are joined until they are this long: a shorter one is encoded as fast as it is found
/// [bytes].
const MIN_SEGMENT: usize = 64;
/// Characters of which a normalizer makes one, at most: NFC composes up to four (as in the
/// engines).
const NORMALIZER_SHRINKS: usize = 4;
/// Segments remembered at most; their bytes are what usually limits them.
const MAX_SEGMENTS: usize = 1 << 20;

pub struct PromptEncoder {
    hf: Tokenizer,
    /// A text has at least as many tokens as this goes into its length [characters].
    pub max_chars_per_token: usize,
    /// By whether special tokens were added, which gives other ids.
    whole: Option<[Mutex<TextCache>; 2]>,
    segments: Option<Segments>,
    /// Labels cache, result.
    lookups: IntCounterVec,
}

/// Finds where a text may be cut, and remembers the pieces.
struct Segments {
    cache: Mutex<TextCache>,
    /// All tokens that the tokenizer looks for in the raw text, found as it finds them.
    tokens: AhoCorasick,
    /// True for those that leave the text behind them alone.
    is_plain: Vec<bool>,
}

impl PromptEncoder {
    pub fn new(
        json: &[u8],
        added_tokens: &AddedTokenPlan,
        config: &TokenizerFlags,
        lookups: IntCounterVec,
    ) -> Result<Self, String> {
        let json = std::str::from_utf8(json).map_err(|err| err.to_string())?;
        // (Its `from_bytes` is generic, and would be compiled in this crate a second time.)
        let mut hf: Tokenizer = json
            .parse()
            .map_err(|err: tokenizers::Error| err.to_string())?;
        hf.add_tokens(added_tokens.tokens.iter().cloned())
            .map_err(|err| err.to_string())?;
        hf.set_encode_special_tokens(added_tokens.split_special_tokens);
        // A checkpoint may come with them switched on; the prompt is the whole text and only it.
        hf.with_truncation(None).map_err(|err| err.to_string())?;
        hf.with_padding(None);
        let whole = config.tokenizer_cache_enable_l0.then(|| {
            // Half for each kind: chat prompts bring their special tokens, completions get them
            // added.
            let bytes = config.tokenizer_cache_l0_max_memory / 2;
            let entries = config.tokenizer_cache_l0_max_entries.div_ceil(2);
            [(); 2].map(|()| Mutex::new(TextCache::new(bytes, entries)))
        });
        let longest = hf
            .get_vocab(true)
            .keys()
            .map(|token| token.chars().count())
            .max();
        let shrinks = hf.get_normalizer().map_or(1, |_| NORMALIZER_SHRINKS);
        let segments = if config.tokenizer_cache_enable_l1 {
            Segments::of(&hf, config.tokenizer_cache_l1_max_memory)?
        } else {
            None
        };
        let max_chars_per_token = longest.unwrap_or(1) * shrinks;
        Ok(Self {
            hf,
            max_chars_per_token,
            whole,
            segments,
            lookups,
        })
    }

    pub fn vocab_size(&self) -> usize {
        self.hf.get_vocab_size(true)
    }

    /// Bytes in the L0 and the L1 cache.
    pub fn cache_bytes(&self) -> [usize; 2] {
        let whole = self.whole.as_ref();
        let whole = whole.map_or(0, |both| both.iter().map(|one| one.lock().bytes()).sum());
        [
            whole,
            self.segments
                .as_ref()
                .map_or(0, |some| some.cache.lock().bytes()),
        ]
    }

    /// Cost: about 1 µs for four characters that no cache knows.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Arc<[u32]>, String> {
        let encode = || self.encode_pieces(text, add_special_tokens);
        let Some(both) = &self.whole else {
            return encode();
        };
        self.cached("l0", &both[usize::from(add_special_tokens)], text, encode)
    }

    fn encode_pieces(&self, text: &str, add_special_tokens: bool) -> Result<Arc<[u32]>, String> {
        // What is added around a text would be added around every piece.
        let Some(segments) = self.segments.as_ref().filter(|_| !add_special_tokens) else {
            return self.encode_plain(text, add_special_tokens);
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut from = 0;
        for end in segments.ends_in(text) {
            let piece = &text[from..end];
            from = end;
            let encode = || self.encode_plain(piece, false);
            ids.extend_from_slice(&self.cached("l1", &segments.cache, piece, encode)?);
        }
        if from < text.len() {
            ids.extend_from_slice(&self.encode_plain(&text[from..], false)?);
        }
        Ok(ids.into())
    }

    fn encode_plain(&self, text: &str, add_special_tokens: bool) -> Result<Arc<[u32]>, String> {
        let encoding = self.hf.encode_fast(text, add_special_tokens);
        let encoding = encoding.map_err(|err| err.to_string())?;
        Ok(Arc::from(encoding.get_ids()))
    }

    /// The ids of `text` from the cache `name`, or else from `encode`, for the next time.
    fn cached(
        &self,
        name: &str,
        cache: &Mutex<TextCache>,
        text: &str,
        encode: impl FnOnce() -> Result<Arc<[u32]>, String>,
    ) -> Result<Arc<[u32]>, String> {
        let known = cache.lock().get(text);
        let result = if known.is_some() { "hit" } else { "miss" };
        self.lookups.with_label_values(&[name, result]).inc();
        if let Some(ids) = known {
            return Ok(ids);
        }
        let ids = encode()?;
        cache.lock().put(text, &ids);
        Ok(ids)
    }
}

impl Segments {
    /// `None`: texts of this tokenizer cannot be cut.
    fn of(hf: &Tokenizer, max_bytes: usize) -> Result<Option<Self>, String> {
        let shown =
            serde_json::to_string(&hf.get_pre_tokenizer()).map_err(|err| err.to_string())?;
        if shown.contains("\"prepend_scheme\":\"first\"") {
            return Ok(None);
        }
        let added = hf.get_added_tokens_decoder();
        let is_split = hf.get_encode_special_tokens();
        let is_found = |token: &&AddedToken| !(token.normalized || (is_split && token.special));
        let raw: Vec<_> = added.values().filter(is_found).collect();
        if raw.is_empty() {
            return Ok(None);
        }
        let tokens = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(raw.iter().map(|token| &token.content))
            .map_err(|err| err.to_string())?;
        let is_plain = raw.iter().map(|token| !token.rstrip && !token.single_word);
        let cache = Mutex::new(TextCache::new(max_bytes, MAX_SEGMENTS));
        Ok(Some(Self {
            cache,
            tokens,
            is_plain: is_plain.collect(),
        }))
    }

    /// Ends of the segments of at least [`MIN_SEGMENT`] bytes; what is behind the last is no
    /// segment.
    fn ends_in<'a>(&'a self, text: &'a str) -> impl Iterator<Item = usize> + 'a {
        let mut last = 0;
        self.tokens.find_iter(text).filter_map(move |found| {
            let is_end =
                self.is_plain[found.pattern().as_usize()] && found.end() - last >= MIN_SEGMENT;
            is_end.then(|| {
                last = found.end();
                last
            })
        })
    }
}
