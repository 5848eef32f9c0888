//! Prefill and decode pairs.

use serde_json::{Value, json};

use crate::support::{Act, Client, DONE, End, FINISH, Mock, Router, TOKEN, eventually, timed};

#[tokio::test]
async fn both_legs_get_the_body_and_the_meeting_point() {
    timed(async {
        let (p, d) = (
            Mock::start(&[]).await,
            Mock::start(&[Act::Json(json!({"from": "d"}))]).await,
        );
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let body =
            json!({"prompt": "x", "bootstrap_room": 1, "bootstrap_host": "evil", "weird": [1.50]});
        let reply = router.post("/v1/completions", &body).await;
        assert_eq!((reply.status, reply.json()), (200, json!({"from": "d"})));
        let (p, d) = (p.seen(), d.seen());
        assert_eq!((p.len(), d.len()), (1, 1));
        assert_eq!(p[0].raw, d[0].raw);
        assert_eq!(p[0].headers["x-request-id"], d[0].headers["x-request-id"]);
        let seen = &p[0].body;
        assert_eq!(seen["bootstrap_host"], "127.0.0.1");
        assert_eq!(seen["bootstrap_port"], 8998);
        assert!(seen["bootstrap_room"].as_u64().unwrap() < 1 << 53);
        assert_ne!(seen["bootstrap_room"], 1);
        assert_eq!(seen["weird"], json!([1.50]));
    })
    .await;
}

#[tokio::test]
async fn several_answers_get_arrays_with_a_room_each() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        router
            .post("/v1/chat/completions", &json!({"messages": [], "n": 3}))
            .await;
        router
            .post("/v1/completions", &json!({"prompt": ["a", "b"], "n": 2}))
            .await;
        router
            .post("/generate", &json!({"input_ids": [[1], [2]]}))
            .await;
        for (seen, len) in p.seen().iter().zip([3, 4, 2]) {
            let rooms = seen.body["bootstrap_room"].as_array().unwrap();
            let mut distinct: Vec<u64> = rooms.iter().map(|r| r.as_u64().unwrap()).collect();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), len);
            assert_eq!(seen.body["bootstrap_host"], json!(vec!["127.0.0.1"; len]));
            assert_eq!(seen.body["bootstrap_port"], json!(vec![8998; len]));
        }
        assert_eq!(p.seen().len(), 3);
    })
    .await;
}

#[tokio::test]
async fn bootstrap_port_comes_from_the_worker_or_is_null() {
    timed(async {
        let info = json!({"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 7777});
        let (p, d) = (
            Mock::start(&[]).await.with_info(info),
            Mock::start(&[]).await,
        );
        for (flags, port) in [(vec![], json!(7777)), (vec!["none"], Value::Null)] {
            let (url, decode) = (p.url(), d.url());
            let mut all = vec![
                "--pd-disaggregation",
                "--decode",
                &decode,
                "--prefill",
                &url,
            ];
            all.extend(flags);
            let router = Router::start(&all).await;
            router.all_ready(2).await;
            router.chat().await;
            assert_eq!(p.seen().last().unwrap().body["bootstrap_port"], port);
        }
    })
    .await;
}

#[tokio::test]
async fn prefill_failing_aborts_decode_at_once_and_another_pair_answers() {
    timed(async {
        for bad in [
            Act::Status(500, "prefill_failed"),
            Act::Drop,
            Act::Stream(
                vec!["data: {\"error\":{\"code\":\"engine_dead\"}}\n\n", DONE],
                End::Clean,
            ),
            // Behind another event, in the last piece of the answer.
            Act::Whole(
                "data: {\"choices\":[]}\n\ndata: {\"error\":{\"code\":\"engine_dead\"}}\n\n",
            ),
            // The same, and the end of its line is missing.
            Act::Stream(
                vec![
                    "data: {\"choices\":[]}\n\n",
                    "data: {\"error\":{\"code\":\"engine_dead\"}}",
                ],
                End::Clean,
            ),
        ] {
            let (p1, p2) = (
                Mock::start(std::slice::from_ref(&bad)).await,
                Mock::start(&[]).await,
            );
            // decode waits for the KV of the first attempt for ever
            let d = Mock::start(&[Act::Hang, Act::Answer]).await;
            let router = Router::pd(&[&p1, &p2], &[&d], &[]).await;
            let reply = router.chat_stream().await;
            assert_eq!(reply.status, 200, "{bad:?}");
            assert_eq!(reply.events().last().unwrap(), "[DONE]");
            eventually("the first decode leg is aborted", || async {
                d.cancelled() == 1
            })
            .await;
            assert_eq!((p1.count(), p2.count(), d.count()), (1, 1, 2));
            let rooms: Vec<_> = d
                .seen()
                .iter()
                .map(|s| s.body["bootstrap_room"].clone())
                .collect();
            assert_ne!(rooms[0], rooms[1], "a new attempt has a new room");
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn decode_failing_aborts_prefill_at_once_and_another_pair_answers() {
    timed(async {
        for bad in [Act::Status(503, "queue_full"), Act::Drop] {
            let p = Mock::start(&[Act::Hang, Act::Answer]).await;
            let (d1, d2) = (
                Mock::start(std::slice::from_ref(&bad)).await,
                Mock::start(&[]).await,
            );
            let router = Router::pd(&[&p], &[&d1, &d2], &[]).await;
            assert_eq!(router.chat().await.status, 200, "{bad:?}");
            eventually("the first prefill leg is aborted", || async {
                p.cancelled() == 1
            })
            .await;
            assert_eq!((d1.count(), d2.count(), p.count()), (1, 1, 2));
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn failed_transfer_avoids_the_prefill_worker_it_came_from() {
    timed(async {
        let (mut p1, mut p2) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let d = Mock::start(&[
            Act::Answer,
            Act::Status(502, "kv_transfer_failed"),
            Act::Answer,
        ])
        .await;
        let router = Router::pd(&[&p1, &p2], &[&d], &["--prefill-policy", "cache_aware"]).await;
        assert_eq!(router.chat().await.status, 200);
        // cache_aware prefers the holder of the prompt, whose prefill now hangs
        let (holder, other) = if p1.count() == 1 {
            (&mut p1, &p2)
        } else {
            (&mut p2, &p1)
        };
        holder.acts(&[Act::Hang]);
        assert_eq!(router.chat().await.status, 200);
        assert_eq!((holder.count(), other.count(), d.count()), (2, 1, 3));
        eventually("the hanging prefill leg is aborted", || async {
            holder.cancelled() == 1
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn dead_decode_worker_costs_no_answer() {
    timed(async {
        let p = Mock::start(&[]).await;
        let (d1, d2) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d1, &d2], &["--health-check-interval-secs", "600"]).await;
        d1.stop().await;
        for _ in 0..6 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!(d2.count(), 6);
        d2.stop().await;
        let reply = router.chat().await;
        assert!([502, 503].contains(&reply.status), "{}", reply.text());
        assert_eq!(reply.headers["retry-after"], "1");
        eventually("it cannot serve", || async {
            router.get("/readyz").await.json()["serves"] == false
        })
        .await;
        assert_eq!(router.get("/readyz").await.status, 200, "it has served");
    })
    .await;
}

#[tokio::test]
async fn deterministic_error_of_either_leg_is_returned_without_a_retry() {
    timed(async {
        let bad = Act::Status(400, "context_length_exceeded");
        for (p, d) in [
            (bad.clone(), Act::Hang),
            (Act::Hang, bad.clone()),
            (bad.clone(), bad),
        ] {
            let (p, d) = (Mock::start(&[p]).await, Mock::start(&[d]).await);
            let router = Router::pd(&[&p], &[&d], &[]).await;
            let reply = router.chat().await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (400, "context_length_exceeded")
            );
            assert_eq!((p.count(), d.count()), (1, 1));
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn client_that_leaves_cancels_both_legs() {
    timed(async {
        for decode in [Act::Hang, Act::Stream(vec![TOKEN], End::Hang)] {
            let (p, d) = (
                Mock::start(&[Act::Hang]).await,
                Mock::start(&[decode]).await,
            );
            let router = Router::pd(&[&p], &[&d], &[]).await;
            let addr = router.running.addr;
            let client = tokio::spawn(async move {
                let mut client = Client::connect(addr).await;
                let mut answering = client.chat(true).await;
                answering.piece().await.unwrap();
                std::future::pending::<()>().await;
            });
            eventually("both have it", || async {
                p.count() == 1 && d.count() == 1
            })
            .await;
            client.abort();
            eventually("both are cancelled", || async {
                p.cancelled() == 1 && d.cancelled() == 1
            })
            .await;
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn prefill_leg_that_never_answers_does_not_hold_a_complete_answer() {
    timed(async {
        let (p, d) = (Mock::start(&[Act::Hang]).await, Mock::start(&[]).await);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(
            router.chat_stream().await.events().last().unwrap(),
            "[DONE]"
        );
    })
    .await;
}

#[tokio::test]
async fn pair_that_never_answers_is_a_timeout() {
    timed(async {
        let (p, d) = (
            Mock::start(&[Act::Hang]).await,
            Mock::start(&[Act::Hang]).await,
        );
        let router = Router::pd(&[&p], &[&d], &["--request-timeout-secs", "1"]).await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (504, "timeout"));
        eventually("both are cancelled", || async {
            p.cancelled() == 1 && d.cancelled() == 1
        })
        .await;
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn decode_breaking_in_the_stream_is_one_error_event() {
    timed(async {
        let (p, d) = (
            Mock::start(&[]).await,
            Mock::start(&[Act::Stream(vec![TOKEN, TOKEN], End::Break)]).await,
        );
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let reply = router.chat_stream().await;
        assert_eq!(reply.error_event(), "upstream_error");
        assert_eq!(d.count(), 1);
        let broken = "baton_router_upstream_errors_total{reason=\"reset\",role=\"decode\"}";
        assert_eq!(router.metric(broken).await, 1.0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn ranks_travel_in_the_body_and_rooms_match_the_prefill_rank() {
    timed(async {
        let p = Mock::start(&[])
            .await
            .with_info(json!({"dp_size": 3, "disaggregation_mode": "prefill"}));
        let d = Mock::start(&[]).await.with_info(json!({"dp_size": 2}));
        let router = Router::pd(&[&p], &[&d], &["--dp-aware"]).await;
        for _ in 0..6 {
            assert_eq!(
                router
                    .post("/v1/completions", &json!({"prompt": ["a", "b"]}))
                    .await
                    .status,
                200
            );
        }
        let (p, d) = (p.seen(), d.seen());
        for seen in &p {
            let rank = seen.body["data_parallel_rank"].as_u64().unwrap();
            assert_eq!(seen.body["routed_dp_rank"], rank);
            for room in seen.body["bootstrap_room"].as_array().unwrap() {
                assert_eq!(room.as_u64().unwrap() % 3, rank);
            }
            let other = d
                .iter()
                .find(|d| d.body["bootstrap_room"] == seen.body["bootstrap_room"])
                .unwrap();
            assert_eq!(other.body["data_parallel_rank"], rank);
            assert_eq!(other.body["disagg_prefill_dp_rank"], rank);
            assert_eq!(
                other.body["data_parallel_rank_decode"],
                other.body["routed_dp_rank"]
            );
        }
        let ranks: std::collections::BTreeSet<u64> = d
            .iter()
            .map(|s| s.body["routed_dp_rank"].as_u64().unwrap())
            .collect();
        assert_eq!(ranks.len(), 2);
    })
    .await;
}

#[tokio::test]
async fn input_logprobs_of_prefill_come_before_those_of_decode() {
    timed(async {
        let with = |list: Value| {
            json!({"text": "x", "meta_info": {"input_token_logprobs": list, "id": "r",
            "finish_reason": {"type": "stop", "matched": 2}}})
        };
        let p = Mock::start(&[Act::Json(with(json!([[null, 1, null], [-0.5, 2, null]])))]).await;
        let d = Mock::start(&[Act::Json(with(json!([[-0.25, 3, null]])))]).await;
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let reply = router
            .post("/generate", &json!({"text": "x", "return_logprob": true}))
            .await;
        assert_eq!(
            reply.json()["meta_info"]["input_token_logprobs"],
            json!([[null, 1, null], [-0.5, 2, null], [-0.25, 3, null]])
        );
    })
    .await;
}

#[tokio::test]
async fn worker_of_the_wrong_kind_is_not_used() {
    timed(async {
        let p = Mock::start(&[])
            .await
            .with_info(json!({"disaggregation_mode": "prefill", "page_size": 16}));
        let d = Mock::start(&[])
            .await
            .with_info(json!({"disaggregation_mode": "prefill"}));
        let (url, decode) = (p.url(), d.url());
        let router = Router::start(&[
            "--pd-disaggregation",
            "--prefill",
            &url,
            "--decode",
            &decode,
        ])
        .await;
        eventually("it is rejected with a reason", || async {
            let list = router.get("/workers").await.json();
            let w = &list["workers"][1];
            w["state"] == "rejected"
                && w["reason"]
                    .as_str()
                    .unwrap_or_default()
                    .contains("--disaggregation-mode")
        })
        .await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "no_worker"));
    })
    .await;
}

#[tokio::test]
async fn finished_stream_is_ok_whatever_prefill_does_later() {
    timed(async {
        let p = Mock::start(&[Act::Stream(vec![TOKEN], End::Break)]).await;
        let d = Mock::start(&[Act::Stream(vec![TOKEN, FINISH, DONE], End::Clean)]).await;
        let router = Router::pd(&[&p], &[&d], &["--disable-retries"]).await;
        // prefill breaks at about the moment decode opens: either both are retried or the answer is
        // whole, never half
        let reply = router.chat_stream().await;
        assert!(
            reply.status == 502 || reply.events().last().unwrap() == "[DONE]",
            "{}",
            reply.text()
        );
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn comments_of_a_waiting_decode_leg_do_not_end_the_retries() {
    timed(async {
        let (p1, p2) = (
            Mock::start(&[Act::Gated(500, "prefill_failed")]).await,
            Mock::start(&[]).await,
        );
        let d = Mock::start(&[
            Act::Stream(vec![": keep-alive\n\n"], End::Hang),
            Act::Answer,
        ])
        .await;
        let router = Router::pd(&[&p1, &p2], &[&d], &["--sse-keepalive-secs", "1"]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        // the router's own comment: the client has its 200, and prefill fails after that
        assert!(answering.piece().await.unwrap().starts_with(b":"));
        p1.release();
        let reply = answering.read().await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.events().last().unwrap(), "[DONE]");
        assert!(!reply.text().contains("error"), "{}", reply.text());
        assert_eq!((p1.count(), p2.count(), d.count()), (1, 1, 2));
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn error_after_the_first_comment_is_an_error_event() {
    timed(async {
        let (p, d) = (
            Mock::start(&[Act::Hang]).await,
            Mock::start(&[Act::Gated(400, "invalid_value")]).await,
        );
        let router = Router::pd(&[&p], &[&d], &["--sse-keepalive-secs", "1"]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        assert!(answering.piece().await.unwrap().starts_with(b":"));
        d.release();
        let text = answering.read().await.text();
        assert!(text.starts_with("data: {\"error\""), "{text}");
        assert!(
            text.contains("invalid_value") && text.ends_with("\n\ndata: [DONE]\n\n"),
            "{text}"
        );
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn client_that_leaves_while_it_waits_cancels_both_legs() {
    timed(async {
        let (p, d) = (
            Mock::start(&[Act::Hang]).await,
            Mock::start(&[Act::Hang]).await,
        );
        let router = Router::pd(&[&p], &[&d], &["--sse-keepalive-secs", "1"]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        assert!(answering.piece().await.unwrap().starts_with(b":"));
        drop((answering, client));
        eventually("both are cancelled", || async {
            p.cancelled() == 1 && d.cancelled() == 1
        })
        .await;
        router.no_load().await;
    })
    .await;
}
