//! Two nodes over loopback in one process, with real sockets and shared memory.
#![allow(dead_code, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

pub mod device;
pub mod pipes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use device::Memory;
use kv_transfer::protocol::{GroupId, GroupPages};
use kv_transfer::transport::communicator::CommBackend;
use kv_transfer::{BootstrapServer, KvPool, NodeEvent, TransferNode};
use pipes::Pipes;
use serde_json::{Value, json};

pub const PAGE: usize = 16 << 10;
pub const POOL_PAGES: usize = 2048;
/// Long enough for a loaded machine; a test that waits this long has failed.
pub const TIMEOUT: Duration = Duration::from_secs(30);
pub const DEADLINE_MS: u64 = 20_000;
pub const HASH: &[u8] = b"prompt";
/// The page group of both nodes.
pub const GROUP: GroupId = 2;
/// The second one of `two_groups`.
pub const WINDOW: GroupId = 5;

/// One node and its pool.
pub struct Rank {
    pub node: TransferNode,
    pub pool: Arc<KvPool>,
    /// Has the pages, if the pool is on a device.
    pub memory: Option<Arc<Memory>>,
    /// Makes its communicators, when it has a staged transport.
    pub pipes: Arc<Pipes>,
    heard: std::cell::RefCell<Vec<NodeEvent>>,
}

/// Pages of `PAGE` bytes whose heads have so many dimensions.
pub fn layout(head_dim: usize) -> Value {
    let page_tokens = PAGE / (2 * 4 * head_dim);
    json!({
        "groups": [{
            "id": GROUP, "kind": "full", "layers": [[0, 1]], "heads": [[0, 1]],
            "dims": format!("layer,kv=2,slot,head,head_dim={head_dim}"), "dtype": "float32",
            "page_tokens": page_tokens, "page_bytes": PAGE, "retain": "all",
        }],
        "model_hash": "m",
    })
}

/// As `layout`, with a second group, which keeps the last pages of a prompt only.
pub fn two_groups() -> Value {
    let mut both = layout(64);
    let groups = both["groups"].as_array_mut().unwrap();
    let mut window = groups[0].clone();
    window["id"] = json!(WINDOW);
    window["kind"] = json!("window");
    window["layers"] = json!([[1, 2]]);
    window["retain"] = json!("last 128");
    groups.push(window);
    both
}

/// The pages of a whole prompt.
pub fn group_pages(total_pages: usize, last_page_tokens: u32) -> Vec<GroupPages> {
    vec![GroupPages {
        group: GROUP,
        first_page: 0,
        total_pages: total_pages as u32,
        last_page_tokens,
        tokens_at: None,
    }]
}

pub fn config(role: &str, extra: &Value) -> Value {
    let mut config = json!({
        "role": role, "host": "127.0.0.1", "port": 0, "transports": ["shm", "tcp"], "layout": layout(64),
        "heartbeat_ms": 1000, "lease_ms": 20_000,
    });
    config
        .as_object_mut()
        .unwrap()
        .extend(extra.as_object().unwrap().clone());
    config
}

impl Rank {
    pub fn start(role: &str, extra: &Value) -> Self {
        Self::start_with(role, extra, None)
    }

    pub fn start_on_device(role: &str, extra: &Value) -> Self {
        Self::start_with(role, extra, Some(Memory::new(POOL_PAGES, PAGE)))
    }

    fn start_with(role: &str, extra: &Value, memory: Option<Arc<Memory>>) -> Self {
        let pool = match &memory {
            None => KvPool::create(POOL_PAGES, PAGE),
            Some(memory) => KvPool::create_on(POOL_PAGES, PAGE, memory.clone()),
        };
        let pool = Arc::new(pool.unwrap());
        let config = config(role, extra);
        let staged = ["gloo", "nccl"].into_iter().find(|name| {
            let transports = config["transports"].as_array().unwrap();
            transports.contains(&json!(name))
        });
        let pipes = Arc::new(Pipes::named(staged.unwrap_or("gloo")));
        let backend = staged.map(|_| pipes.clone() as Arc<dyn CommBackend>);
        let node = TransferNode::start_with(pool.clone(), &config.to_string(), backend).unwrap();
        Self {
            node,
            pool,
            memory,
            pipes,
            heard: std::cell::RefCell::default(),
        }
    }

    /// The end of `room`; events of other rooms are kept for their own call.
    pub fn end(&self, room: u64) -> NodeEvent {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let found = self
                .heard
                .borrow()
                .iter()
                .position(|event| event.room() == room);
            if let Some(i) = found {
                return self.heard.borrow_mut().remove(i);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                self.node.wait_for_event(left),
                "room {room} has no end after {TIMEOUT:?}: {} {}",
                self.node.rooms_json(Some(room)),
                self.node.stats_json()
            );
            let ends = self
                .node
                .poll_events(100)
                .into_iter()
                .filter(NodeEvent::is_end);
            self.heard.borrow_mut().extend(ends);
        }
    }

    /// Reason code of a failed, released or aborted room; "COMMITTED", "DONE", "ABORTED".
    pub fn end_code(&self, room: u64) -> String {
        match self.end(room) {
            NodeEvent::Committed { .. } => "COMMITTED".into(),
            NodeEvent::Failed { code, .. } => code.to_string(),
            NodeEvent::Aborted { .. } => "ABORTED".into(),
            NodeEvent::Announced { .. } | NodeEvent::Revoked { .. } => unreachable!("no end"),
            NodeEvent::Released { code, .. } => code.map_or("DONE".into(), |code| code.to_string()),
        }
    }

    pub fn stats(&self) -> Value {
        serde_json::from_str(&self.node.stats_json()).unwrap()
    }

    pub fn detail(&self, key: &str) -> Value {
        self.stats()["detail"][key].clone()
    }

    pub fn rooms(&self, room: u64) -> Value {
        serde_json::from_str(&self.node.rooms_json(Some(room))).unwrap()
    }

    /// State of a live room.
    pub fn state(&self, room: u64) -> Option<String> {
        self.rooms(room)["live"]
            .get(0)
            .map(|live| live["state"].as_str().unwrap().to_owned())
    }

    pub fn wait_state(&self, room: u64, state: &str) {
        until(&format!("room {room} is {state}"), || {
            self.state(room).as_deref() == Some(state)
        });
    }

    /// Nothing is left of any room, and the node is well. (A peer's last message may still be in
    /// flight when this is called.)
    pub fn assert_idle(&self) {
        let idle = |stats: &Value| {
            ["rooms_live", "opens_waiting", "pulls_in_flight"]
                .iter()
                .all(|key| stats["detail"][key] == 0)
        };
        let deadline = Instant::now() + Duration::from_secs(5);
        while !idle(&self.stats()) && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let stats = self.stats();
        assert!(
            idle(&stats),
            "something is left: {stats} {}",
            self.node.rooms_json(None)
        );
        assert_eq!(
            (
                &stats["healthy"],
                &stats["gauges"]["kv_leases"],
                &stats["detail"]["illegal"]
            ),
            (&json!(true), &json!(0.0), &json!(0)),
            "{stats}"
        );
        assert!(
            self.heard.borrow().is_empty() && self.node.poll_events(10).is_empty(),
            "an end that the test did not expect"
        );
    }

    /// Give `pages` a new owner and fill them with bytes that depend on `seed` and the index.
    pub fn write(&self, pages: &[u32], seed: u64) {
        self.pool.begin_write(pages);
        for (i, &page) in pages.iter().enumerate() {
            if let Some(memory) = &self.memory {
                memory.write(page, &bytes(seed, i));
                continue;
            }
            let at = self.pool.data_ptr().wrapping_add(page as usize * PAGE);
            for (word, offset) in (0..PAGE / 8).map(|w| (w, w * 8)) {
                // SAFETY: inside the pool; the test's thread owns these pages now.
                unsafe { at.add(offset).cast::<u64>().write(content(seed, i, word)) };
            }
        }
    }

    /// True if `pages` hold what `write` put into pages first.. with this seed.
    pub fn holds(&self, pages: &[u32], seed: u64, first: usize) -> bool {
        pages.iter().enumerate().all(|(i, &page)| {
            if let Some(memory) = &self.memory {
                return memory.read(page) == bytes(seed, first + i);
            }
            let at = self.pool.data_ptr().wrapping_add(page as usize * PAGE);
            // SAFETY: inside the pool; the room that wrote them is over.
            (0..PAGE / 8).all(|word| unsafe { at.add(word * 8).cast::<u64>().read() } == content(seed, first + i, word))
        })
    }

    /// Offer, write, publish in chunks and finish a prompt.
    pub fn prefill(&self, room: u64, pages: &[u32], chunk: usize) {
        self.node.offer_room(room, 0, HASH, DEADLINE_MS).unwrap();
        self.publish(room, pages, chunk);
        self.finish(room, pages.len());
    }

    pub fn publish(&self, room: u64, pages: &[u32], chunk: usize) {
        self.write(pages, room);
        for (i, part) in pages.chunks(chunk).enumerate() {
            self.node
                .publish_pages(room, GROUP, (i * chunk) as u32, &ids(part))
                .unwrap();
        }
    }

    pub fn finish(&self, room: u64, total: usize) {
        self.node
            .finish_prompt(room, group_pages(total, 3), room.to_le_bytes().to_vec())
            .unwrap();
    }
}

fn bytes(seed: u64, page: usize) -> Vec<u8> {
    (0..PAGE / 8)
        .flat_map(|word| content(seed, page, word).to_le_bytes())
        .collect()
}

fn content(seed: u64, page: usize, word: usize) -> u64 {
    (seed << 40 ^ (page as u64) << 20 ^ word as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

pub fn ids(pages: &[u32]) -> Vec<u8> {
    pages
        .iter()
        .flat_map(|&p| (p as i32).to_le_bytes())
        .collect()
}

pub fn span(first: u32, n: u32) -> Vec<u32> {
    (first..first + n).collect()
}

pub fn counter(rank: &Rank, name: &str) -> f64 {
    rank.stats()["counters"][name].as_f64().unwrap()
}

/// Wait for a condition that has no event of its own.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}: not after {TIMEOUT:?}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// Point between a copy and its second look at the generation where the copying node waits for the
/// test.
pub struct Hold {
    path: std::path::PathBuf,
}

impl Hold {
    pub fn new() -> Self {
        static MADE: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let nth = MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("baton-hold-{}-{nth}", std::process::id());
        Self {
            path: std::env::temp_dir().join(name),
        }
    }

    /// The `do` of a fault rule on `COPIED`.
    pub fn rule(&self) -> Value {
        json!({"hold": self.path})
    }

    pub fn wait_until_reached(&self) {
        let reached = self.path.with_extension("reached");
        until("the copy is made", || reached.exists());
    }

    pub fn release(&self) {
        std::fs::write(self.path.with_extension("go"), b"").unwrap();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        for extension in ["reached", "go"] {
            // absent if the test failed before
            let _ = std::fs::remove_file(self.path.with_extension(extension));
        }
    }
}

pub struct Pair {
    pub server: BootstrapServer,
    pub p: Rank,
    pub d: Rank,
}

impl Pair {
    pub fn new(transport: &str) -> Self {
        let one = json!({"transports": [transport]});
        Self::with(&one, &one)
    }

    pub fn with(p: &Value, d: &Value) -> Self {
        Self::of(Rank::start("prefill", p), Rank::start("decode", d))
    }

    pub fn of(p: Rank, d: Rank) -> Self {
        let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
        p.node
            .register_rank("127.0.0.1", server.port(), TIMEOUT)
            .unwrap();
        Self { server, p, d }
    }

    pub fn open(&self, room: u64) {
        self.open_with(room, HASH, DEADLINE_MS);
    }

    pub fn open_with(&self, room: u64, hash: &[u8], deadline_ms: u64) {
        self.d
            .node
            .open_room(
                room,
                0,
                "127.0.0.1",
                self.server.port(),
                0,
                hash,
                deadline_ms,
            )
            .unwrap();
    }

    pub fn grant(&self, room: u64, pages: &[u32]) {
        self.d
            .node
            .grant_pages(room, &[(GROUP, 0, &ids(pages), None)])
            .unwrap();
    }

    /// Transfers one room from grant to commit.
    pub fn transfer_room(&self, room: u64) {
        let (src, dst) = (span(0, 40), span(100, 40));
        self.open(room);
        self.grant(room, &dst);
        self.p.prefill(room, &src, 16);
        assert_eq!(self.d.end_code(room), "COMMITTED");
        assert_eq!(self.p.end_code(room), "DONE");
        assert!(self.d.holds(&dst, room, 0));
    }

    pub fn assert_idle(&self) {
        self.p.assert_idle();
        self.d.assert_idle();
    }
}

pub const TRANSPORTS: [&str; 3] = ["shm", "tcp", "gloo"];
