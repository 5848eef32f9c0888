//! Pools on a device: every transport between two of them, or one and host memory; what breaks, and
//! what becomes of the rooms.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::device::Memory;
use common::*;
use kv_transfer::{KvPool, NodeError, NodeEvent, TransferNode};
use serde_json::{Value, json};

fn node(transports: &Value, more: &Value) -> Value {
    let mut config = json!({
        "transports": transports, "slabs": 2, "slab_bytes": 8 * PAGE,
        "comm_open_ms": 30_000, "comm_op_ms": 30_000, "comm_abort_ms": 10_000,
    });
    config
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    config
}

fn rank(role: &str, on_device: bool, config: &Value) -> Rank {
    if on_device {
        Rank::start_on_device(role, config)
    } else {
        Rank::start(role, config)
    }
}

/// Two pools on devices.
fn pair(transports: &Value, p: &Value, d: &Value) -> Pair {
    Pair::of(
        rank("prefill", true, &node(transports, p)),
        rank("decode", true, &node(transports, d)),
    )
}

fn transfer_room(pair: &Pair, room: u64) -> String {
    let (src, dst) = (span(0, 40), span(100, 40));
    pair.open(room);
    pair.grant(room, &dst);
    pair.p.prefill(room, &src, 16);
    let transport = match pair.d.end(room) {
        NodeEvent::Committed { stats, .. } => stats.transport.to_owned(),
        other => panic!("{other:?}"),
    };
    assert_eq!(pair.p.end_code(room), "DONE");
    assert!(pair.d.holds(&dst, room, 0));
    transport
}

fn fault(on: &str, what: &Value) -> Value {
    json!({"fault": {"rules": [{"on": on, "do": what}]}})
}

fn of(rank: &Rank) -> &Memory {
    rank.memory.as_ref().unwrap()
}

fn fallbacks(rank: &Rank) -> f64 {
    rank.stats()["counters"]["kv_transport_fallbacks_total"]
        .as_f64()
        .unwrap()
}

#[test]
fn every_transport_relays_between_devices() {
    for (via, streams) in [
        ("cuda_ipc", 1),
        ("nccl", 1),
        ("gloo", 1),
        ("tcp", 1),
        ("tcp", 4),
    ] {
        let config = json!({"tcp_streams": streams});
        let pair = pair(&json!([via]), &config, &config);
        for room in 1..=3 {
            assert_eq!(transfer_room(&pair, room), via);
        }
        assert_eq!(fallbacks(&pair.d), 0.0, "{via}");
        pair.assert_idle();
        let opened = of(&pair.d).opened.load(Ordering::Relaxed);
        assert_eq!(opened, usize::from(via == "cuda_ipc"), "once per peer");
        let (p, d) = (
            pair.p.memory.clone().unwrap(),
            pair.d.memory.clone().unwrap(),
        );
        drop(pair);
        for memory in [p, d] {
            assert_eq!(memory.pinned.load(Ordering::Relaxed), 0, "{via}");
            assert_eq!(memory.open.load(Ordering::Relaxed), 0, "{via}");
        }
    }
}

#[test]
fn device_and_host_memory_make_a_pair() {
    for (p_on_device, d_on_device) in [(true, false), (false, true)] {
        for (via, by) in [("gloo", "gloo"), ("tcp", "tcp"), ("nccl", "tcp")] {
            let config = node(&json!([via, "tcp"]), &json!({}));
            let pair = Pair::of(
                rank("prefill", p_on_device, &config),
                rank("decode", d_on_device, &config),
            );
            assert_eq!(
                transfer_room(&pair, 1),
                by,
                "{via}, P on a device: {p_on_device}"
            );
            assert_eq!(transfer_room(&pair, 2), by, "{via}");
            pair.assert_idle();
        }
    }
}

#[test]
fn best_transport_of_the_list_is_taken() {
    let all = json!(["cuda_ipc", "nccl", "tcp"]);
    let both = pair(&all, &json!({}), &json!({}));
    assert_eq!(transfer_room(&both, 1), "cuda_ipc");
    both.assert_idle();
    let afar = Pair::of(
        rank("prefill", true, &node(&json!(["nccl", "tcp"]), &json!({}))),
        rank("decode", true, &node(&all, &json!({}))),
    );
    assert_eq!(transfer_room(&afar, 1), "nccl");
    afar.assert_idle();
}

#[test]
fn broken_transport_is_replaced_by_the_next() {
    let hangs_end = json!({"comm_op_ms": 3000, "comm_abort_ms": 500});
    let pair = pair(&json!(["cuda_ipc", "nccl", "tcp"]), &hangs_end, &hangs_end);
    assert_eq!(transfer_room(&pair, 1), "cuda_ipc");
    of(&pair.d).fails.lock().push("copy");
    assert_eq!(transfer_room(&pair, 2), "nccl");
    of(&pair.d).fails.lock().clear();
    assert_eq!(
        transfer_room(&pair, 3),
        "nccl",
        "cuda_ipc stays off until the pair connects again"
    );
    assert_eq!(fallbacks(&pair.d), 1.0);
    pair.p.pipes.stick(true); // and its aborts hang
    pair.d.pipes.stick(true);
    assert_eq!(transfer_room(&pair, 4), "tcp");
    assert_eq!(fallbacks(&pair.d), 2.0);
    pair.p.pipes.stick(false);
    pair.d.pipes.stick(false);
    pair.assert_idle();
}

#[test]
fn pages_that_cannot_be_opened_travel_otherwise() {
    let config = node(&json!(["cuda_ipc", "tcp"]), &json!({}));
    let d = rank("decode", true, &config);
    of(&d).fails.lock().push("open");
    let pair = Pair::of(rank("prefill", true, &config), d);
    assert_eq!(transfer_room(&pair, 1), "tcp");
    assert_eq!(fallbacks(&pair.d), 1.0);
    pair.assert_idle();
}

#[test]
fn page_given_away_under_the_copy_is_stale() {
    for via in ["cuda_ipc", "nccl", "gloo", "tcp"] {
        let hold = Hold::new();
        let held = fault("COPIED", &hold.rule());
        let pair = pair(&json!([via]), &held, &held);
        pair.open(1);
        pair.grant(1, &span(100, 1));
        pair.p.prefill(1, &span(0, 1), 1);
        hold.wait_until_reached();
        // its bytes are still the right ones: only the generation tells
        pair.p.pool.begin_write(&[0]);
        hold.release();
        assert_eq!(
            (pair.d.end_code(1), pair.p.end_code(1)),
            ("STALE_PAGE".into(), "STALE_PAGE".into()),
            "{via}"
        );
        assert_eq!(transfer_room(&pair, 2), via);
        pair.assert_idle();
    }
}

#[test]
fn damage_on_the_way_is_found_on_the_device() {
    for (via, found) in [("cuda_ipc", true), ("gloo", true), ("tcp", true)] {
        let pair = pair(&json!([via]), &json!({}), &fault("PAGE", &json!("flip")));
        pair.open(1);
        pair.grant(1, &span(100, 40));
        pair.p.prefill(1, &span(0, 40), 16);
        assert_eq!(pair.d.end_code(1) == "CHECKSUM", found, "{via}");
        assert_eq!(pair.p.end_code(1), "CHECKSUM");
        assert_eq!(transfer_room(&pair, 2), via);
        pair.assert_idle();
    }
}

#[test]
fn wrong_page_is_found_on_the_device() {
    for via in ["cuda_ipc", "nccl", "gloo", "tcp"] {
        let pair = pair(&json!([via]), &json!({}), &json!({}));
        pair.open(1);
        pair.p.prefill(1, &span(0, 4), 4);
        until("the checksums are taken", || {
            pair.p.detail("pages_hashed") == 4
        });
        of(&pair.p).write(2, &of(&pair.p).read(1)); // without a new generation: what no owner does
        pair.grant(1, &span(100, 4));
        assert_eq!(pair.d.end_code(1), "CHECKSUM", "{via}");
        assert_eq!(pair.p.end_code(1), "CHECKSUM");
        pair.assert_idle();
    }
}

#[test]
fn pages_of_a_peer_that_is_gone_are_closed_and_the_next_one_opened() {
    let dying = fault("PROGRESS", &json!("kill"));
    let pair = pair(&json!(["cuda_ipc"]), &dying, &json!({}));
    pair.open(1);
    pair.grant(1, &span(100, 40));
    pair.p.prefill(1, &span(0, 40), 40);
    assert_eq!(pair.d.end_code(1), "PEER_DEAD");
    until("D lets go", || {
        of(&pair.d).open.load(Ordering::Relaxed) == 0
    });
    pair.p.node.abort_room(1, "CLIENT_GONE").unwrap();
    assert_eq!(pair.p.end_code(1), "CLIENT_GONE");
    assert_eq!(transfer_room(&pair, 2), "cuda_ipc");
    assert_eq!(of(&pair.d).opened.load(Ordering::Relaxed), 2);
    pair.assert_idle();
}

#[test]
fn pages_of_a_dead_peer_are_not_read_even_if_all_were_announced() {
    let slow = json!({"fault": {"rules": [{"on": "PAGE", "do": {"delay_ms": 3}, "repeat": true}]}});
    let pair = pair(&json!(["cuda_ipc"]), &json!({}), &slow);
    pair.open(1);
    let pages = 1200; // two pulls, of several copies each
    pair.grant(1, &span(100, pages));
    pair.p.prefill(1, &span(0, pages), 400);
    until("a copy is made", || {
        of(&pair.d).copies.load(Ordering::Relaxed) > 0
    });
    pair.p.node.close();
    assert_eq!(pair.d.end_code(1), "PEER_DEAD");
    until("D lets go", || {
        of(&pair.d).open.load(Ordering::Relaxed) == 0
    });
    assert_eq!(pair.d.detail("pulls_in_flight"), 0);
}

#[test]
fn cancelled_pull_writes_nothing_more() {
    let slow = json!({"fault": {"rules": [{"on": "PAGE", "do": {"delay_ms": 2}, "repeat": true}]}});
    let pair = pair(&json!(["cuda_ipc"]), &json!({}), &slow);
    pair.open(1);
    pair.grant(1, &span(100, 1000));
    pair.p.prefill(1, &span(0, 1000), 1000);
    until("a copy is made", || {
        of(&pair.d).copies.load(Ordering::Relaxed) > 0
    });
    pair.d.node.abort_room(1, "CLIENT_GONE").unwrap();
    assert_eq!(pair.d.end_code(1), "ABORTED");
    let (made, before) = (
        of(&pair.d).copies.load(Ordering::Relaxed),
        of(&pair.d).read(1050),
    );
    assert!(made < 4, "1000 pages are 4 copies");
    assert_eq!(pair.p.end_code(1), "CLIENT_GONE");
    assert_eq!(transfer_room(&pair, 2), "cuda_ipc");
    assert_eq!(of(&pair.d).read(1050), before);
    pair.assert_idle();
}

#[test]
fn without_checksums_a_room_ends_and_the_node_is_unhealthy() {
    let pair = pair(&json!(["cuda_ipc"]), &json!({}), &json!({}));
    of(&pair.p).fails.lock().push("sums");
    pair.open(1);
    pair.grant(1, &span(100, 4));
    pair.p.prefill(1, &span(0, 4), 4);
    assert_eq!(pair.d.end_code(1), "TRANSPORT_BROKEN");
    assert_eq!(pair.p.end_code(1), "TRANSPORT_BROKEN");
    assert_eq!(pair.p.stats()["healthy"], json!(false));
}

#[test]
fn pages_on_a_device_have_one_copy_thread() {
    let pool = Arc::new(KvPool::create_on(4, PAGE, Memory::new(4, PAGE)).unwrap());
    let config = config("decode", &json!({"transports": ["tcp"], "copy_threads": 2})).to_string();
    let err = TransferNode::start(pool, &config).err().unwrap();
    assert!(err.to_string().contains("2 copy threads"), "{err}");
}

#[test]
fn transport_of_the_other_kind_of_memory_is_refused() {
    let on_device = Arc::new(KvPool::create_on(4, PAGE, Memory::new(4, PAGE)).unwrap());
    let in_host = Arc::new(KvPool::create(4, PAGE).unwrap());
    for (pool, via) in [(on_device, "shm"), (in_host, "cuda_ipc")] {
        let config = config("decode", &json!({"transports": [via]})).to_string();
        let err = TransferNode::start(pool, &config).err().unwrap();
        assert!(matches!(err, NodeError::Config(_)), "{err}");
        assert!(err.to_string().contains(via), "{err}");
    }
}
