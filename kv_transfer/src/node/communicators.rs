//! Both sides' communicators in the control loop: carries out what `state_machine::communicator` says.
//!
//! A connection has at most one usable communicator, made by D when it wants pages. The number of communicators of a node is
//! bounded: an idle one is closed for another pair, which goes without one until then. After `MAX_ABANDONED` aborts that hang the
//! node makes no more.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::config::{NodeConfig, Transport};
use super::context::{CommKey, Internal, NodeContext, Timer, mapped_by};
use crate::pool::SumKind;
use crate::protocol::{Hello, MAX_SLAB_BYTES, Msg, clipped};
use crate::reason_code::Code;
use crate::state_machine::Peer;
use crate::state_machine::communicator::{
    End, Limits, Outcome, Phase, Sink, SinkAction, SinkEvent, Source, SourceAction, SourceEvent,
    Ticket,
};
use crate::transport::communicator::{
    Claim, CommBackend, CommContext, CommGuard, CommJob, CommReport, CommThread, CommTimeouts,
};
use crate::transport::{Pull, PullEnd, PullError};

/// Communicators whose abort hangs; each keeps two threads and its slabs. With more the transport is given up.
const MAX_ABANDONED: usize = 4;

enum Half {
    Sink(Sink),
    Source(Source),
}

struct Comm {
    half: Half,
    /// Until the abort.
    thread: Option<CommThread>,
    guard: Arc<CommGuard>,
    claims: HashMap<Ticket, Arc<Claim>>,
    last_used: u64,
}

impl Comm {
    fn phase(&self) -> Phase {
        match &self.half {
            Half::Sink(sink) => sink.phase(),
            Half::Source(source) => source.phase(),
        }
    }

    fn is_idle(&self) -> bool {
        match &self.half {
            Half::Sink(sink) => sink.is_idle(),
            Half::Source(source) => source.is_idle(),
        }
    }

    fn next_due(&self) -> Option<u64> {
        match &self.half {
            Half::Sink(sink) => sink.next_due(),
            Half::Source(source) => source.next_due(),
        }
    }

    fn end(&self) -> Option<&End> {
        match &self.half {
            Half::Sink(sink) => sink.end(),
            Half::Source(source) => source.end(),
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
    limits: Limits,
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

    fn num_abandoned(&self) -> usize {
        self.comms
            .values()
            .filter(|comm| comm.phase() == Phase::Abandoned)
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
    /// The node is closing: no page is written after this. Aborts get their time, and are left alone after it.
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
            tracing::error!("a communicator's abort hangs: its threads are left alone");
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

    /// The staged transport, if this peer has it too. Slabs on a device cannot be verified by the checksums of host memory, so that
    /// nccl is for two pools on a device, or for none.
    pub fn transport_with(&self, ctx: &NodeContext, peer: &Hello) -> Option<Transport> {
        let staged = self.staged.as_ref()?;
        let fits = !staged.backend.works_on_device()
            || SumKind::parse(&peer.sums) == Some(ctx.pool.sum_kind());
        (fits && peer.transports.iter().any(|t| t == staged.via.as_str())).then_some(staged.via)
    }

    /// A pair goes on with a slower transport than `from`.
    pub fn changed_transport(&self, ctx: &NodeContext, peer: Peer, from: Transport, why: &str) {
        let Some(conn) = ctx.conns.get(&peer) else {
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
    pub fn transport_for(&mut self, ctx: &mut NodeContext, peer: Peer) -> Option<Transport> {
        let now = ctx.now();
        let conn = ctx.conns.get(&peer)?;
        let via = self.transport_with(ctx, &conn.peer)?;
        if conn.comm.is_some() {
            return Some(via); // forgotten as soon as it is not usable
        }
        if !conn.breaker.allows(now) || !self.make_place(ctx) {
            return None;
        }
        let staged = self.staged.as_mut()?;
        staged.next += 1;
        let key = (peer, staged.next);
        let (sink, actions) = Sink::new(staged.limits, now);
        let limits = staged.limits;
        self.start_comm(ctx, key, Half::Sink(sink), limits).ok()?;
        if let Some(conn) = ctx.conns.get_mut(&peer) {
            conn.comm = Some(key);
        }
        ctx.timers
            .set(&Timer::Comm(key), Some(now + limits.open_ms));
        self.act_sink(ctx, key, actions);
        Some(via)
    }

    /// Whether one more communicator may exist. If not, an idle one is closed, for the next time.
    fn make_place(&mut self, ctx: &mut NodeContext) -> bool {
        let Some(staged) = &self.staged else {
            return false;
        };
        if staged.num_abandoned() >= MAX_ABANDONED {
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
        limits: Limits,
    ) -> std::io::Result<()> {
        let sums = ctx
            .conns
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
        // Reports after the loop's end are dropped: nobody is left to tell.
        let report = Arc::new(move |report| drop(internal.send(Internal::Comm(key, report))));
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

    /// Answered by one `pulled`, perhaps before this returns.
    pub fn pull(&mut self, ctx: &mut NodeContext, peer: Peer, pull: Pull) {
        match ctx.conns.get(&peer).and_then(|conn| conn.comm) {
            Some(key) => self.step_sink(
                ctx,
                key,
                SinkEvent::Pull {
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

    pub fn cancel(&mut self, ctx: &mut NodeContext, peer: Peer, pull: u64) {
        // Whichever communicator has it; the others do not know it.
        for key in self.comms_of(peer) {
            self.step_sink(ctx, key, SinkEvent::Cancel { pull });
        }
    }

    fn comms_of(&self, peer: Peer) -> Vec<CommKey> {
        self.staged.as_ref().map_or_else(Vec::new, |staged| {
            staged
                .comms
                .range((peer, 0)..=(peer, u64::MAX))
                .map(|(&key, _)| key)
                .collect()
        })
    }

    fn close_comm(&mut self, ctx: &mut NodeContext, key: CommKey) {
        self.step_sink(ctx, key, SinkEvent::Close);
        self.step_source(ctx, key, SourceEvent::Close);
    }

    pub fn on_peer_gone(&mut self, ctx: &mut NodeContext, peer: Peer, why: &str) {
        for key in self.comms_of(peer) {
            self.end_by_peer(ctx, key, format!("the connection is lost: {why}"));
        }
    }

    fn end_by_peer(&mut self, ctx: &mut NodeContext, key: CommKey, why: String) {
        self.step_sink(ctx, key, SinkEvent::PeerEnded(why.clone()));
        self.step_source(ctx, key, SourceEvent::PeerEnded(why));
    }

    pub fn tick(&mut self, ctx: &mut NodeContext, key: CommKey) {
        self.step_sink(ctx, key, SinkEvent::Tick);
        self.step_source(ctx, key, SourceEvent::Tick);
    }

    // ---- messages and reports ----

    pub fn on_message(&mut self, ctx: &mut NodeContext, peer: Peer, msg: Msg) {
        match msg {
            Msg::CommOpen {
                comm,
                transport,
                slabs,
                pages_per_slab,
            } => self.on_comm_open(ctx, (peer, comm), &transport, slabs, pages_per_slab),
            Msg::CommId { comm, id } => self.step_sink(ctx, (peer, comm), SinkEvent::Id(id)),
            Msg::CommEnd { comm, code, why } => {
                let key = (peer, comm);
                let now = ctx.now();
                let current = ctx
                    .conns
                    .get_mut(&peer)
                    .filter(|conn| conn.comm == Some(key));
                if let (Some(conn), Some(code)) = (current, code) {
                    match code {
                        Code::NoCapacity => conn.breaker.full(now),
                        _ => conn.breaker.failed(now),
                    }
                    if let Some(via) = self.staged.as_ref().map(|staged| staged.via) {
                        self.changed_transport(ctx, peer, via, &why);
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
                let inc = ctx.conns.get(&peer).map_or("", |conn| &conn.peer.inc);
                if let Some(page) = ctx.shared.announced.first_refused(inc, &ids, &gens) {
                    let code = Some(Code::LeaseExpired);
                    let refusal = Msg::SlabStale {
                        comm,
                        ticket,
                        page,
                        code,
                    };
                    return ctx.send(peer, refusal);
                }
                let pages = ids.into_iter().zip(gens).collect();
                self.step_source(ctx, (peer, comm), SourceEvent::Read { ticket, pages });
            }
            Msg::SlabSend { comm, ticket, seq } => {
                self.step_sink(ctx, (peer, comm), SinkEvent::Announced { ticket, seq });
            }
            Msg::SlabStale {
                comm,
                ticket,
                page,
                code,
            } => self.step_sink(ctx, (peer, comm), SinkEvent::Stale { ticket, page, code }),
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
            return; // said twice
        }
        for former in self.comms_of(peer) {
            self.end_by_peer(ctx, former, "the decode node made another one".into());
        }
        let bytes = (pages_per_slab as usize).saturating_mul(ctx.pool.page_bytes());
        let refusal = match &self.staged {
            Some(staged) if staged.via.as_str() == transport => {
                if bytes > MAX_SLAB_BYTES {
                    let why = format!("slabs of {bytes} bytes; at most {MAX_SLAB_BYTES} are made");
                    Some((Code::TransportBroken, why))
                } else if !self.make_place(ctx) {
                    let why = "this node has no place for another communicator (max_communicators)";
                    Some((Code::NoCapacity, why.to_owned()))
                } else {
                    None
                }
            }
            _ => Some((
                Code::TransportBroken,
                format!("this node does not use {transport}"),
            )),
        };
        if let Some((code, why)) = refusal {
            let code = Some(code);
            return ctx.send(peer, Msg::CommEnd { comm, code, why });
        }
        let now = ctx.now();
        let Some(limits) = self.staged.as_ref().map(|staged| Limits {
            slabs: slabs as usize,
            pages_per_slab: pages_per_slab as usize,
            ..staged.limits
        }) else {
            return;
        };
        let (source, actions) = Source::new(limits, now);
        if let Err(err) = self.start_comm(ctx, key, Half::Source(source), limits) {
            let code = Some(Code::TransportBroken);
            let why = clipped(&format!("no thread for a communicator: {err}"));
            return ctx.send(peer, Msg::CommEnd { comm, code, why });
        }
        ctx.timers
            .set(&Timer::Comm(key), Some(now + limits.open_ms));
        self.act_source(ctx, key, actions);
    }

    pub fn on_report(&mut self, ctx: &mut NodeContext, key: CommKey, report: CommReport) {
        let (sink, source) = match report {
            CommReport::Id(id) => (None, Some(SourceEvent::Id(id))),
            CommReport::Opened => (Some(SinkEvent::Opened), Some(SourceEvent::Opened)),
            CommReport::Gathered { ticket } => (None, Some(SourceEvent::Gathered { ticket })),
            CommReport::Stale { ticket, page } => (None, Some(SourceEvent::Stale { ticket, page })),
            CommReport::Sent { ticket } => (None, Some(SourceEvent::Sent { ticket })),
            CommReport::Received { ticket, verdict } => {
                (Some(SinkEvent::Received { ticket, verdict }), None)
            }
            CommReport::Broken(why) => (
                Some(SinkEvent::Broken(why.clone())),
                Some(SourceEvent::Broken(why)),
            ),
            CommReport::Ended => (Some(SinkEvent::ThreadEnded), Some(SourceEvent::ThreadEnded)),
        };
        if let Some(event) = sink {
            self.step_sink(ctx, key, event);
        }
        if let Some(event) = source {
            self.step_source(ctx, key, event);
        }
    }

    // ---- the state machines ----

    fn comm_mut(&mut self, key: CommKey) -> Option<&mut Comm> {
        self.staged.as_mut()?.comms.get_mut(&key)
    }

    fn step_sink(&mut self, ctx: &mut NodeContext, key: CommKey, event: SinkEvent) {
        let now = ctx.now();
        let Some(comm) = self.comm_mut(key) else {
            return;
        }; // over: late words are expected
        let Half::Sink(sink) = &mut comm.half else {
            return;
        };
        if let SinkEvent::Received { ticket, .. } = &event {
            comm.claims.remove(ticket);
        }
        let worked = matches!(
            event,
            SinkEvent::Received {
                verdict: Ok(()),
                ..
            }
        );
        let was_usable = sink.phase().is_usable();
        let actions = sink.step(event, now);
        comm.last_used = now;
        if worked
            && was_usable
            && let Some(conn) = ctx.conns.get_mut(&key.0)
        {
            conn.breaker.worked();
        }
        self.stepped(ctx, key, was_usable);
        self.act_sink(ctx, key, actions);
    }

    fn step_source(&mut self, ctx: &mut NodeContext, key: CommKey, event: SourceEvent) {
        let now = ctx.now();
        let Some(comm) = self.comm_mut(key) else {
            return;
        };
        let Half::Source(source) = &mut comm.half else {
            return;
        };
        let was_usable = source.phase().is_usable();
        let actions = source.step(event, now);
        comm.last_used = now;
        self.stepped(ctx, key, was_usable);
        self.act_source(ctx, key, actions);
    }

    /// After each step: its timer, and what follows from its end.
    fn stepped(&mut self, ctx: &mut NodeContext, key: CommKey, was_usable: bool) {
        let now = ctx.now();
        let Some(comm) = self.comm_mut(key) else {
            return;
        };
        let (due, ended) = (comm.next_due(), was_usable && !comm.phase().is_usable());
        let end = comm.end().cloned();
        ctx.timers.set(&Timer::Comm(key), due);
        let (true, Some(end)) = (ended, end) else {
            return;
        };
        let is_failure = !matches!(end, End::Closed);
        tracing::info!(peer = key.0, comm = key.1, ?end, "a communicator ends");
        self.count_end(ctx, if is_failure { "failed" } else { "closed" });
        let Some(conn) = ctx
            .conns
            .get_mut(&key.0)
            .filter(|conn| conn.comm == Some(key))
        else {
            return;
        };
        conn.comm = None;
        if let (End::Failed(why), Some(via)) = (end, self.staged.as_ref().map(|staged| staged.via))
        {
            conn.breaker.failed(now);
            self.changed_transport(ctx, key.0, via, &why);
        }
    }

    /// Ends of pulls come last: they may bring the next pull to the same communicator, behind what this step says.
    fn act_sink(&mut self, ctx: &mut NodeContext, key: CommKey, actions: Vec<SinkAction>) {
        let (peer, comm) = key;
        let (mut revoked, mut ends) = (Vec::new(), Vec::new());
        for action in actions {
            match action {
                SinkAction::Ask => self.ask_for_comm(ctx, peer, comm),
                SinkAction::Join(id) => self.submit(key, CommJob::Join(id)),
                SinkAction::Read { ticket, pages } => {
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
                SinkAction::Receive {
                    ticket,
                    slab,
                    count,
                    pages,
                } => {
                    let claim = Arc::<Claim>::default();
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
                SinkAction::Revoke { ticket } => {
                    let claim = self
                        .comm_mut(key)
                        .and_then(|comm| comm.claims.remove(&ticket));
                    if claim.is_some_and(|claim| claim.revoke()) {
                        revoked.push(ticket);
                    }
                }
                SinkAction::End {
                    pull,
                    pages,
                    outcome,
                } => ends.push((pull, pages, outcome)),
                SinkAction::TellEnd(end) => self.tell_end(ctx, key, &end),
                SinkAction::Abort => self.abort_comm(key),
                SinkAction::Abandon => self.abandoned(ctx, key),
                SinkAction::Gone => self.forget_comm(ctx, key),
            }
        }
        for ticket in revoked {
            self.step_sink(ctx, key, SinkEvent::Revoked { ticket });
        }
        let page_bytes = ctx.pool.page_bytes();
        for (id, pages, outcome) in ends {
            let result = match outcome {
                Outcome::Done => Ok(()),
                Outcome::Failed(code, why) => Err(PullError::Failed(code, why)),
                Outcome::Cancelled => Err(PullError::Cancelled),
                Outcome::Broken(why) => Err(PullError::Broken(why)),
            };
            ctx.end_pull(PullEnd {
                id,
                bytes: (pages * page_bytes) as u64,
                result,
            });
        }
    }

    fn act_source(&mut self, ctx: &mut NodeContext, key: CommKey, actions: Vec<SourceAction>) {
        let (peer, comm) = key;
        for action in actions {
            match action {
                SourceAction::Host => self.submit(key, CommJob::Host),
                SourceAction::TellId(id) => ctx.send(peer, Msg::CommId { comm, id }),
                SourceAction::Send {
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
                SourceAction::Announce { ticket, seq } => {
                    ctx.send(peer, Msg::SlabSend { comm, ticket, seq });
                }
                SourceAction::TellStale { ticket, page } => {
                    let code = None;
                    let stale = Msg::SlabStale {
                        comm,
                        ticket,
                        page,
                        code,
                    };
                    ctx.send(peer, stale);
                }
                SourceAction::TellEnd(end) => self.tell_end(ctx, key, &end),
                SourceAction::Abort => self.abort_comm(key),
                SourceAction::Abandon => self.abandoned(ctx, key),
                SourceAction::Gone => self.forget_comm(ctx, key),
            }
        }
    }

    fn ask_for_comm(&mut self, ctx: &mut NodeContext, peer: Peer, comm: u64) {
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

    fn tell_end(&mut self, ctx: &mut NodeContext, key: CommKey, end: &End) {
        let (code, why) = match end {
            End::Closed => (None, "its place was needed".to_owned()),
            End::Failed(why) | End::ByPeer(why) => (Some(Code::TransportBroken), clipped(why)),
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

    fn abandoned(&mut self, ctx: &mut NodeContext, key: CommKey) {
        self.count_end(ctx, "abandoned");
        let lost = self.staged.as_ref().map_or(0, Staged::num_abandoned);
        tracing::error!(
            peer = key.0,
            lost,
            at_most = MAX_ABANDONED,
            "the abort of a communicator hangs: it is given up with its slabs; restart this node when it is idle"
        );
    }

    fn forget_comm(&mut self, ctx: &mut NodeContext, key: CommKey) {
        if let Some(staged) = &mut self.staged {
            staged.comms.remove(&key);
        }
        ctx.timers.set(&Timer::Comm(key), None);
    }
}
