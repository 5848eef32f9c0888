//! Configuration of a transfer node. Parsed and checked once, never changed.

use std::collections::BTreeSet;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::pool::KvPool;
use crate::protocol::{
    ClusterKeys, GroupId, MAX_GROUPS, MAX_READ_PAGES, MAX_SLAB_BYTES, MAX_SLABS, PageLayout,
};
use crate::state_machine::communicator::SlabLimits;
use crate::transport::fault_injection::Faults;
use crate::transport::tcp::MAX_STREAMS;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Prefill,
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Transport {
    Shm,
    /// Like shm, for pages on one GPU.
    CudaIpc,
    Tcp,
    /// The code path of nccl over CPU memory and sockets.
    Gloo,
    Nccl,
}

impl Transport {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Pages travel through the slabs of a communicator.
    pub fn is_staged(self) -> bool {
        matches!(self, Transport::Gloo | Transport::Nccl)
    }

    /// Pages are read in the peer's memory.
    pub fn is_mapped(self) -> bool {
        matches!(self, Transport::Shm | Transport::CudaIpc)
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodeConfig {
    pub role: Role,
    /// Address to listen on; without `advertise_host`, an unspecified one (0.0.0.0) is announced as
    /// the address that reaches the bootstrap server.
    pub host: String,
    /// Address announced to decode ranks instead of `host`.
    #[serde(default)]
    pub advertise_host: Option<String>,
    /// 0 = any free port.
    pub port: u16,
    /// Allowed transports; a pair uses the best one that both sides have.
    pub transports: Vec<Transport>,
    #[serde(default)]
    pub cluster_key: Option<String>,
    /// Accepted besides `cluster_key` while the operator changes it.
    #[serde(default)]
    pub second_cluster_key: Option<String>,
    /// Without a cluster key: take KV from any host instead of from loopback addresses only.
    #[serde(default)]
    pub insecure: bool,
    /// The page groups of the pool, all of which have its page size. Two nodes pair only if all
    /// fields are equal.
    pub layout: PageLayout,
    #[serde(default)]
    pub dp_rank: u32,
    #[serde(default = "one")]
    pub dp_size: u32,
    /// Time for which P keeps a finished prompt locked without heartbeats of D.
    #[serde(default = "lease_ms")]
    pub lease_ms: u64,
    #[serde(default = "heartbeat_ms")]
    pub heartbeat_ms: u64,
    /// D: the longest wait for P's answer to OPEN, and for a pull in flight. Waiting for an engine
    /// does not count.
    #[serde(default = "wait_ms")]
    pub wait_ms: u64,
    /// D: time without progress of a prefill rank's engine that claims work, after which its rooms
    /// here fail.
    #[serde(default = "stall_ms")]
    pub stall_ms: u64,
    /// Threads that take checksums and copy mapped pages; one for pages on a device, which are
    /// closed behind their last copy.
    #[serde(default = "copy_threads")]
    pub copy_threads: usize,
    /// Threads that serve tcp, and D's streams to each prefill rank.
    #[serde(default = "tcp_streams")]
    pub tcp_streams: usize,
    /// Rooms alive at once, counting those whose end was not polled yet.
    #[serde(default = "max_rooms")]
    pub max_rooms: usize,
    /// Time for which P keeps an OPEN whose request has not arrived.
    #[serde(default = "park_ttl_ms")]
    pub park_ttl_ms: u64,
    /// Longest silence of a decode rank's data stream before P closes it.
    #[serde(default = "data_idle_ms")]
    pub data_idle_ms: u64,
    /// Staged transports: slabs per communicator and side.
    #[serde(default = "slabs")]
    pub slabs: usize,
    /// Bytes of a slab, rounded down to whole pages; one page at least.
    #[serde(default = "slab_bytes")]
    pub slab_bytes: usize,
    /// Communicators of this node at once; an idle one is closed for another pair's.
    #[serde(default = "max_communicators")]
    pub max_communicators: usize,
    #[serde(default = "comm_open_ms")]
    pub comm_open_ms: u64,
    /// Longest time without progress while slabs are under way.
    #[serde(default = "comm_op_ms")]
    pub comm_op_ms: u64,
    /// Timeout of a communicator's abort, after which the communicator is leaked.
    #[serde(default = "comm_abort_ms")]
    pub comm_abort_ms: u64,
    #[serde(default)]
    pub fault: Option<Faults>,
}

/// Bounds of one node's tables, all derived from `max_rooms`: no table is full before the one of
/// rooms is.
#[derive(Debug, Clone, Copy)]
pub struct NodeLimits {
    /// P: OPENs whose request has not arrived. Each becomes a room, or is refused at its timeout.
    pub pending_opens: usize,
    /// Pending OPENs of one decode rank: as many as it has requests, if its limits are those of
    /// this node.
    pub pending_opens_per_peer: usize,
    /// Ended rooms whose late OPENs are answered with the reason of their end.
    pub ended_rooms: usize,
    /// Calls not yet handled by the control thread: a few per room. A full channel means a dead
    /// thread.
    pub commands: usize,
    /// Bytes queued for a peer before its frames stay unread (`outbox`): the answers to one OPEN of
    /// each room.
    pub outbox_bytes: usize,
}

/// Smallest table, for nodes with few rooms.
const MIN_TABLE: usize = 1024;
const COMMANDS_PER_ROOM: usize = 8;
const OUTBOX_BYTES_PER_ROOM: usize = 1024;
/// HELLO and the body of PUT /route have 16 KiB in all.
const MAX_LAYOUT_BYTES: usize = 12 << 10;

macro_rules! defaults {
    ($($(#[doc = $doc:literal])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[doc = $doc])* fn $name() -> $type { $value })*
    };
}

defaults! {
    one: u32 = 1;
    lease_ms: u64 = 30_000;
    heartbeat_ms: u64 = 1000;
    wait_ms: u64 = 60_000;
    /// Longer than any step of an engine.
    stall_ms: u64 = 30_000;
    copy_threads: usize = 1;
    tcp_streams: usize = 1;
    max_rooms: usize = 8192;
    park_ttl_ms: u64 = 30_000;
    /// Four of D's heartbeats.
    data_idle_ms: u64 = 60_000;
    slabs: usize = 4;
    /// Large enough to hide the handshake of a slab, small enough to be no burden per pair
    /// (research: 4 to 8 MiB).
    slab_bytes: usize = 4 << 20;
    max_communicators: usize = 32;
    comm_open_ms: u64 = 10_000;
    comm_op_ms: u64 = 5000;
    /// Not less than `comm_op_ms`: gloo cannot interrupt an operation, which ends by its own
    /// timeout.
    comm_abort_ms: u64 = 6000;
}

impl NodeConfig {
    /// `None` without `cluster_key`: a second key alone is refused by `parse`.
    pub fn cluster_keys(&self) -> Option<ClusterKeys> {
        let own = self.cluster_key.clone()?;
        Some(ClusterKeys::new(own, self.second_cluster_key.clone()))
    }

    /// Parse and check against the pool the node is to serve.
    pub fn parse(json: &str, pool: &KvPool) -> Result<Self, String> {
        let parsed = serde_json::from_str(json).map_err(|err| err.to_string());
        let checked = parsed.and_then(|config: Self| config.check_limits(pool).map(|()| config));
        checked.map_err(|reason| format!("transfer config: {reason}"))
    }

    fn check_limits(&self, pool: &KvPool) -> Result<(), String> {
        let groups = self.layout.group_ids();
        if groups.is_empty() || groups.len() > MAX_GROUPS {
            let number = groups.len();
            return Err(format!(
                "layout.groups has {number} page groups; a pool holds the pages of 1 to {MAX_GROUPS}"
            ));
        }
        let distinct: BTreeSet<GroupId> = groups.iter().copied().collect();
        if distinct.len() < groups.len() {
            return Err(format!("page groups {groups:?}: each id names one group"));
        }
        let layout_bytes = self.layout_json().len();
        if layout_bytes > MAX_LAYOUT_BYTES {
            return Err(format!(
                "layout has {layout_bytes} bytes of JSON; at most {MAX_LAYOUT_BYTES} travel in \
                 HELLO"
            ));
        }
        let pool_bytes = pool.page_bytes() as u64;
        let mut described = self.layout.groups.iter();
        if let Some(group) = described.find(|group| group.page_bytes != pool_bytes) {
            return Err(format!(
                "page_bytes of page group {} is {}, the pool's pages have {pool_bytes} bytes",
                group.id, group.page_bytes
            ));
        }
        let positive = [
            ("lease_ms", self.lease_ms),
            ("heartbeat_ms", self.heartbeat_ms),
            ("wait_ms", self.wait_ms),
            ("stall_ms", self.stall_ms),
            ("max_rooms", self.max_rooms as u64),
            ("copy_threads", self.copy_threads as u64),
            ("tcp_streams", self.tcp_streams as u64),
            ("data_idle_ms", self.data_idle_ms),
            ("dp_size", self.dp_size.into()),
            ("slabs", self.slabs as u64),
            ("max_communicators", self.max_communicators as u64),
            ("comm_open_ms", self.comm_open_ms),
            ("comm_op_ms", self.comm_op_ms),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} is 0"));
        }
        if self.tcp_streams > MAX_STREAMS {
            return Err(format!(
                "{} tcp streams; there are at most {MAX_STREAMS}",
                self.tcp_streams
            ));
        }
        if self.second_cluster_key.is_some() && self.cluster_key.is_none() {
            return Err("second_cluster_key without cluster_key".into());
        }
        if self.transports.is_empty() {
            let reason =
                r#"transports is empty; there are "shm", "cuda_ipc", "tcp", "gloo" and "nccl""#;
            return Err(reason.into());
        }
        if pool.device().is_some() && self.copy_threads > 1 {
            let threads = self.copy_threads;
            return Err(format!(
                "{threads} copy threads; pages on a device have one"
            ));
        }
        let (elsewhere, place) = match pool.device() {
            Some(_) => (Transport::Shm, "on a device"),
            None => (Transport::CudaIpc, "in host memory"),
        };
        if self.transports.contains(&elsewhere) {
            let elsewhere = elsewhere.as_str();
            return Err(format!("{elsewhere} is no transport of pages {place}"));
        }
        let slab_bytes = self.slab_bytes.max(pool.page_bytes());
        if self.slabs > MAX_SLABS || slab_bytes > MAX_SLAB_BYTES {
            return Err(format!(
                "{} slabs of {slab_bytes} bytes; at most {MAX_SLABS} of {MAX_SLAB_BYTES} bytes are \
                 possible",
                self.slabs
            ));
        }
        if self.dp_rank >= self.dp_size {
            return Err(format!(
                "dp_rank is {}, dp_size {}",
                self.dp_rank, self.dp_size
            ));
        }
        Ok(())
    }

    pub fn limits(&self) -> NodeLimits {
        let rooms = self.max_rooms.max(MIN_TABLE);
        NodeLimits {
            pending_opens: rooms,
            pending_opens_per_peer: rooms / 2,
            ended_rooms: rooms,
            commands: COMMANDS_PER_ROOM * rooms,
            outbox_bytes: OUTBOX_BYTES_PER_ROOM * rooms,
        }
    }

    /// The staged transport of this node, if it has one.
    pub fn staged_transport(&self) -> Option<Transport> {
        self.transports.iter().copied().find(|t| t.is_staged())
    }

    /// The transport that reads the peer's memory, if this node has it.
    pub fn mapped_transport(&self) -> Option<Transport> {
        self.transports.iter().copied().find(|t| t.is_mapped())
    }

    pub fn slab_limits(&self, page_bytes: usize) -> SlabLimits {
        SlabLimits {
            slabs: self.slabs,
            pages_per_slab: (self.slab_bytes / page_bytes).clamp(1, MAX_READ_PAGES),
            open_ms: self.comm_open_ms,
            op_ms: self.comm_op_ms,
            abort_ms: self.comm_abort_ms,
        }
    }

    /// Equal on both sides exactly if every field of the layout is.
    pub fn layout_hash(&self) -> String {
        Sha256::digest(self.layout_json())[..16]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    fn layout_json(&self) -> Vec<u8> {
        serde_json::to_vec(&self.layout).expect("plain data")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_named() {
        let pool = KvPool::create(2, 4096).expect("memfd");
        let parse = |text: &str| NodeConfig::parse(text, &pool);
        let good = r#"{"role": "decode", "host": "127.0.0.1", "port": 0, "transports": ["shm", "tcp"], "layout": {"groups": [{"id": 0, "kind": "full", "layers": [[0, 2]], "heads": [[0, 1]], "dims": "layer,kv=2,slot,head,head_dim=64", "dtype": "float32", "page_tokens": 4, "page_bytes": 4096, "retain": "all"}]}}"#;
        let group = |id: u32, page_bytes: u64| {
            format!(
                r#"{{"id": {id}, "kind": "window", "layers": [], "heads": [], "dims": "", "dtype": "", "page_tokens": 4, "page_bytes": {page_bytes}, "retain": "last 8"}}"#
            )
        };
        let config = parse(good).expect("valid");
        assert_eq!(
            (config.role, config.lease_ms, config.transports.len()),
            (Role::Decode, 30_000, 2)
        );
        for (from, to, says) in [
            ("4096", "8192", "page_bytes"),
            (r#"[{"id""#, r#"[], "later": [{"id""#, "0 page groups"),
            (
                r#""groups": ["#,
                &format!(r#""groups": [{}, "#, group(0, 4096)),
                "page groups [0, 0]: each id names one group",
            ),
            (
                r#""groups": ["#,
                &format!(r#""groups": [{}, "#, group(1, 64)),
                "page_bytes of page group 1 is 64",
            ),
            (
                r#""groups": ["#,
                &format!(
                    r#""groups": [{}"#,
                    format!("{}, ", group(1, 4096)).repeat(16)
                ),
                "17 page groups",
            ),
            ("float32", &"x".repeat(MAX_LAYOUT_BYTES), "bytes of JSON"),
            (r#"["shm", "tcp"]"#, "[]", "transports"),
            (r#"["shm", "tcp"]"#, r#"["rdma"]"#, "rdma"),
            (
                r#""port": 0"#,
                r#""port": 0, "heartbeat_ms": 0"#,
                "heartbeat_ms",
            ),
            (r#""port": 0"#, r#""port": 0, "dp_rank": 1"#, "dp_rank"),
            (r#""port": 0"#, r#""port": 0, "color": 1"#, "color"),
            ("shm", "cuda_ipc", "host memory"),
        ] {
            let err = parse(&good.replace(from, to)).expect_err(says);
            assert!(err.contains(says), "{err}");
        }
        let other = parse(&good.replace("float32", "float16")).expect("valid");
        assert_ne!(config.layout_hash(), other.layout_hash());
    }
}
