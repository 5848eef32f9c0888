//! Places of a text that follow the same tokens as the end of a context.
//!
//! A *place* p lies between tokens: `tokens[..p]` is in front of it, and its *continuation*,
//! `tokens[p..]`, behind it. A place *matches* a context in as many tokens as both have in common,
//! counted backward. Places whose last `min_match` tokens have the same hash form a list, newest
//! first:
//!
//! ```text
//! heads[hash of the last min_match tokens] ── place 91 ── previous[91] = 40 ── previous[40] = 7
//! ```
//!
//! The index costs an insertion per token and 8 to 12 bytes beside the token's 4, where a suffix
//! automaton needs up to two states and three transitions per token, over 100 bytes, and cannot
//! forget old answers. In exchange a search is bounded: it looks at [`MAX_CANDIDATES`] places, and
//! matches longer than [`MATCH_LIMIT`] count as that long. Searches are rare while a match goes on,
//! because the longest match of a context, if it continues with the next token, is the longest of
//! the next context too ([`SuffixIndex::follow`]).
//!
//! Ids of tokens are not negative. A negative id is equal to none, itself included: it separates
//! texts, and no continuation reaches beyond it.

use std::mem;

/// Tokens of a match that are compared. Where so many agreed, the next token was right 999 times of
/// 1000 (the measurement in [`ngram`](crate::ngram)); 16 cost 1 % of the tokens per step, and no
/// limit gains nothing.
pub const MATCH_LIMIT: usize = 64;

/// Places that one search looks at, newest first. All places give no more tokens per step there,
/// and 64 places 0.4 % fewer.
pub const MAX_CANDIDATES: usize = 256;

/// No place. Texts of more tokens than this have no places behind it.
const NONE: u32 = u32::MAX;

const MIN_HEADS: usize = 16;

/// Whether an id can be equal to another.
pub fn is_token(id: i32) -> bool {
    id >= 0
}

/// A place that matches a context in its last `len` tokens; [`MATCH_LIMIT`] means at least so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuffixMatch {
    pub place: usize,
    pub len: usize,
}

/// A text and the lists of its places.
///
/// Memory: 12 to 16 bytes per token for a text that came whole, at most 24 for one that grew.
#[derive(Debug)]
pub struct SuffixIndex {
    min_match: usize,
    tokens: Vec<i32>,
    /// Places before this one are discarded, and not found.
    first: usize,
    /// Hash → newest place with it. Its length is a power of two, at least that of `tokens`.
    heads: Vec<u32>,
    /// Place → the next older one with the same hash. As long as `tokens`.
    previous: Vec<u32>,
}

impl SuffixIndex {
    /// An empty text. `min_match`: tokens in which a place must match, 1 to [`MATCH_LIMIT`].
    pub fn new(min_match: usize) -> Self {
        Self {
            min_match: min_match.clamp(1, MATCH_LIMIT),
            tokens: Vec::new(),
            first: 0,
            heads: vec![NONE; MIN_HEADS],
            previous: Vec::new(),
        }
    }

    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Append tokens. Amortized cost per token: one insertion.
    pub fn extend(&mut self, tokens: &[i32]) {
        let linked = self.tokens.len();
        self.tokens.extend_from_slice(tokens);
        if self.tokens.len() > self.heads.len() {
            // Longer lists than one place per head would use up MAX_CANDIDATES with other tokens.
            self.rebuild();
        } else {
            self.link_from(linked);
        }
    }

    /// Whether everything is discarded.
    pub fn is_empty(&self) -> bool {
        self.first == self.tokens.len()
    }

    /// Forget the first `count` tokens of the rest. Places may move: matches found before are void.
    /// Amortized cost per token: one insertion.
    pub fn discard(&mut self, count: usize) {
        self.first = self.tokens.len().min(self.first.saturating_add(count));
        // Removed when they are the greater part, because the rest is linked again.
        if self.first <= self.tokens.len() / 2 {
            return;
        }
        self.tokens.drain(..self.first);
        self.tokens.shrink_to_fit();
        self.first = 0;
        self.rebuild();
    }

    fn rebuild(&mut self) {
        let heads = self.tokens.len().next_power_of_two().max(MIN_HEADS);
        self.heads = vec![NONE; heads];
        self.previous = Vec::with_capacity(self.tokens.capacity());
        self.link_from(0);
    }

    /// Put the places from `start` on into their lists. The end of the text is not among them: it
    /// has no continuation yet.
    fn link_from(&mut self, start: usize) {
        for place in start..self.tokens.len() {
            let older = self.link(place).unwrap_or(NONE);
            self.previous.push(older);
        }
    }

    /// Make the place the head of its list, and return the former one; None: it joins no list.
    fn link(&mut self, place: usize) -> Option<u32> {
        if !is_token(self.tokens[place]) {
            return None; // Nothing could be proposed there.
        }
        let head = self.head_of(&self.tokens[..place])?;
        let place = u32::try_from(place).ok().filter(|&place| place != NONE)?;
        Some(mem::replace(&mut self.heads[head], place))
    }

    /// The list of a context; None: it has too few tokens to be matched.
    fn head_of(&self, context: &[i32]) -> Option<usize> {
        /// 2^64 divided by the golden ratio: multiplication spreads neighboring ids over the high
        /// bits (Knuth, The Art of Computer Programming 3, 6.4).
        const SPREAD: u64 = 0x9E37_79B9_7F4A_7C15;
        let last = &context[context.len().checked_sub(self.min_match)?..];
        if !last.iter().copied().all(is_token) {
            return None;
        }
        let mix = |hash: u64, &id: &i32| {
            (hash.rotate_left(23) ^ u64::from(id.cast_unsigned())).wrapping_mul(SPREAD)
        };
        let hash = last.iter().fold(0, mix);
        let unused_bits = u64::BITS - self.heads.len().trailing_zeros();
        Some((hash >> unused_bits) as usize)
    }

    /// The place that matches the context in most tokens, the newest of equals; None: none matches
    /// in `min_match` tokens. The context may be this text itself.
    ///
    /// Cost: at most [`MAX_CANDIDATES`] times [`MATCH_LIMIT`] comparisons; where more places have
    /// the same last tokens, older ones are not seen.
    pub fn longest_match(&self, context: &[i32]) -> Option<SuffixMatch> {
        let limit = context.len().min(MATCH_LIMIT);
        let mut best: Option<SuffixMatch> = None;
        let mut candidate = self.heads[self.head_of(context)?];
        for _ in 0..MAX_CANDIDATES {
            let place = candidate as usize;
            // Lists go from newer to older places: all further ones are discarded too.
            if candidate == NONE || place < self.first {
                break;
            }
            let len = common_suffix(&self.tokens[..place], context, limit);
            if len >= self.min_match && best.is_none_or(|best| len > best.len) {
                best = Some(SuffixMatch { place, len });
            }
            if len == limit {
                break; // No place can match in more.
            }
            candidate = self.previous[place];
        }
        best
    }

    /// The match of a context that has grown by `token`, if it continues so; None: search again.
    ///
    /// If `found` was the longest and newest, the result is: a place that matches the longer
    /// context in k tokens follows one that matched the shorter in k - 1. (From [`MATCH_LIMIT`] on
    /// it stays with its place, though a newer one may match in as many.)
    pub fn follow(&self, found: SuffixMatch, token: i32) -> Option<SuffixMatch> {
        let next = found.place + 1;
        let continues = self.tokens.get(found.place) == Some(&token) && is_token(token);
        let goes_on = self.tokens.get(next).copied().is_some_and(is_token);
        (continues && goes_on).then(|| SuffixMatch {
            place: next,
            len: MATCH_LIMIT.min(found.len + 1),
        })
    }

    /// At most `most` tokens behind a place, up to the next negative id.
    pub fn continuation(&self, place: usize, most: usize) -> Vec<i32> {
        let behind = self.tokens.get(place..).unwrap_or_default();
        take_tokens(behind.iter(), most)
    }

    /// The same where the text ends at the end of the context: as if the continuation had been
    /// appended, it goes on behind the end from its own first token.
    pub fn repeated_continuation(&self, place: usize, most: usize) -> Vec<i32> {
        let behind = self.tokens.get(place..).unwrap_or_default();
        take_tokens(behind.iter().cycle(), most)
    }
}

fn take_tokens<'a>(ids: impl Iterator<Item = &'a i32>, most: usize) -> Vec<i32> {
    ids.copied()
        .take(most)
        .take_while(|&id| is_token(id))
        .collect()
}

/// Tokens at the ends of both that are equal, at most `limit`.
fn common_suffix(a: &[i32], b: &[i32], limit: usize) -> usize {
    let pairs = a.iter().rev().zip(b.iter().rev()).take(limit);
    pairs.take_while(|(a, b)| a == b && is_token(**a)).count()
}
