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
//! 5. no D will pull the pages that P has computed (the client left, D refused for good): P frees
//!    them (page_release.rs).
//!
//! Or D computes the prompt itself (router-core's `local_prefill`): then it gets the client's body
//! without fields of routers. Answers with logprobs of their prompts come from one worker: from P
//! alone where they have at most one token, else from D alone.

/// Input logprobs of a pair's answer.
mod input_logprobs;
/// Members that are added to a pair's bodies.
mod pair_fields;
/// vLLM's protocol between prefill and decode.
pub(super) mod vllm;

use std::sync::Arc;
use std::time::Duration;

use baton_text::dialect::body::PromptLogprobs;
use baton_text::dialect::translate::chat_translation::is_translatable;
use router_core::{AttemptReason, LocalPrefillReason, LocalView, ProtocolCode, Role};
use tokio::time::timeout;

use crate::clock::now_ms;
use crate::config::PdProtocol;
use crate::dispatch::app::AppState;
use crate::dispatch::attempt::{AttemptError, ErrorReply, PAIR_INCOMPATIBLE, UpstreamResponse};
use crate::dispatch::attempt_result::{AttemptFailure, AttemptResult};
use crate::dispatch::chat_form::{RequestForm, needs_chat};
use crate::dispatch::context::{LegBody, RequestContext};
use crate::dispatch::disaggregated::input_logprobs::merge_input_logprobs;
use crate::dispatch::disaggregated::pair_fields::{
    BootstrapFields, LegFields, RankFields, to_json_members,
};
use crate::dispatch::leg_setup::{build_leg, forwarded_ids};
use crate::dispatch::prefill_leg::{PrefillAttempt, RoomLease};
use crate::error::RouteError;
use crate::observability::fleet_feed::pair_traffic::PairId;
use crate::workers::load_guard::{Candidate, LoadGuard};
use crate::workers::worker::Worker;

/// A decode worker may report its prefill worker's death before that shows here; wait this long to
/// know whom to avoid.
const FAULT_ATTRIBUTION_WAIT: Duration = Duration::from_millis(50);
/// Prompt bytes per token, where tokens were not counted: the rule of thumb for English.
const BYTES_PER_TOKEN: usize = 4;

/// Reason of a worker that has a bootstrap room in use already.
const DUPLICATE_ROOM: AttemptReason = AttemptReason::Code(ProtocolCode::DuplicateRoom);

/// A prefill, done or running, whose pages any decode worker may pull.
pub struct PendingPrefill {
    leg: PrefillAttempt,
    meeting: BootstrapParams,
    form: RequestForm,
}

impl PendingPrefill {
    /// Body for the decode worker.
    fn decode_body(&self, app: &AppState, request: &RequestContext, decode: &Candidate) -> LegBody {
        self.meeting.body(app, request, &self.form, decode)
    }
}

/// As [`try_attempt`]. A room that is in use at a worker is no worker's fault: the next attempt
/// draws another.
pub async fn attempt_pair(
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
            let worker = sent_to.as_ref().map(|(name, _)| name.clone());
            // A room of the router's own: no mistake of the client's, who has never seen it.
            failure.reply = ErrorReply::Error(RouteError::Upstream {
                role: failure.role,
                worker: worker.unwrap_or_default(),
                problem: "uses each bootstrap room drawn for the request already".to_owned(),
                detail: String::new(),
            });
            failure.is_stale = true;
            *reusable_prefill = None;
            Err(failure.into())
        }
        result => result,
    }
}

/// Attempt once. `reusable_prefill` is the prefill of an earlier attempt whose decode worker
/// failed; it is left there again when another decode worker may read it.
async fn try_attempt(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    reusable_prefill: &mut Option<PendingPrefill>,
) -> AttemptResult {
    let second_reader = match reusable_prefill.take() {
        Some(prefill) => choose_second_reader(app, request, prefill)?,
        None => None,
    };
    let is_second_reader = second_reader.is_some();
    let (mut prefill, decode) = match second_reader {
        Some(pair) => pair,
        None => match choose_placement(app, request)? {
            Placement::Pair(prefill, decode) if is_vllm(app, &prefill) => {
                return vllm::attempt_pair(app, request, prefill, decode).await;
            }
            Placement::Pair(prefill, decode) => {
                let pending = start_prefill(app, request, prefill, &decode).await?;
                (pending, decode)
            }
            Placement::Local(decode, reason) => {
                return attempt_local_prefill(app, request, decode, reason).await;
            }
            Placement::Answering(prefill) => {
                return attempt_local_answer(app, request, prefill).await;
            }
        },
    };
    request.record.worker = Some((decode.candidate.name.clone(), decode.why));
    let body = prefill.decode_body(app, request, &decode.candidate);
    let pair = (prefill.leg.prefill.worker.id, decode.candidate.worker.id);
    let decode_worker = decode.candidate.worker.clone();
    let decode_leg = build_leg(app, request, decode, body).open();
    tokio::pin!(decode_leg);
    // Whichever leg fails drops the other: `decode_leg` on return from here, `prefill` with it.
    let result = tokio::select! {
        result = &mut decode_leg => result,
        Some(ended) = prefill.leg.ended() => match ended {
            Ok(()) => decode_leg.await,
            Err(failure) => {
                let labels = ["decode", failure.reason.into_str()];
                app.metrics.leg_aborts.with_label_values(&labels).inc();
                return Err(failure.into());
            }
        },
    };
    if is_second_reader {
        let outcome = if result.is_ok() { "opened" } else { "failed" };
        app.metrics
            .decode_retries
            .with_label_values(&[outcome])
            .inc();
    }
    match result {
        Ok(opened) => Ok(accept_pair(app, request, pair, opened, prefill).await?),
        Err(failure) if failure.reason == PAIR_INCOMPATIBLE => {
            exclude_pair(app, &prefill.leg.prefill.worker, &decode_worker, &failure);
            Err(failure.into())
        }
        Err(failure) if failure.reason.blames_partner() => {
            app.pair_traffic.failed(pair, failure.reason, now_ms());
            Err(attribute_failure(failure, &mut prefill, is_second_reader)
                .await
                .into())
        }
        Err(failure) => {
            if may_be_read_again(app, request, &prefill, &failure) {
                *reusable_prefill = Some(prefill);
            }
            Err(failure.into())
        }
    }
}

/// The decode leg has opened: the pair works, and D has the pages.
async fn accept_pair(
    app: &AppState,
    request: &RequestContext,
    pair: PairId,
    mut opened: UpstreamResponse,
    mut prefill: PendingPrefill,
) -> Result<(UpstreamResponse, Option<PrefillAttempt>), AttemptError> {
    prefill.leg.pages_claimed = true;
    app.pair_traffic
        .opened(pair, opened.stages.as_ref(), now_ms());
    app.fleet.confirm_pair(pair);
    let is_mergeable = opened.is_sse || opened.answer.remaining.is_none();
    if request.scan.wants_input_logprobs && is_mergeable {
        let limit = app.config.request_timeout();
        opened = merge_input_logprobs(opened, &mut prefill.leg, limit).await?;
    }
    Ok((opened, Some(prefill.leg)))
}

/// True if another decode worker may read the pages whose first reader failed.
fn may_be_read_again(
    app: &AppState,
    request: &RequestContext,
    prefill: &PendingPrefill,
    failure: &AttemptError,
) -> bool {
    if !prefill.leg.prefill.description.has_feature("reopen") {
        return false;
    }
    let excluded = request.attempts.retries.excluded_with(failure.worker);
    app.fleet
        .has_other(Role::Decode, &request.wanted(), &excluded)
}

/// Send the pair no more requests for a while.
fn exclude_pair(app: &AppState, prefill: &Worker, decode: &Worker, failure: &AttemptError) {
    let pair = (prefill.id, decode.id);
    app.pair_traffic.failed(pair, failure.reason, now_ms());
    let reason = failure.message().unwrap_or_else(|| failure.to_string());
    app.fleet.exclude_pair(prefill, decode, reason);
}

/// Choose another decode worker for a prefill whose first one failed; `None` if the chosen one
/// would not understand its pages.
fn choose_second_reader(
    app: &AppState,
    request: &RequestContext,
    prefill: PendingPrefill,
) -> Result<Option<(PendingPrefill, LoadGuard)>, RouteError> {
    let excluded = request.attempts.retries.excluded_workers();
    let decode = app
        .fleet
        .choose(Role::Decode, &request.wanted(), excluded)?;
    let is_fit = app.fleet.can_pair(&prefill.leg.prefill, &decode.candidate);
    Ok(is_fit.then_some((prefill, decode)))
}

/// Decide which worker to avoid after a decode worker reported trouble that is more likely its
/// prefill worker's.
async fn attribute_failure(
    mut failure: AttemptError,
    prefill: &mut PendingPrefill,
    is_second_reader: bool,
) -> AttemptError {
    let ended = timeout(FAULT_ATTRIBUTION_WAIT, prefill.leg.ended()).await;
    if let Ok(Some(Err(prefill_failure))) = ended {
        return prefill_failure;
    }
    if is_second_reader {
        // The pages of the earlier attempt are gone: no worker's fault, and P still has most of
        // them in its cache.
        failure.is_stale = true;
    } else {
        // The worker at fault is unknown; the decode worker only reports it, so avoid the prefill
        // worker.
        failure.role = Role::Prefill;
        failure.worker = prefill.leg.prefill.id;
    }
    failure
}

fn is_vllm(app: &AppState, chosen: &LoadGuard) -> bool {
    speaks_vllm(app, &chosen.candidate)
}

fn speaks_vllm(app: &AppState, worker: &Candidate) -> bool {
    match app.config.pairs.pd_protocol {
        PdProtocol::Sglang => false,
        PdProtocol::Vllm => true,
        PdProtocol::Auto => worker.description.is_vllm(),
    }
}

/// Form of a request for a pair. Workers of other makes meet by members that their chat requests
/// have; of the translatable requests vLLM's messages have them too, and none of SGLang's (0.5.23).
async fn pair_form(
    app: &AppState,
    request: &mut RequestContext,
    prefill: &Candidate,
    decode: &Candidate,
) -> Result<RequestForm, RouteError> {
    let dialect = request.scan.dialect;
    let meets = if speaks_vllm(app, prefill) {
        dialect.fields().vllm_prefill.is_some()
    } else {
        prefill.description.is_baton() && decode.description.is_baton()
    };
    let lacks_path = [prefill, decode]
        .iter()
        .any(|worker| needs_chat(dialect, &worker.description));
    let needs_chat = lacks_path || (is_translatable(dialect) && !meets);
    request.choose_form(app, needs_chat).await
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
    /// The prefill worker does both: the answer has one token.
    Answering(LoadGuard),
}

/// Feature of a prefill worker that answers requests without bootstrap fields.
const LOCAL_ANSWER: &str = "local_answer";

/// The prefill worker that gives the whole answer to a request, if one should and can.
fn choose_answering(app: &AppState, request: &RequestContext) -> Option<LoadGuard> {
    if request.scan.prompt_logprobs != Some(PromptLogprobs::Alone) {
        return None;
    }
    let excluded = request.attempts.retries.excluded_workers();
    let chosen = app
        .fleet
        .choose(Role::Prefill, &request.wanted(), excluded)
        .ok()?;
    let can_answer = chosen.candidate.description.has_feature(LOCAL_ANSWER);
    can_answer.then_some(chosen)
}

fn choose_placement(app: &AppState, request: &RequestContext) -> Result<Placement, RouteError> {
    if let Some(prefill) = choose_answering(app, request) {
        return Ok(Placement::Answering(prefill));
    }
    let wanted = request.wanted();
    let excluded = request.attempts.retries.excluded_workers();
    let (prefill, decode) = match app.fleet.choose_pair(&wanted, excluded) {
        Ok((prefill, decode)) => (Ok(prefill), decode),
        Err(
            err @ RouteError::NoWorker {
                role: Role::Prefill,
                ..
            },
        ) => match app.fleet.choose(Role::Decode, &wanted, excluded) {
            Ok(decode) => (Err(err), decode),
            Err(_) => return Err(err),
        },
        Err(err) => return Err(err),
    };
    let rule = app.config.pairs.local_rule();
    let reason = rule.decide(&local_view(request, &decode, prefill.is_ok()));
    match reason.filter(|_| can_prefill(app, &decode)) {
        // Dropping P's guard takes back the event that its policy was sent.
        Some(reason) => Ok(Placement::Local(decode, reason)),
        None => Ok(Placement::Pair(prefill?, decode)),
    }
}

fn local_view(request: &RequestContext, decode: &LoadGuard, has_prefill: bool) -> LocalView {
    let forecast = decode.why.forecast();
    let counted_tokens = request
        .routing
        .prompt
        .tokens
        .or(forecast.map(|forecast| forecast.prompt_tokens));
    let prompt_tokens = counted_tokens
        .unwrap_or_else(|| saturating_u32(request.scan.prompt_len() / BYTES_PER_TOKEN));
    let resumed_tokens = request
        .attempts
        .resume_point
        .as_ref()
        .map_or(0, |point| point.tokens);
    LocalView {
        prompt_tokens: prompt_tokens.saturating_add(saturating_u32(resumed_tokens)),
        cached_tokens: forecast.map_or(0, |forecast| forecast.cached_tokens),
        has_prefill,
        has_prompt_logprobs: request.scan.prompt_logprobs.is_some(),
    }
}

fn saturating_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Attempt at one decode worker that computes the prompt itself.
async fn attempt_local_prefill(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    decode: LoadGuard,
    reason: LocalPrefillReason,
) -> AttemptResult {
    app.metrics
        .local_prefills
        .with_label_values(&[reason.into_str()])
        .inc();
    request.record.prefill = None;
    let ranks = decode.candidate.rank.map(RankFields::for_local_prefill);
    attempt_alone(app, request, decode, ranks).await
}

/// Attempt at one prefill worker that answers itself.
async fn attempt_local_answer(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    prefill: LoadGuard,
) -> AttemptResult {
    app.metrics.local_answers.inc();
    request.record.prefill = Some((prefill.candidate.name.clone(), prefill.why));
    let ranks = prefill.candidate.rank.map(RankFields::for_prefill);
    attempt_alone(app, request, prefill, ranks).await
}

/// Attempt at one worker that does both phases.
async fn attempt_alone(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    chosen: LoadGuard,
    ranks: Option<RankFields>,
) -> AttemptResult {
    let candidate = &chosen.candidate;
    request.record.room = None;
    request.record.worker = Some((candidate.name.clone(), chosen.why));
    let needs_chat = needs_chat(request.scan.dialect, &candidate.description);
    let form = request.choose_form(app, needs_chat).await?;
    let input_ids = forwarded_ids(app, request, candidate);
    let members = ranks.map(|ranks| to_json_members(&ranks));
    let body = request.body_for(&form, &[], input_ids, &members.unwrap_or_default());
    let leg = build_leg(app, request, chosen, body);
    Ok((leg.open().await?, None))
}

async fn start_prefill(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    prefill: LoadGuard,
    decode: &LoadGuard,
) -> Result<PendingPrefill, RouteError> {
    let candidate = prefill.candidate.clone();
    let form = pair_form(app, request, &candidate, &decode.candidate).await?;
    request.record.prefill = Some((candidate.name.clone(), prefill.why));
    let rooms = RoomLease::take(app, request.scan.batch.unwrap_or(1), &candidate)?;
    request.record.room = rooms.rooms.first().copied();
    if let Some(room) = request.record.room {
        request.record.timeline.room(room);
    }
    let is_batch = request.scan.batch.is_some();
    let with_ranks = decode.candidate.rank.is_some();
    let meeting = BootstrapParams::new(&candidate, &rooms.rooms, is_batch, with_ranks);
    let body = meeting.body(app, request, &form, &candidate);
    let leg = build_leg(app, request, prefill, body);
    // Boxed: else `spawn` copies its 4 KB a dozen times.
    let draining = Box::pin(leg.drain(request.scan.wants_input_logprobs));
    let leg = PrefillAttempt {
        task: Some(tokio::spawn(draining)),
        response: None,
        app: app.clone(),
        prefill: candidate,
        rooms,
        pages_claimed: false,
    };
    Ok(PendingPrefill { leg, meeting, form })
}

/// Bootstrap parameters of a pair.
struct BootstrapParams {
    /// For both legs.
    fields: BootstrapFields,
    /// P's rank, if both workers have one.
    prefill_rank: Option<u32>,
}

impl BootstrapParams {
    fn new(prefill: &Candidate, rooms: &[u64], is_batch: bool, with_ranks: bool) -> Self {
        let worker = &prefill.worker;
        let port = worker.bootstrap_port(&prefill.description);
        Self {
            fields: BootstrapFields::new(&worker.url().host, port, rooms, is_batch),
            prefill_rank: prefill.rank.filter(|_| with_ranks),
        }
    }

    /// Body for one of the two.
    fn body(
        &self,
        app: &AppState,
        request: &RequestContext,
        form: &RequestForm,
        to: &Candidate,
    ) -> LegBody {
        let input_ids = forwarded_ids(app, request, to);
        let Some(prefill_rank) = self.prefill_rank else {
            let members = to_json_members(&self.fields);
            return request.body_for(form, &[], input_ids, &members);
        };
        let ranks = match (to.worker.role(), to.rank) {
            (Role::Prefill, _) => RankFields::for_prefill(prefill_rank),
            (_, Some(decode_rank)) => RankFields::for_decode(prefill_rank, decode_rank),
            (_, None) => RankFields::default(),
        };
        let members = to_json_members(&LegFields {
            bootstrap: &self.fields,
            ranks,
        });
        request.body_for(form, &[], input_ids, &members)
    }
}
