//! Attempt at a pair of vLLM workers: first P, then D with P's description of its blocks.
//!
//! 1. P gets the body with one token to generate, no stream, and `kv_transfer_params` that ask it
//!    to keep the blocks;
//! 2. its answer's `kv_transfer_params` go, byte for byte, with the client's own body to D.
//!
//! P gives its blocks away when they were read once, and nothing verifies the bytes of a second
//! reader: a failed decode leg is never retried with the same parameters. A request for several
//! answers goes to D alone, because its children would all read the blocks of one, and any vLLM
//! worker can prefill.

use std::sync::Arc;

use baton_text::dialect::body::ManagedField;
use baton_text::dialect::body::router_fields::DP_RANK_HEADER;
use http::{HeaderName, HeaderValue};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::dispatch::app::AppState;
use crate::dispatch::attempt::UpstreamAttempt;
use crate::dispatch::attempt_result::{AttemptFailure, AttemptResult};
use crate::dispatch::chat_form::RequestForm;
use crate::dispatch::context::{LegBody, RequestContext};
use crate::dispatch::disaggregated::pair_form;
use crate::dispatch::leg_setup::{build_leg, observe_overhead};
use crate::workers::load_guard::LoadGuard;

/// P is to keep the blocks for D.
const KEEP_BLOCKS: &str = "\"kv_transfer_params\":{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\
    \"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";
/// Which of its ranks a vLLM worker is to use.
const RANK_HEADER: HeaderName = HeaderName::from_static(DP_RANK_HEADER);

pub async fn attempt_pair(
    app: &Arc<AppState>,
    request: &mut RequestContext,
    prefill: LoadGuard,
    decode: LoadGuard,
) -> AttemptResult {
    request.record.room = None;
    request.record.worker = Some((decode.candidate.name.clone(), decode.why));
    let form = pair_form(app, request, &prefill.candidate, &decode.candidate).await?;
    let params = if request.scan.batch.is_some() {
        request.record.prefill = None;
        drop(prefill);
        app.metrics
            .local_prefills
            .with_label_values(&["batch"])
            .inc();
        None
    } else {
        request.record.prefill = Some((prefill.candidate.name.clone(), prefill.why));
        ask_prefill(app, request, &form, prefill).await?
    };
    let transfer_field = params
        .map(|params| format!("\"kv_transfer_params\":{params}"))
        .unwrap_or_default();
    let body = request.body_for(&form, &[], None, &transfer_field);
    let leg = build_ranked_leg(app, request, decode, body);
    Ok((leg.open().await?, None))
}

/// P's `kv_transfer_params`; `None`: it named none, so D computes the prompt.
async fn ask_prefill(
    app: &AppState,
    request: &RequestContext,
    form: &RequestForm,
    prefill: LoadGuard,
) -> Result<Option<Box<str>>, AttemptFailure> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow)]
        kv_transfer_params: Option<&'a RawValue>,
    }
    let dialect = match form {
        RequestForm::Own => request.scan.dialect,
        RequestForm::Chat(chat) => chat.scan.dialect,
    };
    let output = dialect.fields().vllm_prefill.unwrap_or_default();
    let fields = format!("{output},{KEEP_BLOCKS}");
    let body = request.body_for(form, &[ManagedField::Output], None, &fields);
    observe_overhead(app, request);
    let leg = build_ranked_leg(app, request, prefill, body);
    let mut opened = leg.open().await?;
    opened.guard.first_token();
    opened.guard.read_usage(opened.answer.pieces.iter());
    let answer = opened.answer.pieces.concat();
    let params = serde_json::from_slice::<Answer<'_>>(&answer)
        .ok()
        .and_then(|answer| answer.kv_transfer_params);
    if params.is_none() {
        let worker = &opened.guard.candidate.name;
        tracing::warn!(rid = request.record.rid, %worker, "no kv_transfer_params in the prefill worker's answer: decode computes the prompt; see its --kv-transfer-config");
    }
    Ok(params.map(|params| params.get().into()))
}

/// Build a leg whose rank is in the header that vLLM reads it from.
pub fn build_ranked_leg(
    app: &AppState,
    request: &RequestContext,
    chosen: LoadGuard,
    body: LegBody,
) -> UpstreamAttempt {
    let rank = chosen.candidate.rank;
    let mut leg = build_leg(app, request, chosen, body);
    if let Some(rank) = rank {
        leg.head.more.insert(RANK_HEADER, HeaderValue::from(rank));
    }
    leg
}
