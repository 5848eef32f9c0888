//! Page checksums by (page, generation): a shared prefix is hashed once, however many requests announce it.

use parking_lot::Mutex;

/// One remembered checksum per page; bounded by the pool's size (16 bytes per page).
pub struct SumCache(Mutex<Vec<(u64, u64)>>);

impl SumCache {
    /// No real generation announced for a transfer is u64::MAX (it is odd), so fresh entries never match.
    pub fn new(num_pages: usize) -> Self {
        Self(Mutex::new(vec![(u64::MAX, 0); num_pages]))
    }

    pub fn get(&self, page: u32, generation: u64) -> Option<u64> {
        let (known, sum) = self.0.lock()[page as usize];
        (known == generation).then_some(sum)
    }

    pub fn put(&self, page: u32, generation: u64, sum: u64) {
        self.0.lock()[page as usize] = (generation, sum);
    }
}
