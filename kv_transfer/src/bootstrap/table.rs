//! Which prefill ranks exist: a pure table.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Most ranks one server remembers.
const MAX_RANKS: usize = 65_536;

fn one() -> u32 {
    1
}

/// Body of PUT /route: SGLang's fields, then ours (an SGLang rank leaves them out).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
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

impl Registration {
    fn sizes(&self) -> Sizes {
        let dp = if self.system_dp_size == 1 {
            self.attn_dp_size
        } else {
            self.system_dp_size
        };
        Sizes {
            prefill_attn_tp_size: self.attn_tp_size,
            prefill_dp_size: dp,
            prefill_pp_size: self.pp_size,
        }
    }

    pub(super) fn rank(&self) -> Rank {
        let dp_group = if self.system_dp_size == 1 {
            self.attn_dp_rank
        } else {
            self.system_dp_rank
        };
        Rank {
            dp_group,
            tp: self.attn_tp_rank,
            pp: self.pp_rank,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    pub prefill_attn_tp_size: u32,
    pub prefill_dp_size: u32,
    pub prefill_pp_size: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
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
        "this rank says {theirs:?}, the ranks registered before say {ours:?}; one prefill node has one topology (DELETE /route first to change it)"
    )]
    Conflict { ours: Sizes, theirs: Sizes },
    #[error("{MAX_RANKS} ranks are registered already")]
    Full,
}

/// Ranks by position; the topology is that of the first one as long as any is registered.
#[derive(Debug, Default)]
pub struct RouteTable {
    ranks: BTreeMap<Rank, Registration>,
    sizes: Option<Sizes>,
    /// Counts changes, so that a reader can tell an old answer from a new one.
    pub epoch: u64,
}

impl RouteTable {
    /// A rank that registers again (a restart) replaces its former self.
    pub fn put(&mut self, registration: Registration) -> Result<(), TableError> {
        if !registration.role.eq_ignore_ascii_case("prefill") {
            return Err(TableError::Role(registration.role));
        }
        for (what, rank, size) in [
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
                return Err(TableError::RankRange { what, rank, size });
            }
        }
        let theirs = registration.sizes();
        let ours = *self.sizes.get_or_insert(theirs);
        if ours != theirs {
            return Err(TableError::Conflict { ours, theirs });
        }
        let rank = registration.rank();
        if self.ranks.get(&rank) == Some(&registration) {
            return Ok(()); // the periodic reminder
        }
        if self.ranks.len() >= MAX_RANKS && !self.ranks.contains_key(&rank) {
            return Err(TableError::Full);
        }
        self.ranks.insert(rank, registration);
        self.epoch += 1;
        Ok(())
    }

    pub fn sizes(&self) -> Option<Sizes> {
        self.sizes
    }

    pub fn get(&self, rank: Rank) -> Option<&Registration> {
        self.ranks.get(&rank)
    }

    /// A rank leaves. Only its own incarnation can remove it, so a late farewell does not unseat the successor.
    pub fn remove(&mut self, rank: Rank, instance_id: &str) -> bool {
        let known = self
            .ranks
            .get(&rank)
            .is_some_and(|r| r.instance_id == instance_id);
        if known {
            self.ranks.remove(&rank);
            self.epoch += 1;
        }
        if self.ranks.is_empty() {
            self.sizes = None;
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(dp: u32, id: &str) -> Registration {
        let text = format!(
            r#"{{"role": "Prefill", "system_dp_size": 2, "system_dp_rank": {dp}, "rank_ip": "10.0.0.1", "rank_port": 5, "instance_id": "{id}"}}"#
        );
        serde_json::from_str(&text).expect("valid")
    }

    fn at(dp_group: u32) -> Rank {
        Rank {
            dp_group,
            tp: 0,
            pp: 0,
        }
    }

    #[test]
    fn ranks_come_restart_and_go() {
        let mut table = RouteTable::default();
        assert_eq!(table.sizes(), None);
        table.put(rank(1, "a")).expect("new");
        assert_eq!(
            table.sizes(),
            Some(Sizes {
                prefill_attn_tp_size: 1,
                prefill_dp_size: 2,
                prefill_pp_size: 1
            })
        );
        assert_eq!(
            (
                table.get(at(0)),
                table.get(at(1)).map(|r| r.instance_id.as_str())
            ),
            (None, Some("a"))
        );
        let epoch = table.epoch;
        table.put(rank(1, "a")).expect("a reminder");
        assert_eq!(table.epoch, epoch);
        table.put(rank(1, "b")).expect("a restart");
        assert_eq!(table.epoch, epoch + 1);
        assert!(
            !table.remove(at(1), "a"),
            "a late farewell of the former incarnation"
        );
        assert!(table.remove(at(1), "b"));
        assert_eq!(table.sizes(), None, "the last one out frees the topology");
    }

    #[test]
    fn one_node_has_one_topology() {
        let mut table = RouteTable::default();
        table.put(rank(0, "a")).expect("new");
        let mut other = rank(1, "b");
        other.system_dp_size = 4;
        assert!(matches!(table.put(other), Err(TableError::Conflict { .. })));
        let mut outside = rank(0, "c");
        outside.pp_rank = 1;
        assert!(matches!(
            table.put(outside),
            Err(TableError::RankRange { what: "pp", .. })
        ));
        let mut decode = rank(0, "d");
        decode.role = "Decode".into();
        assert!(matches!(table.put(decode), Err(TableError::Role(_))));
    }

    #[test]
    fn dp_attention_ranks_are_found_by_their_attention_rank() {
        let text = r#"{"role": "prefill", "attn_dp_size": 4, "attn_dp_rank": 3, "attn_tp_size": 2, "attn_tp_rank": 1, "rank_ip": "h", "rank_port": 1}"#;
        let mut table = RouteTable::default();
        table
            .put(serde_json::from_str(text).expect("SGLang's fields alone"))
            .expect("new");
        assert!(
            table
                .get(Rank {
                    dp_group: 3,
                    tp: 1,
                    pp: 0
                })
                .is_some()
        );
        assert_eq!(table.sizes().map(|s| s.prefill_dp_size), Some(4));
    }
}
