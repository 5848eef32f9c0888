//! Own pages that each decode rank may read: those announced to it in a room that is live or
//! leased.
//!
//! The control thread announces pages before it sends PROGRESS and withdraws a room when its reader
//! leaves or the room ends; the data thread checks each READ. A decode rank is identified by its
//! incarnation, which it sends in HELLO on every connection.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

/// Announced page: its id and its generation.
type Page = (u32, u64);

#[derive(Debug, Default)]
struct Tables {
    rooms: HashMap<u64, (Arc<str>, Vec<Page>)>,
    /// By incarnation, with the number of rooms that hold the page.
    readable: HashMap<Arc<str>, HashMap<Page, u32>>,
}

#[derive(Debug, Default)]
pub struct AnnouncedPages {
    tables: Mutex<Tables>,
    refused: AtomicU64,
}

impl AnnouncedPages {
    pub fn announce_pages(&self, room: u64, inc: &str, pages: impl Iterator<Item = Page>) {
        let tables = &mut *self.tables.lock();
        let (inc, announced) = tables
            .rooms
            .entry(room)
            .or_insert_with(|| (inc.into(), Vec::new()));
        let readable = tables.readable.entry(inc.clone()).or_default();
        for page in pages {
            announced.push(page);
            *readable.entry(page).or_default() += 1;
        }
    }

    pub fn withdraw_room(&self, room: u64) {
        let tables = &mut *self.tables.lock();
        let Some((inc, pages)) = tables.rooms.remove(&room) else {
            return;
        };
        let Some(readable) = tables.readable.get_mut(&inc) else {
            return;
        };
        for page in pages {
            if let Some(rooms) = readable.get_mut(&page) {
                *rooms -= 1;
                if *rooms == 0 {
                    readable.remove(&page);
                }
            }
        }
        if readable.is_empty() {
            tables.readable.remove(&inc);
        }
    }

    /// The first page that this decode rank may not read, if any; counted then.
    pub fn first_refused(&self, inc: &str, pages: &[Page]) -> Option<u32> {
        let tables = self.tables.lock();
        let readable = tables.readable.get(inc);
        let may_read = |page| readable.is_some_and(|pages| pages.contains_key(page));
        let refused = pages
            .iter()
            .find(|&page| !may_read(page))
            .map(|&(id, _)| id);
        self.refused
            .fetch_add(u64::from(refused.is_some()), Ordering::Relaxed);
        refused
    }

    pub fn refused_total(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_is_readable_by_its_reader_while_one_of_its_rooms_lives() {
        let pages = AnnouncedPages::default();
        let may = |inc, id, generation| pages.first_refused(inc, &[(id, generation)]).is_none();
        pages.announce_pages(1, "d", [(7, 2), (8, 4)].into_iter());
        pages.announce_pages(2, "d", [(7, 2)].into_iter());
        assert!(may("d", 7, 2) && may("d", 8, 4));
        assert!(!may("other", 7, 2) && !may("d", 7, 4) && !may("d", 9, 2));
        assert_eq!(pages.first_refused("d", &[(7, 2), (9, 2)]), Some(9));
        pages.withdraw_room(1);
        assert!(may("d", 7, 2) && !may("d", 8, 4));
        pages.withdraw_room(2);
        pages.withdraw_room(2);
        assert!(!may("d", 7, 2));
        assert_eq!(pages.refused_total(), 6);
        let tables = pages.tables.lock();
        assert!(tables.rooms.is_empty() && tables.readable.is_empty());
    }
}
