//! Small parts policies are composed of.

use rand::{Rng, RngCore};

use crate::types::WorkerView;

/// The item with the smallest key, ties broken at random in one pass; `None` when there are no
/// items.
pub fn min_by_key_random_tie<T: Copy>(
    items: impl IntoIterator<Item = T>,
    key: impl Fn(T) -> usize,
    rng: &mut dyn RngCore,
) -> Option<T> {
    let mut best: Option<(T, usize)> = None;
    let mut ties = 0u32;
    for item in items {
        let value = key(item);
        match best {
            Some((_, least)) if value > least => continue,
            Some((_, least)) if value == least => {
                // Reservoir sampling: the n-th tie replaces the winner with probability 1/n.
                ties += 1;
                if rng.random_range(0..ties) == 0 {
                    best = Some((item, value));
                }
            }
            _ => {
                best = Some((item, value));
                ties = 1;
            }
        }
    }
    best.map(|(item, _)| item)
}

/// The candidate with the fewest requests in flight, ties at random.
pub fn least_loaded(
    ready: impl IntoIterator<Item = WorkerView>,
    rng: &mut dyn RngCore,
) -> Option<WorkerView> {
    min_by_key_random_tie(ready, |worker| worker.load, rng)
}

/// Two different indices below `len` (at least 2), every ordered pair equally likely.
pub fn draw_two(len: usize, rng: &mut dyn RngCore) -> (usize, usize) {
    let first = rng.random_range(0..len);
    let other = rng.random_range(0..len - 1);
    (first, if other >= first { other + 1 } else { other })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{rng, views};

    #[test]
    fn ties_are_broken_evenly_and_higher_loads_never_win() {
        let mut rng = rng(11);
        let mut counts = [0usize; 5];
        for _ in 0..3_000 {
            let ready = views(&[2, 1, 1, 5, 1]);
            counts[least_loaded(ready, &mut rng).expect("candidates").id.0 as usize] += 1;
        }
        assert_eq!((counts[0], counts[3]), (0, 0));
        // 1000 each, standard deviation 26; six of them.
        assert!(
            [1, 2, 4].iter().all(|&at| counts[at].abs_diff(1_000) < 156),
            "{counts:?}"
        );
    }

    #[test]
    fn nothing_to_pick_from_is_none() {
        assert_eq!(least_loaded([], &mut rng(1)), None);
    }
}
