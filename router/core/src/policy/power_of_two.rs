//! `power_of_two`: two distinct random candidates, the one with fewer requests in flight.

use rand::{Rng, RngCore};

use super::Policy;
use crate::types::{Choice, RequestView, Why, WorkerView};

/// Best of two random choices: nearly as even as the global minimum, without every router herding on one worker.
#[derive(Debug, Default)]
pub struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn choose(
        &self,
        _req: &RequestView<'_>,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        match ready {
            [] => None,
            [only] => Some(Choice {
                worker: only.id,
                why: Why::Only,
            }),
            _ => {
                let (first, second) = two_distinct(ready.len(), rng);
                // On equal loads `first` wins; it is as random as `second`.
                let lower = if ready[second].load < ready[first].load {
                    second
                } else {
                    first
                };
                Some(Choice {
                    worker: ready[lower].id,
                    why: Why::LowerOfTwo,
                })
            }
        }
    }
}

/// Two different indices below `len` (at least 2), every ordered pair equally likely.
fn two_distinct(len: usize, rng: &mut dyn RngCore) -> (usize, usize) {
    let first = rng.random_range(0..len);
    let other = rng.random_range(0..len - 1);
    (first, if other >= first { other + 1 } else { other })
}
