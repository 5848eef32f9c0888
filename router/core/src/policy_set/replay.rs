//! A decision log decided again, by the code that decided it.
//!
//! 1. every line goes to new policies as it went to the ones that wrote it; `choose` is asked again
//!    with the same request, candidates and chance;
//! 2. its answer is compared, and judged by a `cost` policy of its own that observes the same: how
//!    long until the first token, how much of the prompt is there already, for the recorded and for
//!    the new choice;
//! 3. the request goes to its recorded worker, because all later lines follow from that. So another
//!    policy decides in each recorded situation of the fleet, not in the situations that it would
//!    have caused (that needs a model of the fleet: `examples/fleet`).
//!
//! With the same policies and parameters, and no line missing, every decision must be the recorded
//! one: state, chance and time all come from the log. Invariant: memory is that of the policies and
//! of the requests in flight.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::decision_log::{
    ChangeRecord, DecisionInput, DecisionSide, LogEntry, LogLine, ObservedEvent,
};
use crate::explain::{Explanation, PolicyTerms};
use crate::kv::CacheUpdateError;
use crate::policy::{PolicyKind, PolicyParams};
use crate::policy_set::{PairConstraints, PolicySet};
use crate::types::{
    PolicyEvent, RequestView, Role, RoutingRequest, SendTicket, WorkerChoice, WorkerId, WorkerView,
};

/// See the module.
pub struct DecisionReplay {
    recorded: [&'static str; 3],
    policies: PolicySet,
    evaluators: PolicySet,
    /// Prompts and forecasts of requests in flight.
    in_flight: HashMap<SendTicket, InFlight>,
    /// Number the next line should have.
    next: u64,
    report: ReplayReport,
}

struct InFlight {
    role: Role,
    hashes: Vec<u64>,
    sent_ms: u64,
}

/// Result of a replay; `Display` is the table of `baton replay`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReplayReport {
    pub lines: u64,
    /// Numbers that never came: the queue of the log was full, or files are missing.
    pub missing: u64,
    /// Decisions for the role that prefills, and for decode workers.
    pub roles: BTreeMap<&'static str, DecisionCounts>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DecisionCounts {
    pub recorded_policy: &'static str,
    pub policy: &'static str,
    pub same: u64,
    /// Another worker.
    pub other_worker: u64,
    /// The same worker, for another reason or with another forecast.
    pub other_reason: u64,
    pub first_difference: Option<DecisionDifference>,
    /// (recorded, again) by reason.
    pub whys: BTreeMap<&'static str, (u64, u64)>,
    pub recorded: PolicyEvaluation,
    pub again: PolicyEvaluation,
    /// Reports of workers about the recorded choices.
    pub observed: PolicyEvaluation,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecisionDifference {
    pub n: u64,
    pub recorded: Option<WorkerChoice>,
    pub again: Option<WorkerChoice>,
}

/// Sums over decisions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PolicyEvaluation {
    pub times: u64,
    pub ttft_ms: f64,
    pub prompt_tokens: f64,
    pub cached_tokens: f64,
}

impl DecisionReplay {
    /// `recorded` wrote the log, for the table; `kind` and `params` decide now.
    pub fn new(
        recorded: impl Fn(Role) -> PolicyKind,
        kind: impl Fn(Role) -> PolicyKind,
        params: &PolicyParams,
    ) -> Self {
        Self {
            recorded: Role::ALL.map(|role| recorded(role).into_str()),
            policies: PolicySet::new(kind, params),
            evaluators: PolicySet::new(|_| PolicyKind::Cost, params),
            in_flight: HashMap::new(),
            next: 0,
            report: ReplayReport::default(),
        }
    }

    /// Lines come in the order of their numbers; false: this one is older than one that came
    /// before.
    pub fn replay_line(&mut self, line: &LogLine) -> bool {
        if line.n < self.next {
            return false;
        }
        self.report.missing += line.n - self.next;
        self.report.lines += 1;
        self.next = line.n + 1;
        match &line.entry {
            LogEntry::Decided { asked, choices } => self.replay_decision(line.n, asked, choices),
            LogEntry::Observed { role, observed } => self.replay_event(*role, observed),
            LogEntry::Cached {
                role,
                worker,
                update,
            } => {
                let changes = update.map_changes(ChangeRecord::block_changes);
                for policies in [&self.policies, &self.evaluators] {
                    // The recorded run took or refused this update; the replay does the same.
                    let update = changes.map_changes(Vec::as_slice);
                    let _: Result<(), CacheUpdateError> =
                        policies.apply_cache_update(*role, *worker, &update);
                }
            }
            LogEntry::Evict { role, now_ms } => {
                self.policies.policy(*role).evict(*now_ms);
            }
        }
        true
    }

    pub fn report(&self) -> &ReplayReport {
        &self.report
    }

    fn replay_decision(&mut self, n: u64, input: &DecisionInput, choices: &[Option<WorkerChoice>]) {
        let made_up = (input.text.is_none()).then(|| text_of(input));
        let request = RequestView {
            text: input.text.as_deref().or(made_up.as_deref()).unwrap_or(""),
            prompt: input.prompt.with_hashes(&input.prompt.hashes.0),
            routing_key: input.key.as_deref(),
            session_key: input.session.as_deref(),
            now_ms: input.now_ms,
        };
        let routing = RoutingRequest {
            request,
            seed: input.seed,
            explains: true,
            streams: input.streams,
        };
        let views: Vec<Vec<WorkerView>> =
            input.sides.iter().map(DecisionSide::worker_views).collect();
        let constraints = input
            .fingerprints
            .clone()
            .map(|fingerprints| PairConstraints {
                fingerprints,
                excluded: input.excluded_pairs.clone(),
            });
        let select_again =
            |policies: &PolicySet, routing: &RoutingRequest<'_>| match views.as_slice() {
                [ready] => vec![policies.select_worker(input.role, routing, ready)],
                [p, d] => match policies.select_pair(routing, [p, d], constraints.as_ref()) {
                    Some(pair) => pair.map(Some).into(),
                    None => vec![None, None],
                },
                _ => Vec::new(), // no decision has no or three sides
            };
        let again = select_again(&self.policies, &routing).into_iter();
        let evaluated = select_again(&self.evaluators, &RoutingRequest { seed: 0, ..routing });
        for (side, (again, evaluated)) in again.zip(evaluated).enumerate() {
            let role = if side == 0 { input.role } else { Role::Decode };
            let again = again.map(|(choice, _)| choice);
            let recorded = choices.get(side).copied().flatten();
            let decisions = self.report.roles.entry(role.into_str()).or_default();
            decisions.recorded_policy = self.recorded[role.index()];
            decisions.policy = self.policies.policy(role).name();
            decisions.compare(n, recorded, again);
            if let Some((_, Some(explanation))) = evaluated {
                decisions.recorded.add_prediction(&explanation, recorded);
                decisions.again.add_prediction(&explanation, again);
            }
            if let Some(choice) = recorded {
                let ticket = input.sides[side].ticket;
                self.policies.observe_routed(role, &routing, choice, ticket);
                self.evaluators
                    .observe_routed(role, &routing, choice, ticket);
                let hashes = input.prompt.hashes.0.clone();
                let sent_ms = input.now_ms;
                self.in_flight.insert(
                    ticket,
                    InFlight {
                        role,
                        hashes,
                        sent_ms,
                    },
                );
            }
        }
    }

    fn replay_event(&mut self, role: Role, observed: &ObservedEvent) {
        let in_flight = match observed {
            ObservedEvent::FirstToken { ticket, .. }
            | ObservedEvent::Usage { ticket, .. }
            | ObservedEvent::Finished { ticket, .. } => self.in_flight.get(ticket),
            _ => None,
        };
        let sent_hashes: &[u64] = in_flight.map_or(&[], |sent| &sent.hashes);
        let Some(mut event) = observed.policy_event(sent_hashes) else {
            return;
        };
        self.policies.observe(role, &event);
        if let PolicyEvent::Finished { hashes, .. } = &mut event {
            // the evaluators read them whether or not the recorded policy did
            *hashes = sent_hashes;
        }
        self.evaluators.observe(role, &event);
        if let Some(sent) = in_flight {
            let decisions = self.report.roles.entry(sent.role.into_str()).or_default();
            decisions.observed.add_observation(observed, sent);
        }
        if let ObservedEvent::Finished { ticket, .. } = observed {
            self.in_flight.remove(ticket);
        }
    }
}

/// For a policy that reads text, of a log that holds none: four characters a block, equal as far as
/// the blocks are. The rest behind the last whole block is missing.
fn text_of(input: &DecisionInput) -> String {
    let part = |hash: u64, at: u32| (hash >> (16 * at)) as u32 & 0xffff;
    let hashes = input.prompt.hashes.0.iter();
    let chars = hashes.flat_map(|hash| (0..4).map(|at| char::from_u32(0x1_0000 + part(*hash, at))));
    chars.flatten().collect()
}

impl DecisionCounts {
    fn compare(&mut self, n: u64, recorded: Option<WorkerChoice>, again: Option<WorkerChoice>) {
        let why = |choice: Option<WorkerChoice>| {
            choice.map_or("no worker", |choice| choice.why.into_str())
        };
        self.whys.entry(why(recorded)).or_default().0 += 1;
        self.whys.entry(why(again)).or_default().1 += 1;
        if recorded == again {
            self.same += 1;
            return;
        }
        let worker = |choice: Option<WorkerChoice>| choice.map(|choice| choice.worker);
        if worker(recorded) == worker(again) {
            self.other_reason += 1;
        } else {
            self.other_worker += 1;
        }
        self.first_difference
            .get_or_insert(DecisionDifference { n, recorded, again });
    }

    fn total_decisions(&self) -> u64 {
        self.same + self.other_worker + self.other_reason
    }

    fn write_table(&self, f: &mut fmt::Formatter<'_>, role: &str) -> fmt::Result {
        let total = self.total_decisions();
        let percent = |part: u64| 100.0 * part as f64 / total.max(1) as f64;
        let recorded = self.recorded_policy;
        let again = self.policy;
        writeln!(f, "\n{role}: {recorded} recorded, {again} again")?;
        for (label, count) in [
            ("same decision", self.same),
            ("other worker", self.other_worker),
            ("same worker, other reason", self.other_reason),
        ] {
            writeln!(f, "  {label:<26} {count:>9}  {:>6.2} %", percent(count))?;
        }
        writeln!(
            f,
            "  {:<26} {:>9} {:>9} {:>9}",
            "", "recorded", "again", "observed"
        )?;
        let sides = [&self.recorded, &self.again, &self.observed];
        let row = |f: &mut fmt::Formatter<'_>, what: &str, values: [Option<f64>; 3]| {
            let shown = |value: f64| format!("{value:.1}");
            let [a, b, c] = values.map(|value| value.map_or("-".to_owned(), shown));
            writeln!(f, "  {what:<26} {a:>9} {b:>9} {c:>9}")
        };
        if role != Role::Decode.into_str() {
            row(
                f,
                "mean TTFT [ms]",
                sides.map(PolicyEvaluation::mean_ttft_ms),
            )?;
        }
        let hits = sides.map(|side| side.hit_rate().map(|rate| 100.0 * rate));
        row(f, "cached prompt tokens [%]", hits)?;
        for (why, (recorded, again)) in &self.whys {
            writeln!(f, "  {why:<26} {recorded:>9} {again:>9}")?;
        }
        if let Some(DecisionDifference { n, recorded, again }) = self.first_difference {
            let show = |choice: Option<WorkerChoice>| match choice {
                Some(choice) => format!("worker {} ({})", choice.worker, choice.why),
                None => "no worker".to_owned(),
            };
            let recorded = show(recorded);
            let again = show(again);
            writeln!(
                f,
                "  first difference: line {n}: {recorded} recorded, {again} again"
            )?;
        }
        Ok(())
    }
}

impl PolicyEvaluation {
    fn add_prediction(&mut self, explanation: &Explanation, choice: Option<WorkerChoice>) {
        let worker: Option<WorkerId> = choice.map(|choice| choice.worker);
        let chosen = explanation.candidates.iter().find(|c| Some(c.id) == worker);
        if let Some(PolicyTerms::Cost(terms)) = chosen.map(|chosen| chosen.terms) {
            self.times += 1;
            self.ttft_ms += terms.backlog_ms + terms.prefill_ms;
            self.prompt_tokens += terms.cached_tokens + terms.uncached_tokens;
            self.cached_tokens += terms.cached_tokens;
        }
    }

    fn add_observation(&mut self, observed: &ObservedEvent, sent: &InFlight) {
        match observed {
            ObservedEvent::FirstToken { now_ms, .. } => {
                self.times += 1;
                self.ttft_ms += now_ms.saturating_sub(sent.sent_ms) as f64;
            }
            ObservedEvent::Usage { usage, .. } => {
                if let Some(cached) = usage.cached_tokens {
                    self.prompt_tokens += f64::from(usage.prompt_tokens);
                    self.cached_tokens += f64::from(cached);
                }
            }
            _ => {}
        }
    }

    pub fn mean_ttft_ms(&self) -> Option<f64> {
        (self.times > 0).then(|| self.ttft_ms / self.times as f64)
    }

    /// Cached share of the prompt tokens.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.prompt_tokens > 0.0).then(|| self.cached_tokens / self.prompt_tokens)
    }
}

impl ReplayReport {
    /// True if every decision was made again as it was recorded.
    pub fn is_same(&self) -> bool {
        let mut roles = self.roles.values();
        roles.all(|decisions| decisions.other_worker + decisions.other_reason == 0)
    }
}

impl fmt::Display for ReplayReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} lines", self.lines)?;
        if self.missing > 0 {
            writeln!(
                f,
                "{} lines are missing: from the first gap on, decisions may differ for that alone",
                self.missing
            )?;
        }
        for (role, decisions) in &self.roles {
            decisions.write_table(f, role)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;

    use super::*;
    use crate::decision_log::LogSink;
    use crate::kv::{BlockChange, CacheUpdate};
    use crate::pairing::fingerprint::WorkerFingerprint;
    use crate::policy::testing::{blocks, views};
    use crate::types::{RoutingRequest, TokenUsage, WorkerFacts};

    /// Lines as they stand in a file.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<String>>>);

    impl LogSink for Written {
        fn put_line(&self, line: LogLine) {
            let text = serde_json::to_string(&line).expect("plain data");
            self.0.lock().expect("no panic").push(text);
        }
    }

    impl Written {
        fn lines(&self) -> Vec<String> {
            self.0.lock().expect("no panic").clone()
        }
    }

    /// Small model of a router: sends requests and advances those that were sent.
    struct Router {
        policy_set: PolicySet,
        written: Written,
        tickets: u64,
        now_ms: u64,
        /// (role, ticket, worker, text)
        in_flight: Vec<(Role, SendTicket, WorkerId, String)>,
    }

    impl Router {
        fn new(kind: PolicyKind) -> Self {
            let written = Written::default();
            let policy_set = PolicySet::new(|_| kind, &PolicyParams::default())
                .with_journal(Box::new(written.clone()), 99);
            for (role, id) in Role::ALL
                .into_iter()
                .flat_map(|role| (0..4).map(move |id| (role, id)))
            {
                policy_set.add_worker(
                    role,
                    WorkerId(id),
                    WorkerFacts::default(),
                    &format!("http://w{id}"),
                );
            }
            Self {
                policy_set,
                written,
                tickets: 0,
                now_ms: 0,
                in_flight: Vec::new(),
            }
        }

        fn send(&mut self, is_pair: bool, text: &str, seed: u64) {
            let blocks = blocks(text);
            let key = text.get(..1);
            let routing = RoutingRequest {
                request: RequestView {
                    text,
                    prompt: blocks.prompt_view(),
                    routing_key: key,
                    session_key: key,
                    now_ms: self.now_ms,
                },
                seed,
                explains: seed.is_multiple_of(3),
                streams: seed.is_multiple_of(2),
            };
            let ready = views(&[0, seed as usize % 5, 1, 0]);
            let mut sent = |role, ticket, choice: WorkerChoice| {
                self.in_flight
                    .push((role, ticket, choice.worker, text.to_owned()));
            };
            self.tickets += 2;
            let p = SendTicket(self.tickets - 1);
            let d = SendTicket(self.tickets);
            if is_pair {
                let fingerprint = |size: u32| {
                    WorkerFingerprint::from_values(|aspect| {
                        (aspect == "page_size").then(|| size.to_string())
                    })
                };
                let fingerprints = [16, 32, 16, 32].map(fingerprint);
                let fingerprints = [fingerprints.to_vec(), fingerprints[1..].to_vec()];
                let excluded = vec![[ready[0].id, ready[2].id]];
                let constraints = PairConstraints {
                    fingerprints,
                    excluded,
                };
                let constraints = seed.is_multiple_of(5).then_some(&constraints);
                let pair = self.policy_set.decide_pair(
                    &routing,
                    [&ready, &ready[1..]],
                    constraints,
                    [p, d],
                );
                let [(first, _), (second, _)] = pair.expect("candidates");
                sent(Role::Prefill, p, first);
                sent(Role::Decode, d, second);
            } else {
                let chosen = self.policy_set.decide(Role::Regular, &routing, &ready, p);
                sent(Role::Regular, p, chosen.expect("candidates").0);
            }
        }

        /// Something happens to the oldest request in flight.
        fn goes_on(&mut self, what: u8) {
            if self.in_flight.is_empty() {
                return;
            }
            let (role, ticket, worker, text) = self.in_flight[0].clone();
            let now_ms = self.now_ms;
            let event = match what {
                0 => PolicyEvent::FirstToken {
                    ticket,
                    worker,
                    now_ms,
                },
                1 => {
                    let prompt_tokens = 100 * text.len() as u32;
                    let usage = TokenUsage {
                        prompt_tokens,
                        cached_tokens: Some(50),
                        completion_tokens: Some(7),
                    };
                    PolicyEvent::Usage {
                        ticket,
                        worker,
                        usage,
                    }
                }
                2 => PolicyEvent::Reported {
                    worker,
                    queued_tokens: 9_000,
                    running: None,
                    age_ms: 20,
                    now_ms,
                },
                _ => {
                    self.in_flight.remove(0);
                    let blocks = blocks(&text);
                    let hashes = blocks.prompt_view().hashes;
                    let is_kept = what % 2 == 1;
                    self.policy_set.observe(
                        role,
                        &PolicyEvent::Finished {
                            ticket,
                            worker,
                            is_kept,
                            hashes,
                            now_ms,
                        },
                    );
                    return;
                }
            };
            self.policy_set.observe(role, &event);
        }

        /// A worker announces its cache, exactly or not.
        fn announces(&mut self, text: &str, seed: u64) {
            let blocks = blocks(text);
            let hold = blocks
                .prompt_view()
                .hashes
                .iter()
                .map(|hash| BlockChange::Hold(*hash));
            let changes: Vec<BlockChange> = hold.collect();
            let changed = CacheUpdate::Changed {
                changes: &changes,
                page_tokens: 16,
                bytes: 64,
            };
            let serve = CacheUpdate::Serve {
                is_exact: seed.is_multiple_of(2),
            };
            for update in [CacheUpdate::Begin, changed, serve] {
                let worker = WorkerId(seed % 4);
                let _: Result<(), CacheUpdateError> =
                    self.policy_set
                        .apply_cache_update(Role::Regular, worker, &update);
            }
        }

        fn comes_back(&mut self, worker: u64) {
            for role in Role::ALL {
                self.policy_set.observe(
                    role,
                    &PolicyEvent::WorkerGone {
                        worker: WorkerId(worker),
                    },
                );
                self.policy_set
                    .add_worker(role, WorkerId(worker), WorkerFacts::default(), "back");
            }
            self.policy_set.evict(self.now_ms);
        }
    }

    fn replayed(lines: &[String], recorded: PolicyKind, kind: PolicyKind) -> ReplayReport {
        let mut replay = DecisionReplay::new(|_| recorded, |_| kind, &PolicyParams::default());
        for line in lines {
            let line: LogLine = serde_json::from_str(line).expect("its own lines");
            assert!(replay.replay_line(&line));
        }
        replay.report().clone()
    }

    proptest! {
        /// The point of it all.
        #[test]
        fn same_policy_decides_every_line_again(
            kind in proptest::sample::select(PolicyKind::ALL.to_vec()),
            ops in proptest::collection::vec((0u8..10, "[ab]{1,9}", any::<u64>(), 0u64..90), 1..60),
        ) {
            let mut router = Router::new(kind);
            for (what, text, seed, wait) in &ops {
                router.now_ms += wait;
                match what {
                    0..3 => router.goes_on(*what),
                    3 => router.goes_on(3 + (seed % 2) as u8),
                    4 => router.announces(text, *seed),
                    5 => router.comes_back(seed % 4),
                    6 | 7 => router.send(true, text, *seed),
                    _ => router.send(false, text, *seed),
                }
            }
            let report = replayed(&router.written.lines(), kind, kind);
            prop_assert!(report.is_same(), "{}", report);
            prop_assert_eq!(report.missing, 0);
            let sent: u64 = report.roles.values().map(DecisionCounts::total_decisions).sum();
            prop_assert_eq!(sent > 0, ops.iter().any(|(what, ..)| *what > 5));
        }
    }

    /// Conversations of one worker each, under `round_robin`, which does not know that.
    fn conversations() -> Vec<String> {
        let mut router = Router::new(PolicyKind::RoundRobin);
        for turn in 1..20usize {
            for who in ["a", "b", "c"] {
                router.send(false, &who.repeat(turn), 1);
                router.now_ms += 40;
                for what in [0, 1, 3] {
                    router.goes_on(what);
                }
            }
        }
        router.written.lines()
    }

    #[test]
    fn another_policy_differs_and_the_table_says_by_how_much() {
        let lines = conversations();
        let report = replayed(&lines, PolicyKind::RoundRobin, PolicyKind::Cost);
        let regular = &report.roles["regular"];
        assert_eq!(regular.total_decisions(), 57);
        assert!(!report.is_same() && regular.other_worker > 10, "{report}");
        let was = regular.recorded.hit_rate();
        let is = regular.again.hit_rate();
        assert!(is > was, "{was:?} {is:?}");
        let shown = report.to_string();
        for part in [
            "regular: round_robin recorded, cost again",
            "other worker",
            "first difference: line ",
        ] {
            assert!(shown.contains(part), "{part} not in {shown}");
        }
        // It reads no text, and the log holds none: blocks stand for it.
        let report = replayed(&lines, PolicyKind::RoundRobin, PolicyKind::CacheAware);
        assert!(
            report.roles["regular"].whys["prefix_hit"].1 > 20,
            "{report}"
        );
    }

    #[test]
    fn gaps_are_counted_and_old_lines_refused() {
        let lines = conversations();
        let mut replay = DecisionReplay::new(
            |_| PolicyKind::Cost,
            |_| PolicyKind::Cost,
            &PolicyParams::default(),
        );
        let parsed: Vec<LogLine> = lines
            .iter()
            .map(|l| serde_json::from_str(l).expect("a line"))
            .collect();
        assert!(replay.replay_line(&parsed[0]) && replay.replay_line(&parsed[5]));
        assert!(!replay.replay_line(&parsed[3]));
        assert_eq!((replay.report().missing, replay.report().lines), (4, 2));
    }

    #[test]
    fn nothing_of_prompt_or_key_is_written() {
        let mut router = Router::new(PolicyKind::CacheAware);
        router.send(false, "zqzqzqzq", 1);
        let text = router.written.lines().concat();
        assert!(!text.contains("zq"), "{text}");
        assert!(text.contains("\"text\":") && text.contains("\"key\":"));
    }
}
