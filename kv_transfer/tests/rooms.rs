//! Rooms that commit, and rooms that end early for an ordinary reason: the events of each side, and
//! no leak.
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use common::*;
use kv_transfer::protocol::GroupPages;
use kv_transfer::{NodeError, NodeEvent};
use serde_json::json;

#[test]
fn pages_are_pulled_while_later_chunks_are_still_computed() {
    for transport in TRANSPORTS {
        let pair = Pair::new(transport);
        let (src, dst) = (span(0, 30), span(500, 30));
        pair.open(1);
        pair.grant(1, &dst);
        pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
        pair.p.write(&src, 1);
        for (i, part) in src.chunks(10).enumerate() {
            pair.p
                .node
                .publish_pages(1, GROUP, i as u32 * 10, &ids(part))
                .unwrap();
            let pulled = (i as u64 + 1) * 10 * PAGE as u64;
            until("the chunk is pulled before the next", || {
                pair.d.detail("pull")[transport]["bytes"] == pulled
            });
        }
        pair.p.finish(1, 30);
        match pair.d.end(1) {
            NodeEvent::Committed {
                payload,
                groups,
                stats,
                ..
            } => {
                assert_eq!(groups, group_pages(30, 3));
                assert_eq!(payload, 1u64.to_le_bytes());
                assert_eq!(
                    (stats.transport, stats.pages, stats.bytes),
                    (transport, 30, 30 * PAGE as u64)
                );
            }
            other => panic!("{other:?}"),
        }
        assert!(pair.d.holds(&dst, 1, 0));
        assert_eq!(pair.p.end_code(1), "DONE");
        pair.assert_idle();
    }
}

#[test]
fn grant_is_revoked_until_prefill_has_announced_pages() {
    for transport in TRANSPORTS {
        let pair = Pair::new(transport);
        let heard = |wanted: NodeEvent| {
            assert!(pair.d.node.wait_for_event(TIMEOUT), "no {wanted:?}");
            assert_eq!(pair.d.node.poll_events(1), [wanted]);
        };
        let (first, dst) = (span(500, 20), span(600, 20));
        pair.open(1);
        pair.grant(1, &first);
        pair.d.node.revoke_grant(1).unwrap();
        heard(NodeEvent::Revoked { room: 1 });
        pair.p.prefill(1, &span(0, 20), 7);
        heard(NodeEvent::Announced { room: 1 });
        pair.grant(1, &dst);
        assert_eq!(pair.d.end_code(1), "COMMITTED");
        assert!(pair.d.holds(&dst, 1, 0));
        assert!(!pair.d.holds(&first, 1, 0), "no pull wrote there");
        assert_eq!(pair.p.end_code(1), "DONE");
        pair.assert_idle();
    }
}

#[test]
fn only_the_pages_that_decode_lacks_are_pulled() {
    for transport in TRANSPORTS {
        let pair = Pair::new(transport);
        let (held, dst) = (span(500, 12), span(600, 8));
        pair.d.write(&held, 77);
        pair.open(1);
        pair.p.prefill(1, &span(0, 20), 7);
        pair.d
            .node
            .grant_pages(1, &[(GROUP, 12, &ids(&dst), None)])
            .unwrap();
        assert_eq!(pair.d.end_code(1), "COMMITTED");
        assert!(pair.d.holds(&dst, 1, 12), "prompt pages 12..20");
        assert!(pair.d.holds(&held, 77, 0), "the held prefix is untouched");
        assert_eq!(pair.d.detail("pull")[transport]["pages"], 8);
        assert_eq!(pair.p.end_code(1), "DONE");
        pair.assert_idle();
    }
}

/// The pages of a prompt in the layout of `two_groups`: 20 of the first group, and those with the
/// numbers 34 to 39 of the second.
fn pages_of_two_groups() -> Vec<GroupPages> {
    let mut groups = group_pages(20, 3);
    groups.push(GroupPages {
        group: WINDOW,
        first_page: 34,
        total_pages: 40,
        last_page_tokens: 3,
        tokens_at: None,
    });
    groups
}

/// Two nodes with the layout of `two_groups`. P has computed the pages of a prompt in room 1: its
/// pages 0.. are those of the first group, with seed 1, its pages 100.. those of the second, with
/// seed 2.
fn pair_of_two_groups(transport: &str) -> Pair {
    let config = json!({"transports": [transport], "layout": two_groups()});
    let pair = Pair::with(&config, &config);
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    pair.p.write(&span(0, 20), 1);
    pair.p.write(&span(100, 6), 2);
    pair
}

fn publish_in_turns(p: &Rank) {
    for (group, first, pages) in [
        (GROUP, 0, span(0, 11)),
        (WINDOW, 34, span(100, 2)),
        (GROUP, 11, span(11, 9)),
        (WINDOW, 36, span(102, 4)),
    ] {
        p.node.publish_pages(1, group, first, &ids(&pages)).unwrap();
    }
}

#[test]
fn prompt_of_two_groups_is_committed_with_the_pages_that_decode_lacks() {
    for transport in TRANSPORTS {
        let pair = pair_of_two_groups(transport);
        let (dst, window) = (span(500, 15), span(600, 4));
        pair.open(1);
        let full = (GROUP, 5, &ids(&dst)[..], None);
        let last = (WINDOW, 36, &ids(&window)[..], None);
        pair.d.node.grant_pages(1, &[last, full]).unwrap();
        publish_in_turns(&pair.p);
        pair.p
            .node
            .finish_prompt(1, pages_of_two_groups(), vec![])
            .unwrap();
        match pair.d.end(1) {
            NodeEvent::Committed { groups, stats, .. } => {
                assert_eq!(groups, pages_of_two_groups());
                assert_eq!((stats.transport, stats.pages), (transport, 19));
            }
            other => panic!("{other:?}"),
        }
        assert!(pair.d.holds(&dst, 1, 5));
        assert!(pair.d.holds(&window, 2, 2));
        assert_eq!(pair.p.end_code(1), "DONE");
        pair.assert_idle();
    }
}

#[test]
fn room_of_two_groups_ends_on_both_sides_when_one_group_does_not_fit() {
    for (start_page, pages, reason) in [
        (
            33,
            7,
            "prefill has the pages of group 5 from 34 on, but those from 33 on are needed here",
        ),
        (
            36,
            3,
            "pages [36, 39) of group 5 were granted, but prefill has [34, 40)",
        ),
    ] {
        let pair = pair_of_two_groups("shm");
        pair.open(1);
        let full = (GROUP, 0, &ids(&span(500, 20))[..], None);
        let window = (WINDOW, start_page, &ids(&span(600, pages))[..], None);
        pair.d.node.grant_pages(1, &[full, window]).unwrap();
        publish_in_turns(&pair.p);
        let finished = pair.p.node.finish_prompt(1, pages_of_two_groups(), vec![]);
        finished.unwrap();
        match pair.d.end(1) {
            NodeEvent::Failed { code, message, .. } => {
                assert_eq!(
                    (code.as_str(), message.as_str()),
                    ("PROMPT_MISMATCH", reason)
                );
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(pair.p.end_code(1), "PROMPT_MISMATCH");
        pair.assert_idle();
    }
}

#[test]
fn abort_while_one_group_is_pulled_stops_the_writes_to_all() {
    for transport in TRANSPORTS {
        let pair = pair_of_two_groups(transport);
        let (dst, window) = (span(500, 20), span(600, 6));
        pair.open(1);
        let full = (GROUP, 0, &ids(&dst)[..], None);
        let last = (WINDOW, 34, &ids(&window)[..], None);
        pair.d.node.grant_pages(1, &[full, last]).unwrap();
        let published = pair.p.node.publish_pages(1, GROUP, 0, &ids(&span(0, 20)));
        published.unwrap();
        until("the first group is pulled", || {
            pair.d.detail("pull")[transport]["pages"] == 20
        });
        pair.d.node.abort_room(1, "CLIENT_GONE").unwrap();
        assert_eq!(pair.d.end_code(1), "ABORTED");
        assert_eq!(pair.p.end_code(1), "CLIENT_GONE");
        let late = pair
            .p
            .node
            .publish_pages(1, WINDOW, 34, &ids(&span(100, 6)));
        late.unwrap();
        assert!(!pair.d.holds(&window, 2, 0));
        pair.assert_idle();
    }
}

#[test]
fn full_hit_commits_without_any_page() {
    let pair = Pair::new("shm");
    pair.open(1);
    pair.d
        .node
        .grant_pages(1, &[(GROUP, 20, &[], None)])
        .unwrap();
    pair.p.prefill(1, &span(0, 20), 20);
    assert_eq!(pair.d.end_code(1), "COMMITTED");
    assert_eq!(pair.p.end_code(1), "DONE");
    assert_eq!(
        pair.d.stats()["counters"]["kv_pulls_total{transport=\"none\"}"],
        1.0
    );
    pair.assert_idle();
}

#[test]
fn open_before_its_offer_waits_and_is_then_served() {
    for transport in TRANSPORTS {
        let pair = Pair::new(transport);
        pair.open(1);
        pair.grant(1, &span(500, 5));
        until("the OPEN waits", || pair.p.detail("opens_waiting") == 1);
        pair.p.prefill(1, &span(0, 5), 2);
        assert_eq!(
            (pair.d.end_code(1), pair.p.end_code(1)),
            ("COMMITTED".into(), "DONE".into())
        );
        assert_eq!(pair.p.detail("opens_early"), 1);
        pair.assert_idle();
    }
}

#[test]
fn pending_open_whose_request_never_comes_is_refused() {
    let pair = Pair::with(&json!({"park_ttl_ms": 50}), &json!({}));
    pair.open(1);
    assert_eq!(pair.d.end_code(1), "UNREACHABLE");
    pair.assert_idle();
}

#[test]
fn prefill_does_not_wait_for_decode_and_its_lease_ends() {
    let pair = Pair::with(&json!({"lease_ms": 60}), &json!({}));
    pair.p.prefill(1, &span(0, 5), 5);
    assert_eq!(pair.p.end_code(1), "LEASE_EXPIRED");
    pair.open(1);
    assert_eq!(
        pair.d.end_code(1),
        "LEASE_EXPIRED",
        "a late OPEN is refused at once"
    );
    pair.assert_idle();
}

#[test]
fn lease_lives_as_long_as_decode_asks_for_it() {
    let pair = Pair::with(
        &json!({"lease_ms": 1500, "heartbeat_ms": 100}),
        &json!({"heartbeat_ms": 100}),
    );
    pair.open(1);
    pair.p.prefill(1, &span(0, 5), 5);
    pair.d.wait_state(1, "ADMITTED");
    let start = std::time::Instant::now();
    until("more than a lease has passed", || {
        start.elapsed().as_millis() > 2000
    });
    assert_eq!(
        pair.p.state(1).as_deref(),
        Some("LEASED"),
        "renewed by heartbeats that name the room"
    );
    pair.grant(1, &span(500, 5));
    assert_eq!(
        (pair.d.end_code(1), pair.p.end_code(1)),
        ("COMMITTED".into(), "DONE".into())
    );
    pair.assert_idle();
}

#[test]
fn decode_can_abort_at_every_stage() {
    let slow = json!({"transports": ["shm"], "fault": {"rules": [{"on": "PAGE", "do": {"delay_ms": 5}, "repeat": true}]}});
    let pair = Pair::with(&json!({"transports": ["shm"]}), &slow);
    let abort = |room| pair.d.node.abort_room(room, "CLIENT_GONE").unwrap();

    pair.d
        .node
        .open_room(1, 0, "127.0.0.1", 1, 0, HASH, DEADLINE_MS)
        .unwrap(); // no server listens there
    abort(1);
    assert_eq!(pair.d.end_code(1), "ABORTED", "resolving");

    pair.open(2);
    until("the OPEN waits", || pair.p.detail("opens_waiting") == 1);
    abort(2);
    assert_eq!(pair.d.end_code(2), "ABORTED", "waiting");
    until("P forgets the waiting OPEN", || {
        pair.p.detail("opens_waiting") == 0
    });

    pair.p.node.offer_room(3, 0, HASH, DEADLINE_MS).unwrap();
    pair.open(3);
    pair.d.wait_state(3, "ADMITTED");
    abort(3);
    assert_eq!(
        (pair.d.end_code(3), pair.p.end_code(3)),
        ("ABORTED".into(), "CLIENT_GONE".into()),
        "admitted"
    );

    pair.open(4);
    pair.grant(4, &span(500, 200));
    pair.p.prefill(4, &span(0, 200), 50);
    pair.d.wait_state(4, "PULLING");
    abort(4);
    abort(4);
    assert_eq!(
        (pair.d.end_code(4), pair.p.end_code(4)),
        ("ABORTED".into(), "CLIENT_GONE".into()),
        "pulling"
    );
    abort(4);
    pair.assert_idle();
}

#[test]
fn prefill_can_abort_at_every_stage() {
    let pair = Pair::new("shm");
    let abort = |room| pair.p.node.abort_room(room, "CLIENT_GONE").unwrap();
    let offer = |room| pair.p.node.offer_room(room, 0, HASH, DEADLINE_MS).unwrap();

    offer(1);
    abort(1);
    assert_eq!(pair.p.end_code(1), "CLIENT_GONE", "waiting, no decode rank");
    pair.open(1);
    assert_eq!(
        pair.d.end_code(1),
        "CLIENT_GONE",
        "the decode rank comes later"
    );

    pair.open(2);
    until("the OPEN waits", || pair.p.detail("opens_waiting") == 1);
    abort(2);
    assert_eq!(pair.d.end_code(2), "CLIENT_GONE", "never offered");

    offer(3);
    pair.open(3);
    pair.grant(3, &span(500, 10));
    pair.p.publish(3, &span(0, 5), 5);
    until("the first pages are pulled", || {
        pair.d.detail("pull")["shm"]["pages"] == 5
    });
    abort(3);
    assert_eq!(
        (pair.d.end_code(3), pair.p.end_code(3)),
        ("CLIENT_GONE".into(), "CLIENT_GONE".into()),
        "prefilling"
    );
    pair.p
        .node
        .publish_pages(3, GROUP, 5, &ids(&span(5, 5)))
        .unwrap(); // late calls of the engine are harmless
    pair.p
        .node
        .finish_prompt(3, group_pages(10, 1), vec![])
        .unwrap();

    pair.open(4);
    pair.p.prefill(4, &span(0, 5), 5);
    pair.d.wait_state(4, "ADMITTED");
    pair.p.wait_state(4, "LEASED");
    abort(4);
    assert_eq!(
        (pair.d.end_code(4), pair.p.end_code(4)),
        ("CLIENT_GONE".into(), "CLIENT_GONE".into()),
        "leased"
    );
    pair.transfer_room(5);
    pair.assert_idle();
}

#[test]
fn mismatching_nodes_are_refused_with_the_reason() {
    let pair = Pair::new("shm");
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    pair.open_with(1, b"another prompt", DEADLINE_MS);
    assert_eq!(pair.d.end_code(1), "PROMPT_MISMATCH");

    let other = Rank::start("decode", &json!({"layout": layout(128)}));
    other
        .node
        .open_room(1, 0, "127.0.0.1", pair.server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    match other.end(1) {
        NodeEvent::Failed { code, message, .. } => {
            assert_eq!(code.as_str(), "LAYOUT_MISMATCH");
            assert!(
                message.contains("page group 2: head_dim 128 against 64;"),
                "{message}"
            );
        }
        end => panic!("{end:?}"),
    }
    other.assert_idle();

    pair.open(1);
    pair.grant(1, &span(500, 4));
    pair.p.publish(1, &span(0, 5), 5);
    pair.p.finish(1, 5);
    assert_eq!(
        (pair.d.end_code(1), pair.p.end_code(1)),
        ("PROMPT_MISMATCH".into(), "PROMPT_MISMATCH".into()),
        "4 pages granted, 5 needed"
    );
    pair.assert_idle();
}

#[test]
fn room_number_belongs_to_one_request_and_its_last_reader() {
    let pair = Pair::new("shm");
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    assert!(matches!(
        pair.p.node.offer_room(1, 1, HASH, DEADLINE_MS),
        Err(NodeError::DuplicateRoom(1))
    ));
    pair.open(1);
    assert!(matches!(
        pair.d.node.open_room(1, 0, "h", 1, 0, HASH, 1),
        Err(NodeError::DuplicateRoom(1))
    ));
    pair.d.wait_state(1, "ADMITTED");
    let second = Rank::start("decode", &json!({}));
    second
        .node
        .open_room(1, 0, "127.0.0.1", pair.server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    assert_eq!(
        pair.d.end_code(1),
        "DUP_ROOM",
        "the room is read by the last to ask"
    );
    let dst = span(500, 5);
    second
        .node
        .grant_pages(1, &[(GROUP, 0, &ids(&dst), None)])
        .unwrap();
    pair.p.publish(1, &span(0, 5), 5);
    pair.p.finish(1, 5);
    assert_eq!(
        (second.end_code(1), pair.p.end_code(1)),
        ("COMMITTED".into(), "DONE".into()),
        "and gets its pages"
    );
    // Over: the number may be used again, by an offer or by a later attempt's OPEN.
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    pair.p.node.abort_room(1, "CLIENT_GONE").unwrap();
    assert_eq!(pair.p.end_code(1), "CLIENT_GONE");
    second
        .node
        .open_room(1, 0, "127.0.0.1", pair.server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    assert_eq!(second.end_code(1), "CLIENT_GONE", "attempt 0 is over");
    second
        .node
        .open_room(1, 1, "127.0.0.1", pair.server.port(), 0, HASH, DEADLINE_MS)
        .unwrap();
    until("attempt 1 waits", || pair.p.detail("opens_waiting") == 1);
    second.node.abort_room(1, "CLIENT_GONE").unwrap();
    assert_eq!(second.end_code(1), "ABORTED");
    pair.assert_idle();
}

#[test]
fn invalid_calls_are_errors_at_once() {
    let pair = Pair::new("shm");
    assert!(matches!(
        pair.d.node.abort_room(1, "NO_SUCH_CODE"),
        Err(NodeError::UnknownCode(_))
    ));
    assert!(matches!(
        pair.d
            .node
            .grant_pages(1, &[(GROUP, 0, &ids(&[POOL_PAGES as u32]), None)]),
        Err(NodeError::Pages(_))
    ));
    let other = GROUP + 1;
    let mut both = group_pages(1, 1);
    both.push(GroupPages {
        group: other,
        ..both[0]
    });
    let page = ids(&[0]);
    let twice = [(GROUP, 0, &page[..], None), (GROUP, 0, &page[..], None)];
    for (refused, reason) in [
        (
            pair.d.node.grant_pages(1, &[(other, 0, &page, None)]),
            "page group 3, but there are [2]",
        ),
        (
            pair.p.node.publish_pages(1, other, 0, &page),
            "page group 3, but there are [2]",
        ),
        (
            pair.p.node.finish_prompt(1, both, vec![]),
            "page group 3, but there are [2]",
        ),
        (
            pair.d.node.grant_pages(1, &[]),
            "page group 2 of [2] is missing",
        ),
        (
            pair.d.node.grant_pages(1, &twice),
            "page group 2 is named twice",
        ),
    ] {
        let said = refused.unwrap_err().to_string();
        assert_eq!(
            said,
            format!(
                "{reason}: publish names a group of the pool's layout, finish and grant each one \
                 once"
            )
        );
    }
    assert!(matches!(
        pair.p.node.offer_room(1, 0, &[0; 65], 1),
        Err(NodeError::TooLarge { .. })
    ));
    assert!(matches!(
        pair.p
            .node
            .finish_prompt(1, group_pages(1, 1), vec![0; 3 << 20]),
        Err(NodeError::TooLarge { .. })
    ));
    pair.p.node.offer_room(2, 0, HASH, DEADLINE_MS).unwrap();
    pair.p
        .node
        .finish_prompt(2, group_pages(5, 1), vec![])
        .unwrap(); // pages were never published
    assert_eq!(pair.p.end_code(2), "TRANSPORT_BROKEN");
    assert_eq!(pair.p.detail("illegal"), 1);
}

#[test]
fn request_that_takes_too_long_ends_at_its_deadline_on_both_sides() {
    let pair = Pair::new("shm");
    pair.p.node.offer_room(1, 0, HASH, 80).unwrap();
    assert_eq!(pair.p.end_code(1), "DEADLINE");
    pair.p.node.offer_room(2, 0, HASH, DEADLINE_MS).unwrap();
    pair.open_with(2, HASH, 150);
    assert_eq!(
        (pair.d.end_code(2), pair.p.end_code(2)),
        ("DEADLINE".into(), "DEADLINE".into()),
        "D's deadline ends P's room too"
    );
    pair.assert_idle();
}

#[test]
fn room_without_a_rank_finds_it_by_its_number() {
    let pair = Pair::with(&json!({"dp_size": 2, "dp_rank": 1}), &json!({}));
    pair.p.node.offer_room(5, 0, HASH, DEADLINE_MS).unwrap();
    pair.d
        .node
        .open_room(5, 0, "127.0.0.1", pair.server.port(), -1, HASH, DEADLINE_MS)
        .unwrap();
    pair.d.wait_state(5, "ADMITTED");
    pair.d.node.abort_room(5, "CLIENT_GONE").unwrap();
    assert_eq!(
        (pair.d.end_code(5), pair.p.end_code(5)),
        ("ABORTED".into(), "CLIENT_GONE".into())
    );
    pair.d
        .node
        .open_room(4, 0, "127.0.0.1", pair.server.port(), -1, HASH, 200)
        .unwrap(); // 4 % 2 = rank 0, which is not there
    assert_eq!(pair.d.end_code(4), "UNREACHABLE");
    pair.assert_idle();
}

#[test]
fn draining_node_finishes_what_it_has_and_takes_nothing_new() {
    let pair = Pair::new("shm");
    pair.p.node.offer_room(1, 0, HASH, DEADLINE_MS).unwrap();
    pair.p.node.drain();
    pair.open(2);
    assert_eq!(pair.d.end_code(2), "DRAINING");
    pair.open(1);
    pair.grant(1, &span(500, 5));
    pair.p.publish(1, &span(0, 5), 5);
    pair.p.finish(1, 5);
    assert_eq!(
        (pair.d.end_code(1), pair.p.end_code(1)),
        ("COMMITTED".into(), "DONE".into())
    );
    pair.assert_idle();
}

#[test]
fn shared_prefix_is_hashed_once() {
    let pair = Pair::new("shm");
    pair.p.write(&span(0, 20), 9);
    for room in 1..=3 {
        pair.p.node.offer_room(room, 0, HASH, DEADLINE_MS).unwrap();
        pair.open(room);
        pair.grant(room, &span(100 * room as u32, 20));
        pair.p
            .node
            .publish_pages(room, GROUP, 0, &ids(&span(0, 20)))
            .unwrap();
        pair.p.finish(room, 20);
        assert_eq!(
            (pair.d.end_code(room), pair.p.end_code(room)),
            ("COMMITTED".into(), "DONE".into())
        );
        assert!(pair.d.holds(&span(100 * room as u32, 20), 9, 0));
    }
    pair.assert_idle();
}

#[test]
fn sixty_four_rooms_at_once() {
    let settings = TRANSPORTS.into_iter().flat_map(|via| [(via, 1), (via, 4)]);
    for (transport, threads) in settings {
        let config =
            json!({"transports": [transport], "copy_threads": threads, "tcp_streams": threads});
        let pair = Pair::with(&config, &config);
        let (src, dst) = (
            |room: u64| span(room as u32 * 16, 16),
            |room: u64| span((63 - room as u32) * 16, 16),
        );
        for room in 0..64 {
            if room % 3 == 0 {
                pair.open(room); // before the offer
            }
            pair.p.node.offer_room(room, 0, HASH, DEADLINE_MS).unwrap();
            if room % 3 != 0 {
                pair.open(room);
            }
            if room % 2 == 0 {
                pair.grant(room, &dst(room));
            }
        }
        for room in (0..64).rev() {
            pair.p.publish(room, &src(room), 1 + room as usize % 7);
            pair.p.finish(room, 16);
            if room % 2 == 1 {
                pair.grant(room, &dst(room));
            }
        }
        for room in 0..64 {
            assert_eq!(
                (pair.d.end_code(room), pair.p.end_code(room)),
                ("COMMITTED".into(), "DONE".into()),
                "room {room}"
            );
            assert!(
                pair.d.holds(&dst(room), room, 0),
                "room {room} over {transport} by {threads} threads"
            );
        }
        pair.assert_idle();
    }
}
