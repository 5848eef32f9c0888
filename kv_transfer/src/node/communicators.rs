//! Both sides' communicators in the control loop: performs the actions of `state_machine::communicator`.
//!
//! A connection has at most one usable communicator, made by D when it wants pages. The number of communicators of a node is
//! bounded: an idle one is closed for another pair, which uses another transport until then. After `MAX_LEAKED` aborts that hang the
//! node makes no more.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::config::{NodeConfig, Transport};
use super::context::{CommKey, LoopMessage, NodeContext, NodeTimer, mapped_by};
use crate::pool::SumKind;
use crate::protocol::{Hello, MAX_SLAB_BYTES, Msg, clipped};
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::state_machine::communicator::{
    CommEnd, CommPhase, PullOutcome, ReceiverAction, ReceiverEvent, SenderAction, SenderEvent,
    SlabLimits, SlabReceiver, SlabSender, Ticket,
};
use crate::transport::communicator::{
    CommBackend, CommContext, CommGuard, CommJob, CommReport, CommThread, CommTimeouts, WriteClaim,
};
use crate::transport::{Pull, PullEnd, PullError};

/// Communicators whose abort hangs; each keeps two threads and its slabs. At this number the transport is disabled.
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
    fn phase(&self) -> CommPhase {
        match &self.half {
            Half::Receiver(receiver) => receiver.phase(),
            Half::Sender(sender) => sender.phase(),
        }
    }

    fn is_idle(&self) -> bool {
        match &self.half {
            Half::Receiver(receiver) => receiver.is_idle(),
            Half::Sender(sender) => sender.is_idle(),
        }
    }

    fn next_due(&self) -> Option<u64> {
        match &self.half {
            Half::Receiver(receiver) => receiver.next_due(),
            Half::Sender(sender) => sender.next_due(),
        }
    }

    fn end(&self) -> Option<&CommEnd> {
        match &self.half {
            Half::Receiver(receiver) => receiver.end(),
            Half::Sender(sender) => sender.end(),
        }
    }

    fn submit(&self, job: CommJob) {
        if let Some(thread) = &self.thread {
            thread.submit(job);
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
    pub fn new(
        via: Transport,
        backend: Arc<dyn CommBackend>,
        config: &NodeConfig,
        page_bytes: usize,
    ) -> Self {
        Self {
            via,
            backend,
            comms: BTreeMap::new(),
            next: 0,
            limits: config.slab_limits(page_bytes),
            max: config.max_communicators,
            aborts: mpsc::channel(),
        }
    }

    pub fn by_state(&self) -> BTreeMap<&'static str, usize> {
        let mut states = BTreeMap::new();
        for comm in self.comms.values() {
            *states.entry(comm.phase().name()).or_default() += 1;
        }
        states
    }

    fn num_leaked(&self) -> usize {
        self.comms
            .values()
            .filter(|comm| comm.phase() == CommPhase::Leaked)
            .count()
    }

    fn least_used_idle(&self) -> Option<CommKey> {
        self.comms
            .iter()
            .filter(|(_, comm)| comm.is_idle())
            .min_by_key(|(_, comm)| comm.last_used)
            .map(|(&key, _)| key)
    }
}

impl Drop for Staged {
    /// Close all communicators: no page is written after this. Aborts that exceed their timeout are leaked.
    fn drop(&mut self) {
        let (running, ended) = std::mem::replace(&mut self.aborts, mpsc::channel());
        for comm in std::mem::take(&mut self.comms).into_values() {
            comm.guard.shut();
            if let Some(thread) = comm.thread {
                thread.abort(running.clone());
            }
        }
        drop(running);
        let limit = Duration::from_millis(self.limits.abort_ms);
        if ended.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::error!("a communicator's abort hangs: its threads are leaked");
        }
    }
}

/// The communicators of a node, if it has a staged transport.
pub(super) struct Communicators {
    staged: Option<Staged>,
}

impl Communicators {
    pub fn new(
        backend: Option<Arc<dyn CommBackend>>,
        config: &NodeConfig,
        page_bytes: usize,
    ) -> Self {
        let staged = config
            .staged()
            .zip(backend)
            .map(|(via, backend)| Staged::new(via, backend, config, page_bytes));
        Self { staged }
    }

    pub fn by_state(&self) -> BTreeMap<&'static str, usize> {
        self.staged
            .as_ref()
            .map(Staged::by_state)
            .unwrap_or_default()
    }

    /// The staged transport, if this peer has it too. Slabs on a device cannot be verified by the checksums of host memory, so
    /// nccl is for two pools on a device, or for none.
    pub fn transport_with(&self, ctx: &NodeContext, peer: &Hello) -> Option<Transport> {
        let staged = self.staged.as_ref()?;
        let fits = !staged.backend.works_on_device()
            || SumKind::parse(&peer.sums) == Some(ctx.pool.sum_kind());
        (fits && peer.transports.iter().any(|t| t == staged.via.as_str())).then_some(staged.via)
    }

    /// Record that a pair falls back to a slower transport than `from`.
    pub fn record_fallback(
        &self,
        ctx: &NodeContext,
        peer: ConnectionId,
        from: Transport,
        why: &str,
    ) {
        let Some(conn) = ctx.connections.get(&peer) else {
            return;
        };
        let mapped = conn.remote.as_ref().filter(|_| conn.mapped_works);
        let staged = self
            .transport_with(ctx, &conn.peer)
            .filter(|_| !from.is_staged() && conn.breaker.allows(ctx.now()));
        let to = mapped
            .map(|remote| mapped_by(remote))
            .or(staged)
            .unwrap_or(Transport::Tcp)
            .as_str();
        tracing::warn!(peer = %conn.peer.addr, from = from.as_str(), to, %why, "a transport broke");
        ctx.shared.stats.lock().fallbacks += 1;
        if let Some(view) = ctx.shared.gauges.lock().peers.get_mut(&peer) {
            view.transport = to;
        }
    }

    // ---- D ----

    /// The staged transport, if the pair has a usable communicator or may make one now.
    pub fn transport_for(
        &mut self,
        ctx: &mut NodeContext,
        peer: ConnectionId,
    ) -> Option<Transport> {
        let now = ctx.now();
        let conn = ctx.connections.get(&peer)?;
        let via = self.transport_with(ctx, &conn.peer)?;
        if conn.comm.is_some() {
            return Some(via); // cleared as soon as it is not usable
        }
        if !conn.breaker.allows(now) || !self.reserve_place(ctx) {
            return None;
        }
        let staged = self.staged.as_mut()?;
        staged.next += 1;
        let key = (peer, staged.next);
        let (receiver, actions) = SlabReceiver::new(staged.limits, now);
        let limits = staged.limits;
        self.start_comm(ctx, key, Half::Receiver(receiver), limits)
            .ok()?;
        if let Some(conn) = ctx.connections.get_mut(&peer) {
            conn.comm = Some(key);
        }
        ctx.timers
            .set(&NodeTimer::Comm(key), Some(now + limits.open_ms));
        self.act_receiver(ctx, key, actions);
        Some(via)
    }

    /// True if one more communicator may exist. Otherwise an idle one is closed, so that a later call succeeds.
    fn reserve_place(&mut self, ctx: &mut NodeContext) -> bool {
        let Some(staged) = &self.staged else {
            return false;
        };
        if staged.num_leaked() >= MAX_LEAKED {
            return false;
        }
        if staged.comms.len() < staged.max {
            return true;
        }
        if let Some(idle) = staged.least_used_idle() {
            self.close_comm(ctx, idle);
        }
        false
    }

    fn start_comm(
        &mut self,
        ctx: &mut NodeContext,
        key: CommKey,
        half: Half,
        limits: SlabLimits,
    ) -> std::io::Result<()> {
        let sums = ctx
            .connections
            .get(&key.0)
            .map_or(SumKind::Xxh3, |conn| conn.sums);
        let Some(staged) = &mut self.staged else {
            return Err(std::io::Error::other("no staged transport"));
        };
        let internal = ctx.internal.clone();
        let context = CommContext {
            pool: ctx.pool.clone(),
            faults: ctx.faults.clone(),
            backend: staged.backend.clone(),
            slabs: limits.slabs,
            slab_bytes: limits.pages_per_slab * ctx.pool.page_bytes(),
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
        staged.comms.insert(key, comm);
        Ok(())
    }

    /// Start a pull; it ends with one `end_pull`, perhaps before this returns.
    pub fn pull(&mut self, ctx: &mut NodeContext, peer: ConnectionId, pull: Pull) {
        match ctx.connections.get(&peer).and_then(|conn| conn.comm) {
            Some(key) => self.step_receiver(
                ctx,
                key,
                ReceiverEvent::Pull {
                    pull: pull.id,
                    pages: pull.pages,
                },
            ),
            None => ctx.end_pull(PullEnd {
                id: pull.id,
                bytes: 0,
                result: Err(PullError::Broken("the communicator is gone".into())),
            }),
        }
    }

    pub fn cancel(&mut self, ctx: &mut NodeContext, peer: ConnectionId, pull: u64) {
        // One of the communicators has it; the others ignore the event.
        for key in self.comms_of(peer) {
            self.step_receiver(ctx, key, ReceiverEvent::Cancel { pull });
        }
    }

    fn comms_of(&self, peer: ConnectionId) -> Vec<CommKey> {
        self.staged.as_ref().map_or_else(Vec::new, |staged| {
            staged
                .comms
                .range((peer, 0)..=(peer, u64::MAX))
                .map(|(&key, _)| key)
                .collect()
        })
    }

    fn close_comm(&mut self, ctx: &mut NodeContext, key: CommKey) {
        self.step_receiver(ctx, key, ReceiverEvent::Close);
        self.step_sender(ctx, key, SenderEvent::Close);
    }

    pub fn on_peer_gone(&mut self, ctx: &mut NodeContext, peer: ConnectionId, why: &str) {
        for key in self.comms_of(peer) {
            self.end_by_peer(ctx, key, format!("the connection is lost: {why}"));
        }
    }

    fn end_by_peer(&mut self, ctx: &mut NodeContext, key: CommKey, why: String) {
        self.step_receiver(ctx, key, ReceiverEvent::PeerEnded(why.clone()));
        self.step_sender(ctx, key, SenderEvent::PeerEnded(why));
    }

    pub fn tick(&mut self, ctx: &mut NodeContext, key: CommKey) {
        self.step_receiver(ctx, key, ReceiverEvent::Tick);
        self.step_sender(ctx, key, SenderEvent::Tick);
    }

    // ---- messages and reports ----

    pub fn on_message(&mut self, ctx: &mut NodeContext, peer: ConnectionId, msg: Msg) {
        match msg {
            Msg::CommOpen {
                comm,
                transport,
                slabs,
                pages_per_slab,
            } => self.on_comm_open(ctx, (peer, comm), &transport, slabs, pages_per_slab),
            Msg::CommId { comm, id } => {
                self.step_receiver(ctx, (peer, comm), ReceiverEvent::Id(id))
            }
            Msg::CommEnd { comm, code, why } => {
                let key = (peer, comm);
                let now = ctx.now();
                let current = ctx
                    .connections
                    .get_mut(&peer)
                    .filter(|conn| conn.comm == Some(key));
                if let (Some(conn), Some(code)) = (current, code) {
                    match code {
                        ReasonCode::NoCapacity => conn.breaker.full(now),
                        _ => conn.breaker.failed(now),
                    }
                    if let Some(via) = self.staged.as_ref().map(|staged| staged.via) {
                        self.record_fallback(ctx, peer, via, &why);
                    }
                }
                self.end_by_peer(ctx, key, format!("the other side: {why}"));
            }
            Msg::SlabRead {
                comm,
                ticket,
                ids,
                gens,
            } => {
                let inc = ctx.connections.get(&peer).map_or("", |conn| &conn.peer.inc);
                if let Some(page) = ctx.shared.announced.first_refused(inc, &ids, &gens) {
                    let code = Some(ReasonCode::LeaseExpired);
                    let refusal = Msg::SlabStale {
                        comm,
                        ticket,
                        page,
                        code,
                    };
                    return ctx.send(peer, refusal);
                }
                let pages = ids.into_iter().zip(gens).collect();
                self.step_sender(ctx, (peer, comm), SenderEvent::Read { ticket, pages });
            }
            Msg::SlabSend { comm, ticket, seq } => {
                self.step_receiver(ctx, (peer, comm), ReceiverEvent::Announced { ticket, seq });
            }
            Msg::SlabStale {
                comm,
                ticket,
                page,
                code,
            } => self.step_receiver(
                ctx,
                (peer, comm),
                ReceiverEvent::Stale { ticket, page, code },
            ),
            _ => {}
        }
    }

    fn on_comm_open(
        &mut self,
        ctx: &mut NodeContext,
        key: CommKey,
        transport: &str,
        slabs: u32,
        pages_per_slab: u32,
    ) {
        let (peer, comm) = key;
        if self
            .staged
            .as_ref()
            .is_some_and(|staged| staged.comms.contains_key(&key))
        {
            return; // a repeated message
        }
        for former in self.comms_of(peer) {
            self.end_by_peer(ctx, former, "the decode node made another one".into());
        }
        let bytes = (pages_per_slab as usize).saturating_mul(ctx.pool.page_bytes());
        let refusal = match &self.staged {
            Some(staged) if staged.via.as_str() == transport => {
                if bytes > MAX_SLAB_BYTES {
                    let why = format!("slabs of {bytes} bytes; at most {MAX_SLAB_BYTES} are made");
                    Some((ReasonCode::TransportBroken, why))
                } else if !self.reserve_place(ctx) {
                    let why = "this node has no place for another communicator (max_communicators)";
                    Some((ReasonCode::NoCapacity, why.to_owned()))
                } else {
                    None
                }
            }
            _ => Some((
                ReasonCode::TransportBroken,
                format!("this node does not use {transport}"),
            )),
        };
        if let Some((code, why)) = refusal {
            let code = Some(code);
            return ctx.send(peer, Msg::CommEnd { comm, code, why });
        }
        let now = ctx.now();
        let Some(limits) = self.staged.as_ref().map(|staged| SlabLimits {
            slabs: slabs as usize,
            pages_per_slab: pages_per_slab as usize,
            ..staged.limits
        }) else {
            return;
        };
        let (sender, actions) = SlabSender::new(limits, now);
        if let Err(err) = self.start_comm(ctx, key, Half::Sender(sender), limits) {
            let code = Some(ReasonCode::TransportBroken);
            let why = clipped(&format!("no thread for a communicator: {err}"));
            return ctx.send(peer, Msg::CommEnd { comm, code, why });
        }
        ctx.timers
            .set(&NodeTimer::Comm(key), Some(now + limits.open_ms));
        self.act_sender(ctx, key, actions);
    }

    pub fn on_report(&mut self, ctx: &mut NodeContext, key: CommKey, report: CommReport) {
        let (receiver, sender) = match report {
            CommReport::Id(id) => (None, Some(SenderEvent::Id(id))),
            CommReport::Opened => (Some(ReceiverEvent::Opened), Some(SenderEvent::Opened)),
            CommReport::Gathered { ticket } => (None, Some(SenderEvent::Gathered { ticket })),
            CommReport::Stale { ticket, page } => (None, Some(SenderEvent::Stale { ticket, page })),
            CommReport::Sent { ticket } => (None, Some(SenderEvent::Sent { ticket })),
            CommReport::Received { ticket, verdict } => {
                (Some(ReceiverEvent::Received { ticket, verdict }), None)
            }
            CommReport::Broken(why) => (
                Some(ReceiverEvent::Broken(why.clone())),
                Some(SenderEvent::Broken(why)),
            ),
            CommReport::Ended => (
                Some(ReceiverEvent::ThreadEnded),
                Some(SenderEvent::ThreadEnded),
            ),
        };
        if let Some(event) = receiver {
            self.step_receiver(ctx, key, event);
        }
        if let Some(event) = sender {
            self.step_sender(ctx, key, event);
        }
    }

    // ---- the state machines ----

    fn comm_mut(&mut self, key: CommKey) -> Option<&mut Comm> {
        self.staged.as_mut()?.comms.get_mut(&key)
    }

    fn step_receiver(&mut self, ctx: &mut NodeContext, key: CommKey, event: ReceiverEvent) {
        let now = ctx.now();
        let Some(comm) = self.comm_mut(key) else {
            return;
        }; // over: late messages are expected
        let Half::Receiver(receiver) = &mut comm.half else {
            return;
        };
        if let ReceiverEvent::Received { ticket, .. } = &event {
            comm.claims.remove(ticket);
        }
        let worked = matches!(
            event,
            ReceiverEvent::Received {
                verdict: Ok(()),
                ..
            }
        );
        let was_usable = receiver.phase().is_usable();
        let actions = receiver.step(event, now);
        comm.last_used = now;
        if worked
            && was_usable
            && let Some(conn) = ctx.connections.get_mut(&key.0)
        {
            conn.breaker.worked();
        }
        self.after_step(ctx, key, was_usable);
        self.act_receiver(ctx, key, actions);
    }

    fn step_sender(&mut self, ctx: &mut NodeContext, key: CommKey, event: SenderEvent) {
        let now = ctx.now();
        let Some(comm) = self.comm_mut(key) else {
            return;
        };
        let Half::Sender(sender) = &mut comm.half else {
            return;
        };
        let was_usable = sender.phase().is_usable();
        let actions = sender.step(event, now);
        comm.last_used = now;
        self.after_step(ctx, key, was_usable);
        self.act_sender(ctx, key, actions);
    }

    /// Set the timer after a step, and count and report an end.
    fn after_step(&mut self, ctx: &mut NodeContext, key: CommKey, was_usable: bool) {
        let now = ctx.now();
        let Some(comm) = self.comm_mut(key) else {
            return;
        };
        let (due, ended) = (comm.next_due(), was_usable && !comm.phase().is_usable());
        let end = comm.end().cloned();
        ctx.timers.set(&NodeTimer::Comm(key), due);
        let (true, Some(end)) = (ended, end) else {
            return;
        };
        let is_failure = !matches!(end, CommEnd::Closed);
        tracing::info!(peer = key.0, comm = key.1, ?end, "a communicator ends");
        self.count_end(ctx, if is_failure { "failed" } else { "closed" });
        let Some(conn) = ctx
            .connections
            .get_mut(&key.0)
            .filter(|conn| conn.comm == Some(key))
        else {
            return;
        };
        conn.comm = None;
        if let (CommEnd::Failed(why), Some(via)) =
            (end, self.staged.as_ref().map(|staged| staged.via))
        {
            conn.breaker.failed(now);
            self.record_fallback(ctx, key.0, via, &why);
        }
    }

    /// Pulls are ended last: their ends may start the next pull on the same communicator.
    fn act_receiver(&mut self, ctx: &mut NodeContext, key: CommKey, actions: Vec<ReceiverAction>) {
        let (peer, comm) = key;
        let (mut revoked, mut ends) = (Vec::new(), Vec::new());
        for action in actions {
            match action {
                ReceiverAction::Ask => self.send_comm_open(ctx, peer, comm),
                ReceiverAction::Join(id) => self.submit(key, CommJob::Join(id)),
                ReceiverAction::Read { ticket, pages } => {
                    let ids = pages.iter().map(|p| p.src.page).collect();
                    let gens = pages.iter().map(|p| p.src.generation).collect();
                    ctx.send(
                        peer,
                        Msg::SlabRead {
                            comm,
                            ticket,
                            ids,
                            gens,
                        },
                    );
                }
                ReceiverAction::Receive {
                    ticket,
                    slab,
                    count,
                    pages,
                } => {
                    let claim = Arc::<WriteClaim>::default();
                    if let Some(comm) = self.comm_mut(key) {
                        comm.claims.insert(ticket, claim.clone());
                    }
                    let job = CommJob::Receive {
                        ticket,
                        slab,
                        count,
                        pages,
                        claim,
                    };
                    self.submit(key, job);
                }
                ReceiverAction::Revoke { ticket } => {
                    let claim = self
                        .comm_mut(key)
                        .and_then(|comm| comm.claims.remove(&ticket));
                    if claim.is_some_and(|claim| claim.revoke()) {
                        revoked.push(ticket);
                    }
                }
                ReceiverAction::End {
                    pull,
                    pages,
                    outcome,
                } => ends.push((pull, pages, outcome)),
                ReceiverAction::SendEnd(end) => self.send_end(ctx, key, &end),
                ReceiverAction::Abort => self.abort_comm(key),
                ReceiverAction::Leak => self.on_leak(ctx, key),
                ReceiverAction::Forget => self.forget_comm(ctx, key),
            }
        }
        for ticket in revoked {
            self.step_receiver(ctx, key, ReceiverEvent::Revoked { ticket });
        }
        let page_bytes = ctx.pool.page_bytes();
        for (id, pages, outcome) in ends {
            let result = match outcome {
                PullOutcome::Done => Ok(()),
                PullOutcome::Failed(code, why) => Err(PullError::Failed(code, why)),
                PullOutcome::Cancelled => Err(PullError::Cancelled),
                PullOutcome::Broken(why) => Err(PullError::Broken(why)),
            };
            ctx.end_pull(PullEnd {
                id,
                bytes: (pages * page_bytes) as u64,
                result,
            });
        }
    }

    fn act_sender(&mut self, ctx: &mut NodeContext, key: CommKey, actions: Vec<SenderAction>) {
        let (peer, comm) = key;
        for action in actions {
            match action {
                SenderAction::Host => self.submit(key, CommJob::Host),
                SenderAction::SendId(id) => ctx.send(peer, Msg::CommId { comm, id }),
                SenderAction::Send {
                    ticket,
                    slab,
                    pages,
                } => self.submit(
                    key,
                    CommJob::Send {
                        ticket,
                        slab,
                        pages,
                    },
                ),
                SenderAction::Announce { ticket, seq } => {
                    ctx.send(peer, Msg::SlabSend { comm, ticket, seq });
                }
                SenderAction::SendStale { ticket, page } => {
                    let code = None;
                    let stale = Msg::SlabStale {
                        comm,
                        ticket,
                        page,
                        code,
                    };
                    ctx.send(peer, stale);
                }
                SenderAction::SendEnd(end) => self.send_end(ctx, key, &end),
                SenderAction::Abort => self.abort_comm(key),
                SenderAction::Leak => self.on_leak(ctx, key),
                SenderAction::Forget => self.forget_comm(ctx, key),
            }
        }
    }

    fn send_comm_open(&mut self, ctx: &mut NodeContext, peer: ConnectionId, comm: u64) {
        let Some(staged) = &self.staged else { return };
        let msg = Msg::CommOpen {
            comm,
            transport: staged.via.as_str().to_owned(),
            slabs: staged.limits.slabs as u32,
            pages_per_slab: staged.limits.pages_per_slab as u32,
        };
        ctx.send(peer, msg);
    }

    fn submit(&self, key: CommKey, job: CommJob) {
        let staged = self.staged.as_ref();
        if let Some(comm) = staged.and_then(|staged| staged.comms.get(&key)) {
            comm.submit(job);
        }
    }

    fn send_end(&mut self, ctx: &mut NodeContext, key: CommKey, end: &CommEnd) {
        let (code, why) = match end {
            CommEnd::Closed => (None, "its place was needed".to_owned()),
            CommEnd::Failed(why) | CommEnd::ByPeer(why) => {
                (Some(ReasonCode::TransportBroken), clipped(why))
            }
        };
        let comm = key.1;
        ctx.send(key.0, Msg::CommEnd { comm, code, why });
    }

    fn abort_comm(&mut self, key: CommKey) {
        let Some(staged) = &mut self.staged else {
            return;
        };
        let thread = staged
            .comms
            .get_mut(&key)
            .and_then(|comm| comm.thread.take());
        if let Some(thread) = thread {
            thread.abort(staged.aborts.0.clone());
        }
    }

    fn count_end(&self, ctx: &NodeContext, end: &'static str) {
        *ctx.shared.stats.lock().comms_ended.entry(end).or_default() += 1;
    }

    fn on_leak(&mut self, ctx: &mut NodeContext, key: CommKey) {
        self.count_end(ctx, "abandoned");
        let lost = self.staged.as_ref().map_or(0, Staged::num_leaked);
        tracing::error!(
            peer = key.0,
            lost,
            at_most = MAX_LEAKED,
            "the abort of a communicator hangs: it is leaked with its slabs; restart this node when it is idle"
        );
    }

    fn forget_comm(&mut self, ctx: &mut NodeContext, key: CommKey) {
        if let Some(staged) = &mut self.staged {
            staged.comms.remove(&key);
        }
        ctx.timers.set(&NodeTimer::Comm(key), None);
    }
}
