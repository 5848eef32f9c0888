//! CPU that a router's process spends per request and per streamed event, in microseconds of user +
//! system time.
//!
//! ```text
//! cargo bench -p baton-router --bench cpu_per_request
//! cargo bench -p baton-router --bench cpu_per_request -- --fronts baton,sglang-router,smg,nginx --rounds 3
//! cargo bench -p baton-router --bench cpu_per_request -- --memory
//! ```
//!
//! The installed router (`baton router`, which NATIVE_PROFILE=dist make setup builds as the wheel
//! has it), the native program, peers and nginx stand in front of 8 mock workers that answer at
//! once, and are driven in a closed loop from this process. Only the front's own CPU is counted, so
//! that the client and the mocks on the same cores do not enter the number (their cache misses do).
//! Fronts are interleaved and repeated; tables show the median and the spread. Compare numbers of
//! one run only. With --memory: resident memory after so many distinct prompts of 8 KB.

mod front;
mod mock;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use front::{Front, Kind};
use mock::{EVENTS, PACED};

const WORKERS: usize = 8;
const CONCURRENCY: usize = 16;
const STREAMS: usize = 96;
const PACED_STREAMS: usize = 256;
const PACED_CONCURRENCY: usize = 128;
const FIRST_EVENTS: usize = 100;
const READY: Duration = Duration::from_secs(90);
/// A router is taken to know all its workers after so many good answers in a row.
const GOOD_ANSWERS: usize = 4 * WORKERS;
const SETTLE: Duration = Duration::from_millis(500);
const MEMORY_STEPS: [usize; 4] = [0, 10_000, 30_000, 50_000];

/// Name, bytes of the prompt, requests.
const SIZES: [(&str, usize, usize); 3] = [
    ("200 B", 200, 3000),
    ("8 KB", 8 << 10, 3000),
    ("64 KB", 64 << 10, 1000),
];

type Sender = SendRequest<Full<Bytes>>;

/// Form of the workers' answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Json,
    /// Events as fast as the machine allows.
    Events,
    /// An event per step of an engine.
    Paced,
}

/// (front, policy, workers) and (column) → a number per round.
type Results = BTreeMap<(usize, &'static str), Vec<f64>>;

#[derive(Debug, Clone, Copy)]
struct Setup {
    kind: Kind,
    policy: &'static str,
    pairs: bool,
}

struct Options {
    fronts: Vec<Kind>,
    rounds: usize,
    memory: bool,
}

fn main() {
    // `cargo test --benches` runs this too, with no --bench: then there is nothing to measure.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let options = Options::read().unwrap_or_else(|mistake| {
        eprintln!("{mistake}");
        std::process::exit(2);
    });
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("threads");
    runtime.block_on(async {
        if options.memory {
            memory(&options).await;
        } else {
            cpu(&options).await;
        }
    });
}

impl Options {
    fn read() -> Result<Options, String> {
        let mut options = Options {
            fronts: vec![Kind::Baton],
            rounds: 3,
            memory: false,
        };
        let mut args = std::env::args().skip(1);
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--bench" => {}
                "--memory" => options.memory = true,
                "--rounds" => {
                    let given = args.next().and_then(|text| text.parse().ok());
                    options.rounds = given
                        .filter(|n| *n > 0)
                        .ok_or("--rounds: give a number above 0")?;
                }
                "--fronts" => {
                    let given = args.next().unwrap_or_default();
                    options.fronts = given.split(',').map(kind_of).collect::<Result<_, _>>()?;
                }
                other => {
                    return Err(format!(
                        "{other}: there are --fronts, --rounds and --memory"
                    ));
                }
            }
        }
        match options.fronts.iter().find_map(|kind| kind.missing()) {
            Some(missing) => Err(missing),
            None => Ok(options),
        }
    }

    fn setups(&self, is_wanted: impl Fn(&Setup) -> bool) -> Vec<Setup> {
        let mut setups = Vec::new();
        for pairs in [false, true] {
            for &kind in &self.fronts {
                let policies = kind.policies().iter();
                setups.extend(policies.map(|&policy| Setup {
                    kind,
                    policy,
                    pairs,
                }));
            }
        }
        // nginx cannot send a request to two workers.
        setups.retain(|setup| is_wanted(setup) && !(setup.pairs && setup.kind == Kind::Nginx));
        setups
    }
}

fn kind_of(name: &str) -> Result<Kind, String> {
    let names = Kind::ALL.map(Kind::name).join(", ");
    let found = Kind::ALL.into_iter().find(|kind| kind.name() == name);
    found.ok_or_else(|| format!("--fronts: there is no {name:?}; there are {names}"))
}

async fn cpu(options: &Options) {
    let setups = options.setups(|_| true);
    let mut results = Results::new();
    for _ in 0..options.rounds {
        for (at, setup) in setups.iter().enumerate() {
            for (column, value) in measure(*setup).await {
                results.entry((at, column)).or_default().push(value);
            }
        }
    }
    let columns: Vec<&str> = SIZES
        .iter()
        .map(|size| size.0)
        .chain(["per event", "per paced event", "first event"])
        .collect();
    println!(
        "median [min, max] of {} rounds; µs of the front's CPU per request ({CONCURRENCY} at once, {WORKERS} workers or 4 + 4) \
         and per event of {EVENTS}, paced: one in 20 ms on each of {PACED_CONCURRENCY} streams; first event: ms until the first one of a stream, less the worker's own, medians",
        options.rounds
    );
    println!("| front | workers | {} |", columns.join(" | "));
    println!("|---|---{}|", "|---".repeat(columns.len()));
    for (at, setup) in setups.iter().enumerate() {
        let cells: Vec<String> = columns
            .iter()
            .map(|column| cell(&results[&(at, *column)]))
            .collect();
        let workers = if setup.pairs { "P + D" } else { "regular" };
        println!(
            "| {} {} | {workers} | {} |",
            setup.kind.name(),
            setup.policy,
            cells.join(" | ")
        );
    }
}

fn cell(values: &[f64]) -> String {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let digits = if sorted[sorted.len() / 2] < 10.0 {
        2
    } else {
        0
    };
    let [mid, min, max] = [
        sorted[sorted.len() / 2],
        sorted[0],
        sorted[sorted.len() - 1],
    ];
    format!("{mid:.digits$} [{min:.digits$}, {max:.digits$}]")
}

/// One round of one front: a number per column.
async fn measure(setup: Setup) -> Vec<(&'static str, f64)> {
    let (front, workers) = start(setup).await;
    let mut found = Vec::new();
    for (name, bytes, requests) in SIZES {
        drive(front.addr, 0, requests / 10, bytes, Answer::Json).await; // warm up
        let before = front.cpu_us();
        drive(front.addr, 1, requests, bytes, Answer::Json).await;
        found.push((name, (front.cpu_us() - before) / requests as f64));
    }
    for (name, streams, answer) in [
        ("per event", STREAMS, Answer::Events),
        ("per paced event", PACED_STREAMS, Answer::Paced),
    ] {
        drive(front.addr, 0, CONCURRENCY, 200, Answer::Events).await;
        let before = front.cpu_us();
        drive(front.addr, 1, streams, 200, answer).await;
        let events = (streams * EVENTS) as f64;
        found.push((name, (front.cpu_us() - before) / events));
    }
    found.push(("first event", first_event_ms(front.addr, workers[0]).await));
    found
}

async fn memory(options: &Options) {
    println!("resident memory [MiB] after so many distinct prompts of 8 KB, regular workers");
    println!(
        "| front | {} |",
        MEMORY_STEPS.map(|step| step.to_string()).join(" | ")
    );
    println!("|---{}|", "|---".repeat(MEMORY_STEPS.len()));
    for setup in options.setups(|setup| !setup.pairs) {
        let (front, _) = start(setup).await;
        let mut sent = 0;
        let mut cells = Vec::new();
        for step in MEMORY_STEPS {
            drive(front.addr, step, step - sent, 8 << 10, Answer::Json).await;
            sent = step;
            cells.push(format!("{:.0}", front.rss_mib()));
        }
        println!(
            "| {} {} | {} |",
            setup.kind.name(),
            setup.policy,
            cells.join(" | ")
        );
    }
}

/// A front that serves, and its workers.
async fn start(setup: Setup) -> (Front, Vec<SocketAddr>) {
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        workers.push(mock::start().await);
    }
    let mut front = Front::start(setup.kind, setup.policy, setup.pairs, &workers);
    let deadline = Instant::now() + READY;
    let mut good = 0;
    while good < GOOD_ANSWERS {
        assert!(!front.has_ended(), "{setup:?} ended");
        assert!(Instant::now() < deadline, "{setup:?} did not serve in time");
        let answered = match try_connect(front.addr).await {
            Some(mut sender) => sender
                .send_request(ask("ready", 200, false))
                .await
                .is_ok_and(|r| r.status() == 200),
            None => false,
        };
        good = if answered { good + 1 } else { 0 };
        if !answered {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    tokio::time::sleep(SETTLE).await;
    (front, workers)
}

fn ask(name: &str, bytes: usize, stream: bool) -> Request<Full<Bytes>> {
    let prompt = format!("{name}-{}", "lorem ipsum ".repeat(bytes / 12));
    let body = format!(
        "{{\"model\":\"m\",\"stream\":{stream},\"messages\":[{{\"role\":\"user\",\"content\":\"{prompt}\"}}]}}"
    );
    Request::post("/v1/chat/completions")
        .header("host", "localhost")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .expect("a request")
}

/// `requests` distinct ones on kept-alive connections, one at a time on each.
async fn drive(addr: SocketAddr, part: usize, requests: usize, bytes: usize, answer: Answer) {
    let at_once = match answer {
        Answer::Paced => PACED_CONCURRENCY,
        Answer::Json | Answer::Events => CONCURRENCY,
    };
    let pace = if answer == Answer::Paced { PACED } else { "" };
    let clients = (0..at_once).map(|client| {
        tokio::spawn(async move {
            let mut sender = try_connect(addr).await.expect("a connection");
            for i in 0..requests / at_once {
                sender.ready().await.expect("connected");
                let request = ask(
                    &format!("{pace}{bytes}-{part}-{client:04}-{i:08}"),
                    bytes,
                    answer != Answer::Json,
                );
                let response = sender.send_request(request).await.expect("an answer");
                assert_eq!(response.status(), 200);
                response
                    .into_body()
                    .collect()
                    .await
                    .expect("a whole answer");
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("no panic");
    }
}

/// Median time to the first event on a kept-alive connection through `front`, less that of
/// `worker`; one at a time, in turn.
async fn first_event_ms(front: SocketAddr, worker: SocketAddr) -> f64 {
    let mut through = try_connect(front).await.expect("a connection");
    let mut direct = try_connect(worker).await.expect("a connection");
    let (mut far, mut near) = (Vec::new(), Vec::new());
    for i in 0..FIRST_EVENTS {
        far.push(one_first_event(&mut through, i).await);
        near.push(one_first_event(&mut direct, i).await);
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    median(&mut far) - median(&mut near)
}

async fn one_first_event(sender: &mut Sender, number: usize) -> f64 {
    sender.ready().await.expect("connected");
    let request = ask(&format!("first-{number}"), 200, true);
    let began = Instant::now();
    let mut body = sender
        .send_request(request)
        .await
        .expect("an answer")
        .into_body();
    body.frame().await.expect("an event").expect("a whole one");
    let took = began.elapsed().as_secs_f64() * 1e3;
    body.collect().await.expect("a whole answer");
    took
}

async fn try_connect(addr: SocketAddr) -> Option<Sender> {
    let stream = TcpStream::connect(addr).await.ok()?;
    stream.set_nodelay(true).ok()?;
    let (sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .ok()?;
    tokio::spawn(driver);
    Some(sender)
}
