//! `round_robin`: the candidates in turn.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::{Policy, PolicyInput};
use crate::types::{PolicyEvent, SelectionReason, WorkerChoice};

/// Takes the candidates in the order given, each in turn. Exactly fair while the candidates stay
/// the same; when they change, the turn continues from the counter's value.
#[derive(Debug, Default)]
pub struct RoundRobin {
    /// Requests sent so far that had a choice.
    turn: AtomicUsize,
    /// True if the last request had a choice. With a single candidate (a retry that avoids the
    /// others) no worker's turn passes.
    had_choice: AtomicBool,
}

impl Policy for RoundRobin {
    fn name(&self) -> &'static str {
        "round_robin"
    }

    fn choose(&self, input: &mut PolicyInput<'_>) -> Option<WorkerChoice> {
        self.had_choice
            .store(input.ready.len() > 1, Ordering::Relaxed);
        let turn = self.turn.load(Ordering::Relaxed);
        let (worker, why) = match input.ready {
            [] => return None,
            [only] => (only.id, SelectionReason::Only),
            ready => (ready[turn % ready.len()].id, SelectionReason::RoundRobin),
        };
        Some(WorkerChoice { worker, why })
    }

    fn observe(&self, event: &PolicyEvent<'_>) {
        if let PolicyEvent::Routed { .. } = event
            && self.had_choice.load(Ordering::Relaxed)
        {
            self.turn.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{TestSender, chosen, rng, views};

    #[test]
    fn order_is_that_of_the_candidates_and_only_what_is_sent_takes_a_turn() {
        let policy = RoundRobin::default();
        let ready = views(&[3, 0, 1]);
        let mut sender = TestSender::default();
        let turns: Vec<u64> = (0..6)
            .map(|_| {
                let asked = || chosen(&policy, "", &ready, &mut rng(1)).worker.0;
                assert_eq!(asked(), asked());
                let worker = asked();
                sender.routed(&policy, worker, "");
                worker
            })
            .collect();
        assert_eq!(turns, [0, 1, 2, 0, 1, 2]);
        assert_eq!(chosen(&policy, "", &ready[2..], &mut rng(1)).worker.0, 2);
        sender.routed(&policy, 2, "");
        assert_eq!(chosen(&policy, "", &ready, &mut rng(1)).worker.0, 0);
    }
}
