//! Requests of a pair whose decode worker fails, has no partner, or is vLLM's.

use serde_json::{Value, json};

use crate::support::{Act, Client, DONE, End, FINISH, Mock, Router, TOKEN, eventually, timed};

fn reopens(port: u16) -> Value {
    json!({"engine": "baton", "disaggregation_bootstrap_port": port, "baton_features": ["reopen"]})
}

#[tokio::test]
async fn decode_worker_that_dies_costs_no_second_prefill() {
    timed(async {
        // P's answer is still to come, and has come already.
        for first in [Act::Gated(200, "x"), Act::Answer] {
            let p = Mock::start(&[first.clone(), Act::Answer])
                .await
                .with_info(reopens(8998));
            let bad = Mock::start(&[Act::Drop]).await;
            let good = Mock::start(&[]).await;
            let router = Router::pd(&[&p], &[&bad, &good], &["--retry-max-retries", "2"]).await;
            // Round robin over the decode workers: one of two requests meets the bad one first.
            for _ in 0..2 {
                let asking = tokio::spawn({
                    let addr = router.running.addr;
                    async move {
                        let mut client = Client::connect(addr).await;
                        client.chat(false).await.read().await.status
                    }
                });
                if matches!(first, Act::Gated(..)) {
                    eventually("prefill has it", || async { p.count() > 0 }).await;
                    p.release();
                }
                assert_eq!(asking.await.unwrap(), 200);
            }
            assert_eq!((p.count(), bad.count(), good.count()), (2, 1, 2));
            let room = |mock: &Mock, at: usize| mock.seen()[at].body["bootstrap_room"].clone();
            let at = good
                .seen()
                .iter()
                .position(|seen| seen.body["bootstrap_room"] == room(&bad, 0));
            assert!(at.is_some(), "the same room goes to the other one");
            let opened = "baton_router_decode_retries_total{result=\"opened\"}";
            assert_eq!(router.metric(opened).await, 1.0);
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn pages_that_are_gone_are_computed_again_by_the_same_worker() {
    timed(async {
        let p = Mock::start(&[]).await.with_info(reopens(8998));
        let other_p = Mock::start(&[]).await.with_info(reopens(8998));
        let d = [
            Mock::start(&[Act::Drop, Act::Answer]).await,
            Mock::start(&[Act::Status(502, "kv_transfer_failed"), Act::Answer]).await,
        ];
        let flags = [
            "--prefill-policy",
            "cache_aware",
            "--retry-max-retries",
            "3",
        ];
        let router = Router::pd(&[&p, &other_p], &[&d[0], &d[1]], &flags).await;
        let mut answered = 0;
        while d[0].count() == 0 || d[1].count() == 0 {
            assert_eq!(router.chat().await.status, 200);
            answered += 1;
        }
        // The failed transfer named no culprit, and cache_aware stays with the holder of the
        // prompt.
        assert_eq!(p.count().min(other_p.count()), 0);
        assert!(p.count().max(other_p.count()) <= answered + 1);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn worker_that_does_not_keep_pages_prefills_again() {
    timed(async {
        let p = Mock::start(&[]).await;
        let bad = Mock::start(&[Act::Drop]).await;
        let good = Mock::start(&[]).await;
        let router = Router::pd(&[&p], &[&bad, &good], &[]).await;
        for _ in 0..2 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!((p.count(), bad.count(), good.count()), (3, 1, 2));
        let mut rooms: Vec<_> = p
            .seen()
            .iter()
            .map(|seen| seen.body["bootstrap_room"].as_u64().unwrap())
            .collect();
        rooms.sort_unstable();
        rooms.dedup();
        assert_eq!(rooms.len(), 3);
    })
    .await;
}

#[tokio::test]
async fn input_logprobs_come_with_the_first_event_of_a_stream() {
    const PREFILL: &str = "data: {\"text\":\"a\",\"meta_info\":{\"input_token_logprobs\":[[null,1,null],[-0.5,2,null]]}}\n\n";
    const FIRST: &str = "data: {\"text\":\"a\",\"meta_info\":{\"input_token_logprobs\":[],\"finish_reason\":null}}\n\n";
    const LAST: &str =
        "data: {\"text\":\"ab\",\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}}}\n\n";
    timed(async {
        let p = Mock::start(&[Act::Stream(vec![PREFILL, DONE], End::Clean)]).await;
        let d = Mock::start(&[Act::Stream(vec![FIRST, LAST, DONE], End::Clean)]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let ask = |logprobs: bool| json!({"text": "x", "stream": true, "return_logprob": logprobs});
        let reply = router.post("/generate", &ask(true)).await;
        let events = reply.events();
        let first: Value = serde_json::from_str(&events[0]).unwrap();
        assert_eq!(
            first["meta_info"]["input_token_logprobs"],
            json!([[null, 1, null], [-0.5, 2, null]])
        );
        assert_eq!(format!("data: {}\n\n", events[1]), LAST);
        assert_eq!(events[2], "[DONE]");
        let reply = router.post("/generate", &ask(false)).await;
        assert_eq!(reply.text(), [FIRST, LAST, DONE].concat());
    })
    .await;
}

#[tokio::test]
async fn decode_workers_prefill_where_that_is_quicker_or_no_prefill_worker_can() {
    timed(async {
        let info = json!({"engine": "baton", "baton_features": ["local_prefill"]});
        let (p, d) = (
            Mock::start(&[]).await,
            Mock::start(&[]).await.with_info(info),
        );
        let router = Router::pd(&[&p], &[&d], &["--local-prefill-max-tokens", "4"]).await;
        let ask = async |prompt: Value| {
            let body = json!({"prompt": prompt, "bootstrap_room": 7});
            router.post("/v1/completions", &body).await.status
        };
        assert_eq!(ask(json!([1, 2, 3, 4])).await, 200);
        assert_eq!((p.count(), d.count()), (0, 1));
        assert_eq!(d.seen()[0].body, json!({"prompt": [1, 2, 3, 4]}));
        assert_eq!(ask(json!([1, 2, 3, 4, 5])).await, 200);
        assert_eq!((p.count(), d.count()), (1, 2));
        p.stop().await;
        let long = "x".repeat(1000);
        eventually("decode does it alone", || async {
            ask(json!(long)).await == 200
                && d.seen().last().unwrap().body["bootstrap_room"].is_null()
        })
        .await;
        for (why, at_least) in [("short", 1.0), ("no_prefill", 1.0)] {
            let line = format!("baton_router_local_prefills_total{{why=\"{why}\"}}");
            assert!(router.metric(&line).await >= at_least, "{why}");
        }
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn logprobs_of_prompts_come_from_one_worker() {
    timed(async {
        let info = |feature: &str| json!({"engine": "baton", "baton_features": [feature]});
        let p = Mock::start(&[]).await.with_info(info("local_answer"));
        let d = Mock::start(&[]).await.with_info(info("local_prefill"));
        let router = Router::pd(&[&p], &[&d], &["--disable-local-prefill"]).await;
        let body = |limit| json!({"prompt": "a", "echo": true, "logprobs": 1, "max_tokens": limit});
        for (limit, prefills, decodes) in [(0, 1, 0), (1, 2, 0), (2, 2, 1)] {
            let mut sent = body(limit);
            sent["bootstrap_room"] = 7.into();
            assert_eq!(router.post("/v1/completions", &sent).await.status, 200);
            assert_eq!((p.count(), d.count()), (prefills, decodes), "{limit}");
            let worker = if limit < 2 { &p } else { &d };
            assert_eq!(worker.seen().last().unwrap().body, body(limit));
        }
        assert!(router.metric("baton_router_local_answers_total").await >= 2.0);
        let line = "baton_router_local_prefills_total{why=\"prompt_logprobs\"}";
        assert!(router.metric(line).await >= 1.0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn workers_that_cannot_answer_alone_share_a_request_for_logprobs_of_its_prompt() {
    timed(async {
        let answer = json!({"text": "x", "meta_info": {"finish_reason": {"type": "length"}}});
        let p = Mock::start(&[Act::Json(answer.clone())]).await;
        let d = Mock::start(&[Act::Json(answer)]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let body = json!({"text": "a", "return_logprob": true, "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 1}});
        assert_eq!(router.post("/generate", &body).await.status, 200);
        assert_eq!((p.count(), d.count()), (1, 1));
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn without_a_prefill_worker_others_are_not_asked_to_prefill() {
    timed(async {
        let baton = json!({"engine": "baton", "baton_features": ["local_prefill"]});
        for (info, flags) in [
            (json!({}), &[][..]),
            (baton, &["--disable-local-prefill"][..]),
        ] {
            let (p, d) = (
                Mock::start(&[]).await,
                Mock::start(&[]).await.with_info(info),
            );
            let router = Router::pd(&[&p], &[&d], flags).await;
            p.stop().await;
            eventually("no worker prefills", || async {
                let reply = router.chat().await;
                reply.status == 503 && reply.code() == "no_worker"
            })
            .await;
            assert!(
                d.seen()
                    .iter()
                    .all(|seen| !seen.body["bootstrap_room"].is_null())
            );
        }
    })
    .await;
}

fn params() -> Value {
    json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_engine_id": "e",
        "remote_block_ids": [1, 2], "remote_host": "10.0.0.1", "remote_port": 5600})
}

#[tokio::test]
async fn vllm_workers_are_asked_one_after_the_other() {
    timed(async {
        let answer = json!({"choices": [], "kv_transfer_params": params()});
        let p = Mock::start(&[Act::Json(answer)]).await.with_version("0.11.0");
        let d = Mock::start(&[]).await.with_version("0.11.0");
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let body = json!({"messages": [], "stream": true, "stream_options": {"include_usage": true},
            "max_completion_tokens": 50, "min_tokens": 3, "kv_transfer_params": {"evil": 1}, "weird": 1.50});
        let reply = router.post("/v1/chat/completions", &body).await;
        assert_eq!(reply.text(), [TOKEN, TOKEN, FINISH, DONE].concat());
        let (at_prefill, at_decode) = (&p.seen()[0], &d.seen()[0]);
        assert_eq!(
            at_prefill.body,
            json!({"messages": [], "weird": 1.50, "stream": false, "max_tokens": 1, "max_completion_tokens": 1,
                "min_tokens": 1, "kv_transfer_params": {"do_remote_decode": true, "do_remote_prefill": false,
                "remote_engine_id": null, "remote_block_ids": null, "remote_host": null, "remote_port": null}})
        );
        let mut expected = body.clone();
        expected["kv_transfer_params"] = params();
        assert_eq!(at_decode.body, expected);
        assert_eq!(at_prefill.headers["x-request-id"], at_decode.headers["x-request-id"]);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn several_answers_of_vllm_workers_come_from_decode_alone() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &["--pd-protocol", "vllm"]).await;
        for body in [
            json!({"prompt": ["a", "b"]}),
            json!({"prompt": "a", "n": 2}),
        ] {
            assert_eq!(router.post("/v1/completions", &body).await.status, 200);
            assert_eq!(d.seen().last().unwrap().body, body);
        }
        assert_eq!(p.count(), 0);
    })
    .await;
}

#[tokio::test]
async fn vllm_legs_fail_by_the_same_classes() {
    timed(async {
        let answer = Act::Json(json!({"kv_transfer_params": params()}));
        // What either leg does first, then whether it is tried again.
        for (first_p, first_d, status, prefills, decodes) in [
            (Act::Status(400, "invalid_value"), Act::Answer, 400, 1, 0),
            (Act::Status(502, "x"), Act::Answer, 200, 2, 1),
            (Act::Drop, Act::Answer, 200, 2, 1),
            // The blocks may have been read and given away: prefill again.
            (answer.clone(), Act::Drop, 200, 2, 2),
            (answer.clone(), Act::Status(400, "invalid_value"), 400, 1, 1),
            // No parameters: decode computes the prompt.
            (Act::Answer, Act::Answer, 200, 1, 1),
        ] {
            let p = Mock::start(&[first_p.clone(), answer.clone()]).await;
            let d = Mock::start(&[first_d, Act::Answer]).await;
            let flags = ["--pd-protocol", "vllm", "--disable-circuit-breaker"];
            let router = Router::pd(&[&p], &[&d], &flags).await;
            assert_eq!(router.chat().await.status, status, "{first_p:?}");
            assert_eq!((p.count(), d.count()), (prefills, decodes), "{first_p:?}");
            router.no_load().await;
        }
        let p = Mock::start(&[Act::Hang]).await;
        let d = Mock::start(&[]).await;
        let router = Router::pd(&[&p], &[&d], &["--pd-protocol", "vllm"]).await;
        let addr = router.running.addr;
        let client = tokio::spawn(async move {
            let mut client = Client::connect(addr).await;
            client.chat(true).await.read().await.status
        });
        eventually("prefill has it", || async { p.count() == 1 }).await;
        client.abort();
        eventually("it is cancelled", || async { p.cancelled() == 1 }).await;
        assert_eq!(d.count(), 0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn aborted_prefill_is_released_since_its_answer_may_be_on_the_way() {
    timed(async {
        let p = Mock::start(&[Act::Hang]).await;
        let p = p.with_info(reopens(8998));
        let d = Mock::start(&[Act::Hang]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let mut client = Client::connect(router.running.addr).await;
        let asking = tokio::spawn(async move { client.chat(true).await.read().await.status });
        eventually("both have it", || async {
            p.count() == 1 && d.count() == 1
        })
        .await;
        asking.abort();
        eventually("P is asked to release", || async {
            p.cancelled() == 1 && p.released().len() == 1
        })
        .await;
        let room = d.seen()[0].body["bootstrap_room"].clone();
        assert_eq!(p.released(), [json!([room])]);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn prefill_that_no_decode_worker_will_fetch_is_released() {
    let sent = "baton_router_prefill_releases_total{result=\"sent\"}";
    timed(async {
        let p = Mock::start(&[]).await.with_info(reopens(8998));
        let d = Mock::start(&[Act::Answer, Act::Gated(400, "invalid_value"), Act::Hang]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        // It was fetched.
        assert_eq!(router.chat().await.status, 200);
        // Refused for good, when the prompt has been computed.
        let asking = tokio::spawn({
            let addr = router.running.addr;
            async move { Client::connect(addr).await.chat(false).await.read().await }
        });
        let prefilled = "baton_router_worker_load{role=\"prefill\"";
        let is_prefilled = |count| {
            let (p, d, router) = (&p, &d, &router);
            move || async move {
                p.count() == count && d.count() == count && router.metric(prefilled).await == 0.0
            }
        };
        eventually("it is prefilled", is_prefilled(2)).await;
        d.release();
        assert_eq!(asking.await.unwrap().status, 400);
        eventually("P is asked to release", || async {
            p.released().len() == 1
        })
        .await;
        let room = |at: usize| json!([d.seen()[at].body["bootstrap_room"]]);
        assert_eq!(p.released(), [room(1)]);
        // The client leaves.
        let mut client = Client::connect(router.running.addr).await;
        let asking = tokio::spawn(async move { client.chat(true).await.read().await.status });
        eventually("it is prefilled", is_prefilled(3)).await;
        asking.abort();
        eventually("P is asked to release again", || async {
            p.released().len() == 2
        })
        .await;
        assert_eq!(p.released()[1], json!([d.seen()[2].body["bootstrap_room"]]));
        assert_eq!(router.metric(sent).await, 2.0);
        router.no_load().await;
    })
    .await;
}
