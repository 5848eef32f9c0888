//! A stream whose worker breaks off is resumed by another: the client sees a pause and nothing
//! else.

use http::Method;
use serde_json::{Value, json};

use crate::support::counting::{TOKENS, whole};
use crate::support::{Act, Client, End, Mock, Reply, Router, chat, eventually, timed};

/// No limit but those a test is about.
const FREE: [&str; 3] = ["--disable-circuit-breaker", "--retry-budget-floor", "10000"];
const RESUMED: &str = "baton_router_failovers_total{outcome=\"resumed\",role=\"decode\"}";

fn resumes() -> Value {
    json!({"engine": "baton", "disaggregation_bootstrap_port": 8998, "baton_features": ["resume"]})
}

async fn ours(acts: &[Act]) -> Mock {
    Mock::start(acts).await.with_info(resumes())
}

/// A stream that meets `broken` first.
async fn meets(router: &Router, broken: &Mock) -> Reply {
    loop {
        let before = broken.count();
        let reply = router.chat_stream().await;
        if broken.count() > before {
            return reply;
        }
        assert_eq!(reply.text(), whole(), "an undisturbed answer");
    }
}

/// How often so far.
async fn outcome(router: &Router, outcome: &str) -> f64 {
    let line = format!("baton_router_failovers_total{{outcome=\"{outcome}\",role=\"decode\"}}");
    router.metric(&line).await
}

#[tokio::test]
async fn every_cut_is_resumed_and_the_client_gets_the_same_bytes() {
    timed(async {
        let p = ours(&[]).await;
        let mut dying = ours(&[]).await;
        let good = ours(&[Act::Count]).await;
        let router = Router::pd(&[&p], &[&dying, &good], &FREE).await;
        let mut cuts = 0;
        for writes in 0..TOKENS {
            // Nothing of the next write, half a comment, half an event, all but its last byte.
            for bytes in [0, 5, 40, usize::MAX] {
                if (writes, bytes) == (0, 0) {
                    continue; // that is a retry: its answer never opened
                }
                dying.acts(&[Act::CountTo(writes, bytes, End::Break)]);
                let before = (good.count(), p.count());
                let reply = meets(&router, &dying).await;
                assert_eq!(
                    reply.text(),
                    whole(),
                    "after {writes} writes and {bytes} bytes"
                );
                let last = good.seen().last().unwrap().clone();
                assert!(good.count() > before.0 && p.count() >= before.1 + 2);
                let first = dying.seen().last().unwrap().clone();
                assert_ne!(first.body["bootstrap_room"], last.body["bootstrap_room"]);
                let known = last.body["baton_resume"]["ids"]
                    .as_array()
                    .map_or(0, Vec::len);
                assert_eq!(known, writes, "what the client has");
                let prefill = p.seen().last().unwrap().clone();
                assert_eq!(prefill.body["baton_resume"], last.body["baton_resume"]);
                cuts += 1;
            }
        }
        // A first write that breaks in its comment never opened an answer.
        let opened = router.metric(RESUMED).await;
        assert!(opened >= f64::from(cuts) - 2.0, "{opened} of {cuts}");
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn fleet_of_regular_workers_does_it_too() {
    timed(async {
        let dying = ours(&[Act::CountTo(3, 20, End::Break)]).await;
        let good = ours(&[Act::Count]).await;
        let router = Router::regular(&[&dying, &good], &[]).await;
        assert_eq!(meets(&router, &dying).await.text(), whole());
        let seen = good.seen().last().unwrap().clone();
        assert_eq!(seen.body["baton_resume"]["ids"], json!([100, 101, 102]));
        assert_eq!(seen.headers["x-baton-emit-tokens"], "1");
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn second_worker_may_die_too() {
    timed(async {
        let p = ours(&[]).await;
        let d = [
            ours(&[Act::CountTo(2, 30, End::Break)]).await,
            ours(&[Act::CountTo(2, 30, End::Break)]).await,
            ours(&[Act::Count]).await,
        ];
        let router = Router::pd(&[&p], &[&d[0], &d[1], &d[2]], &FREE).await;
        while router.metric(RESUMED).await < 2.0 || d[1].count() == 0 {
            assert_eq!(router.chat_stream().await.text(), whole());
        }
        assert!(d[0].count() > 0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn failover_is_reported_in_the_timeline() {
    timed(async {
        let p = ours(&[]).await;
        let dying = ours(&[Act::CountTo(2, 0, End::Break)]).await;
        let good = ours(&[Act::Count]).await;
        let router = Router::pd(&[&p], &[&dying, &good], &[]).await;
        let reply = meets(&router, &dying).await;
        let id = reply.headers["x-request-id"].to_str().unwrap().to_owned();
        let path = format!("/v1/requests/{id}");
        eventually("it has ended", || async {
            router.get(&path).await.json()["state"] == "ended"
        })
        .await;
        let request = router.get(&path).await.json();
        assert_eq!(request["outcome"], "ok");
        let failed = &request["failed_attempts"][0];
        assert_eq!(failed["failover_at_token"], 2, "{request}");
        assert_eq!(
            (&failed["role"], &failed["reason"]),
            (&json!("decode"), &json!("reset"))
        );
        let workers = |attempt: u64| {
            let legs = request["legs"].as_array().unwrap().iter();
            legs.filter(|leg| leg["attempt"] == attempt && leg["role"] == "decode")
                .map(|leg| (leg["worker"].clone(), leg["outcome"].clone()))
                .collect::<Vec<_>>()
        };
        assert_eq!(workers(1), [(json!(dying.url()), json!("failed"))]);
        assert_eq!(workers(2), [(json!(good.url()), json!("ok"))]);
        assert_eq!(
            router
                .metric("baton_router_failover_pause_seconds_count")
                .await,
            1.0
        );
    })
    .await;
}

/// The one error event of a stream that got as far as token 2.
fn broke_off(reply: &Reply) -> String {
    let text = reply.text();
    assert!(
        text.contains("w2 ") && !text.contains("w3 ") && !text.contains(": baton"),
        "{text}"
    );
    assert_eq!(text.matches("w2 ").count(), 1);
    assert!(!text.contains("127.0.0.1"), "no worker is named: {text}");
    assert_eq!(text.matches("finish_reason\":\"").count(), 0);
    reply.error_event()
}

#[tokio::test]
async fn without_a_worker_that_can_resume_the_stream_ends_with_the_error() {
    timed(async {
        // The other worker: none, unable to resume, of another model, refusing.
        let unable = json!({"engine": "baton", "baton_features": []});
        let misfit =
            json!({"engine": "baton", "baton_features": ["resume"], "fingerprint": {"model": "b"}});
        for (other, answers) in [
            (None, Act::Count),
            (Some(unable), Act::Count),
            (Some(misfit), Act::Count),
            (Some(resumes()), Act::Status(400, "context_length_exceeded")),
        ] {
            let mut info = resumes();
            info["fingerprint"] = json!({"model": "a"});
            let dying = Mock::start(&[Act::CountTo(3, 9, End::Break), Act::Drop])
                .await
                .with_info(info);
            let is_able = other.as_ref() == Some(&resumes());
            let good = Mock::start(&[answers])
                .await
                .with_info(other.clone().unwrap_or(json!({})));
            let all = match other {
                Some(_) => vec![&dying, &good],
                None => vec![&dying],
            };
            let router = Router::regular(&all, &["--retry-max-retries", "3"]).await;
            let reply = loop {
                let reply = router.chat_stream().await;
                if reply.text().contains("{\"error\"") {
                    break reply;
                }
            };
            assert_eq!(broke_off(&reply), "upstream_error");
            assert!(
                reply.text().contains("no other worker resumed the answer"),
                "{}",
                reply.text()
            );
            let asked_to_resume = |mock: &Mock| {
                let seen = mock.seen();
                seen.iter()
                    .filter(|seen| !seen.body["baton_resume"].is_null())
                    .count()
            };
            assert_eq!(asked_to_resume(&good), usize::from(is_able), "{other:?}");
            let failed = "baton_router_failovers_total{outcome=\"failed\",role=\"regular\"}";
            assert_eq!(router.metric(failed).await, 1.0);
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn memory_limit_leaves_streams_unresumable() {
    timed(async {
        let p = ours(&[]).await;
        let dying = ours(&[Act::CountTo(3, 9, End::Break)]).await;
        let good = ours(&[Act::Count]).await;
        let flags = ["--failover-max-bytes", "50", "--retry-max-retries", "3"];
        let router = Router::pd(&[&p], &[&dying, &good], &flags).await;
        assert_eq!(broke_off(&meets(&router, &dying).await), "upstream_error");
        assert_eq!(outcome(&router, "refused").await, 0.0);
        let lost = router
            .metric("baton_router_unresumable_streams_total{reason=\"memory\"}")
            .await;
        assert!(lost >= 1.0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn token_comments_are_not_requested_where_no_worker_could_resume() {
    timed(async {
        let mock = ours(&[Act::Count]).await;
        let header = [("x-baton-emit-tokens", "1")];
        let of = |change: Value| {
            let mut body = chat(true);
            let members = change.as_object().unwrap().clone();
            body.as_object_mut().unwrap().extend(members);
            body.to_string()
        };
        let router = Router::regular(&[&mock], &[]).await;
        for change in [json!({"n": 2}), json!({"stream": false})] {
            let path = "/v1/chat/completions";
            router.send(Method::POST, path, &header, &of(change)).await;
            let seen = mock.seen().last().unwrap().clone();
            assert!(
                !seen.headers.contains_key("x-baton-emit-tokens"),
                "{}",
                seen.body
            );
        }
        for flag in [&["--disable-failover"][..], &["--disable-retries"]] {
            let router = Router::regular(&[&mock], flag).await;
            let path = "/v1/chat/completions";
            let reply = router
                .send(Method::POST, path, &header, &of(json!({})))
                .await;
            assert_eq!(reply.text(), whole());
            let seen = mock.seen().last().unwrap().clone();
            assert!(!seen.headers.contains_key("x-baton-emit-tokens"));
        }
    })
    .await;
}

#[tokio::test]
async fn client_that_leaves_in_the_pause_leaves_nothing_behind() {
    timed(async {
        let p = ours(&[]).await;
        let dying = ours(&[Act::CountTo(2, 0, End::Break)]).await;
        let hanging = ours(&[Act::Hang]).await;
        let flags = ["--sse-keepalive-secs", "1"];
        let router = Router::pd(&[&p], &[&dying, &hanging], &flags).await;
        let mut clients = Vec::new();
        while dying.count() == 0 {
            let mut client = Client::connect(router.running.addr).await;
            clients.push(tokio::spawn(async move {
                let mut answering = client.chat(true).await;
                // Comments keep it company.
                let mut text = String::new();
                while text.matches(": keep-alive").count() < 2 {
                    let piece = answering.piece().await.unwrap();
                    text += std::str::from_utf8(&piece).unwrap();
                }
                text
            }));
            eventually("it is somewhere", || async {
                dying.count() + hanging.count() >= clients.len()
            })
            .await;
        }
        let mut all = String::new();
        for client in clients {
            all += &client.await.unwrap(); // and it is gone
        }
        assert!(all.contains("w1 "));
        router.no_load().await;
        assert_eq!(outcome(&router, "client_gone").await, 1.0);
        assert!(hanging.cancelled() >= 1);
    })
    .await;
}

#[tokio::test]
async fn worker_that_leaves_in_the_middle_is_not_to_blame() {
    const LEAVING: &str =
        "data: {\"error\":{\"message\":\"m\",\"code\":\"draining\"}}\n\ndata: [DONE]\n\n";
    const BUG: &str =
        "data: {\"error\":{\"message\":\"m\",\"code\":\"internal_error\"}}\n\ndata: [DONE]\n\n";
    const FIRST: &str = ": baton {\"ids\":[100],\"seed\":1152921504606846976,\"created\":1700000000}\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"w0 \"},\"finish_reason\":null}]}\n\n";
    timed(async {
        for (event, is_mended) in [(LEAVING, true), (BUG, false)] {
            let p = ours(&[]).await;
            let leaving = ours(&[Act::Stream(vec![FIRST, event], End::Clean)]).await;
            let good = ours(&[Act::Count]).await;
            let flags = ["--cb-failure-threshold", "1"];
            let router = Router::pd(&[&p], &[&leaving, &good], &flags).await;
            let reply = meets(&router, &leaving).await;
            let text = reply.text();
            assert_eq!(text.matches("w0 ").count(), 1);
            assert_eq!(text.contains("w5 "), is_mended, "{text}");
            if !is_mended {
                assert_eq!(reply.error_event(), "internal_error");
            }
            let line = format!(
                "baton_router_circuit_state{{role=\"decode\",worker=\"{}\"}}",
                leaving.url()
            );
            assert_eq!(router.metric(&line).await, 0.0);
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn silent_worker_is_replaced_after_the_limit_or_when_its_health_fails() {
    timed(async {
        let p = ours(&[]).await;
        let silent = ours(&[Act::CountTo(2, 10, End::Hang)]).await;
        let good = ours(&[Act::Count]).await;
        let flags = ["--request-timeout-secs", "1"];
        let router = Router::pd(&[&p], &[&silent, &good], &flags).await;
        assert_eq!(meets(&router, &silent).await.text(), whole());
        router.no_load().await;
        let flags = [
            "--health-check-interval-secs",
            "1",
            "--health-failure-threshold",
            "1",
        ];
        let router = Router::pd(&[&p], &[&silent, &good], &flags).await;
        let before = silent.count();
        let ask = async {
            while silent.count() == before {
                assert_eq!(router.chat_stream().await.text(), whole());
            }
        };
        let fall_ill = async {
            eventually("it hangs", || async { silent.count() > before }).await;
            silent.set_unhealthy(true);
        };
        tokio::join!(ask, fall_ill);
        assert_eq!(router.metric(RESUMED).await, 1.0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn silent_stream_brings_a_probe_and_leaves_a_hung_worker() {
    timed(async {
        let p = ours(&[]).await;
        let hung = ours(&[Act::CountTo(2, 10, End::Hang)]).await;
        let good = ours(&[Act::Count]).await;
        // No probe comes by itself.
        let flags = [
            "--health-check-interval-secs",
            "600",
            "--health-check-timeout-secs",
            "600",
        ];
        let router = Router::pd(&[&p], &[&hung, &good], &flags).await;
        let hang = async {
            eventually("its stream has begun", || async { hung.count() > 0 }).await;
            hung.freeze();
        };
        let (reply, ()) = tokio::join!(meets(&router, &hung), hang);
        assert_eq!(reply.text(), whole());
        assert_eq!(router.metric(RESUMED).await, 1.0);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn clients_deadline_goes_on_while_others_are_asked() {
    timed(async {
        let p = ours(&[]).await;
        let dying = ours(&[Act::CountTo(3, 0, End::Break)]).await;
        let hanging = ours(&[Act::Hang]).await;
        let router = Router::pd(&[&p], &[&dying, &hanging], &[]).await;
        let mut body = chat(true);
        body["deadline_ms"] = json!(400);
        body["ttft_deadline_ms"] = json!(300);
        let headers = [("x-deadline-remaining-ms", "500"), ("x-slo-ttft-ms", "350")];
        let path = "/v1/chat/completions";
        let reply = router
            .send(Method::POST, path, &headers, &body.to_string())
            .await;
        // Round robin begins with the first decode worker.
        assert_eq!(dying.count(), 1);
        assert_eq!(broke_off(&reply), "timeout");
        let second = hanging.seen().last().unwrap().clone();
        let left = second.body["deadline_ms"].as_u64().unwrap();
        assert!((1..=400).contains(&left));
        assert!(
            second.body.get("ttft_deadline_ms").is_none(),
            "{}",
            second.body
        );
        assert!(!second.headers.contains_key("x-slo-ttft-ms"));
        assert!(second.headers.contains_key("x-deadline-remaining-ms"));
        assert_eq!(
            dying.seen()[0].body["deadline_ms"],
            400,
            "the first attempt has it all"
        );
        router.no_load().await;
    })
    .await;
}
