//! Peers that die, lie, stall or come back, links that lose and damage: every room ends with its
//! reason, and nothing is left.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use kv_transfer::protocol::ClusterKeys;
use kv_transfer::{BootstrapServer, NodeEvent};
use serde_json::{Value, json};

fn fault(rule: &str) -> Value {
    json!({"fault": {"rules": [serde_json::from_str::<Value>(rule).unwrap()]}})
}

fn on(transport: &str, mut extra: Value) -> Value {
    extra["transports"] = json!([transport]);
    extra
}

// ---- pages that are not what was announced ----

#[test]
fn page_that_got_a_new_owner_is_stale_and_never_committed() {
    for transport in TRANSPORTS {
        let pair = Pair::new(transport);
        pair.open(1);
        pair.p.prefill(1, &span(0, 20), 20);
        pair.d.wait_state(1, "ADMITTED");
        until("all pages are announced", || {
            pair.p.detail("pages_hashed") == 20
        });
        // the late-reader bug: P evicts and reuses a page under the lease
        pair.p.pool.begin_write(&[7]);
        pair.grant(1, &span(500, 20));
        assert_eq!(
            (pair.d.end_code(1), pair.p.end_code(1)),
            ("STALE_PAGE".into(), "STALE_PAGE".into()),
            "{transport}"
        );
        pair.transfer_room(2);
        pair.assert_idle();
    }
}

#[test]
fn page_that_gets_a_new_owner_during_its_copy_is_stale() {
    // (gloo looks twice at P, before anything is sent: tests/staged.rs)
    for transport in ["shm", "tcp"] {
        let hold = Hold::new();
        let held = fault(&json!({"on": "COPIED", "do": hold.rule()}).to_string());
        let (p, d) = if transport == "shm" {
            (json!({}), held)
        } else {
            (held, json!({}))
        };
        let pair = Pair::with(&on(transport, p), &on(transport, d));
        let dst = span(500, 1);
        pair.open(1);
        pair.grant(1, &dst);
        pair.p.prefill(1, &span(0, 1), 1);
        hold.wait_until_reached();
        // its bytes are still the right ones: only the generation tells
        pair.p.pool.begin_write(&[0]);
        hold.release();
        assert_eq!(
            (pair.d.end_code(1), pair.p.end_code(1)),
            ("STALE_PAGE".into(), "STALE_PAGE".into()),
            "{transport}"
        );
        pair.assert_idle();
    }
}

#[test]
fn page_rewritten_under_an_even_generation_is_caught_by_its_checksum() {
    for transport in TRANSPORTS {
        let pair = Pair::new(transport);
        pair.open(1);
        pair.p.prefill(1, &span(0, 20), 20);
        pair.d.wait_state(1, "ADMITTED");
        until("all pages are announced", || {
            pair.p.detail("pages_hashed") == 20
        });
        // SAFETY: inside the pool. An engine that forgets begin_write does exactly this.
        unsafe { pair.p.pool.data_ptr().add(3 * PAGE + 100).write(0xEE) };
        pair.grant(1, &span(500, 20));
        assert_eq!(
            (pair.d.end_code(1), pair.p.end_code(1)),
            ("CHECKSUM".into(), "CHECKSUM".into()),
            "{transport}"
        );
        pair.assert_idle();
    }
}

#[test]
fn flipped_bit_is_a_checksum_failure_and_retryable() {
    for transport in TRANSPORTS {
        let pair = Pair::with(
            &on(transport, json!({})),
            &on(
                transport,
                fault(r#"{"on": "PAGE", "nth": 13, "do": "flip"}"#),
            ),
        );
        pair.open(1);
        pair.grant(1, &span(500, 20));
        pair.p.prefill(1, &span(0, 20), 20);
        match pair.d.end(1) {
            NodeEvent::Failed { code, .. } => {
                assert!(code.as_str() == "CHECKSUM" && code.is_retryable())
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(pair.p.end_code(1), "CHECKSUM");
        pair.transfer_room(2);
        pair.assert_idle();
    }
}

/// A room of one page; how it ended on both sides.
fn one_page(pair: &Pair, room: u64) -> (String, String) {
    pair.open(room);
    pair.grant(room, &span(500, 1));
    pair.p.prefill(room, &span(0, 1), 1);
    (pair.d.end_code(room), pair.p.end_code(room))
}

#[test]
fn pages_that_one_transport_damaged_are_pulled_again_by_tcp() {
    for transport in ["shm", "gloo"] {
        let both = json!({"transports": [transport, "tcp"]});
        let mut flip = fault(r#"{"on": "PAGE", "nth": 13, "do": "flip"}"#);
        flip["transports"] = both["transports"].clone();
        let pair = Pair::with(&both, &flip);
        pair.transfer_room(1);
        let damaged = format!("kv_damaged_pulls_total{{transport=\"{transport}\"}}");
        assert_eq!(counter(&pair.d, &damaged), 1.0);
        assert_eq!(counter(&pair.d, "kv_quarantines_total"), 0.0);
        pair.assert_idle();
    }
}

#[test]
fn pair_with_damaged_rooms_in_a_row_is_quarantined() {
    let always = fault(r#"{"on": "PAGE", "do": "flip", "repeat": true}"#);
    let pair = Pair::with(&on("tcp", json!({})), &on("tcp", always));
    let damaged = ("CHECKSUM".to_owned(), "CHECKSUM".to_owned());
    for room in 1..=3 {
        assert_eq!(one_page(&pair, room), damaged);
    }
    pair.open(4);
    assert_eq!(pair.d.end_code(4), "QUARANTINED");
    assert_eq!(counter(&pair.d, "kv_quarantines_total"), 1.0);
    pair.assert_idle();
}

#[test]
fn good_rooms_between_damaged_ones_prevent_quarantine() {
    let flip = |nth| json!({"on": "PAGE", "nth": nth, "do": "flip"});
    // A rule does not count a page that an earlier one damages: these are the pages 1, 2, 4 and 5.
    let rules = json!({"fault": {"rules": [flip(1), flip(1), flip(2), flip(2)]}});
    let pair = Pair::with(&on("tcp", json!({})), &on("tcp", rules));
    let ends: Vec<String> = (1..=6).map(|room| one_page(&pair, room).0).collect();
    let (bad, good) = ("CHECKSUM", "COMMITTED");
    assert_eq!(ends, [bad, bad, good, bad, bad, good]);
    assert_eq!(counter(&pair.d, "kv_quarantines_total"), 0.0);
    pair.assert_idle();
}

#[test]
fn after_the_end_no_page_is_written() {
    for (transport, streams) in TRANSPORTS
        .map(|via| (via, 1))
        .into_iter()
        .chain([("tcp", 4)])
    {
        let mut slow = fault(r#"{"on": "PAGE", "do": {"delay_ms": 50}, "repeat": true}"#);
        slow["tcp_streams"] = json!(streams);
        let fast = json!({"tcp_streams": streams});
        // The side that is slow is the one that moves the bytes: D by shm, P by tcp and gloo.
        let (p, d) = if transport == "shm" {
            (fast, slow)
        } else {
            (slow, fast)
        };
        let pair = Pair::with(&on(transport, p), &on(transport, d));
        let (src, dst) = (span(0, 1000), span(0, 1000));
        for room in 1..=3 {
            pair.open(room);
            pair.grant(room, &dst);
            pair.p.prefill(room, &src, 1000);
            if transport == "shm" {
                pair.d.wait_state(room, "PULLING");
            } else {
                let before = pair.d.detail("pull")[transport]["batches"].as_u64();
                until("pages arrive", || {
                    pair.d.detail("pull")[transport]["batches"].as_u64() >= before
                        && pair.d.state(room).as_deref() == Some("PULLING")
                });
            }
            let start = Instant::now();
            pair.d.node.abort_room(room, "CLIENT_GONE").unwrap();
            assert_eq!(pair.d.end_code(room), "ABORTED");
            assert!(
                start.elapsed() < Duration::from_secs(8),
                "the pull was not stopped: its pages take 12 s by shm"
            );
            // From here on the pages belong to another request.
            pair.d.write(&dst, 4242 + room);
            assert_eq!(pair.p.end_code(room), "CLIENT_GONE");
            // What was on its way has arrived when another room's pages come over the same stream.
            for other in 0..streams {
                let other = 100 + room * streams + other;
                pair.open(other);
                pair.grant(other, &span(1500, 10));
                pair.p.prefill(other, &span(1500, 10), 10);
                assert_eq!(
                    (pair.d.end_code(other), pair.p.end_code(other)),
                    ("COMMITTED".into(), "DONE".into())
                );
            }
            assert!(
                pair.d.holds(&dst, 4242 + room, 0),
                "a late write by {transport}"
            );
        }
        pair.assert_idle();
    }
}

#[test]
fn damaged_page_in_one_part_of_a_pull_fails_its_room_only() {
    let damaged = fault(r#"{"on": "PAGE", "nth": 700, "do": "flip"}"#);
    let mut d = on("tcp", damaged);
    d["tcp_streams"] = json!(4);
    let pair = Pair::with(&on("tcp", json!({"tcp_streams": 3})), &d);
    for (room, code) in [(1, "CHECKSUM"), (2, "COMMITTED")] {
        pair.open(room);
        pair.grant(room, &span(1000, 1000));
        pair.p.prefill(room, &span(0, 1000), 1000);
        assert_eq!(pair.d.end_code(room), code);
        pair.p.end(room);
    }
    assert!(pair.d.holds(&span(1000, 1000), 2, 0));
    pair.assert_idle();
}

#[test]
fn broken_shm_falls_back_to_tcp() {
    let pair = Pair::with(
        &json!({}),
        &fault(r#"{"on": "PAGE", "nth": 8, "do": "break"}"#),
    );
    let dst = span(500, 20);
    pair.open(1);
    pair.grant(1, &dst);
    pair.p.prefill(1, &span(0, 20), 20);
    match pair.d.end(1) {
        NodeEvent::Committed { stats, .. } => assert_eq!(stats.transport, "tcp"),
        other => panic!("{other:?}"),
    }
    assert!(pair.d.holds(&dst, 1, 0));
    assert_eq!(
        pair.d.stats()["counters"]["kv_transport_fallbacks_total"],
        1.0
    );
    assert_eq!(pair.p.end_code(1), "DONE");
    pair.transfer_room(2);
    pair.assert_idle();
}

#[test]
fn without_a_second_transport_a_broken_shm_ends_the_room() {
    let pair = Pair::with(
        &json!({}),
        &on("shm", fault(r#"{"on": "PAGE", "nth": 8, "do": "break"}"#)),
    );
    pair.open(1);
    pair.grant(1, &span(500, 20));
    pair.p.prefill(1, &span(0, 20), 20);
    assert_eq!(
        (pair.d.end_code(1), pair.p.end_code(1)),
        ("TRANSPORT_BROKEN".into(), "TRANSPORT_BROKEN".into())
    );
    pair.assert_idle();
}

// ---- messages lost, doubled, late, damaged ----

#[test]
fn lost_messages_end_at_a_deadline_or_a_lease_and_leave_nothing() {
    // Where one end is to be the first, the other has much more time.
    let (short, lease, long) = (400, 3000, 30_000);
    let cases = [
        (
            "decode",
            "OPEN",
            (short, "DEADLINE"),
            (lease, "LEASE_EXPIRED"),
        ),
        (
            "prefill",
            "PROGRESS",
            (short, "DEADLINE"),
            (long, "DEADLINE"),
        ),
        ("prefill", "FINAL", (short, "DEADLINE"), (long, "DEADLINE")),
        (
            "decode",
            "DONE",
            (long, "COMMITTED"),
            (lease, "LEASE_EXPIRED"),
        ),
    ];
    for (who, message, (deadline_ms, d_end), (lease_ms, p_end)) in cases {
        let rule = fault(&format!(r#"{{"on": "{message}", "do": "drop"}}"#));
        let (mut p, d) = if who == "prefill" {
            (rule, json!({}))
        } else {
            (json!({}), rule)
        };
        p["lease_ms"] = json!(lease_ms);
        let pair = Pair::with(&p, &d);
        pair.open_with(1, HASH, deadline_ms);
        pair.grant(1, &span(500, 20));
        pair.p.prefill(1, &span(0, 20), 20);
        assert_eq!(
            (pair.d.end_code(1).as_str(), pair.p.end_code(1).as_str()),
            (d_end, p_end),
            "{message} lost"
        );
        pair.assert_idle();
        pair.transfer_room(2);
    }
}

#[test]
fn doubled_and_reordered_messages_change_nothing() {
    for rule in [
        r#"{"on": "*", "do": "dup", "repeat": true}"#,
        r#"{"on": "PROGRESS", "do": {"delay_ms": 40}}"#,
        r#"{"on": "OPEN_OK", "do": {"delay_ms": 40}, "repeat": true}"#,
        r#"{"on": "FINAL", "do": {"delay_ms": 40}}"#,
        r#"{"on": "DONE", "do": {"delay_ms": 40}}"#,
    ] {
        for transport in TRANSPORTS {
            let mut config = on(transport, fault(rule));
            if transport == "gloo" {
                // a doubled SLAB_SEND costs the communicator
                config["transports"] = json!(["gloo", "tcp"]);
            }
            let pair = Pair::with(&config, &config);
            for room in 1..4 {
                pair.transfer_room(room);
            }
            pair.assert_idle();
        }
    }
}

#[test]
fn damaged_frame_ends_the_connection_and_the_next_room_gets_a_new_one() {
    for key in [None, Some("secret")] {
        let server = BootstrapServer::start("127.0.0.1", 0, key.map(Into::into)).unwrap();
        let p = Rank::start(
            "prefill",
            &json!({"cluster_key": key, "fault": {"rules": [{"on": "FINAL", "do": "flip"}]}}),
        );
        p.node
            .register_rank("127.0.0.1", server.port(), TIMEOUT)
            .unwrap();
        let pair = Pair {
            server,
            p,
            d: Rank::start("decode", &json!({"cluster_key": key})),
        };
        pair.open_with(1, HASH, 3000);
        pair.grant(1, &span(500, 5));
        pair.p.prefill(1, &span(0, 5), 5);
        let code = if key.is_some() {
            "AUTH"
        } else {
            "TRANSPORT_BROKEN"
        };
        assert_eq!(
            (pair.d.end_code(1).as_str(), pair.p.end_code(1).as_str()),
            (code, code)
        );
        pair.transfer_room(2);
        pair.assert_idle();
    }
}

#[test]
fn lost_connection_ends_rooms_at_once_on_d_and_after_the_lease_on_p() {
    for message in ["OPEN_OK", "PROGRESS", "FINAL"] {
        let mut p = fault(&format!(r#"{{"on": "{message}", "do": "kill"}}"#));
        p["lease_ms"] = json!(2000);
        let pair = Pair::with(&p, &json!({}));
        pair.open(1);
        pair.grant(1, &span(500, 20));
        pair.p.prefill(1, &span(0, 20), 20);
        assert_eq!(
            (pair.d.end_code(1), pair.p.end_code(1)),
            ("PEER_DEAD".into(), "LEASE_EXPIRED".into()),
            "{message}"
        );
        pair.transfer_room(2);
        pair.assert_idle();
    }
}

#[test]
fn unknown_peers_and_garbage_on_the_port_harm_no_room() {
    let pair = Pair::new("tcp");
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0xFF; 64],
        &[1, 0, 0, 0, 7],
        &[0; 4],
        &[3, 0, 0, 0, 0, 0x81, 0xA5],
    ] {
        let mut stream = TcpStream::connect(("127.0.0.1", pair.p.node.port())).unwrap();
        stream.write_all(garbage).unwrap();
    }
    let _silent = TcpStream::connect(("127.0.0.1", pair.p.node.port())).unwrap();
    pair.transfer_room(1);
    pair.assert_idle();
}

// ---- keys ----

#[test]
fn wrong_or_missing_cluster_key_is_refused_by_the_bootstrap_server() {
    let d = Rank::start("decode", &json!({"cluster_key": "guess"}));
    for server_key in [Some("secret".into()), None] {
        let is_keyed = server_key.is_some();
        let server = BootstrapServer::start("127.0.0.1", 0, server_key).unwrap();
        let p = Rank::start("prefill", &json!({"cluster_key": "secret"}));
        let registered = p.node.register_rank("127.0.0.1", server.port(), TIMEOUT);
        assert_eq!(registered.is_ok(), is_keyed, "{registered:?}");
        d.node
            .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
            .unwrap();
        match d.end(1) {
            NodeEvent::Failed { code, .. } => {
                assert!(code.as_str() == "AUTH" && !code.is_retryable())
            }
            other => panic!("{other:?}"),
        }
    }
    d.assert_idle();
}

#[test]
fn key_changes_node_by_node_without_a_refusal() {
    let steps = [
        ("old", None),
        ("old", Some("new")),
        ("new", Some("old")),
        ("new", None),
    ];
    let config = |(own, second): (&str, Option<&str>)| json!({"cluster_key": own, "second_cluster_key": second, "transports": ["tcp"]});
    let pairs = steps.windows(2).flat_map(|w| [(w[0], w[1]), (w[1], w[0])]);
    for (p_keys, d_keys) in pairs {
        let server_keys = ClusterKeys::new(p_keys.0.into(), p_keys.1.map(Into::into));
        let server = BootstrapServer::start("127.0.0.1", 0, Some(server_keys)).unwrap();
        let p = Rank::start("prefill", &config(p_keys));
        p.node
            .register_rank("127.0.0.1", server.port(), TIMEOUT)
            .unwrap();
        let d = Rank::start("decode", &config(d_keys));
        let pair = Pair { server, p, d };
        pair.transfer_room(1);
        pair.assert_idle();
    }
}

#[test]
fn second_key_is_no_key_to_ask_with() {
    let server = BootstrapServer::start("127.0.0.1", 0, Some("old".into())).unwrap();
    let p = Rank::start("prefill", &json!({"cluster_key": "old"}));
    p.node
        .register_rank("127.0.0.1", server.port(), TIMEOUT)
        .unwrap();
    let keys = json!({"cluster_key": "new", "second_cluster_key": "old"});
    let d = Rank::start("decode", &keys);
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    match d.end(1) {
        NodeEvent::Failed { code, .. } => assert_eq!(code.as_str(), "AUTH"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn with_a_key_everything_works_over_every_transport() {
    for transport in TRANSPORTS {
        let server = BootstrapServer::start("127.0.0.1", 0, Some("secret".into())).unwrap();
        let config = on(transport, json!({"cluster_key": "secret"}));
        let p = Rank::start("prefill", &config);
        p.node
            .register_rank("127.0.0.1", server.port(), TIMEOUT)
            .unwrap();
        let pair = Pair {
            server,
            p,
            d: Rank::start("decode", &config),
        };
        pair.transfer_room(1);
        pair.transfer_room(2);
        pair.assert_idle();
    }
}

#[test]
fn without_a_cluster_key_kv_comes_from_loopback_only() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    // TEST-NET-1: no host has these addresses, and no packet must be sent to them.
    let p = Rank::start("prefill", &json!({"advertise_host": "192.0.2.1"}));
    p.node
        .register_rank("127.0.0.1", server.port(), TIMEOUT)
        .unwrap();
    let d = Rank::start("decode", &json!({}));
    for (room, bootstrap) in [(1, "192.0.2.2"), (2, "127.0.0.1")] {
        d.node
            .open_room(room, 0, bootstrap, server.port(), 0, HASH, DEADLINE_MS)
            .unwrap();
        match d.end(room) {
            NodeEvent::Failed { code, message, .. } => {
                assert_eq!(code.as_str(), "AUTH");
                assert!(message.contains("--cluster-key"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    d.assert_idle();
}

// ---- the bootstrap server ----

#[test]
fn bootstrap_server_that_never_answers_delays_no_other_room() {
    let hole = TcpListener::bind("127.0.0.1:0").unwrap(); // accepts in the kernel, never answers
    let pair = Pair::new("shm");
    pair.d
        .node
        .open_room(
            1,
            0,
            "127.0.0.1",
            hole.local_addr().unwrap().port(),
            0,
            HASH,
            NEVER_MS,
        )
        .unwrap();
    pair.transfer_room(2);
    assert_eq!(pair.d.end_code(1), "UNREACHABLE");
    pair.assert_idle();
}

/// A deadline that no test reaches: a room that ends before it did not wait for it.
const NEVER_MS: u64 = 3_600_000;

#[test]
fn unreachable_prefill_rank_fails_rooms_early_and_is_found_when_it_returns() {
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let d = Rank::start("decode", &json!({}));
    let open = |room: u64, rank: i64| {
        d.node
            .open_room(room, 0, "127.0.0.1", port, rank, HASH, NEVER_MS)
            .unwrap()
    };
    for (room, rank) in [(1, 0), (2, 0), (3, -1)] {
        open(room, rank); // with a rank, and without
    }
    for room in 1..=3 {
        match d.end(room) {
            NodeEvent::Failed { code, message, .. } => {
                assert_eq!(code.as_str(), "UNREACHABLE");
                assert!(message.contains("refused"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    let server = BootstrapServer::start("127.0.0.1", port, None).unwrap();
    let p = Rank::start("prefill", &json!({}));
    p.node
        .register_rank("127.0.0.1", server.port(), TIMEOUT)
        .unwrap();
    let mut room = 10;
    until("the rank is probed again", || {
        room += 1;
        p.prefill(room, &span(0, 5), 5);
        open(room, 0);
        d.node
            .grant_pages(room, &[(GROUP, 0, &ids(&span(500, 5)), None)])
            .unwrap();
        let ends = (d.end_code(room), room);
        if ends.0 != "COMMITTED" {
            p.node.abort_room(room, "CLIENT_GONE").unwrap();
        }
        p.end_code(room);
        ends.0 == "COMMITTED"
    });
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn stalled_engine_fails_its_rooms_although_its_transfer_runtime_lives() {
    // A busy machine may delay heartbeats by a tenth of a second; three that are missed are another
    // end.
    let d = json!({"stall_ms": 600});
    let pair = Pair::with(&json!({"heartbeat_ms": 300}), &d);
    // Computed already: what is announced needs no engine.
    pair.p.prefill(1, &span(0, 5), 5);
    pair.open_with(1, HASH, NEVER_MS);
    pair.d.wait_state(1, "ADMITTED");
    pair.p.node.offer_room(2, 0, HASH, NEVER_MS).unwrap();
    pair.open_with(2, HASH, NEVER_MS);
    assert_eq!(pair.d.end_code(2), "PEER_STALLED"); // P polls no more
    assert_eq!(pair.p.end_code(2), "PEER_STALLED");
    pair.grant(1, &span(500, 5));
    assert_eq!(pair.d.end_code(1), "COMMITTED");
    assert_eq!(pair.p.end_code(1), "DONE");
    // An engine without work to do counts as working.
    pair.p.prefill(3, &span(20, 5), 5);
    pair.open(3);
    pair.grant(3, &span(600, 5));
    assert_eq!(
        (pair.d.end_code(3), pair.p.end_code(3)),
        ("COMMITTED".into(), "DONE".into())
    );
    pair.assert_idle();
}

#[test]
fn decode_waits_for_a_prefill_rank_that_registers_late() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    let d = Rank::start("decode", &json!({}));
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    d.node
        .grant_pages(1, &[(GROUP, 0, &ids(&span(500, 5)), None)])
        .unwrap();
    let p = Rank::start("prefill", &json!({}));
    p.prefill(1, &span(0, 5), 5);
    p.node
        .register_rank("127.0.0.1", server.port(), TIMEOUT)
        .unwrap();
    assert_eq!(
        (d.end_code(1), p.end_code(1)),
        ("COMMITTED".into(), "DONE".into())
    );
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn rank_that_the_prefill_node_has_not_is_refused_at_once() {
    // Of two ranks, the second one is there.
    let pair = Pair::with(&json!({"dp_size": 2, "dp_rank": 1}), &json!({}));
    let open = |room: u64, rank: i64| {
        let port = pair.server.port();
        pair.d
            .node
            .open_room(room, 0, "127.0.0.1", port, rank, HASH, NEVER_MS)
            .unwrap();
    };
    for (room, rank) in [(1, 2), (2, 65_535)] {
        open(room, rank);
        match pair.d.end(room) {
            NodeEvent::Failed { code, message, .. } => {
                assert_eq!(
                    (code.as_str(), code.is_retryable()),
                    ("RANK_UNKNOWN", false)
                );
                let expected = format!("the prefill node has no rank {rank}: it has 2, from 0 on");
                assert_eq!(message, expected);
            }
            other => panic!("{other:?}"),
        }
    }
    // The first rank can still come.
    open(3, 0);
    let first = Rank::start("prefill", &json!({"dp_size": 2, "dp_rank": 0}));
    first.node.offer_room(3, 0, HASH, DEADLINE_MS).unwrap();
    first
        .node
        .register_rank("127.0.0.1", pair.server.port(), TIMEOUT)
        .unwrap();
    pair.d.wait_state(3, "ADMITTED");
    pair.d.node.abort_room(3, "CLIENT_GONE").unwrap();
    assert_eq!(pair.d.end_code(3), "ABORTED");
    assert_eq!(first.end_code(3), "CLIENT_GONE");
    first.assert_idle();
    pair.assert_idle();
}

#[test]
fn registering_without_a_server_fails_in_time_with_the_reason() {
    let p = Rank::start("prefill", &json!({}));
    let start = Instant::now();
    let err = p
        .node
        .register_rank("127.0.0.1", 1, Duration::from_millis(300))
        .unwrap_err();
    assert!(start.elapsed() < TIMEOUT);
    assert!(err.to_string().contains("refused"), "{err}");
}

// ---- peers that go away ----

#[test]
fn node_that_closes_ends_its_peers_rooms_and_its_successor_is_found() {
    let mut pair = Pair::new("shm");
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    pair.open(1);
    pair.d.wait_state(1, "ADMITTED");
    let start = Instant::now();
    pair.p.node.close();
    assert_eq!(pair.d.end_code(1), "PEER_DEAD");
    assert!(
        start.elapsed() < Duration::from_secs(2),
        "closing takes {:?}",
        start.elapsed()
    );
    pair.open(2); // before there is a successor
    pair.grant(2, &span(500, 5));
    pair.p = Rank::start("prefill", &json!({"transports": ["shm"]}));
    pair.p
        .node
        .register_rank("127.0.0.1", pair.server.port(), TIMEOUT)
        .unwrap();
    pair.p.prefill(2, &span(0, 5), 5);
    assert_eq!(
        (pair.d.end_code(2), pair.p.end_code(2)),
        ("COMMITTED".into(), "DONE".into())
    );
    pair.assert_idle();
}

#[test]
fn restart_behind_a_stale_route_is_noticed_by_its_incarnation() {
    let first = Rank::start("prefill", &json!({}));
    let port = first.node.port();
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    first
        .node
        .register_rank("127.0.0.1", server.port(), TIMEOUT)
        .unwrap();
    // The successor takes the same port, but the route still names the first incarnation for a
    // while.
    let stale: Value = ask(
        server.port(),
        "GET /route?engine_rank=0&target_dp_group=0&target_pp_rank=0",
    );
    assert_eq!(stale["instance_id"], first.node.incarnation());
    drop(first);
    let second = Rank::start("prefill", &json!({"port": port}));
    let body = json!({"role": "Prefill", "rank_ip": "127.0.0.1", "rank_port": port, "instance_id": stale["instance_id"]}).to_string();
    ask(server.port(), &format!("PUT /route|{body}"));
    let d = Rank::start("decode", &json!({}));
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, 400)
        .unwrap();
    match d.end(1) {
        NodeEvent::Failed { code, message, .. } => {
            assert!(
                code.as_str() == "UNREACHABLE" && message.contains("incarnation"),
                "{message}"
            )
        }
        other => panic!("{other:?}"),
    }
    d.node
        .open_room(2, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    d.node
        .grant_pages(2, &[(GROUP, 0, &ids(&span(500, 5)), None)])
        .unwrap();
    second
        .node
        .register_rank("127.0.0.1", server.port(), TIMEOUT)
        .unwrap();
    second.prefill(2, &span(0, 5), 5);
    assert_eq!(
        (d.end_code(2), second.end_code(2)),
        ("COMMITTED".into(), "DONE".into())
    );
    second.assert_idle();
    d.assert_idle();
}

#[test]
fn facts_of_a_prefill_node_end_with_its_process() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    let port = server.port();
    let d = Rank::start("decode", &json!({}));
    let open = |room: u64| {
        // Without a rank: the prefill node's dp size decides.
        d.node
            .open_room(room, 0, "127.0.0.1", port, -1, HASH, DEADLINE_MS)
            .unwrap();
        d.node
            .grant_pages(room, &[(GROUP, 0, &ids(&span(500, 5)), None)])
            .unwrap();
    };
    let start = |extra: &Value| {
        let rank = Rank::start("prefill", extra);
        rank.node.register_rank("127.0.0.1", port, TIMEOUT).unwrap();
        rank
    };
    let transfer_room = |p: &Rank, room: u64| {
        p.prefill(room, &span(0, 5), 5);
        open(room);
        assert_eq!(
            (d.end_code(room), p.end_code(room)),
            ("COMMITTED".into(), "DONE".into())
        );
    };
    let first = start(&json!({}));
    transfer_room(&first, 1);
    first.node.close();
    drop((first, server));
    // The same address, another page layout: refused, and not for longer than that process lives.
    let server = BootstrapServer::start("127.0.0.1", port, None).unwrap();
    let other = start(&json!({"layout": layout(128)}));
    open(3);
    assert_eq!(d.end_code(3), "LAYOUT_MISMATCH");
    other.node.close();
    drop((other, server));
    // The first layout again, on two ranks: an odd room belongs to the second.
    let _server = BootstrapServer::start("127.0.0.1", port, None).unwrap();
    let ranks = [0, 1].map(|rank| start(&json!({"dp_rank": rank, "dp_size": 2})));
    transfer_room(&ranks[1], 5);
    transfer_room(&ranks[0], 6);
    d.assert_idle();
}

/// One HTTP request as "METHOD path" or "METHOD path|body".
fn ask(port: u16, request: &str) -> Value {
    let (line, body) = request.split_once('|').unwrap_or((request, ""));
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    write!(
        stream,
        "{line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let answer = std::io::read_to_string(stream).unwrap();
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

#[test]
fn lease_of_a_decode_node_that_closed_ends_soon() {
    let pair = Pair::new("shm");
    pair.open(1);
    pair.p.prefill(1, &span(0, 5), 5);
    pair.p.wait_state(1, "LEASED");
    pair.d.wait_state(1, "ADMITTED");
    pair.d.node.close();
    assert_eq!(pair.p.end_code(1), "LEASE_EXPIRED");
    pair.p.assert_idle();
}

/// A prefill node in a process of its own, which runs `child_prefill` below.
struct ChildNode {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl ChildNode {
    fn start(server: &BootstrapServer, transport: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_prefill", "--ignored", "--nocapture"])
            .env("BATON_TEST_BOOTSTRAP", server.port().to_string())
            .env("BATON_TEST_TRANSPORT", transport)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut node = Self {
            said: BufReader::new(child.stdout.take().unwrap()),
            child,
        };
        node.wait_for("ready");
        node
    }

    fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim() != word {
            line.clear();
            assert!(
                self.said.read_line(&mut line).unwrap() > 0,
                "the child ended before it printed {word}"
            );
        }
    }

    fn say(&mut self, word: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{word}").unwrap();
        self.wait_for(&format!("did {word}"));
    }

    fn signal(&self, signal: i32) {
        // SAFETY: our own child, which was not waited for yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for ChildNode {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "not a test: the process that other tests kill"]
fn child_prefill() {
    let Ok(port) = std::env::var("BATON_TEST_BOOTSTRAP") else {
        return;
    };
    let transport = std::env::var("BATON_TEST_TRANSPORT").unwrap();
    let p = Rank::start("prefill", &json!({"transports": [transport]}));
    p.node
        .register_rank("127.0.0.1", port.parse().unwrap(), TIMEOUT)
        .unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.as_str() {
            "offer" => p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap(),
            "publish" => p.publish(1, &span(0, 20), 5),
            "finish" => p.finish(1, 20),
            other => panic!("{other}"),
        }
        println!("\ndid {line}");
    }
}

/// Longest time from a kill to D's event. The socket closes with the process; the rest is this
/// machine's load.
const KILL_MS: u128 = 1500;

#[test]
fn killed_prefill_process_is_noticed_by_its_socket() {
    for transport in ["shm", "tcp"] {
        let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
        let mut p = ChildNode::start(&server, transport);
        let d = Rank::start("decode", &json!({}));
        p.say("offer");
        d.node
            .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
            .unwrap();
        d.node
            .grant_pages(1, &[(GROUP, 0, &ids(&span(500, 20)), None)])
            .unwrap();
        p.say("publish");
        until("pages are pulled", || {
            d.detail("pull")[transport]["pages"] == 20
        });
        p.signal(libc::SIGKILL);
        let start = Instant::now();
        assert_eq!(d.end_code(1), "PEER_DEAD");
        assert!(
            start.elapsed().as_millis() < KILL_MS,
            "{:?}",
            start.elapsed()
        );
        d.assert_idle();
    }
}

#[test]
fn by_shm_a_prompt_survives_the_death_of_its_prefill_process() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    let mut p = ChildNode::start(&server, "shm");
    let d = Rank::start("decode", &json!({}));
    p.say("offer");
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    p.say("publish");
    p.say("finish");
    until("everything is announced", || {
        d.rooms(1)["timeline"].to_string().contains("FINAL")
    });
    p.signal(libc::SIGKILL);
    until("the peer's death is known", || {
        d.stats()["gauges"]["kv_peers"] == 0.0
    });
    let dst = span(500, 20);
    d.node
        .grant_pages(1, &[(GROUP, 0, &ids(&dst), None)])
        .unwrap();
    assert_eq!(d.end_code(1), "COMMITTED");
    assert!(d.holds(&dst, 1, 0));
    d.assert_idle();
}

#[test]
fn stopped_prefill_process_is_given_up_after_three_heartbeats() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    let mut p = ChildNode::start(&server, "shm");
    let d = Rank::start("decode", &json!({"heartbeat_ms": 300}));
    p.say("offer");
    d.node
        .open_room(1, 0, "127.0.0.1", server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    d.wait_state(1, "ADMITTED");
    p.signal(libc::SIGSTOP);
    let start = Instant::now();
    assert_eq!(d.end_code(1), "PEER_DEAD");
    assert!(
        start.elapsed() >= Duration::from_millis(500),
        "two beats may be missing: {:?}",
        start.elapsed()
    );
    assert!(
        start.elapsed() < Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    d.assert_idle();
}

// ---- everything at once ----

/// splitmix64: a seed gives the same faults everywhere.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % n
    }
}

#[test]
fn storm_of_aborts_and_faults_leaves_nothing_and_never_a_wrong_page() {
    let seed = std::env::var("BATON_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(20_260_921);
    for transport in TRANSPORTS {
        println!("BATON_SEED={seed} {transport}");
        let mut dice = Dice(seed);
        let rules = |dice: &mut Dice, names: &[&str]| {
            let rules: Vec<Value> = names.iter().map(|name| json!({"on": name, "nth": 5 + dice.roll(60), "do": (["dup", "kill", "flip", "drop"][dice.roll(4) as usize])})).collect();
            json!({"fault": {"rules": rules}, "lease_ms": 700, "heartbeat_ms": 200, "copy_threads": 4, "tcp_streams": 4})
        };
        let p_faults = on(
            transport,
            rules(&mut dice, &["OPEN_OK", "PROGRESS", "FINAL", "HEARTBEAT"]),
        );
        let mut d_faults = on(transport, rules(&mut dice, &["OPEN", "DONE", "ABORT"]));
        d_faults["fault"]["rules"]
            .as_array_mut()
            .unwrap()
            .push(json!({"on": "PAGE", "nth": 50 + dice.roll(300), "do": "flip"}));
        let pair = Pair::with(&p_faults, &d_faults);
        let mut committed = 0;
        for batch in 0..8u64 {
            let rooms: Vec<u64> = (0..16).map(|i| batch * 16 + i).collect();
            let pages = |room: u64| span((room % 16) as u32 * 20, 20);
            for &room in &rooms {
                pair.open_with(room, HASH, 700);
                if dice.roll(10) > 0 {
                    pair.grant(room, &pages(room));
                }
                pair.p.node.offer_room(room, 0, HASH, 700).unwrap();
                if dice.roll(6) == 0 {
                    pair.d.node.abort_room(room, "CLIENT_GONE").unwrap();
                }
                pair.p
                    .publish(room, &pages(room), 1 + dice.roll(9) as usize);
                if dice.roll(6) == 0 {
                    pair.p.node.abort_room(room, "CLIENT_GONE").unwrap();
                }
                pair.p.finish(room, 20);
                if dice.roll(8) == 0 {
                    pair.p.pool.begin_write(&[pages(room)[3]]);
                }
            }
            for &room in &rooms {
                let end = pair.d.end(room);
                if let NodeEvent::Committed { .. } = end {
                    assert!(
                        pair.d.holds(&pages(room), room, 0),
                        "room {room} committed wrong pages, seed {seed}"
                    );
                    committed += 1;
                }
                pair.p.end(room);
            }
        }
        assert!(
            committed > 25,
            "only {committed} of 128 rooms committed: the storm tests nothing (seed {seed})"
        );
        pair.assert_idle();
    }
}

#[test]
fn limit_of_rooms_is_reported_and_temporary() {
    let pair = Pair::with(&json!({"max_rooms": 4}), &json!({"max_rooms": 4}));
    for room in 1..=4 {
        pair.open(room);
    }
    let err = pair
        .d
        .node
        .open_room(5, 0, "127.0.0.1", 1, 0, HASH, 1)
        .unwrap_err();
    assert!(err.to_string().contains("max_rooms"), "{err}");
    for room in 1..=4 {
        pair.grant(room, &span(room as u32 * 50, 5));
        pair.p.prefill(room, &span(room as u32 * 50, 5), 5);
        assert_eq!(
            (pair.d.end_code(room), pair.p.end_code(room)),
            ("COMMITTED".into(), "DONE".into())
        );
    }
    pair.assert_idle();
}

#[test]
fn five_thousand_rooms_to_one_peer_survive_a_late_or_early_connection() {
    const ROOMS: u64 = 5000;
    let limit = json!({"max_rooms": ROOMS, "lease_ms": 600_000});
    for is_late in [true, false] {
        let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
        let (p, d) = (
            Rank::start("prefill", &limit),
            Rank::start("decode", &limit),
        );
        let register = || {
            p.node
                .register_rank("127.0.0.1", server.port(), TIMEOUT)
                .unwrap()
        };
        if !is_late {
            register();
        }
        p.write(&[0], 1);
        for room in 1..=ROOMS {
            p.node.offer_room(room, 0, HASH, NEVER_MS).unwrap();
            p.node.publish_pages(room, GROUP, 0, &ids(&[0])).unwrap();
            p.node
                .finish_prompt(room, group_pages(1, 1), vec![0; 4096])
                .unwrap(); // 20 MiB of answers in all, more than may wait
            d.node
                .open_room(room, 0, "127.0.0.1", server.port(), 0, HASH, NEVER_MS)
                .unwrap();
            d.node.grant_pages(room, &[(GROUP, 1, &[], None)]).unwrap(); // it has the page
        }
        if is_late {
            register();
        }
        let mut ends = std::collections::BTreeMap::new();
        let mut ended = 0;
        while ended < ROOMS {
            assert!(d.node.wait_for_event(TIMEOUT), "{ends:?}");
            for event in d
                .node
                .poll_events(1000)
                .iter()
                .filter(|event| event.is_end())
            {
                let end = match event {
                    NodeEvent::Failed { code, message, .. } => format!("{code}: {message}"),
                    NodeEvent::Committed { .. } => "committed".into(),
                    other => format!("{other:?}"),
                };
                *ends.entry(end).or_insert(0) += 1;
                ended += 1;
            }
        }
        assert_eq!(ends, [("committed".to_owned(), ROOMS)].into());
        assert_eq!(d.detail("links_lost"), 0);
    }
}
