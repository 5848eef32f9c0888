//! `round_robin`: the candidates in turn.

use std::sync::atomic::{AtomicUsize, Ordering};

use rand::RngCore;

use super::Policy;
use crate::types::{Choice, RequestView, Why, WorkerView};

/// Takes the candidates in the order given, each in turn. Exactly fair while the candidates stay the same; when they
/// change the turn goes on from wherever the counter stands.
#[derive(Debug, Default)]
pub struct RoundRobin {
    /// Decisions so far. Its advance is the only thing a `choose` of any policy changes.
    turn: AtomicUsize,
}

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn choose(
        &self,
        _req: &RequestView<'_>,
        ready: &[WorkerView],
        _rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        match ready {
            [] => None,
            [only] => Some(Choice {
                worker: only.id,
                why: Why::Only,
            }),
            _ => {
                let turn = self.turn.fetch_add(1, Ordering::Relaxed);
                Some(Choice {
                    worker: ready[turn % ready.len()].id,
                    why: Why::RoundRobin,
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{chosen, rng, views};

    #[test]
    fn turns_are_exactly_equal_also_between_threads() {
        let (policy, ready) = (RoundRobin::default(), views(&[3, 0, 1]));
        let turns = || -> Vec<u64> {
            (0..300)
                .map(|_| chosen(&policy, "", &ready, &mut rng(1)).worker.0)
                .collect()
        };
        let all: Vec<u64> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(turns)).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        let count = |worker| all.iter().filter(|&&chosen| chosen == worker).count();
        assert_eq!([count(0), count(1), count(2)], [400, 400, 400]);
    }

    #[test]
    fn order_is_that_of_the_candidates() {
        let (policy, ready) = (RoundRobin::default(), views(&[0, 0, 0]));
        let turns: Vec<u64> = (0..6)
            .map(|_| chosen(&policy, "", &ready, &mut rng(1)).worker.0)
            .collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
    }
}
