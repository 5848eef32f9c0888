//! A prompt as a chain of block hashes: the index of the `cost` policy keeps them instead of text.
//!
//! ```text
//!   text:    |---- 256 bytes ----|---- 256 bytes ----|-- rest --|     two prompts with equal text up to the end of a block
//!   hashes:          h0        →        h1                            have equal hashes up to there, and (but for
//!                                                                     collisions, 2^-64 a pair) only then
//! ```
//!
//! Each hash covers everything before it, so one number names a prefix. The rest behind the last
//! whole block, at most a few dozen tokens, has no hash. 8 bytes stand for 256, and no prompt text
//! stays in memory.
//!
//! A router with a tokenizer cuts the prompt's *token ids* into blocks as long as the engines'
//! pages ([`token_blocks`]): two prompts then share as many blocks as their caches do. Hashes of
//! token ids are continued from any of them ([`TokenChain`]), so that a page an engine announces
//! gets the hash that a prompt through it has.
//!
//! Cost: about 0.1 ns a byte, one allocation.

use serde::{Deserialize, Serialize};

/// Bytes of text in a block: about 64 tokens of English, a few pages of an engine's cache.
pub const BLOCK_BYTES: usize = 256;

/// Unit of a prompt's size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SizeUnit {
    /// Bytes of text.
    #[default]
    Bytes,
    Tokens,
}

/// A prompt's hashes and size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedPrompt<H> {
    pub hashes: H,
    pub unit: SizeUnit,
    pub block_units: usize,
    /// Size of the whole prompt, the rest behind the last block included.
    pub units: usize,
    /// `None`: not known before a worker reports it; then policies estimate from `units`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u32>,
    /// Some of its units stand for images or the like: it says nothing about the tokens in a text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub has_media: bool,
}

pub type PromptBlocks = HashedPrompt<Box<[u64]>>;

/// The same, borrowed; small and `Copy`.
pub type PromptView<'a> = HashedPrompt<&'a [u64]>;

impl<H> HashedPrompt<H> {
    pub(crate) fn with_hashes<G>(&self, hashes: G) -> HashedPrompt<G> {
        let Self {
            unit,
            block_units,
            units,
            tokens,
            has_media,
            ..
        } = *self;
        HashedPrompt {
            hashes,
            unit,
            block_units,
            units,
            tokens,
            has_media,
        }
    }
}

impl PromptView<'_> {
    /// True if its blocks are of token ids, as engines' pages are.
    pub fn is_of_tokens(&self) -> bool {
        self.unit == SizeUnit::Tokens
    }
}

impl PromptBlocks {
    /// Blocks of text; `tokens` if they were counted.
    pub fn of_text(text: &[u8], tokens: Option<u32>) -> Self {
        Self::of_text_in(TextScope::NONE, text, tokens)
    }

    /// Blocks of text that share no hash with blocks in another scope.
    pub fn of_text_in(scope: TextScope, text: &[u8], tokens: Option<u32>) -> Self {
        let mut state = scope.0;
        let whole = text.chunks_exact(BLOCK_BYTES);
        let hashes = whole.map(|block| {
            state = hash_block(state, block);
            state
        });
        let hashes = hashes.collect();
        let units = text.len();
        Self {
            hashes,
            block_units: BLOCK_BYTES,
            units,
            tokens,
            ..Self::default()
        }
    }

    /// Blocks with given ids (of a trace): each id stands for `block_tokens` tokens behind those
    /// before it.
    pub fn of_ids(ids: &[u64], block_tokens: usize, tokens: u32) -> Self {
        let mut state = SEED;
        let hashes = ids.iter().map(|id| {
            state = mix_hash(state, *id);
            state
        });
        let hashes = hashes.collect();
        let block_units = block_tokens;
        let units = tokens as usize;
        let unit = SizeUnit::Tokens;
        let tokens = Some(tokens);
        Self {
            hashes,
            unit,
            block_units,
            units,
            tokens,
            has_media: false,
        }
    }

    pub fn prompt_view(&self) -> PromptView<'_> {
        self.with_hashes(&self.hashes)
    }

    /// See [`HashedPrompt::has_media`].
    pub fn with_media(self) -> Self {
        Self {
            has_media: true,
            ..self
        }
    }
}

/// Everything besides the text before them that text blocks depend on: model, tools, salt and
/// whatever else changes a prompt's KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TextScope(u64);

impl TextScope {
    /// Without parts.
    pub const NONE: Self = Self(SEED);

    /// A character in front of a text that keeps texts of different scopes apart in a tree of
    /// texts: a private-use one, which prompts do not begin with. `None`: the scope has no parts.
    pub fn marker(self) -> Option<char> {
        const FIRST: u32 = 0xF_0000;
        const COUNT: u64 = 0xFFFE;
        let code = FIRST + (self.0 % COUNT) as u32;
        (self != Self::NONE).then(|| char::from_u32(code))?
    }

    /// The scope with one more part; `name` keeps parts of equal value apart. Cost: one pass over
    /// `value`.
    pub fn with_part(self, name: &str, value: &[u8]) -> Self {
        let hash = |state: u64, bytes: &[u8]| {
            let mut state = mix_hash(state, bytes.len() as u64);
            for chunk in bytes.chunks(8) {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                state = mix_hash(state, u64::from_le_bytes(word));
            }
            state
        };
        Self(hash(hash(self.0, name.as_bytes()), value))
    }
}

/// Blocks of `block_size` token ids, each hash covering `namespace` and everything before it.
///
/// `namespace` says whose prompts may share a cache: see [`cache_namespace`]. `block_size` 0 counts
/// as 1.
pub fn token_blocks(ids: &[u32], block_size: usize, namespace: &str) -> PromptBlocks {
    let block_size = block_size.max(1);
    let mut chain = TokenChain::new(namespace);
    PromptBlocks {
        hashes: ids
            .chunks_exact(block_size)
            .map(|block| chain.push_block(block))
            .collect(),
        unit: SizeUnit::Tokens,
        block_units: block_size,
        units: ids.len(),
        has_media: false,
        tokens: Some(u32::try_from(ids.len()).unwrap_or(u32::MAX)),
    }
}

/// The namespace of a request with these fields, as our engine names it: empty when it has none of
/// them.
pub fn cache_namespace(cache_salt: &str, extra_key: &str) -> String {
    match (cache_salt, extra_key) {
        ("", "") => String::new(),
        _ => format!("{cache_salt}\0{extra_key}"),
    }
}

/// The chain hash of a growing sequence of token ids, block by block: what [`token_blocks`]
/// computes at once.
///
/// Hashes are comparable only between chains cut at the same places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenChain(u64);

impl TokenChain {
    /// Before the first block.
    pub fn new(namespace: &str) -> Self {
        let mut state = SEED.rotate_left(17);
        for byte in namespace.bytes() {
            state = multiply_fold(state ^ u64::from(byte), MULTIPLIERS[0]);
        }
        Self(state)
    }

    /// Behind the block with this hash.
    pub fn from_hash(hash: u64) -> Self {
        Self(hash)
    }

    pub fn hash(self) -> u64 {
        self.0
    }

    /// Add a block; returns the hash of everything up to its end. Cost: a multiplication for two
    /// tokens.
    pub fn push_block(&mut self, block: &[u32]) -> u64 {
        for pair in block.chunks(2) {
            let low = u64::from(pair[0]);
            // No id is this large, so that an odd end differs from every id.
            let high = pair.get(1).map_or(u64::MAX, |id| u64::from(*id));
            self.0 = multiply_fold(self.0 ^ low, MULTIPLIERS[1] ^ high);
        }
        self.0
    }
}

/// Numbers with bits spread evenly: digits of pi, then of square roots. They must be unrelated:
/// with the golden ratio and the root of five one flipped bit undid another.
const SEED: u64 = 0x4528_21e6_38d0_1377;
const MULTIPLIERS: [u64; 4] = [
    0xbb67_ae85_84ca_a73b,
    0x3c6e_f372_fe94_f82b,
    0xa54f_f53a_5f1d_36f1,
    0x510e_527f_ade6_82d1,
];

/// A state that depends on all that was mixed in before, in order.
pub(crate) fn mix_hash(state: u64, next: u64) -> u64 {
    multiply_fold(state ^ next.wrapping_add(MULTIPLIERS[0]), MULTIPLIERS[1])
}

/// 64 × 64 → 128 bits, both halves folded together: one multiplication mixes sixteen bytes.
fn multiply_fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ ((product >> 64) as u64)
}

/// Two lanes, so that one multiplication need not wait for the other.
fn hash_block(state: u64, block: &[u8]) -> u64 {
    let mut x = state;
    let mut y = state.rotate_left(32) ^ MULTIPLIERS[0];
    for words in block.chunks_exact(32) {
        let word = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&words[8 * at..8 * at + 8]);
            u64::from_le_bytes(bytes)
        };
        x = multiply_fold(word(0) ^ x, word(1) ^ MULTIPLIERS[1]);
        y = multiply_fold(word(2) ^ y, word(3) ^ MULTIPLIERS[2]);
    }
    multiply_fold(x ^ MULTIPLIERS[3], y ^ MULTIPLIERS[1])
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The whole point: hashes agree exactly as far as the texts do, in whole blocks.
        #[test]
        fn hashes_are_equal_exactly_along_the_common_prefix(
            common in proptest::collection::vec(any::<u8>(), 0..1500),
            tails in proptest::array::uniform2(proptest::collection::vec(0u8..3, 0..700)),
        ) {
            let [a, b] = tails.map(|tail| [common.clone(), tail].concat());
            let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count() / BLOCK_BYTES;
            let a = PromptBlocks::of_text(&a, None);
            let b = PromptBlocks::of_text(&b, None);
            let equal = a.hashes.iter().zip(&b.hashes).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(equal, same);
            prop_assert!(a.hashes.iter().skip(same).all(|hash| !b.hashes.contains(hash)));
        }
    }

    proptest! {
        /// Hashes of token ids, too; and a chain continued from any block arrives at the same
        /// hashes.
        #[test]
        fn token_hashes_are_equal_exactly_along_the_common_prefix(
            block_size in 1usize..20,
            common in proptest::collection::vec(0u32..5, 0..200),
            tails in proptest::array::uniform2(proptest::collection::vec(0u32..2, 0..60)),
            cut in any::<proptest::sample::Index>(),
        ) {
            let [a, b] = tails.map(|tail| [common.clone(), tail].concat());
            let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count() / block_size;
            let first = token_blocks(&a, block_size, "t");
            let second = token_blocks(&b, block_size, "t");
            let equal = first.hashes.iter().zip(&second.hashes).take_while(|(x, y)| x == y).count();
            prop_assert_eq!(equal, same);
            prop_assert!(first.hashes.iter().skip(same).all(|hash| !second.hashes.contains(hash)));
            prop_assert_eq!(first.hashes.len(), a.len() / block_size);
            prop_assert_eq!(first.prompt_view().tokens, Some(a.len() as u32));
            if !first.hashes.is_empty() {
                let at = cut.index(first.hashes.len());
                let mut chain = TokenChain::from_hash(first.hashes[at]);
                let rest = a[(at + 1) * block_size..].chunks_exact(block_size);
                let rest: Vec<u64> = rest.map(|block| chain.push_block(block)).collect();
                prop_assert_eq!(&rest[..], &first.hashes[at + 1..]);
            }
            let other = token_blocks(&a, block_size, "u");
            prop_assert!(first.hashes.iter().all(|hash| !other.hashes.contains(hash)));
        }
    }

    /// Places of the cut, padding and namespaces must not be mistaken for ids.
    #[test]
    fn token_blocks_of_other_lengths_and_names_stay_apart() {
        let mut seen = HashSet::new();
        let names = [
            ("", ""),
            ("a", ""),
            ("", "a"),
            ("a", "a"),
            ("aa", ""),
            ("a\0", ""),
        ];
        for (salt, key) in names {
            let name = cache_namespace(salt, key);
            for ids in [&[0][..], &[0, 0], &[0, 0, 0], &[u32::MAX], &[0, u32::MAX]] {
                assert!(
                    seen.insert(TokenChain::new(&name).push_block(ids)),
                    "{name:?} {ids:?}"
                );
            }
        }
        let zeros = token_blocks(&[0; 40_000], 16, "");
        assert!(zeros.hashes.iter().all(|hash| seen.insert(*hash)));
        assert_eq!(
            token_blocks(&[1, 2, 3], 0, "").prompt_view().hashes.len(),
            3
        );
    }

    /// The multiplier form has one known weakness: a word that cancels a constant makes a product
    /// zero. One flipped bit, one repeated block and the constants themselves must all stay apart.
    #[test]
    fn near_and_hostile_blocks_do_not_collide() {
        let mut seen = HashSet::new();
        let mut text = vec![0u8; BLOCK_BYTES];
        for at in 0..BLOCK_BYTES * 8 {
            text[at / 8] ^= 1 << (at % 8);
            assert!(seen.insert(PromptBlocks::of_text(&text, None).hashes[0]));
            text[at / 8] ^= 1 << (at % 8);
        }
        let repeated = PromptBlocks::of_text(&vec![7u8; BLOCK_BYTES * 2000], None);
        assert!(repeated.hashes.iter().all(|hash| seen.insert(*hash)));
        let ids: Vec<u64> = (0..20_000).collect();
        let named = PromptBlocks::of_ids(&ids, 512, 1);
        assert!(named.hashes.iter().all(|hash| seen.insert(*hash)));
        // Order counts: a swapped pair of ids is another prefix from there on.
        let swapped = PromptBlocks::of_ids(&[1, 0, 2], 512, 1);
        assert!(
            swapped
                .hashes
                .iter()
                .all(|hash| !named.hashes.contains(hash))
        );
    }

    #[test]
    fn rest_behind_the_last_block_counts_but_has_no_hash() {
        let blocks = PromptBlocks::of_text(&[b'x'; 700], Some(170));
        let prompt = blocks.prompt_view();
        assert_eq!(
            (prompt.hashes.len(), prompt.units, prompt.tokens),
            (2, 700, Some(170))
        );
        assert_eq!(
            PromptBlocks::of_text(b"short", None)
                .prompt_view()
                .hashes
                .len(),
            0
        );
    }
}
