//! How close a pull comes to the machine's limit: shm against a plain non-temporal copy, tcp
//! against a plain socket loop, and what several streams are worth.
//!
//! Two processes: this one decodes (D), a child prefills (P) and also serves the plain socket. Each
//! repetition runs all arms in a shuffled order, so that load of the machine falls on all of them;
//! a ratio is taken within its repetition. Only ratios are printed: a time measured beside other
//! work is no property of the code.
//!
//! `cargo bench -p baton-kv-transfer --bench transfer [-- --reps 15 --mib 256 --page-kib 64
//! --tcp-streams 4]`
#![allow(
    clippy::unwrap_used,
    reason = "a benchmark may stop at the first surprise"
)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transfer::protocol::{GroupId, GroupPages};
use kv_transfer::transport::checksum_copy;
use kv_transfer::{BootstrapServer, KvPool, NodeEvent, TransferNode};
use rand::seq::SliceRandom;
use serde_json::json;

const TIMEOUT: Duration = Duration::from_secs(60);
const WARM_UP: usize = 2;
const GROUP: GroupId = 0;

fn whole_prompt(pages: usize) -> Vec<GroupPages> {
    vec![GroupPages {
        group: GROUP,
        first_page: 0,
        total_pages: pages as u32,
        last_page_tokens: 1,
        tokens_at: None,
    }]
}

#[derive(Clone, Copy)]
struct Shape {
    reps: usize,
    pages: usize,
    page_bytes: usize,
    tcp_streams: usize,
}

impl Shape {
    fn parse(args: &[String]) -> Self {
        let get = |name: &str, default: usize| {
            let at = args.iter().position(|arg| arg == name);
            at.map_or(default, |i| args[i + 1].parse().expect("a number"))
        };
        let page_bytes = get("--page-kib", 64) << 10;
        let pages = (get("--mib", 256) << 20) / page_bytes;
        let tcp_streams = get("--tcp-streams", 4);
        Self {
            reps: get("--reps", 15),
            pages,
            page_bytes,
            tcp_streams,
        }
    }

    fn node(
        &self,
        pool: &Arc<KvPool>,
        role: &str,
        transports: &[&str],
        tcp_streams: usize,
    ) -> TransferNode {
        let group = json!({
            "id": GROUP, "kind": "full", "layers": [[0, 1]], "heads": [[0, 1]], "dims": "byte",
            "dtype": "uint8", "page_tokens": 1, "page_bytes": self.page_bytes, "retain": "all",
        });
        let config = json!({"role": role, "host": "127.0.0.1", "port": 0, "transports": transports, "tcp_streams": tcp_streams, "layout": {"groups": [group]}});
        TransferNode::start(pool.clone(), &config.to_string()).unwrap()
    }

    fn pool(&self) -> Arc<KvPool> {
        let pool = Arc::new(KvPool::create(self.pages, self.page_bytes).unwrap());
        // SAFETY: the whole of a pool that is not shared yet. Touching it takes the page faults out
        // of every arm.
        unsafe { std::ptr::write_bytes(pool.data_ptr(), 1, pool.nbytes()) };
        pool
    }

    /// Pages in an order without runs, as a cache that has been in use hands them out. The same in
    /// both processes.
    fn order(&self, step: usize) -> Vec<u32> {
        let step = (step..).find(|step| gcd(*step, self.pages) == 1).unwrap();
        (0..self.pages)
            .map(|i| (i * step % self.pages) as u32)
            .collect()
    }
}

/// Plain non-temporal copy without a hash: the baseline.
///
/// # Safety
/// As `checksum_copy::copy_hash`.
unsafe fn copy_plain(dst: *mut u8, src: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if checksum_copy::hash_kernel() == checksum_copy::HashKernel::Avx512
        && len.is_multiple_of(64)
        && dst.addr().is_multiple_of(64)
    {
        // SAFETY: AVX-512 was detected, dst is aligned, both ranges are the caller's promise.
        return unsafe { stream512(dst, src, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
}

/// # Safety
/// `src` readable and `dst` writable for `len`, a multiple of 64; `dst` 64-byte aligned.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn stream512(dst: *mut u8, src: *const u8, len: usize) {
    use std::arch::x86_64::*;
    /// As in `checksum_copy`.
    const AHEAD: usize = 2048;
    // SAFETY: offsets are multiples of 64 below len.
    unsafe {
        for at in (0..len).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at + AHEAD).cast());
            _mm512_stream_si512(dst.add(at).cast(), _mm512_loadu_si512(src.add(at).cast()));
        }
        _mm_sfence();
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn ids(pages: &[u32]) -> Vec<u8> {
    pages
        .iter()
        .flat_map(|&p| (p as i32).to_le_bytes())
        .collect()
}

fn page_ptr(pool: &KvPool, page: u32) -> *mut u8 {
    pool.data_ptr()
        .wrapping_add(page as usize * pool.page_bytes())
}

// ---- the child: prefill node and plain sender
// ------------------------------------------------------------------------

fn child(shape: Shape, bootstrap: u16) {
    let pool = shape.pool();
    let src = shape.order(1009);
    let node = shape.node(&pool, "prefill", &["shm", "tcp"], shape.tcp_streams);
    node.register_rank("127.0.0.1", bootstrap, TIMEOUT).unwrap();
    let plain = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", plain.local_addr().unwrap().port());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        match line.strip_prefix("room ") {
            Some(room) => {
                let room = room.parse().unwrap();
                node.offer_room(room, 0, b"", 60_000).unwrap();
                node.publish_pages(room, GROUP, 0, &ids(&src)).unwrap();
                node.finish_prompt(room, whole_prompt(shape.pages), vec![])
                    .unwrap();
            }
            None => send_plainly(&plain.accept().unwrap().0, &pool, &src),
        }
        node.poll_events(100);
    }
}

fn send_plainly(mut stream: &TcpStream, pool: &KvPool, src: &[u32]) {
    stream.set_nodelay(true).unwrap();
    let mut go = [0];
    stream.read_exact(&mut go).unwrap();
    for &page in src {
        // SAFETY: a page of our pool, which is not written any more.
        let bytes = unsafe { std::slice::from_raw_parts(page_ptr(pool, page), pool.page_bytes()) };
        stream.write_all(bytes).unwrap();
    }
}

// ---- the parent: decode node and arms
// --------------------------------------------------------------------------------

struct Bench {
    shape: Shape,
    server: BootstrapServer,
    child: Child,
    plain_port: u16,
    dst: Arc<KvPool>,
    dst_pages: Vec<u32>,
    local_src: Arc<KvPool>,
    src_pages: Vec<u32>,
    shm: TransferNode,
    tcp_streams: TransferNode,
    tcp: TransferNode,
    room: u64,
}

impl Bench {
    fn start(shape: Shape) -> Self {
        let server = BootstrapServer::start("127.0.0.1", 0, None).unwrap();
        let args: Vec<String> = std::env::args()
            .skip(1)
            .filter(|arg| arg != "--bench")
            .collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(args)
            .env("BATON_BENCH_CHILD", server.port().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let dst = shape.pool();
        Self {
            shape,
            server,
            child,
            plain_port: line.trim().parse().unwrap(),
            dst_pages: shape.order(2003),
            local_src: shape.pool(),
            src_pages: shape.order(1009),
            shm: shape.node(&dst, "decode", &["shm"], 1),
            tcp: shape.node(&dst, "decode", &["tcp"], 1),
            tcp_streams: shape.node(&dst, "decode", &["tcp"], shape.tcp_streams),
            dst,
            room: 0,
        }
    }

    fn say(&mut self, words: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{words}").unwrap();
    }

    fn run(&mut self, arm: usize) -> f64 {
        match arm {
            0 => self.pull("shm", |bench| &bench.shm),
            1 => self.copy(),
            2 => self.pull("tcp", |bench| &bench.tcp),
            3 => self.receive_plainly(),
            5 => self.pull("tcp", |bench| &bench.tcp_streams),
            _ => self.copy_with_hash(),
        }
    }

    /// From the grant to the commit of a prompt that is announced already.
    fn pull(&mut self, transport: &str, node: impl Fn(&Self) -> &TransferNode) -> f64 {
        self.room += 1;
        let room = self.room;
        self.say(&format!("room {room}"));
        let node = node(self);
        node.open_room(room, 0, "127.0.0.1", self.server.port(), 0, b"", 60_000)
            .unwrap();
        let deadline = Instant::now() + TIMEOUT;
        while !node.rooms_json(Some(room)).contains("FINAL") {
            assert!(Instant::now() < deadline, "{}", node.rooms_json(Some(room)));
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let start = Instant::now();
        node.grant_pages(room, &[(GROUP, 0, &ids(&self.dst_pages), None)])
            .unwrap();
        let end = loop {
            assert!(node.wait_for_event(TIMEOUT));
            if let Some(end) = node.poll_events(1).into_iter().find(NodeEvent::is_end) {
                break end;
            }
        };
        let took = start.elapsed().as_secs_f64();
        match end {
            NodeEvent::Committed { stats, .. } => {
                assert_eq!(
                    (stats.transport, stats.pages),
                    (transport, self.shape.pages as u64)
                );
            }
            other => panic!("{other:?}"),
        }
        took
    }

    fn copy(&mut self) -> f64 {
        let start = Instant::now();
        for (&src, &dst) in self.src_pages.iter().zip(&self.dst_pages) {
            // SAFETY: pages of two pools of this process; no room is alive.
            unsafe {
                copy_plain(
                    page_ptr(&self.dst, dst),
                    page_ptr(&self.local_src, src),
                    self.shape.page_bytes,
                );
            }
        }
        start.elapsed().as_secs_f64()
    }

    /// The copy loop of a shm pull without anything around it.
    fn copy_with_hash(&mut self) -> f64 {
        let start = Instant::now();
        for (&src, &dst) in self.src_pages.iter().zip(&self.dst_pages) {
            let (dst, src) = (page_ptr(&self.dst, dst), page_ptr(&self.local_src, src));
            // SAFETY: as in `copy`.
            std::hint::black_box(unsafe {
                checksum_copy::copy_hash(dst, src, self.shape.page_bytes)
            });
        }
        start.elapsed().as_secs_f64()
    }

    fn receive_plainly(&mut self) -> f64 {
        self.say("plain");
        let mut stream = TcpStream::connect(("127.0.0.1", self.plain_port)).unwrap();
        let start = Instant::now();
        stream.write_all(&[1]).unwrap();
        for &page in &self.dst_pages {
            // SAFETY: a page of our pool; no room is alive.
            let bytes = unsafe {
                std::slice::from_raw_parts_mut(page_ptr(&self.dst, page), self.shape.page_bytes)
            };
            stream.read_exact(bytes).unwrap();
        }
        start.elapsed().as_secs_f64()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// (first quartile, median, third quartile)
fn quartiles(mut values: Vec<f64>) -> (f64, f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |q: f64| values[((values.len() - 1) as f64 * q).round() as usize];
    (at(0.25), at(0.5), at(0.75))
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let shape = Shape::parse(&args);
    if let Ok(port) = std::env::var("BATON_BENCH_CHILD") {
        return child(shape, port.parse().unwrap());
    }
    let mut bench = Bench::start(shape);
    let mut times = vec![[0.0; 6]; shape.reps];
    for rep in 0..shape.reps + WARM_UP {
        let mut arms = [0, 1, 2, 3, 4, 5];
        arms.shuffle(&mut rand::rng());
        for arm in arms {
            let took = bench.run(arm);
            if rep >= WARM_UP {
                times[rep - WARM_UP][arm] = took;
            }
        }
    }
    println!(
        "{} pages of {} KiB in scattered order, both processes on this machine, kernel {:?}, n = \
         {}",
        shape.pages,
        shape.page_bytes >> 10,
        checksum_copy::hash_kernel(),
        shape.reps
    );
    let mut report = json!({"pages": shape.pages, "page_bytes": shape.page_bytes, "n": shape.reps});
    for (name, pull, plain, what) in [
        (
            "shm",
            0,
            1,
            "a verified shm pull, of a plain non-temporal copy",
        ),
        (
            "copy_with_hash",
            4,
            1,
            "copy with checksum in one process, of the plain copy",
        ),
        ("tcp", 2, 3, "a verified tcp pull, of a plain socket loop"),
        (
            "tcp_streams",
            5,
            2,
            "a tcp pull by several streams, of one by one stream",
        ),
    ] {
        let (low, median, high) = quartiles(times.iter().map(|t| t[plain] / t[pull]).collect());
        println!("{median:.2} [{low:.2}, {high:.2}]  {what}");
        report[name] = json!({"of_limit": median, "q1": low, "q3": high});
    }
    println!("{report}");
}
