//! What is passed on to workers and generates no tokens here: to one of them, to all, or to the one that knows a request.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use router_core::Outcome;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::admin::{MAX_ADMIN_BODY, answer};
use super::exposition;
use super::generate::{forwarded, read_at_most, read_body};
use crate::App;
use crate::body::Parts;
use crate::error::RouteError;
use crate::leg::{Leg, Opened, Told, silent_error};
use crate::registry::{Avoid, LoadGuard, ROLES, Wanted, Worker};
use crate::upstream::{Head, with_source};

/// A worker asked by an operator or a probe answers within this.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest part of each worker's answer that a fan-out repeats [characters].
const MAX_REPEATED: usize = 1 << 16;
/// Longest answer of a worker that is asked along with all others [bytes].
const MAX_ASKED: usize = 4 << 20;
/// Longest answer of one worker: thousands of embeddings, as JSON [bytes].
const MAX_PASSED: usize = 256 << 20;

/// Paths of SGLang's and vLLM's workers that answer at once and generate nothing; ours say not_found.
pub const PASSED: [&str; 12] = [
    "/v1/embeddings",
    "/encode",
    "/v1/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/v1/classify",
    "/classify",
    "/pooling",
    "/parse_function_call",
    "/separate_reasoning",
    "/v1/audio/transcriptions",
];

/// One worker's answer is as good as another's, and it comes at once.
pub async fn forward(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    to_one(&app, request, ASK_TIMEOUT).await
}

/// The same for work: it may take as long as a generation.
pub async fn forward_work(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    let limit = app.config.request_timeout();
    to_one(&app, request, limit).await
}

/// The first role that has a worker ready.
async fn to_one(app: &App, request: Request, limit: Duration) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let body = read_body(body, &parts.headers, &app.config.limits).await?;
    let head = head_of(parts)?;
    app.registry.introductions(app.serving_roles()).await;
    let (mut avoid, mut is_second) = (Avoid::default(), false);
    loop {
        // The prefill workers come last: tokenising on them delays prompts.
        let roles = app.serving_roles().iter().rev();
        let role = *roles
            .clone()
            .find(|role| app.registry.count(**role).1 > 0)
            .unwrap_or(&app.serving_roles()[0]);
        let chosen = app.registry.choose(role, &Wanted::default(), &avoid)?;
        let leg = Leg {
            guard: chosen.guard,
            head: head.clone(),
            body: Parts::from(body.clone()),
            limit,
            counts: false,
            tells_tokens: false,
        };
        let failure = match leg.open().await {
            Ok(opened) => return whole(opened, limit).await,
            Err(failure) => failure,
        };
        let is_unreached = matches!(failure.reason, "connect" | "reset");
        if is_unreached && !std::mem::replace(&mut is_second, true) {
            avoid.add(failure.role, failure.worker);
            continue;
        }
        return match failure.told {
            Told::Error(err) => Err(err),
            Told::Answer {
                status,
                headers,
                body,
            } => Ok(passed_on(
                status,
                headers.get(header::CONTENT_TYPE).cloned(),
                body,
            )),
        };
    }
}

/// The rest of an opened answer.
async fn whole(mut opened: Opened, limit: Duration) -> Result<Response, RouteError> {
    let mut body = BytesMut::from(opened.pieces.concat().as_slice());
    let upstream = |guard: &LoadGuard, cause: String| RouteError::Upstream {
        role: guard.candidate.worker.role(),
        worker: guard.candidate.name.clone(),
        cause,
    };
    if let Some(mut rest) = opened.rest.take() {
        loop {
            match timeout(limit, rest.piece()).await {
                Ok(Some(Ok(piece))) => body.extend_from_slice(&piece),
                Ok(None) => break,
                Ok(Some(Err(err))) => {
                    opened.guard.settle(Outcome::Failure);
                    let cause = format!("answer broke off: {}", with_source(&err));
                    return Err(upstream(&opened.guard, cause));
                }
                Err(_) => return Err(silent_error(&opened.guard, limit)),
            }
            if body.len() > MAX_PASSED {
                let cause = format!("its answer is longer than {MAX_PASSED} bytes");
                return Err(upstream(&opened.guard, cause));
            }
        }
    }
    opened.guard.settle(Outcome::Success);
    let kind = opened.headers.get(header::CONTENT_TYPE).cloned();
    Ok(passed_on(opened.status, kind, body.freeze()))
}

fn passed_on(status: StatusCode, kind: Option<HeaderValue>, body: Bytes) -> Response {
    let mut response = (status, body).into_response();
    match kind {
        Some(kind) => response.headers_mut().insert(header::CONTENT_TYPE, kind),
        None => response.headers_mut().remove(header::CONTENT_TYPE),
    };
    response
}

/// Every worker's list of models, as one. Those that do not answer are left out.
pub async fn models(State(app): State<Arc<App>>, request: Request) -> Result<Response, RouteError> {
    if let Some(err) = no_worker(&app) {
        return Err(err);
    }
    let head = Head {
        method: Method::GET,
        uri: Uri::from_static("/v1/models"),
        headers: forwarded(request.into_parts().0.headers),
    };
    let told = ask_each(&app, &head, &Bytes::new()).await;
    let mut merged: Vec<Value> = Vec::new();
    for asked in told.iter().filter(|told| told.is_success()) {
        let Ok(mut list) = serde_json::from_str::<Value>(&asked.text) else {
            continue;
        };
        for model in list["data"].as_array_mut().into_iter().flatten() {
            if merged.iter().all(|known| known["id"] != model["id"]) {
                merged.push(model.take());
            }
        }
    }
    if merged.is_empty()
        && let Some(asked) = told.into_iter().next()
    {
        return Ok(asked.passed_on());
    }
    let body = json!({"object": "list", "data": merged});
    Ok(answer(StatusCode::OK, &body))
}

/// The metrics of all ready workers on one page, each line with the label `worker`.
pub async fn engine_metrics(State(app): State<Arc<App>>) -> Response {
    let head = Head {
        method: Method::GET,
        uri: Uri::from_static("/metrics"),
        headers: app.worker_headers(),
    };
    let told = ask_each(&app, &head, &Bytes::new()).await;
    let pages = told.iter().filter(|told| told.is_success());
    let text = exposition::merge(pages.map(|told| (told.url.as_str(), told.text.as_str())));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// A verb about one request, which only the workers that run it know: all are asked, since it may have come through
/// another router. 404 when nobody knows it.
pub async fn about_request(
    State(app): State<Arc<App>>,
    Path((rid, _)): Path<(String, String)>,
    request: Request,
) -> Result<Response, RouteError> {
    if let Some(err) = no_worker(&app) {
        return Err(err);
    }
    let (parts, body) = request.into_parts();
    let body = read_at_most(body, &parts.headers, MAX_ADMIN_BODY, &app.config.limits).await?;
    let head = head_of(parts)?;
    let mut told = ask_each(&app, &head, &body).await;
    told.retain(|told| told.status != Some(StatusCode::NOT_FOUND));
    if told.is_empty() {
        return Err(RouteError::UnknownRequest { rid });
    }
    // A worker that runs it and refuses speaks before one that did as told, and that before one that could not be asked.
    told.sort_by_key(|told| match told.status {
        Some(status) if !status.is_success() => 0,
        Some(_) => 1,
        None => 2,
    });
    Ok(told.swap_remove(0).passed_on())
}

fn no_worker(app: &App) -> Option<RouteError> {
    let counts = ROLES.map(|role| app.registry.count(role));
    let known = counts.iter().map(|count| count.0).sum();
    let role = app.serving_roles()[0];
    let none = counts.iter().all(|count| count.1 == 0);
    none.then_some(RouteError::NoWorker {
        role,
        known,
        ready: 0,
    })
}

/// What goes to workers of a client's request: the path without what belongs to the client's connection.
fn head_of(parts: http::request::Parts) -> Result<Head, RouteError> {
    let uri = parts.uri.path_and_query().map(|pq| pq.as_str().to_owned());
    Ok(Head {
        method: parts.method,
        uri: Uri::try_from(uri.unwrap_or_default()).map_err(|err| RouteError::Internal {
            detail: err.to_string(),
        })?,
        headers: forwarded(parts.headers),
    })
}

/// The same request to every ready worker.
pub async fn fan_out(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, RouteError> {
    let (parts, body) = request.into_parts();
    let body = read_at_most(body, &parts.headers, MAX_ADMIN_BODY, &app.config.limits).await?;
    let head = head_of(parts)?;
    Ok(ask_all(&app, head, body).await.0)
}

/// Workers drop their caches, the policies what they believe of them.
pub async fn flush_cache(State(app): State<Arc<App>>) -> Response {
    let head = Head {
        method: Method::POST,
        uri: Uri::from_static("/flush_cache"),
        headers: app.worker_headers(),
    };
    let (response, _) = ask_all(&app, head, Bytes::new()).await;
    app.registry.forget_prompts();
    response
}

/// 200 when all of them agreed, else 502; the body tells each worker's answer.
pub async fn ask_all(app: &Arc<App>, head: Head, body: Bytes) -> (Response, bool) {
    let (mut told, mut is_ok) = (serde_json::Map::new(), true);
    for worker in ask_each(app, &head, &body).await {
        is_ok &= worker.is_success();
        let text: String = worker.text.chars().take(MAX_REPEATED).collect();
        told.insert(
            worker.url.clone(),
            json!({"ok": worker.is_success(), "answer": text}),
        );
    }
    let status = if is_ok {
        StatusCode::OK
    } else {
        StatusCode::BAD_GATEWAY
    };
    let body = json!({"ok": is_ok, "workers": told});
    (answer(status, &body), is_ok)
}

/// What a worker said when all were asked.
struct Asked {
    url: String,
    /// `None`: it could not be asked, and `text` says why.
    status: Option<StatusCode>,
    kind: Option<HeaderValue>,
    text: String,
}

impl Asked {
    fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.is_success())
    }

    fn passed_on(self) -> Response {
        match self.status {
            Some(status) => passed_on(status, self.kind, self.text.into()),
            None => {
                let detail = format!("worker {}: {}", self.url, self.text);
                RouteError::Unasked { detail }.into_response()
            }
        }
    }
}

/// Ask every ready worker the same, at once; ordered by address.
async fn ask_each(app: &Arc<App>, head: &Head, body: &Bytes) -> Vec<Asked> {
    let mut asked = JoinSet::new();
    for worker in app.registry.workers() {
        if worker.is_ready() {
            let (head, body) = (head.clone(), Parts::from(body.clone()));
            asked.spawn(async move {
                let (status, kind, text) =
                    match timeout(ASK_TIMEOUT, ask(&worker, &head, body)).await {
                        Ok(Ok((status, kind, text))) => (Some(status), kind, text),
                        Ok(Err(cause)) => (None, None, cause),
                        Err(_) => (None, None, format!("no answer for {ASK_TIMEOUT:?}")),
                    };
                let url = worker.url().to_string();
                Asked {
                    url,
                    status,
                    kind,
                    text,
                }
            });
        }
    }
    let mut told = Vec::new();
    while let Some(joined) = asked.join_next().await {
        match joined {
            Ok(one) => told.push(one),
            Err(err) => tracing::error!(%err, "asking a worker panicked"),
        }
    }
    told.sort_by(|a, b| a.url.cmp(&b.url));
    told
}

async fn ask(
    worker: &Worker,
    head: &Head,
    body: Parts,
) -> Result<(StatusCode, Option<HeaderValue>, String), String> {
    let sent = worker.pool.send(head, body, &|| ()).await;
    let response = sent.map_err(|err| err.to_string())?;
    let status = response.status();
    let kind = response.headers().get(header::CONTENT_TYPE).cloned();
    let mut from = response.into_body();
    let mut text = Vec::new();
    while let Some(piece) = from.piece().await {
        let piece = piece.map_err(|err| err.to_string())?;
        text.extend_from_slice(&piece);
        if text.len() > MAX_ASKED {
            return Err(format!("its answer is longer than {MAX_ASKED} bytes"));
        }
    }
    Ok((status, kind, String::from_utf8_lossy(&text).into_owned()))
}

impl App {
    /// Headers of the router's own requests to workers.
    pub fn worker_headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        if let Some(key) = &self.config.listen.api_key
            && let Ok(value) = HeaderValue::try_from(format!("Bearer {key}"))
        {
            headers.insert(header::AUTHORIZATION, value);
        }
        headers
    }
}
