//! Tests that panic the control thread. All others are in kv_transfer/tests.

use super::*;

#[test]
fn panic_of_the_control_thread_ends_every_room_and_shows_in_the_health() {
    let pool = Arc::new(KvPool::create(8, 4096).expect("memfd"));
    let config = json!({
        "role": "decode", "host": "127.0.0.1", "port": 0, "transports": ["shm", "tcp"],
        "layout": crate::protocol::tests::layout(4096),
    });
    let node = TransferNode::start(pool, &config.to_string()).expect("started");
    node.open_room(1, 0, "127.0.0.1", 1, 0, b"", 60_000)
        .expect("taken");
    node.offer_room(2, 0, b"", 60_000).expect("taken");
    node.panic_for_test();
    let mut ends = Vec::new();
    while ends.len() < 2 {
        assert!(
            node.wait_for_event(Duration::from_secs(20)),
            "rooms without an end: {}",
            node.rooms_json(None)
        );
        ends.extend(node.poll_events(9));
    }
    ends.sort_by_key(NodeEvent::room);
    assert!(
        matches!(&ends[0], NodeEvent::Failed { room: 1, code: ReasonCode::TransportBroken, message } if message.contains("by a test")),
        "{ends:?}"
    );
    assert_eq!(
        ends[1],
        NodeEvent::Released {
            room: 2,
            code: Some(ReasonCode::TransportBroken)
        }
    );
    assert!(!node.is_healthy() && node.stats_json().contains("by a test"));
    let err = node
        .offer_room(3, 0, b"", 1)
        .expect_err("the thread that would end it is dead");
    assert!(matches!(err, NodeError::Unhealthy(_)), "{err}");
}
