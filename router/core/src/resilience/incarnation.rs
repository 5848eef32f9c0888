//! Incarnation of a worker: the process that described itself under an address. Names of models,
//! ranks, ports, limits and the tokenizer belong to that process, and another one may take its
//! place at any moment.
//!
//! The life of a description:
//!
//! 1. `Missing`: no process has described itself, or another one answers than the one that did. The
//!    worker gets no new requests;
//! 2. `Valid`: the process described itself;
//! 3. `Doubtful`: a connection broke, or an answer lacks the id that it should have. The worker
//!    serves on, and describes itself again with its next good probe;
//! 4. an answer with the known id makes it `Valid` again; one with another id, or one that
//!    contradicts it, `Missing`.
//!
//! Workers of other makes state no id: their descriptions also become due by age.

/// Age at which the description of a worker without an id is read again [ms].
const MAX_AGE_MS: u64 = 60_000;

/// How far the description of a worker can be relied on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DescriptionTrust {
    #[default]
    Missing,
    Doubtful,
    Valid,
}

/// Evidence about the process at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessSign<'a> {
    /// An answer states the id of the process that gave it.
    Stated(&'a str),
    /// An answer that states the id of its process, if it has one, states none.
    Unstated,
    /// A connection was refused or broke, a probe failed, or the names of its models changed.
    Broken,
    /// An answer contradicts the description.
    Contradicted,
}

/// Process that described itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum DescribedProcess {
    /// A process whose description could not be read: no fact of it can be out of date.
    #[default]
    Unread,
    /// A process that states no id.
    Unnamed,
    Named(String),
}

/// Trust in the description of one worker.
#[derive(Debug, Default)]
pub struct IncarnationWatch {
    process: DescribedProcess,
    trust: DescriptionTrust,
    described_ms: u64,
}

impl IncarnationWatch {
    pub fn trust(&self) -> DescriptionTrust {
        self.trust
    }

    /// A process has described itself.
    pub fn record_description(&mut self, process: DescribedProcess, now_ms: u64) {
        self.process = process;
        self.trust = DescriptionTrust::Valid;
        self.described_ms = now_ms;
    }

    /// Take a sign into account; returns the trust that is left.
    pub fn observe(&mut self, sign: ProcessSign<'_>) -> DescriptionTrust {
        self.trust = self.trust_after(sign);
        self.trust
    }

    fn trust_after(&self, sign: ProcessSign<'_>) -> DescriptionTrust {
        if self.trust == DescriptionTrust::Missing {
            return DescriptionTrust::Missing;
        }
        match (sign, &self.process) {
            (ProcessSign::Contradicted, _) => DescriptionTrust::Missing,
            (ProcessSign::Stated(_), DescribedProcess::Unread) => self.trust,
            (ProcessSign::Stated(id), DescribedProcess::Named(own_id)) if id == own_id => {
                DescriptionTrust::Valid
            }
            (ProcessSign::Stated(_), _) => DescriptionTrust::Missing,
            (ProcessSign::Unstated, DescribedProcess::Named(_)) | (ProcessSign::Broken, _) => {
                DescriptionTrust::Doubtful
            }
            (ProcessSign::Unstated, _) => self.trust,
        }
    }

    /// True if the worker is to describe itself with its next good probe.
    pub fn is_due(&self, now_ms: u64) -> bool {
        let is_old = now_ms.saturating_sub(self.described_ms) >= MAX_AGE_MS;
        let is_named = matches!(self.process, DescribedProcess::Named(_));
        self.trust != DescriptionTrust::Valid || (is_old && !is_named)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIGNS: [ProcessSign<'_>; 5] = [
        ProcessSign::Stated("a"),
        ProcessSign::Stated("b"),
        ProcessSign::Unstated,
        ProcessSign::Broken,
        ProcessSign::Contradicted,
    ];

    fn named(id: &str) -> DescribedProcess {
        DescribedProcess::Named(id.to_owned())
    }

    fn described(process: DescribedProcess) -> IncarnationWatch {
        let mut watch = IncarnationWatch::default();
        watch.record_description(process, 0);
        watch
    }

    /// Trust after each of `SIGNS`, seen by a worker that `watch` makes.
    fn trusts(watch: impl Fn() -> IncarnationWatch) -> [DescriptionTrust; 5] {
        SIGNS.map(|sign| watch().observe(sign))
    }

    #[test]
    fn trust_follows_every_sign_in_every_state() {
        use DescriptionTrust::{Doubtful, Missing, Valid};
        assert_eq!(trusts(IncarnationWatch::default), [Missing; 5]);
        let valid = || described(named("a"));
        assert_eq!(trusts(valid), [Valid, Missing, Doubtful, Doubtful, Missing]);
        let doubtful = || {
            let mut watch = described(named("a"));
            watch.observe(ProcessSign::Broken);
            watch
        };
        assert_eq!(
            trusts(doubtful),
            [Valid, Missing, Doubtful, Doubtful, Missing]
        );
        let foreign = || described(DescribedProcess::Unnamed);
        assert_eq!(
            trusts(foreign),
            [Missing, Missing, Valid, Doubtful, Missing]
        );
        let unread = || described(DescribedProcess::Unread);
        assert_eq!(trusts(unread), [Valid, Valid, Valid, Doubtful, Missing]);
    }

    #[test]
    fn replaced_process_is_trusted_again_only_when_described() {
        let mut watch = described(named("a"));
        watch.observe(ProcessSign::Stated("b"));
        watch.observe(ProcessSign::Stated("a"));
        assert_eq!(watch.trust(), DescriptionTrust::Missing, "a late answer");
        watch.record_description(named("b"), 5);
        assert_eq!(
            watch.observe(ProcessSign::Stated("b")),
            DescriptionTrust::Valid
        );
    }

    #[test]
    fn description_without_an_id_becomes_due_by_age() {
        let mut foreign = described(DescribedProcess::Unnamed);
        assert!(!foreign.is_due(MAX_AGE_MS - 1) && foreign.is_due(MAX_AGE_MS));
        foreign.record_description(DescribedProcess::Unnamed, MAX_AGE_MS);
        assert!(!foreign.is_due(MAX_AGE_MS));
        foreign.observe(ProcessSign::Broken);
        assert!(foreign.is_due(MAX_AGE_MS));
        assert!(!described(named("a")).is_due(u64::MAX));
        assert!(IncarnationWatch::default().is_due(0));
    }
}
