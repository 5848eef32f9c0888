//! Retries: which failures are retried, and the retry budget of the fleet.

use std::time::Duration;

use http::Method;
use serde_json::json;

use crate::support::{Act, Client, End, Mock, Router, TOKEN, chat, eventually, timed};

#[tokio::test]
async fn refusal_of_the_request_is_returned_and_an_error_of_the_worker_retried_elsewhere() {
    timed(async {
        for (status, code, is_tried_again) in [
            (400, "context_length_exceeded", false),
            (404, "model_not_found", true),
            (429, "rate_limit_exceeded", false),
            (429, "tenant_queue_full", false),
            (504, "deadline", false),
            (504, "timeout", false),
            (429, "some_other_engine", true),
            (503, "queue_full", true),
            (503, "draining", true),
            (503, "not_ready", true),
            (502, "upstream_error", true),
            (500, "internal_error", true),
        ] {
            let bad = Mock::start(&[Act::Status(status, code)]).await;
            let good = Mock::start(&[]).await;
            let router = Router::regular(&[&bad, &good], &[]).await;
            // Round robin: one of the two requests meets the bad worker first.
            let answers = [router.chat().await.status, router.chat().await.status];
            let expected = match is_tried_again {
                true => 200,
                false => status,
            };
            assert!(answers.contains(&expected), "{code}: {answers:?}");
            assert_eq!(bad.count(), 1, "{code}");
            assert_eq!(good.count(), 1 + usize::from(is_tried_again), "{code}");
        }
    })
    .await;
}

#[tokio::test]
async fn retries_end_with_the_budget_and_the_clients_get_the_workers_words() {
    timed(async {
        let workers = [
            Mock::start(&[Act::Status(502, "upstream_error")]).await,
            Mock::start(&[Act::Status(502, "upstream_error")]).await,
        ];
        let flags = [
            "--retry-budget-floor",
            "3",
            "--retry-budget-ratio",
            "0.5",
            "--disable-circuit-breaker",
        ];
        let router = Router::regular(&[&workers[0], &workers[1]], &flags).await;
        for _ in 0..10 {
            let reply = router.chat().await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (502, "upstream_error")
            );
        }
        // 10 requests, 3 + 10 / 2 retries
        assert_eq!(workers[0].count() + workers[1].count(), 18);
        let refused = "baton_router_retries_refused_total{by=\"budget\"}";
        assert!(router.metric(refused).await > 0.0);
        let body = json!({"messages": [], "n": 1});
        assert_eq!(router.post("/v1/chat/completions", &body).await.status, 502);
    })
    .await;
}

#[tokio::test]
async fn time_waited_in_the_queue_is_sent_to_the_worker() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate)]).await;
        let router = Router::regular(&[&mock], &["--max-concurrent-requests", "1"]).await;
        let mut first = Client::connect(router.running.addr).await;
        let mut running = first.chat(true).await;
        running.piece().await.unwrap();

        let mut body = chat(false);
        body["deadline_ms"] = json!(9000);
        let asked = router.post("/v1/chat/completions", &body);
        let release = async {
            eventually("it waits", || async {
                router.metric("baton_router_queued_requests").await == 1.0
            })
            .await;
            tokio::time::sleep(Duration::from_millis(20)).await; // the time that is to be missing
            mock.release();
            assert!(running.read().await.text().ends_with("[DONE]\n\n"));
            eventually("it runs", || async { mock.count() == 2 }).await;
            mock.release();
        };
        let (reply, ()) = tokio::join!(asked, release);
        assert_eq!(reply.status, 200);
        let left = mock.seen()[1].body["deadline_ms"].as_u64().unwrap();
        assert!((1..=8980).contains(&left), "{left} of 9000");
    })
    .await;
}

#[tokio::test]
async fn retry_has_what_is_left_of_the_clients_time() {
    timed(async {
        let leaving = Mock::start(&[Act::Gated(503, "draining")]).await;
        let good = Mock::start(&[]).await;
        let router = Router::regular(&[&leaving, &good], &[]).await;
        let mut body = chat(false);
        body["deadline_ms"] = json!(9000);
        body["ttft_deadline_ms"] = json!(8000);
        let headers = [
            ("x-deadline-remaining-ms", "7000"),
            ("x-slo-ttft-ms", "6000"),
        ];
        let text = body.to_string();
        let asked = router.send(Method::POST, "/v1/chat/completions", &headers, &text);
        let release = async {
            // Round robin begins with the first worker.
            eventually("it is there", || async { leaving.count() > 0 }).await;
            tokio::time::sleep(Duration::from_millis(20)).await; // the time that is to be missing
            leaving.release();
        };
        let (reply, ()) = tokio::join!(asked, release);
        assert_eq!(reply.status, 200);
        let first = leaving.seen()[0].clone();
        assert_eq!(
            first.raw,
            text.as_bytes(),
            "the first attempt has the client's bytes"
        );
        let second = good.seen().last().unwrap().clone();
        let left = |name: &str| second.body[name].as_u64().unwrap();
        let in_header = |name: &str| {
            second.headers[name]
                .to_str()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        for (left, all) in [
            (left("deadline_ms"), 9000),
            (left("ttft_deadline_ms"), 8000),
            (in_header("x-deadline-remaining-ms"), 7000),
            (in_header("x-slo-ttft-ms"), 6000),
        ] {
            assert!(left >= 1 && left + 20 <= all, "{left} of {all}");
        }
    })
    .await;
}

#[tokio::test]
async fn error_event_is_recognized_however_it_is_cut() {
    const PIECES: [&str; 4] = [
        ": keep-alive\n\nda",
        "ta: {\"err",
        "or\":{\"message\":\"m\",\"code\":\"draining\"}}\n\n",
        "data: [DONE]\n\n",
    ];
    timed(async {
        let leaving = Mock::start(&[Act::Stream(PIECES.to_vec(), End::Clean)]).await;
        let good = Mock::start(&[]).await;
        let router = Router::regular(&[&leaving, &good], &[]).await;
        for _ in 0..2 {
            assert!(router.chat_stream().await.text().starts_with(TOKEN));
        }
        assert_eq!((leaving.count(), good.count()), (1, 2));
    })
    .await;
}

#[tokio::test]
async fn long_error_answer_keeps_its_status_and_is_not_tried_again() {
    timed(async {
        let worker = Mock::start(&[]).await;
        let path = "/v1/chat/completions";
        worker.answers(path, 400, json!({"error": "x".repeat(2 << 20)}));
        let router = Router::regular(&[&worker], &[]).await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (400, "status_4xx"));
        let failed = "baton_router_upstream_errors_total{reason=\"status_4xx\",role=\"regular\"}";
        assert_eq!(router.metric(failed).await, 1.0);
    })
    .await;
}
