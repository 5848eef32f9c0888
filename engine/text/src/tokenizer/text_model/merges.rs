//! Byte-pair encoding by rank: of all neighbors whose text is a token, the pair of the best rank is
//! merged, the leftmost one among equals, until none is left.
//!
//! tokenizer.json lists merges instead, each with a rank of its own. Such a list cannot say that
//! two ways to one token are equal, so that the leftmost counts ("aaa" from "aa" and "a", or from
//! "a" and "aa").

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Marks the end of the list of symbols.
const NONE: usize = usize::MAX;

/// A part of the text that was not merged yet, or the result of merges.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: usize,
    /// Equal to `start` where the symbol has become a part of the one before it.
    end: usize,
    previous: usize,
    next: usize,
    is_fixed: bool,
}

/// Symbols of a text, the pairs that may be merged, best first.
pub struct SymbolMerger<F> {
    symbols: Vec<Symbol>,
    /// Rank, left symbol, right symbol, end of the right one at that time.
    pairs: BinaryHeap<Reverse<(u32, usize, usize, usize)>>,
    rank_of: F,
}

impl<F: FnMut(usize, usize, usize) -> Option<u32>> SymbolMerger<F> {
    /// `rank_of`: rank of the token with the text between the first and the third argument, of
    /// which the second is where the right symbol begins; smaller ranks are merged first.
    pub fn new(rank_of: F) -> Self {
        Self {
            symbols: Vec::new(),
            pairs: BinaryHeap::new(),
            rank_of,
        }
    }

    /// Appends the symbol of the text between `start` and `end`, where the last one ended.
    /// `is_fixed`: it is merged with none.
    pub fn push(&mut self, start: usize, end: usize, is_fixed: bool) {
        let index = self.symbols.len();
        if let Some(last) = self.symbols.last_mut() {
            last.next = index;
        }
        self.symbols.push(Symbol {
            start,
            end,
            previous: index.checked_sub(1).unwrap_or(NONE),
            next: NONE,
            is_fixed,
        });
    }

    /// Start and end of each symbol that is left, in order. Cost: O(n log n) look-ups for n
    /// symbols.
    pub fn merge(mut self) -> Vec<(usize, usize)> {
        for left in 0..self.symbols.len().saturating_sub(1) {
            self.add_pair(left, left + 1);
        }
        while let Some(Reverse((_, left, right, end))) = self.pairs.pop() {
            let is_current = self.symbols[left].next == right && self.symbols[right].end == end;
            let has_left = self.symbols[left].start < self.symbols[left].end;
            // Either side was merged with another neighbor since.
            if !is_current || !has_left {
                continue;
            }
            self.merge_pair(left, right);
        }
        let left = self.symbols.iter().filter(|one| one.start < one.end);
        left.map(|one| (one.start, one.end)).collect()
    }

    fn merge_pair(&mut self, left: usize, right: usize) {
        let absorbed = self.symbols[right];
        self.symbols[right].end = absorbed.start;
        self.symbols[left].end = absorbed.end;
        self.symbols[left].next = absorbed.next;
        if absorbed.next != NONE {
            self.symbols[absorbed.next].previous = left;
            self.add_pair(left, absorbed.next);
        }
        let previous = self.symbols[left].previous;
        if previous != NONE {
            self.add_pair(previous, left);
        }
    }

    fn add_pair(&mut self, left: usize, right: usize) {
        let first = self.symbols[left];
        let second = self.symbols[right];
        // SentencePiece merges nothing with a user-defined piece.
        if first.is_fixed || second.is_fixed {
            return;
        }
        if let Some(rank) = (self.rank_of)(first.start, second.start, second.end) {
            self.pairs.push(Reverse((rank, left, right, second.end)));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn naive_merge(text: &str, rank_of: impl Fn(&str) -> Option<u32>) -> Vec<String> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let pairs = parts.windows(2).enumerate();
            let best = pairs
                .filter_map(|(index, pair)| Some((rank_of(&pair.concat())?, index)))
                .min();
            let Some((_, index)) = best else {
                return parts;
            };
            let right = parts.remove(index + 1);
            parts[index].push_str(&right);
        }
    }

    proptest! {
        #[test]
        fn merges_as_a_list_searched_from_the_left(
            ranks in proptest::collection::hash_map("[ab]{2,4}", 0u32..6, 0..14),
            text in "[ab]{0,24}",
        ) {
            let rank_of = |start, _, end| ranks.get(&text[start..end]).copied();
            let mut merger = SymbolMerger::new(rank_of);
            for index in 0..text.len() {
                merger.push(index, index + 1, false);
            }
            let merged = merger.merge().into_iter().map(|(start, end)| text[start..end].to_owned());
            let merged: Vec<String> = merged.collect();
            prop_assert_eq!(merged, naive_merge(&text, |part| ranks.get(part).copied()));
        }
    }
}
