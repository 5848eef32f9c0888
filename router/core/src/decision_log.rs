//! The lines of the decision log: everything the policies were asked and observed, in order, as
//! JSON.
//!
//! ```text
//! {"decision_log":1,"version":"0.1.0","run":1780000000000,"file":0,"flags":["--policy","cost",…]}
//! {"n":0,"observed":{"role":"regular","event":"added","worker":1,"name":"http://10.0.0.1:30000",…}}
//! {"n":1,"decided":{"asked":{"role":"regular","now_ms":12,"seed":…,"hashes":"…","sides":[…]},"choices":[…]}}
//! {"n":2,"observed":{"role":"regular","event":"first_token","ticket":1,…}}
//! ```
//!
//! No prompt is in it. Blocks of a prompt are their hashes; text, which `cache_aware` compares
//! character by character, is replaced by characters that are equal exactly as far as two prompts
//! are equal, and routing keys by numbers; both depend on a secret that is drawn for each run and
//! not kept.

use std::convert::Infallible;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::kv::{BlockChange, CacheUpdateRecord};
use crate::pairing::fingerprint::WorkerFingerprint;
use crate::prompt::{HashedPrompt, mix_hash};
use crate::types::{
    EventRecord, PolicyEvent, RequestView, Role, RoutingRequest, SendTicket, WorkerChoice,
    WorkerFacts, WorkerId, WorkerView,
};

/// Where lines go. Called with the order held: it must not wait.
pub trait LogSink: Send + Sync {
    fn put_line(&self, line: LogLine);
}

/// The first line of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogHeader {
    /// Version of the format.
    pub decision_log: u32,
    /// Version of the program: its policies are the ones that decide alike.
    pub version: String,
    /// When the process started [ms since 1970]; equal in all files of a run.
    pub run: u64,
    /// Counts the files of a run.
    pub file: u32,
    /// The flags that policies depend on.
    pub flags: Vec<String>,
}

pub const FORMAT: u32 = 1;

/// Numbered without gaps as written; a gap is what was dropped for lack of room.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LogLine {
    pub n: u64,
    #[serde(flatten)]
    pub entry: LogEntry,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogEntry {
    /// A choice for each side; the request was sent there.
    Decided {
        asked: DecisionInput,
        choices: Vec<Option<WorkerChoice>>,
    },
    /// An event that the policies of a role were given.
    Observed {
        role: Role,
        #[serde(flatten)]
        observed: ObservedEvent,
    },
    /// Report of a worker about its cache.
    Cached {
        role: Role,
        worker: WorkerId,
        #[serde(flatten)]
        update: CacheUpdateRecord<ChangeRecord>,
    },
    /// Caches of prefix trees were trimmed to their limits.
    Evict { role: Role, now_ms: u64 },
}

/// All that `choose` saw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionInput {
    /// Role of the chosen worker; of a pair: prefill.
    pub role: Role,
    pub now_ms: u64,
    pub seed: u64,
    pub streams: bool,
    #[serde(flatten)]
    pub prompt: HashedPrompt<HexHashes>,
    /// Disguised; only if a policy reads text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Disguised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Disguised; absent in logs of versions that knew no sessions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Sides of the decision: one, or prefill and decode.
    pub sides: Vec<DecisionSide>,
    /// Fingerprints of the candidates of both sides, where not all can be paired.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprints: Option<[Vec<WorkerFingerprint>; 2]>,
    /// Pairs that fit by these and were excluded all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded_pairs: Vec<[WorkerId; 2]>,
}

/// The candidates of one role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecisionSide {
    pub ticket: SendTicket,
    /// (id, load, host)
    pub ready: Vec<(u64, usize, u32)>,
}

/// [`PolicyEvent`] with what it borrowed, and without what the line of its decision holds already:
/// of a prompt, only whether the policy was given its hashes.
pub type ObservedEvent = EventRecord<Infallible, bool, NamedFacts>;

/// Facts about a worker, with its name for readers of the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NamedFacts {
    pub name: String,
    #[serde(flatten)]
    pub facts: WorkerFacts,
}

/// Changes of a [`CacheUpdate`](crate::kv::CacheUpdate).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChangeRecord {
    hashes: HexHashes,
    /// A character each: + it holds, - it dropped.
    signs: String,
}

impl ChangeRecord {
    pub(crate) fn from_changes(changes: &[BlockChange]) -> Self {
        let parts = changes.iter().map(|change| match change {
            BlockChange::Hold(hash) => (*hash, '+'),
            BlockChange::Drop(hash) => (*hash, '-'),
        });
        let (hashes, signs) = parts.unzip();
        Self {
            hashes: HexHashes(hashes),
            signs,
        }
    }

    pub fn block_changes(&self) -> Vec<BlockChange> {
        let parts = self.hashes.0.iter().zip(self.signs.bytes());
        parts
            .map(|(hash, sign)| BlockChange::new(*hash, sign == b'+'))
            .collect()
    }
}

/// Written as one text of 16 digits each: JSON readers round numbers of 64 bits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HexHashes(pub Vec<u64>);

impl Serialize for HexHashes {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl fmt::Display for HexHashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|hash| write!(f, "{hash:016x}"))
    }
}

impl<'de> Deserialize<'de> for HexHashes {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let hashes = text.as_bytes().chunks(16).map(|digits| {
            let digits = std::str::from_utf8(digits).ok().filter(|d| d.len() == 16)?;
            u64::from_str_radix(digits, 16).ok()
        });
        let wrong = || serde::de::Error::custom("hashes are not groups of 16 hexadecimal digits");
        hashes
            .collect::<Option<_>>()
            .map(HexHashes)
            .ok_or_else(wrong)
    }
}

impl LogLine {
    /// About how much memory it takes while it waits to be written.
    pub fn bytes(&self) -> usize {
        let more = match &self.entry {
            LogEntry::Decided { asked, .. } => {
                let ready: usize = asked.sides.iter().map(|side| side.ready.len()).sum();
                let text = asked.text.as_ref().map_or(0, String::len);
                8 * asked.prompt.hashes.0.len() + 24 * ready + text
            }
            LogEntry::Cached {
                update: CacheUpdateRecord::Changed { changes, .. },
                ..
            } => 9 * changes.signs.len(),
            LogEntry::Observed { .. } | LogEntry::Cached { .. } | LogEntry::Evict { .. } => 0,
        };
        size_of::<Self>() + more
    }
}

impl DecisionInput {
    pub(crate) fn from_request(
        role: Role,
        routing: &RoutingRequest<'_>,
        sides: &[(&[WorkerView], SendTicket)],
        secret: u64,
        reads_text: bool,
    ) -> Self {
        let RequestView {
            text,
            prompt,
            routing_key,
            session_key,
            now_ms,
        } = routing.request;
        let sides = sides.iter().map(|(ready, ticket)| DecisionSide {
            ticket: *ticket,
            ready: ready.iter().map(|w| (w.id.0, w.load, w.host)).collect(),
        });
        Self {
            role,
            now_ms,
            seed: routing.seed,
            streams: routing.streams,
            prompt: prompt.with_hashes(HexHashes(prompt.hashes.to_vec())),
            text: reads_text.then(|| pseudonymize(text, secret)),
            key: routing_key.map(|key| disguise_key(key, secret)),
            session: session_key.map(|key| disguise_key(key, secret)),
            sides: sides.collect(),
            fingerprints: None,
            excluded_pairs: Vec::new(),
        }
    }
}

impl DecisionSide {
    pub fn worker_views(&self) -> Vec<WorkerView> {
        let views = self.ready.iter().map(|&(id, load, host)| WorkerView {
            id: WorkerId(id),
            load,
            host,
        });
        views.collect()
    }
}

impl ObservedEvent {
    /// `None` for `Routed`, which is part of the decision.
    pub(crate) fn from_event(event: &PolicyEvent<'_>, name: Option<&str>) -> Option<Self> {
        let name = || name.unwrap_or_default().to_owned();
        event.map_forms(
            |hashes| !hashes.is_empty(),
            |facts| NamedFacts {
                name: name(),
                facts: *facts,
            },
        )
    }

    /// The event again; `hashes` are the prompt's of its ticket.
    pub fn policy_event<'a>(&self, hashes: &'a [u64]) -> Option<PolicyEvent<'a>> {
        self.map_forms(
            |has_hashes| if *has_hashes { hashes } else { &[] },
            |named| named.facts,
        )
    }
}

/// For each character a number that depends on all before it and on the secret.
fn chain_hashes(text: &str, secret: u64) -> impl Iterator<Item = u64> {
    text.chars().scan(mix_hash(secret, 0), |state, c| {
        *state = mix_hash(*state, u64::from(c));
        Some(*state)
    })
}

/// A number that is equal for equal keys; the empty key, which counts as none, stays empty.
fn disguise_key(key: &str, secret: u64) -> String {
    let last_hash = chain_hashes(key, secret).last();
    last_hash.map_or_else(String::new, |hash| format!("{hash:016x}"))
}

/// A text of as many characters, equal to another's as far as the originals are equal: one of 2^20
/// characters each, so two prompts seem equal for one character more than they are once in a
/// million times.
fn pseudonymize(text: &str, secret: u64) -> String {
    const FIRST: u32 = 0x1_0000;
    let of = |hash: u64| char::from_u32(FIRST + (hash >> 44) as u32);
    chain_hashes(text, secret).filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn disguised_texts_are_equal_as_far_as_the_texts_are(
            common in "[ab é]{0,40}", tails in proptest::array::uniform2("[abc]{0,10}"), secret in any::<u64>(),
        ) {
            let shared = |a: &str, b: &str| a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
            let [a, b] = tails.map(|tail| format!("{common}{tail}"));
            let x = pseudonymize(&a, secret);
            let y = pseudonymize(&b, secret);
            prop_assert_eq!(x.chars().count(), a.chars().count());
            prop_assert_eq!(shared(&x, &y), shared(&a, &b));
            prop_assert!(!a.chars().any(|c| x.contains(c)));
        }
    }

    #[test]
    fn another_run_says_other_things_of_the_same_text() {
        assert_ne!(pseudonymize("the same", 7), pseudonymize("the same", 8));
    }

    #[test]
    fn hashes_are_text_and_come_back() {
        let hashes = HexHashes(vec![0, u64::MAX, 5]);
        let text = serde_json::to_string(&hashes).expect("plain data");
        assert_eq!(text, "\"0000000000000000ffffffffffffffff0000000000000005\"");
        assert_eq!(
            serde_json::from_str::<HexHashes>(&text).expect("its own"),
            hashes
        );
        for wrong in ["\"12\"", "\"zzzzzzzzzzzzzzzz\"", "5"] {
            assert!(serde_json::from_str::<HexHashes>(wrong).is_err(), "{wrong}");
        }
    }
}
