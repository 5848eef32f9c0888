//! Timers with one deadline per key.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

#[derive(Debug)]
pub struct Timers<K> {
    by_time: BTreeSet<(u64, K)>,
    by_key: HashMap<K, u64>,
}

impl<K: Clone + Eq + Hash + Ord> Timers<K> {
    pub fn new() -> Self {
        Self {
            by_time: BTreeSet::new(),
            by_key: HashMap::new(),
        }
    }

    /// Set, move or (with `None`) clear a key's deadline.
    pub fn set(&mut self, key: &K, due: Option<u64>) {
        if let Some(old) = self.by_key.remove(key) {
            self.by_time.remove(&(old, key.clone()));
        }
        if let Some(due) = due {
            self.by_key.insert(key.clone(), due);
            self.by_time.insert((due, key.clone()));
        }
    }

    pub fn next_due(&self) -> Option<u64> {
        self.by_time.first().map(|(due, _)| *due)
    }

    /// Remove and return one key whose deadline has passed.
    pub fn pop_due(&mut self, now: u64) -> Option<K> {
        if self.next_due()? > now {
            return None;
        }
        let (_, key) = self.by_time.pop_first()?;
        self.by_key.remove(&key);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_has_one_moment_and_comes_once() {
        let mut timers = Timers::new();
        timers.set(&"a", Some(10));
        timers.set(&"b", Some(5));
        timers.set(&"a", Some(3));
        timers.set(&"c", Some(1));
        timers.set(&"c", None);
        assert_eq!((timers.next_due(), timers.pop_due(2)), (Some(3), None));
        assert_eq!(
            (timers.pop_due(7), timers.pop_due(7), timers.pop_due(7)),
            (Some("a"), Some("b"), None)
        );
        assert_eq!(timers.next_due(), None);
    }
}
