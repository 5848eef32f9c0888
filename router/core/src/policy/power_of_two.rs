//! `power_of_two`: two distinct random candidates, the one with fewer requests in flight.

use super::tie_break::draw_two;
use super::{ExplainedChoice, Policy, PolicyInput};
use crate::explain::{Explanation, PolicyBasis, PolicyTerms};
use crate::types::{SelectionReason, WorkerChoice, WorkerView};

/// Best of two random choices: nearly as even as the global minimum, without every router herding
/// on one worker.
#[derive(Debug, Default)]
pub struct PowerOfTwo;

impl Policy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power_of_two"
    }

    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        self.decide(input).map(|(choice, _)| choice)
    }

    fn decide(&self, input: &mut PolicyInput<'_>) -> Option<ExplainedChoice> {
        let (first, second, why) = match input.ready {
            [] => return None,
            [only] => (only, only, SelectionReason::Only),
            ready => {
                let (first, second) = draw_two(ready.len(), input.rng);
                (&ready[first], &ready[second], SelectionReason::LowerOfTwo)
            }
        };
        // On equal loads `first` wins; it is as random as `second`.
        let worker = if second.load < first.load {
            second.id
        } else {
            first.id
        };
        let drawn = [first.id, second.id];
        let terms = |of: &WorkerView| PolicyTerms::Drawn {
            is_drawn: drawn.contains(&of.id),
        };
        let explain =
            || Explanation::for_candidates(self.name(), PolicyBasis::Nothing, input.ready, terms);
        Some((WorkerChoice { worker, why }, input.explains.then(explain)))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::policy::testing::{chosen, rng, views};

    proptest! {
        #[test]
        fn higher_of_the_two_is_never_taken(
            loads in proptest::collection::vec(0usize..4, 2..7),
            seed in any::<u64>(),
        ) {
            let ready = views(&loads);
            let (first, second) = draw_two(ready.len(), &mut rng(seed));
            prop_assert_ne!(first, second);
            let taken = chosen(&PowerOfTwo, "", &ready, &mut rng(seed)).worker;
            let lower = ready[first].load.min(ready[second].load);
            prop_assert!(taken == ready[first].id || taken == ready[second].id);
            prop_assert_eq!(ready[taken.0 as usize].load, lower);
        }
    }

    #[test]
    fn every_pair_is_drawn_equally_often() {
        let mut counts: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        let mut rng = rng(3);
        for _ in 0..12_000 {
            *counts.entry(draw_two(4, &mut rng)).or_default() += 1;
        }
        // 12 ordered pairs, 1000 each, standard deviation 30; six of them.
        assert_eq!(counts.len(), 12);
        assert!(
            counts.values().all(|&n| n.abs_diff(1_000) < 182),
            "{counts:?}"
        );
    }

    #[test]
    fn worker_above_all_others_gets_nothing() {
        let ready = views(&[1, 9, 1, 0]);
        let mut rng = rng(5);
        assert!((0..1_000).all(|_| chosen(&PowerOfTwo, "", &ready, &mut rng).worker.0 != 1));
    }
}
