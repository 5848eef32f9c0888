//! `random`: uniform over the candidates.

use rand::{Rng, RngCore};

use super::Policy;
use crate::types::{Choice, RequestView, Why, WorkerView};

/// Uniform choice; knows and remembers nothing.
#[derive(Debug, Default)]
pub struct Random;

impl Policy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(
        &self,
        _req: &RequestView<'_>,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        match ready {
            [] => None,
            [only] => Some(Choice { worker: only.id, why: Why::Only }),
            _ => Some(Choice {
                worker: ready[rng.random_range(0..ready.len())].id,
                why: Why::Random,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{chosen, rng, views};

    #[test]
    fn every_candidate_gets_its_share() {
        let (ready, mut rng) = (views(&[9, 0, 5, 0]), rng(7));
        let mut counts = [0usize; 4];
        for _ in 0..4_000 {
            counts[chosen(&Random, "", &ready, &mut rng).worker.0 as usize] += 1;
        }
        // 1000 each, standard deviation 27; six of them.
        assert!(counts.iter().all(|&n| n.abs_diff(1_000) < 164), "{counts:?}");
    }
}
