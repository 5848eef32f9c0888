//! CPU that the router's process spends per request and per streamed event, in microseconds of user + system time.
//!
//! `cargo bench -p baton-router` starts the built router in front of mock workers that answer at once, and drives it in a
//! closed loop from this process. Only the router's own CPU is counted, so that the client and the mocks on the same
//! cores do not enter the number (their cache misses do). Arms are interleaved and repeated; the table shows the median
//! and the spread. Compare arms of one run only.

use std::convert::Infallible;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

const CONCURRENCY: usize = 16;
const REQUESTS: usize = 4000;
const ROUNDS: usize = 5;
const EVENTS: usize = 100;

struct Arm {
    name: &'static str,
    flags: &'static [&'static str],
    pairs: bool,
    prompt_bytes: usize,
    stream: bool,
}

const ARMS: [Arm; 9] = [
    Arm {
        name: "round_robin 200 B",
        flags: &["--policy", "round_robin"],
        pairs: false,
        prompt_bytes: 200,
        stream: false,
    },
    Arm {
        name: "round_robin 8 KB",
        flags: &["--policy", "round_robin"],
        pairs: false,
        prompt_bytes: 8 << 10,
        stream: false,
    },
    Arm {
        name: "cache_aware 200 B",
        flags: &["--policy", "cache_aware"],
        pairs: false,
        prompt_bytes: 200,
        stream: false,
    },
    Arm {
        name: "cache_aware 8 KB",
        flags: &["--policy", "cache_aware"],
        pairs: false,
        prompt_bytes: 8 << 10,
        stream: false,
    },
    Arm {
        name: "cost 8 KB",
        flags: &["--policy", "cost"],
        pairs: false,
        prompt_bytes: 8 << 10,
        stream: false,
    },
    Arm {
        name: "pair cost 64 KB",
        flags: &["--policy", "cost"],
        pairs: true,
        prompt_bytes: 64 << 10,
        stream: false,
    },
    Arm {
        name: "pair round_robin 200 B",
        flags: &["--policy", "round_robin"],
        pairs: true,
        prompt_bytes: 200,
        stream: false,
    },
    Arm {
        name: "pair round_robin 64 KB",
        flags: &["--policy", "round_robin"],
        pairs: true,
        prompt_bytes: 64 << 10,
        stream: false,
    },
    Arm {
        name: "stream, per event",
        flags: &["--policy", "round_robin"],
        pairs: false,
        prompt_bytes: 200,
        stream: true,
    },
];

fn main() {
    // `cargo test --benches` runs this too, with no --bench: then there is nothing to measure.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("threads");
    runtime.block_on(async {
        let mut results = vec![Vec::new(); ARMS.len()];
        for _ in 0..ROUNDS {
            for (arm, result) in ARMS.iter().zip(&mut results) {
                result.push(measure(arm).await);
            }
        }
        println!(
            "{:<26} {:>8} {:>8} {:>8}   µs of router CPU, n = {ROUNDS}",
            "arm", "median", "min", "max"
        );
        for (arm, mut result) in ARMS.iter().zip(results) {
            result.sort_by(f64::total_cmp);
            let (min, max) = (result[0], result[ROUNDS - 1]);
            println!(
                "{:<26} {:>8.1} {min:>8.1} {max:>8.1}",
                arm.name,
                result[ROUNDS / 2]
            );
        }
    });
}

/// One round of one arm: CPU microseconds per request, or per event.
async fn measure(arm: &Arm) -> f64 {
    let mut workers = Vec::new();
    for _ in 0..8 {
        workers.push(mock().await);
    }
    let mut flags: Vec<String> = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--log-level",
        "warn,baton_router::serve=info",
    ]
    .map(str::to_owned)
    .to_vec();
    flags.extend(arm.flags.iter().map(|flag| (*flag).to_owned()));
    if arm.pairs {
        flags.push("--pd-disaggregation".to_owned());
        for (i, addr) in workers.iter().enumerate() {
            let role = if i % 2 == 0 { "--prefill" } else { "--decode" };
            flags.extend([role.to_owned(), format!("http://{addr}")]);
        }
    } else {
        flags.push("--worker-urls".to_owned());
        flags.extend(workers.iter().map(|addr| format!("http://{addr}")));
    }
    let (router, addr) = start(&flags);
    until_ready(addr).await;
    let requests = if arm.stream { REQUESTS / 20 } else { REQUESTS };
    drive(addr, arm, requests / 10).await; // warm up
    let before = cpu_us(&router.0);
    drive(addr, arm, requests).await;
    let spent = cpu_us(&router.0) - before;
    let units = if arm.stream {
        requests * EVENTS
    } else {
        requests
    };
    spent / units as f64
}

async fn drive(addr: SocketAddr, arm: &Arm, requests: usize) {
    let clients = (0..CONCURRENCY).map(|client| {
        let (bytes, stream) = (arm.prompt_bytes, arm.stream);
        tokio::spawn(async move {
            let mut sender = connect(addr).await;
            for i in 0..requests / CONCURRENCY {
                let prompt = format!("{client:04}-{i:08}-{}", "lorem ipsum ".repeat(bytes / 12));
                let body = format!(
                    "{{\"model\":\"m\",\"stream\":{stream},\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}]}}"
                );
                let request = Request::post("/v1/chat/completions")
                    .header("host", "router")
                    .body(Full::new(Bytes::from(body)))
                    .expect("a request");
                sender.ready().await.expect("connected");
                let response = sender.send_request(request).await.expect("an answer");
                assert_eq!(response.status(), 200);
                response.into_body().collect().await.expect("a whole answer");
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("no panic");
    }
}

async fn connect(addr: SocketAddr) -> hyper::client::conn::http1::SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(addr).await.expect("it accepts");
    stream.set_nodelay(true).expect("an option");
    let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .expect("a connection");
    tokio::spawn(driver);
    sender
}

async fn until_ready(addr: SocketAddr) {
    let asking = async {
        loop {
            let request = Request::get("/readyz")
                .header("host", "router")
                .body(Full::default())
                .expect("a request");
            let response = connect(addr)
                .await
                .send_request(request)
                .await
                .expect("an answer");
            if response.status() == 200 {
                // All eight, not the first: probes of one start are milliseconds apart.
                return tokio::time::sleep(Duration::from_millis(300)).await;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), asking)
        .await
        .expect("ready in time");
}

struct Router(Child);

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(flags: &[String]) -> (Router, SocketAddr) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_baton-router"))
        .args(flags)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the router starts");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
    let line = lines
        .find_map(|line| line.ok().filter(|line| line.contains("listening on")))
        .expect("it listens");
    std::thread::spawn(move || lines.for_each(drop));
    let addr = line
        .split("http://")
        .nth(1)
        .and_then(|rest| rest.split(' ').next());
    (
        Router(child),
        addr.and_then(|addr| addr.parse().ok()).expect("an address"),
    )
}

/// User + system time of a process so far, in microseconds (/proc counts in 1/100 s).
fn cpu_us(child: &Child) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("it lives");
    let fields: Vec<&str> = stat
        .rsplit(") ")
        .next()
        .expect("fields")
        .split(' ')
        .collect();
    let ticks: f64 = [fields[11], fields[12]]
        .iter()
        .map(|n| n.parse::<f64>().expect("a number"))
        .sum();
    ticks * 10_000.0
}

async fn mock() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            let serve = service_fn(answer);
            tokio::spawn(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), serve),
            );
        }
    });
    addr
}

type MockBody = http_body_util::combinators::BoxBody<Bytes, Infallible>;

async fn answer(request: Request<Incoming>) -> Result<Response<MockBody>, hyper::Error> {
    let is_generation = request.uri().path().starts_with("/v1/");
    let body = request.into_body().collect().await?.to_bytes();
    let head = &body[..body.len().min(40)];
    if is_generation && head.windows(13).any(|w| w == b"\"stream\":true") {
        let mut response = Response::new(
            Events {
                left: EVENTS,
                turn: false,
            }
            .boxed(),
        );
        let kind = http::HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert("content-type", kind);
        return Ok(response);
    }
    let text = if is_generation {
        "{\"choices\":[{\"finish_reason\":\"stop\"}]}"
    } else {
        "{}"
    };
    Ok(Response::new(
        Full::new(Bytes::from_static(text.as_bytes())).boxed(),
    ))
}

/// `EVENTS` events, each written to the socket on its own.
struct Events {
    left: usize,
    turn: bool,
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        use std::task::Poll;
        self.turn = !self.turn;
        if self.turn {
            cx.waker().wake_by_ref(); // hyper flushes when it has to wait
            return Poll::Pending;
        }
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        let event = match self.left {
            0 => "data: [DONE]\n\n",
            1 => "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
            _ => {
                "data: {\"choices\":[{\"delta\":{\"content\":\" token\"},\"finish_reason\":null}]}\n\n"
            }
        };
        Poll::Ready(Some(Ok(http_body::Frame::data(Bytes::from_static(
            event.as_bytes(),
        )))))
    }
}
