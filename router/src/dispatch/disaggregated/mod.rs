//! Attempt at a pair's request: the same body to a prefill and a decode worker, which meet in a
//! room.
//!
//! 1. choose P and D, take rooms that are not in use; the body with the bootstrap fields goes to
//!    both at once;
//! 2. the prefill leg runs in a task of its own and is read to its end; the decode leg runs here
//!    until it opens;
//! 3. the prefill leg fails first: the decode leg is dropped, which closes its connection;
//! 4. the decode leg fails first, by its own fault: where P keeps the pages for another reader
//!    (`reopen`), the prefill is kept, and the next attempt sends the same rooms to another D. Else
//!    the prefill leg is dropped, too;
//! 5. no D will fetch what P has computed (the client left, D refused for good): P frees it
//!    (prefill_release.rs).
//!
//! Or D computes the prompt itself (router-core's `local`): then it gets the client's body as it
//! is.

/// Prefill leg and its rooms.
pub(crate) mod prefill_leg;
/// Release of prefilled pages that no decode worker will pull.
mod prefill_release;
/// vLLM's protocol between prefill and decode.
pub(crate) mod vllm;

use std::sync::Arc;
use std::time::Duration;

use router_core::{AttemptReason, LocalPrefillReason, LocalView, ProtocolCode, Role};
use tokio::time::timeout;

use crate::clock::now_ms;
use crate::config::PdProtocol;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::{AttemptError, ErrorReply, PAIR_INCOMPATIBLE};
use crate::dispatch::context::RequestContext;
use crate::dispatch::disaggregated::prefill_leg::{PrefillAttempt, RoomLease};
use crate::dispatch::logprobs;
use crate::dispatch::types::{AttemptFailure, AttemptResult, ids_for, leg};
use crate::error::RouteError;
use crate::request::body::ManagedField;
use crate::transport::request_body::BodySegments;
use crate::workers::load_guard::{Candidate, LoadGuard};
use crate::workers::worker::Worker;

/// A decode worker may report its prefill worker's death before that shows here; wait this long to
/// know whom to avoid.
const FAULT_ATTRIBUTION_WAIT: Duration = Duration::from_millis(50);
/// Prompt bytes per token, where tokens were not counted: the rule of thumb for English.
const BYTES_PER_TOKEN: usize = 4;

/// Reason of a worker that has a bootstrap room in use already.
const DUPLICATE_ROOM: AttemptReason = AttemptReason::Code(ProtocolCode::DuplicateRoom);

/// A prefill, done or under way, whose pages any decode worker may fetch.
pub struct PendingPrefill {
    leg: PrefillAttempt,
    meeting: BootstrapParams,
}

/// As [`try_attempt`]; a room that is in use at a worker is no fault of anybody's, and the next
/// attempt draws another.
pub async fn attempt(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    reusable_prefill: &mut Option<PendingPrefill>,
) -> AttemptResult {
    match try_attempt(app, request, reusable_prefill).await {
        Err(AttemptFailure::Failed(mut failure)) if failure.reason == DUPLICATE_ROOM => {
            let sent_to = match failure.role {
                Role::Prefill => &request.record.prefill,
                Role::Decode | Role::Regular => &request.record.worker,
            };
            // A room of the router's own: no mistake of the client's, who has never seen it.
            failure.reply = ErrorReply::Error(RouteError::Upstream {
                role: failure.role,
                worker: sent_to.as_ref().map(|to| to.0.clone()).unwrap_or_default(),
                cause: "it says of each bootstrap room drawn for the request that it is in use"
                    .to_owned(),
            });
            failure.is_stale = true;
            *reusable_prefill = None;
            Err(failure.into())
        }
        other => other,
    }
}

/// Try once. `reusable_prefill` is the prefill of an attempt before whose decode worker failed; it is left
/// there again when the same may be tried with another.
async fn try_attempt(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    reusable_prefill: &mut Option<PendingPrefill>,
) -> AttemptResult {
    let reader = match reusable_prefill.take() {
        Some(prefilled) => second_reader(app, request, prefilled)?,
        None => None,
    };
    let is_second_reader = reader.is_some();
    let (mut prefilled, decode) = match reader {
        Some(reader) => reader,
        None => match choose(app, request)? {
            Placement::Pair(prefill, decode) if is_vllm(app, &prefill) => {
                return vllm::attempt(app, request, prefill, decode).await;
            }
            Placement::Pair(prefill, decode) => {
                (start_prefill(app, request, prefill, &decode)?, decode)
            }
            Placement::Local(decode, why) => return local(app, request, decode, why).await,
        },
    };
    request.record.worker = Some((decode.candidate.name.clone(), decode.why));
    let body = prefilled.meeting.body(app, request, &decode.candidate);
    let pair = (prefilled.leg.prefill.worker.id, decode.candidate.worker.id);
    let decode_worker = decode.candidate.worker.clone();
    let decode = leg(app, request, decode, body).open();
    tokio::pin!(decode);
    // Whichever leg fails drops the other: `decode` on return from here, `prefilled` with it.
    let opened = tokio::select! {
        opened = &mut decode => opened,
        Some(ended) = prefilled.leg.ended() => match ended {
            Ok(()) => decode.await,
            Err(failure) => {
                app.metrics.leg_aborts.with_label_values(&["decode", failure.reason.into_str()]).inc();
                return Err(failure.into());
            }
        },
    };
    if is_second_reader {
        let result = if opened.is_ok() { "opened" } else { "failed" };
        app.metrics
            .decode_retries
            .with_label_values(&[result])
            .inc();
    }
    match opened {
        Ok(mut opened) => {
            prefilled.leg.pages_claimed = true;
            app.pair_traffic
                .opened(pair, opened.stages.as_ref(), now_ms());
            app.fleet.confirm_pair(pair);
            if request.scan.wants_input_logprobs && (opened.is_sse || opened.answer.rest.is_none())
            {
                let limit = app.config.request_timeout();
                opened = logprobs::merged(opened, &mut prefilled.leg, limit).await;
            }
            Ok((opened, Some(prefilled.leg)))
        }
        Err(failure) if failure.reason == PAIR_INCOMPATIBLE => {
            exclude_pair(app, &prefilled.leg.prefill.worker, &decode_worker, &failure);
            Err(failure.into())
        }
        Err(failure) if failure.reason.blames_partner() => {
            app.pair_traffic.failed(pair, failure.reason, now_ms());
            Err(attribute_failure(failure, &mut prefilled, is_second_reader)
                .await
                .into())
        }
        Err(failure) => {
            let mut tried = request.avoid.clone();
            tried.push(failure.worker);
            let can_reopen = prefilled.leg.prefill.description.has_feature("reopen");
            if can_reopen && app.fleet.has_other(Role::Decode, &request.wanted(), &tried) {
                *reusable_prefill = Some(prefilled);
            }
            Err(failure.into())
        }
    }
}

/// Send the pair no more requests for a while.
fn exclude_pair(app: &AppState, prefill: &Worker, decode: &Worker, failure: &AttemptError) {
    let pair = (prefill.id, decode.id);
    app.pair_traffic.failed(pair, failure.reason, now_ms());
    let reason = failure.message().unwrap_or_else(|| failure.to_string());
    app.fleet.exclude_pair(prefill, decode, reason);
}

/// Another decode worker for a prefill whose first one failed; `None` if the chosen one would not
/// understand its pages.
fn second_reader(
    app: &AppState,
    request: &RequestContext,
    prefilled: PendingPrefill,
) -> Result<Option<(PendingPrefill, LoadGuard)>, RouteError> {
    let decode = app
        .fleet
        .choose(Role::Decode, &request.wanted(), &request.avoid)?;
    let is_fit = app
        .fleet
        .can_pair(&prefilled.leg.prefill, &decode.candidate);
    Ok(is_fit.then_some((prefilled, decode)))
}

/// Decide which worker to avoid after a decode worker reported what is more likely its prefill
/// worker's trouble.
async fn attribute_failure(
    mut failure: AttemptError,
    prefilled: &mut PendingPrefill,
    is_second_reader: bool,
) -> AttemptError {
    match timeout(FAULT_ATTRIBUTION_WAIT, prefilled.leg.ended()).await {
        Ok(Some(Err(its))) => return its,
        // The pages of the earlier attempt are gone: no worker's fault, and P still has most of
        // them in its cache.
        _ if is_second_reader => failure.is_stale = true,
        // The worker at fault is unknown; the decode worker only reports it, so avoid the prefill
        // worker.
        _ => (failure.role, failure.worker) = (Role::Prefill, prefilled.leg.prefill.id),
    }
    failure
}

fn is_vllm(app: &AppState, chosen: &LoadGuard) -> bool {
    match app.config.pairs.pd_protocol {
        PdProtocol::Sglang => false,
        PdProtocol::Vllm => true,
        PdProtocol::Auto => chosen.candidate.description.is_vllm(),
    }
}

/// True if a decode worker computes a prompt that no P prefilled for it; SGLang's do not.
fn can_prefill(app: &AppState, decode: &LoadGuard) -> bool {
    let description = &decode.candidate.description;
    description.has_feature("local_prefill") || is_vllm(app, decode)
}

enum Placement {
    Pair(LoadGuard, LoadGuard),
    /// The decode worker does both phases.
    Local(LoadGuard, LocalPrefillReason),
}

fn choose(app: &AppState, request: &RequestContext) -> Result<Placement, RouteError> {
    let (wanted, fleet) = (request.wanted(), &app.fleet);
    let (prefill, decode) = match fleet.choose_pair(&wanted, &request.avoid) {
        Ok((prefill, decode)) => (Ok(prefill), decode),
        Err(
            err @ RouteError::NoWorker {
                role: Role::Prefill,
                ..
            },
        ) => match fleet.choose(Role::Decode, &wanted, &request.avoid) {
            Ok(decode) => (Err(err), decode),
            Err(_) => return Err(err),
        },
        Err(err) => return Err(err),
    };
    let why = app
        .config
        .pairs
        .local_rule()
        .decide(&view(request, &decode, prefill.is_ok()));
    match why.filter(|_| can_prefill(app, &decode)) {
        // Dropping P's guard takes back what its policy was sent.
        Some(why) => Ok(Placement::Local(decode, why)),
        None => Ok(Placement::Pair(prefill?, decode)),
    }
}

fn view(request: &RequestContext, decode: &LoadGuard, has_prefill: bool) -> LocalView {
    let forecast = decode.why.forecast();
    let estimate = request.scan.prompt_len() / BYTES_PER_TOKEN;
    let counted = request
        .prompt
        .tokens
        .or(forecast.map(|forecast| forecast.prompt_tokens));
    let prompt = counted.unwrap_or_else(|| u32::try_from(estimate).unwrap_or(u32::MAX));
    let resumed_tokens = request
        .resume_point
        .as_ref()
        .map_or(0, |point| point.tokens);
    LocalView {
        prompt_tokens: prompt.saturating_add(u32::try_from(resumed_tokens).unwrap_or(u32::MAX)),
        cached_tokens: forecast.map_or(0, |forecast| forecast.cached_tokens),
        has_prefill,
    }
}

async fn local(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    decode: LoadGuard,
    why: LocalPrefillReason,
) -> AttemptResult {
    app.metrics
        .local_prefills
        .with_label_values(&[why.into_str()])
        .inc();
    let candidate = &decode.candidate;
    request.record.prefill = None;
    request.record.room = None;
    request.record.worker = Some((candidate.name.clone(), decode.why));
    let (replaced, fields): (&[ManagedField], _) = match candidate.rank {
        None => (&[ManagedField::Bootstrap], String::new()),
        Some(rank) => (
            &[ManagedField::Bootstrap, ManagedField::Rank],
            format!("\"data_parallel_rank_decode\":{rank},\"routed_dp_rank\":{rank}"),
        ),
    };
    let ids = ids_for(app, request, candidate);
    let body = request.body_for(replaced, ids, &fields);
    Ok((leg(app, request, decode, body).open().await?, None))
}

fn start_prefill(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    prefill: LoadGuard,
    decode: &LoadGuard,
) -> Result<PendingPrefill, RouteError> {
    let candidate = prefill.candidate.clone();
    request.record.prefill = Some((candidate.name.clone(), prefill.why));
    let rooms = RoomLease::take(app, request.scan.batch.unwrap_or(1), &candidate)?;
    request.record.room = rooms.rooms.first().copied();
    if let Some(room) = request.record.room {
        request.record.timeline.room(room);
    }
    let is_batch = request.scan.batch.is_some();
    let with_ranks = decode.candidate.rank.is_some();
    let meeting = BootstrapParams::new(&candidate, &rooms.rooms, is_batch, with_ranks);
    let body = meeting.body(app, request, &candidate);
    let draining = leg(app, request, prefill, body).drain(request.scan.wants_input_logprobs);
    let draining = Box::pin(draining); // else `spawn` copies its 4 KB a dozen times
    let (task, app, prefill) = (Some(tokio::spawn(draining)), app.clone(), candidate);
    let leg = PrefillAttempt {
        task,
        response: None,
        app,
        prefill,
        rooms,
        pages_claimed: false,
    };
    Ok(PendingPrefill { leg, meeting })
}

/// Bootstrap parameters: where both workers meet (SGLang's names, docs/protocol.md).
struct BootstrapParams {
    /// JSON members for both legs.
    shared: String,
    /// P's rank, if both workers have one.
    prefill_rank: Option<u32>,
}

impl BootstrapParams {
    fn new(prefill: &Candidate, rooms: &[u64], is_batch: bool, with_ranks: bool) -> Self {
        let worker = &prefill.worker;
        let host = serde_json::Value::from(worker.url().host.as_str()).to_string();
        let port = worker.bootstrap_port(&prefill.description);
        let port = port.map_or_else(|| "null".to_owned(), |port| port.to_string());
        let list = |item: &dyn Fn(&u64) -> String| match rooms {
            [room] if !is_batch => item(room),
            _ => format!("[{}]", rooms.iter().map(item).collect::<Vec<_>>().join(",")),
        };
        let [hosts, ports] = [host, port].map(|one| list(&|_| one.clone()));
        let rooms = list(&u64::to_string);
        let shared = format!(
            "\"bootstrap_host\":{hosts},\"bootstrap_port\":{ports},\"bootstrap_room\":{rooms}"
        );
        let prefill_rank = prefill.rank.filter(|_| with_ranks);
        Self {
            shared,
            prefill_rank,
        }
    }

    /// Body for one of the two.
    fn body(&self, app: &AppState, request: &RequestContext, to: &Candidate) -> BodySegments {
        let ids = ids_for(app, request, to);
        let Some(p) = self.prefill_rank else {
            // Without DP awareness a client's own ranks stay.
            return request.body_for(&[ManagedField::Bootstrap], ids, &self.shared);
        };
        let ranks = match (to.worker.role(), to.rank) {
            (Role::Prefill, _) => format!(",\"data_parallel_rank\":{p},\"routed_dp_rank\":{p}"),
            (_, Some(d)) => format!(
                ",\"data_parallel_rank\":{p},\"data_parallel_rank_decode\":{d},\"routed_dp_rank\":{d},\"disagg_prefill_dp_rank\":{p}"
            ),
            (_, None) => String::new(),
        };
        let fields = self.shared.clone() + &ranks;
        request.body_for(&[ManagedField::Bootstrap, ManagedField::Rank], ids, &fields)
    }
}
