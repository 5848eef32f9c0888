//! Turns of interrupted streams: a worker that dies leaves hundreds of them, and the workers that
//! remain prefill them a few at a time, first come, first served. A stream waits for its turn; it
//! is never refused one.
//!
//! Deterministic, no I/O, no clock: a turn ends when the attempt ends, so the pace is that of the
//! workers. The shell waits; `W` wakes one waiter.

use std::collections::VecDeque;

/// Place of a stream, waiting or with a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PacerTicket(u64);

/// Invariants: a ticket is waiting or has a turn until it leaves; nothing waits while a turn is
/// free.
#[derive(Debug)]
pub struct ResumePacer<W> {
    running: usize,
    waiting: VecDeque<(PacerTicket, W)>,
    next: u64,
}

impl<W> Default for ResumePacer<W> {
    fn default() -> Self {
        Self {
            running: 0,
            waiting: VecDeque::new(),
            next: 0,
        }
    }
}

impl<W> ResumePacer<W> {
    /// Queue up for a turn. Returns the place and the waiters whose turn it is now, perhaps this
    /// one.
    pub fn enter(&mut self, waker: W, limit: usize) -> (PacerTicket, Vec<W>) {
        let ticket = PacerTicket(self.next);
        self.next += 1;
        self.waiting.push_back((ticket, waker));
        (ticket, self.start_waiting(limit))
    }

    /// Give a place back, whether it waits or has its turn. Returns the waiters whose turn it is
    /// now.
    pub fn leave(&mut self, ticket: PacerTicket, limit: usize) -> Vec<W> {
        match self.waiting.binary_search_by_key(&ticket, |place| place.0) {
            Ok(index) => {
                self.waiting.remove(index);
            }
            Err(_) => self.running = self.running.saturating_sub(1),
        }
        self.start_waiting(limit)
    }

    pub fn waiting_count(&self) -> usize {
        self.waiting.len()
    }

    /// At least one turn is always free for the first: without ready workers the attempt itself
    /// finds that out.
    fn start_waiting(&mut self, limit: usize) -> Vec<W> {
        let count = limit
            .max(1)
            .saturating_sub(self.running)
            .min(self.waiting.len());
        self.running += count;
        self.waiting
            .drain(..count)
            .map(|(_, waker)| waker)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn turns_are_given_in_order_of_arrival() {
        let mut pacer = ResumePacer::default();
        let (first, now) = pacer.enter('a', 2);
        assert_eq!(now, ['a']);
        let (second, now) = pacer.enter('b', 2);
        assert_eq!(now, ['b']);
        let (third, now) = pacer.enter('c', 2);
        assert!(now.is_empty());
        assert!(pacer.enter('d', 2).1.is_empty());
        // A client that leaves while it waits gives no turn away.
        assert!(pacer.leave(third, 2).is_empty());
        assert_eq!(pacer.leave(first, 2), ['d']);
        // A worker came back: its turns begin with the next change.
        assert!(pacer.enter('e', 2).1.is_empty());
        assert!(pacer.enter('f', 2).1.is_empty());
        assert_eq!(pacer.leave(second, 4), ['e', 'f']);
    }

    #[test]
    fn one_turn_is_left_without_workers() {
        let mut pacer = ResumePacer::default();
        let (only, now) = pacer.enter((), 0);
        assert_eq!(now.len(), 1);
        assert!(pacer.enter((), 0).1.is_empty());
        assert_eq!(pacer.leave(only, 0).len(), 1);
    }

    proptest! {
        /// Against a list of who should have started.
        #[test]
        fn turns_never_exceed_the_limit_and_none_is_lost(
            steps in proptest::collection::vec((0usize..3, 0usize..6, any::<proptest::sample::Index>()), 1..200),
        ) {
            let mut pacer = ResumePacer::default();
            let mut started: Vec<PacerTicket> = Vec::new();
            let mut waiting: Vec<(u64, PacerTicket)> = Vec::new();
            let mut name = 0;
            for (action, limit, pick) in steps {
                let now = if action == 0 || started.len() + waiting.len() == 0 {
                    name += 1;
                    let (ticket, now) = pacer.enter(name, limit);
                    waiting.push((name, ticket));
                    now
                } else if waiting.is_empty() || (action == 1 && !started.is_empty()) {
                    pacer.leave(started.swap_remove(pick.index(started.len())), limit)
                } else {
                    pacer.leave(waiting.remove(pick.index(waiting.len())).1, limit)
                };
                let most = limit.max(1).max(started.len());
                for name in now {
                    prop_assert_eq!(waiting[0].0, name, "first come, first served");
                    started.push(waiting.remove(0).1);
                }
                prop_assert!(started.len() <= most);
                prop_assert!(waiting.is_empty() || started.len() >= limit.max(1));
                prop_assert_eq!(pacer.waiting_count(), waiting.len());
            }
        }
    }
}
