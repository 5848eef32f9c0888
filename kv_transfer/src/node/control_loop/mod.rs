//! Control loop of a node: dispatches commands, messages, finished copies and timers, one at a
//! time, to the side concerned.
//!
//! The loop owns P's rooms (`prefill_side`), D's rooms (`decode_side`), the communicators and their
//! shared state (`context`); each of them gets the others as arguments and does not know the loop.

mod accept;

use std::io;
use std::mem;
use std::net::{IpAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use self::accept::accept_loop;
use super::command::EngineCommand;
use super::communicators::LoopContext;
use super::config::NodeConfig;
use super::connections::establish::PeerMessage;
use super::connections::outbox::OutgoingMessage;
use super::context::{LoopInboxes, LoopMessage, NodeContext, NodeTimer, SharedState, random_uuid};
use super::decode_side::DecodeSide;
use super::prefill_side::PrefillSide;
use super::records::room_history::RoomSide;
use crate::bootstrap::{BootstrapClient, HttpError, RankRegistration};
use crate::pool::KvPool;
use crate::protocol::handshake::{ConnectionError, Identity, OpenedConnection};
use crate::protocol::{Channel, MAX_HEARTBEAT_ROOMS, Msg};
use crate::reason_code::ReasonCode;
use crate::state_machine::ConnectionId;
use crate::state_machine::communicator::CommEvent;
use crate::state_machine::decode::DecodeEvent;
use crate::state_machine::prefill::PrefillEvent;
use crate::transport::communicator::CommBackend;
use crate::transport::copy_threads::{CopyJob, CopyReport};
use crate::transport::shm;
use crate::warnings::PeerWarnings;

/// Control connections; a fleet has fewer ranks.
const MAX_CONNS: usize = 4096;
const MISSED_HEARTBEATS: u64 = 3;
const REGISTER_AGAIN: Duration = Duration::from_secs(5);
const UNREGISTER_TIMEOUT: Duration = Duration::from_millis(500);

/// Socket by which processes of this host get the pool.
pub struct PoolShare {
    pub listener: UnixListener,
    pub token: [u8; shm::TOKEN_BYTES],
    /// Handle that opens pages on a device; empty for host memory.
    pub handle: Vec<u8>,
}

pub struct Listeners {
    pub control: TcpListener,
    pub local: Option<PoolShare>,
}

/// Owner of both sides' rooms and of their shared context.
pub(super) struct ControlLoop {
    ctx: LoopContext,
    prefill: PrefillSide,
    decode: DecodeSide,
    refused_hellos: PeerWarnings<(Option<IpAddr>, ReasonCode)>,
    inboxes: LoopInboxes,
    port: u16,
    registered: Option<(BootstrapClient, RankRegistration)>,
}

impl ControlLoop {
    pub fn new(
        config: NodeConfig,
        shared: Arc<SharedState>,
        pool: Arc<KvPool>,
        identity: Arc<Identity>,
        port: u16,
        backend: Option<Arc<dyn CommBackend>>,
    ) -> io::Result<Self> {
        let limits = config.limits();
        let (node, inboxes) = NodeContext::start(config, shared, pool, identity)?;
        Ok(Self {
            ctx: LoopContext::new(node, backend),
            prefill: PrefillSide::new(&limits),
            decode: DecodeSide::default(),
            refused_hellos: PeerWarnings::default(),
            inboxes,
            port,
            registered: None,
        })
    }

    pub async fn run(mut self, listeners: Listeners, mut commands: mpsc::Receiver<EngineCommand>) {
        self.start_listening(listeners);
        loop {
            let now = self.ctx.now_ms();
            while let Some(timer) = self.ctx.timers.pop_due(now) {
                self.on_timer(timer, now);
                self.apply_deferred();
            }
            let next = self.ctx.timers.next_due();
            let wait = next.map_or(0, |due| due.saturating_sub(self.ctx.now_ms()));
            let wait = Duration::from_millis(wait);
            tokio::select! {
                command = commands.recv() => match command {
                    None | Some(EngineCommand::Close) => break,
                    Some(command) => self.on_command(command),
                },
                Some((peer, message)) = self.inboxes.peer_inbox.recv() => self.on_peer_message(peer, message),
                Some(message) = self.inboxes.internal.recv() => self.on_internal(message),
                () = tokio::time::sleep(wait), if next.is_some() => {}
            }
            self.apply_deferred();
        }
        self.unregister_rank().await;
    }

    /// Handle the ends and losses that the last step left in the context, then report to the
    /// engine.
    fn apply_deferred(&mut self) {
        loop {
            let pulled = mem::take(&mut self.ctx.pulled);
            let lost_connections = mem::take(&mut self.ctx.lost);
            if pulled.is_empty() && lost_connections.is_empty() {
                break;
            }
            for end in pulled {
                self.decode.on_pulled(&mut self.ctx, end);
            }
            for (peer, err) in lost_connections {
                self.on_connection_lost(peer, &err);
            }
        }
        self.publish_gauges();
        self.ctx.flush_events();
    }

    fn start_listening(&self, listeners: Listeners) {
        let identity = self.ctx.identity.clone();
        let internal = self.ctx.internal.clone();
        tokio::spawn(async move {
            let err = accept_loop(listeners.control, identity, internal.clone()).await;
            let _ = internal.send(LoopMessage::ListenerDead(err.to_string()));
        });
        if let Some(local) = listeners.local {
            let pool = self.ctx.pool.clone();
            let internal = self.ctx.internal.clone();
            let failed = internal.clone();
            let failed = move || drop(failed.send(LoopMessage::AcceptFailed));
            tokio::spawn(async move {
                let err =
                    shm::serve_handles(local.listener, pool, local.token, local.handle, failed)
                        .await;
                let _ = internal.send(LoopMessage::ListenerDead(format!("shm: {err}")));
            });
        }
    }

    fn publish_gauges(&self) {
        let mut gauges = self.ctx.shared.gauges.lock();
        gauges.pending_opens = self.prefill.num_pending_opens();
        gauges.pulls_in_flight = self.decode.num_pulls();
        gauges.draining = self.prefill.is_draining;
        gauges.comms = self.ctx.comms_by_state();
    }

    fn on_command(&mut self, command: EngineCommand) {
        let ctx = &mut self.ctx;
        match command {
            EngineCommand::Offer(room, request) => self.prefill.offer_room(ctx, room, request),
            EngineCommand::Open(room, request) => self.decode.open_room(ctx, room, request),
            EngineCommand::Prefill(room, event) => self.prefill.apply_event(ctx, room, event),
            EngineCommand::Decode(room, event) => self.decode.apply_event(ctx, room, event),
            EngineCommand::Abort(room, code) => self.abort_room(room, code),
            EngineCommand::Register {
                host,
                port,
                timeout,
                reply,
            } => {
                self.register_rank(host, port, timeout, reply);
            }
            EngineCommand::Drain => self.prefill.is_draining = true,
            EngineCommand::Close => {}
            #[cfg(test)]
            EngineCommand::Panic => panic!("asked to, by a test"),
        }
    }

    fn abort_room(&mut self, room: u64, code: ReasonCode) {
        let is_decoding = self.decode.has_room(room);
        if is_decoding {
            self.decode
                .apply_event(&mut self.ctx, room, DecodeEvent::Abort(code));
        }
        if !is_decoding || self.prefill.has_room(room) {
            self.prefill.abort_room(&mut self.ctx, room, code);
        }
    }

    fn on_internal(&mut self, message: LoopMessage) {
        let ctx = &mut self.ctx;
        match message {
            LoopMessage::Accepted(stream, opened) => self.on_accepted(stream, *opened),
            LoopMessage::HelloRefused { from, err } => self.on_refused_hello(from, &err),
            LoopMessage::HelloEvicted => ctx.shared.stats.lock().hellos_evicted += 1,
            LoopMessage::Connected(address, result) => {
                self.decode.on_connect_result(ctx, address, *result);
            }
            LoopMessage::OpenWaiting(address, peer) => {
                self.decode.open_waiting(ctx, &address, peer);
            }
            LoopMessage::Sizes { room, size } => self.decode.on_sizes(ctx, room, size),
            LoopMessage::Copied(CopyReport::Hashed { room, sums }) => {
                self.prefill.on_hashed(ctx, room, sums);
            }
            LoopMessage::Copied(CopyReport::Pulled(end)) | LoopMessage::Pulled(end) => {
                self.decode.on_pulled(ctx, end);
            }
            LoopMessage::Copied(CopyReport::Closed) => {}
            LoopMessage::Copied(CopyReport::Broken { what, room }) => {
                ctx.shared.mark_unhealthy(what);
                if let Some(room) = room {
                    self.prefill
                        .abort_room(ctx, room, ReasonCode::TransportBroken);
                }
            }
            LoopMessage::Comm(key, report) => ctx.on_comm_report(key, report),
            LoopMessage::Registered(known) => self.registered = Some(*known),
            LoopMessage::DataThreadDead(reason) => {
                ctx.shared.mark_unhealthy(format!("data thread: {reason}"));
                ctx.data.stop();
                self.decode.on_data_thread_died(ctx);
            }
            LoopMessage::AcceptFailed => ctx.shared.stats.lock().accept_errors += 1,
            LoopMessage::ListenerDead(reason) => {
                ctx.shared.mark_unhealthy(format!("listener: {reason}"))
            }
        }
    }

    fn on_timer(&mut self, timer: NodeTimer, now: u64) {
        let ctx = &mut self.ctx;
        match timer {
            NodeTimer::Prefill(room) => self.prefill.apply_event(ctx, room, PrefillEvent::Tick),
            NodeTimer::Decode(room) => self.decode.on_tick(ctx, room),
            NodeTimer::PendingOpens => self.prefill.expire_pending_opens(ctx, now),
            NodeTimer::Heartbeat(peer) => self.send_heartbeat(peer, now),
            NodeTimer::Connect(address) => self.decode.retry_connection(ctx, &address),
            NodeTimer::Size(room) => self.decode.request_sizes(ctx, room),
            NodeTimer::Comm(key) => ctx.step_either(key, CommEvent::Tick),
        }
    }

    // ---- connections ----

    fn on_accepted(&mut self, stream: TcpStream, opened: OpenedConnection) {
        if opened.peer.channel == Channel::Data {
            let inc = &opened.peer.inc;
            let mut peers = self.ctx.connections.values();
            if !peers.any(|conn| conn.peer.inc == *inc) {
                tracing::warn!(peer = %opened.peer.addr, "a data stream of a peer without a control connection is refused");
                return self.ctx.count_refused_hello(ReasonCode::TransportBroken);
            }
            match stream.into_std() {
                Ok(stream) => self.ctx.data.serve_stream(stream, opened),
                Err(err) => {
                    tracing::warn!(%err, "a data stream could not be handed to a data thread")
                }
            }
            return;
        }
        if self.ctx.connections.len() >= MAX_CONNS {
            tracing::warn!("{MAX_CONNS} peers are connected: another one is turned away");
            return;
        }
        let Ok(addr) = stream.peer_addr() else { return }; // closed already
        // The decode rank chooses the transport.
        self.ctx
            .add_connection(stream, addr, opened, None, None, "");
    }

    fn on_peer_message(&mut self, peer: ConnectionId, message: PeerMessage) {
        match message {
            PeerMessage::Down(err) => self.on_connection_lost(peer, &err),
            PeerMessage::Msg(msg, _space) => {
                let now = self.ctx.now_ms();
                let Some(conn) = self.ctx.connections.get_mut(&peer) else {
                    return;
                }; // read before the loss
                conn.last_seen = now;
                self.on_msg(peer, *msg);
            }
        }
    }

    fn on_msg(&mut self, peer: ConnectionId, msg: Msg) {
        let ctx = &mut self.ctx;
        match msg {
            Msg::Open(open) => self.prefill.on_open(ctx, peer, open),
            Msg::Done { room, attempt, .. } => {
                let event = PrefillEvent::Done { peer, attempt };
                self.prefill.apply_event(ctx, room, event);
            }
            Msg::Abort {
                room,
                attempt,
                code,
            } => {
                self.prefill.on_peer_abort(ctx, (peer, room, attempt), code);
                let event = DecodeEvent::PeerAbort {
                    peer,
                    attempt,
                    code,
                };
                self.decode.apply_event(ctx, room, event);
            }
            Msg::AbortAck { .. } => {} // aborts need no answer
            Msg::Heartbeat {
                rooms,
                progress,
                busy,
                ..
            } => {
                self.prefill.renew_leases(ctx, peer, &rooms);
                self.watch_progress(peer, progress, busy);
            }
            Msg::Reject {
                code,
                message,
                connection: true,
                ..
            } => {
                self.on_connection_lost(peer, &ConnectionError::new(code, message));
            }
            Msg::OpenOk { .. }
            | Msg::OpenPending { .. }
            | Msg::Reject { .. }
            | Msg::Progress { .. }
            | Msg::Final { .. } => self.decode.on_answer(ctx, peer, msg),
            Msg::CommOpen { .. }
            | Msg::CommId { .. }
            | Msg::CommEnd { .. }
            | Msg::SlabRead { .. }
            | Msg::SlabSend { .. }
            | Msg::SlabStale { .. } => ctx.on_comm_message(peer, msg),
            Msg::Challenge { .. }
            | Msg::Hello(_)
            | Msg::Read { .. }
            | Msg::Data { .. }
            | Msg::DataEnd { .. }
            | Msg::Stale { .. } => {
                let reason = format!("{} on a control connection", msg.name());
                self.on_connection_lost(peer, &ConnectionError::transport_broken(reason));
            }
        }
    }

    /// Fail or detach every room of the connection; the next room with this peer starts from GET
    /// /route.
    fn on_connection_lost(&mut self, peer: ConnectionId, err: &ConnectionError) {
        let Some(conn) = self.ctx.connections.remove(&peer) else {
            return;
        };
        tracing::warn!(peer = %conn.peer.addr, incarnation = %conn.peer.inc, code = %err.code, why = %err.reason, rooms = conn.rooms.len(), "link lost");
        let is_bad = matches!(err.code, ReasonCode::Auth | ReasonCode::TransportBroken);
        if is_bad {
            // Send the reason after the queued frames. The peer may have closed already.
            let msg = Msg::connection_refusal(err.code, &err.reason);
            let _ = conn.tasks.outbox.put(OutgoingMessage { msg, flip: false });
            conn.tasks.stop_reading();
        } else {
            conn.tasks.abort_tasks();
        }
        {
            let mut stats = self.ctx.shared.stats.lock();
            stats.links_lost += 1;
            stats.bad_frames += u64::from(is_bad);
        }
        self.ctx.shared.gauges.lock().peers.remove(&peer);
        self.ctx.timers.set(&NodeTimer::Heartbeat(peer), None);
        self.prefill.forget_opens_of(peer);
        if let Some(key) = &conn.key {
            self.decode.connection_down(&self.ctx, key);
        }
        let ctx = &mut self.ctx;
        let code = err.code;
        for (side, room) in conn.rooms {
            match side {
                RoomSide::Prefill => {
                    self.prefill
                        .apply_event(ctx, room, PrefillEvent::PeerGone { peer, code });
                }
                RoomSide::Decode => self.decode.on_peer_gone(ctx, peer, room, code),
            }
        }
        // After the rooms: they end with the reason of the connection, not of its communicator.
        self.ctx.end_comms_of(peer, &err.reason);
        if let Some(remote) = conn.remote.filter(|remote| remote.device().is_some()) {
            self.ctx.copy_threads.submit_job(CopyJob::Close(remote));
        }
    }

    fn on_refused_hello(&mut self, from: Option<IpAddr>, err: &ConnectionError) {
        self.ctx.count_refused_hello(err.code);
        let due = self
            .refused_hellos
            .record((from, err.code), self.ctx.now_ms());
        if let Some(times) = due {
            tracing::warn!(from = from.map(tracing::field::display), code = %err.code, why = %err.reason, times, "a peer's HELLO was refused");
        }
    }

    fn send_heartbeat(&mut self, peer: ConnectionId, now: u64) {
        let every = self.ctx.config.heartbeat_ms;
        let Some(conn) = self.ctx.connections.get_mut(&peer) else {
            return;
        };
        if now.saturating_sub(conn.last_beat) > 2 * every {
            // this process was stopped or stalled: the peer's heartbeats may still be in the socket
            conn.last_seen = now;
        }
        conn.last_beat = now;
        if conn.key.is_none() && conn.tasks.outbox.backlog.is_full() {
            // its heartbeats stay unread; the writing task ends a connection that takes no byte
            conn.last_seen = now;
        }
        let silent_ms = now.saturating_sub(conn.last_seen);
        if silent_ms >= MISSED_HEARTBEATS * every {
            let reason = format!("no message for {silent_ms} ms ({MISSED_HEARTBEATS} heartbeats)");
            return self.on_connection_lost(peer, &ConnectionError::peer_dead(reason));
        }
        conn.seq += 1;
        let rooms: Vec<u64> = conn.rooms.iter().map(|&(_, room)| room).collect();
        let seq = conn.seq;
        let backlog = self.decode.queued_pages(peer) * self.ctx.pool.page_bytes() as u64;
        let progress = self.ctx.shared.progress.load(Ordering::Relaxed);
        let busy = self.prefill.is_computing();
        self.ctx
            .timers
            .set(&NodeTimer::Heartbeat(peer), Some(now + every));
        let lists = rooms.chunks(MAX_HEARTBEAT_ROOMS).map(<[u64]>::to_vec);
        let lists: Vec<_> = lists.collect();
        let lists = if lists.is_empty() {
            vec![vec![]]
        } else {
            lists
        };
        for rooms in lists {
            let beat = Msg::Heartbeat {
                inc: self.ctx.identity.hello.inc.clone(),
                seq,
                rooms,
                pull_backlog_bytes: backlog,
                progress,
                busy,
            };
            self.ctx.send_to(peer, beat);
        }
    }

    /// D: fail the rooms of a prefill rank whose engine claims work and does none, although its
    /// transfer runtime lives.
    fn watch_progress(&mut self, peer: ConnectionId, progress: u64, busy: bool) {
        let now = self.ctx.now_ms();
        let limit = self.ctx.config.stall_ms;
        let Some(conn) = self.ctx.connections.get_mut(&peer) else {
            return;
        };
        if !busy || progress != conn.progress {
            conn.progress = progress;
            conn.progressed_at = now;
        }
        let still_ms = now.saturating_sub(conn.progressed_at);
        if still_ms < limit {
            return;
        }
        let decoding = conn
            .rooms
            .iter()
            .filter(|(side, _)| *side == RoomSide::Decode);
        let rooms: Vec<u64> = decoding.map(|&(_, room)| room).collect();
        tracing::warn!(peer = %conn.peer.addr, still_ms, rooms = rooms.len(), "the peer's engine stands still");
        for room in rooms {
            let reason =
                format!("the prefill rank's engine has made no progress for {still_ms} ms");
            let event = DecodeEvent::PeerStalled { peer, reason };
            self.decode.apply_event(&mut self.ctx, room, event);
        }
    }

    // ---- bootstrap ----

    fn own_registration(&self) -> RankRegistration {
        let config = &self.ctx.config;
        let hello = &self.ctx.identity.hello;
        let host = config.advertise_host.as_ref().unwrap_or(&config.host);
        let ip = host.parse::<std::net::IpAddr>();
        let host = match ip {
            Ok(ip) if ip.is_unspecified() => String::new(),
            _ => host.clone(),
        };
        RankRegistration {
            role: "Prefill".into(),
            attn_tp_size: 1,
            attn_tp_rank: 0,
            attn_dp_size: 1,
            attn_dp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            system_dp_size: config.dp_size,
            system_dp_rank: config.dp_rank,
            rank_ip: host,
            rank_port: self.port,
            instance_id: hello.inc.clone(),
            owner: random_uuid(),
            proto_ver: crate::protocol::VERSION,
            transports: hello.transports.clone(),
            layout_hash: hello.layout_hash.clone(),
            layout: serde_json::to_value(&config.layout).unwrap_or_default(),
            pool_pages: self.ctx.pool.num_pages() as u64,
        }
    }

    fn register_rank(
        &mut self,
        host: String,
        port: u16,
        timeout: Duration,
        reply: std::sync::mpsc::Sender<Result<(), String>>,
    ) {
        let client = self.ctx.bootstrap_client(host, port);
        let registration = self.own_registration();
        let internal = self.ctx.internal.clone();
        tokio::spawn(async move {
            let answer = register_until(&client, &registration, timeout).await;
            let registered = answer.is_ok();
            let _ = reply.send(answer); // the caller gave up
            let registered_as = Box::new((client.clone(), registration.clone()));
            if !registered
                || internal
                    .send(LoopMessage::Registered(registered_as))
                    .is_err()
            {
                return;
            }
            let mut is_known = true;
            loop {
                tokio::time::sleep(REGISTER_AGAIN).await;
                let again = client.register_rank(&registration).await;
                if is_known && let Err(err) = &again {
                    tracing::warn!(%err, "the bootstrap server lost this registration or is down; retrying");
                }
                is_known = again.is_ok();
            }
        });
    }

    async fn unregister_rank(&mut self) {
        if let Some((client, registration)) = self.registered.take() {
            let _ = tokio::time::timeout(UNREGISTER_TIMEOUT, client.unregister_rank(&registration))
                .await; // best effort
        }
    }
}

async fn register_until(
    client: &BootstrapClient,
    registration: &RankRegistration,
    timeout: Duration,
) -> Result<(), String> {
    let deadline = tokio::time::Instant::now() + timeout;
    let mut pause = Duration::from_millis(50);
    loop {
        let err = match client.register_rank(registration).await {
            Ok(()) => return Ok(()),
            Err(err) => err,
        };
        // A conflict may be with dead ranks, whose registration expires.
        let hopeless = matches!(err, HttpError::Untrusted(_))
            || err.status().is_some_and(|status| {
                status.is_client_error() && status != http::StatusCode::CONFLICT
            });
        if hopeless || tokio::time::Instant::now() + pause >= deadline {
            return Err(err.to_string());
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(1));
    }
}
