//! Wire protocol between two transfer nodes: msgpack messages in length-prefixed frames,
//! authenticated when a cluster key is set.
//!
//! Each pair of a D rank and a P rank has one control connection, opened by D. P sends CHALLENGE,
//! then both send HELLO; then, per room:
//!
//! ```text
//! D ── OPEN ─────────────────────▶ P      D ◀── OPEN_OK | PARKED | REJECT ── P
//! D ◀── PROGRESS (pages are final) ── P   (any number, in any order relative to D's grant)
//! D ◀── FINAL (prefill has ended) ─── P
//! D ── DONE (all pages verified) ─▶ P     either side, at any time: ABORT / ABORT_ACK
//! ```
//!
//! HEARTBEAT flows both ways once a second. `tcp` data streams carry READ and DATA … DATA_END, or
//! STALE; the raw page bytes follow a DATA frame; a HEARTBEAT shows that an idle stream is in use.
//! Page bytes are covered by the page checksum announced in PROGRESS, not by the frame's MAC.
//!
//! Staged transports (`gloo`, `nccl`): COMM_OPEN, COMM_ID and COMM_END make and end a communicator
//! of the connection; SLAB_READ is answered by SLAB_SEND (the bytes come over the communicator) or
//! SLAB_STALE. See `state_machine::communicator`.
//!
//! Messages are msgpack maps with field names, so a later version may add fields; unknown ones are
//! ignored.

mod cluster_keys;
mod frame;
pub mod handshake;
mod page_groups;

use serde::{Deserialize, Serialize};

pub use cluster_keys::ClusterKeys;
pub use frame::{
    FrameError, FrameOpener, FrameSealer, HEADER_BYTES, Handshake, MAX_FRAME_BYTES, frame_len,
};

pub use page_groups::{
    GroupDescriptor, GroupId, MAX_GROUPS, PageLayout, one_per_group, unknown_group,
};

use crate::reason_code::ReasonCode;

/// Newest version spoken by this build.
pub const VERSION: u32 = 3;
/// Oldest version accepted; a peer whose versions do not overlap with ours is refused with
/// LAYOUT_MISMATCH. Before 2, HELLO could be replayed; before 3, messages named no page group.
pub const MIN_VERSION: u32 = 3;
/// Longest name (host, incarnation, hash, transport) in a message.
pub const MAX_NAME_BYTES: usize = 300;
pub const MAX_TEXT_BYTES: usize = 1024;
/// Largest frame of the HELLO exchange.
pub const MAX_HELLO_BYTES: usize = 16 << 10;
pub const MAX_READ_FRAME_BYTES: usize = 64 << 10;
/// Largest frame of a decode rank on a control connection: a HEARTBEAT that lists
/// `MAX_HEARTBEAT_ROOMS`.
pub const MAX_DECODE_FRAME_BYTES: usize = 256 << 10;
/// Most pages in one PROGRESS frame (about 21 bytes each).
pub const MAX_PROGRESS_PAGES: usize = 4096;
/// Most pages in one READ.
pub const MAX_READ_PAGES: usize = 1024;
/// Most rooms listed in one HEARTBEAT.
pub const MAX_HEARTBEAT_ROOMS: usize = 16384;
/// Largest FINAL payload (first token, logprobs, …).
pub const MAX_PAYLOAD_BYTES: usize = 2 << 20;
pub const MAX_PROMPT_HASH_BYTES: usize = 64;
/// Largest unique id of a communicator (nccl: 128 bytes; gloo: an address).
pub const MAX_COMM_ID_BYTES: usize = 512;
/// Most slabs of a communicator, and most bytes of one slab, that a decode node may ask for.
pub const MAX_SLABS: usize = 16;
pub const MAX_SLAB_BYTES: usize = 256 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Channel {
    Control,
    Data,
}

/// First frame of either side of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Newest and oldest version that the sender speaks; 0: the newest only.
    pub ver: u32,
    #[serde(default)]
    pub min_ver: u32,
    pub channel: Channel,
    /// Random bytes of this side; both nonces together key the connection.
    #[serde(with = "serde_bytes")]
    pub nonce: Vec<u8>,
    /// uuid of this process's node: its incarnation.
    pub inc: String,
    /// Incarnation the connecting side expects to find, from GET /route.
    pub expected_inc: Option<String>,
    /// Where this node listens; the same address with another `inc` is a restart.
    pub addr: String,
    pub boot_id: String,
    /// The network namespace, which is that of a container or pod; empty: unknown.
    #[serde(default)]
    pub network_namespace: String,
    pub transports: Vec<String>,
    pub layout_hash: String,
    /// Empty in the HELLO of an older version, which is refused for that.
    #[serde(default)]
    pub layout: PageLayout,
    pub num_pages: u64,
    pub page_bytes: u64,
    /// Kind of this node's checksums (`pool::SumKind`); empty: xxh3.
    #[serde(default)]
    pub sums: String,
    /// Abstract unix socket that hands out the pool's fd to processes that know the token.
    pub shm_socket: String,
    #[serde(with = "serde_bytes")]
    pub shm_token: Vec<u8>,
}

/// Announced page: its id at P, its generation and its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageDigest {
    pub page: u32,
    pub generation: u64,
    pub sum: u64,
}

/// Pages of one group that D asks for: those from number `start_page` on.
///
/// A prompt has a sequence of pages in each group, numbered from 0. In a group that keeps the last
/// tokens only, the first pages of the sequence do not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GroupStart {
    pub group: GroupId,
    pub start_page: u32,
}

/// Pages of one group that a prompt has: those with the numbers [first_page, total_pages).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupPages {
    pub group: GroupId,
    pub first_page: u32,
    pub total_pages: u32,
    pub last_page_tokens: u32,
    /// In a group of states: how many tokens of the prompt the state has seen.
    pub tokens_at: Option<u32>,
}

/// Pages of one group that P has announced: their numbers, and a hash over the checksums of those
/// from D's start page on, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupTotal {
    pub group: GroupId,
    /// The first page that exists.
    pub first_page: u32,
    pub total_pages: u32,
    pub last_page_tokens: u32,
    pub root: u64,
    /// In a group of states: how many tokens of the prompt the state has seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_at: Option<u32>,
}

impl GroupTotal {
    /// The part that is the engine's.
    pub fn pages(&self) -> GroupPages {
        GroupPages {
            group: self.group,
            first_page: self.first_page,
            total_pages: self.total_pages,
            last_page_tokens: self.last_page_tokens,
            tokens_at: self.tokens_at,
        }
    }
}

/// D's request to read the pages of a room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenMessage {
    pub room: u64,
    pub attempt: u32,
    pub d_inc: String,
    pub p_inc_expected: String,
    pub layout_hash: String,
    #[serde(with = "serde_bytes")]
    pub prompt_hash: Vec<u8>,
    pub groups: Vec<GroupStart>,
    pub deadline_ms: u64,
    pub prio: i32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
#[strum(serialize_all = "SCREAMING_SNAKE_CASE")]
pub enum Msg {
    /// First frame of the responder: the nonce that the initiator's HELLO is authenticated with. It
    /// is also the nonce of the responder's own HELLO.
    Challenge {
        #[serde(with = "serde_bytes")]
        nonce: Vec<u8>,
    },
    /// Identity of a node, under the other side's nonce; begins a connection on both sides.
    Hello(Hello),
    /// D asks P for the pages of a room.
    Open(OpenMessage),
    /// P has the room and will announce its pages.
    OpenOk {
        room: u64,
        attempt: u32,
        p_inc: String,
    },
    /// P does not know the room yet and keeps the OPEN for `ttl_ms`.
    #[serde(rename = "PARKED")]
    #[strum(serialize = "PARKED")]
    OpenPending {
        room: u64,
        attempt: u32,
        ttl_ms: u64,
    },
    /// Room 0 with `connection: true` refuses the whole connection.
    Reject {
        room: u64,
        attempt: u32,
        code: ReasonCode,
        message: String,
        retry_after_ms: u64,
        connection: bool,
    },
    /// P announces a group's pages from `first_page` on: ids, generations and checksums.
    Progress {
        room: u64,
        attempt: u32,
        group: GroupId,
        first_page: u32,
        ids: Vec<u32>,
        gens: Vec<u64>,
        sums: Vec<u64>,
    },
    /// P has computed the prompt; `payload` is the engine's.
    Final {
        room: u64,
        attempt: u32,
        groups: Vec<GroupTotal>,
        #[serde(with = "serde_bytes")]
        payload: Vec<u8>,
    },
    /// All pages are copied and verified; P may end the lease. `root`: over the roots of the groups
    /// in the order of the layout.
    Done {
        room: u64,
        attempt: u32,
        bytes: u64,
        root: u64,
    },
    /// Either side gives the room up.
    Abort {
        room: u64,
        attempt: u32,
        code: ReasonCode,
    },
    /// Answer to ABORT.
    AbortAck { room: u64, attempt: u32 },
    /// `rooms`: live rooms shared with this peer; D's list renews P's leases.
    Heartbeat {
        inc: String,
        seq: u64,
        rooms: Vec<u64>,
        pull_backlog_bytes: u64,
        /// Changes while the sender's engine works; heartbeats continue when the engine hangs.
        #[serde(default)]
        progress: u64,
        /// The sender's engine has prompts to compute. An idle engine counts as making progress.
        #[serde(default)]
        busy: bool,
    },
    /// D requests these pages on a data stream.
    Read {
        ticket: u64,
        group: GroupId,
        ids: Vec<u32>,
        gens: Vec<u64>,
    },
    /// `pages` pages of raw bytes follow this frame.
    Data {
        ticket: u64,
        pages: u32,
        page_bytes: u64,
    },
    /// Follows the raw bytes; `stale` is a page whose generation changed while it was sent.
    DataEnd { ticket: u64, stale: Option<u32> },
    /// Sent instead of DATA: the page's generation has changed, or with a code: it is not leased to
    /// this decode rank.
    Stale {
        ticket: u64,
        page: u32,
        #[serde(default)]
        code: Option<ReasonCode>,
    },
    /// D requests a communicator with P; `comm` is its number on this connection, in all messages
    /// about it.
    CommOpen {
        comm: u64,
        transport: String,
        slabs: u32,
        pages_per_slab: u32,
    },
    /// Unique id made by P; both sides join now.
    CommId {
        comm: u64,
        #[serde(with = "serde_bytes")]
        id: Vec<u8>,
    },
    /// Either side ends the communicator. No code: it was closed to free its place.
    CommEnd {
        comm: u64,
        code: Option<ReasonCode>,
        #[serde(rename = "why")]
        reason: String,
    },
    /// D has a free slab for these pages and will receive them.
    SlabRead {
        comm: u64,
        ticket: u64,
        group: GroupId,
        ids: Vec<u32>,
        gens: Vec<u64>,
    },
    /// The pages are in P's slab; they are its `seq`-th send.
    SlabSend { comm: u64, ticket: u64, seq: u64 },
    /// Sent instead of SLAB_SEND; `code` as in STALE.
    SlabStale {
        comm: u64,
        ticket: u64,
        page: u32,
        #[serde(default)]
        code: Option<ReasonCode>,
    },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DecodeError {
    #[error("the frame is no known message: {0}")]
    Malformed(String),
    #[error("{name}: {what}")]
    Invalid { name: &'static str, what: String },
}

impl Msg {
    pub fn name(&self) -> &'static str {
        self.into()
    }

    /// A REJECT of the whole connection.
    pub fn connection_refusal(code: ReasonCode, reason: &str) -> Self {
        Msg::Reject {
            room: 0,
            attempt: 0,
            code,
            message: clip_text(reason),
            retry_after_ms: 0,
            connection: true,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("our messages hold only integers, strings and bytes")
    }

    /// Decode a message and check the limits that later code relies on.
    pub fn decode(body: &[u8]) -> Result<Msg, DecodeError> {
        let msg: Msg =
            rmp_serde::from_slice(body).map_err(|err| DecodeError::Malformed(err.to_string()))?;
        msg.check_lengths().map_err(|what| DecodeError::Invalid {
            name: msg.name(),
            what,
        })?;
        Ok(msg)
    }

    fn check_lengths(&self) -> Result<(), String> {
        match self {
            Msg::Progress {
                first_page,
                ids,
                gens,
                sums,
                ..
            } => {
                check_lists(ids, gens, Some(sums))?;
                if gens.iter().any(|g| g % 2 == 1) {
                    let reason = "an announced page has an odd generation (it is being written)";
                    return Err(reason.into());
                }
                at_most(
                    "last page",
                    *first_page as usize + ids.len(),
                    i32::MAX as usize,
                )?;
                at_most("pages", ids.len(), MAX_PROGRESS_PAGES)
            }
            Msg::Read { ids, gens, .. } | Msg::SlabRead { ids, gens, .. } => {
                check_lists(ids, gens, None)?;
                at_most("pages", ids.len(), MAX_READ_PAGES)
            }
            Msg::Open(open) => {
                check_names([&open.d_inc, &open.p_inc_expected, &open.layout_hash])?;
                at_most("groups", open.groups.len(), MAX_GROUPS)?;
                for start in &open.groups {
                    at_most("start_page", start.start_page as usize, i32::MAX as usize)?;
                }
                at_most(
                    "prompt_hash bytes",
                    open.prompt_hash.len(),
                    MAX_PROMPT_HASH_BYTES,
                )
            }
            Msg::Final {
                payload, groups, ..
            } => {
                at_most("groups", groups.len(), MAX_GROUPS)?;
                for total in groups {
                    at_most("total_pages", total.total_pages as usize, i32::MAX as usize)?;
                    let total_pages = total.total_pages as usize;
                    at_most("first_page", total.first_page as usize, total_pages)?;
                }
                at_most("payload bytes", payload.len(), MAX_PAYLOAD_BYTES)
            }
            Msg::CommOpen {
                slabs,
                pages_per_slab,
                transport,
                ..
            } => {
                check_names([transport])?;
                if *slabs == 0 || *pages_per_slab == 0 {
                    return Err(format!("{slabs} slabs of {pages_per_slab} pages"));
                }
                at_most("slabs", *slabs as usize, MAX_SLABS)?;
                at_most("pages_per_slab", *pages_per_slab as usize, MAX_READ_PAGES)
            }
            Msg::CommId { id, .. } => at_most("id bytes", id.len(), MAX_COMM_ID_BYTES),
            Msg::Heartbeat { rooms, inc, .. } => {
                check_names([inc])?;
                at_most("rooms", rooms.len(), MAX_HEARTBEAT_ROOMS)
            }
            Msg::OpenOk { p_inc, .. } => check_names([p_inc]),
            Msg::Reject { message, .. } => at_most("message bytes", message.len(), MAX_TEXT_BYTES),
            Msg::CommEnd { reason, .. } => at_most("reason bytes", reason.len(), MAX_TEXT_BYTES),
            Msg::Challenge { nonce } => at_most("nonce bytes", nonce.len(), 64),
            Msg::Hello(hello) => hello.check_lengths(),
            _ => Ok(()),
        }
    }
}

impl Hello {
    fn check_lengths(&self) -> Result<(), String> {
        let names = [
            &self.inc,
            &self.addr,
            &self.boot_id,
            &self.network_namespace,
        ];
        let names = names.into_iter().chain([&self.layout_hash, &self.sums]);
        check_names(names.chain(&self.expected_inc).chain(&self.transports))?;
        at_most("groups", self.layout.groups.len(), MAX_GROUPS)?;
        at_most("nonce bytes", self.nonce.len(), 64)?;
        at_most("token bytes", self.shm_token.len(), 64)?;
        at_most("transports", self.transports.len(), 16)?;
        at_most("socket name bytes", self.shm_socket.len(), 100)
    }
}

fn at_most(what: &str, n: usize, limit: usize) -> Result<(), String> {
    if n <= limit {
        return Ok(());
    }
    Err(format!("{what} is {n}, at most {limit} are accepted"))
}

fn check_names<'a>(names: impl IntoIterator<Item = &'a String>) -> Result<(), String> {
    let longest = names.into_iter().map(String::len).max();
    at_most("name bytes", longest.unwrap_or(0), MAX_NAME_BYTES)
}

fn check_lists(ids: &[u32], gens: &[u64], sums: Option<&Vec<u64>>) -> Result<(), String> {
    let ids = ids.len();
    let gens = gens.len();
    let sums = sums.map(Vec::len);
    if ids == gens && sums.is_none_or(|sums| sums == ids) {
        return Ok(());
    }
    let sums = sums.map_or(String::new(), |sums| format!(", {sums} sums"));
    Err(format!("{ids} ids, {gens} generations{sums}"))
}

/// `text` truncated to `MAX_TEXT_BYTES`.
pub fn clip_text(text: &str) -> String {
    let fits = (0..=text.len().min(MAX_TEXT_BYTES)).rev();
    let end = fits.into_iter().find(|&end| text.is_char_boundary(end));
    text[..end.unwrap_or(0)].to_owned()
}

/// Root of a run of page checksums: equal on both sides only if every page of the run is. Roots
/// are checksums, too: the root over those of all groups is the room's.
pub fn root_of(sums: impl Iterator<Item = u64>) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for sum in sums {
        hash.update(&sum.to_le_bytes());
    }
    hash.digest()
}

#[cfg(test)]
#[path = "tests.rs"]
pub(crate) mod tests;
