//! Prompts that no worker takes are refused by the router, by what the workers announce.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::*;

/// Server info of a worker with these limits.
fn info(tokens: u64, chars: u64) -> Value {
    json!({"engine": "baton", "context_length": tokens, "max_prompt_chars": chars, "served_model_names": ["m"]})
}

async fn mock(info: Value) -> Mock {
    Mock::start(&[]).await.with_info(info)
}

fn text(chars: usize) -> Value {
    json!({"prompt": "x".repeat(chars)})
}

#[tokio::test]
async fn too_long_prompt_reaches_no_engine_of_a_pair() {
    timed(async {
        let (p, d) = (
            mock(info(6400, 64_000)).await,
            mock(info(3200, 32_000)).await,
        );
        let router = Router::pd(&[&p], &[&d], &["--max-payload-size", "50000000"]).await;
        let message = "this model's maximum context length is 3200 tokens here, but the prompt has \
            20000000 characters, at least 2000000 tokens; shorten it, or start the engine with a \
            larger --context-length or --max-total-tokens";
        let reply = router.post("/v1/completions", &text(20_000_000)).await;
        assert_eq!(
            (reply.status, &reply.json()["error"]),
            (
                400,
                &json!({
                    "message": message, "type": "invalid_request_error", "param": "prompt",
                    "code": "context_length_exceeded",
                })
            )
        );
        let chat = json!({"messages": [{"role": "user", "content": "x".repeat(400_000)}]});
        let ids = json!({"input_ids": vec![7; 5_000_000]});
        let rest = json!({"prompt": "a", "user": "x".repeat(20_000_000)});
        for (path, body, status, param) in [
            ("/v1/chat/completions", &chat, 400, json!("messages")),
            ("/generate", &ids, 400, json!("input_ids")),
            ("/v1/completions", &rest, 413, Value::Null),
        ] {
            let reply = router.post(path, body).await;
            assert_eq!(
                (reply.status, &reply.json()["error"]["param"]),
                (status, &param)
            );
        }
        assert_eq!((p.count(), d.count()), (0, 0));
        let refused =
            "baton_router_requests_total{method=\"POST\",outcome=\"context_length_exceeded\"";
        assert!(
            router.metric(refused).await >= 1.0,
            "{}",
            router.get("/metrics").await.text()
        );
        assert_eq!(
            router.post("/v1/completions", &text(32_000)).await.status,
            200
        );
        assert_eq!((p.count(), d.count()), (1, 1));
    })
    .await;
}

#[tokio::test]
async fn prompt_is_sent_where_some_worker_may_take_it() {
    timed(async {
        let (small, large) = (
            mock(info(3200, 32_000)).await,
            mock(info(6400, 64_000)).await,
        );
        for (others, chars, status) in [
            (vec![&large], 64_000, 200),
            (vec![&large], 64_001, 400),
            // SGLang announces its context, vLLM nothing.
            (
                vec![&mock(json!({"context_length": 3200})).await],
                100_000,
                200,
            ),
            (
                vec![&mock(json!({})).await.with_version("0.33")],
                100_000,
                200,
            ),
        ] {
            let workers = [vec![&small], others].concat();
            let router = Router::regular(&workers, &[]).await;
            let reply = router.post("/v1/completions", &text(chars)).await;
            assert_eq!(reply.status, status, "{}", reply.text());
        }
    })
    .await;
}

#[tokio::test]
async fn limit_is_that_of_the_workers_that_serve_the_model() {
    timed(async {
        let mut long = info(6400, 64_000);
        long["served_model_names"] = json!(["long"]);
        let (short, long) = (mock(info(3200, 32_000)).await, mock(long).await);
        let router = Router::regular(&[&short, &long], &[]).await;
        for (model, chars, status) in [
            ("m", 32_000, 200),
            ("m", 32_001, 400),
            ("long", 64_000, 200),
            ("long", 64_001, 400),
            ("other", 99_999, 404),
        ] {
            let body = json!({"model": model, "prompt": "x".repeat(chars)});
            let reply = router.post("/v1/completions", &body).await;
            assert_eq!(reply.status, status, "{model} {chars}: {}", reply.text());
        }
    })
    .await;
}

/// Bytes of the head of a request whose body does not come, and the status and error of the answer.
async fn answer_to_head(router: &Router, path: &str, length: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(router.running.addr).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: \
         {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer[9..12].parse().unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    let body: Value = serde_json::from_str(body).unwrap();
    (status, body["error"].clone())
}

#[tokio::test]
async fn body_far_above_the_longest_prompt_is_refused_before_it_is_read() {
    timed(async {
        let worker = mock(info(2048, 32_768)).await;
        let router = Router::regular(&[&worker], &[]).await;
        let path = "/v1/chat/completions";
        // Twelve bytes a character and a token id, eight a token of a resumed answer, 4 MiB of
        // rest.
        let longest = 32_768 * 12 + 2048 * 12 + 2048 * 8 + (4 << 20);
        let (status, error) = answer_to_head(&router, path, &format!("{}", longest + 1)).await;
        assert_eq!(
            (status, &error["code"]),
            (400, &json!("context_length_exceeded"))
        );
        let message = format!(
            "this model's maximum context length is 2048 tokens here, but the body is larger than \
            the {longest} bytes that the longest request needs; shorten it"
        );
        assert_eq!(error["message"], message);
        for path in ["/v1/completions", "/generate"] {
            let (status, error) = answer_to_head(&router, path, "33554433").await;
            assert_eq!(
                (status, &error["code"]),
                (413, &json!("payload_too_large")),
                "{path}"
            );
            let message = error["message"].as_str().unwrap();
            assert!(message.contains("33554432 bytes"), "{message}");
        }
        let bytes = "baton_router_request_body_bytes";
        assert_eq!((worker.count(), router.metric(bytes).await), (0, 0.0));
    })
    .await;
}

#[tokio::test]
async fn worker_without_a_limit_leaves_bodies_to_max_payload_size() {
    timed(async {
        let worker = mock(json!({})).await;
        let router = Router::regular(&[&worker], &["--max-payload-size", "60000000"]).await;
        let path = "/v1/chat/completions";
        let (status, error) = answer_to_head(&router, path, "60000001").await;
        assert_eq!((status, &error["code"]), (413, &json!("payload_too_large")));
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .contains("60000000 bytes"),
            "{error}"
        );
    })
    .await;
}
