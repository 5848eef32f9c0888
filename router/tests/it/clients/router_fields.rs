//! Fields and headers of routers that a client sends reach no worker, on no path, in no form and in
//! no attempt. Their names come from the table of the text layer.

use baton_text::dialect::body::router_fields::{
    ROUTER_FIELD_PREFIX, ROUTER_FIELDS, ROUTER_HEADER_PREFIX, ROUTER_HEADERS,
};
use baton_text::dialect::{Dialect, resume};
use http::Method;
use serde_json::{Value, json};

use crate::support::{Act, End, Mock, Router, timed};

/// Stands in every value that the client gives.
const HOSTILE: &str = "hostile4711";
const DP: [&str; 1] = ["--dp-aware"];
/// Paths whose requests pass to any worker.
const PASSED_PATHS: [&str; 6] = [
    "/v1/embeddings",
    "/v1/score",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
];

fn field_names() -> Vec<String> {
    let newer = format!("{ROUTER_FIELD_PREFIX}of_newer_routers");
    let names = ROUTER_FIELDS.into_iter().map(str::to_owned);
    names.chain([newer]).collect()
}

/// Headers of routers, one of them nominated for removal, and credentials likewise.
fn hostile_headers() -> Vec<(String, String)> {
    let newer = format!("{ROUTER_HEADER_PREFIX}of-newer-routers");
    let names = ROUTER_HEADERS.into_iter().map(str::to_owned);
    let mut headers: Vec<_> = names
        .chain([newer])
        .map(|name| (name, HOSTILE.to_owned()))
        .collect();
    headers.push(("authorization".to_owned(), "Bearer client".to_owned()));
    let nominated = format!("authorization, {}", resume::EMIT_TOKENS_HEADER);
    headers.push(("connection".to_owned(), nominated));
    headers
}

/// The request with every field of routers, at its front and, with a name in other letters of JSON,
/// at its end.
fn hostile_body(request: &Value) -> String {
    let value = json!([{HOSTILE: 1}, HOSTILE]).to_string();
    let own = request.to_string();
    let own = own.strip_prefix('{').and_then(|own| own.strip_suffix('}'));
    let names = field_names();
    let plain = names.iter().map(|name| format!("\"{name}\":{value}"));
    let escaped = names.iter().map(|name| {
        let (first, others) = name.split_at(1);
        format!("\"\\u{:04x}{others}\" : {value}", first.as_bytes()[0])
    });
    let members: Vec<String> = plain
        .chain(own.filter(|own| !own.is_empty()).map(str::to_owned))
        .chain(escaped)
        .collect();
    format!("{{{}}}", members.join(","))
}

/// One request, a batch, several answers, and those that one node answers, streamed and whole.
fn requests() -> Vec<(&'static str, Value)> {
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let several = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2});
    let logprobs = |limit| json!({"model": "m", "prompt": "a", "echo": true, "logprobs": 1, "max_tokens": limit});
    let messages =
        json!({"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]});
    let shapes = [
        (Dialect::Chat, chat),
        (Dialect::Chat, several),
        (Dialect::Completions, json!({"model": "m", "prompt": "a"})),
        (
            Dialect::Completions,
            json!({"model": "m", "prompt": ["a", "b"]}),
        ),
        (
            Dialect::Completions,
            json!({"model": "m", "prompt": [1, 2]}),
        ),
        (Dialect::Completions, logprobs(0)),
        (Dialect::Completions, logprobs(4)),
        (Dialect::Responses, json!({"model": "m", "input": "hi"})),
        (Dialect::Messages, messages),
        (Dialect::Generate, json!({"text": "a"})),
        (Dialect::Generate, json!({"text": ["a", "b"]})),
        (
            Dialect::Generate,
            json!({"text": "a", "sampling_params": {"n": 2}}),
        ),
    ];
    let both = shapes.into_iter().flat_map(|(dialect, request)| {
        let mut streamed = request.clone();
        streamed["stream"] = true.into();
        [(dialect.path(), request), (dialect.path(), streamed)]
    });
    both.collect()
}

fn mark(mocks: &[&Mock]) -> usize {
    mocks.iter().map(|mock| mock.count()).sum()
}

/// Sends a request of a hostile client and returns how many workers got it.
async fn send(router: &Router, mocks: &[&Mock], path: &str, request: &Value) -> usize {
    let before = mark(mocks);
    let headers = hostile_headers();
    let headers: Vec<_> = headers
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let body = hostile_body(request);
    router.send(Method::POST, path, &headers, &body).await;
    mark(mocks) - before
}

/// Nothing that the client gave under a name of routers is at a worker, and what the router added
/// itself is there once.
fn assert_clean(fleet: &str, mocks: &[&Mock]) {
    for seen in mocks.iter().flat_map(|mock| mock.seen()) {
        let at = format!("{fleet} {}", seen.path);
        let body = String::from_utf8_lossy(&seen.raw);
        assert!(!body.contains(HOSTILE), "{at}: {body}");
        assert!(seen.raw.is_empty() || seen.body.is_object(), "{at}: {body}");
        for name in field_names() {
            let times = body.matches(&format!("\"{name}\"")).count();
            assert!(times <= 1, "{at}: {times} times {name} in {body}");
        }
        let values = seen.headers.values();
        let hostile: Vec<_> = values.filter(|value| *value == HOSTILE).collect();
        assert!(hostile.is_empty(), "{at}: {:?}", seen.headers);
        assert_eq!(seen.headers["authorization"], "Bearer client", "{at}");
    }
}

fn info(features: &[&str], dp_size: u32) -> Value {
    json!({"engine": "baton", "baton_features": features, "dp_size": dp_size})
}

/// Every request of `requests`, and those that pass to any worker.
async fn assert_fleet_is_clean(fleet: &str, router: &Router, mocks: &[&Mock]) {
    for (path, request) in requests() {
        let got = send(router, mocks, path, &request).await;
        assert!(got > 0, "{fleet}: {path} {request} was sent to no worker");
    }
    for path in PASSED_PATHS {
        let got = send(router, mocks, path, &json!({"input": "a"})).await;
        assert!(got > 0, "{fleet}: {path} was sent to no worker");
    }
    assert_clean(fleet, mocks);
}

#[tokio::test]
async fn no_regular_worker_gets_them() {
    timed(async {
        for (dp_size, flags) in [(1, &[][..]), (2, &DP)] {
            let mock = Mock::start(&[]).await.with_info(info(&["resume"], dp_size));
            let router = Router::regular(&[&mock], flags).await;
            assert_fleet_is_clean("regular", &router, &[&mock]).await;
            let lacking = Mock::start(&[]).await;
            let lacking = lacking
                .with_info(json!({"dp_size": dp_size}))
                .lacks(&[Dialect::Responses, Dialect::Messages]);
            let router = Router::regular(&[&lacking], flags).await;
            assert_fleet_is_clean("translated", &router, &[&lacking]).await;
        }
    })
    .await;
}

#[tokio::test]
async fn no_worker_of_a_pair_gets_them() {
    timed(async {
        for (dp_size, flags) in [(1, &[][..]), (2, &DP)] {
            let p = info(&["local_answer"], dp_size);
            let p = Mock::start(&[]).await.with_info(p);
            let d = info(&["local_prefill", "resume"], dp_size);
            let d = Mock::start(&[]).await.with_info(d);
            let router = Router::pd(&[&p], &[&d], flags).await;
            assert_fleet_is_clean("pair", &router, &[&p, &d]).await;
            // D alone.
            let flags: Vec<_> = ["--local-prefill-max-tokens", "100"]
                .into_iter()
                .chain(flags.iter().copied())
                .collect();
            let router = Router::pd(&[&p], &[&d], &flags).await;
            assert_fleet_is_clean("local prefill", &router, &[&p, &d]).await;
        }
    })
    .await;
}

#[tokio::test]
async fn no_worker_of_vllm_gets_them() {
    timed(async {
        let flags = ["--pd-protocol", "vllm"];
        let ranks = ["--dp-aware", "--intra-node-data-parallel-size", "2"];
        for more in [&[][..], &ranks] {
            let flags: Vec<_> = flags.into_iter().chain(more.iter().copied()).collect();
            let answer = Act::Json(json!({"kv_transfer_params": {"remote_engine_id": "e"}}));
            let p = Mock::start(&[answer]).await.with_version("0.11.0");
            let d = Mock::start(&[]).await.with_version("0.11.0");
            let router = Router::pd(&[&p], &[&d], &flags).await;
            assert_fleet_is_clean("pair of vLLM", &router, &[&p, &d]).await;
            let single = Mock::start(&[]).await.with_version("0.11.0");
            let router = Router::regular(&[&single], more).await;
            assert_fleet_is_clean("vLLM", &router, &[&single]).await;
        }
    })
    .await;
}

#[tokio::test]
async fn retried_and_resumed_requests_have_those_of_the_router_alone() {
    timed(async {
        let features = info(&["resume"], 1);
        let p = Mock::start(&[]).await.with_info(features.clone());
        let failures = [Act::Status(502, "x"), Act::CountTo(2, 0, End::Break)];
        let dying = Mock::start(&failures).await;
        let dying = dying.with_info(features.clone());
        let good = Mock::start(&[Act::Count]).await.with_info(features);
        let mocks = [&p, &dying, &good];
        let flags = ["--disable-circuit-breaker"];
        let router = Router::pd(&[&p], &[&dying, &good], &flags).await;
        let chat = json!({"messages": [{"role": "user", "content": "hi"}], "stream": true});
        while !good
            .seen()
            .iter()
            .any(|seen| seen.body[resume::FIELD].is_object())
        {
            send(&router, &mocks, Dialect::Chat.path(), &chat).await;
        }
        assert!(dying.count() >= 2, "one was retried, and one resumed");
        assert_clean("pair", &mocks);
    })
    .await;
}

#[tokio::test]
async fn passed_bodies_that_cannot_be_read_are_refused_and_parts_pass() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let router = Router::regular(&[&mock], &[]).await;
        let json = ("content-type", "application/json");
        let parts = ("content-type", "multipart/form-data; boundary=b");
        let coded = ("content-encoding", "gzip");
        let unreadable = r#"{"input":NaN,"routed_dp_rank":1}"#;
        for (headers, body, code) in [
            (&[json][..], unreadable, Some("invalid_json")),
            (&[], unreadable, Some("invalid_json")),
            (&[json], "[1]", Some("invalid_json")),
            // A worker may read the second type.
            (&[parts, json], unreadable, Some("invalid_json")),
            (&[json, coded], "{}", Some("unsupported_media_type")),
            (&[parts], "--b\r\n", None),
            (&[json], "", None),
        ] {
            let reply = router
                .send(Method::POST, "/v1/embeddings", headers, body)
                .await;
            match code {
                Some(code) => assert_eq!(reply.code(), code, "{headers:?} {body}"),
                None => assert_eq!(reply.status, 200, "{headers:?} {body}"),
            }
        }
        assert_eq!(mock.count(), 2);
    })
    .await;
}
