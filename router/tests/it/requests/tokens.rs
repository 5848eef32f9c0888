//! A router with a tokenizer: what it sends, and what it counts. What it makes of a prompt is
//! tested in src/tokens.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::*;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn demo() -> String {
    repository()
        .join("engine/baton/models/demo")
        .display()
        .to_string()
}

/// The demo model's golden cases.
fn golden() -> Value {
    let file = repository().join("tests/contract/golden/tokens/cases.json");
    let all: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    all["demo"].clone()
}

fn ours() -> Value {
    json!({"engine": "baton", "tokenizer_fingerprint": golden()["fingerprint"]})
}

async fn mock(info: Value) -> Mock {
    Mock::start(&[]).await.with_info(info)
}

#[tokio::test]
async fn ids_go_only_to_workers_that_would_have_made_the_same() {
    timed(async {
        let same = mock(ours()).await;
        let another = mock(json!({"engine": "baton", "tokenizer_fingerprint": "00"})).await;
        let foreign = mock(json!({"tokenizer_fingerprint": golden()["fingerprint"]})).await;
        let flags = ["--tokenizer-path", &demo(), "--forward-input-ids"];
        let router = Router::regular(&[&same, &another, &foreign], &flags).await;
        let case = &golden()["chats"][3];
        for _ in 0..3 {
            let reply = router.post("/v1/chat/completions", &case["body"]).await;
            assert_eq!(reply.status, 200);
        }
        let sent = case["body"].to_string();
        let with_ids = format!(
            "{},\"input_ids\":{},\"tokenizer_fingerprint\":{}}}",
            &sent[..sent.len() - 1],
            case["ids"],
            golden()["fingerprint"]
        );
        assert_eq!(same.seen()[0].raw, with_ids);
        assert_eq!(another.seen()[0].raw, sent);
        assert_eq!(foreign.seen()[0].raw, sent);
        let forwarded = "baton_router_input_ids_forwarded_total{role=\"regular\"}";
        assert_eq!(router.metric(forwarded).await, 1.0);
    })
    .await;
}

#[tokio::test]
async fn requests_of_other_apis_go_with_the_ids_of_their_conversation() {
    timed(async {
        let worker = mock(ours()).await;
        let flags = ["--tokenizer-path", &demo(), "--forward-input-ids"];
        let router = Router::regular(&[&worker], &flags).await;
        let hi = json!([{"role": "user", "content": "hi"}]);
        for (path, body) in [
            ("/v1/chat/completions", json!({"messages": hi})),
            ("/v1/responses", json!({"input": hi})),
            ("/v1/messages", json!({"messages": hi, "max_tokens": 4})),
        ] {
            assert_eq!(router.post(path, &body).await.status, 200);
        }
        let seen = worker.seen();
        let ids: Vec<_> = seen.iter().map(|seen| &seen.body["input_ids"]).collect();
        assert!(ids[0].is_array(), "{ids:?}");
        assert_eq!((ids[1], ids[2]), (ids[0], ids[0]));
        assert_eq!(seen[2].path, "/v1/messages");
        assert_eq!(
            seen[2].body["tokenizer_fingerprint"],
            golden()["fingerprint"]
        );
    })
    .await;
}

#[tokio::test]
async fn both_legs_get_them_with_and_without_ranks() {
    timed(async {
        let mut info = ours();
        info["dp_size"] = json!(2);
        let (p, d) = (mock(info.clone()).await, mock(info).await);
        for flags in [&[][..], &["--dp-aware"]] {
            let demo = demo();
            let flags = [&["--tokenizer-path", &demo, "--forward-input-ids"], flags].concat();
            let router = Router::pd(&[&p], &[&d], &flags).await;
            let text = &golden()["texts"][1];
            let body = json!({"prompt": text["text"], "model": "m"});
            assert_eq!(router.post("/v1/completions", &body).await.status, 200);
            for leg in [&p, &d] {
                let seen = leg.seen();
                let seen = &seen.last().unwrap().body;
                assert_eq!(seen["input_ids"], text["ids"]);
                assert_eq!(seen["prompt"], text["text"]);
                assert!(seen["bootstrap_room"].is_u64());
            }
        }
    })
    .await;
}

#[tokio::test]
async fn prompts_are_counted_and_matched_in_tokens() {
    timed(async {
        let case = golden()["texts"][3].clone();
        let tokens = case["ids"].as_array().unwrap().len();
        let usage = |prompt_tokens: usize| {
            Act::Json(json!({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": 1}}))
        };
        let one = Mock::start(&[usage(tokens), usage(tokens + 1)]).await;
        let flags = ["--policy", "cost", "--model-path", &demo(), "--block-size", "16"];
        let router = Router::regular(&[&one], &flags).await;
        for _ in 0..2 {
            router.post("/v1/completions", &json!({"prompt": case["text"]})).await;
        }
        router.no_load().await;
        assert_eq!(one.seen()[0].body, json!({"prompt": case["text"]}), "forwarding is off");
        for result in ["equal", "different"] {
            let counts = format!("baton_router_token_counts_total{{result=\"{result}\",role=\"regular\"}}");
            assert_eq!(router.metric(&counts).await, 1.0, "{result}");
        }
        let blocks = router.metric("baton_router_index_blocks").await;
        assert_eq!(blocks, (tokens / 16) as f64);
        // The ids themselves are the same prompt, tokenizer or not.
        let ids = json!({"prompt": case["ids"]});
        router.post("/v1/completions", &ids).await;
        assert_eq!(router.metric("baton_router_index_blocks").await, blocks);
        let took = "baton_router_tokenize_seconds_count{route=\"/v1/completions\"}";
        assert_eq!(router.metric(took).await, 2.0);
    })
    .await;
}

#[tokio::test]
async fn prompts_that_cannot_be_tokenized_are_sent_all_the_same() {
    timed(async {
        let worker = mock(ours()).await;
        let flags = ["--policy", "cost", "--model-path", &demo(), "--forward-input-ids"];
        let router = Router::regular(&[&worker], &flags).await;
        let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]});
        let long = json!({"messages": [{"role": "user", "content": "word ".repeat(300_000)}]});
        for body in [&image, &long] {
            assert_eq!(router.post("/v1/chat/completions", body).await.status, 200);
            assert_eq!(&worker.seen().last().unwrap().body, body);
        }
        // More prompts than an engine takes: it complains about what the client sent, not about ids
        // that we add.
        let many = json!({"prompt": vec!["a"; 1025]});
        assert_eq!(router.post("/v1/completions", &many).await.status, 200);
        assert_eq!(worker.seen().last().unwrap().body, many);
        for why in ["unread", "too_long"] {
            let fallbacks = format!("baton_router_tokenize_fallbacks_total{{reason=\"{why}\"}}");
            assert_eq!(router.metric(&fallbacks).await, 1.0, "{why}");
        }
    })
    .await;
}

#[tokio::test]
async fn without_a_tokenizer_there_the_router_does_not_start() {
    let text = refused_start(&["--model-path", "some-lab/some-model"]).await;
    assert!(
        text.contains("--model-path some-lab/some-model: not a directory"),
        "{text}"
    );
}
