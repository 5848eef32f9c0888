//! Requests of operators to the workers through the router.

use http::Method;
use serde_json::json;

use crate::support::{Mock, Router, timed};

#[tokio::test]
async fn models_of_all_workers_are_one_list() {
    timed(async {
        let model = |id: &str| json!({"id": id, "object": "model", "owned_by": "x"});
        let (a, b, broken) = (
            Mock::start(&[]).await,
            Mock::start(&[]).await,
            Mock::start(&[]).await,
        );
        a.answers(
            "/v1/models",
            200,
            json!({"object": "list", "data": [model("m"), model("lora")]}),
        );
        b.answers(
            "/v1/models",
            200,
            json!({"object": "list", "data": [model("m"), model("n")]}),
        );
        broken.answers("/v1/models", 500, json!({"error": "x"}));
        let router = Router::regular(&[&a, &b, &broken], &[]).await;
        let list = router.get("/v1/models").await;
        assert_eq!(list.status, 200);
        let list = list.json();
        assert_eq!(list["object"], "list");
        let mut ids: Vec<_> = list["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| m["id"].as_str().unwrap())
            .collect();
        ids.sort_unstable();
        assert_eq!(ids, ["lora", "m", "n"]);
        // No worker has a list: the first one's own error.
        let router = Router::regular(&[&broken], &[]).await;
        assert_eq!(router.get("/v1/models").await.status, 500);
        let router = Router::start(&[]).await;
        assert_eq!(router.get("/v1/models").await.code(), "no_worker");
    })
    .await;
}

#[tokio::test]
async fn models_of_baton_engines_are_owned_by_baton() {
    timed(async {
        let card = |id: &str| json!({"id": id, "object": "model", "created": 1, "owned_by": "sglang", "root": id, "parent": null, "max_model_len": 8192});
        let list = |id: &str| json!({"object": "list", "data": [card(id)]});
        let ours = Mock::start(&[]).await;
        let ours = ours.with_info(json!({"engine": "baton"}));
        let sglang = Mock::start(&[]).await;
        ours.answers("/v1/models", 200, list("ours"));
        sglang.answers("/v1/models", 200, list("theirs"));
        let router = Router::regular(&[&ours, &sglang], &[]).await;
        for (id, owner) in [("ours", "baton"), ("theirs", "sglang")] {
            let shown = router.get(&format!("/v1/models/{id}")).await.json();
            let mut expected = card(id);
            expected["owned_by"] = owner.into();
            assert_eq!(shown, expected);
            let all = router.get("/v1/models").await.json();
            assert!(all["data"].as_array().unwrap().contains(&expected), "{all}");
        }
    })
    .await;
}

#[tokio::test]
async fn verb_about_a_request_finds_the_worker_that_runs_it() {
    timed(async {
        let (p, d1, d2) = (
            Mock::start(&[]).await,
            Mock::start(&[]).await,
            Mock::start(&[]).await,
        );
        let unknown = json!({"error": {"code": "not_found", "message": "no such request"}});
        let path = "/v1/requests/r-1/suspend";
        for mock in [&p, &d1, &d2] {
            mock.answers(path, 404, unknown.clone());
        }
        let router = Router::pd(&[&p], &[&d1, &d2], &[]).await;
        let reply = router.post(path, &json!({})).await;
        assert_eq!((reply.status, reply.code().as_str()), (404, "not_found"));
        assert!(reply.text().contains("r-1"), "{}", reply.text());
        d2.answers(path, 200, json!({"rid": "r-1", "suspended": 1}));
        let reply = router.post(path, &json!({})).await;
        assert_eq!(
            (reply.status, reply.json()["suspended"].clone()),
            (200, json!(1))
        );
        d2.answers(
            path,
            409,
            json!({"error": {"code": "wrong_state", "message": "it is finished"}}),
        );
        let reply = router.post(path, &json!({})).await;
        assert_eq!((reply.status, reply.code().as_str()), (409, "wrong_state"));
    })
    .await;
}

#[tokio::test]
async fn unknown_path_below_a_request_is_404_that_names_the_known_ones() {
    timed(async {
        let worker = Mock::start(&[]).await;
        let router = Router::regular(&[&worker], &[]).await;
        for method in [Method::GET, Method::POST, Method::DELETE] {
            for path in ["/v1/requests/r-1/bogus", "/v1/requests/r-1/suspend/now"] {
                let json = [("content-type", "application/json")];
                let reply = router.send(method.clone(), path, &json, "{}").await;
                let got = (reply.status, reply.code());
                assert_eq!(got, (404, "not_found".to_owned()), "{method} {path}");
                for part in [path, "GET /v1/requests/ID", "/suspend", "/resume"] {
                    assert!(reply.text().contains(part), "{}", reply.text());
                }
            }
        }
        assert_eq!(worker.count(), 0, "the router answers, no worker is asked");
        let reply = router.get("/v1/requests/r-1/suspend").await;
        let got = (reply.status, reply.code());
        assert_eq!(got, (405, "method_not_allowed".to_owned()));
        assert_eq!(reply.headers["allow"], "POST");
    })
    .await;
}

#[tokio::test]
async fn abort_reaches_every_worker_of_both_roles() {
    timed(async {
        let (p, d) = (Mock::start(&[]).await, Mock::start(&[]).await);
        for mock in [&p, &d] {
            mock.answers(
                "/abort_request",
                200,
                json!({"success": true, "aborted": 1}),
            );
        }
        let router = Router::pd(&[&p], &[&d], &[]).await;
        let reply = router.post("/abort_request", &json!({"rid": "r-1"})).await;
        assert_eq!(
            (reply.status, reply.json()["ok"].clone()),
            (200, json!(true))
        );
        for mock in [&p, &d] {
            let answer = reply.json()["workers"][mock.url()]["answer"].clone();
            assert_eq!(answer["aborted"], 1, "{answer}");
        }
    })
    .await;
}

#[tokio::test]
async fn refusal_of_all_workers_is_answered_with_their_error() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b], &[]).await;
        let path = "/abort_request";
        let error = json!({"code": "invalid_value", "message": "give rid", "param": "rid"});
        for mock in [&a, &b] {
            mock.answers(path, 400, json!({"error": error}));
        }
        let reply = router.post(path, &json!({})).await;
        assert_eq!((reply.status, &reply.json()["error"]), (400, &error));
        assert_eq!(reply.json()["workers"][a.url()]["answer"]["error"], error);
        // Workers that disagree, and a refusal that concerns the router's own key.
        b.answers(path, 500, json!({"error": "text"}));
        let reply = router.post(path, &json!({})).await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (502, "upstream_error")
        );
        assert!(reply.text().contains("2 of 2 workers"), "{}", reply.text());
        for mock in [&a, &b] {
            mock.answers(path, 401, json!({"error": error}));
        }
        let reply = router.post(path, &json!({})).await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (502, "upstream_error")
        );
    })
    .await;
}

#[tokio::test]
async fn embeddings_pass_to_one_worker_however_long_they_are() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let long = json!({"data": [{"embedding": vec![0.123; 1 << 20]}]});
        assert!(long.to_string().len() > 5 << 20);
        for mock in [&a, &b] {
            mock.answers("/v1/embeddings", 200, long.clone());
            mock.answers("/v1/rerank", 400, json!({"error": {"code": "bad"}}));
        }
        let router = Router::regular(&[&a, &b], &[]).await;
        let reply = router.post("/v1/embeddings", &json!({"input": "x"})).await;
        assert_eq!((reply.status, reply.json()), (200, long));
        let reply = router.post("/v1/rerank", &json!({})).await;
        assert_eq!((reply.status, reply.code().as_str()), (400, "bad"));
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn engine_metrics_are_one_page() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let page = |n: u32| {
            format!("# HELP q_total q\n# TYPE q_total counter\nq_total{{dp_rank=\"0\"}} {n}\n")
        };
        a.answers_text("/metrics", page(1));
        b.answers_text("/metrics", page(2));
        let router = Router::regular(&[&a, &b], &[]).await;
        let reply = router.send(Method::GET, "/engine_metrics", &[], "").await;
        assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4");
        let text = reply.text();
        assert_eq!(text.matches("# TYPE q_total").count(), 1, "{text}");
        for (mock, n) in [(&a, 1), (&b, 2)] {
            let line = format!("q_total{{worker=\"{}\",dp_rank=\"0\"}} {n}\n", mock.url());
            assert!(text.contains(&line), "{text}");
        }
    })
    .await;
}

#[tokio::test]
async fn models_have_anthropics_form_for_its_clients() {
    timed(async {
        let card = json!({"id": "m", "object": "model", "created": 1, "owned_by": "x"});
        let worker = Mock::start(&[]).await;
        worker.answers("/v1/models", 200, json!({"object": "list", "data": [card]}));
        let router = Router::regular(&[&worker], &[]).await;
        let version = [("anthropic-version", "2023-06-01")];
        let ask = async |path: &str| router.send(Method::GET, path, &version, "").await.json();
        let list = ask("/v1/models").await;
        let model = &list["data"][0];
        assert_eq!(
            (&model["type"], &model["id"]),
            (&json!("model"), &json!("m"))
        );
        assert_eq!(
            (&list["last_id"], &list["has_more"]),
            (&json!("m"), &json!(false))
        );
        assert_eq!(ask("/v1/models/m").await, *model);
        assert_eq!(router.get("/v1/models/m").await.json()["object"], "model");
    })
    .await;
}

#[tokio::test]
async fn stored_responses_are_refused() {
    timed(async {
        let router = Router::start(&[]).await;
        for (method, path) in [
            (Method::GET, "/v1/responses/resp_1"),
            (Method::DELETE, "/v1/responses/resp_1"),
            (Method::POST, "/v1/responses/resp_1/cancel"),
            (Method::GET, "/v1/responses/resp_1/input_items"),
            (Method::POST, "/v1/responses/compact"),
        ] {
            let reply = router.send(method, path, &[], "").await;
            assert_eq!(
                (reply.status, reply.code().as_str()),
                (400, "unsupported_parameter")
            );
        }
    })
    .await;
}
