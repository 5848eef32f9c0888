//! Explanations of one request for operators: `x-baton-explain`, GET /v1/requests/{id}, the
//! decision log.

use http::Method;
use serde_json::{Value, json};

use crate::support::*;

const PATH: &str = "/v1/chat/completions";

fn prompt(who: &str, turns: usize) -> String {
    let content = format!("I am {who}. {}", "and so on ".repeat(60 * turns));
    json!({"messages": [{"role": "user", "content": content}], "stream": true}).to_string()
}

async fn ask(router: &Router, body: &str, headers: &[(&str, &str)]) -> Reply {
    router.send(Method::POST, PATH, headers, body).await
}

/// Timeline of an ended request, as GET /v1/requests/{id} returns it.
async fn ended_request(router: &Router, id: &str) -> Value {
    let path = format!("/v1/requests/{id}");
    eventually("the request has ended", || async {
        router.get(&path).await.json()["state"] == "ended"
    })
    .await;
    router.get(&path).await.json()
}

#[tokio::test]
async fn request_is_found_by_the_id_of_its_answer() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let headers = [("x-request-id", "order-4711")];
        assert_eq!(ask(&router, &prompt("a", 1), &headers).await.status, 200);
        for id in ["order-4711", "chatcmpl-order-4711", "cmpl-order-4711"] {
            assert_eq!(ended_request(&router, id).await["id"], "order-4711");
        }
        let reply = router.get("/v1/requests/chatcmpl-order").await;
        assert_eq!((reply.status, reply.code().as_str()), (404, "not_found"));
    })
    .await;
}

#[tokio::test]
async fn dry_run_shows_every_candidate_and_sends_nothing() {
    timed(async {
        let (p, q, d) = (
            Mock::start(&[]).await,
            Mock::start(&[]).await,
            Mock::start(&[]).await,
        );
        let router = Router::pd(&[&p, &q], &[&d], &["--policy", "cost"]).await;
        let reply = ask(&router, &prompt("a", 1), &[("x-baton-explain", "dry-run")]).await;
        assert_eq!(reply.status, 200);
        let explained = reply.json();
        assert_eq!(explained["dry_run"], true);
        let [prefill, decode] = [&explained["decisions"][0], &explained["decisions"][1]];
        assert_eq!(
            (&prefill["role"], &decode["role"]),
            (&json!("prefill"), &json!("decode"))
        );
        assert_eq!(
            (&prefill["why"], &decode["why"]),
            (&json!("no_prefix"), &json!("only"))
        );
        assert_eq!(decode["worker"], d.url());
        let explanation = &prefill["explanation"];
        assert_eq!(
            (&explanation["policy"], &explanation["rule"]),
            (&json!("cost"), &json!("least_cost"))
        );
        assert_eq!(explanation["equals"], 2);
        let names: Vec<&Value> = [0, 1]
            .map(|at| &explanation["candidates"][at]["worker"])
            .into();
        assert!(
            names.contains(&&json!(p.url())) && names.contains(&&json!(q.url())),
            "{explained}"
        );
        for term in [
            "cost_ms",
            "backlog_ms",
            "prefill_ms",
            "partner_ms",
            "crossing_ms",
            "uncached_tokens",
            "load",
        ] {
            assert!(
                explanation["candidates"][0][term].is_number(),
                "{term} in {explained}"
            );
        }
        assert_eq!(
            (
                p.count() + q.count() + d.count(),
                explained["decisions"][2].is_null()
            ),
            (0, true)
        );
        // The policy has not counted it either.
        let backlog = format!(
            "baton_router_backlog_seconds{{role=\"prefill\",worker=\"{}\"}}",
            p.url()
        );
        assert_eq!(router.metric(&backlog).await, 0.0);
    })
    .await;
}

#[tokio::test]
async fn explained_request_is_served_and_its_timeline_reported() {
    timed(async {
        let (a, b) = (Mock::start(&[]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b], &["--policy", "cost"]).await;
        let headers = [("x-baton-explain", "1"), ("x-request-id", "mine")];
        let reply = ask(&router, &prompt("zebra", 1), &headers).await;
        assert_eq!(reply.status, 200);
        let explained: Value =
            serde_json::from_slice(reply.headers["x-baton-explain"].as_bytes()).unwrap();
        assert_eq!(explained["legs"][0]["decision"]["why"], "no_prefix");
        assert!(
            a.seen()
                .iter()
                .chain(&b.seen())
                .all(|seen| !seen.headers.contains_key("x-baton-explain"))
        );

        let request = ended_request(&router, "mine").await;
        assert_eq!(
            (&request["outcome"], &request["status"]),
            (&json!("ok"), &json!(200))
        );
        let leg = &request["legs"][0];
        assert_eq!(leg["worker"], explained["legs"][0]["worker"]);
        assert_eq!(
            leg["explanation"]["candidates"].as_array().unwrap().len(),
            2
        );
        let timeline = &request["timeline"];
        let stages = [
            "read_ms",
            "admitted_ms",
            "parsed_ms",
            "tokenized_ms",
            "first_byte_ms",
            "ended_ms",
        ];
        let mut at: Vec<f64> = stages
            .iter()
            .map(|stage| timeline[stage].as_f64().unwrap())
            .collect();
        for time in ["chosen_ms", "sent_ms", "first_token_ms"] {
            at.insert(at.len() - 2, leg[time].as_f64().unwrap());
        }
        assert!(at.is_sorted(), "{at:?} in {request}");
        assert!(request["prompt"]["blocks"].as_u64().unwrap() >= 2);
        assert!(!request.to_string().contains("zebra"));

        // Without the header: the same, but for the candidates.
        let reply = ask(&router, &prompt("zebra", 1), &[("x-request-id", "other")]).await;
        assert!(!reply.headers.contains_key("x-baton-explain"));
        let request = ended_request(&router, "other").await;
        assert_eq!(request["legs"][0]["why"], "best_holder");
        assert!(request["legs"][0]["cached_tokens"].as_u64().unwrap() > 100);
        assert!(request["legs"][0]["explanation"].is_null());
        assert_eq!(
            router
                .metric("baton_router_stage_seconds_count{stage=\"first_token\"}")
                .await,
            2.0
        );
        assert_eq!(router.get("/v1/requests/unheard-of").await.status, 404);
    })
    .await;
}

/// Ways to name a session: a header or members of the body, with a key of its own each.
const SESSIONS: [(&str, &str, &str); 8] = [
    ("/v1/chat/completions", "x-smg-routing-key", ""),
    ("/v1/messages", "x-claude-code-session-id", ""),
    ("/v1/responses", "session-id", ""),
    ("/v1/responses", "thread-id", ""),
    ("/v1/chat/completions", "", r#""prompt_cache_key":"key""#),
    ("/v1/completions", "", r#""prompt_cache_key":"key""#),
    ("/v1/responses", "", r#""prompt_cache_key":"key""#),
    ("/v1/messages", "", r#""metadata":{"user_id":"key"}"#),
];

#[tokio::test]
async fn session_returns_to_its_worker_however_it_is_named() {
    timed(async {
        for (path, header, member) in SESSIONS {
            let a = Mock::start(&[]).await;
            let b = Mock::start(&[]).await;
            let router = Router::regular(&[&a, &b], &["--policy", "cost"]).await;
            let ask = async |prompt: &str| {
                let prompt = json!(prompt);
                let mut body = format!(
                    r#"{{"prompt":{prompt},"input":{prompt},"messages":[{{"role":"user","content":{prompt}}}]"#
                );
                if !member.is_empty() {
                    body = format!("{body},{member}");
                }
                let explains = ("x-baton-explain", "1");
                let named = [explains, (header, "key")];
                let headers = if header.is_empty() { &named[..1] } else { &named[..] };
                let reply = router
                    .send(Method::POST, path, headers, &format!("{body}}}"))
                    .await;
                assert_eq!(reply.status, 200, "{path} {header} {member}");
                let shown = reply.headers["x-baton-explain"].as_bytes();
                let explained: Value = serde_json::from_slice(shown).unwrap();
                explained["legs"][0].clone()
            };
            // Both prompts are shorter than a block: the index knows nothing of them.
            let first = ask("one").await;
            router.no_load().await;
            let second = ask("two").await;
            assert_eq!(first["decision"]["why"], "no_prefix", "{path} {header} {member}");
            assert_eq!(second["decision"]["why"], "session", "{path} {header} {member}");
            assert_eq!(second["worker"], first["worker"]);
        }
    })
    .await;
}

#[tokio::test]
async fn failed_attempts_stay_in_the_timeline() {
    timed(async {
        let (a, b) = (Mock::start(&[Act::Drop]).await, Mock::start(&[]).await);
        let router = Router::regular(&[&a, &b], &[]).await;
        for id in ["one", "two"] {
            assert_eq!(
                ask(&router, &prompt("a", 1), &[("x-request-id", id)])
                    .await
                    .status,
                200
            );
        }
        let requests = [
            ended_request(&router, "one").await,
            ended_request(&router, "two").await,
        ];
        let retried = requests
            .iter()
            .find(|request| request["legs"][1].is_object())
            .unwrap();
        assert_eq!(retried["failed_attempts"][0]["reason"], "reset");
        assert_eq!(
            (
                &retried["legs"][0]["worker"],
                &retried["legs"][0]["outcome"]
            ),
            (&json!(a.url()), &json!("failed"))
        );
        assert_eq!(
            (
                &retried["legs"][1]["worker"],
                &retried["legs"][1]["attempt"]
            ),
            (&json!(b.url()), &json!(2))
        );
    })
    .await;
}

#[tokio::test]
async fn wrong_header_is_refused_and_control_keys_guard_what_shows_the_fleet() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let reply = ask(&router, &prompt("a", 1), &[("x-baton-explain", "all")]).await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (400, "invalid_value")
        );

        let keys = [
            "--worker-urls",
            &mock.url(),
            "--control-plane-api-keys",
            "id:ops:admin:opskey",
        ];
        let router = Router::start(&keys).await;
        let ops = ("authorization", "Bearer opskey");
        eventually("the worker is ready", || async {
            router.send(Method::GET, "/readyz", &[], "").await.status == 200
        })
        .await;
        let reply = ask(&router, &prompt("a", 1), &[("x-baton-explain", "dry-run")]).await;
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (401, "invalid_api_key")
        );
        let reply = ask(
            &router,
            &prompt("a", 1),
            &[("x-baton-explain", "dry-run"), ops],
        )
        .await;
        assert_eq!(reply.json()["dry_run"], true);
        let reply = ask(
            &router,
            &prompt("a", 1),
            &[("x-baton-explain", "1"), ("x-request-id", "it")],
        )
        .await;
        assert!(reply.status == 200 && !reply.headers.contains_key("x-baton-explain"));
        assert_eq!(router.get("/v1/requests/it").await.status, 401);
        let reply = router
            .send(Method::GET, "/v1/requests/it", &[ops], "")
            .await;
        assert!(reply.json()["legs"][0]["explanation"].is_object());
    })
    .await;
}
