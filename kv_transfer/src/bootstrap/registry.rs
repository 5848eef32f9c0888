//! Table of registered prefill ranks: deterministic, no I/O.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most ranks one server remembers.
const MAX_RANKS: usize = 1024;
/// A rank registers every 5 s; one that has not for this long is forgotten, and its topology with
/// the last one.
pub(super) const ROUTE_TTL_MS: u64 = 30_000;

fn one() -> u32 {
    1
}

/// Body of PUT /route: SGLang's fields, then ours (an SGLang rank leaves them out).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRegistration {
    pub role: String,
    #[serde(default = "one")]
    pub attn_tp_size: u32,
    #[serde(default)]
    pub attn_tp_rank: u32,
    #[serde(default = "one")]
    pub attn_dp_size: u32,
    #[serde(default)]
    pub attn_dp_rank: u32,
    #[serde(default = "one")]
    pub pp_size: u32,
    #[serde(default)]
    pub pp_rank: u32,
    #[serde(default = "one")]
    pub system_dp_size: u32,
    #[serde(default)]
    pub system_dp_rank: u32,
    pub rank_ip: String,
    pub rank_port: u16,
    #[serde(default)]
    pub instance_id: String,
    /// Secret of the rank and this server, required to remove the rank.
    #[serde(default)]
    pub owner: String,
    #[serde(default)]
    pub proto_ver: u32,
    #[serde(default)]
    pub transports: Vec<String>,
    #[serde(default)]
    pub layout_hash: String,
    #[serde(default)]
    pub layout: serde_json::Value,
    #[serde(default)]
    pub pool_pages: u64,
}

impl RankRegistration {
    fn topology_sizes(&self) -> TopologySizes {
        let dp = if self.system_dp_size == 1 {
            self.attn_dp_size
        } else {
            self.system_dp_size
        };
        TopologySizes {
            prefill_attn_tp_size: self.attn_tp_size,
            prefill_dp_size: dp,
            prefill_pp_size: self.pp_size,
        }
    }

    fn rank_position(&self) -> RankPosition {
        let dp_group = if self.system_dp_size == 1 {
            self.attn_dp_rank
        } else {
            self.system_dp_rank
        };
        RankPosition {
            dp_group,
            tp: self.attn_tp_rank,
            pp: self.pp_rank,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologySizes {
    pub prefill_attn_tp_size: u32,
    pub prefill_dp_size: u32,
    pub prefill_pp_size: u32,
}

impl TopologySizes {
    /// Ranks of the whole node.
    fn num_ranks(self) -> u64 {
        let sizes = [
            self.prefill_attn_tp_size,
            self.prefill_dp_size,
            self.prefill_pp_size,
        ];
        sizes.map(u64::from).into_iter().product()
    }
}

/// A node's sizes, and how many of its ranks have registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegisteredTopology {
    #[serde(flatten)]
    pub sizes: TopologySizes,
    /// `None`: the server does not say.
    #[serde(default)]
    pub registered_ranks: Option<u64>,
}

impl RegisteredTopology {
    /// True if no further rank can come.
    pub fn is_complete(&self) -> bool {
        self.registered_ranks
            .is_some_and(|registered| registered >= self.sizes.num_ranks())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankPosition {
    pub dp_group: u32,
    pub tp: u32,
    pub pp: u32,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("role is {0:?}; only prefill ranks register here")]
    Role(String),
    #[error("{what} rank {rank} is outside its size {size}")]
    RankRange {
        what: &'static str,
        rank: u32,
        size: u32,
    },
    #[error(
        "this rank has {theirs:?}, the ranks registered before have {ours:?}; one prefill node has \
         one topology (DELETE /route first to change it)"
    )]
    Conflict {
        ours: TopologySizes,
        theirs: TopologySizes,
    },
    #[error("{MAX_RANKS} ranks are registered already")]
    Full,
}

/// Ranks by position; the topology is that of the first one as long as any is registered.
#[derive(Debug, Default)]
pub struct RouteTable {
    /// With the time of the last registration.
    ranks: BTreeMap<RankPosition, (RankRegistration, u64)>,
    sizes: Option<TopologySizes>,
    /// Counts changes, so that a reader can tell an old answer from a new one.
    pub epoch: u64,
}

impl RouteTable {
    /// Add a rank, or replace the registration of its former incarnation. The page layout is not
    /// kept: ranks compare it themselves.
    pub fn put(
        &mut self,
        mut registration: RankRegistration,
        now_ms: u64,
    ) -> Result<(), TableError> {
        self.drop_expired(now_ms);
        registration.layout = serde_json::Value::Null;
        if !registration.role.eq_ignore_ascii_case("prefill") {
            return Err(TableError::Role(registration.role));
        }
        for (label, rank, size) in [
            (
                "attn_tp",
                registration.attn_tp_rank,
                registration.attn_tp_size,
            ),
            (
                "attn_dp",
                registration.attn_dp_rank,
                registration.attn_dp_size,
            ),
            ("pp", registration.pp_rank, registration.pp_size),
            (
                "system_dp",
                registration.system_dp_rank,
                registration.system_dp_size,
            ),
        ] {
            if rank >= size {
                return Err(TableError::RankRange {
                    what: label,
                    rank,
                    size,
                });
            }
        }
        let theirs = registration.topology_sizes();
        let ours = *self.sizes.get_or_insert(theirs);
        if ours != theirs {
            return Err(TableError::Conflict { ours, theirs });
        }
        let rank = registration.rank_position();
        if let Some((current, seen_ms)) = self.ranks.get_mut(&rank)
            && *current == registration
        {
            *seen_ms = now_ms; // the periodic reminder
            return Ok(());
        }
        if self.ranks.len() >= MAX_RANKS && !self.ranks.contains_key(&rank) {
            return Err(TableError::Full);
        }
        self.ranks.insert(rank, (registration, now_ms));
        self.epoch += 1;
        Ok(())
    }

    pub fn topology(&self) -> Option<RegisteredTopology> {
        let registered_ranks = Some(self.ranks.len() as u64);
        let sizes = self.sizes?;
        Some(RegisteredTopology {
            sizes,
            registered_ranks,
        })
    }

    pub fn get(&self, rank: RankPosition) -> Option<&RankRegistration> {
        self.ranks.get(&rank).map(|(registration, _)| registration)
    }

    /// Remove ranks that have not registered again in time.
    pub fn drop_expired(&mut self, now_ms: u64) {
        let before = self.ranks.len();
        self.ranks
            .retain(|_, (_, seen_ms)| now_ms.saturating_sub(*seen_ms) <= ROUTE_TTL_MS);
        self.epoch += u64::from(self.ranks.len() != before);
        self.free_topology();
    }

    fn free_topology(&mut self) {
        if self.ranks.is_empty() {
            self.sizes = None;
        }
    }

    /// Remove a rank. Only its own incarnation can, so a late removal does not affect the
    /// successor; and only with its `owner`, which no answer contains.
    pub fn remove(&mut self, registration: &RankRegistration) -> bool {
        let rank = registration.rank_position();
        let is_registered = self.get(rank).is_some_and(|current| {
            (&current.instance_id, &current.owner)
                == (&registration.instance_id, &registration.owner)
        });
        if is_registered {
            self.ranks.remove(&rank);
            self.epoch += 1;
        }
        self.free_topology();
        is_registered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(dp: u32, id: &str) -> RankRegistration {
        let text = format!(
            r#"{{"role": "Prefill", "system_dp_size": 2, "system_dp_rank": {dp}, "rank_ip": "10.0.0.1", "rank_port": 5, "instance_id": "{id}"}}"#
        );
        serde_json::from_str(&text).expect("valid")
    }

    fn at(dp_group: u32) -> RankPosition {
        RankPosition {
            dp_group,
            tp: 0,
            pp: 0,
        }
    }

    #[test]
    fn ranks_come_restart_and_go() {
        let mut table = RouteTable::default();
        assert_eq!(table.topology(), None);
        table.put(rank(1, "a"), 0).expect("new");
        let topology = table.topology().expect("known");
        assert_eq!(
            topology.sizes,
            TopologySizes {
                prefill_attn_tp_size: 1,
                prefill_dp_size: 2,
                prefill_pp_size: 1
            }
        );
        assert!(!topology.is_complete(), "rank 0 can still come");
        table.put(rank(0, "z"), 0).expect("new");
        assert!(table.topology().is_some_and(|all| all.is_complete()));
        assert!(table.remove(&rank(0, "z")));
        assert_eq!(
            (
                table.get(at(0)),
                table.get(at(1)).map(|r| r.instance_id.as_str())
            ),
            (None, Some("a"))
        );
        let epoch = table.epoch;
        table.put(rank(1, "a"), 0).expect("a reminder");
        assert_eq!(table.epoch, epoch);
        table.put(rank(1, "b"), 0).expect("a restart");
        assert_eq!(table.epoch, epoch + 1);
        assert!(
            !table.remove(&rank(1, "a")),
            "a late removal of the former incarnation"
        );
        assert!(table.remove(&rank(1, "b")));
        assert_eq!(
            table.topology(),
            None,
            "the last one out frees the topology"
        );
    }

    #[test]
    fn one_node_has_one_topology() {
        let mut table = RouteTable::default();
        table.put(rank(0, "a"), 0).expect("new");
        let mut other = rank(1, "b");
        other.system_dp_size = 4;
        assert!(matches!(
            table.put(other, 0),
            Err(TableError::Conflict { .. })
        ));
        let mut outside = rank(0, "c");
        outside.pp_rank = 1;
        assert!(matches!(
            table.put(outside, 0),
            Err(TableError::RankRange { what: "pp", .. })
        ));
        let mut decode = rank(0, "d");
        decode.role = "Decode".into();
        assert!(matches!(table.put(decode, 0), Err(TableError::Role(_))));
    }

    #[test]
    fn only_its_owner_removes_a_rank() {
        let mut table = RouteTable::default();
        let mine = RankRegistration {
            owner: "secret".into(),
            ..rank(1, "a")
        };
        table.put(mine.clone(), 0).expect("new");
        assert!(!table.remove(&rank(1, "a")), "what GET tells is not enough");
        assert!(table.remove(&mine));
    }

    #[test]
    fn forged_topology_ends_when_it_is_not_repeated() {
        let mut table = RouteTable::default();
        let mut forged = rank(0, "forged");
        forged.system_dp_size = 4;
        forged.layout = serde_json::json!(vec![0; 20_000]);
        table.put(forged, 0).expect("new");
        let kept = table.get(at(0)).expect("registered");
        assert!(kept.layout.is_null(), "large values are not kept");
        let late = ROUTE_TTL_MS + 1;
        assert!(table.put(rank(1, "a"), ROUTE_TTL_MS).is_err());
        table
            .put(rank(1, "a"), late)
            .expect("the table is empty again");
        table.put(rank(1, "a"), 2 * late).expect("a reminder");
        table.drop_expired(2 * late + ROUTE_TTL_MS);
        assert!(table.get(at(1)).is_some() && table.get(at(0)).is_none());
    }

    #[test]
    fn dp_attention_ranks_are_found_by_their_attention_rank() {
        let text = r#"{"role": "prefill", "attn_dp_size": 4, "attn_dp_rank": 3, "attn_tp_size": 2, "attn_tp_rank": 1, "rank_ip": "h", "rank_port": 1}"#;
        let mut table = RouteTable::default();
        table
            .put(
                serde_json::from_str(text).expect("SGLang's fields alone"),
                0,
            )
            .expect("new");
        assert!(
            table
                .get(RankPosition {
                    dp_group: 3,
                    tp: 1,
                    pp: 0
                })
                .is_some()
        );
        assert_eq!(table.topology().map(|t| t.sizes.prefill_dp_size), Some(4));
    }
}
