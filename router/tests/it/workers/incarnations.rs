//! Another process takes a worker's place under its address, and no probe ever meets a refused
//! connection: facts of the first one are not used for the second.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::counting::whole;
use crate::support::*;

/// The router learns of the other process from answers alone: no probe follows the first one,
/// unless something asks for it.
const NO_PROBES: [&str; 4] = [
    "--health-check-interval-secs",
    "3600",
    "--worker-wait-timeout-secs",
    "30",
];
const PROBES: [&str; 2] = ["--health-check-interval-secs", "1"];

/// Server info of an engine of ours.
fn engine(incarnation: &str, facts: Value) -> Value {
    let mut info = json!({"engine": "baton", "incarnation": incarnation});
    let facts = facts.as_object().expect("an object").clone();
    info.as_object_mut().expect("an object").extend(facts);
    info
}

async fn mock(info: Value) -> Mock {
    Mock::start(&[]).await.with_info(info)
}

fn ask(model: &str) -> Value {
    json!({"model": model, "prompt": "hi"})
}

async fn status(router: &Router, body: &Value) -> u16 {
    router.post("/v1/completions", body).await.status
}

/// Entry of a worker in GET /workers.
async fn shown(router: &Router, worker: &Mock) -> Value {
    let list = router.get("/workers").await.json();
    let workers = list["workers"].as_array().expect("a list").clone();
    let found = workers.into_iter().find(|w| w["url"] == worker.url());
    found.expect("it is registered")
}

#[tokio::test]
async fn refusal_by_another_process_is_retried_once_that_is_described() {
    timed(async {
        let names = |name: &str| json!({"served_model_names": [name]});
        let mut worker = mock(engine("a", names("old"))).await;
        let router = Router::regular(&[&worker], &NO_PROBES).await;
        assert_eq!(status(&router, &ask("old")).await, 200);
        worker.replace(engine("b", names("new")));
        worker.acts(&[Act::Status(404, "model_not_found"), Act::Answer]);
        let reply = router.post("/v1/completions", &ask("old")).await;
        assert_eq!(reply.status, 404);
        let text = reply.text();
        assert!(
            text.contains("no regular worker"),
            "the router's words: {text}"
        );
        assert_eq!(worker.count(), 2, "the new process saw the old name once");
        assert_eq!(status(&router, &ask("new")).await, 200);
        assert_eq!(shown(&router, &worker).await["incarnation"], "b");
    })
    .await;
}

#[tokio::test]
async fn probe_of_another_process_brings_its_model_names() {
    timed(async {
        let names = |name: &str| json!({"served_model_names": [name]});
        let worker = mock(engine("a", names("old"))).await;
        let router = Router::regular(&[&worker], &PROBES).await;
        assert_eq!(status(&router, &ask("new")).await, 404);
        worker.replace(engine("b", names("new")));
        eventually("the new name is served", || async {
            status(&router, &ask("new")).await == 200
        })
        .await;
        assert_eq!(status(&router, &ask("old")).await, 404);
        assert_eq!(worker.count(), 1, "the old name reached no process");
    })
    .await;
}

#[tokio::test]
async fn replaced_worker_gets_no_request_before_it_is_described() {
    timed(async {
        let worker = mock(engine("a", json!({}))).await;
        let flags = ["--health-check-interval-secs", "3600"];
        let router = Router::regular(&[&worker], &flags).await;
        worker.replace(engine("b", json!({})));
        worker.hide_info(true);
        assert_eq!(status(&router, &ask("m")).await, 200, "its answer tells");
        for _ in 0..3 {
            assert_eq!(status(&router, &ask("m")).await, 503);
        }
        assert_eq!(worker.count(), 1);
        eventually("its state says why", || async {
            let reason = shown(&router, &worker).await["reason"].clone();
            reason
                .as_str()
                .is_some_and(|reason| reason.contains("cannot be read"))
        })
        .await;
        assert_eq!(shown(&router, &worker).await["state"], "starting");
        worker.hide_info(false);
        router.all_ready(1).await;
        assert_eq!(status(&router, &ask("m")).await, 200);
    })
    .await;
}

#[tokio::test]
async fn loading_process_is_starting_at_once() {
    timed(async {
        let worker = mock(engine("a", json!({}))).await;
        let router = Router::regular(&[&worker], &PROBES).await;
        worker.set_unhealthy(true);
        worker.replace(engine("b", json!({})));
        eventually("it starts", || async {
            shown(&router, &worker).await["state"] == "starting"
        })
        .await;
        worker.set_unhealthy(false);
        router.all_ready(1).await;
    })
    .await;
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The demo model's directory, and the fingerprint of its tokenizer.
fn demo() -> (String, Value) {
    let model = repository().join("engine/baton/models/demo");
    let cases = repository().join("tests/contract/golden/tokens/cases.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(cases).unwrap()).unwrap();
    (
        model.display().to_string(),
        golden["demo"]["fingerprint"].clone(),
    )
}

/// For each request that the worker saw: true if it had token ids.
fn had_ids(worker: &Mock) -> Vec<bool> {
    let seen = worker.seen();
    seen.iter()
        .map(|seen| seen.body.get("input_ids").is_some())
        .collect()
}

#[tokio::test]
async fn ids_for_the_former_tokenizer_are_refused_and_the_text_is_sent() {
    timed(async {
        let (model, fingerprint) = demo();
        let flags = [
            &["--tokenizer-path", &model, "--forward-input-ids"],
            &NO_PROBES[..],
        ]
        .concat();
        let same = json!({"tokenizer_fingerprint": fingerprint});
        let other = json!({"tokenizer_fingerprint": "00"});
        // Another process, or one whose description was wrong.
        for (before, after) in [
            (engine("a", same.clone()), engine("b", other.clone())),
            (engine("a", same.clone()), engine("a", other.clone())),
        ] {
            let mut worker = mock(before).await;
            let router = Router::regular(&[&worker], &flags).await;
            worker.replace(after);
            worker.acts(&[Act::Status(409, "fingerprint_mismatch"), Act::Answer]);
            assert_eq!(status(&router, &ask("m")).await, 200);
            assert_eq!(had_ids(&worker), [true, false]);
            let stated = worker.seen()[0].body["tokenizer_fingerprint"].clone();
            assert_eq!(stated, fingerprint);
            assert_eq!(status(&router, &ask("m")).await, 200);
            assert_eq!(had_ids(&worker), [true, false, false]);
        }
    })
    .await;
}

#[tokio::test]
async fn refused_ids_of_the_client_reach_the_client() {
    timed(async {
        let mut worker = mock(engine("a", json!({}))).await;
        let router = Router::regular(&[&worker], &NO_PROBES).await;
        worker.acts(&[Act::Status(409, "fingerprint_mismatch")]);
        let own = json!({"prompt": "hi", "input_ids": [1], "tokenizer_fingerprint": "00"});
        assert_eq!(status(&router, &own).await, 409);
        assert_eq!(worker.count(), 1);
    })
    .await;
}

#[tokio::test]
async fn pair_of_which_both_were_replaced_gets_the_text() {
    timed(async {
        let (model, fingerprint) = demo();
        let flags = [&["--tokenizer-path", &model, "--forward-input-ids"], &NO_PROBES[..]].concat();
        let facts = |fingerprint: &Value, model: &str| {
            json!({"tokenizer_fingerprint": fingerprint, "fingerprint": {"model": model}})
        };
        let before = facts(&fingerprint, "one");
        let mut p = mock(engine("p1", before.clone())).await;
        let mut d = mock(engine("d1", before)).await;
        let router = Router::pd(&[&p], &[&d], &flags).await;
        let after = facts(&json!("00"), "two");
        for (worker, incarnation) in [(&mut p, "p2"), (&mut d, "d2")] {
            worker.replace(engine(incarnation, after.clone()));
            worker.acts(&[Act::Status(409, "fingerprint_mismatch"), Act::Answer]);
        }
        // Each leg's refusal ends the other one, so that either worker may have seen none.
        eventually("both are known", || async {
            status(&router, &ask("m")).await;
            shown(&router, &p).await["incarnation"] == "p2"
                && shown(&router, &d).await["incarnation"] == "d2"
        })
        .await;
        for worker in [&mut p, &mut d] {
            worker.acts(&[Act::Answer]);
        }
        assert_eq!(status(&router, &ask("m")).await, 200);
        for worker in [&p, &d] {
            assert_eq!(had_ids(worker).last(), Some(&false));
            assert_eq!(shown(&router, worker).await["fingerprint"]["model"], "two");
        }
    })
    .await;
}

#[tokio::test]
async fn ranks_that_the_new_process_lacks_are_not_asked_again() {
    timed(async {
        let mut worker = mock(engine("a", json!({"dp_size": 2}))).await;
        let flags = [&["--dp-aware"], &NO_PROBES[..]].concat();
        let router = Router::regular(&[&worker], &flags).await;
        assert_eq!(shown(&router, &worker).await["dp_size"], 2);
        worker.replace(engine("b", json!({"dp_size": 1})));
        worker.acts(&[Act::Status(400, "invalid_value"), Act::Answer]);
        for _ in 0..4 {
            assert_eq!(status(&router, &ask("m")).await, 200);
        }
        let seen = worker.seen();
        assert_eq!(seen.len(), 5);
        let ranks = seen[1..]
            .iter()
            .map(|seen| seen.body["routed_dp_rank"].clone());
        assert!(ranks.into_iter().all(|rank| rank == 0));
        assert_eq!(shown(&router, &worker).await["dp_size"], 1);
    })
    .await;
}

#[tokio::test]
async fn both_legs_get_the_bootstrap_port_of_the_new_process() {
    timed(async {
        let port = |port: u16| json!({"disaggregation_bootstrap_port": port});
        let mut p = mock(engine("p1", port(9001))).await;
        let d = mock(engine("d1", json!({}))).await;
        let (p_url, d_url) = (p.url(), d.url());
        let pair = [
            "--pd-disaggregation",
            "--prefill",
            &p_url,
            "--decode",
            &d_url,
        ];
        let router = Router::start(&[&pair[..], &NO_PROBES].concat()).await;
        router.all_ready(2).await;
        assert_eq!(status(&router, &ask("m")).await, 200);
        p.replace(engine("p2", port(9002)));
        p.acts(&[Act::Status(502, "prefill_failed"), Act::Answer]);
        // D may answer before P refuses.
        let last_port =
            |worker: &Mock| worker.seen().last().unwrap().body["bootstrap_port"].clone();
        eventually("the new port is used", || async {
            status(&router, &ask("m")).await == 200 && last_port(&p) == 9002
        })
        .await;
        assert_eq!(last_port(&d), 9002);
        assert_eq!(p.seen()[0].body["bootstrap_port"], 9001);
    })
    .await;
}

#[tokio::test]
async fn limits_are_those_of_the_new_process() {
    timed(async {
        let limit =
            |tokens: u64| json!({"context_length": tokens, "max_prompt_chars": tokens * 10});
        let worker = mock(engine("a", limit(2_000))).await;
        let router = Router::regular(&[&worker], &PROBES).await;
        let long = json!({"prompt": "x".repeat(50_000)});
        assert_eq!(status(&router, &long).await, 400);
        worker.replace(engine("b", limit(8_000)));
        eventually("the longer prompt is sent", || async {
            status(&router, &long).await == 200
        })
        .await;
        worker.replace(engine("c", limit(2_000)));
        eventually("it is refused again", || async {
            status(&router, &long).await == 400
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn stream_of_an_unknown_process_is_not_resumed_by_another_worker() {
    timed(async {
        let resumes = json!({"baton_features": ["resume"], "fingerprint": {"model": "one"}});
        let mut changing = mock(engine("a1", resumes.clone())).await;
        let good = mock(engine("b1", resumes.clone())).await;
        let mut good = good;
        good.acts(&[Act::Count]);
        changing.acts(&[Act::CountTo(3, 20, End::Break)]);
        let router = Router::regular(&[&changing, &good], &NO_PROBES).await;
        let resumed = loop {
            let before = changing.count();
            let reply = router.chat_stream().await;
            assert_eq!(reply.text(), whole());
            if changing.count() > before {
                break good.seen().last().unwrap().clone();
            }
        };
        let stated = &resumed.body["baton_resume"]["fingerprint"];
        assert_eq!(*stated, json!({"model": "one"}));
        router.all_ready(2).await;
        // The tokens of another model must not become the beginning of this one's answer.
        changing.replace(engine("a2", json!({"fingerprint": {"model": "two"}})));
        loop {
            let before = (changing.count(), good.count());
            let reply = router.chat_stream().await;
            if changing.count() > before.0 {
                assert!(reply.text().contains("\"error\""), "{}", reply.text());
                assert_eq!(good.count(), before.1);
                break;
            }
        }
        let unresumable = "baton_router_unresumable_streams_total{reason=\"unknown_worker\"}";
        assert_eq!(router.metric(unresumable).await, 1.0);
    })
    .await;
}

#[tokio::test]
async fn without_health_checks_answers_reveal_another_process() {
    timed(async {
        let names = |name: &str| json!({"served_model_names": [name]});
        let mut worker = mock(engine("a", names("old"))).await;
        let flags = ["--disable-health-check", "--worker-wait-timeout-secs", "30"];
        let router = Router::regular(&[&worker], &flags).await;
        eventually("it is described", || async {
            shown(&router, &worker).await["incarnation"] == "a"
        })
        .await;
        worker.replace(engine("b", names("new")));
        worker.acts(&[Act::Status(404, "model_not_found"), Act::Answer]);
        assert_eq!(status(&router, &ask("old")).await, 404);
        assert_eq!(status(&router, &ask("new")).await, 200);
        assert_eq!(shown(&router, &worker).await["incarnation"], "b");
    })
    .await;
}

#[tokio::test]
async fn foreign_worker_is_described_again_after_a_broken_connection() {
    timed(async {
        let sglang = |seed: u64, dp_size: u64| {
            json!({"random_seed": seed, "dp_size": dp_size, "served_model_name": "m"})
        };
        let mut worker = mock(sglang(1, 2)).await;
        let flags = [&["--dp-aware", "--disable-retries"], &NO_PROBES[..]].concat();
        let router = Router::regular(&[&worker], &flags).await;
        worker.replace(sglang(2, 1));
        worker.acts(&[Act::Drop, Act::Answer]);
        assert_eq!(status(&router, &ask("m")).await, 502);
        eventually("its ranks are the new ones", || async {
            shown(&router, &worker).await["dp_size"] == 1
        })
        .await;
        for _ in 0..3 {
            assert_eq!(status(&router, &ask("m")).await, 200);
            assert_eq!(worker.seen().last().unwrap().body["routed_dp_rank"], 0);
        }
    })
    .await;
}

#[tokio::test]
async fn foreign_worker_whose_probe_failed_is_described_again() {
    timed(async {
        let worker = mock(json!({"served_model_name": "old"})).await;
        let router = Router::regular(&[&worker], &PROBES).await;
        let bad = "baton_router_health_probes_total{result=\"bad\",role=\"regular\"}";
        worker.set_unhealthy(true);
        eventually("a probe fails", || async { router.metric(bad).await > 0.0 }).await;
        worker.replace(json!({"served_model_name": "new"}));
        worker.set_unhealthy(false);
        eventually("the new name is served", || async {
            status(&router, &ask("new")).await == 200
        })
        .await;
        assert_eq!(status(&router, &ask("old")).await, 404);
    })
    .await;
}

#[tokio::test]
async fn vllm_worker_without_any_of_its_former_names_is_another_process() {
    timed(async {
        let models = |names: &[&str]| {
            let cards: Vec<Value> = names.iter().map(|name| json!({"id": name})).collect();
            json!({"data": cards})
        };
        let worker = Mock::start(&[]).await.with_version("0.14.0");
        worker.answers("/v1/models", 200, models(&["old"]));
        let router = Router::regular(&[&worker], &PROBES).await;
        worker.answers("/v1/models", 200, models(&["old", "adapter"]));
        eventually("the adapter is served", || async {
            status(&router, &ask("adapter")).await == 200
        })
        .await;
        worker.answers("/v1/models", 200, models(&["new"]));
        eventually("the new model is served", || async {
            status(&router, &ask("new")).await == 200
        })
        .await;
        assert_eq!(status(&router, &ask("old")).await, 404);
    })
    .await;
}
