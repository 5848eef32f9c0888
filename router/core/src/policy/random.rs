//! `random`: uniform over the candidates.

use rand::{Rng, RngCore};

use super::Policy;
use crate::types::{RequestView, SelectionReason, WorkerChoice, WorkerView};

/// Uniform choice; knows and remembers nothing.
#[derive(Debug, Default)]
pub struct RandomPolicy;

impl Policy for RandomPolicy {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(
        &self,
        _req: &RequestView<'_>,
        ready: &[WorkerView],
        rng: &mut dyn RngCore,
    ) -> Option<WorkerChoice> {
        match ready {
            [] => None,
            [only] => Some(WorkerChoice { worker: only.id, why: SelectionReason::Only }),
            _ => Some(WorkerChoice {
                worker: ready[rng.random_range(0..ready.len())].id,
                why: SelectionReason::Random,
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
            counts[chosen(&RandomPolicy, "", &ready, &mut rng).worker.0 as usize] += 1;
        }
        // 1000 each, standard deviation 27; six of them.
        assert!(counts.iter().all(|&n| n.abs_diff(1_000) < 164), "{counts:?}");
    }
}
