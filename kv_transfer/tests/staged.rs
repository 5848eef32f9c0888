//! The staged transport between two nodes: communicators that open, fail, hang and make place, and
//! what becomes of the rooms.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::pipes::Pipes;
use common::*;
use kv_transfer::{BootstrapServer, KvPool, NodeError, NodeEvent, TransferNode};
use serde_json::{Value, json};

/// Both transports, with short waits.
fn staged(extra: &Value) -> Value {
    let mut config = json!({
        "transports": ["gloo", "tcp"], "slabs": 2, "slab_bytes": 8 * PAGE,
        "comm_open_ms": 3000, "comm_op_ms": 2000, "comm_abort_ms": 500,
    });
    config
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    config
}

fn fault(on: &str, what: &Value) -> Value {
    staged(&json!({"fault": {"rules": [{"on": on, "do": what}]}}))
}

/// A room of 40 pages; the transport of its last pull.
fn transfer_room(pair: &Pair, room: u64) -> &'static str {
    let (src, dst) = (span(0, 40), span(100, 40));
    pair.open(room);
    pair.grant(room, &dst);
    pair.p.prefill(room, &src, 16);
    let transport = match pair.d.end(room) {
        NodeEvent::Committed { stats, .. } => stats.transport,
        other => panic!("{other:?}"),
    };
    assert_eq!(pair.p.end_code(room), "DONE");
    assert!(pair.d.holds(&dst, room, 0));
    transport
}

fn communicators(rank: &Rank, state: &str) -> f64 {
    rank.stats()["gauges"][format!("kv_communicators{{state=\"{state}\"}}")]
        .as_f64()
        .unwrap()
}

fn ended(rank: &Rank, end: &str) -> f64 {
    rank.stats()["counters"][format!("kv_communicators_ended_total{{end=\"{end}\"}}")]
        .as_f64()
        .unwrap()
}

fn assert_all_gone(rank: &Rank) {
    for state in ["opening", "open", "aborting", "abandoned"] {
        until(&format!("none is {state}"), || {
            communicators(rank, state) == 0.0
        });
    }
}

#[test]
fn one_communicator_serves_the_rooms_of_a_pair() {
    let pair = Pair::with(&staged(&json!({})), &staged(&json!({})));
    for room in 1..=5 {
        assert_eq!(transfer_room(&pair, room), "gloo");
    }
    assert_eq!(pair.d.pipes.opened.load(Ordering::Relaxed), 1);
    assert_eq!(
        (
            communicators(&pair.d, "open"),
            communicators(&pair.p, "open")
        ),
        (1.0, 1.0)
    );
    assert_eq!(ended(&pair.d, "failed"), 0.0);
    pair.assert_idle();
}

#[test]
fn lost_message_costs_the_communicator_and_not_the_room() {
    for (message, at_p) in [
        ("COMM_OPEN", false),
        ("COMM_ID", true),
        ("SLAB_READ", false),
        ("SLAB_SEND", true), // P posts its send, D never posts the receive
    ] {
        let (faulty, sound) = (fault(message, &json!("drop")), staged(&json!({})));
        let pair = if at_p {
            Pair::with(&faulty, &sound)
        } else {
            Pair::with(&sound, &faulty)
        };
        assert_eq!(transfer_room(&pair, 1), "tcp", "{message} lost");
        assert_eq!(
            transfer_room(&pair, 2),
            "tcp",
            "{message}: the breaker is open"
        );
        assert_eq!(ended(&pair.d, "failed"), 1.0, "{message}");
        assert_eq!(
            pair.d.stats()["counters"]["kv_transport_fallbacks_total"],
            1.0,
            "{message}"
        );
        assert_all_gone(&pair.d);
        assert_all_gone(&pair.p);
        pair.assert_idle();
    }
}

#[test]
fn doubled_message_is_ignored_or_costs_the_communicator() {
    for (message, at_p, by) in [
        ("COMM_OPEN", false, "gloo"),
        ("COMM_ID", true, "gloo"),
        ("SLAB_READ", false, "tcp"),
        ("SLAB_SEND", true, "tcp"),
    ] {
        let (faulty, sound) = (fault(message, &json!("dup")), staged(&json!({})));
        let pair = if at_p {
            Pair::with(&faulty, &sound)
        } else {
            Pair::with(&sound, &faulty)
        };
        assert_eq!(transfer_room(&pair, 1), by, "{message} doubled");
        pair.assert_idle();
    }
}

#[test]
fn prefill_node_that_dies_in_a_send_ends_the_room_without_leaks() {
    // its connection is cut while its send is posted
    let dying = fault("SLAB_SEND", &json!("kill"));
    let pair = Pair::with(&dying, &staged(&json!({})));
    pair.open(1);
    pair.grant(1, &span(100, 40));
    pair.p.prefill(1, &span(0, 40), 40);
    assert_eq!(pair.d.end_code(1), "PEER_DEAD");
    assert_all_gone(&pair.d);
    assert_all_gone(&pair.p);
    pair.p.node.abort_room(1, "CLIENT_GONE").unwrap();
    assert_eq!(pair.p.end_code(1), "CLIENT_GONE");
    assert_eq!(
        transfer_room(&pair, 2),
        "gloo",
        "a new connection has a new communicator"
    );
    pair.assert_idle();
}

#[test]
fn page_given_away_between_its_two_looks_is_stale_and_spoils_no_other_room() {
    let hold = Hold::new();
    let patient = staged(&json!({"comm_op_ms": 30_000}));
    let mut held = patient.clone();
    held["fault"] = json!({"rules": [{"on": "COPIED", "do": hold.rule()}]});
    let pair = Pair::with(&held, &patient);
    pair.open(1);
    pair.grant(1, &span(100, 1));
    pair.p.prefill(1, &span(0, 1), 1);
    hold.wait_until_reached();
    pair.p.pool.begin_write(&[0]); // its bytes are still the right ones: only the generation tells
    hold.release();
    assert_eq!(
        (pair.d.end_code(1), pair.p.end_code(1)),
        ("STALE_PAGE".into(), "STALE_PAGE".into())
    );
    assert_eq!(transfer_room(&pair, 2), "gloo");
    assert_eq!(ended(&pair.d, "failed"), 0.0);
    pair.assert_idle();
}

#[test]
fn hanging_abort_is_given_up_and_the_room_completes() {
    let pair = Pair::with(&staged(&json!({})), &staged(&json!({})));
    pair.d.pipes.stick(true);
    assert_eq!(transfer_room(&pair, 1), "tcp");
    until("D gives it up", || {
        communicators(&pair.d, "abandoned") == 1.0
    });
    assert_eq!(ended(&pair.d, "abandoned"), 1.0);
    assert_all_gone(&pair.p);
    assert_eq!(transfer_room(&pair, 2), "tcp");
    pair.d.pipes.stick(false); // it ends after all
    assert_all_gone(&pair.d);
    pair.assert_idle();
}

#[test]
fn closing_a_node_does_not_wait_for_a_hanging_abort() {
    let pair = Pair::with(&staged(&json!({})), &staged(&json!({})));
    assert_eq!(transfer_room(&pair, 1), "gloo");
    pair.d.pipes.stick(true);
    let start = std::time::Instant::now();
    pair.d.node.close();
    assert!(start.elapsed() < TIMEOUT / 2);
    pair.d.pipes.stick(false);
}

#[test]
fn without_a_second_transport_a_broken_communicator_ends_the_room() {
    let only = |mut config: Value| {
        config["transports"] = json!(["gloo"]);
        config
    };
    let pair = Pair::with(
        &only(fault("SLAB_SEND", &json!("drop"))),
        &only(staged(&json!({}))),
    );
    pair.open(1);
    pair.grant(1, &span(100, 40));
    pair.p.prefill(1, &span(0, 40), 40);
    assert_eq!(
        (pair.d.end_code(1), pair.p.end_code(1)),
        ("TRANSPORT_BROKEN".into(), "TRANSPORT_BROKEN".into())
    );
    pair.assert_idle();
}

#[test]
fn peer_without_the_transport_is_served_by_tcp() {
    let pair = Pair::with(&json!({"transports": ["tcp"]}), &staged(&json!({})));
    assert_eq!(transfer_room(&pair, 1), "tcp");
    assert_eq!(
        pair.d.stats()["counters"]["kv_transport_fallbacks_total"],
        0.0
    );
    pair.assert_idle();
}

#[test]
fn idle_communicator_makes_place_for_another_pair() {
    let one = staged(&json!({"max_communicators": 1}));
    for (p, d) in [(&one, &staged(&json!({}))), (&staged(&json!({})), &one)] {
        let first = Pair::with(p, d);
        assert_eq!(transfer_room(&first, 1), "gloo");
        // The second pair shares the node that has room for one.
        let full_at_p = std::ptr::eq(p, &raw const one);
        let (server, other) = if full_at_p {
            (first.server.port(), Rank::start("decode", d))
        } else {
            let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
            let other = Rank::start("prefill", p);
            other
                .node
                .register_rank("127.0.0.1", server.port(), TIMEOUT)
                .unwrap();
            let port = server.port();
            std::mem::forget(server); // it lives as long as the test's process
            (port, other)
        };
        let (p, d) = if full_at_p {
            (&first.p, &other)
        } else {
            (&other, &first.d)
        };
        let full = if full_at_p { p } else { d };
        let mut by = vec![];
        for room in 10..13 {
            d.node
                .open_room(room, 0, "127.0.0.1", server, 0, HASH, DEADLINE_MS)
                .unwrap();
            d.node
                .grant_pages(room, &[(GROUP, 0, &ids(&span(100, 40)), None)])
                .unwrap();
            p.prefill(room, &span(0, 40), 16);
            match d.end(room) {
                NodeEvent::Committed { stats, .. } => by.push(stats.transport),
                other => panic!("{other:?}"),
            }
            assert_eq!(p.end_code(room), "DONE");
            until("the idle one is closed", || ended(full, "closed") == 1.0);
            if full_at_p && room == 10 {
                // the pause after NO_CAPACITY
                std::thread::park_timeout(std::time::Duration::from_millis(1100));
            } else {
                until("and gone", || communicators(full, "aborting") == 0.0);
            }
        }
        assert!(
            d.detail("pull")["tcp"]["pages"].as_u64() > Some(0),
            "at P: {full_at_p}"
        );
        assert_eq!(by[2], "gloo", "at P: {full_at_p}, {by:?}");
        assert_eq!(ended(full, "failed"), 0.0);
        first.p.assert_idle();
        first.d.assert_idle();
        other.assert_idle();
    }
}

#[test]
fn backend_and_the_list_of_transports_must_agree() {
    let pool = Arc::new(KvPool::create(4, PAGE).unwrap());
    let start = |transports: Value, backend: bool| {
        let backend = backend.then(|| Arc::<Pipes>::default() as _);
        let config = config("decode", &json!({"transports": transports})).to_string();
        TransferNode::start_with(pool.clone(), &config, backend)
    };
    for (transports, backend) in [
        (json!(["gloo"]), false),
        (json!(["nccl"]), true),
        (json!(["tcp"]), true),
    ] {
        let err = start(transports.clone(), backend).err().unwrap();
        assert!(matches!(err, NodeError::Config(_)), "{transports}: {err}");
    }
    assert!(start(json!(["gloo", "tcp"]), true).is_ok());
}
