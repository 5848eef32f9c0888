//! Which prefill and decode workers are paired: those whose fingerprints agree.

use serde_json::{Value, json};

use crate::support::{Act, Mock, Router, eventually, timed};

fn info(role: &str, version: &str) -> Value {
    let fingerprint = json!({
        "model": version, "tokenizer": "t", "chat_template": "c", "page_size": "16", "dtype": "bf16", "kv_layout": "l"
    });
    json!({"engine": "baton", "disaggregation_mode": role, "page_size": 16, "fingerprint": fingerprint})
}

async fn node(role: &str, version: &str) -> Mock {
    Mock::start(&[]).await.with_info(info(role, version))
}

/// Rooms of the requests a worker got, in order of the rooms.
fn rooms(mock: &Mock) -> Vec<u64> {
    let seen = mock.seen();
    let rooms = seen
        .iter()
        .filter_map(|s| s.body["bootstrap_room"].as_u64());
    let mut rooms: Vec<u64> = rooms.collect();
    rooms.sort_unstable();
    rooms
}

#[tokio::test]
async fn in_a_rolling_upgrade_both_versions_serve_and_never_meet() {
    timed(async {
        for policy in ["round_robin", "cost", "cache_aware", "random"] {
            let (p_old, p_new) = (node("prefill", "1").await, node("prefill", "2").await);
            let (d_old, d_new) = (node("decode", "1").await, node("decode", "2").await);
            let flags = ["--policy", policy];
            let router = Router::pd(&[&p_old, &p_new], &[&d_old, &d_new], &flags).await;
            for _ in 0..40 {
                assert_eq!(router.chat().await.status, 200);
            }
            assert_eq!(rooms(&p_old), rooms(&d_old), "{policy}");
            assert_eq!(rooms(&p_new), rooms(&d_new), "{policy}");
            // cache_aware and cost stay where the prompt is.
            let spreads = matches!(policy, "round_robin" | "random");
            assert!(!spreads || p_old.count().min(p_new.count()) > 0, "{policy}");
            if policy == "round_robin" {
                assert_eq!((p_old.count(), p_new.count()), (20, 20));
            }
            assert_eq!(router.get("/readyz").await.status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn worker_that_fits_no_other_gets_no_request_and_reports_why() {
    timed(async {
        let (p, odd) = (node("prefill", "1").await, node("prefill", "2").await);
        let d = node("decode", "1").await;
        let router = Router::pd(&[&p, &odd], &[&d], &[]).await;
        for _ in 0..4 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!((p.count(), odd.count(), d.count()), (4, 0, 4));
        let list = router.get("/workers").await.json();
        let shown = |mock: &Mock| {
            let workers = list["workers"].as_array().unwrap();
            let found = workers.iter().find(|w| w["url"] == mock.url());
            found.unwrap()["reason"].clone()
        };
        let reason = shown(&odd).as_str().unwrap().to_owned();
        let wanted = format!(
            "no decode worker fits it; nearest is {}: its model is 2, there it is 1",
            d.url()
        );
        assert_eq!(reason, wanted);
        assert_eq!((shown(&p), shown(&d)), (Value::Null, Value::Null));
        let unpaired = "baton_router_unpaired_workers{role=\"prefill\"}";
        assert_eq!(router.metric(unpaired).await, 1.0);
    })
    .await;
}

#[tokio::test]
async fn when_no_two_workers_fit_requests_are_refused_with_no_pair() {
    timed(async {
        let (p, d) = (node("prefill", "1").await, node("decode", "2").await);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let reply = router.chat().await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "no_pair"));
        let ready = router.get("/readyz").await;
        assert_eq!((ready.status, ready.code().as_str()), (503, "no_pair"));
        assert_eq!((p.count(), d.count()), (0, 0));
        // The upgrade goes on: the new version's prefill worker comes.
        let p_new = node("prefill", "2").await;
        let new = json!({"url": p_new.url(), "worker_type": "prefill", "bootstrap_port": 1});
        assert_eq!(router.post("/workers", &new).await.status, 202);
        eventually("it serves", || async { router.chat().await.status == 200 }).await;
        assert_eq!((p.count(), p_new.count() > 0), (0, true));
    })
    .await;
}

#[tokio::test]
async fn workers_without_a_fingerprint_are_paired_with_all_others() {
    timed(async {
        let (p_new, p_other) = (
            node("prefill", "1").await,
            Mock::start(&[])
                .await
                .with_info(json!({"disaggregation_mode": "prefill", "page_size": 16})),
        );
        let d = Mock::start(&[Act::Answer]).await;
        let router = Router::pd(&[&p_new, &p_other], &[&d], &[]).await;
        for _ in 0..4 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!((p_new.count(), p_other.count(), d.count()), (2, 2, 4));
        // SGLang workers report a page size, too.
        let small = Mock::start(&[]).await.with_info(json!({"page_size": 1}));
        let p = Mock::start(&[]).await.with_info(json!({"page_size": 64}));
        let router = Router::pd(&[&p], &[&small], &[]).await;
        assert_eq!(router.chat().await.code(), "no_pair");
    })
    .await;
}

/// A decode worker's answer when the cluster keys of the pair differ.
fn keys_differ() -> Act {
    Act::Status(502, "pair_incompatible")
}

#[tokio::test]
async fn pair_that_cannot_work_is_tried_once_and_reported() {
    timed(async {
        let p = node("prefill", "1").await;
        let (odd, good) = (node("decode", "1").await, node("decode", "1").await);
        let mut odd = odd;
        odd.acts(&[keys_differ()]);
        let router = Router::pd(&[&p], &[&odd, &good], &[]).await;
        for _ in 0..6 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!(
            (odd.count(), good.count()),
            (1, 6),
            "one attempt, retried elsewhere"
        );
        let list = router.get("/workers").await.json();
        let shown = |mock: &Mock| {
            let workers = list["workers"].as_array().unwrap();
            let found = workers.iter().find(|w| w["url"] == mock.url()).unwrap();
            [found["reason"].clone(), found["circuit"].clone()]
        };
        let reason = format!("it cannot be paired with {}: scripted", p.url());
        assert_eq!(shown(&odd), [json!(reason), json!("closed")]);
        assert_eq!(shown(&good), [Value::Null, json!("closed")]);
        assert_eq!(shown(&p), [Value::Null, json!("closed")]);
        assert_eq!(router.get("/readyz").await.json()["serves"], true);
    })
    .await;
}

#[tokio::test]
async fn only_pair_that_cannot_work_gets_no_pair_until_a_worker_restarts() {
    timed(async {
        let p = node("prefill", "1").await;
        let mut d = node("decode", "1").await;
        d.acts(&[keys_differ()]);
        let router = Router::pd(&[&p], &[&d], &["--health-check-interval-secs", "1"]).await;
        for _ in 0..4 {
            let reply = router.chat().await;
            assert_eq!((reply.status, reply.code().as_str()), (503, "no_pair"));
            let message = reply.json()["error"]["message"]
                .as_str()
                .unwrap()
                .to_owned();
            assert!(
                message.starts_with("1 prefill and 1 decode workers are ready, but"),
                "{message}"
            );
            assert!(!message.contains("127.0.0.1"), "{message}");
        }
        assert_eq!(d.count(), 1, "no further attempts");
        let ready = router.get("/readyz").await.json();
        assert_eq!(ready["serves"], false);
        // Another process under the same address, with the right key.
        let addr = d.stop().await;
        is_out(&router).await;
        let d = Mock::at(addr, &[]).await.with_info(info("decode", "1"));
        eventually("it serves", || async { router.chat().await.status == 200 }).await;
        assert!(d.count() > 0);
    })
    .await;
}

async fn is_out(router: &Router) {
    eventually("the worker is out", || async {
        router.chat().await;
        let list = router.get("/workers").await.json();
        let workers = list["workers"].as_array().cloned().unwrap();
        workers.iter().any(|w| w["state"] == "unhealthy")
    })
    .await;
}

#[tokio::test]
async fn counts_of_no_pair_are_the_ready_workers() {
    timed(async {
        let (p1, p2) = (node("prefill", "1").await, node("prefill", "1").await);
        let mut odd = node("decode", "1").await;
        odd.acts(&[keys_differ()]);
        let other = node("decode", "2").await;
        let router = Router::pd(&[&p1, &p2], &[&odd, &other], &[]).await;
        let mut messages = std::collections::BTreeSet::new();
        for _ in 0..6 {
            let reply = router.chat().await;
            assert_eq!(reply.code(), "no_pair");
            messages.insert(reply.json()["error"]["message"].to_string());
        }
        assert_eq!(messages.len(), 1, "{messages:?}");
        let message = messages.first().unwrap();
        assert!(
            message.contains("2 prefill and 2 decode workers"),
            "{message}"
        );
        assert_eq!(
            (odd.count(), other.count()),
            (2, 0),
            "once with each prefill worker"
        );
    })
    .await;
}
