//! Unigram language model of SentencePiece: the segmentation of the highest total score.
//!
//! Sums are rounded as in SentencePiece, because the rounding decides between segmentations of
//! equal scores (the same pieces in another order).

use super::piece_trie::PieceTrie;

/// An unknown character scores this much less than the worst piece.
const UNKNOWN_PENALTY: f32 = 10.0;
/// Score of each byte of a user-defined piece but the first (SentencePiece 0.2.3); scores of normal
/// pieces are negative.
const USER_DEFINED_SCORE: f32 = 0.1;

/// A piece that texts are made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PieceScore {
    Normal(f32),
    UserDefined,
}

/// See the module.
#[derive(Debug)]
pub struct UnigramModel {
    trie: PieceTrie,
    /// By id; of ids that are no such piece it is not read.
    scores: Vec<f32>,
    unknown_score: f32,
}

/// Last piece of the best segmentation of a text up to some byte.
#[derive(Debug, Clone, Copy, Default)]
struct BestEnd {
    score: f32,
    start: usize,
    /// `None`: an unknown character.
    id: Option<u32>,
    is_reached: bool,
}

impl UnigramModel {
    /// `pieces`: id, text, score.
    pub fn new(pieces: &[(u32, &str, PieceScore)]) -> Self {
        let size = pieces.iter().map(|(id, _, _)| *id as usize + 1).max();
        let mut scores = vec![0.0; size.unwrap_or(0)];
        let mut worst_score = f32::MAX;
        for (id, text, score) in pieces {
            scores[*id as usize] = match score {
                PieceScore::Normal(score) => {
                    worst_score = worst_score.min(*score);
                    *score
                }
                PieceScore::UserDefined => USER_DEFINED_SCORE * text.len().saturating_sub(1) as f32,
            };
        }
        Self {
            trie: PieceTrie::new(pieces.iter().map(|(id, text, _)| (*text, *id))),
            scores,
            unknown_score: worst_score - UNKNOWN_PENALTY,
        }
    }

    /// Calls `emit` with each piece in order: its text, and its id, `None` for an unknown
    /// character.
    pub fn segment(&self, text: &str, mut emit: impl FnMut(&str, Option<u32>)) {
        let ends = self.best_ends(text);
        let mut pieces = Vec::new();
        let mut end = text.len();
        while end > 0 {
            pieces.push(end);
            end = ends[end].start;
        }
        for end in pieces.into_iter().rev() {
            emit(&text[ends[end].start..end], ends[end].id);
        }
    }

    /// Best segmentation up to each byte at which a piece may end.
    fn best_ends(&self, text: &str) -> Vec<BestEnd> {
        let mut ends = vec![BestEnd::default(); text.len() + 1];
        for (start, character) in text.char_indices() {
            let so_far = ends[start].score;
            let char_len = character.len_utf8();
            let mut has_single = false;
            let behind = &text.as_bytes()[start..];
            self.trie.for_each_prefix(behind, |len, id| {
                let score = self.scores[id as usize] + so_far;
                ends[start + len].improve(score, start, Some(id));
                has_single |= len == char_len;
            });
            // A character that is a piece is never unknown.
            if !has_single {
                let score = self.unknown_score + so_far;
                ends[start + char_len].improve(score, start, None);
            }
        }
        ends
    }
}

impl BestEnd {
    /// Of equal scores the first counts: the one of the longest last piece.
    fn improve(&mut self, score: f32, start: usize, id: Option<u32>) {
        if !self.is_reached || score > self.score {
            *self = Self {
                score,
                start,
                id,
                is_reached: true,
            };
        }
    }
}
