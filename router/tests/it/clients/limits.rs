//! Limits of a client: heads, bodies, connections, time, HTTP/2 streams, requests per second.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{Act, Client, End, Mock, Router, TOKEN, chat, eventually, timed};

/// All that comes until the router closes.
pub async fn rest(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    let _ = stream.read_to_end(&mut all).await; // a reset is an end, too
    String::from_utf8_lossy(&all).into_owned()
}

pub async fn cuts(router: &Router, reason: &str) -> f64 {
    let line = format!("baton_router_client_cuts_total{{reason=\"{reason}\"}}");
    router.metric(&line).await
}

#[tokio::test]
async fn head_that_drips_is_cut_and_an_idle_connection_lives_longer() {
    timed(async {
        for first in ["P", "POST /v1/chat/completions HTTP/1.1\r\nx-a: "] {
            let flags = [
                "--header-read-timeout-secs",
                "1",
                "--idle-connection-timeout-secs",
                "600",
            ];
            let router = Router::regular(&[&Mock::start(&[]).await], &flags).await;
            let mut kept = Client::connect(router.running.addr).await;
            let path = "/health";
            let reply = kept.send(Method::GET, path, &[], "").await.read().await;
            assert_eq!(reply.status, 200);
            let mut slow = TcpStream::connect(router.running.addr).await.unwrap();
            slow.write_all(first.as_bytes()).await.unwrap();
            // It keeps dripping: what counts is the time since the first byte.
            let (mut read, mut write) = slow.into_split();
            let drip = tokio::spawn(async move {
                while first.len() > 1 && write.write_all(b"a").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                write
            });
            let mut all = Vec::new();
            let _ = read.read_to_end(&mut all).await;
            drip.abort();
            assert_eq!(cuts(&router, "head").await, 1.0, "{first}");
            let reply = kept.send(Method::GET, path, &[], "").await.read().await;
            assert_eq!(reply.status, 200, "the idle connection is still good");
        }
    })
    .await;
}

#[tokio::test]
async fn idle_connection_is_closed_in_its_time_and_no_cut() {
    timed(async {
        let flags = ["--idle-connection-timeout-secs", "1"];
        let router = Router::start(&flags).await;
        for first in ["", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
            let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
            stream.write_all(first.as_bytes()).await.unwrap();
            let answer = rest(&mut stream).await;
            assert_eq!(answer.is_empty(), first.is_empty(), "{answer}");
        }
        assert_eq!(cuts(&router, "head").await, 0.0);
    })
    .await;
}

#[tokio::test]
async fn body_that_drips_is_a_408() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &["--body-read-timeout-secs", "1"]).await;
        let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
        let head =
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n";
        stream.write_all(head.as_bytes()).await.unwrap();
        let (mut read, mut write) = stream.into_split();
        let drip = tokio::spawn(async move {
            while write.write_all(b" ").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        let mut all = Vec::new();
        let _ = read.read_to_end(&mut all).await;
        drip.abort();
        let answer = String::from_utf8_lossy(&all);
        assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
        assert!(answer.contains("\"code\":\"request_timeout\""), "{answer}");
        assert!(answer.contains("--body-read-timeout-secs"), "{answer}");
        assert_eq!(mock.count(), 0);
    })
    .await;
}

#[tokio::test]
async fn head_too_long_is_a_431() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &["--max-header-bytes", "300000"]).await;
        let mut client = Client::connect(router.running.addr).await;
        let long = "x".repeat(280_000);
        let headers = [("x-long", long.as_str())];
        let body = chat(false).to_string();
        let path = "/v1/chat/completions";
        let reply = client.send(Method::POST, path, &headers, &body).await;
        assert_eq!(reply.read().await.status, 200);
        assert_eq!(mock.seen()[0].headers["x-long"].len(), 280_000);
        let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
        let head = format!("GET /health HTTP/1.1\r\nx-long: {}", "x".repeat(310_000));
        let _ = stream.write_all(head.as_bytes()).await; // it may hang up before the last byte
        let answer = rest(&mut stream).await;
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 431"),
            "{answer}"
        );
        assert_eq!(mock.count(), 1);
    })
    .await;
}

// ---- HTTP/2 ----

pub struct H2(SendRequest<Full<Bytes>>);

impl H2 {
    pub async fn over<S>(stream: S) -> H2
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let (sender, driver) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(64 << 10)
            .handshake(TokioIo::new(stream))
            .await
            .unwrap();
        tokio::spawn(driver);
        H2(sender)
    }

    pub async fn connect(router: &Router) -> H2 {
        H2::over(TcpStream::connect(router.running.addr).await.unwrap()).await
    }

    /// Waits until the router has closed the connection.
    pub async fn closed(mut self) {
        while self.0.ready().await.is_ok() {
            tokio::task::yield_now().await;
        }
    }

    pub async fn get(&mut self, path: &str) -> String {
        self.get_from("localhost", path).await
    }

    /// `host`: the name by which the client knows the router.
    pub async fn get_from(&mut self, host: &str, path: &str) -> String {
        let request = Request::get(format!("http://{host}{path}"));
        let request = request.body(Full::default()).unwrap();
        text(self.0.send_request(request).await.unwrap()).await
    }

    pub async fn post(
        &mut self,
        body: &serde_json::Value,
    ) -> http::Response<hyper::body::Incoming> {
        let request = Request::post("http://localhost/v1/chat/completions")
            .body(Full::new(Bytes::from(body.to_string())))
            .unwrap();
        self.0.send_request(request).await.unwrap()
    }
}

pub async fn text(response: http::Response<hyper::body::Incoming>) -> String {
    let body = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(body.to_vec()).unwrap()
}

#[tokio::test]
async fn http2_by_prior_knowledge_serves_many_at_once() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate), Act::Answer]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let mut client = H2::connect(&router).await;
        let mut waiting = client.post(&chat(true)).await;
        assert_eq!(waiting.version(), http::Version::HTTP_2);
        waiting.frame().await.unwrap().unwrap();
        // Another one on the same connection does not wait behind it.
        let response = client.post(&chat(false)).await;
        assert_eq!(response.status(), 200);
        assert!(response.headers().contains_key("x-request-id"));
        assert_eq!(text(response).await, json!({"ok": true}).to_string());
        mock.release();
        assert!(text(waiting).await.ends_with("data: [DONE]\n\n"));
        let refused = client.post(&json!([])).await;
        assert_eq!(refused.status(), 400);
        assert!(text(refused).await.contains("invalid_json"));
        router.no_load().await;
        assert_eq!(mock.seen()[1].headers["host"], mock.addr.to_string());
    })
    .await;
}

#[tokio::test]
async fn http2_can_be_turned_off() {
    timed(async {
        let router = Router::start(&["--http2-max-streams", "0"]).await;
        let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
        stream
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .unwrap();
        let answer = rest(&mut stream).await;
        assert!(
            !answer.as_bytes().contains(&0),
            "no HTTP/2 frame: {answer:?}"
        );
        assert!(router.get("/health").await.status == 200);
    })
    .await;
}

#[tokio::test]
async fn http2_client_that_leaves_or_stalls_frees_its_worker() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Flood)]).await;
        let flags = ["--stream-body-stall-timeout-secs", "1"];
        let router = Router::regular(&[&mock], &flags).await;
        let mut client = H2::connect(&router).await;
        let left = client.post(&chat(true)).await;
        drop(left); // RST_STREAM; the connection stays
        eventually("the worker sees the client leave", || async {
            mock.cancelled() == 1
        })
        .await;
        // The stream's window fills and is not opened again, while the connection answers pings.
        let _unread = client.post(&chat(true)).await;
        eventually("the stalled stream is cut", || async {
            mock.cancelled() == 2
        })
        .await;
        assert_eq!(cuts(&router, "stalled").await, 1.0);
        assert!(mock.flooded() < 64 << 20, "{} bytes", mock.flooded());
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn http1_client_that_takes_nothing_is_cut() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Flood)]).await;
        let flags = ["--stream-body-stall-timeout-secs", "1"];
        let router = Router::regular(&[&mock], &flags).await;
        let mut client = Client::connect(router.running.addr).await;
        let _unread = client.chat(true).await;
        eventually("the kernel gives up on it", || async {
            mock.cancelled() == 1
        })
        .await;
        router.no_load().await;
    })
    .await;
}

// ---- rate ----

#[tokio::test]
async fn token_bucket_lets_more_through_with_time() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Hang)]).await;
        let flags = [
            "--max-concurrent-requests",
            "2",
            "--rate-limit-tokens-per-second",
            "20",
            "--queue-size",
            "1",
        ];
        let router = Router::regular(&[&mock], &flags).await;
        // None of them ever ends: without the rate the third would wait for ever.
        let mut running = Vec::new();
        for _ in 0..6 {
            let mut client = Client::connect(router.running.addr).await;
            let answering = client.chat(true).await;
            assert_eq!(answering.response.status(), 200);
            running.push((client, answering));
        }
        assert_eq!(mock.count(), 6);
    })
    .await;
}

// ---- predicted time to first token ----

/// 100 s of work, as far as anybody knows.
const BUSY: &str = "rank=0;reqs=9;tokens=9;age_ms=0;queued_tokens=1000000;started_tokens=0";

#[tokio::test]
async fn predicted_ttft_above_limit_returns_retry_after() {
    timed(async {
        let busy = Mock::start(&[]).await.with_load(BUSY);
        let flags = ["--policy", "cost", "--max-ttft-ms", "20000"];
        let router = Router::regular(&[&busy], &flags).await;
        // Nothing is known yet; the first answer reports the load.
        assert_eq!(router.chat().await.status, 200);
        for reply in [router.chat().await, router.chat_stream().await] {
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (503, "ttft_too_late")
            );
            let secs: u64 = reply.headers["retry-after"]
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            assert!((60..=81).contains(&secs), "{secs}");
            assert!(
                reply.text().contains("the limit is 20000 ms"),
                "{}",
                reply.text()
            );
        }
        assert_eq!(busy.count(), 1);
        let shed = "baton_router_shed_requests_total{role=\"regular\"}";
        assert_eq!(router.metric(shed).await, 2.0);
        // One worker without a queue is enough.
        let idle = Mock::start(&[]).await;
        let new = json!({"url": idle.url()});
        assert_eq!(router.post("/workers", &new).await.status, 202);
        router.all_ready(2).await;
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(idle.count(), 1);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn request_may_have_less_time_than_all() {
    timed(async {
        let busy = Mock::start(&[]).await.with_load(BUSY);
        let flags = ["--policy", "cost", "--max-ttft-ms", "3600000"];
        let router = Router::regular(&[&busy], &flags).await;
        let path = "/v1/chat/completions";
        let plain = chat(false).to_string();
        for _ in 0..2 {
            let reply = router.send(Method::POST, path, &[], &plain).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
        }
        for header in ["x-slo-ttft-ms", "x-deadline-remaining-ms"] {
            let reply = router
                .send(Method::POST, path, &[(header, "500")], &plain)
                .await;
            assert_eq!(reply.code(), "ttft_too_late", "{header}");
        }
        for (field, value, code) in [
            ("ttft_deadline_ms", json!(500), "ttft_too_late"),
            ("deadline_ms", json!(500.5), "ttft_too_late"),
            ("deadline_ms", json!(1e7), "no code"),
            ("deadline_ms", json!("soon"), "no code"), // the engine's to refuse
        ] {
            let mut body = chat(false);
            body[field] = value;
            let reply = router.post(path, &body).await;
            assert_eq!(reply.code(), code, "{body}");
        }
    })
    .await;
}

/// The answer to what is sent as it is; the router closes, or the answer is complete with its JSON
/// body.
async fn raw(router: &Router, bytes: &str) -> String {
    let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
    stream.write_all(bytes.as_bytes()).await.unwrap();
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    while !all.ends_with(b"}}") {
        match stream.read(&mut buffer).await {
            Ok(len @ 1..) => all.extend_from_slice(&buffer[..len]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&all).into_owned()
}

#[tokio::test]
async fn all_bodies_together_are_bounded_until_their_memory_is_released() {
    timed(async {
        let mock = Mock::start(&[Act::Hang, Act::Answer]).await;
        let flags = [
            "--max-payload-size",
            "1000",
            "--max-total-body-bytes",
            "1500",
        ];
        let router = Router::regular(&[&mock], &flags).await;
        let held = async || router.metric("baton_router_request_body_bytes").await;
        let body = json!({"messages": [{"role": "user", "content": "x".repeat(800)}]}).to_string();
        let mut client = Client::connect(router.running.addr).await;
        let path = "/v1/chat/completions";
        let waiting = tokio::spawn({
            let body = body.clone();
            async move { client.send(Method::POST, path, &[], &body).await }
        });
        eventually("the first request waits for its worker", || async {
            mock.count() == 1
        })
        .await;
        assert_eq!(held().await, body.len() as f64);
        // Refused from its head alone; without a length, when it has grown too long.
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n");
        let announced = format!("{head}content-length: {}\r\n\r\n", body.len());
        let chunked = format!(
            "{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}",
            body.len()
        );
        for request in [announced, chunked] {
            let answer = raw(&router, &request).await;
            assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
            assert!(answer.contains("\"code\":\"body_memory_full\""), "{answer}");
            assert!(answer.contains("retry-after: 1"), "{answer}");
        }
        assert_eq!(router.chat().await.status, 200, "a short one has room");
        waiting.abort();
        eventually("the memory is released", || async { held().await == 0.0 }).await;
        let reply = router.send(Method::POST, path, &[], &body).await;
        assert_eq!(reply.status, 200);
    })
    .await;
}

#[tokio::test]
async fn answers_that_are_read_whole_count_in_the_memory_of_bodies() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let flags = ["--max-payload-size", "1000"];
        let memory = ["--max-total-body-bytes", "100000"];
        let router = Router::regular(&[&mock], &[flags, memory].concat()).await;
        let text = |length: usize| json!({"data": "x".repeat(length)});
        mock.answers("/v1/embeddings", 200, text(6 << 20));
        mock.answers("/v1/rerank", 200, text(90_000));
        mock.answers("/v1/models", 200, text(200_000));
        let body = json!({"input": "x"});
        let reply = router.post("/v1/embeddings", &body).await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (503, "body_memory_full")
        );
        assert_eq!(router.get("/v1/models").await.status, 502);
        for _ in 0..3 {
            assert_eq!(router.post("/v1/rerank", &body).await.status, 200);
        }
        eventually("the memory is released", || async {
            router.metric("baton_router_request_body_bytes").await == 0.0
        })
        .await;
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn full_queue_refuses_before_the_body_dry_runs_and_passed_on_work_too() {
    timed(async {
        let mock = Mock::start(&[Act::Answer, Act::Hang]).await;
        let flags = ["--max-concurrent-requests", "1", "--queue-size", "0"];
        let router = Router::regular(&[&mock], &flags).await;
        let embed = json!({"input": "x"});
        let reply = router.post("/v1/embeddings", &embed).await;
        assert_eq!(
            (reply.status, &reply.headers["x-mock"]),
            (200, &"yes".parse().unwrap())
        );
        let line =
            "baton_router_requests_total{method=\"POST\",outcome=\"ok\",route=\"/v1/embeddings\"";
        assert_eq!(router.metric(line).await, 1.0);
        let mut client = Client::connect(router.running.addr).await;
        let waiting = tokio::spawn(async move {
            let body = json!({"input": "x"}).to_string();
            client
                .send(Method::POST, "/v1/embeddings", &[], &body)
                .await
        });
        eventually("it waits for its worker", || async { mock.count() == 2 }).await;
        let head =
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n";
        let answer = raw(&router, head).await;
        assert!(answer.starts_with("HTTP/1.1 429"), "{answer}");
        let headers = [("x-baton-explain", "dry-run")];
        let body = chat(false).to_string();
        for (path, body) in [
            ("/v1/chat/completions", body),
            ("/v1/embeddings", embed.to_string()),
        ] {
            let reply = router.send(Method::POST, path, &headers, &body).await;
            let code = reply.code();
            assert_eq!(
                (reply.status, code.as_str()),
                (429, "rate_limit_exceeded"),
                "{path}"
            );
        }
        assert_eq!(
            router.get("/health_generate").await.code(),
            "rate_limit_exceeded"
        );
        waiting.abort();
    })
    .await;
}

#[tokio::test]
async fn requests_no_handler_can_read_get_json_errors_with_an_id() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &["--max-header-bytes", "20000"]).await;
        let chat_path = "/v1/chat/completions";
        let long = "x".repeat(20_000);
        for (method, path, header, wanted) in [
            (
                "POST",
                chat_path,
                ("content-encoding", "gzip"),
                (415, "unsupported_media_type"),
            ),
            (
                "POST",
                chat_path,
                ("content-type", "multipart/form-data; boundary=x"),
                (415, "unsupported_media_type"),
            ),
            (
                "POST",
                chat_path,
                ("content-encoding", "identity"),
                (200, "no code"),
            ),
            (
                "POST",
                "/add_worker?worker_type=foo",
                ("content-type", "application/json"),
                (400, "invalid_value"),
            ),
            (
                "POST",
                "/remove_worker?url=%ff",
                ("content-type", "application/json"),
                (400, "invalid_value"),
            ),
            ("GET", "/workers/%ff", ("x-a", "b"), (400, "invalid_value")),
            (
                "POST",
                "/v1/requests/%ff/suspend",
                ("content-type", "application/json"),
                (400, "invalid_value"),
            ),
            (
                "GET",
                "/health",
                ("x-long", &long[..20_000]),
                (431, "head_too_large"),
            ),
        ] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let body = chat(false).to_string();
            let reply = router.send(method, path, &[header], &body).await;
            assert_eq!((reply.status, reply.code().as_str()), wanted, "{path}");
            assert!(reply.headers.contains_key("x-request-id"), "{path}");
        }
    })
    .await;
}

#[tokio::test]
async fn heads_beyond_the_limits_and_malformed_ones_get_json_errors_with_an_id() {
    const LIMIT: usize = 100_000;
    timed(async {
        let router = Router::start(&["--max-header-bytes", &LIMIT.to_string()]).await;
        let head = |path: &str, headers: &str| {
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n")
        };
        let many = |count: usize| head("/health", &"x-a: b\r\n".repeat(count - 2));
        let long = |bytes: usize| {
            let others = head("/health", "x-long: \r\n").len();
            let value = "x".repeat(bytes - others);
            head("/health", &format!("x-long: {value}\r\n"))
        };
        let malformed = (400, "malformed_head");
        let too_large = (431, "head_too_large");
        let good = (200, "");
        for (what, request, (status, code)) in [
            ("100 headers", many(100), good),
            ("101 headers", many(101), too_large),
            ("the longest head", long(LIMIT), good),
            ("a byte more", long(LIMIT + 1), too_large),
            (
                "a long target",
                head(&format!("/{}", "x".repeat(70_000)), ""),
                (414, "target_too_long"),
            ),
            ("no request", "GARBAGE\r\n\r\n".to_owned(), malformed),
            ("no header", head("/health", "no header\r\n"), malformed),
            ("two hosts", head("/health", "host: s\r\n"), malformed),
            (
                "no host",
                "GET /health HTTP/1.1\r\nconnection: close\r\n\r\n".to_owned(),
                malformed,
            ),
            (
                "no host in HTTP/1.0",
                "GET /health HTTP/1.0\r\n\r\n".to_owned(),
                good,
            ),
        ] {
            let answer = raw(&router, &request).await;
            let line = answer.lines().next().unwrap_or_default();
            assert!(line.contains(&format!(" {status} ")), "{what}: {answer}");
            assert!(answer.contains("x-request-id: "), "{what}: {answer}");
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert!(body.contains(code), "{what}: {answer}");
            let length = format!("content-length: {}", body.len());
            assert!(head.to_lowercase().contains(&length), "{what}: {answer}");
        }
        for code in ["malformed_head", "head_too_large", "target_too_long"] {
            let labels = format!("method=\"other\",outcome=\"{code}\",route=\"unmatched\"");
            let line = format!("baton_router_requests_total{{{labels}");
            assert!(router.metric(&line).await >= 1.0, "{code}");
        }
    })
    .await;
}
