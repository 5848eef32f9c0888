//! Helpers of the policies' tests.

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{Policy, PolicyInput};
use crate::prompt::PromptBlocks;
use crate::types::{PolicyEvent, RequestView, SendTicket, WorkerChoice, WorkerId, WorkerView};

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
            host: 0,
        })
        .collect()
}

/// A prompt of one block of 100 tokens per letter.
pub fn blocks(text: &str) -> PromptBlocks {
    let ids: Vec<u64> = text.chars().map(u64::from).collect();
    PromptBlocks::of_ids(&ids, 100, 100 * ids.len() as u32)
}

/// The choice for `text`; there must be candidates.
pub fn chosen(
    policy: &dyn Policy,
    text: &str,
    ready: &[WorkerView],
    rng: &mut StdRng,
) -> WorkerChoice {
    TestSender::default()
        .choose(policy, text, ready, rng)
        .expect("there are candidates")
}

/// A shell in small: gives out tickets, builds views and events.
#[derive(Default)]
pub struct TestSender {
    pub now_ms: u64,
    pub tickets: u64,
}

impl TestSender {
    pub fn choose(
        &self,
        policy: &dyn Policy,
        text: &str,
        ready: &[WorkerView],
        rng: &mut StdRng,
    ) -> Option<WorkerChoice> {
        let blocks = blocks(text);
        let request = RequestView {
            text,
            prompt: blocks.prompt_view(),
            now_ms: self.now_ms,
            ..RequestView::default()
        };
        policy.choose(&mut PolicyInput {
            request: &request,
            ready,
            rng,
            explains: false,
        })
    }

    pub fn routed(&mut self, policy: &dyn Policy, worker: u64, text: &str) -> SendTicket {
        self.tickets += 1;
        let blocks = blocks(text);
        let ticket = SendTicket(self.tickets);
        policy.observe(&PolicyEvent::Routed {
            ticket,
            worker: WorkerId(worker),
            request: &RequestView {
                text,
                prompt: blocks.prompt_view(),
                now_ms: self.now_ms,
                ..RequestView::default()
            },
            reports_first_token: true,
        });
        ticket
    }

    pub fn first_token(&self, policy: &dyn Policy, ticket: SendTicket, worker: u64) {
        let worker = WorkerId(worker);
        let now_ms = self.now_ms;
        policy.observe(&PolicyEvent::FirstToken {
            ticket,
            worker,
            now_ms,
        });
    }

    pub fn finished(
        &self,
        policy: &dyn Policy,
        ticket: SendTicket,
        worker: u64,
        text: &str,
        ok: bool,
    ) {
        policy.observe(&PolicyEvent::Finished {
            ticket,
            worker: WorkerId(worker),
            is_kept: ok,
            hashes: blocks(text).prompt_view().hashes,
            now_ms: self.now_ms,
        });
    }

    /// Choose by routing key and send it there.
    pub fn keyed(
        &mut self,
        policy: &dyn Policy,
        key: &str,
        ready: &[WorkerView],
        rng: &mut StdRng,
    ) -> WorkerChoice {
        let request = RequestView {
            routing_key: Some(key),
            now_ms: self.now_ms,
            ..RequestView::default()
        };
        let mut input = PolicyInput {
            request: &request,
            ready,
            rng,
            explains: false,
        };
        let choice = policy.choose(&mut input).expect("candidates");
        self.tickets += 1;
        policy.observe(&PolicyEvent::Routed {
            ticket: SendTicket(self.tickets),
            worker: choice.worker,
            request: &request,
            reports_first_token: true,
        });
        choice
    }
}
