//! Workers of other makes, as far as a router can tell: the paths they have, the words they use,
//! the order of their events.
//!
//! Written from what was measured of SGLang 0.5.7 and vLLM v1 on the wire, not from their code.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http::{HeaderMap, StatusCode, Uri, header};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Rooms whose prefill is done; the mocks of a cluster share it, as P and D share a network.
#[derive(Clone)]
pub struct Rooms(Arc<watch::Sender<HashSet<u64>>>);

impl Rooms {
    pub fn new() -> Rooms {
        Rooms(Arc::new(watch::Sender::new(HashSet::new())))
    }

    async fn arrived(&self, room: u64) {
        let mut seen = self.0.subscribe();
        let arrived = seen.wait_for(|rooms| rooms.contains(&room)).await;
        arrived.expect("the sender is in self");
    }
}

#[derive(Clone)]
struct Worker {
    /// SGLang's `disaggregation_mode`.
    mode: &'static str,
    rooms: Rooms,
    seen: Arc<Mutex<Vec<(String, HeaderMap, Value)>>>,
}

pub struct Peer {
    pub addr: SocketAddr,
    worker: Worker,
    task: JoinHandle<()>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Peer {
    /// `mode` is null, prefill or decode.
    pub async fn sglang(mode: &'static str, rooms: &Rooms) -> Peer {
        let routes = Router::new()
            .route("/health", get(|| async { StatusCode::OK }))
            .route("/server_info", get(sglang_info))
            .route("/get_server_info", get(sglang_info))
            .route("/v1/models", get(|| async { models("sglang") }))
            .route("/v1/chat/completions", post(sglang_openai))
            .route("/v1/completions", post(sglang_openai))
            .route("/generate", post(sglang_generate))
            .route("/flush_cache", post(|| async { "Cache flushed.\n" }));
        Peer::start(mode, rooms, routes).await
    }

    pub async fn vllm() -> Peer {
        let routes = Router::new()
            .route("/health", get(|| async { StatusCode::OK }))
            .route(
                "/version",
                get(|| async { axum::Json(json!({"version": "0.14.0"})) }),
            )
            .route("/v1/models", get(|| async { models("vllm") }))
            .route("/v1/chat/completions", post(vllm_openai))
            .route("/v1/completions", post(vllm_openai))
            .fallback(|| async {
                (
                    StatusCode::NOT_FOUND,
                    axum::Json(json!({"detail": "Not Found"})),
                )
            });
        Peer::start("null", &Rooms::new(), routes).await
    }

    async fn start(mode: &'static str, rooms: &Rooms, routes: Router<Worker>) -> Peer {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("an address");
        let worker = Worker {
            mode,
            rooms: rooms.clone(),
            seen: Arc::default(),
        };
        let app = routes.with_state(worker.clone());
        let task = tokio::spawn(async move {
            axum::serve(listener, app).await.expect("it serves");
        });
        Peer { addr, worker, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// (path, headers, body) of the generation requests.
    pub fn seen(&self) -> Vec<(String, HeaderMap, Value)> {
        self.worker.seen.lock().clone()
    }
}

fn models(owner: &str) -> Response {
    let card = json!({"id": "m", "object": "model", "created": 1, "owned_by": owner, "root": "m", "max_model_len": 8192});
    axum::Json(json!({"object": "list", "data": [card]})).into_response()
}

fn sse(events: &[Value]) -> Response {
    let mut text: String = events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    text.push_str("data: [DONE]\n\n");
    let kind = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
    (kind, text).into_response()
}

async fn sglang_info(State(worker): State<Worker>) -> Response {
    axum::Json(json!({
        "model_path": "m", "tokenizer_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1,
        "disaggregation_mode": worker.mode, "disaggregation_bootstrap_port": 8998, "page_size": 1,
        "schedule_policy": "fcfs", "max_total_num_tokens": 100_000, "version": "0.5.7", "api_key": null,
        "internal_states": [{"max_running_requests": 2048, "last_gen_throughput": 0.0}]
    }))
    .into_response()
}

/// SGLang's own shape of an error.
fn sglang_error(message: &str) -> Response {
    let error = json!({"object": "error", "message": message, "type": "BadRequest", "param": null, "code": 400});
    (StatusCode::BAD_REQUEST, axum::Json(error)).into_response()
}

/// Note the request; P computes and tells the room, D waits for it.
async fn sglang_takes(
    worker: &Worker,
    uri: &Uri,
    headers: HeaderMap,
    body: &Value,
) -> Result<(), Response> {
    worker
        .seen
        .lock()
        .push((uri.path().to_owned(), headers, body.clone()));
    if worker.mode == "null" {
        return Ok(());
    }
    let room = body["bootstrap_room"].as_u64();
    let room = room
        .ok_or_else(|| sglang_error("Disaggregated request received without boostrap room id."))?;
    if !body["bootstrap_host"].is_string() || !body["bootstrap_port"].is_u64() {
        return Err(sglang_error("no bootstrap address"));
    }
    match worker.mode {
        "prefill" => {
            worker.rooms.0.send_modify(|rooms| {
                rooms.insert(room);
            });
        }
        _ => worker.rooms.arrived(room).await,
    }
    Ok(())
}

async fn sglang_openai(
    State(worker): State<Worker>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return sglang_error("not JSON");
    };
    if let Err(refusal) = sglang_takes(&worker, &uri, headers, &body).await {
        return refusal;
    }
    if body["temperature"].as_f64().is_some_and(|t| t < 0.0) {
        return sglang_error("temperature must be non-negative");
    }
    let is_chat = uri.path().contains("chat");
    let usage = json!({"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": null, "reasoning_tokens": 0});
    let chunk = |delta: Value, finish: Value, usage: Value| match is_chat {
        true => {
            json!({"id": "1a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish, "matched_stop": null}], "usage": usage})
        }
        false => {
            json!({"id": "1a", "object": "text_completion", "created": 1, "choices": [{"index": 0, "text": delta["content"], "logprobs": null, "finish_reason": finish, "matched_stop": null}], "model": "m", "usage": usage})
        }
    };
    if body["stream"] == true {
        let mut events = vec![
            chunk(
                json!({"role": "assistant", "content": ""}),
                Value::Null,
                Value::Null,
            ),
            chunk(json!({"content": "a"}), Value::Null, Value::Null),
            chunk(json!({"content": "\u{e9}"}), Value::Null, Value::Null),
            chunk(json!({"content": null}), json!("stop"), Value::Null),
        ];
        if body["stream_options"]["include_usage"] == true {
            let mut last = chunk(json!({}), Value::Null, usage);
            last["choices"] = json!([]);
            events.push(last);
        }
        return sse(&events);
    }
    let choice = match is_chat {
        true => {
            json!({"index": 0, "message": {"role": "assistant", "content": "a\u{e9}", "reasoning_content": null, "tool_calls": null}, "logprobs": null, "finish_reason": "stop", "matched_stop": 2})
        }
        false => {
            json!({"index": 0, "text": "a\u{e9}", "logprobs": null, "finish_reason": "stop", "matched_stop": 2})
        }
    };
    axum::Json(json!({"id": "1a", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage, "metadata": {"weight_version": "default"}}))
        .into_response()
}

async fn sglang_generate(
    State(worker): State<Worker>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return sglang_error("not JSON");
    };
    if let Err(refusal) = sglang_takes(&worker, &uri, headers, &body).await {
        return refusal;
    }
    // The text so far, not what is new; finish_reason is an object; no [DONE] is missing.
    let event = |text: &str, ids: &[u32], finish: Value| json!({"text": text, "output_ids": ids, "meta_info": {"id": "1a", "finish_reason": finish, "prompt_tokens": 3, "weight_version": "default", "completion_tokens": ids.len(), "cached_tokens": 0, "e2e_latency": 0.01}});
    let last = event("ab", &[5, 6], json!({"type": "stop", "matched": 2}));
    match body["stream"] == true {
        true => sse(&[event("a", &[5], Value::Null), last]),
        false => axum::Json(last).into_response(),
    }
}

async fn vllm_openai(
    State(worker): State<Worker>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return StatusCode::UNPROCESSABLE_ENTITY.into_response();
    };
    let row = (uri.path().to_owned(), headers, body.clone());
    worker.seen.lock().push(row);
    if body["model"] != "m" {
        // Its codes are numbers.
        let error = json!({"error": {"message": "The model does not exist.", "type": "NotFoundError", "param": "model", "code": 404}});
        return (StatusCode::NOT_FOUND, axum::Json(error)).into_response();
    }
    let is_chat = uri.path().contains("chat");
    let usage = json!({"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": null});
    let chunk = |delta: Value, finish: Value| match is_chat {
        true => {
            json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [{"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish, "token_ids": null}], "prompt_token_ids": null})
        }
        false => {
            json!({"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [{"index": 0, "text": delta["content"], "logprobs": null, "finish_reason": finish, "stop_reason": null}], "usage": null})
        }
    };
    if body["stream"] == true {
        let mut events = vec![
            chunk(json!({"role": "assistant", "content": ""}), Value::Null),
            chunk(json!({"content": "a"}), Value::Null),
            // The last token and the reason come together.
            chunk(json!({"content": "b"}), json!("length")),
        ];
        if body["stream_options"]["include_usage"] == true {
            events.push(json!({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], "usage": usage}));
        }
        return sse(&events);
    }
    let choice = match is_chat {
        true => {
            json!({"index": 0, "message": {"role": "assistant", "content": "ab", "refusal": null, "tool_calls": []}, "logprobs": null, "finish_reason": "length", "stop_reason": null})
        }
        false => {
            json!({"index": 0, "text": "ab", "logprobs": null, "finish_reason": "length", "stop_reason": null, "prompt_logprobs": null})
        }
    };
    axum::Json(json!({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage, "kv_transfer_params": null}))
        .into_response()
}
