//! Policies in the running router: what reaches them, and what they show. How they decide is tested
//! in router-core.

use http::Method;
use serde_json::{Value, json};

use crate::support::*;

fn turn(text: &str, stream: bool) -> Value {
    json!({"messages": [{"role": "user", "content": text}], "stream": stream})
}

fn answer(prompt_tokens: u32, cached_tokens: u32) -> Act {
    Act::Json(json!({
        "choices": [{"finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        },
    }))
}

/// Requests with `word` in them.
fn with(mock: &Mock, word: &str) -> usize {
    let seen = mock.seen();
    seen.iter()
        .filter(|s| s.body.to_string().contains(word))
        .count()
}

#[tokio::test]
async fn cost_keeps_conversations_together_and_learns_from_usage() {
    timed(async {
        let acts = [answer(1000, 500)];
        let (a, b) = (Mock::start(&acts).await, Mock::start(&acts).await);
        let router = Router::regular(&[&a, &b], &["--policy", "cost"]).await;
        for opening in ["first", "second"] {
            for turns in 1..5 {
                let text = format!("{opening} {}", "and so on ".repeat(60 * turns));
                let reply = router.post("/v1/chat/completions", &turn(&text, false)).await;
                assert_eq!(reply.status, 200);
            }
        }
        for opening in ["first", "second"] {
            let counts = [with(&a, opening), with(&b, opening)];
            assert!(counts == [4, 0] || counts == [0, 4], "{opening}: {counts:?}");
        }
        router.no_load().await;
        let role = "{role=\"regular\"}";
        let counted = format!("baton_router_counted_prompt_tokens_total{role}");
        assert_eq!(router.metric(&counted).await, 8_000.0);
        let reported = format!("baton_router_reported_cached_tokens_total{role}");
        assert_eq!(router.metric(&reported).await, 4_000.0);
        let why = |why: &str| {
            format!("baton_router_policy_decisions_total{{policy=\"cost\",role=\"regular\",why=\"{why}\"}}")
        };
        assert_eq!(router.metric(&why("best_holder")).await, 6.0);
        assert_eq!(router.metric(&why("no_prefix")).await, 2.0);
        assert!(router.metric("baton_router_index_blocks").await > 0.0);
    })
    .await;
}

#[tokio::test]
async fn cost_compares_forecasts_with_first_tokens_of_streams_and_prefills() {
    timed(async {
        let mocks = [Mock::start(&[]).await, Mock::start(&[]).await];
        let router = Router::regular(&[&mocks[0], &mocks[1]], &["--policy", "cost"]).await;
        router.post("/v1/chat/completions", &turn("hi", true)).await;
        router
            .post("/v1/chat/completions", &turn("hi", false))
            .await;
        router.no_load().await;
        let observed = "baton_router_observed_ttft_seconds_count";
        let streamed = format!("{observed}{{role=\"regular\"}}");
        assert_eq!(
            router.metric(&streamed).await,
            1.0,
            "the other shows no first token"
        );

        let (p, d) = ([answer(50, 40)], [Act::Answer]);
        let ps = [Mock::start(&p).await, Mock::start(&p).await];
        let ds = [Mock::start(&d).await, Mock::start(&d).await];
        let router = Router::pd(&[&ps[0], &ps[1]], &[&ds[0], &ds[1]], &["--policy", "cost"]).await;
        for _ in 0..3 {
            assert_eq!(router.chat().await.status, 200);
        }
        router.no_load().await;
        let prefilled = format!("{observed}{{role=\"prefill\"}}");
        assert_eq!(router.metric(&prefilled).await, 3.0);
        let counted = "baton_router_counted_prompt_tokens_total{role=\"prefill\"}";
        assert_eq!(router.metric(counted).await, 150.0);
    })
    .await;
}

#[tokio::test]
async fn failed_prompt_leaves_nothing_in_the_index() {
    timed(async {
        let mock = Mock::start(&[Act::Status(400, "invalid_value")]).await;
        let router = Router::regular(&[&mock], &["--policy", "cost"]).await;
        let reply = router
            .post("/v1/chat/completions", &turn(&"x".repeat(4_000), false))
            .await;
        assert_eq!(reply.status, 400);
        router.no_load().await;
        assert_eq!(router.metric("baton_router_index_blocks").await, 0.0);
        assert_eq!(router.metric("baton_router_backlog_seconds").await, 0.0);
    })
    .await;
}

#[tokio::test]
async fn pairs_are_chosen_also_when_the_policies_differ_or_a_side_is_missing() {
    timed(async {
        let mocks = [Mock::start(&[]).await, Mock::start(&[]).await];
        for flags in [
            [
                "--prefill-policy",
                "cost",
                "--decode-policy",
                "power_of_two",
            ],
            ["--prefill-policy", "manual", "--decode-policy", "cost"],
        ] {
            let router = Router::pd(&[&mocks[0]], &[&mocks[1]], &flags).await;
            assert_eq!(router.chat().await.status, 200, "{flags:?}");
        }
        let url = mocks[0].url();
        let flags = [
            "--policy",
            "cost",
            "--pd-disaggregation",
            "--prefill",
            &url,
            "8998",
        ];
        let router = Router::start(&flags).await;
        router.all_ready(1).await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "no_worker"));
        assert!(reply.text().contains("decode"), "{}", reply.text());
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn manual_follows_the_clients_key() {
    timed(async {
        let mocks = [
            Mock::start(&[]).await,
            Mock::start(&[]).await,
            Mock::start(&[]).await,
        ];
        let flags = ["--policy", "manual", "--assignment-mode", "min_group"];
        let router = Router::regular(&[&mocks[0], &mocks[1], &mocks[2]], &flags).await;
        for round in 0..4 {
            for key in ["ann", "bob", "eve"] {
                let body = turn(&format!("{key} {round}"), false).to_string();
                let headers = [("x-smg-routing-key", key)];
                let path = "/v1/chat/completions";
                assert_eq!(
                    router
                        .send(Method::POST, path, &headers, &body)
                        .await
                        .status,
                    200
                );
            }
        }
        for key in ["ann", "bob", "eve"] {
            let mut counts: Vec<usize> = mocks.iter().map(|mock| with(mock, key)).collect();
            counts.sort_unstable();
            assert_eq!(counts, [0, 0, 4], "{key}");
        }
        assert!(mocks.iter().all(|mock| mock.count() == 4));
        assert_eq!(
            router
                .metric("baton_router_routing_keys{role=\"regular\"}")
                .await,
            3.0
        );
    })
    .await;
}
