//! D's connections to prefill ranks: attempts, pauses, outages and quarantine, and the rooms that
//! wait for a connection.
//!
//! Life of a connection: connecting ─▶ up; a failed attempt is repeated after a pause, until the
//! rank counts as unreachable (broken): then rooms fail at once for a while, and the next room
//! after it probes the rank.

use std::collections::{BTreeSet, HashMap};
use std::mem;
use std::time::Instant;

use crate::node::connections::establish::{ConnectFailure, establish_connection};
use crate::node::context::{LoopMessage, NodeContext, NodeTimer, RankAddress};
use crate::protocol::handshake::ConnectionError;
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::state_machine::communicator::TransportBreaker;

/// Rooms opened in one turn of the control loop when their rank is connected.
const OPENS_AT_ONCE: usize = 256;
/// Pause before the next attempt to reach a prefill rank: doubled after each, up to
/// `LAST_PAUSE_MS`.
pub const FIRST_PAUSE_MS: u64 = 50;
pub const LAST_PAUSE_MS: u64 = 1000;

/// Attempts without an answer after which a prefill rank counts as unreachable, and the time after
/// which it does with fewer of them: a refused connection is tried again at once, one without any
/// answer has taken its second.
const SILENT_ATTEMPTS: u32 = 4;
const SILENT_MS: u64 = 900;
/// Time for which rooms of an unreachable prefill rank fail at once; doubled while a probe by the
/// next room fails, too.
const FIRST_BREAK_MS: u64 = 250;
const LAST_BREAK_MS: u64 = 4000;
/// Rooms of a pair that fail with CHECKSUM, none between them committed, until the pair is
/// quarantined.
const DAMAGED_ROOMS: u32 = 3;

/// Message for client and log.
const QUARANTINED: &str = "transfers from this prefill rank fail for a while, because several in a row brought damaged pages; check the \
    memory and the network of both hosts, then restart the prefill node";

/// Errors that waiting does not cure.
pub fn is_final(code: ReasonCode) -> bool {
    matches!(
        code,
        ReasonCode::Auth | ReasonCode::LayoutMismatch | ReasonCode::RankUnknown
    )
}

enum RankState {
    /// An attempt is under way.
    Connecting,
    /// The last attempt failed; the next follows after a pause.
    Pausing,
    /// Connected.
    Up(ConnectionId),
    /// Unreachable: rooms fail at once until then; the next one after it probes the rank.
    Broken { until: u64 },
}

/// Attempts in a row without an answer.
#[derive(Default)]
pub struct Outage {
    attempts: u32,
    since: u64,
}

impl Outage {
    /// Record a failed attempt begun at `started`. True: give up.
    pub fn record_failure(&mut self, is_silent: bool, started: u64, now: u64) -> bool {
        if !is_silent {
            *self = Self::default();
            return false;
        }
        if self.attempts == 0 {
            self.since = started;
        }
        self.attempts += 1;
        self.attempts >= SILENT_ATTEMPTS || now.saturating_sub(self.since) >= SILENT_MS
    }
}

/// Rooms with damaged pages in a row, and how long further ones fail at once because of it: 30 s,
/// and twice as long after each room that fails then, up to 16 minutes. A new connection resets it:
/// a repaired host or its rank has restarted.
#[derive(Default)]
struct Damage {
    rooms: u32,
    /// When the last of them failed.
    last_at: Option<Instant>,
    quarantine: TransportBreaker,
}

impl Damage {
    /// Record a room that failed with CHECKSUM. True: the pair's quarantine begins. Rooms that were
    /// open when the last one failed do not count: they may share its pages, which the prefill node
    /// has now taken out of its cache.
    fn record_room(&mut self, opened: Instant, at: Instant, now: u64) -> bool {
        if self.last_at.is_some_and(|last| opened <= last) {
            return false;
        }
        self.rooms += 1;
        self.last_at = Some(at);
        let begins = self.rooms >= DAMAGED_ROOMS && self.quarantine.allows_attempt(now);
        if begins {
            self.quarantine.record_failure(now);
        }
        begins
    }
}

/// State of the connection to a prefill rank, and the rooms that wait for it. Exists while it is up
/// or broken, or rooms wait.
struct RankConnection {
    state: RankState,
    waiting: BTreeSet<u64>,
    failures: u32,
    outage: Outage,
    /// Start of the last attempt.
    tried_at: u64,
    /// Times in a row that this connection broke; from the second on, one attempt decides.
    breaks: u32,
    last_error: String,
    damage: Damage,
}

/// Answer to a room that needs a prefill rank.
pub enum RankAnswer {
    Connected(ConnectionId),
    Waiting,
    Unreachable { code: ReasonCode, reason: String },
}

/// Rooms that fail because their prefill rank cannot be reached.
pub struct UnreachableRooms {
    pub rooms: BTreeSet<u64>,
    pub code: ReasonCode,
    pub reason: String,
}

#[derive(Default)]
pub struct RankConnections {
    ranks: HashMap<RankAddress, RankConnection>,
}

impl RankConnections {
    /// Find the connection for a room, or let the room wait for it.
    pub fn request_connection(
        &mut self,
        ctx: &NodeContext,
        room: u64,
        address: &RankAddress,
    ) -> RankAnswer {
        let now = ctx.now_ms();
        let rank = self
            .ranks
            .entry(address.clone())
            .or_insert_with(|| RankConnection {
                state: RankState::Broken { until: now },
                waiting: BTreeSet::new(),
                failures: 0,
                outage: Outage::default(),
                tried_at: 0,
                breaks: 0,
                last_error: "no answer yet".into(),
                damage: Damage::default(),
            });
        match rank.state {
            RankState::Up(_) if !rank.damage.quarantine.allows_attempt(now) => {
                let code = ReasonCode::Quarantined;
                let reason = QUARANTINED.into();
                return RankAnswer::Unreachable { code, reason };
            }
            RankState::Up(peer) => return RankAnswer::Connected(peer),
            RankState::Broken { until } if now < until => {
                let code = ReasonCode::Unreachable;
                let reason = rank.last_error.clone();
                return RankAnswer::Unreachable { code, reason };
            }
            RankState::Broken { .. } => start_connecting(rank, ctx, address),
            RankState::Connecting | RankState::Pausing => {}
        }
        rank.waiting.insert(room);
        RankAnswer::Waiting
    }

    pub fn last_error(&self, address: &RankAddress) -> Option<&String> {
        self.ranks.get(address).map(|rank| &rank.last_error)
    }

    pub fn set_up(&mut self, address: &RankAddress, peer: ConnectionId) {
        if let Some(rank) = self.ranks.get_mut(address) {
            rank.state = RankState::Up(peer);
            rank.failures = 0;
            rank.breaks = 0;
            rank.outage = Outage::default();
            rank.damage = Damage::default();
        }
    }

    /// Rooms that waited for this rank, some at a time: heartbeats and other peers are served in
    /// between.
    pub fn take_waiting(
        &mut self,
        ctx: &NodeContext,
        address: &RankAddress,
        peer: ConnectionId,
    ) -> BTreeSet<u64> {
        let rank = self.ranks.get_mut(address);
        // Lost meanwhile: the rooms wait for the next connection.
        let is_up =
            |rank: &&mut RankConnection| matches!(rank.state, RankState::Up(up) if up == peer);
        let Some(rank) = rank.filter(is_up) else {
            return BTreeSet::new();
        };
        let first_left = rank.waiting.iter().nth(OPENS_AT_ONCE).copied();
        let left_waiting = first_left.map(|first| rank.waiting.split_off(&first));
        let rooms = mem::replace(&mut rank.waiting, left_waiting.unwrap_or_default());
        if !rank.waiting.is_empty() {
            let more = LoopMessage::OpenWaiting(address.clone(), peer);
            let _ = ctx.internal.send(more); // the node is closing
        }
        rooms
    }

    /// Record a failed attempt; returns the rooms that fail with it.
    pub fn on_failure(
        &mut self,
        ctx: &mut NodeContext,
        address: RankAddress,
        failure: ConnectFailure,
    ) -> Option<UnreachableRooms> {
        let now = ctx.now_ms();
        let ConnectFailure { err, is_silent } = failure;
        let rank = self.ranks.get_mut(&address)?;
        tracing::debug!(host = %address.host, port = address.port, rank = address.dp_rank, code = %err.code, why = %err.reason, "no link to the prefill rank");
        let give_up = rank.outage.record_failure(is_silent, rank.tried_at, now);
        if is_final(err.code) {
            let rooms = self.ranks.remove(&address)?.waiting;
            let ConnectionError { code, reason } = err;
            return Some(UnreachableRooms {
                rooms,
                code,
                reason,
            });
        }
        rank.last_error = err.reason;
        if give_up || (is_silent && rank.breaks > 0) {
            let pause = (FIRST_BREAK_MS << rank.breaks.min(10)).min(LAST_BREAK_MS);
            rank.state = RankState::Broken { until: now + pause };
            rank.breaks += 1;
            rank.outage = Outage::default();
            let rooms = mem::take(&mut rank.waiting);
            let reason = rank.last_error.clone();
            // Removed when no room has probed it for some time.
            let removal = now + pause + LAST_BREAK_MS;
            ctx.timers.set(&NodeTimer::Connect(address), Some(removal));
            let code = ReasonCode::Unreachable;
            return Some(UnreachableRooms {
                rooms,
                code,
                reason,
            });
        }
        rank.state = RankState::Pausing;
        let pause = (FIRST_PAUSE_MS << rank.failures.min(10)).min(LAST_PAUSE_MS);
        rank.failures += 1;
        ctx.timers
            .set(&NodeTimer::Connect(address), Some(now + pause));
        None
    }

    /// The pause after a failed attempt is over, or a broken rank was not probed for some time.
    pub fn retry_connection(&mut self, ctx: &NodeContext, address: &RankAddress) {
        let Some(rank) = self.ranks.get_mut(address) else {
            return;
        };
        match rank.state {
            RankState::Connecting | RankState::Up(_) => {} // a room's probe came first
            RankState::Pausing if !rank.waiting.is_empty() => start_connecting(rank, ctx, address),
            RankState::Pausing | RankState::Broken { .. } => drop(self.ranks.remove(address)),
        }
    }

    /// Handle a lost connection: the next room, or those still waiting, ask the bootstrap server
    /// again.
    pub fn on_lost(&mut self, ctx: &NodeContext, address: &RankAddress) {
        match self.ranks.get_mut(address) {
            Some(rank) if !rank.waiting.is_empty() => start_connecting(rank, ctx, address),
            _ => drop(self.ranks.remove(address)),
        }
    }

    /// Remove a room that is over. Returns the connection to which it may still be attached.
    pub fn remove_room(&mut self, address: &RankAddress, room: u64) -> Option<ConnectionId> {
        let rank = self.ranks.get_mut(address)?;
        rank.waiting.remove(&room);
        match rank.state {
            RankState::Up(peer) => Some(peer),
            _ => None,
        }
    }

    /// Count a room that ended with damaged pages; it may quarantine the pair.
    pub fn record_damaged_room(
        &mut self,
        ctx: &NodeContext,
        address: &RankAddress,
        opened: Instant,
    ) {
        let Some(rank) = self.ranks.get_mut(address) else {
            return;
        };
        if rank
            .damage
            .record_room(opened, Instant::now(), ctx.now_ms())
        {
            ctx.shared.stats.lock().quarantines += 1;
            tracing::error!(host = %address.host, port = address.port, rank = address.dp_rank, rooms = rank.damage.rooms, "{QUARANTINED}");
        }
    }

    pub fn record_good_room(&mut self, address: &RankAddress) {
        if let Some(rank) = self.ranks.get_mut(address) {
            rank.damage = Damage::default();
        }
    }
}

/// Start an attempt; its result arrives as `LoopMessage::Connected`.
fn start_connecting(rank: &mut RankConnection, ctx: &NodeContext, address: &RankAddress) {
    rank.state = RankState::Connecting;
    rank.tried_at = ctx.now_ms();
    let client = ctx.bootstrap_client(address.host.clone(), address.port);
    let identity = ctx.identity.clone();
    let internal = ctx.internal.clone();
    let mapped = ctx.config.mapped_transport();
    let device = ctx.pool.device().cloned();
    let address = address.clone();
    tokio::spawn(async move {
        // In a task of its own, so that a panic becomes an answer too.
        let dp_rank = address.dp_rank;
        let attempt =
            async move { establish_connection(&client, dp_rank, &identity, mapped, device).await };
        let result = tokio::spawn(attempt).await.unwrap_or_else(|err| {
            let reason = format!("internal: {err}");
            Err(ConnectionError::transport_broken(reason).into())
        });
        // the node is closing
        let _ = internal.send(LoopMessage::Connected(address, Box::new(result)));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quarantine_is_longer_each_time_and_begins_once() {
        let mut damage = Damage::default();
        let start = Instant::now();
        let mut record_room = |opened, now| {
            let at = |ms| start + std::time::Duration::from_millis(ms);
            let begins = damage.record_room(at(opened), at(now), now);
            (begins, damage.quarantine.clone())
        };
        assert!(!record_room(0, 1).0 && !record_room(2, 3).0);
        assert!(!record_room(2, 4).0, "it was open when the last one failed");
        let (begins, quarantine) = record_room(5, 6);
        assert!(begins && !quarantine.allows_attempt(30_005) && quarantine.allows_attempt(30_006));
        assert!(!record_room(7, 8).0, "the quarantine has begun");
        let (begins, quarantine) = record_room(40_000, 40_000);
        assert!(begins, "the first room after it");
        assert!(!quarantine.allows_attempt(99_999) && quarantine.allows_attempt(100_000));
    }
}
