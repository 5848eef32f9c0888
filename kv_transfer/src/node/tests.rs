#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use super::*;
use crate::bootstrap::BootstrapServer;

const PAGE: usize = 4096;
const PATIENCE: Duration = Duration::from_secs(20);

fn node(pool: &Arc<KvPool>, role: &str, extra: serde_json::Value) -> TransferNode {
    let mut config = json!({"role": role, "host": "127.0.0.1", "port": 0, "transports": ["shm", "tcp"], "layout": {"page_bytes": PAGE}, "heartbeat_ms": 200});
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    TransferNode::start(pool.clone(), &config.to_string()).unwrap()
}

fn ids(pages: impl IntoIterator<Item = u32>) -> Vec<u8> {
    pages.into_iter().flat_map(|p| (p as i32).to_le_bytes()).collect()
}

#[test]
fn happy_path() {
    let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
    for transport in ["shm", "tcp"] {
        let (src, dst) = (Arc::new(KvPool::create(64, PAGE).unwrap()), Arc::new(KvPool::create(64, PAGE).unwrap()));
        let p = node(&src, "prefill", json!({"transports": [transport]}));
        let d = node(&dst, "decode", json!({"transports": [transport]}));
        p.register("127.0.0.1", server.port(), PATIENCE).unwrap();
        p.offer(1, 0, b"h", 20_000).unwrap();
        d.open(1, 0, "127.0.0.1", server.port(), 0, b"h", 20_000).unwrap();
        d.grant(1, 0, &ids(10..20)).unwrap();
        src.begin_write(&(0..10).collect::<Vec<_>>());
        for page in 0..10 {
            // SAFETY: in range, ours.
            unsafe { std::ptr::write_bytes(src.page_ptr(page), page as u8 + 1, PAGE) };
        }
        p.publish(1, 0, &ids(0..10)).unwrap();
        p.finish(1, 10, 3, b"first".to_vec()).unwrap();
        assert!(d.wait(PATIENCE), "{} {}", d.rooms_json(None), p.rooms_json(None));
        let events = d.poll(9);
        assert!(matches!(&events[..], [NodeEvent::Committed { room: 1, total_pages: 10, .. }]), "{events:?}");
        for page in 0..10 {
            // SAFETY: in range; the room is over.
            assert_eq!(unsafe { dst.page_ptr(10 + page).add(PAGE - 1).read() }, page as u8 + 1);
        }
        assert!(p.wait(PATIENCE));
        assert_eq!(p.poll(9), vec![NodeEvent::Released { room: 1, code: None }]);
        p.close();
    }
}
