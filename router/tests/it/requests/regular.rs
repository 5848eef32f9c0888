//! One worker per request.

use std::time::Instant;

use http::Method;
use serde_json::json;

use crate::support::{Act, Client, DONE, End, FINISH, Mock, Router, TOKEN, eventually, timed};

#[tokio::test]
async fn round_robin_takes_turns() {
    timed(async {
        let (a, b, c) = (Mock::start(&[]).await, Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b, &c], &[]).await;
        for _ in 0..9 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!([a.count(), b.count(), c.count()], [3, 3, 3]);
        let decisions = "baton_router_policy_decisions_total{policy=\"round_robin\",role=\"regular\",why=\"round_robin\"}";
        assert_eq!(router.metric(decisions).await, 9.0);
    })
    .await;
}

#[tokio::test]
async fn cache_aware_keeps_a_conversation_on_its_worker() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b], &["--policy", "cache_aware"]).await;
        let turn = |text: &str| json!({"messages": [{"role": "user", "content": text}]});
        for prompt in [
            "first conversation, quite long",
            "another one that shares no words",
        ] {
            for more in 0..4 {
                let text = format!("{prompt} {}", "and on ".repeat(more));
                assert_eq!(
                    router
                        .post("/v1/chat/completions", &turn(&text))
                        .await
                        .status,
                    200
                );
            }
        }
        let firsts = |m: &Mock| {
            m.seen()
                .iter()
                .filter(|s| s.body.to_string().contains("first"))
                .count()
        };
        assert!(
            firsts(&a) == 4 || firsts(&b) == 4,
            "{} and {}",
            firsts(&a),
            firsts(&b)
        );
    })
    .await;
}

#[tokio::test]
async fn bytes_headers_and_status_pass_through() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let body = "{ \"model\":\"m\", \"temperature\":1.00e0,\n\"weird_field\":{\"x\":[1 ,2]},\"input_ids\":7}";
        let headers = [
            ("authorization", "Bearer client"),
            ("x-request-id", "my-id"),
            ("x-foo", "bar"),
            ("traceparent", "00-1-2-03"),
            ("connection", "keep-alive"),
            ("te", "trailers"),
        ];
        let reply = router.send(Method::POST, "/v1/completions", &headers, body).await;
        assert_eq!(reply.status, 200);
        assert_eq!(reply.headers["x-mock"], "yes");
        assert_eq!(reply.headers["x-request-id"], "my-id");
        let seen = &mock.seen()[0];
        assert_eq!(seen.path, "/v1/completions");
        assert_eq!(seen.raw, body.as_bytes());
        for (name, value) in &headers[..4] {
            assert_eq!(seen.headers[*name], *value);
        }
        assert!(!seen.headers.contains_key("te"));
        assert_eq!(seen.headers["host"], mock.addr.to_string().as_str());
    })
    .await;
}

#[tokio::test]
async fn request_ids_are_made_up_with_the_apis_prefix() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        for (path, prefix) in [
            ("/v1/chat/completions", "chatcmpl-"),
            ("/v1/completions", "cmpl-"),
            ("/generate", "gnt-"),
        ] {
            let reply = router.post(path, &json!({"text": "x"})).await;
            let id = reply.headers["x-request-id"].to_str().unwrap().to_owned();
            assert!(
                id.starts_with(prefix) && id.len() == prefix.len() + 24,
                "{id}"
            );
            assert_eq!(
                mock.seen().last().unwrap().headers["x-request-id"],
                id.as_str()
            );
        }
    })
    .await;
}

#[tokio::test]
async fn bad_request_is_never_retried() {
    timed(async {
        let (a, b) = (
            Mock::start(&[Act::Status(400, "invalid_value")]).await,
            Mock::start(&[Act::Status(400, "invalid_value")]).await,
        );
        let router = Router::regular(&[&a, &b], &["--cb-failure-threshold", "1"]).await;
        for _ in 0..4 {
            let reply = router.chat().await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (400, "invalid_value")
            );
        }
        // and it opens no breaker
        assert_eq!([a.count(), b.count()], [2, 2]);
    })
    .await;
}

#[tokio::test]
async fn failures_are_retried_on_another_worker() {
    timed(async {
        for bad in [
            Act::Status(503, "queue_full"),
            Act::Status(503, "queue_timeout"),
            Act::Status(500, "whatever"),
            Act::Drop,
            Act::Stream(vec![], End::Break),
            Act::Stream(
                vec!["data: {\"error\":{\"code\":\"draining\"}}\n\n", DONE],
                End::Clean,
            ),
        ] {
            let (a, b) = (
                Mock::start(std::slice::from_ref(&bad)).await,
                Mock::start(&[]).await,
            );
            let router = Router::regular(&[&a, &b], &[]).await;
            for _ in 0..4 {
                let reply = router.chat_stream().await;
                assert_eq!(reply.status, 200, "{bad:?}");
                assert_eq!(reply.events().last().unwrap(), "[DONE]");
            }
            assert_eq!(b.count(), 4, "{bad:?}");
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn unexplained_500_gets_one_second_opinion() {
    timed(async {
        let mock = Mock::start(&[Act::Status(500, "internal_error")]).await;
        let router = Router::regular(&[&mock], &[]).await;
        assert_eq!(router.chat().await.status, 500);
        assert_eq!(mock.count(), 2);
    })
    .await;
}

#[tokio::test]
async fn overload_is_retried_to_the_limit_and_passed_on() {
    timed(async {
        let mock = Mock::start(&[Act::Status(429, "queue_full")]).await;
        let router = Router::regular(&[&mock], &["--retry-max-retries", "3"]).await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (429, "queue_full"));
        assert_eq!(reply.headers["retry-after"], "1");
        assert_eq!(mock.count(), 3);
        assert_eq!(
            router
                .metric("baton_router_retries_total{reason=\"queue_full\"}")
                .await,
            2.0
        );
    })
    .await;
}

#[tokio::test]
async fn without_retries_there_is_one_attempt() {
    timed(async {
        let mock = Mock::start(&[Act::Drop]).await;
        let router = Router::regular(&[&mock], &["--disable-retries"]).await;
        let reply = router.chat().await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (502, "upstream_error")
        );
        assert_eq!(reply.headers["retry-after"], "1");
        assert_eq!(mock.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn break_in_the_stream_is_one_error_event_and_done() {
    timed(async {
        for (pieces, end) in [
            (vec![TOKEN, TOKEN], End::Break),
            (vec![TOKEN, "data: {\"choices\":[{\"del"], End::Break),
            (vec![TOKEN], End::Clean),
        ] {
            let mock = Mock::start(&[Act::Stream(pieces.clone(), end)]).await;
            let router = Router::regular(&[&mock], &[]).await;
            let reply = router.chat_stream().await;
            assert_eq!(reply.status, 200);
            assert_eq!(reply.error_event(), "upstream_error", "{pieces:?}");
            assert_eq!(mock.count(), 1, "retried after the first byte");
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn break_behind_the_finish_adds_no_error() {
    timed(async {
        for pieces in [vec![TOKEN, FINISH], vec![TOKEN, FINISH, DONE]] {
            let mock = Mock::start(&[Act::Stream(pieces, End::Break)]).await;
            let router = Router::regular(&[&mock], &[]).await;
            let text = router.chat_stream().await.text();
            assert!(!text.contains("error"), "{text}");
            assert_eq!(text.matches("[DONE]").count(), 1, "{text}");
        }
    })
    .await;
}

#[tokio::test]
async fn silent_worker_is_a_timeout() {
    timed(async {
        let mut mock = Mock::start(&[Act::Hang]).await;
        let router = Router::regular(&[&mock], &["--request-timeout-secs", "1"]).await;
        let since = Instant::now();
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (504, "timeout"));
        assert!(since.elapsed().as_secs() < 5);
        mock.acts(&[Act::Stream(vec![TOKEN], End::Hang)]);
        assert_eq!(router.chat_stream().await.error_event(), "timeout");
        eventually("the connection is closed", || async {
            mock.cancelled() == 2
        })
        .await;
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn client_that_leaves_closes_the_workers_connection() {
    timed(async {
        // before the head of the answer, and in the middle of the stream
        for act in [Act::Hang, Act::Stream(vec![TOKEN], End::Hang)] {
            let mock = Mock::start(std::slice::from_ref(&act)).await;
            let router = Router::regular(&[&mock], &[]).await;
            let addr = router.running.addr;
            let client = tokio::spawn(async move {
                let mut client = Client::connect(addr).await;
                let mut answering = client.chat(true).await;
                answering.piece().await.unwrap();
                std::future::pending::<()>().await;
            });
            eventually("the worker has the request", || async { mock.count() == 1 }).await;
            client.abort();
            eventually("the worker's connection is closed", || async {
                mock.cancelled() == 1
            })
            .await;
            router.no_load().await;
            let gone = "baton_router_requests_total{method=\"POST\",outcome=\"client_gone\"";
            eventually("it is counted", || async {
                router.metric(gone).await == 1.0
            })
            .await;
        }
    })
    .await;
}

/// openai-python closes at `[DONE]`.
#[tokio::test]
async fn client_that_leaves_at_the_last_event_has_the_whole_answer() {
    timed(async {
        let answer = Act::Stream(vec![TOKEN, FINISH, DONE], End::Gate);
        let mock = Mock::start(&[answer, Act::Json(json!({}))]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        let mut text = String::new();
        while !text.ends_with(DONE) {
            text += std::str::from_utf8(&answering.piece().await.unwrap()).unwrap();
        }
        drop((answering, client));
        let ok = "baton_router_requests_total{method=\"POST\",outcome=\"ok\"";
        eventually("it is counted", || async { router.metric(ok).await == 1.0 }).await;
        router.no_load().await;

        mock.release();
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(
            mock.cancelled(),
            0,
            "the worker's connection is read to its end"
        );
    })
    .await;
}

#[tokio::test]
async fn dead_worker_is_left_out_and_used_again_when_it_returns() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let flags = [
            "--health-check-interval-secs",
            "600",
            "--health-success-threshold",
            "1",
        ];
        let router = Router::regular(&[&a, &b], &flags).await;
        let addr = a.stop().await;
        for _ in 0..4 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!(b.count(), 4);
        // the refused connection led to a probe, long before the interval
        eventually("it is out", || async {
            router
                .metric("baton_router_workers{role=\"regular\",state=\"unhealthy\"}")
                .await
                == 1.0
        })
        .await;
        let a = Mock::at(addr, &[]).await;
        router.all_ready(2).await;
        for _ in 0..4 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!([a.count(), b.count()], [2, 6]);
    })
    .await;
}

#[tokio::test]
async fn idle_connection_that_the_worker_closed_is_no_failure() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(
            &[&mock],
            &["--disable-retries", "--health-check-interval-secs", "600"],
        )
        .await;
        assert_eq!(router.chat().await.status, 200);
        // restart on the same port: the kept connection is dead, and the router may or may not know
        // it yet
        let addr = mock.stop().await;
        let mock = Mock::at(addr, &[]).await;
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(mock.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn breaker_takes_a_failing_worker_out() {
    timed(async {
        let (bad, good) = (
            Mock::start(&[Act::Status(502, "x")]).await,
            Mock::start(&[]).await,
        );
        let router = Router::regular(&[&bad, &good], &["--cb-failure-threshold", "2"]).await;
        for _ in 0..10 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!(bad.count(), 2);
        let circuit = format!(
            "baton_router_circuit_state{{role=\"regular\",worker=\"{}\"}}",
            bad.url()
        );
        assert_eq!(router.metric(&circuit).await, 2.0);
    })
    .await;
}

#[tokio::test]
async fn dp_ranks_are_candidates_in_the_body_not_in_the_url() {
    timed(async {
        let mock = Mock::start(&[]).await.with_info(json!({"dp_size": 3}));
        let router = Router::regular(&[&mock], &["--dp-aware"]).await;
        for _ in 0..3 {
            assert_eq!(router.chat().await.status, 200);
        }
        let mut ranks: Vec<_> = mock
            .seen()
            .iter()
            .map(|s| s.body["data_parallel_rank"].as_u64().unwrap())
            .collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [0, 1, 2]);
        assert!(
            mock.seen()
                .iter()
                .all(|s| s.body["data_parallel_rank"] == s.body["routed_dp_rank"])
        );
    })
    .await;
}

#[tokio::test]
async fn client_that_does_not_read_stops_the_worker_not_the_router() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Flood)]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let mut client = Client::connect(router.running.addr).await;
        let _unread = client.chat(true).await;
        // Socket buffers fill, then writing stops: the count stands still, far below what an
        // unbounded buffer takes.
        let before = std::sync::atomic::AtomicUsize::new(usize::MAX);
        eventually("the flood stands still", || async {
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            let now = mock.flooded();
            before.swap(now, std::sync::atomic::Ordering::SeqCst) == now
        })
        .await;
        assert!(
            mock.flooded() < 64 << 20,
            "{} bytes went somewhere",
            mock.flooded()
        );
        drop(client);
        eventually("the worker's connection is closed", || async {
            mock.cancelled() == 1
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn retry_avoids_the_worker_that_failed_even_if_the_policy_prefers_it() {
    timed(async {
        let (mut a, mut b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b], &["--policy", "cache_aware"]).await;
        assert_eq!(router.chat().await.status, 200);
        let (holder, other) = if a.count() == 1 {
            (&mut a, &b)
        } else {
            (&mut b, &a)
        };
        // It refuses once and would answer after that.
        holder.acts(&[Act::Status(503, "queue_full"), Act::Answer]);
        assert_eq!(router.chat().await.status, 200);
        assert_eq!((holder.count(), other.count()), (2, 1));
        assert_eq!(
            router
                .metric("baton_router_retries_total{reason=\"queue_full\"}")
                .await,
            1.0
        );
    })
    .await;
}

#[tokio::test]
async fn reused_connection_that_breaks_is_resent_once_without_a_retry() {
    timed(async {
        let mock = Mock::start(&[Act::Answer, Act::Drop, Act::Answer]).await;
        let router = Router::regular(&[&mock], &["--disable-retries"]).await;
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(mock.count(), 3);
    })
    .await;
}

#[tokio::test]
async fn requests_go_to_workers_that_serve_their_model() {
    timed(async {
        let named = |names: &[&str]| json!({"engine": "baton", "served_model_names": names});
        let a = Mock::start(&[]).await.with_info(named(&["a", "default"]));
        let b = Mock::start(&[])
            .await
            .with_info(json!({"served_model_name": "b"}));
        let router = Router::regular(&[&a, &b], &[]).await;
        let ask = async |model: &str| {
            let body = json!({"model": model, "messages": []});
            router.post("/v1/chat/completions", &body).await
        };
        for (model, counts) in [("a", (2, 0)), ("b:adapter", (2, 2)), ("default", (4, 2))] {
            for _ in 0..2 {
                assert_eq!(ask(model).await.status, 200);
            }
            assert_eq!((a.count(), b.count()), counts, "{model}");
        }
        let reply = ask("c").await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (404, "model_not_found")
        );
        assert_eq!(reply.json()["error"]["param"], "model");
        // A worker that names no model is sent any.
        let any = Mock::start(&[]).await;
        let worker = json!({"url": any.url()});
        router.post("/workers", &worker).await;
        router.all_ready(3).await;
        assert_eq!((ask("c").await.status, any.count()), (200, 1));
    })
    .await;
}
