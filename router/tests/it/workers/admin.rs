//! Workers, probes, limits, keys.

use http::Method;
use serde_json::{Value, json};

use crate::support::{Act, Client, End, Mock, Router, TOKEN, chat, eventually, timed};

#[tokio::test]
async fn workers_come_and_go_over_rest() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::start(&[]).await;
        assert_eq!(router.chat().await.code(), "no_worker");

        let added = router
            .post(
                "/workers",
                &json!({"url": mock.url(), "worker_type": "regular"}),
            )
            .await;
        assert_eq!(added.status, 202);
        let id = added.json()["id"].as_str().unwrap().to_owned();
        let again = router.post("/workers", &json!({"url": mock.url()})).await;
        assert_eq!(
            (again.status, again.code().as_str()),
            (409, "duplicate_worker")
        );
        router.all_ready(1).await;
        assert_eq!(router.chat().await.status, 200);

        let shown = router.get(&format!("/workers/{id}")).await.json();
        assert_eq!(shown["url"], mock.url());
        assert_eq!(shown["worker_type"], "regular");
        assert_eq!(shown["is_healthy"], true);

        let gone = router
            .send(Method::DELETE, &format!("/workers/{id}"), &[], "")
            .await;
        assert_eq!(gone.status, 202);
        assert_eq!(
            router.get(&format!("/workers/{id}")).await.code(),
            "not_found"
        );
        assert_eq!(router.get("/workers").await.json()["total"], 0);
        assert_eq!(router.chat().await.status, 503);
    })
    .await;
}

#[tokio::test]
async fn worker_can_be_named_by_its_url() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let path = format!("/workers/http%3A%2F%2F{}", mock.addr);
        assert_eq!(router.get(&path).await.json()["url"], mock.url());
        let gone = router.send(Method::DELETE, &path, &[], "").await;
        assert_eq!(gone.status, 202);
        let id = gone.json()["worker_id"].clone();
        assert_eq!(id, "1", "its id is returned");
        assert_eq!(router.get(&path).await.code(), "not_found");
        assert_eq!(router.get("/workers").await.json()["total"], 0);
    })
    .await;
}

/// A worker that takes connections from the start, and answers when it is let.
async fn slow_starter(flags: &[&str]) -> (tokio::net::TcpListener, Router) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut all = vec!["--worker-urls", &url];
    all.extend(flags);
    let router = Router::start(&all).await;
    (listener, router)
}

#[tokio::test]
async fn first_request_waits_for_the_first_probe() {
    timed(async {
        let flags = ["--max-concurrent-requests", "1", "--queue-size", "0"];
        let (listener, router) = slow_starter(&flags).await;
        let addr = router.running.addr;
        let ask = || {
            tokio::spawn(async move { Client::connect(addr).await.chat(false).await.read().await })
        };
        let (mut a, mut b) = (ask(), ask());
        let (refused, waiting) = tokio::select! {
            reply = &mut a => (reply, b),
            reply = &mut b => (reply, a),
        };
        assert_eq!(
            refused.unwrap().status,
            429,
            "the other one waits for the worker"
        );
        let worker = axum::Router::new()
            .route("/health", axum::routing::get(|| async {}))
            .route(
                "/v1/chat/completions",
                axum::routing::post(|| async { "here" }),
            );
        let serving = tokio::spawn(async { axum::serve(listener, worker).await });
        let reply = waiting.await.unwrap();
        assert_eq!((reply.status, reply.text().as_str()), (200, "here"));
        serving.abort();
    })
    .await;
}

#[tokio::test]
async fn worker_that_is_silent_at_its_first_probe_is_not_waited_for() {
    timed(async {
        let (_listener, router) = slow_starter(&["--health-check-timeout-secs", "300"]).await;
        assert_eq!(router.chat().await.code(), "no_worker");
        let gone = router.send(Method::DELETE, "/workers/1", &[], "").await;
        assert_eq!(gone.status, 202);
        assert_eq!(router.chat().await.code(), "no_worker");
    })
    .await;
}

#[tokio::test]
async fn drained_worker_finishes_its_request_and_goes() {
    timed(async {
        let busy = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate)]).await;
        let other = Mock::start(&[]).await;
        let router = Router::regular(&[&busy], &[]).await;
        let mut client = Client::connect(router.running.addr).await;
        let mut answering = client.chat(true).await;
        assert!(answering.piece().await.is_some());

        let listed = router.get("/workers").await.json();
        let id = listed["workers"][0]["id"].as_str().unwrap().to_owned();
        let drain = format!("/workers/{id}/drain");
        let drained = router.post(&drain, &Value::Null).await;
        assert_eq!(
            (drained.status, drained.json()["load"].as_u64()),
            (202, Some(1))
        );
        assert_eq!(router.chat().await.code(), "no_worker");
        assert_eq!(router.post(&drain, &Value::Null).await.status, 202);
        let shown = router.get(&format!("/workers/{id}")).await.json();
        assert_eq!(
            (&shown["state"], &shown["load"]),
            (&json!("draining"), &json!(1))
        );
        assert_eq!(
            router
                .metric("baton_router_workers{role=\"regular\",state=\"draining\"}")
                .await,
            1.0
        );

        // Its address may be registered again meanwhile, for example with a new role after a
        // restart.
        router.post("/workers", &json!({"url": other.url()})).await;
        router.post("/workers", &json!({"url": busy.url()})).await;
        eventually("both new ones are ready", || async {
            let list = router.get("/workers").await.json();
            let states = list["workers"]
                .as_array()
                .unwrap()
                .iter()
                .map(|w| w["state"].clone());
            states.collect::<Vec<_>>() == ["draining", "ready", "ready"]
        })
        .await;

        busy.release();
        assert!(answering.read().await.text().ends_with("data: [DONE]\n\n"));
        eventually("the drained one is gone", || async {
            router.get(&format!("/workers/{id}")).await.status == 404
        })
        .await;
        assert_eq!(router.post(&drain, &Value::Null).await.code(), "not_found");
        assert_eq!(router.get("/workers").await.json()["total"], 2);
    })
    .await;
}

#[tokio::test]
async fn older_worker_paths_work_too() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::start(&[]).await;
        let url = mock.url();
        assert_eq!(
            router
                .post(&format!("/add_worker?url={url}"), &Value::Null)
                .await
                .status,
            200
        );
        router.all_ready(1).await;
        assert_eq!(
            router.get("/list_workers").await.json()["urls"],
            json!([url])
        );
        assert_eq!(
            router.get("/get_loads").await.json()["workers"][0]["load"],
            0
        );
        assert_eq!(
            router
                .post(&format!("/remove_worker?url={url}"), &Value::Null)
                .await
                .status,
            200
        );
        assert_eq!(
            router
                .post(&format!("/remove_worker?url={url}"), &Value::Null)
                .await
                .status,
            404
        );
        assert_eq!(
            router.post("/add_worker", &Value::Null).await.code(),
            "missing_field"
        );
    })
    .await;
}

#[tokio::test]
async fn bad_registrations_say_why() {
    timed(async {
        let router = Router::start(&[]).await;
        for (body, code) in [
            (json!({"url": "https://x:1"}), "invalid_value"),
            (json!({"url": "ftp://x:1"}), "invalid_value"),
            (
                json!({"url": "http://x:1", "worker_type": "decode"}),
                "invalid_value",
            ),
            (
                json!({"url": "http://x:1", "worker_type": "boss"}),
                "invalid_json",
            ),
            (json!({}), "invalid_json"),
        ] {
            let reply = router.post("/workers", &body).await;
            assert_eq!((reply.status, reply.code().as_str()), (400, code), "{body}");
        }
    })
    .await;
}

#[tokio::test]
async fn ready_means_one_of_each_role() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::start(&["--pd-disaggregation"]).await;
        assert_eq!(router.get("/health").await.status, 200);
        let add = |mock: &Mock, role: &str| json!({"url": mock.url(), "worker_type": role, "bootstrap_port": 1});
        assert_eq!(router.get("/readyz").await.status, 503);
        router.post("/workers", &add(&p, "prefill")).await;
        router.all_ready(1).await;
        let reply = router.get("/readyz").await;
        assert_eq!(reply.status, 503);
        assert!(reply.json()["reason"].as_str().unwrap().contains("decode"), "{}", reply.text());
        router.post("/workers", &add(&d, "decode")).await;
        router.all_ready(2).await;
        assert_eq!(router.get("/readyz").await.status, 200);
        d.set_unhealthy(true);
        let counts = "baton_router_workers{role=\"decode\",state=\"ready\"}";
        assert_eq!(router.metric(counts).await, 1.0);
    })
    .await;
}

#[tokio::test]
async fn failing_probes_take_a_worker_out_and_good_ones_take_it_in() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let flags = [
            "--health-check-interval-secs",
            "1",
            "--health-failure-threshold",
            "1",
            "--health-success-threshold",
            "1",
        ];
        let router = Router::regular(&[&mock], &flags).await;
        mock.set_unhealthy(true);
        let serves = async |is: bool| router.get("/readyz").await.json()["serves"] == is;
        eventually("out", || serves(false)).await;
        mock.set_unhealthy(false);
        eventually("in", || serves(true)).await;
    })
    .await;
}

#[tokio::test]
async fn root_and_version_say_what_answers() {
    timed(async {
        let router = Router::start(&[]).await;
        let (root, version) = (router.get("/").await, router.get("/version").await);
        assert_eq!((root.status, version.status), (200, 200));
        assert_eq!(root.json()["name"], "baton-router");
        assert_eq!(root.json()["version"], version.json()["version"]);
        assert_eq!(version.json()["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(
            router.get(root.json()["ui"].as_str().unwrap()).await.status,
            200
        );
    })
    .await;
}

#[tokio::test]
async fn only_prefill_workers_have_a_bootstrap_port() {
    timed(async {
        let info = json!({"engine": "baton", "disaggregation_bootstrap_port": 8998});
        let p = Mock::start(&[]).await.with_info(info.clone());
        let d = Mock::start(&[]).await.with_info(info);
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let list = router.get("/workers").await.json();
        for worker in list["workers"].as_array().unwrap() {
            let is_prefill = worker["worker_type"] == "prefill";
            let expected = is_prefill.then_some(8998).map_or(Value::Null, Value::from);
            assert_eq!(worker["bootstrap_port"], expected, "{worker}");
        }
    })
    .await;
}

#[tokio::test]
async fn errors_are_json_on_every_path() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &["--max-payload-size", "1000"]).await;
        let reply = router.get("/v1/audio/speech").await;
        assert_eq!((reply.status, reply.code().as_str()), (404, "not_found"));
        let reply = router.get("/v1/chat/completions").await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (405, "method_not_allowed")
        );
        assert!(reply.headers["allow"].to_str().unwrap().contains("POST"));
        assert!(reply.headers.contains_key("x-request-id"));
        for body in ["", "{", "[]", "{\"a\":tru}"] {
            let reply = router
                .send(Method::POST, "/v1/chat/completions", &[], body)
                .await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (400, "invalid_json"),
                "{body}"
            );
        }
        let long = json!({"prompt": "x".repeat(2000)});
        let reply = router.post("/v1/completions", &long).await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (413, "payload_too_large")
        );
        assert_eq!(mock.count(), 0);
        for counted in [
            "route=\"unmatched\",status=\"4xx\"",
            "outcome=\"method_not_allowed\"",
            "outcome=\"invalid_json\"",
            "outcome=\"payload_too_large\"",
        ] {
            let text = router.get("/metrics").await.text();
            assert!(
                text.lines()
                    .any(|l| l.starts_with("baton_router_requests_total{") && l.contains(counted)),
                "{counted}"
            );
        }
    })
    .await;
}

#[tokio::test]
async fn key_is_wanted_everywhere_but_at_probes() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let url = mock.url();
        let router = Router::start(&["--worker-urls", &url, "--api-key", "secret"]).await;
        eventually("ready without a key", || async {
            router.get("/readyz").await.status == 200
        })
        .await;
        assert_eq!(router.get("/metrics").await.status, 200);
        for headers in [
            &[][..],
            &[("authorization", "Bearer secreT")],
            &[("authorization", "secret")],
        ] {
            let reply = router
                .send(Method::POST, "/v1/chat/completions", headers, "{}")
                .await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (401, "invalid_api_key")
            );
        }
        let good = [("authorization", "Bearer secret")];
        assert_eq!(
            router.send(Method::GET, "/workers", &good, "").await.status,
            200
        );
        assert_eq!(
            router
                .send(Method::POST, "/v1/chat/completions", &good, "{}")
                .await
                .status,
            200
        );
        assert_eq!(mock.seen()[0].headers["authorization"], "Bearer secret");
    })
    .await;
}

#[tokio::test]
async fn queue_is_bounded_and_moves_on() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Gate)]).await;
        let flags = ["--max-concurrent-requests", "1", "--queue-size", "1"];
        let router = Router::regular(&[&mock], &flags).await;
        let mut first = Client::connect(router.running.addr).await;
        let mut running = first.chat(true).await;
        running.piece().await.unwrap();

        let addr = router.running.addr;
        let waiting =
            tokio::spawn(async move { Client::connect(addr).await.chat(true).await.read().await });
        eventually("one waits", || async {
            router.metric("baton_router_queued_requests").await == 1.0
        })
        .await;
        let reply = router.chat().await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (429, "rate_limit_exceeded")
        );
        assert_eq!(reply.headers["retry-after"], "1");

        mock.release();
        assert!(running.read().await.text().ends_with("[DONE]\n\n"));
        eventually("the waiting one runs", || async { mock.count() == 2 }).await;
        mock.release();
        assert_eq!(waiting.await.unwrap().status, 200);
    })
    .await;
}

#[tokio::test]
async fn queue_without_places_times_out() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Hang)]).await;
        let flags = [
            "--max-concurrent-requests",
            "1",
            "--queue-timeout-secs",
            "0",
        ];
        let router = Router::regular(&[&mock], &flags).await;
        let mut first = Client::connect(router.running.addr).await;
        let mut running = first.chat(true).await;
        running.piece().await.unwrap();
        let reply = router.chat().await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (503, "queue_timeout")
        );
    })
    .await;
}

#[tokio::test]
async fn fan_out_reaches_all_and_forwarding_one() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b], &[]).await;
        assert_eq!(router.post("/flush_cache", &json!({})).await.status, 200);
        assert_eq!(
            router
                .post("/abort_request", &json!({"rid": "x"}))
                .await
                .status,
            200
        );
        for mock in [&a, &b] {
            let paths: Vec<_> = mock.seen().iter().map(|s| s.path.clone()).collect();
            assert_eq!(paths, ["/flush_cache", "/abort_request"]);
            assert_eq!(mock.seen()[1].body["rid"], "x");
        }
        assert_eq!(
            router.get("/get_model_info").await.json(),
            json!({"ok": true})
        );
        assert_eq!(
            router
                .post("/tokenize", &json!({"prompt": "x"}))
                .await
                .status,
            200
        );
        assert_eq!(a.count() + b.count(), 6);
    })
    .await;
}

#[tokio::test]
async fn browsers_are_let_in_by_origin() {
    timed(async {
        let router = Router::start(&["--cors-allowed-origins", "http://ui"]).await;
        let asked = [
            ("origin", "http://ui"),
            ("access-control-request-method", "POST"),
        ];
        let reply = router
            .send(Method::OPTIONS, "/v1/chat/completions", &asked, "")
            .await;
        assert_eq!(reply.status, 204);
        assert_eq!(reply.headers["access-control-allow-origin"], "http://ui");
        let other = router
            .send(Method::GET, "/health", &[("origin", "http://evil")], "")
            .await;
        assert!(!other.headers.contains_key("access-control-allow-origin"));
    })
    .await;
}

#[tokio::test]
async fn connection_serves_many_requests() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let mut client = Client::connect(router.running.addr).await;
        for stream in [false, true, false] {
            let body = chat(stream).to_string();
            let reply = client
                .send(Method::POST, "/v1/chat/completions", &[], &body)
                .await
                .read()
                .await;
            assert_eq!(reply.status, 200);
        }
    })
    .await;
}

#[tokio::test]
async fn metrics_can_have_a_port_of_their_own() {
    timed(async {
        let router = Router::start(&["--prometheus-port", "0"]).await;
        let addr = router.running.metrics_addr.unwrap();
        let mut client = Client::connect(addr).await;
        let reply = client
            .send(Method::GET, "/metrics", &[], "")
            .await
            .read()
            .await;
        assert!(reply.text().contains("baton_router_build_info"));
        let reply = client
            .send(Method::GET, "/workers", &[], "")
            .await
            .read()
            .await;
        assert_eq!(reply.code(), "not_found");
    })
    .await;
}

#[tokio::test]
async fn port_in_use_is_said_so() {
    timed(async {
        let router = Router::start(&[]).await;
        let port = router.running.addr.port().to_string();
        let argv = ["baton-router", "--host", "127.0.0.1", "--port", &port].map(str::to_owned);
        let config = baton_router::RouterConfig::parse(&argv).unwrap();
        let err = baton_router::RunningServer::start(config)
            .await
            .err()
            .unwrap();
        assert!(err.contains(&port) && err.contains("in use"), "{err}");
    })
    .await;
}

#[tokio::test]
async fn worker_that_does_not_come_up_says_why() {
    timed(async {
        let addr = Mock::start(&[]).await.stop().await;
        let router = Router::start(&["--worker-urls", &format!("http://{addr}")]).await;
        eventually("the reason is reported", || async {
            let workers = router.get("/workers").await.json();
            let worker = &workers["workers"][0];
            let reason = worker["reason"].as_str().unwrap_or_default();
            worker["state"] == "starting" && reason.contains("refused")
        })
        .await;
    })
    .await;
}
