//! /v1/responses and /v1/messages in front of workers of other makes: passed through to those that
//! have the path, sent as chat requests to those that lack it.

use baton_text::dialect::Dialect;
use http::Method;
use serde_json::{Value, json};

use crate::support::peers::{Peer, Rooms};
use crate::support::{Act, End, Mock, Reply, Router, TOKEN, eventually, timed};

const APIS: [Dialect; 2] = [Dialect::Responses, Dialect::Messages];

/// A request with a tool, of which the client's model knows nothing else.
fn request(api: Dialect, stream: bool) -> Value {
    let schema = json!({"type": "object", "properties": {}});
    match api {
        Dialect::Responses => json!({
            "model": "m", "instructions": "Be terse.", "input": "hi", "max_output_tokens": 9, "top_k": 3,
            "tools": [
                {"type": "function", "name": "f", "parameters": schema},
                {"type": "web_search"},
            ],
            "stream": stream,
        }),
        _ => json!({
            "model": "m", "system": "Be terse.", "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 9, "top_k": 3, "tools": [
                {"name": "f", "input_schema": schema},
                {"type": "web_search_20250305", "name": "web_search"},
            ],
            "stream": stream,
        }),
    }
}

async fn ask(router: &Router, api: Dialect, stream: bool) -> Reply {
    router.post(api.path(), &request(api, stream)).await
}

async fn regular(url: &str) -> Router {
    let router = Router::start(&["--worker-urls", url]).await;
    router.all_ready(1).await;
    router
}

/// The chat request that a worker got.
fn assert_is_chat(path: &str, body: &Value) {
    assert_eq!(path, "/v1/chat/completions");
    let expected = json!([
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "hi"},
    ]);
    assert_eq!(body["messages"], expected);
    assert_eq!(body["tools"].as_array().unwrap().len(), 1);
    assert_eq!(body["tools"][0]["function"]["name"], "f");
    assert_eq!(body["top_k"], 3);
    for member in ["input", "instructions", "system", "max_output_tokens"] {
        assert!(body.get(member).is_none(), "{body}");
    }
}

/// The text of an answer, its end, and the counts of its prompt and its tokens.
fn shown(api: Dialect, answer: &Value) -> (Value, Value, (u64, u64)) {
    let usage = &answer["usage"];
    let counts = ["input_tokens", "output_tokens"].map(|name| usage[name].as_u64().unwrap());
    let (text, end) = match api {
        Dialect::Responses => (
            &answer["output"][0]["content"][0]["text"],
            &answer["status"],
        ),
        _ => (&answer["content"][0]["text"], &answer["stop_reason"]),
    };
    (text.clone(), end.clone(), (counts[0], counts[1]))
}

/// Name and data of the events of a stream that ends properly.
fn events(reply: &Reply) -> Vec<(String, Value)> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = reply.text();
    let text = text.strip_suffix("data: [DONE]\n\n").unwrap();
    let read = |event: &str| {
        // An error of the router begins with an empty line: its worker may have broken off
        // anywhere.
        let (name, data) = event.trim_start().split_once('\n').unwrap();
        let name = name.strip_prefix("event: ").unwrap().to_owned();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name);
        (name, data)
    };
    let events = text.split("\n\n").filter(|event| !event.is_empty());
    events.map(read).collect()
}

/// Text of the deltas of a stream, and its last event.
fn streamed(api: Dialect, events: &[(String, Value)]) -> String {
    let (name, member) = match api {
        Dialect::Responses => ("response.output_text.delta", "/delta"),
        _ => ("content_block_delta", "/delta/text"),
    };
    let deltas = events.iter().filter(|(event, _)| event == name);
    deltas
        .map(|(_, data)| data.pointer(member).unwrap().as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn worker_without_the_path_gets_a_chat_request_and_the_client_its_own_answer() {
    timed(async {
        for (peer, text, ends) in [
            (
                Peer::sglang("null", &Rooms::new()).await,
                "a\u{e9}",
                ["completed", "end_turn"],
            ),
            (Peer::vllm().await, "ab", ["incomplete", "max_tokens"]),
        ] {
            let router = regular(&peer.url()).await;
            for (api, end) in APIS.into_iter().zip(ends) {
                let reply = ask(&router, api, false).await;
                assert_eq!(reply.status, 200, "{}", reply.text());
                let answer = reply.json();
                let expected = (json!(text), json!(end), (3, 2));
                assert_eq!(shown(api, &answer), expected, "{answer}");
                assert_eq!(
                    answer["id"],
                    reply.headers["x-request-id"].to_str().unwrap()
                );
                assert!(reply.headers.contains_key("x-ignored-params"));

                let reply = ask(&router, api, true).await;
                let events = events(&reply);
                assert_eq!(streamed(api, &events), text);
                let (name, last) = events.last().unwrap();
                match api {
                    Dialect::Responses => {
                        assert_eq!(name, &format!("response.{end}"));
                        let expected = (json!(text), json!(end), (3, 2));
                        assert_eq!(shown(api, &last["response"]), expected);
                    }
                    _ => {
                        assert_eq!(name, "message_stop");
                        let delta = &events[events.len() - 2].1;
                        assert_eq!(delta["delta"]["stop_reason"], end);
                        assert_eq!(delta["usage"]["output_tokens"], 2);
                    }
                }
            }
            for (path, _, body) in peer.seen() {
                assert_is_chat(&path, &body);
                assert_eq!(body["max_completion_tokens"], 9);
                assert_eq!(body["max_tokens"], 9);
                let options = json!({"include_usage": true, "continuous_usage_stats": true});
                let options = if body["stream"] == true {
                    options
                } else {
                    Value::Null
                };
                assert_eq!(body["stream_options"], options);
            }
            for route in APIS.map(Dialect::path) {
                let line = format!("baton_router_translated_requests_total{{route=\"{route}\"}}");
                assert_eq!(router.metric(&line).await, 2.0);
            }
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn worker_with_the_path_gets_the_clients_own_bytes() {
    timed(async {
        let answer = json!({"type": "message", "content": []});
        let worker = Mock::start(&[Act::Json(answer.clone())]).await;
        let worker = worker.with_version("0.33.0").lacks(&[Dialect::Responses]);
        let router = Router::regular(&[&worker], &[]).await;
        let reply = ask(&router, Dialect::Messages, false).await;
        assert_eq!(reply.json(), answer);
        ask(&router, Dialect::Responses, false).await;
        let seen = worker.seen();
        assert_eq!(seen[0].path, "/v1/messages");
        assert_eq!(
            seen[0].raw,
            request(Dialect::Messages, false).to_string().as_bytes()
        );
        assert_is_chat(&seen[1].path, &seen[1].body);
    })
    .await;
}

#[tokio::test]
async fn another_process_at_the_address_is_asked_again() {
    timed(async {
        let old = Mock::start(&[]).await.lacks(&APIS);
        let router = Router::regular(&[&old], &["--health-check-interval-secs", "1"]).await;
        ask(&router, Dialect::Messages, true).await;
        assert_eq!(old.seen()[0].path, "/v1/chat/completions");
        let addr = old.stop().await;
        eventually("the router finds it gone", || async {
            let list = router.get("/workers").await.json();
            list["workers"][0]["state"] != "ready"
        })
        .await;
        let new = Mock::at(addr, &[]).await;
        eventually("the new process gets its own path", || async {
            ask(&router, Dialect::Messages, true).await;
            new.seen()
                .last()
                .is_some_and(|seen| seen.path == "/v1/messages")
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn sglang_pair_meets_on_the_chat_path() {
    timed(async {
        let rooms = Rooms::new();
        let p = Peer::sglang("prefill", &rooms).await;
        let d = Peer::sglang("decode", &rooms).await;
        let p_url = p.url();
        let d_url = d.url();
        let flags = [
            "--pd-disaggregation",
            "--prefill",
            &p_url,
            "--decode",
            &d_url,
        ];
        let router = Router::start(&flags).await;
        router.all_ready(2).await;
        for api in APIS {
            let whole = ask(&router, api, false).await.json();
            assert_eq!(shown(api, &whole).0, "a\u{e9}", "{whole}");
            assert_eq!(
                streamed(api, &events(&ask(&router, api, true).await)),
                "a\u{e9}"
            );
        }
        for (p, d) in p.seen().iter().zip(&d.seen()) {
            assert_is_chat(&p.0, &p.2);
            assert!(p.2["bootstrap_room"].is_u64());
            assert_eq!(p.2, d.2, "both get the same body");
        }
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn vllm_pair_prefills_one_token_on_either_path() {
    timed(async {
        let params = json!({"remote_block_ids": [1, 2], "remote_engine_id": "e"});
        let prefilled = Act::Json(json!({"choices": [], "kv_transfer_params": params}));
        let p = Mock::start(&[prefilled]).await.with_version("0.33.0");
        let d = Mock::start(&[]).await.with_version("0.33.0");
        let p_url = p.url();
        let d_url = d.url();
        let flags = format!("--vllm-pd-disaggregation --prefill {p_url} none --decode {d_url}");
        let router = Router::start(&flags.split_whitespace().collect::<Vec<_>>()).await;
        router.all_ready(2).await;
        for (api, path) in [
            (Dialect::Messages, "/v1/messages"),
            (Dialect::Responses, "/v1/chat/completions"),
        ] {
            assert_eq!(ask(&router, api, true).await.status, 200);
            let first = p.seen().last().unwrap().clone();
            let second = d.seen().last().unwrap().clone();
            assert_eq!((first.path.as_str(), second.path.as_str()), (path, path));
            assert_eq!(first.body["max_tokens"], 1);
            assert_eq!(first.body["stream"], false);
            assert!(first.body.get("stream_options").is_none());
            assert_eq!(first.body["kv_transfer_params"]["do_remote_decode"], true);
            assert_eq!(second.body["stream"], true);
            assert_eq!(second.body["kv_transfer_params"], params);
        }
    })
    .await;
}

#[tokio::test]
async fn errors_of_the_worker_have_the_form_of_the_clients_api() {
    timed(async {
        let peer = Peer::sglang("null", &Rooms::new()).await;
        let router = regular(&peer.url()).await;
        for api in APIS {
            let mut body = request(api, false);
            body["temperature"] = json!(-1);
            let reply = router.post(api.path(), &body).await;
            let answer = reply.json();
            let error = &answer["error"];
            assert_eq!(reply.status, 400);
            assert_eq!(error["message"], "temperature must be non-negative");
            assert_eq!(error["type"], "invalid_request_error");
            assert_eq!(error["code"], "invalid_value");
            let kind = (api == Dialect::Messages).then_some("error");
            assert_eq!(answer["type"], json!(kind));
        }
    })
    .await;
}

#[tokio::test]
async fn stream_that_breaks_off_ends_with_an_error_of_the_clients_api() {
    const FAILED: &str =
        "data: {\"error\":{\"message\":\"out of memory\",\"type\":\"x\",\"code\":500}}\n\n";
    timed(async {
        for (act, message) in [
            (Act::Stream(vec![TOKEN], End::Break), "broke off its answer"),
            (
                Act::Stream(vec![TOKEN], End::Clean),
                "ended the stream without finishing it",
            ),
            (
                Act::Stream(vec![TOKEN, FAILED], End::Clean),
                "out of memory",
            ),
            (
                Act::Stream(vec![TOKEN, "data: 7\n\n"], End::Clean),
                "no chat answer",
            ),
            (Act::Stream(vec![FAILED], End::Clean), "out of memory"),
        ] {
            let worker = Mock::start(&[act]).await.lacks(&APIS);
            let router = Router::regular(&[&worker], &[]).await;
            for api in APIS {
                let reply = ask(&router, api, true).await;
                let events = events(&reply);
                let (name, data) = events.last().unwrap();
                let error = match api {
                    Dialect::Responses => {
                        assert_eq!(name, "response.failed");
                        let numbers = events.iter().map(|(_, event)| &event["sequence_number"]);
                        assert!(numbers.enumerate().all(|(at, number)| number == at));
                        &data["response"]["error"]
                    }
                    _ => {
                        assert_eq!(name, "error");
                        &data["error"]
                    }
                };
                let text = error["message"].as_str().unwrap();
                assert!(text.contains(message), "{text}");
            }
            router.no_load().await;
        }
    })
    .await;
}

#[tokio::test]
async fn request_that_no_chat_request_can_say_is_refused_by_its_own_members() {
    timed(async {
        let worker = Mock::start(&[]).await.lacks(&APIS);
        let router = Router::regular(&[&worker], &[]).await;
        for (api, body, param) in [
            (
                Dialect::Responses,
                json!({"model": "m", "input": "hi", "previous_response_id": "resp_1"}),
                "previous_response_id",
            ),
            (
                Dialect::Messages,
                json!({"model": "m", "max_tokens": 1, "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {}}]},
                ]}),
                "messages[0].content[0].type",
            ),
        ] {
            let reply = router
                .send(Method::POST, api.path(), &[], &body.to_string())
                .await;
            let error = &reply.json()["error"];
            assert_eq!(reply.status, 400);
            assert_eq!(error["code"], "unsupported_parameter");
            assert!(
                error["message"].as_str().unwrap().starts_with(param),
                "{error}"
            );
        }
        assert_eq!(worker.count(), 0);
        router.no_load().await;
    })
    .await;
}

/// `transformers serve` (5.24) writes neither names of events nor `[DONE]`.
#[tokio::test]
async fn response_whose_events_have_no_names_is_whole() {
    const EVENTS: [&str; 2] = [
        "data: {\"response\":{\"status\":\"in_progress\"},\"type\":\"response.created\"}\n\n",
        "data: {\"response\":{\"status\":\"completed\"},\"type\":\"response.completed\"}\n\n",
    ];
    timed(async {
        let worker = Mock::start(&[Act::Stream(EVENTS.to_vec(), End::Clean)]).await;
        let router = Router::regular(&[&worker], &[]).await;
        let reply = ask(&router, Dialect::Responses, true).await;
        // An empty line in front: a worker may have broken off anywhere.
        let expected = format!("{}\ndata: [DONE]\n\n", EVENTS.concat());
        assert_eq!(reply.text(), expected);
        router.no_load().await;
    })
    .await;
}

#[tokio::test]
async fn worker_that_counts_no_tokens_is_named_in_anthropics_form() {
    timed(async {
        const PATH: &str = "/v1/messages/count_tokens";
        let worker = Mock::start(&[]).await;
        let router = Router::regular(&[&worker], &[]).await;
        let body = request(Dialect::Messages, false);
        worker.answers(PATH, 404, json!({"detail": "Not Found"}));
        let reply = router.post(PATH, &body).await;
        assert_eq!(reply.status, 404);
        let answer = reply.json();
        assert_eq!(answer["error"]["type"], "not_found_error");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("usage.input_tokens"), "{message}");
        let own =
            json!({"type": "error", "error": {"type": "not_found_error", "message": "no model"}});
        worker.answers(PATH, 404, own.clone());
        assert_eq!(router.post(PATH, &body).await.json(), own);
        worker.answers(PATH, 200, json!({"input_tokens": 3}));
        assert_eq!(router.post(PATH, &body).await.json()["input_tokens"], 3);
    })
    .await;
}
