//! Requests that a web page of another site has a browser send, and names of this router.
//!
//! What a browser sends is Fetch Metadata's and Fetch's: a page cannot set Sec-Fetch-Site or
//! Origin, and may send a form or plain text anywhere without a preflight.

use http::Method;
use serde_json::json;

use crate::clients::limits::H2;
use crate::support::{Mock, Reply, Router, chat, timed};

const EVIL: &str = "http://evil.example";
const JSON: (&str, &str) = ("content-type", "application/json");
const CHAT: &str = "/v1/chat/completions";

fn outcome(reply: &Reply) -> (u16, String) {
    let code = match reply.status {
        200..300 => String::new(),
        _ => reply.code(),
    };
    (reply.status, code)
}

fn refused(reply: &Reply, code: &str) -> bool {
    outcome(reply) == (403, code.to_owned())
}

#[tokio::test]
async fn page_of_another_site_changes_nothing() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let body = chat(false).to_string();
        let worker = json!({"url": "http://10.0.0.1:1"}).to_string();
        let simple = [("content-type", "text/plain"), ("origin", EVIL)];
        let fetched = [JSON, ("sec-fetch-site", "cross-site")];
        let neighbor = [
            JSON,
            ("origin", "http://localhost:3000"),
            ("sec-fetch-site", "same-site"),
        ];
        let file = [JSON, ("origin", "null")];
        for headers in [&simple[..], &fetched, &neighbor, &file] {
            for (method, path, body) in [
                (Method::POST, CHAT, body.as_str()),
                (Method::POST, "/v1/completions", "{}"),
                (Method::PUT, "/generate", "{}"),
                (Method::POST, "/tokenize", "{}"),
                (Method::POST, "/workers", worker.as_str()),
                (Method::DELETE, "/workers/1", ""),
                (Method::POST, "/workers/1/drain", ""),
                (Method::POST, "/remove_worker?url=x", ""),
                (Method::POST, "/abort_request", r#"{"abort_all": true}"#),
                (Method::GET, "/flush_cache", ""),
                (Method::GET, "/health_generate", ""),
            ] {
                let reply = router.send(method.clone(), path, headers, body).await;
                assert!(
                    refused(&reply, "foreign_origin"),
                    "{method} {path}: {}",
                    reply.text()
                );
                assert!(reply.text().contains("--cors-allowed-origins"), "{path}");
            }
        }
        assert_eq!(mock.count(), 0);
        let list = router.get("/workers").await.json();
        assert_eq!(list["total"], 1, "{list}");
        assert_eq!(list["workers"][0]["state"], "ready", "{list}");
        // A link to the router from another site.
        let link = [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate"),
        ];
        let reply = router.send(Method::GET, "/ui/", &link, "").await;
        assert_eq!(reply.status, 200);
        // In the form of Anthropic's API on its paths.
        let reply = router
            .send(Method::POST, "/v1/messages", &simple, "{}")
            .await;
        assert_eq!(reply.status, 403);
        assert_eq!(reply.json()["type"], "error", "{}", reply.text());
        assert_eq!(reply.json()["error"]["type"], "permission_error");
    })
    .await;
}

#[tokio::test]
async fn own_pages_allowed_origins_and_programs_are_served() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let allowed = ["--cors-allowed-origins", "https://app.example"];
        let router = Router::regular(&[&mock], &allowed).await;
        let body = chat(false).to_string();
        let host = &router.running.addr.to_string();
        let own = format!("http://{host}");
        for headers in [
            // openai-python, curl -d, curl without a type.
            &[JSON][..],
            &[("content-type", "application/x-www-form-urlencoded")],
            &[],
            // The page /ui/: over TLS, over plain HTTP, behind a proxy that changes Host.
            &[JSON, ("origin", &own), ("sec-fetch-site", "same-origin")],
            &[JSON, ("origin", &own), ("host", host)],
            &[
                JSON,
                ("origin", "https://ui.example"),
                ("sec-fetch-site", "same-origin"),
            ],
            // A browser client that CORS allows.
            &[
                JSON,
                ("origin", "https://app.example"),
                ("sec-fetch-site", "cross-site"),
            ],
            // Node's fetch.
            &[JSON, ("sec-fetch-mode", "cors")],
        ] {
            let reply = router.send(Method::POST, CHAT, headers, &body).await;
            assert_eq!(outcome(&reply), (200, String::new()), "{headers:?}");
        }
        let router = Router::regular(&[&mock], &["--cors-allowed-origins", "*"]).await;
        let headers = [JSON, ("origin", EVIL), ("sec-fetch-site", "cross-site")];
        let reply = router.send(Method::POST, CHAT, &headers, &body).await;
        assert_eq!(reply.status, 200);
    })
    .await;
}

#[tokio::test]
async fn bodies_of_control_paths_are_declared_as_json() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::start(&[]).await;
        let body = json!({"url": mock.url()}).to_string();
        for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
            let headers = [("content-type", kind)];
            let headers = if kind.is_empty() { &[][..] } else { &headers };
            let reply = router.send(Method::POST, "/workers", headers, &body).await;
            let wanted = (415, "unsupported_media_type".to_owned());
            assert_eq!(outcome(&reply), wanted, "{kind}");
            assert!(
                reply.text().contains("application/json"),
                "{}",
                reply.text()
            );
        }
        let headers = [("content-type", "application/json; charset=utf-8")];
        let reply = router.send(Method::POST, "/workers", &headers, &body).await;
        assert_eq!(reply.status, 202, "{}", reply.text());
        router.all_ready(1).await;
        // Without a body there is nothing to declare.
        for path in ["/flush_cache", "/workers/1/drain", "/workers/1/undrain"] {
            let reply = router.send(Method::POST, path, &[], "").await;
            assert_ne!(reply.status, 415, "{path}: {}", reply.text());
        }
    })
    .await;
}

#[tokio::test]
async fn router_without_a_key_is_asked_by_its_own_names_alone() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let flags = ["--allowed-hosts", "api.example", "Box.example"];
        let router = Router::regular(&[&mock], &flags).await;
        let port = router.running.addr.port();
        let status = |host: String| {
            let router = &router;
            async move {
                let headers = [("host", host.as_str())];
                let reply = router.send(Method::GET, "/workers", &headers, "").await;
                outcome(&reply)
            }
        };
        for host in [
            "127.0.0.1",
            "10.9.8.7",
            "[::1]",
            "localhost",
            "LOCALHOST.",
            "api.example",
            "box.example",
        ] {
            for host in [host.to_owned(), format!("{host}:{port}")] {
                assert_eq!(status(host.clone()).await, (200, String::new()), "{host}");
            }
        }
        for host in [
            "rebound.evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "router",
            "",
        ] {
            for host in [host.to_owned(), format!("{host}:{port}")] {
                let wanted = (403, "host_not_allowed".to_owned());
                assert_eq!(status(host.clone()).await, wanted, "{host}");
            }
        }
        // A probe may know the router by any name.
        let headers = [("host", "lb.example")];
        let reply = router.send(Method::GET, "/readyz", &headers, "").await;
        assert_eq!(reply.status, 200);
        // HTTP/2 has the name in the request's target.
        let mut client = H2::connect(&router).await;
        assert!(
            client
                .get_from("rebound.evil.example", "/workers")
                .await
                .contains("host_not_allowed")
        );
        assert!(
            client
                .get_from("api.example", "/workers")
                .await
                .contains("\"total\":1")
        );
        // A page of a named host whose proxy changes Host.
        let headers = [JSON, ("origin", "https://api.example")];
        let reply = router
            .send(Method::POST, CHAT, &headers, &chat(false).to_string())
            .await;
        assert_eq!(reply.status, 200);
    })
    .await;
}

#[tokio::test]
async fn names_without_a_dot_are_taken_beyond_loopback_and_all_names_with_a_key() {
    timed(async {
        let key = ("authorization", "Bearer k");
        for (flags, headers, host, wanted) in [
            (&["--host", "0.0.0.0"][..], &[][..], "router", 200),
            (&["--host", "0.0.0.0"], &[], "evil.example", 403),
            (&["--allowed-hosts", "*"], &[], "evil.example", 200),
            (&["--api-key", "k"], &[key], "evil.example", 200),
        ] {
            let router = Router::start(flags).await;
            let headers = [&[("host", host)], headers].concat();
            let reply = router.send(Method::GET, "/workers", &headers, "").await;
            assert_eq!(reply.status, wanted, "{flags:?} {host}: {}", reply.text());
        }
    })
    .await;
}
