//! Workers that refuse: they attract no traffic, and what all refuse is the request's fault.

use http::Method;
use router_core::PolicyKind;
use serde_json::json;

use crate::support::{Act, Mock, Router, chat, timed};

/// A minute of doubling penalties: a slow machine may see that many.
const MOST_MET: usize = 6;

#[tokio::test]
async fn refusing_worker_costs_no_client_an_answer_under_any_policy() {
    timed(async {
        for kind in PolicyKind::ALL {
            for (status, code) in [(404, "model_not_found"), (401, "x"), (429, "queue_full")] {
                let bad = Mock::start(&[Act::Status(status, code)]).await;
                let good = Mock::start(&[]).await;
                let flags = ["--policy", kind.into_str(), "--retry-budget-floor", "20"];
                let router = Router::regular(&[&bad, &good], &flags).await;
                for turn in 0..30 {
                    let body = json!({"messages": [{"role": "user", "content": turn.to_string()}]});
                    let reply = router.post("/v1/chat/completions", &body).await;
                    assert_eq!(reply.status, 200, "{kind} {status} {turn}");
                }
                assert_eq!(good.count(), 30, "{kind} {status}");
                assert!(bad.count() <= MOST_MET, "{kind} {status}: {}", bad.count());
            }
        }
    })
    .await;
}

#[tokio::test]
async fn request_that_every_worker_denies_is_refused_and_penalizes_none() {
    timed(async {
        let deny = || [Act::Answer, Act::Status(404, "model_not_found")];
        let a = Mock::start(&deny()).await;
        let b = Mock::start(&deny()).await;
        let router = Router::regular(&[&a, &b], &[]).await;
        for _ in 0..2 {
            assert_eq!(router.chat().await.status, 200);
        }
        for _ in 0..20 {
            assert_eq!(router.chat().await.code(), "model_not_found");
        }
        let met = a.count() + b.count();
        assert!((22..=26).contains(&met), "few second opinions: {met}");
        let workers = router.get("/workers").await.json();
        for worker in workers["workers"].as_array().unwrap() {
            assert_eq!(worker["circuit"], "closed", "{workers}");
        }
    })
    .await;
}

/// A client that loops with a wrong key, always to the same worker.
#[tokio::test]
async fn denials_that_a_client_causes_count_against_no_worker() {
    timed(async {
        let deny = || [Act::Status(401, "invalid_api_key")];
        let a = Mock::start(&deny()).await;
        let b = Mock::start(&deny()).await;
        let flags = ["--policy", "manual"];
        let router = Router::regular(&[&a, &b], &flags).await;
        let headers = [("x-smg-routing-key", "k"), ("authorization", "Bearer no")];
        let body = chat(false).to_string();
        for _ in 0..30 {
            let path = "/v1/chat/completions";
            let reply = router.send(Method::POST, path, &headers, &body).await;
            assert_eq!(reply.status, 401);
        }
        let workers = router.get("/workers").await.json();
        for worker in workers["workers"].as_array().unwrap() {
            assert_eq!(worker["passed_over_ms"], 0, "{workers}");
            assert_eq!(worker["circuit"], "closed", "{workers}");
        }
    })
    .await;
}

#[tokio::test]
async fn requests_that_fail_everywhere_close_no_circuit_and_no_fleet() {
    timed(async {
        let acts = || {
            let mut acts = vec![Act::Status(500, "bug"); 20];
            acts.push(Act::Answer);
            acts
        };
        let (a, b) = (Mock::start(&acts()).await, Mock::start(&acts()).await);
        let router = Router::regular(&[&a, &b], &[]).await;
        for _ in 0..20 {
            assert_eq!(router.chat().await.code(), "bug");
        }
        assert_eq!((a.count(), b.count()), (20, 20), "one second opinion each");
        assert_eq!(router.chat().await.status, 200);
        let ready = router.get("/readyz").await;
        assert_eq!(
            (ready.status, &ready.json()["regular"]["open_circuits"]),
            (200, &json!(0))
        );
    })
    .await;
}

#[tokio::test]
async fn worker_that_alone_fails_unexplained_opens_its_circuit() {
    timed(async {
        let bad = Mock::start(&[Act::Status(500, "bug")]).await;
        let good = Mock::start(&[]).await;
        let flags = ["--cb-failure-threshold", "2"];
        let router = Router::regular(&[&bad, &good], &flags).await;
        for _ in 0..10 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!(bad.count(), 2);
        let workers = router.get("/workers").await.json();
        assert_eq!(workers["workers"][0]["circuit"], "open", "{workers}");
        let ready = router.get("/readyz").await;
        assert_eq!(
            (ready.status, &ready.json()["regular"]["open_circuits"]),
            (200, &json!(1))
        );
    })
    .await;
}

#[tokio::test]
async fn open_circuits_of_all_workers_leave_all_of_them_candidates() {
    timed(async {
        let acts = || [Act::Drop, Act::Drop, Act::Answer];
        let (a, b) = (Mock::start(&acts()).await, Mock::start(&acts()).await);
        let flags = ["--cb-failure-threshold", "1", "--disable-retries"];
        let router = Router::regular(&[&a, &b], &flags).await;
        for turn in 0..4 {
            // Each its own: a request that broke two workers is refused.
            let body = json!({"messages": [], "user": turn});
            let reply = router.post("/v1/chat/completions", &body).await;
            assert_eq!(reply.status, 502);
        }
        let ready = router.get("/readyz").await;
        assert_eq!(
            (ready.status, &ready.json()["regular"]["open_circuits"]),
            (200, &json!(2))
        );
        assert_eq!(router.chat().await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn worker_that_asks_for_long_and_is_alone_is_not_asked_again() {
    timed(async {
        let mock = Mock::start(&[Act::Busy(30)]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (429, "busy"));
        assert_eq!(reply.headers["retry-after"], "30");
        assert_eq!(mock.count(), 1);
        let workers = router.get("/workers").await.json();
        assert!(
            workers["workers"][0]["passed_over_ms"].as_u64() > Some(0),
            "{workers}"
        );
        assert_eq!(
            router.chat().await.status,
            429,
            "with no other it is still a candidate"
        );
    })
    .await;
}
