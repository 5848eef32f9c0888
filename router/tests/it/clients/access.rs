//! Which key opens which path, for every route there is.

use std::collections::BTreeSet;
use std::sync::Arc;

use http::Method;
use serde_json::{Value, json};

use crate::support::{Client, Mock, Router, Seen, chat, eventually, timed};

/// Method, path as it is registered, the key it needs, and the status with that key.
const ROUTES: &[(&str, &str, &str, u16)] = &[
    ("POST", "/v1/chat/completions", "client", 200),
    ("POST", "/v1/completions", "client", 200),
    ("POST", "/v1/responses", "client", 200),
    ("GET", "/v1/responses/{id}", "client", 400),
    ("DELETE", "/v1/responses/{id}", "client", 400),
    ("GET", "/v1/responses/{id}/input_items", "client", 400),
    ("POST", "/v1/responses/{id}/cancel", "client", 400),
    ("POST", "/v1/responses/compact", "client", 400),
    ("POST", "/v1/messages", "client", 200),
    ("POST", "/v1/messages/count_tokens", "client", 200),
    ("POST", "/generate", "client", 200),
    ("PUT", "/generate", "client", 200),
    ("POST", "/tokenize", "client", 200),
    ("POST", "/v1/tokenize", "client", 200),
    ("POST", "/detokenize", "client", 200),
    ("POST", "/v1/detokenize", "client", 200),
    ("POST", "/v1/embeddings", "client", 200),
    ("POST", "/encode", "client", 200),
    ("POST", "/v1/rerank", "client", 200),
    ("POST", "/rerank", "client", 200),
    ("POST", "/v1/score", "client", 200),
    ("POST", "/score", "client", 200),
    ("POST", "/v1/classify", "client", 200),
    ("POST", "/classify", "client", 200),
    ("POST", "/pooling", "client", 200),
    ("POST", "/parse_function_call", "client", 200),
    ("POST", "/separate_reasoning", "client", 200),
    ("POST", "/v1/audio/transcriptions", "client", 200),
    ("GET", "/v1/models", "client", 200),
    ("GET", "/v1/models/{id}", "client", 200),
    ("GET", "/get_model_info", "client", 200),
    ("GET", "/model_info", "client", 200),
    ("GET", "/get_server_info", "client", 200),
    ("GET", "/server_info", "client", 200),
    ("GET", "/", "open", 200),
    ("GET", "/version", "open", 200),
    ("GET", "/openapi.json", "open", 200),
    ("GET", "/docs", "open", 200),
    ("GET", "/health", "open", 200),
    ("GET", "/ping", "open", 200),
    ("GET", "/livez", "open", 200),
    ("GET", "/liveness", "open", 200),
    ("GET", "/readyz", "open", 200),
    ("GET", "/readiness", "open", 200),
    ("GET", "/metrics", "open", 200),
    ("GET", "/ui", "open", 308),
    ("GET", "/ui/", "open", 200),
    ("GET", "/ui/{file}", "open", 200),
    ("GET", "/ui/feed", "control", 200),
    ("GET", "/health_generate", "control", 200),
    ("GET", "/workers", "control", 200),
    ("POST", "/workers", "control", 400),
    ("GET", "/workers/{id}", "control", 404),
    ("DELETE", "/workers/{id}", "control", 404),
    ("GET", "/workers/{id}/drain", "control", 404),
    ("POST", "/workers/{id}/drain", "control", 404),
    ("POST", "/workers/{id}/undrain", "control", 404),
    ("POST", "/add_worker", "control", 400),
    ("POST", "/remove_worker", "control", 400),
    ("GET", "/list_workers", "control", 200),
    ("POST", "/flush_cache", "control", 200),
    ("GET", "/flush_cache", "control", 200),
    ("GET", "/get_loads", "control", 200),
    ("GET", "/engine_metrics", "control", 200),
    ("POST", "/abort_request", "control", 200),
    ("POST", "/start_profile", "control", 200),
    ("POST", "/stop_profile", "control", 200),
    ("GET", "/v1/requests/{id}", "control", 404),
    ("POST", "/v1/requests/{id}/suspend", "control", 200),
    ("POST", "/v1/requests/{id}/resume", "control", 200),
    ("GET", "/v1/requests/{id}/{*rest}", "control", 404),
];

const API_KEY: [&str; 2] = ["--api-key", "shared"];
const CONTROL_KEYS: [&str; 3] = [
    "--control-plane-api-keys",
    "ci:CI:admin:boss",
    "mon:Monitoring:user:guest",
];

/// A request to this path of the table.
async fn status(router: &Router, method: &str, path: &str, key: &str, explain: &str) -> u16 {
    let path = path
        .replace("{id}", "99")
        .replace("{file}", "app.js")
        .replace("{*rest}", "unheard/of");
    let method = Method::from_bytes(method.as_bytes()).unwrap();
    let is_head = method == Method::HEAD;
    let key = format!("Bearer {key}");
    let headers = [
        ("content-type", "application/json"),
        ("authorization", key.as_str()),
        ("x-baton-explain", explain),
    ];
    let body = match path.starts_with("/workers") {
        true => "{}".to_owned(),
        false => chat(false).to_string(),
    };
    let mut client = Client::connect(router.running.addr).await;
    let answering = client.send(method, &path, &headers, &body).await;
    if path == "/ui/feed" && answering.response.status() == 200 {
        return 200; // it does not end
    }
    let reply = answering.read().await;
    if reply.status >= 400 && !is_head {
        assert!(reply.json()["error"]["code"].is_string(), "{path}");
    }
    reply.status
}

async fn ready_router(mock: &Mock, flags: &[&str]) -> Router {
    let url = mock.url();
    let router = Router::start(&[&["--worker-urls", &url], flags].concat()).await;
    eventually("the worker is ready", || async {
        router.get("/readyz").await.status == 200
    })
    .await;
    router
}

#[test]
fn every_route_has_a_row() {
    let rows: BTreeSet<_> = ROUTES.iter().map(|row| (row.1, row.2)).collect();
    let routes: BTreeSet<_> = baton_router::route_access().into_iter().collect();
    assert_eq!(rows, routes);
}

#[test]
fn every_route_is_described() {
    let text = include_str!("../../../src/server/api/openapi/openapi.json");
    let document: Value = serde_json::from_str(text).unwrap();
    let mut described = BTreeSet::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            described.insert((method.to_uppercase(), path.clone()));
        }
    }
    // The last row stands for all other paths of a request, which are errors.
    let rows = ROUTES.iter().filter(|row| !row.1.contains("{*"));
    let routes: BTreeSet<_> = rows
        .map(|row| (row.0.to_owned(), row.1.to_owned()))
        .collect();
    assert_eq!(described, routes);
}

#[tokio::test]
async fn worker_reads_which_client_a_request_is_from() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = ready_router(&mock, &[]).await;
        for given in ["1", "2"] {
            let headers = [
                ("x-baton-client", given),
                ("connection", "x-baton-client"),
                ("origin", "http://app.example"),
                ("sec-fetch-site", "same-origin"),
            ];
            let mut client = Client::connect(router.running.addr).await;
            let path = "/v1/chat/completions";
            let body = chat(false).to_string();
            let answering = client.send(Method::POST, path, &headers, &body).await;
            assert_eq!(answering.read().await.status, 200);
        }
        let clients: Vec<_> = mock
            .seen()
            .iter()
            .map(|seen| seen.headers["x-baton-client"].clone())
            .collect();
        assert_eq!(clients.len(), 2);
        for name in ["origin", "sec-fetch-site"] {
            let is_there = |seen: &Arc<Seen>| seen.headers.contains_key(name);
            assert!(
                !mock.seen().iter().any(is_there),
                "{name} is for the router"
            );
        }
        assert_eq!(
            clients[0], clients[1],
            "one address is one client, whatever it says"
        );
        assert!(clients[0] != "1" && clients[0] != "2");
    })
    .await;
}

#[tokio::test]
async fn clients_see_less_of_a_worker_than_operators() {
    timed(async {
        let info = json!({
            "served_model_name": "demo", "context_length": 4096, "tokenizer_fingerprint": "f",
            "model_path": "/srv/models/demo", "pids": [[17]], "host": "10.1.2.3",
            "kv_events_config": "{}", "internal_states": [{"pids": [17]}],
        });
        let mock = Mock::start(&[]).await.with_info(info.clone());
        let few = json!({
            "served_model_name": "demo", "context_length": 4096, "tokenizer_fingerprint": "f",
        });
        let flags = [&API_KEY[..], &CONTROL_KEYS[..]].concat();
        for (flags, key, shown) in [
            (&flags[..], "shared", &few),
            (&flags[..], "boss", &info),
            (&CONTROL_KEYS[..], "any", &few),
            (&CONTROL_KEYS[..], "guest", &few),
            (&CONTROL_KEYS[..], "boss", &info),
            (&API_KEY[..], "shared", &info),
        ] {
            let router = ready_router(&mock, flags).await;
            let key = format!("Bearer {key}");
            let headers = [("authorization", key.as_str())];
            let mut client = Client::connect(router.running.addr).await;
            let path = "/get_server_info";
            let answering = client.send(Method::GET, path, &headers, "").await;
            let reply = answering.read().await;
            assert_eq!(reply.json(), *shown, "{flags:?} {key}");
        }
    })
    .await;
}

#[tokio::test]
async fn errors_below_messages_have_anthropics_form() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = ready_router(&mock, &API_KEY).await;
        for (method, path, key, status, kind) in [
            (
                "POST",
                "/v1/messages/batches",
                "shared",
                404,
                "not_found_error",
            ),
            (
                "GET",
                "/v1/messages/batches/1",
                "shared",
                404,
                "not_found_error",
            ),
            (
                "GET",
                "/v1/messages",
                "shared",
                405,
                "invalid_request_error",
            ),
            (
                "GET",
                "/v1/messages/",
                "shared",
                405,
                "invalid_request_error",
            ),
            (
                "PUT",
                "/v1/messages/count_tokens",
                "shared",
                405,
                "invalid_request_error",
            ),
            (
                "POST",
                "/v1/messages/batches",
                "no",
                401,
                "authentication_error",
            ),
            ("POST", "/v1/messages", "no", 401, "authentication_error"),
        ] {
            let mut client = Client::connect(router.running.addr).await;
            let key = format!("Bearer {key}");
            let headers = [("authorization", key.as_str())];
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let reply = client.send(method, path, &headers, "{}").await.read().await;
            let body = reply.json();
            assert_eq!(reply.status, status, "{path}");
            assert_eq!(body["type"], "error", "{path} {body}");
            assert_eq!(body["error"]["type"], kind, "{path}");
            assert_eq!(
                body["request_id"],
                reply.headers["request-id"].to_str().unwrap()
            );
        }
    })
    .await;
}

#[tokio::test]
async fn head_and_one_trailing_slash_are_accepted() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = ready_router(&mock, &[]).await;
        // `/ui` leads to `/ui/`, and the last row takes any path.
        let rows = ROUTES
            .iter()
            .filter(|row| !row.1.starts_with("/ui") && !row.1.contains("{*"));
        for (method, path, _, wanted) in rows {
            if *path != "/" {
                let slashed = format!("{path}/");
                let got = status(&router, method, &slashed, "", "0").await;
                assert_eq!(got, *wanted, "{method} {slashed}");
            }
            if *method == "GET" {
                let got = status(&router, "HEAD", path, "", "0").await;
                assert_eq!(got, *wanted, "HEAD {path}");
            }
        }
        assert!(
            mock.seen()
                .iter()
                .all(|seen| !seen.path.ends_with('/') || seen.path == "/"),
            "workers get the path without the slash"
        );
        assert_eq!(
            status(&router, "POST", "/v1/completions//", "", "0").await,
            404
        );
    })
    .await;
}

#[tokio::test]
async fn each_route_takes_its_key_and_workers_never_see_a_control_key() {
    timed(async {
        let (mock, guarded_by_nothing) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let both = ready_router(&mock, &[&API_KEY[..], &CONTROL_KEYS].concat()).await;
        let api_only = ready_router(&mock, &API_KEY).await;
        let control_only = ready_router(&mock, &CONTROL_KEYS).await;
        let open = ready_router(&guarded_by_nothing, &[]).await;
        for (method, path, level, with_key) in ROUTES {
            // (router, statuses for no key, the API key, a user key and an admin key)
            let with_key = *with_key;
            // Operators are shown more there than clients.
            let is_info = path.ends_with("server_info");
            let with_admin_key = if is_info { with_key } else { 401 };
            let expected = match *level {
                "open" => [(&both, [with_key; 4]), (&api_only, [with_key; 4])],
                "client" => [
                    (&both, [401, with_key, 401, with_admin_key]),
                    (&api_only, [401, with_key, 401, 401]),
                ],
                _ => [
                    (&both, [401, 401, 403, with_key]),
                    (&api_only, [401, with_key, 401, 401]),
                ],
            };
            let without_api_key = match *level {
                "control" => [401, 401, 403, with_key],
                _ => [with_key; 4],
            };
            let others = [(&control_only, without_api_key), (&open, [with_key; 4])];
            for (at, (router, statuses)) in expected.into_iter().chain(others).enumerate() {
                for (key, wanted) in ["", "shared", "guest", "boss"].into_iter().zip(statuses) {
                    let got = status(router, method, path, key, "0").await;
                    assert_eq!(got, wanted, "{method} {path}, key {key:?}, router {at}");
                }
            }
        }
        for path in ["/v1/chat/completions", "/generate"] {
            let dry_run = async |key| status(&both, "POST", path, key, "dry-run").await;
            assert_eq!((dry_run("shared").await, dry_run("boss").await), (401, 200));
        }
        let seen = mock.seen();
        assert!(
            seen.iter()
                .any(|seen| seen.path == "/v1/requests/99/suspend")
        );
        let leaked: Vec<_> = seen
            .iter()
            .filter(|seen| {
                seen.headers
                    .get("authorization")
                    .is_some_and(|v| v == "Bearer boss")
            })
            .map(|seen| seen.path.as_str())
            .collect();
        assert_eq!(leaked, [] as [&str; 0]);
    })
    .await;
}
