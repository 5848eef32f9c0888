//! Proxied paths that generate no tokens here: to one worker, to all, or to the one that knows a
//! request.

use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use baton_text::dialect::body::router_fields::strip_router_fields;
use baton_text::dialect::translate::model_list::{ANTHROPIC_VERSION_HEADER, to_anthropic_models};
use baton_text::dialect::write::ErrorObject;
use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use http::{HeaderMap, Method, StatusCode, Uri, header};
use router_core::{RequestOutcome, Role};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::generate::{
    BodyLimit, check_content_coding, forwarded, is_multipart, read_at_most, text_header,
};
use super::metrics_merge;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::{
    ErrorReply, UpstreamAttempt, UpstreamResponse, silent_error, status_label, upstream_error,
};
use crate::dispatch::{refuse, response};
use crate::error::{ErrorBody, RouteError};
use crate::observability::access_log::AccessLogEntry;
use crate::observability::request_timeline::RequestStage;
use crate::request::body_memory::MemoryShare;
use crate::server::http_util::{
    HandlerResult, MAX_ADMIN_BODY, PathText, REQUEST_ID, SharedApp, answer,
};
use crate::transport::headers::end_to_end;
use crate::transport::request_body::BodySegments;
use crate::transport::upstream::{RequestHead, with_source};
use crate::workers::fleet::selection::SelectionRequest;
use crate::workers::worker::Worker;

/// A worker asked by an operator or a probe answers within this.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest part of each worker's answer that a fan-out repeats [characters].
const MAX_REPEATED: usize = 1 << 16;
/// Longest answer of a worker that is asked along with all others [bytes].
const MAX_ASKED: usize = 4 << 20;
/// Longest answer of one worker: thousands of embeddings, as JSON [bytes].
const MAX_PASSED: usize = 256 << 20;

/// Paths of SGLang's and vLLM's workers that answer at once and generate nothing; ours say
/// not_found.
pub const PROXIED_PATHS: [&str; 12] = [
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

/// Proxy to any worker: one's answer is as good as another's, and it comes at once.
pub async fn forward(State(app): SharedApp, request: Request) -> HandlerResult {
    let (head, body) = read_client_request(&app, request).await?;
    forward_unrecorded(&app, head, body).await
}

/// Counts the tokens of a request to /v1/messages, at a worker that has the path.
pub async fn count_tokens(app: SharedApp, request: Request) -> HandlerResult {
    let response = forward(app, request).await?;
    if response.status().is_success() {
        return Ok(response);
    }
    let (head, body) = response.into_parts();
    let body = to_bytes(body, MAX_PASSED).await.unwrap_or_default();
    if is_anthropic_error(&body) {
        return Ok(Response::from_parts(head, body.into()));
    }
    // Workers of other makes lack the path: their 404 says nothing about counting tokens.
    if head.status == StatusCode::NOT_FOUND {
        return Err(RouteError::NoTokenCount);
    }
    let error = ErrorObject::of_foreign_answer(head.status.as_u16(), &body).to_json();
    let mut refusal = Response::from_parts(head, error.clone().into());
    refusal.extensions_mut().insert(ErrorBody(error.into()));
    Ok(refusal)
}

/// True for an error of a server that has the paths of Anthropic's API.
fn is_anthropic_error(body: &[u8]) -> bool {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    body["type"] == "error"
}

/// Pass a request without a record on to any worker. Workers that failed are named in the log only.
async fn forward_unrecorded(app: &AppState, head: RequestHead, body: Bytes) -> HandlerResult {
    let result = proxy_to_any(app, head, body, ASK_TIMEOUT, None).await;
    if let Err(err) = &result
        && err.is_upstream()
    {
        tracing::warn!(%err, "no answer");
    }
    result
}

/// The same for work: it takes a place like a generation, may take as long, and is recorded.
pub async fn forward_work(State(app): SharedApp, request: Request) -> Response {
    let path = request.uri().path();
    let path = PROXIED_PATHS
        .into_iter()
        .find(|one| *one == path)
        .unwrap_or("other");
    let rid = text_header(request.headers(), REQUEST_ID).unwrap_or_default();
    let mut record = AccessLogEntry::new(&app.sinks, path, "POST", &request, rid);
    match work(&app, request, &mut record).await {
        Ok(response) => {
            let status = response.status();
            record.first_byte(status);
            record.end(
                status,
                if status.is_success() {
                    "ok"
                } else {
                    status_label(status)
                },
            );
            response
        }
        Err(err) => refuse(record, err),
    }
}

async fn work(app: &AppState, request: Request, record: &mut AccessLogEntry) -> HandlerResult {
    app.admission.check_queue()?;
    let (head, body) = read_client_request(app, request).await?;
    record.timeline.mark(RequestStage::Read);
    let _place = app.admission.enter(&app.metrics).await?;
    record.timeline.mark(RequestStage::Admitted);
    proxy_to_any(app, head, body, app.config.request_timeout(), Some(record)).await
}

/// The first role that has a worker ready.
async fn proxy_to_any(
    app: &AppState,
    head: RequestHead,
    body: Bytes,
    limit: Duration,
    mut record: Option<&mut AccessLogEntry>,
) -> Result<Response, RouteError> {
    app.fleet
        .wait_for_first_probes(app.fleet.serving_roles())
        .await;
    let mut avoid = Vec::new();
    let mut is_second = false;
    loop {
        // The prefill workers come last: tokenizing on them delays prompts.
        let roles = app.fleet.serving_roles();
        let ready = roles
            .iter()
            .rev()
            .find(|role| app.fleet.count(**role).1 > 0);
        let role = *ready.unwrap_or(&roles[0]);
        let chosen = app
            .fleet
            .choose(role, &SelectionRequest::default(), &avoid)?;
        if let Some(record) = &mut record {
            record.attempts += 1;
            record.worker = Some((chosen.candidate.name.clone(), chosen.why));
        }
        let guard = chosen;
        let head = head.clone();
        let body = BodySegments::from(body.clone());
        let leg = UpstreamAttempt {
            guard,
            head,
            body,
            limit,
            has_token_ids: false,
            translation: None,
        };
        let failure = match leg.open().await {
            Ok(opened) => return whole(app, opened, limit).await,
            Err(failure) => failure,
        };
        // One more worker, and only if the first received nothing: its work might be done twice.
        if failure.reason.is_unreached() && !std::mem::replace(&mut is_second, true) {
            avoid.push(failure.worker);
            continue;
        }
        return match failure.reply {
            ErrorReply::Error(err) => Err(err),
            ErrorReply::Answer {
                status,
                headers,
                body,
            } => Ok(response(status, end_to_end(&headers), body.into())),
        };
    }
}

/// The rest of an opened answer. Its memory is counted with that of request bodies.
async fn whole(
    app: &AppState,
    mut opened: UpstreamResponse,
    limit: Duration,
) -> Result<Response, RouteError> {
    let mut share = app.body_memory.share();
    let mut body = BytesMut::from(opened.answer.pieces.concat().as_slice());
    share.grow(body.len())?;
    if let Some(mut remaining) = opened.answer.remaining.take() {
        loop {
            match timeout(limit, remaining.piece()).await {
                Ok(Some(Ok(piece))) => {
                    share.grow(piece.len())?;
                    body.extend_from_slice(&piece);
                }
                Ok(None) => break,
                Ok(Some(Err(err))) => {
                    opened.guard.settle(RequestOutcome::Failure);
                    let detail = with_source(&err);
                    return Err(upstream_error(
                        &opened.guard,
                        "broke off its answer",
                        detail,
                    ));
                }
                Err(_) => return Err(silent_error(&opened.guard, limit)),
            }
            // The answer is in memory whole: a worker without end would take all of
            // --max-total-body-bytes.
            if body.len() > MAX_PASSED {
                let problem = format!("sent an answer longer than {MAX_PASSED} bytes");
                return Err(upstream_error(&opened.guard, &problem, String::new()));
            }
        }
    }
    opened.guard.settle(RequestOutcome::Success);
    Ok(response(
        opened.answer.status,
        end_to_end(&opened.answer.headers),
        share.keep_with(body.freeze()).into(),
    ))
}

/// Every worker's list of models, as one. Those that do not answer are left out.
pub async fn models(State(app): SharedApp, request: Request) -> HandlerResult {
    require_worker(&app)?;
    let mut headers = forwarded(request.into_parts().0.headers);
    let form = ModelForm::take(&mut headers);
    let head = RequestHead::new(Method::GET, Uri::from_static("/v1/models"), headers);
    let answers = ask_each(&app, &head, &Bytes::new()).await;
    let cards = model_cards(&answers);
    if cards.is_empty()
        && let Some(first) = answers.into_iter().next()
    {
        return first.into_client_result();
    }
    Ok(form.answer(json!({"object": "list", "data": cards})))
}

/// Form in which a client reads models.
#[derive(Clone, Copy)]
enum ModelForm {
    Openai,
    Anthropic,
}

impl ModelForm {
    /// The form of a client with these headers. Workers are asked in OpenAI's.
    fn take(headers: &mut HeaderMap) -> Self {
        match headers.remove(ANTHROPIC_VERSION_HEADER) {
            Some(_) => Self::Anthropic,
            None => Self::Openai,
        }
    }

    /// `models`: a list in OpenAI's form, or one of it.
    fn answer(self, models: Value) -> Response {
        let models = match self {
            Self::Openai => models,
            Self::Anthropic => to_anthropic_models(&models),
        };
        answer(StatusCode::OK, &models)
    }
}

/// Answers with one model of that list, or with a worker's own refusal of one that is not in it.
pub async fn model(
    State(app): SharedApp,
    PathText(id): PathText,
    request: Request,
) -> HandlerResult {
    require_worker(&app)?;
    let (mut head, body) = read_request(&app, request, MAX_ADMIN_BODY).await?;
    let form = ModelForm::take(head.headers_mut());
    let list_head = RequestHead::new(
        Method::GET,
        Uri::from_static("/v1/models"),
        head.headers().clone(),
    );
    let answers = ask_each(&app, &list_head, &body).await;
    let card = model_cards(&answers)
        .into_iter()
        .find(|card| card["id"] == id.as_str());
    match card {
        Some(card) => Ok(form.answer(card)),
        None => forward_unrecorded(&app, head, body).await,
    }
}

/// The models of all answers, each once.
fn model_cards(answers: &[Asked]) -> Vec<Value> {
    let mut cards: Vec<Value> = Vec::new();
    for asked in answers.iter().filter(|answer| answer.is_success()) {
        let Ok(mut list) = serde_json::from_str::<Value>(&asked.text) else {
            continue;
        };
        for model in list["data"].as_array_mut().into_iter().flatten() {
            // Several workers serve one model.
            if cards.iter().any(|known| known["id"] == model["id"]) {
                continue;
            }
            let mut card = model.take();
            if asked.is_baton {
                // Engines name another owner there for the sake of other routers
                // (docs/protocol.md).
                card["owned_by"] = "baton".into();
            }
            cards.push(card);
        }
    }
    cards
}

/// The metrics of all ready workers on one page, each line with the label `worker`.
pub async fn engine_metrics(State(app): SharedApp) -> Response {
    let head = app.fleet.own_request(Method::GET, "/metrics");
    let answers = ask_each(&app, &head, &Bytes::new()).await;
    let pages = answers.iter().filter(|answer| answer.is_success());
    let text =
        metrics_merge::merge(pages.map(|answer| (answer.url.as_str(), answer.text.as_str())));
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

/// A verb about one request, which only the workers that run it know: all are asked, since it may
/// have come through another router. 404 when no worker knows it.
pub async fn about_request(
    State(app): SharedApp,
    PathText(rid): PathText,
    request: Request,
) -> HandlerResult {
    require_worker(&app)?;
    let (head, body) = read_request(&app, request, MAX_ADMIN_BODY).await?;
    let mut answers = ask_each(&app, &head, &body).await;
    answers.retain(|answer| answer.status != Some(StatusCode::NOT_FOUND));
    if answers.is_empty() {
        return Err(RouteError::UnknownRequest { rid });
    }
    // A worker that runs it and refuses comes before one that did it, and that before one that
    // could not be asked.
    answers.sort_by_key(|answer| match answer.status {
        Some(status) if !status.is_success() => 0,
        Some(_) => 1,
        None => 2,
    });
    Ok(answers.swap_remove(0).into_operator_response())
}

/// Refuse what needs a worker when none is ready.
fn require_worker(app: &AppState) -> Result<(), RouteError> {
    let counts = Role::ALL.map(|role| app.fleet.count(role));
    let known = counts.iter().map(|count| count.0).sum();
    let role = app.fleet.serving_roles()[0];
    let is_ready = counts.iter().any(|count| count.1 > 0);
    is_ready.then_some(()).ok_or(RouteError::NoWorker {
        role,
        known,
        ready: 0,
    })
}

/// A client's request as a worker gets it: without what belongs to the client's connection or to
/// routers. A body is JSON, or in parts, which have no fields of routers.
async fn read_client_request(
    app: &AppState,
    request: Request,
) -> Result<(RequestHead, Bytes), RouteError> {
    check_content_coding(request.headers())?;
    let limit_bytes = app.config.limits.max_payload_size;
    let (head, body) = read_request(app, request, limit_bytes).await?;
    if body.is_empty() || is_multipart(head.headers()) {
        return Ok((head, body));
    }
    let bytes = body.clone();
    let stripping = move || strip_router_fields(&bytes);
    let body = app.body_threads.run(body.len(), stripping).await??;
    Ok((head, body))
}

/// A request as workers get it: the path and the headers without what belongs to the connection or
/// to routers, and the body.
async fn read_request(
    app: &AppState,
    request: Request,
    limit_bytes: usize,
) -> Result<(RequestHead, Bytes), RouteError> {
    let (parts, body) = request.into_parts();
    let limit = BodyLimit::new(limit_bytes);
    let body = read_at_most(app, body, &parts.headers, limit).await?;
    let uri = parts
        .uri
        .path_and_query()
        .cloned()
        .map(Uri::from)
        .unwrap_or_default();
    // Not every engine takes HEAD; the client gets the head of the answer alone.
    let method = if parts.method == Method::HEAD {
        Method::GET
    } else {
        parts.method
    };
    let head = RequestHead::new(method, uri, forwarded(parts.headers));
    Ok((head, body))
}

/// The same request to every ready worker.
pub async fn fan_out(State(app): SharedApp, request: Request) -> HandlerResult {
    let (head, body) = read_request(&app, request, MAX_ADMIN_BODY).await?;
    Ok(ask_all(&app, head, body).await)
}

/// Workers drop their caches, the policies their estimates of them.
pub async fn flush_cache(State(app): SharedApp) -> Response {
    let head = app.fleet.own_request(Method::POST, "/flush_cache");
    let response = ask_all(&app, head, Bytes::new()).await;
    app.fleet.forget_prompts();
    response
}

/// Ask all ready workers and report each answer. 200 when all succeeded; a status that all of them
/// refused the request with, and the first one's error object; else 502.
pub async fn ask_all(app: &AppState, head: RequestHead, body: Bytes) -> Response {
    let asked = ask_each(app, &head, &body).await;
    let answers = asked.iter().map(|worker| {
        (
            worker.url.clone(),
            json!({"ok": worker.is_success(), "answer": worker.answer()}),
        )
    });
    let workers: serde_json::Map<String, Value> = answers.collect();
    let failed: Vec<&Asked> = asked.iter().filter(|worker| !worker.is_success()).collect();
    let Some(first) = failed.first() else {
        return answer(StatusCode::OK, &json!({"ok": true, "workers": workers}));
    };
    let is_refused = asked.iter().all(|worker| worker.status == first.status);
    let (status, error) = match first.refusal().filter(|_| is_refused) {
        Some((status, error)) => (status, error),
        None => {
            let count = failed.len();
            let all = asked.len();
            let url = &first.url;
            let what = first.status.map_or(first.text.clone(), |s| s.to_string());
            let detail = format!("{count} of {all} workers failed, the first is {url}: {what}");
            let err = RouteError::Unasked { detail };
            (err.status(), error_object(&err.body()).unwrap_or_default())
        }
    };
    answer(
        status,
        &json!({"error": error, "ok": false, "workers": workers}),
    )
}

/// Member `error` of a JSON body.
pub fn error_object(body: &[u8]) -> Option<Value> {
    let mut body: Value = serde_json::from_slice(body).ok()?;
    let error = body.get_mut("error")?.take();
    error.is_object().then_some(error)
}

/// Answer of a worker when all were asked.
struct Asked {
    url: String,
    role: Role,
    is_baton: bool,
    /// `None`: it could not be asked, and `text` says why.
    status: Option<StatusCode>,
    headers: HeaderMap,
    text: String,
    /// Memory of `text`.
    _share: MemoryShare,
}

impl Asked {
    fn is_success(&self) -> bool {
        self.status.is_some_and(|status| status.is_success())
    }

    /// The text as the JSON it is; else, or if it is long, a string.
    fn answer(&self) -> Value {
        let json = (self.text.len() <= MAX_REPEATED).then(|| serde_json::from_str(&self.text));
        match json {
            Some(Ok(value)) => value,
            _ => self
                .text
                .chars()
                .take(MAX_REPEATED)
                .collect::<String>()
                .into(),
        }
    }

    /// Status and error object of a worker that finds the request itself wrong. Its 401, 403 and
    /// 429 concern the router.
    fn refusal(&self) -> Option<(StatusCode, Value)> {
        let status = self.status.filter(|status| status.is_client_error())?;
        let is_own = !matches!(status.as_u16(), 401 | 403 | 429);
        Some((status, error_object(self.text.as_bytes())?)).filter(|_| is_own)
    }

    /// The worker's answer, for an operator.
    fn into_operator_response(self) -> Response {
        match self.status {
            Some(status) => response(status, self.headers, self.text.into()),
            None => {
                let detail = format!("worker {}: {}", self.url, self.text);
                RouteError::Unasked { detail }.into_response()
            }
        }
    }

    /// The worker's answer, for a client, to whom no worker is named.
    fn into_client_result(self) -> HandlerResult {
        if let Some(status) = self.status {
            return Ok(response(status, self.headers, self.text.into()));
        }
        let err = RouteError::Upstream {
            role: self.role,
            worker: self.url,
            problem: "could not be asked".to_owned(),
            detail: self.text,
        };
        tracing::warn!(%err, "no answer");
        Err(err)
    }
}

/// Ask every ready worker the same, at once; ordered by address.
async fn ask_each(app: &AppState, head: &RequestHead, body: &Bytes) -> Vec<Asked> {
    let workers = app
        .fleet
        .workers()
        .into_iter()
        .filter(|worker| worker.is_ready());
    let asked = workers.map(|worker| async move {
        let asking = timeout(
            ASK_TIMEOUT,
            ask(app, &worker, head, BodySegments::from(body.clone())),
        );
        let late = |_| Err(format!("no answer for {ASK_TIMEOUT:?}"));
        let answer = worker.unless_hung(asking).await;
        answer
            .and_then(|answer| answer.unwrap_or_else(late))
            .unwrap_or_else(|text| Asked {
                url: worker.url().to_string(),
                role: worker.role(),
                is_baton: worker.description().is_baton(),
                status: None,
                headers: HeaderMap::new(),
                text,
                _share: app.body_memory.share(),
            })
    });
    let mut answers = join_all(asked).await;
    answers.sort_by(|a, b| a.url.cmp(&b.url));
    answers
}

async fn ask(
    app: &AppState,
    worker: &Worker,
    head: &RequestHead,
    body: BodySegments,
) -> Result<Asked, String> {
    let response = worker
        .pool
        .send(head, body, &|| ())
        .await
        .map_err(|err| err.to_string())?;
    let status = Some(response.status());
    let headers = end_to_end(response.headers());
    let mut share = app.body_memory.share();
    let mut answer = response.into_body();
    let mut text = Vec::new();
    while let Some(piece) = answer.piece().await {
        let piece = piece.map_err(|err| err.to_string())?;
        share.grow(piece.len()).map_err(|err| err.to_string())?;
        text.extend_from_slice(&piece);
        if text.len() > MAX_ASKED {
            return Err(format!("its answer is longer than {MAX_ASKED} bytes"));
        }
    }
    Ok(Asked {
        url: worker.url().to_string(),
        role: worker.role(),
        is_baton: worker.description().is_baton(),
        status,
        headers,
        text: String::from_utf8_lossy(&text).into_owned(),
        _share: share,
    })
}
