//! Workers that drain, and readiness of the router itself.

use serde_json::{Value, json};

use crate::support::{Act, Client, End, Mock, Router, TOKEN, TempFile, chat, eventually, timed};

/// Probes come only when something asks for them.
const RARELY: [&str; 2] = ["--health-check-interval-secs", "600"];
const OFTEN: [&str; 2] = ["--health-check-interval-secs", "1"];

async fn shown(router: &Router, mock: &Mock) -> Value {
    let list = router.get("/workers").await.json();
    let workers = list["workers"].as_array().unwrap().iter();
    let mut of_url = workers.filter(|w| w["url"] == mock.url());
    of_url.next().cloned().unwrap_or_default()
}

async fn is_in(router: &Router, mock: &Mock, state: &str) {
    eventually("the worker is in the state", || async {
        shown(router, mock).await["state"] == state
    })
    .await;
}

async fn id_of(router: &Router, mock: &Mock) -> String {
    let id = shown(router, mock).await["id"].clone();
    id.as_str().unwrap().to_owned()
}

#[tokio::test]
async fn drain_by_one_router_is_seen_by_another_and_undone_there() {
    timed(async {
        let gated: &[Act] = &[Act::Stream(vec![TOKEN], End::Gate), Act::Answer];
        let p = Mock::start(&[]).await.with_drain();
        let d1 = Mock::start(gated).await.with_drain();
        let d2 = Mock::start(&[]).await.with_drain();
        let a = Router::pd(&[&p], &[&d1, &d2], &RARELY).await;
        let b = Router::pd(&[&p], &[&d1, &d2], &RARELY).await;
        let mut client = Client::connect(a.running.addr).await;
        let mut answering = client.chat(true).await;
        assert!(answering.piece().await.is_some());
        assert_eq!((d1.count(), d2.count()), (1, 0), "round robin begins there");

        let id = id_of(&a, &d1).await;
        let reply = a.post(&format!("/workers/{id}/drain"), &Value::Null).await;
        assert_eq!(reply.status, 202, "{}", reply.text());
        let reply = reply.json();
        assert_eq!(
            (&reply["status"], &reply["drained_by"]),
            (&json!("draining"), &json!("worker"))
        );
        assert_eq!(
            (&reply["left"]["streams"], &reply["load"]),
            (&json!(1), &json!(1))
        );
        assert!(d1.is_draining());
        let here = shown(&a, &d1).await;
        assert_eq!(
            (&here["state"], &here["drained_by"]),
            (&json!("draining"), &json!("worker"))
        );
        let line = "baton_router_workers{role=\"decode\",state=\"draining\"}";
        assert_eq!(a.metric(line).await, 1.0);

        // The other router has not probed since: it learns of the drain by the first refusal, which
        // the client does not see.
        for _ in 0..6 {
            assert_eq!(b.chat().await.status, 200);
        }
        is_in(&b, &d1, "draining").await;
        assert_eq!(b.metric(line).await, 1.0);
        for router in [&a, &b] {
            for _ in 0..4 {
                assert_eq!(router.chat().await.status, 200);
            }
        }
        assert_eq!(
            (d1.count(), d2.count()),
            (1, 14),
            "nothing new at the draining one"
        );

        let reply = b
            .get(&format!("/workers/{}/drain", id_of(&b, &d1).await))
            .await
            .json();
        assert_eq!(
            (&reply["drained_by"], &reply["left"]["streams"]),
            (&json!("worker"), &json!(1))
        );

        d1.release();
        assert!(answering.read().await.text().ends_with("data: [DONE]\n\n"));
        assert_eq!(shown(&a, &d1).await["load"], 0, "it stays in the list");

        let id = id_of(&b, &d1).await;
        let reply = b
            .post(&format!("/workers/{id}/undrain"), &Value::Null)
            .await;
        assert_eq!(
            (reply.status, &reply.json()["worker_id"]),
            (202, &json!(id))
        );
        assert!(!d1.is_draining());
        for router in [&a, &b] {
            is_in(router, &d1, "ready").await;
            for _ in 0..2 {
                assert_eq!(router.chat().await.status, 200);
            }
        }
        assert_eq!(d1.count(), 3, "one of two requests of each router");
        assert_eq!(shown(&a, &d1).await["drained_by"], Value::Null);
    })
    .await;
}

#[tokio::test]
async fn probe_that_says_draining_takes_the_worker_out_and_a_good_one_takes_it_in() {
    timed(async {
        let (one, other) = (Mock::start(&[]).await.with_drain(), Mock::start(&[]).await);
        let router = Router::regular(&[&one, &other], &OFTEN).await;
        let id = id_of(&router, &one).await;
        one.set_draining(true);
        is_in(&router, &one, "draining").await;
        for _ in 0..4 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!((one.count(), other.count()), (0, 4));
        let probes = "baton_router_health_probes_total{result=\"draining\",role=\"regular\"}";
        assert!(router.metric(probes).await >= 1.0);
        one.set_draining(false);
        is_in(&router, &one, "ready").await;
        assert_eq!(id_of(&router, &one).await, id, "it was never removed");
        for _ in 0..4 {
            assert_eq!(router.chat().await.status, 200);
        }
        assert_eq!(one.count(), 2);
    })
    .await;
}

#[tokio::test]
async fn worker_that_drains_when_it_is_registered_serves_once_it_is_undrained() {
    timed(async {
        let mock = Mock::start(&[]).await.with_drain();
        mock.set_draining(true);
        let router = Router::start(&["--worker-urls", &mock.url()]).await;
        is_in(&router, &mock, "draining").await;
        assert_eq!(router.chat().await.code(), "no_worker");
        let reply = router.get("/readyz").await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "no_worker"));
        mock.set_draining(false);
        is_in(&router, &mock, "ready").await;
        assert_eq!(router.chat().await.status, 200);
    })
    .await;
}

#[tokio::test]
async fn drained_worker_that_is_stopped_and_started_again_serves() {
    timed(async {
        let mock = Mock::start(&[]).await.with_drain();
        let router = Router::regular(&[&mock], &OFTEN).await;
        let drain = format!("/workers/{}/drain", id_of(&router, &mock).await);
        assert_eq!(router.post(&drain, &Value::Null).await.status, 202);
        assert_eq!(router.post(&drain, &Value::Null).await.status, 202);
        assert_eq!(mock.orders().len(), 2);
        is_in(&router, &mock, "draining").await;
        let addr = mock.stop().await;
        eventually("it is seen to be gone", || async {
            router.get("/workers").await.json()["workers"][0]["state"] == "unhealthy"
        })
        .await;
        let again = Mock::at(addr, &[]).await;
        router.all_ready(1).await;
        assert_eq!(router.chat().await.status, 200);
        assert_eq!(again.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn drained_worker_whose_probe_breaks_once_is_still_probed_often() {
    timed(async {
        let mock = Mock::start(&[]).await.with_drain();
        let router = Router::regular(&[&mock], &RARELY).await;
        let drain = format!("/workers/{}/drain", id_of(&router, &mock).await);
        assert_eq!(router.post(&drain, &Value::Null).await.status, 202);
        is_in(&router, &mock, "draining").await;
        // As from a process that ends while it answers.
        mock.set_unhealthy(true);
        mock.set_draining(false);
        eventually("a probe is broken", || async {
            let bad = "baton_router_health_probes_total{result=\"bad\",role=\"regular\"}";
            router.metric(bad).await >= 1.0
        })
        .await;
        mock.set_unhealthy(false);
        is_in(&router, &mock, "ready").await;
    })
    .await;
}

#[tokio::test]
async fn worker_without_the_route_is_drained_by_this_router_alone_and_the_answer_says_so() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let other = Mock::start(&[]).await;
        let router = Router::regular(&[&mock, &other], &RARELY).await;
        let id = id_of(&router, &mock).await;
        let reply = router
            .post(&format!("/workers/{id}/drain"), &Value::Null)
            .await;
        assert_eq!(reply.status, 202);
        let reply = reply.json();
        assert_eq!(reply["drained_by"], "router");
        assert!(reply["reason"].as_str().unwrap().contains("404"), "{reply}");
        assert!(
            reply["message"]
                .as_str()
                .unwrap()
                .contains("other routers still send to it"),
            "{reply}"
        );
        eventually("it is gone", || async {
            router.get(&format!("/workers/{id}")).await.status == 404
        })
        .await;
        let ghost = format!("/workers/{id}/undrain");
        assert_eq!(router.post(&ghost, &Value::Null).await.code(), "not_found");
    })
    .await;
}

#[tokio::test]
async fn undrain_of_a_worker_that_this_router_drains_registers_it_again() {
    timed(async {
        let busy = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate), Act::Answer]).await;
        let router = Router::regular(&[&busy], &RARELY).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        assert!(answering.piece().await.is_some());
        let id = id_of(&router, &busy).await;
        router
            .post(&format!("/workers/{id}/drain"), &Value::Null)
            .await;
        assert_eq!(shown(&router, &busy).await["drained_by"], "router");
        let left = router.get(&format!("/workers/{id}/drain")).await.json();
        assert_eq!(
            (&left["left"], &left["is_drained"]),
            (&json!({"requests": 1}), &json!(false))
        );
        let reply = router
            .post(&format!("/workers/{id}/undrain"), &Value::Null)
            .await;
        assert_eq!(reply.status, 202, "{}", reply.text());
        let again = reply.json()["worker_id"].as_str().unwrap().to_owned();
        assert_ne!(again, id);
        let twice = router
            .post(&format!("/workers/{id}/undrain"), &Value::Null)
            .await;
        assert_eq!(twice.json()["worker_id"], json!(again));
        eventually("the new one serves", || async {
            router.get(&format!("/workers/{again}")).await.json()["state"] == "ready"
        })
        .await;
        assert_eq!(router.chat().await.status, 200);
        busy.release();
        assert!(answering.read().await.text().ends_with("data: [DONE]\n\n"));
    })
    .await;
}

#[tokio::test]
async fn orders_carry_the_routers_own_key_and_refusals_come_back() {
    timed(async {
        let mock = Mock::start(&[]).await.with_drain();
        let url = mock.url();
        let flags = [
            "--worker-urls",
            &url,
            "--api-key",
            "k",
            "--control-plane-api-keys",
            "1:ops:admin:opskey",
        ];
        let router = Router::start(&flags).await;
        eventually("it is ready", || async {
            router.get("/readyz").await.status == 200
        })
        .await;
        let ops = [("authorization", "Bearer opskey")];
        let post = async |path: &str| router.send(http::Method::POST, path, &ops, "").await;
        assert_eq!(post("/workers/1/drain").await.status, 202);
        assert_eq!(mock.orders(), ["Bearer k"]);

        // A node that got SIGTERM does not return.
        let error =
            json!({"message": "it exits", "type": "t", "param": null, "code": "wrong_state"});
        let mock_says = |status, body| mock.answers("/undrain", status, body);
        mock_says(409, json!({"error": error}));
        let reply = post("/workers/1/undrain").await;
        assert_eq!((reply.status, reply.code().as_str()), (409, "wrong_state"));
        mock_says(
            401,
            json!({"error": {"message": "wrong key", "code": "invalid_api_key"}}),
        );
        let reply = post("/workers/1/undrain").await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (502, "upstream_error")
        );
        assert!(
            reply.text().contains("401 Unauthorized, wrong key"),
            "{}",
            reply.text()
        );
    })
    .await;
}

#[tokio::test]
async fn unreachable_worker_is_drained_here() {
    timed(async {
        let mock = Mock::start(&[]).await.with_drain();
        let router = Router::regular(&[&mock], &RARELY).await;
        let id = id_of(&router, &mock).await;
        mock.stop().await;
        let reply = router
            .post(&format!("/workers/{id}/drain"), &Value::Null)
            .await
            .json();
        assert_eq!(reply["drained_by"], "router");
        assert!(
            reply["reason"].as_str().unwrap().contains("not there"),
            "{reply}"
        );
        eventually("it is gone", || async {
            router.get("/workers").await.json()["total"] == 0
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn ready_peers_count_workers_that_could_take_the_requests() {
    timed(async {
        let ours = |page_size: &str| {
            let fingerprint = json!({"page_size": page_size});
            json!({"engine": "baton", "fingerprint": fingerprint})
        };
        let p = Mock::start(&[]).await.with_info(ours("16")).with_drain();
        let d1 = Mock::start(&[]).await.with_info(ours("16")).with_drain();
        let d2 = Mock::start(&[]).await.with_info(ours("16")).with_drain();
        let unpaired = Mock::start(&[]).await.with_info(ours("32"));
        let router = Router::pd(&[&p], &[&d1, &d2, &unpaired], &OFTEN).await;
        let peers_of = async |mock: &Mock| shown(&router, mock).await["ready_peers"].clone();
        for mock in [&p, &d1, &d2, &unpaired] {
            is_in(&router, mock, "ready").await;
        }
        assert_eq!(peers_of(&p).await, json!(0));
        assert_eq!(
            peers_of(&d1).await,
            json!(1),
            "one of the two has no partner"
        );
        eventually("a probe carries the number", || async {
            (p.ready_peers().as_deref(), d1.ready_peers().as_deref()) == (Some("0"), Some("1"))
        })
        .await;

        let order = async |mock: &Mock, verb: &str| {
            let path = format!("/workers/{}/{verb}", id_of(&router, mock).await);
            router.post(&path, &Value::Null).await.json()
        };
        let reply = order(&d1, "drain").await;
        assert_eq!(reply["ready_peers"], json!(1));
        assert!(!reply["message"].as_str().unwrap().contains("last ready"));
        assert_eq!(peers_of(&d2).await, json!(0));
        let path = format!("/workers/{}/drain", id_of(&router, &d2).await);
        let report = router.get(&path).await.json();
        assert_eq!(
            (&report["role"], &report["ready_peers"]),
            (&json!("decode"), &json!(0))
        );
        let reply = order(&d2, "drain").await;
        let message = reply["message"].as_str().unwrap();
        let warning = "it was the last ready decode worker: requests";
        assert!(message.contains(warning), "{message}");
        assert_eq!(router.get("/readyz").await.json()["serves"], false);

        let reply = order(&d1, "undrain").await;
        assert_eq!(
            (&reply["status"], &reply["state"]),
            (&json!("accepted"), &json!("ready"))
        );
    })
    .await;
}

// ---- readiness of the router ----

#[tokio::test]
async fn router_that_has_served_stays_ready_without_workers_and_answers_503_itself() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &OFTEN).await;
        let ready = router.get("/readyz").await;
        assert_eq!((ready.status, &ready.json()["serves"]), (200, &json!(true)));
        mock.stop().await;
        eventually("it has no worker", || async {
            router.get("/readyz").await.json()["serves"] == false
        })
        .await;
        let ready = router.get("/readyz").await;
        assert_eq!(
            (ready.status, &ready.json()["status"]),
            (200, &json!("ready"))
        );
        assert!(
            ready.json()["reason"]
                .as_str()
                .unwrap()
                .contains("no regular worker")
        );
        let reply = router.post("/v1/chat/completions", &chat(false)).await;
        assert_eq!((reply.status, reply.code().as_str()), (503, "no_worker"));
        assert_eq!(router.get("/health_generate").await.code(), "no_worker");
    })
    .await;
}

#[tokio::test]
async fn router_with_discovery_is_ready_once_every_source_was_read() {
    timed(async {
        let mock = Mock::start(&[]).await;
        mock.set_unhealthy(true);
        let file = TempFile::new("[]");
        let router = Router::start(&["--discovery-file", file.path()]).await;
        let ready = router.get("/readyz").await;
        assert_eq!((ready.status, ready.code().as_str()), (503, "no_worker"));
        assert!(ready.text().contains("0 of 1 sources"), "{}", ready.text());
        file.write(&json!([{"url": mock.url()}]).to_string());
        eventually("the list was read", || async {
            router.get("/readyz").await.status == 200
        })
        .await;
        let ready = router.get("/readyz").await.json();
        assert_eq!(
            (&ready["serves"], &ready["regular"]["known"]),
            (&json!(false), &json!(1))
        );

        // Workers of flags must have been ready once all the same.
        let url = mock.url();
        let both = ["--discovery-file", file.path(), "--worker-urls", &url];
        let router = Router::start(&both).await;
        assert_eq!(router.get("/readyz").await.status, 503);
        mock.set_unhealthy(false);
        eventually("the static worker is ready", || async {
            router.get("/readyz").await.status == 200
        })
        .await;
    })
    .await;
}
