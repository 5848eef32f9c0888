//! Sessions: the worker that a client's session used last, and how much of a session's prompts is
//! found there.
//!
//! 1. [`SessionTable::record_sent`]: a request with a session key was sent; its worker is the
//!    session's now;
//! 2. [`SessionTable::learn`]: the worker reported how many tokens it found in its cache;
//! 3. [`SessionTable::retract_failed`]: the request failed before its first token, so its worker
//!    holds nothing of it;
//! 4. forgotten when it was not used for `session_idle_secs`, or as the one not used longest when
//!    `max_sessions` are known.
//!
//! Deterministic, no I/O. Invariant: `last_used` and `sessions` hold the same keys.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::types::{RequestView, WorkerId};

/// Share of a session's last prompt that is expected at its worker before a worker reported one. A
/// guess: a client that continues a conversation finds all of it, one whose key stands for many
/// conversations little.
const FIRST_SHARE: f64 = 0.5;
/// Weight of a report against what was believed of the session: two or three reports decide.
const SHARE_STEP: f64 = 0.5;

/// Hash of a session key, so that a key's length costs no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct SessionHash(u64);

impl SessionHash {
    /// `None` without a key; an empty one counts as none.
    pub fn of_request(request: &RequestView<'_>) -> Option<Self> {
        let key = request.session_key.filter(|key| !key.is_empty())?;
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        Some(Self(hasher.finish()))
    }
}

/// Facts about one session.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SessionRecord {
    /// Worker of its last request.
    pub worker: WorkerId,
    /// Length of that request's prompt.
    pub prompt_tokens: f64,
    /// Share of a prompt that the next one found at the same worker; between 0 and 1.
    pub found_share: f64,
    used_ms: f64,
    /// Place in `last_used`.
    turn: u64,
}

impl SessionRecord {
    /// Tokens that a prompt and the session's last one can have in common.
    fn common_tokens(&self, prompt_tokens: f64) -> f64 {
        self.prompt_tokens.min(prompt_tokens)
    }

    /// Tokens of a prompt that its worker is expected to hold beside the `cached` ones that the
    /// index knows of.
    pub fn expected_tokens(&self, prompt_tokens: f64, cached: f64) -> f64 {
        (self.found_share * self.common_tokens(prompt_tokens) - cached).max(0.0)
    }
}

/// Note about a request of a session that went to the session's worker again, or began it there.
#[derive(Debug, Clone, Copy)]
pub(super) struct SessionReceipt {
    key: SessionHash,
    /// Tokens that it may have in common with the prompt before; 0: there was none at this worker.
    common_tokens: f64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct SessionTable {
    sessions: HashMap<SessionHash, SessionRecord>,
    /// The one not used longest first.
    last_used: BTreeMap<u64, SessionHash>,
    next_turn: u64,
    max_sessions: usize,
    idle_ms: f64,
    evicted_total: u64,
}

impl SessionTable {
    pub fn new(max_sessions: usize, session_idle_secs: u64) -> Self {
        Self {
            sessions: HashMap::new(),
            last_used: BTreeMap::new(),
            next_turn: 0,
            max_sessions,
            idle_ms: session_idle_secs as f64 * 1e3,
            evicted_total: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.sessions.len()
    }

    /// Sessions dropped for a limit since the start.
    pub fn evicted_total(&self) -> u64 {
        self.evicted_total
    }

    /// The session of a request, if it is known and not idle for too long.
    pub fn find(&self, request: &RequestView<'_>) -> Option<SessionRecord> {
        let key = SessionHash::of_request(request)?;
        let session = self.sessions.get(&key)?;
        let is_idle = request.now_ms as f64 - session.used_ms > self.idle_ms;
        (!is_idle).then_some(*session)
    }

    /// The request was sent to `worker`. Returns `None` for a request without a key.
    pub fn record_sent(
        &mut self,
        request: &RequestView<'_>,
        worker: WorkerId,
        prompt_tokens: f64,
    ) -> Option<SessionReceipt> {
        let key = SessionHash::of_request(request)?;
        let before = self.find(request);
        let now_ms = request.now_ms as f64;
        self.forget(key);
        self.make_room(now_ms);
        if self.max_sessions > 0 {
            let record = SessionRecord {
                worker,
                prompt_tokens,
                found_share: before.map_or(FIRST_SHARE, |session| session.found_share),
                used_ms: now_ms,
                turn: self.next_turn,
            };
            self.sessions.insert(key, record);
            self.last_used.insert(self.next_turn, key);
            self.next_turn += 1;
        }
        let at_worker = before.filter(|session| session.worker == worker);
        Some(SessionReceipt {
            key,
            common_tokens: at_worker.map_or(0.0, |session| session.common_tokens(prompt_tokens)),
        })
    }

    /// The worker found `cached` tokens of the request's prompt.
    pub fn learn(&mut self, receipt: SessionReceipt, cached: f64) {
        if receipt.common_tokens <= 0.0 {
            return;
        }
        if let Some(session) = self.sessions.get_mut(&receipt.key) {
            let found_share = (cached / receipt.common_tokens).min(1.0);
            session.found_share += SHARE_STEP * (found_share - session.found_share);
        }
    }

    /// The request failed at `worker` before its first token. A session that went elsewhere since
    /// then stays.
    pub fn retract_failed(&mut self, receipt: SessionReceipt, worker: WorkerId) {
        let session = self.sessions.get(&receipt.key);
        if session.is_some_and(|session| session.worker == worker) {
            self.forget(receipt.key);
        }
    }

    fn forget(&mut self, key: SessionHash) {
        if let Some(session) = self.sessions.remove(&key) {
            self.last_used.remove(&session.turn);
        }
    }

    /// Drop idle sessions, and the one not used longest if there is no place for another.
    fn make_room(&mut self, now_ms: f64) {
        while let Some((_, &key)) = self.last_used.first_key_value() {
            let is_full = self.sessions.len() >= self.max_sessions;
            let used_ms = self.sessions.get(&key).map(|session| session.used_ms);
            let is_idle = used_ms.is_none_or(|used_ms| now_ms - used_ms > self.idle_ms);
            if !is_full && !is_idle {
                return;
            }
            self.last_used.pop_first();
            self.sessions.remove(&key);
            self.evicted_total += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::super::speed::{PrefillSpeed, PrefillWork};
    use super::super::tests::{cost, prefill};
    use super::super::{CostParams, CostPolicy};
    use super::*;
    use crate::explain::{CostTerms, Explanation, PolicyBasis, PolicyTerms};
    use crate::policy::testing::{blocks, rng, views};
    use crate::policy::{ExplainedChoice, Policy, PolicyInput};
    use crate::types::{PolicyEvent, Role, SelectionReason, SendTicket, TokenUsage, WorkerView};

    /// Sends prompts that share no block with one another, so that the index knows nothing of them.
    struct SessionSender {
        policy: CostPolicy,
        now_ms: u64,
        prompts: u32,
    }

    impl SessionSender {
        fn new(policy: CostPolicy) -> Self {
            Self {
                policy,
                now_ms: 0,
                prompts: 0,
            }
        }

        /// A prompt of `len` blocks of 100 tokens that begins like no other.
        fn next_prompt(&mut self, len: usize) -> String {
            self.prompts += 1;
            let first = char::from_u32(0x1000 + self.prompts).expect("a character");
            first.to_string().repeat(len.max(1))
        }

        fn decide(&self, text: &str, key: Option<&str>, ready: &[WorkerView]) -> ExplainedChoice {
            let blocks = blocks(text);
            let request = RequestView {
                prompt: blocks.prompt_view(),
                session_key: key,
                now_ms: self.now_ms,
                ..RequestView::default()
            };
            let input = &mut PolicyInput {
                request: &request,
                ready,
                rng: &mut rng(1),
                explains: true,
            };
            self.policy.decide(input).expect("candidates")
        }

        /// A request that is over when this returns: the worker found `cached` tokens.
        fn serve(&mut self, worker: u64, len: usize, key: Option<&str>, cached: u32) {
            let text = self.next_prompt(len);
            let ticket = self.send(worker, &text, key);
            let worker = WorkerId(worker);
            let usage = TokenUsage {
                prompt_tokens: 100 * len as u32,
                cached_tokens: Some(cached),
                completion_tokens: None,
            };
            let now_ms = self.now_ms;
            self.policy.observe(&PolicyEvent::FirstToken {
                ticket,
                worker,
                now_ms,
            });
            self.policy.observe(&PolicyEvent::Usage {
                ticket,
                worker,
                usage,
            });
            self.finish(ticket, worker, true);
        }

        fn send(&mut self, worker: u64, text: &str, key: Option<&str>) -> SendTicket {
            let blocks = blocks(text);
            let ticket = SendTicket(u64::from(self.prompts));
            self.policy.observe(&PolicyEvent::Routed {
                ticket,
                worker: WorkerId(worker),
                request: &RequestView {
                    prompt: blocks.prompt_view(),
                    session_key: key,
                    now_ms: self.now_ms,
                    ..RequestView::default()
                },
                reports_first_token: true,
            });
            ticket
        }

        fn finish(&self, ticket: SendTicket, worker: WorkerId, is_kept: bool) {
            self.policy.observe(&PolicyEvent::Finished {
                ticket,
                worker,
                is_kept,
                hashes: &[],
                now_ms: self.now_ms,
            });
        }
    }

    fn terms_of(explanation: &Explanation) -> BTreeMap<WorkerId, CostTerms> {
        let candidates = explanation.candidates.iter();
        let terms = candidates.map(|candidate| match candidate.terms {
            PolicyTerms::Cost(terms) => (candidate.id, terms),
            other => panic!("{other:?}"),
        });
        terms.collect()
    }

    #[test]
    fn session_returns_to_its_worker_unless_that_is_busy_gone_or_idle_for_too_long() {
        let mut sender = SessionSender::new(prefill(3));
        // Worker 2 has the largest index: without the key it is the last choice.
        sender.serve(2, 50, Some("mine"), 0);
        let ready = views(&[0, 0, 0]);
        let text = sender.next_prompt(60);
        let choose = |sender: &SessionSender, ready: &[WorkerView]| {
            let (choice, explanation) = sender.decide(&text, Some("mine"), ready);
            (choice, explanation.expect("asked for"))
        };
        let (choice, explanation) = choose(&sender, &ready);
        assert_eq!(choice.worker, WorkerId(2));
        assert!(
            matches!(choice.why, SelectionReason::Session(_)),
            "{choice:?}"
        );
        let PolicyBasis::Cost(basis) = explanation.basis else {
            panic!("{explanation:?}");
        };
        assert_eq!(basis.session_share, Some(FIRST_SHARE));
        let terms = terms_of(&explanation);
        let tokens = |id: u64| terms[&WorkerId(id)].session_tokens;
        assert_eq!([0, 1, 2].map(tokens), [0.0, 0.0, 2_500.0]);
        for key in [None, Some(""), Some("other")] {
            let (choice, explanation) = sender.decide(&text, key, &ready);
            assert_ne!(choice.worker, WorkerId(2), "{key:?}");
            let terms = terms_of(&explanation.expect("asked for"));
            assert!(terms.values().all(|terms| terms.session_tokens == 0.0));
        }
        // The session's last worker is not among the candidates.
        let (choice, _) = choose(&sender, &ready[..2]);
        assert_ne!(choice.worker, WorkerId(2));
        // 250 ms saved against 100 ms queued, then against 600 ms.
        let filler = sender.next_prompt(10);
        let short = sender.send(2, &filler, None);
        assert_eq!(choose(&sender, &ready).0.worker, WorkerId(2));
        let filler = sender.next_prompt(50);
        let long = sender.send(2, &filler, None);
        assert_ne!(choose(&sender, &ready).0.worker, WorkerId(2));
        for ticket in [short, long] {
            sender.finish(ticket, WorkerId(2), true);
        }
        sender.now_ms = 1_000 * CostParams::default().session_idle_secs;
        assert_eq!(choose(&sender, &ready).0.worker, WorkerId(2));
        sender.now_ms += 1;
        assert_ne!(choose(&sender, &ready).0.worker, WorkerId(2));
    }

    #[test]
    fn failed_request_leaves_no_session_behind() {
        let mut sender = SessionSender::new(prefill(2));
        let text = sender.next_prompt(50);
        let ticket = sender.send(1, &text, Some("mine"));
        sender.finish(ticket, WorkerId(1), false);
        assert_eq!(sender.policy.stats(0).keys, 0);
    }

    #[test]
    fn short_prompts_of_a_session_stay_together_by_the_rule_for_ties() {
        for role in Role::ALL {
            let mut sender = SessionSender::new(cost(role, 4, CostParams::default()));
            sender.serve(3, 1, Some("mine"), 0);
            for seed in 0..20 {
                let text = sender.next_prompt(1);
                let (choice, _) = sender.decide(&text, Some("mine"), &views(&[0; 4]));
                assert_eq!(choice.worker, WorkerId(3), "{role} {seed}");
            }
        }
    }

    #[test]
    fn key_of_unrelated_prompts_loses_its_weight() {
        let mut sender = SessionSender::new(prefill(2));
        for _ in 0..12 {
            sender.serve(0, 50, Some("all"), 0);
        }
        let text = sender.next_prompt(50);
        let (_, explanation) = sender.decide(&text, Some("all"), &views(&[0, 0]));
        let tokens = terms_of(&explanation.expect("asked for"))[&WorkerId(0)].session_tokens;
        assert!(tokens < 2.0, "{tokens}");
    }

    proptest! {
        /// With any history: candidates that the session did not use keep their distances, and what
        /// its worker gains is at most what a cached prefix of the session's last prompt would be
        /// worth at the present price.
        #[test]
        fn session_is_worth_at_most_a_cached_prefix(
            history in proptest::collection::vec((0u64..4, 1usize..80, 0usize..3, 0u32..8_000, any::<bool>()), 0..25),
            key in 0usize..3,
            len in 1usize..80,
            busy in 0usize..4,
        ) {
            const KEYS: [Option<&str>; 3] = [None, Some("a"), Some("b")];
            let mut sender = SessionSender::new(prefill(4));
            let mut last: [Option<(u64, usize)>; 3] = [None; 3];
            for (worker, len, key, cached, is_served) in history {
                if is_served {
                    sender.serve(worker, len, KEYS[key], cached);
                } else {
                    let text = sender.next_prompt(len);
                    sender.send(worker, &text, KEYS[key]);
                }
                last[key] = Some((worker, len));
                sender.now_ms += 7;
            }
            let ready = views(&[0, busy, 0, 0]);
            let text = sender.next_prompt(len);
            let explain = |key| {
                let (_, explanation) = sender.decide(&text, key, &ready);
                let explanation = explanation.expect("asked for");
                let PolicyBasis::Cost(basis) = explanation.basis else {
                    panic!("{explanation:?}");
                };
                (terms_of(&explanation), basis.price.price)
            };
            let (without, price) = explain(None);
            let (with, _) = explain(KEYS[key]);
            let home = last[key].filter(|_| KEYS[key].is_some());
            let Some((home, last_len)) = home else {
                prop_assert_eq!(without, with);
                return Ok(());
            };
            let gain = |worker: u64| with[&WorkerId(worker)].cost_ms - without[&WorkerId(worker)].cost_ms;
            let mut others = (0..4).filter(|worker| *worker != home);
            let other = gain(others.next().expect("three others"));
            for worker in others {
                prop_assert!((gain(worker) - other).abs() < 1e-6);
            }
            let state = sender.policy.lock_state();
            let speed: PrefillSpeed = state.ranks[&WorkerId(home)].prefill_speed(state.speed, sender.now_ms as f64);
            let tokens = 100.0 * len as f64;
            let common = 100.0 * len.min(last_len) as f64;
            let whole_ms = speed.duration_ms(PrefillWork::of_prompt(tokens, 0.0));
            let rest_ms = speed.duration_ms(PrefillWork::of_prompt(tokens - common, common));
            let worth = other - gain(home);
            prop_assert!(worth >= -1e-6, "{worth}");
            prop_assert!(worth <= price * (whole_ms - rest_ms) + 1e-6, "{worth} {price} {whole_ms} {rest_ms}");
        }
    }

    fn request(key: &str, now_ms: u64) -> RequestView<'_> {
        RequestView {
            session_key: Some(key),
            now_ms,
            ..RequestView::default()
        }
    }

    #[test]
    fn share_of_a_session_follows_reports_of_its_worker() {
        let mut table = SessionTable::new(10, 60);
        let first = table.record_sent(&request("a", 0), WorkerId(1), 1_000.0);
        table.learn(first.expect("a key"), 1_000.0); // another's prefix: says nothing of this key
        let session = table.find(&request("a", 0)).expect("known");
        assert_eq!(session.expected_tokens(3_000.0, 0.0), 500.0);
        assert_eq!(session.expected_tokens(400.0, 0.0), 200.0);
        assert_eq!(session.expected_tokens(3_000.0, 600.0), 0.0);
        let second = table.record_sent(&request("a", 1), WorkerId(1), 3_000.0);
        table.learn(second.expect("a key"), 1_200.0); // all of the first, and its answer
        let session = table.find(&request("a", 1)).expect("known");
        assert_eq!(session.expected_tokens(9_000.0, 0.0), 0.75 * 3_000.0);
        let elsewhere = table.record_sent(&request("a", 2), WorkerId(2), 100.0);
        table.learn(elsewhere.expect("a key"), 0.0);
        let session = table.find(&request("a", 2)).expect("known");
        assert_eq!((session.worker, session.found_share), (WorkerId(2), 0.75));
    }

    #[test]
    fn failed_request_ends_its_session_unless_it_went_on_elsewhere() {
        let mut table = SessionTable::new(10, 60);
        let failed = table.record_sent(&request("a", 0), WorkerId(1), 10.0);
        let failed = failed.expect("a key");
        table.record_sent(&request("a", 0), WorkerId(2), 10.0);
        table.retract_failed(failed, WorkerId(1));
        assert!(table.find(&request("a", 0)).is_some());
        table.retract_failed(failed, WorkerId(2));
        assert_eq!((table.find(&request("a", 0)), table.len()), (None, 0));
    }

    proptest! {
        /// Against a list of the last requests.
        #[test]
        fn table_holds_the_sessions_used_last(
            sends in proptest::collection::vec((0usize..6, 0u64..3, 0u64..20_000), 0..60),
            max_sessions in 0usize..5,
        ) {
            const IDLE_SECS: u64 = 30;
            let mut table = SessionTable::new(max_sessions, IDLE_SECS);
            let mut newest: VecDeque<(String, u64, u64)> = VecDeque::new();
            let mut now_ms = 0;
            for (key, worker, pause_ms) in sends {
                now_ms += pause_ms;
                let key = "k".repeat(key); // the empty one is none
                table.record_sent(&request(&key, now_ms), WorkerId(worker), 1.0);
                newest.retain(|(held, _, _)| *held != key);
                if !key.is_empty() {
                    newest.push_front((key, worker, now_ms));
                }
                newest.truncate(max_sessions);
                newest.retain(|(_, _, used_ms)| now_ms - used_ms <= IDLE_SECS * 1_000);
                for key in (0..6).map(|length| "k".repeat(length)) {
                    let found = table.find(&request(&key, now_ms)).map(|session| session.worker);
                    let held = newest.iter().find(|(held, _, _)| *held == key);
                    prop_assert_eq!(found, held.map(|(_, worker, _)| WorkerId(*worker)));
                }
                prop_assert!(table.len() <= max_sessions);
                prop_assert_eq!(table.len(), table.last_used.len());
            }
        }
    }
}
