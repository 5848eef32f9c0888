//! Helpers of the policies' tests.

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::Policy;
use crate::types::{Choice, RequestView, WorkerId, WorkerView};

pub fn rng(seed: u64) -> StdRng {
    StdRng::seed_from_u64(seed)
}

/// Workers 0, 1, 2 … with these loads.
pub fn views(loads: &[usize]) -> Vec<WorkerView> {
    (0..)
        .zip(loads)
        .map(|(id, &load)| WorkerView {
            id: WorkerId(id),
            load,
        })
        .collect()
}

/// The choice for `text`; there must be candidates.
pub fn chosen(policy: &dyn Policy, text: &str, ready: &[WorkerView], rng: &mut StdRng) -> Choice {
    let request = RequestView {
        text,
        routing_key: None,
    };
    policy
        .choose(&request, ready, rng)
        .expect("there are candidates")
}
