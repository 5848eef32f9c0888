//! Drawing bootstrap rooms: where P and D meet for one request.

use rand::{Rng, RngCore};

/// Rooms are below this: SGLang keeps them in a signed 64 bit integer.
const ROOMS: u64 = 1 << 63;

/// Draw a room, uniform over `[0, 2^63)`; with `prefill_dp = Some((dp_size, rank))` uniform over those with
/// `room % dp_size == rank`, so that prefill nodes which place requests by `room % dp_size` (SGLang's) land on `rank`.
///
/// A `dp_size` of 0 is no constraint; a rank outside the size wraps around (a caller's mistake, caught in debug builds).
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
            prop_assert!(room < ROOMS);
            prop_assert_eq!(room % dp_size, rank);
        }
    }

    #[test]
    fn sixteen_equal_parts_of_the_range_are_hit_equally_often() {
        for prefill_dp in [None, Some((8, 3)), Some((0, 0))] {
            let mut rng = StdRng::seed_from_u64(5);
            let mut counts = [0usize; 16];
            for _ in 0..16_000 {
                counts[(draw_room(&mut rng, prefill_dp) >> 59) as usize] += 1;
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
