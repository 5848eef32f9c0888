//! The control loop of a node: takes commands, messages, ends of copies and timers, one at a time, and gives each to the side it is for.
//!
//! The loop owns P's rooms (`prefill_side`), D's rooms (`decode_side`), the communicators and what all of them share (`context`); each of
//! them gets the others as arguments and knows nothing of the loop.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::mpsc;

use super::command::Command;
use super::communicators::Communicators;
use super::config::NodeConfig;
use super::connections::accept::accept_loop;
use super::connections::establish::Heard;
use super::connections::outbox::Outgoing;
use super::context::{Inboxes, Internal, NodeContext, Shared, Timer, uuid};
use super::decode_side::DecodeSide;
use super::prefill_side::{PrefillSide, Question};
use super::records::room_history::Side;
use crate::bootstrap::{Client, HttpError, Registration};
use crate::pool::KvPool;
use crate::protocol::handshake::{Identity, LinkError, Opened};
use crate::protocol::{Channel, MAX_HEARTBEAT_ROOMS, Msg, clipped};
use crate::reason_code::Code;
use crate::state_machine::Peer;
use crate::transport::communicator::CommBackend;
use crate::transport::copy_threads::{Done, Job};
use crate::transport::shm;

/// Control connections; a fleet has fewer ranks.
const MAX_CONNS: usize = 4096;
const MISSED_HEARTBEATS: u64 = 3;
const REGISTER_AGAIN: Duration = Duration::from_secs(5);
const FAREWELL: Duration = Duration::from_millis(500);

/// Where processes of this host get at the pool.
pub struct Local {
    pub listener: UnixListener,
    pub token: [u8; shm::TOKEN_BYTES],
    /// Handle by which a peer opens pages on a device; empty for host memory.
    pub handle: Vec<u8>,
}

pub struct Listeners {
    pub control: TcpListener,
    pub local: Option<Local>,
}

/// Transfer node: the only owner of both sides' rooms, and of what they share.
pub(super) struct ControlLoop {
    ctx: NodeContext,
    prefill: PrefillSide,
    decode: DecodeSide,
    comms: Communicators,
    inboxes: Inboxes,
    port: u16,
    registered: Option<(Client, Registration)>,
}

impl ControlLoop {
    pub fn new(
        config: NodeConfig,
        shared: Arc<Shared>,
        pool: Arc<KvPool>,
        identity: Arc<Identity>,
        port: u16,
        backend: Option<Arc<dyn CommBackend>>,
    ) -> io::Result<Self> {
        let limits = config.limits();
        let comms = Communicators::new(backend, &config, pool.page_bytes());
        let (ctx, inboxes) = NodeContext::start(config, shared, pool, identity)?;
        Ok(Self {
            ctx,
            prefill: PrefillSide::new(&limits),
            decode: DecodeSide::default(),
            comms,
            inboxes,
            port,
            registered: None,
        })
    }

    pub async fn run(mut self, listeners: Listeners, mut commands: mpsc::Receiver<Command>) {
        self.listen(listeners);
        loop {
            let now = self.ctx.now();
            while let Some(timer) = self.ctx.timers.pop_due(now) {
                self.on_timer(timer, now);
                self.settle();
            }
            let next = self.ctx.timers.next();
            let wait = next.map_or(0, |due| due.saturating_sub(self.ctx.now()));
            let wait = Duration::from_millis(wait);
            tokio::select! {
                command = commands.recv() => match command {
                    None | Some(Command::Close) => break,
                    Some(command) => self.on_command(command),
                },
                Some((peer, heard)) = self.inboxes.heard.recv() => self.on_heard(peer, heard),
                Some(message) = self.inboxes.internal.recv() => self.on_internal(message),
                () = tokio::time::sleep(wait), if next.is_some() => {}
            }
            self.settle();
        }
        self.farewell().await;
    }

    /// Carry out what the last step left in the context, then report to the engine.
    fn settle(&mut self) {
        loop {
            let (pulled, lost) = (self.ctx.take_pulled(), self.ctx.take_lost());
            if pulled.is_empty() && lost.is_empty() {
                break;
            }
            for end in pulled {
                self.decode.on_pulled(&mut self.ctx, &mut self.comms, end);
            }
            for (peer, err) in lost {
                self.conn_lost(peer, &err);
            }
        }
        self.publish_gauges();
        self.ctx.flush_events();
    }

    fn listen(&self, listeners: Listeners) {
        let (identity, internal) = (self.ctx.identity.clone(), self.ctx.internal.clone());
        tokio::spawn(async move {
            let err = accept_loop(listeners.control, identity, internal.clone()).await;
            let _ = internal.send(Internal::ListenerDead(err.to_string()));
        });
        if let Some(local) = listeners.local {
            let (pool, internal) = (self.ctx.pool.clone(), self.ctx.internal.clone());
            let failed = internal.clone();
            let failed = move || drop(failed.send(Internal::AcceptFailed));
            tokio::spawn(async move {
                let err = shm::serve(local.listener, pool, local.token, local.handle, failed).await;
                let _ = internal.send(Internal::ListenerDead(format!("shm: {err}")));
            });
        }
    }

    fn publish_gauges(&self) {
        let mut gauges = self.ctx.shared.gauges.lock();
        gauges.parked = self.prefill.num_parked();
        gauges.pulls_in_flight = self.decode.num_pulls();
        gauges.draining = self.prefill.is_draining;
        gauges.comms = self.comms.by_state();
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Offer {
                room,
                attempt,
                prompt_hash,
                deadline_ms,
            } => self
                .prefill
                .offer(&mut self.ctx, room, attempt, prompt_hash, deadline_ms),
            Command::Publish { room, first, pages } => {
                self.prefill.publish(&mut self.ctx, room, first, pages)
            }
            Command::Finish { room, finish } => self.prefill.finish(&mut self.ctx, room, finish),
            Command::Open { room, request } => {
                self.decode
                    .open(&mut self.ctx, &mut self.comms, room, request);
            }
            Command::Grant {
                room,
                start_page,
                pages,
            } => self
                .decode
                .grant(&mut self.ctx, &mut self.comms, room, start_page, pages),
            Command::Revoke { room } => self.decode.revoke(&mut self.ctx, &mut self.comms, room),
            Command::Abort { room, code } => self.abort(room, code),
            Command::Register {
                host,
                port,
                timeout,
                reply,
            } => self.register(host, port, timeout, reply),
            Command::Drain => self.prefill.is_draining = true,
            Command::Close => {}
            #[cfg(test)]
            Command::Panic => panic!("asked to, by a test"),
        }
    }

    fn abort(&mut self, room: u64, code: Code) {
        let is_decoding = self.decode.has(room);
        if is_decoding {
            self.decode
                .abort(&mut self.ctx, &mut self.comms, room, code);
        }
        if !is_decoding || self.prefill.has(room) {
            self.prefill.abort(&mut self.ctx, room, code);
        }
    }

    fn on_internal(&mut self, message: Internal) {
        match message {
            Internal::Accepted(stream, opened) => self.accepted(stream, *opened),
            Internal::HelloRefused(code) => self.ctx.count_refused_hello(code),
            Internal::HelloEvicted => self.ctx.shared.stats.lock().hellos_evicted += 1,
            Internal::Linked(key, result) => {
                self.decode
                    .on_linked(&mut self.ctx, &mut self.comms, key, *result)
            }
            Internal::OpenWaiting(key, peer) => {
                self.decode
                    .open_waiting(&mut self.ctx, &mut self.comms, &key, peer)
            }
            Internal::Sized { room, size } => {
                self.decode
                    .on_sized(&mut self.ctx, &mut self.comms, room, size)
            }
            Internal::Copied(Done::Hashed { room, sums }) => {
                self.prefill.on_hashed(&mut self.ctx, room, sums)
            }
            Internal::Copied(Done::Pulled(end)) | Internal::Pulled(end) => {
                self.decode.on_pulled(&mut self.ctx, &mut self.comms, end)
            }
            Internal::Copied(Done::Closed) => {}
            Internal::Copied(Done::Broken { what, room }) => {
                self.ctx.shared.sicken(what);
                if let Some(room) = room {
                    self.prefill
                        .abort(&mut self.ctx, room, Code::TransportBroken);
                }
            }
            Internal::Comm(key, report) => self.comms.on_report(&mut self.ctx, key, report),
            Internal::Registered(known) => self.registered = Some(*known),
            Internal::DataThreadDead(why) => {
                self.ctx.shared.sicken(format!("data thread: {why}"));
                self.decode
                    .on_data_thread_died(&mut self.ctx, &mut self.comms);
            }
            Internal::AcceptFailed => self.ctx.shared.stats.lock().accept_errors += 1,
            Internal::ListenerDead(why) => self.ctx.shared.sicken(format!("listener: {why}")),
        }
    }

    fn on_timer(&mut self, timer: Timer, now: u64) {
        match timer {
            Timer::Prefill(room) => self.prefill.tick(&mut self.ctx, room),
            Timer::Decode(room) => self.decode.tick(&mut self.ctx, &mut self.comms, room),
            Timer::Parked => self.prefill.expire_parked(&mut self.ctx, now),
            Timer::Heartbeat(peer) => self.heartbeat(peer, now),
            Timer::Link(key) => self.decode.retry_link(&mut self.ctx, &key),
            Timer::Size(room) => self.decode.ask_size(&mut self.ctx, room),
            Timer::Comm(key) => self.comms.tick(&mut self.ctx, key),
        }
    }

    // ---- connections ----

    fn accepted(&mut self, stream: TcpStream, opened: Opened) {
        if opened.peer.channel == Channel::Data {
            let inc = &opened.peer.inc;
            if !self.ctx.conns.values().any(|conn| conn.peer.inc == *inc) {
                tracing::warn!(peer = %opened.peer.addr, "a data stream of a peer without a control connection is refused");
                return self.ctx.count_refused_hello(Code::TransportBroken);
            }
            match stream.into_std() {
                Ok(stream) => self.ctx.data.serve(stream, opened),
                Err(err) => {
                    tracing::warn!(%err, "a data stream could not be handed to the data thread")
                }
            }
            return;
        }
        if self.ctx.conns.len() >= MAX_CONNS {
            tracing::warn!("{MAX_CONNS} peers are connected: another one is turned away");
            return;
        }
        let Ok(addr) = stream.peer_addr() else { return }; // gone already
        // The decode rank chooses the transport.
        self.ctx.add_conn(stream, addr, opened, None, None, "");
    }

    fn on_heard(&mut self, peer: Peer, heard: Heard) {
        match heard {
            Heard::Down(err) => self.conn_lost(peer, &err),
            Heard::Msg(msg, _space) => {
                let now = self.ctx.now();
                let Some(conn) = self.ctx.conns.get_mut(&peer) else {
                    return;
                }; // read before the cut
                conn.last_seen = now;
                self.on_msg(peer, *msg);
            }
        }
    }

    fn on_msg(&mut self, peer: Peer, msg: Msg) {
        match msg {
            Msg::Open {
                room,
                attempt,
                p_inc_expected,
                layout_hash,
                prompt_hash,
                start_page,
                deadline_ms,
                ..
            } => {
                let question = Question {
                    room,
                    attempt,
                    prompt_hash,
                    start_page,
                    deadline_ms,
                };
                self.prefill
                    .on_open(&mut self.ctx, peer, question, &p_inc_expected, &layout_hash);
            }
            Msg::Done { room, attempt, .. } => {
                self.prefill.on_done(&mut self.ctx, peer, room, attempt)
            }
            Msg::Abort {
                room,
                attempt,
                code,
            } => {
                self.prefill
                    .on_peer_abort(&mut self.ctx, peer, room, attempt, code);
                self.decode.on_peer_abort(
                    &mut self.ctx,
                    &mut self.comms,
                    peer,
                    room,
                    attempt,
                    code,
                );
            }
            Msg::AbortAck { .. } => {} // aborts need no answer
            Msg::Heartbeat {
                rooms,
                progress,
                busy,
                ..
            } => {
                self.prefill.renew(&mut self.ctx, peer, &rooms);
                self.watch_progress(peer, progress, busy);
            }
            Msg::Reject {
                code,
                message,
                connection: true,
                ..
            } => self.conn_lost(peer, &LinkError::new(code, message)),
            Msg::OpenOk { .. }
            | Msg::Parked { .. }
            | Msg::Reject { .. }
            | Msg::Progress { .. }
            | Msg::Final { .. } => self
                .decode
                .on_answer(&mut self.ctx, &mut self.comms, peer, msg),
            Msg::CommOpen { .. }
            | Msg::CommId { .. }
            | Msg::CommEnd { .. }
            | Msg::SlabRead { .. }
            | Msg::SlabSend { .. }
            | Msg::SlabStale { .. } => self.comms.on_message(&mut self.ctx, peer, msg),
            Msg::Challenge { .. }
            | Msg::Hello(_)
            | Msg::Read { .. }
            | Msg::Data { .. }
            | Msg::DataEnd { .. }
            | Msg::Stale { .. } => {
                let err = LinkError::new(
                    Code::TransportBroken,
                    format!("{} on a control connection", msg.name()),
                );
                self.conn_lost(peer, &err);
            }
        }
    }

    /// Every room of the connection learns it; the next room with this peer starts from GET /route.
    pub fn conn_lost(&mut self, peer: Peer, err: &LinkError) {
        let Some(conn) = self.ctx.conns.remove(&peer) else {
            return;
        };
        tracing::warn!(peer = %conn.peer.addr, incarnation = %conn.peer.inc, code = %err.code, why = %err.why, rooms = conn.rooms.len(), "link lost");
        if matches!(err.code, Code::Auth | Code::TransportBroken) {
            // Tell the other side why, after what is queued. It may be gone.
            let refusal = Msg::Reject {
                room: 0,
                attempt: 0,
                code: err.code,
                message: clipped(&err.why),
                retry_after_ms: 0,
                connection: true,
            };
            let _ = conn.running.outbox.put(Outgoing {
                msg: refusal,
                flip: false,
            });
            conn.running.stop_reading();
        } else {
            conn.running.cut();
        }
        {
            let mut stats = self.ctx.shared.stats.lock();
            stats.links_lost += 1;
            stats.bad_frames += u64::from(matches!(err.code, Code::Auth | Code::TransportBroken));
        }
        self.ctx.shared.gauges.lock().peers.remove(&peer);
        self.ctx.timers.set(&Timer::Heartbeat(peer), None);
        self.prefill.forget_opens_of(peer);
        if let Some(key) = &conn.key {
            self.decode.link_down(&mut self.ctx, key);
        }
        for (side, room) in conn.rooms {
            match side {
                Side::Prefill => self
                    .prefill
                    .on_peer_gone(&mut self.ctx, peer, room, err.code),
                Side::Decode => {
                    self.decode
                        .on_peer_gone(&mut self.ctx, &mut self.comms, peer, room, err.code)
                }
            }
        }
        // After the rooms: they end because the peer is gone, not because of its communicator.
        self.comms.on_peer_gone(&mut self.ctx, peer, &err.why);
        if let Some(remote) = conn.remote.filter(|remote| remote.device().is_some()) {
            self.ctx.copier.submit(Job::Close(remote));
        }
    }

    fn heartbeat(&mut self, peer: Peer, now: u64) {
        let every = self.ctx.config.heartbeat_ms;
        let Some(conn) = self.ctx.conns.get_mut(&peer) else {
            return;
        };
        if now.saturating_sub(conn.last_beat) > 2 * every {
            conn.last_seen = now; // we slept (a stopped process, a stalled host): the peer's beats may still be in the socket
        }
        conn.last_beat = now;
        if conn.key.is_none() && conn.running.outbox.backlog.is_full() {
            conn.last_seen = now; // its beats are not read now; the writing task cuts a peer that takes no byte
        }
        if now.saturating_sub(conn.last_seen) >= MISSED_HEARTBEATS * every {
            let why = format!(
                "no word for {} ms ({MISSED_HEARTBEATS} heartbeats)",
                now.saturating_sub(conn.last_seen)
            );
            return self.conn_lost(peer, &LinkError::new(Code::PeerDead, why));
        }
        conn.seq += 1;
        let rooms: Vec<u64> = conn.rooms.iter().map(|&(_, room)| room).collect();
        let seq = conn.seq;
        let backlog = self.decode.queued_pages(peer) * self.ctx.pool.page_bytes() as u64;
        let progress = self.ctx.shared.progress.load(Ordering::Relaxed);
        let busy = self.prefill.is_computing();
        self.ctx
            .timers
            .set(&Timer::Heartbeat(peer), Some(now + every));
        let mut lists = rooms.chunks(MAX_HEARTBEAT_ROOMS);
        let mut rooms = lists.next().unwrap_or_default().to_vec();
        loop {
            let beat = Msg::Heartbeat {
                inc: self.ctx.identity.hello.inc.clone(),
                seq,
                rooms,
                pull_backlog_bytes: backlog,
                progress,
                busy,
            };
            self.ctx.send(peer, beat);
            let Some(more) = lists.next() else { break };
            rooms = more.to_vec();
        }
    }

    /// D: fail the rooms of a prefill rank whose engine claims work and does none, although its transfer runtime lives.
    fn watch_progress(&mut self, peer: Peer, progress: u64, busy: bool) {
        let (now, limit) = (self.ctx.now(), self.ctx.config.stall_ms);
        let Some(conn) = self.ctx.conns.get_mut(&peer) else {
            return;
        };
        if !busy || progress != conn.progress {
            (conn.progress, conn.progressed_at) = (progress, now);
        }
        let still_ms = now.saturating_sub(conn.progressed_at);
        if still_ms < limit {
            return;
        }
        let rooms: Vec<u64> = conn
            .rooms
            .iter()
            .filter(|(side, _)| *side == Side::Decode)
            .map(|&(_, room)| room)
            .collect();
        tracing::warn!(peer = %conn.peer.addr, still_ms, rooms = rooms.len(), "the peer's engine stands still");
        for room in rooms {
            self.decode
                .on_peer_stalled(&mut self.ctx, &mut self.comms, peer, room, still_ms);
        }
    }

    // ---- bootstrap ----

    fn registration(&self) -> Registration {
        let host = self
            .ctx
            .config
            .advertise_host
            .as_ref()
            .unwrap_or(&self.ctx.config.host);
        let unspecified = host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_unspecified());
        Registration {
            role: "Prefill".into(),
            attn_tp_size: 1,
            attn_tp_rank: 0,
            attn_dp_size: 1,
            attn_dp_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            system_dp_size: self.ctx.config.dp_size,
            system_dp_rank: self.ctx.config.dp_rank,
            rank_ip: if unspecified {
                String::new()
            } else {
                host.clone()
            },
            rank_port: self.port,
            instance_id: self.ctx.identity.hello.inc.clone(),
            owner: uuid(),
            proto_ver: crate::protocol::VERSION,
            transports: self.ctx.identity.hello.transports.clone(),
            layout_hash: self.ctx.identity.hello.layout_hash.clone(),
            layout: serde_json::to_value(&self.ctx.config.layout).unwrap_or_default(),
            pool_pages: self.ctx.pool.num_pages() as u64,
        }
    }

    fn register(
        &mut self,
        host: String,
        port: u16,
        timeout: Duration,
        reply: std::sync::mpsc::Sender<Result<(), String>>,
    ) {
        let client = self.ctx.bootstrap_client(host, port);
        let registration = self.registration();
        let internal = self.ctx.internal.clone();
        tokio::spawn(async move {
            let answer = register_until(&client, &registration, timeout).await;
            let registered = answer.is_ok();
            let _ = reply.send(answer); // the caller gave up
            if !registered
                || internal
                    .send(Internal::Registered(Box::new((
                        client.clone(),
                        registration.clone(),
                    ))))
                    .is_err()
            {
                return;
            }
            let mut known = true;
            loop {
                tokio::time::sleep(REGISTER_AGAIN).await;
                let again = client.register(&registration).await;
                if known && let Err(err) = &again {
                    tracing::warn!(%err, "the bootstrap server forgot us or is down; trying on");
                }
                known = again.is_ok();
            }
        });
    }

    async fn farewell(&mut self) {
        if let Some((client, registration)) = self.registered.take() {
            let _ = tokio::time::timeout(FAREWELL, client.unregister(&registration)).await; // best effort
        }
    }
}

async fn register_until(
    client: &Client,
    registration: &Registration,
    timeout: Duration,
) -> Result<(), String> {
    let deadline = tokio::time::Instant::now() + timeout;
    let mut pause = Duration::from_millis(50);
    loop {
        let err = match client.register(registration).await {
            Ok(()) => return Ok(()),
            Err(err) => err,
        };
        // A conflict may be with ranks that are gone, whose registration ends.
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
