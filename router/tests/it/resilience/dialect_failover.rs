//! Streams of /v1/responses and /v1/messages whose worker breaks off: other workers resume them, or
//! they end with an error in the form of their API.

use baton_text::dialect::Dialect;
use http::Method;
use serde_json::{Value, json};

use crate::support::counting::{TOKENS, request, whole_of};
use crate::support::{Act, Client, End, Mock, Reply, Router, eventually, timed};

const APIS: [Dialect; 2] = [Dialect::Responses, Dialect::Messages];
/// No limit but those a test is about.
const FREE: [&str; 3] = ["--disable-circuit-breaker", "--retry-budget-floor", "10000"];

async fn ours(acts: &[Act]) -> Mock {
    let info = json!({"engine": "baton", "baton_features": ["resume"]});
    Mock::start(acts).await.with_info(info)
}

async fn ask(router: &Router, api: Dialect) -> Reply {
    router.post(api.path(), &request(api)).await
}

/// A stream that meets `broken` first.
async fn meets(router: &Router, api: Dialect, broken: &Mock) -> Reply {
    loop {
        let before = broken.count();
        let reply = ask(router, api).await;
        if broken.count() > before {
            return reply;
        }
        assert_eq!(reply.text(), whole_of(api), "an undisturbed answer");
    }
}

/// Data of the events of a stream that ends properly.
fn events(text: &str) -> Vec<Value> {
    let text = text.strip_suffix("data: [DONE]\n\n").unwrap();
    let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(|json| serde_json::from_str(json).unwrap())
        .collect()
}

#[tokio::test]
async fn every_cut_is_resumed_with_the_same_bytes_and_numbers() {
    timed(async {
        for api in APIS {
            let p = ours(&[]).await;
            let mut dying = ours(&[]).await;
            let good = ours(&[Act::Count]).await;
            let router = Router::pd(&[&p], &[&dying, &good], &FREE).await;
            for writes in 0..TOKENS {
                // Nothing of the next write, half a comment or event, its first event, all but its
                // last byte.
                for bytes in [0, 5, 90, usize::MAX] {
                    if (writes, bytes) == (0, 0) {
                        continue; // that is a retry: its answer never opened
                    }
                    dying.acts(&[Act::CountTo(writes, bytes, End::Break)]);
                    let reply = meets(&router, api, &dying).await;
                    let cut = format!("{api:?} after {writes} writes and {bytes} bytes");
                    assert_eq!(reply.text(), whole_of(api), "{cut}");
                    let resumed = good.seen().last().unwrap().clone();
                    assert_eq!(resumed.path, api.path(), "{cut}");
                    let ids = resumed.body["baton_resume"]["ids"].as_array();
                    assert_eq!(ids.map_or(0, Vec::len), writes, "{cut}");
                }
            }
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn stream_that_no_worker_resumes_ends_in_the_form_of_its_api() {
    timed(async {
        for api in APIS {
            let dying = ours(&[Act::CountTo(3, 9, End::Break), Act::Drop]).await;
            let router = Router::regular(&[&dying], &["--retry-max-retries", "3"]).await;
            let reply = ask(&router, api).await;
            let text = reply.text();
            assert_eq!(text.matches("w2 ").count(), 1, "{text}");
            assert!(!text.contains("w3 ") && !text.contains("127.0.0.1"));
            let events = events(&text);
            let last = events.last().unwrap();
            if api == Dialect::Responses {
                let numbers: Vec<_> = events
                    .iter()
                    .map(|e| e["sequence_number"].clone())
                    .collect();
                let expected: Vec<_> = (0..events.len()).map(|number| json!(number)).collect();
                assert_eq!(numbers, expected, "{text}");
                assert!(text.contains("event: response.failed\n"), "{text}");
                let error = &last["response"]["error"];
                assert_eq!(error["code"], "server_error");
                assert_eq!(error["type"], "upstream_error");
                assert_eq!(
                    last["response"]["id"],
                    reply.headers["x-request-id"].to_str().unwrap()
                );
            } else {
                assert!(text.contains("event: error\n"), "{text}");
                assert_eq!(last["error"]["type"], "api_error");
                assert_eq!(last["error"]["code"], "upstream_error");
            }
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn attempts_that_all_fail_before_the_first_event_are_an_error_with_a_status() {
    timed(async {
        let dead = ours(&[Act::Drop]).await;
        let router = Router::regular(&[&dead], &["--retry-max-retries", "1"]).await;
        for api in APIS {
            let reply = ask(&router, api).await;
            let error = &reply.json()["error"];
            assert_eq!(reply.status, 502);
            assert_eq!(error["code"], "upstream_error");
            let kind = match api {
                Dialect::Messages => "api_error",
                _ => "server_error",
            };
            assert_eq!(error["type"], kind);
        }
    })
    .await;
}

#[tokio::test]
async fn client_that_leaves_in_the_pause_leaves_nothing_behind() {
    timed(async {
        for api in APIS {
            let dying = ours(&[Act::CountTo(2, 0, End::Break)]).await;
            let hanging = ours(&[Act::Hang]).await;
            let router = Router::regular(&[&dying, &hanging], &["--sse-keepalive-secs", "1"]).await;
            // Round robin begins with the first worker.
            let mut client = Client::connect(router.running.addr).await;
            let body = request(api).to_string();
            let mut answering = client.send(Method::POST, api.path(), &[], &body).await;
            let mut text = String::new();
            while !text.contains(": keep-alive") {
                let piece = answering.piece().await.unwrap();
                text += std::str::from_utf8(&piece).unwrap();
            }
            assert!(text.contains("w1 "), "{text}");
            drop((answering, client));
            router.no_load().await;
            eventually("the other worker's connection is closed", || async {
                hanging.cancelled() == 1
            })
            .await;
        }
    })
    .await;
}
