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
