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
