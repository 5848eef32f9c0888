//! Texts and their token ids, those used longest ago forgotten first; bounded by bytes and by
//! entries.
//!
//! Cost of a look-up or an insertion: a hash of the text and O(log entries).

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Memory of an entry beside its text and its ids: two map nodes and two reference counts.
const ENTRY_BYTES: usize = 160;

#[derive(Debug)]
struct Entry {
    ids: Arc<[u32]>,
    /// Key in `order`.
    used: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub struct TextCache {
    entries: HashMap<Arc<str>, Entry>,
    /// By last use.
    order: BTreeMap<u64, Arc<str>>,
    clock: u64,
    bytes: usize,
    max_bytes: usize,
    max_entries: usize,
}

impl TextCache {
    pub fn new(max_bytes: usize, max_entries: usize) -> Self {
        Self {
            max_bytes,
            max_entries,
            ..Self::default()
        }
    }

    pub fn get(&mut self, text: &str) -> Option<Arc<[u32]>> {
        let entry = self.entries.get_mut(text)?;
        self.clock += 1;
        let key = self.order.remove(&entry.used);
        entry.used = self.clock;
        self.order.extend(key.map(|key| (self.clock, key)));
        Some(entry.ids.clone())
    }

    /// A text that alone exceeds the limit is not kept.
    pub fn put(&mut self, text: &str, ids: &Arc<[u32]>) {
        let bytes = cost(text, ids);
        if bytes > self.max_bytes || self.max_entries == 0 || self.get(text).is_some() {
            return;
        }
        while self.bytes + bytes > self.max_bytes || self.entries.len() >= self.max_entries {
            let Some((_, oldest)) = self.order.pop_first() else {
                break;
            };
            if let Some(entry) = self.entries.remove(&oldest) {
                self.bytes -= cost(&oldest, &entry.ids);
            }
        }
        self.clock += 1;
        let key: Arc<str> = Arc::from(text);
        let entry = Entry {
            ids: ids.clone(),
            used: self.clock,
        };
        self.order.insert(self.clock, key.clone());
        self.entries.insert(key, entry);
        self.bytes += bytes;
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

fn cost(text: &str, ids: &[u32]) -> usize {
    ENTRY_BYTES + text.len() + size_of_val(ids)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ids_of(text: &str) -> Arc<[u32]> {
        text.bytes().map(u32::from).collect()
    }

    proptest! {
        /// Against a list that is searched and sorted by hand.
        #[test]
        fn keeps_what_a_naive_list_keeps(
            texts in proptest::collection::vec("[ab]{0,4}", 1..200),
            max_bytes in 100usize..2000,
            max_entries in 0usize..12,
        ) {
            let mut cache = TextCache::new(max_bytes, max_entries);
            let mut naive: Vec<String> = Vec::new(); // least recently used first
            for text in texts {
                let known = naive.iter().position(|held| *held == text);
                prop_assert_eq!(cache.get(&text), known.map(|_| ids_of(&text)));
                if let Some(at) = known {
                    naive.remove(at);
                    naive.push(text.clone());
                } else {
                    cache.put(&text, &ids_of(&text));
                    naive.push(text.clone());
                    let bytes = |list: &[String]| list.iter().map(|t| cost(t, &ids_of(t))).sum::<usize>();
                    if max_entries == 0 || bytes(&naive[naive.len() - 1..]) > max_bytes {
                        naive.pop();
                    }
                    while naive.len() > max_entries || bytes(&naive) > max_bytes {
                        naive.remove(0);
                    }
                    prop_assert_eq!(cache.bytes(), bytes(&naive));
                }
                prop_assert_eq!(cache.entries.len(), naive.len());
                prop_assert_eq!(cache.order.len(), naive.len());
            }
        }
    }
}
