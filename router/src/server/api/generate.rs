//! Generation requests in: limits, body, the little that is read of it, admission; then `dispatch`
//! takes over.

use std::borrow::Cow;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Request, State};
use axum::response::Response;
use baton_text::dialect::Dialect;
use baton_text::dialect::body::BodyIndex;
use baton_text::dialect::body::router_fields::is_router_header;
use baton_text::dialect::prompt_limit::{MAX_ENGINE_BODY_BYTES, REST_BYTES, oversized};
use baton_text::prompt::PromptTruncation;
use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, COOKIE, EXPECT, HOST, ORIGIN,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use http_body::Body;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::time::{Instant, timeout, timeout_at};

use super::auth;
use super::client_label;
use crate::dispatch;
use crate::dispatch::app::AppState;
use crate::dispatch::context::{
    AdmittedRequest, AttemptState, KnownPrompt, RequestContext, RoutingInputs,
    read_header_deadlines,
};
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::observability::explain::{self, ExplainMode};
use crate::observability::request_timeline::{RequestStage, RequestTimeline};
use crate::request::routing_prompt::{text_blocks, token_blocks};
use crate::server::http_util::{REQUEST_ID, answer};
use crate::transport::headers::remove_hop_by_hop;
use crate::transport::upstream::RequestHead;

/// A client that sends nothing of its body for this long is gone or means harm.
const BODY_SILENCE: Duration = Duration::from_secs(60);

/// Longest time for which the body of a refused request is read and discarded (nginx's
/// lingering_timeout).
const DISCARD_TIME: Duration = Duration::from_secs(5);
/// Most of a refused body that is read and discarded. The connection ends with a longer one.
const DISCARD_BYTES: usize = 64 << 20;
/// Bodies up to this size are not measured: an engine refuses them in a fraction of a millisecond,
/// and asking all workers for their limits is not free [bytes].
const UNMEASURED_BYTES: usize = 16 << 10;
/// Most prompts (times answers) of a request sent with token ids: beyond its engine's limit of 1024
/// prompts the engine complains about the member the client sent, not about ours.
const MAX_FORWARDED: usize = 1024;
/// Headers that stay here beside those of routers: those of the client's connection, and cookies,
/// which no worker set. Whether a web page may send a request is decided here: a worker would
/// compare the page's origin with its own address. No accept-encoding: streams are watched as they
/// pass.
static NOT_FORWARDED: [HeaderName; 7] = [
    HOST,
    CONTENT_LENGTH,
    EXPECT,
    ACCEPT_ENCODING,
    COOKIE,
    ORIGIN,
    HeaderName::from_static("sec-fetch-site"),
];
/// A client's own affinity key.
const ROUTING_KEY: HeaderName = HeaderName::from_static("x-smg-routing-key");
/// Headers that name a client's session. Of several that are present the first one counts.
const SESSION_HEADERS: [HeaderName; 4] = [
    ROUTING_KEY,
    // Claude Code 2.1.
    HeaderName::from_static("x-claude-code-session-id"),
    // Codex 0.169.
    HeaderName::from_static("session-id"),
    HeaderName::from_static("thread-id"),
];

/// Boxed: axum moves a handler's future four times, and this one is large.
pub type Serving = Pin<Box<dyn Future<Output = Response> + Send>>;

/// Handler of an API's requests.
pub fn handler(dialect: Dialect) -> impl Fn(State<Arc<AppState>>, Request) -> Serving + Clone {
    move |State(app), request| Box::pin(serve(app, dialect, request))
}

async fn serve(app: Arc<AppState>, dialect: Dialect, request: Request) -> Response {
    let method = if request.method() == Method::PUT {
        "PUT"
    } else {
        "POST"
    };
    let rid = text_header(request.headers(), REQUEST_ID).unwrap_or_default();
    let record = AccessLogEntry::new(&app.sinks, dialect.path(), method, &request, rid);
    let asks = match ExplainMode::of(request.headers()) {
        Ok(asks) => asks,
        Err(err) => return dispatch::refuse(record, err),
    };
    let timeline = record.timeline.clone();
    let explains = asks == ExplainMode::Explain;
    let inbound = match take_in(&app, dialect, request, &timeline, explains).await {
        Ok(with_record) => with_record(record),
        Err(err) => return dispatch::refuse(record, err),
    };
    // Before shedding: a dry run shows the decision also where --max-ttft-ms would refuse.
    if asks == ExplainMode::DryRun {
        return dry_run(&app, inbound);
    }
    if let Err(err) = shed(&app, &inbound) {
        return dispatch::refuse(inbound.record, err);
    }
    let is_shown = explains && !auth::has_control_keys(&app);
    let mut response = dispatch::generate(app, inbound).await;
    if is_shown && let Ok(summary) = HeaderValue::try_from(timeline.summary()) {
        response.headers_mut().insert(explain::HEADER, summary);
    }
    response
}

/// Decide without sending.
fn dry_run(app: &AppState, mut inbound: Box<RequestContext>) -> Response {
    let decisions = app
        .fleet
        .dry_run(app.fleet.serving_roles(), &inbound.wanted());
    match decisions {
        Ok(decisions) => {
            inbound.record.first_byte(StatusCode::OK);
            inbound.record.end(StatusCode::OK, "dry_run");
            answer(
                StatusCode::OK,
                &json!({"dry_run": true, "decisions": decisions}),
            )
        }
        Err(err) => dispatch::refuse(inbound.record, err),
    }
}

/// The request as it is dispatched, when it is given its record. A dry run takes a place like any
/// other: it may cost as much of the tokenizer.
async fn take_in(
    app: &AppState,
    dialect: Dialect,
    request: Request,
    timeline: &RequestTimeline,
    explains: bool,
) -> Result<impl FnOnce(AccessLogEntry) -> Box<RequestContext>, RouteError> {
    let (parts, body) = request.into_parts();
    let routing_key = text_header(&parts.headers, ROUTING_KEY);
    let header_session_key = session_key_of_headers(&parts.headers);
    check_media_type(&parts.headers)?;
    app.admission.check_queue()?;
    let limit = body_limit(app, dialect, &parts.headers);
    let body = read_at_most(app, body, &parts.headers, limit).await?;
    timeline.mark(RequestStage::Read);
    timeline.body(body.len());
    let read_at = Instant::now();
    let permit = app.admission.enter(&app.metrics).await?;
    timeline.mark(RequestStage::Admitted);
    let admission = AdmittedRequest::new(permit, read_at.elapsed());
    let scan = scanned(app, &body, dialect).await?;
    timeline.mark(RequestStage::Parsed);
    refuse_oversized(app, &scan, &body).await?;
    let mut headers = forwarded(parts.headers);
    client_label::insert(&mut headers, parts.extensions.get());
    // It was read as JSON, whatever the client called it (curl -d calls it a form).
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let session_key = header_session_key.or_else(|| scan.session_key.clone());
    let head = RequestHead::new(Method::POST, Uri::from_static(dialect.path()), headers);
    let (needs_text, needs_blocks) = app.fleet.policy_set.prompt_needs(app.fleet.serving_roles());
    let prompt = prompt_of(app, &scan, &body, needs_blocks).await?;
    timeline.mark(RequestStage::Tokenized);
    if let Some(blocks) = &prompt.blocks {
        timeline.prompt(blocks);
    }
    Ok(move |mut record: AccessLogEntry| {
        record.named(scan.model.as_deref(), scan.tenant.as_deref());
        Box::new(RequestContext {
            header_deadlines: read_header_deadlines(head.headers()),
            head,
            body,
            scan,
            chat_form: None,
            routing: RoutingInputs {
                routing_key,
                session_key,
                prompt,
                needs_text,
                explains,
            },
            admission,
            attempts: AttemptState::default(),
            record,
        })
    })
}

/// --max-ttft-ms: refuse what would begin too late wherever it went.
fn shed(app: &AppState, request: &RequestContext) -> Result<(), RouteError> {
    let Some(max_ms) = app.config.limits.max_ttft_ms else {
        return Ok(());
    };
    let own = request.deadline_ms();
    let limit_ms = own.map_or(max_ms, |own| own.min(max_ms));
    let role = app.fleet.serving_roles()[0];
    // No worker predicts a time, and an estimate that was never measured refuses nothing.
    let Some(ahead) = app.fleet.least_ttft(role, &request.wanted()) else {
        return Ok(());
    };
    let Some(excess_ms) = ahead.excess_ms(limit_ms) else {
        return Ok(());
    };
    app.metrics.shed.with_label_values(&[role.into_str()]).inc();
    Err(RouteError::TooLate {
        role,
        predicted_ms: ahead.ttft_ms(),
        limit_ms,
        excess_ms,
    })
}

async fn scanned(
    app: &AppState,
    body: &Bytes,
    dialect: Dialect,
) -> Result<Arc<BodyIndex>, RouteError> {
    let bytes = body.clone();
    let scanning = move || BodyIndex::of(&bytes, dialect);
    let scan = app.body_threads.run(body.len(), scanning).await??;
    Ok(Arc::new(scan))
}

/// Refuses a body that is larger than every worker's limit, because a worker would read the whole
/// body before it refuses.
async fn refuse_oversized(
    app: &AppState,
    scan: &Arc<BodyIndex>,
    body: &Bytes,
) -> Result<(), RouteError> {
    if body.len() <= UNMEASURED_BYTES {
        return Ok(());
    }
    let limit = app
        .fleet
        .prompt_limit(app.fleet.serving_roles(), scan.model.as_deref());
    let Some(limit) = limit else { return Ok(()) };
    let its = scan.clone();
    let bytes = body.clone();
    let measuring = move || oversized(&its, &bytes, limit);
    app.body_threads
        .run(body.len(), measuring)
        .await?
        .map_or(Ok(()), |oversized| Err(oversized.into()))
}

/// In tokens where the client sent ids or the router has a tokenizer that can read the request,
/// else in bytes of text.
async fn prompt_of(
    app: &AppState,
    scan: &Arc<BodyIndex>,
    body: &Bytes,
    needs_blocks: bool,
) -> Result<KnownPrompt, RouteError> {
    let config = &app.config.tokens;
    let block_size = config.block_size;
    let its = scan.clone();
    let bytes = body.clone();
    let reading = move || Some(known_ids(&its, &its.ids(&bytes)?, block_size, needs_blocks));
    // The client sent ids: they are what the engine computes, whichever tokenizer the router has.
    if let Some(known) = app.body_threads.run(scan.prompt_len(), reading).await? {
        return Ok(known);
    }
    let is_small = scan.batch.is_none_or(|items| items <= MAX_FORWARDED);
    let forwards = config.forward_input_ids && is_small;
    let longest = || match scan.truncation {
        PromptTruncation::Off => app.fleet.context_tokens(),
        PromptTruncation::ToContext | PromptTruncation::To(_) => None,
    };
    if let Some(tokens) = app.tokens.as_ref().filter(|_| needs_blocks || forwards)
        && let Ok(made) = tokens
            .read(scan.dialect, body, scan.prompt_len(), longest)
            .await
    {
        let made = made.cut(scan.truncation.cut());
        return Ok(KnownPrompt {
            input_ids: forwards.then(|| made.to_members(&tokens.fingerprint)),
            ..known_ids(scan, &made.joined(), block_size, needs_blocks)
        });
    }
    // No policy reads blocks: hashing a long prompt would cost CPU for nothing.
    if !needs_blocks {
        return Ok(KnownPrompt::default());
    }
    let its = scan.clone();
    let bytes = body.clone();
    let hashing = move || text_blocks(&its, &bytes);
    let blocks = app.body_threads.run(scan.prompt_len(), hashing).await?;
    Ok(KnownPrompt {
        blocks: Some(Arc::new(blocks)),
        ..KnownPrompt::default()
    })
}

/// Facts of a prompt in token ids.
fn known_ids(scan: &BodyIndex, ids: &[u32], block_size: usize, needs_blocks: bool) -> KnownPrompt {
    let blocks = needs_blocks.then(|| Arc::new(token_blocks(scan, ids, block_size)));
    // How much an engine leaves of a prompt that it cuts to its context, it alone knows.
    let is_counted = scan.truncation != PromptTruncation::ToContext;
    KnownPrompt {
        blocks,
        tokens: u32::try_from(ids.len()).ok().filter(|_| is_counted),
        input_ids: None,
    }
}

/// A generation request is JSON without a content coding. Its declared type is not insisted on:
/// `curl -d` calls JSON a form.
fn check_media_type(headers: &HeaderMap) -> Result<(), RouteError> {
    check_content_coding(headers)?;
    if !is_multipart(headers) {
        return Ok(());
    }
    let kind = lossy_header(headers, CONTENT_TYPE);
    let problem = format!("the body is {kind}; send application/json");
    Err(RouteError::UnsupportedMediaType { problem })
}

/// The fields of a coded body cannot be read here.
pub fn check_content_coding(headers: &HeaderMap) -> Result<(), RouteError> {
    let coding = lossy_header(headers, CONTENT_ENCODING);
    if coding.is_empty() || coding.eq_ignore_ascii_case("identity") {
        return Ok(());
    }
    let problem = format!("the body has content-encoding {coding}; send it as plain JSON");
    Err(RouteError::UnsupportedMediaType { problem })
}

/// True if the body is declared as parts, and as nothing else: of two declarations a worker may
/// read the other one.
pub fn is_multipart(headers: &HeaderMap) -> bool {
    let kind = lossy_header(headers, CONTENT_TYPE).to_ascii_lowercase();
    let declarations = headers.get_all(CONTENT_TYPE).iter().count();
    declarations == 1 && kind.starts_with("multipart/")
}

fn lossy_header(headers: &HeaderMap, name: HeaderName) -> Cow<'_, str> {
    let value = headers.get(name);
    value.map_or(Cow::Borrowed(""), |value| {
        String::from_utf8_lossy(value.as_bytes())
    })
}

pub fn text_header(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// Session key in a request's headers. They come before one in the body, which may name a user of
/// many sessions.
fn session_key_of_headers(headers: &HeaderMap) -> Option<String> {
    SESSION_HEADERS
        .into_iter()
        .filter_map(|name| text_header(headers, name))
        .find(|key| !key.is_empty())
}

/// Headers of a client's request that its worker gets.
pub fn forwarded(mut headers: HeaderMap) -> HeaderMap {
    remove_hop_by_hop(&mut headers, |name| {
        NOT_FORWARDED.contains(name) || is_router_header(name.as_str())
    });
    headers
}

/// Longest body that is read.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimit {
    bytes: usize,
    source: LimitSource,
}

#[derive(Debug, Clone, Copy)]
enum LimitSource {
    /// --max-payload-size, or a constant of the path.
    Own,
    /// Longest prompt of all workers [tokens].
    Prompt(NonZeroU64),
    /// Longest body that engines read.
    Engines,
}

impl BodyLimit {
    pub fn new(bytes: usize) -> Self {
        Self {
            bytes,
            source: LimitSource::Own,
        }
    }

    fn refusal(self) -> RouteError {
        let limit_bytes = self.bytes;
        match self.source {
            LimitSource::Own => RouteError::PayloadTooLarge { limit_bytes },
            LimitSource::Engines => RouteError::BodyBeyondEngines { limit_bytes },
            LimitSource::Prompt(tokens) => RouteError::BodyBeyondPrompt {
                limit_bytes,
                limit_tokens: tokens.get(),
            },
        }
    }
}

/// Limit of a generation request: --max-payload-size, or what the longest prompt of all workers
/// needs, so that a body far above that is refused before it is read.
fn body_limit(app: &AppState, dialect: Dialect, headers: &HeaderMap) -> BodyLimit {
    let own = BodyLimit::new(app.config.limits.max_payload_size);
    // No limit that follows from a prompt is below this: asking all workers would be for nothing.
    let is_small = |bytes| bytes as u64 <= REST_BYTES;
    if announced_bytes(headers).is_some_and(is_small) {
        return own;
    }
    // Which model it is for is known when it was read.
    let limit = app.fleet.prompt_limit(app.fleet.serving_roles(), None);
    let Some(limit) = limit else { return own };
    let longest = limit.body_bytes(dialect);
    let bytes = usize::try_from(longest).unwrap_or(usize::MAX);
    if bytes >= own.bytes {
        return own;
    }
    let source = if longest < MAX_ENGINE_BODY_BYTES {
        LimitSource::Prompt(limit.tokens)
    } else {
        LimitSource::Engines
    };
    BodyLimit { bytes, source }
}

fn announced_bytes(headers: &HeaderMap) -> Option<usize> {
    headers.get(CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// Read the body of a refused request and keep nothing of it. Most clients read an answer only when
/// they have sent all of their body; a connection closed before that would lose the answer.
async fn discard(mut body: axum::body::Body) {
    let mut discarded = 0;
    while discarded < DISCARD_BYTES {
        let Some(Ok(frame)) = body.frame().await else {
            return;
        };
        discarded += frame.data_ref().map_or(0, Bytes::len);
    }
}

/// Read a body up to `limit` within --body-read-timeout-secs. One piece, the usual case, is not
/// copied.
pub async fn read_at_most(
    app: &AppState,
    mut body: axum::body::Body,
    headers: &HeaderMap,
    limit: BodyLimit,
) -> Result<Bytes, RouteError> {
    let limits = &app.config.limits;
    let until = Instant::now() + Duration::from_secs(limits.body_read_timeout_secs);
    let limit_bytes = limit.bytes;
    let announced = announced_bytes(headers);
    if announced.is_some_and(|announced| announced > limit_bytes) {
        // A client that expects 100 Continue has not sent its body.
        if !headers.contains_key(EXPECT) {
            tokio::spawn(timeout(DISCARD_TIME, discard(body)));
        }
        return Err(limit.refusal());
    }
    app.body_memory.check(announced.unwrap_or(0))?;
    let mut share = app.body_memory.share();
    let mut first = Bytes::new();
    let mut all = BytesMut::new();
    loop {
        let silence_limit = Instant::now() + BODY_SILENCE;
        let Ok(frame) = timeout_at(until.min(silence_limit), body.frame()).await else {
            // A silent client and a slow one exceed different limits: each error names its own.
            if until > silence_limit {
                let waited_ms = BODY_SILENCE.as_millis() as u64;
                return Err(RouteError::BodySilent { waited_ms });
            }
            let limit_secs = limits.body_read_timeout_secs;
            let got_bytes = first.len() + all.len();
            return Err(RouteError::BodySlow {
                limit_secs,
                got_bytes,
            });
        };
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|err| RouteError::BodyBroken {
            detail: err.to_string(),
        })?;
        let Ok(piece) = frame.into_data() else {
            continue; // trailers
        };
        // The announced length may be missing, or too small.
        if first.len() + all.len() + piece.len() > limit_bytes {
            return Err(limit.refusal());
        }
        share.grow(piece.len())?;
        // A body of one piece, the usual case, is not copied.
        if first.is_empty() && all.is_empty() {
            first = piece;
            continue;
        }
        if all.is_empty() {
            // The announced length is allocated at once, but only when a second piece has come: a
            // client that announces a large body and sends nothing costs no memory.
            let hint = announced.or_else(|| body.size_hint().upper().map(|n| n as usize));
            all.reserve(hint.unwrap_or(2 * first.len()).min(limit_bytes));
            all.extend_from_slice(&std::mem::take(&mut first));
        }
        all.extend_from_slice(&piece);
    }
    let body = if all.is_empty() { first } else { all.freeze() };
    Ok(share.keep_with(body))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use futures_util::FutureExt;
    use router_core::SizeUnit;
    use tokio::sync::watch;

    use super::*;
    use crate::config::RouterConfig;
    use crate::observability::metrics::RouterMetrics;
    use crate::request::body_threads::tests::occupy;

    fn app() -> AppState {
        let config = RouterConfig::parse(&["baton-router".to_owned()]).unwrap();
        let metrics = Arc::new(RouterMetrics::new().unwrap());
        let (policy_set, _) = crate::server::build_policy_set(&config, &metrics).unwrap();
        AppState::new(config, metrics, policy_set, None, watch::channel(false).1)
    }

    #[tokio::test]
    async fn large_bodies_are_read_beside_the_event_loop() {
        let app = app();
        let text = |length| Bytes::from(format!("{{\"prompt\":\"{}\"}}", "x".repeat(length)));
        let ids = |count| Bytes::from(format!("{{\"prompt\":[1{}]}}", ",2".repeat(count)));
        let cases = [
            (text(1000), SizeUnit::Bytes, true),
            (ids(1000), SizeUnit::Tokens, true),
            (text(1 << 20), SizeUnit::Bytes, false),
            (ids(1 << 19), SizeUnit::Tokens, false),
        ];
        for (body, unit, is_inline) in cases {
            let dialect = Dialect::Completions;
            let scan = Arc::new(BodyIndex::of(&body, dialect).unwrap());
            let occupied = occupy(&app.body_threads);
            let mut scanning = Box::pin(scanned(&app, &body, dialect));
            let mut reading = Box::pin(prompt_of(&app, &scan, &body, true));
            let early_scan = (&mut scanning).now_or_never();
            let early_prompt = (&mut reading).now_or_never();
            assert_eq!(
                (early_scan.is_some(), early_prompt.is_some()),
                (is_inline, is_inline)
            );
            drop(occupied);
            let prompt = match early_prompt {
                Some(prompt) => prompt.unwrap(),
                None => {
                    assert_eq!(scanning.await.unwrap().prompt_len(), scan.prompt_len());
                    reading.await.unwrap()
                }
            };
            assert_eq!(prompt.blocks.unwrap().prompt_view().unit, unit);
        }
    }
}
