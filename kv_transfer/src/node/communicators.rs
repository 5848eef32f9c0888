//! Both sides' communicators in the control loop: performs the actions of
//! `state_machine::communicator`.
//!
//! A connection has at most one usable communicator, made by D when it wants pages. The number of
//! communicators of a node is bounded: an idle one is closed for another pair, which uses another
//! transport until then. After `MAX_LEAKED` aborts that hang the node makes no more.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::config::{NodeConfig, Transport};
use super::context::{CommKey, LoopMessage, NodeContext, NodeTimer, mapped_by};
use crate::pool::SumKind;
use crate::protocol::{Hello, MAX_SLAB_BYTES, Msg, clip_text};
use crate::reason_code::ReasonCode;
use crate::state_machine::communicator::{
    CommAction, CommEnd, CommEvent, CommLife, CommPhase, ReceiverAction, ReceiverEvent,
    SenderAction, SenderEvent, SlabLimits, SlabReceiver, SlabSender, Ticket,
};
use crate::state_machine::{ConnectionId, PullError};
use crate::transport::communicator::{
    CommBackend, CommContext, CommGuard, CommJob, CommReport, CommThread, CommTimeouts, WriteClaim,
};
use crate::transport::{Pull, PullEnd};

/// Communicators whose abort hangs; each keeps two threads and its slabs. At this number the
/// transport is disabled.
const MAX_LEAKED: usize = 4;

enum Half {
    Receiver(SlabReceiver),
    Sender(SlabSender),
}

struct Comm {
    half: Half,
    /// Until the abort.
    thread: Option<CommThread>,
    guard: Arc<CommGuard>,
    claims: HashMap<Ticket, Arc<WriteClaim>>,
    last_used: u64,
}

impl Comm {
    fn life(&self) -> &CommLife {
        match &self.half {
            Half::Receiver(receiver) => receiver.life(),
            Half::Sender(sender) => sender.life(),
        }
    }

    fn is_idle(&self) -> bool {
        match &self.half {
            Half::Receiver(receiver) => receiver.is_idle(),
            Half::Sender(sender) => sender.is_idle(),
        }
    }
}

/// The staged transport of a node.
struct Staged {
    via: Transport,
    backend: Arc<dyn CommBackend>,
    comms: BTreeMap<CommKey, Comm>,
    next: u64,
    limits: SlabLimits,
    max: usize,
    /// Closed when the last abort has ended: each holds a sender.
    aborts: (mpsc::Sender<()>, mpsc::Receiver<()>),
}

impl Staged {
    fn num_leaked(&self) -> usize {
        let phases = self.comms.values().map(|comm| comm.life().phase());
        phases.filter(|&phase| phase == CommPhase::Leaked).count()
    }

    fn least_used_idle(&self) -> Option<CommKey> {
        let idle = self.comms.iter().filter(|(_, comm)| comm.is_idle());
        idle.min_by_key(|(_, comm)| comm.last_used)
            .map(|(&key, _)| key)
    }
}

impl Drop for Staged {
    /// Close all communicators: no page is written after this. Aborts that exceed their timeout are
    /// leaked.
    fn drop(&mut self) {
        let (running, ended) = std::mem::replace(&mut self.aborts, mpsc::channel());
        for comm in std::mem::take(&mut self.comms).into_values() {
            comm.guard.stop_writes();
            if let Some(thread) = comm.thread {
                thread.abort_thread(running.clone());
            }
        }
        drop(running);
        let limit = Duration::from_millis(self.limits.abort_ms);
        if ended.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::error!("a communicator's abort hangs: its threads are leaked");
        }
    }
}

/// Context of the control loop with the communicators of the node, if it has a staged transport.
pub(super) struct LoopContext {
    node: NodeContext,
    staged: Option<Staged>,
}

impl Deref for LoopContext {
    type Target = NodeContext;

    fn deref(&self) -> &NodeContext {
        &self.node
    }
}

impl DerefMut for LoopContext {
    fn deref_mut(&mut self) -> &mut NodeContext {
        &mut self.node
    }
}

impl LoopContext {
    pub fn new(node: NodeContext, backend: Option<Arc<dyn CommBackend>>) -> Self {
        let NodeConfig {
            max_communicators, ..
        } = node.config;
        let limits = node.config.slab_limits(node.pool.page_bytes());
        let staged = node
            .config
            .staged_transport()
            .zip(backend)
            .map(|(via, backend)| Staged {
                via,
                backend,
                comms: BTreeMap::new(),
                next: 0,
                limits,
                max: max_communicators,
                aborts: mpsc::channel(),
            });
        Self { node, staged }
    }

    pub fn comms_by_state(&self) -> BTreeMap<&'static str, usize> {
        let mut states = BTreeMap::new();
        for comm in self.staged.iter().flat_map(|staged| staged.comms.values()) {
            *states.entry(comm.life().phase().name()).or_default() += 1;
        }
        states
    }

    /// The staged transport, if this peer has it too. Slabs on a device cannot be verified by the
    /// checksums of host memory, so nccl is for two pools on a device, or for none.
    pub fn transport_with(&self, peer: &Hello) -> Option<Transport> {
        let staged = self.staged.as_ref()?;
        let fits = !staged.backend.works_on_device()
            || SumKind::parse(&peer.sums) == Some(self.pool.sum_kind());
        (fits && peer.transports.iter().any(|t| t == staged.via.as_str())).then_some(staged.via)
    }

    /// Record that a pair falls back to a slower transport than `from`.
    pub fn record_fallback(&self, peer: ConnectionId, from: Transport, reason: &str) {
        let Some(conn) = self.connections.get(&peer) else {
            return;
        };
        let mapped = conn.remote.as_ref().filter(|_| conn.mapped_works);
        let may_stage = !from.is_staged() && conn.breaker.allows_attempt(self.now_ms());
        let staged = self.transport_with(&conn.peer).filter(|_| may_stage);
        let to = mapped.map(|remote| mapped_by(remote)).or(staged);
        let to = to.unwrap_or(Transport::Tcp).as_str();
        tracing::warn!(peer = %conn.peer.addr, from = from.as_str(), to, why = %reason, "a transport broke");
        self.shared.stats.lock().fallbacks += 1;
        if let Some(view) = self.shared.gauges.lock().peers.get_mut(&peer) {
            view.transport = to;
        }
    }

    // ---- D ----

    /// The staged transport, if the pair has a usable communicator or may make one now.
    pub fn transport_for(&mut self, peer: ConnectionId) -> Option<Transport> {
        let now = self.now_ms();
        let conn = self.connections.get(&peer)?;
        let via = self.transport_with(&conn.peer)?;
        if conn.comm.is_some() {
            return Some(via); // cleared as soon as it is not usable
        }
        if !conn.breaker.allows_attempt(now) || !self.reserve_place() {
            return None;
        }
        let staged = self.staged.as_mut()?;
        staged.next += 1;
        let key = (peer, staged.next);
        let limits = staged.limits;
        let (receiver, actions) = SlabReceiver::new(limits, now);
        self.start_comm(key, Half::Receiver(receiver), limits)
            .ok()?;
        if let Some(conn) = self.connections.get_mut(&peer) {
            conn.comm = Some(key);
        }
        self.act_receiver(key, actions);
        Some(via)
    }

    /// True if one more communicator may exist. Otherwise an idle one is closed, so that a later
    /// call succeeds.
    fn reserve_place(&mut self) -> bool {
        let Some(staged) = &self.staged else {
            return false;
        };
        if staged.num_leaked() >= MAX_LEAKED || staged.comms.len() < staged.max {
            return staged.num_leaked() < MAX_LEAKED;
        }
        if let Some(idle) = staged.least_used_idle() {
            self.step_either(idle, CommEvent::End(CommEnd::Closed));
        }
        false
    }

    fn start_comm(&mut self, key: CommKey, half: Half, limits: SlabLimits) -> std::io::Result<()> {
        let conn = self.connections.get(&key.0);
        let sums = conn.map_or(SumKind::Xxh3, |conn| conn.sums);
        let Some(staged) = &mut self.staged else {
            return Err(std::io::Error::other("no staged transport"));
        };
        let node = &mut self.node;
        let internal = node.internal.clone();
        let context = CommContext {
            pool: node.pool.clone(),
            faults: node.faults.clone(),
            backend: staged.backend.clone(),
            slabs: limits.slabs,
            slab_bytes: limits.pages_per_slab * node.pool.page_bytes(),
            timeouts: CommTimeouts {
                open: Duration::from_millis(limits.open_ms),
                op: Duration::from_millis(limits.op_ms),
            },
            sums,
        };
        // Reports after the loop's end are dropped.
        let report = Arc::new(move |report| drop(internal.send(LoopMessage::Comm(key, report))));
        let thread = CommThread::start(context, report)
            .inspect_err(|err| tracing::error!(%err, "no thread for a communicator"))?;
        let comm = Comm {
            half,
            guard: thread.guard(),
            thread: Some(thread),
            claims: HashMap::new(),
            last_used: 0,
        };
        node.timers
            .set(&NodeTimer::Comm(key), comm.life().next_due());
        staged.comms.insert(key, comm);
        Ok(())
    }

    /// Start a pull; it ends with one `end_pull`, perhaps before this returns.
    pub fn start_staged_pull(&mut self, peer: ConnectionId, pull: Pull) {
        let Pull {
            id, group, pages, ..
        } = pull;
        if let Some(key) = self.connections.get(&peer).and_then(|conn| conn.comm) {
            return self.step_receiver(
                key,
                ReceiverEvent::Pull {
                    pull: id,
                    group,
                    pages,
                },
            );
        }
        let result = Err(PullError::Broken("the communicator is gone".into()));
        self.end_pull(PullEnd {
            id,
            bytes: 0,
            result,
        });
    }

    pub fn cancel_staged_pull(&mut self, peer: ConnectionId, pull: u64) {
        // One of the communicators has it; the others ignore the event.
        for key in self.comms_of(peer) {
            self.step_receiver(key, ReceiverEvent::Cancel { pull });
        }
    }

    fn comms_of(&self, peer: ConnectionId) -> Vec<CommKey> {
        let staged = self.staged.iter();
        let comms = staged.flat_map(|staged| staged.comms.range((peer, 0)..=(peer, u64::MAX)));
        comms.map(|(&key, _)| key).collect()
    }

    /// End the communicators of a lost connection.
    pub fn end_comms_of(&mut self, peer: ConnectionId, reason: &str) {
        for key in self.comms_of(peer) {
            let reason = format!("the connection is lost: {reason}");
            self.step_either(key, CommEvent::End(CommEnd::ByPeer(reason)));
        }
    }

    // ---- messages and reports ----

    pub fn on_comm_message(&mut self, peer: ConnectionId, msg: Msg) {
        match msg {
            Msg::CommOpen {
                comm,
                transport,
                slabs,
                pages_per_slab,
            } => self.on_comm_open((peer, comm), &transport, slabs, pages_per_slab),
            Msg::CommId { comm, id } => self.step_receiver((peer, comm), ReceiverEvent::Id(id)),
            Msg::CommEnd { comm, code, reason } => self.on_comm_end((peer, comm), code, &reason),
            Msg::SlabRead {
                comm,
                ticket,
                group,
                ids,
                gens,
            } => {
                if let Err(err) = self.identity.check_group("SLAB_READ", group) {
                    return self.mark_lost(peer, err);
                }
                let conn = self.connections.get(&peer);
                let inc = conn.map_or("", |conn| &conn.peer.inc);
                let pages: Vec<_> = ids.into_iter().zip(gens).collect();
                if let Some(page) = self.shared.announced.first_refused(inc, &pages) {
                    let code = Some(ReasonCode::LeaseExpired);
                    return self.send_to(
                        peer,
                        Msg::SlabStale {
                            comm,
                            ticket,
                            page,
                            code,
                        },
                    );
                }
                self.step_sender((peer, comm), SenderEvent::Read { ticket, pages });
            }
            Msg::SlabSend { comm, ticket, seq } => {
                self.step_receiver((peer, comm), ReceiverEvent::Announced { ticket, seq });
            }
            Msg::SlabStale {
                comm,
                ticket,
                page,
                code,
            } => {
                self.step_receiver((peer, comm), ReceiverEvent::Stale { ticket, page, code });
            }
            _ => {}
        }
    }

    fn on_comm_end(&mut self, key: CommKey, code: Option<ReasonCode>, reason: &str) {
        let now = self.now_ms();
        let conn = self
            .connections
            .get_mut(&key.0)
            .filter(|conn| conn.comm == Some(key));
        if let (Some(conn), Some(code)) = (conn, code) {
            match code {
                ReasonCode::NoCapacity => conn.breaker.record_full(now),
                _ => conn.breaker.record_failure(now),
            }
            if let Some(staged) = &self.staged {
                self.record_fallback(key.0, staged.via, reason);
            }
        }
        let reason = format!("the other side: {reason}");
        self.step_either(key, CommEvent::End(CommEnd::ByPeer(reason)));
    }

    fn on_comm_open(&mut self, key: CommKey, transport: &str, slabs: u32, pages_per_slab: u32) {
        let peer_comms = self.comms_of(key.0);
        if peer_comms.contains(&key) {
            return; // a repeated message
        }
        for former in peer_comms {
            let reason = "the decode node made another one".to_owned();
            self.step_either(former, CommEvent::End(CommEnd::ByPeer(reason)));
        }
        if let Err((code, reason)) = self.start_sender(key, transport, slabs, pages_per_slab) {
            let comm = key.1;
            let code = Some(code);
            self.send_to(key.0, Msg::CommEnd { comm, code, reason });
        }
    }

    fn start_sender(
        &mut self,
        key: CommKey,
        transport: &str,
        slabs: u32,
        pages_per_slab: u32,
    ) -> Result<(), (ReasonCode, String)> {
        let broken = |reason| (ReasonCode::TransportBroken, reason);
        let staged = self
            .staged
            .as_ref()
            .filter(|staged| staged.via.as_str() == transport);
        let Some(limits) = staged.map(|staged| SlabLimits {
            slabs: slabs as usize,
            pages_per_slab: pages_per_slab as usize,
            ..staged.limits
        }) else {
            return Err(broken(format!("this node does not use {transport}")));
        };
        let bytes = limits.pages_per_slab.saturating_mul(self.pool.page_bytes());
        if bytes > MAX_SLAB_BYTES {
            let reason = format!("slabs of {bytes} bytes; at most {MAX_SLAB_BYTES} are made");
            return Err(broken(reason));
        }
        if !self.reserve_place() {
            let reason = "this node has no place for another communicator (max_communicators)";
            return Err((ReasonCode::NoCapacity, reason.to_owned()));
        }
        let (sender, actions) = SlabSender::new(limits, self.now_ms());
        self.start_comm(key, Half::Sender(sender), limits)
            .map_err(|err| broken(clip_text(&format!("no thread for a communicator: {err}"))))?;
        self.act_sender(key, actions);
        Ok(())
    }

    pub fn on_comm_report(&mut self, key: CommKey, report: CommReport) {
        match report {
            CommReport::Sender(event) => self.step_sender(key, event),
            CommReport::Receiver(event) => self.step_receiver(key, event),
            CommReport::Either(event) => self.step_either(key, event),
        }
    }

    // ---- the state machines ----

    fn comm_mut(&mut self, key: CommKey) -> Option<&mut Comm> {
        self.staged.as_mut()?.comms.get_mut(&key)
    }

    /// Step a communicator of either side; one that is over ignores it.
    pub fn step_either(&mut self, key: CommKey, event: CommEvent) {
        match self.comm_mut(key).map(|comm| &comm.half) {
            Some(Half::Receiver(_)) => self.step_receiver(key, ReceiverEvent::Comm(event)),
            Some(Half::Sender(_)) => self.step_sender(key, SenderEvent::Comm(event)),
            None => {}
        }
    }

    fn step_receiver(&mut self, key: CommKey, event: ReceiverEvent) {
        let now = self.now_ms();
        let Some(comm) = self.comm_mut(key) else {
            return;
        }; // over: late messages are expected
        let Half::Receiver(receiver) = &mut comm.half else {
            return;
        };
        let mut worked = false;
        if let ReceiverEvent::Received { ticket, verdict } = &event {
            comm.claims.remove(ticket);
            worked = verdict.is_ok();
        }
        let was_usable = receiver.life().phase().is_usable();
        let actions = receiver.apply_event(event, now);
        comm.last_used = now;
        if worked
            && was_usable
            && let Some(conn) = self.connections.get_mut(&key.0)
        {
            conn.breaker.record_success();
        }
        self.after_step(key, was_usable);
        self.act_receiver(key, actions);
    }

    fn step_sender(&mut self, key: CommKey, event: SenderEvent) {
        let now = self.now_ms();
        let Some(comm) = self.comm_mut(key) else {
            return;
        };
        let Half::Sender(sender) = &mut comm.half else {
            return;
        };
        let was_usable = sender.life().phase().is_usable();
        let actions = sender.apply_event(event, now);
        comm.last_used = now;
        self.after_step(key, was_usable);
        self.act_sender(key, actions);
    }

    /// Set the timer after a step, and count and report an end.
    fn after_step(&mut self, key: CommKey, was_usable: bool) {
        let now = self.now_ms();
        let Some(life) = self.comm_mut(key).map(|comm| comm.life().clone()) else {
            return;
        };
        self.timers.set(&NodeTimer::Comm(key), life.next_due());
        let Some(end) = life.end().filter(|_| was_usable) else {
            return;
        };
        let is_failure = !matches!(end, CommEnd::Closed);
        tracing::info!(peer = key.0, comm = key.1, ?end, "a communicator ends");
        self.count_end(if is_failure { "failed" } else { "closed" });
        let conn = self.connections.get_mut(&key.0);
        let Some(conn) = conn.filter(|conn| conn.comm == Some(key)) else {
            return;
        };
        conn.comm = None;
        if let CommEnd::Failed(reason) = end {
            conn.breaker.record_failure(now);
            if let Some(staged) = &self.staged {
                self.record_fallback(key.0, staged.via, reason);
            }
        }
    }

    /// Pulls are ended last: their ends may start the next pull on the same communicator.
    fn act_receiver(&mut self, key: CommKey, actions: Vec<ReceiverAction>) {
        let (peer, comm) = key;
        let mut revoked = Vec::new();
        let mut ends = Vec::new();
        for action in actions {
            match action {
                ReceiverAction::Ask => self.send_comm_open(key),
                ReceiverAction::Join(id) => self.submit_job(key, CommJob::Join(id)),
                ReceiverAction::Read {
                    ticket,
                    group,
                    pages,
                } => {
                    let ids = pages.iter().map(|p| p.src.page).collect();
                    let gens = pages.iter().map(|p| p.src.generation).collect();
                    self.send_to(
                        peer,
                        Msg::SlabRead {
                            comm,
                            ticket,
                            group,
                            ids,
                            gens,
                        },
                    );
                }
                ReceiverAction::Receive(receive) => {
                    let claim = Arc::<WriteClaim>::default();
                    if let Some(comm) = self.comm_mut(key) {
                        comm.claims.insert(receive.ticket, claim.clone());
                    }
                    self.submit_job(key, CommJob::Receive(receive, claim));
                }
                ReceiverAction::Revoke { ticket } => {
                    let claim = self
                        .comm_mut(key)
                        .and_then(|comm| comm.claims.remove(&ticket));
                    revoked.extend(claim.filter(|claim| claim.revoke()).map(|_| ticket));
                }
                ReceiverAction::End {
                    pull,
                    pages,
                    result,
                } => ends.push((pull, pages, result)),
                ReceiverAction::Comm(action) => self.act_either(key, action),
            }
        }
        for ticket in revoked {
            self.step_receiver(key, ReceiverEvent::Revoked { ticket });
        }
        for (id, pages, result) in ends {
            let bytes = (pages * self.pool.page_bytes()) as u64;
            self.end_pull(PullEnd { id, bytes, result });
        }
    }

    fn act_sender(&mut self, key: CommKey, actions: Vec<SenderAction>) {
        let (peer, comm) = key;
        for action in actions {
            match action {
                SenderAction::Host => self.submit_job(key, CommJob::Host),
                SenderAction::SendId(id) => self.send_to(peer, Msg::CommId { comm, id }),
                SenderAction::Send(send) => self.submit_job(key, CommJob::Send(send)),
                SenderAction::Announce { ticket, seq } => {
                    self.send_to(peer, Msg::SlabSend { comm, ticket, seq });
                }
                SenderAction::SendStale { ticket, page } => {
                    let code = None;
                    self.send_to(
                        peer,
                        Msg::SlabStale {
                            comm,
                            ticket,
                            page,
                            code,
                        },
                    );
                }
                SenderAction::Comm(action) => self.act_either(key, action),
            }
        }
    }

    fn act_either(&mut self, key: CommKey, action: CommAction) {
        match action {
            CommAction::SendEnd(end) => {
                let (code, reason) = match end {
                    CommEnd::Closed => (None, "its place was needed".to_owned()),
                    CommEnd::Failed(reason) | CommEnd::ByPeer(reason) => {
                        (Some(ReasonCode::TransportBroken), clip_text(&reason))
                    }
                };
                let comm = key.1;
                self.send_to(key.0, Msg::CommEnd { comm, code, reason });
            }
            CommAction::Abort => {
                if let Some(staged) = &mut self.staged
                    && let Some(comm) = staged.comms.get_mut(&key)
                    && let Some(thread) = comm.thread.take()
                {
                    thread.abort_thread(staged.aborts.0.clone());
                }
            }
            CommAction::Leak => {
                self.count_end("abandoned");
                let lost = self.staged.as_ref().map_or(0, Staged::num_leaked);
                tracing::error!(
                    peer = key.0,
                    lost,
                    at_most = MAX_LEAKED,
                    "the abort of a communicator hangs: it is leaked with its slabs; restart this \
                     node when it is idle"
                );
            }
            CommAction::Forget => {
                if let Some(staged) = &mut self.staged {
                    staged.comms.remove(&key);
                }
                self.timers.set(&NodeTimer::Comm(key), None);
            }
        }
    }

    fn send_comm_open(&mut self, key: CommKey) {
        let Some(staged) = &self.staged else { return };
        let msg = Msg::CommOpen {
            comm: key.1,
            transport: staged.via.as_str().to_owned(),
            slabs: staged.limits.slabs as u32,
            pages_per_slab: staged.limits.pages_per_slab as u32,
        };
        self.send_to(key.0, msg);
    }

    fn submit_job(&self, key: CommKey, job: CommJob) {
        let comm = self
            .staged
            .as_ref()
            .and_then(|staged| staged.comms.get(&key));
        if let Some(thread) = comm.and_then(|comm| comm.thread.as_ref()) {
            thread.submit_job(job);
        }
    }

    fn count_end(&self, end: &'static str) {
        *self.shared.stats.lock().comms_ended.get_mut(end) += 1;
    }
}
