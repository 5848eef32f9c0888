//! From a parsed request to an answer that can be committed to: choose, send, and try again where that can help.
//!
//! The life of a pair's request:
//!
//! 1. choose P, choose D, draw a room; the same body with the bootstrap fields goes to both at once;
//! 2. the prefill leg runs in a task of its own and is read to its end; the decode leg runs here until it opens;
//! 3. one fails first: the other is dropped (which closes its connection), and by the failure's class another pair is
//!    tried, after a pause if there is no untried worker or the worker asked for less;
//! 4. the decode leg opens: its answer is relayed, the prefill leg goes along until the answer ends.
//!
//! Invariants: nothing has reached the client before step 4, so every retry is invisible; a dropped future (the client
//! left) drops both legs.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use router_core::{Blocks, RetryClass, Role, draw_room};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::App;
use crate::body::{Ours, Parts, Scan};
use crate::clock::now_ms;
use crate::error::RouteError;
use crate::late::{sse_headers, with_keepalive};
use crate::leg::{Failure, Leg, Opened, Told};
use crate::metrics::Metrics;
use crate::record::Record;
use crate::registry::{Avoid, Candidate, Chosen, Wanted};
use crate::relay::Relay;
use crate::upstream::Head;

/// A prefill leg that is still being read when the answer is complete gets this long; its KV has arrived.
const PREFILL_LINGER: Duration = Duration::from_secs(5);
/// A decode worker may report its prefill worker's death before that shows here; wait this long to know whom to avoid.
const BLAME_WAIT: Duration = Duration::from_millis(50);

/// A generation request, read and checked.
pub struct Inbound {
    pub head: Head,
    pub body: Bytes,
    pub scan: Scan,
    pub routing_key: Option<String>,
    /// The prompt's hashes, if a policy reads them.
    pub blocks: Option<Arc<Blocks>>,
    /// Whether a policy reads the prompt's text.
    pub needs_text: bool,
    /// When the body was complete.
    pub ready_at: Instant,
    pub record: Record,
    pub permit: Option<OwnedSemaphorePermit>,
}

impl Inbound {
    pub fn wanted(&self) -> Wanted<'_> {
        Wanted {
            text: match self.needs_text {
                true => self.scan.routing_text(&self.body),
                false => "",
            },
            blocks: self.blocks.clone(),
            routing_key: self.routing_key.as_deref(),
            streams: self.scan.stream,
        }
    }
}

/// The prefill leg's task. Dropping it aborts the leg.
pub struct PrefillLeg {
    task: Option<JoinHandle<Result<Vec<Bytes>, Failure>>>,
    metrics: Arc<Metrics>,
}

impl PrefillLeg {
    fn start(leg: Leg, keep: bool, metrics: Arc<Metrics>) -> Self {
        Self {
            task: Some(tokio::spawn(leg.drain(keep))),
            metrics,
        }
    }

    /// Its end; `None` when it panicked or was read already. Cancel safe.
    async fn ended(&mut self) -> Option<Result<Vec<Bytes>, Failure>> {
        let ended = self.task.as_mut()?.await.ok();
        self.task = None;
        ended
    }

    /// The answer is complete: read the rest so that the connection can be used again, but not for long.
    pub fn linger(mut self) {
        if let Some(task) = self.task.take().filter(|task| !task.is_finished()) {
            let abort = task.abort_handle();
            tokio::spawn(async move {
                if timeout(PREFILL_LINGER, task).await.is_err() {
                    abort.abort();
                }
            });
        }
    }
}

impl Drop for PrefillLeg {
    fn drop(&mut self) {
        if let Some(task) = self.task.take().filter(|task| !task.is_finished()) {
            task.abort();
            let labels = ["prefill", "dropped"];
            self.metrics.leg_aborts.with_label_values(&labels).inc();
        }
    }
}

/// Attempt failed: by a worker, or because nobody could be chosen.
enum Stop {
    Failed(Failure),
    Error(RouteError),
}

impl From<RouteError> for Stop {
    fn from(err: RouteError) -> Self {
        Stop::Error(err)
    }
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Stop::Failed(failure)
    }
}

/// Answer a generation request. Dropping the future drops everything the request holds.
pub async fn generate(app: Arc<App>, request: Inbound) -> Response {
    let every = Duration::from_secs(app.config.limits.sse_keepalive_secs);
    if request.scan.stream && !every.is_zero() {
        with_keepalive(Box::pin(attempts(app, request)), every).await
    } else {
        attempts(app, request).await
    }
}

async fn attempts(app: Arc<App>, mut request: Inbound) -> Response {
    let app = &app;
    let mut avoid = Avoid::default();
    let mut had_second_opinion = false;
    app.retry_budget.lock().on_request(now_ms());
    loop {
        request.record.attempts += 1;
        let attempt = if app.is_pd() {
            pair(app, &mut request, &avoid).await
        } else {
            single(app, &mut request, &avoid).await
        };
        let failure = match attempt {
            Ok((opened, prefill)) => return answer(app, request, opened, prefill),
            Err(Stop::Error(err)) => return refuse(request, err),
            Err(Stop::Failed(failure)) => failure,
        };
        let labels = [failure.role.label(), failure.reason];
        app.metrics.upstream_errors.with_label_values(&labels).inc();
        let may_retry = match failure.class {
            RetryClass::Refused => false,
            RetryClass::Unexplained => !std::mem::replace(&mut had_second_opinion, true),
            RetryClass::Broken | RetryClass::Leaving | RetryClass::Overloaded => true,
        };
        if !may_retry || !may_try_again(app, &request) {
            return tell(request, failure);
        }
        tracing::debug!(rid = %request.record.rid, attempt = request.record.attempts, reason = failure.reason, "trying again");
        app.metrics
            .retries
            .with_label_values(&[failure.reason])
            .inc();
        let list = match failure.role {
            Role::Prefill => &mut avoid.prefill,
            _ => &mut avoid.worker,
        };
        list.push(failure.worker);
        if failure.class == RetryClass::Overloaded || !app.registry.has_other(failure.role, list) {
            let pause_ms = app
                .retry
                .backoff_ms(request.record.attempts, &mut rand::rng());
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        }
    }
}

/// Whether the request's attempts and the fleet's budget have another retry; takes it.
fn may_try_again(app: &App, request: &Inbound) -> bool {
    let refused_by = if !app.retry.allows_another(request.record.attempts) {
        "attempts"
    } else if !app.retry_budget.lock().try_retry(now_ms()) {
        "budget"
    } else {
        return true;
    };
    let labels = [refused_by];
    app.metrics.retries_refused.with_label_values(&labels).inc();
    false
}

type Committed = (Opened, Option<PrefillLeg>);

async fn single(app: &Arc<App>, request: &mut Inbound, avoid: &Avoid) -> Result<Committed, Stop> {
    let registry = &app.registry;
    let chosen = registry.choose(Role::Regular, &request.wanted(), &avoid.worker)?;
    let candidate = &chosen.guard.candidate;
    request.record.worker = Some((candidate.name.clone(), chosen.why));
    let body = match candidate.rank {
        None => Parts::from(request.body.clone()),
        Some(rank) => {
            let fields = format!("\"data_parallel_rank\":{rank},\"routed_dp_rank\":{rank}");
            request.scan.splice(&request.body, &[Ours::Rank], &fields)
        }
    };
    observe_overhead(app, request);
    let opened = leg(app, request, chosen, body).open().await?;
    Ok((opened, None))
}

async fn pair(app: &Arc<App>, request: &mut Inbound, avoid: &Avoid) -> Result<Committed, Stop> {
    let (prefill, decode) = app.registry.choose_pair(&request.wanted(), avoid)?;
    request.record.prefill = Some((prefill.guard.candidate.name.clone(), prefill.why));
    request.record.worker = Some((decode.guard.candidate.name.clone(), decode.why));
    let fields = PairFields::draw(&prefill.guard.candidate, &decode.guard.candidate, request);
    request.record.room = Some(fields.first_room);
    // Without DP awareness a client's own ranks stay.
    let replaced: &[Ours] = match fields.has_ranks {
        true => &[Ours::Bootstrap, Ours::Rank],
        false => &[Ours::Bootstrap],
    };
    let splice = |fields: &str| request.scan.splice(&request.body, replaced, fields);
    let (prefill_body, decode_body) = (splice(&fields.prefill), splice(&fields.decode));
    observe_overhead(app, request);

    let keep = request.scan.wants_input_logprobs && !request.scan.stream;
    let (prefill_id, decode_id) = (prefill.guard.candidate.id, decode.guard.candidate.id);
    let prefill = leg(app, request, prefill, prefill_body);
    let mut prefill = PrefillLeg::start(prefill, keep, app.metrics.clone());
    let decode = leg(app, request, decode, decode_body).open();
    tokio::pin!(decode);
    // Whichever leg fails drops the other: `decode` on return from here, `prefill` with it.
    let opened = tokio::select! {
        opened = &mut decode => opened,
        Some(ended) = prefill.ended() => match ended {
            Ok(kept) if keep => decode.await.map(|opened| with_input_logprobs(opened, &kept)),
            Ok(_) => decode.await,
            Err(failure) => {
                let labels = ["decode", failure.reason];
                app.metrics.leg_aborts.with_label_values(&labels).inc();
                return Err(failure.into());
            }
        },
    };
    match opened {
        Ok(mut opened) => {
            if keep && prefill.task.is_some() && opened.rest.is_none() {
                let ended = timeout(app.config.request_timeout(), prefill.ended()).await;
                if let Ok(Some(Ok(kept))) = ended {
                    opened = with_input_logprobs(opened, &kept);
                }
            }
            Ok((opened, Some(prefill)))
        }
        Err(mut failure) if failure.blames_partner() => {
            match timeout(BLAME_WAIT, prefill.ended()).await {
                Ok(Some(Err(its))) => Err(its.into()),
                _ => {
                    // Nobody knows who it was; the decode worker only reports it, so avoid the prefill worker.
                    debug_assert_eq!(failure.worker, decode_id);
                    failure.role = Role::Prefill;
                    failure.worker = prefill_id;
                    Err(failure.into())
                }
            }
        }
        Err(failure) => Err(failure.into()),
    }
}

fn leg(app: &App, request: &Inbound, chosen: Chosen, body: Parts) -> Leg {
    Leg {
        guard: chosen.guard,
        head: request.head.clone(),
        body,
        limit: app.config.request_timeout(),
        counts: request.scan.batch.is_none(),
    }
}

fn observe_overhead(app: &App, request: &Inbound) {
    if request.record.attempts == 1 {
        let labels = [request.record.route()];
        let overhead = app.metrics.overhead.with_label_values(&labels);
        overhead.observe(request.ready_at.elapsed().as_secs_f64());
    }
}

/// JSON members that tell both workers where to meet (SGLang's names, docs/protocol.md).
struct PairFields {
    prefill: String,
    decode: String,
    first_room: u64,
    has_ranks: bool,
}

impl PairFields {
    fn draw(prefill: &Candidate, decode: &Candidate, request: &Inbound) -> Self {
        let worker = &prefill.worker;
        // With a rank the room is drawn so that room % dp_size is that rank: unmodified SGLang nodes place by it.
        let dp = prefill
            .rank
            .map(|rank| (u64::from(worker.dp_size()), u64::from(rank)));
        let mut rng = rand::rng();
        let host = serde_json::Value::from(worker.url().host.as_str()).to_string();
        let port = match worker.bootstrap_port() {
            Some(port) => port.to_string(),
            None => "null".to_owned(),
        };
        let first_room = draw_room(&mut rng, dp);
        let mut shared = String::with_capacity(160);
        let written = match request.scan.batch {
            None => write!(
                shared,
                "\"bootstrap_host\":{host},\"bootstrap_port\":{port},\"bootstrap_room\":{first_room}"
            ),
            Some(items) => {
                let list = |item: &mut dyn FnMut(usize) -> String| {
                    (0..items).map(item).collect::<Vec<_>>().join(",")
                };
                let hosts = list(&mut |_| host.clone());
                let ports = list(&mut |_| port.clone());
                let rooms = list(&mut |i| match i {
                    0 => first_room.to_string(),
                    _ => draw_room(&mut rng, dp).to_string(),
                });
                write!(
                    shared,
                    "\"bootstrap_host\":[{hosts}],\"bootstrap_port\":[{ports}],\"bootstrap_room\":[{rooms}]"
                )
            }
        };
        written.expect("writing to a String cannot fail");
        let mut fields = Self {
            decode: shared.clone(),
            prefill: shared,
            first_room,
            has_ranks: false,
        };
        if let (Some(p), Some(d)) = (prefill.rank, decode.rank) {
            fields.has_ranks = true;
            fields.prefill += &format!(",\"data_parallel_rank\":{p},\"routed_dp_rank\":{p}");
            fields.decode += &format!(
                ",\"data_parallel_rank\":{p},\"data_parallel_rank_decode\":{d},\"routed_dp_rank\":{d},\"disagg_prefill_dp_rank\":{p}"
            );
        }
        fields
    }
}

/// Put the prefill leg's input logprobs in front of the decode leg's, item by item.
fn with_input_logprobs(mut opened: Opened, prefill: &[Bytes]) -> Opened {
    const FIELD: &str = "input_token_logprobs";
    let parse = |pieces: &[Bytes]| serde_json::from_slice::<serde_json::Value>(&pieces.concat());
    let (Ok(from), Ok(mut to)) = (parse(prefill), parse(&opened.pieces)) else {
        return opened; // not JSON: pass the decode leg's words on as they are
    };
    let merge = |from: &serde_json::Value, to: &mut serde_json::Value| {
        let first = from["meta_info"][FIELD].as_array();
        let Some(meta) = to
            .get_mut("meta_info")
            .and_then(|meta| meta.as_object_mut())
        else {
            return;
        };
        let first = first.cloned().unwrap_or_default();
        let second = meta.get(FIELD).and_then(|list| list.as_array());
        let merged = first
            .into_iter()
            .chain(second.into_iter().flatten().cloned());
        let merged: Vec<_> = merged.collect();
        meta.insert(FIELD.to_owned(), merged.into());
    };
    match (&from, &mut to) {
        (serde_json::Value::Array(from), serde_json::Value::Array(to)) => {
            for (from, to) in from.iter().zip(to) {
                merge(from, to);
            }
        }
        (from, to) => merge(from, to),
    }
    opened.pieces = vec![Bytes::from(to.to_string())];
    opened
}

/// Headers of a worker's answer that belong to its connection, not to the answer.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut kept = HeaderMap::with_capacity(headers.len() + 2);
    for (name, value) in headers {
        let is_hop = crate::http::HOP_BY_HOP.contains(&name.as_str());
        if !is_hop && name != header::CONTENT_LENGTH {
            kept.append(name, value.clone());
        }
    }
    kept
}

fn answer(app: &App, request: Inbound, opened: Opened, prefill: Option<PrefillLeg>) -> Response {
    let (status, mut headers) = (opened.status, end_to_end(&opened.headers));
    if opened.is_sse {
        sse_headers(&mut headers);
    }
    let limit = app.config.request_timeout();
    let many = request.scan.batch.is_some();
    let relay = Relay::new(opened, many, limit, prefill, request.record, request.permit);
    let mut response = Response::new(axum::body::Body::new(relay));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

pub fn refuse(mut request: Inbound, err: RouteError) -> Response {
    request.record.end(err.status(), err.code());
    err.into_response()
}

/// The last attempt failed: the worker's own words if it had any.
fn tell(mut request: Inbound, failure: Failure) -> Response {
    match failure.told {
        Told::Error(err) => refuse(request, err),
        Told::Answer {
            status,
            headers,
            body,
        } => {
            request.record.end(status, failure.reason);
            let mut response = Response::new(axum::body::Body::from(body));
            *response.status_mut() = status;
            *response.headers_mut() = end_to_end(&headers);
            if matches!(
                status,
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
            ) {
                let retry_after = response.headers_mut().entry(header::RETRY_AFTER);
                retry_after.or_insert(HeaderValue::from_static("1"));
            }
            response
        }
    }
}
