//! The fault table: what clients and workers see when something breaks. docs/benchmarks.md shows it
//! beside the peers; `cargo test -p baton-router faults::table -- --nocapture` prints it.
//!
//! One prefill and one decode worker, two attempts: a row counts two attempts where the peers make
//! five.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{
    Act, Client, DONE, End, FINISH, Mock, Reply, Router, TOKEN, chat, eventually, timed,
};

const FLAGS: [&str; 4] = ["--retry-max-retries", "2", "--request-timeout-secs", "1"];

/// (requests that came, requests whose connection was closed before their end)
type Leg = (usize, usize);

struct Row {
    what: &'static str,
    prefill: Act,
    decode: Act,
    status: u16,
    /// Code of the JSON error, or of the stream's one error event; "" for an answer.
    code: &'static str,
    legs: [Leg; 2],
}

fn row(
    what: &'static str,
    prefill: Act,
    decode: Act,
    answer: (u16, &'static str),
    legs: [Leg; 2],
) -> Row {
    let (status, code) = answer;
    Row {
        what,
        prefill,
        decode,
        status,
        code,
        legs,
    }
}

fn rows() -> Vec<Row> {
    use Act::{Answer, Drop, Hang, Status, Stream};
    let broken = || Stream(vec![TOKEN], End::Break);
    let silent = || Stream(vec![TOKEN], End::Hang);
    vec![
        row("nothing", Answer, Answer, (200, ""), [(1, 0), (1, 0)]),
        row(
            "P drops the connection",
            Drop,
            Hang,
            (502, "upstream_error"),
            [(2, 0), (2, 2)],
        ),
        row(
            "D drops the connection",
            Hang,
            Drop,
            (502, "upstream_error"),
            [(2, 2), (2, 0)],
        ),
        row(
            "P answers 500, unexplained",
            Status(500, "x"),
            Hang,
            (500, "x"),
            [(2, 0), (2, 2)],
        ),
        row(
            "D answers 500, unexplained",
            Hang,
            Status(500, "x"),
            (500, "x"),
            [(2, 2), (2, 0)],
        ),
        row(
            "P answers 400",
            Status(400, "bad"),
            Hang,
            (400, "bad"),
            [(1, 0), (1, 1)],
        ),
        row(
            "D answers 400",
            Hang,
            Status(400, "bad"),
            (400, "bad"),
            [(1, 1), (1, 0)],
        ),
        row(
            "P answers 429",
            Status(429, "queue_full"),
            Hang,
            (429, "queue_full"),
            [(2, 0), (2, 2)],
        ),
        row(
            "D answers 429",
            Hang,
            Status(429, "queue_full"),
            (429, "queue_full"),
            [(2, 2), (2, 0)],
        ),
        row(
            "D says the transfer failed",
            Hang,
            Status(502, "kv_transfer_failed"),
            (502, "kv_transfer_failed"),
            [(2, 2), (2, 0)],
        ),
        row(
            "D says the room is taken",
            Hang,
            Status(409, "duplicate_room"),
            (502, "upstream_error"),
            [(2, 2), (2, 0)],
        ),
        row(
            "P and D are silent",
            Hang,
            Hang,
            (504, "timeout"),
            [(1, 1), (1, 1)],
        ),
        row(
            "D is silent",
            Answer,
            Hang,
            (504, "timeout"),
            [(1, 0), (1, 1)],
        ),
        row(
            "P never ends, D answers",
            Hang,
            Answer,
            (200, ""),
            [(1, 0), (1, 0)],
        ),
        row(
            "D breaks in the stream",
            Answer,
            broken(),
            (200, "upstream_error"),
            [(1, 0), (1, 0)],
        ),
        row(
            "D falls silent in the stream",
            Answer,
            silent(),
            (200, "timeout"),
            [(1, 0), (1, 1)],
        ),
        row(
            "D breaks behind the finish",
            Answer,
            Stream(vec![TOKEN, FINISH], End::Break),
            (200, ""),
            [(1, 0), (1, 0)],
        ),
        row(
            "D ends without [DONE]",
            Answer,
            Stream(vec![TOKEN, FINISH], End::Clean),
            (200, ""),
            [(1, 0), (1, 0)],
        ),
    ]
}

/// Exactly one end: an error object, an answer, or a stream with one [DONE] and at most one error
/// before it.
fn code_of(reply: &Reply, stream: bool) -> String {
    if reply.status != 200 {
        return reply.code();
    }
    if !stream {
        return String::new();
    }
    let events = reply.events();
    assert_eq!(
        events.iter().filter(|e| *e == "[DONE]").count(),
        1,
        "{events:?}"
    );
    let is_error = events.iter().any(|e| e.starts_with("{\"error\""));
    let is_finished = events
        .iter()
        .any(|e| e.contains("\"finish_reason\":\"stop\""));
    assert!(is_error != is_finished, "one terminal event: {events:?}");
    match is_error {
        true => reply.error_event(),
        false => String::new(),
    }
}

#[tokio::test]
async fn table() {
    println!("| fault | answer | P: posts, cancelled | D: posts, cancelled |\n|---|---|---|---|");
    for row in rows() {
        for stream in [false, true] {
            if !stream && matches!(row.decode, Act::Stream(..)) {
                continue;
            }
            timed(one(&row, stream)).await;
        }
        let [(p, p_cut), (d, d_cut)] = row.legs;
        println!(
            "| {} | {} {} | {p}, {p_cut} | {d}, {d_cut} |",
            row.what, row.status, row.code
        );
    }
}

async fn one(row: &Row, stream: bool) {
    let what = format!("{}, stream: {stream}", row.what);
    let p = Mock::start(std::slice::from_ref(&row.prefill)).await;
    let d = Mock::start(std::slice::from_ref(&row.decode)).await;
    let router = Router::pd(&[&p], &[&d], &FLAGS).await;
    let path = "/v1/chat/completions";
    let reply = router.post(path, &chat(stream)).await;
    let got = (reply.status, code_of(&reply, stream));
    assert_eq!(got, (row.status, row.code.to_owned()), "{what}");
    assert!(reply.headers.contains_key("x-request-id"), "{what}");
    let names_worker = reply.text().contains("127.0.0.1");
    assert!(!names_worker, "{what}: {}", reply.text());
    let lingers = matches!((&row.prefill, row.status), (Act::Hang, 200));
    if !lingers {
        router.no_load().await;
    }
    eventually(&what, || async {
        [(p.count(), p.cancelled()), (d.count(), d.cancelled())] == row.legs
    })
    .await;
    // Every attempt had a room of its own, the same on both sides.
    let rooms = |mock: &Mock| {
        let seen = mock.seen();
        let rooms = seen
            .iter()
            .map(|seen| seen.body["bootstrap_room"].as_u64().unwrap());
        rooms.collect::<Vec<_>>()
    };
    let mut distinct = rooms(&p);
    assert_eq!(distinct, rooms(&d), "{what}");
    distinct.dedup();
    assert_eq!(distinct.len(), p.count(), "{what}");
}

#[tokio::test]
async fn all_workers_down_is_reported_at_once() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &["--retry-max-retries", "2"]).await;
        p.stop().await;
        d.stop().await;
        let reply = router.chat().await;
        assert!(matches!(reply.status, 502 | 503), "{}", reply.text());
        assert!(matches!(
            reply.code().as_str(),
            "upstream_error" | "no_worker"
        ));
        assert!(!reply.text().contains("127.0.0.1"), "{}", reply.text());
        eventually("no worker is left", || async {
            let reply = router.chat_stream().await;
            (reply.status, reply.code().as_str()) == (503, "no_worker")
                && reply.headers.contains_key("retry-after")
        })
        .await;
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn unreachable_workers_are_not_named_to_clients() {
    timed(async {
        let worker = Mock::start(&[]).await;
        let router = Router::regular(&[&worker], &["--disable-health-check"]).await;
        worker.stop().await;
        for path in ["/v1/models", "/get_model_info"] {
            let reply = router.get(path).await;
            let text = reply.text();
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (502, "upstream_error"),
                "{path}: {text}"
            );
            assert!(text.contains("a regular worker could not be "), "{text}");
            assert!(!text.contains("127.0.0.1"), "{path}: {text}");
        }
    })
    .await;
}

#[tokio::test]
async fn body_of_ten_megabytes_passes_unchanged() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let text = "é\\u00e9\\n ".repeat(1 << 20);
        let body = format!("{{\"prompt\": \"{text}\", \"x\" : 1.0e0}}");
        assert!(body.len() > 10 << 20);
        let reply = router
            .send(Method::POST, "/v1/completions", &[], &body)
            .await;
        assert_eq!(reply.status, 200);
        // D may have answered before P has read its copy.
        eventually("P has read the body", || async { p.count() == 1 }).await;
        let (p, d) = (p.seen(), d.seen());
        assert!(p[0].raw.starts_with(body.trim_end_matches('}').as_bytes()));
        assert_eq!(p[0].raw, d[0].raw);
    })
    .await;
}

#[tokio::test]
async fn invalid_requests_reach_no_worker() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &["--max-payload-size", "1000"]).await;
        let long = format!("{{\"prompt\": \"{}\"}}", "x".repeat(1000));
        for (body, status, code) in [
            ("", 400, "invalid_json"),
            ("{", 400, "invalid_json"),
            ("{\"prompt\": }", 400, "invalid_json"),
            ("{\"prompt\": \"x\"} trailing", 400, "invalid_json"),
            ("[]", 400, "invalid_json"),
            ("\"text\"", 400, "invalid_json"),
            ("{\"prompt\": \"\u{1}\"}", 400, "invalid_json"),
            (
                "{\"prompt\": [\"a\", \"b\"], \"n\": 4097}",
                400,
                "invalid_value",
            ),
            (&long, 413, "payload_too_large"),
        ] {
            let reply = router
                .send(Method::POST, "/v1/completions", &[], body)
                .await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (status, code),
                "{body}"
            );
        }
        // Half a body, and a client that is gone: nothing to answer, nothing to count as running.
        let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
        let half = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: \
             100\r\n\r\n{\"prompt\"";
        stream.write_all(half.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 400"),
            "{answer}"
        );
        assert_eq!((p.count(), d.count()), (0, 0));
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn client_that_closes_its_connection_or_its_sending_side_has_left() {
    timed(async {
        let mock = Mock::start(&[Act::Hang]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let body = chat(false).to_string();
        let request = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: \
             {}\r\n\r\n{body}",
            body.len()
        );
        for count in 1..=2 {
            let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            eventually("its worker has it", || async { mock.count() == count }).await;
            if count == 2 {
                stream.shutdown().await.unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).await.unwrap();
                assert_eq!(answer, "");
            }
            drop(stream);
            eventually("its worker sees the client leave", || async {
                mock.cancelled() == count
            })
            .await;
        }
        router.no_load().await;
    })
    .await;
}

/// SGLang issue 9726 and its like: workers close idle connections (uvicorn after 5 s), and the next
/// pair met dead ones.
#[tokio::test]
async fn connections_that_workers_closed_meanwhile_cost_no_request() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let flags = ["--disable-retries", "--health-check-interval-secs", "600"];
        let router = Router::pd(&[&p], &[&d], &flags).await;
        assert_eq!(router.chat().await.status, 200);
        router.no_load().await;
        let (p, d) = (p.stop().await, d.stop().await);
        let (p, d) = (Mock::at(p, &[]).await, Mock::at(d, &[]).await);
        assert_eq!(router.chat().await.status, 200);
        assert_eq!((p.count(), d.count()), (1, 1));
    })
    .await;
}

/// sglang issue 40125: two requests with one room took both schedulers down.
#[tokio::test]
async fn rooms_of_clients_are_replaced_by_distinct_ones() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let body = json!({"prompt": "x", "bootstrap_room": 7, "bootstrap_host": "evil"});
        for _ in 0..20 {
            assert_eq!(router.post("/v1/completions", &body).await.status, 200);
        }
        let mut rooms: Vec<u64> = d
            .seen()
            .iter()
            .filter_map(|s| s.body["bootstrap_room"].as_u64())
            .collect();
        rooms.sort_unstable();
        rooms.dedup();
        assert_eq!(rooms.len(), 20);
        assert!(!rooms.contains(&7));
    })
    .await;
}

#[tokio::test]
async fn client_that_leaves_cancels_both_legs_whatever_it_asked_for() {
    timed(async {
        for (stream, decode) in [
            (false, Act::Hang),
            (true, Act::Hang),
            (true, Act::Stream(vec![TOKEN], End::Hang)),
        ] {
            let p = Mock::start(&[Act::Hang]).await;
            let d = Mock::start(std::slice::from_ref(&decode)).await;
            let router = Router::pd(&[&p], &[&d], &[]).await;
            let addr = router.running.addr;
            let client = tokio::spawn(async move {
                let mut client = Client::connect(addr).await;
                let _answer = client.chat(stream).await.read().await;
            });
            eventually("both have it", || async {
                (p.count(), d.count()) == (1, 1)
            })
            .await;
            client.abort();
            eventually("both legs are cancelled", || async {
                (p.cancelled(), d.cancelled()) == (1, 1)
            })
            .await;
            router.no_load().await;
            assert_eq!(
                (p.count(), d.count()),
                (1, 1),
                "nothing is run again without a client"
            );
        }
    })
    .await;
}

/// A stream that is not read may fill the sockets and nothing else, of both legs.
#[tokio::test]
async fn slow_reader_gets_all_of_its_stream() {
    timed(async {
        const EVENTS: usize = 4000;
        let pieces = std::iter::repeat_n(TOKEN, EVENTS)
            .chain([FINISH, DONE])
            .collect();
        let d = Mock::start(&[Act::Stream(pieces, End::Clean)]).await;
        let p = Mock::start(&[]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        let mut text = String::new();
        while let Some(piece) = answering.piece().await {
            text.push_str(std::str::from_utf8(&piece).unwrap());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(text.matches("\"content\":\"a\"").count(), EVENTS);
        assert!(text.ends_with(DONE));
        router.no_load().await;
    })
    .await;
}
