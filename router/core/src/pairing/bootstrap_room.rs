//! Drawing bootstrap rooms: where P and D meet for one request.

use std::collections::HashSet;

use rand::{Rng, RngCore};

/// Rooms are below this: readers of JSON that keep numbers as doubles (browsers, jq) round larger
/// ones, and SGLang keeps rooms in a signed 64 bit integer.
const ROOMS: u64 = 1 << 53;

/// Draw a room, uniform over `[0, 2^53)`; with `prefill_dp = Some((dp_size, rank))` uniform over
/// those with `room % dp_size == rank`, so that prefill nodes which place requests by
/// `room % dp_size` (SGLang's) land on `rank`.
///
/// A `dp_size` of 0 is no constraint; a rank outside the size wraps around (a caller's mistake,
/// caught in debug builds).
pub fn draw_room(rng: &mut dyn RngCore, prefill_dp: Option<(u64, u64)>) -> u64 {
    let (dp_size, rank) = match prefill_dp {
        Some((dp_size, rank)) if dp_size > 0 => (dp_size.min(ROOMS), rank),
        _ => (1, 0),
    };
    debug_assert!(
        rank < dp_size,
        "DP rank {rank} of a node with {dp_size} ranks"
    );
    let rank = rank % dp_size;
    let rounds = (ROOMS - 1 - rank) / dp_size + 1; // how many rooms below ROOMS have this remainder
    rng.random_range(0..rounds) * dp_size + rank
}

/// Draws until one is free; a fleet uses so little of the range that the first nearly always is.
const DRAWS: usize = 64;

/// The rooms in use by requests in flight: no two of them meet in the same one.
///
/// Invariant: at most `limit` rooms are live; what [`LiveRooms::draw_rooms`] gave out is live until
/// it is freed.
#[derive(Debug)]
pub struct LiveRooms {
    live: HashSet<u64>,
    limit: usize,
}

impl LiveRooms {
    pub fn new(limit: usize) -> Self {
        Self {
            live: HashSet::new(),
            limit,
        }
    }

    /// Take `count` rooms that are not in use, drawn as by [`draw_room`]. `None`: there would be
    /// more than the limit, or the rank has no free room left; then nothing is taken.
    pub fn draw_rooms(
        &mut self,
        count: usize,
        rng: &mut dyn RngCore,
        prefill_dp: Option<(u64, u64)>,
    ) -> Option<Vec<u64>> {
        if self.live.len().saturating_add(count) > self.limit {
            return None;
        }
        let mut rooms = Vec::with_capacity(count);
        for _ in 0..count {
            let free = (0..DRAWS)
                .map(|_| draw_room(rng, prefill_dp))
                .find(|room| self.live.insert(*room));
            let Some(room) = free else {
                self.free_rooms(&rooms);
                return None;
            };
            rooms.push(room);
        }
        Some(rooms)
    }

    pub fn free_rooms(&mut self, rooms: &[u64]) {
        for room in rooms {
            self.live.remove(room);
        }
    }

    /// Rooms in use.
    pub fn live_count(&self) -> usize {
        self.live.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    proptest! {
        #[test]
        fn room_is_in_range_and_names_the_rank(dp_size in 1u64..=1 << 20, rank in any::<u64>(), seed in any::<u64>()) {
            let rank = rank % dp_size;
            let room = draw_room(&mut StdRng::seed_from_u64(seed), Some((dp_size, rank)));
            // RFC 8259, section 6: what a reader that keeps numbers as doubles gives back.
            prop_assert_eq!(room as f64 as u64, room);
            prop_assert!(room < ROOMS);
            prop_assert_eq!(room % dp_size, rank);
        }
    }

    proptest! {
        /// Few rooms per rank, so that draws collide.
        #[test]
        fn live_rooms_are_distinct_and_bounded(
            steps in proptest::collection::vec((1usize..4, any::<bool>()), 1..60), seed in any::<u64>(),
        ) {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut rooms = LiveRooms::new(12);
            let mut taken: Vec<Vec<u64>> = Vec::new();
            for (count, frees) in steps {
                if frees && !taken.is_empty() {
                    rooms.free_rooms(&taken.swap_remove(0));
                }
                // Eight rooms have this remainder.
                let dp = Some((ROOMS / 8, 5));
                let before = rooms.live_count();
                match rooms.draw_rooms(count, &mut rng, dp) {
                    Some(new) => taken.push(new),
                    None => {
                        prop_assert_eq!(rooms.live_count(), before);
                        prop_assert!(before + count > 7);
                    }
                }
                let mut all: Vec<u64> = taken.concat();
                prop_assert_eq!(all.len(), rooms.live_count());
                prop_assert!(all.len() <= 8);
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), rooms.live_count());
            }
        }
    }

    #[test]
    fn sixteen_equal_parts_of_the_range_are_hit_equally_often() {
        for prefill_dp in [None, Some((8, 3)), Some((0, 0))] {
            let mut rng = StdRng::seed_from_u64(5);
            let mut counts = [0usize; 16];
            for _ in 0..16_000 {
                counts[(draw_room(&mut rng, prefill_dp) >> 49) as usize] += 1;
            }
            // 1000 each, standard deviation 31; six of them.
            assert!(
                counts.iter().all(|&n| n.abs_diff(1_000) < 184),
                "{counts:?}"
            );
        }
    }

    #[test]
    fn extremes_of_the_size_stay_in_range() {
        let mut rng = StdRng::seed_from_u64(5);
        // One room has each of these remainders; a wrong count of them shows in half of the draws.
        for _ in 0..64 {
            assert_eq!(draw_room(&mut rng, Some((ROOMS, ROOMS - 1))), ROOMS - 1);
            assert_eq!(draw_room(&mut rng, Some((ROOMS - 1, ROOMS - 2))), ROOMS - 2);
            assert_eq!(draw_room(&mut rng, Some((u64::MAX, 7))), 7);
        }
    }
}
