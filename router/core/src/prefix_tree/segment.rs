//! Segments of the tree: text, cut between characters, or a chain of block hashes
//! ([`crate::prompt`]).

use std::fmt::Debug;

/// A piece of a path from the root. *Positions* are where it may be cut; *units* are what limits
/// count.
pub trait TreeSegment: Debug + Send + Sync {
    /// Key that tells the children of a node apart.
    type First: Debug + Copy + Ord + Send + Sync;

    /// `None` if it is empty.
    fn first_key(&self) -> Option<Self::First>;
    /// Position of its end.
    fn len(&self) -> usize;
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// As many as positions, where a unit is one.
    fn units(&self) -> usize {
        self.len()
    }
    /// Position where it stops being equal to `other`.
    fn common_length(&self, other: &Self) -> usize;
    fn split_at(&self, position: usize) -> (&Self, &Self);
    /// Where unit number `at` begins; the end if there are no more.
    fn position_of_unit(&self, at: usize) -> usize;
    fn join_segments(&self, behind: &Self) -> Box<Self>;
}

/// Positions are bytes, units are characters.
impl TreeSegment for str {
    type First = char;

    fn first_key(&self) -> Option<char> {
        self.chars().next()
    }

    fn len(&self) -> usize {
        str::len(self)
    }

    fn units(&self) -> usize {
        self.chars().count()
    }

    fn common_length(&self, other: &str) -> usize {
        let mut common = common_items(self.as_bytes(), other.as_bytes());
        // The bytes before are equal, so a boundary in one is a boundary in the other.
        while !self.is_char_boundary(common) {
            common -= 1;
        }
        common
    }

    fn split_at(&self, position: usize) -> (&str, &str) {
        str::split_at(self, position)
    }

    fn position_of_unit(&self, at: usize) -> usize {
        let mut starts = self.char_indices();
        starts.nth(at).map_or(str::len(self), |(byte, _)| byte)
    }

    fn join_segments(&self, behind: &str) -> Box<str> {
        [self, behind].concat().into_boxed_str()
    }
}

/// Positions and units are blocks.
impl TreeSegment for [u64] {
    type First = u64;

    fn first_key(&self) -> Option<u64> {
        <[u64]>::first(self).copied()
    }

    fn len(&self) -> usize {
        <[u64]>::len(self)
    }

    fn common_length(&self, other: &[u64]) -> usize {
        common_items(self, other)
    }

    fn split_at(&self, position: usize) -> (&[u64], &[u64]) {
        <[u64]>::split_at(self, position)
    }

    fn position_of_unit(&self, at: usize) -> usize {
        at.min(<[u64]>::len(self))
    }

    fn join_segments(&self, behind: &[u64]) -> Box<[u64]> {
        [self, behind].concat().into_boxed_slice()
    }
}

fn common_items<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    const BLOCK: usize = 128; // compared at once; the rest one by one
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK));
    let common = BLOCK * blocks.take_while(|(x, y)| x == y).count();
    common
        + a[common..]
            .iter()
            .zip(&b[common..])
            .take_while(|(x, y)| x == y)
            .count()
}
