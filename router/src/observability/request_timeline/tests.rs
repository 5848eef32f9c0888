//! Tests of the timeline.

use baton_text::dialect::Dialect;
use router_core::{AttemptReason, PrefillForecast};

use super::history::RequestHistory;
use super::*;

#[test]
fn id_of_the_answer_finds_the_request() {
    let requests = RequestHistory::new(8);
    for rid in ["order-4711", "cmpl-7", "chatcmpl-both", "both"] {
        requests.begin("/x", rid, None);
    }
    for (asked, found) in [
        ("order-4711", Some("order-4711")),
        ("chatcmpl-order-4711", Some("order-4711")),
        ("cmpl-order-4711", Some("order-4711")),
        ("cmpl-7", Some("cmpl-7")),
        ("7", Some("cmpl-7")),
        ("both", Some("both")),
        ("chatcmpl-both", Some("chatcmpl-both")),
        ("chatcmpl-", None),
        ("order", None),
    ] {
        let id = requests
            .find(asked, Dialect::without_prefix)
            .map(|timeline| timeline["id"].clone());
        assert_eq!(id, found.map(Into::into), "{asked}");
    }
}

#[test]
fn timeline_lists_attempts_in_order_with_prediction_and_observation() {
    let requests = RequestHistory::new(8);
    let timeline = requests.begin("/generate", "r", None);
    for stage in [
        RequestStage::Read,
        RequestStage::Admitted,
        RequestStage::Parsed,
    ] {
        timeline.mark(stage);
    }
    let forecast = PrefillForecast {
        prompt_tokens: 100,
        cached_tokens: 64,
        ttft_ms: 12,
        best_cached_tokens: 64,
        best_ttft_ms: 12,
    };
    let leg = timeline.leg(
        Role::Regular,
        "http://a",
        SelectionReason::BestHolder(forecast),
        None,
    );
    leg.sent();
    leg.ended(RequestOutcome::Failure);
    timeline.failed(Role::Regular, AttemptReason::Connect, None);
    let leg = timeline.leg(Role::Regular, "http://b", SelectionReason::Only, None);
    leg.sent();
    leg.first_token();
    leg.usage(TokenUsage {
        prompt_tokens: 100,
        cached_tokens: Some(60),
        completion_tokens: Some(5),
    });
    leg.ended(RequestOutcome::Success);
    requests.end(&timeline, 200, "ok");
    let recorded = requests.find("r", Dialect::without_prefix).unwrap();
    assert_eq!(recorded["legs"][0]["cached_tokens"], 64);
    assert_eq!(recorded["legs"][0]["outcome"], "failed");
    assert_eq!(recorded["legs"][1]["attempt"], 2);
    assert_eq!(recorded["legs"][1]["usage"]["cached_tokens"], 60);
    assert_eq!(recorded["failed_attempts"][0]["reason"], "connect");
    assert!(recorded["timeline"]["ended_ms"].is_number());
    assert!(timeline.summary().contains("http://b") && !timeline.summary().contains("http://a"));
    let [.., connect, first_token] = timeline.stages();
    assert!(connect.is_some() && first_token.is_none());
}

#[test]
fn stream_without_its_worker_waits_for_another() {
    let requests = RequestHistory::new(8);
    let timeline = requests.begin("/x", "r", None);
    let shown = || {
        let [recent] = &requests.recent(1)[..] else {
            panic!("one request");
        };
        let found = requests.find("r", Dialect::without_prefix).unwrap();
        assert_eq!(recent["state"], found["state"]);
        assert_eq!(recent["waits_for"], found["waits_for"]);
        ["state", "waits_for", "worker"].map(|name| recent[name].clone())
    };
    let expected = |state: &str, waits_for: Option<&str>, worker: Option<&str>| -> [Value; 3] {
        [state.into(), waits_for.into(), worker.into()]
    };
    assert_eq!(shown(), expected("waiting", None, None));
    let leg = |worker| timeline.leg(Role::Decode, worker, SelectionReason::Only, None);
    let first = leg("http://a");
    assert_eq!(shown(), expected("running", None, Some("http://a")));
    first.ended(RequestOutcome::Failure);
    timeline.failed(Role::Decode, AttemptReason::Reset, Some(3));
    assert_eq!(shown(), expected("waiting", Some("decode"), None));
    let _second = leg("http://b");
    assert_eq!(shown(), expected("running", None, Some("http://b")));
    requests.end(&timeline, 200, "ok");
    assert_eq!(shown(), expected("ended", None, Some("http://b")));
}

#[test]
fn wait_for_the_first_worker_is_no_part_of_the_decision() {
    let requests = RequestHistory::new(8);
    let timeline = requests.begin("/x", "r", None);
    timeline.mark(RequestStage::Tokenized);
    assert_eq!(timeline.stages()[4], None, "it did not wait");
    std::thread::sleep(std::time::Duration::from_millis(20));
    timeline.waited_for_worker();
    let _leg = timeline.leg(Role::Regular, "w", SelectionReason::Only, None);
    timeline.waited_for_worker();
    let [_, _, _, _, worker_wait, decide, ..] = timeline.stages();
    let worker_wait = worker_wait.unwrap();
    let decide = decide.unwrap();
    assert!(worker_wait >= 0.02, "{worker_wait}");
    let stages = &requests.find("r", Dialect::without_prefix).unwrap()["timeline"];
    let chosen = timeline.records.lock().legs[0].chosen_ms / 1e3;
    let ready = stages["worker_ready_ms"].as_f64().unwrap() / 1e3;
    assert!((decide - (chosen - ready)).abs() < 1e-4, "{decide}");
}
