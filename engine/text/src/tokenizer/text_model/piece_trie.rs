//! Prefix tree over the bytes of pieces, which finds all pieces that a text begins with.

use std::collections::VecDeque;
use std::ops::Range;

/// Value of a node where no piece ends.
const NO_PIECE: u32 = u32::MAX;

/// See the module. The children of a node stand side by side, by ascending byte.
#[derive(Debug)]
pub struct PieceTrie {
    /// Byte that leads to each node; that of the root, the first one, is not read.
    bytes: Vec<u8>,
    children: Vec<Range<u32>>,
    ids: Vec<u32>,
}

impl PieceTrie {
    /// `pieces`: with their ids, below `u32::MAX`. Of two equal ones the one with the smaller id
    /// counts. Empty ones are ignored.
    pub fn new<'a>(pieces: impl Iterator<Item = (&'a str, u32)>) -> Self {
        let mut sorted: Vec<(&[u8], u32)> = pieces
            .filter(|(piece, _)| !piece.is_empty())
            .map(|(piece, id)| (piece.as_bytes(), id))
            .collect();
        sorted.sort_unstable();
        let mut trie = Self {
            bytes: vec![0],
            children: vec![Range::default()],
            ids: vec![NO_PIECE],
        };
        // Nodes in breadth-first order, with the pieces below each and the length of its prefix.
        let mut open = VecDeque::from([(0, 0..sorted.len(), 0)]);
        while let Some((node, below, len)) = open.pop_front() {
            trie.add_children(node, &sorted, below, len, &mut open);
        }
        trie
    }

    fn add_children(
        &mut self,
        node: usize,
        sorted: &[(&[u8], u32)],
        below: Range<usize>,
        len: usize,
        open: &mut VecDeque<(usize, Range<usize>, usize)>,
    ) {
        let mut at = below.start;
        while at < below.end && sorted[at].0.len() == len {
            self.ids[node] = self.ids[node].min(sorted[at].1);
            at += 1;
        }
        let first = self.bytes.len() as u32;
        while at < below.end {
            let byte = sorted[at].0[len];
            let same = sorted[at..below.end].partition_point(|(piece, _)| piece[len] == byte);
            open.push_back((self.bytes.len(), at..at + same, len + 1));
            self.bytes.push(byte);
            self.children.push(Range::default());
            self.ids.push(NO_PIECE);
            at += same;
        }
        self.children[node] = first..self.bytes.len() as u32;
    }

    /// Calls `found` with the length and the id of each piece that `text` begins with, the shortest
    /// first.
    pub fn for_each_prefix(&self, text: &[u8], mut found: impl FnMut(usize, u32)) {
        let mut node = 0;
        for (index, byte) in text.iter().enumerate() {
            let children = &self.children[node];
            let bytes = &self.bytes[children.start as usize..children.end as usize];
            let Ok(child) = bytes.binary_search(byte) else {
                return;
            };
            node = children.start as usize + child;
            if self.ids[node] != NO_PIECE {
                found(index + 1, self.ids[node]);
            }
        }
    }

    /// Length of the longest piece that `text` begins with; `None`: it begins with none.
    pub fn longest_prefix(&self, text: &[u8]) -> Option<usize> {
        let mut longest = None;
        self.for_each_prefix(text, |len, _| longest = Some(len));
        longest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn finds_what_a_list_finds(
            pieces in proptest::collection::vec("[ab\u{e9}]{0,4}", 0..12),
            text in "[ab\u{e9}]{0,6}",
        ) {
            let trie = PieceTrie::new(pieces.iter().map(String::as_str).zip(0..));
            let mut found = Vec::new();
            trie.for_each_prefix(text.as_bytes(), |len, id| found.push((len, id)));
            let first_of = |piece: &str| pieces.iter().position(|other| other == piece);
            let expected: Vec<(usize, u32)> = (1..=text.len())
                .filter_map(|len| Some((len, first_of(text.get(..len)?)? as u32)))
                .collect();
            prop_assert_eq!(trie.longest_prefix(text.as_bytes()), expected.last().map(|one| one.0));
            prop_assert_eq!(found, expected);
        }
    }
}
