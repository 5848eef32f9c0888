//! Limits of a node on connections to it: unknown peers, former peers, and peers that request too
//! much.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::sync::LazyLock;

use common::*;
use kv_transfer::bootstrap::BootstrapClient;
use kv_transfer::protocol::handshake::{Identity, OpenedConnection, read_frame};
use kv_transfer::protocol::{
    Channel, GroupId, GroupStart, Handshake, Hello, MAX_DECODE_FRAME_BYTES, MAX_FRAME_BYTES,
    MIN_VERSION, Msg, OpenMessage, PageLayout, VERSION,
};
use kv_transfer::{BootstrapServer, NodeEvent, ReasonCode};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

/// Start of an OPEN that asks for the whole prompt.
const ALL_PAGES: GroupStart = GroupStart {
    group: GROUP,
    start_page: 0,
};

fn identity(inc: &str, key: Option<&str>) -> Identity {
    Identity {
        cluster_keys: key.map(Into::into),
        hello: Hello {
            ver: VERSION,
            min_ver: MIN_VERSION,
            channel: Channel::Control,
            nonce: vec![],
            inc: inc.into(),
            expected_inc: None,
            addr: "stranger:1".into(),
            boot_id: String::new(),
            network_namespace: String::new(),
            transports: vec!["tcp".into()],
            layout_hash: String::new(),
            layout: PageLayout::default(),
            num_pages: 1,
            page_bytes: PAGE as u64,
            sums: "xxh3".into(),
            shm_socket: String::new(),
            shm_token: vec![],
        },
    }
}

/// Nodes must not be closed inside a runtime, so tests enter it for single steps.
fn block<T>(step: impl Future<Output = T>) -> T {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().unwrap()
    });
    let bounded = async { tokio::time::timeout(TIMEOUT, step).await };
    RUNTIME.block_on(bounded).expect("an answer in time")
}

fn connect(rank: &Rank) -> TcpStream {
    block(TcpStream::connect(("127.0.0.1", rank.node.port()))).unwrap()
}

fn frame(stream: &mut TcpStream) -> Vec<u8> {
    block(read_frame(stream, MAX_FRAME_BYTES)).unwrap()
}

/// Waits until the rank has closed or reset the connection.
fn closed(stream: &mut TcpStream) {
    let _ = block(stream.read_to_end(&mut Vec::new()));
}

/// An open connection to a rank.
struct Visitor {
    stream: TcpStream,
    opened: OpenedConnection,
}

impl Visitor {
    fn new(rank: &Rank, inc: &str, channel: Channel) -> Self {
        let mut stream = connect(rank);
        let opened =
            block(identity(inc, None).initiate_connection(&mut stream, channel, None)).unwrap();
        Self { stream, opened }
    }

    fn send(&mut self, msg: &Msg) {
        let frame = self.opened.sealer.seal(msg);
        block(self.stream.write_all(&frame)).unwrap();
    }

    fn answer(&mut self) -> Msg {
        let frame = frame(&mut self.stream);
        self.opened.opener.open(&frame).unwrap()
    }

    /// The first answer for which `is_wanted`.
    fn answer_until(&mut self, is_wanted: impl Fn(&Msg) -> bool) -> Msg {
        loop {
            let msg = self.answer();
            if is_wanted(&msg) {
                return msg;
            }
        }
    }

    fn read(&mut self, ids: &[u32], generation: u64) {
        self.read_group(GROUP, ids, generation);
    }

    fn read_group(&mut self, group: GroupId, ids: &[u32], generation: u64) {
        let (ids, gens) = (ids.to_vec(), vec![generation; ids.len()]);
        self.send(&Msg::Read {
            ticket: 1,
            group,
            ids,
            gens,
        });
    }

    fn closed(&mut self) {
        closed(&mut self.stream);
    }
}

#[test]
fn page_is_read_only_by_the_decode_rank_it_was_announced_to() {
    let pair = Pair::new("tcp");
    let (src, dst) = (span(0, 4), span(100, 4));
    pair.open(1);
    pair.grant(1, &dst);
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    pair.p.publish(1, &src, 4);
    until("the pages are announced and pulled", || {
        pair.d.holds(&dst, 1, 0)
    });
    let _control = Visitor::new(&pair.p, "stranger", Channel::Control);
    let mut data = Visitor::new(&pair.p, "stranger", Channel::Data);
    data.read(&src[1..2], pair.p.pool.generation(1));
    let refused = Msg::Stale {
        ticket: 1,
        page: 1,
        code: Some(ReasonCode::LeaseExpired),
    };
    assert_eq!(data.answer(), refused);
    assert_eq!(counter(&pair.p, "kv_reads_refused_total"), 1.0);
    pair.p.finish(1, src.len());
    assert_eq!(pair.d.end_code(1), "COMMITTED");
    assert_eq!(pair.p.end_code(1), "DONE");
}

/// A peer with a control connection and a data stream, whose OPEN of `room` the rank has accepted.
fn reader(p: &Rank, inc: &str, room: u64) -> (Visitor, Visitor) {
    let mut control = Visitor::new(p, inc, Channel::Control);
    control.send(&Msg::Open(OpenMessage {
        room,
        attempt: 0,
        d_inc: inc.into(),
        p_inc_expected: p.node.incarnation().into(),
        layout_hash: control.opened.peer.layout_hash.clone(),
        prompt_hash: HASH.to_vec(),
        groups: vec![ALL_PAGES],
        deadline_ms: DEADLINE_MS,
        prio: 0,
    }));
    control.answer_until(|msg| matches!(msg, Msg::Progress { .. }));
    (control, Visitor::new(p, inc, Channel::Data))
}

#[test]
fn request_for_pages_of_another_group_ends_its_connection() {
    let p = Rank::start("prefill", &json!({"transports": ["tcp"]}));
    p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    p.publish(1, &[1], 1);
    let (mut control, mut data) = reader(&p, "d", 1);
    data.read_group(GROUP + 1, &[1], p.pool.generation(1));
    data.closed();
    assert_eq!(counter(&p, "kv_bad_frames_total"), 1.0);
    control.send(&Msg::SlabRead {
        comm: 1,
        ticket: 7,
        group: GROUP + 1,
        ids: vec![1],
        gens: vec![p.pool.generation(1)],
    });
    match control.answer_until(|msg| matches!(msg, Msg::Reject { .. })) {
        Msg::Reject {
            message,
            connection: true,
            ..
        } => assert_eq!(message, "SLAB_READ names page group 3, but there are [2]"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn open_for_other_groups_than_those_of_the_layout_is_refused_with_the_group() {
    let p = Rank::start("prefill", &json!({"layout": two_groups()}));
    p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    let mut control = Visitor::new(&p, "d", Channel::Control);
    let start_of = |group| GroupStart { group, ..ALL_PAGES };
    for (groups, difference) in [
        (vec![ALL_PAGES], "page group 5 of [2, 5] is missing"),
        (
            vec![ALL_PAGES, start_of(WINDOW), ALL_PAGES],
            "page group 2 is named twice",
        ),
        (
            vec![ALL_PAGES, start_of(WINDOW), start_of(7)],
            "page group 7, but there are [2, 5]",
        ),
    ] {
        control.send(&Msg::Open(OpenMessage {
            room: 1,
            attempt: 0,
            d_inc: "d".into(),
            p_inc_expected: p.node.incarnation().into(),
            layout_hash: control.opened.peer.layout_hash.clone(),
            prompt_hash: HASH.to_vec(),
            groups,
            deadline_ms: DEADLINE_MS,
            prio: 0,
        }));
        match control.answer_until(|msg| matches!(msg, Msg::Reject { .. })) {
            Msg::Reject { code, message, .. } => {
                assert_eq!(code, ReasonCode::LayoutMismatch);
                assert!(message.ends_with(difference), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn read_of_more_than_8_mib_ends_its_stream() {
    let p = Rank::start("prefill", &json!({"transports": ["tcp"]}));
    let _control = Visitor::new(&p, "stranger", Channel::Control);
    let mut data = Visitor::new(&p, "stranger", Channel::Data);
    let most = span(0, 8 * 1024 * 1024 / PAGE as u32);
    data.read(&most, 2);
    assert!(matches!(data.answer(), Msg::Stale { .. }));
    assert_eq!(counter(&p, "kv_bad_frames_total"), 0.0);
    data.read(&[most, vec![0]].concat(), 2);
    data.closed();
    assert_eq!(counter(&p, "kv_bad_frames_total"), 1.0);
}

#[test]
fn page_is_readable_in_a_room_of_the_reader_until_the_lease_ends() {
    let p = Rank::start(
        "prefill",
        &json!({"heartbeat_ms": 60_000, "lease_ms": 1500}),
    );
    for room in [1, 2] {
        p.node.offer_room(room, 0, HASH, DEADLINE_MS).unwrap();
        p.publish(room, &[room as u32], 1);
    }
    let (mut control, mut data) = reader(&p, "d", 1);
    let (_other_control, mut other) = reader(&p, "other", 2);
    let refused = |page| Msg::Stale {
        ticket: 1,
        page,
        code: Some(ReasonCode::LeaseExpired),
    };
    other.read(&[1], p.pool.generation(1));
    assert_eq!(other.answer(), refused(1), "the page is of another room");
    data.read(&[1, 2], p.pool.generation(1));
    assert_eq!(data.answer(), refused(2), "one of the pages is");
    data.read(&[1], p.pool.generation(1));
    assert!(matches!(data.answer(), Msg::Data { pages: 1, .. }));
    block(data.stream.read_exact(&mut vec![0; PAGE])).unwrap();
    assert!(matches!(data.answer(), Msg::DataEnd { stale: None, .. }));

    p.finish(1, 1);
    assert_eq!(p.end_code(1), "LEASE_EXPIRED");
    data.read(&[1], p.pool.generation(1));
    assert_eq!(data.answer(), refused(1), "its lease is over");
    control.send(&Msg::SlabRead {
        comm: 1,
        ticket: 7,
        group: GROUP,
        ids: vec![1],
        gens: vec![p.pool.generation(1)],
    });
    let answer = control.answer_until(|msg| matches!(msg, Msg::SlabStale { .. }));
    let (comm, ticket, page, code) = (1, 7, 1, Some(ReasonCode::LeaseExpired));
    assert_eq!(
        answer,
        Msg::SlabStale {
            comm,
            ticket,
            page,
            code
        }
    );
    assert_eq!(counter(&p, "kv_reads_refused_total"), 4.0);
}

#[test]
fn data_streams_belong_to_a_peer_are_few_and_end_when_silent() {
    let patient = json!({"heartbeat_ms": 60_000});
    let p = Rank::start("prefill", &patient);
    Visitor::new(&p, "d", Channel::Data).closed();
    let refused = r#"kv_hellos_refused_total{code="TRANSPORT_BROKEN"}"#;
    assert_eq!(counter(&p, refused), 1.0, "no control connection");

    let _control = Visitor::new(&p, "d", Channel::Control);
    let mut streams = Vec::new();
    for _ in 0..17 {
        streams.push(Visitor::new(&p, "d", Channel::Data));
    }
    streams[0].closed();
    let last = &mut streams[16];
    last.read(&[1], 2);
    assert!(matches!(last.answer(), Msg::Stale { .. }));
    last.read(&span(0, 600), 2);
    last.closed(); // more bytes than one answer may have
    until("it is counted", || {
        counter(&p, "kv_bad_frames_total") == 1.0
    });

    let hasty = json!({"heartbeat_ms": 60_000, "data_idle_ms": 50});
    let p = Rank::start("prefill", &hasty);
    let _control = Visitor::new(&p, "d", Channel::Control);
    Visitor::new(&p, "d", Channel::Data).closed();
}

#[test]
fn recorded_hello_is_refused() {
    let p = Rank::start("prefill", &json!({"cluster_key": "secret"}));
    let mut first = connect(&p);
    let challenge = frame(&mut first);
    let Ok(Msg::Challenge { nonce }) = Handshake::open_plain(&challenge) else {
        panic!("no challenge");
    };
    let hello = Msg::Hello(Hello {
        nonce: vec![7; 16],
        ..identity("d", None).hello
    });
    let recorded = Handshake::new(Some(b"secret")).seal_hello(&hello, &nonce);
    block(first.write_all(&recorded)).unwrap();
    let answer = frame(&mut first);
    let answer = Handshake::new(Some(b"secret")).open_hello(&answer, &[7; 16]);
    assert!(matches!(answer, Ok(Msg::Hello(_))), "{answer:?}");

    let mut second = connect(&p);
    let _other_challenge = frame(&mut second);
    block(second.write_all(&recorded)).unwrap();
    let answer = frame(&mut second);
    match Handshake::open_plain(&answer) {
        Ok(Msg::Reject { code, .. }) => assert_eq!(code, ReasonCode::Auth),
        other => panic!("{other:?}"),
    }
    until("the refusal is counted", || {
        counter(&p, r#"kv_hellos_refused_total{code="AUTH"}"#) > 0.0
    });
}

#[test]
fn silent_connections_do_not_block_a_pair() {
    let pair = Pair::new("tcp");
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(connect(&pair.p));
    }
    pair.transfer_room(1);
    until("silent connections made space", || {
        counter(&pair.p, "kv_hellos_evicted_total") > 0.0
    });
    // A length that no HELLO has is refused before its bytes are awaited.
    let mut loud = connect(&pair.p);
    block(loud.write_all(&u32::to_le_bytes(1 << 20))).unwrap();
    closed(&mut loud);
    // Nor is one that no message of a decode rank has.
    let mut loud = Visitor::new(&pair.p, "loud", Channel::Control);
    let length = MAX_DECODE_FRAME_BYTES as u32 + 1;
    block(loud.stream.write_all(&length.to_le_bytes())).unwrap();
    loud.closed();
    assert_eq!(counter(&pair.p, "kv_bad_frames_total"), 1.0);
    assert_eq!(counter(&pair.p, "kv_links_lost_total"), 1.0);
    let outbox = pair.p.stats()["gauges"]["kv_outbox_bytes"].clone();
    assert!(outbox.is_number(), "{outbox}");
    pair.assert_idle();
}

/// Register a prefill rank by hand, with these fields beside its address.
fn register(server: &BootstrapServer, key: Option<&str>, p: &Rank, more: &Value) {
    let client = BootstrapClient {
        host: "127.0.0.1".into(),
        port: server.port(),
        cluster_keys: key.map(Into::into),
        loopback_only: false,
        timeout: TIMEOUT,
    };
    let mut route = json!({
        "role": "Prefill", "rank_ip": "127.0.0.1", "rank_port": p.node.port(), "instance_id": p.node.incarnation(),
    });
    let fields = more.as_object().unwrap().clone();
    route.as_object_mut().unwrap().extend(fields);
    block(client.register_rank(&serde_json::from_value(route).unwrap())).unwrap();
}

#[test]
fn rank_of_another_cluster_key_is_refused() {
    let server = BootstrapServer::start("127.0.0.1", 0, Some("ours".into())).unwrap();
    let p = Rank::start("prefill", &json!({"cluster_key": "theirs"}));
    register(&server, Some("ours"), &p, &json!({}));
    let d = Rank::start("decode", &json!({"cluster_key": "ours"}));
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    assert_eq!(d.end_code(1), "AUTH");
}

#[test]
fn rank_of_protocol_version_2_is_refused_with_both_versions() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    let p = Rank::start("prefill", &json!({}));
    register(&server, None, &p, &json!({"proto_ver": 2}));
    let d = Rank::start("decode", &json!({}));
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    match d.end(1) {
        NodeEvent::Failed { code, message, .. } => {
            assert_eq!(code, ReasonCode::LayoutMismatch);
            let both = "the prefill rank speaks protocol version 2, this node protocol version 3";
            assert!(message.contains(both), "{message}");
        }
        end => panic!("{end:?}"),
    }
}

#[test]
fn one_peer_cannot_fill_the_table_of_pending_opens() {
    let p = json!({"heartbeat_ms": 60_000, "max_rooms": 8});
    let pair = Pair::with(&p, &json!({}));
    let mut greedy = Visitor::new(&pair.p, "greedy", Channel::Control);
    let mut room = 1000;
    let refusal = loop {
        room += 1;
        greedy.send(&Msg::Open(OpenMessage {
            room,
            attempt: 0,
            d_inc: "greedy".into(),
            p_inc_expected: pair.p.node.incarnation().into(),
            layout_hash: greedy.opened.peer.layout_hash.clone(),
            prompt_hash: vec![],
            groups: vec![ALL_PAGES],
            deadline_ms: 60_000,
            prio: 0,
        }));
        match greedy.answer() {
            Msg::OpenPending { .. } => {}
            Msg::Reject { code, .. } => break code,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal, ReasonCode::NoCapacity);
    assert_eq!(
        counter(&pair.p, r#"kv_rejects_total{code="NO_CAPACITY"}"#),
        1.0
    );
    let before = pair.p.detail("opens_waiting").as_u64();
    pair.open(1);
    until("the other peer's OPEN waits", || {
        pair.p.detail("opens_waiting").as_u64() > before
    });
}
