//! `random`: uniform over the candidates.

use rand::Rng;

use super::{Policy, PolicyInput};
use crate::types::{SelectionReason, WorkerChoice};

/// Uniform choice; knows and remembers nothing.
#[derive(Debug, Default)]
pub struct RandomPolicy;

impl Policy for RandomPolicy {
    fn name(&self) -> &'static str {
        "random"
    }

    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        let (worker, why) = match input.ready {
            [] => return None,
            [only] => (only.id, SelectionReason::Only),
            ready => (
                ready[input.rng.random_range(0..ready.len())].id,
                SelectionReason::Random,
            ),
        };
        Some(WorkerChoice { worker, why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{chosen, rng, views};

    #[test]
    fn every_candidate_gets_its_share() {
        let ready = views(&[9, 0, 5, 0]);
        let mut rng = rng(7);
        let mut counts = [0usize; 4];
        for _ in 0..4_000 {
            counts[chosen(&RandomPolicy, "", &ready, &mut rng).worker.0 as usize] += 1;
        }
        // 1000 each, standard deviation 27; six of them.
        assert!(
            counts.iter().all(|&n| n.abs_diff(1_000) < 164),
            "{counts:?}"
        );
    }
}
