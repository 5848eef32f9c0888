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
            [only] => Some(Choice {
                worker: only.id,
                why: Why::Only,
            }),
            _ => Some(Choice {
                worker: ready[rng.random_range(0..ready.len())].id,
                why: Why::Random,
            }),
        }
    }
}
