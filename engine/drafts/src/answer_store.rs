//! Recent answers, in which the next ones of the same group may be found again.
//!
//! A group is an opaque name: a tenant and a cache salt, say. Each has a text of its own, so that
//! no search can reach the answers of another: a draft that is accepted shows, by its speed alone,
//! that the same answer was given before.
//!
//! 1. `insert` appends an answer to its group's text, behind a separator.
//! 2. Where the store is full, the oldest answers go first, of whichever group.
//! 3. A group without answers is forgotten.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::suffix_index::SuffixIndex;

/// No token: matches and continuations end there.
const SEPARATOR: i32 = -1;

/// Tokens that an answer counts beside its own, for its entry and for a group of its own (some
/// hundred bytes). Without, many groups of tiny answers would need more memory than the bound.
pub const ANSWER_OVERHEAD: usize = 32;

/// The answers of one group.
#[derive(Debug)]
pub struct GroupAnswers {
    index: SuffixIndex,
    /// Changes whenever the index does: matches found under another version are void. No two
    /// states of a group have the same one, also where it was forgotten in between.
    version: u64,
}

impl GroupAnswers {
    pub fn index(&self) -> &SuffixIndex {
        &self.index
    }

    pub fn version(&self) -> u64 {
        self.version
    }
}

#[derive(Debug)]
struct StoredAnswer {
    group: Arc<[u8]>,
    tokens: usize,
}

impl StoredAnswer {
    fn charge(&self) -> usize {
        self.tokens + ANSWER_OVERHEAD
    }
}

/// Answers of all groups, at most `capacity` tokens.
///
/// Memory: at most 48 bytes per token of the capacity: 24 of a text that grew, and as much again
/// for text that is discarded but not yet removed.
#[derive(Debug)]
pub struct AnswerStore {
    min_match: usize,
    capacity: usize,
    used: usize,
    changes: u64,
    groups: HashMap<Arc<[u8]>, GroupAnswers>,
    /// Oldest first; those of one group lie in its text in this order.
    answers: VecDeque<StoredAnswer>,
}

impl AnswerStore {
    /// `capacity`: tokens of all answers, each of which counts [`ANSWER_OVERHEAD`] more.
    pub fn new(min_match: usize, capacity: usize) -> Self {
        Self {
            min_match,
            capacity,
            used: 0,
            changes: 0,
            groups: HashMap::new(),
            answers: VecDeque::new(),
        }
    }

    /// What the answers count, never more than the capacity.
    pub fn used(&self) -> usize {
        self.used
    }

    pub fn group(&self, group: &[u8]) -> Option<&GroupAnswers> {
        self.groups.get(group)
    }

    /// Keep an answer; of one that is longer than the store its end.
    pub fn insert(&mut self, group: &Arc<[u8]>, answer: &[i32]) {
        let most = self.capacity.saturating_sub(ANSWER_OVERHEAD);
        let kept = &answer[answer.len().saturating_sub(most)..];
        if kept.len() <= self.min_match {
            return; // No place in it has both a match before it and a continuation.
        }
        let stored = StoredAnswer {
            group: Arc::clone(group),
            tokens: kept.len(),
        };
        self.make_room(stored.charge());
        self.used += stored.charge();
        self.changes += 1;
        let min_match = self.min_match;
        let answers = self
            .groups
            .entry(Arc::clone(group))
            .or_insert_with(|| GroupAnswers {
                index: SuffixIndex::new(min_match),
                version: 0,
            });
        answers.index.extend(&[SEPARATOR]);
        answers.index.extend(kept);
        answers.version = self.changes;
        self.answers.push_back(stored);
    }

    fn make_room(&mut self, charge: usize) {
        while self.used + charge > self.capacity {
            let Some(oldest) = self.answers.pop_front() else {
                break;
            };
            self.used -= oldest.charge();
            self.forget(&oldest);
        }
    }

    fn forget(&mut self, oldest: &StoredAnswer) {
        let Some(answers) = self.groups.get_mut(&oldest.group) else {
            return;
        };
        self.changes += 1;
        answers.version = self.changes;
        let separator_and_tokens = 1 + oldest.tokens;
        answers.index.discard(separator_and_tokens);
        if answers.index.is_empty() {
            self.groups.remove(&oldest.group);
        }
    }
}
