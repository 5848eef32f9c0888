//! Ids of texts, remembered in two caches, named as in SGLang's router:
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
use tokenizers::AddedToken;

use super::TextTokenizer;
use super::cache::TextCache;
use super::hf::HfTokenizer;
use super::text_model::TextModel;

/// Segments are joined until they are this long: a shorter one is encoded as fast as it is found
/// [bytes].
const MIN_SEGMENT: usize = 64;
/// Segments remembered at most; their bytes are what usually limits them.
const MAX_SEGMENTS: usize = 1 << 20;

/// Limits of the caches.
#[derive(Debug, Default, Clone, Copy)]
pub struct CacheLimits {
    /// Most texts, and their memory [bytes]; `None`: whole texts are not remembered.
    pub whole: Option<(usize, usize)>,
    /// Memory of segments [bytes]; `None`: they are not remembered.
    pub segment_bytes: Option<usize>,
}

/// Look-ups in one cache.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LookupCounts {
    pub hits: u64,
    pub misses: u64,
}

/// Look-ups in both caches.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct CacheLookups {
    pub whole: LookupCounts,
    pub segments: LookupCounts,
}

/// A tokenizer that remembers the ids of texts.
pub struct PromptEncoder {
    tokenizer: HfTokenizer,
    /// By whether special tokens were added, which gives other ids.
    whole: Option<[Mutex<TextCache>; 2]>,
    segments: Option<Segments>,
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
    pub fn new(tokenizer: HfTokenizer, limits: CacheLimits) -> Result<Self, String> {
        let whole = limits.whole.map(|(entries, bytes)| {
            // Half for each kind: chat prompts bring their special tokens, completions get them
            // added.
            [(); 2].map(|()| Mutex::new(TextCache::new(bytes / 2, entries.div_ceil(2))))
        });
        let segments = match limits.segment_bytes {
            Some(bytes) => Segments::of(&tokenizer, bytes)?,
            None => None,
        };
        Ok(Self {
            tokenizer,
            whole,
            segments,
        })
    }

    /// The tokenizer without the caches.
    pub fn tokenizer(&self) -> &HfTokenizer {
        &self.tokenizer
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

    /// Ids of a text; look-ups are added to `lookups`. Cost: about 1 µs for four characters that no
    /// cache knows.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        lookups: &mut CacheLookups,
    ) -> Result<Arc<[u32]>, String> {
        let Some(both) = &self.whole else {
            return self.encode_segments(text, add_special_tokens, &mut lookups.segments);
        };
        let counts = &mut lookups.segments;
        let encode = || self.encode_segments(text, add_special_tokens, counts);
        let cache = &both[usize::from(add_special_tokens)];
        cached(cache, text, &mut lookups.whole, encode)
    }

    fn encode_segments(
        &self,
        text: &str,
        add_special_tokens: bool,
        counts: &mut LookupCounts,
    ) -> Result<Arc<[u32]>, String> {
        // Special tokens that are added around a text would be added around every piece.
        let Some(segments) = self.segments.as_ref().filter(|_| !add_special_tokens) else {
            return self.tokenizer.encode(text, add_special_tokens);
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut from = 0;
        for end in segments.ends_in(text) {
            let piece = &text[from..end];
            from = end;
            let encode = || self.tokenizer.encode(piece, false);
            ids.extend_from_slice(&cached(&segments.cache, piece, counts, encode)?);
        }
        if from < text.len() {
            ids.extend_from_slice(&self.tokenizer.encode(&text[from..], false)?);
        }
        Ok(ids.into())
    }
}

/// The ids of `text` from `cache`, or else from `encode`, for the next time.
fn cached(
    cache: &Mutex<TextCache>,
    text: &str,
    counts: &mut LookupCounts,
    encode: impl FnOnce() -> Result<Arc<[u32]>, String>,
) -> Result<Arc<[u32]>, String> {
    let known = cache.lock().get(text);
    if let Some(ids) = known {
        counts.hits += 1;
        return Ok(ids);
    }
    counts.misses += 1;
    let ids = encode()?;
    cache.lock().put(text, &ids);
    Ok(ids)
}

impl Segments {
    /// `None`: texts of this tokenizer cannot be cut.
    fn of(tokenizer: &HfTokenizer, max_bytes: usize) -> Result<Option<Self>, String> {
        if tokenizer
            .text_model()
            .is_some_and(TextModel::is_start_special)
        {
            return Ok(None);
        }
        let hf = tokenizer.library();
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::super::golden::{MODELS, VOCABULARIES, load, read};
    use super::*;

    const SEGMENTS: CacheLimits = CacheLimits {
        whole: None,
        segment_bytes: Some(1 << 20),
    };

    fn encoder(tokenizer: HfTokenizer, limits: CacheLimits) -> PromptEncoder {
        PromptEncoder::new(tokenizer, limits).unwrap()
    }

    #[test]
    fn split_special_tokens_are_text_with_and_without_caches() {
        let text = format!("<|im_start|>{}<|im_end|>", "word ".repeat(40)).repeat(3);
        let ids = |is_split: bool, limits: CacheLimits| {
            let mut files = read("chatml");
            files.added_tokens.split_special_tokens = is_split;
            let tokenizer = files.load_tokenizer().unwrap();
            let made =
                encoder(tokenizer, limits).encode(&text, false, &mut CacheLookups::default());
            made.unwrap()
        };
        let split = ids(true, CacheLimits::default());
        assert_eq!(ids(true, SEGMENTS), split);
        assert!(ids(false, SEGMENTS).len() < split.len());
    }

    #[test]
    fn lookups_are_counted_by_cache() {
        let limits = CacheLimits {
            whole: Some((10, 1 << 20)),
            segment_bytes: Some(1 << 20),
        };
        let encoder = encoder(load("chatml"), limits);
        let turn = format!("<|im_start|>{}<|im_end|>", "word ".repeat(40));
        let mut lookups = CacheLookups::default();
        encoder
            .encode(&turn.repeat(2), false, &mut lookups)
            .unwrap();
        encoder
            .encode(&turn.repeat(2), false, &mut lookups)
            .unwrap();
        assert_eq!(lookups.whole, LookupCounts { hits: 1, misses: 1 });
        assert_eq!(lookups.segments, LookupCounts { hits: 1, misses: 1 });
        encoder.encode(&turn, true, &mut lookups).unwrap();
        assert_eq!(lookups.whole, LookupCounts { hits: 1, misses: 2 });
        assert_eq!(lookups.segments, LookupCounts { hits: 1, misses: 1 });
        assert!(
            encoder
                .cache_bytes()
                .iter()
                .all(|bytes| *bytes > turn.len())
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
        /// Cutting at special tokens changes nothing, whatever stands around them.
        #[test]
        fn text_in_segments_has_the_ids_of_the_whole(
            pieces in proptest::collection::vec(
                prop_oneof![
                    Just("<|im_start|>"), Just("<|im_end|>"), Just("<think>"), Just("</think>"), Just("<|eot_id|>"),
                    Just("</s>"), Just("[INST]"), Just("<eos>"), Just("<start_of_turn>"), Just("<|eos|>"), Just("<|assistant|>"),
                    Just("[/INST]"), Just("<|im_user|>"), Just("<sep>"),
                    Just("user\n"), Just("  "), Just("\n\n"), Just("e\u{301}"), Just("\u{301}"), Just("x"), Just("<|im"),
                    Just("The relay runner hands the baton over; it must not be dropped. Isn't that what we call it? "),
                ],
                0..40,
            ),
        ) {
            thread_local! {
                static PAIRS: Vec<(HfTokenizer, PromptEncoder)> = MODELS
                    .into_iter()
                    .chain(VOCABULARIES)
                    .map(|name| (load(name), encoder(load(name), SEGMENTS)))
                    .collect();
            }
            let text = pieces.concat();
            let counts = &mut CacheLookups::default();
            PAIRS.with(|pairs| {
                for (plain, cut) in pairs {
                    let ids = plain.encode(&text, false).unwrap();
                    prop_assert_eq!(&cut.encode(&text, false, counts).unwrap(), &ids);
                    prop_assert_eq!(&cut.encode(&text, false, counts).unwrap(), &ids);
                }
                Ok(())
            })?;
        }
    }
}
